"""The promises of a strategy as tests, for every strategy that somebody composes.

It subclasses the suite:

    class TestMyStrategy(StrategySuite):
        def new_strategy(self):
            return Strategy(capture="blocking")

Needs pytest. What is exact has to come back bit for bit; what is lossy, within the bounds that
the checkpoint itself states.
"""

# ruff: noqa: D102  the names of the tests say what they hold the strategy to

from __future__ import annotations

import functools
import os
import signal
import threading
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep

import pytest
import torch
from torch import nn

from asymcheck.errors import CaptureError, CheckpointWarning, StoreError
from asymcheck.events import Span, Stage, discard
from asymcheck.handles import Handle, SaveReport
from asymcheck.memory.arena import SHARED_MEMORY, slots_of
from asymcheck.planning.strategies import Strategy
from asymcheck.session import Checkpointer
from asymcheck.storage.memory import MemoryStore
from asymcheck.storage.repository import open_repository
from asymcheck.storage.store import Buffer, Store, open_store
from asymcheck.testing.children import TIMEOUT_S, Child, Say
from asymcheck.testing.faulty import Fault, FaultyStore

_SIDE = 160  # a square of it is copied lazily
_STEPS = 7
_MOST_STEPS = 3 * _STEPS
_STAGES = (Stage.CAPTURE, Stage.COPY, Stage.FENCE, Stage.WRITE, Stage.COMMIT)

State = dict[str, torch.Tensor]


class _Training:
    """Its state after a step depends on the step alone."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(_SIDE, _SIDE), nn.Linear(_SIDE, _SIDE))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.step = 0

    def update(self) -> None:
        """Forward, backward and an update that changes every element in place."""
        self.step += 1
        torch.manual_seed(self.step)
        self.model(torch.randn(4, _SIDE)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def live(self) -> State:
        found = {f"model/{n}": p.detach().clone() for n, p in self.model.named_parameters()}
        for name, param in self.model.named_parameters():
            for entry, value in self.optimizer.state[param].items():
                found[f"state/{entry}/{name}"] = value.detach().clone()
        return found


class _Job(_Training):
    """The same with a Checkpointer, from where the root has it."""

    def __init__(
        self,
        root: str | Store,
        strategy: Strategy,
        sink: Callable[[Span], None] = discard,
        **options: object,
    ) -> None:
        super().__init__()
        self.checkpointer = Checkpointer(
            root,
            state={"model": self.model, "optim": self.optimizer},
            strategy=strategy,
            sink=sink,
            **options,  # type: ignore[arg-type]
        )
        self.step = self.checkpointer.restore()

    def save(self) -> Handle:
        return self.checkpointer.save(self.step)


@functools.cache
def _reference() -> dict[int, State]:
    """The state after each step of a training that nobody stopped."""
    training, found = _Training(), {}
    for _ in range(_MOST_STEPS):
        training.update()
        found[training.step] = training.live()
    return found


class StrategySuite:
    """What every strategy must do."""

    @abstractmethod
    def new_strategy(self) -> Strategy:
        """The strategy under test."""
        raise NotImplementedError

    # --- what comes back ----------------------------------------------------

    @pytest.mark.parametrize("persist", ["process", "thread"])
    def test_every_checkpoint_holds_what_was_live_when_it_was_taken_and_nothing_else_is_left(
        self, tmp_path: Path, persist: str
    ) -> None:
        before = set(threading.enumerate())
        strategy = self.new_strategy()
        root = str(tmp_path / "root")
        job = _Job(root, strategy, persist=persist)
        for _ in range(_STEPS):
            job.update()
            handle = job.save()
            job.update()  # changes everything right behind the boundary
            job.save()
            handle.captured.result(TIMEOUT_S)
        job.checkpointer.close()
        _nothing_is_left_of(root, before)
        wanted = _reference()
        reader = _Job(root, strategy, read_only=True)
        steps = reader.checkpointer.steps()
        assert steps[-1] == 2 * _STEPS, "the end of a training is not lost"
        for step in steps:
            reader.checkpointer.restore(step)
            _compare(root, step, reader.live(), wanted[step])

    def test_a_training_goes_on_as_if_nobody_had_stopped_it(self, tmp_path: Path) -> None:
        strategy = self.new_strategy()
        root = str(tmp_path / "root")
        job = _Job(root, strategy, persist="thread")
        for _ in range(_STEPS):
            job.update()
            job.save()
        job.checkpointer.close()
        again = _Job(root, strategy, persist="thread")
        assert again.step == _STEPS
        exact = _bounds(root, _STEPS) == {}
        while again.step < 2 * _STEPS:
            again.update()
        again.checkpointer.close()
        wanted, found = _reference()[2 * _STEPS], again.live()
        same = all(torch.equal(found[key], wanted[key]) for key in wanted)
        assert same or not exact

    # --- crashes ------------------------------------------------------------

    @pytest.mark.crash
    @pytest.mark.parametrize("stage", _STAGES)
    def test_after_a_kill_at_any_stage_what_was_promised_is_there(
        self, tmp_path: Path, stage: Stage
    ) -> None:
        strategy = self.new_strategy()
        root = str(tmp_path / "root")

        def work(say: Say) -> None:
            def tell(step: int, done: Future[SaveReport]) -> None:
                if done.exception() is None:
                    say(step)

            def sink(span: Span) -> None:
                if span.stage == stage and span.step >= 4:
                    os.kill(os.getpid(), signal.SIGKILL)

            job = _Job(root, strategy, sink)
            while job.step < _MOST_STEPS:  # where a stage is not reached it ends by itself
                job.update()
                handle = job.save()
                handle.durable.add_done_callback(functools.partial(tell, job.step))

        child = Child(work)
        outcome = child.wait()
        if not outcome.was_killed:
            outcome.check()
        promised = max(outcome.said, default=0)
        with warnings.catch_warnings():  # what nobody promised may be given up, aloud
            warnings.simplefilter("ignore", CheckpointWarning)
            again = _Job(root, strategy, persist="thread")
            again.checkpointer.wait()  # what was read in shared memory is in the store then
        assert promised <= again.step <= _MOST_STEPS
        if again.step:
            _compare(root, again.step, again.live(), _reference()[again.step])
        again.update()
        again.save()
        again.checkpointer.close()

    # --- a slow and a failing store -----------------------------------------

    def test_no_more_are_under_way_than_admission_says(self) -> None:
        strategy = self.new_strategy()
        admission = replace(strategy.admission, when_full="raise")
        strategy = replace(strategy, admission=admission)
        store = _Gate()
        job = _Job(store, strategy, every_steps=1)
        handles: list[Handle] = []
        full = threading.Event()

        def train() -> None:
            try:
                for _ in range(admission.max_in_flight + 1):
                    job.update()
                    handle = job.checkpointer.step(job.step)
                    assert handle is not None
                    handles.append(handle)
            except CaptureError:
                full.set()

        if strategy.persist == "before":  # waits in step() for its own checkpoint
            with store.opened_soon():
                train()
            assert all(handle.durable.done() for handle in handles)
        else:
            train()
            waiting = [handle for handle in handles if not handle.durable.done()]
            assert len(waiting) <= admission.max_in_flight
            assert full.is_set() or len(waiting) < len(handles)
        store.open_gate()
        assert job.checkpointer.wait(TIMEOUT_S)
        job.checkpointer.close()

    @pytest.mark.parametrize("name", ["*.pack", "*MANIFEST*"])
    def test_a_failure_is_told_and_costs_no_other_checkpoint(
        self, tmp_path: Path, name: str
    ) -> None:
        strategy = self.new_strategy()
        store = FaultyStore(open_store(str(tmp_path / "root")))
        job = _Job(store, strategy)
        job.update()
        job.save()
        job.checkpointer.wait()
        store.fault = Fault(op="*", name=name, times=1)
        for _ in range(2):
            job.update()
            with _may_fail():
                job.save()
            with _may_fail():
                job.checkpointer.wait()
        job.update()
        job.save()
        last = job.step
        job.checkpointer.close()
        again = _Job(store.inner, strategy)
        assert again.step == last
        _compare(store.inner, last, again.live(), _reference()[last])
        again.checkpointer.close()


class _Gate(MemoryStore):
    """Writes no pack before it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self._opened = threading.Event()

    def open_gate(self) -> None:
        self._opened.set()

    @contextmanager
    def opened_soon(self) -> Iterator[None]:
        timer = threading.Timer(0.05, self.open_gate)
        timer.start()
        yield
        timer.join()

    def write(self, name: str, parts: Iterable[Buffer]) -> int:
        if not self._opened.wait(TIMEOUT_S):
            raise StoreError(f"write {name}: nobody opened the gate", retryable=False)
        return super().write(name, parts)


