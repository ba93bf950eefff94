"""The training script's side: knows the step, keeps the promise."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import wait as wait_futures
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from asymcheck import options
from asymcheck.device.state import State
from asymcheck.endings import Ending, settle_others
from asymcheck.errors import (
    CaptureError,
    CheckpointError,
    NoCheckpoint,
    OptionError,
    StoreError,
)
from asymcheck.events import Sink, discard, guarded
from asymcheck.handles import Handle, SaveReport
from asymcheck.handover import take_over
from asymcheck.memory.arena import SHARED_MEMORY, Arena
from asymcheck.outcomes import Outcomes, warn
from asymcheck.persister import is_own_memory, start_persister, who_persists
from asymcheck.planning.cadence import Cadence, Never
from asymcheck.planning.retention import CheckpointId, Retention
from asymcheck.planning.selection import Fidelity
from asymcheck.planning.strategies import Strategy
from asymcheck.recovery import RestoreReport, TornRestore, restore
from asymcheck.snapshotter import Snapshotter
from asymcheck.storage.repository import Repository, create_repository, open_repository
from asymcheck.storage.store import Store
from asymcheck.timekeeping import Timekeeper
from asymcheck.tracing import Tracer

__all__ = ["Checkpointer", "Handle", "RestoreReport", "SaveReport"]


class Checkpointer:
    """Saves and restores the state of one training process.

    All calls come from the training thread. Parameters and optimizer state are copied behind
    the next forward and backward pass, and written by a process of the library's own; what
    fails there is raised by the next call, once.

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
        on_error: Whether a background failure is raised by the next call or warned of.
        read_only: Never write and never claim the root, as for evaluation beside a training.
        grace_s: How long ``close`` and the exit of the interpreter wait for pending saves.
        sink: Receives every ``Span``, on the thread that did the work.
        trace: A file that gets a line for each durable checkpoint, for ``asymcheck explain``.

    Raises:
        OptionError: An argument is wrong, or the root holds something else.
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
    ) -> None:
        options.refuse_many_ranks()
        self._strategy = options.a_strategy(strategy, fidelity)
        chosen = options.a_cadence(every_steps, every_seconds, cadence, self._strategy.cadence)
        self._saves_unasked = not isinstance(chosen, Never)
        self._timekeeper = Timekeeper(chosen, self._strategy.admission.max_in_flight)
        self._retention = Retention(keep_last, keep_every, keep_best, monitor, mode)
        on_error = options.one_of("on_error", on_error, ("raise", "warn"))
        self._read_only = options.flag("read_only", read_only)
        self._grace_s = options.seconds("grace_s", grace_s)
        self._sink = guarded(options.a_call("sink", sink))
        self._tracer: Tracer | None = None
        if trace is not None and not self._read_only:
            path = options.a_file("trace", trace)
            self._sink = self._tracer = Tracer(path, self._sink, self._strategy)
        self._outcomes = Outcomes(on_error, self._timekeeper, self._tracer)
        self._state = State(options.named_objects(state))
        self._store = options.as_store(root)
        self._persist = who_persists(persist, root, self._store)
        self._repository = self._open_repository()
        self._snapshotter: Snapshotter | None = None
        self._attempt: int | None = None
        self._torn = False
        self._closed = False
        self._pid = os.getpid()
        self._ending: Ending | None = None
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

        Returns:
            The restored step, 0 on a fresh start; ``report`` tells the rest.

        Raises:
            NoCheckpoint: None is there, with ``resume="must"`` or a ``step``.
            CorruptCheckpoint: There are checkpoints and none is whole.
            IncompatibleCheckpoint: It does not match the live state; nothing was changed.
        """
        options.one_of("resume", resume, ("auto", "must", "never"))
        options.one_of("dtype_policy", dtype_policy, ("exact", "cast"))
        options.flag("strict", strict)
        if step is not None:
            options.a_step(step, 0)
            if resume == "never":
                raise OptionError("resume: expected 'auto' or 'must' with a step, found 'never'")
        self.wait()
        self._take_over()
        if resume == "never":
            self.report = RestoreReport(step=0)
        else:
            torn, self._torn = self._torn, True  # until it is over: it may be interrupted
            try:
                self.report = restore(
                    self._existing(),
                    self._state,
                    step=step,
                    strict=strict,
                    cast=dtype_policy == "cast",
                    sink=self._sink,
                )
            except CheckpointError as failure:
                self._torn = torn or isinstance(failure, TornRestore)
                absent = isinstance(failure, NoCheckpoint)
                if not absent or step is not None or resume == "must" or self._read_only:
                    raise
                self.report = RestoreReport(step=0)
        self._torn = False
        found = self.report
        parent = None if found.attempt is None else CheckpointId(found.attempt, found.step)
        self._start_attempt(parent)
        self._timekeeper.begin(found.step)
        return found.step

    @property
    def cadence_report(self) -> str:
        """How often ``step`` saves as things are, and why."""
        return self._timekeeper.why

    def steps(self) -> list[int]:
        """Steps of the checkpoints that ``restore`` would choose from, oldest first."""
        try:
            return [c.step for c in self._existing().lineage()]
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
        if not self._timekeeper.due(step, len(self._outcomes.pending)):
            if self._snapshotter is not None and self._saves_unasked:
                self._snapshotter.prepare()
                self._snapshotter.between_saves()
            return None
        return self._save(step, metrics, self._strategy.admission.when_full)

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
            SupersededWriter: Another job has claimed the root.
            CheckpointError: A background failure since the latest call.
        """
        handle = self._save(step, metrics, "wait")
        assert handle is not None
        return handle

    def _save(
        self,
        step: int,
        metrics: Mapping[str, Any] | None,
        when_full: Literal["wait", "skip", "raise"],
    ) -> Handle | None:
        self._check_open()
        if self._read_only:
            raise OptionError("save: this Checkpointer is read_only")
        options.a_step(step)
        if self._torn:
            raise CaptureError(
                "save: a failed restore left the live state overwritten in part; build it anew, "
                "or restore() another checkpoint"
            )
        self._surface_errors()
        self._note_step(step)
        numbers = options.read_metrics(metrics)
        attempt = self._take_attempt(step)
        if self._tracer is not None:
            self._tracer.cadence = self.cadence_report
        handle = self._capturing().capture(CheckpointId(attempt, step), numbers, when_full)
        if handle is None:
            return None
        self._outcomes.pending.append(handle)
        self._timekeeper.note_save(step)
        if self._strategy.persist == "before":
            self._capturing().fence()
            wait_futures([handle.durable])
            self._surface_errors()
        return handle

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

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until every save so far is durable or failed, and the newest is in the store.

        Args:
            timeout_s: How long at most; ``None`` without end.

        Returns:
            Whether all are done.

        Raises:
            CheckpointError: The first background failure that was not raised yet.
        """
        self._check_process()
        limit_s = None if timeout_s is None else options.seconds("timeout_s", timeout_s)
        if self._snapshotter is not None:
            self._outcomes.pending += self._snapshotter.drain()
        wait_futures([h.durable for h in self._outcomes.pending], limit_s)
        self._surface_errors()
        return not self._outcomes.pending

    def close(self) -> None:
        """Drain within ``grace_s``, end the thread, raise the first background failure.

        Calling it again does nothing.
        """
        if self._closed or os.getpid() != self._pid:
            return  # the checkpointer of the parent of a fork is not the child's to close
        in_time = self._snapshotter is None or self._snapshotter.close(self._grace_s)
        self._closed = True  # not before: a close that was interrupted can be made again
        if self._ending is not None:
            self._ending.over()
        self._surface_errors()
        left = [handle.step for handle in self._outcomes.pending]
        if left or not in_time:
            raise StoreError(
                f"close: saves of steps {left} are still pending after "
                f"grace_s={self._grace_s} seconds; what is sealed goes on without us",
                retryable=False,
            )

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except CheckpointError as failure:
            if error is None:
                raise
            error.add_note(f"closing the Checkpointer failed too: {failure}")

    # --- inside -------------------------------------------------------------

    def _open_repository(self) -> Repository | None:
        if not self._read_only:
            return create_repository(self._store)
        try:
            return open_repository(self._store)
        except NoCheckpoint:
            return None

    def _existing(self) -> Repository:
        if self._repository is None:
            self._repository = open_repository(self._store)
        return self._repository

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise OptionError(
                f"this Checkpointer belongs to process {self._pid}, this is its fork "
                f"{os.getpid()}: make one in here, on a root of its own"
            )

    def _check_open(self) -> None:
        self._check_process()
        if self._closed:
            raise OptionError("this Checkpointer is closed")

    def _forget(self) -> None:
        """What it started was closed for another one that writes the root from now on."""
        self._snapshotter = None

    def _take_over(self) -> None:
        """Finish what others left: an older one of this process, a dead trainer of this run."""
        if self._read_only:
            return
        for message in settle_others(self, self._existing().run, self._store.url):
            warn(message)
        take_over(self._existing(), self._retention, self._sink, self._grace_s, warn)

    def _start_attempt(self, parent: CheckpointId | None) -> None:
        """Claim an attempt that continues from ``parent``; nothing is pending."""
        if not self._read_only:
            self._attempt = self._existing().claim(parent).number
            self._capturing()  # a persister that is started now is there at the first save

    def _take_attempt(self, step: int) -> int:
        """The attempt to save under, so that ``(attempt, step)`` was never used."""
        repository = self._existing()
        if self._attempt is None:
            self._take_over()
            found = repository.lineage()
            if found:
                raise OptionError(
                    f"save: {self._store.url} holds checkpoints up to step {found[-1].step}: call "
                    f"restore() first, or restore(resume='never') to start beside them"
                )
            self._start_attempt(None)
        elif step <= self._timekeeper.last_step:
            # Back in time without a restore: a branch, from the newest checkpoint before.
            self.wait()
            repository.check_writer(self._attempt)
            before = [c for c in repository.lineage(attempt=self._attempt) if c.step < step]
            # Before every checkpoint: from step 0 of this attempt, so that it is the same tree.
            self._start_attempt(before[-1] if before else CheckpointId(self._attempt, 0))
        else:
            repository.check_writer(self._attempt)
        assert self._attempt is not None
        return self._attempt

    def _capturing(self) -> Snapshotter:
        if self._snapshotter is None:
            repository = self._existing()
            arena = Arena(
                repository.run,
                0,
                self._strategy.admission.max_in_flight,
                warn,
                # Slots need a name where another process can make something of them.
                (Path(),) if is_own_memory(self._store) else (SHARED_MEMORY, Path()),
                self._store.url,
                self._strategy.admission.ring_bytes,
            )
            persister = start_persister(
                self._persist,
                repository,
                arena,
                self._retention,
                self._sink,
                self._grace_s,
                self._strategy,
            )
            self._snapshotter = Snapshotter(
                self._state,
                self._strategy,
                arena,
                persister,
                repository,
                self._retention,
                self._sink,
                self._tracer,
            )
            self._ending = Ending(self, repository.run, self._snapshotter, self._grace_s)
        return self._snapshotter

    def _note_step(self, step: int) -> None:
        self._check_process()
        if self._snapshotter is not None:
            self._snapshotter.latest_step = step
            self._snapshotter.settle()

    def _surface_errors(self) -> None:
        if self._snapshotter is not None:
            self._outcomes.pending += self._snapshotter.late()
        self._outcomes.surface(self._snapshotter)
