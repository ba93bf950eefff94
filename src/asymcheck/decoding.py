"""From stored chunks back to the bytes of the image: checked, decoded, deltas on their bases."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from asymcheck.codec.codec import Codec, Malformed
from asymcheck.errors import (
    CorruptCheckpoint,
    IncompatibleCheckpoint,
    NoCheckpoint,
    StoreError,
)
from asymcheck.planning.layout import CHUNK_BYTES
from asymcheck.planning.retention import CheckpointId
from asymcheck.storage.hierarchy import Hierarchy
from asymcheck.storage.index import RAW, Chunk, Index, Leaf, chunks_of
from asymcheck.storage.listing import Damage
from asymcheck.storage.manifest import EXACT
from asymcheck.storage.names import index_name, manifest_name
from asymcheck.storage.reader import OpenCheckpoint, keys_of, spoken

_ROOMS = (1 << 20, CHUNK_BYTES, 2 * CHUNK_BYTES)


Find = Callable[[str], Codec | None]
"""Gives the codec of a name, ``None`` where this release knows none."""


def known_codec(name: str) -> Codec | None:
    """The codec of that name, ``None`` where this release knows none."""
    # Arrays and compression libraries are loaded when a chunk needs them, and not before.
    from asymcheck.codec import table

    return table.find(name)


class Decoding:
    """Reads the chunks of one open checkpoint.

    Several threads may read; what was loaded may be decoded in others. Scratch memory is
    reused: for each chunk that is loaded at a time its stored bytes and those of all that it
    stands on, at most 32 MiB each, and while it is decoded two times 16 MiB.

    Args:
        checkpoint: Open as long as this is used.
        find: Gives codecs by name.

    Raises:
        IncompatibleCheckpoint: A chunk is stored with a codec that is not known here.
        CorruptCheckpoint: It holds a delta and has no base, or a lossy chunk and says that it
            is exact.
    """

    def __init__(self, checkpoint: OpenCheckpoint, find: Find = known_codec) -> None:
        self._spare: list[bytearray] = []
        self._codecs: dict[str, Codec] = {}
        self._checkpoints: list[OpenCheckpoint] = []
        below: OpenCheckpoint | None = checkpoint
        while below is not None:
            self._check(below, find)
            self._checkpoints.append(below)
            below = below.base
        self._bases = [_Base(delta, base) for delta, base in pairwise(self._checkpoints)]

    def _check(self, checkpoint: OpenCheckpoint, find: Find) -> None:
        for index in checkpoint.indexes:
            where = index_name(index.at, index.rank)
            for name in sorted({chunk.codec for chunk in index.chunks} - {RAW}):
                codec = find(name)
                if codec is None:
                    raise IncompatibleCheckpoint(
                        f"{where}: a chunk is stored with codec {name!r}, which this release "
                        f"cannot decode: install a newer asymcheck"
                    )
                if codec.needs_base and checkpoint.base is None:
                    raise CorruptCheckpoint(where, f"codec {name!r} needs a base, there is none")
                if not codec.lossless and checkpoint.manifest.fidelity == EXACT:
                    raise CorruptCheckpoint(
                        where, f"codec {name!r} is lossy, yet the manifest says {EXACT!r}"
                    )
                self._codecs[name] = codec

    def load(self, index: Index, chunk: Chunk, *, once: bool = False) -> Loaded:
        """Read and verify the stored bytes of a chunk, and of its base's; blocks.

        Args:
            index: The rank's index that lists the chunk.
            chunk: The chunk.
            once: As in ``OpenCheckpoint.read``.

        Raises:
            CorruptCheckpoint: They are not those that were committed, or a delta's base does
                not have the bytes that it stands on.
            StoreError: The medium failed.
        """
        links = [self._load(self._checkpoints[0], index, chunk, once)]
        for base, checkpoint in zip(self._bases, self._checkpoints[1:], strict=True):
            above = links[-1]
            if above.codec is None or not above.codec.needs_base:
                break
            try:
                below = self._load(checkpoint, *base.chunk_of(above.index, above.chunk), once)
            except CorruptCheckpoint as failure:
                if failure.where == above.where:
                    raise
                raise CorruptCheckpoint(
                    _place(index, chunk), f"{base.spoken} is damaged: {failure}"
                ) from failure
            if below.codec is not None and not (below.codec.lossless or above.codec.chains):
                raise CorruptCheckpoint(
                    above.where,
                    f"a difference with codec {above.chunk.codec!r} to what {base.spoken} stores "
                    f"with codec {below.chunk.codec!r}, which is lossy",
                )
            links.append(below)
        return Loaded(self, links)

    def _load(self, checkpoint: OpenCheckpoint, index: Index, chunk: Chunk, once: bool) -> _Link:
        room = self._take(chunk.stored_bytes)
        # With what the room has behind the chunk: the zeros there need no call of their own.
        checkpoint.read(index, chunk, memoryview(room.buffer), once=once)
        return _Link(index, chunk, self._codecs.get(chunk.codec), room)

    def read(self, index: Index, chunk: Chunk, into: memoryview) -> None:
        """Fill ``into``, ``chunk.nbytes`` long, with the bytes of the image; blocks.

        On an error its content is undefined. Raises like ``load`` and ``Loaded.decode``.
        """
        if chunk.codec == RAW:
            self._checkpoints[0].read(index, chunk, into)
            return
        loaded = self.load(index, chunk)
        loaded.decode(into)
        loaded.release()

    def read_leaf(self, index: Index, leaf: Leaf) -> bytes:
        """The bytes of one leaf; for small ones. Blocks. Raises like ``read``."""
        data = bytearray()
        for chunk in chunks_of(leaf, index.chunks):
            loaded = self.load(index, chunk)
            lo, hi = max(chunk.at, leaf.at), min(chunk.stop, leaf.stop)
            data += loaded.raw()[lo - chunk.at : hi - chunk.at]
            loaded.release()
        return bytes(data)

    def _take(self, nbytes: int) -> _Room:
        try:
            buffer = self._spare.pop()
        except IndexError:  # asked and taken in one step, since several threads do
            buffer = bytearray()
        if len(buffer) < nbytes:
            buffer = bytearray(next(size for size in _ROOMS if size >= nbytes))
        return _Room(buffer, memoryview(buffer)[:nbytes])

    def _give(self, room: _Room) -> None:
        self._spare.append(room.buffer)


@dataclass(frozen=True, slots=True)
class _Room:
    """Scratch memory."""

    buffer: bytearray
    view: memoryview


@dataclass(frozen=True, slots=True)
class _Link:
    """The verified stored bytes of a chunk."""

    index: Index
    chunk: Chunk
    codec: Codec | None
    room: _Room

    @property
    def where(self) -> str:
        return _place(self.index, self.chunk)

    def decode(self, into: memoryview, base: memoryview | None) -> None:
        if self.codec is None:
            into[:] = self.room.view
            return
        try:
            self.codec.decode(self.room.view, into, base)
        except Malformed as failure:
            raise CorruptCheckpoint(
                self.where,
                f"{self.chunk.stored_bytes} bytes cannot be decoded with "
                f"{self.chunk.codec!r}: {failure}; hit: "
                f"{spoken(keys_of(self.index, self.chunk))}",
            ) from failure


class Loaded:
    """The verified bytes of one chunk; get one from ``Decoding.load``.

    One thread at a time; several of these may be decoded at once.
    """

    def __init__(self, decoding: Decoding, links: Sequence[_Link]) -> None:
        self._decoding = decoding
        self._links = links  # the chunk, then what it stands on
        self._raw: _Room | None = None

    def decode(self, into: memoryview) -> None:
        """Fill ``into``, as long as the chunk is in the image, with its bytes.

        Raises:
            CorruptCheckpoint: The codec cannot have written what is stored; ``into`` is
                undefined then.
        """
        base: memoryview | None = None
        rooms: list[_Room] = []
        for link in self._links[:0:-1]:
            if link.codec is None:
                base = link.room.view
                continue
            rooms.append(self._decoding._take(link.chunk.nbytes))
            link.decode(rooms[-1].view, base)
            base = rooms[-1].view
            if len(rooms) > 1:
                self._decoding._give(rooms.pop(0))
        self._links[0].decode(into, base)
        for room in rooms:
            self._decoding._give(room)

    def raw(self) -> memoryview:
        """The decoded bytes in scratch memory, good until ``release``. Raises like ``decode``."""
        chunk = self._links[0]
        if chunk.codec is None:
            return chunk.room.view
        if self._raw is None:
            self._raw = self._decoding._take(chunk.chunk.nbytes)
            self.decode(self._raw.view)
        return self._raw.view

    def release(self) -> None:
        """Give the scratch memory back; nothing else may be called after that."""
        for link in self._links:
            self._decoding._give(link.room)
        if self._raw is not None:
            self._decoding._give(self._raw)


class _Base:
    """Where the bytes lie that deltas stand on."""

    def __init__(self, delta: OpenCheckpoint, base: OpenCheckpoint) -> None:
        at = base.manifest.at
        self.checkpoint = base
        self.spoken = f"its base, step {at.step} (attempt {at.attempt}),"
        self._starts = {
            index.rank: [leaf.at for leaf in index.leaves if leaf.nbytes] for index in delta.indexes
        }
        self._filled = {
            index.rank: [leaf for leaf in index.leaves if leaf.nbytes] for index in delta.indexes
        }
        self._leaves = [{leaf.key: leaf for leaf in index.leaves} for index in base.indexes]
        self._chunks = [{chunk.at: chunk for chunk in index.chunks} for index in base.indexes]

    def chunk_of(self, index: Index, chunk: Chunk) -> tuple[Index, Chunk]:
        """The chunk of the base that holds the same bytes of the same leaf.

        Raises:
            CorruptCheckpoint: There is none.
        """
        leaves = self._filled[index.rank]
        i = bisect_right(self._starts[index.rank], chunk.at) - 1
        if i < 0 or chunk.stop > leaves[i].stop:
            raise CorruptCheckpoint(_place(index, chunk), "a delta that is no part of one leaf")
        leaf = leaves[i]
        if index.rank >= len(self._leaves):
            raise self._lacks(index, chunk, f"rank {index.rank}")
        old = self._leaves[index.rank].get(leaf.key)
        if old is None:
            raise self._lacks(index, chunk, f"leaf {leaf.key!r:.80}")
        if (old.dtype, old.shape, old.order) != (leaf.dtype, leaf.shape, leaf.order):
            raise self._lacks(
                index,
                chunk,
                f"leaf {leaf.key!r:.80} as {leaf.dtype} of {leaf.shape}, but as {old.dtype} "
                f"of {old.shape}",
            )
        below = self._chunks[index.rank].get(old.at + chunk.at - leaf.at)
        if below is None or below.nbytes != chunk.nbytes or below.stop > old.stop:
            raise self._lacks(
                index,
                chunk,
                f"a chunk of {chunk.nbytes} bytes at {chunk.at - leaf.at} of leaf {leaf.key!r:.80}",
            )
        return self.checkpoint.indexes[index.rank], below

    def _lacks(self, index: Index, chunk: Chunk, what: str) -> CorruptCheckpoint:
        return CorruptCheckpoint(_place(index, chunk), f"{self.spoken} does not have {what}")


def _place(index: Index, chunk: Chunk) -> str:
    return f"{index.packs[chunk.pack].name} at byte {chunk.offset}"


def verify(hierarchy: Hierarchy, at: CheckpointId, find: Find = known_codec) -> Iterator[Damage]:
    """Read and decode every chunk of a checkpoint; yield each finding, nothing when it is whole.

    Of a base it reads what deltas stand on. Nothing is raised for damage or a failing medium.
    """
    try:
        with hierarchy.open(at) as checkpoint:
            decoding = Decoding(checkpoint, find)
            for index in checkpoint.indexes:
                for chunk in index.chunks:
                    try:
                        # What the medium has, not what the page cache remembers of it.
                        loaded = decoding.load(index, chunk, once=True)
                        loaded.raw()
                        loaded.release()
                    except (CorruptCheckpoint, StoreError) as failure:
                        yield Damage(
                            at,
                            _place(index, chunk),
                            str(failure),
                            keys_of(index, chunk),
                            chunk.offset,
                        )
    except CorruptCheckpoint as failure:
        yield Damage(at, failure.where, str(failure))
    except (NoCheckpoint, StoreError, IncompatibleCheckpoint) as failure:
        newer = isinstance(failure, IncompatibleCheckpoint)
        yield Damage(at, manifest_name(at), str(failure), newer=newer)
