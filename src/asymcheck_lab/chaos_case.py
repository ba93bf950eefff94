"""One case of the matrix: a training, a failure at a moment, what became of it.

The process that runs cases has torch loaded and forks each training. Every wait is bounded, and
whatever a case left is removed before the next.
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
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from asymcheck.capture import parse_capture
from asymcheck.decoding import verify
from asymcheck.errors import CorruptCheckpoint
from asymcheck.handover import persisters_of
from asymcheck.memory.arena import SHARED_MEMORY, Slot, SlotState, slots_of
from asymcheck.memory.process import ProcessId
from asymcheck.planning.retention import CheckpointId
from asymcheck.storage.names import pack_name, step_folder
from asymcheck.storage.repository import create_repository
from asymcheck.storage.store import open_store
from asymcheck.testing.children import Child, Outcome, Say
from asymcheck_lab.chaos_job import LAST, TARGET, WAIT_S, jump_the_clock, resume, train
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
)
MOMENTS = ("forward", "capture", "persist", "commit", "restore")

_GOES_ON = ("persister killed", "disk full", "store outage")
"""What a training may survive without being started again."""

_POLL_S = 0.003
_DISK_BYTES = 24 << 20
_SLOW = {"bytes_per_s": 6e6, "read_bytes_per_s": 2e6, "latency_s": 0.015}
_JUMP_S = -400 * 86400.0
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
        tier: Where the checkpoint came from that the next start restored.
        resumed_from: Its step.
        steps_lost: Steps that had been done and had to be done again.
        seconds: From the start of the library in the new process until the state was back.
        exact: ``bit for bit``, or ``within its bounds`` for a lossy checkpoint.
        skipped: Newer checkpoints that were passed over.
        problems: Promises that were broken.
        note: How the failure was made where the real one cannot be made here.
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


class _Trial:
    """A case while it runs."""

    def __init__(self, case: Case, folder: Path, disk: Disk) -> None:
        self.case, self.folder, self.disk = case, folder, disk
        self.verdict = Verdict()
        self.on_disk = case.fault == "disk full" and not disk.refused
        self.root = (disk.folder if self.on_disk else folder) / "root"
        self.away = folder / "away"
        self.run = create_repository(open_store(str(self.root))).run
        self.pids: list[int] = []
        self.children: list[Child] = []
        self.done = 0
        self.error = ""
        self.is_hurt = False
        self.is_lossy = False  # a start went on from a lossy state: it trains another training
        self.gone: set[CheckpointId] = set()
        self.at_strike: set[int] = set()
        self.done_at_strike = 0

    # --- children ----------------------------------------------------------------

    def url(self, *, stops: bool, fails: bool = False) -> str:
        """The root, through a store that is slow, stops at the moment, or fails."""
        url = f"file://{self.root}"
        if self.case.fault == "slow disk":
            return f"throttled+{url}?{urlencode(_SLOW)}"
        if stops:
            return f"faulty+{url}?{urlencode({**_STOPS[self.case.moment], 'do': 'stop'})}"
        if fails:
            fault = {"op": "write", "name": f"{step_folder(TARGET)}*", "do": "ENOSPC", "times": 0}
            return f"faulty+{url}?{urlencode(fault)}"
        return url

    def fork(self, work: Callable[[Say], object]) -> Child:
        """A child whose end is made sure of."""

        def with_clock(say: Say) -> None:
            if self.case.fault == "clock jump":
                jump_the_clock(self.folder / "clock")
            work(say)

        child = Child(with_clock)
        self.children.append(child)
        return child

    def start(self) -> Child:
        """The first start, until it is at the moment."""
        case = self.case
        stops = case.moment in ("persist", "commit")
        fails = case.fault == "disk full" and bool(self.disk.refused)
        url = self.url(stops=stops and not fails, fails=fails)
        child = self.fork(lambda say: train(say, url, case.strategy, case.moment, self.folder))
        self.pids.append(child.hear()[1])
        if stops and not fails:
            self._hear_until(child, None, self.persister_stopped)
            self._until(lambda: TARGET in self.sealed(), "the slot is sealed")
        else:
            self._hear_until(child, "there")
        return child

    def persister_stopped(self) -> bool:
        """Whether the persister was stopped at the moment; on a slow disk it is stopped here, when
        the moment can be seen in the files.
        """
        pid = self.persister()
        if self.case.fault == "slow disk" and self._is_at_the_moment():
            _send(pid, signal.SIGSTOP)
        return is_stopped(pid)

    def _is_at_the_moment(self) -> bool:
        names = {path.name for path in (self.root / step_folder(TARGET)).glob("*")}
        if self.case.moment == "commit":
            return any(n.endswith("-r0000.json") for n in names) and not _has_manifest(names)
        before = {path.name for path in (self.root / step_folder(TARGET - 1)).glob("*")}
        return (
            (_has_manifest(before) or not before)
            and TARGET in self.sealed()
            and any((self.root / ".tmp").glob("*"))
        )

    def restore_stopped(self, pid: int) -> bool:
        """Whether a restore was stopped while it has a pack open."""
        if self.case.fault == "slow disk":
            with suppress(OSError):
                opened = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()]
                if any(name.endswith(".pack") for name in opened):
                    _send(pid, signal.SIGSTOP)
        return is_stopped(pid)

    def _hear_until(
        self, child: Child, word: str | None, condition: Callable[[], bool] = lambda: False
    ) -> None:
        """Take note of what a child says until it says a word, or something holds."""
        until_s = time.monotonic() + WAIT_S
        while not condition():
            if time.monotonic() > until_s:
                raise RunError(f"{self.case}: not reached within {WAIT_S:g} s")
            said = _hear_soon(child)
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
                for pid in {self.persister(), *self.pids, *(c.pid for c in self.children)}:
                    if is_stopped(pid):
                        _send(pid, signal.SIGCONT)

        thread = threading.Thread(target=pump)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def end_of(self, child: Child) -> Outcome:
        """Wait for the end of a training; what can be mended is mended when it asks."""
        with self.letting_go():
            self.error = ""
            until_s = time.monotonic() + 2 * WAIT_S
            while time.monotonic() < until_s:
                if self.is_hurt and not (self.folder / "healed").exists():
                    self.heal()
                    (self.folder / "healed").touch()
                try:
                    self.note(child.hear(0.05))
                except AssertionError:
                    if ProcessId.of(child.pid).start == 0:
                        break
            outcome = child.wait(WAIT_S)
        for said in outcome.said:
            self.note(said)
        return Outcome(outcome.status, outcome.said, outcome.error or self.error)

    # --- what is there -----------------------------------------------------------

    def committed(self) -> set[CheckpointId]:
        """What is listed; empty where the store is away."""
        found = create_repository(open_store(str(self.root)))
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
        if self.away.exists():
            with suppress(FileNotFoundError):
                self.root.unlink()
            self.away.rename(self.root)

    def kill(self, *pids: int) -> None:
        """SIGKILL, and wait until they are gone."""
        for pid in pids:
            _send(pid, signal.SIGKILL)
        self._until(lambda: all(ProcessId.of(p).start == 0 for p in pids), "the killed are gone")

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        until_s = time.monotonic() + WAIT_S
        while not condition():
            if time.monotonic() > until_s:
                raise RunError(f"{self.case}: {what}: not within {WAIT_S:g} s")
            time.sleep(_POLL_S)

    # --- the failure -------------------------------------------------------------

    def strike(self, child: Child) -> set[int]:
        """Bring the failure about; returns the steps of which one must be restored."""
        fault, persister = self.case.fault, self.persister()
        committed = self.at_strike = {at.step for at in self.committed()}
        safe = committed | self.sealed()
        if fault in ("process killed", "slow disk", "clock jump"):
            if fault == "clock jump":
                (self.folder / "clock").write_text(str(_JUMP_S))
            self.kill(child.pid)
            _send(persister, signal.SIGCONT)
            self.verdict.training = "killed"
        elif fault == "host killed":
            self.kill(child.pid, persister)
            self.remove_slots()
            safe, self.verdict.training = committed, "killed"
        elif fault == "bit rot":
            self.kill(child.pid, persister)
            self.remove_slots()
            self.flip_a_byte()
            safe, self.verdict.training = self.intact(), "killed"
        elif fault == "persister killed":
            self.kill(persister)
        elif fault == "disk full":
            if self.disk.refused:
                self.verdict.note = f"ENOSPC injected: {self.disk.refused}"
            else:
                self.disk.fill()
        elif fault == "store outage":
            self.root.rename(self.away)
            self.root.write_text("the store is away")
        return safe

    def flip_a_byte(self) -> None:
        """In the middle of the newest committed checkpoint's first pack."""
        at = max(self.committed())
        path = self.root / pack_name(at, 0, 1)
        with path.open("r+b") as pack:
            middle = path.stat().st_size // 2
            pack.seek(middle)
            byte = pack.read(1)
            pack.seek(middle)
            pack.write(bytes([byte[0] ^ 0x40]))

    def intact(self) -> set[int]:
        """Steps of which every byte can be read, what they stand on included."""
        repository = create_repository(open_store(str(self.root)))
        committed = set(repository.survey().committed)
        self.gone = {at for at in committed if any(verify(repository, at))}
        return {at.step for at in committed - self.gone}

    # --- the case ----------------------------------------------------------------

    def run_it(self) -> None:
        if self.case.moment == "restore":
            safe = self.hit_a_restore()
        else:
            child = self.start()
            safe = self.partition(child) if self.is_partition else self.hit(child)
        self.judge(safe, self.last_start())

    @property
    def is_partition(self) -> bool:
        return self.case.fault == "network partition"

    def hit(self, child: Child) -> set[int]:
        """The failure in a training: it dies of it, or it goes on."""
        safe = self.strike(child)
        (self.folder / "go").touch()
        outcome = self.end_of(child)
        self.heal()
        if self.case.fault not in _GOES_ON:
            return safe
        if outcome.status == 0:
            self.verdict.training = "went on"
            return {LAST}
        self.verdict.training = self._ended_with(outcome)
        self.settle()
        return safe

    def settle(self) -> None:
        """Let persisters of dead trainers come to their end."""
        with self.letting_go():
            self._until(
                lambda: not any(not trainer.is_alive for _, trainer in persisters_of(self.run)),
                "persisters of the dead trainer end",
            )

    def hit_a_restore(self) -> set[int]:
        """A training is killed; the failure comes while the next start restores."""
        case = self.case
        child = self.start()
        self._hear_rest(child)
        persister_dies = case.fault == "persister killed"
        if persister_dies:  # the one that still writes what its dead trainer sealed
            os.kill(self.persister(), signal.SIGSTOP)
        self.kill(child.pid)
        child.wait(WAIT_S)
        if not persister_dies:
            self.settle()
        stops = not persister_dies
        second = self.fork(lambda say: resume(say, self.url(stops=stops), case.strategy, WAIT_S))
        if persister_dies:
            safe = self.strike(second)
            self.verdict.training = "killed"
        else:
            self._until(lambda: self.restore_stopped(second.pid), "the restore reads")
            safe = self.partition(second) if self.is_partition else self.strike(second)
        outcome = self.end_of(second) if not self.is_partition else None
        self.heal()
        if outcome is not None and case.fault in _GOES_ON:
            well = outcome.status == 0
            self.verdict.training = "went on" if well else self._ended_with(outcome)
            safe = {LAST} if well else safe
        return safe

    def _hear_rest(self, child: Child) -> None:
        while (said := _hear_soon(child)) is not None:
            self.note(said)

    def partition(self, old: Child) -> set[int]:
        """The store and the scheduler lose sight of a trainer; another is started in its place.

        When the old one is back it may not mix with the new one.
        """
        persister, self.done_at_strike = self.persister(), self.done
        for pid in (old.pid, persister):
            _send(pid, signal.SIGSTOP)
        committed = self.at_strike = {at.step for at in self.committed()}
        new = self.fork(lambda say: resume(say, self.url(stops=False), self.case.strategy, WAIT_S))
        said = new.wait(2 * WAIT_S).check()
        self.check_resumed(said, committed)
        (self.folder / "go").touch()
        (self.folder / "healed").touch()
        _send(old.pid, signal.SIGCONT)
        outcome = self.end_of(old)
        if self.case.moment == "restore":
            # It had claimed nothing yet: it is the newer job, and it comes to its end.
            self.verdict.training = "went on" if outcome.status == 0 else self._ended_with(outcome)
            return {LAST}
        self.verdict.training = self._ended_with(outcome)
        if "SupersededWriter" not in outcome.error:
            self.verdict.problems.append(
                f"the older writer was not stopped: status {outcome.status}, {outcome.error[-200:]}"
            )
        self.settle()
        return {LAST}

    def _ended_with(self, outcome: Outcome) -> str:
        """The error that ended a training; one that is not the library's is a broken promise."""
        own = [x for x in outcome.error.splitlines() if x.startswith("asymcheck.errors.")]
        if not own:
            self.verdict.problems.append(
                f"the training ended with status {outcome.status}: {outcome.error[-300:]}"
            )
            return f"ended with {outcome.status}"
        return f"ended with {own[-1].partition(':')[0].rpartition('.')[2]}"

    # --- the verdict -------------------------------------------------------------

    def last_start(self) -> list[Any]:
        """The next start, which has to be as if nothing had been."""
        child = self.fork(
            lambda say: resume(say, self.url(stops=False), self.case.strategy, WAIT_S)
        )
        return child.wait(2 * WAIT_S).check()

    def check_resumed(self, said: list[Any], committed: set[int]) -> None:
        """Hold what a start said against the reference."""
        first, last = said
        verdict = self.verdict
        if not self.is_lossy:
            verdict.problems += [f"step {first['step']}: {what}" for what in first["differences"]]
            if first["exact"] and not last["exact"]:
                verdict.problems.append("the end is another one than that of the uninterrupted run")
        exact = first["exact"] and not self.is_lossy
        self.is_lossy = not exact
        if last["done"] != LAST:
            verdict.problems.append(f"it ended at step {last['done']}")
        verdict.tier = "root" if first["step"] in committed else "shared memory"
        verdict.resumed_from = first["step"]
        verdict.seconds = round(first["seconds"], 3)
        verdict.exact = "bit for bit" if exact else "within its bounds"
        verdict.skipped = len(first["skipped"])
        self.pids.append(first["pid"])

    def judge(self, safe: set[int], said: list[Any]) -> None:
        """The last start against what was promised, and what is left of all."""
        verdict = self.verdict
        replacement = replace(verdict)
        self.check_resumed(said, self.at_strike)
        step = verdict.resumed_from
        if step < max(safe, default=0):
            warned = "; ".join(said[0]["warned"]) or "without a word"
            verdict.problems.append(f"expected step {max(safe)}, restored {step}: {warned}")
        if self.is_partition and self.case.moment != "restore":
            # What counts is how the replacement came up.
            verdict.tier, verdict.resumed_from = replacement.tier, replacement.resumed_from
            verdict.seconds, verdict.exact = replacement.seconds, replacement.exact
            verdict.steps_lost = max(0, self.done_at_strike - replacement.resumed_from)
        elif verdict.training == "went on":
            verdict.tier, verdict.steps_lost = "none needed", 0
        else:
            verdict.steps_lost = max(0, min(self.done, LAST) - step)
        if self.case.fault == "bit rot" and not verdict.skipped:
            verdict.problems.append("the damage was not met")
        self.judge_what_is_left()

    def judge_what_is_left(self) -> None:
        """Nothing torn is listed, and no process, slot or half-written object is left."""
        verdict = self.verdict
        repository = create_repository(open_store(str(self.root)))
        listing = repository.survey()
        damaged = [
            at for at in listing.committed if at not in self.gone and any(verify(repository, at))
        ]
        if listing.damaged or damaged:
            verdict.problems.append(f"damaged: {[*listing.damaged, *damaged]}")
        if listing.leftovers:
            verdict.problems.append(f"left over: {listing.leftovers}")
        temp = list(self.root.glob(".tmp/*"))
        slots = [path.name for path in slots_of(SHARED_MEMORY, self.run)]
        if temp or slots:
            verdict.problems.append(f"left over: {temp}, {slots}")
        try:
            self._until(
                lambda: all(ProcessId.of(pid).start == 0 for pid in self.pids), "persisters end"
            )
        except RunError as left:
            verdict.problems.append(str(left))

    def clean_up(self) -> None:
        """End what is still there, and remove it."""
        for child in self.children:
            with suppress(OSError, AssertionError):
                child.kill()
                child.wait(5)
        for pid in self.pids:
            if "asymcheck.persist" in _command_of(pid):
                _send(pid, signal.SIGKILL)
        self.heal()
        self.remove_slots()
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.rmtree(self.folder, ignore_errors=True)


def run_case(case: Case, folder: Path, disk: Disk) -> Verdict:
    """Run one case; blocks for seconds. Torch is loaded, with one thread; see ``load_once``.

    Args:
        case: Which.
        folder: Made for it, and removed.
        disk: Where the disk is filled.
    """
    begin_s = time.perf_counter()
    folder.mkdir(parents=True)
    trial = _Trial(case, folder, disk)
    try:
        trial.run_it()
    except Exception as failure:  # noqa: BLE001  a case that breaks is a result
        trial.verdict.problems.append(f"{type(failure).__name__}: {failure}")
    finally:
        trial.clean_up()
    trial.verdict.case_s = round(time.perf_counter() - begin_s, 2)
    return trial.verdict


def _has_manifest(names: set[str]) -> bool:
    return any(name.endswith("-MANIFEST.json") for name in names)


def _hear_soon(child: Child) -> object | None:
    try:
        heard: object = child.hear(_POLL_S)
    except AssertionError:
        return None
    return heard


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
