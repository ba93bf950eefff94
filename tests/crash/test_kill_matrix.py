"""Trainer, persister or both are killed at each named point, and the job is started again.

The promise: what was sealed becomes durable, by the persister that lives on or by the next
start; what was not is gone without a trace; what was committed stays. The next start finds no
process, no slot, and no half-written object left.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # before any fork: each child would load it anew
from torch import nn

import asymcheck
from asymcheck import Checkpointer, endings, snapshotter
from asymcheck.decoding import verify
from asymcheck.memory.arena import SHARED_MEMORY, Slot, slots_of
from asymcheck.memory.process import ProcessId
from asymcheck.snapshotter import Snapshotter
from asymcheck.storage.repository import create_repository
from asymcheck.storage.store import open_store
from asymcheck.testing.children import Child, Say

pytestmark = pytest.mark.crash

WAIT_S = 60.0
SIDE = 150
SOURCE = str(Path(asymcheck.__file__).parents[1])


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, f"timed out: {what}"
        time.sleep(0.002)


def is_stopped(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] == "T"


# --- a job ------------------------------------------------------------------


class Job:
    """A small training whose state depends on the step alone."""

    def __init__(self, url: str, **options: Any) -> None:
        torch.manual_seed(5)
        self.model = nn.Sequential(*(nn.Linear(SIDE, SIDE) for _ in range(3)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.checkpointer = Checkpointer(
            url, state={"m": self.model, "o": self.optimizer}, **options
        )
        self.step = self.checkpointer.restore()

    @property
    def persister(self) -> Any:
        return self.checkpointer._snapshotter._persister  # type: ignore[union-attr]

    @property
    def copier(self) -> Any:
        return self.checkpointer._snapshotter.copier  # type: ignore[union-attr]

    def update(self) -> None:
        self.step += 1
        torch.manual_seed(self.step)
        for param in self.model.parameters():
            param.grad = torch.randn_like(param)
        self.optimizer.step()

    def digest(self) -> str:
        state = [t for p in self.model.parameters() for t in self.optimizer.state[p].values()]
        live = [*self.model.state_dict().values(), *state]
        return sha256(b"".join(t.detach().numpy().tobytes() for t in live)).hexdigest()


def train(say: Say, url: str, go: Path, stop: Callable[[Job, Callable[[], None]], None]) -> None:
    """Save step 1, and step 2 with a stop at the named point; go on when told to."""

    def pause() -> None:
        say("there")
        until(go.exists, "the test lets it go on")

    job = Job(url)
    job.update()
    say([job.step, job.digest()])
    job.checkpointer.save(1).durable.result(WAIT_S)
    job.update()
    say([job.step, job.digest()])
    say(job.persister.pid)
    stop(job, pause)
    try:
        job.checkpointer.save(2)
        job.update()
        pause()
    except KeyboardInterrupt:
        endings.close_all()  # what the end of the interpreter calls
    job.checkpointer.close()


def _restart(say: Say, root: Path, grace_s: float) -> None:
    job = Job(str(root), grace_s=grace_s)
    say([job.step, job.digest() if job.step else ""])
    say(list(map(str, job.checkpointer.report.skipped)))
    job.checkpointer._grace_s = WAIT_S  # it was for the persister of the dead one
    job.update()
    job.checkpointer.save(job.step)
    job.checkpointer.close()
    say(job.checkpointer.steps())


class Matrix:
    """Runs one job, kills it, starts the next one and looks at what there is."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "root"
        self.go = folder / "go"
        self.digests: dict[int, str] = {}
        self.persisters: list[int] = []
        self.run = create_repository(open_store(str(self.root))).run

    def start(self, stop: Callable[[Job, Callable[[], None]], None], fault: str = "") -> Child:
        url = f"faulty+file://{self.root}?{fault}" if fault else str(self.root)
        child = Child(lambda say: train(say, url, self.go, stop))
        for _ in range(2):
            step, digest = child.hear()
            self.digests[step] = digest
        self.persisters.append(child.hear())
        return child

    @property
    def persister(self) -> int:
        """The one that persists now."""
        for path in slots_of(SHARED_MEMORY, self.run):
            slot = Slot.open(path)
            pid = slot.persister.pid
            slot.close(unlink=False)
            if pid and pid not in self.persisters:
                self.persisters.append(pid)
        return self.persisters[-1]

    def next_start(self, newest: int, grace_s: float = WAIT_S) -> None:
        """Start the job again: it loads ``newest``, bit for bit, and trains on."""
        said = Child(lambda say: _restart(say, self.root, grace_s)).wait().check()
        (step, digest), skipped, steps = said
        assert step == newest
        assert digest == self.digests[newest]
        assert skipped == []
        assert steps == [*range(1, newest + 1), newest + 1]
        repository = create_repository(open_store(str(self.root)))
        listing = repository.survey()
        assert not listing.damaged
        assert not listing.leftovers
        assert not [d for at in listing.committed for d in verify(repository, at)]
        assert list(self.root.glob(".tmp/*")) == []
        assert list(slots_of(SHARED_MEMORY, self.run)) == []
        for pid in self.persisters:
            until(lambda pid=pid: ProcessId.of(pid).start == 0, "no persister is left")


