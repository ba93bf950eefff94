"""The key-value store that the ranks of one training talk through, and nobody else does."""

from __future__ import annotations

import fcntl
import os
import queue
import socket
import struct
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from asymcheck.errors import CheckpointError, RankFailed
from asymcheck.memory.host import read_text

if TYPE_CHECKING:  # not every build of torch has them
    from torch.distributed.distributed_c10d import Store

T = TypeVar("T")

_SLACK_S = 2.0
_CONNECT_S = 5.0
_NAMES_S = 30.0
"""Torch asks the name server for the name of each address it connects to: where answers get lost
that takes 5 s a try, whoever is at the other end."""
_ADDRESS_OF = 0x8915  # SIOCGIFADDR


class RankStore:
    """The way to the store, which rank 0 holds: a thread that makes the calls, since none of them
    has a bound where rank 0 is stopped or its network is gone. Short words, and no collective.

    Made by all ranks of the group at the same place: its address goes through one
    ``broadcast_object_list``, bounded by the timeout of the group.

    Args:
        group: The process group, ``None`` for the default one.
        timeout_s: How long a connection may take; at least what name servers may need.

    Raises:
        RankFailed: Rank 0 could not make the store, or it cannot be reached.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout_s: float) -> None:
        store = _open_store(group, dist.get_rank(group), timeout_s)
        self._open = True
        self._calls: queue.SimpleQueue[tuple[Callable[[Store], Any], Future[Any]] | None]
        self._calls = queue.SimpleQueue()
        thread = threading.Thread(
            target=self._run, args=(store,), name="asymcheck-ranks", daemon=True
        )
        thread.start()

    def call(self, work: Callable[[Store], T], what: str, timeout_s: float) -> T:
        """Make one call; blocks for at most ``timeout_s`` and a little.

        Raises:
            RankFailed: The store, and with it rank 0, does not answer.
        """
        return self.end(self.begin(work, what), what, timeout_s)

    def begin(self, work: Callable[[Store], T], what: str) -> Future[T]:
        """Have a call made behind the caller; does not block. Calls are made in their order.

        Raises:
            RankFailed: Words between ranks have ended.
        """
        if not self._open:
            raise RankFailed((0,), f"{what}: words between ranks, which rank 0 holds, have ended")
        done: Future[T] = Future()
        self._calls.put((work, done))
        return done

    def end(self, done: Future[T], what: str, timeout_s: float) -> T:
        """What a call that was begun has found; blocks and raises as ``call``."""
        try:
            return done.result(timeout_s + _SLACK_S)
        except TimeoutError:
            self.close()
            raise RankFailed(
                (0,), f"{what}: rank 0, which holds the words between the ranks, does not answer"
            ) from None
        except RuntimeError as failure:  # of the connection
            self.close()
            raise RankFailed(
                (0,), f"{what}: rank 0, which holds the words between the ranks, is gone: {failure}"
            ) from failure

    def close(self) -> None:
        """No more calls."""
        self._open = False
        self._calls.put(None)

    def _run(self, store: Store) -> None:
        while (order := self._calls.get()) is not None:
            work, done = order
            try:
                done.set_result(work(store))
            except BaseException as failure:  # noqa: BLE001  it is the caller's to see
                done.set_exception(failure)


def _open_store(group: dist.ProcessGroup | None, rank: int, timeout_s: float) -> Store:
    """Make the store on rank 0 and connect to it from the others."""
    from torch.distributed.distributed_c10d import PrefixStore

    limit = timedelta(seconds=max(_NAMES_S, timeout_s))
    told: list[dict[str, Any] | None] = [None]
    store: Store | None = None
    failure: Exception | None = None
    if rank == 0:
        try:
            own = _tcp_store("127.0.0.1", 0, True, limit)
            store = own
            told = [{"port": own.port, "at": _addresses(), "word": uuid.uuid4().hex}]
        except RuntimeError as bad:
            failure = bad
            told = [{"failed": spoken(bad)}]
    dist.broadcast_object_list(told, 0 if group is None else dist.get_global_rank(group, 0), group)
    found = told[0]
    assert found is not None
    if "failed" in found:
        raise RankFailed(
            (0,), f"start: rank 0 could not open a port for words between ranks: {found['failed']}"
        ) from failure
    if store is None:
        store = _connect(found["at"], found["port"], limit)
    # A word of its own, so that nobody else's keys are taken for ours.
    return PrefixStore(found["word"], store)


def _tcp_store(address: str, port: int, serves: bool, limit: timedelta) -> Any:  # noqa: ANN401
    return dist.TCPStore(  # type: ignore[attr-defined]
        address, port, None, serves, limit, wait_for_workers=False
    )


def _connect(addresses: list[list[str]], port: int, limit: timedelta) -> Store:
    tried = []
    for only_on, address in addresses:
        if only_on and only_on != host():
            continue  # a loopback address is only for those on its host
        try:
            socket.create_connection((address, port), _CONNECT_S).close()
            found: Store = _tcp_store(address, port, False, limit)
            return found
        except (OSError, RuntimeError) as failure:
            tried.append(f"{address}: {failure}")
    raise RankFailed(
        (0,),
        f"start: rank 0 cannot be reached on port {port}: {'; '.join(tried)}. Ranks need to "
        f"open a connection to the host of rank 0, as torch.distributed does",
    )


def _addresses() -> list[list[str]]:
    """How to reach this host, best first: each with the host that it is good for, empty for all."""
    names = {socket.gethostname(), socket.getfqdn()}
    numbers = set()
    with suppress(OSError):
        numbers = {str(a[4][0]) for a in socket.getaddrinfo(socket.gethostname(), None)}
    for family, far in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        # No packet is sent: the kernel only says from which address one would go.
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((far, 9))
            numbers.add(str(probe.getsockname()[0]))
    numbers |= of_interfaces()  # where there is no way to far addresses
    others = [a for a in [*sorted(names), *sorted(numbers)] if not a.startswith(("127.", "::1"))]
    return [[host(), "127.0.0.1"], *(["", a] for a in others)]


def of_interfaces() -> set[str]:
    """The IPv4 addresses of this host's network interfaces, loopback too."""
    found = set()
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # one without an address
                answer = fcntl.ioctl(probe, _ADDRESS_OF, struct.pack("256s", name.encode()))
                found.add(socket.inet_ntoa(answer[20:24]))
    return found


def host() -> str:
    """Tells hosts apart, and containers in which a process has another number."""
    boot = read_text("/proc/sys/kernel/random/boot_id").strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def spoken(failure: BaseException) -> str:
    """A failure as other ranks are told of it."""
    kind = type(failure).__name__
    return f"{kind}: {failure}" if isinstance(failure, CheckpointError) else repr(failure)
