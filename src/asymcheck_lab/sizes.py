"""How large a preset is, before any of it is allocated.

Parameters are counted on the ``meta`` device, where tensors have shapes and no memory. What a
forward pass keeps for its backward pass is counted there too: every tensor that autograd saves,
by the hooks that it offers for this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asymcheck.rendering import size_text
from asymcheck_lab.errors import LabError, UsageError
from asymcheck_lab.families import blank, build, on_meta, positions
from asymcheck_lab.parallel import ALONE, BUCKET_ELEMENTS, Parallel
from asymcheck_lab.presets import Preset

_FULL = 4
_HALF = 2
MOMENTS: Mapping[str, int] = {"adamw": 2, "momentum": 1, "sgd": 0}
"""Elements that an optimizer keeps for each parameter, by name: of AdamW, of SGD with and without
momentum."""
# AdamW works tensor by tensor: the denominator, its root and one product are there at once.
_UPDATE_TEMPORARIES = 3
_RUNTIME_BYTES = 500 * 2**20
# A layer's input is 2 of the 34 bytes that it keeps of each hidden value (Korthikanti et al.
# 2022, "Reducing Activation Recomputation", equation 1).
_INPUT_SHARE = 2 / 34


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes that one rank holds.

    Attributes:
        parameters: That forward and backward use.
        gradients: Of them.
        optimizer: Moments, and fp32 parameters where the others are half.
        checkpoint: What this rank saves: its share of fp32 parameters and moments. What all
            ranks have alike they save in turns.
    """

    parameters: int
    gradients: int
    optimizer: int
    checkpoint: int

    @property
    def total(self) -> int:
        """All that training holds; a checkpoint's copy is not part of it."""
        return self.parameters + self.gradients + self.optimizer


