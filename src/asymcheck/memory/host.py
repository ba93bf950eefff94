"""What the host, the container and the job give: file systems, memory and cores."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

Read = Callable[[str], str]
"""Content of a file of the kernel, empty where there is none."""

UNLIMITED_BYTES = 1 << 62
"""Nothing says how much; the kernel writes numbers of this size for 'no limit' too."""

_ESCAPE = re.compile(r"\\([0-7]{3})")


def read_text(path: str) -> str:
    """The content of a small file, empty where it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of ``/proc/self/mountinfo``.

    Attributes:
        root: What of the file system is mounted.
        point: Where.
        kind: Type of the file system.
        options: Of the mount and of the file system.
    """

    root: str
    point: str
    kind: str
    options: tuple[str, ...]


def mounts(read: Read = read_text) -> list[Mount]:
    """What is mounted for this process, in the order in which it was."""
    found = []
    for line in read("/proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        first, last = before.split(" "), after.split(" ")
        if len(first) >= 6 and len(last) >= 3:
            options = (*first[5].split(","), *last[2].split(","))
            found.append(Mount(_unescape(first[3]), _unescape(first[4]), last[0], options))
    return found


def mount_of(path: str, read: Read = read_text) -> Mount | None:
    """The file system that holds ``path``, an absolute path without links."""
    best = None
    for mount in mounts(read):
        if _inside(path, mount.point) and (best is None or len(mount.point) >= len(best.point)):
            best = mount  # of several on one place the last one is seen
    return best


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """What a control group may use.

    Attributes:
        where: Its directory.
        limit_bytes: The limit.
        used_bytes: Used of it, without page cache that is given back when memory is short.
    """

    where: str
    limit_bytes: int
    used_bytes: int

    @property
    def room_bytes(self) -> int:
        """What is left."""
        return max(0, self.limit_bytes - self.used_bytes)


def memory_limits(read: Read = read_text) -> list[MemoryLimit]:
    """Limits of the control groups of this process, from its own up to the outermost one."""
    found = []
    for directory, is_v2 in _groups("memory", read):
        names = _V2 if is_v2 else _V1
        limit = _number(read(f"{directory}/{names[0]}"))
        used = _number(read(f"{directory}/{names[1]}"))
        if limit is not None and used is not None and limit < UNLIMITED_BYTES:
            # Without this a job that reads its data from files would soon seem to be full.
            cache = sum(_fields(read(f"{directory}/memory.stat"), names[2:]))
            found.append(MemoryLimit(directory, limit, max(0, used - cache)))
    return found


_V2 = ("memory.max", "memory.current", "inactive_file", "active_file")
_V1 = (
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "total_inactive_file",
    "total_active_file",
)


def available_bytes(read: Read = read_text) -> int:
    """Memory that can still be taken on this host, in this container and in this job."""
    room = UNLIMITED_BYTES
    for kib in _fields(read("/proc/meminfo").replace(":", ""), ("MemAvailable",)):
        room = kib * 1024
    return min([room, *(limit.room_bytes for limit in memory_limits(read))])


def usable_cores() -> int:
    """Cores that this process may use; all of the machine where the system does not tell."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def core_limit(read: Read = read_text) -> float | None:
    """Cores' worth of time that the control groups of this process allow, if they limit it."""
    quotas = []
    for directory, is_v2 in _groups("cpu", read):
        if is_v2:
            words = read(f"{directory}/cpu.max").split()
        else:
            words = [read(f"{directory}/cpu.cfs_{name}_us") for name in ("quota", "period")]
        numbers = [value for value in map(_number, words) if value]
        if len(numbers) == 2:
            quotas.append(numbers[0] / numbers[1])
    return min(quotas, default=None)


def _groups(controller: str, read: Read) -> Iterator[tuple[str, bool]]:
    """Directories of the control groups of this process, its own first; and whether they are
    of the second version.
    """
    mounted = mounts(read)
    for line in read("/proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        is_v2 = not controllers
        if not is_v2 and controller not in controllers.split(","):
            continue
        for mount in mounted:
            if mount.kind != ("cgroup2" if is_v2 else "cgroup"):
                continue
            if not is_v2 and controller not in mount.options:
                continue
            # Seen from inside a container, the path may be the host's: then what is mounted
            # is the group itself.
            inside = os.path.relpath(path, mount.root) if _inside(path, mount.root) else "."
            directory = mount.point
            above = [directory]
            for part in inside.split("/"):
                if part not in (".", ".."):
                    directory = f"{directory}/{part}"
                    above.append(directory)
            yield from ((group, is_v2) for group in reversed(above))


def _inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _fields(text: str, names: tuple[str, ...]) -> Iterator[int]:
    for line in text.splitlines():
        name, _, rest = line.partition(" ")
        if name in names:
            value = _number(rest.split()[0] if rest.split() else "")
            if value is not None:
                yield value


def _number(text: str) -> int | None:
    stripped = text.strip()
    return int(stripped) if stripped.isascii() and stripped.isdigit() else None


def _unescape(text: str) -> str:
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)
