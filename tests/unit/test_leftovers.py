"""What counts as left over, and what happens to it: no torch, slots made by hand."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

import pytest

from asymcheck import handover
from asymcheck.capture import Capture, dump_capture
from asymcheck.errors import OptionError, StoreError, SupersededWriter
from asymcheck.events import discard
from asymcheck.handover import LeftOver, finish, left_over, living_owners, take_over
from asymcheck.memory.arena import ProcessId, Slot, SlotState, slot_name
from asymcheck.memory.slot import _Word
from asymcheck.persist import persist
from asymcheck.planning.layout import Extent
from asymcheck.planning.retention import CheckpointId, Retention
from asymcheck.repair import (
    Repaired,
    RepairPlan,
    plan_repair,
    remnants,
    remove_remnants,
    repair,
)
from asymcheck.storage.index import Leaf
from asymcheck.storage.local import TEMP_FOLDER, LocalStore
from asymcheck.storage.memory import MemoryStore
from asymcheck.storage.repository import Repository, create_repository
from asymcheck.testing.faulty import Fault, FaultyStore

DATA = bytes(range(256)) * 64
NOBODY = ProcessId(0, 0)


@pytest.fixture(scope="module")
def dead() -> int:
    """The number of a process that was."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


@pytest.fixture
def repository() -> Repository:
    found = create_repository(MemoryStore())
    found.claim(None)
    return found


def make_slot(
    directory: Path,
    repository: Repository,
    owner: int,
    state: SlotState = SlotState.SEALED,
    attempt: int = 1,
    sparse_bytes: int = 0,
) -> Path:
    name = slot_name(repository.run, 0, 1).replace(f"-{os.getpid()}-", f"-{owner}-")
    sparse = sparse_bytes > 0
    slot = Slot.create(directory, name, sparse_bytes or 1 << 16, 1 << 16, sparse=sparse)
    capture = Capture(
        at=CheckpointId(attempt, 3),
        leaves=(Leaf("w", "uint8", (len(DATA),), 0, len(DATA), ()),),
        aliases={},
        chunks=(Extent(0, len(DATA)),),
        metrics={},
        versions={},
        created_s=0.0,
        boundary_s=0.0,
    )
    slot.begin(len(DATA), 0, dump_capture(capture))
    slot.image[: len(DATA)] = DATA
    slot.state = state
    slot._words[_Word.OWNER_PID] = owner
    slot._words[_Word.OWNER_START] = ProcessId.of(owner).start or 1
    slot.close(unlink=False)
    return directory / name


def steps(repository: Repository) -> list[int]:
    return [at.step for at in repository.survey().committed]


# --- who is alive -----------------------------------------------------------


def test_a_process_that_ended_and_was_not_waited_for_is_not_alive() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    found = ProcessId.of(child.pid)
    assert found.is_alive
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, and still in the table
    assert ProcessId.of(child.pid) == ProcessId(child.pid, 0)
    assert not found.is_alive
    child.wait()


@pytest.mark.parametrize("pid", [0, -1, 1 << 30])
def test_a_number_without_a_process_is_not_alive(pid: int) -> None:
    assert ProcessId.of(pid).start == 0
    assert not ProcessId(pid, 77).is_alive


def test_slots_of_the_dead_are_left_over_and_those_of_the_living_are_not(
    tmp_path: Path, repository: Repository, dead: int
) -> None:
    of_dead = make_slot(tmp_path, repository, dead)
    make_slot(tmp_path, repository, os.getpid())
    at = CheckpointId(1, 3)
    assert left_over(repository.run, tmp_path) == [LeftOver(of_dead, NOBODY, True, at=at)]
    assert left_over(None, tmp_path) == left_over(repository.run, tmp_path)
    assert left_over("0" * 32, tmp_path) == []
    assert living_owners(repository.run, tmp_path) == [os.getpid()]


def test_a_slot_that_is_just_being_made_belongs_to_the_process_in_its_name(
    tmp_path: Path, repository: Repository, dead: int
) -> None:
    mine, of_dead = (
        tmp_path / f"asymcheck-{os.getuid()}-{repository.run}-r0000-{pid}-1"
        for pid in (os.getpid(), dead)
    )
    for size in (0, 1 << 20):  # opened; room reserved, and nothing said yet
        for path in (mine, of_dead):
            path.touch(0o600)
            os.truncate(path, size)
        assert [old.path for old in left_over(repository.run, tmp_path)] == [of_dead]
        assert living_owners(repository.run, tmp_path) == [os.getpid()]


