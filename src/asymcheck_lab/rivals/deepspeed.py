"""DeepSpeed's ``save_checkpoint``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from asymcheck_lab.rivals.base import (
    Job,
    System,
    fsync,
    fsync_tree,
    is_engine,
    join_ranks,
)


@dataclass
class DeepSpeed(System):
    """An engine that is only asked to save: the one that trains under ZeRO, or else one of its
    stage 0 around the live model and optimizer.

    At stage 0 in fp32 the engine's optimizer is the one that it was given, and its module the
    model: so the loop trains what the engine saves, and need not be changed. From stage 1 on
    the engine's own optimizer steps flat copies, which is another training.
    """

    _engine: Any = None

    def start(self) -> None:
        """See ``System``."""
        if is_engine(self.job.model):
            self._engine = self.job.model
            return
        os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0"}
        join_ranks(self.job.folder)
        self._engine = _engine(self.job)

    def after_update(self, step: int, *, due: bool) -> None:
        """See ``System``."""
        if not due:
            return
        tag = _tag(step)
        import torch.distributed as dist

        self._engine.save_checkpoint(str(self.job.folder), tag=tag)
        dist.barrier()  # rank 0 writes the name of the newest
        fsync_tree(self.job.folder / tag)
        fsync(self.job.folder / "latest")
        self.durable_s[step] = perf_counter()

    def close(self) -> None:
        """See ``System``."""
        import torch.distributed as dist

        if self._engine is self.job.model:
            return
        self._engine.destroy()
        dist.destroy_process_group()

    def load(self, step: int, into: Job) -> None:
        """See ``System``."""
        engine: Any = into.model if is_engine(into.model) else _engine(into)
        engine.load_checkpoint(str(self.job.folder), tag=_tag(step))


def _engine(job: Job) -> Any:  # noqa: ANN401  its own
    import deepspeed
    from deepspeed.ops import __compatible_ops__ as extensions

    # It would compile this one, for a minute, to speed up collectives of several processes.
    extensions["deepspeed_shm_comm"] = False
    engine, *_ = deepspeed.initialize(
        model=job.model,
        optimizer=job.optimizer,
        config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}},
        dist_init_required=False,
    )
    return engine


def _tag(step: int) -> str:
    return f"global_step{step}"
