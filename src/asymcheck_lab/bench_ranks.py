"""A measured run of several ranks: each a process of its own, and one record of them all."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from asymcheck_lab.bench_run import RunSpec, measure
from asymcheck_lab.parallel import PARALLELS


def measure_ranks(spec: RunSpec, out: Path, timed: Callable[[], None]) -> dict[str, Any] | None:
    """Fork the ranks of a run off this process, and wait for them; blocks.

    When one fails, the others are killed, and this process ends with code 1; what went wrong stands
    on stderr. How a rank ends that has measured all is its own affair: libraries that leave threads
    behind, gloo among them, sometimes abort at the end of the interpreter. How long all may take is
    up to who waits for this process.

    Args:
        spec: The run.
        out: Beside it each rank writes what it measured.
        timed: Called once all that is timed is over; memory counts no longer.

    Returns:
        What was measured, as fields of a record; ``None`` in a rank, which has nothing left to do.
    """
    running: dict[int, int] = {}
    for rank in range(spec.ranks):
        pid = os.fork()
        if pid == 0:
            measured = measure(replace(spec, rank=rank), timed if rank == 0 else lambda: None)
            _of_rank(out, rank).write_text(json.dumps(measured), encoding="utf-8")
            return None
        running[pid] = rank
    while running:
        pid, status = os.wait()
        rank = running.pop(pid)
        if status and not _of_rank(out, rank).exists():
            for other in running:
                with suppress(ProcessLookupError):
                    os.kill(other, signal.SIGKILL)
            sys.exit(1)
    found = [json.loads(_of_rank(out, rank).read_text("utf-8")) for rank in range(spec.ranks)]
    return merged(found, PARALLELS[spec.parallel].stage > 0)


def _of_rank(out: Path, rank: int) -> Path:
    return out.with_suffix(f".{rank}.json")


def merged(found: Sequence[Mapping[str, Any]], is_shared: bool) -> dict[str, Any]:
    """One record of what the ranks measured.

    Times are those of the slowest rank: of each step, each checkpoint, and of loading. CPU
    seconds are added up; those of the machine are the same for all.

    Args:
        found: What each rank measured, in their order.
        is_shared: Whether each rank holds a part of the state, else all of it.
    """
    first = found[0]

    def most(name: str) -> Any:  # noqa: ANN401  a number or null
        return max((one[name] for one in found if one[name] is not None), default=None)

    def total(name: str) -> float:
        return sum(float(one[name]) for one in found)

    def held(name: str) -> Any:  # noqa: ANN401  a number or null
        return total(name) if is_shared else most(name)

    checked = {}
    if "bit_exact" in first:
        exact = [one["bit_exact"] for one in found]
        checked = {
            "saved_bytes": held("saved_bytes"),
            "restore_s": most("restore_s"),
            "bit_exact": None if None in exact else all(exact),
            "max_error": most("max_error"),
        }
    return {
        **first,
        "state_bytes": held("state_bytes"),
        "step_s": [max(steps) for steps in zip(*(one["step_s"] for one in found), strict=True)],
        **{name: most(name) for name in ("loop_s", "whole_s", "machine_cpu_s", "steal_s")},
        **{name: total(name) for name in ("training_cpu_s", "background_cpu_s")},
        "first_checkpoint": _slowest([one["first_checkpoint"] for one in found]),
        "checkpoints": [
            _slowest(one) for one in zip(*(one["checkpoints"] for one in found), strict=True)
        ],
        **checked,
    }


def _slowest(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One checkpoint as all ranks saw it; it is durable when it is for each of them."""
    names = ("durable_s", "lag_steps")
    late = {
        name: None if any(one[name] is None for one in found) else max(one[name] for one in found)
        for name in names
    }
    return {
        **found[0],
        "blocked_s": max(one["blocked_s"] for one in found),
        **late,
        "skipped": any(one["skipped"] for one in found),
    }
