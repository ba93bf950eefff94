"""Where stored leaves and pieces of wholes go: into live memory where there is some."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod
from typing import Any, NamedTuple, Protocol, TypeGuard

import numpy as np
import torch

from asymcheck.device.leaves import Array, identity, numpy_identity
from asymcheck.device.patching import PatchSink, RunSink
from asymcheck.device.sharding import is_dtensor, local, shard_of
from asymcheck.device.tensors import (
    NUMPY_PREFIX,
    Bytes,
    Target,
    dtype_of,
    is_supported,
    new_tensor,
)
from asymcheck.errors import CorruptCheckpoint, IncompatibleCheckpoint
from asymcheck.planning.pieces import Piece, flat_range, uncovered, whole_piece
from asymcheck.storage.index import TREE_KEY, Index, Leaf


class Sink(Protocol):
    """Where the bytes of one stored leaf go."""

    @property
    def itemsize(self) -> int:
        """Bytes of one stored element."""
        ...

    def takes(self, start: int, stop: int) -> bool:
        """Whether any of those bytes go anywhere."""
        ...

    def memory(self, start: int, stop: int) -> memoryview | None:
        """Live memory of those bytes, to be filled directly, where there is such."""
        ...

    def put(self, start: int, raw: Bytes) -> None:
        """Write the bytes from ``start`` on."""
        ...


class _NumpySink:
    itemsize = 1  # it takes any run of bytes

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._bytes: Bytes = array.reshape(-1).view(np.uint8)

    def takes(self, start: int, stop: int) -> bool:
        return True

    def memory(self, start: int, stop: int) -> memoryview | None:
        return self._bytes.data[start:stop]

    def put(self, start: int, raw: Bytes) -> None:
        self._bytes[start : start + raw.size] = raw


class Stored(NamedTuple):
    """An array of a checkpoint: one leaf of the rank's own, or a whole in pieces of all ranks.

    Attributes:
        key: Path of the leaf.
        dtype: As ``Leaf.dtype``.
        shape: Of the whole.
        order: As ``Leaf.order``.
        parts: What is stored of it, and where.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    order: tuple[int, ...]
    parts: tuple[tuple[Index, Leaf], ...]

    @property
    def is_empty(self) -> bool:
        """Whether it has no element."""
        return not prod(self.shape)


class Places:
    """Where each stored leaf goes; filled while a restore is planned, used while it reads.

    Args:
        own: The index of the rank whose own leaves are taken.
        indexes: Those of all ranks, for pieces.

    Attributes:
        sinks: By rank of the index and key of the leaf; several where one stored leaf goes to
            several live tensors.
    """

    def __init__(self, own: Index, indexes: Sequence[Index] = ()) -> None:
        self._own = own
        self._leaves = {leaf.key: leaf for leaf in own.leaves}
        self._pieces = [
            (index, pieces) for index in indexes or (own,) if (pieces := _pieces_of(index))
        ]
        self._found: dict[str, Stored | None] = {}
        self._arrays: dict[str, Array] = {}
        self._written: dict[object, str] = {}
        self.sinks: dict[tuple[int, str], list[Sink]] = {}

    def leaf(self, key: str) -> Stored | None:
        """The stored array of a key or alias.

        Raises:
            CorruptCheckpoint: Its pieces do not make a whole.
        """
        if key not in self._found:
            self._found[key] = self._look_up(key)
        return self._found[key]

    def _look_up(self, key: str) -> Stored | None:
        leaf = self._leaves.get(self._own.aliases.get(key, key))
        if leaf is not None and leaf.piece is None:
            return Stored(leaf.key, leaf.dtype, leaf.shape, leaf.order, ((self._own, leaf),))
        parts = []
        for index, pieces in self._pieces:
            part = pieces.get(index.aliases.get(key, key))
            if part is not None:
                parts.append((index, part))
        return _whole(key, parts) if parts else None

    def array_keys(self) -> set[str]:
        """All keys and aliases of arrays."""
        keys = {k for k in self._leaves if k != TREE_KEY} | self._own.aliases.keys()
        for index, pieces in self._pieces:
            keys |= pieces.keys()
            keys |= {alias for alias, key in index.aliases.items() if key in pieces}
        return keys

    def into_tensor(self, key: str, tensor: torch.Tensor, piece: Piece | None = None) -> str | None:
        """Send an array to a live tensor that was checked to be one for it.

        Args:
            key: Of the array.
            tensor: Where to.
            piece: Which part of the whole it is; that of a DTensor is known, any other tensor
                is all of it.

        Returns:
            ``None``, or the key of another one that already goes to that memory: then nothing
            is changed.
        """
        stored, mine = self._need(key), local(tensor)
        if stored.is_empty or not mine.numel():
            return None
        memory = identity(mine)
        first = self._written.get(memory)
        if first is not None:
            return None if first == stored.key else first  # tied: that memory is written once
        self._written[memory] = stored.key
        if is_dtensor(tensor):
            piece = shard_of(key, tensor).piece
        self._send(key, stored, mine, piece or whole_piece(stored.shape))
        return None

    def _send(self, key: str, stored: Stored, mine: torch.Tensor, want: Piece) -> None:
        """Have each part fill what it has of a piece of the whole."""
        dtype = _torch_dtype(stored)
        target = Target(key, mine, dtype, () if isinstance(want.start, int) else stored.order)
        for index, leaf in stored.parts:
            if leaf.nbytes and (sink := _sink(leaf, dtype, mine, want, target)) is not None:
                self.sinks.setdefault((index.rank, leaf.key), []).append(sink)

    def bind(self, key: str, device: str, live: object) -> None:
        """Give a leaf of a tree an array: the live one where it fits, else a new one."""
        stored = self._need(key)
        if stored.key in self._arrays:
            return
        if stored.dtype.startswith(NUMPY_PREFIX):
            [(index, leaf)] = stored.parts
            array = self._numpy_array(leaf, live)
            self._arrays[stored.key] = array
            if leaf.nbytes:
                self.sinks.setdefault((index.rank, leaf.key), []).append(_NumpySink(array))
            return
        dtype = _torch_dtype(stored)
        if _is_reusable(live, stored, dtype, device) and self.into_tensor(key, live) is None:
            self._arrays[stored.key] = live
            return
        tensor = new_tensor(dtype, stored.shape, stored.order, usable_device(device))
        self._arrays[stored.key] = tensor
        self.into_tensor(key, tensor)

    def read_also(self, other: Places) -> None:
        """Have what others were given a place for read as well."""
        for leaf, sinks in other.sinks.items():
            self.sinks.setdefault(leaf, []).extend(sinks)

    def array(self, key: str) -> Array:
        """The array that ``bind`` chose."""
        return self._arrays[self._need(key).key]

    def _need(self, key: str) -> Stored:
        stored = self.leaf(key)
        if stored is None:
            raise CorruptCheckpoint("(state)", f"the tree names {key!r:.120}, which is no leaf")
        return stored

    def _numpy_array(self, leaf: Leaf, live: object) -> np.ndarray[Any, Any]:
        try:
            dtype = np.dtype(leaf.dtype.removeprefix(NUMPY_PREFIX))
        except (TypeError, ValueError) as bad:
            raise CorruptCheckpoint("(state)", f"{leaf.key!r}: {bad}") from bad
        if dtype.hasobject:
            raise CorruptCheckpoint("(state)", f"{leaf.key!r}: dtype {dtype} holds objects")
        check_size(leaf, dtype.itemsize)
        if (
            type(live) is np.ndarray
            and live.dtype == dtype
            and live.shape == leaf.shape
            and live.flags.c_contiguous
            and live.flags.writeable
            and self._written.setdefault(numpy_identity(live), leaf.key) == leaf.key
        ):
            return live
        return np.empty(leaf.shape, dtype)


