"""One measured training in a process of its own: ``python -m asymcheck_lab.bench_run SPEC``.

Torch and the systems are imported when they are needed: a process that a system spawns
imports this module again, and must not pay for what it does not use.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, process_time, thread_time
from typing import TYPE_CHECKING, Any

from asymcheck_lab.bench_work import Workload, make_workload
from asymcheck_lab.errors import RunError

if TYPE_CHECKING:
    from asymcheck_lab.rivals import Job, System

_TICKS = os.sysconf("SC_CLK_TCK")
_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """One run.

    Attributes:
        system: A name out of ``rivals.RIVALS``.
        size: Of the model.
        model: Its name, or nothing for the GPT-2 of ``make bench``.
        steps: Counted steps.
        every: Steps between two checkpoints; one is due after the first counted step.
        warmup: Steps before, fewer than ``every``; after the last one a first checkpoint is
            saved and waited for.
        cores: The process and all that it starts stay on them.
        folder: Checkpoints go below it; empty.
        bytes_per_s: The library's own store writes no faster; 0 for as fast as the medium.
        check: Whether to save once more after the timed part, load that checkpoint into a
            fresh model and optimizer, and compare.
        verify: Whether to load every checkpoint back and compare it with the state that was
            saved. Costs time in the middle of steps: such a run is not to be timed.
        parallel: How the model is spread over ranks; ``none`` for one process.
        ranks: How many there are.
        rank: Which of them this is.
    """

    system: str
    size: str
    steps: int
    every: int
    warmup: int
    cores: tuple[int, ...]
    folder: str
    model: str = ""
    bytes_per_s: float = 0.0
    check: bool = False
    verify: bool = False
    parallel: str = "none"
    ranks: int = 1
    rank: int = 0

    @property
    def root(self) -> str:
        """Where the library's own store is, as a path or a URL."""
        if not self.bytes_per_s:
            return self.folder
        return f"throttled+{Path(self.folder).as_uri()}?bytes_per_s={self.bytes_per_s}"

    @property
    def first_counted(self) -> int:
        """Number of the first counted step; the warm-up's last one is saved explicitly."""
        return self.every

    @property
    def due_steps(self) -> list[int]:
        """Counted steps after which a checkpoint is due."""
        counted = range(self.first_counted, self.first_counted + self.steps)
        return [step for step in counted if step % self.every == 0]


@dataclass
class Watch:
    """Adds up the time of calls on the training thread, by the checkpoint that it belongs to.

    What comes before the next checkpoint is due belongs to the latest one.
    """

    blocked_s: dict[int, float] = field(default_factory=dict)
    owner: int = 0

    def call(self, action: Callable[[], None]) -> None:
        """Run ``action``; its time counts as blocked."""
        start_s = perf_counter()
        action()
        self.add(perf_counter() - start_s)

    def add(self, seconds: float) -> None:
        """Count time as blocked."""
        self.blocked_s[self.owner] = self.blocked_s.get(self.owner, 0.0) + seconds


@dataclass(frozen=True, slots=True)
class CpuClock:
    """CPU seconds so far.

    Attributes:
        training_s: Of the training thread.
        background_s: Of every other thread of the process, and of every process below it.
        machine_s: Of everything on the machine, the kernel's own threads included.
        steal_s: That the machine's host took away.
    """

    training_s: float
    background_s: float
    machine_s: float
    steal_s: float

    @staticmethod
    def now() -> CpuClock:
        """Read it; on the training thread."""
        training_s = thread_time()
        others_s = process_time() - training_s
        reaped = resource.getrusage(resource.RUSAGE_CHILDREN)
        children_s = reaped.ru_utime + reaped.ru_stime
        children_s += sum(_cpu_of(pid) for pid in descendants(os.getpid()))
        machine_s, steal_s = _machine_cpu()
        return CpuClock(training_s, others_s + children_s, machine_s, steal_s)

    def since(self, start: CpuClock) -> dict[str, float]:
        """What was used since then, as fields of a record."""
        return {
            "training_cpu_s": self.training_s - start.training_s,
            "background_cpu_s": self.background_s - start.background_s,
            "machine_cpu_s": self.machine_s - start.machine_s,
            "steal_s": self.steal_s - start.steal_s,
        }


