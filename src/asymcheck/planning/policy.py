"""Decisions as data, one policy an axis: numbers in, choices out. Cadences are in ``cadence``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from asymcheck.errors import OptionError
from asymcheck.planning.layout import CHUNK_BYTES

LEAST_RING_BYTES = 2 * CHUNK_BYTES
"""A ring holds the chunk that is written and the one that is copied meanwhile."""


@dataclass(frozen=True, slots=True)
class Admission:
    """How many checkpoints may be under way, with how much memory, and what happens at the limit.

    Attributes:
        max_in_flight: Captured and not yet durable; each holds a copy of the state.
        when_full: ``wait`` blocks the loop until a slot is free, ``skip`` gives this
            checkpoint up, ``raise`` is an error.
        at_once: How many of them are written at a time; the others wait for their turn.
        ring_bytes: Host memory that all of them share, whatever the size of the state: the copy
            goes on as fast as what was written before it is given back. Leaves that are copied at
            the boundary come on top. ``None`` lets each hold a whole image.
    """

    max_in_flight: int = 1
    when_full: Literal["wait", "skip", "raise"] = "wait"
    at_once: int = 1
    ring_bytes: int | None = None

    def __post_init__(self) -> None:
        if type(self.max_in_flight) is not int or self.max_in_flight < 1:
            raise OptionError(
                f"max_in_flight: expected an integer from 1 on, found {self.max_in_flight!r}"
            )
        if self.when_full not in ("wait", "skip", "raise"):
            raise OptionError(
                f"when_full: expected 'wait', 'skip' or 'raise', found {self.when_full!r}"
            )
        if type(self.at_once) is not int or not 1 <= self.at_once <= self.max_in_flight:
            raise OptionError(
                f"at_once: expected an integer from 1 to max_in_flight={self.max_in_flight}, "
                f"found {self.at_once!r}"
            )
        ring: object = self.ring_bytes
        if ring is not None and (type(ring) is not int or ring < LEAST_RING_BYTES):
            raise OptionError(
                f"ring_bytes: expected None or an integer from {LEAST_RING_BYTES} on, two chunks "
                f"of {CHUNK_BYTES} bytes, found {ring!r}"
            )
