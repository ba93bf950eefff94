"""``asymlab run`` around a real ``torchrun``: a rank dies, a rank hangs, the launcher is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import asymcheck
from asymcheck.memory.arena import SHARED_MEMORY, slots_of
from asymcheck.memory.process import ProcessId
from asymcheck.storage.repository import open_repository
from asymcheck.storage.store import open_store

pytestmark = [pytest.mark.extra, pytest.mark.crash]

SOURCE = str(Path(asymcheck.__file__).parents[1])
LIMIT_S = 240.0
SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import asymcheck

folder, hits = Path(sys.argv[1]), sys.argv[2:]
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(200, 200))
optimizer = torch.optim.AdamW(model.parameters())
checkpointer = asymcheck.Checkpointer(
    folder / "root", state={"m": model, "o": optimizer}, every_steps=2, timeout_s=20
)
start = checkpointer.restore()
(folder / f"pid-{rank}-{start}").write_text(str(os.getpid()))
done = len(list(folder.glob("hit-*")))
for step in range(start + 1, 15):
    if rank == 1 and done < len(hits) and step == 8 + 2 * done:
        (folder / f"hit-{done}").touch()
        if hits[done] == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if hits[done] == "launcher":
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)
    torch.manual_seed(step * 10 + rank)
    model(torch.randn(4, 200)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    checkpointer.step(step)
    if step == 4:
        checkpointer.wait()  # so that there is something to go on from
checkpointer.close()
if rank == 0:
    torch.save(model.module.weight.detach(), folder / "weight")
dist.destroy_process_group()
"""


def run(folder: Path, *hits: str) -> tuple[dict[str, Any], Path]:
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "asymcheck_lab", "run", "--root", str(folder / "root")),
            *("--report", str(folder / "report.json"), "--backoff-s", "0.1", "--grace-s", "20"),
            *("--hang-timeout-s", "25", "--", sys.executable, "-m", "torch.distributed.run"),
            *("--standalone", "--nproc-per-node=2", str(folder / "train.py"), str(folder), *hits),
        ],
        env={**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads((folder / "report.json").read_text()), folder / "weight"


@pytest.mark.xdist_group("torchrun")
def test_ranks_are_started_again_and_end_as_if_nothing_had_been(tmp_path: Path) -> None:
    import torch

    found, weight = run(tmp_path / "hit", "dies", "launcher", "hangs")
    assert found["outcome"] == "done"
    assert found["suspects"] == []
    *failed, last = found["starts"]
    ends = ("exit code", "signal 9", "hang: no step, copy or commit for 25 s")
    for start, end in zip(failed, ends, strict=True):
        assert start["ended"].startswith(end)
    for before, after in zip(failed, [*failed[1:], last], strict=True):
        assert after["resumed_from"]["step"] >= before["latest_step"] - 4
        assert after["tier"] in ("root", "shared memory")
        assert after["steps_lost"] == before["latest_step"] - after["resumed_from"]["step"]
    for path in (tmp_path / "hit").glob("pid-*"):
        assert ProcessId.of(int(path.read_text())).start == 0
    run_id = open_repository(open_store(str(tmp_path / "hit" / "root"))).run
    assert list(slots_of(SHARED_MEMORY, run_id)) == []
    whole, expected = run(tmp_path / "whole")
    assert len(whole["starts"]) == 1
    assert torch.equal(torch.load(weight), torch.load(expected))
