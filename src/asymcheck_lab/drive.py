"""A model spread over ranks, and how a loss becomes an update there."""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from asymcheck_lab.errors import RunError
from asymcheck_lab.parallel import BUCKET_ELEMENTS
from asymcheck_lab.presets import RecipeSettings
from asymcheck_lab.world import World

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Drive(Protocol):
    """What a recipe trains with.

    Attributes:
        model: What is called, and what a checkpoint is given.
        bare: The model itself, with its own names.
        optimizer: The one whose learning rate a schedule sets.
        scaler: Of gradients; not enabled where there is none to save.
        floats: What floating-point inputs are to be; ``None`` for as they are.
    """

    model: torch.nn.Module
    bare: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    floats: torch.dtype | None

    def autocast(self) -> AbstractContextManager[Any]:
        """In this block the model computes."""
        ...

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of a batch; ``loss`` is its share of the update's."""
        ...

    def update(self) -> bool:
        """Clip and use the gradients, then forget them; whether the update was made.

        Raises:
            RunError: A gradient is no number.
        """
        ...


def _no_number(norm: float) -> RunError:
    return RunError(f"the norm of the gradients is {norm}; no update was made of it")


class _Torch:
    """AdamW over whatever parameters the model has: whole ones, or shards."""

    floats: torch.dtype | None = None

    def __init__(
        self,
        model: torch.nn.Module,
        settings: RecipeSettings,
        world: World,
        bare: torch.nn.Module | None = None,
    ) -> None:
        self.model = model
        self.bare = bare or model
        self.optimizer = _adamw(model, settings)
        kind = torch.device(world.device).type
        self.scaler = torch.amp.GradScaler(kind, enabled=settings.precision == "fp16")
        self._clip_norm = settings.clip_norm
        self._kind, self._half = kind, _HALF.get(settings.precision)

    def autocast(self) -> AbstractContextManager[Any]:
        if self._half is None:
            return nullcontext()
        return torch.autocast(self._kind, dtype=self._half)

    def backward(self, loss: torch.Tensor) -> None:
        self.scaler.scale(loss).backward()

    def update(self) -> bool:
        self.scaler.unscale_(self.optimizer)
        norm: Any = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._clip_norm)
        if hasattr(norm, "full_tensor"):  # of shards: each rank has a part of it
            norm = norm.full_tensor()
        if not self.scaler.is_enabled() and not norm.isfinite():
            raise _no_number(norm.item())
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return self.scaler.get_scale() >= before


def _ddp(model: torch.nn.Module, settings: RecipeSettings, world: World) -> Drive:
    given = None if world.device == "cpu" else [torch.device(world.device)]
    spread = torch.nn.parallel.DistributedDataParallel(
        model, device_ids=given, gradient_as_bucket_view=True
    )
    return _Torch(spread, settings, world, model)


def _fsdp2(model: torch.nn.Module, settings: RecipeSettings, world: World) -> Drive:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    # What a model returns is not changed in place here, of which it warns with some models.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    kind = torch.device(world.device).type
    mesh = init_device_mesh(kind, (world.size,))
    for unit in (*blocks(model), model):
        fully_shard(unit, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule) and kind == "cpu":
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot average
    return _Torch(model, settings, world)


def blocks(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The layers that a model is a list of, the outermost ones: what is gathered as one."""
    for child in model.children():
        if isinstance(child, torch.nn.ModuleList):
            yield from child
        else:
            yield from blocks(child)


class _Zero:
    """DeepSpeed's engine: it clips, scales and steps by itself, on partitions of its own."""

    def __init__(
        self, model: torch.nn.Module, settings: RecipeSettings, world: World, stage: int
    ) -> None:
        if world.device == "cpu":
            os.environ["DS_ACCELERATOR"] = "cpu"
        os.environ.setdefault("LOCAL_RANK", str(world.rank))  # asked for without a launcher too
        import deepspeed
        from deepspeed.ops import __compatible_ops__ as extensions

        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        # It calls collectives by names that torch is about to change, several times a step.
        warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
        # It would compile this one, for a minute, to speed up collectives on one host.
        extensions["deepspeed_shm_comm"] = False
        self.bare = model
        self.optimizer = _adamw(model, settings)
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)
        self.floats = _HALF.get(settings.precision)
        elements = min(BUCKET_ELEMENTS, sum(p.numel() for p in model.parameters()))
        config = {
            "train_micro_batch_size_per_gpu": settings.batch,
            "gradient_accumulation_steps": settings.accumulate,
            "gradient_clipping": settings.clip_norm if math.isfinite(settings.clip_norm) else 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {
                "stage": stage,
                "reduce_bucket_size": elements,
                "allgather_bucket_size": elements,
                "stage3_prefetch_bucket_size": elements,
            },
            **{name: {"enabled": settings.precision == name} for name in _HALF},
        }
        self.model, *_ = deepspeed.initialize(
            model=model, optimizer=self.optimizer, config=config, dist_init_required=False
        )
        self._engine: Any = self.model

    def autocast(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        self._engine.backward(loss, scale_wrt_gas=False)
        if not self._engine.is_gradient_accumulation_boundary():
            self._engine.step()  # counts the batch; the update comes with the last one

    def update(self) -> bool:
        self._engine.step()
        norm = self._engine.get_global_grad_norm()
        if self.floats is not torch.float16 and norm is not None and not math.isfinite(norm):
            raise _no_number(float(norm))
        return bool(self._engine.was_step_applied())


def _adamw(model: torch.nn.Module, settings: RecipeSettings) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay
    )


DRIVES: Mapping[str, Callable[[torch.nn.Module, RecipeSettings, World], Drive]] = {
    "none": _Torch,
    "ddp": _ddp,
    "fsdp2": _fsdp2,
    "zero1": lambda model, settings, world: _Zero(model, settings, world, 1),
    "zero2": lambda model, settings, world: _Zero(model, settings, world, 2),
    "zero3": lambda model, settings, world: _Zero(model, settings, world, 3),
}
"""How to spread a model that is built on each rank and on its device; see ``PARALLELS``."""
