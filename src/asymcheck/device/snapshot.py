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
from dataclasses import dataclass, field
from time import perf_counter, thread_time

import numpy as np
import torch

from asymcheck.capture import Canary, place_canary
from asymcheck.device.leaves import Collector, Source
from asymcheck.device.tensors import Bytes, as_bytes
from asymcheck.memory.arena import Slot
from asymcheck.planning.layout import Extent, Layout, MiB, lay_out
from asymcheck.storage.index import Leaf

PIECE_BYTES = 8 * MiB


@dataclass(frozen=True)
class Placed:
    """Leaves with a place in the image.

    Attributes:
        sources: The leaves as they are now, ascending in the image.
        leaves: What the index says of them, in the same order.
        extents: Where they lie, in the same order.
        layout: The whole.
        canaries: For each lazy leaf.
    """

    sources: tuple[Source, ...]
    leaves: tuple[Leaf, ...]
    extents: tuple[Extent, ...]
    layout: Layout
    canaries: tuple[Canary, ...]

    @property
    def eager_bytes(self) -> int:
        """Bytes that are copied at the boundary."""
        return sum(s.nbytes for s in self.sources if not s.lazy)

    @property
    def canary_bytes(self) -> int:
        """Bytes of all canary values."""
        return sum(c.nbytes for c in self.canaries)


def place(collected: Collector, turn: int) -> Placed:
    """Decide where each leaf lies.

    Args:
        collected: The leaves.
        turn: Counts the captures; moves the canaries.
    """
    layout = lay_out([s.nbytes for s in collected.sources])
    ordered = sorted(
        zip(layout.leaves, collected.sources, strict=True), key=lambda p: (p[0].start, p[0].stop)
    )
    extents = tuple(extent for extent, _ in ordered)
    sources = tuple(source for _, source in ordered)
    leaves = tuple(Leaf(s.key, s.dtype, s.shape, e.start, s.nbytes, s.order) for e, s in ordered)
    canaries = tuple(
        place_canary(i, e.start, s.nbytes, s.array.element_size(), turn)
        for i, (e, s) in enumerate(ordered)
        if s.lazy and isinstance(s.array, torch.Tensor)
    )
    return Placed(sources, leaves, extents, layout, canaries)


def copy_eager(placed: Placed, image: memoryview, *, everything: bool = False) -> None:
    """Copy what may not wait, and zero the gaps between leaves; blocks.

    Args:
        placed: The leaves.
        image: At least as long as the layout says.
        everything: Whether to copy the lazy leaves too.
    """
    into = np.frombuffer(image, np.uint8)
    at = 0
    for source, extent in zip(placed.sources, placed.extents, strict=True):
        if not extent.nbytes:
            continue
        if extent.start > at:
            into[at : extent.start] = 0
        at = extent.stop
        if everything or not source.lazy:
            source.copy_out(into[extent.start : extent.stop])


def gather(placed: Placed, extent: Extent) -> memoryview:
    """The image's bytes of one chunk, straight from live memory where they lie there; blocks.

    For capture without a slot: at most one chunk is held.
    """
    buffer = np.zeros(extent.nbytes, np.uint8)
    for source, where in zip(placed.sources, placed.extents, strict=True):
        lo, hi = max(where.start, extent.start), min(where.stop, extent.stop)
        if lo >= hi:
            continue
        if source.lazy:
            piece = _flat(source)[lo - where.start : hi - where.start]
            _copy_piece(piece, buffer[lo - extent.start : hi - extent.start])
        else:
            whole = np.empty(source.nbytes, np.uint8)
            source.copy_out(whole)
            part = whole[lo - where.start : hi - where.start]
            buffer[lo - extent.start : hi - extent.start] = part
    return buffer.data


def copy_canaries(placed: Placed, into: memoryview) -> None:
    """Copy the canary elements of every lazy leaf; blocks."""
    values = np.frombuffer(into, np.uint8)
    at = 0
    for canary in placed.canaries:
        source, extent = placed.sources[canary.leaf], placed.extents[canary.leaf]
        flat = _flat(source).view(-1, canary.itemsize)
        first = (canary.first - extent.start) // canary.itemsize
        step = canary.stride // canary.itemsize
        picked = flat[first : first + (canary.count - 1) * step + 1 : step]
        values[at : at + canary.nbytes] = picked.cpu().numpy().reshape(-1)
        at += canary.nbytes


def _flat(source: Source) -> torch.Tensor:
    """A lazy leaf's memory in storage order, as bytes."""
    assert isinstance(source.array, torch.Tensor)
    array = source.array.permute(source.order) if source.order else source.array
    return as_bytes(array)


@dataclass
class LazyCopy:
    """Lazy leaves on their way into a slot. Holds the sources alive until they are copied.

    Attributes:
        step: Step of the checkpoint.
        slot: Where to.
        placed: What.
        copied: Set when the last byte is there, or the copy failed.
        failure: Why it failed.
        start_s: ``perf_counter`` when the first byte was copied.
        duration_s: Seconds that copying took.
        cpu_s: CPU seconds of the copying thread.
    """

    step: int
    slot: Slot
    placed: Placed
    copied: threading.Event = field(default_factory=threading.Event)
    failure: BaseException | None = None
    start_s: float = 0.0
    duration_s: float = 0.0
    cpu_s: float = 0.0

    def __post_init__(self) -> None:
        watched = [s for s in self.placed.sources if s.lazy]
        self._watched = [(s.key, s.array) for s in watched if isinstance(s.array, torch.Tensor)]
        self._versions = [_version(a) for _, a in self._watched]
        self.storages = frozenset(a.untyped_storage().data_ptr() for _, a in self._watched)

    @property
    def lazy_bytes(self) -> int:
        """Bytes that are copied behind the training."""
        return sum(a.nbytes for _, a in self._watched)

    def changed_leaf(self) -> str | None:
        """Key of a leaf that was written to since the boundary. On the training thread."""
        for (key, array), version in zip(self._watched, self._versions, strict=True):
            if _version(array) != version:
                return key
        return None


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


class Copier:
    """A daemon thread that copies lazy leaves into slots, a piece at a time.

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

    def close(self) -> None:
        """End the thread after the copies that were started."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.start_s, cpu_s = perf_counter(), thread_time()
            try:
                self._copy(job)
            except BaseException as failure:  # noqa: BLE001  the training thread sees it
                job.failure = failure
            job.duration_s = perf_counter() - job.start_s
            job.cpu_s = thread_time() - cpu_s
            job.copied.set()

    def _copy(self, job: LazyCopy) -> None:
        into = np.frombuffer(job.slot.image, np.uint8)
        placed = job.placed
        for source, extent in zip(placed.sources, placed.extents, strict=True):
            if source.lazy:
                flat = _flat(source)
                for piece in _pieces(extent):
                    self.between()
                    lo, hi = piece.start - extent.start, piece.stop - extent.start
                    _copy_piece(flat[lo:hi], into[piece.start : piece.stop])
                    job.slot.copied_bytes = piece.stop
            elif extent.nbytes:
                job.slot.copied_bytes = extent.stop


def _pieces(extent: Extent) -> Sequence[Extent]:
    return [
        Extent(lo, min(lo + PIECE_BYTES, extent.stop))
        for lo in range(extent.start, extent.stop, PIECE_BYTES)
    ]


def _copy_piece(source: torch.Tensor, into: Bytes) -> None:
    if source.device.type == "cpu":
        np.copyto(into, source.numpy())  # one thread, without the interpreter lock
    else:
        torch.from_numpy(into).copy_(source)
