"""Trainings that are compared bit for bit: one of them is killed in the middle of a save.

Four trainings run one after the other, each in a process of its own, so that the kill is a
real one: without checkpoints; with checkpoints; with checkpoints and killed; and that one
started again. The third loses its persister after half of the bytes of one pack were written,
starts another, and is then killed together with that one at the same place.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from asymcheck.handover import left_over
from asymcheck.storage.local import TEMP_FOLDER
from asymcheck.storage.repository import open_repository
from asymcheck.storage.store import open_store
from asymcheck_lab import rundir
from asymcheck_lab.errors import LabError, RunError, UsageError
from asymcheck_lab.killer import Killer, stopping_url
from asymcheck_lab.proof import different_entries, different_losses
from asymcheck_lab.record import Result, StepRecord, median, read_log, read_result

WITHOUT = "without-checkpoints"
WHOLE = "uninterrupted"
CUT = "interrupted"

_POLL_S = 0.1
_CHILD_LIMIT_S = 600.0
_TAIL_LINES = 15

# 1.48 makes a standard deviation of the median distance, 1.25 that of a median of the mean's.
_MEDIAN_DISTANCE_TO_ERROR = 1.48 * 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What the demo trains, and when it kills.

    Attributes:
        folder: Where everything goes.
        size: Size of the model.
        data: A UTF-8 file, ``None`` for the text that ships with Python.
        steps: Updates of each training.
        every: Steps between two checkpoints.
        kill_at: The save of this step is cut off in its middle.
        strategy: Name of the library's strategy.
        seed: See ``TrainOptions``.
        threads: See ``TrainOptions``. One leaves the other core to the writing, and is not
            slowed down out of proportion by other load.
    """

    folder: Path = Path("runs/demo")
    size: str = "demo"
    data: Path | None = None
    steps: int = 60
    every: int = 10
    kill_at: int = 30
    strategy: str = "asymcheck"
    seed: int = 0
    threads: int = 1

    def __post_init__(self) -> None:
        if self.kill_at % self.every or not 2 * self.every <= self.kill_at <= self.steps:
            raise UsageError(
                f"kill-at: expected a multiple of every={self.every} from {2 * self.every} to "
                f"steps={self.steps}, so that a checkpoint stands before it, found {self.kill_at}"
            )


class Progress:
    """Is told how the demo goes; this one does nothing."""

    def begun(self, title: str) -> None:
        """A process was started."""

    def stepped(self, record: StepRecord) -> None:
        """It has done one update."""

    def ended(self, how: str) -> None:
        """It is over."""


