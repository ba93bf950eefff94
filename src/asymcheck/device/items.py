"""The kinds of objects that a ``state`` may hold: how each is collected and put back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from asymcheck.device.inplace import Bind, bind_leaves, put_back, unlike
from asymcheck.device.leaves import Collector, Places
from asymcheck.device.matching import Matching
from asymcheck.device.naming import canonical_names, escape
from asymcheck.device.tensors import can_cast, check_supported, dtype_name, is_supported
from asymcheck.device.tree import Decoder, Encoder, Json
from asymcheck.errors import CaptureError, CheckpointError, StateError


@dataclass(frozen=True)
class Params:
    """The parameters of the modules in the state.

    Attributes:
        names: Name of each by ``id``; the first one for one with several names.
        by_name: Each under all of its names.
    """

    names: Mapping[int, str]
    by_name: Mapping[str, torch.Tensor]


Finish = Callable[[Decoder], None]
"""Sets Python values, once every leaf is read."""


@dataclass(frozen=True)
class Restoring:
    """What an item needs while a restore is planned.

    Attributes:
        places: Gets a place for each leaf.
        matching: Gets each difference.
        params: The live parameters.
        cast: Whether a leaf of another dtype is cast rather than a difference.
        taken: Live objects that got their content, by ``id``.
    """

    places: Places
    matching: Matching
    params: Params
    cast: bool
    taken: set[int] = field(default_factory=set)

    def bind(self, tree: Json, live: object, bind: Bind | None = None) -> Any:  # noqa: ANN401
        """Give every leaf of a tree a place and check that the tree can be decoded.

        Args:
            tree: As saved.
            live: The value that is there now, if any.
            bind: How a leaf gets its place; ``Places.bind`` if it is not said.

        Returns:
            The decoded value; its arrays are not filled yet.

        Raises:
            CorruptCheckpoint: The tree breaks its grammar.
            IncompatibleCheckpoint: It names a class or dtype that is not there.
        """
        bind_leaves(tree, live, bind or self.places.bind)
        return Decoder(self.places.array, filled=False).decode(tree)

    def tensor(self, key: str, live: torch.Tensor) -> None:
        """Send the leaf ``key`` to ``live``, or note how they differ."""
        check_supported(key, live)
        leaf = self.places.leaf(key)
        differ = self.matching.mismatched
        if leaf is None:
            self.matching.missing_keys.append(key)
            return
        same = dtype_name(live.dtype) == leaf.dtype
        if tuple(live.shape) != leaf.shape:
            differ.append((key, f"shape {list(live.shape)}", f"shape {list(leaf.shape)}"))
        elif not same and not (self.cast and can_cast(leaf.dtype, live.dtype)):
            differ.append((key, dtype_name(live.dtype), leaf.dtype))
        elif (other := self.places.into_tensor(key, live)) is not None:
            differ.append((key, f"one tensor with {other}", "two tensors"))
        elif not same:
            self.matching.cast.append(key)


class Item(Protocol):
    """One entry of the state."""

    kind: str

    def collect(
        self, name: str, collector: Collector, encoder: Encoder, params: Params
    ) -> dict[str, Json]:
        """Note the leaves; return what else is to be saved. Changes nothing."""
        ...

    def plan(self, name: str, saved: dict[str, Json], to: Restoring) -> Finish:
        """Give each leaf a place and note differences; changes nothing yet."""
        ...


class ModuleItem:
    """An ``nn.Module``: parameters and buffers land in live storage."""

    kind = "module"

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def _entries(self, name: str) -> list[tuple[str, str, Any]]:
        """Raw name, canonical name and value of each entry; tensors are the live ones."""
        try:
            entries = self.module.state_dict(keep_vars=True)
        except CheckpointError:
            raise
        except Exception as failure:
            raise CaptureError(f"state {name!r}: its state_dict() raised {failure!r}") from failure
        canonical = canonical_names(entries)
        return [(raw, canonical[raw], value) for raw, value in entries.items()]

    def collect(
        self, name: str, collector: Collector, encoder: Encoder, params: Params
    ) -> dict[str, Json]:
        """See ``Item``."""
        extra: dict[str, Json] = {}
        prefix = f"{escape(name)}/"
        for _, entry, value in self._entries(name):
            key = prefix + escape(entry)
            if isinstance(value, torch.Tensor):
                collector.add(key, value, steady=isinstance(value, torch.nn.Parameter))
            else:
                extra[entry] = encoder.encode(value, key)
        return {"extra": extra}

    def plan(self, name: str, saved: dict[str, Json], to: Restoring) -> Finish:
        """See ``Item``."""
        memory = self._memory()
        extra: dict[str, Json] = saved["extra"]
        # What the module computes for its state dict has no live memory: it is handed to
        # load_state_dict at the end, under the name that it has there.
        computed: dict[str, Json] = {}
        live_keys = set()
        prefix = f"{escape(name)}/"
        for raw, entry, value in self._entries(name):
            key = prefix + escape(entry)
            live_keys.add(key)
            if entry in extra:
                computed[raw] = extra[entry]
            elif isinstance(value, torch.Tensor) and _is_live(value, memory):
                to.tensor(key, value)
            elif to.places.leaf(key) is not None:
                computed[raw] = {"$leaf": key}
            else:
                to.matching.missing_keys.append(key)
        stored = {
            k
            for k in to.places.array_keys()
            if k.startswith(prefix) and "/" not in k[len(prefix) :]
        }
        stored |= {prefix + escape(entry) for entry in extra}
        to.matching.unexpected_keys += sorted(stored - live_keys)
        for tree in computed.values():
            to.bind(tree, None)

        def finish(decoder: Decoder) -> None:
            if computed:
                values = {raw: decoder.decode(tree) for raw, tree in computed.items()}
                self.module.load_state_dict(values, strict=False)

        return finish

    def _memory(self) -> set[int]:
        tensors = [*self.module.parameters(), *self.module.buffers()]
        return {t.untyped_storage().data_ptr() for t in tensors if is_supported(t)}


def _is_live(value: torch.Tensor, memory: set[int]) -> bool:
    """Whether an entry of a state dict is memory of the module rather than a copy of it."""
    if not is_supported(value) or value.numel() == 0:
        return True  # refused, or nothing to copy
    return value.untyped_storage().data_ptr() in memory


class OptimizerItem:
    """An ``Optimizer``, read and written through ``state`` and ``param_groups`` themselves.

    Its own ``state_dict`` numbers the parameters and its ``load_state_dict`` casts moments to
    the parameter's dtype; names and plain access do neither.
    """

    kind = "optimizer"

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def _names(self, params: Params) -> dict[int, str]:
        """Name of each parameter in a group: its module's, or its place."""
        return {
            id(p): params.names.get(id(p), f"group{g}.{i}")
            for g, group in enumerate(self.optimizer.param_groups)
            for i, p in enumerate(group["params"])
        }

    def collect(
        self, name: str, collector: Collector, encoder: Encoder, params: Params
    ) -> dict[str, Json]:
        """See ``Item``."""
        own = self._names(params)
        path = escape(name)
        groups = []
        for g, group in enumerate(self.optimizer.param_groups):
            options = {k: v for k, v in group.items() if k not in _NOT_OPTIONS}
            groups.append(
                {
                    "params": [own[id(p)] for p in group["params"]],
                    "shapes": [list(p.shape) for p in group["params"]],
                    "options": encoder.encode(options, f"{path}/groups/{g}"),
                }
            )
        state: dict[str, Json] = {}
        other: list[Json] = []
        # Only an update changes these, so they may be copied until the next one.
        steady = Encoder(partial(collector.add, steady=True))
        entries: Mapping[Any, Any] = self.optimizer.state
        for key, value in entries.items():
            if not isinstance(key, torch.Tensor):  # optimizers of other makers keep such
                spot = f"{path}/other/{len(other)}"
                other.append([encoder.encode(key, spot), encoder.encode(value, spot)])
                continue
            param = own.get(id(key)) or params.names.get(id(key))
            if param is None:
                raise StateError(
                    f"{name}/state",
                    f"holds state of a tensor of shape {list(key.shape)} that is in none of its "
                    f"groups and in no module of the state: add the module, or delete that state",
                )
            state[param] = steady.encode(value, f"{path}/state/{param}")
        return {"groups": groups, "state": state, "other": other}

    def plan(self, name: str, saved: dict[str, Json], to: Restoring) -> Finish:
        """See ``Item``."""
        own = self._names(to.params)
        live, state = self.optimizer.param_groups, self.optimizer.state
        tensors = {own[id(p)]: (p, group) for group in live for p in group["params"]}
        here = [[own[id(p)] for p in group["params"]] for group in live]
        rename = _renaming(saved, own, to.params)
        there = [[rename(p) for p in group["params"]] for group in saved["groups"]]
        shapes = {
            p: shape
            for names, group in zip(there, saved["groups"], strict=True)
            for p, shape in zip(names, group["shapes"], strict=True)
        }
        fitting = _match(name, here, there, tensors, shapes, to.matching)

        states: list[tuple[torch.Tensor, Json]] = []
        for raw, tree in saved["state"].items():
            param = rename(raw)
            if param in fitting:
                tensor, group = tensors[param]
            elif param in shapes:
                continue  # reported with its group
            elif param in to.params.by_name and param not in tensors:
                tensor, group = to.params.by_name[param], {}  # in no group, as at the save
            else:
                to.matching.unexpected_keys.append(f"{name}/state/{param}")
                continue
            to.bind(tree, state.get(tensor), _near(tensor, group, to.places))
            states.append((tensor, tree))
        options = [
            (group, tree["options"])
            for group, tree, mine, theirs in zip(live, saved["groups"], here, there, strict=False)
            if mine == theirs or set(mine) & set(theirs)
        ]
        for group, tree in options:
            to.bind(tree, group)
        to.bind(saved["other"], None)
        stepped = {id(tensor) for tensor, _ in states}
        fresh = [tensors[p][0] for p in fitting if id(tensors[p][0]) not in stepped]

        def finish(decoder: Decoder) -> None:
            for tensor in fresh:
                state.pop(tensor, None)
            for tensor, tree in states:
                state[tensor] = put_back(state.get(tensor), decoder.decode(tree), to.taken)
            other: Any = state
            for key, value in saved["other"]:
                other[decoder.decode(key)] = decoder.decode(value)
            for group, tree in options:
                found = decoder.decode(tree)
                kept = {k: group[k] for k in _HOW_NOT_WHAT if k in group}
                group.update(found | kept)

        return finish


