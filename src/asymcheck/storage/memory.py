"""A store in this process's memory: for tests, notebooks and the thread persister."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from urllib.parse import quote

from asymcheck.errors import ObjectNotFound, OptionError, StoreError
from asymcheck.storage.store import Buffer, Capabilities, Entry, Readable, check_name


class _OpenBytes:
    def __init__(self, name: str, data: bytes) -> None:
        self._name = name
        self._data = memoryview(data)
        self.nbytes = len(data)

    def readinto(self, offset: int, into: memoryview) -> None:
        """See ``Readable``."""
        into = into.cast("B")
        found = self._data[offset : offset + len(into)]
        if len(found) != len(into):
            raise StoreError(
                f"read memory {self._name}: ended at byte {self.nbytes}, expected "
                f"{len(into)} bytes from {offset}",
                retryable=False,
            )
        into[:] = found


class MemoryStore:
    """Objects in a dictionary.

    Args:
        name: Part of the URL; see ``open_memory`` for stores that are found by it.
    """

    capabilities = Capabilities(durability="none", reads_survive_delete=True)

    def __init__(self, name: str = "") -> None:
        self._name = name
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """See ``Store``."""
        return f"memory://{quote(self._name)}"

    def prepare(self) -> None:
        """See ``Store``."""

    def write(self, name: str, parts: Iterable[Buffer]) -> int:
        """See ``Store``."""
        check_name(name)
        data = bytearray()
        for part in parts:  # one at a time: they may share one buffer
            data += memoryview(part).cast("B")
        with self._lock:
            self._objects[name] = bytes(data)
        return len(data)

    def create(self, name: str, data: Buffer) -> bool:
        """See ``Store``."""
        with self._lock:
            if check_name(name) in self._objects:
                return False
            self._objects[name] = bytes(data)
        return True

    @contextmanager
    def open(self, name: str) -> Iterator[Readable]:
        """See ``Store``."""
        with self._lock:
            data = self._objects.get(check_name(name))
        if data is None:
            raise ObjectNotFound(f"open {self.url}/{name}: not found")
        yield _OpenBytes(name, data)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """See ``Store``."""
        folder = f"{check_name(prefix)}/" if prefix else ""
        with self._lock:
            found = [Entry(n, len(d)) for n, d in self._objects.items() if n.startswith(folder)]
        return iter(found)

    def delete(self, name: str) -> None:
        """See ``Store``."""
        with self._lock:
            self._objects.pop(check_name(name), None)

    def sweep(self) -> int:
        """See ``Store``."""
        return 0

    def free_bytes(self) -> int | None:
        """See ``Store``."""
        return None


_named: dict[str, MemoryStore] = {}  # the medium itself: this process's memory
_named_lock = threading.Lock()


def open_memory(target: str, options: dict[str, str]) -> MemoryStore:
    """Factory of the ``memory`` scheme: the same name is the same store in this process.

    Raises:
        OptionError: There are options.
    """
    if options:
        raise OptionError(f"memory://{target}: expected no options, found {sorted(options)}")
    with _named_lock:
        return _named.setdefault(target, MemoryStore(target))
