"""Many ranks over one root: what is a checkpoint when, without a word between them. No torch."""

from __future__ import annotations

import json
import os
import signal
import threading
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path
from time import monotonic, sleep

import pytest

from asymcheck import pending as pending_module
from asymcheck.capture import Capture, dump_capture
from asymcheck.decoding import Decoding, verify
from asymcheck.encoding import Chooser
from asymcheck.errors import CaptureError, CorruptCheckpoint, RankMissing, SupersededWriter
from asymcheck.events import discard
from asymcheck.handover import take_over
from asymcheck.memory.arena import Arena, Slot, SlotState, slot_name, slots_of
from asymcheck.memory.process import ProcessId
from asymcheck.memory.slot import _Word
from asymcheck.messages import Durable, Stored, describe_error, rebuild_error, rebuild_stored
from asymcheck.pending import Pending
from asymcheck.persist import persist, write_checkpoint
from asymcheck.persister import PersistProcess, PersistThread
from asymcheck.planning.layout import PAGE_BYTES, Extent
from asymcheck.planning.pieces import Piece
from asymcheck.planning.retention import CheckpointId, Retention
from asymcheck.planning.selection import RAW
from asymcheck.storage.committing import read_index
from asymcheck.storage.index import Leaf
from asymcheck.storage.listing import as_base
from asymcheck.storage.memory import MemoryStore
from asymcheck.storage.names import index_name, manifest_name, pack_name
from asymcheck.storage.repository import Repository, create_repository
from asymcheck.storage.store import Store, open_store, read_all

WAIT_S = 60.0
SIZE = 2 * PAGE_BYTES
NOBODY = 1 << 22  # greater than the number of any process


