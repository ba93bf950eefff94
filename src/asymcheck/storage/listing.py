"""What a repository held at one moment, and what a delta can stand on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from asymcheck.errors import (
    CorruptCheckpoint,
    IncompatibleCheckpoint,
    NoCheckpoint,
    ObjectNotFound,
    OptionError,
    StoreError,
)
from asymcheck.planning.retention import CheckpointId
from asymcheck.planning.selection import MAX_BASES
from asymcheck.storage.copies import Copies
from asymcheck.storage.manifest import (
    Base,
    Manifest,
    parse_manifest,
    read_manifest,
    unfit_as_base,
)
from asymcheck.storage.names import (
    manifest_name,
    parse_name,
    parse_suspect_name,
    step_folder,
    suspect_name,
)
from asymcheck.storage.store import Store, read_all

_LOOKS = 100  # a bound; each look again means that a writer did something meanwhile


@dataclass(frozen=True, slots=True)
class Damage:
    """A manifest whose checkpoint does not exist, and why; or a finding of ``verify``.

    Attributes:
        at: The checkpoint.
        where: The object, with the byte offset where one is known.
        why: What is wrong.
        keys: The tensors that are hit.
        at_byte: Where the chunk that is hit begins in the object.
        newer: Whether it is intact, and only a newer release can read it.
        unread: Whether it may be whole, and a medium that may have it cannot be reached.
    """

    at: CheckpointId
    where: str
    why: str
    keys: tuple[str, ...] = ()
    at_byte: int | None = None
    newer: bool = False
    unread: bool = False


@dataclass(frozen=True, slots=True)
class Listing:
    """What a repository held at one moment.

    Attributes:
        committed: Existing checkpoints of this run.
        damaged: Manifests of this run (or of none that can be told) that name no existing one.
        foreign: Manifests of other runs: never counted, never removed.
        leftovers: Objects of this format that no manifest names; marks of what exists no more.
        suspects: Existing checkpoints that are marked suspect in the nearest place that has them:
            never chosen unasked.
    """

    committed: Mapping[CheckpointId, Manifest]
    damaged: Sequence[Damage]
    foreign: Sequence[CheckpointId]
    leftovers: Sequence[tuple[CheckpointId, str]]
    suspects: frozenset[CheckpointId] = frozenset()

    def spare_bases(self, gone: Sequence[CheckpointId]) -> list[CheckpointId]:
        """``gone`` without what a committed checkpoint that stays stands on."""
        going = set(gone)
        needed = {b for at in self.committed if at not in going for b in self.bases_of(at)}
        return [at for at in gone if at not in needed]

    def bases_of(self, at: CheckpointId) -> list[CheckpointId]:
        """What a committed checkpoint stands on: its base, that one's base, and so on."""
        return bases_of(self.committed[at], self.committed)

    def leftovers_before(self, attempt: int) -> list[str]:
        """The left-overs that a writer of ``attempt`` or a later one cannot be working on."""
        return [name for at, name in self.leftovers if at.attempt < attempt]


def same_checkpoint(name: str, at: CheckpointId) -> bool:
    """Whether an object of that name belongs to the checkpoint."""
    parsed = parse_name(name)
    return parsed is not None and parsed.at == at


def wrong_length(manifest: Manifest, *sizes: Mapping[str, int]) -> Damage | None:
    """What speaks against a checkpoint: an object that is missing or of another length.

    Args:
        manifest: Its manifest.
        sizes: What lies in each place where a copy of an object may be.
    """
    for stored in manifest.objects:
        there = [size[stored.name] for size in sizes if stored.name in size]
        if stored.nbytes not in there:
            found = there[0] if there else None
            state = "is missing" if found is None else f"has {found} bytes"
            why = f"{stored.name} {state}, the manifest says {stored.nbytes} bytes"
            return Damage(manifest.at, stored.name, why)
    return None


def bases_of(manifest: Manifest, committed: Mapping[CheckpointId, Manifest]) -> list[CheckpointId]:
    """What a checkpoint stands on, the nearest first, as far as it is there."""
    found: list[CheckpointId] = []
    below: Manifest | None = manifest
    while below is not None and below.base is not None:  # each one is older: this ends
        found.append(below.base.at)
        below = committed.get(below.base.at)
    return found


