"""Ranks that start on a host where all of them were killed go on from what lies in its memory."""

from __future__ import annotations

import threading
import time
import warnings
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from asymcheck import Checkpointer
from asymcheck.decoding import verify
from asymcheck.errors import CheckpointWarning
from asymcheck.handover import left_over
from asymcheck.memory.arena import SHARED_MEMORY, Slot, rank_of, slots_of
from asymcheck.slot_store import IN_MEMORY
from asymcheck.storage.local import LocalStore
from asymcheck.storage.repository import open_repository
from asymcheck.storage.store import open_store
from asymcheck.testing.children import Say
from asymcheck.testing.ranks import check_all, run_ranks

WAIT_S = 30.0
SIDE = 256


class Job:
    """A sharded training whose state, taken together, depends on the step alone."""

    def __init__(self, root: Path) -> None:
        torch.manual_seed(5)
        self.model = nn.Sequential(*(nn.Linear(SIDE, SIDE) for _ in range(2)))
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.checkpointer = Checkpointer(
            root,
            state={"model": self.model, "optimizer": self.optimizer},
            persist="thread",
            timeout_s=20.0,
        )
        self.at = self.checkpointer.restore()

    def update(self) -> None:
        self.at += 1
        for param in self.model.parameters():
            param.grad = torch.full_like(param, 0.1 * self.at)
        self.optimizer.step()

    def whole(self) -> str:
        """Digest of model and optimizer, equal on all ranks."""
        found = sha256()
        for param in self.model.parameters():
            for tensor in (param, *(self.optimizer.state[param][k] for k in ("exp_avg",))):
                found.update(tensor.full_tensor().detach().contiguous().numpy().tobytes())
        return found.hexdigest()[:16]


def run_of(root: Path) -> str:
    return open_repository(open_store(str(root))).run


def is_hashed(slots: list[Path]) -> bool:
    found = []
    for path in slots:
        slot = Slot.open(path)
        found.append(bool(slot.hashes))
        slot.close(unlink=False)
    return any(found)


def killed_with_step_2_in_memory(root: Path) -> str:
    """Two ranks store step 1 and are killed with step 2 in memory; what the state was there."""

    def work(rank: int, say: Say) -> None:
        job = Job(root)
        job.update()
        job.checkpointer.save(1).durable.result(WAIT_S)
        write = LocalStore.write

        def stuck(self: LocalStore, name: str, parts: Any) -> int:
            if "step-00000002" in name:
                threading.Event().wait(WAIT_S)
            return write(self, name, parts)

        LocalStore.write = stuck  # type: ignore[method-assign]
        job.update()
        job.checkpointer.save(2)
        job.checkpointer.fence()
        say(job.whole())
        until_s = time.monotonic() + WAIT_S
        while not is_hashed(list(slots_of(SHARED_MEMORY, run_of(root), rank))):
            assert time.monotonic() < until_s, "timed out: the slot is hashed"
            time.sleep(0.002)
        dist.barrier()
        say("there")
        threading.Event().wait(WAIT_S)

    first, second = run_ranks(2, work, kill={0: "there", 1: "there"})
    assert first.was_killed
    assert second.was_killed
    assert first.said[0] == second.said[0]
    return str(first.said[0])


def start(root: Path, world: int) -> list[list[Any]]:
    """Of each rank what it restored, the state, and whether that was read in shared memory."""

    def work(rank: int, say: Say) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)
            job = Job(root)
            served = {given.tier: given.nbytes for given in job.checkpointer.report.served}
            say([job.at, job.whole(), served.get(IN_MEMORY, 0) > 0])
            job.update()
            job.checkpointer.save(job.at)
            job.checkpointer.close()

    return [said[0] for said in check_all(run_ranks(world, work))]  # type: ignore[misc]


@pytest.mark.parametrize("world", [2, 1])
def test_any_number_of_ranks_reads_what_all_left_in_memory(tmp_path: Path, world: int) -> None:
    digest = killed_with_step_2_in_memory(tmp_path)
    assert start(tmp_path, world) == [[2, digest, True]] * world
    repository = open_repository(open_store(str(tmp_path)))
    assert [at.step for at in repository.survey().committed] == [1, 2, 3]
    assert not [d for at in repository.survey().committed for d in verify(repository, at)]
    assert list(slots_of(SHARED_MEMORY, repository.run)) == []


def test_without_the_slot_of_one_rank_none_is_read(tmp_path: Path) -> None:
    killed_with_step_2_in_memory(tmp_path)
    for old in left_over(run_of(tmp_path)):
        if rank_of(old.path) == 1:
            old.path.unlink()  # as on another host
    found = start(tmp_path, 2)
    assert [said[0] for said in found] == [1, 1]
    assert [said[2] for said in found] == [False, False]
