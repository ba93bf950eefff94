"""Cloned before it is copied: the update waits for nothing, and every bit is that of its step."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from asymcheck import Checkpointer, Strategy
from asymcheck.device import freezing
from asymcheck.errors import CheckpointWarning
from asymcheck.planning.policy import Admission
from asymcheck.planning.variants import TRIES, Trials
from asymcheck.session import Handle
from asymcheck.storage.memory import MemoryStore

SIDE = 200
WAIT_S = 60.0
COPY_FIRST = Strategy(capture="device-copy")


class Training:
    """Large leaves, of which each is changed all over by an update."""

    def __init__(self, strategy: Strategy = COPY_FIRST) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(SIDE, SIDE), nn.Conv2d(1, 2, SIDE).to(memory_format=torch.channels_last)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.store = MemoryStore()
        self.state = {"m": self.model, "o": self.optimizer}
        self.checkpointer = Checkpointer(self.store, state=self.state, strategy=strategy)
        self.recorded: dict[int, list[torch.Tensor]] = {}
        self.update()
        self.checkpointer.restore()

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

    @property
    def snapshotter(self) -> Any:
        return self.checkpointer._capturing()

    def check(self) -> None:
        """Each step that was saved is there, and is what it was."""
        self.checkpointer.close()
        reader = Checkpointer(self.store, state=self.state, read_only=True)
        assert reader.steps() == sorted(self.recorded)
        for step, wanted in self.recorded.items():
            reader.restore(step)
            assert all(torch.equal(a, b) for a, b in zip(self.live(), wanted, strict=True)), step


class Gate:
    """Holds the copying thread before its first piece, until it is opened."""

    def __init__(self, training: Training) -> None:
        self.reached, self._go = threading.Event(), threading.Event()
        training.snapshotter.copier.between = self._wait

    def _wait(self) -> None:
        self.reached.set()
        assert self._go.wait(WAIT_S)

    def open(self) -> None:
        self._go.set()


@pytest.fixture
def train() -> Iterator[Callable[..., Training]]:
    made: list[Training] = []

    def make(*arguments: Any) -> Training:
        made.append(Training(*arguments))
        return made[-1]

    yield make
    for training in made:
        training.checkpointer.close()


def test_the_update_does_not_wait_and_the_copy_is_of_the_step_before(
    train: Callable[..., Training],
) -> None:
    training = train()
    gate = Gate(training)
    handle = training.save(1)
    assert gate.reached.wait(WAIT_S)
    for _ in range(3):
        training.update()  # on this thread: it would hang if it waited for the copy
    with training.checkpointer.update():
        training.model[0].weight.data.zero_()
    assert not handle.captured.done()
    gate.open()
    report = handle.durable.result(WAIT_S)
    assert report.capture == "device-copy"
    assert report.fence_stall_s == 0.0
    training.check()


def test_no_storage_is_watched_and_the_seal_needs_nobody(train: Callable[..., Training]) -> None:
    training = train()
    handle = training.save(1)
    assert training.snapshotter._watched() == frozenset()
    # Neither fence nor step nor update follows: not even the training thread is needed.
    assert handle.captured.exception(WAIT_S) is None
    assert handle.durable.result(WAIT_S).step == 1


def test_the_next_capture_waits_for_the_slot_of_the_one_before(
    train: Callable[..., Training],
) -> None:
    training = train()
    gate = Gate(training)
    first = training.save(1)
    assert gate.reached.wait(WAIT_S)
    training.update()
    opener = threading.Timer(0.05, gate.open)
    opener.start()
    second = training.save(2)
    assert first.durable.done()
    opener.join(WAIT_S)
    assert second.durable.result(WAIT_S).step == 2
    training.check()


def test_of_two_slots_each_has_its_own_clones(train: Callable[..., Training]) -> None:
    strategy = Strategy(capture="device-copy", admission=Admission(max_in_flight=2))
    training = train(strategy)
    gate = Gate(training)
    training.save(1)
    training.update()
    training.save(2)
    training.update()
    gate.open()
    training.check()


def test_clones_go_as_soon_as_they_are_copied_although_the_handle_stays(
    train: Callable[..., Training], monkeypatch: pytest.MonkeyPatch
) -> None:
    training = train()
    clones: list[weakref.ref[torch.Tensor]] = []
    freeze = freezing.freeze

    def noted(placed: Any) -> Any:
        frozen = freeze(placed)
        clones.extend(weakref.ref(frozen.sources[i].array) for i in frozen.at.lazy)
        return frozen

    monkeypatch.setattr(freezing, "freeze", noted)
    gate = Gate(training)
    handle = training.save(1)
    gc.collect()
    assert clones
    assert all(ref() is not None for ref in clones)
    gate.open()
    assert handle.captured.exception(WAIT_S) is None
    handle.durable.result(WAIT_S)
    gc.collect()
    assert [ref() for ref in clones if ref() is not None] == []


def test_a_clone_that_is_not_what_was_live_is_noticed(
    train: Callable[..., Training], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The canaries are of the live state, so they hold the clones to it."""
    training = train()
    freeze = freezing.freeze

    def late(placed: Any) -> Any:
        training.model[0].weight.data.add_(1)  # as another thread would
        return freeze(placed)

    monkeypatch.setattr(freezing, "freeze", late)
    failure = training.save(1).durable.exception(WAIT_S)
    assert "'m/0.weight' changed while it was copied" in str(failure)
    training.recorded.clear()
    with pytest.warns(CheckpointWarning, match="step 1 was dropped"):
        training.checkpointer.wait()


