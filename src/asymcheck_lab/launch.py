"""Starts the ranks of a training: ``torchrun`` on this host, and over ssh on others."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from asymcheck_lab.errors import DataError

_LINE = re.compile(r"(?P<name>[^\s=]+)\s+slots=(?P<slots>[1-9][0-9]*)\Z")
_PASSED_ON = ("PYTHON", "NCCL_", "GLOO_", "OMP_", "XDG_CACHE_HOME", "CUDA_VISIBLE_DEVICES")
_GRACE_S = 60.0


@dataclass(frozen=True, slots=True)
class Host:
    """A machine, and how many ranks run there."""

    name: str
    slots: int


def read_hosts(path: Path) -> list[Host]:
    """The machines of a hostfile, as MPI and DeepSpeed have it: ``NAME slots=N`` a line.

    Empty lines and what follows ``#`` do not count. The first machine is where ranks meet.

    Raises:
        DataError: It cannot be read, or a line is something else.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as failure:
        raise DataError(str(path), expected="a hostfile", found=str(failure)) from failure
    hosts: list[Host] = []
    for number, line in enumerate(lines, start=1):
        said = line.partition("#")[0].strip()
        if not said:
            continue
        match = _LINE.match(said)
        if match is None:
            raise DataError(
                f"{path}, line {number}", expected="NAME slots=N, N from 1 on", found=repr(said)
            )
        if match["name"] in [host.name for host in hosts]:
            raise DataError(
                f"{path}, line {number}", expected="each host once", found=repr(match["name"])
            )
        hosts.append(Host(match["name"], int(match["slots"])))
    if not hosts:
        raise DataError(str(path), expected="at least one line NAME slots=N", found="none")
    return hosts


def is_launched() -> bool:
    """Whether a launcher such as ``torchrun`` or ``deepspeed`` started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def usual_ranks(device: str) -> int:
    """Ranks on this host where none are asked for: one for each GPU, two on a CPU."""
    if device == "cpu":
        return 2
    import torch

    return max(1, torch.cuda.device_count())


def command_on(
    hosts: Sequence[Host], number: int, port: int, arguments: Sequence[str]
) -> list[str]:
    """What starts the ranks of host ``number``, there."""
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *(f"--nnodes={len(hosts)}", f"--node-rank={number}"),
        f"--nproc-per-node={hosts[number].slots}",
        *(f"--master-addr={hosts[0].name}", f"--master-port={port}"),
        # What follows is not torchrun's, which would take --run for an abbreviation of its own.
        *("-m", "--", "asymcheck_lab"),
        *arguments,
    ]


def over_ssh(
    host: str, command: Sequence[str], environ: Mapping[str, str], folder: Path
) -> list[str]:
    """``command``, on another host, in the same folder and with what Python and NCCL go by.

    A terminal is asked for, so that what runs there ends with the connection.
    """
    passed = [f"{n}={v}" for n, v in environ.items() if n.startswith(_PASSED_ON)]
    there = f"cd {shlex.quote(str(folder))} && exec env {shlex.join([*sorted(passed), *command])}"
    return ["ssh", "-tt", "-o", "BatchMode=yes", host, there]


def launch(hosts: Sequence[Host], arguments: Sequence[str]) -> int:
    """Run ``asymlab ARGUMENTS`` as all ranks of these hosts; blocks until they are done.

    The other hosts must be reachable by ssh without a password, with the same paths as here:
    the same folder, the same Python, and the checkpoints' root, which all of them write to.
    When the ranks of one host fail, those of the others get a minute to notice it.

    Returns:
        0, or the exit code of the host that failed first.
    """
    own = {"localhost", "127.0.0.1", socket.gethostname(), socket.getfqdn()}
    port = _free_port()
    # torchrun would set it and say so; a training sets its threads itself.
    environ = {"OMP_NUM_THREADS": "1", **os.environ}
    running: list[subprocess.Popen[bytes]] = []
    code = 0
    try:
        for number, host in enumerate(hosts):
            command = command_on(hosts, number, port, arguments)
            if host.name not in own:
                command = over_ssh(host.name, command, environ, Path.cwd())
            running.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environ))
        until_s = float("inf")
        while running and time.monotonic() < until_s:
            for process in [p for p in running if p.poll() is not None]:
                running.remove(process)
                if process.returncode and not code:
                    # What a signal ended has no code of its own, and counts as a failure too.
                    code = process.returncode if process.returncode > 0 else 1
                    until_s = time.monotonic() + _GRACE_S
            time.sleep(0.05)
    finally:
        for process in running:
            with suppress(OSError):
                process.send_signal(signal.SIGTERM)
        for process in running:
            try:
                process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    return code


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
