"""A case under ``asymlab run``: whatever ends its training, the supervisor starts it again.

Nobody but the supervisor makes a start here. It has to come to its end with a report, and its last
start has to be as if nothing had been.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from asymcheck.testing.children import Outcome
from asymcheck_lab.chaos_case import GOES_ON, Trial
from asymcheck_lab.chaos_job import WAIT_S
from asymcheck_lab.chaos_stage import Case, Training, send
from asymcheck_lab.chaos_start import SAID, write_plan
from asymcheck_lab.errors import RunError

_RESTARTS = 5
_POLL_S = 0.003
_LIMIT_S = 4 * WAIT_S
_REPORT, _LOG = "supervised.json", "supervised.log"


def ends_a_training(case: Case) -> bool:
    """Whether a supervisor has something to do in a case."""
    if case.fault in ("persister killed", "peer killed"):
        return False
    if case.fault == "network partition" and case.moment == "restore":
        return False  # it is the newer job, and comes to its end
    return case.moment == "restore" or case.fault not in GOES_ON


class Supervised:
    """``asymlab run`` around the training of a case.

    Args:
        folder: Of the case, with a plan in it.
        root: URL that the supervisor watches.

    Attributes:
        pid: Of the supervisor.
        trainer: Of the latest start, 0 before the first.
        starts: What each start has said so far, by its number.
    """

    def __init__(self, folder: Path, root: str) -> None:
        self._folder = folder
        self.trainer = 0
        self.starts: dict[int, list[Any]] = {}
        self._read_bytes = 0
        self._unheard: list[Any] = []
        with (folder / _LOG).open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "asymcheck_lab", "run"),
                    *("--max-restarts", str(_RESTARTS), "--backoff-s", "0.05", "--grace-s", "10"),
                    *("--hang-timeout-s", str(2 * WAIT_S), "--root", root),
                    *("--report", str(folder / _REPORT), "--"),
                    *(sys.executable, "-m", "asymcheck_lab.chaos_start", str(folder)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.pid = self._process.pid

    def hear(self, timeout_s: float = WAIT_S) -> Any:  # noqa: ANN401
        """The next thing that a start says; blocks.

        Raises:
            AssertionError: None does in time.
        """
        until_s = time.monotonic() + timeout_s
        while True:
            self._listen()
            if self._unheard:
                return self._unheard.pop(0)
            if time.monotonic() > until_s:
                raise AssertionError(f"no start said anything more: {self.log()}")
            time.sleep(_POLL_S)

    def wait(self, timeout_s: float) -> Outcome:
        """Wait for the end of the supervisor; one that takes too long is killed.

        Raises:
            AssertionError: It took too long.
        """
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the supervisor hangs: {self.log()}") from None
        self._listen()
        said, self._unheard = self._unheard, []
        return Outcome(status, said)

    def kill(self) -> None:
        """End it and its latest start."""
        self._process.kill()
        self._process.wait(WAIT_S)
        if self.trainer:
            send(self.trainer, signal.SIGKILL)

    def report(self) -> dict[str, Any]:
        """What it reported; empty where it did not."""
        try:
            found: dict[str, Any] = json.loads((self._folder / _REPORT).read_text())
        except (OSError, ValueError):
            return {}
        return found

    def log(self) -> str:
        """The end of what it told people."""
        return (self._folder / _LOG).read_text(errors="replace")[-600:]

    def _listen(self) -> None:
        try:
            with (self._folder / SAID).open("rb") as file:
                file.seek(self._read_bytes)
                lines = file.read().splitlines(keepends=True)
        except FileNotFoundError:
            return
        for line in lines:
            if not line.endswith(b"\n"):
                return
            self._read_bytes += len(line)
            number, value = json.loads(line)
            if isinstance(value, dict) and "trainer" in value:
                self.trainer = value["trainer"]
                self.starts[number] = []
            else:
                self.starts[number].append(value)
                self._unheard.append(value)


class SupervisedTrial(Trial):
    """A case of which the supervisor makes every start."""

    supervised: Supervised

    def begin(self) -> Training:
        """See ``Stage``."""
        case = self.case
        first = self.where_first()
        reading = [self.where(stops=True)] if case.moment == "restore" else []
        jumps = case.fault == "clock jump"
        places = [first, *reading, self.where()]
        write_plan(self.folder, case.strategy, case.moment, places, jumps=jumps)
        self.supervised = Supervised(self.folder, self.places.home)
        self.children.append(self.supervised)
        return self.supervised

    def strike(self, training: Training) -> set[int]:
        """See ``Trial``; no start is made in the middle of it."""
        send(training.pid, signal.SIGSTOP)
        try:
            return super().strike(training)
        finally:
            send(training.pid, signal.SIGCONT)

    def note(self, said: object) -> None:
        """See ``Stage``; what a start could not go on with is mended before the next one."""
        is_lossy = self.is_lossy
        super().note(said)
        self.is_lossy = is_lossy  # of the start that said it, not of the one that is judged
        if isinstance(said, dict) and "error" in said:
            self.heal()

    def hit(self, training: Training) -> set[int]:
        """See ``Trial``: the training dies of it, and the supervisor goes on."""
        safe = self.strike(training)
        (self.folder / "go").touch()
        self.end_of(training)
        self.heal()
        return safe

    def hit_a_restore(self) -> set[int]:
        """See ``Trial``: the supervisor makes the start that is hit too."""
        training = self.start()
        self.hear_rest(training)
        first = training.trainer
        send(training.pid, signal.SIGSTOP)
        self.kill(first)
        self.free_memory()
        send(training.pid, signal.SIGCONT)

        def reads() -> bool:
            self.hear_rest(training)
            return training.trainer != first and self.restore_stopped(training.trainer)

        self.until(reads, "the restore reads")
        safe = self.strike(training)
        outcome = self.end_of(training)
        self.heal()
        if self.may_go_on:
            self.verdict.training = self.ended_with(outcome)
        return safe

    def last_start(self) -> list[Any]:
        """What the last start of the supervisor said."""
        starts, report = self.supervised.starts, self.supervised.report()
        self.verdict.starts = len(starts)
        if report.get("outcome") != "done" or report.get("code") != 0:
            raise RunError(f"the supervisor did not bring it to its end: {self.supervised.log()}")
        if len(report["starts"]) != len(starts) or len(starts) < 2:
            raise RunError(f"{len(starts)} starts, it reports {report['starts']}")
        *before, last = (starts[number] for number in sorted(starts))
        for said in before:
            self.is_lossy |= any(isinstance(x, dict) and x.get("exact") is False for x in said)
        resumed = report["starts"][-1]["resumed_from"]
        if resumed is None or resumed["step"] != last[0]["step"]:
            self.verdict.problems.append(f"it went on from {last[0]['step']}, reported: {resumed}")
        return last
