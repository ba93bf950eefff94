"""Floating point elements as NumPy can compute with them, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class FloatType:
    """One of the types that lossy codecs know.

    Attributes:
        code: Its number in stored bytes.
        width: Bytes of an element.
        work: NumPy's type to compute in; holds every value exactly.
        roundoff: Half the distance from 1 to the next value.
        least: The smallest value above zero.
        greatest: The greatest finite value.
    """

    code: int
    width: int
    work: str
    roundoff: float
    least: float
    greatest: float


FLOATS: Mapping[str, FloatType] = MappingProxyType(
    {
        "float16": FloatType(1, 2, "<f4", 2.0**-11, 2.0**-24, 65504.0),
        "bfloat16": FloatType(2, 2, "<f4", 2.0**-8, 2.0**-133, 2.0**128 - 2.0**120),
        "float32": FloatType(3, 4, "<f4", 2.0**-24, 2.0**-149, 2.0**128 - 2.0**104),
        "float64": FloatType(4, 8, "<f8", 2.0**-53, 2.0**-1074, float(np.finfo("f8").max)),
    }
)
"""By torch's name."""


def bytes_of(array: Floats) -> memoryview:
    """The memory of a contiguous array."""
    return memoryview(bytearray()) if array.size == 0 else array.data.cast("B")


def mean_of(errors: Floats) -> float:
    """The mean of finite values that are not negative; finite too."""
    with np.errstate(over="ignore"):
        mean = float(errors.mean(dtype="f8"))
    return mean if math.isfinite(mean) else float((errors / len(errors)).sum(dtype="f8"))


def widen(raw: memoryview, dtype: str) -> Floats:
    """The elements in ``work``: a view of ``raw`` where that is the type itself, else a copy."""
    found: Floats
    if dtype == "bfloat16":
        bits = np.frombuffer(raw, "<u2").astype("<u4")
        bits <<= 16
        found = bits.view("<f4")
    elif dtype == "float16":
        found = np.frombuffer(raw, "<f2").astype("<f4")
    else:
        found = np.frombuffer(raw, FLOATS[dtype].work)
    return found


def narrow(values: Floats, dtype: str) -> Floats:
    """Values of ``work``, finite and within the range, as the type; to the nearest, ties to even.

    Of ``bfloat16``, which NumPy does not know, the upper 16 bits.
    """
    found: Floats
    if dtype == "bfloat16":
        bits = values.view("<u4")
        found = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    else:
        found = values.astype(f"<f{FLOATS[dtype].width}", copy=False)
    return found
