"""The loss of a training as a picture, from its JSON log."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from asymcheck_lab.errors import DataError, LabError
from asymcheck_lab.record import StepRecord

_SIZE_INCHES = (5.0, 2.8)
_DPI = 90
_SMOOTHED = 10


def plot_loss(records: Sequence[StepRecord], path: Path, title: str = "") -> None:
    """Write the picture: each loss, their mean over ten steps, evaluations, and restarts.

    Args:
        records: What a log holds, at least one step.
        path: The file; its ending says which kind of picture.
        title: Above it.

    Raises:
        DataError: There is no step.
        LabError: The file cannot be written.
    """
    if not records:
        raise DataError("log", expected="at least one step", found="none")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    latest = sorted({record.step: record for record in records}.values(), key=lambda r: r.step)
    steps, losses = [r.step for r in latest], [r.loss for r in latest]
    means = [
        sum(part) / len(part)
        for part in (losses[max(0, n + 1 - _SMOOTHED) : n + 1] for n in range(len(losses)))
    ]
    figure = Figure(figsize=_SIZE_INCHES, dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(steps, losses, color="0.75", linewidth=0.8, label="loss of a batch")
    axes.plot(steps, means, color="tab:blue", label=f"mean of {_SMOOTHED} steps")
    scored = [(r.step, r.scores["loss"]) for r in latest if "loss" in r.scores]
    if scored:
        axes.plot(*zip(*scored, strict=True), "o", color="tab:orange", label="held-out loss")
    for restart in sorted({r.resumed_from for r in records} - {0}):
        axes.axvline(restart, color="tab:red", linestyle=":", linewidth=1)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats)")
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=8, frameon=False)
    try:
        figure.savefig(path, metadata={"Software": None} if path.suffix == ".png" else None)
    except (OSError, ValueError) as failure:
        raise LabError(f"{path}: {failure}") from failure
