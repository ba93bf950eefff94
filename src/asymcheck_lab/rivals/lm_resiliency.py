"""``lm-resiliency``, by the authors of GEMINI: in memory first, on disk where asked for."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

from asymcheck_lab.errors import RunError
from asymcheck_lab.rivals.base import Behind, Job, apart, state_of

_RUN = "bench"


@dataclass
class LmResiliency(Behind):
    """Its ``InMemoryCheckpointManager``, which flushes every capture to disk; one process.

    With one process there is no peer to send to. Left to itself it writes a capture when the
    next one is taken; ``flush_to_disk`` writes it at once.
    """

    _manager: Any = None

    def start(self) -> None:
        """See ``System``."""
        # It registers with torchrun: every process that finds it installed imports it.
        sys.path.append(str(apart()))
        self._manager = _make(self.job)

    def before_update(self) -> None:
        """See ``System``."""
        self._manager.maybe_wait()

    def after_update(self, step: int, *, due: bool) -> None:
        """See ``System``."""
        if not due:
            return
        self._manager.save(state_of(self.job), step)
        self._manager.maybe_wait()  # what is not in host memory yet is not flushed
        self._manager.flush_to_disk(step)
        # It tells nobody when that is done, other than its log.
        disk = self._manager._disk
        self.watch(step, partial(_complete, disk, disk._write_thread, step))

    def close(self) -> None:
        """See ``System``."""
        super().close()
        self._manager.close()

    def load(self, step: int, into: Job) -> None:
        """See ``System``."""
        reader = _make(self.job)
        try:
            loaded = reader.load(step=step)
        finally:
            reader.close()
        if loaded is None:
            raise RunError(f"step {step}: lm-resiliency finds no such checkpoint")
        state, _ = loaded
        into.model.load_state_dict(state["model"], strict=False)
        into.optimizer.load_state_dict(state["optim"])


def _make(job: Job) -> Any:  # noqa: ANN401  its own
    from lm_resiliency import InMemoryCkptConfig
    from lm_resiliency.checkpointing import InMemoryCheckpointManager

    return InMemoryCheckpointManager(
        InMemoryCkptConfig(
            interval=job.every,
            disk_flush_interval=0,
            disk_folder=str(job.folder),
            run_id=_RUN,
            pin_memory=False,  # needs CUDA
        )
    )


def _complete(disk: Any, writer: Any, step: int) -> None:  # noqa: ANN401
    writer.join()
    if disk.latest_flushed_step < step:
        raise RunError(f"step {step}: lm-resiliency did not write it: {disk._write_error}")
