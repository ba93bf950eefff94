"""Many small tensors on several ranks: what a save and a load cost by their number alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from asymcheck import Checkpointer
from asymcheck.testing.ranks import run_ranks
from asymcheck_lab.bench_child import run_root
from asymcheck_lab.errors import LabError, RunError, UsageError
from asymcheck_lab.fingerprint import held

FORMS = ("ddp", "fsdp2")
_ELEMENTS = 16


@dataclass(frozen=True, slots=True)
class SmallSeconds:
    """What one form took; of each figure that of the slowest rank.

    Attributes:
        parallel: One of ``FORMS``.
        stall_s: The first save, on the training thread.
        save_s: The first save until it was durable.
        again_s: The second one until it was durable.
        load_s: Loading into another module.
    """

    parallel: str
    stall_s: float
    save_s: float
    again_s: float
    load_s: float


def measure_small(
    parallel: str, *, tensors: int, ranks: int, folder: Path, timeout_s: float = 300.0
) -> SmallSeconds:
    """Save a module of many small parameters twice, and load it into another; blocks.

    Args:
        parallel: One of ``FORMS``.
        tensors: How many parameters, of 64 bytes each.
        ranks: How many ranks, forks of this process.
        folder: Checkpoints go below it; what was written is removed at the end.
        timeout_s: How long it may take.

    Raises:
        UsageError: A number is wrong, or there is no such form.
        RunError: A rank failed, or took too long, or what was loaded is not what was saved.
        LabError: The medium failed.
    """
    if parallel not in FORMS:
        raise UsageError(f"parallel: expected some of {', '.join(FORMS)}, found {parallel!r}")
    for name, value in (("tensors", tensors), ("ranks", ranks)):
        if value < 1:
            raise UsageError(f"{name}: expected at least 1, found {value}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise LabError(f"{failure.filename}: {failure.strerror}") from failure
    with run_root(folder) as root:

        def work(_: int, say: Callable[[Any], None]) -> None:
            say(_measure(parallel, tensors, root))

        try:
            outcomes = run_ranks(ranks, work, timeout_s=timeout_s, collective_timeout_s=timeout_s)
            told: list[Any] = [outcome.check()[0] for outcome in outcomes]
        except AssertionError as failure:
            raise RunError(str(failure).strip()) from failure
    return SmallSeconds(parallel, *(max(seconds) for seconds in zip(*told, strict=True)))


def _measure(parallel: str, tensors: int, root: Path) -> list[float]:
    model, again = (_spread(_module(seed, tensors), parallel) for seed in (0, 1))
    seconds = []
    with Checkpointer(root, state={"model": model}) as checkpointer:
        checkpointer.restore()
        for step in (1, 2):
            dist.barrier()
            begin_s = perf_counter()
            checkpointer.save(step)
            seconds.append(perf_counter() - begin_s)
            checkpointer.wait()
            seconds.append(perf_counter() - begin_s)
    dist.barrier()
    begin_s = perf_counter()
    with Checkpointer(root, state={"model": again}, read_only=True) as checkpointer:
        checkpointer.restore()
    seconds.append(perf_counter() - begin_s)
    for mine, found in zip(model.parameters(), again.parameters(), strict=True):
        if not torch.equal(held(mine), held(found)):
            raise RunError("what was loaded is not what was saved")
    stall_s, save_s, _, again_s, load_s = seconds
    return [stall_s, save_s, again_s, load_s]


def _module(seed: int, tensors: int) -> torch.nn.Module:
    made = torch.Generator().manual_seed(seed)
    values = torch.randn(tensors, _ELEMENTS, generator=made)
    found = torch.nn.Module()
    for number, value in enumerate(values):
        found.register_parameter(f"p{number}", torch.nn.Parameter(value.clone()))
    return found


def _spread(module: torch.nn.Module, parallel: str) -> torch.nn.Module:
    if parallel == "ddp":
        return torch.nn.parallel.DistributedDataParallel(module)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return module
