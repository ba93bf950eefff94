"""How many ready chunks go into one write.

Chunks are written in order by one writer; a write costs ``α + β·bytes``. A policy only sees what
is ready; ``oracle`` sees the whole trace and is what policies are measured against.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol

from asymcheck.errors import OptionError

Cost = Callable[[int], float]
"""Seconds of one write of so many bytes, such as a ``cost.Linear``."""


class Policy(Protocol):
    """Decides how many of the ready chunks to write now."""

    def take(self, ready_bytes: Sequence[int], *, more_coming: bool) -> int:
        """How many, from the first on.

        Args:
            ready_bytes: Sizes of the chunks that wait, in order.
            more_coming: Whether another one will become ready without a write before it. Where
                the encoders wait for memory that only a write sets free, that is no.

        Returns:
            0 to wait; never 0 when chunks wait and nothing more is coming.
        """
        ...


@dataclass(frozen=True, slots=True)
class Ready:
    """Write what is ready whenever the writer is free, up to a budget. The default.

    Against any schedule of the same chunks, one that knows the future included, it is late by
    at most one write and one α for each write that the budget cut short::

        Ready <= oracle + (α + β·b) + k·α

    with b the bytes of its longest write and k the number of writes after which ready chunks
    were left. Proof: let s be the last time but for the final write that it took all that was
    ready. Every chunk that was left after it, U bytes, became ready after s, the first at a, so
    any schedule ends at or after ``a + α + β·U``. The write begun at s ends at ``e <= s + α +
    β·b``. From ``max(a, e)`` on there is always a chunk to write, and k writes that were cut
    short and the final one follow without a pause: it ends at ``max(a, e) + (k + 1)·α + β·U``.
    Since s < a that is at most the oracle's end plus ``α + β·b + k·α``. Without such an s the
    same holds with e = 0. With a budget that nothing reaches, k = 0.

    Attributes:
        budget_bytes: Of one write; a single chunk may be larger.
    """

    budget_bytes: float = math.inf

    def __post_init__(self) -> None:
        if not self.budget_bytes > 0:
            raise OptionError(f"budget_bytes: expected more than 0, found {self.budget_bytes}")

    def take(self, ready_bytes: Sequence[int], *, more_coming: bool) -> int:
        """See ``Policy``."""
        within = sum(upto <= self.budget_bytes for upto in accumulate(ready_bytes))
        return max(within, min(1, len(ready_bytes)))


@dataclass(frozen=True, slots=True)
class FixedBytes:
    """Gather until a batch is full, then write it: the paper's rule, with the tail written too.

    Attributes:
        nbytes: From how many bytes on a batch is full.
    """

    nbytes: float

    def __post_init__(self) -> None:
        if not self.nbytes > 0:
            raise OptionError(f"batch bytes: expected more than 0, found {self.nbytes}")

    def take(self, ready_bytes: Sequence[int], *, more_coming: bool) -> int:
        """See ``Policy``."""
        for count, upto in enumerate(accumulate(ready_bytes), 1):
            if upto >= self.nbytes:
                return count
        return 0 if more_coming else len(ready_bytes)


def square_root(
    total_bytes: float, chunk_bytes: float, write_latency_s: float, encode_s_per_chunk: float
) -> FixedBytes:
    """The paper's batch (section 4.3): ``B* = sqrt(C̃ · T_d · C̃_i / T_c)``, as a policy.

    It minimises ``(C̃/B)·T_d + (B/C̃_i)·T_c``: a latency for each write, and the time until the
    first batch is full. Where that is no number between one chunk and everything, the nearer
    of the two is taken.

    Args:
        total_bytes: C̃, encoded.
        chunk_bytes: C̃_i, of one encoded chunk.
        write_latency_s: T_d, of a write: α.
        encode_s_per_chunk: T_c.
    """
    for name, value in (("total_bytes", total_bytes), ("chunk_bytes", chunk_bytes)):
        if not 0.0 < value < math.inf:
            raise OptionError(f"{name}: expected a positive number, found {value}")
    for name, value in (
        ("write_latency_s", write_latency_s),
        ("encode_s_per_chunk", encode_s_per_chunk),
    ):
        if not 0.0 <= value < math.inf:
            raise OptionError(f"{name}: expected a number from 0 up, found {value}")
    if encode_s_per_chunk == 0.0:
        return FixedBytes(total_bytes)
    best = math.sqrt(total_bytes * chunk_bytes * (write_latency_s / encode_s_per_chunk))
    return FixedBytes(max(chunk_bytes, min(best, total_bytes)))


class Arrival(NamedTuple):
    """A chunk of a trace.

    Attributes:
        ready_s: When it is encoded; it counts as ready once those before it are too.
        nbytes: Its size then.
    """

    ready_s: float
    nbytes: int


class Write(NamedTuple):
    """One write of a simulation.

    Attributes:
        start_s: When it began.
        stop_s: When it was done.
        chunks: How many.
        nbytes: Of them together.
        left: How many chunks were ready and not taken.
    """

    start_s: float
    stop_s: float
    chunks: int
    nbytes: int
    left: int


def simulate(trace: Sequence[Arrival], policy: Policy, cost: Cost) -> tuple[Write, ...]:
    """What the policy does with a trace; the last write's ``stop_s`` is when all is durable.

    Args:
        trace: Chunks in the order in which they are written.
        policy: What to follow.
        cost: Of one write.

    Raises:
        OptionError: The policy takes nothing though nothing more is coming, or more than there is.
    """
    ready_at = list(accumulate((a.ready_s for a in trace), max))
    writes: list[Write] = []
    at = ready = 0
    now_s = 0.0
    while at < len(trace):
        while ready < len(trace) and ready_at[ready] <= now_s:
            ready += 1
        sizes = [a.nbytes for a in trace[at:ready]]
        more = ready < len(trace)
        count = policy.take(sizes, more_coming=more)
        if not 0 <= count <= len(sizes) or (count == 0 and not more):
            raise OptionError(
                f"{policy}: expected to take {int(not more)} to {len(sizes)} chunks, took {count}"
            )
        if count == 0:
            now_s = ready_at[ready]
            continue
        nbytes = sum(sizes[:count])
        done_s = now_s + cost(nbytes)
        writes.append(Write(now_s, done_s, count, nbytes, len(sizes) - count))
        at, now_s = at + count, done_s
    return tuple(writes)


def oracle(trace: Sequence[Arrival], cost: Cost) -> float:
    """The earliest time at which a trace can be written, by anyone, in seconds; O(n²).

    Exact, by dynamic programming over where writes begin: ``f(j) = min over i < j of
    max(f(i), ready(j)) + cost(bytes of i to j)``. Zero for an empty trace.

    Args:
        trace: Chunks in the order in which they are written.
        cost: Of one write.
    """
    ready_at = list(accumulate((a.ready_s for a in trace), max))
    upto = list(accumulate((a.nbytes for a in trace), initial=0))
    done_s = [0.0]
    for j, ready_s in enumerate(ready_at):
        done_s.append(
            min(max(done_s[i], ready_s) + cost(upto[j + 1] - upto[i]) for i in range(j + 1))
        )
    return done_s[-1]