# --- finishing --------------------------------------------------------------


def test_a_sealed_slot_becomes_durable_and_an_unsealed_one_goes(
    tmp_path: Path, repository: Repository, dead: int
) -> None:
    said: list[str] = []
    for state, expected in ((SlotState.FILLING, []), (SlotState.SEALED, [3])):
        make_slot(tmp_path, repository, dead, state)
        done = take_over(repository, Retention(), discard, 1.0, said.append, tmp_path)
        assert [durable.step for durable in done] == expected
        assert steps(repository) == expected
        assert list(tmp_path.iterdir()) == []
    assert said == []


def test_a_slot_that_cannot_be_saved_now_stays_and_one_that_never_can_goes(
    tmp_path: Path, repository: Repository, dead: int
) -> None:
    path = make_slot(tmp_path, repository, dead)
    failing = Repository(
        FaultyStore(repository.store, Fault(op="write", name="*.pack", do="ENOSPC")),
        repository.run,
    )
    said: list[str] = []
    assert take_over(failing, Retention(), discard, 1.0, said.append, tmp_path) == []
    assert path.exists()
    assert "could not be made durable yet" in said[0]
    Repository(repository.store, repository.run).claim(None)  # another start
    (old,) = left_over(repository.run, tmp_path)
    with pytest.raises(SupersededWriter):
        finish(repository, old, Retention(), discard, monotonic() + 1.0)
    assert not path.exists()
    assert steps(repository) == []


def test_what_was_committed_just_before_the_kill_is_not_touched_again(
    tmp_path: Path, repository: Repository, dead: int
) -> None:
    path = make_slot(tmp_path, repository, dead)
    slot = Slot.open(path)
    persist(repository, slot, Retention(), discard, lambda: False)
    slot.close(unlink=False)  # committed, and killed before the slot was freed
    failing = Repository(FaultyStore(repository.store, Fault(op="write", times=0)), repository.run)
    said: list[str] = []
    take_over(failing, Retention(), discard, 1.0, said.append, tmp_path)
    assert steps(repository) == [3], "a committed checkpoint was removed"
    assert said == []
    assert not path.exists()


