"""The table of ``asymlab sizes``."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from asymcheck.rendering import size_text
from asymcheck_lab.presets import Preset, load_preset, sizes_of, task_of
from asymcheck_lab.sizes import host_bytes, measure, memory_per_rank, needed_bytes, saved_bytes


def chosen(models: Iterable[str], size: str | None) -> list[Preset]:
    """Every size of these models, or the one that is asked for.

    Raises:
        LabError: There is none of that name.
    """
    return [
        load_preset(model, name)
        for model in models
        for name in ([size] if size is not None else sizes_of(model))
    ]


def show_sizes(
    console: Console, presets: Iterable[Preset], *, world: int, stage: int, half: bool
) -> None:
    """Parameters and memory of each preset; nothing of them is allocated.

    Raises:
        LabError: A number is out of range.
    """
    memory_per_rank(0, world=world, stage=stage)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("model", "task"):
        table.add_column(heading)
    ranks = f"a rank of {world}, ZeRO-{stage}"
    for heading in ("parameters", "checkpoint", ranks, "it saves", "to train here"):
        table.add_column(heading, justify="right", no_wrap=heading != ranks)
    there = host_bytes()
    for preset in presets:
        task = task_of(preset.model, None)
        measured = measure(preset, task)
        rank = memory_per_rank(measured.parameters, world=world, stage=stage, half=half)
        needed = needed_bytes(measured, checkpoints=True)
        table.add_row(
            preset.name,
            task,
            f"{measured.parameters:,}",
            size_text(saved_bytes(measured)),
            size_text(rank.total),
            size_text(rank.checkpoint),
            size_text(needed) + ("" if needed <= there else " (too much)"),
        )
    console.print(table)
    console.print(
        f"a checkpoint is parameters and two moments in fp32; this machine has {size_text(there)}",
        highlight=False,
    )
