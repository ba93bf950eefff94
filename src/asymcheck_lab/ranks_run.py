"""One measured training on one of several ranks."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from asymcheck_lab.bench_check import PAGE_CACHE, differing, forget_cached
from asymcheck_lab.bench_run import Watch, descendants
from asymcheck_lab.bench_work import size_of
from asymcheck_lab.data import BatchLoader, load_text
from asymcheck_lab.drive import DRIVES
from asymcheck_lab.errors import RunError
from asymcheck_lab.fingerprint import fingerprint
from asymcheck_lab.models import FAMILIES
from asymcheck_lab.presets import RecipeSettings
from asymcheck_lab.recipe import seed_everything
from asymcheck_lab.rivals import Job, stored_bytes
from asymcheck_lab.rivals.spread import SPREAD
from asymcheck_lab.world import World

_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadSpec:
    """One run.

    Attributes:
        system: A name out of ``SPREAD``.
        parallel: How ranks share the model: a name out of ``DRIVES``.
        size: Of GPT-2, as for ``make bench``.
        steps: Counted steps.
        every: Steps between two checkpoints.
        warmup: Steps before; after the last one a first checkpoint is saved and waited for.
        folder: Checkpoints go below it, of all ranks; empty.
    """

    system: str
    parallel: str
    size: str
    steps: int
    every: int
    warmup: int
    folder: str


class _Training:
    """GPT-2 on windows of one text, spread over ranks."""

    def __init__(self, spec: SpreadSpec, world: World, seed: int) -> None:
        seed_everything(seed)
        size = size_of(spec.size)
        self._family = FAMILIES["gpt2"]
        self._batches = BatchLoader(
            load_text(), context=size.context, batch=size.batch, seed=seed + world.rank
        )
        settings = RecipeSettings(
            batch=size.batch, learning_rate=size.learning_rate, warmup_steps=1
        )
        model = self._family.build(size)
        # Parameters and two moments in fp32, each once.
        self.state_bytes = 12 * sum(p.numel() for p in model.parameters())
        self.drive = DRIVES[spec.parallel](model, settings, world)

    def forward_and_backward(self) -> None:
        """Up to the gradients of one update."""
        tokens = torch.from_numpy(next(self._batches))
        self.drive.backward(self._family.loss(self.drive.model, tokens, tokens))

    def fingerprint(self) -> dict[str, str]:
        """Of what this rank has."""
        return fingerprint(self.drive.bare, self.drive.optimizer, {})

    def job(self, spec: SpreadSpec) -> Job:
        """For a system."""
        return Job(self.drive.model, self.drive.optimizer, Path(spec.folder), spec.every)


def measure(spec: SpreadSpec, rank: int, ranks: int) -> dict[str, Any]:
    """Train and save as ``spec`` says, on each rank of the default process group; blocks.

    Returns:
        What was measured, as fields of a record, the same on all ranks: of times the longest of
        the ranks, of bytes the sum.

    Raises:
        RunError: A checkpoint was lost.
    """
    torch.set_num_threads(1)
    _turn_to(Path(spec.folder).with_name(f"log-{rank}.txt"))
    rival, world = SPREAD[spec.system], World(rank, ranks, ranks)
    training = _Training(spec, world, _SEED)
    watch, since_s = Watch(), [0.0]

    def before(*_: object) -> None:
        since_s[0] = perf_counter()

    # What a system hangs into the optimizer lies between these two hooks, and so does its time.
    register_optimizer_step_pre_hook(before)
    system = rival.make(training.job(spec))
    system.start()
    register_optimizer_step_pre_hook(lambda *_: watch.add(perf_counter() - since_s[0]))
    boundaries: dict[int, float] = {}

    def step(number: int, *, due: bool) -> None:
        training.forward_and_backward()
        watch.call(system.before_update)
        training.drive.update()
        if due:
            watch.owner = number
            boundaries[number] = perf_counter()
        watch.call(lambda: system.after_update(number, due=due))

    first = spec.every
    for number in range(first - spec.warmup, first):
        step(number, due=number == first - 1)
    system.drain()
    dist.barrier()
    begin_s = perf_counter()
    for number in range(first, first + spec.steps):
        step(number, due=number % spec.every == 0)
    loop_s = perf_counter() - begin_s
    system.drain()
    dist.barrier()
    whole_s = perf_counter() - begin_s
    counted = list(boundaries)[1:]
    mine: dict[str, Any] = {
        "whole_s": whole_s,
        "loop_s": loop_s,
        "state_bytes": training.state_bytes,
        "blocked_s": [watch.blocked_s[n] for n in counted],
        "durable_s": [],
    }
    if rival.kind != "none":
        lost = [n for n in counted if n not in system.durable_s]
        if lost:
            raise RunError(f"steps {lost} never became durable with {spec.system}")
        mine["durable_s"] = [system.durable_s[n] - boundaries[n] for n in counted]
        mine["disk_bytes"] = stored_bytes(Path(spec.folder)) // len(boundaries)
        last = first + spec.steps
        step(last, due=True)
        system.drain()
        mine |= _restore(spec, world, training, last, lambda job: system.load(last, job))
    system.close()
    told = world.gather(mine)
    dist.barrier()
    for pid in descendants(os.getpid()):  # a writing process that outlives its close
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return _joined(told)


def _turn_to(log: Path) -> None:
    """Say everything into a log: what several systems tell of each save is no result."""
    warnings.simplefilter("ignore")
    loud = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(loud, 1)
    os.dup2(loud, 2)
    os.close(loud)


def _restore(
    spec: SpreadSpec,
    world: World,
    training: _Training,
    step: int,
    load: Any,  # noqa: ANN401
) -> dict[str, Any]:
    """Load the newest checkpoint into a model and an optimizer of another seed, and compare."""
    saved = training.fingerprint()
    fresh = _Training(spec, world, _SEED + 1)
    if world.rank == 0:
        forget_cached(Path(spec.folder))
    dist.barrier()
    begin_s = perf_counter()
    load(fresh.job(spec))
    restore_s = perf_counter() - begin_s
    wrong = differing(saved, fresh.fingerprint(), SPREAD[spec.system].omits)
    return {"restore_s": restore_s, "page_cache": PAGE_CACHE, "differing": wrong[:5]}


def _joined(told: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Of all ranks one record."""
    found = dict(told[0])
    for name in ("whole_s", "loop_s", "restore_s"):
        if name in found:
            found[name] = max(one[name] for one in told)
    for name in ("blocked_s", "durable_s"):
        found[name] = [max(times) for times in zip(*(one[name] for one in told), strict=True)]
    found["differing"] = sorted({name for one in told for name in one.get("differing", ())})
    return found
