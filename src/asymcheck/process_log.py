"""What a child process writes, kept to be quoted when it fails."""

from __future__ import annotations

import os
from pathlib import Path

_TAIL_BYTES = 2000


class ProcessLog:
    """Where a persister process writes what it has to say."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._fd = -1
        self._start = 0

    def open(self) -> int:
        """A descriptor for a process that starts now; ``tail`` shows what it writes."""
        if self._path is not None:
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            fd = os.open(self._path, flags, 0o644)
        else:
            fd = os.memfd_create("asymcheck-log")
        self.close()
        self._fd, self._start = fd, os.fstat(fd).st_size
        return fd

    def tail(self) -> str:
        """A clause that quotes the end of what the latest process wrote."""
        where = f"its log {self._path}" if self._path else "its log"
        if self._fd < 0:
            return f"{where} could not be opened"
        size = os.fstat(self._fd).st_size
        start = max(self._start, size - _TAIL_BYTES)
        text = os.pread(self._fd, size - start, start).decode(errors="replace").strip()
        return f"{where} ends with:\n{text}" if text else f"{where} is empty"

    def close(self) -> None:
        """Give the descriptor back; a process that has it keeps its own."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
