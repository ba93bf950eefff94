"""An agent gets from the others what it should hold and does not: after its host was replaced, or
was out of reach.

It asks the others, one look after another, what they know of. Removals come first; then, of what
is newer there and belongs here by the placement, the small objects that are of no checkpoint,
then checkpoint after checkpoint, the newest whole one first. An object arrives as from a client:
nobody sees it before its length and hash agree, and it keeps its stamp, so what was removed or
replaced meanwhile stays so. All of it runs in the event loop of the agent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from asymcheck.errors import OptionError, StoreError
from asymcheck.planning.replicas import place_replicas
from asymcheck.storage.peers.link import Link, Opened, PeerFailed, PeerRefused
from asymcheck.storage.peers.secret import Address
from asymcheck.storage.peers.shelf import Entry, NoRoom, Shelf, Torn, is_spread

_log = logging.getLogger(__name__)

_PART_BYTES = 1 << 20
_MOST_SPOKEN = 32
_MANIFEST = "-MANIFEST.json"


@dataclass(frozen=True)
class Membership:
    """Who holds what, for an agent that knows its peers.

    Args:
        hosts: Where all agents listen, in the order of the clients' URLs.
        here: Which of them this one is.
        replicas: m, on how many hosts a pack lies.

    Raises:
        OptionError: There is no such placement.
    """

    hosts: tuple[Address, ...]
    here: int
    replicas: int

    def __post_init__(self) -> None:
        if not 0 <= self.here < len(self.hosts):
            raise OptionError(f"self: expected from 0 to {len(self.hosts) - 1}, found {self.here}")
        place_replicas(len(self.hosts), self.replicas)

    def told(self, host: int | None = None) -> list[int]:
        """What an agent says of itself, so that all can see that they mean the same: how many
        hosts there are, m, and which one it is (this one for ``None``).
        """
        return [len(self.hosts), self.replicas, self.here if host is None else host]

    def homes(self) -> frozenset[int]:
        """The hosts whose packs belong here."""
        placed = place_replicas(len(self.hosts), self.replicas)
        return frozenset(home for home, holders in enumerate(placed) if self.here in holders)


@dataclass(frozen=True, slots=True)
class Healed:
    """What came from other agents since nothing was missing.

    Attributes:
        objects: How many objects.
        nbytes: Their bytes.
    """

    objects: int = 0
    nbytes: int = 0


class Healer:
    """Keeps a shelf as full as the placement says.

    Args:
        shelf: Of this agent.
        membership: Who the agents are.
        links: To the other agents, by which host it is.
        most_bytes_per_s: How fast it takes objects, all in all.
        look_s: Between two looks, in seconds.
        told: Called in the loop each time when nothing is missing any more.

    Attributes:
        missing: Objects that were known to be missing at the latest look and did not come.
        is_whole: Whether all other agents were asked at the latest look and nothing was missing.
    """

    def __init__(
        self,
        shelf: Shelf,
        membership: Membership,
        links: Mapping[int, Link],
        *,
        most_bytes_per_s: float,
        look_s: float = 5.0,
        told: Callable[[Healed], None] = lambda healed: None,
    ) -> None:
        self.missing = 0
        self.is_whole = False
        self._shelf = shelf
        self._homes = membership.homes()
        self._links = {link: membership.told(host) for host, link in links.items()}
        self._most_bytes_per_s = most_bytes_per_s
        self._look_s = look_s
        self._told = told
        self._marks: dict[Address, list[Any]] = {}  # what each said of itself at the last full look
        self._healed = Healed()
        self._free_at_s = 0.0
        self._spoken: list[str] = []

    async def run(self) -> None:
        """Look again and again, until it is cancelled."""
        while True:
            if not await self.look():
                await asyncio.sleep(self._look_s)

    async def close(self) -> None:
        """End every connection."""
        await asyncio.gather(*(link.close() for link in self._links), return_exceptions=True)

    async def look(self) -> bool:
        """Ask all for what they know, and get the most urgent part of what is missing.

        Returns:
            Whether something came, so that looking again at once is worth it.
        """
        marks = await self._ask(self._links, lambda link: link.ask("info"))
        marks = [(link, said) for link, said in marks if self._agrees(link, said.get("member"))]
        now = {link.address: [said.get("born"), said.get("changes")] for link, said in marks}
        if self.is_whole and now == self._marks:
            return False
        found = await self._ask((link for link, _ in marks), lambda link: link.entries(""))
        known = _newest(found)
        for entry, _ in sorted(known.values(), key=lambda pair: pair[0].stamp):
            self._make_way(entry)
        missing = [
            (entry, links)
            for entry, links in known.values()
            if entry.is_there and self._belongs(entry) and self._shelf.wants(entry)
        ]
        self._marks = now
        came = await self._take_first(missing, known)
        self.missing = len(missing) - came
        self.is_whole = not self.missing and len(found) == len(self._links)
        if self.is_whole and self._healed.objects:
            self._told(self._healed)
            self._healed = Healed()
        return came > 0

    def _agrees(self, link: Link, member: object) -> bool:
        """Whether an agent means the same by a host's number, or does not say."""
        expected = self._links[link]
        if member is None or member == expected:
            return True
        self._warn(
            f"{link.address}: started with other --peers, --self or --replicas than this agent: "
            f"expected [hosts, replicas, self] = {expected}, found {member}: nothing comes from it"
        )
        return False

    async def _ask(
        self, links: Iterable[Link], work: Callable[[Link], Awaitable[Any]]
    ) -> list[tuple[Link, Any]]:
        """What those answer that are well, all asked at once."""
        asked = [link for link in links if link.aside is None]
        done = await asyncio.gather(*(work(link) for link in asked), return_exceptions=True)
        for answer in done:
            if isinstance(answer, BaseException) and not isinstance(
                answer, PeerFailed | PeerRefused
            ):
                raise answer
        both = zip(asked, done, strict=True)
        return [(link, answer) for link, answer in both if not isinstance(answer, BaseException)]

    def _belongs(self, entry: Entry) -> bool:
        return not is_spread(entry.name) or entry.home in self._homes

    def _make_way(self, entry: Entry) -> None:
        """Let go of what is older here and not wanted any more."""
        if not entry.is_there:
            self._shelf.remove(entry)
        elif not self._belongs(entry):
            old = self._shelf.known(entry.name)
            if old is not None and old.is_there and old.stamp < entry.stamp:
                self._shelf.withdraw(old)

    # --- taking ---------------------------------------------------------------

    async def _take_first(
        self, missing: list[tuple[Entry, list[Link]]], known: dict[str, tuple[Entry, list[Link]]]
    ) -> int:
        """Take one checkpoint, the most urgent of which something comes; how many objects came."""
        whole = {
            _checkpoint_of(entry.name): entry.stamp
            for entry, _ in known.values()
            if entry.is_there and entry.name.endswith(_MANIFEST)
        }

        def urgency(entry: Entry) -> tuple[int, int, str]:
            checkpoint = _checkpoint_of(entry.name)
            if checkpoint in whole:
                return 1, -whole[checkpoint][0], checkpoint
            return (2 if checkpoint or is_spread(entry.name) else 0), 0, ""

        def within(entry: Entry) -> tuple[bool, bool, str]:  # packs, indexes, manifest
            return not is_spread(entry.name), entry.name.endswith(_MANIFEST), entry.name

        missing = sorted(missing, key=lambda pair: (urgency(pair[0]), within(pair[0])))
        for _, group in groupby(missing, key=lambda pair: urgency(pair[0])):
            came = [await self._take(entry, links) for entry, links in group]
            if any(came):
                return sum(came)
        return 0

    async def _take(self, entry: Entry, links: list[Link]) -> bool:
        """Take an object from the first that gives it whole; whether it came."""
        why = ""
        for link in links:
            if not self._shelf.wants(entry):
                return False  # it came from a client, or was removed
            try:
                opened = await link.open(entry.name)
            except (PeerFailed, PeerRefused) as failure:
                why = str(failure)
                continue
            if opened is None:
                continue
            try:
                if opened.entry == entry and await self._receive(opened):
                    return True
            except (PeerFailed, PeerRefused, StoreError, Torn) as failure:
                why = f"{link.address}: {failure}"
            except NoRoom as failure:
                why = (
                    f"it needs {entry.nbytes} bytes, {failure.free_bytes} are free: give the "
                    f"agent more (--room-gib)"
                )
                break
            finally:
                await opened.close()
        if why:
            self._warn(f"{entry.name} is missing here and does not come: {why}")
        return False

    def _warn(self, message: str) -> None:
        if message not in self._spoken:
            _log.warning("%s", message)
        self._spoken = [*self._spoken[-_MOST_SPOKEN:], message]

    async def _receive(self, opened: Opened) -> bool:
        entry = opened.entry
        free = self._shelf.free_bytes(is_small=not is_spread(entry.name))
        if entry.nbytes > free:
            raise NoRoom(free)
        incoming = self._shelf.begin(entry.name, entry.home)
        try:
            for offset in range(0, entry.nbytes, _PART_BYTES):
                size = min(_PART_BYTES, entry.nbytes - offset)
                part = bytearray()
                async for piece in opened.read(offset, size):
                    part += piece
                incoming.append(memoryview(part))
                if not self._shelf.wants(entry, incoming):
                    return False
                await self._give_way(size)
            held = incoming.seal(entry.nbytes, entry.digest, entry.stamp)
        finally:
            incoming.drop()
        if not self._shelf.put(held):
            return False
        self._healed = Healed(self._healed.objects + 1, self._healed.nbytes + entry.nbytes)
        return True

    async def _give_way(self, nbytes: int) -> None:
        """Wait so long that no more than its share of the network is taken."""
        now_s = asyncio.get_running_loop().time()
        self._free_at_s = max(now_s, self._free_at_s) + nbytes / self._most_bytes_per_s
        await asyncio.sleep(self._free_at_s - now_s)


def _newest(
    found: list[tuple[Link, list[Entry]]],
) -> dict[str, tuple[Entry, list[Link]]]:
    """Of each name the newest that somebody knows of, and who says so."""
    known: dict[str, tuple[Entry, list[Link]]] = {}
    for link, entries in found:
        for entry in entries:
            so_far = known.get(entry.name)
            if so_far is None or so_far[0].stamp < entry.stamp:
                known[entry.name] = entry, [link]
            elif so_far[0] == entry:
                so_far[1].append(link)
    return known


def _checkpoint_of(name: str) -> str:
    """What the names of all objects of a checkpoint begin with; empty for what is of none."""
    folder, _, file = name.rpartition("/")
    attempt, dash, _ = file.partition("-")
    return f"{folder}/{attempt}" if dash and "step-" in folder.rpartition("/")[2] else ""
