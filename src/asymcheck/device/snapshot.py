"""Copying the state into a slot: what must be copied at the boundary, and what may wait.

*Eager* leaves change at any time and are copied at the boundary, on the training thread.
*Lazy* leaves change only in an update: a thread copies them behind the next forward and
backward pass, and the fence before the next update waits for the rest. Whether they really
did not change is looked at twice: version counters on the training thread at the fence, and
canaries (a few elements copied at the boundary) by whoever persists the slot.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from ctypes import c_uint8, memmove
from time import perf_counter, thread_time
from typing import Any

import numpy as np
import torch

from asymcheck.device.cuda import Boundary, DeviceCopy, Pinning, StreamTimer
from asymcheck.device.leaves import Source
from asymcheck.device.pacing import Pace
from asymcheck.device.placement import NOTHING, Placed
from asymcheck.device.tensors import as_bytes
from asymcheck.memory.arena import Slot
from asymcheck.planning.layout import Extent, MiB

PIECE_BYTES = 8 * MiB


def copy_eager(placed: Placed, slot: Slot, *, everything: bool = False) -> None:
    """Copy what may not wait, and zero the gaps between leaves; blocks.

    Args:
        placed: The leaves.
        slot: Where to; it was begun for them. A sparse one gets the memory that they take.
        everything: Whether to copy the lazy leaves too.

    Raises:
        CaptureError: There is no such memory.
    """
    into = np.frombuffer(slot.image, np.uint8)
    base, sources, extents = into.ctypes.data, placed.sources, placed.at.extents
    if slot.is_sparse:  # what has no memory is zero already
        slot.take(
            extent
            for source, extent in zip(sources, extents, strict=True)
            if everything or not (source.spec.lazy or source.deferred)
        )
    for start, stop in () if slot.is_sparse else placed.at.gaps:
        into[start:stop] = 0
    for i, start, nbytes in placed.at.plain_eager:
        memmove(base + start, _address(sources[i].array), nbytes)
    slowly = [i for i in placed.at.elsewhere if not sources[i].deferred]
    for i in (*slowly, *placed.at.lazy) if everything else slowly:
        if extents[i].nbytes:
            sources[i].copy_out(into[extents[i].start : extents[i].stop])


def gather(placed: Placed, extent: Extent) -> memoryview:
    """The image's bytes of one chunk, straight from live memory where they lie there; blocks.

    For capture without a slot: at most one chunk is held.
    """
    buffer = np.zeros(extent.nbytes, np.uint8)
    for source, where in zip(placed.sources, placed.at.extents, strict=True):
        lo, hi = max(where.start, extent.start), min(where.stop, extent.stop)
        if lo >= hi:
            continue
        if source.spec.lazy:
            piece = _flat(source)[lo - where.start : hi - where.start]
            buffer[lo - extent.start : hi - extent.start] = piece.cpu().numpy()
        else:
            whole = np.empty(source.spec.nbytes, np.uint8)
            source.copy_out(whole)
            part = whole[lo - where.start : hi - where.start]
            buffer[lo - extent.start : hi - extent.start] = part
    return buffer.data


def copy_canaries(placed: Placed, into: memoryview) -> list[tuple[torch.Tensor, int]]:
    """Copy the canary elements of every lazy leaf, as they are now.

    Returns:
        What is cloned on a device and still to be copied, with its offset in ``into``: the
        host does not wait for a device here.
    """
    canaries, sources = placed.watched.canaries, placed.sources
    if not canaries:
        return []
    values = np.frombuffer(into, np.uint8)[: placed.watched.nbytes]
    if all(sources[c.leaf].spec.plain for c in canaries):
        # All of them at once: one by one they would take most of the time at the boundary.
        starts = [_address(sources[c.leaf].array) - _FIRST_ADDRESS for c in canaries]
        spots = np.repeat(np.array(starts, np.intp), [c.nbytes for c in canaries])
        spots += placed.watched.spots
        _MEMORY.take(spots, out=values, mode="clip")
        return []
    at, rest = 0, []
    for canary in canaries:
        flat = _flat(sources[canary.leaf])
        shape, steps = (canary.count, canary.width), (canary.stride, 1)
        if flat.device.type == "cpu":
            picked = np.ndarray(shape, np.uint8, flat.numpy(), 0, steps)
            values[at : at + canary.nbytes].reshape(shape)[:] = picked
        else:
            rest.append((flat.as_strided(shape, steps).reshape(-1).clone(), at))
        at += canary.nbytes
    return rest


def _address(array: Any) -> int:  # noqa: ANN401  a tensor: its spec says that it is plain
    found: int = array.data_ptr()
    return found


_FIRST_ADDRESS = 1
_ALL: Any = (c_uint8 * ((1 << 62) - 1)).from_address(_FIRST_ADDRESS)
_MEMORY = np.frombuffer(_ALL, np.uint8)
"""The memory of this process as one array, by address: to be read where tensors lie only."""


def finish_canaries(rest: list[tuple[torch.Tensor, int]], into: memoryview) -> None:
    """Copy what ``copy_canaries`` left on devices; blocks."""
    values = np.frombuffer(into, np.uint8)
    for picked, at in rest:
        values[at : at + picked.numel()] = picked.cpu().numpy()


def canaries_moved(placed: Placed, before: bytes) -> bool:
    """Whether live canary elements differ from what they were; blocks."""
    now = bytearray(placed.watched.nbytes)
    finish_canaries(copy_canaries(placed, memoryview(now)), memoryview(now))
    return now != before


def _flat(source: Source) -> torch.Tensor:
    """A lazy leaf's memory in storage order, as bytes."""
    assert isinstance(source.array, torch.Tensor)
    order = source.spec.order
    return as_bytes(source.array.permute(order) if order and not source.deferred else source.array)


