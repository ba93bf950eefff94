"""Copies of committed checkpoints go up the tiers, behind the training and behind persisting.

Each tier has a thread of its own, so one that is slow or gone holds up no other. A tier that is
behind takes the newest of what waits for it; what is overtaken is skipped. Nothing here ever makes
a save fail: what goes wrong is told in the state of the tier.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import monotonic, perf_counter

from asymcheck.capture import parse_capture
from asymcheck.errors import (
    CheckpointError,
    CorruptCheckpoint,
    IncompatibleCheckpoint,
    NoCheckpoint,
    ObjectNotFound,
    OptionError,
    StoreError,
    SupersededWriter,
    as_checkpoint_error,
)
from asymcheck.events import Sink, Span, Stage
from asymcheck.memory.slot import Slot
from asymcheck.planning.retention import CheckpointId, Parents, Retention
from asymcheck.planning.tiers import Tier
from asymcheck.storage.listing import Listing
from asymcheck.storage.mirror import copy_checkpoint, open_copy, share_attempts
from asymcheck.storage.names import manifest_name, parse_suspect_name
from asymcheck.storage.repository import Repository
from asymcheck.storage.store import Store
from asymcheck.storage.suspects import carry_mark, clear_suspect
from asymcheck.tiering import Standing, TierState

_log = logging.getLogger(__name__)

PAUSES_S = (0.5, 2.0, 8.0)
"""Between the tries of one promotion, in seconds."""
_SPACE_MARGIN_BYTES = 1 << 20
_POLL_S = 0.05
_COUNTED = {"promoted", "skipped", "failed", "moved_bytes"}

Told = Callable[[TierState, int], None]
"""Receives the state of a tier, and the number of the latest request that it followed."""


class Promoter:
    """Takes what is committed in the home tier to all others, on a daemon thread for each.

    Args:
        home: Where checkpoints are committed. Its retention leaves what a tier still needs.
        tiers: Each with its store.
        told: Receives states, on these threads.
        sink: Receives spans, on these threads and on those that apply retention.
        states: What was counted before, as by a process that this one replaces.
        pauses_s: Between the tries of one promotion, in seconds; ``None`` for ``PAUSES_S``.
    """

    def __init__(
        self,
        home: Repository,
        tiers: Sequence[tuple[Tier, Store]],
        told: Told,
        sink: Sink,
        states: Mapping[str, TierState] | None = None,
        pauses_s: Sequence[float] | None = None,
    ) -> None:
        known, pauses_s = states or {}, PAUSES_S if pauses_s is None else pauses_s
        self._movers = [
            Mover(home, tier, store, told, sink, known.get(tier.label), pauses_s)
            for tier, store in tiers
        ]
        self._has_expected = False
        if tiers:
            home.hold = self._hold
        for mover in self._movers:
            mover.thread.start()

    def wake(self) -> None:
        """A checkpoint was committed; returns at once."""
        for mover in self._movers:
            mover.wake()

    def ask(self, name: str, number: int) -> None:
        """Take the newest to the tier of that name, due or not; returns at once."""
        for mover in self._movers:
            if mover.state.name == name:
                mover.wake(asked=number)

    def expect_like(self, slot: Slot) -> None:
        """The first checkpoint is in that slot: say where there is no room for one like it."""
        if self._movers and not self._has_expected:
            self._has_expected = True
            capture = parse_capture(slot.meta, "slot")
            for mover in self._movers:
                mover.wake(expected_bytes=capture.raw_bytes * capture.world)

    def close(self, is_over: Callable[[], bool]) -> bool:
        """Take the newest to all tiers and end; blocks until that is done, or time is over.

        A tier that failed before is tried once more.

        Returns:
            Whether all threads ended.
        """
        for mover in self._movers:
            mover.wake(closing=True)
        while any(mover.thread.is_alive() for mover in self._movers) and not is_over():
            for mover in self._movers:
                mover.thread.join(_POLL_S)
        return not any(mover.thread.is_alive() for mover in self._movers)

    def _hold(self, listing: Listing, parents: Parents) -> set[CheckpointId]:
        held: set[CheckpointId] = set()
        for mover in self._movers:
            held |= mover.hold(listing, parents)
        return held


class Mover:
    """Takes checkpoints to one tier, on a thread that its owner starts.

    Args:
        home: Where checkpoints are committed.
        tier: Where to.
        store: Its store.
        told: Receives its state.
        sink: Receives spans.
        state: What was counted before.
        pauses_s: Between the tries of one promotion, in seconds.
    """

    def __init__(
        self,
        home: Repository,
        tier: Tier,
        store: Store,
        told: Told,
        sink: Sink,
        state: TierState | None = None,
        pauses_s: Sequence[float] = PAUSES_S,
    ) -> None:
        self._writer = home  # knows which attempts are its own
        self._home = Repository(home.store, home.run)
        self._tier, self._store, self._told, self._sink = tier, store, told, sink
        self._standing = Standing(tier)
        self._pauses_s = pauses_s
        self._copy: Repository | None = None
        self._shared: set[int] = set()  # attempts whose records are the same in both
        self._unfinished: set[CheckpointId] = set()
        self._is_swept = False  # whether nothing is half written there
        self._is_tidy = False  # whether what earlier writers left half-copied was removed
        self._damage = ""  # of the newest checkpoint that could not be copied for it
        self._lock = threading.Lock()
        self._state = state or TierState(tier.label)
        self._changed = threading.Condition()
        self._woken, self._closing = True, False  # at the start it catches up
        self._asked = self._served = 0
        self._expected_bytes = 0
        self.thread = threading.Thread(target=self._run, name="asymcheck-promote", daemon=True)

    @property
    def state(self) -> TierState:
        """How far the tier is."""
        return self._state

    def wake(self, *, asked: int = 0, expected_bytes: int = 0, closing: bool = False) -> None:
        """Have the thread look, for any of these reasons; returns at once."""
        with self._changed:
            self._woken = True
            self._asked = max(self._asked, asked)
            self._expected_bytes = expected_bytes or self._expected_bytes
            self._closing = self._closing or closing
            self._changed.notify_all()

    def hold(self, listing: Listing, parents: Parents) -> set[CheckpointId]:
        """What retention at home must leave for this tier."""
        held, overtaken = self._standing.hold(listing.committed, parents)
        self._skip(overtaken, listing)
        return held

    # --- the thread -------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._woken)
                self._woken, closing = False, self._closing
                asked, expected_bytes = self._asked, self._expected_bytes
                self._expected_bytes = 0
            self.catch_up(newest_too=closing or asked > self._served, expected_bytes=expected_bytes)
            self._served = asked
            self._tell()
            if closing:
                self._finish()
                return

    def catch_up(self, *, newest_too: bool = False, expected_bytes: int = 0) -> None:
        """Promote until nothing is left, or every try failed; blocks.

        Args:
            newest_too: Whether the newest goes there though it is not due.
            expected_bytes: Size of a checkpoint that will come; 0 for unknown.
        """
        pauses_s = () if self._state.last_failure else self._pauses_s  # it was tried long enough
        for pause_s in (*pauses_s, None):
            try:
                copy = self._opened()
                self._check_room(copy, expected_bytes)
                while self._promote_next(copy, newest_too=newest_too):
                    self._note(last_failure=self._damage)
                    self._tell()
                if not expected_bytes:
                    self._note(last_failure=self._damage)
                return
            except SupersededWriter as overtaken:
                _log.info("tier %s: %s", self._tier.label, overtaken)
                return
            except Exception as bad:  # noqa: BLE001  a store may raise anything
                failure = as_checkpoint_error(bad)
                self._is_swept = False  # what it was writing may lie there in parts
                retryable = isinstance(failure, StoreError) and failure.retryable
                _log.warning("tier %s: %s", self._tier.label, failure)
                if pause_s is None or not retryable:
                    self._note(last_failure=str(failure), failed=1)
                    return
                with self._changed:
                    self._changed.wait_for(lambda: self._closing, pause_s)

    def _opened(self) -> Repository:
        copy = self._copy or open_copy(self._store, self._home.run)
        if not self._is_swept:
            self._check(copy)
            copy.store.sweep()
            self._is_swept = True
        self._copy = copy
        return copy

    def _check(self, copy: Repository) -> None:
        """Make sure that this writer is the newest, at home and in the tier: the record of a newer
        one goes home, where its training meets it too.

        Raises:
            SupersededWriter: There is a newer one.
            OptionError: Another job has the number of an attempt that led here.
        """
        clashes = share_attempts(self._home, copy, self._shared)
        if self._writer.claims:
            attempt = max(claim.number for claim in self._writer.claims)
            self._writer.check_writer(attempt)
        if clashes:
            number = min(clashes)
            raise OptionError(
                f"attempt {number} is one job in {self._home.store.url} and another in "
                f"{copy.store.url}, which could not see each other: end one of the two, and give "
                f"the other a new place for this tier"
            )

    def _check_room(self, copy: Repository, expected_bytes: int) -> None:
        free = copy.store.free_bytes() if expected_bytes else None
        if free is not None and free < expected_bytes + _SPACE_MARGIN_BYTES:
            self._note(
                last_failure=f"a checkpoint needs about {expected_bytes} bytes, {free} are free in "
                f"{self._tier.label}"
            )
            self._tell()

    # --- one promotion ------------------------------------------------------------

    def _promote_next(self, copy: Repository, *, newest_too: bool) -> bool:
        """Promote the newest of what is due; returns whether there was something to do."""
        self._check(copy)
        home, parents, there = _look(self._home), self._home.parents(), _look(copy)
        self._standing.there = {at: m.created_s for at, m in there.committed.items()}
        at, overtaken = self._standing.choose(home.committed, parents, newest_too=newest_too)
        self._skip(overtaken, home)
        self._measure(home, parents, there, at)
        self._remove_remnants(copy, there, home, at)
        self._carry_marks(copy, there, home)
        if at is None:
            return False
        start_s, before = perf_counter(), self._state.moved_bytes
        error = ""
        try:
            for one in self._missing(at, home, there):
                if one in home.suspects:  # before it: nobody restores it unmarked
                    carry_mark(self._home.copies, one, copy.store)
                self._take(copy, one)
        except (NoCheckpoint, ObjectNotFound) as gone:
            if at in self._home.survey().committed:
                raise StoreError(f"{self._home.store.url}: {gone}", retryable=True) from gone
            error = f"it was removed before it was copied: {gone}"
            return True
        except (CorruptCheckpoint, IncompatibleCheckpoint) as damage:
            error = f"it cannot be copied: {damage}"
            self._standing.damaged.add(at)
            self._note(failed=1)
            self._damage = f"step {at.step} is damaged at home and does not go there: {damage}"
            _log.warning("tier %s: %s", self._tier.label, self._damage)
            return True
        except BaseException as failure:
            error = f"{type(failure).__name__}: {failure}"
            raise
        finally:
            moved = self._state.moved_bytes - before
            took_s = perf_counter() - start_s
            self._sink(
                Span(Stage.PROMOTE, at.step, start_s, took_s, moved, error, self._tier.label)
            )
        self._damage = ""
        self._note(promoted=1)
        self._retain(copy, at)
        return True

    def _carry_marks(self, copy: Repository, there: Listing, home: Listing) -> None:
        """Have what both hold marked as suspect in the tier where it is at home, and not else."""
        both = home.committed.keys() & there.committed.keys()
        for at in sorted(both & (home.suspects - there.suspects)):
            carry_mark(self._home.copies, at, copy.store)
        for at in sorted(both & (there.suspects - home.suspects)):
            clear_suspect(copy.store, at)

    def _missing(self, at: CheckpointId, home: Listing, there: Listing) -> list[CheckpointId]:
        """It, and before it what it stands on and the tier lacks."""
        chain = [*reversed(home.bases_of(at)), at]
        return [one for one in chain if one not in there.committed]

    def _take(self, copy: Repository, at: CheckpointId) -> None:
        self._unfinished.add(at)
        with self._home.open(at) as source:
            free, need = copy.store.free_bytes(), source.manifest.stored_bytes
            if free is not None and free < need + _SPACE_MARGIN_BYTES:
                raise StoreError(
                    f"{copy.store.url}: step {at.step} needs {need} bytes, {free} are free: free "
                    f"some space or lower keep_last of the tier",
                    retryable=False,
                )
            copy_checkpoint(
                self._home,
                source,
                copy,
                self._tier.verify,
                lambda: self._check(copy),
                lambda nbytes: self._note(moved_bytes=nbytes),
            )
        self._unfinished.discard(at)

    def _retain(self, copy: Repository, at: CheckpointId) -> None:
        try:
            copy.retain(at, Retention(keep_last=self._tier.keep_last))
        except StoreError as failure:
            _log.warning("tier %s: retention failed: %s", self._tier.label, failure)

    def _remove_remnants(
        self, copy: Repository, there: Listing, home: Listing, at: CheckpointId | None
    ) -> None:
        """Remove what copies that were cut short left, but for that of the next one."""
        wanted = {at, *(home.bases_of(at) if at else ())}
        if self._is_tidy:
            remnants = {one for one in self._unfinished if one not in wanted}
        else:
            newest = max((c.number for c in self._writer.claims), default=0)
            found = [(one, name) for one, name in there.leftovers if one.attempt <= newest]
            remnants = {one for one, _ in found} - wanted
            for name in (n for one, n in found if one in remnants and parse_suspect_name(n)):
                copy.store.delete(name)
        for one in remnants - there.committed.keys():
            copy.discard(one)
            self._unfinished.discard(one)
        self._is_tidy = True

    # --- what is told ---------------------------------------------------------------

    def _measure(
        self, home: Listing, parents: Parents, there: Listing, at: CheckpointId | None
    ) -> None:
        lineage = self._standing.lineage(home.committed, parents)
        newest = lineage[-1] if lineage else None
        known = [saved for saved in lineage if saved.at in there.committed]
        lag_bytes = 0
        if at is not None:
            missing = self._missing(at, home, there)
            lag_bytes = sum(home.committed[one].stored_bytes for one in missing)
        self._note(
            newest_step=known[-1].at.step if known else 0,
            lag_steps=newest.at.step - (known[-1].at.step if known else 0) if newest else 0,
            lag_s=max(0.0, newest.created_s - known[-1].created_s) if newest and known else 0.0,
            lag_bytes=lag_bytes,
        )

    def _skip(self, overtaken: Sequence[CheckpointId], home: Listing) -> None:
        for at in overtaken:
            newest = max(home.committed).step
            why = f"skipped: the tier was behind, and step {newest} is newer"
            self._sink(Span(Stage.PROMOTE, at.step, perf_counter(), 0.0, 0, why, self._tier.label))
        if overtaken:
            self._note(skipped=len(overtaken))

    def _note(self, **changes: int | float | str) -> None:
        """Set what is said of now, add to what is counted."""
        with self._lock:  # retention counts too, on other threads
            for name in _COUNTED & changes.keys():
                changes[name] += getattr(self._state, name)
            self._state = replace(self._state, **changes)  # type: ignore[arg-type]

    def _tell(self) -> None:
        self._told(self._state, self._served)

    def _finish(self) -> None:
        try:
            if self._copy is not None:
                self._copy.finish()
        except CheckpointError as failure:
            _log.warning("tier %s: left-overs stay: %s", self._tier.label, failure)


def _look(repository: Repository) -> Listing:
    """What is there, each manifest read once; what is gone is forgotten."""
    found = repository.survey()
    repository.known = {manifest_name(at): manifest for at, manifest in found.committed.items()}
    return found


def deadline(timeout_s: float) -> Callable[[], bool]:
    """Whether so many seconds have passed since now."""
    until_s = monotonic() + timeout_s
    return lambda: monotonic() >= until_s
