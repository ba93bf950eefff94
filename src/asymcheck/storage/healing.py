"""What is damaged in one place is written anew from places that have it whole.

A good copy is never written over: it is read once more before, and once more after. Every byte
that is written has passed its check, so a copy is put together from several where none is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from asymcheck.errors import (
    CheckpointError,
    CorruptCheckpoint,
    IncompatibleCheckpoint,
    NoCheckpoint,
    OptionError,
    StoreError,
)
from asymcheck.planning.retention import CheckpointId
from asymcheck.storage.copies import BadCopy, Copies, Place, bad_copy
from asymcheck.storage.hierarchy import Hierarchy
from asymcheck.storage.manifest import FORMAT_LINE, Manifest, parse_attempt, read_manifest
from asymcheck.storage.mirror import parts_of
from asymcheck.storage.names import (
    FORMAT_NAME,
    RUN_NAME,
    manifest_name,
    parse_attempt_name,
    parse_name,
    parse_suspect_name,
)
from asymcheck.storage.reader import OpenCheckpoint, read_same
from asymcheck.storage.runs import RECORD_BYTES, read_run
from asymcheck.storage.sealed import Fields, unseal
from asymcheck.storage.store import Buffer, write_whole

_KINDS = ("pack", "index", "manifest")  # in the order in which they are written


@dataclass(frozen=True, slots=True)
class Healed:
    """What became of a copy that was found to be bad.

    Attributes:
        tier: Name of the place.
        name: The object.
        nbytes: Bytes that were written, 0 where it could not be done.
        why_not: Why it stays as it is, empty where it is whole again.
    """

    tier: str
    name: str
    nbytes: int = 0
    why_not: str = ""


def heal(hierarchy: Hierarchy, bad: Iterable[tuple[str, str]]) -> list[Healed]:
    """Write bad copies anew where the objects can be put together from all copies; blocks.

    Args:
        hierarchy: The places.
        bad: Of each the name of its place and of the object.

    Returns:
        What became of each that still was bad.
    """
    places = {place.name: place for place in hierarchy.copies.places}
    found = []
    for tier, name in sorted(set(bad), key=_in_order):
        if tier not in places:
            continue
        try:
            nbytes = _heal(hierarchy, places[tier], name)
        except CheckpointError as failure:
            found.append(Healed(tier, name, why_not=str(failure)))
        else:
            found += [Healed(tier, name, nbytes)] if nbytes else []
    return found


def _in_order(copy: tuple[str, str]) -> tuple[CheckpointId, int, str, str]:
    tier, name = copy
    parsed = parse_name(name)
    if parsed is None:
        return CheckpointId(0, 0), 0, name, tier
    return parsed.at, _KINDS.index(parsed.kind), name, tier


def _heal(hierarchy: Hierarchy, place: Place, name: str) -> int:
    """Bytes that were written; 0 where nothing is bad."""
    parsed = parse_name(name)
    if parsed is None:
        return _heal_record(hierarchy, place, name)
    with hierarchy.open(parsed.at) as opened:
        _refuse_another(hierarchy.copies.only(place), opened.manifest)
        if what_is_wrong(place, opened, name) is None:
            return 0
        _write(place, name, lambda: _parts(hierarchy.copies, opened, name))
        if what_is_wrong(place, opened, name) is not None:
            raise StoreError(
                f"{place.name}: {name} was written anew and is still not what was committed: look "
                f"at the medium",
                retryable=True,
            )
        if not _is_listed(place, manifest_name(parsed.at)):
            place.store.delete(name)  # retention took the checkpoint away meanwhile
            return 0
        return _nbytes(opened.manifest, hierarchy.copies, name)


def _write(place: Place, name: str, parts: Callable[[], Iterable[Buffer]]) -> None:
    try:
        write_whole(place.store, name, parts())
    except StoreError:
        # Whoever promotes to that place sweeps it once when it begins, on rank 0: what another rank
        # was writing meanwhile is gone.
        write_whole(place.store, name, parts())


def _refuse_another(copies: Copies, manifest: Manifest) -> None:
    """Leave a place alone that holds another checkpoint under that identity."""
    name = manifest_name(manifest.at)
    try:
        found = read_manifest(copies, name)
    except (CorruptCheckpoint, StoreError):
        return  # none, or one that is damaged itself
    if found.hash != manifest.hash:
        raise CorruptCheckpoint(
            f"{copies.spoken}/{name}",
            f"it is another checkpoint of the same identity: its hash is {found.hash}, elsewhere "
            f"{manifest.hash}. Two jobs wrote it that could not see each other",
        )


def what_is_wrong(place: Place, opened: OpenCheckpoint, name: str) -> CheckpointError | None:
    """What is wrong with one place's copy of an object of a checkpoint, ``None`` where it is whole:
    every byte is read. Blocks.
    """
    try:
        for _ in _parts(Copies([place]), opened, name):
            pass
    except (CorruptCheckpoint, StoreError) as failure:
        return failure
    return None


def _parts(copies: Copies, opened: OpenCheckpoint, name: str) -> Iterable[Buffer]:
    """The bytes of an object of a checkpoint out of these copies, each part checked."""
    manifest = opened.manifest
    if name == manifest_name(manifest.at):
        yield read_same(copies, name, manifest.hash)
        return
    for stored, expected in manifest.indexes:
        if name == stored.name:
            yield read_same(copies, name, expected, stored.nbytes)
            return
    for index in opened.indexes:
        for serial, pack in enumerate(index.packs):
            if name == pack.name:
                with ExitStack() as stack:
                    packs = {name: copies.open(stack, name, pack.nbytes)}
                    yield from parts_of(replace(opened, _packs=packs, base=None), index, serial)
                return
    raise CorruptCheckpoint(name, "the manifest does not name it")


def _nbytes(manifest: Manifest, copies: Copies, name: str) -> int:
    found = [stored.nbytes for stored in manifest.objects if stored.name == name]
    return found[0] if found else len(read_same(copies, name, manifest.hash))


def _is_listed(place: Place, name: str) -> bool:
    folder = name.rpartition("/")[0]
    return any(entry.name == name for entry in place.store.list(folder))


# --- what is of no checkpoint ---------------------------------------------------


def _heal_record(hierarchy: Hierarchy, place: Place, name: str) -> int:
    check = _check_of(name, hierarchy.run)
    alone = hierarchy.copies.only(place)
    try:
        alone.read(name, RECORD_BYTES, check)
    except (CorruptCheckpoint, StoreError):
        good = hierarchy.copies.read(name, RECORD_BYTES, check)
        write_whole(place.store, name, [good])
        alone.read(name, RECORD_BYTES, check)
        return len(good)
    return 0


def heal_tops(places: Sequence[Place], limit_s: float) -> bool:
    """Write ``FORMAT`` and ``RUN.json`` anew in each place where they are damaged, as others have
    them; blocks.

    Returns:
        Whether something was written, and nothing is damaged any more.

    Raises:
        CorruptCheckpoint: Such a place holds what is not of this run: it may be somebody else's.
        StoreError: The medium failed.
    """
    runs: dict[str, None] = {}
    damaged = []
    for place in places:
        try:
            runs[read_run(place.store)] = None
        except (CorruptCheckpoint, IncompatibleCheckpoint):
            damaged.append(place)
        except (NoCheckpoint, StoreError, OptionError):
            continue  # it is told by whoever needs it
    if len(runs) != 1:
        return False
    hierarchy = Hierarchy(places, next(iter(runs)), limit_s)
    done = [healed for place in damaged for healed in _heal_top(hierarchy, place)]
    return bool(done) and not any(healed.why_not for healed in done)


def _heal_top(hierarchy: Hierarchy, place: Place) -> list[Healed]:
    names = [entry.name for entry in place.store.list()]
    foreign = [name for name in names if not _is_ours(name)]
    manifests = [name for name in names if (n := parse_name(name)) and n.kind == "manifest"]
    alone = hierarchy.copies.only(place)
    for name in manifests:
        try:
            if read_manifest(alone, name).run != hierarchy.run:
                foreign.append(name)
        except CorruptCheckpoint:
            continue
    if foreign:
        raise CorruptCheckpoint(
            f"{place.name}/{foreign[0]}",
            f"expected objects of run {hierarchy.run} alone, which other tiers hold: the place may "
            f"be somebody else's, so nothing was changed",
        )
    return heal(hierarchy, [(place.name, name) for name in (FORMAT_NAME, RUN_NAME)])


def _is_ours(name: str) -> bool:
    kinds = (parse_attempt_name, parse_name, parse_suspect_name)
    return name in (FORMAT_NAME, RUN_NAME) or any(kind(name) is not None for kind in kinds)


def _check_of(name: str, run: str) -> Callable[[bytes], bytes]:
    """What tells whether a record is whole: it gives back the bytes that it is shown."""

    def check(data: bytes) -> bytes:
        if name == FORMAT_NAME:
            if data != FORMAT_LINE.encode("ascii"):
                raise CorruptCheckpoint(name, f"expected {FORMAT_LINE!r}, found {data!r:.80}")
        elif name == RUN_NAME:
            found = Fields(unseal(data, name), name, ("run",)).text("run")
            if found != run:
                raise CorruptCheckpoint(name, f"it is of run {found:.80}, expected {run}")
        elif parse_attempt(data, name).number != parse_attempt_name(name):
            raise CorruptCheckpoint(name, "it is the record of another attempt")
        return data

    return check


# --- looking for what is bad ------------------------------------------------------


def scan(hierarchy: Hierarchy, place: Place, step: int | None = None) -> Iterator[BadCopy]:
    """Read every byte of one place and yield each object that is not what was committed; blocks.

    Of a checkpoint whose manifest the place has, all objects have to be there.

    Args:
        hierarchy: All places.
        place: Which.
        step: Only checkpoints of this step; ``None`` for all, and what is of no checkpoint.

    Raises:
        StoreError: The place cannot be listed.
    """
    alone = hierarchy.copies.only(place)
    (sizes,) = alone.sizes()
    for name in (
        []
        if step is not None
        else [n for n in (FORMAT_NAME, RUN_NAME) if sizes or n in sizes]
        + sorted(n for n in sizes if parse_attempt_name(n) is not None)
    ):
        try:
            alone.read(name, RECORD_BYTES, _check_of(name, hierarchy.run))
        except (CorruptCheckpoint, StoreError) as failure:
            yield bad_copy(place.name, name, failure)
    for name in sorted(sizes):
        parsed = parse_name(name)
        if parsed and parsed.kind == "manifest" and step in (None, parsed.at.step):
            yield from _scan(hierarchy, place, name)


def _scan(hierarchy: Hierarchy, place: Place, manifest: str) -> Iterator[BadCopy]:
    parsed = parse_name(manifest)
    assert parsed is not None, "it was chosen by its name"
    alone = hierarchy.copies.only(place)
    own: CheckpointError | None = None
    try:
        if read_manifest(alone, manifest).run != hierarchy.run:
            return
    except (CorruptCheckpoint, StoreError) as failure:
        own = failure
        yield bad_copy(place.name, manifest, failure)
    try:
        with hierarchy.open(parsed.at) as opened:
            names = [stored.name for stored in opened.manifest.objects]
            for name in names:
                wrong = what_is_wrong(place, opened, name)
                if wrong is not None:
                    yield bad_copy(place.name, name, wrong)
    except (CorruptCheckpoint, StoreError, NoCheckpoint) as failure:
        # It is whole in no place; what is wrong with it is told once.
        if own is None:
            yield bad_copy(place.name, manifest, failure)
