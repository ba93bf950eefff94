"""Between the boundary and the fence: what is captured, what is noticed, what is let go."""

from __future__ import annotations

import gc
import math
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import pytest
import torch
import torch._dynamo  # before any fork: each child would load it anew
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from asymcheck import Checkpointer, CorruptCheckpoint, Strategy
from asymcheck.capture import (
    CANARIES_PER_LEAF,
    Canary,
    CanaryWatch,
    Capture,
    dump_capture,
    parse_capture,
    place_canary,
)
from asymcheck.device.fence import UpdateHook
from asymcheck.device.snapshot import Copier
from asymcheck.errors import (
    CaptureError,
    CheckpointWarning,
    DroppedCheckpoint,
    OptionError,
    StoreError,
)
from asymcheck.events import Span, Stage
from asymcheck.memory.arena import Slot
from asymcheck.planning.layout import Extent
from asymcheck.planning.policy import Admission
from asymcheck.planning.retention import CheckpointId
from asymcheck.storage.index import Leaf
from asymcheck.storage.memory import MemoryStore
from asymcheck.storage.store import Store
from asymcheck.testing.children import Child, Say
from asymcheck.testing.faulty import Fault, FaultyStore

WAIT_S = 60.0
SIDE = 160  # of a square of floats: over 64 KiB, so it is copied lazily


# --- canaries ---------------------------------------------------------------


