"""The state as a whole: what may be in it, where it goes back to, and how differences are told."""

from __future__ import annotations

import collections
import dataclasses
import json
import random
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from asymcheck import Checkpointer, CheckpointError, IncompatibleCheckpoint, StateError
from asymcheck.decoding import Decoding
from asymcheck.device.state import State
from asymcheck.errors import CaptureError, CorruptCheckpoint
from asymcheck.recovery import CheckpointWarning, TornRestore
from asymcheck.storage.memory import MemoryStore
from asymcheck.storage.repository import open_repository


def _save(state: Mapping[str, object]) -> MemoryStore:
    store = MemoryStore("state")
    with Checkpointer(store, state=state) as ckpt:
        ckpt.save(1)
    return store


def _restore(store: MemoryStore, state: Mapping[str, object], **options: Any) -> Any:
    with Checkpointer(store, state=state, read_only=True) as ckpt:
        ckpt.restore(**options)
    return ckpt.report


@dataclasses.dataclass(frozen=True)
class Frozen:
    values: tuple[int, ...]


@dataclasses.dataclass
class Progress:
    epoch: int
    seen: list[int]
    mean: torch.Tensor


# --- schedulers and scalers -------------------------------------------------


class Warmup:
    """A rate that is an object with state of its own."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __call__(self, epoch: int) -> float:
        return min(1.0, (epoch + 1) / self.steps)


S = lr_scheduler
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: S.LambdaLR(o, lambda epoch: 0.9**epoch),
    "LambdaLR with an object": lambda o: S.LambdaLR(o, Warmup(5)),
    "MultiplicativeLR": lambda o: S.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: S.StepLR(o, 2),
    "MultiStepLR": lambda o: S.MultiStepLR(o, [2, 4, 4, 6]),
    "ConstantLR": lambda o: S.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: S.LinearLR(o, 0.1, 1.0, 8),
    "ExponentialLR": lambda o: S.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: S.PolynomialLR(o, 9, 2.0),
    "CosineAnnealingLR": lambda o: S.CosineAnnealingLR(o, 6),
    "CosineAnnealingWarmRestarts": lambda o: S.CosineAnnealingWarmRestarts(o, 3, 2),
    "CyclicLR": lambda o: S.CyclicLR(o, 0.01, 0.1, 3, mode="exp_range"),
    "CyclicLR with a function": lambda o: S.CyclicLR(o, 0.01, 0.1, 3, scale_fn=lambda x: 0.5),
    "OneCycleLR": lambda o: S.OneCycleLR(o, 0.5, 20),
    "ReduceLROnPlateau": lambda o: S.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: S.SequentialLR(
        o, [S.ConstantLR(o, 0.1, 3), S.CosineAnnealingLR(o, 5)], [3]
    ),
    "ChainedScheduler": lambda o: S.ChainedScheduler([S.ConstantLR(o, 0.1, 4), S.StepLR(o, 2)]),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("steps", [0, 4])
def test_a_schedule_goes_on_where_it_was(name: str, steps: int) -> None:
    def make() -> dict[str, Any]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], 0.1, momentum=0.9)
        return {"optim": optimizer, "sched": SCHEDULERS[name](optimizer)}

    def run(state: dict[str, Any], count: int) -> list[float]:
        rates = []
        for i in range(count):
            state["optim"].step()
            state["sched"].step(*([1.0 + i] if name == "ReduceLROnPlateau" else []))
            rates.append(state["optim"].param_groups[0]["lr"])
        return rates

    source, again = make(), make()
    run(source, steps)
    store = _save(source)
    expected = run(source, 7)
    _restore(store, again)
    assert run(again, 7) == expected
    assert again["sched"].get_last_lr() == source["sched"].get_last_lr()


@pytest.mark.parametrize("used", [False, True], ids=["before first use", "after first use"])
def test_a_gradient_scaler_comes_back_whether_it_was_used_already_or_not(used: bool) -> None:
    def make(scale: float) -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3)

    source, again = make(256.0), make(65536.0)
    assert source.scale(torch.ones(())).item() == 256.0
    source._growth_tracker.fill_(2)
    if used:
        again.scale(torch.ones(()))
    _restore(_save({"scaler": source}), {"scaler": again})
    assert again.get_scale() == 256.0
    assert again.scale(torch.ones(())).item() == 256.0
    assert again.state_dict() == source.state_dict()


def test_a_scaler_that_is_off_has_no_state_and_needs_none() -> None:
    off = torch.amp.GradScaler("cpu", enabled=False)
    _restore(_save({"scaler": off}), {"scaler": torch.amp.GradScaler("cpu", enabled=False)})


# --- random numbers ---------------------------------------------------------


def _draw() -> list[Any]:
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.normal()),
        torch.rand(2).tolist(),
        torch.randperm(5).tolist(),
    ]


def test_the_generators_of_the_process_go_on_where_they_were_without_being_asked_for() -> None:
    _draw()
    store = _save({"x": {}})
    expected = _draw()
    _draw()
    report = _restore(store, {"x": {}})
    assert report.rng_problems == ()
    assert _draw() == expected


def test_saving_and_refusing_draw_no_random_number() -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    expected = _draw()
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    store = _save({"x": torch.randn(0), "net": nn.Identity(), "g": [np.random.default_rng(1)]})
    with pytest.raises(IncompatibleCheckpoint):
        _restore(store, {"x": torch.ones(2), "net": nn.Identity(), "g": []})
    assert _draw() == expected


GENERATORS: dict[str, tuple[Callable[[int], Any], Callable[[Any], Any]]] = {
    "random": (random.Random, lambda g: [g.random(), g.gauss(0, 1)]),
    "torch": (
        lambda seed: torch.Generator().manual_seed(seed),
        lambda g: torch.rand(3, generator=g).tolist(),
    ),
    "numpy": (np.random.default_rng, lambda g: g.normal(size=3).tolist()),
    "numpy legacy": (np.random.RandomState, lambda g: g.normal(size=3).tolist()),
}


@pytest.mark.parametrize("inside", [False, True], ids=["at the top", "in a dict"])
@pytest.mark.parametrize("name", GENERATORS)
def test_a_generator_of_the_users_own_goes_on_in_place(name: str, inside: bool) -> None:
    make, draw = GENERATORS[name]
    source, live = make(1), make(2)
    draw(source)
    wrap = (lambda g: {"x": {"g": [g]}}) if inside else (lambda g: {"x": g})
    store = _save(wrap(source))
    expected = draw(source)
    held = wrap(live)
    _restore(store, held)
    assert draw(live) == expected
    if inside:
        assert held["x"]["g"][0] is live


def test_a_numpy_generator_in_place_spawns_the_children_that_come_next() -> None:
    source, live = np.random.default_rng(5), np.random.default_rng(5)
    source.spawn(3)
    live.spawn(1)
    _restore(_save({"g": source}), {"g": live})
    assert live.spawn(1)[0].random() == source.spawn(1)[0].random()


def test_what_of_the_random_numbers_cannot_be_set_is_warned_of_and_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from asymcheck.device import rng

    whole = rng.get_states()
    with monkeypatch.context() as patch:
        without = {k: v for k, v in whole.items() if k != "numpy"}
        patch.setattr(rng, "get_states", lambda: {**without, "cuda": [torch.zeros(16).byte()] * 99})
        store = _save({"x": {}})
    with pytest.warns(CheckpointWarning, match=r"no numpy state was saved; CUDA states of 99 devi"):
        report = _restore(store, {"x": {}})
    assert len(report.rng_problems) == 2


def test_a_random_state_that_this_process_cannot_take_is_reported_and_the_rest_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from asymcheck.device import rng

    whole = rng.get_states()
    with monkeypatch.context() as patch:
        odd = {**whole, "numpy": np.random.default_rng(1).bit_generator.state}
        patch.setattr(rng, "get_states", lambda: odd)
        store = _save({"x": {}})
    torch.manual_seed(0)
    with pytest.warns(CheckpointWarning, match="the numpy state was refused"):
        report = _restore(store, {"x": {}})
    assert len(report.rng_problems) == 1
    assert torch.equal(torch.get_rng_state(), whole["torch"])


# --- containers -------------------------------------------------------------


def test_containers_are_filled_in_place_at_every_depth() -> None:
    def make(n: int) -> dict[str, Any]:
        return {
            "dict": {"n": n, "in": {"t": torch.full((2,), float(n)), "l": [n, [n]]}},
            "ordered": collections.OrderedDict(a=torch.full((2,), float(n)), b=[n]),
            "list": [torch.full((3,), n), {"a": n}],
            "set": {n},
            "bytes": bytearray(bytes([n])),
            "deque": collections.deque([n, [n]], 3),
            "array": np.full(3, n),
            "odd": {1: {"t": torch.full((2,), float(n))}, (1, "x"): [n]},
        }

    source, live = make(1), make(2)
    held = [
        live["dict"]["in"],
        live["dict"]["in"]["t"],
        live["dict"]["in"]["l"][1],
        live["ordered"]["a"],
        live["ordered"]["b"],
        live["list"][0],
        live["list"][1],
        live["deque"][1],
        live["odd"][1]["t"],
        live["odd"][1, "x"],
    ]
    _restore(_save(source), live)
    assert str(live) == str(source)
    now = [
        live["dict"]["in"],
        live["dict"]["in"]["t"],
        live["dict"]["in"]["l"][1],
        live["ordered"]["a"],
        live["ordered"]["b"],
        live["list"][0],
        live["list"][1],
        live["deque"][1],
        live["odd"][1]["t"],
        live["odd"][1, "x"],
    ]
    assert all(a is b for a, b in zip(held, now, strict=True))


def test_keys_that_were_not_there_at_the_save_go_and_order_comes_back() -> None:
    live: dict[str, Any] = {"b": 0, "old": torch.ones(2), "a": 0}
    rows = [9, 9, 9]
    _restore(_save({"d": {"a": 1, "b": 2, "new": [3]}, "l": [1]}), {"d": live, "l": rows})
    assert list(live.items()) == [("a", 1), ("b", 2), ("new", [3])]
    assert rows == [1]


def test_one_live_object_at_two_places_does_not_get_the_content_of_both() -> None:
    row = [0]
    tensor, array = torch.zeros(2), np.zeros(2)
    live = {"rows": [row, row], "tensors": [tensor, tensor], "arrays": [array, array]}
    source = {
        "rows": [[1], [2]],
        "tensors": [torch.ones(2), torch.full((2,), 2.0)],
        "arrays": [np.ones(2), np.full(2, 2.0)],
    }
    _restore(_save({"x": source}), {"x": live})
    assert str(live) == str(source)


def test_one_list_in_two_entries_does_not_get_the_content_of_both() -> None:
    row, array = [0], np.zeros(2)
    live = {"a": {"r": row, "x": array}, "b": {"r": row, "x": array}}
    source = {"a": {"r": [1], "x": np.ones(2)}, "b": {"r": [2], "x": np.full(2, 2.0)}}
    _restore(_save(source), live)
    assert str(live) == str(source)
    for twice in (row, array):
        with pytest.raises(StateError, match="the same object as 'a'"):
            Checkpointer(MemoryStore(), state={"a": twice, "b": twice})


def test_values_of_other_types_are_replaced_and_frozen_ones_never_changed() -> None:
    shared = Frozen((1,))
    live = {"a": [1], "b": {"k": 1}, "c": shared, "d": collections.deque([1], 2)}
    source = {"a": (2,), "b": [2], "c": Frozen((3,)), "d": collections.deque([1, 2, 3], 3)}
    _restore(_save({"x": source}), {"x": live})
    assert live == source
    assert live["d"].maxlen == 3
    assert shared == Frozen((1,))


@pytest.fixture(autouse=True)
def _findable(monkeypatch: pytest.MonkeyPatch) -> None:
    # Where tests are imported by path, their module need not be registered by its name.
    import sys
    import types

    monkeypatch.setitem(sys.modules, __name__, types.ModuleType(__name__))
    sys.modules[__name__].__dict__.update(globals())


@pytest.mark.parametrize("top", [False, True], ids=["in a dict", "at the top"])
def test_a_dataclass_is_filled_in_place(top: bool) -> None:
    progress = Progress(0, [], torch.zeros(2))
    seen, mean = progress.seen, progress.mean
    source = Progress(3, [1, 2], torch.ones(2))
    _restore(
        _save({"x": source} if top else {"x": {"p": source}}),
        {"x": progress} if top else {"x": {"p": progress}},
    )
    assert progress.epoch == 3
    assert progress.seen is seen
    assert seen == [1, 2]
    assert progress.mean is mean
    assert torch.equal(mean, torch.ones(2))


def test_what_an_object_says_is_its_state_goes_back_through_the_object() -> None:
    class Meter:
        def __init__(self) -> None:
            self.rows: list[Any] = []

        def state_dict(self) -> Any:
            return {"rows": self.rows, "total": torch.tensor(len(self.rows))}

        def load_state_dict(self, state: Any) -> None:
            self.rows = state["rows"]
            assert state["total"].item() == len(self.rows)

    source, live = Meter(), Meter()
    source.rows += [(1, 2.5), "x"]
    _restore(_save({"meter": source}), {"meter": live})
    assert live.rows == [(1, 2.5), "x"]


# --- what may be an entry ---------------------------------------------------


class OnlySaves:
    def state_dict(self) -> dict[str, int]:
        return {}


class Raises:
    def state_dict(self) -> dict[str, int]:
        raise ZeroDivisionError("half a state")

    def load_state_dict(self, state: Any) -> None: ...


def _generator() -> Any:
    yield 1


@pytest.mark.parametrize(
    "value",
    [1, 1.5, True, 2j, "t", b"b", (1, 2), None, frozenset({1}), np.int8(1), Frozen((1,)), Path()],
    ids=lambda v: type(v).__name__,
)
def test_a_value_that_cannot_be_changed_in_place_is_refused_with_the_way_out(value: object) -> None:
    with pytest.raises(
        StateError, match=r"wrap it in a dict, for instance state=\{'step'"
    ) as caught:
        Checkpointer(MemoryStore(), state={"step": value})
    assert caught.value.key == "step"


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (DataLoader([1, 2, 3]), "StatefulDataLoader"),
        (OnlySaves(), "no load_state_dict"),
        (object(), "builtins.object cannot be saved"),
        (Raises, "cannot be saved"),
        (nn.Linear, "cannot be saved"),
        (lambda: 0, "function cannot be saved"),
        (_generator(), "generator cannot be saved"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_an_object_without_a_state_is_refused_when_the_checkpointer_is_made(
    value: object, hint: str
) -> None:
    store = MemoryStore()
    with pytest.raises(StateError, match=hint) as caught:
        Checkpointer(store, state={"ok": {}, "thing": value})
    assert caught.value.key == "thing"
    assert list(store.list()) == []


@pytest.mark.parametrize("name", ["", "$rng", "$", 3, None, ("a",)])
def test_a_name_must_be_a_text_of_its_own(name: Any) -> None:
    with pytest.raises(StateError, match="expected a name"):
        Checkpointer(MemoryStore(), state={name: {}})


def test_an_empty_state_is_refused() -> None:
    with pytest.raises(StateError, match="at least one object"):
        Checkpointer(MemoryStore(), state={})


@pytest.mark.parametrize(
    "name", ["a/b", "a%2Fb", "[0]", "é😀", "\ud800", " ", "~2", "a\0", "x" * 5000]
)
def test_any_other_name_works_beside_one_that_looks_alike(name: str) -> None:
    store = _save({name: {"t": torch.ones(2)}, "a": {"b": torch.zeros(2)}, "b": nn.Linear(1, 1)})
    live: dict[str, Any] = {}
    _restore(store, {name: live, "a": {}, "b": nn.Linear(1, 1)})
    assert torch.equal(live["t"], torch.ones(2))


def test_a_state_dict_that_raises_loses_this_save_only(tmp_path: Any) -> None:
    state = {"bad": Raises(), "x": {}}
    with Checkpointer(tmp_path, state=state) as ckpt:
        with pytest.raises(
            CaptureError, match=r"'bad': its state_dict\(\) raised ZeroDivisionError"
        ):
            ckpt.save(1)
        assert list(tmp_path.glob("step-*")) == []
        assert ckpt.steps() == []


# --- differences ------------------------------------------------------------


class Net(nn.Module):
    def __init__(
        self, *, extra: str = "", width: int = 3, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.body = nn.Linear(3, width)
        self.head = nn.Linear(3, 1, dtype=dtype)
        if extra:
            setattr(self, extra, nn.Linear(2, 2, bias=False))


def _state(net: Net, rates: tuple[float, ...] = (0.1,), **more: object) -> dict[str, Any]:
    parts = [net.body, net.head]
    groups = [{"params": p.parameters(), "lr": r} for p, r in zip(parts, rates, strict=False)]
    return {"model": net, "optim": torch.optim.SGD(groups), **more}


def _bits(state: Mapping[str, Any]) -> list[bytes]:
    return [p.detach().numpy().tobytes() for p in state["model"].parameters()]


def test_all_differences_are_told_at_once_and_nothing_is_changed() -> None:
    store = _save(
        _state(
            Net(extra="decoder", dtype=torch.float64),
            (0.1, 0.2),
            log={"a": [1]},
            gone={},
            kind=torch.ones(2),
        )
    )
    live = _state(Net(extra="decodr", width=4), (0.3,), log=[1], new={}, kind={"t": 1})
    before = _bits(live)
    rate = live["optim"].param_groups[0]["lr"]
    with pytest.raises(IncompatibleCheckpoint) as caught:
        _restore(store, live)
    error = caught.value
    assert set(error.missing_keys) == {"model/decodr.weight", "new"}
    assert set(error.unexpected_keys) == {
        "model/decoder.weight",
        "optim/model/head.weight",
        "optim/model/head.bias",
        "gone",
    }
    assert set(error.mismatched) == {
        ("model/body.weight", "shape [4, 3]", "shape [3, 3]"),
        ("model/body.bias", "shape [4]", "shape [3]"),
        ("model/head.weight", "float32", "float64"),
        ("model/head.bias", "float32", "float64"),
        ("optim/model/body.weight", "shape [4, 3]", "shape [3, 3]"),
        ("optim/model/body.bias", "shape [4]", "shape [3]"),
        ("log", "list", "dict"),
        ("kind", "value", "tensor"),
    }
    text = str(error)
    assert "step 1 (attempt 1) does not match the live state; nothing was loaded" in text
    assert "model/decodr.weight   (near: model/decoder.weight)" in text
    assert "model/head.weight: live float32, checkpoint float64" in text
    assert "strict=False" in text
    assert _bits(live) == before
    assert live["optim"].param_groups[0]["lr"] == rate
    assert live["log"] == [1]


def test_with_strict_off_what_matches_is_loaded_and_the_rest_is_reported() -> None:
    source = _state(Net(extra="decoder", dtype=torch.float64), (0.1,), log={"a": 1}, gone={})
    live = _state(Net(extra="other"), (0.5,), log={}, new=[7])
    untouched = live["model"].head.weight.clone()
    report = _restore(_save(source), live, strict=False)
    assert report.missing_keys == ("new", "model/other.weight")
    assert report.unexpected_keys == ("gone", "model/decoder.weight")
    assert [key for key, _, _ in report.mismatched] == ["model/head.weight", "model/head.bias"]
    assert torch.equal(live["model"].body.weight, source["model"].body.weight)
    assert torch.equal(live["model"].head.weight, untouched)
    assert live["optim"].param_groups[0]["lr"] == 0.1
    assert live["log"] == {"a": 1}
    assert live["new"] == [7]


def test_a_cast_that_is_asked_for_is_reported_and_changes_no_saved_value() -> None:
    source = _state(Net(dtype=torch.float64))
    before = _bits(source)
    live = _state(Net())
    report = _restore(_save(source), live, dtype_policy="cast")
    assert report.cast_keys == ("model/head.weight", "model/head.bias")
    assert torch.equal(live["model"].head.weight, source["model"].head.weight.float())
    assert live["model"].head.weight.dtype == torch.float32
    assert _bits(source) == before


def test_a_long_list_of_differences_is_cut_and_counted() -> None:
    store = _save({"m": nn.ParameterDict({f"p{i}": torch.ones(1) for i in range(60)})})
    with pytest.raises(IncompatibleCheckpoint, match=r"not in the live state \(60\)") as caught:
        _restore(store, {"m": nn.ParameterDict()})
    assert len(caught.value.unexpected_keys) == 60
    assert "… and 40 more" in str(caught.value)
    assert str(caught.value).count("\n") < 40


@pytest.mark.parametrize(
    ("live", "saved", "expected"),
    [
        (np.zeros(2), np.zeros(3), ("numpy:<f8 [2]", "numpy:<f8 [3]")),
        (collections.deque(maxlen=2), collections.deque([1], 3), ("maxlen 2", "maxlen 3")),
        (
            np.random.default_rng(1),
            np.random.Generator(np.random.Philox(1)),
            ("PCG64", "Philox"),
        ),
        ({}, collections.OrderedDict(), ("dict", "OrderedDict")),
        (bytearray(), [], ("bytearray", "list")),
        (Progress(1, [], torch.ones(1)), {}, ("Progress", "dict")),
        (
            dataclasses.make_dataclass("Progress", ["epoch"])(1),
            Progress(1, [], torch.ones(1)),
            ("types:Progress", f"{__name__}:Progress"),
        ),
    ],
    ids=lambda v: type(v).__name__,
)
def test_a_live_value_that_could_not_take_the_content_is_a_difference(
    live: Any, saved: Any, expected: tuple[str, str]
) -> None:
    with pytest.raises(IncompatibleCheckpoint) as caught:
        _restore(_save({"x": saved}), {"x": live})
    assert caught.value.mismatched == (("x", *expected),)
    report = _restore(_save({"x": saved}), {"x": live}, strict=False)
    assert report.mismatched == (("x", *expected),)


def test_an_error_while_an_object_loads_is_told_to_have_left_half_a_state() -> None:
    class Fails:
        def state_dict(self) -> Any:
            return {"a": 1}

        def load_state_dict(self, state: Any) -> None:
            raise KeyError("b")

    live = torch.zeros(2)
    store = _save({"w": torch.ones(2), "bad": Fails()})
    with Checkpointer(store, state={"w": live, "bad": Fails()}) as ckpt:
        with pytest.raises(
            CorruptCheckpoint, match=r"KeyError\('b'\).*overwritten in part"
        ) as caught:
            ckpt.restore()
        assert isinstance(caught.value.__cause__, KeyError)
        with pytest.raises(CaptureError, match="build it anew"):
            ckpt.save(2)


def _damaged(first: dict[str, Any], second: dict[str, Any]) -> MemoryStore:
    """Two checkpoints; the last byte of the newer one's pack is wrong."""
    store = MemoryStore("damaged")
    with Checkpointer(store, state=first) as ckpt:
        ckpt.save(1)
    with Checkpointer(store, state=second) as ckpt:
        ckpt.restore(strict=False)
        for name, value in second.items():
            value["t"].fill_(len(name))
        ckpt.save(2)
    name = max(e.name for e in store.list() if e.name.endswith(".pack"))
    pack = bytearray(store._objects[name])
    pack[-1] ^= 1
    store._objects[name] = bytes(pack)
    return store


