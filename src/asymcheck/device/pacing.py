"""Holding the copying thread to a partition plan, and measuring what the plan is made from."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

from torch import nn

from asymcheck.device.profile import Instant, Profiler
from asymcheck.planning.adaptive import Decision, decide
from asymcheck.planning.contention import Contention, Phase
from asymcheck.planning.plan import Partitioner
from asymcheck.planning.windows import total_s

_POLL_S = 0.002
_KNOWN = 9
"""Steps that are measured before only each ``_SELDOM``-th is."""
_SELDOM = 10


@dataclass(slots=True)
class _Link:
    """The path that copies take, as far as others use it.

    Attributes:
        changed: Notified when a window opens and when traffic ends.
        in_flight: How much other traffic is under way; changed with ``changed`` held.
    """

    changed: threading.Condition = field(default_factory=threading.Condition)
    in_flight: int = 0


class Pacing:
    """Plans each copy by the windows of the steps before, and lets it on in these windows.

    Belongs to the training thread, but for what a ``Pace`` says.

    Args:
        modules: Whose blocks make the windows.
        partitioner: Divides the copy over them.
        at_window: Called where a window opens, while training waits: no operation of the
            training thread is half done then. Must be quick and must not raise.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        partitioner: Partitioner,
        at_window: Callable[[], None] = lambda: None,
    ) -> None:
        self._at_window = at_window
        self._profiler = Profiler(modules, self._on_window)
        self._partitioner = partitioner
        self._contention = Contention()
        self._generation = 0
        self._link = _Link()
        self._opened: list[tuple[float, Phase]] = []
        self._steps = 0
        self.decision: Decision | None = None
        """The latest, for whoever explains it."""

    @property
    def contention(self) -> Contention:
        """What copying has cost the training, as far as it was measured."""
        return self._contention

    @property
    def copy_bytes_per_s(self) -> float:
        """Bandwidth of the copies behind the training; 0 while there was none."""
        return self._profiler.copy_bytes_per_s

    def begin_step(self, *, saves: bool) -> None:
        """A boundary is over: forward and backward follow.

        Args:
            saves: Whether a copy runs behind them.
        """
        self._steps += 1
        if saves or self._steps <= _KNOWN or self._steps % _SELDOM == 0:
            self._opened = []  # a pace may still have those before
            self._profiler.begin_step()

    def end_step(self) -> None:
        """The update follows. Again it does nothing."""
        self._profiler.end_step()

    def plan(self, lazy_bytes: int) -> Pace:
        """The pace of a copy of so many bytes, from now until the next update."""
        if self._profiler.generation != self._generation:
            self._generation, self._contention = self._profiler.generation, Contention()
        for pair in self._profiler.take_pairs():
            self._contention = self._contention.add(**pair._asdict())
        windows, bandwidth = self._profiler.windows(), self._profiler.copy_bytes_per_s
        previous = None if self.decision is None else self.decision.plan
        self.decision = decision = decide(
            self._partitioner, lazy_bytes, windows, bandwidth, self._contention, previous
        )
        return Pace(decision, self._contention, bandwidth, self._profiler, self._link, self._opened)

    @contextmanager
    def collective(self) -> Iterator[None]:
        """A block during which other traffic is on the path that copies take, such as an
        all-reduce. On any thread, for one that waits until the traffic is over; never blocks.

        A copy that is held to a plan pauses meanwhile, as long as the rest of the window is
        enough for what it should get to in it.
        """
        start = self._profiler.instant()
        with self._link.changed:
            self._link.in_flight += 1
        try:
            yield
        finally:
            stop = self._profiler.instant()
            with self._link.changed:
                self._link.in_flight -= 1
                self._link.changed.notify_all()
            if start is not None and stop is not None:
                self._profiler.add_collective(start, stop)

    def close(self) -> None:
        """Take every hook away from the modules."""
        self._profiler.close()

    def _on_window(self, ordinal: int) -> None:
        self._opened.append((perf_counter(), self._profiler.phase))
        with self._link.changed:
            self._link.changed.notify_all()
        self._at_window()


