"""All agents together: who gets an object, who has its newest version, who is left.

Packs go to the hosts that Gemini's placement gives their host; everything else is small and goes
to every agent. What was done to a name is ordered by stamps: whoever changes something asks
the agents that it goes to for their clocks first, and takes a greater one.

All of it runs in one event loop.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

import xxhash

from asymcheck.errors import ObjectNotFound, StoreError
from asymcheck.planning.replicas import place_replicas
from asymcheck.storage.peers.link import Link, Opened, PeerFailed, PeerRefused, Upload, parse_entry
from asymcheck.storage.peers.shelf import Entry, Stamp, is_spread
from asymcheck.storage.peers.words import LineLost

T = TypeVar("T")

_RANK = re.compile(r"-r([0-9]{4})-[0-9]{4,6}\.pack\Z")


class Swarm:
    """The agents of a store.

    Args:
        links: To each of them, in the order of the hosts.
        replicas: How many hold a pack.
        here: Which of them is on this host, ``None`` for none.
        writer: Tells the stamps of this process from those of others.
        ranks_per_host: Where the host of a pack is told by the rank in its name; 0 where it is
            the host of whoever writes it.
    """

    def __init__(
        self,
        links: list[Link],
        replicas: int,
        here: int | None,
        writer: str,
        ranks_per_host: int = 0,
    ) -> None:
        self.links = links
        self.here = here
        self._placed = place_replicas(len(links), replicas)
        self._writer = writer
        self._ranks_per_host = ranks_per_host
        self._count = 0

    # --- who ----------------------------------------------------------------

    def home_of(self, name: str) -> int:
        """The host whose state an object is that this process writes."""
        of_rank = _RANK.search(name) if self._ranks_per_host else None
        if of_rank is not None:
            return int(of_rank[1]) // self._ranks_per_host % len(self.links)
        if self.here is not None:
            return self.here
        return int(xxhash.xxh3_64_intdigest(name.encode()) % len(self.links))

    def holders_of(self, name: str, home: int) -> list[Link]:
        """Which agents an object goes to."""
        return [self.links[i] for i in self._placed[home]] if is_spread(name) else self.links

    def _near_first(self, links: Iterable[Link]) -> list[Link]:
        near = self.links if self.here is None else [self.links[i] for i in self._placed[self.here]]
        rank = {id(link): i for i, link in enumerate([*near, *self.links][::-1])}
        return sorted(links, key=lambda link: -rank[id(link)])

    async def each(
        self, links: Iterable[Link], work: Callable[[Link], Awaitable[T]]
    ) -> list[tuple[Link, T]]:
        """What the agents that are well answer, all asked at once.

        Where none is well all are asked: the probe may be late.

        Raises:
            StoreError: None of them answered.
            PeerRefused: One of them said no.
        """
        links = list(links)
        asked = [link for link in links if link.aside is None] or links
        done = await asyncio.gather(*(work(link) for link in asked), return_exceptions=True)
        found: list[tuple[Link, T]] = []
        refused: PeerRefused | None = None
        for link, answer in zip(asked, done, strict=True):
            if isinstance(answer, PeerRefused):
                refused = refused or answer
            elif isinstance(answer, PeerFailed):
                continue
            elif isinstance(answer, BaseException):
                raise answer
            else:
                found.append((link, answer))
        if refused is not None:
            raise refused
        if not found:
            raise self.nobody(links)
        return found

    def nobody(self, links: Iterable[Link]) -> StoreError:
        """What to raise when no agent is left."""
        why = "; ".join(f"{link.address}: {link.aside}" for link in links)
        return StoreError(
            f"no agent of {len(self.links)} that may hold it can be reached ({why}): start them "
            f"with 'asymcheck agent', or mend the network",
            retryable=True,
        )

    def spoken_missing(self) -> str:
        """Who cannot be asked, as the end of a message."""
        gone = [f"{link.address} ({link.aside})" for link in self.links if link.aside]
        return f"; out of reach: {', '.join(gone)}" if gone else ""

    # --- reading ------------------------------------------------------------

    async def entries(self, prefix: str) -> list[Entry]:
        """What there is below a folder: of each name the newest that somebody knows of."""
        newest: dict[str, Entry] = {}
        for _, entries in await self.each(self.links, lambda link: link.entries(prefix)):
            for entry in entries:
                known = newest.get(entry.name)
                if known is None or known.stamp < entry.stamp:
                    newest[entry.name] = entry
        return [entry for entry in newest.values() if entry.is_there]

    async def find(self, name: str) -> tuple[Entry, list[Link]] | None:
        """The newest version of an object and who has it, the nearest first."""
        told = await self.each(self.links, lambda link: self._stat(link, name))
        known = [(link, entry) for link, entry in told if entry is not None]
        if not known:
            return None
        newest = max((entry for _, entry in known), key=lambda entry: entry.stamp)
        if not newest.is_there:
            return None
        return newest, self._near_first(link for link, entry in known if entry == newest)

    @staticmethod
    async def _stat(link: Link, name: str) -> Entry | None:
        found = (await link.ask("stat", name=name)).get("entry")
        if found is None:
            return None
        async with link.guarded():
            entry = parse_entry(found)
            if entry.name != name:
                raise LineLost(f"it told of {entry.name!r}, {name!r} was asked for")
        return entry

    async def open(self, name: str) -> Copies:
        """Open the nearest copy.

        Raises:
            ObjectNotFound: Nobody has it.
            StoreError: Nobody can be reached.
        """
        for _ in range(len(self.links) + 1):  # it may be replaced between finding and opening
            found = await self.find(name)
            if found is None:
                break
            copies = Copies(name, *found)
            if await copies.next_one(or_newer=True):
                return copies
        raise ObjectNotFound(f"{name}: not found{self.spoken_missing()}")

    # --- changing -----------------------------------------------------------

    def stamp(self) -> Stamp:
        """Newer than all that any agent has told of, and used once."""
        self._count = max(self._count, *(link.clock for link in self.links)) + 1
        return self._count, self._writer

    async def uploads(self, name: str) -> Uploads:
        """Begin to store an object with all of its holders that are well.

        Raises:
            StoreError: None of them is.
            PeerRefused: One has no room.
        """
        home = self.home_of(name)
        holders = self.holders_of(name, home)
        begun = await self.each(holders, lambda link: link.upload(name, home))
        return Uploads(self, holders, [upload for _, upload in begun])

    async def create(self, name: str, data: bytes) -> bool:
        """Store an object unless somebody has it.

        One agent after the other is asked, all writers in the same order, and the first that says
        no ends it: of two writers that both reach some agent at most one succeeds.
        """
        if await self.find(name) is not None:
            return False
        home = self.home_of(name)
        holders = self.holders_of(name, home)
        entry = Entry(name, len(data), xxhash.xxh3_128_hexdigest(data), home, self.stamp(), True)
        taken: list[Link] = []
        for link in [h for h in holders if h.aside is None] or holders:
            try:
                stands = await self._create_at(link, entry, data)
            except PeerFailed:
                continue
            if not stands:
                await self._undo(entry, holders, taken)
                return False
            taken.append(link)
        if not taken:
            raise self.nobody(holders)
        return True

    async def _create_at(self, link: Link, entry: Entry, data: bytes) -> bool:
        upload = await link.upload(entry.name, entry.home)
        try:
            await upload.feed(memoryview(data))
            return await upload.finish(entry.nbytes, entry.digest, entry.stamp, only_new=True)
        finally:
            upload.abort()

    async def _undo(self, entry: Entry, holders: list[Link], taken: list[Link]) -> None:
        if taken:
            # Not a removal: that would be newer than what the other writer creates. All are told:
            # one may have healed itself from those that took it.
            await self.each(holders, lambda link: link.ask("withdraw", entry=entry))

    async def delete(self, name: str) -> None:
        """Remove an object with everybody."""
        await self.each(self.links, lambda link: link.ask("info"))  # for their clocks
        gone = Entry(name, 0, "", self.home_of(name), self.stamp(), False)
        await self.each(self.links, lambda link: link.ask("delete", entry=gone))

    async def close(self) -> None:
        """End every connection."""
        await asyncio.gather(*(link.close() for link in self.links), return_exceptions=True)


class Uploads:
    """One object on its way to several agents: one that fails is left, the others go on."""

    def __init__(self, swarm: Swarm, holders: list[Link], each: list[Upload]) -> None:
        self._swarm = swarm
        self._holders = holders
        self._each = each

    async def feed(self, data: memoryview) -> None:
        """Send the next bytes to all; waits for the slowest, within its bound.

        Raises:
            StoreError: None is left.
            PeerRefused: One has no room.
        """
        await self._of_each(lambda upload: upload.feed(data))

    async def finish(self, nbytes: int, digest: str) -> None:
        """Say to all that it is whole. Raises as ``feed``."""
        stamp = self._swarm.stamp()
        await self._of_each(lambda upload: upload.finish(nbytes, digest, stamp))

    async def _of_each(self, work: Callable[[Upload], Awaitable[object]]) -> None:
        done = await asyncio.gather(*(work(u) for u in self._each), return_exceptions=True)
        for answer in done:
            if isinstance(answer, BaseException) and not isinstance(answer, PeerFailed):
                raise answer
        both = zip(self._each, done, strict=True)
        self._each = [u for u, answer in both if not isinstance(answer, PeerFailed)]
        if not self._each:
            raise self._swarm.nobody(self._holders)

    def abort(self) -> None:
        """Leave what is not whole."""
        for upload in self._each:
            upload.abort()


class Copies:
    """An open object: where the agent that gives it fails, another one goes on."""

    def __init__(self, name: str, entry: Entry, links: list[Link]) -> None:
        self.name = name
        self.entry = entry
        self._links = links
        self._opened: Opened | None = None
        self._changing = asyncio.Lock()

    async def next_one(self, *, or_newer: bool = False) -> bool:
        """Open it at the next agent that still has it; whether there is one.

        Args:
            or_newer: Take what has replaced it since it was found too: who writes it again and
                again must not keep others from reading it.
        """
        while self._links:
            link = self._links.pop(0)
            try:
                opened = await link.open(self.entry.name)
            except PeerFailed:
                continue
            if opened is None:
                continue
            if opened.entry == self.entry or (or_newer and opened.entry.stamp > self.entry.stamp):
                self._opened, self.entry = opened, opened.entry
                return True
            await opened.close()
        return False

    async def readinto(self, offset: int, into: memoryview) -> None:
        """Fill ``into``.

        Raises:
            StoreError: Nobody has it any more.
        """
        while self._opened is not None:
            opened, at = self._opened, 0
            try:
                async for piece in opened.read(offset, len(into)):
                    into[at : at + len(piece)] = piece
                    at += len(piece)
                return
            except PeerFailed as failure:
                # Several threads may meet the same failure: the first finds the next agent.
                async with self._changing:
                    if self._opened is opened and not await self.next_one():
                        self._opened = None
                        raise StoreError(
                            f"read {self.name}: {failure}, and no other agent has it",
                            retryable=True,
                        ) from failure
        raise StoreError(f"read {self.name}: no agent has it any more", retryable=True)

    async def close(self) -> None:
        """Let go of it."""
        if self._opened is not None:
            await self._opened.close()
