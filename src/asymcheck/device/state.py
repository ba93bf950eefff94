"""What the user's ``state`` consists of, taken as a whole.

Collecting reads, and only reads: no optimizer is stepped, no state dict is loaded. Putting
back happens in two phases: first every stored leaf gets a place (live memory where there is
some) and all differences are gathered; only when all bytes are read and checked are Python
values set.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import json
import pathlib
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import DataLoader

from asymcheck.device import rng
from asymcheck.device.classes import is_open
from asymcheck.device.items import (
    Finish,
    Item,
    ModuleItem,
    Params,
    Restoring,
    StatefulItem,
    TensorItem,
    ValueItem,
    members,
)
from asymcheck.device.leaves import Collector, Spec
from asymcheck.device.matching import Matching
from asymcheck.device.naming import canonical_names, escape
from asymcheck.device.optimizer import OptimizerItem
from asymcheck.device.places import Places, check_size
from asymcheck.device.replicas import Sharing, geometry_of, samples_of
from asymcheck.device.sharding import Copies, replication_of
from asymcheck.device.tree import Decoder, Encoder, Json
from asymcheck.device.worlds import Saved, World, WorldChange, stateful_plan
from asymcheck.errors import CorruptCheckpoint, StateError
from asymcheck.garbage import put_off
from asymcheck.storage.index import TREE_KEY, Index

_RNG = "$rng"

_CONTAINERS = (
    dict,
    list,
    set,
    bytearray,
    collections.deque,
    np.ndarray,
    torch.Generator,
    random.Random,
    np.random.RandomState,
    np.random.Generator,
)

_VALUES = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    tuple,
    frozenset,
    np.generic,
    enum.Enum,
    pathlib.PurePath,
)


@dataclass(frozen=True)
class RestorePlan:
    """A restore that fits.

    Attributes:
        places: Where each leaf goes.
        matching: The differences that were tolerated.
        finish: Sets Python values, once every leaf is read; returns what of the random
            number generators could not be set.
        world_change: What became of the rank's own state because another number of ranks had
            saved it, in words; empty where as many had.
    """

    places: Places
    matching: Matching
    finish: Callable[[], list[str]]
    world_change: str = ""


class State:
    """The live objects that a checkpoint holds.

    Of a DTensor it holds this rank's piece, of what is equal on all ranks this rank's share:
    the tensors of a ``DistributedDataParallel`` module and of an optimizer over its parameters,
    and of all items that are declared to be so. Everything else is the rank's own.

    Args:
        items: Name to object.
        rank: This rank.
        world: How many ranks save together.
        replicated: Names of items whose tensors are equal on all ranks.

    Raises:
        StateError: One of them cannot be saved; names it.
    """

    def __init__(
        self,
        items: Mapping[str, object],
        *,
        rank: int = 0,
        world: int = 1,
        replicated: Iterable[str] = (),
    ) -> None:
        if not items:
            raise StateError("", "expected at least one object to save, found none")
        self._world = World(rank, world)
        self._items = {name: _classify(name, value, self._world) for name, value in items.items()}
        self._replicated = frozenset(replicated)
        for name in sorted(self._replicated - self._items.keys()):
            raise StateError(name, f"said to be replicated, and no item: {sorted(self._items)}")
        self._sharing = Sharing()
        self._specs: list[Spec] = []
        self._geometry: tuple[list[Spec], dict[str, Any]] = ([], {})
        seen: dict[int, str] = {}
        for name, value in items.items():
            first = seen.setdefault(id(value), name)
            if first != name and isinstance(self._items[name], ValueItem):
                raise StateError(name, f"it is the same object as {first!r}: name it once")

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers among the items."""
        return [i.optimizer for i in self._items.values() if isinstance(i, OptimizerItem)]

    @property
    def modules(self) -> list[torch.nn.Module]:
        """The modules among the items."""
        return [i.module for i in self._items.values() if isinstance(i, ModuleItem)]

    def collect(self) -> Collector:
        """Every leaf as it is now, the tree last; nothing is copied but Python values. Of what
        several ranks have in common only the share of this one.

        Raises:
            StateError: Something cannot be saved; names its path.
            CaptureError: A ``state_dict()`` raised.
        """
        collector, items, generators = self._collect()
        self._specs = [s.spec for s in collector.sources]
        with put_off():
            collector.keep(self._sharing.part(collector.sources))
        members_of = ",".join(f"{json.dumps(name)}:{text}" for name, text in items.items())
        collector.add_tree(f'{{"items":{{{members_of}}},{generators}}}'.encode())
        return collector

    @put_off()
    def _collect(self) -> tuple[Collector, dict[str, str], str]:
        """All leaves, the JSON of each item, and that of the generators as a member."""
        collector = Collector()
        encoder = Encoder(collector.add)
        params = self._params()
        items = {}
        for name, item in self._items.items():
            collector.copies = self._declared(name)
            text = item.collect(name, collector, encoder, params)
            items[name] = f'{{"kind":"{item.kind}",{text}}}'
        collector.copies = None
        return collector, items, members(rng=encoder.encode(rng.get_states(), _RNG))

    def _declared(self, name: str) -> Copies | None:
        """The copies of an item that is declared to be equal on all ranks."""
        return self._world.copies if name in self._replicated else None

    def shared_geometry(self) -> Mapping[str, Any]:
        """What all ranks must say alike of what they have in common: the dtype and the shape of
        each whole, by key; as of the latest ``collect``, or of now if there was none. The same
        object as before where nothing changed. Raises like ``collect``.
        """
        if not self._specs:
            self._specs = [s.spec for s in self._collect()[0].sources]
        if self._geometry[0] != self._specs:
            with put_off():
                self._geometry = self._specs, geometry_of(self._specs)
        return self._geometry[1]

    def replica_samples(self) -> Mapping[str, str]:
        """Hashes of what is said to be equal on all ranks: of a few elements of each tensor, by
        key, and of all else in each declared item, by its name. Blocks; raises like ``collect``.

        Buffers that a wrapper sends from rank 0 are not among them: they differ until the next
        forward pass.
        """
        collector, items, _ = self._collect()
        found = samples_of(collector.sources)
        if self._world.size > 1:
            for name in sorted(self._replicated):
                found[name] = xxhash.xxh3_64_hexdigest(items[name].encode())
        return found

    @put_off()
    def plan(
        self,
        index: Index,
        text: bytes,
        *,
        strict: bool,
        cast: bool,
        indexes: Sequence[Index] = (),
        text_of: Callable[[Index], bytes] | None = None,
        on_world_change: WorldChange = "resplit",
    ) -> RestorePlan:
        """Give every leaf of a checkpoint its place; changes nothing yet.

        Args:
            index: What the rank whose own state is taken has saved.
            text: Its tree leaf.
            strict: Whether any difference is an error.
            cast: Whether a tensor of another dtype is cast rather than a difference.
            indexes: What all ranks have saved, ``index`` alone where none are given.
            text_of: Reads the tree of another rank, for items that want all of them.
            on_world_change: What becomes of generators and stateful items when another number
                of ranks had saved; see ``device/worlds.py``.

        Raises:
            IncompatibleCheckpoint: It does not match the live state, or another world had saved
                it and that is not wanted.
            CorruptCheckpoint: The tree breaks its grammar, or pieces do not make a whole.
        """
        indexes = tuple(indexes) or (index,)
        places = Places(index, indexes)
        to = Restoring(places, Matching(), self._params(), cast)
        saved = Saved(index, indexes, text_of, self._world, on_world_change)
        try:
            tree = json.loads(text)
            if not isinstance(tree["items"], dict):
                raise TypeError("its items are no object")
            finishes = self._plan_items(tree["items"], to, saved)
            if not isinstance(to.bind(tree["rng"], None), dict):
                raise TypeError("its random number generators are no dict")
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as bad:
            raise CorruptCheckpoint("(state)", f"not a state tree: {bad!r:.200}") from bad
        if strict:
            to.matching.raise_if_any(f"step {index.at.step} (attempt {index.at.attempt})")

        def finish() -> list[str]:
            decoder = Decoder(places.array)
            for put in finishes:
                put(decoder)
            return saved.set_generators(decoder.decode(tree["rng"]))

        return RestorePlan(places, to.matching, finish, saved.spoken())

    def _plan_items(self, saved: dict[str, Json], to: Restoring, world: Saved) -> list[Finish]:
        finishes = []
        to.matching.missing_keys += [name for name in self._items if name not in saved]
        to.matching.unexpected_keys += [name for name in saved if name not in self._items]
        for name, item in self._items.items():
            if name in saved:
                kind = saved[name]["kind"]
                if kind == item.kind:
                    shared = name in self._replicated
                    finishes.append(
                        stateful_plan(name, item, saved[name], to, world)
                        if isinstance(item, StatefulItem) and not shared
                        else item.plan(name, saved[name], to)
                    )
                else:
                    to.matching.mismatched.append((name, item.kind, str(kind)))
        return finishes

    def _params(self) -> Params:
        names: dict[int, str] = {}
        by_name: dict[str, torch.Tensor] = {}
        copies: dict[int, Copies] = {}
        for name, item in self._items.items():
            if isinstance(item, ModuleItem):
                params = dict(item.module.named_parameters(remove_duplicate=False))
                canonical = canonical_names(params)
                prefix = f"{escape(name)}/"
                for raw, param in params.items():
                    full = prefix + escape(canonical[raw])
                    names.setdefault(id(param), full)
                    by_name[full] = param
                everywhere = self._declared(name)
                if everywhere or item.replication.wrapped:
                    for raw, param in params.items():
                        mine = everywhere or item.replication.of(raw, buffer=False)
                        if mine is not None:
                            copies[id(param)] = mine
        return Params(names, by_name, copies)


