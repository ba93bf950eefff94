"""``asymlab soak``: thousands of checkpoints over one root, with failures all the time.

One training goes on over the same root: stores that fail at any operation, power that is cut at any
system call, processes that are killed. After each checkpoint nothing torn may be listed, and the
newest one must come back bit for bit.
"""

from __future__ import annotations

import gc
import os
import random
import shutil
import signal
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch

from asymcheck import Checkpointer, strategies
from asymcheck.decoding import verify
from asymcheck.errors import CheckpointError, NoCheckpoint
from asymcheck.handover import persisters_of
from asymcheck.memory.arena import SHARED_MEMORY, slots_of
from asymcheck.memory.process import ProcessId
from asymcheck.storage.local import LocalStore
from asymcheck.storage.repository import Repository, create_repository, open_repository
from asymcheck.storage.store import Store
from asymcheck.testing.children import Child, Say
from asymcheck.testing.faulty import Fault, FaultyStore
from asymcheck.testing.powercut import Mode, PowerCut, PowerCutStore
from asymcheck_lab.bench import append_record, describe_session
from asymcheck_lab.errors import UsageError
from asymcheck_lab.rundir import scratch_folder

LOSSY = ("excp", "asymcheck-paper")
IN_MEMORY = ("gemini",)
_EXACT = tuple(name for name in strategies if name not in (*LOSSY, *IN_MEMORY))
_ELEMENTS = 128 * 136
_WAIT_S = 30.0
_FAULT_SHARE = 0.15
_CUT_EVERY = 33
_RESTART_EVERY = 12
_OPERATIONS = 14
_SYSTEM_CALLS = 90
_FLAT_BYTES = 12 << 20
_FLAT_SHARE = 0.03
_SAMPLE_EVERY = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakOptions:
    """How long, and how rough.

    Attributes:
        checkpoints: Saves in all.
        kills: Trainers that are killed meanwhile.
        seed: Of all that is drawn, but for the moments of the kills.
        limit_s: Stops after this long, and says that it did not get through.
        folder: Where the root is; ``None`` for a temporary one.
        results: Gets a JSON line; ``None`` for nowhere.
    """

    checkpoints: int = 2000
    kills: int = 30
    seed: int = 0
    limit_s: float = 600.0
    folder: Path | None = None
    results: Path | None = Path("results/soak.jsonl")

    def __post_init__(self) -> None:
        for name, lowest in (("checkpoints", 1), ("kills", 0), ("seed", 0)):
            if getattr(self, name) < lowest:
                raise UsageError(f"{name}: expected at least {lowest}, found {getattr(self, name)}")
        if not self.limit_s > 0:
            raise UsageError(f"limit_s: expected more than 0, found {self.limit_s}")


@dataclass(slots=True)
class Tally:
    """What was done and seen.

    Attributes:
        checkpoints: Saves that were tried.
        durable: Of these, how many became durable.
        failures: What was done to them, by kind.
        restores: How often a state was read back and compared.
        problems: Promises that were broken.
        rss_bytes: Resident memory, sampled as it went on.
        seconds: In all.
    """

    checkpoints: int = 0
    durable: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    restores: int = 0
    problems: list[str] = field(default_factory=list)
    rss_bytes: list[int] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def growth_bytes(self) -> int:
        """By how much the median of the last quarter of the samples is above the second's."""
        quarter = len(self.rss_bytes) // 4
        if not quarter:
            return 0
        middle = quarter // 2
        early = sorted(self.rss_bytes[quarter : 2 * quarter])[middle]
        return sorted(self.rss_bytes[-quarter:])[middle] - early

    def as_json(self) -> dict[str, Any]:
        """The tally as JSON."""
        return {
            "checkpoints": self.checkpoints,
            "durable": self.durable,
            "failures": dict(self.failures),
            "restores": self.restores,
            "problems": self.problems,
            "rss_bytes": max(self.rss_bytes, default=0),
            "growth_bytes": self.growth_bytes,
            "seconds": round(self.seconds, 1),
        }


