"""What stands under a root, seen by its owner: which checkpoints there are, what may go.

No torch here, and no attempt is claimed: a job may be training on the same root meanwhile.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from asymcheck import decoding
from asymcheck.errors import (
    CorruptCheckpoint,
    NoCheckpoint,
    ObjectNotFound,
    OptionError,
    StoreError,
    nearest,
)
from asymcheck.planning.retention import CheckpointId, Retention, abandoned_by, lineage_of
from asymcheck.storage.hierarchy import Hierarchy
from asymcheck.storage.index import TREE_KEY, Index
from asymcheck.storage.listing import Damage, Listing
from asymcheck.storage.manifest import Manifest
from asymcheck.storage.names import attempt_name, manifest_name
from asymcheck.storage.reader import OpenCheckpoint
from asymcheck.storage.repository import Repository
from asymcheck.storage.store import read_all
from asymcheck.storage.suspects import spoken_mark

Standing = Literal[
    "newest", "ok", "suspect", "abandoned", "separate", "foreign", "damaged", "newer"
]
"""``newest`` is what ``restore()`` loads and ``ok`` led to it; ``suspect`` is marked and passed
over; ``abandoned`` lies on a branch that was left by going back; ``separate`` belongs to another
start from nothing, ``foreign`` to another run; ``damaged`` exists no
more; ``newer`` is readable by a newer release only."""

_STEPS_SAID = 20
_MAX_DEPTH = 500


@dataclass(frozen=True, slots=True)
class Row:
    """A checkpoint, or what has the manifest of one.

    Attributes:
        at: Its identity.
        standing: Where it stands.
        manifest: Its manifest, where it is one of this run.
        why: What is wrong with it.
    """

    at: CheckpointId
    standing: Standing
    manifest: Manifest | None = None
    why: str | None = None


def say(at: CheckpointId) -> str:
    """A checkpoint's identity in words."""
    return f"step {at.step} (attempt {at.attempt})"


def rows_of(repository: Repository, listing: Listing, *, only_reading: bool = True) -> list[Row]:
    """Everything that has a manifest, oldest first. Contents are not read.

    Args:
        repository: Where.
        listing: What is there.
        only_reading: Whether a record of an attempt that the medium cannot read may count as
            one without parent.

    Raises:
        StoreError: The medium failed.
    """
    committed = listing.committed
    standings: dict[CheckpointId, Standing] = {}
    if committed:
        newest = max(committed)
        parents = repository.parents(unreadable_too=only_reading)
        standings.update(
            dict.fromkeys(abandoned_by(newest.attempt, parents, committed), "abandoned")
        )
        for at in lineage_of(newest.attempt, parents, committed):
            standings[at] = "suspect" if at in listing.suspects else "ok"
        if good := [at for at, standing in standings.items() if standing == "ok"]:
            standings[max(good)] = "newest"
    rows = [Row(at, standings.get(at, "separate"), m) for at, m in committed.items()]
    rows = [
        replace(row, why=spoken_mark(repository.copies, row.at))
        if row.standing == "suspect"
        else row
        for row in rows
    ]
    rows += [Row(d.at, "newer" if d.newer else "damaged", why=why_of(d)) for d in listing.damaged]
    rows += [Row(at, "foreign") for at in listing.foreign]
    return sorted(rows, key=lambda row: row.at)


def why_of(damage: Damage) -> str:
    """What is wrong, and in which object."""
    return damage.why if damage.where in damage.why else f"{damage.where}: {damage.why}"


# --- reading ----------------------------------------------------------------


def choose(
    hierarchy: Hierarchy, listing: Listing, step: int | None, attempt: int | None
) -> CheckpointId:
    """The checkpoint asked for; of several, the one that ``restore`` would load.

    One of another run is found where both step and attempt are given.

    Raises:
        NoCheckpoint: There is none; names the steps that are there.
        CorruptCheckpoint: It was asked for by name and is damaged.
    """

    def wanted(at: CheckpointId) -> bool:
        return step in (None, at.step) and attempt in (None, at.attempt)

    sources = [hierarchy.lineage(listing), sorted(listing.committed)]
    if step is not None and attempt is not None:
        sources.append(list(listing.foreign))
    for source in sources:
        if found := [at for at in source if wanted(at)]:
            return found[-1]
    for damage in listing.damaged:
        if (step, attempt) != (None, None) and wanted(damage.at):
            raise CorruptCheckpoint(say(damage.at), why_of(damage))
    raise none_such(hierarchy, listing, step, attempt)


