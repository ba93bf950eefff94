"""Pooling the measured windows of many steps, in memory that is linear in their number."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Literal, NamedTuple

from asymcheck.planning.windows import Window

KEPT = 9
"""Measurements of each window that its duration is the median of."""

DRIFT = 0.2
"""Share by which a step may be longer or shorter than usual and still count."""

PATIENCE = 4
"""Steps with other windows, or of another length, after which they are the usual ones."""

_PAIRS = 4096  # that are kept until somebody takes them
_WARM = 3  # measurements that make something usual
_PHASES: tuple[Literal["forward", "backward"], ...] = ("forward", "backward")


class Pair(NamedTuple):
    """A window with a copy behind it and the same window without, both in seconds.

    Each is one measurement, used in one pair only.

    Attributes:
        phase: Of the window; ``collective`` where other traffic fills most of it when nothing is
            copied.
        with_s: Its duration while there was a copy.
        without_s: Its duration in an earlier step without one.
        copied_s: For how long of ``with_s`` the copy ran.
    """

    phase: Literal["forward", "backward", "collective"]
    with_s: float
    without_s: float
    copied_s: float


@dataclass(eq=False, slots=True)
class _Measured:
    """The latest measurements of one window, in seconds.

    Attributes:
        alone: Durations without a copy.
        shared: Durations with one.
        alone_busy: Of other traffic, without a copy.
        shared_busy: Of other traffic, with one: where they share a path it takes longer.
        unpaired: The latest of ``alone``, until a pair uses it.
    """

    alone: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    shared: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    alone_busy: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    shared_busy: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    unpaired: float | None = None

    def add(
        self, span_s: float, copied_s: float, collective_s: float
    ) -> tuple[float, float] | None:
        """Add a measurement.

        Returns:
            The duration with a copy and one without, where that makes a pair.
        """
        if not copied_s:
            self.alone.append(span_s)
            self.alone_busy.append(collective_s)
            self.unpaired = span_s if len(self.alone) >= _WARM else None
            return None
        self.shared.append(span_s)
        self.shared_busy.append(collective_s)
        without_s, self.unpaired = self.unpaired, None
        return None if without_s is None else (span_s, without_s)

    @property
    def usual(self) -> tuple[float, float]:
        """Duration, and that of other traffic: without a copy, where that was measured."""
        return median(self.alone or self.shared), median(self.alone_busy or self.shared_busy)


class Pooling:
    """What is known of the windows of a step. For one thread.

    Durations are medians over the latest steps that have the most common row of windows and are
    not 20 % off the usual length. Steps that differ several times in a row become the usual
    ones, and what was measured before is forgotten.

    Attributes:
        generation: Counts how often what was measured has been forgotten.
    """

    def __init__(self) -> None:
        self.generation = -1
        self._usual: tuple[int, ...] = ()
        self._votes = 0
        self._pairs: deque[Pair] = deque(maxlen=_PAIRS)
        self._forget()

    def add(
        self,
        row: tuple[int, ...],
        edges: Sequence[float],
        copies: Sequence[tuple[float, float]] = (),
        collectives: Sequence[tuple[float, float]] = (),
    ) -> None:
        """Add a step.

        Args:
            row: What each window is: a number that is even for forward, odd for backward.
            edges: Where they begin, and the end of the last; seconds, ascending.
            copies: Start and stop of each stretch of copying; may exceed the step.
            collectives: Of other traffic.
        """
        copied = overlaps(edges, copies)
        if not self._is_usual(row, edges[-1] - edges[0], any(copied)):
            return
        spans = [max(0.0, b - a) for a, b in pairwise(edges)]
        others = overlaps(edges, collectives)
        for code, one, span, copied_s, other_s in zip(
            row, self._measured, spans, copied, others, strict=True
        ):
            pair = one.add(span, copied_s, min(span, other_s))
            if pair is not None:
                usual_s, busy_s = one.usual
                phase = "collective" if 2 * busy_s > usual_s else _PHASES[code % 2]
                self._pairs.append(Pair(phase, *pair, copied_s))

    def windows(self) -> tuple[Window, ...]:
        """The usual windows; times are those without a copy, where there were any."""
        return tuple(
            Window(_PHASES[code % 2], *m.usual)
            for code, m in zip(self._usual, self._measured, strict=True)
        )

    def take_pairs(self) -> list[Pair]:
        """The pairs since the last call; of very many the latest."""
        pairs = list(self._pairs)
        self._pairs.clear()
        return pairs

    def _forget(self) -> None:
        self.generation += 1
        self._measured = [_Measured() for _ in self._usual]
        self._lengths = {copied: deque[float](maxlen=KEPT) for copied in (False, True)}
        self._pairs.clear()
        self._strange = 0

    def _is_usual(self, row: tuple[int, ...], length_s: float, copied: bool) -> bool:
        """Whether a step is to be pooled; forgets the others if it is not the first such one.

        The most common row is found by Boyer and Moore's majority vote, its lead limited so
        that a change is noticed.
        """
        if row != self._usual:
            self._votes -= 1
            if self._votes >= 0:
                return False
            self._usual, self._votes = row, 0
            self._forget()
        self._votes = min(self._votes + 1, PATIENCE)
        lengths = self._lengths[copied]
        usual_s = median(lengths) if len(lengths) >= _WARM else length_s
        if abs(length_s - usual_s) > DRIFT * usual_s:
            self._strange += 1
            if self._strange < PATIENCE:
                return False
            self._forget()
            lengths = self._lengths[copied]
        self._strange = 0
        lengths.append(length_s)
        return True


def overlaps(edges: Sequence[float], stretches: Iterable[tuple[float, float]]) -> list[float]:
    """For how long of each window, between two edges, the stretches run."""
    found = [0.0] * (len(edges) - 1)
    for start, stop in stretches:
        for i in range(max(0, bisect_right(edges, start) - 1), len(found)):
            if edges[i] >= stop:
                break
            found[i] += max(0.0, min(stop, edges[i + 1]) - max(start, edges[i]))
    return found
