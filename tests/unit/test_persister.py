"""From slots to committed checkpoints, by a thread and by a process: no torch, slots by hand."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from time import monotonic, sleep

import pytest

from asymcheck import persister as persister_module
from asymcheck.capture import Canary, Capture, dump_capture
from asymcheck.decoding import Decoding, verify
from asymcheck.errors import (
    CheckpointError,
    CorruptCheckpoint,
    DroppedCheckpoint,
    ObjectNotFound,
    StoreError,
    SupersededWriter,
)
from asymcheck.events import Sink, Span, Stage, discard, guarded
from asymcheck.memory.arena import SHARED_MEMORY, Arena, Slot, SlotState, slots_of
from asymcheck.memory.process import ProcessId
from asymcheck.memory.slot import GivenUp
from asymcheck.messages import Durable, describe_error, rebuild_error
from asymcheck.persist import persist
from asymcheck.persister import Persister, PersistProcess, PersistThread
from asymcheck.planning.layout import PAGE_BYTES, Extent
from asymcheck.planning.retention import CheckpointId, Retention
from asymcheck.storage.index import Leaf
from asymcheck.storage.repository import create_repository
from asymcheck.storage.store import open_store

WAIT_S = 60.0
SIZE = 3 * PAGE_BYTES + 100


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for what another process does; bounded."""
    end = monotonic() + WAIT_S
    while not condition():
        assert monotonic() < end, f"timed out: {what}"
        sleep(0.005)


def is_stopped(pid: int) -> bool:
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    return text.rpartition(")")[2].split()[0] == "T"


def content(step: int) -> bytes:
    return bytes([step % 251]) * SIZE


class Bench:
    """A repository, an arena, and persisters on them."""

    def __init__(self, root: Path, ring_bytes: int | None = None) -> None:
        self.root = root
        self.repository = create_repository(open_store(str(root)))
        self.repository.claim(None)
        self.run = self.repository.run
        self.arena = Arena(self.run, 0, 4, lambda message: None, ring_bytes=ring_bytes)
        self.spans: list[Span] = []
        self._made: list[Persister] = []

    def process(
        self, fault: str = "", sink: Sink | None = None, **options: object
    ) -> PersistProcess:
        url = f"faulty+file://{self.root}?{fault}" if fault else f"file://{self.root}"
        arguments: dict[str, object] = {
            "url": url,
            "run": self.run,
            "arena": self.arena,
            "retention": Retention(),
            "sink": sink or self.spans.append,
            "grace_s": 30.0,
            "log_path": None,
            **options,
        }
        made = PersistProcess(**arguments)  # type: ignore[arg-type]
        self._made.append(made)
        return made

    def thread(self, sink: Sink | None = None, **options: int) -> PersistThread:
        made = PersistThread(self.repository, Retention(), sink or self.spans.append, **options)
        self._made.append(made)
        return made

    def slot(self, step: int, *, canary: bytes = b"") -> Slot:
        """A slot that is being filled: nothing is copied yet."""
        capture = Capture(
            at=CheckpointId(1, step),
            leaves=(Leaf("w", "uint8", (SIZE,), 0, SIZE, ()),),
            aliases={},
            chunks=tuple(
                Extent(lo, min(lo + PAGE_BYTES, SIZE)) for lo in range(0, SIZE, PAGE_BYTES)
            ),
            metrics={},
            versions={},
            created_s=0.0,
            boundary_s=0.0,
            canaries=(Canary(0, 0, SIZE - 1, len(canary), 1),) if canary else (),
        )
        meta = dump_capture(capture)
        slot = self.arena.reserve(SIZE + PAGE_BYTES, len(meta), WAIT_S)
        assert slot is not None
        slot.begin(SIZE, len(canary), meta)
        slot.canaries[:] = canary
        return slot

    def fill(self, slot: Slot, step: int, upto: int = SIZE) -> None:
        slot.image[:upto] = content(step)[:upto]
        slot.copied_bytes = upto

    def copy(self, slot: Slot, step: int, start: int = 0, stop: int = SIZE) -> None:
        """As the copying thread does: memory first, a page at a time."""
        for lo in range(start, stop, PAGE_BYTES):
            hi = min(lo + PAGE_BYTES, stop)
            slot.take_next(Extent(lo, hi))
            slot.image[lo:hi] = content(step)[lo:hi]
            slot.copied_bytes = hi

    def seal(self, slot: Slot, step: int) -> None:
        self.fill(slot, step)
        slot.state = SlotState.SEALED

    def save(self, persister: Persister, step: int) -> Future[Durable]:
        slot = self.slot(step)
        future = persister.begin(slot, step)
        self.seal(slot, step)
        future.add_done_callback(lambda _: self.arena.free(slot))
        return future

    def steps(self) -> list[int]:
        return [at.step for at in self.repository.survey().committed]

    def read(self, step: int) -> bytes:
        with self.repository.open(CheckpointId(1, step)) as opened:
            (index,) = opened.indexes
            assert not list(verify(self.repository, CheckpointId(1, step)))
            return bytes(Decoding(opened).read_leaf(index, index.leaves[0]))

    def close(self) -> None:
        for made in self._made:
            if isinstance(made, PersistProcess) and ProcessId.of(made.pid).start:
                os.kill(made.pid, signal.SIGCONT)
            assert made.close(WAIT_S)
        self.arena.close()
        for path in slots_of(SHARED_MEMORY, self.run):
            path.unlink()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path / "root")
    yield made
    made.close()


