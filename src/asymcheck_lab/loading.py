"""Batches of samples in a new shuffled order each epoch, and a position that is two numbers.

The order of an epoch is a pure function of seed and epoch, and what is random in a sample is
one of seed, epoch and the sample's number. So nothing has to be replayed to resume, wherever
a run was cut off, and any number of workers gives the same batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from asymcheck_lab.errors import DataError, LabError

Sample = dict[str, npt.NDArray[Any]]
"""What a model is called with, by argument; in a batch, with one more dimension in front."""

_AHEAD = 2
_HELD_EVERY = 20


class Samples(Protocol):
    """Data as numbered samples of one shape.

    Attributes:
        name: Where it is from; for messages.
        sha256: Of what decides over the samples; a resumed run must have the same.
    """

    name: str
    sha256: str

    def __len__(self) -> int:
        """How many there are."""
        ...

    def sample(self, index: int, rng: np.random.Generator) -> Sample:
        """Sample ``index``; what is random in it comes out of ``rng``. Called by any thread."""
        ...


class Part:
    """Some of the samples of another.

    Args:
        whole: All of them.
        chosen: Numbers of those that belong to this part.
    """

    def __init__(self, whole: Samples, chosen: npt.NDArray[np.int64]) -> None:
        self.name = whole.name
        self.sha256 = whole.sha256
        self._whole = whole
        self._chosen = chosen

    def __len__(self) -> int:
        return len(self._chosen)

    def sample(self, index: int, rng: np.random.Generator) -> Sample:
        """See ``Samples``."""
        return self._whole.sample(int(self._chosen[index]), rng)


def held_out(samples: Samples) -> tuple[Part, Part]:
    """Samples to train on, and every twentieth for evaluation."""
    numbers = np.arange(len(samples))
    held = numbers % _HELD_EVERY == _HELD_EVERY - 1
    return Part(samples, numbers[~held]), Part(samples, numbers[held])


class Loader:
    """Batches of samples, without end.

    What is too little for a whole batch of each rank at the end of an epoch is left out of that
    epoch. It takes nothing from any global generator. One thread may use it.

    Ranks take turns: of each ``ranks * batch`` samples of an epoch's order, the first ``batch``
    are those of rank 0. The position counts what all ranks were given, so any number of them can
    go on from it, and none of an epoch's samples comes twice.

    Args:
        samples: What to read.
        batch: Samples of a batch.
        seed: Chooses orders and what is random in samples, from 0 on; the same on each rank.
        workers: Threads that make batches ahead; 0 for none. They end with ``close``.
        rank: Whose batches.
        ranks: How many share the samples.

    Raises:
        DataError: There are too few samples for one batch of each rank.
    """

    def __init__(
        self,
        samples: Samples,
        *,
        batch: int,
        seed: int,
        workers: int = 0,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        if len(samples) < batch * ranks:
            each = f" of each of {ranks} ranks" if ranks > 1 else ""
            raise DataError(
                samples.name,
                expected=f"at least {batch * ranks} samples, for one batch{each}",
                found=f"{len(samples)}",
            )
        self._samples = samples
        self._batch = batch
        self._begin = rank * batch
        self._turn = ranks * batch
        self._seed = seed
        self._epoch = 0
        self._position = 0
        self._orders: dict[int, npt.NDArray[np.int64]] = {}
        self._pool = ThreadPoolExecutor(workers, "asymlab-data") if workers else None
        self._ahead = _AHEAD * workers
        self._made: deque[tuple[int, int, Future[Sample]]] = deque()

    def __iter__(self) -> Iterator[Sample]:
        return self

    def __next__(self) -> Sample:
        """The next batch; the caller owns it. Blocks until it is made."""
        if self._pool is None:
            epoch, end = self._after(self._epoch, self._position)
            made = self._make(epoch, end, self._order(epoch))
        else:
            while len(self._made) <= self._ahead:
                last = self._made[-1][:2] if self._made else (self._epoch, self._position)
                epoch, end = self._after(*last)
                order = self._order(epoch)
                future = self._pool.submit(self._make, epoch, end, order)
                self._made.append((epoch, end, future))
            epoch, end, future = self._made[0]
            made = future.result()  # what failed stays the next one, as without workers
            self._made.popleft()
        self._epoch, self._position = epoch, end
        return made

    def close(self) -> None:
        """End the workers; blocks until the batches in work are made."""
        self._forget()
        if self._pool is not None:
            self._pool.shutdown()

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is: what the next batch depends on."""
        return {
            "seed": self._seed,
            "epoch": self._epoch,
            "position": self._position,
            "samples": len(self._samples),
            "data": self._samples.sha256,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go where ``state`` says; the seed is taken from there too.

        Raises:
            LabError: It was saved with other data; nothing was changed.
        """
        here = self.state_dict()
        for key, what in (("data", "the data with sha256"), ("samples", "samples in number")):
            if state[key] != here[key]:
                raise LabError(
                    f"{self._samples.name}: this run was started with {what} {state[key]}, found "
                    f"{here[key]}: resume with the same data, or start a new run"
                )
        self._forget()
        self._seed = int(state["seed"])
        self._epoch = int(state["epoch"])
        self._position = int(state["position"])
        self._orders = {}

    def _forget(self) -> None:
        while self._made:
            self._made.pop()[2].cancel()

    def _after(self, epoch: int, position: int) -> tuple[int, int]:
        """Epoch of the turn that follows, and its end."""
        if position + self._turn > len(self._samples):
            return epoch + 1, self._turn
        return epoch, position + self._turn

    def _order(self, epoch: int) -> npt.NDArray[np.int64]:
        if epoch not in self._orders:
            self._orders = {e: o for e, o in self._orders.items() if e >= epoch - 1}
            order = np.random.default_rng([self._seed, epoch]).permutation(len(self._samples))
            self._orders[epoch] = order.astype(np.int64, copy=False)
        return self._orders[epoch]

    def _make(self, epoch: int, end: int, order: npt.NDArray[np.int64]) -> Sample:
        begin = end - self._turn + self._begin
        numbers = order[begin : begin + self._batch].tolist()
        made = [self._one(epoch, number) for number in numbers]
        return {key: np.stack([sample[key] for sample in made]) for key in made[0]}

    def _one(self, epoch: int, number: int) -> Sample:
        return self._samples.sample(number, np.random.default_rng([self._seed, epoch, number]))


def in_order(samples: Samples, *, batch: int, most: int, seed: int) -> Iterator[Sample]:
    """The first ``most`` whole batches, always the same; a short last one is left out."""
    for begin in range(0, min(len(samples) - batch + 1, most * batch), batch):
        made = [
            samples.sample(number, np.random.default_rng([seed, number]))
            for number in range(begin, begin + batch)
        ]
        yield {key: np.stack([sample[key] for sample in made]) for key in made[0]}
