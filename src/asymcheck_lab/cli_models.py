"""Commands beside ``train``: how large each preset is, and a picture of a training."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from asymcheck_lab.errors import UsageError


def add_commands(
    app: typer.Typer, readable_errors: Callable[[], AbstractContextManager[None]]
) -> None:
    """Add ``sizes`` and ``plot``.

    Args:
        app: What they are added to.
        readable_errors: Ends with one message and an exit code inside its ``with``.
    """

    @app.command()
    def sizes(
        model: Annotated[
            str | None,
            typer.Argument(help="gpt2, bert, roberta, bloom, resnet, vit [default: all]"),
        ] = None,
        size: Annotated[
            str | None, typer.Option(help="One size, or FILE.toml [default: all]")
        ] = None,
        world: Annotated[int, typer.Option(help="Ranks that share the model")] = 1,
        zero: Annotated[int, typer.Option(help="Stage of ZeRO, 0 to 3")] = 0,
        half: Annotated[
            bool, typer.Option("--half", help="Half-precision parameters over an fp32 master copy")
        ] = False,
    ) -> None:
        """Count parameters and memory of the presets; nothing is allocated."""
        with readable_errors():
            from asymcheck_lab.presets import TASKS
            from asymcheck_lab.size_report import chosen, show_sizes

            if size is not None and model is None:
                raise UsageError("size: expected a model with it, found none")
            presets = chosen([model] if model else TASKS, size)
            show_sizes(Console(), presets, world=world, stage=zero, half=half)

    @app.command()
    def plot(
        log: Annotated[Path, typer.Argument(help="The JSON log of a training")],
        out: Annotated[Path, typer.Option(help="The picture, PNG or SVG")] = Path("loss.png"),
        title: Annotated[str, typer.Option(help="Above the picture")] = "",
    ) -> None:
        """Draw the loss of a training, and what evaluations found."""
        with readable_errors():
            from asymcheck_lab.plots import plot_loss
            from asymcheck_lab.record import read_log

            plot_loss(read_log(log), out, title)
            typer.echo(str(out))