@pytest.fixture
def matrix(tmp_path: Path) -> Iterator[Matrix]:
    made = Matrix(tmp_path)
    yield made
    for pid in made.persisters:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for path in slots_of(SHARED_MEMORY, made.run):
        path.unlink()


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def matrix_of(
    points: Iterable[str], victims: Iterable[str], few: Mapping[str, Sequence[str]]
) -> list[Any]:
    """Every victim at every point; of those in ``few`` all but these points are slow."""
    return [
        pytest.param(
            victim, point, marks=[] if point in few.get(victim, [point]) else [pytest.mark.slow]
        )
        for victim in victims
        for point in points
    ]


# --- killed while the trainer is at a point of its own ----------------------


def _in_eager(job: Job, pause: Callable[[], None]) -> None:
    copy_eager = snapshotter.copy_eager

    def stopping(*arguments: Any, **options: Any) -> None:
        copy_eager(*arguments, **options)
        pause()

    snapshotter.copy_eager = stopping


def _before_piece(number: int) -> Callable[[Job, Callable[[], None]], None]:
    def stop(job: Job, pause: Callable[[], None]) -> None:
        seen = 0

        def between() -> None:
            nonlocal seen
            seen += 1
            if seen == number:
                pause()

        job.copier.between = between

    return stop


def _at_the_seal(*, after: bool) -> Callable[[Job, Callable[[], None]], None]:
    def stop(job: Job, pause: Callable[[], None]) -> None:
        conclude = Snapshotter._conclude

        def stopping(self: Snapshotter, active: Any) -> None:
            if not after:
                pause()
            conclude(self, active)
            if after:
                pause()

        Snapshotter._conclude = stopping  # type: ignore[method-assign]

    return stop


def _nowhere(job: Job, pause: Callable[[], None]) -> None:
    pass


# Three weights and three momentum buffers are large: six pieces.
TRAINER_POINTS = {
    "eager": (_in_eager, 1),
    "first piece": (_before_piece(1), 1),
    "last piece": (_before_piece(6), 1),
    "before the seal": (_at_the_seal(after=False), 1),
    "after the seal": (_at_the_seal(after=True), 2),
    "after the update": (_nowhere, 2),
}


@pytest.mark.parametrize(
    ("victim", "point"),
    matrix_of(
        TRAINER_POINTS,
        ["trainer", "trainer by SIGTERM", "both"],
        # Nobody handles it: it ends the process as SIGKILL does.
        few={"trainer by SIGTERM": ["first piece", "after the update"]},
    ),
)
def test_a_trainer_killed_at_any_point_loses_only_what_was_not_sealed(
    matrix: Matrix, point: str, victim: str
) -> None:
    stop, newest = TRAINER_POINTS[point]
    child = matrix.start(stop)
    assert child.hear() == "there"
    persister = matrix.persister
    number = signal.SIGTERM if "SIGTERM" in victim else signal.SIGKILL
    os.kill(child.pid, number)
    if victim == "both":
        kill(persister)
    matrix.next_start(newest)
    assert child.wait().status == -number


