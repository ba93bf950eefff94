"""The command ``report``: a page that compares all systems over all models."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated

import typer


def add_report(
    app: typer.Typer, readable_errors: Callable[[], AbstractContextManager[None]]
) -> None:
    """Add ``report``.

    Args:
        app: What it is added to.
        readable_errors: Ends with one message and an exit code inside its ``with``.
    """

    @app.command()
    def report(
        results: Annotated[
            list[Path] | None,
            typer.Argument(
                help="Files of asymlab bench, or folders with bench*.jsonl [default: results]"
            ),
        ] = None,
        out: Annotated[Path, typer.Option(help="Folder of the page and its pictures")] = Path(
            "runs/report"
        ),
        all_machines: Annotated[
            bool,
            typer.Option("--all-machines", help="Show results of several machines, apart"),
        ] = False,
    ) -> None:
        """Make one HTML page that compares systems over all models, from results of bench."""
        with readable_errors():
            from asymcheck_lab.page import write_page

            for path in write_page(results or [Path("results")], out, all_machines=all_machines):
                typer.echo(str(path))
