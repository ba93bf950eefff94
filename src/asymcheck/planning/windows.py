"""The time that a copy can hide in: one step as a row of windows, in the order in which they come.

A window is a stretch of forward or backward computation, usually one block of the model. All
windows between two updates count: with gradient accumulation over G micro-batches they come G
times. Traffic that leaves the device on the path that the copy uses makes a window busy: an
all-gather, an all-reduce, and the gradients of an offloaded optimizer, which leave in backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from asymcheck.errors import OptionError

LONGEST_S = 1e9
"""Of a window, seconds: about thirty years. Sums of such numbers stay finite."""


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of a step.

    Attributes:
        phase: Which pass it belongs to.
        duration_s: How long it lasts when nothing is copied.
        collective_s: For how long of it other traffic is on the way; what exceeds
            ``duration_s`` counts for nothing.

    Raises:
        OptionError: A time is negative, endless or no number.
    """

    phase: Literal["forward", "backward"]
    duration_s: float
    collective_s: float = 0.0

    def __post_init__(self) -> None:
        if self.phase not in ("forward", "backward"):
            raise OptionError(f"window: expected forward or backward, found {self.phase!r}")
        for name in ("duration_s", "collective_s"):
            if not 0.0 <= getattr(self, name) <= LONGEST_S:
                raise OptionError(
                    f"window: {name}: expected 0 to {LONGEST_S:g} s, found {getattr(self, name)}"
                )

    @property
    def idle_s(self) -> float:
        """Seconds without other traffic: the idle period of the paper (section 4.1)."""
        return max(0.0, self.duration_s - self.collective_s)


def total_s(windows: Iterable[Window]) -> float:
    """W, the seconds from the boundary to the next update."""
    return math.fsum(w.duration_s for w in windows)


def idle_s(windows: Iterable[Window]) -> float:
    """ΣD, the seconds of them without other traffic."""
    return math.fsum(w.idle_s for w in windows)


def repeated(windows: Sequence[Window], micro_batches: int) -> tuple[Window, ...]:
    """The windows of one step that accumulates gradients over so many micro-batches.

    Args:
        windows: Of one micro-batch.
        micro_batches: G, at least 1.
    """
    if micro_batches < 1:
        raise OptionError(f"micro_batches: expected at least 1, found {micro_batches}")
    return tuple(windows) * micro_batches
