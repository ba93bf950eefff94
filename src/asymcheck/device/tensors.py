"""Live tensors as bytes: which can be saved, how they lie in memory, copying out and in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from math import prod
from typing import Any, NoReturn

import numpy as np
import torch

from asymcheck.errors import IncompatibleCheckpoint, StateError

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]

NUMPY_PREFIX = "numpy:"
_QUANTIZED = frozenset({"qint8", "qint32", "quint8", "quint4x2", "quint2x4"})


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


@cache
def dtype_of(name: str) -> torch.dtype | None:
    """The torch dtype of that name, ``None`` where this torch has none that can be saved."""
    found = getattr(torch, name, None)
    return found if isinstance(found, torch.dtype) and name not in _QUANTIZED else None


def is_plain(dtype: np.dtype[Any]) -> bool:
    """Whether a numpy dtype's text names it, so that its values can be made again from bytes.

    Not so where there are fields or objects, and for a type of another package: the text of
    ``bfloat16``, say, is that of any two bytes.
    """
    if dtype.hasobject or dtype.names is not None:
        return False
    try:
        named = np.dtype(dtype.str)
    except TypeError:
        return False
    return named == dtype and named.type is dtype.type


def can_cast(stored: str, to: torch.dtype) -> bool:
    """Whether values of a stored dtype can be converted: not from complex to real, and not
    where torch has no such conversion.
    """
    source = dtype_of(stored)
    if source is None or (source.is_complex and not to.is_complex):
        return False
    try:
        torch.zeros(1, dtype=torch.uint8).expand(source.itemsize).contiguous().view(source).to(to)
    except (RuntimeError, TypeError):
        return False
    return True


def check_supported(key: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor whose values are not one dense run of plain elements.

    Raises:
        StateError: Sparse, meta, quantized, nested, or of a subclass with its own layout.
    """
    problem = _problem(tensor)
    if problem:
        raise StateError(key, problem)


def is_supported(tensor: torch.Tensor) -> bool:
    """Whether ``check_supported`` lets it pass."""
    return _problem(tensor) is None


def _problem(tensor: torch.Tensor) -> str | None:
    if torch.nn.parameter.is_lazy(tensor):
        return "not initialised yet: run one forward pass first"
    if tensor.layout != torch.strided:
        return f"layout {tensor.layout} is not supported: save tensor.to_dense() instead"
    if tensor.is_nested:
        return "a nested tensor is not supported: save its parts in a list"
    if tensor.is_quantized:
        return (
            f"quantized dtype {tensor.dtype} is not supported: "
            f"save int_repr(), scale and zero point as plain tensors"
        )
    if _has_own_layout(type(tensor)):
        return (
            f"tensor subclass {type(tensor).__qualname__} is not supported: "
            f"save the plain tensors that it is made of"
        )
    if tensor.is_meta:
        return "a meta tensor has no values: materialise it first"
    return None


@cache
def _has_own_layout(kind: type[torch.Tensor]) -> bool:
    plain = torch.Tensor.__torch_dispatch__
    return getattr(kind, "__torch_dispatch__", plain) is not plain or hasattr(
        kind, "__tensor_flatten__"
    )


