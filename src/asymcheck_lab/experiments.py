"""One command for each preset: ``python -m asymcheck_lab.experiments FOLDER`` writes them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from asymcheck.rendering import size_text
from asymcheck_lab.parallel import PARALLELS
from asymcheck_lab.presets import TASKS, load_preset, sizes_of, task_of
from asymcheck_lab.sizes import Measured, measure, needed_bytes, saved_bytes, starting_bytes

_STEPS, _EVERY = {"tiny": (200, 20), "demo": (200, 20)}, (1000, 50)
_STEP_OF = 2**28
_WORLD = 8
_LARGE = ("10b", "20b")


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
    large = size in _LARGE
    lines = [
        "#!/bin/sh",
        f"# {preset.name}: {task}, {measured.parameters:,} parameters; a checkpoint is "
        f"{size_text(saved_bytes(measured))}.",
        *(["# The name counts parameters and two moments."] if large else []),
        "#",
        "# Expected memory of a rank with the preset's batch and the copy that a checkpoint is",
        "# written from, and what of a checkpoint it saves:",
        "#",
        *(f"# {row}" for row in memory_rows(measured, _LARGE_ROWS if large else _ROWS)),
        "#",
        "# Each of several ranks builds the whole model before it keeps its share, in",
        f"# {size_text(_rounded(starting_bytes(measured)))} of host memory. "
        "--hostfile FILE starts ranks on several hosts.",
    ]
    command = f"exec asymlab train {model} --size {size} --steps {steps} --every {every}"
    spread = " --parallel zero3 --precision bf16" if large else ""
    return "\n".join([*lines, f'{command} --run runs/{model}-{size}{spread} "$@"', ""])


_ROWS = [("none", 1), *((name, _WORLD) for name in PARALLELS if name != "none")]
_LARGE_ROWS = [*_ROWS, ("zero3", 4 * _WORLD)]


def memory_rows(measured: Measured, ways: list[tuple[str, int]]) -> Iterator[str]:
    """A table of what a rank holds and saves, line by line.

    Args:
        measured: The preset's figures.
        ways: Names of ``PARALLELS``, each with a number of ranks.
    """
    yield f"{'ranks':>5}  {'--parallel':<10}  {'--precision':<11}  {'holds':>10}  {'saves':>10}"
    for name, world in ways:
        parallel = PARALLELS[name]
        half = parallel.masters
        holds = needed_bytes(measured, checkpoints=True, parallel=parallel, world=world, half=half)
        yield (
            f"{world:>5}  {name:<10}  {'bf16' if half else 'fp32':<11}  "
            f"{size_text(_rounded(holds)):>10}  {size_text(saved_bytes(measured, world)):>10}"
        )


def _rounded(count: int) -> int:
    return -(-count // _STEP_OF) * _STEP_OF


if __name__ == "__main__":
    write(Path(sys.argv[1]))
