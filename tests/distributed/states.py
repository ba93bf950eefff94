"""States of many ranks in one process: saved one after the other, restored by the library."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from asymcheck.device.placement import Placer
from asymcheck.device.snapshot import gather
from asymcheck.device.state import State
from asymcheck.events import discard
from asymcheck.planning.layout import Extent
from asymcheck.planning.retention import CheckpointId
from asymcheck.recovery import RestoreReport, restore
from asymcheck.storage.flush import Encoded, flush
from asymcheck.storage.index import Index, dump_index
from asymcheck.storage.manifest import make_manifest
from asymcheck.storage.memory import MemoryStore
from asymcheck.storage.names import index_name, manifest_name
from asymcheck.storage.repository import Repository, create_repository
from asymcheck.storage.store import write_whole

Make = Callable[[int], Mapping[str, object]]
"""The live objects of a rank, made while this process plays it."""


@contextmanager
def played(rank: int, world: int) -> Iterator[None]:
    """This process is one rank of a world in which nobody answers."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def index_of(repository: Repository, at: CheckpointId, state: State, rank: int, world: int) -> Index:
    """Write what a rank holds of a state; returns its index, which is not written."""
    collected = state.collect()
    placed = Placer().place(collected, 0)

    def encode(chunk: Extent) -> Encoded:
        return Encoded(gather(placed, chunk), "raw")

    flushed = flush(repository.store, at, rank, placed.at.layout.chunks, encode)
    return Index(
        run=repository.run,
        at=at,
        rank=rank,
        world=world,
        created_s=0.0,
        metrics={},
        versions={},
        leaves=placed.at.leaves,
        aliases=collected.aliases,
        chunks=flushed.chunks,
        packs=flushed.packs,
    )


def commit(repository: Repository, indexes: list[Index]) -> None:
    """Make a checkpoint of what all ranks wrote."""
    at = indexes[0].at
    data = [(index, dump_index(index)) for index in indexes]
    for index, text in data:
        write_whole(repository.store, index_name(at, index.rank), [text])
    write_whole(repository.store, manifest_name(at), [make_manifest(data)])


def save(make: Make, world: int, **options: Any) -> Repository:  # noqa: ANN401
    """A repository with the checkpoint of a world, whose ranks this process plays in turn."""
    repository = create_repository(MemoryStore())
    at = CheckpointId(repository.claim(None).number, 1)
    indexes = []
    for rank in range(world):
        with played(rank, world):
            state = State(make(rank), rank=rank, world=world, **options)
            indexes.append(index_of(repository, at, state, rank, world))
    commit(repository, indexes)
    return repository


def load(
    repository: Repository,
    items: Mapping[str, object],
    rank: int,
    world: int,
    *,
    replicated: tuple[str, ...] = (),
    **options: Any,  # noqa: ANN401
) -> RestoreReport:
    """Restore one rank, without asking the others."""
    wanted: dict[str, Any] = {"step": None, "strict": True, "cast": False, "sink": discard}
    state = State(items, rank=rank, world=world, replicated=replicated)
    return restore(repository, state, rank=rank, world=world, **wanted | options)


def numbers(*shape: int, start: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor whose elements are all different."""
    return torch.arange(start, start + torch.Size(shape).numel()).to(dtype).view(shape)
