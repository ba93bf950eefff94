"""One slot of host memory, and the bound that slots may share.

A slot is one file in shared memory: a header page, the image of the state, canary values, and
the description of what the image holds. Everything that persisting needs is in it.

The memory of a *full* slot is reserved when it is made. A *sparse* slot has the addresses of a
whole image and memory only for what is copied and not yet written: the copying thread takes memory
for each piece, within the bound of a ``Ring``, and whoever persists gives back what was written.
What was given back is gone, so such a slot is persisted once or not at all.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import stat
import struct
import threading
from collections.abc import Iterable
from enum import IntEnum
from pathlib import Path
from time import monotonic, sleep

from asymcheck.errors import CaptureError
from asymcheck.memory.holding import Hold, Part
from asymcheck.memory.process import ProcessId
from asymcheck.planning.layout import PAGE_BYTES, Extent, align_up

_MAGIC = int.from_bytes(b"asymslt1", "little")
_POLL_S = 0.001


class GivenUp(Exception):
    """Nobody will persist the slot: there is no use in copying on."""


class Ring:
    """A bound of what sparse slots hold together. Memory is taken by one thread, the copying one,
    and given back by whoever persists, in any process.

    Args:
        nbytes: The bound; at least the largest chunk and the largest piece of a copy together.

    Attributes:
        slots: Those that share it.
        until_s: When a copy stops to wait for room, on ``time.monotonic``'s clock.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.slots: list[Slot] = []
        self.until_s = math.inf

    def await_room(self, slot: Slot, upto: int) -> None:
        """Block until the memory of ``slot`` may reach up to there in its image.

        Raises:
            GivenUp: Its persister failed, or there is no more time.
        """
        while not slot.is_given_up:
            others = sum(other.held_bytes() for other in tuple(self.slots) if other is not slot)
            if others + slot.held_bytes(upto) <= self.nbytes:
                return
            if monotonic() > self.until_s:
                raise GivenUp(f"nothing of {self.nbytes} bytes became free in time")
            sleep(_POLL_S)
        raise GivenUp("whoever persists it failed before all of it was copied")


class SlotState(IntEnum):
    """Life of a slot's content."""

    FREE = 0
    FILLING = 1
    SEALED = 2
    DROPPED = 3


class _Word(IntEnum):
    """Header words, 8 bytes each."""

    MAGIC = 0
    STATE = 1
    COPIED = 2
    IMAGE = 3
    CANARIES = 4
    META = 5
    CAPACITY = 6
    META_CAPACITY = 7
    OWNER_PID = 8
    OWNER_START = 9
    PERSISTER_PID = 10
    PERSISTER_START = 11
    ROOT = 12
    SPARSE = 13
    TORN = 14
    RELEASED = 15
    BEAT = 16
    HASHES = 17
    TAKEN = 18


_ROOT_AT = 1024  # from here on the header page holds the root's URL


