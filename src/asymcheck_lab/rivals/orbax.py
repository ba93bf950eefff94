"""Orbax, the checkpoint library of JAX, on the same memory as NumPy arrays."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from asymcheck_lab.rivals.base import Behind, Job, fsync_tree, state_of
from asymcheck_lab.rivals.safetensors import load_split, split


@dataclass
class Orbax(Behind):
    """``StandardCheckpointer``, which is asynchronous; options of the optimizer go as JSON."""

    _checkpointer: Any = None

    def start(self) -> None:
        """See ``System``."""
        import orbax.checkpoint as ocp

        self._checkpointer = ocp.StandardCheckpointer()

    def after_update(self, step: int, *, due: bool) -> None:
        """See ``System``."""
        if not due:
            return
        tensors, rest = split(state_of(self.job))
        arrays = {name: tensor.detach().numpy() for name, tensor in tensors.items()}
        path = self._path(step)
        self._checkpointer.save(path.resolve(), arrays, custom_metadata=rest)
        self.watch(step, partial(self._complete, path))

    def _complete(self, path: Path) -> None:
        self._checkpointer.wait_until_finished()
        fsync_tree(path)

    def close(self) -> None:
        """See ``System``."""
        super().close()
        self._checkpointer.close()

    def load(self, step: int, into: Job) -> None:
        """See ``System``."""
        import torch

        path = self._path(step).resolve()
        arrays = self._checkpointer.restore(path)
        tensors = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
        load_split(tensors, self._checkpointer.metadata(path).custom_metadata, into)

    def _path(self, step: int) -> Path:
        return self.job.folder / f"step-{step:08d}"
