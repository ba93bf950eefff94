"""Whether a start goes on from values that lie in shared memory, and not in the store yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

from asymcheck.capture import parse_capture
from asymcheck.choosing import choose_from
from asymcheck.errors import CorruptCheckpoint
from asymcheck.handover import LeftOver, await_trainers, left_over
from asymcheck.memory.arena import SHARED_MEMORY, Slot, rank_of
from asymcheck.planning.retention import CheckpointId
from asymcheck.storage.hierarchy import Hierarchy

_POLL_S = 0.002


@dataclass(frozen=True, slots=True)
class Chosen:
    """A checkpoint that lies hashed in slots of dead trainers, those of all its ranks.

    Attributes:
        at: Which.
        paths: The slot of each rank, in rank order.
        is_sealed: Whether each of them is still to be made durable.
    """

    at: CheckpointId
    paths: Sequence[Path]
    is_sealed: bool


def choose_slots(
    hierarchy: Hierarchy, step: int | None, grace_s: float, directory: Path = SHARED_MEMORY
) -> Chosen | None:
    """What a start reads out of shared memory; ``None`` where it makes durable first what is
    there, and goes on from what the tiers hold. Blocks; changes nothing.

    In doubt it is ``None``: where the newest slot is of an attempt that is over, is older than
    what the tiers have, is not hashed, or lacks the slot of a rank. Also where a start went on
    from it and died: it may be what brings a start down, and marks are for what is durable.

    Args:
        hierarchy: The root and all tiers.
        step: Only this one; ``None`` for the newest.
        grace_s: How long to wait for trainers that are being killed, and for persisters that are
            about to hash what a dead one left.
        directory: Where the slots are.

    Raises:
        StoreError: The root cannot be listed.
    """
    found = _newest_in(hierarchy.run, grace_s, directory)
    if found is None or step not in (None, found.at.step):
        return None
    listing = hierarchy.survey()
    if found.at.attempt < hierarchy.newest_attempt() or found.at in listing.suspects:
        return None
    candidates, _ = choose_from(hierarchy, listing, step)
    best = candidates[0] if candidates else CheckpointId(0, 0)
    is_newer = found.is_sealed and found.at > best
    return found if is_newer or found.at == best else None


def _newest_in(run: str, grace_s: float, directory: Path) -> Chosen | None:
    until_s = monotonic() + grace_s
    if not await_trainers(run, directory, until_s):
        return None
    while True:
        left = [old for old in left_over(run, directory) if old.at is not None]
        newest = max((old.at for old in left if old.at), default=None)
        mine = [old for old in left if old.at == newest]
        coming = [old for old in mine if not old.is_hashed and old.is_at_work]
        if newest is None or not coming or monotonic() > until_s:
            break
        sleep(_POLL_S)
    slots = {rank_of(old.path): old for old in mine if old.is_hashed and not old.is_taken}
    if newest is None or len(slots) < len(mine) or not _are_all(list(slots.values())):
        return None
    in_order = [slots[rank] for rank in sorted(slots)]
    paths = [old.path for old in in_order]
    return Chosen(newest, paths, all(old.is_sealed for old in in_order))


def _are_all(slots: Sequence[LeftOver]) -> bool:
    """Whether these are the slots of all ranks that saved together."""
    path = slots[0].path
    try:
        slot = Slot.open(path)
        try:
            world = parse_capture(slot.meta, str(path)).world
        finally:
            slot.close(unlink=False)
    except (OSError, ValueError, CorruptCheckpoint):
        return False
    return {rank_of(old.path) for old in slots} == set(range(world))
