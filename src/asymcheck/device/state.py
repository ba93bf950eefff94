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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
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
from asymcheck.device.leaves import Collector, Places, check_size
from asymcheck.device.matching import Matching
from asymcheck.device.naming import canonical_names, escape
from asymcheck.device.optimizer import OptimizerItem
from asymcheck.device.tree import Decoder, Encoder, Json
from asymcheck.errors import CorruptCheckpoint, StateError
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
    """

    places: Places
    matching: Matching
    finish: Callable[[], list[str]]


class State:
    """The live objects that a checkpoint holds.

    Args:
        items: Name to object.

    Raises:
        StateError: One of them cannot be saved; names it.
    """

    def __init__(self, items: Mapping[str, object]) -> None:
        if not items:
            raise StateError("", "expected at least one object to save, found none")
        self._items = {name: _classify(name, value) for name, value in items.items()}
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
        """Every leaf as it is now, the tree last; nothing is copied but Python values.

        Raises:
            StateError: Something cannot be saved; names its path.
            CaptureError: A ``state_dict()`` raised.
        """
        collector = Collector()
        encoder = Encoder(collector.add)
        params = self._params()
        items = [
            f'{json.dumps(name)}:{{"kind":"{item.kind}",'
            f"{item.collect(name, collector, encoder, params)}}}"
            for name, item in self._items.items()
        ]
        generators = members(rng=encoder.encode(rng.get_states(), _RNG))
        collector.add_tree(f'{{"items":{{{",".join(items)}}},{generators}}}'.encode())
        return collector

    def plan(self, index: Index, text: bytes, *, strict: bool, cast: bool) -> RestorePlan:
        """Give every leaf of a checkpoint its place; changes nothing yet.

        Args:
            index: What the checkpoint holds.
            text: Its tree leaf.
            strict: Whether any difference is an error.
            cast: Whether a tensor of another dtype is cast rather than a difference.

        Raises:
            IncompatibleCheckpoint: It does not match the live state.
            CorruptCheckpoint: The tree breaks its grammar.
        """
        places = Places({leaf.key: leaf for leaf in index.leaves}, dict(index.aliases))
        to = Restoring(places, Matching(), self._params(), cast)
        try:
            tree = json.loads(text)
            if not isinstance(tree["items"], dict):
                raise TypeError("its items are no object")
            finishes = self._plan_items(tree["items"], to)
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
            return rng.set_states(decoder.decode(tree["rng"]))

        return RestorePlan(places, to.matching, finish)

    def _plan_items(self, saved: dict[str, Json], to: Restoring) -> list[Finish]:
        finishes = []
        to.matching.missing_keys += [name for name in self._items if name not in saved]
        to.matching.unexpected_keys += [name for name in saved if name not in self._items]
        for name, item in self._items.items():
            if name in saved:
                kind = saved[name]["kind"]
                if kind == item.kind:
                    finishes.append(item.plan(name, saved[name], to))
                else:
                    to.matching.mismatched.append((name, item.kind, str(kind)))
        return finishes

    def _params(self) -> Params:
        names: dict[int, str] = {}
        by_name: dict[str, torch.Tensor] = {}
        for name, item in self._items.items():
            if isinstance(item, ModuleItem):
                params = dict(item.module.named_parameters(remove_duplicate=False))
                canonical = canonical_names(params)
                prefix = f"{escape(name)}/"
                for raw, param in params.items():
                    full = prefix + escape(canonical[raw])
                    names.setdefault(id(param), full)
                    by_name[full] = param
        return Params(names, by_name)


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


def _classify(name: object, value: Any) -> Item:  # noqa: ANN401
    if not isinstance(name, str) or not name or name.startswith("$"):
        raise StateError(str(name), "expected a name that is a text, not empty, not '$…'")
    if isinstance(value, torch.nn.Module):
        return ModuleItem(value)
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
