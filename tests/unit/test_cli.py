"""The command line, on real checkpoints: what it says, what it exits with, what it leaves."""

from __future__ import annotations

import io
import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

import asymcheck
from asymcheck.cli import app
from asymcheck.planning.retention import CheckpointId, Retention
from asymcheck.planning.strategies import Strategy
from asymcheck.rendering import table_text, tree_lines
from asymcheck.storage.repository import open_repository
from asymcheck.storage.sealed import digest, seal, unseal
from asymcheck.storage.store import open_store
from asymcheck.upkeep import Wanted, examine, plan_prune

BIG = "model/big.weight"
BIG_BYTES = 256 * 128 * 4
TAGS = ["$leaf", "$float", "$tuple", "$", "$dict"]
RUN_APP = "import sys; from asymcheck.cli import app; app(sys.argv[1:])"
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "COLUMNS")}


# --- making checkpoints, calling the command --------------------------------


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.big = torch.nn.Linear(128, 256, bias=False)
        self.head = torch.nn.Linear(4, 4)
        self.tied = self.head


def state_of(seed: int = 0, **more: object) -> dict[str, Any]:
    torch.manual_seed(seed)
    net = Net()
    optim = torch.optim.SGD(net.parameters(), lr=0.125, momentum=0.5)
    return {"model": net, "optim": optim, "data": {"epoch": 3, "note": "calm"}, **more}


