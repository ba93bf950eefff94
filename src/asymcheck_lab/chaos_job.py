"""The training that failures are tried on: small, real, and the same bits whenever it is done.

It runs in forks of one process, so that a case takes a second and not the ten that importing
takes. What stops it at a moment is a pause in its own thread, or its store stopping the process.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from asymcheck import Checkpointer, Tier, snapshotter, strategies
from asymcheck.planning.cadence import EverySteps
from asymcheck.planning.retention import CheckpointId
from asymcheck.planning.strategies import Strategy
from asymcheck.planning.tiers import Placement
from asymcheck.storage.repository import open_repository
from asymcheck.storage.store import open_store
from asymcheck.testing.children import Say
from asymcheck_lab.chaos_places import TIER, Where
from asymcheck_lab.errors import RunError

SIDE = 136
"""A square of it is more than 64 KiB, so that it is copied behind the training."""

TARGET = 4
"""The step in or after whose save the failure comes."""

HEAL_AT = TARGET + 2
"""What can be mended is mended in the forward pass after this step."""

LAST = TARGET + 4
"""The training's last step."""

WAIT_S = 30.0
_POLL_S = 0.002
_DURABLE_EVERY = 2
_STATE = "state"


class Training:
    """Two layers with dropout under AdamW; its data come from the generator that is saved too."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        self.at_forward: Callable[[], None] = lambda: None
        self.model = nn.Sequential(
            nn.Linear(SIDE, SIDE), nn.Dropout(0.1), nn.ReLU(), nn.Linear(SIDE, SIDE)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.step = 0

    def update(self) -> None:
        """One step."""
        batch = torch.randn(8, SIDE)
        output = self.model(batch)
        self.at_forward()
        output.square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1

    def live(self) -> dict[str, torch.Tensor]:
        """A copy of everything that the next step depends on."""
        found = {"rng": torch.get_rng_state()}
        for name, param in self.model.named_parameters():
            found[f"m/{name}"] = param.detach().clone()
            for entry, value in self.optimizer.state[param].items():
                found[f"o/state/m/{name}/{entry}"] = value.detach().clone()
        return found


@cache
def reference() -> Mapping[int, Mapping[str, torch.Tensor]]:
    """State after each step of a training that nothing interrupts and nobody saves."""
    training = Training()
    states = {}
    while training.step < LAST:
        training.update()
        states[training.step] = training.live()
    return states


def load_once() -> None:
    """What each fork would otherwise do again: imports, one thread, the reference."""
    import torch._dynamo

    if find_spec("aiohttp"):
        import asymcheck.storage.peers.agent  # noqa: F401

    torch.set_num_threads(1)
    reference()


def strategy_of(name: str) -> Strategy:
    """The strategy; one that keeps checkpoints in memory stores every second one.

    Its own rule, every three hours, would have nothing stored in a training of a second.
    """
    strategy = strategies[name]
    if strategy.placement.durable is not None:
        return replace(strategy, placement=Placement(durable=EverySteps(_DURABLE_EVERY)))
    return strategy


class Job:
    """One start of the training, with a ``Checkpointer``."""

    def __init__(self, where: Where, strategy: str, grace_s: float = WAIT_S) -> None:
        self.training = Training()
        self.checkpointer = Checkpointer(
            where.home,
            state={"m": self.training.model, "o": self.training.optimizer},
            strategy=strategy_of(strategy),
            on_error="warn",
            grace_s=grace_s,
            tiers=[Tier(url, name=TIER) for url in where.tiers],
        )
        self.is_blocking = strategies[strategy].capture == "blocking"
        self.training.step = self.checkpointer.restore()

    @property
    def persister(self) -> int:
        """Number of the persister process."""
        own: Any = self.checkpointer._snapshotter
        return int(own._persister.pid)

    def pause_in_capture(self, pause: Callable[[], None]) -> None:
        """Pause before the first piece of the next copy, or after it where it is all of it."""
        own: Any = self.checkpointer._snapshotter
        own.copier.between = pause
        if self.is_blocking:
            module: Any = snapshotter
            copy = module.copy_eager

            def pausing(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401
                found = copy(*arguments, **named)
                pause()
                return found

            module.copy_eager = pausing  # this process is a fork and does nothing else

    def save(self) -> None:
        """Save, however full the strategy's admission is."""
        self.checkpointer.save(self.training.step)

    def wait(self) -> None:
        """Until all is durable, in every place."""
        self.checkpointer.wait(WAIT_S)
        for state in self.checkpointer.tier_states():
            self.checkpointer.wait(WAIT_S, tier=state.name)


