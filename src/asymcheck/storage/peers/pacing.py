"""Sending packs when the training leaves the network idle, by the counters of this host.

Linux says how much an interface has sent, which interface leads to an address, and how much of a
connection's data has left and has arrived. Where one of these is not to be had, and on the way to
an agent of this host, packs are sent at once.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ipaddress import IPv6Address, ip_address
from typing import Protocol

from asymcheck.errors import OptionError, nearest
from asymcheck.planning.idle import Counters, IdleWindows, Verdict

_log = logging.getLogger(__name__)

PACES = ("idle", "none")
HOLD_S = 5.0
"""For how long a pack may be held back in all, if nothing else is said."""

_LOOPBACK = "lo"
_TABLE = "/proc/thread-self/net/dev"  # of the network that this thread is in; /sys may be another's
_TABLE_BYTES = 1 << 16
_SENT_COLUMN = 8
_TCP_INFO_BYTES = 256
_BYTES_SENT_AT = 200  # tcpi_bytes_sent, since Linux 4.19
_UNSENT_AND_UNHEARD = 0x5411  # TIOCOUTQ
_GET_ROUTE, _NEW_ROUTE = 26, 24
_IS_REQUEST = 1
_DESTINATION, _INTERFACE = 1, 4
_HEADER = struct.Struct("=IHHII")  # length, kind, flags, number, port
_ROUTE = struct.Struct("=BBBBBBBBI")  # family, bits of the destination, and what is not said
_ATTRIBUTE = struct.Struct("=HH")  # length, kind


class Unmeasured(Exception):
    """What the network does cannot be seen here; ``str`` says why."""


class Meter(Protocol):
    """Counters of one way out of this host."""

    def add(self, connection: socket.socket) -> None:
        """Count a connection as ours from now on.

        Raises:
            Unmeasured: It cannot be counted.
        """
        ...

    def read(self, now_s: float) -> Counters:
        """What they are now.

        Raises:
            Unmeasured: They are gone.
        """
        ...


class InterfaceMeter:
    """A network interface of this host.

    Args:
        name: As in ``/proc/net/dev``.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._connections: dict[socket.socket, int] = {}
        self._own_bytes = 0

    def add(self, connection: socket.socket) -> None:
        """See ``Meter``."""
        self._connections[connection] = _sent_and_queued(connection)[0]

    def read(self, now_s: float) -> Counters:
        """See ``Meter``."""
        queued_bytes = 0
        for connection, before in list(self._connections.items()):
            if connection.fileno() < 0:
                del self._connections[connection]
                continue
            sent, queued = _sent_and_queued(connection)
            self._connections[connection] = sent
            self._own_bytes += sent - before
            queued_bytes += queued
        return Counters(now_s, self._sent_bytes(), self._own_bytes, queued_bytes)

    def _sent_bytes(self) -> int:
        try:
            with open(_TABLE, "rb", buffering=0) as table:
                lines = table.read(_TABLE_BYTES).splitlines()
        except OSError as failure:
            raise Unmeasured(f"{_TABLE}: {failure.strerror}") from failure
        for line in lines:
            name, _, columns = line.partition(b":")
            if name.strip() == self._name.encode():
                return int(columns.split()[_SENT_COLUMN])
        raise Unmeasured(f"{_TABLE} does not know the interface {self._name}")


def _sent_and_queued(connection: socket.socket) -> tuple[int, int]:
    from fcntl import ioctl

    waiting = bytearray(4)
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        ioctl(connection.fileno(), _UNSENT_AND_UNHEARD, waiting)
    except OSError as failure:
        raise Unmeasured(f"counters of a connection: {failure.strerror}") from failure
    if len(info) < _BYTES_SENT_AT + 8:
        raise Unmeasured("the kernel does not say how much a connection has sent")
    return struct.unpack_from("=Q", info, _BYTES_SENT_AT)[0], int.from_bytes(waiting, sys.byteorder)


