"""What one rank saved: its leaves, and the chunks that hold them. See docs/format.md."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from asymcheck.errors import CorruptCheckpoint
from asymcheck.planning.layout import CHUNK_BYTES, PAGE_BYTES, align_up
from asymcheck.planning.pieces import Piece, flaw
from asymcheck.planning.retention import CheckpointId
from asymcheck.storage.names import MAX_RANK, pack_name
from asymcheck.storage.sealed import (
    HASH,
    VERSION,
    Fields,
    check_version,
    dump_metric,
    number,
    parse_metrics,
    seal,
    short,
    unseal,
)

TREE_KEY = ""
"""Key of the leaf that holds the non-tensor state as tagged JSON; no other leaf has it."""
TREE_DTYPE = "json"

RAW = "raw"
"""Codec of a chunk that is stored as the bytes of the image."""
CODEC = re.compile(r"[a-z0-9][a-z0-9+._-]{0,39}\Z")

EXACT = "exact"
CHAINED = "excp"
"""The class of fidelity in which a delta may stand on another one of this class."""
LOSSY = ("moments", "aggressive", CHAINED)
"""Classes of fidelity in which what is restored is not bit-equal; all else is ``EXACT``."""
_LOSSY = re.compile(rf"(?:{'|'.join(LOSSY)})\Z")


@dataclass(frozen=True, slots=True)
class Base:
    """The checkpoint that a delta was made against.

    Attributes:
        at: Its identity.
        hash: xxh3-128 of its whole manifest object: no other checkpoint will do.
    """

    at: CheckpointId
    hash: str


class Leaf(NamedTuple):
    """One array of the state, as a range of the image.

    Attributes:
        key: Path of the leaf, parts joined by ``/``.
        dtype: A torch dtype's name (``float32``), ``numpy:`` and a numpy dtype's string, or
            ``json`` for the tree.
        shape: Size of each dimension.
        at: Offset in the image, in bytes.
        nbytes: Size in bytes.
        order: Dimensions from the outermost to the innermost in memory, empty where that is
            their own order. Only tensors that are dense in some order have one.
        piece: What it is of an array that several ranks hold; ``None`` where it is the rank's
            own and no part of anything. A piece is row-major: its ``order`` is empty.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    at: int
    nbytes: int
    order: tuple[int, ...] = ()
    piece: Piece | None = None

    @property
    def stop(self) -> int:
        """Where the range ends in the image."""
        return self.at + self.nbytes


