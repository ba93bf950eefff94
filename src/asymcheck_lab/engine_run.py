"""One measured run of the engine in a process of its own: ``python -m asymcheck_lab.engine_run``.

What is measured is what the training thread sees (``Clocked``) and what the library reports of
each checkpoint. Nothing is judged here: the record holds every single measurement.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from asymcheck import Checkpointer
from asymcheck.device.pacing import Pacing
from asymcheck.handles import Handle
from asymcheck.planning.strategies import Strategy, resolve
from asymcheck_lab.bench_run import CpuClock
from asymcheck_lab.engine_spec import EngineSpec
from asymcheck_lab.errors import RunError
from asymcheck_lab.record import median

_SETTLED = 4
"""Checkpoints before the counted ones: the first makes memory, the next two measure codecs."""
_LIMIT_S = 60.0
_NEVER = 1 << 40
"""Steps between two saves that nobody asks for."""


class Clocked:
    """A Checkpointer, an optimizer, and what the training thread sees of them.

    Args:
        model: Trained.
        optimizer: Of the model.
        strategy: ``None`` for no checkpoints at all.
        root: Where to.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        strategy: Strategy | None,
        root: str,
    ) -> None:
        self.optimizer = optimizer
        self._hook_s = [0.0, 0.0]
        # Hooks run in the order in which they were registered: the fence lies between these.
        register_optimizer_step_pre_hook(lambda *_: self._note(0))
        self.checkpointer: Checkpointer | None = None
        if strategy is not None:
            self.checkpointer = Checkpointer(
                root, state={"model": model, "optim": optimizer}, strategy=strategy,
                every_steps=_NEVER, keep_last=2,
            )  # fmt: skip
            self.checkpointer.restore()
        register_optimizer_step_pre_hook(lambda *_: self._note(1))
        self.number = 0

    def _note(self, which: int) -> None:
        self._hook_s[which] = perf_counter()

    @property
    def pacing(self) -> Pacing:
        """The engine's inside: windows, bandwidth, κ."""
        snapshotter = self.checkpointer._snapshotter if self.checkpointer else None
        assert snapshotter is not None
        assert snapshotter._pacing is not None
        return snapshotter._pacing

    def settle(self) -> None:
        """Wait until all is durable."""
        if self.checkpointer is not None:
            self.checkpointer.wait(_LIMIT_S)

    def cycle(self, forward_and_backward: Callable[[], None], *, save: bool) -> Cycle:
        """From one boundary, which saves or not, through the next update."""
        self.number += 1
        begin_s = perf_counter()
        handle = None
        if self.checkpointer is not None:
            call = self.checkpointer.save if save else self.checkpointer.step
            handle = call(self.number)
        open_s = perf_counter()
        forward_and_backward()
        self.optimizer.step()
        fence_begin_s, fence_end_s = self._hook_s
        return Cycle(
            handle, open_s - begin_s, fence_begin_s - open_s, fence_end_s - fence_begin_s
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cycle:
    """What the training thread saw from a boundary to the next update.

    Attributes:
        handle: Of the save, if there was one.
        step_s: In ``step()``.
        window_s: Forward and backward.
        fence_s: In the fence.
    """

    handle: Handle | None
    step_s: float
    window_s: float
    fence_s: float

    def row(self) -> dict[str, Any]:
        """As fields of a record, with the library's report; waits until that is there."""
        assert self.handle is not None
        report = asdict(self.handle.durable.result(_LIMIT_S))
        return {
            "step_s": self.step_s,
            "window_s": self.window_s,
            "fence_s": self.fence_s,
            **{k: report[k] for k in _REPORTED},
            "labels": {g["group"]: g["label"] for g in map(_as_dict, report["groups"])},
        }


_REPORTED = (
    "raw_bytes", "eager_bytes", "stored_bytes", "copy_s", "durable_s", "persist_s", "cpu_s",
    "encode_s", "write_s", "batches", "fidelity", "base",
)  # fmt: skip


def _as_dict(group: Any) -> dict[str, Any]:  # noqa: ANN401  a named tuple
    found: dict[str, Any] = group._asdict()
    return found


# --- a model that takes as long as it is told to ----------------------------


class _Burn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Layer) -> torch.Tensor:  # noqa: ANN401
        ctx.layer = layer
        layer.work(1)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # noqa: ANN401
        ctx.layer.work(2)
        return grads[0], None


