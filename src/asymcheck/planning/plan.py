"""Which bytes are copied in which window, and what that costs.

R lazy bytes are copied in one order, so a plan is a row of bounds: in window ``i`` the copy may
get as far as ``bounds[i]``. What a window leaves over, the next ones may still copy. Nothing can
beat a stall of ``R/B - W`` seconds (B bandwidth, W length of the windows); plans decide only
which instants the copy uses, and that matters only where copying disturbs training.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Literal, Protocol

from asymcheck.errors import OptionError, PlanError
from asymcheck.planning.contention import PHASES, Contention, Phase
from asymcheck.planning.windows import Window, total_s

UNKNOWN = Contention()
"""Nothing was measured: copying is taken to cost nothing."""


@dataclass(frozen=True, slots=True)
class PartitionPlan:
    """A division of the lazy bytes over windows; refuses not to be a cover.

    Attributes:
        bounds: How many bytes may be copied by the end of each window, from the first byte of
            the copy on; ascending, the last is ``lazy_bytes``. Without windows it is the one
            bound ``lazy_bytes``: the copy runs freely until the fence.
        windows: What the plan was made for.
        lazy_bytes: R.

    Raises:
        PlanError: The bounds do not cover the bytes exactly once.
    """

    bounds: tuple[int, ...]
    windows: tuple[Window, ...]
    lazy_bytes: int

    def __post_init__(self) -> None:
        wrong = ""
        if self.lazy_bytes < 0:
            wrong = "a size of at least 0"
        elif len(self.bounds) != max(1, len(self.windows)):
            wrong = f"{max(1, len(self.windows))} bounds"
        elif not all(isinstance(b, int) for b in self.bounds):
            wrong = "whole numbers"
        elif self.bounds[0] < 0 or any(a > b for a, b in pairwise(self.bounds)):
            wrong = "bounds that ascend from 0 or more"
        elif self.bounds[-1] != self.lazy_bytes:
            wrong = f"a last bound of {self.lazy_bytes}"
        if wrong:
            raise PlanError(
                f"partition plan of {self.lazy_bytes} bytes over {len(self.windows)} windows: "
                f"expected {wrong}, found {self.bounds}; this is a bug of the partitioner"
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each partition; they sum to ``lazy_bytes``."""
        return tuple(b - a for a, b in pairwise((0, *self.bounds)))

    @property
    def free_running(self) -> bool:
        """Whether it holds nothing back."""
        return self.bounds[0] == self.lazy_bytes

    def aligned(self, piece_bytes: int) -> PartitionPlan:
        """The same with every bound but R rounded down to whole pieces, still a cover.

        Args:
            piece_bytes: What the copy issues at once, at least 1.
        """
        whole = self.lazy_bytes
        bounds = (b if b == whole else b - b % piece_bytes for b in self.bounds)
        return replace(self, bounds=tuple(bounds))


class Partitioner(Protocol):
    """Divides the lazy bytes over the windows of a step."""

    def divide(
        self,
        lazy_bytes: int,
        windows: Sequence[Window],
        bandwidth_bytes_per_s: float,
        contention: Contention = UNKNOWN,
        previous: PartitionPlan | None = None,
    ) -> PartitionPlan:
        """A plan for the next captures; pure.

        Args:
            lazy_bytes: R; zero is allowed.
            windows: Of one step, in order; none, and windows of zero length, are allowed.
            bandwidth_bytes_per_s: B, measured on copies behind the training.
            contention: What copying costs, per phase.
            previous: The plan until now, for those that do not change their mind easily.
        """
        ...


class _ByWeight(ABC):
    """Shares in proportion to the weight of a window; everything in the first without any."""

    __slots__ = ()

    @abstractmethod
    def _weight(self, window: Window) -> float: ...

    def divide(
        self,
        lazy_bytes: int,
        windows: Sequence[Window],
        bandwidth_bytes_per_s: float,
        contention: Contention = UNKNOWN,
        previous: PartitionPlan | None = None,
    ) -> PartitionPlan:
        """See ``Partitioner``."""
        # The sum so far is rounded, not the share: so nothing is left over at the end.
        sums = list(accumulate(self._weight(w) for w in windows))
        if not sums or not sums[-1]:
            return PartitionPlan((lazy_bytes,) * max(1, len(sums)), tuple(windows), lazy_bytes)
        bounds = (min(lazy_bytes, round(lazy_bytes * (s / sums[-1]))) for s in sums[:-1])
        return PartitionPlan((*bounds, lazy_bytes), tuple(windows), lazy_bytes)


