"""Tables of a comparison: the same rows for the terminal and for the page that keeps them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from asymcheck_lab.bench_stats import Estimate
from asymcheck_lab.compare_records import Machine, Run
from asymcheck_lab.compare_stats import COLUMNS, CellRows, Column, Row, cells_of, number_text
from asymcheck_lab.errors import DataError
from asymcheck_lab.record import measured_when
from asymcheck_lab.rivals import DEFAULT_RIVAL, OURS, SYNC_RIVAL

_NONE = "–"
_STALL_SHARE = 0.1


def lines_of(found: CellRows, *, brief: bool = False) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of a cell's table. Every row says what its system does not save.

    Args:
        found: The cell.
        brief: For a terminal: medians alone, names for titles.
    """
    heads = ["system", *(f"{c.title}, {c.unit}" for c in COLUMNS), "exact", "does not save"]
    rows = [
        [
            _name(row, brief=brief),
            *(_figure(row, column, brief=brief) for column in COLUMNS),
            row.exact,
            row.omits or _NONE,
        ]
        for row in found.rows
    ]
    return heads, rows


def _name(row: Row, *, brief: bool) -> str:
    name = row.run.system if brief else row.run.title
    return f"{name} (not ranked)" if row.is_unranked else name


def _figure(row: Row, column: Column, *, brief: bool) -> str:
    """Median, interval and note; of one round there is no interval."""
    value = row.values.get(column.key)
    if value is None:
        return _NONE
    found = value.estimate
    text = column.text(found.median)
    if not brief and found.count > 1:
        text += f" ({column.text(found.low)} to {column.text(found.high)})"
    return f"{text}, {value.note}" if value.partial else text


def notes_of(found: CellRows) -> list[str]:
    """What went wrong in a cell, and why some of it is not ranked."""
    notes = [
        f"{row.run.title}: {_trouble(number, text)}"
        for row in (*found.missing, *found.rows)
        for number, text in row.troubles
    ]
    return notes + [
        f"{row.run.title}: not ranked: {row.why_unranked}" for row in found.rows if row.is_unranked
    ]


def _trouble(number: int, text: str) -> str:
    last = text.splitlines()[-1][:200]
    if number == 0:
        return last
    return f"round {number} failed: {last.removeprefix('failed: ')}"


def targets_of(found: CellRows) -> list[str]:
    """What the library aims at on several ranks, and whether it was reached; else nothing."""
    rows = {row.run.system: row.values for row in found.rows if not row.is_unranked}
    ours = rows.get(OURS)
    if found.ranks == 1 or not ours:
        return []

    def rivals(key: str, names: str) -> list[Estimate]:
        values = [rows[n].get(key) for n in rows if n.startswith(names) and not n.startswith(OURS)]
        return sorted((v.estimate for v in values if v), key=lambda e: e.median)

    lines = []
    if "slowdown" in ours and (others := rivals("slowdown", "")):
        own, best = ours["slowdown"].estimate, others[0]
        is_met = own.median <= best.median or own.overlaps(best)
        lines.append(
            f"{_met(is_met)}: a slowdown that is the lowest, or cannot be told from it: "
            f"{own.median:+.1f} % against {best.median:+.1f} %"
        )
    if "stall_p50" in ours and (default := rivals("stall_p50", DEFAULT_RIVAL)):
        share = ours["stall_p50"].estimate.median / default[0].median
        lines.append(
            f"{_met(share <= _STALL_SHARE)}: a stall of at most a tenth of that of DCP's default "
            f"async_save: {share:.2f} of it"
        )
    if "restore" in ours and (others := rivals("restore", SYNC_RIVAL)):
        own, best = ours["restore"].estimate, others[0]
        is_met = own.median <= best.median or own.overlaps(best)
        lines.append(
            f"{_met(is_met)}: loading no slower than DCP: {number_text(own.median)} s against "
            f"{number_text(best.median)} s"
        )
    return lines


def _met(is_met: bool) -> str:
    return "Reached" if is_met else "**Missed**"


def head_of(found: CellRows) -> str:
    """The cell in one line."""
    size = max((row.state_bytes for row in found.rows), default=0.0)
    step = f", a step takes {1000 * found.step_s.median:.1f} ms" if found.step_s else ""
    return (
        f"{found.trained}, every {found.every} steps, store: {found.store}; "
        f"state of {size / 1e6:.2f} MB{step}"
    )


def show(console: Console, runs: Sequence[Run]) -> None:
    """Print the tables; what systems do not save is spelled out below each.

    Args:
        console: Where to.
        runs: Of any sessions; each cell is shown as one session measured it, see ``cells_of``.
    """
    for found in cells_of(runs):
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
        for note in (*targets_of(found), *notes_of(found)):
            console.print(f"  {note}", markup=False, highlight=False)


def _words(rows: Sequence[Sequence[str]]) -> list[str]:
    """What is not saved, each text once."""
    return list(dict.fromkeys(row[-1] for row in rows if row[-1] != _NONE))


def render(runs: Sequence[Run]) -> str:
    """The same as Markdown, with where and how it was measured.

    Args:
        runs: Of any sessions; each cell is shown as one session measured it, see ``cells_of``.

    Raises:
        DataError: There is none.
    """
    if not runs:
        raise DataError("comparison", expected="records of a session", found="none")
    sessions: dict[tuple[Machine, str], list[CellRows]] = {}
    for found in cells_of(runs):
        sessions.setdefault((found.machine, found.newest.session), []).append(found)
    return "\n\n".join(part for cells in sessions.values() for part in _parts(cells)) + "\n"


def _parts(cells: Sequence[CellRows]) -> list[str]:
    """The paragraphs of a session."""
    parts = [_about(cells)]
    for found in cells:
        heads, rows = lines_of(found)
        lines = [
            "| " + " | ".join(heads) + " |",
            "| --- |" + " ---: |" * (len(heads) - 2) + " --- |",
            *("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows),
        ]
        parts += [f"### {head_of(found)}", "\n".join(lines)]
        notes = [*targets_of(found), *notes_of(found)]
        if notes:
            parts.append("\n".join(f"- {note}" for note in notes))
    return parts


def _about(cells: Sequence[CellRows]) -> str:
    first, rounds = cells[0].newest, max(found.rounds for found in cells)
    runs = [row.run for found in cells for row in (*found.rows, *found.missing)]
    changed = "" if first.commit_is_clean else " with changes that were not committed"
    libraries = dict.fromkeys(r.library for r in runs if not r.absent and r.library.count(" ") == 1)
    versions = {**first.versions, **dict(library.split(" ") for library in libraries)}
    lines = [
        f"{measured_when(first.session, first.commit)}{changed}, with `{first.command}`.",
        "",
        f"- Machine: {first.machine}; {first.file_system}.",
        f"- Versions: {', '.join(f'{name} {version}' for name, version in versions.items())}.",
        f"- {first.steps} counted steps a run; {_rounds(rounds)}.",
    ]
    return "\n".join(lines)


def _rounds(count: int) -> str:
    if count == 1:
        return "one round, so that nothing is said of how far chance moves a figure"
    return f"{count} rounds: medians over rounds, in brackets the interval between order statistics"
