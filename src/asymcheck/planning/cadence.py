"""How often to save: values, and what decides in one run. It is told numbers and reads no clock."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

from asymcheck.errors import OptionError

_WARM_UP_STEPS = 5  # not timed: the first steps allocate, compile and fill caches
_ROUNDING = 1e-12


class SaveCost(NamedTuple):
    """What one durable checkpoint took, in seconds.

    Attributes:
        step_stall_s: Training waited at the boundary: for a slot and for what is copied there.
        fence_stall_s: The next update waited for the copy.
        durable_s: From the boundary until the checkpoint was durable.
    """

    step_stall_s: float
    fence_stall_s: float
    durable_s: float

    @property
    def stall_s(self) -> float:
        """All that training waited."""
        return self.step_stall_s + self.fence_stall_s

    @property
    def write_s(self) -> float:
        """From the end of the boundary until it was durable: copy and write, no wait for a slot."""
        return max(0.0, self.durable_s - self.step_stall_s)


class Schedule(Protocol):
    """Decides in one run at which steps a checkpoint starts.

    It knows only what it is told, so the same numbers give the same decisions. One thread uses it.
    """

    @property
    def why(self) -> str:
        """The interval as it is now, and where it is from."""
        ...

    def due(self, *, step: int, last_step: int, since_last_s: float, under_way: int) -> bool:
        """Whether to save after update ``step``.

        Args:
            step: Updates done so far.
            last_step: Step of the latest save or restore, zero where there was none.
            since_last_s: Seconds since then.
            under_way: Saves that are neither durable nor given up.
        """
        ...

    def observe_steps(self, count: int, duration_s: float, *, saved: bool) -> None:
        """Take notice of steps that went by, before ``due`` is asked.

        Args:
            count: How many, mostly 1.
            duration_s: What they took together, from one boundary to the next.
            saved: Whether a save began at the first of these boundaries, so that what training
                waited for it is in ``duration_s``.
        """
        ...

    def observe_save(self, cost: SaveCost) -> None:
        """Take notice of a checkpoint that became durable; one that failed is not told of."""
        ...


class Cadence(Protocol):
    """How often to save: a value, which may be used for any number of runs."""

    def begin(self, *, max_in_flight: int) -> Schedule:
        """What decides in one run.

        Args:
            max_in_flight: How many checkpoints may be under way.
        """
        ...


class _Fixed:
    """A cadence that learns nothing, and so is its own schedule in every run."""

    __slots__ = ()

    def begin(self, *, max_in_flight: int) -> Self:
        """See ``Cadence``."""
        return self

    def observe_steps(self, count: int, duration_s: float, *, saved: bool) -> None:
        """See ``Schedule``."""

    def observe_save(self, cost: SaveCost) -> None:
        """See ``Schedule``."""


@dataclass(frozen=True, slots=True)
class Never(_Fixed):
    """Only explicit saves."""

    @property
    def why(self) -> str:
        """See ``Schedule``."""
        return "only where save() is called"

    def due(self, *, step: int, last_step: int, since_last_s: float, under_way: int) -> bool:
        """See ``Schedule``."""
        return False


@dataclass(frozen=True, slots=True)
class EverySteps(_Fixed):
    """At each multiple of ``steps``."""

    steps: int

    def __post_init__(self) -> None:
        _check_count("every_steps", self.steps)

    @property
    def why(self) -> str:
        """See ``Schedule``."""
        return f"every {self.steps} steps, as asked for"

    def due(self, *, step: int, last_step: int, since_last_s: float, under_way: int) -> bool:
        """See ``Schedule``."""
        return step % self.steps == 0


@dataclass(frozen=True, slots=True)
class EverySeconds(_Fixed):
    """At the first step that ends ``seconds`` or more after the latest save."""

    seconds: float

    def __post_init__(self) -> None:
        _check_amount("every_seconds", self.seconds, "seconds")

    @property
    def why(self) -> str:
        """See ``Schedule``."""
        return f"every {self.seconds:g} s, as asked for"

    def due(self, *, step: int, last_step: int, since_last_s: float, under_way: int) -> bool:
        """See ``Schedule``."""
        return since_last_s >= self.seconds


@dataclass(frozen=True, slots=True)
class OverheadBudget:
    """As often as training is slowed down by no more than a part of its time (CheckFreq).

    Steps are timed first, then one checkpoint is taken. With T the mean time of a step that does
    not save, o the stall of a checkpoint, L the time until it is durable and N in flight, the
    interval is the least number of steps k that keeps both promises:

        k >= (L - o) / (N * T)    a slot is free when the next checkpoint starts
        k >= o / (budget * T)     the stall is within the budget

    o and L - o are the worst of all checkpoints until then: mostly of that one. Afterwards each k
    steps are compared with k * T; when they took longer than the budget allows, k grows by 2. It
    never shrinks. The first k steps within the budget end this, unless ``dynamic``.

    Attributes:
        budget: Part of the time of training, 0.035 for 3.5 %.
        profile_steps: How many steps are timed.
        dynamic: Whether to compare for ever.

    Source: Mohan et al., CheckFreq, FAST 2021; N is 1 there.
    """

    budget: float = 0.035
    profile_steps: int = 20
    dynamic: bool = False

    def __post_init__(self) -> None:
        _check_amount("budget", self.budget, "parts of the time of training")
        _check_count("profile_steps", self.profile_steps)
        if not isinstance(self.dynamic, bool):
            raise OptionError(f"dynamic: expected True or False, found {self.dynamic!r:.80}")

    def begin(self, *, max_in_flight: int) -> Schedule:
        """See ``Cadence``."""
        return _BudgetSchedule(self, max_in_flight)


@dataclass(frozen=True, slots=True)
class SlowdownFactor:
    """As often as the store can take it while steps may take ``factor`` times as long (PCcheck).

    Steps are timed first, then one checkpoint is taken. With t the mean time of a step that does
    not save, T_w the longest that a checkpoint took from the end of its boundary until it was
    durable, and N in flight, the interval is

        f* = ceil(T_w / (N * factor * t))    [steps]

    It grows when a checkpoint takes longer than any before, as those do that share the store.

    Attributes:
        factor: From 1 on.
        profile_steps: How many steps are timed.

    Source: Strati et al., PCcheck, ASPLOS 2025.
    """

    factor: float = 1.05
    profile_steps: int = 20

    def __post_init__(self) -> None:
        _check_amount("factor", self.factor, "times as long, from 1 on")
        if self.factor < 1.0:
            raise OptionError(f"factor: expected a number from 1 on, found {self.factor!r}")
        _check_count("profile_steps", self.profile_steps)

    def begin(self, *, max_in_flight: int) -> Schedule:
        """See ``Cadence``."""
        return _FactorSchedule(self, max_in_flight)


@dataclass(frozen=True, slots=True)
class YoungDaly:
    """As often as loses least, for a given mean time between failures (Young, Daly).

    Some steps are let go by, then one checkpoint is taken. With s the mean stall of a checkpoint,
    L the mean time from the end of its boundary until it is durable and N in flight, the time from
    one save to the next is

        max(daly_interval_s(s, mtbf_s), L / N)    [s]

    and never less than a step. Both means go on, so the interval may grow and shrink.

    Attributes:
        mtbf_s: Mean time between failures of the whole job.
        profile_steps: How many steps go by before the first save.
    """

    mtbf_s: float
    profile_steps: int = 20

    def __post_init__(self) -> None:
        _check_amount("mtbf_s", self.mtbf_s, "seconds")
        _check_count("profile_steps", self.profile_steps)

    def begin(self, *, max_in_flight: int) -> Schedule:
        """See ``Cadence``."""
        return _DalySchedule(self, max_in_flight)


def young_interval_s(stall_s: float, mtbf_s: float) -> float:
    """Seconds of work between checkpoints that lose least time in first order.

    Source: Young, CACM 17(9), 1974: sqrt(2 s M).
    """
    return math.sqrt(2.0 * stall_s * mtbf_s)


def daly_interval_s(stall_s: float, mtbf_s: float) -> float:
    """The same for exponential failures, with the higher-order terms; 0 without any stall.

    Source: Daly, FGCS 22(3), 2006.
    """
    if stall_s >= 2.0 * mtbf_s:
        return mtbf_s
    part = stall_s / (2.0 * mtbf_s)
    return young_interval_s(stall_s, mtbf_s) * (1.0 + math.sqrt(part) / 3.0 + part / 9.0) - stall_s


class _Measuring(ABC):
    """Times the first steps, then has one checkpoint taken; what follows is the subclass's."""

    def __init__(self, profile_steps: int, max_in_flight: int) -> None:
        self._profile_steps = profile_steps
        self._in_flight = max_in_flight
        self._warm_up_steps = _WARM_UP_STEPS
        self._timed_steps = 0
        self._timed_s = 0.0
        self._knows_cost = False
        self.interval_steps = 0
        """0 as long as it is not known."""
        self.why = (
            f"not known yet: {profile_steps} steps are timed, then one checkpoint is taken to see "
            f"what it costs"
        )

    def _is_timed(self) -> bool:
        return self._timed_steps >= self._profile_steps

    @property
    def _step_s(self) -> float:
        return max(self._timed_s / self._timed_steps, 1e-9)

    def due(self, *, step: int, last_step: int, since_last_s: float, under_way: int) -> bool:
        """See ``Schedule``."""
        since_steps = step - last_step
        if self._is_timed() and self._knows_cost:
            return self._is_over(since_steps, since_last_s)
        return self._is_timed() and not under_way and since_steps >= self._profile_steps

    def observe_steps(self, count: int, duration_s: float, *, saved: bool) -> None:
        """See ``Schedule``."""
        if saved or self._is_timed():
            return
        if self._warm_up_steps > 0:
            self._warm_up_steps -= count
            return
        self._timed_steps += count
        self._timed_s += duration_s
        if self._is_timed() and self._knows_cost:  # of a save that the user asked for
            self._decide()

    def observe_save(self, cost: SaveCost) -> None:
        """See ``Schedule``."""
        self._learn(cost)
        self._knows_cost = True
        if self._is_timed():
            self._decide()

    def _is_over(self, since_steps: int, since_s: float) -> bool:
        return since_steps >= self.interval_steps

    @abstractmethod
    def _learn(self, cost: SaveCost) -> None:
        """Remember what a checkpoint took."""

    @abstractmethod
    def _decide(self) -> None:
        """Set the interval: steps are timed, and at least one cost is known."""


