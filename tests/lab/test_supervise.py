"""``asymlab run``: restarts, hangs, suspects, signals; and a report in every case."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import asymcheck
from asymcheck.memory.arena import SHARED_MEMORY, slots_of
from asymcheck.memory.process import ProcessId
from asymcheck.planning.retention import CheckpointId
from asymcheck.storage.memory import MemoryStore
from asymcheck.storage.repository import create_repository, open_repository
from asymcheck.storage.store import Entry, open_store
from asymcheck_lab import watching
from asymcheck_lab.errors import UsageError
from asymcheck_lab.supervise import SuperviseOptions

SOURCE = str(Path(asymcheck.__file__).parents[1])
LIMIT_S = 120.0

TRAINING = """
import os, signal, subprocess, sys, time
from pathlib import Path
from asymcheck.memory.arena import Arena
from asymcheck.planning.retention import CheckpointId, Retention
from asymcheck.storage.repository import create_repository
from asymcheck.storage.store import open_store
from asymcheck.testing.checkpoints import commit_bytes

folder = Path(sys.argv[1])
starts = sys.argv[2:]
with open(folder / "starts", "a") as counter:
    counter.write("x")
number = (folder / "starts").stat().st_size
plan = starts[min(number, len(starts)) - 1].split()
if "from-tier" in plan:  # the root was lost, and its run comes back from elsewhere
    (folder / "root-away").rename(folder / "root")
repository = create_repository(open_store(str(folder / "root")))
at = None if "anew" in plan else next(iter(reversed(repository.lineage())), None)
arena = Arena(repository.run, 0, 1, print)
attempt = step = 0

def claim():
    global attempt, step
    if not attempt:
        attempt, step = repository.claim(at).number, at.step if at else 0
        (folder / f"pid-{number}").write_text(str(os.getpid()))

for word in plan:
    verb, _, value = word.partition("=")
    if verb == "restore":
        claim()
    elif verb == "train":  # each step is saved
        claim()
        for _ in range(int(value)):
            step += 1
            slot = arena.reserve(4096, 4096)
            arena.beat(step)
            commit_bytes(repository, CheckpointId(attempt, step), {"w": b"x" * step})
            arena.free(slot)
    elif verb == "unsaved":
        for _ in range(int(value)):
            step += 1
            arena.beat(step)
    elif verb == "orphan":  # a rank with a session of its own
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                                 start_new_session=True)
        (folder / "orphan").write_text(str(child.pid))
    elif verb == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif verb == "heed":
        heard = folder / "heard"
        signal.signal(int(value), lambda n, _: heard.write_text(str(n)) and sys.exit(0))
    elif verb == "away":
        (folder / "root").rename(folder / "root-away")
        (folder / "root").write_text("")
    elif verb == "lost":
        (folder / "root").rename(folder / "root-away")
    elif verb == "there":
        (folder / "there").write_text("")
    elif verb == "hang":
        time.sleep(600)
    elif verb == "kill":
        os.kill(os.getpid(), int(value))
    elif verb == "exit":
        arena.close()
        sys.exit(int(value))
arena.close()
"""


class Case:
    """A command that does at each start what it is told, under the supervisor."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "root"
        self.report = folder / "report.json"
        self.launcher: tuple[str, ...] = ()
        (folder / "training.py").write_text(TRAINING)

    def begin(self, *starts: str, options: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "asymcheck_lab", "run", "--backoff-s", "0.01"),
                *("--root", str(self.root), "--report", str(self.report), *options, "--"),
                *self.launcher,
                *(sys.executable, str(self.folder / "training.py"), str(self.folder), *starts),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": SOURCE, "COLUMNS": "250"},
        )

    def end(self, process: subprocess.Popen[str]) -> tuple[dict[str, Any], str]:
        said, _ = process.communicate(timeout=LIMIT_S)
        assert "lab/supervise" not in said, said  # no traceback of its own
        found = json.loads(self.report.read_text())
        assert found["code"] == process.returncode, said
        return found, said

    def run(self, *starts: str, options: tuple[str, ...] = ()) -> tuple[dict[str, Any], str]:
        return self.end(self.begin(*starts, options=options))

    def steps(self) -> list[int]:
        return [at.step for at in open_repository(open_store(str(self.root))).lineage()]

    def pid(self, name: str) -> int:
        return int((self.folder / name).read_text())


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    made = Case(tmp_path)
    yield made
    with suppress(Exception):
        for path in slots_of(SHARED_MEMORY, open_repository(open_store(str(made.root))).run):
            path.unlink()


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, f"timed out: {what}"
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    return ProcessId.of(pid).start == 0


