"""What is known of the tiers of a run: at the start, between promotions, and by the trainer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, TypeVar

from asymcheck.errors import (
    CheckpointError,
    NoCheckpoint,
    ObjectNotFound,
    OptionError,
    StoreError,
)
from asymcheck.planning.cadence import EverySeconds, EverySteps
from asymcheck.planning.retention import CheckpointId, Parents, lineage_of
from asymcheck.planning.tiers import Saved, Tier, due_in
from asymcheck.storage.bounded import within
from asymcheck.storage.listing import Listing
from asymcheck.storage.manifest import Attempt, Manifest, dump_attempt
from asymcheck.storage.mirror import open_copy, other_run, share_attempts
from asymcheck.storage.names import attempt_name, parse_name
from asymcheck.storage.repository import Hold, Repository, open_repository
from asymcheck.storage.runs import RECORD_BYTES
from asymcheck.storage.store import Store, open_store, read_all

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TierState:
    """How far a tier is behind the home tier, and what was done for it.

    Attributes:
        name: Of the tier.
        newest_step: Of the newest checkpoint there that led to the newest at home, 0 for none.
        lag_steps: Steps from that one to the newest at home.
        lag_bytes: Bytes that are still to be written until it has what it should.
        lag_s: Seconds between the captures of the two; 0 where there is none.
        promoted: Checkpoints that were copied there, bases not counted.
        skipped: Checkpoints that should have gone there and that newer ones overtook.
        failed: Checkpoints that could not be copied, all tries over.
        moved_bytes: Bytes written there.
        last_failure: Why it failed lately; empty once it works again.
    """

    name: str
    newest_step: int = 0
    lag_steps: int = 0
    lag_bytes: int = 0
    lag_s: float = 0.0
    promoted: int = 0
    skipped: int = 0
    failed: int = 0
    moved_bytes: int = 0
    last_failure: str = ""


class TierBoard:
    """The states of all tiers as the trainer knows them. Several threads use it.

    Args:
        names: Of the tiers, nearest first.
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._states = {name: TierState(name) for name in names}
        self._served = dict.fromkeys(names, 0)
        self._asked = dict.fromkeys(names, 0)
        self._told: set[str] = set()
        self._changed = threading.Condition()

    def open_requests(self) -> dict[str, int]:
        """Of each tier that shall get the newest and was not followed yet: the latest request."""
        with self._changed:
            return {n: asked for n, asked in self._asked.items() if asked > self._served[n]}

    def states(self) -> tuple[TierState, ...]:
        """Of each tier the latest, nearest first."""
        with self._changed:
            return tuple(self._states.values())

    def note(self, state: TierState, served: int) -> None:
        """Take notice of a state, in which the requests up to that number were followed."""
        with self._changed:
            self._states[state.name] = state
            self._served[state.name] = max(served, self._served[state.name])
            self._changed.notify_all()

    def give_up(self) -> None:
        """Nobody follows the requests made so far."""
        with self._changed:
            self._served = dict(self._asked)
            self._changed.notify_all()

    def ask(self, name: str) -> int:
        """Number of a new request that the newest goes to a tier."""
        with self._changed:
            self._asked[name] += 1
            return self._asked[name]

    def await_served(self, name: str, number: int, timeout_s: float | None) -> bool:
        """Wait until a request was followed; whether the tier then had all it should."""
        with self._changed:
            done = self._changed.wait_for(lambda: self._served[name] >= number, timeout_s)
            state = self._states[name]
            return done and not state.lag_bytes and not state.last_failure

    def unfinished(self) -> list[str]:
        """At the end: one message for each tier that lacks something and did not fail."""
        return [
            f"tier {state.name} lacks the newest checkpoint: its {state.lag_bytes} bytes were not "
            f"there in time; the next start goes on with it"
            for state in self.states()
            if state.lag_bytes and not state.last_failure
        ]

    def complaints(self) -> list[str]:
        """What the user should know: one message for each tier that began to fail."""
        with self._changed:
            failing = {s.name: s.last_failure for s in self._states.values() if s.last_failure}
            new = failing.keys() - self._told
            self._told = set(failing)
            return [
                f"tier {name} does not get its checkpoints: {failing[name]}. Training goes on; it "
                f"is tried again with each checkpoint that is due there"
                for name in failing
                if name in new
            ]


