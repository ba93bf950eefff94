"""What encoding and writing cost, and which encoding is worth it.

Times are straight lines over bytes, ``α + β·bytes``, in seconds and bytes everywhere. Which
option of each kind of leaf is taken minimises the modelled time until a checkpoint is durable.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from asymcheck.errors import OptionError
from asymcheck.planning.layout import MiB

RAW = "raw"
BATCH_BYTES = 64 * MiB
MOST_COMBINATIONS = 20_000
"""Of more undominated ones, so many are compared, evenly spaced."""


@dataclass(frozen=True, slots=True)
class Linear:
    """Seconds for a number of bytes.

    Attributes:
        alpha_s: α, seconds a call.
        beta_s_per_byte: β, seconds a byte.
    """

    alpha_s: float
    beta_s_per_byte: float

    def __post_init__(self) -> None:
        for name in ("alpha_s", "beta_s_per_byte"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise OptionError(
                    f"{name}: expected a number from 0 up, found {getattr(self, name)}"
                )

    def __call__(self, nbytes: float) -> float:
        """Seconds for so many bytes."""
        return self.alpha_s + self.beta_s_per_byte * nbytes


@dataclass(frozen=True, slots=True)
class LinearFit:
    """Least squares of α and β, neither negative, over samples that come one by one.

    A value: ``add`` returns a new one. Memory is constant; a sample counts ``keep`` times as
    much with each later one, so a store that changes is followed. While only one size was seen
    (lately: with ``keep`` = 0.98 the last 1300 samples) all time is put down to the bytes.

    Attributes:
        keep: What a sample's weight is multiplied with at each later one, above 0, at most 1.
        weight: Sum of the weights.
        size: Weighted mean of the sizes, bytes.
        seconds: Weighted mean of the times.
        size_size: Weighted squared deviations of the sizes.
        size_seconds: Weighted products of the deviations.
    """

    keep: float = 0.98
    weight: float = 0.0
    size: float = 0.0
    seconds: float = 0.0
    size_size: float = 0.0
    size_seconds: float = 0.0

    def add(self, nbytes: float, seconds: float) -> LinearFit:
        """With one more sample; one with a negative number, none, or one past 1e18 is left out."""
        if not (0.0 <= nbytes <= 1e18 and 0.0 <= seconds <= 1e18):
            return self
        weight = self.keep * self.weight + 1.0
        off = nbytes - self.size
        size = self.size + off / weight
        mean_s = self.seconds + (seconds - self.seconds) / weight
        return LinearFit(
            self.keep,
            weight,
            size,
            mean_s,
            self.keep * self.size_size + off * (nbytes - size),
            self.keep * self.size_seconds + off * (seconds - mean_s),
        )

    def line(self) -> Linear | None:
        """The line of least squares with α, β >= 0; ``None`` before the first sample."""
        if not self.weight:
            return None
        square = self.weight * self.size * self.size
        alpha_s = -1.0
        beta = 0.0
        if self.size_size > 1e-12 * square:
            beta = self.size_seconds / self.size_size
            alpha_s = self.seconds - beta * self.size
        if beta < 0.0 or not square:
            return Linear(self.seconds, 0.0)
        if alpha_s < 0.0:  # the best line through the origin
            through = self.size_seconds + self.weight * self.size * self.seconds
            return Linear(0.0, max(0.0, through) / (self.size_size + square))
        return Linear(alpha_s, beta)


@dataclass(frozen=True, slots=True)
class Option:
    """A way to encode, as measured on a sample.

    Attributes:
        label: Of the codec.
        ratio: Stored bytes a raw byte.
        encode_bytes_per_s: Raw bytes a second, on one thread.
        lossless: Whether decoding gives back every bit.
    """

    label: str
    ratio: float
    encode_bytes_per_s: float
    lossless: bool = True

    @property
    def usable(self) -> bool:
        """Whether its numbers are numbers: a measurement that failed is never chosen."""
        return 0.0 <= self.ratio < math.inf and self.encode_bytes_per_s > 0.0


_AS_IT_IS = Option(RAW, 1.0, math.inf)


@dataclass(frozen=True, slots=True)
class Kind:
    """Leaves that encode alike, such as all first moments.

    Attributes:
        name: For people.
        nbytes: Raw bytes of them together.
        options: What may be used; raw may be always. Only those belong here that the fidelity
            class allows: nothing here prefers lossless ones but a tie.
    """

    name: str
    nbytes: int
    options: tuple[Option, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen, and what it costs by the model.

    Attributes:
        labels: One for each kind, in their order.
        durable_s: From the boundary until everything is written.
        cpu_s: CPU seconds of encoding and hashing.
        write_s: Seconds of writing.
        stored_bytes: What is written.
        bound_by: Which of the three is ``durable_s``.
        exhaustive: False where there were too many combinations to look at all.
    """

    labels: tuple[str, ...]
    durable_s: float
    cpu_s: float
    write_s: float
    stored_bytes: int
    bound_by: str
    exhaustive: bool


