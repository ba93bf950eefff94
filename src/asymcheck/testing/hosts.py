"""Several hosts on one machine: a network namespace each, joined by a bridge in one of its own.

Whatever runs on a host has a ``/dev/shm`` of its own too. A host is killed for real: every process
in its namespace, and with them its memory. Needs root and Debian's iproute2.
"""

from __future__ import annotations

import shutil
import subprocess
import time
import uuid
from pathlib import Path
from types import TracebackType

_WAIT_S = 60.0


def why_not() -> str:
    """Why this machine cannot have such hosts; empty where it can."""
    if not (shutil.which("ip") and shutil.which("unshare")):
        return "hosts in network namespaces (no iproute2)"
    name = f"asym-{uuid.uuid4().hex[:6]}"
    if subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True).returncode:
        return "hosts in network namespaces (they are not permitted)"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=_WAIT_S)


class Hosts:
    """So many hosts; made by ``with``, and gone after it.

    Args:
        count: How many.
    """

    def __init__(self, count: int) -> None:
        self._id = uuid.uuid4().hex[:6]
        self._switch = f"asym-{self._id}-net"
        self._count = count
        self._running: list[subprocess.Popen[str]] = []

    def address(self, host: int) -> str:
        """Of a host; nothing outside of these namespaces has it."""
        return f"10.77.0.{host + 1}"

    def __enter__(self) -> Hosts:
        try:
            _ip("netns", "add", self._switch)
            _ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
            _ip("-n", self._switch, "link", "set", "br0", "up")
            for host in range(self._count):
                self.start(host)
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def start(self, host: int) -> None:
        """A host that is new: nothing runs on it."""
        name, port = self._name(host), f"port{host}"
        _ip("netns", "add", name)
        _ip("-n", name, "link", "set", "lo", "up")
        _ip(
            *("-n", self._switch, "link", "add", port, "type", "veth"),
            *("peer", "name", "eth0", "netns", name),
        )
        _ip("-n", self._switch, "link", "set", port, "master", "br0", "up")
        _ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
        _ip("-n", name, "link", "set", "eth0", "up")

    def run(self, host: int, command: list[str], log: Path) -> subprocess.Popen[str]:
        """Start a command on a host; its standard output is read by the caller."""
        where = ["ip", "netns", "exec", self._name(host), "unshare", "--mount"]
        mounted = 'mount -t tmpfs -o size=256M tmpfs /dev/shm && exec "$@"'
        with log.open("a") as errors:
            done = subprocess.Popen(
                [*where, "sh", "-c", mounted, "sh", *command],
                stdout=subprocess.PIPE,
                stderr=errors,
                stdin=subprocess.DEVNULL,
                text=True,
            )
        self._running.append(done)
        return done

    def cut(self, host: int) -> None:
        """Take a host off the network; everything on it goes on."""
        _ip("-n", self._switch, "link", "set", f"port{host}", "down")

    def mend(self, host: int) -> None:
        """Join it again."""
        _ip("-n", self._switch, "link", "set", f"port{host}", "up")

    def slow(self, host: int, mbit_per_s: int, queue_ms: int = 400) -> None:
        """Bound what goes to a host, with a queue that holds so much; 0 for no bound."""
        tc = ["netns", "exec", self._switch, "tc", "qdisc"]
        where = ["dev", f"port{host}", "root"]
        if mbit_per_s:
            rate = ["tbf", "rate", f"{mbit_per_s}mbit", "burst", "64kb", "latency", f"{queue_ms}ms"]
            _ip(*tc, "replace", *where, *rate)
        else:
            _ip(*tc, "del", *where)

    def kill(self, host: int) -> None:
        """Everything on a host ends at once, and its network with it."""
        name = self._name(host)
        until_s = time.monotonic() + _WAIT_S
        while found := self._pids(name):
            subprocess.run(["kill", "-9", *found], check=False, capture_output=True)
            assert time.monotonic() < until_s, f"{name}: {found} do not end"
            for process in self._running:
                process.poll()  # a zombie is in the namespace still
            time.sleep(0.02)
        _ip("netns", "del", name)
        # Its end of the cable goes with the namespace, a little later.
        subprocess.run(
            ["ip", "-n", self._switch, "link", "del", f"port{host}"],
            check=False,
            capture_output=True,
        )

    def end(self) -> None:
        """Kill every host and take the network away."""
        listed = subprocess.run(
            ["ip", "netns", "list"], check=True, capture_output=True, text=True
        ).stdout
        for host in range(self._count):
            if self._name(host) in listed.split():
                self.kill(host)
        if self._switch in listed.split():
            _ip("netns", "del", self._switch)
        for process in self._running:
            process.wait(_WAIT_S)
            if process.stdout is not None:
                process.stdout.close()

    def _name(self, host: int) -> str:
        return f"asym-{self._id}-{host}"

    def _pids(self, name: str) -> list[str]:
        done = subprocess.run(
            ["ip", "netns", "pids", name], check=True, capture_output=True, text=True
        )
        return done.stdout.split()
