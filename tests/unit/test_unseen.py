"""Training does not see the Checkpointer: the same losses, bit for bit, and the same graphs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel, ResNetConfig, ResNetForImageClassification

from asymcheck import Checkpointer, strategies
from asymcheck.storage.memory import MemoryStore

STEPS = 8
WIDTH = 140  # a square of it is more than 64 KiB: copied behind the training
_COMPILER_WARNS = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


class Residual(nn.Module):
    """Overwrites the output of the module before it, and its own."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(x)
        return self.norm(self.convolution(x)).add_(x)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 48, 3)
        self.layers = nn.Sequential(*(nn.Sequential(Residual(48)) for _ in range(3)))
        self.head = nn.Linear(48, 2)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.relu(self.layers(self.stem(x))).mean((2, 3)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(torch.relu(self.linear(x)))


class Tower(nn.Module):
    def __init__(self, recompute: bool | None = None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 2)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            if self.recompute is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.recompute)
        return self.last(x)


def hf_resnet() -> nn.Module:
    config = ResNetConfig(
        embedding_size=8, hidden_sizes=[32, 48], depths=[1, 2], layer_type="basic"
    )
    return ResNetForImageClassification(config)


def hf_gpt2() -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(n_embd=64, n_layer=2, n_head=2, n_positions=16, vocab_size=300)
    )


def batch(model: nn.Module) -> torch.Tensor:
    if isinstance(model, GPT2LMHeadModel):
        return torch.randint(0, 300, (2, 8))
    if isinstance(model, Tower):
        return torch.randn(2, 4)
    return torch.randn(2, 3, 12, 12)


def train(
    make: Callable[[], nn.Module], *, saves: bool, call: Callable[[nn.Module], Any], strategy: str
) -> tuple[torch.Tensor, dict[str, Any]]:
    """The losses, and what the compiler counted."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    state = {"model": model, "optim": optimizer, "sched": scheduler}
    ckpt = (
        Checkpointer(MemoryStore(), state=state, strategy=strategy, every_steps=2)
        if saves
        else None
    )
    if ckpt is not None:
        ckpt.restore()
    forward, losses = call(model), []
    for step in range(1, STEPS + 1):
        output = forward(batch(model))
        output = output if torch.is_tensor(output) else output.logits
        loss = output.square().mean()
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if ckpt is not None:
            ckpt.step(step)
    if ckpt is not None:
        ckpt.close()
        stays = strategies[strategy].placement.durable is not None  # all but the last
        assert ckpt.steps() == list(range(STEPS if stays else 2, STEPS + 1, 2))
    counted = {name: dict(counters[name]) for name in ("stats", "graph_break", "frames")}
    return torch.stack(losses), counted


def same(model: nn.Module) -> nn.Module:
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "in-place": ResNet,
    "recomputed": lambda: Tower(recompute=False),
    "recomputed-reentrant": lambda: Tower(recompute=True),
    "dataclass": hf_resnet,
    "gpt2": hf_gpt2,
}


@pytest.mark.parametrize(
    ("name", "strategy"),
    [*((name, "asymcheck") for name in MODELS), *(("in-place", s) for s in strategies)],
)
def test_losses_are_the_same_bit_for_bit(name: str, strategy: str) -> None:
    make = MODELS[name]
    plain, _ = train(make, saves=False, call=same, strategy=strategy)
    losses, _ = train(make, saves=True, call=same, strategy=strategy)
    assert torch.equal(losses, plain)
    assert "asymcheck-copy" not in {t.name for t in threading.enumerate()}


@pytest.mark.parametrize(
    ("name", "backend"),
    [("recomputed", "eager"), ("in-place", "aot_eager"), ("dataclass", "eager")],
)
@_COMPILER_WARNS
def test_a_compiled_model_has_the_same_graphs_and_losses(name: str, backend: str) -> None:
    make = MODELS[name]

    def compiled(model: nn.Module) -> Any:
        return torch.compile(model, backend=backend)

    plain, graphs = train(make, saves=False, call=compiled, strategy="asymcheck")
    losses, found = train(make, saves=True, call=compiled, strategy="asymcheck")
    assert graphs["stats"]["unique_graphs"] >= 1
    assert found == graphs
    assert torch.equal(losses, plain)


@_COMPILER_WARNS
def test_each_block_compiled_by_itself_has_the_same_graphs_and_losses() -> None:
    def each(model: nn.Module) -> nn.Module:
        for block in model.blocks:  # type: ignore[union-attr]
            block.compile(backend="eager")
        return model

    plain, graphs = train(Tower, saves=False, call=each, strategy="asymcheck")
    losses, found = train(Tower, saves=True, call=each, strategy="asymcheck")
    assert graphs["stats"]["unique_graphs"] >= 1
    assert found == graphs
    assert torch.equal(losses, plain)
