"""Forked children for tests: they tell what they do line by line, and nobody waits for ever."""

from __future__ import annotations

import json
import os
import select
import signal
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any

TIMEOUT_S = 60.0
_FAILED = 70

Say = Callable[[Any], None]
"""Sends one JSON value to the parent, at once: what was said survives SIGKILL."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a child ended.

    Attributes:
        status: Its exit code; the negative number of the signal that ended it.
        said: What it said, in order.
        error: The traceback, where an exception ended it.
    """

    status: int
    said: list[Any]
    error: str = ""

    @property
    def was_killed(self) -> bool:
        """Whether SIGKILL ended it."""
        return self.status == -signal.SIGKILL

    def check(self) -> list[Any]:
        """What it said, when it ended well.

        Raises:
            AssertionError: It did not.
        """
        if self.status != 0:
            raise AssertionError(f"the child ended with status {self.status}\n{self.error}")
        return self.said


class Child:
    """A fork of this process that runs ``work`` and ends, whatever happens in it.

    Only the calling thread lives on in the child. A caller that uses torch sets its number
    of threads to 1 first: a fork does not inherit a thread pool.

    Args:
        work: Gets ``say``. Its return value is dropped.
    """

    def __init__(self, work: Callable[[Say], object]) -> None:
        self._reading, writing = os.pipe()
        with warnings.catch_warnings():
            # Newer Pythons warn of a fork beside threads; the child touches none of theirs.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            _run(work, writing)
        os.close(writing)
        self._watch = os.pidfd_open(self.pid)
        self._heard = bytearray()

    def kill(self) -> None:
        """SIGKILL."""
        signal.pidfd_send_signal(self._watch, signal.SIGKILL)

    def hear(self, timeout_s: float = TIMEOUT_S) -> Any:  # noqa: ANN401
        """The next thing that it says; blocks.

        Raises:
            AssertionError: It ended, or stayed silent for too long.
        """
        until_s = monotonic() + timeout_s
        while b"\n" not in self._heard:
            if not self._read(until_s - monotonic()):
                raise AssertionError("the child said nothing more")
        line, _, self._heard = self._heard.partition(b"\n")
        return json.loads(line)

    def wait(self, timeout_s: float = TIMEOUT_S) -> Outcome:
        """Wait for its end; one that takes too long is killed.

        Raises:
            AssertionError: It took too long.
        """
        until_s = monotonic() + timeout_s
        while True:
            both = [self._reading, self._watch]
            ready = select.select(both, [], [], max(0.0, until_s - monotonic()))[0]
            # Once it has ended nothing more comes, though a fork of it may hold the pipe.
            if self._reading not in ready or not self._read(0.0):
                break
        left_s = max(0.0, until_s - monotonic())
        in_time = bool(select.select([self._watch], [], [], left_s)[0])
        if not in_time:
            self.kill()
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self._watch)
        os.close(self._reading)
        if not in_time:
            raise AssertionError(f"the child was still running after {timeout_s} seconds")
        # A line that SIGKILL cut short was not said.
        lines = [json.loads(line) for line in self._heard.split(b"\n")[:-1]]
        error = lines.pop()["error"] if status == _FAILED and lines else ""
        return Outcome(status, lines, error)

    def _read(self, timeout_s: float) -> bool:
        ready = select.select([self._reading], [], [], max(0.0, timeout_s))[0]
        data = os.read(self._reading, 1 << 16) if ready else b""
        self._heard += data
        return bool(data)


def run_in_child(work: Callable[[Say], object], timeout_s: float = TIMEOUT_S) -> Outcome:
    """Run ``work`` in a fork of this process and wait for its end."""
    return Child(work).wait(timeout_s)


def _run(work: Callable[[Say], object], writing: int) -> None:
    def say(value: Any) -> None:  # noqa: ANN401
        line = memoryview(json.dumps(value).encode() + b"\n")
        while line:
            line = line[os.write(writing, line) :]

    status = _FAILED
    try:
        work(say)
        status = 0
    except BaseException:  # noqa: BLE001  nothing may return into the parent's test run
        say({"error": traceback.format_exc()})
    finally:
        os._exit(status)
