"""What an agent holds: whole objects in this process's memory, within a room.

Objects are stamped: ``(count, writer)``, greater is newer. Of two objects of one name the newer
stands, and what was deleted leaves its stamp for a while, so agents that lost sight of each
other agree again. Nothing here blocks or locks: all of it belongs to one thread.
"""

from __future__ import annotations

import mmap
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from asymcheck.storage.store import check_name

_SEGMENT_BYTES = 1 << 24
_SMALL_BYTES = 1 << 18
_MOST_REMOVED = 8192
_MOST_WITHDRAWN = 1024
_NAME_BYTES = 1024

Stamp = tuple[int, str]


def is_spread(name: str) -> bool:
    """Whether only the holders of its host have it: packs. All else is small and everywhere."""
    return name.endswith(".pack")


class Entry(NamedTuple):
    """What an agent knows of a name.

    Attributes:
        name: The object's, with its run in front.
        nbytes: Its size; 0 where it was removed.
        digest: Its xxh3-128 in hex.
        home: The host whose state it is.
        stamp: When it was written or removed.
        is_there: Whether it was not removed.
    """

    name: str
    nbytes: int
    digest: str
    home: int
    stamp: Stamp
    is_there: bool


class NoRoom(Exception):
    """It does not fit.

    Attributes:
        free_bytes: What would have fitted.
    """

    def __init__(self, free_bytes: int) -> None:
        super().__init__()
        self.free_bytes = free_bytes


class Torn(Exception):
    """What arrived is not what was sent, or somebody swept it away."""


@dataclass(slots=True, eq=False)
class Held:
    """An object in memory. It stays readable while it is pinned, though removed."""

    entry: Entry
    _segments: list[bytes | mmap.mmap]
    _pins: int = 0
    _removal: Entry | None = None
    """That of the version before, which counts again where this one is taken back."""

    def pieces(self, offset: int, nbytes: int, most: int) -> Iterator[memoryview]:
        """The range in pieces of at most so many bytes; the caller checks that it exists."""
        while nbytes:
            at, inside = divmod(offset, _SEGMENT_BYTES)
            size = min(nbytes, most, _SEGMENT_BYTES - inside)
            yield memoryview(self._segments[at])[inside : inside + size]
            offset, nbytes = offset + size, nbytes - size


class Incoming:
    """An object that is still on its way: nobody sees it."""

    def __init__(self, shelf: Shelf, name: str, home: int) -> None:
        self.name = name
        self.home = home
        self.nbytes = 0
        self.is_swept = False
        self._shelf = shelf
        self._hash = xxhash.xxh3_128()
        self._small = bytearray()
        self._segments: list[mmap.mmap] = []

    def append(self, data: memoryview) -> None:
        """Take the next bytes.

        Raises:
            NoRoom: They do not fit; nothing of it is kept any more.
        """
        free = self._shelf.free_bytes(is_small=not is_spread(self.name))
        if len(data) > free:
            held = self.nbytes
            self.drop()
            raise NoRoom(free + held)
        self._shelf.used_bytes += len(data)
        self._hash.update(data)
        if not self._segments and self.nbytes + len(data) <= _SMALL_BYTES:
            self._small += data
            self.nbytes += len(data)
            return
        if self._small:
            small, self._small, self.nbytes = self._small, bytearray(), 0
            self._fill(memoryview(small))
        self._fill(data)

    def _fill(self, data: memoryview) -> None:
        while data:
            inside = self.nbytes % _SEGMENT_BYTES
            if inside == 0:
                # Pages that are never touched take no memory; the rest goes back when freed.
                flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
                self._segments.append(mmap.mmap(-1, _SEGMENT_BYTES, flags=flags))
            size = min(len(data), _SEGMENT_BYTES - inside)
            self._segments[-1][inside : inside + size] = data[:size]
            self.nbytes += size
            data = data[size:]

    def seal(self, nbytes: int, digest: str, stamp: Stamp) -> Held:
        """The whole object, when it is what was sent.

        Raises:
            Torn: It is not; nothing of it is kept.
        """
        found = self._hash.hexdigest()
        if self.is_swept or (self.nbytes, found) != (nbytes, digest):
            why = "was swept away" if self.is_swept else f"are {self.nbytes} with hash {found}"
            self.drop()
            raise Torn(f"{nbytes} bytes with hash {digest} {why}")
        entry = Entry(self.name, nbytes, digest, self.home, stamp, True)
        held = Held(entry, list(self._segments) if self._segments else [bytes(self._small)])
        self.nbytes = 0  # the room is the object's from now on
        self.drop()
        return held

    def drop(self) -> None:
        """Let go of it."""
        self._shelf.used_bytes -= self.nbytes
        self.nbytes, self._small, self._segments = 0, bytearray(), []
        self._shelf.incoming.discard(self)


