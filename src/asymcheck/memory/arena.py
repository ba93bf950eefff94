"""A bounded number of reusable slots, each large enough for one image of the state."""

from __future__ import annotations

import mmap
import threading


class Slot:
    """Memory for one image. Owned by whoever reserved it, until ``Arena.free``.

    Attributes:
        view: The bytes, at least as many as were asked for.
    """

    def __init__(self) -> None:
        self.view = memoryview(b"")

    def grow(self, nbytes: int) -> None:
        """Make room for ``nbytes``; the content is undefined after."""
        if self.view.nbytes < nbytes:
            self.view = memoryview(b"")  # let the old map go before a larger one is made
            self.view = memoryview(mmap.mmap(-1, nbytes))


class Arena:
    """``slots`` slots that are made once and reused; never more memory than they hold.

    Args:
        slots: How many images may be held at once.
    """

    def __init__(self, slots: int) -> None:
        self._free = [Slot() for _ in range(slots)]
        self._changed = threading.Condition()

    def reserve(self, timeout_s: float | None = None) -> Slot | None:
        """A free slot; blocks while there is none.

        Args:
            timeout_s: How long at most; ``None`` without end.

        Returns:
            The slot, or ``None`` when the time is over.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self._free), timeout_s):
                return None
            return self._free.pop()

    def free(self, slot: Slot) -> None:
        """Give a slot back; any thread may."""
        with self._changed:
            self._free.append(slot)
            self._changed.notify()
