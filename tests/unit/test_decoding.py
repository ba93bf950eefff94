"""Encoded chunks and deltas: read back bit for bit, refused with their names where they are bad."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from asymcheck import Checkpointer
from asymcheck.cli import app
from asymcheck.codec import table
from asymcheck.codec.codec import Codec, Encoding, Malformed
from asymcheck.decoding import Decoding, Find, verify
from asymcheck.errors import (
    CheckpointWarning,
    CorruptCheckpoint,
    IncompatibleCheckpoint,
    NoCheckpoint,
    OptionError,
    StoreError,
)
from asymcheck.planning.layout import MiB, align_up, lay_out
from asymcheck.planning.retention import CheckpointId, Retention
from asymcheck.storage.index import Chunk, Index, Leaf, Loss, StoredObject, dump_index
from asymcheck.storage.local import LocalStore
from asymcheck.storage.manifest import Base, make_manifest, parse_manifest
from asymcheck.storage.memory import MemoryStore
from asymcheck.storage.names import index_name, manifest_name, pack_name
from asymcheck.storage.repository import Repository, create_repository, open_repository
from asymcheck.storage.sealed import digest
from asymcheck.storage.store import Entry, read_all
from asymcheck.testing.checkpoints import read_bytes
from asymcheck.testing.faulty import Fault, FaultyStore
from asymcheck.upkeep import Wanted, plan_prune, prune, rows_of

TREE = json.dumps(
    {"items": {"w": {"kind": "tensor", "key": "w"}, "b": {"kind": "tensor", "key": "b"}}, "rng": {}}
).encode()
GOLDEN = Path(__file__).parents[1] / "golden"
LOSSLESS = [codec.label for codec in table.CODECS if codec.lossless and not codec.needs_base]
DELTAS = [codec.label for codec in table.CODECS if codec.lossless and codec.needs_base]
PLAIN, DELTA = LOSSLESS[-1], DELTAS[-1]


@dataclass(frozen=True)
class Xor:
    """A codec that is plain to see through: every byte, by one of the base or by 0x55."""

    name: str = "xor"
    label: str = "xor"
    lossless: bool = True
    needs_base: bool = False

    def encode(self, raw: memoryview, dtype: str, base: memoryview | None) -> Encoding | None:
        return Encoding(self._turned(raw, base))

    def decode(self, stored: memoryview, into: memoryview, base: memoryview | None) -> None:
        if len(stored) != len(into):
            raise Malformed(f"expected {len(into)} bytes, found {len(stored)}")
        into[:] = self._turned(stored, base)

    def _turned(self, data: memoryview, base: memoryview | None) -> bytes:
        other = np.frombuffer(base, np.uint8) if self.needs_base and base is not None else 0x55
        return (np.frombuffer(data, np.uint8) ^ np.uint8(other)).tobytes()


XOR, XOR_BASE = Xor(), Xor("xor+base", "xor+base", needs_base=True)
LOSSY = Xor("lossy", "lossy", lossless=False)


def fakes(name: str) -> Codec | None:
    return {"xor": XOR, "xor+base": XOR_BASE, "lossy": LOSSY}.get(name)


def tensors(step: int, size: int = 50_000) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    w = torch.randn(size, generator=generator)
    return {"w": w + step * 1e-4, "b": torch.arange(10.0) + step}


def values(step: int, size: int = 50_000) -> dict[str, bytes]:
    return {**{k: t.numpy().tobytes() for k, t in tensors(step, size).items()}, "": TREE}


def commit(
    repository: Repository,
    at: CheckpointId,
    data: Mapping[str, bytes],
    codec: Codec | None = None,
    *,
    base: CheckpointId | None = None,
    fidelity: str = "exact",
    find: Find = table.find,
    dtype: str = "float32",
    everywhere: bool = False,
) -> None:
    """Commit leaves; those with a chunk of their own, or all, go through ``codec``."""
    index = write(repository, at, data, codec, base, find, dtype, everywhere)
    repository.commit(index, base=base, fidelity=fidelity)


def write(
    repository: Repository,
    at: CheckpointId,
    data: Mapping[str, bytes],
    codec: Codec | None = None,
    base: CheckpointId | None = None,
    find: Find = table.find,
    dtype: str = "float32",
    everywhere: bool = False,
) -> Index:
    layout = lay_out([len(raw) for raw in data.values()])
    image = bytearray(layout.image_bytes)
    leaves, old = [], {}
    if base is not None:
        with repository.open(base) as opened:
            decoding, (index,) = Decoding(opened, find), opened.indexes
            old = {leaf.key: decoding.read_leaf(index, leaf) for leaf in index.leaves}
    under = bytearray(layout.image_bytes)
    for (key, raw), place in zip(data.items(), layout.leaves, strict=True):
        image[place.start : place.stop] = raw
        size = len(old.get(key, b""))
        under[place.start : place.start + min(size, len(raw))] = old.get(key, b"")[: len(raw)]
        kind, width = ("json", 1) if not key else (dtype, 4)
        leaves.append(Leaf(key, kind, (len(raw) // width,), place.start, len(raw)))
    pack, rows = bytearray(), []
    for extent in layout.chunks:
        raw = memoryview(image)[extent.start : extent.stop]
        own = extent.nbytes > 64 << 10 or everywhere
        encoding = None
        if codec is not None and own:
            below = memoryview(under)[extent.start : extent.stop] if codec.needs_base else None
            encoding = codec.encode(raw, dtype, below)
        stored = bytes(raw if encoding is None else encoding.data)
        name = "raw" if codec is None or encoding is None else codec.name
        pack += bytes(align_up(len(pack), 4096) - len(pack))
        rows.append(
            Chunk(extent.start, extent.nbytes, 0, len(pack), len(stored), name, digest(stored))
        )
        pack += stored
    name = pack_name(at, 0, 1)
    repository.store.write(name, [pack])
    return Index(
        run=repository.run,
        at=at,
        rank=0,
        world=1,
        created_s=0.0,
        metrics={},
        versions={},
        leaves=tuple(sorted(leaves, key=lambda leaf: (leaf.at, leaf.stop))),
        aliases={},
        chunks=tuple(rows),
        packs=(StoredObject(name, len(pack)),),
    )


def restored(store: MemoryStore, size: int = 50_000) -> tuple[int, dict[str, torch.Tensor]]:
    live = {"w": torch.zeros(size), "b": torch.zeros(10)}
    step = Checkpointer(store, state=live, read_only=True).restore()
    return step, live


def loaded(store: MemoryStore, said: str = "random number generators") -> int:
    """The step that is restored, every tensor of it compared; it warns of that."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CheckpointWarning)
        step, live = restored(store)
    assert [w for w in caught if re.search(said, str(w.message))]
    for key, tensor in tensors(step).items():
        assert torch.equal(live[key], tensor), key
    return step


