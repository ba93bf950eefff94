"""What the records of the engine's benchmarks say: bounds, whether they hold, and tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asymcheck_lab.bench_stats import Estimate, estimate
from asymcheck_lab.errors import DataError
from asymcheck_lab.record import measured_when, median

Record = Mapping[str, Any]

SLACK_COPY, SLACK_S = 0.1, 0.002
"""Of a stall: a part of the copy, and a constant for everything that does not depend on it."""
SLACK_DURABLE = 1.15
LEAST_LONG, MOST_SHORT = 1.5, 0.5
"""W by R/B that make a regime."""
JUDGED_STORES = ("50", "200")
NOISE = 0.02
"""By which a median may be worse than another and still be called not worse."""

LADDER = (
    ("asymcheck-naive", "asymcheck-s", "stored_bytes", "selective compression stores less"),
    ("asymcheck-s", "asymcheck-so", "durable_s", "merged writes are durable earlier"),
    ("asymcheck-so", "asymcheck", "stall_s", "the adaptive plan stalls no more"),
    ("asymcheck-so", "asymcheck", "cpu_s", "measured selection costs no more CPU"),
    (
        "asymcheck-naive",
        "asymcheck",
        "durable_s",
        "the default is durable no later than raw chunks",
    ),
)
"""From, to, the figure that the step is for, and in words."""


@dataclass(frozen=True, slots=True)
class Bounded:
    """A measured time and its bound, in seconds.

    Attributes:
        measured_s: Median.
        bound_s: From the same run.
        terms: What the bound is made of.
        met: Whether it holds; ``None`` where the run says nothing about it.
    """

    measured_s: float
    bound_s: float
    terms: Mapping[str, float]
    met: bool | None


def stall_of(run: Record) -> Bounded:
    """``step()`` and fence against ``eager/B + max(0, R/B - W) + 0.1 R/B + 2 ms``.

    B is that of the copies of the run, W the window of the same step; both medians. A run whose
    W is not that of its regime says nothing.
    """
    rows, rate = run["saves"], run["bandwidth_bytes_per_s"]
    eager_s = median(r["eager_bytes"] for r in rows) / rate
    copy_s = median(r["raw_bytes"] - r["eager_bytes"] for r in rows) / rate
    window_s = median(r["window_s"] for r in rows)
    measured_s = median(r["step_s"] + r["fence_s"] for r in rows)
    bound_s = eager_s + max(0.0, copy_s - window_s) + SLACK_COPY * copy_s + SLACK_S
    fits = window_s >= LEAST_LONG * copy_s
    if run["case"] == "short":
        fits = window_s <= MOST_SHORT * copy_s
    terms = {"eager_s": eager_s, "copy_s": copy_s, "window_s": window_s}
    return Bounded(measured_s, bound_s, terms, measured_s <= bound_s if fits else None)


def durable_of(run: Record) -> Bounded:
    """Time to durable against 1.15 times the longest of what cannot be shortened.

    The copy window goes from the boundary to the last byte copied. A disk's rate is that of the
    run's own writes, so there the bound judges nothing.
    """
    rows = run["saves"]
    window_s = median(r["step_s"] + r["copy_s"] for r in rows)
    stored = median(r["stored_bytes"] for r in rows)
    rate = median(r["stored_bytes"] / max(1e-9, r["write_s"]) for r in rows)
    store_s = stored / (rate if run["store"] == "disk" else float(run["store"]) * 1e6)
    cores_left = max(1, run["machine"]["cores_used"] - 1)
    cpu_s = median(r["cpu_s"] for r in rows) / cores_left
    bound_s = SLACK_DURABLE * max(window_s, store_s, cpu_s)
    measured_s = median(r["durable_s"] for r in rows)
    met = measured_s <= bound_s if run["store"] in JUDGED_STORES else None
    terms = {"window_s": window_s, "store_s": store_s, "cpu_s": cpu_s}
    return Bounded(measured_s, bound_s, terms, met)


@dataclass(frozen=True, slots=True)
class Rung:
    """One strategy on one store; medians over its checkpoints.

    Attributes:
        stall_s: In ``step()`` and fences, from one checkpoint to the next.
        durable_s: From the boundary.
        stored_bytes: Written.
        cpu_s: In the background.
        slowdown: Of the loop against the one without checkpoints; ``None`` without that.
        fidelity: Of the last checkpoint.
        labels: Its codecs, by group of leaves.
    """

    stall_s: float
    durable_s: float
    stored_bytes: float
    cpu_s: float
    slowdown: float | None
    fidelity: str
    labels: Mapping[str, str]


def rung_of(run: Record, without: Record | None) -> Rung:
    """The figures of one run of the ablation."""
    rows = run["saves"]
    return Rung(
        stall_s=median(r["stall_s"] for r in rows),
        durable_s=median(r["durable_s"] for r in rows),
        stored_bytes=median(r["stored_bytes"] for r in rows),
        cpu_s=median(r["cpu_s"] for r in rows),
        slowdown=None if without is None else run["loop_s"] / without["loop_s"] - 1.0,
        fidelity=rows[-1]["fidelity"],
        labels=rows[-1]["labels"],
    )


def overhead_of(run: Record) -> Estimate:
    """What a copy adds to a step, as a part of it: each against the step right before."""
    pairs = zip(run["with_s"], run["without_s"], strict=True)
    return estimate([a / b - 1.0 for a, b in pairs])


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether something that was asked for holds.

    Attributes:
        asked: What.
        met: Whether; ``None`` where the runs cannot tell.
        found: The numbers.
    """

    asked: str
    met: bool | None
    found: str


