"""Ranks that share a home and a tier: rank 0 makes the copies, all see the same places."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from asymcheck import Checkpointer, Tier, writing
from asymcheck.decoding import verify
from asymcheck.errors import CheckpointWarning, OptionError
from asymcheck.storage.repository import open_repository
from asymcheck.storage.store import open_store
from asymcheck.testing.children import Say
from asymcheck.testing.ranks import check_all, run_ranks

WAIT_S = 30.0


def checkpointer(rank: int, root: object, *tiers: object, **options: object) -> Checkpointer:
    return Checkpointer(
        root,  # type: ignore[arg-type]
        tiers=tiers,  # type: ignore[arg-type]
        **{  # type: ignore[arg-type]
            "state": {"own": torch.full((70_000,), float(rank))},
            "timeout_s": 20.0,
            **options,
        },
    )


@pytest.mark.parametrize("persist", ["thread", "process"])
def test_a_tier_gets_what_all_ranks_saved(tmp_path: Path, persist: str) -> None:
    far = str(tmp_path / "far")

    def work(rank: int, say: Say) -> None:
        with checkpointer(rank, tmp_path / "home", far, persist=persist, keep_last=1) as ckpt:
            ckpt.restore()
            for step in (1, 2):
                ckpt.save(step)
            say(ckpt.wait(WAIT_S, tier=far))
            ckpt.save(3)
        (state,) = ckpt.tier_states()
        say([state.name == far, state.newest_step])

    first, second = check_all(run_ranks(2, work))
    assert first == [True, [True, 3]]
    assert second == [True, [True, 0]]  # rank 0 knows
    repository = open_repository(open_store(far))
    newest = repository.lineage()[-1]
    assert newest.step == 3
    assert len(repository.survey().committed[newest].indexes) == 2
    assert list(verify(repository, newest)) == []


def test_a_tier_that_is_gone_stops_no_rank(tmp_path: Path) -> None:
    gone = f"faulty+file://{tmp_path}/far?times=0"

    def work(rank: int, say: Say) -> None:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            ckpt = checkpointer(rank, tmp_path / "home", gone, persist="thread")
            say(ckpt.restore())
            ckpt.save(1)
            say(ckpt.wait(WAIT_S))
            ckpt.close()
        said = [str(w.message) for w in heard if w.category is CheckpointWarning]
        say(sorted("could not be reached" in text for text in said))

    first, second = check_all(run_ranks(2, work))
    assert first[:2] == second[:2] == [0, True]
    assert any(first[2])  # type: ignore[arg-type]
    assert second[2] == []
    assert [at.step for at in open_repository(open_store(str(tmp_path / "home"))).lineage()] == [1]


def test_a_tier_that_is_another_place_on_another_rank_is_refused_by_all(tmp_path: Path) -> None:
    def work(rank: int, say: Say) -> None:
        # As a path is that each host has for itself.
        far = Tier(str(tmp_path / f"far-{rank}"), name="far")
        ckpt = checkpointer(rank, tmp_path / "home", far, persist="thread")
        with pytest.raises(OptionError, match="is another place on rank 1 than on rank 0"):
            ckpt.restore()
        say("refused")

    assert check_all(run_ranks(2, work)) == [["refused"], ["refused"]]


@pytest.mark.parametrize("where", ["home", "tier"])
def test_a_place_of_each_host_is_refused_where_ranks_run_on_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    own = f"file://{tmp_path}/own?scope=node"

    def work(rank: int, say: Say) -> None:
        monkeypatch.setattr(writing, "host", lambda: f"host {rank}")
        places = (own, ()) if where == "home" else (tmp_path / "home", (own,))
        with pytest.raises(OptionError, match=r"scope=node.* run on 2 hosts"):
            checkpointer(rank, places[0], *places[1])
        say("refused")

    assert check_all(run_ranks(2, work)) == [["refused"], ["refused"]]


def test_a_place_of_one_host_is_good_where_all_ranks_run_on_it(tmp_path: Path) -> None:
    own = f"file://{tmp_path}/own?scope=node"

    def work(rank: int, say: Say) -> None:
        with checkpointer(rank, own, persist="thread") as ckpt:
            ckpt.restore()
            ckpt.save(1)
        say("saved")

    assert check_all(run_ranks(2, work)) == [["saved"], ["saved"]]


def damage(root: Path, rank: int) -> Path:
    """Rot one bit of what a rank saved last."""
    (pack,) = root.glob(f"step-00000002/a000001-r{rank:04d}-0001.pack")
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 8
    pack.write_bytes(data)
    return pack


def save_two(tmp_path: Path) -> None:
    def work(rank: int, say: Say) -> None:
        own = torch.full((70_000,), float(rank))
        with checkpointer(
            rank, tmp_path / "home", Tier(str(tmp_path / "far"), name="far"), state={"own": own}
        ) as ckpt:
            ckpt.restore()
            for step in (1, 2):
                own.fill_(10.0 * step + rank)
                ckpt.save(step)
                assert ckpt.wait(WAIT_S, tier="far")
        say("saved")

    assert check_all(run_ranks(2, work)) == [["saved"], ["saved"]]


def restore_both(tmp_path: Path) -> list[list[object]]:
    """Of each rank: the step, a value of its state, what it met, and which tiers gave something."""

    def work(rank: int, say: Say) -> None:
        own = torch.zeros(70_000)
        with (
            warnings.catch_warnings(),
            checkpointer(
                rank, tmp_path / "home", Tier(str(tmp_path / "far"), name="far"), state={"own": own}
            ) as ckpt,
        ):
            warnings.simplefilter("ignore", CheckpointWarning)
            step = ckpt.restore()
            report = ckpt.report
        assert bool((own == own[0]).all())
        say([step, float(own[0])])
        say([[bad.tier == "far", bad.name, bad.kind] for bad in report.damaged])
        say([served.nbytes > 0 for served in report.served])
        say([[end.tier == "far", end.name, end.why_not] for end in report.healed])
        say([step for step, _ in report.skipped])

    return check_all(run_ranks(2, work))


def test_a_rank_whose_nearest_copy_is_damaged_falls_through_and_all_take_the_same_step(
    tmp_path: Path,
) -> None:
    save_two(tmp_path)
    pack = damage(tmp_path / "home", rank=1)
    name = str(pack.relative_to(tmp_path / "home"))
    first, second = restore_both(tmp_path)
    assert first == [[2, 20.0], [], [True, False], [], []]
    found = [[False, name, "damaged"]]
    assert second == [[2, 21.0], found, [True, True], [[False, name, ""]], []]
    assert pack.read_bytes() == (tmp_path / "far" / name).read_bytes()


def test_where_one_rank_has_no_whole_copy_all_take_the_step_before(tmp_path: Path) -> None:
    save_two(tmp_path)
    damage(tmp_path / "home", rank=1)
    damage(tmp_path / "far", rank=1)
    first, second = restore_both(tmp_path)
    assert (first[0], second[0]) == ([1, 10.0], [1, 11.0])
    assert first[4] == second[4] == [2]
    assert first[1] == []  # its own was whole
    assert sorted(found[0] for found in second[1]) == [False, True]  # type: ignore[index, attr-defined]
