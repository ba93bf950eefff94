"""Bug reports about other checkpoint libraries, as cases of this one: storage and the writer.

Each docstring starts with the id of the case.
"""

from __future__ import annotations

import gc
import hashlib
import importlib.util
import json
import math
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from asymcheck import (
    Checkpointer,
    CheckpointError,
    CorruptCheckpoint,
    IncompatibleCheckpoint,
    StoreError,
)
from asymcheck.decoding import Decoding, verify
from asymcheck.errors import CaptureError
from asymcheck.planning.policy import Admission
from asymcheck.planning.retention import CheckpointId
from asymcheck.planning.strategies import Strategy
from asymcheck.recovery import CheckpointWarning
from asymcheck.storage.index import parse_index
from asymcheck.storage.local import TEMP_FOLDER, Files, LocalStore
from asymcheck.storage.memory import MemoryStore
from asymcheck.storage.repository import open_repository
from asymcheck.storage.sealed import seal, unseal
from asymcheck.storage.store import Buffer, Store
from asymcheck.testing.children import TIMEOUT_S, Child, Say, run_in_child
from asymcheck.testing.faulty import Fault, FaultyStore

MiB = 1 << 20
FLOATS = 4096


def _content(step: int, size: int = FLOATS) -> torch.Tensor:
    return torch.arange(size, dtype=torch.float32) + step


def _train(
    root: object,
    *steps: int,
    size: int = FLOATS,
    resume: str = "auto",
    losses: Iterable[float] = (),
    **options: object,
) -> Checkpointer:
    """Save each step, one after the other; every one is durable at the end."""
    tensor = torch.zeros(size)
    options.setdefault("persist", "thread")  # quicker, where who writes is not the point
    ckpt = Checkpointer(root, state={"w": tensor}, **options)
    ckpt.restore(resume=resume)
    metrics = dict(zip(steps, losses, strict=False))
    for step in steps:
        tensor.copy_(_content(step, size))
        ckpt.save(step, metrics={"loss": metrics[step]} if metrics else None)
        ckpt.wait(TIMEOUT_S)
    return ckpt


def _latest(root: object, size: int = FLOATS, **options: object) -> int:
    """The step that a resume finds; its content is that of this step, bit for bit."""
    tensor = torch.zeros(size)
    step = Checkpointer(root, state={"w": tensor}, read_only=True).restore(**options)
    assert step == 0 or torch.equal(tensor, _content(step, size))
    return step


def _steps(root: object) -> list[int]:
    with Checkpointer(root, state={"w": torch.zeros(FLOATS)}, read_only=True) as ckpt:
        return ckpt.steps()


def _resumes_with_one_warning(root: object, expected: int, passed: int) -> str:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        assert _latest(root) == expected
    (warning,) = heard
    assert issubclass(warning.category, CheckpointWarning)
    assert f"checkpoint of step {passed} is damaged and was passed over" in str(warning.message)
    return str(warning.message)


# --- A: silent wrong state --------------------------------------------------

PACK = "step-00000002/a000001-r0000-0001.pack"
INDEX = "step-00000002/a000001-r0000.json"
MANIFEST = "step-00000002/a000001-MANIFEST.json"


def _two_checkpoints(root: Path) -> None:
    """Of a big leaf, which has its own chunk, behind small ones: so that there is a gap."""
    state = {"w": torch.zeros(FLOATS), "big": torch.zeros(20_000)}
    with Checkpointer(root, state=state, persist="thread") as ckpt:
        for step in (1, 2):
            state["w"].copy_(_content(step))
            state["big"].fill_(step)
            ckpt.save(step)
            ckpt.wait(TIMEOUT_S)


def _positions() -> Iterator[tuple[str, str, str]]:
    for where in ("first", "middle", "last"):
        yield PACK, where, "payload of w"
        yield PACK, where, "payload of big"
        yield PACK, where, "gap"
        yield INDEX, where, "all"
        yield MANIFEST, where, "all"


