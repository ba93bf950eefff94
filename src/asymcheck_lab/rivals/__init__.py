"""The systems that the benchmark compares, each behind the same few calls.

Every system gets the same live model and optimizer and keeps every checkpoint that it writes.
A checkpoint counts as durable once its files *and their names* have been given to ``fsync``:
where a system leaves some of that out, its adapter does it and says so in ``syncs``.
"""

from asymcheck_lab.rivals.base import RNG, Job, Rival, System, state_of, stored_bytes
from asymcheck_lab.rivals.dcp import Dcp, DcpAsync
from asymcheck_lab.rivals.ours import Asymcheck
from asymcheck_lab.rivals.table import (
    BASELINE,
    DEFAULT_RIVAL,
    DEFAULT_SYSTEMS,
    NONE,
    OURS,
    RANK_SYSTEMS,
    RIVALS,
    SYNC_RIVAL,
)
from asymcheck_lab.rivals.torch_save import TorchSave

__all__ = [
    "BASELINE",
    "DEFAULT_RIVAL",
    "DEFAULT_SYSTEMS",
    "NONE",
    "OURS",
    "RANK_SYSTEMS",
    "RIVALS",
    "RNG",
    "SYNC_RIVAL",
    "Asymcheck",
    "Dcp",
    "DcpAsync",
    "Job",
    "Rival",
    "System",
    "TorchSave",
    "state_of",
    "stored_bytes",
]
