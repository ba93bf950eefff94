"""κ: how many seconds training loses per second that is copied, per phase, with an interval.

Measured by pairs: the same window with a copy behind it and without one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

Phase = Literal["forward", "backward", "collective"]
"""``collective`` is any time with other traffic on the way, whichever the pass."""

PHASES: tuple[Phase, ...] = ("forward", "backward", "collective")

_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_Z_95 = 1.959964


class Interval(NamedTuple):
    """An estimate with its two-sided 95 % interval."""

    low: float
    mid: float
    high: float


@dataclass(frozen=True, slots=True)
class Kappa:
    """κ of one phase: least squares through the origin, of seconds lost over seconds copied.

    Each sample weighs by the square of its copied seconds, so a window in which hardly
    anything was copied says hardly anything. The sums are updated as in Welford's algorithm
    (which this is where all weights are equal), so nothing cancels and memory is constant.

    Attributes:
        count: Samples.
        weight: Σ of squared copied seconds.
        slope: κ.
        residual: Σ of squared deviations from the line, s².
    """

    count: int = 0
    weight: float = 0.0
    slope: float = 0.0
    residual: float = 0.0

    def add(self, lost_s: float, copied_s: float) -> Kappa:
        """With one more sample; one that is no pair of finite numbers, or copied nothing, is
        left out.
        """
        weight = self.weight + copied_s * copied_s
        if not (
            copied_s > 0.0 and weight > 0.0 and math.isfinite(weight) and math.isfinite(lost_s)
        ):
            return self
        off_s = lost_s - self.slope * copied_s
        return Kappa(
            self.count + 1,
            weight,
            self.slope + copied_s * off_s / weight,
            self.residual + off_s * off_s * (self.weight / weight),
        )

    def interval(self) -> Interval | None:
        """κ with its 95 % interval by Student's t; ``None`` under two samples."""
        if self.count < 2:
            return None
        degrees = self.count - 1
        half = _t_95(degrees) * math.sqrt(self.residual / degrees / self.weight)
        return Interval(self.slope - half, self.slope, self.slope + half)


@dataclass(frozen=True, slots=True)
class Contention:
    """κ of every phase, pooled over windows and steps.

    A value: ``add`` returns a new one. Start a new one when the windows are profiled anew.
    """

    forward: Kappa = Kappa()
    backward: Kappa = Kappa()
    collective: Kappa = Kappa()

    def add(self, phase: Phase, *, with_s: float, without_s: float, copied_s: float) -> Contention:
        """With one more pair.

        Pairs should not share a measurement: pair each window with the same window of another
        step, and use that once. Where all pairs share one baseline the interval is too narrow.

        Args:
            phase: Where the copy ran.
            with_s: Duration of the window with the copy behind it.
            without_s: Duration of the same window without a copy.
            copied_s: For how many seconds of it bytes were copied.
        """
        one: Kappa = getattr(self, phase)
        changed: dict[str, Kappa] = {phase: one.add(with_s - without_s, copied_s)}
        return replace(self, **changed)

    def interval(self, phase: Phase) -> Interval | None:
        """κ of a phase with its interval; ``None`` where fewer than two pairs were seen."""
        one: Kappa = getattr(self, phase)
        return one.interval()

    def kappa(self, phase: Phase) -> float:
        """κ of a phase as far as it is known to be there: 0 unless the interval lies above 0.

        At most 1: a copy cannot hold training up for longer than it lasts.
        """
        found = self.interval(phase)
        return min(1.0, found.mid) if found is not None and found.low > 0.0 else 0.0


def _t_95(degrees: int) -> float:
    """Student's t for 95 %, two-sided: a table to 10, then Fisher's expansion (within 0.003)."""
    if degrees <= len(_T_95):
        return _T_95[degrees - 1]
    z, n = _Z_95, float(degrees)
    return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n * n)
