"""A copy keeps to its plan, whatever training does, and always comes to an end."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from asymcheck import Checkpointer, Strategy
from asymcheck.device import pacing
from asymcheck.device.pacing import Pace, Pacing
from asymcheck.device.profile import Profiler
from asymcheck.planning.adaptive import Adaptive, Decision
from asymcheck.planning.contention import Contention
from asymcheck.planning.plan import FREE, Gate, IdleProportional, PartitionPlan, Uniform, Whole
from asymcheck.planning.windows import Window
from asymcheck.storage.memory import MemoryStore

WAIT_S = 30.0
LONG_S = 1e5
PIECE = 10
PARTITIONERS = {
    "whole": Whole(),
    "uniform": Uniform(),
    "proportional": IdleProportional(),
    "adaptive": Adaptive(),
}


class FakeProfiler:
    """Windows, position and bandwidth as the test says."""

    seconds: tuple[float, ...] = ()
    bandwidth = 1.0
    phase = "forward"
    generation = 0

    def __init__(self, modules: object, on_window: Callable[[int], None]) -> None:
        self.position = -1
        self.on_window = on_window
        self.copies: list[int] = []

    def begin_step(self) -> None:
        self.position = 0
        self.on_window(0)

    def end_step(self) -> None:
        self.position = -1

    def move_to(self, position: int) -> None:
        self.position = position
        self.on_window(position)

    def windows(self) -> tuple[Window, ...]:
        half = len(self.seconds) // 2
        phases = ("forward",) * half + ("backward",) * (len(self.seconds) - half)
        return tuple(Window(p, s) for p, s in zip(phases, self.seconds, strict=True))  # type: ignore[arg-type]

    @property
    def copy_bytes_per_s(self) -> float:
        return self.bandwidth

    def take_pairs(self) -> list[Any]:
        return []

    def instant(self) -> float:
        return 0.0

    def add_copy(self, start: float, stop: float, nbytes: int) -> None:
        self.copies.append(nbytes)

    def close(self) -> None:
        self.position = -1


class Copying:
    """A thread that copies pieces under a pace."""

    def __init__(self, pace: Pace, profiler: FakeProfiler, nbytes: int) -> None:
        self.pace, self.profiler = pace, profiler
        self.copied = 0
        self.late: list[tuple[int, int]] = []
        self.changed = threading.Condition()
        self.thread = threading.Thread(target=self._run, args=(nbytes,), daemon=True)
        self.thread.start()

    def _run(self, nbytes: int) -> None:
        bounds = self.pace.decision.plan.bounds
        while self.copied < nbytes:
            piece = min(PIECE, nbytes - self.copied)
            self.pace.wait(piece)
            position = self.profiler.position  # it only grows, and the bounds with it
            if position >= 0 and self.copied >= bounds[min(position, len(bounds) - 1)]:
                self.late.append((position, self.copied))
            with self.changed:
                self.copied += piece
                self.changed.notify_all()
        self.pace.done()

    def reaches(self, nbytes: int) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: self.copied >= nbytes, WAIT_S)

    def ends(self) -> bool:
        self.thread.join(WAIT_S)
        return not self.thread.is_alive()


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Copying, FakeProfiler, Pacing]]:
    monkeypatch.setattr(pacing, "Profiler", FakeProfiler)

    def begin(
        partitioner: Any,
        nbytes: int,
        seconds: tuple[float, ...],
        bandwidth: float = 1.0,
        decision: Decision | None = None,
    ) -> tuple[Copying, FakeProfiler, Pacing]:
        monkeypatch.setattr(FakeProfiler, "seconds", seconds)
        monkeypatch.setattr(FakeProfiler, "bandwidth", bandwidth)
        if decision is not None:
            monkeypatch.setattr(pacing, "decide", lambda *_: decision)
        paced = Pacing([], partitioner)
        paced.begin_step(saves=True)
        profiler: Any = paced._profiler
        return Copying(paced.plan(nbytes), profiler, nbytes), profiler, paced

    return begin


@pytest.mark.parametrize("partitioner", [Uniform(), IdleProportional()])
@pytest.mark.parametrize(
    "seconds", [(LONG_S,) * 4, (1.0, 0.0, 0.0, 7.0), (0.0, LONG_S, 0.0), (5.0,)]
)
def test_no_piece_is_begun_past_the_bound_of_its_window(
    start: Any, partitioner: Any, seconds: tuple[float, ...]
) -> None:
    copying, profiler, _ = start(partitioner, 1000, seconds)
    for position, bound in enumerate(copying.pace.decision.plan.bounds):
        profiler.move_to(position)
        assert copying.reaches(bound)
        assert copying.copied < bound + PIECE
    assert copying.ends()
    assert copying.late == []
    assert copying.copied == sum(profiler.copies) == 1000
    assert sum(part.nbytes for part in copying.pace.parts) == 1000


@pytest.mark.parametrize("partitioner", PARTITIONERS.values(), ids=PARTITIONERS)
@pytest.mark.parametrize("seconds", [(), (0.0,), (0.0, 0.0, 0.0), (LONG_S, LONG_S)])
@pytest.mark.parametrize("nbytes", [0, 1, 1000])
def test_a_copy_ends_once_training_waits_for_it(
    start: Any, partitioner: Any, seconds: tuple[float, ...], nbytes: int
) -> None:
    copying, profiler, paced = start(partitioner, nbytes, seconds)
    paced.end_step()
    copying.pace.let_go()
    assert copying.ends()
    assert sum(profiler.copies) == nbytes


def test_training_that_waits_in_the_first_window_gets_the_rest_at_once(start: Any) -> None:
    copying, profiler, _ = start(Uniform(), 1000, (LONG_S,) * 4)
    assert copying.reaches(250)
    assert copying.copied < 1000
    copying.pace.let_go()  # the step is not over: the fence says so first
    assert copying.ends()
    assert sum(profiler.copies) == 1000


def test_more_windows_than_were_planned_hold_nothing_back(start: Any) -> None:
    copying, profiler, _ = start(Uniform(), 1000, (LONG_S,) * 4)
    profiler.move_to(17)
    assert copying.ends()


@pytest.mark.parametrize("margin", [None, 0.1])
def test_only_the_deadline_overrides_a_gate_that_is_shut(start: Any, margin: float | None) -> None:
    windows = (Window("forward", 60.0), Window("backward", 60.0))
    plan = PartitionPlan((0, 1000), windows, 1000)
    decision = Decision(plan, Gate("windows", margin), PIECE, 0.0, "")
    # At 9 bytes a second the rest needs 111 of 120 seconds, more than nine tenths.
    copying, _, _ = start(Uniform(), 1000, (60.0, 60.0), 9.0, decision)
    if margin is None:
        assert copying.copied == 0
        copying.pace.let_go()
    assert copying.ends()


def test_a_free_gate_never_waits(start: Any) -> None:
    plan = PartitionPlan((1000, 1000), (Window("forward", 1.0), Window("backward", 1.0)), 1000)
    copying, _, _ = start(Whole(), 1000, (1.0, 1.0), decision=Decision(plan, FREE, PIECE, 0.0, ""))
    assert copying.ends()


# --- through the Checkpointer -------------------------------------------------

WIDE = 150  # a square of it is more than 64 KiB: copied behind the training


class Bare(nn.Module):
    """A parameter and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDE, WIDE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def tower() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDE, WIDE) for _ in range(3)))


