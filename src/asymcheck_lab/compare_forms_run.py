"""One strategy on a step of given time, in a process of its own: what its closed form is held to.

Forward and backward sleep, so that nothing disturbs them and they disturb nothing; the update, the
state, the Checkpointer and its store are real, and the store is held to a rate.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from asymcheck import Checkpointer
from asymcheck.handles import Handle
from asymcheck.planning.layout import CHUNK_BYTES, SMALL_BYTES, KiB
from asymcheck.planning.strategies import Strategy, resolve
from asymcheck.planning.variants import TRIES
from asymcheck.storage.store import open_store, write_whole
from asymcheck_lab.compare_forms import FormSpec
from asymcheck_lab.engine_run import Synthetic
from asymcheck_lab.errors import RunError
from asymcheck_lab.record import median

_LAYERS = 8
_PLAIN = 8
_SETTLED = 3
"""Checkpoints before the counted ones, beside those that may be in flight."""
_LIMIT_S = 120.0
_COMMITS, _SMALL_OBJECT_BYTES = 9, 16 * KiB
_NEVER = 1 << 40
"""Steps between two saves that nobody asks for."""


@dataclass
class _Save:
    begin_s: float
    went_on_s: float
    handle: Handle
    stall_s: float
    released_s: float = 0.0

    def note(self, _: object) -> None:
        """Its slot is free now, or stays with what is in memory alone."""
        self.released_s = perf_counter()


class _Loop:
    """A training that saves at some of its boundaries, and what that thread sees."""

    def __init__(
        self, model: Synthetic, optimizer: torch.optim.Optimizer, strategy: Strategy, root: str
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._hook_s = [0.0, 0.0]
        self._number = 0
        self.saves: list[_Save] = []
        self.windows_s: list[float] = []
        # Hooks run in the order in which they were registered: the fence lies between these.
        register_optimizer_step_pre_hook(lambda *_: self._note(0))
        self.checkpointer = Checkpointer(
            root,
            state={"model": model, "optim": optimizer},
            strategy=strategy,
            every_steps=_NEVER,
            keep_last=2,
        )
        self.checkpointer.restore()
        register_optimizer_step_pre_hook(lambda *_: self._note(1))

    def _note(self, which: int) -> None:
        self._hook_s[which] = perf_counter()

    def step(self, *, save: bool) -> None:
        """From a boundary, which saves or not, through the next update."""
        self._number += 1
        begin_s = perf_counter()
        if save:
            handle = self.checkpointer.save(self._number)
            self.saves.append(_Save(begin_s, perf_counter(), handle, 0.0))
            handle.durable.add_done_callback(self.saves[-1].note)
        else:
            self.checkpointer.step(self._number)
        open_s = perf_counter()
        self._model.forward_and_backward()
        self._optimizer.step()
        before_s, after_s = self._hook_s
        self.windows_s.append(before_s - open_s)
        self.saves[-1].stall_s += open_s - begin_s + after_s - before_s


def measure(spec: FormSpec) -> dict[str, Any]:
    """Save every so many steps, and see what each checkpoint costs; blocks.

    Returns:
        What went into the closed form and what came out of the measurement, as fields of a
        record; times of one checkpoint are means over the counted ones.
    """
    os.sched_setaffinity(0, spec.cores)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    window_s = spec.window_s
    model = Synthetic(
        spec.state_bytes, [lambda units: sleep(units * window_s / (3 * _LAYERS))] * _LAYERS
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    strategy = resolve(spec.strategy)
    plain_s = _plain_step_s(model, optimizer)
    copy_s = _copy_s(model, optimizer)
    commit_s = _commit_s(spec)
    loop = _Loop(model, optimizer, strategy, spec.root)
    settled = _SETTLED + strategy.admission.max_in_flight
    settled += 2 * TRIES if strategy.capture == "profiled" else 0
    begin_s = 0.0
    for number in range((settled + spec.checkpoints) * spec.every):
        if number == settled * spec.every:
            begin_s = perf_counter()
        loop.step(save=number % spec.every == 0)
    period_s = (perf_counter() - begin_s) / spec.checkpoints
    loop.checkpointer.close()
    chunks = [-(-t.nbytes // CHUNK_BYTES) for t in _tensors(model, optimizer)]
    return _found(loop.saves[settled:], period_s) | {
        "chunks": max(1, sum(chunks)),
        "step_s": plain_s,
        "window_s": median(loop.windows_s),
        "copy_s": copy_s,
        "commit_s": commit_s,
        "period_s": period_s,
    }


def _found(saves: list[_Save], period_s: float) -> dict[str, Any]:
    count = len(saves)
    reports = [save.handle.durable.result(_LIMIT_S) for save in saves]
    until_s = perf_counter() + _LIMIT_S
    while not all(save.released_s for save in saves):  # callbacks run a moment after the result
        if perf_counter() > until_s:
            raise RunError(f"not every checkpoint was released after {_LIMIT_S:.0f} s")
        sleep(0.001)
    durable_s = [save.begin_s + r.durable_s for save, r in zip(saves, reports, strict=True)]
    under_way_s = sum(
        max(0.0, end_s - save.went_on_s) for save, end_s in zip(saves, durable_s, strict=True)
    )
    return {
        "stall_s": sum(save.stall_s for save in saves) / count,
        "durable_s": sum(r.durable_s for r in reports) / count,
        "in_flight": under_way_s / count / period_s,
        "raw_bytes": reports[-1].raw_bytes,
        "batches": max(r.batches for r in reports),
        "eager_bytes": reports[-1].eager_bytes,
        "saves": [
            {
                "stored_bytes": r.stored_bytes,
                "copy_s": r.copy_s,
                # Not ``encode_s``: that holds waits for the copy.
                "encode_s": sum(group.cpu_s for group in r.groups),
                "write_s": r.write_s,
                "release_s": max(0.0, save.released_s - end_s),
            }
            for save, r, end_s in zip(saves, reports, durable_s, strict=True)
        ],
    }


def _plain_step_s(model: Synthetic, optimizer: torch.optim.Optimizer) -> float:
    seconds = []
    for _ in range(_PLAIN):
        begin_s = perf_counter()
        model.forward_and_backward()
        optimizer.step()
        seconds.append(perf_counter() - begin_s)
    return median(seconds[2:])


def _tensors(model: Synthetic, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Parameters and their two moments, those that are chunks of their own."""
    tensors = [p.detach() for p in model.parameters()]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return [tensor for tensor in tensors if tensor.nbytes >= SMALL_BYTES]