def missing_base(
    manifest: Manifest, committed: Mapping[CheckpointId, Manifest], damaged: Sequence[Damage]
) -> Damage | None:
    """What speaks against a delta: its base is gone, damaged, another one, or not fit for it.

    Args:
        manifest: Of the delta, or of a checkpoint that stands alone.
        committed: All that exists, without older deltas whose own base is missing.
        damaged: All that does not exist any more.
    """
    named = manifest.base
    if named is None:
        return None
    base = committed.get(named.at)
    known = next((d for d in damaged if d.at == named.at), None)
    if base is None:
        what = "is gone" if known is None else f"is damaged: {known.why}"
    elif base.hash != named.hash:
        what = f"is another one than it was: its manifest's hash is {base.hash}, not {named.hash}"
    elif (unfit := unfit_as_base(base, manifest.fidelity)) is not None:
        what = unfit
    elif len(bases_of(manifest, committed)) > MAX_BASES:
        what = f"is one of more than {MAX_BASES} deltas that stand on one another"
    else:
        return None
    why = f"its base, step {named.at.step} (attempt {named.at.attempt}), {what}"
    newer = base is None and known is not None and known.newer
    return Damage(manifest.at, manifest_name(manifest.at), why, newer=newer)


def as_base(store: Store, at: CheckpointId, fidelity: str) -> Base:
    """A checkpoint as the base of a delta of that class, with all that it stands on; blocks.

    Raises:
        NoCheckpoint: One of them is not there.
        CorruptCheckpoint: One of them is damaged.
        OptionError: No delta of that class may stand on it.
    """
    found = below = _read_base(store, at)
    if (unfit := unfit_as_base(found, fidelity)) is not None:
        raise OptionError(
            f"base: expected an exact checkpoint without base, found {manifest_name(at)}: it "
            f"{unfit}"
        )
    for _ in range(MAX_BASES):
        if below.base is None:
            return Base(at, found.hash)
        said = below.base
        below = _read_base(store, said.at)
        if below.hash != said.hash:
            raise CorruptCheckpoint(
                manifest_name(below.at), f"hash is {below.hash}, its delta says {said.hash}"
            )
    raise OptionError(
        f"base: expected one that stands on fewer than {MAX_BASES} others, found "
        f"{manifest_name(at)}: make a key-frame"
    )


def _read_base(store: Store, at: CheckpointId) -> Manifest:
    name = manifest_name(at)
    try:
        manifest = parse_manifest(read_all(store, name), name)
    except ObjectNotFound as failure:
        raise NoCheckpoint(
            f"step {at.step} (attempt {at.attempt}) in {store.url}: expected the base "
            f"of a delta, found nothing: {failure}"
        ) from failure
    problem = wrong_length(manifest, sizes_at(store, at))
    if problem is not None:
        raise CorruptCheckpoint(problem.where, f"base of a delta: {problem.why}")
    return manifest


# --- looking ----------------------------------------------------------------


def survey(copies: Copies, run: str, known: dict[str, Manifest] | None = None) -> Listing:
    """List every place and read every manifest, of its copies the nearest that is whole; blocks.

    What several places have together is there: of a checkpoint each object has to lie somewhere.

    A listing is no snapshot: beside a writer that commits and removes it may show nothing
    at all. So it is made again when something on it was gone, or when it showed nothing
    and an earlier one was different.

    Args:
        copies: Where.
        run: Whose checkpoints count.
        known: Manifests by name that were read before, which never change; those that are read
            now are added.

    Raises:
        StoreError: The medium failed. One manifest that cannot be read, and will not be
            at another try either, is damage.
    """
    before: list[dict[str, int]] | None = None
    for _ in range(_LOOKS):
        sizes = copies.sizes()
        listing, settled = _read_manifests(copies, run, sizes, known)
        if settled and (listing.committed or sizes == before):
            break
        before = sizes
    return listing


