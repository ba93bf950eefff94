"""No torn snapshot: what can be restored is bit for bit what was live at that step.

Optimizers at full speed, a copying thread with random delays, and code that writes into the
window between the boundary and the next update. Each checkpoint is restored and compared, or
was dropped with the leaf and the step named. With the fence taken away the detectors stand
alone: they must notice, and nothing wrong may be restorable.
"""

from __future__ import annotations

import random
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from asymcheck import Checkpointer, Strategy, strategies
from asymcheck.errors import CheckpointWarning, DroppedCheckpoint
from asymcheck.planning.adaptive import Adaptive
from asymcheck.planning.cadence import EverySteps
from asymcheck.planning.plan import IdleProportional, Partitioner, Uniform, Whole
from asymcheck.planning.policy import Admission
from asymcheck.planning.tiers import Placement
from asymcheck.session import Handle
from asymcheck.storage.memory import MemoryStore

STEPS = 14
SIDE = 300
WAIT_S = 60.0


class DataMomentum(torch.optim.Optimizer):
    """Writes through ``.data``, as old code does: no version counter moves."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for param in group["params"]:
                moment = self.state[param].setdefault("moment", torch.zeros_like(param.data))
                moment.data.mul_(0.9).add_(param.grad)
                param.data.add_(moment, alpha=-0.01)
        return loss


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "data": DataMomentum,
}


class Training:
    """Three large leaves in the model and as many per moment in the optimizer; an update
    changes every element of each.
    """

    def __init__(self, kind: str, root: Any, **options: Any) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(1)
        self.random = random.Random(7)
        self.root = root
        self.kind = kind
        self.model = nn.ModuleDict({f"layer{i}": nn.Linear(SIDE, SIDE) for i in range(3)})
        self.model.register_buffer("average", torch.zeros(SIDE))
        self.optimizer = OPTIMIZERS[kind](self.model.parameters())
        self.average = [p.detach().clone() + 1 for p in self.model.parameters()]
        self.checkpointer = Checkpointer(
            root, state={"m": self.model, "o": self.optimizer}, **options
        )
        self.update()  # the optimizer has state now
        self.checkpointer.restore()
        self.recorded: dict[int, list[torch.Tensor]] = {}
        self.handles: list[Handle] = []

    def update(self) -> None:
        self.model.average.add_(1)  # a forward pass changes buffers
        for param in self.model.parameters():
            param.grad = torch.randn_like(param) + 3
        self.optimizer.step()

    def forward_and_backward(self) -> None:
        """What opens windows; the gradients are not used."""
        x = torch.ones(2, SIDE)
        for layer in self.model.children():
            x = layer(x)
        x.sum().backward()

    def live(self) -> list[torch.Tensor]:
        state = self.optimizer.state
        moments = [t for p in self.model.parameters() for t in state[p].values()]
        tensors = [*self.model.state_dict().values(), *moments]
        return [t.detach().clone() for t in tensors]

    def save(self, step: int) -> None:
        self.recorded[step] = self.live()
        self.handles.append(self.checkpointer.save(step))

    @property
    def copier(self) -> Any:
        return self.checkpointer._snapshotter.copier  # type: ignore[union-attr]

    def without_fence(self) -> None:
        self.checkpointer._snapshotter._hook.close()  # type: ignore[union-attr]

    def close(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)
            self.checkpointer.close()

    def check(self) -> list[DroppedCheckpoint]:
        """Restore every checkpoint and compare; what is missing was dropped, with a reason."""
        dropped = []
        for handle in self.handles:
            failure = handle.durable.exception(WAIT_S)
            if failure is not None:
                assert isinstance(failure, DroppedCheckpoint), failure
                assert failure.step == handle.step
                assert failure.key.startswith(("m/layer", "o/state/m/layer")), failure.key
                assert f"step {failure.step} was dropped: {failure.key!r}" in str(failure)
                dropped.append(failure)
        root = self.root if isinstance(self.root, MemoryStore) else str(self.root)
        reader = Checkpointer(root, state={"m": self.model, "o": self.optimizer}, read_only=True)
        whole = sorted({h.step for h in self.handles} - {d.step for d in dropped})
        tiers = {h.step: h.durable.result().tier for h in self.handles if h.step in whole}
        # What is in memory alone gives way to the next, and the last one comes to the store.
        whole = [s for s in whole if tiers[s] == "store" or s == whole[-1]]
        assert reader.steps() == whole
        for step in whole:
            reader.restore(step)
            wrong = [
                i
                for i, (a, b) in enumerate(zip(self.live(), self.recorded[step], strict=True))
                if not torch.equal(a, b)
            ]
            assert not wrong, f"step {step} is torn: tensors {wrong} differ"
        return dropped


def _delays(training: Training, longest_s: float) -> None:
    delays = random.Random(11)
    training.copier.between = lambda: time.sleep(delays.random() * longest_s)


# --- what happens in the window ---------------------------------------------


def _nothing(training: Training) -> None:
    pass


def _swap(training: Training) -> None:
    """Weights swapped for an evaluation, and back."""
    kept = [p.detach().clone() for p in training.model.parameters()]
    for param, average in zip(training.model.parameters(), training.average, strict=True):
        param.data.copy_(average)
    time.sleep(training.random.random() * 0.002)
    for param, value in zip(training.model.parameters(), kept, strict=True):
        param.data.copy_(value)


def _broadcast(training: Training) -> None:
    """A collective in place: every parameter is overwritten, no version counter moves."""
    time.sleep(training.random.random() * 0.002)
    for param in training.model.parameters():
        param.data.copy_(param.data + 1)


def _swap_memory(training: Training) -> None:
    """The same by exchanging memory instead of values."""
    for param, average in zip(training.model.parameters(), training.average, strict=True):
        param.data, average.data = average.data, param.data


DISTURBANCES = {
    "nothing": (_nothing, False),
    "swap": (_swap, False),
    "swap-fenced": (_swap, True),
    "broadcast": (_broadcast, False),
    "broadcast-in-update": (_broadcast, True),
    "memory-swapped": (_swap_memory, False),
}


def test_there_are_two_hundred_checkpoints_in_all() -> None:
    assert len(OPTIMIZERS) * len(DISTURBANCES) * STEPS >= 200


@pytest.mark.parametrize("disturbance", DISTURBANCES)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_each_checkpoint_is_what_was_live_or_was_dropped_with_its_name(
    kind: str, disturbance: str
) -> None:
    act, fenced = DISTURBANCES[disturbance]
    training = Training(kind, MemoryStore())
    _delays(training, 0.001)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        for step in range(1, STEPS + 1):
            training.save(step)
            if training.random.random() < 0.6:
                with training.checkpointer.update() if fenced else nullcontext():
                    act(training)
            training.update()
    training.close()
    dropped = training.check()
    if fenced or disturbance in ("nothing", "memory-swapped"):
        assert dropped == []


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_through_a_process_and_a_disk_nothing_is_torn_either(kind: str, tmp_path: Path) -> None:
    training = Training(kind, tmp_path / "root")
    _delays(training, 0.001)
    for step in range(1, 7):
        training.save(step)
        training.update()
    training.close()
    assert training.check() == []


# --- however it is captured, wherever it goes ---------------------------------

STRATEGIES = {
    **{name: strategies[name] for name in ("checkfreq", "gemini", "naive")},
    "device-copy": Strategy(capture="device-copy"),
    "device-copy-planned": Strategy(capture="device-copy", partitioner=Uniform()),
    "memory-and-store": Strategy(
        admission=Admission(max_in_flight=2), placement=Placement(durable=EverySteps(2))
    ),
    "device-copy-in-memory": Strategy(
        capture="device-copy",
        admission=Admission(max_in_flight=2),
        placement=Placement(durable=EverySteps(2)),
    ),
}


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_with_every_way_to_capture_and_to_place_nothing_is_torn(kind: str, name: str) -> None:
    training = Training(kind, MemoryStore(), strategy=STRATEGIES[name])
    _delays(training, 0.001)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        for step in range(1, STEPS + 1):
            training.save(step)
            act, fenced = training.random.choice(list(DISTURBANCES.values()))
            with training.checkpointer.update() if fenced else nullcontext():
                act(training)
            training.update()
    training.close()
    dropped = training.check()
    if STRATEGIES[name].capture in ("device-copy", "blocking"):
        assert dropped == []  # nothing that happens after the boundary can reach it


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_clone_needs_no_fence_at_all(kind: str) -> None:
    training = Training(kind, MemoryStore(), strategy=Strategy(capture="device-copy"))
    training.without_fence()
    _delays(training, 0.002)
    for step in range(1, STEPS + 1):
        training.save(step)
        for _ in range(3):
            training.update()
    training.close()
    assert training.check() == []


# --- in the windows of a plan -------------------------------------------------

PARTITIONERS: dict[str, Partitioner] = {
    "whole": Whole(),
    "uniform": Uniform(),
    "proportional": IdleProportional(),
    "adaptive": Adaptive(),
}
PLANNED_STEPS = 40


@pytest.mark.parametrize("name", PARTITIONERS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_in_the_windows_of_every_planner_nothing_is_torn_either(kind: str, name: str) -> None:
    training = Training(kind, MemoryStore(), strategy=Strategy(partitioner=PARTITIONERS[name]))
    _delays(training, 0.0002)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        for step in range(1, PLANNED_STEPS + 1):
            training.save(step)
            training.forward_and_backward()
            if training.random.random() < 0.2:
                act, fenced = training.random.choice(list(DISTURBANCES.values()))
                with training.checkpointer.update() if fenced else nullcontext():
                    act(training)
            training.update()
    decision = training.checkpointer._snapshotter._pacing.decision  # type: ignore[union-attr]
    assert decision is not None
    assert len(decision.plan.windows) == 7  # the boundary, and each layer twice
    if name != "adaptive":  # which holds nothing back where that gains nothing
        assert decision.plan.free_running == (name == "whole")
    training.close()
    assert len(training.check()) < PLANNED_STEPS / 4


# --- with the fence taken away ----------------------------------------------


@pytest.mark.parametrize("pieces", [1, 3, 5])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_without_the_fence_an_update_in_mid_copy_is_always_noticed(kind: str, pieces: int) -> None:
    """The copy is held after so many leaves while an update changes all of every leaf, so the
    rest of the image is of the next step.
    """
    training = Training(kind, MemoryStore())
    training.without_fence()
    held, go = threading.Event(), threading.Event()
    count = 0

    def between() -> None:
        nonlocal count
        count += 1
        if count == pieces + 1:
            held.set()
            assert go.wait(WAIT_S)

    training.copier.between = between
    training.save(1)
    assert held.wait(WAIT_S)
    training.update()
    go.set()
    training.checkpointer.fence()
    training.close()
    (failure,) = training.check()
    by_version = "was written to before its copy was complete" in str(failure)
    by_canary = "changed while it was copied" in str(failure)
    # Only plain updates move version counters: the others are left to the canaries.
    assert (by_version, by_canary) == ((True, False) if kind == "foreach" else (False, True))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_without_the_fence_nothing_wrong_can_be_restored(kind: str) -> None:
    training = Training(kind, MemoryStore())
    training.without_fence()
    _delays(training, 0.002)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        for step in range(1, 2 * STEPS):
            training.save(step)
            if step % 4:  # at every fourth the window is quiet: lazy capture may come back
                training.update()
    training.close()
    assert training.check(), "the detectors never fired"


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_two_noticed_tears_make_capture_block_and_then_nothing_is_lost(kind: str) -> None:
    training = Training(kind, MemoryStore())
    training.without_fence()
    hold = threading.Event()
    training.copier.between = lambda: hold.wait(WAIT_S)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(1, 6):
            hold.clear()
            training.save(step)
            training.update()
            hold.set()
            training.checkpointer.fence()
            training.checkpointer.wait()
    training.close()
    assert [d.step for d in training.check()] == [1, 2]
    said = [str(w.message) for w in caught if w.category is CheckpointWarning]
    assert len([s for s in said if "capture blocks training from now on" in s]) == 1
