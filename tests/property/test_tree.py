"""Any tree of values comes back as it was: same types, same bits, same order."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import enum
import json
import pathlib
import random
import struct
import sys
import types
import zoneinfo
from collections.abc import Hashable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from asymcheck import Checkpointer, CheckpointError
from asymcheck.device.inplace import bind_leaves
from asymcheck.device.tree import _BUILDERS, Decoder, Encoder
from asymcheck.storage.memory import MemoryStore


class Colour(enum.Enum):
    RED = 1
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Word(enum.StrEnum):
    YES = "yes"


class Options(enum.Flag):
    A = 1
    B = 2


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Box:
    inside: Any
    label: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Sealed:
    inside: Any


@pytest.fixture(autouse=True, scope="module")
def _findable() -> Any:
    # Where tests are imported by path, their module need not be registered by its name.
    before = sys.modules.get(__name__)
    sys.modules[__name__] = types.ModuleType(__name__)
    sys.modules[__name__].__dict__.update(globals())
    yield
    sys.modules.pop(__name__)
    if before is not None:
        sys.modules[__name__] = before


def canon(value: Any) -> Hashable:
    """A value as nested tuples that are equal exactly where type, bits and order are."""
    kind = type(value).__name__
    match value:
        case torch.Tensor():
            raw = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            return kind, str(value.dtype), tuple(value.shape), raw
        case np.str_() | np.bytes_():
            return kind, value.item()
        case np.ndarray() | np.generic():
            return kind, value.dtype.str, value.shape, value.tobytes()
        case float():
            return kind, struct.pack(">d", value)
        case complex():
            return kind, struct.pack(">dd", value.real, value.imag)
        case enum.Enum():
            return kind, value.name, canon(value.value)
        case collections.defaultdict():
            return (
                kind,
                str(value.default_factory),
                *((canon(k), canon(v)) for k, v in value.items()),
            )
        case dict():
            return kind, *((canon(k), canon(v)) for k, v in value.items())
        case set() | frozenset():
            return kind, frozenset(canon(v) for v in value)
        case collections.deque():
            return kind, value.maxlen, *(canon(v) for v in value)
        case list() | tuple():
            return kind, *(canon(v) for v in value)
        case slice() | range():
            return kind, *(canon(v) for v in (value.start, value.stop, value.step))
        case datetime.datetime() | datetime.time():
            zone = value.tzinfo
            named = zone.tzname(None) if type(zone) is datetime.timezone else None
            return kind, value.replace(tzinfo=None), value.fold, str(zone), type(zone), named
        case Box() | Sealed():
            fields = dataclasses.fields(value)
            return kind, *(canon(getattr(value, f.name)) for f in fields)
        case random.Random():
            return kind, value.getstate()
        case torch.Generator():
            return kind, canon(value.get_state())
        case np.random.Generator():
            bits = value.bit_generator
            return kind, canon(bits.state), canon(bits.seed_seq.state)
        case np.random.RandomState():
            return kind, canon(value.get_state(legacy=False))
        case None | bool() | int() | str() | bytes() | torch.dtype() | torch.device():
            return kind, value
        case bytearray() | pathlib.PurePath() | datetime.date() | datetime.timedelta():
            return kind, str(value)
    raise TypeError(kind)


def doubles() -> st.SearchStrategy[float]:
    return st.binary(min_size=8, max_size=8).map(lambda b: struct.unpack(">d", b)[0]) | st.floats()


text = st.text(st.characters(exclude_categories=()), max_size=6) | st.sampled_from(
    ["", "$leaf", "$tuple", "$", "a/b", "%", "[0]", "~2", "\ud83d\ude00", "module.w", "device"]
)
ints = st.integers() | st.integers(-(2**70), 2**70) | st.integers(0, 2**4096)
zones = (
    st.none()
    | st.sampled_from(["UTC", "Europe/Paris", "Asia/Kolkata"]).map(zoneinfo.ZoneInfo)
    | st.integers(-86_399_999_999, 86_399_999_999).map(
        lambda us: datetime.timezone(datetime.timedelta(microseconds=us))
    )
    | st.just(datetime.timezone(datetime.timedelta(hours=1), "mine"))
)
paths = st.sampled_from(["", "/", "a/b", "../é", "C:\\x", "\ud800"])
np_dtypes = (
    hnp.scalar_dtypes() | hnp.unicode_string_dtypes(max_len=5) | hnp.byte_string_dtypes(max_len=5)
).filter(lambda d: d.kind != "O")
hashables = st.one_of(
    st.none(),
    st.booleans(),
    ints,
    doubles(),
    st.complex_numbers(),
    text,
    st.binary(max_size=6),
    st.sampled_from([*Colour, *Level, *Word, *Options, Options(0), Options.A | Options.B]),
    st.sampled_from([torch.float8_e5m2, torch.bool, torch.device("cpu"), torch.device("cuda:1")]),
    st.datetimes(timezones=zones),
    st.times(timezones=zones.filter(lambda z: not isinstance(z, zoneinfo.ZoneInfo))),
    st.dates(),
    st.timedeltas(),
    paths.map(pathlib.Path) | paths.map(pathlib.PureWindowsPath),
    st.builds(range, st.integers(), st.integers(), st.integers(1, 5)),
    np_dtypes.flatmap(hnp.from_dtype).filter(lambda v: isinstance(v, np.generic)),
)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(
        st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
    )
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    count = int(np.prod(shape, dtype=int)) * dtype.itemsize
    high = 1 if dtype == torch.bool else 255
    raw = draw(st.lists(st.integers(0, high), min_size=count, max_size=count))
    flat = torch.tensor(raw, dtype=torch.uint8)
    tensor = flat.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)
    return tensor.t() if len(shape) == 2 and draw(st.booleans()) else tensor


def _numpy_generator(seed: int, spawned: int) -> np.random.Generator:
    generator = np.random.Generator(np.random.PCG64DXSM(seed))
    generator.spawn(spawned)
    generator.random(seed % 7)
    return generator


generators = st.one_of(
    st.integers(0, 2**200).map(random.Random),
    st.integers(0, 2**63).map(lambda seed: torch.Generator().manual_seed(seed)),
    st.builds(_numpy_generator, st.integers(0, 2**100), st.integers(0, 3)),
    st.integers(0, 2**32 - 1).map(np.random.RandomState),
)
leaves = st.one_of(
    hashables,
    hashables,
    st.binary(max_size=6).map(bytearray),
    st.builds(slice, ints | st.none(), doubles(), st.none()),
    hnp.arrays(np_dtypes, hnp.array_shapes(min_dims=0, min_side=0, max_dims=3, max_side=3)),
    tensors(),
    generators,
)


def _nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    few = st.lists(inner, max_size=3)
    keyed = st.dictionaries(hashables | st.tuples(hashables, hashables), inner, max_size=3)
    return st.one_of(
        few,
        few.map(tuple),
        st.builds(collections.deque, few, st.none() | st.integers(3, 5)),
        st.dictionaries(text, inner, max_size=4),
        keyed,
        keyed.map(collections.OrderedDict),
        st.builds(
            collections.defaultdict, st.sampled_from([None, list, dict, set, int, float]), keyed
        ),
        st.dictionaries(hashables, ints, max_size=3).map(collections.Counter),
        st.sets(hashables, max_size=3),
        st.frozensets(hashables | st.frozensets(hashables, max_size=2), max_size=3),
        st.lists(st.integers(0, 9), max_size=3).map(torch.Size),
        st.builds(Pair, inner, inner),
        st.builds(Box, inner, inner),
        st.builds(Sealed, inner),
    )


trees = st.recursive(leaves, _nested, max_leaves=12)


@given(trees)
def test_any_tree_is_the_same_after_encoding_and_decoding(value: Any) -> None:
    arrays: dict[str, Any] = {}

    def keep(path: str, array: Any) -> str:
        key = path
        while key in arrays:
            key += "~"
        arrays[key] = array
        return key

    tree = json.loads(json.dumps(Encoder(keep).encode(value, "it"), allow_nan=False))
    bound = []
    bind_leaves(tree, None, lambda key, device, live: bound.append(key))
    assert sorted(bound) == sorted(arrays)
    assert canon(Decoder(arrays.__getitem__).decode(tree)) == canon(value)


@given(trees)
def test_the_bytes_of_a_tree_do_not_depend_on_the_order_of_its_sets(value: Any) -> None:
    once = json.dumps(Encoder(lambda path, array: "k").encode(value, "it"))
    assert once == json.dumps(Encoder(lambda path, array: "k").encode(value, "it"))
    if isinstance(value, set):
        again: set[Any] = set()
        for item in reversed(list(value)):
            again.add(item)
        assert once == json.dumps(Encoder(lambda path, array: "k").encode(again, "it"))


@settings(max_examples=60)
@given(trees, trees)
def test_any_tree_is_the_same_after_a_restore_whatever_was_there(value: Any, live: Any) -> None:
    before = canon(value)
    store = MemoryStore("trees")
    with Checkpointer(store, state={"it": {"root": value}}) as ckpt:
        ckpt.save(1)
    assert canon(value) == before
    for there in ({}, {"root": live, "other": 1}):
        with Checkpointer(store, state={"it": there}, read_only=True) as ckpt:
            ckpt.restore()
        assert canon(there) == canon({"root": value})


_TAGS = ["$leaf", *_BUILDERS, "$unknown"]
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=4)
    | st.just("float32"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from([*"ab", "state", "seed", "bit_generator"]), inner, max_size=3
        )
        | st.builds(lambda tag, body: {tag: body}, st.sampled_from(_TAGS), inner)
    ),
    max_leaves=10,
)


@settings(max_examples=300)
@given(json_values)
def test_no_tree_makes_the_decoder_raise_anything_but_its_own_errors(tree: Any) -> None:
    for filled in (True, False):
        with contextlib.suppress(CheckpointError):
            Decoder(lambda key: torch.zeros(3), filled=filled).decode(tree)
    with contextlib.suppress(TypeError, ValueError, LookupError, AttributeError):
        # State.plan turns these into CorruptCheckpoint.
        bind_leaves(tree, {}, lambda key, device, live: None)
