"""What a repository held at one moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asymcheck.planning.retention import CheckpointId
from asymcheck.storage.manifest import Manifest
from asymcheck.storage.names import manifest_name, parse_name


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
    """

    at: CheckpointId
    where: str
    why: str
    keys: tuple[str, ...] = ()
    at_byte: int | None = None
    newer: bool = False


@dataclass(frozen=True, slots=True)
class Listing:
    """What a repository held at one moment.

    Attributes:
        committed: Existing checkpoints of this run.
        damaged: Manifests of this run (or of none that can be told) that name no existing one.
        foreign: Manifests of other runs: never counted, never removed.
        leftovers: Objects of this format that no manifest names.
    """

    committed: Mapping[CheckpointId, Manifest]
    damaged: Sequence[Damage]
    foreign: Sequence[CheckpointId]
    leftovers: Sequence[tuple[CheckpointId, str]]

    def spare_bases(self, gone: Sequence[CheckpointId]) -> list[CheckpointId]:
        """``gone`` without what a committed checkpoint that stays is a delta against."""
        going = set(gone)
        needed = {m.base.at for at, m in self.committed.items() if m.base and at not in going}
        return [at for at in gone if at not in needed]

    def leftovers_before(self, attempt: int) -> list[str]:
        """The left-overs that a writer of ``attempt`` or a later one cannot be working on."""
        return [name for at, name in self.leftovers if at.attempt < attempt]


def same_checkpoint(name: str, at: CheckpointId) -> bool:
    """Whether an object of that name belongs to the checkpoint."""
    parsed = parse_name(name)
    return parsed is not None and parsed.at == at


def wrong_length(manifest: Manifest, sizes: Mapping[str, int]) -> Damage | None:
    """What speaks against a checkpoint: an object that is missing or of another length."""
    for stored in manifest.objects:
        found = sizes.get(stored.name)
        if found != stored.nbytes:
            state = "is missing" if found is None else f"has {found} bytes"
            why = f"{stored.name} {state}, the manifest says {stored.nbytes} bytes"
            return Damage(manifest.at, stored.name, why)
    return None


def missing_base(
    manifest: Manifest, committed: Mapping[CheckpointId, Manifest], damaged: Sequence[Damage]
) -> Damage | None:
    """What speaks against a delta: its base is gone, damaged, another one, or itself a delta."""
    named = manifest.base
    if named is None:
        return None
    base = committed.get(named.at)
    known = next((d for d in damaged if d.at == named.at), None)
    if base is None:
        what = "is gone" if known is None else f"is damaged: {known.why}"
    elif base.hash != named.hash:
        what = f"is another one than it was: its manifest's hash is {base.hash}, not {named.hash}"
    elif base.base is not None:
        what = "is a delta itself, which no base may be"
    else:
        return None
    why = f"its base, step {named.at.step} (attempt {named.at.attempt}), {what}"
    newer = base is None and known is not None and known.newer
    return Damage(manifest.at, manifest_name(manifest.at), why, newer=newer)
