"""All six models at tiny: they learn, and a kill in the middle of a save changes no bit."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import fmean

import pytest

from asymcheck.memory.process import ProcessId
from asymcheck.testing.children import Child
from asymcheck_lab.killer import Killer, stopping_url
from asymcheck_lab.proof import different_entries, different_losses
from asymcheck_lab.record import StepRecord, read_log
from asymcheck_lab.train import TrainOptions, train

STEPS, EVERY, KILL_AT = 32, 8, 16
LIMIT_S = 120.0

# The model, what is changed in its recipe, and how far the mean loss of the last ten steps
# must lie below that of the first five.
RUNS = [
    ("gpt2", {"accumulate": 2}, 1.5),
    ("bert", {}, 1.5),
    ("bert", {"task": "masked-lm"}, 0.4),
    ("roberta", {"precision": "bf16"}, 0.4),
    ("bloom", {"workers": 2, "recompute": True}, 0.6),
    ("resnet", {}, 0.8),
    ("vit", {"precision": "fp16"}, 0.2),
]


def options(folder: Path, model: str, changes: dict, **more) -> TrainOptions:
    given = {"size": "tiny", "steps": STEPS, "every": EVERY, "threads": 1}
    return TrainOptions(model=model, log=folder / "log.jsonl", **{**given, **changes, **more})


def killed_in_a_save(folder: Path, model: str, changes: dict) -> list[StepRecord]:
    """The steps of a training that was killed while the checkpoint of ``KILL_AT`` was written."""
    killer = Killer()
    killed = options(folder, model, changes, root=stopping_url(folder / "checkpoints", KILL_AT))
    # A fork: what a process of its own imports first would take longer than all its steps.
    child = Child(lambda _: train(killed))
    until_s = time.monotonic() + LIMIT_S
    while ProcessId.of(child.pid).is_alive and time.monotonic() < until_s:
        killer.look(child.pid)
        time.sleep(0.02)
    child.kill()
    outcome = child.wait()
    assert outcome.was_killed, outcome.error
    assert (killer.trainer, len(killer.persisters)) == (child.pid, 2)
    return read_log(folder / "log.jsonl")


@pytest.mark.crash
@pytest.mark.parametrize(
    ("model", "changes", "margin"), RUNS, ids=["-".join([m, *map(str, c)]) for m, c, _ in RUNS]
)
def test_the_loss_falls_and_a_kill_in_a_save_changes_no_bit(
    tmp_path: Path, model: str, changes: dict, margin: float
):
    whole = train(options(tmp_path / "whole", model, changes, root=None))
    records = read_log(tmp_path / "whole" / "log.jsonl")
    losses = [r.loss for r in records]
    assert fmean(losses[-10:]) < fmean(losses[:5]) - margin

    cut = tmp_path / "cut"
    cut.mkdir()
    killed = killed_in_a_save(cut, model, changes)
    resumed = train(options(cut, model, changes, root=str(cut / "checkpoints")))
    later = read_log(cut / "log.jsonl")[len(killed) :]
    assert resumed.resumed_from == KILL_AT
    assert [r.step for r in later] == list(range(KILL_AT + 1, STEPS + 1))
    assert different_losses(records, killed, range(1, killed[-1].step + 1)) == []
    assert different_losses(records, later, range(KILL_AT + 1, STEPS + 1)) == []
    assert different_entries(whole.fingerprint, resumed.fingerprint) == []
    assert whole.scores == resumed.scores

    names = whole.fingerprint.keys()
    expected = {"rng/python", "rng/numpy", "rng/torch", "data/position", "sched/last_epoch"}
    expected |= {"scaler/scale"} if changes.get("precision") == "fp16" else set()
    assert expected <= names
    if model == "resnet":
        assert any(name.endswith("running_var") for name in names)
        assert any(name.endswith("num_batches_tracked") for name in names)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("model", "size"), [("gpt2", "base"), ("bert", "base"), ("vit", "base"), ("resnet", "152")]
)
def test_the_published_base_sizes_run_ten_steps_with_two_checkpoints(
    tmp_path: Path, model: str, size: str
):
    changes = {"size": size, "steps": 10, "every": 5, "root": str(tmp_path / "checkpoints")}
    result = train(options(tmp_path, model, changes))
    assert [c.step for c in result.checkpoints] == [5, 10]
    assert result.scores.keys() == {"loss", "accuracy"}
    assert len(read_log(tmp_path / "log.jsonl")) == 10
