"""The systems that the benchmark compares, each behind the same few calls.

Every system gets the same live model and optimizer and keeps every checkpoint that it writes.
A checkpoint counts as durable once its files *and their names* have been given to ``fsync``:
where a system leaves some of that out, its adapter does it and says so in ``syncs``.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from asymcheck_lab.errors import RunError

if TYPE_CHECKING:
    import torch

    from asymcheck import Checkpointer, Handle

RNG = "states of the random number generators"


@dataclass(frozen=True, slots=True)
class Job:
    """What is saved, and where to.

    Attributes:
        model: The live model.
        optimizer: The live optimizer.
        folder: For the system alone; empty at first.
        every: A checkpoint is due at each multiple of this.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    folder: Path
    every: int


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


# --- asymcheck --------------------------------------------------------------


@dataclass
class Asymcheck(System):
    """The library, as its README shows it."""

    persist: Literal["process", "thread"] = "process"
    _checkpointer: Checkpointer | None = None
    _handles: list[Handle] = field(default_factory=list)

    def start(self) -> None:
        """See ``System``."""
        from asymcheck import Checkpointer

        self._checkpointer = Checkpointer(
            self.job.folder,
            state={"model": self.job.model, "optim": self.job.optimizer},
            every_steps=self.job.every,
            persist=self.persist,
        )
        self._checkpointer.restore()

    def after_update(self, step: int, *, due: bool) -> None:
        """See ``System``."""
        assert self._checkpointer is not None
        if due and step % self.job.every:
            handle: Handle | None = self._checkpointer.save(step)
        else:
            handle = self._checkpointer.step(step)
        if handle is not None:
            self._handles.append(handle)
            handle.durable.add_done_callback(lambda done: self._note(step, done))

    def _note(self, step: int, done: Future[Any]) -> None:
        if done.exception() is None:
            self.durable_s[step] = perf_counter()

    def drain(self) -> None:
        """See ``System``."""
        assert self._checkpointer is not None
        self._checkpointer.wait()
        for handle in self._handles:
            failure = handle.durable.exception()
            if failure is not None:
                raise RunError(f"step {handle.step} was not saved: {failure}") from failure

    def close(self) -> None:
        """See ``System``."""
        assert self._checkpointer is not None
        self._checkpointer.close()

    def details(self) -> dict[str, Any]:
        """See ``System``."""
        return {"saves": [asdict(handle.durable.result()) for handle in self._handles]}

    def load(self, step: int, into: Job) -> None:
        """See ``System``."""
        from asymcheck import Checkpointer

        state = {"model": into.model, "optim": into.optimizer}
        with Checkpointer(self.job.folder, state=state, read_only=True) as reader:
            reader.restore(step)


# --- torch.save -------------------------------------------------------------


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
        _fsync(temp)
        temp.rename(path)
        _fsync(path.parent)
        self.durable_s[step] = perf_counter()

    def load(self, step: int, into: Job) -> None:
        """See ``System``."""
        import torch

        state = torch.load(self._path(step), weights_only=True)
        into.model.load_state_dict(state["model"])
        into.optimizer.load_state_dict(state["optim"])

    def _path(self, step: int) -> Path:
        return self.job.folder / f"step-{step:08d}.pt"


# --- torch.distributed.checkpoint -------------------------------------------


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
        save(_state_of(self.job), checkpoint_id=path)
        _sync_names(path)
        self.durable_s[step] = perf_counter()

    def load(self, step: int, into: Job) -> None:
        """See ``System``."""
        from torch.distributed.checkpoint.state_dict_loader import load

        # DCP loads into what is there, and a new optimizer has nothing yet: the form is taken
        # from the live one, without its values.
        state = _blank({"model": {}, "optim": self.job.optimizer.state_dict()})
        state["model"] = _without_aliases(into.model.state_dict())
        load(state, checkpoint_id=self._path(step), no_dist=True)
        into.optimizer.load_state_dict(state["optim"])

    def _path(self, step: int) -> Path:
        return self.job.folder / f"step-{step:08d}"


