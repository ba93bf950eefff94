"""Live tensors as bytes: which can be saved, how they lie in memory, copying out and in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import numpy as np
import torch

from asymcheck.errors import StateError

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]

NUMPY_PREFIX = "numpy:"


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype | None:
    """The torch dtype of that name, ``None`` where this torch has none."""
    found = getattr(torch, name, None)
    return found if isinstance(found, torch.dtype) else None


def check_supported(key: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor whose values are not one dense run of plain elements.

    Raises:
        StateError: Sparse, meta, quantized, nested, or of a subclass with its own layout.
    """
    problem = None
    if torch.nn.parameter.is_lazy(tensor):
        problem = "not initialised yet: run one forward pass first"
    elif tensor.layout != torch.strided:
        problem = f"layout {tensor.layout} is not supported: save tensor.to_dense() instead"
    elif tensor.is_nested:
        problem = "a nested tensor is not supported: save its parts in a list"
    elif tensor.is_quantized:
        problem = (
            f"quantized dtype {tensor.dtype} is not supported: "
            f"save int_repr(), scale and zero point as plain tensors"
        )
    elif _has_own_layout(type(tensor)):
        problem = (
            f"tensor subclass {type(tensor).__qualname__} is not supported: "
            f"save the plain tensors that it is made of"
        )
    elif tensor.is_meta:
        problem = "a meta tensor has no values: materialise it first"
    if problem:
        raise StateError(key, problem)


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
    return tensor.detach().reshape(-1).view(torch.uint8)


def is_plain_memory(tensor: torch.Tensor) -> bool:
    """Whether memory holds the values themselves, with no lazy conjugation or negation."""
    return not (tensor.is_conj() or tensor.is_neg())


def copy_out(tensor: torch.Tensor, order: tuple[int, ...], into: Bytes) -> None:
    """Copy a tensor's values into host bytes, in the given dimension order; blocks.

    Args:
        tensor: On any device; left as it is.
        order: As ``dense_order`` says, ``()`` where that is ``None``.
        into: Exactly ``tensor.nbytes`` long.
    """
    if tensor.numel() == 0:
        return
    source = tensor.detach()
    if order:
        source = source.permute(order)
    target = torch.from_numpy(into)
    if source.is_contiguous() and is_plain_memory(source):
        target.copy_(as_bytes(source))
    else:
        target.view(source.dtype).view(source.shape).copy_(source)


class Target:
    """A live tensor that receives the bytes of one stored leaf.

    Args:
        tensor: Written in place, under ``no_grad``; keeps its dtype, device and strides.
        dtype: Of the stored values; another one than the tensor's is cast.
        order: Dimension order in which they are stored.
    """

    def __init__(self, tensor: torch.Tensor, dtype: torch.dtype, order: tuple[int, ...]) -> None:
        self._dtype = dtype
        self._view = tensor.detach().permute(order) if order else tensor.detach()
        self._flat: torch.Tensor | None = None
        if self._view.is_contiguous() and is_plain_memory(self._view):
            self._flat = self._view.reshape(-1)

    @property
    def itemsize(self) -> int:
        """Bytes of one stored element."""
        return self._dtype.itemsize

    def memory(self, start: int, stop: int) -> memoryview | None:
        """The live memory of the leaf's bytes ``[start, stop)``, to be filled directly.

        ``None`` where there is no such memory: the tensor is not on the CPU, is laid out
        in another way than the leaf is stored, or needs a cast.
        """
        flat = self._flat
        if flat is None or flat.device.type != "cpu" or flat.dtype != self._dtype:
            return None
        return as_bytes(flat).numpy().data[start:stop]

    def put(self, start: int, raw: Bytes) -> None:
        """Write the leaf's bytes from ``start`` on; blocks.

        Args:
            start: Offset in the leaf, on a whole element.
            raw: Whole elements; not kept.
        """
        if raw.size == 0:
            return
        values = torch.from_numpy(raw).view(self._dtype)
        first = start // self.itemsize
        if self._flat is not None:
            part = self._flat[first : first + values.numel()]
            if part.dtype == values.dtype:
                # As bytes: not every dtype has a copy kernel, and NaN payloads must survive.
                part.view(torch.uint8).copy_(values.view(torch.uint8))
            else:
                part.copy_(values)
            return
        at = 0
        for slab in slabs(self._view.shape, first, first + values.numel()):
            part = self._view[slab]
            count = part.numel()
            _assign(part, values[at : at + count].view(part.shape))
            at += count


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


def _assign(target: torch.Tensor, values: torch.Tensor) -> None:
    """``target[...] = values``, also where elements of ``target`` share memory.

    Elements that share memory have equal values: they were read from such a tensor.
    """
    for dim, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
        if size > 1 and stride == 0:
            target, values = target.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    if not _may_overlap(target):
        target.copy_(values)
        return
    spans = zip(target.shape, target.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in spans)
    places = torch.arange(extent, device=target.device).as_strided(target.shape, target.stride())
    memory = target.as_strided((extent,), (1,), target.storage_offset())
    memory[places.reshape(-1)] = values.reshape(-1).to(target.device, target.dtype)


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
    return torch.empty([shape[d] for d in order], dtype=dtype, device=device).permute(back)