@pytest.mark.parametrize(("name", "where", "part"), list(_positions()))
def test_one_flipped_bit_is_named_and_the_step_before_is_loaded(
    tmp_path: Path, name: str, where: str, part: str
) -> None:
    """A1: a bit flip or bad block loads without a word."""
    _two_checkpoints(tmp_path)
    index = parse_index((tmp_path / INDEX).read_bytes(), INDEX)
    leaves = {leaf.key: leaf for leaf in index.leaves}
    first, second = index.chunks[:2]
    ranges = {
        "payload of w": (leaves["w"].at, leaves["w"].stop),
        "payload of big": (second.offset, second.offset + second.stored_bytes),
        "gap": (first.offset + first.stored_bytes, second.offset),
        "all": (0, (tmp_path / name).stat().st_size),
    }
    start, stop = ranges[part]
    at = {"first": start, "middle": (start + stop) // 2, "last": stop - 1}[where]
    data = bytearray((tmp_path / name).read_bytes())
    data[at] ^= 0x10
    (tmp_path / name).write_bytes(data)

    repository = open_repository(LocalStore(tmp_path))
    (damage,) = verify(repository, CheckpointId(1, 2))
    assert damage.where.startswith(name)
    if name == PACK:
        offset = second.offset if part == "payload of big" else first.offset
        assert damage.at_byte == offset
        assert f"{PACK} at byte {offset}" in damage.where
        assert ("big" if part == "payload of big" else "w") in damage.keys
    assert list(verify(repository, CheckpointId(1, 1))) == []

    state = {"w": torch.zeros(FLOATS), "big": torch.zeros(20_000)}
    with pytest.raises(CorruptCheckpoint, match=name.partition("/")[2][:20]):
        Checkpointer(tmp_path, state=state, read_only=True).restore(2)
    with pytest.warns(CheckpointWarning, match="step 2 is damaged and was passed over") as heard:
        assert Checkpointer(tmp_path, state=state, read_only=True).restore() == 1
    assert len(heard) == 1
    assert torch.equal(state["w"], _content(1))
    assert torch.equal(state["big"], torch.full((20_000,), 1.0))


# --- B: crash consistency, latest, retention --------------------------------


class _KilledAtByte(Files):
    """SIGKILL once so many bytes were written."""

    def __init__(self, at: int) -> None:
        self.left = at

    def write(self, fd: int, data: memoryview) -> int:
        if len(data) >= self.left:
            super().write(fd, data[: self.left])
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= len(data)
        return super().write(fd, data)


def test_a_writer_killed_at_any_byte_leaves_the_newest_committed_step(tmp_path: Path) -> None:
    """B1: a half-written directory is picked as latest."""
    torch.set_num_threads(1)
    _train(tmp_path / "0", 1).close()
    before = sum(e.nbytes for e in LocalStore(tmp_path / "0").list())
    _train(tmp_path / "0", 2).close()
    # Numbers in the records have not always the same number of digits.
    total = sum(e.nbytes for e in LocalStore(tmp_path / "0").list()) - before - 300
    draw = random.Random(1)
    for at in [1, total - 1, *(draw.randrange(1, total) for _ in range(18))]:
        root = tmp_path / f"{at}"
        _train(root, 1).close()

        def save(say: Say, root: Path = root, at: int = at) -> None:
            _train(LocalStore(root, _KilledAtByte(at)), 2)

        assert run_in_child(save).was_killed
        assert _latest(root) == 1
        assert _steps(root) == [1]
        _train(root, 2).close()
        assert _latest(root) == 2
        assert not list((root / TEMP_FOLDER).glob("*"))
        assert not open_repository(LocalStore(root)).survey().leftovers


class _Watched(FaultyStore):
    """Looks at the root through a reader's eyes before each operation of the writer."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.seen: list[tuple[str, str, list[int]]] = []

    def _strikes(self, op: str, name: str) -> bool:
        self.seen.append((op, name, _steps(self.inner)))
        return super()._strikes(op, name)


def test_the_newest_step_moves_only_with_the_last_write_of_its_save() -> None:
    """B2: `latest` moves before everything is on disk (here: in one process)."""
    raw = MemoryStore()
    _train(raw, 1).close()
    tensor = torch.zeros(FLOATS)
    store = _Watched(raw)
    ckpt = Checkpointer(store, state={"w": tensor})
    ckpt.restore()
    store.seen.clear()
    tensor.copy_(_content(2))
    ckpt.save(2)
    ckpt.wait(TIMEOUT_S)
    writes = [i for i, (op, _, _) in enumerate(store.seen) if op == "write"]
    assert [steps for _, _, steps in store.seen[: writes[-1] + 1]] == [[1]] * (writes[-1] + 1)
    assert store.seen[writes[-1]][1].endswith("MANIFEST.json")
    assert all(steps == [1, 2] for _, _, steps in store.seen[writes[-1] + 1 :])
    ckpt.close()


@pytest.mark.parametrize("name", ["*.pack", "*-r0000.json", "*MANIFEST.json"])
@pytest.mark.parametrize("when", ["before", "mid", "after"])
def test_a_full_disk_costs_one_save_and_nothing_else(tmp_path: Path, name: str, when: str) -> None:
    """B4: the disk is full in the middle of a save."""
    store = FaultyStore(LocalStore(tmp_path))
    ckpt = _train(store, 1)
    store.fault = Fault(op="write", name=name, when=when, do="ENOSPC")
    ckpt.save(2).durable.exception(TIMEOUT_S)
    with pytest.raises(StoreError, match="No space left on device") as caught:
        ckpt.step(3)
    assert caught.value.retryable
    assert "while step 2 was being persisted" in caught.value.__notes__
    assert _latest(tmp_path) == 1
    assert not list((tmp_path / TEMP_FOLDER).glob("*"))
    assert not open_repository(LocalStore(tmp_path)).survey().leftovers
    ckpt.close()
    _train(store, 4).close()
    assert _latest(tmp_path) == 4


def test_too_little_room_is_seen_before_a_byte_is_written(tmp_path: Path) -> None:
    """B4: room is looked for first, by the size of the state."""

    class Small(LocalStore):
        def free_bytes(self) -> int | None:
            return 16_000 if (self.root / "full").exists() else super().free_bytes()

    store = FaultyStore(Small(tmp_path))
    ckpt = _train(store, 1)
    (tmp_path / "full").touch()
    store.operations.clear()
    ckpt.save(2)
    with pytest.raises(StoreError, match=r"step 2 needs [0-9]+ bytes, 16000 are free"):
        ckpt.close()
    assert "write" not in {op for op, _ in store.operations}
    assert _latest(tmp_path) == 1


@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_old_checkpoint_stays_until_a_newer_one_is_committed(n: int) -> None:
    """B5: the old checkpoint is deleted before the new one is safe."""
    raw = MemoryStore()
    store = FaultyStore(raw)
    ckpt = _train(store, 1, keep_last=1)
    store.fault = Fault(at=n, op="write")
    ckpt.save(2)
    with pytest.raises(StoreError, match="injected"):
        ckpt.close()
    assert _latest(raw) == 1
    _train(raw, 3, keep_last=1).close()
    assert _steps(raw) == [3]


def test_retention_counts_and_removes_its_own_committed_steps_only(tmp_path: Path) -> None:
    """B6: retention deletes what it does not own, or sorts wrongly."""
    own = tmp_path / "own"
    other = tmp_path / "other"
    _train(other, 1000, 2000).close()
    _train(own, 9).close()
    foreign = ["checkpoint-3-best-KEEP/m", "checkpoint-10-merged/m", ".ipynb_checkpoints/x"]
    for name in foreign:
        (own / name).parent.mkdir()
        (own / name).write_text("mine")
    for folder in ("step-00001000", "step-00002000"):
        (own / folder).mkdir()
        for file in (other / folder).iterdir():
            (own / folder / file.name).write_bytes(file.read_bytes())
    copied = {p: p.read_bytes() for p in own.glob("step-0000[12]000/*")}
    for i, path in enumerate(sorted(own.rglob("*"), reverse=True)):
        os.utime(path, (10**9 + i, 10**9 + i))  # the newest look oldest
    ckpt = _train(own, 10, 11, keep_last=2)
    assert ckpt.report.step == 9  # not the higher steps of the other run
    assert ckpt.steps() == [10, 11]
    ckpt.close()
    assert [(own / name).read_text() for name in foreign] == ["mine"] * 3
    assert {p: p.read_bytes() for p in copied} == copied


def test_with_a_worsening_metric_the_newest_and_the_best_are_there(tmp_path: Path) -> None:
    """B7: best-k evicts the newest."""
    options = {"keep_last": 1, "keep_best": 2, "monitor": "loss"}
    ckpt = _train(tmp_path, 1, 2, 3, 4, 5, losses=[1.0, 2.0, 3.0, 4.0, 5.0], **options)
    assert ckpt.steps() == [1, 2, 5]
    ckpt.close()
    repository = open_repository(LocalStore(tmp_path))
    committed = repository.survey().committed
    best = min(committed, key=lambda at: committed[at].metrics["loss"])
    assert best.step == 1
    assert list(verify(repository, best)) == []
    assert _latest(tmp_path) == 5


def test_two_jobs_that_remove_and_a_reader_never_hurt_each_other(tmp_path: Path) -> None:
    """B8: two processes delete the same tree while a third reads the oldest."""
    torch.set_num_threads(1)
    _train(tmp_path, 1, 2, 3).close()

    def read(say: Say) -> None:
        repository = open_repository(LocalStore(tmp_path))
        say("ready")
        for _ in range(40):
            for at in repository.survey().committed:
                for damage in verify(repository, at):
                    # The only finding that there may be: it was removed since it was listed.
                    assert "is not there" in damage.why, damage

    def work(first: int) -> Callable[[Say], None]:
        def run(say: Say) -> None:
            try:
                _train(tmp_path, *range(first, first + 25), keep_last=1).close()
            except CheckpointError as failure:
                say(type(failure).__name__)

        return run

    reader = Child(read)
    assert reader.hear() == "ready"
    jobs = [Child(work(10)), Child(work(1000))]
    for job in jobs:
        assert job.wait().check() in ([], ["SupersededWriter"])
    reader.wait().check()
    assert _latest(tmp_path) > 3
    _train(tmp_path, 5000).close()  # the next start takes what a job that was stopped left
    assert _latest(tmp_path) == 5000


class _RenamesByCopying(MemoryStore):
    """A medium whose write is no atom: cut off, it leaves half an object under its name."""

    cut = ""

    def write(self, name: str, parts: Iterable[Buffer]) -> int:
        data = b"".join(bytes(p) for p in parts)
        if self.cut and name.endswith(self.cut):
            super().write(name, [data[: len(data) // 2]])
            raise StoreError(f"write {name}: cut off half-way", retryable=False)
        return super().write(name, [data])


@pytest.mark.parametrize("cut", [".pack", "-r0000.json", "-MANIFEST.json"])
@pytest.mark.parametrize("dies", [True, False])
def test_half_an_object_under_its_final_name_is_no_checkpoint(cut: str, dies: bool) -> None:
    """B10: object stores have no atomic rename."""
    store = _RenamesByCopying()
    ckpt = _train(store, 1)
    store.cut = cut
    if dies:  # with it dies who would have removed the half
        store.delete = lambda name: None  # type: ignore[method-assign]
    ckpt.save(2)
    with pytest.raises(StoreError, match="cut off half-way"):
        ckpt.close()
    if dies:
        del store.delete
        assert any("step-00000002" in e.name for e in store.list())
    store.cut = ""
    if dies and cut == "-MANIFEST.json":
        _resumes_with_one_warning(store, 1, passed=2)
    else:
        assert _latest(store) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        _train(store, 2).close()
    assert _latest(store) == 2
    assert not open_repository(store).survey().leftovers


def test_a_directory_that_exists_and_is_not_there_yet_costs_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B11: mkdir says EEXIST, and the directory shows 200 ms later."""
    real_mkdir, clock, coming = os.mkdir, [0.0], {}

    def mkdir(path: str | Path, mode: int = 0o777) -> None:
        coming.setdefault(str(path), clock[0] + 0.2)
        raise FileExistsError(17, "File exists", str(path))

    def sleep(seconds: float) -> None:
        clock[0] += seconds
        for path, at in list(coming.items()):
            if at <= clock[0]:
                Path(path).exists() or real_mkdir(path)
                del coming[path]

    monkeypatch.setattr(os, "mkdir", mkdir)
    monkeypatch.setattr(time, "sleep", sleep)
    _train(tmp_path / "new" / "root", 1, 2, keep_last=1).close()
    monkeypatch.undo()
    assert _latest(tmp_path / "new" / "root") == 2
    assert clock[0] >= 0.2


NAMES = ["run é 名 step=1 'q'", 'a "b"', "~", "$HOME", "a%20b", "a/", "x" * 255, "link", "."]


@pytest.mark.parametrize("name", NAMES)
def test_a_path_means_just_itself_and_metrics_make_no_file_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """B13: paths with anything in them; metric names with `/` or `=`."""
    (tmp_path / "real").mkdir()
    (tmp_path / "work").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path)
    given = str(tmp_path / "~") if name == "~" else name
    tensor = torch.zeros(FLOATS)
    ckpt = Checkpointer(given, state={"w": tensor})
    ckpt.restore()
    monkeypatch.chdir("work")
    tensor.copy_(_content(1))
    ckpt.save(1, metrics={"val/loss=../x": 0.5})
    ckpt.close()
    root = tmp_path / name
    assert _latest(root) == 1
    found = {str(p.relative_to(root)) for p in root.rglob("*") if "a000001" in p.name}
    assert found == {
        "step-00000001/a000001-MANIFEST.json",
        "step-00000001/a000001-r0000-0001.pack",
        "step-00000001/a000001-r0000.json",
    }
    (manifest,) = open_repository(LocalStore(root)).survey().committed.values()
    assert manifest.metrics == {"val/loss=../x": 0.5}
    assert list((tmp_path / "work").iterdir()) == []


