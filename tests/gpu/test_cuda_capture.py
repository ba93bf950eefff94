"""The path of the stream, held to the state that was recorded on the device."""

from __future__ import annotations

import time

import pytest
import torch

import asymcheck
from asymcheck.device.cuda import Pinning

pytestmark = pytest.mark.gpu


def build(*, fused: bool = False) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(512, 1024), torch.nn.BatchNorm1d(1024), torch.nn.Linear(1024, 512)
    ).cuda()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)


def live(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    state = [v for p in model.parameters() for v in optimizer.state[p].values()]
    return [*model.state_dict().values(), *state]


def update(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(32, 512, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("capture", ["lazy", "device-copy", "profiled"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("pinned", [True, False])
def test_each_checkpoint_holds_the_state_of_its_boundary(
    tmp_path, fused, pinned, capture, monkeypatch
):
    if not pinned:
        monkeypatch.setattr(Pinning, "is_pinned", lambda self, slot: False)
    model, optimizer = build(fused=fused)
    recorded = {}
    with asymcheck.Checkpointer(
        tmp_path / "run",
        state={"model": model, "optim": optimizer},
        every_steps=1,
        strategy=asymcheck.Strategy(capture=capture),
    ) as checkpointer:
        checkpointer.restore()
        checkpointer._snapshotter.copier.between = lambda: time.sleep(0.002)
        for step in range(1, 31):
            update(model, optimizer)
            recorded[step] = [t.detach().clone() for t in live(model, optimizer)]
            checkpointer.step(step)
    reader = asymcheck.Checkpointer(
        tmp_path / "run", state={"model": model, "optim": optimizer}, read_only=True
    )
    assert reader.steps() == list(range(1, 31))
    for step in reader.steps():
        reader.restore(step)
        for found, expected in zip(live(model, optimizer), recorded[step], strict=True):
            assert found.device == expected.device
            assert torch.equal(found, expected)


@pytest.mark.parametrize("capture", ["lazy", "device-copy", "profiled"])
def test_saving_does_not_make_the_host_wait_for_the_device(tmp_path, capture):
    model, optimizer = build()
    with asymcheck.Checkpointer(
        tmp_path / "run",
        state={"model": model, "optim": optimizer},
        strategy=asymcheck.Strategy(capture=capture),
    ) as checkpointer:
        checkpointer.restore()
        update(model, optimizer)
        checkpointer.save(1)  # makes and registers the slot
        checkpointer.wait()
        update(model, optimizer)
        torch.cuda.set_sync_debug_mode("error")
        try:
            checkpointer.save(2)
        finally:
            torch.cuda.set_sync_debug_mode("default")
