"""The objects that decide: manifest, attempt record and format line. See docs/format.md."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asymcheck.errors import CorruptCheckpoint, IncompatibleCheckpoint
from asymcheck.planning.retention import CheckpointId
from asymcheck.storage.copies import Copies
from asymcheck.storage.index import (
    CHAINED,
    Index,
    StoredObject,
    dump_standing,
    parse_objects,
    parse_standing,
)
from asymcheck.storage.index import EXACT as EXACT  # of both an index and a manifest
from asymcheck.storage.index import Base as Base
from asymcheck.storage.names import MAX_RANK, index_name, manifest_name, parse_name
from asymcheck.storage.sealed import (
    HASH,
    MAX_SEALED_BYTES,
    VERSION,
    Fields,
    check_version,
    digest,
    dump_metric,
    number,
    parse_metrics,
    seal,
    short,
    unseal,
)

FORMAT_LINE = f"asymcheck {VERSION}\n"


@dataclass(frozen=True, slots=True)
class Manifest:
    """A committed checkpoint: its indexes, and every object that must be there.

    Attributes:
        run: Id of the run.
        at: The checkpoint.
        created_s: From rank 0's index.
        metrics: From rank 0's index.
        indexes: ``(object, hash of its bytes)`` of each rank, in rank order.
        packs: All packs, in rank order.
        hash: xxh3-128 of the manifest object itself.
        base: What its deltas are made against; ``None`` where it stands alone.
        fidelity: ``exact``, or the class of what lossy codecs may have changed.
        of_ranks: Whether it is of many ranks, or of a rank with pieces of wholes.
    """

    run: str
    at: CheckpointId
    created_s: float
    metrics: Mapping[str, float]
    indexes: tuple[tuple[StoredObject, str], ...]
    packs: tuple[StoredObject, ...]
    hash: str
    base: Base | None = None
    fidelity: str = EXACT
    of_ranks: bool = False

    @property
    def objects(self) -> tuple[StoredObject, ...]:
        """Everything that must be there with the stated length."""
        return (*(o for o, _ in self.indexes), *self.packs)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all objects that it names."""
        return sum(o.nbytes for o in self.objects)


RANKS = "ranks"


def _needs(base: Base | None, fidelity: str, *, of_ranks: bool) -> list[str]:
    """What a reader must know of, in the one order that there is."""
    found = {
        "base": base is not None,
        "lossy": fidelity != EXACT,
        CHAINED: fidelity == CHAINED,
        RANKS: of_ranks,
    }
    return [name for name, needed in found.items() if needed]


FEATURES = frozenset({"base", "lossy", CHAINED, RANKS})
"""Values of a manifest's ``needs`` that this release understands."""


def make_manifest(
    indexes: Sequence[tuple[Index, bytes]], *, base: Base | None = None, fidelity: str = EXACT
) -> bytes:
    """The manifest over all ranks' indexes: a pure function of what it is given.

    Args:
        indexes: Each rank's index and the bytes it is stored as, in rank order.
        base: What the deltas among their chunks are made against, where no index tells it.
        fidelity: ``exact``, or one of ``LOSSY``, where no index tells it.

    Raises:
        CorruptCheckpoint: The indexes tell of different bases, or of different losses.
    """
    first = indexes[0][0]
    base, fidelity = standing_of([i for i, _ in indexes], base, fidelity)
    of_ranks = any(i.of_ranks for i, _ in indexes)
    return seal(
        {
            "format": f"asymcheck {VERSION}",
            "run": first.run,
            "step": first.at.step,
            "attempt": first.at.attempt,
            "created_s": first.created_s,
            "metrics": {k: dump_metric(v) for k, v in first.metrics.items()},
            "needs": _needs(base, fidelity, of_ranks=of_ranks),
            "indexes": [
                {"name": index_name(i.at, i.rank), "bytes": len(data), "hash": digest(data)}
                for i, data in indexes
            ],
            "packs": [{"name": p.name, "bytes": p.nbytes} for i, _ in indexes for p in i.packs],
            **dump_standing(base, fidelity),
        }
    )


def standing_of(
    indexes: Sequence[Index], base: Base | None = None, fidelity: str = EXACT
) -> tuple[Base | None, str]:
    """The one base, and the one class of losses, that the indexes of a checkpoint and what else
    is known of it tell; who has neither agrees with all.

    Raises:
        CorruptCheckpoint: There are two.
    """
    bases = dict.fromkeys(b for b in (base, *(i.base for i in indexes)) if b is not None)
    losses = dict.fromkeys(f for f in (fidelity, *(i.fidelity for i in indexes)) if f != EXACT)
    for what, found in (("base", bases), ("fidelity", losses)):
        if len(found) > 1:
            raise CorruptCheckpoint(
                manifest_name(indexes[0].at), f"its ranks differ in {what}: {short(list(found))}"
            )
    return next(iter(bases), None), next(iter(losses), EXACT)


