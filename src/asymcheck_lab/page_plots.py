"""The plots of the page: as SVG that takes its colours from the page, and as PNG files."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from itertools import cycle
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from asymcheck_lab.compare_records import KINDS, Run
from asymcheck_lab.compare_stats import CellRows, Row
from asymcheck_lab.errors import LabError
from asymcheck_lab.record import median

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH_INCHES = 4.6
_LEAST_HEIGHT_INCHES = 2.8
_ROW_INCHES = 0.21
_DPI = 110
_MOST_PIXELS = 60_000
"""Of the height of a PNG; matplotlib can draw 65 535."""
_LABEL_LENGTH, _TITLE_LENGTH = 26, 56
_LABEL_OFFSETS = ((8, 4), (-8, 4), (8, -11), (-8, -11), (18, 4), (-18, 4), (18, -11), (-18, -11))
_LABEL_ROOM = 9
_LEAST = 1e-3
"""What is smaller stands here on a logarithmic axis."""
# In an SVG these two stand for colours of the page.
_INK, _FAINT = "#010203", "#030201"
_SHADES = ((_INK, "currentColor"), (_FAINT, "var(--faint)"))


@dataclass(frozen=True, slots=True)
class Ranges:
    """Axes that all cells share, so that plots can be compared.

    Attributes:
        blocked_ms: Least and greatest time that training is blocked.
        durable_s: Least and greatest time until a checkpoint is durable.
    """

    blocked_ms: tuple[float, float]
    durable_s: tuple[float, float]


def ranges_of(cells: Sequence[CellRows]) -> Ranges:
    """What the values of all cells need, with some room."""
    rows = [row for cell in cells for row in cell.rows]
    blocked = [1000 * seconds for row in rows for seconds in row.blocked_s]
    durable = [
        end
        for row in rows
        if (value := row.values.get("durable_p50"))
        for end in (value.estimate.low, value.estimate.high)
    ]
    return Ranges(_range_of(blocked), _range_of(durable))


def _range_of(values: Sequence[float]) -> tuple[float, float]:
    positive = [max(value, _LEAST) for value in values] or [1.0]
    return min(positive) / 1.7, max(positive) * 1.7


# --- looks ------------------------------------------------------------------

PALETTE = ("#1F83C4", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#8A8A8A")
"""After Okabe and Ito, without what vanishes on white or on black; their blue a little lighter."""
SHAPES: Mapping[str, str] = MappingProxyType(
    {"none": "|", "ours": "oh", "strategy": "sDpX", "rival": "^v<>P*"}
)
"""Of a kind of system: one shape for as many systems as there are colours, then the next."""


@dataclass(frozen=True, slots=True)
class Look:
    """How a system is drawn, everywhere.

    Attributes:
        number: Stands beside its points.
        colour: ``#rrggbb``.
        shape: A marker of matplotlib.
    """

    number: int
    colour: str
    shape: str


def looks_of(cells: Iterable[CellRows]) -> dict[str, Look]:
    """Each system its number, colour and shape; by kind, then by title."""
    systems: dict[str, Run] = {}
    for cell in cells:
        for row in (*cell.rows, *cell.missing):
            systems.setdefault(row.run.system, row.run)
    found: dict[str, Look] = {}
    for kind in KINDS:
        names = sorted(
            (name for name, run in systems.items() if run.kind == kind),
            key=lambda name: (systems[name].title, name),
        )
        for n, name in enumerate(names):
            shapes, colour = SHAPES[kind], PALETTE[len(found) % len(PALETTE)]
            shape = shapes[n // len(PALETTE) % len(shapes)]
            found[name] = Look(len(found) + 1, colour, shape)
    return found


# --- what is drawn ----------------------------------------------------------

Drawing = Callable[["Axes", CellRows, Mapping[str, Look], Ranges, str], None]


def draw_stall(
    axes: Axes, cell: CellRows, looks: Mapping[str, Look], ranges: Ranges, ink: str
) -> None:
    """Stall per checkpoint against time to durable, a point a system with both intervals.

    Args:
        axes: Empty.
        cell: What is drawn.
        looks: Of every system.
        ranges: Of the axes.
        ink: Colour of numbers.
    """
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(ranges.blocked_ms)
    axes.set_ylim(ranges.durable_s)
    taken: list[tuple[float, float]] = []
    for row in cell.rows:
        stall, durable = row.values.get("stall_p50"), row.values.get("durable_p50")
        if stall is None or durable is None:
            continue
        look = looks[row.run.system]
        x, x_error = _point(stall.estimate.median, stall.estimate.low, stall.estimate.high)
        y, y_error = _point(durable.estimate.median, durable.estimate.low, durable.estimate.high)
        axes.errorbar([x], [y], xerr=x_error, yerr=y_error, **_style(row, look))
        place = _free_place(axes, (x, y), taken)
        number = str(look.number)
        axes.annotate(
            number, (x, y), place, textcoords="offset points", ha="center", fontsize=8, color=ink
        )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(_plain_number)
    axes.set_xlabel("stall per checkpoint, ms")
    axes.set_ylabel("durable after, s")


def draw_slowdown(
    axes: Axes, cell: CellRows, looks: Mapping[str, Look], ranges: Ranges, ink: str
) -> None:
    """Slowdown of the whole run with its interval, a line a system. Arguments: see above."""
    rows = [row for row in cell.rows if "slowdown" in row.values]
    for n, row in enumerate(rows):
        value = row.values["slowdown"].estimate
        error = [[value.median - value.low], [value.high - value.median]]
        axes.errorbar([value.median], [n], xerr=error, **_style(row, looks[row.run.system]))
    axes.axvline(0, color=ink, linewidth=0.8)
    _name_rows(axes, rows, looks)
    # One that multiplies the time must not push the others into one point.
    if max((abs(row.values["slowdown"].estimate.high) for row in rows), default=0) > 150:
        axes.set_xscale("symlog", linthresh=10)
        axes.xaxis.set_major_formatter(_plain_number)
    axes.set_xlabel("slowdown, %")


def draw_blocked(
    axes: Axes, cell: CellRows, looks: Mapping[str, Look], ranges: Ranges, ink: str
) -> None:
    """Every blocked time as a dot, and their median as a line. Arguments: see above."""
    rows = [row for row in cell.rows if row.run.kind != "none" and row.blocked_s]
    for n, row in enumerate(rows):
        found = [max(1000 * seconds, _LEAST) for seconds in row.blocked_s]
        look = looks[row.run.system]
        # Side by side, so that equal ones are seen.
        apart = [n + step for _, step in zip(found, cycle((0.0, -0.2, 0.2, -0.1, 0.1)))]
        axes.plot(
            found, apart, look.shape, color=look.colour, markersize=3.5, alpha=0.6, mew=0, ls=""
        )
        middle = median(found)
        axes.plot([middle, middle], [n - 0.36, n + 0.36], color=ink, linewidth=1.4)
    _name_rows(axes, rows, looks)
    axes.set_xscale("log")
    axes.set_xlim(ranges.blocked_ms)
    axes.xaxis.set_major_formatter(_plain_number)
    axes.set_xlabel("blocked per checkpoint, ms")


def _plain_number(value: float, _: object) -> str:
    return f"{value:g}"


def _free_place(
    axes: Axes, point: tuple[float, float], taken: list[tuple[float, float]]
) -> tuple[float, float]:
    """Offset of a label, in points, that lies on no label before it where there is such a one."""
    x, y = (float(v) * 72 / axes.figure.dpi for v in axes.transData.transform(point))

    def room(offset: tuple[float, float]) -> float:
        here = (x + offset[0], y + offset[1])
        return min((math.dist(here, there) for there in taken), default=math.inf)

    # The first of them that is free; where none is, the one with most room.
    best = next((o for o in _LABEL_OFFSETS if room(o) >= _LABEL_ROOM), None)
    best = best or max(_LABEL_OFFSETS, key=room)
    taken.append((x + best[0], y + best[1]))
    return best


def _point(middle: float, low: float, high: float) -> tuple[float, list[list[float]]]:
    """On a logarithmic axis: where, and how far to either end of the interval."""
    middle, low, high = (max(value, _LEAST) for value in (middle, low, high))
    return middle, [[middle - low], [high - middle]]


def _style(row: Row, look: Look) -> dict[str, Any]:
    """What is not compared is hollow."""
    return {
        "color": look.colour,
        "marker": look.shape,
        "markersize": 6.5,
        "markerfacecolor": "none" if row.why_unranked else look.colour,
        "elinewidth": 1.3,
        "capsize": 2.5,
    }


def _name_rows(axes: Axes, rows: Sequence[Row], looks: Mapping[str, Look]) -> None:
    names = [f"{looks[r.run.system].number}  {_short(r.run.system)}" for r in rows]
    axes.set_yticks(range(len(rows)), names, parse_math=False)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)


def _short(text: str, length: int = _LABEL_LENGTH) -> str:
    one_line = " ".join(text.split())
    return one_line if len(one_line) <= length else one_line[: length - 1] + "…"


# --- how it is written ------------------------------------------------------


def svg_of(
    draw: Drawing,
    cell: CellRows,
    looks: Mapping[str, Look],
    ranges: Ranges,
    *,
    name: str,
    title: str,
    about: str,
) -> str:
    """A plot as an SVG element for a page; its text and axes have the colours of the page.

    Args:
        draw: What.
        cell: Of which cell.
        looks: Of every system.
        ranges: Of the axes.
        name: Unique on the page; letters, digits and ``-``.
        title: What it is called where it cannot be seen.
        about: What it shows, in words.
    """
    with _plain_style(_INK, _FAINT, name) as new_figure:
        figure = new_figure((_WIDTH_INCHES, _height_of(cell)))
        draw(figure.add_subplot(), cell, looks, ranges, _INK)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # Here it would hold for the whole page.
    text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)
    for shade, own in _SHADES:
        text = text.replace(shade, own)
    # Figures of one page must not share names.
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", text)
    box = re.search(r'viewBox="[^"]*"', text)
    assert box is not None, "matplotlib gives every SVG a viewBox"
    start = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'{box[0]} role="img" aria-labelledby="{name}-title {name}-about">\n'
        f'<title id="{name}-title">{escape(title)}</title>\n'
        f'<desc id="{name}-about">{escape(about)}</desc>'
    )
    return start + text[text.index(">") + 1 :]


def write_png(
    draws: Sequence[Drawing],
    cells: Sequence[tuple[str, CellRows]],
    looks: Mapping[str, Look],
    ranges: Ranges,
    path: Path,
) -> None:
    """One picture of several cells, a line a cell, a column a drawing.

    Args:
        draws: The drawings.
        cells: With the title of each.
        looks: Of every system.
        ranges: Of the axes.
        path: The file.

    Raises:
        LabError: It cannot be written.
    """
    heights = [_height_of(cell) + 0.3 for _, cell in cells]
    with _plain_style("black", "0.88", "png") as new_figure:
        figure = new_figure((len(draws) * (_WIDTH_INCHES + 0.8), sum(heights)))
        grid = figure.add_gridspec(len(cells), len(draws), height_ratios=heights)
        for line, (title, cell) in enumerate(cells):
            for column, draw in enumerate(draws):
                axes = figure.add_subplot(grid[line, column])
                draw(axes, cell, looks, ranges, "black")
                if column == 0:
                    short = _short(title, _TITLE_LENGTH)
                    axes.set_title(short, loc="left", fontsize=10, parse_math=False)
        dpi = min(_DPI, _MOST_PIXELS / sum(heights))
        try:
            figure.savefig(path, format="png", dpi=dpi, metadata={"Software": None})
        except OSError as failure:
            raise LabError(f"{path}: {failure.strerror}") from failure


def marker_of(look: Look) -> str:
    """The marker of a system as the path of an SVG whose box goes from -1 to 1."""
    from matplotlib.markers import MarkerStyle

    style = MarkerStyle(look.shape)
    path = style.get_path().transformed(style.get_transform())
    polygons: Any = path.to_polygons(closed_only=False)
    reach = max(abs(v) for polygon in polygons for point in polygon for v in point)
    return " ".join(
        "M" + "L".join(f"{0.9 * x / reach:.2f} {-0.9 * y / reach:.2f}" for x, y in polygon)
        for polygon in polygons
    )


def _height_of(cell: CellRows) -> float:
    return max(_LEAST_HEIGHT_INCHES, 0.7 + _ROW_INCHES * len(cell.rows))


@contextmanager
def _plain_style(
    ink: str, faint: str, salt: str
) -> Iterator[Callable[[tuple[float, float]], Figure]]:
    """Figures in two colours, with text that stays text; names come from ``salt`` alone."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": salt,
        "font.family": "sans-serif",
        "font.size": 9,
        "text.color": ink,
        "axes.edgecolor": ink,
        "axes.labelcolor": ink,
        "xtick.color": ink,
        "ytick.color": ink,
        "grid.color": faint,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with rc_context(style), warnings.catch_warnings():
        # A name may have characters that no font here has.
        warnings.filterwarnings("ignore", message="(?s)Glyph .* missing from")
        yield lambda inches: Figure(figsize=inches, layout="constrained")
