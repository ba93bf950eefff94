"""Restores out of every tier are measured, and what they give is compared with what was saved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from asymcheck_lab.cli import app
from asymcheck_lab.errors import UsageError
from asymcheck_lab.tiers_bench import BEGIN, END, measure_tiers


def test_each_tier_has_its_row_and_its_records(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n{BEGIN}\n{END}\n")
    results = tmp_path / "tiers.jsonl"
    arguments = ["tiers", "--mib", "2", "--rounds", "1", "--tier", f"far=file://{tmp_path / 'far'}"]
    arguments += ["--dir", str(tmp_path / "dir"), "--results", str(results), "--docs", str(page)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    records = [json.loads(line) for line in results.read_text().splitlines()]
    names = [record["tier"] for record in records]
    assert names == ["root", "far", "shared memory", "shared memory, not hashed"]
    assert all(r["restored_bytes"] == 2 << 20 and r["restore_s"] > 0 for r in records)
    assert [f"| {name} |" in page.read_text() for name in names] == [True] * 4
    assert list((tmp_path / "dir").iterdir()) == []


@pytest.mark.parametrize(("mib", "rounds"), [(0, 1), (1, 0)])
def test_nothing_to_measure_is_refused(tmp_path: Path, mib: int, rounds: int) -> None:
    with pytest.raises(UsageError, match="expected at least 1, found 0"):
        measure_tiers(mib=mib, rounds=rounds, tiers=(), folder=tmp_path)
