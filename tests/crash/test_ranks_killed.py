"""A world of two: kill one rank, fail it, or stop it, at every operation on the store. Whatever was
durable loads, a manifest is never torn, the other rank learns who is missing, the next start works.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from time import monotonic, sleep

import pytest

from asymcheck import pending as pending_module
from asymcheck.capture import Capture
from asymcheck.decoding import Decoding, verify
from asymcheck.encoding import Chooser
from asymcheck.errors import CheckpointError, RankMissing, SupersededWriter
from asymcheck.events import discard
from asymcheck.messages import Durable, Stored
from asymcheck.pending import Pending
from asymcheck.persist import write_checkpoint
from asymcheck.planning.layout import PAGE_BYTES, Extent
from asymcheck.planning.retention import CheckpointId, Retention
from asymcheck.planning.selection import RAW
from asymcheck.storage.index import Leaf
from asymcheck.storage.local import Files, LocalStore
from asymcheck.storage.memory import MemoryStore
from asymcheck.storage.names import index_name, manifest_name
from asymcheck.storage.repository import Repository, create_repository
from asymcheck.storage.store import Store, read_all
from asymcheck.testing.children import Child, Say
from asymcheck.testing.faulty import Fault, FaultyStore

pytestmark = pytest.mark.crash

WAIT_S = 60.0
STEPS = (1, 2, 3, 4)
KEEP = Retention(keep_last=2)
CHANGING = {"write", "create", "delete", "sweep", "prepare"}
EITHER = pytest.mark.parametrize("rank", [0, 1])


class NoSync(Files):
    """A process may die, the machine does not: syncing would only take time."""

    def fsync(self, fd: int) -> None:
        pass

    def fsync_dir(self, path: Path) -> None:
        pass


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 may commit as soon as it looks, so that no look waits for the clock."""
    monkeypatch.setattr(pending_module, "_TURN_S", 0.0)


