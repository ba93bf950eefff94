"""A wrong argument is one clear error that says what was expected and what was found."""

from __future__ import annotations

import math
import os
import pathlib
from typing import Any

import pytest
import torch

from asymcheck import Checkpointer
from asymcheck.errors import OptionError
from asymcheck.planning.cadence import Never, OverheadBudget
from asymcheck.planning.policy import Admission
from asymcheck.storage.memory import MemoryStore


class _BytesPath(os.PathLike[bytes]):
    def __fspath__(self) -> bytes:
        return b"runs/a"


MODEL = torch.nn.Linear(2, 2)
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"root": None}, "root: expected a directory, a URL or a Store, found NoneType None"),
    ({"root": b"runs/a"}, "root: expected a directory, .* found bytes b'runs/a'"),
    ({"root": 7}, "root: expected a directory, .* found int 7"),
    ({"root": _BytesPath()}, "root: expected a directory, .* found _BytesPath"),
    ({"root": MemoryStore}, "root: expected a directory, .* found type"),
    ({"root": ""}, "root: expected a directory"),
    ({"state": None}, "state: expected a dict such as .* found NoneType"),
    ({"state": MODEL}, "state: expected a dict such as .* found Linear"),
    ({"state": [MODEL]}, "state: expected a dict such as .* found list"),
    ({"strategy": None}, "strategy: expected one of .* found None"),
    ({"strategy": {}}, "strategy: expected one of .* found {}"),
    ({"every_steps": "5"}, "every_steps: expected an integer from 1 on, found '5'"),
    ({"every_steps": True}, "every_steps: expected an integer from 1 on, found True"),
    ({"every_steps": 2.0}, r"every_steps: expected an integer from 1 on, found 2\.0"),
    ({"every_steps": 0}, "every_steps: expected an integer from 1 on, found 0"),
    ({"every_seconds": "5"}, "every_seconds: expected a number of seconds above 0, found '5'"),
    ({"every_seconds": True}, "every_seconds: expected a number of seconds above 0"),
    ({"every_seconds": math.nan}, "every_seconds: expected a number .* found nan"),
    ({"every_seconds": 0}, "every_seconds: expected a number .* found 0"),
    ({"every_steps": 5, "every_seconds": 5.0}, "expected one of .*, found every_steps and every_s"),
    ({"every_steps": 5, "cadence": Never()}, "expected one of .*, found every_steps and cadence"),
    ({"cadence": 0.02}, r"cadence: expected one of asymcheck.planning.cadence, .* found 0\.02"),
    ({"cadence": OverheadBudget}, "cadence: expected one of .*OverheadBudget.0.02., found <class"),
    ({"keep_last": 1.5}, r"keep_last: expected an integer from 1 on, found 1\.5"),
    ({"keep_last": "3"}, "keep_last: expected an integer from 1 on, found '3'"),
    ({"keep_every": 2}, "keep_last: expected a number with keep_every"),
    ({"mode": None}, "mode: expected 'min' or 'max', found None"),
    ({"persist": None}, "persist: expected 'auto', 'process' or 'thread', found None"),
    ({"on_error": "ignore"}, "on_error: expected one of 'raise', 'warn', found 'ignore'"),
    ({"read_only": "no"}, "read_only: expected True or False, found 'no'"),
    ({"read_only": None}, "read_only: expected True or False, found None"),
    ({"grace_s": -1}, "grace_s: expected a number of seconds in .* found -1"),
    ({"grace_s": math.nan}, "grace_s: expected a number of seconds in .* found nan"),
    ({"grace_s": math.inf}, "grace_s: expected a number of seconds in .* found inf"),
    ({"grace_s": None}, "grace_s: expected a number of seconds in .* found None"),
    ({"grace_s": True}, "grace_s: expected a number of seconds in .* found True"),
    ({"sink": None}, "sink: expected something to call, found None"),
    ({"sink": []}, r"sink: expected something to call, found \[\]"),
]


@pytest.mark.parametrize(("wrong", "said"), WRONG, ids=[str(w)[:40] for w, _ in WRONG])
def test_a_wrong_argument_is_one_clear_error_and_makes_nothing(
    tmp_path: pathlib.Path, wrong: dict[str, Any], said: str
) -> None:
    arguments: dict[str, Any] = {"root": tmp_path / "root", "state": {"m": MODEL}, **wrong}
    with pytest.raises(OptionError, match=said):
        Checkpointer(arguments.pop("root"), **arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("root", ["text", "path", "store"])
def test_a_text_a_path_and_a_store_are_roots(tmp_path: pathlib.Path, root: str) -> None:
    given: Any = {"text": str(tmp_path), "path": tmp_path, "store": MemoryStore()}[root]
    with Checkpointer(given, state={"m": MODEL}, grace_s=60) as checkpointer:
        assert checkpointer.restore() == 0


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda c: c.restore(step="5"), "step: expected an integer in .* found '5'"),
        (lambda c: c.restore(step=-1), "step: expected an integer in .* found -1"),
        (lambda c: c.restore(step=5, resume="never"), "resume: expected 'auto' or 'must' with"),
        (lambda c: c.restore(resume=None), "resume: expected one of 'auto', .* found None"),
        (lambda c: c.restore(strict="no"), "strict: expected True or False, found 'no'"),
        (lambda c: c.restore(dtype_policy="any"), "dtype_policy: expected one of 'exact', 'cast'"),
        (lambda c: c.step("5"), "step: expected an integer in .* found '5'"),
        (lambda c: c.step(0), "step: expected an integer in .* found 0"),
        (lambda c: c.step(True), "step: expected an integer in .* found True"),
        (lambda c: c.save(2.0), r"step: expected an integer in .* found 2\.0"),
        (lambda c: c.save(1, [("loss", 1.0)]), "metrics: expected a dict such as .* found list"),
        (lambda c: c.save(1, {"loss": "low"}), "metrics.'loss'.: expected a number"),
        (lambda c: c.wait(-1), "timeout_s: expected a number of seconds in .* found -1"),
        (lambda c: c.wait("soon"), "timeout_s: expected a number of seconds in .* found 'soon'"),
    ],
)
def test_a_wrong_call_is_one_clear_error_and_the_next_right_one_works(call: Any, said: str) -> None:
    with Checkpointer(MemoryStore(), state={"m": MODEL}, every_steps=2) as checkpointer:
        checkpointer.restore()
        with pytest.raises(OptionError, match=said):
            call(checkpointer)
        assert checkpointer.step(1) is None
        assert checkpointer.step(2) is not None
        checkpointer.wait(60)
        assert checkpointer.steps() == [2]


@pytest.mark.parametrize("wrong", [{"max_in_flight": "2"}, {"when_full": "drop"}])
def test_an_admission_of_another_kind_is_none(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=f"{next(iter(wrong))}: expected"):
        Admission(**wrong)
