"""From the indexes of all ranks to one manifest: whoever sees them all makes the same bytes."""

from __future__ import annotations

from collections.abc import Mapping

from asymcheck.errors import CorruptCheckpoint, IncompatibleCheckpoint, ObjectNotFound
from asymcheck.planning.retention import CheckpointId
from asymcheck.storage.index import Index, parse_index
from asymcheck.storage.names import index_name, manifest_name, parse_name
from asymcheck.storage.sealed import MAX_SEALED_BYTES
from asymcheck.storage.store import Store, read_all

StoredIndex = tuple[Index, bytes]
"""An index, and the bytes that it is stored as."""


def read_index(store: Store, at: CheckpointId, rank: int) -> StoredIndex | None:
    """The index that a rank stored, ``None`` where there is none; blocks.

    Raises:
        CorruptCheckpoint: It is damaged, or that of another checkpoint.
        IncompatibleCheckpoint: It needs a newer release.
        StoreError: The medium failed.
    """
    name = index_name(at, rank)
    try:
        data = read_all(store, name, MAX_SEALED_BYTES)
    except ObjectNotFound:
        return None
    index = parse_index(data, name)
    if (index.at, index.rank) != (at, rank):
        raise CorruptCheckpoint(name, "it is the index of another step, attempt or rank")
    return index, data


def read_indexes(
    store: Store, run: str, at: CheckpointId, world: int, sizes: Mapping[str, int]
) -> tuple[list[StoredIndex], dict[int, str]]:
    """The indexes of all ranks of a checkpoint; blocks. None is read before all are there.

    Args:
        store: Where they are.
        run: Whose they must be.
        at: The checkpoint: of this attempt, so that one of a dead attempt never counts.
        world: How many ranks there are; an index of another world does not count.
        sizes: What lies at its step; packs are durable before their index is.

    Returns:
        The indexes in rank order, and what is missing of which rank; if anything is, the
        indexes are not complete.
    """
    names = [index_name(at, rank) for rank in range(world)]
    missing = {r: f"{name} is not there" for r, name in enumerate(names) if name not in sizes}
    found: list[StoredIndex] = []
    for rank, name in enumerate(names) if not missing else ():
        try:
            stored = read_index(store, at, rank)
        except (CorruptCheckpoint, IncompatibleCheckpoint) as failure:
            missing[rank] = str(failure)
            continue
        if stored is None:
            missing[rank] = f"{name} is not there"
            continue
        index = stored[0]
        lacking = [p.name for p in index.packs if sizes.get(p.name) != p.nbytes]
        if (index.run, index.world) != (run, world):
            missing[rank] = f"{name} is of another run, or of a world of {index.world}"
        elif lacking:
            missing[rank] = f"{lacking[0]}, which {name} lists, is not there or incomplete"
        else:
            found.append(stored)
    return found, missing


def uncommitted(store: Store, attempt: int) -> list[tuple[CheckpointId, int]]:
    """Checkpoints of an attempt that some rank of several has stored and nobody committed, the
    oldest first, each with its world; blocks.
    """
    names = {e.name for e in store.list()}
    ranks: dict[CheckpointId, int] = {}
    for name in names:
        parsed = parse_name(name)
        if parsed is None or parsed.at.attempt != attempt or parsed.rank is None:
            continue
        if parsed.kind == "index":
            ranks[parsed.at] = parsed.rank
    found = []
    for at in sorted(at for at in ranks if manifest_name(at) not in names):
        try:
            stored = read_index(store, at, ranks[at])
        except (CorruptCheckpoint, IncompatibleCheckpoint):
            continue  # of a rank that was killed while it wrote, or of a newer release
        # What a world of one did not commit it may have had a reason to give up.
        if stored is not None and stored[0].world > 1:
            found.append((at, stored[0].world))
    return found
