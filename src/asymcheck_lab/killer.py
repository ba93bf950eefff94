"""Kills a training and its persister in the middle of a save, as seen from outside."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlencode

from asymcheck.memory.arena import SHARED_MEMORY, Slot, SlotState, slots_of
from asymcheck.storage.names import step_folder
from asymcheck.storage.store import open_store


def stopping_url(root: Path, step: int) -> str:
    """A root whose writer stops itself after half of the first pack of ``step``."""
    fault = {"op": "write", "name": f"{step_folder(step)}/*.pack", "when": "mid", "do": "stop"}
    return f"faulty+{open_store(str(root)).url}?{urlencode(fault)}"


@dataclass
class Killer:
    """Waits for the persister to stop in the middle of its write, and kills.

    The first persister that stops is killed alone, so that the trainer has to replace it. The
    second one, which stops at the same place, is killed together with the trainer, once the
    trainer has sealed the state: from then on the save must not be lost.

    Attributes:
        persisters: Numbers of the persister processes that were killed.
        trainer: Number of the trainer, 0 before it was killed.
    """

    persisters: list[int] = field(default_factory=list)
    trainer: int = 0

    def look(self, pid: int) -> None:
        """Kill when it is time; called again and again.

        Args:
            pid: The training process.
        """
        for path in slots_of(SHARED_MEMORY):
            with suppress(OSError, ValueError):
                slot = Slot.open(path)
                try:
                    self._judge(slot, pid)
                finally:
                    slot.close(unlink=False)

    def _judge(self, slot: Slot, pid: int) -> None:
        persister = slot.persister.pid
        if slot.owner.pid != pid or self.trainer or persister in self.persisters:
            return
        if not is_stopped(persister):
            return
        if not self.persisters:
            self.persisters.append(persister)
            os.kill(persister, signal.SIGKILL)
        elif slot.state == SlotState.SEALED:
            self.persisters.append(persister)
            self.trainer = pid
            os.kill(pid, signal.SIGKILL)  # first, so that it cannot start a third persister
            os.kill(persister, signal.SIGKILL)


def is_stopped(pid: int) -> bool:
    """Whether SIGSTOP stopped a process and nothing has let it go on."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] == "T"