def link_verdicts(runs: Sequence[Record]) -> list[Verdict]:
    """Which partitioners must win where."""
    found = []
    by = {(r["shared"], r["case"]): overhead_of(r) for r in runs}
    for ours in ("idle-proportional", "adaptive"):
        for other in ("equal slots", "free-running"):
            a, b = by.get((True, ours)), by.get((True, other))
            if a is not None and b is not None:
                asked = f"shared link: {ours} adds less than {other}"
                found.append(Verdict(asked, a.median < b.median, _versus(a, b)))
    a, b = by.get((False, "adaptive")), by.get((False, "free-running"))
    if a is not None and b is not None:
        met = a.median <= b.median + NOISE or a.overlaps(b)
        found.append(
            Verdict("independent link: adaptive adds no more than free-running", met, _versus(a, b))
        )
    return found


def ladder_verdicts(rungs: Mapping[str, Rung], store: str) -> list[Verdict]:
    """Each step of the ablation on the figure that it is for."""
    found = []
    for before, after, figure, words in LADDER:
        if before in rungs and after in rungs:
            old, new = getattr(rungs[before], figure), getattr(rungs[after], figure)
            asked = f"{_store(store)}: {before} → {after}: {words}"
            numbers = f"{_figure(figure, old)} → {_figure(figure, new)}"
            found.append(Verdict(asked, new <= (1.0 + NOISE) * old, numbers))
    return found


# --- as Markdown ------------------------------------------------------------


