"""What counts as left over, and what happens to it: no torch, slots made by hand."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from time import monotonic

import pytest

from asymcheck import handover
from asymcheck.capture import Capture, dump_capture
from asymcheck.errors import StoreError, SupersededWriter
from asymcheck.events import discard
from asymcheck.handover import LeftOver, finish, left_over, living_owners, take_over
from asymcheck.memory.arena import ProcessId, Slot, SlotState, _Word, slot_name
from asymcheck.persist import persist
from asymcheck.planning.layout import Extent
from asymcheck.planning.retention import CheckpointId, Retention
from asymcheck.storage.index import Leaf
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
) -> Path:
    name = slot_name(repository.run, 0, 1).replace(f"-{os.getpid()}-", f"-{owner}-")
    slot = Slot.create(directory, name, 1 << 16, 1 << 16)
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
    assert left_over(repository.run, tmp_path) == [LeftOver(of_dead, NOBODY, is_sealed=True)]
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
    repository.claim(None)
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