def test_a_training_that_comes_to_its_end_is_started_once(case: Case) -> None:
    found, said = case.run("train=3")
    assert (found["outcome"], found["code"]) == ("done", 0)
    (start,) = found["starts"]
    assert (start["ended"], start["resumed_from"], start["commits"]) == ("exit code 0", None, 3)
    assert "step 0" in said


def test_a_crash_is_followed_by_a_start_that_resumes_and_the_report_says_from_where(
    case: Case,
) -> None:
    found, said = case.run("train=3 unsaved=2 kill=9", "train=2 exit=7", "train=1")
    assert found["outcome"] == "done"
    first, second, third = found["starts"]
    assert first["ended"] == "signal 9 (SIGKILL)"
    assert first["latest_step"] == 5
    assert second["resumed_from"] == {"step": 3, "attempt": 1}
    assert (second["tier"], second["steps_lost"]) == ("root", 2)
    assert (second["ended"], second["commits"]) == ("exit code 7", 2)
    assert third["resumed_from"] == {"step": 5, "attempt": 2}
    assert third["steps_lost"] == 0
    assert "step 3, root" in said
    assert case.steps() == [1, 2, 3, 4, 5, 6]


def test_a_root_that_was_lost_and_came_back_from_a_tier_is_no_fresh_start(case: Case) -> None:
    found, said = case.run("train=3 lost kill=9", "from-tier train=1")
    assert found["outcome"] == "done"
    second = found["starts"][1]
    assert second["resumed_from"] == {"step": 3, "attempt": 1}
    assert (second["attempts"], second["commits"], second["from_nothing"]) == ([2], 1, False)
    assert "step 3, another tier, or finished meanwhile" in said


def test_it_gives_up_with_a_report_after_so_many_restarts(case: Case) -> None:
    found, said = case.run("train=1 exit=3", "train=1 exit=4", options=("--max-restarts", "1"))
    assert (found["outcome"], found["code"]) == ("gave up", 4)
    assert len(found["starts"]) == 2
    assert "the next start would go on from step 2" in found["advice"]
    assert found["advice"] in said


def test_a_crash_before_restore_says_so_and_marks_nothing(case: Case) -> None:
    case.run("train=2")
    found, _ = case.run("exit=5", "exit=5", "exit=5", options=("--max-restarts", "2"))
    assert found["outcome"] == "gave up"
    assert "none of them got as far as restore()" in found["advice"]
    assert case.steps() == [1, 2]


def test_a_checkpoint_on_which_two_starts_died_is_marked_and_the_one_before_is_taken(
    case: Case,
) -> None:
    found, said = case.run("train=3 exit=1", "restore exit=9", "restore kill=11", "train=2")
    assert found["outcome"] == "done"
    (suspect,) = found["suspects"]
    assert (suspect["step"], suspect["attempt"]) == (3, 1)
    assert "attempts 2 and 3 restored it and died" in suspect["why"]
    assert "SIGSEGV" in suspect["why"]
    assert found["starts"][3]["resumed_from"] == {"step": 2, "attempt": 1}
    assert "marked suspect: step 3 (attempt 1)" in said
    assert case.steps() == [1, 2, 3, 4]


def test_the_only_checkpoint_is_never_marked(case: Case) -> None:
    found, said = case.run("train=1 exit=1", "restore exit=9", options=("--max-restarts", "3"))
    assert found["outcome"] == "gave up"
    assert found["suspects"] == []
    assert "it is not marked suspect, for there is no checkpoint before it" in said


def test_a_script_that_does_not_resume_is_told_so(case: Case) -> None:
    found, said = case.run("train=2 exit=1", "anew train=1 exit=1", options=("--max-restarts", "9"))
    assert (found["outcome"], found["code"]) == ("not resumable", 1)
    assert len(found["starts"]) == 3
    assert "two starts in a row began at step 0 although there are checkpoints" in said
    assert "call restore() before its loop" in said


def test_a_hang_is_ended_and_what_it_left_behind_too(case: Case) -> None:
    found, _ = case.run(
        "deaf orphan train=2 hang", "train=1", options=("--hang-timeout-s", "1", "--grace-s", "0.2")
    )
    assert found["outcome"] == "done"
    first, second = found["starts"]
    assert first["ended"].startswith("hang: no step, copy or commit for 1 s after step 2")
    assert second["resumed_from"]["step"] == 2
    assert is_gone(case.pid("pid-1"))
    assert is_gone(case.pid("orphan"))