@dataclass(frozen=True, slots=True)
class Trace:
    """What a training that came to its end left.

    Attributes:
        records: Its steps, in the order in which they were done.
        result: Its result.
    """

    records: Sequence[StepRecord]
    result: Result


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything that the verdict stands on.

    Attributes:
        options: What was asked for.
        without: The training without checkpoints.
        whole: The uninterrupted one with checkpoints.
        killed: Steps of the process that was killed.
        exit_code: Its exit code, negative for a signal.
        persisters: Numbers of its persister processes that were killed.
        half_written: Bytes that the killed save left without a name.
        slots: Slots that it left in shared memory.
        listed: Steps of the checkpoints that there were after the kill.
        resumed: The process that went on, from its restart to the end.
        left_over: Bytes without a name at the end.
        left_slots: Slots in shared memory at the end.
    """

    options: DemoOptions
    without: Trace
    whole: Trace
    killed: Sequence[StepRecord]
    exit_code: int
    persisters: Sequence[int]
    half_written: int
    slots: int
    listed: Sequence[int]
    resumed: Trace
    left_over: int
    left_slots: int


@dataclass(frozen=True, slots=True)
class Check:
    """One claim, and what speaks against it.

    Attributes:
        claim: What should hold.
        problems: Each difference found; empty when it holds.
    """

    claim: str
    problems: tuple[str, ...]


def gather(options: DemoOptions, progress: Progress) -> Evidence:
    """Run the four processes; blocks until they are done.

    Raises:
        LabError: The folder cannot be used, or a process did not do what it should.
    """
    rundir.renew(options.folder, [WITHOUT, WHOLE, CUT])
    without = _complete(options, progress, WITHOUT, "without checkpoints", ["--no-checkpoints"])
    whole = _complete(options, progress, WHOLE, "with checkpoints", [])
    root, killer = checkpoints_of(options.folder, CUT), Killer()
    exit_code = _child(
        options,
        progress,
        CUT,
        f"killed in the save of step {options.kill_at}",
        ["--root", stopping_url(root, options.kill_at)],
        output="output-killed.txt",
        each_poll=killer.look,
    )
    killed = _records(options.folder / CUT / rundir.LOG)
    repository = open_repository(open_store(str(root)))
    listed = [at.step for at in repository.lineage()]
    half_written, slots = _unnamed_bytes(root), len(left_over(repository.run))
    resumed = _complete(
        options, progress, CUT, "started again", [], already=len(killed), output="output.txt"
    )
    return Evidence(
        options=options,
        without=without,
        whole=whole,
        killed=killed,
        exit_code=exit_code,
        persisters=tuple(killer.persisters),
        slots=slots,
        left_slots=len(left_over(repository.run)),
        half_written=half_written,
        listed=listed,
        resumed=resumed,
        left_over=_unnamed_bytes(root),
    )


def judge(evidence: Evidence) -> list[Check]:
    """Hold the evidence against every claim."""
    options, whole, resumed = evidence.options, evidence.whole, evidence.resumed
    start = resumed.result.resumed_from
    newest = max(evidence.listed, default=0)
    later = range(start + 1, options.steps + 1)
    every_step = range(1, options.steps + 1)
    before = range(1, max((r.step for r in evidence.killed), default=0) + 1)
    pieces = len(whole.result.fingerprint)
    return [
        Check(
            f"a persister was killed in the middle of the save of step {options.kill_at} and "
            f"replaced; then trainer and persister were killed there, which left "
            f"{evidence.half_written} bytes half-written",
            _unless(
                evidence.exit_code == -signal.SIGKILL,
                f"expected an end by signal {signal.SIGKILL:d}, found exit code "
                f"{evidence.exit_code}",
            )
            + _unless(
                len(set(evidence.persisters)) == 2,  # the first and its replacement
                f"expected two killed persisters, found {list(evidence.persisters)}",
            )
            + _unless(
                evidence.half_written > 0,
                f"expected bytes of an unfinished pack, found {evidence.half_written}",
            ),
        ),
        Check(
            f"what it left half-written is not listed; step {options.kill_at - options.every} is",
            _unless(
                newest == options.kill_at - options.every,
                f"expected step {options.kill_at - options.every} as the newest, found "
                f"{list(evidence.listed)}",
            ),
        ),
        Check(
            f"it went on from step {options.kill_at}: the killed save was whole in shared memory "
            f"and the restart finished it, and cleaned up",
            _unless(
                start == options.kill_at, f"expected step {options.kill_at}, found step {start}"
            )
            + _unless(evidence.slots > 0, "expected a slot in shared memory, found none")
            + _unless(
                evidence.left_over == 0 and evidence.left_slots == 0,
                f"expected nothing to be left, found {evidence.left_over} bytes and "
                f"{evidence.left_slots} slots",
            ),
        ),
        Check(
            f"{len(later)} later losses are equal in every bit to the uninterrupted training",
            tuple(different_losses(whole.records, resumed.records, later))
            + tuple(different_losses(whole.records, evidence.killed, before)),
        ),
        Check(
            f"{pieces} pieces of the final state are equal in every bit: parameters, optimizer, "
            f"scheduler, data position, generators",
            tuple(different_entries(whole.result.fingerprint, resumed.result.fingerprint)),
        ),
        Check(
            "saving changes nothing: the training without checkpoints is equal in every bit too",
            tuple(different_losses(whole.records, evidence.without.records, every_step))
            + tuple(
                different_entries(whole.result.fingerprint, evidence.without.result.fingerprint)
            ),
        ),
    ]


@dataclass(frozen=True, slots=True)
class Cost:
    """What checkpoints took, from the uninterrupted training and the restart.

    Attributes:
        step_s: Median of a step without checkpoints.
        checkpoints: How many were saved.
        stall_s: Median of what the loop waited for one.
        stall_share: That, as a share of the time between two checkpoints.
        slowdown: See ``slowdown``.
        slowdown_error: How far off that may be.
        stored_bytes: Median size of one.
        restore_s: Seconds of the restore.
    """

    step_s: float
    checkpoints: int
    stall_s: float
    stall_share: float
    slowdown: float
    slowdown_error: float
    stored_bytes: int
    restore_s: float


def cost_of(evidence: Evidence) -> Cost:
    """Sum up what the trainings measured."""
    saved, every = evidence.whole.result.checkpoints, evidence.options.every
    step_s = median(r.seconds for r in evidence.without.records)
    stall_s = median(c.stall_s for c in saved)
    slower, error = slowdown(evidence.without.records, evidence.whole.records, every)
    return Cost(
        step_s=step_s,
        checkpoints=len(saved),
        stall_s=stall_s,
        stall_share=stall_s / (every * step_s),
        slowdown=slower,
        slowdown_error=error,
        stored_bytes=round(median(c.stored_bytes for c in saved)),
        restore_s=evidence.resumed.result.restore_s,
    )


def slowdown(
    plain: Sequence[StepRecord], saving: Sequence[StepRecord], every: int
) -> tuple[float, float]:
    """How much longer training takes with checkpoints, as a share; 0.02 is 2 %.

    Other load on the machine changes whole trainings by more than checkpoints do, so loops
    are not compared as they are. What saving costs comes back at the same places of each
    cycle of ``every`` steps: in the step that saves, and in those beside the writing. So each
    step is measured in medians of its own cycle, each place of the cycle by the median over
    all cycles, and the mean over the places is held against that of the training without
    checkpoints. The steps before the first save, which also warm up, are left out.

    A cost that more than half of a cycle's steps pay alike is not seen this way; the seconds
    of both loops stand in the report beside it.

    Returns:
        The share, and how far off it may be: two standard errors, from the median distance
        of the steps to their place's median.
    """
    without, without_error = _cycle_mean(plain, every)
    mean, error = _cycle_mean(saving, every)
    return mean / without - 1, 2 * (error**2 + without_error**2) ** 0.5


def _cycle_mean(records: Sequence[StepRecord], every: int) -> tuple[float, float]:
    """Mean of the places of a cycle, in medians of a cycle, and its standard error."""
    cycles: dict[int, list[StepRecord]] = {}
    for record in records:
        if record.step >= every:
            cycles.setdefault(record.step // every, []).append(record)
    places: dict[int, list[float]] = {}
    for cycle in cycles.values():
        if len(cycle) == every or len(cycles) == 1:  # the last one may have begun only
            middle_s = median(r.seconds for r in cycle)
            for record in cycle:
                places.setdefault(record.step % every, []).append(record.seconds / middle_s)
    middles = {place: median(found) for place, found in places.items()}
    distances = [abs(r - middles[place]) for place, found in places.items() for r in found]
    error = _MEDIAN_DISTANCE_TO_ERROR * median(distances) / len(distances) ** 0.5
    return sum(middles.values()) / len(middles), error


def write_report(folder: Path, evidence: Evidence, checks: Sequence[Check]) -> None:
    """Put numbers and verdict into the folder, as JSON.

    Raises:
        LabError: It cannot be written.
    """
    report = {
        "equal": not any(check.problems for check in checks),
        "checks": [asdict(check) for check in checks],
        "steps": evidence.options.steps,
        "killed_at": evidence.options.kill_at,
        "resumed_from": evidence.resumed.result.resumed_from,
        "cost": asdict(cost_of(evidence)),
        "loop_s_without_checkpoints": evidence.without.result.loop_s,
        "loop_s_with_checkpoints": evidence.whole.result.loop_s,
    }
    path = folder / rundir.REPORT
    try:
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    except OSError as failure:
        raise LabError(f"{path}: {failure.strerror}") from failure


def checkpoints_of(folder: Path, run: str) -> Path:
    """Where the checkpoints of a run lie."""
    return folder / run / rundir.CHECKPOINTS


def _unless(holds: bool, problem: str) -> tuple[str, ...]:
    return () if holds else (problem,)


def _unnamed_bytes(root: Path) -> int:
    temp = root / TEMP_FOLDER
    return sum(p.stat().st_size for p in temp.iterdir()) if temp.is_dir() else 0


def _records(log: Path) -> list[StepRecord]:
    return read_log(log) if log.exists() else []


def _complete(
    options: DemoOptions,
    progress: Progress,
    run: str,
    title: str,
    arguments: list[str],
    *,
    already: int = 0,
    output: str = "output.txt",
) -> Trace:
    """A process that must come to its end."""
    code = _child(options, progress, run, title, arguments, already=already, output=output)
    if code != 0:
        path = options.folder / run / output
        tail = path.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
        raise RunError(
            "\n".join([f"training {title!r} ended with exit code {code}; {path} ends:", *tail])
        )
    folder = options.folder / run
    return Trace(_records(folder / rundir.LOG)[already:], read_result(folder / rundir.RESULT))


def _child(
    options: DemoOptions,
    progress: Progress,
    run: str,
    title: str,
    arguments: list[str],
    *,
    already: int = 0,
    output: str,
    each_poll: Callable[[int], None] = lambda pid: None,
) -> int:
    """Run one training in a process of its own; returns its exit code."""
    folder = options.folder / run
    command = [sys.executable, "-P", "-m", "asymcheck_lab", "train", "gpt2", "--quiet"]
    for name, value in (
        ("size", options.size),
        ("data", options.data),
        ("steps", options.steps),
        ("every", options.every),
        ("strategy", options.strategy),
        ("seed", options.seed),
        ("threads", options.threads),
        ("run", folder),
    ):
        if value is not None:
            command += [f"--{name}", str(value)]
    progress.begun(title)
    with (folder / output).open("wb") as sink:
        process = subprocess.Popen(
            [*command, *arguments], stdin=subprocess.DEVNULL, stdout=sink, stderr=sink
        )
        try:
            code = _watch(process, folder / rundir.LOG, already, progress.stepped, each_poll)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    progress.ended(f"signal {-code}" if code < 0 else "done" if code == 0 else f"exit {code}")
    return code


def _watch(
    process: subprocess.Popen[bytes],
    log: Path,
    already: int,
    stepped: Callable[[StepRecord], None],
    each_poll: Callable[[int], None],
) -> int:
    until_s = time.monotonic() + _CHILD_LIMIT_S
    seen = already
    while True:
        each_poll(process.pid)
        code = process.poll()
        records = _records(log)
        for record in records[seen:]:
            stepped(record)
        seen = max(seen, len(records))
        if code is not None:
            return code
        if time.monotonic() > until_s:
            raise RunError(f"process {process.pid} was still training after {_CHILD_LIMIT_S:.0f} s")
        time.sleep(_POLL_S)
