"""A store that is as slow as it is told to be: one link that all its users share."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from time import monotonic, sleep
from typing import Any
from urllib.parse import urlencode

from asymcheck.errors import OptionError, nearest
from asymcheck.storage.store import Buffer, Capabilities, Entry, Readable, Store, open_store


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast a medium is.

    Attributes:
        bytes_per_s: Of all writes together.
        latency_s: Seconds that each part of a write, each ``create`` and each read takes before
            its first byte moves. Those of several threads pass at the same time.
        read_bytes_per_s: Of all reads together.
        connections: What ``capabilities`` says of them; 0 for what the real store says.
    """

    bytes_per_s: float = math.inf
    latency_s: float = 0.0
    read_bytes_per_s: float = math.inf
    connections: int = 0

    def __post_init__(self) -> None:
        for name in ("bytes_per_s", "read_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise OptionError(f"{name}: expected more than 0, found {getattr(self, name)}")
        if self.connections < 0:
            raise OptionError(f"connections: expected 0 or more, found {self.connections}")
        if not 0 <= self.latency_s < math.inf:
            raise OptionError(f"latency_s: expected 0 or more, found {self.latency_s}")


class _Link:
    """A token bucket that is never fuller than empty: idle time is not saved up."""

    def __init__(self, bytes_per_s: float, latency_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self._free_s = -math.inf
        self._lock = threading.Lock()

    def reserve(self, nbytes: int) -> float:
        """When the bytes will have passed, behind those of others who came before."""
        with self._lock:
            begin_s = max(monotonic() + self._latency_s, self._free_s)
            self._free_s = begin_s + nbytes / self._bytes_per_s
            return self._free_s

    def move(self, nbytes: int) -> None:
        """Sleep until the bytes have passed."""
        self.wait(self.reserve(nbytes))

    @staticmethod
    def wait(until_s: float) -> None:
        """Sleep until then."""
        while (left_s := until_s - monotonic()) > 0:
            sleep(left_s)


class ThrottledStore:
    """Passes every call on to ``inner``, writes and reads no faster than ``speed``.

    A write hands a part on to ``inner`` and sleeps before it asks for the next, so that whoever
    makes the parts sees the time that each of them takes. What ``inner`` takes for a part is within
    that time, as far as it fits.

    Args:
        inner: The real store.
        speed: How fast; shared by all threads that use this object, not by other processes.
    """

    def __init__(self, inner: Store, speed: Speed | None = None) -> None:
        self.inner = inner
        self.speed = speed = speed or Speed()
        self._writes = _Link(speed.bytes_per_s, speed.latency_s)
        self._reads = _Link(speed.read_bytes_per_s, speed.latency_s)

    @property
    def url(self) -> str:
        """See ``Store``."""
        return f"throttled+{self.inner.url}?{urlencode(asdict(self.speed))}"

    @property
    def capabilities(self) -> Capabilities:
        """See ``Store``."""
        found = self.inner.capabilities
        return replace(found, connections=self.speed.connections or found.connections)

    def prepare(self) -> None:
        """See ``Store``."""
        self.inner.prepare()

    def write(self, name: str, parts: Iterable[Buffer]) -> int:
        """See ``Store``."""
        return self.inner.write(name, self._paced(parts))

    def create(self, name: str, data: Buffer) -> bool:
        """See ``Store``."""
        self._writes.move(memoryview(data).nbytes)
        return self.inner.create(name, data)

    @contextmanager
    def open(self, name: str) -> Iterator[Readable]:
        """See ``Store``."""
        with self.inner.open(name) as opened:
            yield _ThrottledReadable(opened, self._reads)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """See ``Store``."""
        return self.inner.list(prefix)

    def delete(self, name: str) -> None:
        """See ``Store``."""
        self.inner.delete(name)

    def sweep(self) -> int:
        """See ``Store``."""
        return self.inner.sweep()

    def free_bytes(self) -> int | None:
        """See ``Store``."""
        return self.inner.free_bytes()

    def _paced(self, parts: Iterable[Buffer]) -> Iterator[Buffer]:
        for part in parts:
            until_s = self._writes.reserve(memoryview(part).nbytes)
            yield part
            self._writes.wait(until_s)


class _ThrottledReadable:
    def __init__(self, opened: Readable, link: _Link) -> None:
        self._opened = opened
        self._link = link
        self.nbytes = opened.nbytes

    def readinto(self, offset: int, into: memoryview) -> None:
        """See ``Readable``."""
        self._link.move(into.nbytes)
        self._opened.readinto(offset, into)


def open_throttled(target: str, options: dict[str, str]) -> ThrottledStore:
    """Factory of ``throttled+INNER://…?bytes_per_s=50e6&latency_s=0.005&connections=4``.

    Raises:
        OptionError: An option is wrong.
    """
    known = [f.name for f in fields(Speed)]
    values: dict[str, Any] = {}
    for name, text in options.items():
        if name not in known:
            raise OptionError(f"throttled store: unknown option {name!r}{nearest(name, known)}")
        try:
            values[name] = int(text) if name == "connections" else float(text)
        except ValueError:
            raise OptionError(f"{name}: expected a number, found {text!r}") from None
    return ThrottledStore(open_store(target), Speed(**values))
