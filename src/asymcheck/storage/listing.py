"""What a repository held at one moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asymcheck.planning.retention import CheckpointId
from asymcheck.storage.manifest import Manifest
from asymcheck.storage.names import parse_name


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
