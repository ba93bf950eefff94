"""Pieces of a whole: which elements of an array each of many ranks holds, as numbers.

A *whole* is an array as one process would have it. A *piece* is a box of it, or a flat range of
its elements in row-major order, and lies row-major itself. So the place of an element in a piece is
an affine function of its coordinates in the whole, for both kinds: whatever two pieces share is a
few boxes, and each of these is one strided copy.

All sizes and offsets are in elements unless a name says bytes. Nothing here blocks.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from asymcheck.planning.layout import PAGE_BYTES, MiB

MAX_DIMENSIONS = 64
"""Most dimensions of a whole: no array of torch or numpy has more."""
MAX_ELEMENTS = 1 << 53
CUT_BYTES = MiB
"""From this size on a replicated whole is divided among the ranks; a smaller one goes to one."""
_LOOKS_FOR_A_BOX = 100  # for holes: a grid of n boxes takes the logarithm of n for each
_MIN_LOOKS = 10_000


class Piece(NamedTuple):
    """Which elements of a whole an array holds; the shape of the array is told beside it.

    Attributes:
        whole: Shape of the whole.
        start: For a box its offset in each dimension; its size is the array's shape. For a flat
            range an integer: a 1-D array holds as many elements of the whole in row-major order,
            from that one on.
    """

    whole: tuple[int, ...]
    start: tuple[int, ...] | int


def whole_piece(shape: Sequence[int]) -> Piece:
    """All of a whole of this shape, as the one piece of it."""
    return Piece(tuple(shape), (0,) * len(shape))


class Box(NamedTuple):
    """A box of a whole: the offset and the size in each dimension."""

    start: tuple[int, ...]
    shape: tuple[int, ...]


class Overlap(NamedTuple):
    """What two pieces share, as one strided copy, in elements.

    Attributes:
        shape: Size of each dimension of the copy, outermost first; never empty, no size is zero.
            Dimensions are merged where they can be: a single run is ``(n,)``.
        have_at: Offset of the first element in the piece that is copied from.
        have_strides: Distance there between neighbours in each dimension of ``shape``.
        want_at: Offset of the first element in the piece that is copied to.
        want_strides: Distance there.
    """

    shape: tuple[int, ...]
    have_at: int
    have_strides: tuple[int, ...]
    want_at: int
    want_strides: tuple[int, ...]


class Share(NamedTuple):
    """The part of a replicated whole that a rank writes: the bytes ``[start, stop)``."""

    rank: int
    start: int
    stop: int


def flaw(piece: Piece, shape: Sequence[int]) -> str | None:
    """Why an array of that shape cannot be that piece; ``None`` where it can."""
    whole, start = piece
    if len(whole) > MAX_DIMENSIONS:
        return f"its whole has {len(whole)} dimensions, expected at most {MAX_DIMENSIONS}"
    elements = math.prod(whole)
    if elements > MAX_ELEMENTS:
        return f"its whole has {elements} elements, expected at most {MAX_ELEMENTS}"
    if isinstance(start, int):
        if len(shape) != 1:
            return f"a flat range of {len(shape)} dimensions, expected one"
        if start < 0 or start + shape[0] > elements:
            return f"elements {start} to {start + shape[0]} of a whole of {elements}"
        return None
    if not len(whole) == len(start) == len(shape):
        return (
            f"a box of {len(shape)} dimensions at an offset of {len(start)} in a whole of "
            f"{len(whole)}"
        )
    for d, (size, at, length) in enumerate(zip(whole, start, shape, strict=True)):
        if at < 0 or at + length > size:
            return f"from {at} to {at + length} in dimension {d} of size {size}"
    return None


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Distance in elements between neighbours in each dimension of a row-major array."""
    found, stride = [], 1
    for size in reversed(shape):
        found.append(stride)
        stride *= size
    return tuple(reversed(found))


def flat_range(piece: Piece, shape: Sequence[int]) -> tuple[int, int] | None:
    """The one range ``(start, stop)`` of the row-major whole that the piece is.

    ``None`` where it is no single range: a box that leaves out a part of an inner dimension. A
    piece of no elements is the range ``(0, 0)``.
    """
    whole, start = piece
    if isinstance(start, int):
        return (start, start + shape[0]) if shape[0] else (0, 0)
    if not math.prod(shape):
        return 0, 0
    at, stride, partial = 0, 1, False
    for size, offset, length in zip(reversed(whole), reversed(start), reversed(shape), strict=True):
        if partial and length > 1:
            return None
        partial = partial or length != size
        at += offset * stride
        stride *= size
    return at, at + math.prod(shape)


