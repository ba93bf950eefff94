"""Copies of a run in several places: the nearest that is whole serves, the others heal."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from asymcheck.decoding import Decoding
from asymcheck.errors import (
    CorruptCheckpoint,
    StoreError,
)
from asymcheck.planning.retention import CheckpointId
from asymcheck.storage.copies import Copies, Place
from asymcheck.storage.healing import heal, scan
from asymcheck.storage.hierarchy import Hierarchy
from asymcheck.storage.memory import MemoryStore
from asymcheck.storage.names import FORMAT_NAME, RUN_NAME, index_name, manifest_name, pack_name
from asymcheck.storage.repository import create_repository
from asymcheck.storage.store import Entry, Store, read_all
from asymcheck.testing.checkpoints import commit_bytes
from asymcheck.testing.children import TIMEOUT_S
from asymcheck.testing.faulty import Fault, FaultyStore

ONE, TWO = CheckpointId(1, 1), CheckpointId(1, 2)
RUN = "5eed" * 8


def flip(store: Store, name: str, at: int) -> None:
    data = bytearray(read_all(store, name))
    data[at] ^= 0x10
    store.write(name, [data])


def names_of(store: Store) -> list[str]:
    return sorted(entry.name for entry in store.list())


def copy(source: Store, target: Store) -> None:
    for name in names_of(source):
        target.write(name, [read_all(source, name)])


def everything(store: Store) -> dict[str, bytes]:
    return {name: read_all(store, name) for name in names_of(store)}


def values(at: CheckpointId) -> dict[str, bytes]:
    return {"w": bytes([at.step]) * 70_000, "b": bytes([at.step + 100]) * 300}


@pytest.fixture
def stores() -> list[MemoryStore]:
    """Three copies of a run with two checkpoints, each in two packs."""
    home = MemoryStore("near")
    repository = create_repository(home, RUN)
    repository.claim(None)
    for at in (ONE, TWO):
        commit_bytes(repository, at, values(at), pack_bytes=1 << 16)
    found = [home, MemoryStore("middle"), MemoryStore("far")]
    for other in found[1:]:
        copy(home, other)
    return found


def of(*stores: Store, limit_s: float = TIMEOUT_S) -> Hierarchy:
    places = [Place(s.url.partition("?")[0], s, must_answer=False) for s in stores]
    return Hierarchy(places, RUN, limit_s)


def read(hierarchy: Hierarchy, at: CheckpointId) -> dict[str, bytes]:
    with hierarchy.open(at) as checkpoint:
        (index,) = checkpoint.indexes
        decoding = Decoding(checkpoint)
        return {leaf.key: decoding.read_leaf(index, leaf) for leaf in index.leaves}


OBJECTS = [
    manifest_name(TWO),
    index_name(TWO, 0),
    pack_name(TWO, 0, 1),
    pack_name(TWO, 0, 2),
]


# --- reading --------------------------------------------------------------------


def test_all_comes_from_the_nearest_copy_while_it_is_whole(stores: list[MemoryStore]) -> None:
    hierarchy = of(*stores)
    assert list(hierarchy.survey().committed) == [ONE, TWO]
    assert read(hierarchy, TWO) == values(TWO)
    assert list(hierarchy.copies.notes.served) == ["memory://near"]
    assert not hierarchy.copies.notes.bad


@pytest.mark.parametrize("where", [0, 0.5, 1], ids=["first", "middle", "last"])
@pytest.mark.parametrize("name", OBJECTS)
def test_a_bad_byte_anywhere_in_the_nearest_copy_is_read_elsewhere_and_told(
    stores: list[MemoryStore], name: str, where: float
) -> None:
    flip(stores[0], name, int(where * (len(read_all(stores[0], name)) - 1)))
    hierarchy = of(*stores)
    assert list(hierarchy.survey().committed) == [ONE, TWO]
    assert read(hierarchy, TWO) == values(TWO)
    bad = list(hierarchy.copies.notes.bad.values())
    assert {(b.tier, b.name, b.kind) for b in bad} == {("memory://near", name, "damaged")}
    assert "memory://far" not in hierarchy.copies.notes.served  # only one step further


def test_only_the_bad_chunk_comes_from_further_away(stores: list[MemoryStore]) -> None:
    flip(stores[0], pack_name(TWO, 0, 2), 100)
    hierarchy = of(*stores)
    hierarchy.survey()
    assert read(hierarchy, TWO) == values(TWO)
    assert hierarchy.copies.notes.served["memory://middle"].nbytes == 70_000


def test_a_checkpoint_that_is_whole_nowhere_is_put_together_from_two(
    stores: list[MemoryStore],
) -> None:
    stores[0].delete(pack_name(TWO, 0, 1))
    stores[1].delete(pack_name(TWO, 0, 2))
    stores[1].delete(index_name(TWO, 0))
    hierarchy = of(*stores[:2])
    assert list(hierarchy.survey().committed) == [ONE, TWO]
    assert read(hierarchy, TWO) == values(TWO)
    missing = {(b.tier, b.name) for b in hierarchy.copies.notes.bad.values()}
    assert missing == {
        ("memory://near", pack_name(TWO, 0, 1)),
        ("memory://middle", pack_name(TWO, 0, 2)),
        ("memory://middle", index_name(TWO, 0)),
    }


def test_what_is_bad_in_every_copy_is_told_of_each(stores: list[MemoryStore]) -> None:
    for store in stores:
        flip(store, pack_name(TWO, 0, 2), 5)
    with pytest.raises(CorruptCheckpoint, match=r"no copy is whole: memory://near: .*far: "):
        read(of(*stores), TWO)


def test_a_checkpoint_of_another_run_beside_it_is_no_copy(stores: list[MemoryStore]) -> None:
    other = MemoryStore("other")
    repository = create_repository(other)
    repository.claim(None)
    commit_bytes(repository, CheckpointId(1, 9), values(ONE))
    hierarchy = of(stores[0], other)
    listing = hierarchy.survey()
    assert (list(listing.committed), listing.foreign) == ([ONE, TWO], [CheckpointId(1, 9)])


def test_each_manifest_is_read_once_however_often_one_looks(stores: list[MemoryStore]) -> None:
    counted = [FaultyStore(store) for store in stores]
    hierarchy = of(*counted)
    for store in counted:
        store.operations.clear()
    for _ in range(3):
        hierarchy.survey()
    opened = [name for store in counted for op, name in store.operations if op == "open"]
    assert sorted(opened) == [manifest_name(ONE), manifest_name(TWO)]
    listed = [store.operations.count(("list", "")) for store in counted]
    assert listed == [3, 3, 3]


# --- places that fail -------------------------------------------------------------


def test_a_place_that_dies_in_the_middle_costs_nothing_but_itself(
    stores: list[MemoryStore],
) -> None:
    dying = FaultyStore(stores[0])
    hierarchy = of(dying, stores[1])
    hierarchy.survey()
    with hierarchy.open(TWO) as checkpoint:
        dying.fault = Fault(at=1, times=0, op="read")
        (index,) = checkpoint.indexes
        decoding = Decoding(checkpoint)
        found = {leaf.key: decoding.read_leaf(index, leaf) for leaf in index.leaves}
    assert found == values(TWO)
    assert {b.kind for b in hierarchy.copies.notes.bad.values()} == {"unreadable"}


def test_a_place_that_cannot_be_listed_is_left_out_until_the_next_restore(
    stores: list[MemoryStore],
) -> None:
    broken = FaultyStore(stores[0], Fault(at=1, times=0, op="list"))
    hierarchy = of(broken, stores[1])
    assert list(hierarchy.survey().committed) == [ONE, TWO]
    assert read(hierarchy, TWO) == values(TWO)
    assert list(hierarchy.copies.notes.unreachable) == ["faulty+memory://near"]
    assert "faulty+memory://near" not in hierarchy.copies.notes.served
    broken.fault = Fault(do="none")
    hierarchy.copies.forget()
    hierarchy.survey()
    assert not hierarchy.copies.notes.unreachable


def test_a_root_that_must_answer_is_never_left_out(stores: list[MemoryStore]) -> None:
    broken = FaultyStore(stores[0], Fault(at=1, times=0, op="list"))
    places = [Place("home", broken), Place("tier", stores[1], must_answer=False)]
    with pytest.raises(StoreError, match="memory://near"):
        Hierarchy(places, RUN).survey()


class _Silent(MemoryStore):
    """A store whose listing never ends before the test does."""

    def __init__(self) -> None:
        super().__init__("silent")
        self.over = threading.Event()

    def list(self, prefix: str = "") -> Iterator[Entry]:
        self.over.wait(TIMEOUT_S)
        return super().list(prefix)


def test_a_place_that_does_not_answer_costs_a_bounded_time(stores: list[MemoryStore]) -> None:
    silent = _Silent()
    try:
        hierarchy = Hierarchy(
            [Place("a", silent, must_answer=False), Place("b", stores[0])],
            RUN,
            limit_s=0.2,
        )
        assert list(hierarchy.survey().committed) == [ONE, TWO]
        assert "within 0.2 s" in hierarchy.copies.notes.unreachable["a"]
    finally:
        silent.over.set()


def test_where_no_copy_can_be_reached_that_is_an_error(stores: list[MemoryStore]) -> None:
    broken = [FaultyStore(store, Fault(at=1, times=0, op="list")) for store in stores]
    with pytest.raises(StoreError):
        of(*broken).survey()
    with pytest.raises(StoreError, match="can be reached"):
        places = Copies([Place("a", broken[0], must_answer=False)] * 2)
        places.notes.unreachable["a"] = "it is down"
        places.read("x", 10, lambda data: data)


# --- healing ----------------------------------------------------------------------


def bad_of(hierarchy: Hierarchy) -> list[tuple[str, str]]:
    return [
        (bad.tier, bad.name) for place in hierarchy.copies.places for bad in scan(hierarchy, place)
    ]


EVERY = [*OBJECTS, "FORMAT", "RUN.json", "attempts/000001"]


@pytest.mark.parametrize("tier", [0, 1, 2], ids=["near", "middle", "far"])
@pytest.mark.parametrize("name", EVERY)
def test_a_bad_byte_anywhere_in_any_tier_is_found_and_healed(
    stores: list[MemoryStore], name: str, tier: int
) -> None:
    before = everything(stores[0])
    size = len(before[name])
    for at in sorted({0, size // 2, size - 1}):
        flip(stores[tier], name, at)
        hierarchy = (
            of(*stores[tier:], *stores[:tier]) if name in (FORMAT_NAME, RUN_NAME) else of(*stores)
        )
        hierarchy = Hierarchy(hierarchy.copies.places, create_repository(stores[tier - 1]).run)
        found = bad_of(hierarchy)
        assert found == [(stores[tier].url, name)]
        (done,) = heal(hierarchy, found)
        assert (done.tier, done.name, done.nbytes, done.why_not) == (*found[0], size, "")
        assert everything(stores[tier]) == before


def test_what_is_missing_of_a_checkpoint_is_written_and_nothing_else(
    stores: list[MemoryStore],
) -> None:
    before = everything(stores[0])
    stores[1].delete(pack_name(TWO, 0, 1))
    stores[2].delete(manifest_name(ONE))  # it has no such checkpoint then: that is no damage
    hierarchy = of(*stores)
    assert bad_of(hierarchy) == [("memory://middle", pack_name(TWO, 0, 1))]
    heal(hierarchy, bad_of(hierarchy))
    assert everything(stores[1]) == before
    assert manifest_name(ONE) not in names_of(stores[2])


def test_a_copy_is_put_together_where_none_is_whole(stores: list[MemoryStore]) -> None:
    before = everything(stores[0])
    at = len(before[pack_name(TWO, 0, 2)]) // 2
    flip(stores[0], pack_name(TWO, 0, 2), 0)
    flip(stores[1], index_name(TWO, 0), at % 100)
    hierarchy = of(*stores[:2])
    heal(hierarchy, bad_of(hierarchy))
    assert everything(stores[0]) == everything(stores[1]) == before


def test_a_good_copy_is_never_written_over(stores: list[MemoryStore]) -> None:
    watched = FaultyStore(stores[0])
    hierarchy = of(watched, *stores[1:])
    watched.operations.clear()
    assert heal(hierarchy, [(watched.url.partition("?")[0], name) for name in EVERY]) == []
    assert not [op for op, _ in watched.operations if op in ("write", "create", "delete")]


def test_what_is_whole_nowhere_stays_and_the_report_says_why(stores: list[MemoryStore]) -> None:
    for store in stores:
        flip(store, pack_name(TWO, 0, 2), 5)
    hierarchy = of(*stores)
    found = heal(hierarchy, bad_of(hierarchy))
    assert [(h.tier, h.nbytes) for h in found] == [
        (s.url, 0) for s in sorted(stores, key=lambda s: s.url)
    ]
    assert all("no copy is whole" in h.why_not for h in found)


def test_another_checkpoint_of_the_same_identity_is_left_alone(
    stores: list[MemoryStore],
) -> None:
    apart = MemoryStore("apart")
    apart.write(FORMAT_NAME, [read_all(stores[0], FORMAT_NAME)])
    apart.write(RUN_NAME, [read_all(stores[0], RUN_NAME)])
    repository = create_repository(apart)
    repository.claim(None)
    commit_bytes(repository, TWO, values(ONE), pack_bytes=1 << 16)
    flip(apart, pack_name(TWO, 0, 2), 5)
    before = everything(apart)
    (found,) = heal(of(stores[0], apart), [("memory://apart", pack_name(TWO, 0, 2))])
    assert "another checkpoint of the same identity" in found.why_not
    assert everything(apart) == before


def test_a_place_that_cannot_be_written_stays_as_it_is_and_says_why(
    stores: list[MemoryStore],
) -> None:
    flip(stores[0], index_name(TWO, 0), 5)
    full = FaultyStore(stores[0], Fault(at=1, times=0, op="write", do="ENOSPC"))
    hierarchy = of(full, stores[1])
    (found,) = heal(hierarchy, [("faulty+memory://near", index_name(TWO, 0))])
    assert (found.nbytes, "ENOSPC" in found.why_not or "space" in found.why_not) == (0, True)
