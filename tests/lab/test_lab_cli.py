"""``asymlab train``: what a user sees when it works, and one readable message when not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from asymcheck_lab.cli import app
from asymcheck_lab.record import read_log

TINY = ["train", "gpt2", "--size", "tiny", "--threads", "1", "--every", "4"]


def asymlab(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200"})


def told(result: Result, code: int) -> str:
    """The message of a command that ended with ``code`` and without a traceback."""
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == code
    assert "Traceback" not in result.output
    return result.stderr


def test_train_resumes_by_itself_when_it_is_started_again(tmp_path: Path):
    first = asymlab(*TINY, "--run", tmp_path, "--steps", 6)
    assert first.exit_code == 0, first.output
    assert "resumed" not in first.stdout
    assert f"asymcheck ls {tmp_path}/checkpoints" in first.stdout
    second = asymlab(*TINY, "--run", tmp_path, "--steps", 9)
    assert "resumed from step 6" in second.stdout
    assert [r.step for r in read_log(tmp_path / "log.jsonl")] == list(range(1, 10))
    assert json.loads((tmp_path / "result.json").read_text())["resumed_from"] == 6
    third = asymlab(*TINY, "--run", tmp_path, "--steps", 9)
    assert "step 9 is the last one: raise --steps to go on" in third.stdout


def test_quiet_says_nothing_and_the_places_can_be_chosen(tmp_path: Path):
    own = tmp_path / "text.txt"
    own.write_text("to be or not to be, that is the question\n" * 30)
    chosen = {"--data": own, "--root": tmp_path / "c", "--log": tmp_path / "l", "--run": tmp_path}
    result = asymlab(*TINY, "--quiet", "--steps", 4, *sum(chosen.items(), ()))
    assert (result.exit_code, result.output) == (0, "")
    assert (tmp_path / "c" / "FORMAT").is_file()
    assert len(read_log(tmp_path / "l")) == 4
    assert not (tmp_path / "checkpoints").exists()


def test_without_checkpoints_none_are_made(tmp_path: Path):
    result = asymlab(*TINY, "--run", tmp_path, "--steps", 2, "--no-checkpoints")
    assert result.exit_code == 0
    assert "asymcheck ls" not in result.stdout
    assert {p.name for p in tmp_path.iterdir()} == {"log.jsonl", "result.json"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpt3"], "found 'gpt3'; did you mean 'gpt2'?"),
        (["--size", "tinny"], "found 'tinny'; did you mean 'tiny'?"),
        (["--strategy", "asymchek"], "found 'asymchek'; did you mean 'asymcheck'?"),
        (["--root", "x", "--no-checkpoints"], "root: expected none with --no-checkpoints"),
        (["--root", "flie:///x"], "did you mean 'file'?"),
        (["--steps", "0"], "--steps"),
        (["--stepps", "3"], "--stepps"),
    ],
)
def test_a_wrong_option_ends_with_code_2_and_the_nearest_name(
    tmp_path: Path, arguments: list[str], message: str
):
    result = asymlab("train", "--size", "tiny", "--run", tmp_path, *arguments)
    assert message in told(result, 2)


def test_a_bad_data_file_ends_with_code_1_and_its_place(tmp_path: Path):
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"fine\n\xff")
    message = told(asymlab(*TINY, "--run", tmp_path, "--data", bad), 1)
    assert message == (
        f"error: {bad}, line 2, byte 5: expected UTF-8 text, found byte 0xff (invalid start byte)\n"
    )
    bad.write_text("short")
    message = told(asymlab(*TINY, "--run", tmp_path, "--data", bad), 1)
    assert f"{bad}: expected at least 32 tokens, for one window, found 5" in message


def test_a_root_of_another_tool_is_refused_and_left_alone(tmp_path: Path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "model.bin").write_text("other")
    message = told(asymlab(*TINY, "--run", tmp_path), 2)
    assert "model.bin" in message
    assert (tmp_path / "checkpoints" / "model.bin").read_text() == "other"


def test_other_data_than_the_run_was_started_with_is_told_in_the_loaders_words(tmp_path: Path):
    asymlab(*TINY, "--run", tmp_path, "--steps", 4)
    other = tmp_path / "other.txt"
    other.write_text("another text " * 100)
    message = told(asymlab(*TINY, "--run", tmp_path, "--data", other), 1)
    assert message.startswith(f"error: {other}: this run was started with the data")


def test_a_flipped_byte_is_a_warning_and_the_checkpoint_before_is_taken(tmp_path: Path):
    asymlab(*TINY, "--run", tmp_path, "--steps", 8)
    pack = next((tmp_path / "checkpoints" / "step-00000008").glob("*.pack"))
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.write_bytes(data)
    result = asymlab(*TINY, "--run", tmp_path, "--steps", 8)
    assert result.exit_code == 0
    assert "warning: checkpoint of step 8 is damaged and was passed over" in result.stderr
    assert "resumed from step 4" in result.stdout
    assert json.loads((tmp_path / "result.json").read_text())["skipped"][0][0] == 8


def test_the_help_names_the_commands_and_loads_no_torch():
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from asymcheck_lab.cli import app\n"
        "print(CliRunner().invoke(app, ['--help']).stdout)\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert "train" in done.stdout
    assert "demo" in done.stdout
