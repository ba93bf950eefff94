"""After a restore: what was found damaged in one tier is written anew from the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from asymcheck.settling import Exchange
from asymcheck.storage.healing import heal
from asymcheck.storage.hierarchy import Hierarchy
from asymcheck.storage.names import parse_name

if TYPE_CHECKING:  # it knows torch
    from asymcheck.recovery import RestoreReport


def mend(
    hierarchy: Hierarchy, report: RestoreReport, rank: int, world: int, exchange: Exchange | None
) -> RestoreReport:
    """Write bad copies anew; blocks. All ranks call it alike.

    Of what all ranks share each writes the objects of its own rank, whoever met the damage; of what
    lies on its host alone, what it met itself.

    Args:
        hierarchy: What was restored from.
        report: What the restore met.
        rank: This one.
        world: How many there are.
        exchange: ``Ranks.exchange``; ``None`` where nothing may be written.

    Returns:
        The report, with what became of them.
    """
    if exchange is None:
        return report
    own = {p.name for p in hierarchy.copies.places if p.store.capabilities.scope == "node"}
    mine = sorted({(bad.tier, bad.name) for bad in report.damaged})
    told = exchange("copies that are damaged", mine)
    shared = {(tier, name) for found in told for tier, name in found if tier not in own}

    def is_mine(name: str) -> bool:
        parsed = parse_name(name)
        return ((parsed and parsed.rank) or 0) % world == rank

    dealt = [bad for bad in mine if bad[0] in own] + [bad for bad in shared if is_mine(bad[1])]
    return replace(report, healed=tuple(heal(hierarchy, dealt)))


def in_words(report: RestoreReport) -> Iterator[str]:
    """What the user should know of the tiers, one message for each that was not as it should be."""
    for tier, why in report.unreachable:
        yield f"tier {tier} was left out: {why}"
    ends = {(done.tier, done.name): done for done in report.healed}
    for tier in dict.fromkeys(bad.tier for bad in report.damaged):
        found = [bad for bad in report.damaged if bad.tier == tier]
        names = dict.fromkeys((bad.tier, bad.name) for bad in found)
        done = [ends[name] for name in names if name in ends]
        healed = sum(not end.why_not for end in done)
        left = next((f"; {end.name} was not: {end.why_not}" for end in done if end.why_not), "")
        yield (
            f"tier {tier}: {len(names)} objects did not give what was committed, the first is "
            f"{found[0].name}: {found[0].why}. {healed} were written anew from other tiers{left}"
        )
