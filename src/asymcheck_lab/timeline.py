"""One rank that trains and saves, played through event by event: the referee of closed forms.

A trainer, a copier, an encoder and a writer hand pieces to each other. Each knows only its own
rule, as ``planning.closed_forms.Mechanism`` describes it; what comes of that in the long run is
not known here. Only the numbers of the model come out of this; none is a measurement.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Literal

from asymcheck.planning.closed_forms import Mechanism, Steady, Work
from asymcheck_lab.errors import UsageError

_Process = Generator[float | Callable[[], bool], None, None]
"""Yields how long it is busy, or what it waits for."""


@dataclass(eq=False)
class Save:
    """A checkpoint; times are seconds since the training began.

    Attributes:
        boundary_s: The step before it was over.
        began_s: It had a slot.
        went_on_s: Training went on.
        fence_s: How long the next update waited for it.
        durable_s: It was durable; 0 as long as it is not.
        is_sealed: It is known to be whole.
        left: Pieces to write.
        work: What there is to do for it.
        served_s: When a piece of it was written last.
    """

    boundary_s: float
    began_s: float
    left: int
    work: Work
    went_on_s: float = 0.0
    fence_s: float = 0.0
    durable_s: float = 0.0
    is_sealed: bool = False
    served_s: float = 0.0


class Timeline:
    """A training from its first step.

    Args:
        works: What there is to do for a checkpoint, one after the other by turns; steps and windows
            are those of the first.
        how: The mechanism.
        interval_steps: Steps from one save to the next.
        order: Of writing: pieces of the oldest checkpoint first, or in turn (``shared``), as
            where each checkpoint has writers of its own and all share one store.
    """

    def __init__(
        self,
        works: Work | Sequence[Work],
        how: Mechanism,
        interval_steps: int,
        order: Literal["oldest", "shared"] = "oldest",
    ) -> None:
        self.works = [works] if isinstance(works, Work) else list(works)
        self.how, self.interval_steps, self.order = how, interval_steps, order
        self.saves: list[Save] = []
        self._now_s: float = 0  # an integer, so that fractions stay exact
        self._in_flight = 0
        self._in_ring = 0
        self._to_copy: deque[Save] = deque()
        self._to_encode: deque[Save] = deque()
        self._to_write: deque[Save] = deque()

    def run(self, saves: int) -> list[Save]:
        """Train until so many checkpoints are durable; returns them by step."""
        turn = itertools.count()
        busy: list[tuple[float, int, _Process]] = []
        waiting: list[tuple[Callable[[], bool], _Process]] = []

        def go_on(process: _Process) -> None:
            what = next(process)
            if callable(what):
                waiting.append((what, process))
            else:
                heapq.heappush(busy, (self._now_s + what, next(turn), process))

        for process in (self._train(), self._copy(), self._encode(), self._write()):
            go_on(process)
        while len(self.saves) < saves or not all(s.durable_s for s in self.saves[:saves]):
            for i, (is_there, process) in enumerate(waiting):
                if is_there():
                    del waiting[i]
                    go_on(process)
                    break
            else:
                self._now_s, _, process = heapq.heappop(busy)
                go_on(process)
        return self.saves[:saves]

    def _train(self) -> _Process:
        work, how = self.works[0], self.how
        for step in itertools.count(1):
            yield work.window_s
            if how.capture == "lazy" and self._to_copy:
                start_s = self._now_s
                yield lambda: not self._to_copy
                self.saves[-1].fence_s = self._now_s - start_s
            if self.saves:
                self.saves[-1].is_sealed = True
            yield work.step_s - work.window_s
            if step % self.interval_steps == 0:
                yield from self._save()

    def _save(self) -> _Process:
        how, work = self.how, self.works[len(self.saves) % len(self.works)]
        boundary_s = self._now_s
        yield lambda: self._in_flight < how.max_in_flight
        save = Save(boundary_s, self._now_s, how.pieces, work)
        self._in_flight += 1
        self.saves.append(save)
        if how.capture == "blocking":
            yield work.copy_s
            self._to_encode.extend([save] * how.pieces)
        else:
            if how.capture == "device":
                yield work.device_s
            self._to_copy.extend([save] * how.pieces)
        if how.persist == "before":
            yield lambda: save.durable_s > 0.0
        save.went_on_s = self._now_s

    def _copy(self) -> _Process:
        room = self.how.ring_pieces
        while True:
            yield lambda: bool(self._to_copy) and (room is None or self._in_ring < room)
            self._in_ring += 1
            yield self._to_copy[0].work.copy_s / self.how.pieces
            # Not before: the fence waits until the last one is copied.
            self._to_encode.append(self._to_copy.popleft())

    def _encode(self) -> _Process:
        while True:
            yield lambda: bool(self._to_encode)
            save = self._to_encode.popleft()
            yield save.work.encode_s / self.how.pieces
            self._to_write.append(save)

    def _write(self) -> _Process:
        while True:
            yield lambda: bool(self._to_write)
            save = self._to_write[0]
            if self.order == "shared":
                save = min(self._to_write, key=lambda one: one.served_s)
            self._to_write.remove(save)
            yield save.work.write_s / self.how.pieces
            save.served_s = self._now_s
            self._in_ring -= 1
            save.left -= 1
            if not save.left:
                if self.how.sealed == "fence":
                    yield partial(getattr, save, "is_sealed")
                yield save.work.commit_s
                save.durable_s = self._now_s
                yield save.work.release_s
                self._in_flight -= 1


def average(saves: Sequence[Save]) -> Steady:
    """What the saves cost on average; all but the last are counted.

    ``fence_s`` and ``wait_s`` are told apart by where training waited: at the fence, and at the
    boundary for a slot.
    """
    if len(saves) < 2:
        raise UsageError(f"average: expected at least 2 saves, found {len(saves)}")
    counted = saves[:-1]
    return Steady(
        boundary_s=fmean(s.went_on_s - s.began_s for s in counted),
        fence_s=fmean(s.fence_s for s in counted),
        wait_s=fmean(s.began_s - s.boundary_s for s in counted),
        durable_s=fmean(s.durable_s - s.boundary_s for s in counted),
        period_s=(saves[-1].began_s - saves[0].began_s) / len(counted),
    )