def read_through(repository: Repository, at: CheckpointId, find: Find) -> dict[str, bytes]:
    with repository.open(at) as opened:
        decoding, (index,) = Decoding(opened, find), opened.indexes
        return {leaf.key: decoding.read_leaf(index, leaf) for leaf in index.leaves}


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def repository(store: MemoryStore) -> Repository:
    made = create_repository(store)
    made.claim(None)
    return made


ONE, TWO, THREE, FOUR = (CheckpointId(1, step) for step in (1, 2, 3, 4))


def star(repository: Repository, *deltas: CheckpointId) -> None:
    """Step 1 compressed, and deltas of it."""
    commit(repository, ONE, values(1), table.by_label(PLAIN))
    for at in deltas:
        commit(repository, at, values(at.step), table.by_label(DELTA), base=ONE)


# --- reading ----------------------------------------------------------------


@pytest.mark.parametrize("label", LOSSLESS)
@pytest.mark.parametrize("everywhere", [False, True])
def test_what_a_lossless_codec_stored_is_restored_bit_for_bit(
    repository: Repository, store: MemoryStore, label: str, everywhere: bool
) -> None:
    data = {**values(1), "zeros": bytes(70_000), "": TREE}
    data = {k: data[k] for k in ("w", "b", "zeros", "")}
    commit(repository, ONE, data, table.by_label(label), everywhere=everywhere)
    assert read_bytes(repository, ONE) == data
    assert list(verify(repository, ONE)) == []
    with repository.open(ONE) as opened:
        assert (label == "raw") == (opened.indexes[0].chunks[-1].codec == "raw")