class Standing:
    """What one tier held when it was looked at last, and what it should get. Any thread uses it.

    Attributes:
        tier: Which.
        there: What it held, with the time of each capture.
        damaged: What cannot be copied, since it is damaged at home.
    """

    def __init__(self, tier: Tier, there: Mapping[CheckpointId, float] | None = None) -> None:
        self.tier = tier
        self.there = there or {}
        self.damaged: set[CheckpointId] = set()
        self._taking: CheckpointId | None = None
        self._skipped: set[CheckpointId] = set()
        self._lock = threading.Lock()

    def lineage(self, home: Mapping[CheckpointId, Manifest], parents: Parents) -> list[Saved]:
        """What led to the newest checkpoint at home, wherever it is, oldest first."""
        if not home:
            return []
        created = {**self.there, **{at: m.created_s for at, m in home.items()}}
        found = lineage_of(max(home).attempt, parents, created)
        return [Saved(at, created[at]) for at in found]

    def choose(
        self, home: Mapping[CheckpointId, Manifest], parents: Parents, *, newest_too: bool = False
    ) -> tuple[CheckpointId | None, list[CheckpointId]]:
        """Take the newest of what the tier lacks; also those that it so overtakes, each told once.

        Until the next call retention leaves it.
        """
        with self._lock:
            pending = self._pending(home, parents, newest_too=newest_too)
            self._taking = pending[-1] if pending else None
            return self._taking, self._overtaken(pending)

    def hold(
        self, home: Mapping[CheckpointId, Manifest], parents: Parents
    ) -> tuple[set[CheckpointId], list[CheckpointId]]:
        """What must stay at home for this tier: at most the one that is being copied and the
        newest of those that wait. Also those that are overtaken, each told once.
        """
        with self._lock:
            pending = self._pending(home, parents)
            held = set(pending[-1:])
            if self._taking is not None:
                held.add(self._taking)
            return held, self._overtaken(pending)

    def _pending(
        self, home: Mapping[CheckpointId, Manifest], parents: Parents, *, newest_too: bool = False
    ) -> list[CheckpointId]:
        lineage = self.lineage(home, parents)
        due = due_in(self.tier.every, lineage, self.there, newest_too=newest_too)
        return [at for at in due if at in home and at not in self.damaged]

    def _overtaken(self, pending: Sequence[CheckpointId]) -> list[CheckpointId]:
        passed = {at for at in pending[:-1] if at != self._taking}
        new = sorted(passed - self._skipped)
        self._skipped = passed
        return new


def hold_for(standings: Sequence[Standing]) -> Hold:
    """What retention at home leaves for tiers that are looked at by nobody yet."""

    def hold(listing: Listing, parents: Parents) -> set[CheckpointId]:
        held = (standing.hold(listing.committed, parents)[0] for standing in standings)
        return set().union(*held)

    return hold


# --- for another process ----------------------------------------------------------


def describe_tiers(tiers: Sequence[tuple[Tier, Store]]) -> list[dict[str, Any]]:
    """Tiers as JSON, by the URLs of their stores."""
    return [
        {
            "url": store.url,
            "every": tier.every and [type(tier.every).__name__, *astuple(tier.every)],
            "keep_last": tier.keep_last,
            "name": tier.label,
            "verify": tier.verify,
        }
        for tier, store in tiers
    ]


def rebuild_tiers(told: Sequence[dict[str, Any]]) -> list[tuple[Tier, Store]]:
    """What ``describe_tiers`` described, each with its store."""
    kinds = {kind.__name__: kind for kind in (EverySteps, EverySeconds)}
    found = []
    for row in told:
        every = row["every"]
        tier = Tier(**{**row, "every": every and kinds[every[0]](every[1])})
        found.append((tier, open_store(row["url"])))
    return found


# --- the start ------------------------------------------------------------------