def _read_manifests(
    copies: Copies,
    run: str,
    sizes: Sequence[Mapping[str, int]],
    known: dict[str, Manifest] | None,
) -> tuple[Listing, bool]:
    """What the objects of those names and sizes are, and whether all were still there."""
    names = list(dict.fromkeys(name for size in sizes for name in size))
    settled = True
    committed: dict[CheckpointId, Manifest] = {}
    damaged: list[Damage] = []
    foreign: list[CheckpointId] = []
    named: set[str] = set()
    for name in names:
        parsed = parse_name(name)
        if parsed is None or parsed.kind != "manifest":
            continue
        try:
            manifest = _read_manifest(copies, name, known)
        except ObjectNotFound:
            settled = False
            continue
        except (CorruptCheckpoint, IncompatibleCheckpoint, StoreError) as failure:
            if isinstance(failure, StoreError) and failure.retryable:
                raise
            newer = isinstance(failure, IncompatibleCheckpoint)
            damaged.append(Damage(parsed.at, name, str(failure), newer=newer))
            named.update(n for n in names if same_checkpoint(n, parsed.at))
            continue
        named.update((name, *(o.name for o in manifest.objects)))
        if manifest.run != run:
            foreign.append(manifest.at)
            continue
        problem = wrong_length(manifest, *sizes)
        if problem is not None:
            # The listing may have raced with a commit or a removal: look at it alone.
            now = copies.sizes(step_folder(manifest.at.step))
            if not any(name in size for size in now):
                settled = False
                continue
            problem = wrong_length(manifest, *now)
        if problem is None:
            committed[manifest.at] = manifest
        else:
            damaged.append(_or_unread(copies, manifest, problem))
    for at in sorted(committed):  # a base before what stands on it
        manifest = committed[at]
        problem = missing_base(manifest, committed, damaged)
        if problem is None or manifest.base is None:
            continue
        del committed[at]
        if manifest_name(manifest.base.at) not in names and _has_changed(copies, manifest):
            settled = False
            continue
        damaged.append(problem)
    leftovers = [
        (parsed.at, name)
        for name in names
        if name not in named and (parsed := parse_name(name)) is not None
    ]
    # The name of a mark says all that counts: one that cannot be read is one all the same.
    marks = [(of, name) for name in names if (of := parse_suspect_name(name)) is not None]
    leftovers += [(of, name) for of, name in marks if manifest_name(of) not in names]
    listing = Listing(
        {at: committed[at] for at in sorted(committed)},
        sorted(damaged, key=lambda d: d.at),
        sorted(foreign),
        sorted(leftovers),
        frozenset(of for of, _ in marks if of in committed and _is_marked(of, sizes)),
    )
    return listing, settled


def _or_unread(copies: Copies, manifest: Manifest, problem: Damage) -> Damage:
    """What speaks against a checkpoint, where that is not a medium that shows a part of what it
    has: of peers those that are out of reach list nothing.
    """
    nbytes = next(o.nbytes for o in manifest.objects if o.name == problem.where)
    try:
        with ExitStack() as stack:
            copies.open(stack, problem.where, nbytes)
    except (CorruptCheckpoint, ObjectNotFound):
        return problem
    except StoreError as failure:
        return replace(problem, why=str(failure), unread=True)
    return problem  # it came meanwhile


def _is_marked(at: CheckpointId, sizes: Sequence[Mapping[str, int]]) -> bool:
    """Whether the nearest place that has a checkpoint has a mark beside it. So a mark that was
    taken away at home is gone, although a tier that could not be reached since still has it.
    """
    nearest = next((size for size in sizes if manifest_name(at) in size), {})
    return suspect_name(at) in nearest


def _read_manifest(copies: Copies, name: str, known: dict[str, Manifest] | None) -> Manifest:
    found = None if known is None else known.get(name)
    if found is None:
        found = read_manifest(copies, name)
        if known is not None:
            known[name] = found
    return found


def _has_changed(copies: Copies, delta: Manifest) -> bool:
    """Whether a base that was not listed is there now, or its delta is no more."""

    def there(at: CheckpointId) -> bool:
        return any(manifest_name(at) in size for size in copies.sizes(step_folder(at.step)))

    return not there(delta.at) or (delta.base is not None and there(delta.base.at))


def is_there(store: Store, at: CheckpointId) -> bool:
    """Whether there is a manifest of that name."""
    return manifest_name(at) in sizes_at(store, at)


def sizes_at(store: Store, at: CheckpointId) -> dict[str, int]:
    """Every object of all attempts at its step, with its size in bytes."""
    return {e.name: e.nbytes for e in store.list(step_folder(at.step))}
