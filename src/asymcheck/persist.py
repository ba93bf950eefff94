"""From a slot to a committed checkpoint: wait, check, flush, commit, retain.

No torch here: the bytes are copied into a slot by the trainer, and the slot says what they
are. The same work is done by a process of its own, by threads of the trainer, and by the next
start of the job for what a dead one left behind.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter, sleep, thread_time

from asymcheck.capture import CanaryWatch, Capture, parse_capture
from asymcheck.encoding import Chooser, Encoder
from asymcheck.errors import (
    CaptureError,
    CheckpointError,
    CorruptCheckpoint,
    DroppedCheckpoint,
    NoCheckpoint,
    StoreError,
    SupersededWriter,
)
from asymcheck.events import Sink, Span, Stage, timed
from asymcheck.hashing import HashingAhead, hashes_of
from asymcheck.memory.arena import Slot, SlotState
from asymcheck.messages import Durable, Stored
from asymcheck.planning.layout import Extent
from asymcheck.planning.retention import CheckpointId, Retention
from asymcheck.planning.selection import RAW
from asymcheck.storage.committing import read_index
from asymcheck.storage.flush import Batch, Encoded, Flushed, even_pack_bytes, flush
from asymcheck.storage.index import RAW as RAW_BYTES
from asymcheck.storage.index import Chunk, Index
from asymcheck.storage.listing import as_base
from asymcheck.storage.manifest import EXACT
from asymcheck.storage.repository import Repository

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
    writers: int = 1,
    ahead: HashingAhead | None = None,
) -> Durable | Stored:
    """Take one slot to a committed checkpoint; blocks. Several threads may, with a slot and a
    chooser each.

    With several ranks it goes as far as this rank can take it: its packs and its index are durable
    then, the slot is not read any more, and ``Pending`` waits for the others.

    Starts while the slot is still being filled: each chunk is hashed and written as soon as
    it is complete, and the memory of a sparse slot given back then. Nothing is committed before
    the slot is sealed and its canaries agree. The hashes of its chunks are left in it then, for a
    start that finds it before it is durable. On failure everything that was written is removed
    again, as far as the store lets it. What was committed before is left as it is.

    Args:
        repository: Where to.
        slot: Being filled, or sealed.
        retention: Applied after the commit.
        sink: Receives spans.
        trainer_is_alive: Whether somebody may still fill and seal the slot.
        chooser: Encodes the chunks; without one they are stored as they are.
        writers: Into how many packs the checkpoint is cut, written at the same time.
        ahead: Hashes the slot, where it was begun while others were still written. It is over when
            this ends.

    Raises:
        DroppedCheckpoint: The state changed while it was copied, the trainer died first, the slot
            is not any more what it was when it was hashed, or an earlier try has given memory
            of it back.
        CorruptCheckpoint: The hashes in it are damaged.
        StoreError: The medium failed or is too full.
        SupersededWriter: A newer attempt has claimed the root.
    """
    ahead = ahead or HashingAhead(slot)
    how = (retention, sink, trainer_is_alive, chooser, writers)
    try:
        done = _persist(repository, slot, *how)
        if slot.state == SlotState.SEALED:
            ahead.finish()
        return done
    finally:
        ahead.stop()


def _persist(
    repository: Repository,
    slot: Slot,
    retention: Retention,
    sink: Sink,
    trainer_is_alive: Callable[[], bool],
    chooser: Chooser | None,
    writers: int,
) -> Durable | Stored:
    capture = parse_capture(slot.meta, f"slot {slot.path or '(no name)'}")
    committed = _find_committed(repository, capture) or _find_stored(repository, capture)
    if committed is not None:
        return committed
    if slot.is_torn:
        raise DroppedCheckpoint(
            capture.at.step,
            "",
            "whoever wrote it ended before it was whole, and had given memory of it back: a "
            "bounded ring holds no image that could be written again",
        )
    image, canaries = slot.image, CanaryWatch(capture, slot.canaries)

    def wait(extent: Extent, upto: int) -> None:
        _await(slot, capture, trainer_is_alive, upto)
        canaries.compare(extent, image)  # here: the memory may be given back before the end

    def check() -> None:
        _await(slot, capture, trainer_is_alive, None)
        canaries.refuse()

    return write_checkpoint(
        repository,
        capture,
        image,
        wait,
        check,
        retention,
        sink,
        chooser or Chooser(RAW),
        writers=writers,
        is_ready=lambda extent: slot.copied_bytes >= extent.stop,
        written=slot.release,
        compare=lambda chunks: _refuse_changed(slot, capture, chunks),
    )


def _refuse_changed(slot: Slot, capture: Capture, written: Sequence[Chunk]) -> None:
    """Refuse what was not written as it had been hashed before, where somebody had."""
    for chunk, expected in zip(written, hashes_of(slot, capture), strict=False):
        if chunk.codec == RAW_BYTES and chunk.hash != expected:
            raise DroppedCheckpoint(
                capture.at.step,
                "",
                f"its memory in slot {slot.path} changed after it was sealed: the hash of "
                f"{chunk.nbytes} bytes at {chunk.at} is {chunk.hash}, expected {expected}",
            )


def _find_stored(repository: Repository, capture: Capture) -> Stored | None:
    """What a process stored of this rank that died before it could say so. It stays as it is:
    another rank may be about to commit it.
    """
    if capture.world == 1:
        return None
    try:
        found = read_index(repository.store, capture.at, capture.rank)
    except CorruptCheckpoint:
        return None  # the index is not whole, so it can be written again
    if found is None:
        return None
    index, data = found
    if index.created_s != capture.created_s or index.world != capture.world:
        raise CaptureError(
            f"step {capture.at.step} (attempt {capture.at.attempt}): rank {capture.rank} stored "
            f"another state as this checkpoint before: claim a new attempt, or save another step"
        )
    return _stored(capture, index, data, perf_counter(), 0.0)


def _find_committed(repository: Repository, capture: Capture) -> Durable | None:
    """The checkpoint, where it was committed by a process that died before it could say so.

    Writing it again would put it at risk: what fails half-way is removed.
    """
    try:
        with repository.open(capture.at) as checkpoint:
            manifest, index = checkpoint.manifest, checkpoint.indexes[capture.rank]
    except (NoCheckpoint, CorruptCheckpoint):
        return None
    stored = manifest.indexes[capture.rank][0].nbytes + sum(p.nbytes for p in index.packs)
    base = manifest.base.at if manifest.base else None
    found = _report(capture, stored, cpu_s=0.0, fidelity=manifest.fidelity, base=base)
    return replace(found, durable_s=perf_counter() - capture.boundary_s)


def write_checkpoint(
    repository: Repository,
    capture: Capture,
    image: memoryview | Callable[[Extent], memoryview],
    wait: Callable[[Extent, int], None],
    check: Callable[[], None],
    retention: Retention,
    sink: Sink,
    chooser: Chooser,
    *,
    writers: int = 1,
    is_ready: Callable[[Extent], bool] = lambda extent: False,
    written: Callable[[Extent], None] = lambda extent: None,
    compare: Callable[[Sequence[Chunk]], None] = lambda chunks: None,
) -> Durable | Stored:
    """Encode, flush and commit an image; blocks. With several ranks see ``persist``.

    Args:
        repository: Where to.
        capture: What it is.
        image: Its bytes, up to a whole page; or gives those of a chunk, where there is no
            memory for all of them.
        wait: Returns when the image is complete up to there, before that chunk is encoded.
        check: Called once everything is flushed; raises when it must not be committed.
        retention: Applied after the commit.
        sink: Receives spans.
        chooser: Says how chunks are encoded.
        writers: Into how many packs it is cut, written at the same time.
        is_ready: Whether ``wait`` would return at once.
        written: Receives each chunk when the store has taken it: then its image is not read again,
            unless it was encoded.
        compare: Called after ``check`` with what was written, and raises alike.

    Raises:
        CheckpointError: Nothing was committed, and what was written is removed again as far
            as the store lets it.
    """
    start_s, cpu_s = perf_counter(), thread_time()
    at = capture.at
    encoder = chooser.begin(capture, sink)

    def encode(extent: Extent) -> Encoded:
        wait(extent, encoder.reads_to(extent))
        if callable(image):
            return Encoded(image(extent), "raw")
        return encoder.encode(extent, image)

    def observe(batch: Batch) -> None:
        chooser.observe(batch)
        sink(Span(Stage.WRITE, at.step, batch.start_s, batch.duration_s, batch.nbytes))

    try:
        repository.check_writer(at.attempt)  # the training thread does not: it would wait
        _check_room(repository, capture)
        with timed(sink, Stage.FLUSH, at.step, capture.raw_bytes):
            flushed = flush(
                repository.store,
                at,
                capture.rank,
                capture.chunks,
                encode,
                policy=chooser.policy(encoder),
                workers=chooser.workers if encoder.encodes else 0,
                writers=writers,
                pack_bytes=even_pack_bytes(capture.chunks, writers),
                observe=observe,
                image=None if callable(image) else image,
                is_ready=is_ready,
                written=written,
            )
            check()
            compare(flushed.chunks)
        index = Index(
            run=repository.run,
            at=at,
            rank=capture.rank,
            world=capture.world,
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
            if capture.world > 1:
                if encoder.base is not None:
                    base = as_base(repository.store, encoder.base, fidelity)
                    index = replace(index, base=base)
                index = replace(index, fidelity=fidelity)
                data = repository.write_index(index)
            else:
                manifest = repository.commit(index, encoder.base, fidelity)
    except BaseException as failure:
        chooser.fail(failure)
        _discard(repository, capture)
        if isinstance(failure, StoreError):
            _check_not_overtaken(repository, at, failure)
        raise
    done_s = perf_counter()
    if capture.world > 1:
        if not callable(image):
            chooser.finish(capture, encoder, flushed, image)
        stored = _stored(capture, index, data, start_s, thread_time() - cpu_s)
        return replace(stored, part=_with_costs(stored.part, flushed, encoder))
    apply_retention(repository, at, retention, sink, chooser.base)
    if not callable(image):
        chooser.finish(capture, encoder, flushed, image)
    found = _report(
        capture,
        manifest.stored_bytes,
        cpu_s=thread_time() - cpu_s,
        fidelity=fidelity,
        base=encoder.base,
    )
    found = replace(found, persist_s=done_s - start_s, durable_s=done_s - capture.boundary_s)
    return _with_costs(found, flushed, encoder)


def _report(
    capture: Capture,
    stored_bytes: int,
    *,
    cpu_s: float,
    fidelity: str,
    base: CheckpointId | None,
) -> Durable:
    """What a checkpoint came to, without the times that are known at its end."""
    return Durable(
        step=capture.at.step,
        attempt=capture.at.attempt,
        raw_bytes=capture.raw_bytes,
        stored_bytes=stored_bytes,
        persist_s=0.0,
        durable_s=0.0,
        cpu_s=cpu_s,
        fidelity=fidelity,
        base=base.step if base else 0,
    )


def _with_costs(durable: Durable, flushed: Flushed, encoder: Encoder) -> Durable:
    return replace(
        durable,
        cpu_s=durable.cpu_s + flushed.helper_cpu_s,
        encode_s=flushed.encode_s,
        write_s=flushed.write_s,
        batches=flushed.batches,
        groups=encoder.reports,
    )


def _stored(capture: Capture, index: Index, data: bytes, begun_s: float, cpu_s: float) -> Stored:
    stored = len(data) + sum(pack.nbytes for pack in index.packs)
    base = index.base.at if index.base else None
    part = _report(capture, stored, cpu_s=cpu_s, fidelity=index.fidelity, base=base)
    return Stored(capture.rank, capture.world, capture.boundary_s, begun_s, part)


def apply_retention(
    repository: Repository,
    at: CheckpointId,
    retention: Retention,
    sink: Sink,
    base: CheckpointId | None = None,
) -> None:
    """Remove what need not be kept now that this one is committed; blocks.

    The checkpoint stands: what could not be removed goes with a later commit.
    """
    with timed(sink, Stage.RETAIN, at.step):
        try:
            repository.retain(at, retention, base)
        except StoreError as failure:
            _log.warning("step %d: retention failed: %s", at.step, failure)


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


def _discard(repository: Repository, capture: Capture) -> None:
    try:
        repository.discard(capture.at, capture.rank, capture.world)
    except StoreError as failure:
        step = capture.at.step
        _log.warning("step %d: left-overs stay until the next start: %s", step, failure)


def tidy(repository: Repository) -> None:
    """Remove what retention still owes, before the end."""
    try:
        repository.finish()
    except CheckpointError as failure:
        _log.warning("left-overs stay until the next start: %s", failure)
