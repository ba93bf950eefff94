"""The same objects in several stores, nearest first: whatever one cannot give, the next one does.

All copies of an object are equal byte for byte, and hashes tell which of them still are. So every
read says how the bytes are checked, and is tried on one copy after the other until a check
passes: a repository of one store is read in the same way as a hierarchy of many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from time import perf_counter
from typing import Literal, TypeVar

from asymcheck.errors import CheckpointError, CorruptCheckpoint, ObjectNotFound, StoreError
from asymcheck.storage.bounded import within
from asymcheck.storage.lanes import MOST_LANES
from asymcheck.storage.store import Readable, Store, read_all

T = TypeVar("T")

_SLOW_S = 2.0
"""A place that took longer than this to fail is asked after all others from then on."""


@dataclass(frozen=True, slots=True)
class Place:
    """One of the stores that hold copies.

    Attributes:
        name: How it is spoken of, without secrets.
        store: Where the copies are.
        must_answer: Whether nothing is read while it cannot be listed: what only it has would
            count as missing. The root of a writer must.
    """

    name: str
    store: Store
    must_answer: bool = True


@dataclass(frozen=True, slots=True)
class BadCopy:
    """A copy that did not give what was committed.

    Attributes:
        tier: Name of the place.
        name: The object.
        why: What was found.
        kind: ``damaged`` where other bytes came, ``missing`` where none are there, ``unreadable``
            where the medium failed.
        offset: Where the chunk begins in the object, where a chunk was read.
    """

    tier: str
    name: str
    why: str
    kind: Literal["damaged", "missing", "unreadable"]
    offset: int | None = None


@dataclass(frozen=True, slots=True)
class Served:
    """What one place gave.

    Attributes:
        tier: Name of the place.
        nbytes: Bytes that passed their check.
        duration_s: Seconds in which a call of it was under way, those that failed too.
    """

    tier: str
    nbytes: int = 0
    duration_s: float = 0.0


@dataclass
class Notes:
    """What was met while copies were read.

    Attributes:
        served: What each place gave, by its name.
        bad: Copies that did not give what was committed, each once.
        unreachable: Places that could not be listed, each with why.
        listed: What lay in each of several places when all were listed: size in bytes by name.
        slow: Places that took long to fail.

    Several threads may note what they meet.
    """

    served: dict[str, Served] = field(default_factory=dict)
    bad: dict[tuple[str, str, int | None], BadCopy] = field(default_factory=dict)
    unreachable: dict[str, str] = field(default_factory=dict)
    listed: dict[str, dict[str, int]] = field(default_factory=dict)
    slow: set[str] = field(default_factory=set)
    _under_way: dict[str, tuple[int, float]] = field(default_factory=dict, repr=False)
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def add(self, found: BadCopy) -> None:
        """Note a bad copy, once."""
        with self._lock:
            self.bad.setdefault((found.tier, found.name, found.offset), found)

    def begin(self, tier: str) -> None:
        """A call of a place begins."""
        with self._lock:
            others, since_s = self._under_way.get(tier, (0, 0.0))
            self._under_way[tier] = others + 1, since_s if others else perf_counter()

    def end(self, tier: str, nbytes: int) -> None:
        """One has ended: count what it gave, and the time in which any was under way."""
        with self._lock:
            others, since_s = self._under_way[tier]
            self._under_way[tier] = others - 1, since_s
            so_far = self.served.get(tier, Served(tier))
            took_s = 0.0 if others > 1 else perf_counter() - since_s
            self.served[tier] = Served(tier, so_far.nbytes + nbytes, so_far.duration_s + took_s)


class Copies:
    """The same objects in several places.

    Listing is for one thread at a time; several may read.

    Args:
        places: Nearest first, at least one.
        limit_s: How long listing may take, all places at the same time, where there are several.

    Attributes:
        notes: What was met since ``forget``.
    """

    def __init__(self, places: Sequence[Place], limit_s: float = 60.0) -> None:
        self.places = tuple(places)
        self.notes = Notes()
        self._limit_s = limit_s

    @property
    def spoken(self) -> str:
        """Where the objects are, for messages."""
        return " and ".join(place.name for place in self.places)

    def forget(self) -> None:
        """Begin new notes: every place is asked again."""
        self.notes = Notes()

    def only(self, place: Place) -> Copies:
        """The copies of one place alone, with notes of their own."""
        return Copies([place], self._limit_s)

    # --- listing --------------------------------------------------------------

    def sizes(self, prefix: str = "") -> list[dict[str, int]]:
        """What is in each place below a folder: sizes in bytes by name; blocks.

        A place that fails, or does not answer in time, is left out until ``forget``.

        Raises:
            StoreError: One that must answer cannot be listed, or none can.
        """
        asked = [p for p in self.places if p.name not in self.notes.unreachable]
        if len(self.places) == 1:
            return [_sizes(self.places[0].store, prefix)]
        answers = within(
            self._limit_s,
            [partial(_sizes, place.store, prefix) for place in asked],
            [
                f"{place.name}: expected a listing within {self._limit_s:g} s, found none: look at "
                f"its network or mount"
                for place in asked
            ],
        )
        found: dict[str, dict[str, int]] = {}
        first: StoreError | None = None
        for place, answer in zip(asked, answers, strict=True):
            if not isinstance(answer, CheckpointError):
                found[place.name] = answer
                continue
            if place.must_answer or not isinstance(answer, StoreError):
                raise answer
            self.notes.unreachable[place.name] = str(answer)
            first = first or answer
        if not found:
            raise first or StoreError(
                f"no copy can be reached: {self.notes.unreachable}", retryable=True
            )
        if not prefix:
            self.notes.listed = found
        return [found.get(place.name, {}) for place in self.places]

    # --- reading --------------------------------------------------------------

    def read(self, name: str, at_most: int, check: Callable[[bytes], T]) -> T:
        """What ``check`` makes of the nearest copy of a small object that passes it; blocks.

        Args:
            name: The object.
            at_most: The greatest size that it may have, in bytes.
            check: Raises ``CorruptCheckpoint`` where the bytes are not those that were written.

        Raises:
            ObjectNotFound: No place has it.
            CorruptCheckpoint: No copy passes.
            StoreError: The medium failed.
        """

        def work(place: Place) -> tuple[T, int]:
            data = read_all(place.store, name, at_most)
            return check(data), len(data)

        return self._first_good(name, None, work)

    def open(self, stack: ExitStack, name: str, nbytes: int) -> OpenCopies:
        """Open the nearest copy of a large object that has the right size; blocks.

        Args:
            stack: Closes whatever is opened of it, now and later.
            name: The object.
            nbytes: The size that it must have.

        Raises:
            ObjectNotFound: No place has it.
            CorruptCheckpoint: No copy has that size.
            StoreError: The medium failed.
        """
        opened = OpenCopies(self, stack, name, nbytes)
        self._first_good(name, None, lambda place: (opened.at(place), 0))
        return opened

    def _first_good(
        self, name: str, offset: int | None, work: Callable[[Place], tuple[T, int]]
    ) -> T:
        """The result of ``work`` in the nearest place where it does not fail."""
        failures: list[tuple[Place, CheckpointError]] = []
        for place in self._order(name):
            start_s = perf_counter()
            nbytes = 0
            self.notes.begin(place.name)
            try:
                result, nbytes = work(place)
                return result
            except (CorruptCheckpoint, StoreError) as failure:
                failures.append((place, failure))
                self._note(place, name, offset, failure, perf_counter() - start_s)
            finally:
                self.notes.end(place.name, nbytes)
        try:
            raise _worst(name, failures)
        finally:
            del failures  # their tracebacks know this frame, which would keep all above it alive

    def _order(self, name: str) -> list[Place]:
        """Nearest first, without those that did not list it; those that took long to fail last."""
        notes = self.notes
        there = [p for p in self.places if p.name not in notes.unreachable]
        listed = [p for p in there if name in notes.listed.get(p.name, ())]
        return sorted(listed or there, key=lambda place: place.name in notes.slow)

    def _note(
        self,
        place: Place,
        name: str,
        offset: int | None,
        failure: CheckpointError,
        duration_s: float,
    ) -> None:
        found = bad_copy(place.name, name, failure, offset)
        if found.kind == "unreadable" and duration_s > _SLOW_S:
            self.notes.slow.add(place.name)
        self.notes.add(found)


def bad_copy(tier: str, name: str, failure: CheckpointError, offset: int | None = None) -> BadCopy:
    """What a failed read tells of a copy."""
    kind: Literal["damaged", "missing", "unreadable"] = "unreadable"
    if isinstance(failure, ObjectNotFound):
        kind = "missing"
    elif isinstance(failure, CorruptCheckpoint):
        kind = "damaged"
    return BadCopy(tier, name, str(failure), kind, offset)


class OpenCopies:
    """A large object of which one copy is open at least; the others when they are needed.

    Get one from ``Copies.open``. Several threads may read it: a copy in a store that is worth one
    connection is read by one of them at a time.
    """

    def __init__(self, copies: Copies, stack: ExitStack, name: str, nbytes: int) -> None:
        self._copies = copies
        self._stack = stack
        self._name = name
        self._nbytes = nbytes
        self._opened: dict[str, Readable] = {}
        self._opening = Lock()
        self._turn = Lock()

    @property
    def lanes(self) -> int:
        """How many reads of the nearest copy are worth having under way at the same time."""
        order = self._copies._order(self._name)
        return min(order[0].store.capabilities.connections, MOST_LANES) if order else 1

    def at(self, place: Place) -> Readable:
        """The copy in one place.

        Raises:
            ObjectNotFound: There is none.
            CorruptCheckpoint: It has another size.
            StoreError: The medium failed.
        """
        with self._opening:
            found = self._opened.get(place.name)
            if found is None:
                found = self._stack.enter_context(place.store.open(self._name))
                if found.nbytes != self._nbytes:
                    raise CorruptCheckpoint(
                        self._name, f"{found.nbytes} bytes, the manifest says {self._nbytes}"
                    )
                self._opened[place.name] = found
            return found

    def read(self, offset: int, nbytes: int, work: Callable[[Readable], None]) -> None:
        """Do ``work``, which reads and checks, on the nearest copy where it does not fail; blocks.

        Args:
            offset: Where in the object it reads, for what is noted.
            nbytes: How many bytes it reads.
            work: Raises ``CorruptCheckpoint`` where the bytes are not those that were written.

        Raises:
            CorruptCheckpoint: It fails on every copy.
            StoreError: The medium failed.
        """

        def there(place: Place) -> tuple[None, int]:
            alone = place.store.capabilities.connections == 1
            with self._turn if alone else nullcontext():
                work(self.at(place))
            return None, nbytes

        self._copies._first_good(self._name, offset, there)


def _sizes(store: Store, prefix: str) -> dict[str, int]:
    return {entry.name: entry.nbytes for entry in store.list(prefix)}


def _worst(name: str, failures: Sequence[tuple[Place, CheckpointError]]) -> CheckpointError:
    """One failure for all copies: damage before a medium's failure before absence."""

    def weight(failure: CheckpointError) -> int:
        return 2 * isinstance(failure, CorruptCheckpoint) + (
            not isinstance(failure, ObjectNotFound)
        )

    if not failures:
        return StoreError(f"{name}: no place that may have it can be reached", retryable=True)
    found = max((failure for _, failure in failures), key=weight)
    if len(failures) == 1:
        return found
    why = "; ".join(f"{place.name}: {failure}" for place, failure in failures)
    told: CheckpointError
    if isinstance(found, CorruptCheckpoint):
        told = CorruptCheckpoint(found.where, f"no copy is whole: {why}")
    elif isinstance(found, ObjectNotFound):
        told = ObjectNotFound(f"{name} is in no place: {why}")
    else:
        retryable = any(isinstance(f, StoreError) and f.retryable for _, f in failures)
        told = StoreError(f"{name} can be read nowhere: {why}", retryable=retryable)
    told.__cause__ = found
    return told