@given(st.integers(1, 1 << 40), st.sampled_from([1, 2, 4, 8, 16]), st.integers(0, 1 << 40))
def test_canaries_lie_in_their_leaf_and_reach_both_of_its_ends(
    elements: int, itemsize: int, turn: int
) -> None:
    at = 4096
    canary = place_canary(3, at, elements * itemsize, itemsize, turn)
    last = canary.first + (canary.count - 1) * canary.stride
    assert canary.leaf == 3
    assert 1 <= canary.count <= min(CANARIES_PER_LEAF, elements)
    assert canary.width >= itemsize
    assert canary.first == at
    assert last + canary.width == at + elements * itemsize
    assert canary.count >= min(CANARIES_PER_LEAF // 2, elements)


def test_canaries_move_on() -> None:
    spots: set[int] = set()
    for turn in range(CANARIES_PER_LEAF):
        canary = place_canary(0, 0, 64_000, 4, turn)
        spots |= {canary.first + i * canary.stride for i in range(canary.count)}
    assert len(spots) > 4 * CANARIES_PER_LEAF


def _capture(canaries: tuple[Canary, ...] = ()) -> Capture:
    return Capture(
        at=CheckpointId(3, 14),
        leaves=(
            Leaf("m/\N{SNOWMAN}", "float32", (2, 3), 0, 24, (1, 0)),
            Leaf("m/b", "uint8", (8,), 24, 8, ()),
        ),
        aliases={"tied": "m/b"},
        chunks=(Extent(0, 32),),
        metrics={"loss": math.nan, "best": -math.inf, "third": 1 / 3},
        versions={"torch": "9"},
        created_s=1764625263.1,
        boundary_s=0.1 + 0.2,
        canaries=canaries,
    )


def test_a_description_comes_back_as_it_was() -> None:
    capture = _capture((Canary(0, 0, 4, 6, 4), Canary(1, 24, 2, 4, 1)))
    found = parse_capture(dump_capture(capture), "here")
    assert math.isnan(found.metrics["loss"])
    assert {**found.metrics, "loss": 0} == {**capture.metrics, "loss": 0}
    for name in ("at", "leaves", "aliases", "chunks", "versions", "boundary_s", "canaries"):
        assert getattr(found, name) == getattr(capture, name)
    assert (found.raw_bytes, found.canary_bytes) == (32, 28)


@pytest.mark.parametrize("cut", [0, 1, 50, -1])
def test_a_description_that_was_cut_short_is_refused(cut: int) -> None:
    with pytest.raises(CorruptCheckpoint, match="slot 7"):
        parse_capture(dump_capture(_capture())[:cut], "slot 7")


@given(st.sampled_from([0, 7]), st.integers(0, 20), st.integers(1, 32))
def test_one_changed_canary_byte_names_its_leaf(byte: int, turn: int, part_bytes: int) -> None:
    """Whichever parts of the image are compared one after the other, also through a spot."""
    first = place_canary(0, 0, 24, 4, turn)
    second = place_canary(1, 24, 8, 1, turn)
    image = bytearray(random.Random(0).randbytes(32))
    capture = _capture((first, second))
    values = b"".join(
        bytes(image[c.first + i * c.stride :][: c.width])
        for c in (first, second)
        for i in range(c.count)
    )

    def torn_leaf() -> str | None:
        watch = CanaryWatch(capture, memoryview(values))
        for start in range(0, 32, part_bytes):
            watch.compare(Extent(start, min(start + part_bytes, 32)), memoryview(image))
        return watch.torn_leaf

    assert torn_leaf() is None
    image[24 + byte] ^= 1
    assert torn_leaf() == "m/b"
    image[3] ^= 0x80
    assert torn_leaf() == "m/\N{SNOWMAN}"


# --- a training with its hand on the copying thread -------------------------


class Brake:
    """Holds the copying thread before a piece until it is let go."""

    def __init__(self, copier: Copier, at: int = 1) -> None:
        self.there = threading.Event()
        self._go = threading.Event()
        self._pieces = 0
        self._at = at
        copier.between = self._between

    def _between(self) -> None:
        self._pieces += 1
        if self._pieces == self._at:
            self.there.set()
            assert self._go.wait(WAIT_S)

    def wait(self) -> None:
        assert self.there.wait(WAIT_S)

    def release(self) -> None:
        self._go.set()


class Training:
    def __init__(self, store: Store | None = None, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(SIDE, SIDE, bias=False), nn.BatchNorm1d(SIDE))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.spans: list[Span] = []
        self.store = store or MemoryStore()
        self.checkpointer = Checkpointer(
            self.store,
            state={"m": self.model, "o": self.optimizer},
            sink=self.spans.append,
            **options,
        )
        self.done = 0
        self.update()
        self.checkpointer.restore()

    @property
    def copier(self) -> Copier:
        return self.checkpointer._snapshotter.copier  # type: ignore[union-attr]

    @property
    def weight(self) -> nn.Parameter:
        return self.model[0].weight  # type: ignore[return-value]

    def forward(self) -> None:
        self.model(torch.randn(4, SIDE)).pow(2).mean().backward()

    def update(self) -> None:
        self.forward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done += 1

    def live(self) -> list[torch.Tensor]:
        state = [t for s in self.optimizer.state.values() for t in s.values() if t is not None]
        return [t.detach().clone() for t in [*self.model.state_dict().values(), *state]]

    def stored(self, step: int) -> list[torch.Tensor]:
        other = Training.__new__(Training)
        other.model = nn.Sequential(nn.Linear(SIDE, SIDE, bias=False), nn.BatchNorm1d(SIDE))
        other.optimizer = torch.optim.SGD(other.model.parameters(), lr=0.1, momentum=0.9)
        reader = Checkpointer(
            self.store, state={"m": other.model, "o": other.optimizer}, read_only=True
        )
        assert reader.restore(step) == step
        return other.live()

    def steps(self) -> list[int]:
        return self.checkpointer.steps()


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture
def train() -> Iterator[Callable[..., Training]]:
    made: list[Training] = []

    def make(*arguments: Any, **options: Any) -> Training:
        made.append(Training(*arguments, **options))
        return made[-1]

    yield make
    for training in made:
        if isinstance(training.store, FaultyStore):
            training.store.fault = Fault(do="none")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)
            training.checkpointer.close()


# --- fence, update, wait, close ---------------------------------------------


