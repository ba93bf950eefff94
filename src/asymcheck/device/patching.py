"""Bytes of a stored piece into a live piece of the same whole, where they meet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch

from asymcheck.device.tensors import Bytes, Target, as_bits, slabs
from asymcheck.planning.pieces import Box, Piece, boxes, meet


class RunSink:
    """Takes one run of a stored leaf's elements, which is one run of a live tensor's as well.

    Args:
        target: The live tensor.
        start: First element of the leaf that goes there.
        stop: One past the last.
        shift: How much further on in the tensor an element is than in the leaf.
    """

    def __init__(self, target: Target, start: int, stop: int, shift: int) -> None:
        self._target = target
        self.itemsize = target.itemsize
        self._start, self._stop = start * self.itemsize, stop * self.itemsize
        self._shift = shift * self.itemsize

    def takes(self, start: int, stop: int) -> bool:
        """See ``Sink``."""
        return start < self._stop and self._start < stop

    def memory(self, start: int, stop: int) -> memoryview | None:
        """See ``Sink``."""
        if start < self._start or stop > self._stop:
            return None
        return self._target.memory(start + self._shift, stop + self._shift)

    def put(self, start: int, raw: Bytes) -> None:
        """See ``Sink``."""
        lo, hi = max(start, self._start), min(start + raw.size, self._stop)
        if lo < hi:
            self._target.put(lo + self._shift, raw[lo - start : hi - start])


class _Run(NamedTuple):
    """A box of a stored leaf, whose elements are one run of it.

    Attributes:
        box: In the whole.
        at: Where the run begins in the leaf, in elements.
        spans: First and one past the last element of the leaf that each live box takes.
    """

    box: Box
    at: int
    spans: tuple[tuple[int, int], ...]


class PatchSink:
    """Takes what a stored piece and a live piece have in common, whatever their boxes are.

    Args:
        have: The stored piece.
        shape: Of the stored leaf.
        dtype: Of the stored values; another one than the tensor's is cast.
        tensor: The live piece; keeps its dtype, device and strides.
        want: Where it lies in the whole.
        order: Dimension order of the stored leaf.
    """

    def __init__(
        self,
        have: Piece,
        shape: Sequence[int],
        dtype: torch.dtype,
        tensor: torch.Tensor,
        want: Piece,
        order: tuple[int, ...] = (),
    ) -> None:
        self.itemsize = dtype.itemsize
        self._dtype = dtype
        self._inference = tensor.is_inference()
        view = tensor.detach()
        self._changes_values = tensor.dtype != dtype or view.is_conj() or view.is_neg()
        if not self._changes_values:
            view = as_bits(view)
        self._live = [
            (_ordered(box, order), _ordered_view(part, order))
            for box, part in _parts(want, tuple(tensor.shape), view)
        ]
        self._runs = []
        for natural, at in boxes(have, tuple(shape)):
            box = _ordered(natural, order)
            spans = [_span(box, at, common) for b, _ in self._live if (common := meet(box, b))]
            if spans:
                self._runs.append(_Run(box, at, tuple(spans)))

    def takes(self, start: int, stop: int) -> bool:
        """See ``Sink``."""
        size = self.itemsize
        return any(
            start < hi * size and lo * size < stop for run in self._runs for lo, hi in run.spans
        )

    def memory(self, start: int, stop: int) -> memoryview | None:
        """See ``Sink``; here it lies apart."""
        return None

    def put(self, start: int, raw: Bytes) -> None:
        """See ``Sink``."""
        first = start // self.itemsize
        last = first + raw.size // self.itemsize
        with torch.inference_mode(self._inference):
            for box, at, _ in self._runs:
                lo, hi = max(first, at), min(last, at + prod(box.shape))
                for slab in slabs(box.shape, lo - at, hi - at):
                    part = _slab_box(box, slab)
                    end = lo + prod(part.shape)
                    size = self.itemsize
                    self._copy(part, raw[(lo - first) * size : (end - first) * size])
                    lo = end

    def _copy(self, box: Box, raw: Bytes) -> None:
        values = torch.from_numpy(raw)
        if self._changes_values:
            values = values.clone().view(self._dtype).view(box.shape)  # clone: for its alignment
        for live, view in self._live:
            common = meet(box, live)
            if common is None:
                continue
            if not self._changes_values:
                more = view.shape[len(box.shape) :]  # of elements that are two integers
                values = values.view(view.dtype).view(*box.shape, *more)
            view[_slices(common, live)].copy_(values[_slices(common, box)])


def _parts(
    piece: Piece, shape: tuple[int, ...], view: torch.Tensor
) -> Iterator[tuple[Box, torch.Tensor]]:
    """The boxes of a live piece, each with its memory."""
    if not isinstance(piece.start, int):
        yield Box(piece.start, shape), view
        return
    for box, at in boxes(piece, shape):
        more = view.shape[len(shape) :]
        yield box, view[at : at + prod(box.shape)].view(*box.shape, *more)


def _ordered(box: Box, order: tuple[int, ...]) -> Box:
    if not order:
        return box
    return Box(tuple(box.start[d] for d in order), tuple(box.shape[d] for d in order))


def _ordered_view(view: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    return view.permute(*order, *range(len(order), view.dim())) if order else view


def _span(box: Box, at: int, common: Box) -> tuple[int, int]:
    """The elements of a leaf from the first to the last that a box in its run has."""
    first = last = 0
    for n, base, lo, size in zip(box.shape, box.start, common.start, common.shape, strict=True):
        first = first * n + lo - base
        last = last * n + lo - base + size - 1
    return at + first, at + last + 1


def _slab_box(box: Box, slab: Sequence[int | slice]) -> Box:
    start, shape = list(box.start), list(box.shape)
    for d, cut in enumerate(slab):
        if isinstance(cut, slice):
            start[d], shape[d] = start[d] + cut.start, cut.stop - cut.start
        else:
            start[d], shape[d] = start[d] + cut, 1
    return Box(tuple(start), tuple(shape))


def _slices(common: Box, within: Box) -> tuple[slice, ...]:
    rows = zip(common.start, common.shape, within.start, strict=True)
    return tuple(slice(lo - base, lo - base + n) for lo, n, base in rows)
