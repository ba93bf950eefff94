"""The presets: one TOML for each model and size, read without torch.

A preset has three tables. ``[model]`` holds options of the Hugging Face configuration,
``[data]`` says how data becomes samples, ``[recipe]`` how they are trained on. A key that
nothing knows is an error, so that a misspelt one is never silently without effect.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from math import inf
from pathlib import Path
from typing import Any, TypeVar

from asymcheck.errors import nearest
from asymcheck_lab.errors import DataError, UsageError

TASKS: Mapping[str, tuple[str, ...]] = {
    "gpt2": ("causal-lm",),
    "bert": ("span-qa", "masked-lm"),
    "roberta": ("masked-lm",),
    "bloom": ("causal-lm",),
    "resnet": ("image-classification",),
    "vit": ("image-classification",),
}
"""The models, and the tasks of each; the first is taken when none is asked for."""

PRECISIONS = ("fp32", "bf16", "fp16")

# What is not here may be any number from 0 on; the smallest norm still lets something through.
_RANGES: Mapping[str, tuple[float, float]] = {
    "batch": (1, inf),
    "accumulate": (1, inf),
    "clip_norm": (1e-9, inf),
    "noise": (0, 1),
    "channels": (1, 3),
}

_FOLDER = Path(__file__).parent / "presets"
_ORDER = ("tiny", "demo", "50", "152", "base", "560m", "large", "10b", "20b")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """How data becomes samples.

    Attributes:
        vocabulary: Entries of the tokenizer that is trained on the data; 0 for bytes, which
            need none.
        context: Tokens of a window.
        stride: Tokens that two windows of one text share, in span QA.
        image_size: Pixels of an image's side.
        channels: 1 for grey, 3 for colour.
    """

    vocabulary: int = 0
    context: int = 0
    stride: int = 0
    image_size: int = 0
    channels: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeSettings:
    """How a preset is trained.

    Attributes:
        batch: Samples of one forward pass.
        accumulate: Forward passes of an update.
        learning_rate: After the warm-up.
        warmup_steps: Updates until it is reached; constant from then on.
        weight_decay: Of AdamW.
        clip_norm: Largest norm of the gradients, all together; ``inf`` to let them be.
        precision: One of ``PRECISIONS``; bf16 and fp16 by autocast, over fp32 parameters.
        noise: Share of input tokens that is replaced in three batches of four; for causal-lm.
        recompute: Forget activations and compute them again in the backward pass.
        evaluate_batches: Held-out batches that an evaluation takes at most.
    """

    batch: int
    accumulate: int = 1
    learning_rate: float
    warmup_steps: int
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    precision: str = "fp32"
    noise: float = 0.0
    recompute: bool = False
    evaluate_batches: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """One size of a model, with all that its training needs.

    Attributes:
        name: Model and size, or model and file; for messages.
        model: Name of the model.
        config: Options of the Hugging Face configuration, by their names there.
        data: See ``DataSettings``.
        recipe: See ``RecipeSettings``.
    """

    name: str
    model: str
    config: Mapping[str, Any]
    data: DataSettings
    recipe: RecipeSettings


def sizes_of(model: str) -> list[str]:
    """The sizes of a model, the smallest first.

    Raises:
        UsageError: There is no such model; names the nearest.
    """
    if model not in TASKS:
        raise UsageError(
            f"model: expected one of {sorted(TASKS)}, found {model!r}{nearest(model, TASKS)}"
        )
    return sorted((p.stem for p in (_FOLDER / model).glob("*.toml")), key=_ORDER.index)


def load_preset(model: str, size: str) -> Preset:
    """The preset of a model and a size.

    Args:
        model: One of ``TASKS``.
        size: One of ``sizes_of(model)``, or the path of a TOML file of one's own.

    Raises:
        UsageError: There is none of that name; names the nearest.
        DataError: The file cannot be read, or has a wrong or unknown key.
    """
    sizes = sizes_of(model)
    if size.endswith(".toml"):
        return _read(model, Path(size), f"{model} of {size}")
    if size not in sizes:
        raise UsageError(f"size: {model} has {sizes}, found {size!r}{nearest(size, sizes)}")
    return _shipped(model, size)


@cache
def _shipped(model: str, size: str) -> Preset:
    return _read(model, _FOLDER / model / f"{size}.toml", f"{model} {size}")


def task_of(model: str, task: str | None) -> str:
    """``task``, or the first one of the model.

    Raises:
        UsageError: The model has no such task; names the nearest.
    """
    tasks = TASKS[model]
    if task is None:
        return tasks[0]
    if task not in tasks:
        raise UsageError(f"task: {model} has {list(tasks)}, found {task!r}{nearest(task, tasks)}")
    return task


def _read(model: str, path: Path, name: str) -> Preset:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as failure:
        raise DataError(
            str(path), expected="a readable TOML file", found=failure.strerror or str(failure)
        ) from failure
    except ValueError as bad:  # TOML says line and column itself
        raise DataError(str(path), expected="TOML in UTF-8", found=str(bad)) from None
    known = ("model", "data", "recipe")
    for table, value in tables.items():
        if table not in known or not isinstance(value, dict):
            raise DataError(
                str(path),
                expected=f"the tables {', '.join(known)}",
                found=f"{table!r}{nearest(table, known)}",
            )
    return Preset(
        name=name,
        model=model,
        config=tables.get("model", {}),
        data=_settings(DataSettings, tables.get("data", {}), f"{path}, table [data]"),
        recipe=_settings(RecipeSettings, tables.get("recipe", {}), f"{path}, table [recipe]"),
    )


T = TypeVar("T", DataSettings, RecipeSettings)


def _settings(kind: type[T], values: Mapping[str, Any], where: str) -> T:
    known = {field.name: field for field in fields(kind)}
    for key, value in values.items():
        if key not in known:
            raise DataError(
                where, expected=f"one of {sorted(known)}", found=f"{key!r}{nearest(key, known)}"
            )
        wanted = known[key].type
        accepted = "int" if wanted == "float" and type(value) is int else wanted
        if type(value).__name__ != accepted:
            raise DataError(where, expected=f"{key} as {wanted}", found=repr(value))
        low, high = _RANGES.get(key, (0, inf))
        if wanted in ("int", "float") and not low <= value <= high:  # no number is in no range
            upper = "" if high == inf else f" and at most {high}"
            raise DataError(where, expected=f"{key} of at least {low}{upper}", found=repr(value))
        if key == "channels" and value == 2:
            raise DataError(where, expected="channels: 1 for grey or 3 for colour", found="2")
    missing = [n for n, f in known.items() if f.default is MISSING and n not in values]
    if missing:
        raise DataError(where, expected=f"the keys {missing}", found=f"only {sorted(values)}")
    return kind(**values)
