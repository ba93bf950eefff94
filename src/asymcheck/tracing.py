"""A trace: one line of JSON for each durable checkpoint, with all that explains it.

``Tracer`` writes it beside the training, ``read_trace`` reads it again. Times in a trace are
seconds since the boundary of the step, sizes are bytes. No torch here: traces are looked at on
any machine.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import (
    Any,
    Literal,
    NamedTuple,
    Protocol,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from asymcheck.encoding import GroupReport
from asymcheck.errors import CorruptCheckpoint, NoCheckpoint, ObjectNotFound, PlanError
from asymcheck.events import Sink, Span, Stage
from asymcheck.handles import SaveReport
from asymcheck.planning.adaptive import Adaptive, Decision
from asymcheck.planning.contention import PHASES, Contention, Kappa, Phase
from asymcheck.planning.plan import (
    UNKNOWN,
    Gate,
    IdleProportional,
    Partitioner,
    PartitionPlan,
    Uniform,
    Whole,
)
from asymcheck.planning.strategies import Strategy
from asymcheck.planning.windows import Window
from asymcheck.tiering import TierState

T = TypeVar("T")

PARTITIONERS: Mapping[str, Partitioner] = {
    "whole": Whole(),
    "uniform": Uniform(),
    "idle-proportional": IdleProportional(),
    "adaptive": Adaptive(),
}
"""Every partitioner of the library, by the name that a trace gives it."""

_VERSION = 1
_HEAD = b'{"asymcheck_trace":'
_KEPT = 64  # steps whose spans wait for their checkpoint to become durable
_TAIL_BYTES = 1 << 22
_DIGITS = 7
_MOST = 1e18  # of any number in a trace; what is larger was not written by a tracer


# --- writing ----------------------------------------------------------------


class Part(Protocol):
    """See ``device.pacing.Part``."""

    window: int
    start_s: float
    stop_s: float
    nbytes: int


class Paced(Protocol):
    """A copy that was planned; ``device.pacing.Pace`` is one."""

    @property
    def decision(self) -> Decision:
        """The plan, and why."""
        ...

    @property
    def contention(self) -> Contention:
        """κ when it was made."""
        ...

    @property
    def copy_bytes_per_s(self) -> float:
        """Bandwidth when it was made, 0 where none was known."""
        ...

    @property
    def opened(self) -> Sequence[tuple[float, Phase]]:
        """Start and phase of each window, on ``time.perf_counter``'s clock."""
        ...

    @property
    def parts(self) -> Sequence[Part]:
        """What was copied when."""
        ...


@dataclass
class _Saving:
    """What is known of a step until its checkpoint is durable.

    Attributes:
        boundary_s: On ``time.perf_counter``'s clock.
        facts: What is known from the boundary on.
        pace: How the copy goes, where it was planned.
        spans: So far.
        report: Once it is durable.
    """

    boundary_s: float = 0.0
    facts: Mapping[str, Any] = field(default_factory=dict)
    pace: Paced | None = None
    spans: list[Span] = field(default_factory=list)
    report: SaveReport | None = None


