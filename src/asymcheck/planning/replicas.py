"""Checkpoints in the memory of other machines: who holds whose, what survives, when to send.

The arithmetic of Gemini (Wang et al.: "GEMINI: Fast Failure Recovery in Distributed Training
with In-Memory Checkpoints", SOSP 2023): placement over machines, the probability that it is
enough, and the interleaving of traffic with the collectives of training. Nothing here sends
anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import comb

from asymcheck.errors import OptionError


def place_replicas(machines: int, replicas: int) -> tuple[tuple[int, ...], ...]:
    """Which machines hold the state of each machine.

    Groups of ``replicas`` machines hold each other's states. Where the groups do not come out
    even, the last whole group and what is left over form a ring, in which each machine's state
    is held by itself and the next ones.

    Args:
        machines: N, from 1 on.
        replicas: m, the machine's own copy counted, from 1 to N.

    Returns:
        For each machine the holders of its state, itself first.

    Raises:
        OptionError: There are no such groups.
    """
    grouped, ring = _parts(machines, replicas)
    found = []
    for machine in range(grouped):
        first = machine - machine % replicas
        others = (m for m in range(first, first + replicas) if m != machine)
        found.append((machine, *others))
    for i in range(ring):
        found.append(tuple(grouped + (i + j) % ring for j in range(replicas)))
    return tuple(found)


def recovery_probability(machines: int, replicas: int, lost: int) -> float:
    """How likely each state is still held by somebody after so many machines are lost at once.

    Exact for ``place_replicas``, every set of lost machines being as likely as any other: the
    sets that hold no whole group, and in the ring no ``replicas`` neighbours, are counted.

    Args:
        machines: N.
        replicas: m.
        lost: k, from 0 to N.

    Raises:
        OptionError: There is no such placement, or so many machines cannot be lost.
    """
    grouped, ring = _parts(machines, replicas)
    _check_lost(machines, lost)
    # survivable[j]: sets of j machines that can be lost, among the parts so far.
    survivable = [1]
    group = [comb(replicas, j) for j in range(replicas)]
    for _ in range(grouped // replicas):
        survivable = _convolve(survivable, group, lost)
    if ring:
        survivable = _convolve(survivable, _survivable_in_ring(ring, replicas), lost)
    count = survivable[lost] if lost < len(survivable) else 0
    return float(Fraction(count, comb(machines, lost)))


def recovery_bound(machines: int, replicas: int, lost: int) -> float:
    """The closed form for groups: 1 for k < m, else max(0, 1 − N·C(N−m, k−m) / (m·C(N, k))).

    Equal to ``recovery_probability`` for m ≤ k < 2m where m divides N, and below it for larger
    k, where a set that holds two whole groups is counted twice.

    Args:
        machines: N.
        replicas: m.
        lost: k, from 0 to N.

    Raises:
        OptionError: As ``recovery_probability``.
    """
    _parts(machines, replicas)
    _check_lost(machines, lost)
    if lost < replicas:
        return 1.0
    fatal = Fraction(
        machines * comb(machines - replicas, lost - replicas), replicas * comb(machines, lost)
    )
    return float(max(Fraction(0), 1 - fatal))


def _parts(machines: int, replicas: int) -> tuple[int, int]:
    """How many machines are in groups, and how many in the ring."""
    if not 1 <= replicas <= machines:
        raise OptionError(
            f"replicas: expected from 1 to the number of machines, {machines}, found {replicas}"
        )
    over = machines % replicas
    ring = replicas + over if over else 0
    return machines - ring, ring


def _check_lost(machines: int, lost: int) -> None:
    if not 0 <= lost <= machines:
        raise OptionError(f"lost: expected from 0 to {machines} machines, found {lost}")


def _survivable_in_ring(ring: int, replicas: int) -> list[int]:
    """Of each size, sets of a ring's machines without ``replicas`` neighbours.

    The ring is shorter than two runs of neighbours, so a set has at most one of them. It
    begins at one of ``ring`` places, behind a machine that is not lost; the machines after its
    first ``replicas`` are free. All of them together have no beginning.
    """
    found = []
    for size in range(ring):
        with_run = ring * comb(ring - replicas - 1, size - replicas) if size >= replicas else 0
        found.append(comb(ring, size) - with_run)
    return found


def _convolve(one: Sequence[int], other: Sequence[int], upto: int) -> list[int]:
    found = [0] * min(len(one) + len(other) - 1, upto + 1)
    for i, a in enumerate(one):
        for j, b in enumerate(other):
            if i + j < len(found):
                found[i + j] += a * b
    return found


# --- traffic ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Link:
    """What a transfer takes: α + size / B.

    Attributes:
        start_s: α, from 0 on.
        bytes_per_s: B, above 0.
    """

    start_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if not (self.start_s >= 0 and self.bytes_per_s > 0):
            raise OptionError(
                f"link: expected start_s from 0 on and bytes_per_s above 0, found "
                f"{self.start_s!r} and {self.bytes_per_s!r}"
            )

    def seconds(self, nbytes: int) -> float:
        """Of one transfer."""
        return self.start_s + nbytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Schedule:
    """Which chunks are sent in which idle span of the network.

    Attributes:
        chunks: For each span the sizes of its chunks in bytes, in the order in which they go.
        spill_s: By how much the last span is overrun: the update waits for so long.
    """

    chunks: tuple[tuple[int, ...], ...]
    spill_s: float


def schedule_chunks(
    nbytes: int, idle_s: Sequence[float], link: Link, *, fill: float, buffer_bytes: int
) -> Schedule:
    """Cut a transfer into chunks that fit the spans in which the network is idle.

    Each span is filled to a fraction only, since spans vary from step to step. The last one is
    unbounded: what fits nowhere goes there, and is the reason for waiting.

    Args:
        nbytes: What is to be sent in one step: (m − 1)·S for m replicas of S bytes. The local
            copy follows the same schedule.
        idle_s: Idle spans of a step, in order; at least one.
        link: What a chunk takes.
        fill: γ, the fraction of a span that is used, above 0 and at most 1.
        buffer_bytes: R / p, the receiver's sub-buffer: no chunk is larger.

    Raises:
        OptionError: An argument is out of its range.
    """
    if nbytes < 0 or buffer_bytes < 1 or not 0 < fill <= 1:
        raise OptionError(
            f"chunks: expected bytes from 0 on, a buffer of at least a byte and a fill above 0 "
            f"and at most 1, found {nbytes}, {buffer_bytes} and {fill}"
        )
    if not idle_s or not all(span >= 0 for span in idle_s):
        raise OptionError(f"chunks: expected idle spans of 0 s or more, found {list(idle_s)}")
    left, chunks = nbytes, []
    for span in idle_s[:-1]:
        sent, room_s = [], fill * span
        while left and (size := _largest(room_s, link, min(left, buffer_bytes))):
            sent.append(size)
            left -= size
            room_s -= link.seconds(size)
        chunks.append(tuple(sent))
    whole, rest = divmod(left, buffer_bytes)
    chunks.append((buffer_bytes,) * whole + ((rest,) if rest else ()))
    used_s = sum(link.seconds(size) for size in chunks[-1])
    return Schedule(tuple(chunks), max(0.0, used_s - fill * idle_s[-1]))


def _largest(room_s: float, link: Link, most: int) -> int:
    """Bytes of the largest chunk that takes at most so long; 0 where there is none."""
    if link.seconds(most) <= room_s:
        return most
    size = min(most, int((room_s - link.start_s) * link.bytes_per_s))
    while size > 0 and link.seconds(size) > room_s:  # rounding
        size -= 1
    return max(0, size)
