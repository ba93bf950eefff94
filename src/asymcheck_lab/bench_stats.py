"""From the records of a benchmark to figures: one number a run, paired by round, with intervals.

Nothing here assumes a distribution: medians, and intervals between order statistics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from asymcheck_lab.record import median
from asymcheck_lab.rivals import BASELINE, NONE, OURS, RIVALS, SYNC_RIVAL

Record = Mapping[str, Any]

CONFIDENCE = 0.95
STALL_LIMIT = 1 / 20
"""Of the stall of ``torch.save`` + fsync."""
LEAST_CPU_S = 0.05
"""Per checkpoint: under it a slowdown says nothing about what a CPU second costs."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median over rounds.

    Attributes:
        median: The middle one.
        low: Lower end of its interval.
        high: Upper end.
        coverage: Chance that such an interval holds the true median, whatever the distribution.
        count: Rounds.
    """

    median: float
    low: float
    high: float
    coverage: float
    count: int

    def overlaps(self, other: Estimate) -> bool:
        """Whether the two intervals have a point in common."""
        return self.low <= other.high and other.low <= self.high


def estimate(values: Sequence[float]) -> Estimate:
    """Median, and the narrowest interval of order statistics that covers it with 95 %.

    Fewer than six values cannot reach 95 %: then it goes from the smallest to the largest, and
    ``coverage`` says what that is worth (five values: 93.75 %).

    Args:
        values: At least one, independent of each other.
    """
    ordered = sorted(values)
    count = len(ordered)
    cut = 0
    while _coverage(count, cut + 1) >= CONFIDENCE:
        cut += 1
    low, high = ordered[cut], ordered[count - 1 - cut]
    return Estimate(median(ordered), low, high, _coverage(count, cut), count)


def _coverage(count: int, cut: int) -> float:
    """Of the interval that leaves out ``cut`` values at either end."""
    tail: float = sum(math.comb(count, k) for k in range(cut + 1)) / 2**count
    return max(0.0, 1.0 - 2.0 * tail)


@dataclass(frozen=True, slots=True)
class Paired:
    """One run, and those of the same round that it is compared with.

    Attributes:
        run: The run.
        without: The one without checkpoints.
        baseline: The one with ``torch.save`` and fsync.
    """

    run: Record
    without: Record | None
    baseline: Record | None


def blocked_s(run: Record) -> float:
    """Seconds per checkpoint in the system's own calls on the training thread."""
    return _per_checkpoint(run, sum(c["blocked_s"] for c in run["checkpoints"]))


def durable_s(run: Record) -> float:
    """Seconds from the boundary until a checkpoint was durable, the mean of the run."""
    return _per_checkpoint(run, sum(c["durable_s"] for c in run["checkpoints"]))


def _per_checkpoint(run: Record, total: float) -> float:
    return total / len(run["checkpoints"])


def _more(pair: Paired, field: str) -> float | None:
    return None if pair.without is None else pair.run[field] - pair.without[field]


def _more_per_checkpoint(pair: Paired, field: str) -> float | None:
    more = _more(pair, field)
    return None if more is None else _per_checkpoint(pair.run, more)


def _slowdown(pair: Paired) -> float | None:
    more = _more(pair, "whole_s")
    return None if more is None or pair.without is None else more / pair.without["whole_s"]


def _kappa(pair: Paired) -> float | None:
    cpu_s = _more_per_checkpoint(pair, "background_cpu_s")
    slower_s = _more_per_checkpoint(pair, "whole_s")
    return None if cpu_s is None or slower_s is None or cpu_s < LEAST_CPU_S else slower_s / cpu_s


def _stall_ratio(pair: Paired) -> float | None:
    return None if pair.baseline is None else blocked_s(pair.run) / blocked_s(pair.baseline)


MEASURES: Mapping[str, Callable[[Paired], float | None]] = MappingProxyType(
    {
        # Seconds of the counted steps, until everything was durable.
        "whole_s": lambda pair: pair.run["whole_s"],
        # More of them than without checkpoints: per checkpoint, and as a share.
        "slowdown_s": lambda pair: _more_per_checkpoint(pair, "whole_s"),
        "slowdown": _slowdown,
        "blocked_s": lambda pair: blocked_s(pair.run),
        "stall_ratio": _stall_ratio,
        # Of the first checkpoint of a process, which is not counted anywhere else.
        "first_blocked_s": lambda pair: pair.run["first_checkpoint"]["blocked_s"],
        "durable_s": lambda pair: durable_s(pair.run),
        # CPU seconds per checkpoint: off the training thread, on it, and on the whole machine.
        "background_s": lambda pair: _more_per_checkpoint(pair, "background_cpu_s"),
        "training_s": lambda pair: _more_per_checkpoint(pair, "training_cpu_s"),
        "machine_s": lambda pair: _more_per_checkpoint(pair, "machine_cpu_s"),
        # Seconds of slowdown per CPU second in the background.
        "kappa": _kappa,
        "peak_bytes": lambda pair: _more(pair, "peak_bytes"),
        "disk_bytes": lambda pair: pair.run["disk_bytes"],
    }
)
"""Name of a figure to what it is for one run; ``None`` where it is not defined."""