def train(say: Say, where: Where, strategy: str, moment: str, folder: Path) -> None:
    """Train to the end, with a pause at the moment until the file ``go`` is there.

    Says ``[step, "live"]`` after each update, ``there`` in the pause, ``hurt`` where what can be
    mended should be mended, until there is a file ``healed``.
    """
    _quiet()
    paused = False

    def pause() -> None:
        nonlocal paused
        if not paused:
            paused = True
            say("there")
            _await(folder / "go")

    job = Job(where, strategy)
    training = job.training
    say(["pid", job.persister, os.getpid()])
    while training.step < LAST:
        step = training.step + 1
        training.at_forward = lambda: None
        if step == TARGET and moment == "forward":
            training.at_forward = pause
        if step == HEAL_AT + 1:
            say("hurt")
            _await(folder / "healed")
        training.update()
        say([training.step, "live"])
        if step == TARGET and moment == "capture":
            job.pause_in_capture(pause)
        job.save()
        if step < TARGET - 1:
            job.wait()
        if step == TARGET:
            job.checkpointer.fence()
            say("sealed")
            if moment == "restore":
                pause()
    job.checkpointer.close()


def resume(say: Say, where: Where, strategy: str, grace_s: float) -> None:
    """Start again, say what was restored and how it compares, and train to the end."""
    _quiet()
    begin_s = time.perf_counter()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        job = Job(where, strategy, grace_s)
        seconds = time.perf_counter() - begin_s
        job.checkpointer.wait()  # what was read in shared memory is in the root then
    training, report = job.training, job.checkpointer.report
    job.checkpointer._grace_s = WAIT_S  # it was for what the dead one left
    at = CheckpointId(report.attempt or 0, report.step)
    bounds = _bounds(where, at) if report.step else {}
    say(
        {
            "step": report.step,
            "seconds": seconds,
            "skipped": [list(pair) for pair in report.skipped],
            "served": [given.tier for given in report.served if given.nbytes],
            "exact": not bounds,
            "differences": _differences(training, bounds) if report.step else [],
            "pid": job.persister,
            "warned": [str(warning.message) for warning in heard],
        }
    )
    while training.step < LAST:
        training.update()
        job.save()
    job.checkpointer.close()
    exact_to_the_end = not bounds and not _differences(training, {})
    say({"done": training.step, "exact": exact_to_the_end, "steps": job.checkpointer.steps()})


def _bounds(where: Where, at: CheckpointId) -> dict[str, float]:
    """How far off each kind may be by the checkpoint's own word, where it is not exact."""
    places = [open_repository(open_store(url)) for url in (where.home, *where.tiers)]
    holder = next(place for place in places if at in place.survey().committed)
    with holder.open(at) as checkpoint:
        losses = [loss for index in checkpoint.indexes for loss in index.losses]
    return {loss.kind.split()[0]: loss.max_error for loss in losses}


def _differences(training: Training, bounds: Mapping[str, float]) -> list[str]:
    """Where the live state is another one than that of the reference at this step."""
    found, problems = training.live(), []
    for key, wanted in reference()[training.step].items():
        kind = "rng" if key == "rng" else key.rsplit("/", 1)[1]
        kind = "parameter" if key.startswith("m/") else f"state/{kind}"
        if kind in bounds:
            off = (found[key].double() - wanted.double()).abs().max().item()
            if off > bounds[kind] * (1 + 1e-6):
                problems.append(f"{key} is off by {off:.3g}, it says at most {bounds[kind]:.3g}")
        elif not torch.equal(found[key], wanted):
            problems.append(f"{key} differs")
    return problems


def jump_the_clock(file: Path) -> None:
    """From now on ``time.time`` is off by as many seconds as stand in ``file``.

    In this process, and through a ``sitecustomize`` in every Python that it starts.
    """
    (file.parent / "sitecustomize.py").write_text(_CLOCK.format(file=str(file)))
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(file.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    exec(compile(_CLOCK.format(file=str(file)), "clock", "exec"), {})


_CLOCK = """
import time

def _jumping(real=time.time, file={file!r}):
    try:
        with open(file) as text:
            return real() + float(text.read() or 0)
    except (OSError, ValueError):
        return real()

time.time = _jumping
"""


def _await(file: Path) -> None:
    until_s = time.monotonic() + WAIT_S
    while not file.exists():
        if time.monotonic() > until_s:
            raise RunError(f"{file} did not come within {WAIT_S:g} s")
        time.sleep(_POLL_S)


def _quiet() -> None:
    """Warnings of the library are what is tried; they would only fill the terminal."""
    warnings.simplefilter("ignore")
    sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  until the process ends
