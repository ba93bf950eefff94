"""What a caller holds of a save that is under way, and what it learns in the end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, fields
from typing import Literal, TypeVar

from asymcheck.encoding import GroupReport
from asymcheck.errors import CheckpointError
from asymcheck.messages import Durable
from asymcheck.tiering import TierState

T = TypeVar("T")

How = Literal["lazy", "device-copy", "blocking"]
Tier = Literal["store", "memory"]


class Promised(Future[T]):
    """A future that fences before the training thread waits for it: nobody else would.

    It cannot be cancelled.
    """

    def __init__(self, fence: Callable[[], None]) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self._fence = fence
        self._thread = threading.get_ident()

    def result(self, timeout: float | None = None) -> T:
        """See ``Future``."""
        self._fence_first()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """See ``Future``."""
        self._fence_first()
        return super().exception(timeout)

    def _fence_first(self) -> None:
        if not self.done() and threading.get_ident() == self._thread:
            self._fence()


@dataclass(frozen=True, slots=True)
class SaveReport:
    """A durable checkpoint, and what it took.

    Attributes:
        step: Training step.
        attempt: The attempt that wrote it.
        raw_bytes: Bytes captured.
        eager_bytes: Of them copied at the boundary, on the training thread.
        stored_bytes: Bytes written.
        step_stall_s: Seconds that ``step()`` or ``save()`` took: with ``persist="before"`` until it
            was durable.
        fence_stall_s: Seconds that the next update waited for the copy.
        copy_s: Seconds of copying behind the training.
        persist_s: Seconds of hashing, writing and committing, waits included.
        durable_s: Seconds from the boundary until it was durable.
        cpu_s: CPU seconds of all background work.
        lag_steps: Steps that training had gone on when it became durable.
        encode_s: Seconds of encoding and hashing, summed over threads.
        write_s: Seconds that the store took.
        batches: Writes that the chunks were merged into.
        groups: What became of each kind of leaf: codec, bytes, CPU seconds.
        fidelity: ``exact`` where every bit comes back.
        base: Step of the checkpoint that differences were made to, 0 where there are none.
        tier: Where it is: in the ``store``, or in the ``memory`` of this host alone, as safe as
            ``Placement`` says. What is in memory has nothing stored and nothing persisted; its
            ``durable_s`` and ``lag_steps`` are those of that tier.
        capture: How it was captured; see ``Strategy``.
        is_trial: Whether it was captured to see what that way costs; no cadence learns from it.
        tiers: How far each further tier was behind then, nearest first; rank 0 knows.
    """

    step: int
    attempt: int
    raw_bytes: int
    eager_bytes: int
    stored_bytes: int
    step_stall_s: float
    fence_stall_s: float
    copy_s: float
    persist_s: float
    durable_s: float
    cpu_s: float
    lag_steps: int
    encode_s: float = 0.0
    write_s: float = 0.0
    batches: int = 0
    groups: tuple[GroupReport, ...] = ()
    fidelity: str = "exact"
    base: int = 0
    tier: Tier = "store"
    capture: How = "lazy"
    is_trial: bool = False
    tiers: tuple[TierState, ...] = ()


@dataclass(frozen=True)
class Handle:
    """A save under way.

    Waiting for one of its futures, with ``result`` or ``exception``, waits for the copy too.
    ``concurrent.futures.wait`` does not: call ``Checkpointer.fence`` before.

    Attributes:
        step: The step saved.
        captured: Done once the state is copied, or given up.
        durable: Done once the checkpoint is committed, or whole in memory where it does not go
            to the store; holds what it took, or the error.
    """

    step: int
    captured: Future[None]
    durable: Future[SaveReport]


def failed_handle(step: int, failure: CheckpointError) -> Handle:
    """The handle of a save that failed before there was anything to wait for."""
    handle = Handle(step, Future(), Future())
    handle.captured.set_exception(failure)
    handle.durable.set_exception(failure)
    return handle


def report_of(found: Durable, eager_bytes: int, step_stall_s: float, capture: How) -> SaveReport:
    """What the trainer knows when a checkpoint became durable; the copy is not in it yet."""
    told = {f.name: getattr(found, f.name) for f in fields(found)}
    return SaveReport(
        **told,
        eager_bytes=eager_bytes,
        step_stall_s=step_stall_s,
        fence_stall_s=0.0,
        copy_s=0.0,
        lag_steps=0,
        capture=capture,
    )