@dataclass(frozen=True, slots=True)
class Whole(_ByWeight):
    """Everything may go in the first window: a copy that runs freely (DataStates-LLM)."""

    def _weight(self, window: Window) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class Uniform(_ByWeight):
    """The same number of bytes in every window, whatever its length."""

    def _weight(self, window: Window) -> float:
        return 1.0


@dataclass(frozen=True, slots=True)
class IdleProportional(_ByWeight):
    """The paper's asymmetric rule (section 4.1): ``r_i = R · t_i / ΣT``, t the idle periods.

    Each size is within one byte of the rule and together they are R. That backward partitions
    are larger follows from longer idle periods; where gradients leave in backward (offloaded
    optimizer) forward ones are. Without any idle time the copy runs freely.
    """

    def _weight(self, window: Window) -> float:
        return window.idle_s


@dataclass(frozen=True, slots=True)
class Gate:
    """When the copy may go on.

    Attributes:
        hold: ``free`` never holds it back, ``windows`` at the bounds of the plan.
        deadline_margin: With a number m (0 to below 1) the copy is let go for good as soon as
            what is left needs ``(1 - m)`` of the time that is left: ``left/B >= (1 - m)·W_left``.
            Time that is left is the plan's, since nobody knows a step before it is over.
    """

    hold: Literal["free", "windows"] = "free"
    deadline_margin: float | None = None

    def __post_init__(self) -> None:
        if self.hold not in ("free", "windows"):
            raise OptionError(f"gate: expected free or windows, found {self.hold!r}")
        if self.deadline_margin is not None and not 0.0 <= self.deadline_margin < 1.0:
            raise OptionError(
                f"deadline_margin: expected 0 to below 1, found {self.deadline_margin}"
            )

    def is_late(self, left_s: float, time_left_s: float) -> bool:
        """Whether the deadline overrides the gate.

        Args:
            left_s: Seconds that the rest of the copy needs at full bandwidth.
            time_left_s: Seconds until the update, by the plan.
        """
        margin = self.deadline_margin
        return margin is not None and left_s > 0.0 and left_s >= (1.0 - margin) * time_left_s


FREE = Gate()


@dataclass(frozen=True, slots=True)
class Prediction:
    """What one checkpointed step costs by the fluid model.

    Attributes:
        copy_end_s: From the boundary to the last byte.
        stall_s: How long the update waits.
        slowdown_s: By how much the windows get longer.
        window_bytes: Copied in each window; together with ``stalled_bytes`` they are R.
        stalled_bytes: Copied while the update waits.
        copied_s: Seconds of copying behind training, by phase.
    """

    copy_end_s: float
    stall_s: float
    slowdown_s: float
    window_bytes: tuple[int, ...]
    stalled_bytes: int
    copied_s: Mapping[Phase, float]

    @property
    def lost_s(self) -> float:
        """What training loses: stall and slowdown."""
        return self.stall_s + self.slowdown_s


def least_lost_s(lazy_bytes: int, windows: Sequence[Window], bandwidth_bytes_per_s: float) -> float:
    """``max(0, R/B - W)``: no plan and no gate loses less."""
    _check_bandwidth(bandwidth_bytes_per_s)
    return max(0.0, lazy_bytes / bandwidth_bytes_per_s - total_s(windows))


