"""Selective compression: which codec each kind of leaf gets, chosen by measured cost.

The persister encodes chunks on their way from a slot to the store. Leaves that encode alike (all
first moments, say) are one *group*. After a checkpoint is durable a sample of each group is
encoded with every codec that the selection allows; together with the rates of the store these
numbers choose for the next checkpoint. So the first one is raw, and nothing is ever measured
while a checkpoint waits.

Differences are made to the latest key-frame, whose bytes the persister keeps: a star, never a
chain. A key-frame is lossless and stands alone.
"""

from __future__ import annotations

import logging
import math
import threading
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from time import thread_time
from typing import TYPE_CHECKING, NamedTuple

from asymcheck.capture import Capture
from asymcheck.errors import CaptureError, DroppedCheckpoint
from asymcheck.events import Sink, Stage, discard, timed
from asymcheck.memory.host import usable_cores
from asymcheck.planning.batching import FixedBytes, Policy, Ready, square_root
from asymcheck.planning.cost import RAW, Kind, Linear, LinearFit, Option, choose, paper_compresses
from asymcheck.planning.layout import PAGE_BYTES, Extent, MiB, align_up
from asymcheck.planning.retention import CheckpointId
from asymcheck.planning.selection import TOP_K, Batching, Selection
from asymcheck.storage.flush import Batch, Encoded, Flushed
from asymcheck.storage.index import Leaf, Loss

if TYPE_CHECKING:
    from asymcheck.codec.codec import Codec

_log = logging.getLogger(__name__)

_SLICES, _SLICE_BYTES = 4, MiB // 2
_MOST_REPORTS, _NAME_CHARS = 50, 80  # a message between processes holds so many, in any script
_STALE = 10
"""Checkpoints after which a codec without a base is measured again; one with a base always is."""
_HASH_BYTES_PER_S = 1e10
_BATCH_BYTES = 64 * MiB
_ONLY_BYTES_MATTER = Linear(0.0, 1.0)
_PAPER_DENSITY = 0.01


class Group(NamedTuple):
    """Leaves that encode alike."""

    kind: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.kind or 'other'} {self.dtype}".strip()


class GroupReport(NamedTuple):
    """What became of one group of leaves in one checkpoint.

    Attributes:
        group: Which leaves, for people.
        label: The codec that was chosen.
        raw_bytes: What they were.
        stored_bytes: What was written of them.
        cpu_s: CPU seconds of encoding.
    """

    group: str
    label: str
    raw_bytes: int
    stored_bytes: int
    cpu_s: float


class _Place(NamedTuple):
    """Which part of which leaf a chunk is; no key where it is parts of several."""

    group: Group = Group("", "")
    key: str = ""
    offset: int = 0
    form: tuple[object, ...] = ()

    @classmethod
    def of(cls, leaf: Leaf, kind: str, chunk: Extent) -> _Place:
        """A chunk of that leaf."""
        dtype = "" if ":" in leaf.dtype else leaf.dtype
        form = (leaf.dtype, leaf.shape, leaf.order)
        return cls(Group(kind, dtype), leaf.key, chunk.start - leaf.at, form)


@dataclass
class _KeyFrame:
    """The latest key-frame.

    Attributes:
        at: The checkpoint, once it is committed.
        pieces: Form of the leaf and bytes of each chunk, by leaf and offset in it.
    """

    at: CheckpointId | None = None
    pieces: dict[tuple[str, int], tuple[tuple[object, ...], bytearray]] = field(
        default_factory=dict
    )

    def begin(self, places: Iterable[_Place]) -> None:
        """Another one is made: forget what is not part of it."""
        self.at = None
        wanted = {(place.key, place.offset) for place in places}
        self.pieces = {name: piece for name, piece in self.pieces.items() if name in wanted}

    def find(self, place: _Place, nbytes: int) -> memoryview | None:
        """The same bytes of the same leaf, where the leaf is still of that form."""
        form, piece = self.pieces.get((place.key, place.offset), ((), bytearray()))
        fits = self.at is not None and form == place.form and len(piece) == nbytes
        return memoryview(piece) if fits else None

    def keep(self, place: _Place, raw: memoryview) -> None:
        """Take a copy, into the memory of the key-frame before where it fits."""
        _, piece = self.pieces.get((place.key, place.offset), ((), bytearray()))
        if len(piece) != len(raw):
            piece = bytearray(len(raw))
        piece[:] = raw
        self.pieces[place.key, place.offset] = (place.form, piece)