def test_save_does_not_wait_for_the_copy_and_the_update_does(
    train: Callable[..., Training],
) -> None:
    training = train()
    brake = Brake(training.copier)
    expected = training.live()
    handle = training.checkpointer.save(1)
    brake.wait()
    training.forward()  # BatchNorm's statistics change here: they were copied eagerly
    assert not handle.captured.done()
    updating = threading.Thread(target=training.optimizer.step)
    updating.start()
    updating.join(0.05)
    assert updating.is_alive(), "the update did not wait"
    brake.release()
    updating.join(WAIT_S)
    assert handle.durable.result(WAIT_S).step == 1
    assert same(training.stored(1), expected)
    assert not same(training.live(), expected)


@pytest.mark.parametrize("how", ["fence", "update", "wait", "save", "close"])
def test_each_of_these_ends_the_window(train: Callable[..., Training], how: str) -> None:
    training = train()
    checkpointer = training.checkpointer
    brake = Brake(training.copier)
    expected = training.live()
    first = checkpointer.save(1)
    brake.wait()
    brake.release()
    if how == "fence":
        checkpointer.fence()
    elif how == "update":
        with checkpointer.update():
            training.weight.data.zero_()
    elif how == "wait":
        checkpointer.wait()
    elif how == "save":
        checkpointer.save(2)  # without an update between: the same state once more
        assert first.captured.done()
        checkpointer.fence()
    else:
        checkpointer.close()
    assert first.captured.done()
    training.weight.data.fill_(7)
    if how != "close":
        checkpointer.wait()
    assert same(training.stored(1), expected)
    if how == "save":
        assert same(training.stored(2), expected)


def test_a_fence_without_a_capture_does_nothing(train: Callable[..., Training]) -> None:
    training = train()
    for _ in range(3):
        training.checkpointer.fence()
    with training.checkpointer.update():
        pass
    assert [s for s in training.spans if s.stage is Stage.FENCE] == []


def test_the_window_closes_by_itself_once_all_is_copied(train: Callable[..., Training]) -> None:
    """A step without an update (gradients are gathered) need not keep the slot open."""
    training = train(every_steps=4)
    handle = training.checkpointer.step(4)
    assert handle is not None
    assert training.checkpointer._snapshotter is not None
    active = training.checkpointer._snapshotter._active
    assert active is not None
    assert active.copy.copied.wait(WAIT_S)
    assert not handle.captured.done()
    training.checkpointer.step(5)
    assert handle.captured.done()


def test_updates_on_another_thread_wait_too(train: Callable[..., Training]) -> None:
    """The second of two optimizers on threads of their own must not slip through."""
    training = train()
    brake = Brake(training.copier)
    expected = training.live()
    training.checkpointer.save(1)
    brake.wait()
    training.forward()
    threads = [threading.Thread(target=training.optimizer.step) for _ in range(3)]
    for thread in threads:
        thread.start()
    threads[0].join(0.05)
    assert all(thread.is_alive() for thread in threads)
    brake.release()
    for thread in threads:
        thread.join(WAIT_S)
    training.checkpointer.wait()
    assert same(training.stored(1), expected)


# --- handles ----------------------------------------------------------------


@pytest.mark.parametrize("which", ["captured", "durable"])
@pytest.mark.parametrize("method", ["result", "exception"])
def test_waiting_for_a_handle_right_after_the_save_does_not_wait_for_ever(
    train: Callable[..., Training], which: str, method: str
) -> None:
    training = train()
    future = getattr(training.checkpointer.save(1), which)
    getattr(future, method)(WAIT_S)
    assert future.done()
    training.checkpointer.wait()
    assert training.steps() == [1]


def test_another_thread_may_wait_for_a_handle_and_does_not_end_the_window(
    train: Callable[..., Training],
) -> None:
    training = train()
    brake = Brake(training.copier)
    handle = training.checkpointer.save(1)
    brake.wait()
    said: list[object] = []

    def wait() -> None:
        try:
            handle.durable.result(0.01)
        except FutureTimeout:
            said.append("not yet")
        said.append(handle.durable.result(WAIT_S).step)

    waiting = threading.Thread(target=wait)
    waiting.start()
    while not said:
        pass
    brake.release()
    training.checkpointer.fence()
    waiting.join(WAIT_S)
    assert said == ["not yet", 1]


