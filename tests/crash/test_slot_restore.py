"""A start reads values straight out of the slots that a dead trainer left, and nothing is lost.

What it read becomes durable behind its training. Until then it lies where it lay: a start that is
killed too leaves it to the next one.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # before any fork: each child would load it anew
from torch import nn

from asymcheck import Checkpointer, Strategy
from asymcheck.capture import dump_hashes, parse_capture
from asymcheck.decoding import verify
from asymcheck.errors import CheckpointError, CheckpointWarning, StoreError
from asymcheck.handover import left_over
from asymcheck.memory.arena import SHARED_MEMORY, Slot, slots_of
from asymcheck.nearest import decide
from asymcheck.planning.cadence import EverySteps
from asymcheck.planning.layout import PAGE_BYTES
from asymcheck.planning.policy import Admission
from asymcheck.planning.tiers import Placement
from asymcheck.slot_store import IN_MEMORY
from asymcheck.storage.copies import Place
from asymcheck.storage.repository import create_repository, open_repository
from asymcheck.storage.store import Store, open_store
from asymcheck.testing.children import Child, Say
from asymcheck.testing.faulty import Fault, FaultyStore

pytestmark = pytest.mark.crash

WAIT_S = 60.0
SIDE = 150


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, f"timed out: {what}"
        time.sleep(0.002)


def for_ever() -> None:
    threading.Event().wait(WAIT_S)


class Job:
    """A small training whose state depends on the step alone. Checkpoints stay in memory, but for
    each step that is a multiple of ``durable``.
    """

    def __init__(self, url: str | Store, durable: int = 1000, **options: Any) -> None:
        restoring = {key: options.pop(key) for key in ("step", "resume") if key in options}
        torch.manual_seed(5)
        self.model = nn.Sequential(*(nn.Linear(SIDE, SIDE) for _ in range(3)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.checkpointer = Checkpointer(
            url,
            state={"m": self.model, "o": self.optimizer},
            strategy=Strategy(
                admission=Admission(max_in_flight=2),
                placement=Placement(durable=EverySteps(durable)),
            ),
            **options,
        )
        self.step = self.checkpointer.restore(**restoring)

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

    def save(self) -> str:
        """One step more, saved; returns what the state is."""
        self.update()
        self.checkpointer.save(self.step).durable.result(WAIT_S)
        return self.digest()

    def served(self) -> dict[str, int]:
        return {found.tier: found.nbytes for found in self.checkpointer.report.served}


class Host:
    """One root, and the shared memory of this host."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self.run = create_repository(open_store(self.root)).run

    def slots(self) -> list[Path]:
        return list(slots_of(SHARED_MEMORY, self.run))

    def killed_at(self, steps: int, **options: Any) -> list[str]:
        """Train so many steps, each saved, and be killed; what the state was at each."""

        def work(say: Say) -> None:
            job = Job(self.root, **options)
            say([job.save() for _ in range(steps)])
            for_ever()

        child = Child(work)
        digests: list[str] = child.hear()
        child.kill()
        assert child.wait().was_killed
        return digests

    def change(self, work: Callable[[Slot], None]) -> None:
        """Do something to every slot that holds a whole checkpoint."""
        for old in left_over(self.run):
            if old.at is not None:
                slot = Slot.open(old.path)
                work(slot)
                slot.close(unlink=False)

    def flip(self, of_step: int) -> None:
        def work(slot: Slot) -> None:
            if parse_capture(slot.meta, "slot").at.step == of_step:
                slot.image[5 * PAGE_BYTES + 1001] ^= 1  # between two canaries

        self.change(work)

    def starts(self, **options: Any) -> list[Any]:
        """What a start restores: step, digest, bytes out of shared memory; then it saves once and
        closes; what it warned of, and the steps that are durable at its end.
        """

        def work(say: Say) -> None:
            with warnings.catch_warnings(record=True) as heard:
                warnings.simplefilter("always")
                job = Job(self.root, **options)
                say([job.step, job.digest() if job.step else "", job.served().get(IN_MEMORY, 0)])
                say([bad.tier for bad in job.checkpointer.report.damaged])
                job.save()
                job.checkpointer.close()
            say([str(w.message) for w in heard if w.category is CheckpointWarning])
            say(job.checkpointer.steps())

        return Child(work).wait().check()

    def is_clean(self) -> bool:
        repository = open_repository(open_store(self.root))
        listing = repository.survey()
        damage = [d for at in listing.committed for d in verify(repository, at)]
        return not (listing.damaged or listing.leftovers or damage or self.slots())


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path / "root")
    yield made
    for path in made.slots():
        path.unlink()


def decision(host: Host) -> tuple[int | None, str, dict[str, int]]:
    """What is said beforehand: the step, where it comes from, and bytes of each tier."""
    found = decide([Place("root", open_store(host.root))])
    step = None if found.chosen is None else found.chosen.step
    return step, found.source, {served.tier: served.nbytes for served in found.served}


# --- whole ---------------------------------------------------------------------


