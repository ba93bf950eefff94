"""Where the leaves of a state lie in the image: worked out once, kept from save to save."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from asymcheck.capture import (
    CANARY_TURNS,
    Canary,
    dump_canaries,
    dump_geometry,
    place_canary,
)
from asymcheck.device.leaves import Collector, Source, Spec
from asymcheck.garbage import put_off
from asymcheck.planning.layout import Extent, Layout, lay_out
from asymcheck.storage.index import Leaf

Spots = np.ndarray[tuple[int], np.dtype[np.intp]]


@dataclass(frozen=True)
class Placement:
    """Where leaves lie, whatever their values are: the same from save to save.

    Attributes:
        specs: What the leaves are, ascending in the image.
        leaves: What the index says of them, in the same order.
        extents: Where they lie, in the same order.
        layout: The whole.
    """

    specs: tuple[Spec, ...]
    leaves: tuple[Leaf, ...]
    extents: tuple[Extent, ...]
    layout: Layout

    @cached_property
    def lazy(self) -> tuple[int, ...]:
        """Which leaves are lazy."""
        return tuple(i for i, s in enumerate(self.specs) if s.lazy)

    @cached_property
    def elsewhere(self) -> tuple[int, ...]:
        """Which eager leaves may lie on a device, or must be converted."""
        return tuple(i for i, s in enumerate(self.specs) if not (s.lazy or s.plain))

    @cached_property
    def plain_eager(self) -> tuple[tuple[int, int, int], ...]:
        """Of each eager leaf that is memory as it is: position, offset in the image, size."""
        rows = enumerate(zip(self.specs, self.extents, strict=True))
        return tuple(
            (i, e.start, s.nbytes) for i, (s, e) in rows if s.plain and not s.lazy and s.nbytes
        )

    @cached_property
    def gaps(self) -> tuple[Extent, ...]:
        """What of the image up to its last leaf belongs to none."""
        found, at = [], 0
        for extent in self.extents:
            if extent.nbytes and extent.start > at:
                found.append(Extent(at, extent.start))
            at = max(at, extent.stop)
        return tuple(found)

    @cached_property
    def eager_bytes(self) -> int:
        """Bytes that are copied at the boundary."""
        return sum(s.nbytes for s in self.specs if not s.lazy)

    @cached_property
    def lazy_bytes(self) -> int:
        """Bytes that are copied behind the training."""
        return sum(s.nbytes for s in self.specs if s.lazy)

    @cached_property
    def geometry(self) -> str:
        """What a description of a capture says of the leaves."""
        return dump_geometry(self.leaves, self.layout.chunks, self.kinds)

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """Kind of each leaf."""
        return tuple(s.kind for s in self.specs)


@dataclass(frozen=True)
class Watched:
    """The canaries of one turn, which moves them.

    Attributes:
        canaries: For each lazy leaf.
        spots: Of every byte of them, its offset in its leaf.
        geometry: What a description of a capture says of them.
    """

    canaries: tuple[Canary, ...]
    spots: Spots
    geometry: str

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all canary values."""
        return sum(c.nbytes for c in self.canaries)


@dataclass(frozen=True)
class Placed:
    """Leaves with a place in the image.

    Attributes:
        at: Their places.
        watched: Their canaries.
        sources: The leaves as they are now, ascending in the image.
    """

    at: Placement
    watched: Watched
    sources: tuple[Source, ...]

    @property
    def geometry(self) -> str:
        """The part of the description of a capture that comes again from save to save."""
        return f"{self.at.geometry},{self.watched.geometry}"


class Placer:
    """Decides where each leaf lies, and keeps what it decided for leaves of the same kind."""

    def __init__(self) -> None:
        self._specs: list[Spec] = []
        self._order: list[int] = []
        self._at = _placement(lay_out([]), [], [])
        self._turns: dict[int, Watched] = {}

    @put_off()
    def place(self, collected: Collector, turn: int) -> Placed:
        """Give the leaves their places.

        Args:
            collected: The leaves.
            turn: Counts the captures; moves the canaries.
        """
        sources = collected.sources
        specs = [s.spec for s in sources]
        if specs != self._specs:
            layout = lay_out([s.nbytes for s in specs])
            places = [(e.start, e.stop) for e in layout.leaves]
            self._order = sorted(range(len(specs)), key=places.__getitem__)
            self._at = _placement(layout, self._order, specs)
            self._specs, self._turns = specs, {}
        turn %= CANARY_TURNS
        if turn not in self._turns:
            self._turns[turn] = _watched(self._at, turn)
        return Placed(self._at, self._turns[turn], tuple([sources[i] for i in self._order]))


def _placement(layout: Layout, order: list[int], specs: list[Spec]) -> Placement:
    ordered = tuple([specs[i] for i in order])
    extents = tuple([layout.leaves[i] for i in order])
    leaves = tuple(
        Leaf(s.key, s.dtype, s.shape, e.start, s.nbytes, s.order, s.piece)
        for s, e in zip(ordered, extents, strict=True)
    )
    return Placement(ordered, leaves, extents, layout)


def _watched(at: Placement, turn: int) -> Watched:
    canaries = tuple(
        place_canary(i, e.start, s.nbytes, s.itemsize, turn)
        for i, (s, e) in enumerate(zip(at.specs, at.extents, strict=True))
        if s.lazy
    )
    spots = [
        (
            c.first
            - at.extents[c.leaf].start
            + np.add.outer(np.arange(c.count) * c.stride, range(c.width))
        ).ravel()
        for c in canaries
    ]
    return Watched(
        canaries, np.concatenate([np.zeros(0, np.intp), *spots]), dump_canaries(canaries)
    )


NOTHING = Placer().place(Collector(), 0)
