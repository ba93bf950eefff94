"""What the commands show: bars while they work, a table and a verdict at the end."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from asymcheck.rendering import size_text
from asymcheck_lab import demo, rundir
from asymcheck_lab.record import Result, StepRecord, median

if TYPE_CHECKING:
    from asymcheck.recovery import RestoreReport
    from asymcheck_lab.train import TrainOptions

_MAX_PROBLEMS = 10


def _bars(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[end]}"),
        console=console,
        expand=True,
        disable=not console.is_terminal,
    )


class _Shown:
    """Bars that are on the terminal while its ``with`` block runs."""

    _bars: Progress

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()


class TrainingBar(_Shown):
    """Shows one training: where it started, how far it is, its loss. Use it in a ``with``."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._bars = _bars(console)
        self._task = self._bars.add_task("training", total=steps, loss="", end="")

    def started(self, report: RestoreReport) -> None:
        """See ``Observer``."""
        if report.step:
            self._console.print(
                f"resumed from step {report.step}: {size_text(report.restored_bytes)} in "
                f"{report.duration_s:.2f} s"
            )
        if report.step == self._steps:
            self._console.print(f"step {report.step} is the last one: raise --steps to go on")
        self._bars.update(self._task, completed=report.step)

    def stepped(self, record: StepRecord) -> None:
        """See ``Observer``."""
        loss = f"loss {record.loss:.3f}"
        self._bars.update(self._task, completed=record.step, loss=loss)
        if not self._console.is_terminal and (record.step % 20 == 0 or record.step == self._steps):
            self._console.print(f"step {record.step} of {self._steps}: {loss}")


def show_training(console: Console, options: TrainOptions, result: Result) -> None:
    """Say what a training did and where to look."""
    root = options.root
    table = _table()
    done = result.steps - result.resumed_from
    table.add_row("steps", f"{result.resumed_from + 1} to {result.steps}" if done else "none")
    if result.checkpoints:
        stall_s = median(c.stall_s for c in result.checkpoints)
        size = round(median(c.stored_bytes for c in result.checkpoints))
        table.add_row("checkpoints", f"{len(result.checkpoints)} of {size_text(size)}")
        table.add_row("stall per checkpoint", f"{1000 * stall_s:.1f} ms (median)")
    if result.scores:
        shown = ", ".join(f"{name} {value:.3f}" for name, value in result.scores.items())
        table.add_row("on held-out data", shown)
    table.add_row("log", str(options.log))
    console.print(table)
    if root is not None and not root.startswith("memory:"):  # what ends with this process
        console.print(
            f"look at the checkpoints: asymcheck ls {root}", highlight=False, soft_wrap=True
        )
    if options.trace is not None and result.checkpoints:
        console.print(
            f"see what one took: asymcheck explain {options.trace}",
            highlight=False,
            soft_wrap=True,
        )


class DemoBars(_Shown, demo.Progress):
    """Shows the demo's processes, one bar each. Use it in a ``with``."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._bars = _bars(console)
        self._task = self._bars.add_task("", visible=False, loss="", end="")
        self._title = ""
        self._last: StepRecord | None = None

    def begun(self, title: str) -> None:
        """See ``Progress``."""
        self._title, self._last = title, None
        self._task = self._bars.add_task(title, total=self._steps, loss="loading", end="")
        self._say("starting")

    def stepped(self, record: StepRecord) -> None:
        """See ``Progress``."""
        if self._last is None and record.resumed_from:
            self._say(f"resumed from step {record.resumed_from}")
        self._last = record
        self._bars.update(self._task, completed=record.step, loss=f"loss {record.loss:.3f}")
        if record.step % 10 == 0:
            self._say(f"step {record.step} of {self._steps}, loss {record.loss:.3f}")

    def ended(self, how: str) -> None:
        """See ``Progress``."""
        # A bar's clock stops at its total; that of a killed process ends where it is.
        self._bars.stop_task(self._task)
        self._bars.update(self._task, end=how)
        self._say(f"ended: {how}")

    def _say(self, what: str) -> None:
        if not self._console.is_terminal:
            self._console.print(f"{self._title}: {what}", highlight=False)


def show_demo(console: Console, evidence: demo.Evidence, checks: Sequence[demo.Check]) -> None:
    """Show what was measured, what was proved, and how to look at it."""
    options, cost = evidence.options, demo.cost_of(evidence)
    table = _table()
    table.add_row("steps", f"{options.steps}, {cost.step_s:.3f} s each (median)")
    table.add_row("checkpoints", f"{cost.checkpoints}, one every {options.every} steps")
    table.add_row("stall per checkpoint", f"{1000 * cost.stall_s:.1f} ms (median)")
    table.add_row(
        "slowdown against no checkpoints",
        f"{100 * cost.slowdown:+.1f} % ± {100 * cost.slowdown_error:.1f} %; "
        f"stalls alone {100 * cost.stall_share:.1f} %",
    )
    table.add_row("bytes per checkpoint", size_text(cost.stored_bytes))
    table.add_row("restore", f"{cost.restore_s:.3f} s")
    table.add_row("killed while saving step", str(options.kill_at))
    table.add_row("resumed from step", str(evidence.resumed.result.resumed_from))
    wrong = [check for check in checks if check.problems]
    table.add_row(
        "verdict",
        "[bold red]NOT the same training[/]" if wrong else "[bold green]equal in every bit[/]",
    )
    console.print(table)
    for check in checks:
        sign = "[red]NO [/]" if check.problems else "[green]yes[/]"
        console.print(f"{sign}  {check.claim}", highlight=False)
        for problem in check.problems[:_MAX_PROBLEMS]:
            console.print(f"     {problem}", highlight=False, markup=False, soft_wrap=True)
        if len(check.problems) > _MAX_PROBLEMS:
            console.print(f"     and {len(check.problems) - _MAX_PROBLEMS} more")
    root = demo.checkpoints_of(options.folder, demo.CUT)
    trace = options.folder / demo.WHOLE / rundir.TRACE
    console.print(
        f"\nlook at the result:\n  asymcheck ls {root}\n  asymcheck verify {root}"
        f"\nsee what a checkpoint took, and why:\n  asymcheck explain {trace}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _table() -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    return table
