"""The commands about reliability: ``run`` supervises, ``chaos`` and ``soak`` try failures."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated

import typer


def add_run(app: typer.Typer, readable_errors: Callable[[], AbstractContextManager[None]]) -> None:
    """Add ``run``.

    Args:
        app: What it is added to.
        readable_errors: Ends with one message and an exit code inside its ``with``.
    """

    @app.command(context_settings={"allow_interspersed_args": False})
    def run(
        command: Annotated[
            list[str] | None,
            typer.Argument(metavar="-- COMMAND...", help="What trains, as torchrun train.py"),
        ] = None,
        max_restarts: Annotated[
            int, typer.Option(min=0, help="Starts after the first one, at most")
        ] = 3,
        root: Annotated[
            str | None,
            typer.Option(help="Path or URL of its checkpoints; without it only exits are seen"),
        ] = None,
        hang_timeout: Annotated[
            float | None,
            typer.Option(
                "--hang-timeout-s",
                help="End a start in which no step, copy or commit is seen for so long; longer "
                "than it takes to its first checkpoint [default: never]",
            ),
        ] = None,
        grace: Annotated[
            float, typer.Option("--grace-s", min=0.0, help="Seconds from SIGTERM to SIGKILL")
        ] = 30.0,
        backoff: Annotated[
            float,
            typer.Option(
                "--backoff-s",
                min=0.0,
                help="Seconds before a restart, doubled while nothing is committed, at most 60",
            ),
        ] = 1.0,
        report: Annotated[
            Path | None, typer.Option(help="Gets the report as JSON, after each start")
        ] = None,
    ) -> None:
        """Start a training again until it comes to its end, and report how it went.

        The script resumes by its own restore(). A checkpoint on which two attempts in a row died
        is marked suspect, and the one before is taken. Signals are passed on.
        """
        with readable_errors():
            from asymcheck_lab.supervise import SuperviseOptions, Supervisor
            from asymcheck_lab.supervise_report import render

            options = SuperviseOptions(
                command=tuple(command or ()),
                root=root,
                max_restarts=max_restarts,
                hang_timeout_s=hang_timeout,
                grace_s=grace,
                backoff_s=backoff,
                report=report,
            )
            found = Supervisor(options, lambda line: typer.echo(f"asymlab run: {line}", err=True))
            ended = found.run()
            typer.echo(render(ended), err=True)
        if ended.code:
            raise typer.Exit(ended.code)
