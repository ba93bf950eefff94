"""Who asks whether a newer job has claimed the root: never the training, where it would wait."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Literal

import pytest
import torch

from asymcheck import Checkpointer
from asymcheck.errors import SupersededWriter
from asymcheck.storage.memory import MemoryStore
from asymcheck.storage.repository import open_repository
from asymcheck.storage.store import Capabilities, Entry


class RemoteStore(MemoryStore):
    """Answers as late as a remote one: says which threads wait for it."""

    capabilities = Capabilities(durability="replicated", reads_survive_delete=False)

    def __init__(self) -> None:
        super().__init__("remote")
        self.waited: set[int] = set()

    def list(self, prefix: str = "") -> Iterator[Entry]:
        self.waited.add(threading.get_ident())
        return super().list(prefix)


def saved_once(store: MemoryStore, on_error: Literal["raise", "warn"] = "raise") -> Checkpointer:
    model = torch.nn.Linear(4, 4)
    ckpt = Checkpointer(
        store, state={"model": model}, every_steps=1, persist="thread", on_error=on_error
    )
    ckpt.restore()
    ckpt.save(1)
    ckpt.wait()
    return ckpt


def test_a_save_to_a_remote_store_asks_nothing_of_it_on_the_training_thread() -> None:
    store = RemoteStore()
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