def test_a_handle_cannot_be_cancelled(train: Callable[..., Training]) -> None:
    training = train()
    handle = training.checkpointer.save(1)
    assert not handle.durable.cancel()
    assert not handle.captured.cancel()
    assert handle.durable.result(WAIT_S).step == 1


def test_lazy_capture_with_training_that_waits_until_it_is_durable_ends(
    train: Callable[..., Training],
) -> None:
    training = train(strategy=Strategy(capture="lazy", persist="before"))
    handle = training.checkpointer.save(1)
    assert handle.durable.done()
    assert training.steps() == [1]


def test_who_keeps_a_handle_keeps_no_memory(train: Callable[..., Training]) -> None:
    training = train()
    handles = []
    for step in (1, 2, 3):
        handles.append(training.checkpointer.save(step))
        training.checkpointer.wait()
        training.weight.data = torch.randn(SIDE, SIDE)
    gc.collect()
    squares = {
        t.untyped_storage().data_ptr()
        for t in gc.get_objects()
        if type(t) is torch.Tensor and t.shape == (SIDE, SIDE)
    }
    # Its momentum, and nothing of the weights that were replaced.
    assert len(squares - {training.weight.data_ptr()}) <= 1
    assert [h.durable.result(0).step for h in handles] == [1, 2, 3]


# --- what is noticed --------------------------------------------------------


def _dropped(handle_future: Future[Any]) -> DroppedCheckpoint:
    failure = handle_future.exception(WAIT_S)
    assert isinstance(failure, DroppedCheckpoint)
    return failure


@pytest.mark.parametrize("versioned", [True, False])
def test_a_write_in_the_window_drops_the_checkpoint_and_names_leaf_and_step(
    train: Callable[..., Training], versioned: bool
) -> None:
    training = train(every_steps=1)
    brake = Brake(training.copier)
    handle = training.checkpointer.step(6)
    assert handle is not None
    brake.wait()
    if versioned:
        with torch.no_grad():
            training.weight.add_(1)
    else:
        training.weight.data.add_(1)
    brake.release()
    failure = _dropped(handle.durable)
    assert (failure.step, failure.key) == (6, "m/0.weight")
    assert "version" in str(failure) or "fence()" in str(failure)
    with pytest.warns(CheckpointWarning, match=r"step 6 was dropped: 'm/0.weight'"):
        training.checkpointer.wait()
    assert training.steps() == []


def test_a_write_after_the_copy_that_moves_no_version_does_no_harm(
    train: Callable[..., Training],
) -> None:
    training = train()
    expected = training.live()
    training.checkpointer.save(1)
    active = training.checkpointer._snapshotter._active  # type: ignore[union-attr]
    assert active is not None
    assert active.copy.copied.wait(WAIT_S)
    training.weight.data.zero_()
    training.checkpointer.wait()
    assert same(training.stored(1), expected)


def test_a_copy_that_raises_drops_the_checkpoint_and_the_next_one_works(
    train: Callable[..., Training],
) -> None:
    training = train()

    def fail() -> None:
        raise MemoryError("no room to copy")

    training.copier.between = fail
    handle = training.checkpointer.save(1)
    assert "no room to copy" in str(_dropped(handle.durable))
    assert "no room to copy" in str(_dropped(handle.captured))
    training.copier.between = lambda: None
    with pytest.warns(CheckpointWarning, match="no room to copy"):
        training.checkpointer.save(2)
    training.checkpointer.wait()
    assert training.steps() == [2]


