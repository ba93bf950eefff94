"""Lazy capture in the trainings that people really run, and on machines that give too little."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, sleep
from typing import Any

import pytest
import torch
import torch._dynamo  # before any fork: each child would load it anew
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import asymcheck
from asymcheck import Checkpointer, StoreError, Strategy
from asymcheck.errors import CheckpointWarning, OptionError
from asymcheck.events import Span, Stage
from asymcheck.memory.arena import SHARED_MEMORY, Slot, slots_of
from asymcheck.memory.process import ProcessId
from asymcheck.planning.policy import Admission
from asymcheck.storage.memory import MemoryStore
from asymcheck.storage.repository import create_repository
from asymcheck.storage.store import open_store
from asymcheck.testing.children import Child, Say
from asymcheck.testing.faulty import Fault, FaultyStore

WAIT_S = 60.0
SIDE = 150  # of a square of floats: over 64 KiB, so it is copied lazily
SOURCE = str(Path(asymcheck.__file__).parents[1])


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(3)


def until(condition: Callable[[], bool], what: str) -> None:
    end = monotonic() + WAIT_S
    while not condition():
        assert monotonic() < end, f"timed out: {what}"
        sleep(0.002)


class Brake:
    """Holds the copying thread before its first piece until it is let go."""

    def __init__(self, checkpointer: Checkpointer) -> None:
        self._there, self._go = threading.Event(), threading.Event()
        copier = checkpointer._snapshotter.copier  # type: ignore[union-attr]
        copier.between = self._between

    def _between(self) -> None:
        self._there.set()
        assert self._go.wait(WAIT_S)

    def wait(self) -> None:
        assert self._there.wait(WAIT_S)

    def release(self) -> None:
        self._go.set()


class Recorder:
    """Saves, remembers what was live, and compares it with what comes back."""

    def __init__(self, state: dict[str, Any], root: Any = None, **options: Any) -> None:
        self.state = state
        self.root = MemoryStore() if root is None else root
        self.spans: list[Span] = []
        self.checkpointer = Checkpointer(self.root, state=state, sink=self.spans.append, **options)
        self.live: dict[int, dict[str, torch.Tensor]] = {}
        self.checkpointer.restore()

    def tensors(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for name, value in self.state.items():
            if isinstance(value, nn.Module):
                found |= {f"{name}/{k}": t for k, t in value.state_dict().items()}
            elif isinstance(value, torch.optim.Optimizer):
                for g, group in enumerate(value.param_groups):
                    for i, param in enumerate(group["params"]):
                        found |= _flatten(f"{name}/{g}.{i}", value.state.get(param, {}))
        return {k: t.detach().clone() for k, t in found.items()}

    def save(self, step: int) -> Any:
        self.live[step] = self.tensors()
        return self.checkpointer.save(step)

    def check(self) -> None:
        """Every step that was saved is there and is what was live."""
        self.checkpointer.wait()
        root = self.root if isinstance(self.root, MemoryStore) else str(self.root)
        reader = Checkpointer(root, state=self.state, read_only=True)
        assert reader.steps() == sorted(self.live)
        for step, expected in self.live.items():
            reader.restore(step)
            found = self.tensors()
            assert found.keys() == expected.keys(), step
            wrong = [k for k in expected if not torch.equal(found[k], expected[k])]
            assert not wrong, f"step {step}: {wrong} differ"


def _flatten(key: str, value: Any) -> dict[str, torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return {key: value}
    pairs = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    found: dict[str, torch.Tensor] = {}
    for name, item in pairs:
        found |= _flatten(f"{key}/{name}", item)
    return found


@pytest.fixture
def record() -> Iterator[Callable[..., Recorder]]:
    made: list[Recorder] = []

    def make(*arguments: Any, **options: Any) -> Recorder:
        made.append(Recorder(*arguments, **options))
        return made[-1]

    yield make
    for one in made:
        one.checkpointer.close()


def square() -> nn.Linear:
    return nn.Linear(SIDE, SIDE, bias=False)


def learn(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    model(torch.randn(4, SIDE)).pow(2).mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


# --- memory that moves ------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_parameter_that_gets_other_memory_in_the_window_is_saved_as_it_was(
    record: Callable[..., Recorder], momentum: float
) -> None:
    model = square()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    learn(model, optimizer)
    recorder = record({"m": model, "o": optimizer})
    for step in (1, 2, 3):
        brake = Brake(recorder.checkpointer)
        recorder.save(step)
        brake.wait()
        model.weight.data = torch.randn(SIDE, SIDE)
        brake.release()
        learn(model, optimizer)
    recorder.check()


def test_a_model_that_is_converted_in_the_window_is_saved_as_it_was(
    record: Callable[..., Recorder],
) -> None:
    model = nn.Sequential(square(), square())
    recorder = record({"m": model})
    brake = Brake(recorder.checkpointer)
    recorder.save(1)
    brake.wait()
    model.double()
    model.float()
    for param in model.parameters():
        param.data.zero_()
    brake.release()
    recorder.check()


@pytest.mark.parametrize("how", ["tensor", "entry", "everything"])
def test_optimizer_state_that_is_replaced_in_the_window_is_saved_as_it_was(
    record: Callable[..., Recorder], how: str
) -> None:
    model = square()
    optimizer = torch.optim.AdamW(model.parameters())
    learn(model, optimizer)
    recorder = record({"m": model, "o": optimizer})
    for step in (1, 2, 3):
        brake = Brake(recorder.checkpointer)
        recorder.save(step)
        brake.wait()
        state = optimizer.state[model.weight]
        if how == "tensor":
            state["exp_avg"] = torch.zeros(SIDE, SIDE)
        elif how == "entry":
            optimizer.state[model.weight] = {k: v.clone() for k, v in state.items()}
        else:
            optimizer.load_state_dict(optimizer.state_dict())
        gc.collect()
        brake.release()
        learn(model, optimizer)
    recorder.check()


def test_a_parameter_that_joins_between_two_saves_changes_the_structure(
    record: Callable[..., Recorder],
) -> None:
    model = nn.Sequential(square())
    optimizer = torch.optim.AdamW(model.parameters())
    learn(model, optimizer)
    recorder = record({"m": model, "o": optimizer})
    recorder.save(1)
    model.append(square())
    optimizer.add_param_group({"params": model[1].parameters()})
    learn(model, optimizer)
    recorder.save(2)
    recorder.checkpointer.wait()
    del recorder.live[1]  # of another structure than the live state
    found = recorder.tensors()
    recorder.checkpointer.restore(2)
    assert all(torch.equal(found[k], t) for k, t in recorder.tensors().items())
    recorder.live.clear()


# --- updates that do not come, or not from everybody ------------------------


def test_the_copy_goes_on_through_gradient_accumulation(record: Callable[..., Recorder]) -> None:
    model = nn.Sequential(square(), nn.BatchNorm1d(SIDE))
    optimizer = torch.optim.AdamW(model.parameters())
    learn(model, optimizer)
    recorder = record({"m": model, "o": optimizer})
    for step in (1, 2, 3):
        brake = Brake(recorder.checkpointer)
        recorder.save(step)
        brake.wait()
        for _ in range(3):
            model(torch.randn(4, SIDE)).pow(2).mean().backward()
        brake.release()
        optimizer.step()
        optimizer.zero_grad()
    recorder.check()


def test_an_update_that_the_grad_scaler_skips_ends_no_window(
    record: Callable[..., Recorder],
) -> None:
    model = square()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    learn(model, optimizer)
    recorder = record({"m": model, "o": optimizer, "s": scaler})
    scales: dict[int, float] = {}
    for step in range(1, 7):
        scales[step] = scaler.get_scale()
        brake = Brake(recorder.checkpointer)
        handle = recorder.save(step)
        brake.wait()
        loss = model(torch.randn(4, SIDE)).pow(2).mean()
        scaler.scale(loss).backward()
        if step % 2:
            model.weight.grad.fill_(torch.inf)  # type: ignore[union-attr]
        else:
            brake.release()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert handle.captured.done() == (step % 2 == 0)
        brake.release()
    recorder.check()
    for step, scale in scales.items():
        Checkpointer(recorder.root, state=recorder.state, read_only=True).restore(step)
        assert scaler.get_scale() == scale
    assert len(set(scales.values())) > 1


def test_of_two_optimizers_only_the_one_whose_memory_is_read_waits(
    record: Callable[..., Recorder],
) -> None:
    generator, critic = square(), square()
    one = torch.optim.AdamW(generator.parameters())
    two = torch.optim.AdamW(critic.parameters())
    learn(generator, one)
    recorder = record({"g": generator, "o": one})
    brake = Brake(recorder.checkpointer)
    handle = recorder.save(1)
    brake.wait()
    for _ in range(3):
        learn(critic, two)  # not in the state, and it shares no memory: it does not wait
    assert not handle.captured.done()
    brake.release()
    learn(generator, one)
    assert handle.captured.done()
    recorder.check()


def test_both_of_two_optimizers_in_the_state_wait(record: Callable[..., Recorder]) -> None:
    models = nn.ModuleList([square(), square()])
    optimizers = [torch.optim.AdamW(m.parameters()) for m in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        learn(model, optimizer)
    recorder = record({"m": models, "one": optimizers[0], "two": optimizers[1]})
    for step in range(1, 5):
        recorder.save(step)
        which = step % 2
        learn(models[which], optimizers[which])
    recorder.check()


def test_parameters_without_a_gradient_are_saved_too(record: Callable[..., Recorder]) -> None:
    model = nn.Sequential(square(), square(), square())
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    learn(model[1:2], optimizer)  # the last one has no gradient, and no state
    recorder = record({"m": model, "o": optimizer})
    for step in (1, 2, 3):
        recorder.save(step)
        learn(model[1:2], optimizer)
    recorder.check()


def test_a_state_without_large_tensors_has_no_window(record: Callable[..., Recorder]) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    recorder = record({"m": model, "o": optimizer})
    for step in (1, 2, 3):
        handle = recorder.save(step)
        assert handle.captured.done()
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    recorder.check()
    assert not [s for s in recorder.spans if s.stage in (Stage.FENCE, Stage.COPY)]


def test_tied_and_overlapping_parameters_are_captured_as_they_are(
    record: Callable[..., Recorder],
) -> None:
    base = torch.randn(2, SIDE, SIDE)
    model = nn.ParameterDict({"one": nn.Parameter(base[0]), "two": nn.Parameter(base[1])})
    model["tied"] = model["one"]
    optimizer = torch.optim.SGD({id(p): p for p in model.values()}.values(), lr=0.1, momentum=0.9)
    recorder = record({"m": model, "o": optimizer})
    for step in (1, 2, 3):
        recorder.save(step)
        for param in model.values():
            param.grad = torch.ones_like(param)
        optimizer.step()
    recorder.check()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(256, 3, 8, 8).contiguous(memory_format=torch.channels_last),
        lambda: torch.randn(300, 200).t(),
        lambda: torch.randn(300, 200).to(torch.bfloat16),
        lambda: torch.randn(300, 200).to(torch.float8_e4m3fn),
        lambda: torch.randn(300, 200, dtype=torch.complex64),
        lambda: torch.randn(300, 200, dtype=torch.float64),
        lambda: torch.randn(300, 400)[:, ::2],
        lambda: torch.randn(5, 40_001)[1:],
    ],
    ids=["channels_last", "transposed", "bf16", "fp8", "complex", "f64", "strided", "odd"],
)
def test_every_layout_and_type_is_captured_lazily_or_at_once_but_right(
    record: Callable[..., Recorder], make: Callable[[], torch.Tensor]
) -> None:
    module = nn.Module()
    module.weight = nn.Parameter(make(), requires_grad=False)
    recorder = record({"m": module})
    for step in (1, 2):
        recorder.save(step)
        with recorder.checkpointer.update():
            module.weight.data.copy_(make())
    recorder.check()


def test_batch_norm_and_dropout_go_on_as_if_nothing_had_happened(
    record: Callable[..., Recorder],
) -> None:
    def run(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
        losses = []
        for step in steps:
            loss = model(torch.randn(8, SIDE)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            if recorder is not None:
                recorder.save(step)
        return losses

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(square(), nn.BatchNorm1d(SIDE), nn.Dropout(0.3), square())
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    model, optimizer = build()
    recorder: Recorder | None = record({"m": model, "o": optimizer})
    store = recorder.root
    losses = run(model, optimizer, range(1, 9))
    recorder.checkpointer.wait()
    recorder = None
    other, its_optimizer = build()
    reader = Checkpointer(store, state={"m": other, "o": its_optimizer}, read_only=True)
    for start in (3, 6):
        assert reader.restore(start) == start
        assert run(other, its_optimizer, range(start + 1, 9)) == losses[start:]


# --- closures and compilers -------------------------------------------------


def test_lbfgs_is_saved_between_its_updates(record: Callable[..., Recorder]) -> None:
    model = square()
    target = torch.randn(4, SIDE)
    batch = torch.randn(4, SIDE)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, history_size=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(batch) - target).pow(2).mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    recorder = record({"m": model, "o": optimizer})
    for step in range(1, 6):
        recorder.save(step)
        optimizer.step(closure)
    recorder.check()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.LBFGS])
def test_forward_and_backward_inside_a_closure_still_overlap_with_the_copy(
    record: Callable[..., Recorder], kind: type[torch.optim.Optimizer]
) -> None:
    """Lightning runs the whole training step inside ``optimizer.step(closure)``: a fence
    before it would leave no time to copy in.
    """
    model = square()
    optimizer = kind(model.parameters(), lr=0.01)  # type: ignore[call-arg]
    batch = torch.randn(4, SIDE)
    events: list[str] = []

    def closure() -> torch.Tensor:
        events.append("closure begins")
        optimizer.zero_grad()
        loss = model(batch).pow(2).mean()
        loss.backward()
        if handle is not None and len(events) == 1:
            assert not handle.captured.done(), "the copy was over when the closure began"
            brake.release()
        events.append("closure ends")
        return loss

    handle = None
    optimizer.step(closure)
    recorder = record({"m": model, "o": optimizer})
    for step in (1, 2, 3):
        brake = Brake(recorder.checkpointer)
        handle = recorder.save(step)
        brake.wait()
        events.clear()
        recorder.spans.clear()
        before = model.weight.detach().clone()
        optimizer.step(closure)
        assert events[:2] == ["closure begins", "closure ends"]
        assert handle.captured.done()
        fences = [s for s in recorder.spans if s.stage is Stage.FENCE]
        copies = [s for s in recorder.spans if s.stage is Stage.COPY]
        assert [s.step for s in fences] == [step]
        # The fence came after the closure, and the copy had begun before it.
        assert copies[0].start_s < fences[0].start_s
        assert not torch.equal(before, model.weight)
    recorder.check()


def test_an_optimizer_of_another_maker_waits_before_its_closure(
    record: Callable[..., Recorder],
) -> None:
    class Perturbing(torch.optim.SGD):
        """Moves the weights before it calls the closure, as sharpness-aware ones do."""

        def step(self, closure: Any = None) -> Any:
            with torch.no_grad():
                for group in self.param_groups:
                    for param in group["params"]:
                        param.data.mul_(1.01)
            return super().step(closure)

    model = square()
    optimizer = Perturbing(model.parameters(), lr=0.1, momentum=0.9)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.randn(4, SIDE)).pow(2).mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    recorder = record({"m": model, "o": optimizer})
    for step in (1, 2, 3):
        recorder.save(step)
        optimizer.step(closure)
    recorder.check()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_and_a_compiled_update_are_saved_right(
    record: Callable[..., Recorder], backend: str
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = square()
        compiled = torch.compile(model, backend=backend)
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01))
        update = torch.compile(optimizer.step, backend=backend)
        learn(compiled)
        update()
        recorder = record({"m": compiled, "o": optimizer})
        for step in (1, 2, 3, 4):
            brake = Brake(recorder.checkpointer)
            handle = recorder.save(step)
            brake.wait()
            learn(compiled)
            brake.release()
            update()
            assert handle.captured.done(), "the compiled update did not wait"
            optimizer.zero_grad()
        recorder.check()


def test_a_momentum_encoder_that_writes_by_hand_is_noticed_or_told_of(
    record: Callable[..., Recorder],
) -> None:
    """MoCo moves its key encoder inside ``forward``, without an optimizer."""
    query, key = square(), square()
    optimizer = torch.optim.SGD(query.parameters(), lr=0.1)
    recorder = record({"q": query, "k": key, "o": optimizer})
    for step in (1, 2, 3):
        recorder.save(step)
        with recorder.checkpointer.update():
            key.weight.data.mul_(0.99).add_(query.weight.data, alpha=0.01)
        learn(query, optimizer)
    recorder.check()
    brake = Brake(recorder.checkpointer)
    handle = recorder.checkpointer.save(4)
    brake.wait()
    key.weight.data.mul_(0.99).add_(query.weight.data, alpha=0.01)
    brake.release()
    with pytest.warns(CheckpointWarning, match="step 4 was dropped: 'k/weight' changed"):
        recorder.checkpointer.wait()
    assert handle.durable.exception() is not None


# --- what it may cost -------------------------------------------------------


class Gate(FaultyStore):
    """A store that takes no pack until it is opened."""

    def __init__(self) -> None:
        super().__init__(MemoryStore(), Fault(do="none"))
        self.open_now = threading.Event()

    def write(self, name: str, parts: Any) -> int:
        assert not name.endswith(".pack") or self.open_now.wait(WAIT_S)
        return super().write(name, parts)


@pytest.mark.parametrize("in_flight", [1, 3])
def test_ten_saves_against_a_store_that_does_not_move_take_no_more_than_their_slots(
    tmp_path: Path, in_flight: int
) -> None:
    model = nn.Sequential(*(square() for _ in range(4)))
    strategy = Strategy(admission=Admission(max_in_flight=in_flight, when_full="skip"))
    store = Gate()
    # Not its own memory as far as the arena knows: slots with names, to be counted.
    run = create_repository(store).run
    state_bytes = sum(p.nbytes for p in model.parameters())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("asymcheck.writing.is_own_memory", lambda _: False)
        checkpointer = Checkpointer(
            store, state={"m": model}, strategy=strategy, every_steps=1, persist="thread"
        )
        checkpointer.restore()
        taken = []
        largest = 0
        for step in range(1, 11):
            handle = checkpointer.step(step)
            taken.append(handle is not None)
            checkpointer.fence()
            slots = list(slots_of(SHARED_MEMORY, run))
            used = sum(p.stat().st_blocks * 512 for p in slots)
            largest = max(largest, used)
            assert len(slots) <= in_flight
        assert taken == [True] * in_flight + [False] * (10 - in_flight)
        # Head room for a state that grows: two MiB, and a page here and there.
        assert largest <= in_flight * (state_bytes + (3 << 20))
        store.open_now.set()
        checkpointer.close()
    assert list(slots_of(SHARED_MEMORY, run)) == []


def _rss(pid: int) -> int:
    """Memory of its own: what it shares with others (slots, libraries) is not counted."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition("RssAnon:")[2].split()[0]) * 1024