def memory_per_rank(
    parameters: int,
    *,
    world: int = 1,
    stage: int = 0,
    half: bool = False,
    optimizer: str = "adamw",
) -> RankMemory:
    """Memory of model states; under Adam 16 bytes a parameter over all ranks (Rajbhandari et al.
    2020, ZeRO, section 3.1 and figure 1).

    Args:
        parameters: Of the whole model.
        world: Ranks.
        stage: Of ZeRO: 0 shares nothing, 1 optimizer states, 2 gradients too, 3 parameters too,
            as ``fully_shard`` does.
        half: Whether parameters and gradients are fp16 or bf16 over an fp32 master copy, as in
            DeepSpeed; else all is fp32, as under autocast.
        optimizer: One of ``MOMENTS``.

    Raises:
        UsageError: A number is out of range.
    """
    for name, value, good in (
        ("parameters", parameters, parameters >= 0),
        ("world", world, world >= 1),
        ("zero", stage, 0 <= stage <= 3),
    ):
        if not good:
            low, high = {"parameters": (0, "…"), "world": (1, "…"), "zero": (0, 3)}[name]
            raise UsageError(f"{name}: expected a number from {low} to {high}, found {value}")
    share = -(-parameters // world)  # of the largest rank
    width = _HALF if half else _FULL
    moments = MOMENTS[optimizer] * _FULL
    return RankMemory(
        parameters=width * (share if stage >= 3 else parameters),
        gradients=width * (share if stage >= 2 else parameters),
        optimizer=(moments + (_FULL if half else 0)) * (share if stage >= 1 else parameters),
        checkpoint=(_FULL + moments) * share,
    )


@dataclass(frozen=True, slots=True)
class Measured:
    """A preset's figures for one task.

    Attributes:
        parameters: Number of them; tied ones count once.
        largest: Number of the largest single parameter.
        unit: Parameters of the largest unit that is gathered as one: a layer, or all but layers.
        buffer_bytes: Of buffers such as running means.
        activation_bytes: What one batch keeps for its backward pass.
    """

    parameters: int
    largest: int
    unit: int
    buffer_bytes: int
    activation_bytes: int


def training_bytes(
    measured: Measured, *, parallel: Parallel = ALONE, world: int = 1, half: bool = False
) -> int:
    """What the training of one rank needs at its peak, torch itself included.

    Args:
        measured: The preset's figures.
        parallel: How it is spread.
        world: Over how many ranks.
        half: Whether it computes in half precision. That counts where parameters are half then;
            under autocast what it saves of activations is not counted on.
    """
    half = half and parallel.masters
    width = _HALF if half else _FULL
    states = memory_per_rank(measured.parameters, world=world, stage=parallel.stage, half=half)
    share = world if parallel.stage else 1
    update = _UPDATE_TEMPORARIES * _FULL * -(-measured.largest // share)
    activations = measured.activation_bytes * width // _FULL
    buckets = min(BUCKET_ELEMENTS, measured.parameters)
    working = parallel.units * measured.unit + parallel.buckets * buckets
    return (
        states.total
        + measured.buffer_bytes
        + max(activations + width * working, update)
        + _RUNTIME_BYTES
    )


def starting_bytes(measured: Measured) -> int:
    """Host memory that a rank takes to build the model, whole and in fp32 however it is spread."""
    return _FULL * measured.parameters + measured.buffer_bytes + _RUNTIME_BYTES


def count_parameters(preset: Preset, task: str) -> int:
    """Exact number of parameters; tied ones count once.

    Raises:
        LabError: The preset names what does not exist.
    """
    with on_meta():
        return sum(p.numel() for p in build(preset, task).parameters())


def measure(preset: Preset, task: str, pretrained: Path | None = None) -> Measured:
    """Count a preset without allocating it; takes seconds for the largest.

    Args:
        preset: What to count.
        task: One of the model's tasks.
        pretrained: A local folder whose configuration is taken.

    Raises:
        LabError: The preset or the folder names what does not exist.
        UsageError: What they say does not go together.
    """
    from asymcheck_lab.drive import blocks

    try:
        with on_meta():
            model: Any = blank(preset, task, pretrained)
            most = positions(model.config)
            if preset.data.context > most:
                raise UsageError(
                    f"{preset.name}: expected a context of at most {most} tokens in [data], for "
                    f"which the model has positions, found {preset.data.context}"
                )
            parameters = list(model.parameters())
            kept = _kept_bytes(model, _batch(preset, task))
    except LabError:
        raise
    except Exception as bad:  # a model raises what it likes about options that it cannot take
        raise UsageError(
            f"{preset.name}: expected options that make a model for {task} and data that fit it, "
            f"found {type(bad).__name__}: {bad}"
        ) from bad
    if preset.recipe.recompute:
        layers = max(1, int(getattr(model.config, "num_hidden_layers", 1)))
        kept = round(kept * (1 / layers + _INPUT_SHARE))
    units = [sum(p.numel() for p in unit.parameters()) for unit in blocks(model)]
    total = sum(p.numel() for p in parameters)
    return Measured(
        parameters=total,
        largest=max(p.numel() for p in parameters),
        unit=max(total - sum(units), *units, 0),
        buffer_bytes=sum(b.nbytes for b in model.buffers()),
        activation_bytes=kept,
    )


def needed_bytes(
    measured: Measured,
    *,
    checkpoints: bool,
    parallel: Parallel = ALONE,
    world: int = 1,
    half: bool = False,
) -> int:
    """Memory for the training of one rank, with the copy that a checkpoint is written from.

    Args:
        measured: The preset's figures.
        checkpoints: Whether there is such a copy.
        parallel: See ``training_bytes``.
        world: See there.
        half: See there.
    """
    training = training_bytes(measured, parallel=parallel, world=world, half=half)
    return training + (saved_bytes(measured, world) if checkpoints else 0)


def saved_bytes(measured: Measured, world: int = 1) -> int:
    """What one of so many ranks saves, and holds a copy of meanwhile."""
    return memory_per_rank(measured.parameters, world=world).checkpoint + measured.buffer_bytes


def refuse_what_cannot_fit(
    preset: Preset,
    task: str,
    *,
    checkpoints: bool,
    device: str = "cpu",
    pretrained: Path | None = None,
    parallel: Parallel = ALONE,
    world: int = 1,
    local: int = 1,
) -> Measured:
    """Say no to a preset that is larger than the memory, before any of it is allocated.

    Args:
        preset: What is to be trained.
        task: One of the model's tasks.
        checkpoints: Whether it saves.
        device: Where.
        pretrained: A local folder whose configuration is taken.
        parallel: How it is spread.
        world: Over how many ranks.
        local: How many of them are on this host.

    Raises:
        UsageError: It is; says what it needs and what there is.
        LabError: See ``measure``.
    """
    measured = measure(preset, task, pretrained)
    half = preset.recipe.precision != "fp32"
    training = training_bytes(measured, parallel=parallel, world=world, half=half)
    saved = saved_bytes(measured, world) if checkpoints else 0
    if device == "cpu":
        # Building is over before a checkpoint's copy is made.
        host = training + saved if world == 1 else max(training + saved, starting_bytes(measured))
        limits = [("memory", local * host, host_bytes())]
    else:
        import torch

        there = int(torch.cuda.get_device_properties(device).total_memory)
        host = max(saved, starting_bytes(measured)) if world > 1 else saved
        limits = [
            (f"memory of {device}", training, there),
            ("memory", local * host, host_bytes()),
        ]
    states = memory_per_rank(
        measured.parameters, world=world, stage=parallel.stage, half=half and parallel.masters
    )
    for what, needed, there in limits:
        if needed > there:
            copy = f", {size_text(saved)} for a checkpoint's copy" if checkpoints else ""
            ranks = f" on {local} of {world} ranks, each" if world > 1 else ""
            raise UsageError(
                f"{preset.name}: {task} with {measured.parameters:,} parameters needs "
                f"{size_text(needed)} of {what}{ranks} ({size_text(states.total)} for parameters, "
                f"gradients and moments, {size_text(measured.activation_bytes)} for activations"
                f"{copy}), found {size_text(there)}: take a smaller size, "
                f"a smaller batch or a larger machine; asymlab sizes shows what each one needs"
            )
    return measured


def host_bytes() -> int:
    """Memory of this machine, or of its control group where that is less."""
    limits = []
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemTotal:"):
            limits.append(int(line.split()[1]) * 1024)
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            limits.append(int((Path("/sys/fs/cgroup") / name).read_text(encoding="ascii")))
        except (OSError, ValueError):  # another version of control groups, or no limit
            continue
    return min(limits)


def _batch(preset: Preset, task: str) -> Mapping[str, Any]:
    import torch

    batch, data = preset.recipe.batch, preset.data
    if task == "image-classification":
        side = data.image_size
        return {
            "pixel_values": torch.empty(batch, data.channels, side, side),
            "labels": torch.empty(batch, dtype=torch.int64),
        }
    ids = torch.empty(batch, data.context, dtype=torch.int64)
    if task == "span-qa":
        place = torch.empty(batch, dtype=torch.int64)
        return {"input_ids": ids, "start_positions": place, "end_positions": place}
    if preset.model == "gpt2":  # without a mask it looks into its positions, which are not there
        mask = torch.empty(batch, 1, data.context, data.context)
        return {"input_ids": ids, "labels": ids, "attention_mask": mask}
    return {"input_ids": ids, "labels": ids}


def _kept_bytes(model: Any, batch: Mapping[str, Any]) -> int:  # noqa: ANN401
    from torch.autograd.graph import saved_tensors_hooks

    own = {p.untyped_storage()._cdata for p in model.parameters()}
    kept: dict[int, Any] = {}

    def keep(tensor: Any) -> Any:  # noqa: ANN401
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage  # held, so that its number is not given out again
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        model(**batch)
    return sum(storage.nbytes() for storage in kept.values())
