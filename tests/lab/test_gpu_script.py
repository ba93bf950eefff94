"""The GPU script where there is no GPU: its sections on the CPU, its budget, its words."""

from __future__ import annotations

from pathlib import Path
from time import monotonic

import pytest
import torch
from typer.testing import CliRunner

from asymcheck.testing.children import run_in_child
from asymcheck_lab import gpu_script, gpu_sections, gpu_systems
from asymcheck_lab.cli import app
from asymcheck_lab.errors import RunError
from asymcheck_lab.gpu_script import NOT_HERE, SECTIONS, Section, SectionSpec, render, run_gpu
from asymcheck_lab.gpu_sections import check, run_section
from asymcheck_lab.gpu_systems import ON_CPU, SIZES, SYSTEMS

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the sections are forks of this process
    yield
    torch.set_num_threads(before)


def tell_of(work):
    return run_in_child(work, timeout_s=120).check()


def test_without_a_device_it_says_so_and_that_is_no_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_script, "has_cuda", lambda: False)
    done = CliRunner().invoke(app, ["gpu", "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert done.output.strip() == NOT_HERE
    assert not (tmp_path / "out").exists()


def test_the_check_holds_every_checkpoint_to_the_state_of_its_boundary(tmp_path):
    told = tell_of(lambda say: check(CPU, tmp_path, say))
    assert len(told) == 3
    assert all(row["ok"] for row in told)


def test_the_check_finds_a_state_that_is_not_the_one_that_was_live(tmp_path, monkeypatch):
    calls = []
    true = gpu_sections.fingerprint

    def fingerprint(*arguments):
        calls.append(1)
        found = true(*arguments)
        if len(calls) == gpu_sections._CHECK_STEPS + 5:
            found["optim/off"] = "by a bit"
        return found

    monkeypatch.setattr(gpu_sections, "fingerprint", fingerprint)
    outcome = run_in_child(lambda say: check(CPU, tmp_path, say), timeout_s=120)
    assert outcome.status != 0
    assert "stream, step 5: 1 pieces differ, such as ['optim/off']" in outcome.error


def spec_for(name: str, folder: Path) -> SectionSpec:
    return SectionSpec(
        name=name, device="cpu", left_s=100.0, folder=str(folder), records="", session={}
    )


def test_a_model_is_measured_under_every_system_and_leaves_nothing_behind(tmp_path):
    until_s = monotonic() + 1000.0
    told = tell_of(lambda say: run_section(spec_for("tiny", tmp_path), until_s, say))
    assert [row["system"] for row in told] == ["no checkpoints", *ON_CPU]
    for row in told[1:]:
        assert "error" not in row, row
        assert row["durable_s"] > 0.0
        assert row["blocked_s"] > 0.0
        assert len(row["rows"]) == 3
    assert told[1]["copy_bytes_per_s"] > 0.0
    assert list(tmp_path.iterdir()) == []


def test_systems_that_time_is_too_short_for_are_named(tmp_path):
    told = tell_of(lambda say: run_section(spec_for("tiny", tmp_path), monotonic(), say))
    assert [row.get("skipped") for row in told] == [None, *["no time left"] * len(ON_CPU)]


def test_a_state_too_large_for_a_disk_is_captured_and_written_nowhere(tmp_path):
    told = tell_of(lambda say: run_section(spec_for("no-disk", tmp_path), 0.0, say))
    assert len(told) == 2
    assert all(row["copy_bytes_per_s"] > 0.0 for row in told)
    assert list(tmp_path.iterdir()) == []


def test_sections_are_processes_that_stop_in_time_and_a_failed_one_ends_nothing(tmp_path):
    sections = (
        Section("no-such-model", 1.0, 100.0),
        Section("no-disk", 1.0, 100.0),
        Section("tiny", 1e6, 1e6),
    )
    said: list[str] = []
    records = run_gpu(
        tmp_path / "out", said.append, budget_s=200.0, sections=sections, device="cpu"
    )
    assert "KeyError: 'no-such-model'" in records[0]["error"]
    assert [r["section"] for r in records] == ["no-such-model", "no-disk", "no-disk", "tiny"]
    assert records[-1]["skipped"] == "no time left"
    assert len(said) == 3
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["gpu.jsonl", "gpu.md"]
    page = (tmp_path / "out" / "gpu.md").read_text()
    assert page == render(records)
    assert "| tiny |  | no time left |" in page
    assert "| no-disk | asymcheck, no disk |" in page


def test_the_budget_is_within_eight_minutes_and_every_size_is_there():
    assert gpu_script.BUDGET_S < 480.0
    names = [section.name for section in SECTIONS]
    assert names[:2] == ["check", "link"]
    assert set(names[2:]) <= set(SIZES)
    assert all(section.least_s < section.most_s for section in SECTIONS)
    assert set(ON_CPU) <= set(SYSTEMS)


def test_an_older_checkpoint_is_removed_unless_the_library_keeps_it(tmp_path):
    (tmp_path / "step-00000001.pt").write_bytes(b"x")
    (tmp_path / "step-00000003.pt").write_bytes(b"x")
    for name in ("step-00000001", "step-00000002", "step-00000003"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000002" / ".metadata").write_bytes(b"x")  # one of DCP's
    (tmp_path / "step-00000003" / ".metadata").write_bytes(b"x")
    gpu_systems._remove_older(tmp_path, 3)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "step-00000001",
        "step-00000003",
        "step-00000003.pt",
    ]


def test_an_error_of_a_system_says_where_and_what():
    try:
        raise RunError("no room")
    except RunError as failure:
        text = gpu_script.failure_text(failure)
    assert text.endswith("RunError: no room")
    assert "test_gpu_script.py" in text
