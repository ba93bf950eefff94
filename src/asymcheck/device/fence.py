"""The automatic fence: a word before any optimizer's update.

Through torch's *global* hook: wrappers such as Accelerate's and DeepSpeed's optimizers have
no hook of their own, but the optimizer inside them runs the global ones.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from asymcheck.device.sharding import local

_DEEPEST = 4  # of containers in an optimizer's state


class UpdateHook:
    """Calls back before an optimizer changes memory that is being watched.

    Args:
        watched: Storages that are being copied, by address; asked before every update, so it
            must be cheap when nothing is.
        fence: Called before the update, on the thread that makes it; may block.
        own: Optimizers that concern it wherever their tensors lie now: one whose parameters
            were given other memory still moves the version counters of the old.
        before: Called before each update of one of its own, first of all; must be cheap. Not
            with a closure, in which forward and backward run.
    """

    def __init__(
        self,
        watched: Callable[[], frozenset[int]],
        fence: Callable[[], None],
        own: Iterable[torch.optim.Optimizer] = (),
        before: Callable[[], None] = lambda: None,
    ) -> None:
        self._before = before
        self._watched = watched
        self._fence = fence
        self._own = frozenset(map(id, own))
        self._pid = os.getpid()
        self._thread = threading.get_ident()
        # A compiled update must call it at run time, not bake in what it saw while tracing.
        hook = torch.compiler.disable(self._before_step)
        self._registered = register_optimizer_step_pre_hook(hook)

    def close(self) -> None:
        """Take the hook away. On another thread than made it, which may be going through all
        hooks right now, it stays and does nothing any more.
        """
        if threading.get_ident() == self._thread:
            self._registered.remove()
        self._watched, self._fence, self._own = frozenset, lambda: None, frozenset()

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if id(optimizer) in self._own and not callable(closure):
            self._before()
        watched = self._watched()
        if not watched or os.getpid() != self._pid:
            return None  # a forked child has memory of its own, and nobody who copies it
        if id(optimizer) not in self._own and not _touches(optimizer, watched):
            return None
        if not callable(closure) or not _is_torchs(type(optimizer)):
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


def _is_torchs(kind: type) -> bool:
    return kind.__module__ == "torch.optim" or kind.__module__.startswith("torch.optim.")


def _touches(optimizer: torch.optim.Optimizer, watched: frozenset[int]) -> bool:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if _address(param) in watched:
                return True
            if any(_address(t) in watched for t in _tensors(optimizer.state.get(param))):
                return True
    return False


def _tensors(value: object, depth: int = 0) -> Iterator[torch.Tensor]:
    """The tensors in an optimizer's state of one parameter, whatever its maker put there."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < _DEEPEST and isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item, depth + 1)


def _address(tensor: torch.Tensor) -> int:
    try:
        return local(tensor).untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0  # a tensor without one storage, such as a sparse one, is never watched