# --- C: the writer in the background ----------------------------------------


class _Dying(MemoryStore):
    """A medium whose driver ends with whatever it is given."""

    failure: BaseException | None = None

    def write(self, name: str, parts: Iterable[Buffer]) -> int:
        if self.failure is not None:
            raise self.failure
        return super().write(name, parts)


@pytest.mark.parametrize("call", ["step", "save", "wait", "close", "restore"])
@pytest.mark.parametrize(
    "failure",
    [
        StoreError("no space", retryable=True),
        OSError(28, "No space left on device"),
        MemoryError(),
        SystemExit(0),
        KeyboardInterrupt(),
    ],
    ids=lambda failure: type(failure).__name__,
)
def test_a_failure_in_the_background_is_raised_by_the_next_call_once(
    call: str, failure: BaseException
) -> None:
    """C1: a failure in the background save is not seen."""
    store = _Dying()
    ckpt = _train(store, 1)
    store.failure = failure
    handle = ckpt.save(2)
    told = handle.durable.exception(TIMEOUT_S)
    assert failure in (told, told.__cause__)
    store.failure = None
    arguments = {"step": (3,), "save": (3,)}.get(call, ())
    with pytest.raises(CheckpointError) as caught:
        getattr(ckpt, call)(*arguments)
    assert caught.value is told
    assert "while step 2 was being persisted" in told.__notes__
    if call != "close":
        ckpt.save(4)
        ckpt.wait(TIMEOUT_S)
        assert ckpt.steps() == [1, 4]
    ckpt.close()
    assert not open_repository(store).survey().leftovers