KINDS = ["process", "thread"]


def start(bench: Bench, kind: str, sink: Sink | None = None) -> Persister:
    return bench.process(sink=sink) if kind == "process" else bench.thread(sink)


# --- the way of a slot ------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_slot_becomes_a_checkpoint_and_the_spans_come_back(bench: Bench, kind: str) -> None:
    persister = start(bench, kind)
    for step in (1, 2, 3):
        durable = bench.save(persister, step).result(WAIT_S)
        assert (durable.step, durable.attempt, durable.raw_bytes) == (step, 1, SIZE)
        assert bench.read(step) == content(step)
    stages = [(s.stage, s.step) for s in bench.spans]
    for step in (1, 2, 3):
        assert (Stage.FLUSH, step) in stages
        assert (Stage.COMMIT, step) in stages


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_committed_before_the_slot_is_sealed(bench: Bench, kind: str) -> None:
    persister = start(bench, kind)
    slot = bench.slot(1)
    future = persister.begin(slot, 1)
    bench.fill(slot, 1, SIZE // 2)  # the rest would end the pack, and nobody might see it begun
    temp = bench.root / ".tmp"
    until(lambda: temp.is_dir() and any(temp.iterdir()), "the pack is begun while it is filled")
    bench.fill(slot, 1)
    until(lambda: any(bench.root.glob("step-*/*.pack")), "the pack is whole")
    assert bench.steps() == []
    assert not future.done()
    slot.state = SlotState.SEALED
    assert future.result(WAIT_S).step == 1
    assert bench.steps() == [1]
    bench.arena.free(slot)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_given_up_leaves_nothing_in_the_store(bench: Bench, kind: str) -> None:
    persister = start(bench, kind)
    slot = bench.slot(1)
    future = persister.begin(slot, 1)
    bench.fill(slot, 1)
    slot.state = SlotState.DROPPED
    with pytest.raises(DroppedCheckpoint, match="step 1 was dropped"):
        future.result(WAIT_S)
    bench.arena.free(slot)
    assert bench.save(persister, 2).result(WAIT_S).step == 2
    assert bench.steps() == [2]
    assert not list(bench.root.glob("step-*1/*"))
    assert not list(bench.root.glob(".tmp/*"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_canary_that_differs_drops_the_checkpoint_and_names_leaf_and_step(
    bench: Bench, kind: str
) -> None:
    persister = start(bench, kind)
    slot = bench.slot(7, canary=b"\x00\x07")
    future = persister.begin(slot, 7)
    bench.seal(slot, 7)
    with pytest.raises(DroppedCheckpoint, match="'w' changed while it was copied") as dropped:
        future.result(WAIT_S)
    assert (dropped.value.step, dropped.value.key) == (7, "w")
    assert bench.steps() == []
    bench.arena.free(slot)


# --- several at a time ------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_report_is_about_its_own_slot_whatever_order_they_end_in(bench: Bench, kind: str) -> None:
    options = {"at_once": 2, "writers": 2}
    persister = bench.process(**options) if kind == "process" else bench.thread(**options)
    slow = bench.slot(1)
    first = persister.begin(slow, 1)  # nothing of it is copied yet
    for step in (2, 3):
        assert bench.save(persister, step).result(WAIT_S).step == step
    assert bench.steps() == [2, 3]
    assert not first.done()
    bench.seal(slow, 1)
    assert first.result(WAIT_S).step == 1
    bench.arena.free(slow)
    assert bench.steps() == [1, 2, 3]
    for step in (1, 2, 3):
        assert bench.read(step) == content(step)
        with bench.repository.open(CheckpointId(1, step)) as opened:
            (index,) = opened.indexes
            assert [o.nbytes for o in index.packs] == [2 * PAGE_BYTES, PAGE_BYTES + 100]


def test_of_two_at_work_only_the_one_that_kills_is_given_up(bench: Bench) -> None:
    persister = bench.process("op=write&name=step-00000001/*&do=kill&times=0", at_once=2)
    innocent = bench.slot(2)
    second = persister.begin(innocent, 2)
    until(lambda: persister._jobs[innocent.token].begun, "it is at work")
    first = bench.save(persister, 1)
    until(lambda: persister._jobs[innocent.token].ends == 1, "both are blamed for the first death")
    bench.seal(innocent, 2)
    with pytest.raises(StoreError, match="step 1: the persister process failed 3 times"):
        first.result(WAIT_S)
    assert second.result(WAIT_S).step == 2
    bench.arena.free(innocent)
    assert bench.steps() == [2]


# --- a bounded ring ---------------------------------------------------------


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path / "root", ring_bytes=2 * PAGE_BYTES)
    yield made
    made.close()


def image_bytes(slot: Slot, empty_bytes: int) -> int:
    return os.fstat(slot.fd).st_blocks * 512 - empty_bytes


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_larger_than_the_ring_goes_through_it(ring: Bench, kind: str) -> None:
    persister = ring.process() if kind == "process" else ring.thread()
    for step in (1, 2, 3):
        slot = ring.slot(step)
        empty_bytes = os.fstat(slot.fd).st_blocks * 512
        future = persister.begin(slot, step)
        ring.copy(slot, step)
        slot.state = SlotState.SEALED
        assert future.result(WAIT_S).step == step
        assert image_bytes(slot, empty_bytes) == 0
        ring.arena.free(slot)
        assert ring.read(step) == content(step)


def test_slots_together_never_hold_more_than_the_ring(ring: Bench) -> None:
    first, second = ring.slot(1), ring.slot(2)
    empty_bytes = os.fstat(first.fd).st_blocks * 512
    ring.copy(first, 1, stop=PAGE_BYTES)
    ring.copy(second, 2, stop=PAGE_BYTES)
    copying = threading.Thread(target=lambda: ring.copy(first, 1, PAGE_BYTES))
    copying.start()
    copying.join(0.1)  # nothing may happen: a wrong one would go on
    assert first.copied_bytes == PAGE_BYTES
    assert image_bytes(first, empty_bytes) == image_bytes(second, empty_bytes) == PAGE_BYTES
    persister = ring.thread()
    futures = [persister.begin(first, 1), persister.begin(second, 2)]
    copying.join(WAIT_S)
    assert not copying.is_alive(), "what was written made room"
    first.state = SlotState.SEALED
    ring.copy(second, 2, PAGE_BYTES)
    second.state = SlotState.SEALED
    assert [f.result(WAIT_S).step for f in futures] == [1, 2]
    for slot in (first, second):
        ring.arena.free(slot)
    assert [ring.read(step) for step in (1, 2)] == [content(1), content(2)]


def test_a_process_that_dies_loses_what_it_gave_back_of_and_nothing_else(ring: Bench) -> None:
    persister = ring.process()
    slot, queued = ring.slot(1), ring.slot(2)
    first, second = persister.begin(slot, 1), persister.begin(queued, 2)
    ring.copy(slot, 1, stop=2 * PAGE_BYTES)
    until(lambda: slot.is_torn, "a chunk of it is written")
    os.kill(persister.pid, signal.SIGKILL)
    with pytest.raises(DroppedCheckpoint, match="given memory of it back"):
        first.result(WAIT_S)
    with pytest.raises(GivenUp, match="failed before all of it was copied"):
        ring.copy(slot, 1, 2 * PAGE_BYTES)
    ring.arena.free(slot)
    ring.copy(queued, 2)
    queued.state = SlotState.SEALED
    assert second.result(WAIT_S).step == 2
    ring.arena.free(queued)
    assert ring.steps() == [2]
    assert not list(ring.root.glob("step-*1/*"))


def test_a_copy_that_waits_for_room_hears_that_the_store_failed(ring: Bench) -> None:
    persister = ring.process("op=write&name=*.pack&do=EIO")
    slot = ring.slot(1)
    future = persister.begin(slot, 1)
    with pytest.raises(GivenUp):
        ring.copy(slot, 1)
        ring.copy(slot, 1, SIZE, SIZE + 1)  # it may fail so late that all of it was copied
    with pytest.raises(StoreError, match="injected"):
        future.result(WAIT_S)
    ring.arena.free(slot)


def test_a_copy_that_waits_for_room_ends_when_there_is_no_more_time(ring: Bench) -> None:
    slot = ring.slot(1)
    ring.arena.give_up_after(0.0)
    with pytest.raises(GivenUp, match="became free in time"):
        ring.copy(slot, 1)
    assert slot.copied_bytes == 2 * PAGE_BYTES
    ring.arena.free(slot)


def test_what_gave_memory_back_is_not_written_again_but_may_be_committed(ring: Bench) -> None:
    slot = ring.slot(1)
    ring.copy(slot, 1, stop=PAGE_BYTES)
    slot.release(Extent(0, PAGE_BYTES))
    slot.state = SlotState.SEALED
    with pytest.raises(DroppedCheckpoint, match="given memory of it back"):
        persist(ring.repository, slot, Retention(), discard, lambda: False)
    ring.arena.free(slot)
    slot = ring.slot(2)
    future = ring.thread().begin(slot, 2)
    ring.copy(slot, 2)
    slot.state = SlotState.SEALED
    stored = future.result(WAIT_S)
    again = persist(ring.repository, slot, Retention(), discard, lambda: False)
    assert (again.step, again.stored_bytes) == (2, stored.stored_bytes)
    ring.arena.free(slot)


@pytest.mark.parametrize("spoilt", [0, SIZE - 1])
def test_a_canary_is_compared_before_its_memory_goes(ring: Bench, spoilt: int) -> None:
    slot = ring.slot(7, canary=b"\x07\x07")
    slot.canaries[spoilt > 0] ^= 1
    future = ring.thread().begin(slot, 7)
    ring.copy(slot, 7)
    slot.state = SlotState.SEALED
    with pytest.raises(DroppedCheckpoint, match="'w' changed while it was copied"):
        future.result(WAIT_S)
    ring.arena.free(slot)
    assert ring.steps() == []


# --- a process that dies ----------------------------------------------------


def test_a_process_that_dies_at_work_is_replaced_and_the_checkpoint_becomes_durable(
    bench: Bench,
) -> None:
    persister = bench.process()
    slot = bench.slot(1)
    future = persister.begin(slot, 1)
    bench.fill(slot, 1, PAGE_BYTES)
    temp = bench.root / ".tmp"
    until(lambda: temp.is_dir() and any(temp.iterdir()), "it is in the middle of the pack")
    first = persister.pid
    os.kill(first, signal.SIGKILL)
    bench.seal(slot, 1)
    assert future.result(WAIT_S).step == 1
    assert persister.pid != first
    assert slot.persister.pid == persister.pid
    assert bench.read(1) == content(1)
    bench.arena.free(slot)


def test_a_process_that_dies_idle_is_replaced_before_it_is_missed(bench: Bench) -> None:
    persister = bench.process()
    bench.save(persister, 1).result(WAIT_S)
    for step in (2, 3, 4, 5, 6):
        before = persister.pid
        os.kill(before, signal.SIGKILL)
        assert bench.save(persister, step).result(WAIT_S).step == step
        assert persister.pid != before
    assert bench.steps() == [1, 2, 3, 4, 5, 6]


def test_one_killed_after_its_commit_and_before_its_report_takes_nothing_back(
    bench: Bench,
) -> None:
    """The first listing after a commit is retention's: the checkpoint exists by then."""
    persister = bench.process("op=list&name=&do=kill&times=0")
    durable = bench.save(persister, 1).result(WAIT_S)
    assert durable.step == 1
    assert bench.read(1) == content(1)


@pytest.mark.parametrize(
    ("name", "when"),
    [("*.pack", "mid"), ("*-r0000.json", "before"), ("*-MANIFEST.json", "after")],
)
def test_one_stopped_anywhere_and_killed_there_is_replaced(
    bench: Bench, name: str, when: str
) -> None:
    persister = bench.process(f"op=write&name={name}&when={when}&do=stop")
    future = bench.save(persister, 1)
    first = persister.pid
    until(lambda: is_stopped(first), f"it stops {when} {name}")
    assert not future.done()
    os.kill(first, signal.SIGKILL)
    until(lambda: persister.pid != first and (future.done() or is_stopped(persister.pid)), "next")
    os.kill(persister.pid, signal.SIGCONT)
    assert future.result(WAIT_S).step == 1
    assert bench.read(1) == content(1)
    assert bench.steps() == [1]


def test_what_kills_each_process_is_given_up_and_the_next_checkpoint_is_not(bench: Bench) -> None:
    persister = bench.process("op=write&name=step-00000001/*&do=kill&times=0")
    first, second, third = (bench.save(persister, step) for step in (1, 2, 3))
    with pytest.raises(StoreError, match=r"step 1: the persister process failed 3 times.*-9"):
        first.result(WAIT_S)
    assert second.result(WAIT_S).step == 2
    assert third.result(WAIT_S).step == 3
    assert bench.steps() == [2, 3]


def test_a_death_is_seen_though_a_fork_holds_the_other_end_of_the_socket(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A data loader forks its workers at the very moment when a process is started."""
    held: list[int] = []
    make = socket.socketpair

    def pair(*kind: int) -> tuple[socket.socket, socket.socket]:
        ours, theirs = make(*kind)
        held.append(os.dup(theirs.fileno()))
        return ours, theirs

    monkeypatch.setattr(socket, "socketpair", pair)
    persister = bench.process()
    first = persister.pid
    os.kill(first, signal.SIGKILL)
    assert bench.save(persister, 1).result(WAIT_S).step == 1
    assert persister.pid != first
    for fd in held:
        os.close(fd)


def test_descriptors_over_a_thousand_are_no_limit(
    bench: Bench, not_run_here: Callable[[str], None]
) -> None:
    """``select`` knows 1024 descriptors; a trainer with many workers has more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1300:
        not_run_here("fewer than 1300 descriptors are allowed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1300), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        persister = bench.process()
        assert bench.save(persister, 1).result(WAIT_S).step == 1
        os.kill(persister.pid, signal.SIGKILL)
        assert bench.save(persister, 2).result(WAIT_S).step == 2
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_sigterm_finishes_what_is_sealed_and_sigint_is_not_for_it(bench: Bench) -> None:
    persister = bench.process("op=write&name=*.pack&do=stop&times=1")
    futures = [bench.save(persister, step) for step in (1, 2)]
    first = persister.pid
    until(lambda: is_stopped(first), "it is at work")
    os.kill(first, signal.SIGINT)
    os.kill(first, signal.SIGTERM)
    os.kill(first, signal.SIGCONT)
    assert [f.result(WAIT_S).step for f in futures] == [1, 2]
    until(lambda: persister.pid != first, "it ended, and another took its place")
    until(lambda: not is_stopped(persister.pid), "the new one starts")
    future = bench.save(persister, 3)
    second = persister.pid
    until(lambda: is_stopped(second), "the new one stops at its first pack")
    os.kill(second, signal.SIGCONT)
    assert future.result(WAIT_S).step == 3


# --- a process that cannot start --------------------------------------------


@pytest.fixture
def broken_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An interpreter that says why it cannot start, and counts how often it was asked to."""
    count = tmp_path / "starts"
    script = tmp_path / "python"
    script.write_text(
        f"#!/bin/sh\necho x >> {count}\necho 'no module named asymcheck here' >&2\nexit 3\n"
    )
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    return count


def _starts(count: Path) -> int:
    return len(count.read_text().split()) if count.exists() else 0


@pytest.mark.parametrize("has_path", [False, True])
def test_a_process_that_cannot_start_is_named_with_its_log(
    bench: Bench, broken_python: Path, tmp_path: Path, has_path: bool
) -> None:
    log = tmp_path / "persist.log"
    log.write_text("what an earlier run had to say\n")
    persister = bench.process(log_path=log if has_path else None)
    with pytest.raises(StoreError) as told:
        bench.save(persister, 1).result(WAIT_S)
    message = str(told.value)
    assert "step 1: the persister process failed 3 times, it last ended with 3" in message
    assert "no module named asymcheck here" in message
    assert "earlier run" not in message
    assert (str(log) in message) == has_path


def test_one_that_cannot_start_is_not_started_for_ever(bench: Bench, broken_python: Path) -> None:
    persister = bench.process()
    until(lambda: _starts(broken_python) >= 3, "it is tried three times")
    until(lambda: not persister._is_up, "and then no more")
    sleep(0.3)  # nothing may happen: a wrong one would start some thirty more
    assert _starts(broken_python) == 3


def test_once_the_fault_is_gone_the_next_checkpoint_works(
    bench: Bench, broken_python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    persister = bench.process()
    with pytest.raises(StoreError):
        bench.save(persister, 1).result(WAIT_S)
    monkeypatch.undo()
    assert bench.save(persister, 2).result(WAIT_S).step == 2


def test_an_interpreter_that_is_not_there_is_one_clear_error(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(StoreError, match=r"could not be started: .*/nowhere/python.*thread"):
        bench.process()


def test_a_replacement_that_the_system_refuses_fails_the_save_and_hangs_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    persister = bench.process()
    bench.save(persister, 1).result(WAIT_S)

    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(persister_module, "_PAUSE_S", 0.01)
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", refuse)
        os.kill(persister.pid, signal.SIGKILL)
        with pytest.raises(StoreError, match=r"could not be started: .*temporarily unavailable"):
            bench.save(persister, 2).result(WAIT_S)
    assert bench.save(persister, 3).result(WAIT_S).step == 3


# --- what the watcher does --------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_sink_that_raises_stops_nothing_and_takes_no_checkpoint_back(
    bench: Bench, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(span: Span) -> None:
        raise ValueError(f"no place for {span.stage}")

    persister = start(bench, kind, guarded(broken))
    for step in (1, 2):
        assert bench.save(persister, step).result(WAIT_S).step == step
    assert bench.steps() == [1, 2]
    assert "no place for commit" in caplog.text


def test_the_sink_that_keeps_nothing_needs_no_guard() -> None:
    assert guarded(discard) is discard


# --- the end ----------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_closing_waits_for_what_is_under_way(bench: Bench, kind: str) -> None:
    persister = start(bench, kind)
    futures = [bench.save(persister, step) for step in (1, 2, 3)]
    assert persister.close(WAIT_S)
    assert [f.result(0).step for f in futures] == [1, 2, 3]
    assert persister.close(WAIT_S), "closing again does nothing"


def test_closing_does_not_wait_longer_than_it_may_and_the_work_goes_on(bench: Bench) -> None:
    persister = bench.process("op=write&name=*.pack&do=stop")
    future = bench.save(persister, 1)
    until(lambda: is_stopped(persister.pid), "it is at work")
    assert not persister.close(0.05)
    os.kill(persister.pid, signal.SIGCONT)
    assert future.result(WAIT_S).step == 1
    assert persister.close(WAIT_S)


def test_a_process_that_dies_while_it_is_closing_is_replaced_for_what_is_left(
    bench: Bench,
) -> None:
    persister = bench.process("op=write&name=*.pack&do=stop")
    future = bench.save(persister, 1)
    first = persister.pid
    until(lambda: is_stopped(first), "it is at work")
    assert not persister.close(0.0)
    os.kill(first, signal.SIGKILL)
    until(lambda: persister.pid != first and is_stopped(persister.pid), "another one is at it")
    os.kill(persister.pid, signal.SIGCONT)
    assert future.result(WAIT_S).step == 1
    assert persister.close(WAIT_S)


def test_nothing_is_left_of_a_closed_persister(bench: Bench) -> None:
    def fds() -> int:
        return len(os.listdir("/proc/self/fd"))

    before, threads = fds(), threading.active_count()
    for _ in range(5):
        persister = bench.process()
        pid = persister.pid
        assert persister.close(WAIT_S)
        assert not ProcessId.of(pid).is_alive
        assert ProcessId.of(pid).start == 0
    assert threading.active_count() == threads
    assert fds() == before


# --- what it is made of -----------------------------------------------------


def test_the_process_has_no_torch_and_its_own_session_and_is_nice(bench: Bench) -> None:
    persister = bench.process()
    bench.save(persister, 1).result(WAIT_S)
    maps = Path(f"/proc/{persister.pid}/maps").read_text()
    assert "asymcheck-" in maps, "it maps the slot"
    assert "libtorch" not in maps
    assert "numpy" not in maps
    assert os.getsid(persister.pid) == persister.pid
    assert os.getpriority(os.PRIO_PROCESS, persister.pid) >= 5
    assert os.readlink(f"/proc/{persister.pid}/cwd") == "/"


def test_the_process_holds_no_slot_that_the_trainer_gave_away(bench: Bench) -> None:
    persister = bench.process()
    bench.save(persister, 1).result(WAIT_S)
    old = bench.arena.reserve(100, 100)
    assert old is not None
    bench.arena.free(old)
    larger = bench.arena.reserve(16 << 20, 100)  # the old one is removed for it
    assert larger is not None
    bench.arena.free(larger)
    bench.save(persister, 2).result(WAIT_S)
    names = Path(f"/proc/{persister.pid}/maps").read_text()
    assert "asymcheck-" in names
    assert "(deleted)" not in names


@pytest.mark.parametrize(
    "error",
    [
        DroppedCheckpoint(3, "m/weight", "it changed"),
        StoreError("disk full", retryable=True),
        StoreError("disk gone", retryable=False),
        SupersededWriter("another job"),
    ],
)
def test_an_error_is_the_same_on_the_other_side(error: CheckpointError) -> None:
    rebuilt = rebuild_error(json.loads(json.dumps(describe_error(error))))
    assert type(rebuilt) is type(error)
    assert str(rebuilt) == str(error)
    assert vars(rebuilt) == vars(error)


@pytest.mark.parametrize("error", [ObjectNotFound("gone"), CorruptCheckpoint("slot", "torn")])
def test_any_other_error_arrives_too(error: CheckpointError) -> None:
    rebuilt = rebuild_error(describe_error(error))
    assert isinstance(rebuilt, CheckpointError)
    assert str(error) in str(rebuilt)


def test_no_message_is_too_long_for_the_socket() -> None:
    long = "\N{SNOWMAN}" * 100_000
    told = describe_error(DroppedCheckpoint(1, long, long))
    assert len(json.dumps({"failed": told})) < 1 << 16


def test_a_failure_with_a_long_text_arrives(bench: Bench) -> None:
    persister = bench.process(url=f"faulty+file://{bench.root}?op=free_bytes&do=EIO&times=0")
    with pytest.raises(StoreError, match="injected"):
        bench.save(persister, 1).result(WAIT_S)


def test_the_process_runs_this_very_package_and_shadows_no_module_with_what_lies_beside_it(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of packages may hold an old backport of a standard module."""
    source = Path(persister_module.__file__).parents[1]
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "asymcheck").symlink_to(source / "asymcheck")
    (packages / "socket.py").write_text("raise ImportError('a backport of long ago')\n")
    monkeypatch.setattr(persister_module, "__file__", str(packages / "asymcheck" / "persister.py"))
    persister = bench.process()
    assert bench.save(persister, 1).result(WAIT_S).step == 1
