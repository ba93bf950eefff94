"""Which checkpoints are kept: attempts form a tree, a training run is one path through it.

An *attempt* is one start of the job. It continues from a checkpoint of an earlier attempt
(its ``parent``) or from nothing. The *lineage* of an attempt is the set of checkpoints that
led to its state: its own, its parent's up to the point where it took over, and so on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from asymcheck.errors import OptionError


class CheckpointId(NamedTuple):
    """Identity of a checkpoint. Order is age: the greatest is the newest."""

    attempt: int
    step: int


Parents = Mapping[int, CheckpointId | None]
"""What each attempt continued from; ``None`` for one that started from nothing."""


@dataclass(frozen=True, slots=True)
class Retention:
    """What is kept of a lineage besides its newest checkpoint, which always is.

    Attributes:
        keep_last: The newest so many; ``None`` keeps all.
        keep_every_steps: Also each whose step is a multiple of this.
        keep_best: Also the best so many by ``monitor``.
        monitor: Name of the metric; required by ``keep_best``.
        mode: Whether a small or a large metric is good.

    Raises:
        OptionError: They contradict each other, or are out of range.
    """

    keep_last: int | None = None
    keep_every_steps: int | None = None
    keep_best: int | None = None
    monitor: str | None = None
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        counts = {
            "keep_last": self.keep_last,
            "keep_every": self.keep_every_steps,
            "keep_best": self.keep_best,
        }
        for name, value in counts.items():
            if value is not None and (type(value) is not int or value < 1):
                raise OptionError(f"{name}: expected an integer from 1 on, found {value!r}")
            if value is not None and self.keep_last is None:
                raise OptionError(f"keep_last: expected a number with {name}, found None")
        if (self.keep_best is None) != (self.monitor is None):
            raise OptionError(
                f"keep_best and monitor: expected both or neither, found {self.keep_best!r} and "
                f"{self.monitor!r}"
            )
        if self.monitor is not None and not isinstance(self.monitor, str):
            raise OptionError(f"monitor: expected the name of a metric, found {self.monitor!r}")
        if self.mode not in ("min", "max"):
            raise OptionError(f"mode: expected 'min' or 'max', found {self.mode!r}")

    def kept(
        self, lineage: Iterable[CheckpointId], metrics: Mapping[CheckpointId, Mapping[str, float]]
    ) -> frozenset[CheckpointId]:
        """The members of ``lineage`` that stay.

        Args:
            lineage: Committed checkpoints of the lineage.
            metrics: Their recorded metrics; one without the monitored metric, or with a NaN
                there, is never a best one.
        """
        newest_first = sorted(lineage, reverse=True)
        if self.keep_last is None:
            return frozenset(newest_first)
        kept = set(newest_first[: self.keep_last])
        if self.keep_every_steps is not None:
            kept.update(c for c in newest_first if c.step % self.keep_every_steps == 0)
        if self.keep_best is not None and self.monitor is not None:
            scored = [
                (value if self.mode == "min" else -value, at, c)
                for at, c in enumerate(newest_first)
                if not math.isnan(value := metrics.get(c, {}).get(self.monitor, math.nan))
            ]
            kept.update(c for _, _, c in sorted(scored)[: self.keep_best])
        return frozenset(kept)


def _ancestry(attempt: int, parents: Parents) -> list[tuple[int, float]]:
    """``(attempt, last step that counts)`` from ``attempt`` back to its root."""
    path: list[tuple[int, float]] = [(attempt, math.inf)]
    parent = parents.get(attempt)
    while parent is not None and parent.attempt < path[-1][0]:
        # A branch that began before its parent's own start inherits no more of an older one.
        path.append((parent.attempt, min(parent.step, path[-1][1])))
        parent = parents.get(parent.attempt)
    return path


def lineage_of(
    attempt: int, parents: Parents, committed: Iterable[CheckpointId]
) -> list[CheckpointId]:
    """The checkpoints that led to ``attempt``'s state, oldest first."""
    until = dict(_ancestry(attempt, parents))
    return sorted(c for c in committed if c.step <= until.get(c.attempt, -1))


def abandoned_by(
    attempt: int, parents: Parents, committed: Iterable[CheckpointId]
) -> list[CheckpointId]:
    """Checkpoints of the branches that ``attempt`` left behind by rewinding.

    A checkpoint that shares no ancestor with ``attempt`` belongs to another start from
    nothing: it is not abandoned and never returned.
    """
    root = _ancestry(attempt, parents)[-1][0]
    committed = list(committed)
    live = set(lineage_of(attempt, parents, committed))
    return sorted(
        c
        for c in committed
        if c.attempt <= attempt and c not in live and _ancestry(c.attempt, parents)[-1][0] == root
    )
