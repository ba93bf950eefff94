"""``doctor`` and ``repair`` on what real trainers left, killed where it hurts."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import asymcheck
from asymcheck import cli_base, cli_host
from asymcheck.cli import app
from asymcheck.findings import Finding, Level
from asymcheck.handover import left_over
from asymcheck.memory.arena import SHARED_MEMORY, ProcessId, slots_of
from asymcheck.storage.local import TEMP_FOLDER
from asymcheck.storage.repository import open_repository
from asymcheck.storage.store import open_store
from asymcheck.testing.children import Child, Say, run_in_child

ENDLESS_S = 600.0
pytestmark = pytest.mark.crash


def run(*args: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in args])


def report(*args: object) -> dict[str, Any]:
    done = run(*args, "--json")
    assert done.exit_code in (0, 1), done.output
    return json.loads(done.stdout)


# --- real left-overs --------------------------------------------------------


class Training:
    """A model and an optimizer large enough to be captured lazily."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Linear(256, 256)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optim": self.optimizer, "note": {"seed": 0}}

    def update(self) -> None:
        self.model(torch.randn(4, 256)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def digest(self) -> str:
        """Of every parameter and every number of the optimizer."""
        found = hashlib.sha256()
        tensors = list(self.model.state_dict().values())
        for values in self.optimizer.state_dict()["state"].values():
            tensors += [values[name] for name in sorted(values)]
        for tensor in tensors:
            found.update(tensor.detach().contiguous().numpy().tobytes())
        return found.hexdigest()


def persister_of(checkpointer: asymcheck.Checkpointer) -> int:
    return int(checkpointer._snapshotter._persister.pid)  # type: ignore[union-attr]


def train(root: Path | str, steps: int, say: Say, *, sealed: bool) -> None:
    """Save each step but the last and wait for it; stop the persister; begin to save the last.

    Says the persister's number and the digest of the last state, then waits to be killed.
    """
    training = Training()
    ckpt = asymcheck.Checkpointer(root, state=training.state, persist="process")
    ckpt.restore()
    for step in range(1, steps):
        training.update()
        ckpt.save(step)
        ckpt.wait()
    os.kill(persister_of(ckpt), signal.SIGSTOP)
    training.update()
    copier = ckpt._snapshotter.copier  # type: ignore[union-attr]
    if not sealed:
        copier.between = lambda: time.sleep(ENDLESS_S)
    handle = ckpt.save(steps)
    if sealed:
        ckpt.fence()
        handle.captured.result(60)
    say([persister_of(ckpt), training.digest()])
    time.sleep(ENDLESS_S)


class Killed:
    """A training of which trainer and persister were killed.

    Args:
        root: Where it saved.
        steps: How many steps; the last one was being saved.
        sealed: Whether its state had been copied as a whole.
        both: Whether the persister was killed too; else it is only stopped.
    """

    def __init__(
        self, root: Path | str, steps: int = 2, *, sealed: bool, both: bool = True
    ) -> None:
        child = Child(lambda say: train(root, steps, say, sealed=sealed))
        self.persister, self.digest = child.hear()
        self.trainer = child.pid
        child.kill()
        if both:
            os.kill(self.persister, signal.SIGKILL)
        assert child.wait().was_killed
        wait_for(lambda: both <= (not ProcessId.of(self.persister).start))


def wait_for(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def put_away(root: Path, shelf: Path) -> list[str]:
    names = []
    for path in slots(root):
        shutil.copy(path, shelf / path.name)
        path.unlink()
        names.append(path.name)
    return names


def run_id(root: Path | str) -> str:
    return open_repository(open_store(str(root))).run


def slots(root: Path | str) -> list[Path]:
    return list(slots_of(SHARED_MEMORY, run_id(root)))


def steps(root: Path) -> list[int]:
    return [row["step"] for row in json.loads(run("ls", root, "--json").stdout)["checkpoints"]]


def restored_digest(root: Path) -> list[Any]:
    def work(say: Say) -> None:
        training = Training(seed=1)
        with asymcheck.Checkpointer(root, state=training.state, read_only=True) as ckpt:
            step = ckpt.restore()
        say([step, training.digest()])

    return run_in_child(work).check()[0]


@contextmanager
def single_thread() -> Iterator[None]:
    """A fork does not inherit a thread pool."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with single_thread():
        yield


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "r"
    yield place
    for path in slots(place):
        path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Left:
    """What one kill left; each test gets its own copy.

    Attributes:
        folder: Holds the root ``r`` and the slot.
        digest: Of the state that was being saved.
        trainer: Process number of the trainer.
    """

    folder: Path
    digest: str
    trainer: int

    def put(self, root: Path) -> None:
        """Copy the root there, and the slot to where it was."""
        shutil.copytree(self.folder / "r", root)
        self.put_slot(SHARED_MEMORY)

    def put_slot(self, folder: Path) -> str:
        """Copy only the slot there; returns its name."""
        (slot,) = self.folder.glob("asymcheck-*")
        shutil.copy(slot, folder)
        return slot.name


def leave(folder: Path, *, sealed: bool) -> Left:
    killed = Killed(folder / "r", sealed=sealed)
    put_away(folder / "r", folder)
    return Left(folder, killed.digest, killed.trainer)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Left:
    """Step 1 is durable, step 2 lies whole in memory."""
    with single_thread():
        return leave(tmp_path_factory.mktemp("whole"), sealed=True)


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Left:
    """Step 1 is durable, step 2 was being copied."""
    with single_thread():
        return leave(tmp_path_factory.mktemp("half"), sealed=False)


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where ``repair`` without a root looks: the machine's own slots may be of others."""
    place = tmp_path / "shm"
    place.mkdir()
    monkeypatch.setattr(cli_host, "SHARED_MEMORY", place)
    return place


# --- repair of a run --------------------------------------------------------


def test_a_checkpoint_left_whole_in_memory_becomes_durable_and_is_restored_bit_for_bit(
    root: Path,
) -> None:
    killed = Killed(root, sealed=True)
    assert steps(root) == [1]
    assert len(slots(root)) == 1
    done = run("repair", root, "--yes")
    assert done.exit_code == 0, done.output
    assert "is made durable: whole step 2 (attempt 1)" in done.stdout
    assert "made durable: step 2 (attempt 1)" in done.stdout
    assert slots(root) == []
    assert steps(root) == [1, 2]
    assert run("verify", root).exit_code == 0
    assert restored_digest(root) == [2, killed.digest]
    again = run("repair", root, "--yes")
    assert (again.exit_code, again.stdout) == (0, "nothing to repair\n")


def test_what_was_not_copied_to_its_end_is_removed_and_the_step_before_is_restored(
    root: Path, half: Left
) -> None:
    half.put(root)
    (slot,) = slots(root)
    done = run("repair", root, "--yes")
    assert done.exit_code == 0, done.output
    assert "goes: unfinished step 2 (attempt 1)" in done.stdout
    assert slot.name in done.stdout
    assert "removed: 1 slot" in done.stdout
    assert slots(root) == []
    assert restored_digest(root)[0] == 1
    assert run("repair", root, "--yes").stdout == "nothing to repair\n"


def test_a_dry_run_says_it_all_and_changes_nothing(root: Path, whole: Left) -> None:
    whole.put(root)
    before = slots(root)
    done = run("repair", root, "--dry-run")
    assert done.exit_code == 0
    assert "is made durable: whole step 2 (attempt 1)" in done.stdout
    planned = report("repair", root, "--dry-run")
    assert planned["dry_run"] is True
    assert planned["durable"] == [{"step": 2, "attempt": 1}]
    assert slots(root) == before
    assert steps(root) == [1]
    real = report("repair", root, "--yes")
    assert real["durable"] == planned["durable"]
    assert real["failed"] == real["kept"] == real["removed"] == []
    assert report("repair", root, "--yes")["durable"] == []


def test_a_persister_that_is_still_there_is_waited_for_and_then_replaced(root: Path) -> None:
    killed = Killed(root, sealed=True, both=False)  # stopped: it would never end by itself
    done = run("repair", root, "--yes", "--grace", 0.1)
    assert done.exit_code == 0, done.output
    assert steps(root) == [1, 2]
    assert ProcessId.of(killed.persister).start == 0
    assert restored_digest(root) == [2, killed.digest]


def test_a_living_trainer_is_left_alone_and_named(root: Path) -> None:
    child = Child(lambda say: train(root, 2, say, sealed=True))
    persister, _ = child.hear()
    before = slots(root)
    try:
        for more in ((), ("--yes",), ("--dry-run",), ("--yes", "--discard-sealed")):
            refused = run("repair", root, *more)
            assert refused.exit_code == cli_base.USAGE
            assert f"process {child.pid} is training on this run" in refused.stderr
        assert slots(root) == before
    finally:
        child.kill()
        os.kill(persister, signal.SIGKILL)
        child.wait()
    assert run("repair", root, "--yes").exit_code == 0
    assert steps(root) == [1, 2]


def test_a_trainer_without_a_slot_is_seen_by_its_persister(root: Path) -> None:
    def idle(say: Say) -> None:
        ckpt = asymcheck.Checkpointer(root, state=Training().state, persist="process")
        ckpt.restore()
        say(persister_of(ckpt))
        time.sleep(ENDLESS_S)

    child = Child(idle)
    persister = child.hear()
    try:
        assert slots(root) == []
        assert f"process {child.pid} is training" in run("repair", root, "--yes").stderr
    finally:
        child.kill()
        child.wait()
    wait_for(lambda: not ProcessId.of(persister).start)
    assert run("repair", root, "--yes").exit_code == 0


def test_without_a_terminal_and_without_yes_nothing_is_changed(root: Path, whole: Left) -> None:
    whole.put(root)
    refused = run("repair", root)
    assert refused.exit_code == cli_base.USAGE
    assert "nothing was changed" in refused.stderr
    assert steps(root) == [1]
    assert len(slots(root)) == 1


def test_a_full_medium_keeps_the_slot_and_a_later_repair_makes_it_durable(
    root: Path, whole: Left
) -> None:
    whole.put(root)
    full = f"faulty+file://{root}?op=write&name=*.pack&do=ENOSPC"
    done = run("repair", full, "--yes")
    assert done.exit_code == cli_base.DAMAGED_OR_MISSING, done.output
    assert "not made durable: whole step 2 (attempt 1)" in done.stdout
    assert "No space left on device" in done.stdout
    assert len(slots(root)) == 1
    told = report("repair", full, "--yes")
    assert [f["step"] for f in told["failed"]] == [2]
    assert told["kept"] == told["failed"]
    assert run("repair", root, "--yes").exit_code == 0
    assert restored_digest(root) == [2, whole.digest]


def test_a_checkpoint_that_came_too_late_stays_until_it_is_given_up(
    root: Path, whole: Left
) -> None:
    whole.put(root)
    open_repository(open_store(str(root))).claim(None)  # as from a machine that does not see it
    stays = run("repair", root, "--yes")
    assert stays.exit_code == 0
    assert "stays: whole step 2 (attempt 1)" in stays.stdout
    assert "attempt 2 has claimed the root since" in stays.stdout
    assert len(slots(root)) == 1
    assert "goes, and is lost" in run("repair", root, "--dry-run", "--discard-sealed").stdout
    assert len(slots(root)) == 1
    gone = run("repair", root, "--yes", "--discard-sealed")
    assert gone.exit_code == 0
    assert "removed: 1 slot" in gone.stdout
    assert slots(root) == []


@pytest.mark.parametrize(("first", "last"), [(4096, -4096), (4096, 500_000)], ids=["all", "image"])
def test_a_slot_that_was_changed_is_not_made_durable(
    root: Path, whole: Left, first: int, last: int
) -> None:
    whole.put(root)
    (slot,) = slots(root)
    data = bytearray(slot.read_bytes())
    data[first:last] = bytes(len(data[first:last]))
    with slot.open("r+b") as file:
        file.write(data)
    done = run("repair", root, "--yes")
    assert done.exit_code == cli_base.DAMAGED_OR_MISSING, done.output
    assert "not made durable" in done.stdout
    assert slots(root) == []
    assert steps(root) == [1]


def test_on_a_terminal_it_asks_and_a_no_changes_nothing(
    root: Path, whole: Left, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole.put(root)
    terminal = SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr(cli_base, "sys", terminal)
    no = CliRunner().invoke(app, ["repair", str(root)], input="n\n")
    assert no.exit_code == 0
    assert "Do this?" in no.stderr
    assert "nothing was changed" in no.stderr
    assert steps(root) == [1]
    yes = CliRunner().invoke(app, ["repair", str(root)], input="y\n")
    assert yes.exit_code == 0
    assert steps(root) == [1, 2]


# --- files of interrupted writes --------------------------------------------


def leave_files(root: Path, attempt: int) -> tuple[Path, Path]:
    temp = root / TEMP_FOLDER / ("0" * 32)
    temp.parent.mkdir(exist_ok=True)
    temp.write_bytes(b"half")
    pack = root / "step-00000009" / f"a{attempt:06d}-r0000-0001.pack"
    pack.parent.mkdir(exist_ok=True)
    pack.write_bytes(b"half")
    return temp, pack


def train_to_the_end(root: Path) -> None:
    def work(say: Say) -> None:
        training = Training()
        with asymcheck.Checkpointer(root, state=training.state, persist="thread") as ckpt:
            ckpt.restore()
            training.update()
            ckpt.save(1)

    run_in_child(work).check()


def test_temp_files_and_objects_of_a_dead_start_are_removed(root: Path) -> None:
    train_to_the_end(root)
    temp, pack = leave_files(root, 1)
    planned = run("repair", root, "--dry-run").stdout
    assert f"goes: {pack.relative_to(root)}, which no manifest names" in planned
    assert "go: 1 temp file" in planned
    assert temp.exists()
    done = run("repair", root, "--yes")
    assert done.exit_code == 0
    assert "removed: 1 temp file, 1 left-over object" in done.stdout
    assert not temp.exists()
    assert not pack.exists()
    assert steps(root) == [1]
    assert run("verify", root).exit_code == 0
    assert run("repair", root, "--yes").stdout == "nothing to repair\n"


def test_while_the_writer_may_live_only_objects_of_earlier_attempts_are_removed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_to_the_end(root)
    repository = open_repository(open_store(str(root)))
    repository.claim(None)  # by this very process, which lives
    temp, new = leave_files(root, 2)
    _, old = leave_files(root, 1)
    mine = run("repair", root, "--yes")
    assert mine.exit_code == 0
    assert f"process {os.getpid()}, which claimed attempt 2, still runs" in mine.stdout
    assert "stay: 1 temp file" in mine.stdout
    assert [path.exists() for path in (temp, new, old)] == [True, True, False]
    monkeypatch.setattr("asymcheck.repair.socket.gethostname", lambda: "elsewhere")
    assert report("repair", root, "--yes")["writer"].startswith("attempt 2 was claimed on")
    assert temp.exists()


def test_a_record_of_an_earlier_process_with_the_same_number_is_not_taken_for_it(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_to_the_end(root)
    temp, pack = leave_files(root, 2)
    monkeypatch.setattr("asymcheck.storage.repository.time.time", lambda: 1e9)
    open_repository(open_store(str(root))).claim(None)  # long before this process was started
    temp, pack = leave_files(root, 2)
    assert report("repair", root, "--yes")["writer"] == ""
    assert not temp.exists()
    assert not pack.exists()


def test_a_root_without_checkpoints_is_an_error_that_says_so(tmp_path: Path) -> None:
    done = run("repair", tmp_path, "--yes")
    assert done.exit_code == cli_base.DAMAGED_OR_MISSING
    assert "there is no checkpoint yet" in done.stderr


# --- repair of all runs -----------------------------------------------------


def test_without_a_root_left_over_slots_of_all_runs_are_listed_and_unfinished_ones_removed(
    shelf: Path, whole: Left, half: Left
) -> None:
    sealed, unsealed = (whole.put_slot(shelf), half.put_slot(shelf))
    listed = run("repair")
    assert listed.exit_code == 0
    lines = {line.split()[0]: line for line in listed.stdout.splitlines()}
    assert "whole step 2 (attempt 1)" in lines[sealed]
    assert "stays: it holds a whole checkpoint" in lines[sealed]
    assert "unfinished step 2 (attempt 1)" in lines[unsealed]
    assert lines[unsealed].endswith("goes")
    assert "nothing was changed" in listed.stdout
    assert len(list(shelf.iterdir())) == 2
    told = report("repair")
    roots = {s["slot"]: s["root"] for s in told["slots"]}
    assert roots == {
        n: f"file://{left.folder}/r" for n, left in ((sealed, whole), (unsealed, half))
    }
    assert roots[sealed] in lines[sealed]
    assert {s["slot"]: s["sealed"] for s in told["slots"]} == {sealed: True, unsealed: False}
    assert {s["run"] for s in told["slots"]} == {
        run_id(whole.folder / "r"),
        run_id(half.folder / "r"),
    }
    assert {s["trainer"] for s in told["slots"]} == {whole.trainer, half.trainer}
    assert told["dry_run"] is True
    removed = run("repair", "--yes")
    assert f"removed {unsealed}\n" in removed.stdout
    assert [path.name for path in shelf.iterdir()] == [sealed]


def test_a_whole_checkpoint_is_only_discarded_by_name_of_the_option(
    shelf: Path, whole: Left
) -> None:
    sealed = whole.put_slot(shelf)
    assert run("repair", "--discard-sealed").exit_code == cli_base.USAGE
    assert "goes" in run("repair", "--discard-sealed", "--dry-run").stdout
    run("repair", "--yes")
    assert [path.name for path in shelf.iterdir()] == [sealed]
    done = run("repair", "--yes", "--discard-sealed")
    assert f"removed {sealed}, lost with it: whole step 2 (attempt 1)" in done.stdout
    assert list(shelf.iterdir()) == []
    assert run("repair", "--yes", "--discard-sealed").stdout == "no dead trainer left a slot\n"


def test_a_slot_that_a_persister_works_on_stays(tmp_path: Path, shelf: Path) -> None:
    killed = Killed(tmp_path / "r", sealed=False, both=False)
    put_away(tmp_path / "r", shelf)
    try:
        done = run("repair", "--yes", "--discard-sealed")
        assert f"stays: persister process {killed.persister} is at work on it" in done.stdout
        assert len(list(shelf.iterdir())) == 1
    finally:
        os.kill(killed.persister, signal.SIGKILL)
    wait_for(lambda: not ProcessId.of(killed.persister).start)
    run("repair", "--yes")
    assert list(shelf.iterdir()) == []


def test_a_slot_that_was_never_filled_goes(shelf: Path, whole: Left) -> None:
    name = whole.put_slot(shelf)
    os.truncate(shelf / name, 0)  # killed between making the file and reserving its room
    assert report("repair")["slots"][0]["step"] is None
    run("repair", "--yes")
    assert list(shelf.iterdir()) == []


# --- doctor -----------------------------------------------------------------


def test_the_doctor_sees_what_was_left_and_repair_cures_it(root: Path, whole: Left) -> None:
    whole.put(root)
    mine = [old for old in left_over(run_id(root)) if old.is_sealed]
    assert len(mine) == 1
    findings = {f["name"]: f for f in report("doctor", root)["findings"]}
    assert findings["left-over slots"]["level"] == "warn"
    assert "asymcheck repair file://" in findings["left-over slots"]["change"]
    assert "the newest of step 1" in findings["checkpoints"]["found"]
    run("repair", root, "--yes")
    assert left_over(run_id(root)) == []
    assert restored_digest(root) == [2, whole.digest]


def test_the_doctor_prints_a_line_a_finding_and_fails_only_for_what_is_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [Finding("cores", Level.OK, "8 of 8"), Finding("memory", Level.WARN, "few", "more")]
    monkeypatch.setattr(cli_host, "examine", lambda root: iter(found))
    good = run("doctor", tmp_path)
    assert good.exit_code == 0
    assert good.stdout.splitlines() == [
        "ok    cores             8 of 8",
        "warn  memory            few -- more",
        "1 warning, nothing bad",
    ]
    found.append(Finding("writing", Level.BAD, "no\x1b[31m", "yes"))
    bad = run("doctor", tmp_path)
    assert bad.exit_code == cli_base.DAMAGED_OR_MISSING
    assert bad.stdout.splitlines()[-2:] == [
        "bad   writing           no\\x1b[31m -- yes",
        "1 warning, 1 bad",
    ]
    told = json.loads(run("doctor", tmp_path, "--json").stdout)
    assert told["ok"] is False
    assert told["findings"][1] == {
        "name": "memory",
        "level": "warn",
        "found": "few",
        "change": "more",
    }


def test_a_scheme_that_is_not_installed_is_wrong_usage() -> None:
    for command in ("doctor", "repair"):
        done = run(command, "fiel:///x")
        assert done.exit_code == cli_base.USAGE
        assert "expected a scheme of" in done.stderr


@pytest.mark.parametrize("command", [["doctor"], ["doctor", "ROOT"], ["repair"]])
def test_the_commands_run_as_a_program_without_torch(root: Path, command: list[str]) -> None:
    train_to_the_end(root)
    arguments = [str(root) if word == "ROOT" else word for word in command]
    code = (
        "import sys; from asymcheck.cli import app\n"
        f"try: app({arguments!r})\n"
        "finally: assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=root.parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stderr == ""
    assert done.stdout
    assert done.returncode in (0, 1)
    assert [path.name for path in root.parent.iterdir()] == ["r"]
