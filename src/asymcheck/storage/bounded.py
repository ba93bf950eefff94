"""Calls that may never return, made on threads that can be left behind."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from time import monotonic
from typing import Any, TypeVar

from asymcheck.errors import CheckpointError, StoreError, as_checkpoint_error

T = TypeVar("T")

_Order = tuple[Callable[[], Any], Future[Any]]


class Overdue(Exception):
    """A call did not return in time; it may still be under way."""


class Callers:
    """Threads that make calls for others. One whose call is overdue is left behind and ends with
    it; the others are used again, so that at the end of the interpreter, when no thread can be
    started, calls still go through.

    Args:
        name: Of the threads, which are daemons.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._idle: list[SimpleQueue[_Order | None]] = []
        os.register_at_fork(after_in_child=self._idle.clear)  # a fork has none of the threads

    def call(self, work: Callable[[], T], timeout_s: float) -> T:
        """What ``work`` returns; blocks for at most ``timeout_s``. Any thread may call.

        What ``work`` changes it may change later, after the caller has gone on: it must touch
        no memory of the caller's.

        Raises:
            Overdue: It did not return in time.
            RuntimeError: The interpreter ends and no thread is free.
        """
        try:
            orders = self._idle.pop()
        except IndexError:
            orders = self._start()
        done: Future[T] = Future()
        orders.put((work, done))
        try:
            return done.result(timeout_s)
        except TimeoutError:
            if done.done():
                raise  # it is the call's own
            raise Overdue from None
        finally:
            if done.done():
                self._idle.append(orders)
            else:
                orders.put(None)

    def _start(self) -> SimpleQueue[_Order | None]:
        orders: SimpleQueue[_Order | None] = SimpleQueue()
        threading.Thread(target=_serve, args=(orders,), name=self._name, daemon=True).start()
        return orders


def _serve(orders: SimpleQueue[_Order | None]) -> None:
    while (order := orders.get()) is not None:
        work, done = order
        try:
            done.set_result(work())
        except BaseException as failure:  # noqa: BLE001  it is the caller's to see
            done.set_exception(failure)
        del order, work, done  # they may hold much memory


def within(
    timeout_s: float, calls: Sequence[Callable[[], T]], late: Sequence[str] = ()
) -> list[T | CheckpointError]:
    """Make calls at the same time; what each returned or raised, an error where the time was over.

    A call that hangs goes on alone, on a daemon thread.

    Args:
        timeout_s: For all of them together.
        calls: What to call.
        late: Of each the message where its time was over.
    """
    late = late or [f"no answer within {timeout_s:g} seconds"] * len(calls)
    found: list[T | CheckpointError] = [StoreError(why, retryable=True) for why in late]
    done = list(found)

    def make(at: int, call: Callable[[], T]) -> None:
        try:
            done[at] = call()
        except BaseException as failure:  # noqa: BLE001  it is the caller's to see
            done[at] = as_checkpoint_error(failure)

    threads = [
        threading.Thread(target=make, args=(at, call), name="asymcheck-tiers", daemon=True)
        for at, call in enumerate(calls)
    ]
    for thread in threads:
        thread.start()
    until_s = monotonic() + timeout_s
    for at, thread in enumerate(threads):
        thread.join(max(0.0, until_s - monotonic()))
        if not thread.is_alive():
            found[at] = done[at]
    return found
