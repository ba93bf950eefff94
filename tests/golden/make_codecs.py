"""Makes the golden checkpoints of every codec. What it made is committed and stays; further ones
are added.

python tests/golden/make_codecs.py tests/golden
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import time
from pathlib import Path

import numpy as np

from asymcheck.codec import table
from asymcheck.decoding import Decoding
from asymcheck.planning.layout import align_up, lay_out
from asymcheck.planning.retention import CheckpointId
from asymcheck.storage.index import Chunk, Index, Leaf, Loss, StoredObject
from asymcheck.storage.local import LocalStore
from asymcheck.storage.names import pack_name
from asymcheck.storage.repository import Repository, create_repository
from asymcheck.storage.sealed import digest

SIZE = 16_384  # 64 KiB: the least that has a chunk of its own
KEYS = ("w", "m", "v")
TREE = json.dumps(
    {"items": {key: {"kind": "tensor", "key": key} for key in KEYS}, "rng": {}}
).encode()
STEPS = {
    1: ("exact", None, ("zstd1+shuffle", "lz4+bitshuffle", "zstd1+shuffle")),
    2: ("exact", 1, ("delta+zstd1+shuffle", "delta+lz4+bitshuffle", "raw")),
    3: ("moments", None, ("zstd1+shuffle", "q8-signed", "q8-log")),
    4: ("aggressive", 1, ("topk", "q4-signed", "q4-log")),
    5: ("excp", 1, ("excp-residual", "excp-moment", "excp-moment")),
    6: ("excp", 5, ("excp-residual", "excp-moment", "excp-moment")),
}
"""Fidelity, step of the base, and the label of the codec of each leaf."""


def state(step: int) -> dict[str, np.ndarray]:
    """Parameters and moments that compress well, so that the files stay small."""
    at = np.arange(SIZE) % 512
    m = ((at % 37) - 18) / 1000 * step
    w = 1 + at / 4096
    w[::64] += (step - 1) / 1000
    return {key: value.astype(np.float32) for key, value in (("w", w), ("m", m), ("v", m * m))}


def save(repository: Repository, step: int) -> None:
    """Commit one checkpoint."""
    fidelity, under, labels = STEPS[step]
    at = CheckpointId(1, step)
    base = None if under is None else CheckpointId(1, under)
    arrays, below = state(step), {} if base is None else leaves_of(repository, base)
    data = [*(arrays[key].tobytes() for key in KEYS), TREE]
    layout = lay_out([len(raw) for raw in data])
    codecs = dict(zip(KEYS, labels, strict=True))
    leaves, parts = [], {}
    for key, raw, place in zip((*KEYS, ""), data, layout.leaves, strict=True):
        dtype, shape = ("float32", (SIZE,)) if key else ("json", (len(raw),))
        leaves.append(Leaf(key, dtype, shape, place.start, len(raw)))
        parts[place.start] = (key, raw)
    pack, chunks, losses = bytearray(), [], []
    for extent in layout.chunks:
        key, raw = parts[extent.start]
        codec = table.by_label(codecs.get(key, "raw"))
        encoding = codec.encode(memoryview(raw), "float32", memoryview(below.get(key, b"")))
        assert encoding is not None, key
        stored = bytes(encoding.data)
        pack += bytes(align_up(len(pack), 4096) - len(pack))
        where = (extent.start, extent.nbytes, 0, len(pack), len(stored))
        chunks.append(Chunk(*where, codec.name, digest(stored)))
        pack += stored
        if not codec.lossless:
            losses.append(
                Loss(key, codec.name, encoding.max_error, encoding.mean_error, extent.nbytes)
            )
    packs = (StoredObject(pack_name(at, 0, 1), len(pack)),)
    repository.store.write(packs[0].name, [pack])
    index = Index(
        run=repository.run, at=at, rank=0, world=1, created_s=0.0, metrics={}, versions={},
        leaves=tuple(sorted(leaves, key=lambda leaf: leaf.at)), aliases={}, chunks=tuple(chunks),
        packs=packs, losses=tuple(losses),
    )  # fmt: skip
    repository.commit(index, base, fidelity)


def leaves_of(repository: Repository, at: CheckpointId) -> dict[str, bytes]:
    """Each leaf as it is decoded."""
    with repository.open(at) as checkpoint:
        decoding, (index,) = Decoding(checkpoint), checkpoint.indexes
        return {leaf.key: decoding.read_leaf(index, leaf) for leaf in index.leaves}


def hashes(repository: Repository, at: CheckpointId) -> dict[str, str]:
    """SHA-256 of each leaf as it is decoded."""
    found = leaves_of(repository, at)
    return {key: hashlib.sha256(data).hexdigest() for key, data in found.items()}


def main(root: Path) -> None:
    """Make the checkpoints, and beside them a list of what they hold."""
    socket.gethostname = lambda: "golden"  # a record names its host
    os.getpid = lambda: 1
    time.time = lambda: 0.0
    repository = create_repository(LocalStore(root / "codecs"))
    if not repository.newest_attempt():
        repository.claim(None)
    committed = repository.survey().committed
    for step in STEPS:
        if CheckpointId(1, step) not in committed:  # what is there stays as it is
            save(repository, step)
    listed = {str(step): hashes(repository, CheckpointId(1, step)) for step in STEPS}
    (root / "codecs.json").write_text(json.dumps(listed, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
