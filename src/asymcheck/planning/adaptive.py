"""The default partitioner: let the copy run freely, unless measurement says that holding it pays.

The published rule divides by idle time whatever the link does. Where copy and collectives do not
share a path that gains nothing and costs slack. Here κ of each phase decides (``contention``):
the cheapest seconds are filled first and early ones before late ones, and a deadline lets the
copy go. That backward gets more, that forward does under optimizer offload, and that nothing
matters under long accumulation comes out of the windows and of κ; no case is written down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from asymcheck.errors import OptionError
from asymcheck.planning.contention import PHASES, Contention, Interval
from asymcheck.planning.layout import MiB
from asymcheck.planning.plan import (
    FREE,
    UNKNOWN,
    Gate,
    Partitioner,
    PartitionPlan,
    Prediction,
    Whole,
    predict,
)
from asymcheck.planning.windows import Window, total_s

LEAST_CHUNK_BYTES = 4 * MiB
MOST_CHUNK_BYTES = 32 * MiB

_UNMEASURED = Interval(0.0, 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Decision:
    """A plan, and why.

    Attributes:
        plan: Whole, or the cheapest windows first.
        gate: Goes with it.
        chunk_bytes: What the copy should issue at once under this gate.
        gain_s: Modelled seconds a checkpoint that holding the copy back saves; negative where
            it would cost some.
        why: In a few words, for people.
    """

    plan: PartitionPlan
    gate: Gate
    chunk_bytes: int
    gain_s: float
    why: str


@dataclass(frozen=True, slots=True)
class Adaptive:
    """Free-running, or the cheapest windows first.

    It begins to hold the copy back when the modelled gain exceeds ``enter`` of the step and is
    there even with κ at the unfavourable ends of its intervals; it ends when the gain falls
    under ``leave``. A phase that was not measured may cost anything from 0 to 1.

    Attributes:
        margin: Part of the step, and of the time left at the deadline, that is kept free. It is
            not taken from each window: early windows are filled, so the slack is at the end.
        enter: Gain, as a part of the step, from which on the copy is held back.
        leave: Gain under which it is let go again.
    """

    margin: float = 0.1
    enter: float = 0.01
    leave: float = 0.005

    def __post_init__(self) -> None:
        Gate("windows", self.margin)  # refuses a margin that is none
        if not 0.0 <= self.leave <= self.enter:
            raise OptionError(
                f"adaptive: expected 0 <= leave <= enter, found {self.leave} and {self.enter}"
            )

    def divide(
        self,
        lazy_bytes: int,
        windows: Sequence[Window],
        bandwidth_bytes_per_s: float,
        contention: Contention = UNKNOWN,
        previous: PartitionPlan | None = None,
    ) -> PartitionPlan:
        """See ``Partitioner``."""
        return self.decide(lazy_bytes, windows, bandwidth_bytes_per_s, contention, previous).plan

    def decide(
        self,
        lazy_bytes: int,
        windows: Sequence[Window],
        bandwidth_bytes_per_s: float,
        contention: Contention = UNKNOWN,
        previous: PartitionPlan | None = None,
    ) -> Decision:
        """The plan for the next captures, with its reason; arguments as in ``Partitioner``."""
        whole = Whole().divide(lazy_bytes, windows, bandwidth_bytes_per_s)
        chunk = chunk_bytes(windows, bandwidth_bytes_per_s)
        gate = Gate("windows", self.margin)
        held = self._cheapest_first(lazy_bytes, windows, bandwidth_bytes_per_s, contention)
        if held is None:
            why = "the copy needs all the time there is" if lazy_bytes else "nothing to copy"
            return Decision(whole, FREE, chunk, 0.0, why)
        if not any(contention.kappa(phase) > 0.0 for phase in PHASES):
            # No plan can gain, and to model that takes long where there are thousands of windows.
            return Decision(whole, FREE, chunk, 0.0, "copying costs the training nothing")
        held = held.aligned(chunk)
        freely = predict(whole, windows, bandwidth_bytes_per_s, FREE, contention)
        gated = predict(held, windows, bandwidth_bytes_per_s, gate, contention)
        gain_s, step_s = freely.lost_s - gated.lost_s, total_s(windows)
        was_held = previous is not None and not previous.free_running
        pays = gain_s > (self.leave if was_held else self.enter) * step_s
        if pays and (was_held or _least_gain_s(freely, gated, contention) > 0.0):
            return Decision(held, gate, chunk, gain_s, "holding the copy back saves time")
        why = "the gain is within the error of κ" if pays else "holding the copy back saves nothing"
        return Decision(whole, FREE, chunk, gain_s, why)

    def _cheapest_first(
        self,
        lazy_bytes: int,
        windows: Sequence[Window],
        bandwidth_bytes_per_s: float,
        contention: Contention,
    ) -> PartitionPlan | None:
        """Fill the idle and busy parts of the windows by ascending κ, early ones before late
        ones; ``None`` where there is nothing to copy or not enough room.
        """
        fits = bandwidth_bytes_per_s * total_s(windows) * (1.0 - self.margin)
        if not 0 < lazy_bytes <= fits:
            return None
        kappa = {phase: contention.kappa(phase) for phase in PHASES}
        parts: list[tuple[float, int, float]] = []
        for i, w in enumerate(windows):
            parts.append((kappa[w.phase], i, w.idle_s))
            parts.append((kappa["collective"], i, w.duration_s - w.idle_s))
        sizes, left = [0] * len(windows), lazy_bytes
        for _, i, seconds in sorted(parts):
            share = min(left, int(bandwidth_bytes_per_s * seconds))
            sizes[i] += share
            left -= share
        sizes[-1] += left  # bytes that rounding down left over
        return PartitionPlan(tuple(accumulate(sizes)), tuple(windows), lazy_bytes)


def decide(
    partitioner: Partitioner,
    lazy_bytes: int,
    windows: Sequence[Window],
    bandwidth_bytes_per_s: float,
    contention: Contention = UNKNOWN,
    previous: PartitionPlan | None = None,
) -> Decision:
    """The plan of any partitioner, with its gate: one that only divides is held to its bounds
    in the windows. Nothing is held back before windows and bandwidth are known.
    """
    if not windows or not bandwidth_bytes_per_s > 0.0:
        whole = Whole().divide(lazy_bytes, (), 0.0)
        return Decision(whole, FREE, LEAST_CHUNK_BYTES, 0.0, "nothing is measured yet")
    if isinstance(partitioner, Adaptive):
        return partitioner.decide(lazy_bytes, windows, bandwidth_bytes_per_s, contention, previous)
    plan = partitioner.divide(lazy_bytes, windows, bandwidth_bytes_per_s, contention, previous)
    gate = FREE if plan.free_running else Gate("windows")
    freely = predict(
        Whole().divide(lazy_bytes, windows, bandwidth_bytes_per_s),
        windows,
        bandwidth_bytes_per_s,
        FREE,
        contention,
    )
    held = predict(plan, windows, bandwidth_bytes_per_s, gate, contention)
    chunk = chunk_bytes(windows, bandwidth_bytes_per_s)
    return Decision(plan, gate, chunk, freely.lost_s - held.lost_s, "as the partitioner divides")


def _least_gain_s(freely: Prediction, gated: Prediction, contention: Contention) -> float:
    """The gain when each second that is spared was cheap and each one that is added is dear."""
    gain_s = freely.stall_s - gated.stall_s
    for phase in PHASES:
        spared_s = freely.copied_s[phase] - gated.copied_s[phase]
        interval = contention.interval(phase) or _UNMEASURED
        gain_s += spared_s * (_within(interval.low) if spared_s > 0.0 else _within(interval.high))
    return gain_s


def _within(kappa: float) -> float:
    return min(1.0, max(0.0, kappa))


def chunk_bytes(windows: Sequence[Window], bandwidth_bytes_per_s: float) -> int:
    """How much to issue at once so that a gate can close in time.

    An eighth of what fits the mean window, as a power of two from 4 to 32 MiB.
    """
    fits = bandwidth_bytes_per_s * total_s(windows) / max(1, len(windows)) / 8
    chunk = LEAST_CHUNK_BYTES
    while chunk * 2 <= min(fits, MOST_CHUNK_BYTES):
        chunk *= 2
    return chunk
