"""Tables of a comparison: the same rows for the terminal and for the page that keeps them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from asymcheck_lab.bench_stats import Estimate
from asymcheck_lab.compare_stats import CellRows, Row, summarize_cells
from asymcheck_lab.errors import DataError
from asymcheck_lab.record import measured_when

_NONE = "–"


def _shown(factor: float, form: str) -> Callable[[Estimate | None], str]:
    """Median and interval, each times ``factor``; of one round there is no interval."""

    def text(found: Estimate | None) -> str:
        if found is None:
            return _NONE
        middle, low, high = (
            format(factor * v, form) for v in (found.median, found.low, found.high)
        )
        return middle if found.count == 1 else f"{middle} ({low} to {high})"

    return text


_PERCENT, _MS, _S = _shown(100, "+.1f"), _shown(1000, ".1f"), _shown(1, ".3f")
_MB, _MORE_MB, _STEPS = _shown(1e-6, ".2f"), _shown(1e-6, "+.1f"), _shown(1, ".0f")


def _durable(row: Row) -> str:
    lost, due = row.given_up
    note = f", {due - lost} of {due}" if lost else ""
    return _S(row.durable_s) + note


def _saved(row: Row) -> str:
    if not row.state_bytes or row.record["kind"] == "none":
        return _NONE
    return f"{row.saved_bytes / 1e6:.2f} of {row.state_bytes / 1e6:.2f}"


def _exact(row: Row) -> str:
    if row.bit_exact is None:
        return _NONE
    return "yes" if row.bit_exact else f"no, {row.max_error:.1e}"


COLUMNS: Sequence[tuple[str, Callable[[Row], str]]] = (
    ("slower, %", lambda row: _PERCENT(row.slowdown)),
    ("stall p50, ms", lambda row: _MS(row.stall_s)),
    ("p99, ms", lambda row: _NONE if row.stall_p99_s is None else f"{1e3 * row.stall_p99_s:.1f}"),
    ("durable p50, s", _durable),
    ("lag, steps", lambda row: _STEPS(row.lag_steps)),
    ("saves, MB", _saved),
    ("on disk, MB", lambda row: _MB(row.disk_bytes)),
    ("restore, s", lambda row: _S(row.restore_s)),
    ("memory, MB", lambda row: _MORE_MB(row.peak_bytes)),
    ("exact", _exact),
)
"""Head of a column, and what it shows of a row. Every row also says what it does not save."""


def lines_of(found: CellRows) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of a cell's table."""
    heads = ["system", *(head for head, _ in COLUMNS), "does not save"]
    return heads, [
        [_name(row), *(text(row) for _, text in COLUMNS), row.missing or "nothing missing"]
        for row in found.rows
        if row.runs
    ]


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


def _name(row: Row) -> str:
    unranked = row.record["kind"] != "none" and not row.record["ranked"]
    title: str = row.record["title"]
    return title + (" (not ranked)" if unranked else "")


def show(console: Console, records: Sequence[Mapping[str, Any]]) -> None:
    """Print the tables of a session.

    Args:
        console: Where to.
        records: Of one session.
    """
    for found in summarize_cells(records):
        heads, rows = lines_of(found)
        table = Table(title=head_of(found), title_justify="left")
        for head in heads:
            words = head in (heads[0], heads[-1])
            table.add_column(head, justify="left" if words else "right", overflow="fold")
        for row in rows:
            table.add_row(*row)
        console.print(table)
        for note in notes_of(found):
            console.print(f"  {note}", markup=False, highlight=False)


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
