"""Every store that is shipped keeps the promises of the store protocol."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from asymcheck.storage.local import LocalStore
from asymcheck.storage.memory import open_memory
from asymcheck.storage.peers import open_peers
from asymcheck.storage.store import Store
from asymcheck.testing.agents import Agents
from asymcheck.testing.faulty import FaultyStore
from asymcheck.testing.powercut import PowerCutStore
from asymcheck.testing.suites import StoreSuite
from asymcheck.testing.throttled import Speed, ThrottledStore


class TestLocal(StoreSuite):
    def new_store(self, folder: Path) -> Store:
        return LocalStore(folder / "some where" / "é 100%?#")


class TestMemory(StoreSuite):
    shared_between_processes = False

    def new_store(self, folder: Path) -> Store:
        return open_memory(f"suite {uuid.uuid4().hex}?#%/é", {})


class TestFaultyWithoutAFault(StoreSuite):
    def new_store(self, folder: Path) -> Store:
        return FaultyStore(LocalStore(folder / "inner"))


class TestFaultyOverMemory(StoreSuite):
    shared_between_processes = False

    def new_store(self, folder: Path) -> Store:
        return FaultyStore(open_memory(f"faulty-{uuid.uuid4().hex}", {}))


class TestPowerCutWithPower(StoreSuite):
    def new_store(self, folder: Path) -> Store:
        return PowerCutStore(folder / "powered")


class TestThrottledToMuch(StoreSuite):
    def new_store(self, folder: Path) -> Store:
        return ThrottledStore(LocalStore(folder / "inner"), Speed(1e12, 1e-6, 1e12))


class TestPeers(StoreSuite):
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _agents(cls) -> Iterator[None]:
        with Agents(3) as cls.agents:
            yield

    def new_store(self, folder: Path) -> Store:
        where = self.agents.url(f"suite/{uuid.uuid4().hex}").removeprefix("peers://")
        return open_peers(where, {"replicas": "2"})


def test_a_suite_without_a_store_fails() -> None:
    with pytest.raises(NotImplementedError):
        StoreSuite().new_store(Path())
