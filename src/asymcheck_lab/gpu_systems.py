"""What a checkpoint costs on a device: systems that share one model in one process."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

import torch

from asymcheck import Checkpointer
from asymcheck.storage.memory import MemoryStore
from asymcheck.storage.store import Buffer
from asymcheck_lab.data import BatchLoader, load_text
from asymcheck_lab.errors import RunError
from asymcheck_lab.fingerprint import state_bytes
from asymcheck_lab.gpu_script import failure_text
from asymcheck_lab.models import FAMILIES, Size
from asymcheck_lab.record import median
from asymcheck_lab.rivals import Asymcheck, DcpAsync, Job, System, TorchSave
from asymcheck_lab.train import seed_everything

Tell = Callable[[Mapping[str, Any]], None]
_NEVER = 1 << 40


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


def _sync(device: torch.device) -> None:
    """Wait for what trains, and not for copies on other streams."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class Training:
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
        return state_bytes(self.model, self.optimizer)


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
    training = Training(size, device)
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


def _job(training: Training, folder: Path) -> Job:
    return Job(training.model, training.optimizer, folder, _NEVER)


def _step(training: Training, system: System, number: int = 0, *, due: bool = False) -> float:
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
    training: Training, system: System, plain_s: float, checkpoints: int, until_s: float
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
    training = Training(size, device)
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
