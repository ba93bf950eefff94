"""From chunks to packs: encoded ahead of the writer, written in batches.

``flush`` has two ways of working. Without workers the thread that writes a pack encodes each
chunk itself, just before it is written, and gives it to the store as it is, together with those
that lie behind it in the image and are there already: the fewest CPU seconds, no further thread.
With workers, encoding and hashing run ahead of the writer under a
bound in bytes, and the writer merges what is ready into large parts on whole pages. What lies
in the packs is the same.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from threading import Condition, Thread
from time import perf_counter, thread_time

from asymcheck.errors import StoreError
from asymcheck.planning.batching import Policy, Ready
from asymcheck.planning.layout import CHUNK_BYTES, PAGE_BYTES, Extent, align_up
from asymcheck.planning.retention import CheckpointId
from asymcheck.storage.index import Chunk, StoredObject
from asymcheck.storage.names import pack_name
from asymcheck.storage.packs import (
    PACK_BYTES,
    ZEROS,
    Encoded,
    Pack,
    Piece,
    even_pack_bytes,
    groups,
)
from asymcheck.storage.sealed import digest
from asymcheck.storage.store import Buffer, Store, write_whole

__all__ = [
    "BUDGET_BYTES",
    "PACK_BYTES",
    "Batch",
    "Encoded",
    "Flushed",
    "even_pack_bytes",
    "flush",
]

BUDGET_BYTES = 8 * CHUNK_BYTES
_READY = Ready()


@dataclass(frozen=True, slots=True)
class Batch:
    """What a store took at once.

    Attributes:
        nbytes: Its size, gaps between its chunks included.
        start_s: When the store got it, on ``time.perf_counter``'s clock.
        duration_s: Seconds until the store asked for more. What it does after the last part of
            a pack (sync, rename) comes later, and is part of ``Flushed.write_s`` only.
        chunks: How many chunks it holds.
    """

    nbytes: int
    start_s: float
    duration_s: float
    chunks: int


@dataclass(frozen=True, slots=True)
class Flushed:
    """What was written, and what it took.

    Attributes:
        chunks: Where each chunk lies.
        packs: The packs, durable as the store promises.
        encode_s: Seconds of encoding and hashing, waits inside ``encode`` included, summed over
            threads.
        encode_cpu_s: CPU seconds of the same.
        write_s: Seconds that the store took, without those in which it waited for chunks,
            summed over the packs.
        batches: How many there were.
        helper_cpu_s: CPU seconds of all threads but the caller's.
    """

    chunks: tuple[Chunk, ...]
    packs: tuple[StoredObject, ...]
    encode_s: float
    encode_cpu_s: float
    write_s: float
    batches: int
    helper_cpu_s: float


def flush(
    store: Store,
    at: CheckpointId,
    rank: int,
    chunks: Sequence[Extent],
    encode: Callable[[Extent], Encoded],
    *,
    policy: Policy = _READY,
    workers: int = 0,
    writers: int = 1,
    budget_bytes: int = BUDGET_BYTES,
    pack_bytes: int = PACK_BYTES,
    observe: Callable[[Batch], None] = lambda batch: None,
    image: memoryview | None = None,
    is_ready: Callable[[Extent], bool] = lambda extent: False,
    written: Callable[[Extent], None] = lambda extent: None,
) -> Flushed:
    """Encode the chunks and write them into packs; blocks.

    A pack is closed before it would outgrow ``pack_bytes`` of raw data. The calling thread is
    the first writer; all other threads have ended when this returns or raises, and no buffer
    is used after that. Where no thread can be started (the interpreter is ending) the calling
    thread does everything.

    Memory beside the image: with workers at most ``budget_bytes`` of encoded chunks, and as
    much again in the buffers of the writers, in which chunks are merged; each writer has room
    for one chunk at least. Gaps up to the next page count, chunks that are ``padded`` too. Without
    workers nothing is held.

    Args:
        store: Where to.
        at: The checkpoint.
        rank: Whose chunks they are.
        chunks: Ascending.
        encode: Gives the stored bytes of a chunk; may block. Without workers it is called by
            the writers, in the order of each pack; with workers by these, several at a time,
            begun in the order of the chunks as far as writers can use them.
        policy: How many of the chunks that are ready are written now; all of them unless told
            otherwise. Used with workers only: without them each chunk is a batch. A chunk that
            is ``padded`` is a batch of its own, whatever the policy says.
        workers: Threads that encode ahead.
        writers: How many packs are written at a time.
        budget_bytes: Bound of what is encoded, or being encoded, and not yet written.
        pack_bytes: Bound of a pack, in bytes of the image.
        observe: Receives each batch after the store took it, on the thread that wrote it.
        image: Where ``padded`` chunks lie, each from its own start on; for writes without workers.
        is_ready: Whether ``encode`` would give a chunk without a wait; asked for those that could
            be part of the same write.
        written: Receives each chunk after the store took it, on the thread that wrote it. Its
            ``padded`` memory is not read again.

    Raises:
        StoreError: The medium failed, or asked for too little. Packs written before stay,
            unreferenced.
        BaseException: The first failure of ``encode``, ``observe`` or ``policy``; of several
            failures of ``encode`` that of the first chunk. It stops everything, as soon as
            the calls of ``encode`` and of the store that are under way return.
    """
    run = _Run(store, at, rank, encode, policy, observe, image, is_ready, written)
    packs = [Pack(serial, group) for serial, group in enumerate(groups(chunks, pack_bytes))]
    writers = max(1, min(writers, len(packs)))
    run.plan(packs, writers, budget_bytes)
    try:
        run.start(min(workers, len(chunks)), writers)
        run.write_packs()
    except BaseException as failure:  # noqa: BLE001  it is raised below, once
        run.fail(failure)
    finally:
        run.join()
    return run.result()


class _StoppedError(Exception):
    """Something else failed; ends a write from within."""


class _Run:
    """One flush. Everything that threads share changes under ``_changed``."""

    def __init__(
        self,
        store: Store,
        at: CheckpointId,
        rank: int,
        encode: Callable[[Extent], Encoded],
        policy: Policy,
        observe: Callable[[Batch], None],
        image: memoryview | None,
        is_ready: Callable[[Extent], bool],
        written: Callable[[Extent], None],
    ) -> None:
        self._image = image
        self._is_ready = is_ready
        self._written = written
        self._store = store
        self._at = at
        self._rank = rank
        self._encode = encode
        self._policy = policy
        self._observe = observe
        self._changed = Condition()
        self._threads: list[Thread] = []
        self._ahead = False
        self._failure: BaseException | None = None
        self._failed_at: int | None = None
        self._objects: dict[int, StoredObject] = {}
        self._encode_s = self._encode_cpu_s = self._write_s = self._helper_cpu_s = 0.0
        self._batches = 0

    def plan(self, packs: Sequence[Pack], writers: int, budget_bytes: int) -> None:
        """As many packs are open as there are writers, each with a share of the budget."""
        self._packs = packs
        self._unwritten = deque(packs)
        self._open, self._later = list(packs[:writers]), deque(packs[writers:])
        self._share_bytes = budget_bytes // writers
        largest = max((e.nbytes for pack in packs for e in pack.extents), default=1)
        self._staging_bytes = align_up(max(self._share_bytes, largest), PAGE_BYTES)

    # --- threads ------------------------------------------------------------

    def start(self, workers: int, writers: int) -> None:
        """Start the workers, and all writers but the one that calls."""
        for _ in range(workers):
            self._ahead |= self._spawn("asymcheck-encode", self._encode_ahead)
        for _ in range(writers - 1):
            self._spawn("asymcheck-write", self.write_packs)

    def _spawn(self, name: str, work: Callable[[], None]) -> bool:
        def run() -> None:
            try:
                work()
            except BaseException as failure:  # noqa: BLE001  the caller of flush raises it
                self.fail(failure)
            with self._changed:
                self._helper_cpu_s += thread_time()

        thread = Thread(target=run, name=name, daemon=True)
        self._threads.append(thread)
        try:
            thread.start()
        except RuntimeError:
            return False  # the interpreter is ending, or there are too many: do with fewer
        return True

    def fail(self, failure: BaseException, at: int | None = None) -> None:
        """Stop everything. The first failure is kept, and of those at chunks the foremost."""
        with self._changed:
            earlier = at is not None and self._failed_at is not None and at < self._failed_at
            if self._failure is None or earlier:
                self._failure, self._failed_at = failure, at
            self._changed.notify_all()

    def join(self) -> None:
        """Wait for the other threads, whatever happens meanwhile."""
        for thread in self._threads:
            while thread.is_alive():
                try:
                    thread.join()
                except BaseException as failure:  # noqa: BLE001  Ctrl-C: raised once all ended
                    self.fail(failure)

    def result(self) -> Flushed:
        """What was written; or raises the failure, which nothing here refers to any longer."""
        failure, self._failure = self._failure, None
        if failure is not None:
            try:
                raise failure
            finally:
                del failure
        return Flushed(
            chunks=tuple(row for pack in self._packs for row in pack.rows),
            packs=tuple(self._objects[pack.serial] for pack in self._packs),
            encode_s=self._encode_s,
            encode_cpu_s=self._encode_cpu_s,
            write_s=self._write_s,
            batches=self._batches,
            helper_cpu_s=self._helper_cpu_s,
        )

    # --- encoding -----------------------------------------------------------

    def _piece(self, extent: Extent) -> Piece:
        start_s, start_cpu_s = perf_counter(), thread_time()
        try:
            encoded = self._encode(extent)
        except BaseException as failure:
            self.fail(failure, extent.start)
            raise
        piece = Piece(extent, encoded, memoryview(encoded.data).nbytes, digest(encoded.data))
        with self._changed:
            self._encode_s += perf_counter() - start_s
            self._encode_cpu_s += thread_time() - start_cpu_s
        return piece

    def _encode_ahead(self) -> None:
        """The work of a worker. It keeps no reference to what it made."""
        while (job := self._pick()) is not None:
            pack, i = job
            self._put(pack, i, self._piece(pack.extents[i]))

    def _pick(self) -> tuple[Pack, int] | None:
        """The foremost chunk that there is room for; waits; ``None`` when all are begun."""
        with self._changed:
            while self._failure is None:
                for pack in self._open:
                    if self._has_room(pack):
                        i = pack.picked
                        pack.picked += 1
                        pack.held_bytes += align_up(pack.extents[i].nbytes, PAGE_BYTES)
                        return pack, i
                begun = all(pack.picked == len(pack.extents) for pack in self._open)
                if begun and not self._later:
                    break
                self._changed.wait()
        return None

    def _has_room(self, pack: Pack) -> bool:
        if pack.picked == len(pack.extents):
            return False
        need = align_up(pack.extents[pack.picked].nbytes, PAGE_BYTES)
        return not pack.held_bytes or pack.held_bytes + need <= self._share_bytes

    def _put(self, pack: Pack, i: int, piece: Piece) -> None:
        with self._changed:
            pack.held_bytes += piece.charge - align_up(piece.extent.nbytes, PAGE_BYTES)
            pack.early[i] = piece
            while pack.arrived in pack.early:
                pack.ready.append(pack.early.pop(pack.arrived))
                pack.arrived += 1
            self._changed.notify_all()

    # --- writing ------------------------------------------------------------

    def write_packs(self) -> None:
        """The work of a writer: one pack after the other, until none is left."""
        # Untouched, it takes no memory. A store reads a part before it asks for the next.
        staging = memoryview(mmap.mmap(-1, self._staging_bytes)) if self._ahead else None
        while True:
            with self._changed:
                if not self._unwritten or self._failure is not None:
                    return
                pack = self._unwritten.popleft()
            start_s = perf_counter()
            name = pack_name(self._at, self._rank, pack.serial + 1)
            batches = self._in_turn(pack) if staging is None else self._merged(pack, staging)
            nbytes = write_whole(self._store, name, self._parts(pack, batches))
            if len(pack.rows) != len(pack.extents):
                raise StoreError(
                    f"write {self._store.url} {name}: the medium asked for {len(pack.rows)} of "
                    f"{len(pack.extents)} chunks",
                    retryable=True,
                )
            self._let_go(pack, len(pack.extents))
            with self._changed:
                self._write_s += perf_counter() - start_s - pack.waited_s
                self._objects[pack.serial] = StoredObject(name, nbytes)
            self._close(pack)

    def _parts(self, pack: Pack, batches: Iterator[tuple[list[Buffer], int]]) -> Iterator[Buffer]:
        asked_s = perf_counter()
        for parts, chunks in batches:
            start_s = perf_counter()
            pack.waited_s += start_s - asked_s
            yield from parts
            asked_s = perf_counter()
            nbytes = sum(memoryview(part).nbytes for part in parts)
            with self._changed:
                self._batches += 1
            self._observe(Batch(nbytes, start_s, asked_s - start_s, chunks))
            self._let_go(pack, pack.taken + chunks)
        pack.waited_s += perf_counter() - asked_s

    def _let_go(self, pack: Pack, upto: int) -> None:
        for extent in pack.extents[pack.taken : upto]:
            self._written(extent)
        pack.taken = upto

    def _in_turn(self, pack: Pack) -> Iterator[tuple[list[Buffer], int]]:
        """Each chunk, encoded when the store asks for it; with it those behind it that are ready,
        as the policy says, and lie side by side with it in the image: in one part.
        """
        while len(pack.rows) < len(pack.extents):
            first, count = len(pack.rows), 0
            most = self._may_merge(pack.extents[first:])
            while count < most:
                if self._failure is not None:
                    raise _StoppedError
                piece = self._piece(pack.extents[first + count])
                gap = pack.place(piece)
                if self._image is not None and piece.encoded.padded is not None:
                    count += 1
                    continue
                if count:
                    yield [self._beside(pack, first, count)], count
                yield piece.parts(gap), 1
                break
            else:
                yield [self._beside(pack, first, count)], count

    def _may_merge(self, extents: Sequence[Extent]) -> int:
        """How many chunks from the first on to give to the store at once, if they are padded."""
        sizes, at = [extents[0].nbytes], align_up(extents[0].stop, PAGE_BYTES)
        if self._image is not None:
            for extent in extents[1:]:
                if extent.start != at or not self._is_ready(extent):
                    break
                sizes.append(extent.nbytes)
                at = align_up(extent.stop, PAGE_BYTES)
        return min(self._policy.take(sizes, more_coming=False), len(sizes)) or len(sizes)

    def _beside(self, pack: Pack, first: int, count: int) -> Buffer:
        """Chunks that lie side by side, with the zeros behind the last one as in ``place``."""
        assert self._image is not None
        stop = pack.extents[first + count - 1].stop
        stop = stop if first + count == len(pack.extents) else align_up(stop, PAGE_BYTES)
        return self._image[pack.extents[first].start : stop]

    def _merged(self, pack: Pack, staging: memoryview) -> Iterator[tuple[list[Buffer], int]]:
        """What is ready, as the policy says: chunks side by side in ``staging``, in one part;
        those that are padded, or too large, as they are.
        """
        while len(pack.rows) < len(pack.extents):
            used = merged = 0
            for _ in range(self._await_batch(pack)):
                piece = pack.ready.popleft()
                gap = pack.place(piece)
                end = piece.nbytes + gap
                passes = piece.encoded.padded is not None or end > len(staging)
                if merged and (passes or used + end > len(staging)):
                    yield [staging[:used]], merged
                    used = merged = 0
                if passes:
                    yield piece.parts(gap), 1
                else:
                    data = memoryview(piece.encoded.data).cast("B")
                    staging[used : used + piece.nbytes] = data
                    staging[used + piece.nbytes : used + end] = ZEROS[:gap]
                    used += end
                    merged += 1
                    del data
                charge = piece.charge
                del piece
                self._release(pack, charge)
            if merged:
                yield [staging[:used]], merged

    def _await_batch(self, pack: Pack) -> int:
        """How many of the ready chunks to write now; waits until the policy takes some."""
        with self._changed:
            while self._failure is None:
                sizes = [piece.nbytes for piece in pack.ready]
                more = pack.picked > pack.arrived or self._has_room(pack)
                if sizes:
                    count = self._policy.take(sizes, more_coming=more)
                    if count or not more:
                        return min(count, len(sizes)) or len(sizes)
                self._changed.wait()
        raise _StoppedError

    def _release(self, pack: Pack, charge: int) -> None:
        with self._changed:
            pack.held_bytes -= charge
            if pack.arrived == len(pack.extents) and not pack.ready:
                self._close(pack)
            self._changed.notify_all()

    def _close(self, pack: Pack) -> None:
        """All of it was taken: its share of the budget goes to the next pack."""
        with self._changed:
            if pack in self._open:
                self._open.remove(pack)
                if self._later:
                    self._open.append(self._later.popleft())
            self._changed.notify_all()
