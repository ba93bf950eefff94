"""Block quantization of optimizer moments to 8 or 4 bits, with a stated bound.

256 elements share one scale. Two laws:

* ``signed`` is linear, for first moments. With m the greatest magnitude of a block and
  L = 127 or 7: code c = round(x / m · L), x̂ = c / L · m.
* ``log`` is logarithmic, for second moments, which are not negative and span decades even in
  a block. Code 0 is zero; with N = 255 or 15, codes 1 to N are x̂ = 2 ** ((A + (c-1)·S) / 4096)
  with whole numbers A and S for each block. x̂ is a product of two entries of tables, so that
  every machine decodes the same bits. What is above zero stays above zero.

8-bit block-wise states are due to Dettmers et al., "8-bit Optimizers via Block-wise
Quantization", ICLR 2022; the laws here are not theirs, see ``docs/fidelity.md``.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from asymcheck.codec.codec import Encoding, Malformed
from asymcheck.codec.floats import FLOATS, Floats, FloatType, bytes_of, mean_of, narrow, widen
from asymcheck.codec.lossless import read_last, read_section, write_section

BLOCK = 256
"""Elements that share a scale."""

_PIECE = 256 * BLOCK  # worked on at a time, to stay in the cache of a core
_OCTAVE = 4096  # what A and S of the logarithmic law count in

_Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Quantized:
    """Floats of one dtype as codes of 8 or 4 bits and a scale for every 256 of them.

    Does not apply to another dtype, to NaN and infinities, and ``log`` not to anything below
    zero. The sign of a zero is lost. Stored are the number of the dtype, the scales, and the
    codes, each of the last two compressed where that is smaller.

    Attributes:
        law: See the module.
        bits: Of a code.
    """

    law: Literal["signed", "log"]
    bits: Literal[8, 4]
    lossless: bool = False
    needs_base: bool = False
    chains: bool = False
    name: str = field(init=False)
    label: str = field(init=False)

    def __post_init__(self) -> None:
        for attribute in ("name", "label"):
            object.__setattr__(self, attribute, f"q{self.bits}-{self.law}")

    def encode(self, raw: memoryview, dtype: str, base: memoryview | None) -> Encoding | None:
        """See ``Codec``. Takes memory for as many bytes again as ``raw`` has."""
        kind = FLOATS.get(dtype)
        if kind is None or len(raw) % kind.width:
            return None
        values = widen(raw, dtype)
        with np.errstate(invalid="ignore"):
            low, high = float(values.min()), float(values.max())  # NaN is in both
        if not (math.isfinite(low) and math.isfinite(high)) or (self.law == "log" and low < 0):
            return None
        scales, codes, worst, mean = [], [], 0.0, 0.0
        for start in range(0, len(values), _PIECE):
            piece = values[start : start + _PIECE]
            blocks = np.zeros((-(-len(piece) // BLOCK), BLOCK), kind.work)
            blocks.reshape(-1)[: len(piece)] = piece
            scale, code = (_signed if self.law == "signed" else _log)(blocks, self._top)
            error = self._values(scale, code, kind).reshape(-1)[: len(piece)]
            error = widen(bytes_of(narrow(error, dtype)), dtype) - piece
            np.abs(error, out=error)
            worst = max(worst, float(error.max()))
            mean += mean_of(error) * (len(piece) / len(values))
            scales.append(scale)
            codes.append(self._pack(code.reshape(-1)[: len(piece)]))
        parts: list[bytes | memoryview] = [bytes((kind.code,))]
        for arrays, width in ((scales, _scale(self.law, kind).itemsize), (codes, 1)):
            parts += write_section(bytes_of(np.concatenate(arrays)), width, "zstd1+shuffle")
        data = b"".join(parts)
        return Encoding(data, worst, mean) if len(data) < len(raw) else None

    def decode(self, stored: memoryview, into: memoryview, base: memoryview | None) -> None:
        """See ``Codec``."""
        code = stored[0] if len(stored) else 0
        dtype = next((name for name, kind in FLOATS.items() if kind.code == code), None)
        if dtype is None or len(into) % FLOATS[dtype].width:
            raise Malformed(f"{self.name}: {len(into)} bytes of a dtype of number {code}")
        kind = FLOATS[dtype]
        count = len(into) // kind.width
        scale_type = _scale(self.law, kind)
        columns = 1 if self.law == "signed" else 2
        scales = np.empty((-(-count // BLOCK), columns), scale_type)
        codes = np.empty(-(-count * self.bits // 8), "u1")
        rest = read_section(stored[1:], bytes_of(scales), scale_type.itemsize, self.name)
        read_last(read_section(rest, bytes_of(codes), 1, self.name), self.name)
        if not _are_scales(scales, self._top, kind):
            raise Malformed(f"{self.name}: expected scales, found something else")
        out = np.frombuffer(into, f"<u{kind.width}")
        for start in range(0, count, _PIECE):
            size = min(_PIECE, count - start)
            first = start * self.bits // 8
            found = self._unpack(codes[first : first + -(-size * self.bits // 8)], size)
            if self.law == "signed" and found.max() > 2 * self._top:
                raise Malformed(f"{self.name}: a code above {2 * self._top}")
            blocks = np.zeros((-(-size // BLOCK), BLOCK), "u1")
            blocks.reshape(-1)[:size] = found
            scale = scales[start // BLOCK :][: len(blocks)]
            values = self._values(scale, blocks, kind).reshape(-1)[:size]
            out[start : start + size] = narrow(values, dtype).view(out.dtype)

    def bound(self, raw: memoryview, dtype: str) -> npt.NDArray[np.float64]:
        """What ``|x - x̂|`` of each element is at most; the formulas of ``docs/fidelity.md``.

        Args:
            raw: Something that ``encode`` applies to.
            dtype: Torch's name of its dtype.
        """
        kind = FLOATS[dtype]
        values = np.abs(widen(raw, dtype).astype("f8"))
        blocks = np.zeros((-(-len(values) // BLOCK), BLOCK))
        blocks.reshape(-1)[: len(values)] = values
        greatest = blocks.max(1, keepdims=True)
        if self.law == "signed":
            bounds = greatest * (0.5 / self._top + 4 * kind.roundoff) + kind.least
        else:
            least = np.where(blocks > 0, blocks, np.inf).min(1, keepdims=True)
            with np.errstate(all="ignore"):
                octaves = np.where(greatest > 0, np.log2(greatest) - np.log2(least), 0)
                step = octaves / (2 * (self._top - 1)) + 2 / _OCTAVE
                bounds = blocks * (np.exp2(step) - 1 + 4 * kind.roundoff) + kind.least
        return np.broadcast_to(bounds, blocks.shape).reshape(-1)[: len(values)]

    @property
    def _top(self) -> int:
        """L of the signed law, N of the logarithmic one."""
        whole: int = (1 << self.bits) - 1
        return whole // 2 if self.law == "signed" else whole

    def _values(self, scales: _Array, codes: _Array, kind: FloatType) -> Floats:
        """x̂ in ``work``, for codes ``[blocks, 256]``."""
        if self.law == "signed":
            steps = np.arange(-self._top, self._top + 1).astype(kind.work) / self._top
            found: Floats = steps.astype(kind.work)[codes] * scales
            return found
        roots, powers, first = _powers(kind.work)
        begin, step = scales[:, :1], scales[:, 1:]
        at = codes.astype("<i4")
        at -= 1
        at *= step
        at += begin
        at -= first * _OCTAVE
        np.clip(at, 0, len(powers) * _OCTAVE - 1, out=at)
        found = roots[at & (_OCTAVE - 1)]
        found *= powers[at >> (_OCTAVE.bit_length() - 1)]
        np.clip(found, kind.least, kind.greatest, out=found)
        found[codes == 0] = 0
        return found

    def _pack(self, codes: _Array) -> _Array:
        if self.bits == 8:
            return codes
        packed = codes[::2].copy()
        packed[: len(codes) // 2] |= codes[1::2] << 4
        return packed

    def _unpack(self, packed: _Array, count: int) -> _Array:
        if self.bits == 8:
            return packed
        return np.stack([packed & 15, packed >> 4], 1).reshape(-1)[:count]


def _scale(law: str, kind: FloatType) -> np.dtype[Any]:
    return np.dtype(kind.work if law == "signed" else "<i4")


def _are_scales(scales: _Array, top: int, kind: FloatType) -> bool:
    if scales.shape[1] == 1:
        return bool(((scales >= 0) & (scales <= kind.greatest)).all())
    _, powers, first = _powers(kind.work)
    begin, step = scales.T.astype("i8")
    inside = (begin >= first * _OCTAVE) & (step > 0)
    # Rounding up S may lead a little beyond the greatest value, never by as much as an octave.
    inside &= begin + (top - 1) * step < (first + len(powers) + 1) * _OCTAVE
    return bool(inside.all())


def _signed(blocks: Floats, top: int) -> tuple[_Array, _Array]:
    """Scales ``[blocks, 1]`` and codes from 0 to 2·top; ``blocks`` is used up."""
    greatest = np.maximum(blocks.max(1, keepdims=True), -blocks.min(1, keepdims=True))
    blocks /= np.where(greatest > 0, greatest, 1)
    blocks *= top
    np.rint(blocks, out=blocks)
    blocks += top
    return greatest, blocks.astype("u1")


def _log(blocks: Floats, top: int) -> tuple[_Array, _Array]:
    """A and S ``[blocks, 2]`` and codes from 0 to top; ``blocks`` is used up."""
    zero = blocks <= 0
    blocks[zero] = 1
    np.log(blocks, out=blocks)
    blocks *= _OCTAVE / math.log(2)
    blocks[zero] = np.inf
    least = np.floor(blocks.min(1, keepdims=True).astype("f8"))
    blocks[zero] = -np.inf
    greatest = blocks.max(1, keepdims=True).astype("f8")
    empty = zero.all(1, keepdims=True)
    least[empty], greatest[empty] = 0, 0
    step = np.maximum(np.ceil((greatest - least) / (top - 1)), 1)
    blocks -= least.astype(blocks.dtype)
    blocks /= step.astype(blocks.dtype)
    np.rint(blocks, out=blocks)
    np.clip(blocks, 0, top - 1, out=blocks)
    blocks += 1
    blocks[zero] = 0
    return np.concatenate([least, step], 1).astype("<i4"), blocks.astype("u1")


@functools.cache
def _powers(work: str) -> tuple[Floats, Floats, int]:
    """2 ** (i / 4096) for i below 4096; the powers of two of the type; the first exponent.

    Square roots and products are rounded the same way by every machine; powers are not.
    """
    roots, factor = np.ones(1), 2.0
    for _ in range(_OCTAVE.bit_length() - 1):
        factor = math.sqrt(factor)
        roots = np.stack([roots, roots * factor], 1).reshape(-1)
    limits = np.finfo(work)
    first = int(limits.minexp) - int(limits.nmant)
    exponents = range(first, int(limits.maxexp))
    powers = np.array([math.ldexp(1.0, e) for e in exponents])
    return roots.astype(work), powers.astype(work), first
