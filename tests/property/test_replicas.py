"""Gemini's arithmetic: placement of replicas, what survives, chunks in idle spans."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from asymcheck.errors import OptionError
from asymcheck.planning.replicas import (
    Link,
    place_replicas,
    recovery_bound,
    recovery_probability,
    schedule_chunks,
)


@st.composite
def clusters(draw: st.DrawFn, most: int = 60) -> tuple[int, int]:
    machines = draw(st.integers(1, most))
    return machines, draw(st.integers(1, machines))


def survives(holders: tuple[tuple[int, ...], ...], lost: set[int]) -> bool:
    return all(not lost.issuperset(held) for held in holders)


# --- placement ----------------------------------------------------------------


@given(clusters())
def test_each_state_has_so_many_holders_and_each_machine_holds_as_many(
    cluster: tuple[int, int],
) -> None:
    machines, replicas = cluster
    holders = place_replicas(machines, replicas)
    assert len(holders) == machines
    for machine, held in enumerate(holders):
        assert held[0] == machine
        assert len(set(held)) == replicas
    loads = [sum(machine in held for held in holders) for machine in range(machines)]
    assert set(loads) == {replicas}


@given(clusters())
def test_where_groups_come_out_even_their_members_hold_the_same(cluster: tuple[int, int]) -> None:
    machines, replicas = cluster
    assume(machines % replicas == 0)
    groups = {frozenset(held) for held in place_replicas(machines, replicas)}
    assert len(groups) == machines // replicas


def test_what_does_not_come_out_even_is_a_ring_behind_the_groups() -> None:
    holders = place_replicas(8, 3)
    assert holders[:3] == ((0, 1, 2), (1, 0, 2), (2, 0, 1))
    assert holders[3:] == ((3, 4, 5), (4, 5, 6), (5, 6, 7), (6, 7, 3), (7, 3, 4))
    assert place_replicas(3, 2) == ((0, 1), (1, 2), (2, 0))


@pytest.mark.parametrize(("machines", "replicas"), [(0, 0), (4, 0), (4, 5), (0, 1)])
def test_more_replicas_than_machines_or_none_are_refused(machines: int, replicas: int) -> None:
    with pytest.raises(OptionError, match="replicas: expected from 1"):
        place_replicas(machines, replicas)
    with pytest.raises(OptionError, match="lost: expected from 0 to 4"):
        recovery_probability(4, 2, 5)


# --- what survives ------------------------------------------------------------


@given(clusters(most=11), st.data())
def test_the_probability_is_that_of_counting_every_set(
    cluster: tuple[int, int], data: st.DataObject
) -> None:
    machines, replicas = cluster
    lost = data.draw(st.integers(0, machines))
    holders = place_replicas(machines, replicas)
    sets = [set(chosen) for chosen in itertools.combinations(range(machines), lost)]
    counted = sum(survives(holders, chosen) for chosen in sets) / len(sets)
    assert recovery_probability(machines, replicas, lost) == pytest.approx(counted, abs=1e-12)


@given(clusters(), st.data())
def test_the_closed_form_is_exact_for_few_losses_and_else_a_bound(
    cluster: tuple[int, int], data: st.DataObject
) -> None:
    machines, replicas = cluster
    assume(machines % replicas == 0)
    lost = data.draw(st.integers(0, machines))
    exact = recovery_probability(machines, replicas, lost)
    bound = recovery_bound(machines, replicas, lost)
    assert bound <= exact + 1e-12
    if lost < 2 * replicas:
        assert bound == pytest.approx(exact, abs=1e-12)
    if lost < replicas:
        assert exact == bound == 1.0


@given(clusters())
def test_the_ring_is_as_near_to_the_best_as_the_paper_says(cluster: tuple[int, int]) -> None:
    machines, replicas = cluster
    assume(replicas >= 2)
    # No placement does with fewer different sets of holders than this.
    fewest = math.ceil(machines / replicas)
    best = 1 - fewest / math.comb(machines, replicas)
    gap = best - recovery_probability(machines, replicas, replicas)
    most = (2 * replicas - 3) / math.comb(machines, replicas) if machines % replicas else 0.0
    assert -1e-12 <= gap <= most + 1e-12


@pytest.mark.parametrize(("machines", "expected"), [(16, 0.933), (128, 0.992), (1024, 0.999)])
def test_the_figures_of_the_paper_come_out(machines: int, expected: float) -> None:
    assert recovery_probability(machines, 2, 2) == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize(("machines", "replicas", "lost"), [(16, 2, 2), (17, 2, 3), (20, 3, 5)])
def test_drawing_lost_machines_at_random_finds_the_same(
    machines: int, replicas: int, lost: int
) -> None:
    holders, draws, dice = place_replicas(machines, replicas), 20_000, random.Random(5)
    alive = sum(survives(holders, set(dice.sample(range(machines), lost))) for _ in range(draws))
    # Five standard deviations of so many draws.
    assert recovery_probability(machines, replicas, lost) == pytest.approx(
        alive / draws, abs=5 * math.sqrt(0.25 / draws)
    )


# --- chunks in idle spans -----------------------------------------------------

SPANS = st.lists(st.floats(0, 2), min_size=1, max_size=8)
LINKS = st.builds(Link, st.floats(0, 0.1), st.floats(1e3, 1e9))


@given(st.integers(0, 10**8), SPANS, LINKS, st.floats(0.05, 1), st.integers(10**5, 10**8))
def test_chunks_are_the_whole_and_no_span_but_the_last_is_overfilled(
    nbytes: int, idle_s: list[float], link: Link, fill: float, buffer_bytes: int
) -> None:
    found = schedule_chunks(nbytes, idle_s, link, fill=fill, buffer_bytes=buffer_bytes)
    assert len(found.chunks) == len(idle_s)
    assert sum(map(sum, found.chunks)) == nbytes
    assert all(0 < size <= buffer_bytes for span in found.chunks for size in span)
    used_s = [sum(map(link.seconds, span)) for span in found.chunks]
    for used, idle in zip(used_s[:-1], idle_s[:-1], strict=True):
        assert used <= fill * idle * (1 + 1e-9) + 1e-12
    assert found.spill_s == pytest.approx(max(0.0, used_s[-1] - fill * idle_s[-1]))


@given(st.integers(0, 10**8), SPANS, st.floats(1e6, 1e9), st.floats(0.05, 1))
def test_on_a_link_without_latency_the_spill_is_what_the_spans_do_not_take(
    nbytes: int, idle_s: list[float], bytes_per_s: float, fill: float
) -> None:
    link = Link(0.0, bytes_per_s)
    found = schedule_chunks(nbytes, idle_s, link, fill=fill, buffer_bytes=10**7)
    fluid_s = max(0.0, nbytes / bytes_per_s - fill * sum(idle_s))
    # A span takes whole bytes.
    assert found.spill_s == pytest.approx(fluid_s, abs=(len(idle_s) + 1) / bytes_per_s + 1e-9)


def test_a_transfer_goes_into_the_first_spans_that_take_it() -> None:
    link = Link(0.1, 100.0)  # a chunk of 90 bytes takes a second
    found = schedule_chunks(200, [2.0, 0.1, 2.0, 1.0], link, fill=1.0, buffer_bytes=90)
    assert found.chunks == ((90, 90), (), (20,), ())
    assert found.spill_s == 0.0
    late = schedule_chunks(200, [0.0, 1.0], link, fill=0.5, buffer_bytes=90)
    assert late.chunks == ((), (90, 90, 20))
    assert late.spill_s == pytest.approx(2.3 - 0.5)


@pytest.mark.parametrize(
    "wrong",
    [
        {"fill": 0.0},
        {"fill": 1.5},
        {"buffer_bytes": 0},
        {"nbytes": -1},
        {"idle_s": []},
        {"idle_s": [1.0, -0.5]},
    ],
)
def test_a_schedule_without_meaning_is_refused(wrong: dict[str, object]) -> None:
    given_ = {"nbytes": 1, "idle_s": [1.0], "fill": 1.0, "buffer_bytes": 10, **wrong}
    with pytest.raises(OptionError, match="chunks: expected"):
        schedule_chunks(given_.pop("nbytes"), given_.pop("idle_s"), Link(0.0, 1.0), **given_)
    with pytest.raises(OptionError, match="link: expected"):
        Link(-1.0, 1.0)
