"""What can be seen of a training from outside: its root, its slots in shared memory, its beats.

Nothing is asked of the script: the library keeps the step that training is at in the header of
its slots, and a root says which attempts were claimed and from where they went on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from asymcheck.errors import CheckpointError, NoCheckpoint
from asymcheck.handover import left_over, persisters_of
from asymcheck.memory.arena import SHARED_MEMORY, Slot, owner_of, slots_of
from asymcheck.planning.retention import CheckpointId
from asymcheck.storage.names import parse_name
from asymcheck.storage.repository import Repository, open_repository
from asymcheck.storage.store import open_store
from asymcheck.storage.suspects import mark_suspect

T = TypeVar("T")

_LOOK_LIMIT_S = 5.0
_ANSWER_S = 60.0


@dataclass(frozen=True, slots=True)
class Look:
    """What can be seen while it trains.

    Attributes:
        signs: Something that changes whenever training goes on: objects, slots, beats.
        latest_step: The greatest step that a slot or a manifest shows; 0 where none does.
    """

    signs: tuple[object, ...] = ()
    latest_step: int = 0


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
        self._seen = Look()
        self._asking: threading.Thread | None = None

    @property
    def repository(self) -> Repository | None:
        """The root, once a look has seen it."""
        return self._repository

    @property
    def sees(self) -> bool:
        """Whether it was given a root."""
        return self._store is not None

    def look(self) -> Look:
        """What can be seen now; as before where the root does not answer within 5 s."""
        self._seen = self._bounded(self._look, _LOOK_LIMIT_S, self._seen)
        return self._seen

    def _look(self) -> Look:
        if self._store is None:
            return Look()
        if self._repository is None:
            self._repository = open_repository(self._store)
        repository = self._repository
        slots = []
        for path in slots_of(SHARED_MEMORY, repository.run):
            with suppress(OSError, ValueError):
                slot = Slot.open(path)
                slots.append((path.name, int(slot.state), slot.copied_bytes, slot.beat))
                slot.close(unlink=False)
        names = [e.name for e in repository.store.list() if parse_name(e.name)]
        steps = [beat for _, _, _, beat in slots]
        for named in map(parse_name, names):
            if named is not None and named.kind == "manifest":
                steps.append(named.at.step)
        return Look((frozenset(names), tuple(slots)), max(steps, default=0))

    def dead_trainers(self) -> list[int]:
        """Numbers of trainers of this host that are dead and left slots."""
        if self.repository is None:
            return []
        return sorted({owner_of(old.path) for old in left_over(self.repository.run)})

    def persisters(self) -> list[int]:
        """Numbers of persisters that outlived their trainers."""
        if self.repository is None:
            return []
        found = persisters_of(self.repository.run)
        return [persister.pid for persister, trainer in found if not trainer.is_alive]

    def standing(self) -> Standing:
        """What there is; blocks for a minute at most, reads manifests and attempts."""
        late = f"it did not answer within {_ANSWER_S:g} s"
        return self._bounded(self._standing, _ANSWER_S, Standing(problem=late))

    def _standing(self) -> Standing:
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

    def claimed_since(self, began_s: float, attempts: Sequence[int]) -> list[int]:
        """Of attempts that are new in the root those that a start claimed itself: records of
        earlier ones come back from a tier where the root was lost. All, where none looks newer.

        Args:
            began_s: Wall-clock time of the start.
            attempts: Their numbers.
        """
        repository = self.repository
        if repository is None or len(attempts) < 2:
            return list(attempts)

        def read() -> list[int]:
            return [n for n in attempts if repository.attempt(n).started_s >= began_s]

        return self._bounded(read, _ANSWER_S, []) or list(attempts)

    def mark(self, at: CheckpointId, why: str) -> str:
        """Mark a checkpoint suspect; returns why that failed, empty where it did not."""
        repository = self.repository
        if repository is None:
            return "the root cannot be read"
        store = repository.store

        def write() -> str:
            try:
                mark_suspect(store, at, why)
            except CheckpointError as failure:
                return str(failure)
            return ""

        return self._bounded(write, _ANSWER_S, f"it did not answer within {_ANSWER_S:g} s")

    def _bounded(self, work: Callable[[], T], limit_s: float, otherwise: T) -> T:
        """What ``work`` returns; ``otherwise`` where it fails or takes too long: a dead network
        file system blocks whoever touches it for ever, and that must not be the supervisor.
        """
        if self._asking is not None and self._asking.is_alive():
            return otherwise  # it still waits for its answer to an earlier question
        found: list[T] = []

        def ask() -> None:
            with suppress(CheckpointError, OSError):
                found.append(work())

        self._asking = threading.Thread(target=ask, name="asymlab-watch", daemon=True)
        self._asking.start()
        self._asking.join(limit_s)
        return found[0] if found else otherwise
