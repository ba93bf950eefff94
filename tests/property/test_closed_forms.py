"""Closed forms of stall, latency and interval equal a training that is played event by event."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from asymcheck.errors import OptionError
from asymcheck.planning.closed_forms import (
    Mechanism,
    Steady,
    Work,
    average_state,
    how_long,
    least_interval_steps,
    steady_state,
)
from asymcheck_lab.errors import UsageError
from asymcheck_lab.timeline import Timeline, average

SETTLED = 120
COUNTED = 120  # saves of slots by turns: a multiple of each number of slots

works = st.builds(
    lambda window, update, **rest: Work(step_s=window + update, window_s=window, **rest),
    st.integers(0, 12),
    st.integers(1, 4),
    copy_s=st.integers(0, 24),
    write_s=st.integers(0, 60),
    encode_s=st.sampled_from([0, 0, 7, 31]),
    device_s=st.integers(0, 3),
    commit_s=st.sampled_from([0, 0, 1, 5]),
    release_s=st.sampled_from([0, 0, 2, 9]),
)
mechanisms = st.one_of(
    st.builds(
        Mechanism,
        capture=st.sampled_from(["blocking", "lazy", "device"]),
        persist=st.sampled_from(["behind", "behind", "before"]),
        max_in_flight=st.integers(1, 4),
        pieces=st.integers(1, 6),
    ),
    st.builds(
        Mechanism,
        sealed=st.just("fence"),
        max_in_flight=st.integers(1, 4),
        pieces=st.integers(1, 6),
    ),
    st.builds(
        Mechanism,
        max_in_flight=st.sampled_from([1, 2, 4, 50]),
        pieces=st.integers(1, 12),
        ring_pieces=st.integers(3, 12),
    ),
)
intervals = st.integers(1, 12)


def played(works: Work | list[Work], how: Mechanism, k: int, order: str = "oldest") -> Steady:
    return average(Timeline(works, how, k, order).run(SETTLED + COUNTED + 1)[SETTLED:])


def is_settled(work: Work, how: Mechanism, k: int) -> bool:
    """Whether what bounds the period does so clearly, so that queues fill soon."""
    found = steady_state(work, how, k)
    alone = k * work.step_s + found.boundary_s + found.fence_s
    bounds = sorted(
        [
            alone,
            work.write_s + work.commit_s + work.release_s,
            work.encode_s,
            work.copy_s,
            (how_long(work, how) + work.release_s) / how.max_in_flight,
        ]
    )
    if how.ring_pieces is not None and 1.05 * bounds[-2] > bounds[-1]:
        return False  # a ring that is as full as it may be holds back a little more
    return bounds[-1] == alone or bounds[-1] > 1.05 * alone


def as_a_ring_has_it(work: Work, how: Mechanism) -> Work:
    return work if how.ring_pieces is None else replace(work, commit_s=0, release_s=0)


@settings(max_examples=150, deadline=None)
@given(works, mechanisms, intervals)
def test_stall_latency_and_period_are_those_of_a_training_that_is_played(
    work: Work, how: Mechanism, k: int
) -> None:
    work = as_a_ring_has_it(work, how)
    assume(is_settled(work, how, k))
    assume(how.max_in_flight < 50 or how.pieces > how.ring_pieces)  # else too many to wait for
    found, seen = steady_state(work, how, k), played(work, how, k)
    assert seen.period_s == pytest.approx(found.period_s, rel=1e-9)
    assert seen.stall_s == pytest.approx(found.stall_s, rel=1e-9, abs=1e-9 * found.period_s)
    assert seen.durable_s == pytest.approx(found.durable_s, rel=1e-9)
    # A ring is waited for at the fence, and a writer behind the boundary where that waits for it.
    if how.ring_pieces is None and how.persist == "behind":
        assert seen == pytest.approx(found, rel=1e-9, abs=1e-9 * found.period_s)


@settings(max_examples=60, deadline=None)
@given(
    st.tuples(st.integers(0, 12), st.integers(1, 4)),
    st.lists(works, min_size=1, max_size=4),
    mechanisms.filter(lambda how: how.ring_pieces is None),
    intervals,
)
def test_checkpoints_that_differ_cost_on_average_what_those_of_each_kind_do(
    step: tuple[int, int], several: list[Work], how: Mechanism, k: int
) -> None:
    several = [replace(w, step_s=sum(step), window_s=step[0]) for w in several]
    how = replace(how, max_in_flight=1)
    seen = played(several * (COUNTED // len(several)), how, k)
    found = average_state(several, how, k)
    assert seen == pytest.approx(found, rel=1e-9, abs=1e-9 * found.period_s)


@settings(max_examples=40, deadline=None)
@given(works, st.integers(1, 4), st.integers(1, 6), intervals)
def test_writers_that_share_the_store_change_neither_stall_nor_mean_latency(
    work: Work, n: int, m: int, k: int
) -> None:
    how = Mechanism(max_in_flight=n, pieces=m)
    assume(is_settled(work, how, k))
    found, seen = steady_state(work, how, k), played(work, how, k, "shared")
    # In turn is by pieces here, so a checkpoint may end one turn earlier or later.
    turn_s = n * work.write_s / m
    assert seen.stall_s == pytest.approx(
        found.stall_s, abs=1e-9 * found.period_s + 4 * turn_s / COUNTED
    )
    assert seen.durable_s == pytest.approx(found.durable_s, rel=1e-6, abs=turn_s)


@settings(max_examples=80, deadline=None)
@given(works, mechanisms)
def test_the_least_interval_is_the_fewest_steps_that_wait_for_nothing(
    work: Work, how: Mechanism
) -> None:
    work = as_a_ring_has_it(work, how)
    k = least_interval_steps(work, how)
    assert steady_state(work, how, k).wait_s <= 1e-9
    if k > 1:
        assert steady_state(work, how, k - 1).wait_s > 0.0


# --- what was published -----------------------------------------------------

times = st.floats(0.0, 100.0)


@given(st.floats(0.1, 50.0), st.floats(0.0, 50.0), times, times, intervals)
def test_one_checkpoint_in_flight_stalls_as_checkfreq_says(
    fb: float, update: float, d: float, w: float, k: int
) -> None:
    work = Work(step_s=fb + update, window_s=fb, copy_s=d, write_s=w)
    found = steady_state(work, Mechanism(capture="lazy"), k)
    guard, latency, tau = max(0.0, d - fb), d + w, k * (fb + update) + max(0.0, d - fb)
    near = pytest.approx
    assert found.fence_s == near(guard)
    assert found.wait_s == near(max(0.0, latency - tau), abs=1e-9)
    assert found.durable_s - found.wait_s == near(latency)


@given(st.floats(0.1, 50.0), times, times, st.floats(0.0, 1.0), intervals)
def test_the_other_published_rows(t: float, d: float, w: float, g: float, k: int) -> None:
    work = Work(step_s=t, window_s=0.7 * t, copy_s=d, write_s=w, device_s=g)
    near = pytest.approx
    sync = steady_state(work, Mechanism(capture="blocking", persist="before"), k)
    assert (sync.stall_s, sync.durable_s) == near((d + w, d + w))
    behind = steady_state(work, Mechanism(capture="blocking"), k)
    assert behind.stall_s == near(d + max(0.0, d + w - (k * t + d)), abs=1e-9)
    device = steady_state(work, Mechanism(capture="device"), k)
    assert device.boundary_s == g
    assert device.durable_s - device.wait_s == near(g + d + w)
    excp = replace(work, encode_s=2.0, write_s=w / 4)
    assert how_long(excp, Mechanism(capture="lazy")) == near(d + 2.0 + w / 4)


@given(st.floats(0.1, 50.0), times, times, st.integers(2, 6), intervals)
def test_concurrent_checkpoints_of_one_store_take_as_long_as_pccheck_says(
    t: float, d: float, w: float, n: int, k: int
) -> None:
    work = Work(step_s=t, window_s=t, copy_s=d, write_s=w)
    how = Mechanism(max_in_flight=n, pieces=1000)
    found = steady_state(work, how, k)
    queue_s = max(0.0, w - k * t - found.fence_s)  # T_w(N) / N = W: N raises no throughput
    assert found.wait_s == pytest.approx(queue_s, abs=2e-3 * (d + w))
    if found.wait_s > 0.01 * (d + w):
        assert found.durable_s - found.wait_s == pytest.approx(n * w, rel=1e-2)
    else:
        assert how_long(work, how) == pytest.approx(max(d, w), abs=1e-3 * (d + w))


def test_a_copy_that_is_sealed_at_the_fence_is_durable_no_sooner() -> None:
    work = Work(step_s=10.0, window_s=8.0, copy_s=1.0, write_s=0.0)
    assert steady_state(work, Mechanism(), 1).durable_s == 1.0
    found = steady_state(work, Mechanism(sealed="fence"), 1)
    assert (found.stall_s, found.durable_s) == (0.0, 8.0)
    committed = replace(work, commit_s=0.5)
    assert steady_state(committed, Mechanism(sealed="fence"), 1).durable_s == 8.5
    longer = replace(work, copy_s=9.0)
    assert steady_state(longer, Mechanism(sealed="fence"), 1).durable_s == 9.0


def test_a_slot_is_waited_for_until_it_is_released() -> None:
    work = Work(step_s=10.0, window_s=8.0, copy_s=0.0, write_s=7.0, release_s=5.0)
    found = steady_state(work, Mechanism(), 1)
    assert (found.wait_s, found.durable_s, found.period_s) == (2.0, 7.0 + 2.0, 12.0)
    # A writer that is not released either, so another slot does not help.
    assert steady_state(work, Mechanism(max_in_flight=2), 1).period_s == 12.0


def test_only_one_in_flight_may_differ_from_the_one_before() -> None:
    one = Work(step_s=10.0, window_s=8.0, copy_s=0.0, write_s=7.0)
    other = replace(one, write_s=30.0)
    found = average_state([one, other], Mechanism(), 1)
    assert (found.wait_s, found.durable_s) == (10.0, (7.0 + 30.0) / 2 + 10.0)
    two = Mechanism(max_in_flight=2)
    assert average_state([one, one], two, 1) == steady_state(one, two, 1)
    for works in ([], [one, other]):
        with pytest.raises(OptionError, match=f"in flight, found {len(works)} different ones"):
            average_state(works, two, 1)


def test_a_lazy_copy_that_fits_its_window_stalls_nothing() -> None:
    work = Work(step_s=10.0, window_s=8.0, copy_s=8.0, write_s=20.0)
    for how in (Mechanism(), Mechanism(pieces=8), Mechanism(max_in_flight=2, pieces=8)):
        assert steady_state(work, how, 3).stall_s == 0.0


def test_a_ring_that_is_too_small_stalls_at_the_rate_of_the_store() -> None:
    work = Work(step_s=10.0, window_s=8.0, copy_s=8.0, write_s=20.0)

    def stall_s(ring: int) -> float:
        how = Mechanism(max_in_flight=50, pieces=1000, ring_pieces=ring)
        return steady_state(work, how, 5).stall_s

    # (S - ring) / B_st of writing go by before the last byte has room.
    assert stall_s(1000) == 0.0
    assert stall_s(500) == pytest.approx(0.5 * 20.0 - 8.0, abs=0.05)
    assert stall_s(100) == pytest.approx(0.9 * 20.0 - 8.0, abs=0.05)


def test_a_timeline_is_exact_with_fractions() -> None:
    third = Fraction(1, 3)
    work = Work(
        step_s=third * 4,
        window_s=third * 3,
        copy_s=third * 5,
        write_s=third * 10,
        encode_s=third * 0,
        commit_s=third * 0,
        release_s=third * 0,
    )
    saves = Timeline(work, Mechanism(pieces=5), 2).run(4)
    # Copied 5 of 3, so 2 at the fence; written one piece after it: 11 of 8 + 2, so 1 for the slot.
    assert [s.fence_s for s in saves] == [third * 2] * 4
    assert [s.began_s - s.boundary_s for s in saves] == [0, third, third, third]
    assert [s.durable_s - s.began_s for s in saves] == [third * 11] * 4


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: Work(step_s=1, window_s=2, copy_s=0, write_s=0),
            "a window within it, found 1 and",
        ),
        (lambda: Work(step_s=0, window_s=0, copy_s=0, write_s=0), "step_s: expected a step above"),
        (lambda: Work(step_s=1, window_s=1, copy_s=-1, write_s=0), "copy_s: .* found -1"),
        (lambda: Work(step_s=1, window_s=1, copy_s=0, write_s=float("nan")), "write_s: .* nan"),
        (lambda: Mechanism(pieces=0), "pieces: expected an integer from 1 on, found 0"),
        (lambda: Mechanism(max_in_flight=1.5), "max_in_flight: expected an integer"),
        (lambda: Mechanism(capture="blocking", sealed="fence"), "sealed: .* 'fence' with blocking"),
        (
            lambda: steady_state(
                Work(step_s=1, window_s=1, copy_s=0, write_s=0, release_s=1),
                Mechanism(ring_pieces=3),
                1,
            ),
            "release_s: expected 0 with a ring, found 0.0 and 1",
        ),
        (lambda: Mechanism(ring_pieces=2), "ring_pieces: expected at least 3"),
        (lambda: Mechanism(capture="device", ring_pieces=5), "ring_pieces: .* and device"),
    ],
)
def test_what_cannot_be_is_refused_by_name(make: object, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        make()


def test_one_save_is_no_average() -> None:
    work = Work(step_s=1, window_s=1, copy_s=0, write_s=1)
    with pytest.raises(UsageError, match="expected at least 2 saves, found 1"):
        average(Timeline(work, Mechanism(), 1).run(1))