def none_such(
    hierarchy: Hierarchy, listing: Listing, step: int | None, attempt: int | None
) -> NoCheckpoint:
    """The error that says what is there instead."""
    what = "checkpoint" if step is None else f"checkpoint of step {step}"
    of = "" if attempt is None else f" of attempt {attempt}"
    steps = sorted({at.step for at in listing.committed if attempt in (None, at.attempt)})
    if steps:
        more = f" and {len(steps) - _STEPS_SAID} more" if len(steps) > _STEPS_SAID else ""
        there = f"steps {', '.join(map(str, steps[:_STEPS_SAID]))}{more} are there"
    elif listing.committed:
        there = f"attempts {sorted({at.attempt for at in listing.committed})} have some"
    else:
        there = "there is none of this run"
    return NoCheckpoint(f"{hierarchy.spoken}: there is no {what}{of}; {there}")


def examine(
    repository: Repository, at: CheckpointId
) -> tuple[Literal["ok", "damaged", "newer", "removed"], list[Damage]]:
    """Read and decode every byte of a checkpoint; blocks.

    Returns:
        The verdict and the findings. ``removed``, without findings: a running job took it
        away meanwhile, which is no damage.
    """
    findings = list(decoding.verify(repository, at))
    if not findings:
        return "ok", []
    try:
        with repository.store.open(manifest_name(at)):
            pass
    except ObjectNotFound:
        return "removed", []
    return "newer" if all(d.newer for d in findings) else "damaged", findings


def tensors_of(index: Index) -> Iterator[dict[str, Any]]:
    """Key, dtype, shape, bytes and number of chunks of each tensor of a rank."""
    starts, stops = [c.at for c in index.chunks], [c.stop for c in index.chunks]
    for leaf in index.leaves:
        if leaf.key != TREE_KEY:
            chunks = bisect_left(starts, leaf.stop) - bisect_right(stops, leaf.at)
            yield {
                "rank": index.rank,
                "key": leaf.key,
                "dtype": leaf.dtype,
                "shape": list(leaf.shape),
                "bytes": leaf.nbytes,
                "chunks": chunks if leaf.nbytes else 0,
            }


def codecs_of(indexes: Sequence[Index]) -> list[dict[str, Any]]:
    """How many chunks each codec stored, and how many bytes of how many, by name."""
    rows: dict[str, dict[str, Any]] = {}
    for chunk in (chunk for index in indexes for chunk in index.chunks):
        row = rows.setdefault(
            chunk.codec, {"codec": chunk.codec, "chunks": 0, "bytes": 0, "stored_bytes": 0}
        )
        row["chunks"] += 1
        row["bytes"] += chunk.nbytes
        row["stored_bytes"] += chunk.stored_bytes
    return [rows[name] for name in sorted(rows)]


def read_state(checkpoint: OpenCheckpoint) -> dict[str, Any]:
    """The tree of rank 0: every value that is no tensor, as tagged JSON.

    Raises:
        CorruptCheckpoint: It is damaged.
        IncompatibleCheckpoint: It is stored with a codec that is not known here.
    """
    index = checkpoint.indexes[0]
    for leaf in index.leaves:
        if leaf.key == TREE_KEY:
            text = decoding.Decoding(checkpoint).read_leaf(index, leaf)
            try:
                tree = json.loads(text, parse_constant=_refuse)
            except (ValueError, RecursionError) as bad:
                raise CorruptCheckpoint("(state)", f"not a state tree: {bad}") from None
            if not isinstance(tree, dict) or _is_deep(tree):
                raise CorruptCheckpoint("(state)", "not a state tree")
            return tree
    raise CorruptCheckpoint("(state)", "there is no state tree")


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _is_deep(tree: object) -> bool:
    """Whether it is nested more deeply than any state: printing would exhaust the stack."""
    level = [tree]
    for _ in range(_MAX_DEPTH):
        inner = [v for v in level if isinstance(v, dict | list) and v]
        if not inner:
            return False
        level = [x for v in inner for x in (v.values() if isinstance(v, dict) else v)]
    return True


def damaged_attempts(repository: Repository) -> Iterator[Damage]:
    """Records of attempts that cannot be read: what they continued from is lost."""
    for number in repository.parents(unreadable_too=True):
        try:
            repository.attempt(number)
        except (CorruptCheckpoint, StoreError) as failure:
            yield Damage(CheckpointId(number, 0), attempt_name(number), str(failure))


