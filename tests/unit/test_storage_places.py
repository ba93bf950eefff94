"""Where checkpoints may lie: odd paths, closed doors, full disks, things in the way."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import mkdtemp
from typing import NoReturn

import pytest
import torch

from asymcheck import Checkpointer, Strategy
from asymcheck.errors import (
    CheckpointError,
    CorruptCheckpoint,
    NoCheckpoint,
    ObjectNotFound,
    OptionError,
    StoreError,
)
from asymcheck.recovery import CheckpointWarning
from asymcheck.storage import local, repository
from asymcheck.storage.local import TEMP_FOLDER, Files, LocalStore
from asymcheck.storage.repository import create_repository, open_repository
from asymcheck.storage.sealed import seal
from asymcheck.storage.store import open_store, read_all
from asymcheck.testing.children import TIMEOUT_S, Say, run_in_child

NOBODY = 65534
MiB = 1 << 20


def save(root: object, *steps: int, value: float = 1.0, **options: object) -> None:
    tensor = torch.zeros(8)
    options.setdefault("persist", "thread")  # quicker, where who writes is not the point
    with Checkpointer(root, state={"w": tensor}, **options) as ckpt:
        ckpt.restore()
        for step in steps:
            tensor.fill_(value * step)
            ckpt.save(step)
            ckpt.wait(TIMEOUT_S)


def load(root: object, size: int = 8) -> tuple[int, float]:
    tensor = torch.zeros(size)
    step = Checkpointer(root, state={"w": tensor}, read_only=True).restore()
    assert len(set(tensor.tolist())) == 1
    return step, tensor[0].item()


def temp_files(root: Path) -> list[Path]:
    return list((root / TEMP_FOLDER).glob("*"))


# --- paths ------------------------------------------------------------------

ODD_NAMES = [
    "with spaces ",
    "quo'te\"s",
    "ünï-名-🙂",
    "$HOME",
    "${VAR}",
    "~tilde",
    "~",
    "100%25%",
    "a?at=1&do=kill#c",
    "semi;colon&and|pipe",
    "back\\slash",
    "new\nline",
    "-option",
    "step-00000001",
    "a+b",
    "*",
    "x" * 255,
    "名" * 85,
]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_any_name_of_a_root_means_just_itself(tmp_path: Path, name: str) -> None:
    root = tmp_path / name
    save(str(root), 1, persist="process")  # which has the root from its command line
    for given in (root, f"{root}/", f"{root}//./", LocalStore(root).url):
        save(given, load(root)[0] + 1)
        assert load(root)[0] == load(given)[0]
    assert load(root) == (5, 5.0)
    assert os.listdir(tmp_path) == [name]


def test_a_name_that_is_no_unicode_means_just_itself(tmp_path: Path) -> None:
    root = tmp_path / os.fsdecode(b"caf\xe9")
    save(root, 1, persist="process")
    save(LocalStore(root).url, 2, persist="process")
    assert load(root) == (2, 2.0)
    assert os.listdir(os.fsencode(tmp_path)) == [b"caf\xe9"]


def test_a_tilde_alone_in_front_is_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    save("~/runs/a", 1)
    assert load(tmp_path / "runs" / "a") == (1, 1.0)


def test_a_relative_path_is_resolved_when_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    tensor = torch.ones(8)
    ckpt = Checkpointer("runs/a", state={"w": tensor})
    assert ckpt.restore() == 0
    monkeypatch.chdir("elsewhere")
    ckpt.save(1)
    ckpt.close()
    assert load(tmp_path / "runs" / "a") == (1, 1.0)
    assert os.listdir(tmp_path / "elsewhere") == []


def test_a_symlinked_root_is_the_directory_that_it_names(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to("real")
    save(link, 1)
    save(link / "deep" / ".." / ".", 2)
    assert load(real) == load(link) == (2, 2.0)
    assert link.is_symlink()


def test_a_symlink_to_nothing_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(StoreError, match="link"):
        save(tmp_path / "link", 1)
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(
    ("name", "reason"), [("x" * 256, "name too long"), ("ab/" * 1500, "name too long")]
)
def test_a_name_that_is_too_long_is_one_clear_error(tmp_path: Path, name: str, reason: str) -> None:
    with pytest.raises(StoreError, match=f"(?i){reason}"):
        save(tmp_path / name, 1)


@pytest.mark.parametrize("root", ["", "a\0b"])
def test_what_is_no_path_is_refused(root: str) -> None:
    with pytest.raises(OptionError, match="root: expected a directory"):
        save(root, 1)


def test_missing_parents_are_made(tmp_path: Path) -> None:
    save(tmp_path / "a" / "b" / "c", 1)
    assert load(tmp_path / "a" / "b" / "c") == (1, 1.0)


def test_a_missing_directory_is_no_checkpoint_and_is_not_made_by_a_reader(tmp_path: Path) -> None:
    with pytest.raises(NoCheckpoint, match="there is no checkpoint yet"):
        load(tmp_path / "none")
    assert not (tmp_path / "none").exists()


# --- things in the way ------------------------------------------------------


@pytest.mark.parametrize("below", ["", "/", "/deep/er"])
def test_a_file_where_the_root_should_be_is_one_clear_error(tmp_path: Path, below: str) -> None:
    (tmp_path / "root").write_text("mine")
    for use in (save, load):
        with pytest.raises(StoreError, match="a file is where a directory should be"):
            use(f"{tmp_path / 'root'}{below}", *([1] if use is save else []))
    assert (tmp_path / "root").read_text() == "mine"


@pytest.mark.parametrize("name", ["step-00000002", TEMP_FOLDER])
def test_a_file_where_a_folder_should_be_fails_one_save_and_the_next_works(
    tmp_path: Path, name: str
) -> None:
    tensor = torch.ones(8)
    ckpt = Checkpointer(tmp_path, state={"w": tensor})
    ckpt.restore()
    ckpt.save(1)
    ckpt.wait(TIMEOUT_S)
    shutil.rmtree(tmp_path / name, ignore_errors=True)
    (tmp_path / name).write_text("mine")
    ckpt.save(2)
    with pytest.raises(StoreError, match="a file is where a directory should be"):
        ckpt.wait(TIMEOUT_S)
    assert (tmp_path / name).read_text() == "mine"
    assert load(tmp_path) == (1, 1.0)
    (tmp_path / name).unlink()
    ckpt.save(3)
    ckpt.close()
    assert load(tmp_path) == (3, 1.0)


def test_a_directory_in_the_place_of_an_object_is_in_the_way(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "step-00000002" / "a000002-MANIFEST.json").mkdir(parents=True)
    with pytest.raises(StoreError, match=r"a000002-MANIFEST\.json"):
        save(tmp_path, 2)
    assert load(tmp_path) == (1, 1.0)
    save(tmp_path, 3)
    assert load(tmp_path) == (3, 3.0)


@pytest.mark.parametrize("name", ["FORMAT", "RUN.json", "attempts/000001"])
def test_a_named_pipe_in_the_place_of_an_object_blocks_nobody(tmp_path: Path, name: str) -> None:
    save(tmp_path, 1)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)

    def use(say: Say) -> None:
        try:
            load(tmp_path)
            save(tmp_path, 2)
        except CheckpointError as failure:
            say(type(failure).__name__)
        else:
            say("fine")

    (end,) = run_in_child(use).check()
    assert end in ("OptionError", "CorruptCheckpoint", "StoreError", "fine")


def test_links_and_devices_are_no_objects(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.write("real", [b"x"])
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "broken").symlink_to("nowhere")
    (tmp_path / "alias").symlink_to("real")
    os.mkfifo(tmp_path / "pipe")
    assert {e.name for e in store.list()} == {"real", "alias"}
    for name in ("loop", "broken", "pipe"):
        with pytest.raises(ObjectNotFound), store.open(name):
            pass


def test_a_root_that_is_removed_while_in_use_is_not_made_anew(tmp_path: Path) -> None:
    """Made anew it would have no FORMAT: nothing could read what is saved there."""
    root = tmp_path / "root"
    ckpt = Checkpointer(root, state={"w": torch.ones(8)})
    ckpt.restore()
    ckpt.save(1)
    ckpt.wait(TIMEOUT_S)
    shutil.rmtree(root)
    ckpt.save(2)
    with pytest.raises(StoreError):
        ckpt.wait(TIMEOUT_S)
    ckpt.close()
    assert not root.exists()


class ShownLate(Files):
    """A parallel file system: another node makes each directory first, and it shows late."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.coming: list[tuple[float, Path]] = []
        self.now_s = 0.0
        monkeypatch.setattr(local.time, "sleep", self.sleep)

    def mkdir(self, path: Path) -> None:
        if not any(path == other for _, other in self.coming):
            self.coming.append((self.now_s + 0.2, path))
        raise FileExistsError(errno.EEXIST, "File exists", str(path))

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        for at_s, path in list(self.coming):
            if at_s <= self.now_s:
                path.mkdir(exist_ok=True)
                self.coming.remove((at_s, path))