@pytest.fixture
def fast_root() -> Iterator[Path]:
    """On a file system in memory: five hundred checkpoints wait for no disk."""
    with TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        yield Path(folder) / "root"


def test_after_five_hundred_saves_nothing_has_grown(fast_root: Path) -> None:
    model = square()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    learn(model, optimizer)
    checkpointer = Checkpointer(
        fast_root,
        state={"m": model, "o": optimizer},
        every_steps=1,
        keep_last=2,
        strategy=Strategy(admission=Admission(max_in_flight=2)),
    )

    def census() -> tuple[int, int, int, int]:
        pid = checkpointer._snapshotter._persister.pid  # type: ignore[union-attr]
        return (
            len(os.listdir("/proc/self/fd")),
            threading.active_count(),
            len(os.listdir(f"/proc/{pid}/fd")),
            pid,
        )

    with checkpointer:
        checkpointer.restore()
        for step in range(1, 501):
            learn(model, optimizer)
            checkpointer.step(step)
            if step == 100:
                checkpointer.wait()
                gc.collect()
                before = census()
                pid = before[-1]
                memory = _rss(os.getpid()), _rss(pid)
        checkpointer.wait()
        gc.collect()
        assert census() == before
        grown = _rss(os.getpid()) - memory[0], _rss(pid) - memory[1]
        assert max(grown) < 4 << 20, f"400 saves grew the memory by {grown} bytes"
        assert checkpointer.steps() == [499, 500]
        run = create_repository(open_store(str(fast_root))).run
        assert len(list(slots_of(SHARED_MEMORY, run))) <= 2
    assert not ProcessId.of(pid).is_alive


