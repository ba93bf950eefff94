"""The user's own classes in a state: named at the save, found again by name at the load.

A class is looked for among the modules that are already imported; nothing is imported to find
it and no constructor of it runs. Whatever could not come back is refused when it is saved.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from asymcheck.device.naming import join
from asymcheck.errors import IncompatibleCheckpoint, StateError

_HEAP_TYPE = 1 << 9
"""Flag of the classes that were made by a class statement."""


def is_open(kind: Any) -> bool:  # noqa: ANN401
    """Whether it is a dataclass whose fields may be set."""
    parameters: Any = getattr(kind, "__dataclass_params__", None)
    return parameters is not None and not parameters.frozen


# --- saving -----------------------------------------------------------------


def name_of(kind: type, path: str) -> str:
    """The name by which a class is found again, ``module:qualified.name``.

    Raises:
        StateError: It cannot be found by its name.
    """
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _find(name) is not kind:
        raise StateError(
            path, f"class {name} cannot be found again by its name: define it in a module"
        )
    return name


def member_name(value: enum.Enum, path: str) -> str:
    """The name of an enum's member.

    Raises:
        StateError: It has none.
    """
    if type(value).__members__.get(value.name) is not value:
        raise StateError(path, f"{value!r} is no member of its enum: store its value")
    return value.name


def fields_of(value: Any, path: str) -> dict[str, Any]:  # noqa: ANN401
    """The fields of a dataclass or named tuple.

    Raises:
        StateError: The fields are not all that it holds, or one is not set.
    """
    kind = type(value)
    names = _field_names(kind)
    built_in = [b for b in kind.__mro__ if not b.__flags__ & _HEAP_TYPE and b is not object]
    if built_in and not isinstance(value, tuple):
        raise StateError(
            path, f"a {kind.__qualname__} is also a {built_in[0].__name__}: store plain values"
        )
    for name in sorted(getattr(value, "__dict__", {}).keys() - set(names)):
        # A cached property is computed again.
        if not isinstance(inspect.getattr_static(kind, name, None), functools.cached_property):
            raise StateError(
                join(path, name), f"this attribute is no field of {kind.__qualname__}: make it one"
            )
    for name in names:
        if not hasattr(value, name):
            raise StateError(join(path, name), "this field is not set")
    return {name: getattr(value, name) for name in names}


# --- loading ----------------------------------------------------------------


def enum_member(name: object, member: object) -> enum.Enum:
    """The member of an enum.

    Raises:
        IncompatibleCheckpoint: The class or the member is not there.
    """
    kind = _known(name, lambda c: issubclass(c, enum.Enum), "enum")
    found = kind.__members__.get(member)
    if not isinstance(found, enum.Enum):
        raise IncompatibleCheckpoint(f"enum {name!r:.120} has no member {member!r:.80}")
    return found


def flag(name: object, bits: object) -> enum.Flag:
    """The flag with these bits.

    Raises:
        IncompatibleCheckpoint: The class or one of the bits is not there.
    """
    kind = _known(name, lambda c: issubclass(c, enum.Flag), "flag")
    try:
        found = kind(bits)
    except ValueError as bad:
        raise IncompatibleCheckpoint(f"flag {name!r:.120}: {bad}") from bad
    assert isinstance(found, enum.Flag)
    return found


def namedtuple(name: object, fields: Mapping[str, Any], decode: Callable[[Any], Any]) -> Any:  # noqa: ANN401
    """A named tuple with these fields, each decoded.

    Raises:
        IncompatibleCheckpoint: The class is not there or has other fields.
    """
    kind = _known(name, lambda c: issubclass(c, tuple) and hasattr(c, "_fields"), "named tuple")
    names = _checked_names(kind, fields)
    return tuple.__new__(kind, [decode(fields[f]) for f in names])


def dataclass(name: object, fields: Mapping[str, Any], decode: Callable[[Any], Any]) -> Any:  # noqa: ANN401
    """A dataclass with these fields, each decoded; no ``__init__``, no ``__post_init__`` runs.

    Raises:
        IncompatibleCheckpoint: The class is not there or has other fields.
    """
    kind = _known(name, dataclasses.is_dataclass, "dataclass")
    found = object.__new__(kind)
    for field in _checked_names(kind, fields):
        object.__setattr__(found, field, decode(fields[field]))
    return found


def _find(name: str) -> object:
    module, _, qualname = name.partition(":")
    found: object = sys.modules.get(module)
    for part in qualname.split("."):
        # Not getattr: a module may answer that by importing something.
        found = vars(found).get(part) if isinstance(found, types.ModuleType | type) else None
    return found


def _known(name: object, is_kind: Callable[[Any], bool], kind: str) -> Any:  # noqa: ANN401
    found = _find(str(name))
    if not isinstance(found, type) or not is_kind(found):
        raise IncompatibleCheckpoint(
            f"the state holds a {kind} of class {str(name)!r:.120}, which is not loaded: import "
            f"its module before restore()"
        )
    return found


def _field_names(kind: Any) -> list[str]:  # noqa: ANN401
    return (
        list(kind._fields)
        if issubclass(kind, tuple)
        else [f.name for f in dataclasses.fields(kind)]
    )


def _checked_names(kind: type, saved: Iterable[str]) -> list[str]:
    here = _field_names(kind)
    if set(saved) != set(here):
        raise IncompatibleCheckpoint(
            f"class {kind.__qualname__} has changed since the save: the checkpoint has the "
            f"fields {sorted(saved)}, the class has {sorted(here)}"
        )
    return here