def test_failures_may_be_warnings_and_training_goes_on() -> None:
    """C1: the policy `warn`."""
    store = _Dying()
    ckpt = _train(store, 1, on_error="warn")
    store.failure = StoreError("no space", retryable=True)
    ckpt.save(2).durable.exception(TIMEOUT_S)
    store.failure = None
    with pytest.warns(CheckpointWarning, match=r"no space .*while step 2 was being persisted"):
        ckpt.step(3)
    ckpt.save(4)
    ckpt.close()
    assert _steps(store) == [1, 4]


class _Slow(MemoryStore):
    """Writes when it is let: so that a test needs no time."""

    def __init__(self) -> None:
        super().__init__()
        self.let = threading.Event()
        self.let.set()

    def write(self, name: str, parts: Iterable[Buffer]) -> int:
        assert self.let.wait(TIMEOUT_S)
        nbytes = 0
        for part in parts:  # what is kept is not the point: only how much is held in flight
            nbytes += memoryview(part).nbytes
        if nbytes < MiB:
            return super().write(name, [bytes(nbytes)])
        return nbytes


def _resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("when_full", ["skip", "raise"])
@pytest.mark.parametrize("slots", [1, 2])
def test_memory_in_flight_is_bounded_by_the_slots(slots: int, when_full: str) -> None:
    """C2: no back-pressure, each save stages another full copy."""

    def work(say: Say) -> None:
        size = 32 * MiB // 4
        store = _Slow()
        admission = Admission(max_in_flight=slots, when_full=when_full)
        ckpt = Checkpointer(
            store,
            state={"w": torch.ones(size)},
            every_steps=1,
            strategy=Strategy(admission=admission),
        )
        ckpt.restore()
        store.let.clear()
        before = _resident_bytes()
        outcomes = []
        for step in range(1, 11):
            try:
                outcomes.append("skipped" if ckpt.step(step) is None else "saved")
            except CaptureError:
                outcomes.append("raised")
        grown = _resident_bytes() - before
        store.let.set()
        ckpt.close()
        del ckpt
        gc.collect()
        say([outcomes, grown, _resident_bytes() - before])

    torch.set_num_threads(1)
    ((outcomes, grown, left),) = run_in_child(work).check()
    refused = {"skip": "skipped", "raise": "raised"}[when_full]
    assert outcomes == ["saved"] * slots + [refused] * (10 - slots)
    assert grown <= slots * 32 * MiB + 16 * MiB
    assert left <= 16 * MiB


