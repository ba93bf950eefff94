"""Python values as tagged JSON, with arrays left out: no pickle, nothing executed on load.

A value of a plain JSON type stands for itself. Everything else is an object with one member
whose name starts with ``$``. Arrays are *leaves*: the tree only names them. Classes (enums,
named tuples, dataclasses) are looked up among the modules that are already imported, and no
constructor of theirs runs. What has no tag is refused when it is saved, by its path. A value
comes back with exactly the type that it had.
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
import zoneinfo
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from asymcheck.device import classes
from asymcheck.device.naming import has_surrogate, join
from asymcheck.device.tensors import is_plain
from asymcheck.errors import CorruptCheckpoint, IncompatibleCheckpoint, StateError

Array = torch.Tensor | np.ndarray[Any, Any]
Json = Any

MAX_DEPTH = 100
_SAFE_INT = 1 << 53
_MAX_SPAWNED = 1 << 20
_FACTORIES = {f.__name__: f for f in (list, dict, set, int, float, str, bool)}
_PATHS = {
    p.__name__: p
    for p in (pathlib.Path, pathlib.PurePath, pathlib.PurePosixPath, pathlib.PureWindowsPath)
}

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
        if type(value) is torch.Tensor and value.is_cpu:
            return {"$leaf": self._leaf(path, value)}
        simple = NotImplemented if type(value) is dict else _encode_scalar(value)
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
        if kind is dict:
            return self._encode_mapping(value, path)
        if isinstance(value, enum.Enum):
            return self._encode_enum(value, path)
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
            state = value.get_state(legacy=False)
            if state["bit_generator"] != "MT19937":
                raise StateError(
                    path,
                    f"a RandomState over {state['bit_generator']} is not supported: use "
                    f"numpy.random.Generator",
                )
            return {"$numpy_random_state": self.encode(state, path)}
        if kind is np.random.Generator:
            return {"$numpy_generator": self._encode_numpy_generator(value, path)}
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return {"$namedtuple": self._encode_record(value, path)}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {"$dataclass": self._encode_record(value, path)}
        raise StateError(path, _why_refused(value))

    def _encode_enum(self, value: enum.Enum, path: str) -> Json:
        name = classes.name_of(type(value), path)
        if isinstance(value, enum.Flag):
            return {"$flag": [name, self.encode(value.value, path)]}
        return {"$enum": [name, classes.member_name(value, path)]}

    def _encode_record(self, value: Any, path: str) -> Json:  # noqa: ANN401
        fields = classes.fields_of(value, path)
        encoded = {f: self.encode(v, join(path, f)) for f, v in fields.items()}
        return [classes.name_of(type(value), path), encoded]

    def _encode_numpy_generator(self, value: np.random.Generator, path: str) -> Json:
        bits = value.bit_generator
        if getattr(np.random, type(bits).__name__, None) is not type(bits):
            raise StateError(path, f"bit generator {type(bits).__qualname__} is not numpy's own")
        found = {"state": bits.state}
        seed = bits.seed_seq
        if type(seed) is np.random.SeedSequence:
            if seed.n_children_spawned > _MAX_SPAWNED:
                raise StateError(path, f"it has spawned more than {_MAX_SPAWNED} generators")
            found["seed"] = seed.state  # what spawn() continues from
        return self.encode(found, path)

    def _encode_sequence(self, value: Iterable[Any], path: str) -> Json:
        if all(type(v) is int and -_SAFE_INT < v < _SAFE_INT for v in value):
            items = list(value)  # such as the 624 words of a generator, at every save
        else:
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
        if kind is dict and all(type(k) is str and _is_plain_key(k) for k in value):
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


def _is_plain_key(key: str) -> bool:
    return not key.startswith("$") and (key.isascii() or not has_surrogate(key))


def _encode_scalar(value: Any) -> Json:  # noqa: ANN401
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is str:
        if value.isascii() or not has_surrogate(value):
            return value
        return {"$str": value.encode("utf-8", "surrogatepass").hex()}
    if kind is int:
        return value if -_SAFE_INT < value < _SAFE_INT else {"$int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
    if kind is complex:
        return {"$complex": [_encode_scalar(value.real), _encode_scalar(value.imag)]}
    if kind in (bytes, bytearray):
        return {f"${kind.__name__}": base64.b64encode(value).decode("ascii")}
    if isinstance(value, np.generic) and not value.dtype.hasobject:
        if is_plain(value.dtype):
            return {"$numpy_scalar": [value.dtype.str, value.tobytes().hex()]}
        return NotImplemented
    if kind is torch.dtype:
        return {"$dtype": str(value).removeprefix("torch.")}
    if kind is torch.device:
        return {"$device": str(value)}
    if kind in (range, slice):
        ends = [_encode_scalar(v) for v in (value.start, value.stop, value.step)]
        return NotImplemented if NotImplemented in ends else {f"${kind.__name__}": ends}
    if kind is datetime.date:
        return {"$date": value.isoformat()}
    if kind in (datetime.datetime, datetime.time):
        zone = _encode_zone(value.tzinfo)
        naive = value.replace(tzinfo=None).isoformat()
        return zone if zone is NotImplemented else {f"${kind.__name__}": [naive, value.fold, zone]}
    if kind is datetime.timedelta:
        return {"$timedelta": [value.days, value.seconds, value.microseconds]}
    if isinstance(value, pathlib.PurePath):
        name = "Path" if kind is type(pathlib.Path()) else kind.__name__
        if _PATHS.get(name) in (kind, pathlib.Path):
            return {"$path": [name, _encode_scalar(str(value))]}
    return NotImplemented


def _encode_zone(zone: datetime.tzinfo | None) -> Json:
    if zone is None:
        return None
    if type(zone) is datetime.timezone:
        offset = zone.utcoffset(None)
        return [offset.days, offset.seconds, offset.microseconds, zone.tzname(None)]
    if type(zone) is zoneinfo.ZoneInfo and zone.key is not None:
        return zone.key
    return NotImplemented


def _why_refused(value: Any) -> str:  # noqa: ANN401
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if callable(getattr(value, "state_dict", None)) and not isinstance(value, type):
        return f"a {name} is saved only at the top: make it an entry of state of its own"
    return (
        f"a {name} cannot be saved without pickle: give the object state_dict() and "
        f"load_state_dict(), or store plain values"
    )


# --- decoding ---------------------------------------------------------------


class Decoder:
    """Rebuilds values. Never changes a live value.

    Args:
        leaf: Returns the array of a key.
        filled: Whether the arrays hold their values yet. Where they do not, a value that is
            made out of an array's content is left out: everything else can be checked before
            anything is read.
    """

    def __init__(self, leaf: Callable[[str], Array], *, filled: bool = True) -> None:
        self._leaf = leaf
        self.filled = filled

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
        except _MALFORMED as bad:
            raise CorruptCheckpoint("(state)", f"value tagged {tag!r}: {bad!r:.200}") from bad

    def pairs(self, body: Json) -> list[tuple[Any, Any]]:
        """Decoded key-value pairs of a mapping."""
        return [(self.decode(k), self.decode(v)) for k, v in body]


_MALFORMED = (
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RuntimeError,
    struct.error,
)


def _build_complex(decoder: Decoder, body: Json) -> Any:  # noqa: ANN401
    real, imaginary = body
    return complex(decoder.decode(real), decoder.decode(imaginary))


def _build_defaultdict(decoder: Decoder, body: Json) -> Any:  # noqa: ANN401
    name, pairs = body
    factory = None if name is None else _FACTORIES[name]
    return collections.defaultdict(factory, decoder.pairs(pairs))


def _build_torch_generator(decoder: Decoder, body: Json) -> Any:  # noqa: ANN401
    device, state = body
    try:
        generator = torch.Generator(device)
    except RuntimeError as bad:
        raise IncompatibleCheckpoint(
            f"the state holds a generator of device {device!r:.40}, which is not here: {bad}"
        ) from bad
    if decoder.filled:
        generator.set_state(decoder.decode(state))
    return generator


def _build_random(decoder: Decoder, body: Json) -> Any:  # noqa: ANN401
    found = random.Random()
    found.setstate(decoder.decode(body))
    return found


def _build_numpy_random_state(decoder: Decoder, body: Json) -> Any:  # noqa: ANN401
    found = np.random.RandomState()
    if decoder.filled:
        found.set_state(decoder.decode(body))
    return found


def _checked_dict(value: Any) -> dict[str, Any]:  # noqa: ANN401
    if not isinstance(value, dict):
        raise TypeError(f"expected a dict, found {type(value).__name__}")
    return value


def _build_numpy_generator(decoder: Decoder, body: Json) -> Any:  # noqa: ANN401
    found = _checked_dict(decoder.decode(body))
    state = _checked_dict(found["state"])
    kind = getattr(np.random, str(state["bit_generator"]), None)
    if not (isinstance(kind, type) and issubclass(kind, np.random.BitGenerator)):
        raise IncompatibleCheckpoint(
            f"this numpy has no bit generator {state['bit_generator']!r:.80}"
        )
    if not decoder.filled:
        return np.random.Generator(kind(0))
    seed = None
    if "seed" in found:
        how = _checked_dict(found["seed"])
        if max(how["n_children_spawned"], how["pool_size"]) > _MAX_SPAWNED:
            raise ValueError("its seed sequence is too large")
        seed = np.random.SeedSequence(**how)
    generator = np.random.Generator(kind(seed))
    generator.bit_generator.state = state
    return generator


def _build_numpy_scalar(decoder: Decoder, body: Json) -> Any:  # noqa: ANN401
    name, data = np.dtype(body[0]), bytes.fromhex(body[1])
    if name.kind == "U":  # not through an array, which drops zeros at the end
        order = "little" if name.byteorder in "<=" and sys.byteorder == "little" else "big"
        return np.str_(data.decode(f"utf-32-{order[0]}e", "surrogatepass"))
    if name.kind == "S":
        return np.bytes_(data)
    return np.frombuffer(data, name)[0]


def _build_zone(body: Json) -> datetime.tzinfo | None:
    if body is None:
        return None
    if isinstance(body, str):
        try:
            return zoneinfo.ZoneInfo(body)
        except zoneinfo.ZoneInfoNotFoundError as bad:
            raise IncompatibleCheckpoint(f"time zone {body!r:.80} is not known here") from bad
    days, seconds, microseconds, name = body
    offset = datetime.timedelta(days, seconds, microseconds)
    plain = datetime.timezone(offset)
    return plain if plain.tzname(None) == name else datetime.timezone(offset, name)


def _build_datetime(decoder: Decoder, body: Json) -> Any:  # noqa: ANN401
    naive, fold, zone = body
    return datetime.datetime.fromisoformat(naive).replace(fold=fold, tzinfo=_build_zone(zone))


def _build_time(decoder: Decoder, body: Json) -> Any:  # noqa: ANN401
    naive, fold, zone = body
    return datetime.time.fromisoformat(naive).replace(fold=fold, tzinfo=_build_zone(zone))


def _build_dtype(decoder: Decoder, body: Json) -> Any:  # noqa: ANN401
    found = getattr(torch, str(body), None)
    if not isinstance(found, torch.dtype):
        raise IncompatibleCheckpoint(f"this torch has no dtype {body!r:.80}")
    return found


def _build_flag(decoder: Decoder, body: Json) -> Any:  # noqa: ANN401
    name, bits = body
    return classes.flag(name, decoder.decode(bits))


def _build_namedtuple(decoder: Decoder, body: Json) -> Any:  # noqa: ANN401
    name, fields = body
    return classes.namedtuple(name, fields, decoder.decode)


def _build_dataclass(decoder: Decoder, body: Json) -> Any:  # noqa: ANN401
    name, fields = body
    return classes.dataclass(name, fields, decoder.decode)


_BUILDERS: Mapping[str, Callable[[Decoder, Json], Any]] = {
    "$str": lambda _, b: bytes.fromhex(b).decode("utf-8", "surrogatepass"),
    "$int": lambda _, b: int(b, 16),
    "$float": lambda _, b: struct.unpack(">d", bytes.fromhex(b))[0],
    "$complex": _build_complex,
    "$bytes": lambda _, b: base64.b64decode(b, validate=True),
    "$bytearray": lambda _, b: bytearray(base64.b64decode(b, validate=True)),
    "$numpy_scalar": _build_numpy_scalar,
    "$dtype": _build_dtype,
    "$device": lambda _, b: torch.device(b),
    "$range": lambda d, b: range(*d.decode(b)),
    "$slice": lambda d, b: slice(*d.decode(b)),
    "$datetime": _build_datetime,
    "$date": lambda _, b: datetime.date.fromisoformat(b),
    "$time": _build_time,
    "$timedelta": lambda _, b: datetime.timedelta(*b),
    "$path": lambda d, b: _PATHS[b[0]](d.decode(b[1])),
    "$enum": lambda _, b: classes.enum_member(*b),
    "$flag": _build_flag,
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
