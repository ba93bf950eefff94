"""The training script's side: knows the step, keeps the promise."""

from __future__ import annotations

import importlib.metadata
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import wait as wait_futures
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic, perf_counter
from types import TracebackType
from typing import Any, Literal

import numpy as np
import torch

from asymcheck.device.snapshot import copy_all, place
from asymcheck.device.state import State
from asymcheck.errors import (
    CaptureError,
    CheckpointError,
    NoCheckpoint,
    OptionError,
    StoreError,
)
from asymcheck.events import Sink, Span, Stage, discard, timed
from asymcheck.memory.arena import Arena, Slot
from asymcheck.persist import Durable, PersistThread, Sealed
from asymcheck.planning.policy import Cadence, EverySeconds, EverySteps, Never
from asymcheck.planning.retention import CheckpointId, Retention
from asymcheck.planning.strategies import Strategy, resolve
from asymcheck.recovery import CheckpointWarning, RestoreReport, TornRestore, restore
from asymcheck.storage.names import MAX_STEP
from asymcheck.storage.repository import Repository, create_repository, open_repository
from asymcheck.storage.store import Store, open_store


@dataclass(frozen=True)
class Handle:
    """A save under way.

    Attributes:
        step: The step saved.
        captured: Done once the state is copied; training may change it from then on.
        durable: Done once the checkpoint is committed; holds what it took, or the error.
    """

    step: int
    captured: Future[None]
    durable: Future[Durable]


