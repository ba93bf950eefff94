"""One command for each preset: ``python -m asymcheck_lab.experiments FOLDER`` writes them."""

from __future__ import annotations

import sys
from pathlib import Path

from asymcheck.rendering import size_text
from asymcheck_lab.presets import TASKS, load_preset, sizes_of, task_of
from asymcheck_lab.sizes import measure, memory_per_rank, needed_bytes

_STEPS, _EVERY = {"tiny": (200, 20), "demo": (200, 20)}, (1000, 50)
_STEP_OF = 2**28


def scripts() -> dict[str, str]:
    """Path below the folder to content, for every preset.

    The memory is rounded up to quarters of a GiB: what a forward pass keeps differs a little
    between releases of the libraries.
    """
    return {
        f"{model}/{size}.sh": _script(model, size) for model in TASKS for size in sizes_of(model)
    }


def write(folder: Path) -> None:
    """Write every script, executable."""
    for name, text in scripts().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)


def _script(model: str, size: str) -> str:
    preset, task = load_preset(model, size), task_of(model, None)
    measured = measure(preset, task)
    steps, every = _STEPS.get(size, _EVERY)
    needed = -(-needed_bytes(measured, checkpoints=True) // _STEP_OF) * _STEP_OF
    lines = [
        "#!/bin/sh",
        f"# {preset.name}: {task}, {measured.parameters:,} parameters.",
        f"# Expected memory: {size_text(needed)} on one rank in fp32, with the copy that a",
        f"# checkpoint is written from. A checkpoint: {size_text(measured.checkpoint_bytes)}.",
    ]
    if size.endswith("0b"):
        rank = memory_per_rank(measured.parameters, world=8, stage=3, half=True)
        holds, saves = size_text(rank.total), size_text(rank.checkpoint)
        lines += [
            f"# On 8 ranks with ZeRO-3 and half precision each holds {holds} and saves",
            f"# {saves}. The name counts parameters and two moments.",
        ]
    command = f"exec asymlab train {model} --size {size} --steps {steps} --every {every}"
    return "\n".join([*lines, f'{command} --run runs/{model}-{size} "$@"', ""])


if __name__ == "__main__":
    write(Path(sys.argv[1]))
