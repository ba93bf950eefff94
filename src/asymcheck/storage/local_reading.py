"""Reading a file of a directory that is a store: through the page cache, or past it."""

from __future__ import annotations

import errno
import mmap
import os
import stat
import threading
from contextlib import suppress
from pathlib import Path

from asymcheck.errors import ObjectNotFound, StoreError
from asymcheck.planning.layout import PAGE_BYTES

_AT_ONCE_BYTES = 1 << 20
"""What is as long as this is fetched at once."""

_BUFFER_BYTES = 4 << 20
_TRANSIENT = {errno.EINTR, errno.EAGAIN, errno.EBUSY, errno.ESTALE, errno.ETIMEDOUT}


class OpenFile:
    """An open file; see ``Readable`` and ``ReadsOnce``.

    Args:
        path: Its path, for messages and to be opened once more.
        fd: Opened for reading; the caller closes it.

    Raises:
        FileNotFoundError: It is no file.
    """

    def __init__(self, path: Path, fd: int) -> None:
        self._path = path
        self._fd = fd
        self._next = 0
        self._buffers: list[mmap.mmap] = []
        self._direct_fd: int | None = None
        self._opening = threading.Lock()
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise FileNotFoundError(errno.ENOENT, "not a file")
        self.nbytes = found.st_size

    def close(self) -> None:
        """Give back what ``read_once`` took."""
        self._buffers.clear()
        if self._direct_fd is not None:
            os.close(self._direct_fd)
            self._direct_fd = None

    def readinto(self, offset: int, into: memoryview) -> None:
        """See ``Readable``."""
        into = into.cast("B")
        if len(into) >= _AT_ONCE_BYTES and hasattr(os, "posix_fadvise"):
            # Else the kernel fetches it in small steps, each when the one before was read. Who
            # reads one range after the other finds the next one fetched meanwhile.
            ahead = len(into) if offset == self._next else 0
            self._next = offset + len(into)
            with suppress(OSError):
                os.posix_fadvise(self._fd, offset, len(into) + ahead, os.POSIX_FADV_WILLNEED)
        self._read(offset, into)

    def read_once(self, offset: int, into: memoryview) -> None:
        """See ``ReadsOnce``."""
        into = into.cast("B")
        direct = self._open_direct() if len(into) >= _AT_ONCE_BYTES else None
        if direct is None:
            self.readinto(offset, into)
            return
        done = 0
        try:
            buffer = self._buffers.pop()
        except IndexError:  # asked and taken in one step, since several threads may read
            buffer = _new_buffer()
        while done < len(into):
            at = offset + done
            before = at % PAGE_BYTES
            wanted = min(_BUFFER_BYTES, -(-(before + len(into) - done) // PAGE_BYTES) * PAGE_BYTES)
            try:
                got = os.preadv(direct, [memoryview(buffer)[:wanted]], at - before) - before
            except OSError:
                got = 0  # this file system asks for more, or says better below what is wrong
            if got <= 0:
                break
            got = min(got, len(into) - done)
            into[done : done + got] = memoryview(buffer)[before : before + got]
            done += got
        self._buffers.append(buffer)
        self._read(offset + done, into[done:])

    def _open_direct(self) -> int | None:
        """The same file, to be read past the page cache; ``None`` where that cannot be done."""
        with self._opening:
            if self._direct_fd is None and hasattr(os, "O_DIRECT"):
                with suppress(OSError):
                    # The descriptor by its number: the name may be gone, or another file's by now.
                    mine = f"/proc/self/fd/{self._fd}"
                    self._direct_fd = os.open(mine, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
            return self._direct_fd

    def _read(self, offset: int, into: memoryview) -> None:
        done = 0
        while done < len(into):
            try:
                got = os.preadv(self._fd, [into[done:]], offset + done)
            except OSError as failure:
                raise store_error("read", self._path, failure) from failure
            if got == 0:
                raise StoreError(
                    f"read {self._path}: ended at byte {offset + done}, expected "
                    f"{len(into)} bytes from {offset}",
                    retryable=False,
                )
            done += got


def _new_buffer() -> mmap.mmap:
    """Memory that starts on a page, in large pages where there are some: those a device fills in
    few steps.
    """
    buffer = mmap.mmap(-1, _BUFFER_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A device that writes to a page while a fork shares it writes to one of the two alone.
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        with suppress(OSError, AttributeError):
            buffer.madvise(getattr(mmap, advice))
    return buffer


def store_error(action: str, path: Path, failure: OSError) -> StoreError:
    """What a failed system call means to a user of the store."""
    if isinstance(failure, FileNotFoundError) and action == "open":
        return ObjectNotFound(f"{action} {path}: not found")
    hints = {
        errno.ENOENT: "was the root moved, or a newer job started on it?",
        errno.ENOSPC: "the disk is full: free some space or lower keep_last; "
        "the next save works once there is room",
        errno.EDQUOT: "the quota is used up: free some space or lower keep_last",
        errno.EACCES: "no permission: check the owner and mode of the directory",
        errno.EROFS: "the file system is read-only: choose another directory",
        errno.ENOTDIR: "a file is where a directory should be: move it or choose another root",
    }
    hint = hints.get(failure.errno or 0, "")
    return StoreError(
        f"{action} {path}: {failure.strerror or failure}" + (f"; {hint}" if hint else ""),
        retryable=failure.errno in _TRANSIENT | {errno.ENOSPC, errno.EDQUOT},
    )
