"""Parameters with Adam's moments, encoded together as ExCP does: see ``codec.excp``.

What is kept of a parameter's moments depends on the parameter, and the other way round. So the
first chunk of any of the three leaves looks at all of them, and leaves a bit an element behind.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from asymcheck.capture import Capture
from asymcheck.chunking import Place, Reference
from asymcheck.codec import excp
from asymcheck.codec.codec import Encoding
from asymcheck.codec.floats import FLOATS, Floats, widen
from asymcheck.planning.layout import Extent
from asymcheck.storage.index import Leaf

RESIDUAL, MOMENT = excp.Clustered("residual"), excp.Clustered("moment")

_Role = Literal["weight", "exp_avg", "exp_avg_sq"]


@dataclass(frozen=True, slots=True)
class _Part:
    """One of the three leaves, and its chunks, which hold nothing else."""

    leaf: Leaf
    chunks: tuple[tuple[Extent, Place], ...]

    @property
    def width(self) -> int:
        return FLOATS[self.leaf.dtype].width

    def values(self, image: memoryview, first: int, count: int) -> Floats:
        """Some of the elements."""
        start = self.leaf.at + first * self.width
        return widen(image[start : start + count * self.width], self.leaf.dtype)

    def each(self, image: memoryview) -> Iterator[Floats]:
        """All elements, chunk by chunk."""
        for extent, _ in self.chunks:
            yield widen(image[extent.start : extent.stop], self.leaf.dtype)


class Joint:
    """One parameter with its moments, in one checkpoint; several threads may encode its chunks.

    Args:
        weight: The parameter.
        exp_avg: Its first moments, of the same elements.
        exp_avg_sq: Its second moments.
        reference: What a decoder has of the checkpoint before. Each chunk of the parameter that
            is encoded takes the place of the one in it.
    """

    def __init__(
        self, weight: _Part, exp_avg: _Part, exp_avg_sq: _Part, reference: Reference
    ) -> None:
        self._parts: dict[_Role, _Part] = {
            "weight": weight,
            "exp_avg": exp_avg,
            "exp_avg_sq": exp_avg_sq,
        }
        self._roles: dict[str, _Role] = {part.leaf.key: r for r, part in self._parts.items()}
        self._reference = reference
        self._lock = threading.Lock()
        self._looked = False
        self._kept: excp.Labels | None = None  # a bit an element
        self._moment_threshold = 0.0

    @property
    def keys(self) -> tuple[str, ...]:
        """Of the three leaves; that of the parameter first."""
        return tuple(self._roles)

    @property
    def weights(self) -> tuple[Place, ...]:
        """The chunks of the parameter."""
        return tuple(place for _, place in self._parts["weight"].chunks)

    @property
    def reads_to(self) -> int:
        """How far the image must be complete before any of its chunks can be encoded."""
        return max(part.leaf.stop for part in self._parts.values())

    @property
    def has_reference(self) -> bool:
        """Whether there is something to make residuals to."""
        chunks = self._parts["weight"].chunks
        return all(self._reference.find(place, extent.nbytes) for extent, place in chunks)

    def label_of(self, key: str) -> str:
        """Of the codec of the chunks of one of the leaves."""
        return (RESIDUAL if self._roles[key] == "weight" else MOMENT).label

    def encode(self, extent: Extent, place: Place, image: memoryview) -> Encoding | None:
        """A chunk of one of the leaves. The first call looks at all of the three; others wait.

        Args:
            extent: The chunk.
            place: What it is.
            image: Complete up to ``reads_to``.

        Returns:
            ``None`` where it must be stored as it is: something of the three is not finite, or
            this chunk would not become smaller.

        Raises:
            OptionError: scikit-learn is missing.
        """
        with self._lock:
            if not self._looked:
                self._look(image)
                self._looked = True
        if self._kept is None:
            return None
        raw, role = image[extent.start : extent.stop], self._roles[place.key]
        part = self._parts[role]
        first, count = place.offset // part.width, extent.nbytes // part.width
        bits = self._kept[first // 8 :]  # chunks begin at a multiple of 8 elements
        kept = np.unpackbits(bits[: -(-count // 8)], count=count).view(np.bool_)
        if role == "weight":
            base = self._reference.find(place, extent.nbytes)
            stored = RESIDUAL.store(raw, part.leaf.dtype, base, kept)
            if stored is not None and base is not None:
                base[:] = stored.rebuilt
        else:
            moments = self._parts["exp_avg"].values(image, first, count)
            kept &= excp.is_above(moments, self._moment_threshold)
            stored = MOMENT.store(raw, part.leaf.dtype, None, kept)
        return None if stored is None else stored.encoding

    def _look(self, image: memoryview) -> None:
        """Thresholds of the whole tensor, and which residuals exceed theirs."""
        count = math.prod(self._parts["weight"].leaf.shape)
        with np.errstate(over="ignore", invalid="ignore"):
            magnitudes = (np.abs(x) for x in self._parts["exp_avg"].each(image))
            magnitude = sum(float(x.sum(dtype="f8")) for x in magnitudes) / count
            squares = self._parts["exp_avg_sq"].each(image)
            square = sum(float(x.sum(dtype="f8")) for x in squares) / count
        finite = all(np.isfinite(x).all() for x in self._residuals(image))
        if not (finite and math.isfinite(magnitude) and math.isfinite(square)):
            return
        width = np.dtype(FLOATS[self._parts["weight"].leaf.dtype].work).itemsize
        median = excp.median_of(lambda: self._residuals(image), width)
        threshold = excp.weight_threshold(median, square)
        self._moment_threshold = excp.moment_threshold(magnitude)
        self._kept = np.concatenate(
            [np.packbits(excp.is_above(x, threshold)) for x in self._residuals(image)]
        )

    def _residuals(self, image: memoryview) -> Iterator[Floats]:
        part = self._parts["weight"]
        for extent, place in part.chunks:
            base = self._reference.find(place, extent.nbytes)
            assert base is not None, "see has_reference"
            yield excp.residual_of(image[extent.start : extent.stop], base, part.leaf.dtype)


def joints_of(
    capture: Capture, places: Mapping[Extent, Place], reference: Reference
) -> list[Joint]:
    """The parameters of a capture that have both moments, as floats of the same shape.

    Args:
        capture: The capture.
        places: What its chunks are.
        reference: See ``Joint``.
    """
    chunks: dict[str, list[tuple[Extent, Place]]] = {}
    for extent, place in places.items():
        chunks.setdefault(place.key, []).append((extent, place))
    kinds = dict(zip((leaf.key for leaf in capture.leaves), capture.kinds, strict=False))
    parts = {
        leaf.key: _Part(leaf, tuple(chunks[leaf.key]))
        for leaf in capture.leaves
        if leaf.nbytes and leaf.dtype in FLOATS and leaf.key in chunks
    }
    found: dict[str, Joint] = {}
    for key, exp_avg in parts.items():
        # The state of an optimizer is item/state/parameter/entry.
        _, _, rest = key.partition("/state/")
        name, _, entry = rest.rpartition("/")
        weight = parts.get(capture.aliases.get(name, name))
        exp_avg_sq = parts.get(f"{key}_sq")
        if entry != "exp_avg" or weight is None or exp_avg_sq is None:
            continue
        three: tuple[_Part, ...] = (weight, exp_avg, exp_avg_sq)
        wanted: tuple[Any, ...] = ("parameter", "state/exp_avg", "state/exp_avg_sq")
        if (
            tuple(kinds.get(part.leaf.key) for part in three) == wanted
            and len({(part.leaf.shape, part.leaf.order) for part in three}) == 1
        ):
            found.setdefault(weight.leaf.key, Joint(weight, exp_avg, exp_avg_sq, reference))
    return list(found.values())
