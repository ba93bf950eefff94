"""What packs cost a training on the same network: measured between two hosts, and its table."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from typer.testing import CliRunner

from asymcheck.testing.hosts import why_not
from asymcheck_lab.cli import app
from asymcheck_lab.errors import UsageError
from asymcheck_lab.pace_bench import BEGIN, END, PACES, measure_pace, render
from asymcheck_lab.pace_child import NOTHING


def record(pace: str, round: int, step_s: float, session: str = "2026-01-02") -> dict[str, Any]:
    return {
        "session": session,
        "commit": "0123456789abcdef",
        "command": "asymlab pace",
        "machine": {"cpu": "a processor"},
        "pace": pace,
        "round": round,
        "mbit_per_s": 400,
        "step_s": [step_s, 2 * step_s],
        "durable_s": [] if pace == NOTHING else [0.5],
        "stored_bytes": [] if pace == NOTHING else [2_000_000],
    }


def test_each_pace_is_held_against_the_training_alone_in_the_same_round() -> None:
    before = [record(pace, 1, 9.0, session="2026-01-01") for pace in PACES]
    shown = [record(NOTHING, 1, 0.1), record("none", 1, 0.15), record("idle", 1, 0.1)]
    shown += [record(NOTHING, 2, 0.2), record("none", 2, 0.3), record("idle", 2, 0.2)]
    rows = [line.split("|") for line in render([*before, *shown]).splitlines() if "`" in line]
    slower = {row[1].strip(): row[3].strip() for row in rows if len(row) > 3}
    assert slower["`pace=none`"].startswith("+50.0")
    assert slower["`pace=idle`"].startswith("+0.0")
    assert render([]) == ""


@pytest.mark.parametrize("wrong", [{"rounds": 0}, {"mbit_per_s": 0}])
def test_nothing_to_measure_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="expected at least 1, found 0"):
        measure_pace(**{"rounds": 1, "mbit_per_s": 400, **wrong})


@pytest.mark.extra
@pytest.mark.xdist_group("hosts")
@pytest.mark.timeout(300)
def test_two_hosts_train_and_save_over_a_slow_link(
    tmp_path: Path, not_run_here: Callable[[str], NoReturn]
) -> None:
    reason = why_not()
    if reason:
        not_run_here(reason)
    page, results = tmp_path / "page.md", tmp_path / "pace.jsonl"
    page.write_text(f"# Page\n{BEGIN}\n{END}\n")
    arguments = ["pace", "--rounds", "1", "--results", str(results), "--docs", str(page)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    records = [json.loads(line) for line in results.read_text().splitlines()]
    assert sorted(r["pace"] for r in records) == sorted(PACES)
    assert all(min(r["step_s"]) > 0 for r in records)
    assert [len(r["durable_s"]) > 0 for r in records] == [r["pace"] != NOTHING for r in records]
    assert "| `pace=idle` |" in page.read_text()
