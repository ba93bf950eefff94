"""Python values as tagged JSON, with arrays left out: no pickle, nothing executed on load.

A value of a plain JSON type stands for itself. Everything else is an object with one member
whose name starts with ``$``. Arrays are *leaves*: the tree only names them. Classes (enums,
named tuples, dataclasses) are looked up among the modules that are already imported, and no
constructor of theirs runs. What has no tag is refused when it is saved, by its path.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import datetime
import enum
import json
import math
import pathlib
import random
import struct
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from asymcheck.errors import CorruptCheckpoint, IncompatibleCheckpoint, StateError

Array = torch.Tensor | np.ndarray[Any, Any]
Json = Any

MAX_DEPTH = 100
_SAFE_INT = 1 << 53
_FACTORIES = {f.__name__: f for f in (list, dict, set, int, float, str, bool)}


def escape(part: str) -> str:
    """A path part that holds no ``/`` and is never empty."""
    return part.replace("%", "%25").replace("/", "%2F").replace("[", "%5B") or "%"


def join(path: str, key: object) -> str:
    """The path of a member: text keys as they are, others as ``[repr]``."""
    return f"{path}/{escape(key) if type(key) is str else f'[{escape(repr(key))}]'}"


# --- encoding ---------------------------------------------------------------


class Encoder:
    """Encodes values.

    Args:
        leaf: Called with path and array of each leaf; returns the key that it is saved under.
    """

    def __init__(self, leaf: Callable[[str, Array], str]) -> None:
        self._leaf = leaf
        self._open: list[int] = []

    def encode(self, value: Any, path: str) -> Json:  # noqa: ANN401
        """``value`` as JSON.

        Raises:
            StateError: It holds something that has no tag, a cycle, or is nested too deeply.
        """
        simple = _encode_scalar(value)
        if simple is not NotImplemented:
            return simple
        if id(value) in self._open:
            raise StateError(path, "it contains itself")
        if len(self._open) >= MAX_DEPTH:
            raise StateError(path, f"nested more than {MAX_DEPTH} deep")
        self._open.append(id(value))
        try:
            return self._encode_compound(value, path)
        finally:
            self._open.pop()

    def _encode_compound(self, value: Any, path: str) -> Json:  # noqa: ANN401
        kind = type(value)
        if isinstance(value, enum.Enum):
            if kind.__members__.get(value.name) is not value:
                raise StateError(
                    path, f"{value!r} is no single member of its enum: store its value"
                )
            return {"$enum": [_class_name(kind, path), value.name]}
        if isinstance(value, torch.Tensor):
            row: dict[str, Json] = {"$leaf": self._leaf(path, value)}
            if value.device.type != "cpu":
                row["device"] = str(value.device)
            return row
        if kind is np.ndarray:
            return {"$leaf": self._leaf(path, value)}
        if kind in (list, tuple, torch.Size, set, frozenset, collections.deque):
            return self._encode_sequence(value, path)
        if kind in (dict, collections.OrderedDict, collections.Counter, collections.defaultdict):
            return self._encode_mapping(value, path)
        if kind is torch.Generator:
            return {
                "$torch_generator": [
                    str(value.device),
                    self.encode(value.get_state(), join(path, "state")),
                ]
            }
        if kind is random.Random:
            return {"$random": self.encode(value.getstate(), path)}
        if kind is np.random.RandomState:
            return {"$numpy_random_state": self.encode(value.get_state(legacy=False), path)}
        if kind is np.random.Generator:
            return {"$numpy_generator": self.encode(value.bit_generator.state, path)}
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            items = [
                self.encode(v, join(path, f)) for f, v in zip(kind._fields, value, strict=True)
            ]
            return {"$namedtuple": [_class_name(kind, path), items]}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {
                f.name: self.encode(getattr(value, f.name), join(path, f.name))
                for f in dataclasses.fields(value)
            }
            return {"$dataclass": [_class_name(kind, path), fields]}
        raise StateError(
            path,
            f"a {kind.__module__}.{kind.__qualname__} cannot be saved without pickle: give the "
            f"object state_dict() and load_state_dict(), or store plain values",
        )

    def _encode_sequence(self, value: Iterable[Any], path: str) -> Json:
        items = [self.encode(v, join(path, i)) for i, v in enumerate(value)]
        if isinstance(value, list):
            return items
        if isinstance(value, collections.deque):
            return {"$deque": [value.maxlen, items]}
        if isinstance(value, set | frozenset):
            # By text, so that equal sets are equal bytes.
            items.sort(key=lambda item: json.dumps(item, sort_keys=True))
        return {f"${type(value).__name__.lower()}": items}

    def _encode_mapping(self, value: Mapping[Any, Any], path: str) -> Json:
        kind = type(value)
        if kind is dict and all(type(k) is str and not k.startswith("$") for k in value):
            return {k: self.encode(v, join(path, k)) for k, v in value.items()}
        pairs = [
            [self.encode(k, join(path, k)), self.encode(v, join(path, k))] for k, v in value.items()
        ]
        if isinstance(value, collections.defaultdict):
            factory = value.default_factory
            name = getattr(factory, "__name__", None)
            if factory is not None and _FACTORIES.get(str(name)) is not factory:
                raise StateError(
                    path,
                    f"the default factory {factory!r} cannot be saved: use one of "
                    f"{sorted(_FACTORIES)}, or a plain dict",
                )
            return {"$defaultdict": [name, pairs]}
        return {f"${kind.__name__.lower()}": pairs}


def _encode_scalar(value: Any) -> Json:  # noqa: ANN401
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if -_SAFE_INT < value < _SAFE_INT else {"$int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
    if kind is complex:
        return {"$complex": [_encode_scalar(value.real), _encode_scalar(value.imag)]}
    if kind in (bytes, bytearray):
        return {f"${kind.__name__}": base64.b64encode(value).decode("ascii")}
    if isinstance(value, np.generic) and not value.dtype.hasobject:
        if value.dtype.names is None:
            return {"$numpy_scalar": [value.dtype.str, value.tobytes().hex()]}
        return NotImplemented
    if kind is torch.dtype:
        return {"$dtype": str(value).removeprefix("torch.")}
    if kind is torch.device:
        return {"$device": str(value)}
    if kind in (range, slice):
        ends = [_encode_scalar(v) for v in (value.start, value.stop, value.step)]
        return NotImplemented if NotImplemented in ends else {f"${kind.__name__}": ends}
    if kind in (datetime.datetime, datetime.date, datetime.time):
        return {f"${kind.__name__}": value.isoformat()}
    if kind is datetime.timedelta:
        return {"$timedelta": [value.days, value.seconds, value.microseconds]}
    if isinstance(value, pathlib.PurePath):
        return {"$path": str(value)}
    return NotImplemented


def _class_name(kind: type, path: str) -> str:
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _find_class(name) is not kind:
        raise StateError(
            path, f"class {name} cannot be found again by its name: define it in a module"
        )
    return name


def _find_class(name: str) -> object:
    module, _, qualname = name.partition(":")
    found: object = sys.modules.get(module)
    for part in qualname.split("."):
        # Not getattr: a module may answer that by importing something.
        found = vars(found).get(part) if isinstance(found, types.ModuleType | type) else None
    return found


# --- decoding ---------------------------------------------------------------


def bind_leaves(tree: Json, live: object, bind: Callable[[str, str, object], None]) -> None:
    """Visit every leaf that ``tree`` names, before any of them is read.

    Args:
        tree: What ``Encoder.encode`` made.
        live: The value that is there now, if any.
        bind: Called with the leaf's key, its recorded device, and the live value in its
            place (``None`` where there is none).
    """
    if isinstance(tree, list):
        old_items = live if isinstance(live, list | tuple | collections.deque) else ()
        for i, item in enumerate(tree):
            bind_leaves(item, old_items[i] if i < len(old_items) else None, bind)
    elif isinstance(tree, dict):
        if "$leaf" in tree:
            bind(str(tree["$leaf"]), str(tree.get("device", "cpu")), live)
            return
        old = live if isinstance(live, dict) else {}
        for key, item in tree.items():
            bind_leaves(item, live if key in _SAME_ITEMS else old.get(key), bind)


_SAME_ITEMS = {"$tuple"}


class Decoder:
    """Rebuilds values, once every leaf is read. Never changes a live value.

    Args:
        leaf: Returns the array of a key.
    """

    def __init__(self, leaf: Callable[[str], Array]) -> None:
        self._leaf = leaf

    def decode(self, tree: Json) -> Any:  # noqa: ANN401
        """The value of ``tree``.

        Raises:
            CorruptCheckpoint: Not made by ``Encoder.encode``.
            IncompatibleCheckpoint: It names a class or dtype that is not there.
        """
        if isinstance(tree, list):
            return [self.decode(v) for v in tree]
        if not isinstance(tree, dict):
            return tree
        tag = next((k for k in tree if k.startswith("$")), None)
        if tag is None:
            return {k: self.decode(v) for k, v in tree.items()}
        if tag == "$leaf":
            return self._leaf(str(tree[tag]))
        build = _BUILDERS.get(tag)
        if build is None:
            raise IncompatibleCheckpoint(
                f"the state holds a value tagged {tag!r}, which this release does not know: "
                f"install a newer asymcheck"
            )
        try:
            return build(self, tree[tag])
        except (TypeError, ValueError, LookupError, ArithmeticError, RuntimeError) as bad:
            raise CorruptCheckpoint("(state)", f"value tagged {tag!r}: {bad}") from bad

    def pairs(self, body: Json) -> list[tuple[Any, Any]]:
        """Decoded key-value pairs of a mapping."""
        return [(self.decode(k), self.decode(v)) for k, v in body]


def _build_defaultdict(decoder: Decoder, body: Json) -> Any:  # noqa: ANN401
    name, pairs = body
    factory = None if name is None else _FACTORIES[name]
    return collections.defaultdict(factory, decoder.pairs(pairs))


def _build_torch_generator(decoder: Decoder, body: Json) -> Any:  # noqa: ANN401
    device, state = body
    generator = torch.Generator(device)
    generator.set_state(decoder.decode(state))
    return generator


def _build_random(decoder: Decoder, body: Json) -> Any:  # noqa: ANN401
    found = random.Random()
    found.setstate(decoder.decode(body))
    return found


def _build_numpy_random_state(decoder: Decoder, body: Json) -> Any:  # noqa: ANN401
    found = np.random.RandomState()
    found.set_state(decoder.decode(body))
    return found


def _build_numpy_generator(decoder: Decoder, body: Json) -> Any:  # noqa: ANN401
    state = decoder.decode(body)
    kind = getattr(np.random, str(state["bit_generator"]), None)
    if not (isinstance(kind, type) and issubclass(kind, np.random.BitGenerator)):
        raise IncompatibleCheckpoint(
            f"this numpy has no bit generator {state['bit_generator']!r:.80}"
        )
    generator = np.random.Generator(kind())
    generator.bit_generator.state = state
    return generator


def _build_dtype(decoder: Decoder, body: Json) -> Any:  # noqa: ANN401
    found = getattr(torch, str(body), None)
    if not isinstance(found, torch.dtype):
        raise IncompatibleCheckpoint(f"this torch has no dtype {body!r:.80}")
    return found


def _known_class(name: Json, is_kind: Callable[[Any], bool], kind: str) -> Any:  # noqa: ANN401
    found = _find_class(str(name))
    if not isinstance(found, type) or not is_kind(found):
        raise IncompatibleCheckpoint(
            f"the state holds a {kind} of class {str(name)!r:.120}, which is not loaded: import "
            f"its module before restore()"
        )
    return found


def _build_enum(decoder: Decoder, body: Json) -> Any:  # noqa: ANN401
    name, member = body
    return _known_class(name, lambda c: issubclass(c, enum.Enum), "enum")[member]


def _build_namedtuple(decoder: Decoder, body: Json) -> Any:  # noqa: ANN401
    name, items = body
    kind = _known_class(name, lambda c: issubclass(c, tuple) and hasattr(c, "_fields"), "tuple")
    return tuple.__new__(kind, decoder.decode(items))


def _build_dataclass(decoder: Decoder, body: Json) -> Any:  # noqa: ANN401
    name, fields = body
    kind = _known_class(name, dataclasses.is_dataclass, "dataclass")
    names = {f.name for f in dataclasses.fields(kind)}
    found = object.__new__(kind)
    for field, value in fields.items():
        if field not in names:
            raise IncompatibleCheckpoint(f"dataclass {name!r:.120} has no field {field!r:.80}")
        object.__setattr__(found, field, decoder.decode(value))
    return found


_BUILDERS: Mapping[str, Callable[[Decoder, Json], Any]] = {
    "$int": lambda _, b: int(b, 16),
    "$float": lambda _, b: struct.unpack(">d", bytes.fromhex(b))[0],
    "$complex": lambda d, b: complex(*d.decode(b)),
    "$bytes": lambda _, b: base64.b64decode(b, validate=True),
    "$bytearray": lambda _, b: bytearray(base64.b64decode(b, validate=True)),
    "$numpy_scalar": lambda _, b: np.frombuffer(bytes.fromhex(b[1]), np.dtype(b[0]))[0],
    "$dtype": _build_dtype,
    "$device": lambda _, b: torch.device(b),
    "$range": lambda d, b: range(*d.decode(b)),
    "$slice": lambda d, b: slice(*d.decode(b)),
    "$datetime": lambda _, b: datetime.datetime.fromisoformat(b),
    "$date": lambda _, b: datetime.date.fromisoformat(b),
    "$time": lambda _, b: datetime.time.fromisoformat(b),
    "$timedelta": lambda _, b: datetime.timedelta(*b),
    "$path": lambda _, b: pathlib.Path(b),
    "$enum": _build_enum,
    "$tuple": lambda d, b: tuple(d.decode(b)),
    "$size": lambda d, b: torch.Size(d.decode(b)),
    "$set": lambda d, b: set(d.decode(b)),
    "$frozenset": lambda d, b: frozenset(d.decode(b)),
    "$deque": lambda d, b: collections.deque(d.decode(b[1]), maxlen=b[0]),
    "$dict": lambda d, b: dict(d.pairs(b)),
    "$ordereddict": lambda d, b: collections.OrderedDict(d.pairs(b)),
    "$counter": lambda d, b: collections.Counter(dict(d.pairs(b))),
    "$defaultdict": _build_defaultdict,
    "$namedtuple": _build_namedtuple,
    "$dataclass": _build_dataclass,
    "$torch_generator": _build_torch_generator,
    "$random": _build_random,
    "$numpy_random_state": _build_numpy_random_state,
    "$numpy_generator": _build_numpy_generator,
}


def put_back(live: Any, value: Any) -> Any:  # noqa: ANN401
    """Give a live value the content of a decoded one, in place where its type allows it.

    Returns:
        The live object, or ``value`` where there is nothing to change in place.
    """
    if live is value or type(live) is not type(value):
        return value
    if isinstance(live, dict):
        merged = {k: put_back(live.get(k), v) for k, v in value.items()}
        live.clear()
        live.update(merged)
    elif isinstance(live, list):
        old = live + [None] * (len(value) - len(live))
        live[:] = [put_back(old[i], v) for i, v in enumerate(value)]
    elif isinstance(live, set):
        live.clear()
        live.update(value)
    elif isinstance(live, collections.deque):
        live.clear()
        live.extend(value)
    elif isinstance(live, bytearray):
        live[:] = value
    elif isinstance(live, torch.Generator):
        live.set_state(value.get_state())
    elif isinstance(live, random.Random):
        live.setstate(value.getstate())
    elif isinstance(live, np.random.RandomState):
        live.set_state(value.get_state(legacy=False))
    elif isinstance(live, np.random.Generator):
        live.bit_generator.state = value.bit_generator.state
    elif dataclasses.is_dataclass(live):
        for f in dataclasses.fields(live):
            object.__setattr__(
                live, f.name, put_back(getattr(live, f.name), getattr(value, f.name))
            )
    else:
        return value
    return live