def _pieces_of(index: Index) -> dict[str, Leaf]:
    return {leaf.key: leaf for leaf in index.leaves if leaf.piece is not None}


def _whole(key: str, parts: Sequence[tuple[Index, Leaf]]) -> Stored:
    # Where one memory has two names, ranks whose piece is empty cannot see that.
    _, first = next((part for part in parts if part[1].nbytes), parts[0])
    whole = _piece(first).whole
    missing = uncovered(whole, [(_piece(leaf), leaf.shape) for _, leaf in parts])
    if missing:
        raise CorruptCheckpoint(
            "(state)", f"{key!r:.120}: no rank has {missing} of {first.dtype} {list(whole)}"
        )
    return Stored(first.key, first.dtype, whole, (), tuple(parts))


def _piece(leaf: Leaf) -> Piece:
    return leaf.piece or whole_piece(leaf.shape)


def _sink(
    leaf: Leaf, dtype: torch.dtype, mine: torch.Tensor, want: Piece, target: Target
) -> Sink | None:
    """What takes the bytes of one stored leaf for a live piece, ``None`` where it has none of it.

    Args:
        leaf: A whole or a piece.
        dtype: Of its values.
        mine: Live memory.
        want: Which piece of the whole it is.
        target: All of it, written in the order of the leaf.
    """
    have, shape = _piece(leaf), tuple(mine.shape)
    if have.start == want.start and leaf.shape == shape:  # the same elements
        return target
    if not leaf.order:
        here, there = flat_range(have, leaf.shape), flat_range(want, shape)
        if here is not None and there is not None:
            lo, hi = max(here[0], there[0]) - here[0], min(here[1], there[1]) - here[0]
            return RunSink(target, lo, hi, here[0] - there[0]) if lo < hi else None
    patch = PatchSink(have, leaf.shape, dtype, mine, want, leaf.order)
    return patch if patch.takes(0, leaf.nbytes) else None


def _torch_dtype(leaf: Stored) -> torch.dtype:
    dtype = dtype_of(leaf.dtype)
    if dtype is None:
        raise IncompatibleCheckpoint(
            f"{leaf.key!r}: torch {torch.__version__} has no dtype {leaf.dtype!r:.40}"
        )
    for _, part in leaf.parts:
        check_size(part, dtype.itemsize)
    return dtype


def check_size(leaf: Leaf, itemsize: int) -> None:
    """Check that a leaf has as many bytes as its shape and dtype say.

    Raises:
        CorruptCheckpoint: It has not.
    """
    expected = itemsize * prod(leaf.shape)
    if expected != leaf.nbytes:
        raise CorruptCheckpoint(
            "(state)",
            f"leaf {leaf.key!r:.120}: {leaf.nbytes} bytes, {leaf.dtype} {list(leaf.shape)} "
            f"needs {expected}",
        )


@cache
def usable_device(name: str) -> torch.device:
    """The recorded device where it is there, else the CPU.

    Raises:
        CorruptCheckpoint: No device has such a name.
    """
    try:
        device = torch.device(name)
    except RuntimeError as bad:
        raise CorruptCheckpoint("(state)", f"device {name!r:.40}: {bad}") from bad
    if device.type == "cuda" and (
        not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()
    ):
        return torch.device("cpu")
    return device


def _is_reusable(
    live: object, leaf: Stored, dtype: torch.dtype, device: str
) -> TypeGuard[torch.Tensor]:
    return (
        isinstance(live, torch.Tensor)
        and is_supported(local(live))
        and live.dtype == dtype
        and tuple(live.shape) == leaf.shape
        and live.device.type == usable_device(device).type
    )
