"""Persisting on threads of the trainer, and what that has in common with a process of its own."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Protocol

from asymcheck.encoding import Chooser
from asymcheck.errors import as_checkpoint_error
from asymcheck.events import Sink
from asymcheck.hashing import HashingAhead
from asymcheck.memory.arena import Slot
from asymcheck.memory.process import ProcessId
from asymcheck.messages import Durable, Stored
from asymcheck.pending import COMMIT_TIMEOUT_S, Backlog
from asymcheck.persist import persist, tidy
from asymcheck.planning.retention import Retention
from asymcheck.planning.selection import RAW, Batching, Selection
from asymcheck.planning.tiers import Tier
from asymcheck.promotion import Promoter, deadline
from asymcheck.storage.repository import Repository
from asymcheck.storage.store import Store
from asymcheck.tiering import TierBoard

_log = logging.getLogger(__name__)


class Persister(Protocol):
    """Takes slots to committed checkpoints: begins them in the order in which they come, and has
    up to a given number at work at a time. They end in any order.

    What is committed goes on to the further tiers.

    Attributes:
        board: How far each of them is.
    """

    board: TierBoard

    def begin(
        self, slot: Slot, step: int, stored: Callable[[], None] = lambda: None
    ) -> Future[Durable]:
        """Queue a slot that is being filled; returns at once. The slot is read until the
        future is done, or until ``stored`` was called: then only other ranks are waited for.
        """
        ...

    def wake(self) -> None:
        """A checkpoint was committed by another: it goes to the tiers; returns at once."""
        ...

    def ask_tier(self, name: str) -> int:
        """Have the newest checkpoint go to a tier; returns at once, the number of the request on
        the board.
        """
        ...

    def close(self, timeout_s: float) -> bool:
        """End once everything is done, and the newest checkpoint is in all tiers that can be
        reached; returns whether all checkpoints were committed or failed in time.
        """
        ...


@dataclass
class Job:
    """A slot on its way to the store.

    Attributes:
        slot: The slot.
        step: Its step.
        future: Done when the checkpoint is durable, or will not be.
        begun: Whether the process that lives now is at work on it.
        ends: Processes that ended while they were at work on it.
        free: Called when the slot is not read any more.
        stored: What lies in the store then, and waits for other ranks.
        ahead: Hashes it, in the process that persists.
    """

    slot: Slot
    step: int
    future: Future[Durable]
    begun: bool = False
    ends: int = 0
    free: Callable[[], None] = lambda: None
    stored: Stored | None = None
    ahead: HashingAhead | None = None


class PersistThread:
    """Persists on daemon threads of the trainer.

    Args:
        repository: Written by these threads alone from now on.
        retention: Applied after each commit.
        sink: Receives spans, on these threads.
        selection: How chunks may be encoded.
        batching: How they are merged into writes.
        at_once: How many checkpoints are written at a time.
        writers: Into how many packs each is cut, written at the same time.
        commit_timeout_s: How long a stored part waits for those of other ranks.
        tiers: Where committed checkpoints go on to.
        board: Told how far they are.
    """

    def __init__(
        self,
        repository: Repository,
        retention: Retention,
        sink: Sink,
        selection: Selection = RAW,
        batching: Batching = "ready",
        at_once: int = 1,
        writers: int = 1,
        commit_timeout_s: float = COMMIT_TIMEOUT_S,
        tiers: Sequence[tuple[Tier, Store]] = (),
        board: TierBoard | None = None,
    ) -> None:
        self.board = board or TierBoard([tier.label for tier, _ in tiers])
        self._promoter = Promoter(repository, tiers, self.board.note, sink)
        self._backlog = Backlog(repository, retention, sink, commit_timeout_s)
        self._commit_timeout_s = commit_timeout_s
        self._selection, self._batching, self._writers = selection, batching, writers
        self._repository = repository
        self._retention = retention
        self._sink = sink
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._running = at_once
        self._threads = [
            threading.Thread(target=self._run, name="asymcheck-persist", daemon=True)
            for _ in range(at_once)
        ]
        for thread in self._threads:
            thread.start()

    def begin(
        self, slot: Slot, step: int, stored: Callable[[], None] = lambda: None
    ) -> Future[Durable]:
        """See ``Persister``."""
        slot.persister = ProcessId(0, 0)
        job = Job(slot, step, Future(), free=stored, ahead=HashingAhead(slot))
        self._jobs.put(job)
        return job.future

    def wake(self) -> None:
        """See ``Persister``."""
        self._promoter.wake()

    def ask_tier(self, name: str) -> int:
        """See ``Persister``."""
        number = self.board.ask(name)
        self._promoter.ask(name, number)
        return number

    def close(self, timeout_s: float) -> bool:
        """See ``Persister``."""
        until_s = monotonic() + timeout_s
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(max(0.0, until_s - monotonic()))
        in_time = not any(thread.is_alive() for thread in self._threads)
        self._promoter.close(deadline(until_s - monotonic()))
        return in_time

    def _run(self) -> None:
        chooser = Chooser(self._selection, self._batching)
        while (job := self._jobs.get()) is not None:
            try:
                self._promoter.expect_like(job.slot)
                found = persist(
                    self._repository,
                    job.slot,
                    self._retention,
                    self._sink,
                    lambda: True,
                    chooser,
                    self._writers,
                    job.ahead,
                )
                if isinstance(found, Stored) and chooser.needs_commits:
                    found = self._backlog.wait(found, chooser)
            except BaseException as failure:  # noqa: BLE001  it is the caller's to see
                if job.ahead is not None:
                    job.ahead.stop()
                settle(job, failure)
                continue
            if isinstance(found, Stored):
                job.stored = found
                job.free()
                self._backlog.add(found, partial(self._settle, job))
            else:
                self._settle(job, found)
        with self._lock:
            self._running -= 1
            is_last = not self._running
        if is_last:
            self._backlog.close(self._commit_timeout_s)
            tidy(self._repository)

    def _settle(self, job: Job, result: Durable | BaseException) -> None:
        settle(job, result)
        if isinstance(result, Durable):
            self._promoter.wake()


def settle(job: Job, result: Durable | BaseException) -> None:
    """Tell whoever waits for a job what became of it."""
    if isinstance(result, Durable):
        _log.info(
            "step %d is durable: %d bytes, %.3f s after its boundary",
            result.step,
            result.stored_bytes,
            result.durable_s,
        )
        job.future.set_result(result)
    else:
        if job.stored is None:
            job.slot.give_up()  # before the future: its copy may wait for room in a ring
        failure = as_checkpoint_error(result)
        failure.add_note(f"while step {job.step} was being persisted")
        job.future.set_exception(failure)
