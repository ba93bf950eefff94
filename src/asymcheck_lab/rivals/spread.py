"""Systems that save a model which is spread over ranks; every rank makes the same calls."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from types import MappingProxyType
from typing import Any, Literal

from asymcheck_lab.rivals.base import (
    RNG,
    Behind,
    Job,
    Rival,
    System,
    fsync,
    fsync_tree,
)
from asymcheck_lab.rivals.ours import Asymcheck
from asymcheck_lab.rivals.table import NONE, OURS


def state_of_ranks(job: Job) -> dict[str, Any]:
    """Model and optimizer under their own names, as DCP's documentation shows it; a tensor that
    has two names is there once.
    """
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = get_state_dict(job.model, job.optimizer)
    bare = getattr(job.model, "module", job.model)
    once = {name for name, _ in (*bare.named_parameters(), *bare.named_buffers())}
    return {"model": {k: v for k, v in model.items() if k in once}, "optim": optimizer}


@dataclass
class SpreadDcp(System):
    """``torch.distributed.checkpoint.save`` by all ranks."""

    _group: Any = None

    def start(self) -> None:
        """See ``System``."""
        import torch.distributed as dist

        # What is written behind the training must not meet its collectives.
        self._group = dist.new_group(backend="gloo")

    def after_update(self, step: int, *, due: bool) -> None:
        """See ``System``."""
        if not due:
            return
        from torch.distributed.checkpoint.state_dict_saver import save

        path = self._path(step)
        save(state_of_ranks(self.job), checkpoint_id=path, process_group=self._group)
        _sync_names(path)
        self.durable_s[step] = perf_counter()

    def load(self, step: int, into: Job) -> None:
        """See ``System``."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict
        from torch.distributed.checkpoint.state_dict_loader import load

        state = state_of_ranks(into)
        load(state, checkpoint_id=self._path(step), process_group=self._group)
        set_state_dict(
            into.model,
            into.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
            options=StateDictOptions(strict=False),
        )

    def _path(self, step: int) -> Path:
        return self.job.folder / f"step-{step:08d}"


@dataclass
class SpreadDcpAsync(SpreadDcp, Behind):
    """``async_save`` by all ranks; see ``DcpAsync``.

    Attributes:
        kind: Who writes.
        stager: DCP's own choice, or one that copies behind the next passes.
    """

    kind: Literal["thread", "process"] = "thread"
    stager: Literal["default", "behind"] = "default"
    _own_stager: Any = None
    _staged: Any = None

    def start(self) -> None:
        """See ``System``."""
        super().start()
        os.environ["MASTER_ADDR"] = "127.0.0.1"  # a writing process joins a group of its own
        if self.stager == "behind":
            from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

            self._own_stager = DefaultStager(
                StagingOptions(
                    use_pinned_memory=False,  # this and the last one need CUDA
                    use_shared_memory=self.kind == "process",
                    use_async_staging=True,
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

        self.wait_for_last()
        path = self._path(step)
        answer: Any = async_save(
            state_of_ranks(self.job),
            checkpoint_id=path,
            process_group=self._group,
            async_checkpointer_type=AsyncCheckpointerType(self.kind),
            async_stager=self._own_stager,
        )
        if isinstance(answer, AsyncSaveResponse):
            self._staged = answer.staging_completion
            answer = answer.upload_completion
        self.watch(step, partial(_complete, answer.result, path))

    def drain(self) -> None:
        """See ``System``."""
        self.before_update()
        super().drain()

    def close(self) -> None:
        """See ``System``."""
        super().close()
        if self._own_stager is not None:
            self._own_stager.close()


@dataclass
class SpreadDeepSpeed(System):
    """``save_checkpoint`` of the engine that trains."""

    def after_update(self, step: int, *, due: bool) -> None:
        """See ``System``."""
        if not due:
            return
        engine: Any = self.job.model
        engine.save_checkpoint(str(self.job.folder), tag=_tag(step))
        fsync_tree(self.job.folder / _tag(step))
        fsync(self.job.folder / "latest")
        self.durable_s[step] = perf_counter()

    def load(self, step: int, into: Job) -> None:
        """See ``System``."""
        engine: Any = into.model
        engine.load_checkpoint(str(self.job.folder), tag=_tag(step))


def _tag(step: int) -> str:
    return f"global_step{step}"


def _complete(upload: Callable[[], object], path: Path) -> None:
    upload()
    _sync_names(path)


def _sync_names(path: Path) -> None:
    fsync(path / ".metadata")
    fsync(path)
    fsync(path.parent)


def _dcp(title: str, make: Callable[[Job], System], *, is_async: bool = True) -> Rival:
    return Rival(
        title=title,
        make=make,
        library="torch",
        omits=RNG,
        syncs="FileSystemWriter gives its files to fsync; the adapter adds names and .metadata",
        is_async=is_async,
    )


SPREAD: Mapping[str, Rival] = MappingProxyType(
    {
        NONE: Rival(
            title="no checkpoints", make=System, library="torch", omits="", syncs="", kind="none"
        ),
        OURS: Rival(
            title="asymcheck",
            make=Asymcheck,
            library="asymcheck",
            omits="",
            syncs="the library gives every file and its name to fsync",
            kind="ours",
        ),
        "dcp": _dcp("DCP save", SpreadDcp, is_async=False),
        "dcp-thread": _dcp("DCP async_save, thread (its default)", SpreadDcpAsync),
        "dcp-thread-stager": _dcp(
            "DCP async_save, thread, asynchronous stager",
            partial(SpreadDcpAsync, stager="behind"),
        ),
        "dcp-process": _dcp("DCP async_save, process", partial(SpreadDcpAsync, kind="process")),
        "dcp-process-stager": _dcp(
            "DCP async_save, process, asynchronous stager",
            partial(SpreadDcpAsync, kind="process", stager="behind"),
        ),
        "deepspeed": Rival(
            title="DeepSpeed save_checkpoint",
            make=SpreadDeepSpeed,
            library="deepspeed",
            omits=RNG,
            syncs="nothing; the adapter gives every file and folder to fsync",
            is_async=False,
        ),
    }
)
"""Every system of the comparison on several ranks, by its name."""


def why_not(system: str, parallel: str) -> str:
    """Why a system cannot save what is spread like that; empty where it can."""
    if system.startswith("dcp") and parallel.startswith("zero"):
        return "its parameters are placeholders of DeepSpeed, which DCP cannot read"
    if system == "deepspeed" and not parallel.startswith("zero"):
        return "it saves only what it trains"
    return SPREAD[system].missing() or ""
