"""Starts a training again until it comes to its end: exits, hangs, checkpoints that kill.

A thin layer around any command, ``torchrun`` for instance. It changes nothing in the script: that
one resumes by its own ``restore()``. What the supervisor knows it sees from outside, in the root
and in shared memory.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from asymcheck.planning.retention import CheckpointId
from asymcheck_lab.errors import LabError, UsageError
from asymcheck_lab.processes import adopt_orphans, descendants, end_all, reap, send
from asymcheck_lab.supervise_report import Report, Start, write_report
from asymcheck_lab.watching import Standing, Watch

_POLL_S = 0.05
_LOOK_S = 0.5
_PAUSES = 20
_LONGEST_BACKOFF_S = 60.0
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PASSED_ON = (*_ENDING, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT, signal.SIGWINCH)
_SIGNALLED = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class SuperviseOptions:
    """What to run, and when to give up.

    Attributes:
        command: The training and its arguments, passed on untouched.
        root: Path or URL of its checkpoints; ``None`` sees exits only.
        max_restarts: Starts after the first.
        hang_timeout_s: A start is ended when nothing that can be seen changes for this long;
            ``None`` for never. Longer than a start takes to its first checkpoint.
        grace_s: Between SIGTERM and SIGKILL.
        backoff_s: Before the first restart; doubled for each in a row that committed nothing,
            up to a minute.
        report: Gets the report as JSON after each start; ``None`` for nowhere.
    """

    command: tuple[str, ...]
    root: str | None = None
    max_restarts: int = 3
    hang_timeout_s: float | None = None
    grace_s: float = 30.0
    backoff_s: float = 1.0
    report: Path | None = None

    def __post_init__(self) -> None:
        if not self.command:
            raise UsageError(
                "command: expected what to run, as in asymlab run --max-restarts 3 -- torchrun "
                "train.py, found nothing"
            )
        if shutil.which(self.command[0]) is None:
            raise UsageError(
                f"command: expected a program, found {self.command[0]!r}, which is neither on the "
                f"PATH nor a file that can be run"
            )
        for name, lowest in (("max_restarts", 0), ("grace_s", 0), ("backoff_s", 0)):
            if not getattr(self, name) >= lowest:
                value = getattr(self, name)
                raise UsageError(f"{name}: expected at least {lowest}, found {value}")
        if self.hang_timeout_s is not None and not self.hang_timeout_s > 0:
            raise UsageError(f"hang_timeout_s: expected more than 0, found {self.hang_timeout_s}")
        if self.hang_timeout_s is not None and self.root is None:
            raise UsageError(
                "hang_timeout_s: expected root with it, for a hang shows in checkpoints and in "
                "the slots of the training, found none"
            )


class Supervisor:
    """One supervised training. Its process takes in orphans and handles signals meanwhile, so there
    is one at a time, on the main thread of a process that starts nothing else.

    Args:
        options: What to do.
        tell: Gets a line for each thing that happens.

    Raises:
        OptionError: The root is no URL of a store that is known.
    """

    def __init__(self, options: SuperviseOptions, tell: Callable[[str], None]) -> None:
        self._options = options
        self._tell = tell
        self._watch = Watch(options.root)
        self._report = Report(options.command, options.root)
        self._heard: list[signal.Signals] = []
        self._stop: signal.Signals | None = None
        self._first_attempt = 0
        self._barren = 0

    def run(self) -> Report:
        """Run until the end, however that comes; blocks. The report is there in every case.

        Raises:
            LabError: The first start could not be made.
        """
        adopt_orphans()
        before = {n: signal.signal(n, self._hear) for n in _PASSED_ON}
        self._first_attempt = max(self._watch.standing().parents, default=0) + 1
        try:
            while True:
                standing = self._watch.standing()
                start = self._start_once(standing)
                self._note(start, standing)
                write_report(self._options.report, self._report)
                if self._report.outcome or not self._wait_to_restart():
                    break
        except BaseException as failure:
            self._finish("failed", 1, f"the supervisor itself failed: {failure!r}")
            self._end_everybody()
            raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            write_report(self._options.report, self._report)
        return self._report

    # --- one start ---------------------------------------------------------------

    def _start_once(self, standing: Standing) -> Start:
        number = len(self._report.starts) + 1
        self._tell(f"start {number}: {' '.join(self._options.command)}")
        start = Start(number, time.time())
        self._report.starts.append(start)
        begin_s = time.monotonic()
        try:
            process = subprocess.Popen(
                self._options.command, stdin=subprocess.DEVNULL, start_new_session=True
            )
        except OSError as failure:
            start.ended = f"not started: {failure.strerror}"
            if number == 1:
                raise LabError(f"{self._options.command[0]}: {failure.strerror}") from failure
            return start
        try:
            start.ended = self._see_through(process, start)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
        start.code = process.returncode
        if not start.succeeded:
            self._end_left_over(process.pid)
        start.seconds = time.monotonic() - begin_s
        start.latest_step = max(start.latest_step, self._watch.look().latest_step)
        self._tell(f"start {number} ended after {start.seconds:.1f} s: {start.ended}")
        return start

    def _see_through(self, process: subprocess.Popen[bytes], start: Start) -> str:
        """Wait for the end of a start, or bring it about; returns how it ended."""
        signs = self._watch.look().signs
        changed_s = looked_s = time.monotonic()
        pause_s = _LOOK_S
        while True:
            code = process.poll()
            if code is not None:
                return _spoken_code(code)
            reap(process.pid)
            if self._pass_signals_on(process):
                self._end(process)
                assert self._stop is not None
                return f"stopped by {self._stop.name}, which was passed on"
            now_s = time.monotonic()
            if self._watch.sees and now_s - looked_s >= pause_s:
                found = self._watch.look()
                looked_s = time.monotonic()
                pause_s = max(_LOOK_S, _PAUSES * (looked_s - now_s))  # listing may be dear
                start.latest_step = max(start.latest_step, found.latest_step)
                if found.signs != signs:
                    signs, changed_s = found.signs, now_s
            limit_s = self._options.hang_timeout_s
            if limit_s is not None and now_s - changed_s > limit_s:
                dead = self._watch.dead_trainers()
                self._end(process)
                return _spoken_hang(limit_s, start.latest_step, dead)
            time.sleep(_POLL_S)

    def _pass_signals_on(self, process: subprocess.Popen[bytes]) -> bool:
        """Returns whether one of them asks for the end."""
        while self._heard:
            number = self._heard.pop(0)
            if number in _ENDING:
                self._stop = number
                return True
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        return False

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Ask the whole group to end, with the signal that we got or SIGTERM, then make it."""

        def ask() -> None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, self._stop or signal.SIGTERM)

        stuck = end_all(ask, self._options.grace_s, process.pid)
        with suppress(subprocess.TimeoutExpired):
            process.wait(1)
        self._note_stuck(stuck)

    def _end_left_over(self, spare: int) -> None:
        """A launcher that died leaves its ranks: they must not write beside the next start."""

        def ask() -> None:
            for left in descendants(os.getpid()):
                send(left, signal.SIGTERM)

        if descendants(os.getpid()):
            self._note_stuck(end_all(ask, min(self._options.grace_s, 10.0), spare))

    def _end_everybody(self) -> None:
        for left in descendants(os.getpid()):
            send(left, signal.SIGKILL)

    def _note_stuck(self, stuck: Sequence[int]) -> None:
        if stuck:
            self._tell(
                f"processes {list(stuck)} hang in the kernel and cannot be ended: look at the "
                f"disk, network file system or device that they wait for"
            )

    def _hear(self, number: int, frame: object) -> None:
        self._heard.append(signal.Signals(number))

    # --- what a start tells ------------------------------------------------------

    def _note(self, start: Start, before: Standing) -> None:
        """Say what it resumed from and what it brought; decide whether there is another one."""
        report, standing = self._report, self._settled()
        new = sorted(n for n in standing.parents if n not in before.parents)
        claimed = self._watch.claimed_since(start.began_s, new)
        start.problem = standing.problem
        start.attempts = tuple(claimed)
        if claimed:
            start.resumed_from = standing.parents[claimed[0]]
            start.tier = before.tier_of(start.resumed_from) if start.resumed_from else ""
            start.from_nothing = start.resumed_from is None and bool(before.lineage)
            resumed_step = start.resumed_from.step if start.resumed_from else 0
            if len(report.starts) > 1 and report.starts[-2].latest_step:
                start.steps_lost = max(0, report.starts[-2].latest_step - resumed_step)
        start.commits = sum(at.attempt in claimed for at in standing.committed - before.committed)
        self._barren = 0 if start.commits else self._barren + 1
        if self._stop is not None:  # what ended well after it may have saved, and is not done
            code = _SIGNALLED + self._stop
            self._finish("stopped", code, "start the same command again to go on")
        elif start.succeeded:
            self._finish("done", 0, "")
        elif self._starts_from_nothing():
            self._finish("not resumable", 1, _NOT_RESUMABLE)
        else:
            self._judge_checkpoint(standing)
            if len(report.starts) > self._options.max_restarts:
                self._finish("gave up", _code_of(start), self._advice(standing))

    def _settled(self) -> Standing:
        """What there is once persisters of dead trainers are done, or had ``grace_s`` for it."""
        until_s = time.monotonic() + self._options.grace_s
        while self._watch.persisters() and time.monotonic() < until_s:
            time.sleep(_POLL_S)
        return self._watch.standing()

    def _starts_from_nothing(self) -> bool:
        latest = self._report.starts[-2:]
        return len(latest) == 2 and all(start.from_nothing for start in latest)

    def _judge_checkpoint(self, standing: Standing) -> None:
        """Mark a checkpoint that two attempts in a row went on from and died, to no avail."""
        ours = sorted(n for n in standing.parents if n >= self._first_attempt)
        if len(ours) < 2:
            return
        first, second = ours[-2:]
        at = standing.parents[second]
        since = [c for c in standing.committed | standing.sealed if c.attempt >= first]
        if at is None or at.step == 0 or standing.parents[first] != at or since:
            return
        if at not in standing.lineage or any(s.at == at for s in self._report.suspects):
            return
        if standing.lineage[0] == at:
            self._tell(
                f"attempts {first} and {second} both died after they restored step {at.step}; it "
                f"is not marked suspect, for there is no checkpoint before it"
            )
            return
        why = (
            f"attempts {first} and {second} restored it and died before any newer commit; the "
            f"latter: {self._report.starts[-1].ended}"
        )
        self._mark(at, why)

    def _mark(self, at: CheckpointId, why: str) -> None:
        if failure := self._watch.mark(at, why):
            self._tell(f"step {at.step} could not be marked suspect: {failure}")
            return
        self._report.note_suspect(at, why)
        self._tell(
            f"step {at.step} (attempt {at.attempt}) is marked suspect: {why}; the next start takes "
            f"the one before"
        )

    def _advice(self, standing: Standing) -> str:
        starts = self._report.starts
        parts = [f"{len(starts)} starts ended badly, the last one: {starts[-1].ended}"]
        if not self._watch.sees:
            parts.append("with --root the next report says what each start resumed from")
        elif standing.problem:
            parts.append(f"the root cannot be read: {standing.problem}")
        elif not any(start.attempts for start in starts):
            parts.append(
                "none of them got as far as restore() or a first save: look at the first error "
                "in its output; the checkpoints are as they were"
            )
        else:
            at = standing.lineage[-1] if standing.lineage else None
            parts.append(
                "there is no checkpoint that a restore would choose"
                if at is None
                else f"the next start would go on from step {at.step}: mend the cause, then run "
                f"the same command again"
            )
        if self._report.suspects:
            parts.append("'asymcheck suspect ROOT' lists the marks and takes them away")
        return "; ".join(parts)

    def _finish(self, outcome: str, code: int, advice: str) -> None:
        self._report.outcome, self._report.code = outcome, code
        self._report.advice = advice

    def _wait_to_restart(self) -> bool:
        """Wait a while; returns whether nobody asked for the end meanwhile."""
        wait_s = self._options.backoff_s * 2 ** min(max(0, self._barren - 1), 10)
        wait_s = min(wait_s, _LONGEST_BACKOFF_S)
        self._tell(f"starts again in {wait_s:g} s")
        until_s = time.monotonic() + wait_s
        while time.monotonic() < until_s:
            ending = [n for n in self._heard if n in _ENDING]
            self._heard.clear()
            if ending:
                self._stop = ending[0]
                advice = "it was between two starts; start the same command again to go on"
                self._finish("stopped", _SIGNALLED + ending[0], advice)
                return False
            time.sleep(min(_POLL_S, wait_s))
        return True


_NOT_RESUMABLE = (
    "two starts in a row began at step 0 although there are checkpoints: the script does not "
    "resume. It has to call restore() before its loop and to begin at the step that this returns; "
    "restore(resume='never') always begins anew. No start was made after that, since each would "
    "train the same steps again"
)


def _spoken_code(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with suppress(ValueError):
        return f"signal {-code} ({signal.Signals(-code).name})"
    return f"signal {-code}"


def _spoken_hang(limit_s: float, step: int, dead: Sequence[int]) -> str:
    at = f"after step {step}" if step else "before any step could be seen"
    if dead:
        return (
            f"heartbeat lost: trainers {list(dead)} are dead and the command did not end; nothing "
            f"changed for {limit_s:g} s {at}"
        )
    return f"hang: no step, copy or commit for {limit_s:g} s {at}"


def _code_of(start: Start) -> int:
    code = start.code
    if code is None or code == 0:
        return 1
    return code if code > 0 else _SIGNALLED - code
