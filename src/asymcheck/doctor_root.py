"""What a root gives: what lies there, and what its file system can do. No torch."""

from __future__ import annotations

import errno
import mmap
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from asymcheck.errors import CheckpointError, NoCheckpoint
from asymcheck.findings import Demand, Finding, Host, Level, attempt
from asymcheck.memory.arena import slots_of
from asymcheck.memory.host import mount_of
from asymcheck.planning.layout import PAGE_BYTES, MiB
from asymcheck.rendering import count_text, size_text
from asymcheck.storage.listing import Listing
from asymcheck.storage.repository import Repository, open_repository
from asymcheck.storage.store import Store

_LITTLE_DISK_BYTES = 1024 * MiB


def look_into(store: Store, host: Host) -> tuple[Demand, Finding]:
    """What lies there, and what the next save will take; blocks, reads manifests only."""
    name, demand = "checkpoints", Demand()
    try:
        repository = open_repository(store)
        listing = repository.survey()
    except NoCheckpoint:
        found, damaged, suspects = f"{store.url}: none yet", 0, 0
    except CheckpointError as failure:
        return demand, Finding(name, Level.BAD, str(failure))
    else:
        demand = _demand(repository, listing, host)
        found = f"{store.url}: {count_text(len(listing.committed), 'checkpoint')}"
        if listing.committed:
            newest = max(listing.committed)
            found += f", the newest of step {newest.step}, {size_text(demand.image_bytes or 0)}"
        damaged = sum(not damage.newer for damage in listing.damaged)
        suspects = len(listing.suspects)
    if damaged:
        how = "'asymcheck verify ROOT' says what is hit"
        return demand, Finding(name, Level.BAD, f"{found}, {damaged} damaged", how)
    if suspects:
        how = "restore() passes over them: 'asymcheck suspect ROOT' says why, and takes marks away"
        return demand, Finding(name, Level.WARN, f"{found}, {suspects} marked suspect", how)
    if store.capabilities.durability == "none":
        how = "use a directory for what shall outlive the process"
        return demand, Finding(name, Level.WARN, f"{found}; nothing outlives the process", how)
    return demand, Finding(name, Level.OK, found)


def _demand(repository: Repository, listing: Listing, host: Host) -> Demand:
    own_bytes = 0
    for path in slots_of(host.shared_memory, repository.run):
        with suppress(OSError):
            own_bytes += path.stat().st_size
    if not listing.committed:
        return Demand(own_bytes=own_bytes)
    manifest = listing.committed[max(listing.committed)]
    return Demand(manifest.stored_bytes, len(manifest.packs), own_bytes)


def look_around(root: Path, host: Host, demand: Demand) -> Iterator[Finding]:
    """Try what saves need in a directory, or where there is none, in the one above; blocks.

    What is written is removed.
    """
    at = root
    while not os.path.exists(at) and at != at.parent:
        at = at.parent
    if not os.path.isdir(at):
        how = "move it, or choose another root"
        yield Finding("root", Level.BAD, f"{at} is a file, expected a directory", how)
        return
    mount = mount_of(host.real(at), host.read)
    if mount is not None:
        level, meaning, change = judge(mount.kind, mount.options)
        found = f"{at}: {mount.kind} on {mount.point}; {meaning}"
        yield Finding("file system", level, found, change)
    yield _free_space(at, host, demand)
    try:
        folder = Path(tempfile.mkdtemp(prefix=".asymcheck-doctor-", dir=at))
    except OSError as failure:
        how = "check owner, mode, quota and mount of the directory, or choose another root"
        found = f"nothing can be made in {at}: {failure.strerror}"
        yield Finding("writing", Level.BAD, found, how)
        return
    try:
        yield from _write(folder, host)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _free_space(at: Path, host: Host, demand: Demand) -> Finding:
    how = "free some space, lower keep_last, or choose another root"
    try:
        size = host.statvfs(at)
    except OSError as failure:
        return Finding("free space", Level.BAD, f"{at} does not say: {failure.strerror}", how)
    free = size.f_bavail * size.f_frsize
    found = size_text(free)
    if size.f_files and not size.f_favail:
        return Finding("free space", Level.BAD, f"{found}, and no more files can be made", how)
    if demand.image_bytes is None:
        level = Level.OK if free >= _LITTLE_DISK_BYTES else Level.WARN
    else:
        found += f"; a save takes {size_text(demand.image_bytes)}"
        # The checkpoint before goes after the new one is there.
        enough = demand.image_bytes + MiB
        level = Level.BAD if free < enough else Level.WARN if free < 2 * enough else Level.OK
    return Finding("free space", level, found, "" if level is Level.OK else how)