def test_a_directory_that_exists_and_shows_late_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path / "root", ShownLate(monkeypatch))
    save(store, 1, 2)
    assert load(tmp_path / "root") == (2, 2.0)


# --- closed doors -----------------------------------------------------------


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A directory that every user may enter, unlike ``tmp_path``."""
    made = Path(mkdtemp(prefix="asymcheck-test-"))
    made.chmod(0o777)
    yield made
    for folder, _, _ in os.walk(made):
        os.chmod(folder, 0o700)
    shutil.rmtree(made)


@pytest.fixture
def as_nobody(not_run_here: Callable[[str], NoReturn]) -> Callable[[Callable[[], object]], str]:
    """Runs something as a user without rights; returns the error's text, or what it returned."""
    if os.geteuid() == 0:
        become: Callable[[], None] = _become_nobody
    elif os.geteuid() > 0:

        def become() -> None:
            """Already a plain user."""

    torch.set_num_threads(1)

    def run(work: Callable[[], object]) -> str:
        def child(say: Say) -> None:
            become()
            try:
                say(f"returned {work()}")
            except CheckpointError as failure:
                say(f"{type(failure).__name__}: {failure}")

        return run_in_child(child).check()[0]

    return run


def _become_nobody() -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def hand_over(root: Path) -> None:
    """Give everything to the user without rights, where there are two users."""
    if os.geteuid() == 0:
        for folder, _, files in os.walk(root):
            for path in (folder, *(os.path.join(folder, f) for f in files)):
                os.chown(path, NOBODY, NOBODY)