# --- too little room --------------------------------------------------------


def _refuse(monkeypatch: pytest.MonkeyPatch, *directories: Path) -> None:
    """There is no room in those directories any more."""
    create = Slot.create.__func__  # type: ignore[attr-defined]

    def creating(cls: type[Slot], directory: Path, *rest: Any) -> Slot:
        if directory in directories:
            raise OSError(errno.ENOSPC, "No space left on device")
        return create(cls, directory, *rest)

    monkeypatch.setattr(Slot, "create", classmethod(creating))


def _train_and_compare(root: Path, saves: range, **options: Any) -> list[str]:
    """Train with saves, compare each with what was live; returns the warnings."""
    model = nn.Sequential(square(), nn.BatchNorm1d(SIDE))
    optimizer = torch.optim.AdamW(model.parameters())
    learn(model, optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        recorder = Recorder({"m": model, "o": optimizer}, root, **options)
        for step in saves:
            recorder.save(step)
            learn(model, optimizer)
        recorder.checkpointer.wait()
        recorder.check()
        recorder.checkpointer.close()
    return [str(w.message) for w in caught if issubclass(w.category, CheckpointWarning)]


def test_without_room_in_shared_memory_it_goes_through_memory_without_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _refuse(monkeypatch, SHARED_MEMORY)
    strategy = Strategy(admission=Admission(max_in_flight=2))
    said = _train_and_compare(tmp_path / "root", range(1, 6), strategy=strategy)
    assert len(said) == 1
    assert "/dev/shm has no room" in said[0]
    assert "memory without a name" in said[0]
    run = create_repository(open_store(str(tmp_path / "root"))).run
    assert list(slots_of(SHARED_MEMORY, run)) == []


def test_with_room_for_one_slot_there_are_fewer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = Slot.create.__func__  # type: ignore[attr-defined]
    made: list[Slot] = []

    def creating(cls: type[Slot], *rest: Any) -> Slot:
        if made:
            raise OSError(errno.ENOSPC, "No space left on device")
        made.append(create(cls, *rest))
        return made[-1]

    monkeypatch.setattr(Slot, "create", classmethod(creating))
    write = FaultyStore.write
    gate = threading.Event()

    def slow(self: FaultyStore, name: str, parts: Any) -> int:
        assert gate.wait(WAIT_S)
        return write(self, name, parts)

    monkeypatch.setattr(FaultyStore, "write", slow)
    strategy = Strategy(admission=Admission(max_in_flight=3))
    model = square()
    checkpointer = Checkpointer(
        FaultyStore(MemoryStore(), Fault(do="none")), state={"m": model}, strategy=strategy
    )
    checkpointer.restore()
    checkpointer.save(1)
    opener = threading.Timer(0.05, gate.set)
    opener.start()
    with pytest.warns(CheckpointWarning, match="1 checkpoints may be under way instead of 3"):
        checkpointer.save(2)  # waits for the one slot that there is
    checkpointer.save(3)
    checkpointer.close()
    assert checkpointer.steps() == [1, 2, 3]
    opener.join(WAIT_S)


@pytest.mark.parametrize("persist", ["process", "thread"])
def test_without_any_memory_each_save_blocks_until_it_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, persist: str
) -> None:
    _refuse(monkeypatch, SHARED_MEMORY, Path())
    said = _train_and_compare(tmp_path / "root", range(1, 6), persist=persist)
    assert len(said) == 1
    assert "each save blocks training until it is durable" in said[0]


