"""What is kept from save to save must never change what is saved."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from asymcheck.device.leaves import Collector
from asymcheck.device.state import State


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second.weight = self.first.weight  # tied


def _found(collector: Collector) -> object:
    """All that a save depends on: specs, values and aliases."""
    rows = []
    for spec, array, deferred, _ in collector.sources[:-1]:
        if not spec.key.startswith("$rng"):
            assert isinstance(array, torch.Tensor)
            rows.append((spec, array.data_ptr(), array.detach().clone().tolist(), deferred))
    text = collector.sources[-1].array
    assert isinstance(text, bytes)
    return rows, collector.aliases, text.partition(b'"rng"')[0]


def _setup() -> tuple[_Model, torch.optim.Optimizer, State, dict[str, object]]:
    model = _Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    items: dict[str, object] = {"model": model, "optim": optimizer}
    return model, optimizer, State(items), items


def _moved_parameter(model: _Model, optimizer: torch.optim.Optimizer) -> None:
    model.first.bias.data = torch.full((8,), 7.0)


def _other_shape_in_the_same_place(model: _Model, optimizer: torch.optim.Optimizer) -> None:
    model.first.bias.data = model.first.bias.data.view(2, 4)


def _other_strides_in_the_same_place(model: _Model, optimizer: torch.optim.Optimizer) -> None:
    model.first.weight.data = model.first.weight.data.t()


def _other_dtype(model: _Model, optimizer: torch.optim.Optimizer) -> None:
    model.norm.running_mean = model.norm.running_mean.double()


def _untied(model: _Model, optimizer: torch.optim.Optimizer) -> None:
    model.second.weight = nn.Parameter(torch.zeros(8, 8))


def _tied_otherwise(model: _Model, optimizer: torch.optim.Optimizer) -> None:
    model.second.bias.data = model.first.bias.data


def _replaced_state(model: _Model, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[model.first.bias]["exp_avg"] = torch.full((8,), 3.0)


def _new_entry(model: _Model, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[model.first.bias]["extra"] = torch.ones(3)


def _a_number_instead(model: _Model, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[model.first.bias]["step"] = 5


def _lost_state(model: _Model, optimizer: torch.optim.Optimizer) -> None:
    del optimizer.state[model.first.bias]


def _other_order(model: _Model, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[model.first.bias] = optimizer.state.pop(model.first.bias)


def _other_learning_rate(model: _Model, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.5


def _new_group(model: _Model, optimizer: torch.optim.Optimizer) -> None:
    model.register_parameter("late", nn.Parameter(torch.ones(2)))
    optimizer.add_param_group({"params": [model.late]})


def _new_buffer(model: _Model, optimizer: torch.optim.Optimizer) -> None:
    model.register_buffer("mask", torch.ones(4))


def _a_buffer_for_a_parameter(model: _Model, optimizer: torch.optim.Optimizer) -> None:
    bias = model.second.bias.data
    del model.second.bias
    model.second.register_buffer("bias", bias)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    kept = set(model.parameters())
    for p in [p for p in optimizer.state if p not in kept]:
        del optimizer.state[p]


def _negated_view(model: _Model, optimizer: torch.optim.Optimizer) -> None:
    model.norm.running_var = torch._neg_view(model.norm.running_var)


def _updated(model: _Model, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


@pytest.mark.parametrize(
    "change",
    [
        _moved_parameter,
        _other_shape_in_the_same_place,
        _other_strides_in_the_same_place,
        _other_dtype,
        _untied,
        _tied_otherwise,
        _replaced_state,
        _new_entry,
        _a_number_instead,
        _lost_state,
        _other_order,
        _other_learning_rate,
        _new_group,
        _new_buffer,
        _a_buffer_for_a_parameter,
        _negated_view,
        _updated,
    ],
)
def test_a_state_that_was_collected_before_is_collected_as_if_for_the_first_time(
    change: Callable[[_Model, torch.optim.Optimizer], None],
) -> None:
    model, optimizer, state, items = _setup()
    state.collect()
    assert _found(state.collect()) == _found(State(items).collect())
    change(model, optimizer)
    assert _found(state.collect()) == _found(State(items).collect())
    assert _found(state.collect()) == _found(State(items).collect())


def test_what_is_known_is_not_looked_at_again() -> None:
    *_, state, _ = _setup()
    state.collect()
    added: list[str] = []
    slowly = Collector.add

    def add(self: Collector, key: str, array: object, *, kind: str = "") -> str:
        added.append(key)
        return slowly(self, key, array, kind=kind)  # type: ignore[arg-type]

    Collector.add = add  # type: ignore[method-assign, assignment]
    try:
        state.collect()
    finally:
        Collector.add = slowly  # type: ignore[method-assign]
    assert [key for key in added if not key.startswith("$rng")] == []


def test_one_module_under_two_names_is_saved_once_at_every_save() -> None:
    model, _, _, _ = _setup()
    items: dict[str, object] = {"a": model, "b": model, "w": model.first.weight}
    state = State(items)
    for _ in range(3):
        assert _found(state.collect()) == _found(State(items).collect())
        assert state.collect().aliases["w"] == "a/first.weight"
