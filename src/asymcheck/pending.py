"""What one of several ranks stored, until the others have too: then it is a checkpoint.

Nobody asks another rank anything: each looks at the store. Whoever sees the indexes of all ranks
may write the manifest; rank 0 does at once, rank r only if nobody has within r times two seconds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter, sleep

from asymcheck.encoding import Chooser
from asymcheck.errors import RankMissing, StoreError
from asymcheck.events import Sink, Span, Stage
from asymcheck.messages import Durable, Stored
from asymcheck.persist import apply_retention
from asymcheck.planning.retention import CheckpointId, Retention
from asymcheck.storage.listing import sizes_at
from asymcheck.storage.manifest import Manifest
from asymcheck.storage.names import index_name
from asymcheck.storage.repository import Repository

COMMIT_TIMEOUT_S = 60.0
"""How long a rank waits for the others, where nobody says."""
_TURN_S = 2.0
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.02, 0.5
_SPOKEN_RANKS = 8


class Pending:
    """One stored part. Used by one thread at a time.

    Args:
        repository: Where it is.
        stored: The part.
        retention: Rank 0 applies it after the commit, whoever wrote the manifest.
        sink: Receives spans.
        timeout_s: How long the others are waited for, from now on.

    Attributes:
        due_s: Monotonic time to look again.
        until_s: Monotonic time until which the others are waited for.
        base: What retention keeps for the next one.
    """

    def __init__(
        self,
        repository: Repository,
        stored: Stored,
        retention: Retention,
        sink: Sink,
        timeout_s: float = COMMIT_TIMEOUT_S,
    ) -> None:
        self._repository = repository
        self._stored = stored
        self._retention = retention
        self._sink = sink
        self._timeout_s = timeout_s
        self._pause_s = _FIRST_PAUSE_S
        self._begun_s = self.due_s = perf_counter()
        self.until_s = self._begun_s + timeout_s
        self.base: CheckpointId | None = None

    def look(self) -> Durable | None:
        """Look once whether the others are there; blocks for the store alone.

        Returns:
            The durable checkpoint; ``None`` while it has to be waited for.

        Raises:
            RankMissing: The time is over.
            SupersededWriter: A newer attempt has claimed the root.
            CheckpointError: It cannot be committed. What was stored stays.
        """
        is_last = perf_counter() >= self.until_s
        try:
            found = self._find(is_last)
        except StoreError as failure:
            if is_last or not failure.retryable:
                raise
            found = None
        if found is None and is_last:
            raise self._missing()
        self.due_s = perf_counter() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LAST_PAUSE_S)
        return found

    def wait(self) -> Durable:
        """Look until all are there; blocks, at most as long as was said. Raises as ``look``."""
        while True:
            found = self.look()
            if found is not None:
                return found
            sleep(max(0.0, min(self.due_s, self.until_s) - perf_counter()))

    def _find(self, is_last: bool) -> Durable | None:
        stored, at = self._stored, self._stored.at
        manifest = self._repository.committed(at)
        if manifest is None:
            self._repository.check_writer(at.attempt)
            if index_name(at, stored.rank) not in sizes_at(self._repository.store, at):
                manifest = self._repository.committed(at)
                # Only retention removes it, after the commit.
                return self._durable(manifest)
            if is_last or perf_counter() >= self._begun_s + stored.rank * _TURN_S:
                manifest = self._repository.try_commit(at, stored.world)
        return None if manifest is None else self._durable(manifest)

    def _durable(self, manifest: Manifest | None) -> Durable:
        stored, done_s = self._stored, perf_counter()
        part = stored.ended()
        if manifest is not None:
            base = manifest.base.at.step if manifest.base else 0
            part = replace(part, fidelity=manifest.fidelity, base=base)
        self._sink(Span(Stage.COMMIT, part.step, self._begun_s, done_s - self._begun_s))
        if manifest is not None and stored.rank == 0:
            apply_retention(self._repository, stored.at, self._retention, self._sink, self.base)
        return part

    def _missing(self) -> RankMissing:
        at, world = self._stored.at, self._stored.world
        missing = self._repository.missing_ranks(at, world)
        return rank_missing(at.step, world, missing, self._timeout_s)


def await_others(
    repository: Repository,
    found: Durable | Stored,
    retention: Retention,
    sink: Sink,
    timeout_s: float,
) -> Durable:
    """Wait in the foreground for the other ranks, where there are any; see ``Pending``."""
    if isinstance(found, Durable):
        return found
    return Pending(repository, found, retention, sink, timeout_s).wait()


def rank_missing(step: int, world: int, missing: dict[int, str], timeout_s: float) -> RankMissing:
    """The error that names the ranks that are missing, and what of them."""
    ranks = sorted(missing)
    named = ", ".join(str(rank) for rank in ranks[:_SPOKEN_RANKS])
    more = f" and {len(ranks) - _SPOKEN_RANKS} more" if len(ranks) > _SPOKEN_RANKS else ""
    why = f" ({missing[ranks[0]]})" if ranks else ""
    return RankMissing(
        step,
        ranks,
        f"of {world} ranks, rank {named or '?'}{more} stored no part of it within {timeout_s:g} "
        f"s{why}. Earlier checkpoints are intact: look whether that rank lives, what it says, and "
        f"whether it sees the same root",
    )


class Backlog:
    """Waits for other ranks with any number of parts, on a thread of its own, so that the next
    one can be persisted meanwhile. The thread is a daemon and lives while there is something.

    Args:
        timeout_s: How long each part waits.
    """

    def __init__(
        self,
        repository: Repository,
        retention: Retention,
        sink: Sink,
        timeout_s: float = COMMIT_TIMEOUT_S,
    ) -> None:
        self._repository, self._retention, self._sink = repository, retention, sink
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._waiting: list[tuple[Pending, Callable[[Durable | BaseException], None]]] = []
        self._thread: threading.Thread | None = None

    def _make(self, stored: Stored) -> Pending:
        how = (self._retention, self._sink, self._timeout_s)
        return Pending(self._repository, stored, *how)

    def wait(self, stored: Stored, chooser: Chooser) -> Durable:
        """Wait for the others in the foreground, where the next one stands on this one; raises as
        ``Pending.look``.
        """
        pending = self._make(stored)
        pending.base = chooser.base
        try:
            return pending.wait()
        except BaseException as failure:
            chooser.fail(failure)
            raise

    def add(self, stored: Stored, settle: Callable[[Durable | BaseException], None]) -> None:
        """Wait for the others in the background; ``settle`` gets the end, on that thread."""
        with self._changed:
            self._waiting.append((self._make(stored), settle))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="asymcheck-commit", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def close(self, timeout_s: float) -> bool:
        """Wait until nothing is left, each part for that long at most; whether nothing is."""
        until_s = perf_counter() + timeout_s
        with self._changed:
            for pending, _ in self._waiting:
                pending.until_s = min(pending.until_s, until_s)
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._thread is None, timeout_s + _LAST_PAUSE_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._thread = None
                    self._changed.notify_all()
                    return
                now_s = perf_counter()
                due = [w for w in self._waiting if min(w[0].due_s, w[0].until_s) <= now_s]
                if not due:
                    next_s = min(min(p.due_s, p.until_s) for p, _ in self._waiting)
                    self._changed.wait(next_s - now_s)
                    continue
            for waiting in due:
                self._look(*waiting)

    def _look(self, pending: Pending, settle: Callable[[Durable | BaseException], None]) -> None:
        try:
            found: Durable | BaseException | None = pending.look()
        except BaseException as failure:  # noqa: BLE001  it is the caller's to see
            found = failure
        if found is not None:
            settle(found)
            with self._changed:
                self._waiting.remove((pending, settle))