def _copy_s(model: Synthetic, optimizer: torch.optim.Optimizer) -> float:
    """Of the whole state into memory that was used before."""
    tensors = _tensors(model, optimizer)
    copies = [torch.zeros_like(tensor) for tensor in tensors]
    seconds = []
    for _ in range(5):
        begin_s = perf_counter()
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor)
        seconds.append(perf_counter() - begin_s)
    return median(seconds)


def _commit_s(spec: FormSpec) -> float:
    """Of making three small objects durable: so many make a checkpoint, pack, index, manifest."""
    with tempfile.TemporaryDirectory(dir=Path(spec.folder).parent) as folder:
        store = open_store(replace(spec, folder=folder).root)
        store.prepare()
        seconds = []
        for number in range(_COMMITS):
            begin_s = perf_counter()
            for part in range(3):
                write_whole(store, f"step-{number}/{part}", [bytes(_SMALL_OBJECT_BYTES)])
            seconds.append(perf_counter() - begin_s)
    return median(seconds)


def main() -> None:
    """Entry of the process: the specification as JSON, and the file for what was measured."""
    spec = FormSpec(**json.loads(sys.argv[1]))
    Path(sys.argv[2]).write_text(json.dumps(measure(spec)), encoding="utf-8")


if __name__ == "__main__":
    main()