class Shelf:
    """Objects by name.

    Args:
        room_bytes: How much all of them together may take, those on their way too. A part of it,
            at most 64 MiB, is kept for small objects: they complete what packs began.

    Attributes:
        used_bytes: What they take now.
        clock: The greatest count of a stamp that was seen.
        changes: How often what is held has changed.
        incoming: Objects on their way.
    """

    def __init__(self, room_bytes: int) -> None:
        self.room_bytes = room_bytes
        self.used_bytes = 0
        self.clock = 0
        self.changes = 0
        self.incoming: set[Incoming] = set()
        self._kept_bytes = min(room_bytes // 16, 64 << 20)
        self._held: dict[str, Held] = {}
        self._removed: dict[str, Entry] = {}
        self._forgotten: Stamp = (0, "")
        self._withdrawn: OrderedDict[tuple[str, Stamp], None] = OrderedDict()

    def free_bytes(self, *, is_small: bool = False) -> int:
        """Room left, for packs or for small objects."""
        kept = 0 if is_small else self._kept_bytes
        return max(0, self.room_bytes - kept - self.used_bytes)

    def begin(self, name: str, home: int) -> Incoming:
        """An object begins to arrive.

        Raises:
            StoreError: The name is not fit.
        """
        check_name(name if len(name) <= _NAME_BYTES else "")
        incoming = Incoming(self, name, home)
        self.incoming.add(incoming)
        return incoming

    def put(self, held: Held, *, only_new: bool = False) -> bool:
        """Show a whole object; whether it stands now.

        Args:
            held: The object.
            only_new: Whether one that is there stays, unless it is this very one.
        """
        name, stamp = held.entry.name, held.entry.stamp
        self._see(stamp)
        there = self._held.get(name)
        known = self.known(name)
        if (name, stamp) in self._withdrawn:
            stands = False
        elif only_new and there is not None:
            stands = there.entry.stamp == stamp
        else:
            stands = known is None or known.stamp < stamp
        if not stands or (there is not None and there.entry.stamp == stamp):
            self.used_bytes -= held.entry.nbytes
            return stands or not only_new
        held._removal = self._removed.get(name)
        self._forget(name)
        self._held[name] = held
        self.changes += 1
        return True

    def remove(self, entry: Entry) -> None:
        """Remove what is older than ``entry`` says, and remember that."""
        self._see(entry.stamp)
        known = self.known(entry.name)
        if known is not None and known.stamp >= entry.stamp:
            return
        is_remembered = entry.stamp > self._forgotten
        if known is None and not is_remembered:
            return
        self._forget(entry.name)
        if is_remembered:
            self._removed[entry.name] = entry
            self._forget_removals()
        self.changes += 1

    def _forget_removals(self) -> None:
        """The oldest of too many; what is older than they comes from nobody any more, so agents
        that tell each other of removals come to an end.
        """
        if len(self._removed) > _MOST_REMOVED + _MOST_REMOVED // 8:
            by_age = sorted(self._removed.values(), key=lambda entry: entry.stamp)
            self._forgotten = by_age[-_MOST_REMOVED - 1].stamp
            self._removed = {entry.name: entry for entry in by_age[-_MOST_REMOVED:]}

    def withdraw(self, entry: Entry) -> None:
        """Let go of this very version, as if it had never been, and do not take it any more."""
        self._withdrawn[entry.name, entry.stamp] = None
        while len(self._withdrawn) > _MOST_WITHDRAWN:
            self._withdrawn.popitem(last=False)
        held = self._held.get(entry.name)
        if held is not None and held.entry == entry:
            self._forget(entry.name)
            if held._removal is not None:
                self._removed[entry.name] = held._removal
            self.changes += 1

    def wants(self, entry: Entry, but: Incoming | None = None) -> bool:
        """Whether what somebody else has is newer, and not on its way here (``but`` for one)."""
        known = self.known(entry.name)
        return (
            (known is None or known.stamp < entry.stamp)
            and (entry.name, entry.stamp) not in self._withdrawn
            and not any(i.name == entry.name and i is not but for i in self.incoming)
        )

    def known(self, name: str) -> Entry | None:
        """What is known of a name."""
        held = self._held.get(name)
        return held.entry if held is not None else self._removed.get(name)

    def entries(self, prefix: str) -> list[Entry]:
        """What is known of the names below a folder, of all for ``""``."""
        folder = f"{prefix}/" if prefix else ""
        held = [h.entry for n, h in self._held.items() if n.startswith(folder)]
        return held + [e for n, e in self._removed.items() if n.startswith(folder)]

    def sweep(self, prefix: str) -> int:
        """Break what is on its way below a folder; how many there were."""
        broken = [i for i in self.incoming if i.name.startswith(f"{prefix}/") and not i.is_swept]
        for incoming in broken:
            incoming.is_swept = True
        return len(broken)

    def pin(self, name: str) -> Held | None:
        """An object that is to be read: it stays, and takes room, until ``unpin``."""
        held = self._held.get(name)
        if held is not None:
            held._pins += 1
        return held

    def unpin(self, held: Held) -> None:
        """It was read."""
        held._pins -= 1
        self._free(held)

    def _see(self, stamp: Stamp) -> None:
        self.clock = max(self.clock, stamp[0])

    def _forget(self, name: str) -> None:
        self._removed.pop(name, None)
        held = self._held.pop(name, None)
        if held is not None:
            self._free(held)

    def _free(self, held: Held) -> None:
        if held._pins == 0 and self._held.get(held.entry.name) is not held and held._segments:
            self.used_bytes -= held.entry.nbytes
            held._segments = []