def train(root: Path | str, *steps: int, restore: int | None = None, **options: Any) -> None:
    options.setdefault("strategy", Strategy())  # chunks lie in their packs as they were
    with asymcheck.Checkpointer(root, state=state_of(len(steps)), **options) as ckpt:
        ckpt.restore(restore)
        for step in steps:
            ckpt.save(step, metrics={"loss": 1 / step, "score": abs(step - 20)})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs that every test copies: steps 10 to 30, and steps 10 to 60."""
    folder = tmp_path_factory.mktemp("trained")
    train(folder / "root", 10, 20, 30)
    train(folder / "long", 10, 20, 30, 40, 50, 60)
    return folder


@pytest.fixture
def root(trained: Path, tmp_path: Path) -> Path:
    """Steps 10, 20 and 30 of one attempt."""
    return shutil.copytree(trained / "root", tmp_path / "root")


def run(*args: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in args])


def run_json(*args: object, code: int = 0) -> dict[str, Any]:
    result = run(*args, "--json")
    assert result.exit_code == code, result.output

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(result.stdout, parse_constant=refuse)


def process(*args: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """The command as a process of its own, with neither terminal nor input."""
    defaults = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.run(
        [sys.executable, "-c", RUN_APP, *(str(a) for a in args)],
        timeout=120,
        text=True,
        check=False,
        **{**defaults, "env": ENVIRONMENT, **options},
    )


def states(root: Path | str, code: int = 0) -> dict[tuple[int, int], str]:
    found = run_json("ls", root, code=code)["checkpoints"]
    return {(row["attempt"], row["step"]): row["state"] for row in found}


def steps(root: Path | str, code: int = 0) -> list[int]:
    return [row["step"] for row in run_json("ls", root, code=code)["checkpoints"]]


def only_files(root: Path) -> set[str]:
    return {p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()}


def one(root: Path, step: int, pattern: str) -> Path:
    (found,) = (root / f"step-{step:08d}").glob(pattern)
    return found


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def big_offset(root: Path, step: int) -> int:
    """Where the chunk of the big tensor begins in its pack: it is its only content."""
    index = unseal(one(root, step, "*-r0000.json").read_bytes(), "index")
    (leaf,) = (row for row in index["leaves"] if row["key"] == BIG)
    (chunk,) = (row for row in index["chunks"] if row[0] == leaf["at"])
    return chunk[3]


def branch(root: Path) -> None:
    """Go back to step 10 and save step 15; the branch left behind is as if the job had been
    killed before it could remove it.
    """
    aside = root.with_name("aside")
    shutil.copytree(root, aside)
    train(root, 15, restore=10)
    for step in (20, 30):
        shutil.copytree(aside / f"step-{step:08d}", root / f"step-{step:08d}")
    shutil.rmtree(aside)


def start_another(root: Path, step: int) -> None:
    """A start from nothing beside what is there."""
    with asymcheck.Checkpointer(root, state=state_of()) as ckpt:
        ckpt.restore(resume="never")
        ckpt.save(step)


def bring_foreign(root: Path, step: int) -> None:
    """A checkpoint of another run lands here."""
    other = root.with_name("other")
    train(other, step)
    shutil.copytree(other / f"step-{step:08d}", root / f"step-{step:08d}")
    shutil.rmtree(other)


# --- ls ---------------------------------------------------------------------


def test_ls_lists_step_attempt_size_metrics_and_state_oldest_first(root: Path) -> None:
    result = run("ls", root)
    assert result.exit_code == 0
    head, *rows = result.stdout.splitlines()
    assert head.split() == ["step", "attempt", "when", "stored", "state", "metrics"]
    assert [row.split()[:2] for row in rows] == [["10", "1"], ["20", "1"], ["30", "1"]]
    assert [row.split()[6] for row in rows] == ["ok", "ok", "newest"]
    assert rows[0].endswith("loss=0.1 score=10")
    assert "KiB" in rows[0]


def test_ls_as_json_has_exact_numbers(root: Path) -> None:
    found = run_json("ls", root)
    assert found["root"] == root.as_uri()
    assert found["newest"] == {"step": 30, "attempt": 1}
    row = found["checkpoints"][1]
    files = [p for p in (root / "step-00000020").iterdir() if "MANIFEST" not in p.name]
    assert row["stored_bytes"] == sum(p.stat().st_size for p in files)
    assert row["metrics"] == {"loss": 0.05, "score": 0}
    assert row["why"] is None
    assert found["leftovers"] == []


def test_a_metric_that_is_no_json_number_is_still_valid_json(tmp_path: Path) -> None:
    with asymcheck.Checkpointer(tmp_path / "r", state=state_of()) as ckpt:
        ckpt.save(1, metrics={"a": float("nan"), "b": float("-inf")})
    assert run_json("ls", tmp_path / "r")["checkpoints"][0]["metrics"] == {"a": "nan", "b": "-inf"}
    assert "a=nan b=-inf" in run("ls", tmp_path / "r").stdout


def test_every_state_is_told_apart(root: Path) -> None:
    branch(root)
    bring_foreign(root, 77)
    assert states(root) == {
        (1, 10): "ok",
        (1, 20): "abandoned",
        (1, 30): "abandoned",
        (2, 15): "newest",
        (1, 77): "foreign",
    }
    start_another(root, 5)
    found = states(root)
    assert found[(3, 5)] == "newest"
    assert {at for at, state in found.items() if state == "separate"} == {
        (1, 10),
        (1, 20),
        (1, 30),
        (2, 15),
    }


def test_a_pack_of_the_wrong_length_is_damaged_and_said_why(root: Path) -> None:
    pack = one(root, 20, "*.pack")
    pack.write_bytes(pack.read_bytes()[:-1])
    result = run("ls", root)
    assert result.exit_code == 1
    assert "step 20 (attempt 1): step-00000020/a000001-r0000-0001.pack has" in result.stdout
    assert states(root, code=1) == {(1, 10): "ok", (1, 20): "damaged", (1, 30): "newest"}
    row = run_json("ls", root, code=1)["checkpoints"][1]
    assert row["stored_bytes"] is None
    assert pack.name in row["why"]


def test_a_manifest_of_a_newer_release_is_not_called_damaged(root: Path) -> None:
    make_newer(one(root, 20, "*MANIFEST.json"))
    assert states(root, code=1)[(1, 20)] == "newer"
    assert "install a newer asymcheck" in run("ls", root).stdout


def make_newer(manifest: Path) -> None:
    value = unseal(manifest.read_bytes(), "manifest")
    manifest.write_bytes(seal({**value, "needs": ["time-travel"]}))


def test_left_overs_are_noted_and_do_no_harm(root: Path) -> None:
    one(root, 20, "*MANIFEST.json").unlink()
    result = run("ls", root)
    assert result.exit_code == 0
    assert "2 left-over objects" in result.stdout
    names = {row["name"] for row in run_json("ls", root)["leftovers"]}
    assert names == {
        "step-00000020/a000001-r0000-0001.pack",
        "step-00000020/a000001-r0000.json",
    }


def test_where_there_is_no_repository_every_command_exits_with_1_and_one_message(
    tmp_path: Path,
) -> None:
    for args in (["ls"], ["show"], ["verify"], ["prune", "--keep-last", "1", "--yes"]):
        result = run(args[0], tmp_path / "nowhere", *args[1:])
        assert result.exit_code == 1, args
        assert result.stdout == ""
        assert result.stderr == f"asymcheck: {(tmp_path / 'nowhere').as_uri()}: " + (
            "there is no checkpoint yet\n"
        )
    assert not (tmp_path / "nowhere").exists()


def test_a_repository_without_a_checkpoint_exits_with_1_and_is_still_json(tmp_path: Path) -> None:
    asymcheck.Checkpointer(tmp_path / "r", state=state_of()).close()
    result = run("ls", tmp_path / "r", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["checkpoints"] == []
    assert "there is no checkpoint of this run" in result.stderr


def test_a_directory_of_another_tool_is_wrong_usage(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-500").mkdir()
    (tmp_path / "checkpoint-500" / "model.safetensors").write_bytes(b"x")
    result = run("ls", tmp_path)
    assert result.exit_code == 2
    assert "checkpoint-500" in result.stderr


def test_a_file_in_place_of_the_root_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    result = run("ls", tmp_path / "f")
    assert result.exit_code == 1
    assert "a file is where a directory should be" in result.stderr
    assert result.stderr.count("\n") == 1


def test_an_unknown_scheme_is_wrong_usage_and_names_the_nearest() -> None:
    result = run("ls", "memry://x")
    assert result.exit_code == 2
    assert "did you mean 'memory'?" in result.stderr


def test_a_newer_format_is_one_message(root: Path) -> None:
    (root / "FORMAT").write_text("asymcheck 99\n")
    result = run("ls", root)
    assert result.exit_code == 1
    assert "format version 99" in result.stderr


def test_a_url_is_taken_as_a_root(root: Path) -> None:
    assert steps(root.as_uri()) == [10, 20, 30]
    train("memory://for-the-command-line", 4)
    assert steps("memory://for-the-command-line") == [4]


# --- show -------------------------------------------------------------------


def test_show_has_the_tensors_the_aliases_the_versions_and_the_state(root: Path) -> None:
    result = run("show", root)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"{root.as_uri()}: step 30 (attempt 1), ")
    assert lines[1] == "metrics: loss=0.0333333 score=10"
    assert f"torch {torch.__version__}" in lines[2]
    (row,) = (line.split() for line in lines if line.startswith(f"{BIG} "))
    assert row == [BIG, "float32", "[256,", "128]", str(BIG_BYTES), "1"]
    assert "alias: model/tied.weight is model/head.weight" in lines
    assert "  items/optim/groups[0]/options/lr = 0.125" in lines
    assert '  items/data/value/note = "calm"' in lines


def test_show_as_json_has_the_whole_state(root: Path) -> None:
    found = run_json("show", root, "--step", 20)
    assert (found["step"], found["attempt"], found["world"]) == (20, 1, 1)
    big = next(row for row in found["tensors"] if row["key"] == BIG)
    assert big == {
        "rank": 0,
        "key": BIG,
        "dtype": "float32",
        "shape": [256, 128],
        "bytes": BIG_BYTES,
        "chunks": 1,
    }
    assert found["aliases"]["model/tied.bias"] == "model/head.bias"
    assert found["state"]["items"]["data"]["value"] == {"epoch": 3, "note": "calm"}
    python_state = found["state"]["rng"]["python"]["$tuple"][1]["$tuple"]
    assert len(python_state) == 625
    assert found["packs"] == [
        {
            "name": "step-00000020/a000001-r0000-0001.pack",
            "bytes": one(root, 20, "*.pack").stat().st_size,
        }
    ]


def test_a_tensor_of_several_chunks_and_an_empty_one_are_counted(tmp_path: Path) -> None:
    state = {"t": {"long": torch.zeros(9 << 20, dtype=torch.int16), "none": torch.zeros(0)}}
    with asymcheck.Checkpointer(tmp_path / "r", state=state) as ckpt:
        ckpt.save(1)
    found = {row["key"]: row["chunks"] for row in run_json("show", tmp_path / "r")["tensors"]}
    assert (found["t/long"], found["t/none"]) == (2, 0)


def test_show_filters_keys_by_a_glob(root: Path) -> None:
    found = run_json("show", root, "--match", "model/*.bias")
    assert [row["key"] for row in found["tensors"]] == ["model/head.bias"]
    assert found["aliases"] == {"model/tied.bias": "model/head.bias"}
    text = run("show", root, "--match", "model/*.bias").stdout
    assert "model/head.bias" in text
    assert BIG not in text


def test_a_glob_that_nothing_matches_is_something_missing(root: Path) -> None:
    result = run("show", root, "--match", "modle/*")
    assert result.exit_code == 1
    assert "no key matches 'modle/*'" in result.stderr


def test_an_unknown_step_lists_the_steps_that_are_there(root: Path) -> None:
    for command in ("show", "verify"):
        result = run(command, root, "--step", 7)
        assert result.exit_code == 1
        assert "no checkpoint of step 7; steps 10, 20, 30 are there" in result.stderr
    result = run("show", root, "--attempt", 4)
    assert result.exit_code == 1
    assert "no checkpoint of attempt 4; attempts [1] have some" in result.stderr


def test_of_a_step_saved_twice_show_takes_what_restore_would_unless_told(root: Path) -> None:
    train(root, 20, 25, restore=10)
    old = root.with_name("old")
    train(old, 10, 20)
    assert run_json("show", root, "--step", 20)["attempt"] == 2
    branch_of_old = (old / "step-00000020", root / "step-00000020")
    shutil.copytree(*branch_of_old, dirs_exist_ok=True)
    assert run_json("show", root, "--step", 20)["attempt"] == 2
    foreign = run_json("show", root, "--step", 20, "--attempt", 1)
    assert foreign["attempt"] == 1
    assert {row["state"] for row in run_json("ls", root)["checkpoints"]} >= {"foreign"}


def test_show_of_a_damaged_checkpoint_says_what_is_wrong(root: Path) -> None:
    flip(one(root, 20, "*MANIFEST.json"), 30)
    result = run("show", root, "--step", 20)
    assert result.exit_code == 1
    assert "step 20 (attempt 1)" in result.stderr
    assert "its seal says" in result.stderr


def test_show_lists_the_tensors_although_the_state_cannot_be_read(root: Path) -> None:
    flip(one(root, 30, "*.pack"), 8)
    result = run("show", root)
    assert result.exit_code == 1
    assert BIG in result.stdout
    assert "a000001-r0000-0001.pack at byte 0" in result.stderr


def test_a_long_state_is_abbreviated_and_json_has_all_of_it(tmp_path: Path) -> None:
    values = {f"k{i:03d}": i for i in range(300)}
    state = {"many": values, "text": {"t": "x" * 1000, "inf": float("inf"), "l": list(range(99))}}
    with asymcheck.Checkpointer(tmp_path / "r", state=state) as ckpt:
        ckpt.save(1)
    text = run("show", tmp_path / "r").stdout
    assert "k010 = 10" in text
    assert "k299" not in text
    assert "more; --json has all of it" in text
    assert run_json("show", tmp_path / "r")["state"]["items"]["many"]["value"] == values


@pytest.mark.parametrize(
    "tree",
    [
        b"",
        b"[]",
        b"\xff\xfe",
        b'{"items": NaN}',
        b'{"a": ' * 600 + b"1" + b"}" * 600,
        b"[" * 100_000,
        b'{"n": ' + b"9" * 5000 + b"}",
    ],
)
def test_a_state_tree_that_is_none_is_one_message(root: Path, tree: bytes) -> None:
    put_tree(root, 30, tree)
    for options in ([], ["--json"]):
        result = run("show", root, *options)
        assert result.exit_code == 1
        assert BIG in result.stdout
        assert result.stderr.startswith("asymcheck: (state): ")
        assert result.stderr.count("\n") == 1


def put_tree(root: Path, step: int, tree: bytes) -> None:
    """Give a checkpoint another state tree, with every hash and length in order."""
    pack, index_path = one(root, step, "*.pack"), one(root, step, "*-r0000.json")
    index = unseal(index_path.read_bytes(), "index")
    index["leaves"] = [row for row in index["leaves"] if row["key"]]
    at = -(-max(row["at"] + row["bytes"] for row in index["leaves"]) // 4096) * 4096
    leaf = {"key": "", "dtype": "json", "shape": [len(tree)], "at": at, "bytes": len(tree)}
    index["leaves"].append(leaf)
    data = pack.read_bytes()
    if tree:
        offset = -(-len(data) // 4096) * 4096
        data = data.ljust(offset, b"\0") + tree
        index["chunks"].append([at, len(tree), 0, offset, len(tree), "raw", digest(tree)])
    pack.write_bytes(data)
    index["packs"] = [{"name": index["packs"][0]["name"], "bytes": len(data)}]
    sealed = seal(index)
    index_path.write_bytes(sealed)
    path = one(root, step, "*MANIFEST.json")
    manifest = unseal(path.read_bytes(), "manifest")
    manifest["packs"] = index["packs"]
    manifest["indexes"][0] |= {"bytes": len(sealed), "hash": digest(sealed)}
    path.write_bytes(seal(manifest))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(TAGS), inner),
    max_leaves=30,
)


@given(JSON)
def test_any_tree_becomes_printable_lines(tree: object) -> None:
    for path, text in tree_lines(tree):
        assert path.isprintable()
        assert text.isprintable()
        assert len(text) < 100_000


def test_values_are_readable_in_the_text(tmp_path: Path) -> None:
    value = {"t": "x" * 1000, "inf": float("-inf"), "l": list(range(99)), "u": (1, "a"), "e": {}}
    with asymcheck.Checkpointer(tmp_path / "r", state={"v": value}) as ckpt:
        ckpt.save(1)
    lines = run("show", tmp_path / "r").stdout.splitlines()
    assert f'  items/v/value/t = "{"x" * 59}…' in lines
    assert "  items/v/value/inf = -inf" in lines
    assert "  items/v/value/l = [0, 1, 2, 3, … 99 in all]" in lines
    assert '  items/v/value/u = tuple [1, "a"]' in lines


# --- verify -----------------------------------------------------------------


def test_what_is_whole_is_verified_and_exits_with_0(root: Path) -> None:
    result = run("verify", root)
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "ok       step 10 (attempt 1)",
        "ok       step 20 (attempt 1)",
        "ok       step 30 (attempt 1)",
        "3 checkpoints read, 0 damaged",
    ]


@pytest.mark.parametrize("within", [0, 1, BIG_BYTES // 2, BIG_BYTES - 1])
def test_one_flipped_byte_is_named_by_file_tensor_and_offset(root: Path, within: int) -> None:
    pack, offset = one(root, 20, "*.pack"), big_offset(root, 20)
    flip(pack, offset + within)
    result = run("verify", root)
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    at = lines.index("damaged  step 20 (attempt 1)")
    assert lines[at + 1].startswith(f"  step-00000020/{pack.name} at byte {offset}: hash of ")
    assert lines[at + 1].endswith(f"hit: {BIG}")
    assert lines[-1] == "3 checkpoints read, 1 damaged"
    found = run_json("verify", root, code=1)
    assert found["ok"] is False
    assert [row["state"] for row in found["checkpoints"]] == ["ok", "damaged", "ok"]
    (finding,) = found["checkpoints"][1]["findings"]
    assert finding["object"] == f"step-00000020/{pack.name}"
    assert finding["offset"] == offset
    assert finding["keys"] == [BIG]


def test_every_damaged_chunk_is_reported_not_only_the_first(root: Path) -> None:
    pack = one(root, 20, "*.pack")
    flip(pack, 0)
    flip(pack, big_offset(root, 20))
    findings = run_json("verify", root, "--step", 20, code=1)["checkpoints"][0]["findings"]
    assert [BIG in f["keys"] for f in findings] == [False, True]
    assert "model/head.weight" in findings[0]["keys"]
    assert "(state)" in findings[0]["keys"]


def test_no_byte_of_a_checkpoint_may_be_flipped_unseen(root: Path) -> None:
    step = one(root, 30, "*MANIFEST.json").parent
    for path in sorted(step.iterdir()):
        whole = path.read_bytes()
        for at in {0, 1, len(whole) // 3, len(whole) // 2, len(whole) - 2, len(whole) - 1}:
            flip(path, at)
            result = run("verify", root, "--step", 30)
            assert result.exit_code == 1, (path.name, at)
            assert path.name in result.stdout, (path.name, at)
            path.write_bytes(whole)
    assert run("verify", root).exit_code == 0


def test_a_missing_or_wrongly_long_object_is_reported(root: Path) -> None:
    pack = one(root, 10, "*.pack")
    pack.write_bytes(pack.read_bytes() + b"\0")
    one(root, 20, "*-r0000.json").unlink()
    result = run("verify", root)
    assert result.exit_code == 1
    assert f"{pack.name} has {pack.stat().st_size} bytes, the manifest says" in result.stdout
    assert "a000001-r0000.json is missing" in result.stdout
    assert result.stdout.endswith("3 checkpoints read, 2 damaged\n")


def test_a_damaged_record_of_an_attempt_is_reported(root: Path) -> None:
    flip(root / "attempts" / "000001", 5)
    result = run("verify", root)
    assert result.exit_code == 1
    assert "damaged  record of attempt 1\n  attempts/000001: hash is" in result.stdout
    found = run_json("verify", root, code=1)
    assert found["ok"] is False
    assert [f["object"] for f in found["attempts"]] == ["attempts/000001"]


def test_only_the_step_asked_for_is_read(root: Path) -> None:
    flip(one(root, 20, "*.pack"), 0)
    assert run("verify", root, "--step", 10).exit_code == 0
    assert run("verify", root, "--step", 20).exit_code == 1


def test_checkpoints_of_other_runs_are_read_with_all(root: Path) -> None:
    bring_foreign(root, 77)
    flip(one(root, 77, "*.pack"), 0)
    assert run("verify", root).exit_code == 0
    found = run_json("verify", root, "--all", code=1)["checkpoints"]
    assert [(row["step"], row["state"]) for row in found][-1] == (77, "damaged")


def test_a_medium_that_fails_is_a_finding(root: Path) -> None:
    result = run("verify", f"faulty+{root.as_uri()}?op=read&name=*20/*.pack&times=0&do=EIO")
    assert result.exit_code == 1
    assert "damaged  step 20 (attempt 1)" in result.stdout
    assert "Input/output error (injected)" in result.stdout
    assert f"tensors: {BIG}" in result.stdout


def test_a_checkpoint_removed_while_it_is_read_is_no_damage(root: Path) -> None:
    repository, at = open_repository(open_store(str(root))), CheckpointId(1, 20)
    one(root, 20, "*.pack").unlink()
    assert examine(repository, at)[0] == "damaged"
    one(root, 20, "*MANIFEST.json").unlink()
    assert examine(repository, at) == ("removed", [])


# --- prune ------------------------------------------------------------------


@pytest.fixture
def long(trained: Path, tmp_path: Path) -> Path:
    """Steps 10 to 60; the score is best at 20."""
    return shutil.copytree(trained / "long", tmp_path / "long")


@pytest.mark.parametrize(
    ("options", "left"),
    [
        (["--keep-last", 1], [60]),
        (["--keep-last", 2], [50, 60]),
        (["--keep-last", 99], [10, 20, 30, 40, 50, 60]),
        (["--keep-last", 1, "--keep-every", 30], [30, 60]),
        (["--keep-last", 1, "--keep-best", 1, "--monitor", "score"], [20, 60]),
        (["--keep-last", 1, "--keep-best", 2, "--monitor", "loss", "--mode", "max"], [10, 20, 60]),
    ],
)
def test_what_retention_does_not_keep_is_removed(
    long: Path, options: list[object], left: list[int]
) -> None:
    dry = run_json("prune", long, *options, "--dry-run")
    assert steps(long) == [10, 20, 30, 40, 50, 60]
    assert [row["step"] for row in dry["kept"]] == left
    done = run_json("prune", long, *options, "--yes")
    assert done["removed"] == dry["removed"]
    assert steps(long) == left
    names = only_files(long)
    assert {n.split("/")[0] for n in names if n.startswith("step-")} == {
        f"step-{step:08d}" for step in left
    }
    assert run("verify", long).exit_code == 0


def test_prune_says_what_goes_and_what_stays(long: Path) -> None:
    result = run("prune", long, "--keep-last", 2, "--yes")
    assert result.exit_code == 0
    rows = [line.split() for line in result.stdout.splitlines()]
    assert [(r[0], r[-1]) for r in rows[1:7]] == [
        ("10", "goes"),
        ("20", "goes"),
        ("30", "goes"),
        ("40", "goes"),
        ("50", "stays"),
        ("60", "stays"),
    ]
    assert result.stdout.splitlines()[-1].startswith("removed 4 checkpoints (")
    again = run("prune", long, "--keep-last", 2, "--yes")
    assert again.exit_code == 0
    assert again.stdout.splitlines()[-1] == "nothing to remove"


def test_without_a_terminal_and_without_yes_nothing_is_removed(long: Path) -> None:
    before = only_files(long)
    result = process("prune", long, "--keep-last", 1)
    assert result.returncode == 2
    assert "--yes" in result.stderr
    assert "nothing was removed" in result.stderr
    assert only_files(long) == before


@pytest.mark.parametrize(("answer", "left"), [("n", [10, 20, 30]), ("y", [30])])
def test_at_a_terminal_it_asks(root: Path, answer: str, left: list[int]) -> None:
    controller, terminal = pty.openpty()
    try:
        os.write(controller, f"{answer}\n".encode())
        result = process("prune", root, "--keep-last", 1, stdin=terminal)
    finally:
        os.close(terminal)
        os.close(controller)
    assert result.returncode == 0, result.stderr
    assert "Remove 2 checkpoints (" in result.stderr
    assert ("nothing was removed" in result.stderr) == (answer == "n")
    assert steps(root) == left


def test_wrong_usage_exits_with_2_and_removes_nothing(long: Path) -> None:
    for options, said in [
        ([], "--leftovers"),
        (["--keep-last", 0], "keep_last: expected an integer from 1 on, found 0"),
        (["--keep-every", 10], "keep_last: expected a number with keep_every"),
        (["--keep-last", 1, "--keep-best", 1], "keep_best and monitor: expected both"),
        (["--keep-last", 1, "--monitor", "loss"], "keep_best and monitor: expected both"),
        (["--keep-last", 1, "--keep-best", 1, "--monitor", "lsos"], "did you mean 'loss'?"),
        (["--keep-last", 1, "--mode", "most"], "--mode"),
        (["--keep-lots"], "--keep-lots"),
    ]:
        result = run("prune", long, *options, "--yes")
        assert result.exit_code == 2, options
        assert said in result.stderr, options
    assert steps(long) == [10, 20, 30, 40, 50, 60]


def test_abandoned_branches_go_only_when_named(root: Path) -> None:
    branch(root)
    kept = run_json("prune", root, "--keep-last", 1, "--yes")["kept"]
    # Step 10 is where the newest attempt took over: it stays too.
    assert {(row["step"], row["state"]) for row in kept} == {
        (10, "ok"),
        (15, "newest"),
        (20, "abandoned"),
        (30, "abandoned"),
    }
    removed = run_json("prune", root, "--abandoned", "--yes")["removed"]
    assert [row["step"] for row in removed] == [20, 30]
    assert steps(root) == [10, 15]


def test_other_starts_go_only_when_named_and_other_runs_never(root: Path) -> None:
    start_another(root, 5)
    bring_foreign(root, 77)
    run_json("prune", root, "--keep-last", 1, "--abandoned", "--damaged", "--leftovers", "--yes")
    assert states(root) == {
        (1, 10): "separate",
        (1, 20): "separate",
        (1, 30): "separate",
        (1, 77): "foreign",
        (2, 5): "newest",
    }
    run_json("prune", root, "--separate", "--yes")
    assert states(root) == {(1, 77): "foreign", (2, 5): "newest"}


def test_what_is_another_start_is_not_guessed_from_a_damaged_record(root: Path) -> None:
    train(root, 40)
    record = root / "attempts" / "000002"
    flip(record, 5)
    result = run("prune", root, "--separate", "--yes")
    assert result.exit_code == 1
    assert "attempts/000002" in result.stderr
    assert steps(root) == [10, 20, 30, 40]


def test_what_cannot_be_read_is_not_taken_for_damaged(root: Path) -> None:
    before = only_files(root)
    url = f"faulty+{root.as_uri()}?op=open&name=*20/*MANIFEST.json&times=0&do=EIO"
    result = run("prune", url, "--damaged", "--yes")
    assert result.exit_code == 1
    assert "Input/output error (injected)" in result.stderr
    url = f"faulty+{root.as_uri()}?op=open&name=attempts/*&times=0&do=EIO"
    assert run("prune", url, "--keep-last", 1, "--abandoned", "--yes").exit_code == 1
    assert only_files(root) == before


def test_a_record_that_cannot_be_read_keeps_nobody_from_looking(root: Path) -> None:
    url = f"faulty+{root.as_uri()}?op=open&name=attempts/*&times=0&do=EIO"
    assert steps(url) == [10, 20, 30]
    result = run("verify", url)
    assert result.exit_code == 1
    assert "damaged  record of attempt 1" in result.stdout
    assert "Input/output error (injected)" in result.stdout


def test_damaged_checkpoints_go_only_when_named_and_newer_ones_never(long: Path) -> None:
    one(long, 10, "*.pack").unlink()
    flip(one(long, 20, "*MANIFEST.json"), 40)
    make_newer(one(long, 30, "*MANIFEST.json"))
    run_json("prune", long, "--keep-last", 99, "--leftovers", "--yes")
    assert states(long, code=1)[(1, 10)] == states(long, code=1)[(1, 20)] == "damaged"
    removed = run_json("prune", long, "--damaged", "--yes")["removed"]
    assert [(row["step"], row["state"]) for row in removed] == [(10, "damaged"), (20, "damaged")]
    assert not (long / "step-00000010").exists()
    assert not (long / "step-00000020").exists()
    assert states(long, code=1) == {
        (1, 30): "newer",
        (1, 40): "ok",
        (1, 50): "ok",
        (1, 60): "newest",
    }
    assert one(long, 30, "*.pack").exists()


def test_nothing_goes_while_the_newest_checkpoint_is_damaged(long: Path) -> None:
    before = only_files(long)
    pack = one(long, 60, "*.pack")
    flip(pack, big_offset(long, 60))
    result = run("prune", long, "--keep-last", 1, "--yes")
    assert result.exit_code == 1
    assert "step 60 (attempt 1)" in result.stderr
    assert pack.name in result.stderr
    assert only_files(long) == before
    assert run("prune", long, "--keep-last", 1, "--yes", "--no-verify").exit_code == 0
    assert steps(long) == [60]


def test_left_overs_go_but_not_those_of_the_newest_attempt(root: Path) -> None:
    with asymcheck.Checkpointer(root, state=state_of()) as ckpt:
        ckpt.restore()
        # What an earlier attempt left, and what a save that is under way has written so far.
        old = root / "step-00000040" / "a000001-r0000-0001.pack"
        new = root / "step-00000040" / "a000002-r0000-0001.pack"
        old.parent.mkdir()
        old.write_bytes(b"old")
        new.write_bytes(b"new")
        dry = run_json("prune", root, "--leftovers", "--dry-run")
        assert dry["leftovers"] == ["step-00000040/a000001-r0000-0001.pack"]
        assert old.exists()
        result = run("prune", root, "--leftovers", "--yes")
        assert result.exit_code == 0
        assert "left over, goes: step-00000040/a000001-r0000-0001.pack" in result.stdout
        assert not old.exists()
        assert new.read_bytes() == b"new"
    assert steps(root) == [10, 20, 30]


def test_what_the_newest_attempt_continued_from_stays_before_its_first_save(root: Path) -> None:
    with asymcheck.Checkpointer(root, state=state_of()) as ckpt:
        ckpt.restore(10)
        assert run("prune", root, "--keep-last", 1, "--yes").exit_code == 0
        assert steps(root) == [10, 30]
        ckpt.save(15)
    assert steps(root) == [10, 15]
    assert run("verify", root).exit_code == 0


def test_a_job_trains_on_while_its_checkpoints_are_pruned(root: Path) -> None:
    with asymcheck.Checkpointer(root, state=state_of(), keep_last=3) as ckpt:
        ckpt.restore()
        ckpt.save(40)
        ckpt.wait()
        assert run("prune", root, "--keep-last", 1, "--yes").exit_code == 0
        ckpt.save(50)
        ckpt.wait()
    # Step 30 is where attempt 2 took over: it stayed although --keep-last was 1.
    assert steps(root) == [30, 40, 50]
    again = asymcheck.Checkpointer(root, state=state_of(7))
    assert again.restore() == 50
    again.close()


def test_what_was_not_shown_is_not_removed_after_the_answer(root: Path) -> None:
    repository = open_repository(open_store(str(root)))
    wanted = Wanted(Retention(keep_last=1))
    shown = plan_prune(repository, wanted)
    train(root, 40, 50)
    now = plan_prune(repository, wanted)
    assert [row.at.step for row in now.gone] == [10, 20, 40]
    assert [row.at.step for row in now.agreed(shown).gone] == [10, 20]


def test_a_removal_that_fails_is_one_message_and_leaves_whole_checkpoints(long: Path) -> None:
    url = f"faulty+{long.as_uri()}?op=delete&at=2&do=EIO"
    result = run("prune", url, "--keep-last", 1, "--yes")
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert "Input/output error (injected)" in result.stderr
    assert run("verify", long).exit_code == 0
    assert run("prune", long, "--keep-last", 1, "--yes").exit_code == 0
    assert steps(long) == [60]


# --- as a process, in pipes and on terminals --------------------------------


def test_no_command_imports_torch_or_numpy(root: Path) -> None:
    code = (
        "import json, sys; from asymcheck.cli import app\n"
        "for args in json.loads(sys.argv[1]):\n"
        "    try: app(args)\n"
        "    except SystemExit as end: assert end.code == 0, args\n"
        "print(sorted({'torch', 'numpy'} & set(sys.modules)), file=sys.stderr)\n"
    )
    commands = [["ls"], ["show"], ["verify"], ["prune", "--keep-last", "1", "--yes"]]
    args = json.dumps([[c[0], str(root), *c[1:]] for c in commands])
    result = subprocess.run(
        [sys.executable, "-c", code, args], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == "[]\n"


def test_the_exit_status_of_the_process_is_0_1_or_2(root: Path) -> None:
    assert process("verify", root).returncode == 0
    flip(one(root, 20, "*.pack"), 0)
    damaged = process("verify", root)
    assert damaged.returncode == 1
    assert damaged.stderr == ""
    missing = process("ls", root / "nowhere")
    assert missing.returncode == 1
    assert "Traceback" not in missing.stderr
    assert process("ls").returncode == 2
    assert process("frobnicate", root).returncode == 2


def test_the_installed_command_is_this_one(root: Path) -> None:
    result = subprocess.run(
        [Path(sys.executable).with_name("asymcheck"), "--version"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (result.returncode, result.stdout) == (0, f"{asymcheck.__version__}\n")


def test_a_reader_that_goes_away_changes_neither_exit_status_nor_errors(root: Path) -> None:
    def into_closed_pipe(*args: object) -> tuple[int, str]:
        read, write = os.pipe()
        os.close(read)
        try:
            result = process(*args, stdout=write)
        finally:
            os.close(write)
        return result.returncode, result.stderr

    assert into_closed_pipe("ls", root) == (0, "")
    assert into_closed_pipe("show", root, "--json") == (0, "")
    assert into_closed_pipe("prune", root, "--keep-last", 2, "--yes") == (0, "")
    assert steps(root) == [20, 30]
    flip(one(root, 20, "*.pack"), 0)
    assert into_closed_pipe("verify", root) == (1, "")


def test_in_a_pipe_there_are_no_colours_and_no_name_is_cut(tmp_path: Path) -> None:
    key = "layer_" * 40
    with asymcheck.Checkpointer(tmp_path / "r", state={"m": {key: torch.zeros(3)}}) as ckpt:
        ckpt.save(1, metrics={key: 1.0})
    narrow = {**ENVIRONMENT, "COLUMNS": "40", "TERM": "xterm-256color"}
    for command in ("ls", "show"):
        out = process(command, tmp_path / "r", env=narrow).stdout
        assert key in out
        assert "\x1b" not in out
        assert all(line == line.rstrip() for line in out.splitlines())


def test_on_a_terminal_a_table_is_coloured_and_folds_long_names(tmp_path: Path) -> None:
    key = "".join(f"{i:03d}" for i in range(60))
    with asymcheck.Checkpointer(tmp_path / "r", state={"m": {key: torch.zeros(3)}}) as ckpt:
        ckpt.save(1)
    assert "\x1b[32mnewest" in on_terminal("ls", tmp_path / "r")
    shown = on_terminal("show", tmp_path / "r", "--match", "m/*")
    lines = shown.splitlines()
    rule = next(i for i, line in enumerate(lines) if line.startswith("───"))
    end = next(i for i, line in enumerate(lines) if line.startswith("1 tensor"))
    rows = lines[rule + 1 : end]
    assert "".join(row.split()[0] for row in rows) == f"m/{key}"
    assert len(rows) > 1
    assert max(map(len, rows)) <= 70
    plain = on_terminal("ls", tmp_path / "r", NO_COLOR="1")
    assert "newest" in plain
    assert "\x1b[3" not in plain


def on_terminal(*args: object, **environment: str) -> str:
    """What the command writes to a terminal of 70 columns."""
    controller, terminal = pty.openpty()
    env = {**ENVIRONMENT, "TERM": "xterm-256color", "COLUMNS": "70", **environment}
    try:
        result = process(*args, stdout=terminal, env=env)
        assert result.returncode == 0, result.stderr
        os.set_blocking(controller, False)
        return os.read(controller, 1 << 16).decode()
    finally:
        os.close(terminal)
        os.close(controller)


def test_a_very_long_table_is_plain_on_a_terminal_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", TerminalLike())
    rows = [["k" * 500, str(i)] for i in range(1001)]
    lines = table_text(["key", ">n"], rows).splitlines()
    assert lines[-1] == "k" * 500 + "  1000"
    assert len(lines) == 1002
    assert "k" * 500 not in table_text(["key", ">n"], rows[:3])


class TerminalLike(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_names_cannot_command_the_terminal_and_json_has_them_as_they_are(tmp_path: Path) -> None:
    key = "a\x1b[2Jb\nc\u202e"
    with asymcheck.Checkpointer(tmp_path / "r", state={"m": {key: torch.zeros(3)}}) as ckpt:
        ckpt.save(1, metrics={key: 1.0})
    for command in ("ls", "show"):
        text = run(command, tmp_path / "r").stdout
        assert "\x1b" not in text
        assert r"a\x1b[2Jb\nc\u202e" in text
    keys = [row["key"] for row in run_json("show", tmp_path / "r")["tensors"]]
    assert f"m/{key}" in [k.replace("%5B", "[") for k in keys]
    assert list(run_json("ls", tmp_path / "r")["checkpoints"][0]["metrics"]) == [key]


def test_an_encoding_that_lacks_a_character_is_no_error(tmp_path: Path) -> None:
    with asymcheck.Checkpointer(tmp_path / "r", state={"m": {"größe": torch.zeros(3)}}) as ckpt:
        ckpt.save(1)
    result = process("show", tmp_path / "r", env={**ENVIRONMENT, "PYTHONIOENCODING": "ascii"})
    assert (result.returncode, result.stderr) == (0, "")
    assert r"m/gr\xf6\xdfe" in result.stdout
