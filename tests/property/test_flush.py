"""Whatever threads, policies and budgets: the same bytes at the same places."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from asymcheck.planning.batching import FixedBytes, Policy, Ready
from asymcheck.planning.layout import Extent
from asymcheck.planning.retention import CheckpointId
from asymcheck.storage.flush import Encoded, flush
from asymcheck.storage.index import Chunk, StoredObject
from asymcheck.storage.memory import MemoryStore
from asymcheck.storage.sealed import digest
from asymcheck.storage.store import read_all

AT = CheckpointId(attempt=1, step=2)
PAGE = 4096

HOWS = ("raw", "padded", "small", "page", "large")


class Fickle:
    """Takes what a list says, also nothing and too much."""

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = list(counts)
        self.asked = 0

    def take(self, ready_bytes: Sequence[int], *, more_coming: bool) -> int:
        self.asked += 1
        return self.counts[self.asked % len(self.counts)]


POLICIES: st.SearchStrategy[Callable[[], Policy]] = st.one_of(
    st.just(Ready),
    st.integers(1, 60_000).map(lambda n: lambda: Ready(n)),
    st.integers(1, 60_000).map(lambda n: lambda: FixedBytes(n)),
    st.lists(st.integers(0, 9), min_size=1).map(lambda counts: lambda: Fickle(counts)),
)


def expected(
    chunks: Sequence[Extent], stored: dict[int, bytes], codecs: dict[int, str], pack_bytes: int
) -> tuple[dict[str, bytes], list[Chunk]]:
    """Packs and rows by the words of docs/format.md, chunk by chunk."""
    packs: list[bytearray] = []
    rows, begun_at = [], 0
    for extent in chunks:
        if not packs or extent.stop - begun_at > pack_bytes:
            packs.append(bytearray())
            begun_at = extent.start
        pack = packs[-1]
        pack.extend(bytes(-len(pack) % PAGE))
        data = stored[extent.start]
        rows.append(
            Chunk(
                extent.start,
                extent.nbytes,
                len(packs) - 1,
                len(pack),
                len(data),
                codecs[extent.start],
                digest(data),
            )
        )
        pack.extend(data)
    named = {
        f"step-00000002/a000001-r0005-{serial:04d}.pack": bytes(pack)
        for serial, pack in enumerate(packs, 1)
    }
    return named, rows


@settings(max_examples=150)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 3 * PAGE), st.sampled_from(HOWS)), max_size=30),
    policy=POLICIES,
    workers=st.integers(0, 3),
    writers=st.integers(1, 3),
    budget=st.integers(1, 100_000),
    pack_bytes=st.integers(1, 100_000),
)
def test_packs_do_not_depend_on_how_they_are_written(
    shapes: list[tuple[int, str]],
    policy: Callable[[], Policy],
    workers: int,
    writers: int,
    budget: int,
    pack_bytes: int,
) -> None:
    image, chunks, stored, codecs = bytearray(), [], {}, {}
    for i, (nbytes, how) in enumerate(shapes):
        start = len(image)
        image += bytes([i + 1]) * nbytes + bytes(-nbytes % PAGE)
        chunks.append(Extent(start, start + nbytes))
        lengths = {"small": -(-nbytes // 3), "page": PAGE, "large": 2 * nbytes}
        stored[start] = bytes([i + 1]) * lengths.get(how, nbytes)
        codecs[start] = how

    def encode(extent: Extent) -> Encoded:
        if codecs[extent.start] == "padded":
            view = memoryview(image)[extent.start : -(-extent.stop // PAGE) * PAGE]
            return Encoded(view[: extent.nbytes], "padded", view)
        return Encoded(bytearray(stored[extent.start]), codecs[extent.start])

    store, batches = MemoryStore(), []
    flushed = flush(
        store,
        AT,
        5,
        chunks,
        encode,
        policy=policy(),
        workers=workers,
        writers=writers,
        budget_bytes=budget,
        pack_bytes=pack_bytes,
        observe=batches.append,
    )
    packs, rows = expected(chunks, stored, codecs, pack_bytes)
    assert {entry.name: read_all(store, entry.name) for entry in store.list()} == packs
    assert list(flushed.chunks) == rows
    assert flushed.packs == tuple(StoredObject(name, len(data)) for name, data in packs.items())
    assert flushed.batches == len(batches)
    assert sum(batch.chunks for batch in batches) == len(chunks)
    assert sum(batch.nbytes for batch in batches) == sum(map(len, packs.values()))
    image.append(1)  # no view of it is left
