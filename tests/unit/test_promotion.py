"""Promotion: what goes to a tier, what is held for it, what is skipped, what comes of failures."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from asymcheck import Tier, promotion
from asymcheck.decoding import verify
from asymcheck.errors import SupersededWriter
from asymcheck.events import Span, Stage
from asymcheck.planning.cadence import EverySeconds, EverySteps
from asymcheck.planning.retention import CheckpointId, Retention
from asymcheck.promotion import Mover, Promoter
from asymcheck.storage.manifest import dump_attempt
from asymcheck.storage.memory import MemoryStore
from asymcheck.storage.names import attempt_name, manifest_name
from asymcheck.storage.repository import create_repository, open_repository
from asymcheck.storage.store import Readable, Store
from asymcheck.testing.checkpoints import commit_bytes, read_bytes
from asymcheck.testing.faulty import Fault, FaultyStore
from asymcheck.testing.throttled import Speed, ThrottledStore
from asymcheck.tiering import TierBoard, TierState

BOUND_S = 20.0
LEAF = 100_000  # several chunks, and gaps between them


def content(step: int) -> dict[str, bytes]:
    return {"": b"{}", "w": bytes([step % 251]) * LEAF, "v": bytes([step % 13]) * LEAF}


class Home:
    """A home tier whose retention leaves what one other tier needs; the promotion is called."""

    def __init__(self, store: Store | None = None, keep_last: int | None = 1, **tier: Any) -> None:
        self.repository = create_repository(store or MemoryStore("home"))
        self.retention = Retention(keep_last)
        self.spans: list[Span] = []
        self.far = tier.pop("far", None) or FaultyStore(MemoryStore("far"))
        self.tier = Tier(self.far, name="far", **tier)
        self.attempt = self.repository.claim(None).number
        self.mover = self.start()

    def start(self) -> Mover:
        """As another process would, which knows nothing of what was done before."""
        mover = Mover(
            self.repository,
            self.tier,
            self.far,
            lambda state, served: None,
            self.spans.append,
            pauses_s=(0.0, 0.0),
        )
        self.repository.hold = mover.hold
        return mover

    def commit(self, *steps: int) -> None:
        for step in steps:
            at = CheckpointId(self.attempt, step)
            commit_bytes(self.repository, at, content(step), pack_bytes=1 << 17)
            self.repository.retain(at, self.retention)

    def claim(self, attempt: int, step: int) -> None:
        self.attempt = self.repository.claim(CheckpointId(attempt, step)).number

    @property
    def state(self) -> TierState:
        return self.mover.state

    @property
    def at_home(self) -> list[int]:
        return [at.step for at in self.repository.survey().committed]

    @property
    def there(self) -> list[int]:
        return [at.step for at in open_repository(self.far).survey().committed]

    def errors(self) -> list[tuple[int, str]]:
        return [(s.step, s.error) for s in self.spans if s.stage is Stage.PROMOTE and s.error]


def whole(store: Store) -> None:
    """Everything that is listed there is complete, verified, and what was saved."""
    repository = open_repository(store)
    listing = repository.survey()
    assert not listing.damaged
    for at in listing.committed:
        assert list(verify(repository, at)) == []
        assert read_bytes(repository, at) == content(at.step)


def objects(store: Store) -> dict[str, bytes]:
    while isinstance(store, FaultyStore | ThrottledStore):
        store = store.inner
    return dict(store._objects)  # type: ignore[attr-defined]


# --- what goes there ------------------------------------------------------------


def test_a_copy_has_the_same_objects_with_the_same_bytes() -> None:
    home = Home(keep_last=None)
    home.commit(1)
    home.mover.catch_up()
    home.commit(2)
    home.mover.catch_up()
    assert objects(home.far) == objects(home.repository.store)
    assert home.state == TierState("far", newest_step=2, promoted=2, moved_bytes=moved(home))


def moved(home: Home) -> int:
    named = (n for n in objects(home.far) if n.startswith("step-") and "MANIFEST" not in n)
    return sum(len(objects(home.far)[name]) for name in named)


def test_a_tier_that_is_behind_takes_the_newest_and_each_that_is_overtaken_is_told_once() -> None:
    home = Home(keep_last=None)
    home.commit(1, 2, 3, 4)
    home.mover.catch_up()
    home.mover.catch_up()
    assert home.there == [4]
    assert home.state.skipped == 3
    assert [step for step, _ in home.errors()] == [1, 2, 3]
    assert all("step" in why and "is newer" in why for _, why in home.errors())


def test_only_what_is_due_goes_there_and_the_newest_where_it_is_asked_for() -> None:
    home = Home(every=EverySteps(2))
    home.commit(1)
    home.mover.catch_up()
    assert home.there == []
    home.commit(2)
    home.mover.catch_up()
    home.commit(3)
    home.mover.catch_up()
    assert home.there == [2]
    assert (home.state.lag_steps, home.state.lag_bytes) == (1, 0)
    home.mover.catch_up(newest_too=True)
    assert home.there == [2, 3]


def test_retention_at_home_leaves_what_is_due_until_it_is_there_or_overtaken() -> None:
    home = Home(every=EverySteps(10))
    home.commit(9, 10, 11, 12)
    assert home.at_home == [10, 12]
    home.commit(20, 21)
    assert home.at_home == [20, 21]  # one that waits, however long the tier is gone
    assert home.state.skipped == 1
    home.mover.catch_up()
    assert home.there == [20]
    home.commit(22)
    assert home.at_home == [22]


def test_a_tier_keeps_its_own_number_and_always_the_newest() -> None:
    home = Home(keep_last=2)
    home.tier = dataclasses.replace(home.tier, keep_last=3)
    home.mover = home.start()
    for step in range(1, 7):
        home.commit(step)
        home.mover.catch_up()
    assert home.there == [4, 5, 6]
    assert home.at_home == [5, 6]


def test_a_branch_that_was_left_goes_from_a_tier_with_the_first_copy_of_the_new_one() -> None:
    home = Home(keep_last=None)
    for step in (1, 2, 3):
        home.commit(step)
        home.mover.catch_up()
    home.claim(1, 1)
    home.mover.catch_up()
    assert home.there == [1, 2, 3]  # nothing newer to resume from yet
    home.commit(2)
    home.mover.catch_up()
    found = open_repository(home.far)
    assert list(found.survey().committed) == [CheckpointId(1, 1), CheckpointId(2, 2)]
    assert found.parents() == {1: None, 2: CheckpointId(1, 1)}


def test_what_a_delta_stands_on_goes_first_and_stays_as_long_as_the_delta() -> None:
    home = Home(keep_last=1, every=EverySteps(2))
    home.commit(1)
    key = CheckpointId(1, 1)
    for step in (2, 3, 4):
        commit_bytes(home.repository, CheckpointId(1, step), content(step), base=key)
        home.repository.retain(CheckpointId(1, step), home.retention, key)
    home.tier = dataclasses.replace(home.tier, keep_last=1)
    home.mover = home.start()
    home.mover.catch_up()
    assert home.there == [1, 4]
    manifests = [n for op, n in home.far.operations if op == "write" and "MANIFEST" in n]
    assert manifests == [manifest_name(key), manifest_name(CheckpointId(1, 4))]
    home.commit(6)  # a key-frame: nothing stands on the other any more
    home.mover.catch_up()
    assert home.there == [6]
    whole(home.far)


def test_seconds_are_those_between_captures() -> None:
    home = Home(keep_last=None, every=EverySeconds(10))
    for step, created_s in ((1, 100.0), (2, 105.0), (3, 111.0), (4, 112.0)):
        commit_bytes(home.repository, CheckpointId(1, step), content(step), created_s=created_s)
        home.mover.catch_up()
    assert home.there == [1, 3]
    assert home.state.lag_s == 1.0


# --- damage and other writers -----------------------------------------------------


def test_damage_at_home_is_found_and_never_spread() -> None:
    home = Home(keep_last=None)
    home.commit(1)
    home.mover.catch_up()
    home.commit(2)
    pack = next(n for n in objects(home.repository.store) if "step-00000002" in n and "pack" in n)
    damaged = bytearray(objects(home.repository.store)[pack])
    damaged[len(damaged) // 2] ^= 1
    home.repository.store.write(pack, [damaged])
    home.mover.catch_up()
    assert home.there == [1]
    assert home.state.failed == 1
    assert "step 2 is damaged at home" in home.state.last_failure
    home.commit(3)
    home.mover.catch_up()
    assert home.there == [1, 3]
    assert home.state.last_failure == ""
    whole(home.far)
    assert not any("step-00000002" in name for name in objects(home.far))


@pytest.mark.parametrize("kind", ["pack", "r0000.json", "MANIFEST"])
def test_what_arrives_as_something_else_is_written_again(kind: str) -> None:
    class Rots(FaultyStore):
        rotten = 0

        def write(self, name: str, parts: Any) -> int:
            taken = super().write(name, parts)
            if kind in name and self.rotten < 1:
                self.rotten += 1
                data = bytearray(objects(self)[name])
                data[len(data) // 3] ^= 16
                self.inner.write(name, [data])
            return taken

    home = Home(far=Rots(MemoryStore("far")))
    home.commit(1)
    home.mover.catch_up()
    assert home.far.rotten == 1
    assert home.there == [1]
    whole(home.far)
    assert home.state.last_failure == ""


def test_a_tier_that_looks_at_lengths_alone_reads_nothing_back() -> None:
    home = Home(verify="size")
    home.commit(1)
    home.mover.catch_up()
    assert [n for op, n in home.far.operations if op == "read" and n.endswith(".pack")] == []
    whole(home.far)


def test_the_record_of_a_newer_job_in_a_tier_comes_home_and_stops_this_one() -> None:
    home = Home()
    home.commit(1)
    home.mover.catch_up()
    copy = open_repository(home.far)
    copy.claim(CheckpointId(1, 1))
    home.commit(2)
    home.mover.catch_up()
    assert home.there == [1]
    assert home.repository.newest_attempt() == 2
    with pytest.raises(SupersededWriter):
        home.commit(3)


def test_two_jobs_of_one_number_are_never_mixed() -> None:
    home = Home()
    home.commit(1)
    other = create_repository(MemoryStore("other"), home.repository.run)
    copy = create_repository(home.far, home.repository.run)
    home.far.write(attempt_name(1), [dump_attempt(other.claim(None))])
    home.mover.catch_up()
    assert "attempt 1 is one job" in home.state.last_failure
    assert copy.survey().committed == {}


def test_a_tier_that_holds_another_run_gets_nothing() -> None:
    far = MemoryStore("far")
    found = create_repository(far)
    home = Home(far=far)
    home.commit(1)
    home.mover.catch_up()
    assert found.run in home.state.last_failure
    assert home.repository.run in home.state.last_failure
    assert found.survey().committed == {}


def test_what_a_copy_that_was_cut_short_left_is_gone_on_with_or_removed() -> None:
    home = Home()
    home.commit(1)
    home.far.fault = Fault(op="write", name="*r0000.json", times=0)
    home.mover.catch_up()
    packs = [name for name in objects(home.far) if name.endswith(".pack")]
    assert packs
    home.far.fault = Fault(do="none")
    before = len(home.far.operations)
    home.mover = home.start()
    home.mover.catch_up()
    written = [name for op, name in home.far.operations[before:] if op == "write"]
    assert not set(packs) & set(written)
    assert home.there == [1]
    home.commit(2)
    home.far.fault = Fault(op="write", name="*r0000.json", times=0)
    home.mover.catch_up()
    home.far.fault = Fault(do="none")
    home.commit(3)
    home.mover.catch_up()
    assert home.there == [1, 3]
    assert not any("step-00000002" in name for name in objects(home.far))


# --- outages ------------------------------------------------------------------------


def test_a_tier_catches_up_when_it_returns() -> None:
    home = Home()
    home.commit(1)
    home.mover.catch_up()
    home.far.fault = Fault(times=0, do="ENOSPC")  # one that may be tried again
    for step in (2, 3, 4):
        home.commit(step)
        home.mover.catch_up()
    assert home.state.failed == 3
    assert "injected" in home.state.last_failure
    home.far.fault = Fault(do="none")
    assert home.there == [1]
    home.commit(5)
    home.mover.catch_up()
    assert home.there == [1, 5]
    assert (home.state.last_failure, home.state.lag_steps) == ("", 0)
    assert home.state.promoted + home.state.skipped >= 5


def test_what_a_failed_copy_left_half_written_is_swept_once_the_tier_is_back() -> None:
    home = Home()
    home.commit(1)
    home.far.fault = Fault(op="write", name="*.pack", when="mid")
    home.mover.catch_up()
    home.far.fault = Fault(do="none")
    before = len(home.far.operations)
    home.commit(2)
    home.mover.catch_up()
    home.commit(3)
    home.mover.catch_up()
    assert home.there == [2, 3]
    operations = home.far.operations[before:]
    assert operations.count(("sweep", "")) == 1
    first = next(i for i, (op, n) in enumerate(operations) if op == "write" and "pack" in n)
    assert operations.index(("sweep", "")) < first


def test_what_may_be_tried_again_is_tried_a_bounded_number_of_times() -> None:
    home = Home()
    home.commit(1)
    home.far.fault = Fault(times=0, op="write", name="*.pack", do="ENOSPC")
    home.mover.catch_up()
    tries = [name for op, name in home.far.operations if op == "write" and name.endswith(".pack")]
    assert len(tries) == 3
    home.mover.catch_up()  # it was tried long enough: once more, and quietly
    tries = [name for op, name in home.far.operations if op == "write" and name.endswith(".pack")]
    assert len(tries) == 4


def test_what_will_not_succeed_is_not_tried_again_at_once() -> None:
    home = Home()
    home.commit(1)
    home.far.fault = Fault(times=0, op="write", name="*.pack", do="EIO")
    home.mover.catch_up()
    assert len([n for op, n in home.far.operations if op == "write" and "pack" in n]) == 1


def test_a_store_that_raises_what_no_store_should_fails_its_tier_alone() -> None:
    class Broken(FaultyStore):
        def list(self, prefix: str = "") -> Any:
            raise RuntimeError("driver bug")

    home = Home(far=Broken(MemoryStore("far")))
    home.commit(1)
    home.mover.catch_up()
    assert "driver bug" in home.state.last_failure


def test_too_little_room_is_said_before_anything_is_written() -> None:
    home = Home()
    home.far.free_bytes = lambda: 1000  # type: ignore[method-assign]
    home.mover.catch_up(expected_bytes=5_000_000)
    assert "needs about 5000000 bytes, 1000 are free" in home.state.last_failure
    home.commit(1)
    home.mover.catch_up()
    assert "1000 are free" in home.state.last_failure
    assert not any(name.startswith("step-") for name in objects(home.far))


@pytest.mark.parametrize(
    ("when", "do", "connections"),
    [
        ("before", "EIO", 1),
        ("mid", "EIO", 1),
        ("after", "EIO", 1),
        ("before", "short", 1),
        ("mid", "EIO", 3),
    ],
)
def test_whatever_operation_of_the_tier_fails_what_is_listed_is_whole_and_it_catches_up(
    when: str, do: str, connections: int
) -> None:
    def new() -> Home:
        inner = ThrottledStore(MemoryStore("far"), Speed(connections=connections))
        return Home(keep_last=2, far=FaultyStore(inner))

    def life(home: Home) -> None:
        home.tier = dataclasses.replace(home.tier, keep_last=2)
        home.mover = home.start()
        for step in (1, 2, 3, 4):
            home.commit(step)
            home.mover.catch_up()

    counted = new()
    life(counted)
    count = len(counted.far.operations)
    assert count > 50
    for n in range(1, count + 1):
        home = new()
        home.far.fault = Fault(at=n, when=when, do=do)
        life(home)
        home.far.fault = Fault(do="none")
        whole(home.far)
        home.mover = home.start()  # the next start
        home.mover.catch_up(newest_too=True)
        assert home.there[-1] == 4, n
        home.commit(5)
        home.mover.catch_up()
        home.mover._finish()
        assert home.there == [4, 5], n
        whole(home.far)
        listing = open_repository(home.far).survey()
        assert listing.leftovers == [], n


# --- several at a time --------------------------------------------------------------


class Meeting(FaultyStore):
    """A medium worth some connections. The first calls for packs wait for one another, as many as
    there are connections: who makes one after the other waits in vain.

    Args:
        connections: How many.
        op: ``write`` or ``read``.

    Attributes:
        most: How many were under way at a time.
    """

    def __init__(self, connections: int, op: str) -> None:
        super().__init__(ThrottledStore(MemoryStore("far"), Speed(connections=connections)))
        self.most = self.now = self.begun = 0
        self.left: list[str] = []  # in the order in which writes ended
        self._op, self._connections = op, connections
        self._meet = threading.Barrier(connections)
        self._counting = threading.Lock()

    def write(self, name: str, parts: Any) -> int:
        with self._met("write", name):
            found = super().write(name, parts)
            self.left.append(name)
            return found

    @contextmanager
    def open(self, name: str) -> Iterator[Readable]:
        with super().open(name) as opened:
            yield MeetingReadable(self, name, opened)

    @contextmanager
    def _met(self, op: str, name: str) -> Iterator[None]:
        if op != self._op or not name.endswith(".pack"):
            yield
            return
        with self._counting:
            self.begun += 1
            self.now += 1
            self.most = max(self.most, self.now)
            meets = self.begun <= self._connections
        try:
            if meets:
                self._meet.wait(BOUND_S)
            yield
        finally:
            with self._counting:
                self.now -= 1


class MeetingReadable:
    def __init__(self, store: Meeting, name: str, opened: Readable) -> None:
        self._store, self._name, self._opened = store, name, opened
        self.nbytes = opened.nbytes

    def readinto(self, offset: int, into: memoryview) -> None:
        with self._store._met("read", self._name):
            self._opened.readinto(offset, into)


MANY = {"": b"{}", **{f"w{n}": bytes([n + 1]) * LEAF for n in range(6)}}


@pytest.mark.parametrize("connections", [2, 4])
def test_as_many_packs_are_written_at_a_time_as_the_tier_is_worth_connections(
    connections: int,
) -> None:
    home = Home(far=Meeting(connections, "write"))
    commit_bytes(home.repository, CheckpointId(1, 1), MANY, pack_bytes=1 << 17)
    home.mover.catch_up()
    assert home.state.last_failure == ""
    assert home.far.most == connections
    assert home.far.begun > connections
    assert objects(home.far) == objects(home.repository.store)
    kinds = ["pack" in n for n in home.far.left if n.startswith("step-")]
    assert kinds == sorted(kinds, reverse=True)  # no index before all packs
    assert home.far.left[-1] == manifest_name(CheckpointId(1, 1))


@pytest.mark.parametrize("pack_bytes", [1 << 17, 1 << 30])
def test_as_many_chunks_are_read_back_at_a_time(pack_bytes: int) -> None:
    home = Home(far=Meeting(3, "read"))
    commit_bytes(home.repository, CheckpointId(1, 1), MANY, pack_bytes=pack_bytes)
    home.mover.catch_up()
    assert home.state.last_failure == ""
    assert home.far.most == 3
    assert open_repository(home.far).survey().committed
    ahead = open_repository(home.far)
    with ahead.open(CheckpointId(1, 1)) as opened:
        assert opened.lanes == 3


def test_when_one_of_several_packs_fails_the_tier_says_why_and_goes_on_later() -> None:
    home = Home(far=FaultyStore(ThrottledStore(MemoryStore("far"), Speed(connections=3))))
    commit_bytes(home.repository, CheckpointId(1, 1), MANY, pack_bytes=1 << 17)
    home.far.fault = Fault(at=2, op="write", name="*.pack", when="mid", do="EIO")
    home.mover.catch_up()
    assert "injected" in home.state.last_failure  # not that others ended because of it
    assert home.there == []
    home.far.fault = Fault(do="none")
    home.mover.catch_up()
    assert home.there == [1]
    assert objects(home.far) == objects(home.repository.store)


@pytest.mark.parametrize("do", ["EIO", "short"])
def test_whatever_operation_at_home_fails_the_tier_holds_only_what_is_whole(do: str) -> None:
    def once(fault: Fault) -> tuple[Home, FaultyStore]:
        store = FaultyStore(MemoryStore("home"))
        home = Home(store)
        home.commit(1, 2)
        store.operations.clear()
        store.fault = fault
        home.mover.catch_up()
        return home, store

    count = len(once(Fault(do="none"))[1].operations)
    assert count > 10
    for n in range(1, count + 1):
        home, store = once(Fault(at=n, do=do))
        store.fault = Fault(do="none")
        if objects(home.far):
            whole(home.far)
        home.mover.catch_up()
        assert home.there == [2], n
        whole(home.far)


# --- threads ------------------------------------------------------------------------


def test_a_tier_that_hangs_holds_up_no_other_and_no_close() -> None:
    gate = threading.Event()

    class Hangs(FaultyStore):
        def list(self, prefix: str = "") -> Any:
            gate.wait(BOUND_S)
            return super().list(prefix)

    repository = create_repository(MemoryStore("home"))
    attempt = repository.claim(None).number
    commit_bytes(repository, CheckpointId(attempt, 1), content(1))
    stores = [Hangs(MemoryStore("slow")), MemoryStore("quick")]
    tiers = [(Tier(store, name=str(i)), store) for i, store in enumerate(stores)]
    board = TierBoard(["0", "1"])
    promoter = Promoter(repository, tiers, board.note, lambda span: None)
    number = board.ask("1")
    promoter.ask("1", number)
    assert board.await_served("1", number, BOUND_S)
    assert not promoter.close(lambda: True)
    gate.set()
    assert promoter.close(lambda: False)
    whole(stores[0])


def test_pauses_between_tries_are_bounded() -> None:
    assert 0 < sum(promotion.PAUSES_S) < 60


def test_a_copy_that_lost_an_object_is_made_whole_again() -> None:
    home = Home(keep_last=None)
    home.commit(1)
    home.mover.catch_up()
    pack = next(name for name in objects(home.far) if name.endswith(".pack"))
    home.far.delete(pack)
    home.mover.catch_up()
    assert home.there == [1]
    assert manifest_name(CheckpointId(1, 1)) in objects(home.far)
    whole(home.far)


def test_a_failure_is_an_event_with_the_tier_in_it() -> None:
    home = Home()
    home.commit(1)
    home.far.fault = Fault(op="write", name="*.pack")
    home.mover.catch_up()
    (span,) = [s for s in home.spans if s.stage is Stage.PROMOTE]
    assert (span.step, span.tier) == (1, "far")
    assert "injected" in span.error


def test_a_manifest_in_a_tier_is_read_once_and_forgotten_when_it_is_gone() -> None:
    home = Home(keep_last=1)
    home.tier = dataclasses.replace(home.tier, keep_last=2)
    home.mover = home.start()
    for step in (1, 2, 3, 4):
        home.commit(step)
        home.mover.catch_up()
    home.far.operations.clear()
    home.mover.catch_up()
    assert [name for op, name in home.far.operations if op == "open" and "MANIFEST" in name] == []
    assert home.mover._copy is not None
    assert list(home.mover._copy.known or ()) == [
        manifest_name(CheckpointId(1, step)) for step in (3, 4)
    ]


def test_a_checkpoint_that_is_removed_while_it_is_copied_is_no_failure() -> None:
    class Remote(FaultyStore):
        """Open objects go with their deletion, and one is deleted as soon as it is read."""

        gone = ""

        def open(self, name: str) -> Any:
            if "step-00000001" in name and name.endswith(".pack"):
                self.gone = name
                for entry in list(self.inner.list("step-00000001")):
                    self.inner.delete(entry.name)
            return super().open(name)

    store = Remote(MemoryStore("home"))
    home = Home(store, keep_last=None)
    home.commit(1)
    home.mover.catch_up()
    assert store.gone
    assert (home.state.failed, home.state.last_failure) == (0, "")
    assert "removed before it was copied" in home.errors()[0][1]
    home.commit(2)
    home.mover.catch_up()
    assert home.there == [2]
    assert not any("step-00000001" in name for name in objects(home.far))
