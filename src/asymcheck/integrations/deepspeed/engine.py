"""A DeepSpeed engine and its optimizer as two items of a state, under the keys of plain PyTorch.

What is saved is what ZeRO updates: of each parameter the elements of the high-precision master
that lie on this rank, with the same elements of each moment. So a checkpoint of one stage can be
restored into another, into FSDP2 or DDP, or into one process, and back. The module's own
low-precision parameters are made out of the masters again; that they are nothing but the
masters' cast is checked when they are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from asymcheck.device.items import Finish, ModuleItem, Params, Restoring, members
from asymcheck.device.leaves import Collector
from asymcheck.device.naming import escape
from asymcheck.device.optimizer import OptimizerItem
from asymcheck.device.sharding import Replication, copies_of_all
from asymcheck.device.tree import Decoder, Encoder, Json
from asymcheck.errors import StateError
from asymcheck.integrations.deepspeed.moments import MomentsItem
from asymcheck.integrations.deepspeed.numbers import (
    is_between_updates,
    put_numbers,
    read_numbers,
    refresh_parameters,
)
from asymcheck.integrations.deepspeed.partitions import (
    Flat,
    check_engine,
    frozen_part,
    read_partitions,
)
from asymcheck.planning.pieces import Piece

_COMPARE_EVERY_SAVES = 50
_COMPARED_ELEMENTS = 4096
_AT_ONCE = 1 << 22


def adopt_engines(items: Mapping[str, object], rank: int, world: int) -> dict[str, object]:
    """Put items that know DeepSpeed in the place of its objects; it is never imported here.

    An engine stands for its module, its counters, loss scaler and learning-rate schedule. Its
    optimizer may be an entry of its own, as the one that was given to ``deepspeed.initialize``
    or as the one that it returned; where neither is there it becomes the entry ``optimizer``.

    Args:
        items: Name to object, as the user gave them.
        rank: This rank.
        world: How many ranks save together.

    Returns:
        The same names, and ``optimizer`` where it was added.

    Raises:
        StateError: An engine does what cannot be saved, or the name ``optimizer`` is taken.
    """
    found: dict[str, Any] = {name: value for name, value in items.items() if _is_engine(value)}
    adopted = dict(items)
    for name, engine in found.items():
        check_engine(name, engine)
        adopted[name] = EngineItem(engine, rank, world)
        if engine.optimizer is None:
            continue
        # The one of torch's kind that makes the updates; stages from 1 on wrap it.
        base: Any = getattr(engine.optimizer, "optimizer", engine.optimizer)
        own = {id(base), id(engine.optimizer), id(engine.basic_optimizer)}
        names = [n for n, value in items.items() if id(value) in own]
        if not names and "optimizer" in items:
            raise StateError(
                name, "the name 'optimizer' is taken: give the engine's optimizer another one"
            )
        item = OptimizerItem(base) if engine.optimizer is base else MomentsItem(base, engine)
        adopted.update(dict.fromkeys(names or ["optimizer"], item))
    return adopted


def _is_engine(value: object) -> bool:
    return isinstance(value, torch.nn.Module) and any(
        kind.__module__ == "deepspeed.runtime.engine" for kind in type(value).__mro__
    )


class EngineItem(ModuleItem):
    """An engine's module, with the masters in the place of the parameters."""

    def __init__(self, engine: Any, rank: int, world: int) -> None:  # noqa: ANN401
        super().__init__(engine.module, _replication(rank, world))
        self._engine = engine
        self._pieces: dict[int, tuple[torch.Tensor, Piece]] = {}
        self._saves = 0

    def collect(self, name: str, collector: Collector, encoder: Encoder, params: Params) -> str:
        """See ``Item``."""
        engine = self._engine
        if is_between_updates(engine):
            raise StateError(
                name,
                f"micro-step {engine.micro_steps} lies between two updates, and gradients that "
                f"were accumulated are not saved: save after the step() that made the update",
            )
        flats = read_partitions(engine)
        self._compare(name, flats)
        pieces = _pieces(self.module, flats)
        extra: dict[str, Json] = {}
        keys: dict[int, str] = {}
        prefix, everywhere = f"{escape(name)}/", collector.copies
        for raw, entry, value in self._entries(name):
            key = prefix + escape(entry)
            if keys.setdefault(id(value), key) != key and id(value) in pieces:
                collector.aliases[key] = keys[id(value)]  # tied, where its piece is empty too
            elif id(value) in pieces:
                view, piece = pieces[id(value)]
                collector.add(key, view, kind="parameter", piece=piece)
            elif isinstance(value, torch.Tensor):
                kind = "parameter" if isinstance(value, torch.nn.Parameter) else ""
                collector.copies = everywhere or self.replication.of(raw, buffer=not kind)
                collector.add(key, value, kind=kind)
                collector.copies = everywhere
            else:
                extra[entry] = encoder.encode(value, key)
        return members(extra=extra, engine=encoder.encode(read_numbers(engine), f"{prefix}$engine"))

    def plan(self, name: str, saved: dict[str, Json], to: Restoring) -> Finish:
        """See ``Item``."""
        flats = read_partitions(self._engine)
        self._pieces = _pieces(self.module, flats)
        finish = super().plan(name, saved, to)
        numbers = saved.get("engine")  # not there where no engine was saved
        if numbers is not None and not isinstance(to.bind(numbers, None), dict):
            raise TypeError("what is saved of the engine is no dict")

        def done(decoder: Decoder) -> None:
            finish(decoder)
            refresh_parameters(self._engine, flats)
            if numbers is not None:
                put_numbers(self._engine, decoder.decode(numbers))

        return done

    def plan_tensor(self, key: str, live: torch.Tensor, to: Restoring) -> None:
        """See ``ModuleItem``."""
        view, piece = self._pieces.get(id(live), (live, None))
        to.tensor(key, view, piece=piece)

    def _compare(self, name: str, flats: list[Flat]) -> None:
        """Check that the module's parameters are their masters, cast: all elements at the first
        save and at every 50th, some of each buffer at the others.
        """
        every = self._saves % _COMPARE_EVERY_SAVES == 0
        self._saves += 1
        for flat in flats:
            master, low = flat.master.detach(), flat.low.detach()
            if master.dtype == low.dtype and master.data_ptr() == low.data_ptr():
                continue
            stride = 1 if every else max(1, master.numel() // _COMPARED_ELEMENTS)
            for at in range(0, master.numel(), _AT_ONCE * stride):
                span = slice(at, at + _AT_ONCE * stride, stride)
                mine = low[span]
                cast = master[span].to(low.dtype).to(low.device)
                if torch.equal(mine, cast):
                    continue
                same = (mine == cast) | (mine.isnan() & cast.isnan())
                if not same.all():
                    where = at + stride * int(same.logical_not().nonzero()[0, 0])
                    self._refuse_difference(name, flat, where)

    def _refuse_difference(self, name: str, flat: Flat, where: int) -> None:
        for part in flat.parts:
            if part.at <= where < part.at + part.nelems:
                shown = self._engine.param_names.get(part.param, "?")
                raise StateError(
                    f"{name}/{shown}",
                    f"element {part.start + where - part.at} of the {flat.low.dtype} parameter is "
                    f"not its {flat.master.dtype} master, cast: only the master is saved. After "
                    f"writing parameters by hand call the engine's "
                    f"optimizer.refresh_fp32_params()",
                )


def _replication(rank: int, world: int) -> Replication:
    """All ranks have all of what ZeRO does not divide; buffers are each rank's own."""
    every = copies_of_all(rank, world)
    return Replication(every, every, (("", frozenset(), False),) if world > 1 else ())


def _pieces(module: torch.nn.Module, flats: list[Flat]) -> dict[int, tuple[torch.Tensor, Piece]]:
    """What this rank has of each parameter, by its ``id``: live memory, and where it belongs."""
    found = {
        id(part.param): (part.of(flat.master), part.piece) for flat in flats for part in flat.parts
    }
    param: Any
    for param in module.parameters():
        if id(param) not in found and (part := frozen_part(param)):
            found[id(param)] = (part.of(param.ds_tensor), part.piece)
    return found