@pytest.mark.parametrize("label", DELTAS)
@pytest.mark.parametrize("of", LOSSLESS)
def test_a_delta_is_restored_bit_for_bit_whatever_its_base_is_stored_as(
    repository: Repository, store: MemoryStore, label: str, of: str
) -> None:
    commit(repository, ONE, values(1), table.by_label(of))
    commit(repository, TWO, values(2), table.by_label(label), base=ONE)
    with repository.open(TWO) as opened:
        assert opened.indexes[0].chunks[-1].codec == table.by_label(label).name
        assert opened.base is not None
        assert opened.manifest.base == Base(ONE, opened.base.manifest.hash)
    assert read_bytes(repository, TWO) == values(2)
    assert list(verify(repository, TWO)) == []
    assert loaded(store) == 2


def test_each_chunk_of_a_leaf_of_several_stands_on_its_own_chunk_of_the_base(
    repository: Repository, store: MemoryStore
) -> None:
    size = 9 * MiB
    commit(repository, ONE, {"more": bytes(70_000), **values(1, size)}, table.by_label(PLAIN))
    commit(repository, TWO, {"less": bytes(60_000), **values(2, size)}, XOR_BASE, base=ONE)
    with repository.open(TWO) as opened:
        chunks = opened.indexes[0].chunks
        assert [c.codec for c in chunks if c.nbytes > MiB] == ["xor+base"] * 3
        assert opened.base is not None
        assert opened.base.indexes[0].chunks[-1].at != chunks[-1].at
    assert read_through(repository, TWO, both) == {"less": bytes(60_000), **values(2, size)}


def both(name: str) -> Codec | None:
    return fakes(name) or table.find(name)


def test_an_exact_checkpoint_says_nothing_of_fidelity_and_base(repository: Repository) -> None:
    star(repository, TWO)
    first, second = (read_all(repository.store, manifest_name(at)) for at in (ONE, TWO))
    assert b'"needs":[]' in first
    assert not [word for word in (b"base", b"fidelity", b"losses") if word in first]
    assert b'"needs":["base"]' in second
    assert f'"base":[1,1,"{digest(first)}"]'.encode() in second


def test_a_lossy_checkpoint_says_so_and_what_it_lost(repository: Repository) -> None:
    losses = (Loss("exp_avg", "lossy", 0.5, 0.25, 200_000),)
    index = replace(write(repository, ONE, values(1), LOSSY), losses=losses)
    manifest = repository.commit(index, fidelity="moments")
    assert manifest.fidelity == "moments"
    assert b'"needs":["lossy"]' in read_all(repository.store, manifest_name(ONE))
    with repository.open(ONE) as opened:
        assert opened.indexes[0].losses == losses
    assert read_through(repository, ONE, fakes) == values(1)


def test_a_lossy_chunk_where_the_manifest_says_exact_is_damage(repository: Repository) -> None:
    commit(repository, ONE, values(1), LOSSY)
    (damage,) = verify(repository, ONE, fakes)
    assert damage.where == index_name(ONE, 0)
    assert "codec 'lossy' is lossy, yet the manifest says 'exact'" in damage.why


def test_a_codec_that_is_not_known_here_needs_a_newer_release(
    repository: Repository, store: MemoryStore
) -> None:
    commit(repository, ONE, values(1), XOR)
    (damage,) = verify(repository, ONE)
    assert damage.newer
    with pytest.raises(IncompatibleCheckpoint, match=r"codec 'xor'.*install a newer asymcheck"):
        restored(store)
    commit(repository, TWO, values(2), XOR_BASE, base=ONE, find=fakes)
    with pytest.raises(IncompatibleCheckpoint, match=r"install a newer"):
        restored(store)
    assert read_through(repository, TWO, fakes) == values(2)


# --- bad bytes --------------------------------------------------------------


