"""Which part of a whole a rank holds, and which ranks hold the same: from metadata alone.

A DTensor's mesh and placements say where its local tensor lies in the whole; values are never
looked at, and nothing here communicates.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import torch

from asymcheck.device.tensors import new_tensor
from asymcheck.errors import StateError
from asymcheck.planning.pieces import Piece


class Copies(NamedTuple):
    """Ranks that hold the same values, of which each writes a part.

    Attributes:
        ranks: Who writes them, ascending.
        mine: The place of this rank among them, -1 where it leaves that to the others.
    """

    ranks: tuple[int, ...]
    mine: int


def copies_of_all(rank: int, world: int) -> Copies:
    """Of what each rank of a world has alike."""
    return Copies(tuple(range(world)), rank)


class Shard(NamedTuple):
    """What of an array a rank has.

    Attributes:
        piece: Where its local tensor lies in the whole.
        copies: Who has the same piece; ``None`` where nobody else has it.
    """

    piece: Piece
    copies: Copies | None


def dtensor_class() -> Any:  # noqa: ANN401
    """``DTensor``; ``None`` where it is not loaded, and so nothing is one. Loads nothing."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module and module.DTensor


def is_dtensor(tensor: object) -> bool:
    """Whether it is a DTensor."""
    kind = dtensor_class()
    return kind is not None and isinstance(tensor, kind)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of this rank: the local tensor of a DTensor, any other tensor itself."""
    if not is_dtensor(tensor):
        return tensor
    found: Any = tensor
    inner = found._local_tensor
    wait = getattr(inner, "wait", None)  # it may be the promise of a collective
    mine: torch.Tensor = inner if wait is None else wait()
    return mine


def shard_of(key: str, tensor: torch.Tensor) -> Shard:
    """What of a DTensor's whole this rank has.

    Args:
        key: Its path, for messages.
        tensor: A DTensor.

    Raises:
        StateError: Its mesh or a placement is not supported; says which.
    """
    dtensor: Any = tensor
    mesh, placements, whole = dtensor.device_mesh, dtensor.placements, tuple(dtensor.shape)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise StateError(
            key,
            f"this rank is not in its device mesh {mesh}: leave it out of the state of this rank",
        )
    spots = _spots(whole, tuple(mesh.shape), tuple(coordinate), placements)
    if isinstance(spots, str):
        raise StateError(key, f"{spots} of {placements} is not supported: {_ADVICE}")
    start, shape = spots
    if tuple(local(tensor).shape) != shape:
        raise StateError(
            key,
            f"its placements {placements} say that this rank has {list(shape)} of "
            f"{list(whole)}, its local tensor is {list(local(tensor).shape)}",
        )
    return Shard(Piece(whole, start), _copies(mesh, tuple(coordinate), placements))


_ADVICE = "redistribute it to Shard or Replicate placements before it is saved"


@lru_cache(maxsize=1 << 12)
def _spots(
    whole: tuple[int, ...],
    mesh: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: tuple[Any, ...],
) -> tuple[tuple[int, ...], tuple[int, ...]] | str:
    """Start and shape of the box of one coordinate, or what has none in words.

    Each mesh dimension shards what those before it left, as torch does; ``_StridedShard``
    takes its part of each of the parts that a later dimension will choose from.
    """
    spans: list[Sequence[int]] = [range(n) for n in whole]
    for size, mine, placement in zip(mesh, coordinate, placements, strict=True):
        if placement.is_replicate():
            continue
        factor = getattr(placement, "split_factor", None)
        if factor is None and not placement.is_shard():
            return repr(placement)
        dim = placement.dim
        parts = [spans[dim]] if factor is None else _chunks(spans[dim], factor)
        spans[dim] = _joined([_chunk(part, size, mine) for part in parts])
    if any(b != a + 1 for span in spans if isinstance(span, tuple) for a, b in pairwise(span)):
        return "an uneven combination, in which a rank has no one box,"
    shape = tuple(len(span) for span in spans)
    if not prod(shape):
        return (0,) * len(whole), shape
    return tuple(span[0] for span in spans), shape


def _chunk(span: Sequence[int], parts: int, mine: int) -> Sequence[int]:
    """As ``torch.chunk`` cuts: the last parts are shorter or empty."""
    size = -(-len(span) // parts)
    return span[size * mine : size * (mine + 1)]


def _chunks(span: Sequence[int], parts: int) -> Iterator[Sequence[int]]:
    return (_chunk(span, parts, mine) for mine in range(parts))


def _joined(parts: list[Sequence[int]]) -> Sequence[int]:
    return parts[0] if len(parts) == 1 else tuple(i for part in parts for i in part)


@lru_cache(maxsize=256)
def _copies(
    mesh: Any,  # noqa: ANN401
    coordinate: tuple[int, ...],
    placements: tuple[Any, ...],
) -> Copies | None:
    where = tuple(
        slice(None) if placement.is_replicate() else mine
        for mine, placement in zip(coordinate, placements, strict=True)
    )
    ranks = mesh.mesh[where].flatten().tolist()
    if len(ranks) == 1:
        return None
    return Copies(tuple(sorted(ranks)), sorted(ranks).index(int(mesh.mesh[coordinate])))


def like(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A DTensor over new memory that is sharded as another; its values are not defined."""
    found: Any = tensor
    kind, mine = type(found), local(tensor)
    made: torch.Tensor = kind.from_local(
        new_tensor(dtype, mine.shape, (), mine.device),
        found.device_mesh,
        found.placements,
        run_check=False,
        shape=found.shape,
        stride=found.stride(),
    )
    return made.detach()


class Replication(NamedTuple):
    """What of a module its ``DistributedDataParallel`` keeps equal on all ranks.

    Attributes:
        every: For tensors that all ranks have.
        first: For those that all take from rank 0 at each forward pass.
        wrapped: Prefix of the names in each wrapper, the names that it ignores, and whether it
            sends buffers.
    """

    every: Copies
    first: Copies
    wrapped: tuple[tuple[str, frozenset[str], bool], ...]

    def of(self, name: str, *, buffer: bool) -> Copies | None:
        """The copies of an entry, by its raw name."""
        for prefix, ignored, sends_buffers in self.wrapped:
            if name.startswith(prefix) and name[len(prefix) :] not in ignored:
                if not buffer:
                    return self.every
                return self.first if sends_buffers else None
        return None


def replication_of(module: torch.nn.Module, rank: int, world: int) -> Replication:
    """Find the wrappers in a module whose group is all ranks."""
    every = copies_of_all(rank, world)
    first = Copies((0,), 0 if rank == 0 else -1)
    found = []
    if world > 1:
        for name, part in module.named_modules():
            if isinstance(part, torch.nn.parallel.DistributedDataParallel):
                ddp: Any = part
                if ddp.process_group.size() == world:
                    prefix = f"{name}.module." if name else "module."
                    ignored = frozenset(ddp.parameters_to_ignore)
                    found.append((prefix, ignored, bool(ddp.broadcast_buffers)))
    return Replication(every, first, tuple(found))
