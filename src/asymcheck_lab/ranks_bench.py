"""Several ranks: what a checkpoint costs them, system beside system."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asymcheck_lab.bench import append_record, describe_session, order_of, prepare, refuse_unknown
from asymcheck_lab.bench_child import run_root
from asymcheck_lab.bench_stats import Estimate, estimate
from asymcheck_lab.compare_stats import number_text
from asymcheck_lab.errors import DataError, UsageError
from asymcheck_lab.parallel import PARALLELS
from asymcheck_lab.record import measured_when, median
from asymcheck_lab.rivals import NONE, OURS
from asymcheck_lab.rivals.spread import SPREAD, why_not

SCHEMA = 1
_LIMIT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadOptions:
    """What to compare.

    Attributes:
        parallel: How ranks share the model.
        systems: Names out of ``SPREAD``; ``none`` is added where it is missing.
        size: Of GPT-2: ``124m`` or ``tiny``.
        ranks: How many, on this host.
        rounds: How often each system runs.
        steps: Counted steps of a run.
        every: Steps between two checkpoints.
        warmup: Steps before the counted ones.
        folder: Checkpoints go below it while a run lasts; on the medium to be measured.
        results: Gets a JSON line for each run, appended.

    Raises:
        UsageError: One is wrong.
    """

    parallel: tuple[str, ...] = ("ddp", "fsdp2", "zero3")
    systems: tuple[str, ...] = tuple(SPREAD)
    size: str = "124m"
    ranks: int = 2
    rounds: int = 3
    steps: int = 8
    every: int = 4
    warmup: int = 2
    folder: Path = Path("runs/ranks")
    results: Path = Path("results/ranks.jsonl")

    def __post_init__(self) -> None:
        for name in ("ranks", "rounds", "steps", "warmup"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}: expected at least 1, found {getattr(self, name)}")
        if self.every < self.warmup:
            raise UsageError(
                f"every: expected at least warmup={self.warmup} steps, found {self.every}"
            )
        if self.steps < self.every:
            raise UsageError(f"steps: expected at least every={self.every}, found {self.steps}")
        refuse_unknown("parallel", self.parallel, [p for p in PARALLELS if p != "none"])
        refuse_unknown("systems", self.systems, SPREAD)

    @property
    def command(self) -> str:
        """The command that does this again; the folders are left out."""
        return (
            f"asymlab bench-ranks --parallel {','.join(self.parallel)} "
            f"--systems {'all' if self.systems == tuple(SPREAD) else ','.join(self.systems)} "
            f"--size {self.size} --ranks {self.ranks} --rounds {self.rounds} "
            f"--steps {self.steps} --every {self.every} --warmup {self.warmup}"
        )


def run_spread(options: SpreadOptions, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Run every system with every way of sharing, in every round; blocks.

    A run is as many processes as there are ranks, forked off this one. One that fails is recorded
    with its error, and the others go on.

    Args:
        options: What to compare.
        say: Told how it goes, a line at a time.

    Returns:
        The records of this session, as they were appended to ``options.results``.

    Raises:
        LabError: No run can be made or recorded.
    """
    from asymcheck.testing.ranks import run_ranks
    from asymcheck_lab.ranks_run import SpreadSpec, measure

    cores = prepare(options.folder, options.results, read_spread)
    session = describe_session(options.command, options.folder, cores, schema=SCHEMA)
    systems = list(dict.fromkeys((NONE, *options.systems)))
    records = []
    for number in range(1, options.rounds + 1):
        for parallel in options.parallel:
            for system in order_of(systems, number):
                record: dict[str, Any] = {
                    **session,
                    "system": system,
                    "parallel": parallel,
                    "round": number,
                    **{k: getattr(options, k) for k in ("size", "ranks", "steps", "every")},
                    "rounds": options.rounds,
                }
                absent = why_not(system, parallel)
                if absent and number > 1:
                    continue
                if absent:
                    record["absent"] = absent
                else:
                    with run_root(options.folder) as root:
                        spec = SpreadSpec(
                            system=system,
                            parallel=parallel,
                            size=options.size,
                            steps=options.steps,
                            every=options.every,
                            warmup=options.warmup,
                            folder=str(root),
                        )

                        def work(rank: int, tell: Callable[[object], None]) -> None:
                            found = measure(spec, rank, options.ranks)  # noqa: B023  runs now
                            if rank == 0:
                                tell(found)

                        record |= _ran(run_ranks, work, options.ranks)
                records.append(record)
                append_record(options.results, record)
                say(f"round {number} of {options.rounds}, {parallel}, {system}: {_short(record)}")
    return records


def _ran(run_ranks: Any, work: Any, ranks: int) -> dict[str, Any]:  # noqa: ANN401
    try:
        outcomes = run_ranks(ranks, work, timeout_s=_LIMIT_S, collective_timeout_s=_LIMIT_S)
        told = [outcome.check() for outcome in outcomes]
    except AssertionError as failure:
        return {"error": str(failure).strip().splitlines()[-1]}
    found: dict[str, Any] = told[0][0]
    return found


def _short(record: Mapping[str, Any]) -> str:
    if "absent" in record or "error" in record:
        return str(record.get("absent") or f"failed: {record['error']}")
    text = f"{record['whole_s']:.2f} s"
    if record["durable_s"]:
        text += f", blocked {1000 * median(record['blocked_s']):.1f} ms per checkpoint"
        text += f", restored in {record['restore_s']:.2f} s"
        text += ", not exact" if record["differing"] else ", exact"
    return text