@pytest.mark.parametrize("point", TRAINER_POINTS)
def test_ctrl_c_at_any_point_of_the_trainer_loses_nothing_that_was_taken(
    matrix: Matrix, point: str
) -> None:
    child = matrix.start(TRAINER_POINTS[point][0])
    assert child.hear() == "there"
    os.kill(child.pid, signal.SIGINT)
    matrix.go.touch()  # the copying thread goes on
    assert child.wait().status == 0
    assert list(slots_of(SHARED_MEMORY, matrix.run)) == []
    # In the middle of the eager copy there was nothing yet that could be saved.
    matrix.next_start(1 if point == "eager" else 2)


@pytest.mark.parametrize("point", TRAINER_POINTS)
def test_a_persister_killed_at_any_point_of_its_trainer_is_replaced(
    matrix: Matrix, point: str
) -> None:
    child = matrix.start(TRAINER_POINTS[point][0])
    assert child.hear() == "there"
    kill(matrix.persister)
    matrix.go.touch()
    assert child.wait().status == 0
    assert list(slots_of(SHARED_MEMORY, matrix.run)) == []
    matrix.next_start(2)


# --- killed while the persister is at a point of its own --------------------

PERSISTER_POINTS = {
    "flush, before": "op=write&name=step-00000002*.pack&when=before",
    "flush, mid pack": "op=write&name=step-00000002*.pack&when=mid",
    "flush, after": "op=write&name=step-00000002*.pack&when=after",
    "index, before": "op=write&name=step-00000002*-r0000.json&when=before",
    "index, after": "op=write&name=step-00000002*-r0000.json&when=after",
    "manifest, before": "op=write&name=step-00000002*-MANIFEST.json&when=before",
    "manifest, mid": "op=write&name=step-00000002*-MANIFEST.json&when=mid",
    "manifest, after": "op=write&name=step-00000002*-MANIFEST.json&when=after",
}


@pytest.mark.parametrize(
    ("victim", "point"),
    matrix_of(
        PERSISTER_POINTS,
        ["trainer", "persister", "both"],
        # It goes on from wherever it was stopped.
        few={"trainer": ["flush, mid pack", "index, after", "manifest, before"]},
    ),
)
def test_what_is_sealed_survives_a_kill_at_any_point_of_the_persister(
    matrix: Matrix, point: str, victim: str
) -> None:
    child = matrix.start(_nowhere, f"{PERSISTER_POINTS[point]}&do=stop")
    assert child.hear() == "there"
    first = matrix.persister
    until(lambda: is_stopped(first), f"the persister stops at {point}")
    if victim == "both":
        child.kill()
        kill(first)
    elif victim == "trainer":
        child.kill()
        os.kill(first, signal.SIGCONT)  # it lives on, and finishes
    else:
        kill(first)
        # Where step 2 was committed already, its successor has nothing to write any more.
        until(
            lambda: (
                matrix.persister != first
                and (is_stopped(matrix.persister) or point == "manifest, after")
            ),
            "its successor takes over",
        )
        os.kill(matrix.persister, signal.SIGCONT)
        matrix.go.touch()
        assert child.wait().status == 0
    matrix.next_start(2)
    if victim != "persister":
        assert child.wait().was_killed


@pytest.mark.parametrize("point", ["flush, mid pack", "index, after", "manifest, before"])
def test_ctrl_c_while_the_persister_is_at_any_point_waits_for_it(
    matrix: Matrix, point: str
) -> None:
    child = matrix.start(_nowhere, f"{PERSISTER_POINTS[point]}&do=stop")
    assert child.hear() == "there"
    persister = matrix.persister
    until(lambda: is_stopped(persister), f"the persister stops at {point}")
    os.kill(persister, signal.SIGINT)  # not for it
    os.kill(child.pid, signal.SIGINT)
    os.kill(persister, signal.SIGCONT)
    assert child.wait().status == 0
    assert ProcessId.of(persister).start == 0
    matrix.next_start(2)


@pytest.mark.parametrize("point", ["flush, mid pack", "manifest, after"])
def test_a_persister_that_hangs_after_its_trainer_was_killed_is_ended_by_the_next_start(
    matrix: Matrix, point: str
) -> None:
    child = matrix.start(_nowhere, f"{PERSISTER_POINTS[point]}&do=stop")
    assert child.hear() == "there"
    until(lambda: is_stopped(matrix.persister), f"the persister stops at {point}")
    child.kill()
    matrix.next_start(2, grace_s=0.1)
    assert child.wait().was_killed


