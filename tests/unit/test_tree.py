"""Python values as tagged JSON: what comes back, what is refused, and what never runs."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import functools
import json
import pathlib
import random
import sys
import threading
import types
import zoneinfo
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from asymcheck import Checkpointer, CorruptCheckpoint, IncompatibleCheckpoint, StateError
from asymcheck.device.tree import MAX_DEPTH, Decoder, Encoder
from asymcheck.errors import CheckpointError
from asymcheck.storage.memory import MemoryStore


def _encode(value: object, path: str = "it") -> Any:
    tree = Encoder(lambda path, array: path).encode(value, path)
    return json.loads(json.dumps(tree, allow_nan=False))


def _decode(tree: object) -> Any:
    return Decoder(lambda key: pytest.fail(f"no leaf {key}")).decode(tree)


@pytest.fixture(autouse=True)
def _findable(monkeypatch: pytest.MonkeyPatch) -> None:
    # Where tests are imported by path, their module need not be registered by its name.
    monkeypatch.setitem(sys.modules, __name__, types.ModuleType(__name__))
    sys.modules[__name__].__dict__.update(globals())


class Colour(enum.Enum):
    RED = "r"
    ROT = "r"  # noqa: PIE796  an alias is what is tested


class Level(enum.IntEnum):
    LOW = 1


class Access(enum.IntFlag):
    READ = 1
    WRITE = 2


class Strict(enum.Flag):
    ONLY = 1


class Point(NamedTuple):
    x: int
    y: Any = None


@dataclasses.dataclass
class Config:
    lr: float
    names: list[str] = dataclasses.field(default_factory=list)


VALUES: dict[str, tuple[object, object]] = {
    "none": (None, None),
    "true is no 1": (True, True),
    "integer": (-3, -3),
    "largest plain integer": (2**53 - 1, 2**53 - 1),
    "large integer": (-(2**53), {"$int": "-0x20000000000000"}),
    "negative zero": (-0.0, -0.0),
    "infinity": (float("-inf"), {"$float": "fff0000000000000"}),
    "complex": (complex(-0.0, float("inf")), {"$complex": [-0.0, {"$float": "7ff0000000000000"}]}),
    "text": ("é\0😀", "é\0😀"),
    "lone surrogates": ("\ud83d\ude00", {"$str": "eda0bdedb880"}),
    "bytes": (b"\0\xff", {"$bytes": "AP8="}),
    "bytearray": (bytearray(b"a"), {"$bytearray": "YQ=="}),
    "numpy float": (np.float64(1.5), {"$numpy_scalar": ["<f8", "000000000000f83f"]}),
    "numpy text": (np.str_("a\0"), {"$numpy_scalar": ["<U2", "6100000000000000"]}),
    "dtype": (torch.bfloat16, {"$dtype": "bfloat16"}),
    "device": (torch.device("cuda:3"), {"$device": "cuda:3"}),
    "range": (range(5, 1, -2), {"$range": [5, 1, -2]}),
    "slice": (slice(None, 2**60), {"$slice": [None, {"$int": "0x1000000000000000"}, None]}),
    "date": (datetime.date(2024, 2, 29), {"$date": "2024-02-29"}),
    "time": (datetime.time(1, 2, 3, 4, fold=1), {"$time": ["01:02:03.000004", 1, None]}),
    "moment in UTC": (
        datetime.datetime(2024, 1, 2, tzinfo=datetime.UTC),
        {"$datetime": ["2024-01-02T00:00:00", 0, [0, 0, 0, "UTC"]]},
    ),
    "moment in a zone": (
        datetime.datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=zoneinfo.ZoneInfo("Europe/Paris")),
        {"$datetime": ["2024-10-27T02:30:00", 1, "Europe/Paris"]},
    ),
    "duration": (datetime.timedelta(-1, 2, 3), {"$timedelta": [-1, 2, 3]}),
    "path": (pathlib.Path("a/b"), {"$path": ["Path", "a/b"]}),
    "windows path": (
        pathlib.PureWindowsPath("c:/a"),
        {"$path": ["PureWindowsPath", "c:\\a"]},
    ),
    "enum": (Colour.ROT, {"$enum": [f"{__name__}:Colour", "RED"]}),
    "enum of integers": (Level.LOW, {"$enum": [f"{__name__}:Level", "LOW"]}),
    "flags": (Access.READ | Access.WRITE, {"$flag": [f"{__name__}:Access", 3]}),
    "flags with unknown bits": (Access(8), {"$flag": [f"{__name__}:Access", 8]}),
    "list": ([1, [2]], [1, [2]]),
    "tuple": ((1, ()), {"$tuple": [1, {"$tuple": []}]}),
    "size": (torch.Size([2, 3]), {"$size": [2, 3]}),
    "set": ({3, 1, "a"}, {"$set": ["a", 1, 3]}),
    "frozenset": (frozenset({1}), {"$frozenset": [1]}),
    "deque": (collections.deque([1], 3), {"$deque": [3, [1]]}),
    "dict": ({"b": 1, "a": 2}, {"b": 1, "a": 2}),
    "dict with odd keys": ({1: 2, (1,): 3}, {"$dict": [[1, 2], [{"$tuple": [1]}, 3]]}),
    "dict with a tag as key": ({"$int": 1}, {"$dict": [["$int", 1]]}),
    "ordered dict": (collections.OrderedDict(b=1, a=2), {"$ordereddict": [["b", 1], ["a", 2]]}),
    "counter": (collections.Counter("aab"), {"$counter": [["a", 2], ["b", 1]]}),
    "default dict": (
        collections.defaultdict(list, {"a": []}),
        {"$defaultdict": ["list", [["a", []]]]},
    ),
    "named tuple": (Point(1), {"$namedtuple": [f"{__name__}:Point", {"x": 1, "y": None}]}),
    "dataclass": (Config(0.1), {"$dataclass": [f"{__name__}:Config", {"lr": 0.1, "names": []}]}),
}


@pytest.mark.parametrize("name", VALUES)
def test_each_kind_of_value_has_its_tag_and_comes_back_with_its_type(name: str) -> None:
    value, tree = VALUES[name]
    assert _encode(value) == tree
    found = _decode(_encode(value))
    assert type(found) is type(value)
    assert found == value
    if not isinstance(value, set):
        assert repr(found) == repr(value)
    if isinstance(value, dict):
        assert list(found.items()) == list(value.items())
        assert getattr(found, "default_factory", 0) is getattr(value, "default_factory", 0)
    if isinstance(value, collections.deque):
        assert found.maxlen == value.maxlen


def test_every_tag_is_among_the_values_or_the_generators() -> None:
    from asymcheck.device.tree import _BUILDERS

    shown = {next(iter(tree)) for _, tree in VALUES.values() if isinstance(tree, dict) and tree}
    generators = {"$torch_generator", "$random", "$numpy_random_state", "$numpy_generator"}
    assert set(_BUILDERS) - generators <= shown


@pytest.mark.parametrize(
    "make",
    [
        lambda: random.Random(3),
        lambda: torch.Generator().manual_seed(3),
        lambda: np.random.RandomState(3),
        lambda: np.random.default_rng(3),
        lambda: np.random.Generator(np.random.Philox(3)),
        lambda: np.random.Generator(np.random.SFC64(3)),
        lambda: np.random.Generator(np.random.MT19937(3)),
    ],
)
def test_a_generator_goes_on_where_it_was(make: Any) -> None:
    def draw(generator: Any) -> list[Any]:
        if isinstance(generator, torch.Generator):
            return torch.rand(3, generator=generator).tolist()
        if isinstance(generator, random.Random):
            return [generator.gauss(0, 1) for _ in range(3)]
        return generator.normal(size=3).tolist()

    generator = make()
    draw(generator)
    arrays: dict[str, Any] = {}
    encoder = Encoder(lambda path, array: [path, arrays.update({path: array})][0])
    tree = json.loads(json.dumps(encoder.encode(generator, "it")))
    found = Decoder(arrays.__getitem__).decode(tree)
    assert type(found) is type(generator)
    assert draw(found) == draw(generator)


def test_a_numpy_generator_also_spawns_what_it_would_have_spawned() -> None:
    generator = np.random.default_rng([1, 2, 3])
    generator.spawn(2)
    found = _decode(_encode(generator))
    assert found.spawn(1)[0].random() == generator.spawn(1)[0].random()


# --- what is refused --------------------------------------------------------


class Plain:
    pass


class Growing(dict):
    pass


@dataclasses.dataclass
class Output(collections.OrderedDict):
    loss: float = 0.0


@dataclasses.dataclass
class Unset:
    value: int = dataclasses.field(init=False)


class Loose(Point):
    pass


def _cycle() -> list[Any]:
    inner: dict[str, Any] = {}
    outer = [1, inner]
    inner["back"] = outer
    return outer


def _deep(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value


def _with_attribute(value: Any) -> Any:
    value.extra = 1
    return value


REFUSED: dict[str, tuple[object, str, str]] = {
    "lambda": ({"f": lambda: 0}, "it/f", "without pickle"),
    "object": ([Plain()], "it/[0]", "give the object state_dict"),
    "class": ({"k": int}, "it/k", "builtins.type"),
    "module": ({"k": json}, "it/k", "module"),
    "lock": ((threading.Lock(),), "it/[0]", "lock"),
    "iterator": ({"k": iter([])}, "it/k", "list_iterator"),
    "decimal": ({1.5: decimal.Decimal(1)}, "it/[1.5]", "Decimal"),
    "key": ({("a", Plain): 1}, "it/", "builtins.type"),
    "subclass of dict": ({"d": Growing()}, "it/d", "Growing"),
    "subclass of int": ({"b": type("Int", (int,), {})(1)}, "it/b", "Int"),
    "cycle": (_cycle(), "it/[1]/back", "contains itself"),
    "too deep": (_deep(MAX_DEPTH + 1), "it" + "/[0]" * MAX_DEPTH, "100 deep"),
    "default factory": (collections.defaultdict(lambda: 1), "it", "default factory"),
    "local class": ([dataclasses.make_dataclass("Local", ["x"])(1)], "it/[0]", "found again"),
    "dataclass that is a dict": ({"o": Output()}, "it/o", "OrderedDict"),
    "attribute that is no field": (_with_attribute(Config(1.0)), "it/extra", "make it one"),
    "attribute of a tuple": ([_with_attribute(Loose(1))], "it/[0]/extra", "make it one"),
    "field that is not set": (Unset(), "it/value", "not set"),
    "module in a dict": ({"net": torch.nn.Linear(1, 1)}, "it/net", "entry of state of its own"),
    "structured scalar": (np.zeros(1, [("a", "i4")])[0], "it", "numpy.void"),
    "foreign time zone": (
        [datetime.datetime(2024, 1, 1, tzinfo=type("Z", (datetime.tzinfo,), {})())],
        "it/[0]",
        "datetime",
    ),
    "RandomState over another generator": (
        np.random.RandomState(np.random.PCG64()),
        "it",
        "numpy.random.Generator",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_tag_is_refused_by_its_path(name: str) -> None:
    value, path, hint = REFUSED[name]
    with pytest.raises(StateError, match=hint) as caught:
        _encode(value)
    assert caught.value.key == path if name != "key" else caught.value.key.startswith(path)


def test_what_is_just_not_too_deep_comes_back() -> None:
    value = _deep(MAX_DEPTH)
    assert _decode(_encode(value)) == value
    store = MemoryStore("deep")
    live: dict[str, Any] = {}
    with Checkpointer(store, state={"it": {"v": _deep(MAX_DEPTH - 1)}}) as ckpt:
        ckpt.save(1)
    with Checkpointer(store, state={"it": live}) as ckpt:
        ckpt.restore()
    assert live == {"v": _deep(MAX_DEPTH - 1)}


def test_one_object_at_two_places_is_no_cycle() -> None:
    shared = [1]
    assert _decode(_encode({"a": shared, "b": [shared, shared]})) == {"a": [1], "b": [[1], [1]]}


def test_a_key_whose_repr_is_long_or_raises_is_no_problem_for_the_path() -> None:
    class Silent:
        def __repr__(self) -> str:
            raise ValueError("no")

    for key in (Silent(), "x" * 10, b"y" * 100_000, 10**5000, tuple(range(10_000))):
        with pytest.raises(StateError) as caught:
            _encode({key: Plain()})
        assert len(caught.value.key) < 120


def test_paths_tell_apart_what_is_written_alike() -> None:
    keys: list[str] = []
    encoder = Encoder(lambda path, array: [path, keys.append(path)][0])
    x = torch.zeros(1)
    encoder.encode({"a": {"b": x}, "a/b": x, "a%2Fb": x, "": x, "\ud800": x}, "it")
    encoder.encode({"[0]": x, 0: x, "0": x, True: x}, "it")
    assert len(set(keys)) == len(keys) == 9
    assert all(key.isascii() for key in keys)


# --- classes ----------------------------------------------------------------

_ran: list[str] = []


@dataclasses.dataclass
class Loud:
    x: int
    y: Any = None

    def __new__(cls, *args: Any) -> Loud:
        _ran.append("new")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        _ran.append("post_init")

    def __setattr__(self, name: str, value: Any) -> None:
        _ran.append("setattr")
        super().__setattr__(name, value)

    @functools.cached_property
    def doubled(self) -> int:
        return 2 * self.x


class LoudTuple(Point):
    __slots__ = ()

    def __new__(cls, *args: Any) -> LoudTuple:
        _ran.append("new")
        return super().__new__(cls, *args)


class LoudEnum(enum.Enum):
    A = 1

    def __init__(self, value: int) -> None:
        _ran.append("init")

    @classmethod
    def _missing_(cls, value: object) -> None:
        _ran.append("missing")


def test_no_constructor_of_a_class_runs() -> None:
    value = [Loud(1, LoudTuple(2, LoudEnum.A))]
    assert value[0].doubled == 2
    tree = _encode(value)
    _ran.clear()
    found = _decode(tree)
    assert _ran == []
    assert type(found[0]) is Loud
    assert found[0].x == 1
    assert type(found[0].y) is LoudTuple
    assert found[0].y == (2, LoudEnum.A)
    assert found[0].doubled == 2


def test_a_class_that_is_gone_is_named_and_nothing_is_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = MemoryStore("gone")
    with Checkpointer(store, state={"w": torch.ones(3), "it": {"c": Config(1.0)}}) as ckpt:
        ckpt.save(1)
    here = sys.modules[__name__]
    monkeypatch.delattr(here, "Config")
    w = torch.zeros(3)
    with Checkpointer(store, state={"w": w, "it": {}}) as ckpt:
        with pytest.raises(IncompatibleCheckpoint, match=r"Config.*import its module"):
            ckpt.restore()
        assert torch.equal(w, torch.zeros(3))
        monkeypatch.setattr(here, "Config", Config, raising=False)
        assert ckpt.restore() == 1
    assert torch.equal(w, torch.ones(3))


@pytest.mark.parametrize(
    ("tree", "hint"),
    [
        (
            {"$dataclass": [f"{__name__}:Config", {"lr": 1.0}]},
            r"fields \['lr'\].*\['lr', 'names'\]",
        ),
        ({"$namedtuple": [f"{__name__}:Point", {"x": 1, "z": 2}]}, r"\['x', 'z'\]"),
        ({"$enum": [f"{__name__}:Colour", "GREEN"]}, "GREEN"),
        ({"$flag": [f"{__name__}:Strict", 2]}, "Strict"),
        ({"$dtype": "float3"}, "float3"),
        ({"$datetime": ["2024-01-01", 0, "Mars/Base"]}, "Mars/Base"),
        ({"$numpy_generator": {"state": {"bit_generator": "PCG65"}}}, "PCG65"),
        ({"$torch_generator": ["cuda:77", None]}, "cuda:77"),
        ({"$from_the_future": 1}, "newer asymcheck"),
    ],
)
def test_what_is_known_elsewhere_only_is_incompatible_rather_than_damaged(
    tree: object, hint: str
) -> None:
    with pytest.raises(IncompatibleCheckpoint, match=hint):
        _decode([tree])


@pytest.mark.parametrize(
    "tree",
    [
        {"$int": "zz"},
        {"$int": 3},
        {"$float": "00"},
        {"$float": None},
        {"$complex": [1]},
        {"$bytes": "%"},
        {"$str": "ff"},
        {"$numpy_scalar": ["O", "00"]},
        {"$numpy_scalar": ["<f8", "00"]},
        {"$numpy_scalar": ["V1000000000", ""]},
        {"$device": "moon"},
        {"$date": "yesterday"},
        {"$datetime": ["2024-01-01", 9, None]},
        {"$timedelta": [10**30, 0, 0]},
        {"$path": ["Path", 1]},
        {"$path": ["system", "x"]},
        {"$tuple": 1},
        {"$set": [[]]},
        {"$dict": [[1]]},
        {"$dict": [[[], 1]]},
        {"$deque": [-1, []]},
        {"$defaultdict": ["eval", []]},
        {"$size": ["a"]},
        {"$random": [3, 1, None]},
        {"$numpy_generator": 5},
        {"$numpy_generator": {"state": {"bit_generator": "PCG64"}, "seed": {"pool_size": 10**9}}},
    ],
    ids=str,
)
def test_a_body_that_breaks_the_grammar_is_damage(tree: object) -> None:
    with pytest.raises(CorruptCheckpoint, match="tagged"):
        _decode({"a": [tree]})


def test_generators_need_no_values_to_be_checked() -> None:
    arrays: dict[str, Any] = {}
    value = {"t": torch.Generator(), "n": np.random.RandomState(), "g": np.random.default_rng()}
    encoder = Encoder(lambda path, array: [path, arrays.update({path: array * 0})][0])
    tree = encoder.encode(value, "it")
    found = Decoder(arrays.__getitem__, filled=False).decode(tree)
    assert {k: type(v) for k, v in found.items()} == {k: type(v) for k, v in value.items()}


@pytest.fixture
def shallow_stack() -> Iterator[None]:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(2000)
    yield
    sys.setrecursionlimit(before)


def test_a_tree_nested_without_end_is_damage(shallow_stack: None) -> None:
    tree: Any = 1
    for _ in range(3000):
        tree = {"$tuple": [tree]}
    with pytest.raises(CheckpointError):
        _decode(tree)
