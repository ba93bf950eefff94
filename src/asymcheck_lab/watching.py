"""What can be seen of a training from outside: its root, its slots in shared memory, its beats.

Nothing is asked of the script: the library keeps the step that training is at in the header of
its slots, and a root says which attempts were claimed and from where they went on.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from asymcheck.errors import CheckpointError, NoCheckpoint
from asymcheck.handover import left_over, living_owners, persisters_of
from asymcheck.memory.arena import SHARED_MEMORY, Slot, slots_of
from asymcheck.planning.retention import CheckpointId
from asymcheck.storage.names import parse_name
from asymcheck.storage.repository import Repository, open_repository
from asymcheck.storage.store import open_store


@dataclass(frozen=True, slots=True)
class Standing:
    """What was there at one moment, while nobody trained.

    Attributes:
        lineage: What a restore would choose from, oldest first.
        committed: All checkpoints.
        sealed: Whole ones in shared memory that are not durable.
        parents: What each attempt went on from.
        problem: Why the root could not be read, empty where it was.
    """

    lineage: tuple[CheckpointId, ...] = ()
    committed: frozenset[CheckpointId] = frozenset()
    sealed: frozenset[CheckpointId] = frozenset()
    parents: Mapping[int, CheckpointId | None] = field(default_factory=dict)
    problem: str = ""

    def tier_of(self, at: CheckpointId) -> str:
        """Where a checkpoint lay that a start went on from."""
        if at in self.committed:
            return "root"
        return "shared memory" if at in self.sealed else "another tier, or finished meanwhile"


class Watch:
    """Looks at one root, again and again; changes nothing, and no failure of the medium gets out.

    Args:
        url: The root, ``None`` to see nothing.

    Raises:
        OptionError: It is no URL of a store that is known.
    """

    def __init__(self, url: str | None) -> None:
        self._store = None if url is None else open_store(url)
        self._repository: Repository | None = None

    @property
    def repository(self) -> Repository | None:
        """The root, once there is one."""
        if self._repository is None and self._store is not None:
            with suppress(CheckpointError):
                self._repository = open_repository(self._store)
        return self._repository

    @property
    def sees(self) -> bool:
        """Whether it was given a root."""
        return self._store is not None

    def signs(self) -> tuple[object, ...]:
        """Something that changes whenever training goes on: commits, slots, beats."""
        repository = self.repository
        if repository is None:
            return ()
        try:
            names = frozenset(e.name for e in repository.store.list() if parse_name(e.name))
        except CheckpointError:
            names = frozenset()
        return names, tuple(self._slots(repository))

    def _slots(self, repository: Repository) -> list[tuple[str, int, int, int]]:
        found = []
        for path in slots_of(SHARED_MEMORY, repository.run):
            with suppress(OSError, ValueError):
                slot = Slot.open(path)
                found.append((path.name, int(slot.state), slot.copied_bytes, slot.beat))
                slot.close(unlink=False)
        return found

    def latest_step(self) -> int:
        """The greatest step that a slot or a manifest shows; 0 where none does."""
        repository = self.repository
        if repository is None:
            return 0
        steps = [beat for _, _, _, beat in self._slots(repository)]
        with suppress(CheckpointError):
            for entry in repository.store.list():
                named = parse_name(entry.name)
                if named is not None and named.kind == "manifest":
                    steps.append(named.at.step)
        return max(steps, default=0)

    def trainers(self) -> list[int]:
        """Numbers of living trainers of this host that own slots."""
        return [] if self.repository is None else living_owners(self.repository.run)

    def persisters(self) -> list[int]:
        """Numbers of persisters that outlived their trainers."""
        if self.repository is None:
            return []
        found = persisters_of(self.repository.run)
        return [persister.pid for persister, trainer in found if not trainer.is_alive]

    def standing(self) -> Standing:
        """What there is; blocks, reads manifests and attempts."""
        if self._store is None:
            return Standing()
        try:
            repository = self._repository = open_repository(self._store)
            listing, parents = repository.survey(), repository.parents(unreadable_too=True)
            lineage = repository.lineage(listing)
        except NoCheckpoint:
            return Standing()
        except CheckpointError as failure:
            return Standing(problem=str(failure))
        sealed = {old.at for old in left_over(repository.run) if old.is_sealed and old.at}
        return Standing(
            tuple(lineage), frozenset(listing.committed), frozenset(sealed), dict(parents)
        )
