"""The demo's folder: made anew each time, without ever removing what it did not make."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from asymcheck.persister import LOG_NAME
from asymcheck.storage.local import TEMP_FOLDER, TEMP_NAME
from asymcheck.storage.names import ATTEMPTS_FOLDER, FORMAT_NAME, RUN_NAME, parse_name
from asymcheck_lab.errors import LabError, UsageError

MARKER = "MADE-BY-ASYMLAB-DEMO"
REPORT = "report.json"
CHECKPOINTS = "checkpoints"
LOG = "log.jsonl"
TRACE = "trace.jsonl"
RESULT = "result.json"

_OUTPUT = re.compile(r"output(-[a-z]+)?\.txt\Z")
_STEP = re.compile(r"step-[0-9]+\Z")


@contextmanager
def scratch_folder(below: Path | None, prefix: str) -> Iterator[Path]:
    """A new folder, removed at the end.

    Args:
        below: In which one, made where it is missing; ``None`` for a temporary place.
        prefix: Of its name.

    Raises:
        LabError: It cannot be made.
    """
    try:
        if below is not None:
            below.mkdir(parents=True, exist_ok=True)
        top = Path(tempfile.mkdtemp(prefix=prefix, dir=below))
    except OSError as failure:
        raise LabError(f"{below}: {failure.strerror}") from failure
    try:
        yield top
    finally:
        shutil.rmtree(top, ignore_errors=True)


def renew(folder: Path, runs: list[str]) -> None:
    """Make ``folder`` an empty one with the marker and a folder for each run.

    Args:
        folder: Missing, empty, or made by an earlier call.
        runs: Names of the runs.

    Raises:
        UsageError: Something in it was not made by a demo; nothing was removed.
        LabError: The medium failed.
    """
    try:
        _empty(folder, runs)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARKER).write_text("asymlab demo removes this folder when it runs again.\n")
        for run in runs:
            (folder / run).mkdir()
    except OSError as failure:
        raise LabError(f"{failure.filename or folder}: {failure.strerror}") from failure


def _empty(folder: Path, runs: list[str]) -> None:
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder}: expected a folder, found a file: choose another with --dir")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    files: list[str] = []
    folders: list[str] = []
    for top, inner, names in os.walk(folder):
        # A link to a folder counts as a file: it is not followed, and no demo makes one.
        linked = [n for n in inner if (Path(top) / n).is_symlink()]
        there = Path(top).relative_to(folder)
        files += [(there / n).as_posix() for n in (*names, *linked)]
        folders += [(there / n).as_posix() for n in inner if n not in linked]
    if MARKER in files:
        foreign = [f for f in files if not _is_our_file(f, runs)]
        foreign += [f for f in folders if not _is_our_folder(f, runs)]
    else:
        foreign = files or folders
    if foreign:
        first = ", ".join(repr(f) for f in sorted(foreign, key=lambda f: (f.count("/"), f))[:3])
        raise UsageError(
            f"{folder}: expected an empty folder or one that only a demo wrote to, found "
            f"{first}: nothing was removed; choose another folder with --dir"
        )
    # The marker last: a clean-up that is cut off can be taken up again.
    for file in sorted(files, key=lambda f: f == MARKER):
        (folder / file).unlink()
    for inside in sorted(folders, reverse=True):
        (folder / inside).rmdir()


def _is_our_folder(name: str, runs: list[str]) -> bool:
    run, _, rest = name.partition("/")
    top, _, inner = rest.partition("/")
    return run in runs and (
        rest in ("", CHECKPOINTS)
        or (
            top == CHECKPOINTS
            and (inner in (ATTEMPTS_FOLDER, TEMP_FOLDER) or _STEP.match(inner) is not None)
        )
    )


def _is_our_file(name: str, runs: list[str]) -> bool:
    if name in (MARKER, REPORT):
        return True
    run, _, rest = name.partition("/")
    if run not in runs:
        return False
    if rest in (LOG, TRACE, RESULT) or _OUTPUT.match(rest):
        return True
    top, _, item = rest.partition("/")
    if top != CHECKPOINTS:
        return False
    folder, _, file = item.partition("/")
    return (
        item in (FORMAT_NAME, RUN_NAME, LOG_NAME)
        or parse_name(item) is not None
        or (folder == ATTEMPTS_FOLDER and file.isascii() and file.isdigit())
        or (folder == TEMP_FOLDER and TEMP_NAME.fullmatch(file) is not None)
    )
