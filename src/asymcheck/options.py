"""Arguments of the public calls, checked: each mistake is one clear error."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from asymcheck.errors import OptionError, nearest
from asymcheck.planning.cadence import Cadence, EverySeconds, EverySteps, Never
from asymcheck.planning.strategies import Strategy, resolve
from asymcheck.planning.tiers import Tier
from asymcheck.ranks import Alone, Ranks, Together
from asymcheck.storage.names import MAX_STEP
from asymcheck.storage.store import Store, open_store

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., object])

_MAX_S = 1e9  # more than thirty years, and less than the system's waits can take
_CALLS = ("prepare", "write", "create", "open", "list", "delete", "sweep", "free_bytes")


def one_of(name: str, value: T, known: tuple[str, ...]) -> T:
    """``value``, when it is one of the known words.

    Raises:
        OptionError: It is not.
    """
    if value not in known:
        raise OptionError(f"{name}: expected one of {', '.join(map(repr, known))}, found {value!r}")
    return value


def flag(name: str, value: object) -> bool:
    """``value``, when it is true or false: of a text nobody knows what was meant.

    Raises:
        OptionError: It is anything else.
    """
    if not isinstance(value, bool):
        raise OptionError(f"{name}: expected True or False, found {value!r:.80}")
    return value


def seconds(name: str, value: object) -> float:
    """``value``, when it is a time that can be waited for.

    Raises:
        OptionError: It is no number, negative, not finite or without any use.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MAX_S:
        raise OptionError(
            f"{name}: expected a number of seconds in [0, {_MAX_S:.0e}], found {value!r:.80}"
        )
    return value


def a_step(value: int, low: int = 1) -> int:
    """``value``, when it can be the number of a step.

    Raises:
        OptionError: It cannot.
    """
    if type(value) is not int or not low <= value <= MAX_STEP:
        raise OptionError(f"step: expected an integer in [{low}, {MAX_STEP}], found {value!r:.80}")
    return value


def a_call(name: str, value: F) -> F:
    """``value``, when it can be called.

    Raises:
        OptionError: It cannot.
    """
    if not callable(value):
        raise OptionError(f"{name}: expected something to call, found {value!r:.80}")
    return value


def a_file(name: str, value: object) -> Path:
    """``value`` as an absolute path.

    Raises:
        OptionError: It names no file.
    """
    found: object = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(found, str) or not found or "\0" in found:
        raise OptionError(f"{name}: expected the path of a file, found {value!r:.80}")
    return Path(found).expanduser().absolute()


def a_strategy(strategy: object, fidelity: Any) -> Strategy:  # noqa: ANN401
    """The strategy that a user names or gives, with another class of fidelity where asked for.

    Raises:
        OptionError: One of them is not known; names the nearest. Or they do not go together, or
            the strategy needs what is not installed.
    """
    found = resolve(strategy)
    if found.selection.chains and find_spec("sklearn") is None:
        raise OptionError(
            "strategy: the rule 'excp' needs scikit-learn, which is not installed: "
            "pip install 'asymcheck[excp]'"
        )
    return found if fidelity is None else found.with_fidelity(fidelity)


def named_objects(state: Mapping[str, object]) -> Mapping[str, object]:
    """``state``, when it names objects.

    Raises:
        OptionError: It does not; what each of them is, is looked at later.
    """
    if not isinstance(state, Mapping):
        raise OptionError(
            f"state: expected a dict such as {{'model': model, 'optimizer': optimizer}}, found "
            f"{type(state).__name__}"
        )
    return state


def as_store(root: str | os.PathLike[str] | Store) -> Store:
    """The store that a user names or gives.

    Raises:
        OptionError: It is neither a text nor a path nor a store, or no scheme is known for it.
    """
    found: object = os.fspath(root) if isinstance(root, os.PathLike) else root
    if isinstance(found, str):
        return open_store(found)
    if not isinstance(getattr(found, "url", None), str) or not all(
        callable(getattr(found, name, None)) for name in _CALLS
    ):
        raise OptionError(
            f"root: expected a directory, a URL or a Store, found {type(root).__name__} "
            f"{root!r:.80}"
        )
    return found  # type: ignore[return-value]