def _save_with_a_write(training: Training, step: int) -> Any:
    brake = Brake(training.copier)
    handle = training.checkpointer.save(step)
    if training.checkpointer._snapshotter._blocking:  # type: ignore[union-attr]
        assert handle.captured.done()
    else:
        brake.wait()
    training.weight.data.add_(1)
    brake.release()
    training.checkpointer.fence()
    handle.durable.exception(WAIT_S)
    return handle


def test_after_two_drops_capture_blocks_and_says_so_until_a_window_is_quiet(
    train: Callable[..., Training],
) -> None:
    training = train()
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in (1, 2):
            _save_with_a_write(training, step)
        live: dict[int, list[torch.Tensor]] = {}
        for step in (3, 4):  # now it blocks: not torn, though the writes go on
            live[step] = training.live()
            assert _save_with_a_write(training, step).durable.result(WAIT_S).step == step
        live[5] = training.live()
        training.checkpointer.save(5)  # blocking still, and the window after it is quiet
        training.checkpointer.wait()
        said += [str(w.message) for w in caught if w.category is CheckpointWarning]
    assert len([s for s in said if "was dropped" in s]) == 2
    assert len([s for s in said if "capture blocks training from now on" in s]) == 1
    assert len(said) == 3
    brake = Brake(training.copier)
    live[6] = training.live()
    handle = training.checkpointer.save(6)
    brake.wait()  # lazy again
    assert not handle.captured.done()
    brake.release()
    training.checkpointer.wait()
    assert training.steps() == [3, 4, 5, 6]
    for step, expected in live.items():
        assert same(training.stored(step), expected), step


def test_two_drops_with_a_good_checkpoint_between_do_not_make_it_block(
    train: Callable[..., Training],
) -> None:
    training = train()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in (1, 3):
            _save_with_a_write(training, step)
            training.checkpointer.save(step + 1)
            training.checkpointer.wait()
    assert not [w for w in caught if "blocks training" in str(w.message)]
    assert training.steps() == [2, 4]


def test_a_strategy_that_blocks_is_never_made_lazy(train: Callable[..., Training]) -> None:
    training = train(strategy=Strategy(capture="blocking"))
    for step in (1, 2, 3):
        handle = training.checkpointer.save(step)
        assert handle.captured.done()
        training.update()
    training.checkpointer.wait()
    assert training.steps() == [1, 2, 3]


# --- when there is no slot --------------------------------------------------


def _blocked(train: Callable[..., Training], when_full: str) -> tuple[Training, threading.Event]:
    """A training whose first checkpoint is stuck in the store until the event is set."""

    class Slow(FaultyStore):
        def write(self, name: str, parts: Any) -> int:
            if name.endswith(".pack"):
                entered.set()
                assert gate.wait(WAIT_S)
            return super().write(name, parts)

    gate, entered = threading.Event(), threading.Event()
    strategy = Strategy(admission=Admission(max_in_flight=1, when_full=when_full))  # type: ignore[arg-type]
    training = train(Slow(MemoryStore()), strategy=strategy, every_steps=1)
    training.checkpointer.step(1)
    assert entered.wait(WAIT_S)
    training.update()
    return training, gate


def test_with_skip_training_goes_on_and_the_checkpoint_is_left_out(
    train: Callable[..., Training],
) -> None:
    training, gate = _blocked(train, "skip")
    assert training.checkpointer.step(2) is None
    assert training.checkpointer.step(3) is None
    skipped = [s for s in training.spans if s.error.startswith("skipped")]
    assert [s.step for s in skipped] == [2, 3]
    gate.set()
    training.checkpointer.wait()
    assert training.checkpointer.step(4) is not None
    training.checkpointer.wait()
    assert training.steps() == [1, 4]


def test_with_raise_the_caller_hears_of_it_and_later_checkpoints_work(
    train: Callable[..., Training],
) -> None:
    training, gate = _blocked(train, "raise")
    with pytest.raises(CaptureError, match=r"step 2: 1 saves are still under way"):
        training.checkpointer.step(2)
    gate.set()
    training.checkpointer.wait()
    training.checkpointer.step(3)
    training.checkpointer.wait()
    assert training.steps() == [1, 3]