class Layer(nn.Module):
    """Parameters, and a ``work`` that is called with 1 in forward and 2 in backward."""

    def __init__(self, numbers: int, work: Callable[[int], None]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(numbers))
        self.weight.grad = torch.randn(numbers)
        self.work = work

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Passes ``x`` on."""
        found: torch.Tensor = _Burn.apply(x, self)  # type: ignore[no-untyped-call]
        return found


class Synthetic(nn.Module):
    """Layers whose gradients are given: forward and backward do nothing but their work.

    Args:
        state_bytes: Of parameters and two moments, all float32.
        works: What each layer does.
    """

    def __init__(self, state_bytes: int, works: Sequence[Callable[[int], None]]) -> None:
        super().__init__()
        numbers = max(1, state_bytes // 12 // len(works))
        self.layers = nn.ModuleList(Layer(numbers, work) for work in works)
        self.start = nn.Parameter(torch.zeros(1))

    def forward(self) -> torch.Tensor:
        """One number that depends on every layer."""
        x: torch.Tensor = self.start
        for layer in self.layers:
            x = layer(x)
        return x

    def forward_and_backward(self) -> None:
        """One micro-batch."""
        self().sum().backward()


@dataclass
class Burner:
    """Computes for a given time by a number of products of matrices that fit into the cache.

    It is the number that is fixed: when something disturbs the computation it takes longer.

    Attributes:
        products: Per unit of work; for ``step_s`` see ``set``.
    """

    products: int = 1
    _a: torch.Tensor = field(default_factory=lambda: torch.randn(192, 192))

    def __call__(self, units: int) -> None:
        """Compute."""
        for _ in range(units * self.products):
            torch.mm(self._a, self._a)

    def set(self, step_s: float, layers: int) -> None:
        """Let forward and backward of so many layers take so long, measured now."""
        tries = []
        for _ in range(7):
            begin_s = perf_counter()
            for _ in range(200):
                torch.mm(self._a, self._a)
            tries.append((perf_counter() - begin_s) / 200)
        self.products = max(1, round(step_s / (3 * layers) / median(tries)))


# --- the benchmarks ---------------------------------------------------------

_LAYERS = 8
_REGIMES = {"long": 2.0, "short": 0.35}
"""W by R/B that is aimed at; what it turned out to be is in the record."""
_TRIES = 3
"""Rounds of a few checkpoints before the counted ones; the window is set between them."""


def _synthetic(spec: EngineSpec) -> tuple[Clocked, Synthetic, Burner]:
    torch.manual_seed(0)
    burner = Burner()
    model = Synthetic(spec.state_bytes, [burner] * _LAYERS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return Clocked(model, optimizer, resolve("asymcheck"), spec.root), model, burner


def measure_stall(spec: EngineSpec) -> dict[str, Any]:
    """What the loop waits for, with a window of the regime's length behind each copy."""
    clocked, model, burner = _synthetic(spec)
    burner.set(0.1, _LAYERS)
    cycles: list[Cycle] = []
    plain_s: list[float] = []
    bandwidths: list[float] = []
    for number in range(_TRIES * _SETTLED + spec.checkpoints):
        if 0 < number < _TRIES * _SETTLED and number % _SETTLED == 0:
            # What a copy does to a window, and a window to a copy, shows in both lengths only.
            window_s = median(cycle.window_s for cycle in cycles[1:])
            aim_s = _REGIMES[spec.case] * spec.state_bytes / clocked.pacing.copy_bytes_per_s
            burner.products = max(1, round(burner.products * aim_s / window_s))
        if number <= _TRIES * _SETTLED and number % _SETTLED == 0:
            cycles, plain_s, bandwidths = [], [], []
        plain_s.append(clocked.cycle(model.forward_and_backward, save=False).window_s)
        cycles.append(clocked.cycle(model.forward_and_backward, save=True))
        clocked.settle()
        bandwidths.append(clocked.pacing.copy_bytes_per_s)
    pacing = clocked.pacing
    return {
        "bandwidth_bytes_per_s": median(bandwidths),
        "plain_window_s": plain_s,
        "saves": [cycle.row() for cycle in cycles],
        "decision": pacing.decision.why if pacing.decision else "",
        "kappa": _kappa(pacing),
    }