def parse_manifest(data: bytes, where: str) -> Manifest:
    """The manifest that ``data`` holds.

    Raises:
        CorruptCheckpoint: It breaks any rule of the format.
        IncompatibleCheckpoint: It is intact and needs a newer release.
    """
    raw = unseal(data, where)
    check_version(raw.get("format"), "asymcheck", where)
    needs = [n for n in _listed(raw.get("needs")) if isinstance(n, str)]
    if new := sorted(set(needs) - FEATURES):
        raise IncompatibleCheckpoint(
            f"{where}: needs {new}, which this release does not know: install a newer asymcheck"
        )
    known = (
        "format",
        "run",
        "step",
        "attempt",
        "created_s",
        "metrics",
        "needs",
        "indexes",
        "packs",
        "base",
        "fidelity",
    )
    get = Fields(raw, where, known)
    at = CheckpointId(get.integer("attempt"), get.integer("step"))
    base, fidelity = parse_standing(get, at)
    rows, indexes = get.items("indexes"), []
    of_ranks = len(rows) > 1 or RANKS in needs
    expected = _needs(base, fidelity, of_ranks=of_ranks)
    if get.items("needs") != expected:
        raise get.fail(f"needs: expected {expected}, found {short(raw['needs'])}")
    if not 1 <= len(rows) <= MAX_RANK + 1:
        raise get.fail(f"expected an index per rank, found {len(rows)}")
    for rank, row in enumerate(rows):
        entry = Fields(row, where, ("name", "bytes", "hash"))
        found = StoredObject(entry.text("name"), entry.integer("bytes", 0, MAX_SEALED_BYTES))
        if found.name != index_name(at, rank):
            raise get.fail(
                f"index of rank {rank}: expected {index_name(at, rank)!r}, "
                f"found {found.name!r:.120}"
            )
        indexes.append((found, entry.text("hash", HASH)))
    packs = parse_objects(get, "packs")
    for pack in packs:
        named = parse_name(pack.name)
        if named is None or (named.at, named.kind) != (at, "pack"):
            raise get.fail(f"{pack.name!r:.120} is no pack of this checkpoint")
    if parse_name(where) is not None and where != manifest_name(at):
        raise get.fail(f"it is the manifest of {manifest_name(at)}")
    return Manifest(
        run=get.text("run"),
        at=at,
        created_s=number(get, raw.get("created_s"), "created_s"),
        metrics=parse_metrics(get),
        indexes=tuple(indexes),
        packs=packs,
        hash=digest(data),
        base=base,
        fidelity=fidelity,
        of_ranks=of_ranks,
    )


def read_manifest(copies: Copies, name: str) -> Manifest:
    """The manifest of that name; blocks. Raises like ``Copies.read`` and ``parse_manifest``."""
    return copies.read(name, MAX_SEALED_BYTES, lambda data: parse_manifest(data, name))


def unfit_as_base(base: Manifest, fidelity: str) -> str | None:
    """Why a delta of that class must not stand on this checkpoint; ``None`` where it may.

    A base is a key-frame: exact, and without a base. Only deltas of ``CHAINED`` may stand on one
    another.
    """
    if fidelity == base.fidelity == CHAINED:
        return None
    if base.base is not None:
        return "is a delta itself, which no base may be"
    if base.fidelity != EXACT:
        return f"is lossy ({base.fidelity}), which no base may be"
    return None


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else []


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of the job.

    Attributes:
        number: Counts up from 1.
        parent: The checkpoint that it continues from, ``None`` when from nothing.
        host: Where it runs, for people only.
        pid: Its process, for people only.
        started_s: Wall-clock time, for people only.
    """

    number: int
    parent: CheckpointId | None
    host: str
    pid: int
    started_s: float


def dump_attempt(attempt: Attempt) -> bytes:
    """The record as a sealed object."""
    return seal(
        {
            "attempt": attempt.number,
            "parent": attempt.parent and [attempt.parent.attempt, attempt.parent.step],
            "host": attempt.host,
            "pid": attempt.pid,
            "started_s": attempt.started_s,
        }
    )


def parse_attempt(data: bytes, where: str) -> Attempt:
    """The record that ``data`` holds.

    Raises:
        CorruptCheckpoint: It breaks any rule of the format.
    """
    raw = unseal(data, where)
    get = Fields(raw, where, ("attempt", "parent", "host", "pid", "started_s"))
    parent = None
    if raw.get("parent") is not None:
        pair = get.integers("parent")
        if len(pair) != 2:
            raise get.fail(f"parent: expected [attempt, step], found {short(list(pair))}")
        parent = CheckpointId(*pair)
    return Attempt(
        number=get.integer("attempt", 1),
        parent=parent,
        host=get.text("host"),
        pid=get.integer("pid"),
        started_s=number(get, raw.get("started_s"), "started_s"),
    )


def check_format_line(data: bytes, where: str) -> None:
    """Check the content of ``FORMAT``.

    Raises:
        CorruptCheckpoint: Not a format line.
        IncompatibleCheckpoint: A version that is not known here.
    """
    line = data.decode("ascii", "replace").strip()
    if not re.match(r"asymcheck [0-9]{1,9}\Z", line):
        raise CorruptCheckpoint(where, f"expected {FORMAT_LINE.strip()!r}, found {line!r:.80}")
    check_version(line, "asymcheck", where)
