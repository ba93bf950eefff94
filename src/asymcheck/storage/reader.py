"""A checkpoint that is open for reading: every byte is checked before it is handed on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from asymcheck.errors import CorruptCheckpoint, NoCheckpoint, ObjectNotFound
from asymcheck.planning.layout import PAGE_BYTES, align_up
from asymcheck.planning.retention import CheckpointId
from asymcheck.planning.selection import MAX_BASES
from asymcheck.storage.copies import Copies, OpenCopies
from asymcheck.storage.index import Chunk, Index, Leaf, StoredObject, parse_index
from asymcheck.storage.manifest import (
    RANKS,
    Manifest,
    parse_manifest,
    read_manifest,
    standing_of,
    unfit_as_base,
)
from asymcheck.storage.names import index_name, manifest_name, step_folder
from asymcheck.storage.sealed import MAX_SEALED_BYTES, digest, short
from asymcheck.storage.store import Readable, ReadsHashed, ReadsOnce

_SPOKEN_KEYS = 8


@dataclass(frozen=True, slots=True)
class OpenCheckpoint:
    """A checkpoint with every object open.

    Attributes:
        manifest: Its manifest.
        indexes: The index of each rank.
        base: The checkpoint that its deltas are made against, open as well, with its own.
    """

    manifest: Manifest
    indexes: tuple[Index, ...]
    _packs: Mapping[str, OpenCopies] = field(repr=False)
    base: OpenCheckpoint | None = None

    @property
    def lanes(self) -> int:
        """How many chunks are worth reading at the same time, where they lie nearest."""
        return max((pack.lanes for pack in self._packs.values()), default=1)

    def read(self, index: Index, chunk: Chunk, into: memoryview, *, once: bool = False) -> None:
        """Fill ``into`` with the stored bytes of a chunk and check them; blocks. Of several
        copies the nearest counts that is whole. Several threads may.

        Args:
            index: The rank's index that lists the chunk.
            chunk: The chunk.
            into: ``chunk.stored_bytes`` long, or longer: where it has room for the zeros behind
                the chunk they are read with it. On an error its content is undefined.
            once: Whether nobody else on this host reads them soon: then they need not stay in
                its page cache.

        Raises:
            CorruptCheckpoint: The bytes are not those that were committed.
            StoreError: The medium failed.
        """
        self._packs[index.packs[chunk.pack].name].read(
            chunk.offset,
            chunk.stored_bytes,
            lambda opened: read_chunk(opened, index, chunk, into, once=once),
        )


def read_chunk(
    opened: Readable, index: Index, chunk: Chunk, into: memoryview, *, once: bool = False
) -> None:
    """Fill ``into`` with the stored bytes of a chunk out of one copy of its pack and check them.

    Raises like ``OpenCheckpoint.read``; blocks.
    """
    pack = index.packs[chunk.pack]
    nbytes, end = chunk.stored_bytes, chunk.offset + chunk.stored_bytes
    gap_bytes = max(0, min(align_up(end, PAGE_BYTES), pack.nbytes) - end)
    at_once = into[: nbytes + gap_bytes] if len(into) >= nbytes + gap_bytes else into[:nbytes]
    if isinstance(opened, ReadsHashed):
        at_once = into[:nbytes]
        found = opened.read_hashed(chunk.offset, at_once)
    else:
        if once and isinstance(opened, ReadsOnce):
            opened.read_once(chunk.offset, at_once)
        else:
            opened.readinto(chunk.offset, at_once)
        found = digest(into[:nbytes])
    where = f"{pack.name} at byte {chunk.offset}"
    if found != chunk.hash:
        raise CorruptCheckpoint(
            where,
            f"hash of {chunk.stored_bytes} bytes is {found}, expected {chunk.hash}; "
            f"hit: {spoken(keys_of(index, chunk))}",
        )
    if gap_bytes:
        gap = at_once[nbytes:]
        if not gap:
            gap = memoryview(bytearray(gap_bytes))
            opened.readinto(end, gap)
        if any(gap):
            raise CorruptCheckpoint(where, f"the gap after byte {end} is not zero")


@contextmanager
def open_checkpoint(copies: Copies, at: CheckpointId) -> Iterator[OpenCheckpoint]:
    """Open every object of a checkpoint, and of each that it stands on; retention cannot pull it
    away any more on a medium whose open objects survive their deletion.

    Of each object the nearest copy counts that is whole.

    Raises:
        NoCheckpoint: It does not exist (any more).
        CorruptCheckpoint: Its manifest or an index is damaged, or an object is missing; or its
            base is gone, damaged, another one than it was, or one that it must not have.
        IncompatibleCheckpoint: It needs a newer release.
        StoreError: The medium failed.
    """
    name = manifest_name(at)
    try:
        with ExitStack() as stack:
            opened = _opened(copies, at, stack)
            # Still there: everything opened belongs to it. The base goes later than its deltas.
            read_manifest(copies, name)
            yield opened
    except ObjectNotFound as failure:
        if any(name in size for size in copies.sizes(step_folder(at.step))):
            raise CorruptCheckpoint(name, f"what it names is missing: {failure}") from failure
        raise NoCheckpoint(
            f"step {at.step} (attempt {at.attempt}) in {copies.spoken} is not there: {failure}"
        ) from failure


def _opened(
    copies: Copies, at: CheckpointId, stack: ExitStack, deltas: Sequence[Manifest] = ()
) -> OpenCheckpoint:
    """Open it as what deltas stand on, the nearest last, or (none) for its own sake."""
    name = manifest_name(at)

    def checked(data: bytes) -> Manifest:
        manifest = parse_manifest(data, name)
        named = deltas[-1].base if deltas else None
        if named is not None and manifest.hash != named.hash:
            raise CorruptCheckpoint(name, f"hash is {manifest.hash}, its delta says {named.hash}")
        return manifest

    manifest = copies.read(name, MAX_SEALED_BYTES, checked)
    if deltas and (unfit := unfit_as_base(manifest, deltas[-1].fidelity)) is not None:
        raise CorruptCheckpoint(name, f"it {unfit}")
    base = None
    if manifest.base is not None:
        if len(deltas) == MAX_BASES:
            raise CorruptCheckpoint(name, f"more than {MAX_BASES} deltas stand on one another")
        base = _opened_base(copies, manifest.base.at, stack, (*deltas, manifest))
    indexes = [
        parse_index(read_same(copies, stored.name, expected, stored.nbytes), stored.name)
        for stored, expected in manifest.indexes
    ]
    check_indexes(manifest, indexes)
    packs = {pack.name: copies.open(stack, pack.name, pack.nbytes) for pack in manifest.packs}
    return OpenCheckpoint(manifest, tuple(indexes), packs, base)


def read_same(copies: Copies, name: str, expected: str, at_most: int = MAX_SEALED_BYTES) -> bytes:
    """The bytes of a sealed object that have that hash; blocks. Raises like ``Copies.read``."""

    def checked(data: bytes) -> bytes:
        if digest(data) != expected:
            raise CorruptCheckpoint(name, f"hash is {digest(data)}, the manifest says {expected}")
        return data

    return copies.read(name, at_most, checked)


def _opened_base(
    copies: Copies, at: CheckpointId, stack: ExitStack, deltas: Sequence[Manifest]
) -> OpenCheckpoint:
    spoken_of = f"its base, step {at.step} (attempt {at.attempt}),"
    try:
        return _opened(copies, at, stack, deltas)
    except ObjectNotFound as failure:
        raise ObjectNotFound(f"{spoken_of} is gone: {failure}") from failure
    except CorruptCheckpoint as failure:
        where = manifest_name(deltas[-1].at)
        raise CorruptCheckpoint(where, f"{spoken_of} is damaged: {failure}") from failure


def keys_of(index: Index, chunk: Chunk) -> tuple[str, ...]:
    """Keys of the leaves with bytes in ``chunk``; the tree appears as ``(state)``."""
    hit = (x for x in index.leaves if x.nbytes and x.at < chunk.stop and chunk.at < x.stop)
    return tuple(leaf.key or "(state)" for leaf in hit)


def spoken(keys: Sequence[str]) -> str:
    """A few of the keys, and how many more there are: a chunk may hold tens of thousands."""
    more = len(keys) - _SPOKEN_KEYS
    return ", ".join(keys[:_SPOKEN_KEYS]) + (f" and {more} more" if more > 0 else "")


def check_indexes(manifest: Manifest, indexes: Sequence[Index]) -> None:
    """Check that the indexes are those of the manifest, and list its packs.

    Whether the pieces of a whole cover it is for whoever reads the whole.

    Raises:
        CorruptCheckpoint: They do not belong together.
    """
    name = manifest_name(manifest.at)
    packs: list[StoredObject] = []
    for rank, index in enumerate(indexes):
        if (index.run, index.at, index.rank) != (manifest.run, manifest.at, rank):
            raise CorruptCheckpoint(
                index_name(manifest.at, rank), "it is the index of another run, step or rank"
            )
        if index.world != len(indexes):
            raise CorruptCheckpoint(
                index_name(manifest.at, rank),
                f"made in a world of {index.world}, the manifest lists {len(indexes)}",
            )
        packs += index.packs
    if tuple(packs) != manifest.packs:
        raise CorruptCheckpoint(name, "its packs are not its indexes' packs")
    if manifest.of_ranks != any(index.of_ranks for index in indexes):
        raise CorruptCheckpoint(name, f"its indexes do not agree with {RANKS!r} in its needs")
    told = standing_of(indexes, manifest.base, manifest.fidelity)
    if told != (manifest.base, manifest.fidelity):
        raise CorruptCheckpoint(name, "it is silent on a base or a loss that its indexes tell of")
    check_pieces(indexes)


def check_pieces(indexes: Sequence[Index]) -> None:
    """Check that the ranks of a checkpoint mean the same array by the key of a piece.

    Raises:
        CorruptCheckpoint: Two of them disagree on its whole or its dtype, or one of them has it
            for its own.
    """
    first: dict[str, tuple[int, Leaf]] = {}
    for index in indexes:
        leaves = {leaf.key: leaf for leaf in index.leaves}
        leaves |= {alias: leaves[key] for alias, key in index.aliases.items()}
        for key, leaf in leaves.items():
            rank, known = first.setdefault(key, (index.rank, leaf))
            if _whole_of(leaf) != _whole_of(known):
                raise CorruptCheckpoint(
                    index_name(index.at, index.rank),
                    f"leaf {key!r:.80} is {_whole_spoken(leaf)}, "
                    f"but {_whole_spoken(known)} on rank {rank}",
                )


def _whole_of(leaf: Leaf) -> tuple[str, tuple[int, ...]] | None:
    return leaf.piece and (leaf.dtype, leaf.piece.whole)


def _whole_spoken(leaf: Leaf) -> str:
    if leaf.piece is None:
        return "the rank's own"
    return f"a piece of {leaf.dtype!r:.40} {short(list(leaf.piece.whole))}"
