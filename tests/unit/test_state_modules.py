"""Modules: one name for a parameter whatever wraps it, ties kept, live memory filled."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from asymcheck import Checkpointer, IncompatibleCheckpoint, StateError
from asymcheck.device.naming import canonical_names
from asymcheck.errors import CaptureError
from asymcheck.storage.index import Index
from asymcheck.storage.memory import MemoryStore
from asymcheck.storage.repository import open_repository

# torch.compile imports what is old.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")


def _save(**state: object) -> MemoryStore:
    store = MemoryStore("modules")
    with Checkpointer(store, state=state) as ckpt:
        ckpt.save(1)
    return store


def _restore(store: MemoryStore, /, **state: object) -> Checkpointer:
    with Checkpointer(store, state=state, read_only=True) as ckpt:
        ckpt.restore()
    return ckpt


def _index(store: MemoryStore) -> Index:
    repository = open_repository(store)
    with repository.open(repository.lineage()[-1]) as checkpoint:
        return checkpoint.indexes[0]


def _keys(store: MemoryStore) -> set[str]:
    index = _index(store)
    return {k for k in [*(leaf.key for leaf in index.leaves), *index.aliases] if k[:1] not in "$"}


def _bits(module: nn.Module) -> list[bytes]:
    """Values of all parameters and buffers, in order, however the module is wrapped."""
    tensors = [*module.parameters(), *module.buffers()]
    return [
        t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors
    ]


class Wrapper(nn.Module):
    """As DistributedDataParallel and DataParallel hold a model."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class Block(nn.Module):
    def __init__(self, change: Callable[[nn.Module], nn.Module] = lambda m: m) -> None:
        super().__init__()
        self.proj = change(nn.Linear(3, 3))
        self.norm = nn.BatchNorm1d(3)


class Net(nn.Module):
    def __init__(self, change: Callable[[nn.Module], nn.Module] = lambda m: m) -> None:
        super().__init__()
        self.blocks = nn.Sequential(change(Block(change)), Block())
        self.head = nn.Linear(3, 2)


