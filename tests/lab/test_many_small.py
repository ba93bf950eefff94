"""Many small tensors on several ranks: they come back; how long that takes is for who asks."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from asymcheck_lab.cli import app
from asymcheck_lab.errors import UsageError
from asymcheck_lab.many_small import FORMS, measure_small


def test_many_small_tensors_come_back_on_two_ranks_and_the_seconds_are_told(tmp_path: Path) -> None:
    arguments = ["many-small", "--tensors", "50", "--dir", str(tmp_path)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        f"50 tensors, {form} on 2 ranks" for form in FORMS
    ]
    assert all("durable after" in line and "loaded in" in line for line in lines)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("parallel", "tensors", "message"),
    [("zero3", 1, "parallel: expected some of ddp, fsdp2"), ("ddp", 0, "tensors: expected")],
)
def test_what_cannot_be_measured_is_refused(
    parallel: str, tensors: int, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        measure_small(parallel, tensors=tensors, ranks=2, folder=tmp_path)
