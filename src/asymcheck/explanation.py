"""What a trace says of one checkpoint: lanes on one time axis, and what bounded it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate, pairwise
from typing import NamedTuple

from asymcheck.events import Stage
from asymcheck.planning.adaptive import Decision, decide
from asymcheck.planning.contention import PHASES
from asymcheck.planning.plan import Prediction, predict
from asymcheck.tracing import PARTITIONERS, Trace, TracedSpan

KINDS = {
    "forward": "forward pass, by windows",
    "backward": "backward pass, by windows",
    "copy": "copy behind the training",
    "wait": "training waits",
    "encode": "encoding",
    "write": "writing a batch",
    "commit": "commit",
    "retain": "retention",
}
"""What a bar may be, in words."""


class Bar(NamedTuple):
    """A piece of work, in seconds since the boundary."""

    kind: str
    start_s: float
    stop_s: float
    label: str = ""


class Lane(NamedTuple):
    """Bars that stand beside each other, by start."""

    name: str
    bars: tuple[Bar, ...]


def lanes(trace: Trace) -> list[Lane]:
    """The picture of a checkpoint, from the training at its top to the commit."""
    copies = [Bar("copy", p.start_s, p.stop_s, _window_name(p.window)) for p in trace.parts]
    found = [
        Lane("windows", tuple(windows(trace))),
        Lane("copy", tuple(copies or _bars(trace, "copy", Stage.COPY))),
        Lane("stall", tuple(stalls(trace))),
        Lane("encode", tuple(_bars(trace, "encode", Stage.ENCODE))),
        Lane("write", tuple(_bars(trace, "write", Stage.WRITE))),
        Lane(
            "commit",
            (*_bars(trace, "commit", Stage.COMMIT), *_bars(trace, "retain", Stage.RETAIN)),
        ),
    ]
    return [lane for lane in found if lane.bars]


def windows(trace: Trace) -> Iterator[Bar]:
    """The windows as they came; those of the plan where nobody saw them come."""
    ends = [s.start_s for s in trace.of(Stage.FENCE)]
    if trace.opened and ends:
        edges = [*(o.start_s for o in trace.opened), max(ends[0], trace.opened[-1].start_s)]
        phases = [o.phase for o in trace.opened]
    elif trace.decision is not None:
        first_s = max((s.stop_s for s in trace.of(Stage.STALL)), default=0.0)
        planned = trace.decision.plan.windows
        edges = list(accumulate((w.duration_s for w in planned), initial=first_s))
        phases = [w.phase for w in planned]
    else:
        return
    for i, (phase, (start_s, stop_s)) in enumerate(zip(phases, pairwise(edges), strict=True)):
        yield Bar(phase, start_s, stop_s, str(i))


def stalls(trace: Trace) -> Iterator[Bar]:
    """When training waited for the checkpoint."""
    if trace.persist == "before":
        yield Bar("wait", 0.0, trace.report.durable_s, "until it is durable")
        return
    yield from (Bar("wait", s.start_s, s.stop_s, "boundary") for s in trace.of(Stage.STALL))
    yield from (Bar("wait", s.start_s, s.stop_s, "fence") for s in trace.of(Stage.FENCE))


def stall_s(trace: Trace) -> float:
    """Seconds that training waited."""
    return sum(bar.stop_s - bar.start_s for bar in stalls(trace))


def _bars(trace: Trace, kind: str, stage: Stage) -> Iterator[Bar]:
    for span in trace.of(stage):
        yield Bar(kind, span.start_s, span.stop_s)


def _window_name(window: int) -> str:
    return str(window) if window >= 0 else "fence"


# --- what bounded it --------------------------------------------------------


class Share(NamedTuple):
    """A part of the time until a checkpoint was durable, and who had it."""

    seconds: float
    why: str


def shares(trace: Trace) -> list[Share]:
    """The time from the boundary until it was durable, divided; in order, sums to all of it.

    Until the persister began nothing was written. From then until the state was sealed the copy
    or the training was waited for, whatever was written meanwhile. After that encoder and store
    had it, and in the end the commit.
    """
    whole_s = trace.report.durable_s
    flushes, stalled = trace.of(Stage.FLUSH), trace.of(Stage.STALL)
    start_s = min(whole_s, max(0.0, flushes[0].start_s)) if flushes else whole_s
    stop_s = min(whole_s, max(start_s, flushes[-1].stop_s)) if flushes else whole_s
    boundary_s = min(start_s, max(0.0, stalled[0].stop_s)) if stalled else 0.0
    if trace.report.tier == "memory":
        start_s = boundary_s  # no persister has a part in it
    sealed_s = min(stop_s, max(start_s, _sealed_s(trace)))
    copied_s = min(sealed_s, max([start_s, *(s.stop_s for s in trace.of(Stage.COPY))]))
    encoding_s = _covered_s(trace.of(Stage.ENCODE), sealed_s, stop_s)
    return [
        Share(boundary_s, "at the boundary, while training waited"),
        Share(start_s - boundary_s, "until the persister began: busy before, or not yet awake"),
        Share(copied_s - start_s, "until the state was copied, pauses included"),
        Share(sealed_s - copied_s, "until the next update, which seals what was copied"),
        Share(encoding_s, "of encoding what was left"),
        Share(stop_s - sealed_s - encoding_s, "of writing what was left, sync included"),
        Share(whole_s - stop_s, "of the commit"),
    ]


def _sealed_s(trace: Trace) -> float:
    """When the state was complete and known to be of one instant."""
    copies = trace.of(Stage.COPY)
    found = [*copies, *trace.of(Stage.FENCE)] if copies else trace.of(Stage.CAPTURE)
    return max((span.stop_s for span in found), default=0.0)


def _covered_s(spans: Iterable[TracedSpan], low_s: float, high_s: float) -> float:
    """For how long at least one of them runs, between two times."""
    total_s, until_s = 0.0, low_s
    for span in spans:
        start_s, stop_s = max(span.start_s, until_s), min(span.stop_s, high_s)
        if stop_s > start_s:
            total_s += stop_s - start_s
            until_s = stop_s
    return total_s


def what_bounded(trace: Trace) -> str:
    """One sentence: where the time until it was durable went."""
    found = shares(trace)
    longest = max(found, key=lambda share: share.seconds)
    whole_s = trace.report.durable_s
    rest = "; ".join(
        f"{1000 * s.seconds:.1f} ms {s.why}"
        for s in found
        if s is not longest and s.seconds >= 0.01 * whole_s
    )
    return (
        f"Durable {1000 * whole_s:.1f} ms after the boundary. What took longest: "
        f"{1000 * longest.seconds:.1f} ms {longest.why}" + (f"; besides {rest}." if rest else ".")
    )


_HOW = {
    "lazy": "runs freely",
    "device-copy": "is of a clone, and runs freely",
    "blocking": "blocks training",
}


def why_so_planned(trace: Trace) -> str:
    """One or two sentences: why the copy was planned as it was."""
    decision = trace.decision
    if decision is None:
        how = "blocking" if trace.capture == "blocking" else trace.report.capture
        return f"There was nothing to plan: the copy {_HOW[how]}."
    held = "runs freely" if decision.plan.free_running else "is held to its windows"
    kappas = []
    for phase in PHASES:
        interval = trace.contention.interval(phase)
        if interval is not None:
            kappas.append(f"{phase} {interval.mid:.2f} [{interval.low:.2f}, {interval.high:.2f}]")
    known = f"κ with its 95 % interval: {', '.join(kappas)}" if kappas else "κ is not known yet"
    gain = f"Modelled gain of holding it back: {1000 * decision.gain_s:.2f} ms a checkpoint; "
    return f"The copy {held} ({trace.partitioner}): {decision.why}. {gain}{known}."


# --- what other partitioners would do ---------------------------------------


class Alternative(NamedTuple):
    """A partitioner with the windows of this step.

    Attributes:
        name: See ``tracing.PARTITIONERS``.
        decision: Its plan; the recorded one where it is the one that was used.
        prediction: What that costs by the fluid model.
        used: Whether this is what the checkpoint was copied by.
    """

    name: str
    decision: Decision
    prediction: Prediction
    used: bool


def alternatives(trace: Trace) -> list[Alternative]:
    """Every partitioner of the library, and a foreign one that was used; none where nothing was
    planned, or nothing measured by then.
    """
    recorded, bandwidth = trace.decision, trace.copy_bytes_per_s
    if recorded is None or not recorded.plan.windows or not bandwidth >= 1.0:
        return []
    measured, r = recorded.plan.windows, trace.lazy_bytes
    made = {
        name: decide(partitioner, r, measured, bandwidth, trace.contention)
        for name, partitioner in PARTITIONERS.items()
    }
    made[trace.partitioner] = recorded
    return [
        Alternative(
            name,
            made_by,
            predict(made_by.plan, measured, bandwidth, made_by.gate, trace.contention),
            name == trace.partitioner,
        )
        for name, made_by in made.items()
    ]
