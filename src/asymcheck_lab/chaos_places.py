"""Where the checkpoints of a case lie, what of it ends with a host, and how it is mended."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from asymcheck.testing.children import Child, Say
from asymcheck_lab.chaos_network import Network, end_with_parent, why_no_network

TIER = "tier"
"""Name of the tier, where there is one."""

OVER_A_LINK = ("network partition (link)",)
"""Failures that need a ``Network``."""

AMONG_PEERS = ("host killed (peers)", "peer killed")
"""Failures of the memory of other hosts."""

_WAIT_S = 30.0
_ROOM_BYTES = 1 << 28
_PEERS_TIMEOUT_S = 1.0
_LINK_TIMEOUT_S = 0.5  # all of it is waited for again and again while the link is cut


@dataclass(frozen=True, slots=True)
class Where:
    """What a start is told.

    Attributes:
        home: URL of the root.
        tiers: URLs of tiers.
    """

    home: str
    tiers: tuple[str, ...] = ()


class Places:
    """A directory that outlives the host.

    Args:
        root: Made with the first start.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._away = root.with_name("away")

    @property
    def home(self) -> str:
        """URL of the root."""
        return f"file://{self.root}"

    @property
    def tiers(self) -> tuple[str, ...]:
        """URLs of tiers."""
        return ()

    @property
    def safe(self) -> str:
        """URL of what outlives the host."""
        return self.home

    @property
    def temporary(self) -> list[Path]:
        """Files of writes that are under way, or were."""
        return [path for url in (self.home, *self.tiers) for path in _path(url).glob(".tmp/*")]

    def spoken(self, served: Sequence[str]) -> str:
        """Who gave the bytes of a restore, in words of the table.

        Args:
            served: Names of the places that the library says gave some.
        """
        del served
        return "root"

    def take_away(self) -> None:
        """The store cannot be reached."""
        self.root.rename(self._away)
        self.root.write_text("the store is away")

    def lose_host(self) -> None:
        """What ends together with the host that trains."""

    def heal(self) -> None:
        """Mend what can be mended."""
        if self._away.exists():
            with suppress(FileNotFoundError):
                self.root.unlink()
            self._away.rename(self.root)

    def close(self) -> None:
        """Remove all of it."""
        self.heal()
        shutil.rmtree(self.root, ignore_errors=True)


class HomeAndTier(Places):
    """The root is on a disk of the host, and each checkpoint goes to a tier that outlives it."""

    @property
    def tiers(self) -> tuple[str, ...]:
        """See ``Places``."""
        return (f"file://{self.root.with_name(TIER)}",)

    @property
    def safe(self) -> str:
        """See ``Places``."""
        return self.tiers[0]

    def spoken(self, served: Sequence[str]) -> str:
        """See ``Places``."""
        return " and ".join(TIER if name == TIER else "root" for name in served)

    def lose_host(self) -> None:
        """See ``Places``."""
        shutil.rmtree(self.root)

    def close(self) -> None:
        """See ``Places``."""
        super().close()
        shutil.rmtree(self.root.with_name(TIER), ignore_errors=True)


class Peers(Places):
    """The memory of two hosts, an agent on each. The first is the one that trains."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.agents = [PeerAgent(), PeerAgent()]

    @property
    def home(self) -> str:
        """See ``Places``."""
        return _peers_url([agent.address for agent in self.agents], "self=0", _PEERS_TIMEOUT_S)

    @property
    def temporary(self) -> list[Path]:
        """See ``Places``."""
        return []

    def spoken(self, served: Sequence[str]) -> str:
        """See ``Places``."""
        del served
        return "peer"

    def lose_host(self) -> None:
        """See ``Places``; a new host takes its place at once, its memory empty."""
        self.agents[0].kill()
        self.agents[0].start()

    def heal(self) -> None:
        """See ``Places``: hosts that are lost are replaced by empty ones."""
        for agent in self.agents:
            agent.start()

    def close(self) -> None:
        """See ``Places``."""
        for agent in self.agents:
            agent.kill()


class FarStore(Places):
    """A store of two agents on another host, across a link that can be cut.

    Args:
        root: A name beside which the secret lies.
        network: This process is in it.
    """

    def __init__(self, root: Path, network: Network) -> None:
        super().__init__(root)
        self.network = network
        self._secret = root.with_name("secret")
        self._secret.touch(mode=0o600)
        self._secret.write_text("only these two hosts know it")
        self._agents = [
            PeerAgent(network.far_address, self._secret, network.enter_far) for _ in range(2)
        ]

    @property
    def home(self) -> str:
        """See ``Places``."""
        addresses = [agent.address for agent in self._agents]
        return _peers_url(addresses, f"secret_file={self._secret}", _LINK_TIMEOUT_S)

    @property
    def temporary(self) -> list[Path]:
        """See ``Places``."""
        return []

    def heal(self) -> None:
        """See ``Places``."""
        self.network.mend()

    def close(self) -> None:
        """See ``Places``."""
        self.network.mend()
        for agent in self._agents:
            agent.kill()


class PeerAgent:
    """``asymcheck agent`` in a fork of this process, which SIGKILL ends as it ends a host.

    Args:
        host: Where it listens.
        secret: File with what its clients hold; ``None`` for none, on loopback alone.
        before: Done in the fork before it listens.

    Attributes:
        address: ``HOST:PORT``; the same after each start.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        secret: Path | None = None,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        self.address = f"{host}:0"
        self._secret = secret
        self._before = before
        self._child: Child | None = None
        self.start()

    def start(self) -> None:
        """Start it, with nothing in its memory, where it does not run."""
        if self._child is None:
            self._child = Child(self._serve)
            self.address = self._child.hear(_WAIT_S)

    def kill(self) -> None:
        """End it; what it held is lost."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait(_WAIT_S)

    def _serve(self, say: Say) -> None:
        from asymcheck.storage.peers.agent import Agent
        from asymcheck.storage.peers.secret import parse_address, read_secret

        end_with_parent()
        self._before()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # its clients end without a word: wanted here
        secret = b"" if self._secret is None else read_secret(str(self._secret))
        agent = Agent(parse_address(self.address), _ROOM_BYTES, secret)

        async def serve() -> None:
            await agent.start()
            say(str(agent.address))
            await asyncio.Event().wait()

        asyncio.run(serve())


def _peers_url(addresses: Sequence[str], option: str, timeout_s: float) -> str:
    hosts = ",".join(addresses)
    return f"peers://{hosts}/run?replicas=2&{option}&timeout_s={timeout_s}"


def _path(url: str) -> Path:
    return Path(url.removeprefix("file://"))


def unavailable() -> dict[str, str]:
    """Failures that cannot be tried on this machine, each with why."""
    found = {}
    if find_spec("aiohttp") is None:
        why = "the package aiohttp is missing: pip install 'asymcheck[peers]'"
        found = dict.fromkeys((*AMONG_PEERS, *OVER_A_LINK), why)
    elif why := why_no_network():
        found = dict.fromkeys(OVER_A_LINK, f"a link between two hosts: {why}")
    return found
