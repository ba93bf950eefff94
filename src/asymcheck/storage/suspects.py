"""Marks on checkpoints that exist, are intact, and still bring the training down.

A mark is a small object beside the checkpoint, ``suspect/a000007-s00000100.json``. Its name says
which checkpoint; its content is for people. No byte of the checkpoint changes, so taking the mark
away undoes it.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from asymcheck.errors import CorruptCheckpoint, NoCheckpoint, ObjectNotFound
from asymcheck.planning.retention import CheckpointId
from asymcheck.storage.copies import Copies
from asymcheck.storage.listing import is_there
from asymcheck.storage.names import suspect_name
from asymcheck.storage.sealed import Fields, dump_metric, number, seal, unseal
from asymcheck.storage.store import Store, write_whole

MARKED = "marked suspect"
_MEMBERS = ("step", "attempt", "why", "host", "marked_s")
_RECORD_BYTES = 1 << 16
_WHY_LETTERS = 4000


@dataclass(frozen=True, slots=True)
class Mark:
    """What a mark says, for people.

    Attributes:
        at: The checkpoint.
        why: What happened.
        host: Where it was marked.
        marked_s: When, in wall-clock seconds since 1970.
    """

    at: CheckpointId
    why: str
    host: str
    marked_s: float


def mark_suspect(store: Store, at: CheckpointId, why: str) -> None:
    """Mark a checkpoint: from now on no restore chooses it unasked. Marked again, the reason is
    replaced. Blocks; anyone may, beside a writer too.

    Args:
        store: Where it lies.
        at: Which.
        why: What happened, for people; cut after 4000 letters.

    Raises:
        NoCheckpoint: There is no such checkpoint.
        StoreError: The mark could not be written.
    """
    if not is_there(store, at):
        raise NoCheckpoint(f"{store.url}: there is no step {at.step} of attempt {at.attempt}")
    record: Mapping[str, object] = {
        "step": at.step,
        "attempt": at.attempt,
        "why": why[:_WHY_LETTERS],
        "host": socket.gethostname(),
        "marked_s": dump_metric(time.time()),
    }
    write_whole(store, suspect_name(at), [seal(record)])


def clear_suspect(store: Store, at: CheckpointId) -> None:
    """Take the mark away; blocks. Nothing happens where there is none.

    Raises:
        StoreError: It could not be removed.
    """
    store.delete(suspect_name(at))


def carry_mark(copies: Copies, at: CheckpointId, target: Store) -> None:
    """Give another place the mark of a checkpoint, whatever it says; blocks. Nothing happens where
    it was taken away meanwhile.

    Raises:
        StoreError: A medium failed.
    """
    name = suspect_name(at)
    with suppress(ObjectNotFound):
        write_whole(target, name, [copies.read(name, _RECORD_BYTES, bytes)])


def read_mark(copies: Copies, at: CheckpointId) -> Mark:
    """What the mark of a checkpoint says, wherever it lies.

    Raises:
        ObjectNotFound: It is not marked.
        CorruptCheckpoint: The mark counts, and what it says is damaged.
    """
    name = suspect_name(at)

    def checked(data: bytes) -> Mark:
        get = Fields(unseal(data, name), name, _MEMBERS)
        found = CheckpointId(get.integer("attempt", 1), get.integer("step", 1))
        if found != at:
            raise CorruptCheckpoint(name, f"it is the mark of step {found.step} of {found.attempt}")
        when = number(get, get.value("marked_s"), "marked_s")
        return Mark(at, get.text("why"), get.text("host"), when)

    return copies.read(name, _RECORD_BYTES, checked)


def spoken_mark(copies: Copies, at: CheckpointId) -> str:
    """Why a checkpoint is marked, and how that is undone, in one line."""
    try:
        why = " ".join(read_mark(copies, at).why.split()) or "no reason was given"
    except (CorruptCheckpoint, ObjectNotFound) as failure:
        why = f"why cannot be read: {failure}"
    return (
        f"{MARKED}: {why}; 'asymcheck suspect ROOT --step {at.step} --attempt {at.attempt} "
        f"--clear' takes the mark away"
    )
