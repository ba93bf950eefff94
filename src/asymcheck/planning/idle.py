"""When the training leaves a network link idle, and how much fits into an idle window.

After Gemini's traffic interleaving (Wang et al., SOSP 2023, section 5): idle windows between the
training's transfers repeat from step to step, so those of the last steps tell how long the present
one lasts, and only a share of it is filled. Gemini lays its windows out once, by hooks in the
training. Here whoever sends sees no more than counters: what the host sent over the link, and
what of it was its own. So the present window is told by how long it has lasted already: among the
known ones only the longer ones are left.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Literal

LOOK_S = 0.002
"""Between two looks at the counters while something is to be sent, seconds."""
_LONGEST_LOOK_S = 25 * LOOK_S
_SETTLED_S = 2 * LOOK_S
_SHARE = 0.7
_OUTLAST = 1.2
_KNOWN = 64
_FEWEST = 4
_BUSY_SHARE = 0.05
_BUSY_BYTES_PER_S = 1e6
_OWN_HEADERS = 0.06
_AHEAD_S = 0.005
_LEAST_BYTES = 1 << 18
_MOST_BYTES = 1 << 26
_LEARNING = 0.2

Verdict = Literal["go", "held", "queued"]
"""``held`` until others leave the link idle for long enough; ``queued`` until what was given before
has gone.
"""


@dataclass(frozen=True, slots=True)
class Counters:
    """What is seen of a link at one time.

    Attributes:
        at_s: When, on any clock that never goes back.
        sent_bytes: What the host sent over the link so far, whoever sent it.
        own_bytes: What of that the one who asks has sent.
        queued_bytes: What it gave to be sent and what has not arrived yet.
    """

    at_s: float
    sent_bytes: int
    own_bytes: int
    queued_bytes: int


class IdleWindows:
    """Tells how many bytes may be given to a link now. Pure arithmetic; one thread at a time.

    The link is busy where others send more than a twentieth of what it can carry. An idle window
    is used once it has lasted two looks. How long it lasts is the lower quartile of the known
    windows that it has not outlasted by a fifth, and 0.7 of that is filled. Where it has outlasted
    all that are known, or nearly none are, it is used as long as nothing is seen of others. At
    most one piece, or 5 ms of the link, is given ahead: what the training sends next waits no
    longer than for that.

    Attributes:
        bytes_per_s: What the link carries when it carries the asker's bytes alone; 0 while that
            is not known.
    """

    def __init__(self) -> None:
        self.bytes_per_s = 0.0
        self._last: Counters | None = None
        self._idle_since_s: float | None = None
        self._saw_begin = False
        self._known: deque[float] = deque(maxlen=_KNOWN)
        self._ahead_bytes = _LEAST_BYTES
        self._given_bytes = 0
        self._is_short = False
        self._queued_bytes = 0
        self._fit_bytes = 0.0
        self._others_bytes = 0.0
        self._own_before_bytes = 0

    @property
    def windows_s(self) -> tuple[float, ...]:
        """How long the latest idle windows lasted that were seen from begin to end."""
        return tuple(self._known)

    def is_due(self, now_s: float) -> bool:
        """Whether it is time for a look."""
        return self._last is None or now_s - self._last.at_s >= LOOK_S

    def look(self, now: Counters) -> None:
        """Take in what the counters say. A late look tells nothing of what was between."""
        last, self._last = self._last, now
        self._see(last, now)
        self._given_bytes, self._is_short = 0, False
        self._queued_bytes = now.queued_bytes
        self._fit_bytes = self._fits(now.at_s)

    def take(self, nbytes: int) -> Verdict:
        """Whether so many bytes may go now; then they count as given."""
        after_bytes = self._queued_bytes + self._given_bytes + nbytes
        if after_bytes > self._fit_bytes:
            return "held"
        # A piece larger than what may be ahead goes alone.
        if after_bytes > max(self._ahead_bytes, nbytes):
            self._is_short = True
            return "queued"
        self._given_bytes += nbytes
        return "go"

    def _see(self, last: Counters | None, now: Counters) -> None:
        if last is None or now.at_s - last.at_s > _LONGEST_LOOK_S:
            self._idle_since_s, self._saw_begin, self._others_bytes = now.at_s, False, 0.0
            return
        span_s = now.at_s - last.at_s
        if span_s <= 0.0:
            return
        own_bytes = now.own_bytes - last.own_bytes
        is_busy = self._is_busy(now.sent_bytes - last.sent_bytes, own_bytes, span_s)
        if not is_busy:
            self._learn(own_bytes, now.queued_bytes, span_s)
        if not is_busy and self._idle_since_s is None:
            self._idle_since_s, self._saw_begin = now.at_s, True
        elif is_busy and self._idle_since_s is not None:
            lasted_s = last.at_s - self._idle_since_s
            if self._saw_begin and lasted_s >= _SETTLED_S:
                self._known.append(lasted_s)
            self._idle_since_s = None

    def _is_busy(self, sent_bytes: int, own_bytes: int, span_s: float) -> bool:
        """Whether others sent, by the bytes of one look."""
        # Own bytes are counted when they leave the socket, and all bytes when they leave the host:
        # what is between the two must not be taken for somebody else's a look later.
        balance = self._others_bytes + sent_bytes - own_bytes
        self._others_bytes = max(-float(own_bytes + self._own_before_bytes), min(0.0, balance))
        self._own_before_bytes = own_bytes
        slight = max(_BUSY_BYTES_PER_S, _BUSY_SHARE * self.bytes_per_s) * span_s
        return balance > slight + _OWN_HEADERS * own_bytes

    def _learn(self, own_bytes: int, queued_bytes: int, span_s: float) -> None:
        """How fast the link is, by a look in which it carried own bytes alone."""
        if own_bytes == 0:
            return
        if queued_bytes > 0:  # it was never without work
            seen = own_bytes / span_s
            known = self.bytes_per_s or seen
            self.bytes_per_s = known + _LEARNING * (seen - known)
            self._ahead_bytes = int(_AHEAD_S * self.bytes_per_s)
        elif self._is_short:  # all of it went, and more would have
            self._ahead_bytes *= 2
            self.bytes_per_s = max(self.bytes_per_s, own_bytes / span_s)
        self._ahead_bytes = min(_MOST_BYTES, max(_LEAST_BYTES, self._ahead_bytes))

    def _fits(self, now_s: float) -> float:
        """How many bytes the present window still carries, as far as it is to be filled."""
        if self._idle_since_s is None or now_s - self._idle_since_s < _SETTLED_S:
            return 0.0
        lasted_s = now_s - self._idle_since_s
        longer = sorted(s for s in self._known if s * _OUTLAST > lasted_s)
        if not longer or len(self._known) < _FEWEST or not self.bytes_per_s:
            return math.inf
        return (_SHARE * longer[len(longer) // 4] - lasted_s) * self.bytes_per_s
