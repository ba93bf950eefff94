"""Keeps the promise: what is saved was live after update k and before update k+1.

Owns the slots, the copying thread, the fence and the persister of one training process. All
public calls come from the training thread.
"""

from __future__ import annotations

import functools
import importlib.metadata
import threading
import time
import warnings
from collections.abc import Mapping
from time import monotonic, perf_counter
from typing import Literal

import numpy as np
import torch

from asymcheck.capture import Capture, dump_capture, hash_room_bytes
from asymcheck.device.cuda import Pinning
from asymcheck.device.fence import UpdateHook
from asymcheck.device.freezing import Freezer, defer_device_leaves
from asymcheck.device.pacing import Pacing
from asymcheck.device.placement import Placed, Placer
from asymcheck.device.snapshot import (
    Copier,
    LazyCopy,
    canaries_moved,
    copy_canaries,
    copy_eager,
    finish_canaries,
    gather,
)
from asymcheck.device.state import State
from asymcheck.encoding import Chooser
from asymcheck.errors import CaptureError, CheckpointError, CheckpointWarning, DroppedCheckpoint
from asymcheck.events import Sink, Span, Stage, timed
from asymcheck.handles import Handle, Promised, report_of
from asymcheck.keeping import Active, Keeper
from asymcheck.memory.arena import Arena, NoRoom, Slot, SlotState, capacity_for
from asymcheck.pending import COMMIT_TIMEOUT_S, await_others
from asymcheck.persist import write_checkpoint
from asymcheck.persister import Persister, is_own_memory
from asymcheck.planning.layout import MiB
from asymcheck.planning.retention import CheckpointId, Retention
from asymcheck.planning.selection import RAW
from asymcheck.planning.strategies import Strategy
from asymcheck.planning.variants import Variant
from asymcheck.storage.repository import Repository
from asymcheck.tracing import Tracer

EAGER_LIMIT_BYTES = 256 * MiB
_DROPS_BEFORE_BLOCKING = 2


