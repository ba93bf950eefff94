"""The figures of the codecs: trained once, measured on every kind, one line each."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from asymcheck_lab import codec_figures
from asymcheck_lab.codec_figures import BFLOAT16, KINDS, states, write_figures
from asymcheck_lab.models import FAMILIES

TINY = FAMILIES["gpt2"].sizes["tiny"]


def test_every_kind_is_measured_and_the_training_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, into = tmp_path / "state", tmp_path / "rows.jsonl"
    rows = write_figures(folder, into, size=TINY, key_frame=2, repeats=1)
    assert [json.loads(line) for line in into.read_text("utf-8").splitlines()] == rows
    assert {row["kind"] for row in rows} == {*KINDS, BFLOAT16}
    assert {(row["label"], row["kind"]) for row in rows if row["label"].startswith("q")} == {
        ("q8-signed", "exp_avg"),
        ("q4-signed", "exp_avg"),
        ("q8-log", "exp_avg_sq"),
        ("q4-log", "exp_avg_sq"),
    }
    for row in rows:
        lossy = row["label"] == "topk" or row["label"].startswith("q")
        assert (row["gap"] > 0) == row["label"].startswith(("delta", "topk"))
        assert 0 < row["stored_bytes"] == pytest.approx(row["ratio"] * row["raw_bytes"])
        assert row["encode_gb_per_s"] > 0
        assert (row["max_error"] > 0) == lossy
        assert row["mean_error"] <= row["max_error"]
        assert row["refused"] == 0
    monkeypatch.delattr(codec_figures, "_train")  # what is there is not trained again
    kept = states(folder, TINY, 2)
    assert not np.array_equal(kept("parameters", 2), kept("parameters", 3))


def test_another_recipe_is_trained_anew(tmp_path: Path) -> None:
    first = states(tmp_path, TINY, 1)("exp_avg", 1).copy()
    states(tmp_path, TINY, 2)
    states(tmp_path, TINY, 1)
    assert (states(tmp_path, TINY, 1)("exp_avg", 1) == first).all()
    assert json.loads((tmp_path / "done.json").read_text("utf-8"))["key_frame"] == 1
