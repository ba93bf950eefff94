"""How many ready chunks go into one write."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from asymcheck.errors import OptionError
from asymcheck.planning.batching import (
    Arrival,
    FixedBytes,
    Ready,
    Write,
    oracle,
    simulate,
    square_root,
)
from asymcheck.planning.cost import Linear

LINE = Linear(1.0, 0.1)


def test_ready_takes_all_that_waits_up_to_its_budget() -> None:
    assert Ready().take([5, 5, 5], more_coming=True) == 3
    assert Ready(12).take([5, 5, 5], more_coming=True) == 2
    assert Ready(10).take([5, 5, 5], more_coming=False) == 2
    assert Ready(4).take([5, 5, 5], more_coming=True) == 1, "a chunk may be larger"
    assert Ready().take([], more_coming=True) == 0


def test_fixed_bytes_waits_until_a_batch_is_full_and_keeps_the_tail() -> None:
    assert FixedBytes(10).take([5, 4], more_coming=True) == 0
    assert FixedBytes(10).take([5, 4, 3, 9], more_coming=True) == 3
    assert FixedBytes(10).take([5, 4], more_coming=False) == 2
    assert FixedBytes(10).take([], more_coming=False) == 0


def test_sizes_that_are_none_are_refused() -> None:
    for wrong in (0, -1, math.nan):
        with pytest.raises(OptionError, match="budget_bytes"):
            Ready(wrong)
        with pytest.raises(OptionError, match="batch bytes"):
            FixedBytes(wrong)


def test_the_square_root_rule_gives_the_batch_that_was_published() -> None:
    policy = square_root(409.6e6, 0.8e6, 14.17e-3, 1.0859e-3)
    assert policy.nbytes == pytest.approx(65.4e6, rel=0.001)

    def flush_s(batch: float) -> float:
        return 409.6e6 / batch * 14.17e-3 + batch / 0.8e6 * 1.0859e-3

    assert flush_s(policy.nbytes) < min(flush_s(policy.nbytes * f) for f in (0.9, 1.1))


def test_the_square_root_rule_stays_between_a_chunk_and_everything() -> None:
    assert square_root(100.0, 10.0, 0.0, 1.0).nbytes == 10.0
    assert square_root(100.0, 10.0, 1.0, 0.0).nbytes == 100.0
    assert square_root(100.0, 10.0, 1e9, 1e-9).nbytes == 100.0
    for wrong in ((0, 1, 1, 1), (1, math.nan, 1, 1), (1, 1, -1, 1), (1, 1, 1, math.inf)):
        with pytest.raises(OptionError, match="expected a"):
            square_root(*wrong)


def test_a_simulation_writes_in_order_and_says_what_it_left() -> None:
    trace = [Arrival(0.0, 10), Arrival(0.5, 20), Arrival(1.0, 10), Arrival(9.0, 10)]
    assert simulate(trace, Ready(), LINE) == (
        Write(0.0, 2.0, 1, 10, 0),
        Write(2.0, 6.0, 2, 30, 0),
        Write(9.0, 11.0, 1, 10, 0),
    )
    assert [w.left for w in simulate(trace, Ready(20), LINE)] == [0, 1, 0, 0]
    late = simulate(trace, FixedBytes(100), LINE)
    assert late == (Write(9.0, 15.0, 4, 50, 0),)


def test_a_chunk_waits_for_those_before_it() -> None:
    trace = [Arrival(3.0, 10), Arrival(0.0, 10)]
    assert simulate(trace, Ready(), LINE) == (Write(3.0, 6.0, 2, 20, 0),)
    assert oracle(trace, LINE) == 6.0


def test_the_oracle_waits_where_waiting_pays() -> None:
    # Writing the first chunk at once ends at 2 and the second at 4; together they end at 3.5.
    trace = [Arrival(0.0, 10), Arrival(0.5, 10)]
    assert simulate(trace, Ready(), LINE)[-1].stop_s == 4.0
    assert oracle(trace, LINE) == 3.5
    assert oracle([], LINE) == 0.0
    assert simulate([], Ready(), LINE) == ()


def test_a_policy_that_waits_for_nothing_or_takes_too_much_is_refused() -> None:
    class Stuck:
        def take(self, ready_bytes: Sequence[int], *, more_coming: bool) -> int:
            return 0

    class Greedy:
        def take(self, ready_bytes: Sequence[int], *, more_coming: bool) -> int:
            return len(ready_bytes) + 1

    for policy in (Stuck(), Greedy()):
        with pytest.raises(OptionError, match="expected to take"):
            simulate([Arrival(0.0, 10)], policy, LINE)
