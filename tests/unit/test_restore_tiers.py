"""A training restores from whatever tier still has its checkpoint, and mends the others."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asymcheck import Checkpointer, Strategy, Tier
from asymcheck.errors import (
    CaptureError,
    CheckpointWarning,
    CorruptCheckpoint,
    NoCheckpoint,
    StoreError,
)
from asymcheck.planning.retention import CheckpointId
from asymcheck.planning.selection import Selection
from asymcheck.recovery import UnfinishedRestore
from asymcheck.storage.manifest import parse_manifest
from asymcheck.storage.memory import MemoryStore
from asymcheck.storage.names import index_name, manifest_name, pack_name
from asymcheck.storage.store import Readable, Store, read_all
from asymcheck.testing.children import TIMEOUT_S
from asymcheck.testing.faulty import Fault, FaultyStore
from asymcheck.testing.throttled import Speed, ThrottledStore

TWO = CheckpointId(1, 2)
DELTAS = Strategy(selection=Selection(rule="smallest", delta=True))


def flip(store: Store, name: str, at: int = 0) -> None:
    data = bytearray(read_all(store, name))
    data[at] ^= 0x10
    store.write(name, [data])


def everything(store: Store) -> dict[str, bytes]:
    return {entry.name: read_all(store, entry.name) for entry in store.list()}


def copy(source: Store, target: Store) -> None:
    for name, data in everything(source).items():
        target.write(name, [data])


def state(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((40_000,), value), "b": torch.full((8,), value + 0.5)}


def is_state(found: dict[str, torch.Tensor], value: float) -> bool:
    return all(torch.equal(found[name], tensor) for name, tensor in state(value).items())


@pytest.fixture
def home() -> MemoryStore:
    """Two checkpoints of one run."""
    store = MemoryStore("home")
    live = state(1.0)
    with Checkpointer(store, state=live, persist="thread") as ckpt:
        ckpt.restore()
        for step in (1, 2):
            for name, tensor in state(float(step)).items():
                live[name].copy_(tensor)
            ckpt.save(step)
    return store


@pytest.fixture
def far(home: MemoryStore) -> MemoryStore:
    store = MemoryStore("far")
    copy(home, store)
    return store


class Resumed:
    """What a new start of the training found."""

    def __init__(self, root: Store, *tiers: Store | Tier, **options: object) -> None:
        self.live = state(0.0)
        options.setdefault("persist", "thread")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", CheckpointWarning)
            with Checkpointer(root, state=self.live, tiers=tiers, **options) as ckpt:
                self.step = ckpt.restore()
                self.report = ckpt.report
                self.steps = ckpt.steps()
        self.warned = [str(w.message) for w in caught if w.category is CheckpointWarning]

    @property
    def served(self) -> dict[str, int]:
        return {served.tier: served.nbytes for served in self.report.served}


def test_the_report_says_what_each_tier_gave(home: MemoryStore, far: MemoryStore) -> None:
    found = Resumed(home, far)
    assert (found.step, is_state(found.live, 2.0), found.warned) == (2, True, [])
    assert list(found.served) == ["memory://home", "memory://far"]
    assert found.served["memory://home"] > 0
    assert found.served["memory://far"] == 0
    assert all(served.duration_s >= 0 for served in found.report.served)


def test_a_new_host_with_an_empty_root_resumes_from_a_tier(far: MemoryStore) -> None:
    found = Resumed(MemoryStore("new"), far)
    assert (found.step, is_state(found.live, 2.0), found.steps) == (2, True, [1, 2])
    assert found.served["memory://far"] > 0


def test_reading_only_needs_no_root_where_a_tier_has_the_run(far: MemoryStore) -> None:
    root = MemoryStore("none")
    found = Resumed(root, far, read_only=True)
    assert (found.step, is_state(found.live, 2.0)) == (2, True)
    assert everything(root) == {}


@pytest.mark.parametrize(
    "name", [pack_name(TWO, 0, 1), index_name(TWO, 0), manifest_name(TWO), "FORMAT", "RUN.json"]
)
def test_what_is_damaged_in_the_root_is_restored_from_a_tier_and_healed(
    home: MemoryStore, far: MemoryStore, name: str
) -> None:
    before = read_all(home, name)
    flip(home, name)
    found = Resumed(home, far)
    assert (found.step, is_state(found.live, 2.0)) == (2, True)
    assert read_all(home, name) == before
    assert any("written anew" in message for message in found.warned)
    if name not in ("FORMAT", "RUN.json"):
        assert {(bad.tier, bad.name) for bad in found.report.damaged} == {("memory://home", name)}
        (healed,) = found.report.healed
        assert (healed.tier, healed.name, healed.nbytes) == ("memory://home", name, len(before))


@pytest.mark.parametrize("name", ["FORMAT", "RUN.json"])
def test_what_says_whose_a_tier_is_heals_at_the_start(
    home: MemoryStore, far: MemoryStore, name: str
) -> None:
    before = read_all(far, name)
    flip(far, name)
    found = Resumed(home, far)
    assert (found.step, read_all(far, name)) == (2, before)
    assert any("written anew" in message for message in found.warned)


def test_a_root_that_is_of_no_run_is_not_taken_for_a_damaged_one(far: MemoryStore) -> None:
    root = MemoryStore("else")
    root.write("FORMAT", [b"something"])
    root.write("thesis.txt", [b"mine"])
    before = everything(root)
    with pytest.raises(CorruptCheckpoint, match="somebody else's"):
        Checkpointer(root, state=state(0.0), tiers=(far,))
    assert everything(root) == before


def test_who_only_reads_heals_nothing(home: MemoryStore, far: MemoryStore) -> None:
    flip(home, pack_name(TWO, 0, 1))
    before = everything(home)
    found = Resumed(home, far, read_only=True)
    assert (found.step, is_state(found.live, 2.0), found.report.healed) == (2, True, ())
    assert everything(home) == before
    assert len(found.report.damaged) == 1


def test_damage_in_all_tiers_falls_back_to_the_one_before_and_says_so(
    home: MemoryStore, far: MemoryStore
) -> None:
    flip(home, pack_name(TWO, 0, 1))
    flip(far, pack_name(TWO, 0, 1))
    found = Resumed(home, far)
    assert (found.step, is_state(found.live, 1.0)) == (1, True)
    ((step, why),) = found.report.skipped
    assert (step, "no copy is whole" in why, "memory://far" in why) == (2, True, True)
    assert any("step 2 is damaged" in message for message in found.warned)


def test_a_step_that_is_whole_in_no_tier_is_put_together_from_two(
    home: MemoryStore, far: MemoryStore
) -> None:
    home.delete(pack_name(TWO, 0, 1))
    far.delete(index_name(TWO, 0))
    whole = everything(home) | everything(far)
    found = Resumed(home, far)
    assert (found.step, is_state(found.live, 2.0)) == (2, True)
    now = everything(home)
    assert {name: now[name] for name in whole} == whole
    assert read_all(far, index_name(TWO, 0)) == whole[index_name(TWO, 0)]


def test_a_tier_that_dies_in_the_middle_of_a_restore_is_done_without(
    home: MemoryStore, far: MemoryStore
) -> None:
    dying = FaultyStore(home, Fault(at=2, times=0, op="read", name="*.pack"))
    found = Resumed(dying, far)
    assert (found.step, is_state(found.live, 2.0)) == (2, True)
    assert found.served["memory://far"] > 0


def test_a_tier_that_cannot_be_reached_is_left_out_with_one_warning(
    home: MemoryStore, far: MemoryStore
) -> None:
    gone = FaultyStore(far, Fault(at=1, times=0))
    found = Resumed(home, Tier(gone, name="gone"))
    assert (found.step, is_state(found.live, 2.0)) == (2, True)
    assert [tier for tier, _ in found.report.unreachable] == ["gone"]
    assert sum("was left out" in message for message in found.warned) == 1


def test_a_start_from_nothing_beside_a_tier_out_of_reach_is_said_or_refused() -> None:
    flaky = FaultyStore(MemoryStore("far"))
    live = state(0.0)
    with Checkpointer(MemoryStore("new"), state=live, tiers=(flaky,), persist="thread") as ckpt:
        flaky.fault = Fault(at=1, times=0, op="list")
        with pytest.raises(NoCheckpoint, match="may have some"):
            ckpt.restore(resume="must")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", CheckpointWarning)
            assert ckpt.restore() == 0
        assert any("starts from nothing" in str(w.message) for w in caught)
        flaky.fault = Fault(do="none")


def test_a_tier_with_a_newer_step_than_the_root_is_resumed_from(
    home: MemoryStore, far: MemoryStore
) -> None:
    for name in list(everything(home)):
        if name.startswith("step-00000002"):
            home.delete(name)
    found = Resumed(home, far)
    assert (found.step, is_state(found.live, 2.0)) == (2, True)


def test_a_delta_finds_its_base_in_a_farther_tier() -> None:
    torch.manual_seed(3)
    home, far = MemoryStore("home"), MemoryStore("far")
    model = torch.nn.Linear(600, 200)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    live = {"m": model, "o": optimizer}
    with Checkpointer(home, state=live, strategy=DELTAS, persist="thread") as ckpt:
        ckpt.restore()
        for step in (1, 2, 3):
            with torch.no_grad():
                model.weight[:5] += 1
            ckpt.save(step)
            assert ckpt.wait(TIMEOUT_S)
    assert parse_manifest(read_all(home, manifest_name(CheckpointId(1, 3))), "it").base is not None
    copy(home, far)
    expected = model.weight.detach().clone()
    for name in list(everything(home)):
        if name.startswith("step-00000001"):
            home.delete(name)
    with torch.no_grad():
        model.weight.zero_()
    with Checkpointer(home, state=live, tiers=(far,), persist="thread") as ckpt:
        assert ckpt.restore() == 3
        assert torch.equal(model.weight, expected)
        assert all(served.nbytes for served in ckpt.report.served)


def test_a_tier_is_mended_before_what_is_half_written_there_is_swept(
    home: MemoryStore, far: MemoryStore
) -> None:
    name = pack_name(TWO, 0, 1)
    flip(far, name)
    watched = FaultyStore(far)
    found = Resumed(MemoryStore("new"), Tier(watched, name="far"), home)
    assert (found.step, [h.why_not for h in found.report.healed]) == (2, [""])
    assert read_all(far, name) == read_all(home, name)
    assert ("write", name) in watched.operations
    assert ("sweep", "") in watched.operations  # by whoever promotes: it would break the write
    assert watched.operations.index(("write", name)) < watched.operations.index(("sweep", ""))


def test_a_write_that_a_sweep_broke_is_made_once_more(home: MemoryStore, far: MemoryStore) -> None:
    name = pack_name(TWO, 0, 1)
    flip(far, name)
    swept = FaultyStore(far, Fault(op="write", name=name, when="mid"))
    found = Resumed(MemoryStore("new"), Tier(swept, name="far"), home)
    assert (found.step, [h.why_not for h in found.report.healed]) == (2, [""])
    assert read_all(far, name) == read_all(home, name)


# --- several chunks at a time ------------------------------------------------------


class Meeting:
    """A medium worth some connections, whose first reads of packs wait for one another."""

    def __init__(self, inner: Store, connections: int) -> None:
        self.inner = inner
        self.capabilities = replace(inner.capabilities, connections=connections)
        self.most = self.now = self.begun = 0
        self._meet = threading.Barrier(connections)
        self._counting = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @contextmanager
    def open(self, name: str) -> Iterator[Any]:
        with self.inner.open(name) as opened:
            yield SimpleNamespace(
                nbytes=opened.nbytes,
                readinto=partial(self._read, opened) if name.endswith(".pack") else opened.readinto,
            )

    def _read(self, opened: Readable, offset: int, into: memoryview) -> None:
        with self._counting:
            self.begun += 1
            self.now += 1
            self.most = max(self.most, self.now)
            # The first reads the tree of values: nothing else can be read before it.
            meets = 1 < self.begun <= 1 + self.capabilities.connections
        try:
            if meets:
                self._meet.wait(TIMEOUT_S)
            opened.readinto(offset, into)
        finally:
            with self._counting:
                self.now -= 1


def many(value: float) -> dict[str, torch.Tensor]:
    return {f"w{n}": torch.arange(30_000.0) * (n + value) for n in range(9)}


@pytest.fixture
def wide() -> MemoryStore:
    """One step of many chunks, some encoded and some as they are."""
    store = MemoryStore("wide")
    with Checkpointer(store, state=many(1.0), persist="thread") as ckpt:
        ckpt.restore()
        ckpt.save(1)
    return store


def restored(*tiers: Store | Tier) -> tuple[dict[str, torch.Tensor], Any]:
    live = many(0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        with Checkpointer(
            MemoryStore("new"), state=live, tiers=tiers, persist="thread", read_only=True
        ) as ckpt:
            assert ckpt.restore() == 1
            return live, ckpt.report


def same(found: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(found[name], tensor) for name, tensor in many(1.0).items())


def test_out_of_a_far_tier_as_many_chunks_are_read_as_it_is_worth_connections(
    wide: MemoryStore,
) -> None:
    far = Meeting(wide, 3)
    live, report = restored(Tier(far, name="far"))  # type: ignore[arg-type]
    assert same(live)
    assert far.most == 3
    assert far.begun > 3
    (_, served) = report.served
    assert served.nbytes > 0
    assert 0 < served.duration_s <= report.duration_s  # not the sum of what was side by side


def test_each_chunk_that_is_bad_in_a_far_tier_is_taken_from_the_next_meanwhile(
    wide: MemoryStore,
) -> None:
    whole = MemoryStore("whole")
    copy(wide, whole)
    name = pack_name(CheckpointId(1, 1), 0, 1)
    data = bytearray(read_all(wide, name))
    for at in range(0, len(data), max(1, len(data) // 4)):
        data[at] ^= 1
    wide.write(name, [data])
    far = ThrottledStore(wide, Speed(connections=4))
    live, report = restored(Tier(far, name="far"), Tier(whole, name="whole"))
    assert same(live)
    assert {(bad.tier, bad.name) for bad in report.damaged} == {("far", name)}
    assert len(report.damaged) >= 2
    assert all(served.nbytes > 0 for served in report.served[1:])


def test_damage_of_a_far_tier_alone_is_one_error_and_no_thread_writes_after_it(
    wide: MemoryStore,
) -> None:
    flip(wide, pack_name(CheckpointId(1, 1), 0, 1), -1)
    far = ThrottledStore(wide, Speed(connections=4))
    live = many(0.0)
    with Checkpointer(
        MemoryStore("new"), state=live, tiers=(Tier(far, name="far"),), persist="thread"
    ) as ckpt:
        with pytest.raises(CorruptCheckpoint, match="none of 1 checkpoints could be loaded"):
            ckpt.restore()
        assert not [t for t in threading.enumerate() if t.name == "asymcheck-lane"]


# --- out of reach ----------------------------------------------------------------


@pytest.mark.parametrize("op", ["open", "read"])
def test_a_store_that_goes_in_the_middle_of_a_restore_is_no_damage(
    home: MemoryStore, op: str
) -> None:
    store, live = FaultyStore(home), state(0.0)
    with Checkpointer(store, state=live, persist="thread") as ckpt:
        store.fault = Fault(op=op, name="*.pack", times=0)
        with pytest.raises(StoreError, match="none of 2 checkpoints could be loaded") as met:
            ckpt.restore()
        assert "Input/output error" in str(met.value)
        store.fault = Fault(do="none")
        assert ckpt.restore() == 2
        assert is_state(live, 2.0)


def test_after_a_restore_that_was_cut_nothing_is_saved_before_another_has_succeeded() -> None:
    store, live = FaultyStore(MemoryStore("root")), many(1.0)
    with Checkpointer(store, state=live, persist="thread") as ckpt:
        ckpt.restore()
        ckpt.save(1)
    with Checkpointer(store, state=live, persist="thread") as ckpt:
        store.fault = Fault(op="read", name="*.pack", at=3, times=0)
        with pytest.raises(UnfinishedRestore, match="overwritten in part"):
            ckpt.restore()
        store.fault = Fault(do="none")
        with pytest.raises(CaptureError, match="overwritten in part"):
            ckpt.save(2)
        assert ckpt.restore() == 1
        ckpt.save(2)


def test_an_older_step_is_loaded_where_the_newest_is_out_of_reach_and_that_is_said(
    home: MemoryStore,
) -> None:
    store, live = FaultyStore(home), state(0.0)
    with Checkpointer(store, state=live, persist="thread") as ckpt:
        store.fault = Fault(op="read", name=pack_name(TWO, 0, 1), times=0)
        with pytest.warns(CheckpointWarning, match="step 2 cannot be read and was passed over"):
            assert ckpt.restore() == 1
    assert is_state(live, 1.0)


def test_a_damaged_checkpoint_beside_one_out_of_reach_is_still_told_as_out_of_reach(
    home: MemoryStore,
) -> None:
    flip(home, pack_name(TWO, 0, 1))
    store = FaultyStore(home)
    with Checkpointer(store, state=state(0.0), persist="thread") as ckpt:
        store.fault = Fault(op="read", name=pack_name(CheckpointId(1, 1), 0, 1), times=0)
        with pytest.raises(StoreError, match=r"(?s)step 2: .*hash of .*step 1: .*Input/output"):
            ckpt.restore()
        store.fault = Fault(do="none")
