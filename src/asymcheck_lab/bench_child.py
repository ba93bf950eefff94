"""One run of a benchmark: a process of its own, in a folder of its own, with its memory watched."""

from __future__ import annotations

import json
import mmap
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Self

from asymcheck_lab.bench_run import descendants
from asymcheck_lab.bench_server import timed_mark
from asymcheck_lab.errors import RunError

SAMPLES_PER_S = 10
_RESCAN_S = 1.0
_LOG_TAIL = 2000


@contextmanager
def run_root(below: Path) -> Iterator[Path]:
    """An empty folder for the checkpoints of one run, in one for what else it writes. Both are
    removed at the end.
    """
    scratch = Path(tempfile.mkdtemp(prefix="run-", dir=below)).resolve()
    root = scratch / "root"
    root.mkdir()
    try:
        yield root
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        os.sync()  # what is removed must not be written while the next one is measured


def measure_in_child(
    module: str, spec: Mapping[str, Any], scratch: Path, timeout_s: float
) -> tuple[dict[str, Any], int]:
    """Run a module as a process that measures; blocks.

    Args:
        module: See ``watch_child``; its arguments are a specification and the file to write.
        spec: The specification.
        scratch: For that file and the log.
        timeout_s: See ``watch_child``.

    Returns:
        What it measured, and its peak of memory in bytes.

    Raises:
        RunError: It failed or was too slow.
    """
    out = scratch / "measured.json"
    arguments = [json.dumps(spec), str(out)]
    peak_bytes = watch_child(module, arguments, scratch / "log.txt", timeout_s)
    measured: dict[str, Any] = json.loads(out.read_text("utf-8"))
    return measured, peak_bytes


def watch_child(module: str, arguments: Sequence[str], log_path: Path, timeout_s: float) -> int:
    """Run a module as a process, sample its memory until it ends; blocks.

    Args:
        module: Its name, as for ``python -m``.
        arguments: For it.
        log_path: Gets what it says.
        timeout_s: After which it is killed.

    Returns:
        The peak in bytes.

    Raises:
        RunError: It failed or was too slow; with the tail of what it said.
    """
    with log_path.open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=_environment(),
        )
    memory = MemoryWatch(child.pid)
    until_s = monotonic() + timeout_s
    try:
        while child.poll() is None:
            if monotonic() > until_s:
                raise RunError(f"still running after {timeout_s:.0f} s: {tail_of(log_path)}")
            memory.sample()
            sleep(1 / SAMPLES_PER_S)
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
    if child.returncode != 0:
        raise RunError(f"ended with {child.returncode}: {tail_of(log_path)}")
    return memory.peak_bytes


class RunServer:
    """Measures runs in processes that are forked off one which has imported what they need.

    Use it in a ``with``; blocks there until that one is ready, or has failed.

    Args:
        workloads: Model and size of every run to come, and how it is spread over ranks.
        folder: Gets the log of the process.
        timeout_s: How long it may take to get ready.
        module: What it runs.
    """

    def __init__(
        self,
        workloads: Sequence[tuple[str, str, str]],
        folder: Path,
        timeout_s: float = 300.0,
        module: str = "asymcheck_lab.bench_server",
    ) -> None:
        self._arguments = [sys.executable, "-m", module, json.dumps(workloads)]
        self._log = folder / "server.txt"
        self._timeout_s = timeout_s

    def __enter__(self) -> Self:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._arguments,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,  # what has come is seen by select
                env=_environment(),
            )
        try:
            self._hear(self._timeout_s)
        except BaseException as failure:
            self.__exit__()
            if isinstance(failure, TimeoutError):
                raise RunError(f"not ready to run after {self._timeout_s:.0f} s") from None
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.unlink()

    def measure(
        self, spec: Mapping[str, Any], scratch: Path, timeout_s: float
    ) -> tuple[dict[str, Any], int]:
        """As ``measure_in_child``, but only the timed part counts for the peak of memory."""
        out, log_path = scratch / "measured.json", scratch / "log.txt"
        log_path.touch()
        job = {"spec": spec, "out": str(out), "log": str(log_path)}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        self._process.stdin.flush()
        pid = int(self._hear(self._timeout_s))
        memory, until_s = MemoryWatch(pid), monotonic() + timeout_s
        status: int | None = None
        try:
            while status is None:
                if monotonic() > until_s:
                    raise RunError(f"still running after {timeout_s:.0f} s: {tail_of(log_path)}")
                memory.sample(still=lambda: not timed_mark(out).exists())
                with suppress(TimeoutError):
                    status = int(self._hear(1 / SAMPLES_PER_S))
        finally:
            if status is None:
                for one in (*descendants(pid), pid):
                    with suppress(ProcessLookupError):
                        os.kill(one, signal.SIGKILL)
                self._hear(self._timeout_s)
        if status != 0:
            raise RunError(f"ended with {status}: {tail_of(log_path)}")
        measured: dict[str, Any] = json.loads(out.read_text("utf-8"))
        return measured, memory.peak_bytes

    def _hear(self, timeout_s: float) -> Any:  # noqa: ANN401  any JSON
        """The next line; raises ``TimeoutError`` when none comes in time."""
        stream = self._process.stdout
        assert stream is not None
        if not select.select([stream], [], [], timeout_s)[0]:
            raise TimeoutError
        line = stream.readline()
        if not line:
            raise RunError(f"the process that forks runs ended: {tail_of(self._log)}")
        return json.loads(line)


