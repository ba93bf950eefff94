"""Gemini's method in the library, complete: checkpoints in the memory of two agents."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from asymcheck_lab.errors import RunError
from asymcheck_lab.rivals.ours import Asymcheck

if TYPE_CHECKING:
    from asymcheck import Strategy

KEPT = 2
_AGENTS = 2
_ROOM_GIB = 64
_WAIT_S = 60.0
_AGENT = """
from asymcheck_lab.chaos_network import end_with_parent
end_with_parent()  # however a run ends
from asymcheck.cli import app
app()
"""


@dataclass
class Gemini(Asymcheck):
    """Each checkpoint goes to two agents, in processes of their own, on loopback.

    Attributes:
        keep_last: The newest so many are kept.
        agents: Their processes.
    """

    keep_last: int | None = KEPT
    agents: list[subprocess.Popen[str]] = field(default_factory=list)
    _hosts: list[str] = field(default_factory=list)

    @property
    def policy(self) -> str | Strategy:
        """Gemini's; but what it calls durable is in the memory of peers, not of this process."""
        from asymcheck.planning.strategies import strategies
        from asymcheck.planning.tiers import Placement

        return replace(strategies["gemini"], placement=Placement())

    @property
    def root(self) -> str:
        """The agents, held to the rate that the job's store is held to."""
        rated, mark, query = self.job.root.partition("?")
        if rated.startswith("throttled+"):
            return f"throttled+{self.root_to_load}{mark}{query}"
        return self.root_to_load

    @property
    def root_to_load(self) -> str:
        """The agents."""
        return f"peers://{','.join(self._hosts)}/bench"

    def start(self) -> None:
        """See ``System``."""
        try:
            self._hosts = [self._start_agent() for _ in range(_AGENTS)]
        except BaseException:
            self._end_agents()
            raise
        super().start()

    def _start_agent(self) -> str:
        """One agent; where it listens."""
        from asymcheck_lab.bench_child import line_of

        command = [sys.executable, "-c", _AGENT, "agent", "--listen", "127.0.0.1:0"]
        agent = subprocess.Popen(
            [*command, "--room-gib", str(_ROOM_GIB)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.agents.append(agent)
        with suppress(TimeoutError):
            words = line_of(agent, _WAIT_S).replace(",", " ").split()
            if words[:2] == ["listening", "on"]:
                return words[2]
        raise RunError("an agent did not start: does 'asymcheck agent' run here?")

    def checkpoint_bytes(self, count: int) -> int:
        """See ``System``: both copies, as the newest are kept alone."""
        stored: int = sum(handle.durable.result().stored_bytes for handle in self._handles)
        return _AGENTS * stored // count

    def close(self) -> None:
        """See ``System``."""
        try:
            super().close()
        finally:
            self._end_agents()

    def _end_agents(self) -> None:
        for agent in self.agents:
            agent.kill()
            agent.wait(_WAIT_S)
            if agent.stdout is not None:
                agent.stdout.close()
        self.agents = []
