"""``asymlab``: train a model, see one be killed and resumed, compare what saving costs."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TextIO

import typer
from rich.console import Console

from asymcheck.errors import CheckpointError, OptionError
from asymcheck_lab.cli_bench import (
    FolderOption,
    PageOption,
    ReportOption,
    add_bench,
    add_many_small,
    add_pace,
    add_tiers,
    show_runs,
)
from asymcheck_lab.cli_models import add_commands
from asymcheck_lab.cli_page import add_report
from asymcheck_lab.cli_run import add_chaos, add_run, add_soak
from asymcheck_lab.errors import LabError, UsageError

app = typer.Typer(
    help="Train real models with asymcheck, and see what it costs and what it survives.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

DataOption = Annotated[
    Path | None,
    typer.Option("--data", help="A UTF-8 text file [default: text that ships with Python]"),
]
SizeOption = Annotated[str, typer.Option("--size", help="Size of the model: tiny, demo")]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="For weights, noise and order")]
ThreadsOption = Annotated[
    int, typer.Option("--threads", min=1, help="Threads of torch; another number, other bits")
]


@app.command()
def train(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="gpt2, bert, roberta, bloom, resnet, vit")] = "gpt2",
    size: Annotated[
        str | None,
        typer.Option(
            help="As asymlab sizes lists, or a preset of your own, FILE.toml [default: "
            "the smallest; demo for gpt2]"
        ),
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="For bert: span-qa or masked-lm [default: span-qa]")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Text, WikiText, SQuAD v1.1 JSON or a folder of images [default: what is embedded]"
        ),
    ] = None,
    pretrained: Annotated[
        Path | None, typer.Option(help="Local folder of weights [default: random weights]")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Updates in all")] = 200,
    run: Annotated[
        Path | None,
        typer.Option(
            help="Folder for checkpoints, log and result [default: runs/MODEL-SIZE, with the task "
            "where one is given]"
        ),
    ] = None,
    root: Annotated[
        str | None, typer.Option(help="Path or URL for checkpoints [default: RUN/checkpoints]")
    ] = None,
    every: Annotated[int, typer.Option(min=1, help="Steps between two checkpoints")] = 20,
    keep_last: Annotated[int, typer.Option(min=1, help="Checkpoints to keep")] = 3,
    strategy: Annotated[str, typer.Option(help="asymcheck, or a system to compare")] = "asymcheck",
    checkpoints: Annotated[
        bool, typer.Option("--checkpoints/--no-checkpoints", help="Save and resume at all")
    ] = True,
    log: Annotated[
        Path | None, typer.Option(help="A JSON line for each step [default: RUN/log.jsonl]")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="For asymcheck explain and plan [default: RUN/trace.jsonl]"),
    ] = None,
    result: Annotated[
        Path | None, typer.Option(help="Cost and final state [default: RUN/result.json]")
    ] = None,
    seed: SeedOption = 0,
    threads: ThreadsOption = 2,
    precision: Annotated[
        str | None, typer.Option(help="fp32, bf16, fp16 [default: the preset's]")
    ] = None,
    accumulate: Annotated[
        int | None, typer.Option(min=1, help="Batches of an update [default: the preset's]")
    ] = None,
    recompute: Annotated[
        bool | None,
        typer.Option("--recompute/--no-recompute", help="Compute activations a second time"),
    ] = None,
    workers: Annotated[int, typer.Option(min=0, help="Threads that read data ahead")] = 0,
    evaluate_every: Annotated[
        int, typer.Option(min=0, help="Steps between evaluations; 0: at the end only")
    ] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda")] = "cpu",
    parallel: Annotated[
        str,
        typer.Option(help="How ranks share the model: none, ddp, fsdp2, zero1, zero2, zero3"),
    ] = "none",
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks to start on this host [default: one for each GPU, or 2]"),
    ] = None,
    hostfile: Annotated[
        Path | None, typer.Option(help="Hosts to start ranks on by ssh, NAME slots=N a line")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Errors and warnings only")] = False,
) -> None:
    """Train a model on real data. Start the same command again, and it goes on where it was."""
    with _readable_errors():
        size = size or ("demo" if model == "gpt2" else "tiny")
        # One for each, so that one model does not go on from the checkpoints of another.
        run = run or Path("runs") / "-".join([model, Path(size).stem, *([task] if task else [])])
        from asymcheck.planning.strategies import resolve
        from asymcheck_lab.cli_launch import hosts_of, said_again
        from asymcheck_lab.launch import launch
        from asymcheck_lab.parallel import find_parallel
        from asymcheck_lab.presets import load_preset, task_of

        # What can be refused at once is refused before torch and transformers load.
        load_preset(model, size)
        task_of(model, task)
        resolve(strategy)
        find_parallel(parallel)
        if root is not None and not checkpoints:
            raise UsageError("root: expected none with --no-checkpoints, found one")
        hosts = hosts_of(parallel, device, ranks, hostfile)
        if hosts:
            code = launch(hosts, said_again(context, without=("ranks", "hostfile")))
            raise typer.Exit(code)

        from asymcheck_lab.train import TrainOptions
        from asymcheck_lab.train import train as run_training

        where = (root or str(run / "checkpoints")) if checkpoints else None
        options = TrainOptions(
            model=model,
            size=size,
            task=task,
            data=data,
            pretrained=pretrained,
            steps=steps,
            root=where,
            every=every,
            keep_last=keep_last,
            strategy=strategy,
            log=log or run / "log.jsonl",
            trace=trace or run / "trace.jsonl",
            result=result or run / "result.json",
            seed=seed,
            threads=threads,
            precision=precision,
            accumulate=accumulate,
            recompute=recompute,
            workers=workers,
            evaluate_every=evaluate_every,
            device=device,
            parallel=parallel,
        )
        from asymcheck_lab.report import TrainingBar, show_training

        console = Console(quiet=quiet or os.environ.get("RANK", "0") != "0")
        with _readable_warnings(), TrainingBar(console, steps) as bar:
            ended = run_training(options, bar)
        show_training(console, options, ended)


@app.command()
def demo(
    folder: Annotated[
        Path, typer.Option("--dir", help="Made anew; only if empty or made by a demo")
    ] = Path("runs/demo"),
    size: SizeOption = "demo",
    data: DataOption = None,
    steps: Annotated[int, typer.Option(min=1, help="Updates of each training")] = 60,
    every: Annotated[int, typer.Option(min=1, help="Steps between two checkpoints")] = 10,
    kill_at: Annotated[
        int, typer.Option(min=1, help="The step in the middle of whose save the kill comes")
    ] = 30,
    strategy: Annotated[str, typer.Option(help="asymcheck, or a system to compare")] = "asymcheck",
    seed: SeedOption = 0,
    threads: ThreadsOption = 1,
) -> None:
    """Train, kill the training in the middle of a save, resume, and prove that nothing changed."""
    with _readable_errors():
        from asymcheck.planning.strategies import resolve
        from asymcheck_lab.data import load_text
        from asymcheck_lab.demo import DemoOptions, gather, judge, write_report
        from asymcheck_lab.presets import load_preset

        load_preset("gpt2", size)
        resolve(strategy)
        load_text(data)
        options = DemoOptions(
            folder=folder,
            size=size,
            data=data,
            steps=steps,
            every=every,
            kill_at=kill_at,
            strategy=strategy,
            seed=seed,
            threads=threads,
        )
        from asymcheck_lab.report import DemoBars, show_demo

        console = Console()
        with DemoBars(console, steps) as bars:
            evidence = gather(options, bars)
        checks = judge(evidence)
        write_report(folder, evidence, checks)
        show_demo(console, evidence, checks)
        if any(check.problems for check in checks):
            raise typer.Exit(1)


@app.command()
def engine(
    tasks: Annotated[
        str | None,
        typer.Option(help="Of stall,durable,ablation,link, commas between [default: all]"),
    ] = None,
    folder: FolderOption = Path("runs/engine"),
    results: Annotated[
        Path | None,
        typer.Option(
            help="Gets a JSON line for each run [default: results/engine.jsonl; with --quick "
            "below --dir]"
        ),
    ] = None,
    docs: PageOption = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Few cases and checkpoints; for a first look")
    ] = False,
    report_only: ReportOption = False,
) -> None:
    """Hold the engine to its bounds: stall, time to durable, what each part is for."""
    with _readable_errors():
        from asymcheck_lab.bench import newest_session
        from asymcheck_lab.engine_bench import TASKS, EngineOptions, read_engine, run_engine
        from asymcheck_lab.engine_report import render

        if docs is not None and quick:
            raise UsageError("docs: expected none with --quick, found one")
        chosen = TASKS if tasks is None else tuple(name.strip() for name in tasks.split(","))
        published = Path("results/engine.jsonl")
        options = EngineOptions(
            tasks=chosen,
            quick=quick,
            folder=folder,
            results=results or (folder / "trial.jsonl" if quick else published),
        )
        if report_only:
            records = newest_session(read_engine(options.results))
        else:
            records = run_engine(options, lambda line: typer.echo(line, err=True))
        show_runs(render(records), records, docs)


@app.command()
def gpu(
    out: Annotated[
        Path, typer.Option(help="Gets gpu.jsonl and gpu.md, and holds checkpoints meanwhile")
    ] = Path("runs/gpu"),
) -> None:
    """Check and measure what only a CUDA device can tell, in at most eight minutes."""
    with _readable_errors():
        from asymcheck_lab.gpu_script import NOT_HERE, has_cuda, render, run_gpu

        if not has_cuda():
            typer.echo(NOT_HERE)
            return
        records = run_gpu(out, lambda line: typer.echo(line, err=True))
        typer.echo(render(records))
        # What fails with another system is in the table.
        ours = [r for r in records if str(r.get("system", "asymcheck")).startswith("asymcheck")]
        if any("error" in r or r.get("ok") is False for r in ours):
            raise typer.Exit(1)


@app.command("simulate")
def simulate_table() -> None:
    """What a checkpoint costs a step under each policy of the fluid model; measures nothing."""
    from asymcheck_lab.simulate import render, table

    typer.echo(render(table()))


@app.command()
def codecs(
    state: Annotated[
        Path, typer.Option(help="Keeps the trained state (1 GB); trained when it is not there")
    ] = Path("runs/codecs"),
    results: Annotated[Path, typer.Option(help="Gets a JSON line for each row")] = Path(
        "results/codecs.jsonl"
    ),
    docs: Annotated[
        Path | None, typer.Option(help="A page to write the table into, between its markers")
    ] = None,
    report_only: Annotated[
        bool, typer.Option("--report", help="Measure nothing: show the newest rows of --results")
    ] = False,
) -> None:
    """Measure what each codec makes of real training state: size, speed, error."""
    with _readable_errors():
        from asymcheck_lab.bench import describe_session, newest_session, read_records
        from asymcheck_lab.bench_report import write_into
        from asymcheck_lab.codec_figures import render, write_figures

        if report_only:
            records = newest_session(read_records(results, lambda row: bool(row["label"])))
        else:
            _writable(state)
            session = describe_session("asymlab codecs", state, (0,))
            records = write_figures(state, results, session)
        text = render(records)
        typer.echo(text)
        if docs is not None:
            name = "codec figures"
            write_into(docs, text, f"<!-- {name}: begin -->", f"<!-- {name}: end -->")


@app.command()
def fidelity(
    seeds: Annotated[int, typer.Option(help="Trainings")] = 3,
    resume_at: Annotated[int, typer.Option(help="Step that is resumed from")] = 200,
    steps: Annotated[int, typer.Option(help="Updates after it")] = 200,
    every: Annotated[int, typer.Option(help="Steps between two checkpoints")] = 10,
    results: Annotated[Path, typer.Option(help="Gets a JSON line for each curve")] = Path(
        "results/fidelity.jsonl"
    ),
    docs: Annotated[
        Path | None,
        typer.Option(help="A page to write into; the plot goes to images/ beside it"),
    ] = None,
    report_only: Annotated[
        bool, typer.Option("--report", help="Train nothing: show the newest curves of --results")
    ] = False,
) -> None:
    """Resume from a checkpoint of each fidelity, and compare how the loss goes on."""
    with _readable_errors():
        from asymcheck_lab.bench import (
            append_record,
            describe_session,
            newest_session,
            read_records,
        )
        from asymcheck_lab.bench_report import write_into
        from asymcheck_lab.fidelity import FidelityOptions, measure, plot, render

        options = FidelityOptions(seeds=seeds, resume_at=resume_at, steps=steps, every=every)
        if report_only:
            records = newest_session(read_records(results, lambda row: bool(row["losses"])))
        else:
            session = describe_session(options.command, Path(), (0,))
            records = []
            for row in measure(options, lambda line: typer.echo(line, err=True)):
                records.append({**session, **row})
                append_record(results, records[-1])
        image = Path("images/fidelity-resume.png")
        text = render(records, str(image))
        typer.echo(text)
        if docs is not None:
            plot(records, docs.parent / image)
            name = "resume quality"
            write_into(docs, text, f"<!-- {name}: begin -->", f"<!-- {name}: end -->")


def _writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise LabError(f"{folder}: {failure.strerror}") from failure


@contextmanager
def _readable_errors() -> Iterator[None]:
    """End with one message on stderr and an exit code, not with a traceback."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
        raise typer.Exit(130) from None
    except (LabError, CheckpointError) as failure:
        # The loader's own words are clearer than the library's about the loader.
        cause = failure.__cause__
        shown = cause if isinstance(cause, LabError) else failure
        typer.echo(f"error: {shown}", err=True)
        for note in getattr(failure, "__notes__", ()):
            typer.echo(f"  {note}", err=True)
        usage = isinstance(shown, UsageError | OptionError)
        raise typer.Exit(2 if usage else 1) from None


@contextmanager
def _readable_warnings() -> Iterator[None]:
    """Show each of the library's warnings as one line on stderr, without a place in code."""
    from asymcheck.errors import CheckpointWarning

    with warnings.catch_warnings():
        plainly = warnings.showwarning

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if issubclass(category, CheckpointWarning):
                typer.echo(f"warning: {message}", err=True)
            else:
                plainly(message, category, filename, lineno, file, line)

        warnings.simplefilter("always", CheckpointWarning)
        warnings.showwarning = show
        yield


add_bench(app, _readable_errors)
add_many_small(app, _readable_errors)
add_tiers(app, _readable_errors)
add_pace(app, _readable_errors)
add_commands(app, _readable_errors)
add_report(app, _readable_errors)
add_run(app, _readable_errors)
add_chaos(app, _readable_errors)
add_soak(app, _readable_errors)
