"""Optimizers: read and written through their own state, nothing stepped, dropped or cast."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from asymcheck import Checkpointer, IncompatibleCheckpoint, StateError
from asymcheck.device.optimizer import _near
from asymcheck.device.places import Places
from asymcheck.planning.retention import CheckpointId
from asymcheck.storage.index import Index, Leaf
from asymcheck.storage.memory import MemoryStore

Optimizer = torch.optim.Optimizer


def _save(**state: object) -> MemoryStore:
    store = MemoryStore("optimizers")
    with Checkpointer(store, state=state) as ckpt:
        ckpt.save(1)
    return store


def _restore(store: MemoryStore, options: Mapping[str, Any] | None = None, **state: object) -> Any:
    with Checkpointer(store, state=state, read_only=True) as ckpt:
        ckpt.restore(**(options or {}))
    return ckpt.report


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.c = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


def _step(model: nn.Module, optimizer: Optimizer, seed: int) -> None:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


def _train(model: nn.Module, optimizer: Optimizer, seeds: range) -> None:
    for seed in seeds:
        _step(model, optimizer, seed)


def flat(value: Any) -> Any:
    """A value with every tensor as its dtype, device, shape and bytes."""
    match value:
        case torch.Tensor():
            raw = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            return str(value.dtype), str(value.device), tuple(value.shape), raw
        case dict():
            return type(value).__name__, {k: flat(v) for k, v in value.items()}
        case list() | tuple():
            return type(value).__name__, [flat(v) for v in value]
    return type(value).__name__, repr(value)


def inside(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """All that an optimizer holds, by the names of the model's parameters."""
    names = {p: n for n, p in model.named_parameters()}
    state = {names.get(k, str(k)): flat(v) for k, v in optimizer.state.items()}
    groups = [
        {k: [names[p] for p in v] if k == "params" else flat(v) for k, v in group.items()}
        for group in optimizer.param_groups
    ]
    return {"state": state, "groups": groups}


def weights(model: nn.Module) -> dict[str, Any]:
    return {name: flat(p) for name, p in model.named_parameters()}


KINDS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "Adam": torch.optim.Adam,
    "Adam with amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "Adam fused": lambda p: torch.optim.Adam(p, fused=True),
    "AdamW": torch.optim.AdamW,
    "AdamW one by one": lambda p: torch.optim.AdamW(p, foreach=False),
    "AdamW with a tensor as rate": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adamax": torch.optim.Adamax,
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "ASGD": torch.optim.ASGD,
    "Rprop": torch.optim.Rprop,
    "RMSprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    "LBFGS": lambda p: torch.optim.LBFGS(p, max_iter=3, history_size=2),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_goes_on_bit_for_bit_where_it_was(kind: str) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = KINDS[kind](model.parameters())
    _train(model, optimizer, range(4))
    store = _save(model=model, optim=optimizer)
    before = inside(model, optimizer)
    _train(model, optimizer, range(4, 7))

    again = Net()
    fresh = KINDS[kind](again.parameters())
    _restore(store, model=again, optim=fresh)
    assert inside(again, fresh) == before
    assert kind == "SGD" or before["state"]
    _train(again, fresh, range(4, 7))
    assert weights(again) == weights(model)
    assert inside(again, fresh) == inside(model, optimizer)

    # Once more, into one that has state already.
    _restore(store, model=again, optim=fresh)
    assert inside(again, fresh) == before
    _train(again, fresh, range(4, 7))
    assert weights(again) == weights(model)


def test_sparse_gradients_have_their_own_optimizer_and_it_comes_back() -> None:
    def step(model: nn.Embedding, optimizer: Optimizer, index: int) -> None:
        optimizer.zero_grad()
        model(torch.tensor([index, 2])).square().sum().backward()
        optimizer.step()

    def make() -> tuple[nn.Embedding, Optimizer]:
        model = nn.Embedding(5, 3, sparse=True)
        return model, torch.optim.SparseAdam(model.parameters())

    model, optimizer = make()
    step(model, optimizer, 0)
    store = _save(model=model, optim=optimizer)
    step(model, optimizer, 1)
    again, fresh = make()
    _restore(store, model=again, optim=fresh)
    step(again, fresh, 1)
    assert weights(again) == weights(model)
    assert inside(again, fresh) == inside(model, optimizer)


