"""An optimizer as part of a state: its own way of being collected and put back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from asymcheck.device.inplace import Bind, put_back
from asymcheck.device.items import Finish, Params, Restoring, members
from asymcheck.device.leaves import Collector, Known
from asymcheck.device.matching import Matching
from asymcheck.device.naming import escape
from asymcheck.device.places import Places
from asymcheck.device.sharding import is_dtensor, like
from asymcheck.device.tensors import dtype_of
from asymcheck.device.tree import Decoder, Encoder, Json
from asymcheck.errors import StateError


class _Latest(NamedTuple):
    """What an optimizer was like at the latest save.

    Attributes:
        members: Of its state: parameter, type and names of the entries.
        known: Its tensors; ``None`` where there was anything else.
        state: Its state as JSON members.
        groups: Names and shapes of each group's parameters.
        heads: The same as JSON members.
    """

    members: list[tuple[str | None, type, tuple[Any, ...]]]
    known: Known | None
    state: str
    groups: list[tuple[list[str], list[torch.Size]]]
    heads: list[str]


class OptimizerItem:
    """An ``Optimizer``, read and written through ``state`` and ``param_groups`` themselves.

    Its own ``state_dict`` numbers the parameters and its ``load_state_dict`` casts moments to
    the parameter's dtype; names and plain access do neither.
    """

    kind = "optimizer"

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._latest = _Latest([], None, "", [], [])

    def _names(self, params: Params) -> dict[int, str]:
        """Name of each parameter in a group: its module's, or its place."""
        return {
            id(p): params.names.get(id(p), f"group{g}.{i}")
            for g, group in enumerate(self.optimizer.param_groups)
            for i, p in enumerate(group["params"])
        }

    def collect(self, name: str, collector: Collector, encoder: Encoder, params: Params) -> str:
        """See ``Item``."""
        own = self._names(params)
        latest, path = self._latest, escape(name)
        groups = [
            ([own[id(p)] for p in group["params"]], [p.shape for p in group["params"]])
            for group in self.optimizer.param_groups
        ]
        heads = latest.heads
        if groups != latest.groups:
            heads = [members(params=names, shapes=shapes) for names, shapes in groups]
        rows = []
        for g, (head, group) in enumerate(zip(heads, self.optimizer.param_groups, strict=True)):
            options = {k: v for k, v in group.items() if k not in _NOT_OPTIONS}
            encoded = members(options=encoder.encode(options, f"{path}/groups/{g}"))
            rows.append(f"{{{head},{encoded}}}")
        entries: Mapping[Any, Any] = self.optimizer.state
        found = [
            (
                own.get(id(p)) or params.names.get(id(p)),
                type(s),
                tuple(s) if type(s) is dict else (),
            )
            for p, s in entries.items()
        ]
        known, state = None, latest.state
        if found == latest.members:
            known = latest.known
            tensors = [] if known is None else [t for s in entries.values() for t in s.values()]
            if not collector.add_known(known, tensors):
                known = None
        if known is None:
            first = len(collector.sources)
            encoded_state, other = self._encode_state(name, own, collector, encoder, params)
            state = members(state=encoded_state, other=other)
            if not other:
                known = _learn(collector, first, encoded_state, entries)
        self._latest = _Latest(found, known, state, groups, heads)
        return f'"groups":[{",".join(rows)}],{state}'

    def _encode_state(
        self,
        name: str,
        own: Mapping[int, str],
        collector: Collector,
        encoder: Encoder,
        params: Params,
    ) -> tuple[dict[str, Json], list[Json]]:
        path = escape(name)
        state: dict[str, Json] = {}
        other: list[Json] = []
        # Only an update changes these, so they may be copied until the next one.
        steady = Encoder(collector.state_leaf)
        everywhere, has_parts = collector.copies, _keeps_parts(self.optimizer)
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
            if not has_parts:
                collector.copies = everywhere or params.copies.get(id(key))
            state[param] = steady.encode(value, f"{path}/state/{param}")
            collector.copies = everywhere
        return state, other

    def plan(self, name: str, saved: dict[str, Json], to: Restoring) -> Finish:
        """See ``Item``."""
        own = self._names(to.params)
        live, state = self.optimizer.param_groups, self.optimizer.state
        tensors = {own[id(p)]: (p, group) for group in live for p in group["params"]}
        here = [[(own[id(p)], tuple(p.shape)) for p in group["params"]] for group in live]
        rename, shapes, fitting, options = match_groups(name, saved, here, own, live, to)

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
            put_options(options, decoder)

        return finish


