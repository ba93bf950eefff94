"""The one recipe: precision, accumulation, clipping, warm-up, recomputation, evaluation."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from asymcheck_lab.data import VOCABULARY
from asymcheck_lab.drive import DRIVES
from asymcheck_lab.errors import UsageError
from asymcheck_lab.families import build
from asymcheck_lab.loading import Loader, Sample, in_order
from asymcheck_lab.presets import Preset
from asymcheck_lab.tasks import Data
from asymcheck_lab.texts import IGNORED
from asymcheck_lab.world import World

_CLEAN_BATCHES = 0.25
_BYTE_NOISE = 0.01


class Recipe:
    """A model and all that trains it; every piece that a resumed run needs is in ``state``.

    Weights are drawn from torch's generator, so it is to be seeded before, on every rank alike.
    With several ranks the generators are seeded anew after that, each rank's in its own way.

    Args:
        preset: The model and how it is trained.
        task: One of the model's tasks.
        data: What it is trained on.
        seed: For order, masks and shifts of the data.
        workers: Threads that make batches ahead; ``close`` ends them.
        device: Where the model is trained, where ``world`` is not given.
        pretrained: A local folder of weights, ``None`` for random ones.
        parallel: How the model is spread, one of ``PARALLELS``.
        world: This rank among all; ``None`` for one that is alone.

    Raises:
        LabError: Something does not fit together; names it.
    """

    def __init__(
        self,
        preset: Preset,
        task: str,
        data: Data,
        *,
        seed: int = 0,
        workers: int = 0,
        device: str = "cpu",
        pretrained: Path | None = None,
        parallel: str = "none",
        world: World | None = None,
    ) -> None:
        recipe = preset.recipe
        self._world = world = world or World(device=device)
        self._settings = recipe
        self._data = data
        self._seed = seed
        self._device = torch.device(world.device)
        self.loader = Loader(
            data.train,
            batch=recipe.batch,
            seed=seed,
            workers=workers,
            rank=world.rank,
            ranks=world.size,
        )
        model = build(preset, task, pretrained)
        if recipe.recompute:
            recompute(model, preset.name)
        self._drive = DRIVES[parallel](model.to(self._device), recipe, world)
        self.model = self._drive.model
        self.optimizer = self._drive.optimizer
        self.scaler = self._drive.scaler
        warmup = max(1, recipe.warmup_steps)
        # Constant after the warm-up: a run that is made longer goes on as if it always was.
        self.scheduler = torch.optim.lr_scheduler.LinearLR(
            self.optimizer, start_factor=1 / warmup, total_iters=warmup
        )
        if world.size > 1:
            own = np.random.SeedSequence([seed, world.rank]).generate_state(1)
            seed_everything(int(own[0]))

    @property
    def bare(self) -> torch.nn.Module:
        """The model with its own names, without what spreads it over ranks."""
        return self._drive.bare

    def state(self) -> dict[str, Any]:
        """What a checkpoint is made of, by name."""
        scaler = {"scaler": self.scaler} if self.scaler.is_enabled() else {}
        return {
            "model": self.model,
            "optim": self.optimizer,
            "sched": self.scheduler,
            "data": self.loader,
            **scaler,
        }

    def values(self) -> dict[str, Mapping[str, Any]]:
        """State dicts of all that is not model and optimizer, for a fingerprint."""
        return {
            name: piece.state_dict()
            for name, piece in self.state().items()
            if name not in ("model", "optim")
        }

    def forward(self) -> float:
        """Forward and backward of as many batches as an update takes; their mean loss.

        It is the mean over the ranks, the same on each. Gradients are left in the parameters. A
        loss that is no number comes back at once, before its backward.
        """
        total = 0.0
        for _ in range(self._settings.accumulate):
            with self._drive.autocast():
                loss = self.model(**self._batch()).loss / self._settings.accumulate
            value = self._world.mean(loss.item())
            total += value
            if not np.isfinite(value):
                break
            self._drive.backward(loss)
        return total

    def update(self) -> None:
        """Clip and use the gradients, then forget them; a step of optimizer and scheduler.

        Where a scaler finds that fp16 overflowed it leaves the update out, and the warm-up does
        not go on.

        Raises:
            RunError: Without a scaler, a gradient is no number; no update was made of it.
        """
        if self._drive.update():
            self.scheduler.step()

    def evaluate(self) -> dict[str, float]:
        """Loss and accuracy on held-out samples; takes nothing from any generator.

        Accuracy is the share of classes, of hidden or next tokens, or of spans with both
        ends, that are guessed right. Empty where too few samples are held out for a batch.
        """
        batch, most = self._settings.batch, self._settings.evaluate_batches
        losses, right, asked = [], 0, 0
        self.model.eval()
        try:
            with torch.no_grad(), self._drive.autocast():
                for made in in_order(self._data.held, batch=batch, most=most, seed=self._seed):
                    sample = self._to_device(made)
                    out = self.model(**sample)
                    losses.append(out.loss.item())
                    good, of = _right(out, sample)
                    right, asked = right + good, asked + of
        finally:
            self.model.train()
        if not losses:
            return {}
        return {"loss": sum(losses) / len(losses), "accuracy": right / max(1, asked)}

    def close(self) -> None:
        """End the loader's threads."""
        self.loader.close()

    def _batch(self) -> Mapping[str, torch.Tensor]:
        made = next(self.loader)
        if self._settings.noise:
            inputs, labels = vary(made["input_ids"], self._data.vocabulary, self._settings.noise)
            return {
                "input_ids": inputs.to(self._device),
                "labels": labels.to(self._device),
            }
        return self._to_device(made)

    def _to_device(self, made: Sample) -> dict[str, torch.Tensor]:
        tensors = {key: torch.from_numpy(value) for key, value in made.items()}
        floats = self._drive.floats
        return {
            key: tensor.to(self._device, floats if tensor.is_floating_point() else None)
            for key, tensor in tensors.items()
        }


