"""torchsnapshot, the predecessor of DCP."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from asymcheck_lab.rivals.base import Behind, Job, fsync_tree, state_of


@dataclass
class TorchSnapshot(Behind):
    """``Snapshot.async_take``."""

    def after_update(self, step: int, *, due: bool) -> None:
        """See ``System``."""
        if not due:
            return
        from torchsnapshot import Snapshot

        path = self._path(step)
        pending = Snapshot.async_take(str(path), _app_state(self.job))
        self.watch(step, partial(_complete, pending, path))

    def load(self, step: int, into: Job) -> None:
        """See ``System``."""
        from torchsnapshot import Snapshot

        state = _app_state(into)
        Snapshot(str(self._path(step))).restore(state)
        into.model.load_state_dict(state["model"].data, strict=False)

    def _path(self, step: int) -> Path:
        return self.job.folder / f"step-{step:08d}"


def _app_state(job: Job) -> dict[str, Any]:
    from torchsnapshot import StateDict

    return {"model": StateDict(state_of(job)["model"]), "optim": job.optimizer}


def _complete(pending: Any, path: Path) -> None:  # noqa: ANN401  its own
    pending.wait()
    fsync_tree(path)