def rewritten(
    repository: Repository, at: CheckpointId, change: Callable[[Index], Index], pack: bytes
) -> None:
    """Another index and pack in place of the old ones, all hashes and seals right."""
    with repository.open(at) as opened:
        index, manifest = change(opened.indexes[0]), opened.manifest
    repository.discard(at)
    repository.store.write(index.packs[0].name, [pack])
    base = None if manifest.base is None else manifest.base.at
    repository.commit(index, base, manifest.fidelity)


def with_bytes(repository: Repository, at: CheckpointId, stored: bytes, codec: str) -> None:
    """The last chunk, which is that of ``w``, holds these bytes, and their hash is right."""
    with repository.open(at) as opened:
        index = opened.indexes[0]
        pack = read_all(repository.store, index.packs[0].name)
    *rest, last = index.chunks
    bad = replace(last, stored_bytes=len(stored), codec=codec, hash=digest(stored))
    pack = pack[: last.offset] + stored

    def change(index: Index) -> Index:
        packs = (StoredObject(index.packs[0].name, len(pack)),)
        return replace(index, chunks=(*rest, bad), packs=packs)

    rewritten(repository, at, change, pack)


HOSTILE = [b"\0", b"\xff" * 40, bytes(100_000), b"asymcheck" * 11]
ENCODING = [codec for codec in table.CODECS if codec.name != "raw"]


@pytest.mark.parametrize("codec", ENCODING, ids=lambda c: c.label)
@pytest.mark.parametrize("stored", HOSTILE, ids=range(len(HOSTILE)))
def test_bytes_that_no_codec_wrote_are_damage_with_their_place_and_their_tensor(
    repository: Repository, store: MemoryStore, codec: Codec, stored: bytes
) -> None:
    commit(repository, ONE, values(1))
    commit(repository, TWO, values(2), base=ONE, fidelity="aggressive")
    with_bytes(repository, TWO, stored, codec.name)
    (damage,) = verify(repository, TWO)
    assert damage.where == f"{pack_name(TWO, 0, 1)} at byte 4096"
    assert damage.keys == ("w",)
    assert f"cannot be decoded with {codec.name!r}" in damage.why
    assert damage.why.endswith("hit: w")
    assert loaded(store, "step 2 is damaged and was passed over") == 1


def test_of_several_bad_chunks_the_first_is_told_and_no_thread_is_left(
    repository: Repository, store: MemoryStore
) -> None:
    keys = [f"k{i}" for i in range(12)]
    tree = {"items": {k: {"kind": "tensor", "key": k} for k in keys}, "rng": {}}
    data = {**{k: bytes(100_000) for k in keys}, "": json.dumps(tree).encode()}
    index = write(repository, ONE, data, table.by_label(PLAIN))
    name = next(c.codec for c in index.chunks if c.codec != "raw")
    bad, pack = [], bytearray()
    for place, chunk in enumerate(index.chunks):
        stored = data[""] if chunk.codec == "raw" else b"not encoded"
        if chunk.codec != "raw" and place != 6 and place != 9:
            stored = bytes(table.by_label(PLAIN).encode(memoryview(bytes(100_000)), "", None).data)
        pack += bytes(align_up(len(pack), 4096) - len(pack))
        bad.append(replace(chunk, offset=len(pack), stored_bytes=len(stored), hash=digest(stored)))
        pack += stored
    assert bad[6].codec == name
    store.write(index.packs[0].name, [pack])
    packs = (StoredObject(index.packs[0].name, len(pack)),)
    repository.commit(replace(index, chunks=tuple(bad), packs=packs))
    for _ in range(5):
        live = {k: torch.zeros(25_000) for k in keys}
        with pytest.raises(CorruptCheckpoint, match=rf"at byte {bad[6].offset}: .*hit: k5"):
            Checkpointer(store, state=live, read_only=True).restore()
        assert not [t for t in threading.enumerate() if t.name.startswith("asymcheck-decode")]


