"""Checkpoints that stay in memory: the newest whole one always, and never two for long."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from asymcheck import Checkpointer, Strategy, strategies
from asymcheck.capture import parse_capture
from asymcheck.errors import CaptureError, CheckpointWarning, DroppedCheckpoint, StoreError
from asymcheck.memory import arena
from asymcheck.memory.arena import SHARED_MEMORY, Slot, SlotState, slots_of
from asymcheck.planning.cadence import Cadence, EverySeconds, EverySteps
from asymcheck.planning.policy import Admission
from asymcheck.planning.tiers import Placement
from asymcheck.session import Handle
from asymcheck.storage.memory import MemoryStore
from asymcheck.storage.repository import create_repository
from asymcheck.storage.store import open_store
from asymcheck.testing.faulty import Fault, FaultyStore

SIDE = 200
WAIT_S = 60.0
LONG = EverySeconds(1e6)


def placed(durable: Cadence = LONG, **more: Any) -> Strategy:
    admission = more.pop("admission", Admission(max_in_flight=2))
    return Strategy(admission=admission, placement=Placement(durable), **more)


class Training:
    def __init__(self, root: Any, strategy: Strategy, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(SIDE, SIDE)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.root = root
        self.state = {"m": self.model, "o": self.optimizer}
        self.recorded: dict[int, list[torch.Tensor]] = {}
        self.update()
        self.checkpointer = Checkpointer(root, state=self.state, strategy=strategy, **options)
        self.start = self.checkpointer.restore()

    def update(self) -> None:
        for param in self.model.parameters():
            param.grad = torch.randn_like(param) + 3
        self.optimizer.step()

    def live(self) -> list[torch.Tensor]:
        moments = [t for p in self.model.parameters() for t in self.optimizer.state[p].values()]
        return [t.detach().clone() for t in [*self.model.state_dict().values(), *moments]]

    def save(self, step: int) -> Handle:
        self.recorded[step] = self.live()
        return self.checkpointer.save(step)

    def train(self, *steps: int) -> list[str]:
        """Save and update at each of them; returns where each checkpoint came to be."""
        tiers = []
        for step in steps:
            handle = self.save(step)
            self.update()
            tiers.append(handle.durable.result(WAIT_S).tier)
        return tiers

    @property
    def snapshotter(self) -> Any:
        return self.checkpointer._capturing()

    def sealed(self) -> list[int]:
        """Steps of the checkpoints that lie sealed in shared memory."""
        found = []
        for path in slots_of(SHARED_MEMORY, create_repository(open_store(str(self.root))).run):
            slot = Slot.open(path)
            if slot.state == SlotState.SEALED:
                found.append(parse_capture(slot.meta, "slot").at.step)
            slot.close(unlink=False)
        return sorted(found)

    def check(self, steps: list[int]) -> None:
        """These are in the store, as they were."""
        reader = Checkpointer(self.root, state=self.state, read_only=True)
        assert reader.steps() == steps
        for step in steps:
            reader.restore(step)
            same = zip(self.live(), self.recorded[step], strict=True)
            assert all(torch.equal(a, b) for a, b in same), step


class Gate:
    """Holds the copying thread before its first piece, until it is opened."""

    def __init__(self, training: Training) -> None:
        self.reached, self._go = threading.Event(), threading.Event()
        self._copier = training.snapshotter.copier
        self._copier.between = self._wait

    def _wait(self) -> None:
        self.reached.set()
        assert self._go.wait(WAIT_S)

    def open(self) -> None:
        self._go.set()


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Callable[..., Training]]:
    made: list[Training] = []

    def make(strategy: Strategy | None = None, root: Any = None, **options: Any) -> Training:
        where = tmp_path / "root" if root is None else root
        made.append(Training(where, strategy or placed(), **options))
        return made[-1]

    yield make
    for training in made:
        if isinstance(training.root, FaultyStore):
            training.root.fault = Fault(do="none")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)
            training.checkpointer.close()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


# --- in memory ----------------------------------------------------------------


@pytest.mark.parametrize("persist", ["process", "thread"])
@pytest.mark.parametrize("capture", ["lazy", "device-copy", "blocking"])
def test_what_is_not_due_stays_in_memory_until_the_next_is_whole(
    train: Callable[..., Training], capture: Any, persist: str
) -> None:
    training = train(placed(capture=capture), persist=persist)
    for step in (1, 2, 3, 4):
        handle = training.save(step)
        training.update()
        report = handle.durable.result(WAIT_S)
        assert (report.tier, report.step, report.stored_bytes) == ("memory", step, 0)
        assert (report.persist_s, report.capture) == (0.0, capture)
        assert report.raw_bytes > 4 * SIDE * SIDE
        assert report.durable_s > 0
        assert report.step_stall_s > 0
        until(lambda step=step: training.sealed() == [step])
    assert training.checkpointer.steps() == []
    training.checkpointer.close()
    assert training.sealed() == []
    training.check([4])


def test_while_the_next_is_captured_the_one_before_is_whole(
    train: Callable[..., Training],
) -> None:
    training = train()
    training.train(1, 2)
    gate = Gate(training)
    handle = training.save(3)
    assert gate.reached.wait(WAIT_S)
    assert training.sealed() == [2]
    gate.open()
    training.update()
    assert handle.durable.result(WAIT_S).tier == "memory"
    until(lambda: training.sealed() == [3])
    assert len(training.snapshotter._arena.tokens()) == 2


def test_the_cadence_says_what_goes_to_the_store(train: Callable[..., Training]) -> None:
    training = train(placed(EverySteps(3)))
    tiers = training.train(*range(1, 8))
    assert tiers == ["memory", "memory", "store"] * 2 + ["memory"]
    assert training.checkpointer.steps() == [3, 6]
    training.checkpointer.close()
    training.check([3, 6, 7])


def test_the_cadence_is_told_of_the_latest_that_went_to_the_store(
    train: Callable[..., Training],
) -> None:
    told: list[tuple[int, int]] = []

    class Third:
        def due(self, *, step: int, last_step: int, since_last_s: float, under_way: int) -> bool:
            told.append((step, last_step))
            assert since_last_s >= 0
            return step - last_step >= 3

    training = train(placed(Third()))
    assert training.train(1, 2, 3, 4) == ["memory", "memory", "store", "memory"]
    assert told == [(1, 0), (2, 0), (3, 0), (4, 3)]


def test_without_a_cadence_everything_goes_to_the_store(train: Callable[..., Training]) -> None:
    training = train(Strategy(admission=Admission(max_in_flight=2)))
    assert training.train(1, 2) == ["store", "store"]
    assert training.checkpointer.steps() == [1, 2]


def test_what_is_durable_already_is_not_written_again_at_the_end(
    train: Callable[..., Training],
) -> None:
    training = train(placed(EverySteps(2)))
    begun: list[int] = []
    begin = training.snapshotter._persister.begin
    training.snapshotter._persister.begin = lambda slot, step, stored: (
        begun.append(step),
        begin(slot, step, stored),
    )[1]
    assert training.train(1, 2) == ["memory", "store"]
    training.checkpointer.close()
    assert begun == [2]


# --- to the store after all ---------------------------------------------------


def test_wait_brings_the_newest_to_the_store(train: Callable[..., Training]) -> None:
    training = train()
    training.train(1, 2)
    training.save(3)
    assert training.checkpointer.wait(WAIT_S)
    training.check([3])
    assert training.checkpointer.wait(WAIT_S)  # there is nothing more to do
    assert training.sealed() == []


def test_restoring_in_mid_run_loads_the_newest(train: Callable[..., Training]) -> None:
    training = train()
    training.train(1, 2)
    assert training.checkpointer.restore() == 2
    wanted = training.recorded[2]
    assert all(torch.equal(a, b) for a, b in zip(training.live(), wanted, strict=True))
    training.update()
    assert training.train(3) == ["memory"]


def test_going_back_in_time_leaves_the_newest_of_the_branch_behind_in_the_store(
    train: Callable[..., Training],
) -> None:
    training = train(placed(EverySteps(4)))
    training.train(*range(1, 7))
    training.save(5)  # a branch, from step 4
    training.update()
    training.checkpointer.close()
    training.check([4, 5])


def test_a_failure_of_the_last_write_is_raised_by_close(
    train: Callable[..., Training],
) -> None:
    store = FaultyStore(MemoryStore())
    training = train(root=store)
    training.train(1, 2)
    store.fault = Fault(op="write", name="*.pack", times=0)
    with pytest.raises(StoreError):
        training.checkpointer.close()


def test_what_the_store_refused_is_made_good_by_the_next(train: Callable[..., Training]) -> None:
    store = FaultyStore(MemoryStore())
    training = train(placed(EverySteps(3)), root=store, on_error="warn")
    assert training.train(1, 2) == ["memory", "memory"]
    store.fault = Fault(op="write", name="*.pack", times=0)
    handle = training.save(3)
    training.update()
    assert isinstance(handle.durable.exception(WAIT_S), StoreError)
    store.fault = Fault(do="none")
    with pytest.warns(CheckpointWarning):
        assert training.train(4) == ["store"]
    assert training.train(5, 6) == ["memory", "store"]
    training.checkpointer.close()
    training.check([4, 6])


def test_what_the_store_refused_stays_in_memory_and_is_tried_again_at_the_end(
    train: Callable[..., Training],
) -> None:
    store = FaultyStore(MemoryStore())
    training = train(placed(EverySteps(3)), root=store, on_error="warn")
    training.train(1, 2)
    store.fault = Fault(op="write", name="*.pack", times=0)
    handle = training.save(3)
    assert isinstance(handle.durable.exception(WAIT_S), StoreError)
    store.fault = Fault(do="none")
    with pytest.warns(CheckpointWarning):
        training.checkpointer.close()
    training.check([3])


# --- torn ---------------------------------------------------------------------


@pytest.mark.parametrize("seen_by", ["version", "canary"])
def test_a_torn_one_does_not_take_the_place_of_the_whole_one(
    train: Callable[..., Training], seen_by: str
) -> None:
    """The persister is not there to compare canaries, and the one before goes for good."""
    training = train()
    training.train(1, 2)
    gate = Gate(training)
    handle = training.save(3)
    assert gate.reached.wait(WAIT_S)
    if seen_by == "version":
        with torch.no_grad():
            training.model.weight.add_(1)
    else:
        training.model.weight.data.add_(1)
    gate.open()
    failure = handle.durable.exception(WAIT_S)
    assert isinstance(failure, DroppedCheckpoint)
    assert failure.step == 3
    assert failure.key == "m/weight"
    assert training.sealed() == [2]
    with pytest.warns(CheckpointWarning, match="step 3 was dropped"):
        training.checkpointer.close()
    training.check([2])


# --- too little memory --------------------------------------------------------


@pytest.mark.parametrize("when_full", ["wait", "skip"])
def test_with_memory_for_one_slot_each_goes_to_the_store_and_nothing_hangs(
    train: Callable[..., Training], monkeypatch: pytest.MonkeyPatch, when_full: Any
) -> None:
    training = train(placed(admission=Admission(2, when_full)), persist="thread")
    available = arena.available_bytes

    def enough_for_one() -> int:
        return 0 if training.snapshotter._arena.tokens() else available()

    monkeypatch.setattr(arena, "available_bytes", enough_for_one)
    assert training.train(1) == ["memory"]
    with pytest.warns(CheckpointWarning, match="1 checkpoints may be under way instead of 2"):
        assert training.train(2) == ["memory"]
    assert training.train(3) == ["memory"]
    assert training.checkpointer.steps() == [1, 2]
    training.checkpointer.close()
    training.check([1, 2, 3])


def test_memory_without_a_name_is_no_place_to_stay(
    train: Callable[..., Training],
) -> None:
    training = train()
    training.snapshotter._arena._directories = (Path("/nowhere"), Path())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert training.train(1, 2, 3) == ["store"] * 3
    said = [str(w.message) for w in caught if "each of them goes to the store" in str(w.message)]
    assert len(said) == 1
    training.checkpointer.close()
    training.check([1, 2, 3])


def test_a_store_in_memory_is_no_safer_than_a_slot(train: Callable[..., Training]) -> None:
    training = train(root=MemoryStore())
    assert training.train(1, 2) == ["memory"] * 2
    training.checkpointer.close()
    training.check([2])


@pytest.mark.parametrize("when_full", ["raise", "wait"])
def test_the_slot_that_is_on_its_way_to_the_store_is_waited_for_as_admission_says(
    train: Callable[..., Training], when_full: Any
) -> None:
    entered, go = threading.Event(), threading.Event()

    class Slow(FaultyStore):
        def write(self, name: str, parts: Any) -> int:
            if name.endswith(".pack"):
                entered.set()
                assert go.wait(WAIT_S)
            return super().write(name, parts)

    strategy = placed(EverySteps(2), admission=Admission(2, when_full))
    training = train(strategy, root=Slow(MemoryStore()), every_steps=1)
    assert training.train(1) == ["memory"]
    second = training.save(2)
    training.update()
    assert entered.wait(WAIT_S)
    # The other slot: while 2 is written, 3 takes the place of the newest in memory.
    assert training.train(3) == ["memory"]
    training.recorded[4] = training.live()
    if when_full == "raise":
        with pytest.raises(CaptureError, match="2 saves are still under way"):
            training.checkpointer.step(4)
        go.set()
    opener = threading.Timer(0.05, go.set)
    opener.start()
    handle = training.checkpointer.save(4)  # waits, whatever admission says
    assert second.durable.result(WAIT_S).tier == "store"
    opener.join(WAIT_S)
    training.update()
    assert handle.durable.result(WAIT_S).tier == "store"
    training.checkpointer.close()
    training.check([2, 4])


# --- the row ------------------------------------------------------------------


def test_gemini_keeps_each_step_in_memory(train: Callable[..., Training]) -> None:
    training = train(strategies["gemini"])
    assert training.train(*range(1, 6)) == ["memory"] * 5
    assert training.checkpointer.steps() == []
    training.checkpointer.close()
    training.check([5])


def test_what_is_whole_at_its_boundary_goes_to_the_store_once_whoever_comes_first(
    tmp_path: Path,
) -> None:
    counts = torch.zeros(3)  # nothing of it is lazy
    checkpointer = Checkpointer(tmp_path / "run", state={"c": counts}, strategy=placed())
    checkpointer.restore()
    snapshotter: Any = checkpointer._capturing()
    begun: list[int] = []
    late: list[Any] = []
    begin = snapshotter._persister.begin

    def counted(slot: Slot, step: int, *rest: Any) -> Any:
        begun.append(step)
        while late:
            late.pop().run(lambda: None)  # only now the copying thread comes to it
        return begin(slot, step, *rest)

    snapshotter._persister.begin, snapshotter.copier.start = counted, late.append
    handle = checkpointer.save(1)
    assert checkpointer.wait(WAIT_S)
    assert begun == [1]
    assert not late
    assert handle.durable.result(0).tier == "memory"
    checkpointer.close()
    assert begun == [1]
