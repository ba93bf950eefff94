"""The section of the page of results that shows which failures were tried."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asymcheck_lab.chaos_report import (
    HEADINGS,
    RESULTS,
    groups_of,
    read_chaos,
    strategies_of,
    summary_of,
)
from asymcheck_lab.record import measured_when


def tried_failures(results: Sequence[Path]) -> dict[str, Any] | None:
    """What the template is given; ``None`` where no folder of results holds any.

    Raises:
        DataError: What is there is something else.
    """
    files = [path / RESULTS for path in results if path.is_dir()]
    files += [path for path in results if path.name == RESULTS]
    records = next((read_chaos(path) for path in files if path.is_file()), [])
    if not records:
        return None
    ran = [record for record in records if "not_run" not in record]
    first = records[0]
    return {
        "measured": measured_when(first["session"], first["commit"]).replace("`", ""),
        "command": first["command"],
        "summary": summary_of(records),
        "tables": [
            (HEADINGS, [(g.name, g.moment, *g.cells) for g in groups_of(records)]),
            (("strategy", *HEADINGS[2:]), [(g.name, *g.cells) for g in strategies_of(ran)]),
        ],
    }
