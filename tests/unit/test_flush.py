"""Flushing: what runs ahead of the writer, what is merged, and that nothing is left running."""

from __future__ import annotations

import ctypes
import gc
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from asymcheck.errors import DroppedCheckpoint, StoreError
from asymcheck.planning.batching import FixedBytes, Ready
from asymcheck.planning.layout import CHUNK_BYTES, Extent, KiB
from asymcheck.planning.retention import CheckpointId
from asymcheck.storage import flush as flushing
from asymcheck.storage.flush import Batch, Encoded, Flushed, even_pack_bytes, flush
from asymcheck.storage.local import Files, LocalStore
from asymcheck.storage.memory import MemoryStore
from asymcheck.storage.packs import groups
from asymcheck.storage.store import Buffer, read_all
from asymcheck.testing.faulty import Fault, FaultyStore

AT = CheckpointId(attempt=3, step=20)
PAGE = 4096
RAW = 64 * KiB
WAIT_S = 30.0


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


class WriteStore(MemoryStore):
    """A store in memory whose ``write`` a test replaces."""

    def __init__(self, write: Callable[[WriteStore, str, Iterable[Buffer]], int]) -> None:
        super().__init__("written")
        self._write = write

    def write(self, name: str, parts: Iterable[Buffer]) -> int:
        return self._write(self, name, parts)

    def keep(self, name: str, parts: Iterable[Buffer]) -> int:
        return super().write(name, parts)


class Whole:
    """Waits until nothing more comes."""

    def take(self, ready_bytes: Sequence[int], *, more_coming: bool) -> int:
        return 0 if more_coming else len(ready_bytes)


class Recording:
    """Asks another policy, and keeps what it was told."""

    def __init__(self, policy: Ready | FixedBytes) -> None:
        self.policy = policy
        self.asked: list[tuple[tuple[int, ...], bool]] = []

    def take(self, ready_bytes: Sequence[int], *, more_coming: bool) -> int:
        self.asked.append((tuple(ready_bytes), more_coming))
        return self.policy.take(ready_bytes, more_coming=more_coming)


def extents(n: int, nbytes: int = RAW) -> list[Extent]:
    return [Extent(i * nbytes, (i + 1) * nbytes) for i in range(n)]


