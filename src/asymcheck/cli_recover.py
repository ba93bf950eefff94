"""The command that says what the next start would go on from, and brings it home; and what
``verify`` does with several places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from asymcheck.cli_base import (
    DAMAGED_OR_MISSING,
    Json,
    Root,
    ask,
    id_json,
    places_of,
    print_json,
    reported,
)
from asymcheck.errors import NoCheckpoint, OptionError
from asymcheck.nearest import (
    Candidate,
    Decision,
    InMemory,
    TierCheck,
    bring_home,
    check_tiers,
    decide,
)
from asymcheck.rendering import count_text, plain, show_line, size_text
from asymcheck.repair import plan_repair, repair
from asymcheck.storage.copies import BadCopy
from asymcheck.storage.healing import Healed
from asymcheck.storage.repository import open_repository
from asymcheck.storage.store import Store, open_store
from asymcheck.upkeep import say

app = typer.Typer()

_SHOWN = 10


@app.command()
@reported
def recover(
    root: Root,
    tier: Annotated[
        list[str] | None,
        typer.Option("--tier", help="A further place with copies, nearest first; repeat it."),
    ] = None,
    step: Annotated[int | None, typer.Option(help="This step, not the newest.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be done.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do it, and do not ask.")] = False,
    grace: Annotated[
        float, typer.Option(min=0.0, help="Seconds to wait for persisters of dead trainers.")
    ] = 60.0,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds that listing the tiers may take.")
    ] = 60.0,
    as_json: Json = False,
) -> None:
    """Say which checkpoint the next start goes on from, out of which copies; bring it home.

    Reads what a restore would read, with all checks: slots in shared memory, then ROOT and each
    --tier. Without --dry-run it makes whole slots durable, copies the checkpoint whole into ROOT
    and writes damaged copies anew. The next start of the job would do the same but the copy. The
    exit status is 1 when no checkpoint is whole.
    """
    store = open_store(root)
    places = places_of(store, tier or [])
    decision = decide(places, step, timeout)
    if not as_json:
        _print(decision)
    if dry_run or decision.chosen is None:
        if as_json:
            _print_json(store, decision, dry_run=dry_run, healed=[])
        if decision.chosen is None:
            raise typer.Exit(DAMAGED_OR_MISSING)
        return
    if not yes:
        ask("Do this?", "changed")
    _finish_slots(store, grace)
    decision = decide(places, step, timeout)
    healed = bring_home(decision)
    if as_json:
        _print_json(store, decision, dry_run=False, healed=healed)
    else:
        _print_done(root, decision, healed)
    if any(end.why_not for end in healed):
        raise typer.Exit(DAMAGED_OR_MISSING)


def verify_tiers(
    root: str, tiers: Sequence[str], step: int | None, *, mend: bool, as_json: bool
) -> None:
    """What ``verify`` does where it is given further places.

    Raises:
        OptionError: There is no other place to take whole copies from.
    """
    if not tiers:
        raise OptionError("heal: expected --tier, a place that has whole copies, found none")
    store = open_store(root)
    found = check_tiers(places_of(store, tiers), step, mend=mend)
    if as_json:
        print_json(
            root=store.url,
            run=found.hierarchy.run,
            ok=found.is_well,
            steps=list(found.steps),
            damaged=[asdict(bad) for bad in found.damaged],
            unreachable=[{"tier": name, "why": why} for name, why in found.unreachable],
            healed=[asdict(end) for end in found.healed],
        )
    else:
        _print_check(found)
    if not found.is_well:
        raise typer.Exit(DAMAGED_OR_MISSING)


def _print_check(found: TierCheck) -> None:
    away = dict(found.unreachable)
    for place in found.hierarchy.copies.places:
        bad = [copy for copy in found.damaged if copy.tier == place.name]
        what = f"{count_text(len({b.name for b in bad}), 'object')} damaged" if bad else "whole"
        if place.name in away:
            what = f"out of reach: {plain(away[place.name])}"
        show_line(f"{plain(place.name)}: {what}")
        for copy in bad:
            show_line(f"  {_bad(copy)}")
    _print_healed(found.healed)
    show_line(f"{count_text(len(found.steps), 'step')} read in every place that has them")


def _finish_slots(store: Store, grace_s: float) -> None:
    try:
        repository = open_repository(store)
    except NoCheckpoint:
        return  # nobody has written here
    repair(plan_repair(repository), discard_sealed=False, grace_s=grace_s)


def _print(decision: Decision) -> None:
    for slot in decision.slots:
        show_line(f"shared memory: {_slot(slot)}")
    for name, why in decision.unreachable:
        show_line(f"tier {plain(name)}: out of reach: {plain(why)}")
    for candidate in decision.candidates:
        show_line(_candidate(candidate))
    for bad in decision.damaged[:_SHOWN]:
        show_line(f"  {_bad(bad)}")
    if len(decision.damaged) > _SHOWN:
        show_line(f"  and {len(decision.damaged) - _SHOWN} more")
    if decision.chosen is None:
        show_line("no checkpoint is whole: the next start would refuse")
        return
    show_line(f"the next start goes on from {say(decision.chosen)}, out of {decision.source}")
    for given in decision.served:
        if given.nbytes:
            show_line(
                f"  {plain(given.tier)} gives {size_text(given.nbytes)} in {given.duration_s:.2f} s"
            )


def _bad(bad: BadCopy) -> str:
    where = "" if bad.offset is None else f" at byte {bad.offset}"
    return f"{bad.kind} in {plain(bad.tier)}: {bad.name}{where}: {plain(bad.why)}"


def _slot(found: InMemory) -> str:
    remnant = found.remnant
    what = "nothing" if remnant.at is None else say(remnant.at)
    why = f": {plain(found.why)}" if found.why else ""
    return f"{what}, {size_text(remnant.nbytes)} in {remnant.name}, is {found.fate}{why}"


def _candidate(candidate: Candidate) -> str:
    tiers = ", ".join(f"{plain(t.tier)} {t.there} of {t.expected} objects" for t in candidate.tiers)
    verdict = f"passed over: {plain(candidate.why_not)}" if candidate.why_not else "whole"
    return f"{say(candidate.at)}: {verdict}" + (f" [{tiers}]" if tiers else "")


def _print_done(root: str, decision: Decision, healed: Sequence[Healed]) -> None:
    if decision.chosen is not None:
        show_line(f"{say(decision.chosen)} is whole in {plain(root)}")
    _print_healed(healed)


def _print_healed(healed: Sequence[Healed]) -> None:
    done = [end for end in healed if not end.why_not]
    if done:
        show_line(f"written anew: {count_text(len(done), 'object')}")
    for end in healed:
        if end.why_not:
            show_line(f"not written anew: {end.name} in {plain(end.tier)}: {plain(end.why_not)}")


def _print_json(
    store: Store, decision: Decision, *, dry_run: bool, healed: Sequence[Healed]
) -> None:
    print_json(
        root=store.url,
        run=decision.hierarchy.run,
        dry_run=dry_run,
        chosen=None if decision.chosen is None else id_json(decision.chosen),
        source=decision.source or None,
        served=[asdict(given) for given in decision.served],
        slots=[_slot_json(slot) for slot in decision.slots],
        candidates=[_candidate_json(candidate) for candidate in decision.candidates],
        damaged=[asdict(bad) for bad in decision.damaged],
        unreachable=[{"tier": name, "why": why} for name, why in decision.unreachable],
        healed=[asdict(end) for end in healed],
    )


def _slot_json(found: InMemory) -> dict[str, Any]:
    at = found.remnant.at
    return {
        "slot": found.remnant.name,
        "fate": found.fate,
        "why": found.why or None,
        "bytes": found.remnant.nbytes,
        **({"step": None, "attempt": None} if at is None else id_json(at)),
    }


def _candidate_json(candidate: Candidate) -> dict[str, Any]:
    return {
        **id_json(candidate.at),
        "why_not": candidate.why_not or None,
        "tiers": [asdict(standing) for standing in candidate.tiers],
    }