def test_an_unreadable_directory_is_one_clear_error(
    open_path: Path, as_nobody: Callable[[Callable[[], object]], str]
) -> None:
    root = open_path / "root"
    save(root, 1)
    hand_over(root)
    root.chmod(0o000)
    for work in (lambda: load(root), lambda: save(root, 2)):
        said = as_nobody(work)
        assert said.startswith("StoreError: open ")
        assert "no permission: check the owner and mode" in said


def test_a_directory_that_cannot_be_listed_is_one_clear_error(
    open_path: Path, as_nobody: Callable[[Callable[[], object]], str]
) -> None:
    root = open_path / "root"
    save(root, 1)
    hand_over(root)
    root.chmod(0o311)
    said = as_nobody(lambda: load(root))
    assert said.startswith("StoreError: list ")
    assert "no permission" in said


def test_a_read_only_directory_can_be_restored_from_and_not_saved_to(
    open_path: Path, as_nobody: Callable[[Callable[[], object]], str]
) -> None:
    root = open_path / "root"
    save(root, 1)
    hand_over(root)
    for folder, _, _ in os.walk(root):
        os.chmod(folder, 0o555)
    assert as_nobody(lambda: load(root)) == "returned (1, 1.0)"
    said = as_nobody(lambda: save(root, 2))
    assert said.startswith("StoreError: ")
    assert "no permission" in said
    assert load(root) == (1, 1.0)


def test_an_empty_read_only_directory_is_one_clear_error(
    open_path: Path, as_nobody: Callable[[Callable[[], object]], str]
) -> None:
    root = open_path / "root"
    root.mkdir(mode=0o555)
    for below in (root, root / "below"):
        said = as_nobody(lambda below=below: save(below, 1))
        assert said.startswith("StoreError: ")
        assert "no permission" in said
    assert not list(root.iterdir())


def test_one_unreadable_pack_or_manifest_is_passed_over(
    open_path: Path, as_nobody: Callable[[Callable[[], object]], str]
) -> None:
    root = open_path / "root"
    save(root, 1, 2, 3)
    hand_over(root)
    (root / "step-00000003" / "a000001-MANIFEST.json").chmod(0o000)
    (root / "step-00000002" / "a000001-r0000-0001.pack").chmod(0o000)

    def work() -> object:
        with pytest.warns(CheckpointWarning, match="passed over") as heard:
            found = load(root)
        return *found, len(heard)

    assert as_nobody(work) == "returned (1, 1.0, 2)"


