"""From the records of a comparison to figures, a row for each system in each cell.

One number a run, then the median over rounds with its interval; a run is paired with the one
without checkpoints of the same round and cell.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asymcheck_lab.bench_stats import Estimate, Record, estimate
from asymcheck_lab.compare import Cell
from asymcheck_lab.record import median

_KINDS = ("none", "ours", "strategy", "rival")
P99 = 0.99


@dataclass(frozen=True)
class Row:
    """One system in one cell.

    Attributes:
        record: One of its records, for what they share.
        runs: Those that came to their end, by round.
        slowdown: Seconds of the whole run, as a part more than without checkpoints.
        stall_s: Blocked for a checkpoint: the median of each run.
        stall_p99_s: Of the checkpoints of all rounds, 99 of 100 blocked at most so long; of fewer
            than 100 it is the longest.
        durable_s: From the boundary until durable: the median of each run, of those that were.
        given_up: Checkpoints that never became durable, and all that were due.
        lag_steps: Steps that training was ahead when it became durable: the median of each run.
        restore_s: Loading the newest one.
        peak_bytes: Peak of memory above that without checkpoints.
        disk_bytes: Of a checkpoint.
        bit_exact: Whether all that is saved came back in every run; ``None`` without checkpoints.
        max_error: The largest of all runs, as a part of the largest number of its tensor.
        troubles: Runs that failed, and why a system is absent.
    """

    record: Record
    runs: Mapping[int, Record]
    slowdown: Estimate | None = None
    stall_s: Estimate | None = None
    stall_p99_s: float | None = None
    durable_s: Estimate | None = None
    given_up: tuple[int, int] = (0, 0)
    lag_steps: Estimate | None = None
    restore_s: Estimate | None = None
    peak_bytes: Estimate | None = None
    disk_bytes: Estimate | None = None
    bit_exact: bool | None = None
    max_error: float = 0.0
    troubles: Sequence[str] = ()

    @property
    def saved_bytes(self) -> int:
        """Of model and optimizer that a checkpoint holds."""
        return min((int(run["saved_bytes"]) for run in self.runs.values()), default=0)

    @property
    def state_bytes(self) -> int:
        """Of model and optimizer."""
        return max((int(run["state_bytes"]) for run in self.runs.values()), default=0)

    @property
    def missing(self) -> str:
        """What a checkpoint does not hold, in words; empty where it holds everything."""
        if self.record["kind"] == "none":
            return "everything"
        less = self.state_bytes - self.saved_bytes
        part = f"{100 * less / self.state_bytes:.0f} % of model and optimizer" if less else ""
        return "; ".join(filter(None, (part, self.record["omits"])))


@dataclass(frozen=True)
class CellRows:
    """What was found in a cell.

    Attributes:
        cell: The cell.
        rows: Systems, those that are not ranked at the end.
        step_s: A step without checkpoints, ``None`` where none was measured.
        rounds: Rounds of the cell.
    """

    cell: Cell
    rows: Sequence[Row] = field(default_factory=list)
    step_s: Estimate | None = None
    rounds: int = 0


def cell_of(record: Record) -> Cell:
    """The cell that a record belongs to."""
    return Cell(record["model"], record["size"], record["every"], record["store"])


def summarize_cells(records: Sequence[Record]) -> list[CellRows]:
    """Figures of one session, by cell in the order of the records.

    Args:
        records: Its runs; those that failed are left out of every figure.
    """
    cells: dict[Cell, list[Record]] = {}
    for record in records:
        cells.setdefault(cell_of(record), []).append(record)
    return [_summarize(cell, found) for cell, found in cells.items()]


def _summarize(cell: Cell, records: Sequence[Record]) -> CellRows:
    systems: dict[str, list[Record]] = {}
    for record in records:
        systems.setdefault(record["system"], []).append(record)
    without = {r["round"]: r for r in records if r["kind"] == "none" and not r.get("error")}
    rows = [_row(found, without) for found in systems.values()]
    rows.sort(
        key=lambda row: (
            row.record["kind"] != "none" and not row.record["ranked"],
            _KINDS.index(row.record["kind"]),
            row.record["title"],
        )
    )
    step_s = [median(run["step_s"]) for run in without.values()]
    return CellRows(
        cell,
        rows,
        estimate(step_s) if step_s else None,
        max(record["round"] for record in records),
    )


def _row(records: Sequence[Record], without: Mapping[int, Record]) -> Row:
    runs = {r["round"]: r for r in records if not (r.get("error") or r.get("absent"))}
    troubles = [
        f"not here: {r['absent']}"
        if r.get("absent")
        else f"round {r['round']} failed: {r['error'].splitlines()[-1][:200]}"
        for r in records
        if r["round"] not in runs
    ]
    if not runs or records[0]["kind"] == "none":
        return Row(records[0], runs, troubles=troubles)

    def over(of: Callable[[Record], float | None]) -> Estimate | None:
        found = [value for run in runs.values() if (value := of(run)) is not None]
        return estimate(found) if len(found) == len(runs) else None

    def paired(of: Callable[[Record, Record], float]) -> Estimate | None:
        return over(lambda r: of(r, without[r["round"]]) if r["round"] in without else None)

    checkpoints = [c for run in runs.values() for c in run["checkpoints"]]
    stalls_s = sorted(c["blocked_s"] for c in checkpoints)
    return Row(
        record=records[0],
        runs=runs,
        slowdown=paired(lambda run, none: run["whole_s"] / none["whole_s"] - 1),
        stall_s=over(lambda run: _middle(run, "blocked_s")),
        stall_p99_s=stalls_s[math.ceil(P99 * len(stalls_s)) - 1] if stalls_s else None,
        durable_s=over(lambda run: _middle(run, "durable_s")),
        given_up=(sum(c["durable_s"] is None for c in checkpoints), len(checkpoints)),
        lag_steps=over(lambda run: _middle(run, "lag_steps")),
        restore_s=over(lambda run: run["restore_s"]),
        peak_bytes=paired(lambda run, none: run["peak_bytes"] - none["peak_bytes"]),
        disk_bytes=over(lambda run: run["disk_bytes"]),
        bit_exact=all(run["bit_exact"] for run in runs.values()),
        max_error=max(run["max_error"] or 0.0 for run in runs.values()),
        troubles=troubles,
    )


def _middle(run: Record, name: str) -> float | None:
    values: list[Any] = [c[name] for c in run["checkpoints"] if c[name] is not None]
    return median(values) if values else None