_NOT_OPTIONS = ("params", "param_names")
# Which kernel does the update is a choice of the running script and machine.
_HOW_NOT_WHAT = ("foreach", "fused", "capturable", "differentiable")


def _renaming(
    saved: Mapping[str, Json], own: Mapping[int, str], params: Params
) -> Callable[[str], str]:
    """From a parameter's name at the save to the one that it has now: a tied one may have
    been saved under another of its names.
    """
    taken = {p for group in saved["groups"] for p in group["params"]} | saved["state"].keys()

    def rename(name: str) -> str:
        tensor = params.by_name.get(name)
        now = None if tensor is None else own.get(id(tensor)) or params.names.get(id(tensor))
        return name if now is None or now in taken else now

    return rename


def _match(
    name: str,
    here: list[list[str]],
    there: list[list[str]],
    tensors: Mapping[str, tuple[torch.Tensor, Mapping[str, Any]]],
    shapes: Mapping[str, list[int]],
    matching: Matching,
) -> set[str]:
    """Note how the groups differ; returns the parameters whose state can be loaded."""
    missing = [p for p in tensors if p not in shapes]
    unexpected = [p for p in shapes if p not in tensors]
    common = [p for p in tensors if p in shapes]
    fitting = {p for p in common if list(tensors[p][0].shape) == shapes[p]}
    matching.missing_keys += [f"{name}/{p}" for p in missing]
    matching.unexpected_keys += [f"{name}/{p}" for p in unexpected]
    matching.mismatched += [
        (f"{name}/{p}", f"shape {list(tensors[p][0].shape)}", f"shape {shapes[p]}")
        for p in common
        if p not in fitting
    ]
    group_here = {p: g for g, names in enumerate(here) for p in names}
    group_there = {p: g for g, names in enumerate(there) for p in names}
    moved = any(group_here[p] != group_there[p] for p in common)
    if moved or (len(here) != len(there) and not missing and not unexpected):
        matching.mismatched.append((f"{name}/groups", _sizes(here), _sizes(there)))
    return fitting


