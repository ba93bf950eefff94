"""The kinds of objects that a ``state`` may hold: how each is collected and put back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from asymcheck.device.inplace import Bind, bind_leaves, put_back, unlike
from asymcheck.device.leaves import Collector, Known
from asymcheck.device.matching import Matching
from asymcheck.device.naming import canonical_names, escape
from asymcheck.device.places import Places
from asymcheck.device.sharding import Copies, Replication, local
from asymcheck.device.tensors import can_cast, check_supported, dtype_name, is_supported
from asymcheck.device.tree import Decoder, Encoder, Json
from asymcheck.errors import CaptureError, CheckpointError
from asymcheck.planning.pieces import Piece


@dataclass(frozen=True)
class Params:
    """The parameters of the modules in the state.

    Attributes:
        names: Name of each by ``id``; the first one for one with several names.
        by_name: Each under all of its names.
        copies: Of those that are equal on several ranks, by ``id``.
    """

    names: Mapping[int, str]
    by_name: Mapping[str, torch.Tensor]
    copies: Mapping[int, Copies] = field(default_factory=dict)


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

    def tensor(self, key: str, live: torch.Tensor, piece: Piece | None = None) -> None:
        """Send the leaf ``key`` to ``live``, or note how they differ.

        Args:
            key: Of the leaf.
            live: Where to.
            piece: Which part of a whole it is, where neither it is all nor a DTensor.
        """
        check_supported(key, local(live))
        leaf = self.places.leaf(key)
        differ = self.matching.mismatched
        if leaf is None:
            self.matching.missing_keys.append(key)
            return
        same = dtype_name(live.dtype) == leaf.dtype
        whole = tuple(live.shape) if piece is None else piece.whole
        if whole != leaf.shape:
            differ.append((key, f"shape {list(whole)}", f"shape {list(leaf.shape)}"))
        elif not same and not (self.cast and can_cast(leaf.dtype, live.dtype)):
            differ.append((key, dtype_name(live.dtype), leaf.dtype))
        elif (other := self.places.into_tensor(key, live, piece)) is not None:
            differ.append((key, f"one tensor with {other}", "two tensors"))
        elif not same:
            self.matching.cast.append(key)


def members(**values: Json) -> str:
    """Members of a JSON object, without its braces."""
    return json.dumps(values, separators=(",", ":"), allow_nan=False)[1:-1]


class Item(Protocol):
    """One entry of the state."""

    kind: str

    def collect(self, name: str, collector: Collector, encoder: Encoder, params: Params) -> str:
        """Note the leaves; return what else is to be saved, as the members of a JSON object.

        Changes nothing.
        """
        ...

    def plan(self, name: str, saved: dict[str, Json], to: Restoring) -> Finish:
        """Give each leaf a place and note differences; changes nothing yet."""
        ...


class ModuleItem:
    """An ``nn.Module``: parameters and buffers land in live storage."""

    kind = "module"

    def __init__(self, module: torch.nn.Module, replication: Replication) -> None:
        self.module = module
        self.replication = replication
        self._latest: tuple[list[str], Known | None] = ([], None)

    def _state_dict(self, name: str) -> dict[str, Any]:
        try:
            return self.module.state_dict(keep_vars=True)
        except CheckpointError:
            raise
        except Exception as failure:
            raise CaptureError(f"state {name!r}: its state_dict() raised {failure!r}") from failure

    def _entries(self, name: str) -> list[tuple[str, str, Any]]:
        """Raw name, canonical name and value of each entry; tensors are the live ones."""
        entries = self._state_dict(name)
        canonical = canonical_names(entries)
        return [(raw, canonical[raw], value) for raw, value in entries.items()]

    def collect(self, name: str, collector: Collector, encoder: Encoder, params: Params) -> str:
        """See ``Item``."""
        entries = self._state_dict(name)
        names, known = self._latest
        if names == list(entries) and collector.add_known(known, list(entries.values())):
            return '"extra":{}'
        extra: dict[str, Json] = {}
        keys = []
        first = len(collector.sources)
        prefix, everywhere = f"{escape(name)}/", collector.copies
        for raw, entry in canonical_names(entries).items():
            value, key = entries[raw], prefix + escape(entry)
            if isinstance(value, torch.Tensor):
                kind = "parameter" if isinstance(value, torch.nn.Parameter) else ""
                mine = self.replication.of(raw, buffer=not kind)
                collector.copies = everywhere or mine
                keys.append(collector.add(key, value, kind=kind))
                collector.copies = everywhere
            else:
                extra[entry] = encoder.encode(value, key)
        known = None if extra else collector.learn(first, keys, list(entries.values()))
        self._latest = list(entries), known
        return members(extra=extra)

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
                self.plan_tensor(key, value, to)
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

    def plan_tensor(self, key: str, live: torch.Tensor, to: Restoring) -> None:
        """Give a leaf its place in a tensor of the module."""
        to.tensor(key, live)

    def _memory(self) -> set[int]:
        tensors = [*self.module.parameters(), *self.module.buffers()]
        mine = map(local, tensors)
        return {t.untyped_storage().data_ptr() for t in mine if is_supported(t)}


def _is_live(entry: torch.Tensor, memory: set[int]) -> bool:
    """Whether an entry of a state dict is memory of the module rather than a copy of it."""
    value = local(entry)
    if not is_supported(value) or value.numel() == 0:
        return True  # refused, or nothing to copy
    return value.untyped_storage().data_ptr() in memory


class StatefulItem:
    """Anything with ``state_dict`` and ``load_state_dict``: schedulers, scalers, loaders."""

    kind = "stateful"

    def __init__(self, value: Any) -> None:  # noqa: ANN401
        self.value = value

    def collect(self, name: str, collector: Collector, encoder: Encoder, params: Params) -> str:
        """See ``Item``."""
        try:
            state = self.value.state_dict()
        except CheckpointError:
            raise
        except Exception as failure:
            raise CaptureError(f"state {name!r}: its state_dict() raised {failure!r}") from failure
        return members(value=encoder.encode(state, escape(name)))

    def plan(self, name: str, saved: dict[str, Json], to: Restoring) -> Finish:
        """See ``Item``."""
        to.bind(saved["value"], None)
        return lambda decoder: self.value.load_state_dict(decoder.decode(saved["value"]))


class TensorItem:
    """A tensor, restored in place."""

    kind = "tensor"

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def collect(self, name: str, collector: Collector, encoder: Encoder, params: Params) -> str:
        """See ``Item``."""
        return members(key=collector.add(escape(name), self.tensor))

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

    def collect(self, name: str, collector: Collector, encoder: Encoder, params: Params) -> str:
        """See ``Item``."""
        value = encoder.encode(self.value, escape(name))
        return members(value=value, type=type(self.value).__name__)

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
