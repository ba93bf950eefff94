"""The command line: what is there, what is in it, is it whole, what may go.

Nothing here needs torch. What all commands share stands in ``cli_base``; those that look after
the machine, ``doctor`` and ``repair``, in ``cli_host``; those that explain, in ``cli_engine``;
marks in ``cli_suspect``; what the next start would load in ``cli_recover``;
the agent of peers in ``cli_peers``.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Mapping, Sequence
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Annotated, Any

import typer

from asymcheck import cli_engine, cli_host, cli_peers, cli_recover, cli_suspect
from asymcheck.cli_base import (
    DAMAGED_OR_MISSING,
    Json,
    Root,
    ask,
    id_json,
    open_root,
    print_report,
    reported,
)
from asymcheck.errors import CorruptCheckpoint, NoCheckpoint, OptionError
from asymcheck.planning.retention import Retention
from asymcheck.rendering import (
    count_text,
    metrics_text,
    plain,
    show_line,
    size_text,
    table_text,
    time_text,
    tree_lines,
)
from asymcheck.storage.index import RAW, Index
from asymcheck.storage.listing import Damage
from asymcheck.storage.manifest import EXACT, Manifest
from asymcheck.storage.reader import OpenCheckpoint, spoken
from asymcheck.storage.repository import Repository
from asymcheck.storage.sealed import dump_metric
from asymcheck.storage.suspects import spoken_mark
from asymcheck.upkeep import (
    PrunePlan,
    Row,
    Wanted,
    choose,
    codecs_of,
    damaged_attempts,
    examine,
    none_such,
    plan_prune,
    read_state,
    rows_of,
    say,
    tensors_of,
    why_of,
)
from asymcheck.upkeep import prune as remove

_STATE_LINES = 60

app = typer.Typer(
    name="asymcheck",
    help="Look after the checkpoints of a training run.\n\n"
    "Exit status: 0 all is well, 1 something is damaged or missing, 2 wrong usage.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

app.add_typer(cli_engine.app)
app.add_typer(cli_host.app)
app.add_typer(cli_peers.app)
app.add_typer(cli_recover.app)
app.add_typer(cli_suspect.app)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(importlib.metadata.version("asymcheck"))
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Say which."),
    ] = False,
) -> None:
    pass


# --- ls ---------------------------------------------------------------------


@app.command()
@reported
def ls(root: Root, as_json: Json = False) -> None:
    """List the checkpoints under ROOT, oldest first.

    States: 'newest' is what restore() loads, 'ok' led to it, 'suspect' is passed over by it (see
    the command 'suspect'), 'abandoned' lies on a branch
    that was left by going back, 'separate' belongs to another start from nothing, 'foreign'
    to another run, 'damaged' is no checkpoint any more, 'newer' needs a newer release. Only
    lengths are looked at; 'verify' reads every byte.
    """
    repository = open_root(root)
    listing = repository.survey()
    rows = rows_of(repository, listing)
    if as_json:
        print_report(
            repository,
            newest=next((id_json(row.at) for row in rows if row.standing == "newest"), None),
            checkpoints=[_row_json(row) for row in rows],
            leftovers=[{**id_json(at), "name": name} for at, name in listing.leftovers],
        )
    else:
        _print_listing(rows, len(listing.leftovers))
    if not listing.committed:
        raise NoCheckpoint(f"{repository.store.url}: there is no checkpoint of this run")
    if listing.damaged:
        raise typer.Exit(DAMAGED_OR_MISSING)


def _print_listing(rows: Sequence[Row], leftovers: int) -> None:
    if rows:
        columns = (">step", ">attempt", "when", ">stored", "state", "metrics")
        show_line(table_text(columns, [_row_cells(row) for row in rows]))
    for row in rows:
        if row.why is not None:
            show_line(f"{say(row.at)}: {plain(row.why)}")
    if leftovers:
        show_line(
            f"{count_text(leftovers, 'left-over object')} of saves that were not committed; those "
            f"of earlier attempts go at the next start of the job or with 'prune --leftovers'"
        )


def _row_cells(row: Row) -> list[str]:
    found = row.manifest
    return [
        str(row.at.step),
        str(row.at.attempt),
        "-" if found is None else time_text(found.created_s),
        "-" if found is None else size_text(found.stored_bytes),
        row.standing,
        "" if found is None else metrics_text(found.metrics),
    ]


def _row_json(row: Row) -> dict[str, Any]:
    found = row.manifest
    return {
        **id_json(row.at),
        "state": row.standing,
        "created_s": None if found is None else dump_metric(found.created_s),
        "stored_bytes": None if found is None else found.stored_bytes,
        **({} if found is None else _kind_json(found)),
        "metrics": {} if found is None else _metrics_json(found.metrics),
        "why": row.why,
    }


def _kind_json(found: Manifest) -> dict[str, Any]:
    base = None if found.base is None else id_json(found.base.at)
    return {"base": base, "fidelity": found.fidelity}


# --- show -------------------------------------------------------------------


@app.command()
@reported
def show(
    root: Root,
    step: Annotated[int | None, typer.Option(help="Which; the newest otherwise.")] = None,
    attempt: Annotated[int | None, typer.Option(help="Of which attempt.")] = None,
    match: Annotated[str | None, typer.Option(help="Only keys that match this glob.")] = None,
    as_json: Json = False,
) -> None:
    """Show what a checkpoint holds.

    Tensors, aliases, versions, metrics, how chunks are stored, what lossy codecs changed and,
    abbreviated, every plain value of the state.
    """
    repository = open_root(root)
    listing = repository.survey()
    at = choose(repository, listing, step, attempt)
    suspicion = spoken_mark(repository.copies, at) if at in listing.suspects else None
    state: dict[str, Any] | None = None
    problem: CorruptCheckpoint | None = None
    with repository.open(at) as checkpoint:
        try:
            state = read_state(checkpoint)
        except CorruptCheckpoint as failure:
            problem = failure  # the tensors can be listed all the same
    indexes, pattern = checkpoint.indexes, match or "*"
    tensors = [t for i in indexes for t in tensors_of(i) if fnmatchcase(t["key"], pattern)]
    aliases = {
        alias: key
        for index in indexes
        for alias, key in index.aliases.items()
        if fnmatchcase(alias, pattern) or fnmatchcase(key, pattern)
    }
    if as_json:
        print_report(
            repository,
            **id_json(at),
            created_s=dump_metric(checkpoint.manifest.created_s),
            metrics=_metrics_json(checkpoint.manifest.metrics),
            versions=dict(indexes[0].versions),
            world=len(indexes),
            stored_bytes=checkpoint.manifest.stored_bytes,
            **_kind_json(checkpoint.manifest),
            codecs=codecs_of(indexes),
            losses=[dataclasses.asdict(loss) for index in indexes for loss in index.losses],
            packs=[{"name": p.name, "bytes": p.nbytes} for p in checkpoint.manifest.packs],
            tensors=tensors,
            aliases=aliases,
            suspect=suspicion,
            state=state,
        )
    else:
        _print_facts(repository, checkpoint.manifest, indexes)
        if suspicion is not None:
            show_line(plain(suspicion))
        _print_tensors(checkpoint, tensors, aliases)
        if match is None and state is not None:
            _print_state(state)
    if problem is not None:
        raise problem
    if match is not None and not tensors and not aliases:
        raise NoCheckpoint(f"{say(at)}: no key matches {match!r}")


def _print_facts(repository: Repository, manifest: Manifest, indexes: Sequence[Index]) -> None:
    show_line(f"{plain(repository.store.url)}: {say(manifest.at)}, {time_text(manifest.created_s)}")
    if manifest.metrics:
        show_line(f"metrics: {metrics_text(manifest.metrics)}")
    versions = indexes[0].versions.items()
    show_line(f"versions: {', '.join(plain(f'{k} {v}') for k, v in versions)}")
    if manifest.base is not None:
        show_line(f"delta against {say(manifest.base.at)}")
    if manifest.fidelity != EXACT:
        show_line(f"fidelity: {manifest.fidelity}")
    for loss in (loss for index in indexes for loss in index.losses):
        show_line(
            f"  {plain(loss.kind)}, {size_text(loss.nbytes)} as {loss.codec}: error at most "
            f"{loss.max_error:.3g}, {loss.mean_error:.3g} on average"
        )
    for row in (row for row in codecs_of(indexes) if row["codec"] != RAW):
        raw, stored = size_text(row["bytes"]), size_text(row["stored_bytes"])
        show_line(f"{count_text(row['chunks'], 'chunk')} as {row['codec']}: {raw} in {stored}")


def _print_tensors(
    checkpoint: OpenCheckpoint, tensors: Sequence[Mapping[str, Any]], aliases: Mapping[str, str]
) -> None:
    columns = ("key", "dtype", "shape", ">bytes", ">chunks")
    cells = [[plain(str(row[name.lstrip(">")])) for name in columns] for row in tensors]
    show_line(table_text(columns, cells))
    for alias, key in aliases.items():
        show_line(f"alias: {plain(alias)} is {plain(key)}")
    size = size_text(sum(row["bytes"] for row in tensors))
    chunks = count_text(sum(len(index.chunks) for index in checkpoint.indexes), "chunk")
    packs = count_text(len(checkpoint.manifest.packs), "pack")
    stored = size_text(checkpoint.manifest.stored_bytes)
    show_line(
        f"{count_text(len(tensors), 'tensor')}, {size}; stored: {stored}, {chunks} in {packs}"
    )


def _print_state(tree: Mapping[str, Any]) -> None:
    lines = list(tree_lines(tree))
    show_line("\nstate without tensors:")
    for path, text in lines[:_STATE_LINES]:
        show_line(f"  {path} = {text}")
    if len(lines) > _STATE_LINES:
        show_line(f"  … and {len(lines) - _STATE_LINES} more; --json has all of it")


# --- verify -----------------------------------------------------------------


@app.command()
@reported
def verify(
    root: Root,
    step: Annotated[int | None, typer.Option(help="Only checkpoints of this step.")] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Also checkpoints of other runs that lie here.")
    ] = False,
    tier: Annotated[
        list[str] | None,
        typer.Option("--tier", help="A further place with copies, read as well; repeat it."),
    ] = None,
    mend: Annotated[
        bool, typer.Option("--heal", help="Write damaged copies anew from places that are whole.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Read and decode every byte and report damage.

    Names file, tensors and byte offset of each finding. What a delta stands on is read with
    it. Changes nothing.

    With --tier every copy in ROOT and in each tier is read, and what is not what was committed is
    named. With --heal it is written anew; a whole copy is never written over. The exit status is
    1 where something stays damaged, or a tier cannot be read.
    """
    if tier or mend:
        if everything:
            raise OptionError("all: expected it without --tier, which is about one run")
        cli_recover.verify_tiers(root, tier or [], step, mend=mend, as_json=as_json)
        return
    repository = open_root(root)
    listing = repository.survey()
    rows = [
        row
        for row in rows_of(repository, listing)
        if step in (None, row.at.step) and (everything or row.standing != "foreign")
    ]
    if not rows:
        raise none_such(repository, listing, step, None)
    known = {d.at: d for d in listing.damaged}
    results: list[dict[str, Any]] = []
    for row in rows:
        verdict: str = row.standing
        findings = [known[row.at]] if row.at in known else []
        if not findings:
            verdict, findings = examine(repository, row.at)
        results.append({**id_json(row.at), "state": verdict, "findings": _findings_json(findings)})
        if not as_json:
            show_line(f"{verdict:<8} {say(row.at)}")
            _print_findings(findings)
    attempts = list(damaged_attempts(repository)) if step is None else []
    bad_rows = sum(bool(r["findings"]) for r in results)
    if as_json:
        print_report(
            repository,
            ok=not bad_rows and not attempts,
            checkpoints=results,
            attempts=_findings_json(attempts),
        )
    else:
        for damage in attempts:
            show_line(f"damaged  record of attempt {damage.at.attempt}")
            _print_findings([damage])
        show_line(f"{count_text(len(rows), 'checkpoint')} read, {bad_rows} damaged")
    if bad_rows or attempts:
        raise typer.Exit(DAMAGED_OR_MISSING)