def test_left_overs_of_another_user_do_not_stop_a_start(
    open_path: Path, as_nobody: Callable[[Callable[[], object]], str]
) -> None:
    root = open_path / "root"
    save(root, 1)
    hand_over(root)
    half = root / "step-00000009"
    half.mkdir(mode=0o755)
    (half / "a000001-r0000.json").write_text("half")  # in a folder that is not theirs
    if os.geteuid() != 0:
        half.chmod(0o555)
    # On a thread: that user may not be allowed to run this Python.
    assert as_nobody(lambda: save(root, 2, persist="thread")) == "returned None"
    assert load(root) == (2, 2.0)


# --- full disks -------------------------------------------------------------


@pytest.fixture
def small_disk(
    request: pytest.FixtureRequest, tmp_path: Path, not_run_here: Callable[[str], NoReturn]
) -> Iterator[Path]:
    """A real file system of a few MiB."""
    options = request.param
    where = tmp_path / "disk"
    where.mkdir()
    mount = shutil.which("mount")
    tried = mount and subprocess.run(
        [mount, "-t", "tmpfs", "-o", options, "tmpfs", str(where)],
        check=False,
        capture_output=True,
        timeout=TIMEOUT_S,
    )
    if not tried or tried.returncode != 0:
        not_run_here("a full disk: mounting a small file system is not permitted")
    yield where
    subprocess.run(["umount", "-l", str(where)], check=True, timeout=TIMEOUT_S)


class Unaware(LocalStore):
    """A medium that cannot say how much room is left."""

    def free_bytes(self) -> int | None:
        return None


@pytest.mark.parametrize("small_disk", ["size=18M"], indirect=True)
@pytest.mark.parametrize("kind", [LocalStore, Unaware])
def test_a_full_disk_fails_one_save_and_the_next_works_once_there_is_room(
    small_disk: Path, kind: type[LocalStore]
) -> None:
    root = small_disk / "root"
    size = 5 * MiB // 4
    tensor = torch.zeros(size)
    ckpt = Checkpointer(kind(root), state={"w": tensor}, strategy=Strategy())
    ckpt.restore()
    for step in (1, 2):
        tensor.fill_(step)
        ckpt.save(step)
        ckpt.wait(TIMEOUT_S)
    filling = small_disk / "filling"
    filling.write_bytes(b"x" * (5 * MiB))
    for step in (3, 4):
        ckpt.save(step)
        with pytest.raises(StoreError, match="free some space or lower keep_last") as caught:
            ckpt.wait(TIMEOUT_S)
        assert caught.value.retryable
        ckpt.wait(TIMEOUT_S)  # raised once
        assert not temp_files(root)
        assert not open_repository(LocalStore(root)).survey().leftovers
        assert load(root, size) == (2, 2.0)
    filling.unlink()
    tensor.fill_(5)
    ckpt.save(5)
    ckpt.close()
    assert load(root, size) == (5, 5.0)


@pytest.mark.parametrize("small_disk", ["size=16M,nr_inodes=24"], indirect=True)
def test_a_disk_without_free_inodes_fails_one_save_and_loses_nothing(small_disk: Path) -> None:
    root = small_disk / "root"
    ckpt = Checkpointer(root, state={"w": torch.ones(8)})
    ckpt.restore()
    saved = 0
    with pytest.raises(StoreError, match="the disk is full") as caught:
        for step in range(1, 30):
            ckpt.save(step)
            ckpt.wait(TIMEOUT_S)
            saved = step
    assert caught.value.retryable
    assert saved >= 2
    assert load(root) == (saved, 1.0)
    assert not temp_files(root)
    shutil.rmtree(root / "step-00000001")
    ckpt.save(50)
    ckpt.close()
    assert load(root) == (50, 1.0)


def test_a_medium_that_takes_nothing_more_is_an_error_and_no_endless_loop(tmp_path: Path) -> None:
    class Stuck(Files):
        def write(self, fd: int, data: memoryview) -> int:
            return 0

    with pytest.raises(StoreError, match="takes no more bytes"):
        LocalStore(tmp_path, Stuck()).write("a", [b"x"])
    assert not temp_files(tmp_path)


def test_a_medium_that_takes_a_few_bytes_at_a_time_gets_them_all(tmp_path: Path) -> None:
    class Slow(Files):
        def write(self, fd: int, data: memoryview) -> int:
            return super().write(fd, data[:7])

    store = LocalStore(tmp_path, Slow())
    assert store.write("a", [bytes(range(256))]) == 256
    assert read_all(store, "a") == bytes(range(256))