def test_a_delta_of_several_leaves_is_damage(repository: Repository) -> None:
    commit(repository, ONE, values(1))
    commit(repository, TWO, values(2), XOR_BASE, base=ONE, everywhere=True)
    (damage,) = verify(repository, TWO, fakes)
    assert "a delta that is no part of one leaf" in damage.why
    assert damage.where == f"{pack_name(TWO, 0, 1)} at byte 0"


def test_a_delta_without_any_base_is_damage(repository: Repository) -> None:
    commit(repository, ONE, values(1), XOR_BASE)
    (damage,) = verify(repository, ONE, fakes)
    assert "codec 'xor+base' needs a base, there is none" in damage.why


@pytest.mark.parametrize(
    ("other", "dtype", "said"),
    [
        ({"v": values(1)["w"], "": TREE}, "float32", "does not have leaf 'w'"),
        (values(1), "int32", "does not have leaf 'w' as float32 of (50000,), but as int32"),
        (values(1, 49_999), "float32", "as float32 of (50000,), but as float32 of (49999,)"),
    ],
)
def test_a_base_without_the_same_leaf_is_damage_that_names_both(
    repository: Repository, other: dict[str, bytes], dtype: str, said: str
) -> None:
    commit(repository, ONE, other, dtype=dtype)
    commit(repository, TWO, values(2), XOR_BASE, base=ONE)
    (damage,) = verify(repository, TWO, fakes)
    assert f"{pack_name(TWO, 0, 1)} at byte 4096: its base, step 1 (attempt 1), " in damage.why
    assert said in damage.why


def test_a_base_whose_chunks_are_cut_otherwise_is_damage(repository: Repository) -> None:
    commit(repository, ONE, values(1))

    def halved(index: Index) -> Index:
        *rest, last = index.chunks
        half = last.nbytes // 2 // 4096 * 4096
        raw = pack[last.offset :]
        first = replace(last, nbytes=half, stored_bytes=half, hash=digest(raw[:half]))
        second = replace(
            last,
            at=last.at + half,
            offset=last.offset + half,
            nbytes=last.nbytes - half,
            stored_bytes=last.nbytes - half,
            hash=digest(raw[half:]),
        )
        return replace(index, chunks=(*rest, first, second))

    pack = read_all(repository.store, pack_name(ONE, 0, 1))
    rewritten(repository, ONE, halved, pack)
    assert read_bytes(repository, ONE) == values(1)
    commit(repository, TWO, values(2), XOR_BASE, base=ONE)
    (damage,) = verify(repository, TWO, fakes)
    assert "does not have a chunk of 200000 bytes at 0 of leaf 'w'" in damage.why


def test_damage_in_the_base_is_damage_of_each_delta_that_names_both(
    repository: Repository, store: MemoryStore
) -> None:
    commit(repository, ONE, values(1))
    commit(repository, TWO, values(2))
    for at in (THREE, FOUR):
        commit(repository, at, values(at.step), table.by_label(DELTA), base=TWO)
    name = pack_name(TWO, 0, 1)
    pack = bytearray(read_all(store, name))
    pack[-1] ^= 1
    store.write(name, [pack])
    for at in (THREE, FOUR):
        (damage,) = verify(repository, at)
        assert damage.why.startswith(f"{pack_name(at, 0, 1)} at byte 4096: its base, step 2")
        assert f"is damaged: {name} at byte 4096: hash" in damage.why
    assert loaded(store, "step 4 is damaged .* its base, step 2") == 1


# --- a base that is gone ----------------------------------------------------


@pytest.mark.parametrize("lost", [manifest_name(TWO), pack_name(TWO, 0, 1), index_name(TWO, 0)])
def test_a_delta_whose_base_is_gone_is_damaged_and_the_one_before_is_loaded(
    repository: Repository, store: MemoryStore, lost: str
) -> None:
    commit(repository, ONE, values(1))
    commit(repository, TWO, values(2))
    commit(repository, THREE, values(3), table.by_label(DELTA), base=TWO)
    assert loaded(store) == 3
    store.delete(lost)
    listing = repository.survey()
    assert list(listing.committed) == [ONE]
    whys = {d.at: d.why for d in listing.damaged}
    said = "is gone" if lost == manifest_name(TWO) else f"is damaged: {lost} is missing"
    assert whys[THREE].startswith(f"its base, step 2 (attempt 1), {said}")
    assert [row.standing for row in rows_of(repository, listing)][-1] == "damaged"
    assert not [name for at, name in listing.leftovers if at == THREE]
    assert loaded(store, r"step 3 is damaged .*its base, step 2") == 1
    (damage,) = verify(repository, THREE)
    assert "its base, step 2 (attempt 1)," in damage.why
    with pytest.raises(CorruptCheckpoint, match="its base, step 2"), repository.open(THREE):
        pass


