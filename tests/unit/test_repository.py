"""What a repository calls a checkpoint, who may write, what retention may take away."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from asymcheck import Checkpointer
from asymcheck.decoding import Decoding, verify
from asymcheck.errors import (
    CheckpointWarning,
    CorruptCheckpoint,
    IncompatibleCheckpoint,
    NoCheckpoint,
    ObjectNotFound,
    OptionError,
    StoreError,
    SupersededWriter,
)
from asymcheck.planning.retention import CheckpointId, Retention
from asymcheck.storage.local import LocalStore
from asymcheck.storage.manifest import FORMAT_LINE, Attempt, dump_attempt
from asymcheck.storage.memory import MemoryStore
from asymcheck.storage.names import (
    MAX_ATTEMPT,
    MAX_STEP,
    attempt_name,
    index_name,
    manifest_name,
    pack_name,
    parse_name,
)
from asymcheck.storage.repository import Repository, create_repository, open_repository
from asymcheck.storage.sealed import seal
from asymcheck.storage.store import Readable, read_all
from asymcheck.testing.checkpoints import commit_bytes, read_bytes
from asymcheck.testing.children import TIMEOUT_S, Child, Say
from asymcheck.testing.faulty import Fault, FaultyStore

ALL = Retention()


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def repository(store: MemoryStore) -> Repository:
    return create_repository(store)


def save(
    repository: Repository,
    attempt: int,
    *steps: int,
    retention: Retention = ALL,
    loss: float | None = None,
) -> None:
    for step in steps:
        at = CheckpointId(attempt, step)
        metrics = {} if loss is None else {"loss": loss}
        commit_bytes(repository, at, {"w": content(at)}, metrics=metrics)
        repository.retain(at, retention)


def content(at: CheckpointId) -> bytes:
    return f"attempt {at.attempt} step {at.step}".encode() * 10


def there(repository: Repository) -> list[tuple[int, int]]:
    """What is committed; every one of them is read and compared."""
    committed = repository.survey().committed
    for at in committed:
        assert read_bytes(repository, at) == {"w": content(at)}
    return [tuple(at) for at in committed]


def state_of(value: float) -> dict[str, object]:
    return {"w": torch.full((8,), value)}


def saved(root: object, value: float, *steps: int, **options: object) -> Checkpointer:
    options.setdefault("persist", "thread")  # quicker, where who writes is not the point
    ckpt = Checkpointer(root, state=state_of(value), **options)
    ckpt.restore()
    for step in steps:
        ckpt.save(step)
    ckpt.wait(TIMEOUT_S)
    return ckpt


# --- identity, lineage, branches --------------------------------------------


def test_the_newest_is_the_greatest_attempt_and_then_the_greatest_step(
    repository: Repository,
) -> None:
    first = repository.claim(None)
    save(repository, first.number, 100, 200, 500)
    second = repository.claim(CheckpointId(first.number, 100))
    assert repository.lineage()[-1] == (1, 500)
    save(repository, second.number, 110)
    assert repository.lineage() == [(1, 100), (2, 110)]


def test_one_step_of_two_attempts_is_two_checkpoints(repository: Repository) -> None:
    repository.claim(None)
    save(repository, 1, 10)
    repository.claim(None)
    save(repository, 2, 10)
    assert there(repository) == [(1, 10), (2, 10)]


def test_a_branch_left_behind_goes_only_after_the_first_commit_of_the_new_one(
    repository: Repository,
) -> None:
    repository.claim(None)
    save(repository, 1, 10, 20, 30)
    repository.claim(CheckpointId(1, 10))
    assert there(repository) == [(1, 10), (1, 20), (1, 30)]
    save(repository, 2, 15)
    assert there(repository) == [(1, 10), (2, 15)]


def test_a_fresh_start_beside_leaves_the_old_branch_alone(repository: Repository) -> None:
    repository.claim(None)
    save(repository, 1, 10, 20)
    repository.claim(None)
    save(repository, 2, 1, 2, 3, retention=Retention(keep_last=1))
    assert there(repository) == [(1, 10), (1, 20), (2, 3)]
    assert repository.lineage() == [(2, 3)]


def test_resume_never_starts_beside_and_a_failed_first_save_does_not_join_the_old_branch() -> None:
    raw = MemoryStore()
    saved(raw, 1.0, 10, 20, 30).close()
    store = FaultyStore(raw, Fault(op="write", name="*MANIFEST.json"))
    ckpt = Checkpointer(store, state=state_of(2.0), keep_last=1)
    assert ckpt.restore(resume="never") == 0
    ckpt.save(25)
    with pytest.raises(StoreError, match="injected"):
        ckpt.wait(TIMEOUT_S)
    ckpt.save(25)
    ckpt.close()
    repository = open_repository(raw)
    assert [at.step for at in repository.survey().committed] == [10, 20, 30, 25]
    assert [at.step for at in repository.lineage()] == [25]


def test_a_step_saved_again_after_a_failure_stays_on_its_own_branch() -> None:
    raw = MemoryStore()
    store = FaultyStore(raw)
    ckpt = saved(store, 1.0, 10, 20, 30, 40)
    ckpt.restore(20)
    store.fault = Fault(at=1, op="write", name="*MANIFEST.json")
    ckpt.save(50)
    with pytest.raises(StoreError, match="injected"):
        ckpt.wait(TIMEOUT_S)
    ckpt.save(50)
    ckpt.wait(TIMEOUT_S)
    assert ckpt.steps() == [10, 20, 50]
    ckpt.close()


def test_a_step_saved_again_is_the_later_state(store: MemoryStore) -> None:
    ckpt = saved(store, 1.0, 1, 2)
    ckpt.close()
    tensor = torch.full((8,), 5.0)
    with Checkpointer(store, state={"w": tensor}) as again:
        assert again.restore() == 2
        tensor.fill_(7.0)
        again.save(2)
        again.wait(TIMEOUT_S)
        tensor.fill_(8.0)
        again.save(1)
        again.wait(TIMEOUT_S)
        assert again.steps() == [1]
    loaded = torch.zeros(8)
    with Checkpointer(store, state={"w": loaded}) as last:
        assert last.restore() == 1
    assert torch.equal(loaded, torch.full((8,), 8.0))


def test_a_damaged_attempt_record_hides_ancestors_and_removes_none(store: MemoryStore) -> None:
    repository = create_repository(store)
    repository.claim(None)
    save(repository, 1, 10, 20)
    repository.claim(CheckpointId(1, 20))
    store.write(attempt_name(2), [b"half a rec"])
    save(repository, 2, 30, retention=Retention(keep_last=1))
    assert there(repository) == [(1, 10), (1, 20), (2, 30)]
    assert repository.lineage() == [(2, 30)]
    assert repository.claim(CheckpointId(2, 30)).number == 3


def test_an_attempt_record_under_another_number_is_damage(store: MemoryStore) -> None:
    repository = create_repository(store)
    repository.claim(None)
    store.write(attempt_name(2), [read_all(store, attempt_name(1))])
    with pytest.raises(CorruptCheckpoint, match="it is the record of attempt 1"):
        repository.attempt(2)


def test_an_attempt_record_on_a_bad_block_stops_a_writer_but_no_reader(
    store: MemoryStore,
) -> None:
    repository = create_repository(store)
    repository.claim(None)
    save(repository, 1, 10)
    bad = Fault(op="read", name="attempts/*", times=0)
    reading = open_repository(FaultyStore(store, bad))
    assert reading.lineage() == [(1, 10)]
    with pytest.raises(StoreError):
        reading.lineage(attempt=1)


# --- attempts ---------------------------------------------------------------


def test_of_many_starts_at_once_each_gets_its_own_number(store: MemoryStore) -> None:
    create_repository(store)
    gate = threading.Barrier(8)

    def start(_: int) -> int:
        mine = open_repository(store)
        gate.wait(TIMEOUT_S)
        return mine.claim(None).number

    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(start, range(8))) == list(range(1, 9))


def test_many_starts_in_one_empty_place_agree_on_one_run(tmp_path: Path) -> None:
    def start(say: Say) -> None:
        mine = create_repository(LocalStore(tmp_path / "new" / "root"))
        say([mine.run, mine.claim(None).number])

    children = [Child(start) for _ in range(6)]
    said = [child.wait().check()[0] for child in children]
    assert len({run for run, _ in said}) == 1
    assert sorted(number for _, number in said) == list(range(1, 7))


@pytest.mark.parametrize("late", ["FORMAT", "RUN.json"])
def test_a_root_that_another_job_is_just_making_is_not_taken_for_a_foreign_one(
    late: str,
) -> None:
    class SeenTooEarly(MemoryStore):
        """The other job makes its objects between our first look and our second."""

        looks = 0

        @contextmanager
        def open(self, name: str) -> Iterator[Readable]:
            if name == late:
                self.looks += 1
                if self.looks == 1:
                    raise ObjectNotFound("not yet")
            with super().open(name) as opened:
                yield opened

    store = SeenTooEarly()
    store.create("FORMAT", FORMAT_LINE.encode())
    store.create("RUN.json", seal({"run": "other"}))
    assert open_repository(store).run == "other"


def test_a_number_that_a_checkpoint_has_is_never_given_again(store: MemoryStore) -> None:
    repository = create_repository(store)
    for _ in range(3):
        repository.claim(None)
    save(repository, 3, 10)
    for entry in list(store.list("attempts")):
        store.delete(entry.name)
    assert repository.claim(None).number == 4
    assert there(repository) == [(3, 10)]


@pytest.mark.parametrize(
    "name", ["attempts/1", "attempts/0000001", "attempts/12345678901", "attempts/a", "attempts/1_0"]
)
def test_what_is_no_attempt_record_does_not_count(store: MemoryStore, name: str) -> None:
    repository = create_repository(store)
    store.write(name, [b"mine"])
    assert repository.claim(None).number == 1
    assert read_all(store, name) == b"mine"


def test_when_the_numbers_are_used_up_the_error_says_so(store: MemoryStore) -> None:
    repository = create_repository(store)
    store.write(attempt_name(MAX_ATTEMPT), [b""])
    with pytest.raises(StoreError, match="no attempt number after 999999999 could be taken"):
        repository.claim(None)


def test_a_store_that_never_creates_is_an_error_and_no_endless_loop(store: MemoryStore) -> None:
    repository = create_repository(store)
    store.create = lambda name, data: False  # type: ignore[method-assign]
    with pytest.raises(StoreError, match="1000 were tried"):
        repository.claim(None)


def test_a_name_that_is_taken_by_something_unlisted_does_not_stop_a_start(tmp_path: Path) -> None:
    repository = create_repository(LocalStore(tmp_path))
    (tmp_path / "attempts" / "000001").mkdir(parents=True)
    (tmp_path / "attempts" / "000002").symlink_to(tmp_path / "nowhere")
    assert repository.claim(None).number == 3


def test_a_second_writer_stops_the_first_and_both_keep_what_they_committed(
    store: MemoryStore,
) -> None:
    first = saved(store, 1.0, 10)
    with pytest.warns(CheckpointWarning, match="another Checkpointer of this process"):
        second = saved(store, 2.0, 20)
    with pytest.raises(SupersededWriter, match=r"attempt 2 was started by process .* after this"):
        first.save(30)
    with pytest.raises(SupersededWriter):
        first.step(40) or first.save(40)
    second.save(30)
    second.close()
    first.close()
    assert [tuple(at) for at in open_repository(store).survey().committed] == [
        (1, 10),
        (2, 20),
        (2, 30),
    ]
    assert not open_repository(store).survey().leftovers


def test_a_writer_that_is_overtaken_in_mid_save_commits_nothing(store: MemoryStore) -> None:
    repository = create_repository(store)
    repository.claim(None)
    other = open_repository(store)
    other.claim(None)
    with pytest.raises(SupersededWriter):
        save(repository, 1, 10)
    assert there(other) == []
    repository.discard(CheckpointId(1, 10))
    assert not other.survey().leftovers


def test_a_claim_that_failed_after_it_was_recorded_does_not_supersede_its_own_writer() -> None:
    raw = MemoryStore()
    store = FaultyStore(raw)
    repository = create_repository(store)
    repository.claim(None)
    store.fault = Fault(at=1, op="create", when="after")
    with pytest.raises(StoreError):
        repository.claim(None)
    repository.check_writer(1)
    save(repository, 1, 10)
    with pytest.raises(SupersededWriter):
        open_repository(raw).check_writer(1)  # to anybody else that record is a newer job
    assert repository.claim(CheckpointId(1, 10)).number == 3


def test_what_cannot_be_tidied_does_not_stop_a_start(store: MemoryStore) -> None:
    repository = create_repository(store)
    repository.claim(None)
    store.write(pack_name(CheckpointId(1, 5), 0, 1), [b"half"])
    for op in ("sweep", "delete"):
        faulty = create_repository(FaultyStore(store, Fault(op=op, times=0)))
        faulty.claim(None)
        assert len(faulty.survey().leftovers) == 1
    repository.claim(None)
    assert not repository.survey().leftovers


# --- what exists ------------------------------------------------------------


def test_an_index_or_pack_alone_is_no_checkpoint_and_goes_at_the_next_start(
    store: MemoryStore,
) -> None:
    repository = create_repository(store)
    repository.claim(None)
    save(repository, 1, 10)
    half = CheckpointId(1, 20)
    store.write(pack_name(half, 0, 1), [b"x" * 100])
    store.write(index_name(half, 0), [b"{"])
    store.write(manifest_name(CheckpointId(1, 30)), [b""])
    assert there(repository) == [(1, 10)]
    assert [at for at, _ in repository.survey().leftovers] == [half, half]
    assert [d.at.step for d in repository.survey().damaged] == [30]
    repository.claim(CheckpointId(1, 10))
    assert not repository.survey().leftovers
    assert [d.at.step for d in repository.survey().damaged] == [30]  # evidence is kept


@pytest.mark.parametrize("change", ["gone", "short", "long"])
@pytest.mark.parametrize("kind", ["index", "pack"])
def test_a_manifest_whose_objects_have_not_the_stated_length_is_damage(
    store: MemoryStore, change: str, kind: str
) -> None:
    repository = create_repository(store)
    repository.claim(None)
    save(repository, 1, 10, 20)
    (name,) = [
        e.name
        for e in store.list("step-00000020")
        if (parsed := parse_name(e.name)) and parsed.kind == kind
    ]
    data = read_all(store, name)
    if change == "gone":
        store.delete(name)
    else:
        store.write(name, [data[:-1] if change == "short" else data + b"\0"])
    assert there(repository) == [(1, 10)]
    (damage,) = repository.survey().damaged
    assert damage.at == (1, 20)
    assert damage.where == name
    assert "the manifest says" in damage.why
    with pytest.raises(CorruptCheckpoint), repository.open(CheckpointId(1, 20)):
        pass
    assert [d.at for d in verify(repository, CheckpointId(1, 20))] == [(1, 20)]


def test_one_manifest_on_a_bad_block_is_damage_of_one_checkpoint(store: MemoryStore) -> None:
    repository = create_repository(store)
    repository.claim(None)
    save(repository, 1, 10, 20)
    bad = Fault(op="read", name=manifest_name(CheckpointId(1, 20)), times=0)
    reading = open_repository(FaultyStore(store, bad))
    assert list(reading.survey().committed) == [(1, 10)]
    assert [d.at for d in reading.survey().damaged] == [(1, 20)]
    assert not reading.survey().leftovers
    busy = Fault(op="read", name=manifest_name(CheckpointId(1, 20)), times=0, do="ENOSPC")
    with pytest.raises(StoreError):  # one that may work at another try is not
        open_repository(FaultyStore(store, busy)).survey()


def test_a_checkpoint_that_was_removed_is_not_there_and_not_damaged(store: MemoryStore) -> None:
    repository = create_repository(store)
    repository.claim(None)
    save(repository, 1, 10)
    with pytest.raises(NoCheckpoint, match=r"step 11 \(attempt 1\)"):
        read_bytes(repository, CheckpointId(1, 11))


@pytest.mark.parametrize(
    "name",
    [
        "step-00000010/a0000001-MANIFEST.json",
        "step-000000010/a000001-MANIFEST.json",
        "step-10/a000001-MANIFEST.json",
        "step-00000010/a000001-manifest.json",
        "step-00000010/deep/a000001-MANIFEST.json",
        "a000001-MANIFEST.json",
        "step-00000010/a000001-r0000-1.pack",
        "step-00000010/a000001-r00000.json",
    ],
)
def test_one_identity_has_one_name(name: str) -> None:
    assert parse_name(name) is None


@pytest.mark.parametrize("at", [(1, 1), (999_999, 99_999_999), (MAX_ATTEMPT, MAX_STEP)])
def test_a_name_says_what_it_was_made_from(at: tuple[int, int]) -> None:
    at = CheckpointId(*at)
    for name, kind in (
        (manifest_name(at), "manifest"),
        (index_name(at, 9999), "index"),
        (pack_name(at, 0, 999_999), "pack"),
    ):
        parsed = parse_name(name)
        assert parsed is not None
        assert (parsed.at, parsed.kind) == (at, kind)


@pytest.mark.parametrize("step", [0, -1, MAX_STEP + 1, 1.0, True, "5", None])
def test_a_step_that_no_name_can_hold_is_refused(store: MemoryStore, step: object) -> None:
    with Checkpointer(store, state=state_of(1.0)) as ckpt, pytest.raises(OptionError, match="step"):
        ckpt.save(step)
    assert not open_repository(store).survey().leftovers


def test_the_greatest_step_is_saved_and_listed(store: MemoryStore) -> None:
    saved(store, 1.0, MAX_STEP).close()
    assert [at.step for at in open_repository(store).lineage()] == [MAX_STEP]


# --- retention --------------------------------------------------------------


def test_by_default_everything_is_kept(store: MemoryStore) -> None:
    ckpt = saved(store, 1.0, *range(1, 13))
    assert ckpt.steps() == list(range(1, 13))
    ckpt.close()


def test_keep_last_and_keep_every_keep_what_either_asks_for(repository: Repository) -> None:
    repository.claim(None)
    save(repository, 1, *range(1, 12), retention=Retention(keep_last=2, keep_every_steps=4))
    assert there(repository) == [(1, 4), (1, 8), (1, 10), (1, 11)]


def test_with_a_worsening_metric_the_newest_and_the_best_are_kept(repository: Repository) -> None:
    repository.claim(None)
    retention = Retention(keep_last=1, keep_best=2, monitor="loss")
    for step in range(1, 6):
        save(repository, 1, step, retention=retention, loss=float(step))
    assert there(repository) == [(1, 1), (1, 2), (1, 5)]


def test_a_larger_metric_is_better_where_that_is_said(repository: Repository) -> None:
    repository.claim(None)
    retention = Retention(keep_last=1, keep_best=1, monitor="loss", mode="max")
    for step, loss in enumerate([1.0, 9.0, -math.inf, math.inf, 3.0], 1):
        save(repository, 1, step, retention=retention, loss=loss)
    assert there(repository) == [(1, 4), (1, 5)]


def test_a_nan_is_never_a_best_one_and_survives_the_store(repository: Repository) -> None:
    repository.claim(None)
    retention = Retention(keep_last=1, keep_best=1, monitor="loss")
    for step, loss in enumerate([2.0, math.nan, math.inf, math.nan], 1):
        save(repository, 1, step, retention=retention, loss=loss)
    assert there(repository) == [(1, 1), (1, 4)]
    metrics = repository.survey().committed[CheckpointId(1, 4)].metrics
    assert math.isnan(metrics["loss"])


def test_retention_counts_its_own_lineage_over_restarts(repository: Repository) -> None:
    retention = Retention(keep_last=3)
    repository.claim(None)
    save(repository, 1, 1, 2, 3, retention=retention)
    repository.claim(CheckpointId(1, 3))
    save(repository, 2, 4, retention=retention)
    assert there(repository) == [(1, 2), (1, 3), (2, 4)]


def test_packs_outlive_their_manifest_by_one_commit(repository: Repository) -> None:
    store = repository.store
    repository.claim(None)
    retention = Retention(keep_last=1)
    save(repository, 1, 1, 2, retention=retention)
    assert {parse_name(e.name).kind for e in store.list("step-00000001")} == {"index", "pack"}
    save(repository, 1, 3, retention=retention)
    assert not list(store.list("step-00000001"))
    repository.finish()
    assert not repository.survey().leftovers


def test_what_could_not_be_removed_goes_with_a_later_commit() -> None:
    raw = MemoryStore()
    store = FaultyStore(raw)
    ckpt = saved(store, 1.0, 1, 2, keep_last=1)
    store.fault = Fault(op="delete", times=2)
    for step in (3, 4, 5, 6):
        ckpt.save(step)
        ckpt.wait(TIMEOUT_S)  # the checkpoint stands: nothing is raised
    assert ckpt.steps() == [6]
    ckpt.close()
    listing = open_repository(raw).survey()
    assert [at.step for at in listing.committed] == [6]
    assert not listing.leftovers


@pytest.mark.parametrize("stuck", ["step-00000001/*.pack", "step-00000002/*MANIFEST.json"])
def test_one_object_that_cannot_be_removed_keeps_no_other_from_going(stuck: str) -> None:
    raw = MemoryStore()
    store = FaultyStore(raw, Fault(op="delete", name=stuck, times=0))
    ckpt = saved(store, 1.0, *range(1, 8), keep_last=1)
    ckpt.close()
    found = open_repository(raw).survey()
    stands = [2, 7] if "MANIFEST" in stuck else [7]
    assert [at.step for at in found.committed] == stands
    assert len(found.leftovers) == (0 if "MANIFEST" in stuck else 1)
    saved(raw, 1.0, 8, keep_last=1).close()
    assert [at.step for at in open_repository(raw).survey().committed] == [8]
    assert not open_repository(raw).survey().leftovers


FOREIGN_FILES = [
    "checkpoint-3-best-KEEP/model.bin",
    "checkpoint-10-merged/model.bin",
    "step-00000001/notes.txt",
    "step-00000001/a000001-r0000-0001.pack.orig",
    "step-1/a000001-MANIFEST.json",
    "README",
    "tmp/mine",
    "attempts/notes",
]


def test_foreign_files_are_neither_counted_nor_removed(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    create_repository(store)
    for name in FOREIGN_FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    hidden = [tmp_path / ".ipynb_checkpoints" / "x", tmp_path / ".tmp" / "mine", tmp_path / ".x"]
    for path in hidden:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    for _ in range(3):
        saved(tmp_path, 1.0, 1, 2, 3, keep_last=1).close()
    assert {n: (tmp_path / n).read_text() for n in FOREIGN_FILES} == dict.fromkeys(
        FOREIGN_FILES, "mine"
    )
    assert [p.read_text() for p in hidden] == ["mine"] * 3
    listing = open_repository(store).survey()
    assert len(listing.committed) == 1
    assert not listing.leftovers
    assert not listing.damaged


def copy_objects(source: MemoryStore, to: MemoryStore, folder: str) -> dict[str, bytes]:
    copied = {e.name: read_all(source, e.name) for e in source.list(folder)}
    for name, data in copied.items():
        to.write(name, [data])
    return copied


def test_checkpoints_of_another_run_are_neither_counted_nor_removed(store: MemoryStore) -> None:
    other = MemoryStore()
    theirs = create_repository(other)
    for _ in range(2):
        theirs.claim(None)
    save(theirs, 2, 1000)
    repository = create_repository(store)
    copied = copy_objects(other, store, "step-00001000")
    attempt = repository.claim(None)
    assert attempt.number == 3  # their checkpoint has the number 2
    save(repository, attempt.number, 10, 20, 30, retention=Retention(keep_last=1))
    assert there(repository) == [(3, 30)]
    assert repository.survey().foreign == [(2, 1000)]
    assert repository.lineage() == [(3, 30)]
    repository.claim(CheckpointId(3, 30))
    assert {n: read_all(store, n) for n in copied} == copied


def test_modification_times_mean_nothing(tmp_path: Path) -> None:
    saved(tmp_path, 1.0, 1, 2, 3).close()
    for i, path in enumerate(sorted(tmp_path.rglob("*"), reverse=True)):
        os.utime(path, (1_000_000 + i, 1_000_000 + i))
    ckpt = saved(tmp_path, 1.0, 4, keep_last=2)
    assert ckpt.report.step == 3
    assert ckpt.steps() == [3, 4]
    ckpt.close()


# --- readers beside a writer ------------------------------------------------


def test_a_reader_that_opened_a_checkpoint_finishes_although_it_is_removed(
    tmp_path: Path,
) -> None:
    """The reader and the writer are two processes."""
    writer = create_repository(LocalStore(tmp_path))
    writer.claim(None)
    save(writer, 1, 1)
    retention = Retention(keep_last=1)

    def read(say: Say) -> None:
        reader = open_repository(LocalStore(tmp_path))
        with reader.open(CheckpointId(1, 1)) as checkpoint:
            say("opened")
            assert (tmp_path / "go").exists() or wait_for(tmp_path / "go")
            (index,) = checkpoint.indexes
            say(Decoding(checkpoint).read_leaf(index, index.leaves[0]).decode())
        try:
            read_bytes(reader, CheckpointId(1, 1))
        except NoCheckpoint:
            say("gone")

    child = Child(read)
    assert child.hear() == "opened"
    save(writer, 1, 2, 3, 4, retention=retention)
    writer.finish()
    assert not (tmp_path / "step-00000001").exists()
    (tmp_path / "go").touch()
    assert child.wait().check() == [content(CheckpointId(1, 1)).decode(), "gone"]


def wait_for(path: Path) -> bool:
    until_s = time.monotonic() + TIMEOUT_S
    while not path.exists() and time.monotonic() < until_s:
        time.sleep(0.005)
    return path.exists()


def test_readers_restore_while_a_writer_saves_and_removes(tmp_path: Path) -> None:
    """What a reader finds is always one whole checkpoint, never an error."""
    torch.set_num_threads(1)
    saved(tmp_path, 1.0, 1).close()

    def read(say: Say) -> None:
        tensor = torch.zeros(8)
        ckpt = Checkpointer(tmp_path, state={"w": tensor}, read_only=True)
        found = set()
        say("ready")
        while 60 not in found:
            step = ckpt.restore()
            assert torch.equal(tensor, torch.full((8,), float(step)))
            found.add(step)
        say(len(found))

    readers = [Child(read) for _ in range(2)]
    for reader in readers:
        assert reader.hear() == "ready"
    tensor = torch.zeros(8)
    with Checkpointer(tmp_path, state={"w": tensor}, keep_last=1, persist="thread") as writer:
        writer.restore()
        for step in range(2, 61):
            tensor.fill_(step)
            writer.save(step)
            writer.wait(TIMEOUT_S)
    for reader in readers:
        (found,) = reader.wait().check()
        assert found >= 1


def test_two_writers_that_apply_retention_at_once_remove_no_newest(tmp_path: Path) -> None:
    """The older of two jobs stops; neither run is without a checkpoint at any time."""
    torch.set_num_threads(1)
    saved(tmp_path, 1.0, 1).close()

    def work(say: Say) -> None:
        tensor = torch.zeros(8)
        ckpt = Checkpointer(tmp_path, state={"w": tensor}, keep_last=1, persist="thread")
        start = ckpt.restore()
        try:
            for step in range(start + 1, start + 30):
                ckpt.save(step)
                ckpt.wait(TIMEOUT_S)
        except SupersededWriter:
            say("superseded")
        else:
            say("done")
        ckpt.close()

    children = [Child(work), Child(work)]
    ends = sorted(child.wait().check()[0] for child in children)
    assert ends in (["done", "superseded"], ["done", "done"])
    repository = open_repository(LocalStore(tmp_path))
    assert repository.lineage()
    for at in repository.survey().committed:
        assert list(verify(repository, at)) == []


# --- other formats ----------------------------------------------------------


@pytest.mark.parametrize("line", [b"asymcheck 2\n", b"asymcheck 999999999\n", b"asymcheck 2"])
def test_a_newer_format_is_refused_by_its_number(store: MemoryStore, line: bytes) -> None:
    saved(store, 1.0, 1).close()
    store.write("FORMAT", [line])
    before = {e.name: read_all(store, e.name) for e in store.list()}
    with pytest.raises(IncompatibleCheckpoint, match=r"format version [0-9]+; this release reads"):
        Checkpointer(store, state=state_of(1.0))
    assert {e.name: read_all(store, e.name) for e in store.list()} == before


@pytest.mark.parametrize(
    "line", [b"", b"asymcheck", b"asymcheck -1", b"asymcheck 1\nmore", b"\xff"]
)
def test_a_damaged_format_line_is_damage(store: MemoryStore, line: bytes) -> None:
    saved(store, 1.0, 1).close()
    store.write("FORMAT", [line])
    with pytest.raises(CorruptCheckpoint, match="FORMAT: expected 'asymcheck 1'"):
        open_repository(store)


def test_a_huge_object_in_the_place_of_a_record_is_not_read(tmp_path: Path) -> None:
    saved(tmp_path, 1.0, 1).close()
    for name in ("FORMAT", "RUN.json", "attempts/000001", "step-00000001/a000001-MANIFEST.json"):
        kept = (tmp_path / name).read_bytes()
        with (tmp_path / name).open("r+b") as file:
            file.truncate(1 << 40)  # a hole: no disk space, a terabyte to read
        with pytest.raises(CorruptCheckpoint, match=r"expected at most|none of 1"):
            repository = open_repository(LocalStore(tmp_path))
            repository.attempt(1)
            Checkpointer(tmp_path, state=state_of(0.0), read_only=True).restore()
        (tmp_path / name).write_bytes(kept)
    assert Checkpointer(tmp_path, state=state_of(0.0), read_only=True).restore() == 1


def test_a_run_without_its_record_is_damage_and_not_a_fresh_start(store: MemoryStore) -> None:
    saved(store, 1.0, 1).close()
    store.delete("RUN.json")
    with pytest.raises(CorruptCheckpoint, match=r"RUN\.json: missing, so its checkpoints belong"):
        Checkpointer(store, state=state_of(1.0))


@pytest.mark.parametrize("name", ["model.safetensors", "checkpoint-5/state", "step-00000001/x"])
def test_a_directory_of_another_tool_is_refused_untouched(store: MemoryStore, name: str) -> None:
    store.write(name, [b"theirs"])
    top = name.partition("/")[0]
    with pytest.raises(OptionError, match=rf"expected an empty place .* found \['{top}'\]"):
        Checkpointer(store, state=state_of(1.0))
    assert {e.name: read_all(store, e.name) for e in store.list()} == {name: b"theirs"}


def test_an_attempt_of_the_future_is_a_newer_job(store: MemoryStore) -> None:
    ckpt = saved(store, 1.0, 1)
    record = Attempt(9, None, "elsewhere", 1234, 0.0)
    store.create(attempt_name(9), dump_attempt(record))
    ckpt.save(2)
    with pytest.raises(SupersededWriter, match="by process 1234 on elsewhere"):
        ckpt.wait()
    ckpt.close()
