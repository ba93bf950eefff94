"""The trainer's side of persisting: threads, or a process that outlives the trainer."""

from __future__ import annotations

import json
import logging
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import Any, Literal

from asymcheck.errors import OptionError, StoreError
from asymcheck.events import Sink, Span, Stage, discard
from asymcheck.memory.arena import Arena, Slot
from asymcheck.memory.process import ProcessId
from asymcheck.messages import (
    MESSAGE_BYTES,
    Durable,
    rebuild_durable,
    rebuild_error,
    rebuild_stored,
)
from asymcheck.pending import COMMIT_TIMEOUT_S
from asymcheck.persist_threads import Job, Persister, PersistThread, settle
from asymcheck.persist_worker import open_pidfd
from asymcheck.planning.retention import CheckpointId, Retention
from asymcheck.planning.selection import RAW, Batching, Selection
from asymcheck.planning.strategies import Strategy
from asymcheck.planning.tiers import Tier
from asymcheck.process_log import ProcessLog
from asymcheck.storage.local import LocalStore
from asymcheck.storage.manifest import Attempt, dump_attempt
from asymcheck.storage.repository import Repository
from asymcheck.storage.store import Store
from asymcheck.tiering import TierBoard, TierState, describe_tiers

__all__ = [
    "LOG_NAME",
    "PersistProcess",
    "PersistThread",
    "Persister",
    "is_own_memory",
    "start_persister",
    "who_persists",
]

_log = logging.getLogger(__name__)

LOG_NAME = "persist.log"
"""Where a persister process writes what it has to say, in the root of a local store."""
_TRIES = 3
_MODULE = "asymcheck.persist"
_START = (  # this very package, from wherever the trainer has it, and nothing else from there
    "import sys; sys.path.insert(0, sys.argv[2]); import asymcheck; "
    "sys.path.append(sys.path.pop(0)); from asymcheck.persist_worker import main; "
    "main(*sys.argv[3:])"
)
_PAUSE_S = 0.2
_POLL_MS = 200
_CLAIMS = 100  # as many as surely fit into a message; more than will ever fail one by one


