"""Saves that are under way, and what became of them: told to the user once, in the next call."""

from __future__ import annotations

import warnings
from collections.abc import Container
from typing import Literal, Protocol

from asymcheck.errors import CheckpointWarning, DroppedCheckpoint, RankMissing, SupersededWriter
from asymcheck.handles import Handle
from asymcheck.timekeeping import Timekeeper
from asymcheck.tracing import Tracer


class Captures(Protocol):
    """Learns from what became of checkpoints; the ``Snapshotter``."""

    def note_drop(self) -> list[str]:
        """One was dropped; returns what the user should know of it."""
        ...

    def note_success(self) -> None:
        """One is durable."""
        ...


class Outcomes:
    """The saves of one ``Checkpointer``. Only the training thread calls it.

    Args:
        on_error: Whether a failure is raised or warned of.
        timekeeper: Is told what durable ones took.
        tracer: Its complaints are told too.
    """

    def __init__(
        self,
        on_error: Literal["raise", "warn"],
        timekeeper: Timekeeper,
        tracer: Tracer | None,
    ) -> None:
        self._on_error = on_error
        self._timekeeper = timekeeper
        self._tracer = tracer
        self.pending: list[Handle] = []
        """Neither durable nor failed, or not told of yet."""
        self._drops: list[tuple[int, str]] = []

    def failure(self, captures: Captures | None, known: Container[int]) -> BaseException | None:
        """What failed behind the training, each told once; a drop is always a warning.

        Args:
            captures: Learns what became of each.
            known: Steps of which was told before that another rank gave them up.

        Returns:
            The first failure, the others are notes of it; ``None`` also where all are warned of.
            That a newer job writes is never a warning: nothing will be saved any more.
        """
        done = [h for h in self.pending if h.durable.done()]
        self.pending = [h for h in self.pending if not h.durable.done()]
        failures: list[BaseException] = []
        said = self._tracer.complaints() if self._tracer else []
        for handle in done:
            failure = handle.durable.exception()
            if isinstance(failure, DroppedCheckpoint):
                self._drops.append((handle.step, str(failure)))
                # Without a leaf nothing changed: to capture otherwise would help nobody.
                said += [
                    str(failure),
                    *(captures.note_drop() if captures and failure.key else ()),
                ]
            elif failure is not None:
                if handle.step not in known:
                    failures.append(failure)
            else:
                self._timekeeper.note_durable(handle.durable.result())
                if captures is not None:
                    captures.note_success()
        failures.sort(key=lambda failure: isinstance(failure, RankMissing))  # that may be a result
        for message in said:
            warn(message)
        if self._on_error == "warn":
            for failure in failures:
                if not isinstance(failure, SupersededWriter):
                    notes = "; ".join(getattr(failure, "__notes__", ()))
                    warn(f"{failure} ({notes})")
            failures = [f for f in failures if isinstance(f, SupersededWriter)]
        for other in failures[1:]:
            failures[0].add_note(f"also failed: {other}")
        return failures[0] if failures else None

    def take_drops(self) -> list[tuple[int, str]]:
        """Step and reason of what was dropped since the latest call."""
        drops, self._drops = self._drops, []
        return drops


def warn(message: str) -> None:
    """Tell the user, at the caller of the ``Checkpointer``."""
    warnings.warn(message, CheckpointWarning, stacklevel=3)