class Snapshotter:
    """Captures the state of one process into slots and hands them to the persister.

    Args:
        state: What to capture.
        strategy: How.
        arena: Gives the slots.
        persister: Gets them.
        repository: Written directly when there is no memory for a slot.
        retention: Applied then.
        sink: Receives spans.
        tracer: Is told of plans and of what became durable.
        rank: Of this process, among ``world`` that save together.
        commit_timeout_s: How long a save without a slot waits for other ranks.
    """

    def __init__(
        self,
        state: State,
        strategy: Strategy,
        arena: Arena,
        persister: Persister,
        repository: Repository,
        retention: Retention,
        sink: Sink,
        tracer: Tracer | None = None,
        rank: int = 0,
        world: int = 1,
        commit_timeout_s: float = COMMIT_TIMEOUT_S,
    ) -> None:
        self._rank, self._world, self._commit_timeout_s = rank, world, commit_timeout_s
        self._state = state
        self._strategy = strategy
        self._arena = arena
        self._persister = persister
        self._repository = repository
        self._retention = retention
        self._sink = sink
        self._tracer = tracer
        self._active: Active | None = None
        self._placer = Placer()
        self._prepared = False
        self._fencing = threading.RLock()
        self._turn = self._drops = 0
        self._blocking = strategy.capture == "blocking"
        self._warned_of_eager = False
        self._freezer = Freezer(strategy.capture, _warn)
        self._keeper = Keeper(
            strategy.placement,
            arena,
            persister,
            tracer,
            waits=strategy.persist == "before",
            keeps_nameless=is_own_memory(repository.store),
            warn=_warn,
        )
        self.copier = Copier()
        self._pinning = Pinning()
        arena.before_removal = self._pinning.release
        self._pacing: Pacing | None = None
        if strategy.partitioner is not None and strategy.capture != "blocking":
            self._pacing = Pacing(state.modules, strategy.partitioner, self.settle)
        self._hook = UpdateHook(self._watched, self.fence, state.optimizers, self._end_step)

    def note_step(self, step: int) -> None:
        """Training is at ``step``."""
        self._keeper.latest_step = step
        self._arena.beat(step)

    def between_saves(self) -> None:
        """A step is over that does not save."""
        if self._pacing is not None:
            self._pacing.begin_step(saves=False)

    def _end_step(self) -> None:
        if self._pacing is not None:
            self._pacing.end_step()

    def prepare(self) -> None:
        """Have the first slots made in the background, now that the state has its full size.

        Without it the first save would block while as much memory as the state is zeroed.
        """
        if self._prepared:
            return
        self._prepared = True
        collected = self._state.collect()
        placed = self._placer.place(collected, 0)
        capacity = capacity_for(placed.at.layout.image_bytes, placed.watched.nbytes)
        meta_bytes = sum(200 + 2 * len(s.key) for s in placed.at.specs) + MiB

        def make() -> None:
            for _ in range(self._keeper.slots_in_use):
                self._arena.prepare(capacity, meta_bytes)

        threading.Thread(target=make, name="asymcheck-arena", daemon=True).start()

    def capture(
        self,
        at: CheckpointId,
        metrics: Mapping[str, float],
        when_full: Literal["wait", "skip", "raise"],
    ) -> Handle | None:
        """Capture the state as it is now.

        Blocks while no slot is free (with ``wait``), for the eager leaves, and with blocking
        capture for all of them.

        Returns:
            The handle; ``None`` when no slot was free and ``when_full`` is ``skip``.

        Raises:
            StateError: Something cannot be saved.
            CaptureError: No slot was free and ``when_full`` is ``raise``.
        """
        start_s = perf_counter()
        self._prepared = True
        self.fence()
        collected = self._state.collect()
        self._turn += 1
        placed = self._placer.place(collected, self._turn)
        if not self._blocking:
            placed = defer_device_leaves(placed)
        self._warn_of_eager(placed)
        described = Capture(
            at=at,
            leaves=placed.at.leaves,
            aliases=collected.aliases,
            chunks=placed.at.layout.chunks,
            metrics=metrics,
            versions=_versions(),
            created_s=time.time(),
            boundary_s=start_s,
            canaries=placed.watched.canaries,
            kinds=placed.at.kinds,
            rank=self._rank,
            world=self._world,
        )
        if self._tracer is not None:
            lazy, eager = placed.at.lazy_bytes, placed.at.eager_bytes
            self._tracer.begin(at.step, start_s, lazy_bytes=lazy, eager_bytes=eager)
        try:
            slot = self._reserve(described, placed, when_full)
        except NoRoom:
            return self._write_through(described, placed)
        if slot is None:
            return None
        active = self._begin(described, placed, slot)
        active.step_stall_s = perf_counter() - start_s
        self._sink(Span(Stage.STALL, at.step, start_s, active.step_stall_s))
        return active.handle

    def _reserve(
        self, described: Capture, placed: Placed, when_full: Literal["wait", "skip", "raise"]
    ) -> Slot | None:
        step = described.at.step
        meta = dump_capture(described, placed.geometry)
        capacity = capacity_for(placed.at.layout.image_bytes, placed.watched.nbytes)
        meta_bytes = len(meta) + hash_room_bytes(len(described.chunks))
        slot = self._arena.reserve(capacity, meta_bytes, 0.0)
        if slot is None and len(self._arena.tokens()) == 1:
            self._keeper.make_way()  # there is memory for one slot only
        if slot is None and when_full == "wait":
            slot = self._arena.reserve(capacity, meta_bytes)
        if slot is None:
            why = (
                f"{self._strategy.admission.max_in_flight} saves are still under way: save less "
                f"often, or let admission wait"
            )
            if when_full == "raise":
                raise CaptureError(f"step {step}: {why}")
            self._sink(Span(Stage.CAPTURE, step, perf_counter(), 0.0, error=f"skipped: {why}"))
            return None
        try:
            slot.begin(placed.at.layout.image_bytes, placed.watched.nbytes, meta)
        except BaseException:
            self._arena.free(slot)
            raise
        return slot

    def _handle(self, step: int) -> Handle:
        return Handle(step, Promised(self.fence), Promised(self.fence))

    def _write_through(self, described: Capture, placed: Placed) -> Handle:
        """Without memory for a slot: from live memory to the store, before training goes on."""
        handle = self._handle(described.at.step)
        with timed(self._sink, Stage.STALL, described.at.step):
            try:
                found = write_checkpoint(
                    self._repository,
                    described,
                    lambda extent: gather(placed, extent),
                    lambda *_: None,
                    lambda: None,
                    *(self._retention, self._sink, Chooser(RAW)),
                )
                how = (self._retention, self._sink, self._commit_timeout_s)
                found = await_others(self._repository, found, *how)
            except CheckpointError as failure:
                for future in (handle.captured, handle.durable):
                    future.set_exception(failure)
                return handle
        self._persister.wake()
        handle.captured.set_result(None)
        stall_s = perf_counter() - described.boundary_s
        report = report_of(found, placed.at.eager_bytes, stall_s, "blocking")
        if self._tracer is not None:
            self._tracer.durable(report)
        handle.durable.set_result(report)
        return handle

    def _begin(self, described: Capture, placed: Placed, slot: Slot) -> Active:
        step, blocking = described.at.step, self._blocking
        lazy, frozen = placed.at.lazy_bytes > 0, None
        waits = not blocking and (
            lazy or any(placed.sources[i].deferred for i in placed.at.elsewhere)
        )
        try:
            with timed(self._sink, Stage.CAPTURE, step, placed.at.eager_bytes):
                copy_eager(placed, slot, everything=blocking)
                canaries = copy_canaries(placed, slot.canaries)
                if not waits:
                    finish_canaries(canaries, slot.canaries)
                elif lazy:
                    frozen = self._freezer.freeze(placed)
            pace = None
            if self._pacing is not None:
                self._pacing.begin_step(saves=waits)
                if waits and frozen is None:
                    pace = self._pacing.plan(placed.at.lazy_bytes)
                if pace is not None and self._tracer is not None:
                    self._tracer.plan(step, pace)
            copy = LazyCopy(step, slot, frozen or placed, canaries, self._pinning, pace)
            if waits and lazy and frozen is None:
                copy.fence_timer = self._freezer.time_fence(copy.devices)
            variant: Variant = "device-copy" if frozen else "lazy"
            active = Active(
                copy,
                described,
                self._handle(step),
                "blocking" if blocking else variant,
                eager_bytes=placed.at.eager_bytes,
                canaries=bytes(slot.canaries) if blocking else b"",
                is_trial=waits and lazy and self._freezer.is_trial(variant),
            )
            self._keeper.place(active)
        except BaseException:
            self._arena.free(slot)
            raise
        if not waits:
            copy.finish()
            self._conclude(active)
        elif frozen is not None:
            copy.when_copied(lambda: self._conclude(active))
        if not lazy and not waits:
            copy.forget()
        # Also a blocking capture is watched, to know when lazy capture may come back. A clone
        # changes no more: nobody waits for its copy.
        self._start(active, watched=(lazy or waits) and frozen is None)
        return active

    def _start(self, active: Active, *, watched: bool) -> None:
        """Hand the slot to the copying thread, and there to the persister, no Ctrl-C between."""
        copy = active.copy
        try:
            self._keeper.start(active)
            self._active = active if watched else None
            self.copier.start(copy)
        except BaseException as failure:
            # Interrupted before or after it was queued: once more does no harm.
            copy.failure = copy.failure or failure
            self.copier.start(copy)
            raise

    # --- fence --------------------------------------------------------------

    def _watched(self) -> frozenset[int]:
        active = self._active
        return active.copy.storages if active is not None else frozenset()

    def fence(self) -> None:
        """Return once no live tensor is being read any more, and seal what was captured.

        Blocks while a copy is under way. A checkpoint whose state changed meanwhile is
        dropped with a warning.
        """
        with self._fencing:  # another thread that updates waits here for the copy too
            active = self._active
            if active is None:
                return
            self._end_step()
            start_s = perf_counter()
            active.copy.hold_updates()
            active.fence_stall_s = perf_counter() - start_s
            self._sink(Span(Stage.FENCE, active.copy.step, start_s, active.fence_stall_s))
            self._seal(active)
            self._active = None  # not before: what was interrupted is made again by the next call

    def settle(self) -> None:
        """Seal what was captured, when its copy is complete; never blocks.

        Where training cannot be in the middle of an operation: on its thread, or while it
        waits for the thread that calls.
        """
        active = self._active
        if active is None or not active.copy.copied.is_set():
            return
        if self._fencing.acquire(blocking=False):  # else another thread is at it
            try:
                if self._active is active:
                    self._seal(active)
                    self._active = None
            finally:
                self._fencing.release()

    def _seal(self, active: Active) -> None:
        """Compare, and have the slot sealed or dropped; again goes on where it was left."""
        copy = active.copy
        key = copy.changed_leaf()
        if active.how == "blocking":
            # Copied at the boundary, so it is good; was the window after it quiet?
            if self._drops and key is None and not canaries_moved(copy.placed, active.canaries):
                self._blocking = self._strategy.capture == "blocking"
                self._drops = 0
            copy.forget()
            return
        if key is not None and not active.is_compared:
            active.dropped = DroppedCheckpoint(
                copy.step,
                key,
                f"{key!r} was written to before its copy was complete, by code that is not an "
                f"optimizer's update: call checkpointer.fence() before such code",
            )
        active.is_compared = True
        copy.when_copied(lambda: self._conclude(active))

    def _conclude(self, active: Active) -> None:
        """The copy is complete and the state may change: seal the slot, or drop it."""
        copy, captured = active.copy, active.handle.captured
        if "copy" not in active.users:
            return
        if copy.failure is not None:
            active.dropped = DroppedCheckpoint(copy.step, "", f"copying it raised {copy.failure!r}")
        if copy.duration_s:
            self._sink(Span(Stage.COPY, copy.step, copy.start_s, copy.duration_s, copy.lazy_bytes))
        if active.dropped is None:
            try:
                self._keeper.check(active)
            except DroppedCheckpoint as torn:
                active.dropped = torn
        if active.dropped is None:
            copy.slot.state = SlotState.SEALED
            if not captured.done():
                captured.set_result(None)
        else:
            copy.slot.state = SlotState.DROPPED
            if not captured.done():
                captured.set_exception(active.dropped)
        if active.how != "blocking":
            copy.forget()
        self._keeper.settle(active)
        self._keeper.release(active, "copy")

    def note_drop(self) -> list[str]:
        """A checkpoint was dropped: after two in a row capture blocks until a quiet window.

        Returns:
            What the user should know of it.
        """
        self._drops += 1
        if self._drops < _DROPS_BEFORE_BLOCKING or self._blocking:
            return []
        self._blocking = True
        return [
            f"{self._drops} checkpoints in a row were dropped: capture blocks training from "
            f"now on, until the state stays as it is between two updates"
        ]

    def note_success(self) -> None:
        """A checkpoint became durable."""
        if not self._blocking:
            self._drops = 0

    def drain(self) -> list[Handle]:
        """Seal what was captured, and have the newest checkpoint go to the store; blocks for the
        copy alone.

        Returns:
            What ``late`` does.
        """
        self.fence()
        return self._keeper.drain()

    def late(self) -> list[Handle]:
        """Handles of checkpoints that were to stay in memory, and went to the store after all
        since the latest call.
        """
        return self._keeper.late()

    def close(self, timeout_s: float) -> bool:
        """Seal what was captured, give the newest to the store, and wait for the persister;
        returns whether it was in time.
        """
        self._arena.give_up_after(timeout_s)
        self.fence()
        self._hook.close()
        if self._pacing is not None:
            self._pacing.close()
        until_s = monotonic() + timeout_s
        # First the copying thread: it is the one that hands slots to the persister.
        in_time = self.copier.close(timeout_s)
        self._keeper.make_way()
        in_time &= self._persister.close(max(0.0, until_s - monotonic()))
        self._arena.close()
        return in_time

    def _warn_of_eager(self, placed: Placed) -> None:
        if placed.at.eager_bytes <= EAGER_LIMIT_BYTES or self._warned_of_eager or self._blocking:
            return
        self._warned_of_eager = True
        largest = max((s for s in placed.at.specs if not s.lazy), key=lambda s: s.nbytes)
        _warn(
            f"{placed.at.eager_bytes} bytes are copied on the training thread at each save, the "
            f"largest is {largest.key!r} with {largest.nbytes} bytes: keep large tensors in "
            f"parameters or optimizer state, or save them less often"
        )


def _warn(message: str) -> None:
    warnings.warn(message, CheckpointWarning, stacklevel=2)


@functools.cache  # it reads files, and a process never changes its libraries
def _versions() -> dict[str, str]:
    return {
        "asymcheck": importlib.metadata.version("asymcheck"),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }
