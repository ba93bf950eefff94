"""The blocks of a model: modules that run one after another and hold most of its parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

_SHARE = 0.05  # of the parameters that a list must hold to be a list of blocks


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The modules that divide a model's step into windows, in no particular order.

    They are the children of the outermost ``ModuleList`` that hold most of the parameters, else
    those of the outermost ``Sequential``, else those of the first module that has several.
    Modules without parameters are left out, and nothing inside a compiled module is looked at:
    it is one block.

    Args:
        model: Any module, a wrapper such as DDP included.
    """
    if _is_opaque(model):
        return [model]
    whole = _size(model)
    for kind in (nn.ModuleList, nn.Sequential):
        lists = [m for m in _outermost(model, kind) if _size(m) > _SHARE * whole]
        blocks = [b for m in lists for b in _callable(m.children())]
        if 2 * sum(map(_size, lists)) > whole and blocks:
            return blocks if len(blocks) > 1 else find_blocks(blocks[0])
    blocks = list(_callable(model.children()))
    return blocks if len(blocks) > 1 else find_blocks(blocks[0]) if blocks else [model]


def _is_opaque(module: nn.Module) -> bool:
    """Whether it is compiled: by ``torch.compile``, by its own ``compile``, or as a script."""
    return (
        "_orig_mod" in module._modules
        or getattr(module, "_compiled_call_impl", None) is not None
        or isinstance(module, torch.jit.ScriptModule)
    )


def _size(module: nn.Module) -> int:
    sizes = [p.numel() for p in module.parameters() if not _is_lazy(p)]
    return sum(sizes)


def _is_lazy(parameter: torch.Tensor) -> bool:
    found: bool = nn.parameter.is_lazy(parameter)
    return found


def _outermost(module: nn.Module, kind: type[nn.Module]) -> Iterator[nn.Module]:
    if isinstance(module, kind):
        yield module
    elif not _is_opaque(module):
        for child in module.children():
            yield from _outermost(child, kind)


def _callable(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Those with parameters; in place of lists, which are never called, what is in them."""
    for module in modules:
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            yield from _callable(module.children())
        elif next(module.parameters(), None) is not None:
            yield module
