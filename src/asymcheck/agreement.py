"""What all ranks of a training do alike, at the same step: save, raise, end. One rank just does."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import xxhash

from asymcheck.errors import RankFailed, RankMissing, StateError
from asymcheck.garbage import put_off
from asymcheck.outcomes import warn
from asymcheck.ranks import Announcement, Ranks
from asymcheck.termination import Termination

CHECK_EVERY_SAVES = 50
"""Replicas are compared at the first save and at every so many after it."""


class Agreement:
    """The decisions of one ``Checkpointer`` that must be equal on all ranks. The training thread
    calls it.

    Args:
        ranks: Who has to agree.
        measured: Whether the cadence depends on clocks, so that rank 0 alone asks it.
        termination: Says whether this process was asked to end.
    """

    def __init__(self, ranks: Ranks, measured: bool, termination: Termination) -> None:
        self.ranks = ranks
        self.leaving: Announcement | None = None
        """Set where all ranks end after this step's save."""
        self.dropped: set[int] = set()
        """Steps that another rank gave up."""
        self._measured = measured and ranks.world > 1
        self._termination = termination
        self._failure: BaseException | None = None
        self._drops: list[tuple[int, str]] = []
        self._told_of_end = False
        self._asked_to_save = False
        self._saves = False
        self._saves_begun = 0
        self._check = False
        self._geometry: Mapping[str, Any] | None = None

    # --- once a step ----------------------------------------------------------

    def hear(self, step: int) -> None:
        """Take notice of what was announced for this step.

        Raises:
            CheckpointError: All ranks raise now: the one that failed its own error, the others
                ``RankFailed``.
        """
        if self._termination.asked and not self._told_of_end:
            self._told_of_end = True
            self.ranks.ask("leave", step, "SIGTERM")
        self._saves = False
        for found in self.ranks.look(step):
            if found.what == "raise":
                raise self._take_failure() or RankFailed(
                    (found.rank,), f"rank {found.rank} failed: {found.why}"
                )
            if found.what == "leave":
                self.leaving = found
            elif found.what == "save":
                self._saves, self._asked_to_save = True, False
            elif found.what == "check":
                self._check = True
            else:
                self._hear_drop(found.rank, *json.loads(found.why))

    def due(self, step: int, own: Callable[[], bool]) -> bool:
        """Whether all ranks save after this step, which was heard of before.

        Args:
            step: Updates done so far.
            own: What the cadence of this rank says; where it depends on a clock, that of rank 0
                is announced.
        """
        if not self._measured:
            return own() or self._saves or self.leaving is not None
        if self.ranks.rank == 0 and not self._asked_to_save and own():
            self._asked_to_save = True
            self.ranks.ask("save", step, "its cadence says so")
        return self._saves or self.leaving is not None

    def over(self) -> None:
        """All was said; where this process was asked to end, it ends here."""
        self._termination.over()

    # --- failures ---------------------------------------------------------------

    def fail(self, failure: BaseException, step: int) -> None:
        """Something failed behind the training of this rank: with others, all raise a little
        later, at the same step.

        Raises:
            CheckpointError: It itself, in a world of one.
        """
        if self.ranks.world == 1:
            raise failure
        if self._failure is not None:
            self._failure.add_note(f"also failed: {failure}")
            return
        self._failure = failure
        self.ranks.ask("raise", step, f"{type(failure).__name__}: {failure}")

    def drop(self, dropped: int, why: str, step: int) -> None:
        """This rank gave up a save: the others can not make it whole."""
        if self.ranks.world > 1:
            self._drops.append((dropped, why))  # where no step comes any more
            self.ranks.ask("drop", step, json.dumps([dropped, why]))

    def meet(self, what: str, own: Callable[[], bool], more_s: float) -> bool:
        """Wait for all ranks at the end of something.

        Args:
            what: For messages, as in ``Ranks``.
            own: Returns whether this rank is done; raises what it failed with.
            more_s: As in ``Ranks.each``.

        Returns:
            Whether all are.

        Raises:
            CheckpointError: As ``hear``.
        """
        failure: BaseException | None = None
        done = False
        try:
            done = own()
        except Exception as bad:  # noqa: BLE001  all ranks are told of it below
            failure = bad
        failure = self._take_failure() or failure  # the first one
        told = self.ranks.each(what, self._take_drops, more_s)
        for rank, drops in enumerate(told):
            for step, why in drops:
                self._hear_drop(rank, step, why)
        if isinstance(failure, RankMissing) and failure.step in self.dropped:
            failure = None

        def end() -> bool:
            if failure is not None:
                raise failure
            return done

        try:
            return all(self.ranks.each(what, end))
        finally:
            failure = None  # its traceback knows this frame, which would outlive us all

    def _take_drops(self) -> list[tuple[int, str]]:
        drops, self._drops = self._drops, []
        return drops

    def _hear_drop(self, rank: int, step: int, why: str) -> None:
        if rank != self.ranks.rank and step not in self.dropped:
            self.dropped.add(step)
            warn(f"rank {rank}: {why}")

    def _take_failure(self) -> BaseException | None:
        failure, self._failure = self._failure, None
        return failure

    # --- what is equal on all ranks -----------------------------------------------

    def compare(
        self,
        step: int,
        geometry: Callable[[], Mapping[str, Any]],
        samples: Callable[[], Mapping[str, Any]],
    ) -> None:
        """Compare what ranks hold together, before it is saved; blocks at the first and each
        fiftieth save, and at the one after a structure changed.

        Args:
            step: Of the save.
            geometry: Key to what all ranks must say of it: the shape of the whole.
            samples: Key to a sample of the values of a replica.

        Raises:
            StateError: Ranks differ; names the first key and both ranks. All raise it.
            CheckpointError: One of the two raised; as ``Ranks.each``.
        """
        if self.ranks.world == 1:
            return
        if self._check or self._saves_begun % CHECK_EVERY_SAVES == 0:
            self._check = False
            check_alike(self.ranks, f"structure at the save of step {step}", geometry)
            check_alike(self.ranks, f"replicas at the save of step {step}", samples)
        self._saves_begun += 1

    def notice(self, step: int, geometry: Mapping[str, Any]) -> None:
        """Take notice of the structure that was just saved, the same object where it is as before:
        a changed one is compared at the next save.
        """
        if self._geometry is not None and geometry is not self._geometry:
            self.ranks.ask("check", step, "its structure changed")
        self._geometry = geometry


def check_alike(ranks: Ranks, what: str, own: Callable[[], Mapping[str, Any]]) -> None:
    """Compare key by key what each rank has; one short word each where all is equal.

    Raises:
        StateError: Two ranks differ. All raise it.
        RankFailed: One does not answer, or has nothing to compare.
    """
    found: dict[str, Any] = {}

    @put_off()
    def digest() -> str:
        found.update(own())
        return xxhash.xxh3_128_hexdigest(json.dumps(found, sort_keys=True).encode())

    if len(set(ranks.each(what, digest))) == 1:
        return
    tables = ranks.exchange(what, found)
    for rank, table in enumerate(tables[1:], 1):
        for key in sorted(tables[0].keys() | table.keys()):
            one, other = tables[0].get(key, "nothing"), table.get(key, "nothing")
            if one != other:
                raise StateError(
                    key,
                    f"{what}: ranks 0 and {rank} should have the same, found {one} on rank 0 "
                    f"and {other} on rank {rank}",
                )
