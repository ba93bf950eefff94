"""Leaves: the arrays of the state, with the bytes they hold now and where they go back to."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import memmove
from functools import cache, partial
from itertools import repeat
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple, Protocol, TypeGuard

import numpy as np
import torch

from asymcheck.device.tensors import (
    NUMPY_PREFIX,
    Bytes,
    Target,
    check_supported,
    copy_out,
    dense_order,
    dtype_name,
    dtype_of,
    is_plain,
    is_supported,
    new_tensor,
)
from asymcheck.errors import CorruptCheckpoint, IncompatibleCheckpoint, StateError
from asymcheck.planning.layout import PAGE_BYTES, SMALL_BYTES, align_up
from asymcheck.storage.index import TREE_DTYPE, TREE_KEY, Leaf

Array = torch.Tensor | np.ndarray[Any, Any]


class Spec(NamedTuple):
    """What is known of a leaf without its values; the same object at every save.

    Attributes:
        key: Path of the leaf.
        dtype: As ``Leaf.dtype``.
        shape: As ``Leaf.shape``.
        order: As ``Leaf.order``.
        nbytes: Size.
        itemsize: Bytes of an element.
        kind: ``parameter``, ``state/`` and the name of an optimizer's entry (such as
            ``state/exp_avg``), or empty for everything else.
        lazy: Whether it only changes in an update, so that it may be copied until the next.
        plain: Whether the values are ``nbytes`` of host memory at the array's address.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    order: tuple[int, ...]
    nbytes: int
    itemsize: int = 1
    kind: str = ""
    lazy: bool = False
    plain: bool = False


class Source(NamedTuple):
    """One leaf as it is now. Holds on to its array, so its memory is not reused meanwhile.

    Attributes:
        spec: What it is.
        array: A tensor, a numpy array, or the text of the tree. What is lazy is an alias:
            it keeps its memory although the parameter is given another one meanwhile.
        deferred: Whether it is a clone, so that it may be copied at any time.
    """

    spec: Spec
    array: Array | bytes
    deferred: bool = False

    def copy_out(self, into: Bytes) -> None:
        """Copy the values into host bytes; blocks."""
        array, spec = self.array, self.spec
        if isinstance(array, torch.Tensor):
            if spec.plain:
                memmove(into.ctypes.data, array.data_ptr(), spec.nbytes)
            else:
                copy_out(array, () if self.deferred else spec.order, into)
        elif isinstance(array, bytes):
            into[:] = np.frombuffer(array, np.uint8)
        else:
            into[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)


class Known(NamedTuple):
    """Tensors of a save, as far as the next one can be spared to look at each of them again.

    Attributes:
        looks: All that specs and aliases depend on, a column for each property.
        keys: Where each was saved.
        picks: Which of them are leaves; the others are aliases of these.
        specs: Of the leaves.
        lazy: Which of the leaves are lazy.
        aliases: As ``Collector.aliases``.
    """

    looks: tuple[list[Any], ...]
    keys: list[str]
    picks: list[int]
    specs: list[Spec]
    lazy: list[int]
    aliases: dict[str, str]


