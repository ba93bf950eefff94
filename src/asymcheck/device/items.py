"""The kinds of objects that a ``state`` may hold: how each is collected and put back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from asymcheck.device.leaves import Collector, Places
from asymcheck.device.matching import Matching
from asymcheck.device.naming import canonical_names
from asymcheck.device.tensors import dtype_name
from asymcheck.device.tree import Decoder, Encoder, Json, bind_leaves, escape, put_back
from asymcheck.errors import CaptureError, CheckpointError, StateError

ParamNames = Mapping[int, str]
"""Name of each parameter of the modules in the state, by ``id``."""

Finish = Callable[[Decoder], None]
"""Sets Python values, once every leaf is read."""


@dataclass(frozen=True)
class Restoring:
    """What an item needs while a restore is planned.

    Attributes:
        places: Gets a place for each leaf.
        matching: Gets each difference.
        names: Names of the live parameters.
        cast: Whether a leaf of another dtype is cast rather than a difference.
    """

    places: Places
    matching: Matching
    names: ParamNames
    cast: bool

    def tensor(self, key: str, live: torch.Tensor) -> None:
        """Send the leaf ``key`` to ``live``, or note how they differ."""
        leaf = self.places.leaf(key)
        if leaf is None:
            self.matching.missing_keys.append(key)
        elif tuple(live.shape) != leaf.shape:
            self.matching.mismatched.append(
                (key, f"shape {list(live.shape)}", f"shape {list(leaf.shape)}")
            )
        elif dtype_name(live.dtype) != leaf.dtype and not self.cast:
            self.matching.mismatched.append((key, dtype_name(live.dtype), leaf.dtype))
        else:
            if dtype_name(live.dtype) != leaf.dtype:
                self.matching.cast.append(key)
            self.places.into_tensor(key, live)


class Item(Protocol):
    """One entry of the state."""

    kind: str

    def collect(
        self, name: str, collector: Collector, encoder: Encoder, names: ParamNames
    ) -> dict[str, Json]:
        """Note the leaves; return what else is to be saved. Changes nothing."""
        ...

    def plan(self, name: str, saved: dict[str, Json], to: Restoring) -> Finish:
        """Give each leaf a place and note differences; changes nothing yet."""
        ...


def live_entries(module: torch.nn.Module) -> dict[str, Any]:
    """The state dict by canonical name; tensors are the live ones, not copies."""
    entries = module.state_dict(keep_vars=True)
    canonical = canonical_names(entries)
    return {canonical[raw]: value for raw, value in entries.items()}


class ModuleItem:
    """An ``nn.Module``: parameters and buffers land in live storage."""

    kind = "module"

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def collect(
        self, name: str, collector: Collector, encoder: Encoder, names: ParamNames
    ) -> dict[str, Json]:
        """See ``Item``."""
        extra: dict[str, Json] = {}
        for entry, value in live_entries(self.module).items():
            key = f"{escape(name)}/{escape(entry)}"
            if isinstance(value, torch.Tensor):
                collector.add(key, value, steady=isinstance(value, torch.nn.Parameter))
            else:
                extra[entry] = encoder.encode(value, key)
        return {"extra": extra}

    def plan(self, name: str, saved: dict[str, Json], to: Restoring) -> Finish:
        """See ``Item``."""
        entries = self.module.state_dict(keep_vars=True)
        canonical = canonical_names(entries)
        storages = {t.untyped_storage().data_ptr() for t in self._live_tensors()}
        extra: dict[str, Json] = saved["extra"]
        # What the module computes for its state dict has no live memory: it is handed to
        # load_state_dict at the end, under the name that it has there.
        computed: dict[str, Json] = {}
        live_keys = set()
        for raw, value in entries.items():
            entry = canonical[raw]
            key = f"{escape(name)}/{escape(entry)}"
            live_keys.add(key)
            if not isinstance(value, torch.Tensor):
                if entry in extra:
                    computed[raw] = extra[entry]
                else:
                    to.matching.missing_keys.append(key)
            elif value.numel() and value.untyped_storage().data_ptr() not in storages:
                if to.places.leaf(key) is None:
                    to.matching.missing_keys.append(key)
                else:
                    computed[raw] = {"$leaf": key}
            else:
                to.tensor(key, value)
        prefix = f"{escape(name)}/"
        stored = {
            k
            for k in to.places.array_keys()
            if k.startswith(prefix) and "/" not in k[len(prefix) :]
        }
        stored |= {f"{prefix}{escape(entry)}" for entry in extra}
        to.matching.unexpected_keys += sorted(stored - live_keys)
        bind_leaves(computed, None, to.places.bind)

        def finish(decoder: Decoder) -> None:
            if computed:
                values = {raw: decoder.decode(tree) for raw, tree in computed.items()}
                self.module.load_state_dict(values, strict=False)

        return finish

    def _live_tensors(self) -> list[torch.Tensor]:
        return [*self.module.parameters(), *self.module.buffers()]


class OptimizerItem:
    """An ``Optimizer``, read and written through ``state`` and ``param_groups`` themselves.

    Its own ``state_dict`` numbers the parameters and its ``load_state_dict`` casts moments to
    the parameter's dtype; names and plain access do neither.
    """

    kind = "optimizer"

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def _names(self, names: ParamNames) -> dict[int, str]:
        """Name of each parameter in a group: its module's, or its place."""
        return {
            id(p): names.get(id(p), f"group{g}.{i}")
            for g, group in enumerate(self.optimizer.param_groups)
            for i, p in enumerate(group["params"])
        }

    def collect(
        self, name: str, collector: Collector, encoder: Encoder, names: ParamNames
    ) -> dict[str, Json]:
        """See ``Item``."""
        own = self._names(names)
        path = escape(name)
        groups = []
        for g, group in enumerate(self.optimizer.param_groups):
            options = {k: v for k, v in group.items() if k != "params"}
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
            param = own.get(id(key)) or names.get(id(key))
            if param is None:
                raise StateError(
                    f"{name}/state",
                    f"holds state of a tensor of shape {list(key.shape)} that is in none of its "
                    f"groups and in no module of the state: add the module, or delete that state",
                )
            state[param] = steady.encode(value, f"{path}/state/{escape(param)}")
        return {"groups": groups, "state": state, "other": other}

    def plan(self, name: str, saved: dict[str, Json], to: Restoring) -> Finish:
        """See ``Item``."""
        live = self.optimizer.param_groups
        own = self._names(to.names)
        params = {own[id(p)]: (p, group) for group in live for p in group["params"]}
        shapes = {
            p: shape
            for group in saved["groups"]
            for p, shape in zip(group["params"], group["shapes"], strict=True)
        }
        self._match(name, saved["groups"], params, shapes, to)
        for param, tree in saved["state"].items():
            if param in params:
                tensor, group = params[param]
                bind_leaves(tree, self.optimizer.state.get(tensor), _near(tensor, group, to.places))
        for tree, group in zip(saved["groups"], live, strict=False):
            bind_leaves(tree["options"], group, to.places.bind)
        bind_leaves(saved["other"], None, to.places.bind)

        def finish(decoder: Decoder) -> None:
            state = self.optimizer.state
            for param in shapes.keys() & params.keys() - saved["state"].keys():
                state.pop(params[param][0], None)
            for param, tree in saved["state"].items():
                if param in params:
                    tensor = params[param][0]
                    state[tensor] = put_back(state.get(tensor), decoder.decode(tree))
            for key, value in saved["other"]:
                state[decoder.decode(key)] = decoder.decode(value)
            for tree, group in zip(saved["groups"], live, strict=False):
                group.update(decoder.decode(tree["options"]))

        return finish

    def _match(
        self,
        name: str,
        saved: list[dict[str, Json]],
        params: Mapping[str, tuple[torch.Tensor, Mapping[str, Any]]],
        shapes: Mapping[str, list[int]],
        to: Restoring,
    ) -> None:
        matching, own = to.matching, self._names(to.names)
        matching.missing_keys += [f"{name}/{p}" for p in params if p not in shapes]
        matching.unexpected_keys += [f"{name}/{p}" for p in shapes if p not in params]
        matching.mismatched += [
            (f"{name}/{p}", f"shape {list(live.shape)}", f"shape {shapes[p]}")
            for p, (live, _) in params.items()
            if p in shapes and list(live.shape) != shapes[p]
        ]
        here = [
            sorted(own[id(p)] for p in group["params"]) for group in self.optimizer.param_groups
        ]
        there = [sorted(group["params"]) for group in saved]
        own_names = {p for group in here for p in group}
        if here != there and own_names == shapes.keys():
            matching.mismatched.append((f"{name}/groups", _sizes(here), _sizes(there)))


