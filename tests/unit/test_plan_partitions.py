"""Windows, plans and what they cost, on numbers that can be checked by hand."""

from __future__ import annotations

import math

import pytest

from asymcheck.errors import OptionError, PlanError
from asymcheck.planning.contention import Contention, Phase
from asymcheck.planning.plan import (
    Gate,
    IdleProportional,
    PartitionPlan,
    Uniform,
    Whole,
    least_lost_s,
    predict,
)
from asymcheck.planning.windows import Window, idle_s, repeated, total_s

HELD = Gate("windows")
WITH_DEADLINE = Gate("windows", 0.0)
STEP = (*[Window("forward", 2.0)] * 3, *[Window("backward", 4.0)] * 3)


def costing(**kappa: float) -> Contention:
    """Contention that was measured without any error."""
    found = Contention()
    phases: dict[str, Phase] = {"forward": "forward", "backward": "backward", "busy": "collective"}
    for name, value in kappa.items():
        for copied_s in (1.0, 2.0):
            found = found.add(
                phases[name], with_s=1.0 + value * copied_s, without_s=1.0, copied_s=copied_s
            )
    return found


# --- windows ----------------------------------------------------------------


def test_other_traffic_makes_a_window_busy_and_never_less_than_not_idle() -> None:
    assert Window("forward", 3.0, 1.0).idle_s == 2.0
    assert Window("backward", 3.0, 3.5).idle_s == 0.0
    step = (Window("forward", 3.0, 1.0), Window("backward", 3.0, 3.5))
    assert (total_s(step), idle_s(step)) == (6.0, 2.0)


@pytest.mark.parametrize("wrong", [-1.0, math.nan, math.inf, 1e10])
def test_a_window_of_no_length_that_can_be_is_refused(wrong: float) -> None:
    with pytest.raises(OptionError, match="duration_s: expected"):
        Window("forward", wrong)
    with pytest.raises(OptionError, match="collective_s: expected"):
        Window("forward", 1.0, wrong)


def test_a_window_of_an_unknown_pass_is_refused() -> None:
    with pytest.raises(OptionError, match="forward or backward, found 'sideways'"):
        Window("sideways", 1.0)  # type: ignore[arg-type]


# --- a plan is a cover ------------------------------------------------------


@pytest.mark.parametrize(
    ("bounds", "lazy_bytes", "wrong"),
    [
        ((), 10, "2 bounds"),
        ((10,), 10, "2 bounds"),
        ((5, 9), 10, "a last bound of 10"),
        ((5, 11), 10, "a last bound of 10"),
        ((11, 10), 10, "ascend"),
        ((-1, 10), 10, "ascend"),
        ((5.0, 10), 10, "whole numbers"),
        ((0, -1), -1, "a size of at least 0"),
    ],
)
def test_a_plan_that_is_no_cover_is_refused(
    bounds: tuple[int, ...], lazy_bytes: int, wrong: str
) -> None:
    with pytest.raises(PlanError, match=wrong):
        PartitionPlan(bounds, STEP[:2], lazy_bytes)


def test_without_windows_the_copy_runs_freely_to_the_one_bound() -> None:
    for partitioner in (Whole(), Uniform(), IdleProportional()):
        plan = partitioner.divide(10, (), 1.0)
        assert plan == PartitionPlan((10,), (), 10)
        assert plan.free_running
    with pytest.raises(PlanError):
        PartitionPlan((5, 10), (), 10)


# --- partitioners -----------------------------------------------------------


def test_the_rule_of_the_paper_sums_to_what_there_is() -> None:
    plan = IdleProportional().divide(1000, STEP, 1.0)
    assert plan.sizes == (111, 111, 111, 223, 222, 222)
    assert sum(plan.sizes) == 1000
    assert not plan.free_running


def test_whole_and_uniform_ignore_how_long_windows_are() -> None:
    assert Whole().divide(1000, STEP, 1.0).sizes == (1000, 0, 0, 0, 0, 0)
    assert Whole().divide(1000, STEP, 1.0).free_running
    assert Uniform().divide(1000, STEP, 1.0).sizes == (167, 166, 167, 167, 166, 167)


