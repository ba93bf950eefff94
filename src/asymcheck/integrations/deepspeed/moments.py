"""The optimizer that ZeRO gave flat buffers, saved and restored by the names of parameters."""

from __future__ import annotations

from typing import Any

import torch

from asymcheck.device.items import Finish, Params, Restoring, members
from asymcheck.device.leaves import Collector
from asymcheck.device.naming import escape
from asymcheck.device.optimizer import OptimizerItem, match_groups, put_options
from asymcheck.device.places import Stored
from asymcheck.device.tensors import dtype_of
from asymcheck.device.tree import Decoder, Encoder, Json
from asymcheck.errors import IncompatibleCheckpoint, StateError
from asymcheck.integrations.deepspeed.partitions import Flat, Part, read_partitions


class MomentsItem(OptimizerItem):
    """The wrapped optimizer: what lies in its flat buffers, told apart by parameter.

    A value that is the same for a whole buffer, such as a step counter, is saved once for each
    parameter, as plain PyTorch has it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, engine: Any) -> None:  # noqa: ANN401
        super().__init__(optimizer)
        self._engine = engine

    def collect(self, name: str, collector: Collector, encoder: Encoder, params: Params) -> str:
        """See ``Item``."""
        flats, path = read_partitions(self._engine), escape(name)
        rows = []
        for g, group in enumerate(self.optimizer.param_groups):
            parts = _parts(flats, g)
            names = [params.names[id(part.param)] for part in parts]
            options = {k: v for k, v in group.items() if k != "params"}
            rows.append(
                {
                    "params": names,
                    "shapes": [list(part.whole) for part in parts],
                    "options": encoder.encode(options, f"{path}/groups/{g}"),
                }
            )
        state: dict[str, Json] = {}
        for flat in flats:
            entries = self.optimizer.state.get(flat.master) or {}
            for part in flat.parts if entries else ():
                own = f"{path}/state/{params.names[id(part.param)]}"
                state[params.names[id(part.param)]] = {
                    key: _save(f"{own}/{escape(key)}", value, flat, part, collector)
                    for key, value in entries.items()
                }
        return members(groups=rows, state=state, other=[])

    def plan(self, name: str, saved: dict[str, Json], to: Restoring) -> Finish:
        """See ``Item``."""
        flats, live = read_partitions(self._engine), self.optimizer.param_groups
        names = to.params.names
        own = {id(p.param): names[id(p.param)] for flat in flats for p in flat.parts}
        groups = [_parts(flats, g) for g in range(len(live))]
        here = [[(own[id(p.param)], p.whole) for p in parts] for parts in groups]
        rename, shapes, fitting, options = match_groups(name, saved, here, own, live, to)
        trees = {rename(raw): tree for raw, tree in saved["state"].items()}
        odd = trees.keys() - shapes.keys()
        to.matching.unexpected_keys += [f"{name}/state/{p}" for p in sorted(odd)]
        fit = {p: tree for p, tree in trees.items() if p in fitting}
        buffers = [self._plan_buffer(name, flat, own, fit, to) for flat in flats]

        def finish(decoder: Decoder) -> None:
            for flat, (tensors, numbers) in zip(flats, buffers, strict=True):
                entries = self.optimizer.state[flat.master]
                entries.clear()
                entries.update(tensors)
                for key, found in numbers.items():
                    entries[key] = self._number(name, key, [decoder.decode(t) for t in found], flat)
            _link(self._engine.optimizer, linked=bool(self.optimizer.state))
            put_options(options, decoder)

        return finish

    def _plan_buffer(
        self,
        name: str,
        flat: Flat,
        own: dict[int, str],
        trees: dict[str, Json],
        to: Restoring,
    ) -> tuple[dict[str, torch.Tensor], dict[str, list[Json]]]:
        """Give what is saved of a buffer's parameters its place in buffers of the same shape.

        Returns:
            The buffers, and all that is saved of values that are no part of one.
        """
        live = self.optimizer.state.get(flat.master) or {}
        buffers: dict[str, torch.Tensor] = {}
        numbers: dict[str, list[Json]] = {}
        stepped = [part for part in flat.parts if own[id(part.param)] in trees]
        if stepped and len(stepped) < len(flat.parts):
            lacking = {own[id(p.param)] for p in flat.parts} - trees.keys()
            to.matching.missing_keys += [f"{name}/state/{p}" for p in sorted(lacking)]
        for part in stepped:
            for key, tree in trees[own[id(part.param)]].items():
                leaf = _leaf(tree, to)
                if leaf is None or key == "step" or leaf.shape != part.whole:
                    numbers.setdefault(key, []).append(tree)
                    to.bind(tree, None)
                    continue
                if key not in buffers:
                    buffers[key] = _buffer(live.get(key), flat.master, leaf.dtype)
                to.tensor(tree["$leaf"], part.of(buffers[key]), piece=part.piece)
        return buffers, numbers

    def _number(self, name: str, key: str, found: list[Any], flat: Flat) -> Any:  # noqa: ANN401
        """One value for a whole buffer, as this optimizer keeps it."""
        first = found[0]
        if any(type(v) is not type(first) or bool(v != first) for v in found):
            raise IncompatibleCheckpoint(
                f"{name}/state: the parameters of a group differ in {key!r} "
                f"({sorted({float(v) for v in found})}): ZeRO keeps one for all of them"
            )
        if not isinstance(first, torch.Tensor):
            return first
        if type(self.optimizer).__module__.startswith("deepspeed."):
            return first.item() if key != "step" else int(first.item())
        group = self.optimizer.param_groups[flat.group]
        on_device = group.get("capturable") or group.get("fused")
        return first.to(flat.master.device if on_device else "cpu")


def _leaf(tree: Json, to: Restoring) -> Stored | None:
    """What is stored of an entry that is one array; ``None`` for any other value."""
    return to.places.leaf(str(tree["$leaf"])) if type(tree) is dict and "$leaf" in tree else None


def _link(optimizer: Any, *, linked: bool) -> None:  # noqa: ANN401
    """Have stages 1 and 2 show the state that is there now under each parameter."""
    if hasattr(optimizer, "_hp_optimizer_states_linked"):
        optimizer._hp_optimizer_states_linked = False
        if linked:
            optimizer._lazy_init_hp_params_optimizer_state()


def _parts(flats: list[Flat], group: int) -> list[Part]:
    return [part for flat in flats if flat.group == group for part in flat.parts]


def _save(key: str, value: Any, flat: Flat, part: Part, collector: Collector) -> Json:  # noqa: ANN401
    if isinstance(value, torch.Tensor) and value.shape == flat.master.shape and key[-5:] != "/step":
        row: dict[str, Json] = {
            "$leaf": collector.state_leaf(key, part.of(value), piece=part.piece)
        }
        if value.device.type != "cpu":
            row["device"] = str(value.device)
        return row
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        return {"$leaf": collector.state_leaf(key, value.detach().cpu().clone())}
    if isinstance(value, int | float) and not isinstance(value, bool):
        # DeepSpeed's own optimizers count in Python, torch's in a tensor: saved is the latter.
        return {"$leaf": collector.state_leaf(key, torch.tensor(float(value)))}
    raise StateError(
        key,
        f"an optimizer's state of type {type(value).__name__} that is neither a number nor a "
        f"tensor of the shape of ZeRO's flat buffer ({list(flat.master.shape)}) is not supported",
    )


def _buffer(live: object, master: torch.Tensor, dtype: str) -> torch.Tensor:
    if isinstance(live, torch.Tensor) and live.shape == master.shape:
        return live.detach()
    return torch.zeros_like(master, dtype=dtype_of(dtype), requires_grad=False)
