"""Asymmetric partitioned checkpointing for PyTorch training.

The whole surface a training script needs; everything else is reached by its
full module path and may move. ``Checkpointer`` loads on first use, so that
planning and the command line run where torch is not installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asymcheck.errors import (
    CheckpointError,
    CorruptCheckpoint,
    IncompatibleCheckpoint,
    NoCheckpoint,
    StateError,
    StoreError,
    SupersededWriter,
)
from asymcheck.planning.strategies import Strategy, strategies
from asymcheck.planning.tiers import Tier

if TYPE_CHECKING:
    from asymcheck.session import Checkpointer

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "CorruptCheckpoint",
    "IncompatibleCheckpoint",
    "NoCheckpoint",
    "StateError",
    "StoreError",
    "Strategy",
    "SupersededWriter",
    "Tier",
    "strategies",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:  # noqa: ANN401
    if name == "Checkpointer":
        from asymcheck.session import Checkpointer

        return Checkpointer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
