"""SIGTERM in a training of several ranks: remembered until all of them have saved."""

from __future__ import annotations

import signal
import threading
import weakref
from types import FrameType


class Termination:
    """Takes SIGTERM where nobody else does: a handler of the user's own, or of the framework's,
    stays. A second one ends the process at once. Made, and used, by the training thread.

    Args:
        owner: Whoever looks at it; once that is no more, SIGTERM ends the process at once.
        wanted: Whether to take it at all.
    """

    def __init__(self, owner: object, wanted: bool) -> None:
        self._owner = weakref.ref(owner)
        self.asked = False
        """Whether the process was asked to end."""
        self._ours = (
            wanted
            and threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        )
        if self._ours:
            signal.signal(signal.SIGTERM, self._note)

    def over(self) -> None:
        """Take it no more; what came meanwhile ends the process now."""
        if not self._ours:
            return
        self._ours = False
        if signal.getsignal(signal.SIGTERM) == self._note:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self.asked:
            signal.raise_signal(signal.SIGTERM)

    def _note(self, number: int, frame: FrameType | None) -> None:
        again, self.asked = self.asked or self._owner() is None, True
        if again:
            self.over()
