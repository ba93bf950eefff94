"""The recipe: it learns, and an interrupted run is the uninterrupted one, bit for bit."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch

import asymcheck_lab.presets
import asymcheck_lab.recipe
import asymcheck_lab.train
from asymcheck import Checkpointer, IncompatibleCheckpoint
from asymcheck_lab.errors import DataError, LabError, RunError, UsageError
from asymcheck_lab.fingerprint import fingerprint
from asymcheck_lab.proof import different_entries, different_losses
from asymcheck_lab.record import Result, StepRecord, read_log, read_result
from asymcheck_lab.train import Silent, TrainOptions, train

STEPS = 12


class Cut(Exception):
    """What a test interrupts a training with."""


class CutAt(Silent):
    def __init__(self, step: int) -> None:
        self._step = step

    def stepped(self, record: StepRecord) -> None:
        if record.step == self._step:
            raise Cut


def options(folder: Path, **changes) -> TrainOptions:
    given = {
        "size": "tiny",
        "steps": STEPS,
        "every": 4,
        "root": str(folder / "checkpoints"),
        "log": folder / "log.jsonl",
        "threads": 1,
    }
    return TrainOptions(**{**given, **changes})


def run(folder: Path, **changes) -> tuple[list[StepRecord], Result]:
    result = train(options(folder, **changes))
    return read_log(folder / "log.jsonl"), result


def cut_and_resumed(folder: Path, cut: int = 10) -> tuple[list[StepRecord], Result]:
    with pytest.raises(Cut):
        train(options(folder), CutAt(cut))
    records, result = run(folder)
    return records[cut:], result


def test_the_loss_on_the_text_falls_by_more_than_one_nat_in_sixty_steps(tmp_path: Path):
    records, _ = run(tmp_path, steps=60, root=None)
    losses = [r.loss for r in records]
    assert losses[0] == pytest.approx(np.log(256), abs=0.1)
    assert fmean(losses[-10:]) < fmean(losses[:5]) - 1.0


@pytest.mark.parametrize("strategy", ["asymcheck", "naive"])
def test_an_interrupted_run_is_bit_for_bit_the_uninterrupted_one(tmp_path: Path, strategy: str):
    whole, expected = run(tmp_path / "whole", strategy=strategy)
    resumed, found = cut_and_resumed(tmp_path / "cut")
    assert found.resumed_from == 8
    assert [r.step for r in resumed] == [9, 10, 11, 12]
    assert different_losses(whole, resumed, range(9, STEPS + 1)) == []
    assert different_entries(expected.fingerprint, found.fingerprint) == []
    assert {"rng/python", "rng/numpy", "rng/torch", "data/position"} <= expected.fingerprint.keys()
    assert any(name.endswith("/exp_avg_sq") for name in expected.fingerprint)


def test_saving_leaves_no_trace_in_the_training(tmp_path: Path):
    plain, expected = run(tmp_path / "plain", root=None)
    saved, found = run(tmp_path / "saved", every=1)
    assert different_losses(plain, saved, range(1, STEPS + 1)) == []
    assert different_entries(expected.fingerprint, found.fingerprint) == []
    assert len(found.checkpoints) == STEPS
    assert expected.checkpoints == ()


def test_a_longer_run_goes_on_as_if_it_always_was(tmp_path: Path):
    whole, expected = run(tmp_path / "whole")
    run(tmp_path / "grown", steps=7)
    grown, found = run(tmp_path / "grown")
    assert found.resumed_from == 7, "the last step is saved though 7 is no multiple of 4"
    assert different_losses(whole, grown, range(1, STEPS + 1)) == []
    assert different_entries(expected.fingerprint, found.fingerprint) == []


def test_a_finished_run_has_nothing_to_do_and_the_same_final_state(tmp_path: Path):
    _, expected = run(tmp_path)
    records, found = run(tmp_path)
    assert len(records) == STEPS
    assert found.resumed_from == STEPS
    assert found.checkpoints == ()
    assert different_entries(expected.fingerprint, found.fingerprint) == []


def test_a_run_that_went_further_than_asked_for_is_refused(tmp_path: Path):
    run(tmp_path)
    with pytest.raises(UsageError, match="steps: expected at least 12"):
        run(tmp_path, steps=5)


def change_weight(state: Mapping[str, object]) -> None:
    list(state["model"].parameters())[-1].data.view(-1)[0] *= 1.001


def change_moment(state: Mapping[str, object]) -> None:
    next(iter(state["optim"].state.values()))["exp_avg_sq"] *= 1.5


def change_warmup(state: Mapping[str, object]) -> None:
    state["sched"].last_epoch -= 1


@pytest.mark.parametrize(
    ("tamper", "named"),
    [
        (change_weight, "model/"),
        (change_moment, "/exp_avg_sq"),
        (change_warmup, "sched/last_epoch"),
        (lambda state: next(state["data"]), "data/position"),
        (lambda state: random.seed(7), "rng/python"),
        (lambda state: np.random.random(), "rng/numpy"),
        (lambda state: torch.rand(1), "rng/torch"),
    ],
    ids=["weight", "moment", "scheduler", "data", "python", "numpy", "torch"],
)
def test_the_proof_names_what_a_restore_brings_back_wrong(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tamper: Callable[[Mapping[str, object]], object],
    named: str,
):
    class Wrong(Checkpointer):
        def __init__(self, root: str, *, state: Mapping[str, object], **rest) -> None:
            super().__init__(root, state=state, **rest)
            self._given = state

        def restore(self) -> int:
            step = super().restore()
            if step:
                tamper(self._given)
            return step

    whole, expected = run(tmp_path / "whole")
    monkeypatch.setattr(asymcheck_lab.train, "Checkpointer", Wrong)
    resumed, found = cut_and_resumed(tmp_path / "cut")
    entries = different_entries(expected.fingerprint, found.fingerprint)
    assert any(named in entry for entry in entries)
    if tamper is not change_warmup:  # over since step 5, so the losses are right
        assert different_losses(whole, resumed, range(9, STEPS + 1))


def test_each_piece_of_state_has_a_fingerprint_of_its_own():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model.register_buffer("hidden", torch.zeros(1), persistent=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(3, 2)).sum().backward()
    optimizer.step()
    before = fingerprint(model, optimizer, {"data": {"position": 1}})
    assert before == fingerprint(model, optimizer, {"data": {"position": 1}})
    assert {"model/1.running_mean", "model/hidden", "optim/0.bias/momentum_buffer"} <= before.keys()
    model.hidden += 1
    optimizer.param_groups[0]["lr"] = 0.1 + 1e-16 * 2
    after = fingerprint(model, optimizer, {"data": {"position": 2}})
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"model/hidden", "optim/group0/lr", "data/position"}


def test_the_fingerprint_tells_apart_equal_bytes_of_another_dtype_or_shape():
    def of(value: torch.Tensor) -> str:
        model = torch.nn.Module()
        model.register_buffer("b", value)
        unused = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        return fingerprint(model, unused, {})["model/b"]

    zeros = torch.zeros(4)
    assert len({of(zeros), of(zeros.int()), of(zeros.view(2, 2)), of(-zeros)}) == 4
    assert of(torch.arange(4.0).view(2, 2).T) == of(torch.tensor([[0.0, 2.0], [1.0, 3.0]]))


def test_no_request_leaves_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    records, _ = run(tmp_path, steps=2)
    assert len(records) == 2


def test_a_loss_that_is_no_number_ends_the_run_and_earlier_checkpoints_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run(tmp_path, steps=8)
    vary = asymcheck_lab.recipe.vary

    def spoil(*given) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, labels = vary(*given)
        return inputs, torch.full_like(labels, -100)  # nothing counts: 0 / 0

    monkeypatch.setattr(asymcheck_lab.recipe, "vary", spoil)
    with pytest.raises(RunError, match="step 9: the loss is nan"):
        run(tmp_path)
    monkeypatch.undo()
    assert run(tmp_path)[1].resumed_from == 8


def test_another_size_than_the_checkpoint_is_refused_by_key(tmp_path: Path):
    run(tmp_path, steps=4)
    tiny = Path(asymcheck_lab.presets.__file__).parent / "presets" / "gpt2" / "tiny.toml"
    wider = tmp_path / "wider.toml"
    wider.write_text(tiny.read_text().replace("n_embd = 32", "n_embd = 48"))
    with pytest.raises(IncompatibleCheckpoint, match="wte"):
        run(tmp_path, size=str(wider))


def test_another_text_than_the_checkpoint_is_refused(tmp_path: Path):
    run(tmp_path, steps=4)
    other = tmp_path / "other.txt"
    other.write_text("another text " * 100)
    with pytest.raises(Exception, match="part") as failure:
        run(tmp_path, data=other)
    assert isinstance(failure.value.__cause__, LabError)
    assert "this run was started with the data" in str(failure.value.__cause__)


def test_a_foreign_file_in_the_place_of_the_log_is_left_alone(tmp_path: Path):
    log = tmp_path / "log.jsonl"
    log.write_text("Dear diary\n")
    with pytest.raises(DataError, match=r"log.jsonl, line 1: expected a JSON object with step"):
        run(tmp_path)
    assert log.read_text() == "Dear diary\n"


def test_a_torn_last_line_of_the_log_is_left_out_and_replaced(tmp_path: Path):
    run(tmp_path, steps=4)
    log = tmp_path / "log.jsonl"
    with log.open("a") as file:
        file.write('{"step": 5, "lo')
    assert [r.step for r in read_log(log)] == [1, 2, 3, 4]
    records, _ = run(tmp_path, steps=6)
    assert [(r.step, r.resumed_from) for r in records[3:]] == [(4, 0), (5, 4), (6, 4)]


def test_the_result_reads_back_as_it_was_written(tmp_path: Path):
    _, result = run(tmp_path, result=tmp_path / "result.json")
    assert read_result(tmp_path / "result.json") == result
    assert [c.step for c in result.checkpoints] == [4, 8, 12]
    assert all(c.stall_s > 0 and c.stored_bytes > 100_000 for c in result.checkpoints)


def test_a_result_that_is_none_is_refused(tmp_path: Path):
    path = tmp_path / "result.json"
    with pytest.raises(DataError, match="expected the result of a run that came to its end"):
        read_result(path)
    path.write_text('{"steps": 3}')
    with pytest.raises(DataError, match="expected the result of a run that came to its end"):
        read_result(path)
