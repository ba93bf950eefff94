"""Whatever is damaged in two or three tiers: the newest step that survives somewhere is found."""

from __future__ import annotations

from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st

from asymcheck.decoding import Decoding
from asymcheck.errors import RecoveryError
from asymcheck.planning.retention import CheckpointId
from asymcheck.storage.copies import Place
from asymcheck.storage.healing import heal, scan
from asymcheck.storage.hierarchy import Hierarchy
from asymcheck.storage.memory import MemoryStore
from asymcheck.storage.names import parse_name
from asymcheck.storage.repository import create_repository
from asymcheck.storage.store import read_all
from asymcheck.testing.checkpoints import commit_bytes

RUN = "5eed" * 8
STEPS = [CheckpointId(1, step) for step in (1, 2, 3)]


@cache
def whole() -> dict[str, bytes]:
    """Three checkpoints, each of one index, two packs and a manifest."""
    store = MemoryStore()
    repository = create_repository(store, RUN)
    repository.claim(None)
    for at in STEPS:
        commit_bytes(repository, at, values(at), pack_bytes=1 << 16)
    return {entry.name: read_all(store, entry.name) for entry in store.list()}


def values(at: CheckpointId) -> dict[str, bytes]:
    return {"w": bytes([at.step]) * 66_000, "b": bytes([at.step + 100]) * 50}


def objects() -> list[str]:
    return sorted(name for name in whole() if parse_name(name) is not None)


@st.composite
def harms(draw: st.DrawFn) -> tuple[int, dict[tuple[int, str], int | None]]:
    """How many tiers there are; of copies of objects, which byte is bad, ``None`` for all gone."""
    tiers = draw(st.integers(2, 3))
    copies = st.tuples(st.integers(0, tiers - 1), st.sampled_from(objects()))
    hit = draw(st.lists(copies, max_size=20, unique=True))
    return tiers, {
        (tier, name): draw(st.none() | st.integers(0, len(whole()[name]) - 1)) for tier, name in hit
    }


@settings(deadline=None, max_examples=60)
@given(harms())
def test_the_newest_step_that_survives_somewhere_is_read_bit_for_bit_and_heals(
    drawn: tuple[int, dict[tuple[int, str], int | None]],
) -> None:
    tiers, harm = drawn
    stores = [MemoryStore(f"tier{tier}") for tier in range(tiers)]
    for tier, store in enumerate(stores):
        for name, data in whole().items():
            byte = harm.get((tier, name), -1)
            if byte is None:
                continue
            bad = bytearray(data)
            if byte >= 0:
                bad[byte] ^= 0x40
            store.write(name, [bad])
    places = [Place(store.url, store, must_answer=False) for store in stores]
    hierarchy = Hierarchy(places, RUN)
    found = [at for at in reversed(hierarchy.lineage()) if can_read(hierarchy, at)]
    # Of a pack single chunks may come from different tiers; here each chunk is a pack.
    survives = [
        at
        for at in reversed(STEPS)
        if all(
            any((tier, name) not in harm for tier in range(tiers))
            for name in objects()
            if (parsed := parse_name(name)) is not None and parsed.at == at
        )
    ]
    assert found == survives
    heal(hierarchy, [(bad.tier, bad.name) for place in places for bad in scan(hierarchy, place)])
    for store in stores:
        there = {entry.name: read_all(store, entry.name) for entry in store.list()}
        for at in survives:
            manifest = f"step-{at.step:08d}/a{at.attempt:06d}-MANIFEST.json"
            own = {name for name in objects() if name.startswith(f"step-{at.step:08d}/")}
            if manifest in there:
                assert {name: there.get(name) for name in own} == {n: whole()[n] for n in own}


def can_read(hierarchy: Hierarchy, at: CheckpointId) -> bool:
    try:
        with hierarchy.open(at) as checkpoint:
            decoding = Decoding(checkpoint)
            (index,) = checkpoint.indexes
            found = {leaf.key: decoding.read_leaf(index, leaf) for leaf in index.leaves}
    except RecoveryError:
        return False
    assert found == values(at)  # bit for bit, or an error
    return True
