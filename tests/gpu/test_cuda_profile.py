"""Windows on a device: its own time, read without waiting for it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from asymcheck.device.profile import Profiler

pytestmark = pytest.mark.gpu


def build():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(3))).cuda()


def train(model, profiler, steps=12, *, copied=frozenset(), wait=False):
    stream, source = torch.cuda.Stream(), torch.ones(1 << 22, device="cuda")
    target = torch.empty(1 << 22).pin_memory()
    losses = []
    for step in range(steps):
        if wait:
            torch.cuda.synchronize()
        if profiler is not None:
            profiler.begin_step()
        if step in copied:
            with torch.cuda.stream(stream):
                start = profiler.instant()
                target.copy_(source, non_blocking=True)
                profiler.add_copy(start, profiler.instant(), source.nbytes)
        x = torch.ones(64, 256, device="cuda")
        loss = model(x).square().mean()
        loss.backward()
        if profiler is not None:
            profiler.end_step()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.1 * parameter.grad)
                parameter.grad = None
        losses.append(loss.detach())
    return torch.stack(losses)


def test_windows_are_measured_on_the_device_and_losses_stay_bit_equal():
    plain = train(build(), None)
    model = build()
    profiler = Profiler([model])
    losses = train(model, profiler, copied={8, 10}, wait=True)
    torch.cuda.synchronize()
    profiler.begin_step()
    assert torch.equal(losses, plain)
    windows = profiler.windows()
    assert [w.phase[0] for w in windows] == list("ffffbbb")
    assert all(w.duration_s > 0.0 for w in windows[1:])
    assert profiler.copy_bytes_per_s > 0.0
    profiler.close()


def test_the_host_never_waits_for_the_device():
    model = build()
    profiler = Profiler([model])
    train(model, profiler)
    torch.cuda.set_sync_debug_mode("error")
    try:
        train(model, profiler)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    profiler.close()


def test_capturing_a_graph_is_not_disturbed():
    model = build()
    profiler = Profiler([model])
    train(model, profiler)
    x = torch.ones(64, 256, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    profiler.begin_step()
    with torch.cuda.graph(graph):
        loss = model(x).square().mean()
        loss.backward()
    graph.replay()
    assert profiler.position == 0
    profiler.end_step()
    expected = model(x).square().mean()
    assert torch.equal(loss, expected)
    profiler.close()