def render(records: Sequence[Record]) -> str:
    """One session.

    Raises:
        DataError: It holds nothing.
    """
    if not records:
        raise DataError("engine benchmark", expected="records of runs", found="none")
    good = [r for r in records if not r.get("error")]
    parts = [
        _about(records[0]),
        _stall_table([r for r in good if r["task"] == "stall"]),
        _durable_table([r for r in good if r["task"] == "durable"]),
        _ablation_tables([r for r in good if r["task"] == "ablation"]),
        _link_table([r for r in good if r["task"] == "link"]),
        _failures([r for r in records if r.get("error")]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _about(first: Record) -> str:
    machine = first["machine"]
    clean = "" if first["commit_is_clean"] else " with changes that were not committed"
    return (
        f"{measured_when(first['session'], first['commit'])}{clean}, "
        f"with `{first['command']}`, on {machine['cpu']}, {machine['cores_used']} of "
        f"{machine['cpus']} cores, {machine['file_system']}, Linux {machine['kernel']}, torch "
        f"{first['versions']['torch']}."
    )


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "| --- |" + " ---: |" * (len(heads) - 1)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def _verdict_table(verdicts: Sequence[Verdict]) -> str:
    lines = ["| target | met | found |", "| --- | --- | --- |"]
    lines += [f"| {v.asked} | {_met(v.met)} | {v.found} |" for v in verdicts]
    return "\n".join(lines)


def _stall_table(runs: Sequence[Record]) -> str:
    rows = []
    for run in runs:
        found = stall_of(run)
        rate, copy_s = run["bandwidth_bytes_per_s"], found.terms["copy_s"]
        rows.append(
            (
                f"{run['case']} window",
                _store(run["store"]),
                str(len(run["saves"])),
                f"{rate / 1e9:.2f}",
                _ms(copy_s),
                _ms(found.terms["window_s"]),
                f"{found.terms['window_s'] / copy_s:.2f}",
                _ms(found.measured_s),
                _ms(found.bound_s),
                _met(found.met, "other regime"),
            )
        )
    heads = ("stall", "store", "checkpoints", "B, GB/s", "R/B, ms", "W, ms", "W·B/R")
    return _table((*heads, "measured, ms", "bound, ms", "met"), rows) if rows else ""


def _durable_table(runs: Sequence[Record]) -> str:
    rows = []
    for run in runs:
        found = durable_of(run)
        rows.append(
            (
                _store(run["store"]),
                *(f"{found.terms[name]:.2f}" for name in ("window_s", "store_s", "cpu_s")),
                f"{found.measured_s:.2f}",
                f"{found.bound_s:.2f}",
                f"{SLACK_DURABLE * found.measured_s / found.bound_s:.2f}",
                _met(found.met, "reported"),
            )
        )
    heads = ("time to durable", "copy window, s", "bytes / rate, s", "CPU / cores left, s")
    return (
        _table((*heads, "measured, s", "bound, s", "by the longest", "met"), rows) if rows else ""
    )


def _ablation_tables(runs: Sequence[Record]) -> str:
    parts, verdicts = [], []
    for store in dict.fromkeys(r["store"] for r in runs):
        here = {r["case"]: r for r in runs if r["store"] == store}
        without = here.pop("none", None)
        rungs = {case: rung_of(run, without) for case, run in here.items()}
        rows = [
            (
                f"{case}",
                _ms(rung.stall_s),
                f"{rung.durable_s:.2f}",
                f"{rung.stored_bytes / 1e6:.1f}",
                f"{rung.cpu_s:.2f}",
                "–" if rung.slowdown is None else f"{100 * rung.slowdown:+.1f}",
                rung.fidelity,
                ", ".join(sorted(set(rung.labels.values()))),
            )
            for case, rung in rungs.items()
        ]
        heads = (_store(store), "stall, ms", "durable, s", "stored, MB", "CPU, s", "slower, %")
        parts.append(_table((*heads, "fidelity", "codecs"), rows))
        verdicts += ladder_verdicts(rungs, store)
    return "\n\n".join([*parts, _verdict_table(verdicts)]) if verdicts else "\n\n".join(parts)


def _link_table(runs: Sequence[Record]) -> str:
    rows = []
    for run in runs:
        found = overhead_of(run)
        kappa = run["kappa"]["collective"]
        rows.append(
            (
                f"{'shared' if run['shared'] else 'independent'}, {run['case']}",
                f"{100 * found.median:+.1f} ({100 * found.low:+.1f} to {100 * found.high:+.1f})",
                f"{100 * run['simulated']:+.1f}",
                "no" if run["free_running"] else "yes",
                "–" if kappa is None else f"{kappa[1]:.2f} ({kappa[0]:.2f} to {kappa[2]:.2f})",
                f"{run['bandwidth_bytes_per_s'] / 1e6:.0f}",
            )
        )
    if not rows:
        return ""
    first = runs[0]
    heads = ("link and partitioner", "step longer, %", "as a fluid, %", "held back", "κ of traffic")
    text = (
        f"g/c = {first['comm_ratio']}, R/B = {first['copy_by_idle']:.2f} of the idle time of a "
        f"step ΣD, computation {first['step_s']} s a step.\n\n"
    )
    text += _table((*heads, "copied alone, MB/s"), rows)
    verdicts = link_verdicts(runs)
    return text + ("\n\n" + _verdict_table(verdicts) if verdicts else "")


def _failures(runs: Sequence[Record]) -> str:
    lines = [
        f"- {r['task']}, {r['case']}, {_store(r['store'])}: `{r['error'].splitlines()[-1][:200]}`"
        for r in runs
    ]
    return "\n".join(["Runs that failed, and count nowhere above:", "", *lines]) if lines else ""


def _store(name: str) -> str:
    return "disk" if name == "disk" else f"{name} MB/s"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f}"


def _met(met: bool | None, otherwise: str = "–") -> str:
    return otherwise if met is None else "yes" if met else "**no**"


def _figure(name: str, value: float) -> str:
    return f"{value / 1e6:.1f} MB" if name == "stored_bytes" else f"{value:.3f} s"


def _versus(a: Estimate, b: Estimate) -> str:
    return f"{100 * a.median:+.1f} % against {100 * b.median:+.1f} %"
