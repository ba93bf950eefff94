"""Chains of checkpoints through every strategy: whatever was chosen, each one can be restored.

Trainings whose state changes at every step. What is exact is equal bit for bit; what is lossy
is off by no more than the checkpoint itself says.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from asymcheck import Checkpointer, Strategy, strategies
from asymcheck.codec.lossless import Lossless
from asymcheck.codec.residual import Delta
from asymcheck.errors import CaptureError, CheckpointWarning, CorruptCheckpoint, NoCheckpoint
from asymcheck.handles import SaveReport
from asymcheck.planning.retention import CheckpointId
from asymcheck.planning.selection import FIDELITIES, Fidelity
from asymcheck.storage.local import LocalStore
from asymcheck.storage.memory import MemoryStore
from asymcheck.storage.names import manifest_name, pack_name
from asymcheck.storage.repository import Repository, open_repository
from asymcheck.storage.store import Store, open_store, read_all

STEPS = 25
SIDE = 136  # a square of it is more than 64 KiB
WAIT_S = 20.0
ALL_THE_TIME = 1e9
"""Steps here take a millisecond: a share of it would not do for encoding anything."""


def strategy_of(name: str, fidelity: Fidelity, **more: Any) -> Strategy:
    strategy = strategies[name]
    if strategy.selection.rule in ("measured", "smallest"):
        strategy = strategy.with_fidelity(fidelity)
    more = {"key_every": 4, "cpu_share": ALL_THE_TIME, "workers": 1, **more}
    return replace(strategy, selection=replace(strategy.selection, **more))


class Training:
    """Two large layers under AdamW: every element changes with every update."""

    def __init__(self, root: Store | str, strategy: Strategy, **options: Any) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(3)
        self.root, self.strategy, self.options = root, strategy, options
        self.model = nn.Sequential(nn.Linear(SIDE, SIDE), nn.ReLU(), nn.Linear(SIDE, SIDE))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.seen: dict[int, dict[str, torch.Tensor]] = {}
        self.reports: dict[int, SaveReport] = {}
        self.open()

    def open(self) -> int:
        self.checkpointer = Checkpointer(
            self.root, state=self.state(), strategy=self.strategy, **self.options
        )
        return self.checkpointer.restore()

    def state(self) -> dict[str, Any]:
        return {"m": self.model, "o": self.optimizer}

    def live(self) -> dict[str, torch.Tensor]:
        found = {}
        for name, param in self.model.named_parameters():
            found[f"m/{name}"] = param.detach().clone()
            for entry, value in self.optimizer.state[param].items():
                found[f"o/state/m/{name}/{entry}"] = value.detach().clone()
        return found

    def update(self) -> None:
        self.model(torch.randn(8, SIDE)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, steps: range, between: Callable[[int], None] = lambda step: None) -> None:
        for step in steps:
            self.update()
            self.seen[step] = self.live()
            handle = self.checkpointer.save(step)
            handle.durable.result(WAIT_S)  # the next one knows what this one measured
            self.reports[step] = handle.durable.result()
            between(step)

    @property
    def repository(self) -> Repository:
        store = open_store(self.root) if isinstance(self.root, str) else self.root
        return open_repository(store)

    def check(self) -> list[int]:
        """Restore everything that there is, in no order of time; returns the steps."""
        self.checkpointer.close()
        committed = {at.step: at for at in self.repository.survey().committed}
        reader = Checkpointer(self.root, state=self.state(), read_only=True)
        steps = reader.steps()
        for step in [*steps[::2], *reversed(steps[1::2])]:
            reader.restore(step)
            with self.repository.open(committed[step]) as checkpoint:
                bounds = {x.kind.split()[0]: x.max_error for x in checkpoint.indexes[0].losses}
                assert bool(bounds) == (checkpoint.manifest.fidelity != "exact")
            self.compare(step, bounds)
        return steps

    def compare(self, step: int, bounds: dict[str, float]) -> None:
        found = self.live()
        assert found.keys() == self.seen[step].keys()
        for key, wanted in self.seen[step].items():
            entry = key.rsplit("/", 1)[1]
            kind = "parameter" if key.startswith("m/") else f"state/{entry}"
            off = (found[key].double() - wanted.double()).abs().max().item()
            # The loss is that of the whole kind: a leaf of it may have been stored raw.
            assert off <= bounds.get(kind, 0.0) * (1 + 1e-6), (step, key, off, bounds)
            if kind not in bounds:
                assert torch.equal(found[key], wanted), (step, key)


@pytest.fixture(autouse=True)
def no_encoding_thread_is_left() -> Iterator[None]:
    yield
    assert encoding_threads() == []


def encoding_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "asymcheck-encode"]


def bases(training: Training) -> dict[int, int]:
    committed = training.repository.survey().committed
    return {at.step: m.base.at.step for at, m in committed.items() if m.base is not None}


# --- every strategy ----------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fidelity"),
    [
        (name, fidelity)
        for name, strategy in strategies.items()
        for fidelity in (
            FIDELITIES if strategy.selection.rule in ("measured", "smallest") else ("exact",)
        )
    ],
)
def test_each_checkpoint_of_a_chain_can_be_restored(name: str, fidelity: Fidelity) -> None:
    training = Training(MemoryStore(), strategy_of(name, fidelity))
    training.train(range(1, STEPS + 1))
    # What stays in memory gives way to the next; the last one comes to the store at the end.
    stays = strategies[name].placement.durable is not None
    assert training.check() == ([STEPS] if stays else list(range(1, STEPS + 1)))
    labels = {g.label for r in training.reports.values() for g in r.groups}
    fidelities = {r.fidelity for r in training.reports.values()}
    if name in ("asymcheck-s", "asymcheck-so"):
        assert any(label.startswith(("delta", "topk")) for label in labels)
        assert len(bases(training)) > STEPS / 2
        assert fidelities == {"exact", fidelity}
        assert training.reports[STEPS].stored_bytes < training.reports[1].stored_bytes
    if name == "excp":
        assert fidelities == {"exact", "excp"}
    elif fidelity == "exact" and name != "asymcheck-paper":
        assert fidelities == {"exact"}


@pytest.mark.parametrize(
    ("name", "fidelity"),
    [
        ("asymcheck", "exact"),
        ("asymcheck-paper", "exact"),
        *(("asymcheck-so", fidelity) for fidelity in FIDELITIES),
        ("excp", "exact"),
    ],
)
def test_so_it_can_through_a_process_and_a_disk(
    name: str, fidelity: Fidelity, tmp_path: Path
) -> None:
    strategy = strategy_of(name, fidelity, delta=True)
    # So slow that not everything is best stored raw.
    root = f"throttled+{LocalStore(tmp_path / 'root').url}?bytes_per_s=30e6"
    training = Training(root, strategy)
    training.train(range(1, STEPS + 1))
    assert training.check() == list(range(1, STEPS + 1))
    if name == "asymcheck-so":  # the others go by rates, which are those of this machine
        assert set(bases(training).values()) == set(range(1, STEPS, 4))


@pytest.mark.parametrize("keep_last", [1, 2, 3])
@pytest.mark.parametrize("fidelity", FIDELITIES)
def test_what_is_kept_keeps_what_it_stands_on(fidelity: Fidelity, keep_last: int) -> None:
    strategy = strategy_of("asymcheck-so", fidelity)
    training = Training(MemoryStore(), strategy, keep_last=keep_last)

    def look(step: int) -> None:
        left = {at.step for at in training.repository.survey().committed}
        key_frame = (step - 1) // 4 * 4 + 1  # for the next one, if for no other
        newest = set(range(max(1, step - keep_last + 1), step + 1))
        assert left == newest | {key_frame} | {b for s, b in bases(training).items() if s in newest}

    training.train(range(1, STEPS + 3), look)  # the last one is no key-frame
    assert bases(training)
    training.check()


# --- in between ---------------------------------------------------------------


@pytest.mark.parametrize("fidelity", FIDELITIES)
def test_a_persister_that_is_killed_goes_on_with_a_key_frame(
    fidelity: Fidelity, tmp_path: Path
) -> None:
    training = Training(str(tmp_path / "root"), strategy_of("asymcheck-so", fidelity))

    def kill(step: int) -> None:
        if step in (3, 7):
            persister: Any = training.checkpointer._snapshotter._persister  # type: ignore[union-attr]
            os.kill(persister.pid, signal.SIGKILL)

    training.train(range(1, 13), kill)
    assert [training.reports[step].base for step in (1, 4, 8)] == [0, 0, 0]
    assert training.reports[3].base == 1
    assert training.reports[6].base == 4
    assert training.reports[10].base == 8
    assert training.check() == list(range(1, 13))


@pytest.mark.parametrize("fidelity", FIDELITIES)
def test_a_restart_begins_with_a_key_frame_of_its_own_attempt(fidelity: Fidelity) -> None:
    training = Training(MemoryStore(), strategy_of("asymcheck-so", fidelity, key_every=99))
    for start in (1, 7, 13):
        training.train(range(start, start + 6))
        assert training.reports[start].base == 0
        assert training.reports[start + 5].base == start
        training.checkpointer.close()
        assert training.open() == start + 5
    assert training.check() == list(range(1, 19))


@pytest.mark.parametrize("fidelity", FIDELITIES)
def test_a_rewind_within_one_checkpointer_stands_on_nothing_that_it_left(
    fidelity: Fidelity,
) -> None:
    training = Training(MemoryStore(), strategy_of("asymcheck-so", fidelity, key_every=99))
    training.train(range(1, 7))
    assert training.checkpointer.restore(3) == 3
    training.train(range(4, 8))
    assert training.reports[4].base == 0
    assert training.reports[7].base == 4
    assert training.check() == list(range(1, 8))


def test_a_base_that_is_gone_is_named_the_one_before_is_loaded_and_the_next_is_a_key_frame() -> (
    None
):
    training = Training(MemoryStore(), strategy_of("asymcheck-so", "exact", key_every=5))
    training.train(range(1, 9))
    assert training.reports[8].base == 6
    training.repository.store.delete(manifest_name(CheckpointId(1, 6)))
    training.checkpointer.save(9)
    with pytest.raises(NoCheckpoint, match=r"step 6 \(attempt 1\).*the base of a delta"):
        training.checkpointer.wait()
    training.train(range(10, 13))
    assert training.reports[10].base == 0
    assert training.reports[12].base == 10
    training.checkpointer.close()
    reader = Checkpointer(training.root, state=training.state(), read_only=True)
    with pytest.raises(CorruptCheckpoint, match=r"its base, step 6 \(attempt 1\), is gone"):
        reader.restore(8)
    assert reader.restore() == 12
    # As if training had ended at step 8.
    for step in (10, 11, 12):
        training.repository.discard(CheckpointId(1, step))
    with pytest.warns(CheckpointWarning, match=r"step 6 \(attempt 1\), is gone"):
        assert reader.restore() == 5
    training.compare(5, {})


# --- chains of ExCP -----------------------------------------------------------


def test_of_excp_each_checkpoint_stands_on_the_one_before_up_to_a_key_frame() -> None:
    training = Training(MemoryStore(), strategy_of("excp", "exact"))
    training.train(range(1, 11))
    assert bases(training) == {s: s - 1 for s in range(2, 11) if s not in (5, 9)}
    assert training.check() == list(range(1, 11))


@pytest.mark.parametrize("keep_last", [1, 2])
def test_of_excp_all_that_a_kept_checkpoint_stands_on_stays(keep_last: int) -> None:
    training = Training(MemoryStore(), strategy_of("excp", "exact"), keep_last=keep_last)

    def look(step: int) -> None:
        left = {at.step for at in training.repository.survey().committed}
        oldest = max(1, step - keep_last + 1)
        assert left == set(range((oldest - 1) // 4 * 4 + 1, step + 1))

    training.train(range(1, 12), look)
    assert training.check() == list(range(9, 12))


def test_of_excp_a_killed_persister_a_restart_and_a_rewind_go_on_with_a_key_frame(
    tmp_path: Path,
) -> None:
    training = Training(str(tmp_path / "root"), strategy_of("excp", "exact", key_every=99))

    def kill(step: int) -> None:
        if step == 3:
            persister: Any = training.checkpointer._snapshotter._persister  # type: ignore[union-attr]
            os.kill(persister.pid, signal.SIGKILL)

    training.train(range(1, 6), kill)
    assert [training.reports[step].base for step in range(1, 6)] == [0, 1, 2, 0, 4]
    training.checkpointer.close()
    assert training.open() == 5
    training.train(range(6, 9))
    assert [training.reports[step].base for step in range(6, 9)] == [0, 6, 7]
    assert training.checkpointer.restore(7) == 7
    training.train(range(8, 10))
    assert [training.reports[step].base for step in range(8, 10)] == [0, 8]
    assert training.check() == list(range(1, 10))


def test_of_excp_a_damaged_link_is_named_and_what_is_older_is_loaded() -> None:
    training = Training(MemoryStore(), strategy_of("excp", "exact", key_every=99))
    training.train(range(1, 7))
    training.checkpointer.close()
    store, at = training.repository.store, CheckpointId(1, 4)
    pack = read_all(store, pack_name(at, 0, 1))
    with training.repository.open(at) as checkpoint:
        chunk = next(c for c in checkpoint.indexes[0].chunks if c.codec == "excp-residual")
    store.write(pack_name(at, 0, 1), [pack[: chunk.offset], b"\xff", pack[chunk.offset + 1 :]])
    reader = Checkpointer(training.root, state=training.state(), read_only=True)
    with pytest.warns(CheckpointWarning):
        assert reader.restore() == 3
    why = dict(reader.report.skipped)
    assert list(why) == [6, 5, 4]
    assert all("its base, step 4 (attempt 1), is damaged" in why[step] for step in (5, 6))
    store.delete(manifest_name(CheckpointId(1, 2)))
    with pytest.warns(CheckpointWarning):
        assert reader.restore() == 1
    assert "its base, step 2 (attempt 1), is gone" in dict(reader.report.skipped)[3]
    training.compare(1, {})


# --- failures -----------------------------------------------------------------


@pytest.mark.parametrize("failure", [MemoryError(), RuntimeError("bad library")])
def test_a_codec_that_fails_fails_its_save_and_the_next_works(
    failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(MemoryStore(), strategy_of("asymcheck-so", "exact"))
    training.train(range(1, 4))

    def fails(*_: object) -> None:
        raise failure

    with monkeypatch.context() as patched:
        patched.setattr(Lossless, "encode", fails)
        patched.setattr(Delta, "encode", fails)
        training.update()
        handle = training.checkpointer.save(4)
        assert isinstance(handle.durable.exception(WAIT_S), CaptureError)
        assert encoding_threads() == []
    with pytest.raises(CaptureError, match=r"step 4 \(attempt 1\): encoding .* raised "):
        training.checkpointer.wait()
    training.train(range(5, 9))
    assert training.check() == [1, 2, 3, 5, 6, 7, 8]


def test_the_log_of_a_persister_that_encodes_holds_nothing_of_other_libraries(
    tmp_path: Path,
) -> None:
    weight = torch.randn(64, 1024)
    with Checkpointer(tmp_path, state={"w": weight}, strategy="asymcheck-so") as checkpointer:
        checkpointer.restore()
        for step in (1, 2):
            checkpointer.save(step).durable.result(WAIT_S)
    log = (tmp_path / "persist.log").read_text()
    assert [line for line in log.splitlines() if "NumExpr" in line] == []
