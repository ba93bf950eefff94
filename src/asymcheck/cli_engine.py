"""Commands that explain the engine from a trace: why a checkpoint took what it took."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.text import Text

from asymcheck.cli_base import Json, print_json, reported
from asymcheck.events import Stage
from asymcheck.explanation import (
    KINDS,
    Alternative,
    Lane,
    alternatives,
    lanes,
    shares,
    stall_s,
    what_bounded,
    why_so_planned,
)
from asymcheck.planning.windows import total_s
from asymcheck.rendering import count_text, plain, show_line, size_text, table_text
from asymcheck.tracing import Trace, choose_step

app = typer.Typer()

_WIDTH = 72  # of the lanes, in characters
_NAME_WIDTH = 8
_TICKS = 6
_BATCH_ROWS = 12
_SIGNS = {  # of bars that stand side by side, in turn; and how a terminal shows them
    "forward": ("Ff", "blue"),
    "backward": ("Bb", "magenta"),
    "copy": ("#=", "green"),
    "wait": ("!!", "red"),
    "encode": ("Ee", "yellow"),
    "write": ("Ww", "cyan"),
    "commit": ("CC", "bold"),
    "retain": ("rr", "dim"),
}

TraceFile = Annotated[
    Path,
    typer.Argument(metavar="TRACE", help="What Checkpointer(…, trace=…) or asymlab train wrote."),
]
Step = Annotated[
    int | None,
    typer.Option(help="Of which checkpoint [default: the newest that training went on behind]"),
]


# --- explain ----------------------------------------------------------------


@app.command()
@reported
def explain(
    trace: TraceFile,
    step: Step = None,
    png: Annotated[
        Path | None, typer.Option("--png", help="Also draw it into this file; needs matplotlib.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show one checkpoint as a picture: who did what when, and what bounded it.

    Lanes on one time axis from the boundary of the step on: windows, copy, when training waited,
    encoding, writes, commit. Then what was planned for each window, what was chosen for each
    kind of leaf, the batches, and why.
    """
    found = choose_step(trace, step)
    if png is not None:
        from asymcheck.pictures import draw  # loads matplotlib

        draw(found, png)
    if as_json:
        print_json(trace=str(trace), **_explained(found))
        return
    _print_picture(found)
    _print_partitions(found)
    _print_choices(found)
    _print_batches(found)
    show_line()
    if found.cadence:
        show_line(plain(f"How often is saved: {found.cadence}."))
    show_line(what_bounded(found))
    show_line(plain(why_so_planned(found)))
    if png is not None:
        show_line(f"drawn into {plain(str(png))}")


def _explained(trace: Trace) -> dict[str, Any]:
    report = asdict(trace.report)
    return {
        **report,
        "groups": [group._asdict() for group in trace.report.groups],
        "stall_s": stall_s(trace),
        "shares": [share._asdict() for share in shares(trace)],
        "bounded": what_bounded(trace),
        "planned": why_so_planned(trace),
        "partitioner": trace.partitioner,
        "cadence": trace.cadence,
        "lazy_bytes": trace.lazy_bytes,
        "copy_bytes_per_s": trace.copy_bytes_per_s,
        "partitions": [part._asdict() for part in _partitions(trace)],
        "lanes": {lane.name: [bar._asdict() for bar in lane.bars] for lane in lanes(trace)},
    }


def _print_picture(trace: Trace) -> None:
    report, drawn = trace.report, lanes(trace)
    show_line(
        f"step {report.step} of attempt {report.attempt}: {size_text(report.raw_bytes)}, stored "
        f"{size_text(report.stored_bytes)} ({report.fidelity}"
        + (f", differences to step {report.base})" if report.base else ")")
    )
    show_line(
        f"training waited {_ms(stall_s(trace))}; durable {_ms(report.durable_s)} after the "
        f"boundary, {count_text(report.lag_steps, 'step')} later"
    )
    show_line()
    whole_s = max([report.durable_s, *(bar.stop_s for lane in drawn for bar in lane.bars)])
    whole_s = whole_s or 1e-6
    show_line(_axis(whole_s))
    for lane in drawn:
        _show_text(_lane_text(lane, whole_s))
    mark = min(_WIDTH - 1, round(_WIDTH * report.durable_s / whole_s))
    show_line(" " * (_NAME_WIDTH + mark) + "^ durable")
    kinds = [kind for kind in KINDS if any(b.kind == kind for lane in drawn for b in lane.bars)]
    show_line("; ".join(f"{'/'.join(dict.fromkeys(_SIGNS[k][0]))} {KINDS[k]}" for k in kinds))


