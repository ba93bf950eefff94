"""Small GPT-2 models on bytes, as benchmarks use them; what ``train`` trains is in ``presets``.

Every model is built from a Hugging Face configuration with random weights. Nothing is
downloaded. ``torch`` and ``transformers`` load when a model is built, not before.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from asymcheck.errors import nearest
from asymcheck_lab.data import VOCABULARY
from asymcheck_lab.errors import UsageError
from asymcheck_lab.presets import load_preset

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """One size of a model, with what its recipe needs.

    Attributes:
        context: Tokens of a window.
        batch: Windows of a batch.
        learning_rate: After the warm-up.
        warmup_steps: Updates until the learning rate is reached.
        config: Further options of the family's configuration.
    """

    context: int
    batch: int
    learning_rate: float
    warmup_steps: int
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Family:
    """One kind of model.

    Attributes:
        build: Makes the model of a size, with weights drawn from torch's generator.
        loss: ``(model, inputs, labels)`` to the loss, a tensor of one element.
        sizes: By name, the smallest first.
    """

    build: Callable[[Size], torch.nn.Module]
    loss: Callable[[torch.nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]
    sizes: Mapping[str, Size]


def find(model: str, size: str) -> tuple[Family, Size]:
    """The family and size of these names.

    Raises:
        UsageError: There is none; names the nearest.
    """
    family = FAMILIES.get(model)
    if family is None:
        raise UsageError(
            f"model: expected one of {sorted(FAMILIES)}, found {model!r}{nearest(model, FAMILIES)}"
        )
    found = family.sizes.get(size)
    if found is None:
        raise UsageError(
            f"size: {model} has {list(family.sizes)}, found {size!r}{nearest(size, family.sizes)}"
        )
    return family, found


def _build_gpt2(size: Size) -> torch.nn.Module:
    # Read once, when the hub client loads: no request may leave, whatever the code asks for.
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import GPT2Config, GPT2LMHeadModel

    options: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "n_positions": size.context,
        "bos_token_id": None,
        "eos_token_id": None,
        "use_cache": False,
        **size.config,
    }
    model: torch.nn.Module = GPT2LMHeadModel(GPT2Config(**options))
    return model.train()


def _causal_loss(
    model: torch.nn.Module, inputs: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """Cross entropy of each token given those before it."""
    from torch.nn.functional import cross_entropy

    logits: torch.Tensor = model(input_ids=inputs).logits
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def _size(name: str) -> Size:
    preset = load_preset("gpt2", name)
    return Size(
        context=preset.data.context,
        batch=preset.recipe.batch,
        learning_rate=preset.recipe.learning_rate,
        warmup_steps=preset.recipe.warmup_steps,
        config=dict(preset.config),
    )


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "gpt2": Family(
            build=_build_gpt2,
            loss=_causal_loss,
            sizes={name: _size(name) for name in ("tiny", "demo")},
        ),
    }
)
"""Every family by name."""
