"""The checkpoints of one run, wherever copies of them lie: what exists, and reading it.

A place is a store that holds copies of the run under the same names. What all places have
together exists: a checkpoint may be whole in one of them, or in none and put together from two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from asymcheck.errors import CorruptCheckpoint, ObjectNotFound, StoreError
from asymcheck.planning.retention import CheckpointId, lineage_of
from asymcheck.storage.copies import BadCopy, Copies, Place
from asymcheck.storage.listing import Listing, survey
from asymcheck.storage.manifest import Attempt, Manifest, parse_attempt
from asymcheck.storage.names import (
    ATTEMPTS_FOLDER,
    attempt_name,
    manifest_name,
    parse_attempt_name,
)
from asymcheck.storage.reader import OpenCheckpoint, open_checkpoint
from asymcheck.storage.runs import RECORD_BYTES


class Hierarchy:
    """The checkpoints of a run in one place or in several. Calls block; one thread at a time.

    Args:
        places: Where copies lie, nearest first.
        run: Id of the run.
        limit_s: How long listing may take where there are several places.

    Attributes:
        run: Id of the run.
        copies: The objects, and notes of what was met while they were read.
        known: Manifests that were read before, where each read is dear; ``None`` to read anew. So
            are the parents of attempts then. Neither ever changes.
    """

    def __init__(self, places: Sequence[Place], run: str, limit_s: float = 60.0) -> None:
        self.run = run
        self.copies = Copies(places, limit_s)
        is_dear = len(places) > 1 or places[0].store.capabilities.durability == "replicated"
        self.known: dict[str, Manifest] | None = {} if is_dear else None
        self._known_parents: dict[int, CheckpointId | None] = {}

    @property
    def spoken(self) -> str:
        """Where it is, for messages."""
        return self.copies.spoken

    def survey(self) -> Listing:
        """List every place and read every manifest; see ``listing.survey``."""
        found = survey(self.copies, self.run, self.known)
        if self.known is not None:  # what is gone is forgotten
            self.known = {manifest_name(at): manifest for at, manifest in found.committed.items()}
        return found

    def parents(self, *, unreadable_too: bool = False) -> dict[int, CheckpointId | None]:
        """What each attempt continued from; a damaged record counts as nothing.

        Args:
            unreadable_too: Whether one that the medium cannot read does as well. Good for
                reading only: a writer could take it for the start of another tree.
        """
        found: dict[int, CheckpointId | None] = {}
        for number in self.attempt_numbers():
            if self.known is not None and number in self._known_parents:
                found[number] = self._known_parents[number]
                continue
            try:
                record = self.attempt(number)
            except (CorruptCheckpoint, ObjectNotFound):
                found[number] = None
            except StoreError as failure:
                if failure.retryable or not unreadable_too:
                    raise
                found[number] = None
            else:
                found[number] = self._known_parents[number] = record.parent
        return found

    def attempt(self, number: int) -> Attempt:
        """The record of an attempt.

        Raises:
            ObjectNotFound: There is none.
            CorruptCheckpoint: It is damaged.
        """
        name = attempt_name(number)

        def checked(data: bytes) -> Attempt:
            found = parse_attempt(data, name)
            if found.number != number:
                raise CorruptCheckpoint(name, f"it is the record of attempt {found.number}")
            return found

        return self.copies.read(name, RECORD_BYTES, checked)

    def newest_attempt(self) -> int:
        """The greatest attempt number that was claimed, 0 where there is none."""
        return max(self.attempt_numbers(), default=0)

    def lineage(
        self, listing: Listing | None = None, attempt: int | None = None
    ) -> list[CheckpointId]:
        """The checkpoints to resume from, oldest first: those that led to the newest one.

        Those of branches that were left behind by rewinding are not among them, nor suspects.

        Args:
            listing: What is there, where that is known already.
            attempt: Whose lineage; ``None`` for that of the newest checkpoint.
        """
        listing = listing or self.survey()
        if not (committed := listing.committed):
            return []
        parents = self.parents(unreadable_too=attempt is None)
        found = lineage_of(attempt or max(committed).attempt, parents, committed)
        return [at for at in found if at not in listing.suspects]

    @contextmanager
    def open(self, at: CheckpointId) -> Iterator[OpenCheckpoint]:
        """Open a checkpoint for reading; see ``open_checkpoint``. Of copies that were listed, those
        that have another length or are missing are noted.
        """
        with open_checkpoint(self.copies, at) as opened:
            below: OpenCheckpoint | None = opened
            while below is not None:
                self._note_lengths(below)
                below = below.base
            yield opened

    def _note_lengths(self, opened: OpenCheckpoint) -> None:
        notes = self.copies.notes
        for place, sizes in notes.listed.items():
            if manifest_name(opened.manifest.at) not in sizes:
                continue
            for stored in opened.manifest.objects:
                found = sizes.get(stored.name)
                if found is None:
                    notes.add(BadCopy(place, stored.name, "is missing", "missing"))
                elif found != stored.nbytes:
                    why = f"{found} bytes, the manifest says {stored.nbytes}"
                    notes.add(BadCopy(place, stored.name, why, "damaged"))

    def attempt_numbers(self) -> list[int]:
        """The numbers of all records, ascending."""
        names = {name for sizes in self.copies.sizes(ATTEMPTS_FOLDER) for name in sizes}
        found = (parse_attempt_name(name) for name in names)
        return sorted(number for number in found if number is not None)
