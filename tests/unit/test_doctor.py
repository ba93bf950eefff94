"""Each finding under the condition that it is for; the machine's answers are faked."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from asymcheck.doctor import examine
from asymcheck.doctor_root import judge
from asymcheck.errors import OptionError
from asymcheck.findings import Finding, Host, Level
from asymcheck.handover import LeftOver
from asymcheck.memory.arena import ProcessId, slot_name
from asymcheck.planning.retention import CheckpointId
from asymcheck.storage.index import Chunk, Index, Leaf, StoredObject
from asymcheck.storage.local import Files, LocalStore
from asymcheck.storage.names import pack_name
from asymcheck.storage.repository import Repository, create_repository
from asymcheck.storage.sealed import digest

MIB, GIB = 1 << 20, 1 << 30
INFINITE = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
MOUNTS = (
    "1 0 8:1 / / rw,relatime - ext4 /dev/sda rw\n2 1 0:5 / /dev/shm rw,nosuid - tmpfs tmpfs rw\n"
)


def room(whole: int, free: int, files: int = 100, free_files: int = 100) -> SimpleNamespace:
    return SimpleNamespace(
        f_frsize=4096,
        f_blocks=whole // 4096,
        f_bavail=free // 4096,
        f_files=files,
        f_favail=free_files,
    )


class Fake(Host):
    """A machine with nothing to complain of; tests take something away."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {
            "/proc/meminfo": f"MemAvailable: {32 * GIB // 1024} kB\n",
            "/proc/self/mountinfo": MOUNTS,
            "/proc/self/cgroup": "0::/\n",
            "/proc/self/stat": "1 (python) R",
        }
        self.there: set[str] = set()
        self.rooms = {"/dev/shm": room(16 * GIB, 16 * GIB)}
        self.limits: dict[int, tuple[int, int]] = {}
        self.core_numbers = (8, 8)
        self.versions = {"torch": "2.8.0+cu126", "numpy": "2.1.0", "xxhash": "3.5.0"}
        self.refused: dict[str, Exception] = {}
        self.slots: list[LeftOver] = []
        self.python_version = "3.12.1"

    def read(self, path: str) -> str:
        return self.texts.get(path, "")

    def exists(self, path: str) -> bool:
        return path in self.there

    def real(self, path: Path) -> str:
        return str(path)

    def statvfs(self, path: Path) -> SimpleNamespace:
        self._refuse("statvfs")
        return self.rooms.get(str(path), room(100 * GIB, 50 * GIB))

    def limit(self, which: int) -> tuple[int, int]:
        return self.limits.get(which, INFINITE)

    def cores(self) -> tuple[int, int]:
        return self.core_numbers

    def version(self, package: str) -> str | None:
        return self.versions.get(package)

    def python(self) -> str:
        return self.python_version

    def try_pidfd(self) -> None:
        self._refuse("pidfd")

    def try_memfd(self) -> None:
        self._refuse("memfd")

    def try_shared(self) -> None:
        self._refuse("shared")

    def sync_directory(self, path: Path) -> None:
        self._refuse("sync_directory")

    def left_over(self) -> list[LeftOver]:
        return self.slots

    def _refuse(self, what: str) -> None:
        if what in self.refused:
            raise self.refused[what]


class Broken(Files):
    """System calls of which one fails."""

    def __init__(self, call: str, code: int) -> None:
        self.call, self.code = call, code

    def _fail(self, call: str) -> None:
        if call == self.call:
            raise OSError(self.code, os.strerror(self.code))

    def set_direct(self, fd: int, direct: bool) -> None:
        self._fail("set_direct")
        super().set_direct(fd, direct)

    def link(self, old: Path, new: Path) -> None:
        self._fail("link")
        super().link(old, new)

    def fsync(self, fd: int) -> None:
        self._fail("fsync")
        super().fsync(fd)

    def open_new(self, path: Path) -> int:
        if self.call == "open_new" and path.exists():
            return os.open(path, os.O_WRONLY)  # as where exclusive names are only imitated
        return super().open_new(path)

    def write(self, fd: int, data: memoryview) -> int:
        return super().write(fd, data[:100]) if self.call == "write" else super().write(fd, data)


