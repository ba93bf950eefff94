"""How DeepSpeed's ZeRO divides parameters: read from its own bookkeeping, never from values.

Every stage keeps, for each group of parameters, one flat buffer of what this rank updates, and the
wrapped optimizer's state lies in buffers of the same shape. Which elements of which parameter
lie where in it differs by stage; from here on it is the same for all: see ``Part``.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from asymcheck.errors import StateError
from asymcheck.planning.pieces import Piece


class Part(NamedTuple):
    """The elements of one parameter that this rank updates; none where it updates none of it.

    Attributes:
        param: The parameter, a placeholder under ZeRO-3.
        start: Offset of the first in the row-major parameter, in elements.
        at: Offset of the first in the flat buffer, in elements.
        nelems: How many.
    """

    param: torch.nn.Parameter
    start: int
    at: int
    nelems: int

    @property
    def whole(self) -> tuple[int, ...]:
        """Shape of the parameter as one process would have it."""
        return tuple(getattr(self.param, "ds_shape", self.param.shape))

    @property
    def piece(self) -> Piece:
        """Where the elements belong."""
        return Piece(self.whole, self.start)

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Its elements in a flat buffer, an alias of 1 dimension."""
        return flat.detach().narrow(0, self.at, self.nelems)


class Flat(NamedTuple):
    """One flat buffer. What of it is in no part is padding.

    Attributes:
        group: Which of the optimizer's groups it is of.
        master: The parameters that are updated, 1-D; the optimizer's state is found by it.
        low: The same elements in the dtype of the module, 1-D.
        parts: Of the group's parameters, in the group's order.
    """

    group: int
    master: torch.Tensor
    low: torch.Tensor
    parts: list[Part]


_BY_GROUP = {
    # Class: the parameters of each group, the same in the order of the flat buffer of all ranks,
    # this rank's masters, and the low-precision ones of each rank.
    "DeepSpeedZeroOptimizer": (
        "bit16_groups",
        "round_robin_bit16_groups",
        "single_partition_of_fp32_groups",
        "parallel_partitioned_bit16_groups",
    ),
    "BF16_Optimizer": (
        "bf16_groups",
        "bf16_groups",
        "fp32_groups_flat_partition",
        "bf16_partitioned_groups",
    ),
}
_STAGE_3 = "DeepSpeedZeroOptimizer_Stage3"
_NOT_ELEMENTWISE = ("Onebit", "ZeroOne", "Muon")


def check_engine(name: str, engine: Any) -> None:  # noqa: ANN401  DeepSpeed is not imported
    """Refuse what an engine may do and this module does not know how to save.

    Args:
        name: Of the item.
        engine: The engine.

    Raises:
        StateError: Says which feature it is.
    """
    found = next(_unknown(engine), None)
    if found is not None:
        raise StateError(name, f"this DeepSpeed engine uses {found}, which is not supported")


def _unknown(engine: Any) -> Iterator[str]:  # noqa: ANN401
    kind = type(engine).__name__
    if kind == "PipelineEngine":
        yield "pipeline parallelism (PipelineEngine)"
    elif kind != "DeepSpeedEngine":
        yield f"an engine of its own kind ({kind})"
    if engine.has_moe_layers:
        yield "mixture-of-experts layers"
    if engine.mp_world_size > 1:
        yield f"tensor parallelism over {engine.mp_world_size} ranks"
    if engine.sequence_parallel_size > 1:
        yield f"sequence parallelism over {engine.sequence_parallel_size} ranks"
    if engine.random_ltd_enabled() or engine.curriculum_learning_enabled():
        yield "DeepSpeed's data efficiency (random-LTD or curriculum learning)"
    optimizer, offload = engine.optimizer, engine.zero_offload_optimizer()
    for what, to in (("optimizer", offload), ("parameters", engine.zero_offload_param())):
        if to is not None and to.device == "nvme":
            yield f"offload of {what} to NVMe"
    if offload is not None and getattr(offload, "super_offload", False):
        yield "SuperOffload"
    if offload is not None and getattr(offload, "ratio", 1.0) != 1.0:
        yield f"offload of a part of the optimizer (ratio {offload.ratio})"
    if getattr(engine, "zenflow", False):
        yield "ZenFlow"
    if engine.zero_hpz_partition_size() > 1:
        yield "secondary partitions of ZeRO++ (zero_hpz_partition_size)"
    if engine.zero_quantized_weights() or engine.zero_quantized_nontrainable_weights():
        yield "quantized weights of ZeRO++"
    base = engine.basic_optimizer
    if any(part in type(base).__name__ for part in _NOT_ELEMENTWISE):
        yield f"the optimizer {type(base).__name__}, whose state changes before its step"
    scalers = ("torch_autocast_gradscaler", "torch_autocast_z0_gradscaler")
    if any(getattr(of, name, None) for of in (optimizer, engine) for name in scalers):
        yield "torch autocast in float16"
    if optimizer is not base and type(optimizer).__name__ not in (*_BY_GROUP, _STAGE_3):
        yield f"the optimizer wrapper {type(optimizer).__name__}"


