"""The random number generators that every checkpoint holds without being asked to."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def get_states() -> dict[str, Any]:
    """States of Python's, NumPy's global, torch's CPU and every CUDA generator.

    CUDA's only where the process uses CUDA: to ask would make a context on every device.
    """
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def set_states(states: dict[str, Any]) -> list[str]:
    """Set what ``get_states`` returned.

    Returns:
        What could not be set, one clause each; empty when all is as it was.
    """
    problems = [f"no {name} state was saved" for name in _SETTERS if name not in states]
    for name, set_state in _SETTERS.items():
        if name in states:
            try:
                set_state(states[name])
            except (ValueError, TypeError, RuntimeError, LookupError) as failure:
                problems.append(f"the {name} state was refused: {failure}")
    saved = states.get("cuda", [])
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for device, state in enumerate(saved[:here]):
        torch.cuda.set_rng_state(state, device)
    if len(saved) > here:
        problems.append(f"CUDA states of {len(saved)} devices were saved, {here} are here")
    return problems


_SETTERS: dict[str, Callable[[Any], object]] = {
    "python": random.setstate,
    "numpy": np.random.set_state,
    "torch": torch.set_rng_state,
}
