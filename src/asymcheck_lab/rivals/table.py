"""Every compared system by its name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from asymcheck_lab.rivals.base import RNG, Rival, System
from asymcheck_lab.rivals.dcp import Dcp, DcpAsync
from asymcheck_lab.rivals.ours import Asymcheck
from asymcheck_lab.rivals.torch_save import TorchSave

_OURS = "the library writes past the page cache and gives every file and its name to fsync"
_DCP = (
    "FileSystemWriter gives its files to fsync (sync_files=True, its default); the adapter adds "
    "the tail of .metadata, which DCP syncs before it has left Python's buffer, and the folders"
)

NONE = "none"
OURS = "asymcheck"
BASELINE = "torch-save"
SYNC_RIVAL = "dcp"

RIVALS: Mapping[str, Rival] = MappingProxyType(
    {
        NONE: Rival(
            title="no checkpoints",
            make=System,
            library="torch",
            omits="everything",
            syncs="",
            kind="none",
            is_async=False,
        ),
        OURS: Rival(
            title="asymcheck",
            make=lambda job: Asymcheck(job, persist="process"),
            library="asymcheck",
            omits="",
            syncs=_OURS,
            kind="ours",
        ),
        "asymcheck-thread": Rival(
            title='asymcheck, persist="thread"',
            make=lambda job: Asymcheck(job, persist="thread"),
            library="asymcheck",
            omits="",
            syncs=_OURS,
            kind="ours",
        ),
        BASELINE: Rival(
            title="torch.save + fsync",
            make=TorchSave,
            library="torch",
            omits=RNG,
            syncs="the adapter gives the file to fsync, renames it and syncs the folder",
            is_async=False,
        ),
        SYNC_RIVAL: Rival(
            title="DCP save", make=Dcp, library="torch", omits=RNG, syncs=_DCP, is_async=False
        ),
        "dcp-thread": Rival(
            title="DCP async_save, thread",
            make=lambda job: DcpAsync(job, kind="thread"),
            library="torch",
            omits=RNG,
            syncs=_DCP,
        ),
        "dcp-process": Rival(
            title="DCP async_save, process",
            make=lambda job: DcpAsync(job, kind="process"),
            library="torch",
            omits=RNG,
            syncs=_DCP,
        ),
        "dcp-stager": Rival(
            title="DCP async_save, thread, asynchronous stager",
            make=lambda job: DcpAsync(job, kind="thread", stager="behind"),
            library="torch",
            omits=RNG,
            syncs=_DCP,
        ),
        "dcp-process-stager": Rival(
            title="DCP async_save, process, asynchronous stager in shared memory",
            make=lambda job: DcpAsync(job, kind="process", stager="behind"),
            library="torch",
            omits=RNG,
            syncs=_DCP,
        ),
    }
)
"""Every system by the name that ``--systems`` takes."""

DEFAULT_SYSTEMS = tuple(name for name in RIVALS if name != "dcp-process-stager")
