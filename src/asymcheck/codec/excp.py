"""ExCP: what is kept of a residual and of the moments beside it, as labels of 15 centres.

Of a tensor with Adam's moments, W with m and v, and of Ŵ, what a decoder holds from the checkpoint
before:

* a residual W - Ŵ is kept where |W - Ŵ| > c · median(|W - Ŵ|), c = min(2.5, α / sqrt(mean(v)));
* m and v are kept where |m| > β · mean(|m|) and the residual was; α = 5e-5, β = 2;
* what is kept is clustered by k-means on a line, 15 centres for each chunk of each of the three,
  and stored as a label of 4 bits; label 0 is what was not kept.

A residual that was not kept leaves the element at Ŵ, a moment becomes zero. Li et al., "ExCP:
Extreme LLM Checkpoint Compression via Weight-Momentum Joint Shrinking", ICML 2024, with the
statistics of a whole tensor, as in the authors' scripts.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from asymcheck.codec.codec import Encoding, Malformed, base_of
from asymcheck.codec.floats import FLOATS, Floats, bytes_of, mean_of, narrow, widen
from asymcheck.codec.lossless import read_last, read_section, write_section
from asymcheck.errors import OptionError

ALPHA, GREATEST_FACTOR, BETA = 5e-5, 2.5, 2.0
BITS = 4
CENTRES = (1 << BITS) - 1
SAMPLE = 1 << 13
"""Values that the centres are fitted to, evenly spaced among those of a chunk."""

Mask = npt.NDArray[np.bool_]
Labels = npt.NDArray[np.uint8]


# --- what is kept ------------------------------------------------------------


def weight_threshold(median: float, mean_square: float) -> float:
    """What the magnitude of a residual must exceed to be kept.

    Args:
        median: Of the magnitudes of the tensor's residual.
        mean_square: Mean of its second moments, from 0 on.
    """
    factor = ALPHA / math.sqrt(mean_square) if mean_square > 0 else math.inf
    return min(GREATEST_FACTOR, factor) * median


def moment_threshold(mean_magnitude: float) -> float:
    """What the magnitude of a first moment must exceed to be kept, with the second one.

    Args:
        mean_magnitude: Mean magnitude of the tensor's first moments.
    """
    return BETA * mean_magnitude


def is_above(values: Floats, threshold: float) -> Mask:
    """Where magnitudes exceed a threshold."""
    found: Mask = np.abs(values) > threshold
    return found


def median_of(parts: Callable[[], Iterable[Floats]], width: int) -> float:
    """The median of the magnitudes of a tensor; of an even number of them the lower middle one.

    Takes memory in proportion to a part: each pass over the parts settles 16 bits of the result.

    Args:
        parts: Gives the values anew at each call: at least one, all finite.
        width: Bytes of each, 4 or 8.
    """
    found, rank = 0, 0
    for shift in range(8 * width - 16, -1, -16):
        counts = np.zeros(1 << 16, "i8")
        for part in parts():
            bits = np.abs(part).view(f"<u{width}")
            if rank:
                bits = bits[bits >> (shift + 16) == found]
            digits = (bits >> shift).astype("i8") & 0xFFFF
            counts += np.bincount(digits, minlength=1 << 16)
        sums = np.cumsum(counts)
        rank = rank or (int(sums[-1]) + 1) // 2  # counted from 1
        digit = int(np.searchsorted(sums, rank))
        rank -= int(sums[digit - 1]) if digit else 0
        found = found << 16 | digit
    return float(np.array([found], f"<u{width}").view(f"<f{width}")[0])


# --- labels ------------------------------------------------------------------


@functools.cache
def _library() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Seeding and refinement of k-means. scikit-learn's own class would warn of empty clusters,
    and add in several threads, so that stored bytes depend on which of them is first.
    """
    try:
        seeding = importlib.import_module("sklearn.cluster").kmeans_plusplus
        return seeding, importlib.import_module("scipy.cluster.vq").kmeans
    except ImportError as failure:
        raise OptionError(
            f"ExCP needs scikit-learn, which cannot be imported ({failure}): "
            f"pip install 'asymcheck[excp]'"
        ) from failure


def fit_centres(values: Floats) -> Floats:
    """At most 15 values, ascending, that lie near all of ``values``, by k-means.

    Where no more than 15 different ones are there, these themselves. The same values give the
    same centres.

    Args:
        values: Finite, not zero, of ``float32`` or ``float64``.

    Raises:
        OptionError: scikit-learn is missing.
    """
    sample = _spread(values)
    if len(np.unique(sample)) <= CENTRES:
        sample = np.unique(values)
        if len(sample) <= CENTRES:
            return sample
        sample = _spread(sample)
    seed, refine = _library()
    scale = float(np.abs(sample).max())  # squares of second moments are no normal numbers
    points = (sample.astype("f8") / scale).reshape(-1, 1)
    centres, _ = refine(points, seed(points, CENTRES, random_state=0)[0])
    return np.unique((centres[:, 0] * scale).astype(values.dtype))


