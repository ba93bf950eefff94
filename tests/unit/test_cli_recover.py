"""``recover``: what it says the next start does is what the next start does."""

from __future__ import annotations

import json
import os
import signal
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from asymcheck import Checkpointer, Strategy, Tier
from asymcheck.cli import app
from asymcheck.errors import CheckpointWarning
from asymcheck.planning.cadence import EverySteps
from asymcheck.planning.policy import Admission
from asymcheck.planning.retention import CheckpointId
from asymcheck.planning.tiers import Placement
from asymcheck.storage.names import index_name, manifest_name, pack_name
from asymcheck.testing.children import Say, run_in_child

KINDS = {"manifest": manifest_name, "pack": lambda at: pack_name(at, 0, 1)}


def state(value: float = 0.0) -> dict[str, torch.Tensor]:
    return {"w": torch.full((20_000,), value)}


def run(*args: object) -> Result:
    return CliRunner().invoke(app, ["recover", *map(str, args)])


def report(*args: object, code: int = 0) -> dict[str, Any]:
    done = run(*args, "--json")
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)


def restored(root: Path, *tiers: Path) -> tuple[int, float, Any]:
    live = state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        with Checkpointer(root, state=live, tiers=tiers, read_only=True) as ckpt:
            return ckpt.restore(), float(live["w"][0]), ckpt.report


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Steps 1 and 2, both in the root and in a tier."""
    live = state()
    tier = tmp_path / "tier"
    tiers = (Tier(str(tier), name=str(tier)),)
    with Checkpointer(tmp_path / "root", state=live, tiers=tiers, persist="thread") as ckpt:
        ckpt.restore()
        for step in (1, 2):
            live["w"].fill_(step)
            ckpt.save(step)
            assert ckpt.wait(tier=str(tier))
    return tmp_path / "root"


@pytest.fixture
def tier(root: Path) -> Path:
    return root.parent / "tier"


def test_the_newest_comes_out_of_the_root_where_it_is_whole(root: Path, tier: Path) -> None:
    said = report(root, "--tier", tier, "--dry-run")
    assert said["chosen"] == {"step": 2, "attempt": 1}
    given = {served["tier"].rpartition("/")[2]: served["nbytes"] for served in said["served"]}
    assert given["root"] > 0
    assert given["tier"] == 0
    assert said["damaged"] == []


@pytest.mark.parametrize("kind", KINDS)
def test_damage_in_the_root_is_named_and_a_tier_gives_the_rest(
    root: Path, tier: Path, kind: str
) -> None:
    name = KINDS[kind](CheckpointId(1, 2))
    flip(root / name)
    said = report(root, "--tier", tier, "--dry-run")
    assert said["chosen"] == {"step": 2, "attempt": 1}
    assert [bad["name"] for bad in said["damaged"]] == [name]
    assert {s["tier"].rpartition("/")[2]: s["nbytes"] > 0 for s in said["served"]}["tier"]
    step, value, found = restored(root, tier)
    assert (step, value) == (2, 2.0)
    assert {bad.name for bad in found.damaged} == {name}


def test_damage_in_every_tier_is_passed_over_and_says_why(root: Path, tier: Path) -> None:
    name = pack_name(CheckpointId(1, 2), 0, 1)
    flip(root / name)
    flip(tier / name)
    said = report(root, "--tier", tier, "--dry-run")
    assert said["chosen"] == {"step": 1, "attempt": 1}
    first, second = said["candidates"]
    assert (first["step"], second["why_not"]) == (2, None)
    assert name in first["why_not"]
    text = run(root, "--tier", tier, "--dry-run").stdout
    assert "step 2 (attempt 1): passed over" in text
    assert "goes on from step 1 (attempt 1), out of tiers" in text
    assert restored(root, tier)[:2] == (1, 1.0)


def test_a_dry_run_changes_nothing(root: Path, tier: Path) -> None:
    flip(root / pack_name(CheckpointId(1, 2), 0, 1))
    before = {path: path.read_bytes() for path in root.parent.rglob("*") if path.is_file()}
    report(root, "--tier", tier, "--dry-run")
    assert {path: path.read_bytes() for path in root.parent.rglob("*") if path.is_file()} == before


def test_what_is_damaged_at_home_is_whole_again_afterwards(root: Path, tier: Path) -> None:
    name = pack_name(CheckpointId(1, 2), 0, 1)
    flip(root / name)
    said = report(root, "--tier", tier, "--yes")
    assert [(end["name"], end["why_not"]) for end in said["healed"]] == [(name, "")]
    assert (root / name).read_bytes() == (tier / name).read_bytes()
    assert restored(root)[:2] == (2, 2.0)


def test_a_new_host_gets_the_newest_checkpoint_of_a_tier(root: Path, tier: Path) -> None:
    new = root.parent / "new"
    said = report(new, "--tier", tier, "--yes")
    assert said["chosen"] == {"step": 2, "attempt": 1}
    assert restored(new)[:2] == (2, 2.0)


def test_nothing_whole_is_a_failure_that_names_what_is_damaged(root: Path, tier: Path) -> None:
    for place in (root, tier):
        for step in (1, 2):
            flip(place / pack_name(CheckpointId(1, step), 0, 1))
    said = report(root, "--tier", tier, "--dry-run", code=1)
    assert said["chosen"] is None
    assert len(said["damaged"]) == 4
    assert "no checkpoint is whole" in run(root, "--tier", tier, "--dry-run").stdout


def test_nobody_who_could_agree_changes_nothing(root: Path, tier: Path) -> None:
    done = run(root, "--tier", tier)
    assert done.exit_code == 2
    assert "pass --yes" in done.stderr


def save_in_memory_and_die(root: str, say: Say) -> None:
    live = state()
    strategy = Strategy(
        admission=Admission(max_in_flight=2), placement=Placement(durable=EverySteps(1000))
    )
    ckpt = Checkpointer(root, state=live, strategy=strategy, persist="process")
    ckpt.restore()
    live["w"].fill_(3.0)
    assert ckpt.save(3).durable.result(60).tier == "memory"
    say("sealed")
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.crash
def test_a_whole_slot_of_a_dead_trainer_is_the_nearest(root: Path, tier: Path) -> None:
    assert run_in_child(partial(save_in_memory_and_die, str(root))).was_killed
    said = report(root, "--tier", tier, "--dry-run")
    assert (said["chosen"], said["source"]) == ({"step": 3, "attempt": 2}, "shared memory")
    assert [slot["fate"] for slot in said["slots"] if slot["step"] == 3] == ["persisted"]
    assert report(root, "--tier", tier, "--yes")["chosen"] == {"step": 3, "attempt": 2}
    assert restored(root)[:2] == (3, 3.0)


# --- verify with tiers ---------------------------------------------------------------


def verified(*args: object, code: int = 0) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["verify", *map(str, args), "--json"])
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


def test_verify_reads_every_copy_in_every_tier(root: Path, tier: Path) -> None:
    said = verified(root, "--tier", tier)
    assert (said["ok"], said["steps"], said["damaged"]) == (True, [1, 2], [])
    pack, manifest = pack_name(CheckpointId(1, 1), 0, 1), manifest_name(CheckpointId(1, 2))
    flip(tier / pack)  # what no restore would read
    flip(root / manifest)
    said = verified(root, "--tier", tier, code=1)
    found = {(Path(bad["tier"]).name, bad["name"]) for bad in said["damaged"]}
    assert found == {("tier", pack), ("root", manifest)}
    text = CliRunner().invoke(app, ["verify", str(root), "--tier", str(tier)])
    assert text.exit_code == 1
    assert text.stdout.count("1 object damaged") == 2
    assert f"damaged in {tier}: {pack}" in text.stdout
    assert "2 steps read" in text.stdout


def test_verify_heals_each_tier_from_the_others(root: Path, tier: Path) -> None:
    before = {path: path.read_bytes() for path in root.parent.rglob("*") if path.is_file()}
    pack, index = pack_name(CheckpointId(1, 1), 0, 1), index_name(CheckpointId(1, 2), 0)
    for path in (tier / pack, root / index, tier / "RUN.json"):
        flip(path)
    said = verified(root, "--tier", tier, "--heal")
    assert said["ok"]
    healed = {(Path(end["tier"]).name, end["name"], end["why_not"]) for end in said["healed"]}
    assert healed == {("tier", pack, ""), ("root", index, ""), ("tier", "RUN.json", "")}
    assert {path: path.read_bytes() for path in before} == before
    assert verified(root, "--tier", tier, "--heal")["healed"] == []


def test_a_checkpoint_that_a_tier_does_not_have_is_no_damage(root: Path, tier: Path) -> None:
    (tier / manifest_name(CheckpointId(1, 1))).unlink()
    assert verified(root, "--tier", tier)["ok"]


def test_what_is_damaged_in_every_tier_stays_so_and_is_said(root: Path, tier: Path) -> None:
    pack = pack_name(CheckpointId(1, 2), 0, 1)
    flip(root / pack)
    flip(tier / pack)
    said = verified(root, "--tier", tier, "--heal", code=1)
    assert not said["ok"]
    assert {end["name"] for end in said["healed"] if end["why_not"]} == {pack}
    assert verified(root, "--tier", tier, "--step", 1)["steps"] == [1]
    done = CliRunner().invoke(app, ["verify", str(root), "--tier", str(tier), "--step", "7"])
    assert done.exit_code == 1
    assert "no checkpoint of step 7" in done.output


def test_a_tier_that_cannot_be_read_is_told_and_no_tier_to_heal_from_is_an_error(
    root: Path, tier: Path
) -> None:
    gone = f"faulty+file://{tier}?times=0"
    said = verified(root, "--tier", gone, code=1)
    ((away,), damaged) = (said["unreachable"], said["damaged"])
    assert "injected" in away["why"]
    assert damaged == []
    done = CliRunner().invoke(app, ["verify", str(root), "--heal"])
    assert done.exit_code == 2
    assert "--tier" in done.output