class LazyCopy:
    """Leaves on their way into a slot. Holds the sources alive until they are copied.

    Made on the training thread at the boundary.

    Args:
        step: Step of the checkpoint.
        slot: Where to.
        placed: What.
        canaries: What ``copy_canaries`` left on devices.
        pinning: Registers slots for copies off a CUDA device.
        pace: When the pieces may be copied; at once without one.

    Attributes:
        issued: Set when the host need not wait any more: every copy is done, or queued on a
            device stream that the next update can wait for.
        copied: Set when the last byte is there, or the copy failed.
        failure: Why it failed.
        start_s: ``perf_counter`` when the first byte was copied.
        duration_s: Seconds that copying took.
        cpu_s: CPU seconds of the copying thread.
        before: Called on the copying thread before the first byte is copied.
        fence_timer: Measures how long updates are held, where that is to be known.
    """

    def __init__(
        self,
        step: int,
        slot: Slot,
        placed: Placed,
        canaries: list[tuple[torch.Tensor, int]],
        pinning: Pinning,
        pace: Pace | None = None,
    ) -> None:
        self.step = step
        self.slot = slot
        self.placed = placed
        self.issued = threading.Event()
        self.copied = threading.Event()
        self.failure: BaseException | None = None
        self.start_s = self.duration_s = self.cpu_s = 0.0
        self.before: Callable[[], None] = lambda: None
        self._canaries = canaries
        self._pinning = pinning
        self._pace = pace
        self._lock = threading.Lock()
        self._after: Callable[[], None] | None = None
        self.fence_timer: StreamTimer | None = None
        lazy = [placed.sources[i] for i in placed.at.lazy]
        waiting = [*lazy, *(placed.sources[i] for i in placed.at.elsewhere)]
        self._boundary = Boundary(
            s.array for s in waiting if not s.spec.plain and isinstance(s.array, torch.Tensor)
        )
        self._device: DeviceCopy | None = None
        live = [
            (s.spec.key, s.array, s.held)
            for s in lazy
            if isinstance(s.array, torch.Tensor) and not s.deferred  # nobody else has a clone
        ]
        self._watched = [(key, array if held is None else held) for key, array, held in live]
        self._versions = [_version(a) for _, a in self._watched]
        self.storages = frozenset(a.untyped_storage().data_ptr() for _, a, _ in live)

    @property
    def devices(self) -> list[torch.device]:
        """CUDA devices that are copied from."""
        return self._boundary.devices

    @property
    def lazy_bytes(self) -> int:
        """Bytes that are copied behind the training."""
        return self.placed.at.lazy_bytes

    def changed_leaf(self) -> str | None:
        """Key of a leaf that was written to since the boundary. On the training thread."""
        for (key, array), version in zip(self._watched, self._versions, strict=True):
            if _version(array) != version:
                return key
        return None

    def hold_updates(self) -> None:
        """Return once the state may change: blocks the host until every copy is issued, and
        makes the device streams wait for the rest.
        """
        if self._pace is not None:
            self._pace.let_go()
        timer = self.fence_timer
        if timer is not None:
            timer.start()
        self.issued.wait()
        if self._device is not None:
            self._device.hold_updates()
        if timer is not None:
            timer.stop()

    def when_copied(self, action: Callable[[], None]) -> None:
        """Run ``action`` once the copy is complete: now, or later on the copying thread."""
        with self._lock:
            if not self.copied.is_set():
                self._after = action
                return
        action()

    def run(self, between: Callable[[], None]) -> None:
        """Copy, on the copying thread; again does nothing."""
        before, self.before = self.before, lambda: None
        before()
        if self.copied.is_set():
            return
        self.start_s, cpu_s = perf_counter(), thread_time()
        try:
            self._copy(between)
        except BaseException as failure:  # noqa: BLE001  the training thread sees it
            self.failure = failure
        self.duration_s = perf_counter() - self.start_s
        self.cpu_s = thread_time() - cpu_s
        self.finish()

    def finish(self) -> None:
        """Say that the copy is complete."""
        with self._lock:
            self.copied.set()
            after, self._after = self._after, None
        self.issued.set()
        if after is not None:
            after()

    def forget(self) -> None:
        """Let go of the sources: whoever keeps the handle of a save keeps no memory."""
        self.placed = NOTHING
        self._watched, self._versions, self._canaries, self._device = [], [], [], None

    def _copy(self, between: Callable[[], None]) -> None:
        into = np.frombuffer(self.slot.image, np.uint8)
        pace = self._pace
        piece_bytes = PIECE_BYTES if pace is None else min(PIECE_BYTES, pace.piece_bytes)
        if self._boundary:
            # The driver would take the memory of a whole image.
            pinned = not self.slot.is_sparse and self._pinning.is_pinned(self.slot)
            self._device = DeviceCopy(self._boundary, pinned=pinned)
            values = np.frombuffer(self.slot.canaries, np.uint8)
            for picked, at in self._canaries:
                self._device.issue(picked, values[at : at + picked.numel()], 0)
        for source, extent in zip(self.placed.sources, self.placed.at.extents, strict=True):
            if not (source.spec.lazy or source.deferred):
                self._note(extent.stop)
                continue
            flat = _flat(source)
            for piece in _pieces(extent, piece_bytes):
                between()
                self.slot.take_next(piece)
                if pace is not None and source.spec.lazy:
                    pace.wait(piece.nbytes)
                part = flat[piece.start - extent.start : piece.stop - extent.start]
                target = into[piece.start : piece.stop]
                if self._device is not None and part.device.type == "cuda":
                    self._device.issue(part, target, piece.stop)
                    if self.slot.is_sparse:  # then it is copied: it was not pinned
                        self._note(piece.stop)
                else:
                    np.copyto(target, part.numpy())  # without the interpreter lock
                    self._note(piece.stop)
        if pace is not None:
            pace.done()
        if self._device is not None:
            self._device.finish_issuing()
            self.issued.set()
            self._device.wait(self.slot)
            self.slot.copied_bytes = self.placed.at.layout.image_bytes

    def _note(self, upto: int) -> None:
        followed = self._device is None or self.slot.is_sparse
        if followed and upto > self.slot.copied_bytes:
            self.slot.copied_bytes = upto


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


class Copier:
    """A daemon thread that copies leaves into slots, a piece at a time.

    A piece is at most ``PIECE_BYTES``; the interpreter lock is free while one is copied, and
    the slot says after each how far the image is complete.

    Args:
        between: Called before each piece; tests slow the copy down with it.
    """

    def __init__(self, between: Callable[[], None] = lambda: None) -> None:
        self.between = between
        self._jobs: queue.SimpleQueue[LazyCopy | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="asymcheck-copy", daemon=True)
        self._thread.start()

    def start(self, copy: LazyCopy) -> None:
        """Begin a copy; returns at once."""
        self._jobs.put(copy)

    def close(self, timeout_s: float) -> bool:
        """End the thread after the copies that were started; returns whether that was in time."""
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run(self.between)


def _pieces(extent: Extent, nbytes: int) -> Sequence[Extent]:
    return [
        Extent(lo, min(lo + nbytes, extent.stop)) for lo in range(extent.start, extent.stop, nbytes)
    ]
