"""The recipe: precision, accumulation, clipping, recomputation, evaluation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from asymcheck_lab.errors import UsageError
from asymcheck_lab.fingerprint import fingerprint
from asymcheck_lab.loading import Sample
from asymcheck_lab.presets import TASKS, Preset, load_preset
from asymcheck_lab.recipe import Recipe, check_precision, seed_everything
from asymcheck_lab.record import read_log
from asymcheck_lab.tasks import Data, open_data
from asymcheck_lab.train import TrainOptions, train


def recipe_of(model: str, folder: Path, *, config: dict | None = None, **changes) -> Recipe:
    preset = load_preset(model, "tiny")
    preset = replace(
        preset,
        config={**preset.config, **(config or {})},
        recipe=replace(preset.recipe, **changes),
    )
    data = open_data(preset, TASKS[model][0], cache=folder)
    seed_everything(0)
    return Recipe(preset, TASKS[model][0], data)


def gradients(recipe: Recipe) -> list[torch.Tensor]:
    recipe.forward()
    return [p.grad.clone() for p in recipe.model.parameters() if p.grad is not None]


NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}


def test_two_batches_of_four_give_the_gradients_of_one_of_eight(tmp_path: Path):
    whole = recipe_of("gpt2", tmp_path, config=NO_DROPOUT, noise=0.0)
    halves = recipe_of("gpt2", tmp_path, config=NO_DROPOUT, noise=0.0, batch=4, accumulate=2)
    for a, b in zip(gradients(whole), gradients(halves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("model", ["gpt2", "bert", "roberta", "bloom", "vit"])
def test_recomputed_activations_give_the_same_gradients_with_dropout(model: str, tmp_path: Path):
    plain, again = (recipe_of(model, tmp_path, recompute=flag) for flag in (False, True))
    seed_everything(1)
    expected = gradients(plain)
    seed_everything(1)
    found = gradients(again)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_gradients_are_clipped_to_their_norm(tmp_path: Path):
    recipe = recipe_of("gpt2", tmp_path, clip_norm=1e-3)
    norms = []

    def seen(optimizer: torch.optim.Optimizer, *_: object) -> None:
        grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
        norms.append(float(torch.nn.utils.get_total_norm(grads)))

    recipe.optimizer.register_step_pre_hook(seen)
    recipe.forward()
    recipe.update()
    assert norms == [pytest.approx(1e-3, rel=1e-2)]
    assert all(p.grad is None for p in recipe.model.parameters())


def test_the_learning_rate_rises_to_its_value_and_stays(tmp_path: Path):
    recipe = recipe_of("gpt2", tmp_path, warmup_steps=4, learning_rate=0.01)
    rates = []
    for _ in range(6):
        rates.append(recipe.optimizer.param_groups[0]["lr"])
        recipe.forward()
        recipe.update()
    assert rates == pytest.approx([0.0025, 0.004375, 0.00625, 0.008125, 0.01, 0.01])


def test_half_precision_computes_in_half_and_keeps_parameters_whole(tmp_path: Path):
    for precision, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        recipe = recipe_of("vit", tmp_path, precision=precision)
        seen = set()
        layer = next(m for m in recipe.model.modules() if isinstance(m, torch.nn.Linear))
        layer.register_forward_hook(lambda m, i, o, seen=seen: seen.add(o.dtype))
        recipe.forward()
        recipe.update()
        assert seen == {dtype}
        assert {p.dtype for p in recipe.model.parameters()} == {torch.float32}
        assert ("scaler" in recipe.state()) == (precision == "fp16")


def test_an_update_that_overflowed_is_left_out_and_the_warm_up_waits(tmp_path: Path):
    recipe = recipe_of("vit", tmp_path, precision="fp16")
    before = fingerprint(recipe.model, recipe.optimizer, {})
    recipe.forward()
    next(recipe.model.parameters()).grad.fill_(float("inf"))
    scale = recipe.scaler.get_scale()
    recipe.update()
    after = fingerprint(recipe.model, recipe.optimizer, {})
    changed = {n for n in before if before[n] != after[n] and not n.startswith("rng/")}
    assert changed == set()
    assert recipe.scaler.get_scale() == scale / 2
    assert recipe.scheduler.last_epoch == 0


@pytest.mark.parametrize("model", TASKS)
def test_an_evaluation_changes_nothing_and_repeats_itself(model: str, tmp_path: Path):
    recipe = recipe_of(model, tmp_path)
    recipe.forward()
    recipe.update()
    before = fingerprint(recipe.model, recipe.optimizer, recipe.values())
    first = recipe.evaluate()
    assert fingerprint(recipe.model, recipe.optimizer, recipe.values()) == before
    assert recipe.model.training
    assert recipe.evaluate() == first
    assert first["loss"] > 0
    assert 0 <= first["accuracy"] <= 1


class OneAnswer:
    """Held-out samples whose answers are chosen."""

    name, sha256 = "answers", "sha"

    def __init__(self, sample: Sample) -> None:
        self._sample = sample

    def __len__(self) -> int:
        return 8

    def sample(self, index: int, rng: object) -> Sample:
        return self._sample


@pytest.mark.parametrize("model", ["gpt2", "bert", "roberta", "resnet"])
def test_accuracy_is_one_where_the_model_says_what_is_asked(model: str, tmp_path: Path):
    recipe = recipe_of(model, tmp_path, batch=2)
    data = recipe._data
    sample = dict(data.held.sample(0, np.random.default_rng(0)))
    recipe.model.eval()
    with torch.no_grad():
        out = recipe.model(**recipe._to_device({k: v[None] for k, v in sample.items()}))
    if model == "bert":
        sample["start_positions"] = out.start_logits.argmax(-1)[0].numpy()
        sample["end_positions"] = out.end_logits.argmax(-1)[0].numpy()
    elif model == "resnet":
        sample["labels"] = out.logits.argmax(-1)[0].numpy()
    elif model == "roberta":
        guessed = out.logits.argmax(-1)[0].numpy()
        sample["labels"] = np.where(sample["labels"] < 0, -100, guessed)
    else:
        guessed = out.logits.argmax(-1)[0].numpy()
        sample["labels"] = np.concatenate([[0], guessed[:-1]])
    recipe._data = Data(data.train, OneAnswer(sample), data.vocabulary)
    assert recipe.evaluate()["accuracy"] == 1.0


def test_evaluations_stand_in_the_log_and_change_no_later_loss(tmp_path: Path):
    def run(name: str, **changes: int) -> list:
        log = tmp_path / name
        train(TrainOptions(size="tiny", steps=6, threads=1, log=log, **changes))
        return read_log(log)

    plain, scored = run("plain"), run("scored", evaluate_every=3)
    assert [r.loss_hex for r in plain] == [r.loss_hex for r in scored]
    assert [bool(r.scores) for r in scored] == [False, False, True] * 2
    assert not any(r.scores for r in plain)


def test_the_parts_of_a_preset_can_be_changed_for_a_run(tmp_path: Path):
    options = TrainOptions(
        model="bloom", size="tiny", log=tmp_path, precision="bf16", accumulate=3, recompute=True
    )
    preset: Preset = options.preset()
    assert preset.recipe.precision == "bf16"
    assert (preset.recipe.accumulate, preset.recipe.recompute) == (3, True)
    assert load_preset("bloom", "tiny").recipe.accumulate == 1


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("tpu", "device: expected cpu or cuda, found 'tpu'"),
        ("cuda", "expected one that this machine has"),
    ],
)
def test_a_device_that_is_not_there_is_refused(
    device: str, said: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match=said):
        check_precision("fp32", device)