class Collector:
    """Gathers the leaves of a state; one that is there under two keys is kept once.

    Attributes:
        sources: In the order in which they were found.
        aliases: Further keys of leaves that are the same view of the same memory.
    """

    def __init__(self) -> None:
        self.sources: list[Source] = []
        self.aliases: dict[str, str] = {}
        self._keys: set[str] = set()
        self._seen: dict[object, str] = {}
        self._tensors: dict[int, tuple[torch.Tensor, str] | None] = {}

    def add(self, key: str, array: Array, *, kind: str = "") -> str:
        """Note a leaf; returns the key that it is saved under.

        Args:
            key: Its path.
            array: Its values.
            kind: See ``Spec``; with one, nothing but an optimizer's update changes it.

        Raises:
            StateError: It cannot be saved.
        """
        serial, wanted = 1, key
        while key in self._keys or key == TREE_KEY:
            serial += 1
            key = f"{wanted}~{serial}"
        self._keys.add(key)
        if isinstance(array, torch.Tensor):
            self._note(key, self._tensor_source(key, array, kind))
            return key
        source, identity = _numpy_source(key, array)
        first = self._seen.setdefault(identity, key) if identity is not None else key
        if first == key:
            self.sources.append(source)
        else:
            self.aliases[key] = first
        return key

    def state_leaf(self, key: str, array: Array) -> str:
        """Note a leaf of an optimizer's state; see ``add``."""
        return self.add(key, array, kind="state/" + key.rpartition("/")[2])

    def add_known(self, known: Known | None, tensors: Sequence[torch.Tensor]) -> bool:
        """Note tensors that all are where and what they were at the save before; else nothing.

        Most of a large state is like that, and one by one with ``add`` it would be most of the
        time at the boundary. Here no line of Python runs for a single tensor.

        Args:
            known: What ``learn`` returned then.
            tensors: In the same order.

        Returns:
            Whether they were noted.
        """
        if known is None or len(tensors) != len(known.keys) or _looks(tensors) != known.looks:
            return False
        # Of several keys in one place the first stays, which is the leaf.
        named = zip(reversed(tensors), reversed(known.keys), strict=True)
        here = dict(zip(reversed(known.looks[-1]), named, strict=True))
        here.pop(0, None)
        if not self._keys.isdisjoint(known.keys) or not self._tensors.keys().isdisjoint(here):
            return False
        leaves = [tensors[i] for i in known.picks]
        for i in known.lazy:
            leaves[i] = leaves[i].detach()
        self._keys.update(known.keys)
        self._tensors.update(here)
        self.aliases.update(known.aliases)
        rows = zip(known.specs, leaves, repeat(False), strict=False)
        self.sources += map(partial(tuple.__new__, Source), rows)
        return True

    def learn(
        self, first: int, keys: Sequence[str], tensors: Sequence[torch.Tensor]
    ) -> Known | None:
        """What the next save may use for tensors that were just added one by one.

        Args:
            first: How many sources there were before.
            keys: Where they were saved, in the order in which they were added.
            tensors: Their values.

        Returns:
            ``None`` where one of them is not ordinary, or two leaves begin at one place.
        """
        looks = _looks(tensors)
        specs = [s.spec for s in self.sources[first:]]
        leaves = {s.key for s in specs}
        picks = [i for i, key in enumerate(keys) if key in leaves]
        if looks is None or [keys[i] for i in picks] != [s.key for s in specs]:
            return None
        aliases = {key: self.aliases[key] for key in keys if key not in leaves}
        places = [looks[-1][i] for i in picks if looks[-1][i]]
        if len(set(places)) != len(places) or not leaves.issuperset(aliases.values()):
            return None
        lazy = [i for i, s in enumerate(specs) if s.lazy]
        return Known(looks, list(keys), picks, specs, lazy, aliases)

    def _tensor_source(self, key: str, tensor: torch.Tensor, kind: str) -> Source:
        check_supported(key, tensor)
        spec = _spec(key, tensor.detach(), kind)
        return Source(spec, tensor.detach() if spec.lazy else tensor)

    def _note(self, key: str, source: Source) -> None:
        """Keep a tensor, or that it is the same view of the same memory as an earlier one."""
        tensor: Any = source.array
        first = key
        if source.spec.nbytes:
            mine = (tensor, key)
            there = self._tensors.setdefault(tensor.data_ptr(), mine)
            if there is not mine:
                # Rare, and only then worth a closer look.
                if there is not None:
                    self._tensors[tensor.data_ptr()] = None
                    self._seen[_identity(there[0])] = there[1]
                first = self._seen.setdefault(_identity(tensor), key)
        if first == key:
            self.sources.append(source)
        else:
            self.aliases[key] = first

    def add_tree(self, text: bytes) -> None:
        """Note the tree, last. Spaces at its end keep its size, and so the place of every
        other leaf, the same from save to save.
        """
        text = text.ljust(align_up(len(text), PAGE_BYTES))
        self.sources.append(Source(Spec(TREE_KEY, TREE_DTYPE, (len(text),), (), len(text)), text))


_ORDINARY = frozenset({torch.Tensor, torch.nn.Parameter})


_PROPERTIES = attrgetter("dtype", "shape", "is_cpu")
_METHODS = (
    torch.Tensor.stride,
    torch.Tensor.is_conj,
    torch.Tensor.is_neg,
    torch.Tensor.data_ptr,
)


def _looks(tensors: Sequence[torch.Tensor]) -> tuple[list[Any], ...] | None:
    """All that specs and aliases of tensors depend on, a column for each property, addresses
    last; ``None`` where one of them is no ordinary strided tensor.
    """
    types = list(map(type, tensors))
    if not _ORDINARY.issuperset(types):
        return None
    try:
        columns = [list(map(method, tensors)) for method in _METHODS]
        return types, list(map(_PROPERTIES, tensors)), *columns
    except (RuntimeError, NotImplementedError):
        return None  # sparse, nested or without memory


def _spec(key: str, alias: torch.Tensor, kind: str) -> Spec:
    dense = dense_order(alias)
    nbytes = alias.nbytes
    computed = alias.is_conj() or alias.is_neg()  # memory does not hold the values themselves
    in_memory = dense is not None and not computed
    return Spec(
        key,
        dtype_name(alias.dtype),
        tuple(alias.shape),
        dense or (),
        nbytes,
        alias.element_size(),
        kind,
        lazy=bool(kind) and nbytes >= SMALL_BYTES and in_memory,
        plain=in_memory and alias.is_cpu,
    )


def _identity(tensor: torch.Tensor) -> tuple[object, ...]:
    """Equal for two tensors that are the same view of the same memory."""
    lazily = (tensor.is_conj(), tensor.is_neg())
    where = (tensor.device, tensor.data_ptr())
    return (*where, tuple(tensor.shape), tensor.stride(), tensor.dtype, *lazily)