def interface_to(address: str) -> str:
    """The interface over which the kernel sends to an IP address.

    Raises:
        Unmeasured: It does not say.
    """
    destination = ip_address(address.partition("%")[0])
    if isinstance(destination, IPv6Address) and destination.ipv4_mapped is not None:
        destination = destination.ipv4_mapped
    family = socket.AF_INET if destination.version == 4 else socket.AF_INET6
    packed = destination.packed
    content = _ROUTE.pack(family, 8 * len(packed), 0, 0, 0, 0, 0, 0, 0)
    content += _ATTRIBUTE.pack(_ATTRIBUTE.size + len(packed), _DESTINATION) + packed
    request = _HEADER.pack(_HEADER.size + len(content), _GET_ROUTE, _IS_REQUEST, 1, 0) + content
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
            kernel.settimeout(1.0)
            kernel.send(request)
            answer = kernel.recv(1 << 16)
        length, kind, *_ = _HEADER.unpack_from(answer)
        at = _HEADER.size + _ROUTE.size
        while kind == _NEW_ROUTE and at + _ATTRIBUTE.size <= length:
            size, attribute = _ATTRIBUTE.unpack_from(answer, at)
            if attribute == _INTERFACE:
                return socket.if_indextoname(struct.unpack_from("=I", answer, at + 4)[0])
            at += max(_ATTRIBUTE.size, (size + 3) & ~3)
    except (OSError, struct.error, AttributeError) as failure:  # no netlink: no Linux
        raise Unmeasured(f"no route to {address} is told: {failure}") from failure
    raise Unmeasured(f"no route to {address} is told")


class Pace:
    """Lets packs onto one way out of this host while nothing of others is on it.

    Args:
        meter: Of that way.
    """

    def __init__(self, meter: Meter) -> None:
        self.windows = IdleWindows()
        self._meter: Meter | None = meter

    def add(self, connection: socket.socket) -> None:
        """Count a connection as ours from now on."""
        with self._measured():
            if self._meter is not None:
                self._meter.add(connection)

    def ask(self, nbytes: int) -> Verdict:
        """Whether so many bytes may go now; then they count as given. In the event loop."""
        now_s = asyncio.get_running_loop().time()
        with self._measured():
            if self._meter is not None and self.windows.is_due(now_s):
                self.windows.look(self._meter.read(now_s))
        return "go" if self._meter is None else self.windows.take(nbytes)

    @contextmanager
    def _measured(self) -> Iterator[None]:
        try:
            yield
        except Unmeasured as failure:
            self._meter = None
            _log.debug("packs are sent at once from now on: %s", failure)


class Paces:
    """The paces of all ways out of this host, by the interface."""

    def __init__(
        self,
        meter_of: Callable[[str], Meter] = InterfaceMeter,
        interface_of: Callable[[str], str] = interface_to,
    ) -> None:
        self._meter_of = meter_of
        self._interface_of = interface_of
        self._each: dict[str, Pace] = {}
        self._said = False

    def join(self, connection: socket.socket | None) -> Pace | None:
        """Count a connection as ours; what it is to be paced by, ``None`` for nothing."""
        try:
            if connection is None:
                raise Unmeasured("a connection without a socket")
            name = self._interface_of(connection.getpeername()[0])
        except (Unmeasured, OSError) as failure:
            if not self._said:
                _log.debug("packs are sent at once: %s", failure)
            self._said = True
            return None
        if name == _LOOPBACK:
            return None
        if name not in self._each:
            self._each[name] = Pace(self._meter_of(name))
        self._each[name].add(connection)
        return self._each[name]


def parse_pace(text: str) -> str:
    """The option ``pace``.

    Raises:
        OptionError: There is no such pace.
    """
    if text not in PACES:
        raise OptionError(
            f"pace: expected one of {list(PACES)}, found {text!r}{nearest(text, PACES)}"
        )
    return text
