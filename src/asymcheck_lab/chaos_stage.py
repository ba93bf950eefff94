"""Where a case of the matrix plays: its root, its processes, their moments, and what is there.

Every wait is bounded, and whatever a case left is removed before the next.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlencode

from asymcheck.capture import parse_capture
from asymcheck.errors import CorruptCheckpoint
from asymcheck.memory.arena import SHARED_MEMORY, Slot, SlotState, slots_of
from asymcheck.memory.process import ProcessId
from asymcheck.planning.retention import CheckpointId
from asymcheck.storage.names import step_folder
from asymcheck.storage.repository import create_repository
from asymcheck.storage.store import open_store
from asymcheck.testing.children import Child, Outcome, Say
from asymcheck_lab.chaos_job import TARGET, WAIT_S, jump_the_clock, train
from asymcheck_lab.chaos_network import Network
from asymcheck_lab.chaos_places import (
    AMONG_PEERS,
    OVER_A_LINK,
    FarStore,
    HomeAndTier,
    Peers,
    Places,
    Where,
)
from asymcheck_lab.errors import RunError
from asymcheck_lab.killer import is_stopped

FAULTS = (
    "process killed",
    "persister killed",
    "host killed",
    "disk full",
    "slow disk",
    "bit rot",
    "store outage",
    "clock jump",
    "network partition",
    "host killed (tier)",
    "host killed (peers)",
    "peer killed",
    "network partition (link)",
)
MOMENTS = ("forward", "capture", "persist", "commit", "restore")

_POLL_S = 0.003
_DISK_BYTES = 24 << 20
_SLOW = {"bytes_per_s": 6e6, "read_bytes_per_s": 2e6, "latency_s": 0.015}
_STOPS = {
    "persist": {"op": "write", "name": f"{step_folder(TARGET)}*.pack", "when": "mid"},
    "commit": {"op": "write", "name": f"{step_folder(TARGET)}*-MANIFEST.json", "when": "before"},
    "restore": {"op": "read", "name": "*.pack", "when": "before"},
}


@dataclass(frozen=True, slots=True)
class Case:
    """What fails, under which strategy, when."""

    fault: str
    strategy: str
    moment: str

    def __str__(self) -> str:
        return f"{self.fault}, {self.strategy}, {self.moment}"


@dataclass(slots=True)
class Verdict:
    """What became of a case.

    Attributes:
        training: How the training took it: ``killed``, ``went on``, or its error.
        tier: Where the checkpoint came from that the next start restored: ``root``, ``shared
            memory``, ``tier``, ``peer``.
        resumed_from: Its step.
        steps_lost: Steps that had been done and had to be done again.
        seconds: From the start of the library in the new process until the state was back.
        exact: ``bit for bit``, or ``within its bounds`` for a lossy checkpoint.
        skipped: Newer checkpoints that were passed over.
        problems: Promises that were broken.
        note: How the failure was made where the real one cannot be made here.
        starts: How many a supervisor made; 0 where it was none.
        case_s: How long it all took.
    """

    training: str = ""
    tier: str = ""
    resumed_from: int = 0
    steps_lost: int = 0
    seconds: float = 0.0
    exact: str = ""
    skipped: int = 0
    problems: list[str] = field(default_factory=list)
    note: str = ""
    starts: int = 0
    case_s: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """The verdict as JSON."""
        return asdict(self)


class Disk:
    """A file system of a few megabytes that can be filled, where this user may mount one.

    Args:
        folder: Where it is mounted.

    Attributes:
        refused: Why there is none, empty where there is.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(folder)]
        self.refused = ""
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
            if done.returncode:
                self.refused = done.stderr.strip() or f"mount ended with {done.returncode}"
        except (OSError, subprocess.TimeoutExpired) as failure:
            self.refused = str(failure)

    def fill(self) -> None:
        """Leave no byte."""
        with (self.folder / "filler").open("wb", buffering=0) as filler, suppress(OSError):
            while filler.write(bytes(1 << 16)):
                pass
            while filler.write(bytes(512)):
                pass

    def close(self) -> None:
        """Take it away."""
        self.take_away(self.folder)

    @staticmethod
    def take_away(folder: Path) -> None:
        """Unmount what is mounted there; where nothing is, nothing happens."""
        if folder.is_mount():
            subprocess.run(["umount", "-l", str(folder)], capture_output=True, check=False)


def places_of(fault: str, folder: Path, disk: Disk, network: Network | None) -> Places:
    """Where the checkpoints of a case lie.

    Args:
        fault: What fails.
        folder: Of the case.
        disk: What can be filled.
        network: Needed where a link is cut.
    """
    if fault == "host killed (tier)":
        return HomeAndTier(folder / "root")
    if fault in AMONG_PEERS:
        return Peers(folder / "root")
    if fault in OVER_A_LINK:
        assert network is not None, "the job has one where such a case is among its own"
        return FarStore(folder / "root", network)
    on_disk = fault == "disk full" and not disk.refused
    return Places((disk.folder if on_disk else folder) / "root")


