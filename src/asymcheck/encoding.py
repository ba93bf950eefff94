"""Selective compression: which codec each kind of leaf gets, chosen by measured cost.

The persister encodes chunks on their way from a slot to the store. Leaves that encode alike (all
first moments, say) are one *group*. After a checkpoint is durable a sample of each group is
encoded with every codec that the selection allows; together with the rates of the store these
numbers choose for the next checkpoint. So the first one is raw, and nothing is ever measured
while a checkpoint waits.

Differences are made to the latest key-frame, whose bytes the persister keeps: a star, never a
chain. A key-frame is lossless and stands alone. Where the selection chains, they are made to the
checkpoint before instead, as a decoder will have it.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Mapping
from time import thread_time
from typing import TYPE_CHECKING, NamedTuple

from asymcheck.capture import Capture
from asymcheck.chunking import Group, Place, Reference, places_of
from asymcheck.errors import CaptureError, DroppedCheckpoint
from asymcheck.events import Sink, Stage, discard, timed
from asymcheck.memory.host import usable_cores
from asymcheck.planning.batching import FixedBytes, Policy, Ready, square_root
from asymcheck.planning.cost import RAW, Kind, Linear, LinearFit, Option, choose, paper_compresses
from asymcheck.planning.layout import PAGE_BYTES, Extent, MiB, align_up
from asymcheck.planning.retention import CheckpointId
from asymcheck.planning.selection import TOP_K, ZSTD, Batching, Selection
from asymcheck.storage.flush import Batch, Encoded, Flushed
from asymcheck.storage.index import Loss

if TYPE_CHECKING:
    from asymcheck.codec.codec import Codec
    from asymcheck.joint import Joint

_log = logging.getLogger(__name__)

_SLICES, _SLICE_BYTES = 4, MiB // 2
_MOST_REPORTS, _NAME_CHARS = 50, 80  # a message between processes holds so many, in any script
_STALE = 10
"""Checkpoints after which a codec without a base is measured again; one with a base always is."""
_HASH_BYTES_PER_S = 1e10
_BATCH_BYTES = 64 * MiB
_ONLY_BYTES_MATTER = Linear(0.0, 1.0)
_PAPER_DENSITY = 0.01


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


class Chooser:
    """Chooses codecs from checkpoint to checkpoint. Used by one thread, the persister's.

    With ``selection.needs_base`` it keeps a copy of the latest key-frame: as much memory as
    the optimizer state and the parameters have. With ``selection.chains`` it keeps what a
    decoder has of the latest checkpoint: as much as the parameters.

    Args:
        selection: What is allowed.
        batching: How encoded chunks are merged into writes.
    """

    def __init__(self, selection: Selection, batching: Batching = "ready") -> None:
        self._selection = selection
        self._batching = batching
        self._options: dict[Group, dict[str, Option]] = {}
        self._measured: dict[tuple[Group, str], int] = {}
        self._reference = Reference()
        self._since_key = 0
        self._count = 0
        self._flushes = LinearFit()
        self._batches = LinearFit()
        self._boundary_s = math.nan

    def prepare(self) -> None:
        """Load the library that encoding may need, before there is something to encode: half a
        second on the first call, and memory that who stores everything as it is does not take.
        """
        if self._selection.rule != RAW and self._selection.cpu_share > 0.0:
            from asymcheck.codec import lossless

            lossless.load_library()

    def begin(self, capture: Capture, sink: Sink = discard) -> Encoder:
        """An encoder for the next checkpoint; ``sink`` receives a span for each chunk that it
        encodes, on the thread that does.
        """
        selection = self._selection
        places = places_of(capture)
        latest = self._reference.at
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
            self._reference.at = None
        joints = self._joints(capture, places)
        kept = [place for joint in joints for place in joint.weights]
        if not selection.chains:
            kept = list(places.values()) if key_frame and selection.needs_base else []
        if key_frame or selection.chains:
            self._reference.begin(kept)
        return Encoder(
            capture.at,
            places,
            labels,
            self._reference,
            {key: joint for joint in joints if joint.has_reference for key in joint.keys},
            makes_key_frame=key_frame,
            kept=frozenset(place.key for place in kept if place.key),
            sink=sink,
        )

    def _joints(self, capture: Capture, places: Mapping[Extent, Place]) -> list[Joint]:
        """Leaves that are encoded together."""
        if not self._selection.chains:
            return []
        from asymcheck.joint import joints_of

        return joints_of(capture, places, self._reference)

    def _choose(
        self, sizes: Mapping[Group, int], key_frame: bool, interval_s: float
    ) -> dict[Group, str]:
        selection, store = self._selection, self._flushes.line()
        if selection.chains:
            return dict.fromkeys(sizes, ZSTD)
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
        """The committed checkpoint that later ones may be made against."""
        return self._reference.at if self._selection.needs_base else None

    @property
    def needs_commits(self) -> bool:
        """Whether the next checkpoint may begin only when it is known what became of this one."""
        return self._selection.needs_base or self._selection.chains

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
        """What losses are within."""
        return self._selection.loss_class

    def fail(self, failure: BaseException) -> None:
        """The checkpoint was not committed. Unless training itself spoilt it, the next one is a
        key-frame: what is wrong may be the base. Where encoding failed, the next one is raw.
        In a chain it always is a key-frame, for the reference holds parts of what has failed.
        """
        if isinstance(failure, DroppedCheckpoint) and not self._selection.chains:
            return
        self._reference.at = None
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
        if encoder.makes_key_frame or self._selection.chains:
            self._reference.at = capture.at
        self._since_key = 0 if encoder.makes_key_frame else self._since_key + 1
        self._count += 1
        self._measure(encoder, image)

    def _measure(self, encoder: Encoder, image: memoryview) -> None:
        chunks: dict[Group, list[tuple[Extent, Place]]] = {}
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
        chunks: list[tuple[Extent, Place]],
        image: memoryview,
    ) -> Option | None:
        """The codec on a few slices of the group."""
        every = max(1, len(chunks) // _SLICES)
        raw_bytes = stored_bytes = 0
        cpu_s = 0.0
        for extent, place in chunks[every // 2 :: every][:_SLICES]:
            start = (extent.nbytes // 2) // PAGE_BYTES * PAGE_BYTES
            start = start if extent.nbytes > _SLICE_BYTES else 0
            base = self._reference.find(place, extent.nbytes)
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
        reference: Whose bytes differences are made to.
        joints: What is encoded together, by the key of each of its leaves.
        makes_key_frame: Whether this checkpoint becomes the next key-frame.
        kept: Keys of leaves whose bytes are kept, for the next differences.
        sink: Receives a span for each chunk that is not stored raw.
    """

    def __init__(
        self,
        at: CheckpointId,
        places: Mapping[Extent, Place],
        labels: Mapping[Group, str],
        reference: Reference,
        joints: Mapping[str, Joint],
        *,
        makes_key_frame: bool,
        kept: frozenset[str],
        sink: Sink = discard,
    ) -> None:
        self._at = at
        self._sink = sink
        self._kept = kept
        self.places = places
        self.labels = labels
        self.makes_key_frame = makes_key_frame
        self._reference = reference
        self._joints = joints
        self._lock = threading.Lock()
        self._reports: dict[tuple[Group, str], GroupReport] = {}
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

    def reads_to(self, extent: Extent) -> int:
        """How far the image must be complete before a chunk of it can be encoded."""
        joint = self._joints.get(self.places[extent].key)
        return extent.stop if joint is None else joint.reads_to

    def encode(self, extent: Extent, image: memoryview) -> Encoded:
        """One chunk; the image is complete as far as ``reads_to`` says.

        The result borrows from the image where the chunk stays raw.

        Raises:
            CaptureError: The codec failed, or there is no memory.
        """
        place = self.places[extent]
        raw = image[extent.start : extent.stop]
        joint = self._joints.get(place.key)
        label = self.labels.get(place.group, RAW) if joint is None else joint.label_of(place.key)
        start_s = thread_time()
        try:
            encoded = self._encode(extent, place, image, label)
            if place.key in self._kept and (joint is None or encoded is None):
                self._reference.keep(place, raw)
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
            before = self._reports.get((place.group, label))
            _, _, raw_bytes, stored, spent_s = before or GroupReport("", "", 0, 0, 0.0)
            self._reports[place.group, label] = GroupReport(
                str(place.group), label, raw_bytes + raw.nbytes, stored + nbytes, spent_s + cpu_s
            )
        return encoded

    def _encode(
        self, extent: Extent, place: Place, image: memoryview, label: str
    ) -> Encoded | None:
        if label == RAW:
            return None
        raw, joint, codec = (
            image[extent.start : extent.stop],
            self._joints.get(place.key),
            _codec(label),
        )
        with timed(self._sink, Stage.ENCODE, self._at.step, raw.nbytes):
            if joint is not None:
                encoding = joint.encode(extent, place, image)
            else:
                base = self._reference.find(place, extent.nbytes) if codec.needs_base else None
                encoding = codec.encode(raw, place.group.dtype, base)
        if encoding is None:
            return None
        with self._lock:
            if codec.needs_base:
                self.base = self._reference.at
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