def tree_leaf_bytes(index: Index) -> int:
    """Size of the tree leaf.

    Raises:
        CorruptCheckpoint: There is none.
    """
    for leaf in index.leaves:
        if leaf.key == TREE_KEY:
            check_size(leaf, 1)
            return leaf.nbytes
    raise CorruptCheckpoint("(state)", "the index lists no state tree")


def _classify(name: object, value: Any, world: World) -> Item:  # noqa: ANN401
    if not isinstance(name, str) or not name or name.startswith("$"):
        raise StateError(str(name), "expected a name that is a text, not empty, not '$…'")
    if isinstance(value, ModuleItem | OptimizerItem):
        return value  # of an integration
    if isinstance(value, torch.nn.Module):
        return ModuleItem(value, replication_of(value, world.rank, world.size))
    if isinstance(value, torch.optim.Optimizer):
        return OptimizerItem(value)
    if isinstance(value, torch.Tensor):
        return TensorItem(value)
    if callable(getattr(value, "state_dict", None)) and not isinstance(value, type):
        if callable(getattr(value, "load_state_dict", None)):
            return StatefulItem(value)
        raise StateError(
            name, f"a {type(value).__name__} has state_dict() but no load_state_dict()"
        )
    if isinstance(value, np.ndarray) and not value.flags.writeable:
        raise StateError(name, "a read-only array cannot be restored in place: copy it")
    if isinstance(value, _CONTAINERS) or is_open(type(value)):
        return ValueItem(value)
    if isinstance(value, DataLoader):
        raise StateError(
            name,
            "a plain DataLoader has no position to save: use torchdata's StatefulDataLoader, or "
            "any loader with state_dict() and load_state_dict()",
        )
    if value is None or isinstance(value, _VALUES) or dataclasses.is_dataclass(type(value)):
        raise StateError(
            name,
            f"a {type(value).__name__} cannot be restored in place: wrap it in a dict, for "
            f"instance state={{{name!r}: {{'value': …}}}}",
        )
    raise StateError(
        name,
        f"a {type(value).__module__}.{type(value).__qualname__} cannot be saved: expected a "
        f"module, an optimizer, a tensor, a dict or list, or an object with state_dict() and "
        f"load_state_dict()",
    )
