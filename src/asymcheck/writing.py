"""One training process as a writer of its root: which attempt it writes, what it has started."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import wait as wait_futures
from functools import partial
from pathlib import Path
from typing import Any, Literal

from asymcheck.agreement import Agreement
from asymcheck.device.state import State
from asymcheck.endings import Ending, settle_others
from asymcheck.errors import (
    CaptureError,
    CheckpointError,
    CorruptCheckpoint,
    IncompatibleCheckpoint,
    NoCheckpoint,
    OptionError,
    RankFailed,
    StoreError,
)
from asymcheck.garbage import put_off
from asymcheck.handles import Handle, failed_handle
from asymcheck.handover import take_over
from asymcheck.memory.arena import SHARED_MEMORY, Arena
from asymcheck.mending import in_words, mend
from asymcheck.outcomes import Outcomes, warn
from asymcheck.persister import Persister, is_own_memory, start_persister
from asymcheck.planning.retention import CheckpointId
from asymcheck.planning.strategies import Strategy
from asymcheck.planning.tiers import Tier, spoken_url
from asymcheck.rank_store import host
from asymcheck.recovery import RestoreReport
from asymcheck.slot_start import SlotStart
from asymcheck.snapshotter import Snapshotter
from asymcheck.storage.bounded import within
from asymcheck.storage.copies import Place
from asymcheck.storage.healing import heal_tops
from asymcheck.storage.hierarchy import Hierarchy
from asymcheck.storage.manifest import dump_attempt, parse_attempt
from asymcheck.storage.names import attempt_name
from asymcheck.storage.repository import Repository, create_repository, open_repository
from asymcheck.storage.runs import read_run
from asymcheck.storage.store import Store
from asymcheck.tiering import TierBoard, Tiers, hold_for, record_in
from asymcheck.tracing import Tracer

_ENDLESS_S = 1e8
_TIMES_ASKED = 4  # tiers at the most in one call, which other ranks wait for


class RootWriter(SlotStart):
    """What a ``Checkpointer`` stands on. All calls come from the training thread.

    Its subclass sets the attributes that are only declared here.
    """

    _agreed: Agreement
    _strategy: Strategy
    _timeout_s: float
    _tracer: Tracer | None
    _outcomes: Outcomes
    _state: State
    _store: Store
    _tiers: tuple[tuple[Tier, Store], ...]
    _board: TierBoard
    _at_start: Tiers
    _persist: Literal["process", "thread"]

    def __init__(self) -> None:
        super().__init__()
        self._repository: Repository | None = None
        self._snapshotter: Snapshotter | None = None
        self._persister: Persister | None = None
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

        self._check_hosts()
        self._ranks.first("opening the root", opened)
        runs = self._ranks.each("opening the root", opened)
        for rank, run in enumerate(runs):
            if run != runs[0]:
                raise OptionError(
                    f"root: {self._store.url} is another place on rank {rank} than on rank 0: "
                    f"give all ranks a directory or store that they share"
                )

    def _check_hosts(self) -> None:
        """Refuse a place that each host has for itself, where the ranks run on several."""
        stores = (self._store, *(store for _, store in self._tiers))
        own = next((s for s in stores if s.capabilities.scope == "node"), None)
        if self._ranks.world == 1 or own is None:
            return
        hosts = len(set(self._ranks.exchange("hosts", host())))
        if hosts > 1:
            raise OptionError(
                f"{own.url} is said to be of each host alone (scope=node), and the ranks run on "
                f"{hosts} hosts: give a directory or store that all of them share"
            )

    def _open_repository(self) -> Repository | None:
        if not self._read_only and self._ranks.rank == 0:
            try:
                return self._made()
            except (CorruptCheckpoint, IncompatibleCheckpoint) as failure:
                if not heal_tops(self._places(), self._timeout_s):
                    raise
                warn(f"{failure}: it was written anew as other tiers have it")
                return self._made()
        try:
            return open_repository(self._store)
        except NoCheckpoint:
            return None

    def _existing(self) -> Repository:
        if self._repository is None:
            self._repository = open_repository(self._store)
        return self._repository

    def _made(self) -> Repository:
        # A new host with an empty home goes on with the run that its tiers hold.
        self._at_start = Tiers(self._tiers, self._timeout_s / _TIMES_ASKED, warn)
        run = self._at_start.run()
        repository = create_repository(self._store, run)
        self._at_start.check(repository.run, run)
        repository.hold = hold_for(self._at_start.standings)
        return repository

    def _places(self) -> list[Place]:
        """Where copies lie, nearest first. A writer does without none of what its root has."""
        home = Place(spoken_url(self._store.url), self._store, must_answer=not self._read_only)
        return [home, *(Place(tier.label, store, must_answer=False) for tier, store in self._tiers)]

    def _hierarchy(self) -> Hierarchy:
        """The checkpoints of the root and of all tiers.

        Raises:
            NoCheckpoint: Nobody holds any.
            StoreError: None is there, and a tier that may hold some cannot be reached.
        """
        if not self._tiers:
            return self._existing()
        return Hierarchy(self._places(), self._run(), self._timeout_s)

    def _run(self) -> str:
        failure: CheckpointError | None = None
        try:
            return self._existing().run
        except NoCheckpoint as none:
            failure = none
        for _, store in self._tiers:  # only reading: nobody made the root
            try:
                return read_run(store)
            except NoCheckpoint:
                continue
            except StoreError as bad:
                failure = bad
        raise failure

    def _heal(self, hierarchy: Hierarchy, report: RestoreReport) -> RestoreReport:
        """Write anew what a restore found damaged, and warn of it."""
        if self._tiers:
            exchange = None if self._read_only else self._ranks.exchange
            report = mend(hierarchy, report, self._ranks.rank, self._ranks.world, exchange)
            for message in in_words(report):
                warn(message)
        return report

    def _settle_others(self) -> None:
        """Finish what an older one of this process has under way."""
        if not self._read_only:
            for message in settle_others(self, self._existing().run, self._store.url):
                warn(message)

    def _take_over(self) -> None:
        """Finish what dead trainers of this run left."""
        if self._read_only:
            return

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
            number, why, is_medium = None, "", False
            try:
                number = self._at_start.claim(self._existing(), parent).number
            except CheckpointError as failure:
                failed.append(failure)
                why = f"claiming the root: rank 0 failed: {type(failure).__name__}: {failure}"
                is_medium = isinstance(failure, StoreError)
            claims = [dump_attempt(c).decode() for c in self._existing().claims]
            reached = [tier.label for tier, _ in self._at_start.reached]
            return [number, why, is_medium, claims, reached]

        told = self._ranks.first("claiming the root", claim)
        number, why, is_medium, claims, reached = told
        # Also of a claim that failed: its record may be there, and is no other job's.
        self._existing().claims[:] = [parse_attempt(c.encode(), "claim") for c in claims]
        if number is None:
            if failed:
                raise failed.pop()
            # A medium that fails is no rank that does: all may go on, and try again.
            raise StoreError(why, retryable=True) if is_medium else RankFailed((0,), why)
        self._attempt = number
        if self._ranks.world > 1:
            self._find_claim(number, reached)

    def _find_claim(self, attempt: int, reached: Sequence[str]) -> None:
        """Make sure that all ranks see the places that rank 0 sees: its claim stands in each.

        Raises:
            OptionError: One is another place here, as a path is that each host has for itself.
        """
        name = attempt_name(attempt)
        places = {"root": self._store}
        places |= {f"tier {t.label}": s for t, s in self._tiers if t.label in reached}

        def look() -> dict[str, str | None]:
            calls = [partial(record_in, store, name) for store in places.values()]
            found = zip(places, within(self._timeout_s / _TIMES_ASKED, calls), strict=True)
            # What cannot be read is no other place; a tier need not be there.
            return {what: None if isinstance(r, CheckpointError) else r for what, r in found}

        told = self._ranks.each("looking for the claim", look)
        for what, expected in told[0].items():
            for rank, found in enumerate(told):
                record = found.get(what, "")
                if None not in (record, expected) and record != expected:
                    raise OptionError(
                        f"{what} is another place on rank {rank} than on rank 0, or none there: "
                        f"give all ranks the same ones, that they share"
                    )

    def _take_attempt(self, step: int, last_step: int) -> None:
        """Have an attempt to save under, so that ``(attempt, step)`` was never used."""
        self._claim_behind()
        if self._attempt is None:
            self._settle_others()
            self._take_over()
            self._ranks.first("looking at the root", self._refuse_other_checkpoints)
            self._start_attempt(None)
        elif step <= last_step:
            # Back in time without a restore: a branch, from the newest checkpoint before.
            self._settle(None)
            before = self._ranks.first("branching", lambda: self._before(step))
            self._start_attempt(CheckpointId(*before))
        elif self._snapshotter is None:
            # Else the persister asks, before it writes: no step waits for a store.
            asked = partial(self._existing().check_writer, self._attempt)
            self._ranks.first("looking for a newer job", asked)

    def _lost(self, step: int, last_step: int, *, is_asked: bool) -> Handle | None:
        """Have an attempt to save under. Where the store fails a save that nobody asked for ends no
        training: its handle says so, as of one that fails later; all ranks get one, or none.
        """
        try:
            self._take_attempt(step, last_step)
        except StoreError as failure:
            if is_asked or not (self._ranks.world == 1 or self._finishing is not None):
                raise
            return failed_handle(step, failure)
        return None

    def _refuse_other_checkpoints(self) -> None:
        found = self._existing().survey().committed
        if found:
            raise OptionError(
                f"save: {self._store.url} holds checkpoints up to step {max(found).step}: call "
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
                self._tiers if self._ranks.rank == 0 else (),
                self._board,
            )
            self._persister = persister
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
        self._claim_if_over()
        if self._snapshotter is not None:
            self._snapshotter.note_step(step)
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
            return failed_handle(step, told)

    # --- what became of saves -------------------------------------------------------

    def _failure(self) -> BaseException | None:
        """What failed behind the training since the latest call; warns of what was dropped."""
        if self._snapshotter is not None:
            self._outcomes.pending += self._snapshotter.late()
        for message in self._board.complaints():
            warn(message)
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
        return not self._outcomes.pending and self._await_finishing(0.0)

    def _wait_for_pending(self, limit_s: float | None) -> None:
        """Wait until every save of this rank is durable or failed."""
        if self._snapshotter is not None:
            self._outcomes.pending += self._snapshotter.drain()
        wait_futures([h.durable for h in self._outcomes.pending], limit_s)
        self._await_finishing(limit_s)

    def _settle(self, limit_s: float | None) -> bool:
        """Wait until every save so far is durable or failed, on all ranks."""
        self._wait_for_pending(limit_s)
        # Some may have to wait for what others never stored, as long as that takes to be sure.
        done = self._agreed.meet("wait", self._settled, self._timeout_s + (limit_s or 0.0))
        if done:
            self._claim_behind()
        return done

    def _await_tier(self, name: str, limit_s: float | None) -> bool:
        """Have the newest go to a tier, and wait until it is there; rank 0 does both."""

        def there() -> bool:
            persister = self._persister
            if self._ranks.rank or persister is None:
                return self._ranks.rank > 0
            return self._board.await_served(name, persister.ask_tier(name), limit_s)

        longest_s = _ENDLESS_S if limit_s is None else limit_s
        return all(self._ranks.each(f"waiting for tier {name}", there, longest_s))

    # --- the end ----------------------------------------------------------------------

    def _forget(self) -> None:
        """What it started was closed for another one that writes the root from now on."""
        self._snapshotter = self._persister = None

    def _end(self) -> bool:
        """Drain within ``grace_s`` and give back what was started, without a word to other ranks;
        raises what failed. Whether there was anything to end.
        """
        if self._closed or os.getpid() != self._pid:
            return False  # the checkpointer of the parent of a fork is not the child's to close
        in_time = self._snapshotter is None or self._snapshotter.close(self._grace_s)
        self._closed = True  # not before: a close that was interrupted can be made again
        if self._snapshotter is not None and self._ranks.rank == 0:
            for message in self._board.unfinished():
                warn(message)
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
