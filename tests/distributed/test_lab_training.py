"""The lab's models on two ranks: they train alike however they are spread."""

from __future__ import annotations

import signal
import warnings
from pathlib import Path
from statistics import fmean

import pytest

from asymcheck.testing.ranks import check_all, run_ranks
from asymcheck_lab.proof import different_entries, different_losses
from asymcheck_lab.record import StepRecord, read_log, read_result
from asymcheck_lab.train import Silent, TrainOptions, train

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
QUICK = {("gpt2", "fsdp2"), ("vit", "ddp")}
ONCE = {("bert", "fsdp2"), ("roberta", "ddp"), ("bloom", "fsdp2"), ("resnet", "ddp")}


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory):
    """Tokenizers lie in a folder of the session."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def options(folder: Path, model: str, parallel: str, **changes) -> TrainOptions:
    if parallel == "zero3" and RUNS[model][0].get("precision") == "fp16":
        changes["precision"] = "bf16"  # DeepSpeed has no fp16 on a CPU
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
            {
                key: value
                for key, value in found[name].items()
                # Statistics of batches are a rank's own until the next forward pass.
                if key.startswith(f"rank{n}/{piece}") and "/running_" not in key.replace(".", "/")
            }
            for n in range(2)
        ]

    for piece, alike in (("model/", True), ("optim/", True), ("data/", True), ("rng/torch", False)):
        first, second = ([*mine.values()] for mine in ranks("ddp", piece))
        assert first
        assert (first == second) == alike, piece
    assert ranks("fsdp2", "model/")[0] != ranks("fsdp2", "model/")[1]


class SaysAndWaits(Silent):
    """After a step says that it is done, and goes no further."""

    def __init__(self, step: int, say) -> None:
        self._step, self._say = step, say

    def stepped(self, record: StepRecord) -> None:
        if record.step == self._step:
            self._say("now")
            signal.pause()


def marks_of(model: str, parallel: str) -> tuple[pytest.MarkDecorator, ...]:
    if (model, parallel) in QUICK:
        return ()
    is_soon = parallel == "zero3" or (model, parallel) in ONCE
    return (pytest.mark.extra if is_soon else pytest.mark.slow,)


@pytest.mark.crash
@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        # One of each kind at once; zero3 needs DeepSpeed, and all of them take minutes.
        pytest.param(m, p, marks=marks_of(m, p))
        for m in RUNS
        for p in [*SPREAD, "zero3"]
    ],
)
def test_a_rank_that_is_killed_in_a_save_changes_no_bit(tmp_path: Path, model: str, parallel: str):
    # Step 16 is saved behind step 17, after which rank 1 is killed: it is there, or is not.
    roots = {"whole": None, "cut": str(tmp_path / "checkpoints")}

    def run(name: str):
        def work(rank, say):
            if parallel == "zero3":  # DeepSpeed warns of much, in this process of its own
                warnings.simplefilter("ignore")
            observer = SaysAndWaits(17, say) if name == "killed" and rank == 1 else None
            place = "whole" if name == "whole" else "cut"
            train(options(tmp_path / place, model, parallel, root=roots[place]), observer)

        return work

    check_all(run_ranks(2, run("whole")))
    outcomes = run_ranks(2, run("killed"), kill={1: "now"})
    assert [bool(outcome.status) for outcome in outcomes] == [True, True]
    killed = read_log(tmp_path / "cut" / "log.jsonl")
    check_all(run_ranks(2, run("resumed")))

    whole = read_log(tmp_path / "whole" / "log.jsonl")
    later = read_log(tmp_path / "cut" / "log.jsonl")[len(killed) :]
    expected, found = (read_result(tmp_path / n / "result.json") for n in ("whole", "cut"))
    assert found.resumed_from in (8, 16)
    assert different_losses(whole, killed, range(1, 18)) == []
    assert different_losses(whole, later, range(found.resumed_from + 1, STEPS + 1)) == []
    assert different_entries(expected.fingerprint, found.fingerprint) == []
