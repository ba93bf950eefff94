"""Runs a script, and kills one of its ranks: ``killed.py RANK STEP SCRIPT ARGUMENT...``."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections.abc import Mapping
from typing import Any

from asymcheck import Checkpointer

rank, last, script = sys.argv[1:4]
sys.argv = sys.argv[3:]
plainly = Checkpointer.step


def killing(self: Checkpointer, step: int, metrics: Mapping[str, Any] | None = None) -> object:
    """As ``Checkpointer.step``, but for the rank and step at which the process ends."""
    found = plainly(self, step, metrics)
    if (os.environ["RANK"], step) == (rank, int(last)):
        os.kill(os.getpid(), signal.SIGKILL)
    return found


Checkpointer.step = killing  # type: ignore[method-assign]
runpy.run_path(script, run_name="__main__")
