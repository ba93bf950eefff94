"""Values that several ranks hold: each rank works out alone who writes what of them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from asymcheck.device.leaves import Source, Spec, as_piece
from asymcheck.device.sharding import flat_start, local
from asymcheck.device.tensors import as_bytes
from asymcheck.planning.layout import PAGE_BYTES, MiB
from asymcheck.planning.pieces import Piece, split_flat

_CUT_BYTES = MiB
"""Arrays from this size on are cut among all who have them; smaller ones go whole to one."""

_SAMPLES = 16


class _Cut(NamedTuple):
    """What this rank writes of an array that others have too.

    Attributes:
        spec: What the leaf is then.
        start: First element of the local tensor.
        stop: One past the last.
        is_all: Whether it is all of the local tensor.
    """

    spec: Spec
    start: int
    stop: int
    is_all: bool


class Sharing:
    """Divides what ranks have in common; keeps what it decided for leaves of the same kind."""

    def __init__(self) -> None:
        self._specs: list[Spec] = []
        self._cuts: dict[int, _Cut | None] = {}

    def part(self, sources: list[Source]) -> list[Source]:
        """What this rank writes, in the same order.

        Args:
            sources: All that it has. Ranks that have something in common have it under the
                same keys, with the same shapes.
        """
        specs = [s.spec for s in sources]
        if specs != self._specs:
            self._specs, self._cuts = specs, _divide(specs)
        cuts = self._cuts
        if not cuts:
            return sources
        mine = []
        for i, source in enumerate(sources):
            if i not in cuts:
                mine.append(source)
            elif (cut := cuts[i]) is not None:
                mine.append(_cut_source(source, cut))
        return mine


def _cut_source(source: Source, cut: _Cut) -> Source:
    array = source.array
    if not cut.is_all:
        assert isinstance(array, torch.Tensor)
        array = array.detach().reshape(-1)[cut.start : cut.stop].view(cut.spec.shape)
    return source._replace(spec=cut.spec, array=array)


def _divide(specs: Sequence[Spec]) -> dict[int, _Cut | None]:
    """By position: what this rank writes, ``None`` where that is nothing."""
    cuts: dict[int, _Cut | None] = {}
    loads: dict[tuple[int, ...], list[int]] = {}
    for i in sorted((i for i, s in enumerate(specs) if s.copies), key=lambda i: specs[i].key):
        spec = specs[i]
        assert spec.copies is not None
        ranks, mine = spec.copies
        load = loads.setdefault(ranks, [0] * len(ranks))
        ranges = _ranges(spec, len(ranks))
        if ranges is None:
            who = load.index(min(load))
            load[who] += spec.nbytes
            cuts[i] = _whole_of(spec) if who == mine else None
            continue
        for who, (start, stop) in enumerate(ranges):
            load[who] += (stop - start) * spec.itemsize
        start, stop = ranges[mine] if mine >= 0 else (0, 0)
        cuts[i] = _range_of(spec, start, stop) if start < stop else None
    return cuts


def _ranges(spec: Spec, parts: int) -> list[tuple[int, int]] | None:
    """The elements that each writes; ``None`` where one writes all."""
    if spec.nbytes < _CUT_BYTES or parts == 1:
        return None
    if flat_start(_piece_of(spec), spec.shape) is not None:
        return split_flat(prod(spec.shape), parts, max(1, PAGE_BYTES // spec.itemsize))
    # Along its first dimension, so that each part is a box again and one run of memory.
    row = prod(spec.shape) // _rows(spec)
    edges = [_rows(spec) * part // parts * row for part in range(parts + 1)]
    return list(zip(edges, edges[1:], strict=False))


def _piece_of(spec: Spec) -> Piece:
    return spec.piece or Piece(spec.shape, (0,) * len(spec.shape))


def _rows(spec: Spec) -> int:
    return next((n for n in spec.shape if n > 1), 1)


def _whole_of(spec: Spec) -> _Cut:
    return _Cut(as_piece(spec, _piece_of(spec)), 0, prod(spec.shape), is_all=True)


def _range_of(spec: Spec, start: int, stop: int) -> _Cut:
    piece = _piece_of(spec)
    flat = flat_start(piece, spec.shape)
    shape: tuple[int, ...] = (stop - start,)
    if flat is not None:
        cut = Piece(piece.whole, flat + start)
    else:
        assert not isinstance(piece.start, int)
        at = next(d for d, n in enumerate(spec.shape) if n > 1)
        row = prod(spec.shape) // spec.shape[at]
        first, last = start // row, stop // row
        begin = piece.start[at] + first
        cut = Piece(piece.whole, (*piece.start[:at], begin, *piece.start[at + 1 :]))
        shape = (*spec.shape[:at], last - first, *spec.shape[at + 1 :])
    part = as_piece(spec, cut)
    return _Cut(
        part._replace(shape=shape, nbytes=(stop - start) * spec.itemsize),
        start,
        stop,
        is_all=stop - start == prod(spec.shape) and shape == spec.shape,
    )


def geometry_of(specs: Sequence[Spec]) -> dict[str, Any]:
    """What ranks must agree on of what they have in common: dtype and shape of each whole."""
    return {
        s.key: [s.dtype, list(_piece_of(s).whole)] for s in specs if s.copies or s.piece is not None
    }


def samples_of(sources: Sequence[Source]) -> dict[str, str]:
    """A few elements of each tensor that is said to be equal on all ranks, hashed; blocks."""
    return {
        s.spec.key: _sample(s.array)
        for s in sources
        if s.spec.copies and len(s.spec.copies.ranks) > 1 and s.spec.piece is None
        if isinstance(s.array, torch.Tensor)
    }


def _sample(tensor: torch.Tensor) -> str:
    flat = local(tensor).detach().resolve_conj().resolve_neg()
    n = flat.numel()
    if n > _SAMPLES:
        at = np.unique(np.linspace(0, n - 1, _SAMPLES).astype(np.int64))
        places = np.unravel_index(at, tuple(flat.shape))
        flat = flat[tuple(torch.from_numpy(p).to(flat.device) for p in places)]
    return xxhash.xxh3_64_hexdigest(as_bytes(flat.contiguous()).cpu().numpy().tobytes())