class Checkpointer:
    """Saves and restores the state of one training process.

    All calls come from the training thread. Encoding and writing happen on a thread of the
    library's own; what fails there is raised by the next call, once.

    Args:
        root: A directory, or a URL such as ``memory://name``; a ``Store`` is taken as it is.
            A relative path and ``~`` are resolved now. Made where it is missing.
        state: Name to object: modules, optimizers, anything with ``state_dict`` and
            ``load_state_dict``, tensors, dicts and lists. Random number generators are saved
            without being asked for.
        strategy: A name out of ``asymcheck.strategies``, or a ``Strategy``.
        every_steps: ``step(n)`` saves when ``n`` is a multiple of this.
        every_seconds: ``step(n)`` saves when this time has passed since the latest save.
        keep_last: Keep the newest so many; ``None`` keeps all. The newest is always kept.
        keep_every: With ``keep_last``: keep also each step that is a multiple of this.
        keep_best: With ``keep_last``: keep also the best so many by ``monitor``.
        monitor: Name of the metric for ``keep_best``.
        mode: Whether a small (``min``) or large (``max``) metric is good.
        on_error: Whether a background failure is raised by the next call or warned of.
        read_only: Never write and never claim the root, as for evaluation beside a training.
        grace_s: How long ``close`` and the exit of the interpreter wait for pending saves.
        sink: Receives every ``Span``, on the thread that did the work.

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
        every_steps: int | None = None,
        every_seconds: float | None = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: int | None = None,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        on_error: Literal["raise", "warn"] = "raise",
        read_only: bool = False,
        grace_s: float = 60.0,
        sink: Sink = discard,
    ) -> None:
        _refuse_many_ranks()
        self._strategy = resolve(strategy)
        self._cadence = _cadence(every_steps, every_seconds)
        self._retention = _retention(keep_last, keep_every, keep_best, monitor, mode)
        if on_error not in ("raise", "warn"):
            raise OptionError(f"on_error: expected 'raise' or 'warn', found {on_error!r}")
        self._on_error = on_error
        self._read_only = read_only
        self._grace_s = grace_s
        self._sink = sink
        self._state = State(state)
        self._store = open_store(os.fspath(root)) if isinstance(root, str | os.PathLike) else root
        self._repository = self._open_repository()
        self._arena = Arena(self._strategy.admission.max_in_flight)
        self._persister: PersistThread | None = None
        self._attempt: int | None = None
        self._parent: CheckpointId | None = None
        self._restored = False
        self._torn = False
        self._closed = False
        self._last_step = 0
        self._last_save_s = monotonic()
        self._unread: list[Handle] = []
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
        if resume not in ("auto", "must", "never"):
            raise OptionError(f"resume: expected 'auto', 'must' or 'never', found {resume!r}")
        if dtype_policy not in ("exact", "cast"):
            raise OptionError(f"dtype_policy: expected 'exact' or 'cast', found {dtype_policy!r}")
        if step is not None and resume == "never":
            raise OptionError("resume: expected 'auto' or 'must' with a step, found 'never'")
        self.wait()
        if resume == "never":
            self.report = RestoreReport(step=0)
        else:
            try:
                self.report = restore(
                    self._existing(),
                    self._state,
                    step=step,
                    strict=strict,
                    cast=dtype_policy == "cast",
                    sink=self._sink,
                )
            except NoCheckpoint:
                if step is not None or resume == "must" or self._read_only:
                    raise
                self.report = RestoreReport(step=0)
            except TornRestore:
                self._torn = True
                raise
        self._torn = False
        self._restored = True
        found = self.report
        parent = None if found.attempt is None else CheckpointId(found.attempt, found.step)
        self._start_attempt(parent)
        self._last_step = found.step
        self._last_save_s = monotonic()
        return found.step

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
        self._surface_errors()
        since_s = monotonic() - self._last_save_s
        if not self._cadence.due(step=step, last_step=self._last_step, since_last_s=since_s):
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
        if type(step) is not int or not 1 <= step <= MAX_STEP:
            raise OptionError(f"step: expected an integer in [1, {MAX_STEP}], found {step!r}")
        if self._torn:
            raise CaptureError(
                "save: a failed restore left the live state overwritten in part; build it anew, "
                "or restore() another checkpoint"
            )
        self._surface_errors()
        start_s = perf_counter()
        numbers = _read_metrics(metrics)
        self._take_attempt(step)
        slot = self._reserve(step, when_full)
        if slot is None:
            return None
        handle = self._capture(step, numbers, slot)
        if self._strategy.persist == "before":
            wait_futures([handle.durable])
            self._surface_errors()
        self._sink(Span(Stage.STALL, step, start_s, perf_counter() - start_s))
        return handle

    def fence(self) -> None:
        """Return once no live tensor is being read any more. Call it before changing
        parameters by hand; an optimizer's update does not need it.
        """
        self._check_open()

    @contextmanager
    def update(self) -> Iterator[None]:
        """A block that changes parameters by hand: fences first."""
        self.fence()
        yield

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until every save so far is durable or failed.

        Args:
            timeout_s: How long at most; ``None`` without end.

        Returns:
            Whether all are done.

        Raises:
            CheckpointError: The first background failure that was not raised yet.
        """
        wait_futures([h.durable for h in self._unread], timeout_s)
        self._surface_errors()
        return not self._unread

    def close(self) -> None:
        """Drain within ``grace_s``, end the thread, raise the first background failure.

        Calling it again does nothing.
        """
        if self._closed:
            return
        self._closed = True
        if self._persister is not None:
            in_time = self._persister.close(self._grace_s)
            self._surface_errors()
            if not in_time:
                raise StoreError(
                    f"close: saves are still pending after grace_s={self._grace_s} seconds; they "
                    f"go on in the background while the process lives",
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

    def _check_open(self) -> None:
        if self._closed:
            raise OptionError("this Checkpointer is closed")

    def _start_attempt(self, parent: CheckpointId | None) -> None:
        """Claim an attempt that continues from ``parent``; nothing is pending."""
        self._parent = parent
        if not self._read_only:
            self._attempt = self._existing().claim(parent).number

    def _take_attempt(self, step: int) -> None:
        """Make sure that ``(attempt, step)`` is an identity that was never used."""
        repository = self._existing()
        if self._attempt is None:
            found = repository.lineage()
            if found:
                raise OptionError(
                    f"save: {self._store.url} holds checkpoints up to step {found[-1].step}: call "
                    f"restore() first, or restore(resume='never') to start beside them"
                )
            self._start_attempt(None)
        elif step <= self._last_step:
            # Back in time without a restore: a branch, from the newest checkpoint before.
            self.wait()
            repository.check_writer(self._attempt)
            before = [c for c in repository.lineage(attempt=self._attempt) if c.step < step]
            self._start_attempt(before[-1] if before else self._root_parent())
        else:
            repository.check_writer(self._attempt)

    def _root_parent(self) -> CheckpointId | None:
        """Parent of a branch that starts before every checkpoint: step 0 of this attempt, so
        that the new branch still belongs to the same tree.
        """
        return None if self._attempt is None else CheckpointId(self._attempt, 0)

    def _reserve(self, step: int, when_full: Literal["wait", "skip", "raise"]) -> Slot | None:
        slot = self._arena.reserve(None if when_full == "wait" else 0.0)
        if slot is None:
            why = (
                f"{self._strategy.admission.max_in_flight} saves are still under way: save less "
                f"often, or let admission wait"
            )
            if when_full == "raise":
                raise CaptureError(f"step {step}: {why}")
            self._sink(Span(Stage.CAPTURE, step, perf_counter(), 0.0, error=f"skipped: {why}"))
        return slot

    def _capture(self, step: int, metrics: Mapping[str, float], slot: Slot) -> Handle:
        assert self._attempt is not None
        captured: Future[None] = Future()
        try:
            collected = self._state.collect()
            placed = place(collected)
            with timed(self._sink, Stage.CAPTURE, step, placed.layout.image_bytes):
                slot.grow(placed.layout.image_bytes)
                copy_all(collected, placed, slot.view)
        except BaseException:
            self._arena.free(slot)
            raise
        captured.set_result(None)
        sealed = Sealed(
            at=CheckpointId(self._attempt, step),
            slot=slot,
            leaves=placed.leaves,
            aliases=collected.aliases,
            chunks=placed.layout.chunks,
            metrics=metrics,
            versions=_versions(),
            created_s=time.time(),
            sealed_s=perf_counter(),
        )
        if self._persister is None:
            self._persister = PersistThread(
                self._existing(), self._arena, self._retention, self._sink, self._grace_s
            )
        handle = Handle(step, captured, self._persister.submit(sealed))
        self._unread.append(handle)
        self._last_step = step
        self._last_save_s = monotonic()
        return handle

    def _surface_errors(self) -> None:
        """Raise or warn of background failures, each once."""
        done = [h for h in self._unread if h.durable.done()]
        self._unread = [h for h in self._unread if not h.durable.done()]
        failures = [e for h in done if (e := h.durable.exception()) is not None]
        if not failures:
            return
        if self._on_error == "warn":
            for failure in failures:
                notes = "; ".join(getattr(failure, "__notes__", ()))
                warnings.warn(f"{failure} ({notes})", CheckpointWarning, stacklevel=3)
            return
        for other in failures[1:]:
            failures[0].add_note(f"also failed: {other}")
        raise failures[0]


def _refuse_many_ranks() -> None:
    dist = torch.distributed
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise OptionError(
            f"torch.distributed: this release checkpoints one rank, found a world of "
            f"{dist.get_world_size()}"
        )


def _cadence(every_steps: int | None, every_seconds: float | None) -> Cadence:
    if every_steps is not None and every_seconds is not None:
        raise OptionError("expected every_steps or every_seconds, found both")
    if every_steps is not None:
        return EverySteps(every_steps)
    if every_seconds is not None:
        return EverySeconds(every_seconds)
    return Never()


def _retention(
    keep_last: int | None,
    keep_every: int | None,
    keep_best: int | None,
    monitor: str | None,
    mode: Literal["min", "max"],
) -> Retention:
    for name, value in (
        ("keep_last", keep_last),
        ("keep_every", keep_every),
        ("keep_best", keep_best),
    ):
        if value is not None and (type(value) is not int or value < 1):
            raise OptionError(f"{name}: expected an integer from 1 on, found {value!r}")
    if keep_last is None and (keep_every is not None or keep_best is not None):
        raise OptionError("keep_last: expected a number with keep_every or keep_best, found None")
    if (keep_best is None) != (monitor is None):
        raise OptionError("keep_best and monitor: expected both or neither")
    if mode not in ("min", "max"):
        raise OptionError(f"mode: expected 'min' or 'max', found {mode!r}")
    return Retention(keep_last, keep_every, keep_best, monitor, mode)


def _read_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    numbers = {}
    for name, value in (metrics or {}).items():
        found = value.detach() if isinstance(value, torch.Tensor) else value
        try:
            numbers[str(name)] = float(found)
        except (TypeError, ValueError, RuntimeError) as bad:
            raise OptionError(
                f"metrics[{name!r}]: expected a number or a tensor of one element, found "
                f"{type(value).__name__}"
            ) from bad
    return numbers


def _versions() -> dict[str, str]:
    return {
        "asymcheck": importlib.metadata.version("asymcheck"),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }
