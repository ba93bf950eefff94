"""What the next start finds in shared memory, and what it must leave alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # before any fork: each child would load it anew

from asymcheck import Checkpointer, handover, writing
from asymcheck.capture import Canary, Capture, dump_capture
from asymcheck.decoding import verify
from asymcheck.errors import CheckpointWarning, OptionError, StoreError, SupersededWriter
from asymcheck.events import discard
from asymcheck.handover import take_over
from asymcheck.memory import process as process_module
from asymcheck.memory.arena import (
    SHARED_MEMORY,
    Slot,
    SlotState,
    slot_name,
    slots_of,
)
from asymcheck.memory.holding import Hold, Part
from asymcheck.memory.process import ProcessId
from asymcheck.memory.slot import _Word
from asymcheck.planning.layout import Extent
from asymcheck.planning.retention import CheckpointId, Retention
from asymcheck.storage.index import Leaf
from asymcheck.storage.repository import Repository, create_repository
from asymcheck.storage.store import open_store
from asymcheck.testing.children import Child, Say, run_in_child

DATA = bytes(range(256)) * 64
WAIT_S = 60.0
NOBODY = ProcessId(0, 0)


@pytest.fixture(scope="module")
def dead() -> int:
    """The number of a process that was."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait(WAIT_S)
    return child.pid


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "root"
    run = create_repository(open_store(str(tmp_path / "root"))).run
    left = list(slots_of(SHARED_MEMORY, run))
    for path in left:
        path.unlink()
    assert not left, "slots were left in shared memory"


def repository_at(root: Path) -> Repository:
    return create_repository(open_store(str(root)))


def leave_slot(
    repository: Repository,
    owner: int,
    step: int = 3,
    *,
    attempt: int = 1,
    state: SlotState = SlotState.SEALED,
    start: int | None = None,
    canary: bytes = b"",
    meta: bytes | None = None,
    serial: int = 0,
    run: str = "",
    persister: ProcessId = NOBODY,
) -> Path:
    """A slot in shared memory as a trainer of that process number would have left it."""
    run = run or repository.run
    name = slot_name(run, 0, serial or step).replace(f"-{os.getpid()}-", f"-{owner}-")
    slot = Slot.create(SHARED_MEMORY, name, 1 << 16, 1 << 16)
    capture = Capture(
        at=CheckpointId(attempt, step),
        leaves=(Leaf("w", "uint8", (len(DATA),), 0, len(DATA), ()),),
        aliases={},
        chunks=(Extent(0, len(DATA)),),
        metrics={},
        versions={},
        created_s=0.0,
        boundary_s=0.0,
        canaries=(Canary(0, 0, 1, len(canary), 1),) if canary else (),
    )
    slot.begin(len(DATA), len(canary), dump_capture(capture) if meta is None else meta)
    slot.image[: len(DATA)] = DATA
    slot.canaries[:] = canary
    slot.persister = persister
    slot.state = state
    slot._words[_Word.OWNER_PID] = owner
    slot._words[_Word.OWNER_START] = (ProcessId.of(owner).start or 1) if start is None else start
    slot.close(unlink=False)
    return SHARED_MEMORY / name


class Said(list[str]):
    def __call__(self, message: str) -> None:
        self.append(message)


def finish_all(repository: Repository, said: Said | None = None, grace_s: float = 5.0) -> list[int]:
    said = Said() if said is None else said
    done = take_over(repository, Retention(), discard, grace_s, said)
    return [durable.step for durable in done]


# --- what is taken over -----------------------------------------------------


def test_every_sealed_slot_becomes_durable_and_the_newest_is_loaded(root: Path, dead: int) -> None:
    repository = repository_at(root)
    repository.claim(None)
    for serial, step in enumerate((5, 12, 9, 10), start=1):
        leave_slot(repository, dead, step, serial=serial)
    assert sorted(finish_all(repository)) == [5, 9, 10, 12]
    assert [at.step for at in repository.lineage()] == [5, 9, 10, 12]
    assert not [d for at in repository.lineage() for d in verify(repository, at)]


def test_retention_holds_for_what_is_taken_over_in_whatever_order(root: Path, dead: int) -> None:
    repository = repository_at(root)
    repository.claim(None)
    for serial, step in enumerate((30, 10, 20), start=1):
        leave_slot(repository, dead, step, serial=serial)
    take_over(repository, Retention(keep_last=1), discard, 5.0, Said())
    assert [at.step for at in repository.lineage()][-1] == 30
    repository.finish()


