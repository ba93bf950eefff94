"""κ from pairs of windows with and without a copy."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asymcheck.planning.contention import PHASES, Contention, Kappa, _t_95

# Two-sided 95 % points of Student's t, from any table.
STUDENT = {1: 12.706, 2: 4.303, 5: 2.571, 10: 2.228, 11: 2.201, 15: 2.131, 30: 2.042, 120: 1.980}


@pytest.mark.parametrize(("degrees", "expected"), STUDENT.items())
def test_the_table_and_what_follows_it_are_students_t(degrees: int, expected: float) -> None:
    assert _t_95(degrees) == pytest.approx(expected, abs=0.003)


def test_nothing_is_known_before_two_pairs() -> None:
    found = Contention()
    for phase in PHASES:
        assert found.interval(phase) is None
        assert found.kappa(phase) == 0.0
    one = found.add("forward", with_s=1.1, without_s=1.0, copied_s=0.5)
    assert one.interval("forward") is None
    two = one.add("forward", with_s=1.1, without_s=1.0, copied_s=0.5)
    interval = two.interval("forward")
    assert interval is not None
    assert interval.mid == pytest.approx(0.2)
    assert two.interval("backward") is None
    assert found == Contention(), "a value does not change"


def test_a_window_in_which_little_was_copied_says_little() -> None:
    found = Contention()
    for lost_s, copied_s in [(0.2, 1.0), (0.2, 1.0), (0.1, 0.001)]:
        found = found.add("backward", with_s=lost_s, without_s=0.0, copied_s=copied_s)
    interval = found.interval("backward")
    assert interval is not None
    assert interval.mid == pytest.approx(0.2, abs=0.001)


@pytest.mark.parametrize(
    "sample",
    [
        (1.0, 1.0, 0.0),
        (1.0, 1.0, -1.0),
        (math.nan, 1.0, 1.0),
        (1.0, math.inf, 1.0),
        (1.0, 1.0, math.nan),
        (1.0, 1.0, math.inf),
        (1.0, 1.0, 1e-200),
    ],
)
def test_what_is_no_pair_is_left_out(sample: tuple[float, float, float]) -> None:
    with_s, without_s, copied_s = sample
    found = Contention().add("forward", with_s=with_s, without_s=without_s, copied_s=copied_s)
    assert found == Contention()


def test_kappa_counts_only_where_its_interval_lies_above_zero() -> None:
    found = Contention()
    for lost_s in (0.3, -0.1, 0.2, -0.2):
        found = found.add("forward", with_s=1 + lost_s, without_s=1.0, copied_s=1.0)
    interval = found.interval("forward")
    assert interval is not None
    assert interval.low < 0.0 < interval.mid
    assert found.kappa("forward") == 0.0


def test_kappa_is_never_more_than_the_copy_itself() -> None:
    found = Contention()
    for copied_s in (1.0, 2.0):
        found = found.add("collective", with_s=3 * copied_s, without_s=0.0, copied_s=copied_s)
    assert found.kappa("collective") == 1.0


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    chance = random.Random(1)
    held = 0
    for _ in range(400):
        kappa = Kappa()
        for _ in range(8):
            copied_s = chance.uniform(0.5, 2.0)
            kappa = kappa.add(0.3 * copied_s + chance.gauss(0.0, 0.1), copied_s)
        interval = kappa.interval()
        assert interval is not None
        held += interval.low <= 0.3 <= interval.high
    assert 0.91 <= held / 400 <= 0.99


PAIRS = st.lists(
    st.tuples(st.floats(-10, 10), st.floats(1e-3, 10)),
    min_size=2,
    max_size=30,
)


@given(PAIRS)
def test_the_running_sums_are_those_of_the_textbook(pairs: list[tuple[float, float]]) -> None:
    kappa = Kappa()
    for lost_s, copied_s in pairs:
        kappa = kappa.add(lost_s, copied_s)
    squares = math.fsum(c * c for _, c in pairs)
    slope = math.fsum(c * lost for lost, c in pairs) / squares
    residual = math.fsum((lost - slope * c) ** 2 for lost, c in pairs)
    assert kappa.count == len(pairs)
    assert kappa.weight == pytest.approx(squares)
    assert kappa.slope == pytest.approx(slope, rel=1e-9, abs=1e-9)
    assert kappa.residual == pytest.approx(residual, rel=1e-6, abs=1e-9)
    interval = kappa.interval()
    assert interval is not None
    half = _t_95(len(pairs) - 1) * math.sqrt(residual / (len(pairs) - 1) / squares)
    assert interval.high - interval.mid == pytest.approx(half, rel=1e-3, abs=1e-4)
    assert interval.low <= interval.mid <= interval.high