class PersistProcess:
    """Persists in a process of its own, which finishes sealed slots though the trainer dies.

    A process that dies is replaced, and what it had under way is begun again, one after the other,
    so that it shows which of them it was; what ends one process after the other is given up, and
    so is an idle start that fails again and again until there is something to do.

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
        at_once: How many checkpoints are written at a time.
        writers: Into how many packs each is cut, written at the same time.
        commit_timeout_s: How long a stored part waits for those of other ranks.
        tiers: Where committed checkpoints go on to; the other process opens them by their URLs.
        board: Told how far they are.

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
        at_once: int = 1,
        writers: int = 1,
        commit_timeout_s: float = COMMIT_TIMEOUT_S,
        tiers: Sequence[tuple[Tier, Store]] = (),
        board: TierBoard | None = None,
    ) -> None:
        self._claims = claims
        self.board = board or TierBoard([tier.label for tier, _ in tiers])
        self._config = {
            "url": url,
            "run": run,
            "trainer": list(_this_process()),
            "grace_s": grace_s,
            "retention": asdict(retention),
            "selection": asdict(selection),
            "batching": batching,
            "at_once": at_once,
            "writers": writers,
            "commit_timeout_s": commit_timeout_s,
            "spans": sink is not discard,  # nobody else would read them
            "tiers": describe_tiers(tiers),
        }
        self._arena = arena
        self._sink = sink
        self._log = ProcessLog(log_path)
        self._changed = threading.Condition(threading.RLock())
        self._jobs: dict[int, Job] = {}  # by the token of the slot, in the order of their begin
        self._awaited: dict[CheckpointId, Job] = {}  # stored; the slot may be another one's
        self._closing = False
        self._home_closed = False  # nothing but copies for tiers is left to do
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

    def begin(
        self, slot: Slot, step: int, stored: Callable[[], None] = lambda: None
    ) -> Future[Durable]:
        """See ``Persister``."""
        job = Job(slot, step, Future(), free=stored)
        with self._changed:
            self._jobs[slot.token] = job
            self._hand_over(job)
            self._changed.notify_all()
        return job.future

    def wake(self) -> None:
        """See ``Persister``."""
        with self._changed:
            self._send({"promote": {}, **self._told_claims()})

    def ask_tier(self, name: str) -> int:
        """See ``Persister``."""
        with self._changed:
            number = self.board.ask(name)
            self._send({"promote": {name: number}, **self._told_claims()})
            self._changed.notify_all()
        return number

    def close(self, timeout_s: float) -> bool:
        """See ``Persister``. A process that still makes copies then goes on for as long."""
        until_s = monotonic() + timeout_s
        with self._changed:
            self._closing = True
            self._send({"close": True, **self._told_claims()})
            self._changed.notify_all()
        self._reader.join(timeout_s)
        try:
            self._process.wait(max(0.0, until_s - monotonic()))
        except subprocess.TimeoutExpired:
            return self._home_closed
        return self._home_closed or not self._reader.is_alive()

    # --- talking to the process ---------------------------------------------

    def _spawn(self) -> tuple[subprocess.Popen[bytes], socket.socket, int | None]:
        words = (sys.executable, "-P", "-c", _START, _MODULE, str(Path(__file__).parents[1]))
        states = [asdict(state) for state in self.board.states()]
        config = json.dumps({**self._config, "states": states, **self._told_claims()})
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                fd = theirs.fileno()
                process = subprocess.Popen(
                    [*words, str(fd), config],
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

    def _hand_over(self, job: Job) -> None:
        if not self._is_up:
            return  # the next process gets it
        job.slot.persister = ProcessId.of(self._process.pid)
        message = {
            "slot": job.slot.token,
            "path": str(job.slot.path) if job.slot.path else None,
            "live": self._arena.tokens(),
            "alone": job.ends > 0,
            **self._told_claims(),
        }
        self._send(message, job.slot.fd)

    def _told_claims(self) -> dict[str, list[str]]:
        return {"claims": [dump_attempt(c).decode() for c in self._claims[-_CLAIMS:]]}

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
                except ConnectionResetError:
                    continue  # it left a message unread; what it said itself comes now
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
        elif "tier" in message:
            self.board.note(TierState(**message["tier"]), message["served"])
        elif "home" in message:
            self._home_closed = True
        elif "begun" in message:
            with self._changed:
                self._jobs[message["begun"]].begun = True
        elif "stored" in message:
            with self._changed:
                self._ended = 0
                job = self._jobs.pop(message["slot"])
                job.stored, job.begun = rebuild_stored(message["stored"]), False
                self._awaited[job.stored.at] = job
            job.free()
        elif "done" in message or "failed" in message:
            with self._changed:
                self._ended = 0
                if "at" in message:
                    job = self._awaited.pop(CheckpointId(*message["at"]))
                else:
                    job = self._jobs.pop(message["slot"])
            told = message.get("failed")
            settle(job, rebuild_error(told) if told else rebuild_durable(message["done"]))

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
                while not (self._left() or self._closing or self._ended < _TRIES):
                    self.board.give_up()
                    self._changed.wait()
                if self._closing and not self._left():
                    self.board.give_up()
                    return False
                _log.warning("the persister process %s: starting another", why)
                try:
                    self._process, self._control, self._watch = self._spawn()
                except OSError as failure:
                    why = f"could not be started: {failure}"
                    self._changed.wait(_PAUSE_S)
                    continue
                self._is_up = True
                self._send({"promote": self.board.open_requests()})
                for job in self._awaited.values():
                    if job.stored is not None:
                        self._send({"await": asdict(job.stored)})
                for job in self._jobs.values():
                    self._hand_over(job)
                if self._closing:
                    self._send({"close": True})
                return True

    def _left(self) -> list[Job]:
        """What is not over, first what only waits for other ranks."""
        return [*self._awaited.values(), *self._jobs.values()]

    def _count_end(self, why: str) -> None:
        """Blame what it was at work on, the first job where it did not get so far; give up what
        was blamed too often.
        """
        with self._changed:
            self._ended += 1
            jobs = self._left()
            given_up = []
            for job in [job for job in jobs if job.begun] or jobs[:1]:
                job.begun = False
                job.ends += 1
                if job.ends == _TRIES:
                    given_up.append(job)
                    if job.stored is not None:
                        del self._awaited[job.stored.at]
                    else:
                        del self._jobs[job.slot.token]
        for job in given_up:
            settle(
                job,
                StoreError(
                    f"step {job.step}: the persister process failed {_TRIES} times, it last {why}; "
                    f"{self._log.tail()}",
                    retryable=False,
                ),
            )


def is_own_memory(store: Store) -> bool:
    """Whether a store is this process's own memory, which no other can open."""
    return "memory:" in store.url


def who_persists(
    asked: Literal["auto", "process", "thread"],
    root: object,
    store: Store,
    tiers: Sequence[tuple[Tier, Store]] = (),
) -> Literal["process", "thread"]:
    """Choose between a process and a thread.

    Args:
        asked: What the user said.
        root: What the user gave: a store object may hold anything, so only a path or URL can
            be opened by another process.
        store: The store of that root.
        tiers: The further tiers, each with its store.

    Raises:
        OptionError: A process was asked for and cannot open the store.
    """
    if asked not in ("auto", "process", "thread"):
        raise OptionError(f"persist: expected 'auto', 'process' or 'thread', found {asked!r}")
    places = [(root, store), *((tier.url, place) for tier, place in tiers)]
    own = [
        place
        for given, place in places
        if is_own_memory(place) or not isinstance(given, str | os.PathLike)
    ]
    if asked == "auto":
        return "thread" if own else "process"
    if asked == "process" and own:
        raise OptionError(
            f"persist: {own[0].url} can only be opened by this process, found 'process': use "
            f"'thread' or 'auto', or give it as a path or URL"
        )
    return asked


def start_persister(
    kind: Literal["process", "thread"],
    repository: Repository,
    arena: Arena,
    retention: Retention,
    sink: Sink,
    grace_s: float,
    strategy: Strategy,
    commit_timeout_s: float = COMMIT_TIMEOUT_S,
    tiers: Sequence[tuple[Tier, Store]] = (),
    board: TierBoard | None = None,
) -> Persister:
    """Start the persister of that kind; see the classes for the arguments."""
    at_once, writers = strategy.admission.at_once, strategy.writers
    where = (commit_timeout_s, tiers, board)
    how = (strategy.selection, strategy.batching, at_once, writers, *where)
    if kind == "thread":
        return PersistThread(repository, retention, sink, *how)
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
        *how,
    )


def _this_process() -> tuple[int, int]:
    me = ProcessId.of(os.getpid())
    return me.pid, me.start