class Tiers:
    """The tiers of one writer at its start. Used by the training thread of rank 0.

    Args:
        tiers: Each with its store, nearest first.
        timeout_s: How long all of them together are waited for, at each call.
        warn: Told of those that cannot be reached.

    Attributes:
        standings: What each held when it was looked at.
        reached: Those that answered so far.
    """

    def __init__(
        self,
        tiers: Sequence[tuple[Tier, Store]],
        timeout_s: float,
        warn: Callable[[str], None],
    ) -> None:
        self._tiers = tiers
        self._timeout_s = timeout_s
        self._warn = warn
        self.reached: list[tuple[Tier, Store]] = []
        self.standings = [Standing(tier) for tier, _ in tiers]

    def run(self) -> str | None:
        """The run that the tiers hold, ``None`` where none holds one; blocks.

        Raises:
            OptionError: Two hold different runs, or one holds something else.
            CorruptCheckpoint: What says which run it is, is damaged in one.
        """
        looks = within(self._timeout_s, [_look(store) for _, store in self._tiers])
        runs: dict[str, Store] = {}
        for look, standing, (tier, store) in zip(looks, self.standings, self._tiers, strict=True):
            if isinstance(look, StoreError):
                self._lost(tier, look)
                continue
            if isinstance(look, CheckpointError):
                look.add_note(f"tier {tier.label}")
                raise look
            self.reached.append((tier, store))
            run, standing.there = look
            if run is not None:
                runs.setdefault(run, store)
        if len(runs) > 1:
            (first, _), (second, store) = list(runs.items())[:2]
            raise other_run(store, second, first)
        return next(iter(runs), None)

    def check(self, run: str, found: str | None) -> None:
        """Make sure that home and tiers hold the same run.

        Raises:
            OptionError: They do not.
        """
        if found is not None and found != run:
            raise other_run(self._tiers[0][1], found, run)

    def claim(self, home: Repository, parent: CheckpointId | None) -> Attempt:
        """Become the writer of a run that has copies: take a number above all in any that can be
        reached; blocks. Its record stands there too before anything is saved under it, so two jobs
        that share only a tier meet there.

        Raises:
            StoreError: The number could not be taken at home.
        """
        while True:
            copies = self._ask([_opened(store, home) for _, store in self.reached])
            attempt = home.claim(parent, max((number for _, number in copies), default=0))
            name, record = attempt_name(attempt.number), dump_attempt(attempt)
            told = self._ask([_put_record(copy, name, record) for copy, _ in copies])
            other = next((found for found in told if found != record), None)
            if other is None:
                return attempt
            # Taken at the same moment by a job with another home: the number is that job's.
            home.store.write(name, [other])

    def _ask(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Make one call of each that can be reached; those that fail are not asked again."""
        found, reached = [], []
        for answer, pair in zip(within(self._timeout_s, calls), self.reached, strict=True):
            if isinstance(answer, OptionError):
                raise answer
            if isinstance(answer, CheckpointError):
                self._lost(pair[0], answer)
            else:
                found.append(answer)
                reached.append(pair)
        self.reached = reached
        return found

    def _lost(self, tier: Tier, failure: CheckpointError) -> None:
        self._warn(
            f"tier {tier.label} could not be reached: {failure}. Training goes on without it; what "
            f"it holds is not known, and it gets its checkpoints once it is back"
        )


def _look(store: Store) -> Callable[[], tuple[str | None, dict[CheckpointId, float]]]:
    def look() -> tuple[str | None, dict[CheckpointId, float]]:
        try:
            run = open_repository(store).run
        except NoCheckpoint:
            return None, {}
        parsed = (parse_name(entry.name) for entry in store.list())
        # When they were captured is not known without reading them: a tier with a cadence in
        # seconds then counts as due, which holds one checkpoint more.
        unknown_s = float("nan")
        return run, {p.at: unknown_s for p in parsed if p is not None and p.kind == "manifest"}

    return look


def _opened(store: Store, home: Repository) -> Callable[[], tuple[Repository, int]]:
    def opened() -> tuple[Repository, int]:
        copy = open_copy(store, home.run)
        share_attempts(home, copy)
        return copy, copy.greatest_attempt()

    return opened


def _put_record(copy: Repository, name: str, record: bytes) -> Callable[[], bytes]:
    def put() -> bytes:
        if record_in(copy.store, name) == record.decode("ascii"):
            raise OptionError(
                f"tiers: {copy.store.url} is the same place as the root, under another name: give "
                f"each tier a place of its own"
            )
        return (
            record if copy.store.create(name, record) else read_all(copy.store, name, RECORD_BYTES)
        )

    return put


def record_in(store: Store, name: str) -> str:
    """A small text object; empty where there is none. Blocks."""
    try:
        return read_all(store, name, RECORD_BYTES).decode("ascii", "replace")
    except ObjectNotFound:
        return ""
