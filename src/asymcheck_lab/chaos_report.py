"""Tables of the tried failures, from their records alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asymcheck.rendering import count_text
from asymcheck_lab.bench import newest_session, read_records
from asymcheck_lab.chaos import broken, spoken
from asymcheck_lab.record import measured_when, median

HEADINGS = (
    "failure",
    "moment",
    "cases",
    "the training",
    "restored from",
    "steps lost",
    "seconds",
    "bits",
)
_MOMENTS = {
    "forward": "in forward",
    "capture": "in capture",
    "persist": "while persisting",
    "commit": "in commit",
    "restore": "at restore",
}

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Group:
    """The cases of one failure at one moment, or of one strategy.

    Attributes:
        name: Of the failure or strategy.
        moment: In words; empty for all.
        cells: What stands behind these two in a row of the table.
        broken: How many promises were broken.
        not_run: Why it was not tried, empty where it was.
    """

    name: str
    moment: str
    cells: tuple[str, ...]
    broken: int = 0
    not_run: str = ""


def results_of(*, supervised: bool) -> str:
    """Name of the file with the results."""
    return "chaos-supervised.jsonl" if supervised else "chaos.jsonl"


def marks(*, supervised: bool) -> tuple[str, str]:
    """Between which lines of a page the tables stand."""
    what = "supervised failures" if supervised else "tried failures"
    return f"<!-- {what}: begin -->", f"<!-- {what}: end -->"


def read_chaos(path: Path) -> list[dict[str, Any]]:
    """The newest session's records of a results file.

    Raises:
        DataError: It cannot be read, or holds something else.
    """
    return newest_session(read_records(path, lambda row: bool(row["fault"] and row["moment"])))


def groups_of(records: Sequence[Record]) -> list[Group]:
    """A row for each failure and moment, in the order of the records' axes."""
    pairs = dict.fromkeys((r["fault"], r["moment"]) for r in sorted(records, key=_place))
    groups = []
    for fault, moment in pairs:
        its = [r for r in records if (r["fault"], r["moment"]) == (fault, moment)]
        groups.append(_group(str(fault), _MOMENTS.get(moment, str(moment)), its))
    return groups


def strategies_of(records: Sequence[Record]) -> list[Group]:
    """A row for each strategy."""
    names = sorted({str(r["strategy"]) for r in records})
    return [_group(name, "", [r for r in records if r["strategy"] == name]) for name in names]


def _place(record: Record) -> tuple[int, int]:
    from asymcheck_lab.chaos_stage import FAULTS, MOMENTS

    fault, moment = record["fault"], record["moment"]
    return (
        FAULTS.index(fault) if fault in FAULTS else len(FAULTS),
        MOMENTS.index(moment) if moment in MOMENTS else len(MOMENTS),
    )


def _group(name: str, moment: str, its: Sequence[Record]) -> Group:
    ran = [r for r in its if "not_run" not in r]
    if not ran:
        why = next((str(r["not_run"]) for r in its), "")
        return Group(name, moment, ("0", f"not run here: {why}", "", "", "", ""), 0, why)
    bad = len(broken(ran))
    lost = [int(r["steps_lost"]) for r in ran]
    seconds = [float(r["seconds"]) for r in ran]
    cells = (
        str(len(ran)) + (f", {bad} BROKEN" if bad else ""),
        _counts(r["training"] for r in ran),
        _counts(r["tier"] for r in ran),
        _range(min(lost), max(lost)),
        f"{median(seconds):.2f}, at most {max(seconds):.2f}",
        _counts(r["exact"] for r in ran),
    )
    return Group(name, moment, cells, bad)


def _counts(values: Iterable[str]) -> str:
    found = Counter(value or "?" for value in values)
    if len(found) == 1:
        return next(iter(found))
    return ", ".join(f"{count} {value}" for value, count in found.most_common())


def _range(low: int, high: int) -> str:
    return str(low) if low == high else f"{low} to {high}"


def summary_of(records: Sequence[Record]) -> str:
    """What was tried, and whether every promise was kept, in a sentence."""
    ran = [r for r in records if "not_run" not in r]
    bad = broken(ran)
    verdict = f"{len(bad)} broke a promise" if bad else "no promise was broken"
    exact = sum(r["exact"] == "bit for bit" for r in ran)
    starts = [int(r["starts"]) for r in ran if r.get("starts")]
    made = f" `asymlab run` made {_range(min(starts), max(starts))} starts." if starts else ""
    return (
        f"{count_text(len(ran), 'case')}: {verdict}. {exact} came back bit for bit, the others "
        f"were lossy by their strategy's own word and within the bounds that they state.{made}"
    )


def render(records: Sequence[Record]) -> str:
    """The tables as Markdown."""
    if not records:
        return "Nothing was tried."
    first = records[0]
    machine = first["machine"]
    lines = [
        f"{measured_when(first['session'], first['commit'])}, {machine['cpu']}, "
        f"{machine['cpus']} cores, {machine['file_system']}, by `{first['command']}`.",
        "",
        summary_of(records),
        "",
        "| " + " | ".join(HEADINGS) + " |",
        "| " + " | ".join("---" for _ in HEADINGS) + " |",
    ]
    lines += [_row(group.name, group.moment, *group.cells) for group in groups_of(records)]
    heads = ("strategy", *HEADINGS[2:])
    lines += ["", "| " + " | ".join(heads) + " |", "| " + " | ".join("---" for _ in heads) + " |"]
    ran = [r for r in records if "not_run" not in r]
    lines += [_row(f"`{group.name}`", *group.cells) for group in strategies_of(ran)]
    notes = sorted({str(r["note"]) for r in ran if r["note"]})
    lines += ["", *(f"Not as in the field: {note}." for note in notes)] if notes else []
    if bad := broken(records):
        lines += ["", "Broken promises:", "", *(f"* {spoken(record)}" for record in bad)]
    return "\n".join(lines) + "\n"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