class Training:
    """Saves at every step, and remembers what was live."""

    def __init__(
        self, partitioner: Any, make: Callable[[], nn.Module] = tower, *, module: bool = True
    ) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.model = make()
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.store = MemoryStore()
        self.seen: dict[int, list[torch.Tensor]] = {}
        self.module = module
        self.open(partitioner)

    def open(self, partitioner: Any) -> None:
        strategy = Strategy(partitioner=partitioner)
        self.checkpointer = Checkpointer(self.store, state=self.state(), strategy=strategy)
        self.checkpointer.restore()

    def state(self) -> dict[str, Any]:
        # Without the model nothing has a forward pass to be seen.
        return {"o": self.optimizer, **({"m": self.model} if self.module else {"w": self.loose()})}

    def loose(self) -> dict[str, torch.Tensor]:
        return {k: p.data for k, p in self.model.named_parameters()}

    def live(self) -> list[torch.Tensor]:
        moments = [t for p in self.model.parameters() for t in self.optimizer.state[p].values()]
        return [
            t.detach().clone() for t in (*self.model.parameters(), *moments) if torch.is_tensor(t)
        ]

    def backward(self) -> None:
        self.model(torch.randn(4, WIDE)).square().mean().backward()

    def step(self, step: int, backward: Callable[[], None] | None = None) -> None:
        (backward or self.backward)()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seen[step] = self.live()
        self.checkpointer.save(step)

    def check(self) -> None:
        self.checkpointer.close()
        reader = Checkpointer(self.store, state=self.state(), read_only=True)
        assert reader.steps() == list(self.seen)
        for step, wanted in self.seen.items():
            reader.restore(step)
            assert all(torch.equal(a, b) for a, b in zip(self.live(), wanted, strict=True))


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(WAIT_S)
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("partitioner", PARTITIONERS.values(), ids=PARTITIONERS)
@pytest.mark.parametrize(
    ("make", "module"),
    [(Bare, True), (Bare, False), (tower, True), (lambda: nn.Linear(WIDE, WIDE), True)],
    ids=["bare", "no-module", "tower", "linear"],
)
def test_any_model_is_saved_as_it_was(
    partitioner: Any, make: Callable[[], nn.Module], module: bool
) -> None:
    training = Training(partitioner, make, module=module)
    for step in range(1, 14):
        training.step(step)
    training.check()


