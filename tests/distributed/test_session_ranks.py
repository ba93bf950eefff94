"""Ranks that train together save together, fail together, and go on from the same step."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from asymcheck import Checkpointer
from asymcheck.errors import (
    CheckpointError,
    CheckpointWarning,
    OptionError,
    RankFailed,
    StateError,
    StoreError,
)
from asymcheck.planning.policy import Admission
from asymcheck.planning.strategies import Strategy
from asymcheck.storage.local import LocalStore
from asymcheck.storage.local_reading import OpenFile
from asymcheck.storage.repository import open_repository
from asymcheck.storage.store import open_store
from asymcheck.testing.ranks import check_all, run_ranks

HOWS = pytest.mark.parametrize("how", ["ddp", "fsdp2"])

SIDE = 256  # 256 KiB each: half of it is large enough to be copied behind the training


def digest(*tensors: torch.Tensor) -> str:
    """Of tensors as one process would have them; the same call on all ranks."""
    found = sha256()
    for tensor in tensors:
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        found.update(whole.detach().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


class Job:
    """A training of three layers whose data is from each rank's own generator."""

    def __init__(self, root: object, how: str = "ddp", **options: Any) -> None:
        torch.manual_seed(5)
        model = nn.Sequential(*(nn.Linear(SIDE, SIDE) for _ in range(3)))
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        if how == "fsdp2":
            for layer in model:
                fully_shard(layer)
            fully_shard(model)
        self.model = DistributedDataParallel(model) if how == "ddp" else model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        torch.manual_seed(100 + self.rank)
        self.checkpointer = Checkpointer(
            root,  # type: ignore[arg-type]
            state={"model": self.model, "optimizer": self.optimizer, **options.pop("more", {})},
            **{"timeout_s": 20.0, **options},
        )
        self.at = 0

    def restore(self, **options: Any) -> int:
        self.at = self.checkpointer.restore(**options)
        return self.at

    def update(self) -> None:
        """One step, which needs all ranks."""
        self.model(torch.randn(4, SIDE)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.at += 1

    def step(self) -> Any:
        self.update()
        return self.checkpointer.step(self.at)

    def whole(self) -> str:
        """Digest of model and optimizer, equal on all ranks."""
        state = self.optimizer.state
        moments = [t for p in self.model.parameters() for _, t in sorted(state[p].items())]
        return digest(*self.model.parameters(), *moments)

    def own(self) -> str:
        """Digest of the generator of this rank; draws nothing."""
        return digest(torch.get_rng_state())


def committed(root: Path) -> list[int]:
    return [at.step for at in open_repository(open_store(str(root))).survey().committed]


def quietly(call):
    """A call whose warnings are no part of the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        return call()


def end(job: Job) -> None:
    """Close it, whatever is left to tell."""
    with suppress(CheckpointError):
        quietly(job.checkpointer.close)


# --- the whole run ------------------------------------------------------------


def run_through(root: Path, how: str, steps: int):
    """A run that nothing happens to: what is live after each step, on each rank."""

    def work(rank, say):
        job = Job(root, how, every_steps=2)
        job.restore()
        while job.at < steps:
            job.step()
            say([job.at, job.whole(), job.own()])
        job.checkpointer.close()

    return check_all(run_ranks(2, work))


@HOWS
def test_a_run_resumes_bit_for_bit_on_as_many_ranks(tmp_path: Path, how: str) -> None:
    expected = run_through(tmp_path / "whole", how, 8)
    run_through(tmp_path / "cut", how, 4)
    assert committed(tmp_path / "cut") == [2, 4]
    assert run_through(tmp_path / "cut", how, 8) == [e[4:] for e in expected]


@HOWS
@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_killed_in_a_save_leaves_the_one_before_for_any_number_of_ranks(
    tmp_path: Path, how: str, killed: int
) -> None:
    expected = run_through(tmp_path / "whole", how, 6)
    root = tmp_path / "cut"

    def work(rank, say):
        job = Job(root, how, every_steps=2)
        job.restore()
        for _ in range(3):
            job.step()
        job.checkpointer.wait()
        if rank == killed:
            # Between two pieces of the copy: nothing of this save can be finished by anyone.
            job.checkpointer._snapshotter.copier.between = lambda: (
                say("in the middle"),
                time.sleep(600),
            )
        job.step()
        for _ in range(50):
            job.update()

    outcomes = run_ranks(2, work, kill={killed: "in the middle"}, collective_timeout_s=10)
    assert outcomes[killed].was_killed
    assert outcomes[1 - killed].status != 0
    assert committed(root) == [2]

    def look(rank, say):
        job = Job(root, how, read_only=True)
        start = quietly(job.restore)
        say([start, job.whole(), job.own() if job.world == 2 else ""])
        job.checkpointer.close()

    for world in (1, 4, 2):
        for rank, (found,) in enumerate(check_all(run_ranks(world, look))):
            assert found[:2] == expected[0][1][:2]
            if world == 2:
                assert found[2] == expected[rank][1][2]
    # The same training goes on, bit for bit.
    assert run_through(root, how, 6) == [e[2:] for e in expected]


def test_ranks_and_ways_to_train_follow_each_other(tmp_path: Path) -> None:
    def work(how, steps):
        def run(rank, say):
            job = Job(tmp_path / "root", how, every_steps=1)
            start = quietly(job.restore)
            before = job.whole() if start else ""
            while job.at < steps:
                job.step()
            job.checkpointer.close()
            say([start, before, job.whole()])

        return run

    latest = ""
    for turn, (world, how) in enumerate(
        [(2, "ddp"), (1, "none"), (3, "fsdp2"), (2, "fsdp2"), (3, "ddp")]
    ):
        said = check_all(run_ranks(world, work(how, 2 * turn + 2)))
        assert [s[0][:2] for s in said] == [[2 * turn, latest]] * world
        latest = said[0][0][2]


# --- decisions ------------------------------------------------------------------


def test_only_what_no_other_rank_reads_goes_past_the_page_cache(tmp_path: Path) -> None:
    def work(rank: int, say: Any) -> None:
        read: list[int] = []
        real = OpenFile.read_once

        def watched(self: OpenFile, offset: int, into: memoryview) -> None:
            read.append(offset)
            real(self, offset, into)

        OpenFile.read_once = watched  # type: ignore[method-assign]  in a process of its own
        for how in ("ddp", "fsdp2"):
            job = Job(tmp_path / how, how)
            job.restore()
            job.update()
            job.checkpointer.save(1)
            job.checkpointer.close()
            read.clear()
            again = Job(tmp_path / how, how, read_only=True)
            again.restore()
            say([how, bool(read), digest(*again.model.parameters())])
            assert digest(*again.model.parameters()) == digest(*job.model.parameters())
            again.checkpointer.close()

    told = check_all(run_ranks(2, work))
    assert [said[:2] for rank in told for said in rank] == [["ddp", False], ["fsdp2", True]] * 2


def test_a_cadence_of_time_saves_the_same_steps_on_all_ranks(tmp_path: Path) -> None:
    def work(rank, say):
        job = Job(tmp_path / "root", every_seconds=1e-6, keep_last=None)
        job.restore()
        saved = [job.at for _ in range(12) if job.step() is not None]
        job.checkpointer.close()
        say(saved)

    (first,), (second,) = check_all(run_ranks(2, work))
    assert first == second == committed(tmp_path / "root")
    assert len(first) >= 3


@pytest.mark.parametrize("asked", [0, 1])
def test_sigterm_on_one_rank_has_all_save_the_same_step_once_and_end(
    tmp_path: Path, asked: int
) -> None:
    def work(rank, say):
        job = Job(tmp_path / "root", every_steps=8)
        job.restore()
        while True:
            job.step()
            if job.at == 8 and rank == asked:
                os.kill(os.getpid(), signal.SIGTERM)
                say("asked")
            assert job.at < 30

    outcomes = run_ranks(2, work)
    assert outcomes[asked].status == -signal.SIGTERM
    other = outcomes[1 - asked]
    steps = committed(tmp_path / "root")
    assert len(steps) == 2
    assert steps[0] == 8
    assert 9 <= steps[1] < 16
    assert (
        f"RankFailed: rank {asked} was ended by SIGTERM: step {steps[1]} is durable" in other.error
    )


@pytest.mark.parametrize("when_full", ["skip", "raise"])
def test_what_happens_when_memory_is_full_happens_on_all_ranks(
    tmp_path: Path, when_full: Any
) -> None:
    strategy = Strategy(admission=Admission(when_full=when_full))

    def work(rank, say):
        root = f"throttled+file://{tmp_path / 'root'}?bytes_per_s=1000000"
        job = Job(root, every_steps=1, strategy=strategy, grace_s=60.0)
        job.restore()
        saved, raised = [], []
        for _ in range(6):
            try:
                if job.step() is not None:
                    saved.append(job.at)
            except CheckpointError as failure:
                raised.append([job.at, type(failure).__name__])
        job.checkpointer.close()
        say([saved, raised])

    (first,), (second,) = check_all(run_ranks(2, work))
    assert first[0] == second[0] == committed(tmp_path / "root")
    assert 1 <= len(first[0]) < 6
    assert [at for at, _ in first[1]] == [at for at, _ in second[1]]
    assert bool(first[1]) == (when_full == "raise")
    assert {kind for _, kind in second[1]} <= {"RankFailed"}


# --- failures ---------------------------------------------------------------------


@pytest.mark.parametrize("bad", [0, 1])
def test_a_failed_write_of_one_rank_is_raised_by_all_at_the_same_step(
    tmp_path: Path, bad: int
) -> None:
    def work(rank, say):
        root = f"{tmp_path / 'root'}"
        if rank == bad:
            root = f"faulty+file://{root}?op=write&name=step-00000002/*.pack&do=ENOSPC&times=0"
        job = Job(root, every_steps=2)
        job.restore()
        try:
            for _ in range(40):
                job.step()
                time.sleep(0.05)  # so that the failure is there before the last step
        except CheckpointError as failure:
            say([job.at, type(failure).__name__, str(failure)])
        end(job)

    said = check_all(run_ranks(2, work))
    (at, kind, _), (other_at, other_kind, other_text) = said[bad][0], said[1 - bad][0]
    assert at == other_at
    assert kind == "StoreError"
    assert other_kind == "RankFailed"
    assert f"rank {bad} failed: StoreError" in other_text
    assert 2 not in committed(tmp_path / "root")


class Moody:
    """State that cannot be taken at one step on one rank."""

    def __init__(self, bad: bool) -> None:
        self.bad, self.takes = bad, 0

    def state_dict(self):
        self.takes += 1
        if self.bad and self.takes > 2:
            raise ValueError("not in the mood")
        return {"takes": 1}

    def load_state_dict(self, state):
        pass


def test_state_that_one_rank_cannot_take_is_raised_by_all_at_the_same_step(
    tmp_path: Path,
) -> None:
    def work(rank, say):
        job = Job(tmp_path / "root", every_steps=2, more={"moody": Moody(rank == 1)})
        job.restore()
        try:
            for _ in range(20):
                job.step()
        except CheckpointError as failure:
            say([job.at, str(failure)])
        end(job)

    said = check_all(run_ranks(2, work))
    (at, text), (other_at, other_text) = said[0][0], said[1][0]
    assert at == other_at
    assert "rank 1 failed" in text
    assert "not in the mood" in text
    assert "not in the mood" in other_text


def test_a_checkpoint_that_one_rank_dropped_is_given_up_by_all_with_a_warning(
    tmp_path: Path,
) -> None:
    def work(rank, say):
        job = Job(tmp_path / "root", timeout_s=5.0)
        job.restore()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            job.update()
            go = threading.Event()
            job.checkpointer._snapshotter.copier.between = lambda: (go.wait(20), None)[1]
            job.checkpointer.save(job.at)
            if rank == 1:
                with torch.no_grad():  # behind the back of the copy
                    for parameter in job.model.parameters():
                        parameter.add_(1.0)
            go.set()
            for _ in range(8):
                job.update()
                job.checkpointer.step(job.at)
            job.checkpointer.close()
        say([str(w.message) for w in told if issubclass(w.category, CheckpointWarning)])

    for (texts,) in check_all(run_ranks(2, work)):
        assert any("step 1 was dropped" in text for text in texts)
    assert committed(tmp_path / "root") == []


def test_a_script_that_fails_on_one_rank_tells_the_others_and_waits_for_none(
    tmp_path: Path,
) -> None:
    def work(rank, say):
        job = Job(tmp_path / "root", every_steps=2, timeout_s=5.0)
        start_s = time.monotonic()
        try:
            with job.checkpointer:
                job.restore()
                for step in range(1, 40):
                    if step == 5 and rank == 1:
                        raise ZeroDivisionError("of the script")
                    job.checkpointer.step(step)
                    time.sleep(0.05)
        except (ZeroDivisionError, RankFailed) as failure:
            say([type(failure).__name__, str(failure), time.monotonic() - start_s < 30])

    first, second = check_all(run_ranks(2, work))
    assert first[0][0] == "RankFailed"
    assert "of the script" in first[0][1]
    assert first[0][2]
    assert second == [["ZeroDivisionError", "of the script", True]]


# --- bad input ----------------------------------------------------------------------


def test_a_save_that_one_rank_does_not_make_is_found_and_names_it(tmp_path: Path) -> None:
    def work(rank, say):
        job = Job(tmp_path / "root", timeout_s=3.0)
        job.restore()
        job.update()
        if rank == 0:
            with pytest.raises(RankFailed) as caught:
                job.checkpointer.save(1)
            say([list(caught.value.ranks), str(caught.value)])
        dist.barrier()

    first, second = check_all(run_ranks(2, work))
    assert first[0][0] == [1]
    assert "rank 1 did not answer" in first[0][1]
    assert second == []


def test_a_later_save_that_one_rank_does_not_make_is_found_and_names_it(tmp_path: Path) -> None:
    def work(rank, say):
        job = Job(tmp_path / "root", timeout_s=3.0)
        job.restore()
        job.update()
        job.checkpointer.save(1)
        job.checkpointer.wait()
        job.update()
        if rank == 0:
            job.checkpointer.save(2)
        try:
            job.checkpointer.wait()
        except CheckpointError as failure:
            say([type(failure).__name__, str(failure)])
        job.checkpointer.close()

    (kind, text), (other_kind, other_text) = (s[0] for s in check_all(run_ranks(2, work)))
    assert kind == "RankMissing"
    assert "rank 1" in text or "[1]" in text
    assert other_kind == "RankFailed"
    assert "rank 0 failed: RankMissing" in other_text


def test_another_model_on_one_rank_is_refused_by_all_with_the_first_key(tmp_path: Path) -> None:
    def work(rank, say):
        job = Job(
            tmp_path / "root",
            more={"head": nn.Linear(4, 4 if rank == 0 else 5)},
            replicated=("head",),
        )
        job.restore()
        job.update()
        with pytest.raises(StateError) as caught:
            job.checkpointer.save(1)
        say(str(caught.value))

    for (text,) in check_all(run_ranks(2, work)):
        assert "head" in text
        assert "ranks 0 and 1" in text


def test_replicas_that_are_none_are_refused_by_all_with_key_and_ranks(tmp_path: Path) -> None:
    def work(rank, say):
        torch.manual_seed(rank)
        head = nn.Linear(4, 4)
        job = Job(tmp_path / "root", more={"head": head}, replicated=("head",))
        job.restore()
        job.update()
        say(str(raised_by(lambda: job.checkpointer.save(1))))

    for (text,) in check_all(run_ranks(2, work)):
        assert "head" in text
        assert "ranks 0 and 1" in text


def raised_by(call):
    with pytest.raises(CheckpointError) as caught:
        call()
    return caught.value


def test_a_root_that_is_another_place_on_another_rank_is_refused(tmp_path: Path) -> None:
    def work(rank, say):
        with pytest.raises(CheckpointError) as caught:
            Job(tmp_path / f"root{rank}" if rank == 0 else f"memory://{rank}")
        say(str(caught.value))

    for (text,) in check_all(run_ranks(2, work)):
        assert "another place on rank 1" in text


def test_a_second_job_on_the_root_stops_all_ranks_of_the_first(tmp_path: Path) -> None:
    def work(rank, say):
        job = Job(tmp_path / "root", every_steps=2)
        job.restore()
        job.step()
        job.step()
        job.checkpointer.wait()
        if rank == 0:
            open_repository(LocalStore(tmp_path / "root")).claim(None)
        dist.barrier()
        try:
            for _ in range(20):
                job.step()
        except CheckpointError as failure:
            say([job.at, type(failure).__name__, str(failure)])
        end(job)

    (first,), (second,) = check_all(run_ranks(2, work))
    assert first[0] == second[0]
    for _, kind, text in (first, second):
        assert kind == "SupersededWriter" or "SupersededWriter" in text


def test_a_claim_of_rank_0_that_failed_after_it_was_recorded_stops_no_rank(tmp_path: Path) -> None:
    create = LocalStore.create

    def create_and_fail(store: LocalStore, name: str, data: Any) -> bool:
        create(store, name, data)
        raise StoreError("the answer was lost", retryable=True)

    def work(rank, say):
        job = Job(tmp_path / "root")
        job.restore()
        job.update()
        job.checkpointer.save(5)
        LocalStore.create = create_and_fail  # type: ignore[method-assign]  a process of its own
        for _ in range(2):
            failure = raised_by(lambda: job.checkpointer.save(5))
            say([type(failure).__name__, str(failure)])
        LocalStore.create = create  # type: ignore[method-assign]
        for step in (6, 7):
            job.update()
            job.checkpointer.save(step)
            job.checkpointer.wait()
        say(job.checkpointer.steps()[-2:])
        end(job)

    first, second = check_all(run_ranks(2, work))
    assert first[-1] == second[-1] == [6, 7]
    assert [kind for kind, _ in first[:-1]] == ["StoreError"] * 2
    for kind, text in second[:-1]:
        assert kind == "StoreError"
        assert "rank 0 failed: StoreError" in text
        assert "the answer was lost" in text


def test_a_strategy_that_keeps_checkpoints_in_memory_is_refused(tmp_path: Path) -> None:
    def work(rank, say):
        with pytest.raises(OptionError, match="in a world of 2 ranks"):
            Job(tmp_path / "root", strategy="gemini")

    check_all(run_ranks(2, work))