def _sizes(groups: list[list[str]]) -> str:
    return f"{len(groups)} groups of {[len(g) for g in groups]} parameters"


def _near(
    param: torch.Tensor, group: Mapping[str, Any], places: Places
) -> Callable[[str, str, object], None]:
    """Bind a new state tensor where a fresh optimizer would put it: beside its parameter,
    but a step counter stays on the CPU unless the update kernel needs it on the device.
    """

    def bind(key: str, device: str, live: object) -> None:
        leaf = places.leaf(key)
        counter = leaf is not None and leaf.shape == () and device == "cpu"
        if isinstance(live, torch.Tensor):
            device = str(live.device)
        elif not counter or group.get("capturable") or group.get("fused"):
            device = str(param.device)
        places.bind(key, device, live)

    return bind


class StatefulItem:
    """Anything with ``state_dict`` and ``load_state_dict``: schedulers, scalers, loaders."""

    kind = "stateful"

    def __init__(self, value: Any) -> None:  # noqa: ANN401
        self.value = value

    def collect(
        self, name: str, collector: Collector, encoder: Encoder, names: ParamNames
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
        bind_leaves(saved["value"], None, to.places.bind)
        return lambda decoder: self.value.load_state_dict(decoder.decode(saved["value"]))


class TensorItem:
    """A tensor, restored in place."""

    kind = "tensor"

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def collect(
        self, name: str, collector: Collector, encoder: Encoder, names: ParamNames
    ) -> dict[str, Json]:
        """See ``Item``."""
        return {"key": collector.add(escape(name), self.tensor)}

    def plan(self, name: str, saved: dict[str, Json], to: Restoring) -> Finish:
        """See ``Item``."""
        to.tensor(saved["key"], self.tensor)
        return lambda decoder: None


class ValueItem:
    """A mutable Python value, restored in place: its content is what it was at the save."""

    kind = "value"

    def __init__(self, value: Any) -> None:  # noqa: ANN401
        self.value = value

    def collect(
        self, name: str, collector: Collector, encoder: Encoder, names: ParamNames
    ) -> dict[str, Json]:
        """See ``Item``."""
        value = encoder.encode(self.value, escape(name))
        return {"value": value, "type": type(self.value).__name__}

    def plan(self, name: str, saved: dict[str, Json], to: Restoring) -> Finish:
        """See ``Item``."""
        kind = type(self.value).__name__
        if saved["type"] != kind:
            to.matching.mismatched.append((name, kind, str(saved["type"])))
            return lambda decoder: None
        bind_leaves(saved["value"], self.value, to.places.bind)
        return lambda decoder: put_back(self.value, decoder.decode(saved["value"]))
