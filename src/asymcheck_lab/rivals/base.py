"""What every compared system answers, and what is said about it."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

RNG = "states of the random number generators"


@dataclass(frozen=True, slots=True)
class Job:
    """What is saved, and where to.

    Attributes:
        model: The live model.
        optimizer: The live optimizer.
        folder: For the system alone; empty at first.
        every: A checkpoint is due at each multiple of this.
        root: Path or URL for the library's own store, which may be held to a rate; empty for
            ``folder``. A system that writes plain files has no use for it.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    folder: Path
    every: int
    root: str = ""


@dataclass
class System:
    """The system that saves nothing, and the calls that all systems answer.

    All calls come from the training thread; the time that ``before_update`` and
    ``after_update`` take is time for which training is blocked.

    Attributes:
        job: What to save.
        durable_s: Step to the ``perf_counter`` time at which its checkpoint was durable.
        skipped: Steps of which no checkpoint was made, as earlier ones were still under way.
    """

    job: Job
    durable_s: dict[int, float] = field(default_factory=dict)
    skipped: set[int] = field(default_factory=set)

    def start(self) -> None:
        """Get ready, before the first step."""

    def before_update(self) -> None:
        """Called between the backward pass and the update; returns when it may change things."""

    def after_update(self, step: int, *, due: bool) -> None:
        """Called after each update; saves when it is ``due``."""

    def drain(self) -> None:
        """Return once every checkpoint so far is durable.

        Raises:
            RunError: One was lost.
        """

    def close(self) -> None:
        """Give back what was taken, after a ``drain``."""

    def checkpoint_bytes(self, count: int) -> int:
        """How much is stored of a checkpoint, on average, after so many and a ``drain``."""
        return stored_bytes(self.job.folder) // count

    def details(self) -> dict[str, Any]:
        """What the system says about itself, for the record."""
        return {}

    def load(self, step: int, into: Job) -> None:
        """Load a checkpoint into another model and optimizer of the same kind."""
        raise NotImplementedError


@dataclass
class Behind(System):
    """What systems share that write behind the training: someone who waits for each checkpoint."""

    _waiter: ThreadPoolExecutor | None = None
    _saves: list[Future[None]] = field(default_factory=list)

    def watch(self, step: int, complete: Callable[[], object]) -> None:
        """Note when a checkpoint is durable, on a thread that does nothing else.

        Args:
            step: Of the checkpoint.
            complete: Returns once it is durable; raises when it was lost.
        """
        if self._waiter is None:
            self._waiter = ThreadPoolExecutor(1, thread_name_prefix="bench-wait")
        self._saves.append(self._waiter.submit(self._note, step, complete))

    def _note(self, step: int, complete: Callable[[], object]) -> None:
        complete()
        self.durable_s[step] = perf_counter()

    def wait_for_last(self) -> None:
        """Return once the newest checkpoint is durable: for systems with one under way."""
        if self._saves:
            self._saves[-1].result()

    def drain(self) -> None:
        """See ``System``."""
        for save in self._saves:
            save.result()

    def close(self) -> None:
        """See ``System``."""
        if self._waiter is not None:
            self._waiter.shutdown()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """A system as the benchmark names it.

    Attributes:
        title: For tables.
        make: Gives the system for a job.
        library: The distribution whose version is recorded.
        omits: What a resumed run needs and this system does not save by itself.
        syncs: How its files become durable.
        adapted: What its adapter does that its documentation does not show; empty for nothing.
        kind: ``none`` saves nothing; ``ours`` is the library as it comes; a ``strategy`` is a
            published method, made anew in the library; a ``rival`` is the real thing.
        is_async: Whether it writes behind the training.
        is_exact: Whether every value comes back bit for bit.
        apart: Whether its library lies in a folder of its own, ``apart()``, which only its runs
            look into: it changes every process that can see it.
        why_unranked: Why it is not to be compared with the others; empty where it is.
        keeps: Only the newest so many of its checkpoints; ``None`` for all.
        parallels: The ways to spread a model that it is measured with.
        why_not_else: Why not with another, in one line.
    """

    title: str
    make: Callable[[Job], System]
    library: str
    omits: str
    syncs: str
    adapted: str = ""
    kind: Literal["none", "ours", "strategy", "rival"] = "rival"
    is_async: bool = True
    is_exact: bool = True
    apart: bool = False
    why_unranked: str = ""
    keeps: int | None = None
    parallels: tuple[str, ...] = ("none",)
    why_not_else: str = "its adapter saves what one process has"

    @property
    def ranked(self) -> bool:
        """Whether it is to be compared with the others."""
        return not self.why_unranked

    def kept(self, made: Iterable[T]) -> list[T]:
        """Those of its checkpoints that are still there, out of all in their order."""
        return list(made)[-(self.keeps or 0) :]

    @property
    def version(self) -> str:
        """Of its library, as installed; empty where it is not."""
        path = [str(apart())] if self.apart else sys.path
        for found in importlib.metadata.distributions(name=self.library, path=path):
            return found.version
        return ""

    def missing(self) -> str | None:
        """One line that says what is not installed, ``None`` where everything is; loads nothing."""
        if self.version:
            return None
        how = "'asymcheck[rivals]'"
        if self.apart:
            how = f"--no-deps --target {apart()} {self.library}"
        return f"{self.library} is not installed: pip install {how}"


def apart() -> Path:
    """The folder of libraries that no other system's run may see, in this environment."""
    return Path(sys.prefix) / "rivals"


def state_of(job: Job) -> dict[str, Any]:
    """The live state dicts of model and optimizer; a tensor that has two names has one here.

    Not every system finds out by itself that tied weights are one tensor.
    """
    return {"model": weights_of(job.model), "optim": job.optimizer.state_dict()}


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The live state dict of a model, each tensor once, by its first name."""
    again = _further_names(model)
    return {name: tensor for name, tensor in model.state_dict().items() if name not in again}


@lru_cache(maxsize=2)  # of a run: the model that is trained, and the one that is loaded into
def _further_names(model: torch.nn.Module) -> frozenset[str]:
    """Names of tensors that have another one before. To look for them takes milliseconds, which at
    each save would be counted as the system's own.
    """
    again = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    again |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    return frozenset(again - {n for n, _ in (*model.named_parameters(), *model.named_buffers())})


def ranks() -> int:
    """How many ranks save together; 1 where there is no process group."""
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_initialized() else 1


def is_engine(model: Any) -> bool:  # noqa: ANN401  DeepSpeed's class is known to it alone
    """Whether DeepSpeed's engine is around the model."""
    return hasattr(model, "zero_optimization_stage")


def join_ranks(folder: Path, rank: int = 0, ranks: int = 1) -> None:
    """Make a process group: of this process alone, for systems that ask for one, or of several.

    Args:
        folder: Of a run's checkpoints; ranks meet in a file beside it.
        rank: This one.
        ranks: How many there are.
    """
    import torch.distributed as dist

    meeting = folder.with_name("rendezvous").resolve().as_uri()
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)


def fsync(path: Path) -> None:
    """Give a file, or the names in a folder, to ``fsync``."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_tree(folder: Path) -> None:
    """Give every file and every name at and below a folder to ``fsync``, and its own name."""
    for top, _, names in os.walk(folder):
        for name in names:
            fsync(Path(top) / name)
        fsync(Path(top))
    fsync(folder.parent)


def stored_bytes(folder: Path) -> int:
    """Bytes of every file below a folder."""
    total = 0
    for top, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += (Path(top) / name).stat().st_size
    return total
