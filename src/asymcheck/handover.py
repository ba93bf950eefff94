"""What a dead trainer left in shared memory: finished before the next attempt begins."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

from asymcheck.capture import parse_capture
from asymcheck.errors import CheckpointError, CorruptCheckpoint, StoreError
from asymcheck.events import Sink
from asymcheck.memory.arena import SHARED_MEMORY, Slot, SlotState, owner_of, rank_of, slots_of
from asymcheck.memory.holding import Part, is_held
from asymcheck.memory.host import read_text
from asymcheck.memory.process import ProcessId
from asymcheck.messages import Durable, Stored
from asymcheck.persist import apply_retention, persist
from asymcheck.persist_worker import TIERS_NAME
from asymcheck.planning.retention import CheckpointId, Retention
from asymcheck.storage.repository import Repository

_log = logging.getLogger(__name__)
_LAST_THREAD_S = 2.0
_POLL_S = 0.01
_KILL_S = 10.0


@dataclass(frozen=True, slots=True)
class LeftOver:
    """A slot whose trainer is dead.

    Attributes:
        path: Its file.
        persister: The process that may still be at work on it.
        is_sealed: Whether it holds a whole checkpoint that is not durable yet.
        root: URL of the root that it is for, empty where it does not say so.
        at: The checkpoint that it holds whole, where it can be read.
        is_hashed: Whether the hashes of its content are in it. One that is hashed and not sealed
            was made durable, and is there to be read until the next start.
        is_taken: Whether a start went on from it, read where it lies, and died before it was
            durable.
    """

    path: Path
    persister: ProcessId
    is_sealed: bool
    root: str = ""
    at: CheckpointId | None = None
    is_hashed: bool = False
    is_taken: bool = False

    @property
    def is_at_work(self) -> bool:
        """Whether a persister process is at work on it, here or in another container."""
        return self.persister.is_alive or is_held(self.path, Part.PERSISTER)


def left_over(run: str | None = None, directory: Path = SHARED_MEMORY) -> list[LeftOver]:
    """Slots of this user whose trainer is dead, of one run or of all; checkpoints in the order in
    which they were captured.
    """
    found = []
    for path in slots_of(directory, run):
        try:
            slot = Slot.open(path)
        except OSError:
            continue
        except ValueError:
            slot = None
        if _living_owner(path, slot) is None:
            persister = slot.persister if slot else ProcessId(0, 0)
            is_sealed = slot is not None and slot.state == SlotState.SEALED
            is_kept = slot is not None and slot.state == SlotState.FREE
            is_hashed = slot is not None and (is_sealed or is_kept) and bool(slot.hashes)
            at = _held(slot) if slot and (is_sealed or is_hashed) else None
            root = slot.root if slot else ""
            is_taken = slot is not None and slot.is_taken
            found.append(LeftOver(path, persister, is_sealed, root, at, is_hashed, is_taken))
        if slot is not None:
            slot.close(unlink=False)
    return sorted(found, key=lambda old: old.at or CheckpointId(0, 0))


def _held(slot: Slot) -> CheckpointId | None:
    with suppress(CorruptCheckpoint):
        return parse_capture(slot.meta, "slot").at
    return None


def living_owners(run: str, directory: Path = SHARED_MEMORY) -> list[int]:
    """Process numbers of living trainers that own slots of a run, ascending."""
    return sorted({owner.pid for owner in _living_owners(run, directory)})


def persisters_of(run: str) -> list[tuple[ProcessId, ProcessId]]:
    """Living persister processes of a run, each with its trainer, living or dead."""
    found = []
    for name in os.listdir("/proc"):
        words = read_text(f"/proc/{name}/cmdline").split("\0") if name.isdigit() else []
        if "asymcheck.persist" not in words:
            continue
        if read_text(f"/proc/{name}/comm").strip() == TIERS_NAME:
            continue  # what is left for it to do anybody can go on with
        for word in words:
            # Among its arguments is its configuration; other words are no JSON objects.
            with suppress(ValueError, KeyError, TypeError):
                config = json.loads(word)
                if config["run"] == run:
                    found.append((ProcessId.of(int(name)), ProcessId(*config["trainer"])))
    return [(persister, trainer) for persister, trainer in found if persister.is_alive]


def _living_owners(run: str, directory: Path) -> set[ProcessId]:
    found = set()
    for path in slots_of(directory, run):
        try:
            slot = Slot.open(path)
        except OSError:
            continue
        except ValueError:
            slot = None
        owner = _living_owner(path, slot)
        if owner is not None:
            found.add(owner)
        if slot is not None:
            slot.close(unlink=False)
    return found


def _living_owner(path: Path, slot: Slot | None) -> ProcessId | None:
    """The trainer of a slot, where it lives; while a slot is made, only its name knows it.

    One of another container has no number here, and holds its slots all the same.
    """
    known = slot is not None and slot.owner.pid
    owner = slot.owner if slot is not None and known else ProcessId.of(owner_of(path))
    return owner if owner.is_alive or is_held(path, Part.OWNER) else None


def await_trainers(run: str, directory: Path, until_s: float) -> bool:
    """Wait for trainers that are being killed, until then on the monotonic clock.

    Returns:
        Whether all that they left can be found: no persister that outlived its trainer holds
        memory without a name.
    """
    trainers = _living_owners(run, directory) | {trainer for _, trainer in persisters_of(run)}
    for trainer in trainers:
        while trainer.is_ending and monotonic() < until_s:
            sleep(_POLL_S)
    return not any(
        _holds_nameless(persister)
        for persister, trainer in persisters_of(run)
        if not trainer.is_alive
    )


def _holds_nameless(process: ProcessId) -> bool:
    folder = f"/proc/{process.pid}/fd"
    with suppress(OSError):  # it has ended
        for name in os.listdir(folder):
            with suppress(OSError):
                if os.readlink(f"{folder}/{name}").startswith("/memfd:asymcheck-"):
                    return True
    return False


def _await_ends(run: str, directory: Path, until_s: float) -> None:
    """Wait for trainers that are being killed, and for persisters that outlived theirs: they
    may hold memory without a name, which nobody else can save.
    """
    await_trainers(run, directory, until_s)
    for persister, trainer in persisters_of(run):
        while persister.is_alive and not trainer.is_alive and monotonic() < until_s:
            sleep(_POLL_S)
    # A process has ended for us when its first thread has; its files, and with them what it
    # holds, go with the last one. One of another container looks the same, and stays.
    until_s = min(until_s, monotonic() + _LAST_THREAD_S)
    while monotonic() < until_s and not all(o.is_alive for o in _living_owners(run, directory)):
        sleep(_POLL_S)


def take_over(
    repository: Repository,
    retention: Retention,
    sink: Sink,
    grace_s: float,
    warn: Callable[[str], None],
    directory: Path = SHARED_MEMORY,
    rank: int = 0,
) -> list[Durable]:
    """Make every sealed slot of dead trainers of this run durable, and free the others; blocks.

    So the newest is there to restore, also where it was to stay in memory. Where a trainer left
    several, as between the seal of one and the end of the one before, each is made durable, the
    oldest first: one of them may have been on its way to the store.

    Of several ranks each calls this, and any finishes the slots of any dead rank. None waits for
    the slot of another: each stores what it finds, and then commits what all ranks have stored, so
    the last one to end here finds all that can be committed. A step of which a rank never
    stored its part stays uncommitted.

    Args:
        repository: The run; its newest attempt must be the dead trainer's.
        retention: Applied after each commit.
        sink: Receives spans.
        grace_s: How long to wait for those who are still at it, all together: trainers that
            are being killed, and persisters that outlived theirs.
        warn: Told what could not be saved.
        directory: Where the slots are.
        rank: Of this process: it begins with what its predecessor left, so that the ranks of a
            host share the work. Rank 0 applies retention.

    Returns:
        The checkpoints that became durable here.
    """
    until_s = monotonic() + grace_s
    _await_ends(repository.run, directory, until_s)
    done: list[Durable] = []
    stored: list[Stored] = []
    found = left_over(repository.run, directory)
    for old in sorted(found, key=lambda old: rank_of(old.path) != rank):
        try:
            end = finish(repository, old, retention, sink, until_s)
        except StoreError as failure:
            warn(f"a checkpoint left in {old.path} could not be made durable yet: {failure}")
        except CheckpointError as failure:
            warn(f"a checkpoint left in {old.path} was given up: {failure}")
        else:
            stored += [end] if isinstance(end, Stored) else []
            done += [end] if isinstance(end, Durable) else []
    try:
        committed = repository.commit_whole()
    except CheckpointError as failure:
        warn(f"what all ranks had stored could not be committed: {failure}")
        return done
    for manifest in committed if rank == 0 else ():
        apply_retention(repository, manifest.at, retention, sink)
    now = {manifest.at for manifest in committed}
    return done + [part.ended() for part in stored if part.at in now]


def finish(
    repository: Repository, old: LeftOver, retention: Retention, sink: Sink, until_s: float
) -> Durable | Stored | None:
    """Make a slot of a dead trainer durable where it is sealed, and free it; blocks.

    A persister that is still at work is waited for until ``until_s`` on the monotonic clock,
    and then replaced. Of several processes that do this, one does it.

    Returns:
        The checkpoint, or what is stored of it where other ranks may be missing; ``None`` where
        there was nothing to do but to free the slot.

    Raises:
        StoreError: It could not be made durable now; the slot stays.
        CheckpointError: It was given up; the slot is freed.
    """
    _end_persister(old, until_s)
    try:
        slot = Slot.open(old.path)
    except (OSError, ValueError):
        with suppress(OSError):
            old.path.unlink(missing_ok=True)
        return None  # its persister finished it
    keep = True
    try:
        if not _lock(slot, until_s):
            raise StoreError(
                f"{old.path}: another process is at work on it: try again later", retryable=True
            )
        slot.hold_as_persister()
        if os.fstat(slot.fd).st_nlink == 0 or slot.state != SlotState.SEALED:
            keep = False
            return None
        durable = persist(repository, slot, retention, sink, lambda: False)
        keep = False
        return durable
    except CheckpointError as failure:
        keep = isinstance(failure, StoreError)
        raise
    finally:
        slot.close(unlink=not keep)


def remove_slot(old: LeftOver) -> bool:
    """Remove a slot of a dead trainer, whatever it holds.

    Returns:
        Whether it is gone; it stays where another process is at work on it.
    """
    try:
        slot = Slot.open(old.path)
    except FileNotFoundError:
        return True
    except ValueError:
        old.path.unlink(missing_ok=True)
        return True
    idle = _lock(slot, monotonic())
    slot.close(unlink=idle)
    return idle


def _end_persister(old: LeftOver, until_s: float) -> None:
    while old.is_at_work and monotonic() < until_s:
        sleep(_POLL_S)
    if old.is_at_work and not old.persister.is_alive:
        raise StoreError(
            f"{old.path}: another process is at work on it, perhaps one of another container: try "
            f"again later",
            retryable=True,
        )
    if old.persister.is_alive:
        with suppress(ProcessLookupError):
            os.kill(old.persister.pid, signal.SIGKILL)
        until_s = monotonic() + _KILL_S
        while old.persister.is_alive:
            if monotonic() > until_s:
                raise StoreError(
                    f"{old.path}: its persister, process {old.persister.pid}, hangs in the kernel "
                    f"and cannot be ended: look at the disk or network file system it writes to",
                    retryable=True,
                )
            sleep(_POLL_S)


def _lock(slot: Slot, until_s: float) -> bool:
    """Become the one that finishes a slot; returns whether that was in time.

    The lock goes with the slot's descriptor, also when this process is killed.
    """
    while True:
        try:
            fcntl.flock(slot.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if monotonic() > until_s:
                return False
            sleep(_POLL_S)
        else:
            return True