def predict(
    plan: PartitionPlan,
    windows: Sequence[Window],
    bandwidth_bytes_per_s: float,
    gate: Gate = FREE,
    contention: Contention = UNKNOWN,
) -> Prediction:
    """Run one step in the fluid model.

    The copy moves B bytes a second while it is let go. A second of copying takes κ seconds from
    the window it runs in, which ends that much later, so up to ``d / (1 - κ)`` seconds fit a
    window of ``d``. In each window the copy takes the idle part first and the part with other
    traffic after it; what is left after the last window stalls the update.

    Args:
        plan: How far the copy may get in which window.
        windows: As they turn out; as many as the plan has, any number if it has none.
        bandwidth_bytes_per_s: B.
        gate: Whether the bounds hold the copy back.
        contention: κ by phase; only what is significant counts (``Contention.kappa``).

    Raises:
        OptionError: The bandwidth is no number from 1 byte/s up.
        PlanError: The step has another number of windows than the plan.
    """
    _check_bandwidth(bandwidth_bytes_per_s)
    if plan.windows and len(windows) != len(plan.windows):
        raise PlanError(
            f"partition plan: made for {len(plan.windows)} windows, the step has {len(windows)}; "
            "plan anew"
        )
    rate, whole_s = bandwidth_bytes_per_s, plan.lazy_bytes / bandwidth_bytes_per_s
    planned = plan.windows or tuple(windows)
    # Planned seconds from the start of each window to the update.
    until = list(accumulate((w.duration_s for w in reversed(planned)), initial=0.0))[::-1]
    free = gate.hold == "free" or not plan.windows
    spell = _Spell(contention)
    window_bytes: list[int] = []
    before = 0
    for i, window in enumerate(windows):
        spell.enter(window)
        free = free or gate.is_late(whole_s - spell.done_s, until[i])
        spell.copy(whole_s if free else plan.bounds[i] / rate)
        if not free and gate.deadline_margin is not None and spell.done_s < whole_s:
            need_s = (whole_s - spell.done_s) / (1.0 - gate.deadline_margin)
            strikes_s = max(spell.at_s, until[i] - need_s)
            if need_s >= until[i + 1] and strikes_s < window.duration_s:
                free = True
                spell.wait(strikes_s)
                spell.copy(whole_s)
        spell.wait(window.duration_s)
        done = spell.done_s >= whole_s
        copied = plan.lazy_bytes if done else min(plan.lazy_bytes, round(spell.done_s * rate))
        window_bytes.append(copied - before)
        before = copied
    stall_s = whole_s - spell.done_s
    return Prediction(
        copy_end_s=spell.clock_s + stall_s if stall_s else spell.end_s,
        stall_s=stall_s,
        slowdown_s=spell.lost_s,
        window_bytes=tuple(window_bytes),
        stalled_bytes=plan.lazy_bytes - sum(window_bytes),
        copied_s=MappingProxyType(spell.copied_s),
    )


class _Spell:
    """The state of ``predict``: clocks, and how far the window and the copy are.

    Attributes:
        clock_s: Since the boundary.
        at_s: How much of the window's own work is done.
        done_s: How much is copied, in seconds at full bandwidth.
        lost_s: By how much windows got longer.
        end_s: When the latest byte was copied.
        copied_s: As in ``Prediction``.
    """

    def __init__(self, contention: Contention) -> None:
        self.clock_s = self.at_s = self.done_s = self.lost_s = self.end_s = 0.0
        self.copied_s: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
        self._kappa = {phase: contention.kappa(phase) for phase in PHASES}
        self._parts: tuple[tuple[float, Phase], ...] = ()

    def enter(self, window: Window) -> None:
        """Begin a window."""
        self.at_s = 0.0
        self._parts = ((window.idle_s, window.phase), (window.duration_s, "collective"))

    def wait(self, until_s: float) -> None:
        """Let the window's work go on without a copy."""
        if until_s > self.at_s:
            self.clock_s += until_s - self.at_s
            self.at_s = until_s

    def copy(self, upto_s: float) -> None:
        """Copy until so much is done, or the window is over."""
        left_s = upto_s - self.done_s
        for stop_s, phase in self._parts:
            if left_s <= 0.0:
                return
            kappa = self._kappa[phase]
            # With κ = 1 the window stands still while bytes are copied.
            room_s = (stop_s - self.at_s) / (1.0 - kappa) if kappa < 1.0 else math.inf
            if self.at_s >= stop_s:
                continue
            spell_s = min(left_s, room_s)
            self.at_s = stop_s if spell_s == room_s else self.at_s + spell_s * (1.0 - kappa)
            left_s -= spell_s
            self.clock_s += spell_s
            self.lost_s += kappa * spell_s
            self.copied_s[phase] += spell_s
            self.done_s = upto_s - left_s
            self.end_s = self.clock_s


def _check_bandwidth(bandwidth_bytes_per_s: float) -> None:
    if not 1.0 <= bandwidth_bytes_per_s < math.inf:
        raise OptionError(
            "bandwidth_bytes_per_s: expected a number from 1 up, "
            f"found {bandwidth_bytes_per_s}; measure it on a copy first"
        )
