"""Checkpoints that are marked suspect: passed over unasked, loaded when asked for, never lost."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from asymcheck import Checkpointer, Tier
from asymcheck.cli import app
from asymcheck.errors import CheckpointWarning, CorruptCheckpoint, NoCheckpoint, OptionError
from asymcheck.planning.retention import CheckpointId, Retention
from asymcheck.storage.copies import Copies, Place
from asymcheck.storage.local import LocalStore
from asymcheck.storage.memory import MemoryStore
from asymcheck.storage.names import manifest_name, parse_suspect_name, suspect_name
from asymcheck.storage.repository import Repository, create_repository, open_repository
from asymcheck.storage.store import Store
from asymcheck.storage.suspects import clear_suspect, mark_suspect, read_mark
from asymcheck.testing.checkpoints import commit_bytes
from asymcheck.testing.faulty import FaultyStore

WHY = "two starts died on it"


def trained(root: Store | str, *steps: int, **options: Any) -> Checkpointer:
    tensor = torch.zeros(8)
    ckpt = Checkpointer(root, state={"w": tensor}, persist="thread", **options)
    ckpt.restore()
    for step in steps:
        tensor.fill_(step)
        ckpt.save(step)
    ckpt.wait(60)
    return ckpt


def mark(store: Store, step: int, attempt: int = 1) -> CheckpointId:
    at = CheckpointId(attempt, step)
    mark_suspect(store, at, WHY)
    return at


def restored(root: Store | str, step: int | None = None, **options: Any) -> tuple[int, float]:
    tensor = torch.zeros(8)
    with Checkpointer(root, state={"w": tensor}, persist="thread", **options) as ckpt:
        return ckpt.restore(step), tensor[0].item()


def asymcheck(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result.output


def test_a_restore_passes_over_a_suspect_and_says_so() -> None:
    store = MemoryStore()
    trained(store, 1, 2, 3).close()
    mark(store, 3)
    tensor = torch.zeros(8)
    with Checkpointer(store, state={"w": tensor}) as ckpt:
        assert ckpt.steps() == [1, 2]
        with pytest.warns(CheckpointWarning, match="step 3 was passed over: marked suspect: two"):
            assert ckpt.restore() == 2
        assert tensor[0] == 2
        ((step, why),) = ckpt.report.skipped
        assert step == 3
        assert WHY in why
        assert "asymcheck suspect ROOT --step 3 --attempt 1 --clear" in why


def test_one_that_is_asked_for_is_loaded() -> None:
    store = MemoryStore()
    trained(store, 1, 2).close()
    mark(store, 2)
    assert restored(store, 2) == (2, 2.0)


def test_where_only_suspects_are_left_a_restore_fails_and_names_them() -> None:
    store = MemoryStore()
    trained(store, 1, 2).close()
    mark(store, 1)
    mark(store, 2)
    for resume in ("auto", "must"):
        ckpt = Checkpointer(store, state={"w": torch.zeros(8)})
        with pytest.raises(CorruptCheckpoint, match=r"step 1: marked suspect.*\n.*step 2: marked"):
            ckpt.restore(resume=resume)
        ckpt.close()
    ckpt = Checkpointer(store, state={"w": torch.zeros(8)})
    with pytest.raises(OptionError, match="holds checkpoints up to step 2: call restore"):
        ckpt.save(1)
    ckpt.close()


def test_a_mark_that_is_taken_away_changes_nothing() -> None:
    store = MemoryStore()
    trained(store, 1, 2).close()
    at = mark(store, 2)
    clear_suspect(store, at)
    clear_suspect(store, at)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert restored(store) == (2, 2.0)


def test_a_mark_that_cannot_be_read_marks_all_the_same() -> None:
    store = MemoryStore()
    trained(store, 1, 2).close()
    store.write(suspect_name(CheckpointId(1, 2)), [b"no json"])
    with pytest.warns(CheckpointWarning, match="marked suspect: why cannot be read"):
        assert restored(store) == (1, 1.0)


def test_training_on_leaves_the_suspect_behind_and_the_next_start_its_mark() -> None:
    store = MemoryStore()
    trained(store, 1, 2).close()
    at = mark(store, 2)
    with pytest.warns(CheckpointWarning, match="passed over"):
        ckpt = trained(store, 2, 3)
    ckpt.close()
    listing = open_repository(store).survey()
    assert list(listing.committed) == [(1, 1), (2, 2), (2, 3)]
    assert not listing.suspects
    assert listing.leftovers == [(at, suspect_name(at))]
    trained(store, 4).close()
    assert not open_repository(store).survey().leftovers
    assert restored(store) == (4, 4.0)


def test_retention_neither_counts_nor_removes_suspects() -> None:
    store = MemoryStore()
    ckpt = trained(store, 1, 2, 3, keep_last=2)
    mark(store, 3)
    for step in (4, 5):
        ckpt.save(step)
        ckpt.wait(60)
    ckpt.close()
    assert [at.step for at in open_repository(store).survey().committed] == [3, 4, 5]


def test_what_is_not_there_cannot_be_marked() -> None:
    store = MemoryStore()
    trained(store, 1).close()
    with pytest.raises(NoCheckpoint, match="there is no step 7 of attempt 1"):
        mark(store, 7)


@given(st.integers(1, 999_999_999), st.integers(1, 1 << 53))
def test_the_name_of_a_mark_says_what_is_marked(attempt: int, step: int) -> None:
    at = CheckpointId(attempt, step)
    assert parse_suspect_name(suspect_name(at)) == at
    assert parse_suspect_name(f"x{suspect_name(at)}") is None


@given(st.lists(st.integers(1, 8), unique=True, min_size=1), st.sets(st.integers(1, 8)), st.data())
def test_marks_hide_what_they_mark_and_never_all_without_a_word(
    steps: list[int], marks: set[int], data: st.DataObject
) -> None:
    store = MemoryStore()
    repository = create_repository(store)
    attempt = repository.claim(None).number
    keep_last = data.draw(st.sampled_from([None, 1, 2]))
    for step in sorted(steps):
        at = CheckpointId(attempt, step)
        commit_bytes(repository, at, {"w": b"x" * step})
        if step in marks:
            mark_suspect(store, at, WHY)
        repository.retain(at, Retention(keep_last))
    listing = repository.survey()
    left = [at.step for at in repository.lineage(listing)]
    good = [step for step in sorted(steps) if step not in marks]
    assert left == (good if keep_last is None else good[-keep_last:])
    assert {at.step for at in listing.suspects} == marks & set(steps)
    assert_it_starts_or_says_why(repository, left)


def assert_it_starts_or_says_why(repository: Repository, left: list[int]) -> None:
    from asymcheck.recovery import _look

    candidates, passed = _look(repository, None)
    assert [at.step for at in candidates] == left[::-1]
    assert candidates or all("marked suspect" in why for _, why, _ in passed)


# --- the command line --------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path) -> Path:
    trained(str(tmp_path / "root"), 1, 2, 3).close()
    return tmp_path / "root"


def test_the_command_marks_lists_and_clears(root: Path) -> None:
    assert "no checkpoint is marked suspect" in asymcheck("suspect", root)
    said = asymcheck("suspect", root, "--step", 3, "--why", "loss is no\nnumber")
    assert "step 3 (attempt 1): marked suspect" in said
    assert (
        read_mark(Copies([Place("root", LocalStore(root))]), CheckpointId(1, 3)).why
        == "loss is no\nnumber"
    )
    assert "marked suspect: loss is no number" in asymcheck("suspect", root)
    (found,) = json.loads(asymcheck("suspect", root, "--json"))["checkpoints"]
    assert (found["step"], found["attempt"], found["why"]) == (3, 1, "loss is no\nnumber")
    assert "step 3 (attempt 1): no longer suspect" in asymcheck(
        "suspect", root, "--step", 3, "--clear"
    )
    assert "is not marked suspect" in asymcheck("suspect", root, "--step", 3, "--clear", code=1)
    assert "step: expected one" in asymcheck("suspect", root, "--clear", code=2)
    assert "steps 1, 2, 3 are there" in asymcheck("suspect", root, "--step", 9, code=1)


def test_a_new_host_with_an_empty_root_marks_and_clears_in_its_tiers(
    root: Path, tmp_path: Path
) -> None:
    new, far = tmp_path / "new", tmp_path / "far"
    shutil.copytree(root, far)
    tiers = ("--tier", root, "--tier", far)
    assert "step 3 (attempt 1): marked suspect" in asymcheck("suspect", new, "--step", 3, *tiers)
    for place in (root, far):
        assert "step 3 (attempt 1): marked" in asymcheck("suspect", place)
    assert not new.exists()
    (found,) = json.loads(asymcheck("suspect", new, "--json", *tiers))["checkpoints"]
    assert found["step"] == 3
    asymcheck("suspect", new, "--step", 3, "--clear", *tiers)
    for place in (root, far):
        assert "no checkpoint is marked suspect" in asymcheck("suspect", place)


def test_a_tier_that_is_out_of_reach_is_named_and_the_others_are_marked(
    root: Path, tmp_path: Path
) -> None:
    (tmp_path / "far").mkdir()
    away = f"faulty+file://{tmp_path / 'far'}?times=0"
    said = asymcheck("suspect", root, "--step", 3, "--tier", away, code=1)
    assert "step 3 (attempt 1): marked suspect" in said
    assert "out of reach" in said
    assert "Input/output error" in said
    assert "step 3 (attempt 1): marked" in asymcheck("suspect", root)


def test_marking_the_last_one_says_that_nothing_is_left(root: Path) -> None:
    for step in (1, 2):
        assert "no checkpoint is left" not in asymcheck("suspect", root, "--step", step)
    assert "no checkpoint is left that restore() would choose" in asymcheck(
        "suspect", root, "--step", 3
    )


def test_ls_show_doctor_and_prune_know_suspects(root: Path) -> None:
    asymcheck("suspect", root, "--step", 3, "--why", WHY)
    listed = json.loads(asymcheck("ls", root, "--json"))
    states = {row["step"]: row["state"] for row in listed["checkpoints"]}
    assert states == {1: "ok", 2: "newest", 3: "suspect"}
    assert listed["newest"] == {"step": 2, "attempt": 1}
    assert WHY in asymcheck("ls", root)
    assert "step 2 (attempt 1)" in asymcheck("show", root)
    assert "marked suspect: two starts died" in asymcheck("show", root, "--step", 3)
    assert "1 marked suspect" in CliRunner().invoke(app, ["doctor", str(root)]).output
    asymcheck("prune", root, "--keep-last", 1, "--yes")
    assert [at.step for at in open_repository(LocalStore(root)).survey().committed] == [2, 3]


# --- tiers ------------------------------------------------------------------------


@pytest.fixture
def both() -> tuple[MemoryStore, MemoryStore]:
    """Steps 1 to 3 at home and in a tier."""
    home, far = MemoryStore("home"), MemoryStore("far")
    tensor = torch.zeros(8)
    with Checkpointer(
        home, state={"w": tensor}, tiers=(Tier(far, name="far"),), persist="thread"
    ) as ckpt:
        ckpt.restore()
        for step in (1, 2, 3):
            tensor.fill_(step)
            ckpt.save(step)
            assert ckpt.wait(60, tier="far")
    return home, far


def start(home: Store, far: Store) -> int:
    """What a start of the training goes on from; its tier has caught up when it ends."""
    tiers, state = (Tier(far, name="far"),), {"w": torch.zeros(8)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        with Checkpointer(home, state=state, tiers=tiers, persist="thread") as ckpt:
            found = ckpt.restore()
            assert ckpt.wait(60, tier="far")
            return found


def marks(store: Store) -> list[int]:
    found = (parse_suspect_name(entry.name) for entry in store.list())
    return [at.step for at in found if at is not None]


def test_a_mark_made_at_home_is_honoured_by_a_start_with_an_empty_home(
    both: tuple[MemoryStore, MemoryStore],
) -> None:
    home, far = both
    mark(home, 3)
    assert start(home, far) == 2
    assert marks(far) == [3]
    assert start(MemoryStore("new"), far) == 2


def test_a_mark_taken_away_at_home_goes_from_the_tier_too(
    both: tuple[MemoryStore, MemoryStore],
) -> None:
    home, far = both
    at = mark(home, 3)
    start(home, far)
    clear_suspect(home, at)  # while nothing runs
    assert marks(far) == [3]
    assert start(home, far) == 3
    assert marks(far) == []
    assert start(MemoryStore("new"), far) == 3


def test_a_tier_never_has_a_suspect_without_its_mark(
    both: tuple[MemoryStore, MemoryStore],
) -> None:
    home, _ = both
    at = mark(home, 3)
    watched = FaultyStore(MemoryStore("later"))
    start(home, watched)
    written = [name for op, name in watched.operations if op == "write"]
    assert suspect_name(at) in written
    if manifest_name(at) in written:
        assert written.index(suspect_name(at)) < written.index(manifest_name(at))


def test_recover_brings_home_a_suspect_that_is_asked_for_with_its_mark(tmp_path: Path) -> None:
    far = LocalStore(tmp_path / "far")
    trained(str(tmp_path / "far"), 1, 2).close()
    mark(far, 2)
    new = tmp_path / "new"
    asymcheck("recover", new, "--tier", tmp_path / "far", "--step", 2, "--yes")
    assert marks(LocalStore(new)) == [2]
    with pytest.raises(CorruptCheckpoint, match="marked suspect"):
        restored(str(new))
    assert restored(str(new), 2) == (2, 2.0)


def test_what_says_whose_a_marked_place_is_heals_too(
    both: tuple[MemoryStore, MemoryStore],
) -> None:
    home, far = both
    mark(home, 3)
    start(home, far)
    far.write("RUN.json", [b"rotten"])
    assert start(home, far) == 2
    assert far._objects["RUN.json"] == home._objects["RUN.json"]
