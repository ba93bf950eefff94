"""What a machine and a root give to checkpoints: each look is one finding. No torch.

A finding is *bad* when saves fail or what is promised cannot be kept, *warn* when it works
with a limit that is named. Nothing is changed; what a look writes it removes.
"""

from __future__ import annotations

import importlib.metadata
import re
import resource
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from asymcheck.doctor_root import look_around, look_into
from asymcheck.findings import Demand, Finding, Host, Level, attempt
from asymcheck.memory.host import (
    UNLIMITED_BYTES,
    available_bytes,
    core_limit,
    memory_limits,
    mount_of,
)
from asymcheck.planning.layout import MiB
from asymcheck.planning.policy import Admission
from asymcheck.rendering import count_text, size_text
from asymcheck.storage.local import LocalStore
from asymcheck.storage.store import open_store

_CONTAINER_SHM_BYTES = 64 * MiB
_LITTLE_MEMORY_BYTES = 512 * MiB
_FEW_FILES = 1024
_OWN_FILES = 64
_ROOTS_SAID = 3
_PACKAGES = ("torch", "numpy", "xxhash")


def examine(root: str | None = None, host: Host | None = None) -> Iterator[Finding]:
    """Look at everything; blocks for what the disk takes.

    Args:
        root: A directory or URL; the current directory stands in where there is none, and
            nothing about it is bad then.
        host: The machine.

    Raises:
        OptionError: No store is known for the URL.
    """
    host = host or Host()
    store = open_store(root) if root is not None else None
    demand, at_root = Demand(), []
    if store is not None:
        demand, finding = look_into(store, host)
        at_root.append(finding)
    yield _python(host)
    for package in _PACKAGES:
        yield _package(package, host)
    yield _container(host)
    yield _cores(host)
    yield _memory(host, demand)
    yield _shared_memory(host, demand)
    yield _left_over(host)
    yield _open_files(host, demand)
    yield _file_size(host, demand)
    yield _locked_memory(host, demand)
    yield attempt(
        "pidfd_open",
        host.try_pidfd,
        "works",
        Level.WARN,
        "the end of a process is then looked for in /proc",
        "Linux 5.3 or newer, and a seccomp profile that allows it",
    )
    yield attempt(
        "memfd_create",
        host.try_memfd,
        "works",
        Level.WARN,
        "where shared memory is too small, each save blocks training",
        "a seccomp profile that allows it",
    )
    yield _processes(host)
    yield from at_root
    if isinstance(store, LocalStore):
        yield from look_around(store.root, host, demand)
    elif store is None:
        for found in look_around(Path.cwd(), host, demand):
            level = Level.WARN if found.level is Level.BAD else found.level
            yield Finding(found.name, level, found.found, found.change)


# --- software ---------------------------------------------------------------


def _python(host: Host) -> Finding:
    wanted = importlib.metadata.metadata("asymcheck")["Requires-Python"] or ""
    how = f"install Python {wanted.removeprefix('>=')} or newer"
    return _held_to("Python", host.python(), wanted, how)


def _package(package: str, host: Host) -> Finding:
    found = host.version(package)
    wanted = next(filter(None, (_wanted(r, package) for r in _requirements())), "")
    how = f"pip install '{package}{wanted}'"
    if found is None:
        return Finding(package, Level.BAD, "not installed", how)
    return _held_to(package, found, wanted, how)


def _requirements() -> Sequence[str]:
    return importlib.metadata.requires("asymcheck") or ()


def _wanted(requirement: str, package: str) -> str:
    """The range that a requirement without conditions asks for."""
    found = re.fullmatch(r"([A-Za-z0-9_.-]+)\s*\(?\s*(>=[^;)]*)\)?\s*", requirement)
    return found[2].strip() if found and found[1] == package else ""


def _held_to(name: str, found: str, wanted: str, how: str) -> Finding:
    least = wanted.removeprefix(">=")
    said = f"{found}, expected {least} or newer"
    if _release(found) >= _release(least):
        return Finding(name, Level.OK, said)
    return Finding(name, Level.BAD, said, how)


def _release(version: str) -> tuple[int, ...]:
    """The numbers at the start of a version: those of ``2.13.0+cpu`` are 2, 13 and 0."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


# --- the machine ------------------------------------------------------------


def _container(host: Host) -> Finding:
    signs = [path for path in ("/.dockerenv", "/run/.containerenv") if host.exists(path)]
    if host.exists("/var/run/secrets/kubernetes.io"):
        signs.append("Kubernetes secrets")
    groups = re.findall(r"docker|kubepods|libpod|containerd|lxc", host.read("/proc/self/cgroup"))
    signs += [f"control group of {name}" for name in sorted(set(groups))]
    top = mount_of("/", host.read)
    if top is not None and top.kind == "overlay":
        signs.append("/ is an overlay")
    if not signs:
        return Finding("container", Level.OK, "no sign of one")
    return Finding(
        "container",
        Level.OK,
        f"{', '.join(signs)}: what lies in shared memory, and outside of volumes, ends with it",
    )


def _cores(host: Host) -> Finding:
    there, usable = host.cores()
    share = core_limit(host.read)
    found = f"{usable} of {there}" + (f", limited to the time of {share:g}" if share else "")
    if min(usable, share or usable) >= 2:
        return Finding("cores", Level.OK, found)
    return Finding(
        "cores",
        Level.WARN,
        f"{found}: the persister takes its time from training",
        "give the job a second core",
    )


def _memory(host: Host, demand: Demand) -> Finding:
    room = available_bytes(host.read)
    if room == UNLIMITED_BYTES:
        return Finding("memory", Level.WARN, "/proc/meminfo says nothing", "mount /proc")
    found = f"{size_text(room)} available"
    limits = memory_limits(host.read)
    if limits:
        least = min(limits, key=lambda limit: limit.room_bytes)
        found += f", limit {size_text(least.limit_bytes)} of {least.where}"
    need = _need(demand)
    if room + demand.own_bytes >= (_LITTLE_MEMORY_BYTES if need is None else need):
        return Finding("memory", Level.OK, found + demand.text)
    return Finding(
        "memory",
        Level.WARN,
        f"{found}{demand.text}",
        "give the job more memory (slots in shared memory count): until then saves block training",
    )


def _need(demand: Demand) -> int | None:
    """What the default strategy's slots take together."""
    slot = demand.slot_bytes
    return None if slot is None else slot * Admission().max_in_flight