def look(host: Host, name: str, root: object = None) -> Finding:
    return next(f for f in examine(None if root is None else str(root), host) if f.name == name)


def make_checkpoint(root: Path, nbytes: int = 4096) -> Repository:
    repository = create_repository(LocalStore(root))
    attempt = repository.claim(None).number
    at = CheckpointId(attempt, 7)
    data = bytes(nbytes)
    name = pack_name(at, 0, 1)
    repository.store.write(name, [data])
    repository.commit(
        Index(
            run=repository.run,
            at=at,
            rank=0,
            world=1,
            created_s=0.0,
            metrics={},
            versions={},
            leaves=(Leaf("w", "uint8", (nbytes,), 0, nbytes, ()),),
            aliases={},
            chunks=(Chunk(0, nbytes, 0, 0, nbytes, "raw", digest(data)),),
            packs=(StoredObject(name, nbytes),),
        )
    )
    return repository


# --- as a whole -------------------------------------------------------------


def test_a_good_machine_has_no_complaint_and_each_finding_has_its_own_name(tmp_path: Path) -> None:
    found = list(examine(str(tmp_path), Fake()))
    assert [f for f in found if f.level is not Level.OK or f.change] == []
    assert len({f.name for f in found}) == len(found) >= 20
    assert all(f.found for f in found)


def test_this_machine_is_looked_at_for_real_and_nothing_stays(tmp_path: Path) -> None:
    found = list(examine(str(tmp_path)))
    names = {f.name for f in found}
    assert {"shared memory", "memory", "direct writes", "hard links", "torch"} <= names
    assert list(tmp_path.iterdir()) == []
    by_name = {f.name: f for f in found}
    assert by_name["writing"].level is Level.OK
    assert by_name["exclusive names"].level is Level.OK
    assert by_name["process table"].level is Level.OK
    assert by_name["torch"].level is Level.OK
    for finding in found:
        assert finding.change or finding.level is Level.OK, finding


def test_looking_does_not_load_torch() -> None:
    code = (
        "import sys; from asymcheck.doctor import examine; list(examine());"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_an_unknown_scheme_is_an_option_error() -> None:
    with pytest.raises(OptionError, match="expected a scheme of"):
        list(examine("fiel:///x", Fake()))


# --- software ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "level", "found", "change"),
    [
        ("2.6.0", Level.OK, "2.6.0, expected 2.6 or newer", ""),
        ("2.13.0+cpu", Level.OK, "2.13.0+cpu, expected 2.6", ""),
        ("2.10.0a0+git1234", Level.OK, "2.10.0a0", ""),
        ("2.5.1", Level.BAD, "2.5.1, expected 2.6 or newer", "pip install 'torch>=2.6'"),
        (None, Level.BAD, "not installed", "pip install 'torch>=2.6'"),
    ],
)
def test_a_torch_that_is_too_old_or_missing_is_bad(
    version: str | None, level: Level, found: str, change: str
) -> None:
    host = Fake()
    host.versions.pop("torch")
    if version:
        host.versions["torch"] = version
    seen = look(host, "torch")
    assert (seen.level, seen.change) == (level, change)
    assert seen.found.startswith(found)


@pytest.mark.parametrize("package", ["numpy", "xxhash"])
def test_the_other_packages_are_held_to_their_range_too(package: str) -> None:
    host = Fake()
    host.versions[package] = "1.0"
    assert look(host, package).level is Level.BAD
    assert look(host, package).change.startswith(f"pip install '{package}>=")


def test_an_old_python_is_bad() -> None:
    host = Fake()
    host.python_version = "3.10.14"
    assert look(host, "Python").level is Level.BAD
    assert look(host, "Python").change == "install Python 3.11 or newer"


