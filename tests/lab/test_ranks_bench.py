"""The comparison on several ranks: its runs and its tables, not its times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from asymcheck_lab.cli import app
from asymcheck_lab.errors import DataError, UsageError
from asymcheck_lab.ranks_bench import SpreadOptions, read_spread, render, run_spread
from asymcheck_lab.rivals.spread import SPREAD, why_not


def options(folder: Path, **changes: Any) -> SpreadOptions:
    small = {"size": "tiny", "rounds": 1, "steps": 4, "every": 4, "warmup": 1}
    places = {"folder": folder / "runs", "results": folder / "ranks.jsonl"}
    return SpreadOptions(**{**small, **places, **changes})


def run_of(system: str, parallel: str, number: int, whole_s: float, **more: Any) -> dict[str, Any]:
    machine = {"cpu": "CPU", "cpus": 2, "memory_bytes": 1 << 30, "file_system": "ext4"}
    measured = {
        "blocked_s": [0.01, 0.03],
        "durable_s": [1.0, 3.0],
        "restore_s": 0.5,
        "disk_bytes": 1_500_000_000,
        "differing": [],
    }
    return {
        "schema": 1,
        "session": "2026-01-02T03:04:05+00:00",
        "commit": "a" * 40,
        "command": "asymlab bench-ranks",
        "machine": machine,
        "rounds": 2,
        "steps": 8,
        "every": 4,
        "ranks": 2,
        "size": "124m",
        "round": number,
        "system": system,
        "parallel": parallel,
        "whole_s": whole_s,
        "state_bytes": 1_490_000_000,
        **(measured if system != "none" else {"blocked_s": [], "durable_s": [], "differing": []}),
        **more,
    }


@pytest.mark.parametrize("parallel", ["ddp", pytest.param("fsdp2", marks=pytest.mark.extra)])
def test_each_run_is_recorded_and_every_bit_comes_back(tmp_path: Path, parallel: str) -> None:
    chosen = options(tmp_path, parallel=(parallel,), systems=("asymcheck", "dcp-thread-stager"))
    said: list[str] = []
    records = run_spread(chosen, said.append)
    assert [r["system"] for r in records] == ["none", "dcp-thread-stager", "asymcheck"]
    assert read_spread(chosen.results) == json.loads(json.dumps(records))
    assert len(said) == 3
    for record in records:
        assert "error" not in record, record
        assert record["differing"] == []
        count = 0 if record["system"] == "none" else 1
        assert len(record["durable_s"]) == count
        assert len(record["blocked_s"]) == 1
        assert (record.get("disk_bytes", 0) > record["state_bytes"] / 2) == bool(count)
    assert list((tmp_path / "runs").iterdir()) == []
    table = render(records)
    assert f"### {parallel}, gpt2 tiny" in table
    assert "| asymcheck |" in table
    assert "| yes |" in table


@pytest.mark.extra
def test_under_zero3_the_engine_saves_too_and_dcp_says_why_it_does_not(tmp_path: Path) -> None:
    chosen = options(
        tmp_path, parallel=("zero3",), systems=("asymcheck", "deepspeed", "dcp"), rounds=1
    )
    records = {r["system"]: r for r in run_spread(chosen, lambda line: None)}
    for system in ("none", "asymcheck", "deepspeed"):
        assert "error" not in records[system], records[system]
        assert records[system]["differing"] == []
    assert "placeholders" in records["dcp"]["absent"]
    assert "DCP save: not here: its parameters are placeholders" in render([*records.values()])


def test_a_run_that_fails_is_recorded_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(job: object) -> Any:
        raise OSError("no room")

    from dataclasses import replace

    from asymcheck_lab import ranks_run

    changed = {**SPREAD, "asymcheck": replace(SPREAD["asymcheck"], make=broken)}
    monkeypatch.setattr(ranks_run, "SPREAD", changed)
    chosen = options(tmp_path, parallel=("ddp",), systems=("asymcheck", "dcp"))
    records = {r["system"]: r for r in run_spread(chosen, lambda line: None)}
    assert records["asymcheck"]["error"] == "OSError: no room"
    assert records["dcp"]["differing"] == []
    assert "asymcheck: failed: OSError: no room." in render([*records.values()])


def test_aims_are_said_to_be_reached_or_missed() -> None:
    fast = [
        *(run_of("none", "ddp", n, 10.0) for n in (1, 2)),
        *(run_of("asymcheck", "ddp", n, 10.2, blocked_s=[0.001, 0.001]) for n in (1, 2)),
        *(run_of("dcp-thread", "ddp", n, 12.0) for n in (1, 2)),
    ]
    text = render(fast)
    assert "| asymcheck | +2.0 (+2.0 to +2.0) | 1.00 (1.00 to 1.00) | 2.00 (2.00 to 2.00)" in text
    assert text.count("- Reached:") == 3
    slow = [
        *(run_of("none", "ddp", n, 10.0) for n in (1, 2)),
        *(run_of("asymcheck", "ddp", n, 15.0, restore_s=2.0) for n in (1, 2)),
        *(run_of("dcp-thread", "ddp", n, 12.0) for n in (1, 2)),
    ]
    assert render(slow).count("- **Missed**:") == 3


def test_only_the_newest_session_is_shown_and_what_differs_is_named() -> None:
    old = run_of("dcp", "ddp", 1, 9.0, session="2025-01-02T03:04:05+00:00")
    new = [run_of("none", "fsdp2", 1, 10.0), run_of("dcp", "fsdp2", 1, 11.0, differing=["a", "b"])]
    text = render([old, *new])
    assert "### ddp" not in text
    assert "| not: a, b |" in text


def test_what_cannot_be_compared_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="dcp"):
        options(tmp_path, systems=("dpc",))
    with pytest.raises(UsageError, match="parallel"):
        options(tmp_path, parallel=("none",))
    with pytest.raises(UsageError, match="rounds: expected at least 1, found 0"):
        options(tmp_path, rounds=0)
    with pytest.raises(UsageError, match="every"):
        options(tmp_path, warmup=9)
    with pytest.raises(UsageError, match="steps"):
        options(tmp_path, steps=2)
    with pytest.raises(DataError, match="runs to compare"):
        render([])
    wrong = tmp_path / "ranks.jsonl"
    wrong.write_text('{"schema": 9}\n')
    with pytest.raises(DataError, match="line 1"):
        read_spread(wrong)
    assert read_spread(tmp_path / "none.jsonl") == []


def test_systems_say_what_they_cannot_save() -> None:
    assert why_not("deepspeed", "ddp") == "it saves only what it trains"
    assert why_not("dcp", "fsdp2") == ""


def test_the_command_shows_what_was_recorded(tmp_path: Path) -> None:
    results, page = tmp_path / "ranks.jsonl", tmp_path / "page.md"
    runs = [run_of("none", "ddp", 1, 10.0), run_of("asymcheck", "ddp", 1, 10.5)]
    results.write_text("".join(json.dumps(r) + "\n" for r in runs))
    page.write_text("<!-- results: begin -->\n<!-- results: end -->\n")
    told = CliRunner().invoke(
        app, ["bench-ranks", "--report", "--results", str(results), "--docs", str(page)]
    )
    assert told.exit_code == 0, told.output
    assert "| asymcheck | +5.0" in page.read_text()