def _axis(whole_s: float) -> str:
    """Times above the lanes, at round numbers."""
    row = [" "] * (_NAME_WIDTH + _WIDTH + 8)
    row[:_NAME_WIDTH] = "ms".ljust(_NAME_WIDTH)
    for at_s in ticks(whole_s):
        start = _NAME_WIDTH + round(_WIDTH * at_s / whole_s)
        text = f"|{1000 * at_s:g}"
        row[start : start + len(text)] = text
    return "".join(row).rstrip()


def ticks(whole_s: float) -> list[float]:
    """Round times from 0 up to a length, about half a dozen."""
    rough_s = whole_s / _TICKS
    size = 10.0 ** math.floor(math.log10(rough_s))
    step_s = next(m * size for m in (1.0, 2.0, 5.0, 10.0) if m * size >= rough_s)
    return [i * step_s for i in range(int(whole_s / step_s) + 1)]


def _lane_text(lane: Lane, whole_s: float) -> Text:
    cells, styles = [" "] * _WIDTH, [""] * _WIDTH
    for i, bar in enumerate(lane.bars):
        signs, style = _SIGNS[bar.kind]
        start = min(_WIDTH - 1, max(0, round(_WIDTH * bar.start_s / whole_s)))
        stop = min(_WIDTH, max(start + 1, round(_WIDTH * bar.stop_s / whole_s)))
        cells[start:stop] = signs[i % 2] * (stop - start)
        styles[start:stop] = [style] * (stop - start)
    text = Text(lane.name.ljust(_NAME_WIDTH))
    for cell, style in zip(cells, styles, strict=True):
        text.append(cell, style)
    return text


def _show_text(text: Text) -> None:
    if sys.stdout is None or not sys.stdout.isatty():
        show_line(text.plain.rstrip())
        return
    console = Console()
    with console.capture() as captured:
        console.print(text, no_wrap=True, crop=False)
    show_line(captured.get().rstrip("\n"))


class _Partition(NamedTuple):
    """What was planned for a window, and what came of it; -1 is the time at the fence."""

    window: int
    phase: str
    duration_s: float
    collective_s: float
    planned_bytes: int
    planned_s: float
    copied_bytes: int
    copied_s: float


def _partitions(trace: Trace) -> Iterator[_Partition]:
    plan = None if trace.decision is None else trace.decision.plan
    planned, rate = () if plan is None else plan.windows, trace.copy_bytes_per_s
    seen = {part.window for part in trace.parts}
    count = max([len(planned), *(window + 1 for window in seen)])
    for i in (*range(count), *((-1,) if -1 in seen else ())):
        known = 0 <= i < len(planned)
        nbytes = plan.sizes[i] if plan is not None and known else 0
        parts = [part for part in trace.parts if part.window == i]
        came = trace.opened[i].phase if 0 <= i < len(trace.opened) else "fence"
        yield _Partition(
            window=i,
            phase=planned[i].phase if known else came,
            duration_s=planned[i].duration_s if known else 0.0,
            collective_s=planned[i].collective_s if known else 0.0,
            planned_bytes=nbytes,
            planned_s=nbytes / rate if rate else 0.0,
            copied_bytes=sum(part.nbytes for part in parts),
            copied_s=sum(part.stop_s - part.start_s for part in parts),
        )


def _print_partitions(trace: Trace) -> None:
    found = list(_partitions(trace))
    if not found:
        return
    show_line(f"\npartitions of {size_text(trace.lazy_bytes)}, copied behind the training")
    rows = [
        [
            "-" if one.window < 0 else str(one.window),
            one.phase,
            *(f"{1000 * s:.1f}" for s in (one.duration_s, one.collective_s)),
            size_text(one.planned_bytes),
            f"{1000 * one.planned_s:.1f}",
            size_text(one.copied_bytes),
            f"{1000 * one.copied_s:.1f}",
        ]
        for one in found
    ]
    sums = [sum(values) for values in zip(*(one[2:] for one in found), strict=True)]
    texts = [size_text(int(s)) if i in (2, 4) else f"{1000 * s:.1f}" for i, s in enumerate(sums)]
    columns = (
        *(">win", ">pass", ">lasts ms", ">busy ms"),
        *(">planned", ">needs ms", ">copied", ">in ms"),
    )
    show_line(table_text(columns, [*rows, ["all", "", *texts]]))


def _print_choices(trace: Trace) -> None:
    if not trace.report.groups:
        return
    show_line("\nwhat became of each kind of leaf")
    rows = [
        [
            plain(group.group),
            plain(group.label),
            size_text(group.raw_bytes),
            size_text(group.stored_bytes),
            f"{group.stored_bytes / max(1, group.raw_bytes):.3f}",
            f"{1000 * group.cpu_s:.1f}",
        ]
        for group in trace.report.groups
    ]
    columns = ("leaves", "codec", ">raw", ">stored", ">ratio", ">CPU ms")
    show_line(table_text(columns, rows))


