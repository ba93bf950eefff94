"""The six families: from a preset to a Hugging Face model with random weights.

Nothing is downloaded. ``torch`` and ``transformers`` load when a model is built, not before,
so that a wrong name is refused at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asymcheck.errors import nearest
from asymcheck_lab.errors import DataError, UsageError
from asymcheck_lab.presets import Preset

if TYPE_CHECKING:
    import torch

CONFIGS: Mapping[str, str] = {
    "gpt2": "GPT2Config",
    "bert": "BertConfig",
    "roberta": "RobertaConfig",
    "bloom": "BloomConfig",
    "resnet": "ResNetConfig",
    "vit": "ViTConfig",
}
"""The configuration class of each model, in ``transformers``."""

CLASSES: Mapping[tuple[str, str], str] = {
    ("gpt2", "causal-lm"): "GPT2LMHeadModel",
    ("bert", "span-qa"): "BertForQuestionAnswering",
    ("bert", "masked-lm"): "BertForMaskedLM",
    ("roberta", "masked-lm"): "RobertaForMaskedLM",
    ("bloom", "causal-lm"): "BloomForCausalLM",
    ("resnet", "image-classification"): "ResNetForImageClassification",
    ("vit", "image-classification"): "ViTForImageClassification",
}
"""The class of each model for each of its tasks, in ``transformers``."""

# Tokens that stop a generation, which no lab does, lie outside a small vocabulary by default.
_COMMON: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {"bos_token_id": None, "eos_token_id": None, "use_cache": False},
    "bloom": {"use_cache": False},
}


def build(preset: Preset, task: str, pretrained: Path | None = None) -> torch.nn.Module:
    """The model of a preset for a task, in training mode.

    Args:
        preset: What to build.
        task: One of the model's tasks.
        pretrained: A local folder as ``save_pretrained`` writes it: weights and configuration
            are taken from there. ``None`` for weights drawn from torch's generator.

    Raises:
        DataError: The preset names an option that the configuration does not have, or the
            folder is none.
        UsageError: The configuration refuses a value.
    """
    transformers = _transformers()
    kind = getattr(transformers, CLASSES[preset.model, task])
    if pretrained is None:
        return _ready(kind(make_config(preset)), task)
    if not (pretrained / "config.json").is_file():
        raise DataError(
            str(pretrained), expected="a folder with config.json and weights", found="none of them"
        )
    try:
        loaded: torch.nn.Module = kind.from_pretrained(pretrained, local_files_only=True)
    except (OSError, ValueError, RuntimeError) as failure:
        raise DataError(
            str(pretrained), expected=f"weights of a {kind.__name__}", found=str(failure)
        ) from failure
    return _ready(loaded, task)


def make_config(preset: Preset) -> Any:  # noqa: ANN401  transformers has no types
    """The Hugging Face configuration of a preset.

    Raises:
        DataError: The preset names an option that it does not have.
        UsageError: It refuses a value.
    """
    kind = getattr(_transformers(), CONFIGS[preset.model])
    known = {*kind().to_dict(), *kind.attribute_map, "num_labels"}
    for key in preset.config:
        if key not in known:
            raise DataError(
                f"{preset.name}, table [model]",
                expected=f"an option of {kind.__name__}",
                found=f"{key!r}{nearest(key, known)}",
            )
    try:
        return kind(**{**_COMMON.get(preset.model, {}), **preset.config})
    except (TypeError, ValueError) as bad:
        raise UsageError(f"{preset.name}: {kind.__name__} refuses the options: {bad}") from bad
    except Exception as bad:  # newer releases raise an error class of their own
        if type(bad).__module__.partition(".")[0] != "huggingface_hub":
            raise
        raise UsageError(f"{preset.name}: {kind.__name__} refuses the options: {bad}") from bad


def _ready(model: Any, task: str) -> torch.nn.Module:  # noqa: ANN401
    if task == "causal-lm":  # without the name of their loss some warn, and take this one
        model.loss_type = "ForCausalLM"
    ready: torch.nn.Module = model.train()
    return ready


@contextmanager
def on_meta() -> Iterator[None]:
    """Models that are built inside have shapes and no memory."""
    import torch

    with torch.device("meta"):
        yield


def _transformers() -> Any:  # noqa: ANN401  transformers has no types
    # Read once, when the hub client loads: no request may leave, whatever the code asks for.
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    return transformers
