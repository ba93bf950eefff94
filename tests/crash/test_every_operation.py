"""For every n: fail the n-th store operation, cut the power at the n-th system call, kill the
process at the n-th operation. Afterwards the newest committed checkpoint loads and is bit for
bit what was saved, nothing half-written is listed, the next save works, nothing is left over.

One life of a training is run again and again: saves, retention, a step saved again, a rewind,
a restart over a half-saved step. Each state says which save it belongs to.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from asymcheck import Checkpointer, handover
from asymcheck.decoding import verify
from asymcheck.errors import CheckpointError, NoCheckpoint
from asymcheck.planning.retention import CheckpointId
from asymcheck.recovery import CheckpointWarning
from asymcheck.storage.local import TEMP_FOLDER, Files, LocalStore
from asymcheck.storage.memory import MemoryStore
from asymcheck.storage.names import index_name, pack_name
from asymcheck.storage.repository import open_repository
from asymcheck.storage.store import Store
from asymcheck.testing.children import Child, Say
from asymcheck.testing.faulty import Fault, FaultyStore
from asymcheck.testing.powercut import PowerCut, PowerCutStore

pytestmark = pytest.mark.crash

N_PARTS = 4
PARTS = pytest.mark.parametrize("part", range(N_PARTS))

CHANGING = {"write", "create", "delete", "sweep", "prepare"}


@pytest.fixture(autouse=True)
def no_search_for_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who writes here is a thread; to look through all processes of a machine would take
    longer than what is tested.
    """
    monkeypatch.setattr(handover, "persisters_of", lambda run: [])


class NoSync(Files):
    """A process may die, the machine does not: syncing would only take time."""

    def fsync(self, fd: int) -> None:
        pass

    def fsync_dir(self, path: Path) -> None:
        pass


def content(serial: int) -> torch.Tensor:
    return torch.arange(1, 65, dtype=torch.float64) / (serial + 1)


class Life:
    """One training over one store.

    Args:
        store: Where it saves.
        say: Hears ``["saving", serial, step]`` and ``["durable", serial]``.
        calm: Whether an error is survived and the call made once more.
    """

    def __init__(self, store: Store, say: Say, *, calm: bool = False) -> None:
        self.store = store
        self.say = say
        self.calm = calm
        self.errors: list[CheckpointError] = []
        self.again = False
        self.rewound = False
        self.tensor = torch.zeros(64, dtype=torch.float64)
        self.more: dict[str, int] = {"serial": -1, "step": 0}
        self.serial = -1
        self.ckpt: Checkpointer

    def call(self, action: Callable[[], int | Checkpointer]):
        try:
            return action()
        except CheckpointError as failure:
            if not self.calm:
                raise
            self.errors.append(failure)
            return action()

    def start(self) -> int:
        self.ckpt = self.call(
            lambda: Checkpointer(
                self.store, state={"model": self.tensor, "more": self.more}, keep_last=2
            )
        )
        return self.call(self.ckpt.restore)

    def save(self, step: int) -> None:
        def once() -> None:
            self.serial += 1
            self.tensor.copy_(content(self.serial))
            self.more.update(serial=self.serial, step=step)
            self.say(["saving", self.serial, step])
            self.ckpt.save(step)
            self.ckpt.wait(30)
            self.say(["durable", self.serial])

        before = len(self.errors)
        try:
            once()
        except CheckpointError as failure:
            if not self.calm:
                raise
            self.errors.append(failure)
        if len(self.errors) > before and self.again:
            once()  # the error was raised once, and the same Checkpointer goes on

    def rewind(self, step: int) -> None:
        assert self.call(lambda: self.ckpt.restore(step=step)) == step


def first_life(life: Life, raw: Store) -> None:
    life.start()
    for step in (1, 2, 3):
        life.save(step)
    life.save(3)  # once more, changed since
    life.save(4)
    before, left_behind = open_repository(raw).lineage()[-2:]
    life.rewind(before.step)
    life.save(5)
    found = open_repository(raw).lineage()
    if found[-1].step == 5:  # not so where that save failed and was not made again
        assert before in found
        assert left_behind not in found
    life.ckpt.close()


def second_life(life: Life) -> None:
    assert life.start() > 0
    life.save(6)
    life.save(7)
    life.ckpt.close()


def whole_life(
    store: Store,
    raw: Store,
    say: Say,
    *,
    calm: bool = False,
    again: bool = False,
    watch: Callable[[Life], None] = lambda life: None,
) -> list[CheckpointError]:
    """Two starts of one training, over ``store``; returns the errors that were survived.

    Args:
        store: Where it saves.
        raw: The same, without faults.
        say: See ``Life``.
        calm: See ``Life``.
        again: Whether a failed save is made once more.
        watch: Gets each start.
    """
    first = Life(store, say, calm=calm)
    first.again = again
    watch(first)
    first_life(first, raw)
    leave_a_half_saved_step(raw)
    second = Life(store, say, calm=calm)
    second.again, second.serial, second.errors = again, first.serial, first.errors
    watch(second)
    second_life(second)
    return second.errors


