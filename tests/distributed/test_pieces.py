"""Each rank has pieces of wholes: saved in one world, restored in any other."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from states import load, numbers, played, save
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.placement_types import _StridedShard

from asymcheck.device.sharding import like, local, shard_of
from asymcheck.device.state import State
from asymcheck.errors import CheckpointWarning, CorruptCheckpoint, StateError

SIZES = (1, 3, 5, 6, 7, 17)


def _mesh(*shape: int) -> DeviceMesh:
    # Torch keeps what it derives from a mesh: those of two ranks must not be equal.
    names = tuple(f"d{i}_of_rank_{dist.get_rank()}" for i in range(len(shape)))
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def _dtensor(whole: torch.Tensor, mesh: DeviceMesh, placements: list[Placement]) -> DTensor:
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


def _worlds() -> list[tuple[int, ...]]:
    return [(1,), (2,), (3,), (4,), (2, 2)]


@st.composite
def _sharded(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], list[Placement]]:
    shape = draw(st.lists(st.sampled_from(SIZES), max_size=3).map(tuple))
    mesh, placements = draw(_placements(len(shape)))
    return shape, mesh, placements


@st.composite
def _placements(draw: st.DrawFn, ndim: int) -> tuple[tuple[int, ...], list[Placement]]:
    mesh = draw(st.sampled_from(_worlds()))
    choices: list[Placement] = [Replicate(), *(Shard(d) for d in range(ndim))]
    return mesh, [draw(st.sampled_from(choices)) for _ in mesh]


def _size(mesh: tuple[int, ...]) -> int:
    return torch.Size(mesh).numel()


@settings(max_examples=60, deadline=None)
@given(_sharded())
def test_a_local_tensor_is_where_mesh_and_placements_say(
    how: tuple[tuple[int, ...], tuple[int, ...], list[Placement]],
) -> None:
    shape, mesh, placements = how
    whole = numbers(*shape)
    for rank in range(_size(mesh)):
        with played(rank, _size(mesh)):
            tensor = _dtensor(whole, _mesh(*mesh), placements)
            piece = shard_of("x", tensor).piece
            assert not isinstance(piece.start, int)
            part = tensor.to_local()
            box = tuple(slice(a, a + n) for a, n in zip(piece.start, part.shape, strict=True))
            assert torch.equal(whole[box], part)


@pytest.mark.parametrize("size", [1, 3, 5, 6, 7, 8, 12, 17])
@pytest.mark.parametrize("dim", [0, 1])
def test_composed_shards_of_one_dimension_are_where_torch_puts_them(size: int, dim: int) -> None:
    whole = numbers(*((size, 4) if dim == 0 else (4, size)))
    for rank in range(4):
        with played(rank, 4):
            mesh = _mesh(2, 2)
            tensor = _dtensor(whole, mesh, [_StridedShard(dim, split_factor=2), Shard(dim)])
            piece = shard_of("x", tensor).piece
            assert not isinstance(piece.start, int)
            part = tensor.to_local()
            box = tuple(slice(a, a + n) for a, n in zip(piece.start, part.shape, strict=True))
            assert torch.equal(whole[box], part)


def test_shards_that_lie_apart_in_the_whole_are_refused_by_their_key() -> None:
    with played(0, 2):
        tensor = _dtensor(numbers(8), _mesh(2), [_StridedShard(0, split_factor=2)])
        with pytest.raises(StateError, match=r"'x'.*no one box.*_StridedShard"):
            shard_of("x", tensor)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_sharding_is_restored_into_any_other(data: st.DataObject) -> None:
    shape, mesh, placements = data.draw(_sharded())
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.complex128]))
    whole = numbers(*shape, dtype=dtype)

    def make(rank: int) -> dict[str, object]:
        return {"x": _dtensor(whole, _mesh(*mesh), placements)}

    repository = save(make, _size(mesh))
    other, others = data.draw(_placements(len(shape)))
    for rank in range(_size(other)):
        with played(rank, _size(other)), warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)
            target = _dtensor(torch.zeros_like(whole), _mesh(*other), others)
            load(repository, {"x": target}, rank, _size(other))
            expected = _dtensor(whole, _mesh(*other), others)
            assert torch.equal(local(target), local(expected))
            plain = torch.zeros_like(whole)
            load(repository, {"x": plain}, rank, _size(other))
            assert torch.equal(plain, whole)


@pytest.mark.parametrize("dim", [0, 1])
def test_composed_shards_are_restored_alone_and_other_ones_as_composed_shards(dim: int) -> None:
    whole = numbers(8, 12)
    composed: list[Placement] = [_StridedShard(dim, split_factor=2), Shard(dim)]

    def make(rank: int) -> dict[str, object]:
        return {"x": _dtensor(whole, _mesh(2, 2), composed), "y": whole}

    repository = save(make, 4, replicated=("y",))
    for rank in range(4):
        with played(rank, 4):
            plain = torch.zeros_like(whole)
            turned = _dtensor(torch.zeros_like(whole), _mesh(2, 2), composed)
            load(repository, {"x": plain, "y": turned}, rank, 4)
            assert torch.equal(plain, whole)
            assert torch.equal(local(turned), local(_dtensor(whole, _mesh(2, 2), composed)))


@pytest.mark.parametrize("placements", [[Shard(0)], [Shard(1)], [Replicate()]])
def test_large_pieces_go_into_strided_live_tensors_and_cast_ones(
    placements: list[Placement],
) -> None:
    whole = numbers(700, 1111)
    repository = save(lambda rank: {"x": _dtensor(whole, _mesh(3), placements)}, 3)
    with played(0, 1), warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        turned = torch.zeros(1111, 700).t()
        load(repository, {"x": turned}, 0, 1)
        assert torch.equal(turned, whole)
        cast = torch.zeros(700, 1111, dtype=torch.float64)
        load(repository, {"x": cast}, 0, 1, cast=True)
        assert torch.equal(cast, whole.double())


def test_a_whole_that_was_saved_in_another_order_is_restored_in_pieces() -> None:
    whole = numbers(3, 5, 4, 6).to(memory_format=torch.channels_last)
    repository = save(lambda rank: {"x": whole}, 1)
    for rank, dim in itertools.product(range(2), range(4)):
        with played(rank, 2), warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)
            target = _dtensor(torch.zeros(3, 5, 4, 6), _mesh(2), [Shard(dim)])
            load(repository, {"x": target}, rank, 2)
            assert torch.equal(local(target), local(_dtensor(whole, _mesh(2), [Shard(dim)])))


def test_a_sum_that_is_not_done_yet_is_refused_by_its_key() -> None:
    with played(0, 2):
        tensor = DTensor.from_local(torch.ones(3), _mesh(2), [Partial()], run_check=False)
        with pytest.raises(StateError, match=r"part/x.*Partial.* is not supported"):
            State({"part": {"x": tensor}}, rank=0, world=2).collect()


def test_a_whole_of_which_a_piece_is_missing_is_damaged() -> None:
    whole = numbers(8, 4)

    def make(rank: int) -> dict[str, object]:
        placements: list[Placement] = [Shard(0)]
        tensor = _dtensor(whole, _mesh(2), placements)
        return {"x": {"x": tensor}} if rank == 0 else {"x": {"y": tensor}}

    repository = save(make, 2)
    with played(0, 2), pytest.raises(CorruptCheckpoint, match=r"x/x.*elements 16 to 32 of 32"):
        load(repository, {"x": {"x": None}}, 0, 2)


@pytest.mark.parametrize("placements", [[Replicate(), Shard(0)], [Replicate(), Shard(1)]])
def test_replicas_of_a_shard_are_written_once_and_evenly(placements: list[Placement]) -> None:
    whole = numbers(1024, 1024)
    sizes = []
    for rank in range(4):
        with played(rank, 4):
            items = {"x": _dtensor(whole, _mesh(2, 2), placements)}
            sources = State(items, rank=rank, world=4).collect().sources
            sizes.append(sum(s.spec.nbytes for s in sources if s.spec.key == "x"))
    assert sizes == [1 << 20] * 4


# --- FSDP2 -------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.a = nn.Linear(24, 5, dtype=dtype)
        self.b = nn.Linear(5, 3, dtype=dtype)
        self.norm = nn.BatchNorm1d(3, dtype=dtype)


def _trained(
    mesh: DeviceMesh | None,
    *,
    seed: int,
    dim: int = 0,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """A model and its optimizer with known values, sharded where there is a mesh; moments are of
    single precision.
    """
    torch.manual_seed(seed)
    model = Net(dtype)
    wholes = {name: p.detach().clone() for name, p in model.named_parameters()}
    if mesh is not None:
        parts = mesh.size(mesh.ndim - 1)

        def by(p: torch.Tensor) -> Shard:
            return Shard(dim if p.dim() > 1 and p.shape[dim] % parts == 0 else 0)

        fully_shard(model.a, mesh=mesh, shard_placement_fn=by)
        fully_shard(model, mesh=mesh, shard_placement_fn=by)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for name, p in model.named_parameters():
        # By hand: in one process that plays several ranks no DTensor can compute.
        moments = wholes[name].float() + seed, wholes[name].float() - seed
        if isinstance(p, DTensor):
            how = p.device_mesh, list(p.placements)
            moments = _dtensor(moments[0], *how), _dtensor(moments[1], *how)
        optimizer.state[p] = {
            "step": torch.tensor(float(seed)),
            "exp_avg": moments[0],
            "exp_avg_sq": moments[1],
        }
    return {"model": model, "optim": optimizer}


def _gather(state: Mapping[str, Any], wholes: dict[str, torch.Tensor]) -> None:
    """Add to the wholes what a rank has of them."""
    for name, tensor in _tensors(state).items():
        whole = wholes.setdefault(name, torch.zeros(tensor.shape, dtype=tensor.dtype))
        box: tuple[slice, ...] = ()
        if isinstance(tensor, DTensor):
            start = shard_of(name, tensor).piece.start
            assert not isinstance(start, int)
            sizes = zip(start, local(tensor).shape, strict=True)
            box = tuple(slice(at, at + n) for at, n in sizes)
        whole[box] = local(tensor).detach()


def _tensors(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """All tensors of a state, by name."""
    found = {f"model/{name}": t for name, t in state["model"].state_dict().items()}
    for name, p in state["model"].named_parameters():
        found |= {f"{name}/{k}": v for k, v in state["optim"].state[p].items()}
    return found


def _assert_holds(state: Mapping[str, Any], wholes: Mapping[str, torch.Tensor]) -> None:
    """Every tensor, sharded or not, is what the whole says."""
    found = _tensors(state)
    assert found.keys() == wholes.keys()
    for name, tensor in found.items():
        expected = wholes[name]
        assert tensor.dtype == expected.dtype, name
        if isinstance(tensor, DTensor):
            mesh, placements = tensor.device_mesh, tensor.placements
            expected = local(distribute_tensor(expected, mesh, placements, src_data_rank=None))
        assert torch.equal(local(tensor), expected), name


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("saved", [(1,), (2,), (4,), (2, 2)])
def test_fully_sharded_training_is_restored_in_any_world(saved: tuple[int, ...], dim: int) -> None:
    wholes: dict[str, torch.Tensor] = {}

    def make(rank: int) -> dict[str, Any]:
        live = _trained(_mesh(*saved), seed=3, dim=dim)
        _gather(live, wholes)
        return live

    repository = save(make, _size(saved))
    for mesh in [(1,), (2,), (3,), (4,), (8,), (2, 2)]:
        world = _size(mesh)
        for rank in range(world):
            with played(rank, world), warnings.catch_warnings():
                warnings.simplefilter("ignore", CheckpointWarning)
                target = _trained(_mesh(*mesh), seed=4, dim=1 - dim)
                load(repository, target, rank, world)
                _assert_holds(target, wholes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        alone = _trained(None, seed=4)
        load(repository, alone, 0, 1)
    _assert_holds(alone, wholes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_process_and_sharded_ones_share_keys_and_fresh_optimizers(dtype: torch.dtype) -> None:
    source = _trained(None, seed=3, dtype=dtype)
    repository = save(lambda rank: source, 1)
    for rank in range(2):
        with played(rank, 2), warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)
            target = _trained(_mesh(2), seed=4, dtype=dtype)
            target["optim"] = torch.optim.AdamW(target["model"].parameters(), lr=0.1)
            load(repository, target, rank, 2)
            _assert_holds(target, _tensors(source))
            moments = target["optim"].state[target["model"].a.weight]
            assert isinstance(moments["exp_avg"], DTensor)
            assert moments["exp_avg"].placements == target["model"].a.weight.placements
            assert moments["exp_avg"].dtype == torch.float32
            assert not isinstance(moments["step"], DTensor)


def test_new_memory_like_a_dtensor_is_sharded_alike() -> None:
    for rank in range(2):
        with played(rank, 2):
            tensor = _dtensor(numbers(5, 3), _mesh(2), [Shard(0)])
            made = like(tensor, torch.float64)
            assert isinstance(made, DTensor)
            assert (made.shape, made.stride()) == (tensor.shape, tensor.stride())
            assert (made.placements, made.dtype) == (tensor.placements, torch.float64)
            assert local(made).shape == local(tensor).shape
            assert not made.requires_grad


def test_what_did_not_change_is_collected_again_without_a_look_at_each() -> None:
    with played(0, 2):
        live = _trained(_mesh(2), seed=3)
        state = State(live, rank=0, world=2)
        first, second = state.collect(), state.collect()
        pairs = zip(first.sources[:-1], second.sources[:-1], strict=True)
        assert all(a.spec is b.spec for a, b in pairs if not a.spec.key.startswith("$rng"))
        local(live["model"].a.weight).detach().add_(1)
        found = {s.spec.key: s for s in state.collect().sources}["model/a.weight"]
        assert found.held is live["model"].a.weight
        assert torch.equal(found.array, local(live["model"].a.weight))
