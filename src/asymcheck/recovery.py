"""From a committed checkpoint back into live storage: choose, plan, read, verify, set."""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from asymcheck.decoding import Decoding, Loaded
from asymcheck.device.leaves import Sink
from asymcheck.device.state import RestorePlan, State, tree_leaf_bytes
from asymcheck.errors import (
    CheckpointWarning,
    CorruptCheckpoint,
    IncompatibleCheckpoint,
    NoCheckpoint,
    StoreError,
)
from asymcheck.events import Sink as SpanSink
from asymcheck.events import Stage, timed
from asymcheck.planning.retention import CheckpointId
from asymcheck.storage.index import RAW, TREE_KEY, Chunk, Index, Leaf
from asymcheck.storage.listing import Listing
from asymcheck.storage.reader import OpenCheckpoint
from asymcheck.storage.repository import Repository

_LOOKS = 100
"""How often a restore looks again because a writer removed what it was about to read."""

_DECODERS = 4
"""Chunks decoded at a time; one more may be loaded meanwhile."""

_Sinks = Mapping[str, Sequence[Sink]]


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What a restore did.

    Attributes:
        step: Restored step; 0 for a fresh start.
        attempt: The attempt that had written it, ``None`` for a fresh start.
        restored_bytes: Bytes read into live state.
        duration_s: Seconds from choosing to done.
        skipped: Newer checkpoints that were passed over, each as ``(step, why)``.
        rng_problems: What of the random number generators could not be set.
        missing_keys: With ``strict=False``: live, and not in the checkpoint.
        unexpected_keys: With ``strict=False``: in the checkpoint, and not live.
        mismatched: With ``strict=False``: ``(key, live, checkpoint)``, not loaded.
        cast_keys: With ``dtype_policy="cast"``: loaded with another dtype.
    """

    step: int
    attempt: int | None = None
    restored_bytes: int = 0
    duration_s: float = 0.0
    skipped: tuple[tuple[int, str], ...] = ()
    rng_problems: tuple[str, ...] = ()
    missing_keys: tuple[str, ...] = ()
    unexpected_keys: tuple[str, ...] = ()
    mismatched: tuple[tuple[str, str, str], ...] = ()
    cast_keys: tuple[str, ...] = ()


class TornRestore(CorruptCheckpoint):
    """Damage was met after live state had been overwritten, and nothing else could be loaded."""


def restore(
    repository: Repository,
    state: State,
    *,
    step: int | None,
    strict: bool,
    cast: bool,
    sink: SpanSink,
) -> RestoreReport:
    """Load the newest checkpoint that is whole, or the one asked for; blocks.

    A damaged checkpoint is passed over with one warning, and the one before is tried. One
    that is intact but does not match is an error at once: older ones would not match either.

    Args:
        repository: Where from.
        state: Where to; written in place.
        step: Which, ``None`` for the newest that is whole.
        strict: Whether any difference is an error.
        cast: Whether tensors of another dtype are cast.
        sink: Receives the span.

    Raises:
        NoCheckpoint: There is none (of that step).
        CorruptCheckpoint: There are some and none is whole; ``TornRestore`` when live state
            was overwritten in part.
        IncompatibleCheckpoint: It does not match; nothing was changed.
    """
    start_s = perf_counter()
    torn = False
    looks = 0
    candidates, skipped = _look(repository, step)
    while candidates:
        at = candidates.pop(0)
        with timed(sink, Stage.RESTORE, at.step):
            loading = _Loading(repository, at, state, strict=strict, cast=cast)
            try:
                report = loading.run()
            except NoCheckpoint as failure:
                torn = torn or loading.touched
                looks += 1
                if looks < _LOOKS:
                    # A writer beside us removed it since we looked: then newer ones are there.
                    candidates, skipped = _look(repository, step)
                else:
                    skipped.append((at.step, str(failure)))
                continue
            except (CorruptCheckpoint, StoreError) as failure:
                torn = torn or loading.touched
                skipped.append((at.step, str(failure)))
                continue
            except Exception as failure:
                if not (torn or loading.touched):
                    raise
                raise _torn_by(at, f"putting it back raised {failure!r}") from failure
        if torn and (report.missing_keys or report.mismatched):
            left = [*report.missing_keys, *(key for key, _, _ in report.mismatched)]
            raise _torn_by(
                at,
                f"a newer, damaged one had been read into {left[0]!r}, which this "
                f"one does not hold",
            )
        for passed, why in skipped:
            _warn(f"checkpoint of step {passed} is damaged and was passed over: {why}")
        if report.rng_problems:
            _warn(f"random number generators: {'; '.join(report.rng_problems)}")
        return RestoreReport(
            step=at.step,
            attempt=at.attempt,
            restored_bytes=loading.restored_bytes,
            duration_s=perf_counter() - start_s,
            skipped=tuple(skipped),
            rng_problems=report.rng_problems,
            missing_keys=report.missing_keys,
            unexpected_keys=report.unexpected_keys,
            mismatched=report.mismatched,
            cast_keys=report.cast_keys,
        )
    lines = "\n".join(f"  step {passed}: {why}" for passed, why in skipped)
    message = f"none of {len(skipped)} checkpoints could be loaded:\n{lines}"
    if torn:
        raise TornRestore(
            repository.store.url,
            f"{message}\nThe live state was overwritten in part: build it anew before training.",
        )
    raise CorruptCheckpoint(repository.store.url, message)


def _torn_by(at: CheckpointId, what: str) -> TornRestore:
    return TornRestore(
        f"step {at.step} (attempt {at.attempt})",
        f"{what}; the live state was overwritten in part: build it anew before training",
    )


def _warn(message: str) -> None:
    warnings.warn(message, CheckpointWarning, stacklevel=4)


def _look(
    repository: Repository, step: int | None
) -> tuple[list[CheckpointId], list[tuple[int, str]]]:
    """What may be restored, best first, and what is damaged and would have been better."""
    listing = repository.survey()
    candidates = _candidates(repository, listing, step)
    newest = candidates[0] if candidates else CheckpointId(0, 0)
    damaged = [
        (d.at.step, d.why)
        for d in listing.damaged
        if (d.at > newest if step is None else d.at.step == step)
    ]
    if not candidates and not damaged:
        raise NoCheckpoint(_none_there(repository, listing, step))
    return candidates, damaged


def _candidates(repository: Repository, listing: Listing, step: int | None) -> list[CheckpointId]:
    lineage = repository.lineage(listing)
    if step is None:
        return lineage[::-1]
    found = [c for c in lineage if c.step == step]
    return found or sorted((c for c in listing.committed if c.step == step), reverse=True)[:1]


def _none_there(repository: Repository, listing: Listing, step: int | None) -> str:
    steps = sorted({c.step for c in listing.committed})
    there = f"steps {steps[:20]} are there" if steps else "there is no checkpoint yet"
    what = "" if step is None else f"step {step}: "
    return f"{repository.store.url}: {what}{there}"


class _Loading:
    """One try at one checkpoint."""

    def __init__(
        self, repository: Repository, at: CheckpointId, state: State, *, strict: bool, cast: bool
    ) -> None:
        self._repository = repository
        self._at = at
        self._state = state
        self._strict = strict
        self._cast = cast
        self.touched = False
        self.restored_bytes = 0

    def run(self) -> RestoreReport:
        """Load it; the report has what the loading itself knows."""
        with self._repository.open(self._at) as checkpoint:
            if len(checkpoint.indexes) != 1:
                raise IncompatibleCheckpoint(
                    f"step {self._at.step} was saved by {len(checkpoint.indexes)} ranks; this "
                    f"release restores checkpoints of one rank"
                )
            index = checkpoint.indexes[0]
            decoding = Decoding(checkpoint)
            text = self._read_tree(decoding, index)
            plan = self._state.plan(index, text, strict=self._strict, cast=self._cast)
            self._read_leaves(checkpoint, decoding, index, plan.places.sinks)
        self.touched = True
        problems = plan.finish()
        return self._report(plan, problems)

    def _report(self, plan: RestorePlan, problems: Sequence[str]) -> RestoreReport:
        matching = plan.matching
        return RestoreReport(
            step=self._at.step,
            rng_problems=tuple(problems),
            missing_keys=tuple(matching.missing_keys),
            unexpected_keys=tuple(matching.unexpected_keys),
            mismatched=tuple(matching.mismatched),
            cast_keys=tuple(matching.cast),
        )

    def _read_tree(self, decoding: Decoding, index: Index) -> bytes:
        tree_leaf_bytes(index)
        return decoding.read_leaf(index, next(x for x in index.leaves if x.key == TREE_KEY))

    def _read_leaves(
        self, checkpoint: OpenCheckpoint, decoding: Decoding, index: Index, sinks: _Sinks
    ) -> None:
        """Read chunk after chunk; a few of them are decoded beside that, in threads.

        What fails is told in the order of the chunks. When this ends, no thread writes any more.
        """
        pool = ThreadPoolExecutor(_DECODERS, "asymcheck-decode")
        coming: deque[tuple[_Piece, Loaded, Future[memoryview]]] = deque()
        try:
            for piece in _pieces(index, sinks):
                if piece.chunk.codec == RAW and piece.live is not None:
                    self.touched = True
                    checkpoint.read(index, piece.chunk, piece.live)
                    self._put(piece, piece.live)
                    continue
                loaded = decoding.load(index, piece.chunk)
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

    def _finish(self, piece: _Piece, loaded: Loaded, decoded: Future[memoryview]) -> None:
        self._put(piece, decoded.result())
        loaded.release()

    def _put(self, piece: _Piece, raw: memoryview) -> None:
        """Write the bytes to every sink that does not have them yet."""
        self.touched = True
        chunk = piece.chunk
        for leaf, sinks in piece.hit:
            lo, hi = max(chunk.at, leaf.at), min(chunk.stop, leaf.stop)
            for sink in sinks if piece.live is None else sinks[1:]:
                sink.put(lo - leaf.at, np.frombuffer(raw[lo - chunk.at : hi - chunk.at], np.uint8))
            self.restored_bytes += hi - lo


@dataclass(frozen=True, slots=True)
class _Piece:
    """A chunk, and where its bytes go.

    Attributes:
        chunk: The chunk.
        hit: The leaves with bytes in it that something live takes, and what takes them.
        live: Where it is a piece of one large leaf: live memory of all of it, if there is such.
    """

    chunk: Chunk
    hit: Sequence[tuple[Leaf, Sequence[Sink]]]
    live: memoryview | None


def _pieces(index: Index, sinks: _Sinks) -> Iterator[_Piece]:
    leaves = [leaf for leaf in index.leaves if leaf.nbytes]
    starts = [leaf.at for leaf in leaves]
    for chunk in index.chunks:
        i = max(0, bisect_right(starts, chunk.at) - 1)
        hit = []
        while i < len(leaves) and leaves[i].at < chunk.stop:
            if leaves[i].stop > chunk.at and sinks.get(leaves[i].key):
                hit.append((leaves[i], sinks[leaves[i].key]))
            i += 1
        for leaf, takers in hit:
            for sink in takers:
                _check_whole_elements(leaf, chunk, sink)
        live = None
        if len(hit) == 1 and hit[0][0].at <= chunk.at and chunk.stop <= hit[0][0].stop:
            lo = chunk.at - hit[0][0].at
            live = hit[0][1][0].memory(lo, lo + chunk.nbytes)
        if hit:
            yield _Piece(chunk, hit, live)


def _decoded(loaded: Loaded, live: memoryview | None) -> memoryview:
    if live is None:
        return loaded.raw()
    loaded.decode(live)
    return live


def _check_whole_elements(leaf: Leaf, chunk: Chunk, sink: Sink) -> None:
    for edge in (chunk.at, chunk.stop):
        if leaf.at < edge < leaf.stop and (edge - leaf.at) % sink.itemsize:
            raise CorruptCheckpoint("(state)", f"a chunk edge cuts an element of {leaf.key!r:.80}")
