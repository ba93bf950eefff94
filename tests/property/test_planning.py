"""For any windows, sizes and traces: plans cover exactly, and nothing beats the lower bounds."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asymcheck.planning.adaptive import Adaptive, chunk_bytes
from asymcheck.planning.batching import (
    Arrival,
    FixedBytes,
    Policy,
    Ready,
    oracle,
    simulate,
    square_root,
)
from asymcheck.planning.contention import PHASES, Contention, Kappa
from asymcheck.planning.cost import Linear
from asymcheck.planning.plan import (
    FREE,
    Gate,
    IdleProportional,
    PartitionPlan,
    Uniform,
    Whole,
    least_lost_s,
    predict,
)
from asymcheck.planning.windows import Window, idle_s, total_s

SECONDS = st.one_of(st.just(0.0), st.floats(0.0, 10.0), st.floats(0.0, 1e9))
WINDOWS = st.lists(
    st.builds(Window, st.sampled_from(["forward", "backward"]), SECONDS, SECONDS), max_size=12
).map(tuple)
SIZES = st.one_of(st.integers(0, 100), st.integers(0, 2**50))
RATES = st.floats(1.0, 1e12)
KAPPAS = st.builds(
    Kappa, st.integers(0, 50), st.floats(0.1, 10), st.floats(-0.2, 1.2), st.floats(0, 1)
)
CONTENTIONS = st.builds(Contention, KAPPAS, KAPPAS, KAPPAS)
PARTITIONERS = st.sampled_from([Whole(), Uniform(), IdleProportional(), Adaptive()])
GATES = st.sampled_from([FREE, Gate("windows"), Gate("windows", 0.0), Gate("windows", 0.25)])


@given(PARTITIONERS, SIZES, WINDOWS, RATES, CONTENTIONS, st.integers(1, 2**25))
def test_every_partitioner_covers_the_bytes_exactly_once(
    partitioner: Whole | Uniform | IdleProportional | Adaptive,
    lazy_bytes: int,
    windows: tuple[Window, ...],
    rate: float,
    contention: Contention,
    piece_bytes: int,
) -> None:
    plan = partitioner.divide(lazy_bytes, windows, rate, contention)
    for one in (plan, plan.aligned(piece_bytes)):
        assert one.windows == windows
        assert sum(one.sizes) == one.lazy_bytes == lazy_bytes
        assert all(size >= 0 for size in one.sizes)
        assert len(one.bounds) == max(1, len(windows))
    assert partitioner.divide(lazy_bytes, windows, rate, contention, previous=plan) == plan


@given(st.integers(0, 2**40), WINDOWS)
def test_every_size_of_the_papers_rule_is_within_one_byte_of_it(
    lazy_bytes: int, windows: tuple[Window, ...]
) -> None:
    plan = IdleProportional().divide(lazy_bytes, windows, 1.0)
    whole_s = idle_s(windows)
    if whole_s == 0.0:
        assert plan.free_running
        return
    for size, window in zip(plan.sizes, windows, strict=True):
        assert abs(size - lazy_bytes * (window.idle_s / whole_s)) <= 1.01


@st.composite
def any_plans(draw: st.DrawFn) -> PartitionPlan:
    lazy_bytes, windows = draw(SIZES), draw(WINDOWS)
    inner = st.integers(0, lazy_bytes)
    cuts = draw(st.lists(inner, min_size=len(windows), max_size=len(windows)).map(sorted))
    return PartitionPlan((*cuts[1:], lazy_bytes), windows, lazy_bytes)


@given(any_plans(), RATES, GATES, CONTENTIONS, st.data())
def test_no_plan_under_any_gate_loses_less_than_the_bound(
    plan: PartitionPlan, rate: float, gate: Gate, contention: Contention, data: st.DataObject
) -> None:
    count = len(plan.windows)
    jittered = st.lists(
        st.builds(Window, st.sampled_from(["forward", "backward"]), SECONDS, SECONDS),
        min_size=count,
        max_size=count,
    )
    windows = data.draw(st.one_of(st.just(plan.windows), jittered.map(tuple)))
    found = predict(plan, windows, rate, gate, contention)
    slack = 1e-9 * (1.0 + total_s(windows) + plan.lazy_bytes / rate)
    assert found.stall_s >= 0.0
    assert found.slowdown_s >= 0.0
    assert found.lost_s >= least_lost_s(plan.lazy_bytes, windows, rate) - slack
    assert all(size >= 0 for size in found.window_bytes)
    assert sum(found.window_bytes) + found.stalled_bytes == plan.lazy_bytes
    copied_s = math.fsum(found.copied_s.values())
    assert copied_s + found.stall_s == pytest.approx(plan.lazy_bytes / rate, abs=slack)
    kappa = {phase: contention.kappa(phase) for phase in PHASES}
    slower_s = math.fsum(kappa[phase] * found.copied_s[phase] for phase in PHASES)
    assert found.slowdown_s == pytest.approx(slower_s, abs=slack)
    assert found.copy_end_s <= total_s(windows) + found.lost_s + slack
    # A free copy loses nothing to waiting.
    whole = Whole().divide(plan.lazy_bytes, plan.windows, rate)
    assert predict(whole, windows, rate, FREE, contention).stall_s <= found.stall_s + slack


@given(SIZES, WINDOWS, RATES)
def test_a_free_copy_attains_the_bound_where_it_disturbs_nothing(
    lazy_bytes: int, windows: tuple[Window, ...], rate: float
) -> None:
    found = predict(Whole().divide(lazy_bytes, windows, rate), windows, rate)
    bound = least_lost_s(lazy_bytes, windows, rate)
    assert found.lost_s == pytest.approx(bound, rel=1e-9, abs=1e-9 * (1 + lazy_bytes / rate))


@given(any_plans(), RATES, st.sampled_from([0.0, 0.1, 0.5]))
def test_a_deadline_makes_any_plan_attain_the_bound_when_the_step_is_as_planned(
    plan: PartitionPlan, rate: float, margin: float
) -> None:
    found = predict(plan, plan.windows, rate, Gate("windows", margin))
    bound = least_lost_s(plan.lazy_bytes, plan.windows, rate)
    slack = 1e-9 * (1 + plan.lazy_bytes / rate + total_s(plan.windows))
    assert found.lost_s == pytest.approx(bound, abs=slack)


@given(any_plans(), RATES, st.sampled_from([Gate("windows"), Gate("windows", 0.2)]))
def test_a_gate_without_a_deadline_never_lets_the_copy_past_its_bounds(
    plan: PartitionPlan, rate: float, gate: Gate
) -> None:
    found = predict(plan, plan.windows, rate, gate)
    upto = list(itertools.accumulate(found.window_bytes))
    free = predict(plan, plan.windows, rate)
    most = list(itertools.accumulate(free.window_bytes))
    assert all(a <= b + 1 for a, b in zip(upto, most, strict=True)), "nor faster than a free one"
    if gate.deadline_margin is None:
        assert all(a <= b + 1 for a, b in zip(upto, plan.bounds, strict=bool(plan.windows)))


@given(SIZES, WINDOWS, RATES, CONTENTIONS)
def test_the_adaptive_plan_is_never_modelled_to_be_worse_than_a_free_copy(
    lazy_bytes: int, windows: tuple[Window, ...], rate: float, contention: Contention
) -> None:
    decision = Adaptive().decide(lazy_bytes, windows, rate, contention)
    chosen = predict(decision.plan, windows, rate, decision.gate, contention)
    whole = Whole().divide(lazy_bytes, windows, rate)
    freely = predict(whole, windows, rate, FREE, contention)
    if decision.plan.free_running:
        assert chosen == freely
    else:
        assert chosen.lost_s < freely.lost_s - 0.0099 * total_s(windows)
        assert decision.gain_s == freely.lost_s - chosen.lost_s
    assert decision.chunk_bytes == chunk_bytes(windows, rate)


# --- batching ---------------------------------------------------------------

TRACES = st.lists(
    st.builds(
        Arrival,
        st.one_of(st.integers(0, 20).map(float), st.floats(0, 100)),
        st.integers(0, 1000),
    ),
    max_size=9,
)
COSTS = st.builds(Linear, st.floats(0, 20), st.floats(0, 0.1))
POLICIES = st.one_of(
    st.builds(Ready, st.one_of(st.just(math.inf), st.integers(1, 2000))),
    st.builds(FixedBytes, st.integers(1, 3000)),
    st.builds(
        square_root, st.floats(1, 5000), st.floats(1, 5000), st.floats(0, 9), st.floats(0, 9)
    ),
)


@given(TRACES, POLICIES, COSTS)
def test_every_policy_writes_every_chunk_once_in_order_when_it_is_ready(
    trace: list[Arrival], policy: Policy, cost: Linear
) -> None:
    writes = simulate(trace, policy, cost)
    assert sum(w.chunks for w in writes) == len(trace)
    assert sum(w.nbytes for w in writes) == sum(a.nbytes for a in trace)
    assert all(w.chunks > 0 for w in writes)
    assert all(a.stop_s <= b.start_s for a, b in itertools.pairwise(writes))
    at = 0
    for w in writes:
        part = trace[at : at + w.chunks]
        assert w.nbytes == sum(a.nbytes for a in part)
        assert all(a.ready_s <= w.start_s for a in part)
        at += w.chunks
    end_s = writes[-1].stop_s if writes else 0.0
    assert oracle(trace, cost) <= end_s * (1 + 1e-12)


@given(TRACES, COSTS)
def test_the_oracle_is_the_best_of_all_ways_to_cut_the_trace(
    trace: list[Arrival], cost: Linear
) -> None:
    best = math.inf if trace else 0.0
    for cuts in itertools.product([False, True], repeat=max(0, len(trace) - 1)):
        now_s, batch, ready_s = 0.0, 0, 0.0
        for arrival, cut in zip(trace, (*cuts, True), strict=bool(trace)):
            batch += arrival.nbytes
            ready_s = max(ready_s, arrival.ready_s)
            if cut:
                now_s, batch = max(now_s, ready_s) + cost(batch), 0
        if trace:
            best = min(best, now_s)
    assert oracle(trace, cost) == pytest.approx(best)


@given(TRACES, COSTS, st.one_of(st.just(math.inf), st.integers(1, 2000)))
def test_writing_what_is_ready_is_late_by_no_more_than_its_bound(
    trace: list[Arrival], cost: Linear, budget_bytes: float
) -> None:
    writes = simulate(trace, Ready(budget_bytes), cost)
    if not writes:
        return
    longest_s = max(cost(w.nbytes) for w in writes)
    cut_short = sum(w.left > 0 for w in writes)
    assert cut_short == 0 or budget_bytes < math.inf
    bound = oracle(trace, cost) + longest_s + cut_short * cost.alpha_s
    assert writes[-1].stop_s <= bound * (1 + 1e-12)
