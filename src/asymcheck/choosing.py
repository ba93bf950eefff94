"""Which checkpoints a start may go on from, best first, and which better ones it passes over."""

from __future__ import annotations

from asymcheck.planning.retention import CheckpointId
from asymcheck.storage.hierarchy import Hierarchy
from asymcheck.storage.listing import Listing
from asymcheck.storage.suspects import spoken_mark


def choose_from(
    hierarchy: Hierarchy, listing: Listing, step: int | None
) -> tuple[list[CheckpointId], list[tuple[CheckpointId, str, bool]]]:
    """What may be restored, best first; and what is suspect or damaged and would have been better,
    each with why, and whether a medium that may have it whole cannot be reached. Blocks.

    A suspect is among the first where it is asked for: so one can find out what is wrong with it.

    Args:
        hierarchy: Where from.
        listing: What is there.
        step: Only this one; ``None`` for the newest.
    """
    candidates = _candidates(hierarchy, listing, step)
    newest = candidates[0] if candidates else CheckpointId(0, 0)
    suspects = [
        (at, spoken_mark(hierarchy.copies, at), False)
        for at in sorted(listing.suspects)
        if step is None and at > newest
    ]
    damaged = [
        (d.at, d.why, d.unread)
        for d in listing.damaged
        if (d.at > newest if step is None else d.at.step == step)
    ]
    return candidates, suspects + damaged


def _candidates(hierarchy: Hierarchy, listing: Listing, step: int | None) -> list[CheckpointId]:
    lineage = hierarchy.lineage(listing)
    if step is None:
        return lineage[::-1]
    found = [c for c in lineage if c.step == step]
    return found or sorted((c for c in listing.committed if c.step == step), reverse=True)[:1]