class Tracer:
    """A sink that writes a line when a checkpoint is durable, and passes every span on.

    Any thread may call it. It never raises: what keeps it from writing is said once, by
    ``complaints``, and from then on it only passes spans on.

    Args:
        path: Absolute. Appended to; made where it is missing, with its folders.
        sink: Receives the spans too.
        strategy: Whose checkpoints these are.
    """

    def __init__(self, path: Path, sink: Sink, strategy: Strategy) -> None:
        self._path, self._sink, self._strategy = path, sink, strategy
        self._lock = threading.Lock()
        self._savings: dict[int, _Saving] = {}
        self._complaints: list[str] = []
        self._is_on = True
        self.cadence = ""
        """How often is saved, and why: goes into the checkpoints that begin from now on."""
        try:
            _prepare(path)
        except OSError as failure:
            self._turn_off(failure)

    def __call__(self, span: Span) -> None:
        """Take one span."""
        self._sink(span)
        if self._is_on and span.stage not in (Stage.RESTORE, Stage.PROMOTE):
            with self._lock:
                saving = self._saving(span.step)
                saving.spans.append(span)
            if span.stage is Stage.STALL:
                self._write(span.step, saving)

    def begin(self, step: int, boundary_s: float, *, lazy_bytes: int, eager_bytes: int) -> None:
        """A checkpoint is captured."""
        with self._lock:
            saving = self._saving(step)
            saving.boundary_s, saving.report, saving.pace = boundary_s, None, None
            saving.facts = {
                "lazy_bytes": lazy_bytes,
                "eager_bytes": eager_bytes,
                "cadence": self.cadence,
            }

    def plan(self, step: int, pace: Paced) -> None:
        """Its copy was planned."""
        with self._lock:
            self._saving(step).pace = pace

    def durable(self, report: SaveReport) -> None:
        """It is durable. The line is written now, or once the training thread goes on."""
        with self._lock:
            saving = self._saving(report.step)
            saving.report = report
        self._write(report.step, saving)

    def complaints(self) -> list[str]:
        """What the user should know, once."""
        found, self._complaints = self._complaints, []
        return found

    def _saving(self, step: int) -> _Saving:
        if step not in self._savings:
            while len(self._savings) >= _KEPT:  # failed, dropped or skipped ones
                del self._savings[next(iter(self._savings))]
            self._savings[step] = _Saving()
        return self._savings[step]

    def _write(self, step: int, saving: _Saving) -> None:
        with self._lock:
            spans = [s for s in saving.spans if s.start_s >= saving.boundary_s]
            stalled = any(s.stage is Stage.STALL for s in spans)
            if saving.report is None or not stalled or self._savings.get(step) is not saving:
                return
            del self._savings[step]
        try:
            _append(self._path, _line(self._strategy, saving, spans, saving.report))
        except (OSError, ValueError) as failure:
            self._turn_off(failure)

    def _turn_off(self, failure: Exception) -> None:
        with self._lock:
            was_on, self._is_on = self._is_on, False
            self._savings.clear()
        if was_on:
            why = (failure.strerror if isinstance(failure, OSError) else None) or str(failure)
            self._complaints.append(
                f"trace {self._path}: {why}: nothing is traced from now on, training goes on; "
                f"free the place or name another file"
            )