def test_what_goes_wrong_without_memory_is_told_like_any_other_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _refuse(monkeypatch, SHARED_MEMORY, Path())
    store = FaultyStore(MemoryStore(), Fault(op="write", name="*.pack", do="ENOSPC"))
    checkpointer = Checkpointer(store, state={"m": square()}, every_steps=1)
    checkpointer.restore()
    with pytest.warns(CheckpointWarning, match="each save blocks"):
        handle = checkpointer.step(1)
    assert handle is not None
    assert handle.durable.done()
    with pytest.raises(StoreError, match="No space left"):
        checkpointer.step(2)
    checkpointer.step(3)
    checkpointer.close()
    assert checkpointer.steps() == [3]


def test_a_real_shared_memory_that_is_too_small_is_survived(
    tmp_path: Path, not_run_here: Callable[[str], None]
) -> None:
    """Containers give 64 MB, and one may give less: /dev/shm of a child is 1 MiB here."""

    def work(say: Say) -> None:
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        private = libc.unshare(0x20000) or libc.mount(b"none", b"/", None, 0x44000, None)
        if private or libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=1m"):
            say(None)
            return
        say(_train_and_compare(tmp_path / "root", range(1, 4)))
        say(os.listdir("/dev/shm"))

    said = Child(work).wait().check()
    if said == [None]:
        not_run_here("this process may not mount a file system")
    told, left = said
    assert len(told) == 1
    assert "memory without a name" in told[0]
    assert left == []


