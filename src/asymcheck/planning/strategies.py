"""The systems, each as one value. Nothing here has behaviour of its own."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from asymcheck.errors import OptionError, nearest
from asymcheck.planning.policy import Admission


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """One policy per axis; the stages ask, the policies answer.

    Attributes:
        capture: ``lazy`` copies parameters and optimizer state behind the next forward and
            backward pass; ``blocking`` copies everything before training goes on.
        persist: ``behind`` lets training go on once the state is copied; ``before`` keeps
            the loop waiting until the checkpoint is durable.
        admission: How many checkpoints may be under way.
    """

    capture: Literal["lazy", "blocking"] = "lazy"
    persist: Literal["behind", "before"] = "behind"
    admission: Admission = Admission()


strategies = MappingProxyType(
    {
        "naive": Strategy(capture="blocking", persist="before"),
        "asymcheck": Strategy(),
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
