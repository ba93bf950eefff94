"""How a model is spread over ranks: the names, and what each way takes; read without torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass

from asymcheck.errors import nearest
from asymcheck_lab.errors import UsageError

BUCKET_ELEMENTS = 2**26
"""Gradients that DeepSpeed reduces, and parameters that it gathers, in one go at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """One way to spread a model.

    Attributes:
        stage: What the ranks share, as ZeRO counts it: 0 nothing, 1 optimizer states, 2 gradients
            too, 3 parameters too.
        masters: Whether half precision means half parameters over fp32 ones, as in DeepSpeed;
            else it is autocast over fp32 parameters.
        units: How many of the largest unit of parameters are whole at a time: the one that
            computes, the one that is gathered ahead, and the gradients of one.
        buckets: How many buckets of ``BUCKET_ELEMENTS`` there are.
        needs: A package that it needs besides torch; empty for none.
    """

    stage: int = 0
    masters: bool = False
    units: int = 0
    buckets: int = 0
    needs: str = ""


ALONE = Parallel()

PARALLELS: Mapping[str, Parallel] = {
    "none": ALONE,
    "ddp": Parallel(),
    "fsdp2": Parallel(stage=3, units=3),
    "zero1": Parallel(stage=1, masters=True, buckets=2, needs="deepspeed"),
    "zero2": Parallel(stage=2, masters=True, buckets=2, needs="deepspeed"),
    "zero3": Parallel(stage=3, masters=True, units=3, buckets=2, needs="deepspeed"),
}
"""Every way by name: one process, DDP, ``fully_shard``, the stages of DeepSpeed's ZeRO."""


def find_parallel(name: str) -> Parallel:
    """The way of this name.

    Raises:
        UsageError: There is none, naming the nearest; or it needs a package that is not there.
    """
    found = PARALLELS.get(name)
    if found is None:
        raise UsageError(
            f"parallel: expected one of {list(PARALLELS)}, found {name!r}{nearest(name, PARALLELS)}"
        )
    if found.needs and importlib.util.find_spec(found.needs) is None:
        raise UsageError(
            f"parallel: {name} needs the package {found.needs}, which is not installed: "
            f"pip install {found.needs}"
        )
    return found
