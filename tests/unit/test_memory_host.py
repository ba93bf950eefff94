"""What a host, a container or a job leaves of memory, read from the kernel's own words."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from asymcheck.memory import arena
from asymcheck.memory.host import (
    UNLIMITED_BYTES,
    MemoryLimit,
    available_bytes,
    core_limit,
    memory_limits,
    mount_of,
    mounts,
    read_text,
)

GIB = 1 << 30
MEMINFO = f"MemTotal: {64 * GIB // 1024} kB\nMemAvailable:   {40 * GIB // 1024} kB\n"
V2_MOUNT = "31 23 0:28 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"


def reader(files: Mapping[str, object]) -> object:
    return lambda path: str(files.get(path, ""))


def test_a_container_with_its_own_view_is_bounded_by_the_group_at_the_top() -> None:
    read = reader(
        {
            "/proc/meminfo": MEMINFO,
            "/proc/self/cgroup": "0::/\n",
            "/proc/self/mountinfo": V2_MOUNT,
            "/sys/fs/cgroup/memory.max": 16 * GIB,
            "/sys/fs/cgroup/memory.current": 6 * GIB,
        }
    )
    assert memory_limits(read) == [MemoryLimit("/sys/fs/cgroup", 16 * GIB, 6 * GIB)]
    assert available_bytes(read) == 10 * GIB


def test_a_job_of_a_batch_system_is_bounded_by_its_own_group_and_by_each_above() -> None:
    group = "/sys/fs/cgroup/system.slice/slurmstepd.scope/job_7/step_0"
    read = reader(
        {
            "/proc/meminfo": MEMINFO,
            "/proc/self/cgroup": "0::/system.slice/slurmstepd.scope/job_7/step_0\n",
            "/proc/self/mountinfo": V2_MOUNT,
            f"{group}/memory.max": "max\n",
            f"{group}/memory.current": GIB,
            f"{group.rpartition('/')[0]}/memory.max": 8 * GIB,
            f"{group.rpartition('/')[0]}/memory.current": 3 * GIB,
        }
    )
    assert [limit.where for limit in memory_limits(read)] == [group.rpartition("/")[0]]
    assert available_bytes(read) == 5 * GIB


def test_the_first_version_of_groups_is_read_too_and_its_huge_number_means_no_limit() -> None:
    files: dict[str, object] = {
        "/proc/meminfo": MEMINFO,
        "/proc/self/cgroup": "5:devices:/\n4:cpu,memory:/docker/abc\n0::/\n",
        "/proc/self/mountinfo": (
            "35 31 0:32 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        ),
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": 4 * GIB,
        "/sys/fs/cgroup/memory/memory.usage_in_bytes": 3 * GIB,
    }
    assert available_bytes(reader(files)) == GIB
    files["/sys/fs/cgroup/memory/memory.limit_in_bytes"] = 9223372036854771712
    assert memory_limits(reader(files)) == []
    assert available_bytes(reader(files)) == 40 * GIB


def test_page_cache_is_not_counted_as_used_since_it_is_given_back() -> None:
    read = reader(
        {
            "/proc/meminfo": MEMINFO,
            "/proc/self/cgroup": "0::/\n",
            "/proc/self/mountinfo": V2_MOUNT,
            "/sys/fs/cgroup/memory.max": 16 * GIB,
            "/sys/fs/cgroup/memory.current": 16 * GIB - 4096,
            "/sys/fs/cgroup/memory.stat": (
                f"anon {5 * GIB}\nfile {10 * GIB}\nshmem {GIB}\n"
                f"inactive_file {8 * GIB}\nactive_file {GIB}\n"
            ),
        }
    )
    assert available_bytes(read) == 9 * GIB + 4096


def test_a_group_above_its_limit_leaves_nothing_and_not_less() -> None:
    assert MemoryLimit("/x", GIB, 2 * GIB).room_bytes == 0


def test_the_smallest_share_of_the_cores_counts() -> None:
    files: dict[str, object] = {
        "/proc/self/cgroup": "0::/pod/box\n",
        "/proc/self/mountinfo": V2_MOUNT,
        "/sys/fs/cgroup/pod/box/cpu.max": "max 100000",
        "/sys/fs/cgroup/pod/cpu.max": "150000 100000",
        "/sys/fs/cgroup/cpu.max": "400000 100000",
    }
    assert core_limit(reader(files)) == 1.5
    first: dict[str, object] = {
        "/proc/self/cgroup": "3:cpu,cpuacct:/\n",
        "/proc/self/mountinfo": "1 0 0:1 / /sys/cpu rw - cgroup cgroup rw,cpu,cpuacct\n",
        "/sys/cpu/cpu.cfs_quota_us": "50000\n",
        "/sys/cpu/cpu.cfs_period_us": "100000\n",
    }
    assert core_limit(reader(first)) == 0.5
    first["/sys/cpu/cpu.cfs_quota_us"] = "-1\n"
    assert core_limit(reader(first)) is None


def test_where_the_kernel_says_nothing_there_is_no_limit() -> None:
    assert available_bytes(lambda path: "") == UNLIMITED_BYTES
    assert core_limit(lambda path: "") is None


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/data", "xfs"),
        ("/data/runs/a", "xfs"),
        ("/database", "ext4"),
        ("/my runs/x", "nfs4"),
        ("/twice/x", "tmpfs"),
    ],
)
def test_the_innermost_mount_counts_and_of_two_on_one_place_the_later(path: str, kind: str) -> None:
    text = (
        "1 0 8:1 / / rw shared:1 - ext4 /dev/sda rw\n"
        "2 1 8:2 / /data rw,noatime - xfs /dev/sdb rw,attr2\n"
        "3 1 0:9 / /my\\040runs rw - nfs4 server:/x rw,soft\n"
        "4 1 0:8 / /twice rw - ext4 /dev/sdc rw\n"
        "5 1 0:7 / /twice ro - tmpfs tmpfs rw,size=4k\n"
        "not a line of it\n"
    )
    found = mount_of(path, lambda name: text)
    assert found is not None
    assert found.kind == kind
    assert len(mounts(lambda name: text)) == 5


def test_this_machine_answers() -> None:
    assert mount_of("/proc/self") is not None
    assert 0 < available_bytes() < UNLIMITED_BYTES
    assert read_text("/proc/self/nothing-of-this-name") == ""
    assert arena.available_bytes is available_bytes
