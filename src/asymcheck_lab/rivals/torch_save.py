"""``torch.save``, made durable."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from asymcheck_lab.rivals.base import Job, System, fsync


@dataclass
class TorchSave(System):
    """``torch.save`` into a temporary file, ``fsync``, rename, ``fsync`` of the folder."""

    def after_update(self, step: int, *, due: bool) -> None:
        """See ``System``."""
        if not due:
            return
        import torch

        path = self._path(step)
        temp = path.with_suffix(".tmp")
        state = {
            "model": self.job.model.state_dict(),
            "optim": self.job.optimizer.state_dict(),
        }
        torch.save(state, temp)
        fsync(temp)
        temp.rename(path)
        fsync(path.parent)
        self.durable_s[step] = perf_counter()

    def load(self, step: int, into: Job) -> None:
        """See ``System``."""
        import torch

        state = torch.load(self._path(step), weights_only=True)
        into.model.load_state_dict(state["model"])
        into.optimizer.load_state_dict(state["optim"])

    def _path(self, step: int) -> Path:
        return self.job.folder / f"step-{step:08d}.pt"
