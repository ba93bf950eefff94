"""A fingerprint of everything that decides how a training goes on.

It is computed straight from the live objects and shares no code with the library, so that a
mistake in what the library saves or restores shows here.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch


def fingerprint(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    values: Mapping[str, Mapping[str, Any]],
) -> dict[str, str]:
    """The sha256 of each piece of a training's state.

    Args:
        model: Every parameter and every buffer counts, those outside of its state dict too. Of
            what is spread over ranks it is what this one holds.
        optimizer: Every entry of its state and of its groups' options counts, and parameters
            that are not the model's, as DeepSpeed has them.
        values: State dicts of what else there is, such as scheduler and data.

    Returns:
        Name to hexadecimal digest: ``model/…``, ``optim/…``, ``<name>/…`` of ``values``, and
        ``rng/python``, ``rng/numpy``, ``rng/torch``.
    """
    found: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found[f"model/{name}"] = _digest(parameter)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        found[f"model/{name}"] = _digest(buffer)
    for name, value in optimizer_entries(model, optimizer):
        found[name] = _digest(value)
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params":
                found[f"optim/group{number}/{key}"] = _digest(value)
    for name, state in values.items():
        for key, value in state.items():
            found[f"{name}/{key}"] = _digest(value)
    found["rng/python"] = _digest(random.getstate())
    found["rng/numpy"] = _digest(np.random.get_state(legacy=False))
    found["rng/torch"] = _digest(torch.get_rng_state())
    return found


def optimizer_entries(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, Any]]:
    """Name and value of every entry of an optimizer's state.

    Parameters that are not the model's come too, as ``values``: those of ZeRO-3 are in no group
    between two updates, only in the state.
    """
    names: dict[torch.Tensor, str] = {}
    for name, own in model.named_parameters(remove_duplicate=False):
        names.setdefault(own, name)
    labels: dict[Any, str] = {
        parameter: f"group{number}.{place}"
        for number, group in enumerate(optimizer.param_groups)
        for place, parameter in enumerate(group["params"])
    }
    for place, parameter in enumerate(optimizer.state):
        labels.setdefault(parameter, f"state.{place}")
    for parameter, label in labels.items():
        name = names.get(parameter, label)
        if parameter not in names:
            yield f"optim/{name}/values", parameter
        for key, value in optimizer.state.get(parameter, {}).items():
            yield f"optim/{name}/{key}", value


def _digest(value: object) -> str:
    hasher = hashlib.sha256()
    _feed(hasher.update, value)
    return hasher.hexdigest()


def _feed(update: Any, value: object) -> None:  # noqa: ANN401  hashlib's own type is private
    if isinstance(value, torch.Tensor):
        plain = held(value).detach().cpu().contiguous()
        update(f"{plain.dtype} {tuple(plain.shape)}\n".encode())
        update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray):
        update(f"{value.dtype} {value.shape}\n".encode())
        update(value.tobytes())
    elif isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            update(f"{key!r}:\n".encode())
            _feed(update, value[key])
    elif isinstance(value, float):
        update(f"float {value.hex()}\n".encode())
    elif isinstance(value, list | tuple):
        update(f"{type(value).__name__} of {len(value)}\n".encode())
        for entry in value:
            _feed(update, entry)
    else:
        update(f"{type(value).__name__} {value!r}\n".encode())


def held(tensor: Any) -> torch.Tensor:  # noqa: ANN401  the attributes are of subclasses
    """What this rank has of it: the shard of a DTensor, the partition of a ZeRO-3 parameter."""
    own: torch.Tensor = getattr(tensor, "ds_tensor", tensor)
    return own.to_local() if hasattr(own, "to_local") else own


def state_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes that this rank holds of parameters and optimizer state, each tensor once."""
    moments = (
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )
    return sum(held(t).nbytes for t in (*model.parameters(), *moments))
