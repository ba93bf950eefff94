"""What becomes of a Checkpointer that nobody closed: collected, made again, or there at exit.

Only weak references to it are kept here, and strong ones to what it started: slots, threads, a
persister process. Whichever way it ends, what was sealed becomes durable first.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import weakref
from time import monotonic
from typing import Protocol

from asymcheck.errors import CheckpointError

_log = logging.getLogger(__name__)


class Closes(Protocol):
    """What can be closed within a time."""

    def close(self, timeout_s: float) -> bool:
        """Finish what is under way; returns whether that was in time."""
        ...


class Works(Closes, Protocol):
    """What a Checkpointer started."""

    @property
    def copier(self) -> Closes:
        """Copies without the training thread; closed first."""
        ...


class Owner(Protocol):
    """A Checkpointer."""

    def _end(self) -> object:
        """Drain, and give everything back, without waiting for other ranks: they may go on."""
        ...

    def _forget(self) -> None:
        """Let go of what it started, which is closed."""
        ...


class Ending:
    """Watches over one Checkpointer that has started something, until ``over``.

    A collected one is closed by a thread of its own: the collector may run on any thread, in the
    middle of anything, and so must not wait.

    Args:
        owner: The Checkpointer.
        run: Id of the run that it writes.
        works: What it started.
        grace_s: How long closing may take.
    """

    def __init__(self, owner: Owner, run: str, works: Works, grace_s: float) -> None:
        self.run = run
        self.owner = weakref.ref(owner)
        self._works = works
        self._grace_s = grace_s
        self._pid = os.getpid()
        self._orders: queue.SimpleQueue[bool] = queue.SimpleQueue()  # may be put by a collector
        self._collected = weakref.finalize(owner, self._orders.put, True)
        self._collected.atexit = False
        self._thread = threading.Thread(target=self._run, name="asymcheck-ending", daemon=True)
        self._thread.start()
        _endings.append(self)

    @property
    def is_ours(self) -> bool:
        """Whether it is this process's, and not that of one that forked it."""
        return self._pid == os.getpid()

    def over(self) -> None:
        """It was closed by whoever had it."""
        if self._collected.detach() is not None:
            _endings.remove(self)
            self._orders.put(False)

    def settle(self) -> bool:
        """Close it for another Checkpointer, or wait for the thread that does; returns whether
        that was in time.
        """
        owner = self.owner()
        if owner is None:
            self._thread.join(self._grace_s)
            return not self._thread.is_alive()
        in_time = self._works.close(self._grace_s)
        owner._forget()
        self.over()
        return in_time

    def _run(self) -> None:
        if not self._orders.get() or not self.is_ours:
            return
        until_s = monotonic() + self._grace_s
        try:
            # First the copy: then sealing neither waits nor races with an update.
            in_time = self._works.copier.close(self._grace_s)
            if not self._works.close(max(0.0, until_s - monotonic())) or not in_time:
                _log.error("a Checkpointer that nobody closed had saves left after its grace_s")
        except CheckpointError:
            _log.exception("closing a Checkpointer that nobody closed")
        finally:
            _endings.remove(self)


_endings: list[Ending] = []


def settle_others(me: Owner, run: str, where: str) -> list[str]:
    """Close every other Checkpointer of this process that writes the run; blocks.

    Args:
        me: The one that writes it from now on.
        run: Id of the run.
        where: Its root, for messages.

    Returns:
        What the user should know: of those that were collected nobody misses anything.
    """
    said = []
    for ending in [e for e in _endings if e.run == run and e.is_ours]:
        owner = ending.owner()
        if owner is me:
            continue
        in_time = ending.settle()
        if owner is not None:
            said.append(
                f"another Checkpointer of this process had {where} open: it was closed"
                + ("" if in_time else ", and saves of it are still pending after its grace_s")
                + "; close() each, or keep using one"
            )
    return said


@atexit.register
def close_all() -> None:
    """Close what the script did not close, at the exit of the interpreter."""
    for ending in [e for e in reversed(_endings) if e.is_ours]:
        owner = ending.owner()
        try:
            if owner is not None:
                owner._end()
            else:
                ending.settle()
        except CheckpointError as failure:
            _log.error("at exit: %s", failure)