def _numpy_source(key: str, array: np.ndarray[Any, Any]) -> tuple[Source, object]:
    if not is_plain(array.dtype):
        raise StateError(
            key,
            f"a numpy array of dtype {array.dtype} is not supported: expected a dtype of numpy's "
            f"own without fields or objects; use plain columns, a tensor, or array.view(…) as "
            f"numbers of the same size",
        )
    dtype = NUMPY_PREFIX + array.dtype.str
    source = Source(Spec(key, dtype, array.shape, (), array.nbytes), array)
    return source, _numpy_identity(array) if array.nbytes else None


def _numpy_identity(array: np.ndarray[Any, Any]) -> tuple[object, ...]:
    address = array.__array_interface__["data"][0]
    return (address, array.shape, array.strides, array.dtype.str)


class Sink(Protocol):
    """Where the bytes of one stored leaf go."""

    @property
    def itemsize(self) -> int:
        """Bytes of one stored element."""
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

    def memory(self, start: int, stop: int) -> memoryview | None:
        return self._bytes.data[start:stop]

    def put(self, start: int, raw: Bytes) -> None:
        self._bytes[start : start + raw.size] = raw


class Places:
    """Where each stored leaf goes; filled while a restore is planned, used while it reads.

    Args:
        leaves: The leaves of the checkpoint by key; aliases are resolved.
        aliases: Alias to key.

    Attributes:
        sinks: By leaf key; several where one stored leaf goes to several live tensors.
    """

    def __init__(self, leaves: dict[str, Leaf], aliases: dict[str, str]) -> None:
        self._leaves = leaves
        self._aliases = aliases
        self._arrays: dict[str, Array] = {}
        self._written: dict[object, str] = {}
        self.sinks: dict[str, list[Sink]] = {}

    def leaf(self, key: str) -> Leaf | None:
        """The stored leaf of a key or alias."""
        return self._leaves.get(self._aliases.get(key, key))

    def array_keys(self) -> set[str]:
        """All keys and aliases of arrays."""
        return {k for k in self._leaves if k != TREE_KEY} | self._aliases.keys()

    def into_tensor(self, key: str, tensor: torch.Tensor) -> str | None:
        """Send a leaf to a live tensor that was checked to be one for it.

        Returns:
            ``None``, or the key of another leaf that already goes to that memory: then
            nothing is changed.
        """
        leaf = self._need(key)
        if leaf.nbytes == 0:
            return None
        identity = _identity(tensor)
        first = self._written.get(identity)
        if first is not None:
            return None if first == leaf.key else first  # tied: that memory is written once
        self._written[identity] = leaf.key
        target = Target(key, tensor, _torch_dtype(leaf), leaf.order)
        self.sinks.setdefault(leaf.key, []).append(target)
        return None

    def bind(self, key: str, device: str, live: object) -> None:
        """Give a leaf of a tree an array: the live one where it fits, else a new one."""
        leaf = self._need(key)
        if leaf.key in self._arrays:
            return
        if leaf.dtype.startswith(NUMPY_PREFIX):
            array = self._numpy_array(leaf, live)
            self._arrays[leaf.key] = array
            if leaf.nbytes:
                self.sinks.setdefault(leaf.key, []).append(_NumpySink(array))
            return
        dtype = _torch_dtype(leaf)
        if _is_reusable(live, leaf, dtype, device) and self.into_tensor(key, live) is None:
            self._arrays[leaf.key] = live
            return
        tensor = new_tensor(dtype, leaf.shape, leaf.order, usable_device(device))
        self._arrays[leaf.key] = tensor
        self.into_tensor(key, tensor)

    def array(self, key: str) -> Array:
        """The array that ``bind`` chose."""
        return self._arrays[self._need(key).key]

    def _need(self, key: str) -> Leaf:
        leaf = self.leaf(key)
        if leaf is None:
            raise CorruptCheckpoint("(state)", f"the tree names {key!r:.120}, which is no leaf")
        return leaf

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
            and self._written.setdefault(_numpy_identity(live), leaf.key) == leaf.key
        ):
            return live
        return np.empty(leaf.shape, dtype)


def _torch_dtype(leaf: Leaf) -> torch.dtype:
    dtype = dtype_of(leaf.dtype)
    if dtype is None:
        raise IncompatibleCheckpoint(
            f"{leaf.key!r}: torch {torch.__version__} has no dtype {leaf.dtype!r:.40}"
        )
    check_size(leaf, dtype.itemsize)
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
    live: object, leaf: Leaf, dtype: torch.dtype, device: str
) -> TypeGuard[torch.Tensor]:
    return (
        isinstance(live, torch.Tensor)
        and is_supported(live)
        and live.dtype == dtype
        and tuple(live.shape) == leaf.shape
        and live.device.type == usable_device(device).type
    )
