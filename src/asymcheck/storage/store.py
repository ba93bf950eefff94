"""One small protocol for every medium, and the way from a URL to a store.

A store maps names to immutable byte objects. Names are relative paths of plain parts. Every
medium keeps the same promises (``asymcheck.testing.StoreSuite`` holds them to it):

* an object is visible whole or not at all, and durable when ``write`` or ``create`` returns;
* ``create`` succeeds for exactly one caller;
* an object that is open can be read to its end although it is deleted meanwhile, where
  ``capabilities.reads_survive_delete`` says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Literal, NamedTuple, Protocol, runtime_checkable
from urllib.parse import parse_qsl, quote, unquote

from asymcheck.errors import CorruptCheckpoint, OptionError, StoreError, nearest

Buffer = bytes | bytearray | memoryview

_NOT_UNICODE = "surrogateescape"  # as Python spells file names that are none
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}")


class Entry(NamedTuple):
    """An object in a listing."""

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a medium can do.

    Attributes:
        durability: What an object survives once ``write`` has returned: ``fsync`` a power
            cut, ``replicated`` the loss of one host, ``none`` only this process.
        reads_survive_delete: Whether an open object stays readable after its deletion.
        scope: ``shared`` where every host that opens the URL meets the same objects, ``node``
            where each host has its own. Whoever opens the store says so: a directory cannot tell.
        conditional_create: Whether the medium itself lets exactly one ``create`` succeed;
            elsewhere the store makes it so by other means, which it documents.
        connections: How many objects are worth reading or writing at the same time.
    """

    durability: Literal["fsync", "replicated", "none"]
    reads_survive_delete: bool
    scope: Literal["shared", "node"] = "shared"
    conditional_create: bool = True
    connections: int = 1


class Readable(Protocol):
    """An open object."""

    @property
    def nbytes(self) -> int:
        """Its size."""
        ...

    def readinto(self, offset: int, into: memoryview) -> None:
        """Fill ``into`` from ``offset``; blocks. Where ``capabilities.connections`` of the store is
        greater than 1 several threads read at a time, elsewhere one.

        Raises:
            StoreError: The medium failed, or the object ends before ``into`` is full.
        """
        ...


@runtime_checkable
class ReadsOnce(Protocol):
    """An open object that can be read without a copy of it staying in the memory of the host."""

    def read_once(self, offset: int, into: memoryview) -> None:
        """As ``Readable.readinto``, for bytes that nobody else on this host reads soon."""
        ...


@runtime_checkable
class ReadsHashed(Protocol):
    """An open object that hashes what it reads on the way."""

    def read_hashed(self, offset: int, into: memoryview) -> str:
        """As ``Readable.readinto``; returns the ``sealed.digest`` of what was read."""
        ...


class Store(Protocol):
    """A medium. Calls block; any thread may make them, several at a time."""

    @property
    def url(self) -> str:
        """Where it is; ``open_store(url)`` opens the same medium again."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""
        ...

    def prepare(self) -> None:
        """Make the root where it is missing."""
        ...

    def write(self, name: str, parts: Iterable[Buffer]) -> int:
        """Store the concatenation of ``parts`` under ``name``, replacing what was there.

        Parts are consumed one at a time and not kept. Returns the bytes written.
        """
        ...

    def create(self, name: str, data: Buffer) -> bool:
        """Store ``data`` unless ``name`` exists; returns whether this call created it."""
        ...

    def open(self, name: str) -> AbstractContextManager[Readable]:
        """Open an object for reading.

        Raises:
            ObjectNotFound: There is none of that name.
        """
        ...

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Every object below the folder ``prefix`` (all of them for ``""``), in any order."""
        ...

    def delete(self, name: str) -> None:
        """Remove an object; no error when it is not there."""
        ...

    def sweep(self) -> int:
        """Remove what interrupted writes left behind; returns how many there were.

        Only the owner of the newest attempt calls this: it also breaks writes in progress.
        """
        ...

    def free_bytes(self) -> int | None:
        """Room left, ``None`` where the medium cannot say."""
        ...


def check_name(name: str) -> str:
    """``name``, when it is a relative path of plain parts.

    Raises:
        StoreError: It could reach outside the root, or is not portable.
    """
    parts = name.split("/")
    if not all(_PART.fullmatch(p) for p in parts):
        raise StoreError(
            f"object name {name!r}: expected parts of letters, digits, '_', '-' and '.', "
            f"joined by '/', none starting with '.'",
            retryable=False,
        )
    return name


def read_all(store: Store, name: str, at_most: int = 1 << 30) -> bytes:
    """The whole object; for small ones.

    Args:
        store: Where it is.
        name: Its name.
        at_most: The greatest size that it may have, in bytes.

    Raises:
        ObjectNotFound: There is none of that name.
        CorruptCheckpoint: It is larger.
        StoreError: The medium failed.
    """
    with store.open(name) as obj:
        if obj.nbytes > at_most:
            raise CorruptCheckpoint(name, f"{obj.nbytes} bytes, expected at most {at_most}")
        data = bytearray(obj.nbytes)
        if data:
            obj.readinto(0, memoryview(data))
    return bytes(data)


def write_whole(store: Store, name: str, parts: Iterable[Buffer]) -> int:
    """``store.write``, and a check that the medium took every byte; returns how many.

    Raises:
        StoreError: The medium failed, or says that it took another number of bytes.
    """
    given = 0

    def counted() -> Iterator[Buffer]:
        nonlocal given
        for part in parts:
            given += memoryview(part).nbytes
            yield part

    taken = store.write(name, counted())
    if taken != given:
        raise StoreError(
            f"write {store.url} {name}: {given} bytes were given, the medium took {taken}",
            retryable=True,
        )
    return taken


def delete_each(store: Store, names: Sequence[str]) -> tuple[list[str], StoreError | None]:
    """Try to delete each; what is left, and the first failure."""
    left, first = [], None
    for name in names:
        try:
            store.delete(name)
        except StoreError as failure:
            left.append(name)
            first = first or failure
    return left, first


class StoreFactory(Protocol):
    """What an ``asymcheck.stores`` entry point names."""

    def __call__(self, target: str, options: dict[str, str]) -> Store:
        """Open a store.

        Args:
            target: The URL after its scheme and ``://``, percent-decoded, without the query;
                for a stacked scheme such as ``faulty+file`` the whole inner URL.
            options: The query.
        """
        ...


def open_store(url: str) -> Store:
    """Open the store that a URL or a plain local path names.

    Schemes are entry points of the group ``asymcheck.stores``, so a package can bring its
    own. In ``outer+inner://…`` the outer scheme wraps the store of the inner URL; its own options
    stand behind the last ``?``, those of the inner one before it.

    Raises:
        OptionError: No such scheme is installed; names the nearest.
    """
    scheme, is_url, rest = url.partition("://")
    if not is_url:
        scheme, rest = "file", quote(url, errors=_NOT_UNICODE)
    outer, _, inner = scheme.partition("+")
    known = {e.name: e for e in entry_points(group="asymcheck.stores")}
    if outer not in known:
        raise OptionError(
            f"store {url!r}: expected a scheme of {sorted(known)} or a path, "
            f"found {outer!r}{nearest(outer, known)}"
        )
    factory: StoreFactory = known[outer].load()
    where, _, query = rest.rpartition("?") if inner and "?" in rest else rest.partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    return factory(f"{inner}://{where}" if inner else unquote(where, errors=_NOT_UNICODE), options)