class Training(Protocol):
    """What trains in a case: a process, or a supervisor that starts one after the other."""

    @property
    def pid(self) -> int:
        """The process whose end is the end of it."""
        ...

    @property
    def trainer(self) -> int:
        """The process that trains now."""
        ...

    def hear(self, timeout_s: float = ...) -> Any:  # noqa: ANN401
        """The next thing that a trainer says; ``AssertionError`` where none does in time."""
        ...

    def wait(self, timeout_s: float) -> Outcome:
        """Wait for its end; ``AssertionError`` where that does not come in time."""
        ...

    def kill(self) -> None:
        """End it."""
        ...


class Start(Child):
    """One start, in a fork."""

    @property
    def trainer(self) -> int:
        """See ``Training``."""
        return self.pid


class Stage:
    """A case while it runs."""

    def __init__(self, case: Case, folder: Path, disk: Disk, network: Network | None) -> None:
        self.case, self.folder, self.disk, self.network = case, folder, disk, network
        self.verdict = Verdict()
        self.places = places_of(case.fault, folder, disk, network)
        self.run = create_repository(open_store(self.places.home)).run
        self.pids: list[int] = []
        self.children: list[Training] = []
        self.done = 0
        self.error = ""
        self.is_hurt = False
        self.is_lossy = False  # a start went on from a lossy state: it trains another training
        self.gone: set[CheckpointId] = set()
        self.at_strike: set[int] = set()
        self.memory_is_lost = False
        self.done_at_strike = 0

    # --- children ----------------------------------------------------------------

    def where(self, *, stops: bool = False, fails: bool = False) -> Where:
        """The places; the root through a store that is slow, stops at the moment, or fails."""
        home = self.places.home
        if self.case.fault == "slow disk":
            home = f"throttled+{home}?{urlencode(_SLOW)}"
        elif stops:
            home = f"faulty+{home}?{urlencode({**_STOPS[self.case.moment], 'do': 'stop'})}"
        elif fails:
            fault = {"op": "write", "name": f"{step_folder(TARGET)}*", "do": "ENOSPC", "times": 0}
            home = f"faulty+{home}?{urlencode(fault)}"
        return Where(home, self.places.tiers)

    def where_first(self) -> Where:
        """The same for the first start, which is to get as far as the moment."""
        is_full = self.case.fault == "disk full" and bool(self.disk.refused)
        return self.where(stops=self.stops_in_write, fails=is_full)

    @property
    def stops_in_write(self) -> bool:
        """Whether the moment is one of the persister, which its store stops."""
        is_full = self.case.fault == "disk full" and bool(self.disk.refused)
        return self.case.moment in ("persist", "commit") and not is_full

    def fork(self, work: Callable[[Say], object]) -> Start:
        """A start whose end is made sure of."""

        def with_clock(say: Say) -> None:
            if self.case.fault == "clock jump":
                jump_the_clock(self.folder / "clock")
            work(say)

        child = Start(with_clock)
        self.children.append(child)
        return child

    def begin(self) -> Training:
        """Have the first start made."""
        case, where = self.case, self.where_first()
        return self.fork(lambda say: train(say, where, case.strategy, case.moment, self.folder))

    def start(self) -> Training:
        """The first start, until it is at the moment."""
        training = self.begin()
        self.pids.append(training.hear(WAIT_S)[1])
        if self.stops_in_write:
            self._hear_until(training, None, self.persister_stopped)
            self.until(lambda: TARGET in self.sealed(), "the slot is sealed")
        else:
            self._hear_until(training, "there")
        return training

    def persister_stopped(self) -> bool:
        """Whether the persister was stopped at the moment; on a slow disk it is stopped here, when
        the moment can be seen in the files.
        """
        pid = self.persister()
        if self.case.fault == "slow disk" and self._is_at_the_moment():
            send(pid, signal.SIGSTOP)
        return is_stopped(pid)

    def _is_at_the_moment(self) -> bool:
        root = self.places.root
        names = {path.name for path in (root / step_folder(TARGET)).glob("*")}
        if self.case.moment == "commit":
            return any(n.endswith("-r0000.json") for n in names) and not _has_manifest(names)
        before = {path.name for path in (root / step_folder(TARGET - 1)).glob("*")}
        return (
            (_has_manifest(before) or not before)
            and TARGET in self.sealed()
            and bool(self.places.temporary)
        )

    def restore_stopped(self, pid: int) -> bool:
        """Whether a restore was stopped while it has a pack open."""
        if self.case.fault == "slow disk":
            with suppress(OSError):
                opened = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()]
                if any(name.endswith(".pack") for name in opened):
                    send(pid, signal.SIGSTOP)
        return is_stopped(pid)

    def _hear_until(
        self, training: Training, word: str | None, condition: Callable[[], bool] = lambda: False
    ) -> None:
        """Take note of what a child says until it says a word, or something holds."""
        until_s = time.monotonic() + WAIT_S
        while not condition():
            if time.monotonic() > until_s:
                raise RunError(f"{self.case}: not reached within {WAIT_S:g} s")
            said = hear_soon(training)
            if said is not None:
                self.note(said)
                if said == word:
                    return

    def note(self, said: object) -> None:
        """Take note of a step that was done."""
        if isinstance(said, list) and said[1:] == ["live"]:
            self.done = max(self.done, said[0])
        self.is_hurt = self.is_hurt or said == "hurt"
        if isinstance(said, dict) and said.get("exact") is False:
            self.is_lossy = True
        if isinstance(said, dict) and "error" in said:
            self.error = said["error"]

    def persister(self) -> int:
        """The one that persists now."""
        for path in slots_of(SHARED_MEMORY, self.run):
            with suppress(OSError, ValueError):
                slot = Slot.open(path)
                pid = slot.persister.pid
                slot.close(unlink=False)
                if pid and pid not in self.pids:
                    self.pids.append(pid)
        return self.pids[-1]

    @contextmanager
    def letting_go(self) -> Iterator[None]:
        """Whoever stops himself meanwhile is told to go on."""
        over = threading.Event()

        def pump() -> None:
            while not over.wait(_POLL_S):
                for pid in {self.persister(), *self.pids, *(c.trainer for c in self.children)}:
                    if is_stopped(pid):
                        send(pid, signal.SIGCONT)

        thread = threading.Thread(target=pump)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def end_of(self, training: Training) -> Outcome:
        """Wait for the end of a training; what can be mended is mended when it asks."""
        with self.letting_go():
            self.error = ""
            until_s = time.monotonic() + 2 * WAIT_S
            while time.monotonic() < until_s:
                if self.is_hurt and not (self.folder / "healed").exists():
                    self.heal()
                    (self.folder / "healed").touch()
                try:
                    self.note(training.hear(0.05))
                except AssertionError:
                    if ProcessId.of(training.pid).start == 0:
                        break
            outcome = training.wait(WAIT_S)
        for said in outcome.said:
            self.note(said)
        return Outcome(outcome.status, outcome.said, outcome.error or self.error)

    # --- what is there -----------------------------------------------------------

    def committed(self) -> set[CheckpointId]:
        """What is listed where the host's end leaves it."""
        found = create_repository(open_store(self.places.safe))
        return set(found.survey().committed)

    def sealed(self) -> set[int]:
        """Steps that lie whole in shared memory, of living trainers too."""
        found = set()
        for path in slots_of(SHARED_MEMORY, self.run):
            with suppress(OSError, ValueError):
                slot = Slot.open(path)
                with suppress(CorruptCheckpoint):
                    step = parse_capture(slot.meta, "slot").at.step
                    if slot.state is SlotState.SEALED:  # looked at last: it may just begin anew
                        found.add(step)
                slot.close(unlink=False)
        return found

    def remove_slots(self) -> None:
        """What the end of a host does to its memory."""
        for path in slots_of(SHARED_MEMORY, self.run):
            path.unlink(missing_ok=True)

    def heal(self) -> None:
        """Mend what can be mended."""
        (self.disk.folder / "filler").unlink(missing_ok=True)
        self.places.heal()

    def kill(self, *pids: int) -> None:
        """SIGKILL, and wait until they are gone."""
        for pid in pids:
            send(pid, signal.SIGKILL)
        self.until(lambda: all(ProcessId.of(p).start == 0 for p in pids), "the killed are gone")

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for something, within a bound."""
        until_s = time.monotonic() + WAIT_S
        while not condition():
            if time.monotonic() > until_s:
                raise RunError(f"{self.case}: {what}: not within {WAIT_S:g} s")
            time.sleep(_POLL_S)

    def clean_up(self) -> None:
        """End what is still there, and remove it."""
        for child in self.children:
            with suppress(OSError, AssertionError):
                child.kill()
                child.wait(5)
        for pid in self.pids:
            if "asymcheck.persist" in _command_of(pid):
                send(pid, signal.SIGKILL)
        (self.disk.folder / "filler").unlink(missing_ok=True)
        self.remove_slots()
        self.places.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _has_manifest(names: set[str]) -> bool:
    return any(name.endswith("-MANIFEST.json") for name in names)


def hear_soon(training: Training) -> object | None:
    """What a training says now; ``None`` where it says nothing."""
    try:
        heard: object = training.hear(_POLL_S)
    except AssertionError:
        return None
    return heard


def send(pid: int, number: signal.Signals) -> None:
    """A signal to a process, if it is there still."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
