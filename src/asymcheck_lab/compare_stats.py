"""From records to figures: one cell per thing measured, one row per system.

A *cell* is a model of a size, a store and an interval on one machine; only inside one are systems
compared. Every figure is one number a run, then the median over rounds with its interval.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from asymcheck_lab.bench_stats import Estimate, estimate
from asymcheck_lab.compare_records import KINDS, Machine, Measured, Run
from asymcheck_lab.record import median

CHANCE = 0.05
"""Two systems are told apart where chance alone does it more rarely than this."""
LEAST_SHARE = 0.01
"""What differs by less counts as the same, however sure the difference is."""


def can_tell_apart(one: int, other: int | None = None) -> bool:
    """Whether so many rounds can tell two systems apart at all.

    The intervals of few rounds go from the smallest value to the largest. Those of ``n`` and
    ``m`` values of equal systems lie apart with a chance of 2 / C(n + m, n): one in ten for three
    rounds each, one in 35 for four.
    """
    other = one if other is None else other
    return 2 / math.comb(one + other, one) <= CHANCE


def told_apart(one: Estimate, other: Estimate) -> bool:
    """Whether two medians differ by more than chance and by at least ``LEAST_SHARE``.

    Where their intervals have a point in common, the difference may be chance.
    """
    apart = abs(one.median - other.median)
    least = LEAST_SHARE * max(abs(one.median), abs(other.median))
    return can_tell_apart(one.count, other.count) and apart > least and not one.overlaps(other)


# --- columns ----------------------------------------------------------------

Measure = Callable[[Measured, Measured | None], float | None]


@dataclass(frozen=True, slots=True)
class Column:
    """A figure of the table.

    Attributes:
        key: Its name.
        title: Above the column.
        unit: What the numbers are in.
        definition: For who reads the page.
        of: From a run, and the one without checkpoints of the same round, to one number.
        scale: From that number to the unit.
        signed: Whether a sign is shown.
        compared: Whether less is better, and the best is marked.
    """

    key: str
    title: str
    unit: str
    definition: str
    of: Measure
    scale: float = 1.0
    signed: bool = False
    compared: bool = True

    def text(self, value: float) -> str:
        """A figure for people; a share with one digit behind the point, a count with none."""
        if self.unit == "steps":
            return f"{value:g}"
        return number_text(value, 1 if self.unit == "%" else None, signed=self.signed)


def number_text(value: float, digits: int | None = None, *, signed: bool = False) -> str:
    """With three digits that count or more, and a thin space between thousands."""
    size = abs(value)
    if digits is None:
        digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 or size == 0 else 3
    text = f"{size:,.{digits}f}" if size >= 1e-3 or size == 0 else f"{size:.2g}"
    sign = "\N{MINUS SIGN}" if value < 0 else "+" if signed and value > 0 else ""
    return sign + text.replace(",", "\N{NARROW NO-BREAK SPACE}")


def _blocked(run: Measured) -> list[float]:
    return [c.blocked_s for c in run.checkpoints]


def _durable(run: Measured) -> list[float]:
    return [c.durable_s for c in run.checkpoints if c.durable_s is not None]


def _lag(run: Measured) -> list[float]:
    return [c.lag_steps for c in run.checkpoints if c.lag_steps is not None]


def _median_of(values: Callable[[Measured], list[float]]) -> Measure:
    return lambda run, _: median(found) if (found := values(run)) else None


COLUMNS: Sequence[Column] = (
    Column(
        "slowdown",
        "slowdown",
        "%",
        "How much longer the counted steps took, until every checkpoint was durable, than those "
        "of the run without checkpoints of the same round. Below zero means: less than the noise.",
        lambda run, none: None if none is None else run.whole_s / none.whole_s - 1,
        scale=100,
        signed=True,
    ),
    Column(
        "stall_p50",
        "stall p50",
        "ms",
        "Time on the training thread inside the system's own calls, for one checkpoint: the "
        "median of a run.",
        _median_of(_blocked),
        scale=1000,
    ),
    Column(
        "stall_p99",
        "stall p99",
        "ms",
        "The same, of all checkpoints of all rounds: 99 of 100 took at most this. Of fewer than "
        "100 checkpoints it is the largest. It has no interval and is not compared.",
        lambda run, _: max(_blocked(run), default=None),
        scale=1000,
        compared=False,
    ),
    Column(
        "durable_p50",
        "durable p50",
        "s",
        "From the boundary of a step until its checkpoint was written and its files and their "
        "names were given to fsync: the median of a run, over checkpoints that became durable.",
        _median_of(_durable),
    ),
    Column(
        "stored",
        "stored",
        "MB",
        "Bytes of one checkpoint in the store, the mean of a run.",
        lambda run, _: run.disk_bytes,
        scale=1e-6,
    ),
    Column(
        "raw",
        "raw",
        "MB",
        "Bytes of model and optimizer that one checkpoint holds, before any encoding.",
        lambda run, _: run.saved_bytes,
        scale=1e-6,
        compared=False,
    ),
    Column(
        "restore",
        "restore",
        "s",
        "Loading a checkpoint into a model and an optimizer that are ready for it.",
        lambda run, _: run.restore_s,
    ),
    Column(
        "peak",
        "peak memory",
        "MB",
        "Greatest memory of all processes of the run, above that of the run without checkpoints "
        "of the same round.",
        lambda run, none: None if none is None else run.peak_bytes - none.peak_bytes,
        scale=1e-6,
        signed=True,
    ),
    Column(
        "lag",
        "lag p50",
        "steps",
        "Steps that training was ahead of a checkpoint when that became durable: what a crash at "
        "that moment costs beside the interval.",
        _median_of(_lag),
        compared=False,
    ),
)


# --- rows -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Value:
    """What stands in one place of the table.

    Attributes:
        estimate: Median and interval, in the unit of the column.
        note: Further words on it.
        partial: Whether it leaves something out, and so is not compared.
    """

    estimate: Estimate
    note: str = ""
    partial: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """What comparing says of a value.

    Attributes:
        best: Alone the best; else one of several at the top that are not told apart.
        among: Systems that were compared: those of the same group.
    """

    best: bool
    among: int


@dataclass(frozen=True)
class Row:
    """One system in a cell.

    Attributes:
        run: A record of it, for what all its records share.
        runs: The ones that came to their end, with the one without checkpoints of the round.
        troubles: What went wrong: the round (0 for all), and what was said.
        values: Key of a column to its value; those that are not defined are left out.
        marks: Key of a column to what comparing says.
        group: Letter that systems share which save the same state; empty where not compared.
    """

    run: Run
    runs: Sequence[tuple[Measured, Measured | None]]
    troubles: Sequence[tuple[int, str]]
    values: Mapping[str, Value]
    marks: Mapping[str, Mark] = field(default_factory=dict)
    group: str = ""

    @property
    def state_bytes(self) -> float:
        """Of model and optimizer."""
        return max((run.state_bytes for run, _ in self.runs), default=0.0)

    @property
    def omits(self) -> str:
        """What a checkpoint does not hold, said by the system and measured; empty for nothing."""
        if self.run.kind == "none" or not self.runs:
            return self.run.omits
        less = self.state_bytes - min(run.saved_bytes for run, _ in self.runs)
        part = (
            f"{max(1, round(100 * less / self.state_bytes))} % of model and optimizer"
            if less > 0
            else ""
        )
        return "; ".join(filter(None, (part, self.run.omits)))

    @property
    def bit_exact(self) -> bool | None:
        """Whether every checkpoint that was loaded came back as it was; ``None``: not known."""
        found = [run.bit_exact for run, _ in self.runs]
        return False if False in found else True if found and None not in found else None

    @property
    def max_error(self) -> float | None:
        """Greatest difference of any run; ``None`` where nothing was compared."""
        return max((r.max_error for r, _ in self.runs if r.max_error is not None), default=None)

    @property
    def exact(self) -> str:
        """In words: whether what was loaded is what was saved."""
        if self.run.kind == "none":
            return "–"
        if self.bit_exact is None:
            return "not checked"
        if self.bit_exact:
            return "yes"
        return "no" if self.max_error is None else f"no: ≤ {self.max_error:.2g}"

    @property
    def blocked_s(self) -> list[float]:
        """Of every counted checkpoint of every run."""
        return [seconds for run, _ in self.runs for seconds in _blocked(run)]

    @property
    def why_unranked(self) -> str:
        """Why it is compared with no other, empty where it is."""
        if self.run.kind == "none":
            return "what the others are compared with"
        if not self.run.ranked:
            return self.run.why_unranked or "the results do not say why"
        if self.bit_exact is False:
            return "restores other values than were saved"
        if self.troubles:
            return f"failed in {len(self.troubles)} of {len(self.troubles) + len(self.runs)} runs"
        return ""

    @property
    def is_unranked(self) -> bool:
        """Whether it is a system, and compared with no other."""
        return self.run.kind != "none" and bool(self.why_unranked)


@dataclass(frozen=True)
class CellRows:
    """What is compared.

    Attributes:
        machine: Where it was measured.
        model: What was trained.
        size: Which size of it.
        store: Where checkpoints went.
        every: Steps between two.
        parallel: How it was spread over ranks.
        ranks: How many there were.
        rows: Systems that were measured.
        missing: Systems that were not: nothing of theirs came to its end.
        newest: A record of the session that is shown.
        left_out: Records of other sessions.
        rounds: Rounds of the session.
        step_s: A step without checkpoints, ``None`` where none was measured.
    """

    machine: Machine
    model: str
    size: str
    store: str
    every: int
    parallel: str
    ranks: int
    rows: Sequence[Row]
    missing: Sequence[Row]
    newest: Run
    left_out: int
    rounds: int
    step_s: Estimate | None

    @property
    def trained(self) -> str:
        """Model, size, and how they were spread over ranks."""
        spread = "" if self.ranks == 1 else f", {self.parallel} on {self.ranks} ranks"
        return f"{self.model} {self.size}{spread}"


def machines_of(runs: Iterable[Run]) -> list[Machine]:
    """Every machine, in the order of its first record."""
    return list(dict.fromkeys(run.machine for run in runs))


_Key = tuple[Machine, str, str, str, int, str, int]


def cells_of(runs: Sequence[Run]) -> list[CellRows]:
    """Every cell, of one session only; by machine, then as the records come.

    That is the newest of those with rounds enough to tell systems apart, or the newest. What is
    not ranked, and so not compared, stands last in each.
    """
    groups: dict[_Key, list[Run]] = {}
    for run in runs:
        where = (run.machine, run.model, run.size, run.store, run.every, run.parallel, run.ranks)
        groups.setdefault(where, []).append(run)
    order = machines_of(runs)
    keys = sorted(groups, key=lambda key: order.index(key[0]))
    return [_cell_of(key, groups[key]) for key in keys]


def _cell_of(key: _Key, runs: Sequence[Run]) -> CellRows:
    rounds: dict[str, set[int]] = {}
    for run in runs:
        rounds.setdefault(run.session, set()).update(() if run.absent else (run.round,))
    session = max(rounds, key=lambda name: (can_tell_apart(len(rounds[name])), name))
    shown = [run for run in runs if run.session == session]
    without = {r.round: r.measured for r in shown if r.kind == "none" and r.measured}
    by_system: dict[str, list[Run]] = {}
    for run in shown:
        by_system.setdefault(run.system, []).append(run)
    rows = [_row_of(found, without) for found in by_system.values()]
    rows.sort(key=_place_of)
    measured = _compare([row for row in rows if row.runs])
    steps = [median(run.step_s) for run in without.values() if run.step_s]
    return CellRows(
        *key,
        rows=measured,
        missing=[row for row in rows if not row.runs],
        newest=shown[-1],
        left_out=len(runs) - len(shown),
        rounds=len(rounds[session]),
        step_s=estimate(steps) if steps else None,
    )


def _place_of(row: Row) -> tuple[bool, int, str, str]:
    """In the table: what is not ranked stands last."""
    run = row.run
    return row.is_unranked, KINDS.index(run.kind), run.title, run.system


def _row_of(records: Sequence[Run], without: Mapping[int, Measured]) -> Row:
    runs = [(r.measured, without.get(r.round)) for r in records if r.measured]
    troubles = [
        (r.round, f"not here: {r.absent}" if r.absent else f"failed: {r.error}")
        for r in records
        if not r.measured
    ]
    values = {}
    if runs and records[0].kind != "none":
        for column in COLUMNS:
            value = _value_of(column, runs)
            if value is not None:
                values[column.key] = value
    return Row(records[0], runs, troubles, values)


def _value_of(column: Column, runs: Sequence[tuple[Measured, Measured | None]]) -> Value | None:
    found = [v for run, none in runs if (v := column.of(run, none)) is not None]
    if not found:
        return None
    partial = len(found) < len(runs)
    notes = [f"{len(found)} of {len(runs)} runs"] if partial else []
    if column.key == "stall_p99":
        blocked = sorted(seconds for run, _ in runs for seconds in _blocked(run))
        found = [blocked[math.ceil(0.99 * len(blocked)) - 1]]
        notes.append(f"of {len(blocked)}")
    if column.key == "durable_p50":
        due = [checkpoint for run, _ in runs for checkpoint in run.checkpoints]
        skipped = sum(c.skipped for c in due)
        durable = sum(c.durable_s is not None for c in due)
        if durable < len(due):
            partial = True
            notes.append(f"{durable} of {len(due)} became durable")
        if skipped:
            notes.append(f"{skipped} skipped: others were under way")
    middle = estimate([column.scale * value for value in found])
    return Value(middle, ", ".join(notes), partial)


# --- comparing --------------------------------------------------------------


def _compare(rows: Sequence[Row]) -> list[Row]:
    """Mark the best of each column, among the systems that save the same state."""
    states = list(dict.fromkeys(_state_of(row) for row in rows if not row.why_unranked))
    compared = []
    for row in rows:
        if row.why_unranked:
            compared.append(row)
            continue
        state = _state_of(row)
        others = [r for r in rows if not r.why_unranked and _state_of(r) == state]
        marks = {c.key: mark for c in COLUMNS if c.compared and (mark := _mark_of(c, row, others))}
        compared.append(replace(row, marks=marks, group=_letter(states.index(state))))
    return compared


def _state_of(row: Row) -> tuple[str, bool | None]:
    """Systems are compared where this is the same."""
    return row.omits, row.bit_exact


def _letter(number: int) -> str:
    letters = string.ascii_uppercase
    return letters[number] if number < len(letters) else str(number + 1)


def _mark_of(column: Column, row: Row, group: Sequence[Row]) -> Mark | None:
    """What comparing says of a row; ``None`` where it is not at the top, or alone."""
    found = [v for r in group if (v := r.values.get(column.key)) and not v.partial]
    own = row.values.get(column.key)
    if len(found) < 2 or own not in found:
        return None
    lowest = min((value.estimate for value in found), key=lambda e: e.median)
    top = [v for v in found if v.estimate is lowest or not told_apart(v.estimate, lowest)]
    return Mark(len(top) == 1, len(found)) if own in top else None
