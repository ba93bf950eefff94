"""The command that marks a checkpoint as suspect, so that no restore chooses it unasked."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from asymcheck.cli_base import Json, Root, id_json, open_root, print_report, reported
from asymcheck.errors import CorruptCheckpoint, NoCheckpoint, OptionError
from asymcheck.planning.retention import CheckpointId
from asymcheck.rendering import plain, show_line
from asymcheck.storage.repository import Repository
from asymcheck.storage.suspects import clear_suspect, mark_suspect, read_mark, spoken_mark
from asymcheck.upkeep import choose, say

app = typer.Typer()


@app.command()
@reported
def suspect(
    root: Root,
    step: Annotated[int | None, typer.Option(help="Which one to mark.")] = None,
    attempt: Annotated[int | None, typer.Option(help="Of which attempt.")] = None,
    why: Annotated[str, typer.Option(help="What happened, for whoever looks later.")] = "by hand",
    clear: Annotated[bool, typer.Option("--clear", help="Take the mark away.")] = False,
    as_json: Json = False,
) -> None:
    """List the checkpoints that are marked suspect; with --step mark one, or clear its mark.

    restore() passes over a marked checkpoint and takes the one before; restore(step) still loads
    it. 'asymlab run' marks one after two starts in a row died on it. Nothing of the checkpoint
    itself is changed.
    """
    repository = open_root(root)
    if step is None:
        if clear or attempt is not None:
            raise OptionError("step: expected one with --clear or --attempt, found none")
        _list(repository, as_json=as_json)
        return
    listing = repository.survey()
    marked = [at for at in sorted(listing.suspects) if at.step == step]
    if clear:
        marked = [at for at in marked if attempt in (None, at.attempt)]
        if not marked:
            raise NoCheckpoint(f"{repository.store.url}: step {step} is not marked suspect")
        for at in marked:
            clear_suspect(repository.store, at)
    else:
        at = choose(repository, listing, step, attempt)
        mark_suspect(repository.store, at, why)
        marked = [at]
    if as_json:
        print_report(repository, cleared=clear, checkpoints=[id_json(at) for at in marked])
        return
    for at in marked:
        show_line(f"{say(at)}: {'no longer suspect' if clear else 'marked suspect'}")
    left = repository.survey()
    if not clear and not repository.lineage(left):
        show_line("no checkpoint is left that restore() would choose: it will refuse to start")


def _list(repository: Repository, *, as_json: bool) -> None:
    marked = sorted(repository.survey().suspects)
    if as_json:
        print_report(repository, checkpoints=[_mark_json(repository, at) for at in marked])
        return
    for at in marked:
        show_line(f"{say(at)}: {plain(spoken_mark(repository.copies, at))}")
    if not marked:
        show_line("no checkpoint is marked suspect")


def _mark_json(repository: Repository, at: CheckpointId) -> dict[str, Any]:
    try:
        mark = read_mark(repository.copies, at)
    except CorruptCheckpoint as damaged:
        return {**id_json(at), "why": str(damaged), "host": None, "marked_s": None}
    return {**id_json(at), "why": mark.why, "host": mark.host, "marked_s": mark.marked_s}
