"""What every compared system answers, and what is said about it."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

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
    """

    job: Job
    durable_s: dict[int, float] = field(default_factory=dict)

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

    def details(self) -> dict[str, Any]:
        """What the system says about itself, for the record."""
        return {}

    def load(self, step: int, into: Job) -> None:
        """Load a checkpoint into another model and optimizer of the same kind."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """A system as the benchmark names it.

    Attributes:
        title: For tables.
        make: Gives the system for a job.
        library: The distribution whose version is recorded.
        omits: What a resumed run needs and this system does not save by itself.
        syncs: How its files become durable.
        kind: ``none`` saves nothing; ``ours`` is the library as it comes; a ``strategy`` is a
            published method, made anew in the library; a ``rival`` is the real thing.
        is_async: Whether it writes behind the training.
        is_exact: Whether every value comes back bit for bit.
        why_unranked: Why it is not to be compared with the others; empty where it is.
    """

    title: str
    make: Callable[[Job], System]
    library: str
    omits: str
    syncs: str
    kind: Literal["none", "ours", "strategy", "rival"] = "rival"
    is_async: bool = True
    is_exact: bool = True
    why_unranked: str = ""

    @property
    def ranked(self) -> bool:
        """Whether it is to be compared with the others."""
        return not self.why_unranked

    @property
    def version(self) -> str:
        """Of its library, as installed; empty where it is not."""
        try:
            return importlib.metadata.version(self.library)
        except importlib.metadata.PackageNotFoundError:
            return ""

    def missing(self) -> str | None:
        """One line that says what is not installed, ``None`` where everything is; loads nothing."""
        if self.version:
            return None
        return f"{self.library} is not installed: pip install 'asymcheck[rivals]'"


def state_of(job: Job) -> dict[str, Any]:
    """The live state dicts of model and optimizer; a tensor that has two names has one here.

    Not every system finds out by itself that tied weights are one tensor.
    """
    return {
        "model": without_aliases(job.model.state_dict()),
        "optim": job.optimizer.state_dict(),
    }


def without_aliases(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each tensor once, by its first name."""
    found: dict[tuple[int, int], str] = {}
    return {
        name: tensor
        for name, tensor in state.items()
        if found.setdefault((tensor.data_ptr(), tensor.nbytes), name) == name
    }


def fsync(path: Path) -> None:
    """Give a file, or the names in a folder, to ``fsync``."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def stored_bytes(folder: Path) -> int:
    """Bytes of every file below a folder."""
    total = 0
    for top, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += (Path(top) / name).stat().st_size
    return total
