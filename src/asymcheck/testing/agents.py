"""Agents for tests, on loopback, in a thread of this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, TypeVar

from asymcheck.storage.peers.agent import Agent
from asymcheck.storage.peers.healing import Healer, Membership
from asymcheck.storage.peers.secret import Address
from asymcheck.testing.children import TIMEOUT_S

T = TypeVar("T")

_LOOK_S = 0.02


class Agents:
    """So many agents, each on a free port of 127.0.0.1.

    Args:
        count: How many.
        room_bytes: Of each.
        secret: What they all hold.
        replicas: m, where they know each other and get from the others what they lack;
            0 where they do not.
    """

    def __init__(
        self, count: int, room_bytes: int = 1 << 28, secret: bytes = b"", replicas: int = 0
    ) -> None:
        self._replicas = replicas
        self._room_bytes = room_bytes
        self._secret = secret
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.each: list[Agent | None] = []
        self._healers: dict[int, Healer] = {}
        for _ in range(count):
            self.each.append(self._run(self._started(Address("127.0.0.1", 0))))
        self.addresses = [agent.address for agent in self.each if agent is not None]
        for which in range(count if replicas else 0):
            self._run(self._join(which))

    def url(self, run: str = "run", query: str = "") -> str:
        """A store over all of them."""
        hosts = ",".join(map(str, self.addresses))
        return f"peers://{hosts}/{run}" + (f"?{query}" if query else "")

    def __enter__(self) -> Agents:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def stop(self, which: int) -> None:
        """End one: what it held is lost."""
        agent, self.each[which] = self.each[which], None
        if agent is not None:
            self._run(agent.stop())

    def replace(self, which: int) -> None:
        """Start an empty one in its place."""
        self.stop(which)
        self.each[which] = self._run(self._started(self.addresses[which]))
        if self._replicas:
            self._run(self._join(which))

    def wait_until_whole(self, which: int) -> None:
        """Wait until one has all that it should hold."""

        async def wait() -> None:
            healer = self._healers[which]
            while not healer.is_whole:
                await asyncio.sleep(_LOOK_S)

        self._run(wait())

    def names(self, which: int) -> set[str]:
        """What one holds, without the run in front."""

        async def found() -> set[str]:
            agent = self.each[which]
            assert agent is not None, "it was stopped"
            return {e.name.partition("/")[2] for e in agent.shelf.entries("") if e.is_there}

        return self._run(found())

    def end(self) -> None:
        """End all of them."""
        if self._loop.is_closed():
            return
        for which in range(len(self.each)):
            self.stop(which)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(TIMEOUT_S)
        self._loop.close()

    async def _started(self, address: Address) -> Agent:
        agent = Agent(address, self._room_bytes, self._secret)
        await agent.start()
        return agent

    async def _join(self, which: int) -> None:
        agent = self.each[which]
        assert agent is not None, "it was stopped"
        membership = Membership(tuple(self.addresses), which, self._replicas)
        self._healers[which] = agent.join(membership, look_s=_LOOK_S)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(TIMEOUT_S)