def as_tiers(tiers: object, home: Store) -> tuple[tuple[Tier, Store], ...]:
    """The further tiers that a user names or gives, nearest first, each with its store.

    Args:
        tiers: Of each a ``Tier``, or what its first argument may be.
        home: The root.

    Raises:
        OptionError: One is no tier, or a place or a name is there twice.
    """
    if isinstance(tiers, str) or not isinstance(tiers, Iterable):
        raise OptionError(
            f"tiers: expected a tuple of URLs or Tier values, such as (Tier('s3://…'),), found "
            f"{tiers!r:.80}"
        )
    found = []
    places, names = {_place(home): "the root"}, set()
    for value in tiers:
        tier = value if isinstance(value, Tier) else Tier(value)
        store = as_store(tier.url)  # type: ignore[arg-type]
        if _place(store) in places:
            raise OptionError(
                f"tiers: {tier.label} is the same place as {places[_place(store)]}: give each a "
                f"place of its own"
            )
        if tier.label in names:
            raise OptionError(f"tiers: there are two of the name {tier.label!r}: give each its own")
        places[_place(store)] = f"tier {tier.label}"
        names.add(tier.label)
        found.append((tier, store))
    return tuple(found)


def a_tier(name: object, tiers: Iterable[tuple[Tier, Store]]) -> str:
    """``name``, when one of the tiers has it.

    Raises:
        OptionError: None has; names the nearest.
    """
    known = [tier.label for tier, _ in tiers]
    if name not in known:
        hint = nearest(name, known) if isinstance(name, str) else ""
        raise OptionError(f"tier: expected one of {known}, found {name!r:.80}{hint}")
    return str(name)


def _place(store: Store) -> str:
    return store.url.partition("?")[0]


def as_ranks(ranks: object, timeout_s: float) -> Ranks:
    """The ranks that a user means: those of ``torch.distributed`` where it is initialized.

    Args:
        ranks: ``None``, ``"alone"`` or a process group.
        timeout_s: How long one waits for another, in seconds.

    Raises:
        OptionError: It is none of these, or this process is no member of the group.
    """
    dist = torch.distributed
    initialized = dist.is_available() and dist.is_initialized()
    if ranks == "alone" or (ranks is None and not initialized):
        return Alone()
    if ranks is not None and not (initialized and isinstance(ranks, dist.ProcessGroup)):
        raise OptionError(
            f"ranks: expected None, 'alone' or a process group that this process is a member of, "
            f"found {ranks!r:.80}"
        )
    if dist.get_world_size(ranks) == 1:
        return Alone()
    return Together(ranks, timeout_s)


def one_world(strategy: Strategy, ranks: Ranks) -> Strategy:
    """``strategy``, when these ranks can follow it together.

    Raises:
        OptionError: Which checkpoints it takes to the store is decided by each rank's own clock.
    """
    if ranks.world > 1 and strategy.placement.durable is not None:
        raise OptionError(
            f"strategy: expected a placement that takes every checkpoint to the store in a world "
            f"of {ranks.world} ranks, found {strategy.placement.durable!r}"
        )
    return strategy


def is_measured(cadence: Cadence) -> bool:
    """Whether a cadence may depend on clocks, which differ between ranks."""
    return not isinstance(cadence, EverySteps | Never)


def names_of(name: str, values: object, known: Mapping[str, object]) -> tuple[str, ...]:
    """``values``, when they are names in ``known``.

    Raises:
        OptionError: One is not; names the nearest.
    """
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise OptionError(f"{name}: expected a tuple of names in state, found {values!r:.80}")
    found = tuple(values)
    for value in found:
        if value not in known:
            hint = nearest(value, known) if isinstance(value, str) else ""
            raise OptionError(
                f"{name}: expected names in state, which has {sorted(known)}, found "
                f"{value!r:.80}{hint}"
            )
    return found


def a_cadence(
    every_steps: int | None, every_seconds: float | None, given: object, usual: Cadence | None
) -> Cadence:
    """The cadence that the arguments ask for, where they ask for none that of the strategy.

    Raises:
        OptionError: They contradict each other, are out of range, or are no cadence.
    """
    asked = {"every_steps": every_steps, "every_seconds": every_seconds, "cadence": given}
    names = [name for name, value in asked.items() if value is not None]
    if len(names) > 1:
        raise OptionError(
            f"expected one of every_steps, every_seconds and cadence, found {' and '.join(names)}"
        )
    if every_steps is not None:
        return EverySteps(every_steps)
    if every_seconds is not None:
        return EverySeconds(every_seconds)
    found = usual if given is None else given
    if found is None:
        return Never()
    if isinstance(found, type) or not callable(getattr(found, "begin", None)):
        raise OptionError(
            f"cadence: expected one of asymcheck.planning.cadence, such as OverheadBudget(0.02), "
            f"found {found!r:.80}"
        )
    return cast(Cadence, found)


def read_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Metrics as plain numbers; tensors of one element are read.

    Raises:
        OptionError: One is not a number.
    """
    if metrics is not None and not isinstance(metrics, Mapping):
        raise OptionError(
            f"metrics: expected a dict such as {{'loss': 0.5}}, found {type(metrics).__name__}"
        )
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
