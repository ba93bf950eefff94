"""Tables of a benchmark, for the terminal and for the page that keeps them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from asymcheck_lab.bench_stats import Estimate, Summary, summarize
from asymcheck_lab.errors import DataError, LabError
from asymcheck_lab.record import measured_when, median
from asymcheck_lab.rivals import NONE, RIVALS

BEGIN = "<!-- results: begin -->"
END = "<!-- results: end -->"

Cell = Callable[[Estimate], str]


def render(records: Sequence[Mapping[str, Any]]) -> str:
    """One session as Markdown.

    Args:
        records: Its runs.

    Raises:
        DataError: There is nothing to compare with.
    """
    try:
        summary = summarize(records)
    except ValueError as empty:
        raise DataError("benchmark", expected="runs to compare", found=str(empty)) from None
    parts = [
        _about(records, summary),
        _table(summary, "what training pays", _PAID),
        _table(summary, "what a checkpoint takes", _TAKEN),
        _targets(summary),
        _failures(summary),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def write_into(page: Path, text: str, begin: str = BEGIN, end: str = END) -> None:
    """Put ``text`` between the markers of a page, in the place of what was there.

    Raises:
        DataError: The page has no markers.
        LabError: It cannot be written.
    """
    try:
        old = page.read_text(encoding="utf-8")
        before, first, rest = old.partition(begin)
        _, last, after = rest.partition(end)
        if not first or not last:
            raise DataError(str(page), expected=f"the lines {begin} and {end}", found="none")
        temp = page.with_name(page.name + ".new")
        temp.write_text(f"{before}{begin}\n\n{text}\n{end}{after}", encoding="utf-8")
        temp.replace(page)
    except OSError as failure:
        raise LabError(f"{page}: {failure.strerror}") from failure


def _about(records: Sequence[Mapping[str, Any]], summary: Summary) -> str:
    first = records[0]
    machine, versions = first["machine"], first["versions"]
    good = next(r for r in records if not r.get("error"))
    per_run = len(good["checkpoints"])
    lines = [
        f"{measured_when(first['session'], first['commit'])}"
        + ("" if first["commit_is_clean"] else " with changes that were not committed")
        + f", with `{first['command']}`.",
        "",
        f"- Machine: {machine['cpu']}, {machine['cpus']} cores, of which {machine['cores_used']} "
        f"were used; {machine['memory_bytes'] / 2**30:.0f} GiB; {machine['file_system']}; Linux "
        f"{machine['kernel']}.",
        f"- Versions: {', '.join(f'{name} {version}' for name, version in versions.items())}.",
        f"- {first['rounds']} rounds, {first['steps']} counted steps and {per_run} counted "
        f"checkpoints a run; state of {_size(good['state_bytes'])}; a step without checkpoints "
        f"takes {summary.step_s.median:.2f} s.",
        f"- {_intervals(summary.step_s)}",
        f"- Its host took {100 * _steal(records):.1f} % of the machine's CPU time away during the "
        f"runs. Other programs, and the kernel, used {_others(records):.2f} cores during the runs "
        f"without checkpoints.",
    ]
    return "\n".join(lines)


def _intervals(step_s: Estimate) -> str:
    text = f"Medians over rounds; in brackets an interval that covers {100 * step_s.coverage:.1f} %"
    return text + (
        "." if step_s.coverage >= 0.95 else f", which is all that {step_s.count} rounds can give."
    )


def _steal(records: Sequence[Mapping[str, Any]]) -> float:
    good = [r for r in records if not r.get("error")]
    seconds = sum(r["whole_s"] for r in good) * good[0]["machine"]["cpus"]
    share: float = sum(r["steal_s"] for r in good) / seconds
    return share


def _others(records: Sequence[Mapping[str, Any]]) -> float:
    """Cores that were busy with something else; where it is much, the figures say little."""
    return median(
        (r["machine_cpu_s"] - r["training_cpu_s"] - r["background_cpu_s"]) / r["whole_s"]
        for r in records
        if r["system"] == NONE and not r.get("error")
    )


def _scaled(factor: float, form: str) -> Cell:
    """Median and interval, each value times ``factor``."""

    def cell(found: Estimate) -> str:
        middle, low, high = (
            format(factor * v, form) for v in (found.median, found.low, found.high)
        )
        return f"{middle} ({low} to {high})"

    return cell


def _plain(factor: float, form: str) -> Cell:
    return lambda found: format(factor * found.median, form)


_PAID: Sequence[tuple[str, str, Cell]] = (
    ("whole run, s", "whole_s", _plain(1, ".1f")),
    ("slower, %", "slowdown", _scaled(100, "+.1f")),
    ("slower per checkpoint, s", "slowdown_s", _scaled(1, "+.2f")),
    ("blocked per checkpoint, ms", "blocked_s", _scaled(1000, ".1f")),
    ("against torch.save + fsync", "stall_ratio", _plain(1, ".4f")),
    ("first checkpoint blocks, ms", "first_blocked_s", _plain(1000, ".0f")),
    ("κ", "kappa", _scaled(1, ".2f")),
)

_TAKEN: Sequence[tuple[str, str, Cell]] = (
    ("durable after, s", "durable_s", _scaled(1, ".2f")),
    ("CPU in the background, s", "background_s", _scaled(1, ".2f")),
    ("on the training thread, s", "training_s", _plain(1, "+.2f")),
    ("on the machine, s", "machine_s", _plain(1, "+.2f")),
    ("κ", "kappa", _plain(1, ".2f")),
    ("peak memory, GB", "peak_bytes", _plain(1e-9, "+.2f")),
    ("on disk, GB", "disk_bytes", _plain(1e-9, ".2f")),
)


def _table(summary: Summary, title: str, columns: Sequence[tuple[str, str, Cell]]) -> str:
    lines = [
        "| " + " | ".join([title, *(head for head, _, _ in columns)]) + " |",
        "| --- |" + " ---: |" * len(columns),
    ]
    for name, figures in summary.figures.items():
        cells = [cell(figures[figure]) if figure in figures else "–" for _, figure, cell in columns]
        if name != NONE or any(cell != "–" for cell in cells):
            lines.append("| " + " | ".join([RIVALS[name].title, *cells]) + " |")
    return "\n".join(lines)


def _targets(summary: Summary) -> str:
    if not summary.verdicts:
        return ""
    lines = ["| target | met | found |", "| --- | --- | --- |"]
    for verdict in summary.verdicts:
        met = "yes" if verdict.met else "**no**"
        lines.append(f"| {verdict.target} | {met} | {verdict.found} |")
    return "\n".join(lines)


def _failures(summary: Summary) -> str:
    lines = [
        f"- {RIVALS[system].title}, round {number}: `{error.splitlines()[-1][:200]}`"
        for system, number, error in summary.failures
    ]
    return "\n".join(["Runs that failed, and count nowhere above:", "", *lines]) if lines else ""


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.2f} MB"