def test_a_file_that_is_shorter_than_what_was_taken_is_not_published(tmp_path: Path) -> None:
    class Liar(Files):
        def write(self, fd: int, data: memoryview) -> int:
            super().write(fd, data[: len(data) // 2])
            return len(data)

    with pytest.raises(StoreError, match="expected 100 bytes in the file, found 50"):
        LocalStore(tmp_path, Liar()).write("a", [b"x" * 100])
    assert not list(LocalStore(tmp_path).list())


class NoLinks(Files):
    def link(self, old: Path, new: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")


def test_a_file_system_without_hard_links_still_creates_once(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, NoLinks())
    assert store.create("a", b"first") is True
    assert store.create("a", b"second") is False
    assert read_all(store, "a") == b"first"
    assert not temp_files(tmp_path)
    save(LocalStore(tmp_path / "root", NoLinks()), 1, 2)
    assert load(tmp_path / "root") == (2, 2.0)


@pytest.mark.parametrize("name", ["FORMAT", "RUN.json"])
def test_a_record_whose_maker_was_killed_before_its_content_came_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    class Killed(NoLinks):
        def rename(self, old: Path, new: Path) -> None:
            if new.name == name:
                raise KeyboardInterrupt
            super().rename(old, new)

    with pytest.raises(KeyboardInterrupt):
        create_repository(LocalStore(tmp_path, Killed()))
    assert (tmp_path / name).read_bytes() == b""
    with pytest.raises(NoCheckpoint, match="no checkpoint yet"):
        open_repository(LocalStore(tmp_path))
    monkeypatch.setattr(repository.time, "sleep", lambda _: None)
    save(LocalStore(tmp_path, NoLinks()), 1)
    assert load(tmp_path) == (1, 1.0)


def test_a_record_whose_maker_is_slow_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = seal({"run": "0" * 32})
    create_repository(LocalStore(tmp_path))
    (tmp_path / "RUN.json").write_bytes(b"")
    monkeypatch.setattr(
        repository.time, "sleep", lambda _: (tmp_path / "RUN.json").write_bytes(content)
    )
    assert create_repository(LocalStore(tmp_path)).run == "0" * 32


@pytest.mark.parametrize("name", ["FORMAT", "RUN.json"])
def test_an_empty_record_beside_anything_else_is_left_as_it_is(tmp_path: Path, name: str) -> None:
    save(tmp_path, 1)
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(CorruptCheckpoint, match=name):
        create_repository(LocalStore(tmp_path))
    assert (tmp_path / name).read_bytes() == b""


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_cannot_sync_directories_is_used_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    real = os.fsync

    def fsync(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(code, os.strerror(code))
        real(fd)

    monkeypatch.setattr(local.os, "fsync", fsync)
    save(tmp_path, 1)
    assert load(tmp_path) == (1, 1.0)


# --- URLs -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("fil:///tmp/x", "did you mean 'file'"),
        ("gopher+file:///tmp/x", "found 'gopher'"),
        ("file:///tmp/x?at=1", "expected no options but 'scope', found \\['at'\\]"),
        ("file:///tmp/x?scope=all", "scope: expected 'shared' or 'node', found 'all'"),
        ("memory://x?size=1", "expected no options"),
        ("faulty+memory://x?att=1", "did you mean 'at'"),
        ("faulty+memory://x?at=one", "at: expected an integer"),
        ("faulty+memory://x?when=later", "when: expected before, mid or after"),
        ("faulty+memory://x?do=EWHAT", "do: expected one of"),
        ("faulty+nothing://x", "found 'nothing'"),
    ],
)
def test_a_url_that_means_nothing_is_refused_with_the_nearest(url: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        open_store(url)


def test_a_directory_of_each_host_says_so_in_its_url(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}?scope=node")
    assert store.capabilities.scope == "node"
    assert open_store(store.url).capabilities == store.capabilities
    assert open_store(str(tmp_path)).capabilities.scope == "shared"


def test_a_wrapped_store_keeps_its_own_options(tmp_path: Path) -> None:
    inner = f"{tmp_path.as_uri()}?scope=node"
    for outer, options in (("faulty", "?at=1"), ("throttled+faulty", "?at=1?latency_s=0")):
        assert open_store(f"{outer}+{inner}{options}").capabilities.scope == "node"
    again = open_store(open_store(f"faulty+{inner}?op=read&name=*.pack").url)
    assert again.capabilities.scope == "node"
