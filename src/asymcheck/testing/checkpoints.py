"""Checkpoints of plain bytes, for tests of what lies below the state: no tensors needed."""

from __future__ import annotations

from collections.abc import Mapping

from asymcheck.decoding import Decoding
from asymcheck.planning.layout import Extent, lay_out
from asymcheck.planning.retention import CheckpointId
from asymcheck.storage.flush import PACK_BYTES, Encoded, flush
from asymcheck.storage.index import TREE_DTYPE, TREE_KEY, Index, Leaf
from asymcheck.storage.manifest import Manifest
from asymcheck.storage.repository import Repository


def commit_bytes(
    repository: Repository,
    at: CheckpointId,
    values: Mapping[str, bytes],
    *,
    metrics: Mapping[str, float] | None = None,
    pack_bytes: int = PACK_BYTES,
    base: CheckpointId | None = None,
    created_s: float = 0.0,
) -> Manifest:
    """Commit a checkpoint of the given leaves; blocks.

    Args:
        repository: Where to.
        at: Its identity; the attempt must be claimed.
        values: Bytes of each leaf by key; ``""`` is the tree.
        metrics: Recorded with it.
        pack_bytes: When to begin another pack.
        base: What it stands on, though all of it is stored as it is.
        created_s: When it was captured.

    Raises:
        StoreError: The medium failed; what was written stays.
        SupersededWriter: A newer attempt has claimed the root.
    """
    layout = lay_out([len(data) for data in values.values()])
    image = bytearray(layout.image_bytes)
    leaves = []
    for (key, data), extent in zip(values.items(), layout.leaves, strict=True):
        image[extent.start : extent.stop] = data
        dtype = TREE_DTYPE if key == TREE_KEY else "uint8"
        leaves.append(Leaf(key, dtype, (len(data),), extent.start, len(data)))

    def encode(chunk: Extent) -> Encoded:
        return Encoded(memoryview(image)[chunk.start : chunk.stop], "raw")

    flushed = flush(repository.store, at, 0, layout.chunks, encode, pack_bytes=pack_bytes)
    return repository.commit(
        Index(
            run=repository.run,
            at=at,
            rank=0,
            world=1,
            created_s=created_s,
            metrics=metrics or {},
            versions={},
            leaves=tuple(sorted(leaves, key=lambda leaf: (leaf.at, leaf.stop))),
            aliases={},
            chunks=flushed.chunks,
            packs=flushed.packs,
        ),
        base,
    )


def read_bytes(repository: Repository, at: CheckpointId) -> dict[str, bytes]:
    """The leaves of a checkpoint, every byte checked; blocks.

    Raises:
        RecoveryError: It is not there, or damaged.
    """
    with repository.open(at) as checkpoint:
        (index,) = checkpoint.indexes
        decoding = Decoding(checkpoint)
        return {leaf.key: decoding.read_leaf(index, leaf) for leaf in index.leaves}
