"""The tools that test others: a tool that cannot find a bug finds none."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest

from asymcheck.decoding import verify
from asymcheck.errors import CheckpointError, OptionError, StoreError
from asymcheck.planning.retention import CheckpointId, Retention
from asymcheck.storage.local import LocalStore
from asymcheck.storage.memory import MemoryStore
from asymcheck.storage.repository import Repository, create_repository, open_repository
from asymcheck.storage.store import open_store, read_all
from asymcheck.testing.checkpoints import commit_bytes, read_bytes
from asymcheck.testing.children import Child, run_in_child
from asymcheck.testing.faulty import Fault, FaultyStore
from asymcheck.testing.powercut import PowerCut, PowerCutFiles, PowerCutStore

MODES = ("lost", "names", "mixed")

# --- power cuts -------------------------------------------------------------


def after(store: PowerCutStore, target: Path, mode: str, seed: int = 0) -> dict[str, bytes]:
    store.files.after_power_cut(target, mode, seed)
    found = LocalStore(target)
    return {e.name: read_all(found, e.name) for e in found.list()} if target.exists() else {}


def test_what_was_written_through_the_store_survives_each_kind_of_cut(tmp_path: Path) -> None:
    store = PowerCutStore(tmp_path / "a" / "root")
    store.prepare()
    store.write("folder/x", [b"one", b"two"])
    store.create("y", b"three")
    for mode in MODES:
        assert after(store, tmp_path / mode, mode) == {"folder/x": b"onetwo", "y": b"three"}


class Forgetful(PowerCutFiles):
    """A store that forgets to sync something: the kind of bug that the tool is for."""

    forgets: ClassVar[str] = ""

    def fsync(self, fd: int) -> None:
        if self.forgets != "fsync":
            super().fsync(fd)

    def fsync_dir(self, path: Path) -> None:
        if self.forgets != "fsync_dir":
            super().fsync_dir(path)


def forgetful_store(root: Path, forgets: str) -> PowerCutStore:
    store = PowerCutStore(root)
    store.files = Forgetful(store.root)
    store.files.forgets = forgets  # type: ignore[attr-defined]
    store._files = store.files
    return store


@pytest.mark.parametrize(
    ("forgets", "mode", "expected"),
    [
        ("", "lost", {"x": b"data"}),
        ("", "names", {"x": b"data"}),
        ("fsync", "lost", {"x": b""}),
        ("fsync", "names", {"x": b""}),
        ("fsync_dir", "lost", {}),
        ("fsync_dir", "names", {"x": b"data"}),
    ],
)
def test_a_forgotten_sync_is_found(
    tmp_path: Path, forgets: str, mode: str, expected: dict[str, bytes]
) -> None:
    (tmp_path / "root").mkdir()
    store = forgetful_store(tmp_path / "root", forgets)
    store.write("x", [b"data"])
    assert after(store, tmp_path / "after", mode) == expected


def test_luck_is_drawn_from_the_seed_for_each_name(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    store = forgetful_store(tmp_path / "root", "fsync_dir")
    for i in range(8):
        store.write(f"x{i}", [b"data"])
    found = [after(store, tmp_path / f"{seed}", "mixed", seed) for seed in range(5)]
    assert found[0] == after(store, tmp_path / "again", "mixed", 0)
    assert any(0 < len(names) < 8 for names in found)


def test_a_removal_that_was_not_synced_comes_back(tmp_path: Path) -> None:
    root = tmp_path / "root"
    store = PowerCutStore(root)
    store.prepare()
    store.write("folder/x", [b"data"])
    store.files.unlink(root / "folder" / "x")
    store.files.rmdir(root / "folder")
    assert list(store.list()) == []
    assert after(store, tmp_path / "lost", "lost") == {"folder/x": b"data"}
    assert after(store, tmp_path / "names", "names") == {}
    store.files.fsync_dir(root)
    assert after(store, tmp_path / "synced", "lost") == {}


def test_a_replaced_file_is_the_old_one_until_its_name_is_synced(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "x").write_bytes(b"old")
    files = PowerCutFiles(root)
    fd = files.open_new(root / "new")
    files.write(fd, memoryview(b"new!"))
    files.fsync(fd)
    files.close(fd)
    files.rename(root / "new", root / "x")
    files.after_power_cut(tmp_path / "lost", "lost")
    assert (tmp_path / "lost" / "x").read_bytes() == b"old"
    files.fsync_dir(root)
    files.after_power_cut(tmp_path / "synced", "lost")
    assert (tmp_path / "synced" / "x").read_bytes() == b"new!"


def test_a_folder_whose_name_was_not_synced_is_lost_with_all_that_was_in_it(
    tmp_path: Path,
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    files = PowerCutFiles(root)
    files.mkdir(root / "folder")
    fd = files.open_new(root / "folder" / "x")
    files.write(fd, memoryview(b"data"))
    files.fsync(fd)
    files.close(fd)
    files.fsync_dir(root / "folder")
    files.after_power_cut(tmp_path / "lost", "lost")
    assert not (tmp_path / "lost" / "folder").exists()
    files.after_power_cut(tmp_path / "names", "names")
    assert (tmp_path / "names" / "folder" / "x").read_bytes() == b"data"


def test_the_power_fails_once_and_nothing_changes_after_it(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    store = PowerCutStore(root, cut_at=4)
    with pytest.raises(PowerCut, match="before call 4: write"):
        store.write("x", [b"12345678"])
    (half,) = [p for p in root.rglob("*") if p.is_file()]
    assert half.read_bytes() == b"1234"
    before = len(store.files.operations)
    for attempt in (
        lambda: store.write("y", [b"y"]),
        lambda: store.create("y", b"y"),
        lambda: store.delete("y"),
        lambda: list(store.list()),
        lambda: read_all(store, "x"),
    ):
        with pytest.raises(StoreError, match="the power is off"):
            attempt()
    assert len(store.files.operations) == before
    assert half.read_bytes() == b"1234"
    store.files.restart_process()
    store.write("y", [b"y"])
    assert read_all(store, "y") == b"y"


# --- a commit protocol with a bug is found ----------------------------------


class ManifestFirst(Repository):
    """The bug that the format forbids: what names the packs is written before them."""

    def save(self, at: CheckpointId) -> None:
        data = {"w": b"x" * 5000}
        scratch = create_repository(MemoryStore())
        scratch.run = self.run
        scratch.claim(None)
        commit_bytes(scratch, at, data)
        for entry in sorted(scratch.store.list(f"step-{at.step:08d}"), key=lambda e: e.name):
            self.store.write(entry.name, [read_all(scratch.store, entry.name)])


def test_writing_the_manifest_before_its_packs_is_found_by_cutting_the_power(
    tmp_path: Path,
) -> None:
    def live(store: PowerCutStore) -> None:
        repository = create_repository(store)
        repository.claim(None)
        ManifestFirst(store, repository.run).save(CheckpointId(1, 1))

    counted = PowerCutStore(tmp_path / "0")
    live(counted)
    half_written = 0
    for n in range(1, len(counted.files.operations) + 1):
        store = PowerCutStore(tmp_path / f"{n}", cut_at=n)
        with pytest.raises(PowerCut):
            live(store)
        store.files.after_power_cut(tmp_path / f"after-{n}", "lost")
        try:
            half_written += bool(
                open_repository(LocalStore(tmp_path / f"after-{n}")).survey().damaged
            )
        except CheckpointError:
            continue  # it was cut off before there was a repository
    assert half_written > 5


# --- the store that fails ---------------------------------------------------


def test_a_fault_strikes_at_its_operation_and_so_many_times() -> None:
    store = FaultyStore(MemoryStore(), Fault(at=2, times=2, op="write", name="*.pack"))
    store.write("a.pack", [b"x"])
    store.write("other", [b"x"])
    for _ in range(2):
        with pytest.raises(StoreError, match="injected"):
            store.write("b.pack", [b"x"])
    store.write("b.pack", [b"x"])
    assert [op for op, _ in store.operations] == ["write"] * 5


@pytest.mark.parametrize(("when", "visible"), [("before", False), ("mid", False), ("after", True)])
@pytest.mark.parametrize("do", ["EIO", "ENOSPC"])
def test_a_write_fails_before_in_the_middle_or_after_the_fact(
    when: str, visible: bool, do: str
) -> None:
    inner = MemoryStore()
    store = FaultyStore(inner, Fault(when=when, do=do))
    with pytest.raises(StoreError) as caught:
        store.write("x", [b"data"])
    assert caught.value.retryable == (do == "ENOSPC")
    assert bool(list(inner.list())) == visible


def test_a_short_write_says_how_much_it_took() -> None:
    store = FaultyStore(MemoryStore(), Fault(do="short"))
    assert store.write("x", [b"123", b"456", b"78"]) == 4
    assert read_all(store.inner, "x") == b"1234"


def test_a_read_can_fail_after_the_object_was_opened() -> None:
    store = FaultyStore(MemoryStore(), Fault(op="read"))
    store.write("x", [b"data"])
    with store.open("x") as opened, pytest.raises(StoreError, match="injected"):
        opened.readinto(0, memoryview(bytearray(4)))
    assert ("read", "x") in store.operations


@pytest.mark.parametrize("when", ["before", "mid", "after"])
def test_a_store_described_by_a_url_kills_its_process(tmp_path: Path, when: str) -> None:
    LocalStore(tmp_path).prepare()
    url = FaultyStore(LocalStore(tmp_path), Fault(at=2, op="write", do="kill", when=when)).url

    def work(say: Callable[[object], None]) -> None:
        store = open_store(url)
        store.write("a", [b"a"])
        say("first")
        store.write("b", [b"b" * 1000])
        say("second")

    outcome = run_in_child(work)
    assert outcome.was_killed
    assert outcome.said == ["first"]
    names = {e.name for e in LocalStore(tmp_path).list()}
    assert names == ({"a", "b"} if when == "after" else {"a"})


@pytest.mark.parametrize("fault", [{"when": "never"}, {"do": "EPERM"}])
def test_a_fault_that_means_nothing_is_refused(fault: dict[str, str]) -> None:
    with pytest.raises(OptionError, match="expected"):
        Fault(**fault)


# --- children ---------------------------------------------------------------


def test_a_child_says_what_it_does_and_ends() -> None:
    outcome = run_in_child(lambda say: [say(i) for i in range(3)])
    assert outcome.check() == [0, 1, 2]


def test_an_exception_in_a_child_is_told_with_its_traceback() -> None:
    def work(say: Callable[[object], None]) -> None:
        say("before")
        raise KeyError("lost")

    outcome = run_in_child(work)
    assert outcome.said == ["before"]
    with pytest.raises(AssertionError, match=r"status 70[\s\S]*KeyError: 'lost'"):
        outcome.check()


def test_what_a_child_said_before_it_was_killed_is_known() -> None:
    def work(say: Callable[[object], None]) -> None:
        say({"so": "far"})
        os.kill(os.getpid(), signal.SIGKILL)

    child = Child(work)
    assert child.hear() == {"so": "far"}
    assert child.wait().was_killed


def test_a_child_that_hangs_is_killed_and_told() -> None:
    child = Child(lambda say: signal.pause())
    with pytest.raises(AssertionError, match="the child said nothing more"):
        child.hear(timeout_s=0.01)
    with pytest.raises(AssertionError, match="still running after"):
        child.wait(timeout_s=0.01)


# --- checkpoints of bytes ---------------------------------------------------


def test_bytes_come_back_from_several_packs() -> None:
    repository = create_repository(MemoryStore())
    repository.claim(None)
    at = CheckpointId(1, 7)
    values = {"a": b"1" * 70_000, "b": b"", "": b"{}", "c": b"3" * 200_000, "d": b"4"}
    manifest = commit_bytes(repository, at, values, pack_bytes=100_000)
    assert len(manifest.packs) == 2
    assert read_bytes(repository, at) == values
    assert list(verify(repository, at)) == []
    assert repository.retain(at, Retention(keep_last=1)) == []