def _sizes(groups: list[list[str]]) -> str:
    return f"{len(groups)} groups of {[len(g) for g in groups]} parameters"


def _near(param: torch.Tensor, group: Mapping[str, Any], places: Places) -> Bind:
    """Bind a new state tensor where a fresh optimizer would put it: beside its parameter,
    but a step counter stays on the CPU unless the update kernel needs it on the device.
    """

    def bind(key: str, device: str, live: object) -> None:
        leaf = places.leaf(key)
        counter = leaf is not None and leaf.shape == () and key.endswith("/step")
        if isinstance(live, torch.Tensor):
            device = str(live.device)
        elif not counter or group.get("capturable") or group.get("fused"):
            device = str(param.device)
        else:
            device = "cpu"
        places.bind(key, device, live)

    return bind


class StatefulItem:
    """Anything with ``state_dict`` and ``load_state_dict``: schedulers, scalers, loaders."""

    kind = "stateful"

    def __init__(self, value: Any) -> None:  # noqa: ANN401
        self.value = value

    def collect(
        self, name: str, collector: Collector, encoder: Encoder, params: Params
    ) -> dict[str, Json]:
        """See ``Item``."""
        try:
            state = self.value.state_dict()
        except CheckpointError:
            raise
        except Exception as failure:
            raise CaptureError(f"state {name!r}: its state_dict() raised {failure!r}") from failure
        return {"value": encoder.encode(state, escape(name))}

    def plan(self, name: str, saved: dict[str, Json], to: Restoring) -> Finish:
        """See ``Item``."""
        to.bind(saved["value"], None)
        return lambda decoder: self.value.load_state_dict(decoder.decode(saved["value"]))


