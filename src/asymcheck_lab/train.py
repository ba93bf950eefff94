"""One recipe: a language model on real text, checkpointed, resumed without being asked."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from asymcheck import Checkpointer
from asymcheck.recovery import RestoreReport
from asymcheck_lab.data import VOCABULARY, BatchLoader, load_text
from asymcheck_lab.errors import RunError, UsageError
from asymcheck_lab.fingerprint import fingerprint
from asymcheck_lab.models import Family, Size, find
from asymcheck_lab.record import Ledger, LogWriter, Result, StepRecord

_WEIGHT_DECAY = 0.1
_CLIP_NORM = 1.0
_CLEAN_BATCHES = 0.25
_BYTE_NOISE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """What to train, and where its traces go.

    Attributes:
        model: Name of a family.
        size: Name of one of its sizes.
        data: A UTF-8 file, ``None`` for the text that ships with Python.
        steps: Updates in all, those before a restart included.
        root: Where checkpoints go, a path or URL; ``None`` for a run without.
        every: Steps between two checkpoints.
        keep_last: Checkpoints to keep.
        strategy: Name of the library's strategy.
        log: Gets a line for each step.
        trace: Gets a line for each durable checkpoint; ``None`` for nowhere.
        result: Gets the ``Result`` at the end; ``None`` for nowhere.
        seed: For weights, dropout, noise and the order of the data.
        threads: Threads of torch's kernels. Sums are split among them, so another number
            gives other bits.
    """

    model: str = "gpt2"
    size: str = "demo"
    data: Path | None = None
    steps: int = 200
    root: str | None = None
    every: int = 20
    keep_last: int | None = 3
    strategy: str = "asymcheck"
    log: Path
    trace: Path | None = None
    result: Path | None = None
    seed: int = 0
    threads: int = 2

    def __post_init__(self) -> None:
        for name, lowest in (("steps", 1), ("every", 1), ("threads", 1), ("seed", 0)):
            value = getattr(self, name)
            if value < lowest:
                raise UsageError(f"{name}: expected at least {lowest}, found {value}")


class Observer(Protocol):
    """Is told how a training goes, on the training thread."""

    def started(self, report: RestoreReport) -> None:
        """The state is ready; ``report`` says what it was resumed from."""
        ...

    def stepped(self, record: StepRecord) -> None:
        """An update is done and logged."""
        ...


class Silent:
    """The observer that does nothing."""

    def started(self, report: RestoreReport) -> None:
        """See ``Observer``."""

    def stepped(self, record: StepRecord) -> None:
        """See ``Observer``."""


def train(options: TrainOptions, observer: Observer | None = None) -> Result:
    """Train until ``options.steps``, from the newest whole checkpoint or from the start; blocks.

    Raises:
        LabError: The data or an option cannot be used, or the loss is no number.
        CheckpointError: The library refused or lost something.
    """
    family, size = find(options.model, options.size)
    loader = BatchLoader(
        load_text(options.data), context=size.context, batch=size.batch, seed=options.seed
    )
    with _deterministic(options.threads), LogWriter(options.log) as log:
        job = _Job(options, family, size, loader)
        result = job.run(log, observer or Silent())
    if options.result is not None:
        result.write(options.result)
    return result


class _Job:
    """The live objects of one training, and its loop."""

    def __init__(
        self, options: TrainOptions, family: Family, size: Size, loader: BatchLoader
    ) -> None:
        seed_everything(options.seed)
        self._options = options
        self._family = family
        self._loader = loader
        self._model = family.build(size)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=size.learning_rate, weight_decay=_WEIGHT_DECAY
        )
        # Constant after the warm-up: a run that is made longer goes on as if it always was.
        self._scheduler = torch.optim.lr_scheduler.LinearLR(
            self._optimizer, start_factor=1 / size.warmup_steps, total_iters=size.warmup_steps
        )
        self._ledger = Ledger()

    def run(self, log: LogWriter, observer: Observer) -> Result:
        checkpointer = self._checkpointer()
        with nullcontext() if checkpointer is None else checkpointer:
            start = 0 if checkpointer is None else checkpointer.restore()
            report = RestoreReport(step=0) if checkpointer is None else checkpointer.report
            if start > self._options.steps:
                raise UsageError(
                    f"steps: expected at least {start}, the step of the newest checkpoint in "
                    f"{self._options.root}, found {self._options.steps}"
                )
            observer.started(report)
            begin_s = perf_counter()
            for step in range(start + 1, self._options.steps + 1):
                record = self._step(step, start, checkpointer)
                log.write(record)
                observer.stepped(record)
            loop_s = perf_counter() - begin_s
            if checkpointer is not None:
                if start < self._options.steps and self._options.steps % self._options.every:
                    checkpointer.save(self._options.steps)
                checkpointer.close()
            drain_s = perf_counter() - begin_s - loop_s
        return Result(
            steps=self._options.steps,
            resumed_from=start,
            restore_s=self._ledger.restore_s(),
            restored_bytes=report.restored_bytes,
            skipped=report.skipped,
            loop_s=loop_s,
            drain_s=drain_s,
            checkpoints=tuple(self._ledger.checkpoints()),
            fingerprint=fingerprint(
                self._model,
                self._optimizer,
                {"sched": self._scheduler.state_dict(), "data": self._loader.state_dict()},
            ),
        )

    def _checkpointer(self) -> Checkpointer | None:
        if self._options.root is None:
            return None
        return Checkpointer(
            self._options.root,
            state={
                "model": self._model,
                "optim": self._optimizer,
                "sched": self._scheduler,
                "data": self._loader,
            },
            strategy=self._options.strategy,
            every_steps=self._options.every,
            keep_last=self._options.keep_last,
            sink=self._ledger,
            trace=self._options.trace,
        )

    def _step(self, step: int, start: int, checkpointer: Checkpointer | None) -> StepRecord:
        begin_s = perf_counter()
        inputs, labels = vary(next(self._loader))
        loss = self._family.loss(self._model, inputs, labels)
        value = loss.item()
        if not math.isfinite(value):
            raise RunError(f"step {step}: the loss is {value}; nothing was saved from it")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), _CLIP_NORM)
        self._optimizer.step()
        self._scheduler.step()
        self._optimizer.zero_grad()
        if checkpointer is not None:
            checkpointer.step(step, metrics={"loss": value})
        return StepRecord(step, value, perf_counter() - begin_s, start)


def vary(batch: npt.NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch as the model sees it, and what it should predict.

    One input byte in a hundred is replaced, as NumPy's generator says, but for every fourth
    batch or so, which Python's leaves clean. With dropout from torch's generator, each of the
    three decides over the loss: one that is not restored shows at once. Every step does the
    same amount of work, so that times can be compared.

    Args:
        batch: ``[batch, context]`` tokens.
    """
    inputs = batch
    if random.random() >= _CLEAN_BATCHES:
        noise = np.random.random(batch.shape) < _BYTE_NOISE
        inputs = np.where(noise, np.random.randint(0, VOCABULARY, batch.shape), batch)
    return torch.from_numpy(inputs), torch.from_numpy(batch)


def seed_everything(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextmanager
def _deterministic(threads: int) -> Iterator[None]:
    before: tuple[Any, ...] = (
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.use_deterministic_algorithms(before[1], warn_only=before[2])