def read_partitions(engine: Any) -> list[Flat]:  # noqa: ANN401
    """The flat buffers of an engine that ``check_engine`` accepted; none under stage 0."""
    optimizer = engine.optimizer
    kind = type(optimizer).__name__
    if kind == _STAGE_3:
        return list(_stage_3(optimizer))
    return list(_by_group(optimizer, *_BY_GROUP[kind])) if kind in _BY_GROUP else []


def _by_group(optimizer: Any, *names: str) -> Iterator[Flat]:  # noqa: ANN401
    columns = zip(*(getattr(optimizer, name) for name in names), strict=True)
    for g, (group, laid, master, low) in enumerate(columns):
        rank = dist.get_rank(optimizer.real_dp_process_group[g])
        first = rank * master.numel()
        places = dict(zip(map(id, laid), _offsets(optimizer, g, laid), strict=True))
        parts = []
        for param in group:
            at = places[id(param)] - first
            start = min(max(0, -at), param.numel())
            stop = min(max(0, master.numel() - at), param.numel())
            nelems = max(0, stop - start)
            parts.append(Part(param, start, max(0, at) if nelems else 0, nelems))
        yield Flat(g, master, low[rank], parts)


def _offsets(optimizer: Any, group: int, laid: list[torch.Tensor]) -> list[int]:  # noqa: ANN401
    """Where each parameter begins in the flat buffer of all ranks together."""
    found = getattr(optimizer, "round_robin_bit16_offsets", None)  # newer: they may be padded
    if found is not None:
        return list(found[group])
    return [0, *accumulate(p.numel() for p in laid)][:-1]


def _stage_3(optimizer: Any) -> Iterator[Flat]:  # noqa: ANN401
    for i, group in enumerate(optimizer.fp16_groups):
        parts, at = [], 0
        for param in group:
            start, nelems = _own_part(param)
            parts.append(Part(param, start, at, nelems))
            at += param.ds_tensor.ds_numel
        master = optimizer.fp32_partitioned_groups_flat[i]
        low = optimizer.fp16_partitioned_groups_flat[i]
        yield Flat(optimizer.sub_group_to_group_id[i], master, low, parts)


def frozen_part(param: Any) -> Part | None:  # noqa: ANN401
    """What this rank has of a parameter that ZeRO-3 divides and no optimizer updates.

    Its elements lie at the start of ``param.ds_tensor``. ``None`` for any other tensor.
    """
    if not hasattr(param, "ds_tensor"):
        return None
    start, nelems = _own_part(param)
    return Part(param, start, 0, nelems)


def _own_part(param: Any) -> tuple[int, int]:  # noqa: ANN401
    """ZeRO-3 cuts a parameter into equal runs, one for each rank; the last ones are padded."""
    size = param.ds_tensor.ds_numel
    start = min(param.ds_numel, size * dist.get_rank(param.ds_process_group))
    return start, min(size, param.ds_numel - start)
