"""Ranks that restore together come to the same decisions: what to try, and how it ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from asymcheck.errors import CheckpointError, NoCheckpoint, StoreError
from asymcheck.planning.retention import CheckpointId

Exchange = Callable[[str, Any], list[Any]]
"""Given what is exchanged and a JSON value of this rank, returns those of all ranks, in order."""


def _alone(what: str, mine: Any) -> list[Any]:  # noqa: ANN401
    return [mine]


WELL, GONE, DAMAGED, UNREAD, WRONG = "well", "gone", "damaged", "unread", "wrong"


Look = tuple[list[CheckpointId], list[tuple[int, str, bool]]]
"""Checkpoints to try, best first; steps of those that are passed over, each with why, and whether
that is because a medium cannot be reached."""


@dataclass(frozen=True, slots=True)
class Found:
    """How one try ended, on one rank or on all.

    Attributes:
        kind: Well; or the checkpoint is gone; or damaged; or a medium that may have it whole cannot
            be read; or something else is wrong.
        why: In words.
        touched: Whether live state was overwritten.
        own: What this rank raised.
    """

    kind: str
    why: str = ""
    touched: bool = False
    own: Exception | None = None


class Settling:
    """The ranks of one restore.

    Args:
        rank: This one.
        world: How many there are.
        exchange: How they tell each other; without it this rank asks no other.
    """

    def __init__(self, rank: int, world: int, exchange: Exchange | None) -> None:
        self._leads = rank == 0 or exchange is None
        self._world = world
        self._exchange = exchange or _alone

    def first(self, look: Callable[[], Look]) -> Look:
        """What rank 0 sees.

        Args:
            look: What may be restored, best first, and what is passed over.

        Raises:
            NoCheckpoint: Rank 0 sees none.
            StoreError: It cannot look.
        """
        own: CheckpointError | None = None
        said: dict[str, Any] = {}
        if self._leads:
            try:
                candidates, damaged = look()
                said = {"candidates": candidates, "damaged": damaged}
            except CheckpointError as failure:
                own = failure
                said = {"failed": str(failure), "none": isinstance(failure, NoCheckpoint)}
        first = self._exchange("checkpoints to restore", said)[0]
        if "failed" in first:
            if own is None:
                why = f"rank 0: {first['failed']}"
                own = NoCheckpoint(why) if first["none"] else StoreError(why, retryable=False)
            try:
                raise own
            finally:
                del own  # its traceback knows this frame, which would keep all above it alive
        return (
            [CheckpointId(*at) for at in first["candidates"]],
            [(passed, why, unread) for passed, why, unread in first["damaged"]],
        )

    def settle(self, what: str, mine: Found, at: CheckpointId) -> Found:
        """How a try ended on all ranks: as on the one where it ended worst."""
        said = [mine.kind, mine.why, mine.touched]
        told = [Found(*other) for other in self._exchange(f"{what} of step {at.step}", said)]
        kinds = [found.kind for found in told]
        kind = next(k for k in (WRONG, GONE, UNREAD, DAMAGED, WELL) if k in kinds)
        worst = kinds.index(kind)
        why = told[worst].why
        if self._world > 1 and kind != WELL:
            why = f"rank {worst}: {why}"
        own = mine.own if mine.kind == kind else None
        return Found(kind, why, any(found.touched for found in told), own)
