"""Pooling of measured windows, over any steps."""

from __future__ import annotations

from itertools import accumulate
from statistics import median

from hypothesis import given
from hypothesis import strategies as st

from asymcheck.device.pooling import KEPT, PATIENCE, Pooling
from asymcheck.planning.contention import Contention
from asymcheck.planning.windows import total_s

seconds = st.floats(0.0, 1e3, allow_subnormal=False)
stretches = st.lists(
    st.tuples(st.floats(-10.0, 2e3), st.floats(0.0, 1e3)).map(lambda p: (p[0], p[0] + p[1])),
    max_size=4,
)
steps = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(0, 7), seconds), min_size=1, max_size=6),
        stretches,
        stretches,
    ),
    max_size=30,
)


def edges_of(spans):
    return list(accumulate(spans, initial=0.0))


def add(pooling, spans, row=None, copies=()):
    pooling.add(tuple(row or range(len(spans))), edges_of(spans), copies)


@given(steps)
def test_any_steps_give_windows_that_were_measured_and_pairs_within_them(measured):
    pooling = Pooling()
    contention = Contention()
    for windows, copies, others in measured:
        row, spans = zip(*windows, strict=True)
        pooling.add(row, edges_of(spans), copies, others)
        found = pooling.windows()
        rows = [tuple(code for code, _ in w) for w, _, _ in measured]
        assert [w.phase for w in found] in [
            ["forward" if code % 2 == 0 else "backward" for code in row] for row in rows
        ]
        for pair in pooling.take_pairs():
            assert pair.copied_s > 0.0
            assert pair.with_s >= 0.0
            assert pair.without_s >= 0.0
            contention = contention.add(**pair._asdict())
    assert (pooling.windows() == ()) == (not measured)


@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=8), st.integers(1, 40))
def test_equal_steps_pool_to_themselves(spans, count):
    pooling = Pooling()
    for _ in range(count):
        add(pooling, spans)
    assert [w.duration_s for w in pooling.windows()] == [
        b - a for a, b in zip(edges_of(spans)[:-1], edges_of(spans)[1:], strict=True)
    ]
    assert pooling.generation == 1


@given(st.lists(st.floats(0.95, 1.05), min_size=KEPT, max_size=30))
def test_durations_are_the_medians_of_the_latest_steps(lengths):
    pooling = Pooling()
    for length in lengths:
        add(pooling, [length])
    assert total_s(pooling.windows()) == median(lengths[-KEPT:])


@given(st.integers(1, PATIENCE - 1), st.sampled_from([0.5, 2.0]))
def test_a_few_steps_of_another_length_count_for_nothing_and_more_become_the_usual(few, factor):
    pooling = Pooling()
    for _ in range(KEPT):
        add(pooling, [1.0, 2.0])
    for _ in range(few):
        add(pooling, [factor, 2.0 * factor])
    assert [w.duration_s for w in pooling.windows()] == [1.0, 2.0]
    add(pooling, [1.0, 2.0])
    for _ in range(PATIENCE):
        add(pooling, [factor, 2.0 * factor])
    assert [w.duration_s for w in pooling.windows()] == [factor, 2.0 * factor]
    assert pooling.generation == 2


@given(st.integers(1, 30), st.integers(1, PATIENCE))
def test_the_most_common_row_stays_until_another_is_more_common(usual, others):
    pooling = Pooling()
    for _ in range(usual):
        add(pooling, [1.0, 1.0], row=(0, 2))
    lead = min(usual, PATIENCE)
    for _ in range(others):
        add(pooling, [5.0], row=(0,))
    assert len(pooling.windows()) == (2 if others <= lead else 1)
    for _ in range(2 * PATIENCE):
        add(pooling, [5.0], row=(0,))
    assert [w.duration_s for w in pooling.windows()] == [5.0]


def test_rows_that_take_turns_do_not_make_each_other_forgotten():
    pooling = Pooling()
    for turn in range(40):
        add(pooling, [1.0, 1.0] if turn % 2 else [1.0, 1.0, 1.0])
    assert pooling.generation == 1
    assert len(pooling.windows()) == 3


def test_a_slower_step_with_a_copy_is_no_drift_of_steps_without():
    pooling = Pooling()
    for _ in range(3 * KEPT):
        for _ in range(3):
            add(pooling, [1.0, 1.0])
        add(pooling, [1.0, 2.0], copies=[(1.5, 2.5)])
    assert [w.duration_s for w in pooling.windows()] == [1.0, 1.0]
    assert pooling.generation == 1
    pairs = pooling.take_pairs()
    assert len(pairs) == 3 * KEPT
    assert set(pairs) == {("backward", 2.0, 1.0, 1.0)}


def test_every_measurement_without_a_copy_is_in_one_pair_at_most():
    pooling = Pooling()
    for _ in range(3):
        add(pooling, [1.0])
    for _ in range(5):
        add(pooling, [1.0], copies=[(0.0, 0.5)])
    assert len(pooling.take_pairs()) == 1
    assert pooling.take_pairs() == []


@given(st.floats(0.05, 0.45), st.floats(0.6, 1.0))
def test_traffic_that_a_copy_holds_up_is_known_by_what_it_takes_alone(alone, contended):
    pooling = Pooling()
    for _ in range(KEPT):
        pooling.add((1,), [0.0, 1.0], (), [(0.0, alone)])
        pooling.add((1,), [0.0, 1.0], [(0.0, 1.0)], [(0.0, contended)])
    assert [w.collective_s for w in pooling.windows()] == [alone]
    assert {pair.phase for pair in pooling.take_pairs()} == {"backward"}
