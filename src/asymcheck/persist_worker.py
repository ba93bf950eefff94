"""The persister process: takes slots from its trainer, and outlives it where they are sealed."""

from __future__ import annotations

import errno
import json
import logging
import os
import select
import signal
import socket
import threading
from collections import deque
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any

from asymcheck.encoding import Chooser
from asymcheck.errors import CheckpointError, as_checkpoint_error
from asymcheck.events import Sink, Span, discard
from asymcheck.hashing import HashingAhead
from asymcheck.memory.arena import Slot, SlotState
from asymcheck.memory.process import ProcessId
from asymcheck.messages import (
    MESSAGE_BYTES,
    TEXT_CHARS,
    Durable,
    Stored,
    describe_error,
    rebuild_stored,
)
from asymcheck.pending import Backlog
from asymcheck.persist import persist, tidy
from asymcheck.planning.retention import Retention
from asymcheck.planning.selection import Selection
from asymcheck.promotion import Promoter
from asymcheck.storage.manifest import parse_attempt
from asymcheck.storage.repository import Repository
from asymcheck.storage.store import open_store
from asymcheck.tiering import TierState, rebuild_tiers


@dataclass(frozen=True, slots=True)
class _Work:
    """A slot to persist.

    Attributes:
        slot: The slot.
        alone: Whether nothing else may be at work meanwhile: an earlier process died over it, or
            over another one that it had at work.
        ahead: Hashes it, from when it came.
    """

    slot: Slot
    alone: bool
    ahead: HashingAhead


_LAST_LOOK_S = 1.0
TIERS_NAME = "asymcheck-tiers"
"""Name of a process that has nothing left but copies to make: nobody needs to wait for it."""


