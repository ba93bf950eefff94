"""Leaves: the arrays of the state, with the bytes they hold now."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ctypes import memmove
from functools import partial
from itertools import repeat
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch

from asymcheck.device.sharding import Copies, Shard, dtensor_class, is_dtensor, local, shard_of
from asymcheck.device.tensors import (
    NUMPY_PREFIX,
    Bytes,
    check_supported,
    copy_out,
    dense_order,
    dtype_name,
    is_plain,
)
from asymcheck.errors import StateError
from asymcheck.planning.layout import PAGE_BYTES, SMALL_BYTES, align_up
from asymcheck.planning.pieces import Piece
from asymcheck.storage.index import TREE_DTYPE, TREE_KEY

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
        piece: As ``Leaf.piece``.
        copies: Which ranks have the same values and share out who writes what of them.
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
    piece: Piece | None = None
    copies: Copies | None = None


class Source(NamedTuple):
    """One leaf as it is now. Holds on to its array, so its memory is not reused meanwhile.

    Attributes:
        spec: What it is.
        array: A tensor, a numpy array, or the text of the tree. What is lazy is an alias:
            it keeps its memory although the parameter is given another one meanwhile.
        deferred: Whether it is a clone, so that it may be copied at any time.
        held: The tensor that others hold and change, where that is not the array or what it is
            an alias of: the DTensor around it, whose version moves when it changes.
    """

    spec: Spec
    array: Array | bytes
    deferred: bool = False
    held: torch.Tensor | None = None

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
        copies: Of the tensors that are added next, unless they are DTensors.
    """

    def __init__(self) -> None:
        self.sources: list[Source] = []
        self.aliases: dict[str, str] = {}
        self.copies: Copies | None = None
        self._keys: set[str] = set()
        self._seen: dict[object, str] = {}
        self._tensors: dict[int, tuple[torch.Tensor, str] | None] = {}

    def add(self, key: str, array: Array, *, kind: str = "", piece: Piece | None = None) -> str:
        """Note a leaf; returns the key that it is saved under.

        Args:
            key: Its path.
            array: Its values.
            kind: See ``Spec``; with one, nothing but an optimizer's update changes it.
            piece: Which part of a whole a tensor is that nobody else has; a DTensor's is known.

        Raises:
            StateError: It cannot be saved.
        """
        serial, wanted = 1, key
        while key in self._keys or key == TREE_KEY:
            serial += 1
            key = f"{wanted}~{serial}"
        self._keys.add(key)
        if isinstance(array, torch.Tensor):
            self._note(key, self._tensor_source(key, array, kind, piece))
            return key
        source, same = _numpy_source(key, array)
        first = self._seen.setdefault(same, key) if same is not None else key
        if first == key:
            self.sources.append(source)
        else:
            self.aliases[key] = first
        return key

    def state_leaf(self, key: str, array: Array, piece: Piece | None = None) -> str:
        """Note a leaf of an optimizer's state; see ``add``."""
        return self.add(key, array, kind="state/" + key.rpartition("/")[2], piece=piece)

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
        if known is None or len(tensors) != len(known.keys):
            return False
        mine, shares = _memory(tensors)
        if _looks(tensors, mine, shares) != known.looks:
            return False
        # Of several keys in one place the first stays, which is the leaf.
        named = zip(reversed(mine), reversed(known.keys), strict=True)
        here = dict(zip(reversed(known.looks[-1]), named, strict=True))
        here.pop(0, None)
        if not self._keys.isdisjoint(known.keys) or not self._tensors.keys().isdisjoint(here):
            return False
        held: Iterable[torch.Tensor | None] = repeat(None)
        if shares:
            held = [tensors[i] if shares[i] is not None else None for i in known.picks]
        leaves = [mine[i] for i in known.picks]
        for i in known.lazy:
            leaves[i] = leaves[i].detach()
        self._keys.update(known.keys)
        self._tensors.update(here)
        self.aliases.update(known.aliases)
        rows = zip(known.specs, leaves, repeat(False), held, strict=False)
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
        looks = _looks(tensors, *_memory(tensors))
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

    def _tensor_source(
        self, key: str, tensor: torch.Tensor, kind: str, piece: Piece | None
    ) -> Source:
        mine, held, shard = tensor, None, None if piece is None else Shard(piece, None)
        if is_dtensor(tensor):
            mine, held, shard = local(tensor), tensor, shard_of(key, tensor)
        check_supported(key, mine)
        spec = _spec(key, mine.detach(), kind)
        if shard is not None:
            spec = as_piece(spec, shard.piece)._replace(copies=shard.copies)
        elif self.copies is not None:
            spec = spec._replace(copies=self.copies)
        return Source(spec, mine.detach() if spec.lazy else mine, held=held)

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
                    self._seen[identity(there[0])] = there[1]
                first = self._seen.setdefault(identity(tensor), key)
        if first == key:
            self.sources.append(source)
        else:
            self.aliases[key] = first

    def keep(self, sources: list[Source]) -> None:
        """Have these leaves alone, in place of all that were noted, and their further keys."""
        if sources is self.sources:
            return
        self.sources = sources
        kept = {s.spec.key for s in sources}
        self.aliases = {alias: key for alias, key in self.aliases.items() if key in kept}

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


def _memory(tensors: Sequence[Any]) -> tuple[Sequence[torch.Tensor], list[Any]]:
    """What of each tensor lies in memory here, and what its mesh and placements say of it:
    nothing where there is no DTensor.
    """
    kind = dtensor_class()
    if kind is None or kind not in set(map(type, tensors)):
        return tensors, []
    mine = [t._local_tensor if type(t) is kind else t for t in tensors]
    return mine, [t._spec if type(t) is kind else None for t in tensors]


def _looks(
    tensors: Sequence[torch.Tensor], mine: Sequence[torch.Tensor], shares: list[Any]
) -> tuple[list[Any], ...] | None:
    """All that specs and aliases of tensors depend on, a column for each property, addresses
    last; ``None`` where one of them is no ordinary strided tensor, nor a DTensor of such.
    """
    if not _ORDINARY.issuperset(map(type, mine)):
        return None
    try:
        columns = [list(map(method, mine)) for method in _METHODS]
        return list(map(type, tensors)), shares, list(map(_PROPERTIES, mine)), *columns
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


def as_piece(spec: Spec, piece: Piece) -> Spec:
    """The spec of a piece, which is stored row-major: what lies otherwise cannot be copied as
    it lies in memory.
    """
    spec = spec._replace(piece=piece)
    return spec._replace(order=(), lazy=False, plain=False) if spec.order else spec


def identity(tensor: torch.Tensor) -> tuple[object, ...]:
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
    return source, numpy_identity(array) if array.nbytes else None


def numpy_identity(array: np.ndarray[Any, Any]) -> tuple[object, ...]:
    """Equal for two arrays that are the same view of the same memory."""
    address = array.__array_interface__["data"][0]
    return (address, array.shape, array.strides, array.dtype.str)