def recompute(model: torch.nn.Module, name: str) -> None:
    """Let a model forget activations, and compute them again in its backward pass.

    Raises:
        UsageError: This kind of model cannot: ``BatchNorm`` would count each batch twice.
    """
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise UsageError(f"recompute: {name} cannot; leave it out")
    new, old = "activation_checkpointing_enable", "gradient_checkpointing_enable"
    enable: Any = getattr(model, new, None) or getattr(model, old)
    enable({"use_reentrant": False})


def check_precision(precision: str, device: str, *, masters: bool = False) -> None:
    """Refuse what a device does not have.

    Args:
        precision: One of ``PRECISIONS``.
        device: ``cpu`` or ``cuda``.
        masters: Whether half precision is that of DeepSpeed, which has no fp16 on a CPU.

    Raises:
        UsageError: There is no such device, or it lacks the precision.
    """
    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise UsageError(f"device: expected cpu or cuda, found {device!r}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UsageError("device: expected one that this machine has, found 'cuda'")
    if kind == "cuda" and precision == "bf16" and not torch.cuda.is_bf16_supported():
        raise UsageError("precision: bf16 is not to be had on this device; take fp16")
    if kind == "cpu" and precision == "fp16" and masters:
        raise UsageError("precision: DeepSpeed has no fp16 on a CPU; take bf16 or fp32")


def vary(
    batch: npt.NDArray[np.int64], vocabulary: int = VOCABULARY, share: float = _BYTE_NOISE
) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch as the model sees it, and what it should predict.

    A share of the input tokens is replaced, as NumPy's generator says, but for every fourth
    batch or so, which Python's leaves clean. With dropout from torch's generator, each of the
    three decides over the loss: one that is not restored shows at once. Every step does the
    same amount of work, so that times can be compared.

    Args:
        batch: ``[batch, context]`` tokens.
        vocabulary: Tokens to replace them with.
        share: How many are replaced.
    """
    inputs = batch
    if random.random() >= _CLEAN_BATCHES:
        noise = np.random.random(batch.shape) < share
        inputs = np.where(noise, np.random.randint(0, vocabulary, batch.shape), batch)
    return torch.from_numpy(inputs), torch.from_numpy(batch)


def seed_everything(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _right(out: Any, sample: Mapping[str, torch.Tensor]) -> tuple[int, int]:  # noqa: ANN401
    if "start_positions" in sample:
        both = (out.start_logits.argmax(-1) == sample["start_positions"]) & (
            out.end_logits.argmax(-1) == sample["end_positions"]
        )
        return int(both.sum()), len(both)
    guessed, labels = out.logits.argmax(-1), sample["labels"]
    if labels.dim() == 2 and not (labels == IGNORED).any():  # each token from those before it
        guessed, labels = guessed[:, :-1], labels[:, 1:]
    counted = labels != IGNORED
    return int((guessed == labels)[counted].sum()), int(counted.sum())
