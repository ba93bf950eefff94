"""When the copy is held back, and where it goes then."""

from __future__ import annotations

import random

import pytest

from asymcheck.errors import OptionError
from asymcheck.planning.adaptive import Adaptive, chunk_bytes
from asymcheck.planning.contention import Contention, Phase
from asymcheck.planning.layout import MiB
from asymcheck.planning.plan import UNKNOWN, Gate, PartitionPlan, predict
from asymcheck.planning.windows import Window, repeated

RATE = 1e9
R = 1_000_000_000
"""One second of copying."""


def measured(error_s: float = 0.0, pairs: int = 40, **kappa: float) -> Contention:
    """κ of each phase from pairs with an error of that size."""
    chance = random.Random(7)
    found = Contention()
    phases: dict[str, Phase] = {"forward": "forward", "backward": "backward", "busy": "collective"}
    for name, phase in phases.items():
        for _ in range(pairs):
            copied_s = chance.uniform(0.05, 0.15)
            with_s = 1.0 + kappa.get(name, 0.0) * copied_s + chance.gauss(0.0, error_s)
            found = found.add(phase, with_s=with_s, without_s=1.0, copied_s=copied_s)
    return found


IDLE = tuple(Window(phase, 0.1) for phase in ["forward"] * 10 + ["backward"] * 20)
SHARED = tuple(Window(w.phase, 0.1, 0.05) for w in IDLE)


def test_the_copy_runs_freely_before_anything_is_measured() -> None:
    decision = Adaptive().decide(R, SHARED, RATE)
    assert decision.plan.free_running
    assert decision.gate == Gate()


def test_the_copy_runs_freely_where_copying_disturbs_nothing() -> None:
    decision = Adaptive().decide(R, SHARED, RATE, measured())
    assert decision.plan.free_running
    assert decision.gain_s == 0.0


def test_the_copy_runs_freely_where_it_costs_the_same_everywhere() -> None:
    alike = measured(forward=0.4, backward=0.4, busy=0.4)
    assert Adaptive().divide(R, SHARED, RATE, alike).free_running


def test_the_copy_keeps_to_idle_time_where_other_traffic_shares_its_path() -> None:
    decision = Adaptive().decide(R, SHARED, RATE, measured(busy=0.5))
    plan = decision.plan
    assert not plan.free_running
    assert decision.gate == Gate("windows", 0.1)
    idle_bytes = [round(w.idle_s * RATE) for w in SHARED]
    assert all(size <= idle + 16 * MiB for size, idle in zip(plan.sizes, idle_bytes, strict=True))
    found = predict(plan, SHARED, RATE, decision.gate, measured(busy=0.5))
    assert found.lost_s < 0.01
    # Early windows are filled: the slack is at the end.
    assert found.copy_end_s < 2.2
    assert all(bound % decision.chunk_bytes == 0 or bound == R for bound in plan.bounds)