def test_another_checkpoint_in_the_place_of_the_base_will_not_do(
    repository: Repository, store: MemoryStore
) -> None:
    star(repository, TWO)
    repository.discard(ONE)
    commit(repository, ONE, values(3))
    (damage,) = repository.survey().damaged
    assert damage.at == TWO
    assert "its base, step 1 (attempt 1), is another one than it was" in damage.why
    with pytest.raises(CorruptCheckpoint, match="its delta says"), repository.open(TWO):
        pass
    assert rows_of(repository, repository.survey())[0].standing == "newest"


def test_a_delta_is_no_base(repository: Repository, store: MemoryStore) -> None:
    star(repository, TWO)
    with pytest.raises(OptionError, match="base: expected an exact checkpoint without base"):
        commit(repository, THREE, values(3), table.by_label(DELTA), base=TWO)
    assert not repository.survey().damaged
    chained = write(repository, THREE, values(3), table.by_label(DELTA), base=TWO)
    data = dump_index(chained)
    store.write(index_name(THREE, 0), [data])
    named = Base(TWO, digest(read_all(store, manifest_name(TWO))))
    store.write(manifest_name(THREE), [make_manifest([(chained, data)], base=named)])
    (damage,) = repository.survey().damaged
    assert damage.at == THREE
    assert "step 2 (attempt 1), is a delta itself, which no base may be" in damage.why
    with pytest.raises(CorruptCheckpoint, match="is a delta itself"), repository.open(THREE):
        pass
    assert loaded(store, "is a delta itself") == 2


def test_nothing_is_committed_on_a_base_that_is_not_there_or_not_whole(
    repository: Repository, store: MemoryStore
) -> None:
    index = write(repository, TWO, values(2))
    with pytest.raises(NoCheckpoint, match="expected the base of a delta, found nothing"):
        repository.commit(index, base=ONE)
    commit(repository, ONE, values(1))
    store.write(pack_name(ONE, 0, 1), [b"short"])
    with pytest.raises(CorruptCheckpoint, match=r"base of a delta: .* has 5 bytes"):
        repository.commit(index, base=ONE)
    assert [e for e in store.list() if e.name == manifest_name(TWO)] == []


def test_an_unknown_class_of_fidelity_is_never_written(
    repository: Repository, store: MemoryStore
) -> None:
    index = write(repository, ONE, values(1))
    with pytest.raises(CorruptCheckpoint, match="fidelity"):
        repository.commit(index, fidelity="roughly")
    assert [e for e in store.list() if e.name == manifest_name(ONE)] == []


def test_a_delta_that_is_open_keeps_what_it_stands_on(
    repository: Repository, store: MemoryStore
) -> None:
    star(repository, TWO)
    with create_repository(store).open(TWO) as opened:
        commit(repository, THREE, values(3))
        repository.retain(THREE, Retention(keep_last=1))
        repository.finish()
        assert {e.name for e in store.list() if e.name.startswith("step-0000000")} == {
            manifest_name(THREE), index_name(THREE, 0), pack_name(THREE, 0, 1)
        }  # fmt: skip
        decoding, (index,) = Decoding(opened), opened.indexes
        found = {leaf.key: decoding.read_leaf(index, leaf) for leaf in index.leaves}
    assert found == values(2)


