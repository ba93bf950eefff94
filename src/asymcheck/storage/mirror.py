"""Byte-equal copies of a run in another store: the same objects, under the same names.

Whoever copies reads through the ordinary reader, which checks every chunk, so damage is found at
the source and never spread. A copy is written in the order in which a checkpoint is: packs,
indexes, manifest. Until its manifest is there it does not exist.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Literal

from asymcheck.errors import (
    CorruptCheckpoint,
    NoCheckpoint,
    ObjectNotFound,
    OptionError,
    StoreError,
)
from asymcheck.planning.layout import PAGE_BYTES, align_up
from asymcheck.storage.copies import Copies
from asymcheck.storage.hierarchy import Hierarchy
from asymcheck.storage.index import Chunk, Index, StoredObject
from asymcheck.storage.lanes import MOST_LANES, side_by_side
from asymcheck.storage.listing import sizes_at, wrong_length
from asymcheck.storage.names import attempt_name, manifest_name
from asymcheck.storage.packs import ZEROS
from asymcheck.storage.reader import OpenCheckpoint, read_same
from asymcheck.storage.repository import Repository, create_repository, open_repository
from asymcheck.storage.runs import RECORD_BYTES
from asymcheck.storage.store import Buffer, Store, read_all, write_whole

Verify = Literal["read", "size"]

# --- the run ------------------------------------------------------------------


def open_copy(store: Store, run: str) -> Repository:
    """The copy of a run in a store, made where the place is empty; blocks.

    Raises:
        OptionError: It holds another run, or something else.
        CorruptCheckpoint: Its ``FORMAT`` or ``RUN.json`` is damaged.
        StoreError: The medium failed.
    """
    try:
        found = open_repository(store)
    except NoCheckpoint:
        found = create_repository(store, run)
    if found.run != run:
        raise other_run(store, found.run, run)
    return found


def other_run(store: Store, found: str, expected: str) -> OptionError:
    """The error that says that a place holds another run."""
    return OptionError(
        f"{store.url} holds run {found}, expected run {expected}, which the others hold: give each "
        f"run places of its own"
    )


def share_attempts(one: Repository, other: Repository, known: set[int] | None = None) -> set[int]:
    """Let both have the records of all attempts that either has; blocks.

    Args:
        one: A repository of a run.
        other: Another one of the same run.
        known: Numbers that are the same in both, which are not read again; added to.

    Returns:
        Numbers that two jobs took, each in another of the two, since they could not see each other.

    Raises:
        StoreError: A medium failed.
    """
    known = set() if known is None else known
    clashes = set()
    sides = (one, set(one.attempt_numbers())), (other, set(other.attempt_numbers()))
    for number in sorted((sides[0][1] | sides[1][1]) - known):
        name = attempt_name(number)
        source = one if number in sides[0][1] else other
        record = read_all(source.store, name, RECORD_BYTES)
        for side, has in sides:
            if side is source or (number not in has and side.store.create(name, record)):
                continue
            if read_all(side.store, name, RECORD_BYTES) != record:
                clashes.add(number)
        if number not in clashes:
            known.add(number)
    return clashes


# --- a checkpoint -------------------------------------------------------------


def copy_checkpoint(
    home: Hierarchy,
    source: OpenCheckpoint,
    target: Repository,
    verify: Verify,
    check: Callable[[], None] = lambda: None,
    moved: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Copy a checkpoint whose bases, if it has any, are in the target; blocks.

    Objects that are there with their length are not written again: a copy that was cut short goes
    on where it ended. As many are written at a time as the target is worth connections, at most
    ``MOST_LANES``, and as many chunks are read back at a time; each takes the memory of a chunk.

    Args:
        home: Where it is.
        source: It, open.
        target: Where to.
        verify: What is looked at before its manifest is written; see ``planning.tiers.Tier``.
        check: Called before the manifest is written, and after it; raises where this writer must
            not go on.
        moved: Told of bytes that were written.

    Raises:
        CorruptCheckpoint: It is damaged where it is; nothing exists in the target.
        ObjectNotFound: It was removed meanwhile.
        StoreError: A medium failed, or what arrived is not what was sent.
    """
    manifest = source.manifest
    name = manifest_name(manifest.at)
    sealed = read_same(home.copies, name, manifest.hash)
    there = sizes_at(target.store, manifest.at)
    writing = _Writing(target.store, moved)
    packs = [
        (pack.name, index, serial)
        for index in source.indexes
        for serial, pack in enumerate(index.packs)
        if there.get(pack.name) != pack.nbytes
    ]
    beside = min(writing.lanes, len(packs))
    writing.all({name: partial(parts_of, source, i, n, beside) for name, i, n in packs})
    lacking = [(o, expected) for o, expected in manifest.indexes if there.get(o.name) != o.nbytes]
    writing.all({o.name: partial(_parts_same, home.copies, o.name, h) for o, h in lacking})
    verify_copy(source, target, verify)
    check()
    write_whole(target.store, name, [sealed])
    try:
        check()
        with _arriving(target.store, name):
            read_same(target.copies, name, manifest.hash)
    except BaseException:
        # A newer writer may have taken what it names for left-overs before it saw the manifest.
        if wrong_length(manifest, sizes_at(target.store, manifest.at)) is not None:
            target.store.delete(name)
        raise


