"""A command with all that it starts: found, signalled, ended, whatever groups they are in.

A launcher gives each rank a session of its own, so a signal to the launcher's group does not
reach them, and a launcher that is killed leaves them behind. So this process takes in the
orphans of what it starts, and finds everybody by parentage. Persister processes are left
alone: they outlive their trainers by design and end by themselves.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from asymcheck.memory.process import ProcessId
from asymcheck_lab.errors import LabError

_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.05
_KILL_S = 10.0
_PERSISTER = b"asymcheck.persist"


def adopt_orphans() -> None:
    """Become the parent of whatever the processes that this one starts leave behind.

    Raises:
        LabError: The kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise LabError(f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(ctypes.get_errno())}")


def descendants(of: int) -> list[ProcessId]:
    """Living processes below one, persisters and what is below them left out; nearest first."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            children.setdefault(_parent_of(int(name)), []).append(int(name))
    found: list[ProcessId] = []
    below = [of]
    while below:
        for pid in children.get(below.pop(0), ()):
            process = ProcessId.of(pid)
            if process.start and not _is_persister(pid):
                found.append(process)
                below.append(pid)
    return found


def reap(spare: int) -> None:
    """Wait for orphans that have ended, so that none stays as a zombie.

    Args:
        spare: A child that somebody else waits for.
    """
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != spare and _parent_of(int(name)) == os.getpid():
            with suppress(ChildProcessError):
                os.waitpid(int(name), os.WNOHANG)


def end_all(first: Callable[[], None], grace_s: float, spare: int) -> list[int]:
    """End everything below this process but persisters; blocks for ``grace_s`` and 10 s at most.

    Args:
        first: Asks them to end, as by SIGTERM; what is left after ``grace_s`` gets SIGKILL.
        grace_s: How long they get.
        spare: A child that the caller waits for itself.

    Returns:
        Processes that not even SIGKILL ended: they hang in the kernel.
    """
    first()
    if not _gone_within(grace_s, spare):
        for process in descendants(os.getpid()):
            send(process, signal.SIGKILL)
        _gone_within(_KILL_S, spare)
    return [process.pid for process in descendants(os.getpid())]


def send(process: ProcessId, number: signal.Signals) -> None:
    """A signal to one process, if it is there still."""
    if process.is_alive:
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)


def _gone_within(limit_s: float, spare: int) -> bool:
    until_s = time.monotonic() + limit_s
    while descendants(os.getpid()):
        reap(spare)
        if time.monotonic() > until_s:
            return False
        time.sleep(_POLL_S)
    return True


def _parent_of(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return int(text.rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return 0


def _is_persister(pid: int) -> bool:
    try:
        return _PERSISTER in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
