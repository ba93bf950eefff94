"""The sections of the GPU script: what is checked and measured in one process.

Every function takes the device, so that tests can run it on the CPU with small models; nothing
that it measures means anything there.
"""

from __future__ import annotations

import gc
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import Any

import torch

from asymcheck import Checkpointer
from asymcheck.planning.strategies import Strategy, resolve
from asymcheck.storage.memory import MemoryStore
from asymcheck.storage.store import Buffer
from asymcheck_lab.data import BatchLoader, load_text
from asymcheck_lab.errors import RunError
from asymcheck_lab.fingerprint import fingerprint
from asymcheck_lab.gpu_script import SectionSpec, failure_text
from asymcheck_lab.models import FAMILIES, Size
from asymcheck_lab.record import median
from asymcheck_lab.rivals import Asymcheck, DcpAsync, Job, System, TorchSave
from asymcheck_lab.train import seed_everything

Tell = Callable[[Mapping[str, Any]], None]
_NEVER = 1 << 40
_CHECK = Size(
    context=64,
    batch=4,
    learning_rate=1e-3,
    warmup_steps=1,
    config={"n_layer": 2, "n_embd": 128, "n_head": 4, "attn_implementation": "eager"},
)
_CHECK_STEPS = 12


def _gpt2(layers: int, width: int, heads: int, batch: int) -> Size:
    return Size(
        context=1024,
        batch=batch,
        learning_rate=1e-4,
        warmup_steps=1,
        config={"vocab_size": 50257, "n_layer": layers, "n_embd": width, "n_head": heads},
    )


SIZES: Mapping[str, Size] = {
    "124m": _gpt2(12, 768, 12, 8),
    "774m": _gpt2(36, 1280, 20, 8),
    "1.5b": _gpt2(48, 1600, 25, 8),
    "3.3b": _gpt2(64, 2048, 32, 4),
    # For tests.
    "tiny": Size(
        context=32,
        batch=2,
        learning_rate=1e-3,
        warmup_steps=1,
        config={"n_layer": 1, "n_embd": 128, "n_head": 2},
    ),
}


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


