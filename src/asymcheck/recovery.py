"""From a committed checkpoint back into live storage: choose, plan, read, verify, set."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any, Self

from asymcheck.choosing import choose_from
from asymcheck.decoding import Decoding
from asymcheck.device.state import RestorePlan, State, tree_leaf_bytes
from asymcheck.device.worlds import WorldChange
from asymcheck.errors import (
    CheckpointError,
    CheckpointWarning,
    CorruptCheckpoint,
    IncompatibleCheckpoint,
    NoCheckpoint,
    StoreError,
)
from asymcheck.events import Sink as SpanSink
from asymcheck.events import Stage, timed
from asymcheck.filling import Filling
from asymcheck.garbage import put_off
from asymcheck.planning.retention import CheckpointId
from asymcheck.settling import DAMAGED, GONE, UNREAD, WELL, WRONG, Exchange, Found, Look, Settling
from asymcheck.storage.copies import BadCopy, Served
from asymcheck.storage.healing import Healed
from asymcheck.storage.hierarchy import Hierarchy
from asymcheck.storage.index import TREE_KEY, Index
from asymcheck.storage.listing import Listing
from asymcheck.storage.suspects import MARKED

_LOOKS = 100
"""How often a restore looks again because a writer removed what it was about to read."""


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What a restore did.

    Attributes:
        step: Restored step; 0 for a fresh start.
        attempt: The attempt that had written it, ``None`` for a fresh start.
        restored_bytes: Bytes read into live state.
        duration_s: Seconds from choosing to done.
        skipped: Newer checkpoints that were passed over, damaged or marked suspect, each as
            ``(step, why)``.
        rng_problems: What of the random number generators could not be set.
        missing_keys: With ``strict=False``: live, and not in the checkpoint.
        unexpected_keys: With ``strict=False``: in the checkpoint, and not live.
        mismatched: With ``strict=False``: ``(key, live, checkpoint)``, not loaded.
        cast_keys: With ``dtype_policy="cast"``: loaded with another dtype.
        world_change: What became of each rank's own state because another number of ranks had
            saved, in words; empty where as many had.
        served: What each tier gave to this rank, nearest first: bytes that passed their check, and
            the seconds that its calls took.
        damaged: Copies that did not give what was committed, of any checkpoint that was tried.
        healed: Copies of them that were written anew, from tiers that have them whole.
        unreachable: Tiers that could not be looked at, each with why.
    """

    step: int
    attempt: int | None = None
    restored_bytes: int = 0
    duration_s: float = 0.0
    skipped: tuple[tuple[int, str], ...] = ()
    rng_problems: tuple[str, ...] = ()
    missing_keys: tuple[str, ...] = ()
    unexpected_keys: tuple[str, ...] = ()
    mismatched: tuple[tuple[str, str, str], ...] = ()
    cast_keys: tuple[str, ...] = ()
    world_change: str = ""
    served: tuple[Served, ...] = ()
    damaged: tuple[BadCopy, ...] = ()
    healed: tuple[Healed, ...] = ()
    unreachable: tuple[tuple[str, str], ...] = ()


class TornRestore(CorruptCheckpoint):
    """Damage was met after live state had been overwritten, and nothing else could be loaded."""


class UnfinishedRestore(StoreError):
    """A medium failed after live state had been overwritten, and nothing else could be loaded."""


LEFT_TORN = (TornRestore, UnfinishedRestore)
"""What says that live state was overwritten in part."""


