"""Pieces of wholes, against numpy: any division, any pair of divisions, every hole."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from asymcheck.planning import pieces
from asymcheck.planning.layout import PAGE_BYTES, MiB
from asymcheck.planning.pieces import (
    CUT_BYTES,
    MAX_DIMENSIONS,
    MAX_ELEMENTS,
    Overlap,
    Piece,
    boxes,
    flat_range,
    flaw,
    overlaps,
    share,
    split_flat,
    uncovered,
)

Shaped = tuple[Piece, tuple[int, ...]]

WHOLES = st.lists(st.sampled_from([1, 3, 5, 6, 7, 17]), max_size=3).map(tuple) | st.sampled_from(
    [(0,), (3, 0), (0, 5), (3, 1, 5, 1), (1, 1, 1), (2, 3, 2, 3)]
)


def cuts(draw: st.DrawFn, size: int) -> list[tuple[int, int]]:
    """``[0, size)`` as ranges: as ``torch.chunk`` cuts it, with empty ones last, or anyhow."""
    parts = draw(st.integers(1, 5))
    if draw(st.booleans()):
        step = -(-size // parts)
        ends = [min(i * step, size) for i in range(parts + 1)]
    else:
        inner = draw(st.lists(st.integers(0, size), min_size=parts - 1, max_size=parts - 1))
        ends = [0, *sorted(inner), size]
    return list(itertools.pairwise(ends))


@st.composite
def divisions(draw: st.DrawFn, whole: tuple[int, ...]) -> list[Shaped]:
    """A whole among some ranks: flat, or in boxes along up to two dimensions of a mesh."""
    if draw(st.integers(0, 2)) == 0:
        elements = math.prod(whole)
        return [(Piece(whole, a), (b - a,)) for a, b in cuts(draw, elements)]
    found: list[Shaped] = [(Piece(whole, (0,) * len(whole)), whole)]
    for _ in range(draw(st.integers(0, 2)) if whole else 0):
        d = draw(st.integers(0, len(whole) - 1))  # twice the same one, too
        finer: list[Shaped] = []
        for (_, start), shape in found:
            assert not isinstance(start, int)
            for a, b in cuts(draw, shape[d]):
                corner = (*start[:d], start[d] + a, *start[d + 1 :])
                finer.append((Piece(whole, corner), (*shape[:d], b - a, *shape[d + 1 :])))
        found = finer
    return found


@st.composite
def anything(draw: st.DrawFn, whole: tuple[int, ...]) -> list[Shaped]:
    """Some pieces of a whole, with holes and overlaps."""
    found: list[Shaped] = []
    for _ in range(draw(st.integers(0, 5))):
        if draw(st.integers(0, 3)) == 0:
            a, b = sorted(draw(st.integers(0, math.prod(whole))) for _ in range(2))
            found.append((Piece(whole, a), (b - a,)))
        else:
            ranges = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in whole]
            corner = tuple(a for a, _ in ranges)
            found.append((Piece(whole, corner), tuple(b - a for a, b in ranges)))
    return found


def cut_out(array: np.ndarray, piece: Piece, shape: tuple[int, ...]) -> np.ndarray:
    """The piece by numpy's own slicing; a view of a contiguous whole."""
    if isinstance(piece.start, int):
        return array.reshape(-1)[piece.start : piece.start + shape[0]]
    box = (slice(a, a + n) for a, n in zip(piece.start, shape, strict=True))
    return array[(*box, ...)]  # an array too where there are no dimensions


def strided(flat: np.ndarray, at: int, shape: Sequence[int], strides: Sequence[int]) -> np.ndarray:
    last = at + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    assert 0 <= at <= last < flat.size
    steps = [s * flat.itemsize for s in strides]
    return np.lib.stride_tricks.as_strided(flat[at:], shape, steps)


def copy(have: np.ndarray, want: np.ndarray, overlap: Overlap) -> None:
    shape, have_at, have_strides, want_at, want_strides = overlap
    target = strided(want, want_at, shape, want_strides)
    target += strided(have, have_at, shape, have_strides)


