"""From a sealed slot to a committed checkpoint: encode, flush, commit, retain.

No torch here: the bytes are already in host memory, and everything else that is needed
travels in one small message.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from time import monotonic, perf_counter

from asymcheck.errors import CheckpointError, StoreError, SupersededWriter
from asymcheck.events import Sink, Stage, timed
from asymcheck.memory.arena import Arena, Slot
from asymcheck.planning.layout import Extent
from asymcheck.planning.retention import CheckpointId, Retention
from asymcheck.storage.flush import Encoded, flush
from asymcheck.storage.index import Index, Leaf
from asymcheck.storage.repository import Repository

_log = logging.getLogger(__name__)

_SPACE_MARGIN_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Sealed:
    """A captured state whose bytes will not change any more.

    Attributes:
        at: The checkpoint that it becomes.
        slot: Holds the image; given back to the arena when persisting ends.
        leaves: What lies where in the image, ascending.
        aliases: Further keys of leaves.
        chunks: Ranges of the image that are stored.
        metrics: What the caller passed.
        versions: Libraries that took part.
        created_s: Wall-clock time of the capture.
        sealed_s: ``perf_counter`` at the end of the capture.
    """

    at: CheckpointId
    slot: Slot
    leaves: tuple[Leaf, ...]
    aliases: Mapping[str, str]
    chunks: tuple[Extent, ...]
    metrics: Mapping[str, float]
    versions: Mapping[str, str]
    created_s: float
    sealed_s: float

    @property
    def raw_bytes(self) -> int:
        """Bytes to store before encoding."""
        return sum(c.nbytes for c in self.chunks)


@dataclass(frozen=True, slots=True)
class Durable:
    """A committed checkpoint, and what it took.

    Attributes:
        step: Training step.
        attempt: The attempt that wrote it.
        raw_bytes: Bytes captured.
        stored_bytes: Bytes written, with index and without manifest.
        persist_s: Seconds of encode, flush and commit.
        durable_s: Seconds from the end of the capture until it was durable.
    """

    step: int
    attempt: int
    raw_bytes: int
    stored_bytes: int
    persist_s: float
    durable_s: float


def persist(repository: Repository, sealed: Sealed, retention: Retention, sink: Sink) -> Durable:
    """Take one sealed slot to a committed checkpoint; blocks.

    On failure everything that it wrote is removed again, as far as the store lets it.

    Raises:
        StoreError: The medium failed or is too full.
        SupersededWriter: A newer attempt has claimed the root.
    """
    start_s = perf_counter()
    at = sealed.at
    try:
        _check_room(repository, sealed)
        with timed(sink, Stage.FLUSH, at.step, sealed.raw_bytes):
            chunks, packs = flush(
                repository.store,
                at,
                0,
                sealed.chunks,
                lambda c: Encoded(c, sealed.slot.view[c.start : c.stop], "raw"),
            )
        index = Index(
            run=repository.run,
            at=at,
            rank=0,
            world=1,
            created_s=sealed.created_s,
            metrics=sealed.metrics,
            versions=sealed.versions,
            leaves=sealed.leaves,
            aliases=sealed.aliases,
            chunks=tuple(chunks),
            packs=tuple(packs),
        )
        with timed(sink, Stage.COMMIT, at.step):
            manifest = repository.commit(index)
    except BaseException as failure:
        _discard(repository, at)
        if isinstance(failure, StoreError):
            _check_not_overtaken(repository, at, failure)
        raise
    done_s = perf_counter()
    with timed(sink, Stage.RETAIN, at.step):
        try:
            repository.retain(at, retention)
        except StoreError as failure:
            # The checkpoint stands; what could not be removed goes with a later commit.
            _log.warning("step %d: retention failed: %s", at.step, failure)
    return Durable(
        step=at.step,
        attempt=at.attempt,
        raw_bytes=sealed.raw_bytes,
        stored_bytes=manifest.stored_bytes,
        persist_s=done_s - start_s,
        durable_s=done_s - sealed.sealed_s,
    )


def _check_room(repository: Repository, sealed: Sealed) -> None:
    free = repository.store.free_bytes()
    need = sealed.raw_bytes + _SPACE_MARGIN_BYTES
    if free is not None and free < need:
        raise StoreError(
            f"{repository.store.url}: step {sealed.at.step} needs {need} bytes, {free} are free: "
            f"free some space or lower keep_last; the next save works once there is room",
            retryable=True,
        )


def _check_not_overtaken(repository: Repository, at: CheckpointId, failure: StoreError) -> None:
    """A newer job that claims the root breaks writes in progress: say that, not how it shows."""
    try:
        repository.check_writer(at.attempt)
    except SupersededWriter as overtaken:
        raise overtaken from failure
    except StoreError:
        return  # the medium is down: the first failure tells more


def _discard(repository: Repository, at: CheckpointId) -> None:
    try:
        repository.discard(at)
    except StoreError as failure:
        _log.warning("step %d: left-overs stay until the next start: %s", at.step, failure)


def _told(failure: BaseException) -> CheckpointError:
    """A failure as the training thread may raise it: a ``SystemExit`` of a store's driver, say,
    must not end the training as if it were over.
    """
    if isinstance(failure, CheckpointError):
        return failure
    told = CheckpointError(f"the checkpoint was lost: its writer ended with {failure!r}")
    told.__cause__ = failure
    return told


class PersistThread:
    """Persists sealed slots one after the other, in the order in which they came.

    The thread is a daemon; at interpreter exit what was submitted is waited for.

    Args:
        repository: Used by this thread alone from now on, but for reading.
        arena: Gets each slot back.
        retention: Applied after each commit.
        sink: Receives spans, on this thread.
        grace_s: How long the exit of the interpreter may wait.
    """

    def __init__(
        self,
        repository: Repository,
        arena: Arena,
        retention: Retention,
        sink: Sink,
        grace_s: float,
    ) -> None:
        self._repository = repository
        self._arena = arena
        self._retention = retention
        self._sink = sink
        self._grace_s = grace_s
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._pending: set[Future[Durable]] = set()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="asymcheck-persist", daemon=True)
        self._thread.start()
        atexit.register(self._drain_at_exit)

    def submit(self, sealed: Sealed) -> Future[Durable]:
        """Queue a sealed slot; returns at once. The slot is the persister's from now on."""
        future: Future[Durable] = Future()
        with self._lock:
            self._pending.add(future)

        def work() -> None:
            try:
                result = persist(self._repository, sealed, self._retention, self._sink)
            except BaseException as failure:  # noqa: BLE001  it is the caller's to see
                told = _told(failure)
                told.add_note(f"while step {sealed.at.step} was being persisted")
                self._settle(future, sealed.slot)
                future.set_exception(told)
            else:
                self._settle(future, sealed.slot)
                _log.info(
                    "step %d is durable: %d bytes in %.3f s",
                    result.step,
                    result.stored_bytes,
                    result.durable_s,
                )
                future.set_result(result)

        self._work.put(work)
        return future

    def pending(self) -> list[Future[Durable]]:
        """What was submitted and is neither durable nor failed."""
        with self._lock:
            return list(self._pending)

    def close(self, timeout_s: float) -> bool:
        """End the thread once everything submitted is done; returns whether it ended in time.

        Objects of checkpoints that retention removed go now rather than at the next commit.
        """
        atexit.unregister(self._drain_at_exit)
        self._work.put(self._finish)
        self._work.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _finish(self) -> None:
        try:
            self._repository.finish()
        except CheckpointError as failure:
            _log.warning("left-overs stay until the next start: %s", failure)

    def _settle(self, future: Future[Durable], slot: Slot) -> None:
        self._arena.free(slot)
        with self._lock:
            self._pending.discard(future)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def _drain_at_exit(self) -> None:
        until_s = monotonic() + self._grace_s
        while self.pending() and self._thread.is_alive() and monotonic() < until_s:
            self._thread.join(0.005)
