"""The ranks of a training: which one this process is, and what they tell each other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from asymcheck_lab.errors import UsageError
from asymcheck_lab.launch import is_launched

_LIMIT = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class World:
    """One rank's place among all.

    Attributes:
        rank: Its number, from 0 on.
        size: How many there are.
        local_size: How many of them are on this host.
        device: Where this rank trains.
    """

    rank: int = 0
    size: int = 1
    local_size: int = 1
    device: str = "cpu"

    def mean(self, value: float) -> float:
        """The mean of what the ranks give, the same on each; a collective that blocks."""
        if self.size == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(total)
        return float(total.item()) / self.size

    def gather(self, mine: Any) -> list[Any]:  # noqa: ANN401  whatever the ranks give
        """What each rank gives, in their order, on every rank; a collective that blocks."""
        if self.size == 1:
            return [mine]
        found: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(found, mine)
        return found


@contextmanager
def join(parallel: str, device: str) -> Iterator[World]:
    """Become one of the ranks that a launcher started; blocks until all are there.

    A process group that is there already is taken as it is, and left.

    Args:
        parallel: How the model is spread; with ``none`` this process is alone.
        device: ``cpu``, or ``cuda`` for the device of this rank's number on its host.

    Raises:
        UsageError: There is no launcher, or one that started several for ``none``.
    """
    dist = torch.distributed
    there = dist.is_available() and dist.is_initialized()
    size = dist.get_world_size() if there else int(os.environ.get("WORLD_SIZE", "1"))
    if parallel == "none":
        if (there or is_launched()) and size > 1:
            raise UsageError(
                f"parallel: expected ddp, fsdp2 or a zero with {size} ranks, found none"
            )
        yield World(device=device)
        return
    if not there and not is_launched():
        raise UsageError(
            f"parallel: {parallel} needs a launcher: torchrun, deepspeed, or asymlab train, which "
            f"starts one"
        )
    # torchrun says it by the first name, DeepSpeed's launcher by the second.
    local_size = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or size
    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device)
    if not there:
        dist.init_process_group("gloo" if device == "cpu" else "nccl", timeout=_LIMIT)
    yield World(dist.get_rank(), size, int(local_size), device)
    if not there:  # after a failure the others may never come: it is left to the end
        dist.destroy_process_group()
