"""The library itself."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

from asymcheck_lab.errors import RunError
from asymcheck_lab.rivals.base import Job, System

if TYPE_CHECKING:
    from asymcheck import Checkpointer, Handle, Strategy


@dataclass
class Asymcheck(System):
    """The library, as its README shows it; or another strategy of its table."""

    persist: Literal["process", "thread"] = "process"
    strategy: str = "asymcheck"
    keep_last: int | None = None
    _checkpointer: Checkpointer | None = None
    _handles: list[Handle] = field(default_factory=list)

    @property
    def policy(self) -> str | Strategy:
        """What it saves by."""
        return self.strategy

    @property
    def root(self) -> str:
        """Where it saves to."""
        return self.job.root or str(self.job.folder)

    @property
    def root_to_load(self) -> str:
        """Where it is loaded from: reading is held to no rate."""
        return str(self.job.folder)

    def start(self) -> None:
        """See ``System``."""
        from asymcheck import Checkpointer

        self._checkpointer = Checkpointer(
            self.root,
            state={"model": self.job.model, "optim": self.job.optimizer},
            every_steps=self.job.every,
            strategy=self.policy,
            persist=self.persist,
            keep_last=self.keep_last,
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
        elif due:
            self.skipped.add(step)

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
        with Checkpointer(self.root_to_load, state=state, read_only=True) as reader:
            reader.restore(step)
