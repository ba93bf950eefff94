"""One case of the matrix: a training, a failure at a moment, what became of it.

The process that runs cases has torch loaded and forks each training.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from asymcheck.decoding import verify
from asymcheck.handover import persisters_of
from asymcheck.memory.arena import SHARED_MEMORY, slots_of
from asymcheck.memory.process import ProcessId
from asymcheck.storage.names import pack_name
from asymcheck.storage.repository import create_repository
from asymcheck.storage.store import open_store
from asymcheck.testing.children import Outcome, Say
from asymcheck_lab.chaos_job import LAST, WAIT_S, resume
from asymcheck_lab.chaos_network import Network
from asymcheck_lab.chaos_places import FarStore, Peers
from asymcheck_lab.chaos_stage import Case, Disk, Stage, Training, Verdict, hear_soon, send
from asymcheck_lab.errors import RunError

GOES_ON = ("persister killed", "disk full", "store outage", "peer killed")
"""What a training may survive without being started again."""

_KILLS = ("process killed", "slow disk", "clock jump")
"""The trainer dies of them, and its persister and its memory live on."""

_JUMP_S = -400 * 86400.0


class Trial(Stage):
    """A case: the failure, and the verdict."""

    # --- the failure -------------------------------------------------------------

    def strike(self, training: Training) -> set[int]:
        """Bring the failure about; returns the steps of which one must be restored."""
        fault, persister = self.case.fault, self.persister()
        committed = self.at_strike = {at.step for at in self.committed()}
        safe = committed | self.sealed()
        if fault in _KILLS:
            if fault == "clock jump":
                (self.folder / "clock").write_text(str(_JUMP_S))
            self.kill(training.trainer)
            send(persister, signal.SIGCONT)
            self.verdict.training = "killed"
        elif fault.startswith("host killed") or fault == "bit rot":
            self.lose_host(training.trainer, persister)
            safe, self.verdict.training = committed, "killed"
            if fault == "bit rot":
                self.flip_a_byte()
                safe = self.intact()
        elif fault == "persister killed":
            self.kill(persister)
        elif fault == "disk full":
            if self.disk.refused:
                self.verdict.note = f"ENOSPC injected: {self.disk.refused}"
            else:
                self.disk.fill()
        else:
            self.strike_the_places()
        return safe

    def lose_host(self, *pids: int) -> None:
        """Everything on the host of the training ends, and its memory with it."""
        self.kill(*pids)
        self.remove_slots()
        self.memory_is_lost = True
        self.places.lose_host()

    def strike_the_places(self) -> None:
        """What fails is the store, a peer, or the way there."""
        places = self.places
        if isinstance(places, Peers):  # a restore reads from its own host first
            places.agents[0 if self.case.moment == "restore" else 1].kill()
        elif isinstance(places, FarStore):
            places.network.cut()
        else:
            places.take_away()

    def flip_a_byte(self) -> None:
        """In the middle of the newest committed checkpoint's first pack."""
        at = max(self.committed())
        path = self.places.root / pack_name(at, 0, 1)
        with path.open("r+b") as pack:
            middle = path.stat().st_size // 2
            pack.seek(middle)
            byte = pack.read(1)
            pack.seek(middle)
            pack.write(bytes([byte[0] ^ 0x40]))

    def intact(self) -> set[int]:
        """Steps of which every byte can be read, what they stand on included."""
        repository = create_repository(open_store(self.places.home))
        committed = set(repository.survey().committed)
        self.gone = {at for at in committed if any(verify(repository, at))}
        return {at.step for at in committed - self.gone}

    # --- the case ----------------------------------------------------------------

    def run_it(self) -> None:
        """All of it, the verdict included."""
        if self.case.moment == "restore":
            safe = self.hit_a_restore()
        else:
            child = self.start()
            safe = self.partition(child) if self.is_partition else self.hit(child)
        self.judge(safe, self.last_start())

    @property
    def is_partition(self) -> bool:
        """Whether somebody else takes over. A link that is cut under a read is an outage."""
        over_a_link = isinstance(self.places, FarStore) and self.case.moment == "restore"
        return self.case.fault.startswith("network partition") and not over_a_link

    @property
    def may_go_on(self) -> bool:
        """Whether a training may survive it without being started again."""
        return self.case.fault in GOES_ON or isinstance(self.places, FarStore)

    def hit(self, training: Training) -> set[int]:
        """The failure in a training: it dies of it, or it goes on."""
        safe = self.strike(training)
        (self.folder / "go").touch()
        outcome = self.end_of(training)
        self.heal()
        if not self.may_go_on:
            return safe
        if outcome.status == 0:
            self.verdict.training = "went on"
            return {LAST}
        self.verdict.training = self.ended_with(outcome)
        self.settle()
        return safe

    def settle(self) -> None:
        """Let persisters of dead trainers come to their end."""
        with self.letting_go():
            self.until(
                lambda: not any(not trainer.is_alive for _, trainer in persisters_of(self.run)),
                "persisters of the dead trainer end",
            )

    def free_memory(self) -> None:
        """Let the persister of a dead trainer make durable what was sealed, and free what it keeps:
        a start that finds the newest checkpoint in shared memory reads no pack.
        """
        with self.letting_go():
            self.until(lambda: not self.sealed(), "what was sealed is durable")
        self.settle()
        self.remove_slots()

    def hit_a_restore(self) -> set[int]:
        """A training is killed; the failure comes while the next start restores."""
        case = self.case
        child = self.start()
        self.hear_rest(child)
        persister_dies = case.fault == "persister killed"
        if persister_dies:  # the one that still writes what its dead trainer sealed
            os.kill(self.persister(), signal.SIGSTOP)
        self.kill(child.pid)
        child.wait(WAIT_S)
        if not persister_dies:
            self.free_memory()
        where = self.where(stops=not persister_dies)
        second = self.fork(lambda say: resume(say, where, case.strategy, WAIT_S))
        if persister_dies:
            safe = self.strike(second)
            self.verdict.training = "killed"
        else:
            self.until(lambda: self.restore_stopped(second.pid), "the restore reads")
            safe = self.partition(second) if self.is_partition else self.strike(second)
        outcome = self.end_of(second) if not self.is_partition else None
        self.heal()
        if outcome is not None and self.may_go_on:
            well = outcome.status == 0
            self.verdict.training = "went on" if well else self.ended_with(outcome)
            safe = {LAST} if well else safe
        return safe

    def hear_rest(self, training: Training) -> None:
        """Take note of what a training has said."""
        while (said := hear_soon(training)) is not None:
            self.note(said)

    def partition(self, old: Training) -> set[int]:
        """The store and the scheduler lose sight of a trainer; another is started in its place.

        When the old one is back it may not mix with the new one.
        """
        self.done_at_strike = self.done
        committed, new = self.part(old)
        said = new.wait(2 * WAIT_S).check()
        self.check_resumed(said, committed)
        if self.verdict.resumed_from < max(committed, default=0):
            self.verdict.problems.append(
                f"the replacement restored step {self.verdict.resumed_from}, {max(committed)} was "
                f"committed"
            )
        (self.folder / "go").touch()
        send(old.trainer, signal.SIGCONT)
        outcome = self.end_of(old)
        self.heal()
        if self.case.moment == "restore":
            # It had claimed nothing yet: it is the newer job, and it comes to its end.
            self.verdict.training = "went on" if outcome.status == 0 else self.ended_with(outcome)
            return {LAST}
        self.verdict.training = self.ended_with(outcome)
        if "SupersededWriter" not in outcome.error:
            self.verdict.problems.append(
                f"the older writer was not stopped: status {outcome.status}, {outcome.error[-200:]}"
            )
        self.settle()
        return {LAST}

    def part(self, old: Training) -> tuple[set[int], Training]:
        """Set a trainer apart; returns what was committed, and its replacement.

        Across a link it trains on alone, and the replacement is on the other side. Without one it
        is stopped, which looks the same to everybody else.
        """
        where, strategy, places = self.where(), self.case.strategy, self.places
        if isinstance(places, FarStore):
            committed = self.at_strike = {at.step for at in self.committed()}
            places.network.cut()
            enter = places.network.enter_far

            def across(say: Say) -> None:
                enter()
                resume(say, where, strategy, WAIT_S)

            return committed, self.fork(across)
        for pid in (old.trainer, self.persister()):
            send(pid, signal.SIGSTOP)
        committed = self.at_strike = {at.step for at in self.committed()}
        (self.folder / "healed").touch()
        return committed, self.fork(lambda say: resume(say, where, strategy, WAIT_S))

    def ended_with(self, outcome: Outcome) -> str:
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
        where = self.where()
        child = self.fork(lambda say: resume(say, where, self.case.strategy, WAIT_S))
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
        is_stored = first["step"] in committed or self.memory_is_lost
        verdict.tier = self.places.spoken(first["served"]) if is_stored else "shared memory"
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
        for url in (self.places.home, *self.places.tiers):
            repository = create_repository(open_store(url))
            listing = repository.survey()
            damaged = [
                at
                for at in listing.committed
                if at not in self.gone and any(verify(repository, at))
            ]
            if listing.damaged or damaged:
                verdict.problems.append(f"damaged: {[*listing.damaged, *damaged]}")
            if listing.leftovers:
                verdict.problems.append(f"left over: {listing.leftovers}")
        temp = self.places.temporary
        slots = [path.name for path in slots_of(SHARED_MEMORY, self.run)]
        if temp or slots:
            verdict.problems.append(f"left over: {temp}, {slots}")
        try:
            self.until(
                lambda: all(ProcessId.of(pid).start == 0 for pid in self.pids), "persisters end"
            )
        except RunError as left:
            verdict.problems.append(str(left))


def run_case(
    case: Case,
    folder: Path,
    disk: Disk,
    network: Network | None,
    trial: type[Trial] = Trial,
) -> Verdict:
    """Run one case; blocks for seconds. Torch is loaded, with one thread; see ``load_once``.

    Args:
        case: Which.
        folder: Made for it, and removed.
        disk: Where the disk is filled.
        network: The link that is cut; needed by cases in which one is.
        trial: Who makes the starts.
    """
    begin_s = time.perf_counter()
    folder.mkdir(parents=True)
    running = trial(case, folder, disk, network)
    try:
        running.run_it()
    except Exception as failure:  # noqa: BLE001  a case that breaks is a result
        running.verdict.problems.append(f"{type(failure).__name__}: {failure}")
    finally:
        running.clean_up()
    running.verdict.case_s = round(time.perf_counter() - begin_s, 2)
    return running.verdict
