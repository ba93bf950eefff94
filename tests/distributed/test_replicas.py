"""What is equal on all ranks is written once, and each rank writes its share."""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from states import load, numbers, played, save
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from asymcheck.device.state import State
from asymcheck.errors import CheckpointWarning, IncompatibleCheckpoint, StateError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1000, 600)
        self.parts = nn.ModuleList(nn.Linear(30, 30) for _ in range(9))
        self.norm = nn.BatchNorm1d(30)
        self.tied = nn.Linear(600, 1000, bias=False)
        self.tied.weight = self.table.weight


def _trained(seed: int, *, wrap: bool) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for i, p in enumerate(model.parameters()):
        p.grad = numbers(*p.shape, start=seed + i).sin()
    optimizer.step()
    wrapped = DistributedDataParallel(model, init_sync=False) if wrap else model
    return {"model": wrapped, "optim": optimizer}


def _tensors(state: dict[str, Any]) -> list[torch.Tensor]:
    model = state["model"].module if hasattr(state["model"], "module") else state["model"]
    moments = [t for p in model.parameters() for t in state["optim"].state[p].values()]
    return [*model.state_dict().values(), *moments]


def _sources(state: State) -> dict[str, Any]:
    return {s.spec.key: s for s in state.collect().sources if not s.spec.key.startswith("$rng")}


def test_ddp_replicas_are_written_once_balanced_and_restored_in_any_world() -> None:
    written: list[int] = []

    def make(rank: int) -> dict[str, object]:
        live = _trained(3, wrap=True)
        state = State(live, rank=rank, world=3)
        mine = [s.spec for s in _sources(state).values() if s.spec.piece is not None]
        written.append(sum(s.nbytes for s in mine))
        return live

    repository = save(make, 3)
    expected = _trained(3, wrap=False)
    whole = sum(t.nbytes for t in {t.data_ptr(): t for t in _tensors(expected)}.values())
    assert sum(written) == whole
    assert max(written) <= 1.2 * whole / 3
    for world in (1, 2, 3, 4):
        for rank in range(world):
            with played(rank, world), warnings.catch_warnings():
                warnings.simplefilter("ignore", CheckpointWarning)
                target = _trained(4, wrap=True)
                load(repository, target, rank, world)
                for one, other in zip(_tensors(target), _tensors(expected), strict=True):
                    assert torch.equal(one, other)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        alone = _trained(4, wrap=False)
        load(repository, alone, 0, 1)
    assert all(map(torch.equal, _tensors(alone), _tensors(expected)))


def test_buffers_that_rank_0_sends_are_written_by_rank_0_and_others_by_each() -> None:
    for sends in (True, False):
        for rank in range(2):
            with played(rank, 2):
                live = _trained(3, wrap=True)
                live["model"].broadcast_buffers = sends
                found = _sources(State(live, rank=rank, world=2))
                here = "model/norm.running_mean" in found
                assert here == (rank == 0 or not sends)
                assert not here or (found["model/norm.running_mean"].spec.piece is None) != sends


def test_a_declared_item_is_shared_and_one_that_is_not_is_each_ranks_own() -> None:
    items = {"a": {"x": numbers(10)}, "b": {"x": numbers(10)}}
    keys = []
    for rank in range(2):
        with played(rank, 2):
            state = State(items, rank=rank, world=2, replicated=("a",))
            keys.append(set(_sources(state)))
            assert state.shared_geometry() == {"a/x": ["float32", [10]]}
            assert state.shared_geometry() is state.shared_geometry()
            assert set(state.replica_samples()) == {"a", "a/x"}
    assert keys[0] ^ keys[1] == {"a/x"}
    with pytest.raises(StateError, match="'c': said to be replicated"):
        State(items, rank=0, world=2, replicated=("c",))


def test_samples_tell_replicas_apart_that_differ() -> None:
    with played(0, 2):
        live: dict[str, Any] = {"a": {"x": numbers(10), "n": 1}}
        state = State(live, rank=0, world=2, replicated=("a",))
        before = dict(state.replica_samples())
        assert state.replica_samples() == before
        live["a"]["x"][9] = 0
        changed = state.replica_samples()
        assert (changed["a"], changed["a/x"] != before["a/x"]) == (before["a"], True)
        live["a"]["n"] = 2
        assert state.replica_samples()["a"] != before["a"]


