"""The store ``peers://``: the memory of several hosts, behind the protocol of every store."""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
import weakref
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

import xxhash

from asymcheck.errors import ObjectNotFound, OptionError, StoreError, nearest
from asymcheck.planning.replicas import place_replicas
from asymcheck.storage.peers.link import Link
from asymcheck.storage.peers.pacing import HOLD_S, Paces, parse_pace
from asymcheck.storage.peers.secret import Address, found_here, parse_address, secret_for
from asymcheck.storage.peers.swarm import Copies, Swarm, Uploads
from asymcheck.storage.peers.words import FRAME_BYTES
from asymcheck.storage.store import Buffer, Capabilities, Entry, Readable, check_name

_BATCH_BYTES = 4 * FRAME_BYTES
_END_S = 2.0

T = TypeVar("T")


class PeerStore:
    """Objects in the memory of several hosts, on each of which an agent runs.

    A pack is held by ``replicas`` hosts, its own one first; all other objects, which are
    small, by every host. A write has succeeded when all agents took it that are well, at
    least one. An agent that fails or is too slow is set aside: it is not waited for again
    until it answers a probe. Reading asks the nearest agent that has the newest version.

    Calls block, at most ``timeout_s`` for each agent that does not do its part, and so long
    as its bytes take at ``slowest_bytes_per_s``. Any thread may make them; the network is driven by
    a thread of this store. After a fork the child makes connections of its own.

    Args:
        hosts: Where the agents listen, in the same order for everybody.
        run: Separates runs that share the agents: a path of plain parts.
        replicas: m, on how many hosts a pack is held, the own one counted.
        here: Which of ``hosts`` is this one; found out where it is ``None``: the first whose
            address is this machine's. A process on none of them writes to hosts by name.
        ranks_per_host: How many consecutive ranks run on each host, the first ones on the first:
            then a pack is its rank's host's, whoever writes it. 0: its writer's host's.
        secret_file: A file with what all agents and clients know; needed beyond loopback.
        timeout_s: Bound for one operation of one agent.
        slowest_bytes_per_s: An agent that moves bytes more slowly has failed.
        pace: ``idle`` sends packs to other hosts while the training leaves the network idle, as
            far as that can be measured; ``none`` sends at once.
        hold_s: For how long a pack may be held back in all, before it goes whatever else does.

    Raises:
        OptionError: An argument is wrong, the secret cannot be used, or there is none.
    """

    def __init__(
        self,
        hosts: Iterable[Address],
        run: str,
        *,
        replicas: int = 2,
        here: int | None = None,
        ranks_per_host: int = 0,
        secret_file: str | None = None,
        timeout_s: float = 10.0,
        slowest_bytes_per_s: float = 10e6,
        pace: str = "none",
        hold_s: float = HOLD_S,
    ) -> None:
        self._hosts = list(hosts)
        _check(self._hosts, run, here, timeout_s, slowest_bytes_per_s)
        place_replicas(len(self._hosts), replicas)
        if ranks_per_host < 0:
            raise OptionError(f"ranks_per_host: expected 0 or more, found {ranks_per_host}")
        self._ranks_per_host = ranks_per_host
        self._run = run
        self._replicas = replicas
        self._given = here
        self._here = here if here is not None else found_here(self._hosts)
        self._secret_file = secret_file
        self._secret = secret_for(secret_file, self._hosts)
        self._timeout_s = timeout_s
        self._slowest_bytes_per_s = slowest_bytes_per_s
        self._pace = parse_pace(pace)
        if not 0 <= hold_s < float("inf"):
            raise OptionError(f"hold_s: expected 0 or more seconds, found {hold_s}")
        self._hold_s = hold_s
        self._lock = threading.Lock()
        self._driver: _Driver | None = None
        self.capabilities = Capabilities(
            durability="replicated" if replicas > 1 else "none",
            reads_survive_delete=True,
            connections=len(self._hosts),
        )

    @property
    def url(self) -> str:
        """See ``Store``."""
        said: dict[str, object] = {"replicas": self._replicas}
        if self._given is not None:
            said["self"] = self._given
        if self._ranks_per_host:
            said["ranks_per_host"] = self._ranks_per_host
        if self._secret_file is not None:
            said["secret_file"] = self._secret_file
        said["timeout_s"] = self._timeout_s
        said["slowest_bytes_per_s"] = self._slowest_bytes_per_s
        said["pace"] = self._pace
        said["hold_s"] = self._hold_s
        hosts = quote(",".join(map(str, self._hosts)), safe=",:[]")
        return f"peers://{hosts}/{quote(self._run)}?{urlencode(said)}"

    # --- the protocol of a store --------------------------------------------

    def prepare(self) -> None:
        """See ``Store``.

        Raises:
            StoreError: No agent can be reached, or all refuse.
            OptionError: An agent knows its peers, and means others than this store.
        """
        for host, said in self._info().items():
            expected, found = [len(self._hosts), self._replicas, host], said.get("member")
            if found is not None and found != expected:
                raise OptionError(
                    f"{self._hosts[host]}: its agent was started with other --peers, --self or "
                    f"--replicas than this URL says: expected [hosts, replicas, self] = "
                    f"{expected}, found {found}: name the same hosts in the same order"
                )

    def write(self, name: str, parts: Iterable[Buffer]) -> int:
        """See ``Store``."""
        driver, full = self._driven(), self._full(name)
        hash_, nbytes = xxhash.xxh3_128(), 0
        uploads = driver.run(driver.swarm.uploads(full))
        try:
            for batch in _batches(parts):
                hash_.update(batch)
                nbytes += len(batch)
                driver.run(uploads.feed(batch))
            driver.run(uploads.finish(nbytes, hash_.hexdigest()))
        finally:
            driver.run(_abort(uploads))
        return nbytes

    def create(self, name: str, data: Buffer) -> bool:
        """See ``Store``.

        Of writers that reach some agent in common one succeeds. Writers that the network parts, so
        that none of them reaches an agent of the other, can both: the newer object stands when
        it is whole again.
        """
        driver, full = self._driven(), self._full(name)
        return driver.run(driver.swarm.create(full, bytes(data)))

    @contextmanager
    def open(self, name: str) -> Iterator[Readable]:
        """See ``Store``."""
        driver, full = self._driven(), self._full(name)
        try:
            copies = driver.run(driver.swarm.open(full))
        except ObjectNotFound as failure:
            raise ObjectNotFound(f"open {self.url}: {failure}") from None
        try:
            yield _OpenPeers(driver, copies)
        finally:
            driver.run(copies.close())

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """See ``Store``."""
        driver = self._driven()
        folder = self._full(prefix) if prefix else self._run
        found = driver.run(driver.swarm.entries(folder))
        start = len(self._run) + 1
        return iter([Entry(entry.name[start:], entry.nbytes) for entry in found])

    def delete(self, name: str) -> None:
        """See ``Store``."""
        driver, full = self._driven(), self._full(name)
        driver.run(driver.swarm.delete(full))

    def sweep(self) -> int:
        """See ``Store``."""
        driver = self._driven()
        swarm = driver.swarm
        told = driver.run(swarm.each(swarm.links, lambda link: link.ask("sweep", prefix=self._run)))
        return sum(int(said["broken"]) for _, said in told)

    def free_bytes(self) -> int | None:
        """Room left for packs of this host, with the holder that has the least."""
        told = self._info(self._here)
        return min(int(said["free_bytes"]) for said in told.values())

    def _info(self, home: int | None = None) -> dict[int, dict[str, Any]]:
        """What agents say of themselves, by host: all, or those that hold packs of one host."""
        driver = self._driven()
        swarm = driver.swarm
        links = swarm.links if home is None else swarm.holders_of("any.pack", home)
        told = driver.run(swarm.each(links, lambda link: link.ask("info")))
        return {swarm.links.index(link): said for link, said in told}

    def _full(self, name: str) -> str:
        return f"{self._run}/{check_name(name)}"

    # --- the thread ---------------------------------------------------------

    def _driven(self) -> _Driver:
        with self._lock:
            if self._driver is None or self._driver.pid != os.getpid():
                driver = self._driver = _Driver(self._swarm)
                weakref.finalize(self, driver.end)
            return self._driver

    def _swarm(self) -> Swarm:
        paces = Paces() if self._pace == "idle" else None
        bounds = self._timeout_s, self._slowest_bytes_per_s
        links = [
            Link(address, self._secret, *bounds, paces, self._hold_s) for address in self._hosts
        ]
        writer = secrets.token_hex(8)
        return Swarm(links, self._replicas, self._here, writer, self._ranks_per_host)


