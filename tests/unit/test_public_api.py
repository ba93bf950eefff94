"""The surface that a training script sees: small, frozen, real."""

from __future__ import annotations

import importlib.metadata
import inspect
import pickle
from pathlib import Path

import pytest

import asymcheck
from asymcheck import errors, session

SURFACE = {
    "CheckpointError",
    "Checkpointer",
    "CorruptCheckpoint",
    "IncompatibleCheckpoint",
    "NoCheckpoint",
    "StateError",
    "StoreError",
    "Strategy",
    "SupersededWriter",
    "Tier",
    "strategies",
}
METHODS = {"restore", "steps", "step", "save", "fence", "update", "wait", "tier_states", "close"}
OPTIONS = {
    "state",
    "strategy",
    "every_steps",
    "every_seconds",
    "cadence",
    "keep_last",
    "keep_every",
    "keep_best",
    "monitor",
    "mode",
    "on_error",
    "read_only",
    "grace_s",
    "sink",
    "fidelity",
    "trace",
    "tiers",
}


def _error_classes() -> list[type[Exception]]:
    return [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, errors.CheckpointError)
    ]


def test_the_surface_is_what_it_was() -> None:
    # Adding a name is a decision: write it here too. Removing one breaks users.
    assert set(asymcheck.__all__) == SURFACE


def test_every_name_of_the_surface_is_there_and_has_a_docstring() -> None:
    for name in asymcheck.__all__:
        value = getattr(asymcheck, name)
        if isinstance(value, type):
            assert inspect.getdoc(value), name


def test_the_checkpointer_is_the_sessions() -> None:
    assert asymcheck.Checkpointer is session.Checkpointer


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Chekpointer"):
        asymcheck.Chekpointer  # noqa: B018


def test_the_methods_of_a_checkpointer_are_documented_and_no_more_than_promised() -> None:
    found = {
        name
        for name, value in vars(asymcheck.Checkpointer).items()
        if callable(value) and not name.startswith("_")
    }
    assert found == METHODS
    assert all(inspect.getdoc(getattr(asymcheck.Checkpointer, name)) for name in found)


def test_everything_but_the_root_is_passed_by_name() -> None:
    parameters = inspect.signature(asymcheck.Checkpointer).parameters
    by_place = [p.name for p in parameters.values() if p.kind is not p.KEYWORD_ONLY]
    assert by_place == ["root"]
    assert set(parameters) - {"root"} >= OPTIONS
    documented = inspect.getdoc(asymcheck.Checkpointer) or ""
    assert [name for name in parameters if f"{name}: " not in documented] == []


def test_each_error_stands_in_the_drawn_tree_under_its_parent() -> None:
    tree = inspect.getdoc(errors) or ""
    depth = {
        line.split()[1]: len(line) - len(line.lstrip())
        for line in tree.splitlines()
        if line.lstrip()[:2] in ("* ", "- ", "+ ")
    }
    classes = _error_classes()
    assert set(depth) == {c.__name__ for c in classes}
    for found in classes[1:]:
        parent = found.__mro__[1]
        assert issubclass(parent, errors.CheckpointError)
        assert depth[found.__name__] == depth[parent.__name__] + 2


def test_an_error_about_arguments_is_also_a_value_error() -> None:
    assert issubclass(errors.OptionError, ValueError)


def test_the_version_is_the_installed_one() -> None:
    assert asymcheck.__version__ == importlib.metadata.version("asymcheck")


def test_the_package_is_typed_and_brings_its_stores_as_entry_points() -> None:
    assert (Path(asymcheck.__file__).parent / "py.typed").exists()
    found = {e.name: e.load() for e in importlib.metadata.entry_points(group="asymcheck.stores")}
    assert {"file", "memory", "faulty"} <= set(found)
    assert all(callable(factory) for factory in found.values())


@pytest.mark.parametrize(
    "error",
    [
        errors.StateError("model/w", "sparse"),
        errors.StoreError("disk", retryable=True),
        errors.ObjectNotFound("gone"),
        errors.CorruptCheckpoint("a.pack at byte 4096", "hash differs"),
        errors.IncompatibleCheckpoint("no", missing_keys=["a"], mismatched=[("k", "x", "y")]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_keeps_its_message_and_attributes_on_its_way_from_another_process(
    error: errors.CheckpointError,
) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