Figures = Mapping[str, Estimate]
"""Name of a figure to its estimate; those that are not defined in every round are left out."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a target was met.

    Attributes:
        target: What was asked for.
        met: Whether the medians meet it.
        found: The numbers.
    """

    target: str
    met: bool
    found: str


@dataclass(frozen=True)
class Summary:
    """What the records of one session say.

    Attributes:
        figures: System to its figures, in the order of ``RIVALS``.
        step_s: Seconds of a step without checkpoints.
        verdicts: Whether each target was met.
        failures: Runs that ended with an error: system, round, what.
    """

    figures: Mapping[str, Figures]
    step_s: Estimate
    verdicts: Sequence[Verdict]
    failures: Sequence[tuple[str, int, str]]


def summarize(records: Sequence[Record]) -> Summary:
    """Figures of one session.

    Args:
        records: Its runs; those that failed are left out of every figure.

    Raises:
        ValueError: There is no run without checkpoints to compare with.
    """
    runs: dict[str, dict[int, Record]] = {}
    for record in records:
        if not record.get("error"):
            runs.setdefault(record["system"], {})[record["round"]] = record
    without = runs.get(NONE, {})
    if not without:
        raise ValueError("expected at least one run without checkpoints, found none")
    figures = {
        name: _figures(name, runs[name], without, runs.get(BASELINE, {}))
        for name in RIVALS
        if name in runs
    }
    step_s = estimate([median(run["step_s"]) for run in without.values()])
    failures = [(r["system"], r["round"], r["error"]) for r in records if r.get("error")]
    return Summary(figures, step_s, _verdicts(runs, figures, step_s), failures)


def _figures(
    name: str,
    runs: Mapping[int, Record],
    without: Mapping[int, Record],
    baseline: Mapping[int, Record],
) -> Figures:
    if name == NONE:
        return {"whole_s": estimate([run["whole_s"] for run in runs.values()])}
    pairs = [Paired(run, without.get(n), baseline.get(n)) for n, run in runs.items()]
    found = {}
    for figure, measure in MEASURES.items():
        values = [value for pair in pairs if (value := measure(pair)) is not None]
        if len(values) == len(pairs):
            found[figure] = estimate(values)
    return found


# --- targets ----------------------------------------------------------------


def _verdicts(
    runs: Mapping[str, Mapping[int, Record]], figures: Mapping[str, Figures], step_s: Estimate
) -> list[Verdict]:
    """Each target that the systems at hand can decide."""
    if OURS not in figures:
        return []
    found = []
    ratio = figures[OURS].get("stall_ratio")
    if ratio is not None:
        target = f"stall at most 1/{round(1 / STALL_LIMIT)} of torch.save + fsync"
        text = f"1/{1 / ratio.median:.0f} (1/{1 / ratio.high:.0f} to 1/{1 / ratio.low:.0f})"
        found.append(Verdict(target, ratio.median <= STALL_LIMIT, text))
    rivals = [n for n in figures if RIVALS[n].is_async and RIVALS[n].library != OURS]
    for name in rivals:
        more = _difference(runs[OURS], runs[name], blocked_s)
        if more is not None:
            target = f"stall below that of {RIVALS[name].title}"
            found.append(Verdict(target, more.median < 0, _in_ms(more)))
    slowdown = figures[OURS].get("slowdown")
    if slowdown is not None:
        found.append(_slowdown_verdict(slowdown, figures))
    for name in [*rivals, *(n for n in figures if n == SYNC_RIVAL)]:
        more = _difference(runs[OURS], runs[name], durable_s)
        if more is not None:
            allowed_s = 0.0 if name in rivals else step_s.median
            target = f"durable no later than {RIVALS[name].title}"
            target += f" and one step ({allowed_s:.2f} s)" if allowed_s else ""
            found.append(Verdict(target, more.median <= allowed_s, _in_ms(more)))
    return found


def _slowdown_verdict(ours: Estimate, figures: Mapping[str, Figures]) -> Verdict:
    target = "slowdown of the whole run lowest, or its interval overlaps the lowest"
    others = {
        name: found["slowdown"]
        for name, found in figures.items()
        if "slowdown" in found and RIVALS[name].library != OURS
    }
    if not others:
        return Verdict(target, met=True, found=f"{_percent(ours)}; nothing to compare with")
    name, lowest = min(others.items(), key=lambda item: item[1].median)
    met = ours.median <= lowest.median or ours.overlaps(lowest)
    return Verdict(target, met, f"{_percent(ours)}; {RIVALS[name].title} {_percent(lowest)}")


def _difference(
    ours: Mapping[int, Record], theirs: Mapping[int, Record], measure: Callable[[Record], float]
) -> Estimate | None:
    """Ours less theirs, in the rounds that both have."""
    rounds = sorted(ours.keys() & theirs.keys())
    return estimate([measure(ours[n]) - measure(theirs[n]) for n in rounds]) if rounds else None


def _in_ms(more: Estimate) -> str:
    return f"{1000 * more.median:+.1f} ms ({1000 * more.low:+.1f} to {1000 * more.high:+.1f})"


def _percent(share: Estimate) -> str:
    return f"{100 * share.median:+.1f} % ({100 * share.low:+.1f} to {100 * share.high:+.1f})"
