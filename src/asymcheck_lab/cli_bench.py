"""The command that compares systems."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from asymcheck_lab.errors import UsageError

FolderOption = Annotated[
    Path, typer.Option("--dir", help="Checkpoints go below it: on the medium to measure")
]
PageOption = Annotated[
    Path | None, typer.Option("--docs", help="A page to write the tables into, between its markers")
]
ReportOption = Annotated[
    bool, typer.Option("--report", help="Run nothing: show the newest session of --results")
]


def add_bench(
    app: typer.Typer, readable_errors: Callable[[], AbstractContextManager[None]]
) -> None:
    """Add ``bench``.

    Args:
        app: What it is added to.
        readable_errors: Ends with one message and an exit code inside its ``with``.
    """

    @app.command()
    def bench(
        models: Annotated[
            str | None,
            typer.Option(
                help="Compare on these: all, or gpt2,bert,roberta,bloom,resnet,vit "
                "[default: only the GPT-2 of --size, as make bench]"
            ),
        ] = None,
        sizes: Annotated[
            str | None,
            typer.Option(
                help="With --models: presets that asymlab sizes lists, and gpt2's 124m, commas "
                "between [default: tiny]"
            ),
        ] = None,
        store: Annotated[
            str | None,
            typer.Option(
                help="With --models: disk, or rates that the library's store is held to, such "
                "as disk,50MB/s [default: disk]"
            ),
        ] = None,
        parallel: Annotated[
            str | None,
            typer.Option(
                help="With --models: spread them over ranks by ddp, fsdp2 or zero3, commas between "
                "[default: one process]"
            ),
        ] = None,
        ranks: Annotated[
            int | None, typer.Option(help="With --parallel: how many ranks [default: 2]")
        ] = None,
        synthetic: Annotated[
            bool,
            typer.Option(
                "--synthetic", help="Hold each strategy to its closed form, on a step of given time"
            ),
        ] = False,
        size: Annotated[
            str | None, typer.Option(help="Without --models: 124m, tiny [default: 124m]")
        ] = None,
        rounds: Annotated[
            int | None,
            typer.Option(help="How often each system runs [default: 5; with --models 1]"),
        ] = None,
        steps: Annotated[
            int | None, typer.Option(help="Counted steps of a run [default: 15; with --models 20]")
        ] = None,
        every: Annotated[
            str, typer.Option(help="Steps between two checkpoints; with --models several")
        ] = "5",
        warmup: Annotated[int, typer.Option(help="Steps before the counted ones")] = 2,
        systems: Annotated[
            str | None,
            typer.Option(
                help="all, or names with commas between them [default: most; with --models all]"
            ),
        ] = None,
        folder: FolderOption = Path("runs/bench"),
        results: Annotated[
            Path | None,
            typer.Option(
                help="Gets a JSON line for each run [default: results/bench.jsonl; with --models "
                "results/compare.jsonl, with --parallel results/compare-ranks.jsonl, with "
                "--synthetic results/forms.jsonl; with --quick or "
                "--verify below --dir]"
            ),
        ] = None,
        docs: PageOption = None,
        quick: Annotated[
            bool, typer.Option("--quick", help="Two rounds of a few systems; for a first look")
        ] = False,
        verify: Annotated[
            bool,
            typer.Option("--verify", help="Load every checkpoint back; times mean nothing then"),
        ] = False,
        report_only: ReportOption = False,
    ) -> None:
        """Compare systems: what a checkpoint costs the training, and when it is durable."""
        with readable_errors():
            if docs is not None and (quick or verify):
                raise UsageError("docs: expected none with --quick or --verify, found one")
            for name, value in (("sizes", sizes), ("store", store), ("parallel", parallel)):
                if value is not None and models is None:
                    raise UsageError(f"{name}: expected --models with it, found none")
            if ranks is not None and parallel is None:
                raise UsageError("ranks: expected --parallel with it, found none")
            if models is not None and size is not None:
                raise UsageError("size: expected --sizes with --models, found --size")
            trial = folder / "trial.jsonl" if quick or verify else None
            given: dict[str, Any] = {
                name: value
                for name, value in (("rounds", rounds), ("steps", steps))
                if value is not None
            }
            given |= {"warmup": warmup, "folder": folder, "verify": verify}
            if synthetic:
                if models is not None:
                    raise UsageError("synthetic: expected none with --models, found one")
                _forms(
                    systems or "all",
                    folder=folder,
                    results=results or Path("results/forms.jsonl"),
                    docs=docs,
                    report_only=report_only,
                )
                return
            if models is not None:
                given |= {"ranks": ranks} if ranks is not None else {}
                usual = "compare-ranks" if parallel else "compare"
                _compare(
                    given,
                    models=models,
                    sizes=sizes or "tiny",
                    systems=systems,
                    every=every,
                    store=store or "disk",
                    parallel=parallel or "none",
                    results=results or trial or Path(f"results/{usual}.jsonl"),
                    docs=docs,
                    quick=quick,
                    report_only=report_only,
                )
                return
            _bench(
                given,
                size=size or "124m",
                systems=systems,
                every=every,
                results=results or trial or Path("results/bench.jsonl"),
                docs=docs,
                quick=quick,
                report_only=report_only,
            )


def add_many_small(
    app: typer.Typer, readable_errors: Callable[[], AbstractContextManager[None]]
) -> None:
    """Add ``many-small``; as ``add_bench``."""

    @app.command("many-small")
    def many_small(
        parallel: Annotated[
            str, typer.Option(help="How the tensors are spread: ddp, fsdp2, commas between")
        ] = "ddp,fsdp2",
        ranks: Annotated[int, typer.Option(help="How many ranks, on this host")] = 2,
        tensors: Annotated[int, typer.Option(help="How many, of 64 bytes each")] = 20_000,
        folder: FolderOption = Path("runs/many-small"),
    ) -> None:
        """Save and load many small tensors on several ranks, and say what that took."""
        with readable_errors():
            from asymcheck_lab.many_small import measure_small

            for name in parallel.split(","):
                found = measure_small(name, tensors=tensors, ranks=ranks, folder=folder)
                typer.echo(
                    f"{tensors} tensors, {name} on {ranks} ranks: durable after "
                    f"{found.save_s:.2f} s (stall {found.stall_s:.2f} s), the second time "
                    f"{found.again_s:.2f} s; loaded in {found.load_s:.2f} s"
                )


def add_tiers(
    app: typer.Typer, readable_errors: Callable[[], AbstractContextManager[None]]
) -> None:
    """Add ``tiers``; as ``add_bench``."""

    @app.command()
    def tiers(
        tier: Annotated[
            list[str] | None,
            typer.Option("--tier", help="Another place, URL or NAME=URL; repeat it"),
        ] = None,
        mib: Annotated[int, typer.Option(help="Size of the state, in MiB")] = 1024,
        rounds: Annotated[int, typer.Option(help="How often each is measured")] = 3,
        folder: FolderOption = Path("runs/tiers"),
        results: Annotated[Path, typer.Option(help="Gets a JSON line for each restore")] = Path(
            "results/tiers.jsonl"
        ),
        docs: PageOption = None,
    ) -> None:
        """Restore out of shared memory, a root and each --tier, and say what that took."""
        with readable_errors():
            from asymcheck_lab.bench import describe_session
            from asymcheck_lab.tiers_bench import BEGIN, END, measure_tiers, render

            found = measure_tiers(mib=mib, rounds=rounds, tiers=tier or [], folder=folder)
            command = f"asymlab tiers --mib {mib} --rounds {rounds}"
            command += f" with {len(tier)} tiers" if tier else ""
            session = describe_session(command, folder, sorted(os.sched_getaffinity(0)), schema=1)
            records = [{**session, **asdict(one)} for one in found]
            _publish(records, results, docs, render, (BEGIN, END))


def add_pace(app: typer.Typer, readable_errors: Callable[[], AbstractContextManager[None]]) -> None:
    """Add ``pace``; as ``add_bench``."""

    @app.command()
    def pace(
        rounds: Annotated[int, typer.Option(help="How often each has its turn")] = 5,
        mbit_per_s: Annotated[int, typer.Option(help="What the link carries, each way")] = 200,
        results: Annotated[Path, typer.Option(help="Gets a JSON line for each segment")] = Path(
            "results/pace.jsonl"
        ),
        docs: PageOption = None,
    ) -> None:
        """Checkpoints to a peer over the link that the training needs: at once, or when it idles.

        Needs root, and Debian's iproute2.
        """
        with readable_errors():
            from asymcheck_lab.bench import describe_session
            from asymcheck_lab.pace_bench import BEGIN, END, measure_pace, render

            command = f"asymlab pace --rounds {rounds} --mbit-per-s {mbit_per_s}"
            cores = sorted(os.sched_getaffinity(0))
            session = describe_session(command, results.parent, cores, schema=1)
            found = measure_pace(
                rounds=rounds,
                mbit_per_s=mbit_per_s,
                say=lambda line: typer.echo(line, err=True),
            )
            records = [{**session, **asdict(one)} for one in found]
            _publish(records, results, docs, render, (BEGIN, END))


def _publish(
    records: Sequence[dict[str, Any]],
    results: Path,
    docs: Path | None,
    render: Callable[[Sequence[dict[str, Any]]], str],
    marks: tuple[str, str],
) -> None:
    """Keep the records, show them, and write what is shown between the marks of a page."""
    from asymcheck_lab.bench import append_record
    from asymcheck_lab.bench_report import write_into

    for record in records:
        append_record(results, record)
    text = render(records)
    typer.echo(text)
    if docs is not None:
        write_into(docs, text, *marks)


def _bench(
    given: dict[str, Any],
    *,
    size: str,
    systems: str | None,
    every: str,
    results: Path,
    docs: Path | None,
    quick: bool,
    report_only: bool,
) -> None:
    from asymcheck_lab.bench import (
        QUICK_SYSTEMS,
        BenchOptions,
        newest_session,
        read_records,
        run_bench,
    )
    from asymcheck_lab.bench_report import render
    from asymcheck_lab.compare import chosen_names, chosen_numbers
    from asymcheck_lab.rivals import DEFAULT_SYSTEMS, RIVALS

    intervals = chosen_numbers("every", every)
    if len(intervals) != 1:
        raise UsageError(f"every: expected one number without --models, found {every!r}")
    chosen = QUICK_SYSTEMS if quick else DEFAULT_SYSTEMS
    if systems is not None:
        chosen = chosen_names(systems, RIVALS)
    if quick:
        given["rounds"] = min(given.get("rounds", 2), 2)
    options = BenchOptions(size=size, systems=chosen, every=intervals[0], results=results, **given)
    if report_only:
        records = newest_session(read_records(results))
    else:
        records = run_bench(options, lambda line: typer.echo(line, err=True))
    show_runs(render(records), records, docs)


def _compare(
    given: dict[str, Any],
    *,
    models: str,
    sizes: str,
    systems: str | None,
    every: str,
    store: str,
    parallel: str,
    results: Path,
    docs: Path | None,
    quick: bool,
    report_only: bool,
) -> None:
    from rich.console import Console

    from asymcheck_lab.bench import QUICK_SYSTEMS
    from asymcheck_lab.bench_report import write_into
    from asymcheck_lab.compare import (
        CompareOptions,
        chosen_names,
        chosen_numbers,
        run_compare,
    )
    from asymcheck_lab.compare_records import read_compare, run_of
    from asymcheck_lab.compare_report import render, show
    from asymcheck_lab.presets import TASKS
    from asymcheck_lab.rivals import RANK_SYSTEMS, RIVALS

    usual = tuple(RIVALS) if parallel == "none" else RANK_SYSTEMS
    if quick and systems in (None, "all"):
        usual = QUICK_SYSTEMS
    options = CompareOptions(
        models=chosen_names(models, TASKS),
        sizes=chosen_names(sizes, ()),
        systems=usual if systems in (None, "all") else chosen_names(systems, RIVALS),
        parallels=chosen_names(parallel, ()),
        every=chosen_numbers("every", every),
        stores=chosen_names(store, ()),
        results=results,
        **given,
    )
    if report_only:
        runs = read_compare(results)
        failed = False  # then it was said
    else:
        records = run_compare(options, lambda line: typer.echo(line, err=True))
        runs = [run_of(record) for record in records]
        failed = any(run.error for run in runs)
    show(Console(), runs)
    if docs is not None:
        write_into(docs, render(read_compare(results)))
    if failed:
        raise typer.Exit(1)


def _forms(
    systems: str, *, folder: Path, results: Path, docs: Path | None, report_only: bool
) -> None:
    from rich.console import Console

    from asymcheck.planning.strategies import strategies
    from asymcheck_lab.bench_report import write_into
    from asymcheck_lab.compare import chosen_names
    from asymcheck_lab.compare_forms import (
        FormOptions,
        all_hold,
        newest_of_each,
        read_forms,
        render,
        run_forms,
        show,
    )

    names = chosen_names(systems, strategies)
    options = FormOptions(names=names, folder=folder, results=results)
    if report_only:
        records = newest_of_each(options, read_forms(results))
    else:
        records = run_forms(options, lambda line: typer.echo(line, err=True))
    show(Console(), records)
    if docs is not None:
        name, every = "closed forms", FormOptions(folder=folder, results=results)
        text = render(newest_of_each(every, read_forms(results)))
        write_into(docs, text, f"<!-- {name}: begin -->", f"<!-- {name}: end -->")
    if not all_hold(records):
        raise typer.Exit(1)


def show_runs(text: str, records: Sequence[Mapping[str, Any]], docs: Path | None) -> None:
    """Print the tables, write them into a page, and end with 1 where a run failed."""
    from asymcheck_lab.bench_report import write_into

    typer.echo(text)
    if docs is not None:
        write_into(docs, text)
    if any(record.get("error") for record in records):
        raise typer.Exit(1)
