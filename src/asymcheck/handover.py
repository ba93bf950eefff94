"""What a dead trainer left in shared memory: finished before the next attempt begins."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

from asymcheck.errors import CheckpointError, StoreError
from asymcheck.events import Sink
from asymcheck.memory.arena import SHARED_MEMORY, ProcessId, Slot, SlotState, owner_of, slots_of
from asymcheck.persist import Durable, persist
from asymcheck.planning.retention import Retention
from asymcheck.storage.repository import Repository

_log = logging.getLogger(__name__)
_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class LeftOver:
    """A slot whose trainer is dead.

    Attributes:
        path: Its file.
        persister: The process that may still be at work on it.
        is_sealed: Whether it holds a whole checkpoint that is not durable yet.
    """

    path: Path
    persister: ProcessId
    is_sealed: bool


def left_over(run: str | None = None, directory: Path = SHARED_MEMORY) -> list[LeftOver]:
    """Slots of this user whose trainer is dead, of one run or of all."""
    found = []
    for path in slots_of(directory, run):
        try:
            slot = Slot.open(path)
        except OSError:
            continue
        except ValueError:
            # Its trainer died while it was being made.
            if ProcessId.of(owner_of(path)).start == 0:
                found.append(LeftOver(path, ProcessId(0, 0), is_sealed=False))
            continue
        if not slot.owner.is_alive:
            found.append(LeftOver(path, slot.persister, slot.state == SlotState.SEALED))
        slot.close(unlink=False)
    return found


def take_over(
    repository: Repository,
    retention: Retention,
    sink: Sink,
    grace_s: float,
    warn: Callable[[str], None],
) -> list[Durable]:
    """Make every sealed slot of dead trainers of this run durable, and free the others; blocks.

    A persister that is still at work is waited for, at most ``grace_s``, and then replaced.

    Args:
        repository: The run; its newest attempt must be the dead trainer's.
        retention: Applied after each commit.
        sink: Receives spans.
        grace_s: How long to wait for living persisters, all together.
        warn: Told what could not be saved.

    Returns:
        The checkpoints that became durable here.
    """
    until_s = monotonic() + grace_s
    done = []
    for old in left_over(repository.run):
        while old.persister.is_alive and monotonic() < until_s:
            sleep(_POLL_S)
        if old.persister.is_alive:
            with suppress(ProcessLookupError):
                os.kill(old.persister.pid, signal.SIGKILL)
            while old.persister.is_alive:
                sleep(_POLL_S)
        try:
            slot = Slot.open(old.path)
        except (OSError, ValueError):
            with suppress(OSError):
                old.path.unlink(missing_ok=True)
            continue  # its persister finished it
        keep = False
        if slot.state == SlotState.SEALED:
            try:
                done.append(persist(repository, slot, retention, sink, lambda: False))
            except StoreError as failure:
                keep = True
                warn(f"a checkpoint left in {old.path} could not be made durable yet: {failure}")
            except CheckpointError as failure:
                warn(f"a checkpoint left in {old.path} was given up: {failure}")
        slot.close(unlink=not keep)
    return done
