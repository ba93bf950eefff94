"""What a slot holds: written by the trainer, read by whoever persists it. No torch."""

from __future__ import annotations

import json
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from asymcheck.errors import CorruptCheckpoint, DroppedCheckpoint
from asymcheck.planning.layout import Extent
from asymcheck.planning.pieces import Piece
from asymcheck.planning.retention import CheckpointId
from asymcheck.storage.index import Leaf
from asymcheck.storage.sealed import HASH, digest, seal, seal_text, unseal

CANARIES_PER_LEAF = 16
CANARY_TURNS = CANARIES_PER_LEAF // 2
"""After so many captures canaries are where they were."""


@dataclass(frozen=True, slots=True)
class Canary:
    """Spots of one leaf that are compared.

    Attributes:
        leaf: Position in the leaves.
        first: Offset of the first spot in the image.
        stride: Distance of the spots, in bytes.
        count: How many.
        width: Bytes of each.
    """

    leaf: int
    first: int
    stride: int
    count: int
    width: int

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return self.count * self.width


def place_canary(leaf: int, at: int, nbytes: int, itemsize: int, turn: int) -> Canary:
    """Spread the canary of a leaf over it; another ``turn`` moves it on.

    Both ends are always part of it: a leaf is copied from its beginning to its end, so what
    changes all of it while it is copied shows at one of them.

    Args:
        leaf: Position in the leaves.
        at: Offset of the leaf in the image.
        nbytes: Size of the leaf, at least one element.
        itemsize: Bytes of an element.
        turn: Counts the captures.
    """
    count = min(CANARIES_PER_LEAF - turn % CANARY_TURNS, nbytes // itemsize)
    if count == 1:
        return Canary(leaf, at, nbytes, 1, nbytes)
    # A little more than an element each, so that the last one ends where the leaf ends.
    stride, more = divmod(nbytes - itemsize, count - 1)
    return Canary(leaf, at, stride, count, itemsize + more)


@dataclass(frozen=True, slots=True)
class Capture:
    """A captured state, but for its bytes.

    Attributes:
        at: The checkpoint that it becomes.
        leaves: What lies where in the image, ascending.
        aliases: Further keys of leaves.
        chunks: Ranges of the image that are stored.
        metrics: What the caller passed.
        versions: Libraries that took part.
        created_s: Wall-clock time of the boundary.
        boundary_s: Monotonic time of the boundary, the same clock in all processes.
        canaries: What is compared before the checkpoint is committed.
        kinds: Kind of each leaf: ``parameter``, ``state/`` and the name of an optimizer's
            entry, or empty.
        rank: Of this process.
        world: How many ranks save it together.
    """

    at: CheckpointId
    leaves: tuple[Leaf, ...]
    aliases: Mapping[str, str]
    chunks: tuple[Extent, ...]
    metrics: Mapping[str, float]
    versions: Mapping[str, str]
    created_s: float
    boundary_s: float
    canaries: tuple[Canary, ...] = ()
    kinds: tuple[str, ...] = ()
    rank: int = 0
    world: int = 1

    @property
    def raw_bytes(self) -> int:
        """Bytes to store before encoding."""
        return sum(c.nbytes for c in self.chunks)

    @property
    def canary_bytes(self) -> int:
        """Bytes of all canary values."""
        return sum(c.nbytes for c in self.canaries)


def dump_geometry(leaves: Sequence[Leaf], chunks: Sequence[Extent], kinds: Sequence[str]) -> str:
    """What a description says of the leaves, as the members of a JSON object."""
    return _members(leaves=leaves, chunks=chunks, kinds=kinds)


def dump_canaries(canaries: Sequence[Canary]) -> str:
    """What a description says of the canaries, as the member of a JSON object."""
    return _members(canaries=[[c.leaf, c.first, c.stride, c.count, c.width] for c in canaries])


def _members(**values: object) -> str:
    return json.dumps(values, separators=(",", ":"))[1:-1]


def dump_capture(capture: Capture, geometry: str = "") -> bytes:
    """The description as a sealed object.

    Args:
        capture: What to describe.
        geometry: What ``dump_geometry`` and ``dump_canaries`` say, with a comma between, where
            it was kept.
    """
    members = {
        "at": capture.at,
        "aliases": dict(capture.aliases),
        "metrics": {k: struct.pack(">d", v).hex() for k, v in capture.metrics.items()},
        "versions": dict(capture.versions),
        "created_s": capture.created_s,
        "boundary_s": capture.boundary_s,
        "rank": capture.rank,
        "world": capture.world,
    }
    if not geometry:
        leaves = dump_geometry(capture.leaves, capture.chunks, capture.kinds)
        geometry = f"{leaves},{dump_canaries(capture.canaries)}"
    return seal_text(f"{json.dumps(members, separators=(',', ':'))[:-1]},{geometry}")


def parse_capture(data: bytes, where: str) -> Capture:
    """What ``dump_capture`` wrote; it comes from a file that only this user can write.

    Raises:
        CorruptCheckpoint: It is damaged.
    """
    raw = unseal(data, where)
    return Capture(
        at=CheckpointId(*raw["at"]),
        leaves=tuple(_parse_leaf(*row) for row in raw["leaves"]),
        aliases=raw["aliases"],
        chunks=tuple(Extent(*c) for c in raw["chunks"]),
        metrics={k: struct.unpack(">d", bytes.fromhex(v))[0] for k, v in raw["metrics"].items()},
        versions=raw["versions"],
        created_s=raw["created_s"],
        boundary_s=raw["boundary_s"],
        canaries=tuple(Canary(*c) for c in raw["canaries"]),
        kinds=tuple(raw["kinds"]),
        rank=raw.get("rank", 0),  # one that an older release left says nothing of ranks
        world=raw.get("world", 1),
    )


def _parse_leaf(
    key: str,
    dtype: str,
    shape: list[int],
    at: int,
    nbytes: int,
    order: list[int],
    piece: tuple[list[int], list[int] | int] | None = None,
) -> Leaf:
    leaf = Leaf(key, dtype, tuple(shape), at, nbytes, tuple(order))
    if piece is None:
        return leaf
    whole, start = piece
    return leaf._replace(
        piece=Piece(tuple(whole), start if isinstance(start, int) else tuple(start))
    )


def dump_hashes(meta: bytes, hashes: Sequence[str]) -> bytes:
    """The hash of each chunk of the image, in the order of the chunks, as a sealed object.

    Args:
        meta: The description of the image: they belong to no other.
        hashes: As ``sealed.digest`` gives them.
    """
    return seal({"of": digest(meta), "hashes": list(hashes)})


def parse_hashes(data: bytes, meta: bytes, chunks: int, where: str) -> tuple[str, ...]:
    """What ``dump_hashes`` wrote of that many chunks.

    Raises:
        CorruptCheckpoint: It is damaged, or of another description.
    """
    raw = unseal(data, where)
    found = raw.get("hashes")
    if raw.get("of") != digest(meta) or not isinstance(found, list) or len(found) != chunks:
        raise CorruptCheckpoint(where, "its hashes are of something else than it describes")
    if not all(isinstance(each, str) and HASH.match(each) for each in found):
        raise CorruptCheckpoint(where, "what should be hashes are none")
    return tuple(found)


def hash_room_bytes(chunks: int) -> int:
    """What ``dump_hashes`` takes for that many chunks, at most."""
    return 128 + 36 * chunks


class CanaryWatch:
    """Compares what was copied with what was live at the boundary, a part of the image at a time.
    Several threads may.

    Args:
        capture: What the image holds.
        values: Of the canaries, complete.
    """

    def __init__(self, capture: Capture, values: memoryview) -> None:
        self._step = capture.at.step
        self._leaves = capture.leaves
        self._values = values
        self._canaries = capture.canaries
        self._starts = [canary.first for canary in capture.canaries]
        self._at = list(accumulate((c.nbytes for c in capture.canaries), initial=0))
        self._torn: set[int] = set()

    @property
    def torn_leaf(self) -> str | None:
        """Key of a leaf whose copy differed in a part that was compared, the first of several."""
        return self._leaves[min(self._torn)].key if self._torn else None

    def compare(self, part: Extent, image: memoryview) -> None:
        """Compare the spots in a part of the image, which is complete there."""
        first = max(0, bisect_right(self._starts, part.start) - 1)
        for i in range(first, bisect_left(self._starts, part.stop)):
            canary, at = self._canaries[i], self._at[i]
            for spot in range(canary.count):
                start = canary.first + spot * canary.stride
                lo, hi = max(start, part.start), min(start + canary.width, part.stop)
                at_lo = at + spot * canary.width + lo - start
                if lo < hi and image[lo:hi] != self._values[at_lo : at_lo + hi - lo]:
                    self._torn.add(canary.leaf)
                    break

    def refuse(self) -> None:
        """Refuse what was compared and differed.

        Raises:
            DroppedCheckpoint: A leaf changed while it was copied.
        """
        torn = self.torn_leaf
        if torn is not None:
            raise DroppedCheckpoint(
                self._step,
                torn,
                f"{torn!r} changed while it was copied, without a word to the library: call "
                f"checkpointer.fence() before code that writes parameters by hand",
            )
