"""A training: checkpointed, resumed without being asked, logged step by step."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import torch

from asymcheck import Checkpointer
from asymcheck.errors import nearest
from asymcheck.recovery import RestoreReport
from asymcheck_lab.errors import RunError, UsageError
from asymcheck_lab.fingerprint import fingerprint
from asymcheck_lab.parallel import find_parallel
from asymcheck_lab.presets import PRECISIONS, Preset, load_preset, task_of
from asymcheck_lab.recipe import Recipe, check_precision
from asymcheck_lab.recipe import seed_everything as seed_everything
from asymcheck_lab.recipe import vary as vary
from asymcheck_lab.record import Ledger, LogWriter, Result, StepRecord
from asymcheck_lab.sizes import refuse_what_cannot_fit
from asymcheck_lab.tasks import open_data
from asymcheck_lab.world import World, join


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """What to train, and where its traces go.

    Attributes:
        model: Name of a model.
        size: Name of one of its sizes, or the path of a preset.
        task: One of the model's tasks, ``None`` for its first.
        data: What the task reads, ``None`` for what is embedded; see ``open_data``.
        pretrained: A local folder of weights and tokenizer, ``None`` for random weights.
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
        precision: One of ``PRECISIONS``, ``None`` for the preset's.
        accumulate: Batches of an update, ``None`` for the preset's.
        recompute: Whether to compute activations again, ``None`` for the preset's.
        workers: Threads that make batches ahead.
        evaluate_every: Steps between two evaluations, 0 for one at the end.
        device: Where the model is trained: ``cpu`` or ``cuda``, with several ranks the device of
            each rank's number on its host.
        parallel: How it is spread over the ranks that a launcher started, one of ``PARALLELS``.
    """

    model: str = "gpt2"
    size: str = "demo"
    task: str | None = None
    data: Path | None = None
    pretrained: Path | None = None
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
    precision: str | None = None
    accumulate: int | None = None
    recompute: bool | None = None
    workers: int = 0
    evaluate_every: int = 0
    device: str = "cpu"
    parallel: str = "none"

    def __post_init__(self) -> None:
        for name, lowest in (
            ("steps", 1),
            ("every", 1),
            ("threads", 1),
            ("seed", 0),
            ("accumulate", 1),
            ("workers", 0),
            ("evaluate_every", 0),
        ):
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise UsageError(f"{name}: expected at least {lowest}, found {value}")

    def preset(self) -> Preset:
        """The preset, with what these options change in it.

        Raises:
            LabError: There is none, or a change is wrong.
        """
        preset = load_preset(self.model, self.size)
        wanted = {
            "precision": self.precision,
            "accumulate": self.accumulate,
            "recompute": self.recompute,
        }
        changes: dict[str, Any] = {k: v for k, v in wanted.items() if v is not None}
        preset = replace(preset, recipe=replace(preset.recipe, **changes))
        if preset.recipe.precision not in PRECISIONS:
            raise UsageError(
                f"precision: expected one of {list(PRECISIONS)}, found "
                f"{preset.recipe.precision!r}{nearest(preset.recipe.precision, PRECISIONS)}"
            )
        return preset


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

    With several ranks each of them calls this. Losses are means over the ranks; rank 0 alone
    writes log, trace and result, and ``observer`` is told on each.

    Raises:
        LabError: The data or an option cannot be used, or the loss is no number.
        CheckpointError: The library refused or lost something.
    """
    preset, task = options.preset(), task_of(options.model, options.task)
    parallel = find_parallel(options.parallel)
    check_precision(preset.recipe.precision, options.device, masters=parallel.masters)
    with join(options.parallel, options.device) as world:
        refuse_what_cannot_fit(
            preset,
            task,
            checkpoints=options.root is not None,
            device=world.device,
            pretrained=options.pretrained,
            parallel=parallel,
            world=world.size,
            local=world.local_size,
        )
        data = open_data(preset, task, options.data, pretrained=options.pretrained)
        with _deterministic(options), _log_of(options, world) as log:
            seed_everything(options.seed)
            recipe = Recipe(
                preset,
                task,
                data,
                seed=options.seed,
                workers=options.workers,
                pretrained=options.pretrained,
                parallel=options.parallel,
                world=world,
            )
            try:
                result = _Job(options, recipe, world).run(log, observer or Silent())
            finally:
                recipe.close()
    if options.result is not None and world.rank == 0:
        result.write(options.result)
    return result


def _log_of(options: TrainOptions, world: World) -> AbstractContextManager[LogWriter | None]:
    return LogWriter(options.log) if world.rank == 0 else nullcontext()


class _Job:
    """The live objects of one training, and its loop."""

    def __init__(self, options: TrainOptions, recipe: Recipe, world: World) -> None:
        self._options = options
        self._recipe = recipe
        self._world = world
        self._ledger = Ledger()

    def run(self, log: LogWriter | None, observer: Observer) -> Result:
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
                if log is not None:
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
            fingerprint=self._fingerprint(),
            scores=self._recipe.evaluate(),
        )

    def _fingerprint(self) -> dict[str, str]:
        """Of what this rank has; of several, what each of them has, by rank."""
        recipe = self._recipe
        each = self._world.gather(fingerprint(recipe.bare, recipe.optimizer, recipe.values()))
        if len(each) == 1:
            return dict(each[0])
        return {
            f"rank{n}/{key}": value for n, mine in enumerate(each) for key, value in mine.items()
        }

    def _checkpointer(self) -> Checkpointer | None:
        if self._options.root is None:
            return None
        return Checkpointer(
            self._options.root,
            state=self._recipe.state(),
            strategy=self._options.strategy,
            every_steps=self._options.every,
            keep_last=self._options.keep_last,
            sink=self._ledger,
            trace=self._options.trace if self._world.rank == 0 else None,
        )

    def _step(self, step: int, start: int, checkpointer: Checkpointer | None) -> StepRecord:
        begin_s = perf_counter()
        value = self._recipe.forward()
        if not math.isfinite(value):
            raise RunError(f"step {step}: the loss is {value}; nothing was saved from it")
        try:
            self._recipe.update()
        except RunError as bad:
            raise RunError(f"step {step}: {bad}") from bad
        if checkpointer is not None:
            checkpointer.step(step, metrics={"loss": value})
        seconds, due = perf_counter() - begin_s, self._options.evaluate_every
        scores = self._recipe.evaluate() if due and step % due == 0 else {}
        return StepRecord(step, value, seconds, start, scores)


@contextmanager
def _deterministic(options: TrainOptions) -> Iterator[None]:
    before: tuple[Any, ...] = (
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    if options.device != "cpu":  # what cuBLAS wants before it promises the same bits
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(options.threads)
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.use_deterministic_algorithms(before[1], warn_only=before[2])