# --- pruning ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Wanted:
    """What shall be removed.

    Attributes:
        retention: Checkpoints of the newest lineage that it does not keep.
        abandoned: Branches that were left by going back.
        separate: Checkpoints of other starts from nothing.
        damaged: What is left of damaged checkpoints.
        leftovers: Objects that no manifest names, of attempts before the newest.
    """

    retention: Retention
    abandoned: bool = False
    separate: bool = False
    damaged: bool = False
    leftovers: bool = False


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """What goes and what stays.

    Attributes:
        listing: What was there when it was made.
        attempt: The newest attempt at that time.
        gone: Checkpoints that go.
        kept: Those that stay.
        leftovers: Left-over objects that go.
    """

    listing: Listing
    attempt: int
    gone: Sequence[Row]
    kept: Sequence[Row]
    leftovers: Sequence[str]

    @property
    def stored_bytes(self) -> int:
        """Bytes of the committed checkpoints that go."""
        return sum(row.manifest.stored_bytes for row in self.gone if row.manifest)

    def agreed(self, shown: PrunePlan) -> PrunePlan:
        """This plan, without what an earlier one that was agreed to did not show."""
        same = {(row.at, row.standing) for row in shown.gone}
        gone = [r for r in self.gone if (r.at, r.standing) in same]
        return replace(self, gone=_spare_bases(self.listing, gone))


def plan_prune(repository: Repository, wanted: Wanted) -> PrunePlan:
    """Work out what goes; changes nothing.

    What stays always: the newest checkpoint, the one that the newest attempt continued from
    (it may not have committed yet), the base of every delta that stays, everything of another
    run, and what only a newer release can read.

    Raises:
        OptionError: The metric is recorded in no checkpoint.
        CorruptCheckpoint: A record of an attempt is damaged, so that other starts cannot be
            told from this one.
        StoreError: The medium failed; what cannot be read is not known to be damaged.
    """
    attempt = repository.newest_attempt()  # before the survey: a later one may start meanwhile
    listing = repository.survey()
    rows = rows_of(repository, listing, only_reading=False)
    metrics = {at: m.metrics for at, m in listing.committed.items()}
    _check_monitor(wanted.retention.monitor, metrics)
    lineage = [row.at for row in rows if row.standing in ("ok", "newest")]
    stays = {*wanted.retention.kept(lineage, metrics), repository.parents().get(attempt)}
    going: set[Standing] = {"ok"}
    if wanted.abandoned:
        going.add("abandoned")
    if wanted.separate:
        for damage in damaged_attempts(repository):
            raise CorruptCheckpoint(
                damage.where,
                f"which checkpoints belong to another start from nothing cannot be told, so "
                f"nothing was removed. {why_of(damage)}",
            )
        going.add("separate")
    if wanted.damaged:
        going.add("damaged")
    gone = [row for row in rows if row.standing in going and row.at not in stays]
    gone = _spare_bases(listing, gone)
    for row in gone:
        if row.standing == "damaged":
            read_all(repository.store, manifest_name(row.at))
    return PrunePlan(
        listing,
        attempt,
        gone,
        [row for row in rows if row not in gone],
        listing.leftovers_before(attempt) if wanted.leftovers else [],
    )


def _spare_bases(listing: Listing, gone: Sequence[Row]) -> list[Row]:
    spared = set(listing.spare_bases([row.at for row in gone]))
    return [row for row in gone if row.at in spared]


def _check_monitor(
    monitor: str | None, metrics: Mapping[CheckpointId, Mapping[str, float]]
) -> None:
    names = sorted({name for recorded in metrics.values() for name in recorded})
    if monitor is not None and monitor not in names:
        raise OptionError(
            f"monitor: expected one of the recorded metrics {names}, found "
            f"{monitor!r}{nearest(monitor, names)}"
        )


def prune(repository: Repository, plan: PrunePlan, *, verify: bool) -> None:
    """Remove what ``plan`` says; manifests first, so that nothing is ever half there.

    Args:
        repository: Where.
        plan: What.
        verify: Whether to read the newest checkpoint before committed ones are removed.

    Raises:
        CorruptCheckpoint: The newest checkpoint is damaged; nothing was removed.
        StoreError: The medium failed; what was not removed can be pruned again.
    """
    committed = [row.at for row in plan.gone if row.at in plan.listing.committed]
    if committed and verify:
        chosen = [row.at for row in plan.kept if row.standing == "newest"]
        newest = max(chosen or plan.listing.committed)
        for damage in decoding.verify(repository, newest):
            raise CorruptCheckpoint(
                say(newest),
                f"the newest checkpoint is damaged, so nothing was removed: an older one may be "
                f"all that can be loaded. {why_of(damage)}",
            )
    if plan.leftovers:
        repository.remove_leftovers(plan.listing, plan.attempt)
    repository.remove(committed, plan.listing)
    repository.finish()
    for row in plan.gone:
        if row.standing == "damaged":
            repository.discard(row.at)
