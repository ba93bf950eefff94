"""Names: of parameters, whatever wraps the model, and of the paths to leaves."""

from __future__ import annotations

import functools
import re
import reprlib
from collections.abc import Iterable

import torch

_WRAPPERS = frozenset({"module", "_orig_mod", "_checkpoint_wrapped_module"})
_SURROGATE = re.compile("[\ud800-\udfff]")
_SAFE_INT = 1 << 53


def canonical_names(names: Iterable[str]) -> dict[str, str]:
    """Each name without the parts that DDP, ``torch.compile`` and recomputation add.

    Outer parts go first. A part stays where its going would make two names equal: in a model
    of the user's own with a child called ``module`` beside others, wrapped or not.

    Returns:
        Given name to canonical name, in the given order.
    """
    return dict(_canonical(tuple(names)))


@functools.lru_cache(maxsize=32)  # the same names at every save
def _canonical(names: tuple[str, ...]) -> dict[str, str]:
    split = {name: tuple(name.split(".")) for name in names}
    found: dict[str, str] = dict.fromkeys(split, "")
    _unwrap(list(split.items()), (), found)
    return found


def _unwrap(
    group: list[tuple[str, tuple[str, ...]]], prefix: tuple[str, ...], found: dict[str, str]
) -> None:
    """Name a group of entries whose canonical names all start with ``prefix``."""
    while True:
        wrappers = _WRAPPERS & {rest[0] for _, rest in group if len(rest) > 1}
        shorter = group
        for wrapper in sorted(wrappers):
            fewer = [
                (name, rest[1:] if len(rest) > 1 and rest[0] == wrapper else rest)
                for name, rest in shorter
            ]
            if len({rest for _, rest in fewer}) == len(group):
                shorter = fewer
        if shorter == group:
            break
        group = shorter
    children: dict[str, list[tuple[str, tuple[str, ...]]]] = {}
    for name, rest in group:
        if len(rest) > 1:
            children.setdefault(rest[0], []).append((name, rest[1:]))
        else:
            found[name] = ".".join((*prefix, *rest))
    for part, below in children.items():
        _unwrap(below, (*prefix, part), found)


def has_surrogate(text: str) -> bool:
    """Whether ``text`` holds a lone surrogate: two of them side by side would come back from
    JSON as one character.
    """
    return not text.isascii() and _SURROGATE.search(text) is not None


@functools.lru_cache(maxsize=1 << 14)
def escape(part: str) -> str:
    """A path part that holds no ``/`` and no lone surrogate, and is never empty."""
    part = part.replace("%", "%25").replace("/", "%2F").replace("[", "%5B") or "%"
    return part if part.isascii() else _SURROGATE.sub(lambda m: f"%u{ord(m[0]):04x}", part)


def join(path: str, key: object) -> str:
    """The path of a member: text keys as they are, others as ``[repr]``, shortened."""
    return f"{path}/{escape(key)}" if type(key) is str else f"{path}/[{escape(_short(key))}]"


def _short(key: object) -> str:
    if type(key) is int and abs(key) < _SAFE_INT:
        return str(key)
    if isinstance(key, torch.Tensor):
        return type(key).__name__  # its text would need its values
    try:
        return reprlib.repr(key)
    except Exception:  # noqa: BLE001  a user's own __repr__
        return type(key).__name__
