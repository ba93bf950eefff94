"""Calls side by side: so many at a time, results in order, nothing under way at the end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from asymcheck.storage.lanes import side_by_side

BOUND_S = 20.0


def test_results_come_in_order_whatever_ends_first() -> None:
    done = [threading.Event() for _ in range(3)]

    def call(n: int) -> Callable[[], int]:
        def made() -> int:
            if n < 2:
                assert done[n + 1].wait(BOUND_S)  # ends after the one behind it
            done[n].set()
            return n

        return made

    assert list(side_by_side([call(n) for n in range(3)], 3)) == [0, 1, 2]


@pytest.mark.parametrize("lanes", [1, 2, 5])
def test_no_more_are_taken_than_there_are_lanes(lanes: int) -> None:
    taken: list[int] = []
    used = 0

    def calls() -> Iterator[Callable[[], int]]:
        for n in range(12):
            taken.append(n)
            # What is neither used nor under way: the memory of those that were is free again.
            assert len(taken) - used <= lanes
            yield lambda n=n: n  # type: ignore[misc]

    for found in side_by_side(calls(), lanes):
        assert found == used
        used += 1
    assert used == 12


def test_the_first_failure_in_order_is_raised_and_none_is_begun_after_it() -> None:
    begun: list[int] = []

    def call(n: int) -> Callable[[], int]:
        def made() -> int:
            begun.append(n)
            if n in (1, 2):
                raise ValueError(n)
            return n

        return made

    with pytest.raises(ValueError, match="1"):
        list(side_by_side([call(n) for n in range(9)], 3))
    assert set(begun) <= {0, 1, 2, 3}


def test_when_it_is_closed_nothing_is_under_way_any_more() -> None:
    let_go, under_way = threading.Event(), threading.Semaphore(0)
    ended: list[int] = []

    def call() -> None:
        under_way.release()
        assert let_go.wait(BOUND_S)
        ended.append(1)

    def first() -> None:
        ended.append(0)

    found = side_by_side([first, call, call], 3)
    next(found)
    assert under_way.acquire(timeout=BOUND_S)
    assert under_way.acquire(timeout=BOUND_S)
    threading.Thread(target=let_go.set).start()
    found.close()
    assert sorted(ended) == [0, 1, 1]


def test_one_lane_is_the_thread_that_asks() -> None:
    assert list(side_by_side([threading.get_ident] * 2, 1)) == [threading.get_ident()] * 2


def test_where_no_thread_can_be_started_calls_are_made_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refused)
    assert list(side_by_side([lambda: 1, lambda: 2], 4)) == [1, 2]