@dataclass(frozen=True, slots=True)
class _Partial:
    """Options for the first kinds."""

    stored: int
    encode_s: float
    lossy: int
    labels: tuple[str, ...]


def choose(
    kinds: Sequence[Kind],
    store: Linear,
    *,
    encode_workers: int,
    cpu_budget_s: float = math.inf,
    copy_s: float = 0.0,
    hash_bytes_per_s: float = math.inf,
    batch_bytes: int = BATCH_BYTES,
) -> Choice:
    """The option of each kind with which the checkpoint is durable first; pure.

    Copying, encoding and writing overlap, so the slowest sets the time::

        T = max(copy_s, (Σ nbytes/encode + stored/hash) / workers, α·ceil(stored/batch) + β·stored)

    The first chunk's way through the stages before it and the last one's after it are left out:
    one chunk's time each. On a tie fewer CPU seconds win, then fewer bytes, then lossless.

    All combinations count. Time only grows with stored bytes and with CPU seconds, so of the
    combinations of the first kinds those are dropped that have no less of either than another.

    Args:
        kinds: What there is to store.
        store: Of one write.
        encode_workers: Threads that encode; with none everything is raw.
        cpu_budget_s: CPU seconds that encoding may take a checkpoint; with 0, or no number,
            everything is raw. Hashing does not count: raw bytes are hashed too.
        copy_s: How long the copy of the state takes.
        hash_bytes_per_s: Stored bytes a second, on one thread.
        batch_bytes: Of one write.

    Raises:
        OptionError: A number about the machine is out of its range.
    """
    if not (hash_bytes_per_s > 0.0 and 0.0 <= copy_s < math.inf and batch_bytes >= 1):
        raise OptionError(
            "choose: expected hash_bytes_per_s above 0, copy_s from 0 up and batch_bytes from 1 "
            f"up, found {hash_bytes_per_s}, {copy_s} and {batch_bytes}"
        )
    budget_s = cpu_budget_s if encode_workers > 0 and cpu_budget_s > 0.0 else 0.0
    exhaustive = True
    partials = [_Partial(0, 0.0, 0, ())]
    for kind in kinds:
        options = (_AS_IT_IS, *(o for o in kind.options if o.usable))
        grown = (
            _Partial(
                p.stored + math.ceil(kind.nbytes * o.ratio),
                p.encode_s + kind.nbytes / o.encode_bytes_per_s,
                p.lossy + (not o.lossless),
                (*p.labels, o.label),
            )
            for p in partials
            for o in options
        )
        partials = _undominated(p for p in grown if p.encode_s <= budget_s)
        if len(partials) > MOST_COMBINATIONS:
            exhaustive = False
            last = len(partials) - 1
            partials = [
                partials[k * last // (MOST_COMBINATIONS - 1)] for k in range(MOST_COMBINATIONS)
            ]

    def weigh(p: _Partial) -> Choice:
        cpu_s = p.encode_s + p.stored / hash_bytes_per_s
        write_s = store.alpha_s * math.ceil(p.stored / batch_bytes)
        write_s += store.beta_s_per_byte * p.stored
        stages = {"copy": copy_s, "cpu": cpu_s / max(1, encode_workers), "store": write_s}
        bound_by = max(stages, key=lambda name: stages[name])
        return Choice(p.labels, stages[bound_by], cpu_s, write_s, p.stored, bound_by, exhaustive)

    weighed = ((weigh(p), p.lossy) for p in partials)
    best, _ = min(weighed, key=lambda c: (c[0].durable_s, c[0].cpu_s, c[0].stored_bytes, c[1]))
    return best


def _undominated(partials: Iterable[_Partial]) -> list[_Partial]:
    """Those of which no other has both no more bytes and no more seconds."""
    kept: list[_Partial] = []
    for p in sorted(partials, key=lambda p: (p.stored, p.encode_s, p.lossy)):
        if not kept or p.encode_s < kept[-1].encode_s:
            kept.append(p)
    return kept


def paper_compresses(nbytes: float, density: float, comp: Linear, write: Linear) -> bool:
    """The paper's rule (section 4.2) for one partition: ``T_comp(S) + T_write(2ρS) < T_write(S)``.

    Args:
        nbytes: S.
        density: ρ, the part of the elements that top-k keeps. The 2 is for their indices, as
            if an index were as long as a value: 8 bytes of index make it 3 (float32) or 5.
        comp: Of compression.
        write: Of the store; the published code takes a copy in memory for it.
    """
    return comp(nbytes) + write(2.0 * density * nbytes) < write(nbytes)


def paper_threshold_bytes(density: float, comp: Linear, write: Linear) -> float | None:
    """S*, the size above which ``paper_compresses``: ``α_c / (β_w·(1 - 2ρ) - β_c)``.

    ``None`` where it never does.
    """
    gain_s_per_byte = write.beta_s_per_byte * (1.0 - 2.0 * density) - comp.beta_s_per_byte
    return comp.alpha_s / gain_s_per_byte if gain_s_per_byte > 0.0 else None