class Listed(MemoryStore):
    """Its first listing was overtaken and lacks some names; then something else happens."""

    hidden: tuple[str, ...] = ()
    then: Callable[[], object] | None = None

    def list(self, prefix: str = "") -> Iterator[Entry]:
        if prefix and self.then is not None:
            act, self.then = self.then, None
            act()
        found, hidden = list(super().list(prefix)), self.hidden
        if not prefix:
            self.hidden = ()
        yield from (e for e in found if prefix or e.name not in hidden)


def test_a_base_that_was_committed_while_the_store_was_listed_is_no_damage() -> None:
    store = Listed("listed")
    repository = create_repository(store)
    star(repository, TWO)
    store.hidden = (manifest_name(ONE), index_name(ONE, 0), pack_name(ONE, 0, 1))
    listing = repository.survey()
    assert list(listing.committed) == [ONE, TWO]
    assert not listing.damaged


def test_a_delta_that_was_removed_with_its_base_while_both_were_listed_is_no_damage() -> None:
    store = Listed("removed")
    repository = create_repository(store)
    star(repository, TWO)
    commit(repository, THREE, values(3))
    before = repository.survey()
    store.hidden = (manifest_name(ONE),)
    store.then = lambda: repository.remove([ONE, TWO], before)
    listing = open_repository(store).survey()
    assert store.then is None
    assert list(listing.committed) == [THREE]
    assert not listing.damaged


# --- retention --------------------------------------------------------------


def test_a_base_stays_as_long_as_a_delta_that_stays_and_goes_with_the_last(
    repository: Repository, store: MemoryStore
) -> None:
    retention = Retention(keep_last=1)
    star(repository)
    for step in (2, 3, 4):
        at = CheckpointId(1, step)
        commit(repository, at, values(step), table.by_label(DELTA), base=ONE)
        repository.retain(at, retention)
        assert list(repository.survey().committed) == [ONE, at]
        assert loaded(store) == step
    five = CheckpointId(1, 5)
    commit(repository, five, values(5))
    assert repository.retain(five, retention) == [ONE, FOUR]
    assert list(repository.survey().committed) == [five]


def test_a_base_on_a_branch_left_behind_stays_with_a_delta_that_stays(
    repository: Repository,
) -> None:
    star(repository, TWO)
    repository.claim(ONE)
    at = CheckpointId(2, 2)
    commit(repository, at, values(2), table.by_label(DELTA), base=ONE)
    assert repository.retain(at, Retention(keep_last=1)) == [TWO]
    assert list(repository.survey().committed) == [ONE, at]


def test_a_delta_that_cannot_be_removed_keeps_its_base(store: MemoryStore) -> None:
    faulty = FaultyStore(store)
    repository = create_repository(faulty)
    repository.claim(None)
    star(repository, TWO)
    commit(repository, THREE, values(3))
    faulty.fault = Fault(op="delete", name=manifest_name(TWO), times=0)
    with pytest.raises(StoreError):
        repository.retain(THREE, Retention(keep_last=1))
    assert list(repository.survey().committed) == [ONE, TWO, THREE]
    assert read_bytes(repository, TWO) == values(2)
    faulty.fault = Fault(do="none")
    repository.retain(THREE, Retention(keep_last=1))
    assert list(repository.survey().committed) == [THREE]


def test_pruning_spares_the_base_of_what_stays(repository: Repository) -> None:
    star(repository, TWO, THREE)
    plan = plan_prune(repository, Wanted(Retention(keep_last=1)))
    assert [row.at for row in plan.gone] == [TWO]
    assert [row.at for row in plan.kept] == [ONE, THREE]
    prune(repository, plan, verify=True)
    assert read_bytes(repository, THREE) == values(3)
    commit(repository, FOUR, values(4))
    shown = plan_prune(repository, Wanted(Retention(keep_last=1)))
    assert [row.at for row in shown.gone] == [ONE, THREE]
    only_base = replace(shown, gone=[row for row in shown.gone if row.at == ONE])
    assert shown.agreed(only_base).gone == []


def test_a_manifest_with_a_base_and_losses_is_read_as_it_was_written(
    repository: Repository,
) -> None:
    index = write(repository, TWO, values(2))
    base = Base(ONE, "0" * 32)
    data = make_manifest([(index, b"x")], base=base, fidelity="aggressive")
    found = parse_manifest(data, manifest_name(TWO))
    assert (found.base, found.fidelity, found.hash) == (base, "aggressive", digest(data))
    assert b'"needs":["base","lossy"]' in data


