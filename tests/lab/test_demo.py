"""The demo as a user starts it: four real processes, one real SIGKILL."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from asymcheck import Checkpointer
from asymcheck.tracing import read_trace
from asymcheck_lab import demo
from asymcheck_lab.cli import app
from asymcheck_lab.errors import RunError
from asymcheck_lab.proof import different_entries, different_losses
from asymcheck_lab.record import read_log, read_result


def run_demo(folder: Path, *more: str):
    arguments = ["demo", "--dir", str(folder), "--size", "tiny", "--steps", "8", "--every", "2"]
    return CliRunner().invoke(app, [*arguments, "--kill-at", "4", *more], env={"COLUMNS": "200"})


@pytest.mark.crash
def test_a_training_killed_in_the_middle_of_a_save_resumes_bit_for_bit(tmp_path: Path):
    folder = tmp_path / "demo"
    result = run_demo(folder)
    assert result.exit_code == 0, result.output
    report = json.loads((folder / "report.json").read_text())
    assert report["equal"]
    assert len(report["checks"]) == 6
    assert (report["killed_at"], report["resumed_from"]) == (4, 4)

    # What the demo says, looked at once more without it.
    cut, whole = folder / "interrupted", folder / "uninterrupted"
    records = read_log(cut / "log.jsonl")
    restart = next(n for n, r in enumerate(records) if r.resumed_from)
    assert [r.step for r in records[restart:]] == [5, 6, 7, 8]
    assert different_losses(read_log(whole / "log.jsonl"), records[restart:], range(5, 9)) == []
    expected, found = (read_result(run / "result.json").fingerprint for run in (whole, cut))
    assert len(expected) > 100
    assert different_entries(expected, found) == []
    with Checkpointer(cut / "checkpoints", state={"x": {}}, read_only=True) as reader:
        assert reader.steps() == [4, 6, 8]

    assert [t.step for t in read_trace(whole / "trace.jsonl")] == [2, 4, 6, 8]
    assert [t.report.attempt for t in read_trace(cut / "trace.jsonl")] == [1, 2, 2]
    shown = result.stdout
    for row in (
        "stall per checkpoint",
        "slowdown against no checkpoints",
        "bytes per checkpoint",
        "restore",
        "resumed from step",
        "equal in every bit",
        "ended: signal 9",
        f"asymcheck ls {cut / 'checkpoints'}",
        f"asymcheck explain {whole / 'trace.jsonl'}",
    ):
        assert row in shown


def stand_in(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Let the demo start ``program`` in the place of each training."""
    popen = demo.subprocess.Popen

    def start(command: list[str], **options):
        return popen([sys.executable, "-c", program, *command], **options)

    monkeypatch.setattr(demo.subprocess, "Popen", start)


def test_a_training_that_fails_is_told_with_the_end_of_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    stand_in(monkeypatch, "import sys; print('out of luck'); sys.exit(3)")
    result = run_demo(tmp_path / "demo")
    assert result.exit_code == 1
    assert "training 'without checkpoints' ended with exit code 3" in result.stderr
    assert "out of luck" in result.stderr
    assert "Traceback" not in result.output


def test_a_training_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    stand_in(monkeypatch, "import time; time.sleep(60)")
    monkeypatch.setattr(demo, "_CHILD_LIMIT_S", 0.3)
    with pytest.raises(RunError, match="was still training after"):
        demo.gather(demo.DemoOptions(folder=tmp_path / "demo"), demo.Progress())


def test_a_wrong_kill_and_a_foreign_folder_are_usage_errors(tmp_path: Path):
    result = run_demo(tmp_path / "demo", "--kill-at", "5")
    assert result.exit_code == 2
    assert "kill-at: expected a multiple of every=2" in result.stderr
    assert not (tmp_path / "demo").exists()
    (tmp_path / "notes.txt").write_text("mine")
    result = run_demo(tmp_path)
    assert result.exit_code == 2
    assert "found 'notes.txt': nothing was removed" in result.stderr