def _nothing_is_left_of(root: str, before: set[threading.Thread]) -> None:
    """No slot, and soon no thread that was not there before."""
    run = open_repository(open_store(root)).run
    assert list(slots_of(SHARED_MEMORY, run)) == []
    until_s = monotonic() + TIMEOUT_S
    while left := [t for t in set(threading.enumerate()) - before if "asymcheck" in t.name]:
        assert monotonic() < until_s, f"threads are left: {left}"
        sleep(0.005)


@contextmanager
def _may_fail() -> Iterator[None]:
    """A failure of the store surfaces at some call, not at one in particular."""
    try:
        yield
    except StoreError:
        return


def _bounds(root: str | Store, step: int) -> dict[str, float]:
    """What the checkpoint says of its losses: kind of leaf to largest error."""
    repository = open_repository(open_store(root) if isinstance(root, str) else root)
    (at,) = [at for at in repository.survey().committed if at.step == step][-1:]
    with repository.open(at) as checkpoint:
        found = {x.kind.split()[0]: x.max_error for x in checkpoint.indexes[0].losses}
        assert bool(found) == (checkpoint.manifest.fidelity != "exact")
    return found


def _compare(root: str | Store, step: int, found: State, wanted: State) -> None:
    bounds = _bounds(root, step)
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        kind = "parameter" if key.startswith("model/") else key.rpartition("/")[0]
        off = (found[key].double() - value.double()).abs().max().item()
        assert off <= bounds.get(kind, 0.0) * (1 + 1e-6), (step, key, off, bounds)
