"""Lightning's ``AsyncCheckpointIO`` around its ``torch.save``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from asymcheck_lab.rivals.base import Job, System, fsync, state_of


@dataclass
class Lightning(System):
    """The plugin alone, with the state that a ``Trainer`` hands to it; no ``Trainer``."""

    _plugin: Any = None

    def start(self) -> None:
        """See ``System``."""
        from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
        from lightning.pytorch.plugins.io import AsyncCheckpointIO

        durable_s = self.durable_s

        class Durable(TorchCheckpointIO):  # type: ignore[misc]  # untyped where absent
            """What it wraps, and then ``fsync``; on the plugin's thread."""

            def save_checkpoint(
                self,
                checkpoint: dict[str, Any],
                path: Any,  # noqa: ANN401  as it is there
                storage_options: Any = None,  # noqa: ANN401
            ) -> None:
                super().save_checkpoint(checkpoint, path, storage_options)
                fsync(Path(path))
                fsync(Path(path).parent)
                durable_s[checkpoint["global_step"]] = perf_counter()

        self._plugin = AsyncCheckpointIO(Durable())

    def after_update(self, step: int, *, due: bool) -> None:
        """See ``System``."""
        if due:
            state = {"global_step": step, **state_of(self.job)}
            self._plugin.save_checkpoint(state, self._path(step))

    def drain(self) -> None:
        """See ``System``."""
        self._plugin.teardown()  # waits; the next save begins anew

    def load(self, step: int, into: Job) -> None:
        """See ``System``."""
        state = self._plugin.load_checkpoint(self._path(step), weights_only=True)
        into.model.load_state_dict(state["model"], strict=False)
        into.optimizer.load_state_dict(state["optim"])

    def _path(self, step: int) -> Path:
        return self.job.folder / f"step-{step:08d}.ckpt"