class _BudgetSchedule(_Measuring):
    def __init__(self, cadence: OverheadBudget, max_in_flight: int) -> None:
        super().__init__(cadence.profile_steps, max_in_flight)
        self._cadence = cadence
        self._stall_s = self._behind_s = 0.0
        self._window_steps = 0
        self._window_s = 0.0
        self._watches = True

    def observe_steps(self, count: int, duration_s: float, *, saved: bool) -> None:
        if self.interval_steps and self._watches:
            self._window_steps += count
            self._window_s += duration_s
            if self._window_steps >= self.interval_steps:
                self._compare()
        super().observe_steps(count, duration_s, saved=saved)

    def _compare(self) -> None:
        planned_s = self._window_steps * self._step_s
        excess = self._window_s / planned_s - 1.0
        if excess > self._cadence.budget:
            self.interval_steps += 2
            self.why = (
                f"every {self.interval_steps} steps: 2 more, since {self._window_steps} steps took "
                f"{excess:.1%} longer than without checkpoints, with a budget of "
                f"{self._cadence.budget:.1%}"
            )
        else:
            self._watches = self._cadence.dynamic
        self._window_steps, self._window_s = 0, 0.0

    def _learn(self, cost: SaveCost) -> None:
        if not self.interval_steps:
            self._stall_s = max(self._stall_s, cost.stall_s)
            self._behind_s = max(self._behind_s, cost.durable_s - cost.stall_s)

    def _decide(self) -> None:
        if self.interval_steps:
            return
        stall_s, behind_s, step_s = self._stall_s, self._behind_s, self._step_s
        for_slot = _at_least(behind_s / self._in_flight, step_s)
        for_budget = _at_least(stall_s / self._cadence.budget, step_s)
        self.interval_steps = max(for_slot, for_budget)
        self.why = (
            f"every {self.interval_steps} steps of {_spoken(step_s)}: a checkpoint stalls training "
            f"by {_spoken(stall_s)}, which a budget of {self._cadence.budget:.1%} allows every "
            f"{for_budget}, and is durable {_spoken(behind_s)} after that, which "
            f"{self._in_flight} in flight allow every {for_slot}"
        )