def _findings_json(findings: Sequence[Damage]) -> list[dict[str, Any]]:
    return [
        {
            "object": damage.where.removesuffix(f" at byte {damage.at_byte}"),
            "offset": damage.at_byte,
            "keys": list(damage.keys),
            "why": damage.why,
        }
        for damage in findings
    ]


def _print_findings(findings: Sequence[Damage]) -> None:
    for damage in findings:
        why = why_of(damage)
        show_line(f"  {plain(why)}")
        if damage.keys and spoken(damage.keys) not in why:
            show_line(f"  tensors: {plain(spoken(damage.keys))}")


# --- prune ------------------------------------------------------------------


class Mode(StrEnum):
    """Which metric is good."""

    min = "min"
    max = "max"


@app.command()
@reported
def prune(
    root: Root,
    keep_last: Annotated[int | None, typer.Option(help="Keep the newest so many.")] = None,
    keep_every: Annotated[
        int | None, typer.Option(help="Keep also steps that are a multiple of this.")
    ] = None,
    keep_best: Annotated[
        int | None, typer.Option(help="Keep also the best so many by --monitor.")
    ] = None,
    monitor: Annotated[str | None, typer.Option(help="The metric for --keep-best.")] = None,
    mode: Annotated[Mode, typer.Option(help="Whether a small or large one is good.")] = Mode.min,
    abandoned: Annotated[
        bool, typer.Option("--abandoned", help="Remove branches that were left by going back.")
    ] = False,
    separate: Annotated[
        bool, typer.Option("--separate", help="Remove those of other starts from nothing.")
    ] = False,
    damaged: Annotated[
        bool, typer.Option("--damaged", help="Remove what is left of damaged checkpoints.")
    ] = False,
    leftovers: Annotated[
        bool, typer.Option("--leftovers", help="Remove unfinished files of earlier attempts.")
    ] = False,
    verify_first: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Read the newest checkpoint before.")
    ] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Remove what need not be kept.

    The newest checkpoint stays, and so do the one that the latest attempt continued from, and
    everything of other runs. A job may be training meanwhile. Nothing is removed when the
    newest checkpoint turns out to be damaged.
    """
    retention = Retention(keep_last, keep_every, keep_best, monitor, mode.value)
    if keep_last is None and not (abandoned or separate or damaged or leftovers):
        raise OptionError(
            "nothing to remove was named: expected --keep-last, --abandoned, --separate, "
            "--damaged or --leftovers"
        )
    wanted = Wanted(retention, abandoned, separate, damaged, leftovers)
    repository = open_root(root)
    plan = plan_prune(repository, wanted)
    anything = bool(plan.gone or plan.leftovers)
    if not as_json:
        _print_plan(plan)
    if anything and not dry_run:
        if not yes:
            ask(f"Remove {_amount(plan)}?", "removed")
            plan = plan_prune(repository, wanted).agreed(plan)
        remove(repository, plan, verify=verify_first)
    if as_json:
        print_report(
            repository,
            dry_run=dry_run,
            removed=[{**id_json(row.at), "state": row.standing} for row in plan.gone],
            leftovers=list(plan.leftovers),
            kept=[{**id_json(row.at), "state": row.standing} for row in plan.kept],
        )
    elif anything:
        show_line(f"{'would remove' if dry_run else 'removed'} {_amount(plan)}")
    else:
        show_line("nothing to remove")


def _print_plan(plan: PrunePlan) -> None:
    fates = [(row, "stays") for row in plan.kept] + [(row, "goes") for row in plan.gone]
    if fates:
        columns = (">step", ">attempt", "when", ">stored", "state", "then")
        fates.sort(key=lambda pair: pair[0].at)
        show_line(table_text(columns, [[*_row_cells(row)[:5], fate] for row, fate in fates]))
    for name in plan.leftovers:
        show_line(f"left over, goes: {plain(name)}")


def _amount(plan: PrunePlan) -> str:
    size = f" ({size_text(plan.stored_bytes)})" if plan.stored_bytes else ""
    parts = [count_text(len(plan.gone), "checkpoint") + size] if plan.gone else []
    parts += [count_text(len(plan.leftovers), "left-over object")] if plan.leftovers else []
    return " and ".join(parts) or "nothing"


def _metrics_json(metrics: Mapping[str, float]) -> dict[str, float | str]:
    return {name: dump_metric(value) for name, value in metrics.items()}