class _Worker:
    """The loop of a persister process: slots come in over a socket, reports go out. Several
    threads take what came, in the order in which it came.
    """

    def __init__(self, control: socket.socket, config: dict[str, Any]) -> None:
        self._control = control
        self._trainer = ProcessId(*config["trainer"])
        self._trainer_fd = open_pidfd(self._trainer)
        self._grace_s = float(config["grace_s"])
        self._retention = Retention(**config["retention"])
        self._sink: Sink = self._report if config["spans"] else discard
        self._selection, self._batching = Selection(**config["selection"]), config["batching"]
        self._at_once, self._writers = config["at_once"], config["writers"]
        self._repository = Repository(open_store(config["url"]), config["run"])
        self._timeout_s = float(config["commit_timeout_s"])
        self._backlog = Backlog(self._repository, self._retention, self._sink, self._timeout_s)
        self._hear_claims(config)
        self._promoter = Promoter(
            self._repository,
            rebuild_tiers(config["tiers"]),
            self._tell_of_tier,
            self._sink,
            {told["name"]: TierState(**told) for told in config["states"]},
        )
        self._slots: dict[int, Slot] = {}
        self._changed = threading.Condition()
        self._queue: deque[_Work] = deque()
        self._at_work: list[_Work] = []
        self._closing = False  # nothing comes any more
        self._broken: BaseException | None = None
        self._give_up_s: float | None = None

    def run(self) -> None:
        """Persist what comes until the trainer closes, dies, or SIGTERM asks to finish."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        self._send({"hello": os.getpid()})
        threads = [
            threading.Thread(target=self._work, name="asymcheck-persist", daemon=True)
            for _ in range(self._at_once)
        ]
        for thread in threads:
            thread.start()
        while not self._closing and self._give_up_s is None and self._trainer_is_alive():
            self._receive(block=True)
            self._raise_broken()
        self._receive(block=False)  # what came before the end
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in threads:
            thread.join()
        self._raise_broken()
        self._backlog.close(self._patience_s())
        tidy(self._repository)
        for slot in self._slots.values():
            slot.persister = ProcessId(0, 0)  # copies may still take long
            # Nobody else will: unsealed content is worth nothing without its trainer.
            gone = not self._trainer_is_alive() and slot.state != SlotState.SEALED
            slot.close(unlink=gone)
        self._send({"home": "closed"})
        self._promote_last()

    def _promote_last(self) -> None:
        """Finish what is on its way to the tiers; the next start need not wait for that."""
        with suppress(OSError):
            Path("/proc/self/comm").write_text(TIERS_NAME, encoding="ascii")
        until_s = monotonic() + self._grace_s
        self._promoter.close(lambda: monotonic() >= min(until_s, self._give_up_s or until_s))

    def _tell_of_tier(self, state: TierState, served: int) -> None:
        told = asdict(replace(state, last_failure=state.last_failure[:TEXT_CHARS]))
        self._send({"tier": told, "served": served})

    def _hear_claims(self, message: dict[str, Any]) -> None:
        if "claims" in message:
            told = message["claims"]
            self._repository.claims[:] = [parse_attempt(c.encode(), "claim") for c in told]

    def _patience_s(self) -> float:
        """How long other ranks are waited for at the end. With the trainer dead the next start
        waits for this process, and nobody for its word: of ranks that all died the last to store
        its part finds those of all, and commits.
        """
        if self._give_up_s is not None:
            return max(0.0, self._give_up_s - monotonic())
        return self._timeout_s if self._trainer_is_alive() else _LAST_LOOK_S

    def _raise_broken(self) -> None:
        """End the process where a thread met what is no failure of a checkpoint; the trainer starts
        another one.
        """
        if self._broken is not None:
            raise self._broken

    def _on_sigterm(self, number: int, frame: object) -> None:
        self._give_up_s = monotonic() + self._grace_s

    def _trainer_is_alive(self) -> bool:
        if self._give_up_s is not None and monotonic() > self._give_up_s:
            return False
        fd = self._trainer_fd
        return self._trainer.is_alive if fd is None else not self._poll(0, fd)

    def _receive(self, *, block: bool) -> None:
        """Take every message that is there; wait for one first, a while, with ``block``."""
        control = self._control.fileno()
        watched = [control] if self._trainer_fd is None else [control, self._trainer_fd]
        while True:
            if control not in self._poll(_IDLE_MS if block else 0, *watched):
                return
            block = False
            try:
                data, fds, _, _ = socket.recv_fds(self._control, MESSAGE_BYTES, 1)
            except ConnectionResetError:
                continue  # it died with reports unread; what it had sent comes next, then the end
            message = json.loads(data or b'{"close": true}')
            self._hear_claims(message)
            if "close" in message:
                self._closing = True
                return
            if "promote" in message:
                self._promoter.wake()
                for name, number in message["promote"].items():
                    self._promoter.ask(name, number)
                continue
            if "await" in message:
                self._await_others(rebuild_stored(message["await"]))
                continue
            if not fds:
                raise OSError(errno.EMFILE, "a slot came without its descriptor: raise ulimit -n")
            token = message["slot"]
            for gone in self._slots.keys() - set(message["live"]):
                self._slots.pop(gone).close(unlink=False)
            if token in self._slots:
                os.close(fds[0])
            else:
                path = message["path"]
                self._slots[token] = Slot(fds[0], Path(path) if path else None)
                self._slots[token].token = token
                self._slots[token].hold_as_persister()
            with self._changed:
                slot = self._slots[token]
                self._queue.append(_Work(slot, message["alone"], HashingAhead(slot)))
                self._changed.notify_all()

    @staticmethod
    def _poll(timeout_ms: int, *fds: int) -> list[int]:
        """Which of them can be read; unlike ``select`` this knows descriptors over 1023, and
        the control socket has the number that it had in the trainer.
        """
        poll = select.poll()
        for fd in fds:
            poll.register(fd, select.POLLIN)
        return [fd for fd, _ in poll.poll(timeout_ms)]

    def _work(self) -> None:
        """The work of a thread. What is chosen from checkpoint to checkpoint is its own."""
        chooser = Chooser(self._selection, self._batching)
        try:
            chooser.prepare()
            while (work := self._next()) is not None:
                self._persist_one(work, chooser)
                with self._changed:
                    self._at_work.remove(work)
                    self._changed.notify_all()
        except BaseException as failure:  # noqa: BLE001  the main thread ends with it
            with self._changed:
                self._broken = failure
                self._changed.notify_all()

    def _next(self) -> _Work | None:
        """The foremost slot, once it may be begun; ``None`` when nothing comes any more."""
        with self._changed:
            while self._broken is None:
                if self._queue:
                    work = self._queue[0]
                    alone = work.alone or any(other.alone for other in self._at_work)
                    if not (alone and self._at_work):
                        self._queue.popleft()
                        self._at_work.append(work)
                        return work
                elif self._closing:
                    break
                self._changed.wait()
        return None

    def _persist_one(self, work: _Work, chooser: Chooser) -> None:
        slot = work.slot
        self._send({"begun": slot.token})
        try:
            self._promoter.expect_like(slot)
            found = persist(
                self._repository,
                slot,
                self._retention,
                self._sink,
                self._trainer_is_alive,
                chooser,
                self._writers,
                work.ahead,
            )
            if isinstance(found, Stored) and chooser.needs_commits:
                found = self._backlog.wait(found, chooser)
        except CheckpointError as failure:
            work.ahead.stop()  # before the report: after it the trainer may reuse the slot
            self._send({"failed": describe_error(failure), "slot": slot.token})
            return
        slot.state = SlotState.FREE  # before the report: after it the trainer may reuse it
        if isinstance(found, Stored):
            self._send({"stored": asdict(found), "slot": slot.token})
            self._await_others(found)
        else:
            self._send({"done": asdict(found), "slot": slot.token})
            self._promoter.wake()

    def _await_others(self, stored: Stored) -> None:
        def settle(end: Durable | BaseException) -> None:
            if isinstance(end, Durable):
                told: dict[str, Any] = {"done": asdict(end)}
            else:
                told = {"failed": describe_error(as_checkpoint_error(end))}
            self._send({**told, "at": stored.at})
            self._promoter.wake()

        self._backlog.add(stored, settle)

    def _report(self, span: Span) -> None:
        self._send({"span": astuple(replace(span, error=span.error[:TEXT_CHARS]))})

    def _send(self, message: dict[str, Any]) -> None:
        # A dead trainer reads no reports; what is sealed becomes durable all the same.
        with suppress(OSError):
            self._control.send(json.dumps(message).encode())


_IDLE_MS = 200


def open_pidfd(process: ProcessId) -> int | None:
    """A descriptor that can be read once the process has ended; ``None`` where the kernel has
    no such thing, or the process has ended already.
    """
    try:
        fd = os.pidfd_open(process.pid)
    except (OSError, AttributeError):
        return None
    if not process.is_alive:
        # The number was taken over by another process: watch by start time instead.
        os.close(fd)
        return None
    return fd


def main(control: str, config: str) -> None:
    """Entry of the persister process.

    Args:
        control: Number of the socket's descriptor.
        config: What ``PersistProcess`` knows, as JSON.
    """
    # Other libraries have little to say here that a user should read.
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    logging.getLogger("asymcheck").setLevel(logging.INFO)
    with suppress(OSError):
        os.nice(5)
    _Worker(socket.socket(fileno=int(control)), json.loads(config)).run()
