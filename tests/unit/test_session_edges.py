"""What happens when a call of the session is cut off or overtaken in its middle."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Literal

import pytest
import torch

import asymcheck
from asymcheck.errors import CaptureError, StoreError, SupersededWriter
from asymcheck.filling import Filling
from asymcheck.persister import PersistProcess
from asymcheck.storage.local import LocalStore
from asymcheck.storage.memory import MemoryStore
from asymcheck.storage.repository import open_repository
from asymcheck.storage.store import Buffer


def test_after_an_interrupted_restore_nothing_is_saved_until_the_state_is_whole(monkeypatch):
    store, model = MemoryStore("interrupted"), torch.nn.Linear(4, 4)
    with asymcheck.Checkpointer(store, state={"model": model}) as checkpointer:
        checkpointer.save(1)
        checkpointer.wait()

        def interrupted(*arguments: object, **options: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Filling, "read", interrupted)
            with pytest.raises(KeyboardInterrupt):
                checkpointer.restore()
        with pytest.raises(CaptureError, match="overwritten in part"):
            checkpointer.save(2)
        assert checkpointer.restore() == 1
        checkpointer.save(2)
        checkpointer.wait()
        assert checkpointer.steps() == [1, 2]


class Overtaken(MemoryStore):
    """Another job claims the root just before the manifest of step 2 is written."""

    def write(self, name: str, parts: Iterable[Buffer]) -> int:
        if name.startswith("step-00000002/") and name.endswith("-MANIFEST.json"):
            open_repository(self).claim(None)  # takes the unnamed objects for left-overs
        return super().write(name, parts)


def test_a_writer_that_is_overtaken_at_its_commit_leaves_no_manifest_without_packs():
    store, model = Overtaken("overtaken"), torch.nn.Linear(4, 4)
    checkpointer = asymcheck.Checkpointer(store, state={"model": model})
    checkpointer.save(1)
    checkpointer.wait()
    checkpointer.save(2)
    with pytest.raises(SupersededWriter, match="attempt 2 was started"):
        checkpointer.wait()
    found = open_repository(store).survey()
    assert [at.step for at in found.committed] == [1]
    assert not found.damaged
    assert not found.leftovers
    checkpointer.close()


@pytest.mark.parametrize("persist", ["process", "thread"])
def test_a_claim_that_failed_after_it_was_recorded_does_not_stop_its_own_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, persist: Literal["process", "thread"]
) -> None:
    create = LocalStore.create

    def create_and_fail(store: LocalStore, name: str, data: Any) -> bool:
        create(store, name, data)
        raise StoreError("the answer was lost", retryable=True)

    model = torch.nn.Linear(4, 4)
    with asymcheck.Checkpointer(tmp_path, state={"m": model}, persist=persist) as checkpointer:
        checkpointer.save(5)
        with monkeypatch.context() as patch:
            patch.setattr(LocalStore, "create", create_and_fail)
            for _ in range(2):
                with pytest.raises(StoreError, match="the answer was lost"):
                    checkpointer.save(5)
        for step in (6, 7):
            checkpointer.save(step)
            checkpointer.wait(60)
        assert checkpointer.steps()[-2:] == [6, 7]
        open_repository(checkpointer._store).claim(None)
        checkpointer.save(8)
        with pytest.raises(SupersededWriter):
            checkpointer.wait()


@pytest.mark.parametrize("strategy", ["asymcheck", "naive"])
def test_a_persister_that_may_encode_loads_what_that_needs_before_the_first_save(
    tmp_path: Path, strategy: str
) -> None:
    state = {"m": torch.nn.Linear(4, 4)}
    with asymcheck.Checkpointer(
        tmp_path, state=state, strategy=strategy, persist="process"
    ) as checkpointer:
        checkpointer.restore()
        persister = checkpointer._capturing()._persister
        assert isinstance(persister, PersistProcess)
        maps = Path(f"/proc/{persister.pid}/maps")
        until_s = monotonic() + 60
        while strategy == "asymcheck" and "blosc2" not in maps.read_text():
            assert monotonic() < until_s, "it was never loaded"
            sleep(0.02)
        checkpointer.save(1)
        checkpointer.wait()
        assert ("blosc2" in maps.read_text()) == (strategy == "asymcheck")