def _environment() -> dict[str, str]:
    return {**os.environ, **package_environment()}


def package_environment() -> dict[str, str]:
    """What a process needs to be told to import this package, and to keep to its core."""
    package_root = str(Path(__file__).resolve().parents[1])
    paths = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "PYTHONPATH": os.pathsep.join(paths),
        # As torchrun sets it: a thread of a system must not fan out over the training's core.
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def tail_of(path: Path) -> str:
    """The end of what a process said into a log."""
    return path.read_text(encoding="utf-8", errors="replace")[-_LOG_TAIL:].strip()


def line_of(process: subprocess.Popen[str], timeout_s: float) -> str:
    """The next line that a process says, which says one at a time; empty when it ended; blocks.

    Raises:
        TimeoutError: None came in time.
    """
    out = process.stdout
    assert out is not None
    if not select.select([out], [], [], timeout_s)[0]:
        raise TimeoutError
    return out.readline()


class MemoryWatch:
    """Memory of a process and of all below it: private pages summed, shared ones counted once.

    Shared memory is what the whole machine has more of than at the start, whoever maps it.
    File pages, mostly libraries, are counted for the process that has most of them.

    Args:
        pid: The process.
    """

    def __init__(self, pid: int) -> None:
        self.peak_bytes = 0
        self._pid = pid
        self._pids = [pid]
        self._scanned_s = 0.0
        self._shared_before = _shared_bytes()

    def sample(self, still: Callable[[], bool] = lambda: True) -> None:
        """Look once; costs some tenths of a millisecond.

        Args:
            still: Asked afterwards whether what was seen counts.
        """
        now_s = monotonic()
        if now_s - self._scanned_s > _RESCAN_S:
            self._pids = [self._pid, *descendants(self._pid)]
            self._scanned_s = now_s
        found = [_resident(pid) for pid in self._pids]
        private = sum(own for own, _ in found)
        files = max(of_files for _, of_files in found)
        shared = max(0, _shared_bytes() - self._shared_before)
        if still():
            self.peak_bytes = max(self.peak_bytes, private + files + shared)


def _resident(pid: int) -> tuple[int, int]:
    """Private and file pages of a process, in bytes; nothing when it is gone."""
    fields = proc_table(Path(f"/proc/{pid}/status"))
    return fields.get("RssAnon", 0), fields.get("RssFile", 0)


def _shared_bytes() -> int:
    return proc_table(Path("/proc/meminfo")).get("Shmem", 0)


def proc_table(path: Path) -> dict[str, int]:
    """Fields in bytes of a file of ``/proc`` that gives them in kB."""
    found = {}
    with suppress(OSError):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.endswith(" kB"):
                name, _, value = line.partition(":")
                found[name] = 1024 * int(value[:-3])
    return found


def touched_memory(nbytes: int, share: int) -> mmap.mmap:
    """Memory of which every page was used once, at most one part in ``share`` of what there is;
    close it to give it back.

    The host of a virtual machine may have taken free memory away. Who uses it first then waits
    for the host, and that would be one system in one round, and not the next.
    """
    room_bytes = proc_table(Path("/proc/meminfo")).get("MemAvailable", 0)
    nbytes = max(mmap.PAGESIZE, min(nbytes, room_bytes // share))
    area = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with memoryview(area) as whole, whole[:: mmap.PAGESIZE] as pages:
        pages[:] = bytes(len(pages))
    return area
