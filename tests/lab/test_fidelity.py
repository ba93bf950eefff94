"""Resume under each fidelity: small trainings, and the arithmetic of what is shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from asymcheck_lab import codec_figures, fidelity
from asymcheck_lab.bench import newest_session, read_records
from asymcheck_lab.cli import app
from asymcheck_lab.errors import RunError, UsageError
from asymcheck_lab.fidelity import CURVES, FidelityOptions, gaps, measure, moving_mean, plot, render
from asymcheck_lab.models import Size

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "fidelity.md"
SMALL = Size(
    context=16,
    batch=2,
    learning_rate=1e-3,
    warmup_steps=2,
    config={"n_layer": 1, "n_embd": 128, "n_head": 2},
)


def test_each_class_is_resumed_from_a_checkpoint_of_its_own():
    options = FidelityOptions(seeds=1, resume_at=4, steps=3, every=1, size=SMALL)
    rows = {row["curve"]: row for row in measure(options, lambda line: None)}
    assert list(rows) == ["exact", "exact, other noise", "moments", "aggressive", "excp"]
    assert {row["curve"]: row["fidelity"] for row in rows.values()} == {
        "exact": "exact",
        "exact, other noise": "exact",
        "moments": "moments",
        "aggressive": "aggressive",
        "excp": "excp",
    }
    assert rows["excp"]["labels"]["parameter float32"] == "excp-residual"
    assert rows["moments"]["labels"]["state/exp_avg float32"] == "q8-signed"
    assert rows["aggressive"]["labels"]["parameter float32"] == "topk"
    assert rows["aggressive"]["stored_bytes"] < rows["moments"]["stored_bytes"]
    losses = {curve: row["losses"] for curve, row in rows.items()}
    assert all(len(found) == 3 for found in losses.values())
    # Top-k keeps 1 % of what three steps changed, so it begins elsewhere.
    assert losses["aggressive"][0] != losses["exact"][0]
    assert losses["exact, other noise"] != losses["exact"]


def test_a_checkpoint_that_is_not_of_the_class_that_was_asked_for_is_found_out(monkeypatch):
    plain = fidelity.strategy_of
    monkeypatch.setattr(fidelity, "strategy_of", lambda name: plain("exact"))
    options = FidelityOptions(seeds=1, resume_at=4, steps=1, every=1, size=SMALL)
    with pytest.raises(RunError, match="fidelity 'moments': expected a checkpoint of that class"):
        list(measure(options, lambda line: None))


@pytest.mark.parametrize("resume_at", [205, 30, 210])
def test_a_resume_from_no_checkpoint_or_a_key_frame_is_refused(resume_at):
    with pytest.raises(UsageError, match="resume_at: expected a multiple of every=10"):
        FidelityOptions(resume_at=resume_at)
    done = CliRunner().invoke(app, ["fidelity", "--resume-at", str(resume_at)])
    assert done.exit_code == 2


def rows():
    """Two seeds of 60 updates; aggressive is worse by 1.0 and then by 0.25."""
    off = {
        "exact": [0.0] * 60,
        "moments": [0.0] * 60,
        "aggressive": [1.0] * 10 + [0.25] * 50,
        "excp": [0.5] * 60,
        "exact, other noise": [-0.5, 0.5] * 30,
    }
    session = {"session": "2026-01-02", "commit": "abc", "command": "asymlab fidelity"}
    return [
        {
            **session,
            "seed": seed,
            "curve": curve,
            "resume_at": 20,
            "losses": [2.0 + seed + x for x in off[curve]],
            "raw_bytes": 100,
            "stored_bytes": 10,
            "fidelity": "exact",
            "labels": {"other": "raw", "state/exp_avg float32": "q8-signed"},
        }
        for seed in (0, 1)
        for curve in CURVES
    ]


def test_curves_are_compared_with_the_exact_one_of_their_seed():
    found = {gap.curve: gap for gap in gaps(rows())}
    assert found["exact"].first == found["exact"].worst == found["exact"].last == 0.0
    worse = found["aggressive"]
    assert (worse.first, worse.worst, worse.last) == (1.0, 1.0, 0.25)
    assert found["exact, other noise"].last == 0.0
    assert worse.stored == 0.1
    assert worse.labels == "exp_avg `q8-signed`"
    assert moving_mean([1.0, 2.0, 6.0], 2) == [1.5, 4.0]
    assert moving_mean([1.0, 2.0], 10) == [1.5]


def test_the_table_and_the_plot_show_every_curve(tmp_path):
    text = render(rows(), "images/x.png")
    assert "| aggressive | 0.10 | exp_avg `q8-signed` | +1.0000 | +1.0000 | +0.2500 |" in text
    assert "| exact | 0.10 | exp_avg `q8-signed` | 0 | 0 | 0 |" in text
    assert "![Loss after a resume](images/x.png)" in text
    plot(rows(), tmp_path / "images" / "x.png")
    assert (tmp_path / "images" / "x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "file", "known", "show"),
    [
        (
            "resume quality",
            "fidelity.jsonl",
            "losses",
            lambda records: render(records, "images/fidelity-resume.png"),
        ),
        ("codec figures", "codecs.jsonl", "label", codec_figures.render),
    ],
)
def test_the_figures_on_the_page_are_those_of_the_published_records(name, file, known, show):
    shown = PAGE.read_text().partition(f"<!-- {name}: begin -->")[2]
    shown = shown.partition(f"<!-- {name}: end -->")[0].strip()
    records = newest_session(read_records(ROOT / "results" / file, lambda r: bool(r[known])))
    assert shown == show(records).strip()
