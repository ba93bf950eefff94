"""Arguments of the public calls, checked: each mistake is one clear error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch

from asymcheck.errors import OptionError
from asymcheck.planning.policy import Cadence, EverySeconds, EverySteps, Never

T = TypeVar("T")


def one_of(name: str, value: T, known: tuple[str, ...]) -> T:
    """``value``, when it is one of the known words.

    Raises:
        OptionError: It is not.
    """
    if value not in known:
        raise OptionError(f"{name}: expected one of {', '.join(map(repr, known))}, found {value!r}")
    return value


def refuse_many_ranks() -> None:
    """Refuse a world of several ranks.

    Raises:
        OptionError: There are several.
    """
    dist = torch.distributed
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise OptionError(
            f"torch.distributed: this release checkpoints one rank, found a world of "
            f"{dist.get_world_size()}"
        )


def make_cadence(every_steps: int | None, every_seconds: float | None) -> Cadence:
    """The cadence that the arguments ask for.

    Raises:
        OptionError: They contradict each other, or are out of range.
    """
    if every_steps is not None and every_seconds is not None:
        raise OptionError("expected every_steps or every_seconds, found both")
    if every_steps is not None:
        return EverySteps(every_steps)
    if every_seconds is not None:
        return EverySeconds(every_seconds)
    return Never()


def read_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Metrics as plain numbers; tensors of one element are read.

    Raises:
        OptionError: One is not a number.
    """
    numbers = {}
    for name, value in (metrics or {}).items():
        found = value.detach() if isinstance(value, torch.Tensor) else value
        try:
            numbers[str(name)] = float(found)
        except (TypeError, ValueError, RuntimeError) as bad:
            raise OptionError(
                f"metrics[{name!r}]: expected a number or a tensor of one element, found "
                f"{type(value).__name__}"
            ) from bad
    return numbers
