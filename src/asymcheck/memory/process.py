"""Processes, told apart for ever: a number alone is given to another one some day."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from asymcheck.memory.host import read_text

_ENDING = 0x4 | 0x200 | 0x400  # PF_EXITING, PF_DUMPCORE, PF_SIGNALED of the kernel


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process, told apart from a later one with the same number by its start time."""

    pid: int
    start: int

    @staticmethod
    def of(pid: int) -> ProcessId:
        """The process that has this number now; start 0 when there is none.

        One that has ended and was not waited for is none: in a container whose first process
        waits for nobody it would stay for ever.
        """
        # The command's name may hold anything: count the fields after its closing bracket.
        fields = read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()
        if len(fields) < 20 or fields[0] in "ZX":
            return ProcessId(pid, 0)
        return ProcessId(pid, int(fields[19]))

    @property
    def is_alive(self) -> bool:
        """Whether this very process runs."""
        return self.pid > 0 and self.start > 0 and ProcessId.of(self.pid) == self

    @property
    def is_ending(self) -> bool:
        """Whether it is alive and nothing can stop its end any more: it was sent SIGKILL, or is
        giving back its memory, which takes a while where there is much.
        """
        fields = read_text(f"/proc/{self.pid}/stat").rpartition(")")[2].split()
        if not self.is_alive or len(fields) < 7:
            return False
        pending = 0
        for line in read_text(f"/proc/{self.pid}/status").splitlines():
            name, _, value = line.partition(":")
            if name in ("SigPnd", "ShdPnd"):
                pending |= int(value, 16)
        return bool(int(fields[6]) & _ENDING or pending & 1 << signal.SIGKILL - 1)
