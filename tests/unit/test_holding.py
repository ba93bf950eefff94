"""Who works with a slot is seen where its process number means nothing: in another container."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from asymcheck.capture import Capture, dump_capture
from asymcheck.events import discard
from asymcheck.handover import left_over, living_owners, take_over
from asymcheck.memory.arena import Slot, SlotState, slot_name
from asymcheck.memory.holding import Hold, Part, is_held
from asymcheck.memory.slot import _Word
from asymcheck.planning.layout import PAGE_BYTES
from asymcheck.planning.retention import CheckpointId, Retention
from asymcheck.repair import plan_repair, remnants, remove_remnants
from asymcheck.storage.local import LocalStore
from asymcheck.storage.repository import Repository, create_repository
from asymcheck.testing.children import TIMEOUT_S, Child, Say


@pytest.fixture(scope="module")
def dead() -> int:
    """The number of a process that was."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait(TIMEOUT_S)
    return child.pid


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    found = create_repository(LocalStore(tmp_path / "root"))
    found.claim(None)
    return found


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    place = tmp_path / "shm"
    place.mkdir()
    return place


class Elsewhere:
    """A process that works on a slot, under numbers that nobody has here."""

    def __init__(
        self, memory: Path, run: str, dead: int, work: Callable[[Slot], object] = lambda slot: None
    ) -> None:
        name = slot_name(run, 0, 1).replace(f"-{os.getpid()}-", f"-{dead}-")
        self.path = memory / name

        def own(say: Say) -> None:
            slot = Slot.create(memory, name, PAGE_BYTES, PAGE_BYTES, "file:///runs/a")
            seal(slot)
            slot._words[_Word.OWNER_PID] = dead
            work(slot)
            say("there")
            time.sleep(600)

        self.child = Child(own)
        self._has_ended = False
        assert self.child.hear() == "there"

    def end(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self.child.kill()
            assert self.child.wait().was_killed


def seal(slot: Slot) -> None:
    """Give it an empty checkpoint of step 3."""
    capture = Capture(
        at=CheckpointId(1, 3),
        leaves=(),
        aliases={},
        chunks=(),
        metrics={},
        versions={},
        created_s=0.0,
        boundary_s=0.0,
    )
    slot.begin(0, 0, dump_capture(capture))
    slot.state = SlotState.SEALED


@pytest.fixture
def elsewhere(memory: Path, repository: Repository, dead: int) -> Iterator[Elsewhere]:
    made = Elsewhere(memory, repository.run, dead)
    yield made
    made.end()


def take(
    repository: Repository, memory: Path, grace_s: float = 0.05
) -> tuple[list[int], list[str]]:
    said: list[str] = []
    done = take_over(repository, Retention(), discard, grace_s, said.append, memory)
    return [durable.step for durable in done], said


def test_a_trainer_of_another_container_lives_as_long_as_its_process(
    memory: Path, repository: Repository, elsewhere: Elsewhere, dead: int
) -> None:
    assert left_over(None, memory) == []
    assert living_owners(repository.run, memory) == [dead]
    assert take(repository, memory) == ([], [])
    assert remnants(None, memory) == []
    with pytest.raises(ValueError, match=f"process {dead} is training on this run"):
        plan_repair(repository, memory)
    assert elsewhere.path.exists()
    elsewhere.end()
    (old,) = left_over(None, memory)
    assert old.root == "file:///runs/a"
    assert take(repository, memory) == ([3], [])
    assert list(memory.iterdir()) == []


def test_a_slot_that_another_container_is_making_is_nobodys_left_over(
    memory: Path, dead: int
) -> None:
    path = memory / f"asymcheck-{os.getuid()}-{'0' * 32}-r0000-{dead}-1"
    path.touch(0o600)
    fd = os.open(path, os.O_RDWR)
    hold = Hold(fd, Part.OWNER)
    assert left_over(None, memory) == []
    hold.release()
    assert [old.path for old in left_over(None, memory)] == [path]
    os.close(fd)


def test_a_persister_of_another_container_is_waited_for_and_its_slot_left_to_it(
    memory: Path, repository: Repository, dead: int
) -> None:
    def only_persist(slot: Slot) -> None:
        assert slot._hold is not None
        slot._hold.release()
        slot._hold = None
        slot.hold_as_persister()

    working = Elsewhere(memory, repository.run, dead, only_persist)
    try:
        assert [old.is_at_work for old in left_over(None, memory)] == [True]
        done, said = take(repository, memory)
        assert done == []
        assert "could not be made durable yet" in said[0]
        assert "another process is at work on it" in said[0]
        removal = remove_remnants(remnants(None, memory), discard_sealed=True)
        assert [why for _, why in removal.kept] == ["persister process 0 is at work on it"]
        assert working.path.exists()
    finally:
        working.end()
    assert take(repository, memory) == ([3], [])


def test_a_fork_that_outlives_the_trainer_holds_nothing(
    memory: Path, repository: Repository, dead: int
) -> None:
    numbers = memory.parent / "worker"

    def fork_a_worker(slot: Slot) -> None:
        worker = os.fork()
        if worker == 0:
            time.sleep(600)
        numbers.write_text(str(worker))

    gone = Elsewhere(memory, repository.run, dead, fork_a_worker)
    gone.end()
    worker = int(numbers.read_text())
    try:
        os.kill(worker, 0)
        assert take(repository, memory) == ([3], [])
    finally:
        os.kill(worker, 9)


def test_letting_go_and_closing_end_a_hold_and_looking_does_not(memory: Path) -> None:
    slot = Slot.create(memory, "slot", PAGE_BYTES, PAGE_BYTES)
    path = memory / "slot"
    for _ in range(2):
        assert is_held(path, Part.OWNER)
        assert not is_held(path, Part.PERSISTER)
    other = Slot.open(path)
    other.close(unlink=False)
    assert is_held(path, Part.OWNER)
    slot.close(unlink=False)
    assert not is_held(path, Part.OWNER)
    assert not is_held(memory / "nothing", Part.OWNER)


def test_where_there_are_no_such_locks_numbers_must_do(
    memory: Path, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fcntl.fcntl

    def refuse(fd: int, command: int, *rest: object) -> object:
        if command in (fcntl.F_OFD_SETLK, fcntl.F_OFD_GETLK):
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, command, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    before = len(os.listdir("/proc/self/fd"))
    slot = Slot.create(memory, slot_name(repository.run, 0, 1), PAGE_BYTES, PAGE_BYTES)
    assert living_owners(repository.run, memory) == [os.getpid()]
    assert left_over(None, memory) == []
    slot.close(unlink=True)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("root", "told"),
    [
        ("file:///runs/a%20b", "file:///runs/a%20b"),
        ("s3://bücket", "s3://bücket"),
        ("", ""),
        ("file:///" + "x" * PAGE_BYTES, ""),
    ],
)
def test_a_slot_says_for_which_root_it_is(memory: Path, root: str, told: str) -> None:
    slot = Slot.create(memory, "slot", PAGE_BYTES, PAGE_BYTES, root)
    seal(slot)
    other = Slot.open(memory / "slot")
    assert other.root == told
    assert other.state == SlotState.SEALED
    other._words[_Word.ROOT] = 1 << 40  # damaged: any text, and no more than the page
    assert len(other.root) < PAGE_BYTES
    other.close(unlink=False)
    slot.close(unlink=True)
