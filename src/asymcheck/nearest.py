"""Which checkpoint the next start would go on from, out of which copies; and bringing it home.

It reads what a restore would read, chunk by chunk with all checks, and changes nothing. No
torch: nothing of the training is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from asymcheck.capture import CanaryWatch, parse_capture
from asymcheck.choosing import choose_from
from asymcheck.decoding import verify
from asymcheck.errors import CheckpointError, NoCheckpoint, OptionError, StoreError
from asymcheck.hashing import changed_chunk
from asymcheck.memory.arena import SHARED_MEMORY, Slot, SlotState, rank_of
from asymcheck.planning.retention import CheckpointId
from asymcheck.repair import Remnant, remnants
from asymcheck.slot_choice import choose_slots
from asymcheck.slot_store import IN_MEMORY, SlotStore, hierarchy_of
from asymcheck.storage.copies import BadCopy, Place, Served
from asymcheck.storage.healing import Healed, heal, scan
from asymcheck.storage.hierarchy import Hierarchy
from asymcheck.storage.manifest import Manifest
from asymcheck.storage.mirror import copy_checkpoint, open_copy, share_attempts
from asymcheck.storage.names import manifest_name
from asymcheck.storage.repository import open_repository
from asymcheck.storage.runs import read_run
from asymcheck.storage.suspects import carry_mark


@dataclass(frozen=True, slots=True)
class Standing:
    """What one tier has of a checkpoint, as its listing says.

    Attributes:
        tier: Name of the tier.
        there: How many objects it has with their right lengths.
        expected: How many there are.
    """

    tier: str
    there: int
    expected: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """A checkpoint that was looked at.

    Attributes:
        at: Which.
        why_not: Why it is not the one, empty where it is.
        tiers: What each tier has of it; empty where its manifest is whole nowhere.
    """

    at: CheckpointId
    why_not: str = ""
    tiers: Sequence[Standing] = ()


@dataclass(frozen=True, slots=True)
class InMemory:
    """A slot in shared memory that a dead trainer left, and what becomes of it at the next start.

    Attributes:
        remnant: The slot.
        fate: ``persisted`` before a step is chosen, ``freed``, or ``kept``, as nobody may write it.
        why: Why it is not persisted, empty where it is.
    """

    remnant: Remnant
    fate: Literal["persisted", "freed", "kept"]
    why: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """What the next start would do.

    Attributes:
        hierarchy: The tiers, the root first.
        slots: What lies in shared memory of this host.
        candidates: Checkpoints of the tiers that were looked at, best first; the last is the one
            that would be loaded, where ``chosen`` says so.
        chosen: The checkpoint to go on from, ``None`` where none is whole.
        source: ``tiers``, or ``shared memory`` where slots hold it, or a newer one.
        served: Bytes that each tier gave of it, and seconds; none where it is made durable first.
        damaged: Copies that did not give what was committed.
        unreachable: Tiers that could not be listed, each with why.
    """

    hierarchy: Hierarchy
    slots: Sequence[InMemory]
    candidates: Sequence[Candidate]
    chosen: CheckpointId | None
    source: str
    served: Sequence[Served] = ()
    damaged: Sequence[BadCopy] = ()
    unreachable: Sequence[tuple[str, str]] = field(default=())


def decide(
    places: Sequence[Place],
    step: int | None = None,
    limit_s: float = 60.0,
    directory: Path = SHARED_MEMORY,
) -> Decision:
    """Find what the next start would go on from; blocks, changes nothing.

    Args:
        places: The root first, then the tiers, nearest first.
        step: Only this one; ``None`` for the newest that is whole.
        limit_s: How long listing the tiers may take.
        directory: Where slots are.

    Raises:
        NoCheckpoint: No place holds a run.
        OptionError: They hold different ones.
        StoreError: The root cannot be read.
    """
    hierarchy = Hierarchy(places, one_run(places), limit_s)
    listing = hierarchy.survey()
    wanted, passed = choose_from(hierarchy, listing, step)
    sizes = hierarchy.copies.sizes()  # before anything is read, which may take long
    slots = list(_slots(hierarchy, directory))
    held = [s.remnant.at for s in slots if s.fate == "persisted" and s.remnant.at]
    newest = max(held, default=None)
    candidates = [Candidate(at, why) for at, why, _ in sorted(passed, reverse=True)]
    if (read := _read_in_slots(hierarchy, step, directory)) is not None:
        at, why, given = read
        if not why:
            return _decision(hierarchy, slots, candidates, at, IN_MEMORY, given=given)
        candidates.append(Candidate(at, f"{IN_MEMORY}: {why}"))
    better = wanted[0] if wanted else CheckpointId(0, 0)
    if newest is not None and newest > better and step in (None, newest.step):
        return _decision(hierarchy, slots, candidates, newest, IN_MEMORY)
    for at in wanted:
        served = dict(hierarchy.copies.notes.served)
        damage = next(verify(hierarchy, at), None)
        tiers = _standings(hierarchy, sizes, listing.committed[at])
        candidates.append(Candidate(at, "" if damage is None else damage.why, tiers))
        if damage is None:
            return _decision(hierarchy, slots, candidates, at, "tiers", served)
    return _decision(hierarchy, slots, candidates, None, "")


@dataclass(frozen=True, slots=True)
class TierCheck:
    """What is wrong with the copies in all tiers.

    Attributes:
        hierarchy: The tiers, the root first.
        steps: The steps of the checkpoints that were read.
        damaged: Copies that are not what was committed.
        unreachable: Tiers that could not be read, each with why.
        healed: What became of damaged copies, where they were to be written anew.
    """

    hierarchy: Hierarchy
    steps: Sequence[int]
    damaged: Sequence[BadCopy]
    unreachable: Sequence[tuple[str, str]]
    healed: Sequence[Healed] = ()

    @property
    def is_well(self) -> bool:
        """Whether every copy in every tier is whole, now."""
        ends = {(end.tier, end.name): not end.why_not for end in self.healed}
        bad = {(bad.tier, bad.name) for bad in self.damaged}
        return not self.unreachable and all(ends.get(copy, False) for copy in bad)


def check_tiers(
    places: Sequence[Place], step: int | None = None, limit_s: float = 60.0, *, mend: bool = False
) -> TierCheck:
    """Read every byte of every copy in every tier; blocks. A job may be training meanwhile.

    Args:
        places: The root first, then the tiers, nearest first.
        step: Only checkpoints of this step; ``None`` for all.
        limit_s: How long listing the tiers may take.
        mend: Whether to write what is damaged in one tier anew from the others.

    Raises:
        NoCheckpoint: No place holds a run, or none has that step.
        OptionError: They hold different runs.
        StoreError: The root cannot be read.
    """
    hierarchy = Hierarchy(places, one_run(places), limit_s)
    listing = hierarchy.survey()
    named = [*listing.committed, *(found.at for found in listing.damaged)]
    steps = sorted({at.step for at in named if step in (None, at.step)})
    if step is not None and not steps:
        raise NoCheckpoint(f"{hierarchy.spoken}: there is no checkpoint of step {step}")
    away = dict(hierarchy.copies.notes.unreachable)
    found: list[BadCopy] = []
    for place in (p for p in places if p.name not in away):
        try:
            found += scan(hierarchy, place, step)
        except StoreError as failure:
            away[place.name] = str(failure)
    ends = heal(hierarchy, [(bad.tier, bad.name) for bad in found]) if mend else []
    return TierCheck(hierarchy, steps, found, tuple(away.items()), ends)


def bring_home(decision: Decision) -> list[Healed]:
    """Copy the chosen checkpoint, and what it stands on, whole into the root, and write anew what
    was found damaged anywhere; blocks.

    Nobody may be training on the run.

    Returns:
        What became of damaged copies.

    Raises:
        NoCheckpoint: None is whole.
        CorruptCheckpoint: It was damaged meanwhile.
        StoreError: A medium failed.
    """
    if decision.chosen is None:
        raise NoCheckpoint(f"{decision.hierarchy.spoken}: no checkpoint is whole")
    hierarchy = decision.hierarchy
    home, *others = hierarchy.copies.places
    repository = open_copy(home.store, hierarchy.run)
    for place in others:
        if place.name not in hierarchy.copies.notes.unreachable:
            share_attempts(repository, open_copy(place.store, hierarchy.run))
    done = heal(hierarchy, [(bad.tier, bad.name) for bad in decision.damaged])
    with hierarchy.open(decision.chosen) as opened:
        chain = [opened]
        while (below := chain[-1].base) is not None:
            chain.append(below)
        committed, suspects = repository.survey().committed, hierarchy.survey().suspects
        for source in reversed(chain):  # a base before what stands on it
            if source.manifest.at not in committed:
                if source.manifest.at in suspects:
                    carry_mark(hierarchy.copies, source.manifest.at, home.store)
                copy_checkpoint(hierarchy, source, repository, "read")
    return done


def one_run(places: Sequence[Place]) -> str:
    """The run whose copies some places hold; blocks.

    Raises:
        NoCheckpoint: No place holds a run.
        OptionError: They hold different ones.
        StoreError: None that can be read holds one.
    """
    runs: dict[str, str] = {}
    failure: CheckpointError | None = None
    for place in places:
        try:
            runs.setdefault(read_run(place.store), place.name)
        except OptionError:
            raise  # it holds something else
        except CheckpointError as bad:
            failure = failure or bad
    if not runs:
        raise failure or NoCheckpoint("no place was named")
    if len(runs) > 1:
        told = " and ".join(f"{name} holds run {run}" for run, name in runs.items())
        raise OptionError(f"{told}: expected copies of one run")
    return next(iter(runs))


def _slots(hierarchy: Hierarchy, directory: Path) -> Iterator[InMemory]:
    newest = hierarchy.newest_attempt()
    found = remnants(hierarchy.run, directory)
    for remnant in found:
        if remnant.slot.is_at_work:
            yield InMemory(remnant, "persisted" if remnant.slot.is_sealed else "freed")
        elif remnant.slot.is_hashed and not remnant.slot.is_sealed:
            yield InMemory(remnant, "freed", "it is durable")
        elif not remnant.slot.is_sealed or remnant.at is None:
            yield InMemory(remnant, "freed", "it was not whole when its trainer died")
        elif remnant.at.attempt < newest:
            why = f"attempt {newest} has claimed the root since"
            yield InMemory(remnant, "kept", why)
        else:
            same = [r for r in found if r.slot.is_sealed and r.at == remnant.at]
            why = _why_lost(hierarchy, remnant, {rank_of(r.slot.path) for r in same})
            yield InMemory(remnant, "freed" if why else "persisted", why)


def _read_in_slots(
    hierarchy: Hierarchy, step: int | None, directory: Path
) -> tuple[CheckpointId, str, Sequence[Served]] | None:
    """What a start would read in slots, what is wrong with it, and what they gave."""
    found = choose_slots(hierarchy, step, 0.0, directory)
    if found is None:
        return None
    try:
        store = SlotStore(hierarchy.run, found.at, found.paths)
    except (CheckpointError, OSError):
        return None
    try:
        memory = hierarchy_of(store, hierarchy.run)
        damage = next(verify(memory, found.at), None)
        served = list(memory.copies.notes.served.values())
        return found.at, "" if damage is None else damage.why, served
    finally:
        store.close()


def _why_lost(hierarchy: Hierarchy, remnant: Remnant, here: set[int]) -> str:
    """Why a sealed slot comes to nothing: its canaries do not agree with its bytes, or a rank is
    neither ``here`` nor in the root. Empty where it is whole.
    """
    path = remnant.slot.path
    try:
        slot = Slot.open(path)
    except (OSError, ValueError) as failure:
        return str(failure)
    try:
        capture = parse_capture(slot.meta, str(path))
        if slot.state != SlotState.SEALED or slot.is_torn:
            return "memory of it was given back"
        watch, image = CanaryWatch(capture, slot.canaries), slot.image
        for extent in capture.chunks:
            watch.compare(extent, image)
        torn, changed = watch.torn_leaf, changed_chunk(slot, capture)
        del watch, image
    except CheckpointError as failure:
        return str(failure)
    finally:
        slot.close(unlink=False)
    if torn is not None:
        return f"{torn!r} changed while it was copied"
    if changed is not None:
        return f"its memory at byte {changed.start} changed after it was sealed"
    if capture.world == 1:
        return ""
    stored = open_repository(hierarchy.copies.places[0].store)
    missing = sorted(set(stored.missing_ranks(capture.at, capture.world)) - here)
    return f"nothing is here of ranks {missing[:8]}" if missing else ""


def _standings(
    hierarchy: Hierarchy, sizes: Sequence[Mapping[str, int]], manifest: Manifest
) -> list[Standing]:
    """What each place has of a checkpoint, by what lies in it."""
    objects, name = manifest.objects, manifest_name(manifest.at)
    return [
        Standing(
            place.name,
            sum(there.get(o.name) == o.nbytes for o in objects) + (name in there),
            len(objects) + 1,
        )
        for place, there in zip(hierarchy.copies.places, sizes, strict=True)
    ]


def _decision(
    hierarchy: Hierarchy,
    slots: Sequence[InMemory],
    candidates: Sequence[Candidate],
    chosen: CheckpointId | None,
    source: str,
    before: dict[str, Served] | None = None,
    given: Sequence[Served] = (),
) -> Decision:
    """With what was read of the chosen one alone; ``before`` was read of others."""
    notes = hierarchy.copies.notes
    served = list(given)
    for place in hierarchy.copies.places if source == "tiers" else ():
        now, was = (s.get(place.name, Served(place.name)) for s in (notes.served, before or {}))
        served.append(
            Served(place.name, now.nbytes - was.nbytes, max(0.0, now.duration_s - was.duration_s))
        )
    return Decision(
        hierarchy,
        slots,
        candidates,
        chosen,
        source,
        served,
        tuple(notes.bad.values()),
        tuple(notes.unreachable.items()),
    )
