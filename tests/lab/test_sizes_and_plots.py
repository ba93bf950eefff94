"""``asymlab sizes`` and ``plot``, and the command of each preset."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from asymcheck_lab.cli import app
from asymcheck_lab.errors import DataError, LabError
from asymcheck_lab.experiments import scripts
from asymcheck_lab.plots import plot_loss
from asymcheck_lab.presets import TASKS, sizes_of
from asymcheck_lab.record import StepRecord

ROOT = Path(__file__).parents[2]


def asymlab(*arguments: str):
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})


def test_sizes_shows_parameters_and_memory_of_a_rank():
    result = asymlab("sizes", "gpt2", "--size", "10b", "--world", "8", "--zero", "3", "--half")
    assert result.exit_code == 0, result.output
    assert "3,327,956,992" in result.stdout
    assert "37.2 GiB" in result.stdout  # 12 bytes for each parameter
    assert "6.2 GiB" in result.stdout  # 16 bytes for each, shared by 8
    assert "a rank of 8, ZeRO-3" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gtp2"], "did you mean 'gpt2'?"),
        (["gpt2", "--size", "10"], "did you mean '10b'?"),
        (["--size", "tiny"], "size: expected a model with it"),
        (["gpt2", "--zero", "4"], "zero: expected a number from 0 to 3, found 4"),
    ],
)
def test_sizes_names_what_is_wrong(arguments: list[str], said: str):
    result = asymlab("sizes", *arguments)
    assert result.exit_code == 2
    assert said in result.stderr


def test_every_preset_has_its_command_and_they_are_what_is_written():
    folder = ROOT / "experiments"
    found = {p.relative_to(folder).as_posix(): p.read_text() for p in folder.rglob("*.sh")}
    assert found == scripts(), "run: python -m asymcheck_lab.experiments experiments"
    assert len(found) == sum(len(sizes_of(model)) for model in TASKS)
    for name, text in found.items():
        assert os.access(folder / name, os.X_OK)
        assert text.count("exec asymlab train") == 1
        assert "# Expected memory of a rank" in text


def test_a_picture_shows_losses_evaluations_and_restarts(tmp_path: Path):
    records = [StepRecord(n, 5 / n, 0.1, 0 if n < 6 else 5, {"loss": 1.0}) for n in range(1, 10)]
    plot_loss(records, tmp_path / "a.png", "title")
    plot_loss(records[:1], tmp_path / "b.png")
    for name in ("a.png", "b.png"):
        with Image.open(tmp_path / name) as image:
            assert image.size == (450, 252)
    with pytest.raises(LabError, match=r"none/a.png"):
        plot_loss(records, tmp_path / "none" / "a.png")
    with pytest.raises(DataError, match="expected at least one step"):
        plot_loss([], tmp_path / "a.png")


def test_plot_reads_the_log_of_a_training(tmp_path: Path):
    log = tmp_path / "log.jsonl"
    log.write_text(StepRecord(1, 2.0, 0.1, 0, {"loss": 2.5}).to_line())
    result = asymlab("plot", str(log), "--out", str(tmp_path / "x.png"))
    assert result.exit_code == 0, result.output
    assert (tmp_path / "x.png").stat().st_size > 1000


@pytest.mark.parametrize("model", TASKS)
def test_the_page_of_a_model_has_its_command_data_loss_and_plot(model: str):
    page = (ROOT / "docs" / "models" / f"{model}.md").read_text()
    assert f"asymlab train {model} --size tiny" in page
    assert f"({model}.png)" in page
    assert (ROOT / "docs" / "models" / f"{model}.png").stat().st_size < 60_000
    assert f"docs/models/{model}.md" in (ROOT / "README.md").read_text()
    for size in sizes_of(model):
        assert f"experiments/{model}/{size}.sh" in page


def test_each_model_and_task_has_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    short = ["--steps", "1", "--quiet", "--threads", "1", "--no-checkpoints"]
    for arguments in (["vit"], ["resnet"], ["bert", "--task", "masked-lm"], ["bert"]):
        assert asymlab("train", *arguments, *short).exit_code == 0
    assert {p.name for p in (tmp_path / "runs").iterdir()} == {
        "vit-tiny",
        "resnet-tiny",
        "bert-tiny-masked-lm",
        "bert-tiny",
    }