def test_bytes_move_to_the_phase_where_they_cost_least() -> None:
    dear_forward = Adaptive().divide(R, IDLE, RATE, measured(forward=0.5))
    assert sum(dear_forward.sizes[:10]) == 0
    dear_backward = Adaptive().divide(R, IDLE, RATE, measured(backward=0.5))
    # What fits forward at no cost goes there, so holding it back would gain nothing.
    assert dear_backward.free_running
    more = Adaptive().divide(3 * R // 2, IDLE, RATE, measured(forward=0.5))
    assert sum(more.sizes[:10]) == 0


def test_an_offloaded_optimizer_sends_the_bytes_to_forward() -> None:
    # Gradients leave in backward on the path of the copy; with two micro-batches there is
    # another forward after the first backward, and the copy waits for it.
    step = repeated((Window("forward", 0.6), Window("backward", 1.0, 1.0)), 2)
    plan = Adaptive().divide(R, step, RATE, measured(busy=0.5))
    assert plan.sizes[1] == plan.sizes[3] == 0
    assert plan.sizes[0] == pytest.approx(0.6 * R, abs=32 * MiB)


def test_long_accumulation_leaves_nothing_to_decide() -> None:
    # A 40th of the step: whatever is gained is under 1 % of it.
    step = repeated(SHARED, 40)
    assert Adaptive().divide(R, step, RATE, measured(busy=0.5)).free_running


def test_a_gain_within_the_error_of_the_measurement_is_not_believed() -> None:
    # 0.5 in forward and 0.35 in backward, each known to within about 0.2.
    noisy = measured(error_s=0.06, forward=0.5, backward=0.3)
    forward, backward = noisy.interval("forward"), noisy.interval("backward")
    assert forward is not None
    assert backward is not None
    assert backward.low > 0.0
    assert backward.high > forward.low
    decision = Adaptive().decide(R, IDLE, RATE, noisy)
    assert decision.gain_s > 0.01 * 3.0
    assert decision.plan.free_running
    assert "error" in decision.why
    sure = measured(error_s=0.001, forward=0.5, backward=0.3)
    assert not Adaptive().divide(R, IDLE, RATE, sure).free_running


def test_no_bytes_are_moved_to_a_phase_that_was_not_measured() -> None:
    only_forward = Contention()
    for copied_s in (0.05, 0.1):
        only_forward = only_forward.add(
            "forward", with_s=1.0 + 0.5 * copied_s, without_s=1.0, copied_s=copied_s
        )
    assert Adaptive().divide(R, IDLE, RATE, only_forward).free_running


def test_a_small_gain_does_not_make_the_plan_change_back_and_forth() -> None:
    adaptive = Adaptive()
    held = adaptive.divide(R, IDLE, RATE, measured(forward=0.5))
    assert not held.free_running
    free = adaptive.divide(R, IDLE, RATE)
    small = measured(forward=0.022)  # 0.7 % of the step: between leaving and entering
    assert 0.005 * 3.0 < adaptive.decide(R, IDLE, RATE, small).gain_s < 0.01 * 3.0
    assert adaptive.divide(R, IDLE, RATE, small, previous=free).free_running
    assert not adaptive.divide(R, IDLE, RATE, small, previous=held).free_running
    smaller = measured(forward=0.012)
    assert adaptive.divide(R, IDLE, RATE, smaller, previous=held).free_running


def test_a_copy_that_needs_all_the_time_there_is_runs_freely() -> None:
    decision = Adaptive().decide(3 * R, SHARED, RATE, measured(busy=0.5))
    assert decision.plan.free_running
    assert "all the time" in decision.why


@pytest.mark.parametrize("windows", [(), (Window("forward", 0.0),)])
def test_no_windows_and_no_bytes_are_no_trouble(windows: tuple[Window, ...]) -> None:
    for lazy_bytes in (0, R):
        plan = Adaptive().divide(lazy_bytes, windows, RATE, measured(busy=0.5))
        assert plan.free_running
        assert plan.lazy_bytes == lazy_bytes
    assert "nothing" in Adaptive().decide(0, SHARED, RATE, UNKNOWN).why


def test_chunks_are_a_part_of_a_window_within_limits() -> None:
    assert chunk_bytes((), RATE) == 4 * MiB
    assert chunk_bytes((Window("forward", 1e-6),), RATE) == 4 * MiB
    assert chunk_bytes((Window("forward", 0.1),), RATE) == 8 * MiB
    assert chunk_bytes((Window("forward", 0.0), Window("backward", 100.0)), RATE) == 32 * MiB


def test_thresholds_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(OptionError, match="leave <= enter"):
        Adaptive(enter=0.01, leave=0.02)
    with pytest.raises(OptionError, match="deadline_margin"):
        Adaptive(margin=1.0)


def test_a_plan_held_back_is_told_from_one_that_is_not() -> None:
    assert PartitionPlan((R, R), IDLE[:2], R).free_running
    assert not PartitionPlan((R - 1, R), IDLE[:2], R).free_running
