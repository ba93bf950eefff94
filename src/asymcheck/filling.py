"""The chunks of an open checkpoint into the places of live state."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import numpy as np

from asymcheck.decoding import Decoding, Loaded
from asymcheck.device.places import Sink
from asymcheck.errors import CorruptCheckpoint
from asymcheck.storage.index import RAW, Chunk, Index, Leaf
from asymcheck.storage.lanes import side_by_side
from asymcheck.storage.reader import OpenCheckpoint

_DECODERS = 4
"""Chunks decoded at a time; one more may be loaded meanwhile."""

Sinks = Mapping[str, Sequence[Sink]]
"""What takes each leaf, by its key."""


class Filling:
    """Reads a checkpoint into live state, with all checks. One thread at a time.

    Args:
        checkpoint: It, open as long as this is used.
        decoding: Of it.

    Attributes:
        checkpoint: The checkpoint.
        touched: Whether live state may have been written to.
        restored_bytes: Bytes that it got.
    """

    def __init__(self, checkpoint: OpenCheckpoint, decoding: Decoding) -> None:
        self.checkpoint = checkpoint
        self._decoding = decoding
        self.touched = False
        self.restored_bytes = 0

    def read(self, index: Index, sinks: Sinks, *, once: bool) -> None:
        """Fill what takes leaves of one rank; blocks.

        What fails is told in the order of the chunks. When this ends, no thread writes any more.

        Args:
            index: Of the rank that had saved them.
            sinks: What takes them.
            once: As in ``OpenCheckpoint.read``.

        Raises:
            CorruptCheckpoint: The bytes are not those that were committed.
            StoreError: The medium failed.
        """
        pieces = _reads(index, sinks)
        if self.checkpoint.lanes > 1:
            self._read_far(index, pieces, once=once)
        else:
            self._read_near(index, pieces, once=once)

    def _read_far(self, index: Index, pieces: Iterator[_Read], *, once: bool) -> None:
        """Read and decode as many chunks side by side as the medium is worth connections."""

        def calls() -> Iterator[Callable[[], tuple[_Read, Loaded | None, memoryview]]]:
            for piece in pieces:
                self.touched = self.touched or piece.live is not None
                yield partial(self._fetch, index, piece, once=once)

        with closing(side_by_side(calls(), self.checkpoint.lanes)) as fetched:
            for piece, loaded, raw in fetched:
                self._put(piece, raw)
                if loaded is not None:
                    loaded.release()

    def _fetch(
        self, index: Index, piece: _Read, *, once: bool
    ) -> tuple[_Read, Loaded | None, memoryview]:
        """A chunk, decoded: in live memory where there is some, else good until its release."""
        if piece.chunk.codec == RAW and piece.live is not None:
            self.checkpoint.read(index, piece.chunk, piece.live, once=once)
            return piece, None, piece.live
        loaded = self._decoding.load(index, piece.chunk, once=once)
        return piece, loaded, _decoded(loaded, piece.live)

    def _read_near(self, index: Index, pieces: Iterator[_Read], *, once: bool) -> None:
        """Read one chunk after the other; a few of them are decoded beside that, in threads."""
        pool = ThreadPoolExecutor(_DECODERS, "asymcheck-decode")
        coming: deque[tuple[_Read, Loaded, Future[memoryview]]] = deque()
        try:
            for piece in pieces:
                if piece.chunk.codec == RAW and piece.live is not None:
                    self.touched = True
                    self.checkpoint.read(index, piece.chunk, piece.live, once=once)
                    self._put(piece, piece.live)
                    continue
                loaded = self._decoding.load(index, piece.chunk, once=once)
                if piece.chunk.codec == RAW:
                    self._put(piece, loaded.raw())
                    loaded.release()
                    continue
                self.touched = self.touched or piece.live is not None
                coming.append((piece, loaded, pool.submit(_decoded, loaded, piece.live)))
                if len(coming) > _DECODERS:
                    self._finish(*coming.popleft())
            while coming:
                self._finish(*coming.popleft())
        finally:
            pool.shutdown(cancel_futures=True)

    def _finish(self, piece: _Read, loaded: Loaded, decoded: Future[memoryview]) -> None:
        self._put(piece, decoded.result())
        loaded.release()

    def _put(self, piece: _Read, raw: memoryview) -> None:
        """Write the bytes to every sink that does not have them yet."""
        self.touched = True
        chunk = piece.chunk
        for leaf, sinks in piece.hit:
            lo, hi = max(chunk.at, leaf.at), min(chunk.stop, leaf.stop)
            for sink in sinks if piece.live is None else sinks[1:]:
                sink.put(lo - leaf.at, np.frombuffer(raw[lo - chunk.at : hi - chunk.at], np.uint8))
            self.restored_bytes += hi - lo


@dataclass(frozen=True, slots=True)
class _Read:
    """A chunk, and where its bytes go.

    Attributes:
        chunk: The chunk.
        hit: The leaves with bytes in it that something live takes, and what takes them.
        live: Where it is a piece of one large leaf: live memory of all of it, if there is such.
    """

    chunk: Chunk
    hit: Sequence[tuple[Leaf, Sequence[Sink]]]
    live: memoryview | None


def _reads(index: Index, sinks: Sinks) -> Iterator[_Read]:
    leaves = [leaf for leaf in index.leaves if leaf.nbytes]
    starts = [leaf.at for leaf in leaves]
    for chunk in index.chunks:
        i = max(0, bisect_right(starts, chunk.at) - 1)
        hit = []
        while i < len(leaves) and leaves[i].at < chunk.stop:
            leaf = leaves[i]
            lo, hi = max(chunk.at, leaf.at) - leaf.at, min(chunk.stop, leaf.stop) - leaf.at
            takers = [sink for sink in sinks.get(leaf.key, ()) if lo < hi and sink.takes(lo, hi)]
            if takers:
                hit.append((leaf, takers))
            i += 1
        for leaf, wanted in hit:
            for sink in wanted:
                _check_whole_elements(leaf, chunk, sink)
        live = None
        if len(hit) == 1 and hit[0][0].at <= chunk.at and chunk.stop <= hit[0][0].stop:
            lo = chunk.at - hit[0][0].at
            live = hit[0][1][0].memory(lo, lo + chunk.nbytes)
        if hit:
            yield _Read(chunk, hit, live)


def _decoded(loaded: Loaded, live: memoryview | None) -> memoryview:
    if live is None:
        return loaded.raw()
    loaded.decode(live)
    return live


def _check_whole_elements(leaf: Leaf, chunk: Chunk, sink: Sink) -> None:
    for edge in (chunk.at, chunk.stop):
        if leaf.at < edge < leaf.stop and (edge - leaf.at) % sink.itemsize:
            raise CorruptCheckpoint("(state)", f"a chunk edge cuts an element of {leaf.key!r:.80}")