class Slot:
    """One slot, mapped. Trainer and persister each have their own object on the same memory.

    Args:
        fd: A descriptor of the file; the slot closes it.
        path: Its name, ``None`` for memory without one.
        populate: Whether all of it is mapped now, which blocks: for who reads or writes most of it.

    Attributes:
        token: Tells the slots of one arena apart.
        ring: What bounds it together with others, in the process of its trainer.
        is_given_up: Whether its persister failed; in the process of its trainer.
    """

    def __init__(self, fd: int, path: Path | None, *, populate: bool = True) -> None:
        self.fd = fd
        self.path = path
        self.token = 0
        self.ring: Ring | None = None
        self.is_given_up = False
        self._hold: Hold | None = None
        self._taken_to = 0
        self._lock = threading.Lock()
        size = os.fstat(fd).st_size
        (sparse,) = struct.unpack("Q", os.pread(fd, 8, 8 * _Word.SPARSE))
        flags = 0 if sparse or not populate else getattr(mmap, "MAP_POPULATE", 0)
        self._map = mmap.mmap(fd, size, mmap.MAP_SHARED | flags)
        self._bytes = memoryview(self._map)
        self._words = self._bytes[:PAGE_BYTES].cast("Q")
        if self._words[_Word.MAGIC] not in (0, _MAGIC):
            raise ValueError(f"{path}: not an asymcheck slot")

    @classmethod
    def create(
        cls,
        directory: Path,
        name: str,
        capacity_bytes: int,
        meta_bytes: int,
        root: str = "",
        sparse: bool = False,
    ) -> Slot:
        """Reserve a new slot that this process owns; blocks while the memory is made.

        Args:
            directory: A file system in memory; ``Path()`` for memory without a name.
            name: File name.
            capacity_bytes: Room for image and canaries.
            meta_bytes: Room for the description.
            root: URL of the root that it is for.
            sparse: Whether memory for the image is taken piece by piece.

        Raises:
            OSError: There is not enough room, or the memory of a sparse slot cannot be given back
                page by page there; nothing is left behind.
        """
        capacity = align_up(capacity_bytes, PAGE_BYTES)
        size = PAGE_BYTES + capacity + align_up(meta_bytes, PAGE_BYTES)
        path = directory / name if directory != Path() else None
        if path is None:
            fd = os.memfd_create(name, os.MFD_CLOEXEC)
        else:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        hold = None
        try:
            hold = Hold(fd, Part.OWNER)
            if sparse:
                os.truncate(fd, size)
                os.posix_fallocate(fd, 0, PAGE_BYTES)
                os.posix_fallocate(fd, PAGE_BYTES + capacity, size - PAGE_BYTES - capacity)
                os.pwrite(fd, struct.pack("Q", 1), 8 * _Word.SPARSE)
            else:
                os.posix_fallocate(fd, 0, size)
            slot = cls(fd, path)
            slot._give_back(0, capacity)  # at once, and not in the middle of a save
        except BaseException:
            if hold is not None:
                hold.release()
            os.close(fd)
            if path is not None:
                path.unlink(missing_ok=True)
            raise
        slot._hold = hold
        text = root.encode(errors="surrogateescape")
        if len(text) <= PAGE_BYTES - _ROOT_AT:
            slot._bytes[_ROOT_AT : _ROOT_AT + len(text)] = text
            slot._words[_Word.ROOT] = len(text)
        slot._words[_Word.CAPACITY] = capacity
        slot._words[_Word.META_CAPACITY] = size - PAGE_BYTES - capacity
        owner = ProcessId.of(os.getpid())
        slot._words[_Word.OWNER_PID], slot._words[_Word.OWNER_START] = owner.pid, owner.start
        slot._words[_Word.MAGIC] = _MAGIC
        return slot

    @classmethod
    def open(cls, path: Path) -> Slot:
        """Map an existing slot of this user; what is read of it takes memory when it is.

        Raises:
            OSError: It is gone, or belongs to somebody else.
            ValueError: It is no slot.
        """
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            found = os.fstat(fd)
            if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) != 0o600:
                raise PermissionError(f"{path}: not a private file of this user")
            if found.st_size < PAGE_BYTES:
                raise ValueError(f"{path}: not an asymcheck slot")
            return cls(fd, path, populate=False)
        except BaseException:
            os.close(fd)
            raise

    # --- header -------------------------------------------------------------

    @property
    def state(self) -> SlotState:
        """Where the content is in its life."""
        return SlotState(self._words[_Word.STATE])

    @state.setter
    def state(self, state: SlotState) -> None:
        self._words[_Word.STATE] = state

    @property
    def copied_bytes(self) -> int:
        """The image is complete up to here."""
        return self._words[_Word.COPIED]

    @copied_bytes.setter
    def copied_bytes(self, nbytes: int) -> None:
        self._words[_Word.COPIED] = nbytes

    @property
    def owner(self) -> ProcessId:
        """The trainer that made the slot."""
        return ProcessId(self._words[_Word.OWNER_PID], self._words[_Word.OWNER_START])

    @property
    def persister(self) -> ProcessId:
        """The process that persists it; pid 0 when it is a thread of the trainer."""
        return ProcessId(self._words[_Word.PERSISTER_PID], self._words[_Word.PERSISTER_START])

    @persister.setter
    def persister(self, process: ProcessId) -> None:
        self._words[_Word.PERSISTER_PID] = process.pid
        self._words[_Word.PERSISTER_START] = process.start

    @property
    def beat(self) -> int:
        """Step that the trainer was at when it last told; 0 before. Goes on while nothing is
        saved, so whoever looks from outside sees that it lives.
        """
        return self._words[_Word.BEAT]

    @beat.setter
    def beat(self, step: int) -> None:
        self._words[_Word.BEAT] = step

    @property
    def root(self) -> str:
        """URL of the root that it is for; empty where it was too long to stand here."""
        text = self._bytes[_ROOT_AT : min(_ROOT_AT + self._words[_Word.ROOT], PAGE_BYTES)]
        return bytes(text).decode(errors="surrogateescape")

    def hold_as_persister(self) -> None:
        """Say to everyone who can see the slot that this process persists it."""
        self._hold = self._hold or Hold(self.fd, Part.PERSISTER)

    # --- memory of a sparse slot ---------------------------------------------

    @property
    def is_sparse(self) -> bool:
        """Whether memory for the image is taken piece by piece."""
        return bool(self._words[_Word.SPARSE])

    @property
    def is_torn(self) -> bool:
        """Whether memory of the content was given back: it cannot be persisted from its start."""
        return bool(self._words[_Word.TORN])

    def held_bytes(self, upto: int = 0) -> int:
        """Memory that counts against the ring, or would with a copy up to there; in the process of
        the trainer.
        """
        taken = max(self._taken_to, upto)
        return max(0, taken - self._words[_Word.RELEASED]) if taken else 0

    def take(self, extents: Iterable[Extent]) -> None:
        """Have memory for parts of the image, which may be touched after that; blocks while it is
        made. A full slot has it.

        Args:
            extents: Ascending.

        Raises:
            CaptureError: There is none.
        """
        if self.is_sparse:
            start = stop = 0
            for extent in extents:
                if extent.start > align_up(stop, PAGE_BYTES):
                    self._allocate(start, stop)
                    start = extent.start
                stop = extent.stop
            self._allocate(start, stop)

    def take_next(self, piece: Extent) -> None:
        """Have memory for the next piece of a copy, within the bound of the ring: blocks until
        there is room. For the copying thread, whose pieces come one behind the other.

        Raises:
            GivenUp: Nobody persists it any more.
            CaptureError: There is no memory, although the bound allows it.
        """
        if self.ring is not None:
            self.ring.await_room(self, piece.stop)
            self.take([piece])
            self._taken_to = piece.stop

    def release(self, part: Extent) -> None:
        """Give back the memory of a chunk that was written; a full slot keeps it. Nothing may read
        there again. Any thread of the process that persists may.
        """
        if self.is_sparse:
            self._words[_Word.TORN] = 1
            start = part.start // PAGE_BYTES * PAGE_BYTES
            nbytes = align_up(part.stop, PAGE_BYTES) - start
            self._give_back(start, nbytes)
            with self._lock:
                self._words[_Word.RELEASED] += nbytes

    def give_up(self) -> None:
        """Say that nobody will persist the content; in the process of the trainer."""
        self.is_given_up = True

    def empty(self) -> None:
        """Give all memory of the content back; a full slot keeps it."""
        if self.is_sparse:
            self._give_back(0, self._words[_Word.CAPACITY])
            self._taken_to = 0
            self._words[_Word.RELEASED] = self._words[_Word.TORN] = 0

    def _allocate(self, start: int, stop: int) -> None:
        if stop <= start:
            return
        try:
            os.posix_fallocate(self.fd, PAGE_BYTES + start, stop - start)
        except OSError as failure:
            raise CaptureError(
                f"{self.path or 'memory without a name'}: expected {stop - start} bytes of shared "
                f"memory, {failure.strerror}; free some, or give the container more (docker: "
                f"--shm-size), see 'asymcheck doctor'"
            ) from failure

    def _give_back(self, start: int, nbytes: int) -> None:
        if self.is_sparse:
            try:
                self._map.madvise(mmap.MADV_REMOVE, PAGE_BYTES + start, nbytes)
            except OSError as failure:
                raise OSError(errno.EOPNOTSUPP, "memory cannot be given back in parts") from failure

    # --- content ------------------------------------------------------------

    def fits(self, capacity_bytes: int, meta_bytes: int) -> bool:
        """Whether so much can be held."""
        return (
            capacity_bytes <= self._words[_Word.CAPACITY]
            and meta_bytes <= self._words[_Word.META_CAPACITY]
        )

    def begin(self, image_bytes: int, canary_bytes: int, meta: bytes) -> None:
        """Start to fill: nothing of the old content counts any more.

        Raises:
            CaptureError: The slot is sparse, and there is no memory for the canaries.
        """
        self.state = SlotState.FREE
        self._words[_Word.HASHES] = self._words[_Word.TAKEN] = 0
        self.empty()
        self.is_given_up = False
        self.copied_bytes = 0
        self._words[_Word.IMAGE] = image_bytes
        self._words[_Word.CANARIES] = canary_bytes
        self._words[_Word.META] = len(meta)
        at = PAGE_BYTES + self._words[_Word.CAPACITY]
        self._bytes[at : at + len(meta)] = meta
        end = align_up(image_bytes, PAGE_BYTES)
        if self.is_sparse:  # what has no memory is zero already
            self._allocate(end, end + canary_bytes)
        else:
            self._bytes[PAGE_BYTES + image_bytes : PAGE_BYTES + end] = bytes(end - image_bytes)
        self.state = SlotState.FILLING

    @property
    def image(self) -> memoryview:
        """The image, with zeros up to the next page."""
        end = align_up(self._words[_Word.IMAGE], PAGE_BYTES)
        return self._bytes[PAGE_BYTES : PAGE_BYTES + end]

    @property
    def content(self) -> memoryview:
        """All room for image and canaries."""
        return self._bytes[PAGE_BYTES : PAGE_BYTES + self._words[_Word.CAPACITY]]

    @property
    def canaries(self) -> memoryview:
        """Values taken at the boundary, to compare with the image."""
        at = PAGE_BYTES + align_up(self._words[_Word.IMAGE], PAGE_BYTES)
        return self._bytes[at : at + self._words[_Word.CANARIES]]

    @property
    def meta(self) -> bytes:
        """The description."""
        at = PAGE_BYTES + self._words[_Word.CAPACITY]
        return bytes(self._bytes[at : at + self._words[_Word.META]])

    @property
    def hashes(self) -> bytes:
        """What was left with ``leave_hashes`` for this content, empty where nothing was."""
        at = PAGE_BYTES + self._words[_Word.CAPACITY] + self._words[_Word.META]
        return bytes(self._bytes[at : at + self._words[_Word.HASHES]])

    def leave_hashes(self, data: bytes) -> None:
        """Keep hashes of the content with it, until the next ``begin``. Whoever persists may."""
        at = PAGE_BYTES + self._words[_Word.CAPACITY] + self._words[_Word.META]
        self._bytes[at : at + len(data)] = data
        self._words[_Word.HASHES] = len(data)

    @property
    def is_taken(self) -> bool:
        """Whether a start went on from this content, read here."""
        return bool(self._words[_Word.TAKEN])

    def note_taken(self) -> None:
        """Say that a start goes on from this content."""
        self._words[_Word.TAKEN] = 1

    def close(self, *, unlink: bool) -> None:
        """Unmap as soon as no view is left; with ``unlink`` remove the file too."""
        if unlink and self.path is not None:
            self.path.unlink(missing_ok=True)
        if self._hold is not None:
            self._hold.release()
        os.close(self.fd)
        self._words.release()
        try:
            self._bytes.release()
            self._map.close()
        except BufferError:
            pass  # a view is still out: the map goes with it


def capacity_for(image_bytes: int, canary_bytes: int) -> int:
    """Room that an image and its canaries take."""
    return align_up(image_bytes, PAGE_BYTES) + canary_bytes
