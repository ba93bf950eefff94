"""Meta's ``torch_checkpointing``."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asymcheck_lab.rivals.base import Behind, Job, fsync_tree, state_of

if TYPE_CHECKING:
    from torch_checkpointing.checkpoint_writer import CallbackArgs


@dataclass
class TorchCheckpointing(Behind):
    """Its ``CheckpointManager``, asynchronous; the update runs under its lock."""

    _manager: Any = None
    _locked: ExitStack = field(default_factory=ExitStack)

    def start(self) -> None:
        """See ``System``."""
        self._manager = _make(finalize_callback=sync_written)

    def before_update(self) -> None:
        """See ``System``."""
        self._locked.enter_context(self._manager.lock())

    def after_update(self, step: int, *, due: bool) -> None:
        """See ``System``."""
        self._locked.close()
        if due:
            written = self._manager.save(str(self._path(step)), state_of(self.job))
            self.watch(step, partial(written.result))

    def close(self) -> None:
        """See ``System``."""
        super().close()
        self._manager.close()

    def load(self, step: int, into: Job) -> None:
        """See ``System``."""
        loaded = self._manager.load(
            str(self._path(step)), into={"model": state_of(into)["model"], "optim": None}
        )
        into.optimizer.load_state_dict(loaded["optim"])

    def _path(self, step: int) -> Path:
        return self.job.folder / f"step-{step:08d}"


def _make(**options: Any) -> Any:  # noqa: ANN401  its own
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    # Its O_DIRECT writes are of any length and at any address, which ext4 and XFS refuse.
    storage = LocalFileSystemStorageConfig(use_direct_io=False)
    return CheckpointManager(CheckpointManager.Config(storage_config=storage, **options))


def sync_written(written: CallbackArgs) -> None:
    """Its hook after the rename, in its writing process: it syncs nothing itself."""
    fsync_tree(Path(written.path))