def test_with_wait_training_waits_and_nothing_is_left_out(train: Callable[..., Training]) -> None:
    training, gate = _blocked(train, "wait")
    opener = threading.Timer(0.05, gate.set)
    opener.start()
    assert training.checkpointer.step(2) is not None
    training.checkpointer.wait()
    assert training.steps() == [1, 2]
    opener.join(WAIT_S)


def test_an_explicit_save_waits_whatever_the_admission_says(
    train: Callable[..., Training],
) -> None:
    training, gate = _blocked(train, "skip")
    opener = threading.Timer(0.05, gate.set)
    opener.start()
    assert training.checkpointer.save(2).durable.result(WAIT_S).step == 2
    opener.join(WAIT_S)


# --- background failures ----------------------------------------------------


def test_a_background_failure_is_raised_once_by_the_next_call_and_later_saves_work(
    train: Callable[..., Training],
) -> None:
    store = FaultyStore(MemoryStore(), Fault(op="write", name="*.pack", do="ENOSPC"))
    training = train(store, every_steps=1)
    first = training.checkpointer.step(1)
    assert first is not None
    assert isinstance(first.durable.exception(WAIT_S), StoreError)
    with pytest.raises(StoreError, match="No space left") as told:
        training.checkpointer.step(2)
    assert "while step 1 was being persisted" in told.value.__notes__
    training.checkpointer.step(3)
    training.checkpointer.wait()
    assert training.steps() == [3]


def test_with_warn_a_background_failure_is_a_warning_and_training_goes_on(
    train: Callable[..., Training],
) -> None:
    store = FaultyStore(MemoryStore(), Fault(op="write", name="*.pack", do="EIO"))
    training = train(store, every_steps=1, on_error="warn")
    first = training.checkpointer.step(1)
    assert first is not None
    first.durable.exception(WAIT_S)
    with pytest.warns(CheckpointWarning, match=r"Input/output error.*while step 1"):
        training.checkpointer.step(2)
    training.checkpointer.wait()
    assert training.steps() == [2]


# --- interrupts and forks ---------------------------------------------------


