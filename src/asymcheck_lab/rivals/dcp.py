"""``torch.distributed.checkpoint``: its save and its kinds of ``async_save``."""

from __future__ import annotations

import os
import warnings
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

from asymcheck_lab.rivals.base import (
    Behind,
    Job,
    System,
    fsync,
    is_engine,
    join_ranks,
    ranks,
    state_of,
    weights_of,
)


@dataclass
class Dcp(System):
    """``torch.distributed.checkpoint.save``, and what its kinds of ``async_save`` share."""

    def start(self) -> None:
        """See ``System``."""
        # At every save it would say that there is only one process.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")

    def after_update(self, step: int, *, due: bool) -> None:
        """See ``System``."""
        if not due:
            return
        from torch.distributed.checkpoint.state_dict_saver import save

        path = self._path(step)
        save(_given(self.job), checkpoint_id=path)
        _sync_names(path)
        self.durable_s[step] = perf_counter()

    def load(self, step: int, into: Job) -> None:
        """See ``System``."""
        import torch
        import torch.distributed as dist
        from torch.distributed.checkpoint.state_dict_loader import load

        # DCP loads into what is there, and a new optimizer has nothing yet: the form is taken
        # from the live one, without its values.
        engine: Any = into.model
        if is_engine(engine):
            state = _blank(_given(self.job))
            load(state, checkpoint_id=self._path(step))
            (own,) = state.values()
            with torch.no_grad():
                for name, buffer in engine.module.named_buffers():
                    buffer.copy_(own["buffers"][name])
            by_rank = [None] * ranks()
            by_rank[dist.get_rank()] = own["zero"]
            engine.optimizer.load_state_dict(by_rank)
            return
        state = _blank({"model": {}, "optim": self.job.optimizer.state_dict()})
        state["model"] = weights_of(into.model)
        load(state, checkpoint_id=self._path(step), no_dist=ranks() == 1)
        into.optimizer.load_state_dict(state["optim"])

    def _path(self, step: int) -> Path:
        return self.job.folder / f"step-{step:08d}"


@dataclass
class DcpAsync(Dcp, Behind):
    """``async_save``: the state is staged, and written by a thread or a process.

    Attributes:
        kind: Who writes.
        stager: ``default`` is DCP's own choice, which copies before ``async_save`` returns;
            ``behind`` copies behind the next forward and backward pass, into memory that is
            used again, and is waited for right before the update, as DCP advises.
    """

    kind: Literal["thread", "process"] = "thread"
    stager: Literal["default", "behind"] = "default"
    _own_stager: Any = None
    _staged: Future[None] | None = None
    _group: Any = None
    _is_alone: bool = False

    def start(self) -> None:
        """See ``System``."""
        import torch.distributed as dist

        super().start()
        if self.kind == "process":
            # The writing process joins a group of its own at this address.
            os.environ["MASTER_ADDR"] = "127.0.0.1"
            self._is_alone = ranks() == 1
        if self._is_alone:
            join_ranks(self.job.folder)
        elif ranks() > 1:
            # Its collectives run beside those of the training, which must not mix with them.
            self._group = dist.new_group(backend="gloo")
        if self.stager != "default":
            from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

            self._own_stager = DefaultStager(
                StagingOptions(
                    use_pinned_memory=False,  # this and the last one need CUDA
                    use_shared_memory=self.kind == "process",
                    use_async_staging=self.stager == "behind",
                    use_non_blocking_copy=False,
                )
            )

    def before_update(self) -> None:
        """See ``System``."""
        if self._staged is not None:
            self._staged.result()
            self._staged = None

    def after_update(self, step: int, *, due: bool) -> None:
        """See ``System``."""
        if not due:
            return
        from torch.distributed.checkpoint.state_dict_saver import (
            AsyncCheckpointerType,
            AsyncSaveResponse,
            async_save,
        )

        self.wait_for_last()  # one at a time, as DCP's documentation advises
        path = self._path(step)
        answer = async_save(
            _given(self.job),
            checkpoint_id=path,
            process_group=self._group,
            async_checkpointer_type=AsyncCheckpointerType(self.kind),
            async_stager=self._own_stager,
        )
        upload = answer
        if isinstance(answer, AsyncSaveResponse):
            upload, self._staged = answer.upload_completion, answer.staging_completion
        assert isinstance(upload, Future)
        self.watch(step, partial(_complete, upload, path))

    def drain(self) -> None:
        """See ``System``."""
        self.before_update()
        super().drain()

    def close(self) -> None:
        """See ``System``."""
        super().close()
        if self._own_stager is not None:
            self._own_stager.close()
        if self._is_alone:
            import torch.distributed as dist

            dist.destroy_process_group()


def _given(job: Job) -> dict[str, Any]:
    """What DCP is given. What each rank has of an engine's flat buffers is its own, by rank: to DCP
    they are no parts of anything, and could not be loaded on another number of ranks.
    """
    engine: Any = job.model
    if not is_engine(engine):
        return state_of(job)
    import torch.distributed as dist

    own = {
        "zero": engine.optimizer.state_dict(),
        "buffers": dict(engine.module.named_buffers()),
    }
    return {f"rank{dist.get_rank()}": own}


def _complete(upload: Future[Any], path: Path) -> None:
    upload.result()
    _sync_names(path)


def _blank(value: Any) -> Any:  # noqa: ANN401  any state dict
    import torch

    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: _blank(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_blank(inner) for inner in value]
    return value if isinstance(value, bool | int) else None


def _sync_names(folder: Path) -> None:
    """What DCP leaves out: the tail of ``.metadata``, and the names of its files."""
    fsync(folder / ".metadata")
    fsync(folder)
    fsync(folder.parent)
