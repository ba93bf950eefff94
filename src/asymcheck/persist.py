"""From a slot to a committed checkpoint: wait, check, flush, commit, retain.

No torch here: the bytes are copied into a slot by the trainer, and the slot says what they
are. The same work is done by a process of its own (``main``), by a thread of the trainer, and
by the next start of the job for what a dead one left behind.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import select
import signal
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, astuple
from pathlib import Path
from time import monotonic, perf_counter, sleep, thread_time
from typing import Any

from asymcheck.capture import Capture, find_torn_leaf, parse_capture
from asymcheck.encoding import Chooser
from asymcheck.errors import (
    CheckpointError,
    CorruptCheckpoint,
    DroppedCheckpoint,
    NoCheckpoint,
    StoreError,
    SupersededWriter,
)
from asymcheck.events import Sink, Span, Stage, discard, timed
from asymcheck.memory.arena import Slot, SlotState
from asymcheck.memory.process import ProcessId
from asymcheck.messages import MESSAGE_BYTES, TEXT_CHARS, Durable, describe_error
from asymcheck.planning.layout import Extent
from asymcheck.planning.retention import CheckpointId, Retention
from asymcheck.planning.selection import RAW, Selection
from asymcheck.storage.flush import Batch, Encoded, flush
from asymcheck.storage.index import Index
from asymcheck.storage.manifest import EXACT, parse_attempt
from asymcheck.storage.repository import Repository
from asymcheck.storage.store import open_store

_log = logging.getLogger(__name__)

_SPACE_MARGIN_BYTES = 1 << 20
_POLL_S = 0.001


def persist(
    repository: Repository,
    slot: Slot,
    retention: Retention,
    sink: Sink,
    trainer_is_alive: Callable[[], bool],
    chooser: Chooser | None = None,
) -> Durable:
    """Take one slot to a committed checkpoint; blocks.

    Starts while the slot is still being filled: each chunk is hashed and written as soon as
    it is complete. Nothing is committed before the slot is sealed and its canaries agree. On
    failure everything that was written is removed again, as far as the store lets it. What
    was committed before is left as it is.

    Args:
        repository: Where to.
        slot: Being filled, or sealed.
        retention: Applied after the commit.
        sink: Receives spans.
        trainer_is_alive: Whether somebody may still fill and seal the slot.
        chooser: Encodes the chunks; without one they are stored as they are.

    Raises:
        DroppedCheckpoint: The state changed while it was copied, or the trainer died first.
        StoreError: The medium failed or is too full.
        SupersededWriter: A newer attempt has claimed the root.
    """
    capture = parse_capture(slot.meta, f"slot {slot.path or '(no name)'}")
    committed = _find_committed(repository, capture)
    if committed is not None:
        return committed
    image = slot.image

    def wait(upto: int) -> None:
        _await(slot, capture, trainer_is_alive, upto)

    def check() -> None:
        _await(slot, capture, trainer_is_alive, None)
        torn = find_torn_leaf(capture, image, slot.canaries)
        if torn is not None:
            raise DroppedCheckpoint(
                capture.at.step,
                torn,
                f"{torn!r} changed while it was copied, without a word to the library: call "
                f"checkpointer.fence() before code that writes parameters by hand",
            )

    return write_checkpoint(
        repository, capture, image, wait, check, retention, sink, chooser or Chooser(RAW)
    )


def _find_committed(repository: Repository, capture: Capture) -> Durable | None:
    """The checkpoint, where it was committed by a process that died before it could say so.

    Writing it again would put it at risk: what fails half-way is removed.
    """
    try:
        with repository.open(capture.at) as checkpoint:
            manifest = checkpoint.manifest
    except (NoCheckpoint, CorruptCheckpoint):
        return None
    return Durable(
        step=capture.at.step,
        attempt=capture.at.attempt,
        raw_bytes=capture.raw_bytes,
        stored_bytes=manifest.stored_bytes,
        persist_s=0.0,
        durable_s=perf_counter() - capture.boundary_s,
        cpu_s=0.0,
        fidelity=manifest.fidelity,
        base=manifest.base.at.step if manifest.base else 0,
    )


def write_checkpoint(
    repository: Repository,
    capture: Capture,
    image: memoryview | Callable[[Extent], memoryview],
    wait: Callable[[int], None],
    check: Callable[[], None],
    retention: Retention,
    sink: Sink,
    chooser: Chooser,
) -> Durable:
    """Encode, flush and commit an image; blocks.

    Args:
        repository: Where to.
        capture: What it is.
        image: Its bytes, up to a whole page; or gives those of a chunk, where there is no
            memory for all of them.
        wait: Returns when the image is complete up to there.
        check: Called once everything is flushed; raises when it must not be committed.
        retention: Applied after the commit.
        sink: Receives spans.
        chooser: Says how chunks are encoded.

    Raises:
        CheckpointError: Nothing was committed, and what was written is removed again as far
            as the store lets it.
    """
    start_s, cpu_s = perf_counter(), thread_time()
    at = capture.at
    encoder = chooser.begin(capture, sink)

    def encode(extent: Extent) -> Encoded:
        wait(encoder.reads_to(extent))
        if callable(image):
            return Encoded(image(extent), "raw")
        return encoder.encode(extent, image)

    def observe(batch: Batch) -> None:
        chooser.observe(batch)
        sink(Span(Stage.WRITE, at.step, batch.start_s, batch.duration_s, batch.nbytes))

    try:
        _check_room(repository, capture)
        with timed(sink, Stage.FLUSH, at.step, capture.raw_bytes):
            flushed = flush(
                repository.store,
                at,
                0,
                capture.chunks,
                encode,
                policy=chooser.policy(encoder),
                workers=chooser.workers if encoder.encodes else 0,
                observe=observe,
            )
            check()
        index = Index(
            run=repository.run,
            at=at,
            rank=0,
            world=1,
            created_s=capture.created_s,
            metrics=capture.metrics,
            versions=capture.versions,
            leaves=capture.leaves,
            aliases=capture.aliases,
            chunks=flushed.chunks,
            packs=flushed.packs,
            losses=encoder.losses,
        )
        fidelity = chooser.fidelity if encoder.losses else EXACT
        with timed(sink, Stage.COMMIT, at.step):
            manifest = repository.commit(index, encoder.base, fidelity)
    except BaseException as failure:
        chooser.fail(failure)
        _discard(repository, at)
        if isinstance(failure, StoreError):
            _check_not_overtaken(repository, at, failure)
        raise
    done_s = perf_counter()
    with timed(sink, Stage.RETAIN, at.step):
        try:
            repository.retain(at, retention, chooser.base)
        except StoreError as failure:
            # The checkpoint stands; what could not be removed goes with a later commit.
            _log.warning("step %d: retention failed: %s", at.step, failure)
    if not callable(image):
        chooser.finish(capture, encoder, flushed, image)
    return Durable(
        step=at.step,
        attempt=at.attempt,
        raw_bytes=capture.raw_bytes,
        stored_bytes=manifest.stored_bytes,
        persist_s=done_s - start_s,
        durable_s=done_s - capture.boundary_s,
        cpu_s=thread_time() - cpu_s + flushed.helper_cpu_s,
        encode_s=flushed.encode_s,
        write_s=flushed.write_s,
        batches=flushed.batches,
        groups=encoder.reports,
        fidelity=fidelity,
        base=encoder.base.step if encoder.base else 0,
    )


def _await(
    slot: Slot, capture: Capture, trainer_is_alive: Callable[[], bool], upto: int | None
) -> None:
    """Wait until the image is complete up to there, or (``None``) until it is sealed."""
    while True:
        state = slot.state
        if state == SlotState.SEALED:
            return
        if state != SlotState.FILLING:
            raise DroppedCheckpoint(
                capture.at.step, "", "the trainer gave it up while it was copied"
            )
        if upto is not None and slot.copied_bytes >= upto:
            return
        if not trainer_is_alive():
            # Once more: it may have sealed the slot just before it died.
            if slot.state == SlotState.SEALED:
                return
            raise DroppedCheckpoint(
                capture.at.step, "", "the trainer died before its state was copied"
            )
        sleep(_POLL_S)


def _check_room(repository: Repository, capture: Capture) -> None:
    free = repository.store.free_bytes()
    need = capture.raw_bytes + _SPACE_MARGIN_BYTES
    if free is not None and free < need:
        raise StoreError(
            f"{repository.store.url}: step {capture.at.step} needs {need} bytes, {free} are "
            f"free: free some space or lower keep_last; the next save works once there is room",
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


def tidy(repository: Repository) -> None:
    """Remove what retention still owes, before the end."""
    try:
        repository.finish()
    except CheckpointError as failure:
        _log.warning("left-overs stay until the next start: %s", failure)


# --- as a process -----------------------------------------------------------


class _Worker:
    """The loop of a persister process: slots come in over a socket, reports go out."""

    def __init__(self, control: socket.socket, config: dict[str, Any]) -> None:
        self._control = control
        self._trainer = ProcessId(*config["trainer"])
        self._trainer_fd = open_pidfd(self._trainer)
        self._grace_s = float(config["grace_s"])
        self._retention = Retention(**config["retention"])
        self._sink: Sink = self._report if config["spans"] else discard
        self._chooser = Chooser(Selection(**config["selection"]), config["batching"])
        self._repository = Repository(open_store(config["url"]), config["run"])
        self._slots: dict[int, Slot] = {}
        self._queue: deque[Slot] = deque()
        self._closing = False
        self._give_up_s: float | None = None

    def run(self) -> None:
        """Persist what comes until the trainer closes, dies, or SIGTERM asks to finish."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        self._send({"hello": os.getpid()})
        while True:
            self._receive(block=not self._queue and not self._closing)
            if self._queue:
                self._persist_one(self._queue.popleft())
            elif self._closing or self._give_up_s is not None or not self._trainer_is_alive():
                break
        tidy(self._repository)
        for slot in self._slots.values():
            # Nobody else will: unsealed content is worth nothing without its trainer.
            if not self._trainer_is_alive() and slot.state != SlotState.SEALED:
                slot.close(unlink=True)

    def _on_sigterm(self, number: int, frame: object) -> None:
        self._give_up_s = monotonic() + self._grace_s

    def _trainer_is_alive(self) -> bool:
        if self._give_up_s is not None and monotonic() > self._give_up_s:
            return False
        fd = self._trainer_fd
        return self._trainer.is_alive if fd is None else not self._poll(0, fd)

    def _receive(self, *, block: bool) -> None:
        """Take every message that is there; wait for one first when there is nothing to do."""
        control = self._control.fileno()
        watched = [control] if self._trainer_fd is None else [control, self._trainer_fd]
        while True:
            if control not in self._poll(_IDLE_MS if block else 0, *watched):
                return
            block = False
            data, fds, _, _ = socket.recv_fds(self._control, MESSAGE_BYTES, 1)
            message = json.loads(data or b'{"close": true}')
            if "close" in message:
                self._closing = True
                return
            if not fds:
                raise OSError(errno.EMFILE, "a slot came without its descriptor: raise ulimit -n")
            told = message["claims"]
            self._repository.claims[:] = [parse_attempt(c.encode(), "claim") for c in told]
            token = message["slot"]
            for gone in self._slots.keys() - set(message["live"]):
                self._slots.pop(gone).close(unlink=False)
            if token in self._slots:
                os.close(fds[0])
            else:
                path = message["path"]
                self._slots[token] = Slot(fds[0], Path(path) if path else None)
                self._slots[token].hold_as_persister()
            self._queue.append(self._slots[token])

    @staticmethod
    def _poll(timeout_ms: int, *fds: int) -> list[int]:
        """Which of them can be read; unlike ``select`` this knows descriptors over 1023, and
        the control socket has the number that it had in the trainer.
        """
        poll = select.poll()
        for fd in fds:
            poll.register(fd, select.POLLIN)
        return [fd for fd, _ in poll.poll(timeout_ms)]

    def _persist_one(self, slot: Slot) -> None:
        try:
            durable = persist(
                self._repository,
                slot,
                self._retention,
                self._sink,
                self._trainer_is_alive,
                self._chooser,
            )
        except CheckpointError as failure:
            self._send({"failed": describe_error(failure)})
        else:
            slot.state = SlotState.FREE  # before the report: after it the trainer may reuse it
            self._send({"done": asdict(durable)})

    def _report(self, span: Span) -> None:
        *rest, error = astuple(span)
        self._send({"span": [*rest, error[:TEXT_CHARS]]})

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