def _stat_of(pid: int) -> list[str]:
    """Fields of a process from its state on, empty when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def _cpu_of(pid: int) -> float:
    fields = _stat_of(pid)
    # utime, stime, and those of children that it has waited for
    return sum(int(ticks) for ticks in fields[11:15]) / _TICKS


def _machine_cpu() -> tuple[float, float]:
    words = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()
    user, nice, system, _, _, irq, softirq, steal = (int(word) for word in words[1:9])
    return (user + nice + system + irq + softirq) / _TICKS, steal / _TICKS


def descendants(root: int) -> list[int]:
    """Every living process below ``root``, without it."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            fields = _stat_of(int(name))
            if fields:
                children.setdefault(int(fields[1]), []).append(int(name))
    found: list[int] = []
    left = [root]
    while left:
        below = children.get(left.pop(), [])
        found += below
        left += below
    return found


def measure(spec: RunSpec, timed: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Train and save as ``spec`` says; blocks.

    Args:
        spec: The run.
        timed: Called once all that is timed is over; memory counts no longer.

    Returns:
        What was measured, as fields of a record.

    Raises:
        RunError: A checkpoint was lost.
    """
    os.sched_setaffinity(0, spec.cores)

    import torch

    torch.set_num_threads(1)
    if spec.ranks > 1:
        _join(spec)
    run = _Run(spec)
    measured = run.go()
    timed()
    if spec.verify:
        measured["verified"] = run.verify()
    if spec.check:
        checked = run.check()
        measured["details"]["restore"] = checked.pop("restore", {})
        measured |= checked
    run.system.close()
    if spec.ranks > 1:
        torch.distributed.destroy_process_group()
    return measured


def _join(spec: RunSpec) -> None:
    from asymcheck_lab.rivals.base import join_ranks

    os.environ["LOCAL_RANK"] = str(spec.rank)
    join_ranks(Path(spec.folder), spec.rank, spec.ranks)


class _Run:
    """The live objects of one run."""

    def __init__(self, spec: RunSpec) -> None:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        from asymcheck_lab.rivals import RIVALS

        self._spec = spec
        self._rival = RIVALS[spec.system]
        self._workload = self._make(_SEED)
        self._watch = Watch()
        self._since_s = 0.0
        self._saved: dict[int, dict[str, str]] = {}
        self._ended_s: dict[int, float] = {}
        # Hooks run in the order in which they were registered: what a system registers for
        # itself lies between these two, and so does its time.
        register_optimizer_step_pre_hook(self._before_hooks)
        self.system: System = self._rival.make(self._job(self._workload))
        self.system.start()
        register_optimizer_step_pre_hook(self._after_hooks)

    def _make(self, seed: int) -> Workload:
        return make_workload(self._spec.model, self._spec.size, seed, self._spec.parallel)

    def _together(self) -> None:
        """Wait until all ranks are here."""
        if self._spec.ranks > 1:
            import torch.distributed as dist

            dist.barrier()

    def _job(self, workload: Workload) -> Job:
        from asymcheck_lab.rivals import Job

        folder = Path(self._spec.folder)
        return Job(workload.model, workload.optimizer, folder, self._spec.every, self._spec.root)

    def go(self) -> dict[str, Any]:
        """Warm up, then measure."""
        from asymcheck_lab.fingerprint import state_bytes

        spec, system = self._spec, self.system
        first = spec.first_counted
        boundaries: dict[int, float] = {}
        for step in range(first - spec.warmup, first):
            self._step(step, step == first - 1, boundaries)
        system.drain()
        self._together()
        cpu = CpuClock.now()
        begin_s = perf_counter()
        step_s = []
        for step in range(first, first + spec.steps):
            start_s = perf_counter()
            self._step(step, step in spec.due_steps, boundaries)
            self._ended_s[step] = perf_counter()
            step_s.append(self._ended_s[step] - start_s)
        loop_s = perf_counter() - begin_s
        system.drain()
        whole_s = perf_counter() - begin_s
        used = CpuClock.now().since(cpu)
        self._together()
        warmed, *counted = [self._checkpoint(step, at_s) for step, at_s in boundaries.items()]
        return {
            "state_bytes": state_bytes(self._workload.model, self._workload.optimizer),
            "disk_bytes": system.checkpoint_bytes(len(boundaries)),
            "step_s": step_s,
            "loop_s": loop_s,
            "whole_s": whole_s,
            "first_checkpoint": warmed,
            "checkpoints": counted,
            **used,
            "details": system.details(),
        }

    def _checkpoint(self, step: int, boundary_s: float) -> dict[str, Any]:
        at_s = self.system.durable_s.get(step)
        skipped = step in self.system.skipped
        if at_s is None and not skipped and self._rival.kind != "none":
            raise RunError(f"step {step}: never became durable with {self._spec.system}")
        later = (
            [] if at_s is None else [n for n, s in self._ended_s.items() if n > step and s <= at_s]
        )
        return {
            "step": step,
            "blocked_s": self._watch.blocked_s.get(step, 0.0),
            "durable_s": None if at_s is None else at_s - boundary_s,
            "lag_steps": None if at_s is None else len(later),
            "skipped": skipped,
        }

    def _step(self, step: int, due: bool, boundaries: dict[int, float]) -> None:
        from asymcheck_lab.bench_check import fingerprint_of

        work, watch, system = self._workload, self._watch, self.system
        work.forward_and_backward()
        watch.call(system.before_update)
        work.update()
        if due:
            if self._spec.verify:
                self._saved[step] = fingerprint_of(work)
            watch.owner = step
            boundaries[step] = perf_counter()
        watch.call(lambda: system.after_update(step, due=due))

    def _before_hooks(self, *_: object) -> None:
        self._since_s = perf_counter()

    def _after_hooks(self, *_: object) -> None:
        self._watch.add(perf_counter() - self._since_s)

    def verify(self) -> bool:
        """Load every checkpoint back and compare it with what was live when it was taken.

        Raises:
            RunError: One differs that should not; names the step and the first pieces.
        """
        from asymcheck_lab.bench_check import differing, fingerprint_of, tensors_of
        from asymcheck_lab.rivals import RNG

        for step, saved in self._rival.kept(self._saved.items()):
            if step not in self.system.durable_s or not self._rival.is_exact:
                continue
            fresh = self._make(_SEED + 1)
            self.system.load(step, self._job(fresh))
            wrong = differing(saved, fingerprint_of(fresh), self._rival.omits)
            if self._rival.omits not in ("", RNG):  # what else differs is said there
                wrong = [name for name in wrong if name in tensors_of(fresh)]
            if wrong:
                raise RunError(
                    f"step {step} of {self._spec.system} loads back differently: {wrong[:5]}, "
                    f"{len(wrong)} of {len(saved)} pieces"
                )
        return True

    def check(self) -> dict[str, Any]:
        """Save once more, load that into a fresh model and optimizer, and compare.

        Raises:
            RunError: It was skipped or never became durable.
        """
        from asymcheck_lab.bench_check import (
            PAGE_CACHE,
            compare_restored,
            fingerprint_of,
            forget_cached,
        )
        from asymcheck_lab.bench_child import touched_memory
        from asymcheck_lab.fingerprint import state_bytes

        spec = self._spec
        if self._rival.kind == "none":
            return {"saved_bytes": 0, "restore_s": None, "bit_exact": None, "max_error": None}
        step = spec.first_counted + spec.steps
        self._step(step, True, {})
        self.system.drain()
        if step in self.system.skipped:
            raise RunError(
                f"step {step}: {spec.system} skipped the checkpoint that was to be loaded back: "
                f"earlier ones were still under way"
            )
        if step not in self.system.durable_s:
            raise RunError(f"step {step}: never became durable with {spec.system}")
        saved = fingerprint_of(self._workload)
        fresh = self._make(_SEED + 1)
        blank = fingerprint_of(fresh)
        forget_cached(Path(spec.folder))
        # For the page cache, for what a new optimizer makes, and for what a system holds besides.
        nbytes = 3 * state_bytes(self._workload.model, self._workload.optimizer)
        touched = touched_memory(nbytes, 4)
        # What the first rank gave back while another is still at it, the host would take again.
        self._together()
        touched.close()
        self._together()
        begin_s = perf_counter()
        self.system.load(step, self._job(fresh))
        restore_s = perf_counter() - begin_s
        found = compare_restored(self._workload, saved, fresh, blank, self._rival.omits)
        restore = {"page_cache": PAGE_CACHE, "differing": found.pop("differing")}
        return {**found, "restore_s": restore_s, "restore": restore}


def main() -> None:
    """Entry of the process: the specification as JSON, and the file for what was measured."""
    spec = RunSpec(**json.loads(sys.argv[1]))
    measured = measure(spec)
    Path(sys.argv[2]).write_text(json.dumps(measured), encoding="utf-8")


if __name__ == "__main__":
    main()