def leave_a_half_saved_step(raw: Store) -> None:
    """What a writer that was killed in the middle of a save leaves."""
    newest = open_repository(raw).lineage()[-1]
    half = CheckpointId(newest.attempt, newest.step + 1)
    raw.write(pack_name(half, 0, 1), [b"half a pack"])
    raw.write(index_name(half, 0), [b"half an index"])


class Log(list):
    """What a life said; knows what may be found after its end."""

    def said(self, value: list) -> None:
        self.append(value)

    def steps(self) -> dict[int, int]:
        return {serial: step for what, serial, *rest in self for step in rest}

    def durable(self) -> int:
        return max((entry[1] for entry in self if entry[0] == "durable"), default=-1)

    def acceptable(self) -> set[int]:
        """The newest durable one, or one that was under way after it."""
        return {s for s in self.steps() if s > self.durable()} | {self.durable()}


def check_what_is_there(raw: Store, log: Log) -> Life:
    """Load the newest, compare it, save once more, start once more; nothing is left over."""
    assert_nothing_half_written(raw)
    after = Log()
    life = Life(raw, after.said)
    step = life.start()
    found = life.more["serial"]
    assert found in log.acceptable(), f"found save {found}, expected one of {log.acceptable()}"
    if found >= 0:
        assert step == life.more["step"] == log.steps()[found]
        assert torch.equal(life.tensor, content(found))
    life.ckpt.wait()  # what was read in shared memory is durable, and the root is claimed
    assert_nothing_left_over(raw)

    life.serial = 100
    life.save(step + 1)
    life.ckpt.close()
    assert_nothing_half_written(raw)
    assert_nothing_left_over(raw)

    again = Life(raw, after.said)
    assert again.start() == step + 1
    assert torch.equal(again.tensor, content(101))
    again.ckpt.close()
    assert_nothing_left_over(raw)
    return again


def assert_nothing_half_written(raw: Store) -> None:
    try:
        repository = open_repository(raw)
    except NoCheckpoint:
        return
    listing = repository.survey()
    assert not listing.damaged
    assert not listing.foreign
    for at in listing.committed:
        assert list(verify(repository, at)) == []


def assert_nothing_left_over(raw: Store) -> None:
    assert not open_repository(raw).survey().leftovers
    if isinstance(raw, LocalStore):
        assert not list((raw.root / TEMP_FOLDER).glob("*"))


def operations_of_a_life(raw: Store) -> list[tuple[str, str]]:
    store = FaultyStore(raw)
    log = Log()
    whole_life(store, raw, log.said)
    assert log.durable() == 8 - 1
    assert [c.step for c in open_repository(raw).lineage()] == [6, 7]
    return store.operations


def faults(n: int, op: str) -> list[Fault]:
    found = [Fault(at=n, do="EIO")]
    if op in ("write", "create", "open", "read"):  # one that may work at another try
        found.append(Fault(at=n, do="ENOSPC"))
    if op in CHANGING:
        found.append(Fault(at=n, do="EIO", when="after"))
    if op == "write":
        found += [Fault(at=n, do="short"), Fault(at=n, do="ENOSPC", when="mid")]
    return found


@PARTS
@pytest.mark.parametrize("again", [True, False], ids=["again", "onward"])
def test_an_error_at_any_operation_is_raised_once_and_the_next_save_works(
    again: bool, part: int
) -> None:
    operations = operations_of_a_life(MemoryStore())
    assert {"write", "create", "open", "read", "list", "delete", "sweep", "free_bytes"} <= {
        op for op, _ in operations
    }
    for n, (op, name) in list(enumerate(operations, 1))[part::N_PARTS]:
        if not again and op not in ("write", "create", "list", "free_bytes"):
            continue  # no save fails: there is none to make again
        for fault in faults(n, op) if again else faults(n, op)[:1]:
            raw, log = MemoryStore(), Log()
            with warnings.catch_warnings():
                # A restore that meets the fault falls back to the step before, and says so.
                warnings.simplefilter("ignore", CheckpointWarning)
                errors = whole_life(FaultyStore(raw, fault), raw, log.said, calm=True, again=again)
            where = f"operation {n}: {op} {name} {fault}"
            assert len(errors) <= 1, where
            if op in ("write", "create"):
                assert len(errors) == 1, where
            if again or not errors:
                assert log.durable() == max(log.steps()), where
            newest = open_repository(raw).lineage()[-1]
            assert newest.step == log.steps()[log.durable()], where
            check_what_is_there(raw, log)