# --- the machine ------------------------------------------------------------


def test_a_container_is_recognised_by_each_of_its_signs() -> None:
    assert look(Fake(), "container").found == "no sign of one"
    for sign in ("/.dockerenv", "/run/.containerenv"):
        host = Fake()
        host.there.add(sign)
        assert look(host, "container").found.startswith(sign)
    host = Fake()
    host.texts["/proc/self/cgroup"] = "4:memory:/kubepods/burstable/pod1\n"
    host.texts["/proc/self/mountinfo"] = MOUNTS.replace("- ext4", "- overlay")
    found = look(host, "container").found
    assert "control group of kubepods" in found
    assert "/ is an overlay" in found
    assert "ends with it" in found


@pytest.mark.parametrize(
    ("numbers", "quota", "level", "found"),
    [
        ((64, 8), "", Level.OK, "8 of 64"),
        ((64, 8), "400000 100000", Level.OK, "8 of 64, limited to the time of 4"),
        ((64, 1), "", Level.WARN, "1 of 64"),
        ((4, 4), "150000 100000", Level.WARN, "limited to the time of 1.5"),
    ],
)
def test_fewer_than_two_cores_are_a_warning(
    numbers: tuple[int, int], quota: str, level: Level, found: str
) -> None:
    host = Fake()
    host.core_numbers = numbers
    host.texts["/proc/self/mountinfo"] = MOUNTS + "3 1 0:9 / /sys/fs/cgroup rw - cgroup2 x rw\n"
    host.texts["/sys/fs/cgroup/cpu.max"] = quota
    assert look(host, "cores").level is level
    assert found in look(host, "cores").found


def limit_memory(host: Fake, limit: int, used: int) -> None:
    host.texts["/proc/self/mountinfo"] = MOUNTS + "3 1 0:9 / /sys/fs/cgroup rw - cgroup2 x rw\n"
    host.texts["/sys/fs/cgroup/memory.max"] = str(limit)
    host.texts["/sys/fs/cgroup/memory.current"] = str(used)


def test_little_memory_is_a_warning_that_names_the_limit() -> None:
    host = Fake()
    limit_memory(host, 8 * GIB, 7 * GIB)
    assert look(host, "memory") == Finding(
        "memory", Level.OK, "1.0 GiB available, limit 8.0 GiB of /sys/fs/cgroup"
    )
    limit_memory(host, 8 * GIB, 8 * GIB - 100 * MIB)
    assert look(host, "memory").level is Level.WARN
    assert "100.0 MiB available, limit 8.0 GiB" in look(host, "memory").found


def test_memory_is_held_against_what_a_save_of_this_root_takes(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "r", 8 * MIB)
    host = Fake()
    limit_memory(host, GIB, GIB - 20 * MIB)
    assert look(host, "memory", tmp_path / "r").level is Level.OK
    limit_memory(host, GIB, GIB - 8 * MIB)
    found = look(host, "memory", tmp_path / "r")
    assert found.level is Level.WARN
    assert "a save takes 8.0 MiB" in found.found


def test_a_machine_that_tells_nothing_of_its_memory_is_a_warning() -> None:
    host = Fake()
    host.texts["/proc/meminfo"] = ""
    assert look(host, "memory").level is Level.WARN


def test_the_shared_memory_of_a_container_as_it_comes_is_too_little() -> None:
    host = Fake()
    host.rooms["/dev/shm"] = room(64 * MIB, 64 * MIB)
    found = look(host, "shared memory")
    assert found.level is Level.WARN
    assert found.found.startswith("/dev/shm: tmpfs, 64.0 MiB, 64.0 MiB free")
    assert "--shm-size" in found.change
    assert "size of the state" in found.change


