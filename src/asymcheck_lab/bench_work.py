"""What a measured run trains: a model, its data and its optimizer, on one thread."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Protocol

from asymcheck.errors import nearest
from asymcheck_lab.errors import RunError, UsageError
from asymcheck_lab.presets import DataSettings, Preset, load_preset, sizes_of, task_of

if TYPE_CHECKING:
    import torch

    from asymcheck_lab.models import Size
    from asymcheck_lab.tasks import Data

GPT2_124M = "124m"
"""A size of GPT-2 beside the presets: its defaults, one window of 128 tokens a step."""

_IMPORTED = {
    "ddp": ("torch._dynamo",),  # which DDP imports
    "fsdp2": ("torch.distributed.fsdp",),
}


class Workload(Protocol):
    """A model that is trained.

    Attributes:
        model: The live model.
        optimizer: The live optimizer.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer

    def forward_and_backward(self) -> None:
        """Up to the gradients of one update."""
        ...

    def update(self) -> None:
        """Use the gradients and forget them."""
        ...


class Windows:
    """GPT-2 on windows of one text, without a schedule: what ``make bench`` trains.

    Args:
        size: One that ``size_of`` knows.
        seed: Of weights and order.
    """

    def __init__(self, size: str, seed: int) -> None:
        import torch

        from asymcheck_lab.data import BatchLoader, load_text
        from asymcheck_lab.models import FAMILIES
        from asymcheck_lab.recipe import seed_everything

        seed_everything(seed)
        self._family = FAMILIES["gpt2"]
        made = size_of(size)
        self._batches = BatchLoader(load_text(), context=made.context, batch=made.batch, seed=seed)
        self.model = self._family.build(made)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=made.learning_rate
        )

    def forward_and_backward(self) -> None:
        """See ``Workload``."""
        import torch

        tokens = torch.from_numpy(next(self._batches))
        self._family.loss(self.model, tokens, tokens).backward()

    def update(self) -> None:
        """See ``Workload``."""
        self.optimizer.step()
        self.optimizer.zero_grad()


class Trained:
    """A preset with its first task and the data that ship with the lab, as ``asymlab train``.

    Args:
        model: Name of a model.
        size: One of its presets.
        seed: Of weights and order.
        parallel: How it is spread over the ranks of the process group that there is.

    Raises:
        LabError: There is no such preset, or it does not fit into memory.
    """

    def __init__(self, model: str, size: str, seed: int, parallel: str = "none") -> None:
        from asymcheck_lab.recipe import Recipe, seed_everything
        from asymcheck_lab.world import join

        task, data = _opened(model, size)
        seed_everything(seed)
        preset = _preset_of(model, size)
        with join(parallel, "cpu") as world:
            self._recipe = Recipe(preset, task, data, seed=seed, parallel=parallel, world=world)
        self.model = self._recipe.model
        self.optimizer: torch.optim.Optimizer = self._recipe.optimizer

    def forward_and_backward(self) -> None:
        """See ``Workload``.

        Raises:
            RunError: The loss is no number.
        """
        loss = self._recipe.forward()
        if not math.isfinite(loss):
            raise RunError(f"the loss is {loss}")

    def update(self) -> None:
        """See ``Workload``."""
        self._recipe.update()


def make_workload(model: str, size: str, seed: int, parallel: str = "none") -> Workload:
    """The workload of a run; sets every random number generator.

    Args:
        model: Name of a model, or nothing for the one of ``make bench``.
        size: Of the model.
        seed: Of weights and order.
        parallel: How it is spread over the ranks of the process group that there is.

    Raises:
        LabError: There is no such model or size, or it does not fit into memory.
    """
    if not model or ((model, size) == ("gpt2", GPT2_124M) and parallel == "none"):
        return Windows(size, seed)
    return Trained(model, size, seed, parallel)


def prepare_workload(model: str, size: str, parallel: str = "none") -> None:
    """Import and read whatever the workload needs; makes no tensor and starts no thread.

    Raises:
        LabError: As ``make_workload``.
    """
    from asymcheck_lab.families import build, on_meta

    for module in _IMPORTED.get(parallel, ()):
        importlib.import_module(module)
    task, _ = _opened(model, size)
    with on_meta():
        build(_preset_of(model, size), task)


def _preset_of(model: str, size: str) -> Preset:
    """A preset; ``124m`` is GPT-2's ``base`` on bytes, with the window and batch of ``Windows``."""
    if (model, size) != ("gpt2", GPT2_124M):
        return load_preset(model, size)
    base, made = load_preset("gpt2", "base"), size_of(size)
    recipe = replace(base.recipe, batch=made.batch, learning_rate=made.learning_rate)
    return replace(base, data=DataSettings(context=made.context), recipe=recipe)


def sizes_to_compare(model: str) -> list[str]:
    """Sizes of a model that a comparison knows.

    Raises:
        UsageError: There is no such model; names the nearest.
    """
    return [*sizes_of(model), *([GPT2_124M] if model == "gpt2" else [])]


@cache
def _opened(model: str, size: str) -> tuple[str, Data]:
    from asymcheck_lab.sizes import refuse_what_cannot_fit
    from asymcheck_lab.tasks import open_data

    preset, task = _preset_of(model, size), task_of(model, None)
    refuse_what_cannot_fit(preset, task, checkpoints=True)
    return task, open_data(preset, task)


def size_of(name: str) -> Size:
    """The model that a ``--size`` names.

    Raises:
        UsageError: None.
    """
    from asymcheck_lab.models import Size

    sizes = {
        # GPT-2 as its configuration's defaults make it.
        GPT2_124M: Size(
            context=128,
            batch=1,
            learning_rate=1e-4,
            warmup_steps=1,
            config={"vocab_size": 50257, "n_positions": 1024},
        ),
        # For tests: small, with tensors that are large enough to be copied lazily.
        "tiny": Size(
            context=32,
            batch=2,
            learning_rate=1e-3,
            warmup_steps=1,
            config={"n_layer": 1, "n_embd": 128, "n_head": 2},
        ),
    }
    if name not in sizes:
        raise UsageError(
            f"size: expected one of {list(sizes)}, found {name!r}{nearest(name, sizes)}"
        )
    return sizes[name]
