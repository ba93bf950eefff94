"""The section of the page of results that shows which failures were tried."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asymcheck_lab.chaos_report import (
    HEADINGS,
    groups_of,
    read_chaos,
    results_of,
    strategies_of,
    summary_of,
)
from asymcheck_lab.record import measured_when


def tried_failures(results: Sequence[Path]) -> list[dict[str, Any]]:
    """What the template is given: the matrix, and what was tried under a supervisor.

    Raises:
        DataError: What is there is something else.
    """
    found = (_newest(results, results_of(supervised=supervised)) for supervised in (False, True))
    return [_shown(records) for records in found if records]


def _newest(results: Sequence[Path], name: str) -> list[dict[str, Any]]:
    files = [path / name for path in results if path.is_dir()]
    files += [path for path in results if path.name == name]
    return next((read_chaos(path) for path in files if path.is_file()), [])


def _shown(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    ran = [record for record in records if "not_run" not in record]
    first = records[0]
    return {
        "measured": measured_when(first["session"], first["commit"]).replace("`", ""),
        "command": first["command"],
        "summary": summary_of(records).replace("`", ""),
        "tables": [
            (HEADINGS, [(g.name, g.moment, *g.cells) for g in groups_of(records)]),
            (("strategy", *HEADINGS[2:]), [(g.name, *g.cells) for g in strategies_of(ran)]),
        ],
    }
