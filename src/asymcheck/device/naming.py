"""Names of parameters that do not depend on the wrappers around a model."""

from __future__ import annotations

from collections.abc import Iterable

_WRAPPERS = frozenset({"module", "_orig_mod", "_checkpoint_wrapped_module"})


def canonical_names(names: Iterable[str]) -> dict[str, str]:
    """Each name without the parts that DDP, ``torch.compile`` and recomputation add.

    Where that would give two names the same canonical one (a model of the user's own with a
    child called ``module``), all names stay as they are.

    Returns:
        Given name to canonical name, in the given order.
    """
    found = {
        name: ".".join(p for p in name.split(".") if p not in _WRAPPERS) or name for name in names
    }
    if len(set(found.values())) != len(found):
        return {name: name for name in found}
    return found
