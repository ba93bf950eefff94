"""The table of systems as ``docs/rivals.md`` shows it.

``python -m asymcheck_lab.rivals.page docs/rivals.md`` writes it there.
"""

from __future__ import annotations

import sys
from pathlib import Path

from asymcheck_lab.bench_report import write_into
from asymcheck_lab.rivals.table import RIVALS

BEGIN = "<!-- systems: written by asymcheck_lab.rivals.page -->"
END = "<!-- end of systems -->"


def render() -> str:
    """One row for each system; the same wherever it is made."""
    lines = [
        "| name | system | kind | writes | does not save | becomes durable | adapted |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, rival in RIVALS.items():
        kind = rival.kind + (f", not ranked: {rival.why_unranked}" if not rival.ranked else "")
        when = "" if rival.kind == "none" else "behind" if rival.is_async else "before it returns"
        cells = [f"`{name}`", rival.title, kind, when, rival.omits, rival.syncs, rival.adapted]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    write_into(Path(sys.argv[1]), render(), BEGIN, END)