def _print_batches(trace: Trace) -> None:
    batches, report = trace.of(Stage.WRITE), trace.report
    if not batches:
        return
    nbytes = sum(batch.nbytes for batch in batches)
    show_line(
        f"\nbatches: {len(batches)}, {size_text(nbytes)}; the store took {_ms(report.write_s)} for "
        f"them, sync included; encoding and hashing {_ms(report.encode_s)}"
    )
    rows = [
        [
            str(i),
            f"{1000 * batch.start_s:.1f}",
            f"{1000 * batch.duration_s:.1f}",
            size_text(batch.nbytes),
            f"{batch.nbytes / max(batch.duration_s, 1e-9) / 1e6:.0f}",
        ]
        for i, batch in enumerate(batches)
    ]
    columns = (">batch", ">starts at ms", ">takes ms", ">bytes", ">MB/s")
    shown = sorted(sorted(rows, key=lambda row: -float(row[2]))[:_BATCH_ROWS], key=_first)
    show_line(table_text(columns, shown))
    if len(rows) > len(shown):
        show_line(f"and {len(rows) - len(shown)} that took less; --json has all of them")


def _first(row: Sequence[str]) -> int:
    return int(row[0])


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"


# --- plan -------------------------------------------------------------------


@app.command()
@reported
def plan(trace: TraceFile, step: Step = None, as_json: Json = False) -> None:
    """Compare partitioners on the windows of one step, as they were measured.

    What each of them would copy in which window, and by the model how long the update would wait
    and by how much the step would get longer. '*' marks the one that was used.
    """
    found = choose_step(trace, step)
    others = alternatives(found)
    if as_json:
        print_json(trace=str(trace), **_compared(found, others))
    elif not others:
        why = "nothing was planned" if found.decision is None else "nothing was measured yet"
        show_line(
            f"step {found.step} of attempt {found.report.attempt}: {why} when its copy began, so "
            f"there is nothing to compare: choose a later step of a run with a partitioner and "
            f"leaves from 64 KiB up"
        )
    else:
        _print_plans(found, others)


def _compared(trace: Trace, found: Sequence[Alternative]) -> dict[str, Any]:
    return {
        "step": trace.step,
        "attempt": trace.report.attempt,
        "lazy_bytes": trace.lazy_bytes,
        "copy_bytes_per_s": trace.copy_bytes_per_s,
        "windows": [asdict(w) for one in found[:1] for w in one.decision.plan.windows],
        "partitioners": {
            one.name: {
                "used": one.used,
                "sizes": one.decision.plan.sizes,
                "gate": asdict(one.decision.gate),
                "why": one.decision.why,
                "gain_s": one.decision.gain_s,
                "copy_end_s": one.prediction.copy_end_s,
                "stall_s": one.prediction.stall_s,
                "slowdown_s": one.prediction.slowdown_s,
                "window_bytes": one.prediction.window_bytes,
            }
            for one in found
        },
    }


def _print_plans(trace: Trace, found: Sequence[Alternative]) -> None:
    measured, rate = found[0].decision.plan.windows, trace.copy_bytes_per_s
    show_line(
        f"step {trace.step} of attempt {trace.report.attempt}: {size_text(trace.lazy_bytes)} at "
        f"{rate / 1e9:.2f} GB/s need {_ms(trace.lazy_bytes / rate)}; {len(measured)} windows last "
        f"{_ms(total_s(measured))}\n"
    )
    names = [plain(f"{'*' if one.used else ''}{one.name}") for one in found]
    # As narrow as can be: it has to fit a terminal of 80 columns.
    heads = [name.replace("idle-", "") for name in names]
    columns = (">window", ">ms", ">busy", *(f">{head}" for head in heads))
    sizes = [one.decision.plan.sizes for one in found]
    rows = [
        [
            f"{i} {window.phase}",
            *(f"{1000 * s:.1f}" for s in (window.duration_s, window.collective_s)),
            *(size_text(size[i]) for size in sizes),
        ]
        for i, window in enumerate(measured)
    ]
    for name, values in (
        ("copied ms", [one.prediction.copy_end_s for one in found]),
        ("stall ms", [one.prediction.stall_s for one in found]),
        ("slower ms", [one.prediction.slowdown_s for one in found]),
    ):
        rows.append([name, "", "", *(f"{1000 * value:.2f}" for value in values)])
    show_line(table_text(columns, rows))
    show_line()
    for name, one in zip(names, found, strict=True):
        held = "runs freely" if one.decision.gate.hold == "free" else "is held to the windows"
        show_line(f"{name}: the copy {held}; {plain(one.decision.why)}")
