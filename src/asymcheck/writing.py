"""One training process as a writer of its root: which attempt it writes, what it has started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import wait as wait_futures
from pathlib import Path
from typing import Any, Literal

from asymcheck.agreement import Agreement
from asymcheck.device.state import State
from asymcheck.endings import Ending, settle_others
from asymcheck.errors import (
    CaptureError,
    CheckpointError,
    NoCheckpoint,
    OptionError,
    RankFailed,
    StoreError,
)
from asymcheck.events import Sink
from asymcheck.garbage import put_off
from asymcheck.handles import Handle
from asymcheck.handover import take_over
from asymcheck.memory.arena import SHARED_MEMORY, Arena
from asymcheck.outcomes import Outcomes, warn
from asymcheck.persister import is_own_memory, start_persister
from asymcheck.planning.retention import CheckpointId, Retention
from asymcheck.planning.strategies import Strategy
from asymcheck.ranks import Ranks
from asymcheck.snapshotter import Snapshotter
from asymcheck.storage.manifest import dump_attempt, parse_attempt
from asymcheck.storage.repository import Repository, create_repository, open_repository
from asymcheck.storage.store import Store
from asymcheck.tracing import Tracer


class RootWriter:
    """What a ``Checkpointer`` stands on. All calls come from the training thread.

    Its subclass sets the attributes that are only declared here.
    """

    _ranks: Ranks
    _agreed: Agreement
    _strategy: Strategy
    _retention: Retention
    _read_only: bool
    _grace_s: float
    _timeout_s: float
    _sink: Sink
    _tracer: Tracer | None
    _outcomes: Outcomes
    _state: State
    _store: Store
    _persist: Literal["process", "thread"]

    def __init__(self) -> None:
        self._repository: Repository | None = None
        self._snapshotter: Snapshotter | None = None
        self._attempt: int | None = None
        self._latest_step = 0
        self._closed = False
        self._pid = os.getpid()
        self._ending: Ending | None = None

    # --- the root -------------------------------------------------------------

    def _open_root(self) -> None:
        """Make or open the repository: rank 0 first, so that the others find it.

        Raises:
            OptionError: The ranks see different places.
        """

        def opened() -> str | None:
            if self._repository is None:
                self._repository = self._open_repository()
            return None if self._repository is None else self._repository.run

        self._ranks.first("opening the root", opened)
        runs = self._ranks.each("opening the root", opened)
        for rank, run in enumerate(runs):
            if run != runs[0]:
                raise OptionError(
                    f"root: {self._store.url} is another place on rank {rank} than on rank 0: "
                    f"give all ranks a directory or store that they share"
                )

    def _open_repository(self) -> Repository | None:
        if not self._read_only and self._ranks.rank == 0:
            return create_repository(self._store)
        try:
            return open_repository(self._store)
        except NoCheckpoint:
            return None

    def _existing(self) -> Repository:
        if self._repository is None:
            self._repository = open_repository(self._store)
        return self._repository

    def _take_over(self) -> None:
        """Finish what others left: an older one of this process, a dead trainer of this run."""
        if self._read_only:
            return
        for message in settle_others(self, self._existing().run, self._store.url):
            warn(message)

        def finish() -> int:
            # Each stores what it finds here, then commits what all have stored; so when all are
            # through, everything that can be whole is.
            rank = self._ranks.rank
            how = (self._retention, self._sink, self._grace_s, warn)
            return len(take_over(self._existing(), *how, rank=rank))

        self._ranks.each("finishing what dead ranks left", finish, self._grace_s)

    # --- the attempt ------------------------------------------------------------

    def _start_attempt(self, parent: CheckpointId | None) -> None:
        """Claim an attempt that continues from ``parent``; nothing is pending."""
        if self._read_only:
            return
        failed: list[CheckpointError] = []

        def claim() -> list[Any]:
            number, why = None, ""
            try:
                number = self._existing().claim(parent).number
            except CheckpointError as failure:
                failed.append(failure)
                why = f"{type(failure).__name__}: {failure}"
            return [number, why, [dump_attempt(c).decode() for c in self._existing().claims]]

        number, why, claims = self._ranks.first("claiming the root", claim)
        # Also of a claim that failed: its record may be there, and is no other job's.
        self._existing().claims[:] = [parse_attempt(c.encode(), "claim") for c in claims]
        if number is None:
            raise (
                failed.pop()
                if failed
                else RankFailed((0,), f"claiming the root: rank 0 failed: {why}")
            )
        self._attempt = number
        self._capturing()  # a persister that is started now is there at the first save

    def _take_attempt(self, step: int, last_step: int) -> None:
        """Have an attempt to save under, so that ``(attempt, step)`` was never used."""
        if self._attempt is None:
            self._take_over()
            self._ranks.first("looking at the root", self._refuse_other_checkpoints)
            self._start_attempt(None)
        elif step <= last_step:
            # Back in time without a restore: a branch, from the newest checkpoint before.
            self._settle(None)
            before = self._ranks.first("branching", lambda: self._before(step))
            self._start_attempt(CheckpointId(*before))

    def _check_writer(self, attempt: int) -> None:
        self._existing().check_writer(attempt)

    def _refuse_other_checkpoints(self) -> None:
        found = self._existing().lineage()
        if found:
            raise OptionError(
                f"save: {self._store.url} holds checkpoints up to step {found[-1].step}: call "
                f"restore() first, or restore(resume='never') to start beside them"
            )

    def _before(self, step: int) -> CheckpointId:
        """The checkpoint that a branch at ``step`` continues from."""
        attempt = self._attempt
        assert attempt is not None
        self._existing().check_writer(attempt)
        before = [c for c in self._existing().lineage(attempt=attempt) if c.step < step]
        # Before every checkpoint: from step 0 of this attempt, so that it is the same tree.
        return before[-1] if before else CheckpointId(attempt, 0)

    # --- what captures ------------------------------------------------------------

    def _capturing(self) -> Snapshotter:
        if self._snapshotter is None:
            repository = self._existing()
            arena = Arena(
                repository.run,
                self._ranks.rank,
                self._strategy.admission.max_in_flight,
                warn,
                # Slots need a name where another process can make something of them.
                (Path(),) if is_own_memory(self._store) else (SHARED_MEMORY, Path()),
                self._store.url,
                self._strategy.admission.ring_bytes,
            )
            persister = start_persister(
                self._persist,
                repository,
                arena,
                self._retention,
                self._sink,
                self._grace_s,
                self._strategy,
                self._timeout_s,
            )
            self._snapshotter = Snapshotter(
                self._state,
                self._strategy,
                arena,
                persister,
                repository,
                self._retention,
                self._sink,
                self._tracer,
                self._ranks.rank,
                self._ranks.world,
                self._timeout_s,
            )
            self._ending = Ending(self, repository.run, self._snapshotter, self._grace_s)
        return self._snapshotter

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise OptionError(
                f"this Checkpointer belongs to process {self._pid}, this is its fork "
                f"{os.getpid()}: make one in here, on a root of its own"
            )

    def _check_open(self) -> None:
        self._check_process()
        if self._closed:
            raise OptionError("this Checkpointer is closed")

    def _note_step(self, step: int) -> None:
        self._check_process()
        self._latest_step = step
        if self._snapshotter is not None:
            self._snapshotter.latest_step = step
            self._snapshotter.settle()

    # --- one save -------------------------------------------------------------------

    @put_off()
    def _capture(
        self, step: int, numbers: Mapping[str, float], when_full: Literal["wait", "skip", "raise"]
    ) -> Handle | None:
        """Capture the state under the attempt that was taken; with others all do, or none.

        What fails on one rank alone is its handle's to tell, and raised by all later.
        """
        attempt = self._attempt
        assert attempt is not None
        at = CheckpointId(attempt, step)

        def capture(how: Literal["wait", "skip", "raise"]) -> Handle | None:
            self._check_writer(attempt)
            return self._capturing().capture(at, numbers, how)

        if self._ranks.world == 1:
            return capture(when_full)
        self._agreed.compare(step, self._state.shared_geometry, self._state.replica_samples)
        if when_full != "wait":
            # Rank 0 knows whether it has room; the others then wait until they have.
            found: list[Handle | None] = []

            def first() -> bool:
                found.append(capture(when_full))
                return found[0] is not None

            if not self._ranks.first(f"room for the save of step {step}", first):
                return None
            if found:
                return found[0]
        try:
            handle = capture("wait")
            self._agreed.notice(step, self._state.shared_geometry())
            return handle
        except Exception as failure:  # noqa: BLE001  all ranks raise it, at the same step
            told = failure if isinstance(failure, CheckpointError) else CaptureError(repr(failure))
            told.add_note(f"while step {step} was captured on rank {self._ranks.rank}")
            handle = Handle(step, Future(), Future())
            handle.captured.set_exception(told)
            handle.durable.set_exception(told)
            return handle

    # --- what became of saves -------------------------------------------------------

    def _failure(self) -> BaseException | None:
        """What failed behind the training since the latest call; warns of what was dropped."""
        if self._snapshotter is not None:
            self._outcomes.pending += self._snapshotter.late()
        failure = self._outcomes.failure(self._snapshotter, self._agreed.dropped)
        for step, why in self._outcomes.take_drops():
            self._agreed.drop(step, why, self._latest_step)
        return failure

    def _surface_errors(self) -> None:
        failure = self._failure()
        if failure is not None:
            self._agreed.fail(failure, self._latest_step)

    def _settled(self) -> bool:
        """Whether every save is durable; raises what failed."""
        failure = self._failure()
        if failure is not None:
            raise failure
        return not self._outcomes.pending

    def _wait_for_pending(self, limit_s: float | None) -> None:
        """Wait until every save of this rank is durable or failed."""
        if self._snapshotter is not None:
            self._outcomes.pending += self._snapshotter.drain()
        wait_futures([h.durable for h in self._outcomes.pending], limit_s)

    def _settle(self, limit_s: float | None) -> bool:
        """Wait until every save so far is durable or failed, on all ranks."""
        self._wait_for_pending(limit_s)
        # Some may have to wait for what others never stored, as long as that takes to be sure.
        return self._agreed.meet("wait", self._settled, self._timeout_s + (limit_s or 0.0))

    # --- the end ----------------------------------------------------------------------

    def _forget(self) -> None:
        """What it started was closed for another one that writes the root from now on."""
        self._snapshotter = None

    def _end(self) -> bool:
        """Drain within ``grace_s`` and give back what was started, without a word to other ranks;
        raises what failed. Whether there was anything to end.
        """
        if self._closed or os.getpid() != self._pid:
            return False  # the checkpointer of the parent of a fork is not the child's to close
        in_time = self._snapshotter is None or self._snapshotter.close(self._grace_s)
        self._closed = True  # not before: a close that was interrupted can be made again
        if self._ending is not None:
            self._ending.over()
        self._settled()
        left = [handle.step for handle in self._outcomes.pending]
        if left or not in_time:
            raise StoreError(
                f"close: saves of steps {left} are still pending after "
                f"grace_s={self._grace_s} seconds; what is sealed goes on without us",
                retryable=False,
            )
        return True