# --- copying ----------------------------------------------------------------


@given(st.data())
def test_copying_all_overlaps_is_slicing_the_whole(data: st.DataObject) -> None:
    whole = data.draw(WHOLES)
    have, want = data.draw(divisions(whole)), data.draw(divisions(whole) | anything(whole))
    array = np.arange(1, math.prod(whole) + 1).reshape(whole)
    stored = [cut_out(array, *one).copy().reshape(-1) for one in have]
    for piece, shape in want:
        expected = cut_out(array, piece, shape)
        found = np.zeros(expected.size, int)  # added to: what is copied twice shows itself
        for (source, source_shape), raw in zip(have, stored, strict=True):
            shared = overlaps(source, source_shape, piece, shape)
            for overlap in shared:
                assert len(overlap.shape) == len(overlap.have_strides) == len(overlap.want_strides)
                assert overlap.shape
                assert min(overlap.shape) > 0
                copy(raw, found, overlap)
        assert np.array_equal(found.reshape(shape), expected)


@given(st.data())
def test_a_piece_is_its_boxes_in_a_row(data: st.DataObject) -> None:
    whole = data.draw(WHOLES)
    array = np.arange(math.prod(whole)).reshape(whole)
    for piece, shape in data.draw(divisions(whole) | anything(whole)):
        at, expected = 0, cut_out(array, piece, shape).reshape(-1)
        found = boxes(piece, shape)
        for box, offset in found:
            part = cut_out(array, Piece(whole, box.start), box.shape).reshape(-1)
            assert offset == at
            assert part.size > 0
            assert np.array_equal(part, expected[at : at + part.size])
            at += part.size
        assert at == expected.size
        assert len(found) <= max(1, 2 * len(whole) - 1)


@given(st.data())
def test_a_piece_is_a_range_exactly_when_its_elements_lie_in_a_row(data: st.DataObject) -> None:
    whole = data.draw(WHOLES)
    array = np.arange(math.prod(whole)).reshape(whole)
    for piece, shape in data.draw(divisions(whole) | anything(whole)):
        held = cut_out(array, piece, shape).reshape(-1)
        found = flat_range(piece, shape)
        if not held.size:
            assert found == (0, 0)
        elif held[-1] - held[0] + 1 == held.size:
            assert found == (held[0], held[-1] + 1)
        else:
            assert found is None


def rows(start: int, n: int) -> Shaped:
    return Piece((17, 6, 4), (start, 0, 0)), (n, 6, 4)


def test_shards_along_the_first_dimension_share_one_run() -> None:
    assert overlaps(*rows(2, 8), *rows(6, 9)) == [Overlap((96,), 96, (1,), 0, (1,))]
    flat = Piece((17, 6, 4), 100), (60,)
    assert overlaps(*rows(2, 8), *flat) == [Overlap((60,), 52, (1,), 0, (1,))]
    assert overlaps(*flat, *rows(0, 17)) == [Overlap((60,), 0, (1,), 100, (1,))]


def test_shards_of_other_dimensions_share_one_strided_copy_of_few_dimensions() -> None:
    columns = Piece((17, 6, 4), (0, 2, 0)), (17, 3, 4)
    assert overlaps(*columns, *rows(5, 2)) == [Overlap((2, 12), 60, (12, 1), 8, (24, 1))]
    inner = Piece((17, 6, 4), (0, 0, 1)), (17, 6, 2)
    assert overlaps(*inner, *rows(0, 17)) == [Overlap((102, 2), 0, (2, 1), 1, (4, 1))]


def test_pieces_of_different_wholes_are_refused_with_both() -> None:
    with pytest.raises(ValueError, match=r"\(2, 3\) and \(3, 2\)"):
        overlaps(Piece((2, 3), 0), (6,), Piece((3, 2), 0), (6,))


# --- holes ------------------------------------------------------------------


def mask_of(whole: tuple[int, ...], found: Sequence[Shaped]) -> np.ndarray:
    mask = np.zeros(whole, bool)
    for one in found:
        cut_out(mask, *one)[...] = True
    return mask