@put_off()
def restore(
    hierarchy: Hierarchy,
    state: State,
    *,
    step: int | None,
    strict: bool,
    cast: bool,
    sink: SpanSink,
    rank: int = 0,
    world: int = 1,
    on_world_change: WorldChange = "resplit",
    exchange: Exchange | None = None,
    torn: bool = False,
) -> RestoreReport:
    """Load the newest checkpoint that is whole, or the one asked for; blocks.

    Each object and each chunk comes from the nearest copy that is whole. A checkpoint of which
    something is whole nowhere is passed over with one warning, and the one before is tried. One
    that is intact but does not match is an error at once: older ones would not match either.

    Many ranks call it alike, each with its own state. They try what rank 0 finds, and go on to
    the one before where any of them cannot read it; Python values are set when all could.

    Args:
        hierarchy: Where from.
        state: Where to; written in place. It knows the same rank and world.
        step: Which, ``None`` for the newest that is whole.
        strict: Whether any difference is an error.
        cast: Whether tensors of another dtype are cast.
        sink: Receives the span.
        rank: This rank: its own state is that of the saved rank of this number, modulo how many
            had saved.
        world: How many ranks restore.
        on_world_change: What becomes of that where another number had saved.
        exchange: ``Ranks.exchange``, with more than one rank; what it raises goes on. Without
            it this rank asks no other.
        torn: Whether live state was overwritten before, with what turned out to be damaged.

    Raises:
        NoCheckpoint: There is none (of that step), and live state is as it was.
        CorruptCheckpoint: There are some and none is whole; ``TornRestore`` when live state
            was overwritten in part, on this rank or on another.
        StoreError: No place can be listed; or none could be loaded, and one that may be whole
            cannot be read now; ``UnfinishedRestore`` when live state was overwritten in part.
        IncompatibleCheckpoint: It does not match, on this rank or on another; nothing was changed.
    """
    start_s = perf_counter()
    ranks = Settling(rank, world, exchange)
    look = partial(_look, hierarchy, step)
    hierarchy.copies.forget()
    looks = 0
    try:
        candidates, skipped = ranks.first(look)
    except NoCheckpoint as none:
        if torn:
            raise _torn_by(None, str(none)) from none
        raise
    while candidates:
        at = candidates.pop(0)
        who = (rank, world, on_world_change)
        loading = _Loading(hierarchy, at, state, *who, strict=strict, cast=cast)
        with timed(sink, Stage.RESTORE, at.step), loading:
            # Nothing is overwritten on any rank before all know that it fits.
            found = ranks.settle("planning a restore", loading.plan(), at)
            if found.kind == WELL:
                found = ranks.settle("restore", loading.read(), at)
            torn = torn or (found.touched and found.kind != WELL)
            if found.kind == GONE:
                looks += 1
                if looks < _LOOKS:
                    # A writer beside us removed it since we looked: then newer ones are there.
                    candidates, skipped = ranks.first(look)
                else:
                    skipped.append((at.step, found.why, False))
                continue
            if found.kind in (DAMAGED, UNREAD):
                skipped.append((at.step, found.why, found.kind == UNREAD))
                continue
            if found.kind == WRONG:
                if not torn:
                    raise found.own or IncompatibleCheckpoint(f"step {at.step}: {found.why}")
                what = f"putting it back raised {found.why}"
                raise _torn_by(at, what) from found.own
            found = ranks.settle("restored", loading.finish(torn=torn), at)
            if found.kind != WELL:
                raise _torn_by(at, found.why) from found.own
        report = loading.report
        for passed, why, unread in skipped:
            if why.startswith(MARKED):
                fate = "was passed over"
            elif unread:
                fate = "cannot be read and was passed over"
            else:
                fate = "is damaged and was passed over"
            _warn(f"checkpoint of step {passed} {fate}: {why}")
        if report.world_change:
            _warn(f"checkpoint of step {at.step} was {report.world_change}")
        if report.rng_problems:
            _warn(f"random number generators: {'; '.join(report.rng_problems)}")
        return replace(
            report,
            attempt=at.attempt,
            restored_bytes=loading.restored_bytes,
            duration_s=perf_counter() - start_s,
            skipped=tuple((passed, why) for passed, why, _ in skipped),
            **_notes_of(hierarchy),
        )
    raise _none_loaded(hierarchy, skipped, torn)


def _none_loaded(
    hierarchy: Hierarchy, skipped: Sequence[tuple[int, str, bool]], torn: bool
) -> CheckpointError:
    """What to raise where none could be loaded: damage is only what arrived and was wrong."""
    lines = [f"none of {len(skipped)} checkpoints could be loaded:"]
    lines += [f"  step {passed}: {why}" for passed, why, _ in skipped]
    lines += [
        f"tier {tier} may have them whole, but cannot be read: {why}"
        for tier, why in hierarchy.copies.notes.unreachable.items()
    ]
    if torn:
        lines.append("The live state was overwritten in part: build it anew before training.")
    if not any(unread for _, _, unread in skipped):
        kind = TornRestore if torn else CorruptCheckpoint
        return kind(hierarchy.spoken, "\n".join(lines))
    lines.append("What cannot be read may be whole: restore again once it can be reached.")
    message = f"{hierarchy.spoken}: " + "\n".join(lines)
    return (UnfinishedRestore if torn else StoreError)(message, retryable=True)


def _torn_by(at: CheckpointId | None, what: str) -> TornRestore:
    return TornRestore(
        "(state)" if at is None else f"step {at.step} (attempt {at.attempt})",
        f"{what}; the live state was overwritten in part: build it anew before training",
    )


def _warn(message: str) -> None:
    warnings.warn(message, CheckpointWarning, stacklevel=5)


def _notes_of(hierarchy: Hierarchy) -> dict[str, Any]:
    notes = hierarchy.copies.notes
    names = [place.name for place in hierarchy.copies.places]
    return {
        "served": tuple(notes.served.get(name, Served(name)) for name in names),
        "damaged": tuple(notes.bad.values()),
        "unreachable": tuple(notes.unreachable.items()),
    }


def _look(hierarchy: Hierarchy, step: int | None) -> Look:
    """What may be restored, best first, and what would have been better and is passed over."""
    listing = hierarchy.survey()
    candidates, passed = choose_from(hierarchy, listing, step)
    if not candidates and not passed:
        raise NoCheckpoint(_none_there(hierarchy, listing, step))
    return candidates, [(at.step, why, unread) for at, why, unread in passed]


