"""What a persister says of a checkpoint, also as messages between two processes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from asymcheck.encoding import GroupReport
from asymcheck.errors import (
    CaptureError,
    CheckpointError,
    DroppedCheckpoint,
    RankMissing,
    StoreError,
    SupersededWriter,
)
from asymcheck.planning.retention import CheckpointId
from asymcheck.storage.manifest import EXACT

MESSAGE_BYTES = 1 << 16
"""No message between the two is longer."""
TEXT_CHARS = 4000
"""No text in one is longer; up to six bytes each, in JSON."""
_MOST_RANKS = 1000  # named in a message


@dataclass(frozen=True, slots=True)
class Durable:
    """A committed checkpoint, and what it took.

    Attributes:
        step: Training step.
        attempt: The attempt that wrote it.
        raw_bytes: Bytes captured.
        stored_bytes: Bytes written, with index and without manifest.
        persist_s: Seconds from the first byte flushed to the commit, waits included.
        durable_s: Seconds from the boundary, when the state was live, until it was durable.
        cpu_s: CPU seconds that persisting took.
        encode_s: Seconds of encoding and hashing, summed over threads.
        write_s: Seconds that the store took.
        batches: Writes that the chunks were merged into.
        groups: What became of each kind of leaf.
        fidelity: ``exact``, or what the losses in its index are within.
        base: Step of the checkpoint that differences in it are made to, 0 where there are none.
    """

    step: int
    attempt: int
    raw_bytes: int
    stored_bytes: int
    persist_s: float
    durable_s: float
    cpu_s: float
    encode_s: float = 0.0
    write_s: float = 0.0
    batches: int = 0
    groups: tuple[GroupReport, ...] = ()
    fidelity: str = EXACT
    base: int = 0


@dataclass(frozen=True, slots=True)
class Stored:
    """What one of several ranks stored with its index: it is a checkpoint once all have.

    Attributes:
        rank: Whose it is.
        world: How many ranks there are.
        boundary_s: Monotonic time of the boundary.
        begun_s: Monotonic time of the first byte flushed.
        part: What it took so far; its base and fidelity are this rank's.
    """

    rank: int
    world: int
    boundary_s: float
    begun_s: float
    part: Durable

    @property
    def at(self) -> CheckpointId:
        """The checkpoint."""
        return CheckpointId(self.part.attempt, self.part.step)

    def ended(self) -> Durable:
        """The report, now that the checkpoint is committed."""
        now_s = perf_counter()
        return replace(self.part, persist_s=now_s - self.begun_s, durable_s=now_s - self.boundary_s)


def rebuild_stored(told: dict[str, Any]) -> Stored:
    """What came as a message."""
    return Stored(**{**told, "part": rebuild_durable(told["part"])})


def rebuild_durable(told: dict[str, Any]) -> Durable:
    """The report that came as a message."""
    return Durable(**{**told, "groups": tuple(GroupReport(*row) for row in told["groups"])})


def describe_error(failure: CheckpointError) -> dict[str, Any]:
    """An error as a message between processes."""
    return {
        "type": type(failure).__name__,
        "message": str(failure)[:TEXT_CHARS],
        "retryable": getattr(failure, "retryable", False),
        "step": getattr(failure, "step", 0),
        "key": getattr(failure, "key", "")[:TEXT_CHARS],
        "ranks": getattr(failure, "ranks", ())[:_MOST_RANKS],
    }


def rebuild_error(told: dict[str, Any]) -> CheckpointError:
    """The error that ``describe_error`` described."""
    kind, message = told["type"], told["message"]
    if kind == "DroppedCheckpoint":
        why = message.removeprefix(f"step {told['step']} was dropped: ")
        return DroppedCheckpoint(told["step"], told["key"], why)
    if kind == "RankMissing":
        why = message.removeprefix(f"step {told['step']} was not committed: ")
        return RankMissing(told["step"], told["ranks"], why)
    for plain in (SupersededWriter, CaptureError):
        if kind == plain.__name__:
            return plain(message)
    if kind in ("StoreError", "ObjectNotFound"):
        return StoreError(message, retryable=told["retryable"])
    return CheckpointError(f"{kind}: {message}")
