"""Decoded values into live ones: arrays that are there are reused, objects keep their identity."""

from __future__ import annotations

import collections
import dataclasses
import random
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

from asymcheck.device.classes import is_open
from asymcheck.device.tensors import NUMPY_PREFIX
from asymcheck.device.tree import Decoder, Json
from asymcheck.errors import CheckpointError

Bind = Callable[[str, str, object], None]

_PAIRS = ("$dict", "$ordereddict", "$counter", "$defaultdict")
_FIELDS = ("$namedtuple", "$dataclass")


def bind_leaves(tree: Json, live: object, bind: Bind) -> None:
    """Visit every leaf that ``tree`` names, before any of them is read.

    Args:
        tree: What ``Encoder.encode`` made.
        live: The value that is there now, if any.
        bind: Called with the leaf's key, its recorded device, and the live value in its
            place (``None`` where there is none).
    """
    if isinstance(tree, list):
        old = live if isinstance(live, list | tuple | collections.deque) else ()
        for i, item in enumerate(tree):
            bind_leaves(item, old[i] if i < len(old) else None, bind)
    elif isinstance(tree, dict):
        if "$leaf" in tree:
            bind(str(tree["$leaf"]), str(tree.get("device", "cpu")), live)
            return
        for key, item in tree.items():
            if not key.startswith("$"):
                bind_leaves(item, live.get(key) if isinstance(live, dict) else None, bind)
            elif key in _PAIRS:
                _bind_pairs(item[1] if key == "$defaultdict" else item, live, bind)
            elif key in _FIELDS:
                for field, value in item[1].items():
                    bind_leaves(value, _field(live, field), bind)
            elif key == "$deque":
                bind_leaves(item[1], live, bind)
            else:
                bind_leaves(item, live if key == "$tuple" else None, bind)


def _bind_pairs(pairs: Json, live: object, bind: Bind) -> None:
    for key, item in pairs:
        old = None
        if isinstance(live, dict):
            try:
                old = live.get(_NO_LEAVES.decode(key))
            except (CheckpointError, TypeError):
                old = None  # an odd key: what it holds gets new memory
        bind_leaves(key, None, bind)
        bind_leaves(item, old, bind)


def _no_leaf(key: str) -> torch.Tensor:
    raise TypeError(key)


_NO_LEAVES = Decoder(_no_leaf)


def _field(live: object, name: str) -> object:
    if dataclasses.is_dataclass(live) or isinstance(live, tuple):
        return getattr(live, name, None) if name in _names_of(live) else None
    return None


def _names_of(live: Any) -> set[str]:  # noqa: ANN401
    if isinstance(live, tuple):
        return set(getattr(live, "_fields", ()))
    return {f.name for f in dataclasses.fields(live)}


def put_back(live: Any, value: Any, taken: set[int]) -> Any:  # noqa: ANN401
    """Give a live value the content of a decoded one, in place where its type allows it.

    Args:
        live: What is there.
        value: What is to be there.
        taken: Live objects by ``id`` that already got their content: one that is met again
            was two objects at the save. Extended.

    Returns:
        The live object, or ``value`` where there is nothing to change in place.
    """
    if type(live) is not type(value) or id(live) in taken:
        return value
    taken.add(id(live))
    if live is value:
        return live
    if isinstance(live, dict):
        merged = {k: put_back(live.get(k), v, taken) for k, v in value.items()}
        live.clear()
        live.update(merged)
        if isinstance(live, collections.defaultdict):
            live.default_factory = value.default_factory
    elif isinstance(live, list):
        old = live + [None] * (len(value) - len(live))
        live[:] = [put_back(old[i], v, taken) for i, v in enumerate(value)]
    elif isinstance(live, set):
        live.clear()
        live.update(value)
    elif isinstance(live, collections.deque) and live.maxlen == value.maxlen:
        old = [*live, *[None] * (len(value) - len(live))]
        items = [put_back(old[i], v, taken) for i, v in enumerate(value)]
        live.clear()
        live.extend(items)
    elif isinstance(live, bytearray):
        live[:] = value
    elif isinstance(live, np.ndarray):
        if live.dtype != value.dtype or live.shape != value.shape or not live.flags.writeable:
            return value
        live[...] = value
    elif is_open(type(live)):
        for f in dataclasses.fields(live):
            before = getattr(live, f.name, None)
            object.__setattr__(live, f.name, put_back(before, getattr(value, f.name), taken))
    else:
        return _put_back_generator(live, value)
    return live


def _put_back_generator(live: Any, value: Any) -> Any:  # noqa: ANN401
    if isinstance(live, torch.Generator) and live.device == value.device:
        live.set_state(value.get_state())
    elif isinstance(live, random.Random):
        live.setstate(value.getstate())
    elif isinstance(live, np.random.RandomState):
        live.set_state(value.get_state(legacy=False))
    elif isinstance(live, np.random.Generator):
        old, new = live.bit_generator, value.bit_generator
        if type(old) is not type(new):
            return value
        old.state = new.state
        _catch_up(old.seed_seq, new.seed_seq)
    else:
        return value
    return live


def _catch_up(live: object, saved: object) -> None:
    """Spawn as many children as had been spawned, so that the next ones are new ones."""
    if isinstance(live, _Seed) and isinstance(saved, _Seed):
        missing = saved.n_children_spawned - live.n_children_spawned
        if missing > 0 and (live.generate_state(8) == saved.generate_state(8)).all():
            live.spawn(missing)


_Seed = np.random.SeedSequence


class Shaped(Protocol):
    """What is known of a stored array."""

    @property
    def dtype(self) -> str:
        """As ``Leaf.dtype``."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole."""
        ...


def unlike(
    live: object, tree: Json, leaf: Callable[[str], Shaped | None]
) -> tuple[str, str] | None:
    """How a live value differs in what cannot be changed in place.

    Args:
        live: A container, generator or dataclass.
        tree: The encoded value of the same type.
        leaf: The leaf of a key.

    Returns:
        What the live value has and what the checkpoint has, ``None`` where it is the same.
    """
    here: object
    there: object
    if isinstance(live, np.ndarray):
        found = leaf(tree["$leaf"])
        here = f"{NUMPY_PREFIX}{live.dtype.str} {list(live.shape)}"
        there = found and f"{found.dtype} {list(found.shape)}"
    elif isinstance(live, collections.deque):
        here, there = f"maxlen {live.maxlen}", f"maxlen {tree['$deque'][0]}"
    elif isinstance(live, np.random.Generator):
        here = type(live.bit_generator).__name__
        there = tree["$numpy_generator"]["state"]["bit_generator"]
    elif isinstance(live, torch.Generator):
        here, there = str(live.device), tree["$torch_generator"][0]
    elif dataclasses.is_dataclass(live):
        here = f"{type(live).__module__}:{type(live).__qualname__}"
        there = tree["$dataclass"][0]
    else:
        return None
    return None if here == there else (str(here), str(there))
