"""What a soak came to, as Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asymcheck.rendering import count_text, size_text
from asymcheck_lab.record import measured_when

BEGIN, END = "<!-- soak: begin -->", "<!-- soak: end -->"


def render(record: Mapping[str, Any]) -> str:
    """The table of one soak."""
    machine, problems = record["machine"], record["problems"]
    failures = sorted(record["failures"].items(), key=lambda pair: (-pair[1], pair[0]))
    rows = [
        ("checkpoints", f"{record['checkpoints']}, of which {record['durable']} became durable"),
        ("failures", ", ".join(f"{count} {name}" for name, count in failures) or "none"),
        ("read back and compared", f"{record['restores']} times"),
        ("broken promises", str(len(problems))),
        (
            "memory",
            f"{size_text(record['rss_bytes'])} at most; the last quarter "
            f"{_grown(record['growth_bytes'])} the second",
        ),
        ("time", f"{record['seconds']:.0f} s"),
    ]
    lines = [
        f"{measured_when(record['session'], record['commit'])}, {machine['cpu']}, "
        f"{count_text(machine['cpus'], 'core')}, by `{record['command']}`.",
        "",
        "| | |",
        "| --- | --- |",
        *(f"| {name} | {text} |" for name, text in rows),
    ]
    if problems:
        lines += ["", "Broken promises:", "", *(f"* {problem}" for problem in problems)]
    return "\n".join(lines) + "\n"


def _grown(nbytes: int) -> str:
    if nbytes == 0:
        return "as"
    return f"{size_text(abs(nbytes))} {'above' if nbytes > 0 else 'below'}"