def test_shared_memory_is_held_against_what_a_save_takes_and_own_slots_count(
    tmp_path: Path,
) -> None:
    repository = make_checkpoint(tmp_path / "r", 8 * MIB)
    host = Fake()
    host.shared_memory = tmp_path / "shm"
    host.shared_memory.mkdir()
    host.texts["/proc/self/mountinfo"] = f"{MOUNTS}3 1 0:5 / {tmp_path}/shm rw - tmpfs x rw\n"

    def seen() -> Finding:
        return look(host, "shared memory", tmp_path / "r")

    host.rooms[str(host.shared_memory)] = room(64 * MIB, 10 * MIB)
    assert seen().level is Level.OK  # small, and enough
    host.rooms[str(host.shared_memory)] = room(4 * GIB, 4 * MIB)
    assert seen().level is Level.WARN  # large, and full
    assert "a save takes 8.0 MiB" in seen().found
    slot = host.shared_memory / slot_name(repository.run, 0, 1)
    slot.touch()
    os.truncate(slot, 9 * MIB)
    assert seen().level is Level.OK  # full of this run's own slots


def test_shared_memory_on_a_disk_or_closed_to_the_user_is_a_warning() -> None:
    host = Fake()
    host.texts["/proc/self/mountinfo"] = MOUNTS.splitlines()[0]
    assert look(host, "shared memory").level is Level.WARN
    assert "it is not in memory" in look(host, "shared memory").found
    host.refused["shared"] = OSError(errno.EACCES, "Permission denied")
    assert "/dev/shm cannot be used (Permission denied)" in look(host, "shared memory").found
    assert look(host, "shared memory").level is Level.WARN


def test_shared_memory_without_a_limit_is_good() -> None:
    host = Fake()
    host.rooms["/dev/shm"] = room(0, 0)
    assert look(host, "shared memory").level is Level.OK
    assert "without a limit" in look(host, "shared memory").found


def test_left_over_slots_are_counted(tmp_path: Path) -> None:
    host = Fake()
    for i, sealed in enumerate((True, False)):
        path = tmp_path / str(i)
        path.touch()
        os.truncate(path, MIB)
        host.slots.append(LeftOver(path, ProcessId(0, 0), sealed))
    host.slots.append(LeftOver(tmp_path / "gone meanwhile", ProcessId(0, 0), is_sealed=False))
    found = look(host, "left-over slots")
    assert found.level is Level.WARN
    assert found.found == "3 slots of dead trainers, 2.0 MiB, 1 sealed"
    assert "asymcheck repair ROOT" in found.change
    host.slots = [replace(slot, root="file:///runs/a") for slot in host.slots]
    assert "'asymcheck repair file:///runs/a' to make" in look(host, "left-over slots").change


@pytest.mark.parametrize(
    ("limits", "level", "change"),
    [
        (INFINITE, Level.OK, ""),
        ((1024, 1024), Level.OK, ""),
        ((256, 65536), Level.WARN, "ulimit -n 4096"),
        ((256, 256), Level.WARN, "the hard limit is 256"),
        ((32, 65536), Level.BAD, "ulimit -n 4096"),
    ],
)
def test_few_open_files_are_a_warning_and_too_few_are_bad(
    limits: tuple[int, int], level: Level, change: str
) -> None:
    host = Fake()
    host.limits[resource.RLIMIT_NOFILE] = limits
    assert look(host, "open files").level is level
    assert change in look(host, "open files").change


def test_a_limit_on_file_sizes_is_held_against_what_a_save_takes(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "r", 8 * MIB)
    host = Fake()
    for limit, level in ((100 * MIB, Level.OK), (MIB, Level.BAD)):
        host.limits[resource.RLIMIT_FSIZE] = (limit, limit)
        assert look(host, "file size").level is Level.WARN  # nobody knows what a save takes
        assert look(host, "file size", tmp_path / "r").level is level


def test_locked_memory_matters_where_there_is_a_cuda_device() -> None:
    host = Fake()
    host.limits[resource.RLIMIT_MEMLOCK] = (64 * 1024, 64 * 1024)
    assert look(host, "locked memory").level is Level.OK
    host.there.add("/proc/driver/nvidia")
    assert look(host, "locked memory").level is Level.WARN
    assert look(host, "locked memory").change == "ulimit -l unlimited"
    host.limits[resource.RLIMIT_MEMLOCK] = INFINITE
    assert look(host, "locked memory").level is Level.OK