def _large(*names: str) -> dict[str, Any]:
    return {name: {"t": torch.zeros(5_000_000)} for name in names}


def test_an_older_checkpoint_that_does_not_match_is_no_excuse_for_half_a_newer_one() -> None:
    store = _damaged(_large("a"), _large("a", "bb"))
    with Checkpointer(store, state=_large("a", "bb")) as ckpt:
        with pytest.raises(TornRestore, match="does not match the live state"):
            ckpt.restore()
        with pytest.raises(CaptureError, match="build it anew"):
            ckpt.save(3)


def test_what_an_older_checkpoint_lacks_must_not_be_left_half_overwritten() -> None:
    store = _damaged(_large("a"), _large("a", "bb"))
    with pytest.raises(TornRestore, match="read into 'bb', which this one does not hold"):
        _restore(store, _large("a", "bb"), strict=False)
    live = _large("a")  # needs none of the damaged bytes
    assert _restore(store, live, strict=False).step == 2
    assert live["a"]["t"].eq(1).all()


# --- a tree that someone wrote by hand --------------------------------------


def _everything() -> dict[str, Any]:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return {
        "model": net,
        "optim": optimizer,
        "sched": lr_scheduler.StepLR(optimizer, 2),
        "values": {"a": [1, {"b": (torch.ones(2), np.ones(2))}], "g": np.random.default_rng(1)},
        "queue": collections.deque([1], 4),
        "array": np.ones(3),
        "tensor": torch.ones(3),
    }