def test_a_slot_whose_owner_has_a_number_that_another_process_has_now_is_taken_over(
    root: Path,
) -> None:
    repository = repository_at(root)
    repository.claim(None)
    leave_slot(repository, os.getpid(), start=1)
    assert finish_all(repository) == [3]


def test_a_trainer_whose_last_thread_still_ends_is_waited_for(
    root: Path, dead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number is gone when its first thread is; what it holds goes with the last one."""
    repository = repository_at(root)
    repository.claim(None)
    path = leave_slot(repository, dead)
    with path.open("rb") as file:
        hold = Hold(file.fileno(), Part.OWNER)
    monkeypatch.setattr(handover, "sleep", lambda _: hold.release())
    assert finish_all(repository) == [3]


def test_a_torn_slot_is_given_up_with_the_name_of_the_leaf(root: Path, dead: int) -> None:
    repository = repository_at(root)
    repository.claim(None)
    leave_slot(repository, dead, canary=b"\x00\x01\xff")
    said = Said()
    assert finish_all(repository, said) == []
    assert len(said) == 1
    assert "'w' changed while it was copied" in said[0]
    assert "step 3" in said[0]
    assert repository.lineage() == []


@pytest.mark.parametrize("meta", [b"", b"\x00" * 100, b'{"at":[1,3]}\n'])
def test_a_slot_with_a_damaged_description_is_given_up(root: Path, dead: int, meta: bytes) -> None:
    repository = repository_at(root)
    repository.claim(None)
    leave_slot(repository, dead, meta=meta)
    said = Said()
    assert finish_all(repository, said) == []
    assert len(said) == 1
    assert "was given up" in said[0]


@pytest.mark.parametrize("state", [SlotState.FREE, SlotState.FILLING, SlotState.DROPPED])
def test_a_slot_that_was_not_sealed_only_goes(root: Path, dead: int, state: SlotState) -> None:
    repository = repository_at(root)
    repository.claim(None)
    path = leave_slot(repository, dead, state=state)
    said = Said()
    assert finish_all(repository, said) == []
    assert said == []
    assert not path.exists()


# --- what is left alone -----------------------------------------------------


def test_slots_of_a_living_trainer_and_of_other_runs_are_left_alone(root: Path, dead: int) -> None:
    repository = repository_at(root)
    repository.claim(None)
    theirs = [
        leave_slot(repository, os.getpid(), 1),
        leave_slot(repository, dead, 2, run=uuid.uuid4().hex),
    ]
    assert finish_all(repository) == []
    for path in theirs:
        assert path.exists()
        path.unlink()


def test_a_process_that_only_has_the_number_of_a_dead_persister_is_not_waited_for_nor_killed(
    root: Path, dead: int
) -> None:
    repository = repository_at(root)
    repository.claim(None)
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        leave_slot(repository, dead, persister=ProcessId(stranger.pid, 1))
        begin = time.monotonic()
        assert finish_all(repository, grace_s=WAIT_S) == [3]
        assert time.monotonic() - begin < WAIT_S / 2
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait(WAIT_S)


def test_a_persister_that_is_at_work_is_waited_for(root: Path, dead: int) -> None:
    repository = repository_at(root)
    repository.claim(None)
    working = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    path = leave_slot(repository, dead, persister=ProcessId.of(working.pid))
    taken: list[list[int]] = []
    taker = threading.Thread(target=lambda: taken.append(finish_all(repository, grace_s=WAIT_S)))
    taker.start()
    taker.join(0.1)
    assert taker.is_alive()
    path.unlink()  # it finished the slot, and ends
    working.communicate(b"\n", WAIT_S)
    taker.join(WAIT_S)
    assert taken == [[]]
    assert repository.lineage() == []


def test_a_persister_that_takes_too_long_is_ended_and_its_slot_saved(root: Path, dead: int) -> None:
    repository = repository_at(root)
    repository.claim(None)
    hanging = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    leave_slot(repository, dead, persister=ProcessId.of(hanging.pid))
    assert finish_all(repository, grace_s=0.05) == [3]
    assert hanging.wait(WAIT_S) == -9


# --- who is on the way out --------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "pending", "ending"),
    [
        (0x400000, "0000000000000000", False),
        (0x400000, "0000000000004002", False),  # SIGINT and SIGTERM: it may live on
        (0x400000, "0000000000000100", True),  # SIGKILL
        (0x400004, "0000000000000000", True),  # exiting
        (0x400200, "0000000000000000", True),  # dumping its core
    ],
)
def test_a_process_that_was_sent_sigkill_is_ending_though_it_lives(
    monkeypatch: pytest.MonkeyPatch, flags: int, pending: str, ending: bool
) -> None:
    stat = f"7 (a) b) S 1 7 7 0 -1 {flags} " + "0 " * 12 + "4711 0 0"

    def read(path: str) -> str:
        return {
            "/proc/7/stat": stat,
            "/proc/7/status": f"Name:\ta\nSigPnd:\t{'0' * 16}\nShdPnd:\t{pending}\n",
        }[path]

    monkeypatch.setattr(process_module, "read_text", read)
    assert ProcessId(7, 4711).is_alive
    assert ProcessId(7, 4711).is_ending == ending
    assert not ProcessId(7, 4712).is_ending


def test_a_living_process_is_not_ending_and_a_dead_one_is_not_either(dead: int) -> None:
    assert not ProcessId.of(os.getpid()).is_ending
    assert not ProcessId(dead, 5).is_ending


def test_a_trainer_that_is_being_killed_is_waited_for(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To give back many gigabytes takes a while, and the job may be started again at once."""
    repository = repository_at(root)
    repository.claim(None)
    dying = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    leave_slot(repository, dying.pid)
    asked = threading.Event()

    def is_ending(self: ProcessId) -> bool:
        asked.set()
        return self.pid == dying.pid and self.is_alive

    monkeypatch.setattr(ProcessId, "is_ending", property(is_ending))
    taken: list[list[int]] = []
    taker = threading.Thread(target=lambda: taken.append(finish_all(repository, grace_s=WAIT_S)))
    taker.start()
    assert asked.wait(WAIT_S)
    dying.kill()
    dying.wait(WAIT_S)
    taker.join(WAIT_S)
    assert taken == [[3]]


def test_a_persister_that_outlived_its_trainer_is_waited_for_though_its_slot_has_no_name(
    root: Path, dead: int
) -> None:
    repository = repository_at(root)
    repository.claim(None)
    config = json.dumps({"run": repository.run, "trainer": [dead, 1]})
    working = subprocess.Popen(
        [sys.executable, "-c", "input()", "asymcheck.persist", config], stdin=subprocess.PIPE
    )
    taken: list[list[int]] = []
    taker = threading.Thread(target=lambda: taken.append(finish_all(repository, grace_s=WAIT_S)))
    taker.start()
    taker.join(0.2)
    assert taker.is_alive()
    working.communicate(b"\n", WAIT_S)
    taker.join(WAIT_S)
    assert taken == [[]]


# --- by a Checkpointer ------------------------------------------------------


def _checkpointer(root: Path, **options: Any) -> tuple[Checkpointer, torch.Tensor]:
    weight = torch.zeros(8)
    return Checkpointer(root, state={"w": weight}, **options), weight


def until_hashed(checkpointer: Checkpointer) -> None:
    """Wait until what is sealed has its hashes."""
    run = checkpointer._existing().run
    end = time.monotonic() + WAIT_S
    while not any(
        slot.hashes and slot.state == SlotState.SEALED
        for path in slots_of(SHARED_MEMORY, run)
        for slot in [Slot.open(path)]
    ):
        assert time.monotonic() < end, "timed out: it is hashed"
        time.sleep(0.002)


def die_with_a_sealed_slot(root: Path, persist: str) -> int:
    """A trainer that is killed with step 2 sealed and not yet written; returns its number."""
    torch.set_num_threads(1)

    def work(say: Say) -> None:
        from asymcheck.storage.local import LocalStore

        write = LocalStore.write

        def stuck(self: LocalStore, name: str, parts: Any) -> int:
            if name.startswith("step-00000002"):
                until_hashed(checkpointer)
                say("stuck")
                time.sleep(600)
            return write(self, name, parts)

        LocalStore.write = stuck  # type: ignore[method-assign]
        checkpointer, weight = _checkpointer(root, persist=persist)
        checkpointer.restore()
        for step in (1, 2):
            weight.fill_(step)
            handle = checkpointer.save(step)
            if step == 1:
                handle.durable.result(WAIT_S)
        time.sleep(600)

    child = Child(work)
    assert child.hear() == "stuck"
    child.kill()
    assert child.wait().was_killed
    return child.pid


@pytest.mark.parametrize("persist", ["thread", "process"])
def test_what_a_thread_of_a_killed_trainer_had_not_written_is_loaded_by_the_next_start(
    root: Path, persist: str
) -> None:
    """With a thread nobody outlives the trainer; the memory does."""
    die_with_a_sealed_slot(root, "thread")
    repository = repository_at(root)
    assert [at.step for at in repository.lineage()] == [1]
    assert len(list(slots_of(SHARED_MEMORY, repository.run))) == 1
    checkpointer, weight = _checkpointer(root, persist=persist)
    with checkpointer:
        assert checkpointer.restore() == 2
        assert torch.equal(weight, torch.full((8,), 2.0))
    assert not list(root.glob(".tmp/*"))


def test_a_save_in_memory_without_a_name_is_waited_for_after_its_trainer_was_killed(
    root: Path,
) -> None:
    """Nobody else can save it: its persister must be let finish before the root is claimed."""
    torch.set_num_threads(1)
    url = f"faulty+file://{root}?op=write&name=step-00000002/*.pack&do=stop"

    def work(say: Say) -> None:
        writing.SHARED_MEMORY = root / "no such place"  # type: ignore[attr-defined]
        warnings.simplefilter("ignore")
        weight = torch.zeros(8)
        checkpointer = Checkpointer(url, state={"w": weight})
        checkpointer.restore()
        for step in (1, 2):
            weight.fill_(step)
            handle = checkpointer.save(step)
            handle.captured.result(WAIT_S)
            if step == 1:
                handle.durable.result(WAIT_S)
        say(checkpointer._snapshotter._persister.pid)  # type: ignore[union-attr]
        time.sleep(600)

    child = Child(work)
    persister = child.hear()
    until = time.monotonic() + WAIT_S
    while Path(f"/proc/{persister}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < until
        time.sleep(0.01)
    child.kill()
    assert child.wait().was_killed
    assert not list(slots_of(SHARED_MEMORY, repository_at(root).run))
    goer = threading.Timer(0.3, os.kill, (persister, signal.SIGCONT))
    goer.start()
    checkpointer, weight = _checkpointer(root, persist="thread")
    with checkpointer:
        assert checkpointer.restore() == 2
        assert torch.equal(weight, torch.full((8,), 2.0))
    goer.join(WAIT_S)


def test_who_only_reads_takes_nothing_over(root: Path) -> None:
    die_with_a_sealed_slot(root, "thread")
    reader, weight = _checkpointer(root, read_only=True)
    assert reader.restore() == 1
    assert torch.equal(weight, torch.full((8,), 1.0))
    reader.close()
    with _checkpointer(root)[0] as writer:
        assert writer.restore() == 2


def test_a_start_beside_what_is_there_saves_what_was_left_too(root: Path) -> None:
    die_with_a_sealed_slot(root, "thread")
    checkpointer, _ = _checkpointer(root, persist="thread")
    with checkpointer:
        assert checkpointer.restore(resume="never") == 0
    reader, _ = _checkpointer(root, read_only=True)
    assert reader.restore() == 2


def test_a_save_without_a_restore_takes_over_first_and_then_refuses(root: Path) -> None:
    die_with_a_sealed_slot(root, "thread")
    checkpointer, _ = _checkpointer(root, persist="thread")
    with checkpointer, pytest.raises(OptionError, match="up to step 2: call restore"):
        checkpointer.save(3)


def test_a_slot_that_nobody_hashed_and_that_has_no_room_is_left_behind(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    die_with_a_sealed_slot(root, "thread")
    for path in slots_of(SHARED_MEMORY, create_repository(open_store(str(root))).run):
        slot = Slot.open(path)
        slot.leave_hashes(b"")
        slot.close(unlink=False)
    with monkeypatch.context() as patch:
        patch.setattr("asymcheck.storage.local.LocalStore.free_bytes", lambda _: 10)
        checkpointer, weight = _checkpointer(root, persist="thread")
        with pytest.warns(CheckpointWarning, match="could not be made durable yet"):
            assert checkpointer.restore() == 1
        # The newer attempt is this one: what the dead one left is of a branch left behind.
        checkpointer.close()
    later, weight = _checkpointer(root, persist="thread")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert later.restore() == 1
    assert torch.equal(weight, torch.full((8,), 1.0))
    assert any("was given up" in str(w.message) for w in caught)
    later.close()


def test_a_slot_that_is_kept_for_want_of_room_is_saved_by_a_later_start(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    die_with_a_sealed_slot(root, "thread")
    with monkeypatch.context() as patch:
        patch.setattr("asymcheck.storage.local.LocalStore.free_bytes", lambda _: 10)
        checkpointer, weight = _checkpointer(root, persist="thread")
        assert checkpointer.restore() == 2
        assert torch.equal(weight, torch.full((8,), 2.0))
        with (
            pytest.warns(CheckpointWarning, match="could not be made durable yet"),
            pytest.raises(StoreError, match="it stays there, and the next save tries again"),
        ):
            checkpointer.close()
    later, weight = _checkpointer(root, persist="thread")
    assert later.restore() == 2
    assert torch.equal(weight, torch.full((8,), 2.0))
    later.close()
    assert not list(slots_of(SHARED_MEMORY, create_repository(open_store(str(root))).run))


def test_restoring_in_mid_run_ends_the_capture_and_takes_nothing_from_itself(root: Path) -> None:
    side = 200
    weight = torch.nn.Parameter(torch.ones(side, side))
    with Checkpointer(root, state={"m": torch.nn.ParameterList([weight])}) as checkpointer:
        checkpointer.restore()
        copier = checkpointer._snapshotter.copier  # type: ignore[union-attr]
        go = threading.Event()
        copier.between = lambda: go.wait(WAIT_S)
        handle = checkpointer.save(1)
        opener = threading.Timer(0.05, go.set)
        opener.start()
        assert checkpointer.restore() == 1
        assert handle.durable.done()
        assert torch.equal(weight, torch.ones(side, side))
        weight.data.fill_(2)
        checkpointer.save(2)
        checkpointer.wait()
        assert checkpointer.steps() == [1, 2]
        opener.join(WAIT_S)


def test_a_second_job_on_the_root_takes_nothing_from_the_living_first(root: Path) -> None:
    torch.set_num_threads(1)
    first, _ = _checkpointer(root)
    first.restore()
    first.save(1).durable.result(WAIT_S)
    slots = set(slots_of(SHARED_MEMORY, repository_at(root).run))

    def second(say: Say) -> None:
        checkpointer, weight = _checkpointer(root)
        with checkpointer:
            say(checkpointer.restore())
            say(slots <= set(slots_of(SHARED_MEMORY, repository_at(root).run)))
            weight.fill_(5)
            checkpointer.save(2)
            checkpointer.wait()

    assert run_in_child(second).check() == [1, True]
    first.save(3)
    with pytest.raises(SupersededWriter, match="Two jobs must not write to one root"):
        first.wait()
    first.close()
    assert first.steps() == [1, 2]


def test_two_checkpointers_on_two_roots_in_one_process_do_not_meet(
    tmp_path: Path, root: Path
) -> None:
    """Both hold the same model; each fences and writes on its own."""
    side = 200
    model = torch.nn.Linear(side, side)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    one = Checkpointer(root, state={"m": model}, every_steps=1)
    two = Checkpointer(tmp_path / "other", state={"m": model, "o": optimizer}, every_steps=2)
    expected: dict[int, torch.Tensor] = {}
    with one, two:
        one.restore()
        two.restore()
        for step in range(1, 7):
            model(torch.randn(2, side)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            expected[step] = model.weight.detach().clone()
            one.step(step)
            two.step(step)
    for where, steps in ((root, [1, 2, 3, 4, 5, 6]), (tmp_path / "other", [2, 4, 6])):
        state: dict[str, object] = {"m": model, **({"o": optimizer} if where != root else {})}
        reader = Checkpointer(where, state=state, read_only=True)
        assert reader.steps() == steps
        for step in steps:
            reader.restore(step)
            assert torch.equal(model.weight, expected[step])
