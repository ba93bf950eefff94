"""One checkpointing step as a fluid: when does it matter at which instants bytes are copied?

A step is a row of slots, one for each layer in forward and in backward. A slot computes for
``compute_s`` and meanwhile sends ``comm_s`` of traffic (the gather of the next layer, prefetched,
and the reduce-scatter of the one before); it ends when both are done. The copy leaves the device
at B bytes a second. On a *shared* link traffic and copy get half of it each while both are
under way; on an *independent* one they do not meet. What is left after backward stalls the
update. How a policy decides when to copy:

* ``free``: always.
* ``gate``: while no traffic is under way.
* ``proportional``: the same, up to the bound of the slot, by the paper's rule.
* ``equal``: bounds of equal size; the copy of a slot begins when no traffic is under way and then
  runs through.
* ``adaptive``: measures what copying costs, as in training, then asks ``planning.adaptive``.

Only the numbers of the model come out of this; none is a measurement.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from asymcheck.planning.adaptive import Adaptive
from asymcheck.planning.contention import Contention
from asymcheck.planning.plan import FREE, Gate, IdleProportional, PartitionPlan, Uniform, Whole
from asymcheck.planning.windows import Window, total_s
from asymcheck_lab.errors import UsageError

PolicyName = Literal["free", "gate", "proportional", "equal", "adaptive"]

POLICIES: tuple[PolicyName, ...] = ("free", "gate", "proportional", "equal", "adaptive")

GB = 1e9


@dataclass(frozen=True, slots=True)
class Slot:
    """One layer in one pass.

    Attributes:
        phase: Which pass.
        compute_s: Of the layer.
        comm_s: Traffic that goes on meanwhile, alone on its link.
    """

    phase: Literal["forward", "backward"]
    compute_s: float
    comm_s: float

    @property
    def window(self) -> Window:
        """As a profile sees it when nothing is copied."""
        return Window(self.phase, max(self.compute_s, self.comm_s), self.comm_s)


@dataclass(frozen=True, slots=True)
class Load:
    """A step and what is to be copied behind it.

    Attributes:
        lazy_bytes: R.
        bandwidth_bytes_per_s: B.
        comm_ratio: g/c, a layer's gather over its forward computation. Reduce-scatter takes as
            long as the gather, backward computes twice as long as forward.
        shared: Whether traffic and copy use one link.
        layers: How many.
        step_s: Computation of forward and backward.
    """

    lazy_bytes: int
    bandwidth_bytes_per_s: float
    comm_ratio: float
    shared: bool
    layers: int = 64
    step_s: float = 1.04

    def __post_init__(self) -> None:
        if self.layers < 2 or self.lazy_bytes < 0 or not self.comm_ratio >= 0.0:
            raise UsageError(
                "load: expected at least 2 layers, 0 bytes and a ratio of 0, found "
                f"{self.layers}, {self.lazy_bytes} and {self.comm_ratio}"
            )
        if not (self.step_s > 0.0 and self.bandwidth_bytes_per_s >= 1.0):
            raise UsageError(
                "load: expected a step longer than 0 s and at least 1 byte/s, found "
                f"{self.step_s} and {self.bandwidth_bytes_per_s}"
            )

    def slots(self, jitter: float = 0.0, seed: int = 0) -> tuple[Slot, ...]:
        """The step; with jitter, computation differs by up to that part, at random.

        The last layer stays gathered from forward to backward, so that neither pass fetches it
        while it computes; nothing is reduced yet while it computes backward.
        """
        chance = random.Random(seed)
        compute_s = self.step_s / (3 * self.layers)
        gather_s = self.comm_ratio * compute_s
        last = self.layers - 1
        forward = [
            Slot("forward", compute_s, gather_s if i < last else 0.0) for i in range(self.layers)
        ]
        backward = [
            Slot("backward", 2 * compute_s, gather_s * ((i > 0) + (i < last)))
            for i in reversed(range(self.layers))
        ]
        return tuple(
            replace(s, compute_s=s.compute_s * (1 + chance.uniform(-jitter, jitter)))
            for s in forward + backward
        )


class Outcome(NamedTuple):
    """What one checkpoint costs a step.

    Attributes:
        stall_s: The update waits.
        slowdown_s: Forward and backward take longer.
        overhead: Both, as a part of the step without a checkpoint.
        slots: Of each slot ``(seconds longer, seconds copied while idle, seconds copied while
            traffic was under way)``.
    """

    stall_s: float
    slowdown_s: float
    overhead: float
    slots: tuple[tuple[float, float, float], ...]


@dataclass(frozen=True, slots=True)
class _Rule:
    """When the copy may go on.

    Attributes:
        plan: How far it may get in which slot.
        waits: Whether it begins only while no traffic is under way.
        runs_through: Whether it goes on to the bound once it has begun.
        gate: Its deadline lets the copy go.
    """

    plan: PartitionPlan
    waits: bool = True
    runs_through: bool = False
    gate: Gate = FREE


def simulate(load: Load, policy: PolicyName, *, jitter: float = 0.0, seed: int = 0) -> Outcome:
    """Run one step with one checkpoint.

    Args:
        load: The step.
        policy: When the copy goes on.
        jitter: As in ``Load.slots``; plans are made for the step without it.
        seed: Of the jitter.
    """
    windows = tuple(slot.window for slot in load.slots())
    return _run(load, load.slots(jitter, seed), _rule_of(policy, load, windows))


def _rule_of(policy: PolicyName, load: Load, windows: Sequence[Window]) -> _Rule:
    size, rate = load.lazy_bytes, load.bandwidth_bytes_per_s
    whole = Whole().divide(size, windows, rate)
    if policy == "free":
        return _Rule(whole, waits=False)
    if policy == "gate":
        return _Rule(whole)
    if policy == "proportional":
        return _Rule(IdleProportional().divide(size, windows, rate))
    if policy == "equal":
        return _Rule(Uniform().divide(size, windows, rate), runs_through=True)
    decision = Adaptive().decide(size, windows, rate, measure(load))
    return _Rule(decision.plan, waits=decision.gate.hold == "windows", gate=decision.gate)


def measure(load: Load) -> Contention:
    """κ as two steps show it: one copies while the link is idle only, one all the time."""
    endless = replace(load, lazy_bytes=int(2 * load.step_s * load.bandwidth_bytes_per_s))
    slots = load.slots()
    windows = tuple(slot.window for slot in slots)
    found = Contention()
    for policy in ("gate", "free"):
        outcome = _run(endless, slots, _rule_of(policy, endless, windows))
        for window, (longer_s, idle_s, busy_s) in zip(windows, outcome.slots, strict=True):
            here_s = window.duration_s
            if policy == "gate":
                found = found.add(
                    window.phase, with_s=here_s + longer_s, without_s=here_s, copied_s=idle_s
                )
            else:
                with_s = here_s + longer_s - found.kappa(window.phase) * idle_s
                found = found.add("collective", with_s=with_s, without_s=here_s, copied_s=busy_s)
    return found


def _run(load: Load, slots: Sequence[Slot], rule: _Rule) -> Outcome:
    whole_s = load.lazy_bytes / load.bandwidth_bytes_per_s
    planned_left_s = total_s(rule.plan.windows)
    left_s = goal_s = whole_s
    running = late = False
    rows: list[tuple[float, float, float]] = []
    for i, slot in enumerate(slots):
        bound_left_s = whole_s - rule.plan.bounds[i] / load.bandwidth_bytes_per_s
        planned_s = rule.plan.windows[i].duration_s
        compute_s, comm_s = slot.compute_s, slot.comm_s
        clock_s = idle_s = busy_s = 0.0
        while compute_s > 0.0 or comm_s > 0.0:
            time_left_s = planned_left_s - min(clock_s, planned_s)
            late = late or rule.gate.is_late(left_s, time_left_s)
            busy = comm_s > 0.0
            if not busy or late or not rule.waits:
                goal_s = 0.0 if late or not rule.waits else bound_left_s
                running = left_s > goal_s
            copying = left_s > goal_s and (running or not busy)
            pace = 0.5 if busy and copying and load.shared else 1.0
            until = [t for t in (compute_s, comm_s / pace) if t > 0.0]
            if copying:
                until.append((left_s - goal_s) / pace)
            elif rule.gate.deadline_margin is not None and left_s > 0.0 and not late:
                strikes_s = time_left_s - left_s / (1.0 - rule.gate.deadline_margin)
                until.append(max(strikes_s, 1e-6))
            spell_s = min(until)
            clock_s += spell_s
            compute_s = _less(compute_s, spell_s)
            comm_s = _less(comm_s, spell_s * pace)
            if copying:
                left_s = max(goal_s, _less(left_s, spell_s * pace))
                busy_s += spell_s if busy else 0.0
                idle_s += 0.0 if busy else spell_s
            running = running and rule.runs_through and left_s > goal_s
        planned_left_s -= planned_s
        rows.append((clock_s - max(slot.compute_s, slot.comm_s), idle_s, busy_s))
    base_s = math.fsum(max(s.compute_s, s.comm_s) for s in slots)
    slowdown_s = math.fsum(row[0] for row in rows)
    return Outcome(left_s, slowdown_s, (left_s + slowdown_s) / base_s, tuple(rows))


def _less(amount: float, by: float) -> float:
    """The difference, with what rounding leaves taken for nothing."""
    left = amount - by
    return left if left > 1e-12 * (1.0 + amount) else 0.0


class Row(NamedTuple):
    """One load under every policy; overheads of one checkpoint as parts of a step."""

    load: Load
    overheads: dict[str, float]


LOADS = tuple(
    Load(round(size * GB), rate * GB, ratio, shared)
    for size, rate, ratio, shared in (
        (5, 25, 0.3, True),
        (5, 25, 0.6, True),
        (10, 25, 0.6, True),
        (10, 25, 0.9, True),
        (10, 25, 0.6, False),
        (10, 25, 0.9, False),
        (10, 12, 0.6, False),
        (10, 3, 0.6, True),
    )
)
"""5 GB are 3.3 billion parameters' optimizer state on 8 ranks; 3 GB/s is pageable memory."""


def table(loads: Sequence[Load] = LOADS) -> list[Row]:
    """Every load under every policy, in under a second for the loads given."""
    return [
        Row(load, {policy: simulate(load, policy).overhead for policy in POLICIES})
        for load in loads
    ]


def render(rows: Sequence[Row]) -> str:
    """The rows as Markdown; overheads in percent of a step."""
    lines = [
        "| R, GB | B, GB/s | g/c | shared link | " + " | ".join(POLICIES) + " |",
        "| ---: | ---: | ---: | --- |" + " ---: |" * len(POLICIES),
    ]
    for load, overheads in rows:
        cells = [
            f"{load.lazy_bytes / GB:g}",
            f"{load.bandwidth_bytes_per_s / GB:g}",
            f"{load.comm_ratio:g}",
            "yes" if load.shared else "no",
            *(f"{100 * overheads[policy]:.1f}" for policy in POLICIES),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