@dataclass
class DcpAsync(Dcp):
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
    _saves: list[Future[None]] = field(default_factory=list)

    def start(self) -> None:
        """See ``System``."""
        super().start()
        if self.kind == "process":
            import torch.distributed as dist

            # The writing process joins a group of its own at this address.
            os.environ["MASTER_ADDR"] = "127.0.0.1"
            meeting = self.job.folder.with_name("rendezvous").resolve().as_uri()
            dist.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
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

        if self._saves:
            self._saves[-1].result()  # one at a time, as DCP's documentation advises
        path = self._path(step)
        durable: Future[None] = Future()
        self._saves.append(durable)
        answer = async_save(
            _state_of(self.job),
            checkpoint_id=path,
            async_checkpointer_type=AsyncCheckpointerType(self.kind),
            async_stager=self._own_stager,
        )
        upload = answer
        if isinstance(answer, AsyncSaveResponse):
            upload, self._staged = answer.upload_completion, answer.staging_completion
        assert isinstance(upload, Future)
        upload.add_done_callback(lambda done: self._complete(step, path, done, durable))

    def _complete(self, step: int, path: Path, written: Future[Any], durable: Future[None]) -> None:
        """On DCP's thread, once it has written everything."""
        try:
            written.result()
            _sync_names(path)
            self.durable_s[step] = perf_counter()
        except BaseException as failure:  # noqa: BLE001  the next call raises it
            durable.set_exception(failure)
        else:
            durable.set_result(None)

    def drain(self) -> None:
        """See ``System``."""
        self.before_update()
        for save in self._saves:
            save.result()

    def close(self) -> None:
        """See ``System``."""
        if self._own_stager is not None:
            self._own_stager.close()
        if self.kind == "process":
            import torch.distributed as dist

            dist.destroy_process_group()


def _state_of(job: Job) -> dict[str, Any]:
    return {
        "model": _without_aliases(job.model.state_dict()),
        "optim": job.optimizer.state_dict(),
    }


def _without_aliases(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each tensor once: DCP would write tied weights twice, the others do not."""
    found: dict[tuple[int, int], str] = {}
    return {
        name: tensor
        for name, tensor in state.items()
        if found.setdefault((tensor.data_ptr(), tensor.nbytes), name) == name
    }


def _blank(value: Any) -> Any:  # noqa: ANN401  any state dict
    import torch

    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: _blank(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_blank(inner) for inner in value]
    return None


def _sync_names(folder: Path) -> None:
    """What DCP leaves out: the tail of ``.metadata``, and the names of its files."""
    _fsync(folder / ".metadata")
    _fsync(folder)
    _fsync(folder.parent)


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# --- the list ---------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """A system as the benchmark names it.

    Attributes:
        title: For tables.
        make: Gives the system for a job.
        library: Whose version is recorded.
        omits: What a resumed run needs and this system does not save by itself.
        syncs: How its files become durable.
        is_async: Whether it writes behind the training.
    """

    title: str
    make: Callable[[Job], System]
    library: str
    omits: str
    syncs: str
    is_async: bool = True


_OURS = "the library writes past the page cache and gives every file and its name to fsync"
_DCP = (
    "FileSystemWriter gives its files to fsync (sync_files=True, its default); the adapter adds "
    "the tail of .metadata, which DCP syncs before it has left Python's buffer, and the folders"
)

NONE = "none"
OURS = "asymcheck"
BASELINE = "torch-save"
SYNC_RIVAL = "dcp"

RIVALS: Mapping[str, Rival] = MappingProxyType(
    {
        NONE: Rival(
            title="no checkpoints",
            make=System,
            library="torch",
            omits="everything",
            syncs="",
            is_async=False,
        ),
        OURS: Rival(
            title="asymcheck",
            make=lambda job: Asymcheck(job, persist="process"),
            library="asymcheck",
            omits="",
            syncs=_OURS,
        ),
        "asymcheck-thread": Rival(
            title='asymcheck, persist="thread"',
            make=lambda job: Asymcheck(job, persist="thread"),
            library="asymcheck",
            omits="",
            syncs=_OURS,
        ),
        BASELINE: Rival(
            title="torch.save + fsync",
            make=TorchSave,
            library="torch",
            omits=RNG,
            syncs="the adapter gives the file to fsync, renames it and syncs the folder",
            is_async=False,
        ),
        SYNC_RIVAL: Rival(
            title="DCP save", make=Dcp, library="torch", omits=RNG, syncs=_DCP, is_async=False
        ),
        "dcp-thread": Rival(
            title="DCP async_save, thread",
            make=lambda job: DcpAsync(job, kind="thread"),
            library="torch",
            omits=RNG,
            syncs=_DCP,
        ),
        "dcp-process": Rival(
            title="DCP async_save, process",
            make=lambda job: DcpAsync(job, kind="process"),
            library="torch",
            omits=RNG,
            syncs=_DCP,
        ),
        "dcp-stager": Rival(
            title="DCP async_save, thread, asynchronous stager",
            make=lambda job: DcpAsync(job, kind="thread", stager="behind"),
            library="torch",
            omits=RNG,
            syncs=_DCP,
        ),
        "dcp-process-stager": Rival(
            title="DCP async_save, process, asynchronous stager in shared memory",
            make=lambda job: DcpAsync(job, kind="process", stager="behind"),
            library="torch",
            omits=RNG,
            syncs=_DCP,
        ),
    }
)
"""Every system by the name that ``--systems`` takes."""

DEFAULT_SYSTEMS = tuple(name for name in RIVALS if name != "dcp-process-stager")


def stored_bytes(folder: Path) -> int:
    """Bytes of every file below a folder."""
    total = 0
    for top, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += (Path(top) / name).stat().st_size
    return total
