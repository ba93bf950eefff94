"""A start that reads values straight out of shared memory, and makes them durable behind it."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from asymcheck.errors import CheckpointError, CorruptCheckpoint, StoreError
from asymcheck.events import Sink
from asymcheck.handover import left_over, take_over
from asymcheck.outcomes import warn
from asymcheck.planning.retention import CheckpointId, Retention
from asymcheck.ranks import Ranks
from asymcheck.recovery import LEFT_TORN, RestoreReport
from asymcheck.slot_choice import choose_slots
from asymcheck.slot_store import SlotStore, hierarchy_of
from asymcheck.storage.copies import BadCopy, Served
from asymcheck.storage.hierarchy import Hierarchy
from asymcheck.storage.repository import Repository

Load = Callable[[Hierarchy, bool], RestoreReport]
"""Restores out of a hierarchy; told whether live state was overwritten in part before."""


@dataclass(frozen=True, slots=True)
class InSlots:
    """What a restore met in shared memory and could not use.

    Attributes:
        torn: Whether live state was overwritten with what turned out to be damaged.
        served: What was read of that.
        damaged: What was bad.
    """

    torn: bool = False
    served: Sequence[Served] = ()
    damaged: Sequence[BadCopy] = ()

    def added_to(self, report: RestoreReport) -> RestoreReport:
        """The report of what was restored instead, with all that was met."""
        served, damaged = (*self.served, *report.served), (*self.damaged, *report.damaged)
        return replace(report, served=served, damaged=damaged)


class Finishing:
    """Makes durable what a start went on from out of shared memory, on a thread of its own.

    The end of the interpreter waits for it.

    Args:
        at: The checkpoint.
        slots: Closed first: nothing is read there any more.
        work: Makes it durable; gets a call that hears what could not be.
        grace_s: How long that end waits.

    Attributes:
        has_failed: Whether it is over and to be begun again.
    """

    def __init__(
        self,
        at: CheckpointId,
        slots: SlotStore,
        work: Callable[[Callable[[str], None]], object],
        grace_s: float,
    ) -> None:
        self.at = at
        self._grace_s = grace_s
        self._slots = slots
        self._work = work
        self._said: list[str] = []
        self._failure: BaseException | None = None
        self.has_failed = False
        self.again()

    def again(self) -> None:
        """Begin, once more where it is over."""
        self.has_failed = False
        atexit.register(self.join, self._grace_s)
        self._thread = threading.Thread(target=self._run, name="asymcheck-finish", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()

    def join(self, timeout_s: float | None) -> bool:
        """Wait for it, without end with ``None``; returns whether it is over."""
        self._thread.join(timeout_s)
        return self.is_over

    def outcome(self) -> list[str]:
        """What could not be saved, told once; waits until it is over.

        Raises:
            CheckpointError: The work failed.
        """
        self.join(None)
        atexit.unregister(self.join)
        said, self._said = self._said, []
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return said

    def _run(self) -> None:
        self._slots.close()
        try:
            self._work(self._said.append)
        except BaseException as failure:  # noqa: BLE001  the training thread raises it
            self._failure = failure


class SlotStart:
    """The part of a writer that begins with what a dead trainer left in shared memory.

    Values are read at once. Then they are made durable on a thread, as if no start had come
    between, and only then an attempt is claimed, at the latest for the next save. So whoever
    kills this process meanwhile leaves what was there; the next start makes it durable first.
    """

    _ranks: Ranks
    _retention: Retention
    _read_only: bool
    _grace_s: float
    _sink: Sink

    def __init__(self) -> None:
        self._attempt: int | None = None
        self._finishing: Finishing | None = None
        self._in_slots = InSlots()

    def _existing(self) -> Repository:
        raise NotImplementedError

    def _start_attempt(self, parent: CheckpointId | None) -> None:
        raise NotImplementedError

    def _capturing(self) -> object:
        raise NotImplementedError

    # --- reading --------------------------------------------------------------

    def _from_slots(
        self, hierarchy: Hierarchy, step: int | None, load: Load
    ) -> RestoreReport | None:
        """Restore out of shared memory, where that is possible; all ranks call it alike.

        Raises like ``recovery.restore``, but not for damage: then others are to be tried.
        """
        slots = None if self._read_only else self._open_slots(hierarchy, step)
        if slots is None:
            return None
        memory = hierarchy_of(slots, hierarchy.run)
        try:
            report = load(memory, False)
        except (CorruptCheckpoint, StoreError) as failure:
            slots.close()
            warn(f"what a dead trainer left in shared memory was passed over: {failure}")
            notes = memory.copies.notes
            torn = isinstance(failure, LEFT_TORN)
            met = list(notes.served.values()), list(notes.bad.values())
            self._in_slots = InSlots(torn, *met)
            return None
        except BaseException:
            slots.close()
            raise
        slots.note_taken()
        assert report.attempt is not None
        self._attempt = None
        at = CheckpointId(report.attempt, report.step)
        self._finishing = Finishing(at, slots, self._make_durable, self._grace_s)
        return replace(report, unreachable=tuple(hierarchy.copies.notes.unreachable.items()))

    def _open_slots(self, hierarchy: Hierarchy, step: int | None) -> SlotStore | None:
        """What rank 0 chooses, where every rank can open it."""

        def look() -> list[Any]:
            found = None if self._ranks.rank else choose_slots(hierarchy, step, self._grace_s)
            return [] if found is None else [found.at, [str(path) for path in found.paths]]

        told = self._ranks.each("looking into shared memory", look, self._grace_s)[0]
        if not told:
            return None
        at, paths = CheckpointId(*told[0]), [Path(path) for path in told[1]]
        slots: SlotStore | None = None
        try:
            slots = SlotStore(hierarchy.run, at, paths)
        except (CheckpointError, OSError) as failure:
            warn(f"what lies in shared memory cannot be read there: {failure}")
        try:
            opened = self._ranks.exchange("opening what lies in shared memory", slots is not None)
        except BaseException:
            opened = [False]
            raise
        finally:
            if slots is not None and not all(opened):
                slots.close()
        return slots if all(opened) else None

    # --- making it durable ------------------------------------------------------

    def _make_durable(self, say: Callable[[str], None]) -> None:
        how = (self._retention, self._sink, self._grace_s, say)
        take_over(self._existing(), *how, rank=self._ranks.rank)

    def _claim_if_over(self) -> None:
        """With one rank: claim an attempt as soon as nothing has to be waited for. Where the store
        fails the next save tries again, and tells.
        """
        finishing = self._finishing
        if finishing is None or self._ranks.world > 1 or not finishing.is_over:
            return
        if not finishing.has_failed and not _is_left(self._existing().run, finishing.at):
            with suppress(StoreError):
                self._claim_behind()

    def _claim_behind(self) -> None:
        """Wait until what was read out of shared memory is durable, and claim an attempt that goes
        on from it; blocks. All ranks call it alike; without such a start it does nothing.

        Raises:
            StoreError: It could not be made durable, or none be claimed; on all ranks. It stays
                where it is, and the next call tries again: an attempt that was claimed now would
                leave it behind.
        """
        finishing = self._finishing
        if finishing is None:
            return
        if finishing.has_failed:
            finishing.again()

        def end() -> list[Any]:
            said, why = [], ""
            try:
                said = finishing.outcome()
            except StoreError as failure:
                why = str(failure)
            return [said, why, bool(why) or _is_left(self._existing().run, finishing.at)]

        finishing.has_failed = True  # until all is done
        at = finishing.at
        told = self._ranks.each("making durable what was in memory", end, self._grace_s)
        for message in told[self._ranks.rank][0]:
            warn(message)
        if any(left for _, _, left in told):
            why = next((f" ({why})" for _, why, _ in told if why), "")
            raise StoreError(
                f"step {at.step} (attempt {at.attempt}) was restored out of shared memory and "
                f"could not be made durable yet{why}: it stays there, and the next save tries "
                f"again",
                retryable=True,
            )
        self._start_attempt(at)
        self._finishing = None
        self._capturing()  # a persister that is started now is there at the first save

    def _end_behind(self) -> None:
        """At the end, when nothing is saved any more: as ``_claim_behind``, within ``grace_s``."""
        finishing = self._finishing
        if finishing is None:
            return
        what, grace_s = "waiting for what was in memory", self._grace_s
        if not all(self._ranks.each(what, lambda: finishing.join(grace_s), grace_s)):
            raise StoreError(
                f"close: step {finishing.at.step}, restored out of shared memory, is not durable "
                f"after grace_s={grace_s} seconds: it stays there for the next start, or for "
                f"'asymcheck repair'",
                retryable=False,
            )
        self._claim_behind()

    def _await_finishing(self, timeout_s: float | None) -> bool:
        """Wait for this rank's part of it; returns whether it is over."""
        return self._finishing is None or self._finishing.join(timeout_s)


def _is_left(run: str, at: CheckpointId) -> bool:
    """Whether a slot of it is there still, and is not durable."""
    return any(old.is_sealed and old.at == at for old in left_over(run))
