"""What each chunk of a capture is, and the bytes that differences are made to."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from asymcheck.capture import Capture
from asymcheck.planning.layout import Extent
from asymcheck.planning.retention import CheckpointId
from asymcheck.storage.index import Leaf


class Group(NamedTuple):
    """Leaves that encode alike."""

    kind: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.kind or 'other'} {self.dtype}".strip()


class Place(NamedTuple):
    """Which part of which leaf a chunk is; no key where it is parts of several."""

    group: Group = Group("", "")
    key: str = ""
    offset: int = 0
    form: tuple[object, ...] = ()

    @classmethod
    def of(cls, leaf: Leaf, kind: str, chunk: Extent) -> Place:
        """A chunk of that leaf."""
        dtype = "" if ":" in leaf.dtype else leaf.dtype
        form = (leaf.dtype, leaf.shape, leaf.order)
        return cls(Group(kind, dtype), leaf.key, chunk.start - leaf.at, form)


@dataclass
class Reference:
    """What a decoder has of the checkpoint that differences are made to.

    Attributes:
        at: The checkpoint, once it is committed.
        pieces: Form of the leaf and bytes of each chunk, by leaf and offset in it.
    """

    at: CheckpointId | None = None
    pieces: dict[tuple[str, int], tuple[tuple[object, ...], bytearray]] = field(
        default_factory=dict
    )

    def begin(self, places: Iterable[Place]) -> None:
        """Another one is made: forget what is not part of it."""
        wanted = {(place.key, place.offset) for place in places}
        self.pieces = {name: piece for name, piece in self.pieces.items() if name in wanted}

    def find(self, place: Place, nbytes: int) -> memoryview | None:
        """The same bytes of the same leaf, where the leaf is still of that form."""
        form, piece = self.pieces.get((place.key, place.offset), ((), bytearray()))
        fits = self.at is not None and form == place.form and len(piece) == nbytes
        return memoryview(piece) if fits else None

    def keep(self, place: Place, raw: memoryview) -> None:
        """Take a copy, into the memory of the one before where it fits."""
        _, piece = self.pieces.get((place.key, place.offset), ((), bytearray()))
        if len(piece) != len(raw):
            piece = bytearray(len(raw))
        piece[:] = raw
        self.pieces[place.key, place.offset] = (place.form, piece)


def places_of(capture: Capture) -> dict[Extent, Place]:
    """What each chunk is: a part of one leaf, or several leaves."""
    kinds = capture.kinds or ("",) * len(capture.leaves)
    leaves = [(x, kind) for x, kind in zip(capture.leaves, kinds, strict=True) if x.nbytes]
    starts = [leaf.at for leaf, _ in leaves]
    places = {}
    for chunk in capture.chunks:
        i = bisect_right(starts, chunk.start) - 1
        places[chunk] = Place()
        if i >= 0 and chunk.stop <= leaves[i][0].stop:
            places[chunk] = Place.of(*leaves[i], chunk)
    return places
