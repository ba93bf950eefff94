"""Calls made side by side, a bounded number of them, whose results come in order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")

MOST_LANES = 8
"""More calls than this are never under way, whatever a store says: each holds memory."""


def side_by_side(calls: Iterable[Callable[[], T]], lanes: int) -> Generator[T, None, None]:
    """What each call returns, in order; blocks.

    At most ``lanes`` are under way or wait to be taken, each on a daemon thread. When this ends,
    whatever ended it, none is under way: nobody writes to the caller's memory any more. The first
    failure in the order of the calls is raised, and none is begun after it.

    Args:
        calls: Taken one at a time, by the thread that takes the results.
        lanes: 1 makes each call on that thread itself.
    """
    coming: deque[Future[T]] = deque()
    try:
        for call in calls:
            if lanes == 1:
                yield call()
                continue
            coming.append(_begun(call))
            if len(coming) >= lanes:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()
    finally:
        wait(coming)


def _begun(call: Callable[[], T]) -> Future[T]:
    done: Future[T] = Future()

    def make() -> None:
        try:
            done.set_result(call())
        except BaseException as failure:  # noqa: BLE001  it is the caller's to see
            done.set_exception(failure)

    try:
        threading.Thread(target=make, name="asymcheck-lane", daemon=True).start()
    except RuntimeError:
        make()  # the interpreter ends: no thread can be started
    return done
