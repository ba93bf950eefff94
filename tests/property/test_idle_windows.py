"""Idle windows of a network: what goes when, on a simulated link with a simulated clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import cycle

from hypothesis import given, settings
from hypothesis import strategies as st

from asymcheck.planning.idle import LOOK_S, Counters, IdleWindows

TICK_S = 0.001
PIECE = 1 << 18


@dataclass
class Link:
    """A link that the training uses as ``is_busy`` says, and that carries ours beside it.

    Where both send each has half of it. What is left of ours when the training begins is in its
    way: ``late_bytes`` adds that up, ``latest_bytes`` is the most at a time.
    """

    bytes_per_s: float
    spans: list[tuple[float, bool]]
    now_s: float = 0.0
    sent: float = 0.0
    own: float = 0.0
    queued: float = 0.0
    late_bytes: float = 0.0
    latest_bytes: float = 0.0
    busy: bool = False
    windows: IdleWindows = field(default_factory=IdleWindows)

    def __post_init__(self) -> None:
        self._spans = cycle(self.spans)
        self._left_s, self.busy = next(self._spans)

    @property
    def piece(self) -> int:
        """Large where the link is quick: less to compute."""
        return max(PIECE, int(self.bytes_per_s * TICK_S / 4))

    def tick(self) -> None:
        carried = self.bytes_per_s * TICK_S
        share = carried / 2 if self.busy else carried
        own = min(self.queued, share)
        self.queued -= own
        self.own += own
        self.sent += own + (carried - own if self.busy else 0.0)
        self.now_s += TICK_S
        self._left_s -= TICK_S
        if self._left_s <= TICK_S / 2:
            was, (self._left_s, self.busy) = self.busy, next(self._spans)
            if self.busy and not was:
                self.late_bytes += self.queued
                self.latest_bytes = max(self.latest_bytes, self.queued)

    def send(self, nbytes: int, limit_s: float) -> bool:
        """Send a pack, piece after piece; whether it went within the limit."""
        end_s = self.now_s + limit_s
        piece = self.piece
        while nbytes > 0:
            if self.windows.is_due(self.now_s):
                self.windows.look(self.counters())
            while nbytes > 0 and self.windows.take(piece) == "go":
                self.queued += piece
                nbytes -= piece
            if self.now_s > end_s:
                return False
            self.tick()
        return True

    def counters(self) -> Counters:
        return Counters(self.now_s, int(self.sent), int(self.own), int(self.queued + 0.999))


few = settings(max_examples=15)
rates = st.sampled_from([25e6, 125e6, 1.25e9, 12.5e9])


@given(rates)
def test_a_link_that_nobody_else_uses_is_filled(rate: float) -> None:
    link = Link(rate, [(1e9, False)])
    pack = int(rate)  # what it carries in a second
    assert link.send(pack, 3.0)
    assert link.windows.bytes_per_s > 0.4 * rate


@few
@given(rates, st.floats(0.05, 0.4), st.floats(0.02, 0.3))
def test_once_the_windows_are_known_nothing_is_in_the_way_of_the_training(
    rate: float, idle_s: float, busy_s: float
) -> None:
    link = Link(rate, [(idle_s, False), (busy_s, True)])
    assert link.send(int(rate * idle_s * 8), 60 * (idle_s + busy_s))  # it learns
    learned_bytes, pack = link.late_bytes, max(4 * link.piece, int(rate * idle_s * 4))
    assert link.send(pack, 60 * (idle_s + busy_s))
    assert link.late_bytes == learned_bytes


@few
@given(rates, st.lists(st.floats(0.95, 1.05), min_size=8, max_size=12), st.floats(0.02, 0.1))
def test_windows_that_differ_by_a_tenth_are_still_not_overrun(
    rate: float, by: list[float], busy_s: float
) -> None:
    spans = [span for factor in by for span in ((0.1 * factor, False), (busy_s, True))]
    link = Link(rate, spans)
    assert link.send(int(rate), 60.0)
    learned_bytes = link.late_bytes
    assert link.send(int(rate), 60.0)
    assert link.late_bytes == learned_bytes


@few
@given(rates, st.lists(st.floats(0.001, 0.1), min_size=1, max_size=12), st.floats(0.01, 0.05))
def test_whatever_the_windows_are_the_training_waits_for_little_behind_a_pack(
    rate: float, idle: list[float], busy_s: float
) -> None:
    link = Link(rate, [span for idle_s in idle for span in ((idle_s, False), (busy_s, True))])
    link.send(int(rate / 4), 5.0)
    assert link.latest_bytes <= 2 * max(link.piece, rate * 0.005)


def test_nothing_goes_while_the_training_sends_without_a_pause() -> None:
    link = Link(1.25e9, [(1e9, True)])
    assert not link.send(PIECE, 5.0)
    assert link.queued == 0.0


def test_traffic_of_others_that_is_next_to_nothing_holds_nothing_up() -> None:
    windows, now_s, sent, went = IdleWindows(), 0.0, 0, 0
    for _ in range(100):
        windows.look(Counters(now_s, sent, went * PIECE, 0))
        went += windows.take(PIECE) == "go"
        now_s += LOOK_S
        sent += PIECE + 1000 if went * PIECE > sent else 1000  # 0.5 MB/s
    assert went > 80


def test_own_bytes_that_leave_the_host_a_look_later_are_not_taken_for_anothers() -> None:
    windows = IdleWindows()
    for look in range(6):
        windows.look(Counters(look * LOOK_S, 0, 0, 0))
    assert windows.take(PIECE) == "go"
    windows.look(Counters(6 * LOOK_S, 0, PIECE, PIECE))
    windows.look(Counters(7 * LOOK_S, PIECE, PIECE, 0))
    assert windows.take(PIECE) == "go"


def test_a_pause_between_looks_is_no_window() -> None:
    link = Link(1.25e9, [(0.1, False), (0.02, True)])
    for _ in range(20):
        link.windows.look(link.counters())
        for _ in range(170):  # far apart: what was between is not known
            link.tick()
    assert link.windows.windows_s == ()


@given(st.lists(st.tuples(st.integers(0, 1 << 30), st.integers(0, 1 << 30)), max_size=200))
def test_whatever_the_counters_say_it_keeps_within_its_memory(
    sent: list[tuple[int, int]],
) -> None:
    windows, total, own = IdleWindows(), 0, 0
    for number, (others, mine) in enumerate(sent):
        total, own = total + others, own + mine
        windows.look(Counters(number * LOOK_S, total, own, mine))
        windows.take(PIECE)
        assert len(windows.windows_s) <= 64
        assert windows.bytes_per_s >= 0.0
