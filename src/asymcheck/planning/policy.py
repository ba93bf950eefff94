"""Decisions as data, one policy an axis: numbers in, choices out. Cadences are in ``cadence``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from asymcheck.errors import OptionError


@dataclass(frozen=True, slots=True)
class Admission:
    """How many checkpoints may be under way, and what happens at the limit.

    Attributes:
        max_in_flight: Captured and not yet durable; each holds a copy of the state.
        when_full: ``wait`` blocks the loop until a slot is free, ``skip`` gives this
            checkpoint up, ``raise`` is an error.
    """

    max_in_flight: int = 1
    when_full: Literal["wait", "skip", "raise"] = "wait"

    def __post_init__(self) -> None:
        if type(self.max_in_flight) is not int or self.max_in_flight < 1:
            raise OptionError(
                f"max_in_flight: expected an integer from 1 on, found {self.max_in_flight!r}"
            )
        if self.when_full not in ("wait", "skip", "raise"):
            raise OptionError(
                f"when_full: expected 'wait', 'skip' or 'raise', found {self.when_full!r}"
            )