def _none_there(hierarchy: Hierarchy, listing: Listing, step: int | None) -> str:
    steps = sorted({c.step for c in listing.committed})
    there = f"steps {steps[:20]} are there" if steps else "there is no checkpoint yet"
    what = "" if step is None else f"step {step}: "
    away = hierarchy.copies.notes.unreachable.items()
    perhaps = "; ".join(f"tier {tier} may have some, but cannot be read: {w}" for tier, w in away)
    return f"{hierarchy.spoken}: {what}{there}" + (f"; {perhaps}" if perhaps else "")


class _Loading:
    """One try at one checkpoint."""

    def __init__(
        self,
        hierarchy: Hierarchy,
        at: CheckpointId,
        state: State,
        rank: int,
        world: int,
        on_world_change: WorldChange,
        *,
        strict: bool,
        cast: bool,
    ) -> None:
        self._hierarchy = hierarchy
        self._at = at
        self._state = state
        self._rank = rank
        self._world = world
        self._on_world_change = on_world_change
        self._strict = strict
        self._cast = cast
        self._open = ExitStack()
        self._planned: tuple[Filling, RestorePlan] | None = None
        self.report = RestoreReport(step=at.step)
        self._was_set = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.close()

    @property
    def touched(self) -> bool:
        """Whether live state may have been written to."""
        return self._was_set or (self._planned is not None and self._planned[0].touched)

    @property
    def restored_bytes(self) -> int:
        """Bytes read into live state."""
        return 0 if self._planned is None else self._planned[0].restored_bytes

    def plan(self) -> Found:
        """Find a place for all that this rank needs; changes nothing."""
        return self._try(self._plan)

    def read(self) -> Found:
        """Read it into live memory, with all checks."""
        return self._try(self._read)

    def _try(self, work: Callable[[], None]) -> Found:
        try:
            work()
        except NoCheckpoint as failure:
            return Found(GONE, str(failure), self.touched, failure)
        except CorruptCheckpoint as failure:
            return Found(DAMAGED, str(failure), self.touched, failure)
        except StoreError as failure:
            return Found(UNREAD, str(failure), self.touched, failure)
        except Exception as failure:  # noqa: BLE001  the caller raises it, on all ranks
            why = str(failure) if isinstance(failure, CheckpointError) else repr(failure)
            return Found(WRONG, why, self.touched, failure)
        return Found(WELL, touched=self.touched)

    @put_off()
    def _plan(self) -> None:
        checkpoint = self._open.enter_context(self._hierarchy.open(self._at))
        indexes = checkpoint.indexes
        own = indexes[self._rank % len(indexes)]
        decoding = Decoding(checkpoint)
        plan = self._state.plan(
            own,
            self._read_tree(decoding, own),
            strict=self._strict,
            cast=self._cast,
            indexes=indexes,
            text_of=partial(self._read_tree, decoding),
            on_world_change=self._on_world_change,
        )
        self._planned = Filling(checkpoint, decoding), plan

    @put_off()
    def _read(self) -> None:
        assert self._planned is not None, "plan() comes first"
        filling, plan = self._planned
        indexes = filling.checkpoint.indexes
        # Ranks that want the same begin at different places: each finds in the page cache what
        # the others have read meanwhile.
        first = self._rank % len(indexes)
        places = plan.places.sinks.items()
        # What nobody else reads need not go through the page cache: that is a copy less, and as
        # much memory.
        alone = self._world == 1 or (
            self._world == len(indexes) and {r for (r, _), _ in places} == {self._rank}
        )
        for index in (*indexes[first:], *indexes[:first]):
            sinks = {key: sinks for (rank, key), sinks in places if rank == index.rank}
            filling.read(index, sinks, once=alone)

    def finish(self, *, torn: bool) -> Found:
        """Set Python values.

        Args:
            torn: Whether live state was overwritten with what turned out to be damaged.
        """
        assert self._planned is not None, "plan() comes first"
        plan = self._planned[1]
        self._was_set = True
        try:
            problems = plan.finish()
        except Exception as failure:  # noqa: BLE001  the caller raises it, on all ranks
            return Found(WRONG, f"putting it back raised {failure!r}", touched=True, own=failure)
        self.report = self._report(plan, problems)
        left = [*self.report.missing_keys, *(key for key, _, _ in self.report.mismatched)]
        if torn and left:
            why = (
                f"a newer, damaged one had been read into {left[0]!r}, which this one does not hold"
            )
            return Found(WRONG, why, touched=True)
        return Found(WELL, touched=True)

    def _report(self, plan: RestorePlan, problems: Sequence[str]) -> RestoreReport:
        matching = plan.matching
        return RestoreReport(
            step=self._at.step,
            rng_problems=tuple(problems),
            missing_keys=tuple(matching.missing_keys),
            unexpected_keys=tuple(matching.unexpected_keys),
            mismatched=tuple(matching.mismatched),
            cast_keys=tuple(matching.cast),
            world_change=plan.world_change,
        )

    def _read_tree(self, decoding: Decoding, index: Index) -> bytes:
        tree_leaf_bytes(index)
        return decoding.read_leaf(index, next(x for x in index.leaves if x.key == TREE_KEY))
