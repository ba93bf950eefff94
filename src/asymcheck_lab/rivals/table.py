"""Every compared system by its name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from asymcheck.planning.strategies import Strategy, strategies
from asymcheck_lab.parallel import PARALLELS
from asymcheck_lab.rivals.base import RNG, Rival, System
from asymcheck_lab.rivals.dcp import Dcp, DcpAsync
from asymcheck_lab.rivals.deepspeed import DeepSpeed
from asymcheck_lab.rivals.gemini import KEPT, Gemini
from asymcheck_lab.rivals.lightning import Lightning
from asymcheck_lab.rivals.lm_resiliency import LmResiliency
from asymcheck_lab.rivals.orbax import Orbax
from asymcheck_lab.rivals.ours import Asymcheck
from asymcheck_lab.rivals.safetensors import SafeTensors
from asymcheck_lab.rivals.torch_checkpointing import TorchCheckpointing
from asymcheck_lab.rivals.torch_save import TorchSave
from asymcheck_lab.rivals.torchsnapshot import TorchSnapshot

_OURS = "the library writes past the page cache and gives every file and its name to fsync"
_DCP = (
    "FileSystemWriter gives its files to fsync (sync_files=True, its default); the adapter adds "
    "the tail of .metadata, which DCP syncs before it has left Python's buffer, and the folders"
)

NONE = "none"
OURS = "asymcheck"
BASELINE = "torch-save"
SYNC_RIVAL = "dcp"
DEFAULT_RIVAL = "dcp-thread"

_LATE = (
    f"{RNG}; buffers that a forward pass changes, such as those of batch normalization: they are "
    "copied behind it, so those of a later step may be saved"
)
_PEERS = (
    "nothing is on a disk: durable is whole, and checked, in the memory of both agents; where both "
    "are lost it is lost"
)
_ANY = tuple(PARALLELS)
_SELF_SYNCED = "nothing; the adapter gives every file and folder to fsync"


def _of_strategy(name: str, strategy: Strategy) -> Rival:
    is_exact = strategy.selection.loss_class == "exact"
    return Rival(
        title=f'asymcheck, strategy="{name}"',
        make=lambda job: Asymcheck(job, strategy=name),
        library="asymcheck",
        omits="" if is_exact else "exact values: between two key-frames its encoding is lossy",
        syncs=_OURS,
        kind="strategy",
        is_async=strategy.persist == "behind",
        is_exact=is_exact,
        parallels=_ANY,
    )


RIVALS: Mapping[str, Rival] = MappingProxyType(
    {
        NONE: Rival(
            title="no checkpoints",
            make=System,
            library="torch",
            omits="everything",
            syncs="",
            kind="none",
            parallels=_ANY,
            is_async=False,
        ),
        OURS: Rival(
            title="asymcheck",
            make=lambda job: Asymcheck(job, persist="process"),
            library="asymcheck",
            omits="",
            syncs=_OURS,
            kind="ours",
            parallels=_ANY,
        ),
        "asymcheck-thread": Rival(
            title='asymcheck, persist="thread"',
            make=lambda job: Asymcheck(job, persist="thread"),
            library="asymcheck",
            omits="",
            syncs=_OURS,
            kind="ours",
            parallels=_ANY,
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
            title="DCP save",
            make=Dcp,
            library="torch",
            omits=RNG,
            syncs=_DCP,
            is_async=False,
            parallels=_ANY,
        ),
        DEFAULT_RIVAL: Rival(
            title="DCP async_save, thread",
            make=lambda job: DcpAsync(job, kind="thread"),
            library="torch",
            omits=RNG,
            syncs=_DCP,
            parallels=_ANY,
        ),
        "dcp-process": Rival(
            title="DCP async_save, process",
            make=lambda job: DcpAsync(job, kind="process"),
            library="torch",
            omits=RNG,
            syncs=_DCP,
            parallels=_ANY,
        ),
        "dcp-stager": Rival(
            title="DCP async_save, thread, asynchronous stager",
            make=lambda job: DcpAsync(job, kind="thread", stager="behind"),
            library="torch",
            omits=_LATE,
            syncs=_DCP,
            parallels=_ANY,
        ),
        "dcp-process-stager": Rival(
            title="DCP async_save, process, asynchronous stager in shared memory",
            make=lambda job: DcpAsync(job, kind="process", stager="behind"),
            library="torch",
            omits=_LATE,
            syncs=_DCP,
            parallels=_ANY,
        ),
        "torch-checkpointing": Rival(
            title="torch_checkpointing, asynchronous",
            make=TorchCheckpointing,
            library="torch_checkpointing",
            omits=_LATE,
            syncs=_SELF_SYNCED + ", in its finalize_callback",
            adapted="without O_DIRECT, whose writes of any length ext4 and XFS refuse",
        ),
        "lm-resiliency": Rival(
            title="lm-resiliency, GEMINI's capture, each one flushed",
            make=LmResiliency,
            library="lm-resiliency",
            omits=RNG,
            syncs="it gives each file and its folder to fsync",
            adapted="one process, so no copy goes to a peer; flush_to_disk right after each "
            "capture, where it would write a capture when the next is taken; installed apart, "
            "because it makes itself part of every process that imports torchrun's rendezvous",
            apart=True,
        ),
        "lightning": Rival(
            title="Lightning AsyncCheckpointIO",
            make=Lightning,
            library="lightning",
            omits=RNG,
            syncs=_SELF_SYNCED + ", in the CheckpointIO that is wrapped",
            adapted="the plugin alone, with no Trainer around it",
        ),
        "deepspeed": Rival(
            title="DeepSpeed save_checkpoint",
            make=DeepSpeed,
            library="deepspeed",
            omits=RNG,
            syncs=_SELF_SYNCED,
            adapted="under ZeRO its own engine trains and saves. In one process the loop steps the "
            "optimizer itself, and the engine only saves: at stage 0 in fp32 it holds the very "
            "same model and optimizer. Without its extension for collectives",
            parallels=("none", "zero1", "zero2", "zero3"),
            why_not_else="it saves DeepSpeed's own engines alone",
            is_async=False,
        ),
        "safetensors": Rival(
            title="safetensors save_file + fsync",
            make=SafeTensors,
            library="safetensors",
            omits=f"{RNG}; options of the optimizer that JSON cannot say",
            syncs=_SELF_SYNCED + ", and renames the folder",
            adapted="numbers and options of the optimizer lie in a JSON file beside the tensors",
            is_async=False,
        ),
        "orbax": Rival(
            title="Orbax StandardCheckpointer, NumPy arrays",
            make=Orbax,
            library="orbax-checkpoint",
            omits=f"{RNG}; options of the optimizer that JSON cannot say",
            syncs="TensorStore gives its files to fsync; the adapter does it again for all, and "
            "for the folders",
            adapted="the state as NumPy arrays that share its memory; numbers and options of the "
            "optimizer in the custom metadata",
        ),
        "torchsnapshot": Rival(
            title="torchsnapshot async_take",
            make=TorchSnapshot,
            library="torchsnapshot",
            omits=RNG,
            syncs=_SELF_SYNCED,
        ),
        **{
            name: _of_strategy(name, strategy)
            for name, strategy in strategies.items()
            if name != OURS
        },
        "gemini": Rival(
            title='asymcheck, strategy="gemini", in the memory of two agents',
            make=Gemini,
            library="asymcheck",
            omits="",
            syncs=_PEERS,
            adapted="two agents on this host, m = 2, whose memory and CPU are counted; the newest "
            "two are kept. Loopback shows no network: no link that the training needs too, no "
            "latency; and both copies cost this host's memory",
            kind="strategy",
            keeps=KEPT,
            why_not_else="its two agents belong to one process",
        ),
    }
)
"""Every system by the name that ``--systems`` takes."""

DEFAULT_SYSTEMS: tuple[str, ...] = (
    NONE,
    OURS,
    "asymcheck-thread",
    BASELINE,
    SYNC_RIVAL,
    "dcp-thread",
    "dcp-process",
    "dcp-stager",
)
"""Those that the benchmark compares where nobody says which."""

RANK_SYSTEMS: tuple[str, ...] = (
    NONE,
    OURS,
    "asymcheck-thread",
    SYNC_RIVAL,
    DEFAULT_RIVAL,
    "dcp-process",
    "dcp-stager",
    "dcp-process-stager",
    "deepspeed",
)
"""Those that it compares on several ranks."""
