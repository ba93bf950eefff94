"""The trainer is killed while its newest checkpoint is in memory alone: nothing is lost.

The next start finds the slot, makes it durable and restores from it, bit for bit.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # before any fork: each child would load it anew
from torch import nn

from asymcheck import Checkpointer, Strategy
from asymcheck.capture import parse_capture
from asymcheck.decoding import verify
from asymcheck.errors import CheckpointWarning
from asymcheck.handover import left_over
from asymcheck.memory.arena import SHARED_MEMORY, Slot, SlotState, slots_of
from asymcheck.memory.process import ProcessId
from asymcheck.planning.cadence import EverySeconds, EverySteps
from asymcheck.planning.policy import Admission
from asymcheck.planning.tiers import Placement
from asymcheck.storage.repository import create_repository
from asymcheck.storage.store import open_store
from asymcheck.testing.children import Child, Say

pytestmark = pytest.mark.crash

WAIT_S = 60.0
SIDE = 150
IN_MEMORY = Placement(durable=EverySeconds(1e6))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, f"timed out: {what}"
        time.sleep(0.002)


class Job:
    """A small training whose state depends on the step alone."""

    def __init__(self, url: str, placement: Placement = IN_MEMORY, **options: Any) -> None:
        capture = options.pop("capture", "lazy")
        torch.manual_seed(5)
        self.model = nn.Sequential(*(nn.Linear(SIDE, SIDE) for _ in range(3)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.checkpointer = Checkpointer(
            url,
            state={"m": self.model, "o": self.optimizer},
            strategy=Strategy(
                capture=capture, admission=Admission(max_in_flight=2), placement=placement
            ),
            **options,
        )
        self.step = self.checkpointer.restore()

    @property
    def snapshotter(self) -> Any:
        return self.checkpointer._capturing()

    def update(self) -> None:
        self.step += 1
        torch.manual_seed(self.step)
        for param in self.model.parameters():
            param.grad = torch.randn_like(param)
        self.optimizer.step()

    def digest(self) -> str:
        state = [t for p in self.model.parameters() for t in self.optimizer.state[p].values()]
        live = [*self.model.state_dict().values(), *state]
        return sha256(b"".join(t.detach().numpy().tobytes() for t in live)).hexdigest()

    def train(self, steps: int) -> list[str]:
        """So many steps, each saved; returns what the state was at each."""
        digests = []
        for _ in range(steps):
            self.update()
            digests.append(self.digest())
            handle = self.checkpointer.save(self.step)
            if handle.durable.result(WAIT_S).tier != "memory":
                raise AssertionError(f"step {self.step} went to the store")
        return digests


class Place:
    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self.run = create_repository(open_store(self.root)).run
        self.persisters: list[int] = []

    def sealed(self) -> list[int]:
        found = []
        for path in slots_of(SHARED_MEMORY, self.run):
            slot = Slot.open(path)
            if slot.state == SlotState.SEALED:
                found.append(parse_capture(slot.meta, "slot").at.step)
            slot.close(unlink=False)
        return sorted(found)

    def next_start(self, newest: int, digest: str, stored: list[int]) -> None:
        """Start the job again: it restores that step bit for bit, and nothing is left over."""

        def work(say: Say) -> None:
            job = Job(self.root)
            say([job.step, job.digest()])
            say(job.checkpointer.steps())
            job.update()
            job.checkpointer.save(job.step)
            job.checkpointer.close()
            say(job.checkpointer.steps())

        restored, before, after = Child(work).wait().check()
        assert restored == [newest, digest]
        assert before == stored
        assert after == [*stored, newest + 1]
        repository = create_repository(open_store(self.root))
        listing = repository.survey()
        assert not listing.damaged
        assert not listing.leftovers
        assert not [d for at in listing.committed for d in verify(repository, at)]
        assert list(slots_of(SHARED_MEMORY, self.run)) == []


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path / "root")
    yield made
    for pid in made.persisters:
        if ProcessId.of(pid).start:
            os.kill(pid, signal.SIGKILL)
    for path in slots_of(SHARED_MEMORY, made.run):
        path.unlink()


@pytest.mark.parametrize("capture", ["lazy", "device-copy", "blocking"])
@pytest.mark.parametrize("persist", ["process", "thread"])
def test_the_next_start_restores_what_was_in_memory_alone(
    place: Place, persist: str, capture: str
) -> None:
    def work(say: Say) -> None:
        job = Job(place.root, persist=persist, capture=capture)
        say(job.train(3))
        job.update()  # what is not saved is lost
        say(job.checkpointer.steps())
        threading.Event().wait(WAIT_S)

    child = Child(work)
    digests = child.hear()
    assert child.hear() == []
    child.kill()
    assert child.wait().was_killed
    assert place.sealed() == [3]
    (old,) = [old for old in left_over(place.run) if old.is_sealed]
    assert old.at is not None
    assert old.at.step == 3
    place.next_start(3, digests[-1], [3])


def test_although_the_persister_is_killed_with_it(place: Place) -> None:
    def work(say: Say) -> None:
        job = Job(place.root)
        say(job.train(2))
        say(job.snapshotter._persister.pid)
        threading.Event().wait(WAIT_S)

    child = Child(work)
    digests, persister = child.hear(), child.hear()
    place.persisters.append(persister)
    os.kill(persister, signal.SIGKILL)
    child.kill()
    assert child.wait().was_killed
    place.next_start(2, digests[-1], [2])


@pytest.mark.parametrize("capture", ["lazy", "device-copy"])
def test_killed_while_the_next_is_captured_the_one_before_is_there(
    place: Place, capture: str
) -> None:
    def work(say: Say) -> None:
        job = Job(place.root, capture=capture)
        say(job.train(2))
        seen = 0

        def between() -> None:
            nonlocal seen
            seen += 1
            if seen == 3:  # some of it is copied
                say("copying")
                threading.Event().wait(WAIT_S)

        job.snapshotter.copier.between = between
        job.update()
        job.checkpointer.save(3)
        threading.Event().wait(WAIT_S)

    child = Child(work)
    digests = child.hear()
    assert child.hear() == "copying"
    child.kill()
    assert child.wait().was_killed
    assert place.sealed() == [2]
    place.next_start(2, digests[-1], [2])


def test_one_on_its_way_to_the_store_and_a_newer_one_in_memory_both_become_durable(
    place: Place,
) -> None:
    def work(say: Say) -> None:
        url = f"faulty+file://{place.root}?op=write&name=*.pack&do=stop"
        job = Job(url, Placement(durable=EverySteps(3)))
        say(job.snapshotter._persister.pid)
        job.train(2)
        job.update()
        job.checkpointer.save(3)  # the persister stops in the middle of it
        job.checkpointer.fence()
        say(job.train(1)[-1])
        threading.Event().wait(WAIT_S)

    child = Child(work)
    persister = child.hear()
    place.persisters.append(persister)
    digest = child.hear()
    child.kill()
    assert child.wait().was_killed
    assert place.sealed() == [3, 4]
    os.kill(persister, signal.SIGKILL)
    place.next_start(4, digest, [3, 4])


def test_between_the_seal_of_one_and_the_end_of_the_one_before_both_become_durable(
    place: Place,
) -> None:
    def work(say: Say) -> None:
        job = Job(place.root)
        job.train(2)
        job.snapshotter._keeper.settle = lambda active: (
            say("sealed"),
            threading.Event().wait(WAIT_S),
        )
        job.update()
        say(job.digest())
        job.checkpointer.save(3)
        job.checkpointer.fence()

    child = Child(work)
    digest = child.hear()
    assert child.hear() == "sealed"
    child.kill()
    assert child.wait().was_killed
    assert place.sealed() == [2, 3]
    place.next_start(3, digest, [2, 3])


@pytest.mark.parametrize("how", ["close", "exit", "collected"])
def test_whichever_way_it_ends_the_newest_comes_to_the_store(place: Place, how: str) -> None:
    def work(say: Say) -> None:
        import gc

        from asymcheck import endings

        job: Job | None = Job(place.root)
        assert job is not None
        say(job.train(3))
        if how == "close":
            job.checkpointer.close()
        elif how == "collected":
            job = None
            gc.collect()
            until(lambda: not any(e.is_ours for e in endings._endings), "it is closed")
        else:
            endings.close_all()  # what the end of the interpreter calls

    child = Child(work)
    digests = child.hear()
    child.wait().check()
    assert place.sealed() == []
    with warnings.catch_warnings():
        warnings.simplefilter("error", CheckpointWarning)
        place.next_start(3, digests[-1], [3])
