"""A checkpoint that lies in slots of shared memory, as a store: whatever reads a root reads it.

The slot of a rank is the pack of a checkpoint without codecs; index and manifest are made of what
the slots say of themselves. Only reading makes sense here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from asymcheck.capture import Capture, parse_capture
from asymcheck.errors import CorruptCheckpoint, StoreError
from asymcheck.hashing import hashes_of
from asymcheck.memory.host import usable_cores
from asymcheck.memory.slot import Slot
from asymcheck.planning.layout import PAGE_BYTES, align_up
from asymcheck.planning.retention import CheckpointId
from asymcheck.storage.copies import Place
from asymcheck.storage.hierarchy import Hierarchy
from asymcheck.storage.index import RAW, Chunk, Index, StoredObject, dump_index
from asymcheck.storage.manifest import make_manifest
from asymcheck.storage.memory import MemoryStore
from asymcheck.storage.names import index_name, manifest_name, pack_name
from asymcheck.storage.sealed import Digest
from asymcheck.storage.store import Buffer, Entry, Readable

IN_MEMORY = "shared memory"
"""How this place is spoken of."""

_READERS = 4
_STRIDE_BYTES = 1 << 20  # what was copied is hashed while a cache has it; less wakes threads more


class SlotStore(MemoryStore):
    """The slots of all ranks of one checkpoint. Their content is not changed, and stays readable
    until ``close``, also when another process frees them meanwhile.

    Args:
        run: Id of the run.
        at: The checkpoint.
        paths: The slot of each rank, in rank order.

    Raises:
        CorruptCheckpoint: They do not hold that checkpoint whole, with its hashes.
        OSError: One is gone.
    """

    def __init__(self, run: str, at: CheckpointId, paths: Sequence[Path]) -> None:
        super().__init__(IN_MEMORY)
        readers = min(_READERS, max(1, usable_cores()))
        self.capabilities = replace(MemoryStore.capabilities, connections=readers)
        self._packs: dict[str, tuple[Slot, int]] = {}
        self._slots: list[Slot] = []
        indexes: list[tuple[Index, bytes]] = []
        try:
            for rank, path in enumerate(paths):
                index = self._take(run, at, rank, len(paths), path)
                indexes.append((index, dump_index(index)))
            for index, data in indexes:
                super().write(index_name(at, index.rank), [data])
            super().write(manifest_name(at), [make_manifest(indexes)])
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        """See ``Store``; nobody can open it once more."""
        return IN_MEMORY

    def note_taken(self) -> None:
        """Say in each slot that a start goes on from it."""
        for slot in self._slots:
            slot.note_taken()

    def close(self) -> None:
        """Give the memory back where the slots are gone; blocks for that. Again does nothing."""
        self._packs.clear()
        while self._slots:
            self._slots.pop().close(unlink=False)

    def _take(self, run: str, at: CheckpointId, rank: int, world: int, path: Path) -> Index:
        try:
            slot = Slot.open(path)
        except ValueError as failure:
            raise CorruptCheckpoint(str(path), str(failure)) from failure
        self._slots.append(slot)
        capture = parse_capture(slot.meta, str(path))
        hashes = hashes_of(slot, capture)
        if (capture.at, capture.rank, capture.world) != (at, rank, world) or not hashes:
            raise CorruptCheckpoint(str(path), "it holds something else, or nobody hashed it")
        index = _index_of(run, capture, hashes, path)
        for pack in index.packs:
            self._packs[pack.name] = slot, pack.nbytes
        return index

    # --- reading --------------------------------------------------------------

    @contextmanager
    def open(self, name: str) -> Iterator[Readable]:
        """See ``Store``. Any number of threads may read a pack at a time."""
        if name in self._packs:
            yield _OpenSlot(*self._packs[name])
            return
        with super().open(name) as opened:
            yield opened

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """See ``Store``."""
        yield from super().list(prefix)
        folder = f"{prefix}/" if prefix else ""
        for name, (_, nbytes) in self._packs.items():
            if name.startswith(folder):
                yield Entry(name, nbytes)

    # --- what it does not do ----------------------------------------------------

    def write(self, name: str, parts: Iterable[Buffer]) -> int:
        """Refuses."""
        raise StoreError(f"write {name}: slots in shared memory are only read", retryable=False)

    def create(self, name: str, data: Buffer) -> bool:
        """Refuses."""
        return bool(self.write(name, [data]))

    def delete(self, name: str) -> None:
        """Refuses."""
        self.write(name, [])


def hierarchy_of(store: SlotStore, run: str) -> Hierarchy:
    """The one checkpoint of a ``SlotStore``."""
    place = Place(IN_MEMORY, store)
    return Hierarchy([place], run)


def _index_of(run: str, capture: Capture, hashes: Sequence[str], path: Path) -> Index:
    """What a rank has, with the image as its only pack."""
    chunks, end = [], 0
    for extent, expected in zip(capture.chunks, hashes, strict=True):
        if extent.start != align_up(end, PAGE_BYTES):
            raise CorruptCheckpoint(str(path), f"its image has a hole at {end}")
        end = extent.stop
        at, nbytes = extent.start, extent.nbytes
        chunks.append(Chunk(at, nbytes, 0, at, nbytes, RAW, expected))
    return Index(
        run=run,
        at=capture.at,
        rank=capture.rank,
        world=capture.world,
        created_s=capture.created_s,
        metrics=capture.metrics,
        versions=capture.versions,
        leaves=capture.leaves,
        aliases=capture.aliases,
        chunks=tuple(chunks),
        packs=(StoredObject(pack_name(capture.at, capture.rank, 1), end),),
    )


class _OpenSlot:
    """The image of a slot; see ``Readable`` and ``ReadsHashed``.

    It is read from the file: a new map of it would cost more than the copy, page by page.
    """

    def __init__(self, slot: Slot, nbytes: int) -> None:
        self._slot = slot
        self.nbytes = nbytes

    def readinto(self, offset: int, into: memoryview) -> None:
        """See ``Readable``."""
        into = into.cast("B")
        done = 0
        while done < len(into):
            try:
                got = os.preadv(self._slot.fd, [into[done:]], PAGE_BYTES + offset + done)
            except OSError as failure:
                raise StoreError(
                    f"read {self._slot.path}: {failure.strerror}", retryable=False
                ) from failure
            if got == 0:
                raise StoreError(
                    f"read {self._slot.path}: it ends before {len(into)} bytes from {offset}",
                    retryable=False,
                )
            done += got

    def read_hashed(self, offset: int, into: memoryview) -> str:
        """See ``ReadsHashed``."""
        into, found = into.cast("B"), Digest()
        for start in range(0, len(into), _STRIDE_BYTES):
            part = into[start : start + _STRIDE_BYTES]
            self.readinto(offset + start, part)
            found.add(part)
        return found.hex()