@pytest.mark.parametrize("place", ["eager", "canaries", "begin", "queued", "reserve", "slot"])
def test_ctrl_c_in_the_middle_of_a_save_leaves_the_next_one_working(
    train: Callable[..., Training], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """In a notebook training goes on after an interrupt: no slot may be lost, nothing hang."""
    training = train()
    training.checkpointer.save(1)
    training.checkpointer.wait()

    def interrupt(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGINT)

    def after(function: Callable[..., Any]) -> Callable[..., Any]:
        def calling(*arguments: Any, **options: Any) -> Any:
            function(*arguments, **options)
            interrupt()

        return calling

    with monkeypatch.context() as patch:
        match place:
            case "eager":
                patch.setattr("asymcheck.snapshotter.copy_eager", interrupt)
            case "canaries":
                patch.setattr("asymcheck.snapshotter.copy_canaries", interrupt)
            case "begin":
                patch.setattr(Copier, "start", _once(interrupt, Copier.start))
            case "queued":
                patch.setattr(Copier, "start", _once(after(Copier.start), Copier.start))
            case "reserve":
                patch.setattr(Slot, "fits", interrupt)
            case _:
                patch.setattr(Slot, "begin", interrupt)
        with pytest.raises(KeyboardInterrupt):
            training.checkpointer.save(2)
    training.update()
    expected = training.live()
    assert training.checkpointer.save(3).durable.result(WAIT_S).step == 3
    assert set(training.steps()) >= {1, 3}
    assert same(training.stored(3), expected)


def _once(first: Callable[..., Any], then: Callable[..., Any]) -> Callable[..., Any]:
    calls = iter([first])

    def calling(*arguments: Any) -> Any:
        return next(calls, then)(*arguments)

    return calling


def _functions_of(thread: int) -> list[str]:
    frame, found = sys._current_frames().get(thread), []
    while frame is not None:
        found.append(frame.f_code.co_name)
        frame = frame.f_back
    return found


def test_ctrl_c_while_the_update_waits_tears_nothing(train: Callable[..., Training]) -> None:
    training = train()
    brake = Brake(training.copier)
    expected = training.live()
    handle = training.checkpointer.save(1)
    brake.wait()
    training.forward()
    main = threading.main_thread().ident
    assert main is not None

    def strike() -> None:
        end = time.monotonic() + WAIT_S
        while "hold_updates" not in _functions_of(main) and time.monotonic() < end:
            time.sleep(0.001)
        signal.pthread_kill(main, signal.SIGINT)

    striker = threading.Thread(target=strike)
    with pytest.raises(KeyboardInterrupt):
        striker.start()
        training.optimizer.step()
    striker.join(WAIT_S)
    brake.release()
    training.optimizer.step()
    assert handle.durable.result(WAIT_S).step == 1
    assert same(training.stored(1), expected)


@pytest.mark.parametrize("stage", [Stage.FENCE, Stage.COPY])
@pytest.mark.parametrize("changed", [False, True])
def test_ctrl_c_in_the_middle_of_the_seal_is_made_good_by_the_next_call(
    train: Callable[..., Training], stage: Stage, changed: bool
) -> None:
    training = train()
    expected = training.live()
    handle = training.checkpointer.save(1)
    if changed:
        with torch.no_grad():
            training.weight.add_(1)
    interrupts = iter([True])

    def sink(span: Span) -> None:
        if span.stage is stage and next(interrupts, False):
            signal.raise_signal(signal.SIGINT)

    training.checkpointer._snapshotter._sink = sink  # type: ignore[union-attr]
    with pytest.raises(KeyboardInterrupt):
        training.checkpointer.fence()
    if changed:
        assert _dropped(handle.durable).key == "m/0.weight"
    else:
        assert handle.durable.result(WAIT_S).step == 1
        assert same(training.stored(1), expected)
    training.update()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        assert training.checkpointer.save(2).durable.result(WAIT_S).step == 2


def test_a_close_that_was_interrupted_can_be_made_again(
    train: Callable[..., Training], monkeypatch: pytest.MonkeyPatch
) -> None:
    training = train()
    brake = Brake(training.copier)
    expected = training.live()
    training.checkpointer.save(1)
    brake.wait()
    with monkeypatch.context() as patch:
        patch.setattr(UpdateHook, "close", lambda _: signal.raise_signal(signal.SIGINT))
        brake.release()
        with pytest.raises(KeyboardInterrupt):
            training.checkpointer.close()
    training.checkpointer.close()
    training.checkpointer.close()
    assert same(training.stored(1), expected)


def test_a_forked_child_neither_closes_nor_disturbs_the_checkpointer_of_its_parent(
    train: Callable[..., Training],
) -> None:
    torch.set_num_threads(1)
    training = train(every_steps=1)
    brake = Brake(training.copier)
    expected = training.live()
    handle = training.checkpointer.save(1)
    brake.wait()
    training.forward()

    def work(say: Say) -> None:
        training.optimizer.step()  # does not wait for a copy that nobody makes here
        for call in (
            lambda: training.checkpointer.save(2),
            lambda: training.checkpointer.step(2),
            training.checkpointer.fence,
            training.checkpointer.wait,
            training.checkpointer.restore,
        ):
            try:
                call()
            except OptionError as refusal:
                say(str(refusal))
        training.checkpointer.close()

    said = Child(work).wait().check()
    assert len(said) == 5
    assert all("belongs to process" in line for line in said)
    brake.release()
    training.optimizer.step()
    assert handle.durable.result(WAIT_S).step == 1
    assert same(training.stored(1), expected)
    assert training.checkpointer.save(2).durable.result(WAIT_S).step == 2