@dataclass(frozen=True, slots=True)
class Chunk:
    """A range of the image, as stored.

    Attributes:
        at: Offset in the image.
        nbytes: Size in the image, at most 16 MiB.
        pack: Position of its pack in the index's list.
        offset: Offset in the pack, a multiple of 4096.
        stored_bytes: Size in the pack.
        codec: How the stored bytes were made from the raw ones. Who decodes knows which names
            there are; here it is any name of the grammar.
        hash: xxh3-128 of the stored bytes.
    """

    at: int
    nbytes: int
    pack: int
    offset: int
    stored_bytes: int
    codec: str
    hash: str

    @property
    def stop(self) -> int:
        """Where the range ends in the image."""
        return self.at + self.nbytes


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object that a manifest or an index names."""

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Loss:
    """What a lossy codec did to the leaves of one kind, as measured when they were encoded.

    Attributes:
        kind: Kind of leaf, for people, such as ``exp_avg``.
        codec: The codec.
        max_error: Greatest absolute difference of an element.
        mean_error: Mean absolute difference.
        nbytes: Raw bytes that went through it.
    """

    kind: str
    codec: str
    max_error: float
    mean_error: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class Index:
    """What one rank saved.

    Attributes:
        run: Id of the run.
        at: The checkpoint.
        rank: The rank whose state this is.
        world: How many ranks there were.
        created_s: Wall-clock time of the capture, for people only.
        metrics: What the caller passed with the save.
        versions: Version of each library that took part.
        leaves: Ascending in the image; aliases excluded.
        aliases: Further keys of leaves that are one tensor in memory: alias to key.
        chunks: Ascending in the image and in each pack.
        packs: The packs, in the order in which chunks refer to them.
        losses: What lossy codecs changed; empty where every leaf is bit-equal.
        base: What its deltas are made against, for whoever commits; ``None`` where it has none.
            A world of one may leave it and ``fidelity`` to the manifest.
        fidelity: ``exact``, or the class of what its lossy codecs may have changed.
    """

    run: str
    at: CheckpointId
    rank: int
    world: int
    created_s: float
    metrics: Mapping[str, float]
    versions: Mapping[str, str]
    leaves: tuple[Leaf, ...]
    aliases: Mapping[str, str]
    chunks: tuple[Chunk, ...]
    packs: tuple[StoredObject, ...]
    losses: tuple[Loss, ...] = ()
    base: Base | None = None
    fidelity: str = EXACT

    @property
    def of_ranks(self) -> bool:
        """Whether only releases that know of many ranks can read it."""
        return (
            self.world > 1
            or self.base is not None
            or self.fidelity != EXACT
            or any(leaf.piece is not None for leaf in self.leaves)
        )

    @property
    def leaf_bytes(self) -> int:
        """Bytes of all leaves, without gaps."""
        return sum(leaf.nbytes for leaf in self.leaves)


def dump_index(index: Index) -> bytes:
    """The index as a sealed object."""
    return seal(
        {
            "format": f"asymcheck-index {VERSION}",
            "run": index.run,
            "step": index.at.step,
            "attempt": index.at.attempt,
            "rank": index.rank,
            "world": index.world,
            "created_s": index.created_s,
            "metrics": {k: dump_metric(v) for k, v in index.metrics.items()},
            "versions": dict(index.versions),
            "leaves": [_dump_leaf(leaf) for leaf in index.leaves],
            "aliases": dict(index.aliases),
            "chunks": [
                [c.at, c.nbytes, c.pack, c.offset, c.stored_bytes, c.codec, c.hash]
                for c in index.chunks
            ],
            "packs": [{"name": p.name, "bytes": p.nbytes} for p in index.packs],
            **({"losses": [_dump_loss(loss) for loss in index.losses]} if index.losses else {}),
            **dump_standing(index.base, index.fidelity),
        }
    )


def dump_standing(base: Base | None, fidelity: str) -> dict[str, Any]:
    """The members ``base`` and ``fidelity`` of an index or a manifest, where there are any."""
    return {
        **({"base": [*base.at, base.hash]} if base is not None else {}),
        **({"fidelity": fidelity} if fidelity != EXACT else {}),
    }


def _dump_loss(loss: Loss) -> list[Any]:
    errors = [dump_metric(loss.max_error), dump_metric(loss.mean_error)]
    return [loss.kind, loss.codec, *errors, loss.nbytes]


def _dump_leaf(leaf: Leaf) -> dict[str, Any]:
    row: dict[str, Any] = {
        "key": leaf.key,
        "dtype": leaf.dtype,
        "shape": leaf.shape,
        "at": leaf.at,
        "bytes": leaf.nbytes,
    }
    if leaf.order:
        row["order"] = leaf.order
    if leaf.piece is not None:
        row["whole"], row["start"] = leaf.piece
    return row


def parse_index(data: bytes, where: str) -> Index:
    """The index that ``data`` holds.

    Raises:
        CorruptCheckpoint: It breaks any rule of the format.
        IncompatibleCheckpoint: It is intact and of a version that is not known here.
    """
    known = [
        "format",
        "run",
        "step",
        "attempt",
        "rank",
        "world",
        "created_s",
        "metrics",
        "versions",
        "leaves",
        "aliases",
        "chunks",
        "packs",
        "losses",
        "base",
        "fidelity",
    ]
    raw = unseal(data, where)
    check_version(raw.get("format"), "asymcheck-index", where)
    get = Fields(raw, where, known)
    at = CheckpointId(get.integer("attempt"), get.integer("step"))
    world = get.integer("world", 1, MAX_RANK + 1)
    rank = get.integer("rank", 0, world - 1)
    packs = parse_objects(get, "packs")
    for serial, pack in enumerate(packs, 1):
        if pack.name != pack_name(at, rank, serial):
            raise get.fail(
                f"pack {serial}: expected the name {pack_name(at, rank, serial)!r}, "
                f"found {pack.name!r:.120}"
            )
    leaves = tuple(_parse_leaf(row, where) for row in get.items("leaves"))
    chunks = tuple(_parse_chunk(row, where) for row in get.items("chunks"))
    aliases = get.table("aliases")
    keys = {leaf.key for leaf in leaves}
    if len(keys) != len(leaves):
        raise get.fail("two leaves have the same key")
    for alias, key in aliases.items():
        if alias in keys or not isinstance(key, str) or key not in keys:
            raise get.fail(f"alias {alias!r:.80} of {short(key)}: not one of a leaf")
    _check_geometry(leaves, chunks, packs, where)
    base, fidelity = parse_standing(get, at)
    return Index(
        run=get.text("run"),
        at=at,
        rank=rank,
        world=world,
        created_s=number(get, raw.get("created_s"), "created_s"),
        metrics=parse_metrics(get),
        versions=get.texts("versions"),
        leaves=leaves,
        aliases=aliases,
        chunks=chunks,
        packs=packs,
        losses=tuple(
            _parse_loss(row, where) for row in (get.items("losses") if get.has("losses") else ())
        ),
        base=base,
        fidelity=fidelity,
    )


def parse_standing(get: Fields, at: CheckpointId) -> tuple[Base | None, str]:
    """The members ``base`` and ``fidelity`` of an index or a manifest of that checkpoint."""
    fidelity = get.text("fidelity", _LOSSY) if get.has("fidelity") else EXACT
    if not get.has("base"):
        return None, fidelity
    row = get.items("base")
    if len(row) != 3:
        raise get.fail(f"base: expected [attempt, step, hash], found {short(row)}")
    names = ("attempt", "step", "hash")
    named = Fields(dict(zip(names, row, strict=True)), f"{get.where}: base", names)
    base = CheckpointId(named.integer("attempt"), named.integer("step"))
    if base >= at:
        raise get.fail(f"base: expected an older checkpoint, found {short(row)}")
    return Base(base, named.text("hash", HASH)), fidelity


def _parse_leaf(row: object, where: str) -> Leaf:
    known = ("key", "dtype", "shape", "at", "bytes", "order", "whole", "start")
    get = Fields(row, where, known)
    leaf = Leaf(
        key=get.text("key"),
        dtype=get.text("dtype"),
        shape=get.integers("shape"),
        at=get.integer("at"),
        nbytes=get.integer("bytes"),
        order=get.integers("order") if get.has("order") else (),
        piece=_parse_piece(get) if get.has("whole") or get.has("start") else None,
    )
    if leaf.order and sorted(leaf.order) != list(range(len(leaf.shape))):
        raise get.fail(f"leaf {leaf.key!r:.80}: order {short(leaf.order)} is no permutation")
    if (leaf.key == TREE_KEY) != (leaf.dtype == TREE_DTYPE):
        raise get.fail(f"leaf {leaf.key!r:.80}: dtype {leaf.dtype!r:.40} is out of place")
    if leaf.piece is not None:
        wrong = flaw(leaf.piece, leaf.shape)
        if leaf.order or leaf.key == TREE_KEY:
            wrong = "the tree is none" if leaf.key == TREE_KEY else "it has an order"
        if wrong is not None:
            raise get.fail(f"leaf {leaf.key!r:.80}: no piece of a whole: {wrong}")
    return leaf


def _parse_piece(get: Fields) -> Piece:
    whole = get.integers("whole")
    return Piece(whole, get.integer_or_integers("start"))


def _named(what: str, row: object, names: Sequence[str], where: str) -> Fields:
    """A row, which is a list of that many values, by the names of its places."""
    if not isinstance(row, list) or len(row) != len(names):
        raise CorruptCheckpoint(where, f"{what}: expected {len(names)} values, found {short(row)}")
    return Fields(dict(zip(names, row, strict=True)), where, names)


def _parse_loss(row: Any, where: str) -> Loss:  # noqa: ANN401
    names = ("kind", "codec", "max_error", "mean_error", "bytes")
    get = _named("loss", row, names, where)
    worst, mean = (number(get, row[i], names[i]) for i in (2, 3))
    if not (worst >= 0 and mean >= 0):
        raise get.fail(f"loss: expected errors from 0 on, found {worst} and {mean}")
    return Loss(get.text("kind"), get.text("codec", CODEC), worst, mean, get.integer("bytes"))


def _parse_chunk(row: object, where: str) -> Chunk:
    names = ("at", "nbytes", "pack", "offset", "stored_bytes", "codec", "hash")
    get = _named("chunk", row, names, where)
    chunk = Chunk(
        at=get.integer("at"),
        nbytes=get.integer("nbytes", 1, CHUNK_BYTES),
        pack=get.integer("pack"),
        offset=get.integer("offset"),
        stored_bytes=get.integer("stored_bytes", 1, 2 * CHUNK_BYTES),
        codec=get.text("codec", CODEC),
        hash=get.text("hash", HASH),
    )
    if chunk.codec == RAW and chunk.stored_bytes != chunk.nbytes:
        raise get.fail(f"chunk at {chunk.at}: raw, yet {chunk.stored_bytes} of {chunk.nbytes} B")
    return chunk


def _check_geometry(
    leaves: Sequence[Leaf], chunks: Sequence[Chunk], packs: Sequence[StoredObject], where: str
) -> None:
    at, ends = 0, [0] * len(packs)
    for chunk in chunks:
        if chunk.at < at:
            raise CorruptCheckpoint(where, f"chunk at {chunk.at} overlaps the one before")
        at = chunk.stop
        if chunk.pack >= len(packs):
            raise CorruptCheckpoint(where, f"chunk at {chunk.at}: there is no pack {chunk.pack}")
        if chunk.offset != align_up(ends[chunk.pack], PAGE_BYTES):
            raise CorruptCheckpoint(
                where,
                f"chunk at {chunk.at}: offset {chunk.offset} in its pack, "
                f"expected {align_up(ends[chunk.pack], PAGE_BYTES)}",
            )
        ends[chunk.pack] = chunk.offset + chunk.stored_bytes
    for pack, end in zip(packs, ends, strict=True):
        if pack.nbytes != end:
            raise CorruptCheckpoint(where, f"{pack.name}: chunks end at {end} of {pack.nbytes} B")
    at, i = 0, 0
    for leaf in leaves:
        if leaf.at < at:
            raise CorruptCheckpoint(where, f"leaf {leaf.key!r:.80} overlaps the one before")
        at = leaf.stop
        covered = leaf.at
        while i < len(chunks) and chunks[i].stop <= leaf.at:
            i += 1
        j = i
        while covered < leaf.stop and j < len(chunks) and chunks[j].at <= covered:
            covered = chunks[j].stop
            j += 1
        if leaf.nbytes and covered < leaf.stop:
            raise CorruptCheckpoint(where, f"leaf {leaf.key!r:.80} lies outside the chunks")


def chunks_of(leaf: Leaf, chunks: Sequence[Chunk]) -> list[Chunk]:
    """The chunks that hold bytes of ``leaf``."""
    return [c for c in chunks if leaf.nbytes and c.at < leaf.stop and leaf.at < c.stop]


def parse_objects(get: Fields, name: str) -> tuple[StoredObject, ...]:
    """A list of named objects with their sizes."""
    rows = (Fields(row, get.where, ("name", "bytes")) for row in get.items(name))
    return tuple(StoredObject(r.text("name"), r.integer("bytes")) for r in rows)
