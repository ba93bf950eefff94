"""What the golden checkpoint of format 1 holds. It must never change: the checkpoint does not.

Everything is made from a pattern, so that it depends on no random numbers and no kernels.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import math
import pathlib
import random
from typing import Any

import numpy as np
import torch
from torch import nn

DTYPES = [
    "float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128", "bool",
    "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float8_e4m3fn",
    "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
]  # fmt: skip
NUMPY_DTYPES = [
    "|b1",
    "|i1",
    "<u2",
    "<i4",
    "<u8",
    "<f2",
    "<f4",
    "<f8",
    "<c16",
    "<M8[ns]",
    "<U3",
    "|S4",
]


class Color(enum.Enum):
    RED = 1
    BLUE = "b"


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Point(collections.namedtuple("Point", ["x", "y"])):
    __slots__ = ()


@dataclasses.dataclass
class Window:
    size: int
    seen: list[float]


class Position:
    """Something with a state of its own."""

    def __init__(self, at: int) -> None:
        self.state: dict[str, Any] = {
            "at": at,
            "shuffle": [3, 1, 2][:at],
            "buffer": pattern("int16", 5),
        }

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def pattern(dtype: str, *shape: int, start: int = 1) -> torch.Tensor:
    """A tensor whose bytes run through all values, NaNs with payload among them."""
    kind = getattr(torch, dtype)
    if 0 in shape:
        return torch.empty(shape, dtype=kind)
    raw = bytearray((start + 37 * i) % 256 for i in range(math.prod(shape) * kind.itemsize))
    if kind is torch.bool:
        raw = bytearray(b % 2 for b in raw)
    flat = torch.from_numpy(np.frombuffer(raw, np.uint8).copy()).view(kind)
    return flat.reshape(shape)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.lower = nn.Linear(4, 3).to(torch.bfloat16)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.zeros(3, dtype=torch.float64), requires_grad=False)
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("none", torch.empty(0, 5))
        self.register_buffer("mask", torch.zeros(9, dtype=torch.bool))
        self.note = ""

    def get_extra_state(self) -> dict[str, str]:
        return {"note": self.note}

    def set_extra_state(self, state: dict[str, str]) -> None:
        self.note = state["note"]


def state(*, blank: bool) -> dict[str, Any]:
    """The state, or one of the same structure without its content."""
    net = Net()
    adam = torch.optim.AdamW(
        [{"params": net.embed.parameters()}, {"params": net.lower.parameters(), "lr": 0.5}], lr=0.25
    )
    sgd = torch.optim.SGD(net.conv.parameters(), lr=0.125, momentum=0.5)
    tensors: dict[str, torch.Tensor] = {
        **{f"dtype {d}": pattern(d, 3, 4) for d in DTYPES},
        "scalar": pattern("float32"),
        "empty": pattern("int64", 0, 3),
        "transposed": pattern("float32", 4, 6).t(),
        "strided": pattern("int32", 10)[::3],
        "expanded": pattern("float64", 3, 1).expand(3, 4),
        "large": pattern("int16", 40_000),
    }
    values = {} if blank else python_values()
    if blank:
        for tensor in tensors.values():
            tensor.untyped_storage().fill_(0)
    else:
        fill(net, adam, sgd)
    return {
        "model": net,
        "adam": adam,
        "sgd": sgd,
        "position": Position(0 if blank else 3),
        "values": values,
        **tensors,
    }


def fill(net: Net, adam: torch.optim.Optimizer, sgd: torch.optim.Optimizer) -> None:
    net.note = "kept"
    with torch.no_grad():
        for i, (_, tensor) in enumerate(net.state_dict(keep_vars=True).items()):
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                name = str(tensor.dtype).removeprefix("torch.")
                tensor.copy_(pattern(name, *tensor.shape, start=i))
    for p in net.embed.parameters():
        adam.state[p] = {
            "step": torch.tensor(7.0),
            "exp_avg": pattern("float32", *p.shape, start=5),
            "exp_avg_sq": pattern("float32", *p.shape, start=6),
        }
    for p in net.lower.parameters():  # moments that are wider than their parameter
        adam.state[p] = {"step": torch.tensor(9.0), "exp_avg": pattern("float32", *p.shape)}
    for p in net.conv.parameters():
        sgd.state[p] = {"momentum_buffer": pattern("float32", *p.shape, start=8)}


def python_values() -> dict[Any, Any]:
    """A value of every kind that the state tree has a tag for."""
    zone = datetime.timezone(datetime.timedelta(hours=2), "here")
    numpy_generator = np.random.Generator(np.random.PCG64(5))
    numpy_generator.random(3)
    return {
        "plain": [None, True, "é \N{GRINNING FACE}", 1, -2.5, {"a": {}}, []],
        "surrogate": "\ud800",
        "int": -(2**70),
        "float": [math.inf, -math.inf, math.nan, 5e-324],
        "complex": complex(1, -0.0),
        "bytes": [b"\0\xff", bytearray(b"abc")],
        "scalars": [np.dtype(d).type(1) for d in NUMPY_DTYPES[:9]],
        "torch": [torch.bfloat16, torch.device("cuda:1"), torch.Size([2, 3])],
        "range": [range(1, 9, 2), slice(None, 5)],
        "time": [
            datetime.date(2024, 2, 29),
            datetime.datetime(2024, 2, 29, 1, 2, 3, 4, zone, fold=1),
            datetime.time(1, 2),
            datetime.timedelta(-1, 2, 3),
        ],
        "path": [pathlib.PurePosixPath("a/b"), pathlib.PureWindowsPath("c:\\d")],
        "enum": [Color.BLUE, Access.READ | Access.WRITE],
        "sequence": [(1, (2,)), {3, 1}, frozenset({"a"}), collections.deque([1, 2], maxlen=4)],
        "mapping": [
            {1: "one", (2, 3): "pair", "$x": 0},
            collections.OrderedDict(b=1, a=2),
            collections.Counter("hello"),
            collections.defaultdict(list, {"k": [1]}),
        ],
        "classes": [Point(1, 2), Window(3, [0.5])],
        "generators": [
            random.Random(11),
            np.random.RandomState(12),
            numpy_generator,
            torch.Generator().manual_seed(13),
        ],
        "arrays": [
            np.frombuffer(bytes((3 + 5 * i) % 64 for i in range(96)), np.uint8).copy().view(d)
            if not d.endswith("b1")
            else np.array([True, False, True])
            for d in NUMPY_DTYPES
        ],
        "tensors": [pattern("float32", 2, 2), (pattern("int8", 3),)],
        7: "a key that is no text",
    }


def bits(value: Any) -> str:
    """A value as text that is equal only where every bit and type is."""
    kind = type(value).__name__
    match value:
        case torch.nn.Module():
            return f"{kind} {bits(dict(value.state_dict(keep_vars=True)))}"
        case torch.optim.Optimizer():
            params = [p for group in value.param_groups for p in group["params"]]
            options = [
                {k: g[k] for k in ("lr", "weight_decay") if k in g} for g in value.param_groups
            ]
            return f"{kind} {bits(options)} {bits([value.state.get(p) for p in params])}"
        case Position():
            return f"{kind} {bits(value.state)}"
        case torch.Tensor():
            data = value.detach().contiguous().reshape(-1).view(torch.uint8)
            raw = bytes(data.numpy()) if value.numel() else b""
            return f"{value.dtype} {tuple(value.shape)} {raw.hex()}"
        case np.ndarray() | np.generic():
            return f"{kind} {value.dtype.str} {value.shape} {value.tobytes().hex()}"
        case torch.Generator():
            return f"{kind} {bits(value.get_state())}"
        case random.Random():
            return f"{kind} {value.getstate()}"
        case np.random.RandomState():
            return f"{kind} {bits(value.get_state(legacy=False))}"
        case np.random.Generator():
            return f"{kind} {value.bit_generator.state}"
        case float():
            return f"{kind} {np.float64(value).tobytes().hex()}"
        case collections.defaultdict():
            return (
                f"{kind} {value.default_factory} {[(bits(k), bits(v)) for k, v in value.items()]}"
            )
        case dict():
            return f"{kind} {[(bits(k), bits(v)) for k, v in value.items()]}"
        case set() | frozenset():
            return f"{kind} {sorted(bits(v) for v in value)}"
        case collections.deque():
            return f"{kind} {value.maxlen} {[bits(v) for v in value]}"
        case tuple() | list():
            return f"{kind} {[bits(v) for v in value]}"
        case datetime.datetime():
            return f"{kind} {value!r} {value.fold}"
        case Window():
            return f"{kind} {bits(vars(value))}"
        case _:
            return f"{kind} {value!r}"


def draws() -> list[str]:
    """What the global random number generators give next."""
    return [
        hex(random.getrandbits(64)),
        np.random.bytes(8).hex(),
        str(torch.randint(0, 2**31, (2,)).tolist()),
    ]