# --- what was stored once ---------------------------------------------------


def test_the_golden_checkpoints_of_every_codec_are_decoded_to_what_they_were() -> None:
    listed = json.loads((GOLDEN / "codecs.json").read_text())
    repository = open_repository(LocalStore(GOLDEN / "codecs"))
    committed, seen = repository.survey().committed, set()
    fidelities = ["exact", "exact", "moments", "aggressive", "excp", "excp"]
    assert [m.fidelity for m in committed.values()] == fidelities
    assert [m.base and m.base.at.step for m in committed.values()] == [None, 1, None, 1, 1, 5]
    for at in committed:
        assert list(verify(repository, at)) == []
        found = read_bytes(repository, at)
        hashes = {key: hashlib.sha256(data).hexdigest() for key, data in found.items()}
        assert hashes == listed[str(at.step)]
        with repository.open(at) as opened:
            (index,) = opened.indexes
        seen |= {chunk.codec for chunk in index.chunks}
        assert [loss.codec for loss in index.losses] == [
            c.codec for c in index.chunks if not table.find(c.codec).lossless
        ]
    assert seen == {codec.name for codec in table.CODECS}


# --- the command line -------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path) -> str:
    """Step 1 compressed, step 2 a delta of it with a loss that it tells."""
    repository = create_repository(LocalStore(tmp_path / "root"))
    repository.claim(None)
    commit(repository, ONE, values(1), table.by_label(PLAIN))
    index = write(repository, TWO, values(2), table.by_label(DELTA), base=ONE)
    losses = (Loss("exp_avg", "q8", 0.5, 0.25, 2048),)
    repository.commit(replace(index, losses=losses), ONE, "moments")
    return str(tmp_path / "root")


def said_by(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


def test_show_says_what_a_delta_stands_on_what_was_lost_and_how_chunks_are_stored(
    root: str,
) -> None:
    code, text = said_by("show", root)
    assert code == 0
    lines = text.splitlines()
    assert "delta against step 1 (attempt 1)" in lines
    assert "fidelity: moments" in lines
    assert "  exp_avg, 2.0 KiB as q8: error at most 0.5, 0.25 on average" in lines
    name = table.by_label(DELTA).name
    assert [line for line in lines if line.startswith(f"1 chunk as {name}: 195.3 KiB in ")]
    found = json.loads(said_by("show", root, "--json")[1])
    assert (found["base"], found["fidelity"]) == ({"step": 1, "attempt": 1}, "moments")
    assert [row["codec"] for row in found["codecs"]] == sorted([name, "raw"])
    assert found["losses"][0]["max_error"] == 0.5
    assert found["state"] == json.loads(TREE)
    assert "delta against" not in said_by("show", root, "--step", "1")[1]


def test_ls_and_verify_say_that_the_base_of_a_delta_is_gone(root: str) -> None:
    assert said_by("verify", root)[0] == 0
    rows = json.loads(said_by("ls", root, "--json")[1])["checkpoints"]
    assert [row["base"] for row in rows] == [None, {"step": 1, "attempt": 1}]
    (Path(root) / manifest_name(ONE)).unlink()
    for command in ("ls", "verify"):
        code, text = said_by(command, root)
        assert code == 1
        assert "its base, step 1 (attempt 1), is gone" in text


def test_verify_reports_a_chunk_whose_hash_is_right_and_that_cannot_be_decoded(root: str) -> None:
    repository = open_repository(LocalStore(Path(root)))
    with_bytes(repository, TWO, b"whatever", table.by_label(DELTA).name)
    code, text = said_by("verify", root, "--step", "2", "--json")
    assert code == 1
    (finding,) = json.loads(text)["checkpoints"][0]["findings"]
    assert (finding["object"], finding["offset"]) == (pack_name(TWO, 0, 1), 4096)
    assert finding["keys"] == ["w"]
    assert "cannot be decoded" in finding["why"]
