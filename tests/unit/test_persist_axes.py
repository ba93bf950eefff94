"""Whole trainings with several checkpoints written at a time, and with a bounded ring."""

from __future__ import annotations

import fnmatch
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from time import monotonic, sleep

import pytest
import torch
from torch import nn

from asymcheck import Checkpointer, Strategy, strategies
from asymcheck.errors import CheckpointWarning, OptionError
from asymcheck.planning.layout import CHUNK_BYTES, MiB
from asymcheck.planning.policy import LEAST_RING_BYTES, Admission
from asymcheck.planning.selection import RAW, Selection
from asymcheck.storage.memory import MemoryStore
from asymcheck.storage.store import Buffer
from asymcheck.testing.faulty import Fault, FaultyStore

WAIT_S = 60.0
RING = Strategy(admission=Admission(max_in_flight=4, ring_bytes=LEAST_RING_BYTES), batching="each")


def until(condition: Callable[[], bool], what: str) -> None:
    end = monotonic() + WAIT_S
    while not condition():
        assert monotonic() < end, f"timed out: {what}"
        sleep(0.002)


class HeldStore(MemoryStore):
    """Holds writes of some names before their first byte until it is let go."""

    def __init__(self, name: str) -> None:
        super().__init__("held")
        self.held = name
        self.go = threading.Event()

    def write(self, name: str, parts: Iterable[Buffer]) -> int:
        if fnmatch.fnmatchcase(name, self.held):
            assert self.go.wait(WAIT_S)
        return super().write(name, parts)


class Training:
    """Parameters of so many MiB, and as much momentum; each step's state is another one."""

    def __init__(self, root: object, mib: int, **options: object) -> None:
        torch.manual_seed(0)
        side = 512
        self.model = nn.ParameterList(nn.Parameter(torch.rand(side, side)) for _ in range(mib))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        state = {"m": self.model, "o": self.optimizer}
        self.checkpointer = Checkpointer(root, state=state, **options)  # type: ignore[arg-type]
        self.step = self.checkpointer.restore()

    def update(self) -> None:
        self.step += 1
        for i, param in enumerate(self.model.parameters()):
            param.grad = torch.full_like(param, self.step + i / 8)
        self.optimizer.step()

    def live(self) -> list[torch.Tensor]:
        state = [t for p in self.model.parameters() for t in self.optimizer.state[p].values()]
        return [t.detach().clone() for t in [*self.model.parameters(), *state]]

    @property
    def slots(self):
        return self.checkpointer._snapshotter._arena.ring.slots  # type: ignore[union-attr]


@pytest.fixture
def train() -> Iterator[Callable[..., Training]]:
    made: list[Training] = []

    def make(root: object, mib: int = 1, **options: object) -> Training:
        made.append(Training(root, mib, **options))
        return made[-1]

    yield make
    for training in made:
        if isinstance(training.checkpointer._store, HeldStore):
            training.checkpointer._store.go.set()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)
            training.checkpointer.close()


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# --- several at a time ------------------------------------------------------


@pytest.mark.parametrize(("keep_last", "left"), [(None, [1, 2, 3]), (3, [1, 2, 3]), (2, [2, 3])])
def test_a_slow_old_checkpoint_takes_no_newer_one_away(
    train: Callable[..., Training], keep_last: int | None, left: list[int]
) -> None:
    """With N = 2 at a time PCcheck keeps N + 1; one that was overtaken goes first."""
    store = HeldStore("step-00000001/*.pack")
    strategy = Strategy(admission=Admission(max_in_flight=2, at_once=2), writers=2)
    training = train(store, strategy=strategy, keep_last=keep_last)
    training.update()
    slow = training.checkpointer.save(1)
    states = {}
    for step in (2, 3):
        training.update()
        states[step] = training.live()
        assert training.checkpointer.save(step).durable.result(WAIT_S).step == step
    assert training.checkpointer.steps() == [2, 3]
    store.go.set()
    assert slow.durable.result(WAIT_S).step == 1
    training.checkpointer.wait()
    assert training.checkpointer.steps() == left
    assert training.checkpointer.restore() == 3
    assert same(training.live(), states[3])


@pytest.mark.parametrize("name", ["pccheck", "datastates"])
@pytest.mark.parametrize("persist", ["process", "thread"])
def test_what_was_saved_comes_back_bit_for_bit(
    train: Callable[..., Training], tmp_path: Path, name: str, persist: str
) -> None:
    training = train(tmp_path, strategy=name, persist=persist, keep_last=3)
    states = {}
    for step in range(1, 6):
        training.update()
        states[step] = training.live()
        training.checkpointer.save(step)
    training.checkpointer.close()
    for step in (3, 4, 5):
        other = train(tmp_path, read_only=True)
        assert other.checkpointer.steps() == [3, 4, 5]
        assert other.checkpointer.restore(step) == step
        assert same(other.live(), states[step])


def test_a_failure_between_data_and_manifest_keeps_the_one_before(
    train: Callable[..., Training],
) -> None:
    store = FaultyStore(MemoryStore())
    training = train(store, strategy="pccheck")
    training.update()
    before = training.live()
    training.checkpointer.save(1)
    training.checkpointer.wait()
    store.fault = Fault(op="write", name="*-MANIFEST.json", when="before", do="EIO")
    training.update()
    failure = training.checkpointer.save(2).durable.exception(WAIT_S)
    assert "injected" in str(failure)
    other = train(store.inner, read_only=True)
    assert other.checkpointer.restore() == 1
    assert same(other.live(), before)
    with pytest.raises(Exception, match="injected"):
        training.checkpointer.wait()


