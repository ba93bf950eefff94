"""How chunks may be encoded: a rule, a class of fidelity, and what they may cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from asymcheck.errors import OptionError, nearest

Fidelity = Literal["exact", "moments", "aggressive"]
RULES = ("raw", "measured", "smallest", "paper", "excp")
FIDELITIES: tuple[Fidelity, ...] = ("exact", "moments", "aggressive")

_LOSSLESS = ("lz4+bitshuffle", "zstd1+shuffle")
_DELTA = ("delta+lz4+bitshuffle", "delta+zstd1+shuffle")
_SIGNED = frozenset({"exp_avg", "momentum_buffer", "mu", "grad_avg"})
_SQUARED = frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "nu", "acc_delta"})
TOP_K = "topk"
ZSTD = "zstd1+shuffle"
MAX_BASES = 100
"""How many checkpoints a difference may stand on, in a chain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which encodings are tried.

    Attributes:
        rule: ``raw`` encodes nothing; ``measured`` takes for each kind of leaf what makes the
            checkpoint durable first by measured rates (``planning.cost.choose``); ``smallest``
            what makes it smallest within the CPU budget; ``paper`` is the published rule, top-k
            of the difference where that model says so; ``excp`` is ExCP for every parameter
            that has Adam's moments, in a chain, and lossless for the rest, whatever that costs.
        fidelity: ``exact`` restores every bit. ``moments`` lets optimizer moments be rounded to
            8 bits, ``aggressive`` to 4, and keeps only what changed most of the parameters.
            The rules ``paper`` and ``excp`` have a class of their own, see ``loss_class``.
        key_every: Of so many checkpoints in a row one is a key-frame: lossless, and without a
            base. Matters where something is lossy or a difference.
        delta: Whether differences to the latest key-frame are tried. They cost as much host
            memory as the state, which the persister keeps of the key-frame.
        cpu_share: CPU seconds that encoding may take, per second between two checkpoints.
        workers: Threads that encode; 0 for a quarter of the cores, at least one.
    """

    rule: Literal["raw", "measured", "smallest", "paper", "excp"] = "measured"
    fidelity: Fidelity = "exact"
    key_every: int = 10
    delta: bool = False
    cpu_share: float = 0.5
    workers: int = 0

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise OptionError(f"rule: expected one of {list(RULES)}, found {self.rule!r}")
        if self.fidelity not in FIDELITIES:
            hint = nearest(str(self.fidelity), FIDELITIES)
            raise OptionError(
                f"fidelity: expected one of {list(FIDELITIES)}, found {self.fidelity!r}{hint}"
            )
        if self.key_every < 1:
            raise OptionError(f"key_every: expected at least 1, found {self.key_every}")
        if self.chains and self.key_every > MAX_BASES + 1:
            raise OptionError(
                f"key_every: expected at most {MAX_BASES + 1} with the rule 'excp', whose "
                f"checkpoints stand on one another, found {self.key_every}"
            )
        if not self.cpu_share >= 0.0:
            raise OptionError(f"cpu_share: expected a number from 0 up, found {self.cpu_share}")
        if self.workers < 0:
            raise OptionError(f"workers: expected 0 or more, found {self.workers}")

    @property
    def chains(self) -> bool:
        """Whether differences are made to the checkpoint before, not to a key-frame."""
        return self.rule == "excp"

    @property
    def needs_base(self) -> bool:
        """Whether the bytes that differences are made to are kept in memory."""
        wanted = self.delta or self.fidelity == "aggressive"
        return self.rule in ("paper", "excp") or (self.rule != "raw" and wanted)

    @property
    def loss_class(self) -> str:
        """What is lost, where something is: ``paper`` keeps what changed most, of every kind, and
        ``excp`` is a class of its own.
        """
        return {"paper": "aggressive", "excp": "excp"}.get(self.rule, self.fidelity)

    def check_fidelity(self, fidelity: Fidelity) -> None:
        """Whether this rule can be asked for that class.

        Raises:
            OptionError: It encodes nothing, or has a class of its own.
        """
        if self.rule == "raw" and fidelity != "exact":
            raise OptionError(
                f"fidelity: expected 'exact' with a strategy that encodes nothing, found "
                f"{fidelity!r}: leave it out, or take a strategy that encodes, such as 'asymcheck'"
            )
        if self.rule in ("paper", "excp") and fidelity != self.loss_class:
            raise OptionError(
                f"fidelity: expected none with the rule {self.rule!r}, whose checkpoints are of "
                f"the class {self.loss_class!r}, found {fidelity!r}: leave it out, or take another "
                f"strategy, such as 'asymcheck'"
            )

    def labels(self, kind: str, *, key_frame: bool) -> tuple[str, ...]:
        """Codecs that may be used, beside raw, best known first; pure.

        Args:
            kind: Of a leaf, as ``Capture.kinds``; empty for leaves of several kinds.
            key_frame: Whether the checkpoint is one.
        """
        if self.rule in ("raw", "excp"):
            return ()  # of excp because nothing is chosen
        if self.rule == "paper":
            return () if key_frame or not kind else (TOP_K,)
        found = list(_LOSSLESS)
        if key_frame or not kind:
            return tuple(found)
        if self.delta:
            found += _DELTA
        entry = kind.removeprefix("state/")
        if self.fidelity != "exact":
            bits = 8 if self.fidelity == "moments" else 4
            if entry in _SIGNED:
                found.append(f"q{bits}-signed")
            elif entry in _SQUARED:
                found.append(f"q{bits}-log")
            elif kind == "parameter" and self.fidelity == "aggressive":
                found.append(TOP_K)
        return tuple(found)


RAW = Selection(rule="raw")
"""Nothing is encoded."""

Batching = Literal["ready", "square-root", "each"]
"""How encoded chunks are merged into writes: what is ready when the writer is free, up to a
budget; the paper's batch size; or each chunk by itself."""
