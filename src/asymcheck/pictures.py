"""A checkpoint drawn into a PNG; needs matplotlib, which the extra ``plot`` brings."""

from __future__ import annotations

from pathlib import Path

from asymcheck.errors import OptionError, StoreError
from asymcheck.explanation import KINDS, lanes, stall_s, what_bounded
from asymcheck.rendering import size_text
from asymcheck.tracing import Trace

_COLOURS = {
    "forward": ("#4c78a8", "#7fa6cf"),
    "backward": ("#8f5aa8", "#b98fce"),
    "copy": ("#3a9d5d", "#7cc896"),
    "wait": ("#d62728", "#d62728"),
    "encode": ("#e0a31a", "#f2cd74"),
    "write": ("#17a2b8", "#77cfdc"),
    "commit": ("#222222", "#222222"),
    "retain": ("#aaaaaa", "#aaaaaa"),
}
_WIDTH_INCHES, _LANE_INCHES, _REST_INCHES = 11.0, 0.55, 2.0
_WORDS_A_LINE = 22


def draw(trace: Trace, path: Path) -> None:
    """Draw the lanes of a checkpoint; blocks for about a second.

    Args:
        trace: The checkpoint.
        path: The file; its folders are made. Replaced where it is there.

    Raises:
        OptionError: matplotlib is missing, or the name is that of no picture.
        StoreError: The file cannot be written.
    """
    if path.suffix.lower() != ".png":
        raise OptionError(f"png: expected a name that ends in .png, found {str(path)!r}")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as missing:
        raise OptionError(
            f"png: matplotlib is needed for a picture and not installed ({missing}): pip install "
            f'"asymcheck[plot]"'
        ) from missing
    found, report = lanes(trace), trace.report
    figure = Figure((_WIDTH_INCHES, _REST_INCHES + _LANE_INCHES * len(found)), dpi=120)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    whole_s = max([report.durable_s, *(bar.stop_s for lane in found for bar in lane.bars)])
    for row, lane in enumerate(found):
        for i, bar in enumerate(lane.bars):
            # A bar that is too short to be seen still shows as a line.
            length_s = max(bar.stop_s - bar.start_s, whole_s / 1500)
            colour = _COLOURS[bar.kind][i % 2]
            axes.barh(row, 1000 * length_s, left=1000 * bar.start_s, height=0.7, color=colour)
            if bar.label and bar.label.isdigit() and length_s > whole_s / 60:
                middle_ms = 1000 * (bar.start_s + length_s / 2)
                axes.text(
                    middle_ms, row, bar.label, ha="center", va="center", color="white", size=7
                )
    axes.axvline(1000 * report.durable_s, color="#222222", linestyle="--", linewidth=1)
    axes.set_yticks(range(len(found)), [lane.name for lane in found])
    axes.invert_yaxis()
    axes.set_xlim(0, 1000 * whole_s * 1.01)
    axes.set_xlabel("ms since the boundary of the step (dashed: durable); numbers are windows")
    axes.set_title(
        f"step {report.step}: {size_text(report.raw_bytes)}, stored "
        f"{size_text(report.stored_bytes)}; training waited {1000 * stall_s(trace):.1f} ms, "
        f"durable after {1000 * report.durable_s:.1f} ms",
        size=10,
    )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(axis="x", color="#dddddd", linewidth=0.5)
    axes.set_axisbelow(True)
    kinds = [k for k in KINDS if any(bar.kind == k for lane in found for bar in lane.bars)]
    figure.legend(
        handles=[Patch(color=_COLOURS[kind][0], label=KINDS[kind]) for kind in kinds],
        loc="lower center",
        ncols=4,
        fontsize=8,
        frameon=False,
    )
    words = what_bounded(trace).split()
    lines = [" ".join(words[i : i + _WORDS_A_LINE]) for i in range(0, len(words), _WORDS_A_LINE)]
    figure.text(0.01, 0.99, "\n".join(lines), va="top", size=8)
    figure.tight_layout(rect=(0, 0.12, 1, 0.92))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png")
    except OSError as failure:
        raise StoreError(f"png {path}: {failure.strerror}", retryable=False) from failure