def test_what_is_hashed_in_memory_is_read_there_and_becomes_durable_behind(host: Host) -> None:
    *_, digest = host.killed_at(3)
    restored, damaged, said, steps = host.starts()
    assert restored[:2] == [3, digest]
    assert restored[2] > 6 * SIDE * SIDE * 4, "not all of it was read in shared memory"
    assert (damaged, said, steps) == ([], [], [3, 4])
    assert host.is_clean()


def test_the_attempt_continues_from_what_was_read(host: Host) -> None:
    host.killed_at(2)
    host.starts()
    assert open_repository(open_store(host.root)).parents()[2] == (1, 2)


def test_killed_again_before_it_is_durable_it_is_made_durable_first(host: Host) -> None:
    *_, digest = host.killed_at(2)

    def work(say: Say) -> None:
        Checkpointer._make_durable = lambda *_: for_ever()  # type: ignore[method-assign]
        job = Job(host.root)
        say([job.step, job.digest()])
        job.update()
        job.checkpointer.step(job.step)  # it trains on meanwhile
        say(open_repository(open_store(host.root)).newest_attempt())
        for_ever()

    child = Child(work)
    assert child.hear() == [2, digest]
    assert child.hear() == 1, "claimed before what it continues from is durable"
    child.kill()
    assert child.wait().was_killed
    assert host.starts()[0] == [2, digest, 0]  # it may be the state itself that ends each start
    assert host.is_clean()


def test_killed_in_the_middle_of_reading_nothing_is_lost(host: Host) -> None:
    *_, digest = host.killed_at(2)

    def work(say: Say) -> None:
        from asymcheck import slot_store

        read = slot_store._OpenSlot.read_hashed

        def slowly(*arguments: Any) -> str:
            say("reading")
            for_ever()
            return read(*arguments)

        slot_store._OpenSlot.read_hashed = slowly  # type: ignore[method-assign]
        Job(host.root)

    child = Child(work)
    assert child.hear() == "reading"
    child.kill()
    assert child.wait().was_killed
    assert host.starts()[0][:2] == [2, digest]
    assert host.is_clean()


def test_killed_in_the_middle_of_making_it_durable_nothing_is_lost(host: Host) -> None:
    *_, digest = host.killed_at(2)

    def work(say: Say) -> None:
        Job(f"faulty+file://{host.root}?op=write&name=*.pack&when=mid&do=kill")
        for_ever()

    assert Child(work).wait().was_killed
    assert host.starts()[0][:2] == [2, digest]
    assert host.is_clean()


def test_a_store_that_fails_keeps_it_in_memory_and_no_attempt_leaves_it_behind(host: Host) -> None:
    *_, digest = host.killed_at(2)

    def work(say: Say) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            job = Job(f"faulty+file://{host.root}?op=write&name=*.pack&times=0")
            say([job.step, job.digest()])
            job.update()
            failed = 0
            for call in (lambda: job.checkpointer.save(job.step), job.checkpointer.wait):
                try:
                    call()
                except StoreError as failure:
                    failed += "stays there" in str(failure)
            say(failed)
            try:
                job.checkpointer.close()
            except CheckpointError as failure:
                say("stays there" in str(failure))

    assert Child(work).wait().check() == [[2, digest], 2, True]
    assert len(host.slots()) == 1
    assert host.starts()[0][:2] == [2, digest]
    assert host.is_clean()


def test_a_start_that_never_saves_leaves_a_durable_checkpoint(host: Host) -> None:
    host.killed_at(2)

    def work(say: Say) -> None:
        Job(host.root).checkpointer.close()

    Child(work).wait().check()
    assert open_repository(open_store(host.root)).lineage() == [(1, 2)]
    assert host.is_clean()


def test_the_claim_comes_by_itself_once_it_is_durable(host: Host) -> None:
    host.killed_at(2)

    def work(say: Say) -> None:
        job = Job(host.root)
        finishing = job.checkpointer._finishing
        assert finishing is not None
        finishing.join(WAIT_S)
        job.update()
        job.checkpointer.step(job.step)
        say(open_repository(open_store(host.root)).newest_attempt())
        job.checkpointer.close()

    assert Child(work).wait().check() == [2]


@pytest.mark.parametrize("before", ["step", "save"])
def test_where_no_attempt_can_be_claimed_training_goes_on_and_the_next_save_tries_again(
    host: Host, before: str
) -> None:
    *_, digest = host.killed_at(2)

    def work(say: Say) -> None:
        store = FaultyStore(open_store(host.root))
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            job = Job(store, durable=4, persist="thread", on_error="warn", every_steps=4)
            finishing = job.checkpointer._finishing
            assert finishing is not None
            finishing.join(WAIT_S)
            say([job.step, job.digest()])
            store.fault = Fault(times=0, op="create")  # it is durable, and nothing can be claimed
            for _ in range(1 if before == "step" else 2):
                job.update()
                job.checkpointer.step(job.step)
            say(repr(job.checkpointer._finishing is None))
            store.fault = Fault(do="none")
            while job.step < 8:
                job.update()
                job.checkpointer.step(job.step)
            job.checkpointer.close()
        say(sum("Input/output error" in str(w.message) for w in heard))
        say(job.checkpointer.steps())

    lost = before == "save"
    steps = [2, 8] if lost else [2, 4, 8]
    assert Child(work).wait().check() == [[2, digest], "False", int(lost), steps]
    assert open_repository(open_store(host.root)).parents()[2] == (1, 2)
    assert host.is_clean()