class TensorItem:
    """A tensor, restored in place."""

    kind = "tensor"

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def collect(
        self, name: str, collector: Collector, encoder: Encoder, params: Params
    ) -> dict[str, Json]:
        """See ``Item``."""
        return {"key": collector.add(escape(name), self.tensor)}

    def plan(self, name: str, saved: dict[str, Json], to: Restoring) -> Finish:
        """See ``Item``."""
        key = saved["key"]
        if not isinstance(key, str):
            raise TypeError("the key of a tensor is no text")
        to.tensor(key, self.tensor)
        return lambda decoder: None


class ValueItem:
    """A mutable Python value, restored in place: its content is what it was at the save."""

    kind = "value"

    def __init__(self, value: Any) -> None:  # noqa: ANN401
        self.value = value

    def collect(
        self, name: str, collector: Collector, encoder: Encoder, params: Params
    ) -> dict[str, Json]:
        """See ``Item``."""
        value = encoder.encode(self.value, escape(name))
        return {"value": value, "type": type(self.value).__name__}

    def plan(self, name: str, saved: dict[str, Json], to: Restoring) -> Finish:
        """See ``Item``."""
        kind = type(self.value).__name__
        difference = (kind, str(saved["type"])) if saved["type"] != kind else None
        difference = difference or unlike(self.value, saved["value"], to.places.leaf)
        if difference:
            to.matching.mismatched.append((name, *difference))
            return lambda decoder: None
        to.bind(saved["value"], self.value)

        def finish(decoder: Decoder) -> None:
            put_back(self.value, decoder.decode(saved["value"]), to.taken)

        return finish