def test_an_offloaded_optimizer_makes_forward_the_phase_with_the_larger_partitions() -> None:
    # Its gradients leave in backward, so backward is busy: the asymmetry turns around.
    step = (Window("forward", 1.0), Window("backward", 2.0, 1.75))
    assert IdleProportional().divide(1000, step, 1.0).sizes == (800, 200)


def test_under_accumulation_every_micro_batch_gets_its_share() -> None:
    step = repeated((Window("forward", 1.0), Window("backward", 2.0)), 4)
    assert len(step) == 8
    plan = IdleProportional().divide(1200, step, 1.0)
    assert plan.sizes == (100, 200) * 4
    # Four times the time, the same bytes: what stalled no longer does.
    once = IdleProportional().divide(1200, step[:2], 1.0)
    assert predict(once, step[:2], 100.0, HELD).stall_s == 9.0
    assert predict(plan, step, 100.0, HELD).stall_s == 0.0
    with pytest.raises(OptionError, match="micro_batches"):
        repeated(step, 0)


def test_windows_without_idle_time_leave_the_copy_free() -> None:
    busy = (Window("forward", 1.0, 1.0), Window("backward", 0.0))
    assert IdleProportional().divide(10, busy, 1.0).free_running


def test_windows_of_zero_length_get_nothing() -> None:
    step = (Window("forward", 0.0), Window("forward", 1.0), Window("backward", 0.0))
    assert IdleProportional().divide(10, step, 1.0).sizes == (0, 10, 0)


def test_bounds_can_be_rounded_to_whole_pieces_and_stay_a_cover() -> None:
    plan = PartitionPlan((5, 17, 23, 23), STEP[:4], 23)
    assert plan.aligned(8).bounds == (0, 16, 23, 23)
    assert Whole().divide(23, STEP, 1.0).aligned(8).free_running


# --- the fluid model --------------------------------------------------------


def test_a_free_copy_stalls_by_what_does_not_fit() -> None:
    plan = Whole().divide(1000, STEP, 1.0)
    fits = predict(plan, STEP, 100.0)
    assert (fits.copy_end_s, fits.stall_s, fits.slowdown_s) == (10.0, 0.0, 0.0)
    assert fits.window_bytes == (200, 200, 200, 400, 0, 0)
    late = predict(plan, STEP, 50.0)
    assert (late.copy_end_s, late.stall_s, late.stalled_bytes) == (20.0, 2.0, 100)
    assert least_lost_s(1000, STEP, 50.0) == 2.0
    assert least_lost_s(1000, STEP, 100.0) == 0.0


def test_a_gate_holds_the_copy_at_the_bounds_and_what_is_left_over_goes_on() -> None:
    plan = PartitionPlan((0, 300, 300, 600, 600, 1000), STEP, 1000)
    found = predict(plan, STEP, 100.0, HELD)
    # 300 bytes take 3 s and the second window has 2: the third copies the rest.
    assert found.window_bytes == (0, 200, 100, 300, 0, 400)
    assert found.copy_end_s == 18.0
    assert found.stall_s == 0.0


def test_a_slower_step_than_planned_is_no_reason_to_stall_where_a_deadline_lets_go() -> None:
    plan = PartitionPlan((0, 1000), (Window("forward", 10.0), Window("backward", 2.0)), 1000)
    held = predict(plan, plan.windows, 100.0, HELD)
    assert held.stall_s == 8.0
    saved = predict(plan, plan.windows, 100.0, WITH_DEADLINE)
    assert saved.stall_s == 0.0
    assert saved.window_bytes == (800, 200)
    assert saved.copy_end_s == 12.0
    early = predict(plan, plan.windows, 100.0, Gate("windows", 0.1))
    # 10 s of copying at 12 s to go: 10 >= 0.9 · 11.11, so it is let go after 0.89 s.
    assert early.copy_end_s == pytest.approx(12.0 - 10.0 / 0.9 + 10.0)