def _keeps_parts(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it has the state of some parameters only, and other ranks that of the others."""
    return any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__)


def _learn(
    collector: Collector, first: int, encoded: Mapping[str, Json], entries: Mapping[Any, Any]
) -> Known | None:
    """What the next save may use, where every entry is a tensor and nothing but its leaf."""
    leaves: list[Json] = []
    tensors: list[Any] = []
    for row, entry in zip(encoded.values(), entries.values(), strict=True):
        if type(entry) is not dict or type(row) is not dict or row.keys() != entry.keys():
            return None
        leaves += row.values()
        tensors += entry.values()
    if not all(type(leaf) is dict and list(leaf) == ["$leaf"] for leaf in leaves):
        return None
    return collector.learn(first, [leaf["$leaf"] for leaf in leaves], tensors)


_NOT_OPTIONS = ("params", "param_names")
# Which kernel does the update is a choice of the running script and machine.
_HOW_NOT_WHAT = ("foreach", "fused", "capturable", "differentiable")


class Match(NamedTuple):
    """What of a saved optimizer fits a live one.

    Attributes:
        rename: From a parameter's name at the save to the one that it has now.
        shapes: Of the saved parameters, by the name that they have now.
        fitting: The parameters whose state can be loaded.
        options: Live groups, each with what was saved of its options.
    """

    rename: Callable[[str], str]
    shapes: Mapping[str, list[int]]
    fitting: set[str]
    options: list[tuple[dict[str, Any], Json]]


def match_groups(
    name: str,
    saved: Mapping[str, Json],
    here: list[list[tuple[str, tuple[int, ...]]]],
    own: Mapping[int, str],
    live: list[dict[str, Any]],
    to: Restoring,
) -> Match:
    """Note how saved and live groups differ, and give their options places.

    Args:
        name: Of the item.
        saved: The item.
        here: Name and shape of the parameters of each live group.
        own: Name of each parameter by ``id``.
        live: The live groups.
        to: Gets the differences.
    """
    rename = _renaming(saved, own, to.params)
    mine = [[p for p, _ in group] for group in here]
    there = [[rename(p) for p in group["params"]] for group in saved["groups"]]
    shapes = {
        p: shape
        for names, group in zip(there, saved["groups"], strict=True)
        for p, shape in zip(names, group["shapes"], strict=True)
    }
    wholes = {p: list(shape) for group in here for p, shape in group}
    fitting = _match(name, mine, there, wholes, shapes, to.matching)
    options = [
        (group, tree["options"])
        for group, tree, ours, theirs in zip(live, saved["groups"], mine, there, strict=False)
        if ours == theirs or set(ours) & set(theirs)
    ]
    for group, tree in options:
        to.bind(tree, group)
    return Match(rename, shapes, fitting, options)


def put_options(options: list[tuple[dict[str, Any], Json]], decoder: Decoder) -> None:
    """Give live groups the options that were saved."""
    for group, tree in options:
        kept = {k: group[k] for k in _HOW_NOT_WHAT if k in group}
        group.update(decoder.decode(tree) | kept)


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
    wholes: Mapping[str, list[int]],
    shapes: Mapping[str, list[int]],
    matching: Matching,
) -> set[str]:
    """Note how the groups differ; returns the parameters whose state can be loaded."""
    missing = [p for p in wholes if p not in shapes]
    unexpected = [p for p in shapes if p not in wholes]
    common = [p for p in wholes if p in shapes]
    fitting = {p for p in common if wholes[p] == shapes[p]}
    matching.missing_keys += [f"{name}/{p}" for p in missing]
    matching.unexpected_keys += [f"{name}/{p}" for p in unexpected]
    matching.mismatched += [
        (f"{name}/{p}", f"shape {wholes[p]}", f"shape {shapes[p]}")
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
    """Bind a new state tensor where a fresh optimizer would put it: beside its parameter and
    sharded as that is, but a step counter stays on the CPU unless the update kernel needs it on
    the device.
    """

    def bind(key: str, device: str, live: object) -> None:
        leaf = places.leaf(key)
        counter = leaf is not None and leaf.shape == () and key.endswith("/step")
        if live is None and leaf is not None and not counter and is_dtensor(param):
            dtype = dtype_of(leaf.dtype)
            if dtype is not None and leaf.shape == tuple(param.shape):
                live = like(param, dtype)
        if isinstance(live, torch.Tensor):
            device = str(live.device)
        elif not counter or group.get("capturable") or group.get("fused"):
            device = str(param.device)
        else:
            device = "cpu"
        places.bind(key, device, live)

    return bind
