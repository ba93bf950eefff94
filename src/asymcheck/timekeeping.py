"""Reads the clock for a cadence: tells it what steps and saves took, and asks when to save."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic

from asymcheck.handles import SaveReport
from asymcheck.planning.cadence import Cadence, SaveCost

_log = logging.getLogger(__name__)


class Timekeeper:
    """The latest step and save of one run, and the schedule of its saves. One thread uses it.

    What the schedule learned stays across a ``restore`` in the same process; a new process
    measures anew.

    Args:
        cadence: How often to save; its running state is made here.
        max_in_flight: How many checkpoints may be under way.
        clock: Seconds that never go back.
    """

    def __init__(
        self, cadence: Cadence, max_in_flight: int, clock: Callable[[], float] = monotonic
    ) -> None:
        self._schedule = cadence.begin(max_in_flight=max_in_flight)
        self._clock = clock
        self._said = self._schedule.why
        self._boundary: tuple[int, float] | None = None
        self._saved = False
        self._last_save_s = clock()
        self.last_step = 0
        """Of the latest save or restore."""

    @property
    def why(self) -> str:
        """The interval between saves as it is now, and where it is from."""
        return self._schedule.why

    def begin(self, step: int) -> None:
        """Training goes on after ``step``: what is between it and the steps before is no step."""
        self.last_step = step
        self._last_save_s = self._clock()
        self._boundary, self._saved = None, False

    def note_step(self, step: int) -> None:
        """Update ``step`` is done."""
        now_s = self._clock()
        if self._boundary is not None and step > self._boundary[0]:
            before, since_s = self._boundary
            self._schedule.observe_steps(step - before, now_s - since_s, saved=self._saved)
        self._boundary, self._saved = (step, now_s), False

    def due(self, step: int, under_way: int) -> bool:
        """Whether to save after ``step``.

        Args:
            step: Updates done so far.
            under_way: Saves that are neither durable nor given up.
        """
        if self.why != self._said:
            self._said = self.why
            _log.info("how often to save: %s", self._said)
        since_s = self._clock() - self._last_save_s
        return self._schedule.due(
            step=step, last_step=self.last_step, since_last_s=since_s, under_way=under_way
        )

    def note_save(self, step: int) -> None:
        """A save of ``step`` began, and training goes on."""
        self.last_step = step
        self._last_save_s = self._clock()
        self._saved = True

    def note_lost(self) -> None:
        """A save was due and could not begin: the time to the next one counts from now. Training
        goes on after the one before.
        """
        self._last_save_s = self._clock()

    def note_durable(self, report: SaveReport) -> None:
        """A save is durable.

        Args:
            report: What it took. What was captured only to see how says nothing of those to come.
        """
        if not report.is_trial:
            self._schedule.observe_save(
                SaveCost(report.step_stall_s, report.fence_stall_s, report.durable_s)
            )
