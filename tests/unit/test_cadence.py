"""How often to save: decided by numbers that a cadence is told, as the papers say."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asymcheck import Checkpointer, Strategy
from asymcheck.errors import OptionError, StoreError
from asymcheck.handles import SaveReport
from asymcheck.outcomes import Outcomes
from asymcheck.planning.cadence import (
    Cadence,
    EverySeconds,
    EverySteps,
    Never,
    OverheadBudget,
    SaveCost,
    Schedule,
    SlowdownFactor,
    YoungDaly,
    daly_interval_s,
    young_interval_s,
)
from asymcheck.planning.policy import Admission
from asymcheck.planning.strategies import strategies
from asymcheck.planning.variants import TRIES
from asymcheck.storage.memory import MemoryStore
from asymcheck.timekeeping import Timekeeper
from asymcheck.tracing import read_trace

MEASURING: tuple[Cadence, ...] = (
    OverheadBudget(profile_steps=4),
    SlowdownFactor(profile_steps=4),
    YoungDaly(mtbf_s=3600.0, profile_steps=4),
)
WARM_UP = 5


class Run:
    """A training as a cadence sees it: steps of a length, saves of a cost, nothing real.

    A save is durable, and told of, as soon as ``cost.durable_s`` have passed.
    """

    def __init__(
        self, cadence: Cadence, step_s: float, cost: SaveCost, max_in_flight: int = 1
    ) -> None:
        self.schedule: Schedule = cadence.begin(max_in_flight=max_in_flight)
        self.step_s, self.cost = step_s, cost
        self.saves: list[int] = []
        self.clock_s = 0.0
        self._step = 0
        self._last_save_s = 0.0
        self._under_way: list[float] = []

    def go(self, steps: int, *, extra_s: float = 0.0) -> list[int]:
        """Let steps go by; returns those that saved."""
        before = len(self.saves)
        for _ in range(steps):
            saved = bool(self.saves) and self.saves[-1] == self._step
            duration_s = self.step_s + extra_s + (self.cost.stall_s if saved else 0.0)
            self._step += 1
            self.clock_s += duration_s
            if self._step > 1:
                self.schedule.observe_steps(1, duration_s, saved=saved)
            for _ in [at for at in self._under_way if at <= self.clock_s]:
                self.schedule.observe_save(self.cost)
            self._under_way = [at for at in self._under_way if at > self.clock_s]
            last = self.saves[-1] if self.saves else 0
            if self.schedule.due(
                step=self._step,
                last_step=last,
                since_last_s=self.clock_s - self._last_save_s,
                under_way=len(self._under_way),
            ):
                self.saves.append(self._step)
                self._under_way.append(self.clock_s + self.cost.durable_s)
                self._last_save_s = self.clock_s
        return self.saves[before:]


def told(cadence: Cadence, step_s: float, *costs: SaveCost, max_in_flight: int = 1) -> Schedule:
    """A schedule whose profile is over."""
    schedule = cadence.begin(max_in_flight=max_in_flight)
    for cost in costs:
        schedule.observe_save(cost)
    for _ in range(WARM_UP + 4):
        schedule.observe_steps(1, step_s, saved=False)
    return schedule


def interval_steps(schedule: Schedule) -> int:
    """After how many steps it is due."""
    return next(
        k
        for k in range(1, 10_000)
        if schedule.due(step=1000 + k, last_step=1000, since_last_s=0.0, under_way=0)
    )


# --- those that learn nothing -----------------------------------------------


@given(st.integers(1, 50), st.integers(1, 500))
def test_every_steps_is_due_at_each_multiple_and_nowhere_else(steps: int, step: int) -> None:
    due = EverySteps(steps).due(step=step, last_step=0, since_last_s=1e9, under_way=0)
    assert due == (step % steps == 0)


def test_every_seconds_is_due_once_the_time_has_passed() -> None:
    cadence = EverySeconds(2.5)
    assert not cadence.due(step=7, last_step=3, since_last_s=2.4, under_way=0)
    assert cadence.due(step=7, last_step=3, since_last_s=2.5, under_way=0)


def test_never_is_never_due() -> None:
    assert not Never().due(step=10, last_step=0, since_last_s=math.inf, under_way=0)


def test_what_learns_nothing_is_its_own_schedule() -> None:
    for cadence in (Never(), EverySteps(3), EverySeconds(2)):
        schedule: Schedule = cadence.begin(max_in_flight=1)
        schedule.observe_steps(1, 1.0, saved=False)
        schedule.observe_save(SaveCost(1.0, 1.0, 1.0))
        assert schedule == cadence


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: EverySteps(0), "every_steps: expected an integer from 1 on, found 0"),
        (lambda: EverySteps(-3), "every_steps"),
        (lambda: EverySeconds(0), "every_seconds: expected a number of seconds above 0, found 0"),
        (lambda: EverySeconds(math.nan), "every_seconds"),
        (lambda: OverheadBudget(0.0), "budget: expected a number of parts of the time"),
        (lambda: OverheadBudget("3.5%"), "budget: .* found '3.5%'"),
        (lambda: OverheadBudget(math.nan), "budget"),
        (lambda: OverheadBudget(profile_steps=0), "profile_steps: expected an integer from 1 on"),
        (lambda: OverheadBudget(dynamic=1), "dynamic: expected True or False, found 1"),
        (lambda: SlowdownFactor(0.95), r"factor: expected a number from 1 on, found 0\.95"),
        (lambda: SlowdownFactor(True), "factor"),
        (lambda: SlowdownFactor(profile_steps=2.0), "profile_steps"),
        (lambda: YoungDaly(0), "mtbf_s: expected a number of seconds above 0, found 0"),
        (lambda: YoungDaly(3600, profile_steps=-1), "profile_steps"),
    ],
)
def test_a_cadence_without_meaning_is_refused_by_name(make: object, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        make()


# --- measuring --------------------------------------------------------------


@pytest.mark.parametrize("cadence", MEASURING, ids=str)
def test_the_first_save_comes_when_the_steps_are_timed_and_the_next_when_its_cost_is_known(
    cadence: Cadence,
) -> None:
    run = Run(cadence, 1.0, SaveCost(0.0, 0.0, 50.0))
    assert run.go(WARM_UP + 4) == []  # of which one less was told: two boundaries make a step
    assert run.go(1) == [10]
    assert "not known yet" in run.schedule.why
    assert run.go(49) == [], "its cost is not known yet"
    assert run.go(1) == [60]
    assert "not known" not in run.schedule.why


@pytest.mark.parametrize("cadence", MEASURING, ids=str)
def test_where_the_first_save_fails_another_one_is_taken_and_not_at_each_step(
    cadence: Cadence,
) -> None:
    schedule = cadence.begin(max_in_flight=1)
    for _ in range(WARM_UP + 4):
        schedule.observe_steps(1, 1.0, saved=False)
    assert schedule.due(step=9, last_step=0, since_last_s=9.0, under_way=0)
    for step in range(10, 13):  # it failed: nothing is told of it
        assert not schedule.due(step=step, last_step=9, since_last_s=9.0, under_way=0)
    assert not schedule.due(step=13, last_step=9, since_last_s=9.0, under_way=1)
    assert schedule.due(step=13, last_step=9, since_last_s=9.0, under_way=0)


@pytest.mark.parametrize("cadence", MEASURING[:2], ids=str)
def test_the_warm_up_and_steps_that_save_are_not_timed(cadence: Cadence) -> None:
    schedule = cadence.begin(max_in_flight=1)
    schedule.observe_save(SaveCost(0.0, 0.0, 21.0))
    for _ in range(WARM_UP):
        schedule.observe_steps(1, 1000.0, saved=False)
    for _ in range(4):
        schedule.observe_steps(1, 3000.0, saved=True)
        schedule.observe_steps(1, 2.0, saved=False)
    schedule.observe_steps(1, 9000.0, saved=False)  # the profile is over
    assert "steps of 2 s" in schedule.why
    assert interval_steps(schedule) == {OverheadBudget: 11, SlowdownFactor: 10}[type(cadence)]


@pytest.mark.parametrize("cadence", MEASURING, ids=str)
def test_schedules_of_one_cadence_share_nothing(cadence: Cadence) -> None:
    first = told(cadence, 1.0, SaveCost(0.5, 0.0, 9.0))
    second = cadence.begin(max_in_flight=1)
    assert "not known" not in first.why
    assert "not known yet" in second.why
    assert cadence == type(cadence)(*(getattr(cadence, n) for n in cadence.__slots__))


@pytest.mark.parametrize("cadence", MEASURING[:2], ids=str)
def test_steps_told_of_several_at_a_time_give_the_same_interval(cadence: Cadence) -> None:
    one_by_one = told(cadence, 2.0, SaveCost(0.5, 0.5, 9.0))
    together = cadence.begin(max_in_flight=1)
    together.observe_save(SaveCost(0.5, 0.5, 9.0))
    together.observe_steps(WARM_UP, 99.0, saved=False)
    together.observe_steps(4, 8.0, saved=False)
    assert together.why == one_by_one.why


# --- CheckFreq --------------------------------------------------------------

seconds = st.floats(1e-4, 1e4)


@given(seconds, seconds, seconds, seconds, st.floats(1e-3, 1.0), st.integers(1, 5))
def test_the_interval_of_a_budget_is_the_least_that_keeps_both_promises(
    step_s: float, at_boundary_s: float, at_fence_s: float, more_s: float, p: float, n: int
) -> None:
    o = at_boundary_s + at_fence_s
    cost = SaveCost(at_boundary_s, at_fence_s, o + more_s)
    k = OverheadBudget(p, profile_steps=4)
    schedule = told(k, step_s, cost, max_in_flight=n)
    found = schedule.interval_steps
    near = 1.0 + 1e-6
    assert n * found * step_s * near >= more_s, "the slot is free"
    assert found * step_s * p * near >= o, "within the budget"
    if found > 1:
        less = (found - 1) * step_s
        assert n * less < more_s * near or less * p < o * near, "one step less would not do"


def test_the_published_numbers_of_an_interval() -> None:
    # T_i 0.5 s, a copy of 1 s of which 0.3 s stall the update, 4 s to persist.
    cost = SaveCost(0.0, 0.3, 5.0)
    assert interval_steps(told(OverheadBudget(0.035, 4), 0.5, cost)) == 18  # 0.3 / (3.5 % of 0.5)
    assert interval_steps(told(OverheadBudget(0.5, 4), 0.5, cost)) == 10  # 4.7 / 0.5
    assert interval_steps(told(OverheadBudget(0.5, 4), 0.5, cost, max_in_flight=2)) == 5


def test_the_worst_cost_of_the_profile_counts_and_none_after_it() -> None:
    costs = [SaveCost(0.1, 0.0, 1.0), SaveCost(0.0, 0.4, 2.0), SaveCost(0.2, 0.0, 9.2)]
    schedule = told(OverheadBudget(0.1, 4), 1.0, *costs)
    assert schedule.interval_steps == 9  # L - o of the third; o / p of the second is 4
    schedule.observe_save(SaveCost(100.0, 0.0, 1000.0))
    assert schedule.interval_steps == 9


def test_a_window_over_the_budget_makes_the_interval_two_steps_longer_until_one_is_within() -> None:
    run = Run(OverheadBudget(0.1, profile_steps=4), 1.0, SaveCost(0.2, 0.0, 2.4))
    run.go(WARM_UP + 5 + 3)
    assert run.schedule.interval_steps == 3
    run.go(3, extra_s=0.5)
    assert run.schedule.interval_steps == 5
    assert "2 more, since 3 steps took 56.7% longer" in run.schedule.why
    run.go(5, extra_s=0.2)
    assert run.schedule.interval_steps == 7
    run.go(7)  # with 0.2 s of 7 within the budget: nobody looks from now on
    run.go(50, extra_s=3.0)
    assert run.schedule.interval_steps == 7
    assert {b - a for a, b in pairwise(run.saves[-5:])} == {7}


def test_a_dynamic_budget_is_watched_for_ever_and_never_shrinks_the_interval() -> None:
    run = Run(OverheadBudget(0.1, profile_steps=4, dynamic=True), 1.0, SaveCost(0.2, 0.0, 2.4))
    run.go(WARM_UP + 5 + 3 + 3)
    assert run.schedule.interval_steps == 3
    run.go(30)
    assert run.schedule.interval_steps == 3, "0.2 s of 3 are within"
    run.go(3, extra_s=0.5)
    assert run.schedule.interval_steps == 5
    run.go(500)
    assert run.schedule.interval_steps == 5


@given(st.lists(st.floats(0.5, 4.0), min_size=50, max_size=50), st.booleans())
def test_the_interval_of_a_budget_never_shrinks(durations: list[float], dynamic: bool) -> None:
    schedule = told(OverheadBudget(0.05, 4, dynamic), 1.0, SaveCost(0.01, 0.0, 2.0))
    intervals = []
    for i, duration_s in enumerate(durations):
        schedule.observe_steps(1, duration_s, saved=i % 3 == 0)
        intervals.append(schedule.interval_steps)
    assert intervals == sorted(intervals)
    assert set(b - a for a, b in pairwise(intervals)) <= {0, 2}


# --- PCcheck ----------------------------------------------------------------


@given(seconds, seconds, st.floats(1.0, 3.0), st.integers(1, 6))
def test_the_interval_of_a_slowdown_is_the_published_one(
    step_s: float, write_s: float, q: float, n: int
) -> None:
    schedule = told(
        SlowdownFactor(q, 4), step_s, SaveCost(7.0, 0.0, 7.0 + write_s), max_in_flight=n
    )
    exact = write_s / (n * q * step_s)
    assert schedule.interval_steps >= 1
    assert schedule.interval_steps - 1 <= exact * (1 + 1e-6)
    assert schedule.interval_steps >= exact * (1 - 1e-6)


def test_a_longer_write_makes_the_interval_longer_and_a_shorter_one_changes_nothing() -> None:
    schedule = told(SlowdownFactor(1.0, 4), 1.0, SaveCost(0.0, 0.0, 8.0), max_in_flight=4)
    assert schedule.interval_steps == 2
    schedule.observe_save(SaveCost(0.0, 0.0, 32.0))  # four share the store
    assert schedule.interval_steps == 8
    schedule.observe_save(SaveCost(24.0, 0.0, 56.0))  # waiting for a slot is no writing
    schedule.observe_save(SaveCost(0.0, 0.0, 8.0))
    assert schedule.interval_steps == 8
    assert schedule.why == (
        "every 8 steps of 1 s: writing one checkpoint took 32 s at worst, with 4 in flight and "
        "steps that may take 1 times as long"
    )


# --- Young and Daly ---------------------------------------------------------


def test_daly_finds_his_published_intervals() -> None:
    minutes = [daly_interval_s(300.0, hours * 3600.0) / 60.0 for hours in (24.0, 6.0, 0.25)]
    assert minutes == pytest.approx([117.0, 57.0, 9.1], rel=0.01)
    assert daly_interval_s(200.0, 100.0) == 100.0
    assert daly_interval_s(0.0, 100.0) == 0.0


@given(st.floats(1e-3, 1.0), st.floats(1e6, 1e8))
def test_daly_is_young_where_failures_are_rare(stall_s: float, mtbf_s: float) -> None:
    assert daly_interval_s(stall_s, mtbf_s) == pytest.approx(
        young_interval_s(stall_s, mtbf_s), rel=2e-3
    )


def test_the_interval_is_as_long_as_daly_says_and_no_shorter_than_the_store_allows() -> None:
    cost = SaveCost(0.5, 0.5, 40.5)
    schedule = told(YoungDaly(7200.0, 4), 1.0, cost)
    best_s = daly_interval_s(1.0, 7200.0)
    assert 100.0 < best_s < 120.0
    for since_s, due in ((best_s - 0.1, False), (best_s, True)):
        assert schedule.due(step=2, last_step=1, since_last_s=since_s, under_way=0) == due
    free = told(YoungDaly(7200.0, 4), 1.0, SaveCost(0.0, 0.0, 40.0), max_in_flight=2)
    for since_s, due in ((19.9, False), (20.0, True)):
        assert free.due(step=2, last_step=1, since_last_s=since_s, under_way=1) == due
    free.observe_save(SaveCost(0.0, 0.0, 20.0))
    assert free.due(step=2, last_step=1, since_last_s=15.0, under_way=1), "it shrinks too"


def test_nothing_of_a_stall_and_a_write_saves_at_each_step() -> None:
    run = Run(YoungDaly(7200.0, 4), 1.0, SaveCost(0.0, 0.0, 0.0))
    run.go(WARM_UP + 5 + 1)
    assert len(run.go(20)) == 20


# --- the clock --------------------------------------------------------------


class Seen:
    """A cadence and its schedule that write down what they are told."""

    why = "as seen"

    def __init__(self) -> None:
        self.calls: list[object] = []

    def begin(self, *, max_in_flight: int) -> Seen:
        self.calls.append(("begin", max_in_flight))
        return self

    def due(self, *, step: int, last_step: int, since_last_s: float, under_way: int) -> bool:
        self.calls.append(("due", step, last_step, since_last_s, under_way))
        return True

    def observe_steps(self, count: int, duration_s: float, *, saved: bool) -> None:
        self.calls.append(("steps", count, duration_s, saved))

    def observe_save(self, cost: SaveCost) -> None:
        self.calls.append(cost)


def ticks(*times: float) -> Iterator[float]:
    return iter([0.0, *times])


def test_steps_are_from_boundary_to_boundary_and_those_that_save_are_known() -> None:
    seen, clock = Seen(), ticks(1.0, 1.0, 3.0, 3.0, 4.0, 7.0, 7.0, 17.0)
    keeper = Timekeeper(seen, 3, lambda: next(clock))
    keeper.note_step(1)
    keeper.due(1, 0)
    keeper.note_step(2)
    keeper.due(2, 1)
    keeper.note_save(2)
    keeper.note_step(3)
    keeper.due(3, 2)
    keeper.note_step(8)
    assert seen.calls == [
        ("begin", 3),
        ("due", 1, 0, 1.0, 0),
        ("steps", 1, 2.0, False),
        ("due", 2, 0, 3.0, 1),
        ("steps", 1, 4.0, True),
        ("due", 3, 2, 3.0, 2),
        ("steps", 5, 10.0, False),
    ]


def test_what_a_restore_takes_is_no_step_and_going_back_is_none_either() -> None:
    seen, clock = Seen(), ticks(1.0, 50.0, 52.0, 53.0, 54.0)
    keeper = Timekeeper(seen, 1, lambda: next(clock))
    keeper.note_step(9)
    keeper.begin(4)
    assert keeper.last_step == 4
    keeper.note_step(5)
    keeper.note_step(2)
    keeper.note_step(3)
    assert seen.calls == [("begin", 1), ("steps", 1, 1.0, False)]


REPORT = SaveReport(3, 1, 10, 1, 5, 0.25, 0.5, 1.0, 2.0, 4.0, 0.1, 2)


def test_a_cost_is_what_the_report_says() -> None:
    seen = Seen()
    Timekeeper(seen, 1).note_durable(REPORT)
    (cost,) = seen.calls[1:]
    assert cost == SaveCost(0.25, 0.5, 4.0)
    assert (cost.stall_s, cost.write_s) == (0.75, 3.75)


def test_what_was_captured_to_see_how_is_told_to_no_cadence() -> None:
    seen = Seen()
    Timekeeper(seen, 1).note_durable(replace(REPORT, is_trial=True))
    assert seen.calls == [("begin", 1)]


def test_an_interval_that_changes_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    keeper = Timekeeper(SlowdownFactor(profile_steps=1), 1, lambda: 0.0)
    caplog.set_level(logging.INFO, "asymcheck.timekeeping")
    keeper.due(1, 0)
    assert not caplog.records
    for step in range(1, 9):
        keeper.note_step(step)
    keeper.note_durable(REPORT)
    for _ in range(3):
        keeper.due(9, 0)
    (record,) = caplog.records
    assert record.getMessage() == f"how often to save: {keeper.why}"


# --- in a training ----------------------------------------------------------


def train(ckpt: Checkpointer, steps: range) -> list[int]:
    """Steps that saved; each save is durable before the next step, so that nothing is a race."""
    saved = []
    for step in steps:
        if ckpt.step(step) is not None:
            saved.append(step)
            assert ckpt.wait(60)
    return saved


def state() -> dict[str, object]:
    return {"m": torch.nn.Linear(8, 8)}


def test_a_training_is_profiled_and_then_saved_as_often_as_it_allows(tmp_path: Path) -> None:
    rich = OverheadBudget(1e9, profile_steps=2)  # whatever a checkpoint costs
    trace = tmp_path / "trace.jsonl"
    with Checkpointer(MemoryStore(), state=state(), cadence=rich, trace=trace) as ckpt:
        assert ckpt.restore() == 0
        assert "not known yet" in ckpt.cadence_report
        saved = train(ckpt, range(1, 200))
        assert saved[0] == WARM_UP + 2 + 1
        assert ckpt.cadence_report.startswith("every ")
        k = int(ckpt.cadence_report.split()[1])
        assert {b - a for a, b in pairwise(saved)} <= {k}
    found = read_trace(trace)
    assert "not known yet" in found[0].cadence
    assert {t.cadence for t in found[1:]} <= {ckpt.cadence_report}


def test_the_strategys_cadence_is_used_where_the_user_says_nothing() -> None:
    often = Strategy(cadence=EverySteps(2))
    for arguments, expected in (
        ({}, [2, 4]),
        ({"every_steps": 3}, [3]),
        ({"cadence": EverySteps(1)}, [1, 2, 3, 4]),
        ({"cadence": Never()}, []),
    ):
        with Checkpointer(MemoryStore(), state=state(), strategy=often, **arguments) as ckpt:
            ckpt.restore()
            assert train(ckpt, range(1, 5)) == expected
    with Checkpointer(MemoryStore(), state=state()) as ckpt:
        ckpt.restore()
        assert train(ckpt, range(1, 5)) == []
        assert ckpt.cadence_report == "only where save() is called"


def test_a_schedule_is_told_the_slots_of_the_strategy_and_each_durable_save_once() -> None:
    seen = Seen()
    strategy = Strategy(admission=Admission(max_in_flight=2))
    with Checkpointer(MemoryStore(), state=state(), strategy=strategy, cadence=seen) as ckpt:
        ckpt.restore()
        train(ckpt, range(1, 4))
    costs = [call for call in seen.calls if isinstance(call, SaveCost)]
    assert seen.calls[0] == ("begin", 2)
    assert len(costs) == 3
    assert all(0.0 < c.stall_s <= c.durable_s for c in costs)
    assert [c[2:][1] for c in seen.calls if isinstance(c, tuple) and c[0] == "steps"] == [True] * 2


def test_a_strategy_that_waits_has_cost_training_all_of_the_time() -> None:
    seen = Seen()
    blocking = replace(Strategy(), capture="blocking", persist="before")
    with Checkpointer(MemoryStore(), state=state(), strategy=blocking, cadence=seen) as ckpt:
        ckpt.restore()
        handle = ckpt.step(1)
        assert handle is not None
        report = handle.durable.result(60)
        train(ckpt, range(2, 4))
    assert report.step_stall_s == report.durable_s > 0.0
    assert report.fence_stall_s == 0.0
    (cost, *_) = [call for call in seen.calls if isinstance(call, SaveCost)]
    assert cost.stall_s == cost.durable_s > 0.0


def test_the_interval_is_decided_by_the_way_of_capture_that_the_trials_left() -> None:
    checkfreq = replace(strategies["checkfreq"], cadence=OverheadBudget(1e9, profile_steps=1))
    model = torch.nn.Linear(256, 256)  # 256 KiB: large enough to be copied lazily
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optim": optimizer}
    reports: list[SaveReport] = []
    with Checkpointer(MemoryStore(), state=state, strategy=checkfreq) as ckpt:
        ckpt.restore()
        for step in range(1, 40):
            model(torch.ones(1, 256)).sum().backward()
            optimizer.step()
            handle = ckpt.step(step)
            if len(reports) > 2 * TRIES:
                break
            if handle is not None:
                assert ckpt.cadence_report.startswith("not known yet")
                reports.append(handle.durable.result(60))
        assert ckpt.cadence_report.startswith("every ")
    assert [report.is_trial for report in reports] == [True] * 2 * TRIES + [False]
    assert {report.capture for report in reports[:-1]} == {"lazy", "device-copy"}


def test_a_failed_save_is_told_to_no_cadence() -> None:
    seen = Seen()
    outcomes = Outcomes("raise", Timekeeper(seen, 1), None)
    with Checkpointer(MemoryStore(), state=state()) as ckpt:
        ckpt.restore()
        handle = ckpt.save(1)
        ckpt.wait(60)
    good = replace(handle, durable=type(handle.durable)(lambda: None))
    bad = replace(handle, durable=type(handle.durable)(lambda: None))
    good.durable.set_result(REPORT)
    bad.durable.set_exception(StoreError("full", retryable=False))
    outcomes.pending += [bad, good]
    assert str(outcomes.failure(None, ())) == "full"
    assert seen.calls[1:] == [SaveCost(0.25, 0.5, 4.0)]
    assert outcomes.failure(None, ()) is None
    assert outcomes.pending == []
