"""From encoded chunks to packs: what is written together, and where each chunk lies in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from asymcheck.planning.layout import PAGE_BYTES, Extent, align_up
from asymcheck.planning.retention import CheckpointId
from asymcheck.storage.index import Chunk, StoredObject
from asymcheck.storage.names import pack_name
from asymcheck.storage.sealed import digest
from asymcheck.storage.store import Buffer, Store, write_whole

PACK_BYTES = 1 << 30
_ZEROS = bytes(PAGE_BYTES)


@dataclass(frozen=True, slots=True)
class Encoded:
    """A chunk ready to be written.

    Attributes:
        data: Its stored bytes; borrowed, read before the writer asks for the next chunk.
        codec: How they were made.
        padded: The same memory with zeros up to the next page, where there is such: it lets
            a medium write it without a copy.
    """

    data: Buffer
    codec: str
    padded: Buffer | None = None


def flush(
    store: Store,
    at: CheckpointId,
    rank: int,
    chunks: Sequence[Extent],
    encode: Callable[[Extent], Encoded],
    *,
    pack_bytes: int = PACK_BYTES,
) -> tuple[list[Chunk], list[StoredObject]]:
    """Encode the chunks one after the other and write them into packs.

    Hashing and writing are one pass: no chunk is held after it was written. A pack is closed
    before it would outgrow ``pack_bytes`` of raw data.

    Returns:
        Where each chunk lies, and the packs; all durable as the store promises.

    Raises:
        StoreError: The medium failed; packs written before stay, unreferenced.
    """
    rows: list[Chunk] = []
    packs: list[StoredObject] = []
    for group in _groups(chunks, pack_bytes):
        name = pack_name(at, rank, len(packs) + 1)
        nbytes = write_whole(store, name, _parts(group, encode, len(packs), rows))
        packs.append(StoredObject(name, nbytes))
    return rows, packs


def _groups(chunks: Sequence[Extent], pack_bytes: int) -> Iterator[list[Extent]]:
    group: list[Extent] = []
    for chunk in chunks:
        if group and chunk.stop - group[0].start > pack_bytes:
            yield group
            group = []
        group.append(chunk)
    if group:
        yield group


def _parts(
    group: Sequence[Extent], encode: Callable[[Extent], Encoded], pack: int, rows: list[Chunk]
) -> Iterator[Buffer]:
    offset = 0
    for extent in group:
        encoded = encode(extent)
        size = memoryview(encoded.data).nbytes
        rows.append(
            Chunk(
                at=extent.start,
                nbytes=extent.nbytes,
                pack=pack,
                offset=offset,
                stored_bytes=size,
                codec=encoded.codec,
                hash=digest(encoded.data),
            )
        )
        if extent is group[-1]:
            yield encoded.data
            return
        offset = align_up(offset + size, PAGE_BYTES)
        gap = offset - rows[-1].offset - size
        if encoded.padded is not None:
            yield encoded.padded
        else:
            yield encoded.data
            if gap:
                yield _ZEROS[:gap]
