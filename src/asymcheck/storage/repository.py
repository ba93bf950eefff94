"""Committed checkpoints over any store: what exists, who may write, what may go.

A checkpoint exists if and only if its manifest parses and hashes to itself and every index
and pack that it names has the stated length. Nothing else is consulted: no directory name,
no pointer file, no modification time. Writing goes packs, index, manifest; removing goes the
other way round.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from asymcheck.errors import (
    CorruptCheckpoint,
    NoCheckpoint,
    ObjectNotFound,
    RecoveryError,
    StoreError,
    SupersededWriter,
)
from asymcheck.planning.retention import (
    CheckpointId,
    Parents,
    Retention,
    abandoned_by,
    lineage_of,
)
from asymcheck.storage.committing import (
    StoredIndex,
    read_index,
    read_indexes,
    uncommitted,
)
from asymcheck.storage.copies import Place
from asymcheck.storage.hierarchy import Hierarchy
from asymcheck.storage.index import Index, dump_index
from asymcheck.storage.listing import (
    Listing,
    as_base,
    is_there,
    same_checkpoint,
    sizes_at,
    wrong_length,
)
from asymcheck.storage.manifest import (
    EXACT,
    Attempt,
    Base,
    Manifest,
    dump_attempt,
    make_manifest,
    parse_manifest,
    standing_of,
)
from asymcheck.storage.names import (
    ATTEMPTS_FOLDER,
    MAX_ATTEMPT,
    attempt_name,
    index_name,
    manifest_name,
    parse_name,
    step_folder,
)
from asymcheck.storage.runs import make_run, read_run
from asymcheck.storage.store import Store, delete_each, read_all, write_whole

_log = logging.getLogger(__name__)

_STARTS = 1000  # more jobs than will ever start at the same moment


Hold = Callable[[Listing, Parents], Iterable[CheckpointId]]
"""Which committed checkpoints must not go yet."""


def nothing_held(listing: Listing, parents: Parents) -> Iterable[CheckpointId]:
    """Leaves retention free."""
    return ()


class Repository(Hierarchy):
    """The checkpoints under one root: a hierarchy of one place, and writing. Calls block; several
    threads may commit and retain.

    Get one from ``open_repository`` or ``create_repository``.

    Attributes:
        claims: Attempts that this writer has tried to take since the latest one that it got,
            that one included: a record of theirs is no newer job.
        hold: Says what retention leaves for now, whatever it keeps.
    """

    def __init__(self, store: Store, run: str) -> None:
        super().__init__([Place(store.url, store)], run)
        self.store = store
        self._condemned: list[str] = []
        self._removing = threading.Lock()
        self.claims: list[Attempt] = []
        self.hold: Hold = nothing_held

    # --- writing ------------------------------------------------------------

    def greatest_attempt(self) -> int:
        """The greatest number that any record or any object of a checkpoint has.

        Not only the records count: they may have been removed, and a number that some checkpoint
        has is never given again.
        """
        named = [n.at.attempt for e in self.store.list() if (n := parse_name(e.name))]
        return max([self.newest_attempt(), *named])

    def claim(self, parent: CheckpointId | None, above: int = 0) -> Attempt:
        """Become the writer of this root: take the next attempt number.

        What earlier attempts left half-written is removed, as far as the store lets it. Their
        writers find out at their next commit.

        Args:
            parent: The checkpoint that this attempt continues from.
            above: The greatest number that was given elsewhere.

        Raises:
            StoreError: The number could not be taken.
        """
        last = max(self.greatest_attempt(), above)
        for number in range(last + 1, min(last + _STARTS, MAX_ATTEMPT) + 1):
            attempt = Attempt(number, parent, socket.gethostname(), os.getpid(), time.time())
            self.claims.append(attempt)
            if self.store.create(attempt_name(number), dump_attempt(attempt)):
                self.claims[:] = [attempt]
                self._tidy(number)
                return attempt
        raise StoreError(
            f"{self.store.url}: no attempt number after {last} could be taken: at most "
            f"{MAX_ATTEMPT} are allowed and {_STARTS} were tried. Move what lies in "
            f"{ATTEMPTS_FOLDER}/ by mistake, or choose another root",
            retryable=False,
        )

    def _tidy(self, attempt: int) -> None:
        try:
            self.store.sweep()
            self.remove_leftovers(self.survey(), attempt)
        except StoreError as failure:
            _log.warning("left-overs stay until the next start: %s", failure)

    def check_writer(self, attempt: int) -> None:
        """Make sure that no newer attempt has claimed the root.

        Raises:
            SupersededWriter: One has.
        """
        newest = self.newest_attempt()
        if newest <= attempt:
            return
        try:
            other = self.attempt(newest)
            if other in self.claims:
                return  # taken by this writer, in a call that failed after it
            who = f" by process {other.pid} on {other.host}"
        except (CorruptCheckpoint, ObjectNotFound):
            who = ""
        raise SupersededWriter(
            f"{self.store.url}: attempt {newest} was started{who} after this one (attempt "
            f"{attempt}). Two jobs must not write to one root: stop this one, or give it "
            f"a root of its own. Committed checkpoints are intact."
        )

    def commit(
        self, index: Index, base: CheckpointId | None = None, fidelity: str = EXACT
    ) -> Manifest:
        """Make a flushed checkpoint exist: write the index, then the manifest.

        Args:
            index: Of a world of one; its packs are durable.
            base: What its deltas are made against: committed, exact and no delta itself; or of
                fidelity ``excp``, where this one is too.
            fidelity: ``exact``, ``moments``, ``aggressive`` or ``excp``.

        Raises:
            SupersededWriter: A newer attempt has claimed the root; nothing was committed.
            NoCheckpoint: The base is not there (any more); nothing was committed.
            CorruptCheckpoint: The base, or what it stands on, is damaged; nothing was committed.
            OptionError: The base is a delta or lossy; nothing was committed.
        """
        named = None if base is None else as_base(self.store, base, fidelity)
        return self._write_manifest([(index, self.write_index(index))], named, fidelity)

    def write_index(self, index: Index) -> bytes:
        """Say that a rank's packs are durable: from now on any process may commit.

        In a world of several ranks nothing of what the index lists may be removed any more, but
        by retention after the commit or by a newer attempt.

        Returns:
            The bytes that it is stored as.
        """
        data = dump_index(index)
        write_whole(self.store, index_name(index.at, index.rank), [data])
        return data

    def committed(self, at: CheckpointId) -> Manifest | None:
        """The manifest of a checkpoint, ``None`` where there is none (any more), or none that is
        whole: it follows from the indexes, so it can be written again.
        """
        name = manifest_name(at)
        with suppress(ObjectNotFound, CorruptCheckpoint):
            return parse_manifest(read_all(self.store, name), name)
        return None

    def missing_ranks(self, at: CheckpointId, world: int) -> dict[int, str]:
        """What is missing of which rank before the checkpoint can be committed."""
        return read_indexes(self.store, self.run, at, world, sizes_at(self.store, at))[1]

    def try_commit(self, at: CheckpointId, world: int) -> Manifest | None:
        """Commit a checkpoint if the indexes of all its ranks are there. Any process may, several
        at once: the manifest is a pure function of the indexes.

        Returns:
            The manifest, written now or before; ``None`` while a rank is missing.

        Raises:
            SupersededWriter: A newer attempt has claimed the root; nothing was committed.
            NoCheckpoint: The base is not there (any more); nothing was committed.
            CorruptCheckpoint: The base is damaged, or not the same on all ranks; nothing was
                committed.
        """
        found = self.committed(at)
        if found is not None:
            return found
        sizes = sizes_at(self.store, at)
        indexes, missing = read_indexes(self.store, self.run, at, world, sizes)
        if missing:
            return None
        base, fidelity = standing_of([index for index, _ in indexes])
        if base is not None and as_base(self.store, base.at, fidelity) != base:
            raise CorruptCheckpoint(manifest_name(base.at), "it is another base than it was")
        committed = self._write_manifest(indexes, base, fidelity)
        if wrong_length(committed, sizes_at(self.store, at)) is not None:
            # Committed by another and removed by its retention, after we had looked.
            self.store.delete(manifest_name(at))
            return None
        return committed

    def commit_whole(self) -> list[Manifest]:
        """Commit what all ranks of the newest attempt stored and none committed before all of
        their processes ended. What lacks a rank, or what it stands on, stays as it is.
        """
        done = []
        for at, world in uncommitted(self.store, self.newest_attempt()):
            try:
                manifest = self.try_commit(at, world)
            except RecoveryError as failure:
                _log.warning("step %d stays uncommitted: %s", at.step, failure)
            else:
                done += [manifest] if manifest else []
        return done

    def _write_manifest(
        self, indexes: Sequence[StoredIndex], base: Base | None, fidelity: str
    ) -> Manifest:
        at = indexes[0][0].at
        self.check_writer(at.attempt)
        data = make_manifest(indexes, base=base, fidelity=fidelity)
        name = manifest_name(at)
        committed = parse_manifest(data, name)
        write_whole(self.store, name, [data])
        try:
            self.check_writer(at.attempt)
        except SupersededWriter:
            # It may have taken our objects for left-overs before it could see the manifest.
            is_torn = wrong_length(committed, sizes_at(self.store, at)) is not None
            if is_torn or not (base is None or is_there(self.store, base.at)):
                self.store.delete(name)
                raise
        return committed

    def retain(
        self, newest: CheckpointId, retention: Retention, base: CheckpointId | None = None
    ) -> list[CheckpointId]:
        """Remove what need not be kept, now that ``newest`` is committed.

        Only committed checkpoints of this run go: branches that its attempt left behind, and what
        ``retention`` does not keep of its lineage, itself too where newer ones overtook it. What a
        delta that stays stands on stays, and ``base``, for the next; and suspects, which do not
        count. Packs go at the next call.

        Returns:
            The checkpoints removed.
        """
        # What cannot be removed is told at the end: it must not keep the rest from going.
        with self._removing:
            self._condemned, failure = delete_each(self.store, self._condemned)
            listing, parents = self.survey(), self.parents()
            lineage = lineage_of(newest.attempt, parents, listing.committed)
            lineage = [at for at in lineage if at not in listing.suspects]
            kept = retention.kept(lineage, {at: m.metrics for at, m in listing.committed.items()})
            kept |= frozenset(self.hold(listing, parents))
            gone = [c for c in lineage if c not in kept]
            gone += abandoned_by(newest.attempt, parents, listing.committed)
            gone = listing.spare_bases([c for c in gone if c != base])
            self.remove(gone, listing)
        if failure is not None:
            raise failure
        return gone

    def remove(self, gone: Sequence[CheckpointId], listing: Listing) -> None:
        """Remove the manifests of committed checkpoints; their packs go at ``finish``.

        Deltas go before their base, and none goes on which one that stays stands.
        """
        first: StoreError | None = None
        below = {at: len(listing.bases_of(at)) for at in gone}
        for depth in sorted(set(below.values()), reverse=True):
            now = [at for at in listing.spare_bases(gone) if below[at] == depth]
            left, failure = delete_each(self.store, [manifest_name(at) for at in now])
            first = first or failure
            gone = [at for at in gone if manifest_name(at) not in left]
            for at in (at for at in now if manifest_name(at) not in left):
                indexes = [stored.name for stored, _ in listing.committed[at].indexes]
                packs = [stored.name for stored in listing.committed[at].packs]
                if len(indexes) > 1:
                    # At once: another rank that sees them all would commit it once more.
                    indexes, failure = delete_each(self.store, indexes)
                    first = first or failure
                self._condemned += indexes + packs
        if first is not None:
            raise first

    def remove_leftovers(self, listing: Listing, before: int) -> list[str]:
        """Remove the left-overs of attempts older than ``before``; returns their names."""
        names = listing.leftovers_before(before)
        for name in names:
            self.store.delete(name)
        return names

    def discard(self, at: CheckpointId, rank: int = 0, world: int = 1) -> None:
        """Remove what a rank wrote of a checkpoint that could not be committed.

        With several ranks only its own objects go, and none once its index is there whole: then
        another may commit at any moment. What is left goes when a newer attempt is claimed.
        """
        names = [e.name for e in self.store.list(step_folder(at.step))]
        names = [name for name in names if same_checkpoint(name, at)]
        if world > 1:
            with suppress(CorruptCheckpoint):
                if read_index(self.store, at, rank) is not None:
                    return
            names = [n for n in names if (p := parse_name(n)) is not None and p.rank == rank]
        for name in sorted(names, key=lambda n: n != manifest_name(at)):
            self.store.delete(name)

    def finish(self) -> None:
        """Remove the objects of checkpoints whose manifests are gone."""
        with self._removing:
            self._condemned, failure = delete_each(self.store, self._condemned)
        if failure is not None:
            raise failure


# --- opening ----------------------------------------------------------------


def open_repository(store: Store) -> Repository:
    """Open what is there, for reading.

    Raises:
        NoCheckpoint: There is no repository.
        OptionError: The place holds something else.
        CorruptCheckpoint: Its ``FORMAT`` or ``RUN.json`` is damaged.
        IncompatibleCheckpoint: It is of a version that is not known here.
    """
    return Repository(store, read_run(store))


def create_repository(store: Store, run: str | None = None) -> Repository:
    """Open what is there, or make a new repository in an empty place.

    Args:
        store: The place.
        run: Id of the run whose copies it shall hold; ``None`` makes one.

    Raises:
        OptionError: The place holds something else; nothing was changed.
        StoreError: It cannot be written.
    """
    try:
        return open_repository(store)
    except NoCheckpoint:
        make_run(store, run)
        return open_repository(store)