@given(st.data())
def test_a_hole_is_found_exactly_when_there_is_one_and_is_one(data: st.DataObject) -> None:
    whole = data.draw(WHOLES)
    found = data.draw(anything(whole) | divisions(whole))
    mask = mask_of(whole, found)
    said = uncovered(whole, found)
    assert (said is None) == bool(mask.all()), said
    if said is None:
        return
    flat = re.fullmatch(r"elements (\d+) to (\d+) of (\d+)", said)
    if flat is not None:
        a, b, size = map(int, flat.groups())
        hole, at_most = mask.reshape(-1)[a:b], size
    else:
        box = re.fullmatch(r"the box from \[(.*)\] to \[(.*)\] of \[(.*)\]", said)
        assert box is not None, said
        a, b, size = ([int(n) for n in text.split(", ")] for text in box.groups())
        assert tuple(size) == whole
        hole, at_most = mask[tuple(map(slice, a, b))], math.prod(size)
    assert 0 < hole.size <= at_most
    assert not hole.any()


@given(st.data())
def test_a_division_covers_and_without_one_of_its_pieces_does_not(data: st.DataObject) -> None:
    whole = data.draw(WHOLES)
    found = data.draw(divisions(whole))
    assert uncovered(whole, found) is None
    assert uncovered(whole, found + data.draw(divisions(whole))) is None, "replicas may overlap"
    left = data.draw(st.integers(0, len(found) - 1))
    rest = found[:left] + found[left + 1 :]
    assert (uncovered(whole, rest) is None) == (math.prod(found[left][1]) == 0)


def test_a_mesh_of_ten_thousand_ranks_is_told_to_cover_and_its_one_hole_is_found() -> None:
    whole = (1000, 1000)
    grid = [
        (Piece(whole, (i, j)), (10, 10)) for i in range(0, 1000, 10) for j in range(0, 1000, 10)
    ]
    assert uncovered(whole, grid) is None
    del grid[3721]
    assert uncovered(whole, grid) == "the box from [370, 210] to [380, 220] of [1000, 1000]"


def test_pieces_that_overlap_in_too_many_ways_count_as_a_hole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = (8, 8, 8)
    starts = itertools.product(range(0, 8, 2), repeat=3)
    cells = [(Piece(whole, at), (2, 2, 2)) for at in starts]
    assert uncovered(whole, cells) is None
    monkeypatch.setattr(pieces, "_LOOKS_FOR_A_BOX", 2)
    monkeypatch.setattr(pieces, "_MIN_LOOKS", 0)
    assert uncovered(whole, cells) == "pieces that overlap in too many ways to tell"


# --- what can be no piece ---------------------------------------------------


@given(st.data())
def test_what_is_cut_from_a_whole_has_no_flaw_and_what_reaches_out_has_one(
    data: st.DataObject,
) -> None:
    whole = data.draw(WHOLES)
    for piece, shape in data.draw(divisions(whole) | anything(whole)):
        assert flaw(piece, shape) is None
        if isinstance(piece.start, int):
            assert flaw(piece, (math.prod(whole) - piece.start + 1,)) is not None
            continue
        for d, (size, at) in enumerate(zip(whole, piece.start, strict=True)):
            assert flaw(piece, (*shape[:d], size - at + 1, *shape[d + 1 :])) is not None


@pytest.mark.parametrize(
    ("piece", "shape", "said"),
    [
        (Piece((3,), -1), (1,), "elements -1 to 0"),
        (Piece((3,), 0), (3, 1), "2 dimensions, expected one"),
        (Piece((), 0), (), "0 dimensions, expected one"),
        (Piece((3,), (-1,)), (1,), "from -1 to 0 in dimension 0"),
        (Piece((3, 3), (0,)), (3, 3), "2 dimensions at an offset of 1 in a whole of 2"),
        (Piece((1,) * (MAX_DIMENSIONS + 1), 0), (1,), "65 dimensions"),
        (Piece((1 << 40, 1 << 40), (0, 0)), (1, 1), str(MAX_ELEMENTS)),
    ],
)
def test_what_can_be_no_piece_is_told_why(piece: Piece, shape: tuple[int, ...], said: str) -> None:
    found = flaw(piece, shape)
    assert found is not None
    assert said in found