def content(step: int, rank: int) -> bytes:
    return bytes([step % 251, rank % 251]) * (SIZE // 2)


def a_capture(step: int, rank: int, world: int, attempt: int = 1) -> Capture:
    return Capture(
        at=CheckpointId(attempt, step),
        leaves=(Leaf("w", "uint8", (SIZE,), 0, SIZE, (), Piece((world * SIZE,), rank * SIZE)),),
        aliases={},
        chunks=(Extent(0, PAGE_BYTES), Extent(PAGE_BYTES, SIZE)),
        metrics={},
        versions={},
        created_s=float(step),
        boundary_s=0.0,
        rank=rank,
        world=world,
    )


def store_part(
    repository: Repository, step: int, rank: int, world: int, attempt: int = 1
) -> Stored:
    found = write_checkpoint(
        repository,
        a_capture(step, rank, world, attempt),
        memoryview(content(step, rank)),
        lambda extent, upto: None,
        lambda: None,
        Retention(),
        discard,
        Chooser(RAW),
    )
    assert isinstance(found, Stored)
    return found


def await_others(
    repository: Repository,
    stored: Stored,
    timeout_s: float = WAIT_S,
    retention: Retention | None = None,
) -> Durable:
    return Pending(repository, stored, retention or Retention(), discard, timeout_s).wait()


def again(repository: Repository) -> Repository:
    """The same root, as another process has it open."""
    return Repository(repository.store, repository.run)


def read_all_parts(repository: Repository, at: CheckpointId) -> list[bytes]:
    assert not list(verify(repository, at))
    with repository.open(at) as opened:
        decoding = Decoding(opened)
        return [bytes(decoding.read_leaf(i, i.leaves[0])) for i in opened.indexes]


def steps(repository: Repository) -> list[int]:
    listing = repository.survey()
    assert not listing.damaged
    return [at.step for at in listing.committed]


@pytest.fixture(params=["memory", "local"])
def repository(request: pytest.FixtureRequest, tmp_path: Path) -> Repository:
    local = request.param == "local"
    store: Store = open_store(str(tmp_path / "root")) if local else MemoryStore()
    made = create_repository(store)
    made.claim(None)
    return made


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank may commit as soon as it looks."""
    monkeypatch.setattr(pending_module, "_TURN_S", 0.0)


# --- when it is a checkpoint --------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_a_step_is_committed_when_and_only_when_all_ranks_have_stored_it(
    repository: Repository, order: tuple[int, ...]
) -> None:
    at = CheckpointId(1, 5)
    for rank in order[:-1]:
        store_part(repository, 5, rank, 3)
        assert again(repository).try_commit(at, 3) is None
        assert steps(repository) == []
    assert set(repository.missing_ranks(at, 3)) == {order[-1]}
    store_part(repository, 5, order[-1], 3)
    manifest = again(repository).try_commit(at, 3)
    assert manifest is not None
    assert repository.try_commit(at, 3) == manifest
    assert steps(repository) == [5]
    assert read_all_parts(repository, at) == [content(5, rank) for rank in range(3)]


def test_packs_without_an_index_count_for_nothing(repository: Repository) -> None:
    store_part(repository, 5, 0, 2)
    store_part(repository, 5, 1, 2)
    repository.store.delete(index_name(CheckpointId(1, 5), 1))
    assert repository.try_commit(CheckpointId(1, 5), 2) is None
    assert steps(repository) == []


def test_an_index_whose_pack_is_gone_or_that_is_torn_counts_for_nothing(
    repository: Repository,
) -> None:
    at = CheckpointId(1, 5)
    store_part(repository, 5, 0, 2)
    store_part(repository, 5, 1, 2)
    pack = read_all(repository.store, pack_name(at, 1, 1))
    repository.store.delete(pack_name(at, 1, 1))
    assert repository.try_commit(at, 2) is None
    repository.store.write(pack_name(at, 1, 1), [pack])
    index = read_all(repository.store, index_name(at, 1))
    repository.store.write(index_name(at, 1), [index[: len(index) // 2]])
    assert repository.try_commit(at, 2) is None
    assert list(repository.missing_ranks(at, 2)) == [1]
    repository.store.write(index_name(at, 1), [index])
    assert repository.try_commit(at, 2) is not None
    assert steps(repository) == [5]


def test_an_index_of_a_dead_attempt_never_completes_a_newer_one(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = again(repository)
    store_part(repository, 5, 0, 2)
    repository.claim(None)
    store_part(repository, 5, 0, 2, attempt=2)
    # A rank of the dead attempt ends its write only now, after the claim has tidied. It had asked
    # for a newer job before there was one.
    with monkeypatch.context() as patch:
        patch.setattr(slow, "check_writer", lambda attempt: None)
        late = store_part(slow, 5, 1, 2)
    with pytest.raises(SupersededWriter):
        await_others(slow, late)
    assert repository.try_commit(CheckpointId(2, 5), 2) is None
    assert steps(repository) == []
    store_part(repository, 5, 1, 2, attempt=2)
    assert repository.try_commit(CheckpointId(2, 5), 2) is not None
    assert list(repository.survey().committed) == [CheckpointId(2, 5)]
    assert repository.survey().leftovers


def test_an_index_of_another_world_never_completes_one(repository: Repository) -> None:
    store_part(repository, 5, 0, 2)
    store_part(repository, 5, 1, 3)
    assert repository.try_commit(CheckpointId(1, 5), 2) is None
    assert "a world of 3" in repository.missing_ranks(CheckpointId(1, 5), 2)[1]
    assert steps(repository) == []


def test_two_committers_write_the_same_bytes(repository: Repository) -> None:
    at = CheckpointId(1, 5)
    for rank in (1, 0):
        store_part(repository, 5, rank, 2)
    first = again(repository).try_commit(at, 2)
    data = read_all(repository.store, manifest_name(at))
    repository.store.delete(manifest_name(at))
    assert again(repository).try_commit(at, 2) == first
    assert read_all(repository.store, manifest_name(at)) == data


@pytest.mark.usefixtures("at_once")
def test_ranks_that_all_commit_at_the_same_moment_make_one_checkpoint(
    repository: Repository,
) -> None:
    world, ends = 4, []

    def live(rank: int) -> None:
        mine = again(repository)
        for step in (1, 2, 3):
            ends.append((step, rank, await_others(mine, store_part(mine, step, rank, world)).step))

    threads = [threading.Thread(target=live, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert sorted(ends) == [(s, r, s) for s in (1, 2, 3) for r in range(world)]
    assert steps(repository) == [1, 2, 3]
    assert read_all_parts(repository, CheckpointId(1, 2)) == [content(2, r) for r in range(world)]


# --- waiting for others -------------------------------------------------------


def test_the_report_is_of_the_rank_alone(repository: Repository) -> None:
    parts = [store_part(repository, 5, rank, 2) for rank in (0, 1)]
    durable = await_others(repository, parts[0])
    names = {e.name: e.nbytes for e in repository.store.list("step-00000005")}
    at = CheckpointId(1, 5)
    assert durable.stored_bytes == names[index_name(at, 0)] + names[pack_name(at, 0, 1)]
    assert (durable.raw_bytes, durable.step, durable.attempt) == (SIZE, 5, 1)


def test_a_rank_that_never_stores_its_part_is_named_and_nothing_is_lost(
    repository: Repository,
) -> None:
    for rank in (0, 1, 3):
        store_part(repository, 4, rank, 4)
    store_part(repository, 4, 2, 4)
    assert repository.try_commit(CheckpointId(1, 4), 4) is not None
    parts = [store_part(repository, 5, rank, 4) for rank in (0, 1, 3)]
    for part in parts:
        with pytest.raises(RankMissing, match=r"step 5.*of 4 ranks, rank 2 stored") as caught:
            await_others(again(repository), part, 0.0)
        assert (caught.value.step, caught.value.ranks) == (5, (2,))
    assert steps(repository) == [4]
    assert read_all_parts(repository, CheckpointId(1, 4))[2] == content(4, 2)
    # What the others stored stays, so the late one can still complete it.
    await_others(repository, store_part(repository, 5, 2, 4), 0.0)
    assert steps(repository) == [4, 5]


def test_a_missing_rank_is_told_between_processes_as_it_was() -> None:
    told = rebuild_error(describe_error(RankMissing(5, [2, 3], "why")))
    assert isinstance(told, RankMissing)
    assert (told.step, told.ranks) == (5, (2, 3))
    assert str(told) == str(RankMissing(5, [2, 3], "why"))


def test_a_rank_learns_of_a_commit_that_retention_has_removed_already(
    repository: Repository,
) -> None:
    mine, other = again(repository), again(repository)
    late = store_part(other, 1, 1, 2)
    for step in (1, 2, 3):
        if step > 1:
            store_part(other, step, 1, 2)
        await_others(mine, store_part(mine, step, 0, 2), WAIT_S, Retention(keep_last=1))
    assert steps(repository) == [3]
    assert await_others(other, late, 0.0).step == 1
    assert steps(repository) == [3]


@pytest.mark.usefixtures("at_once")
def test_what_retention_has_removed_is_not_committed_once_more(repository: Repository) -> None:
    mine, other = again(repository), again(repository)
    for step in (1, 2):
        store_part(other, step, 1, 2)
        await_others(mine, store_part(mine, step, 0, 2), WAIT_S, Retention(keep_last=1))
    # Its packs are still there: they go after the next commit.
    at = CheckpointId(1, 1)
    assert pack_name(at, 0, 1) in [e.name for e in repository.store.list()]
    assert other.try_commit(at, 2) is None
    assert other.commit_whole() == []
    mine.finish()
    assert [e.name for e in repository.store.list("step-00000001")] == []
    assert steps(repository) == [2]


def test_a_rank_that_failed_discards_its_own_packs_alone(repository: Repository) -> None:
    at = CheckpointId(1, 5)
    store_part(repository, 5, 0, 2)
    repository.store.write(pack_name(at, 1, 1), [b"half of it"])
    again(repository).discard(at, 1, 2)
    left = {e.name for e in repository.store.list("step-00000005")}
    assert left == {index_name(at, 0), pack_name(at, 0, 1)}
    # With its index there whole, another may be about to commit: nothing goes.
    again(repository).discard(at, 0, 2)
    assert {e.name for e in repository.store.list("step-00000005")} == left


def test_what_ranks_left_uncommitted_goes_when_a_newer_attempt_is_claimed(
    repository: Repository,
) -> None:
    store_part(repository, 5, 0, 2)
    assert repository.survey().leftovers
    repository.claim(None)
    assert not repository.survey().leftovers
    assert [e.name for e in repository.store.list("step-00000005")] == []


def test_a_committer_that_was_overtaken_takes_its_torn_manifest_back(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newer attempt is claimed, and tidies, between the last look and the write."""
    slow = again(repository)
    for rank in (0, 1):
        store_part(slow, 5, rank, 2)
    looks: list[int] = []

    def look(attempt: int) -> None:
        looks.append(attempt)
        if len(looks) > 1:
            Repository.check_writer(slow, attempt)
        else:
            repository.claim(None)

    monkeypatch.setattr(slow, "check_writer", look)
    with pytest.raises(SupersededWriter):
        slow.try_commit(CheckpointId(1, 5), 2)
    assert len(looks) == 2
    assert steps(repository) == []
    assert not repository.survey().leftovers


# --- persisters ---------------------------------------------------------------


def a_slot(arena: Arena, step: int, rank: int, world: int) -> Slot:
    meta = dump_capture(a_capture(step, rank, world))
    slot = arena.reserve(SIZE + PAGE_BYTES, len(meta), WAIT_S)
    assert slot is not None
    slot.begin(SIZE, 0, meta)
    slot.image[:SIZE] = content(step, rank)
    slot.copied_bytes = SIZE
    slot.state = SlotState.SEALED
    return slot


def test_what_a_slot_says_of_ranks_and_pieces_comes_back() -> None:
    arena = Arena("0" * 32, 1, 1, lambda message: None, (Path(),))
    slot = a_slot(arena, 5, 1, 3)
    repository = create_repository(MemoryStore())
    repository.claim(None)
    found = persist(repository, slot, Retention(), discard, lambda: False)
    assert isinstance(found, Stored)
    assert (found.rank, found.world, found.at) == (1, 3, CheckpointId(1, 5))
    for rank in (0, 2):
        store_part(repository, 5, rank, 3)
    assert repository.try_commit(CheckpointId(1, 5), 3) is not None
    with repository.open(CheckpointId(1, 5)) as opened:
        assert opened.indexes[1].leaves == a_capture(5, 1, 3).leaves
    arena.free(slot)
    arena.close()


def test_a_part_that_was_stored_before_is_left_as_it_is(repository: Repository) -> None:
    arena = Arena(repository.run, 1, 1, lambda message: None, (Path(),))
    slot = a_slot(arena, 5, 1, 2)
    before = store_part(repository, 5, 1, 2)
    repository.store.delete(pack_name(CheckpointId(1, 5), 1, 1))  # it would be written again
    found = persist(repository, slot, Retention(), discard, lambda: False)
    assert isinstance(found, Stored)
    assert found.part.stored_bytes == before.part.stored_bytes
    assert pack_name(CheckpointId(1, 5), 1, 1) not in [e.name for e in repository.store.list()]
    arena.free(slot)
    arena.close()


def test_another_state_under_the_same_step_and_attempt_is_refused(repository: Repository) -> None:
    arena = Arena(repository.run, 1, 1, lambda message: None, (Path(),))
    slot = a_slot(arena, 5, 1, 2)
    store_part(repository, 5, 1, 3)
    with pytest.raises(CaptureError, match=r"rank 1 stored another state"):
        persist(repository, slot, Retention(), discard, lambda: False)
    arena.free(slot)
    arena.close()


class Host:
    """Rank 0 of two, with one slot and a persister; rank 1 is played by the test."""

    def __init__(self, kind: str, root: Path, timeout_s: float, at_once: int = 1) -> None:
        self.repository = create_repository(open_store(str(root)))
        self.repository.claim(None)
        self.arena = Arena(self.repository.run, 0, 1, lambda message: None)
        self.persister: PersistProcess | PersistThread
        if kind == "thread":
            self.persister = PersistThread(
                self.repository, Retention(), discard, commit_timeout_s=timeout_s
            )
        else:
            self.persister = PersistProcess(
                f"file://{root}",
                self.repository.run,
                self.arena,
                Retention(),
                discard,
                30.0,
                None,
                commit_timeout_s=timeout_s,
            )

    def save(self, step: int) -> Future[Durable]:
        slot = a_slot(self.arena, step, 0, 2)
        freed: list[Slot] = []

        def free(done: Future[Durable] | None = None) -> None:
            if not freed:
                freed.append(slot)
                self.arena.free(slot)

        future = self.persister.begin(slot, step, free)
        future.add_done_callback(free)
        return future

    def close(self) -> None:
        assert self.persister.close(WAIT_S)
        self.arena.close()
        assert list(slots_of(Path("/dev/shm"), self.repository.run)) == []


KINDS = pytest.mark.parametrize("kind", ["thread", "process"])


@KINDS
def test_slots_are_free_while_other_ranks_are_waited_for(kind: str, tmp_path: Path) -> None:
    """There is one slot: each save could begin only because the one before held none."""
    host = Host(kind, tmp_path / "root", WAIT_S)
    futures = [host.save(step) for step in (1, 2, 3, 4)]
    assert not any(future.done() for future in futures)
    for step in (2, 1, 4, 3):
        store_part(host.repository, step, 1, 2)
    assert [future.result(WAIT_S).step for future in futures] == [1, 2, 3, 4]
    host.close()
    assert steps(host.repository) == [1, 2, 3, 4]


@KINDS
def test_a_dead_rank_leaves_its_step_uncommitted_and_is_named_in_time(
    kind: str, tmp_path: Path
) -> None:
    host = Host(kind, tmp_path / "root", 0.3)
    store_part(host.repository, 1, 1, 2)
    assert host.save(1).result(WAIT_S).step == 1
    for step in (2, 3):
        failure = host.save(step).exception(WAIT_S)
        assert isinstance(failure, RankMissing)
        assert (failure.step, failure.ranks) == (step, (1,))
    host.close()
    assert steps(host.repository) == [1]
    left = {name for _, name in host.repository.survey().leftovers}
    assert {index_name(CheckpointId(1, step), 0) for step in (2, 3)} <= left


def test_a_persister_that_dies_while_it_waits_is_replaced_and_the_wait_goes_on(
    tmp_path: Path,
) -> None:
    host = Host("process", tmp_path / "root", WAIT_S)
    assert isinstance(host.persister, PersistProcess)
    futures = [host.save(step) for step in (1, 2)]
    slot = host.arena.reserve(SIZE, 1, WAIT_S)  # both are stored
    assert slot is not None
    host.arena.free(slot)
    before = host.persister.pid
    os.kill(before, signal.SIGKILL)
    end = monotonic() + WAIT_S
    while host.persister.pid == before:
        assert monotonic() < end
        sleep(0.01)
    for step in (1, 2):
        store_part(host.repository, step, 1, 2)
    assert [future.result(WAIT_S).step for future in futures] == [1, 2]
    host.close()
    assert steps(host.repository) == [1, 2]


def test_what_is_stored_survives_its_way_between_processes(repository: Repository) -> None:
    stored = store_part(repository, 5, 1, 2)
    assert rebuild_stored(json.loads(json.dumps(asdict(stored)))) == stored


# --- hand-over ----------------------------------------------------------------


def leave_slot(repository: Repository, directory: Path, step: int, rank: int, world: int) -> Path:
    """A sealed slot of a dead rank."""
    name = slot_name(repository.run, rank, 10 * step + rank).replace(
        f"-{os.getpid()}-", f"-{NOBODY}-"
    )
    meta = dump_capture(a_capture(step, rank, world))
    slot = Slot.create(directory, name, SIZE + PAGE_BYTES, len(meta))
    slot.begin(SIZE, 0, meta)
    slot.image[:SIZE] = content(step, rank)
    slot.state = SlotState.SEALED
    slot.persister = ProcessId(0, 0)
    slot._words[_Word.OWNER_PID], slot._words[_Word.OWNER_START] = NOBODY, 1
    slot.close(unlink=False)
    return directory / name


@pytest.mark.parametrize("finders", [(0,), (1,), (0, 1), (1, 0)])
def test_slots_of_two_dead_ranks_are_finished_by_whoever_finds_them(
    repository: Repository, tmp_path: Path, finders: tuple[int, ...]
) -> None:
    said: list[str] = []
    for step, rank in ((5, 0), (6, 1), (5, 1), (6, 0)):
        leave_slot(repository, tmp_path, step, rank, 2)
    found: list[int] = []
    for rank in finders:
        done = take_over(
            again(repository), Retention(), discard, 5.0, said.append, tmp_path, rank=rank
        )
        found += sorted({durable.step for durable in done})
    assert said == []
    assert found == [5, 6]
    assert steps(repository) == [5, 6]
    assert read_all_parts(repository, CheckpointId(1, 6)) == [content(6, 0), content(6, 1)]
    assert list(slots_of(tmp_path, repository.run)) == []


def test_slots_on_two_hosts_are_committed_by_the_last_to_take_over(
    repository: Repository, tmp_path: Path
) -> None:
    hosts = [tmp_path / "host0", tmp_path / "host1"]
    for rank, host in enumerate(hosts):
        host.mkdir()
        leave_slot(repository, host, 5, rank, 2)
    for rank in (1, 0):
        assert steps(repository) == []
        take_over(again(repository), Retention(), discard, 5.0, [].append, hosts[rank], rank=rank)
    assert steps(repository) == [5]


def test_a_step_whose_other_rank_never_comes_stays_uncommitted(
    repository: Repository, tmp_path: Path
) -> None:
    leave_slot(repository, tmp_path, 5, 1, 2)
    said: list[str] = []
    assert take_over(repository, Retention(), discard, 5.0, said.append, tmp_path) == []
    assert said == []
    assert steps(repository) == []
    assert list(slots_of(tmp_path, repository.run)) == []
    repository.claim(None)
    assert not repository.survey().leftovers


def test_what_all_ranks_stored_before_they_died_is_committed_at_the_next_start(
    repository: Repository, tmp_path: Path
) -> None:
    """Their slots were free: all lies in the store but the manifest."""
    for rank in (0, 1):
        store_part(repository, 5, rank, 2)
    store_part(repository, 6, 0, 2)
    take_over(repository, Retention(), discard, 5.0, [].append, tmp_path, rank=1)
    assert steps(repository) == [5]


# --- bases ----------------------------------------------------------------------


def test_ranks_that_stand_on_different_bases_are_refused(repository: Repository) -> None:
    for step in (1, 2):
        for rank in (0, 1):
            store_part(repository, step, rank, 2)
        repository.try_commit(CheckpointId(1, step), 2)
    at = CheckpointId(1, 3)
    for rank in (0, 1):
        store_part(repository, 3, rank, 2)
        found = read_index(repository.store, at, rank)
        assert found is not None
        base = as_base(repository.store, CheckpointId(1, 1 + rank), "exact")
        repository.write_index(replace(found[0], base=base))
    with pytest.raises(CorruptCheckpoint, match="base"):
        repository.try_commit(at, 2)
    assert steps(repository) == [1, 2]