def content(extent: Extent) -> bytes:
    return bytes([extent.start // RAW % 251 + 1]) * (extent.nbytes // 2 + extent.start // RAW)


def encode(extent: Extent) -> Encoded:
    return Encoded(content(extent), "half")


def run(store: MemoryStore | LocalStore | FaultyStore, chunks: list[Extent], **more) -> Flushed:
    return flush(store, AT, 0, chunks, more.pop("encode", encode), **more)


# --- what is given to the store ----------------------------------------------


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("writers", [1, 2])
def test_no_chunks_give_no_pack(workers: int, writers: int) -> None:
    store = MemoryStore()
    flushed = run(store, [], workers=workers, writers=writers)
    assert (flushed.chunks, flushed.packs, flushed.batches) == ((), (), 0)
    assert list(store.list()) == []


def test_without_workers_each_chunk_is_given_as_it_is() -> None:
    threads, parts = set(), []

    def note(extent: Extent) -> Encoded:
        threads.add(threading.current_thread())
        return encode(extent)

    def write(store: WriteStore, name: str, given: Iterable[Buffer]) -> int:
        return store.keep(name, (parts.append(part) or part for part in given))

    batches: list[Batch] = []
    flushed = run(WriteStore(write), extents(3), encode=note, observe=batches.append)
    assert threads == {threading.current_thread()}
    assert [p for p in parts if any(p)] == [content(c) for c in extents(3)]
    assert [b.chunks for b in batches] == [1, 1, 1]
    assert sum(b.nbytes for b in batches) == flushed.packs[0].nbytes
    assert flushed.helper_cpu_s == 0.0


def test_chunks_that_are_ready_are_merged_into_one_part_on_whole_pages() -> None:
    parts: list[tuple[int, int]] = []

    def write(store: WriteStore, name: str, given: Iterable[Buffer]) -> int:
        def watched() -> Iterator[Buffer]:
            for part in given:
                view = memoryview(part)
                assert not view.readonly
                place = ctypes.addressof(ctypes.c_char.from_buffer(view))
                parts.append((place % PAGE, view.nbytes))
                yield part

        return store.keep(name, watched())

    batches: list[Batch] = []
    flushed = run(WriteStore(write), extents(5), policy=Whole(), workers=2, observe=batches.append)
    assert parts == [(0, flushed.packs[0].nbytes)]
    assert [(b.chunks, b.nbytes) for b in batches] == [(5, flushed.packs[0].nbytes)]
    assert flushed.batches == 1


def test_stale_bytes_of_an_earlier_batch_never_get_into_a_gap() -> None:
    store, reference = MemoryStore(), MemoryStore()
    run(store, extents(9), policy=FixedBytes(2 * RAW), workers=1, budget_bytes=4 * RAW)
    run(reference, extents(9))
    (name,) = [entry.name for entry in reference.list()]
    assert read_all(store, name) == read_all(reference, name)
    data, offset = read_all(store, name), 0
    for extent in extents(9):
        stored = content(extent)
        assert data[offset : offset + len(stored)] == stored
        gap = -len(stored) % PAGE
        assert not any(data[offset + len(stored) : offset + len(stored) + gap])
        offset += len(stored) + gap


@pytest.mark.parametrize("workers", [0, 2])
def test_padded_chunks_reach_the_store_without_a_copy(workers: int) -> None:
    image = bytearray(4 * RAW)
    chunks = [Extent(i * RAW, (i + 1) * RAW - 100) for i in range(4)]

    def raw(extent: Extent) -> Encoded:
        view = memoryview(image)
        if extent.start == 2 * RAW:
            return Encoded(b"encoded", "other")
        return Encoded(view[extent.start : extent.stop], "raw", view[extent.start :][:RAW])

    seen = []

    def write(store: WriteStore, name: str, given: Iterable[Buffer]) -> int:
        def watched() -> Iterator[Buffer]:
            for part in given:
                seen.append(isinstance(part, memoryview) and part.obj is image)
                yield part

        return store.keep(name, watched())

    flushed = run(WriteStore(write), chunks, encode=raw, policy=Whole(), workers=workers)
    assert seen.count(True) == 3
    assert flushed.packs[0].nbytes == 2 * RAW + PAGE + RAW - 100
    del seen[:]
    image.extend(b"!")  # no view is left: a bytearray with one cannot grow


@pytest.mark.parametrize(
    ("policy", "writes"),
    [
        (Ready(), [[0], [1, 2, 3], [4], [5, 6]]),  # what is ready then, and not what is not
        (Ready(2 * RAW), [[0], [1, 2], [3], [4], [5, 6]]),
        (FixedBytes(1), [[0], [1], [2], [3], [4], [5], [6]]),
    ],
)
def test_without_workers_neighbours_that_are_ready_are_one_part(
    policy: Ready | FixedBytes, writes: list[list[int]]
) -> None:
    """Chunk 4 is not padded, and chunk 0 is copied while all others are not."""
    image = memoryview(bytearray(range(1, 252)) * (7 * RAW // 251 + 1))[: 7 * RAW]
    chunks = [Extent(e.start, e.stop - 100 * (i == 2)) for i, e in enumerate(extents(7))]
    image[chunks[2].stop : 3 * RAW] = bytes(100)
    begun: list[Extent] = []
    given: list[bytes] = []
    freed: list[tuple[int, int]] = []

    def encode(extent: Extent) -> Encoded:
        begun.append(extent)
        padded = image[extent.start : -(-extent.stop // PAGE) * PAGE]
        return Encoded(
            image[extent.start : extent.stop], "raw", padded if extent != chunks[4] else None
        )

    def write(store: WriteStore, name: str, parts: Iterable[Buffer]) -> int:
        def noted() -> Iterator[Buffer]:
            for part in parts:
                given.append(bytes(part))
                yield part

        return store.keep(name, noted())

    batches: list[Batch] = []
    flushed = run(
        WriteStore(write),
        chunks,
        encode=encode,
        policy=policy,
        observe=batches.append,
        image=image,
        is_ready=lambda extent: len(begun) > 0 and bool(given),
        written=lambda extent: freed.append((chunks.index(extent), len(given))),
    )
    expected = [bytes(image[chunks[w[0]].start : (w[-1] + 1) * RAW]) for w in writes]
    assert given == expected
    assert [b.chunks for b in batches] == [len(w) for w in writes]
    assert freed == [(i, n) for n, w in enumerate(writes, 1) for i in w]
    assert [c.offset for c in flushed.chunks] == [c.start for c in chunks]
    assert begun == chunks


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 100])
@pytest.mark.parametrize("packs", [1, 2, 3, 4])
def test_packs_of_about_the_same_size(count: int, packs: int) -> None:
    chunks = extents(count)
    found = [len(g) for g in groups(chunks, even_pack_bytes(chunks, packs))]
    assert sum(found) == count
    assert len(found) == min(packs, count, -(-count // max(found)))
    assert max(found) <= -(-count // packs)


def test_a_merged_part_is_one_write_past_the_page_cache(tmp_path: Path) -> None:
    class Counting(Files):
        def __init__(self) -> None:
            self.direct = False
            self.writes: list[tuple[bool, int]] = []

        def set_direct(self, fd: int, direct: bool) -> None:
            self.direct = direct  # the test's file system may know no such writes

        def write(self, fd: int, data: memoryview) -> int:
            self.writes.append((self.direct, data.nbytes))
            return super().write(fd, data)

    files = Counting()
    flushed = run(LocalStore(tmp_path, files), extents(8), policy=Whole(), workers=1)
    size = flushed.packs[0].nbytes
    assert files.writes == [(True, size // PAGE * PAGE), (False, size % PAGE)]


def test_a_policy_is_asked_until_the_tail_is_written() -> None:
    policy, batches = Recording(FixedBytes(3 * RAW // 2)), []
    run(MemoryStore(), extents(7), policy=policy, workers=1, observe=batches.append)
    assert [batch.chunks for batch in batches] == [3, 3, 1]
    assert policy.asked[-1][1] is False


def test_a_policy_that_takes_nothing_at_the_end_loses_no_tail() -> None:
    class Never:
        def take(self, ready_bytes: Sequence[int], *, more_coming: bool) -> int:
            return 0

    flushed = run(MemoryStore(), extents(4), policy=Never(), workers=2, budget_bytes=2 * RAW)
    assert len(flushed.chunks) == 4


def test_a_batch_that_the_budget_cannot_hold_is_written_when_the_budget_is_full() -> None:
    policy, batches = Recording(FixedBytes(100 * RAW)), []
    store = MemoryStore()
    run(
        store,
        extents(8),
        policy=policy,
        workers=1,
        budget_bytes=4 * RAW,
        observe=batches.append,
    )
    assert sum(batch.chunks for batch in batches) == 8
    assert len(batches) > 1
    taken_at = [sizes for sizes, more in policy.asked if not more]
    assert len(taken_at) == len(batches)
    assert all(sum(sizes) > 2 * RAW for sizes in taken_at[:-1])


@pytest.mark.parametrize("budget", [1, RAW, 3 * RAW])
def test_a_chunk_larger_than_the_budget_or_than_its_raw_bytes_is_written_all_the_same(
    budget: int,
) -> None:
    def grow(extent: Extent) -> Encoded:
        return Encoded(content(extent) * 5, "grown")

    stores = MemoryStore(), MemoryStore()
    run(stores[0], extents(5), encode=grow)
    run(stores[1], extents(5), encode=grow, workers=2, writers=2, budget_bytes=budget)
    (name,) = [entry.name for entry in stores[0].list()]
    assert read_all(stores[1], name) == read_all(stores[0], name)


# --- memory -----------------------------------------------------------------


class Live:
    """Counts bytes of buffers that are alive."""

    def __init__(self) -> None:
        self.nbytes = self.peak = 0
        self.changed = threading.Condition()

    def add(self, nbytes: int) -> None:
        with self.changed:
            self.nbytes += nbytes
            self.peak = max(self.peak, self.nbytes)
            self.changed.notify_all()

    def encode(self, extent: Extent) -> Encoded:
        return Encoded(Counted(self, extent.nbytes), "counted")


class Counted(bytearray):
    def __init__(self, live: Live, nbytes: int) -> None:
        super().__init__(nbytes)
        self.live, self.counted = live, nbytes
        live.add(nbytes)

    def __del__(self) -> None:
        self.live.add(-self.counted)


@pytest.mark.parametrize("writers", [1, 2])
@pytest.mark.parametrize("workers", [1, 3])
def test_a_slow_store_holds_back_the_encoders_at_the_budget(
    workers: int, writers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, budget, staged = Live(), 4 * RAW, []
    chunks, per_pack = extents(24), 12
    real = flushing.mmap.mmap

    def counted(fd: int, nbytes: int) -> object:
        staged.append(nbytes)
        return real(fd, nbytes)

    monkeypatch.setattr(flushing.mmap, "mmap", counted)
    given = [0, 0]

    def is_held_back() -> bool:
        # Near the end of a pack its encoders no longer fill their share.
        return live.nbytes >= budget or max(given) >= per_pack - 4

    def write(store: WriteStore, name: str, parts: Iterable[Buffer]) -> int:
        taken = 0
        for part in parts:
            taken += memoryview(part).nbytes
            with live.changed:
                given[int(name[-6]) - 1] = taken // RAW
                live.changed.notify_all()
                # As slow as can be: no more is taken until the encoders have stopped.
                assert live.changed.wait_for(is_held_back, WAIT_S)
        return taken

    run(
        WriteStore(write),
        chunks,
        encode=live.encode,
        workers=workers,
        writers=writers,
        budget_bytes=budget,
        pack_bytes=per_pack * RAW,
    )
    assert live.peak == budget
    assert live.nbytes == 0
    assert staged == [budget // writers] * writers


def test_without_workers_one_chunk_is_alive_at_a_time() -> None:
    live = Live()

    def write(store: WriteStore, name: str, parts: Iterable[Buffer]) -> int:
        taken = 0
        for part in parts:
            taken += memoryview(part).nbytes
        return taken

    run(WriteStore(write), extents(10), encode=live.encode)
    assert live.peak <= 2 * RAW  # the store still refers to a part when it asks for the next
    assert live.nbytes == 0


# --- several at once --------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_packs_are_written_at_the_same_time(workers: int) -> None:
    both = threading.Barrier(2)

    def write(store: WriteStore, name: str, parts: Iterable[Buffer]) -> int:
        def together() -> Iterator[Buffer]:
            for i, part in enumerate(parts):
                if not i:
                    both.wait(WAIT_S)
                yield part

        return store.keep(name, together())

    store, reference = WriteStore(write), MemoryStore()
    more = {"pack_bytes": 4 * RAW, "budget_bytes": 2 * RAW}
    found = run(store, extents(16), workers=workers, writers=2, **more)
    expected = run(reference, extents(16), **more)
    assert (found.chunks, found.packs) == (expected.chunks, expected.packs)
    assert len(found.packs) == 4


def test_chunks_are_encoded_at_the_same_time() -> None:
    both = threading.Barrier(2)

    def meet(extent: Extent) -> Encoded:
        both.wait(WAIT_S)
        return encode(extent)

    assert len(run(MemoryStore(), extents(4), encode=meet, workers=2).chunks) == 4


def test_the_next_pack_is_encoded_while_the_last_one_becomes_durable() -> None:
    ahead = threading.Event()

    def watch(extent: Extent) -> Encoded:
        if extent.start >= 4 * RAW:
            ahead.set()
        return encode(extent)

    def write(store: WriteStore, name: str, parts: Iterable[Buffer]) -> int:
        taken = store.keep(name, parts)
        assert ahead.wait(WAIT_S)
        return taken

    run(WriteStore(write), extents(8), encode=watch, workers=1, pack_bytes=4 * RAW)


def test_where_no_thread_can_be_started_the_caller_does_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    store, reference = MemoryStore(), MemoryStore()
    run(reference, extents(6), pack_bytes=2 * RAW)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    run(store, extents(6), pack_bytes=2 * RAW, workers=2, writers=2)
    assert {e.name: read_all(store, e.name) for e in store.list()} == {
        e.name: read_all(reference, e.name) for e in reference.list()
    }


# --- failures ---------------------------------------------------------------

HOW = pytest.mark.parametrize(
    ("workers", "writers"), [(0, 1), (0, 2), (1, 1), (2, 1), (2, 2), (3, 3)]
)


@HOW
@pytest.mark.parametrize("failing", [0, 5, 11])
def test_a_failure_to_encode_ends_the_flush(failing: int, workers: int, writers: int) -> None:
    def fail(extent: Extent) -> Encoded:
        if extent.start == failing * RAW:
            raise DroppedCheckpoint(20, "w", "it changed")
        return encode(extent)

    store = MemoryStore()
    with pytest.raises(DroppedCheckpoint, match="it changed"):
        run(
            store,
            extents(12),
            encode=fail,
            workers=workers,
            writers=writers,
            pack_bytes=4 * RAW,
            budget_bytes=3 * RAW,
        )
    assert f"step-00000020/a000003-r0000-{failing // 4 + 1:04d}.pack" not in {
        entry.name for entry in store.list()
    }


def test_of_two_chunks_that_fail_the_first_one_is_told_whichever_failed_first() -> None:
    later = threading.Event()

    def fail(extent: Extent) -> Encoded:
        if extent.start == 2 * RAW:
            assert later.wait(WAIT_S)
            raise DroppedCheckpoint(20, "first", "no")
        if extent.start == 3 * RAW:
            later.set()
            raise DroppedCheckpoint(20, "second", "no")
        return encode(extent)

    with pytest.raises(DroppedCheckpoint) as caught:
        run(MemoryStore(), extents(8), encode=fail, workers=2)
    assert caught.value.key == "first"


def test_a_writer_that_waits_for_a_chunk_hears_that_it_failed() -> None:
    waiting = threading.Event()

    class Tell:
        def take(self, ready_bytes: Sequence[int], *, more_coming: bool) -> int:
            waiting.set()
            return 0 if more_coming else len(ready_bytes)

    def fail(extent: Extent) -> Encoded:
        if extent.start == 0:
            return encode(extent)
        assert waiting.wait(WAIT_S)
        raise DroppedCheckpoint(20, "", "the trainer gave it up")

    with pytest.raises(DroppedCheckpoint):
        run(MemoryStore(), extents(3), encode=fail, workers=1, policy=Tell())


@HOW
@pytest.mark.parametrize("when", ["before", "mid", "after"])
def test_a_failure_of_the_store_stops_everything_and_is_raised_once(
    when: str, workers: int, writers: int
) -> None:
    store = FaultyStore(MemoryStore(), Fault(at=2, op="write", when=when, do="EIO"))
    begun: list[Extent] = []

    def note(extent: Extent) -> Encoded:
        begun.append(extent)
        return encode(extent)

    with pytest.raises(StoreError, match="injected"):
        run(
            store,
            extents(40),
            encode=note,
            workers=workers,
            writers=writers,
            pack_bytes=2 * RAW,
            budget_bytes=2 * RAW,
        )
    before = len(begun)
    assert store.operations.count(("write", "step-00000020/a000003-r0000-0002.pack")) == 1
    if writers == 1:
        assert len(store.operations) == 2  # no further pack was begun
        assert before <= 10
    assert len(begun) == before


@HOW
def test_a_store_that_takes_only_half_is_an_error(workers: int, writers: int) -> None:
    store = FaultyStore(MemoryStore(), Fault(at=1, op="write", do="short"))
    with pytest.raises(StoreError, match="were given, the medium took"):
        run(store, extents(8), workers=workers, writers=writers, pack_bytes=4 * RAW)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_store_that_stops_asking_is_an_error(workers: int) -> None:
    def write(store: WriteStore, name: str, parts: Iterable[Buffer]) -> int:
        return memoryview(next(iter(parts))).nbytes

    with pytest.raises(StoreError, match="asked for 1 of 4 chunks"):
        run(WriteStore(write), extents(4), workers=workers, policy=Ready(1))


def test_a_store_that_does_not_ask_beyond_the_last_part_holds_nothing_up() -> None:
    image = bytearray(8 * RAW)

    def raw(extent: Extent) -> Encoded:
        view = memoryview(image)[extent.start : extent.stop]
        return Encoded(view, "raw", view)

    def write(store: WriteStore, name: str, parts: Iterable[Buffer]) -> int:
        each = iter(parts)
        return store.keep(name, [bytes(next(each)) for _ in range(2)])

    store = WriteStore(write)
    flushed = run(
        store, extents(8), encode=raw, workers=1, pack_bytes=2 * RAW, budget_bytes=2 * RAW
    )
    assert len(flushed.packs) == 4


@HOW
@pytest.mark.parametrize("place", ["encode", "store", "observe"])
def test_an_interrupt_anywhere_ends_all_threads(place: str, workers: int, writers: int) -> None:
    def strike(here: str) -> None:
        if here == place:
            raise KeyboardInterrupt

    def interrupted(extent: Extent) -> Encoded:
        if extent.start == 6 * RAW:
            strike("encode")
        return encode(extent)

    def write(store: WriteStore, name: str, parts: Iterable[Buffer]) -> int:
        def watched() -> Iterator[Buffer]:
            for part in parts:
                yield part
                if name.endswith("0002.pack"):
                    strike("store")

        return store.keep(name, watched())

    with pytest.raises(KeyboardInterrupt):
        run(
            WriteStore(write),
            extents(12),
            encode=interrupted,
            workers=workers,
            writers=writers,
            pack_bytes=4 * RAW,
            observe=lambda batch: strike("observe"),
        )


def test_an_interrupt_while_others_write_ends_them_before_it_is_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    helping, interrupted, ended = threading.Event(), threading.Event(), []

    def write(store: WriteStore, name: str, parts: Iterable[Buffer]) -> int:
        if threading.current_thread() is threading.main_thread():
            assert helping.wait(WAIT_S)
        else:
            helping.set()
            assert interrupted.wait(WAIT_S)
            ended.append(name)
        return store.keep(name, parts)

    join = threading.Thread.join

    def interrupt_once(thread: threading.Thread, timeout: float | None = None) -> None:
        if not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", interrupt_once)
    with pytest.raises(KeyboardInterrupt):
        run(WriteStore(write), extents(2), writers=2, pack_bytes=RAW)
    assert len(ended) == 1


def test_no_view_of_the_image_is_left_behind_a_failure() -> None:
    image, seen = bytearray(8 * RAW), threading.Semaphore(0)

    def raw(extent: Extent) -> Encoded:
        seen.release()
        view = memoryview(image)[extent.start : extent.stop]
        return Encoded(view, "raw", view)

    def write(store: WriteStore, name: str, parts: Iterable[Buffer]) -> int:
        next(iter(parts))
        assert all(seen.acquire(timeout=WAIT_S) for _ in range(4))
        raise StoreError("no more", retryable=False)

    gc.disable()  # what is left in a cycle of an error and its frames would stay for long
    try:
        with pytest.raises(StoreError, match="no more"):
            run(WriteStore(write), extents(8), encode=raw, workers=1, budget_bytes=8 * RAW)
        image.extend(b"!")
    finally:
        gc.enable()


# --- what it took -----------------------------------------------------------


def test_the_time_of_the_store_is_told_from_that_of_the_encoder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s, cpu_s = [100.0], [7.0]
    monkeypatch.setattr(flushing, "perf_counter", lambda: now_s[0])
    monkeypatch.setattr(flushing, "thread_time", lambda: cpu_s[0])

    def slow(extent: Extent) -> Encoded:
        now_s[0] += 3.0
        cpu_s[0] += 2.0
        return Encoded(content(extent), "half")

    def write(store: WriteStore, name: str, parts: Iterable[Buffer]) -> int:
        taken = 0
        for part in parts:
            now_s[0] += 0.5 if memoryview(part).nbytes < PAGE else 4.5  # the gap is a part
            taken += memoryview(part).nbytes
        now_s[0] += 10.0  # the sync
        return taken

    batches: list[Batch] = []
    flushed = run(WriteStore(write), extents(3), encode=slow, observe=batches.append)
    assert [(b.start_s, b.duration_s) for b in batches] == [
        (103.0, 4.5),
        (110.5, 5.0),
        (118.5, 4.5),
    ]
    assert flushed.write_s == 4.5 + 5.0 + 4.5 + 10.0
    assert flushed.encode_s == 9.0
    assert flushed.encode_cpu_s == 6.0
    assert flushed.batches == 3


def test_the_cpu_time_of_the_workers_is_counted() -> None:
    def work(extent: Extent) -> Encoded:
        return Encoded(zlib.compress(bytes(extent.nbytes), 9), "zlib")

    flushed = run(MemoryStore(), extents(4, CHUNK_BYTES // 4), encode=work, workers=2)
    assert 0.0 < flushed.encode_cpu_s <= flushed.helper_cpu_s
