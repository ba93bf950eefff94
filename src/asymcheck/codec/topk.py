"""A sparse difference to a key-frame: the elements that moved most, everything else as it was.

x̂ = base + S_k(x - base), where S_k keeps the k = ceil(ratio · n) greatest magnitudes. The base is
a lossless key-frame, which is what a decoder holds; so each step chooses by the whole distance
between the state and what a decoder holds, and an error of one step is none of the next.
Where an element is kept, x itself is stored, bit for bit, not a rounded sum.

Keeping the greatest elements and feeding back what was left out: Stich et al., "Sparsified SGD
with Memory", NeurIPS 2018.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from asymcheck.codec.codec import Encoding, Malformed, base_of
from asymcheck.codec.floats import FLOATS, Floats, bytes_of, mean_of, widen
from asymcheck.codec.lossless import read_last, read_section, write_section

_HEADER = struct.Struct("<BII")  # bytes of an element, elements in all, elements kept


@dataclass(frozen=True, slots=True)
class TopK:
    """The k elements of a chunk that are furthest from the base, with their places.

    Does not apply to what is no float, nor where the chunk or the base is not finite. Of
    equal distances the first ones are kept; an element that is equal to the base never is.

    Attributes:
        ratio: Part of the elements to keep, above 0 and at most 1.
    """

    ratio: float = 0.01
    name: str = "topk"
    label: str = "topk"
    lossless: bool = False
    needs_base: bool = True
    chains: bool = False

    def encode(self, raw: memoryview, dtype: str, base: memoryview | None) -> Encoding | None:
        """See ``Codec``. Takes memory for up to four times ``raw``."""
        kind = FLOATS.get(dtype)
        if kind is None or len(raw) % kind.width or base is None or len(base) != len(raw):
            return None
        with np.errstate(over="ignore", invalid="ignore"):
            distance: Floats = widen(raw, dtype) - widen(base, dtype)
            np.abs(distance, out=distance)
            if not math.isfinite(distance.max()):
                return None
        kept = _greatest(distance, math.ceil(self.ratio * len(distance)))
        gaps = np.diff(kept, prepend=-1).astype("<u4")
        values = np.frombuffer(raw, f"<u{kind.width}")[kept]
        parts = [
            _HEADER.pack(kind.width, len(distance), len(kept)),
            *write_section(bytes_of(gaps), 4, "zstd1+shuffle"),
            *write_section(bytes_of(values), kind.width, "zstd1+shuffle"),
        ]
        data = b"".join(parts)
        if len(data) >= len(raw):
            return None
        distance[kept] = 0
        return Encoding(data, float(distance.max()), mean_of(distance))

    def decode(self, stored: memoryview, into: memoryview, base: memoryview | None) -> None:
        """See ``Codec``."""
        base = base_of(base, into, self.name)
        header = _HEADER.unpack_from(stored) if len(stored) >= _HEADER.size else (0, 0, 0)
        width, whole, count = header
        if width not in (2, 4, 8) or width * whole != len(into) or count > whole:
            raise Malformed(
                f"{self.name}: expected some elements of {len(into)} bytes, found {count} of "
                f"{whole} of {width} bytes each"
            )
        gaps, values = np.empty(count, "<u4"), np.empty(count, f"<u{width}")
        rest = read_section(stored[_HEADER.size :], bytes_of(gaps), 4, self.name)
        read_last(read_section(rest, bytes_of(values), width, self.name), self.name)
        at = np.cumsum(gaps, dtype="i8") - 1
        if count and (gaps.min() == 0 or at[-1] >= whole):
            raise Malformed(f"{self.name}: places that do not ascend or lie beyond the chunk")
        into[:] = base
        np.frombuffer(into, values.dtype)[at] = values


def _greatest(distance: Floats, count: int) -> npt.NDArray[Any]:
    """Where the greatest are, ascending; the first ones of equals, and no zeros."""
    limit = np.partition(distance, len(distance) - count)[len(distance) - count]
    above = np.flatnonzero(distance > limit)
    if limit == 0:
        return above
    equal = np.flatnonzero(distance == limit)[: count - len(above)]
    return np.sort(np.concatenate([above, equal]))
