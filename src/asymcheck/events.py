"""What happened, when, and how much: the one stream that logs, tests and benches read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from time import perf_counter

_log = logging.getLogger(__name__)


class Stage(StrEnum):
    """The stages of the data path, in order, and what the training loop waited for."""

    PLAN = "plan"
    CAPTURE = "capture"
    COPY = "copy"
    ENCODE = "encode"
    FLUSH = "flush"
    WRITE = "write"
    COMMIT = "commit"
    RETAIN = "retain"
    PROMOTE = "promote"
    RESTORE = "restore"
    STALL = "stall"
    FENCE = "fence"


@dataclass(frozen=True, slots=True)
class Span:
    """One timed piece of work.

    Attributes:
        stage: Which part of the data path did it.
        step: Training step the checkpoint names.
        start_s: Seconds on ``time.perf_counter``'s clock.
        duration_s: Seconds it took.
        moved_bytes: Bytes moved, zero where none were.
        error: What went wrong, empty when nothing did.
        tier: The tier that a copy was for; empty for the home tier.
    """

    stage: Stage
    step: int
    start_s: float
    duration_s: float
    moved_bytes: int = 0
    error: str = ""
    tier: str = ""


Sink = Callable[[Span], None]
"""Receives every span, on the thread that did the work; must not block for long."""


def discard(span: Span) -> None:
    """The sink that keeps nothing."""


def guarded(sink: Sink) -> Sink:
    """A sink whose failures are logged and go no further: watching must not break the work."""
    if sink is discard:
        return sink

    def receive(span: Span) -> None:
        try:
            sink(span)
        except Exception:  # noqa: BLE001  it is the user's
            _log.exception("the sink failed on %s of step %d", span.stage, span.step)

    return receive


@contextmanager
def timed(sink: Sink, stage: Stage, step: int, moved_bytes: int = 0) -> Iterator[None]:
    """Report the block as one span, also when it raises."""
    start_s = perf_counter()
    error = ""
    try:
        yield
    except BaseException as failure:
        error = f"{type(failure).__name__}: {failure}"
        raise
    finally:
        sink(Span(stage, step, start_s, perf_counter() - start_s, moved_bytes, error))
