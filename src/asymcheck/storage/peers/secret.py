"""Who may talk to whom: the shared secret, and addresses that need none."""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from asymcheck.errors import OptionError

_LEAST_BYTES = 16
_MOST_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Address:
    """Where an agent listens.

    Attributes:
        host: A name or a number.
        port: Of TCP.
    """

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether nobody outside of this host can be meant."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def parse_address(text: str) -> Address:
    """``HOST:PORT``, ``[IPv6]:PORT``.

    Raises:
        OptionError: It is none.
    """
    host, _, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    is_plain = bare == host and ":" in host
    if not bare or is_plain or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise OptionError(
            f"peer {text!r}: expected HOST:PORT with a port up to 65535, such as 10.0.0.1:7070"
        )
    return Address(bare, int(port))


def read_secret(path: str) -> bytes:
    """The secret in a file, without white space around it.

    Raises:
        OptionError: It cannot be read, others may read it, or it is too short or too long.
    """
    where = f"secret_file {path!r}"
    try:
        with Path(path).open("rb") as file:
            found = os.fstat(file.fileno())
            if stat.S_IMODE(found.st_mode) & 0o077 or found.st_uid not in (0, os.geteuid()):
                raise OptionError(
                    f"{where}: expected a file that its owner alone may read, found mode "
                    f"{stat.S_IMODE(found.st_mode):04o} and owner {found.st_uid}: chmod 600 it"
                )
            secret = file.read(_MOST_BYTES + 1).strip()
    except OSError as failure:
        raise OptionError(f"{where}: cannot be read: {failure.strerror}") from failure
    if not _LEAST_BYTES <= len(secret) <= _MOST_BYTES:
        raise OptionError(
            f"{where}: expected {_LEAST_BYTES} to {_MOST_BYTES} bytes, found {len(secret)}; make "
            f"one with: head -c 32 /dev/urandom | base64"
        )
    return secret


def secret_for(path: str | None, addresses: list[Address]) -> bytes:
    """What proves who one is; empty where everything stays on this host.

    Raises:
        OptionError: There is none and it is needed, or it is not fit.
    """
    if path is not None:
        return read_secret(path)
    for address in addresses:
        if not address.is_loopback:
            raise OptionError(
                f"peer {address}: it is not this host's loopback, so anybody on the network could "
                f"read and write checkpoints: give secret_file, the same secret on every host"
            )
    return b""


def found_here(hosts: list[Address]) -> int | None:
    """Which is the first that is an address of this machine: a socket can be bound to it."""
    for i, address in enumerate(hosts):
        with suppress(OSError):
            for family, kind, proto, _, where in socket.getaddrinfo(
                address.host, 0, type=socket.SOCK_STREAM
            ):
                with suppress(OSError), socket.socket(family, kind, proto) as trial:
                    trial.bind(where)
                    return i
    return None
