"""Values that several ranks hold: each rank works out alone who writes what of them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import xxhash

from asymcheck.device.leaves import Source, Spec, as_piece
from asymcheck.device.sharding import Copies, local
from asymcheck.device.tensors import as_bytes
from asymcheck.planning.pieces import Piece, flat_range, share, whole_piece

_SAMPLES = 16
"""At least so many elements of a tensor are compared, where it has them."""


class _Cut(NamedTuple):
    """What this rank writes of an array that others have too.

    Attributes:
        spec: What the leaf is then.
        elements: Which of the local tensor it is, ``None`` for all of it.
    """

    spec: Spec
    elements: slice | None


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
    if cut.elements is not None:
        assert isinstance(array, torch.Tensor)
        array = array.detach().reshape(-1)[cut.elements].view(cut.spec.shape)
    return source._replace(spec=cut.spec, array=array)


def _divide(specs: Sequence[Spec]) -> dict[int, _Cut | None]:
    """By position: what this rank writes, ``None`` where that is nothing."""
    groups: dict[Copies, list[int]] = {}
    for i in sorted(range(len(specs)), key=lambda i: specs[i].key):
        copies = specs[i].copies
        if copies is not None:
            groups.setdefault(copies, []).append(i)
    cuts: dict[int, _Cut | None] = {}
    for copies, which in groups.items():
        shares = share([specs[i].nbytes for i in which], len(copies.ranks))
        for i, found in zip(which, shares, strict=True):
            mine = next((s for s in found if s.rank == copies.mine), None)
            cuts[i] = None if mine is None else _cut(specs[i], mine.start, mine.stop)
    return cuts


def _cut(spec: Spec, start_bytes: int, stop_bytes: int) -> _Cut | None:
    """The part of a leaf from one byte to another; ``None`` where it holds no element."""
    piece = spec.piece or whole_piece(spec.shape)
    if stop_bytes - start_bytes == spec.nbytes:
        return _Cut(as_piece(spec, piece), None)
    start, stop = start_bytes // spec.itemsize, stop_bytes // spec.itemsize
    flat = flat_range(piece, spec.shape)
    shape: tuple[int, ...] = (stop - start,)
    if flat is not None:
        part = Piece(piece.whole, flat[0] + start)
    else:
        # Only along its first dimension is a part of it a box again, and one run of memory.
        assert not isinstance(piece.start, int), "a range of the whole is one run"
        at = next(d for d, n in enumerate(spec.shape) if n > 1)
        row = prod(spec.shape[at + 1 :])
        first, last = start // row, stop // row
        start, stop = first * row, last * row
        corner = (*piece.start[:at], piece.start[at] + first, *piece.start[at + 1 :])
        part = Piece(piece.whole, corner)
        shape = (*spec.shape[:at], last - first, *spec.shape[at + 1 :])
    if start == stop:
        return None
    nbytes = (stop - start) * spec.itemsize
    return _Cut(as_piece(spec, part)._replace(shape=shape, nbytes=nbytes), slice(start, stop))


def _whole_of(spec: Spec) -> list[int]:
    return list(spec.shape if spec.piece is None else spec.piece.whole)


def geometry_of(specs: Sequence[Spec]) -> dict[str, Any]:
    """What ranks must agree on of what they have in common: dtype and shape of each whole."""
    return {s.key: [s.dtype, _whole_of(s)] for s in specs if s.copies or s.piece is not None}


def samples_of(sources: Sequence[Source]) -> dict[str, str]:
    """A few elements of each tensor that is said to be equal on all ranks, hashed; blocks."""
    return {
        s.spec.key: _sample(s.array)
        for s in sources
        if s.spec.copies and len(s.spec.copies.ranks) > 1 and s.spec.piece is None
        if isinstance(s.array, torch.Tensor)
    }


def _sample(tensor: torch.Tensor) -> str:
    flat = local(tensor).detach().resolve_conj().resolve_neg().reshape(-1)
    some = flat[:: max(1, flat.numel() // _SAMPLES)].contiguous()
    return xxhash.xxh3_64_hexdigest(as_bytes(some).cpu().numpy().tobytes())
