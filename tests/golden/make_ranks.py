"""Makes the golden checkpoints of two ranks. Run once; what it made is committed and never changes.

python tests/golden/make_ranks.py NEW_DIRECTORY
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from asymcheck.codec import table
from asymcheck.decoding import Decoding
from asymcheck.planning.layout import Extent, lay_out
from asymcheck.planning.pieces import Piece
from asymcheck.planning.retention import CheckpointId
from asymcheck.storage.flush import Encoded, flush
from asymcheck.storage.index import Base, Index, Leaf, dump_index
from asymcheck.storage.local import LocalStore
from asymcheck.storage.manifest import make_manifest, parse_manifest
from asymcheck.storage.names import index_name, manifest_name
from asymcheck.storage.repository import Repository, create_repository

WORLD = 2
BIG = 16_384  # 64 KiB: the least that has a chunk of its own
WHOLES = {"rows": (5, 4), "columns": (4, 6), "flat": (3, 5), "short": (1, 3), "scalar": ()}


class Part(NamedTuple):
    """A leaf before it has a place."""

    array: np.ndarray
    piece: Piece | None = None


def wholes(step: int) -> dict[str, np.ndarray]:
    """Every array that the ranks share, as one process would have it."""
    found = {
        key: (np.arange(np.prod(shape, dtype=int)) + 100 * i + step)
        for i, (key, shape) in enumerate(WHOLES.items())
    }
    found["big"] = np.arange(2 * BIG) % 512 + np.repeat([0, step], BIG)
    shapes = WHOLES | {"big": (2, BIG)}
    return {key: value.astype("float32").reshape(shapes[key]) for key, value in found.items()}


def box(whole: np.ndarray, start: Sequence[int], shape: Sequence[int]) -> Part:
    """A box of a whole."""
    slices = tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))
    return Part(np.array(whole[slices]), Piece(whole.shape, tuple(start)))


def parts(rank: int, step: int) -> dict[str, Part]:
    """What one of the ranks holds: shards, a flat range, an empty shard, a replica, its own."""
    whole = wholes(step)
    flat = whole["flat"].reshape(-1)[8 * rank : 8 + 7 * rank]
    found = {
        "rows": box(whole["rows"], (3 * rank, 0), (3 - rank, 4)),
        "columns": box(whole["columns"], (0, 3 * rank), (4, 3)),
        "flat": Part(flat, Piece((3, 5), 8 * rank)),
        "short": box(whole["short"], (rank, 0), (1 - rank, 3)),
        "own": Part(np.full(4, 10 * step + rank, "int64")),
        "big": box(whole["big"], (rank, 0), (1, BIG)),
    }
    if rank == 1:
        found["scalar"] = box(whole["scalar"], (), ())
    tree = {"items": {key: {"kind": "tensor", "key": key} for key in (*whole, "own")}, "rng": {}}
    found[""] = Part(np.frombuffer(json.dumps(tree).encode(), "uint8"))
    return found


def write_index(
    repository: Repository,
    at: CheckpointId,
    rank: int,
    found: Mapping[str, Part],
    base: Base | None = None,
    below: Mapping[str, bytes] | None = None,
) -> tuple[Index, bytes]:
    """Store the packs and the index of one rank; ``big`` is compressed, or a delta where a
    base is given."""
    data = {key: part.array.tobytes() for key, part in found.items()}
    layout = lay_out([len(raw) for raw in data.values()])
    image, leaves = bytearray(layout.image_bytes), []
    for (key, part), place in zip(found.items(), layout.leaves, strict=True):
        image[place.start : place.stop] = data[key]
        dtype = part.array.dtype.name if key else "json"
        leaf = Leaf(key, dtype, part.array.shape, place.start, place.nbytes)
        leaves.append(leaf._replace(piece=part.piece))
    big = next(leaf for leaf in leaves if leaf.key == "big")

    def encode(chunk: Extent) -> Encoded:
        raw = memoryview(image)[chunk.start : chunk.stop]
        if chunk.start != big.at:
            return Encoded(raw, "raw")
        codec = table.by_label("zstd1+shuffle" if base is None else "delta+zstd1+shuffle")
        encoding = codec.encode(raw, "float32", memoryview((below or {}).get("big", b"")))
        assert encoding is not None
        return Encoded(bytes(encoding.data), codec.name)

    flushed = flush(repository.store, at, rank, layout.chunks, encode)
    index = Index(
        run=repository.run, at=at, rank=rank, world=WORLD, created_s=0.0, metrics={}, versions={},
        leaves=tuple(sorted(leaves, key=lambda leaf: (leaf.at, leaf.stop))),
        aliases={"tied": "rows"}, chunks=flushed.chunks, packs=flushed.packs, base=base,
    )  # fmt: skip
    return store_index(repository, index)


def store_index(repository: Repository, index: Index) -> tuple[Index, bytes]:
    """Store an index in its place."""
    stored = dump_index(index)
    repository.store.write(index_name(index.at, index.rank), [stored])
    return index, stored


def commit(repository: Repository, indexes: Sequence[tuple[Index, bytes]]) -> Base:
    """Store the manifest over the indexes; the checkpoint as a base for others."""
    name = manifest_name(indexes[0][0].at)
    data = make_manifest(indexes)
    repository.store.write(name, [data])
    return Base(indexes[0][0].at, parse_manifest(data, name).hash)


def save(repository: Repository) -> None:
    """Step 1 stands alone; of step 2 rank 1 has a delta."""
    one, two = CheckpointId(1, 1), CheckpointId(1, 2)
    base = commit(repository, [write_index(repository, one, r, parts(r, 1)) for r in range(WORLD)])
    with repository.open(one) as opened:
        index = opened.indexes[1]
        below = {x.key: Decoding(opened).read_leaf(index, x) for x in index.leaves}
    plain = write_index(repository, two, 0, parts(0, 2))
    commit(repository, [plain, write_index(repository, two, 1, parts(1, 2), base, below)])


def altered(index: Index, key: str, **changes: object) -> Index:
    """The index with other words for one of its leaves."""
    leaves = (x._replace(**changes) if x.key == key else x for x in index.leaves)
    return replace(index, leaves=tuple(leaves))


def main(root: Path) -> None:
    """Make the checkpoints, and beside them a list of what the wholes are."""
    socket.gethostname = lambda: "golden"  # a record names its host
    os.getpid = lambda: 1
    time.time = lambda: 0.0
    repository = create_repository(LocalStore(root / "ranks"))
    repository.claim(None)
    save(repository)
    listed = {
        str(step): {k: hashlib.sha256(v.tobytes()).hexdigest() for k, v in wholes(step).items()}
        for step in (1, 2)
    }
    (root / "ranks.json").write_text(json.dumps(listed, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
