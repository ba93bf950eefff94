"""The demo's folder: made anew, and nothing of anybody else's is ever removed."""

from __future__ import annotations

import re
import uuid
from pathlib import Path

import pytest

from asymcheck.storage.local import TEMP_FOLDER, LocalStore
from asymcheck.storage.repository import create_repository
from asymcheck_lab.errors import UsageError
from asymcheck_lab.rundir import MARKER, renew

RUNS = ["one", "two"]


def used(folder: Path) -> Path:
    """A folder as a demo leaves it, with a killed save in it."""
    renew(folder, RUNS)
    files = ("log.jsonl", "trace.jsonl", "result.json", "output.txt", "output-killed.txt")
    for name in (f"{run}/{file}" for run in RUNS for file in files):
        (folder / name).write_text("x")
    store = LocalStore(folder / "two" / "checkpoints")
    create_repository(store).claim(None)
    store.write("step-00000010/a000001-r0000-0001.pack", [b"x"])
    temp = folder / "two" / "checkpoints" / TEMP_FOLDER
    temp.mkdir(exist_ok=True)
    (temp / uuid.uuid4().hex).write_bytes(b"half")  # as the local store names them
    (folder / "two" / "checkpoints" / "persist.log").write_text("another persister\n")
    (folder / "report.json").write_text("{}")
    return folder


def everything(folder: Path) -> dict[str, bytes | None]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() if p.is_file() else None
        for p in folder.rglob("*")
    }


def test_a_missing_and_an_empty_folder_are_made_ready(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    for name in ("new/deep", "empty"):
        renew(tmp_path / name, RUNS)
        assert set(everything(tmp_path / name)) == {MARKER, *RUNS}


def test_what_a_demo_left_is_made_anew(tmp_path: Path):
    renew(used(tmp_path), RUNS)
    assert set(everything(tmp_path)) == {MARKER, *RUNS}


@pytest.mark.parametrize(
    "name",
    [
        "notes.txt",
        "one/notes.txt",
        "two/checkpoints/notes.txt",
        "two/checkpoints/step-00000010/notes.txt",
        "two/checkpoints/attempts/notes",
        f"two/checkpoints/{TEMP_FOLDER}/notes",
        "log.jsonl",
    ],
)
def test_a_foreign_file_anywhere_keeps_everything(tmp_path: Path, name: str):
    used(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    before = everything(tmp_path)
    with pytest.raises(UsageError, match=rf"found '{re.escape(name)}': nothing was removed.*--dir"):
        renew(tmp_path, RUNS)
    assert everything(tmp_path) == before


def test_a_folder_without_the_marker_keeps_everything(tmp_path: Path):
    used(tmp_path)
    (tmp_path / MARKER).unlink()
    before = everything(tmp_path)
    with pytest.raises(UsageError, match="nothing was removed"):
        renew(tmp_path, RUNS)
    assert everything(tmp_path) == before


def test_a_folder_of_empty_folders_without_the_marker_is_left_alone(tmp_path: Path):
    (tmp_path / "one").mkdir()
    with pytest.raises(UsageError, match="found 'one'"):
        renew(tmp_path, RUNS)
    assert (tmp_path / "one").is_dir()


def test_an_empty_foreign_folder_keeps_everything(tmp_path: Path):
    used(tmp_path)
    (tmp_path / "mine" / "inner").mkdir(parents=True)
    before = everything(tmp_path)
    with pytest.raises(UsageError, match="found 'mine'"):
        renew(tmp_path, RUNS)
    assert everything(tmp_path) == before


def test_a_link_is_not_followed(tmp_path: Path):
    folder = used(tmp_path / "demo")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "log.jsonl").write_text("mine")
    (folder / "one" / "checkpoints").symlink_to(elsewhere)
    with pytest.raises(UsageError, match="found 'one/checkpoints'"):
        renew(folder, RUNS)
    assert (elsewhere / "log.jsonl").read_text() == "mine"


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path):
    (tmp_path / "demo").write_text("mine")
    with pytest.raises(UsageError, match="expected a folder, found a file"):
        renew(tmp_path / "demo", RUNS)