@pytest.mark.parametrize("partitioner", PARTITIONERS.values(), ids=PARTITIONERS)
def test_accumulation_evaluation_and_a_forward_that_raises_disturb_no_copy(
    partitioner: Any,
) -> None:
    training = Training(partitioner)
    fails = [False]

    def maybe(*_: object) -> None:
        if fails[0]:
            raise ValueError("not today")

    training.model[1].register_forward_pre_hook(maybe)

    def backward() -> None:
        for _ in range(torch.randint(1, 4, ()).item()):  # type: ignore[arg-type]
            training.backward()
        fails[0] = True
        with pytest.raises(ValueError, match="not today"):
            training.backward()
        fails[0] = False
        training.model.eval()
        with torch.no_grad():
            training.model(torch.randn(4, WIDE))
        training.model.train()

    for step in range(1, 14):
        training.step(step, backward)
    training.check()


@pytest.mark.parametrize("partitioner", PARTITIONERS.values(), ids=PARTITIONERS)
def test_a_closure_runs_once_before_the_copy_is_waited_for(partitioner: Any) -> None:
    training = Training(partitioner)
    training.checkpointer.close()
    training.optimizer = torch.optim.LBFGS(training.model.parameters(), lr=0.01, max_iter=3)
    training.open(partitioner)
    called = threading.Event()

    def between() -> None:
        assert called.wait(WAIT_S)

    def closure() -> torch.Tensor:
        training.optimizer.zero_grad()
        loss = training.model(torch.ones(4, WIDE)).square().mean()
        loss.backward()
        called.set()
        return loss

    training.optimizer.step(closure)
    copier = training.checkpointer._snapshotter.copier  # type: ignore[union-attr]
    copier.between = between
    for step in range(1, 6):
        training.seen[step] = [p.detach().clone() for p in training.model.parameters()]
        called.clear()
        training.checkpointer.save(step)
        training.optimizer.step(closure)
    copier.between = lambda: None
    training.checkpointer.close()
    reader = Checkpointer(training.store, state={"m": training.model}, read_only=True)
    for step, wanted in training.seen.items():
        reader.restore(step, strict=False)
        live = list(training.model.parameters())
        assert all(torch.equal(a, b) for a, b in zip(live, wanted, strict=True))


def test_closing_takes_every_hook_away_and_until_then_copies_of_the_model_train_alone() -> None:
    training = Training(Uniform())
    for step in range(1, 4):
        training.step(step)
    hooked = [m for m in training.model.modules() if m._forward_hooks or m._forward_pre_hooks]
    assert hooked
    for other in (copy.deepcopy(training.model), pickle.loads(pickle.dumps(training.model))):
        other(torch.randn(4, WIDE)).sum().backward()
    training.check()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in training.model.modules())
    training.backward()


def test_a_plan_of_many_windows_is_summed_up_once(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copying thread looks at the deadline every few milliseconds, with the interpreter lock
    that training needs.
    """
    count = [0]

    def counted(windows: tuple[Window, ...]) -> float:
        count[0] += 1
        return sum(w.duration_s for w in windows)

    monkeypatch.setattr(pacing, "total_s", counted)
    copying, profiler, _ = start(Uniform(), 1000, (LONG_S,) * 4)
    assert copying.reaches(250)
    for position in range(1, 4):
        profiler.move_to(position)
    assert copying.ends()
    assert count[0] <= 1


def test_contention_that_was_measured_elsewhere_is_forgotten_with_the_windows(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    copying, _, paced = start(Whole(), 10, (1.0, 1.0))
    assert copying.ends()
    paced._contention = Contention().add("forward", with_s=2.0, without_s=1.0, copied_s=1.0)
    paced.plan(10)
    assert paced.contention != Contention()
    monkeypatch.setattr(FakeProfiler, "generation", 1)
    paced.plan(10)
    assert paced.contention == Contention()


def test_a_pacing_without_modules_is_one_window() -> None:
    paced = Pacing([], Adaptive())
    assert isinstance(paced._profiler, Profiler)
    for _ in range(3):
        paced.begin_step(saves=True)
        pace = paced.plan(100)
        pace.wait(100)
        pace.done()
        paced.end_step()
    paced.close()
    assert [part.nbytes for part in pace.parts] == [100]