def _sync(device: torch.device) -> None:
    """Wait for what trains, and not for copies on other streams."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class _Training:
    """A language model on a device, in bfloat16 where that is one."""

    def __init__(self, size: Size, device: torch.device, *, plain: bool = False) -> None:
        seed_everything(0)
        self.device = device
        self._family = FAMILIES["gpt2"]
        self._batches = BatchLoader(
            load_text(), context=size.context, batch=size.batch, seed=0
        )  # fmt: skip
        with device:  # weights are drawn where they stay: on the host that takes long
            self.model = self._family.build(size)
        self.model.to(device)
        fused = device.type == "cuda" and not plain
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=size.learning_rate, fused=fused
        )
        self._lower = fused

    def forward_and_backward(self) -> torch.Tensor:
        """One batch, up to the gradients."""
        self.optimizer.zero_grad()
        tokens = torch.from_numpy(next(self._batches)).to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._lower):
            loss = self._family.loss(self.model, tokens, tokens)
        loss.backward()
        return loss.detach()

    def state_bytes(self) -> int:
        """Of parameters and optimizer state."""
        moments = (
            value
            for state in self.optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        )
        return sum(t.nbytes for t in (*self.model.parameters(), *moments))


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
    training = _Training(_CHECK, device, plain=True)
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


# --- what a checkpoint costs ------------------------------------------------


@dataclass
class _Ours(Asymcheck):
    """Asymcheck with the newest checkpoint kept only: the disk is small."""

    def start(self) -> None:
        """See ``System``."""
        self._checkpointer = Checkpointer(
            self.job.folder,
            state={"model": self.job.model, "optim": self.job.optimizer},
            every_steps=_NEVER,
            keep_last=1,
            persist=self.persist,
        )
        self._checkpointer.restore()

    def details(self) -> dict[str, Any]:
        """Bandwidth and κ as the engine knows them, and the fences."""
        checkpointer = self._checkpointer
        snapshotter = checkpointer._snapshotter if checkpointer else None
        pacing = snapshotter._pacing if snapshotter else None
        reports = [h.durable.result() for h in self._handles]
        found: dict[str, Any] = {
            "fence_s": [r.fence_stall_s for r in reports],
            "copy_s": [r.copy_s for r in reports],
            "eager_bytes": [r.eager_bytes for r in reports],
        }
        if pacing is not None:
            phases = ("forward", "backward", "collective")
            found["copy_bytes_per_s"] = pacing.copy_bytes_per_s
            found["kappa"] = {p: pacing.contention.interval(p) for p in phases}  # type: ignore[arg-type]
        return found


@dataclass
class _Staged(DcpAsync):
    """DCP with a stager of its own.

    Attributes:
        stage_with: Makes it; ``None`` for DCP's default.
    """

    stage_with: Callable[[], Any] | None = None

    def start(self) -> None:
        """See ``System``."""
        super().start()
        if self.stage_with is not None:
            self._own_stager = self.stage_with()


def _default_stager(*, shared: bool, behind: bool) -> Callable[[], Any]:
    def make() -> Any:  # noqa: ANN401  a stager
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        return DefaultStager(
            StagingOptions(
                use_pinned_memory=True,
                use_shared_memory=shared,
                use_async_staging=behind,
                use_non_blocking_copy=True,
            )
        )

    return make


def _blocking_stager() -> Any:  # noqa: ANN401  a stager
    from torch.distributed.checkpoint.staging import BlockingAsyncStager

    return BlockingAsyncStager(cache_staged_state_dict=True)


SYSTEMS: Mapping[str, Callable[[Job], System]] = {
    "asymcheck": lambda job: _Ours(job, persist="process"),
    "dcp, thread, asynchronous stager": lambda job: _Staged(
        job, stage_with=_default_stager(shared=False, behind=True)
    ),
    "torch.save + fsync": TorchSave,
    "dcp, thread, pinned stager": lambda job: _Staged(
        job, stage_with=_default_stager(shared=False, behind=False)
    ),
    "dcp, thread, blocking stager": lambda job: _Staged(job, stage_with=_blocking_stager),
    "dcp, thread, default": _Staged,
    # Last: it leaves a process group and a pool of processes behind.
    "dcp, process, asynchronous stager": lambda job: _Staged(
        job, kind="process", stage_with=_default_stager(shared=True, behind=True)
    ),
}
"""By name, the most telling first: time may run out."""
ON_CPU = ("asymcheck", "torch.save + fsync", "dcp, thread, default")

_PLAIN_STEPS = 12
_WARM_STEPS = 3
_LEAST_BYTES_PER_S = 0.4e9
"""Of a disk, for a guess how long the first system of a model takes."""


def measure_systems(
    size: Size, device: torch.device, folder: Path, until_s: float, tell: Tell
) -> None:
    """Every system on one model, in this process; skips those that time is too short for."""
    training = _Training(size, device)
    for _ in range(_WARM_STEPS):
        training.forward_and_backward()
        training.optimizer.step()
    plain_s = median(_step(training, System(_job(training, folder))) for _ in range(_PLAIN_STEPS))
    state_bytes = training.state_bytes()
    tell({"system": "no checkpoints", "step_s": plain_s, "state_bytes": state_bytes})
    checkpoints = 3 if state_bytes < 4 << 30 else 1
    needed_s = 5.0 + (1 + checkpoints) * state_bytes / _LEAST_BYTES_PER_S
    for number, (name, make) in enumerate(SYSTEMS.items()):
        if device.type == "cpu" and name not in ON_CPU:
            continue
        about = {"system": name, "state_bytes": state_bytes}
        if until_s - monotonic() < needed_s:
            tell({**about, "skipped": "no time left"})
            continue
        begin_s = monotonic()
        job = replace(_job(training, folder / f"system{number}"), every=_NEVER)
        job.folder.mkdir(parents=True, exist_ok=True)
        try:
            tell({**about, **_measure_system(training, make(job), plain_s, checkpoints, until_s)})
            needed_s = 1.5 * (monotonic() - begin_s)  # the next one may be slower
        except Exception as failure:  # noqa: BLE001  the others are measured all the same
            tell({**about, "error": failure_text(failure)})
        finally:
            shutil.rmtree(job.folder, ignore_errors=True)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            os.sync()


def _job(training: _Training, folder: Path) -> Job:
    return Job(training.model, training.optimizer, folder, _NEVER)


def _step(training: _Training, system: System, number: int = 0, *, due: bool = False) -> float:
    """One step of the loop, with the device at rest before and after; returns its seconds."""
    _sync(training.device)
    begin_s = perf_counter()
    training.forward_and_backward()
    system.before_update()
    training.optimizer.step()
    system.after_update(number, due=due)
    _sync(training.device)
    return perf_counter() - begin_s


class _Blocked(System):
    """Passes calls on, and adds up how long the training thread was in them."""

    def __init__(self, inner: System) -> None:
        super().__init__(inner.job)
        self.inner = inner
        self.blocked_s = 0.0

    def before_update(self) -> None:
        """See ``System``."""
        begin_s = perf_counter()
        self.inner.before_update()
        self.blocked_s += perf_counter() - begin_s

    def after_update(self, step: int, *, due: bool) -> None:
        """See ``System``."""
        begin_s = perf_counter()
        self.inner.after_update(step, due=due)
        self.blocked_s += perf_counter() - begin_s


def _measure_system(
    training: _Training, system: System, plain_s: float, checkpoints: int, until_s: float
) -> dict[str, Any]:
    """One checkpoint to warm up, then counted ones, each with steps until it is durable.

    Lost is by how much the steps from the save to the first one after it became durable are
    longer than plain ones, in all.
    """
    system.start()
    watched = _Blocked(system)
    number, rows = 0, []
    for count in range(1 + checkpoints):
        number += 1
        blocked_s, boundary_s = watched.blocked_s, perf_counter()
        steps = [_step(training, watched, number, due=True)]
        saved = number
        while saved not in system.durable_s or len(steps) < 3:
            if monotonic() > until_s:
                raise RunError(f"checkpoint {count}: not durable when the time was over")
            number += 1
            steps.append(_step(training, watched, number))
        if count:
            rows.append(
                {
                    "lost_s": sum(steps) - len(steps) * plain_s,
                    "blocked_s": watched.blocked_s - blocked_s,
                    "durable_s": system.durable_s[saved] - boundary_s,
                    "steps": len(steps),
                }
            )
        _remove_older(system.job.folder, saved)
    system.drain()
    details = system.details()
    system.close()
    fences_s = details.get("fence_s", [])[1:]
    blocked = [r["blocked_s"] for r in rows]
    if fences_s:  # in the optimizer's hook, not in a call of the loop
        blocked = [a + b for a, b in zip(blocked, fences_s, strict=True)]
    return {
        "step_s": plain_s,
        "lost_s": median(r["lost_s"] for r in rows),
        "blocked_s": median(blocked),
        "durable_s": median(r["durable_s"] for r in rows),
        "copy_bytes_per_s": details.get("copy_bytes_per_s"),
        "rows": rows,
        "details": details,
    }


def _remove_older(folder: Path, saved: int) -> None:
    """What torch.save and DCP keep: a disk may hold two of the largest only."""
    for path in folder.glob("step-*"):
        with suppress(ValueError):
            if int(path.stem.removeprefix("step-")) < saved and path.parent == folder:
                if path.is_dir() and not (path / ".metadata").exists():
                    continue  # a checkpoint of ours: retention removes it
                shutil.rmtree(path) if path.is_dir() else path.unlink()


class _Nowhere(MemoryStore):
    """Drops what is written into packs and keeps the rest."""

    def write(self, name: str, parts: Iterable[Buffer]) -> int:
        """See ``Store``."""
        if name.endswith(".pack"):
            return sum(memoryview(part).nbytes for part in parts)
        return super().write(name, parts)


def measure_without_disk(size: Size, device: torch.device, tell: Tell) -> None:
    """Capture of a model whose checkpoints would not fit the disk: one slot, written nowhere."""
    training = _Training(size, device)
    for _ in range(_WARM_STEPS):
        training.forward_and_backward()
        training.optimizer.step()
    plain = System(_job(training, Path()))
    plain_s = median(_step(training, plain) for _ in range(_PLAIN_STEPS))
    state_bytes = training.state_bytes()
    about = {"system": "asymcheck, no disk", "state_bytes": state_bytes, "step_s": plain_s}
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if free < 1.3 * state_bytes:
        tell({**about, "skipped": f"{free >> 30} GiB of memory are free"})
        return
    with Checkpointer(
        _Nowhere(),
        state={"model": training.model, "optim": training.optimizer},
        every_steps=_NEVER,
    ) as checkpointer:
        checkpointer.restore()
        for number in (1, 2, 3):
            _sync(device)
            begin_s = perf_counter()
            handle = checkpointer.save(number)
            saved_s = perf_counter()
            training.forward_and_backward()
            training.optimizer.step()
            _sync(device)
            step_s = perf_counter() - begin_s
            report = handle.durable.result()
            if number == 1:
                continue  # it made and registered the slot
            lazy_bytes = report.raw_bytes - report.eager_bytes
            tell({
                **about,
                "lost_s": step_s - plain_s,
                "blocked_s": saved_s - begin_s + report.fence_stall_s,
                "copy_bytes_per_s": lazy_bytes / max(1e-9, report.copy_s),
            })  # fmt: skip
