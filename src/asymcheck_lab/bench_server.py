"""A process that imports and reads what runs need, once, and forks one process for each run.

``python -m asymcheck_lab.bench_server WORKLOADS`` reads a job as a line of JSON and answers with
two: the number of the process that it forked, and how that one ended. It imports only what the
runs import anyway, and starts no thread, so that a fork is what a fresh process would be after
its imports: its memory, its hooks and its threads are its own.

Processes that a system spawns import this module again; torch is imported when it is needed.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from asymcheck_lab.bench_ranks import measure_ranks
from asymcheck_lab.bench_run import RunSpec, measure
from asymcheck_lab.errors import LabError, RunError

READY = "ready"


def _measure(spec: RunSpec, out: Path) -> None:
    mark = timed_mark(out).touch
    measured = measure_ranks(spec, out, mark) if spec.ranks > 1 else measure(spec, mark)
    if measured is not None:
        out.write_text(json.dumps(measured), encoding="utf-8")


def timed_mark(out: Path) -> Path:
    """A file that is there once the timed part of a run is over."""
    return out.with_suffix(".timed")


def _prepare(workloads: list[list[str]]) -> None:
    import torch
    import torch.distributed.checkpoint.state_dict_loader
    import torch.distributed.checkpoint.state_dict_saver

    import asymcheck
    from asymcheck_lab import bench_check  # noqa: F401
    from asymcheck_lab.bench_work import prepare_workload

    _ = asymcheck.Checkpointer
    torch.set_num_threads(1)
    for workload in workloads:
        with suppress(LabError):  # the runs say it
            prepare_workload(*workload)
    if len(os.listdir("/proc/self/task")) > 1:
        raise RunError("expected one thread before the first run, found more: it cannot be forked")


def main() -> None:
    """Entry of the process."""
    _prepare(json.loads(sys.argv[1]))
    _say(READY)
    for line in sys.stdin:
        job: dict[str, Any] = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _turn_to(job["log"])
            _measure(RunSpec(**job["spec"]), Path(job["out"]))
            return  # through the end of the interpreter, as any other process
        _say(pid)
        _say(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _say(value: object) -> None:
    sys.stdout.write(f"{json.dumps(value)}\n")
    sys.stdout.flush()


def _turn_to(log: str) -> None:
    """Read nothing, and say everything into a log."""
    quiet, loud = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(quiet, 0)
    os.dup2(loud, 1)
    os.dup2(loud, 2)


if __name__ == "__main__":
    main()
