"""What a pack is made of: encoded chunks, each with its place."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from asymcheck.planning.layout import PAGE_BYTES, Extent, align_up
from asymcheck.storage.index import Chunk
from asymcheck.storage.store import Buffer

PACK_BYTES = 1 << 30
ZEROS = bytes(PAGE_BYTES)


@dataclass(frozen=True, slots=True)
class Encoded:
    """A chunk ready to be written.

    Attributes:
        data: Its stored bytes. Borrowed: without workers until the next chunk is encoded, with
            workers until ``flush`` returns or lets go of it.
        codec: How they were made.
        padded: The same memory with zeros up to the next page, where there is such: it lets
            a medium write it without a copy.
    """

    data: Buffer
    codec: str
    padded: Buffer | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """An encoded chunk. Whoever drops the last reference frees its bytes."""

    extent: Extent
    encoded: Encoded
    nbytes: int
    hash: str

    @property
    def charge(self) -> int:
        """What it counts against the budget."""
        return align_up(self.nbytes, PAGE_BYTES)

    def parts(self, gap: int) -> list[Buffer]:
        """Its bytes and the zeros behind them, without a copy."""
        if not gap:
            return [self.encoded.data]
        if self.encoded.padded is not None:
            return [self.encoded.padded]
        return [self.encoded.data, ZEROS[:gap]]


class Pack:
    """A group of chunks on their way: picked, encoded, ready in order, placed, written.

    Attributes:
        serial: Position among the packs.
        extents: Its chunks.
        picked: How many of them were begun.
        early: Encoded before one in front of it, by position.
        arrived: How many have become ready.
        ready: Encoded, all before them too, and not yet placed.
        held_bytes: What it counts against the budget.
        rows: What was placed.
        taken: How many the store took.
        waited_s: Seconds in which the store waited for parts.
    """

    def __init__(self, serial: int, extents: Sequence[Extent]) -> None:
        self.serial = serial
        self.extents = extents
        self.picked = 0
        self.early: dict[int, Piece] = {}
        self.arrived = 0
        self.ready: deque[Piece] = deque()
        self.held_bytes = 0
        self.rows: list[Chunk] = []
        self.taken = 0
        self.waited_s = 0.0

    def place(self, piece: Piece) -> int:
        """Note where it lies; returns the zeros behind it: up to the next page, none at the end."""
        end = self.rows[-1].offset + self.rows[-1].stored_bytes if self.rows else 0
        offset = align_up(end, PAGE_BYTES)
        self.rows.append(
            Chunk(
                at=piece.extent.start,
                nbytes=piece.extent.nbytes,
                pack=self.serial,
                offset=offset,
                stored_bytes=piece.nbytes,
                codec=piece.encoded.codec,
                hash=piece.hash,
            )
        )
        return piece.charge - piece.nbytes if len(self.rows) < len(self.extents) else 0


def even_pack_bytes(chunks: Sequence[Extent], packs: int) -> int:
    """The bound with which ``flush`` makes at most so many packs, of about the same size; or more,
    where they would be larger than ``PACK_BYTES``.
    """
    if packs == 1 or not chunks:
        return PACK_BYTES
    found = -(-(chunks[-1].stop - chunks[0].start) // packs)
    finer = max(1, max(chunk.nbytes for chunk in chunks) // 8)
    while found < PACK_BYTES and sum(1 for _ in groups(chunks, found)) > packs:
        found += finer
    return min(found, PACK_BYTES)


def groups(chunks: Sequence[Extent], pack_bytes: int) -> Iterator[list[Extent]]:
    """The chunks of each pack: it is closed before it would outgrow the bound."""
    group: list[Extent] = []
    for chunk in chunks:
        if group and chunk.stop - group[0].start > pack_bytes:
            yield group
            group = []
        group.append(chunk)
    if group:
        yield group
