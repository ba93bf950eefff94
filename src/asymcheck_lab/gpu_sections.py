"""The sections of the GPU script: what is checked and measured in one process.

Every function takes the device, so that tests can run it on the CPU with small models; nothing
that it measures means anything there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import sleep
from typing import Any

import torch

from asymcheck import Checkpointer
from asymcheck.planning.strategies import Strategy, resolve
from asymcheck_lab.errors import RunError
from asymcheck_lab.fingerprint import fingerprint
from asymcheck_lab.gpu_script import SectionSpec
from asymcheck_lab.gpu_systems import (
    SIZES,
    Tell,
    Training,
    measure_systems,
    measure_without_disk,
)
from asymcheck_lab.models import Size
from asymcheck_lab.record import median

_CHECK = Size(
    context=64,
    batch=4,
    learning_rate=1e-3,
    warmup_steps=1,
    config={"n_layer": 2, "n_embd": 128, "n_head": 4, "attn_implementation": "eager"},
)
_CHECK_STEPS = 12


NO_DISK = {"3.3b": "3.3b", "no-disk": "tiny"}
"""Sections that write nothing, and their sizes; the second is for tests."""


def run_section(spec: SectionSpec, until_s: float, tell: Tell) -> None:
    """Run the section of that name; blocks.

    Args:
        spec: Which one, where.
        until_s: Start nothing that would not end by then, on ``time.monotonic``'s clock.
        tell: Gets what was found, as soon as it is there.
    """
    device, folder = torch.device(spec.device), Path(spec.folder)
    if spec.name == "check":
        check(device, folder, tell)
    elif spec.name == "link":
        measure_link(tell)
    elif spec.name in NO_DISK:
        measure_without_disk(SIZES[NO_DISK[spec.name]], device, tell)
    else:
        measure_systems(SIZES[spec.name], device, folder, until_s, tell)


# --- bit for bit ------------------------------------------------------------


def check(device: torch.device, folder: Path, tell: Tell) -> None:
    """The path of the stream against the state itself and against blocking capture.

    Three trainings from one seed with deterministic algorithms: without checkpoints, with lazy
    capture whose copies are slowed down, and with blocking capture. Every checkpoint is loaded
    back and compared with what was live at its boundary, piece by piece.

    Raises:
        RunError: A checkpoint holds something else than was live.
    """
    warnings.simplefilter("ignore")  # some kernels have no deterministic form, and say so
    torch.use_deterministic_algorithms(True, warn_only=True)
    runs = {
        name: _checked(name, resolve(strategy) if strategy else None, device, folder)
        for name, strategy in (("none", ""), ("stream", "asymcheck"), ("blocking", "naive"))
    }
    torch.use_deterministic_algorithms(False)
    losses = {name: losses for name, (losses, _) in runs.items()}
    same_losses = losses["none"] == losses["stream"] == losses["blocking"]
    same_state = runs["stream"][1] == runs["blocking"][1]
    for what, same in (
        ("losses with lazy and blocking capture equal those without, bit for bit", same_losses),
        ("state saved by the stream equals that of blocking capture, bit for bit", same_state),
    ):
        tell({"what": what, "found": "yes" if same else "**no**", "ok": same})
    tell({
        "what": "checkpoints that equal the state of their boundary, bit for bit",
        "found": f"{2 * _CHECK_STEPS} of {2 * _CHECK_STEPS}",
        "ok": True,
    })  # fmt: skip


def _checked(
    name: str, strategy: Strategy | None, device: torch.device, folder: Path
) -> tuple[list[float], dict[int, dict[str, str]]]:
    """Losses, and the state at every boundary as it was loaded back."""
    training = Training(_CHECK, device, plain=True)
    state = {"model": training.model, "optim": training.optimizer}
    checkpointer = None
    if strategy is not None:
        checkpointer = Checkpointer(folder / name, state=state, strategy=strategy, every_steps=1)
        checkpointer.restore()
        assert checkpointer._snapshotter is not None
        checkpointer._snapshotter.copier.between = lambda: sleep(0.002)
    losses, live = [], {}
    for step in range(1, _CHECK_STEPS + 1):
        losses.append(training.forward_and_backward().item())
        training.optimizer.step()
        live[step] = fingerprint(training.model, training.optimizer, {})
        if checkpointer is not None:
            checkpointer.step(step)
    if checkpointer is None:
        return losses, {}
    checkpointer.close()
    loaded = {}
    with Checkpointer(folder / name, state=state, read_only=True) as reader:
        for step in reader.steps():
            reader.restore(step)
            loaded[step] = _state_only(fingerprint(training.model, training.optimizer, {}))
    for step, expected in live.items():
        wrong = [k for k, v in _state_only(expected).items() if loaded.get(step, {}).get(k) != v]
        if wrong:
            raise RunError(f"{name}, step {step}: {len(wrong)} pieces differ, such as {wrong[:3]}")
    return losses, loaded


def _state_only(found: dict[str, str]) -> dict[str, str]:
    return {key: value for key, value in found.items() if not key.startswith("rng/")}


# --- the link ---------------------------------------------------------------

_COPY_BYTES = 256 << 20
_COPIES = 8


def measure_link(tell: Tell) -> None:
    """Bandwidth from the device to the host, and what copying costs two kinds of kernels."""
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda")
    source.fill_(1)
    pinned = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    pageable = torch.empty(_COPY_BYTES, dtype=torch.uint8)
    pageable.fill_(0)
    rates = {}
    for name, target in (("pinned", pinned), ("pageable", pageable)):
        target.copy_(source, non_blocking=True)
        spent_s = [
            _device_s(partial(target.copy_, source, non_blocking=True)) for _ in range(_COPIES)
        ]
        rates[name] = _COPY_BYTES / median(spent_s)
        tell({
            "what": f"device to host, {name} memory",
            "found": f"{rates[name] / 1e9:.1f} GB/s",
            "bytes_per_s": rates[name],
        })  # fmt: skip
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    b = torch.ones(1 << 28, device="cuda")
    kernels: dict[str, Callable[[], Any]] = {
        "matrix products": lambda: torch.mm(a, a, out=out),
        "memory-bound kernels": lambda: b.add_(1.0),
    }
    for name, kernel in kernels.items():
        pairs = [_with_and_without(kernel, source, pinned) for _ in range(7)]
        kappas = sorted((with_s - without_s) / with_s for with_s, without_s in pairs)
        tell({
            "what": f"κ of copies beside {name}: seconds lost per second copied",
            "found": f"{median(kappas):.3f} ({kappas[0]:.3f} to {kappas[-1]:.3f})",
            "kappa": kappas,
        })  # fmt: skip


def _device_s(work: Callable[[], Any]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3


def _with_and_without(
    kernel: Callable[[], Any], source: torch.Tensor, pinned: torch.Tensor
) -> tuple[float, float]:
    """Seconds of kernels with copies on another stream all the time, and without."""

    def kernels() -> None:
        for _ in range(20):
            kernel()

    kernels()
    without_s = _device_s(kernels)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    # At 100 GB/s, more than any link has, so that they outlast the kernels.
    copies = 2 + int(2 * without_s * 100e9 / _COPY_BYTES)
    with torch.cuda.stream(side):
        for _ in range(copies):
            pinned.copy_(source, non_blocking=True)
    with_s = _device_s(kernels)
    if side.query():
        raise RunError("the copies ended before the kernels did: κ was not measured")
    torch.cuda.synchronize()
    return with_s, without_s
