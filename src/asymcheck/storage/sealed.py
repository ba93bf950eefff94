"""Sealed JSON: one line that ends with its own hash, and typed access to what it holds.

The seal tells an object from a half-written or damaged one wherever it lies. Parsers treat
their input as hostile: whatever the bytes, they return a value that keeps every promise of
its type, or raise ``CorruptCheckpoint`` or ``IncompatibleCheckpoint``.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

import xxhash

from asymcheck.errors import CorruptCheckpoint, IncompatibleCheckpoint

VERSION = 1
MAX_SEALED_BYTES = 1 << 30
HASH = re.compile(r"[0-9a-f]{32}\Z")
_MAX_INT = 1 << 53
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2
_SHORT.maxstring = _SHORT.maxother = 80
_SEAL = re.compile(rb',"hash":"([0-9a-f]{32})"\}\n\Z')


def digest(data: bytes | bytearray | memoryview) -> str:
    """xxh3-128 of ``data`` as 32 hexadecimal digits. Detects accidents, not malice."""
    return xxhash.xxh3_128_hexdigest(data)


class Digest:
    """``digest`` of bytes that come in parts."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def add(self, part: bytes | bytearray | memoryview) -> None:
        """The next part; without the interpreter lock where it is long."""
        self._state.update(part)

    def hex(self) -> str:
        """Of all parts so far."""
        return self._state.hexdigest()


def seal(value: Mapping[str, Any]) -> bytes:
    """``value`` as one line of ASCII JSON that ends with its own hash."""
    return seal_text(json.dumps(value, separators=(",", ":"), allow_nan=False)[:-1])


def seal_text(text: str) -> bytes:
    """The seal of a JSON object that is given as ASCII text without its closing brace."""
    body = text.encode("ascii")
    return body + f',"hash":"{digest(body)}"}}\n'.encode("ascii")


def unseal(data: bytes, where: str) -> dict[str, Any]:
    """The value that ``seal`` made into ``data``.

    Raises:
        CorruptCheckpoint: Not a sealed object, or its hash differs.
    """
    if len(data) > MAX_SEALED_BYTES:
        raise CorruptCheckpoint(where, f"{len(data)} bytes, expected at most {MAX_SEALED_BYTES}")
    found = _SEAL.search(data[-64:])
    if found is None:
        raise CorruptCheckpoint(where, "no seal at its end: truncated, or not of this format")
    body = data[: len(data) - len(found[0])]
    expected = found[1].decode("ascii")
    if digest(body) != expected:
        raise CorruptCheckpoint(where, f"hash is {digest(body)}, its seal says {expected}")
    try:
        value = json.loads(body + b"}", parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as failure:
        raise CorruptCheckpoint(where, f"not JSON: {failure}") from None
    if not isinstance(value, dict):
        raise CorruptCheckpoint(where, "expected a JSON object")
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def short(value: object) -> str:
    """What was found, for a message: bounded in length and depth, whatever it is."""
    return _SHORT.repr(value)


class Fields:
    """Typed access to a parsed object: a missing, ill-typed or unknown member is damage.

    Attributes:
        where: The object, for messages.
    """

    def __init__(self, value: object, where: str, known: Iterable[str]) -> None:
        if not isinstance(value, dict):
            raise CorruptCheckpoint(where, f"expected an object, found {type(value).__name__}")
        self._value: dict[str, Any] = value
        self.where = where
        unknown = sorted(value.keys() - set(known))
        if unknown:
            raise CorruptCheckpoint(where, f"unknown member {short(unknown[0])}")

    def fail(self, message: str) -> CorruptCheckpoint:
        """The error to raise about this object."""
        return CorruptCheckpoint(self.where, message)

    def integer(self, name: str, low: int = 0, high: int = _MAX_INT) -> int:
        """An integer member in ``[low, high]``."""
        value = self._value.get(name)
        if type(value) is not int or not low <= value <= high:
            raise self.fail(f"{name}: expected an integer in [{low}, {high}], found {short(value)}")
        return value

    def text(self, name: str, pattern: re.Pattern[str] | None = None) -> str:
        """A text member that matches ``pattern``."""
        value = self._value.get(name)
        if not isinstance(value, str) or (pattern and not pattern.match(value)):
            raise self.fail(f"{name}: expected text, found {short(value)}")
        return value

    def value(self, name: str) -> object:
        """A member as it is, ``None`` where it is missing."""
        return self._value.get(name)

    def items(self, name: str) -> list[Any]:
        """A list member."""
        value = self._value.get(name)
        if not isinstance(value, list):
            raise self.fail(f"{name}: expected a list, found {short(value)}")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        """A list of non-negative integers."""
        value = self.items(name)
        if not all(type(v) is int and 0 <= v <= _MAX_INT for v in value):
            raise self.fail(f"{name}: expected sizes, found {short(value)}")
        return tuple(value)

    def integer_or_integers(self, name: str) -> int | tuple[int, ...]:
        """An integer, or a list of them; none is negative."""
        return (
            self.integers(name) if isinstance(self._value.get(name), list) else self.integer(name)
        )

    def table(self, name: str) -> dict[str, Any]:
        """An object member, empty where there is none."""
        value = self._value.get(name, {})
        if not isinstance(value, dict):
            raise self.fail(f"{name}: expected an object, found {short(value)}")
        return value

    def texts(self, name: str) -> dict[str, str]:
        """An object of text members, empty where there is none."""
        value = self.table(name)
        if not all(isinstance(v, str) for v in value.values()):
            raise self.fail(f"{name}: expected texts, found {short(value)}")
        return value

    def has(self, name: str) -> bool:
        """Whether the member is there."""
        return name in self._value


def check_version(found: object, kind: str, where: str) -> None:
    """Check a ``'<kind> <version>'`` line.

    Raises:
        CorruptCheckpoint: It is not one.
        IncompatibleCheckpoint: A version that is not known here.
    """
    name, _, version = found.rpartition(" ") if isinstance(found, str) else ("", "", "")
    if name != kind or not re.match(r"[0-9]{1,9}\Z", version):
        raise CorruptCheckpoint(where, f"expected '{kind} {VERSION}', found {short(found)}")
    if int(version) != VERSION:
        raise IncompatibleCheckpoint(
            f"{where}: format version {version}; this release reads version {VERSION}: "
            f"install an asymcheck that reads it"
        )


def dump_metric(value: float) -> float | str:
    """A metric as JSON can hold it: infinities and NaN as text."""
    return value if abs(value) < float("inf") else repr(float(value))


def parse_metrics(get: Fields) -> dict[str, float]:
    """The ``metrics`` member."""
    return {str(k): number(get, v, f"metric {short(k)}") for k, v in get.table("metrics").items()}


def number(get: Fields, value: object, name: str) -> float:
    """A JSON number, or one of the texts that stand for infinities and NaN."""
    if value in ("inf", "-inf", "nan"):
        return float(str(value))
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise get.fail(f"{name}: expected a number, found {short(value)}")
    try:
        return float(value)
    except OverflowError:
        raise get.fail(f"{name}: expected a number, found {short(value)}") from None