# --- too little memory --------------------------------------------------------


@pytest.mark.parametrize("capture", ["device-copy", "profiled"])
def test_without_memory_for_a_clone_capture_is_lazy_and_says_so_once(
    train: Callable[..., Training], monkeypatch: pytest.MonkeyPatch, capture: Any
) -> None:
    training = train(Strategy(capture=capture))
    monkeypatch.setattr(freezing, "available_bytes", lambda: 1000)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in (1, 2):
            handle = training.save(step)
            training.update()
            assert handle.durable.result(WAIT_S).capture == "lazy"
    (said,) = [str(w.message) for w in caught]
    assert "a clone of the state needs" in said
    assert "bytes on cpu, where 1000 are free" in said
    monkeypatch.undo()
    assert training.save(3).durable.result(WAIT_S).capture == "device-copy"
    training.check()


def test_a_device_that_has_no_memory_in_one_piece_is_no_failure(
    train: Callable[..., Training], monkeypatch: pytest.MonkeyPatch
) -> None:
    training = train()

    def full(placed: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(freezing, "freeze", full)
    with pytest.warns(CheckpointWarning, match="needs memory in one piece: CUDA out of memory"):
        handle = training.save(1)
    training.update()
    assert handle.durable.result(WAIT_S).capture == "lazy"
    training.check()


# --- profiled -----------------------------------------------------------------


def profile(training: Training, upto: int) -> list[str]:
    used = []
    for step in range(1, upto + 1):
        handle = training.save(step)
        training.update()
        used.append(handle.durable.result(WAIT_S).capture)
    return used


@pytest.mark.parametrize(("lazy_s", "wanted"), [(-1.0, "lazy"), (1e9, "device-copy")])
def test_both_are_tried_first_and_then_the_cheaper_one_is_used(
    train: Callable[..., Training], monkeypatch: pytest.MonkeyPatch, lazy_s: float, wanted: str
) -> None:
    noted: list[tuple[str, float]] = []
    note = Trials.note

    def instead(trials: Trials, variant: Any, stall_s: float) -> Trials:
        noted.append((variant, stall_s))
        return note(trials, variant, lazy_s if variant == "lazy" else stall_s)

    monkeypatch.setattr(Trials, "note", instead)
    training = train(Strategy(capture="profiled"))
    used = profile(training, 2 * TRIES + 3)
    assert used == ["device-copy", "lazy"] * TRIES + [wanted] * 3
    # What the clones cost was measured, and what the fences waited.
    assert all(stall_s > 0 for variant, stall_s in noted if variant == "device-copy")
    assert all(stall_s >= 0 for variant, stall_s in noted if variant == "lazy")
    training.check()


def test_what_the_fence_waited_is_what_a_lazy_copy_cost(
    train: Callable[..., Training], monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: dict[str, float] = {}
    note = Trials.note
    monkeypatch.setattr(
        Trials,
        "note",
        lambda trials, variant, stall_s: (
            noted.__setitem__(variant, stall_s),
            note(trials, variant, stall_s),
        )[1],
    )
    training = train(Strategy(capture="profiled"))
    training.save(1).durable.result(WAIT_S)
    gate = Gate(training)
    handle = training.save(2)
    assert gate.reached.wait(WAIT_S)
    opener = threading.Timer(0.05, gate.open)
    opener.start()
    training.update()
    opener.join(WAIT_S)
    report = handle.durable.result(WAIT_S)
    assert report.capture == "lazy"
    training.save(3)
    assert 0 < noted["lazy"] <= report.fence_stall_s


def test_a_state_without_large_leaves_needs_no_choice() -> None:
    store = MemoryStore()
    with Checkpointer(store, state={"w": torch.ones(3)}, strategy="checkfreq") as checkpointer:
        checkpointer.restore()
        for step in range(1, 4):
            assert checkpointer.save(step).durable.result(WAIT_S).capture == "lazy"
        assert checkpointer.steps() == [1, 2, 3]