WRAPPED: dict[str, Callable[[], nn.Module]] = {
    "plain": Net,
    "module": lambda: Wrapper(Net()),
    "module twice": lambda: Wrapper(Wrapper(Net())),
    "compiled": lambda: torch.compile(Net()),
    "compiled module": lambda: torch.compile(Wrapper(Net())),
    "module of compiled": lambda: Wrapper(torch.compile(Net())),
    "recomputed": lambda: checkpoint_wrapper(Net()),
    "compiled blocks": lambda: Net(torch.compile),
    "recomputed blocks": lambda: Net(checkpoint_wrapper),
    "recomputed of compiled blocks": lambda: Wrapper(
        Net(lambda m: checkpoint_wrapper(torch.compile(m)))
    ),
    "compiled of recomputed blocks": lambda: torch.compile(
        Wrapper(Net(lambda m: torch.compile(checkpoint_wrapper(m))))
    ),
    "module inside": lambda: Net(Wrapper),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_a_wrapped_model_is_saved_under_the_names_of_the_plain_one_and_loads_both_ways(
    name: str,
) -> None:
    def with_optimizer(model: nn.Module) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(model.parameters())
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        optimizer.step()
        return {"model": model, "optim": optimizer}

    plain, wrapped = with_optimizer(Net()), with_optimizer(WRAPPED[name]())
    from_wrapped, from_plain = _save(**wrapped), _save(**plain)
    assert _keys(from_wrapped) == _keys(from_plain)
    assert "model/blocks.0.proj.weight" in _keys(from_plain)
    for store, source, make in ((from_wrapped, wrapped, Net), (from_plain, plain, WRAPPED[name])):
        model = make()
        optimizer = torch.optim.AdamW(model.parameters())
        _restore(store, model=model, optim=optimizer)
        assert _bits(model) == _bits(source["model"])
        moments = [s["exp_avg"] for s in optimizer.state.values()]
        expected = [s["exp_avg"] for s in source["optim"].state.values()]
        assert all(map(torch.equal, moments, expected))
        assert len(moments) == len(expected) == len(list(model.parameters()))


class Own(nn.Module):
    """A user's own child of that name, beside a parameter that would get the same one."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2, bias=False)
        self.weight = nn.Parameter(torch.randn(2, 2))


@pytest.mark.parametrize(
    "wrap", [lambda m: m, Wrapper, torch.compile], ids=["plain", "module", "c"]
)
def test_a_child_that_is_really_called_module_keeps_its_name_where_it_must(wrap: Any) -> None:
    model = wrap(Own())
    store = _save(model=model)
    assert _keys(store) - {""} == {"model/module.weight", "model/weight"}
    for again in (Own(), Wrapper(Own())):
        _restore(store, model=again)
        assert _bits(again) == _bits(model)


def test_names_stay_different_and_an_outer_wrapper_changes_none() -> None:
    for names in (
        ["module.w", "w"],
        ["module.module.w", "module.w", "w"],
        ["module", "module.module"],
        ["a.module.w", "a.w", "b.module.w"],
        ["_orig_mod.module.w", "module._orig_mod.w"],
    ):
        found = canonical_names(names)
        assert len(set(found.values())) == len(names), found
    assert canonical_names(["module.n", "step"]) == {"module.n": "n", "step": "step"}


parts = st.sampled_from(["module", "_orig_mod", "_checkpoint_wrapped_module", "a", "w"])
names = st.sets(st.lists(parts, min_size=1, max_size=4).map(".".join), min_size=1, max_size=6)


@given(names, st.lists(st.sampled_from(["module", "_orig_mod"]), max_size=2))
def test_canonical_names_are_unique_stable_and_the_same_inside_any_wrapper(
    given_names: set[str], wrappers: list[str]
) -> None:
    found = canonical_names(given_names)
    assert len(set(found.values())) == len(given_names)
    prefix = "".join(f"{w}." for w in wrappers)
    inside = canonical_names([prefix + name for name in given_names])
    if all("." in name or len(given_names) > 1 for name in given_names):
        assert {name: inside[prefix + name] for name in given_names} == found


# --- ties -------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self, first: str = "embed", second: str = "head", tie: bool = True) -> None:
        super().__init__()
        setattr(self, first, nn.Linear(8, 100, bias=False))
        setattr(self, second, nn.Linear(8, 100, bias=False))
        if tie:
            self.head.weight = self.embed.weight


def test_a_tied_weight_is_stored_once_with_an_alias_and_stays_tied() -> None:
    model = Tied()
    store = _save(model=model)
    index = _index(store)
    assert index.aliases == {"model/head.weight": "model/embed.weight"}
    assert sum(leaf.key.startswith("model/") for leaf in index.leaves) == 1
    again = Tied()
    weight = again.embed.weight
    _restore(store, model=again)
    assert again.head.weight is again.embed.weight is weight
    assert _bits(again) == _bits(model)


def test_a_tied_weight_fills_both_where_they_are_not_tied() -> None:
    model = Tied()
    again = Tied(tie=False)
    _restore(_save(model=model), model=again)
    assert again.head.weight is not again.embed.weight
    assert _bits(again) == _bits(model) * 2


def test_a_tied_weight_may_have_its_names_in_another_order() -> None:
    def stepped(model: Tied) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(model.parameters())
        model.embed.weight.grad = torch.randn(100, 8)
        optimizer.step()
        return optimizer

    model = Tied("embed", "head")
    optimizer = stepped(model)
    again = Tied("head", "embed")
    other = stepped(again)
    store = _save(model=model, optim=optimizer)
    _restore(store, model=again, optim=other)
    assert again.head.weight is again.embed.weight
    assert _bits(again) == _bits(model)
    moment = optimizer.state[model.embed.weight]["exp_avg"]
    assert torch.equal(other.state[again.head.weight]["exp_avg"], moment)
    assert len(other.state) == 1


def test_two_weights_into_one_tied_is_refused_and_nothing_is_changed() -> None:
    store = _save(model=Tied(tie=False))
    again = Tied()
    before = _bits(again)
    with pytest.raises(
        IncompatibleCheckpoint, match=r"one tensor with model/embed.weight"
    ) as caught:
        _restore(store, model=again)
    assert [key for key, _, _ in caught.value.mismatched] == ["model/head.weight"]
    assert _bits(again) == before


def test_one_module_in_two_items_is_stored_once() -> None:
    inner = nn.Linear(50, 50)
    outer = nn.Sequential(inner, nn.Linear(50, 2))
    index = _index(_save(model=outer, encoder=inner))
    assert index.aliases == {"encoder/weight": "model/0.weight", "encoder/bias": "model/0.bias"}


# --- entries that are no plain parameters -----------------------------------


class WithExtra(nn.Module):
    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize(
    "extra",
    [
        {"amax": torch.arange(3.0), "steps": (1, 2), "deep": {"x": [np.arange(2)]}},
        torch.arange(4),
        np.arange(3.0),
        None,
        7,
        collections.OrderedDict(a=b"bytes"),
    ],
    ids=lambda e: type(e).__name__,
)
@pytest.mark.parametrize("wrap", [lambda m: m, Wrapper], ids=["plain", "wrapped"])
def test_extra_state_of_a_module_comes_back(extra: Any, wrap: Any) -> None:
    again = WithExtra("old")
    model = nn.Sequential(wrap(WithExtra(extra)))
    _restore(_save(model=model), model=nn.Sequential(again))
    assert type(again.extra) is type(extra)
    assert repr(again.extra) == repr(extra)
    assert _bits(again) == _bits(model)


def test_extra_state_that_only_one_side_has_is_a_difference() -> None:
    with_it, without = WithExtra({"a": torch.ones(2)}), nn.Module()
    without.inner = nn.Linear(2, 2)
    with pytest.raises(IncompatibleCheckpoint) as caught:
        _restore(_save(model=with_it), model=without)
    assert caught.value.unexpected_keys == ("model/_extra_state",)
    with pytest.raises(IncompatibleCheckpoint) as caught:
        _restore(_save(model=without), model=with_it)
    assert caught.value.missing_keys == ("model/_extra_state",)


class Scaled(nn.Module):
    """Saves a value that it computes from its memory, and reads it back."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), value))
        self.kept = torch.full((2,), value)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "doubled"] = self.kept * 2

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        doubled = state.pop(prefix + "doubled", None)
        if doubled is not None:
            self.kept = doubled / 2
        super()._load_from_state_dict(state, prefix, *rest)