# --- when the world changes ----------------------------------------------------


class Loader:
    """A data loader that can be divided anew."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.states: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"at": torch.tensor(self.at)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = int(state["at"])


class Divisible(Loader):
    def resplit(self, states: list[dict[str, Any]], rank: int, world: int) -> None:
        self.states = [int(s["at"]) for s in states] + [rank, world]


def _own(rank: int, kind: type[Loader] = Loader) -> dict[str, Any]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], 0.5**rank)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    schedule.step()
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)
    return {"data": kind(10 + rank), "optim": optimizer, "schedule": schedule}


def _drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(()))


def test_as_many_ranks_as_saved_each_get_their_own_back() -> None:
    repository = save(_own, 2)
    for rank in range(2):
        _own(rank)
        expected = _drawn()
        with played(rank, 2):
            live = _own(5)
            report = load(repository, live, rank, 2)
        assert (live["data"].at, _drawn()) == (10 + rank, expected)
        assert report.world_change == ""


def test_another_world_continues_those_of_saved_ranks_and_seeds_further_ones() -> None:
    repository = save(_own, 2)
    drawn = []
    for _ in range(2):
        for rank in range(4):
            with played(rank, 4):
                live = _own(5)
                with pytest.warns(CheckpointWarning, match="saved by 2 ranks and restored by 4"):
                    report = load(repository, live, rank, 4)
            assert live["data"].at == 10 + rank % 2
            assert "modulo 2" in report.world_change
            drawn.append(_drawn())
    assert drawn[:4] == drawn[4:]
    assert all(len({d[i] for d in drawn[:4]}) == 4 for i in range(3))
    _own(1)
    assert drawn[1] == _drawn()


def test_an_item_that_can_be_divided_gets_the_states_of_all_ranks() -> None:
    repository = save(lambda rank: _own(rank, Divisible), 3)
    with played(1, 2):
        live = _own(5, Divisible)
        with pytest.warns(CheckpointWarning, match="'data' got the states of all 3"):
            load(repository, live, 1, 2)
    assert live["data"].states == [10, 11, 12, 1, 2]
    with played(1, 3):
        live = _own(5, Divisible)
        load(repository, live, 1, 3)
    assert (live["data"].states, live["data"].at) == ([], 11)


def test_a_restart_keeps_generators_and_data_as_they_are_but_no_schedule() -> None:
    repository = save(_own, 2)
    with played(0, 3):
        live = _own(5)
        torch.manual_seed(77)
        random.seed(77)
        np.random.seed(77)
        with pytest.warns(CheckpointWarning, match="'data' was not restored"):
            load(repository, live, 0, 3, on_world_change="restart")
        found = _drawn()
        torch.manual_seed(77)
        random.seed(77)
        np.random.seed(77)
        assert found == _drawn()
    assert live["data"].at == 15
    assert live["schedule"].base_lrs == [1.0]
    assert live["optim"].param_groups[0]["lr"] == pytest.approx(0.1)


def test_another_world_is_refused_where_that_is_asked_for() -> None:
    repository = save(_own, 2)
    with played(0, 3), pytest.raises(IncompatibleCheckpoint, match="saved by 2 ranks, 3 restore"):
        load(repository, _own(5), 0, 3, on_world_change="error")


def test_ranks_come_to_the_same_end_when_one_of_them_cannot_read() -> None:
    repository = save(_own, 2)

    def told(what: str, mine: Any) -> list[Any]:
        other = ["wrong", "it has no such model", False]
        return [mine, other if what.startswith("planning") else mine]

    with played(0, 2):
        live = _own(5)
        with pytest.raises(IncompatibleCheckpoint, match="step 1: rank 1: it has no such model"):
            load(repository, live, 0, 2, exchange=told)
    assert live["data"].at == 15