def test_a_save_waits_for_a_free_slot_and_gives_it_back() -> None:
    """C2: the policy `wait`."""
    store = _SlowAndTrue()
    tensor = torch.zeros(FLOATS)
    ckpt = Checkpointer(store, state={"w": tensor})
    ckpt.restore()
    store.let.clear()
    ckpt.save(1)
    waiting = threading.Event()
    done = []

    def more() -> None:
        waiting.set()
        for step in (2, 3):
            ckpt.save(step)
            done.append(step)

    thread = threading.Thread(target=more)
    thread.start()
    assert waiting.wait(TIMEOUT_S)
    assert not done
    store.let.set()
    thread.join(TIMEOUT_S)
    ckpt.close()
    assert done == [2, 3]
    assert _steps(store) == [1, 2, 3]


class _SlowAndTrue(_Slow):
    def write(self, name: str, parts: Iterable[Buffer]) -> int:
        assert self.let.wait(TIMEOUT_S)
        return MemoryStore.write(self, name, parts)


SCRIPT = """
import os, sys, torch
from asymcheck import Checkpointer

w = torch.arange(1 << 20, dtype=torch.float32)
ckpt = Checkpointer(sys.argv[1], state={"w": w})
ckpt.restore()
ckpt.save(1)
w += 1
end = sys.argv[2]
if end == "exit":
    sys.exit(3)
if end == "error":
    raise RuntimeError("the training failed")
if end == "thread":
    # The last reference goes before the interpreter does.
    del ckpt
"""