# --- who writes what --------------------------------------------------------


@given(st.integers(0, 10_000), st.integers(1, 20), st.sampled_from([1, 7, 512, 4096]))
@example(0, 3, 4096)
@example(4096, 3, 4096)
def test_a_flat_split_is_a_cover_of_parts_that_differ_by_a_granule(
    nelems: int, parts: int, granule: int
) -> None:
    found = split_flat(nelems, parts, granule)
    assert len(found) == parts
    assert [0, *(stop for _, stop in found)] == [*(start for start, _ in found), nelems]
    assert all(start % granule == 0 or start == nelems for start, _ in found)
    lengths = [stop - start for start, stop in found]
    assert max(lengths) - min(lengths) <= granule


SIZES = st.lists(
    st.integers(0, 5000)
    | st.integers(0, 3 * MiB)
    | st.sampled_from([0, 1, 4095, CUT_BYTES - 1, CUT_BYTES, CUT_BYTES + 1, 64 * MiB]),
    max_size=60,
)


def loads_of(sizes: Sequence[int], world: int) -> list[int]:
    loads = [0] * world
    for size, shares in zip(sizes, share(sizes, world), strict=True):
        assert shares, "also what has no bytes is written by somebody"
        ends = [stop for _, _, stop in shares]
        assert [0, *ends] == [*(start for _, start, _ in shares), size], "each byte once"
        assert len({rank for rank, _, _ in shares}) == len(shares), "one piece a rank"
        assert size == 0 or all(start < stop for _, start, stop in shares)
        assert all(start % PAGE_BYTES == 0 for _, start, _ in shares)
        assert len(shares) == 1 or size >= CUT_BYTES
        assert len(shares) == world or size < world * PAGE_BYTES or size < CUT_BYTES
        for rank, start, stop in shares:
            loads[rank] += stop - start
    return loads


@given(SIZES, st.integers(1, 9) | st.sampled_from([64, 300, 1000]))
def test_every_byte_of_a_replica_is_written_once_and_the_ranks_are_balanced(
    sizes: list[int], world: int
) -> None:
    loads = loads_of(sizes, world)
    small = max([s for s in sizes if s < CUT_BYTES], default=0)
    assert max(loads) - min(loads) <= max(small, PAGE_BYTES)
    if sum(sizes) >= 5 * CUT_BYTES * world:
        assert max(loads) <= 1.2 * sum(sizes) / world


def gpt2(width: int, layers: int, vocabulary: int, positions: int) -> list[int]:
    block = [width, width, 3 * width * width, 3 * width, width * width, width, width, width]
    block += [4 * width * width, 4 * width, 4 * width * width, width]
    shapes = [vocabulary * width, positions * width, *block * layers, width, width]
    return [4 * n for n in shapes] * 3


@pytest.mark.parametrize(
    ("model", "world"),
    [
        *(((768, 12, 50257, 1024), world) for world in (2, 3, 4, 8, 64)),
        *(((64, 2, 256, 64), world) for world in (2, 3, 4)),
    ],
)
def test_a_model_and_its_moments_are_balanced_within_a_fifth(
    model: tuple[int, int, int, int], world: int
) -> None:
    sizes = gpt2(*model)
    assert max(loads_of(sizes, world)) <= 1.2 * sum(sizes) / world


def test_the_shares_are_a_function_of_the_sizes_alone() -> None:
    sizes = gpt2(768, 2, 1000, 128)
    assert share(sizes, 5) == share(list(sizes), 5)
    assert share([10, 20, 3, 4], 2) == [[(0, 0, 10)], [(1, 0, 20)], [(0, 0, 3)], [(0, 0, 4)]]
    assert share([2 * MiB], 2) == [[(0, 0, MiB), (1, MiB, 2 * MiB)]]