def boxes(piece: Piece, shape: Sequence[int]) -> list[tuple[Box, int]]:
    """The piece as boxes of its whole, each with its offset in the piece.

    Returns:
        Ascending and disjoint; none for a piece of no elements, one for a box, and at most
        ``2 * dimensions - 1`` for a flat range.
    """
    whole, start = piece
    if not math.prod(shape):
        return []
    if not isinstance(start, int):
        return [(Box(start, tuple(shape)), 0)]
    if not whole:
        return [(Box((), ()), 0)]
    strides, found = strides_of(whole), []
    at, stop = start, start + shape[0]
    while at < stop:
        # The outermost dimension in which a full step fits from here, and as many as fit.
        d = next(i for i, s in enumerate(strides) if at % s == 0 and at + s <= stop)
        corner = tuple(at // s % n for s, n in zip(strides, whole, strict=True))
        count = min((stop - at) // strides[d], whole[d] - corner[d])
        found.append((Box(corner, (1,) * d + (count, *whole[d + 1 :])), at - start))
        at += count * strides[d]
    return found


def overlaps(
    have: Piece, have_shape: Sequence[int], want: Piece, want_shape: Sequence[int]
) -> list[Overlap]:
    """What two pieces of one whole share.

    Args:
        have: The piece to copy from.
        have_shape: Shape of its array, which is row-major.
        want: The piece to copy to, of the same whole.
        want_shape: Shape of its array, which is row-major.

    Returns:
        Disjoint copies that together are every element that both hold. One where both are boxes,
        and one run where both are ranges of the whole, as all shards along dimension 0 are.

    Raises:
        ValueError: They are pieces of different wholes.
    """
    if have.whole != want.whole:
        raise ValueError(f"pieces of different wholes, {have.whole} and {want.whole}")
    run, other = flat_range(have, have_shape), flat_range(want, want_shape)
    if run is not None and other is not None:
        start, stop = max(run[0], other[0]), min(run[1], other[1])
        if start >= stop:
            return []
        return [Overlap((stop - start,), start - run[0], (1,), start - other[0], (1,))]
    have_strides = _strides_in(have, have_shape)
    want_strides = _strides_in(want, want_shape)
    found = []
    # A range that is written as a box is one box already; only a true flat range is cut.
    for mine, have_at in boxes(have, have_shape):
        for theirs, want_at in boxes(want, want_shape):
            shared = meet(mine, theirs)
            if shared is None:
                continue
            found.append(
                _merged(
                    shared.shape,
                    have_at + _distance(mine.start, shared.start, have_strides),
                    have_strides,
                    want_at + _distance(theirs.start, shared.start, want_strides),
                    want_strides,
                )
            )
    return found


def _strides_in(piece: Piece, shape: Sequence[int]) -> tuple[int, ...]:
    """How far a step in each dimension of the whole goes in the piece's array."""
    return strides_of(piece.whole if isinstance(piece.start, int) else shape)


def _distance(start: Sequence[int], to: Sequence[int], strides: Sequence[int]) -> int:
    return sum((b - a) * s for a, b, s in zip(start, to, strides, strict=True))


def meet(a: Box, b: Box) -> Box | None:
    """What two boxes of one whole have in common; ``None`` where that is nothing."""
    start, shape = [], []
    for i, n, j, m in zip(a.start, a.shape, b.start, b.shape, strict=True):
        lo, hi = max(i, j), min(i + n, j + m)
        if lo >= hi:
            return None
        start.append(lo)
        shape.append(hi - lo)
    return Box(tuple(start), tuple(shape))


def _merged(
    shape: Sequence[int],
    have_at: int,
    have_strides: Sequence[int],
    want_at: int,
    want_strides: Sequence[int],
) -> Overlap:
    """The same copy in as few dimensions as possible."""
    rows: list[tuple[int, int, int]] = []
    for size, mine, theirs in zip(shape, have_strides, want_strides, strict=True):
        if size == 1:
            continue
        if rows and rows[-1][1] == mine * size and rows[-1][2] == theirs * size:
            rows[-1] = (rows[-1][0] * size, mine, theirs)
        else:
            rows.append((size, mine, theirs))
    sizes, mines, others = zip(*(rows or [(1, 1, 1)]), strict=True)
    return Overlap(sizes, have_at, mines, want_at, others)


def uncovered(whole: Sequence[int], pieces: Iterable[tuple[Piece, Sequence[int]]]) -> str | None:
    """Says what part of a whole no piece holds; ``None`` where they hold all of it.

    Args:
        whole: Shape of the whole.
        pieces: Pieces of it with the shapes of their arrays; they may overlap, as replicas do.

    Returns:
        The first hole, in words. Pieces that overlap in so many ways that looking would take
        far longer than reading them count as a hole; no division of an array among ranks does.
    """
    elements = math.prod(whole)
    if not elements:
        return None
    listed = list(dict.fromkeys((p, tuple(shape)) for p, shape in pieces))
    ranges = [flat_range(*one) for one in listed]
    runs = sorted(r for r in ranges if r is not None and r[0] < r[1])
    if None not in ranges:
        for (_, at), (start, _) in pairwise([(0, 0), *_joined(runs), (elements, elements)]):
            if at < start:
                return f"elements {at} to {start} of {elements}"
        return None
    region = Box((0,) * len(whole), tuple(whole))
    among = [box for one in listed for box, _ in boxes(*one)]
    looks = [_MIN_LOOKS + _LOOKS_FOR_A_BOX * len(among)]
    hole = _hole(region, among, looks)
    if looks[0] < 0:
        return "pieces that overlap in too many ways to tell"
    if hole is None:
        return None
    stop = [a + n for a, n in zip(hole.start, hole.shape, strict=True)]
    return f"the box from {list(hole.start)} to {stop} of {list(whole)}"


def _joined(runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ascending ranges, with those that touch or overlap as one."""
    found: list[tuple[int, int]] = []
    for start, stop in runs:
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found


def _hole(region: Box, among: Sequence[Box], looks: list[int]) -> Box | None:
    """A box of the region that no box holds: halved at faces of boxes until one fills a half.

    A grid of n boxes takes about n log n looks; ``looks`` counts down, and below 0 it gives up.
    """
    looks[0] -= len(among)
    found = [box for b in among if (box := meet(b, region)) is not None]
    if not found:
        return region
    if region in found or looks[0] < 0:
        return None
    faces = []
    for d, (start, size) in enumerate(zip(region.start, region.shape, strict=True)):
        ends = {at for b in found for at in (b.start[d], b.start[d] + b.shape[d])}
        faces.append(sorted(ends - {start, start + size}))
    d = max(range(len(faces)), key=lambda i: len(faces[i]))
    at = faces[d][len(faces[d]) // 2]
    for lo, hi in ((region.start[d], at), (at, region.start[d] + region.shape[d])):
        half = Box(
            (*region.start[:d], lo, *region.start[d + 1 :]),
            (*region.shape[:d], hi - lo, *region.shape[d + 1 :]),
        )
        hole = _hole(half, found, looks)
        if hole is not None:
            return hole
    return None


def split_flat(nelems: int, parts: int, granule: int) -> list[tuple[int, int]]:
    """Cut ``[0, nelems)`` into as many ranges ``(start, stop)``, each from a multiple of
    ``granule`` on.

    Returns:
        ``parts`` ranges, ascending, without gaps. They differ by at most one granule; some are
        empty where there are fewer granules than parts.
    """
    granules = -(-nelems // granule)
    cuts = [min(granules * i // parts * granule, nelems) for i in range(parts + 1)]
    return list(pairwise(cuts))


def share(sizes_bytes: Sequence[int], world: int) -> list[list[Share]]:
    """Who writes what of arrays that all ranks have alike.

    Each rank finds the same without a word, for it is a function of the sizes alone. A whole of
    ``CUT_BYTES`` and more is cut into a range for each rank, at multiples of 4096 bytes, the
    longest for whoever has least so far; a smaller one goes to that one.

    Args:
        sizes_bytes: Size of each whole; zero is allowed.
        world: How many ranks there are.

    Returns:
        The shares of each whole, ascending: disjoint, together all its bytes, at most one a rank.
        A whole of no bytes has one share, of none. What two ranks are given in all differs by no
        more than the largest whole that is not cut, or by a page.
    """
    loads = [(0, rank) for rank in range(world)]  # a heap
    found = []
    for size in sizes_bytes:
        if size < CUT_BYTES:
            load, rank = loads[0]
            heapq.heapreplace(loads, (load + size, rank))
            found.append([Share(rank, 0, size)])
            continue
        ranges = split_flat(size, world, PAGE_BYTES)
        ranges.sort(key=lambda r: r[0] - r[1])  # the longest first
        loads.sort()
        taken = list(zip(loads, ranges, strict=True))
        loads = [(load + stop - start, rank) for (load, rank), (start, stop) in taken]
        heapq.heapify(loads)
        shares = (Share(rank, *r) for (_, rank), r in taken if r[0] < r[1])
        found.append(sorted(shares, key=lambda s: s.start))
    return found
