"""What makes a place the root of a run: ``FORMAT`` and ``RUN.json``."""

from __future__ import annotations

import time
import uuid
from contextlib import suppress

from asymcheck.errors import CorruptCheckpoint, NoCheckpoint, ObjectNotFound, OptionError
from asymcheck.storage.manifest import FORMAT_LINE, check_format_line
from asymcheck.storage.names import FORMAT_NAME, RUN_NAME
from asymcheck.storage.sealed import Fields, seal, unseal
from asymcheck.storage.store import Store, read_all

RECORD_BYTES = 1 << 16
"""More than any attempt record, RUN.json or FORMAT needs."""


def read_run(store: Store) -> str:
    """The id of the run that a place holds; raises as ``repository.open_repository``."""
    line, names = _read_at_top(store, FORMAT_NAME)
    if not line and not names:
        raise NoCheckpoint(f"{store.url}: there is no checkpoint yet")
    if line is None:
        raise OptionError(
            f"{store.url}: expected an empty place or an asymcheck repository, found {names}; "
            f"choose another root, for instance a new sub-directory"
        )
    check_format_line(line, f"{store.url}/{FORMAT_NAME}")
    where = f"{store.url}/{RUN_NAME}"
    record, names = _read_at_top(store, RUN_NAME)
    if not record and names == [FORMAT_NAME]:
        raise NoCheckpoint(f"{store.url}: there is no checkpoint yet")
    if record is None:
        raise CorruptCheckpoint(where, "missing, so its checkpoints belong to no run")
    return Fields(unseal(record, where), where, ("run",)).text("run")


def make_run(store: Store, run: str | None) -> None:
    """Make an empty place the root of a run, of a new one for ``None``.

    Raises:
        StoreError: It cannot be written.
    """
    store.prepare()
    # RUN.json last: while it is missing, the place still counts as empty.
    _make(store, FORMAT_NAME, FORMAT_LINE.encode("ascii"))
    _make(store, RUN_NAME, seal({"run": run or uuid.uuid4().hex}))


def _make(store: Store, name: str, data: bytes) -> None:
    # Without hard links an object takes its name empty. Where its content does not follow, and
    # nothing else lies beside it, its maker was killed, and it holds nothing that could be lost.
    if not store.create(name, data) and not read_all(store, name):
        time.sleep(2)  # its maker may be about to fill it
        if not read_all(store, name):
            store.delete(name)
            store.create(name, data)


def _read_at_top(store: Store, name: str) -> tuple[bytes | None, list[str]]:
    """An object at the top; where it is empty or missing also what else is there, sorted."""
    names: set[str] = set()
    found: bytes | None = None
    for last in (False, True):
        with suppress(ObjectNotFound):
            found = read_all(store, name, RECORD_BYTES)
        if found or last:
            break
        for entry in store.list():  # the place may hold millions
            if entry.nbytes or entry.name not in (FORMAT_NAME, RUN_NAME):
                names.add(entry.name.partition("/")[0])
            if len(names) == 5:
                break
        # Another process may just be making it: look again, now that the rest was listed.
    return found, sorted(names)