def _write(folder: Path, host: Host) -> Iterator[Finding]:
    files = host.files

    def write(name: str, direct: bool) -> None:
        page = mmap.mmap(-1, PAGE_BYTES)
        page[:] = b"\xa5" * PAGE_BYTES
        fd = files.open_new(folder / name)
        try:
            if direct:
                files.set_direct(fd, True)
            with memoryview(page) as view:
                taken = files.write(fd, view)
            files.fsync(fd)
        finally:
            files.close(fd)
            page.close()
        if taken != PAGE_BYTES or (folder / name).read_bytes() != b"\xa5" * PAGE_BYTES:
            raise OSError(errno.EIO, "what was written does not come back")

    def publish() -> None:
        write("a", direct=False)
        write("b", direct=False)
        files.rename(folder / "a", folder / "b")

    def exclude() -> None:
        try:
            files.close(files.open_new(folder / "b"))
        except FileExistsError:
            return
        raise OSError(errno.EEXIST, "a name was given twice")

    writing = attempt(
        "writing",
        publish,
        "write, fsync and rename work",
        Level.BAD,
        "a file cannot be written",
        "look at the system's log, or choose another root",
    )
    yield writing
    if writing.level is not Level.OK:
        return
    yield attempt(
        "direct writes",
        lambda: write("c", direct=True),
        "O_DIRECT works",
        Level.WARN,
        "no O_DIRECT: writes go through the page cache, which costs processor time",
        "a local ext4 or xfs gives it",
    )
    yield attempt(
        "hard links",
        lambda: files.link(folder / "b", folder / "d"),
        "work",
        Level.WARN,
        "not there: claiming the root takes two steps instead of one",
        "nothing, unless two jobs may start on this root at the same moment",
    )
    yield attempt(
        "exclusive names",
        exclude,
        "work",
        Level.BAD,
        "two jobs could both claim this root",
        "choose a root on another file system",
    )
    yield attempt(
        "directory sync",
        lambda: host.sync_directory(folder),
        "works",
        Level.WARN,
        "not there: whether a new name survives a power cut is up to the file system",
        "choose a root on another file system where a power cut must lose nothing",
    )


# --- kinds of file systems --------------------------------------------------

_LOCAL = re.compile(r"ext[234]|xfs|btrfs|zfs|f2fs|bcachefs|jfs|nilfs2")
_MEMORY = re.compile(r"tmpfs|ramfs|devtmpfs")
_LAYERS = re.compile(r"overlay|aufs|fuse\.fuse-overlayfs")
_PLAIN = re.compile(r"vfat|msdos|exfat|ntfs3?|fuseblk|hfsplus")
_SHARED = re.compile(
    r"nfs4?|cifs|smb3|lustre|gpfs|beegfs|9p|virtiofs|afs|orangefs|wekafs|panfs|gfs2|ocfs2"
    r"|(fuse\.)?(ceph(-fuse)?|glusterfs|juicefs)"
)
_OBJECTS = re.compile(
    r"(fuse\.)?(s3fs|gcsfuse|goofys|geesefs|rclone|mountpoint-s3|blobfuse2?|ossfs|cosfs)"
)
_UNSAFE = {"nobarrier", "barrier=0"}


def judge(kind: str, options: Sequence[str]) -> tuple[Level, str, str]:
    """How good a file system is for a root.

    Args:
        kind: Its type, as the kernel calls it.
        options: It is mounted with.

    Returns:
        How good, what it means for durability, and what to change.
    """
    if "ro" in options:
        return Level.BAD, "mounted read-only", "mount it for writing, or choose another root"
    if _MEMORY.fullmatch(kind):
        return (
            Level.BAD,
            "in memory: every checkpoint is lost when the machine or container ends",
            "choose a root on a disk",
        )
    if _OBJECTS.fullmatch(kind):
        return (
            Level.BAD,
            "an object store that plays a file system: fsync, rename and exclusive names are "
            "imitated or missing",
            "choose a root on a disk, and copy from there",
        )
    if _LAYERS.fullmatch(kind):
        return (
            Level.WARN,
            "a layer of the container: checkpoints survive a crash, and end with the container",
            "mount a volume and choose a root on it",
        )
    if _SHARED.fullmatch(kind):
        soft = "soft" in options
        return (
            Level.WARN,
            "a network or shared file system: durable is what its server holds to be durable"
            + (", and 'soft' turns a slow server into failed writes" if soft else ""),
            ("mount it with 'hard'; " if soft else "")
            + "have it exported with 'sync', or trust its replication",
        )
    if _PLAIN.fullmatch(kind):
        return (
            Level.WARN,
            "made for other systems: a power cut may damage more than the last save",
            "choose a root on ext4 or xfs",
        )
    if _LOCAL.fullmatch(kind):
        if _UNSAFE & set(options):
            return (
                Level.BAD,
                "write barriers are off: what was fsynced may be lost by a power cut",
                "mount it without nobarrier",
            )
        return Level.OK, "durable saves survive a power cut", ""
    if kind.startswith("fuse"):
        return (
            Level.WARN,
            "served by a program: whether fsync reaches a disk is up to it",
            "read what it says of fsync and rename, or choose a root on a disk",
        )
    return (
        Level.WARN,
        "not known here: whether fsync reaches a disk is not known either",
        "choose a root on ext4 or xfs where a power cut must lose nothing",
    )
