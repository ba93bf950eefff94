"""The command that marks a checkpoint as suspect, so that no restore chooses it unasked."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Annotated, Any

import typer

from asymcheck.cli_base import (
    DAMAGED_OR_MISSING,
    Json,
    Root,
    id_json,
    places_of,
    print_json,
    reported,
)
from asymcheck.errors import CorruptCheckpoint, NoCheckpoint, OptionError, StoreError
from asymcheck.nearest import one_run
from asymcheck.planning.retention import CheckpointId
from asymcheck.rendering import plain, show_line
from asymcheck.storage.hierarchy import Hierarchy
from asymcheck.storage.listing import Listing, is_there
from asymcheck.storage.names import parse_suspect_name
from asymcheck.storage.repository import open_repository
from asymcheck.storage.store import Store, open_store
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
    tier: Annotated[
        list[str] | None,
        typer.Option("--tier", help="A further place with copies, nearest first; repeat it."),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the checkpoints that are marked suspect; with --step mark one, or clear its mark.

    restore() passes over a marked checkpoint and takes the one before; restore(step) still loads
    it. 'asymlab run' marks one after two starts in a row died on it. Nothing of the checkpoint
    itself is changed.

    With --tier it is marked, or cleared, in ROOT and in each tier that has it, also where ROOT is
    still empty. The exit status is 1 where a tier cannot be reached.
    """
    store = open_store(root)
    places = places_of(store, tier or [])
    found = Hierarchy(places, one_run(places)) if tier else open_repository(store)
    if step is None and (clear or attempt is not None):
        raise OptionError("step: expected one with --clear or --attempt, found none")
    listing = found.survey()
    done: list[CheckpointId] = []
    if step is None:
        _list(found, store.url, listing.suspects, as_json=as_json)
    elif clear:
        done = [at for at in _marked(found, listing) if at.step == step]
        done = [at for at in done if attempt in (None, at.attempt)]
        if not done:
            raise NoCheckpoint(f"{found.spoken}: step {step} is not marked suspect")
        for at in done:
            _each(found, at, partial(clear_suspect, at=at))
    else:
        done = [choose(found, listing, step, attempt)]
        _each(found, done[0], partial(mark_suspect, at=done[0], why=why))
    away = found.copies.notes.unreachable
    if step is not None and as_json:
        told = {"cleared": clear, "checkpoints": [id_json(at) for at in done]}
        print_json(root=store.url, run=found.run, **told, unreachable=_away_json(found))
    elif step is not None:
        for at in done:
            show_line(f"{say(at)}: {'no longer suspect' if clear else 'marked suspect'}")
        if not clear and not found.lineage(found.survey()):
            show_line("no checkpoint is left that restore() would choose: it will refuse to start")
    for name, reason in away.items() if not as_json else ():
        show_line(f"tier {plain(name)}: out of reach: {plain(reason)}")
    if away:
        raise typer.Exit(DAMAGED_OR_MISSING)


def _marked(found: Hierarchy, listing: Listing) -> list[CheckpointId]:
    """What is marked in any place: a mark in a far one counts again where a near one is lost."""
    named = {parse_suspect_name(name) for size in found.copies.sizes() for name in size}
    return sorted(at for at in listing.committed if at in named)


def _each(found: Hierarchy, at: CheckpointId, work: Callable[[Store], None]) -> None:
    """Do it in every place that has the checkpoint; a tier that fails is noted as out of reach."""
    away = found.copies.notes.unreachable
    for place in found.copies.places:
        try:
            if place.name not in away and is_there(place.store, at):
                work(place.store)
        except StoreError as failure:
            if place.must_answer:
                raise
            away[place.name] = str(failure)


def _away_json(found: Hierarchy) -> list[dict[str, str]]:
    notes = found.copies.notes
    return [{"tier": name, "why": why} for name, why in notes.unreachable.items()]


def _list(found: Hierarchy, url: str, suspects: Iterable[CheckpointId], *, as_json: bool) -> None:
    marked = sorted(suspects)
    if as_json:
        told = [_mark_json(found, at) for at in marked]
        print_json(root=url, run=found.run, checkpoints=told, unreachable=_away_json(found))
        return
    for at in marked:
        show_line(f"{say(at)}: {plain(spoken_mark(found.copies, at))}")
    if not marked:
        show_line("no checkpoint is marked suspect")


def _mark_json(found: Hierarchy, at: CheckpointId) -> dict[str, Any]:
    try:
        mark = read_mark(found.copies, at)
    except CorruptCheckpoint as damaged:
        return {**id_json(at), "why": str(damaged), "host": None, "marked_s": None}
    return {**id_json(at), "why": mark.why, "host": mark.host, "marked_s": mark.marked_s}
