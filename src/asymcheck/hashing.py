"""Hashes of what a slot holds, left in it: so a restore may read there, before it is durable.

A slot without them is good for the persister alone, which compares its canaries. Whoever is to take
values straight out of it has to know that they are those that were captured.
"""

from __future__ import annotations

import threading

from asymcheck.capture import CanaryWatch, Capture, dump_hashes, parse_capture, parse_hashes
from asymcheck.errors import CorruptCheckpoint
from asymcheck.memory.slot import Slot, SlotState
from asymcheck.planning.layout import Extent
from asymcheck.storage.sealed import digest

_POLL_S = 0.001


def can_be_read(slot: Slot) -> bool:
    """Whether another process could ever read all of a slot: it has a name, and all its memory."""
    return slot.path is not None and not slot.is_sparse


def hashes_of(slot: Slot, capture: Capture) -> tuple[str, ...]:
    """The hash of each chunk as it was when the slot was sealed; empty where nobody left any.

    Raises:
        CorruptCheckpoint: They are damaged.
    """
    data = slot.hashes
    if not data:
        return ()
    return parse_hashes(data, slot.meta, len(capture.chunks), f"slot {slot.path or '(no name)'}")


def changed_chunk(slot: Slot, capture: Capture) -> Extent | None:
    """The first chunk that is not any more what it was when it was hashed; blocks.

    Raises:
        CorruptCheckpoint: The hashes are damaged.
    """
    image = slot.image
    for chunk, expected in zip(capture.chunks, hashes_of(slot, capture), strict=False):
        if digest(image[chunk.start : chunk.stop]) != expected:
            return chunk
    return None


def leave_hashes(slot: Slot, capture: Capture) -> None:
    """Hash a slot that is whole, whose canaries agree, and leave the hashes in it; blocks."""
    if can_be_read(slot) and not slot.hashes:
        image = slot.image
        found = [digest(image[chunk.start : chunk.stop]) for chunk in capture.chunks]
        slot.leave_hashes(dump_hashes(slot.meta, found))


class HashingAhead:
    """Hashes a slot behind its copy, on a thread of its own, and leaves the hashes in it as soon
    as it is sealed, if its canaries agree. The store may need much longer to write as much, and to
    write those before it.

    Args:
        slot: Being filled, or sealed; not freed before ``finish`` or ``stop``.
    """

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        if can_be_read(slot) and not slot.hashes:
            self._thread = threading.Thread(target=self._run, name="asymcheck-hash", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # the interpreter is ending: then nobody hashes
                self._thread = None

    def finish(self) -> None:
        """Wait until the hashes of a sealed slot are there; blocks."""
        if self._thread is not None:
            self._thread.join()

    def stop(self) -> None:
        """Leave it as it is; the slot is not read any more when this returns."""
        self._stopped.set()
        self.finish()

    def _run(self) -> None:
        slot = self._slot
        try:
            capture = parse_capture(slot.meta, f"slot {slot.path}")
        except CorruptCheckpoint:
            return  # whoever persists it says so
        image, found = slot.image, []
        for chunk in capture.chunks:
            if not self._await(chunk.stop):
                return
            found.append(digest(image[chunk.start : chunk.stop]))
        if not self._await(None):
            return
        watch = CanaryWatch(capture, slot.canaries)
        watch.compare(Extent(0, len(image)), image)
        if watch.torn_leaf is None:
            slot.leave_hashes(dump_hashes(slot.meta, found))

    def _await(self, upto: int | None) -> bool:
        """Wait until the image is complete up to there, or sealed; whether it will be."""
        slot = self._slot
        while not self._stopped.is_set():
            state = slot.state
            if state == SlotState.SEALED:
                return True
            if state != SlotState.FILLING:
                return False
            if upto is not None and slot.copied_bytes >= upto:
                return True
            self._stopped.wait(_POLL_S)
        return False