def verify_copy(source: OpenCheckpoint, target: Repository, verify: Verify) -> None:
    """Look at what arrived; what is wrong is removed, so that it is written again; blocks.

    Raises:
        StoreError: Something is wrong with it, or the medium failed.
    """
    manifest = source.manifest
    problem = wrong_length(manifest, sizes_at(target.store, manifest.at))
    if problem is not None:
        raise _arrived_wrong(target.store, problem.where, problem.why)
    if verify == "size":
        return
    packs = [(index, serial) for index in source.indexes for serial, _ in enumerate(index.packs)]
    lanes = lanes_of(target.store)
    beside = max(1, min(lanes, len(packs)))
    looks = [partial(_look_at_index, target, *stored) for stored in manifest.indexes]
    looks += [partial(_look_at_pack, source, target, *where, beside) for where in packs]
    for _ in side_by_side(looks, lanes):
        pass


def _look_at_index(target: Repository, stored: StoredObject, expected: str) -> None:
    with _arriving(target.store, stored.name):
        read_same(target.copies, stored.name, expected)


def _look_at_pack(
    source: OpenCheckpoint, target: Repository, index: Index, serial: int, beside: int
) -> None:
    pack = index.packs[serial]
    with _arriving(target.store, pack.name), ExitStack() as stack:
        opened = target.copies.open(stack, pack.name, pack.nbytes)
        copied = replace(source, _packs={pack.name: opened}, base=None)
        for _ in parts_of(copied, index, serial, beside):
            pass


@contextmanager
def _arriving(target: Store, name: str) -> Iterator[None]:
    try:
        yield
    except (CorruptCheckpoint, ObjectNotFound) as bad:
        raise _arrived_wrong(target, name, str(bad)) from bad


def _arrived_wrong(target: Store, name: str, why: str) -> StoreError:
    with suppress(StoreError):
        target.delete(name)
    return StoreError(f"{target.url}: {name} did not arrive as it was sent: {why}", retryable=True)


class _Writing:
    """Writes several objects of a copy at a time; when one fails the others end too.

    Args:
        store: Where to.
        moved: Told of bytes that were written.
    """

    def __init__(self, store: Store, moved: Callable[[int], None]) -> None:
        self.lanes = lanes_of(store)
        self._store = store
        self._moved = moved
        self._failures: list[BaseException] = []

    def all(self, objects: Mapping[str, Callable[[], Iterable[Buffer]]]) -> None:
        """Write each, by its name and what makes its bytes; blocks until none is under way."""
        failure: BaseException | None = None
        try:
            for _ in side_by_side((partial(self._one, *o) for o in objects.items()), self.lanes):
                pass
        except BaseException as first:  # noqa: BLE001  raised below
            failure = self._failures[0] if self._failures else first
            self._failures.clear()
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # its traceback knows this frame

    def _one(self, name: str, parts: Callable[[], Iterable[Buffer]]) -> None:
        try:
            write_whole(self._store, name, self._counted(name, parts()))
        except BaseException as failure:
            self._failures.append(failure)  # those that end because of it come later
            raise

    def _counted(self, name: str, parts: Iterable[Buffer]) -> Iterator[Buffer]:
        for part in parts:
            if self._failures:
                raise StoreError(f"{self._store.url}: {name}: another failed", retryable=True)
            yield part
            self._moved(memoryview(part).nbytes)


def lanes_of(store: Store) -> int:
    """How many objects of it are written or read at the same time."""
    return min(store.capabilities.connections, MOST_LANES)


def _parts_same(copies: Copies, name: str, expected: str) -> Iterator[Buffer]:
    yield read_same(copies, name, expected)


def parts_of(
    source: OpenCheckpoint, index: Index, serial: int, beside: int = 1
) -> Iterator[Buffer]:
    """The bytes of a pack, chunk by chunk, each checked; every part lives until the next.

    Where the medium is worth several connections so many chunks are read ahead.

    Args:
        source: The checkpoint, open.
        index: Of the rank.
        serial: Which of its packs.
        beside: How many packs are read at the same time as this one, itself too: they share what
            the medium is worth.

    Raises:
        CorruptCheckpoint: A chunk is not what was committed, or the pack is not made of its chunks.
        StoreError: The medium failed.
    """
    pack = index.packs[serial]
    chunks = sorted(_chunks_of(index, serial), key=lambda chunk: chunk.offset)
    ends = [min(align_up(c.offset + c.stored_bytes, PAGE_BYTES), pack.nbytes) for c in chunks]
    for chunk, end in zip(chunks[1:], ends, strict=False):
        if chunk.offset < end:
            raise CorruptCheckpoint(pack.name, f"two chunks lie at byte {chunk.offset}")
    room = max((align_up(chunk.stored_bytes, PAGE_BYTES) for chunk in chunks), default=0)
    lanes = max(1, min(source.lanes // max(1, beside), len(chunks)))
    # On whole pages, with zeros behind a chunk: a local store writes it as it is.
    buffers = [memoryview(mmap.mmap(-1, room)) for _ in range(lanes if chunks else 0)]
    calls = (
        partial(source.read, index, chunk, buffers[i % lanes]) for i, chunk in enumerate(chunks)
    )
    at = 0
    with closing(side_by_side(calls, lanes)) as read:
        for i, (chunk, end, _) in enumerate(zip(chunks, ends, read, strict=False)):
            while at < chunk.offset:
                yield ZEROS[: min(chunk.offset - at, len(ZEROS))]
                at += min(chunk.offset - at, len(ZEROS))
            yield buffers[i % lanes][: end - chunk.offset]
            at = end
    if at != pack.nbytes:
        raise CorruptCheckpoint(pack.name, f"its chunks end at byte {at} of {pack.nbytes}")


def _chunks_of(index: Index, serial: int) -> Iterator[Chunk]:
    return (chunk for chunk in index.chunks if chunk.pack == serial)
