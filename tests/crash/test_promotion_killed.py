"""Whoever promotes is killed at every operation on a tier; a trainer dies before its persister.

Whatever a tier lists is whole and was saved so, and the next start catches up.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from asymcheck import Checkpointer, Tier
from asymcheck.decoding import verify
from asymcheck.errors import NoCheckpoint
from asymcheck.persist_worker import TIERS_NAME
from asymcheck.planning.retention import CheckpointId, Retention
from asymcheck.promotion import Mover
from asymcheck.storage.local import LocalStore
from asymcheck.storage.repository import create_repository, open_repository
from asymcheck.storage.store import open_store
from asymcheck.testing.checkpoints import commit_bytes, read_bytes
from asymcheck.testing.children import Child, Say, run_in_child
from asymcheck.testing.faulty import Fault, FaultyStore

pytestmark = pytest.mark.crash

WAIT_S = 60.0
CHANGING = "[wcdsp]*"  # write, create, delete, sweep, prepare
LEAST_OPERATIONS, MOST_OPERATIONS = 8, 200


def content(step: int) -> dict[str, bytes]:
    return {"": b"{}", "w": bytes([step]) * 20_000}


def whole(root: str) -> list[int]:
    """The steps that are listed there, each of them read and as it was saved."""
    try:
        repository = open_repository(open_store(root))
    except NoCheckpoint:
        return []
    listing = repository.survey()
    assert not listing.damaged
    for at in listing.committed:
        assert list(verify(repository, at)) == []
        assert read_bytes(repository, at) == content(at.step)
    return [at.step for at in listing.committed]


class Run:
    """A home with steps to come, and a tier that keeps two."""

    def __init__(self, root: Path, fault: Fault) -> None:
        self.home = create_repository(LocalStore(root / "home"))
        self.far = FaultyStore(LocalStore(root / "far"), fault)
        attempts = self.home.attempt_numbers()
        parent = self.home.lineage()[-1] if attempts else None
        self.attempt = self.home.claim(parent).number
        self.mover = Mover(
            self.home,
            Tier(self.far, keep_last=2),
            self.far,
            lambda state, served: None,
            lambda span: None,
            pauses_s=(),
        )
        self.home.hold = self.mover.hold

    def commit(self, step: int) -> None:
        at = CheckpointId(self.attempt, step)
        commit_bytes(self.home, at, content(step), pack_bytes=1 << 14)
        self.home.retain(at, Retention(1))


@pytest.mark.parametrize("when", ["before", "mid"])
def test_a_promotion_that_is_killed_at_any_operation_leaves_only_whole_checkpoints(
    quick_path: Path, when: str
) -> None:
    def life(root: Path, fault: Fault) -> Callable[[Say], None]:
        def work(say: Say) -> None:
            run = Run(root, fault)
            for step in (1, 2, 3):
                run.commit(step)
                run.mover.catch_up()

        return work

    for n in range(1, MOST_OPERATIONS):
        root = quick_path / str(n)
        fault = Fault(at=n, when=when, do="kill", op="write" if when == "mid" else CHANGING)
        outcome = run_in_child(life(root, fault))
        if not outcome.was_killed:
            assert n > LEAST_OPERATIONS
            assert whole(str(root / "far")) == [2, 3]
            return
        there = whole(str(root / "far"))
        at_home = whole(str(root / "home"))
        assert at_home  # the last good copy of the newest is never away
        again = Run(root, Fault(do="none"))
        again.mover.catch_up(newest_too=True)
        assert whole(str(root / "far"))[-1:] == at_home[-1:], (n, there)
        again.commit(4)
        again.mover.catch_up()
        again.mover._finish()
        assert whole(str(root / "far"))[-1] == 4
        assert open_repository(again.far).survey().leftovers == [], n
    pytest.fail("it was killed at every operation")


# --- a trainer -----------------------------------------------------------------------


class Job:
    """A state that says which step it is of, and a persister process."""

    def __init__(self, root: Path, far: str, **options: Any) -> None:
        torch.set_num_threads(1)
        self.value = torch.zeros(100_000)
        self.ckpt = Checkpointer(
            root / "home", state={"x": self.value}, tiers=[far], persist="process", **options
        )
        self.start = self.ckpt.restore()

    def save(self, step: int) -> None:
        self.value.fill_(step)
        self.ckpt.save(step).durable.result(WAIT_S)


def steps_of(root: Path | str) -> list[int]:
    try:
        return [at.step for at in open_repository(open_store(str(root))).lineage()]
    except NoCheckpoint:
        return []


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, f"timed out: {what}"
        time.sleep(0.01)


def test_a_persister_whose_trainer_is_killed_finishes_its_promotion(quick_path: Path) -> None:
    slow = f"throttled+file://{quick_path}/far?bytes_per_s=400e3"  # a second for a checkpoint

    def work(say: Say) -> None:
        job = Job(quick_path, slow)
        job.save(1)
        say("durable")
        time.sleep(WAIT_S)

    child = Child(work)
    assert child.hear() == "durable"
    child.kill()
    assert child.wait().was_killed
    until(lambda: steps_of(quick_path / "far") == [1], "the persister finishes the copy")
    repository = open_repository(open_store(str(quick_path / "far")))
    assert list(verify(repository, CheckpointId(1, 1))) == []


def test_the_next_start_does_not_wait_for_copies_of_a_dead_one_and_makes_them(
    quick_path: Path,
) -> None:
    endless = f"throttled+file://{quick_path}/far?bytes_per_s=1000"

    def work(say: Say) -> None:
        job = Job(quick_path, endless)
        job.save(1)
        say(job.ckpt._capturing()._persister.pid)
        time.sleep(WAIT_S)

    child = Child(work)
    persister = child.hear()
    child.kill()
    child.wait()
    try:
        comm = Path(f"/proc/{persister}/comm")
        until(lambda: comm.read_text().strip() == TIERS_NAME, "it has only copies to make")
        again = Job(quick_path, str(quick_path / "far"))
        assert comm.exists()  # it was neither waited for nor ended
        assert again.start == 1
        assert again.ckpt.wait(WAIT_S, tier=str(quick_path / "far"))
        assert steps_of(quick_path / "far") == [1]
        again.ckpt.close()
    finally:
        os.kill(persister, signal.SIGKILL)


def test_a_persister_that_is_killed_in_a_promotion_is_replaced_and_goes_on(
    quick_path: Path,
) -> None:
    far = f"faulty+file://{quick_path}/far?op=write&name=step-*&do=kill&when=mid&at=1"
    marker = quick_path / "far" / "step-00000001"
    job = Job(quick_path, far)
    first = job.ckpt._capturing()._persister.pid
    job.save(1)
    until(lambda: job.ckpt._capturing()._persister.pid != first, "the persister is replaced")
    assert marker.parent.is_dir()
    job.ckpt.close()
    assert steps_of(quick_path / "home") == [1]
    whole_or_nothing = steps_of(quick_path / "far")
    assert whole_or_nothing in ([], [1])
    again = Job(quick_path, str(quick_path / "far"))
    assert again.start == 1
    assert again.ckpt.wait(WAIT_S, tier=str(quick_path / "far"))
    again.ckpt.close()
    assert steps_of(quick_path / "far") == [1]
