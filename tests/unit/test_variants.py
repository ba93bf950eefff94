"""CheckFreq's rule: both variants are tried, then the cheaper one that fits is taken."""

from __future__ import annotations

import pytest

from asymcheck.errors import OptionError
from asymcheck.planning.cadence import EverySteps
from asymcheck.planning.policy import Admission
from asymcheck.planning.strategies import Strategy, strategies
from asymcheck.planning.tiers import Placement
from asymcheck.planning.variants import TRIES, Trials, Variant


def tried(costs: dict[Variant, list[float]]) -> tuple[Trials, list[Variant]]:
    """Capture until both are known, each time at the next of the costs."""
    trials, order, left = Trials(), [], {name: iter(c) for name, c in costs.items()}
    while not trials.is_over:
        order.append(trials.choose(fits=True))
        trials = trials.note(order[-1], next(left[order[-1]]))
    return trials, order


@pytest.mark.parametrize(("copy_s", "lazy_s"), [(0.1, 0.2), (0.2, 0.1)])
def test_both_are_tried_in_turn_and_then_the_cheaper_one_is_taken(
    copy_s: float, lazy_s: float
) -> None:
    trials, order = tried({"device-copy": [copy_s] * TRIES, "lazy": [lazy_s] * TRIES})
    assert order == ["device-copy", "lazy"] * TRIES
    cheaper = "device-copy" if copy_s < lazy_s else "lazy"
    assert trials.choose(fits=True) == cheaper
    assert trials.choose(fits=False) == "lazy"


def test_one_slow_try_does_not_decide() -> None:
    trials, _ = tried({"device-copy": [9.0, 0.1, 0.1], "lazy": [0.2, 0.2, 0.2]})
    assert trials.choose(fits=True) == "device-copy"


def test_where_both_cost_the_same_the_one_without_memory_is_taken() -> None:
    trials, _ = tried({"device-copy": [0.0] * TRIES, "lazy": [0.0] * TRIES})
    assert trials.choose(fits=True) == "lazy"


def test_what_is_known_stays_as_it_is() -> None:
    trials, _ = tried({"device-copy": [0.1] * TRIES, "lazy": [0.2] * TRIES})
    assert trials.note("device-copy", 99.0) == trials
    assert trials.note("lazy", 0.0) == trials


def test_as_long_as_a_clone_does_not_fit_it_is_not_tried() -> None:
    trials = Trials()
    for _ in range(5):
        assert trials.choose(fits=False) == "lazy"
        trials = trials.note("lazy", 0.5)
    assert not trials.is_over
    assert trials.choose(fits=True) == "device-copy"


def test_a_placement_in_memory_needs_room_for_two() -> None:
    with pytest.raises(OptionError, match="placement: expected admission"):
        Strategy(placement=Placement(durable=EverySteps(10)))
    two = Admission(max_in_flight=2)
    assert Strategy(admission=two, placement=Placement(durable=EverySteps(10))).placement.durable
    assert Strategy().placement == Placement(durable=None)


def test_the_rows_of_the_two_systems_are_what_their_papers_say() -> None:
    checkfreq, gemini = strategies["checkfreq"], strategies["gemini"]
    assert checkfreq.capture == "profiled"
    assert (checkfreq.admission.max_in_flight, checkfreq.admission.when_full) == (1, "wait")
    assert gemini.capture == "lazy"
    assert gemini.admission.max_in_flight == 2
    durable = gemini.placement.durable
    assert durable is not None
    assert not durable.due(step=1, last_step=0, since_last_s=3 * 3600 - 1, under_way=0)
    assert durable.due(step=1, last_step=0, since_last_s=3 * 3600, under_way=0)
