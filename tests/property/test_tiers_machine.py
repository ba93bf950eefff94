"""Any order of saves, promotions, failures, crashes, rewinds, lost hosts: the last copy stays."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asymcheck import Tier
from asymcheck.decoding import verify
from asymcheck.errors import CheckpointError, NoCheckpoint
from asymcheck.planning.cadence import EverySeconds, EverySteps
from asymcheck.planning.retention import CheckpointId, Retention
from asymcheck.promotion import Mover
from asymcheck.storage.memory import MemoryStore
from asymcheck.storage.repository import Repository, create_repository, open_repository
from asymcheck.storage.store import Store
from asymcheck.testing.checkpoints import commit_bytes, read_bytes
from asymcheck.testing.faulty import Fault, FaultyStore
from asymcheck.tiering import Tiers, hold_for

N_TIERS = 2
BOUND_S = 30.0
NO_FAULT = Fault(do="none")
FAULTS = st.builds(
    Fault,
    at=st.integers(1, 60),
    times=st.sampled_from([1, 1, 3, 0]),
    when=st.sampled_from(["before", "mid", "after"]),
    do=st.sampled_from(["EIO", "ENOSPC", "short"]),
)
EVERY = st.sampled_from([None, EverySteps(2), EverySteps(5), EverySeconds(25)])


def content(at: CheckpointId) -> dict[str, bytes]:
    return {"": b"{}", "w": bytes([at.step % 251, at.attempt % 251]) * 40}


class TieredRun(RuleBasedStateMachine):
    """One job with a home and two tiers; every start of it is an attempt."""

    @initialize(
        every=st.lists(EVERY, min_size=N_TIERS, max_size=N_TIERS),
        keep=st.lists(st.sampled_from([1, 2, None]), min_size=N_TIERS, max_size=N_TIERS),
        keep_home=st.integers(1, 3),
    )
    def begin(self, every: list[object], keep: list[int | None], keep_home: int) -> None:
        self.far = [FaultyStore(MemoryStore(f"far-{i}")) for i in range(N_TIERS)]
        self.tiers = [
            Tier(store, every=every[i], keep_last=keep[i], name=str(i))  # type: ignore[arg-type]
            for i, store in enumerate(self.far)
        ]
        self.retention = Retention(keep_home)
        self.hosts = 0
        self.newest: CheckpointId | None = None
        self.copied: list[CheckpointId | None] = [None] * N_TIERS
        self.home_store = MemoryStore("home-0")
        self.step = 0
        self.start(None)

    def start(self, parent: CheckpointId | None) -> None:
        """A new process: what it knows, it knows from the stores."""
        pairs = list(zip(self.tiers, self.far, strict=True))
        at_start = Tiers(pairs, BOUND_S, lambda message: None)
        self.home = create_repository(self.home_store, at_start.run())
        self.home.hold = hold_for(at_start.standings)
        self.attempt = at_start.claim(self.home, parent).number
        self.movers = [
            Mover(self.home, tier, store, lambda s, n: None, lambda span: None, pauses_s=())
            for tier, store in pairs
        ]
        self.home.hold = lambda listing, parents: set().union(
            *(mover.hold(listing, parents) for mover in self.movers)
        )

    # --- what happens ---------------------------------------------------------

    @rule(steps=st.integers(1, 3))
    def save(self, steps: int) -> None:
        self.step += steps
        at = CheckpointId(self.attempt, self.step)
        commit_bytes(self.home, at, content(at), created_s=10.0 * self.step)
        self.newest = at
        self.home.retain(at, self.retention)

    @rule(which=st.integers(0, N_TIERS - 1), newest_too=st.booleans())
    def promote(self, which: int, newest_too: bool) -> None:
        self.movers[which].catch_up(newest_too=newest_too)
        assert self.movers[which].state.last_failure == ""
        if newest_too and self.newest in self.at_home():
            assert self.newest in open_repository(self.far[which]).survey().committed

    @rule(which=st.integers(0, N_TIERS - 1), fault=FAULTS, crash=st.booleans())
    def fail(self, which: int, fault: Fault, crash: bool) -> None:
        self.far[which].fault = fault
        self.movers[which].catch_up()
        self.far[which].fault = NO_FAULT
        if crash:
            self.start(self.newest)

    @rule()
    def restart(self) -> None:
        self.start(self.newest)

    @precondition(lambda self: self.newest is not None)
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        lineage = self.home.lineage()
        if lineage:
            parent = data.draw(st.sampled_from(lineage))
            self.start(parent)
            self.step = parent.step
            self.save(1)

    @rule()
    def lose_the_host(self) -> None:
        """The next one has an empty home, and continues from what the tiers hold."""
        found = [max(listing, default=None) for listing in self.in_tiers()]
        known = [at for at in found if at is not None]
        self.hosts += 1
        self.home_store = MemoryStore(f"home-{self.hosts}")
        self.newest = max(known, default=None)
        self.step = self.newest.step if self.newest else self.step
        self.start(self.newest)

    # --- what always holds ------------------------------------------------------

    def in_tiers(self) -> list[list[CheckpointId]]:
        found = []
        for store in self.far:
            try:
                found.append(sorted(open_repository(store.inner).survey().committed))
            except (NoCheckpoint, CheckpointError):
                found.append([])
        return found

    @invariant()
    def the_newest_is_whole_somewhere(self) -> None:
        if self.newest is None:
            return
        places: list[Store] = [self.home_store, *(store.inner for store in self.far)]
        there = [
            p
            for p, known in zip(places, [self.at_home(), *self.in_tiers()], strict=True)
            if self.newest in known
        ]
        assert there
        assert any(self.is_good(open_repository(place), self.newest) for place in there)

    @invariant()
    def all_that_a_tier_lists_is_whole(self) -> None:
        for store, listed in zip(self.far, self.in_tiers(), strict=True):
            for at in listed:
                assert self.is_good(open_repository(store.inner), at)

    @invariant()
    def a_tier_never_loses_its_newest_but_for_a_newer_one(self) -> None:
        for i, listed in enumerate(self.in_tiers()):
            before, now = self.copied[i], max(listed, default=None)
            if before is not None:
                assert now is not None
                assert now >= before
            self.copied[i] = now

    @invariant()
    def what_is_held_at_home_is_bounded(self) -> None:
        held = self.retention.keep_last + 2 * N_TIERS  # type: ignore[operator]
        lineage = self.home.lineage() if self.newest else []
        assert len(lineage) <= held + 1  # what was left by a crash goes with the next save

    def at_home(self) -> list[CheckpointId]:
        return sorted(self.home.survey().committed)

    @staticmethod
    def is_good(repository: Repository, at: CheckpointId) -> bool:
        return not list(verify(repository, at)) and read_bytes(repository, at) == content(at)


TestTieredRun = TieredRun.TestCase
TestTieredRun.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