def read_spread(path: Path) -> list[dict[str, Any]]:
    """Every record of a results file; nothing where there is none.

    Raises:
        DataError: It holds something else.
    """
    if not path.exists():
        return []
    found = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1):
        try:
            record = json.loads(line)
            known = record["schema"] == SCHEMA and record["system"] in SPREAD
        except (ValueError, TypeError, KeyError):
            known = False
        if not known:
            raise DataError(
                f"{path}, line {number}", expected=f"a record of schema {SCHEMA}", found=line[:80]
            )
        found.append(record)
    return found


# --- the tables -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Figures:
    slowdown: Estimate | None
    blocked_s: Estimate | None
    durable_s: Estimate | None
    restore_s: Estimate | None


def render(records: Sequence[Mapping[str, Any]]) -> str:
    """The newest session as Markdown: a table for each way of sharing, and what was aimed at.

    Raises:
        DataError: There is none.
    """
    if not records:
        raise DataError("benchmark", expected="runs to compare", found="none")
    session = max(r["session"] for r in records)
    runs = [r for r in records if r["session"] == session]
    first, machine = runs[0], runs[0]["machine"]
    parts = [
        f"{measured_when(first['session'], first['commit'])}, with `{first['command']}`, on "
        f"{machine['cpu']}, {machine['cpus']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB, "
        f"{machine['file_system']}: {first['ranks']} ranks over gloo, one thread each, "
        f"{first['rounds']} rounds of {first['steps']} steps with a checkpoint each "
        f"{first['every']}. Medians over rounds, in brackets the least and the most."
    ]
    for parallel in dict.fromkeys(r["parallel"] for r in runs):
        parts.append(_table(parallel, [r for r in runs if r["parallel"] == parallel]))
    return "\n\n".join(parts) + "\n"


def _table(parallel: str, runs: Sequence[Mapping[str, Any]]) -> str:
    good = [r for r in runs if "absent" not in r and "error" not in r]
    figures = {name: _figures(name, good) for name in SPREAD}
    whole = next((r["state_bytes"] for r in good), 0)
    lines = [
        f"### {parallel}, gpt2 {runs[0]['size']}: state of {whole / 1e9:.2f} GB",
        "",
        "| system | slowdown, % | stall, ms | durable, s | stored, GB | restore, s | exact |",
        "| --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    notes = []
    for name, rival in SPREAD.items():
        mine = [r for r in good if r["system"] == name]
        notes += [
            f"- {rival.title}: {'not here: ' if 'absent' in r else 'failed: '}"
            f"{r.get('absent') or r.get('error')}."
            for r in runs
            if r["system"] == name and ("absent" in r or "error" in r)
        ]
        if not mine or name == NONE:
            continue
        found = figures[name]
        wrong = sorted({key for r in mine for key in r["differing"]})
        lines.append(
            f"| {rival.title} | {_cell(found.slowdown, 100, signed=True)} "
            f"| {_cell(found.blocked_s, 1000)} | {_cell(found.durable_s)} "
            f"| {number_text(mine[0]['disk_bytes'] / 1e9)} | {_cell(found.restore_s)} "
            f"| {'not: ' + ', '.join(wrong[:2]) if wrong else 'yes'} |"
        )
    return "\n".join([*lines, "", *_aims(figures), *notes]).rstrip()


def _figures(name: str, runs: Sequence[Mapping[str, Any]]) -> _Figures:
    without = {r["round"]: r["whole_s"] for r in runs if r["system"] == NONE}
    mine = [r for r in runs if r["system"] == name and name != NONE]

    def of(values: Sequence[float]) -> Estimate | None:
        return estimate(values) if values else None

    return _Figures(
        of([r["whole_s"] / without[r["round"]] - 1 for r in mine if r["round"] in without]),
        of([median(r["blocked_s"]) for r in mine]),
        of([median(r["durable_s"]) for r in mine]),
        of([r["restore_s"] for r in mine]),
    )


def _cell(found: Estimate | None, scale: float = 1.0, *, signed: bool = False) -> str:
    if found is None:
        return "–"
    digits = 1 if scale == 100 else None
    middle, low, high = (
        number_text(scale * value, digits, signed=signed)
        for value in (found.median, found.low, found.high)
    )
    return f"{middle} ({low} to {high})"


def _aims(figures: Mapping[str, _Figures]) -> list[str]:
    """What the library wants to reach, and whether it did in this session."""
    ours = figures[OURS]
    others = {n: f for n, f in figures.items() if n not in (OURS, NONE)}
    lines = []
    if ours.slowdown is not None:
        best = min((f.slowdown for f in others.values() if f.slowdown), key=_middle, default=None)
        held = best is None or ours.slowdown.median <= best.median or ours.slowdown.overlaps(best)
        lines.append(f"- {_said(held)}: slowdown lowest, or overlapping the lowest.")
    default = figures["dcp-thread"].blocked_s
    if ours.blocked_s is not None and default is not None:
        share = ours.blocked_s.median / default.median
        lines.append(
            f"- {_said(share <= 0.1)}: stall at most a tenth of DCP's default async_save; it is "
            f"{share:.3f} of it."
        )
    loads = [f.restore_s for n, f in others.items() if n.startswith("dcp") and f.restore_s]
    if ours.restore_s is not None and loads:
        best = min(loads, key=_middle)
        held = ours.restore_s.median <= best.median or ours.restore_s.overlaps(best)
        lines.append(
            f"- {_said(held)}: restore no slower than DCP's; {number_text(ours.restore_s.median)} "
            f"against {number_text(best.median)} s."
        )
    return lines


def _middle(found: Estimate) -> float:
    return found.median


def _said(held: bool) -> str:
    return "Reached" if held else "**Missed**"