@pytest.mark.parametrize(
    ("call", "name", "failure", "said"),
    [
        ("pidfd", "pidfd_open", OSError(errno.ENOSYS, "Function not implemented"), "implemented"),
        ("pidfd", "pidfd_open", AttributeError("pidfd_open"), "not in this Python"),
        ("memfd", "memfd_create", OSError(errno.EPERM, "Operation not permitted"), "permitted"),
    ],
)
def test_a_missing_system_call_is_a_warning_that_says_what_is_done_without(
    call: str, name: str, failure: Exception, said: str
) -> None:
    host = Fake()
    host.refused[call] = failure
    found = look(host, name)
    assert found.level is Level.WARN
    assert said in found.found
    assert found.change


def test_without_a_process_table_the_living_cannot_be_told_from_the_dead() -> None:
    host = Fake()
    host.texts["/proc/self/stat"] = ""
    assert look(host, "process table").level is Level.BAD


# --- the root ---------------------------------------------------------------


def test_the_root_says_what_lies_there(tmp_path: Path) -> None:
    assert "none yet" in look(Fake(), "checkpoints", tmp_path / "new").found
    make_checkpoint(tmp_path / "r")
    found = look(Fake(), "checkpoints", tmp_path / "r")
    assert found.level is Level.OK
    assert "1 checkpoint, the newest of step 7" in found.found
    next((tmp_path / "r").glob("step-*/*.pack")).write_bytes(b"short")
    damaged = look(Fake(), "checkpoints", tmp_path / "r")
    assert damaged.level is Level.BAD
    assert "1 damaged" in damaged.found