def test_of_two_that_finish_a_slot_at_once_only_one_does_it(
    tmp_path: Path, repository: Repository, dead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_slot(tmp_path, repository, dead)
    (old,) = left_over(repository.run, tmp_path)
    inside, go_on, calls = threading.Event(), threading.Event(), []

    def slow(*arguments: object) -> object:
        calls.append(arguments)
        inside.set()
        assert go_on.wait(60)
        return persist(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(handover, "persist", slow)
    first = threading.Thread(
        target=finish, args=(repository, old, Retention(), discard, monotonic() + 60)
    )
    first.start()
    assert inside.wait(60)
    with pytest.raises(StoreError, match="another process is at work on it"):
        finish(repository, old, Retention(), discard, monotonic() - 1)
    assert path.exists()
    second = threading.Thread(
        target=finish, args=(repository, old, Retention(), discard, monotonic() + 60)
    )
    second.start()
    go_on.set()
    first.join(60)
    second.join(60)
    assert len(calls) == 1
    assert steps(repository) == [3]
    assert not path.exists()


def test_a_persister_that_cannot_be_killed_is_not_waited_for_without_end(
    tmp_path: Path, repository: Repository, dead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_slot(tmp_path, repository, dead)
    monkeypatch.setattr(handover, "_KILL_S", 0.05)
    monkeypatch.setattr(handover.os, "kill", lambda pid, number: None)
    stuck = LeftOver(path, ProcessId.of(os.getpid()), is_sealed=True)
    with pytest.raises(StoreError, match=f"process {os.getpid()}, hangs in the kernel"):
        finish(repository, stuck, Retention(), discard, monotonic())
    assert path.exists()


# --- what may be removed ----------------------------------------------------


@pytest.fixture
def on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    """A root that a process which is dead now claimed, with a file of a write that it began."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    found = create_repository(LocalStore(tmp_path / "r"))
    with monkeypatch.context() as patch:
        patch.setattr("asymcheck.storage.repository.os.getpid", lambda: child.pid)
        Repository(found.store, found.run).claim(None)
    (tmp_path / "r" / TEMP_FOLDER).mkdir(exist_ok=True)
    (tmp_path / "r" / TEMP_FOLDER / ("0" * 32)).write_bytes(b"half")
    return found


def temp_files(repository: Repository) -> int:
    assert isinstance(repository.store, LocalStore)
    folder = repository.store.root / TEMP_FOLDER
    return len(list(folder.iterdir())) if folder.exists() else 0


def mend(plan: RepairPlan, directory: Path) -> Repaired:
    return repair(plan, discard_sealed=False, grace_s=0.0, directory=directory)


def test_files_of_a_dead_writer_go(tmp_path: Path, on_disk: Repository) -> None:
    plan = plan_repair(on_disk, tmp_path)
    assert plan.writer == ""
    assert plan.temp_files == 1
    assert plan.changes(discard_sealed=False)
    assert mend(plan, tmp_path).temp_files == 1
    assert temp_files(on_disk) == 0
    assert not plan_repair(on_disk, tmp_path).changes(discard_sealed=False)


def test_a_start_after_the_plan_was_made_keeps_its_files(
    tmp_path: Path, on_disk: Repository
) -> None:
    plan = plan_repair(on_disk, tmp_path)
    Repository(on_disk.store, on_disk.run).claim(None)
    assert isinstance(on_disk.store, LocalStore)
    folder = on_disk.store.root / TEMP_FOLDER
    folder.mkdir(exist_ok=True)
    (folder / ("1" * 32)).write_bytes(b"of the new one")
    assert mend(plan, tmp_path).temp_files == 0
    assert temp_files(on_disk) == 1


@contextmanager
def persister(run: str, trainer: ProcessId) -> Iterator[int]:
    """A process that is called as a persister is; gives its number."""
    config = json.dumps({"run": run, "trainer": [trainer.pid, trainer.start]})
    code = "import time; print(flush=True); time.sleep(600)"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "asymcheck.persist", "3", config], stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
    finally:
        process.kill()
        process.communicate()


def test_a_persister_without_a_slot_that_has_a_name_keeps_its_files(
    tmp_path: Path, on_disk: Repository, dead: int
) -> None:
    plan = plan_repair(on_disk, tmp_path)
    with persister(on_disk.run, ProcessId(dead, 1)) as pid:
        done = mend(plan, tmp_path)
    assert done.writer == f"persister process {pid} is still at work"
    assert done.temp_files == 0
    assert temp_files(on_disk) == 1


def test_a_trainer_is_known_by_its_slots_and_by_its_persister(
    tmp_path: Path, on_disk: Repository
) -> None:
    me = ProcessId.of(os.getpid())
    path = make_slot(tmp_path, on_disk, me.pid)
    with pytest.raises(OptionError, match=f"process {me.pid} is training on this run"):
        plan_repair(on_disk, tmp_path)
    path.unlink()
    with persister("0" * 32, me):
        plan_repair(on_disk, tmp_path)  # it is another run's
    with (
        persister(on_disk.run, me),
        pytest.raises(OptionError, match=f"process {me.pid} is training on this run"),
    ):
        plan_repair(on_disk, tmp_path)


def test_a_record_that_cannot_be_read_keeps_what_its_writer_may_need(
    tmp_path: Path, on_disk: Repository
) -> None:
    on_disk.store.write("attempts/000001", [b"nonsense"])
    plan = plan_repair(on_disk, tmp_path)
    assert "the record of attempt 1 cannot be read" in plan.writer
    assert mend(plan, tmp_path).temp_files == 0


def test_a_sparse_slot_is_said_to_take_what_it_takes(
    tmp_path: Path, repository: Repository, dead: int
) -> None:
    path = make_slot(tmp_path, repository, dead, sparse_bytes=1 << 24)
    (found,) = remnants(repository.run, tmp_path)
    assert path.stat().st_size > 1 << 24
    assert len(DATA) <= found.nbytes < 1 << 20


def test_a_slot_that_another_process_finishes_is_not_removed(
    tmp_path: Path, repository: Repository, dead: int
) -> None:
    path = make_slot(tmp_path, repository, dead)
    (found,) = remnants(repository.run, tmp_path)
    assert (found.at, found.trainer) == (CheckpointId(1, 3), dead)
    other = Slot.open(path)
    fcntl.flock(other.fd, fcntl.LOCK_EX)
    removal = remove_remnants([found], discard_sealed=True)
    assert removal.kept == [(found, "another process is at work on it")]
    other.close(unlink=False)
    assert remove_remnants([found], discard_sealed=True).removed == [found]
    assert not path.exists()
    assert remove_remnants([found], discard_sealed=True).removed == [found]  # gone already
