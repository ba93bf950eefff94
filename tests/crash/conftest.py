"""What the crash tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest


@pytest.fixture
def quick_path() -> Iterator[Path]:
    """A directory in memory where there is such: what is really synced is not the point here."""
    memory = Path("/dev/shm")
    usable = memory.is_dir() and os.access(memory, os.W_OK)
    with TemporaryDirectory(prefix="asymcheck-test-", dir=memory if usable else None) as made:
        yield Path(made)
