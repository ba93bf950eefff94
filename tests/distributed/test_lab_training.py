"""The lab's models on two ranks: they train alike however they are spread."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest

from asymcheck.testing.ranks import check_all, run_ranks
from asymcheck_lab.proof import different_entries, different_losses
from asymcheck_lab.record import read_log, read_result
from asymcheck_lab.train import TrainOptions, train

STEPS = 24

# As on one rank: the model, what is changed in its recipe, and how far the loss falls.
RUNS = {
    "gpt2": ({"accumulate": 2}, 1.0),
    "bert": ({}, 1.2),
    "roberta": ({"precision": "bf16"}, 0.3),
    "bloom": ({"workers": 2, "recompute": True}, 0.4),
    "resnet": ({}, 0.6),
    "vit": ({"precision": "fp16"}, 0.1),
}
SPREAD = ["ddp", "fsdp2"]


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory):
    """Tokenizers lie in a folder of the session."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def options(folder: Path, model: str, parallel: str, **changes) -> TrainOptions:
    given = {"size": "tiny", "steps": STEPS, "every": 8, "threads": 1, **RUNS[model][0], **changes}
    return TrainOptions(
        model=model,
        parallel=parallel,
        log=folder / "log.jsonl",
        result=folder / "result.json",
        **given,
    )


@pytest.mark.parametrize("model", RUNS)
def test_the_loss_falls_alike_under_ddp_and_fsdp2(tmp_path: Path, model: str):
    folders = {"ddp": "ddp", "fsdp2": "fsdp2", "again": "fsdp2"}

    def work(rank, say):
        for folder, parallel in folders.items():
            train(options(tmp_path / folder, model, parallel))

    check_all(run_ranks(2, work))
    logs = {name: read_log(tmp_path / name / "log.jsonl") for name in folders}
    found = {name: read_result(tmp_path / name / "result.json").fingerprint for name in folders}
    for name in SPREAD:
        losses = [r.loss for r in logs[name]]
        assert len(losses) == STEPS
        assert fmean(losses[-6:]) < fmean(losses[:4]) - RUNS[model][1]
    assert different_losses(logs["fsdp2"], logs["again"], range(1, STEPS + 1)) == []
    assert different_entries(found["fsdp2"], found["again"]) == []
    for one, other in zip(logs["ddp"], logs["fsdp2"], strict=True):
        assert one.loss == pytest.approx(other.loss, rel=0.02), one.step

    def ranks(name: str, piece: str) -> list[dict[str, str]]:
        return [
            {k: v for k, v in found[name].items() if k.startswith(f"rank{n}/{piece}")}
            for n in range(2)
        ]

    for piece, alike in (("model/", True), ("optim/", True), ("data/", True), ("rng/torch", False)):
        first, second = ([*mine.values()] for mine in ranks("ddp", piece))
        assert first
        assert (first == second) == alike, piece
    assert ranks("fsdp2", "model/")[0] != ranks("fsdp2", "model/")[1]