class _FactorSchedule(_Measuring):
    def __init__(self, cadence: SlowdownFactor, max_in_flight: int) -> None:
        super().__init__(cadence.profile_steps, max_in_flight)
        self._factor = cadence.factor
        self._write_s = 0.0

    def _learn(self, cost: SaveCost) -> None:
        self._write_s = max(self._write_s, cost.write_s)

    def _decide(self) -> None:
        write_s, step_s = self._write_s, self._step_s
        self.interval_steps = _at_least(write_s / (self._in_flight * self._factor), step_s)
        self.why = (
            f"every {self.interval_steps} steps of {_spoken(step_s)}: writing one checkpoint took "
            f"{_spoken(write_s)} at worst, with {self._in_flight} in flight and steps that may "
            f"take {self._factor:g} times as long"
        )


class _DalySchedule(_Measuring):
    def __init__(self, cadence: YoungDaly, max_in_flight: int) -> None:
        super().__init__(cadence.profile_steps, max_in_flight)
        self._mtbf_s = cadence.mtbf_s
        self._saves = 0
        self._stalls_s = self._writes_s = 0.0
        self.interval_s = 0.0

    def _is_over(self, since_steps: int, since_s: float) -> bool:
        return since_s >= self.interval_s

    def _learn(self, cost: SaveCost) -> None:
        self._saves += 1
        self._stalls_s += cost.stall_s
        self._writes_s += cost.write_s

    def _decide(self) -> None:
        stall_s, write_s = self._stalls_s / self._saves, self._writes_s / self._saves
        best_s, least_s = daly_interval_s(stall_s, self._mtbf_s), write_s / self._in_flight
        self.interval_s = max(best_s, least_s)
        self.why = (
            f"every {_spoken(self.interval_s)}: for a stall of {_spoken(stall_s)} and a failure "
            f"every {_spoken(self._mtbf_s)} best would be {_spoken(best_s)}; a checkpoint that "
            f"takes {_spoken(write_s)} to write allows {_spoken(least_s)} with {self._in_flight} "
            f"in flight"
        )


def _at_least(work_s: float, step_s: float) -> int:
    """The least number of steps, from 1 on, that take that long; a rounding error is no step."""
    return max(1, math.ceil(work_s / step_s * (1.0 - _ROUNDING)))


def _spoken(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1.0 else f"{1e3 * seconds:.3g} ms"


def _check_count(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise OptionError(f"{name}: expected an integer from 1 on, found {value!r}")


def _check_amount(name: str, value: object, unit: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise OptionError(f"{name}: expected a number of {unit} above 0, found {value!r}")
