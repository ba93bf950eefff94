"""Where each leaf of the state lies in one flat image, and how the image is cut into chunks.

The *image* is the state of one rank as one run of bytes: what an arena slot holds and what
a partition plan divides. Leaves under ``SMALL_BYTES`` lie together, 8-byte aligned; larger
ones start on a page. A *chunk* is the unit of encoding, hashing and reading.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

KiB = 1 << 10
MiB = 1 << 20

SMALL_BYTES = 64 * KiB
SMALL_ALIGN_BYTES = 8
PAGE_BYTES = 4 * KiB
CHUNK_BYTES = 16 * MiB


def align_up(nbytes: int, to_bytes: int) -> int:
    """The smallest multiple of ``to_bytes`` that is at least ``nbytes``."""
    return -(-nbytes // to_bytes) * to_bytes


class Extent(NamedTuple):
    """A half-open range ``[start, stop)`` of the image, in bytes."""

    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Length of the range in bytes."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Layout:
    """The place of every leaf, and the chunks.

    Attributes:
        leaves: Extent of each leaf, in the order in which the sizes were given.
        chunks: Ascending, disjoint, each at most ``CHUNK_BYTES``; together they cover
            every leaf. Bytes of a chunk that belong to no leaf are zero.
        image_bytes: Where the image ends.
    """

    leaves: tuple[Extent, ...]
    chunks: tuple[Extent, ...]
    image_bytes: int


def lay_out(sizes_bytes: Sequence[int]) -> Layout:
    """Place leaves of the given sizes: the small ones together first, then the large ones.

    Args:
        sizes_bytes: Size of each leaf; zero is allowed.

    Returns:
        The layout; a pure function of the sizes.
    """
    places: list[Extent] = [Extent(0, 0)] * len(sizes_bytes)
    chunks: list[Extent] = []
    at = start = 0
    for i, size in enumerate(sizes_bytes):
        if size >= SMALL_BYTES:
            continue
        at = align_up(at, SMALL_ALIGN_BYTES)
        if at + size - start > CHUNK_BYTES:
            chunks.append(Extent(start, at))
            at = start = align_up(at, PAGE_BYTES)
        places[i] = Extent(at, at + size)
        at += size
    if at > start:
        chunks.append(Extent(start, at))
    for i, size in enumerate(sizes_bytes):
        if size < SMALL_BYTES:
            continue
        at = align_up(at, PAGE_BYTES)
        places[i] = Extent(at, at + size)
        for lo in range(at, at + size, CHUNK_BYTES):
            chunks.append(Extent(lo, min(lo + CHUNK_BYTES, at + size)))
        at += size
    return Layout(tuple(places), tuple(chunks), at)
