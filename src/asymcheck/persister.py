"""The trainer's side of persisting: a thread, or a process that outlives the trainer."""

from __future__ import annotations

import json
import logging
import os
import queue
import select
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Any, Literal, Protocol

from asymcheck.encoding import Chooser
from asymcheck.errors import CheckpointError, OptionError, StoreError
from asymcheck.events import Sink, Span, Stage, discard
from asymcheck.memory.arena import Arena, Slot
from asymcheck.memory.process import ProcessId
from asymcheck.messages import MESSAGE_BYTES, Durable, rebuild_durable, rebuild_error
from asymcheck.persist import open_pidfd, persist, tidy
from asymcheck.planning.retention import Retention
from asymcheck.planning.selection import RAW, Batching, Selection
from asymcheck.storage.local import LocalStore
from asymcheck.storage.manifest import Attempt, dump_attempt
from asymcheck.storage.repository import Repository
from asymcheck.storage.store import Store

_log = logging.getLogger(__name__)

LOG_NAME = "persist.log"
"""Where a persister process writes what it has to say, in the root of a local store."""
_TRIES = 3
_MODULE = "asymcheck.persist"
_START = (  # this very package, from wherever the trainer has it, and nothing else from there
    "import sys; sys.path.insert(0, sys.argv[2]); import asymcheck; "
    "sys.path.append(sys.path.pop(0)); from asymcheck.persist import main; main(*sys.argv[3:])"
)
_PAUSE_S = 0.2
_POLL_MS = 200
_TAIL_BYTES = 2000
_CLAIMS = 100  # as many as surely fit into a message; more than will ever fail one by one


class Persister(Protocol):
    """Takes slots to committed checkpoints, in the order in which they come."""

    def begin(self, slot: Slot, step: int) -> Future[Durable]:
        """Queue a slot that is being filled; returns at once. The slot is read until the
        future is done.
        """
        ...

    def close(self, timeout_s: float) -> bool:
        """End once everything is done; returns whether that was in time."""
        ...


@dataclass
class _Job:
    slot: Slot
    step: int
    future: Future[Durable]
    ends: int = 0  # of processes that were at work on it


class PersistThread:
    """Persists on a daemon thread of the trainer.

    Args:
        repository: Written by this thread alone from now on.
        retention: Applied after each commit.
        sink: Receives spans, on this thread.
        selection: How chunks may be encoded.
        batching: How they are merged into writes.
    """

    def __init__(
        self,
        repository: Repository,
        retention: Retention,
        sink: Sink,
        selection: Selection = RAW,
        batching: Batching = "ready",
    ) -> None:
        self._chooser = Chooser(selection, batching)
        self._repository = repository
        self._retention = retention
        self._sink = sink
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="asymcheck-persist", daemon=True)
        self._thread.start()

    def begin(self, slot: Slot, step: int) -> Future[Durable]:
        """See ``Persister``."""
        slot.persister = ProcessId(0, 0)
        job = _Job(slot, step, Future())
        self._jobs.put(job)
        return job.future

    def close(self, timeout_s: float) -> bool:
        """See ``Persister``."""
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                durable = persist(
                    self._repository,
                    job.slot,
                    self._retention,
                    self._sink,
                    lambda: True,
                    self._chooser,
                )
            except BaseException as failure:  # noqa: BLE001  it is the caller's to see
                _settle(job, failure)
            else:
                _settle(job, durable)
        tidy(self._repository)


