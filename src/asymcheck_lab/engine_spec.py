"""What one run of the engine's benchmarks is; loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Task = Literal["stall", "durable", "ablation", "link"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """One run.

    Attributes:
        task: Which benchmark.
        case: What is varied: a regime, a strategy or a partitioner.
        store: ``disk``, or megabytes a second.
        checkpoints: Counted ones.
        state_bytes: Parameters and two moments; of the synthetic models.
        cores: The process and all that it starts stay on them.
        folder: Checkpoints go below it; empty.
        latency_s: Of each write to a store that is held to a rate.
        every: Steps between two checkpoints; of the language model.
        size: Of the language model.
        shared: Whether copy and collectives use one link.
        step_s: Computation of forward and backward; of the model with a link.
    """

    task: Task
    case: str
    store: str
    checkpoints: int
    state_bytes: int = 0
    latency_s: float = 0.0
    every: int = 0
    size: str = "demo"
    shared: bool = False
    step_s: float = 0.0
    cores: tuple[int, ...] = ()
    folder: str = ""

    @property
    def root(self) -> str:
        """Of the checkpoints, as a path or a URL."""
        if self.store == "disk":
            return self.folder
        rate = float(self.store) * 1e6
        return f"throttled+file://{self.folder}?bytes_per_s={rate}&latency_s={self.latency_s}"
