"""The automatic fence: a word before any optimizer's update.

Through torch's *global* hook: wrappers such as Accelerate's and DeepSpeed's optimizers have
no hook of their own, but the optimizer inside them runs the global ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook


class UpdateHook:
    """Calls back before an optimizer changes memory that is being watched.

    Args:
        watched: Storages that are being copied, by address; asked before every update, so it
            must be cheap when nothing is.
        fence: Called before the update, on the thread that makes it; may block.
    """

    def __init__(self, watched: Callable[[], frozenset[int]], fence: Callable[[], None]) -> None:
        self._watched = watched
        self._fence = fence
        # A compiled update must call it at run time, not bake in what it saw while tracing.
        hook = torch.compiler.disable(self._before_step)
        self._registered = register_optimizer_step_pre_hook(hook)

    def close(self) -> None:
        """Take the hook away."""
        self._registered.remove()

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        watched = self._watched()
        if not watched or not _touches(optimizer, watched):
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure) or not type(optimizer).__module__.startswith("torch.optim"):
            self._fence()
            return None
        # Forward and backward run inside the closure, and torch's own optimizers change
        # nothing before its first return: the copy may go on until then.
        fenced = self._fence_after(closure)
        if len(args) > 1:
            return (args[0], fenced, *args[2:]), kwargs
        return args, {**kwargs, "closure": fenced}

    def _fence_after(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def fenced() -> Any:  # noqa: ANN401
            result = closure()
            self._fence()
            return result

        return fenced


def _touches(optimizer: torch.optim.Optimizer, watched: frozenset[int]) -> bool:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.untyped_storage().data_ptr() in watched:
                return True
            for value in optimizer.state.get(param, {}).values():
                if (
                    isinstance(value, torch.Tensor)
                    and value.untyped_storage().data_ptr() in watched
                ):
                    return True
    return False
