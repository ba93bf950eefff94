"""From chunks to packs: encoded ahead of the writer, written in batches.

``flush`` has two ways of working. Without workers the thread that writes a pack encodes each
chunk itself, just before it is written, and gives it to the store as it is: the fewest CPU
seconds, no further thread. With workers, encoding and hashing run ahead of the writer under a
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
from asymcheck.storage.sealed import digest
from asymcheck.storage.store import Buffer, Store, write_whole

PACK_BYTES = 1 << 30
BUDGET_BYTES = 8 * CHUNK_BYTES
_ZEROS = bytes(PAGE_BYTES)
_READY = Ready()


@dataclass(frozen=True, slots=True)
class Encoded:
    """A chunk ready to be written.

    Attributes:
        data: Its stored bytes. Borrowed: without workers until the next chunk is encoded, with
            workers until ``flush`` returns or lets go of it.
        codec: How they were made.
        padded: The same memory with zeros up to the next page, where there is such: it lets
            a medium write it without a copy.
    """

    data: Buffer
    codec: str
    padded: Buffer | None = None


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

    Raises:
        StoreError: The medium failed, or asked for too little. Packs written before stay,
            unreferenced.
        BaseException: The first failure of ``encode``, ``observe`` or ``policy``; of several
            failures of ``encode`` that of the first chunk. It stops everything, as soon as
            the calls of ``encode`` and of the store that are under way return.
    """
    run = _Run(store, at, rank, encode, policy, observe)
    packs = [_Pack(serial, group) for serial, group in enumerate(_groups(chunks, pack_bytes))]
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


def _groups(chunks: Sequence[Extent], pack_bytes: int) -> Iterator[list[Extent]]:
    group: list[Extent] = []
    for chunk in chunks:
        if group and chunk.stop - group[0].start > pack_bytes:
            yield group
            group = []
        group.append(chunk)
    if group:
        yield group


class _StoppedError(Exception):
    """Something else failed; ends a write from within."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """An encoded chunk. Whoever drops the last reference frees its bytes."""

    extent: Extent
    encoded: Encoded
    nbytes: int
    hash: str

    @property
    def charge(self) -> int:
        """What it counts against the budget."""
        return align_up(self.nbytes, PAGE_BYTES)

    def parts(self, gap: int) -> list[Buffer]:
        """Its bytes and the zeros behind them, without a copy."""
        if not gap:
            return [self.encoded.data]
        if self.encoded.padded is not None:
            return [self.encoded.padded]
        return [self.encoded.data, _ZEROS[:gap]]


class _Pack:
    """A group of chunks on their way: picked, encoded, ready in order, placed, written.

    Attributes:
        serial: Position among the packs.
        extents: Its chunks.
        picked: How many of them were begun.
        early: Encoded before one in front of it, by position.
        arrived: How many have become ready.
        ready: Encoded, all before them too, and not yet placed.
        held_bytes: What it counts against the budget.
        rows: What was placed.
        waited_s: Seconds in which the store waited for parts.
    """

    def __init__(self, serial: int, extents: Sequence[Extent]) -> None:
        self.serial = serial
        self.extents = extents
        self.picked = 0
        self.early: dict[int, _Piece] = {}
        self.arrived = 0
        self.ready: deque[_Piece] = deque()
        self.held_bytes = 0
        self.rows: list[Chunk] = []
        self.waited_s = 0.0

    def place(self, piece: _Piece) -> int:
        """Note where it lies; returns the zeros behind it: up to the next page, none at the end."""
        end = self.rows[-1].offset + self.rows[-1].stored_bytes if self.rows else 0
        offset = align_up(end, PAGE_BYTES)
        self.rows.append(
            Chunk(
                at=piece.extent.start,
                nbytes=piece.extent.nbytes,
                pack=self.serial,
                offset=offset,
                stored_bytes=piece.nbytes,
                codec=piece.encoded.codec,
                hash=piece.hash,
            )
        )
        return piece.charge - piece.nbytes if len(self.rows) < len(self.extents) else 0


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
    ) -> None:
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

    def plan(self, packs: Sequence[_Pack], writers: int, budget_bytes: int) -> None:
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

    def _piece(self, extent: Extent) -> _Piece:
        start_s, start_cpu_s = perf_counter(), thread_time()
        try:
            encoded = self._encode(extent)
        except BaseException as failure:
            self.fail(failure, extent.start)
            raise
        piece = _Piece(extent, encoded, memoryview(encoded.data).nbytes, digest(encoded.data))
        with self._changed:
            self._encode_s += perf_counter() - start_s
            self._encode_cpu_s += thread_time() - start_cpu_s
        return piece

    def _encode_ahead(self) -> None:
        """The work of a worker. It keeps no reference to what it made."""
        while (job := self._pick()) is not None:
            pack, i = job
            self._put(pack, i, self._piece(pack.extents[i]))

    def _pick(self) -> tuple[_Pack, int] | None:
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

    def _has_room(self, pack: _Pack) -> bool:
        if pack.picked == len(pack.extents):
            return False
        need = align_up(pack.extents[pack.picked].nbytes, PAGE_BYTES)
        return not pack.held_bytes or pack.held_bytes + need <= self._share_bytes

    def _put(self, pack: _Pack, i: int, piece: _Piece) -> None:
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
            batches = self._one_by_one(pack) if staging is None else self._merged(pack, staging)
            nbytes = write_whole(self._store, name, self._parts(pack, batches))
            if len(pack.rows) != len(pack.extents):
                raise StoreError(
                    f"write {self._store.url} {name}: the medium asked for {len(pack.rows)} of "
                    f"{len(pack.extents)} chunks",
                    retryable=True,
                )
            with self._changed:
                self._write_s += perf_counter() - start_s - pack.waited_s
                self._objects[pack.serial] = StoredObject(name, nbytes)
            self._close(pack)

    def _parts(self, pack: _Pack, batches: Iterator[tuple[list[Buffer], int]]) -> Iterator[Buffer]:
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
        pack.waited_s += perf_counter() - asked_s

    def _one_by_one(self, pack: _Pack) -> Iterator[tuple[list[Buffer], int]]:
        """Each chunk, encoded when the store asks for it."""
        for extent in pack.extents:
            if self._failure is not None:
                raise _StoppedError
            piece = self._piece(extent)
            yield piece.parts(pack.place(piece)), 1

    def _merged(self, pack: _Pack, staging: memoryview) -> Iterator[tuple[list[Buffer], int]]:
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
                    staging[used + piece.nbytes : used + end] = _ZEROS[:gap]
                    used += end
                    merged += 1
                    del data
                charge = piece.charge
                del piece
                self._release(pack, charge)
            if merged:
                yield [staging[:used]], merged

    def _await_batch(self, pack: _Pack) -> int:
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

    def _release(self, pack: _Pack, charge: int) -> None:
        with self._changed:
            pack.held_bytes -= charge
            if pack.arrived == len(pack.extents) and not pack.ready:
                self._close(pack)
            self._changed.notify_all()

    def _close(self, pack: _Pack) -> None:
        """All of it was taken: its share of the budget goes to the next pack."""
        with self._changed:
            if pack in self._open:
                self._open.remove(pack)
                if self._later:
                    self._open.append(self._later.popleft())
            self._changed.notify_all()