class Counting(torch.optim.AdamW):
    """Must be read and written without any of its methods."""

    calls: list[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.calls = []
        super().__init__(*args, **kwargs)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append("step")
        return super().step(*args, **kwargs)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append("zero_grad")

    def state_dict(self) -> Any:
        raise AssertionError("state_dict")

    def load_state_dict(self, state_dict: Any) -> None:
        raise AssertionError("load_state_dict")

    def add_param_group(self, param_group: Any) -> None:
        if hasattr(self, "calls") and len(self.param_groups):
            self.calls.append("add_param_group")
        super().add_param_group(param_group)


def test_no_method_of_an_optimizer_is_called_to_read_or_write_it() -> None:
    model = Net()
    optimizer = Counting(model.parameters())
    grads = [p.grad for p in model.parameters()]
    store = _save(model=model, optim=optimizer)
    _restore(store, model=model, optim=optimizer)
    assert optimizer.calls == []
    assert optimizer.state == {}
    assert [p.grad for p in model.parameters()] == grads


# --- states that are empty, partial, or of other shape ----------------------


def test_an_optimizer_that_never_stepped_empties_one_that_did() -> None:
    model, again = Net(), Net()
    store = _save(model=model, optim=torch.optim.AdamW(model.parameters(), lr=0.5))
    stepped = torch.optim.AdamW(again.parameters())
    _train(again, stepped, range(2))
    _restore(store, model=again, optim=stepped)
    assert dict(stepped.state) == {}
    assert stepped.param_groups[0]["lr"] == 0.5


def test_state_comes_back_also_where_gradients_wait_and_nothing_was_stepped() -> None:
    model, again = Net(), Net()
    optimizer = torch.optim.AdamW(model.parameters())
    _train(model, optimizer, range(2))
    fresh = torch.optim.AdamW(again.parameters())
    again(torch.ones(2, 4)).sum().backward()
    grads = {n: flat(p.grad) for n, p in again.named_parameters()}
    _restore(_save(model=model, optim=optimizer), model=again, optim=fresh)
    assert inside(again, fresh) == inside(model, optimizer)
    assert {n: flat(p.grad) for n, p in again.named_parameters()} == grads


def test_a_parameter_without_state_keeps_none_and_loses_a_live_one() -> None:
    model, again = Net(), Net()
    model.a.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    _train(model, optimizer, range(2))
    assert len(optimizer.state) == 4
    full = torch.optim.AdamW(again.parameters())
    _train(again, full, range(2))
    assert len(full.state) == 6
    _restore(_save(model=model, optim=optimizer), model=again, optim=full)
    assert inside(again, full) == inside(model, optimizer)


def test_a_parameter_that_was_frozen_after_training_keeps_its_state() -> None:
    model, again = Net(), Net()
    optimizer = torch.optim.AdamW(model.parameters())
    _train(model, optimizer, range(2))
    model.a.requires_grad_(False)
    again.a.requires_grad_(False)
    fresh = torch.optim.AdamW(again.parameters())
    _restore(_save(model=model, optim=optimizer), model=again, optim=fresh)
    assert len(fresh.state) == 6
    assert inside(again, fresh) == inside(model, optimizer)


def _grouped(model: Net, *rates: float) -> Optimizer:
    parts = [model.a, model.b, model.c][: len(rates)]
    groups = [{"params": list(p.parameters()), "lr": r} for p, r in zip(parts, rates, strict=True)]
    return torch.optim.AdamW(groups, betas=(0.8, 0.9))


def test_every_group_gets_its_own_options_also_beside_an_empty_one() -> None:
    model, again = Net(), Net()
    optimizer = _grouped(model, 0.1, 0.2, 0.3)
    optimizer.param_groups.insert(1, {**optimizer.param_groups[0], "params": [], "lr": 9.0})
    optimizer.param_groups[3]["note"] = ["mine"]
    _train(model, optimizer, range(2))
    fresh = _grouped(again, 1.0, 1.0, 1.0)
    fresh.param_groups.insert(1, {**fresh.param_groups[0], "params": [], "betas": (0.0, 0.0)})
    fresh.param_groups[0]["only_here"] = 1
    _restore(_save(model=model, optim=optimizer), model=again, optim=fresh)
    assert fresh.param_groups[0].pop("only_here") == 1
    assert inside(again, fresh) == inside(model, optimizer)
    assert [g["lr"] for g in fresh.param_groups] == [0.1, 9.0, 0.2, 0.3]


def test_a_group_that_was_added_during_training_comes_back() -> None:
    model, again = Net(), Net()
    optimizer = _grouped(model, 0.1, 0.2)
    _train(model, optimizer, range(2))
    optimizer.add_param_group({"params": list(model.c.parameters()), "lr": 0.7})
    _train(model, optimizer, range(2))
    fresh = _grouped(again, 1.0, 1.0, 1.0)
    _restore(_save(model=model, optim=optimizer), model=again, optim=fresh)
    assert inside(again, fresh) == inside(model, optimizer)


LAYOUTS: dict[str, tuple[Callable[[Net], Optimizer], Callable[[Net], Optimizer], list[str]]] = {
    "added": (
        lambda m: _grouped(m, 0.1, 0.2),
        lambda m: _grouped(m, 0.1, 0.2, 0.3),
        ["in the live state, not in the checkpoint", "optim/model/c.weight", "optim/model/c.bias"],
    ),
    "removed": (
        lambda m: _grouped(m, 0.1, 0.2, 0.3),
        lambda m: _grouped(m, 0.1, 0.2),
        ["in the checkpoint, not in the live state", "optim/model/c.weight", "optim/model/c.bias"],
    ),
    "merged": (
        lambda m: _grouped(m, 0.1, 0.2, 0.3),
        lambda m: torch.optim.AdamW(m.parameters()),
        ["live 1 groups of [6] parameters, checkpoint 3 groups of [2, 2, 2] parameters"],
    ),
    "in another order": (
        lambda m: torch.optim.AdamW(
            [{"params": m.a.parameters(), "lr": 1.0}, {"params": m.b.parameters()}]
        ),
        lambda m: torch.optim.AdamW(
            [{"params": m.b.parameters()}, {"params": m.a.parameters(), "lr": 1.0}]
        ),
        ["optim/groups: live 2 groups of [2, 2]"],
    ),
    "an empty one more": (
        lambda m: _grouped(m, 0.1, 0.2, 0.3),
        lambda m: _with_empty_group(_grouped(m, 0.1, 0.2, 0.3)),
        ["live 4 groups of [2, 2, 2, 0] parameters, checkpoint 3 groups"],
    ),
}


def _with_empty_group(optimizer: Optimizer) -> Optimizer:
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": []})
    return optimizer


@pytest.mark.parametrize("name", LAYOUTS)
def test_groups_that_differ_are_named_and_nothing_is_changed(name: str) -> None:
    make, make_live, expected = LAYOUTS[name]
    model, again = Net(), Net()
    optimizer, live = make(model), make_live(again)
    _train(model, optimizer, range(2))
    store = _save(model=model, optim=optimizer)
    before = (inside(again, live), weights(again))
    with pytest.raises(IncompatibleCheckpoint) as caught:
        _restore(store, model=again, optim=live)
    assert [text for text in expected if text not in str(caught.value)] == []
    assert (inside(again, live), weights(again)) == before


def test_with_strict_off_the_groups_that_fit_are_loaded_and_the_rest_is_reported() -> None:
    model, again = Net(), Net()
    optimizer, live = _grouped(model, 0.1, 0.2), _grouped(again, 1.0, 1.0, 1.0)
    _train(model, optimizer, range(2))
    report = _restore(
        _save(model=model, optim=optimizer), {"strict": False}, model=again, optim=live
    )
    assert report.missing_keys == ("optim/model/c.weight", "optim/model/c.bias")
    assert [g["lr"] for g in live.param_groups] == [0.1, 0.2, 1.0]
    assert inside(again, live)["state"] == inside(model, optimizer)["state"]


def test_with_strict_off_state_of_another_shape_is_not_loaded() -> None:
    model, again = Net(), Net()
    again.b = nn.Linear(4, 5)
    optimizer, live = (torch.optim.AdamW(m.parameters()) for m in (model, again))
    _train(model, optimizer, range(2))
    for p in again.parameters():
        p.grad = torch.ones_like(p)
    live.step()
    kept = flat(live.state[again.b.weight])
    report = _restore(
        _save(model=model, optim=optimizer), {"strict": False}, model=again, optim=live
    )
    assert ("optim/model/b.weight", "shape [5, 4]", "shape [4, 4]") in report.mismatched
    assert flat(live.state[again.b.weight]) == kept
    assert flat(live.state[again.a.weight]) == flat(optimizer.state[model.a.weight])


# --- kinds of state ---------------------------------------------------------


class MasterMoments(torch.optim.Optimizer):
    """Moments in another dtype than the parameter, a list, a count, and values of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "schedule": [1, 2], "nothing": None})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["moment"] = torch.zeros(p.shape, dtype=torch.float32)
                    state["count"], state["past"] = 0, []
                    state["scale"] = torch.ones(2, dtype=torch.float8_e4m3fn)
                state["count"] += 1
                state["moment"] += p.grad.float() * 1.000001
                state["past"] = [p.detach().clone(), *state["past"][:1]]
        shared: Any = self.state
        shared["global"] = {"norm": torch.tensor(1.5, dtype=torch.float64)}


def test_moments_keep_their_own_dtype_and_containers() -> None:
    model, again = Net().to(torch.bfloat16), Net().to(torch.bfloat16)
    optimizer, fresh = MasterMoments(model.parameters()), MasterMoments(again.parameters())
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    optimizer.step()
    store = _save(model=model, optim=optimizer)
    for _ in range(2):
        _restore(store, model=again, optim=fresh)
        assert inside(again, fresh) == inside(model, optimizer)
    assert fresh.state[again.a.weight]["moment"].dtype == torch.float32
    shared: Any = fresh.state
    assert shared["global"]["norm"].dtype == torch.float64


def test_live_state_keeps_its_memory_and_its_containers() -> None:
    model, again = Net(), Net()
    optimizer, live = MasterMoments(model.parameters()), MasterMoments(again.parameters())
    for m, o in ((model, optimizer), (again, live)):
        for p in m.parameters():
            p.grad = torch.randn_like(p)
        o.step()
    before = live.state[again.a.weight]
    moment, past = before["moment"], before["past"]
    groups, group = live.param_groups, live.param_groups[0]
    _restore(_save(model=model, optim=optimizer), model=again, optim=live)
    after = live.state[again.a.weight]
    assert after is before
    assert after["moment"] is moment
    assert after["past"] is past
    assert live.param_groups is groups
    assert live.param_groups[0] is group
    assert inside(again, live) == inside(model, optimizer)


def test_a_tensor_as_learning_rate_stays_the_same_object() -> None:
    model, again = Net(), Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.125))
    live = torch.optim.AdamW(again.parameters(), lr=torch.tensor(1.0))
    rate = live.param_groups[0]["lr"]
    _restore(_save(model=model, optim=optimizer), model=again, optim=live)
    assert live.param_groups[0]["lr"] is rate
    assert rate.item() == 0.125


def test_a_number_and_a_tensor_as_learning_rate_may_stand_for_each_other() -> None:
    for saved, there in ((0.25, torch.tensor(1.0)), (torch.tensor(0.25), 1.0)):
        model, again = Net(), Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=saved)
        live = torch.optim.AdamW(again.parameters(), lr=there)
        _restore(_save(model=model, optim=optimizer), model=again, optim=live)
        assert type(live.param_groups[0]["lr"]) is type(saved)
        assert float(live.param_groups[0]["lr"]) == 0.25


def test_the_kernel_that_the_running_script_chose_is_kept() -> None:
    model, again = Net(), Net()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    _train(model, optimizer, range(2))
    live = torch.optim.AdamW(again.parameters(), foreach=False, lr=1.0)
    _restore(_save(model=model, optim=optimizer), model=again, optim=live)
    assert (live.param_groups[0]["fused"], live.param_groups[0]["foreach"]) == (None, False)
    assert live.param_groups[0]["lr"] == 0.001
    assert inside(again, live)["state"] == inside(model, optimizer)["state"]
    _train(again, live, range(2, 4))


@dataclasses.dataclass
class _Asked:
    """Stands in for the places of a restore."""

    shape: tuple[int, ...]
    device: str = ""

    def leaf(self, key: str) -> Leaf:
        return Leaf(key, "float32", self.shape, 0, 4)

    def bind(self, key: str, device: str, live: object) -> None:
        self.device = device


@pytest.mark.parametrize(
    ("key", "shape", "saved_on", "group", "expected"),
    [
        ("o/state/p/step", (), "cpu", {}, "cpu"),
        ("o/state/p/step", (), "cuda:0", {}, "cpu"),
        ("o/state/p/step", (), "cpu", {"fused": True}, "meta"),
        ("o/state/p/step", (), "cuda:0", {"capturable": True}, "meta"),
        ("o/state/p/step", (), "cpu", {"fused": None, "capturable": False}, "cpu"),
        ("o/state/p/exp_avg", (2,), "cpu", {}, "meta"),
        ("o/state/p/exp_avg", (), "cpu", {}, "meta"),
        ("o/state/p/past/[0]", (2,), "cuda:1", {}, "meta"),
    ],
)
def test_a_new_tensor_of_state_lies_where_a_fresh_optimizer_would_put_it(
    key: str, shape: tuple[int, ...], saved_on: str, group: dict[str, Any], expected: str
) -> None:
    places: Any = _Asked(shape)
    param = torch.empty(2, device="meta")  # a device that every machine has
    _near(param, group, places)(key, saved_on, None)
    assert places.device == expected
    live = torch.empty(shape)
    _near(param, group, places)(key, saved_on, live)
    assert places.device == "cpu"


def test_the_step_of_a_restored_optimizer_is_what_a_fresh_one_makes() -> None:
    for options in ({}, {"fused": True}, {"foreach": True}, {"foreach": False}):
        model, again, other = Net(), Net(), Net()
        optimizer, fresh, reference = (
            torch.optim.AdamW(m.parameters(), **options) for m in (model, again, other)
        )
        _train(model, optimizer, range(2))
        _train(other, reference, range(1))
        _restore(_save(model=model, optim=optimizer), model=again, optim=fresh)
        step, expected = (
            o.state[m.a.bias]["step"] for o, m in ((fresh, again), (reference, other))
        )
        assert (step.dtype, step.device, step.shape) == (
            expected.dtype,
            expected.device,
            expected.shape,
        )
        assert step.item() == 2


# --- which parameter is which -----------------------------------------------


def test_the_names_decide_and_not_the_order() -> None:
    model, again = Net(), Net()
    optimizer = torch.optim.AdamW(model.parameters())
    _train(model, optimizer, range(2))
    live = torch.optim.AdamW(reversed(list(again.parameters())))
    _restore(_save(model=model, optim=optimizer), model=again, optim=live)
    assert inside(again, live)["state"] == inside(model, optimizer)["state"]


def test_two_optimizers_share_a_model_and_two_models_share_an_optimizer() -> None:
    def make() -> dict[str, Any]:
        one, two = Net(), Net()
        both = torch.optim.AdamW([*one.a.parameters(), *two.parameters()])
        rest = torch.optim.SGD([*one.b.parameters(), *one.c.parameters()], 0.1, momentum=0.9)
        return {"one": one, "two": two, "both": both, "rest": rest}

    source, again = make(), make()
    for model in (source["one"], source["two"]):
        model(torch.ones(2, 4)).sum().backward()
    source["both"].step()
    source["rest"].step()
    _restore(_save(**source), **again)
    for name in ("one", "two"):
        assert weights(again[name]) == weights(source[name])
    for name in ("both", "rest"):
        found, expected = (list(s[name].state.values()) for s in (again, source))
        assert flat(found) == flat(expected)
        assert found


def test_parameters_of_no_module_go_by_their_place() -> None:
    def make() -> tuple[list[torch.Tensor], Optimizer]:
        tensors = [torch.nn.Parameter(torch.randn(n)) for n in (2, 3)]
        return tensors, torch.optim.AdamW([{"params": tensors[:1]}, {"params": tensors[1:]}])

    tensors, optimizer = make()
    for t in tensors:
        t.grad = torch.randn_like(t)
    optimizer.step()
    others, fresh = make()
    store = _save(optim=optimizer, tensors=tensors)
    _restore(store, optim=fresh, tensors=others)
    assert flat(list(fresh.state.values())) == flat(list(optimizer.state.values()))
    assert flat(others) == flat(tensors)
    wider = torch.optim.AdamW(
        [torch.nn.Parameter(torch.randn(2)), torch.nn.Parameter(torch.zeros(3))]
    )
    with pytest.raises(IncompatibleCheckpoint, match=r"optim/group0\.1"):
        _restore(store, {"strict": True}, optim=wider, tensors=others)


def test_state_of_a_parameter_in_no_group_stays_with_its_parameter() -> None:
    def make() -> tuple[Net, Optimizer]:
        model = Net()
        optimizer = _grouped(model, 0.1, 0.2, 0.3)
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
        del optimizer.param_groups[0]
        return model, optimizer

    model, optimizer = make()
    again, live = make()
    _restore(_save(model=model, optim=optimizer), model=again, optim=live)
    assert len(live.state) == 6
    assert inside(again, live) == inside(model, optimizer)
    without = torch.optim.AdamW([*model.b.parameters(), *model.c.parameters()])
    store = _save(model=model, optim=optimizer)
    with pytest.raises(IncompatibleCheckpoint, match=r"optim/state/model/a\.weight"):
        _restore(store, {"strict": True}, model=model.b, optim=without)


def test_state_of_a_tensor_that_nothing_names_is_refused() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.state[torch.zeros(7)] = {"x": 1}
    with pytest.raises(StateError, match=r"shape \[7\].*add the module") as caught:
        _save(model=model, optim=optimizer)
    assert caught.value.key == "optim/state"


def test_names_that_the_optimizer_knows_itself_stay_its_own() -> None:
    class Wrapped(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    model, again = Wrapped(Net()), Net()
    optimizer = torch.optim.AdamW(model.named_parameters())
    fresh = torch.optim.AdamW(again.named_parameters())
    _restore(_save(model=model, optim=optimizer), model=again, optim=fresh)
    assert fresh.param_groups[0]["param_names"] == [n for n, _ in again.named_parameters()]


def test_any_name_of_a_parameter_works() -> None:
    def make() -> tuple[nn.Module, Optimizer]:
        model = nn.Module()
        for name in ("a/b", "a%2Fb", "[0]", "$leaf", "\ud800", "\ud83d\ude00", "😀", "x~2"):
            model.register_parameter(name, nn.Parameter(torch.randn(2)))
        optimizer = torch.optim.AdamW(model.parameters())
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
        return model, optimizer

    model, optimizer = make()
    again, live = make()
    _restore(_save(**{"a/$": model, "optim": optimizer}), **{"a/$": again, "optim": live})
    assert inside(again, live) == inside(model, optimizer)


def test_a_schedule_reads_the_rate_that_was_restored_whichever_is_first() -> None:
    for order in (("optim", "sched"), ("sched", "optim")):
        model, again = Net(), Net()
        optimizer, fresh = (torch.optim.SGD(m.parameters(), 1.0) for m in (model, again))
        schedule, other = (lr_scheduler.ExponentialLR(o, 0.5) for o in (optimizer, fresh))
        for _ in range(3):
            optimizer.step()
            schedule.step()
        source = {"optim": optimizer, "sched": schedule, "model": model}
        target = {"optim": fresh, "sched": other, "model": again}
        store = _save(**{k: source[k] for k in (*order, "model")})
        _restore(store, **{k: target[k] for k in (*order, "model")})
        assert fresh.param_groups[0]["lr"] == 0.125
        fresh.step()
        other.step()
        assert fresh.param_groups[0]["lr"] == 0.0625


def test_a_place_is_made_once_for_a_leaf_with_two_names() -> None:
    leaf = Leaf("a", "float32", (2,), 0, 8)
    at = CheckpointId(1, 1)
    places = Places(Index("run", at, 0, 1, 0.0, {}, {}, (leaf,), {"b": "a"}, (), ()))
    places.bind("a", "cpu", None)
    places.bind("b", "cpu", torch.zeros(2))
    assert places.array("a") is places.array("b")
    assert len(places.sinks[0, "a"]) == 1


def test_values_of_state_that_are_no_dict_come_back() -> None:
    model, again = Net(), Net()
    optimizer, fresh = (torch.optim.SGD(m.parameters(), 1.0) for m in (model, again))
    state: Any = optimizer.state
    state[model.a.weight] = torch.arange(3)
    state[model.b.weight] = collections.deque([1, torch.ones(2)], 4)
    _restore(_save(model=model, optim=optimizer), model=again, optim=fresh)
    found: Any = fresh.state
    assert flat(found[again.a.weight]) == flat(torch.arange(3))
    assert found[again.b.weight].maxlen == 4
    assert flat(list(found[again.b.weight])) == flat([1, torch.ones(2)])
