"""Tables of a comparison: the same rows for the terminal and for the page that keeps them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from asymcheck_lab.bench_stats import Estimate
from asymcheck_lab.compare_stats import CellRows, Row, summarize_cells
from asymcheck_lab.errors import DataError
from asymcheck_lab.record import measured_when

_NONE = "–"


Text = Callable[[Estimate | None], str]


def _shown(factor: float, form: str, *, brief: bool) -> Text:
    """Median and interval, each times ``factor``; of one round there is no interval."""

    def text(found: Estimate | None) -> str:
        if found is None:
            return _NONE
        middle, low, high = (
            format(factor * v, form) for v in (found.median, found.low, found.high)
        )
        return middle if brief or found.count == 1 else f"{middle} ({low} to {high})"

    return text


def _durable(row: Row, text: Text) -> str:
    lost, due = row.given_up
    return text(row.durable_s) + (f", {due - lost} of {due}" if lost else "")


def _saved(row: Row) -> str:
    if not row.state_bytes or row.record["kind"] == "none":
        return _NONE
    return f"{row.saved_bytes / 1e6:.2f}"


def _exact(row: Row) -> str:
    if row.bit_exact is None:
        return _NONE
    return "yes" if row.bit_exact else f"no, {row.max_error:.1e}"


def lines_of(found: CellRows, *, brief: bool = False) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of a cell's table. Every row says what its system does not save.

    Args:
        found: The cell.
        brief: For a terminal: medians alone, names for titles.
    """

    def shown(factor: float, form: str) -> Text:
        return _shown(factor, form, brief=brief)

    percent, ms, seconds = shown(100, "+.1f"), shown(1000, ".1f"), shown(1, ".3f")
    mb, more_mb, steps = shown(1e-6, ".2f"), shown(1e-6, "+.1f"), shown(1, ".0f")
    columns: Mapping[str, Callable[[Row], str]] = {
        "system": lambda row: _name(row, brief=brief),
        "slower, %": lambda row: percent(row.slowdown),
        "stall p50, ms": lambda row: ms(row.stall_s),
        "p99, ms": lambda row: _NONE if row.stall_p99_s is None else f"{1e3 * row.stall_p99_s:.1f}",
        "durable p50, s": lambda row: _durable(row, seconds),
        "lag, steps": lambda row: steps(row.lag_steps),
        "saves, MB": _saved,
        "on disk, MB": lambda row: mb(row.disk_bytes),
        "restore, s": lambda row: seconds(row.restore_s),
        "memory, MB": lambda row: more_mb(row.peak_bytes),
        "exact": _exact,
        "does not save": lambda row: row.missing or _NONE,
    }
    rows = [row for row in found.rows if row.runs]
    return list(columns), [[text(row) for text in columns.values()] for row in rows]


def notes_of(found: CellRows) -> list[str]:
    """What went wrong in a cell, and why some of it is not ranked."""
    notes = [f"{row.record['title']}: {text}" for row in found.rows for text in row.troubles]
    return notes + [
        f"{row.record['title']}: not ranked: {row.record['why_unranked']}"
        for row in found.rows
        if row.runs and row.record["why_unranked"] and row.record["kind"] != "none"
    ]


def head_of(found: CellRows) -> str:
    """The cell in one line."""
    size = max((row.state_bytes for row in found.rows), default=0)
    step = f", a step takes {1000 * found.step_s.median:.1f} ms" if found.step_s else ""
    cell = found.cell
    return (
        f"{cell.model} {cell.size}, every {cell.every} steps, store: {cell.store}; "
        f"state of {size / 1e6:.2f} MB{step}"
    )


def _name(row: Row, *, brief: bool) -> str:
    unranked = row.record["kind"] != "none" and not row.record["ranked"]
    name: str = row.record["system" if brief else "title"]
    return name + (" (not ranked)" if unranked else "")


def show(console: Console, records: Sequence[Mapping[str, Any]]) -> None:
    """Print the tables of a session; what systems do not save is spelled out below each.

    Args:
        console: Where to.
        records: Of one session.
    """
    for found in summarize_cells(records):
        heads, rows = lines_of(found, brief=True)
        omitted = {text: f"({n})" for n, text in enumerate(_words(rows), start=1)}
        table = Table(
            box=SIMPLE_HEAD, title=head_of(found), title_justify="left", padding=(0, 1, 0, 0)
        )
        for head in heads:
            table.add_column(head, justify="left" if head == heads[0] else "right")
        for row in rows:
            table.add_row(*row[:-1], omitted.get(row[-1], row[-1]))
        console.print(table)
        for text, number in omitted.items():
            console.print(f"  {number} does not save: {text}", markup=False, highlight=False)
        for note in notes_of(found):
            console.print(f"  {note}", markup=False, highlight=False)


def _words(rows: Sequence[Sequence[str]]) -> list[str]:
    """What is not saved, each text once."""
    return list(dict.fromkeys(row[-1] for row in rows if row[-1] != _NONE))


def render(records: Sequence[Mapping[str, Any]]) -> str:
    """The same as Markdown, with where and how it was measured.

    Args:
        records: Of one session.

    Raises:
        DataError: There is none.
    """
    if not records:
        raise DataError("comparison", expected="records of a session", found="none")
    parts = [_about(records)]
    for found in summarize_cells(records):
        heads, rows = lines_of(found)
        lines = [
            "| " + " | ".join(heads) + " |",
            "| --- |" + " ---: |" * (len(heads) - 2) + " --- |",
            *("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows),
        ]
        parts += [f"### {head_of(found)}", "\n".join(lines)]
        notes = notes_of(found)
        if notes:
            parts.append("\n".join(f"- {note}" for note in notes))
    return "\n\n".join(parts) + "\n"


def _about(records: Sequence[Mapping[str, Any]]) -> str:
    first = records[0]
    machine, rounds = first["machine"], max(r["round"] for r in records)
    changed = "" if first["commit_is_clean"] else " with changes that were not committed"
    versions = {name: version for name, version in first["versions"].items() if version}
    libraries = dict.fromkeys(
        r["library"] for r in records if not r.get("absent") and r["library"].count(" ") == 1
    )
    versions |= dict(library.split(" ") for library in libraries)
    lines = [
        f"{measured_when(first)}{changed}, with `{first['command']}`.",
        "",
        f"- Machine: {machine['cpu']}, {machine['cpus']} cores, of which {machine['cores_used']} "
        f"were used; {machine['memory_bytes'] / 2**30:.0f} GiB; {machine['file_system']}; Linux "
        f"{machine['kernel']}.",
        f"- Versions: {', '.join(f'{name} {version}' for name, version in versions.items())}.",
        f"- {first['steps']} counted steps a run; {_rounds(rounds)}.",
    ]
    return "\n".join(lines)


def _rounds(count: int) -> str:
    if count == 1:
        return "one round, so that nothing is said of how far chance moves a figure"
    return f"{count} rounds: medians over rounds, in brackets the interval between order statistics"