def run_soak(
    options: SoakOptions, tell: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Run it; blocks for minutes. This process forks, so it has no threads of its own meanwhile.

    Raises:
        LabError: The folder or the results cannot be used.
    """
    words = ("checkpoints", "kills", "seed")
    command = " ".join(f"--{word} {getattr(options, word)}" for word in words)
    with scratch_folder(options.folder, "asymlab-soak-") as top:
        cores = tuple(os.sched_getaffinity(0))
        session = describe_session(f"asymlab soak {command}", top, cores, 1)
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        gc.collect()
        gc.freeze()  # so that looking for garbage is quick
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # each failure is warned of, and counted here
                tally = _Soak(options, top, tell).run()
        finally:
            torch.set_num_threads(before)
            gc.unfreeze()
    record = {**session, **tally.as_json()}
    if options.results is not None:
        append_record(options.results, record)
    return record


def _content(serial: int) -> torch.Tensor:
    return torch.arange(1, _ELEMENTS + 1, dtype=torch.float32) / (serial + 1)


class _Life:
    """One start of the training."""

    def __init__(self, store: Store | str, strategy: str, **options: Any) -> None:  # noqa: ANN401
        self.weight = torch.nn.Parameter(_content(0))
        self.more: dict[str, int] = {"serial": -1, "step": 0}
        self.optimizer = torch.optim.SGD([self.weight], lr=1.0)
        self.checkpointer = Checkpointer(
            store,
            state={"w": self.weight, "o": self.optimizer, "more": self.more},
            strategy=strategy,
            keep_last=2,
            grace_s=_WAIT_S,
            **options,
        )
        try:
            self.step = self.checkpointer.restore()
            self.checkpointer.wait(_WAIT_S)  # what was read in shared memory is durable then
        except BaseException:
            self.end()
            raise

    def save(self, serial: int) -> None:
        """Save a state that says which save it is; durable when this returns."""
        with self.checkpointer.update(), torch.no_grad():
            self.weight.copy_(_content(serial))
        self.more.update(serial=serial, step=self.step + 1)
        self.step += 1
        self.checkpointer.save(self.step)
        self.checkpointer.wait(_WAIT_S)

    def is_as_saved(self) -> bool:
        """Whether every bit is that of the save that it says it is."""
        if self.more["serial"] < 0:
            return self.step == 0
        same = torch.equal(self.weight.detach(), _content(self.more["serial"]))
        return same and self.more["step"] == self.step

    def end(self) -> None:
        """Close, whatever has happened to the store."""
        with suppress(CheckpointError, PowerCut):
            self.checkpointer.close()


class _Soak:
    def __init__(self, options: SoakOptions, top: Path, tell: Callable[[str], None]) -> None:
        self.options, self.top, self.tell = options, top, tell
        self.random = random.Random(options.seed)
        self.tally = Tally()
        self.root = top / "root-0"
        self.roots = 0
        self.serial = 0
        self.durable = -1
        self.runs = {create_repository(LocalStore(self.root)).run}

    def run(self) -> Tally:
        options, tally = self.options, self.tally
        begin_s = time.monotonic()
        threads, files = threading.active_count(), _open_files()
        kill_every = options.checkpoints // (options.kills + 1) if options.kills else 0
        kills = cuts = 0
        while tally.checkpoints < options.checkpoints:
            if time.monotonic() - begin_s > options.limit_s:
                tally.problems.append(
                    f"{tally.checkpoints} of {options.checkpoints} checkpoints in "
                    f"{options.limit_s:g} s"
                )
                break
            if kills < options.kills and tally.checkpoints >= (kills + 1) * kill_every:
                kills += 1
                self.be_killed()
            elif tally.checkpoints >= (cuts + 1) * _CUT_EVERY:
                cuts += 1
                self.lose_power()
            else:
                self.train_on()
            self.check()
            if tally.checkpoints % 200 < _RESTART_EVERY:
                self.tell(f"{tally.checkpoints} checkpoints, {len(tally.problems)} problems")
        self.end(threads, files)
        tally.seconds = time.monotonic() - begin_s
        return tally

    # --- what is done ------------------------------------------------------------

    def train_on(self) -> None:
        """A start with a few saves, some of which meet a failing store."""
        store = FaultyStore(LocalStore(self.root))
        life = self.begin(store)
        for _ in range(self.random.randint(1, _RESTART_EVERY)):
            if self.random.random() < _FAULT_SHARE:
                store.fault = self.draw_fault()
                self.tally.failures[f"{store.fault.do} {store.fault.when}"] += 1
            self.save(life)
            store.fault = Fault(do="none")
            self.look()
        life.end()

    def draw_fault(self) -> Fault:
        """A failure of one operation or a few; ``short`` says less was written than was asked."""
        do = self.random.choice(["EIO", "ENOSPC", "short"])
        when = "before" if do == "short" else self.random.choice(["before", "mid", "after"])
        at = self.random.randint(1, _OPERATIONS)
        return Fault(at=at, times=self.random.choice([1, 1, 1, 3]), when=when, do=do)

    def lose_power(self) -> None:
        """A start whose power fails; the next one sees what an unlucky disk kept of it.

        Nobody else writes meanwhile: the model of the disk knows only what goes through it.
        """
        self.await_persisters()
        store = PowerCutStore(self.root, cut_at=self.random.randint(1, _SYSTEM_CALLS))
        life: _Life | None = None
        try:
            life = _Life(store, self.random.choice(_EXACT), persist="thread")
            self.compare(life)
            for _ in range(4):
                self.save(life)
                if store.files.is_off:
                    break
        except (CheckpointError, PowerCut):
            pass  # it is off
        if life is not None:
            life.end()
        self.tally.failures["power cut"] += store.files.is_off
        mode: Mode = self.random.choice(get_args(Mode))
        self.roots += 1
        after = self.top / f"root-{self.roots}"
        store.files.after_power_cut(after, mode, seed=self.serial)
        shutil.rmtree(self.root)
        self.root = after

    def be_killed(self) -> None:
        """A process of its own, with a persister process, that is killed at any moment."""
        root, first, strategy = str(self.root), self.serial, self.random.choice(_EXACT)

        def work(say: Say) -> None:
            life = _Life(root, strategy, persist="process")
            own: Any = life.checkpointer._snapshotter
            say(own._persister.pid)
            for serial in range(first, first + 1000):
                say(["saving", serial])
                life.save(serial)
                say(["durable", serial])

        child = Child(work)
        persister = child.hear(_WAIT_S)
        for _ in range(self.random.randint(1, 9)):
            self.hear(child.hear(_WAIT_S))
        time.sleep(self.random.random() * 0.02)
        victims = self.random.choice([[child.pid], [child.pid, persister], [persister, child.pid]])
        for pid in victims:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for said in child.wait(_WAIT_S).said:
            self.hear(said)
        both = len(victims) > 1
        self.tally.failures["trainer and persister killed" if both else "trainer killed"] += 1

    def hear(self, said: Any) -> None:  # noqa: ANN401  whatever the child says
        what, serial = said
        if what == "saving":
            self.serial = serial + 1
            self.tally.checkpoints += 1
        else:
            self.durable = serial
            self.tally.durable += 1

    def save(self, life: _Life) -> None:
        """One save: durable, or an error that is the library's."""
        serial = self.serial
        self.serial += 1
        self.tally.checkpoints += 1
        try:
            life.save(serial)
        except CheckpointError:
            return
        except PowerCut:
            return
        self.durable = serial
        self.tally.durable += 1

    def begin(self, store: Store) -> _Life:
        life = _Life(store, self.random.choice(_EXACT), persist="thread")
        self.compare(life)
        return life

    # --- what is checked ---------------------------------------------------------

    def compare(self, life: _Life) -> None:
        """What a start restored is the newest durable one, or one that was under way after it."""
        self.tally.restores += 1
        if not life.is_as_saved():
            self.tally.problems.append(
                f"save {life.more['serial']} (step {life.step}) came back changed"
            )
        if not self.durable <= life.more["serial"] < max(1, self.serial):
            self.tally.problems.append(
                f"save {self.durable} was durable, save {life.more['serial']} came back"
            )
        self.durable = max(self.durable, life.more["serial"])

    def look(self) -> None:
        """What a reader beside the training finds."""
        weight = torch.nn.Parameter(_content(0))
        more: dict[str, int] = {"serial": -1, "step": 0}
        optimizer = torch.optim.SGD([weight], lr=1.0)
        reader = Checkpointer(
            LocalStore(self.root),
            state={"w": weight, "o": optimizer, "more": more},
            read_only=True,
        )
        step = 0
        with suppress(NoCheckpoint):  # what was durable is looked for below
            step = reader.restore()
        reader.close()
        self.tally.restores += 1
        if step and not torch.equal(weight.detach(), _content(more["serial"])):
            self.tally.problems.append(f"a reader got save {more['serial']} changed")
        if more["serial"] < self.durable:
            self.tally.problems.append(
                f"save {self.durable} is durable, a reader got save {more['serial']}"
            )
        if self.tally.checkpoints % _SAMPLE_EVERY == 0:
            gc.collect()  # what a collector would free at some time is no growth
            self.tally.rss_bytes.append(_resident_bytes())

    def check(self) -> None:
        """Nothing torn can be listed, and every byte of what is listed can be read."""
        repository = self.repository()
        listing = repository.survey()
        self.tally.problems += [f"{d.where}: {d.why}" for d in listing.damaged]
        for at in listing.committed:
            self.tally.problems += [f"{d.where}: {d.why}" for d in verify(repository, at)]

    def repository(self) -> Repository:
        repository = open_repository(LocalStore(self.root))
        self.runs.add(repository.run)
        return repository

    def await_persisters(self) -> None:
        """Let those of killed trainers come to their end."""
        until_s = time.monotonic() + _WAIT_S
        while _persisters(self.runs) and time.monotonic() < until_s:
            time.sleep(0.01)

    def end(self, threads: int, files: int) -> None:
        """One more start, and then nothing may be left of all that was started."""
        life = self.begin(LocalStore(self.root))
        self.save(life)
        life.end()
        self.check()
        problems = self.tally.problems
        repository = self.repository()
        if left := repository.survey().leftovers:
            problems.append(f"left-over objects: {list(left)[:5]}")
        if left_files := list(self.root.glob(".tmp/*")):
            problems.append(f"left-over files: {left_files[:5]}")
        self.await_persisters()
        if processes := _persisters(self.runs):
            problems.append(f"left-over processes: {processes}")
        for run in self.runs:
            problems += [f"left-over slot: {path.name}" for path in slots_of(SHARED_MEMORY, run)]
        gc.collect()  # errors keep views of slots until somebody looks for garbage
        if threading.active_count() > threads:
            names = [t.name for t in threading.enumerate()]
            problems.append(f"left-over threads: {names[threads:]}")
        if _open_files() > files:
            problems.append(f"{_open_files() - files} left-over open files")
        grown, limit = self.tally.growth_bytes, _FLAT_BYTES
        limit = max(limit, round(_FLAT_SHARE * max(self.tally.rss_bytes, default=0)))
        if grown > limit:
            problems.append(f"memory grew by {grown} bytes, expected at most {limit}")


def _persisters(runs: set[str]) -> list[int]:
    found = [persister for run in runs for persister, _ in persisters_of(run)]
    return [persister.pid for persister in found if ProcessId.of(persister.pid).start]


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))