def content(step: int, rank: int) -> bytes:
    return bytes([step % 251, rank]) * (PAGE_BYTES // 2)


def store_part(repository: Repository, step: int, rank: int, attempt: int = 1) -> Stored:
    capture = Capture(
        at=CheckpointId(attempt, step),
        leaves=(Leaf("w", "uint8", (PAGE_BYTES,), 0, PAGE_BYTES),),
        aliases={},
        chunks=(Extent(0, PAGE_BYTES),),
        metrics={},
        versions={},
        created_s=float(step),
        boundary_s=0.0,
        rank=rank,
        world=2,
    )
    found = write_checkpoint(
        repository,
        capture,
        memoryview(content(step, rank)),
        lambda extent, upto: None,
        lambda: None,
        KEEP,
        discard,
        Chooser(RAW),
    )
    assert isinstance(found, Stored)
    return found


def look_for_others(repository: Repository, part: Stored, timeout_s: float = WAIT_S) -> Durable:
    return Pending(repository, part, KEEP, discard, timeout_s).wait()


def begin(raw: Store, other: int) -> tuple[str, dict[int, Stored]]:
    """A root where the other rank has stored its part of each step; so what is tested does the
    same operations in the same order each time.
    """
    repository = create_repository(raw)
    repository.claim(None)
    return repository.run, {step: store_part(repository, step, other) for step in STEPS}


def live(store: Store, run: str, rank: int, say: Say) -> None:
    repository = Repository(store, run)
    for step in STEPS:
        part = store_part(repository, step, rank)
        say(["stored", step])
        look_for_others(repository, part)
        say(["durable", step])
    repository.finish()


def operations(rank: int) -> list[tuple[str, str]]:
    store = FaultyStore(MemoryStore())
    run, _ = begin(store.inner, 1 - rank)
    said: list[list[object]] = []
    live(store, run, rank, said.append)
    assert said[-1] == ["durable", STEPS[-1]]
    return store.operations


def check_what_is_there(raw: Store, run: str) -> list[int]:
    """Nothing is torn; returns the steps, every byte of which is what its rank saved."""
    repository = Repository(raw, run)
    listing = repository.survey()
    assert not listing.damaged
    for at in listing.committed:
        assert not list(verify(repository, at))
        with repository.open(at) as opened:
            found = [bytes(Decoding(opened).read_leaf(i, i.leaves[0])) for i in opened.indexes]
        assert found == [content(at.step, rank) for rank in (0, 1)]
    return [at.step for at in listing.committed]


def start_again(raw: Store, run: str) -> None:
    """The next start finds the newest, saves, and nothing is left over."""
    repository = Repository(raw, run)
    repository.commit_whole()
    lineage = repository.lineage()
    attempt = repository.claim(lineage[-1] if lineage else None).number
    assert not repository.survey().leftovers
    parts = [store_part(repository, 9, rank, attempt) for rank in (0, 1)]
    for part in parts:
        look_for_others(repository, part)
    assert check_what_is_there(raw, run)[-1] == 9
    repository.finish()
    assert not repository.survey().leftovers


def others_end(raw: Store, run: str, parts: dict[int, Stored], dead: int) -> None:
    """What the rank that lives learns of each of its parts, without waiting."""
    repository = Repository(raw, run)
    for step, part in parts.items():
        try:
            assert look_for_others(repository, part, 0.0).step == step
        except RankMissing as failure:
            assert (failure.step, failure.ranks) == (step, (dead,))  # noqa: PT017


@EITHER
def test_a_rank_killed_at_any_operation_leaves_what_was_durable_and_no_torn_manifest(
    quick_path: Path, rank: int
) -> None:
    found = operations(rank)
    assert {"write", "list", "open", "free_bytes"} <= {op for op, _ in found}
    assert ("delete" in {op for op, _ in found}) == (rank == 0)  # who applies retention
    for n, (op, name) in enumerate(found, 1):
        moments = ["before", "mid", "after"] if op == "write" else ["before", "after"]
        for when in moments if op in CHANGING else moments[:1]:
            raw = LocalStore(quick_path / f"{n}-{when}", NoSync())
            run, parts = begin(raw, 1 - rank)
            fault = Fault(at=n, when=when, do="kill")

            def life(say: Say, raw: Store = raw, fault: Fault = fault, run: str = run) -> None:
                live(FaultyStore(raw, fault), run, rank, say)

            outcome = Child(life).wait()
            assert outcome.was_killed, outcome
            where = f"{when} operation {n}: {op} {name}"
            durable = [step for what, step in outcome.said if what == "durable"]
            there = check_what_is_there(raw, run)
            # Rank 1 does not retain; rank 0 may have been at it.
            assert set(durable if rank else durable[-1:]) <= set(there), where
            assert len(there) >= min(2, len(durable)), where
            others_end(raw, run, parts, rank)
            stored = [step for what, step in outcome.said if what == "stored"]
            assert set(stored[-1:]) <= set(check_what_is_there(raw, run)), where
            start_again(raw, run)
            shutil.rmtree(raw.root)


def faults(n: int, op: str) -> list[Fault]:
    found = [Fault(at=n, do="EIO")]
    if op in ("write", "create", "open", "read"):
        found.append(Fault(at=n, do="ENOSPC"))
    if op in CHANGING:
        found.append(Fault(at=n, do="EIO", when="after"))
    if op == "write":
        found += [Fault(at=n, do="short"), Fault(at=n, do="ENOSPC", when="mid")]
    return found


@EITHER
def test_an_error_of_one_rank_at_any_operation_costs_that_step_at_most(rank: int) -> None:
    for n, (op, name) in enumerate(operations(rank), 1):
        for fault in faults(n, op):
            raw = MemoryStore()
            run, parts = begin(raw, 1 - rank)
            mine, other = Repository(FaultyStore(raw, fault), run), Repository(raw, run)
            failed: list[int] = []
            where = f"operation {n}: {op} {name} {fault}"
            for step in STEPS:
                try:
                    look_for_others(mine, store_part(mine, step, rank))
                except CheckpointError:
                    failed.append(step)
                try:
                    look_for_others(other, parts[step], 0.0)
                except RankMissing as missing:
                    assert failed == [step] == [missing.step], where  # noqa: PT017
                    assert missing.ranks == (rank,), where  # noqa: PT017
                    assert step not in check_what_is_there(raw, run), where
                if rank:  # rank 0 is played by the test, and applies retention
                    assert step in check_what_is_there(raw, run) or failed == [step], where
            assert len(failed) <= 1, where
            there = check_what_is_there(raw, run)
            assert STEPS[-1] in there or failed == [STEPS[-1]], where
            start_again(raw, run)


def until_stopped(pid: int) -> None:
    end = monotonic() + WAIT_S
    while True:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        if text.rpartition(")")[2].split()[0] == "T":
            return
        assert monotonic() < end, "it did not stop"
        sleep(0.005)


@EITHER
@pytest.mark.parametrize("when", ["before", "after"])
def test_two_ranks_that_commit_at_the_same_moment_write_the_same_bytes(
    quick_path: Path, rank: int, when: str
) -> None:
    """One is stopped right at the write of the manifest, the other commits meanwhile."""
    raw = LocalStore(quick_path / "root", NoSync())
    run, parts = begin(raw, 1 - rank)
    fault = Fault(op="write", name="*MANIFEST*", when=when, do="stop")
    child = Child(lambda say: live(FaultyStore(raw, fault), run, rank, say))
    until_stopped(child.pid)
    name = manifest_name(CheckpointId(1, 1))
    look_for_others(Repository(raw, run), parts[1])
    written = read_all(raw, name)
    os.kill(child.pid, signal.SIGCONT)
    assert child.wait().check()[-1] == ["durable", STEPS[-1]]
    there = check_what_is_there(raw, run)
    assert STEPS[-1] in there
    if rank:  # nobody applied retention
        assert read_all(raw, name) == written
    start_again(raw, run)


@EITHER
def test_a_committer_that_stops_while_the_next_attempt_starts_leaves_nothing_torn(
    quick_path: Path, rank: int
) -> None:
    raw = LocalStore(quick_path / "root", NoSync())
    run, _ = begin(raw, 1 - rank)
    fault = Fault(op="write", name="*MANIFEST*", when="before", do="stop")

    def life(say: Say) -> None:
        try:
            live(FaultyStore(raw, fault), run, rank, say)
        except SupersededWriter:
            say(["superseded"])

    child = Child(life)
    until_stopped(child.pid)
    Repository(raw, run).claim(None)
    os.kill(child.pid, signal.SIGCONT)
    assert child.wait().check()[-1] == ["superseded"]
    assert check_what_is_there(raw, run) == []
    assert index_name(CheckpointId(1, 1), rank) not in [e.name for e in raw.list()]
    start_again(raw, run)
