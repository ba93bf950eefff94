"""A Checkpointer that nobody closed loses nothing and leaves nothing, however it ends."""

from __future__ import annotations

import gc
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from asymcheck import Checkpointer, SupersededWriter
from asymcheck.device.fence import UpdateHook
from asymcheck.errors import CheckpointWarning
from asymcheck.memory.arena import SHARED_MEMORY, slots_of
from asymcheck.memory.process import ProcessId
from asymcheck.storage.memory import MemoryStore
from asymcheck.storage.repository import create_repository, open_repository
from asymcheck.storage.store import open_store
from asymcheck.testing.children import TIMEOUT_S, Say, run_in_child

KINDS = ["process", "thread"]


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for what another thread or process does; bounded."""
    end_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end_s, f"timed out: {what}"
        time.sleep(0.005)


def slots(root: Path) -> list[Path]:
    return list(slots_of(SHARED_MEMORY, create_repository(open_store(str(root))).run))


def workers() -> list[str]:
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("asymcheck-"))


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "root"
    gc.collect()
    until(lambda: not slots(tmp_path / "root"), "no slot is left")


class Training:
    """A parameter that is copied lazily; each update adds one."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(200, 200, bias=False)
        torch.nn.init.zeros_(self.model.weight)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)

    def checkpointer(self, root: Any, **options: Any) -> Checkpointer:
        return Checkpointer(root, state={"m": self.model, "o": self.optimizer}, **options)

    def update(self) -> None:
        self.model.weight.grad = -torch.ones_like(self.model.weight)
        self.optimizer.step()

    @property
    def value(self) -> float:
        (found,) = set(self.model.weight.detach().reshape(-1).tolist())
        return found


# --- collected --------------------------------------------------------------


@pytest.mark.parametrize("persist", KINDS)
def test_one_that_goes_out_of_scope_finishes_its_save_and_gives_everything_back(
    root: Path, persist: str
) -> None:
    before, training = workers(), Training()
    ckpt = training.checkpointer(root, persist=persist)
    ckpt.restore()
    training.update()
    handle = ckpt.save(1)
    persister = getattr(ckpt._snapshotter._persister, "pid", None)  # type: ignore[union-attr]
    gone = weakref.ref(ckpt)
    del ckpt
    assert gone() is None, "something holds on to it"
    assert handle.durable.result(TIMEOUT_S).step == 1
    until(lambda: not slots(root), "its slots are gone")
    until(lambda: workers() == before, "its threads have ended")
    assert persister is None or not ProcessId.of(persister).start


def test_what_was_being_copied_is_saved_as_it_was_although_training_goes_on(root: Path) -> None:
    training = Training()
    ckpt = training.checkpointer(root)
    ckpt.restore()
    training.update()
    go, copying = threading.Event(), threading.Event()

    def slowly() -> None:
        copying.set()
        go.wait(TIMEOUT_S)

    ckpt._snapshotter.copier.between = slowly  # type: ignore[union-attr]
    handle = ckpt.save(1)
    assert copying.wait(TIMEOUT_S)
    del ckpt
    opener = threading.Timer(0.1, go.set)
    opener.start()
    training.update()  # waits for the copy
    assert handle.durable.result(TIMEOUT_S).step == 1
    opener.join()
    assert training.value == 2.0
    assert training.checkpointer(root, read_only=True).restore() == 1
    assert training.value == 1.0


def test_one_that_is_collected_on_any_thread_ends_as_well(root: Path) -> None:
    training = Training()
    ckpt = training.checkpointer(root)
    ckpt.restore()
    handle = ckpt.save(1)
    cycle: list[Any] = [ckpt]
    cycle.append(cycle)
    gone = weakref.ref(ckpt)
    del ckpt, cycle
    collector = threading.Thread(target=gc.collect)
    collector.start()
    collector.join()
    assert gone() is None
    assert handle.durable.result(TIMEOUT_S).step == 1
    until(lambda: not slots(root), "its slots are gone")


def test_a_fork_that_lets_go_of_it_ends_nothing_of_its_parent(root: Path) -> None:
    torch.set_num_threads(1)
    training = Training()
    held = [training.checkpointer(root)]
    held[0].restore()
    held[0].save(1).durable.result(TIMEOUT_S)
    persister = held[0]._snapshotter._persister.pid  # type: ignore[union-attr]

    def let_go(say: Say) -> None:
        held.clear()
        gc.collect()
        time.sleep(0.2)
        say(len(slots(root)))

    assert run_in_child(let_go).check() == [1]
    assert ProcessId.of(persister).start
    held[0].save(2).durable.result(TIMEOUT_S)
    assert held[0]._snapshotter._persister.pid == persister  # type: ignore[union-attr]
    held[0].close()


