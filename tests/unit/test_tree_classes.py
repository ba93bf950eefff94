"""Classes in a state are named, never imported: what can come back is saved, the rest refused."""

from __future__ import annotations

import dataclasses
import enum
import sys
import types

import pytest

from asymcheck.device.tree import Decoder, Encoder
from asymcheck.errors import IncompatibleCheckpoint, StateError


class Phase(enum.Enum):
    WARM = 1
    MAIN = 2


class Options(enum.Flag):
    A = 1
    B = 2


class Scope:
    class Inner(enum.Enum):
        ONE = 1


@dataclasses.dataclass
class Point:
    x: int


def _encode(value: object) -> object:
    return Encoder(lambda key, array: key).encode(value, "extra/it")


def _round_trip(value: object) -> object:
    return Decoder(lambda key: None).decode(_encode(value))


@pytest.fixture(autouse=True)
def _findable(monkeypatch: pytest.MonkeyPatch) -> None:
    # Where tests are imported by path, their module need not be registered by its name.
    monkeypatch.setitem(sys.modules, __name__, types.ModuleType(__name__))
    sys.modules[__name__].__dict__.update(globals())


@pytest.mark.parametrize("value", [Phase.MAIN, Options.A, Scope.Inner.ONE, Point(3)])
def test_a_value_of_a_findable_class_comes_back(value: object) -> None:
    assert _round_trip(value) == value


def test_an_enum_that_cannot_be_found_again_is_refused_at_the_save() -> None:
    class Local(enum.Enum):
        ONE = 1

    with pytest.raises(StateError, match="extra/it"):
        _encode(Local.ONE)


@pytest.mark.parametrize("value", [Options.A | Options.B, Options(0)])
def test_a_combination_of_flags_comes_back_though_it_has_no_name(value: Options) -> None:
    assert _round_trip({"flags": value}) == {"flags": value}


def test_looking_up_a_class_imports_and_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    lazy = types.ModuleType("lazy_package")
    lazy.__getattr__ = lambda name: ran.append(name) or Phase
    monkeypatch.setitem(sys.modules, "lazy_package", lazy)
    with pytest.raises(IncompatibleCheckpoint, match="not loaded"):
        Decoder(lambda key: None).decode({"$enum": ["lazy_package:Phase", "WARM"]})
    assert ran == []


def test_a_stored_name_reaches_nothing_but_a_class_of_the_right_kind() -> None:
    for tree in (
        {"$enum": ["os:system", "x"]},
        {"$enum": ["builtins:int", "x"]},
        {"$namedtuple": ["subprocess:Popen", [1]]},
        {"$dataclass": ["subprocess:Popen", {}]},
        {"$dataclass": [f"{__name__}:Point.__init__", {}]},
        {"$dataclass": ["no_such_module:Point", {}]},
        {"$dataclass": [":", {}]},
    ):
        with pytest.raises(IncompatibleCheckpoint, match="not loaded"):
            Decoder(lambda key: None).decode(tree)
