"""A network of one's own: this process on one host, another host at the end of a cable.

The namespaces have no names and no files: they go with the processes in them. Needs root, or the
right to make namespaces, and iproute2.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from asymcheck.testing.children import Child, Say, run_in_child
from asymcheck_lab.errors import RunError

_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_WAIT_S = 30.0
_PREFIX = "10.77.0"


class Network:
    """This process in a network of its own from now on, and a second host across a link.

    Raises:
        RunError: It is not permitted here, or iproute2 is missing.

    Attributes:
        far_address: Of the other host.
    """

    far_address = f"{_PREFIX}.2"

    def __init__(self) -> None:
        for tool in ("ip", "nsenter"):
            if shutil.which(tool) is None:
                raise RunError(f"the command {tool} is missing (Debian: iproute2, util-linux)")
        _unshare()
        self._far = Child(_be_a_host)
        self._far.hear(_WAIT_S)
        _run("ip", "link", "set", "lo", "up")
        _run(*("ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth0"), *self._netns)
        _run("ip", "addr", "add", f"{_PREFIX}.1/24", "dev", "eth0")
        _run("ip", "link", "set", "eth0", "up")
        self._there("ip", "link", "set", "lo", "up")
        self._there("ip", "addr", "add", f"{self.far_address}/24", "dev", "eth0")
        self.mend()

    @property
    def _netns(self) -> tuple[str, str]:
        return ("netns", str(self._far.pid))

    def cut(self) -> None:
        """Nothing passes any more, and nobody is told."""
        self._there("ip", "link", "set", "eth0", "down")

    def mend(self) -> None:
        """It passes again; waits until the other host answers."""
        self._there("ip", "link", "set", "eth0", "up")
        until_s = time.monotonic() + _WAIT_S
        while not _answers(self.far_address):
            if time.monotonic() > until_s:
                raise RunError(f"{self.far_address} does not answer within {_WAIT_S:g} s")

    def enter_far(self) -> None:
        """From now on this process is on the other host; for a fork that does nothing else."""
        space = os.open(f"/proc/{self._far.pid}/ns/net", os.O_RDONLY)
        try:
            _system_call("setns", space, _CLONE_NEWNET)
        finally:
            os.close(space)

    def close(self) -> None:
        """Take the other host away, and the cable with it."""
        self._far.kill()
        self._far.wait(_WAIT_S)

    def _there(self, *command: str) -> None:
        _run("nsenter", f"--net=/proc/{self._far.pid}/ns/net", *command)


def why_no_network() -> str:
    """Why this machine cannot have one; empty where it can. Tried in a fork."""

    def attempt(say: Say) -> None:
        try:
            Network().close()
        except RunError as failure:
            say(str(failure))
        else:
            say("")

    return str(run_in_child(attempt, 2 * _WAIT_S).check()[0])


def end_with_parent() -> None:
    """SIGKILL to this process when the one that forked it ends, however that comes."""
    _system_call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _answers(address: str) -> bool:
    """Whether a host is there: it refuses, since nobody listens on that port."""
    try:
        socket.create_connection((address, 9), timeout=0.1).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True


def _be_a_host(say: Say) -> None:
    end_with_parent()
    _unshare()
    say("there")
    while True:
        signal.pause()


def _unshare() -> None:
    _system_call("unshare", _CLONE_NEWNET)


def _system_call(name: str, *arguments: int) -> None:
    call: Callable[..., int] = getattr(ctypes.CDLL(None, use_errno=True), name)
    if call(*arguments) != 0:
        raise RunError(f"{name}: {os.strerror(ctypes.get_errno())}")


def _run(*command: str) -> None:
    tool = Path(command[0]).name
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_WAIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as failure:
        raise RunError(f"{tool}: {failure}") from failure
    if done.returncode:
        raise RunError(f"{' '.join(command)}: {done.stderr.strip()}")