def test_an_error_in_the_middle_of_a_write_leaves_no_temporary_file(quick_path: Path) -> None:
    for n in range(1, 25):
        for do in ("ENOSPC", "short"):
            raw, log = LocalStore(quick_path / f"{n}-{do}", NoSync()), Log()
            fault = Fault(at=n, op="write", when="mid", do=do)
            errors = whole_life(FaultyStore(raw, fault), raw, log.said, calm=True, again=True)
            assert len(errors) == 1
            assert_nothing_left_over(raw)
            check_what_is_there(raw, log)


# --- power ------------------------------------------------------------------

# The power may fail while close() removes what retention condemned: nobody is left to hear of it.
IN_A_THREAD = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


def live_until_the_power_is_cut(store: PowerCutStore, log: Log) -> None:
    """The power fails once: everything after that is an error, and nothing changes any more."""
    life: list[Life] = []
    try:
        whole_life(store, store, log.said, watch=life.append)
    except (PowerCut, CheckpointError):
        assert store.files.is_off  # the cut itself, or what a later call made of it
    finally:
        for each in life:
            end_quietly(each)


def end_quietly(life: Life) -> None:
    """End the thread of a Checkpointer whose machine is gone."""
    if hasattr(life, "ckpt"):
        with suppress(CheckpointError, PowerCut):
            life.ckpt.close()


@PARTS
@IN_A_THREAD
def test_a_power_cut_at_any_system_call_loses_nothing_that_was_durable(
    quick_path: Path, part: int
) -> None:
    counted, log = PowerCutStore(quick_path / "0" / "root"), Log()
    whole_life(counted, counted, log.said)
    calls = len(counted.files.operations)
    assert {"open_new", "write", "fsync", "close", "rename", "link"} | {
        "unlink",
        "mkdir",
        "rmdir",
        "fsync_dir",
    } == {call for call, _ in counted.files.operations}
    for n in range(1 + part, calls + 2, N_PARTS):
        store, log = PowerCutStore(quick_path / f"{n}" / "root", cut_at=n), Log()
        live_until_the_power_is_cut(store, log)
        assert store.files.is_off == (n <= calls)
        for mode in ("lost", "names"):
            after = quick_path / f"{n}" / mode
            store.files.after_power_cut(after, mode, seed=n)
            try:
                check_what_is_there(LocalStore(after, NoSync()), log)
            except (AssertionError, CheckpointError) as failure:
                failure.add_note(f"call {n} {store.files.operations[-1]}, {mode}")
                raise
        shutil.rmtree(quick_path / f"{n}")


@PARTS
@IN_A_THREAD
def test_a_process_that_ends_at_any_system_call_leaves_a_root_that_a_later_cut_spares(
    quick_path: Path, part: int
) -> None:
    """What the dead process had not synced must not be taken for durable by the next one."""
    counted, log = PowerCutStore(quick_path / "0" / "root"), Log()
    whole_life(counted, counted, log.said)
    for n in range(1 + part, len(counted.files.operations) + 1, N_PARTS):
        store, log = PowerCutStore(quick_path / f"{n}" / "root", cut_at=n), Log()
        live_until_the_power_is_cut(store, log)
        store.files.restart_process()
        # A new process knows nothing of what the old one had synced.
        next_process = LocalStore(store.root, store.files)
        last = check_what_is_there(next_process, log)
        for mode in ("lost", "mixed"):
            after = quick_path / f"{n}" / mode
            store.files.after_power_cut(after, mode, seed=n)
            raw = LocalStore(after, NoSync())
            assert_nothing_half_written(raw)
            life = Life(raw, log.said)
            assert life.start() == last.more["step"]
            assert torch.equal(life.tensor, last.tensor)
        shutil.rmtree(quick_path / f"{n}")


# --- SIGKILL ----------------------------------------------------------------


def moments(operations: list[tuple[str, str]]) -> Iterator[Fault]:
    """Before and after each operation that changes something, in the middle of each write.

    Between two of them nothing changes: to be killed at a read is to be killed after the change
    before it.
    """
    for n, (op, _) in enumerate(operations, 1):
        if op in CHANGING:
            yield Fault(at=n, do="kill", when="after")
        if op == "write":
            yield Fault(at=n, do="kill", when="mid")
    yield Fault(at=1, do="kill")


def test_a_process_killed_at_any_operation_loses_nothing_that_was_durable(
    quick_path: Path,
) -> None:
    torch.set_num_threads(1)  # a fork does not inherit a thread pool
    for i, fault in enumerate(moments(operations_of_a_life(MemoryStore()))):
        raw, log = LocalStore(quick_path / f"{i}", NoSync()), Log()

        def live(say: Say, raw: Store = raw, fault: Fault = fault) -> None:
            whole_life(FaultyStore(raw, fault), raw, say)

        outcome = Child(live).wait()
        assert outcome.was_killed, outcome
        log.extend(outcome.said)
        try:
            check_what_is_there(raw, log)
        except (AssertionError, CheckpointError) as failure:
            failure.add_note(str(fault))
            raise
        shutil.rmtree(raw.root)
