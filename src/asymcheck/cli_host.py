"""Commands that look after the machine: what it gives to checkpoints, what dead trainers left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from asymcheck.cli_base import (
    DAMAGED_OR_MISSING,
    Json,
    MaybeRoot,
    ask,
    id_json,
    open_root,
    print_json,
    print_report,
    reported,
)
from asymcheck.doctor import examine
from asymcheck.errors import OptionError
from asymcheck.findings import Finding, Level
from asymcheck.memory.arena import SHARED_MEMORY
from asymcheck.planning.retention import CheckpointId
from asymcheck.rendering import count_text, plain, show_line, size_text, table_text, time_text
from asymcheck.repair import (
    Remnant,
    Removal,
    Repaired,
    RepairPlan,
    plan_repair,
    remnants,
    remove_remnants,
    repair,
    why_stays,
)
from asymcheck.upkeep import say

app = typer.Typer()

_NAME_WIDTH = 16


# --- doctor -----------------------------------------------------------------


@app.command("doctor")
@reported
def show_findings(root: MaybeRoot = None, as_json: Json = False) -> None:
    """Look at what this machine gives to checkpoints, and say what to change.

    Shared memory, memory, limits, system calls, versions, what dead trainers left; and the
    place where checkpoints lie: ROOT, or the current directory. What is tried there is
    removed again. 'warn' works with a limit, 'bad' does not: then the exit status is 1.
    """
    found = []
    for finding in examine(root):
        found.append(finding)
        if not as_json:
            show_line(_finding_line(finding))
    bad = sum(finding.level is Level.BAD for finding in found)
    warnings = sum(finding.level is Level.WARN for finding in found)
    if as_json:
        print_json(root=root, ok=not bad, findings=[asdict(finding) for finding in found])
    else:
        show_line(f"{count_text(warnings, 'warning')}, {bad or 'nothing'} bad")
    if bad:
        raise typer.Exit(DAMAGED_OR_MISSING)


def _finding_line(finding: Finding) -> str:
    change = f" -- {finding.change}" if finding.change else ""
    return f"{finding.level:<4}  {finding.name:<{_NAME_WIDTH}}  {plain(finding.found + change)}"


# --- repair -----------------------------------------------------------------


@app.command("repair")
@reported
def clear_up(
    root: MaybeRoot = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be done.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do it, and do not ask.")] = False,
    discard_sealed: Annotated[
        bool,
        typer.Option("--discard-sealed", help="Remove also whole checkpoints in shared memory."),
    ] = False,
    grace: Annotated[
        float, typer.Option(min=0.0, help="Seconds to wait for persisters of dead trainers.")
    ] = 60.0,
    as_json: Json = False,
) -> None:
    """Finish or remove what dead trainers left behind.

    With ROOT: makes the checkpoints that lie whole in shared memory durable, then removes
    unfinished slots, temp files and objects of attempts that are over. The next start of the
    job would do it too. It is refused while a trainer of this run lives.

    Without ROOT: lists the slots that trainers of this user left, of all runs; with --yes
    removes those that hold no whole checkpoint.
    """
    if root is None:
        _clear_all(dry_run=dry_run, yes=yes, discard_sealed=discard_sealed, as_json=as_json)
        return
    plan = plan_repair(open_root(root))
    if not as_json:
        _print_plan(plan, discard_sealed=discard_sealed)
    if dry_run or not plan.changes(discard_sealed=discard_sealed):
        if as_json:
            _print_planned(plan, dry_run=dry_run, discard_sealed=discard_sealed)
        return
    if not yes:
        ask("Do this?", "changed")
        plan = plan_repair(plan.repository)
    done = repair(plan, discard_sealed=discard_sealed, grace_s=grace)
    if as_json:
        _print_done_json(plan, done)
    else:
        _print_done(done)
    if done.failed:
        raise typer.Exit(DAMAGED_OR_MISSING)


def _print_plan(plan: RepairPlan, *, discard_sealed: bool) -> None:
    for remnant in plan.finishing:
        show_line(f"is made durable: {_spoken(remnant)}")
    for remnant in plan.superseded:
        fate = "goes, and is lost" if discard_sealed else "stays"
        show_line(
            f"{fate}: {_spoken(remnant)}: attempt {plan.attempt} has claimed the root since, so it "
            f"can become durable no more"
            + ("" if discard_sealed else "; --discard-sealed removes it")
        )
    for remnant in plan.removing:
        show_line(f"goes: {_spoken(remnant)}")
    for name in plan.leftovers:
        show_line(f"goes: {plain(name)}, which no manifest names")
    if plan.temp_files:
        show_line(f"{'stay' if plan.writer else 'go'}: {count_text(plan.temp_files, 'temp file')}")
    if plan.writer and plan.temp_files:
        show_line(
            f"the next start of the job removes the files that stay; now nobody may: "
            f"{plain(plan.writer)}"
        )
    if not plan.changes(discard_sealed=discard_sealed):
        show_line("nothing to repair")


def _print_done(done: Repaired) -> None:
    for durable in done.durable:
        at = say(CheckpointId(durable.attempt, durable.step))
        show_line(f"made durable: {at}, {size_text(durable.stored_bytes)}")
    for remnant in done.finished:
        show_line(f"durable already: {_spoken(remnant)}")
    for remnant, why in done.failed:
        show_line(f"not made durable: {_spoken(remnant)}: {plain(why)}")
    for remnant, why in done.kept:
        if (remnant, why) not in done.failed:
            show_line(f"stays: {_spoken(remnant)}: {plain(why)}")
    parts = [(len(done.removed), "slot"), (done.temp_files, "temp file")]
    parts.append((len(done.leftovers), "left-over object"))
    said = [count_text(count, noun) for count, noun in parts if count]
    if said:
        show_line(f"removed: {', '.join(said)}")


def _print_planned(plan: RepairPlan, *, dry_run: bool, discard_sealed: bool) -> None:
    gone = [*plan.removing, *(plan.superseded if discard_sealed else ())]
    print_report(
        plan.repository,
        dry_run=dry_run,
        durable=[id_json(r.at) for r in plan.finishing if r.at is not None],
        removed=[_remnant_json(r) for r in gone],
        failed=[],
        kept=[] if discard_sealed else [_remnant_json(r) for r in plan.superseded],
        temp_files=0 if plan.writer else plan.temp_files,
        leftovers=list(plan.leftovers),
        writer=plan.writer,
    )


def _print_done_json(plan: RepairPlan, done: Repaired) -> None:
    finished = [r.at for r in done.finished if r.at is not None]
    print_report(
        plan.repository,
        dry_run=False,
        durable=[
            *({"step": d.step, "attempt": d.attempt} for d in done.durable),
            *map(id_json, finished),
        ],
        removed=[_remnant_json(r) for r in done.removed],
        failed=[{**_remnant_json(r), "why": why} for r, why in done.failed],
        kept=[{**_remnant_json(r), "why": why} for r, why in done.kept],
        temp_files=done.temp_files,
        leftovers=done.leftovers,
        writer=done.writer,
    )


# --- repair of all runs -----------------------------------------------------


def _clear_all(*, dry_run: bool, yes: bool, discard_sealed: bool, as_json: bool) -> None:
    if discard_sealed and not (yes or dry_run):
        raise OptionError("--discard-sealed: expected --yes or --dry-run with it")
    found = remnants(directory=SHARED_MEMORY)
    if not as_json:
        _print_remnants(found, discard_sealed=discard_sealed)
    removal = Removal([], [])
    if yes and not dry_run:
        removal = remove_remnants(found, discard_sealed=discard_sealed)
    if as_json:
        print_json(
            dry_run=dry_run or not yes,
            slots=[_remnant_json(r) for r in found],
            removed=[r.name for r in removal.removed],
            kept=[{"slot": r.name, "why": why} for r, why in removal.kept],
        )
        return
    for remnant in removal.removed:
        lost = f", lost with it: {_spoken(remnant)}" if remnant.slot.is_sealed else ""
        show_line(f"removed {remnant.name}{lost}")
    for remnant, why in removal.kept:
        show_line(f"stays {remnant.name}: {why}")
    if found and not (yes or dry_run):
        show_line(
            "nothing was changed: --yes removes what is unfinished; 'asymcheck repair ROOT' makes "
            "what is whole durable, with the ROOT that stands beside it"
        )


def _print_remnants(found: Sequence[Remnant], *, discard_sealed: bool) -> None:
    if not found:
        show_line("no dead trainer left a slot")
        return
    columns = ("slot", ">bytes", "holds", "when", "root", "with --yes")
    cells = []
    for remnant in found:
        why = why_stays(remnant, discard_sealed=discard_sealed)
        when = "-" if remnant.created_s is None else time_text(remnant.created_s)
        fate = "goes" if why is None else f"stays: {why}"
        root = plain(remnant.slot.root) or "-"
        size = size_text(remnant.nbytes)
        cells.append([remnant.name, size, _content(remnant), when, root, fate])
    show_line(table_text(columns, cells))


def _content(remnant: Remnant) -> str:
    if remnant.at is None:
        return "nothing"
    return f"{'whole' if remnant.slot.is_sealed else 'unfinished'} {say(remnant.at)}"


def _spoken(remnant: Remnant) -> str:
    return f"{_content(remnant)}, {size_text(remnant.nbytes)} in {remnant.name}"


def _remnant_json(remnant: Remnant) -> dict[str, Any]:
    return {
        "slot": remnant.name,
        "run": remnant.run,
        "trainer": remnant.trainer,
        "root": remnant.slot.root or None,
        "persister": remnant.slot.persister.pid if remnant.slot.is_at_work else None,
        "bytes": remnant.nbytes,
        "sealed": remnant.slot.is_sealed,
        "created_s": remnant.created_s,
        **({"step": None, "attempt": None} if remnant.at is None else id_json(remnant.at)),
    }
