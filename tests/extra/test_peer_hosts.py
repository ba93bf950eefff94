"""Two hosts train together, their checkpoints in each other's memory. One is lost and replaced."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from asymcheck.testing.children import TIMEOUT_S
from asymcheck.testing.hosts import Hosts, why_not

pytestmark = [pytest.mark.extra, pytest.mark.crash, pytest.mark.xdist_group("hosts")]

CLI = "from asymcheck.cli import app; app()"
STEPS = 6
TRAIN = """
import hashlib, sys
from datetime import timedelta
import torch, torch.distributed as dist
from asymcheck import Checkpointer, Tier
from asymcheck.planning.cadence import EverySteps

rank, steps, master, root, durable = sys.argv[1:]
rank, steps = int(rank), int(steps)
torch.set_num_threads(1)
dist.init_process_group(
    "gloo", init_method=master, rank=rank, world_size=2, timeout=timedelta(seconds=30)
)
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(300, 300))
optimizer = torch.optim.AdamW(model.parameters())

def digest():
    tensors = [t for p in model.parameters() for t in (p, *optimizer.state[p].values())]
    return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()

state = {"model": model, "optimizer": optimizer}
tiers = [Tier(durable, every=EverySteps(2), name="durable")] if durable != "none" else []
ckpt = Checkpointer(root, state=state, keep_last=2, tiers=tiers, timeout_s=30)
start = ckpt.restore()
gave = [s.tier for s in ckpt.report.served if s.nbytes] if start else []
print("start", start, digest() if start else "-", *gave, flush=True)
for step in range(start + 1, steps + 1):
    torch.manual_seed(100 * step + rank)
    model(torch.randn(4, 300)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    ckpt.save(step)
    ckpt.wait()
    print("step", step, digest(), flush=True)
ckpt.close()
print("end", steps, digest(), flush=True)
sys.stdin.read()
"""


class Said:
    """The lines of a process, each waited for within a bound."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._lines: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
        self._log = log
        threading.Thread(target=self._listen, args=(process,), daemon=True).start()

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._lines.put(line.split())

    def next(self, *begin: str) -> list[str]:
        """The next line, which must begin so; without that part."""
        try:
            line = self._lines.get(timeout=TIMEOUT_S)
        except queue.Empty:
            raise AssertionError(
                f"{begin} was not said:\n{self._log.read_text()[-4000:]}"
            ) from None
        assert tuple(line[: len(begin)]) == begin, (line, self._log.read_text()[-4000:])
        return line[len(begin) :]


class Job:
    """A training of two ranks, one on each of two hosts, and an agent on each."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts = hosts
        self.folder = folder
        self.log = folder / "log"
        self.secret = folder / "secret"
        self.secret.write_text("only these two hosts know it")
        self.secret.chmod(0o600)
        self.agents = ",".join(f"{hosts.address(host)}:7070" for host in (0, 1))
        self.said: dict[int, Said] = {}
        for host in (0, 1):
            self.agent(host)

    def agent(self, host: int) -> None:
        listen = f"{self.hosts.address(host)}:7070"
        command = [sys.executable, "-c", CLI, "agent", "--listen", listen, "--room-gib", "0.2"]
        command += ["--secret-file", str(self.secret), "--peers", self.agents, "--replicas", "2"]
        agent = self.said[host] = Said(self.hosts.run(host, command, self.log), self.log)
        agent.next("listening", "on")

    def train(
        self, name: str, port: int, durable: str = "none", bounds: str = "timeout_s=5"
    ) -> list[Said]:
        root = f"peers://{self.agents}/{name}?replicas=2&secret_file={self.secret}&{bounds}"
        master = f"tcp://{self.hosts.address(0)}:{port}"
        ranks = []
        for host in (0, 1):
            command = ["env", "GLOO_SOCKET_IFNAME=eth0", sys.executable, "-c", TRAIN]
            command += [str(host), str(STEPS), master, root, durable]
            ranks.append(Said(self.hosts.run(host, command, self.log), self.log))
        return ranks

    def replace(self, host: int) -> None:
        """A new host takes the place of one that is lost."""
        self.hosts.kill(host)
        self.hosts.start(host)
        self.agent(host)


@pytest.fixture
def job(tmp_path: Path, not_run_here: Callable[[str], NoReturn]) -> Iterator[Job]:
    reason = why_not()
    if reason:
        not_run_here(reason)
    with Hosts(2) as hosts:
        yield Job(hosts, tmp_path)


def uncut(job: Job) -> list[str]:
    """What the state is after each step where nothing fails; and at last where it ended."""
    ranks = job.train("uncut", 7100)
    for rank in ranks:
        rank.next("start", "0")
    digests = ["-"]
    for step in range(1, STEPS + 1):
        mine, other = (rank.next("step", str(step)) for rank in ranks)
        assert mine == other
        digests += mine
    for rank in ranks:
        assert rank.next("end", str(STEPS)) == [digests[-1]]
    return digests


@pytest.mark.timeout(300)
def test_a_lost_host_is_replaced_and_its_state_comes_back_from_its_peer(job: Job) -> None:
    digests = uncut(job)
    ranks = job.train("cut", 7200)
    for rank in ranks:
        rank.next("start", "0")
        for step in (1, 2, 3):
            assert rank.next("step", str(step)) == [digests[step]]
    job.replace(0)
    job.hosts.cut(1)  # what is left of the training there hears nobody any more
    job.hosts.mend(1)
    again = job.train("cut", 7300)
    for rank in again:
        step, digest, *_ = rank.next("start")
        assert int(step) in (3, 4)  # at most the step that was under way is lost
        assert digest == digests[int(step)]
        for later in range(int(step) + 1, STEPS + 1):
            assert rank.next("step", str(later)) == [digests[later]]


@pytest.mark.timeout(300)
def test_a_host_is_replaced_and_healed_before_the_other_one_is_lost(job: Job) -> None:
    digests = uncut(job)
    for rank in job.train("cut", 7200):
        rank.next("start", "0")
        for step in range(1, STEPS + 1):
            assert rank.next("step", str(step)) == [digests[step]]
        rank.next("end", str(STEPS))
    job.replace(0)
    job.said[0].next("healed:")
    job.replace(1)  # now the memory of the new host 0 alone has the checkpoints
    for rank in job.train("cut", 7300):
        assert rank.next("start", str(STEPS))[:1] == [digests[STEPS]]


@pytest.mark.timeout(300)
def test_a_slow_link_costs_copies_and_not_the_training_and_they_are_made_up_for(job: Job) -> None:
    digests = uncut(job)
    job.hosts.slow(1, 2)  # a copy from host 0 needs four times the bound
    for rank in job.train("cut", 7200, bounds="timeout_s=0.5&slowest_bytes_per_s=1e8"):
        rank.next("start", "0")
        for step in range(1, STEPS + 1):
            assert rank.next("step", str(step)) == [digests[step]]
        rank.next("end", str(STEPS))
    job.hosts.slow(1, 0)
    job.said[1].next("healed:")
    job.replace(0)
    job.said[0].next("healed:")
    for rank in job.train("cut", 7300):
        step, digest, *_ = rank.next("start")
        assert int(step) > 0
        assert digest == digests[int(step)]


@pytest.mark.timeout(300)
def test_a_lost_group_comes_back_from_the_durable_tier(job: Job) -> None:
    digests = uncut(job)
    durable = str(job.folder / "durable")
    ranks = job.train("cut", 7200, durable)
    for rank in ranks:
        rank.next("start", "0")
        for step in range(1, STEPS + 1):
            assert rank.next("step", str(step)) == [digests[step]]
        rank.next("end")
    for host in (0, 1):
        job.replace(host)
    for rank in job.train("cut", 7300, durable):
        assert rank.next("start", str(STEPS))[:1] == [digests[STEPS]]
