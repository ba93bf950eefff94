"""What a look at the machine found, and what is asked of the machine for it. No torch."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from asymcheck.handover import LeftOver, left_over
from asymcheck.memory.arena import SHARED_MEMORY, capacity_for
from asymcheck.memory.host import read_text, usable_cores
from asymcheck.planning.layout import PAGE_BYTES
from asymcheck.rendering import size_text
from asymcheck.storage.local import Files


class Level(StrEnum):
    """How good it is."""

    OK = "ok"
    WARN = "warn"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: What it is.
        level: How good it is.
        found: What was found.
        change: What to do about it; empty where nothing needs to be done.
    """

    name: str
    level: Level
    found: str
    change: str = ""


@dataclass(frozen=True, slots=True)
class Demand:
    """What the saves of a run take, as far as its newest checkpoint tells.

    Attributes:
        image_bytes: Size of one; ``None`` where there is no checkpoint.
        packs: Number of its packs.
        own_bytes: What slots of the run hold already.
    """

    image_bytes: int | None = None
    packs: int = 0
    own_bytes: int = 0

    @property
    def slot_bytes(self) -> int | None:
        """What one slot takes."""
        return None if self.image_bytes is None else capacity_for(self.image_bytes, 0)

    @property
    def text(self) -> str:
        """For people: what a save takes."""
        return "" if self.slot_bytes is None else f"; a save takes {size_text(self.slot_bytes)}"


class Host:
    """What is asked of the machine; tests answer in its place."""

    shared_memory = SHARED_MEMORY
    files = Files()

    def read(self, path: str) -> str:
        """A file of the kernel, empty where there is none."""
        return read_text(path)

    def exists(self, path: str) -> bool:
        """Whether there is such a file."""
        return os.path.exists(path)

    def real(self, path: Path) -> str:
        """The path without links."""
        return os.path.realpath(path)

    def statvfs(self, path: Path) -> os.statvfs_result:
        """Size and room of a file system."""
        return os.statvfs(path)

    def limit(self, which: int) -> tuple[int, int]:
        """Soft and hard limit of this process."""
        return resource.getrlimit(which)

    def cores(self) -> tuple[int, int]:
        """Cores of the machine, and those that this process may use."""
        return os.cpu_count() or 1, usable_cores()

    def version(self, package: str) -> str | None:
        """Installed version of a package, ``None`` where there is none."""
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    def python(self) -> str:
        """Version of Python."""
        return platform.python_version()

    def try_pidfd(self) -> None:
        """Open a descriptor of a process."""
        os.close(os.pidfd_open(os.getpid()))

    def try_memfd(self) -> None:
        """Make memory without a name."""
        os.close(os.memfd_create("asymcheck-doctor", os.MFD_CLOEXEC))

    def try_shared(self) -> None:
        """Reserve a page of shared memory, without leaving a name behind."""
        fd = os.open(self.shared_memory, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, PAGE_BYTES)
        finally:
            os.close(fd)

    def sync_directory(self, path: Path) -> None:
        """Make the names in a directory durable."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def left_over(self) -> list[LeftOver]:
        """Slots of dead trainers of this user."""
        return left_over(None, self.shared_memory)


def attempt(
    name: str, action: Callable[[], None], works: str, level: Level, without: str, change: str
) -> Finding:
    """Try something.

    Args:
        name: What it is.
        action: Raises where it does not work.
        works: Found where it does.
        level: How bad it is where it does not.
        without: What that means.
        change: What to do then.
    """
    try:
        action()
    except (OSError, AttributeError) as failure:
        why = getattr(failure, "strerror", None) or "not in this Python"
        return Finding(name, level, f"{without} ({why})", change)
    return Finding(name, Level.OK, works)