@pytest.mark.parametrize(
    ("end", "status"), [("return", 0), ("exit", 3), ("error", 1), ("thread", 0)]
)
def test_a_script_that_ends_without_close_has_saved(tmp_path: Path, end: str, status: int) -> None:
    """C10: exit before flush."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path / "root"), end],
        check=False,
        timeout=TIMEOUT_S,
        capture_output=True,
        text=True,
    )
    assert done.returncode == status, done.stderr
    tensor = torch.zeros(1 << 20)
    assert Checkpointer(tmp_path / "root", state={"w": tensor}, read_only=True).restore() == 1
    assert torch.equal(tensor, torch.arange(1 << 20, dtype=torch.float32))


@pytest.mark.parametrize("persist", ["thread", "process"])
def test_a_process_that_ends_at_once_leaves_nothing_half_visible(
    tmp_path: Path, persist: str
) -> None:
    """C10: os._exit."""
    torch.set_num_threads(1)
    _train(tmp_path, 1, size=1 << 20).close()
    for step in range(2, 6):

        def work(say: Say, step: int = step) -> None:
            tensor = torch.zeros(1 << 20)
            ckpt = Checkpointer(tmp_path, state={"w": tensor}, persist=persist)
            say(ckpt.restore())
            tensor.copy_(_content(step, 1 << 20))
            ckpt.save(step).captured.result(TIMEOUT_S)
            os._exit(0)

        before = _latest(tmp_path, 1 << 20)
        (resumed,) = run_in_child(work).check()
        # A persister of its own may still be at work when the trainer is gone.
        assert before <= resumed < step
        assert _latest(tmp_path, 1 << 20) in (resumed, step)
        assert not open_repository(LocalStore(tmp_path)).survey().damaged
    # What was captured is not lost with the trainer: its persister or the next start saves it.
    assert Checkpointer(tmp_path, state={"w": torch.zeros(1 << 20)}).restore() == 5


# --- E: versions ------------------------------------------------------------

GOLDEN = Path(__file__).parents[1] / "golden"
TAGS_OF_VERSION_1 = [
    "$leaf",
    "$str",
    "$int",
    "$float",
    "$complex",
    "$bytes",
    "$bytearray",
    "$numpy_scalar",
    "$dtype",
    "$device",
    "$range",
    "$slice",
    "$datetime",
    "$date",
    "$time",
    "$timedelta",
    "$path",
    "$enum",
    "$flag",
    "$tuple",
    "$size",
    "$set",
    "$frozenset",
    "$deque",
    "$dict",
    "$ordereddict",
    "$counter",
    "$defaultdict",
    "$namedtuple",
    "$dataclass",
    "$torch_generator",
    "$random",
    "$numpy_random_state",
    "$numpy_generator",
]


@pytest.fixture
def golden() -> Iterator[ModuleType]:
    """The state of the golden checkpoint, as a module; random generators are put back after."""
    spec = importlib.util.spec_from_file_location("make_v1", GOLDEN / "make_v1.py")
    assert spec is not None
    assert spec.loader is not None
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield maker.load_state_module()
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


def test_the_golden_checkpoint_of_version_1_loads_bit_for_bit(golden: ModuleType) -> None:
    """E8: older versions of the format stay readable for ever."""
    files = {p: p.read_bytes() for p in (GOLDEN / "v1").rglob("*") if p.is_file()}
    assert list(verify(open_repository(LocalStore(GOLDEN / "v1")), CheckpointId(1, 100))) == []
    expected, state = golden.state(blank=False), golden.state(blank=True)
    listed = json.loads((GOLDEN / "v1.json").read_text())
    assert all(
        golden.bits(state[name]) != golden.bits(expected[name]) for name in state if name != "empty"
    )
    with Checkpointer(GOLDEN / "v1", state=state, read_only=True) as ckpt:
        assert ckpt.restore() == 100
    assert golden.draws() == listed["draws"]
    for name in expected:
        assert golden.bits(state[name]) == golden.bits(expected[name]), name
    assert {
        name: hashlib.sha256(golden.bits(state[name]).encode()).hexdigest()
        for name in listed["sha256 of bits"]
    } == listed["sha256 of bits"]
    assert state["model"].head.weight is state["model"].embed.weight
    assert {p: p.read_bytes() for p in (GOLDEN / "v1").rglob("*") if p.is_file()} == files


def test_the_golden_checkpoint_holds_every_kind_of_value(golden: ModuleType) -> None:
    """E8: what is not in it is not known to stay readable."""
    repository = open_repository(LocalStore(GOLDEN / "v1"))
    with repository.open(CheckpointId(1, 100)) as checkpoint:
        (index,) = checkpoint.indexes
        tree = next(leaf for leaf in index.leaves if leaf.key == "")
        text = Decoding(checkpoint).read_leaf(index, tree).decode()
    assert [tag for tag in TAGS_OF_VERSION_1 if f'{{"{tag}":' not in text] == []
    dtypes = {leaf.dtype for leaf in index.leaves}
    assert {*golden.DTYPES, *(f"numpy:{d}" for d in golden.NUMPY_DTYPES)} <= dtypes
    assert {leaf.order for leaf in index.leaves} >= {(), (0, 2, 3, 1), (1, 0)}
    assert index.aliases == {"model/head.weight": "model/embed.weight"}
    metrics = repository.survey().committed[CheckpointId(1, 100)].metrics
    assert metrics["loss"] == 0.5
    assert math.isnan(metrics["nan"])


def test_a_newer_version_is_refused_by_its_number_and_nothing_is_touched(tmp_path: Path) -> None:
    """E8: a newer major version."""
    _train(tmp_path, 1).close()
    (tmp_path / "FORMAT").write_text("asymcheck 2\n")
    files = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    for read_only in (True, False):
        with pytest.raises(
            IncompatibleCheckpoint,
            match=r"FORMAT: format version 2; this release reads version 1: install an asymcheck",
        ):
            Checkpointer(tmp_path, state={"w": torch.zeros(FLOATS)}, read_only=read_only)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == files


def test_one_checkpoint_of_a_newer_version_is_passed_over_with_a_word(tmp_path: Path) -> None:
    """E8: a newer release wrote on under the same root."""
    _train(tmp_path, 1, 2).close()
    path = tmp_path / MANIFEST
    value = unseal(path.read_bytes(), MANIFEST)
    path.write_bytes(seal({**value, "needs": ["deltas"]}))
    assert "install a newer asymcheck" in _resumes_with_one_warning(tmp_path, 1, passed=2)