class PersistProcess:
    """Persists in a process of its own, which finishes sealed slots though the trainer dies.

    A process that dies is replaced, and what it had under way is begun again; what ends one
    process after the other is given up, and so is an idle start that fails again and again
    until there is something to do.

    Args:
        url: Opens the store in the other process.
        run: Id of the run.
        arena: Where the slots are from.
        retention: Applied after each commit.
        sink: Receives spans, on a thread of this class.
        grace_s: How long an unsealed slot is waited for after SIGTERM.
        log_path: Where the process writes its log; ``None`` for a file without a name.
        claims: As ``Repository.claims``, looked at with each slot.
        selection: How chunks may be encoded.
        batching: How they are merged into writes.

    Raises:
        StoreError: The process could not be started.
    """

    def __init__(
        self,
        url: str,
        run: str,
        arena: Arena,
        retention: Retention,
        sink: Sink,
        grace_s: float,
        log_path: Path | None,
        claims: Sequence[Attempt] = (),
        selection: Selection = RAW,
        batching: Batching = "ready",
    ) -> None:
        self._claims = claims
        self._config = json.dumps(
            {
                "url": url,
                "run": run,
                "trainer": list(_this_process()),
                "grace_s": grace_s,
                "retention": asdict(retention),
                "selection": asdict(selection),
                "batching": batching,
                "spans": sink is not discard,  # nobody else would read them
            }
        )
        self._arena = arena
        self._sink = sink
        self._log = _ProcessLog(log_path)
        self._changed = threading.Condition(threading.RLock())
        self._jobs: deque[_Job] = deque()
        self._closing = False
        self._ended = 0  # processes that ended since a job was done
        try:
            self._process, self._control, self._watch = self._spawn()
        except OSError as failure:
            raise StoreError(
                f"the persister process could not be started: {failure}; Checkpointer(…, "
                f"persist='thread') needs none",
                retryable=True,
            ) from failure
        self._is_up = True
        self._reader = threading.Thread(target=self._read, name="asymcheck-reports", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The process that persists now."""
        return self._process.pid

    def begin(self, slot: Slot, step: int) -> Future[Durable]:
        """See ``Persister``."""
        job = _Job(slot, step, Future())
        with self._changed:
            self._jobs.append(job)
            self._hand_over(job)
            self._changed.notify_all()
        return job.future

    def close(self, timeout_s: float) -> bool:
        """See ``Persister``."""
        until_s = monotonic() + timeout_s
        with self._changed:
            self._closing = True
            self._send({"close": True})
            self._changed.notify_all()
        self._reader.join(timeout_s)
        try:
            self._process.wait(max(0.0, until_s - monotonic()))
        except subprocess.TimeoutExpired:
            return False
        return not self._reader.is_alive()

    # --- talking to the process ---------------------------------------------

    def _spawn(self) -> tuple[subprocess.Popen[bytes], socket.socket, int | None]:
        words = (sys.executable, "-P", "-c", _START, _MODULE, str(Path(__file__).parents[1]))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                fd = theirs.fileno()
                process = subprocess.Popen(
                    [*words, str(fd), self._config],
                    start_new_session=True,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=self._log.open(),
                    cwd="/",
                    pass_fds=(fd,),
                )
        except BaseException:
            ours.close()
            raise
        return process, ours, open_pidfd(ProcessId.of(process.pid))

    def _hand_over(self, job: _Job) -> None:
        if not self._is_up:
            return  # the next process gets it
        job.slot.persister = ProcessId.of(self._process.pid)
        message = {
            "slot": job.slot.token,
            "path": str(job.slot.path) if job.slot.path else None,
            "live": self._arena.tokens(),
            "claims": [dump_attempt(c).decode() for c in self._claims[-_CLAIMS:]],
        }
        self._send(message, job.slot.fd)

    def _send(self, message: dict[str, Any], *fds: int) -> None:
        try:
            socket.send_fds(self._control, [json.dumps(message).encode()], fds)
        except OSError as failure:
            # The reader sees its death too, replaces it and hands everything over again.
            _log.debug("persister %d does not listen: %s", self._process.pid, failure)

    # --- on the thread of the reports ---------------------------------------

    def _read(self) -> None:
        while True:
            self._listen()
            if not self._replace():
                self._log.close()
                return

    def _listen(self) -> None:
        """Take reports until the process has ended. Its end of the socket may live on in a
        process that was forked meanwhile, so the process itself is watched too.
        """
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        if self._watch is not None:
            poll.register(self._watch, select.POLLIN)
        while True:
            ready = [fd for fd, _ in poll.poll(None if self._watch is not None else _POLL_MS)]
            if self._control.fileno() in ready:
                try:
                    data = self._control.recv(MESSAGE_BYTES)
                except OSError:
                    return
                if not data:
                    return
                self._take(json.loads(data))
            elif ready or self._process.poll() is not None:
                return

    def _take(self, message: dict[str, Any]) -> None:
        if "span" in message:
            stage, *rest = message["span"]
            self._sink(Span(Stage(stage), *rest))
        elif "done" in message or "failed" in message:
            with self._changed:
                self._ended = 0
                job = self._jobs.popleft()
            told = message.get("failed")
            _settle(job, rebuild_error(told) if told else rebuild_durable(message["done"]))

    def _replace(self) -> bool:
        """The process is gone: start another for what is left; returns whether there is one."""
        code = self._process.wait()
        with self._changed:
            self._is_up = False
            self._control.close()
            if self._watch is not None:
                os.close(self._watch)
        why = f"ended with {code}"
        while True:
            self._count_end(why)
            with self._changed:
                while not (self._jobs or self._closing or self._ended < _TRIES):
                    self._changed.wait()
                if self._closing and not self._jobs:
                    return False
                _log.warning("the persister process %s: starting another", why)
                try:
                    self._process, self._control, self._watch = self._spawn()
                except OSError as failure:
                    why = f"could not be started: {failure}"
                    self._changed.wait(_PAUSE_S)
                    continue
                self._is_up = True
                for job in self._jobs:
                    self._hand_over(job)
                if self._closing:
                    self._send({"close": True})
                return True

    def _count_end(self, why: str) -> None:
        """Blame the first job, which it was at work on; give it up when it was so too often."""
        with self._changed:
            self._ended += 1
            if not self._jobs:
                return
            self._jobs[0].ends += 1
            if self._jobs[0].ends < _TRIES:
                return
            job = self._jobs.popleft()
        _settle(
            job,
            StoreError(
                f"step {job.step}: the persister process failed {_TRIES} times, it last {why}; "
                f"{self._log.tail()}",
                retryable=False,
            ),
        )


class _ProcessLog:
    """Where a persister process writes what it has to say."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._fd = -1
        self._start = 0

    def open(self) -> int:
        """A descriptor for a process that starts now; ``tail`` shows what it writes."""
        if self._path is not None:
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            fd = os.open(self._path, flags, 0o644)
        else:
            fd = os.memfd_create("asymcheck-log")
        self.close()
        self._fd, self._start = fd, os.fstat(fd).st_size
        return fd

    def tail(self) -> str:
        """A clause that quotes the end of what the latest process wrote."""
        where = f"its log {self._path}" if self._path else "its log"
        if self._fd < 0:
            return f"{where} could not be opened"
        size = os.fstat(self._fd).st_size
        start = max(self._start, size - _TAIL_BYTES)
        text = os.pread(self._fd, size - start, start).decode(errors="replace").strip()
        return f"{where} ends with:\n{text}" if text else f"{where} is empty"

    def close(self) -> None:
        """Give the descriptor back; a process that has it keeps its own."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def is_own_memory(store: Store) -> bool:
    """Whether a store is this process's own memory, which no other can open."""
    return "memory:" in store.url


def who_persists(
    asked: Literal["auto", "process", "thread"], root: object, store: Store
) -> Literal["process", "thread"]:
    """Choose between a process and a thread.

    Args:
        asked: What the user said.
        root: What the user gave: a store object may hold anything, so only a path or URL can
            be opened by another process.
        store: The store of that root.

    Raises:
        OptionError: A process was asked for and cannot open the store.
    """
    if asked not in ("auto", "process", "thread"):
        raise OptionError(f"persist: expected 'auto', 'process' or 'thread', found {asked!r}")
    shared = isinstance(root, str | os.PathLike) and not is_own_memory(store)
    if asked == "auto":
        return "process" if shared else "thread"
    if asked == "process" and not shared:
        raise OptionError(
            f"persist: {store.url} can only be opened by this process, found 'process': use "
            f"'thread' or 'auto', or give the root as a path or URL"
        )
    return asked


def start_persister(
    kind: Literal["process", "thread"],
    repository: Repository,
    arena: Arena,
    retention: Retention,
    sink: Sink,
    grace_s: float,
    selection: Selection,
    batching: Batching,
) -> Persister:
    """Start the persister of that kind; see the classes for the arguments."""
    if kind == "thread":
        return PersistThread(repository, retention, sink, selection, batching)
    store = repository.store
    log_path = store.root / LOG_NAME if isinstance(store, LocalStore) else None
    return PersistProcess(
        store.url,
        repository.run,
        arena,
        retention,
        sink,
        grace_s,
        log_path,
        repository.claims,
        selection,
        batching,
    )


def _this_process() -> tuple[int, int]:
    me = ProcessId.of(os.getpid())
    return me.pid, me.start


def _settle(job: _Job, result: Durable | BaseException) -> None:
    if isinstance(result, Durable):
        _log.info(
            "step %d is durable: %d bytes, %.3f s after its boundary",
            result.step,
            result.stored_bytes,
            result.durable_s,
        )
        job.future.set_result(result)
    else:
        failure = _told(result)
        failure.add_note(f"while step {job.step} was being persisted")
        job.future.set_exception(failure)


def _told(failure: BaseException) -> CheckpointError:
    """A failure as the training thread may raise it: a ``SystemExit`` of a store's driver, say,
    must not end the training as if it were over.
    """
    if isinstance(failure, CheckpointError):
        return failure
    told = CheckpointError(f"the checkpoint was lost: its writer ended with {failure!r}")
    told.__cause__ = failure
    return told
