"""What a DeepSpeed engine knows beside its partitions, and what it does after a load."""

from __future__ import annotations

from typing import Any

import torch

from asymcheck.integrations.deepspeed.partitions import Flat

_COUNTERS = ("global_steps", "micro_steps", "skipped_steps", "global_samples")
_NUMBERS = (bool, int, float, type(None))


def is_between_updates(engine: Any) -> bool:  # noqa: ANN401
    """Whether gradients lie in it that no update has used yet."""
    managed = getattr(engine, "managed_gradient_accumulation", None)  # not in older releases
    if managed is not None and not managed():
        return bool(engine._unmanaged_backward_count)
    if engine._is_gradient_accumulation_boundary is not None:
        return False  # the caller says when to update; micro-steps do not tell
    return bool(engine.micro_steps % engine.gradient_accumulation_steps())


def read_numbers(engine: Any) -> dict[str, Any]:  # noqa: ANN401
    """What an engine knows beside its tensors."""
    found: dict[str, Any] = {name: getattr(engine, name) for name in _COUNTERS}
    found["loss_scaler"] = {k: v for k, v in _scaler(engine).items() if isinstance(v, _NUMBERS)}
    if engine.lr_scheduler is not None:
        found["lr_scheduler"] = engine.lr_scheduler.state_dict()
    return found


def put_numbers(engine: Any, found: dict[str, Any]) -> None:  # noqa: ANN401
    """Set what ``read_numbers`` returned."""
    for name in _COUNTERS:
        setattr(engine, name, found[name])
    scaler = _scaler(engine)
    scaler.update({k: v for k, v in found["loss_scaler"].items() if k in scaler})
    if engine.lr_scheduler is not None and "lr_scheduler" in found:
        engine.lr_scheduler.load_state_dict(found["lr_scheduler"])


def _scaler(engine: Any) -> dict[str, Any]:  # noqa: ANN401
    """The attributes of the loss scaler; none where there is none."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    return {} if scaler is None else vars(scaler)


def refresh_parameters(engine: Any, flats: list[Flat]) -> None:  # noqa: ANN401
    """Make the module's parameters out of the masters, as ZeRO does after a load; collective."""
    if not flats:
        return
    optimizer = engine.optimizer
    if hasattr(optimizer, "update_lp_params"):  # stages 1 and 2
        optimizer.update_lp_params()
        return
    optimizer.checkpoint_event_prologue()
    with torch.no_grad():
        for flat in flats:
            flat.low.copy_(flat.master)
    optimizer.checkpoint_event_epilogue()
