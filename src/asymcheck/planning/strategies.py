"""The systems, each as one value. Nothing here has behaviour of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from asymcheck.errors import OptionError, nearest
from asymcheck.planning.adaptive import Adaptive
from asymcheck.planning.cadence import Cadence, EverySeconds, OverheadBudget
from asymcheck.planning.plan import IdleProportional, Partitioner
from asymcheck.planning.policy import Admission
from asymcheck.planning.selection import RAW, Batching, Fidelity, Selection
from asymcheck.planning.tiers import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """One policy per axis; the stages ask, the policies answer.

    Attributes:
        capture: ``lazy`` copies parameters and optimizer state behind the next forward and
            backward pass; ``device-copy`` clones them where they are before training goes on,
            and copies the clones while it does: the update waits for nothing, but there must
            be memory for a second state, else that capture is lazy; ``profiled`` measures
            these two at the first captures and goes on with the cheaper one, see
            ``variants.Trials``; ``blocking`` copies everything before training goes on.
        persist: ``behind`` lets training go on once the state is copied; ``before`` keeps
            the loop waiting until the checkpoint is durable.
        admission: How many checkpoints may be under way.
        partitioner: Which part of a lazy copy may happen in which window of the next step;
            ``None`` lets it run freely.
        selection: How chunks may be encoded.
        batching: How encoded chunks are merged into writes.
        placement: Which checkpoints go to the store, and which stay in memory alone.
        cadence: How often to save where the user does not say; ``None`` for only on request.

    Raises:
        OptionError: With a ``placement`` that keeps some in memory, room for one checkpoint is
            too little: the newest whole one stays while the next is captured.
    """

    capture: Literal["lazy", "device-copy", "profiled", "blocking"] = "lazy"
    persist: Literal["behind", "before"] = "behind"
    admission: Admission = Admission()
    partitioner: Partitioner | None = None
    selection: Selection = RAW
    batching: Batching = "ready"
    placement: Placement = Placement()
    cadence: Cadence | None = None

    def __post_init__(self) -> None:
        if self.placement.durable is not None and self.admission.max_in_flight < 2:
            raise OptionError(
                f"placement: expected admission.max_in_flight from 2 on, since the newest whole "
                f"checkpoint stays in memory while the next is captured, found "
                f"{self.admission.max_in_flight}"
            )

    def with_fidelity(self, fidelity: Fidelity) -> Strategy:
        """The same with another class of fidelity."""
        return replace(self, selection=replace(self.selection, fidelity=fidelity))


_TRY_ALL = Selection(rule="smallest", delta=True)

strategies = MappingProxyType(
    {
        "naive": Strategy(capture="blocking", persist="before"),
        "checkfreq": Strategy(capture="profiled", cadence=OverheadBudget()),
        "gemini": Strategy(
            admission=Admission(max_in_flight=2),
            placement=Placement(durable=EverySeconds(3 * 3600)),
        ),
        "asymcheck": Strategy(partitioner=Adaptive(), selection=Selection(cpu_share=0.01)),
        "asymcheck-paper": Strategy(
            partitioner=IdleProportional(),
            selection=Selection(rule="paper"),
            batching="square-root",
        ),
        "asymcheck-naive": Strategy(partitioner=IdleProportional(), batching="each"),
        "asymcheck-s": Strategy(
            partitioner=IdleProportional(), selection=_TRY_ALL, batching="each"
        ),
        "asymcheck-so": Strategy(
            partitioner=IdleProportional(), selection=_TRY_ALL, batching="ready"
        ),
    }
)
"""Every strategy by name."""


def resolve(strategy: object) -> Strategy:
    """The strategy of that name, or the value itself.

    Raises:
        OptionError: No such strategy; names the nearest.
    """
    if isinstance(strategy, Strategy):
        return strategy
    found = strategies.get(strategy) if isinstance(strategy, str) else None
    if found is None:
        hint = nearest(strategy, strategies) if isinstance(strategy, str) else ""
        raise OptionError(
            f"strategy: expected one of {sorted(strategies)} or a Strategy, "
            f"found {strategy!r}{hint}"
        )
    return found
