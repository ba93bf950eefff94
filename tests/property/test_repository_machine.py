"""The repository as a state machine, against a dictionary that does everything the simple way."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from asymcheck.decoding import verify
from asymcheck.errors import CheckpointError, NoCheckpoint, SupersededWriter
from asymcheck.planning.retention import CheckpointId, Retention
from asymcheck.storage.memory import MemoryStore
from asymcheck.storage.names import index_name, pack_name
from asymcheck.storage.repository import Repository, create_repository, open_repository
from asymcheck.testing.checkpoints import commit_bytes, read_bytes
from asymcheck.testing.faulty import Fault, FaultyStore

RETENTIONS = st.sampled_from(
    [
        Retention(),
        Retention(keep_last=5),
        Retention(keep_last=3),
        Retention(keep_last=3, keep_every_steps=3),
        Retention(keep_last=2, keep_best=1, monitor="loss"),
        Retention(keep_last=1),
    ]
)


@dataclass
class Branch:
    """An attempt as the model sees it: the whole list of checkpoints behind its state."""

    tree: int
    behind: list[CheckpointId] = field(default_factory=list)


class Training(RuleBasedStateMachine):
    """Jobs over one root, one after the other: each saves, goes back, fails, dies, prunes."""

    @initialize()
    def begin(self) -> None:
        self.raw = MemoryStore()
        self.store = FaultyStore(self.raw)
        self.contents: dict[CheckpointId, bytes] = {}
        self.metrics: dict[CheckpointId, float] = {}
        self.branches: dict[int, Branch] = {}
        self.repository = create_repository(self.store)
        self.stale: tuple[Repository, int] | None = None
        self.attempt = 0
        self.serial = 0
        self.start(None)

    # --- the model ----------------------------------------------------------

    def newest(self) -> CheckpointId | None:
        return max(self.contents, default=None)

    def lineage(self, attempt: int) -> list[CheckpointId]:
        return [c for c in self.branches[attempt].behind if c in self.contents]

    def forget_what_need_not_be_kept(self, at: CheckpointId, retention: Retention) -> None:
        branch = self.branches[at.attempt]
        for c in list(self.contents):
            if self.branches[c.attempt].tree == branch.tree and c not in branch.behind:
                del self.contents[c]
        if retention.keep_last is None:
            return
        newest_first = self.lineage(at.attempt)[::-1]
        for place, c in enumerate(newest_first):
            best = min(
                newest_first, key=lambda c: (self.metrics[c], newest_first.index(c)), default=None
            )
            kept = (
                place < retention.keep_last
                or (retention.keep_every_steps and c.step % retention.keep_every_steps == 0)
                or (retention.keep_best and c == best)
            )
            if not kept:
                del self.contents[c]

    # --- what a job does ----------------------------------------------------

    def start(self, parent: CheckpointId | None) -> None:
        claimed = self.repository.claim(parent)
        assert claimed.number > max(self.branches, default=0)
        self.attempt = claimed.number
        if parent is None:
            self.branches[self.attempt] = Branch(self.attempt)
        else:
            old = self.branches[parent.attempt]
            cut = old.behind.index(parent) + 1
            self.branches[self.attempt] = Branch(old.tree, old.behind[:cut])

    def next_step(self, gap: int) -> int:
        behind = self.branches[self.attempt].behind
        return (behind[-1].step if behind else 0) + gap

    def write(self, at: CheckpointId, loss: float) -> None:
        self.serial += 1
        data = f"save {self.serial}: {at}".encode() * 3
        commit_bytes(self.repository, at, {"w": data}, metrics={"loss": loss})
        self.contents[at] = data
        self.metrics[at] = loss
        self.branches[at.attempt].behind.append(at)

    @rule(
        gaps=st.lists(st.integers(1, 3), min_size=1, max_size=4),
        loss=st.integers(0, 5).map(float),
        retention=RETENTIONS,
    )
    def save(self, gaps: list[int], loss: float, retention: Retention) -> None:
        for gap in gaps:
            at = CheckpointId(self.attempt, self.next_step(gap))
            self.write(at, loss)
            self.repository.retain(at, retention)
            self.forget_what_need_not_be_kept(at, retention)

    @rule(
        gap=st.integers(1, 3),
        n=st.integers(1, 5),
        do=st.sampled_from(["EIO", "ENOSPC", "short"]),
        when=st.sampled_from(["before", "mid", "after"]),
    )
    def save_and_fail(self, gap: int, n: int, do: str, when: str) -> None:
        at = CheckpointId(self.attempt, self.next_step(gap))
        op = "write" if do == "short" else "*"
        self.store.fault = Fault(at=n, op=op, do=do, when=when)
        known = dict(self.contents)
        try:
            self.write(at, 1.0)
        except CheckpointError:
            self.store.fault = Fault(do="none")
            self.contents = known
            self.repository.discard(at)
            # A name is never used twice: what comes next is another attempt.
            parent = self.lineage(self.attempt)
            self.start(parent[-1] if parent else None)
        finally:
            self.store.fault = Fault(do="none")

    @precondition(lambda self: self.contents)
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        lineage = self.repository.lineage()
        self.start(data.draw(st.sampled_from(lineage)))

    @rule(really=st.sampled_from([True, False, False, False]))
    def start_beside(self, really: bool) -> None:
        if really:
            self.start(None)

    @rule(half=st.sampled_from(["pack", "index", "both", "nothing"]))
    def die_and_restart(self, half: str) -> None:
        """The job is killed, perhaps in the middle of a save, and a new one resumes."""
        at = CheckpointId(self.attempt, self.next_step(1))
        if half in ("pack", "both"):
            self.raw.write(pack_name(at, 0, 1), [b"half"])
        if half in ("index", "both"):
            self.raw.write(index_name(at, 0), [b"half"])
        self.stale = (self.repository, self.attempt)
        self.repository = open_repository(self.store)
        self.start(self.newest())
        assert not [n for at, n in self.repository.survey().leftovers if at.attempt < self.attempt]

    @precondition(lambda self: self.stale is not None)
    @rule()
    def an_overtaken_job_saves(self) -> None:
        assert self.stale is not None
        repository, attempt = self.stale
        at = CheckpointId(attempt, 1000)
        with pytest.raises(SupersededWriter):
            commit_bytes(repository, at, {"w": b"late"})
        repository.discard(at)

    @rule()
    def finish(self) -> None:
        self.repository.finish()

    # --- what must always hold ----------------------------------------------

    @invariant()
    def exactly_what_the_model_holds_is_there(self) -> None:
        reading = open_repository(self.raw)
        listing = reading.survey()
        assert set(listing.committed) == set(self.contents)
        assert not listing.damaged
        assert not listing.foreign
        for at, data in self.contents.items():
            assert read_bytes(reading, at) == {"w": data}
            assert list(verify(reading, at)) == []

    @invariant()
    def the_lineage_is_the_path_that_led_to_the_newest(self) -> None:
        newest = self.newest()
        found = open_repository(self.raw).lineage()
        assert found == ([] if newest is None else self.lineage(newest.attempt))

    @invariant()
    def nothing_is_there_that_nobody_will_remove(self) -> None:
        """Objects without a manifest are the running job's to remove, or the next start's."""
        for at, name in open_repository(self.raw).survey().leftovers:
            assert name in self.repository._condemned or at.attempt == self.attempt


class Reading(Training):
    """The same with a reader that looks in between, through its own eyes."""

    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        reading = open_repository(self.raw)
        step = data.draw(st.integers(1, 10))
        at = CheckpointId(self.attempt, step)
        if at in self.contents:
            assert read_bytes(reading, at) == {"w": self.contents[at]}
        else:
            with pytest.raises(NoCheckpoint):
                read_bytes(reading, at)


TestTraining = Reading.TestCase
TestTraining.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
