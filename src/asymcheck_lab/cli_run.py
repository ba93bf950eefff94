"""The commands about reliability: ``run`` supervises, ``chaos`` and ``soak`` try failures."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Annotated

import typer

from asymcheck_lab.cli_bench import PageOption


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


def add_chaos(
    app: typer.Typer, readable_errors: Callable[[], AbstractContextManager[None]]
) -> None:
    """Add ``chaos``; see ``add_run``."""

    @app.command()
    def chaos(
        faults: Annotated[
            str | None,
            typer.Option(help="Failures, commas between, as 'disk full,bit rot' [default: all]"),
        ] = None,
        strategies: Annotated[
            str | None, typer.Option(help="Strategies, commas between [default: all]")
        ] = None,
        moments: Annotated[
            str | None,
            typer.Option(help="Of forward,capture,persist,commit,restore [default: all]"),
        ] = None,
        quick: Annotated[
            bool,
            typer.Option(
                "--quick", help="Each failure at each moment under the default and one other"
            ),
        ] = False,
        supervised: Annotated[
            bool,
            typer.Option(
                "--supervised",
                help="Those that end a training, with 'asymlab run' around it: nobody else starts "
                "it again",
            ),
        ] = False,
        jobs: Annotated[int, typer.Option(min=1, help="Cases at a time")] = 3,
        folder: Annotated[
            Path | None, typer.Option("--dir", help="Holds roots meanwhile [default: temporary]")
        ] = None,
        results: Annotated[
            Path | None,
            typer.Option(
                help="Gets a JSON line for each case [default: results/chaos.jsonl, and "
                "chaos-supervised.jsonl beside it with --supervised]"
            ),
        ] = None,
        docs: PageOption = None,
        report_only: Annotated[
            bool, typer.Option("--report", help="Try nothing: show the newest cases of --results")
        ] = False,
    ) -> None:
        """Try every failure under every strategy at every moment, and judge what came back.

        Each case is a small real training in processes of its own that is hit, started again and
        compared with one that nothing interrupts. Exit status 1 where a promise was broken.
        """
        with readable_errors():
            from asymcheck_lab.bench_report import write_into
            from asymcheck_lab.chaos import ChaosOptions, broken, run_chaos
            from asymcheck_lab.chaos_report import marks, read_chaos, render, results_of

            options = ChaosOptions(
                faults=_names(faults),
                strategies=_names(strategies),
                moments=_names(moments),
                quick=quick,
                supervised=supervised,
                jobs=jobs,
                folder=folder,
                results=results or Path("results") / results_of(supervised=supervised),
            )
            if report_only:
                records = read_chaos(options.results)
            else:
                records = run_chaos(options, lambda line: typer.echo(line, err=True))
            text = render(records)
            typer.echo(text)
            if docs is not None:
                write_into(docs, text, *marks(supervised=supervised))
        if broken(records):
            raise typer.Exit(1)


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(n for part in (text or "").split(",") if (n := part.strip()))


def add_soak(app: typer.Typer, readable_errors: Callable[[], AbstractContextManager[None]]) -> None:
    """Add ``soak``; see ``add_run``."""

    @app.command()
    def soak(
        checkpoints: Annotated[int, typer.Option(min=1, help="Saves in all")] = 2000,
        kills: Annotated[int, typer.Option(min=0, help="Trainers killed meanwhile")] = 30,
        seed: Annotated[int, typer.Option(min=0, help="Of all that is drawn")] = 0,
        limit: Annotated[
            float, typer.Option("--limit-s", help="Stop after so long, as a failure")
        ] = 600.0,
        folder: Annotated[
            Path | None, typer.Option("--dir", help="Holds the root meanwhile [default: temporary]")
        ] = None,
        results: Annotated[Path, typer.Option(help="Gets a JSON line")] = Path(
            "results/soak.jsonl"
        ),
        docs: PageOption = None,
        report_only: Annotated[
            bool, typer.Option("--report", help="Run nothing: show the newest of --results")
        ] = False,
    ) -> None:
        """Save thousands of checkpoints while stores fail, power is cut and trainers are killed.

        After each one nothing torn may be listed, and the newest must come back bit for bit; at
        the end nothing may be left over, and memory must be flat. Exit status 1 otherwise.
        """
        with readable_errors():
            from asymcheck_lab.bench import newest_session, read_records
            from asymcheck_lab.bench_report import write_into
            from asymcheck_lab.soak_report import BEGIN, END, render

            if report_only:
                records = read_records(results, lambda row: "durable" in row)
                record = newest_session(records)[-1]
            else:
                from asymcheck_lab.soak import SoakOptions, run_soak

                options = SoakOptions(
                    checkpoints=checkpoints,
                    kills=kills,
                    seed=seed,
                    limit_s=limit,
                    folder=folder,
                    results=results,
                )
                with _silenced():
                    record = run_soak(options, lambda line: typer.echo(line, err=True))
            text = render(record)
            typer.echo(text)
            if docs is not None:
                write_into(docs, text, BEGIN, END)
        if record["problems"]:
            raise typer.Exit(1)


@contextmanager
def _silenced() -> Iterator[None]:
    """Without the library's log: it says what was injected."""
    log = logging.getLogger("asymcheck")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)