def test_a_persister_whose_trainer_was_killed_needs_no_next_start(matrix: Matrix) -> None:
    child = matrix.start(_nowhere, f"{PERSISTER_POINTS['flush, mid pack']}&do=stop")
    assert child.hear() == "there"
    persister = matrix.persister
    until(lambda: is_stopped(persister), "the persister is at work")
    child.kill()
    assert child.wait().was_killed
    os.kill(persister, signal.SIGCONT)
    until(lambda: ProcessId.of(persister).start == 0, "it finishes and ends by itself")
    repository = create_repository(open_store(str(matrix.root)))
    assert [at.step for at in repository.lineage()] == [1, 2]
    assert list(slots_of(SHARED_MEMORY, matrix.run)) == []
    matrix.next_start(2)


def test_a_trainer_that_dies_with_reports_unread_takes_no_persister_with_it(
    matrix: Matrix,
) -> None:
    """Of a ring nobody else can write what is sealed: its memory was given back in parts."""
    fault = "op=write&name=step-0000000[23]*.pack&when=mid&times=2&do=stop"

    def train_on(say: Say) -> None:
        job = Job(f"faulty+file://{matrix.root}?{fault}", strategy="datastates")
        say(job.persister.pid)
        for step in (1, 2, 3):
            job.update()
            say([step, job.digest()])
            job.checkpointer.save(step)
        job.checkpointer.fence()
        say("sealed")
        time.sleep(WAIT_S)

    child = Child(train_on)
    matrix.persisters.append(child.hear())
    for _ in range(3):
        step, digest = child.hear()
        matrix.digests[step] = digest
    assert child.hear() == "sealed"
    persister = matrix.persister
    until(lambda: is_stopped(persister), "the persister is at step 2")
    os.kill(child.pid, signal.SIGSTOP)  # it reads no report any more
    os.kill(persister, signal.SIGCONT)
    until(lambda: not is_stopped(persister), "it goes on")
    until(lambda: is_stopped(persister), "the persister is at step 3, and has told of step 2")
    child.kill()
    assert child.wait().was_killed
    os.kill(persister, signal.SIGCONT)
    matrix.next_start(3)


def test_two_next_starts_at_once_lose_nothing_between_them(matrix: Matrix) -> None:
    """A scheduler starts the job twice: one of them wins, and the sealed step is not lost."""
    child = matrix.start(_nowhere, f"{PERSISTER_POINTS['flush, mid pack']}&do=stop")
    assert child.hear() == "there"
    until(lambda: is_stopped(matrix.persister), "the persister is at work")
    child.kill()
    kill(matrix.persister)
    child.wait()

    def start(say: Say) -> None:
        job = Job(str(matrix.root))
        say([job.step, job.digest()])

    starts = [Child(start) for _ in range(3)]
    for one in starts:
        assert one.wait().check() == [[2, matrix.digests[2]]]
    matrix.next_start(2)


def test_a_trainer_killed_again_and_again_comes_through(matrix: Matrix) -> None:
    """Restarted at once, each time killed while step n+1 is sealed and not yet written."""
    fault = "op=write&name=*.pack&when=mid&do=stop"
    url = f"faulty+file://{matrix.root}?{fault}"

    def train_one(say: Say) -> None:
        job = Job(url)
        say([job.step, job.digest() if job.step else ""])
        job.update()
        say(job.digest())
        say(job.persister.pid)
        job.checkpointer.save(job.step)
        job.checkpointer.fence()
        say("sealed")
        time.sleep(WAIT_S)

    expected = [0, ""]
    for step in range(1, 6):
        # What the dead one left is finished by the store of the next start: it stops there
        # too, in its own process, so let it go on.
        child = Child(train_one)
        if step > 1:
            until(lambda child=child: is_stopped(child.pid), "it finishes what was left")
            os.kill(child.pid, signal.SIGCONT)
        assert child.hear() == expected
        expected = [step, child.hear()]
        matrix.persisters.append(child.hear())
        assert child.hear() == "sealed"
        child.kill()
        kill(matrix.persisters[-1])
        child.wait()
        matrix.digests[step] = expected[1]
    matrix.next_start(5)


