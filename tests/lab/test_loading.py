"""The loader: each sample once, the same with any workers, resumed without replay."""

from __future__ import annotations

import json
from itertools import islice, pairwise

import numpy as np
import pytest

import asymcheck_lab.loading
from asymcheck_lab.errors import DataError, LabError
from asymcheck_lab.loading import Loader, Part, held_out, in_order


class Numbers:
    """Sample ``n`` is ``n`` and something random; counts how many were read."""

    name = "numbers"

    def __init__(self, count: int, sha256: str = "of numbers", bad: int = -1) -> None:
        self.sha256, self.read = sha256, 0
        self._count, self._bad = count, bad

    def __len__(self) -> int:
        return self._count

    def sample(self, index: int, rng: np.random.Generator) -> dict:
        self.read += 1
        if index == self._bad:
            raise DataError("file", expected="a number", found="bad")
        return {"n": np.array(index), "random": rng.random(2)}


def plain(batch: dict) -> dict:
    return {key: value.tolist() for key, value in batch.items()}


def take(loader: Loader, count: int) -> list[dict]:
    return [plain(batch) for batch in islice(loader, count)]


def test_an_epoch_has_each_sample_once_and_the_next_one_another_order():
    epochs = [
        [n for batch in take(loader, 5) for n in batch["n"]]
        for loader in [Loader(Numbers(10), batch=2, seed=3)]
        for _ in range(2)
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(10))
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("workers", [0, 3])
@pytest.mark.parametrize("cuts", [(1,), (5,), (6,), (3, 4), (2, 7, 8, 16)])
def test_each_sample_comes_once_per_epoch_however_often_a_run_is_cut_and_resumed(
    workers: int, cuts: tuple[int, ...]
):
    seen: list[int] = []
    state = None
    for begin, end in pairwise([0, *cuts, 18]):
        loader = Loader(Numbers(12), batch=2, seed=3, workers=workers)
        if state is not None:
            loader.load_state_dict(state)
        seen += [n for batch in take(loader, end - begin) for n in batch["n"]]
        state = json.loads(json.dumps(loader.state_dict()))
        take(loader, 2)  # trained on and lost: the crash comes after the checkpoint
        loader.close()
    epochs = [seen[i : i + 12] for i in (0, 12, 24)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(12))] * 3


@pytest.mark.parametrize("workers", [1, 3])
def test_any_number_of_workers_gives_the_same_batches(workers: int):
    threaded = Loader(Numbers(11), batch=3, seed=1, workers=workers)
    assert take(threaded, 20) == take(Loader(Numbers(11), batch=3, seed=1), 20)
    threaded.close()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("done", [0, 1, 3, 4, 9])
def test_a_resumed_loader_goes_on_with_the_batch_that_comes_next(workers: int, done: int):
    first = Loader(Numbers(11), batch=3, seed=1, workers=workers)
    take(first, done)
    state = json.loads(json.dumps(first.state_dict()))
    expected = take(first, 8)
    second = Loader(Numbers(11), batch=3, seed=7, workers=workers)
    take(second, 2)  # what it has read ahead is of no use
    second.load_state_dict(state)
    assert take(second, 8) == expected
    first.close()
    second.close()


def test_resuming_at_sample_900_000_of_a_million_reads_nothing_again(
    monkeypatch: pytest.MonkeyPatch,
):
    samples = Numbers(1_000_000)
    loader = Loader(samples, batch=8, seed=0)
    state = {**loader.state_dict(), "epoch": 3, "position": 900_000}
    seeds = []
    make = np.random.default_rng
    monkeypatch.setattr(
        asymcheck_lab.loading.np.random, "default_rng", lambda s: seeds.append(s) or make(s)
    )
    loader.load_state_dict(state)
    batch = next(loader)
    assert samples.read == 8
    assert [s for s in seeds if len(s) == 2] == [[0, 3]], "one order is made, that of the epoch"
    order = make([0, 3]).permutation(1_000_000)
    assert batch["n"].tolist() == order[900_000:900_008].tolist()
    assert loader.state_dict()["position"] == 900_008


def test_what_goes_wrong_in_a_worker_is_raised_where_the_batch_is_asked_for():
    loader = Loader(Numbers(4, bad=2), batch=4, seed=0, workers=2)
    with pytest.raises(DataError, match="file: expected a number, found bad"):
        next(loader)
    loader.close()


def test_other_data_is_refused_and_changes_nothing():
    loader = Loader(Numbers(9), batch=2, seed=0)
    take(loader, 2)
    before = loader.state_dict()
    for other in (Numbers(9, "of others"), Numbers(8)):
        state = Loader(other, batch=2, seed=5).state_dict()
        with pytest.raises(LabError, match="numbers: this run was started with"):
            loader.load_state_dict(state)
    assert loader.state_dict() == before


def test_too_few_samples_for_a_batch_are_refused():
    with pytest.raises(DataError, match="numbers: expected at least 4 samples, for one batch"):
        Loader(Numbers(3), batch=4, seed=0)


def test_what_is_held_out_is_never_trained_on_and_read_in_order():
    train, held = held_out(Numbers(100))
    assert (len(train), len(held)) == (95, 5)
    seen = {n for batch in take(Loader(train, batch=5, seed=0), 19) for n in batch["n"]}
    evaluated = [n for b in in_order(held, batch=2, most=9, seed=0) for n in b["n"].tolist()]
    assert evaluated == [19, 39, 59, 79]
    assert not seen & {19, 39, 59, 79, 99}
    assert list(in_order(Part(held, np.arange(1)), batch=2, most=9, seed=0)) == []
