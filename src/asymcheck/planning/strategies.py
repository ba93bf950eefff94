"""The systems, each as one value. Nothing here has behaviour of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from asymcheck.errors import OptionError, nearest
from asymcheck.planning.adaptive import Adaptive
from asymcheck.planning.plan import IdleProportional, Partitioner
from asymcheck.planning.policy import Admission
from asymcheck.planning.selection import RAW, Batching, Fidelity, Selection


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """One policy per axis; the stages ask, the policies answer.

    Attributes:
        capture: ``lazy`` copies parameters and optimizer state behind the next forward and
            backward pass; ``blocking`` copies everything before training goes on.
        persist: ``behind`` lets training go on once the state is copied; ``before`` keeps
            the loop waiting until the checkpoint is durable.
        admission: How many checkpoints may be under way.
        partitioner: Which part of a lazy copy may happen in which window of the next step;
            ``None`` lets it run freely.
        selection: How chunks may be encoded.
        batching: How encoded chunks are merged into writes.
    """

    capture: Literal["lazy", "blocking"] = "lazy"
    persist: Literal["behind", "before"] = "behind"
    admission: Admission = Admission()
    partitioner: Partitioner | None = None
    selection: Selection = RAW
    batching: Batching = "ready"

    def with_fidelity(self, fidelity: Fidelity) -> Strategy:
        """The same with another class of fidelity.

        Raises:
            OptionError: There is no such class, or the strategy cannot have it.
        """
        selection = replace(self.selection, fidelity=fidelity)
        selection.check_fidelity(fidelity)
        return replace(self, selection=selection)


_TRY_ALL = Selection(rule="smallest", delta=True)

strategies = MappingProxyType(
    {
        "naive": Strategy(capture="blocking", persist="before"),
        "asymcheck": Strategy(partitioner=Adaptive(), selection=Selection(cpu_share=0.01)),
        "asymcheck-paper": Strategy(
            partitioner=IdleProportional(),
            selection=Selection(rule="paper"),
            batching="square-root",
        ),
        # Its authors compress what was saved before, in a process of its own.
        "excp": Strategy(capture="blocking", selection=Selection(rule="excp")),
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
