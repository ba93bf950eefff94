"""One rank of what ``asymlab pace`` watches: ``python -m asymcheck_lab.pace_child SPEC``.

It trains for real over a real network, but for the time that the computation takes: there it
sleeps, as a host does while its accelerator computes. So what is seen is the network, and not who
had the processor. Each segment of steps saves by another pace; rank 0 says what it took.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from asymcheck import Checkpointer, Handle

NOTHING = "no checkpoints"
WARM = 2
"""Steps of a segment before its first checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceSpec:
    """What is trained.

    Attributes:
        rank: This one, of two.
        master: Where the ranks meet.
        root: The agents, without a pace; empty where no segment saves.
        segments: The pace of each; ``NOTHING`` for none.
        every: Steps between two checkpoints.
        counted: So many checkpoints of a segment are counted, after one that is not.
        layers: Of the model; each is a bucket of the all-reduce.
        width: Of a layer, which has its square of parameters.
        layer_s: For how long the forward pass of a layer sleeps; the backward pass twice that.
    """

    rank: int
    master: str
    root: str
    segments: tuple[str, ...]
    every: int = 6
    counted: int = 2
    layers: int = 6
    width: int = 512
    layer_s: float = 0.025

    @property
    def steps(self) -> int:
        """Of a segment."""
        return WARM + self.every * (1 + self.counted)


def _model(spec: PaceSpec) -> torch.nn.Module:
    import torch

    class Asleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
            sleep(spec.layer_s)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
            sleep(2 * spec.layer_s)
            return grad

    class Layer(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            slept = Asleep.apply(x)  # type: ignore[no-untyped-call]
            return torch.tanh(super().forward(slept))

    layers = [Layer(spec.width, spec.width, bias=False) for _ in range(spec.layers)]
    return torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(*layers), bucket_cap_mb=spec.width**2 * 4 / 2**20
    )


def main() -> None:
    """Entry of the process."""
    import torch
    import torch.distributed as dist

    given = json.loads(sys.argv[1])
    spec = PaceSpec(**{**given, "segments": tuple(given["segments"])})
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=spec.master,
        rank=spec.rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    torch.manual_seed(0)
    model = _model(spec)
    optimizer = torch.optim.AdamW(model.parameters())
    for number, pace in enumerate(spec.segments):
        found = _segment(spec, number, pace, model, optimizer)
        if spec.rank == 0:
            sys.stdout.write(json.dumps(found) + "\n")
            sys.stdout.flush()
    dist.destroy_process_group()


def _segment(
    spec: PaceSpec,
    number: int,
    pace: str,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
) -> dict[str, Any]:
    """Train for so many steps; what each counted one took, and each counted checkpoint."""
    import torch
    import torch.distributed as dist

    ckpt: Checkpointer | None = None
    if pace != NOTHING:
        from asymcheck import Checkpointer

        where, _, query = spec.root.partition("?")
        ckpt = Checkpointer(
            f"{where}/{number}?{query}&pace={pace}",
            state={"model": model, "optimizer": optimizer},
            keep_last=2,
        )
        ckpt.restore()
    handles: list[Handle] = []
    ended_s: list[float] = []
    dist.barrier()
    for step in range(1, spec.steps + 1):
        model(torch.randn(4, spec.width)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ended_s.append(perf_counter())
        if ckpt is not None and step % spec.every == WARM and step < spec.steps:
            handles.append(ckpt.save(step))
    durable = [handle.durable.result(60.0) for handle in handles[1:]]
    if ckpt is not None:
        ckpt.close()
    return {
        "pace": pace,
        "step_s": _counted(spec, ended_s),
        "durable_s": [report.durable_s for report in durable],
        "stored_bytes": [report.stored_bytes for report in durable],
    }


def _counted(spec: PaceSpec, ended_s: Sequence[float]) -> list[float]:
    """Seconds of each step from the second checkpoint on."""
    counted = ended_s[WARM + spec.every - 1 :]
    return [after - before for before, after in pairwise(counted)]


if __name__ == "__main__":
    main()
