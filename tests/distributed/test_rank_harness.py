"""The harness itself: what ranks say arrives, their errors too, and no world hangs."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from asymcheck.testing.ranks import check_all, run_ranks


@pytest.mark.parametrize("world", [1, 2, 4])
def test_each_rank_runs_in_one_world_and_says_what_it_has(world) -> None:
    def work(rank, say):
        total = torch.tensor([rank + 1])
        dist.all_reduce(total)
        say([rank, dist.get_world_size(), int(total)])

    said = check_all(run_ranks(world, work))
    assert said == [[[r, world, world * (world + 1) // 2]] for r in range(world)]


def test_what_a_rank_raises_is_told_with_its_rank() -> None:
    def work(rank, say):
        if rank == 1:
            raise RuntimeError("the floor is wet")

    outcomes = run_ranks(2, work)
    assert outcomes[0].status == 0
    assert "the floor is wet" in outcomes[1].error
    with pytest.raises(AssertionError, match="rank 1 ended"):
        check_all(outcomes)


def test_a_rank_is_killed_once_it_said_the_word_and_not_before() -> None:
    def work(rank, say):
        say("before")
        say("now")
        if rank == 1:
            time.sleep(600)

    first, second = run_ranks(2, work, kill={1: "now"})
    assert first.check() == ["before", "now"]
    assert second.was_killed
    assert second.said == ["before", "now"]


def test_a_rank_that_never_ends_is_killed_and_named_and_shows_where_it_was(capfd) -> None:
    def work(rank, say):
        def where_it_hangs():
            time.sleep(600)

        if rank == 1:
            where_it_hangs()

    with pytest.raises(AssertionError, match=r"rank 1: .*still running"):
        run_ranks(2, work, timeout_s=8)
    assert "in where_it_hangs" in capfd.readouterr().err


def test_a_collective_that_lacks_a_rank_raises_in_bounded_time() -> None:
    def work(rank, say):
        if rank == 0:
            try:
                dist.all_reduce(torch.ones(1))
            except RuntimeError:
                say("raised")
        else:
            time.sleep(3)

    assert check_all(run_ranks(2, work, collective_timeout_s=2)) == [["raised"], []]
