"""A trainer that saves each step is killed at each point of a save: the next start goes on from the
step that was done or the one before, bit for bit, with and without tiers.
"""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # before any fork: each child would load it anew
from torch import nn

from asymcheck import Checkpointer, Strategy, Tier
from asymcheck.device.snapshot import LazyCopy
from asymcheck.errors import CheckpointWarning
from asymcheck.keeping import Keeper
from asymcheck.memory.arena import SHARED_MEMORY, slots_of
from asymcheck.planning.cadence import EverySteps
from asymcheck.planning.policy import Admission
from asymcheck.planning.tiers import Placement
from asymcheck.snapshotter import Snapshotter
from asymcheck.storage.repository import open_repository
from asymcheck.storage.store import open_store
from asymcheck.testing.children import Child, Say

pytestmark = pytest.mark.crash

SIDE = 150
KILLED_IN = 4  # at this step's save, or in the fence after it

POINTS: list[tuple[Any, str]] = [
    (Snapshotter, "capture"),
    (Snapshotter, "_reserve"),
    (Snapshotter, "_begin"),
    (Snapshotter, "_start"),
    (LazyCopy, "finish"),
    (Snapshotter, "fence"),
    (Snapshotter, "_seal"),
    (Snapshotter, "_conclude"),
    (Keeper, "settle"),
    (Keeper, "release"),
]
NAMED = [(owner, name, when) for owner, name in POINTS for when in ("before", "after")]
FEW = {("_begin", "after"), ("_seal", "before"), ("_conclude", "after")}


class Job:
    """A small training whose state depends on the step alone; each step is saved."""

    def __init__(self, root: Path, tier: bool, in_memory: bool) -> None:
        torch.manual_seed(5)
        self.model = nn.Sequential(*(nn.Linear(SIDE, SIDE) for _ in range(3)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        placement = {"placement": Placement(durable=EverySteps(1000))} if in_memory else {}
        far = Tier(str(root / "far"), every=EverySteps(2), name="far")
        self.checkpointer = Checkpointer(
            root / "home",
            state={"m": self.model, "o": self.optimizer},
            strategy=Strategy(admission=Admission(max_in_flight=2), **placement),
            every_steps=1,
            keep_last=2,
            tiers=[far] if tier else [],
        )
        self.step = self.checkpointer.restore()

    def update(self) -> None:
        torch.manual_seed(self.step + 1)
        for param in self.model.parameters():
            param.grad = torch.randn_like(param)
        self.optimizer.step()
        self.step += 1

    def digest(self) -> str:
        state = [t for p in self.model.parameters() for t in self.optimizer.state[p].values()]
        live = [*self.model.state_dict().values(), *state]
        return sha256(b"".join(t.detach().numpy().tobytes() for t in live)).hexdigest()


def kill_at(owner: Any, name: str, when: str, job: Job) -> None:
    """Be killed when that is called, or has returned, from step ``KILLED_IN`` on."""
    original: Callable[..., Any] = getattr(owner, name)

    def killed(*arguments: Any, **options: Any) -> Any:
        found = original(*arguments, **options) if when == "after" else None
        if job.step >= KILLED_IN:
            os.kill(os.getpid(), signal.SIGKILL)
        return found if when == "after" else original(*arguments, **options)

    setattr(owner, name, killed)


def check(root: Path, owner: Any, name: str, when: str, *, tier: bool, in_memory: bool) -> None:
    torch.set_num_threads(1)

    def work(say: Say) -> None:
        job = Job(root, tier, in_memory)
        kill_at(owner, name, when, job)
        while job.step < KILLED_IN + 2:
            job.update()
            say([job.step, job.digest()])
            job.checkpointer.step(job.step)

    first = Child(work).wait()
    assert first.was_killed, f"{name} was never called"
    digests = dict(first.said)
    done = max(KILLED_IN, *digests)  # a thread may kill before that step is told of
    assert done <= KILLED_IN + 1

    def again(say: Say) -> None:
        # The persister that lived on may free a slot while the start looks at it: it says so.
        warnings.simplefilter("ignore", CheckpointWarning)
        job = Job(root, tier, in_memory)
        say([job.step, job.digest()])
        job.update()
        job.checkpointer.step(job.step)
        job.checkpointer.close()
        say(job.checkpointer.steps())

    (step, digest), steps = Child(again).wait().check()
    assert step >= done - 1
    assert digest == digests[step]
    assert steps[-1] == step + 1
    assert not list(slots_of(SHARED_MEMORY, open_repository(open_store(str(root / "home"))).run))


def spoken(value: Any) -> str:
    return getattr(value, "__name__", None) or str(value)


@pytest.mark.parametrize(("owner", "name", "when"), [p for p in NAMED if p[1:] in FEW], ids=spoken)
def test_a_kill_loses_at_most_one_step_beside_a_tier(
    tmp_path: Path, owner: Any, name: str, when: str
) -> None:
    check(tmp_path, owner, name, when, tier=True, in_memory=True)


@pytest.mark.extra
@pytest.mark.parametrize("tier", [False, True], ids=["alone", "tier"])
@pytest.mark.parametrize("in_memory", [False, True], ids=["store", "memory"])
@pytest.mark.parametrize(("owner", "name", "when"), NAMED, ids=spoken)
def test_a_kill_at_any_point_of_a_save_loses_at_most_one_step(
    tmp_path: Path, owner: Any, name: str, when: str, in_memory: bool, tier: bool
) -> None:
    check(tmp_path, owner, name, when, tier=tier, in_memory=in_memory)
