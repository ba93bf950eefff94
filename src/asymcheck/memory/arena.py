"""Slots of host memory that outlive the training process.

Everything that persisting needs is in the slot, so a persister (or the next start of the job) can
take it over from a dead trainer.

Plain files, not ``multiprocessing.shared_memory``: its resource tracker removes the segments
when the trainer dies. Room is reserved with ``posix_fallocate``, since touching a page that
the file system cannot give ends in SIGBUS.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic

from asymcheck.errors import CaptureError
from asymcheck.memory.host import available_bytes
from asymcheck.memory.process import ProcessId
from asymcheck.memory.slot import GivenUp, Ring, Slot, SlotState, capacity_for
from asymcheck.planning.layout import MiB

__all__ = [
    "SHARED_MEMORY",
    "Arena",
    "GivenUp",
    "NoRoom",
    "ProcessId",
    "Slot",
    "SlotState",
    "capacity_for",
    "owner_of",
    "rank_of",
    "run_of",
    "slot_name",
    "slots_of",
]

SHARED_MEMORY = Path("/dev/shm")
_NAME = re.compile(r"asymcheck-(\d+)-([0-9a-f]{32})-r(\d{4})-(\d+)-(\d+)\Z")
_HEADROOM_BYTES = MiB  # a state that grows a little keeps its slot


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


def rank_of(path: Path) -> int:
    """Rank of the trainer that made a slot, from its name."""
    found = _NAME.match(path.name)
    return int(found[3]) if found else 0


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
        ring_bytes: What all slots may hold together; they are sparse then. ``None`` makes full
            slots.

    Attributes:
        before_removal: Called with a slot before its memory goes.
        ring: What the slots may hold together, ``None`` where they are full.
    """

    def __init__(
        self,
        run: str,
        rank: int,
        slots: int,
        warn: Callable[[str], None],
        directories: Sequence[Path] = (SHARED_MEMORY, Path()),
        root: str = "",
        ring_bytes: int | None = None,
    ) -> None:
        self.ring = None if ring_bytes is None else Ring(ring_bytes)
        self._root = root
        self._run = run
        self._rank = rank
        self._warn = warn
        self._directories = directories
        self._told_of_no_name = False
        self._count = slots
        self._free: list[Slot | None] = [None] * slots
        self._slots: dict[int, Slot] = {}
        self._closed = False
        self.before_removal: Callable[[Slot], None] = lambda slot: None
        self._changed = threading.Condition()

    def tokens(self) -> list[int]:
        """Tokens of the slots that exist."""
        with self._changed:
            return sorted(self._slots)

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
        slot.empty()
        self._put_back(slot)

    def beat(self, step: int) -> None:
        """Show everyone who can see the slots that training is at ``step``."""
        with self._changed:
            for slot in () if self._closed else self._slots.values():
                slot.beat = step

    def give_up_after(self, timeout_s: float) -> None:
        """From then on no copy waits for room in the ring any more."""
        if self.ring is not None:
            self.ring.until_s = monotonic() + timeout_s

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
                self._count = max(self._count, len(self._slots))
                self._free.append(slot)
                self._changed.notify()

    def _remove(self, slot: Slot) -> None:
        with self._changed:
            self._slots.pop(slot.token, None)
        if self.ring is not None:
            self.ring.slots.remove(slot)
        self.before_removal(slot)
        slot.close(unlink=True)

    def _give_up_places(self, capacity_bytes: int) -> None:
        """Do with the slots that exist; where there is none, with none."""
        with self._changed:
            asked, self._count = self._count, len(self._slots)
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
            f"{self._directories[0]} has no room for {capacity_bytes} bytes"
            f"{' that are given back in parts' if self.ring else ''}: memory "
            f"without a name is used, so a save under way survives a killed trainer, "
            f"but not a killed persister; see 'asymcheck doctor'"
        )

    def _make(self, capacity_bytes: int, meta_bytes: int) -> Slot | None:
        capacity, meta = capacity_bytes + _HEADROOM_BYTES, meta_bytes + _HEADROOM_BYTES
        need = capacity_bytes if self.ring is None else min(capacity_bytes, self.ring.nbytes)
        if need + meta_bytes > available_bytes():
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
                slot = Slot.create(
                    directory, name, capacity_bytes, meta_bytes, self._root, self.ring is not None
                )
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
                self._slots[token] = slot
                if self.ring is not None:
                    slot.ring = self.ring
                    self.ring.slots.append(slot)
            return slot


_serials = itertools.count(1)  # of this process: two arenas of one run must not meet
_NO_ROOM = {errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.ENOENT, errno.EACCES, errno.EROFS}
_NO_ROOM |= {errno.EOPNOTSUPP}  # of a sparse slot: elsewhere its memory can be given back
_HINTS = {
    errno.EMFILE: "raise 'ulimit -n': each slot takes three descriptors",
    errno.ENFILE: "the host's table of open files is full",
}