@dataclass(slots=True)
class Part:
    """What was copied without a pause in one window.

    Attributes:
        window: Ordinal of the window that was open when it was issued, -1 while training waits.
        start_s: When the first byte was issued, on ``time.perf_counter``'s clock.
        stop_s: When the last one was copied; on a device: issued.
        nbytes: How much it is.
    """

    window: int
    start_s: float
    stop_s: float
    nbytes: int = 0


class Pace:
    """When the pieces of one copy may be copied. ``wait`` and ``done`` belong to the copying
    thread, ``let_go`` to the training thread.

    Attributes:
        decision: The plan that it keeps to.
        contention: κ when that was made.
        copy_bytes_per_s: Bandwidth when that was made, 0 where none was known.
        opened: Start and phase of each window since the boundary, on the host's
            ``time.perf_counter``, which runs ahead of a device.
        parts: What was copied when, in order; complete after ``done``.
    """

    def __init__(
        self,
        decision: Decision,
        contention: Contention,
        copy_bytes_per_s: float,
        profiler: Profiler,
        link: _Link,
        opened: list[tuple[float, Phase]],
    ) -> None:
        self.decision = decision
        self.contention = contention
        self.copy_bytes_per_s = copy_bytes_per_s
        self.opened = opened
        self.parts: list[Part] = []
        self._plan = decision.plan
        self._gate = decision.gate
        self.piece_bytes = decision.chunk_bytes
        self._profiler = profiler
        self._link = link
        # Summed up here: the copying thread looks at it every few milliseconds.
        self._update_s = perf_counter() + total_s(decision.plan.windows)
        self._free = decision.plan.free_running
        self._stretch: tuple[Instant | None, int] | None = None
        self._copied = 0

    def wait(self, nbytes: int) -> None:
        """Return when the next piece may be copied: its first byte is within the bound of the
        window that is open now and no other traffic is in its way, or the deadline is near, or
        training waits.
        """
        if not self._may_go():
            self._end_stretch()
            with self._link.changed:
                while not self._may_go():
                    self._link.changed.wait(_POLL_S)
        self._note(nbytes)
        if self._stretch is None:
            self._stretch = (self._profiler.instant(), self._copied)
        self._copied += nbytes

    def let_go(self) -> None:
        """Training waits for the rest: copy it as fast as possible."""
        with self._link.changed:
            self._free = True
            self._link.changed.notify_all()

    def done(self) -> None:
        """The copy is over."""
        self._end_stretch()

    def _may_go(self) -> bool:
        if self._free:
            return True
        bounds = self._plan.bounds
        position = self._profiler.position
        if position < 0:
            return True
        due = bounds[min(position, len(bounds) - 1)] - self._copied
        if due > 0 and not self._gives_way(due, position):
            return True
        left_s = (self._plan.lazy_bytes - self._copied) / self.copy_bytes_per_s
        self._free = self._gate.is_late(left_s, self._update_s - perf_counter())
        return self._free

    def _gives_way(self, due_bytes: int, position: int) -> bool:
        """Whether other traffic is under way, and what is due in this window can wait for it."""
        if not self._link.in_flight or position >= len(self._plan.windows):
            return self._link.in_flight > 0
        since_s = perf_counter() - self.opened[-1][0]
        left_s = self._plan.windows[position].duration_s - since_s
        return due_bytes / self.copy_bytes_per_s < left_s

    def _note(self, nbytes: int) -> None:
        now_s, window = perf_counter(), self._profiler.position
        if self._stretch is not None:
            self.parts[-1].stop_s = now_s
        if self._stretch is None or self.parts[-1].window != window:
            self.parts.append(Part(window, now_s, now_s))
        self.parts[-1].nbytes += nbytes

    def _end_stretch(self) -> None:
        stretch, self._stretch = self._stretch, None
        if stretch is not None:
            self.parts[-1].stop_s = perf_counter()
            start, before = stretch
            stop = self._profiler.instant()
            if start is not None and stop is not None:
                self._profiler.add_copy(start, stop, self._copied - before)
