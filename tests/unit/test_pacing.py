"""The copying thread gives way to other traffic, where the plan leaves time for that."""

from __future__ import annotations

import threading
from time import perf_counter

import pytest
import torch
from torch import nn

from asymcheck.device.pacing import Pace, Pacing, _Link
from asymcheck.planning.adaptive import Decision
from asymcheck.planning.contention import Contention
from asymcheck.planning.plan import FREE, Gate, PartitionPlan, Whole
from asymcheck.planning.windows import Window

NEVER_S = 1e5
BOUND_S = 20.0


class Standing:
    """A profiler whose step stands still in one window."""

    position = 0

    def instant(self):
        return None

    def add_copy(self, start, stop, nbytes):
        raise AssertionError("nothing was timed")


def pace_for(link, *, window_s, bounds=(10, 20), deadline_margin=None, opened_s=0.0):
    windows = (Window("forward", window_s), Window("backward", NEVER_S))
    plan = PartitionPlan(bounds, windows, bounds[-1])
    gate = FREE if plan.free_running else Gate("windows", deadline_margin)
    decision = Decision(plan, gate, 10, 0.0, "")
    opened = [(perf_counter() - opened_s, "forward")]
    return Pace(decision, Contention(), 1.0, Standing(), link, opened)


def in_background(action):
    done = threading.Event()
    thread = threading.Thread(target=lambda: (action(), done.set()), daemon=True)
    thread.start()
    return done


def test_a_held_copy_waits_until_the_other_traffic_is_over():
    link = _Link(in_flight=1)
    pace = pace_for(link, window_s=NEVER_S)
    done = in_background(lambda: pace.wait(10))
    assert not done.wait(0.05)
    with link.changed:
        link.in_flight = 0
        link.changed.notify_all()
    assert done.wait(BOUND_S)
    assert [part.nbytes for part in pace.parts] == [10]


def test_it_does_not_wait_when_what_is_due_needs_all_the_time_that_is_left():
    # 10 bytes at 1 byte/s are due in a window that has 9 s left
    pace = pace_for(_Link(in_flight=1), window_s=100.0, opened_s=91.0)
    assert in_background(lambda: pace.wait(10)).wait(BOUND_S)


def test_a_free_running_copy_does_not_give_way():
    pace = pace_for(_Link(in_flight=1), window_s=NEVER_S, bounds=(20, 20))
    assert in_background(lambda: pace.wait(10)).wait(BOUND_S)


@pytest.mark.parametrize("how", ["the deadline", "the fence"])
def test_traffic_that_never_ends_holds_nothing_for_ever(how):
    link = _Link(in_flight=1)
    if how == "the deadline":
        # What is due in this window, 10 bytes, has 10**5 s; all 10**6 bytes need all there is.
        pace = pace_for(link, window_s=1e5, bounds=(10, 10**6), deadline_margin=0.1)
        assert in_background(lambda: pace.wait(10)).wait(BOUND_S)
    else:
        pace = pace_for(link, window_s=NEVER_S)
        done = in_background(lambda: pace.wait(10))
        assert not done.wait(0.05)
        pace.let_go()
        assert done.wait(BOUND_S)


def test_traffic_is_part_of_the_windows_that_plans_are_made_from():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(2)))
    pacing = Pacing([model], Whole())
    for _ in range(3):
        pacing.begin_step(saves=False)
        with pacing.collective():
            model(torch.ones(1, 4)).sum().backward()
        pacing.end_step()
    pacing.begin_step(saves=False)
    pacing.plan(0)
    assert pacing.decision is not None
    windows = pacing._profiler.windows()
    pacing.close()
    assert windows
    assert sum(w.collective_s for w in windows) > 0.5 * sum(w.duration_s for w in windows) > 0.0
