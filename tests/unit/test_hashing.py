"""What a slot holds is hashed behind its copy, and what changed since is not committed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from asymcheck.capture import Canary, Capture, dump_capture
from asymcheck.errors import CorruptCheckpoint, DroppedCheckpoint
from asymcheck.events import discard
from asymcheck.hashing import HashingAhead, changed_chunk, hashes_of, leave_hashes
from asymcheck.memory.slot import Slot, SlotState
from asymcheck.persist import persist
from asymcheck.planning.layout import PAGE_BYTES, Extent
from asymcheck.planning.retention import CheckpointId, Retention
from asymcheck.slot_store import SlotStore
from asymcheck.storage.index import Leaf
from asymcheck.storage.memory import MemoryStore
from asymcheck.storage.repository import Repository, create_repository
from asymcheck.storage.sealed import Digest, digest

WAIT_S = 30.0
DATA = bytes(range(256)) * 64
CAPTURE = Capture(
    at=CheckpointId(1, 3),
    leaves=(Leaf("w", "uint8", (len(DATA),), 0, len(DATA), ()),),
    aliases={},
    chunks=(Extent(0, PAGE_BYTES), Extent(PAGE_BYTES, len(DATA))),
    metrics={},
    versions={},
    created_s=0.0,
    boundary_s=0.0,
    canaries=(Canary(0, 0, 4, 1, 4),),
)
HASHES = (digest(DATA[:PAGE_BYTES]), digest(DATA[PAGE_BYTES:]))


@pytest.fixture
def repository() -> Repository:
    made = create_repository(MemoryStore())
    made.claim(None)
    return made


@pytest.fixture
def slot(tmp_path: Path) -> Iterator[Slot]:
    made = a_slot(tmp_path)
    yield made
    made.close(unlink=True)


def a_slot(directory: Path, *, sparse: bool = False) -> Slot:
    """A slot that is being filled, and complete."""
    slot = Slot.create(directory, "slot", 1 << 16, 1 << 16, sparse=sparse)
    slot.begin(len(DATA), 4, dump_capture(CAPTURE))
    slot.take([Extent(0, len(DATA))])
    slot.image[: len(DATA)] = DATA
    slot.canaries[:] = DATA[:4]
    slot.copied_bytes = len(DATA)
    return slot


def until(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, f"timed out: {what}"
        time.sleep(0.001)


def test_a_digest_of_parts_is_that_of_the_whole() -> None:
    found = Digest()
    for start in range(0, len(DATA), 1000):
        found.add(DATA[start : start + 1000])
    assert found.hex() == digest(DATA)


def test_hashes_are_left_once_it_is_sealed_and_go_with_the_next_content(slot: Slot) -> None:
    ahead = HashingAhead(slot)
    assert slot.hashes == b""
    slot.state = SlotState.SEALED
    ahead.finish()
    assert hashes_of(slot, CAPTURE) == HASHES
    slot.begin(len(DATA), 4, dump_capture(CAPTURE))
    assert hashes_of(slot, CAPTURE) == ()


def test_nothing_is_left_of_what_is_dropped_given_up_or_refused_by_canaries(slot: Slot) -> None:
    ahead = HashingAhead(slot)
    slot.state = SlotState.DROPPED
    ahead.finish()
    slot.state = SlotState.FILLING
    HashingAhead(slot).stop()
    slot.canaries[0] ^= 1
    slot.state = SlotState.SEALED
    HashingAhead(slot).finish()
    assert slot.hashes == b""


def test_the_memory_of_a_ring_is_not_hashed(tmp_path: Path) -> None:
    sparse = a_slot(Path("/dev/shm"), sparse=True)
    try:
        sparse.state = SlotState.SEALED
        HashingAhead(sparse).finish()
        leave_hashes(sparse, CAPTURE)
        assert sparse.hashes == b""
    finally:
        sparse.close(unlink=True)


def test_whoever_persists_leaves_the_hashes(slot: Slot, repository: Repository) -> None:
    slot.state = SlotState.SEALED
    persist(repository, slot, Retention(), discard, lambda: False)
    assert hashes_of(slot, CAPTURE) == HASHES
    assert changed_chunk(slot, CAPTURE) is None


def test_what_changed_after_it_was_hashed_is_not_committed(
    slot: Slot, repository: Repository
) -> None:
    slot.state = SlotState.SEALED
    leave_hashes(slot, CAPTURE)
    slot.image[2 * PAGE_BYTES] ^= 1
    assert changed_chunk(slot, CAPTURE) == CAPTURE.chunks[1]
    with pytest.raises(DroppedCheckpoint, match="changed after it was sealed"):
        persist(repository, slot, Retention(), discard, lambda: False)
    listing = repository.survey()
    assert not listing.committed
    assert not listing.leftovers


@pytest.mark.parametrize("cut", [1, 40])
def test_damaged_hashes_are_damage(slot: Slot, repository: Repository, cut: int) -> None:
    slot.state = SlotState.SEALED
    leave_hashes(slot, CAPTURE)
    slot.leave_hashes(slot.hashes[:-cut])
    with pytest.raises(CorruptCheckpoint):
        hashes_of(slot, CAPTURE)
    with pytest.raises(CorruptCheckpoint):
        persist(repository, slot, Retention(), discard, lambda: False)


def test_hashes_of_another_content_are_damage(slot: Slot) -> None:
    leave_hashes(slot, CAPTURE)
    data = slot.hashes
    other = dump_capture(CAPTURE).replace(b'"rank":0', b'"rank":1')
    slot.begin(len(DATA), 4, other)
    slot.leave_hashes(data)
    with pytest.raises(CorruptCheckpoint, match="of something else"):
        hashes_of(slot, CAPTURE)


def test_what_is_read_of_a_slot_stays_readable_when_it_is_freed(
    slot: Slot, repository: Repository
) -> None:
    slot.state = SlotState.SEALED
    leave_hashes(slot, CAPTURE)
    assert slot.path is not None
    store = SlotStore(repository.run, CAPTURE.at, [slot.path])
    (pack,) = [name for name, _ in store.list() if name.endswith(".pack")]
    with store.open(pack) as opened:
        slot.path.unlink()
        into = bytearray(len(DATA))
        opened.readinto(0, memoryview(into))
        assert into == DATA
    with pytest.raises(CorruptCheckpoint, match="holds something else"):
        SlotStore(repository.run, CheckpointId(1, 4), [a_slot(slot.path.parent).path or Path()])
    store.close()