def _shared_memory(host: Host, demand: Demand) -> Finding:
    name, where = "shared memory", str(host.shared_memory)
    without = "saves use memory without a name, which a killed persister loses"
    try:
        host.try_shared()
        size = host.statvfs(host.shared_memory)
    except OSError as failure:
        return Finding(
            name,
            Level.WARN,
            f"{where} cannot be used ({failure.strerror}): {without}",
            f"mount a tmpfs on {where} that this user may write to",
        )
    whole, free = size.f_blocks * size.f_frsize, size.f_bavail * size.f_frsize
    mount = mount_of(host.real(host.shared_memory), host.read)
    kind = mount.kind if mount else "unknown"
    room = f"{size_text(whole)}, {size_text(free)} free" if whole else "without a limit"
    found = f"{where}: {kind}, {room}{demand.text}"
    if kind not in ("tmpfs", "ramfs"):
        return Finding(
            name, Level.WARN, f"{found}; it is not in memory", f"mount a tmpfs on {where}"
        )
    need = _need(demand)
    if not whole or (need is not None and free + demand.own_bytes >= need):
        return Finding(name, Level.OK, found)
    if need is None and whole > _CONTAINER_SHM_BYTES:
        return Finding(name, Level.OK, found)
    least = "the size of the state" if need is None else size_text(need)
    return Finding(
        name,
        Level.WARN,
        f"{found}; with too little {without}",
        f"give it {least} or more: docker run --shm-size, in Kubernetes an emptyDir with medium "
        f"Memory on {where}, elsewhere mount -o remount,size=",
    )


def _left_over(host: Host) -> Finding:
    slots = host.left_over()
    if not slots:
        return Finding("left-over slots", Level.OK, "none")
    nbytes = 0
    for slot in slots:
        with suppress(OSError):
            nbytes += slot.path.stat().st_size
    sealed = sum(slot.is_sealed for slot in slots)
    roots = sorted({slot.root for slot in slots if slot.is_sealed and slot.root}) or ["ROOT"]
    named = ", ".join(f"'asymcheck repair {root}'" for root in roots[:_ROOTS_SAID])
    return Finding(
        "left-over slots",
        Level.WARN,
        f"{count_text(len(slots), 'slot')} of dead trainers, {size_text(nbytes)}, {sealed} sealed",
        f"start the job again, or {named} to make what is sealed durable; 'asymcheck repair' "
        f"lists them",
    )


def _open_files(host: Host, demand: Demand) -> Finding:
    soft, hard = host.limit(resource.RLIMIT_NOFILE)
    need = _OWN_FILES + demand.packs
    how = "ulimit -n 4096"
    if hard != resource.RLIM_INFINITY and hard < 4096:
        how += f"; the hard limit is {hard}: docker run --ulimit nofile=, or limits.conf"
    if soft == resource.RLIM_INFINITY or soft >= max(need, _FEW_FILES):
        found = "no limit" if soft == resource.RLIM_INFINITY else f"{soft} at a time"
        return Finding("open files", Level.OK, found)
    if soft < need:
        return Finding("open files", Level.BAD, f"{soft} at a time, {need} are needed", how)
    return Finding(
        "open files", Level.WARN, f"{soft} at a time: loaders with many workers need more", how
    )


def _file_size(host: Host, demand: Demand) -> Finding:
    soft, _ = host.limit(resource.RLIMIT_FSIZE)
    if soft == resource.RLIM_INFINITY:
        return Finding("file size", Level.OK, "no limit")
    need = demand.slot_bytes
    level = Level.WARN if need is None else Level.OK if soft >= need else Level.BAD
    how = "ulimit -f unlimited: a slot is one file as large as the state"
    found = f"at most {size_text(soft)}{demand.text}"
    return Finding("file size", level, found, "" if level is Level.OK else how)


def _locked_memory(host: Host, demand: Demand) -> Finding:
    soft, _ = host.limit(resource.RLIMIT_MEMLOCK)
    found = "no limit" if soft == resource.RLIM_INFINITY else f"at most {size_text(soft)}"
    if not host.exists("/proc/driver/nvidia"):
        return Finding("locked memory", Level.OK, f"{found}; no CUDA device that would need it")
    if soft == resource.RLIM_INFINITY or soft >= (demand.slot_bytes or UNLIMITED_BYTES):
        return Finding("locked memory", Level.OK, found)
    return Finding(
        "locked memory",
        Level.WARN,
        f"{found}: where slots cannot be pinned, copies from the device take a detour",
        "ulimit -l unlimited",
    )


def _processes(host: Host) -> Finding:
    if host.read("/proc/self/stat"):
        return Finding("process table", Level.OK, "/proc")
    return Finding(
        "process table",
        Level.BAD,
        "/proc does not show processes: living and dead trainers cannot be told apart",
        "mount /proc",
    )