def measure_durable(spec: EngineSpec) -> dict[str, Any]:
    """From a boundary to the commit, with training going on all the time."""
    clocked, model, burner = _synthetic(spec)
    burner.set(0.25, _LAYERS)
    rows = []
    for number in range(_SETTLED + spec.checkpoints):
        cycle = clocked.cycle(model.forward_and_backward, save=True)
        assert cycle.handle is not None
        until_s = perf_counter() + _LIMIT_S
        while not cycle.handle.durable.done():
            clocked.cycle(model.forward_and_backward, save=False)
            if perf_counter() > until_s:
                raise RunError(f"checkpoint {number}: not durable after {_LIMIT_S:.0f} s")
        if number >= _SETTLED:
            rows.append(cycle.row())
    return {"saves": rows, "kappa": _kappa(clocked.pacing)}


def measure_ablation(spec: EngineSpec) -> dict[str, Any]:
    """A language model under one of the strategies; without any for ``none``."""
    from asymcheck_lab.data import BatchLoader, load_text
    from asymcheck_lab.models import find
    from asymcheck_lab.train import seed_everything, vary

    seed_everything(0)
    family, size = find("gpt2", spec.size)
    model = family.build(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.learning_rate)
    loader = BatchLoader(load_text(), context=size.context, batch=size.batch, seed=0)

    def forward_and_backward() -> None:
        optimizer.zero_grad()
        family.loss(model, *vary(next(loader))).backward()

    strategy = None if spec.case == "none" else resolve(spec.case)
    clocked = Clocked(model, optimizer, strategy, spec.root)
    for number in range(_SETTLED * spec.every):
        save = strategy is not None and number > 0 and number % spec.every == 0
        clocked.cycle(forward_and_backward, save=save)
    clocked.settle()
    cycles: list[Cycle] = []
    owed_s: list[float] = []
    cpu, begin_s = CpuClock.now(), perf_counter()
    for number in range(spec.checkpoints * spec.every):
        save = strategy is not None and number % spec.every == 0
        cycle = clocked.cycle(forward_and_backward, save=save)
        if save:
            cycles.append(cycle)
            owed_s.append(0.0)
        if owed_s:
            owed_s[-1] += cycle.step_s + cycle.fence_s
    loop_s = perf_counter() - begin_s
    clocked.settle()
    used = CpuClock.now().since(cpu)
    rows = [{**c.row(), "stall_s": s} for c, s in zip(cycles, owed_s, strict=True)]
    return {"loop_s": loop_s, "saves": rows, **used}


def _kappa(pacing: Pacing) -> dict[str, Any]:
    """Interval of κ of each phase, ``None`` where it was not measured."""
    return {
        phase: pacing.contention.interval(phase)
        for phase in ("forward", "backward", "collective")
    }  # fmt: skip


def measure(spec: EngineSpec) -> dict[str, Any]:
    """Run one benchmark as ``spec`` says; blocks.

    Returns:
        What was measured, as fields of a record.
    """
    from asymcheck_lab.engine_link import measure_link

    os.sched_setaffinity(0, spec.cores)
    torch.set_num_threads(1)
    tasks: dict[str, Callable[[EngineSpec], dict[str, Any]]] = {
        "stall": measure_stall,
        "durable": measure_durable,
        "ablation": measure_ablation,
        "link": measure_link,
    }
    return tasks[spec.task](spec)


def main() -> None:
    """Entry of the process: the specification as JSON, and the file for what was measured."""
    spec = EngineSpec(**json.loads(sys.argv[1]))
    Path(sys.argv[2]).write_text(json.dumps(measure(spec)), encoding="utf-8")


if __name__ == "__main__":
    main()
