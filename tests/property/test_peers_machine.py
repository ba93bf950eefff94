"""Agents are replaced and cut off while writers save and delete: nothing known is undone."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
import xxhash
from aiohttp import WSMessage, WSMsgType
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from asymcheck.errors import StoreError
from asymcheck.planning.replicas import place_replicas
from asymcheck.storage.peers import agent as agents
from asymcheck.storage.peers.healing import Healer, Membership
from asymcheck.storage.peers.link import Link
from asymcheck.storage.peers.secret import Address
from asymcheck.storage.peers.shelf import Entry, Shelf, is_spread
from asymcheck.storage.peers.swarm import Swarm
from asymcheck.storage.peers.words import Line, LineLost

HOSTS, REPLICAS = 5, 2  # a group of two and a ring of three
NAMES = [
    *("run/RUN.json", "run/attempts/000001", "other.pack"),
    *(
        f"run/step-0000000{step}/a000001-{what}"
        for step in (1, 2)
        for what in ("r0000-0000.pack", "r0000.json", "MANIFEST.json")
    ),
]
T = TypeVar("T")


class Pipe:
    """One end of a connection without a network."""

    def __init__(self) -> None:
        self.other: Pipe | None = None
        self._heard: asyncio.Queue[WSMessage] = asyncio.Queue()

    async def send_bytes(self, data: bytes) -> None:
        if self.other is None:
            raise OSError("the pipe is cut")
        self.other._heard.put_nowait(WSMessage(WSMsgType.BINARY, data, ""))

    async def receive(self) -> WSMessage:
        return await self._heard.get()

    async def close(self) -> None:
        for end in (self, self.other):
            if end is not None:
                end.other = None
                end._heard.put_nowait(WSMessage(WSMsgType.CLOSED, None, ""))


def pipe() -> tuple[Line, Line]:
    """Both ends of a connection after the proof."""
    one, other = Pipe(), Pipe()
    one.other, other.other = other, one
    return Line(one, b"one", b"other"), Line(other, b"other", b"one")


class Host:
    """What an agent holds, and who can reach it."""

    def __init__(self) -> None:
        self.shelf = Shelf(1 << 26)
        self.born = 0
        self.is_cut = False
        self.talks: list[tuple[asyncio.Task[None], Line]] = []

    def about(self) -> dict[str, Any]:
        return {"born": self.born, "changes": self.shelf.changes}

    async def hang_up(self) -> None:
        for talk, line in self.talks:
            await line.channel.close()  # type: ignore[attr-defined]
            await talk
        self.talks.clear()


class Wire(Link):
    """A link that needs no network: from one host to another, while neither is cut off."""

    def __init__(self, source: int, target: int, hosts: list[Host]) -> None:
        super().__init__(Address("127.0.0.1", 1 + target), b"", 1e6, 1.0)
        self._ends = hosts[source], hosts[target]

    async def _connect(self) -> Line:
        source, target = self._ends
        if source is not target and (source.is_cut or target.is_cut):
            raise LineLost("the network is cut")
        mine, theirs = pipe()
        talk = agents._Conversation(target.shelf, theirs, target.about).hold("a test")
        target.talks.append((asyncio.get_running_loop().create_task(talk), mine))
        return mine


class Cluster(RuleBasedStateMachine):
    """Real agents, links, writers and healers over pipes.

    The model is the newest version of each name that ever stood anywhere: it stands for ever, but
    where every host that knew of it was lost before it told another one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.hosts = [Host() for _ in range(HOSTS)]
        self.newest: dict[str, Entry] = {}
        self.wires: list[Wire] = []
        self.writers = [
            Swarm(self._wires(at, range(HOSTS)), REPLICAS, at, f"w{at}") for at in range(HOSTS)
        ]
        self.healers = [self._healer(at) for at in range(HOSTS)]

    def _wires(self, source: int, targets: Any) -> list[Link]:
        found = [Wire(source, target, self.hosts) for target in targets]
        self.wires += found
        return list(found)

    def _healer(self, at: int) -> Healer:
        hosts = tuple(Address("127.0.0.1", 1 + i) for i in range(HOSTS))
        others = [i for i in range(HOSTS) if i != at]
        return Healer(
            self.hosts[at].shelf,
            Membership(hosts, at, REPLICAS),
            dict(zip(others, self._wires(at, others), strict=True)),
            most_bytes_per_s=1e12,
        )

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        async def bounded() -> T:
            async with asyncio.timeout(60):
                return await work

        return self.loop.run_until_complete(bounded())

    def _known(self) -> dict[str, Entry]:
        """The newest of each name that some host knows of now."""
        found: dict[str, Entry] = {}
        for host in self.hosts:
            for entry in host.shelf.entries(""):
                if entry.name not in found or found[entry.name].stamp < entry.stamp:
                    found[entry.name] = entry
        return found

    @rule(
        at=st.integers(0, HOSTS - 1),
        name=st.sampled_from(NAMES),
        size=st.sampled_from([0, 10, 3 << 17]),
        fill=st.binary(min_size=1, max_size=1),
    )
    def save(self, at: int, name: str, size: int, fill: bytes) -> None:
        async def write() -> None:
            data = fill * size
            uploads = await self.writers[at].uploads(name)
            if data:
                await uploads.feed(memoryview(data))
            await uploads.finish(size, xxhash.xxh3_128_hexdigest(data))

        reached = {at, *(i for i, h in enumerate(self.hosts) if not h.is_cut)}
        if self.hosts[at].is_cut:
            reached = {at}
        if is_spread(name) and not reached & set(place_replicas(HOSTS, REPLICAS)[at]):
            with pytest.raises(StoreError):
                self._run(write())
        else:
            self._run(write())

    @rule(at=st.integers(0, HOSTS - 1), name=st.sampled_from(NAMES), fill=st.binary(max_size=4))
    def create(self, at: int, name: str, fill: bytes) -> None:
        self._run(self.writers[at].create(name, fill))

    @rule(at=st.integers(0, HOSTS - 1), name=st.sampled_from(NAMES))
    def delete(self, at: int, name: str) -> None:
        self._run(self.writers[at].delete(name))

    @rule(at=st.integers(0, HOSTS - 1))
    def replace(self, at: int) -> None:
        host = self.hosts[at]
        self._run(host.hang_up())
        host.shelf = Shelf(1 << 26)
        host.born += 1
        host.is_cut = False
        self._well()
        known = self._known()
        for name, entry in list(self.newest.items()):
            if known.get(name) != entry:  # only that host knew of it
                self.newest.pop(name)
                if name in known:
                    self.newest[name] = known[name]
        self.writers[at] = Swarm(self._wires(at, range(HOSTS)), REPLICAS, at, f"w{at}-{host.born}")
        self.healers[at] = self._healer(at)

    @rule(at=st.integers(0, HOSTS - 1))
    def cut(self, at: int) -> None:
        self.hosts[at].is_cut = True
        self._run(self.hosts[at].hang_up())

    @rule()
    def mend(self) -> None:
        for host in self.hosts:
            host.is_cut = False
        self._well()

    @rule(at=st.integers(0, HOSTS - 1))
    def heal(self, at: int) -> None:
        self._run(self.healers[at].look())

    def _well(self) -> None:
        """What the probes in the background would find."""
        for wire in self.wires:
            wire.aside = None

    @invariant()
    def nothing_known_is_undone(self) -> None:
        known = self._known()
        for name, entry in self.newest.items():
            assert known[name].stamp >= entry.stamp, (entry, known[name])
        self.newest = known

    def teardown(self) -> None:
        try:
            self.mend()
            for _ in range(2 * HOSTS * len(NAMES)):
                came = [self._run(healer.look()) for healer in self.healers]
                if not any(came) and all(healer.is_whole for healer in self.healers):
                    break
            else:
                raise AssertionError("healing does not end")
            self.nothing_known_is_undone()
            placed = place_replicas(HOSTS, REPLICAS)
            for entry in self._known().values():
                holders = placed[entry.home] if is_spread(entry.name) else range(HOSTS)
                found = [h.shelf.known(entry.name) for h in self.hosts]
                for at, there in enumerate(found):
                    if not entry.is_there:
                        assert there is None or not there.is_there, (at, entry, there)
                    elif at in holders:
                        assert there == entry, (at, entry, there)
            for host in self.hosts:
                held = [e.nbytes for e in host.shelf.entries("") if e.is_there]
                assert host.shelf.used_bytes == sum(held)
                assert not host.shelf.incoming
        finally:
            for host in self.hosts:
                self._run(host.hang_up())
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.run_until_complete(asyncio.sleep(0))
            self.loop.close()


TestCluster = pytest.mark.filterwarnings("ignore::ResourceWarning")(Cluster.TestCase)
TestCluster.settings = settings(
    max_examples=30,
    stateful_step_count=30,
    deadline=None,
    phases=[__import__("hypothesis").Phase.generate],
)
