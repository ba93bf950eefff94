"""The difference to a key-frame, lossless: subtract as integers, zigzag, compress."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from asymcheck.codec.codec import Encoding, base_of, width_of
from asymcheck.codec.lossless import PIECE_BYTES, Setting, read_pieces, write_pieces


@dataclass(frozen=True, slots=True)
class Delta:
    """``zigzag(raw - base)`` as wrapping integers of the width of the dtype, then blosc2.

    Two floats that are near are near as integers too, whatever the exponent, so the upper
    bytes of the difference are mostly zero; zigzag, ``(d << 1) ^ (d >> (w - 1))``, makes
    them so for both signs. Every pattern of bits comes back, those of NaN included. The base
    is a key-frame, never another difference.
    """

    setting: Setting
    name: str = "delta"
    lossless: bool = True
    needs_base: bool = True
    chains: bool = False
    label: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "label", f"delta+{self.setting}")

    def encode(self, raw: memoryview, dtype: str, base: memoryview | None) -> Encoding | None:
        """See ``Codec``. Applies to every dtype."""
        if base is None or len(base) != len(raw):
            return None
        width = width_of(dtype, len(raw))
        data = write_pieces(_differences(raw, base, width), len(raw), width, self.setting)
        return None if data is None else Encoding(data)

    def decode(self, stored: memoryview, into: memoryview, base: memoryview | None) -> None:
        """See ``Codec``."""
        base = base_of(base, into, self.name)
        width = read_pieces(stored, into, self.name)
        whole, old = np.frombuffer(into, f"<i{width}"), np.frombuffer(base, f"<i{width}")
        step = PIECE_BYTES // width
        for at in range(0, len(whole), step):
            out = whole[at : at + step]
            sign = -(out & 1)
            bits = out.view(f"<u{width}")
            np.right_shift(bits, 1, out=bits)
            np.bitwise_xor(out, sign, out=out)
            np.add(out, old[at : at + step], out=out)


def _differences(raw: memoryview, base: memoryview, width: int) -> Iterator[memoryview]:
    """The pieces of ``zigzag(raw - base)``; all of them in the same memory."""
    new, old = np.frombuffer(raw, f"<i{width}"), np.frombuffer(base, f"<i{width}")
    step = PIECE_BYTES // width
    difference, sign = np.empty((2, min(step, len(new))), new.dtype)
    for at in range(0, len(new), step):
        size = min(step, len(new) - at)
        out, negative = difference[:size], sign[:size]
        np.subtract(new[at : at + size], old[at : at + size], out=out)
        np.right_shift(out, 8 * width - 1, out=negative)
        np.left_shift(out, 1, out=out)
        np.bitwise_xor(out, negative, out=out)
        yield out.data.cast("B")
