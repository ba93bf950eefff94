"""Presets: exact sizes against the reference, memory before allocating, mistakes by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import asymcheck_lab.recipe
from asymcheck_lab import sizes
from asymcheck_lab.cli import app
from asymcheck_lab.errors import DataError, LabError, UsageError
from asymcheck_lab.families import CLASSES, build, make_config
from asymcheck_lab.presets import TASKS, load_preset, sizes_of, task_of
from asymcheck_lab.sizes import (
    count_parameters,
    measure,
    memory_per_rank,
    needed_bytes,
    refuse_what_cannot_fit,
)
from asymcheck_lab.train import TrainOptions, train

BILLION = 1e9
GIB = 2**30

# Counted once and written down; the last column is what the reference table says, in billions.
COUNTS = [
    ("gpt2", "base", "causal-lm", 124_439_808, None),
    ("gpt2", "large", "causal-lm", 774_030_080, None),
    ("gpt2", "10b", "causal-lm", 3_327_956_992, 3.328),
    ("bert", "base", "masked-lm", 109_514_298, None),
    ("bert", "base", "span-qa", 108_893_186, 0.109),
    ("bert", "large", "masked-lm", 335_174_458, 0.335),
    ("bert", "10b", "masked-lm", 3_705_167_162, 3.705),
    ("bert", "10b", "span-qa", 3_698_580_482, None),
    ("bert", "20b", "masked-lm", 6_117_363_002, 6.117),
    ("roberta", "base", "masked-lm", 124_697_433, None),
    ("roberta", "10b", "masked-lm", 3_759_661_145, 3.760),
    ("bloom", "560m", "causal-lm", 559_214_592, None),
    ("bloom", "10b", "causal-lm", 4_261_381_120, 4.261),
    ("resnet", "50", "image-classification", 25_557_032, None),
    ("resnet", "152", "image-classification", 60_192_808, 0.060),
    ("vit", "base", "image-classification", 86_567_656, None),
    ("vit", "large", "image-classification", 304_326_632, 0.304),
]


@pytest.mark.parametrize(("model", "size", "task", "exact", "published"), COUNTS)
def test_a_preset_has_exactly_the_parameters_that_the_reference_says(
    model: str, size: str, task: str, exact: int, published: float | None
):
    assert count_parameters(load_preset(model, size), task) == exact
    if published is not None:
        assert round(exact / BILLION, 3) == published


@pytest.mark.parametrize(("model", "low"), [("gpt2", 9.9), ("bert", 11), ("roberta", 11)])
def test_ten_billion_counts_parameters_and_two_moments(model: str, low: float):
    parameters = count_parameters(load_preset(model, "10b"), TASKS[model][0])
    assert low < 3 * parameters / BILLION < low + 1


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_memory_of_a_rank_is_that_of_the_zero_paper(stage: int, gigabytes: float):
    # Rajbhandari et al. 2020, figure 1: 7.5 billion parameters, 64 ranks, mixed precision.
    found = memory_per_rank(7_500_000_000, world=64, stage=stage, half=True)
    assert round(found.total / BILLION, 1) == gigabytes


def test_a_rank_saves_its_share_of_parameters_and_moments_in_fp32():
    whole = memory_per_rank(1000, world=8, stage=0)
    assert (whole.parameters, whole.gradients, whole.optimizer) == (4000, 4000, 8000)
    assert whole.checkpoint == 12 * 125, "what all have alike they save in turns"
    shared = memory_per_rank(1001, world=8, stage=3)  # 126 on the largest rank
    assert (shared.parameters, shared.gradients) == (504, 504)
    assert shared.checkpoint == 12 * 126
    alone = memory_per_rank(1000, stage=3)
    assert (alone.total, alone.checkpoint) == (whole.total, 12_000)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"world": 0}, "world: expected"), ({"stage": 4}, "zero: expected a number from 0 to 3")],
)
def test_a_world_or_stage_that_is_none_is_refused(wrong: dict, said: str):
    with pytest.raises(UsageError, match=said):
        memory_per_rank(10, **wrong)


def test_every_size_of_every_model_is_read_and_built_without_memory():
    for model, tasks in TASKS.items():
        names = sizes_of(model)
        assert names[0] == "tiny"
        for size in names:
            for task in tasks:
                with torch.device("meta"):
                    built = build(load_preset(model, size), task)
                assert type(built).__name__ == CLASSES[model, task]
                assert all(p.is_meta for p in built.parameters())


@pytest.mark.parametrize("model", TASKS)
def test_activations_that_are_counted_without_memory_are_those_of_a_real_batch(model: str):
    preset, task = load_preset(model, "tiny"), TASKS[model][0]
    batch = {
        key: torch.zeros(value.shape, dtype=value.dtype)
        for key, value in sizes._batch(preset, task).items()
    }
    real = sizes._kept_bytes(build(preset, task), batch)
    assert measure(preset, task).activation_bytes == pytest.approx(real, rel=0.3)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["brt"], "did you mean 'bert'?"),
        (["bert", "--size", "bse"], "size: bert has ['tiny', 'base', 'large', '10b', '20b']"),
        (["bert", "--size", "bse"], "did you mean 'base'?"),
        (["bert", "--task", "masked"], "found 'masked'; did you mean 'masked-lm'?"),
        (["vit", "--size", "tiny", "--task", "masked-lm"], "vit has ['image-classification']"),
        (["vit", "--size", "tiny", "--precision", "bf61"], "did you mean 'bf16'?"),
        (["vit", "--size", "tiny", "--device", "tpu"], "device: expected cpu or cuda"),
        (["resnet", "--size", "tiny", "--recompute"], "recompute: resnet tiny cannot"),
    ],
)
def test_a_wrong_name_ends_with_code_2_and_the_nearest(
    tmp_path: Path, arguments: list[str], said: str
):
    result = CliRunner().invoke(app, ["train", *arguments, "--run", str(tmp_path)])
    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert "Traceback" not in result.output


def own(tmp_path: Path, text: str) -> str:
    path = tmp_path / "own.toml"
    path.write_text(text)
    return str(path)


GOOD = "[recipe]\nbatch = 2\nlearning_rate = 1\nwarmup_steps = 1\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[recipee]\n", "found 'recipee'; did you mean 'recipe'?"),
        ("[recipe]\nbach = 2\n", r"table \[recipe\]: expected one of .* did you mean 'batch'?"),
        ("[recipe]\nbatch = 'x'\n", "expected batch as int, found 'x'"),
        ("[recipe]\nbatch = -1\n", "expected batch of at least 1, found -1"),
        ("[recipe]\nbatch = 2\n", r"expected the keys \['learning_rate', 'warmup_steps'\]"),
        (GOOD + "[data]\ncontxt = 2\n", "did you mean 'context'?"),
        ("batch = two\n", "line 1, column 9"),
    ],
)
def test_a_wrong_preset_of_ones_own_is_told_by_file_and_key(tmp_path: Path, text: str, said: str):
    with pytest.raises(DataError, match=said) as failure:
        load_preset("bert", own(tmp_path, text))
    assert "own.toml" in str(failure.value)


def test_a_preset_that_is_no_file_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match="No such file"):
        load_preset("bert", str(tmp_path / "none.toml"))


def test_an_unknown_option_of_the_configuration_is_named_with_the_nearest(tmp_path: Path):
    preset = load_preset("bert", own(tmp_path, GOOD + "[model]\nhiden_size = 8\n"))
    with pytest.raises(DataError, match=r"'hiden_size'; did you mean 'hidden_size'?"):
        make_config(preset)


def test_an_option_that_the_configuration_refuses_is_told_in_its_words():
    preset = replace(load_preset("bert", "tiny"), config={"hidden_size": "wide"})
    with pytest.raises(UsageError, match="BertConfig refuses the options"):
        make_config(preset)


def test_a_preset_that_cannot_fit_is_refused_before_anything_is_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def never(*_: object) -> None:
        raise AssertionError("a model was built in memory")

    monkeypatch.setattr(asymcheck_lab.recipe, "build", never)
    monkeypatch.setattr(sizes, "host_bytes", lambda: 24 * GIB)
    with pytest.raises(UsageError) as failure:
        train(TrainOptions(model="bert", size="20b", log=tmp_path / "log", root=str(tmp_path)))
    said = str(failure.value)
    assert "bert 20b: span-qa with 6,110,776,322 parameters needs" in said
    assert "found 24.0 GiB" in said
    assert not (tmp_path / "log").exists()


def test_a_preset_fits_just_where_it_needs_no_more_than_there_is(monkeypatch: pytest.MonkeyPatch):
    preset = load_preset("vit", "base")
    needed = needed_bytes(measure(preset, "image-classification"), checkpoints=True)
    monkeypatch.setattr(sizes, "host_bytes", lambda: needed)
    refuse_what_cannot_fit(preset, "image-classification", checkpoints=True)
    monkeypatch.setattr(sizes, "host_bytes", lambda: needed - 1)
    refuse_what_cannot_fit(preset, "image-classification", checkpoints=False)
    with pytest.raises(UsageError, match="for a checkpoint's copy"):
        refuse_what_cannot_fit(preset, "image-classification", checkpoints=True)


def test_this_machine_has_memory():
    assert 2**28 < sizes.host_bytes() < 2**50


def test_a_local_folder_of_weights_is_loaded_and_another_is_refused(tmp_path: Path):
    preset = load_preset("vit", "tiny")
    first = build(preset, "image-classification")
    first.save_pretrained(tmp_path / "vit")
    again = build(preset, "image-classification", tmp_path / "vit")
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True)
    )
    assert again.training
    with pytest.raises(DataError, match=r"expected a folder with config.json and weights"):
        build(preset, "image-classification", tmp_path)


def test_the_first_task_of_a_model_is_its_own():
    assert [task_of(model, None) for model in TASKS] == [tasks[0] for tasks in TASKS.values()]
    with pytest.raises(LabError, match=r"did you mean 'span-qa'?"):
        task_of("bert", "span_qa")
