"""What ranks tell each other arrives, ends alike on all of them, and never without a bound."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from time import monotonic

import pytest
import torch
import torch.distributed as dist

from asymcheck.agreement import check_alike
from asymcheck.errors import OptionError, RankFailed, StateError
from asymcheck.ranks import AHEAD_STEPS, Alone, Together, alike
from asymcheck.testing.ranks import check_all, run_ranks

WORLDS = pytest.mark.parametrize("world", [2, 4])
TIMEOUT_S = 3.0
LATE_S = 30.0  # far more than a timeout, far less than for ever


def raised(call):
    """The text of what a call raises, and how long it took."""
    start_s = monotonic()
    with pytest.raises(RankFailed) as caught:
        call()
    assert monotonic() - start_s < LATE_S
    return list(caught.value.ranks), str(caught.value)


# --- meetings -----------------------------------------------------------------


@WORLDS
def test_each_rank_gets_what_each_rank_said_in_order(world) -> None:
    def work(rank, say):
        ranks = Together(None, TIMEOUT_S)
        for turn in range(5):
            say(ranks.exchange("a word", [rank, turn, "ü"]))
        ranks.close()

    expected = [[[r, turn, "ü"] for r in range(world)] for turn in range(5)]
    assert check_all(run_ranks(world, work)) == [expected] * world


@WORLDS
def test_rank_0_works_alone_and_all_get_what_it_found(world) -> None:
    def work(rank, say):
        ranks = Together(None, TIMEOUT_S)
        say(ranks.first("a number", lambda: [rank, os.getpid()]))
        say(os.getpid())
        ranks.close()

    said = check_all(run_ranks(world, work))
    assert [s[0] for s in said] == [[0, said[0][1]]] * world


@WORLDS
@pytest.mark.parametrize("bad", [0, 1])
def test_what_one_rank_raises_reaches_all_by_its_name(world, bad) -> None:
    def work(rank, say):
        ranks = Together(None, TIMEOUT_S)

        def fails():
            if rank == bad:
                raise OptionError("the floor is wet")

        if rank == bad:
            with pytest.raises(OptionError, match="the floor is wet"):
                ranks.each("a walk", fails)
        else:
            say(raised(lambda: ranks.each("a walk", fails)))
        say(ranks.exchange("what comes after", rank))  # and they still understand each other
        ranks.close()

    for rank, said in enumerate(check_all(run_ranks(world, work))):
        if rank != bad:
            ranks, text = said.pop(0)
            assert ranks == [bad]
            assert f"rank {bad} failed: OptionError: the floor is wet" in text
        assert said == [list(range(world))]


@WORLDS
def test_a_block_is_left_by_all_or_by_none(world) -> None:
    def work(rank, say):
        ranks = Together(None, TIMEOUT_S)
        with alike(ranks, "a good block"):
            say(rank)
        with pytest.raises((RankFailed, ZeroDivisionError)), alike(ranks, "a bad block"):
            1 / (rank - 1)
        ranks.close()

    assert check_all(run_ranks(world, work)) == [[r] for r in range(world)]


@WORLDS
def test_a_rank_that_makes_another_call_is_named_with_both_calls(world) -> None:
    def work(rank, say):
        ranks = Together(None, TIMEOUT_S)
        what = "save" if rank == 1 else "close"
        say(raised(lambda: ranks.exchange(what, None)))

    for rank, ((ranks, text),) in enumerate(check_all(run_ranks(world, work))):
        assert ranks == ([1] if rank != 1 else [0])
        assert "'save'" in text
        assert "'close'" in text


@WORLDS
def test_a_rank_that_does_not_come_is_named_within_the_timeout(world) -> None:
    def work(rank, say):
        ranks = Together(None, TIMEOUT_S)
        if rank == 1:
            dist.barrier()  # the others come here after their timeout
            say(raised(lambda: ranks.exchange("a save", None)))
        else:
            say(raised(lambda: ranks.exchange("a save", None)))
            dist.barrier()
        dist.barrier()  # rank 0 lives until rank 1 has heard

    for rank, ((ranks, text),) in enumerate(check_all(run_ranks(world, work))):
        if rank == 1:
            assert "did not wait for rank 1" in text
        else:
            assert ranks == [1]
            assert "rank 1 did not answer within timeout_s=3 seconds" in text


@WORLDS
@pytest.mark.parametrize("dead", [0, 1])
def test_a_rank_that_was_killed_is_named_at_once(world, dead) -> None:
    def work(rank, say):
        ranks = Together(None, LATE_S)
        dist.barrier()
        if rank == dead:
            say("here")
            time.sleep(600)
        say(raised(lambda: ranks.exchange("a save", None)))

    outcomes = run_ranks(world, work, kill={dead: "here"})
    assert outcomes[dead].was_killed
    for rank, outcome in enumerate(outcomes):
        if rank != dead:
            ((ranks, text),) = outcome.check()
            assert ranks == [dead]
            assert f"rank {dead}" in text


def is_stopped(pid: int) -> bool:
    """Whether each of its threads has seen the signal."""
    states = [
        (task / "stat").read_text().rpartition(")")[2].split()[0]
        for task in Path(f"/proc/{pid}/task").iterdir()
    ]
    return set(states) == {"T"}


def test_a_stopped_rank_0_is_named_in_bounded_time(tmp_path: Path) -> None:
    pid = tmp_path / "pid"

    def work(rank, say):
        ranks = Together(None, TIMEOUT_S)
        if rank == 0:
            pid.write_text(str(os.getpid()))
            ranks.exchange("ready", None)
            time.sleep(600)
        ranks.exchange("ready", None)
        stopped = int(pid.read_text())
        try:
            os.kill(stopped, signal.SIGSTOP)
            while not is_stopped(stopped):  # its threads run on until each has seen it
                time.sleep(0.001)
            say(raised(lambda: ranks.look(1)))
            say(raised(lambda: ranks.exchange("more", None)))
        finally:
            os.kill(stopped, signal.SIGKILL)

    outcomes = run_ranks(2, work)
    for ranks, text in outcomes[1].check():
        assert ranks == [0]
        assert "rank 0" in text


def test_ranks_of_a_group_are_counted_in_it() -> None:
    def work(rank, say):
        members = [1, 3]
        group = dist.new_group(members)
        if rank in members:
            ranks = Together(group, TIMEOUT_S)
            say([ranks.rank, ranks.world, ranks.exchange("a word", rank)])
            ranks.close()

    said = check_all(run_ranks(4, work))
    assert said == [[], [[0, 2, [1, 3]]], [], [[1, 2, [1, 3]]]]


def test_several_worlds_of_words_beside_each_other_do_not_mix() -> None:
    def work(rank, say):
        one, other = Together(None, TIMEOUT_S), Together(None, TIMEOUT_S)
        say([one.exchange("a", [1, rank]), other.exchange("b", [2, rank])])
        one.close()
        say(other.exchange("c", rank))
        other.close()

    assert check_all(run_ranks(2, work)) == [[[[[1, 0], [1, 1]], [[2, 0], [2, 1]]], [0, 1]]] * 2


# --- announcements --------------------------------------------------------------


def step_by_step(ranks, steps, at=None, act=None):
    """Steps that depend on each other as updates do; returns what was due, with its step."""
    due = []
    for step in range(1, steps + 1):
        dist.all_reduce(torch.ones(1))
        if step == at:
            act()
        due += [[step, a.what, a.rank, a.why] for a in ranks.look(step)]
    return due


@WORLDS
@pytest.mark.parametrize("asker", [0, 1])
def test_what_one_rank_asks_for_is_seen_by_all_at_the_same_step(world, asker) -> None:
    def work(rank, say):
        ranks = Together(None, TIMEOUT_S)
        act = (lambda: ranks.ask("save", 5, "its cadence")) if rank == asker else lambda: None
        say(step_by_step(ranks, 12, 5, act))
        ranks.close()

    said = check_all(run_ranks(world, work))
    assert [s == said[0] for s in said] == [True] * world
    (((step, what, rank, why),),) = said[0]
    assert (what, rank, why) == ("save", asker, "its cadence")
    assert 5 + AHEAD_STEPS <= step <= 7 + AHEAD_STEPS


def test_askers_at_the_same_time_are_heard_once_for_each_wish() -> None:
    def work(rank, say):
        ranks = Together(None, TIMEOUT_S)

        def act():
            ranks.ask("raise", 5, f"rank {rank} failed")
            ranks.ask("drop", 5, f"rank {rank} dropped")

        say(step_by_step(ranks, 12, 5, act))
        ranks.close()

    said = check_all(run_ranks(4, work))
    assert [s == said[0] for s in said] == [True] * 4
    ((due),) = said[0]
    assert [what for _, what, _, _ in due].count("raise") <= 2
    assert sorted(rank for _, what, rank, _ in due if what == "drop") == [0, 1, 2, 3]


def test_what_was_half_announced_at_a_look_is_due_at_the_same_step() -> None:
    def work(rank, say):
        ranks = Together(None, TIMEOUT_S)
        due = []

        def turn(asks, looks, step):
            for what in asks if rank == 0 else ():
                ranks.ask(what, step, what)
            dist.barrier()
            if rank in looks:
                due.append([step, [a.what for a in ranks.look(step)]])
            dist.barrier()

        turn(["raise"], [0, 1], 5)
        turn(["drop"], [1], 6)  # rank 1 looks before rank 0 has said all
        turn(["save"], [0], 6)
        for step in range(7, 12):
            turn([], [0, 1], step)
        say(due)
        ranks.close()

    said = check_all(run_ranks(2, work))
    assert said[0] == said[1]
    ((found,),) = said[:1]
    heard = {what: step for step, whats in found for what in whats}
    due = {"raise": 5 + AHEAD_STEPS, "drop": 6 + AHEAD_STEPS, "save": 6 + AHEAD_STEPS}
    assert heard == due


def test_steps_with_gaps_are_due_at_the_first_call_after() -> None:
    def work(rank, say):
        ranks = Together(None, TIMEOUT_S)
        for step in (10, 20, 30):
            dist.all_reduce(torch.ones(1))
            if rank == 0 and step == 10:
                ranks.ask("save", step, "")
            say([step, [a.step for a in ranks.look(step)]])
        ranks.close()

    expected = [[10, []], [20, [10 + AHEAD_STEPS]], [30, []]]
    assert check_all(run_ranks(2, work)) == [expected] * 2


def test_a_rank_that_is_far_ahead_has_all_raise_and_does_not_save_alone() -> None:
    def work(rank, say):
        ranks = Together(None, TIMEOUT_S)
        if rank == 1:
            say([len(ranks.look(step)) for step in (1, 2, 3, 4, 5)])
        dist.barrier()
        if rank == 0:
            ranks.ask("save", 1, "")
        dist.barrier()
        due = step_by_step(ranks, 20) if rank == 0 else []
        if rank == 1:
            for step in range(6, 26):
                due += [[step, a.what, a.rank, a.why] for a in ranks.look(step)]
                dist.all_reduce(torch.ones(1))
        say([[what, by] for _, what, by, _ in due if what == "raise"])
        ranks.close()

    first, second = check_all(run_ranks(2, work))
    assert first == [[["raise", 1]]]
    assert second == [[0, 0, 0, 0, 0], [["raise", 1]]]


def test_looking_and_asking_use_no_collective_and_no_other_thread_of_ours_does() -> None:
    def work(rank, say):
        ranks = Together(None, TIMEOUT_S)
        me, seen = threading.get_ident(), []
        for name in ("broadcast_object_list", "all_gather_object", "all_reduce", "barrier"):
            setattr(dist, name, lambda *a, **k: seen.append(threading.get_ident()))
        for step in range(1, 6):
            ranks.look(step)
        ranks.exchange("a word", 1)
        ranks.close()
        say([seen == [], me == threading.main_thread().ident])

    assert check_all(run_ranks(2, work)) == [[[True, True]]] * 2


# --- alike or not -----------------------------------------------------------------


@WORLDS
def test_the_first_key_that_differs_is_named_with_both_ranks_on_all(world) -> None:
    def work(rank, say):
        ranks = Together(None, TIMEOUT_S)
        check_alike(ranks, "structure", lambda: {"a": [1, 2], "b": [3]})
        own = {"a": [1, 2], "b": [3], "c": [4]} if rank != 1 else {"a": [1, 2], "b": [7]}
        with pytest.raises(StateError) as caught:
            check_alike(ranks, "structure", lambda: own)
        say([caught.value.key, str(caught.value)])
        ranks.close()

    for ((key, text),) in check_all(run_ranks(world, work)):
        assert key == "b"
        assert "ranks 0 and 1" in text
        assert "[3]" in text
        assert "[7]" in text


def test_a_world_of_one_makes_every_call_for_free() -> None:
    ranks = Alone()
    assert ranks.exchange("a", 1) == [1]
    assert ranks.each("b", lambda: 2) == [2]
    assert ranks.first("c", lambda: 3) == 3
    assert ranks.look(4) == ()
    with alike(ranks, "d"):
        ranks.close()
