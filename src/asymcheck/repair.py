"""What dead trainers left behind: made durable where it is whole, removed where it is not.

The next start of a job does the same for its own run. This is for runs that are not started
again, or not yet. Nothing that a living process works on is touched, and no torch is needed.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep

from asymcheck.capture import parse_capture
from asymcheck.errors import (
    CheckpointError,
    CorruptCheckpoint,
    ObjectNotFound,
    OptionError,
    StoreError,
)
from asymcheck.events import discard
from asymcheck.handover import (
    LeftOver,
    finish,
    left_over,
    living_owners,
    persisters_of,
    remove_slot,
)
from asymcheck.memory.arena import SHARED_MEMORY, Slot, owner_of, run_of
from asymcheck.memory.host import read_text
from asymcheck.memory.process import ProcessId
from asymcheck.messages import Durable, Stored
from asymcheck.planning.retention import CheckpointId, Retention
from asymcheck.storage.local import TEMP_FOLDER, LocalStore
from asymcheck.storage.repository import Repository

_POLL_S = 0.05
_CLOCK_SLACK_S = 2.0
_BLOCK_BYTES = 512  # the unit of st_blocks, whatever the file system


@dataclass(frozen=True, slots=True)
class Remnant:
    """A slot that a dead trainer left, and what is in it.

    Attributes:
        slot: The slot.
        run: Its run.
        trainer: Process number of the trainer.
        nbytes: What it takes of memory; less than its size where a ring gave pages back.
        at: The checkpoint that it holds or was to hold, where it says so.
        created_s: Wall-clock time of that checkpoint.
    """

    slot: LeftOver
    run: str
    trainer: int
    nbytes: int
    at: CheckpointId | None = None
    created_s: float | None = None

    @property
    def name(self) -> str:
        """File name of the slot."""
        return self.slot.path.name


def remnants(run: str | None = None, directory: Path = SHARED_MEMORY) -> list[Remnant]:
    """What dead trainers of this user left in shared memory, of one run or of all."""
    found = []
    for left in left_over(run, directory):
        with suppress(OSError):
            nbytes = left.path.stat().st_blocks * _BLOCK_BYTES
            at, created_s = _content(left.path)
            found.append(
                Remnant(left, run_of(left.path), owner_of(left.path), nbytes, at, created_s)
            )
    return found


def _content(path: Path) -> tuple[CheckpointId | None, float | None]:
    try:
        slot = Slot.open(path)
    except ValueError:
        return None, None
    try:
        capture = parse_capture(slot.meta, str(path))
    except CorruptCheckpoint:
        return None, None  # nothing was begun in it
    finally:
        slot.close(unlink=False)
    return capture.at, capture.created_s


@dataclass(frozen=True, slots=True)
class Removal:
    """What became of slots that were to be removed.

    Attributes:
        removed: Those that are gone.
        kept: Those that stay, each with why.
    """

    removed: Sequence[Remnant]
    kept: Sequence[tuple[Remnant, str]]


def remove_remnants(found: Sequence[Remnant], *, discard_sealed: bool) -> Removal:
    """Remove slots; those that hold a whole checkpoint only with ``discard_sealed``."""
    removed, kept = [], []
    for remnant in found:
        why = why_stays(remnant, discard_sealed=discard_sealed)
        if why is None and not remove_slot(remnant.slot):
            why = "another process is at work on it"
        if why is None:
            removed.append(remnant)
        else:
            kept.append((remnant, why))
    return Removal(removed, kept)


def why_stays(remnant: Remnant, *, discard_sealed: bool) -> str | None:
    """Why a slot is not removed, ``None`` where it is."""
    if remnant.slot.is_at_work:
        return f"persister process {remnant.slot.persister.pid} is at work on it"
    if remnant.slot.is_sealed and not discard_sealed:
        return "it holds a whole checkpoint"
    return None


# --- one run ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RepairPlan:
    """What there is to do for one run.

    Attributes:
        repository: The run.
        attempt: Its newest attempt.
        finishing: Sealed slots that can become durable.
        superseded: Sealed slots that cannot any more: a newer attempt has claimed the root.
        removing: Slots that hold nothing whole.
        temp_files: Number of files of interrupted writes, ``None`` where nobody can say.
        leftovers: Objects of attempts that are over which no manifest names.
        writer: Who may still write, so that temp files and objects of the newest attempt
            stay; empty where nobody does.
    """

    repository: Repository
    attempt: int
    finishing: Sequence[Remnant]
    superseded: Sequence[Remnant]
    removing: Sequence[Remnant]
    temp_files: int | None
    leftovers: Sequence[str]
    writer: str

    def changes(self, *, discard_sealed: bool) -> bool:
        """Whether there is anything to do."""
        return bool(
            self.finishing
            or (self.superseded and discard_sealed)
            or self.removing
            or self.leftovers
            or (self.temp_files and not self.writer)
        )


@dataclass
class Repaired:
    """What was done.

    Attributes:
        durable: Checkpoints that were made durable.
        finished: Slots whose own persister made them durable meanwhile.
        removed: Slots that were removed.
        failed: Slots that could not be made durable, each with why.
        kept: Of all slots those that stay, each with why.
        temp_files: Number of files of interrupted writes that were removed.
        leftovers: Objects that were removed.
        writer: As in the plan, after everything else.
    """

    durable: list[Durable] = field(default_factory=list)
    finished: list[Remnant] = field(default_factory=list)
    removed: list[Remnant] = field(default_factory=list)
    failed: list[tuple[Remnant, str]] = field(default_factory=list)
    kept: list[tuple[Remnant, str]] = field(default_factory=list)
    temp_files: int = 0
    leftovers: list[str] = field(default_factory=list)
    writer: str = ""


def plan_repair(repository: Repository, directory: Path = SHARED_MEMORY) -> RepairPlan:
    """Work out what is to be done; changes nothing.

    Raises:
        OptionError: A living trainer works on this run.
    """
    alive = _living_trainers(repository.run, directory)
    if alive:
        raise OptionError(
            f"{repository.store.url}: process {alive[0]} is training on this run (the number is "
            f"that of its own container), so nothing was touched: it cares for its own slots and "
            f"files; stop it first, or wait for its end"
        )
    attempt = repository.newest_attempt()
    found = remnants(repository.run, directory)
    sealed = [r for r in found if r.slot.is_sealed]
    superseded = [r for r in sealed if r.at is not None and r.at.attempt < attempt]
    writer = _writer(repository, attempt, directory)
    return RepairPlan(
        repository,
        attempt,
        [r for r in sealed if r not in superseded],
        superseded,
        [r for r in found if not r.slot.is_sealed],
        _count_temp_files(repository),
        repository.survey().leftovers_before(attempt + (not writer)),
        writer,
    )


def repair(
    plan: RepairPlan, *, discard_sealed: bool, grace_s: float, directory: Path = SHARED_MEMORY
) -> Repaired:
    """Do what ``plan`` says; blocks.

    Args:
        plan: What to do.
        discard_sealed: Whether to remove whole checkpoints that cannot become durable.
        grace_s: How long to wait for persisters of dead trainers, all together.
        directory: Where the slots are.

    Raises:
        StoreError: The medium failed while files were removed; it can be called again.
    """
    repository, until_s, done = plan.repository, monotonic() + grace_s, Repaired()
    stored: list[Stored] = []
    for remnant in [*plan.finishing, *plan.removing]:
        _finish(repository, remnant, until_s, done, stored)
    whole = {manifest.at for manifest in repository.commit_whole()}
    done.durable += [part.ended() for part in stored if part.at in whole]
    removal = remove_remnants(plan.superseded, discard_sealed=discard_sealed)
    done.removed += removal.removed
    done.kept += [(r, f"it holds a whole checkpoint, but {_late(plan)}") for r, _ in removal.kept]
    # Slots without a name are seen by nobody: their persister may still be writing.
    while persisters_of(repository.run) and monotonic() < until_s:
        sleep(_POLL_S)
    done.writer = _writer(repository, plan.attempt, directory)
    if not done.writer and _living_trainers(repository.run, directory):
        done.writer = "a job has been started"
    if not done.writer and repository.newest_attempt() == plan.attempt:
        done.temp_files = repository.store.sweep()
    before = plan.attempt + (not done.writer)
    done.leftovers = repository.remove_leftovers(repository.survey(), before)
    return done


def _finish(
    repository: Repository,
    remnant: Remnant,
    until_s: float,
    done: Repaired,
    stored: list[Stored],
) -> None:
    try:
        end = finish(repository, remnant.slot, Retention(), discard, until_s)
    except StoreError as failure:
        done.kept.append((remnant, str(failure)))
        done.failed.append((remnant, str(failure)))
    except CheckpointError as failure:
        done.removed.append(remnant)
        done.failed.append((remnant, str(failure)))
    else:
        if isinstance(end, Durable):
            done.durable.append(end)
        elif isinstance(end, Stored):
            stored.append(end)
        elif remnant.slot.is_sealed:
            done.finished.append(remnant)
        else:
            done.removed.append(remnant)


def _late(plan: RepairPlan) -> str:
    return f"attempt {plan.attempt} has claimed the root since, so it cannot join it any more"


def _count_temp_files(repository: Repository) -> int | None:
    if not isinstance(repository.store, LocalStore):
        return None
    try:
        return len(os.listdir(repository.store.root / TEMP_FOLDER))
    except OSError:
        return 0


# --- who lives --------------------------------------------------------------


def _living_trainers(run: str, directory: Path) -> list[int]:
    """Trainers of a run on this host: those that own slots, and those that have a persister."""
    found = set(living_owners(run, directory))
    found.update(trainer.pid for _, trainer in persisters_of(run) if trainer.is_alive)
    return sorted(found)


def _writer(repository: Repository, attempt: int, directory: Path) -> str:
    """Who may still write to the root: empty where it is certain that nobody does."""
    for persister, _ in persisters_of(repository.run):
        return f"persister process {persister.pid} is still at work"
    for old in left_over(repository.run, directory):
        if old.is_at_work:
            return f"another process is at work on {old.path.name}"
    if attempt == 0:
        return "no start has claimed the root yet"
    try:
        record = repository.attempt(attempt)
    except (CorruptCheckpoint, ObjectNotFound):
        return f"the record of attempt {attempt} cannot be read, so its process is not known"
    if record.host != socket.gethostname():
        return f"attempt {attempt} was claimed on {record.host}, and this host cannot look there"
    if _runs_since(record.pid, record.started_s):
        return f"process {record.pid}, which claimed attempt {attempt}, still runs"
    return ""


def _runs_since(pid: int, moment_s: float) -> bool:
    """Whether a process with that number ran at that time of the wall clock and still runs."""
    ticks = ProcessId.of(pid).start
    if not ticks:
        return False
    for line in read_text("/proc/stat").splitlines():
        name, _, seconds = line.partition(" ")
        if name == "btime":
            started_s = int(seconds) + ticks / os.sysconf("SC_CLK_TCK")
            return started_s <= moment_s + _CLOCK_SLACK_S
    return True  # there is no telling