def test_a_copy_that_is_late_when_a_window_begins_is_let_go_for_good() -> None:
    plan = PartitionPlan((500, 1000), (Window("forward", 5.5), Window("backward", 5.5)), 1000)
    # 10 s of copying with 11 s to go: late at once, though it would not be after 5 s of them.
    assert predict(plan, plan.windows, 100.0, Gate("windows", 0.1)).copy_end_s == 10.0
    assert predict(plan, plan.windows, 100.0, Gate("windows", 0.05)).copy_end_s > 10.0


def test_a_window_that_overruns_takes_nothing_from_the_planned_time_of_the_next() -> None:
    plan = PartitionPlan((0, 800), (Window("forward", 1.0), Window("backward", 10.0)), 800)
    overrun = (Window("forward", 5.0), Window("backward", 10.0))
    found = predict(plan, overrun, 100.0, WITH_DEADLINE)
    assert found.window_bytes == (0, 800)
    assert found.copy_end_s == 13.0


def test_a_window_lasts_longer_by_what_copying_takes_from_it() -> None:
    step = (Window("forward", 2.0), Window("backward", 3.0, 1.0))
    contention = costing(forward=0.5, backward=0.0, busy=0.25)
    found = predict(Whole().divide(1000, step, 1.0), step, 125.0, contention=contention)
    # 4 s of copying in forward halve it; then 2 s at no cost, then 4/3 s at a quarter.
    assert found.copied_s == pytest.approx({"forward": 4.0, "backward": 2.0, "collective": 4 / 3})
    assert found.slowdown_s == pytest.approx(4.0 * 0.5 + 4 / 3 * 0.25)
    assert found.stall_s == pytest.approx(8.0 - 4.0 - 2.0 - 4 / 3)
    assert found.lost_s == pytest.approx(8.0 - 5.0)


def test_a_window_stands_still_where_copying_takes_all_of_it() -> None:
    step = (Window("forward", 2.0), Window("backward", 2.0))
    found = predict(Whole().divide(500, step, 1.0), step, 100.0, contention=costing(forward=1.5))
    assert (found.copy_end_s, found.slowdown_s, found.stall_s) == (5.0, 5.0, 0.0)


def test_nothing_to_copy_costs_nothing() -> None:
    for partitioner in (Whole(), Uniform(), IdleProportional()):
        found = predict(partitioner.divide(0, STEP, 1.0), STEP, 1.0, WITH_DEADLINE)
        assert (found.copy_end_s, found.lost_s, found.window_bytes) == (0.0, 0.0, (0,) * 6)


def test_a_step_without_windows_stalls_by_the_whole_copy() -> None:
    found = predict(PartitionPlan((100,), (), 100), (), 50.0)
    assert (found.stall_s, found.copy_end_s, found.stalled_bytes) == (2.0, 2.0, 100)


def test_a_plan_without_windows_runs_freely_through_any_step() -> None:
    found = predict(PartitionPlan((1000,), (), 1000), STEP, 100.0, HELD)
    assert found == predict(Whole().divide(1000, STEP, 1.0), STEP, 100.0)


def test_a_step_of_other_windows_than_the_plan_is_refused() -> None:
    with pytest.raises(PlanError, match="made for 6 windows, the step has 2"):
        predict(Whole().divide(10, STEP, 1.0), STEP[:2], 1.0)


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, math.inf])
def test_a_bandwidth_that_is_none_is_refused(wrong: float) -> None:
    with pytest.raises(OptionError, match="bandwidth_bytes_per_s"):
        predict(Whole().divide(10, STEP, 1.0), STEP, wrong)
    with pytest.raises(OptionError, match="bandwidth_bytes_per_s"):
        least_lost_s(10, STEP, wrong)


def test_a_gate_of_an_unknown_kind_or_margin_is_refused() -> None:
    with pytest.raises(OptionError, match="free or windows"):
        Gate("shut")  # type: ignore[arg-type]
    for margin in (-0.1, 1.0, math.nan):
        with pytest.raises(OptionError, match="deadline_margin"):
            Gate("windows", margin)