def test_memory_without_a_name_outlives_the_trainer_in_the_hands_of_the_persister(
    matrix: Matrix,
) -> None:
    def stop(job: Job, pause: Callable[[], None]) -> None:
        job.checkpointer._snapshotter._arena._directories = (Path("/nowhere"), Path())  # type: ignore[union-attr]
        job.checkpointer._snapshotter._arena._free = [None]  # type: ignore[union-attr]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = matrix.start(stop, f"{PERSISTER_POINTS['flush, mid pack']}&do=stop")
    assert child.hear() == "there"
    persister = matrix.persisters[-1]
    until(lambda: is_stopped(persister), "the persister is at work")
    child.kill()
    os.kill(persister, signal.SIGCONT)
    matrix.next_start(2)  # waits for it: there is no file by which it could be known
    assert child.wait().was_killed


# --- signals to the process group of a real script --------------------------

SCRIPT = """
import sys, torch, asymcheck
from hashlib import sha256
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear({side}, {side}) for _ in range(3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
checkpointer = asymcheck.Checkpointer(
    {root!r}, state={{"m": model, "o": optimizer}}, every_steps=1, keep_last=50
)
step = checkpointer.restore()

def digest():
    state = [t for p in model.parameters() for t in optimizer.state[p].values()]
    live = [*model.state_dict().values(), *state]
    return sha256(b"".join(t.detach().numpy().tobytes() for t in live)).hexdigest()

print("pid", checkpointer._snapshotter._persister.pid, flush=True)
if step:
    print("loaded", step, digest(), flush=True)
while step < {steps}:
    model(torch.randn(4, {side})).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    print("sealed", step, flush=True)
    step += 1
    print("live", step, digest(), flush=True)
    checkpointer.step(step)
    print("saved", step, flush=True)
"""


class Script:
    def __init__(self, root: Path, steps: int) -> None:
        text = SCRIPT.format(root=str(root), side=SIDE, steps=steps)
        self.process = subprocess.Popen(
            [sys.executable, "-c", text],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": SOURCE},
        )
        self.lines: list[list[str]] = []

    def read_until(self, *words: str) -> None:
        assert self.process.stdout is not None
        while [*words] not in self.lines:
            line = self.process.stdout.readline()
            assert line, self.end()
            self.lines.append(line.split())

    def end(self) -> str:
        out, err = self.process.communicate(timeout=120)
        self.lines += [line.split() for line in out.splitlines()]
        return err

    def newest(self, word: str) -> int:
        return max((int(line[1]) for line in self.lines if line[0] == word), default=0)

    def digest(self, step: int) -> str:
        return next(x[2] for x in self.lines if x[0] == "live" and int(x[1]) == step)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_a_signal_to_the_whole_group_loses_nothing_that_was_promised(
    tmp_path: Path, number: signal.Signals
) -> None:
    root = tmp_path / "root"
    script = Script(root, steps=10_000)
    try:
        script.read_until("saved", "6")
        os.killpg(script.process.pid, number)
        error = script.end()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(script.process.pid, signal.SIGKILL)
    persister = script.newest("pid")
    if number is signal.SIGINT:
        assert "KeyboardInterrupt" in error
        promised = script.newest("saved")  # Ctrl-C: the end of the interpreter drains
    else:
        assert script.process.returncode == -signal.SIGTERM
        promised = script.newest("sealed")  # it died at once: what was sealed lives on
    again = Script(root, steps=0)
    error = again.end()
    assert again.process.returncode == 0, error
    loaded = again.newest("loaded")
    assert loaded >= promised >= 5
    (line,) = (x for x in again.lines if x[0] == "loaded")
    assert line[2] == script.digest(loaded)
    run = create_repository(open_store(str(root))).run
    assert list(slots_of(SHARED_MEMORY, run)) == []
    assert list(root.glob(".tmp/*")) == []
    for pid in (persister, again.newest("pid")):
        until(lambda pid=pid: ProcessId.of(pid).start == 0, "no persister is left")
