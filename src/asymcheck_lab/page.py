"""``asymlab report``: one HTML page that compares every system over every model.

The page needs nothing beside itself: style, script and plots are inside, and it asks no network
for anything. Whatever comes from a record is escaped by the template.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

from asymcheck.rendering import count_text
from asymcheck_lab.bench_stats import Estimate
from asymcheck_lab.compare_records import Machine, Run, read_runs
from asymcheck_lab.compare_stats import (
    COLUMNS,
    CellRows,
    Column,
    Row,
    can_tell_apart,
    cells_of,
    machines_of,
    number_text,
)
from asymcheck_lab.errors import DataError, LabError
from asymcheck_lab.page_chaos import tried_failures
from asymcheck_lab.page_plots import (
    Look,
    Ranges,
    draw_blocked,
    draw_slowdown,
    draw_stall,
    looks_of,
    marker_of,
    ranges_of,
    svg_of,
    write_png,
)

PAGE = "index.html"
_KINDS = (
    ("none", "no checkpoints"),
    ("ours", "this library"),
    ("strategy", "strategies"),
    ("rival", "other libraries"),
)
_ALL = "nothing"


def write_page(results: Sequence[Path], out: Path, *, all_machines: bool = False) -> list[Path]:
    """Write the page and its pictures; blocks for seconds.

    Args:
        results: Results files, and folders of them.
        out: The folder; made where it is missing. Files of the same names are replaced.
        all_machines: Whether results of several machines may be on one page.

    Returns:
        The files, the page first.

    Raises:
        DataError: There are no results, or what is there is something else, or of two machines.
        LabError: The page cannot be written.
    """
    runs = read_runs(results)
    machines = machines_of(runs)
    if len(machines) > 1 and not all_machines:
        raise DataError(
            ", ".join(map(str, results)),
            expected="results of one machine; --all-machines shows several, each by itself",
            found="; ".join(f"{machine} ({_records_of(runs, machine)})" for machine in machines),
        )
    cells = cells_of(runs)
    looks = looks_of(cells)
    shown = [(machine, [c for c in cells if c.machine == machine]) for machine in machines]
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise LabError(f"{out}: {failure.strerror}") from failure
    pictures = [
        path
        for number, (_, its) in enumerate(shown, start=1)
        for path in _write_pictures(its, looks, out, "" if len(shown) == 1 else f"-{number}")
    ]
    page = out / PAGE
    names = [path.name for path in pictures]
    _replace(page, render(runs, shown, looks, names, tried_failures(results)))
    return [page, *pictures]


def _records_of(runs: Sequence[Run], machine: Machine) -> str:
    return count_text(sum(run.machine == machine for run in runs), "record")


def _write_pictures(
    cells: Sequence[CellRows], looks: Mapping[str, Look], out: Path, suffix: str
) -> list[Path]:
    titled = [(_title_of(cell), cell) for cell in cells]
    ranges = ranges_of(cells)
    summary, blocked = out / f"summary{suffix}.png", out / f"blocked{suffix}.png"
    write_png([draw_stall, draw_slowdown], titled, looks, ranges, summary)
    write_png([draw_blocked], titled, looks, ranges, blocked)
    return [summary, blocked]


def _replace(path: Path, text: str) -> None:
    temp = path.with_name(path.name + ".new")
    try:
        temp.write_text(text, encoding="utf-8")
        temp.replace(path)
    except OSError as failure:
        raise LabError(f"{path}: {failure.strerror}") from failure


# --- what the template is given ---------------------------------------------


def render(
    runs: Sequence[Run],
    shown: Sequence[tuple[Machine, Sequence[CellRows]]],
    looks: Mapping[str, Look],
    pictures: Sequence[str],
    failures: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The page as text.

    Args:
        runs: Every record, those of older sessions included.
        shown: The cells, by machine.
        looks: Of every system.
        pictures: Names of files beside the page.
        failures: What ``tried_failures`` gives.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    script = _own_text("page.js")
    # What stands between the tags, line ends included.
    digest = hashlib.sha256(f"\n{script}\n".encode()).digest()
    cells = [cell for _, its in shown for cell in its]
    signs = {name: {**asdict(look), "path": marker_of(look)} for name, look in looks.items()}
    numbers = iter(range(1, len(cells) + 1))
    environment = Environment(
        loader=PackageLoader("asymcheck_lab"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text: str = environment.get_template("page.html.j2").render(
        page=_head_of(cells),
        machines=[
            {
                "text": str(machine),
                "cells": [
                    _cell_view(cell, looks, signs, ranges_of(its), f"cell-{next(numbers)}")
                    for cell in its
                ],
            }
            for machine, its in shown
        ],
        columns=COLUMNS,
        filters=[
            ("model", "model", _different(cell.trained for cell in cells)),
            ("store", "store", _different(cell.store for cell in cells)),
            ("every", "interval", _different(str(cell.every) for cell in cells)),
        ],
        kinds=[
            (kind, label)
            for kind, label in _KINDS
            if any(row.run.kind == kind for cell in cells for row in cell.rows)
        ],
        looks=_systems_of(cells, signs),
        sessions=_sessions_of(runs, cells),
        pictures=pictures,
        failures=failures,
        style=Markup(_own_text("page.css")),
        script=Markup(script),
        script_hash=Markup("sha256-" + base64.b64encode(digest).decode()),
    )
    return text


def _own_text(name: str) -> str:
    """A file of this package, without its last line end."""
    file = resources.files("asymcheck_lab") / "templates" / name
    return file.read_text(encoding="utf-8").rstrip("\n")


def _different(values: Any) -> list[str]:  # noqa: ANN401  any iterable of texts
    return list(dict.fromkeys(values))


def _head_of(cells: Sequence[CellRows]) -> dict[str, Any]:
    newest = [cell.newest for cell in cells]
    models = _different(cell.trained for cell in cells)
    systems = {row.run.system for cell in cells for row in cell.rows if row.run.kind != "none"}
    days = sorted({run.session[:10] for run in newest})
    compared = [
        count_text(len(systems), "system"),
        count_text(len(models), "model") + f" ({', '.join(models)})",
        count_text(len({cell.store for cell in cells}), "store")
        + f" ({', '.join(_different(cell.store for cell in cells))})",
        "a checkpoint every "
        + ", ".join(map(str, sorted({cell.every for cell in cells})))
        + " steps",
    ]
    return {
        "title": f"Checkpoints compared: {count_text(len(systems), 'system')}, "
        f"{count_text(len(models), 'model')}",
        "compared": "; ".join(compared),
        "measured": days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}",
        "commits": _different(_commit_of(run) for run in newest),
        "commands": _different(run.command for run in newest),
    }


def _commit_of(run: Run) -> str:
    name = (run.commit or "unknown")[:12]
    return name if run.commit_is_clean else f"{name} with changes that were not committed"


def _title_of(cell: CellRows) -> str:
    return f"{cell.trained}, {cell.store}, every {count_text(cell.every, 'step')}"


def _cell_view(
    cell: CellRows,
    looks: Mapping[str, Look],
    signs: Mapping[str, Mapping[str, Any]],
    ranges: Ranges,
    name: str,
) -> dict[str, Any]:
    from markupsafe import Markup

    title = _title_of(cell)
    draws = {
        "stall": (draw_stall, "Stall per checkpoint against time to durable"),
        "slowdown": (draw_slowdown, "Slowdown of the whole run, with intervals"),
        "blocked": (draw_blocked, "Every blocked time"),
    }
    svgs = {
        f"{key}_svg": Markup(
            svg_of(
                draw,
                cell,
                looks,
                ranges,
                name=f"{name}-{key}",
                title=f"{what}: {title}",
                about="The numbers are in the table of this cell.",
            )
        )
        for key, (draw, what) in draws.items()
    }
    return {
        "name": name,
        "title": title,
        "model": cell.trained,
        "store": cell.store,
        "every": cell.every,
        "about": _about(cell),
        "rows": [_row_view(row, signs) for row in cell.rows],
        "troubles": [
            trouble for row in (*cell.missing, *cell.rows) for trouble in _trouble_views(row)
        ],
        **svgs,
    }


def _about(cell: CellRows) -> str:
    run = cell.newest
    parts = [
        f"{count_text(cell.rounds, 'round')} of {count_text(run.steps, 'counted step')} after "
        f"{run.warmup} of warm-up, {run.session[:10]}, {run.file_system}."
    ]
    if cell.step_s is None:
        parts.append("No run without checkpoints came to its end: there is no slowdown to show.")
    else:
        parts.append(
            f"A step without checkpoints takes {number_text(cell.step_s.median)} s "
            f"({number_text(cell.step_s.low)} to {number_text(cell.step_s.high)})."
        )
    counts = [v.estimate for row in cell.rows for v in row.values.values()]
    widest = max(counts, key=lambda found: found.count, default=None)
    if widest is not None and widest.count > 1:
        parts.append(f"Intervals cover the median with {100 * widest.coverage:.1f} %.")
    if widest is not None and not can_tell_apart(widest.count):
        parts.append(f"{count_text(widest.count, 'round')} cannot tell systems apart.")
    if cell.left_out:
        parts.append(f"{count_text(cell.left_out, 'record')} of other sessions left out.")
    return " ".join(parts)


def _row_view(row: Row, signs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    run = row.run
    return {
        "look": signs[run.system],
        "title": run.title,
        "system": run.system,
        "kind": run.kind,
        "why_unranked": row.why_unranked,
        "group": row.group,
        "omits": row.omits or _ALL,
        "exact": row.exact,
        "troubles": f"{len(row.troubles)} of {len(row.troubles) + len(row.runs)} runs failed"
        if row.troubles
        else "",
        "figures": [_figure_view(row, column) for column in COLUMNS],
    }


def _trouble_views(row: Row) -> list[dict[str, str]]:
    """What went wrong, each thing once with its rounds: in a line, and as a whole if longer."""
    rounds: dict[str, list[str]] = {}
    for number, text in row.troubles:
        rounds.setdefault(text, []).append(str(number))
    views = []
    for text, its in rounds.items():
        lines = text.splitlines()
        views.append(
            {
                "title": row.run.title,
                "rounds": "" if its == ["0"] else f", round {', '.join(its)}",
                "text": text if len(lines) == 1 else f"failed: {lines[-1]}",
                "whole": text if len(lines) > 1 else "",
            }
        )
    return views


def _figure_view(row: Row, column: Column) -> dict[str, Any] | None:
    value = row.values.get(column.key)
    if value is None:
        return None
    found, mark = value.estimate, row.marks.get(column.key)
    words = ""
    if mark is not None:
        words = "best" if mark.best else "at the best, not told apart from others"
        words += f", of {mark.among} systems that save the same state ({row.group})"
    return {
        "text": column.text(found.median),
        "sort": repr(found.median),
        "interval": _interval(column, found),
        "note": value.note,
        "mark": mark,
        "mark_words": words,
    }


def _interval(column: Column, found: Estimate) -> str:
    low, high = (column.text(end) for end in (found.low, found.high))
    return "" if low == high else f"{low} to {high}"


def _systems_of(
    cells: Sequence[CellRows], signs: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Every system, with what was said of it first."""
    kinds = dict(_KINDS)
    found: dict[str, Run] = {}
    for cell in cells:
        for row in (*cell.rows, *cell.missing):
            found.setdefault(row.run.system, row.run)
    return [
        {
            **sign,
            "title": found[name].title,
            "system": name,
            "kind": kinds[found[name].kind],
            "library": found[name].library,
            "omits": found[name].omits or _ALL,
            "syncs": found[name].syncs or "–",
        }
        for name, sign in signs.items()
    ]


def _sessions_of(runs: Sequence[Run], cells: Sequence[CellRows]) -> list[dict[str, Any]]:
    """What each session that is shown ran with."""
    shown = dict.fromkeys((cell.machine, cell.newest.session) for cell in cells)
    return [
        _session_view([r for r in runs if (r.machine, r.session) == key])
        for key in sorted(shown, key=lambda k: k[1])
    ]


def _session_view(runs: Sequence[Run]) -> dict[str, Any]:
    first = runs[0]
    measured = [run.measured for run in runs if run.measured]
    capacity_s = first.machine.cpus * sum(run.whole_s for run in measured)
    steal = sum(run.steal_s for run in measured) / capacity_s if measured else 0.0
    return {
        "when": first.session,
        "machine": str(first.machine),
        "file_systems": ", ".join(_different(run.file_system for run in runs)),
        "versions": ", ".join(f"{name} {version}" for name, version in first.versions.items()),
        "commit": ", ".join(_different(_commit_of(run) for run in runs)),
        "records": f"{len(runs)}, of which {len(measured)} came to their end",
        "steal": f"{100 * steal:.1f} % of the machine's CPU time went to others on its host",
        "commands": _different(run.command for run in runs),
    }
