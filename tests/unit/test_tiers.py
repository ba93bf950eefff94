"""Tiers: what they are told, what is due in them, what is known of them at the start."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from asymcheck import Checkpointer, Tier
from asymcheck.cli import app
from asymcheck.errors import OptionError, StoreError, SupersededWriter
from asymcheck.planning.cadence import EverySeconds, EverySteps, OverheadBudget
from asymcheck.planning.retention import CheckpointId, Retention
from asymcheck.planning.tiers import Saved, due_in
from asymcheck.storage.bounded import within
from asymcheck.storage.memory import MemoryStore, open_memory
from asymcheck.storage.names import attempt_name
from asymcheck.storage.repository import create_repository, open_repository
from asymcheck.storage.store import Store, open_store
from asymcheck.testing.checkpoints import commit_bytes
from asymcheck.testing.faulty import Fault, FaultyStore
from asymcheck.tiering import (
    Standing,
    TierBoard,
    Tiers,
    TierState,
    describe_tiers,
    hold_for,
    rebuild_tiers,
)
from asymcheck.tracing import read_trace

BOUND_S = 20.0


def at(step: int, attempt: int = 1) -> CheckpointId:
    return CheckpointId(attempt, step)


def lineage(*steps: int, seconds_each: float = 1.0) -> list[Saved]:
    return [Saved(at(step), step * seconds_each) for step in steps]


# --- the value ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"url": ""}, "directory or a URL"),
        ({"url": 7}, "found int"),
        ({"url": "x", "every": 100}, "EverySteps"),
        ({"url": "x", "every": OverheadBudget()}, "EverySteps"),
        ({"url": "x", "keep_last": 0}, "keep_last"),
        ({"url": "x", "keep_last": True}, "keep_last"),
        ({"url": "x", "name": 3}, "name"),
        ({"url": "x", "verify": "hash"}, "verify"),
    ],
)
def test_a_tier_refuses_what_it_cannot_mean(bad: dict[str, Any], named: str) -> None:
    with pytest.raises(OptionError, match=named):
        Tier(**bad)


def test_a_tier_is_spoken_of_without_user_and_query() -> None:
    assert Tier("s3://who:secret@bucket/run?endpoint=http://x").label == "s3://bucket/run"
    assert Tier("s3://bucket/run", name="cloud").label == "cloud"
    assert Tier(MemoryStore("far")).label == "memory://far"
    assert Tier(Path("runs/x")).label == "runs/x"  # type: ignore[arg-type]


def test_tiers_travel_to_another_process_by_url(tmp_path: Path) -> None:
    for every in (None, EverySteps(5), EverySeconds(2.5)):
        tier = Tier(str(tmp_path), every=every, keep_last=2, name="disk", verify="size")
        ((found, store),) = rebuild_tiers(describe_tiers([(tier, open_store(str(tmp_path)))]))
        assert (found.every, found.keep_last, found.label, found.verify) == (
            every,
            2,
            "disk",
            "size",
        )
        assert store.url == open_store(str(tmp_path)).url


@pytest.mark.parametrize(
    ("tiers", "named"),
    [
        ("s3://bucket", "tuple of URLs"),
        (["memory://home"], "same place as the root"),
        (["memory://a", "memory://a"], "same place as tier"),
        ([Tier("memory://a", name="x"), Tier("memory://b", name="x")], "two of the name"),
        (["nosuch://a"], "scheme"),
        ([None], "found NoneType"),
    ],
)
def test_wrong_tiers_are_one_clear_error(tiers: Any, named: str) -> None:
    with pytest.raises(OptionError, match=named):
        Checkpointer("memory://home", state={"x": torch.zeros(2)}, tiers=tiers)


def test_a_process_cannot_reach_a_tier_in_the_memory_of_this_one(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="can only be opened by this process"):
        Checkpointer(
            tmp_path, state={"x": torch.zeros(2)}, persist="process", tiers=[MemoryStore("tier")]
        )


# --- what is due ----------------------------------------------------------------


def test_each_checkpoint_newer_than_all_that_are_there_is_due() -> None:
    assert due_in(None, lineage(1, 2, 3, 4), {at(2)}) == [at(3), at(4)]
    assert due_in(None, lineage(1, 2), {at(2)}) == []
    assert due_in(None, [], {at(2)}) == []


def test_multiples_of_the_steps_are_due_and_the_newest_where_it_is_asked_for() -> None:
    found = lineage(5, 10, 15, 20, 25)
    assert due_in(EverySteps(10), found, ()) == [at(10), at(20)]
    assert due_in(EverySteps(10), found, (), newest_too=True) == [at(10), at(20), at(25)]
    assert due_in(EverySteps(10), found, {at(25)}, newest_too=True) == []


def test_seconds_count_from_capture_to_capture_of_those_that_are_due() -> None:
    found = lineage(1, 2, 3, 4, 5, 6, 7, seconds_each=10)
    assert due_in(EverySeconds(25), found, ()) == [at(1), at(4), at(7)]
    assert due_in(EverySeconds(25), found, {at(2)}) == [at(5)]


def test_a_clock_that_was_set_back_makes_the_next_one_due() -> None:
    found = [Saved(at(1), 1000.0), Saved(at(2), 10.0), Saved(at(3), 12.0)]
    assert due_in(EverySeconds(100), found, {at(1)}) == [at(2)]


# --- the start --------------------------------------------------------------------


class Slow(FaultyStore):
    """Answers only when it is let go."""

    def __init__(self) -> None:
        super().__init__(MemoryStore("slow"))
        self.go = threading.Event()

    def list(self, prefix: str = "") -> Any:
        self.go.wait(BOUND_S)
        return super().list(prefix)

    def open(self, name: str) -> Any:
        self.go.wait(BOUND_S)
        return super().open(name)


def start(*stores: Store, timeout_s: float = BOUND_S) -> tuple[Tiers, list[str]]:
    said: list[str] = []
    return Tiers([(Tier(s), s) for s in stores], timeout_s, said.append), said


def test_an_empty_home_takes_over_the_run_of_its_tiers() -> None:
    far = create_repository(MemoryStore("far"))
    tiers, said = start(MemoryStore("empty"), far.store)
    assert tiers.run() == far.run
    assert not said


def test_tiers_of_two_runs_are_an_error_that_names_both() -> None:
    one, other = (create_repository(MemoryStore(name)) for name in ("one", "other"))
    with pytest.raises(OptionError, match=f"{other.run}.*{one.run}"):
        start(one.store, other.store)[0].run()


def test_a_home_of_another_run_than_its_tier_is_an_error_that_names_both() -> None:
    home, far = create_repository(MemoryStore("h")), create_repository(MemoryStore("f"))
    with pytest.raises(OptionError, match=f"{far.run}.*{home.run}"):
        Checkpointer(home.store, state={"x": torch.zeros(2)}, tiers=[far.store])


def test_a_place_that_holds_something_else_is_no_tier() -> None:
    store = MemoryStore("other")
    store.write("notes.txt", [b"mine"])
    with pytest.raises(OptionError, match=r"notes\.txt"):
        Checkpointer(MemoryStore("h"), state={"x": torch.zeros(2)}, tiers=[store])
    assert [e.name for e in store.list()] == ["notes.txt"]


def test_a_tier_that_does_not_answer_is_waited_for_for_a_bounded_time() -> None:
    slow = Slow()
    tiers, said = start(slow, MemoryStore("near"), timeout_s=0.2)
    assert tiers.run() is None
    assert len(said) == 1
    assert "slow" in said[0]
    assert "could not be reached" in said[0]
    home = create_repository(MemoryStore("home"))
    assert tiers.claim(home, None).number == 1  # without the slow one
    slow.go.set()


def test_calls_that_raise_and_calls_that_hang_are_told_apart() -> None:
    gate = threading.Event()

    def fail() -> int:
        raise StoreError("broken", retryable=False)

    found = within(0.2, [lambda: 3, fail, lambda: int(gate.wait(BOUND_S))])
    gate.set()
    assert found[0] == 3
    assert "broken" in str(found[1])
    assert "no answer within 0.2 seconds" in str(found[2])


def test_a_claim_is_above_every_attempt_of_every_tier_and_stands_in_all() -> None:
    home, far = create_repository(MemoryStore("h")), MemoryStore("f")
    copy = create_repository(far, home.run)
    for _ in range(4):
        copy.claim(None)
    commit_bytes(home, CheckpointId(7, 3), {"": b"{}"})  # an attempt whose record is gone
    tiers, said = start(far)
    tiers.run()
    assert tiers.claim(home, at(3, 7)).number == 8
    numbers = {1, 2, 3, 4, 8}
    assert set(home.attempt_numbers()) == set(copy.attempt_numbers()) == numbers
    assert [home.attempt(n) for n in numbers] == [copy.attempt(n) for n in numbers]
    assert not said


def test_the_root_under_another_name_is_no_tier(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "same").symlink_to(tmp_path / "home")
    ckpt = Checkpointer(
        tmp_path / "home", state={"x": torch.zeros(2)}, tiers=[f"throttled+file://{tmp_path}/same"]
    )
    with pytest.raises(OptionError, match="same place as the root, under another name"):
        ckpt.restore()


def test_what_is_due_in_a_tier_stays_when_a_start_finishes_what_a_dead_job_left() -> None:
    home = create_repository(MemoryStore("home"))
    number = home.claim(None).number
    far = MemoryStore("far")
    home.hold = hold_for([Standing(Tier(far, every=EverySteps(10)))])
    for step in (9, 10, 11, 12):
        commit_bytes(home, CheckpointId(number, step), {"": b"{}"})
        home.retain(CheckpointId(number, step), Retention(1))
    assert [c.step for c in home.lineage()] == [10, 12]
    home.hold = hold_for([Standing(Tier(far, every=EverySteps(10)), {at(10, number): 0.0})])
    home.retain(CheckpointId(number, 12), Retention(1))
    assert [c.step for c in home.lineage()] == [12]


def test_a_number_that_another_job_takes_in_a_tier_meanwhile_is_left_to_it() -> None:
    home = create_repository(MemoryStore("h"))
    other = create_repository(MemoryStore("o"), home.run)

    class Race(FaultyStore):
        def create(self, name: str, data: Any) -> bool:
            if name == attempt_name(1):
                other.claim(None)
                self.inner.create(name, record_of(other, 1))
            return super().create(name, data)

    far = Race(MemoryStore("f"))
    create_repository(far.inner, home.run)
    tiers, _ = start(far)
    tiers.run()
    assert tiers.claim(home, None).number == 2
    assert record_of(home, 1) == record_of(other, 1)
    home.check_writer(2)


def record_of(repository: Any, number: int) -> bytes:
    with repository.store.open(attempt_name(number)) as opened:
        data = bytearray(opened.nbytes)
        opened.readinto(0, memoryview(data))
    return bytes(data)


# --- the board --------------------------------------------------------------------


def test_the_board_tells_of_a_tier_that_fails_once_until_it_works_again() -> None:
    board = TierBoard(["a", "b"])
    failing = TierState("a", last_failure="no such bucket")
    board.note(failing, 0)
    (said,) = board.complaints()
    assert "tier a" in said
    assert "no such bucket" in said
    board.note(failing, 0)
    assert board.complaints() == []
    board.note(TierState("a"), 0)
    assert board.complaints() == []
    board.note(failing, 0)
    assert len(board.complaints()) == 1


def test_a_request_is_over_when_it_was_followed_or_nobody_will() -> None:
    board = TierBoard(["a"])
    assert not board.await_served("a", board.ask("a"), 0.01)
    board.note(TierState("a"), 1)
    assert board.await_served("a", 1, BOUND_S)
    number = board.ask("a")
    board.note(TierState("a", lag_bytes=5), number)
    assert not board.await_served("a", number, BOUND_S)
    number = board.ask("a")
    board.give_up()
    assert not board.await_served("a", number, BOUND_S)


# --- a Checkpointer -----------------------------------------------------------------


class Job:
    """A state that says which step it is of."""

    def __init__(self, root: Any, tiers: list[Any], **options: Any) -> None:
        self.value = torch.zeros(1000)
        self.ckpt = Checkpointer(root, state={"x": self.value}, tiers=tiers, **options)
        self.start = self.ckpt.restore()

    def save(self, *steps: int) -> None:
        for step in steps:
            self.value.fill_(step)
            self.ckpt.save(step).durable.result(BOUND_S)


def steps_in(store: Store) -> list[int]:
    return [c.step for c in open_repository(store).lineage()]


def test_checkpoints_reach_their_tiers_and_the_newest_at_the_end() -> None:
    near, far = MemoryStore("near"), MemoryStore("far")
    job = Job(MemoryStore("home"), [near, Tier(far, every=EverySteps(2), keep_last=1)], keep_last=2)
    job.save(1)
    assert job.ckpt.wait(BOUND_S, tier="memory://near")
    job.save(2)
    assert job.ckpt.wait(BOUND_S, tier="memory://far")
    assert steps_in(far) == [2]
    assert job.ckpt.wait(BOUND_S, tier="memory://near")  # else 3 may overtake 2 there
    job.save(3)
    job.ckpt.close()
    assert steps_in(near)[-1] == 3
    assert steps_in(far) == [3]
    states = {state.name: state for state in job.ckpt.tier_states()}
    assert states["memory://far"].newest_step == 3
    assert states["memory://far"].lag_steps == 0
    assert states["memory://near"].promoted == 3


def test_a_process_takes_checkpoints_to_tiers_too(tmp_path: Path) -> None:
    job = Job(tmp_path / "home", [tmp_path / "far"], persist="process")
    job.save(1)
    assert job.ckpt.wait(BOUND_S, tier=str(tmp_path / "far"))
    job.save(2)
    job.ckpt.close()
    assert steps_in(open_store(str(tmp_path / "far")))[-1] == 2
    (state,) = job.ckpt.tier_states()
    assert (state.newest_step, state.failed, state.last_failure) == (2, 0, "")


def test_a_report_tells_the_lag_of_each_tier() -> None:
    job = Job(MemoryStore("home"), [MemoryStore("far")])
    job.value.fill_(1)
    report = job.ckpt.save(1).durable.result(BOUND_S)
    assert [state.name for state in report.tiers] == ["memory://far"]
    job.ckpt.close()


def test_waiting_for_a_tier_that_there_is_not_names_the_nearest() -> None:
    with (
        Checkpointer(
            MemoryStore("h"),
            state={"x": torch.zeros(2)},
            tiers=[Tier(MemoryStore("t"), name="far")],
        ) as ckpt,
        pytest.raises(OptionError, match="did you mean 'far'"),
    ):
        ckpt.wait(tier="fat")


def test_an_unreachable_tier_is_one_warning_and_training_goes_on() -> None:
    far = FaultyStore(MemoryStore("far"), Fault(times=0))
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        job = Job(MemoryStore("home"), [far])
        job.save(1)
        assert not job.ckpt.wait(BOUND_S, tier=Tier(far).label)
        job.save(2)
        job.ckpt.wait(BOUND_S)
        job.ckpt.close()
    said = [str(w.message) for w in heard]
    assert len([text for text in said if "could not be reached" in text]) == 1
    assert len([text for text in said if "does not get its checkpoints" in text]) == 1
    far.fault = Fault(do="none")
    again = Job(job.ckpt._store, [far])
    assert again.start == 2
    again.ckpt.close()
    assert steps_in(far)[-1] == 2  # it caught up


def test_a_new_host_goes_on_with_the_run_that_its_tier_holds() -> None:
    far = MemoryStore("far")
    job = Job(MemoryStore("first"), [far])
    job.save(1, 2)
    job.ckpt.close()
    again = Job(MemoryStore("second"), [far])
    assert open_repository(again.ckpt._store).run == open_repository(far).run
    assert open_repository(again.ckpt._store).newest_attempt() == 2
    again.ckpt.close()


def test_two_jobs_that_share_only_a_tier_meet_there() -> None:
    far = MemoryStore("far")
    first = Job(MemoryStore("first"), [far])
    first.save(1)
    assert first.ckpt.wait(BOUND_S, tier="memory://far")
    tiers, _ = start(far)  # of a job with another home
    second = create_repository(MemoryStore("second"), tiers.run())
    assert tiers.claim(second, at(1)).number == 2
    first.save(2)  # stands at home alone: the first look at the tier after it tells
    first.ckpt.wait(BOUND_S, tier="memory://far")
    assert steps_in(far) == [1]
    first.ckpt.save(3)
    with pytest.raises(SupersededWriter, match="attempt 2"):
        first.ckpt.wait()
    first.ckpt.close()


def test_a_tier_with_too_little_room_is_told_at_the_first_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    far = MemoryStore("far")
    monkeypatch.setattr(far, "free_bytes", lambda: 2000, raising=False)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        job = Job(MemoryStore("home"), [far])
        job.save(1)
        job.ckpt.wait(BOUND_S, tier="memory://far")
        job.ckpt.close()
    said = [str(w.message) for w in heard]
    assert len(said) == 1
    assert "bytes, 2000 are free" in said[0]
    assert not any(e.name.startswith("step-") for e in far.list())


def test_the_named_memory_is_the_same_store_for_all_that_name_it() -> None:
    job = Job("memory://tiers-home", ["memory://tiers-far"])
    job.save(1)
    job.ckpt.close()
    assert steps_in(open_memory("tiers-far", {})) == [1]


def test_a_trace_tells_how_far_the_tiers_were(tmp_path: Path) -> None:
    job = Job(MemoryStore("home"), [MemoryStore("far")], trace=tmp_path / "trace.jsonl")
    job.save(1)
    job.ckpt.fence()
    job.ckpt.close()
    (trace,) = read_trace(tmp_path / "trace.jsonl")
    assert [state.name for state in trace.report.tiers] == ["memory://far"]


def test_the_commands_work_on_a_tier_as_on_any_root(tmp_path: Path) -> None:
    def asymcheck(*words: object) -> str:
        done = CliRunner().invoke(app, [str(word) for word in words])
        assert done.exit_code == 0, done.output
        return done.output

    far = tmp_path / "far"
    job = Job(tmp_path / "home", [far], persist="thread")
    job.save(1)
    assert job.ckpt.wait(BOUND_S, tier=str(far))
    job.save(2)
    job.ckpt.close()
    assert asymcheck("ls", far) == asymcheck("ls", tmp_path / "home")
    shown, at_home = (asymcheck("show", root, "--step", 2) for root in (far, tmp_path / "home"))
    assert shown.splitlines()[1:] == at_home.splitlines()[1:]
    assert "0 damaged" in asymcheck("verify", far)
    asymcheck("prune", far, "--keep-last", 1, "--yes")
    assert steps_in(open_store(str(far))) == [2]
    assert steps_in(open_store(str(tmp_path / "home"))) == [1, 2]