# --- where it is started from -----------------------------------------------

SCRIPT = """
import os, resource, sys, torch, asymcheck
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(150, 150)
optimizer = torch.optim.AdamW(model.parameters())
checkpointer = asymcheck.Checkpointer(
    {root!r}, state={{"m": model, "o": optimizer, "x": {extra}}}, every_steps=1, keep_last=2
)
{then}
start = checkpointer.restore()
for step in range(start + 1, start + 4):
    model(torch.randn(2, 150)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    checkpointer.step(step)
print("saved", start, flush=True)
"""


def _script(root: Path, then: str = "", extra: str = "{'n': 1}") -> str:
    return SCRIPT.format(root=str(root), then=then, extra=extra)


def _python(*words: str, stdin: str | None = None, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", *words],
        check=False,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": SOURCE},
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


def _nothing_left(root: Path, steps: list[int]) -> None:
    repository = create_repository(open_store(str(root)))
    assert [at.step for at in repository.lineage()] == steps
    assert list(slots_of(SHARED_MEMORY, repository.run)) == []
    assert not list(root.glob(".tmp/*"))


def test_a_script_without_a_main_guard_and_one_read_from_a_pipe(tmp_path: Path) -> None:
    """The persister imports no ``__main__``, and the end of the script closes for it."""
    root = tmp_path / "root"
    script = tmp_path / "train.py"
    script.write_text(_script(root))
    assert _python(str(script), cwd=tmp_path) == "saved 0\n"
    _nothing_left(root, [2, 3])
    assert _python("-", stdin=_script(root), cwd=tmp_path) == "saved 3\n"
    _nothing_left(root, [5, 6])


def test_five_thousand_tensors_need_few_descriptors_and_a_relative_root_stays_where_it_is(
    tmp_path: Path,
) -> None:
    """``ulimit -n 256``: one slot holds them all. The script changes its directory later."""
    then = "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256)); os.chdir('/')"
    extra = "[torch.zeros(3) for _ in range(5000)]"
    assert _python("-c", _script(Path("runs/one"), then, extra), cwd=tmp_path)
    _nothing_left(tmp_path / "runs" / "one", [2, 3])


def test_a_persister_that_cannot_start_is_told_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'the interpreter is gone' >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    checkpointer = Checkpointer(tmp_path / "root", state={"m": square()})
    checkpointer.restore()
    checkpointer.save(1)
    with pytest.raises(StoreError, match="the interpreter is gone") as told:
        checkpointer.wait()
    assert "persist.log" in str(told.value)
    monkeypatch.undo()
    checkpointer.save(2)
    checkpointer.close()
    assert checkpointer.steps() == [2]


@pytest.mark.parametrize("root", ["memory://here", MemoryStore()])
def test_a_store_that_only_this_process_can_open_is_refused_to_a_process(root: Any) -> None:
    with pytest.raises(OptionError, match=r"memory:.*'process'.*'thread' or 'auto'"):
        Checkpointer(root, state={"m": square()}, persist="process")


# --- forks ------------------------------------------------------------------


def _touch_everything(checkpointer: Checkpointer, optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    optimizer.step()
    checkpointer.close()
    gc.collect()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_of_multiprocessing_inherits_a_checkpointer_and_disturbs_it_not(
    tmp_path: Path,
) -> None:
    model = square()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = Recorder({"m": model, "o": optimizer}, tmp_path / "root")
    brake = Brake(recorder.checkpointer)
    handle = recorder.save(1)
    brake.wait()
    child = multiprocessing.get_context("fork").Process(
        target=_touch_everything, args=(recorder.checkpointer, optimizer)
    )
    child.start()
    child.join(WAIT_S)
    assert child.exitcode == 0
    brake.release()
    learn(model, optimizer)
    assert handle.durable.result(WAIT_S).step == 1
    recorder.save(2)
    recorder.check()
    recorder.checkpointer.close()
    _nothing_left(tmp_path / "root", [1, 2])


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_the_workers_of_a_loader_hold_the_end_of_nothing(tmp_path: Path) -> None:
    """They are forked in the middle of it all and hold every descriptor."""
    model = square()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = Recorder({"m": model, "o": optimizer}, tmp_path / "root")
    data = TensorDataset(torch.randn(24, SIDE))
    loader = DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context="fork")
    persister = recorder.checkpointer._snapshotter._persister  # type: ignore[union-attr]
    first = persister.pid
    for step, (batch,) in enumerate(loader, start=1):
        model(batch).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        recorder.save(step)
        if step == 3:
            recorder.checkpointer.fence()
            os.kill(first, 9)
            until(lambda: persister.pid != first, "the dead persister is replaced")
    recorder.check()
    recorder.checkpointer.close()
    with Checkpointer(tmp_path / "root", state={"m": model, "o": optimizer}) as again:
        assert again.restore() == 6  # also sweeps what the killed persister was writing
    _nothing_left(tmp_path / "root", [1, 2, 3, 4, 5, 6])
