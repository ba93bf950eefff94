"""Bug reports about other checkpoint libraries, as cases of this one: state and loading.

Each docstring starts with the id of the case.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import datetime
import enum
import json
import pickle
import random
import subprocess
import sys
import textwrap
import time
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo.guards  # it derives from classes of pickle that a test takes away
from torch import nn

from asymcheck import (
    Checkpointer,
    CheckpointError,
    CorruptCheckpoint,
    IncompatibleCheckpoint,
    StateError,
)
from asymcheck.device.leaves import Collector
from asymcheck.events import Span
from asymcheck.recovery import CheckpointWarning
from asymcheck.storage.memory import MemoryStore
from asymcheck.storage.repository import open_repository


def _save(root: Any, /, **state: object) -> Any:
    with Checkpointer(root, state=state) as ckpt:
        ckpt.save(1)
    return root


def _restore(root: Any, /, _options: dict[str, Any] | None = None, **state: object) -> Any:
    with Checkpointer(root, state=state, read_only=True) as ckpt:
        ckpt.restore(**(_options or {}))
    return ckpt.report


def _bits(value: Any) -> Any:
    """A value with tensors as their bytes."""
    match value:
        case torch.Tensor():
            flat = value.detach().contiguous().reshape(-1)
            return str(value.dtype), tuple(value.shape), flat.view(torch.uint8).numpy().tobytes()
        case dict():
            return {k: _bits(v) for k, v in value.items()}
        case list() | tuple():
            return [_bits(v) for v in value]
    if hasattr(value, "state_dict"):
        return _bits(value.state_dict())
    return type(value), repr(value)


def _bytes_on_disk(root: Path) -> int:
    return sum(p.stat().st_size for p in root.rglob("*") if p.is_file())


def _python(script: str, *arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a script of its own, as a user would: from a file, without a main guard."""
    path = cwd / "script.py"
    path.write_text(textwrap.dedent(script))
    done = subprocess.run(
        [sys.executable, str(path), *map(str, arguments)],
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
        cwd=cwd,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


class Net(nn.Module):
    def __init__(self, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.inner = nn.Linear(4, width)
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(torch.tanh(self.norm(self.inner(x)))))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


# --- A: silent wrong state --------------------------------------------------


def _moving() -> dict[str, Any]:
    model = nn.Linear(256, 256)  # large enough to be read behind the training's back
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    base = torch.zeros(40_000)
    values: dict[str, Any] = {
        "tensor": torch.zeros(3),
        "step": torch.zeros(()),
        "rows": [],
        "deep": {"in": [{"n": 0, "t": torch.zeros(2)}]},
        "whole": base,
        "half": base[20_000:],
        "array": np.zeros(3),
        "replaced": torch.zeros(2),
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return {"model": model, "optim": optimizer, "values": values, "set": {0}}


def _move(state: dict[str, Any], to: int) -> None:
    """Change every kind of thing in place, from ``to - 1`` to ``to``."""
    values = state["values"]
    values["tensor"].add_(1)
    values["step"].add_(1)
    values["rows"].append(to)
    values["deep"]["in"][0]["n"] = to
    values["deep"]["in"][0]["t"] += 1
    values["whole"].add_(1)
    values["array"] += 1
    values["replaced"] = torch.full((2,), float(to))
    state["set"].clear()
    state["set"].add(to)
    for p in state["model"].parameters():
        p.grad = torch.full_like(p, -1.0)
    state["optim"].step()
    state["optim"].param_groups[0]["note"] = [to]


def test_what_training_changes_right_after_save_returns_is_not_in_the_checkpoint() -> None:
    """A3: fifty saves, each followed at once by changes of every kind, while the writer is slow."""
    pace = random.Random(0)

    def slow(span: Span) -> None:
        time.sleep(pace.random() * 0.002)

    state, store = _moving(), MemoryStore("torn")
    with Checkpointer(store, state=state, sink=slow) as ckpt:
        for step in range(1, 101, 2):
            _move(state, step)
            ckpt.save(step)
            _move(state, step + 1)
    for step in range(1, 101, 2):
        found = _moving()
        with Checkpointer(store, state=found, read_only=True) as ckpt:
            assert ckpt.restore(step) == step
        values = found["values"]
        assert values["rows"] == list(range(1, step + 1))
        assert values["deep"]["in"][0]["n"] == step
        assert found["set"] == {step}
        assert found["optim"].param_groups[0]["note"] == [step]
        assert values["half"].shape == (20_000,)
        tensors = [v for v in values.values() if isinstance(v, torch.Tensor)]
        tensors += [values["deep"]["in"][0]["t"], torch.from_numpy(values["array"])]
        tensors += found["model"].parameters()
        assert len(tensors) == 9
        assert all(torch.equal(t, torch.full_like(t, step)) for t in tensors)


def _stepped(model: nn.Module, steps: int = 1) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        _step(model, optimizer)
    return optimizer


@pytest.mark.parametrize(
    "case", ["fresh", "gradients wait", "frozen", "partly stepped", "empty group"]
)
def test_no_state_of_an_optimizer_is_dropped_without_a_word(case: str) -> None:
    """A6 (i) to (v): into a never-stepped optimizer, frozen after training, partly stepped."""
    model, again = Net(), Net()
    if case == "partly stepped":
        model.inner.requires_grad_(False)
    optimizer = _stepped(model)
    fresh = torch.optim.AdamW(again.parameters())
    if case == "gradients wait":
        again(torch.ones(2, 4)).sum().backward()
    if case == "frozen":
        model.inner.requires_grad_(False)
        again.inner.requires_grad_(False)
    if case == "empty group":
        for each in (optimizer, fresh):
            each.param_groups.insert(0, {**each.param_groups[0], "params": []})
        optimizer.param_groups[1]["lr"] = 0.5
    _restore(_save(MemoryStore(), model=model, optim=optimizer), model=again, optim=fresh)
    assert _bits(fresh) == _bits(optimizer)
    assert len(fresh.state) == (4 if case == "partly stepped" else 6)


def test_a_group_that_was_added_after_the_save_is_named_by_its_parameters() -> None:
    """A6 (vi): a group added after the save."""
    model, again = Net(), Net()
    optimizer = torch.optim.AdamW(model.inner.parameters())
    live = torch.optim.AdamW(again.inner.parameters())
    live.add_param_group({"params": list(again.head.parameters())})
    store = _save(MemoryStore(), model=model, optim=optimizer)
    with pytest.raises(IncompatibleCheckpoint) as caught:
        _restore(store, model=again, optim=live)
    assert caught.value.missing_keys == ("optim/model/head.weight", "optim/model/head.bias")


def test_neither_saving_nor_restoring_steps_anything() -> None:
    """A7: reading the optimizer's state must not run step(), nor move scheduler or scaler."""
    calls: collections.Counter[str] = collections.Counter()

    class Optimizer(torch.optim.AdamW):
        def step(self, *args: Any, **kwargs: Any) -> Any:
            calls["step"] += 1
            return super().step(*args, **kwargs)

    def make() -> dict[str, Any]:
        model = Net()
        optimizer = Optimizer(model.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        scaler.scale(torch.ones(()))
        return {"model": model, "optim": optimizer, "sched": schedule, "scaler": scaler}

    state, again = make(), make()
    calls.clear()
    before = _bits(state)
    store = _save(MemoryStore(), **state)
    assert _bits(state) == before
    _restore(store, **again)
    assert _bits(again) == before
    assert calls == {}


@pytest.mark.parametrize("used", [False, True], ids=["before first use", "after first use"])
def test_loss_scale_and_rate_go_on_and_training_is_bit_for_bit_the_same(used: bool) -> None:
    """A8: GradScaler at scale 256 and LambdaLR at step 11, loaded before and after lazy init."""

    def make() -> dict[str, Any]:
        torch.manual_seed(3)
        model = Net(dropout=0.5)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
        scaler = torch.amp.GradScaler("cpu", init_scale=65536.0, growth_interval=7)
        return {"model": model, "optim": optimizer, "sched": schedule, "scaler": scaler}

    def step(s: dict[str, Any]) -> float:
        s["optim"].zero_grad()
        loss = s["model"](torch.randn(8, 4)).square().mean()
        s["scaler"].scale(loss).backward()
        s["scaler"].step(s["optim"])
        s["scaler"].update()
        s["sched"].step()
        return loss.item()

    state = make()
    step(state)
    state["scaler"].update(256.0)
    for _ in range(10):
        step(state)
    assert state["sched"].last_epoch == 11
    store = _save(MemoryStore(), **state)
    scale, rate = state["scaler"].get_scale(), state["optim"].param_groups[0]["lr"]
    expected = [step(state) for _ in range(5)]
    again = make()
    if used:
        step(again)
    _restore(store, **again)
    assert again["scaler"].get_scale() == scale
    assert again["optim"].param_groups[0]["lr"] == rate
    assert [step(again) for _ in range(5)] == expected
    assert _bits(again) == _bits(state)


def test_dropout_and_shuffling_after_the_resume_are_those_of_the_uninterrupted_run() -> None:
    """A9: Python, NumPy (legacy and Generator) and torch generators, five steps on."""

    def make() -> dict[str, Any]:
        model = Net(dropout=0.5)
        optimizer = torch.optim.AdamW(model.parameters())
        return {"model": model, "optim": optimizer, "own": np.random.default_rng()}

    def draw(s: dict[str, Any]) -> list[float]:
        mine = [random.random(), float(np.random.rand()), float(s["own"].random())]
        return [*mine, _step(s["model"], s["optim"])]

    state = make()
    for _ in range(3):
        draw(state)
    store = _save(MemoryStore(), **state)
    expected = [draw(state) for _ in range(5)]
    again = make()
    report = _restore(store, **again)
    assert report.rng_problems == ()
    assert [draw(again) for _ in range(5)] == expected


def test_random_states_that_are_missing_are_warned_of_once_and_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A9: if the RNG part is missing: one warning, and a field in the report."""
    from asymcheck.device import rng

    with monkeypatch.context() as patch:
        patch.setattr(rng, "get_states", dict)
        store = _save(MemoryStore(), x={})
    with pytest.warns(CheckpointWarning, match="no python state was saved") as caught:
        report = _restore(store, x={})
    assert len(caught) == 1
    assert len(report.rng_problems) == 3


class Tied(nn.Module):
    def __init__(self, first: str, second: str, *, tie: bool = True) -> None:
        super().__init__()
        for name in (first, second):
            setattr(self, name, nn.Linear(64, 512, bias=False))
        if tie:
            getattr(self, second).weight = getattr(self, first).weight


def test_a_tied_weight_is_stored_once_and_loads_tied_untied_and_swapped(tmp_path: Path) -> None:
    """A10 (i), (ii), (iv): one payload and an alias; tied, untied, names in swapped order."""
    model = Tied("a", "b")
    _save(tmp_path / "tied", model=model)
    _save(tmp_path / "none", model=nn.Identity())
    weight = model.a.weight.numel() * 4
    assert _bytes_on_disk(tmp_path / "tied") - _bytes_on_disk(tmp_path / "none") < weight + 10_000
    for again in (Tied("a", "b"), Tied("b", "a"), Tied("a", "b", tie=False)):
        tied = again.a.weight is again.b.weight
        _restore(tmp_path / "tied", model=again)
        assert (again.a.weight is again.b.weight) == tied
        assert torch.equal(again.a.weight, model.a.weight)
        assert torch.equal(again.b.weight, model.a.weight)


@pytest.mark.parametrize("target", [torch.bfloat16, torch.int64, torch.float64])
def test_a_dtype_is_never_cast_unless_that_was_asked_for(target: torch.dtype) -> None:
    """A13: fp32 into another dtype is an error by default; a save never changes live values."""
    model = nn.Linear(3, 3)
    before = _bits(model)
    store = _save(MemoryStore(), model=model)
    assert _bits(model) == before
    live = {n: torch.zeros_like(p, dtype=target) for n, p in model.named_parameters()}
    again = nn.Module()
    for name, value in live.items():
        again.register_parameter(name, nn.Parameter(value, requires_grad=False))
    name = str(target).removeprefix("torch.")
    with pytest.raises(IncompatibleCheckpoint, match=f"live {name}, checkpoint float32"):
        _restore(store, model=again)
    assert not any(t.any() for t in again.parameters())
    report = _restore(store, {"dtype_policy": "cast"}, model=again)
    assert report.cast_keys == ("model/weight", "model/bias")
    for mine, theirs in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs.to(target))


class Float8Like(torch.Tensor):
    """Values in one tensor and their scale in another, as quantizing libraries have it."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data", "scale"], None


def test_a_tensor_with_a_scale_beside_it_is_refused_at_the_first_save(tmp_path: Path) -> None:
    """A14: never the integers without their scale, and not only at the end of a run."""
    with warnings.catch_warnings(action="ignore"):
        quantized = torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8)
    for tensor in (quantized, torch.ones(3).as_subclass(Float8Like)):
        with Checkpointer(tmp_path, state={"x": {"w": tensor}}) as ckpt:
            with pytest.raises(StateError, match="is not supported: save") as caught:
                ckpt.save(1)
            assert caught.value.key == "x/w"
    assert list(tmp_path.glob("step-*")) == []


def test_a_model_with_tensors_of_every_odd_kind_comes_back() -> None:
    """A15: as buffers of one model; the table of all dtypes and layouts is a unit test."""

    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        found = nn.Module()
        storage = torch.randn(64)
        for name, tensor in {
            "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
            "transposed": torch.randn(3, 4).t(),
            "expanded": torch.randn(1, 4).expand(3, 4),
            "slice": storage[8:16],
            "overlap": storage[12:20],
            "scalar": torch.randn(()),
            "empty": torch.randn(0, 5),
            "complex": torch.randn(3, dtype=torch.complex128),
            "float8": torch.randn(8).to(torch.float8_e4m3fn),
            "unsigned": torch.tensor([1, 2, 65535 - seed], dtype=torch.uint16),
            "flags": torch.tensor([True, False, seed == 0]),
        }.items():
            found.register_buffer(name, tensor)
        found.register_buffer("real", found.complex.real)
        return found

    model, again = make(0), make(1)
    strides = {n: b.stride() for n, b in again.named_buffers()}
    _restore(_save(MemoryStore(), model=model), model=again)
    assert _bits(again) == _bits(model)
    assert {n: b.stride() for n, b in again.named_buffers()} == strides


@pytest.mark.parametrize("bad", [torch.eye(3).to_sparse(), torch.empty(3, device="meta")])
def test_sparse_and_meta_are_refused_before_a_byte_is_written(
    bad: torch.Tensor, tmp_path: Path
) -> None:
    """A15: a clear refusal by path, before any byte is written."""
    with pytest.raises(StateError) as caught:
        _save(tmp_path, a={"ok": torch.ones(3)}, z={"bad": bad})
    assert caught.value.key == "z/bad"
    assert list(tmp_path.glob("step-*")) == []


def test_a_slice_of_a_big_storage_costs_only_the_slice(tmp_path: Path) -> None:
    """A16: big[:10] of a million floats adds less than 10 kB."""
    big = torch.randn(1_000_000)
    _save(tmp_path / "none", x={})
    _save(tmp_path / "slice", x={"view": big[:10], "array": big.numpy()[:10]})
    assert _bytes_on_disk(tmp_path / "slice") - _bytes_on_disk(tmp_path / "none") < 10_000


class Loader:
    """Shuffles each epoch anew and knows where in the epoch it is."""

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self.generator = torch.Generator().manual_seed(seed)
        self.order: list[int] = []
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        if self.at >= len(self.order):
            self.order = torch.randperm(self.size, generator=self.generator).tolist()
            self.at = 0
        while self.at < len(self.order):
            self.at += 1
            yield self.order[self.at - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state(), "order": self.order, "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])
        self.order, self.at = state["order"], state["at"]


@pytest.mark.parametrize(
    "stops",
    [(5,), (10,), (20,), (3, 7), (0, 3), (4, 14, 24)],
    ids=lambda stops: "-".join(map(str, stops)),
)
def test_no_sample_is_skipped_or_repeated_wherever_the_run_stops(stops: tuple[int, ...]) -> None:
    """A18: shuffle on; stop in mid-epoch, at its end, twice in one epoch."""

    def samples(loader: Loader) -> Iterator[int]:
        while True:
            yield from loader

    whole = samples(Loader(10, 0))
    expected = [next(whole) for _ in range(35)]
    store = MemoryStore("samples")
    found: list[int] = []
    for run, stop in enumerate([*stops, 35]):
        loader = Loader(10, run)
        with Checkpointer(store, state={"data": loader}) as ckpt:
            ckpt.restore()
            stream = samples(loader)
            found += [next(stream) for _ in range(stop - len(found))]
            ckpt.save(run + 1)
            next(stream)  # lost with the process
    assert found == expected


def test_a_loader_without_a_position_is_refused_by_name() -> None:
    """A18: a missing data position is never silent."""
    from torch.utils.data import DataLoader

    with pytest.raises(StateError, match="StatefulDataLoader"):
        Checkpointer(MemoryStore(), state={"data": DataLoader([1, 2], shuffle=True)})


# --- C: the process around it -----------------------------------------------


def test_thousands_of_small_tensors_need_few_file_descriptors(tmp_path: Path) -> None:
    """C3: 5000 small tensors with at most 256 open files."""
    _python(
        """
        import resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        import torch, asymcheck

        def make(value):
            return {"x": {f"t{i}": torch.full((9,), value + i) for i in range(5000)}}

        with asymcheck.Checkpointer("run", state=make(0)) as ckpt:
            for step in (1, 2, 3):
                ckpt.save(step)
        live = make(9)
        with asymcheck.Checkpointer("run", state=live) as ckpt:
            assert ckpt.restore() == 3
        expected = make(0)["x"]
        assert all(torch.equal(live["x"][k], v) for k, v in expected.items())
        """,
        cwd=tmp_path,
    )


_MAIN_SCRIPT = """
    import dataclasses, enum, os, sys, threading
    from typing import NamedTuple
    import torch, asymcheck

    torch.set_num_threads(1)

    class Phase(enum.Enum):
        WARM = 1
        MAIN = 2

    class Span(NamedTuple):
        lo: int
        hi: int

    @dataclasses.dataclass
    class Progress:
        phase: Phase
        spans: list

    model = torch.nn.Linear(300, 300)
    state = {"model": model, "progress": {"now": Progress(Phase.WARM, [])}}
    ckpt = asymcheck.Checkpointer("run", state=state)
    start = ckpt.restore()
    if start == 0:
        state["progress"]["now"] = Progress(Phase.MAIN, [Span(1, 2)])
        torch.nn.init.ones_(model.weight)
        ckpt.save(5)
    else:
        assert start == 5
        found = state["progress"]["now"]
        assert type(found) is Progress and found.phase is Phase.MAIN
        assert type(found.spans[0]) is Span and found.spans == [Span(1, 2)]
        assert model.weight.eq(1).all()
        state["bad"] = {"f": lambda: 0}
        try:
            with asymcheck.Checkpointer("other", state=state) as other:
                other.save(1)
        except asymcheck.StateError as error:
            assert error.key == "bad/f" and len(str(error).splitlines()) == 1
        else:
            raise AssertionError("a lambda was saved")
        ckpt.save(6)  # a thread of ours lives while the process is forked
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        child = os.fork()
        if child == 0:
            del state["bad"]
            with asymcheck.Checkpointer("forked", state=state) as forked:
                forked.save(7)
            with asymcheck.Checkpointer("forked", state=state) as forked:
                os._exit(0 if forked.restore() == 7 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    ckpt.close()
"""


def test_a_script_without_a_main_guard_may_define_its_classes_itself_and_fork(
    tmp_path: Path,
) -> None:
    """C4: no main guard, classes in __main__, a lambda in the state, a fork beside threads."""
    _python(_MAIN_SCRIPT, cwd=tmp_path)
    _python(_MAIN_SCRIPT, cwd=tmp_path)


# --- E: loading -------------------------------------------------------------


def test_all_mismatches_stand_in_one_error_and_in_the_report() -> None:
    """E1: an extra key on either side, a shape and a dtype that differ, at once."""
    saved = nn.ParameterDict({"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2)})
    saved["_orig_mod_extra"] = torch.ones(2)
    live = nn.ParameterDict(
        {"a": torch.zeros(3), "b": torch.zeros(2).double(), "c": torch.zeros(2)}
    )
    live["_orig_mod_extr"] = torch.zeros(2)
    store = _save(MemoryStore(), model=saved)
    with pytest.raises(IncompatibleCheckpoint) as caught:
        _restore(store, model=live)
    error = caught.value
    report = _restore(store, {"strict": False}, model=live)
    for told in (error, report):
        assert told.missing_keys == ("model/_orig_mod_extr",)
        assert told.unexpected_keys == ("model/_orig_mod_extra",)
        assert set(told.mismatched) == {
            ("model/a", "shape [3]", "shape [2]"),
            ("model/b", "float64", "float32"),
        }
    assert "(near: model/_orig_mod_extra)" in str(error)
    assert live["c"].tolist() == [1.0, 1.0]
    assert live["a"].tolist() == [0.0] * 3


class Parallel(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_a_model_loads_whatever_wraps_it_on_either_side() -> None:
    """E2: compile(DDP(m)) and recompute(compile(m)) into plain m, and back."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    wrappers = {
        "plain": lambda m: m,
        "compile of parallel": lambda m: torch.compile(Parallel(m)),
        "recompute of compile": lambda m: checkpoint_wrapper(torch.compile(m)),
    }
    for wrap in wrappers.values():
        source = Net()
        store = _save(MemoryStore(), model=wrap(source))
        repository = open_repository(store)
        with repository.open(repository.lineage()[-1]) as checkpoint:
            keys = {leaf.key for leaf in checkpoint.indexes[0].leaves}
        assert {f"model/{k}" for k in source.state_dict()} <= keys
        for other in wrappers.values():
            again = Net()
            _restore(store, model=other(again))
            assert _bits(again) == _bits(source)


class Mode(enum.Enum):
    FAST = 1


@dataclasses.dataclass
class Settings:
    rate: float
    where: Path


@pytest.fixture
def _findable(monkeypatch: pytest.MonkeyPatch) -> None:
    # Where tests are imported by path, their module need not be registered by its name.
    monkeypatch.setitem(sys.modules, __name__, types.ModuleType(__name__))
    sys.modules[__name__].__dict__.update(globals())


@pytest.mark.usefixtures("_findable")
def test_usual_python_values_load_again_without_pickle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E4: numpy and Python random states, dataclass, Path, datetime, set, enum and the like."""

    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("pickle was used")

    values = {
        "numpy": np.random.get_state(),
        "python": random.getstate(),
        "settings": Settings(0.5, Path("a/b")),
        "when": datetime.datetime(2024, 2, 29, 12, tzinfo=datetime.UTC),
        "number": np.float64(1.5),
        "set": {1, "a"},
        "mode": Mode.FAST,
        "ordered": collections.OrderedDict(b=1, a=2),
    }
    expected = copy.deepcopy(values)
    for name in ("dumps", "dump", "loads", "load", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, never)
    monkeypatch.setattr(torch, "load", never)
    monkeypatch.setattr(torch, "save", never)
    live: dict[str, Any] = {}
    _restore(_save(tmp_path, x=values), x=live)
    assert {k: type(v) for k, v in live.items()} == {k: type(v) for k, v in expected.items()}
    assert live.pop("set") == expected.pop("set")  # in whatever order they show themselves
    assert repr(live) == repr(expected)
    np.random.set_state(live["numpy"])
    random.setstate(live["python"])


def test_an_unknown_class_is_an_error_at_the_save_with_its_path() -> None:
    """E4: not when the checkpoint is needed."""
    with pytest.raises(StateError) as caught:
        _save(MemoryStore(), x={"a": [1, {"b": Loader(3, 0)}]})
    assert caught.value.key == "x/a/[1]/b"


class Bomb:
    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> Any:
        return Path.touch, (self.witness,)


def test_pickled_code_is_never_run_wherever_it_lies(tmp_path: Path) -> None:
    """E5: as manifest, index, pack, run file or attempt: damage, never executed."""
    witness, root = tmp_path / "ran", tmp_path / "run"
    payload = pickle.dumps(Bomb(witness))
    pickle.loads(payload)
    assert witness.exists()  # the payload works
    witness.unlink()
    _save(root, x={"t": torch.ones(1000)})
    files = sorted(p for p in root.rglob("*") if p.is_file() and p.name != "persist.log")
    assert len(files) == 6
    for path in files:
        whole = path.read_bytes()
        for bad in (payload, payload.ljust(len(whole), b"\0")[: len(whole)]):
            path.write_bytes(bad)
            live = {"t": torch.zeros(1000)}
            if path.parent.name == "attempts":  # says who wrote, which no restore needs
                _restore(root, x=live)
            else:
                with pytest.raises((CheckpointError, ValueError)):
                    _restore(root, x=live)
            assert not witness.exists()
        path.write_bytes(whole)
    _restore(root, x={})
    assert not witness.exists()


def test_code_in_a_checkpoint_that_is_whole_by_its_hashes_is_not_run_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E5: a crafted state tree names functions, or is a pickle."""
    witness = tmp_path / "ran"
    touch = {"$dataclass": ["pathlib:Path.touch", {"self": str(witness)}]}
    calls = [
        {"$enum": ["os:system", f"touch {witness}"]},
        {"$namedtuple": ["subprocess:Popen", {"args": ["touch", str(witness)]}]},
        {"$defaultdict": ["exec", [["a", 1]]]},
        {"$flag": ["os:system", f"touch {witness}"]},
        touch,
    ]
    rng = {"items": {"x": {"kind": "value", "type": "dict", "value": {}}}, "rng": {}}
    texts = [pickle.dumps(Bomb(witness))]
    for call in calls:
        tree = copy.deepcopy(rng)
        tree["items"]["x"]["value"] = {"a": call}
        texts += [json.dumps(tree).encode(), json.dumps({**rng, "rng": call}).encode()]
    original = Collector.add_tree
    for number, text in enumerate(texts):
        root = tmp_path / str(number)
        with monkeypatch.context() as patch:
            patch.setattr(Collector, "add_tree", lambda self, _, text=text: original(self, text))
            _save(root, x={})
        with pytest.raises((CorruptCheckpoint, IncompatibleCheckpoint)):
            _restore(root, x={})
    assert not witness.exists()


_MEMORY_SCRIPT = """
    import sys, torch, asymcheck

    def status(name):
        with open("/proc/self/status") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

    def make():
        def filled(*shape):
            return torch.full(shape, 0.5)

        model = torch.nn.Module()
        model.large = torch.nn.Parameter(filled(40 << 20))  # 160 MiB
        model.turned = torch.nn.Parameter(filled(1000, 8 << 10).t())
        for i in range(10):
            model.register_parameter(f"p{i}", torch.nn.Parameter(filled(1 << 20)))
        optimizer = torch.optim.SGD([model.turned, model.p0], momentum=0.9)
        return {"model": model, "optim": optimizer, "more": {"a": filled(30 << 20)}}

    def nbytes(state):
        tensors = [*state["model"].parameters(), state["more"]["a"]]
        tensors += [v for s in state["optim"].state.values() for v in s.values()]
        return sum(t.nbytes for t in tensors)

    def fill(state):
        for p in state["model"].parameters():
            p.data.fill_(2.0)
        state["more"]["a"].fill_(2.0)
        for p in state["optim"].param_groups[0]["params"]:
            p.grad = torch.full_like(p, 3.0)
        state["optim"].step()

    if sys.argv[1] == "save":
        state = make()
        fill(state)
        with asymcheck.Checkpointer("run", state=state) as ckpt:
            ckpt.save(1)
    else:
        state = make()
        made, before = nbytes(state), status("VmRSS")
        with open("/proc/self/clear_refs", "w") as peak:
            peak.write("5")
        with asymcheck.Checkpointer("run", state=state, read_only=True) as ckpt:
            assert ckpt.restore() == 1
        size = nbytes(state)  # with the momentum, which was not there before
        assert size > 380 << 20, size
        extra = status("VmHWM") - before - (size - made)
        assert extra <= 64 << 20, f"{extra >> 20} MiB beyond the state of {size >> 20} MiB"
        assert state["more"]["a"].eq(2.0).all() and state["model"].large.eq(2.0).all()
        print(f"extra {extra >> 20} MiB for {size >> 20} MiB")
"""


def test_a_restore_needs_little_more_memory_than_the_state_itself(tmp_path: Path) -> None:
    """E6: peak resident memory of loading 400 MB stays within the state and 64 MiB."""
    _python(_MEMORY_SCRIPT, "save", cwd=tmp_path)
    done = _python(_MEMORY_SCRIPT, "restore", cwd=tmp_path)
    assert "extra" in done.stdout


@pytest.mark.parametrize("saved", [{}, {"fused": True}], ids=["saved plain", "saved fused"])
@pytest.mark.parametrize("live", [{}, {"fused": True}], ids=["live plain", "live fused"])
def test_the_step_of_an_optimizer_is_where_and_what_its_update_needs(
    saved: dict[str, bool], live: dict[str, bool]
) -> None:
    """E7: device, dtype and shape as a fresh optimizer would make them, and the update runs."""
    model, again, other = Net(), Net(), Net()
    optimizer = torch.optim.Adam(model.parameters(), **saved)
    fresh = torch.optim.Adam(again.parameters(), **live)
    reference = torch.optim.Adam(other.parameters(), **live)
    for each, net in ((optimizer, model), (reference, other)):
        _step(net, each)
    _restore(_save(MemoryStore(), model=model, optim=optimizer), model=again, optim=fresh)
    step = fresh.state[again.head.weight]["step"]
    expected = reference.state[other.head.weight]["step"]
    assert (step.device, step.dtype, step.shape) == (
        expected.device,
        expected.dtype,
        expected.shape,
    )
    assert step.item() == 1
    assert fresh.param_groups[0]["fused"] == live.get("fused")
    _step(again, fresh)
    assert fresh.state[again.head.weight]["step"].item() == 2


# --- limits -----------------------------------------------------------------


def test_twenty_thousand_small_tensors_take_little_room_and_come_back(tmp_path: Path) -> None:
    """D6, F: 20 000 tensors of 64 bytes in less than 6 MB."""

    def make(seed: int) -> nn.Module:
        values = torch.randn(20_000, 16, generator=torch.Generator().manual_seed(seed))
        found = nn.Module()
        for i in range(20_000):
            found.register_parameter(f"p{i}", nn.Parameter(values[i].clone()))
        return found

    model, again = make(0), make(1)
    _save(tmp_path, model=model)
    assert _bytes_on_disk(tmp_path) < 6_000_000
    _restore(tmp_path, model=again)
    assert all(map(torch.equal, again.parameters(), model.parameters()))


@pytest.mark.extra
@pytest.mark.filterwarnings("ignore:22000")  # it is copied on the training thread
def test_one_tensor_of_more_than_two_gigabytes_comes_back(tmp_path: Path) -> None:
    """F: offsets beyond 31 bits."""
    count = 2_200_000_003
    marks = torch.arange(0, count, 99_999_989)
    live = torch.zeros(count, dtype=torch.uint8)
    live[marks] = torch.arange(1, len(marks) + 1, dtype=torch.uint8)
    live[-1] = 77
    _save(tmp_path, x=live)
    live.zero_()
    _restore(tmp_path, x=live)
    assert live[marks].tolist() == list(range(1, len(marks) + 1))
    assert live[-1].item() == 77
    assert int(live.count_nonzero()) == len(marks) + 1
