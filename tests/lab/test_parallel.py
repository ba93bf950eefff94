"""Ways to spread a model over ranks: names, shares of the data, memory, and who starts them."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import asymcheck_lab.launch
import asymcheck_lab.parallel
from asymcheck_lab.cli import app
from asymcheck_lab.drive import DRIVES, blocks
from asymcheck_lab.errors import DataError, UsageError
from asymcheck_lab.experiments import memory_rows, scripts
from asymcheck_lab.families import blank, on_meta
from asymcheck_lab.launch import Host, over_ssh, read_hosts
from asymcheck_lab.loading import Loader
from asymcheck_lab.parallel import PARALLELS, find_parallel
from asymcheck_lab.presets import TASKS, load_preset
from asymcheck_lab.recipe import check_precision
from asymcheck_lab.record import read_log, read_result
from asymcheck_lab.sizes import (
    MOMENTS,
    measure,
    memory_per_rank,
    needed_bytes,
    refuse_what_cannot_fit,
    saved_bytes,
)
from asymcheck_lab.train import TrainOptions, train

GIB = 2**30


def asymlab(*arguments: object):
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200"})


def test_every_way_by_name_has_what_drives_it():
    assert list(DRIVES) == list(PARALLELS)


def test_an_unknown_way_is_refused_with_the_nearest(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UsageError, match="found 'fsdp'; did you mean 'fsdp2'"):
        find_parallel("fsdp")
    monkeypatch.setattr(asymcheck_lab.parallel.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="zero3 needs the package deepspeed"):
        find_parallel("zero3")
    assert find_parallel("ddp").needs == ""


# --- whose data ---------------------------------------------------------------


class Numbers:
    name, sha256 = "numbers", "of numbers"

    def __len__(self) -> int:
        return 24

    def sample(self, index: int, rng: np.random.Generator) -> dict:
        return {"n": np.array(index)}


def loaders(ranks: int, state: dict | None = None, workers: int = 0) -> list[Loader]:
    made = [
        Loader(Numbers(), batch=2, seed=5, workers=workers, rank=rank, ranks=ranks)
        for rank in range(ranks)
    ]
    for loader in made if state else []:
        loader.load_state_dict(state)
    return made


def turn(of: list[Loader], count: int) -> list[int]:
    """What all ranks get in ``count`` steps."""
    return [n for loader in of for batch in islice(loader, count) for n in batch["n"].tolist()]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_ranks_share_an_epoch_without_a_sample_twice(ranks: int, workers: int):
    of = loaders(ranks, workers=workers)
    assert sorted(turn(of, 12 // ranks)) == list(range(24))
    assert len({json.dumps(loader.state_dict()) for loader in of}) == 1
    for loader in of:
        loader.close()


def test_a_step_of_two_ranks_takes_the_samples_of_two_steps_of_one():
    alone, pair = loaders(1), loaders(2)
    for _ in range(15):
        assert turn(alone, 2) == turn(pair, 1)


@pytest.mark.parametrize("before", [1, 2, 3])
@pytest.mark.parametrize("after", [1, 2, 3])
def test_an_epoch_is_finished_by_any_number_of_ranks(before: int, after: int):
    first = loaders(before)
    seen = turn(first, 6 // before)
    for rank in range(before):
        second = loaders(after, json.loads(json.dumps(first[rank].state_dict())))
        assert sorted(seen + turn(second, 6 // after)) == list(range(24))


def test_too_few_samples_for_a_batch_of_each_rank_are_refused():
    with pytest.raises(DataError, match="26 samples, for one batch of each of 13 ranks, found 24"):
        loaders(13)


# --- how much memory ----------------------------------------------------------


@pytest.mark.parametrize(("optimizer", "bytes_each"), [("adamw", 12), ("momentum", 8), ("sgd", 4)])
def test_what_is_saved_depends_on_the_optimizer_and_is_shared(optimizer: str, bytes_each: int):
    assert MOMENTS.keys() >= {optimizer}
    for stage in range(4):
        found = memory_per_rank(1000, world=4, stage=stage, optimizer=optimizer)
        assert found.checkpoint == bytes_each * 250
    whole = memory_per_rank(1000, world=4, optimizer=optimizer)
    assert whole.total == 1000 * (bytes_each + 4), "gradients besides"


@pytest.mark.parametrize(
    ("model", "size"),
    [("gpt2", "base"), ("bert", "base"), ("bloom", "560m"), ("resnet", "152"), ("vit", "large")],
)
def test_the_more_is_shared_the_less_a_rank_holds(model: str, size: str):
    measured = measure(load_preset(model, size), TASKS[model][0])

    def holds(name: str, world: int, half: bool = False) -> int:
        return needed_bytes(
            measured, checkpoints=True, parallel=PARALLELS[name], world=world, half=half
        )

    assert holds("ddp", 8) < holds("ddp", 1) == holds("none", 1), "it holds a copy of its part"
    assert holds("zero1", 8) > holds("zero2", 8)
    assert holds("fsdp2", 64) < holds("fsdp2", 8) < holds("ddp", 8)
    assert holds("zero2", 8, half=True) < holds("zero2", 8)
    assert holds("fsdp2", 8, half=True) == holds("fsdp2", 8), "autocast over fp32 parameters"


def test_the_unit_that_is_gathered_is_the_largest_layer_or_all_but_the_layers():
    measured = measure(load_preset("bert", "20b"), "span-qa")
    with on_meta():
        model = blank(load_preset("bert", "20b"), "span-qa")
    layers = [sum(p.numel() for p in layer.parameters()) for layer in blocks(model)]
    rest = measured.parameters - sum(layers)
    assert len(layers) == model.config.num_hidden_layers
    assert measured.unit == max(*layers, rest)
    assert measured.unit < measured.parameters / 10


def test_a_model_that_is_too_large_for_one_fits_where_ranks_share_it(
    monkeypatch: pytest.MonkeyPatch,
):
    preset, zero3 = load_preset("bert", "10b"), PARALLELS["zero3"]
    monkeypatch.setattr(asymcheck_lab.sizes, "host_bytes", lambda: 64 * GIB)
    with pytest.raises(UsageError, match=r"found 64\.0 GiB"):
        refuse_what_cannot_fit(preset, "span-qa", checkpoints=True)
    spread = {"checkpoints": True, "parallel": zero3, "world": 8}
    refuse_what_cannot_fit(preset, "span-qa", **spread)
    with pytest.raises(UsageError, match="on 8 of 8 ranks, each"):
        refuse_what_cannot_fit(preset, "span-qa", **spread, local=8)


def test_each_script_shows_the_memory_that_the_table_has():
    for name, text in scripts().items():
        model, size = name.removesuffix(".sh").split("/")
        measured = measure(load_preset(model, size), TASKS[model][0])
        found = [
            line.split() for line in text.splitlines() if line.endswith("B") and "-" not in line
        ]
        rows = [line[1:] for line in found if line[1:2] and line[1].isdigit()]
        assert [row[1] for row in rows][:6] == list(PARALLELS), name
        for row in rows:
            way = [(row[1], int(row[0]))]
            assert list(memory_rows(measured, way))[1].split() == row
        spread = "--parallel zero3 --precision bf16" in text
        assert spread == (size in ("10b", "20b"))
        if spread:
            assert rows[-1][:3] == ["32", "zero3", "bf16"]
        world = int(rows[1][0])
        assert saved_bytes(measured, world) <= saved_bytes(measured) // world + 64 + (
            measured.buffer_bytes
        )


# --- who starts them ----------------------------------------------------------


def test_a_hostfile_has_a_host_and_its_slots_a_line(tmp_path: Path):
    file = tmp_path / "hosts"
    file.write_text("# all of them\nalpha slots=8\n\nbeta  slots=4 # the old one\n")
    assert read_hosts(file) == [Host("alpha", 8), Host("beta", 4)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("alpha\n", "line 1: expected NAME slots=N, N from 1 on, found 'alpha'"),
        ("a slots=1\nb slots=0", "line 2: expected NAME slots=N"),
        ("a slots=1\na slots=2", "line 2: expected each host once, found 'a'"),
        ("# none\n", "expected at least one line NAME slots=N, found none"),
    ],
)
def test_a_wrong_hostfile_is_refused_by_its_line(tmp_path: Path, text: str, said: str):
    file = tmp_path / "hosts"
    file.write_text(text)
    result = asymlab("train", "--size", "tiny", "--parallel", "ddp", "--hostfile", file)
    assert result.exit_code == 1
    assert said in result.stderr


@pytest.mark.parametrize(
    ("arguments", "environ", "said"),
    [
        (["--ranks", "2"], {}, "parallel: expected ddp, fsdp2 or a zero for several ranks"),
        (["--parallel", "dpd"], {}, "did you mean 'ddp'?"),
        (["--parallel", "ddp", "--ranks", "2", "--hostfile", "x"], {}, "ranks: expected none"),
        (
            ["--parallel", "ddp", "--ranks", "2"],
            {"RANK": "0", "WORLD_SIZE": "3"},
            "ranks: expected 3, which the launcher started, found 2",
        ),
        (
            ["--parallel", "ddp", "--hostfile", "x"],
            {"RANK": "0", "WORLD_SIZE": "3"},
            "hostfile: expected none under a launcher",
        ),
        ([], {"RANK": "0", "WORLD_SIZE": "3"}, "with 3 ranks, found none"),
    ],
)
def test_options_that_contradict_each_other_or_the_launcher_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list, environ: dict, said: str
):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    result = asymlab("train", "gpt2", "--size", "tiny", "--run", tmp_path, *arguments)
    assert result.exit_code == 2, result.output
    assert said in result.stderr


def test_several_ranks_need_a_launcher(tmp_path: Path):
    with pytest.raises(UsageError, match="ddp needs a launcher"):
        train(TrainOptions(size="tiny", log=tmp_path / "log", parallel="ddp"))


def test_half_precision_that_deepspeed_does_not_have_is_refused():
    with pytest.raises(UsageError, match="DeepSpeed has no fp16 on a CPU; take bf16"):
        check_precision("fp16", "cpu", masters=PARALLELS["zero2"].masters)
    check_precision("fp16", "cpu", masters=PARALLELS["fsdp2"].masters)


def test_what_is_started_is_the_command_with_all_its_options(monkeypatch: pytest.MonkeyPatch):
    started = []
    monkeypatch.setattr(
        asymcheck_lab.launch, "launch", lambda hosts, words: started.append((hosts, words)) or 3
    )
    result = asymlab(
        *("train", "bloom", "--size", "tiny", "--steps", 7, "--parallel", "fsdp2", "--ranks", 3),
        *("--recompute", "--no-checkpoints", "-q", "--data", "a text.txt"),
    )
    assert result.exit_code == 3, result.output
    hosts, words = started[0]
    assert hosts == [Host("127.0.0.1", 3)]
    assert words[:2] == ["train", "bloom"]
    assert {"--recompute", "--no-checkpoints", "--quiet"} <= set(words)
    assert "--ranks" not in words
    assert words[words.index("--data") + 1] == "a text.txt"
    again = asymlab(*words)  # it is a command, and starts the usual number
    assert again.exit_code == 3
    assert started[1] == ([Host("127.0.0.1", 2)], words)


def test_another_host_gets_the_same_command_folder_and_environment():
    environ = {"PYTHONPATH": "a b", "HOME": "/root", "NCCL_DEBUG": "INFO"}
    command = over_ssh("beta", ["python", "-m", "x", "it's"], environ, Path("/some where"))
    assert command[:-1] == ["ssh", "-tt", "-o", "BatchMode=yes", "beta"]
    assert command[-1] == (
        "cd '/some where' && exec env NCCL_DEBUG=INFO 'PYTHONPATH=a b' python -m x 'it'\"'\"'s'"
    )


def run_command(*arguments: object, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "asymcheck_lab", "train", *map(str, arguments)],
        check=False,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, **environ},
    )


SHORT = ("gpt2", "--size", "tiny", "--steps", 3, "--threads", 1, "--no-checkpoints")


def test_two_hosts_train_as_one_world(tmp_path: Path):
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    # In the place of another host: this one.
    ssh.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/called\nfor last; do :; done\nexec sh -c "$last"\n'
    )
    ssh.chmod(ssh.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "hosts").write_text("127.0.0.1 slots=1\nfar-away slots=2\n")
    done = run_command(
        *(*SHORT, "--parallel", "ddp", "--run", tmp_path, "--hostfile", tmp_path / "hosts"),
        PATH=f"{ssh.parent}:{os.environ['PATH']}",
    )
    assert done.returncode == 0, done.stderr
    assert "far-away" in (tmp_path / "called").read_text()
    ranks = {key.split("/")[0] for key in read_result(tmp_path / "result.json").fingerprint}
    assert ranks == {"rank0", "rank1", "rank2"}
    assert [r.step for r in read_log(tmp_path / "log.jsonl")] == [1, 2, 3]


def test_ranks_that_fail_end_the_command_with_a_code(tmp_path: Path):
    text = tmp_path / "short.txt"
    text.write_text("short")
    done = run_command(
        *(*SHORT, "--parallel", "ddp", "--ranks", 2, "--run", tmp_path, "--data", text)
    )
    assert done.returncode == 1
    assert f"error: {text}: expected at least 32 tokens" in done.stderr
