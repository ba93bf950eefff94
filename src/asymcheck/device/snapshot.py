"""Copying the state out into one image."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from asymcheck.device.leaves import Collector
from asymcheck.planning.layout import Extent, Layout, lay_out
from asymcheck.storage.index import Leaf


@dataclass(frozen=True)
class Placed:
    """Leaves with a place in the image.

    Attributes:
        leaves: Ascending in the image.
        layout: Where each source lies, in the collector's order.
    """

    leaves: tuple[Leaf, ...]
    layout: Layout


def place(collected: Collector) -> Placed:
    """Decide where each leaf lies."""
    layout = lay_out([s.nbytes for s in collected.sources])
    leaves = [
        Leaf(s.key, s.dtype, s.shape, extent.start, s.nbytes, s.order)
        for s, extent in zip(collected.sources, layout.leaves, strict=True)
    ]
    return Placed(tuple(sorted(leaves, key=lambda leaf: (leaf.at, leaf.stop))), layout)


def copy_all(collected: Collector, placed: Placed, into: memoryview) -> None:
    """Copy every leaf into the image; blocks until all bytes are there.

    Args:
        collected: The leaves.
        placed: Their places.
        into: At least ``placed.layout.image_bytes`` long; bytes between leaves become zero.
    """
    image = np.frombuffer(into, np.uint8)
    _zero_gaps(placed.layout, image)
    for source, extent in zip(collected.sources, placed.layout.leaves, strict=True):
        if extent.nbytes:
            source.copy_out(image[extent.start : extent.stop])


def _zero_gaps(layout: Layout, image: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
    at = 0
    for extent in sorted((e for e in layout.leaves if e.nbytes), key=lambda e: e.start):
        if extent.start > at:
            image[at : extent.start] = 0
        at = extent.stop
    assert at <= layout.image_bytes, Extent(at, layout.image_bytes)
