"""The trainer's side of persisting: a thread, or a process that outlives the trainer."""

from __future__ import annotations

import json
import logging
import os
import queue
import socket
import subprocess
import sys
import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import IO, Any, Literal, Protocol

from asymcheck.errors import CheckpointError, OptionError, StoreError
from asymcheck.events import Sink, Span, Stage
from asymcheck.memory.arena import Arena, ProcessId, Slot
from asymcheck.persist import Durable, persist, rebuild_error, tidy
from asymcheck.planning.retention import Retention
from asymcheck.storage.local import LocalStore
from asymcheck.storage.repository import Repository
from asymcheck.storage.store import Store

_log = logging.getLogger(__name__)

_TRIES = 3


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
    tries: int = 0


class PersistThread:
    """Persists on a daemon thread of the trainer.

    Args:
        repository: Written by this thread alone from now on.
        retention: Applied after each commit.
        sink: Receives spans, on this thread.
    """

    def __init__(self, repository: Repository, retention: Retention, sink: Sink) -> None:
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
                    self._repository, job.slot, self._retention, self._sink, lambda: True
                )
            except BaseException as failure:  # noqa: BLE001  it is the caller's to see
                _settle(job, failure)
            else:
                _settle(job, durable)
        tidy(self._repository)


class PersistProcess:
    """Persists in a process of its own, which finishes sealed slots though the trainer dies.

    A process that dies is replaced, and what it had under way is begun again.

    Args:
        url: Opens the store in the other process.
        run: Id of the run.
        arena: Where the slots are from.
        retention: Applied after each commit.
        sink: Receives spans, on a thread of this class.
        grace_s: How long an unsealed slot is waited for after SIGTERM.
        log_path: Where the process writes its log; ``None`` for nowhere.
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
    ) -> None:
        self._config = json.dumps(
            {
                "url": url,
                "run": run,
                "trainer": list(_this_process()),
                "grace_s": grace_s,
                "retention": asdict(retention),
            }
        )
        self._arena = arena
        self._sink = sink
        self._log_path = log_path
        self._lock = threading.RLock()
        self._jobs: deque[_Job] = deque()
        self._closing = False
        self._process, self._control = self._spawn()
        self._reader = threading.Thread(target=self._read, name="asymcheck-reports", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The process that persists now."""
        return self._process.pid

    def begin(self, slot: Slot, step: int) -> Future[Durable]:
        """See ``Persister``."""
        job = _Job(slot, step, Future())
        with self._lock:
            self._jobs.append(job)
            self._hand_over(job)
        return job.future

    def close(self, timeout_s: float) -> bool:
        """See ``Persister``."""
        until_s = monotonic() + timeout_s
        with self._lock:
            self._closing = True
            self._send({"close": True})
        self._reader.join(timeout_s)
        try:
            self._process.wait(max(0.0, until_s - monotonic()))
        except subprocess.TimeoutExpired:
            return False
        return not self._reader.is_alive()

    def _spawn(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, self._open_log() as log:
            environment = dict(os.environ)
            package_root = str(Path(__file__).resolve().parents[1])
            paths = [package_root, *filter(None, [environment.get("PYTHONPATH")])]
            environment["PYTHONPATH"] = os.pathsep.join(paths)
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "asymcheck.persist",
                    str(theirs.fileno()),
                    self._config,
                ],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                cwd="/",
                env=environment,
                pass_fds=(theirs.fileno(),),
            )
        return process, ours

    def _open_log(self) -> IO[bytes]:
        return open(self._log_path or os.devnull, "ab")

    def _hand_over(self, job: _Job) -> None:
        job.tries += 1
        job.slot.persister = ProcessId.of(self._process.pid)
        message = {
            "slot": job.slot.token,
            "path": str(job.slot.path) if job.slot.path else None,
            "live": self._arena.tokens(),
        }
        self._send(message, job.slot.fd)

    def _send(self, message: dict[str, Any], *fds: int) -> None:
        try:
            socket.send_fds(self._control, [json.dumps(message).encode()], fds)
        except OSError as failure:
            # The reader sees its death too, replaces it and hands everything over again.
            _log.debug("persister %d does not listen: %s", self._process.pid, failure)

    def _read(self) -> None:
        while True:
            try:
                data = self._control.recv(1 << 16)
            except OSError:
                data = b""
            if data:
                self._take(json.loads(data))
            elif not self._replace():
                return

    def _take(self, message: dict[str, Any]) -> None:
        if "span" in message:
            stage, *rest = message["span"]
            self._sink(Span(Stage(stage), *rest))
        elif "done" in message or "failed" in message:
            with self._lock:
                job = self._jobs.popleft()
            told = message.get("failed")
            _settle(job, rebuild_error(told) if told else Durable(**message["done"]))

    def _replace(self) -> bool:
        """The process is gone: start another for what is left; returns whether there is one."""
        code = self._process.wait()
        with self._lock:
            self._control.close()
            if self._closing and not self._jobs:
                return False
            while self._jobs and self._jobs[0].tries >= _TRIES:
                job = self._jobs.popleft()
                _settle(job, self._given_up(job.step, code))
            if self._closing and not self._jobs:
                return False
            _log.warning("persister process ended with %d: starting another", code)
            self._process, self._control = self._spawn()
            for job in self._jobs:
                self._hand_over(job)
            if self._closing:
                self._send({"close": True})
        return True

    def _given_up(self, step: int, code: int) -> CheckpointError:
        tail = ""
        if self._log_path is not None and self._log_path.exists():
            tail = self._log_path.read_text(encoding="utf-8", errors="replace")[-2000:]
        return StoreError(
            f"step {step}: the persister process ended {_TRIES} times, last with {code}; "
            f"its log {self._log_path} ends with:\n{tail}",
            retryable=False,
        )


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
) -> Persister:
    """Start the persister of that kind; see the classes for the arguments."""
    if kind == "thread":
        return PersistThread(repository, retention, sink)
    store = repository.store
    log_path = store.root / "persist.log" if isinstance(store, LocalStore) else None
    return PersistProcess(store.url, repository.run, arena, retention, sink, grace_s, log_path)


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
        result.add_note(f"while step {job.step} was being persisted")
        job.future.set_exception(result)