class Chooser:
    """Chooses codecs from checkpoint to checkpoint. Used by one thread, the persister's.

    With ``selection.needs_base`` it keeps a copy of the latest key-frame: as much memory as
    the optimizer state and the parameters have.

    Args:
        selection: What is allowed.
        batching: How encoded chunks are merged into writes.
    """

    def __init__(self, selection: Selection, batching: Batching = "ready") -> None:
        self._selection = selection
        self._batching = batching
        self._options: dict[Group, dict[str, Option]] = {}
        self._measured: dict[tuple[Group, str], int] = {}
        self._key_frame = _KeyFrame()
        self._since_key = 0
        self._count = 0
        self._flushes = LinearFit()
        self._batches = LinearFit()
        self._boundary_s = math.nan

    def begin(self, capture: Capture, sink: Sink = discard) -> Encoder:
        """An encoder for the next checkpoint; ``sink`` receives a span for each chunk that it
        encodes, on the thread that does.
        """
        selection = self._selection
        places = _places(capture)
        latest = self._key_frame.at
        # Each attempt begins with one: what it stands on is on its own branch.
        key_frame = latest is None or latest.attempt != capture.at.attempt
        key_frame |= self._since_key + 1 >= selection.key_every
        if not selection.needs_base and selection.fidelity == "exact":
            key_frame = False  # each checkpoint stands alone; there is nothing to tell apart
        sizes: dict[Group, int] = {}
        for extent, place in places.items():
            sizes[place.group] = sizes.get(place.group, 0) + extent.nbytes
        interval_s = capture.boundary_s - self._boundary_s
        self._boundary_s = capture.boundary_s
        labels = self._choose(sizes, key_frame, interval_s)
        if key_frame:
            self._key_frame.begin(places.values() if selection.needs_base else ())
        keeps = key_frame and selection.needs_base
        return Encoder(
            capture.at, places, labels, self._key_frame, key_frame, keeps=keeps, sink=sink
        )

    def _choose(
        self, sizes: Mapping[Group, int], key_frame: bool, interval_s: float
    ) -> dict[Group, str]:
        selection, store = self._selection, self._flushes.line()
        budget_s = math.inf if math.isnan(interval_s) else selection.cpu_share * interval_s
        if store is None or selection.rule == RAW or selection.cpu_share == 0.0:
            return {}
        kinds = []
        for group, nbytes in sizes.items():
            allowed = selection.labels(group.kind, key_frame=key_frame)
            options = self._options.get(group, {})
            kinds.append(
                Kind(str(group), nbytes, tuple(options[a] for a in allowed if a in options))
            )
        if selection.rule == "paper":
            return {g: TOP_K for g, k in zip(sizes, kinds, strict=True) if _paper_says(k, store)}
        choice = choose(
            kinds,
            _ONLY_BYTES_MATTER if selection.rule == "smallest" else store,
            encode_workers=self.workers,
            cpu_budget_s=budget_s,
            hash_bytes_per_s=_HASH_BYTES_PER_S,
            batch_bytes=max(1, sum(sizes.values())),  # the line is one of whole checkpoints
        )
        return dict(zip(sizes, choice.labels, strict=True))

    @property
    def workers(self) -> int:
        """Threads that encode, when there is something to encode."""
        return self._selection.workers or max(1, usable_cores() // 4)

    @property
    def base(self) -> CheckpointId | None:
        """The committed key-frame that later checkpoints may be made against."""
        return self._key_frame.at if self._selection.needs_base else None

    def policy(self, encoder: Encoder) -> Policy:
        """How its chunks are merged into writes."""
        if self._batching == "each":
            return FixedBytes(1)
        latency = self._batches.line()
        if self._batching == "ready" or latency is None or not encoder.places:
            return Ready(_BATCH_BYTES)
        raw_bytes = sum(e.nbytes for e in encoder.places)
        stored_bytes, encode_s = 0.0, 0.0
        for extent, place in encoder.places.items():
            label = encoder.labels.get(place.group, RAW)
            option = self._options.get(place.group, {}).get(label)
            stored_bytes += extent.nbytes * (option.ratio if option else 1.0)
            encode_s += extent.nbytes / option.encode_bytes_per_s if option else 0.0
        chunks = len(encoder.places)
        return square_root(
            max(1.0, min(stored_bytes, raw_bytes)),
            max(1.0, stored_bytes / chunks),
            latency.alpha_s,
            encode_s / chunks,
        )

    def observe(self, batch: Batch) -> None:
        """Note what the store needed for a batch; from any thread that writes, one at a time."""
        self._batches = self._batches.add(batch.nbytes, batch.duration_s)

    @property
    def fidelity(self) -> str:
        """What losses are within: the paper's rule keeps what changed most, of every kind."""
        return "aggressive" if self._selection.rule == "paper" else self._selection.fidelity

    def fail(self, failure: BaseException) -> None:
        """The checkpoint was not committed. Unless training itself spoilt it, the next one is a
        key-frame: what is wrong may be the base. Where encoding failed, the next one is raw.
        """
        if isinstance(failure, DroppedCheckpoint):
            return
        self._key_frame.at = None
        if isinstance(failure, CaptureError):
            self._options.clear()

    def finish(
        self, capture: Capture, encoder: Encoder, flushed: Flushed, image: memoryview
    ) -> None:
        """The checkpoint is committed: note its rates, and measure samples of it.

        Args:
            capture: The checkpoint.
            encoder: Its encoder.
            flushed: What flushing took.
            image: Complete; read until this returns.
        """
        stored = sum(p.nbytes for p in flushed.packs)
        self._flushes = self._flushes.add(stored, flushed.write_s)
        if encoder.makes_key_frame:
            self._key_frame.at, self._since_key = capture.at, 0
        else:
            self._since_key += 1
        self._count += 1
        self._measure(encoder, image)

    def _measure(self, encoder: Encoder, image: memoryview) -> None:
        chunks: dict[Group, list[tuple[Extent, _Place]]] = {}
        for extent, place in encoder.places.items():
            chunks.setdefault(place.group, []).append((extent, place))
        for group, found in chunks.items():
            # Key-frames or not: what either may use is measured.
            labels = {
                *self._selection.labels(group.kind, key_frame=True),
                *self._selection.labels(group.kind, key_frame=False),
            }
            for label in sorted(labels):
                codec = _codec(label)
                due = self._count - self._measured.get((group, label), -_STALE) >= _STALE
                if codec.needs_base and encoder.makes_key_frame:
                    continue  # it would be compared with itself
                if codec.needs_base or due:
                    self._measured[group, label] = self._count
                    try:
                        option = self._try(codec, group, found, image)
                    except Exception as failure:  # noqa: BLE001  what is committed stands
                        _log.warning("%s is not used for %s: %r", label, group, failure)
                        option = None
                    options = self._options.setdefault(group, {})
                    options.pop(label, None)
                    if option is not None:
                        options[label] = option

    def _try(
        self,
        codec: Codec,
        group: Group,
        chunks: list[tuple[Extent, _Place]],
        image: memoryview,
    ) -> Option | None:
        """The codec on a few slices of the group."""
        every = max(1, len(chunks) // _SLICES)
        raw_bytes = stored_bytes = 0
        cpu_s = 0.0
        for extent, place in chunks[every // 2 :: every][:_SLICES]:
            start = (extent.nbytes // 2) // PAGE_BYTES * PAGE_BYTES
            start = start if extent.nbytes > _SLICE_BYTES else 0
            base = self._key_frame.find(place, extent.nbytes)
            if codec.needs_base and base is None:
                continue
            piece = image[extent.start + start : extent.stop][:_SLICE_BYTES]
            under = None if base is None else base[start:][:_SLICE_BYTES]
            begin_s = thread_time()
            encoding = codec.encode(piece, group.dtype, under)
            cpu_s += thread_time() - begin_s
            raw_bytes += piece.nbytes
            stored_bytes += piece.nbytes if encoding is None else len(encoding.data)
        if not raw_bytes or stored_bytes >= raw_bytes:
            return None
        rate = raw_bytes / max(cpu_s, 1e-9)
        return Option(codec.label, stored_bytes / raw_bytes, rate, codec.lossless)


class Encoder:
    """Encodes the chunks of one checkpoint; several threads may use it at once.

    Args:
        at: The checkpoint.
        places: What each chunk is.
        labels: Codec of each group; raw for the rest.
        key_frame: Whose bytes differences are made to.
        makes_key_frame: Whether this checkpoint becomes the next key-frame.
        keeps: Whether its bytes are kept then.
        sink: Receives a span for each chunk that is not stored raw.
    """

    def __init__(
        self,
        at: CheckpointId,
        places: Mapping[Extent, _Place],
        labels: Mapping[Group, str],
        key_frame: _KeyFrame,
        makes_key_frame: bool,
        *,
        keeps: bool,
        sink: Sink = discard,
    ) -> None:
        self._at = at
        self._sink = sink
        self._keeps = keeps
        self.places = places
        self.labels = labels
        self.makes_key_frame = makes_key_frame
        self._key_frame = key_frame
        self._lock = threading.Lock()
        self._reports: dict[Group, GroupReport] = {}
        self._losses: dict[tuple[Group, str], Loss] = {}
        self.base: CheckpointId | None = None

    @property
    def encodes(self) -> bool:
        """Whether there is anything to do but to pass bytes on."""
        return any(label != RAW for label in self.labels.values())

    @property
    def losses(self) -> tuple[Loss, ...]:
        """What lossy codecs changed."""
        return tuple(self._losses.values())

    @property
    def reports(self) -> tuple[GroupReport, ...]:
        """What became of each group, the largest first; of the smallest of very many nothing."""
        found = sorted(self._reports.values(), key=lambda report: -report.raw_bytes)
        return tuple(r._replace(group=r.group[:_NAME_CHARS]) for r in found[:_MOST_REPORTS])

    def encode(self, extent: Extent, image: memoryview) -> Encoded:
        """One chunk; its bytes in the image are complete.

        The result borrows from the image where the chunk stays raw.

        Raises:
            CaptureError: The codec failed, or there is no memory.
        """
        place = self.places[extent]
        raw = image[extent.start : extent.stop]
        label = self.labels.get(place.group, RAW)
        start_s = thread_time()
        try:
            if self._keeps and place.key:
                self._key_frame.keep(place, raw)
            encoded = self._encode(extent, place, raw, label)
        except Exception as failure:
            raise CaptureError(
                f"step {self._at.step} (attempt {self._at.attempt}): encoding {raw.nbytes} bytes "
                f"of {place.key or place.group!s} as {label} raised {failure!r}; the next "
                f"checkpoint is stored as it is"
            ) from failure
        if encoded is None:
            padded = image[extent.start : align_up(extent.stop, PAGE_BYTES)]
            encoded = Encoded(raw, RAW, padded)
        nbytes, cpu_s = memoryview(encoded.data).nbytes, thread_time() - start_s
        with self._lock:
            before = self._reports.get(place.group)
            _, _, raw_bytes, stored, spent_s = before or GroupReport("", "", 0, 0, 0.0)
            self._reports[place.group] = GroupReport(
                str(place.group), label, raw_bytes + raw.nbytes, stored + nbytes, spent_s + cpu_s
            )
        return encoded

    def _encode(self, extent: Extent, place: _Place, raw: memoryview, label: str) -> Encoded | None:
        if label == RAW:
            return None
        codec = _codec(label)
        base = self._key_frame.find(place, extent.nbytes) if codec.needs_base else None
        with timed(self._sink, Stage.ENCODE, self._at.step, raw.nbytes):
            encoding = codec.encode(raw, place.group.dtype, base)
        if encoding is None:
            return None
        with self._lock:
            if codec.needs_base:
                self.base = self._key_frame.at
            if not codec.lossless:
                was = self._losses.get((place.group, codec.name))
                self._losses[place.group, codec.name] = _loss(
                    place.group, codec, encoding.max_error, encoding.mean_error, raw.nbytes, was
                )
        return Encoded(encoding.data, codec.name)


def _codec(label: str) -> Codec:
    """The codec of a label. Imported when the first one is used: where all is stored raw no
    arrays are needed, and the persister starts the faster.
    """
    from asymcheck.codec import table

    return table.by_label(label)


def _loss(
    group: Group, codec: Codec, worst: float, mean: float, nbytes: int, was: Loss | None
) -> Loss:
    if was is not None:
        worst = max(worst, was.max_error)
        mean = (mean * nbytes + was.mean_error * was.nbytes) / (nbytes + was.nbytes)
        nbytes += was.nbytes
    return Loss(str(group), codec.name, worst, mean, nbytes)


def _paper_says(kind: Kind, store: Linear) -> bool:
    """The published rule, for a group as one partition."""
    if not kind.options:
        return False
    encode = Linear(0.0, 1.0 / kind.options[0].encode_bytes_per_s)
    return paper_compresses(kind.nbytes, _PAPER_DENSITY, encode, store)


def _places(capture: Capture) -> dict[Extent, _Place]:
    """What each chunk is: a part of one leaf, or several leaves."""
    kinds = capture.kinds or ("",) * len(capture.leaves)
    leaves = [(x, kind) for x, kind in zip(capture.leaves, kinds, strict=True) if x.nbytes]
    starts = [leaf.at for leaf, _ in leaves]
    places = {}
    for chunk in capture.chunks:
        i = bisect_right(starts, chunk.start) - 1
        places[chunk] = _Place()
        if i >= 0 and chunk.stop <= leaves[i][0].stop:
            places[chunk] = _Place.of(*leaves[i], chunk)
    return places