def test_a_command_that_goes_on_though_its_trainer_is_dead_has_lost_its_heartbeat(
    case: Case,
) -> None:
    case.launcher = ("sh", "-c", '"$@"; sleep 600', "launcher")
    found, _ = case.run(
        "train=2 kill=9", options=("--hang-timeout-s", "1", "--max-restarts", "0", "--grace-s", "5")
    )
    (start,) = found["starts"]
    assert start["ended"].startswith(f"heartbeat lost: trainers [{case.pid('pid-1')}] are dead")
    assert start["latest_step"] == 2


def test_a_root_that_cannot_be_read_any_more_ends_in_a_report_too(case: Case) -> None:
    found, said = case.run("train=1 away exit=3", options=("--max-restarts", "2"))
    assert (found["outcome"], len(found["starts"])) == ("gave up", 3)
    assert "the root cannot be read" in found["advice"]
    assert found["suspects"] == []
    assert found["advice"] in said


def test_what_a_dead_launcher_left_is_ended_before_the_next_start(case: Case) -> None:
    found, _ = case.run("orphan train=1 kill=9", "train=1")
    assert found["outcome"] == "done"
    assert is_gone(case.pid("orphan"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_is_passed_on(case: Case, number: signal.Signals) -> None:
    process = case.begin(f"heed={number:d} train=1 there hang")
    until((case.folder / "there").exists, "the training is at its work")
    process.send_signal(number)
    found, _ = case.end(process)
    assert (case.folder / "heard").read_text() == str(int(number))
    if number is signal.SIGUSR1:
        assert found["outcome"] == "done"
    else:
        assert (found["outcome"], found["code"]) == ("stopped", 128 + number)
        assert number.name in found["starts"][0]["ended"]
    assert is_gone(case.pid("pid-1"))


def test_one_that_is_deaf_to_the_signal_is_killed_after_the_grace(case: Case) -> None:
    process = case.begin("deaf train=1 there hang", options=("--grace-s", "0.2"))
    until((case.folder / "there").exists, "the training is at its work")
    process.send_signal(signal.SIGTERM)
    found, _ = case.end(process)
    assert found["outcome"] == "stopped"
    assert is_gone(case.pid("pid-1"))


def test_without_a_root_exits_are_seen_all_the_same(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    script = f"import sys; from pathlib import Path; p = Path({str(tmp_path / 'n')!r})\n" + (
        "n = len(p.read_text()) if p.exists() else 0\np.write_text('x' * (n + 1))\nsys.exit(n < 2)"
    )
    done = subprocess.run(
        [
            *(sys.executable, "-m", "asymcheck_lab", "run", "--backoff-s", "0", "--report"),
            *(str(report), "--", sys.executable, "-c", script, "--nnodes=1:4", "--root", "x"),
        ],
        env={**os.environ, "PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(report.read_text())
    assert [start["code"] for start in found["starts"]] == [1, 1, 0]
    assert found["command"][-3:] == ["--nnodes=1:4", "--root", "x"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"command": ()}, "command: expected what to run"),
        ({"command": ("no-such-program",)}, "found 'no-such-program', which is neither on the"),
        ({"max_restarts": -1}, "max_restarts: expected at least 0, found -1"),
        ({"hang_timeout_s": 0.0, "root": "x"}, "hang_timeout_s: expected more than 0"),
        ({"hang_timeout_s": 5.0}, "hang_timeout_s: expected root with it"),
    ],
)
def test_what_cannot_be_run_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SuperviseOptions(**{"command": ("true",), **options})


def test_a_root_that_never_answers_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    is_dead, never = False, threading.Event()

    class Dead(MemoryStore):
        def list(self, prefix: str = "") -> Iterator[Entry]:
            if is_dead:
                never.wait(LIMIT_S)
            return super().list(prefix)

    store = Dead()
    create_repository(store)
    is_dead = True
    monkeypatch.setattr(watching, "open_store", lambda url: store)
    monkeypatch.setattr(watching, "_ANSWER_S", 0.05)
    monkeypatch.setattr(watching, "_LOOK_LIMIT_S", 0.05)
    watch = watching.Watch("dead://")
    assert watch.look() == watching.Look()
    assert watch.standing().problem == "it did not answer within 0.05 s"
    assert watch.mark(CheckpointId(1, 1), "") == "it did not answer within 0.05 s"
    never.set()
