"""The examples as a reader starts them: killed, and gone on with by one, two and three ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KILLED = Path(__file__).with_name("killed.py")
EXAMPLES = ["ddp", "fsdp2", "deepspeed"]
LIMIT_S = 200

pytestmark = pytest.mark.extra  # sixteen interpreters with torch: minutes


def torchrun(ranks: int, *words: object) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.run(
        [*launcher, f"--nproc-per-node={ranks}", *map(str, words)],
        check=False,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
    )


def losses(done: subprocess.CompletedProcess[str]) -> dict[int, str]:
    found = re.findall(r"^step (\d+): loss (\S+)$", done.stdout, re.MULTILINE)
    return {int(step): loss for step, loss in found}


def start(done: subprocess.CompletedProcess[str], ranks: int) -> int:
    found = re.search(rf"^resumed from step (\d+) on {ranks} ranks$", done.stdout, re.MULTILINE)
    assert found is not None, done.stdout + done.stderr
    return int(found[1])


@pytest.mark.crash
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_that_was_killed_goes_on_with_any_number_of_ranks(tmp_path: Path, name: str):
    script, root = ROOT / "examples" / f"{name}.py", tmp_path / "cut"
    whole = torchrun(2, script, "--steps", 60, "--root", tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    expected = losses(whole)
    assert list(expected) == [10, 20, 30, 40, 50, 60]
    assert float(expected[60]) < float(expected[10])

    killed = torchrun(2, KILLED, 1, 34, script, "--steps", 60, "--root", root)
    assert killed.returncode != 0
    assert losses(killed) == {step: expected[step] for step in (10, 20, 30)}

    pair = torchrun(2, script, "--steps", 60, "--root", root)
    assert pair.returncode == 0, pair.stderr
    begun = start(pair, 2)
    assert begun in (20, 30), "that of step 30 was being written"
    assert losses(pair) == {step: expected[step] for step in expected if step > begun}

    for ranks, steps in ((1, 80), (3, 100)):
        done = torchrun(ranks, script, "--steps", steps, "--root", root)
        assert done.returncode == 0, done.stderr
        assert start(done, ranks) == steps - 20
        found = losses(done)
        assert list(found) == [steps - 10, steps]
        assert float(found[steps]) < float(expected[10]), "it goes on with what was learned"