def test_what_is_durable_and_still_in_memory_is_read_there(host: Host) -> None:
    """Nobody lived to free the slot."""

    def work(say: Say) -> None:
        job = Job(host.root, durable=1, persist="thread")
        say(job.save())
        for_ever()

    child = Child(work)
    digest = child.hear()
    child.kill()
    assert child.wait().was_killed
    assert open_repository(open_store(host.root)).lineage() == [(1, 1)]
    restored, _, said, steps = host.starts()
    assert restored[:2] == [1, digest]
    assert restored[2] > 0
    assert (said, steps) == ([], [1, 2])
    assert host.is_clean()


def test_a_step_may_be_gone_back_from_and_asked_for(host: Host) -> None:
    *_, digest = host.killed_at(4, durable=2)
    assert host.starts(step=4)[0][:2] == [4, digest]
    restored = host.starts(step=2)[0]
    assert restored[0] == 2
    assert restored[2] == 0


# --- not taken -------------------------------------------------------------------


def test_bits_that_flip_after_it_was_hashed_are_found_and_the_one_before_is_restored(
    host: Host,
) -> None:
    digests = host.killed_at(3, durable=2)
    host.flip(of_step=3)
    assert decision(host)[0] == 2
    restored, damaged, said, steps = host.starts()
    assert restored[:2] == [2, digests[1]]
    assert damaged == [IN_MEMORY]
    assert any("shared memory was passed over" in text for text in said)
    assert any("changed after it was sealed" in text for text in said)
    assert steps == [2, 3]
    assert host.is_clean()


def test_where_nothing_else_is_there_a_damaged_one_is_no_fresh_start(host: Host) -> None:
    host.killed_at(1)
    host.flip(of_step=1)

    def work(say: Say) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                Job(host.root)
            except CheckpointError as failure:
                say([type(failure).__name__, "build it anew" in str(failure)])

    assert Child(work).wait().check() == [["TornRestore", True]]


@pytest.mark.parametrize("hashes", ["none", "cut off", "of another"])
def test_without_good_hashes_it_is_made_durable_first(host: Host, hashes: str) -> None:
    *_, digest = host.killed_at(2)

    def work(slot: Slot) -> None:
        kept = {
            "none": b"",
            "cut off": slot.hashes[:-3],
            "of another": dump_hashes(b"", ["0" * 32]),
        }
        slot.leave_hashes(kept[hashes])

    host.change(work)
    restored, *_ = host.starts()
    assert restored == [2, digest, 0] if hashes == "none" else restored[0] == 0
    assert host.is_clean()


def test_an_attempt_that_was_claimed_since_leaves_it_behind(host: Host) -> None:
    host.killed_at(3, durable=2)
    open_repository(open_store(host.root)).claim(None)
    assert decision(host)[0] == 2
    assert host.starts()[0][0] == 2


def test_a_reader_beside_the_training_takes_none(host: Host) -> None:
    host.killed_at(3, durable=2)

    def work(say: Say) -> None:
        job = Job(host.root, read_only=True)
        say([job.step, job.served().get(IN_MEMORY, 0)])

    assert Child(work).wait().check() == [[2, 0]]
    assert any(old.is_sealed for old in left_over(host.run))


# --- what is said beforehand --------------------------------------------------------


def test_what_is_said_beforehand_is_what_a_start_does(host: Host) -> None:
    host.killed_at(2)
    step, source, served = decision(host)
    assert (step, source) == (2, IN_MEMORY)
    restored = host.starts()[0]
    assert restored[0] == 2
    assert served[IN_MEMORY] > 6 * SIDE * SIDE * 4


def test_the_newest_is_hashed_while_the_one_before_is_still_written(host: Host) -> None:
    def work(say: Say) -> None:
        from asymcheck.storage.local import LocalStore

        LocalStore.write = lambda *_: for_ever()  # type: ignore[assignment, method-assign]
        job = Job(host.root, durable=1, persist="thread")
        for _ in range(2):
            job.update()
            job.checkpointer.save(job.step)
            job.checkpointer.fence()
        until(lambda: hashed_steps(host) == [1, 2], "both are hashed")
        say(job.digest())
        for_ever()

    child = Child(work)
    digest = child.hear()
    child.kill()
    assert child.wait().was_killed
    restored, _, said, steps = host.starts()
    assert restored[:2] == [2, digest]
    assert restored[2] > 0
    assert (said, steps) == ([], [1, 2, 3])
    assert host.is_clean()


def hashed_steps(host: Host) -> list[int]:
    found = []
    for path in host.slots():
        slot = Slot.open(path)
        if slot.hashes:
            found.append(parse_capture(slot.meta, "slot").at.step)
        slot.close(unlink=False)
    return sorted(found)