# --- a bounded ring ---------------------------------------------------------


def test_the_update_waits_for_the_copy_and_not_for_the_flush(
    train: Callable[..., Training],
) -> None:
    """The ring holds several versions: nothing of the first one can be written meanwhile."""
    store = HeldStore("*.pack")
    training = train(store, 3, strategy=RING)
    handles, states = [], {}
    for step in (1, 2, 3):
        training.update()  # returns: the copy of the step before is done
        states[step] = training.live()
        handles.append(training.checkpointer.save(step))
    training.checkpointer.fence()
    assert all(h.captured.done() for h in handles)
    assert not any(h.durable.done() for h in handles)
    store.go.set()
    training.checkpointer.wait()
    for step in (1, 2, 3):
        assert training.checkpointer.restore(step) == step
        assert same(training.live(), states[step])


def test_a_state_larger_than_the_ring_blocks_at_the_flush_within_its_memory(
    train: Callable[..., Training],
) -> None:
    store = HeldStore("*.pack")
    training = train(store, 24, strategy=RING)
    training.update()
    expected = training.live()
    handle = training.checkpointer.save(1)
    active = training.checkpointer._snapshotter._active  # type: ignore[union-attr]
    copy = active.copy  # type: ignore[union-attr]
    (slot,) = training.slots
    until(lambda: slot.copied_bytes >= LEAST_RING_BYTES - MiB, "the ring is full")
    assert not copy.issued.wait(0.1), "nothing may happen: a wrong one would copy on"
    assert os.fstat(slot.fd).st_blocks * 512 <= LEAST_RING_BYTES + CHUNK_BYTES
    store.go.set()
    training.checkpointer.fence()
    assert handle.durable.result(WAIT_S).raw_bytes > 47 * MiB
    training.update()
    assert training.checkpointer.restore() == 1
    assert same(training.live(), expected)


def test_a_close_ends_in_time_though_nothing_makes_room(train: Callable[..., Training]) -> None:
    store = HeldStore("*.pack")
    training = train(store, 24, strategy=RING, grace_s=0.2)
    training.update()
    handle = training.checkpointer.save(1)
    with pytest.raises(Exception, match="still pending"):
        training.checkpointer.close()
    store.go.set()
    assert "step 1 was dropped" in str(handle.captured.exception(WAIT_S))


def test_a_killed_persister_loses_one_checkpoint_and_changes_nothing_else(
    train: Callable[..., Training], tmp_path: Path
) -> None:
    """Three times: nothing changed in the state, so capture does not become blocking."""
    training = train(tmp_path, 24, strategy=RING, persist="process")
    for step in (1, 2, 3):
        training.update()
        piece = threading.Event()
        go = threading.Event()
        seen = 0

        def between(piece: threading.Event = piece, go: threading.Event = go) -> None:
            nonlocal seen
            seen += 1
            if seen == 40:
                piece.set()
                assert go.wait(WAIT_S)

        snapshotter = training.checkpointer._snapshotter
        assert snapshotter is not None
        snapshotter.copier.between = between
        handle = training.checkpointer.save(step)
        assert piece.wait(WAIT_S)
        slot = snapshotter._active.copy.slot  # type: ignore[union-attr]
        until(lambda slot=slot: slot.is_torn, "memory was given back")
        os.kill(snapshotter._persister.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        go.set()
        training.checkpointer.fence()
        assert "given memory of it back" in str(handle.durable.exception(WAIT_S))
        with pytest.warns(CheckpointWarning, match=f"step {step} was dropped"):
            training.checkpointer.wait()
        assert not snapshotter._blocking
    snapshotter.copier.between = lambda: None
    training.update()
    expected = training.live()
    assert training.checkpointer.save(4).durable.result(WAIT_S).step == 4
    assert training.checkpointer.steps() == [4]
    assert training.checkpointer.restore() == 4
    assert same(training.live(), expected)


# --- what excludes each other -----------------------------------------------


def test_policies_that_exclude_each_other_are_refused() -> None:
    two = Admission(max_in_flight=2, at_once=2)
    with pytest.raises(OptionError, match="at_once: expected 1 with selection rule 'measured'"):
        Strategy(admission=two, selection=Selection())
    with pytest.raises(OptionError, match="ring_bytes: expected None with selection rule"):
        Strategy(admission=RING.admission, selection=Selection())
    with pytest.raises(OptionError, match="ring_bytes: expected None with capture='blocking'"):
        Strategy(admission=RING.admission, capture="blocking")
    with pytest.raises(OptionError, match="writers: expected an integer from 1 on"):
        Strategy(writers=0)
    for at_once in (0, 3, True, 1.0):
        with pytest.raises(OptionError, match="at_once: expected an integer from 1 to"):
            Admission(max_in_flight=2, at_once=at_once)  # type: ignore[arg-type]
    for ring_bytes in (0, CHUNK_BYTES, LEAST_RING_BYTES - 1, 1e9):
        with pytest.raises(OptionError, match="ring_bytes: expected None or an integer from"):
            Admission(ring_bytes=ring_bytes)  # type: ignore[arg-type]
    for name in ("pccheck", "datastates"):
        assert strategies[name].selection == RAW