def _nodes(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree)
    found = [path]
    for key, value in inner:
        if isinstance(value, dict | list):
            found += _nodes(value, (*path, key)) if len(value) < 100 else []
        else:
            found.append((*path, key))
    return found


_STATE = _everything()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    _STORE = _save(_STATE)
_REPOSITORY = open_repository(_STORE)
with _REPOSITORY.open(_REPOSITORY.lineage()[-1]) as _checkpoint:
    _INDEX = _checkpoint.indexes[0]
    _TEXT = Decoding(_checkpoint).read_leaf(_INDEX, next(x for x in _INDEX.leaves if x.key == ""))
_PATHS = _nodes(json.loads(_TEXT))
_junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.floats(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.text(max_size=3) | st.sampled_from(["$leaf", "$tuple"]), inner, max_size=2
        )
    ),
    max_leaves=4,
)


@settings(max_examples=300)
@given(st.sampled_from(_PATHS), _junk)
def test_a_tree_with_any_part_replaced_is_planned_or_refused_by_an_error_of_ours(
    path: tuple[Any, ...], junk: Any
) -> None:
    tree = json.loads(_TEXT)
    if path:
        at = tree
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = junk
    else:
        tree = junk
    try:
        State(_everything()).plan(_INDEX, json.dumps(tree).encode(), strict=False, cast=True)
    except CheckpointError as refused:
        assert isinstance(refused, CorruptCheckpoint | IncompatibleCheckpoint)  # noqa: PT017


@pytest.mark.parametrize("text", [b"", b"{", b"\xff", b"[]", b"{}", b"null", b"[" * 100_000])
def test_a_tree_that_is_none_is_damage(text: bytes) -> None:
    with pytest.raises(CorruptCheckpoint, match="not a state tree"):
        State(_everything()).plan(_INDEX, text, strict=True, cast=False)