class _Driver:
    """A thread with an event loop in which the network of one store lives."""

    def __init__(self, make: Any) -> None:  # noqa: ANN401
        self.pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self.swarm: Swarm = make()
        self._thread = threading.Thread(target=self._drive, name="asymcheck-peers", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for ``work`` in the loop."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # where it is this thread that was interrupted
            raise

    def end(self) -> None:
        """Close every connection, and end the thread."""
        if self.pid != os.getpid() or not self._thread.is_alive():
            return
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(_END_S)

    def _drive(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._close())
        finally:
            self._loop.close()

    async def _close(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_S / 2):
                await self.swarm.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


class _OpenPeers:
    def __init__(self, driver: _Driver, copies: Copies) -> None:
        self._driver = driver
        self._copies = copies
        self.nbytes = copies.entry.nbytes

    def readinto(self, offset: int, into: memoryview) -> None:
        """See ``Readable``."""
        into = into.cast("B")
        if offset < 0 or offset + len(into) > self.nbytes:
            raise StoreError(
                f"read peers {self._copies.name}: ended at byte {self.nbytes}, expected "
                f"{len(into)} bytes from {offset}",
                retryable=False,
            )
        if into:
            self._driver.run(self._copies.readinto(offset, into))


async def _abort(uploads: Uploads) -> None:
    uploads.abort()


def _batches(parts: Iterable[Buffer]) -> Iterator[memoryview]:
    """Parts as bytes, small ones together, large ones cut; none is kept."""
    small = bytearray()
    for part in parts:
        data = memoryview(part).cast("B")
        if len(small) + len(data) <= FRAME_BYTES:
            small += data
            continue
        if small:
            yield memoryview(bytes(small))
            small.clear()
        for start in range(0, len(data), _BATCH_BYTES):
            yield data[start : start + _BATCH_BYTES]
    if small:
        yield memoryview(bytes(small))


def _check(
    hosts: list[Address], run: str, here: int | None, timeout_s: float, slowest: float
) -> None:
    if not hosts:
        raise OptionError("peers: expected at least one HOST:PORT")
    twice = {str(h) for h in hosts if hosts.count(h) > 1}
    if twice:
        raise OptionError(f"peers: expected each agent once, found {sorted(twice)} more than once")
    try:
        check_name(run)
    except StoreError as failure:
        raise OptionError(
            f"peers: expected the name of a run behind the hosts, peers://HOST:PORT,…/NAME, "
            f"found {run!r}"
        ) from failure
    if here is not None and not 0 <= here < len(hosts):
        raise OptionError(f"self: expected from 0 to {len(hosts) - 1}, found {here}")
    if not 0 < timeout_s < float("inf"):
        raise OptionError(f"timeout_s: expected more than 0, found {timeout_s}")
    if not slowest > 0:
        raise OptionError(f"slowest_bytes_per_s: expected more than 0, found {slowest}")


def open_peers(target: str, options: dict[str, str]) -> PeerStore:
    """Factory of ``peers://HOST:PORT,HOST:PORT/RUN?replicas=2&secret_file=PATH``.

    Raises:
        OptionError: An option is wrong.
    """
    kinds: dict[str, tuple[str, type]] = {
        "replicas": ("replicas", int),
        "self": ("here", int),
        "ranks_per_host": ("ranks_per_host", int),
        "secret_file": ("secret_file", str),
        "timeout_s": ("timeout_s", float),
        "slowest_bytes_per_s": ("slowest_bytes_per_s", float),
        "pace": ("pace", str),
        "hold_s": ("hold_s", float),
    }
    values: dict[str, Any] = {}
    for name, text in options.items():
        if name not in kinds:
            raise OptionError(f"peers store: unknown option {name!r}{nearest(name, kinds)}")
        argument, kind = kinds[name]
        try:
            values[argument] = kind(text)
        except ValueError:
            raise OptionError(f"{name}: expected a number, found {text!r}") from None
    hosts, _, run = target.partition("/")
    return PeerStore([parse_address(part) for part in hosts.split(",") if part], run, **values)