def test_an_entry_that_the_module_computes_goes_back_through_the_module() -> None:
    again = Scaled(0.0)
    weight = again.weight
    _restore(_save(model=Wrapper(Scaled(3.0))), model=Wrapper(again))
    assert torch.equal(again.kept, torch.full((2,), 3.0))
    assert torch.equal(again.weight, torch.full((3,), 3.0))
    assert again.weight is weight


def test_buffers_come_back_and_those_that_are_not_persistent_are_left_alone() -> None:
    def model(value: float) -> nn.Module:
        found = nn.BatchNorm1d(3)
        found.register_buffer("mask", torch.full((2,), value), persistent=False)
        found.running_mean.fill_(value)
        found.num_batches_tracked.fill_(int(value))
        return found

    again = model(0.0)
    mean = again.running_mean
    store = _save(model=model(5.0))
    assert "model/mask" not in _keys(store)
    _restore(store, model=again)
    assert again.running_mean is mean
    assert mean.tolist() == [5.0] * 3
    assert again.num_batches_tracked.item() == 5
    assert again.mask.tolist() == [0.0, 0.0]


def test_a_frozen_parameter_and_one_without_elements_are_saved_like_any_other() -> None:
    def model() -> nn.Module:
        found = nn.Module()
        found.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        found.empty = nn.Parameter(torch.empty(0, 4))
        found.none = None
        found.register_parameter("absent", None)
        return found

    source, again = model(), model()
    _restore(_save(model=source), model=again)
    assert _bits(again) == _bits(source)


def test_any_name_of_a_parameter_works() -> None:
    names = ["a/b", "[0]", "%", "$leaf", "$tuple", "a~2", "é😀", "\ud800", " ", "Ünï/%2F"]

    def model() -> nn.Module:
        found = nn.Module()
        for name in names:
            found.register_buffer(name, torch.randn(2))
        found.add_module("$int", WithExtra({"x": 1}))
        return found

    source, again = model(), model()
    _restore(_save(**{"net/%": source}), **{"net/%": again})
    assert _bits(again) == _bits(source)


def test_a_parameter_laid_out_channels_last_keeps_its_strides_and_takes_any() -> None:
    source = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)
    for again in (nn.Conv2d(4, 8, 3), nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)):
        strides = again.weight.stride()
        _restore(_save(model=source), model=again)
        assert again.weight.stride() == strides
        assert torch.equal(again.weight, source.weight)


# --- what is refused --------------------------------------------------------


@pytest.mark.parametrize("restore", [False, True], ids=["save", "restore"])
@pytest.mark.parametrize(
    ("make", "key", "hint"),
    [
        (lambda: nn.LazyLinear(3), "model/weight", "one forward pass"),
        (lambda: nn.Linear(3, 3, device="meta"), "model/weight", "materialise"),
    ],
    ids=["lazy", "meta"],
)
def test_a_model_without_values_is_neither_saved_nor_restored(
    make: Any, key: str, hint: str, restore: bool
) -> None:
    store = _save(model=nn.Linear(3, 3))
    with pytest.raises(StateError, match=hint) as caught:
        _restore(store, model=make()) if restore else _save(model=make())
    assert caught.value.key == key


class Broken(nn.Linear):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        raise KeyError("no such thing")


class Narrow(nn.Linear):
    def state_dict(self) -> Any:
        return {}


@pytest.mark.parametrize("kind", [Broken, Narrow])
def test_a_state_dict_that_raises_is_named_and_not_taken_for_a_damaged_checkpoint(
    kind: type[nn.Linear],
) -> None:
    with pytest.raises(CaptureError, match=r"state 'model': its state_dict\(\) raised"):
        _save(model=kind(2, 2))
    with pytest.raises(CaptureError, match=r"state 'model': its state_dict\(\) raised"):
        _restore(_save(model=nn.Linear(2, 2)), model=kind(2, 2))


class Holds(nn.Module):
    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.inner = WithExtra(extra)


def test_extra_state_without_a_tag_is_refused_by_its_path() -> None:
    with pytest.raises(StateError) as caught:
        _save(model=Holds({"f": [lambda: 0]}))
    assert caught.value.key == "model/inner._extra_state/f/[0]"
