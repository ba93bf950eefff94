"""The training script's side: knows the step, keeps the promise."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import wait as wait_futures
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from asymcheck import options
from asymcheck.agreement import Agreement
from asymcheck.device.state import State
from asymcheck.device.worlds import WorldChange
from asymcheck.errors import (
    CaptureError,
    CheckpointError,
    NoCheckpoint,
    OptionError,
    RankFailed,
)
from asymcheck.events import Sink, discard, guarded
from asymcheck.handles import Handle, SaveReport
from asymcheck.integrations.deepspeed.engine import adopt_engines
from asymcheck.outcomes import Outcomes, warn
from asymcheck.persister import who_persists
from asymcheck.planning.cadence import Cadence, Never
from asymcheck.planning.retention import CheckpointId, Retention
from asymcheck.planning.selection import Fidelity
from asymcheck.planning.strategies import Strategy
from asymcheck.planning.tiers import HasUrl, Tier
from asymcheck.ranks import Announcement, alike
from asymcheck.recovery import LEFT_TORN, RestoreReport, restore
from asymcheck.slot_start import InSlots
from asymcheck.storage.hierarchy import Hierarchy
from asymcheck.storage.store import Store
from asymcheck.termination import Termination
from asymcheck.tiering import TierBoard, TierState
from asymcheck.timekeeping import Timekeeper
from asymcheck.tracing import Tracer
from asymcheck.writing import RootWriter

if TYPE_CHECKING:  # not every build of torch has it
    from torch.distributed import ProcessGroup

__all__ = ["Checkpointer", "Handle", "RestoreReport", "SaveReport", "TierState"]


class Checkpointer(RootWriter):
    """Saves and restores the state of one training process, or of all ranks of one training.

    All calls come from the training thread, and with several ranks each rank makes the same
    ones. Parameters and optimizer state are copied behind the next forward and backward pass,
    and written by a process of the library's own; what fails there is raised by the next call,
    once.

    Args:
        root: A directory, or a URL such as ``memory://name``; a ``Store`` is taken as it is.
            A relative path and ``~`` are resolved now. Made where it is missing.
        state: Name to object: modules, optimizers, anything with ``state_dict`` and
            ``load_state_dict``, tensors, dicts and lists. Random number generators are saved
            without being asked for.
        strategy: A name out of ``asymcheck.strategies``, or a ``Strategy``.
        fidelity: ``exact``, ``moments`` or ``aggressive`` in place of the strategy's own: what
            encoding may change, see ``docs/fidelity.md``.
        every_steps: ``step(n)`` saves when ``n`` is a multiple of this.
        every_seconds: ``step(n)`` saves when this time has passed since the latest save.
        cadence: A rule instead, out of ``asymcheck.planning.cadence``, as ``OverheadBudget(0.02)``.
            With none of the three the strategy's own, which for most is to save only on request.
        keep_last: Keep the newest so many; ``None`` keeps all. The newest is always kept.
        keep_every: With ``keep_last``: keep also each step that is a multiple of this.
        keep_best: With ``keep_last``: keep also the best so many by ``monitor``.
        monitor: Name of the metric for ``keep_best``.
        mode: Whether a small (``min``) or large (``max``) metric is good.
        persist: Who writes: a ``process`` that finishes what is sealed although the trainer
            dies, or a ``thread`` of the trainer. ``auto`` takes a process where another
            process can open the store.
        on_error: Whether a background failure is raised by the next call or warned of;
            ``SupersededWriter`` is always raised.
        read_only: Never write and never claim the root, as for evaluation beside a training.
        grace_s: How long ``close`` and the exit of the interpreter wait for pending saves.
        sink: Receives every ``Span``, on the thread that did the work.
        trace: A file that gets a line for each durable checkpoint, for ``asymcheck explain``;
            with several ranks rank 0 writes it.
        ranks: Who saves one checkpoint together: a process group, ``None`` for all ranks where
            ``torch.distributed`` is initialized, ``alone`` for this process whatever there is.
        replicated: Names in ``state`` of which all ranks hold the same, written once; what is
            in ``DistributedDataParallel`` is known without. See ``docs/distributed.md``.
        timeout_s: How long a rank waits for another before all raise ``RankFailed``, and for a
            tier at the start.
        tiers: Further places for copies, nearest first: each a ``Tier``, or a directory or URL.
            See ``docs/tiers.md``.

    Raises:
        OptionError: An argument is wrong, or the root holds something else.
        RankFailed: It failed on another rank.
        StateError: Something in ``state`` cannot be saved.
        StoreError: The root cannot be used.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | Store,
        *,
        state: Mapping[str, object],
        strategy: str | Strategy = "asymcheck",
        fidelity: Fidelity | None = None,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        cadence: Cadence | None = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: int | None = None,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        persist: Literal["auto", "process", "thread"] = "auto",
        on_error: Literal["raise", "warn"] = "raise",
        read_only: bool = False,
        grace_s: float = 60.0,
        sink: Sink = discard,
        trace: str | os.PathLike[str] | None = None,
        ranks: Literal["alone"] | ProcessGroup | None = None,
        replicated: Sequence[str] = (),
        timeout_s: float = 60.0,
        tiers: Sequence[str | os.PathLike[str] | HasUrl | Tier] = (),
    ) -> None:
        super().__init__()
        self._timeout_s = options.seconds("timeout_s", timeout_s)
        self._ranks = options.as_ranks(ranks, self._timeout_s)
        with alike(self._ranks, "the arguments"):
            self._strategy = options.one_world(options.a_strategy(strategy, fidelity), self._ranks)
            chosen = options.a_cadence(every_steps, every_seconds, cadence, self._strategy.cadence)
            self._saves_unasked = not isinstance(chosen, Never)
            self._timekeeper = Timekeeper(chosen, self._strategy.admission.max_in_flight)
            self._retention = Retention(keep_last, keep_every, keep_best, monitor, mode)
            on_error = options.one_of("on_error", on_error, ("raise", "warn"))
            self._read_only = options.flag("read_only", read_only)
            self._grace_s = options.seconds("grace_s", grace_s)
            self._sink = guarded(options.a_call("sink", sink))
            self._tracer: Tracer | None = None
            if trace is not None and not self._read_only and self._ranks.rank == 0:
                path = options.a_file("trace", trace)
                self._sink = self._tracer = Tracer(path, self._sink, self._strategy)
            self._outcomes = Outcomes(on_error, self._timekeeper, self._tracer)
            self._store = options.as_store(root)
            self._tiers = options.as_tiers(tiers, self._store)
            self._board = TierBoard([tier.label for tier, _ in self._tiers])
            self._persist = who_persists(persist, root, self._store, self._tiers)
            rank, world = self._ranks.rank, self._ranks.world
            objects = adopt_engines(options.named_objects(state), rank, world)
            names = options.names_of("replicated", replicated, objects)
            self._state = State(objects, rank=rank, world=world, replicated=names)
        self._open_root()
        self._torn = False
        self._agreed = Agreement(
            self._ranks,
            options.is_measured(chosen),
            Termination(self, self._ranks.world > 1 and not self._read_only),
        )
        self.report = RestoreReport(step=0)
        """What the latest ``restore`` did."""

    # --- restoring ----------------------------------------------------------

    def restore(
        self,
        step: int | None = None,
        *,
        resume: Literal["auto", "must", "never"] = "auto",
        strict: bool = True,
        dtype_policy: Literal["exact", "cast"] = "exact",
        on_world_change: WorldChange = "resplit",
    ) -> int:
        """Load the newest checkpoint that is whole into the live state; blocks.

        Becomes the writer of the root: another job that still writes there is stopped by
        ``SupersededWriter`` at its next save.

        Args:
            step: Which checkpoint, ``None`` for the newest. Training on from an older one
                starts a branch; later steps of the branch left behind are removed after the
                new branch's first commit.
            resume: ``auto`` starts fresh where there is no checkpoint, ``must`` raises then,
                ``never`` starts fresh and leaves what is there alone.
            strict: Whether any difference in keys, shapes and dtypes is an error.
            dtype_policy: ``cast`` converts tensors of another dtype.
            on_world_change: What becomes of generators and other state of each rank where
                another number of ranks had saved: ``resplit`` spreads what there is,
                ``restart`` leaves them as they are now, ``error`` refuses.

        Returns:
            The restored step, 0 on a fresh start; ``report`` tells the rest.

        Raises:
            NoCheckpoint: None is there, with ``resume="must"`` or a ``step``.
            CorruptCheckpoint: There are checkpoints and none is whole.
            StoreError: There are some, none could be loaded, and one cannot be read now.
            IncompatibleCheckpoint: It does not match the live state; nothing was changed.
            RankFailed: Another rank could not.
        """
        options.one_of("resume", resume, ("auto", "must", "never"))
        options.one_of("dtype_policy", dtype_policy, ("exact", "cast"))
        options.one_of("on_world_change", on_world_change, ("error", "resplit", "restart"))
        options.flag("strict", strict)
        if step is not None:
            options.a_step(step, 0)
            if resume == "never":
                raise OptionError("resume: expected 'auto' or 'must' with a step, found 'never'")
        self.wait()
        self._settle_others()
        hierarchy: Hierarchy | None = None
        self._in_slots = InSlots()
        if resume == "never":
            self._take_over()
            self.report = RestoreReport(step=0)
        else:
            torn, self._torn = self._torn, True  # until it is over: it may be interrupted
            try:
                hierarchy = self._hierarchy()
                how = (step, strict, dtype_policy == "cast", on_world_change)
                self.report = self._load_nearest(hierarchy, *how)
            except CheckpointError as failure:
                self._torn = torn or isinstance(failure, LEFT_TORN)
                absent = isinstance(failure, NoCheckpoint)
                if not absent or step is not None or resume == "must" or self._read_only:
                    raise
                if hierarchy is not None and hierarchy.copies.notes.unreachable:
                    warn(f"training starts from nothing (resume='must' would refuse): {failure}")
                self.report = RestoreReport(step=0)
        self._torn = False
        found = self.report
        if self._finishing is None:
            parent = None if found.attempt is None else CheckpointId(found.attempt, found.step)
            self._start_attempt(parent)
        if hierarchy is not None:
            self.report = self._in_slots.added_to(self._heal(hierarchy, found))
        if not self._read_only and self._finishing is None:
            # A persister that is started now is there at the first save. Not before tiers were
            # mended: it removes what is half written there.
            self._capturing()
        self._timekeeper.begin(found.step)
        return found.step

    def _load_nearest(
        self,
        hierarchy: Hierarchy,
        step: int | None,
        strict: bool,
        cast: bool,
        on_world_change: WorldChange,
    ) -> RestoreReport:
        """Restore out of shared memory; where that cannot be, make durable what is there first."""

        def load(places: Hierarchy, torn: bool) -> RestoreReport:
            return restore(
                places,
                self._state,
                step=step,
                strict=strict,
                cast=cast,
                sink=self._sink,
                rank=self._ranks.rank,
                world=self._ranks.world,
                on_world_change=on_world_change,
                exchange=self._ranks.exchange,
                torn=torn,
            )

        report = self._from_slots(hierarchy, step, load)
        if report is None:
            self._take_over()
            report = load(hierarchy, self._in_slots.torn)
        return report

    @property
    def cadence_report(self) -> str:
        """How often ``step`` saves as things are, and why."""
        return self._timekeeper.why

    def steps(self) -> list[int]:
        """Steps of the checkpoints that ``restore`` would choose from, oldest first."""
        self._await_finishing(None)
        try:
            return [c.step for c in self._hierarchy().lineage()]
        except NoCheckpoint:
            return []

    # --- saving -------------------------------------------------------------

    def step(self, step: int, metrics: Mapping[str, Any] | None = None) -> Handle | None:
        """Tell that update ``step`` is done; saves when it is time.

        Args:
            step: Updates done so far, counted from 1.
            metrics: Name to number, or to a tensor of one element; read only when this saves.

        Returns:
            The handle of the save, ``None`` when there was none.

        Raises:
            CheckpointError: A background failure since the latest call, or as ``save``.
        """
        self._note_step(options.a_step(step))
        self._timekeeper.note_step(step)
        self._surface_errors()
        self._agreed.hear(step)
        if not self._agreed.due(
            step, lambda: self._timekeeper.due(step, len(self._outcomes.pending))
        ):
            if self._snapshotter is not None and self._saves_unasked:
                self._snapshotter.prepare()
                self._snapshotter.between_saves()
            return None
        return self._save(step, metrics, self._strategy.admission.when_full, is_asked=False)

    def save(self, step: int, metrics: Mapping[str, Any] | None = None) -> Handle:
        """Save the state after update ``step``, whatever the cadence says.

        Blocks until the state is copied, and before that until a slot is free; with a
        strategy that persists ``before`` training goes on, until the checkpoint is durable.

        Args:
            step: Updates done so far. One at or before the latest saved step starts a branch,
                as ``restore(step)`` does.
            metrics: See ``step``.

        Returns:
            The handle.

        Raises:
            StateError: Something in the state cannot be saved; nothing was written.
            SupersededWriter: Another job has claimed the root, as an earlier save found out.
            StoreError: No attempt can be claimed; nothing was written.
            CheckpointError: A background failure since the latest call.
        """
        self._check_open()
        self._note_step(options.a_step(step))
        self._surface_errors()
        self._agreed.hear(step)
        handle = self._save(step, metrics, "wait", is_asked=True)
        assert handle is not None
        return handle

    def _save(
        self,
        step: int,
        metrics: Mapping[str, Any] | None,
        when_full: Literal["wait", "skip", "raise"],
        *,
        is_asked: bool,
    ) -> Handle | None:
        self._check_open()
        if self._read_only:
            raise OptionError("save: this Checkpointer is read_only")
        if self._torn:
            raise CaptureError(
                "save: a failed restore left the live state overwritten in part; build it anew, "
                "or restore() another checkpoint"
            )
        numbers = options.read_metrics(metrics)
        leaving = self._agreed.leaving
        if leaving is not None:
            when_full = "wait"
            self._wait_for_pending(self._grace_s)
        handle = self._lost(step, self._timekeeper.last_step, is_asked=is_asked)
        if handle is not None:
            self._timekeeper.note_lost()
        else:
            if self._tracer is not None:
                self._tracer.cadence = self.cadence_report
            handle = self._capture(step, numbers, when_full)
            if handle is None:
                return None
            self._timekeeper.note_save(step)
        self._outcomes.pending.append(handle)
        if self._strategy.persist == "before":
            self.fence()
            wait_futures([handle.durable])
            self._surface_errors()
        if leaving is not None:
            self._leave(leaving, step)
        return handle

    def _leave(self, asked: Announcement, step: int) -> None:
        """A rank was asked to end, so all end together, with what was just saved."""
        failure = ""
        try:
            self._end()
        except CheckpointError as bad:
            failure = f"{type(bad).__name__}: {bad}"
        told = self._ranks.exchange(f"the end at step {step}", failure)
        self._part()
        why = next((f"rank {r}: {bad}" for r, bad in enumerate(told) if bad), "")
        raise RankFailed(
            (asked.rank,),
            f"rank {asked.rank} was ended by {asked.why}: "
            + (f"step {step} could not be saved: {why}" if why else f"step {step} is durable")
            + "; start the job again to go on from there",
        )

    def fence(self) -> None:
        """Return once no live tensor is being read any more; blocks for what is left to copy.

        Call it before changing parameters by hand: swapping weights for an evaluation, a
        broadcast, an update without an optimizer, the replay of a CUDA graph. An optimizer's
        ``step()`` does not need it.
        """
        self._check_open()
        if self._snapshotter is not None:
            self._snapshotter.fence()

    @contextmanager
    def update(self) -> Iterator[None]:
        """A block that changes parameters by hand: fences first."""
        self.fence()
        yield

    def wait(self, timeout_s: float | None = None, *, tier: str | None = None) -> bool:
        """Wait until every save so far is durable or failed, and the newest is in the store.

        Args:
            timeout_s: How long at most; ``None`` without end.
            tier: Name of a tier that the newest goes to as well, whether it is due there or not;
                it is waited for as long once more.

        Returns:
            Whether all are done, and the newest is in that tier.

        Raises:
            CheckpointError: The first background failure that was not raised yet.
        """
        self._check_process()
        limit_s = None if timeout_s is None else options.seconds("timeout_s", timeout_s)
        names = [] if tier is None else [options.a_tier(tier, self._tiers)]
        done = self._settle(limit_s)
        return all([done, *(self._await_tier(name, limit_s) for name in names)])

    def tier_states(self) -> tuple[TierState, ...]:
        """How far each tier is behind, and what was done for it, nearest first; never blocks.

        Copies are made by rank 0, which knows; other ranks know the names alone.
        """
        return self._board.states()

    def close(self) -> None:
        """Drain within ``grace_s``, end the thread, raise the first background failure.

        Calling it again does nothing.
        """
        if self._closed or os.getpid() != self._pid:
            return  # the checkpointer of the parent of a fork is not the child's to close
        try:
            self._end_behind()
        finally:
            try:
                self._agreed.meet("close", self._end, self._grace_s)
            finally:
                self._part()

    def _part(self) -> None:
        """Say good-bye to the other ranks, unless a close was interrupted and may come again."""
        if self._closed:
            self._ranks.close()
            self._agreed.over()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None or self._ranks.world == 1:
                self.close()
            else:
                self._abandon(error)
        except CheckpointError as failure:
            if error is None:
                raise
            error.add_note(f"closing the Checkpointer failed too: {failure}")

    def _abandon(self, error: BaseException) -> None:
        """This rank leaves, others perhaps not: they are told, and not waited for."""
        with suppress(RankFailed):
            self._ranks.ask("raise", self._latest_step, f"it ended with {error!r}")
        try:
            self._end()
        finally:
            self._part()
