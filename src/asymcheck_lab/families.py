"""The six families: from a preset to a Hugging Face model with random weights.

Nothing is downloaded. ``torch`` and ``transformers`` load when a model is built, not before,
so that a wrong name is refused at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import inf
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
    """The model of a preset for a task, in fp32 and in training mode.

    Args:
        preset: What to build.
        task: One of the model's tasks.
        pretrained: A local folder as ``save_pretrained`` writes it: weights and configuration
            are taken from there. ``None`` for weights drawn from torch's generator.

    Raises:
        DataError: The preset names an option that the configuration does not have, or the
            folder holds no such model.
        UsageError: The configuration refuses a value.
    """
    if pretrained is None:
        return blank(preset, task)
    import torch

    kind = getattr(_transformers(), CLASSES[preset.model, task])
    config = make_config(preset, pretrained)
    try:  # in fp32, whatever the weights were saved in: the optimizer's are fp32 too
        loaded: torch.nn.Module = kind.from_pretrained(
            pretrained, config=config, local_files_only=True, dtype=torch.float32
        )
    except Exception as failure:  # readers of weights have error classes of their own
        raise DataError(
            str(pretrained), expected=f"weights of a {kind.__name__}", found=str(failure)
        ) from failure
    return _ready(loaded, task)


def blank(preset: Preset, task: str, pretrained: Path | None = None) -> torch.nn.Module:
    """As ``build``, but with weights drawn from torch's generator in any case.

    Raises:
        LabError: See ``build``.
    """
    kind = getattr(_transformers(), CLASSES[preset.model, task])
    return _ready(kind(make_config(preset, pretrained)), task)


def make_config(preset: Preset, pretrained: Path | None = None) -> Any:  # noqa: ANN401  no types
    """The Hugging Face configuration of a preset, or of a local folder in its place.

    Raises:
        DataError: The preset names an option that it does not have, or the folder holds another
            kind of model or none.
        UsageError: It refuses a value.
    """
    kind = getattr(_transformers(), CONFIGS[preset.model])
    if pretrained is not None:
        return _config_of(pretrained, kind, _COMMON.get(preset.model, {}))
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


def _config_of(folder: Path, kind: Any, changes: Mapping[str, Any]) -> Any:  # noqa: ANN401
    path = folder / "config.json"
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        found = said.get("model_type")
    except (OSError, ValueError, AttributeError) as failure:
        raise DataError(
            str(folder), expected="a folder with config.json and weights", found=str(failure)
        ) from failure
    if found != kind.model_type:  # transformers would only warn, and draw the weights
        raise DataError(str(path), expected=f"model_type {kind.model_type!r}", found=repr(found))
    try:
        return kind.from_pretrained(folder, local_files_only=True, **changes)
    except Exception as failure:  # newer releases raise error classes of their own
        raise DataError(
            str(path), expected=f"options of {kind.__name__}", found=str(failure)
        ) from failure


def positions(config: Any) -> float:  # noqa: ANN401  transformers has no types
    """Tokens that a window of this configuration's model may have; ``inf`` without a limit."""
    most = getattr(config, "max_position_embeddings", inf)
    # RoBERTa's begin after that of the token that fills up.
    return most - config.pad_token_id - 1 if config.model_type == "roberta" else most


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