def _spread(values: Floats) -> Floats:
    return values[:: -(-len(values) // SAMPLE) or 1]


def nearest_labels(values: Floats, centres: Floats) -> Labels:
    """For each value 1 more than the place of the nearest centre, of two as near the lower one.

    Args:
        values: Any number of them.
        centres: At least one, ascending.
    """
    wide = centres.astype("f8")
    with np.errstate(over="ignore"):
        limits = wide[:-1] / 2 + wide[1:] / 2
    return (np.searchsorted(limits, values) + 1).astype("u1")


def pack(labels: Labels) -> Labels:
    """Two labels a byte, the first in the lower half."""
    packed = labels[::2].copy()
    packed[: len(labels) // 2] |= labels[1::2] << BITS
    return packed


def unpack(packed: Labels, count: int) -> Labels:
    """Undo ``pack`` of ``count`` labels."""
    return np.stack([packed & CENTRES, packed >> BITS], 1).reshape(-1)[:count]


# --- as codecs ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stored:
    """A chunk as it is stored, and as a decoder will have it."""

    encoding: Encoding
    rebuilt: bytearray


@dataclass(frozen=True, slots=True)
class Clustered:
    """Floats, or their residuals to a base, as labels of at most 15 centres.

    Does not apply to another dtype, nor where anything is not finite. Stored are the number of
    the dtype, that of the centres, the centres and the labels, each of the last two compressed
    where that is smaller. Centres are ``float32`` (``float64`` of that dtype).

    Attributes:
        part: ``residual`` is added to a base, which may have been stored like this itself;
            ``moment`` stands for itself.
    """

    part: Literal["residual", "moment"]
    lossless: bool = False
    needs_base: bool = field(init=False)
    chains: bool = field(init=False)
    name: str = field(init=False)
    label: str = field(init=False)

    def __post_init__(self) -> None:
        for attribute in ("name", "label"):
            object.__setattr__(self, attribute, f"excp-{self.part}")
        for attribute in ("needs_base", "chains"):
            object.__setattr__(self, attribute, self.part == "residual")

    def encode(self, raw: memoryview, dtype: str, base: memoryview | None) -> Encoding | None:
        """See ``Codec``. Everything that is not zero is kept."""
        stored = self.store(raw, dtype, base)
        return None if stored is None else stored.encoding

    def store(
        self, raw: memoryview, dtype: str, base: memoryview | None, kept: Mask | None = None
    ) -> Stored | None:
        """As ``encode``, with a choice of what is kept. Takes memory for four times ``raw``.

        Args:
            raw: See ``Codec``.
            dtype: See ``Codec``.
            base: See ``Codec``.
            kept: Of each element whether it is; ``None`` keeps all.

        Raises:
            OptionError: scikit-learn is missing.
        """
        kind = FLOATS.get(dtype)
        if kind is None or len(raw) % kind.width:
            return None
        values = widen(raw, dtype)
        if self.needs_base:
            if base is None or len(base) != len(raw):
                return None
            values = residual_of(raw, base, dtype)
        if not np.isfinite(values).all():
            return None
        places = np.flatnonzero(values if kept is None else (values != 0) & kept)
        found = values[places]
        labels = np.zeros(len(values), "u1")
        centres = fit_centres(found) if len(found) else found
        if len(found):
            labels[places] = nearest_labels(found, centres)
        data = b"".join(
            (
                bytes((kind.code, len(centres))),
                *write_section(bytes_of(centres), centres.itemsize, "zstd1+shuffle"),
                *write_section(bytes_of(pack(labels)), 1, "zstd1+shuffle"),
            )
        )
        if len(data) >= len(raw):
            return None
        rebuilt = bytearray(len(raw))
        self.decode(memoryview(data), memoryview(rebuilt), base)
        errors = residual_of(raw, memoryview(rebuilt), dtype)
        np.abs(errors, out=errors)
        return Stored(Encoding(data, float(errors.max()), mean_of(errors)), rebuilt)

    def decode(self, stored: memoryview, into: memoryview, base: memoryview | None) -> None:
        """See ``Codec``."""
        base = base_of(base, into, self.name) if self.needs_base else None
        code, count = stored[:2] if len(stored) >= 2 else (0, 0)
        dtype = next((name for name, kind in FLOATS.items() if kind.code == code), None)
        if dtype is None or len(into) % FLOATS[dtype].width or count > CENTRES:
            raise Malformed(
                f"{self.name}: {len(into)} bytes of a dtype of number {code}, {count} centres"
            )
        kind = FLOATS[dtype]
        centres = np.empty(count, kind.work)
        packed = np.empty(-(-len(into) // kind.width // 2), "u1")
        rest = read_section(stored[2:], bytes_of(centres), centres.itemsize, self.name)
        read_last(read_section(rest, bytes_of(packed), 1, self.name), self.name)
        labels = unpack(packed, len(into) // kind.width)
        if not np.isfinite(centres).all() or labels.max() > count:
            raise Malformed(f"{self.name}: expected labels of {count} finite centres")
        into[:] = bytes(len(into)) if base is None else base
        out = np.frombuffer(into, f"<u{kind.width}")
        places = np.flatnonzero(labels)
        values = centres[labels[places] - 1]
        if base is not None:
            with np.errstate(over="ignore", invalid="ignore"):
                values = values + widen(bytes_of(out[places]), dtype)
        np.clip(values, -kind.greatest, kind.greatest, out=values)
        out[places] = narrow(values, dtype).view(out.dtype)


def residual_of(raw: memoryview, base: memoryview, dtype: str) -> Floats:
    """``raw - base`` in the type that ``dtype`` is computed in; infinite where it is too large."""
    with np.errstate(over="ignore", invalid="ignore"):
        found: Floats = widen(raw, dtype) - widen(base, dtype)
    return found
