"""What counts as left over, and what happens to it: no torch, slots made by hand."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from asymcheck.memory.arena import ProcessId


def test_a_process_that_ended_and_was_not_waited_for_is_not_alive() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    found = ProcessId.of(child.pid)
    assert found.is_alive
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, and still in the table
    assert ProcessId.of(child.pid) == ProcessId(child.pid, 0)
    assert not found.is_alive
    child.wait()


@pytest.mark.parametrize("pid", [0, -1, 1 << 30])
def test_a_number_without_a_process_is_not_alive(pid: int) -> None:
    assert ProcessId.of(pid).start == 0
    assert not ProcessId(pid, 77).is_alive