def test_a_root_that_holds_something_else_is_bad(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    found = look(Fake(), "checkpoints", tmp_path)
    assert found.level is Level.BAD
    assert "thesis.tex" in found.found


def test_a_file_in_the_place_of_the_root_is_bad(tmp_path: Path) -> None:
    (tmp_path / "r").touch()
    assert look(Fake(), "root", tmp_path / "r" / "a").level is Level.BAD


def test_memory_as_a_root_outlives_nothing() -> None:
    found = list(examine("memory://doctor", Fake()))
    assert found[-1].name == "checkpoints"
    assert found[-1].level is Level.WARN
    assert "nothing outlives the process" in found[-1].found


@pytest.mark.parametrize(
    ("kind", "options", "level", "meaning"),
    [
        ("ext4", ["rw"], Level.OK, "survive a power cut"),
        ("xfs", ["rw"], Level.OK, "survive a power cut"),
        ("ext4", ["ro", "rw"], Level.BAD, "read-only"),
        ("ext4", ["rw", "nobarrier"], Level.BAD, "write barriers are off"),
        ("ext3", ["rw", "barrier=0"], Level.BAD, "write barriers are off"),
        ("tmpfs", ["rw"], Level.BAD, "in memory"),
        ("overlay", ["rw"], Level.WARN, "layer of the container"),
        ("nfs4", ["rw", "hard"], Level.WARN, "its server"),
        ("nfs", ["rw", "soft"], Level.WARN, "'soft' turns a slow server into failed writes"),
        ("lustre", ["rw"], Level.WARN, "its server"),
        ("fuse.glusterfs", ["rw"], Level.WARN, "its server"),
        ("fuse.s3fs", ["rw"], Level.BAD, "object store"),
        ("fuse.sshfs", ["rw"], Level.WARN, "served by a program"),
        ("exfat", ["rw"], Level.WARN, "other systems"),
        ("befs", ["rw"], Level.WARN, "not known here"),
    ],
)
def test_the_kind_of_file_system_says_what_durable_means(
    kind: str, options: list[str], level: Level, meaning: str
) -> None:
    found, said, change = judge(kind, options)
    assert found is level
    assert meaning in said
    assert bool(change) == (level is not Level.OK)


def test_the_mount_that_holds_the_root_is_judged(tmp_path: Path) -> None:
    host = Fake()
    host.texts["/proc/self/mountinfo"] = f"{MOUNTS}3 1 0:7 / {tmp_path} rw - nfs4 server:/x rw\n"
    found = look(host, "file system", tmp_path / "r")
    assert found.level is Level.WARN
    assert found.found.startswith(f"{tmp_path}: nfs4 on {tmp_path}")


def test_without_a_root_the_current_directory_stands_in_and_nothing_about_it_is_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    host = Fake()
    host.texts["/proc/self/mountinfo"] = f"{MOUNTS}3 1 0:7 / {tmp_path} rw - tmpfs x rw\n"
    assert look(host, "file system").level is Level.WARN
    assert look(host, "file system", tmp_path).level is Level.BAD


def test_too_little_space_is_bad_where_the_next_save_needs_more(tmp_path: Path) -> None:
    root = tmp_path / "r"
    make_checkpoint(root, 8 * MIB)
    host = Fake()
    for free, level in ((100 * MIB, Level.OK), (12 * MIB, Level.WARN), (8 * MIB, Level.BAD)):
        host.rooms[str(root)] = room(GIB, free)
        assert look(host, "free space", root).level is level
    host.rooms[str(root)] = room(GIB, GIB, files=1000, free_files=0)
    assert "no more files can be made" in look(host, "free space", root).found
    host.refused["statvfs"] = OSError(errno.ESTALE, "Stale file handle")
    assert "Stale file handle" in look(host, "free space", root).found


def test_little_space_is_a_warning_where_nobody_knows_what_a_save_needs(tmp_path: Path) -> None:
    host = Fake()
    host.rooms[str(tmp_path)] = room(GIB, 500 * MIB)
    assert look(host, "free space", tmp_path).level is Level.WARN


@pytest.mark.parametrize(
    ("call", "code", "name", "level"),
    [
        ("set_direct", errno.EINVAL, "direct writes", Level.WARN),
        ("link", errno.EPERM, "hard links", Level.WARN),
        ("fsync", errno.EIO, "writing", Level.BAD),
        ("write", 0, "writing", Level.BAD),
        ("open_new", 0, "exclusive names", Level.BAD),
    ],
)
def test_what_a_file_system_refuses_is_found_by_trying(
    tmp_path: Path, call: str, code: int, name: str, level: Level
) -> None:
    host = Fake()
    host.files = Broken(call, code)
    found = look(host, name, tmp_path)
    assert found.level is level
    assert found.change
    assert not code or os.strerror(code) in found.found
    assert list(tmp_path.iterdir()) == []
    others = [f for f in examine(str(tmp_path), host) if f.level is not Level.OK]
    assert [f.name for f in others] == [name]


def test_directories_that_cannot_be_synced_are_a_warning(tmp_path: Path) -> None:
    host = Fake()
    host.refused["sync_directory"] = OSError(errno.EINVAL, "Invalid argument")
    assert look(host, "directory sync", tmp_path).level is Level.WARN


def test_a_root_in_which_nothing_can_be_made_is_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**where: object) -> str:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("asymcheck.doctor_root.tempfile.mkdtemp", refuse)
    found = list(examine(str(tmp_path), Fake()))
    assert found[-1].name == "writing"
    assert found[-1].level is Level.BAD
    assert "Permission denied" in found[-1].found


@pytest.mark.parametrize(
    "probe",
    [Host().try_pidfd, Host().try_memfd, Host().try_shared],
    ids=["pidfd", "memfd", "shared"],
)
def test_the_probes_leave_no_descriptor_and_no_name_behind(probe: Callable[[], None]) -> None:
    before = set(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd"))
    probe()
    assert len(os.listdir("/proc/self/fd")) == before[1]
    assert {n for n in os.listdir("/dev/shm") if "doctor" in n} == set()
