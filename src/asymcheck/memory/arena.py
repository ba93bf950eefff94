"""Slots of host memory that outlive the training process.

A slot is one file in shared memory: a header page, the image of the state, canary values, and
the description of what the image holds. Everything that persisting needs is in the slot, so a
persister (or the next start of the job) can take it over from a dead trainer.

Plain files, not ``multiprocessing.shared_memory``: its resource tracker removes the segments
when the trainer dies. Room is reserved with ``posix_fallocate``, since touching a page that
the file system cannot give ends in SIGBUS.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import re
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from enum import IntEnum
from pathlib import Path

from asymcheck.errors import CaptureError
from asymcheck.memory.holding import Hold, Part
from asymcheck.memory.host import available_bytes
from asymcheck.memory.process import ProcessId
from asymcheck.planning.layout import PAGE_BYTES, MiB, align_up

SHARED_MEMORY = Path("/dev/shm")
_MAGIC = int.from_bytes(b"asymslt1", "little")
_NAME = re.compile(r"asymcheck-(\d+)-([0-9a-f]{32})-r(\d{4})-(\d+)-(\d+)\Z")
_HEADROOM_BYTES = MiB  # a state that grows a little keeps its slot


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


_ROOT_AT = 1024  # from here on the header page holds the root's URL


class Slot:
    """One slot, mapped. Trainer and persister each have their own object on the same memory.

    Args:
        fd: A descriptor of the file; the slot closes it.
        path: Its name, ``None`` for memory without one.

    Attributes:
        token: Tells the slots of one arena apart.
    """

    def __init__(self, fd: int, path: Path | None) -> None:
        self.fd = fd
        self.path = path
        self.token = 0
        self._hold: Hold | None = None
        size = os.fstat(fd).st_size
        populate = getattr(mmap, "MAP_POPULATE", 0)
        self._map = mmap.mmap(fd, size, mmap.MAP_SHARED | populate)
        self._bytes = memoryview(self._map)
        self._words = self._bytes[:PAGE_BYTES].cast("Q")
        if self._words[_Word.MAGIC] not in (0, _MAGIC):
            raise ValueError(f"{path}: not an asymcheck slot")

    @classmethod
    def create(
        cls, directory: Path, name: str, capacity_bytes: int, meta_bytes: int, root: str = ""
    ) -> Slot:
        """Reserve a new slot that this process owns; blocks while the memory is made.

        Args:
            directory: A file system in memory; ``Path()`` for memory without a name.
            name: File name.
            capacity_bytes: Room for image and canaries.
            meta_bytes: Room for the description.
            root: URL of the root that it is for.

        Raises:
            OSError: There is not enough room; nothing is left behind.
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
            os.posix_fallocate(fd, 0, size)
            slot = cls(fd, path)
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
        """Map an existing slot of this user.

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
            return cls(fd, path)
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
    def root(self) -> str:
        """URL of the root that it is for; empty where it was too long to stand here."""
        text = self._bytes[_ROOT_AT : min(_ROOT_AT + self._words[_Word.ROOT], PAGE_BYTES)]
        return bytes(text).decode(errors="surrogateescape")

    def hold_as_persister(self) -> None:
        """Say to everyone who can see the slot that this process persists it."""
        self._hold = self._hold or Hold(self.fd, Part.PERSISTER)

    # --- content ------------------------------------------------------------

    def fits(self, capacity_bytes: int, meta_bytes: int) -> bool:
        """Whether so much can be held."""
        return (
            capacity_bytes <= self._words[_Word.CAPACITY]
            and meta_bytes <= self._words[_Word.META_CAPACITY]
        )

    def begin(self, image_bytes: int, canary_bytes: int, meta: bytes) -> None:
        """Start to fill: nothing of the old content counts any more."""
        self.state = SlotState.FREE
        self.copied_bytes = 0
        self._words[_Word.IMAGE] = image_bytes
        self._words[_Word.CANARIES] = canary_bytes
        self._words[_Word.META] = len(meta)
        at = PAGE_BYTES + self._words[_Word.CAPACITY]
        self._bytes[at : at + len(meta)] = meta
        end = align_up(image_bytes, PAGE_BYTES)
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


def slot_name(run: str, rank: int, serial: int) -> str:
    """File name of a slot of this process."""
    return f"asymcheck-{os.getuid()}-{run}-r{rank:04d}-{os.getpid()}-{serial}"


def slots_of(directory: Path, run: str | None = None, rank: int | None = None) -> Iterator[Path]:
    """Slots of this user that lie there, of one run and rank or of all."""
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return
    for name in names:
        found = _NAME.match(name)
        if found is None or int(found[1]) != os.getuid():
            continue
        if run in (None, found[2]) and rank in (None, int(found[3])):
            yield directory / name


def owner_of(path: Path) -> int:
    """Process number of the trainer that made a slot, from its name."""
    found = _NAME.match(path.name)
    return int(found[4]) if found else 0


def run_of(path: Path) -> str:
    """Id of the run that a slot belongs to, from its name."""
    found = _NAME.match(path.name)
    return found[2] if found else ""


class NoRoom(Exception):
    """There is not even memory for one slot."""


class Arena:
    """At most ``slots`` slots, made when they are first needed and reused.

    Args:
        run: Id of the run, part of the file names.
        rank: Rank of this process.
        slots: How many images may be held at once.
        warn: Called once, with what was done instead, when there is too little room.
        directories: Where to make slots, in order of preference; ``Path()`` is memory
            without a name, which does not outlive the processes that hold it.
        root: URL of the root that they are for, for people who find one.

    Attributes:
        before_removal: Called with a slot before its memory goes.
    """

    def __init__(
        self,
        run: str,
        rank: int,
        slots: int,
        warn: Callable[[str], None],
        directories: Sequence[Path] = (SHARED_MEMORY, Path()),
        root: str = "",
    ) -> None:
        self._root = root
        self._run = run
        self._rank = rank
        self._warn = warn
        self._directories = directories
        self._told_of_no_name = False
        self._count = slots
        self._free: list[Slot | None] = [None] * slots
        self._tokens: set[int] = set()
        self._closed = False
        self.before_removal: Callable[[Slot], None] = lambda slot: None
        self._changed = threading.Condition()

    def tokens(self) -> list[int]:
        """Tokens of the slots that exist."""
        with self._changed:
            return sorted(self._tokens)

    def reserve(
        self, capacity_bytes: int, meta_bytes: int, timeout_s: float | None = None
    ) -> Slot | None:
        """A free slot with that much room; blocks while there is none, and while it is made.

        Args:
            capacity_bytes: Room for image and canaries.
            meta_bytes: Room for the description.
            timeout_s: How long to wait for a slot; ``None`` without end.

        Returns:
            The slot, the caller's until ``free``; ``None`` when the time is over.

        Raises:
            NoRoom: Memory does not suffice for a single slot.
            CaptureError: The system refused for another reason; a later call may work.
        """
        while True:
            with self._changed:
                if self._count == 0:
                    raise NoRoom
                if not self._changed.wait_for(lambda: bool(self._free), timeout_s):
                    return None
                slot = self._free.pop()
            try:
                if slot is not None and not slot.fits(capacity_bytes, meta_bytes):
                    self._remove(slot)
                    slot = None
                if slot is None:
                    slot = self._make(capacity_bytes, meta_bytes)
                if slot is not None:
                    self._say_what_is_used(slot, capacity_bytes)
                    return slot
            except BaseException:
                # Interrupted, or refused by the system: the place is there for the next save.
                self._put_back(slot)
                raise
            self._give_up_places(capacity_bytes)

    def prepare(self, capacity_bytes: int, meta_bytes: int) -> None:
        """Make the first slot ahead of its need; blocks while the memory is made.

        Meant for a thread of its own: making a slot takes as long as zeroing it. A
        ``reserve`` in the meantime waits for it. What goes wrong here goes wrong there again.
        """
        with self._changed:
            if self._count == 0 or None not in self._free:
                return
            self._free.remove(None)
        slot = None
        try:
            with suppress(CaptureError):
                slot = self._make(capacity_bytes, meta_bytes)
        finally:
            self._put_back(slot)

    def free(self, slot: Slot) -> None:
        """Give a slot back; any thread may."""
        slot.state = SlotState.FREE
        self._put_back(slot)

    def close(self) -> None:
        """Remove the slots that are free; those still under way stay for a hand-over."""
        with self._changed:
            while self._free:
                slot = self._free.pop()
                if slot is not None:
                    self._remove(slot)
            self._closed = True

    def _put_back(self, slot: Slot | None) -> None:
        with self._changed:
            if self._closed and slot is not None:
                self._remove(slot)
            else:
                self._count = max(self._count, len(self._tokens))
                self._free.append(slot)
                self._changed.notify()

    def _remove(self, slot: Slot) -> None:
        with self._changed:
            self._tokens.discard(slot.token)
        self.before_removal(slot)
        slot.close(unlink=True)

    def _give_up_places(self, capacity_bytes: int) -> None:
        """Do with the slots that exist; where there is none, with none."""
        with self._changed:
            asked, self._count = self._count, len(self._tokens)
            self._free = [slot for slot in self._free if slot is not None]
        self._warn(
            f"{capacity_bytes} bytes of shared memory are not there: "
            + (
                f"{self._count} checkpoints may be under way instead of {asked}"
                if self._count
                else "each save blocks training until it is durable"
            )
            + "; give the container more (docker: --shm-size), see 'asymcheck doctor'"
        )

    def _say_what_is_used(self, slot: Slot, capacity_bytes: int) -> None:
        if slot.path is not None or self._directories[0] == Path() or self._told_of_no_name:
            return
        self._told_of_no_name = True
        self._warn(
            f"{self._directories[0]} has no room for {capacity_bytes} bytes: memory "
            f"without a name is used, so a save under way survives a killed trainer, "
            f"but not a killed persister; see 'asymcheck doctor'"
        )

    def _make(self, capacity_bytes: int, meta_bytes: int) -> Slot | None:
        capacity, meta = capacity_bytes + _HEADROOM_BYTES, meta_bytes + _HEADROOM_BYTES
        if capacity_bytes + meta_bytes > available_bytes():
            return None
        for directory in self._directories:
            slot = self._make_in(directory, capacity, meta)
            if slot is not None:
                return slot
        return None

    def _make_in(self, directory: Path, capacity_bytes: int, meta_bytes: int) -> Slot | None:
        while True:
            token = next(_serials)
            name = slot_name(self._run, self._rank, token)
            try:
                slot = Slot.create(directory, name, capacity_bytes, meta_bytes, self._root)
            except FileExistsError:
                continue  # left over by a dead process that had the number of this one
            except OSError as failure:
                if failure.errno in _NO_ROOM:
                    return None
                hint = _HINTS.get(failure.errno or 0, "see 'asymcheck doctor'")
                where = directory if directory != Path() else "memory without a name"
                raise CaptureError(
                    f"making room for {capacity_bytes} bytes in {where}: {failure.strerror}; {hint}"
                ) from failure
            slot.token = token
            with self._changed:
                self._tokens.add(token)
            return slot


_serials = itertools.count(1)  # of this process: two arenas of one run must not meet
_NO_ROOM = {errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.ENOENT, errno.EACCES, errno.EROFS}
_HINTS = {
    errno.EMFILE: "raise 'ulimit -n': each slot takes three descriptors",
    errno.ENFILE: "the host's table of open files is full",
}