def _prepare(path: Path) -> None:
    """Make the file, or see that it is a trace; a line that was never whole goes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
    try:
        size = os.fstat(fd).st_size
        if size and os.pread(fd, len(_HEAD), 0) != _HEAD:
            raise OSError(errno.EEXIST, "expected a trace or no file, found something else")
        tail = os.pread(fd, _TAIL_BYTES, max(0, size - _TAIL_BYTES))
        if tail and not tail.endswith(b"\n"):
            os.ftruncate(fd, size - len(tail) + tail.rfind(b"\n") + 1)
    finally:
        os.close(fd)


def _append(path: Path, line: bytes) -> None:
    """One write, and no part of the line where it does not fit."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
    try:
        size = os.fstat(fd).st_size
        if os.write(fd, line) != len(line):
            os.ftruncate(fd, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(fd)


def _line(strategy: Strategy, saving: _Saving, spans: list[Span], report: SaveReport) -> bytes:
    zero_s = saving.boundary_s

    def at(seconds: float) -> float:
        return round(seconds - zero_s, _DIGITS)

    told: dict[str, Any] = {
        "asymcheck_trace": _VERSION,
        **saving.facts,
        "capture": strategy.capture,
        "persist": strategy.persist,
        "partitioner": name_of(strategy.partitioner),
        "report": {**asdict(report), "groups": [g._asdict() for g in report.groups]},
        "spans": [
            [s.stage, at(s.start_s), round(s.duration_s, _DIGITS), s.moved_bytes, s.error]
            for s in sorted(spans, key=lambda s: s.start_s)
        ],
    }
    if saving.pace is not None:
        pace, decision = saving.pace, saving.pace.decision
        told["plan"] = {
            "windows": [asdict(w) for w in decision.plan.windows],
            "bounds": decision.plan.bounds,
            "gate": asdict(decision.gate),
            "chunk_bytes": decision.chunk_bytes,
            "gain_s": decision.gain_s,
            "why": decision.why,
            "copy_bytes_per_s": pace.copy_bytes_per_s,
            "kappa": asdict(pace.contention),
        }
        told["opened"] = [[at(start_s), phase] for start_s, phase in list(pace.opened)]
        told["parts"] = [
            [p.window, at(p.start_s), at(p.stop_s), p.nbytes] for p in list(pace.parts)
        ]
    return json.dumps(told, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"


def name_of(partitioner: Partitioner | None) -> str:
    """What a trace calls it: ``none`` where the copy runs freely, the class of a foreign one."""
    if partitioner is None:
        return "none"
    for name, known in PARTITIONERS.items():
        if type(known) is type(partitioner):
            return name
    return type(partitioner).__name__


# --- reading ----------------------------------------------------------------


class TracedSpan(NamedTuple):
    """A ``Span``, in seconds since the boundary."""

    stage: str
    start_s: float
    duration_s: float
    nbytes: int
    error: str

    @property
    def stop_s(self) -> float:
        """Where it ends."""
        return self.start_s + self.duration_s


class TracedPart(NamedTuple):
    """A ``device.pacing.Part``, in seconds since the boundary."""

    window: int
    start_s: float
    stop_s: float
    nbytes: int


class Opened(NamedTuple):
    """A window as it came, in seconds since the boundary."""

    start_s: float
    phase: Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One durable checkpoint.

    Attributes:
        lazy_bytes: R.
        eager_bytes: Copied at the boundary.
        capture: As in ``Strategy``.
        persist: As in ``Strategy``.
        partitioner: See ``name_of``.
        cadence: How often was saved then, and why; empty in an older trace.
        decision: The plan of the copy; ``None`` where there was none to make.
        copy_bytes_per_s: Bandwidth when it was made, 0 where none was known.
        contention: κ when it was made.
        opened: The windows of this step, as they came, until the checkpoint was durable.
        parts: The copy of this step, as it went.
        spans: By start.
        report: What the trainer was told.
    """

    lazy_bytes: int
    eager_bytes: int
    capture: Literal["lazy", "device-copy", "profiled", "blocking"]
    persist: Literal["behind", "before"]
    partitioner: str
    cadence: str = ""
    decision: Decision | None = None
    copy_bytes_per_s: float = 0.0
    contention: Contention = UNKNOWN
    opened: tuple[Opened, ...] = ()
    parts: tuple[TracedPart, ...] = ()
    spans: tuple[TracedSpan, ...]
    report: SaveReport

    @property
    def step(self) -> int:
        """Of the checkpoint."""
        return self.report.step

    def of(self, stage: Stage) -> list[TracedSpan]:
        """Its spans of one stage."""
        return [span for span in self.spans if span.stage == stage]


def read_trace(path: Path) -> list[Trace]:
    """Every checkpoint in a trace, in the order in which they became durable.

    A last line without an end is being written, or never was whole; it is left out.

    Raises:
        ObjectNotFound: It cannot be read.
        CorruptCheckpoint: A line is not what a tracer writes; names it.
        NoCheckpoint: Nothing is in it yet.
    """
    try:
        data = path.read_bytes()
    except OSError as failure:
        raise ObjectNotFound(
            f"{path}: {failure.strerror}: expected a trace, which Checkpointer(…, trace=…) and "
            f"asymlab train write"
        ) from failure
    found = [
        _parse(f"{path}, line {number}", line)
        for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), 1)
    ]
    if not found:
        raise NoCheckpoint(f"{path}: no checkpoint is in it: one is written when it is durable")
    return found


def choose_step(path: Path, step: int | None) -> Trace:
    """The latest checkpoint of a step in a trace; without one, the latest that training went on
    behind, as it does not at the end of a run.

    Raises:
        NoCheckpoint: The step is not there; names the nearest. Else as ``read_trace``.
    """
    found = read_trace(path)
    fitting = [trace for trace in found if step in (None, trace.step)]
    if step is not None and not fitting:
        steps = sorted({trace.step for trace in found})
        nearest = min(steps, key=lambda one: abs(one - step))
        raise NoCheckpoint(
            f"{path}: expected step {step}, found {len(steps)} from {steps[0]} to {steps[-1]}; "
            f"the nearest is {nearest}"
        )
    usual = [trace for trace in fitting if len(trace.opened) > 1]
    return (usual or fitting)[-1]


def _parse(where: str, line: bytes) -> Trace:
    try:
        told = json.loads(line)
        if told["asymcheck_trace"] != _VERSION:
            raise ValueError(f"version {told['asymcheck_trace']!r:.40}")
        more: dict[str, Any] = {}
        if "plan" in told:
            plan = told["plan"]
            windows = tuple(_build(Window, w) for w in plan["windows"])
            bounds = tuple(_plain(b, int) for b in plan["bounds"])
            more = {
                "decision": _build(
                    Decision,
                    plan,
                    plan=PartitionPlan(bounds, windows, _plain(told["lazy_bytes"], int)),
                    gate=Gate(plan["gate"]["hold"], _maybe(plan["gate"]["deadline_margin"])),
                ),
                "copy_bytes_per_s": _plain(plan["copy_bytes_per_s"], float),
                "contention": Contention(*(_build(Kappa, plan["kappa"][p]) for p in PHASES)),
                "opened": tuple(_row(Opened, row) for row in told["opened"]),
                "parts": tuple(_row(TracedPart, row) for row in told["parts"]),
            }
        groups = tuple(_build(GroupReport, g) for g in told["report"]["groups"])
        tiers = tuple(_build(TierState, t) for t in told["report"].get("tiers", ()))
        return _build(
            Trace,
            told,
            spans=tuple(_row(TracedSpan, row) for row in told["spans"]),
            report=_build(SaveReport, told["report"], groups=groups, tiers=tiers),
            **more,
        )
    except (LookupError, ValueError, TypeError, AttributeError, RecursionError, PlanError) as bad:
        raise CorruptCheckpoint(
            where,
            f"expected a line of a trace, found {line[:60].decode('utf-8', 'replace')!r} "
            f"({type(bad).__name__}: {bad!s:.200}); take the line out",
        ) from None


@functools.cache
def _hints(kind: Callable[..., object]) -> Mapping[str, Any]:
    return get_type_hints(kind)


def _build(kind: Callable[..., T], told: Mapping[str, Any], **given: Any) -> T:  # noqa: ANN401
    """A value out of JSON; ``given`` are the fields that are no plain values."""
    for name, hint in _hints(kind).items():
        if name in told and name not in given:
            if get_origin(hint) is Literal:
                given[name] = _one_of(told[name], get_args(hint))
            elif hint in (int, float, str, bool):
                given[name] = _plain(told[name], hint)
    return kind(**given)


def _row(kind: Callable[..., T], row: Sequence[Any]) -> T:
    """A named tuple out of JSON."""
    return _build(kind, dict(zip(_hints(kind), row, strict=True)))


def _maybe(value: Any) -> Any:  # noqa: ANN401
    return None if value is None else _plain(value, float)


def _plain(value: Any, kind: type) -> Any:  # noqa: ANN401
    """A text, a number or a truth of the kind that is expected."""
    if kind in (str, bool):
        fits = isinstance(value, kind)
    else:
        is_number = isinstance(value, int | (float if kind is float else int))
        fits = is_number and not isinstance(value, bool)
        fits = fits and -_MOST < value < _MOST
    if not fits:
        raise TypeError(f"expected {kind.__name__}, found {value!r:.40}")
    return value


def _one_of(value: Any, known: Sequence[Any]) -> Any:  # noqa: ANN401
    if not isinstance(value, str) or value not in known:
        raise TypeError(f"expected one of {known}, found {value!r:.40}")
    return value
