"""Who holds a file: seen from any container, and let go of by the kernel at a process's end.

A process number means nothing outside of its own namespace, while shared memory may be mounted
in several. So who works with a slot holds a lock on one byte of it. The lock belongs to an open
file of its own (``F_OFD_SETLK``), which no child inherits: neither a fork nor another program.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import weakref
from enum import IntEnum
from pathlib import Path

_FLOCK = "hhqqi4x"  # struct flock: type, whence, start, length, process
_NOT_HERE = {errno.EINVAL, errno.ENOSYS, errno.ENOLCK, errno.ENOENT, errno.EACCES}


class Part(IntEnum):
    """What a process does with a slot; each locks the byte of its number."""

    OWNER = 0
    PERSISTER = 1


class Hold:
    """Says that this process works with a file, until ``release`` or its end.

    Where the system has no such lock nothing is held, and process numbers alone must do.

    Args:
        fd: A descriptor of the file; the hold opens the file once more.
        part: As what.

    Raises:
        OSError: There are no more descriptors.
    """

    def __init__(self, fd: int, part: Part) -> None:
        self._fd = -1
        try:
            self._fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _lock(fcntl.F_RDLCK, part))
        except OSError as failure:
            self.release()
            if failure.errno not in _NOT_HERE:
                raise
        _holds.add(self)

    def release(self) -> None:
        """Let go; again does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def is_held(path: Path, part: Part) -> bool:
    """Whether a living process, of this or of another container, works with the file so."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _lock(fcntl.F_WRLCK, part))
    except OSError:
        return False
    finally:
        os.close(fd)
    return bool(struct.unpack(_FLOCK, found)[0] != fcntl.F_UNLCK)


def _lock(kind: int, part: Part) -> bytes:
    return struct.pack(_FLOCK, kind, os.SEEK_SET, part, 1, 0)


_holds: weakref.WeakSet[Hold] = weakref.WeakSet()


def _let_go() -> None:
    for hold in list(_holds):
        hold.release()


os.register_at_fork(after_in_child=_let_go)