def test_a_closed_one_leaves_no_thread(root: Path) -> None:
    before = workers()
    with Training().checkpointer(root) as ckpt:
        ckpt.restore()
        assert workers() != before
    until(lambda: workers() == before, "its threads have ended")


# --- made again -------------------------------------------------------------


@pytest.mark.parametrize("persist", KINDS)
def test_a_cell_that_is_run_again_goes_on_from_its_last_save(root: Path, persist: str) -> None:
    training = Training()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(1, 4):
            ckpt = training.checkpointer(root, persist=persist)
            assert ckpt.restore() == step - 1
            training.update()
            ckpt.save(step)
    ckpt.close()
    assert ckpt.steps() == [1, 2, 3]


@pytest.mark.parametrize("persist", KINDS)
@pytest.mark.parametrize("first_call", ["restore", "save"])
def test_one_made_beside_an_older_one_closes_that_with_a_warning(
    root: Path, persist: str, first_call: str
) -> None:
    training = Training()
    older = training.checkpointer(root, persist=persist)
    older.restore()
    if first_call == "restore":
        training.update()
        handle = older.save(1)
    newer = training.checkpointer(root, persist=persist)
    call: Callable[[], object] = newer.restore if first_call == "restore" else lambda: newer.save(1)
    with pytest.warns(CheckpointWarning, match="another Checkpointer of this process had") as said:
        result = call()
    assert len(said) == 1
    if first_call == "restore":
        assert handle.durable.done()
        assert result == 1
    assert len(slots(root)) <= 1
    training.update()
    newer.save(2)
    with pytest.raises(SupersededWriter, match="Two jobs must not write to one root"):
        older.save(3)
    assert older.wait()
    older.close()
    newer.close()
    assert newer.steps() == [1, 2]


def test_an_older_one_can_become_the_writer_again(root: Path) -> None:
    training = Training()
    older = training.checkpointer(root)
    older.restore()
    older.save(1)
    newer = training.checkpointer(root)
    for ckpt, step in ((newer, 2), (older, 3), (newer, 4)):
        with pytest.warns(CheckpointWarning, match="another Checkpointer"):
            assert ckpt.restore() == step - 1
        ckpt.save(step)
    newer.close()
    older.close()
    assert newer.steps() == [1, 2, 3, 4]


def test_a_failure_of_the_older_one_is_still_told_by_it(root: Path) -> None:
    training = Training()
    older = training.checkpointer(root, persist="thread")
    older.restore()
    older.save(1)
    older.wait()
    open_repository(open_store(str(root))).claim(None)
    older.save(2)
    newer = training.checkpointer(root, persist="thread")
    with pytest.warns(CheckpointWarning, match="another Checkpointer"):
        assert newer.restore() == 1
    with pytest.raises(SupersededWriter, match="attempt 2 was started"):
        older.close()
    newer.close()


def test_a_reader_and_another_root_close_nobody(root: Path, tmp_path: Path) -> None:
    training = Training()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with training.checkpointer(root) as writer:
            writer.restore()
            writer.save(1).durable.result(TIMEOUT_S)
            assert training.checkpointer(root, read_only=True).restore() == 1
            with training.checkpointer(tmp_path / "other") as other:
                other.restore()
            with training.checkpointer(MemoryStore()) as other:
                other.restore()
            writer.save(2).durable.result(TIMEOUT_S)


# --- the hook ---------------------------------------------------------------


def test_a_hook_that_another_thread_takes_away_during_an_update_breaks_nothing() -> None:
    training, fenced = Training(), []

    def fence() -> None:
        fenced.append(len(fenced))
        closer = threading.Thread(target=hook.close)
        closer.start()
        closer.join()

    storage = training.model.weight.untyped_storage().data_ptr()
    hook = UpdateHook(lambda: frozenset({storage}), fence)
    later = UpdateHook(lambda: frozenset({storage}), lambda: fenced.append(-1))
    training.update()
    assert fenced == [0, -1]
    later.close()
    training.update()
    assert fenced == [0, -1]
