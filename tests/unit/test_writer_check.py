"""Who asks whether a newer job has claimed the root: never the training. A store that cannot be
reached costs checkpoints, and neither ends a step nor holds it up.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Literal

import pytest
import torch

from asymcheck import Checkpointer
from asymcheck.errors import CheckpointWarning, StoreError, SupersededWriter
from asymcheck.storage.memory import MemoryStore
from asymcheck.storage.repository import open_repository
from asymcheck.storage.store import Capabilities, Entry, Store
from asymcheck.testing.faulty import Fault, FaultyStore

Durability = Literal["fsync", "replicated", "none"]


class RemoteStore(MemoryStore):
    """Answers as late as a remote one: says which threads wait for it."""

    def __init__(self, durability: Durability = "replicated") -> None:
        super().__init__("remote")
        self.capabilities = Capabilities(durability=durability, reads_survive_delete=False)
        self.waited: set[int] = set()

    def list(self, prefix: str = "") -> Iterator[Entry]:
        self.waited.add(threading.get_ident())
        return super().list(prefix)


def saved_once(store: Store, on_error: Literal["raise", "warn"] = "raise") -> Checkpointer:
    model = torch.nn.Linear(4, 4)
    ckpt = Checkpointer(
        store, state={"model": model}, every_steps=1, persist="thread", on_error=on_error
    )
    ckpt.restore()
    ckpt.save(1)
    ckpt.wait()
    return ckpt


@pytest.mark.parametrize("durability", ["fsync", "replicated", "none"])
def test_a_save_asks_nothing_of_any_store_on_the_training_thread(durability: Durability) -> None:
    store = RemoteStore(durability)
    ckpt = saved_once(store)
    store.waited.clear()
    ckpt.save(2)
    ckpt.wait()
    assert store.waited
    assert threading.get_ident() not in store.waited
    ckpt.close()
    assert ckpt.steps() == [1, 2]


def test_a_newer_job_on_a_remote_store_is_found_before_anything_is_written() -> None:
    store = RemoteStore()
    ckpt = saved_once(store)
    before = sorted(store.list())
    open_repository(store).claim(None)
    claimed = sorted(store.list())
    ckpt.save(2)
    with pytest.raises(SupersededWriter, match="attempt 2 was started"):
        ckpt.wait()
    assert sorted(store.list()) == claimed != before
    ckpt.close()


def test_a_newer_job_on_a_remote_store_ends_the_older_one_that_only_warns_of_failures() -> None:
    store = RemoteStore()
    ckpt = saved_once(store, on_error="warn")
    open_repository(store).claim(None)
    ckpt.save(2)
    with pytest.raises(SupersededWriter, match="attempt 2 was started"):
        ckpt.wait()
    ckpt.close()


def out_of_reach(store: FaultyStore) -> None:
    store.fault = Fault(times=0)


def within_reach(store: FaultyStore) -> None:
    store.fault = Fault(do="none")


def test_a_store_that_is_out_of_reach_costs_checkpoints_and_ends_no_step() -> None:
    store = FaultyStore(MemoryStore("gone"))
    ckpt = saved_once(store, on_error="warn")
    out_of_reach(store)
    for step in (2, 3):
        assert ckpt.step(step) is not None
        with pytest.warns(CheckpointWarning, match="Input/output error"):
            ckpt.wait()
    within_reach(store)
    ckpt.step(4)
    ckpt.close()
    assert ckpt.steps() == [1, 4]


def test_going_back_while_the_store_is_out_of_reach_costs_that_checkpoint_alone() -> None:
    store = FaultyStore(MemoryStore("gone"))
    ckpt = saved_once(store, on_error="warn")
    ckpt.step(2)
    ckpt.step(3)
    ckpt.wait()
    out_of_reach(store)
    lost = ckpt.step(2)
    assert lost is not None
    assert isinstance(lost.durable.exception(), StoreError)
    within_reach(store)
    with pytest.warns(CheckpointWarning, match="Input/output error"):
        ckpt.step(3)  # of the branch, and not of the attempt that has a step 3 already
    ckpt.close()
    assert open_repository(store).lineage()[-2:] == [(1, 2), (2, 3)]


def test_a_save_that_is_asked_for_raises_where_no_attempt_can_be_claimed() -> None:
    store = FaultyStore(MemoryStore("gone"))
    ckpt = saved_once(store, on_error="warn")
    out_of_reach(store)
    with pytest.raises(StoreError, match="Input/output error"):
        ckpt.save(1)
    within_reach(store)
    ckpt.close()


def test_a_first_save_while_the_store_is_out_of_reach_is_lost_alone() -> None:
    store = FaultyStore(MemoryStore("gone"))
    model = torch.nn.Linear(4, 4)
    ckpt = Checkpointer(
        store, state={"model": model}, every_steps=1, persist="thread", on_error="warn"
    )
    out_of_reach(store)
    with pytest.warns(CheckpointWarning, match="could not be committed"):
        assert ckpt.step(1) is not None
    within_reach(store)
    with pytest.warns(CheckpointWarning, match="Input/output error"):
        ckpt.step(2)
    ckpt.close()
    assert ckpt.steps() == [2]