def dense_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The dimensions from outermost to innermost in memory, when they leave no gap.

    Returns:
        ``()`` for the usual row-major order, a permutation for another one (such as
        ``channels_last``), ``None`` when elements overlap or lie apart.
    """
    if tensor.is_contiguous():
        return ()
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda d: (-strides[d], d)))
    return order if tensor.permute(order).is_contiguous() else None


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A dense row-major tensor as a flat ``uint8`` alias of the same memory."""
    return _flat(tensor.detach()).view(torch.uint8)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    # Not reshape: that keeps an odd stride of a single element.
    return tensor.as_strided((tensor.numel(),), (1,))


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same view of the same memory as integers: not every dtype has kernels, and no NaN
    may change on its way. Elements of 16 bytes become two, along a dimension of their own:
    their kernels need memory that is aligned to 16 bytes.
    """
    if tensor.itemsize == 16:
        return torch.view_as_real(tensor).view(torch.int64)
    return tensor.view(_BITS[tensor.itemsize])


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def copy_out(tensor: torch.Tensor, order: tuple[int, ...], into: Bytes) -> None:
    """Copy a tensor's values into host bytes, in the given dimension order; blocks.

    Args:
        tensor: On any device; left as it is.
        order: As ``dense_order`` says, ``()`` where that is ``None``.
        into: Exactly ``tensor.nbytes`` long, aligned to 8 bytes.
    """
    if tensor.numel() == 0:
        return
    source = tensor.detach()
    if order:
        source = source.permute(order)
    source = source.resolve_conj().resolve_neg()
    target = torch.from_numpy(into)
    if source.is_contiguous():
        target.copy_(as_bytes(source))
    else:
        bits = as_bits(source)
        target.view(bits.dtype).view(bits.shape).copy_(bits)


class Target:
    """A live tensor that receives the bytes of one stored leaf.

    Args:
        key: Of the leaf, for messages.
        tensor: Written in place, under ``no_grad``; keeps its dtype, device and strides.
        dtype: Of the stored values; another one than the tensor's is cast.
        order: Dimension order in which they are stored.
    """

    __slots__ = (
        *("_bits", "_flat", "_shared"),
        *("_conjugate", "_dtype", "_inference", "_negate", "_to"),
    )

    def __init__(
        self, key: str, tensor: torch.Tensor, dtype: torch.dtype, order: tuple[int, ...]
    ) -> None:
        self._dtype = dtype
        self._to = tensor.dtype
        self._inference = tensor.is_inference()
        view = tensor.detach()
        self._conjugate, self._negate = view.is_conj(), view.is_neg()
        if self._conjugate:
            view = view.conj()  # back to the memory itself
        if self._negate:
            view = view._neg_view()
        if order:
            view = view.permute(order)
        self._bits = as_bits(view)
        self._flat = _flat(self._bits) if view.is_contiguous() else None
        self._shared: _SharedMemory | None = None
        if self._flat is None and _may_overlap(view):
            self._shared = _SharedMemory(key, self._bits)

    @property
    def itemsize(self) -> int:
        """Bytes of one stored element."""
        return self._dtype.itemsize

    def takes(self, start: int, stop: int) -> bool:
        """Whether any of the leaf's bytes ``[start, stop)`` go here: all do."""
        return True

    def memory(self, start: int, stop: int) -> memoryview | None:
        """The live memory of the leaf's bytes ``[start, stop)``, to be filled directly.

        ``None`` where there is no such memory: the tensor is not on the CPU, is laid out
        in another way than the leaf is stored, or needs a change of its values.
        """
        flat = self._flat
        if flat is None or flat.device.type != "cpu" or self._changes_values:
            return None
        return as_bytes(flat).numpy().data[start:stop]

    @property
    def _changes_values(self) -> bool:
        return self._to != self._dtype or self._conjugate or self._negate

    def put(self, start: int, raw: Bytes) -> None:
        """Write the leaf's bytes from ``start`` on; blocks.

        Args:
            start: Offset in the leaf, on a whole element.
            raw: Whole elements; not kept.

        Raises:
            IncompatibleCheckpoint: Elements that share memory would get different values.
        """
        if raw.size == 0:
            return
        first, bits = start // self.itemsize, torch.from_numpy(raw)
        if self._changes_values:
            values = bits.clone().view(self._dtype).to(self._to)  # clone: for its alignment
            values = values.conj().resolve_conj() if self._conjugate else values
            bits = as_bytes(-values if self._negate else values)
        with torch.inference_mode(self._inference):
            size = self._bits.itemsize
            self._put(first * self._to.itemsize // size, bits.view(self._bits.dtype))

    def _put(self, first: int, values: torch.Tensor) -> None:
        if self._flat is not None:
            self._flat[first : first + values.numel()].copy_(values)
            return
        at = 0
        step = values.numel() if self._shared is None else _SHARED_AT_ONCE
        for lo in range(0, values.numel(), step):
            hi = min(lo + step, values.numel())
            for slab in slabs(self._bits.shape, first + lo, first + hi):
                part = self._bits[slab]
                piece = values[at : at + part.numel()]
                at += part.numel()
                if self._shared is None:
                    part.copy_(piece.view(part.shape))
                else:
                    self._shared.put(part, piece)


_SHARED_AT_ONCE = 1 << 18


class _SharedMemory:
    """Memory of a tensor whose elements may overlap: each place is given one value only."""

    def __init__(self, key: str, bits: torch.Tensor) -> None:
        spans = zip(bits.shape, bits.stride(), strict=True)
        extent = 1 + sum((size - 1) * stride for size, stride in spans)
        self._key = key
        self._start = bits.storage_offset()
        self._memory = bits.as_strided((extent,), (1,), self._start)
        self._written = torch.zeros(extent, dtype=torch.bool, device=bits.device)

    def put(self, part: torch.Tensor, values: torch.Tensor) -> None:
        places = torch.tensor(int(part.storage_offset()) - int(self._start), device=part.device)
        for size, stride in zip(part.shape, part.stride(), strict=True):
            along = torch.arange(size, device=part.device) * stride
            places = places.unsqueeze(-1) + along
        places = places.reshape(-1)
        values = values.to(part.device)
        before = self._written[places]
        if self._differs(places[before], values[before]):
            self._refuse()
        self._memory[places] = values
        self._written[places] = True
        if self._differs(places, values):
            self._refuse()

    def _differs(self, places: torch.Tensor, values: torch.Tensor) -> bool:
        return not torch.equal(as_bytes(self._memory[places]), as_bytes(values))

    def _refuse(self) -> NoReturn:
        raise IncompatibleCheckpoint(
            f"{self._key!r}: elements share memory in the live tensor and have different values "
            f"in the checkpoint: build it without expand() or overlapping views"
        )


def slabs(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[int | slice, ...]]:
    """Cut a range of row-major element numbers into rectangular pieces, in order.

    Args:
        shape: Of the array; no dimension is zero.
        start: First element.
        stop: One past the last, at most the number of elements.
    """
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # inside one row
        yield from _in_row(shape, start // row, start % row, stop - start // row * row)
        return
    if start < first * row:
        yield from _in_row(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield (slice(first, last),)
    if last * row < stop:
        yield from _in_row(shape, last, 0, stop - last * row)


def _in_row(
    shape: Sequence[int], row: int, start: int, stop: int
) -> Iterator[tuple[int | slice, ...]]:
    for rest in slabs(shape[1:], start, stop):
        yield (row, *rest)


def _may_overlap(tensor: torch.Tensor) -> bool:
    reach = 1
    spans = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    for stride, size in spans:
        if size > 1:
            if stride < reach:
                return True
            reach += (size - 1) * stride
    return False


def new_tensor(
    dtype: torch.dtype, shape: Sequence[int], order: tuple[int, ...], device: torch.device
) -> torch.Tensor:
    """An uninitialised tensor that is dense in the given dimension order."""
    if not order:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    back = tuple(order.index(d) for d in range(len(order)))
    made = torch.empty([shape[d] for d in order], dtype=dtype, device=device)
    return made.permute(back)
