"""A capture is sealed where training is between two operations, not only at the fence."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from asymcheck import Checkpointer
from asymcheck.errors import CheckpointWarning
from asymcheck.testing.children import TIMEOUT_S


def _training(root: Path) -> tuple[nn.Module, torch.optim.Optimizer, Checkpointer]:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpointer = Checkpointer(root, state={"model": model, "optim": optimizer})
    checkpointer.restore()
    return model, optimizer, checkpointer


def _copied(checkpointer: Checkpointer) -> threading.Event:
    snapshotter = checkpointer._snapshotter
    assert snapshotter is not None
    assert snapshotter._active is not None
    return snapshotter._active.copy.copied


def test_a_checkpoint_is_durable_before_the_next_update(tmp_path: Path) -> None:
    model, _, checkpointer = _training(tmp_path)
    handle = checkpointer.save(1)
    assert _copied(checkpointer).wait(TIMEOUT_S)
    assert not handle.captured.done()  # nobody vouches for it yet
    model(torch.ones(2, 256))
    assert handle.captured.done()
    done = threading.Event()
    handle.durable.add_done_callback(lambda _: done.set())
    assert done.wait(TIMEOUT_S)
    assert handle.durable.result().step == 1
    checkpointer.close()


def test_the_backward_pass_seals_too(tmp_path: Path) -> None:
    model, _, checkpointer = _training(tmp_path)
    assert checkpointer._snapshotter is not None
    go = threading.Event()
    checkpointer._snapshotter.copier.between = lambda: (go.wait(TIMEOUT_S), None)[1]
    handle = checkpointer.save(1)
    loss = model(torch.ones(2, 256)).sum()
    assert not handle.captured.done()
    copied = _copied(checkpointer)
    go.set()
    assert copied.wait(TIMEOUT_S)
    loss.backward()
    assert handle.captured.done()
    checkpointer.close()


def test_a_write_before_the_copy_is_complete_is_seen_at_the_next_window(tmp_path: Path) -> None:
    model, _, checkpointer = _training(tmp_path)
    assert checkpointer._snapshotter is not None
    go = threading.Event()
    checkpointer._snapshotter.copier.between = lambda: (go.wait(TIMEOUT_S), None)[1]
    handle = checkpointer.save(1)
    with torch.no_grad():
        model[2].weight.add_(1)
    copied = _copied(checkpointer)
    go.set()
    assert copied.wait(TIMEOUT_S)
    model(torch.ones(2, 256))
    with pytest.warns(CheckpointWarning, match=r"model/2\.weight"):
        checkpointer.wait(TIMEOUT_S)
    assert handle.captured.exception() is not None
    checkpointer.close()


def test_a_write_after_the_seal_costs_nothing(tmp_path: Path) -> None:
    model, _, checkpointer = _training(tmp_path)
    before = model[2].weight.detach().clone()
    checkpointer.save(1)
    assert _copied(checkpointer).wait(TIMEOUT_S)
    model(torch.ones(2, 256))
    with torch.no_grad():
        model[2].weight.add_(1)
    checkpointer.wait(TIMEOUT_S)
    checkpointer.close()
    again, _, other = _training(tmp_path)
    assert other.report.step == 1
    assert torch.equal(again[2].weight, before)
    other.close()
