"""Real ranks over gloo: trained sharded, saved, restored by another number of ranks."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from states import commit, index_of, load
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from asymcheck.device.state import State
from asymcheck.errors import CheckpointWarning
from asymcheck.planning.retention import CheckpointId
from asymcheck.storage.local import LocalStore
from asymcheck.storage.repository import Repository, create_repository, open_repository
from asymcheck.storage.sealed import digest
from asymcheck.testing.children import Say
from asymcheck.testing.ranks import check_all, run_ranks

KINDS = ("fsdp2", "hsdp", "fsdp2 over tensor parallel", "ddp")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # a fork does not inherit a thread pool


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 16)
        self.down = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


def _make(kind: str, world: int, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model: nn.Module = Net()
    if kind == "ddp":
        model = DistributedDataParallel(model)
    elif world == 1 or kind == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    else:
        names = ("replicate", "shard") if kind == "hsdp" else ("shard", "tensor")
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=names)
        if kind == "hsdp":
            fully_shard(model, mesh=mesh)
        else:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(model, mesh["tensor"], plan)
            fully_shard(model, mesh=mesh["shard"])
    return {"model": model, "optim": torch.optim.AdamW(model.parameters(), lr=0.1)}


def _train(live: dict[str, Any], steps: int) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        live["optim"].zero_grad()
        live["model"](torch.randn(4, 6)).square().sum().backward()
        live["optim"].step()


def _hashes(live: dict[str, Any]) -> dict[str, str]:
    """Of each whole; a collective of all ranks."""
    found = {}
    model = live["model"].module if hasattr(live["model"], "module") else live["model"]
    for name, p in model.named_parameters():
        for key, tensor in {"": p, **live["optim"].state[p]}.items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            found[f"{name}/{key}"] = digest(whole.detach().contiguous().numpy().tobytes())
    return found


def _save(root: Path, kind: str, world: int) -> dict[str, str]:
    def work(rank: int, say: Say) -> None:
        live = _make(kind, world, seed=1)
        _train(live, 2)
        repository = open_repository(LocalStore(root))
        at = CheckpointId(1, 2)
        index = index_of(repository, at, State(live, rank=rank, world=world), rank, world)
        indexes: list[Any] = [None] * world
        dist.all_gather_object(indexes, index)
        if rank == 0:
            commit(repository, indexes)
        say(_hashes(live))

    repository: Repository = create_repository(LocalStore(root))
    assert repository.claim(None).number == 1
    said = check_all(run_ranks(world, work))
    hashes = said[0][0]
    assert isinstance(hashes, dict)
    return hashes


def _restored(root: Path, kind: str, world: int) -> list[object]:
    def work(rank: int, say: Say) -> None:
        live = _make(kind, world, seed=2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)

            def exchange(what: str, mine: Any) -> list[Any]:  # noqa: ANN401
                told: list[Any] = [None] * world
                dist.all_gather_object(told, [what, mine])
                assert {other for other, _ in told} == {what}
                return [value for _, value in told]

            load(open_repository(LocalStore(root)), live, rank, world, exchange=exchange)
        say(_hashes(live))

    return [said[0] for said in check_all(run_ranks(world, work))]


@pytest.mark.parametrize("kind", KINDS)
def test_what_four_ranks_trained_is_restored_by_any_kind_of_any_world(
    tmp_path: Path, kind: str
) -> None:
    saved = _save(tmp_path, kind, 4)
    for other, world in (("fsdp2", 2), ("ddp", 2), (kind, 4), ("fsdp2", 3), ("ddp", 1)):
        assert _restored(tmp_path, other, world) == [saved] * world


@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
def test_what_two_ranks_trained_is_restored_by_three_and_by_composed_shards(
    tmp_path: Path, kind: str
) -> None:
    saved = _save(tmp_path, kind, 2)
    for other, world in ((kind, 3), ("fsdp2 over tensor parallel", 4), ("hsdp", 4)):
        assert _restored(tmp_path, other, world) == [saved] * world
