"""What the ranks of one training tell each other. Nothing here is a collective in the background.

All words go through one key-value store that rank 0 holds in memory (torch's ``TCPStore``). Most
calls are made by all ranks alike, in the same order: they end alike on all of them, and in bounded
time. What only one rank knows, as a failure behind the training or a SIGTERM, it asks for; rank 0
announces it for a step that no rank has reached yet, and each rank looks once a step.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar

import torch.distributed as dist

from asymcheck.errors import RankFailed
from asymcheck.memory.process import ProcessId
from asymcheck.rank_store import RankStore, host, spoken

if TYPE_CHECKING:  # not every build of torch has it
    from torch.distributed.distributed_c10d import Store

T = TypeVar("T")

AHEAD_STEPS = 3
"""How far ahead something is announced. Ranks whose updates depend on each other are never more
than one step apart; one step more is for those that look before they update, and one because
what is asked for in one look is heard in the next."""

_SHORT_POLL_S, _LONG_POLL_S = 0.0005, 0.02
_LAST_WORDS_S = 5.0
_LOOKING = "looking for words"

What = Literal["save", "leave", "raise", "check", "drop"]


class Announcement(NamedTuple):
    """What every rank does in its first call with ``step`` or a later one.

    Attributes:
        what: To save; to save, wait until that is durable, and end; to raise; to compare the
            structure at the next save; or to know that a save was dropped.
        step: When.
        rank: Who asked for it.
        why: Its message.
    """

    what: What
    step: int
    rank: int
    why: str


class Ranks(Protocol):
    """The ranks of one training. Only the training thread calls it."""

    rank: int
    world: int

    def exchange(self, what: str, mine: Any) -> list[Any]:  # noqa: ANN401  any JSON value
        """What each rank says, in order; blocks until all have said it.

        Args:
            what: The same on all ranks; for messages.
            mine: A JSON value.

        Raises:
            RankFailed: One did not answer in time, failed, or is at another call.
        """
        ...

    def each(self, what: str, work: Callable[[], T], more_s: float = 0.0) -> list[T]:
        """Do ``work`` on each rank: all go on, or none does; blocks.

        Args:
            what: As in ``exchange``.
            work: Returns a JSON value.
            more_s: How much longer than usual ranks may be apart, since the work may wait.

        Raises:
            RankFailed: Another rank failed, with what it raised. The failing rank raises its own
                error.
        """
        ...

    def first(self, what: str, work: Callable[[], T]) -> T:
        """Do ``work`` on rank 0 alone; the others wait for what it returns, a JSON value.

        Raises:
            RankFailed: It failed, or did not answer in time.
        """
        ...

    def ask(self, what: What, step: int, why: str) -> None:
        """Have rank 0 announce something. Calling rank 0 announces it at once.

        Args:
            what: What all ranks shall do.
            step: The step that this rank is at.
            why: For messages.
        """
        ...

    def look(self, step: int) -> Sequence[Announcement]:
        """What is due now, told once; one short word with the store, once a step, which is on its
        way while the step runs.

        Raises:
            RankFailed: Rank 0 is gone.
        """
        ...

    def close(self) -> None:
        """Say nothing more; rank 0 waits a little until the others do not either."""
        ...


class Alone:
    """A world of one: nothing to tell, nothing to wait for."""

    rank = 0
    world = 1

    def exchange(self, what: str, mine: Any) -> list[Any]:  # noqa: ANN401
        """See ``Ranks``."""
        return [mine]

    def each(self, what: str, work: Callable[[], T], more_s: float = 0.0) -> list[T]:
        """See ``Ranks``."""
        return [work()]

    def first(self, what: str, work: Callable[[], T]) -> T:
        """See ``Ranks``."""
        return work()

    def ask(self, what: What, step: int, why: str) -> None:
        """See ``Ranks``; nobody calls it, since one rank decides without asking."""
        raise AssertionError(f"{what}: a world of one was asked")

    def look(self, step: int) -> Sequence[Announcement]:
        """See ``Ranks``."""
        return ()

    def close(self) -> None:
        """See ``Ranks``."""


class Together:
    """The ranks of a process group, over a store of their own that rank 0 holds.

    Made by all ranks of the group at the same place, on the training thread: its address goes
    through one ``broadcast_object_list``, the only collective there is, bounded by the timeout of
    the group. All later waits are bounded by ``timeout_s``.

    Args:
        group: The process group, ``None`` for the default one.
        timeout_s: How long to wait for a rank; more than one ever lags behind another.

    Raises:
        RankFailed: Rank 0 could not make the store, or it cannot be reached.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout_s: float) -> None:
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        self._timeout_s = timeout_s
        self._line = RankStore(group, timeout_s)
        weakref.finalize(self, self._line.close).atexit = False
        self._meetings = 0
        self._asked = 0
        self._heard = [0] * self.world
        self._announced = 0
        self._waiting: list[Announcement] = []
        self._latest_step = -1
        self._news: Future[list[Any]] | None = None
        self._processes: list[ProcessId | None] = [None] * self.world
        me = ProcessId.of(os.getpid())
        told = self.exchange("start", [host(), me.pid, me.start])
        self._processes = [
            ProcessId(pid, start) if where == host() else None for where, pid, start in told
        ]

    # --- meetings: all ranks make the same calls ------------------------------

    def exchange(self, what: str, mine: Any) -> list[Any]:  # noqa: ANN401
        """See ``Ranks``."""
        return self._meet(what, {"value": mine})

    def each(self, what: str, work: Callable[[], T], more_s: float = 0.0) -> list[T]:
        """See ``Ranks``."""
        try:
            mine = work()
        except Exception as failure:
            with suppress(RankFailed):
                self._meet(what, {"failed": spoken(failure)}, more_s)
            raise
        return self._meet(what, {"value": mine}, more_s)

    def first(self, what: str, work: Callable[[], T]) -> T:
        """See ``Ranks``."""
        found: T = self.each(what, work if self.rank == 0 else _nothing)[0]
        return found

    def _meet(self, what: str, said: dict[str, Any], more_s: float = 0.0) -> list[Any]:
        """Tell and wait for all. The first verdict counts for all, so that it ends alike."""
        self._meetings += 1
        here = f"meeting/{self._meetings}"
        text = json.dumps({"what": what, **said})
        until_s = monotonic() + self._timeout_s + more_s

        def meet(store: Store) -> tuple[str, list[str]]:
            store.set(f"{here}/{self.rank}", text)
            silent = self._await(store, here, until_s)
            mine = f"{self.rank} {json.dumps(silent)}" if silent else "all"
            verdict = store.compare_set(f"{here}/verdict", "", mine).decode()
            answers = []
            if verdict == "all":
                answers = [store.get(f"{here}/{rank}").decode() for rank in range(self.world)]
            self._await_readers(store, here)
            return verdict, answers

        verdict, told = self._line.call(meet, what, self._timeout_s + more_s + _LAST_WORDS_S)
        if verdict != "all":
            by, _, ranks = verdict.partition(" ")
            raise self._silent(what, int(by), json.loads(ranks))
        answers = [json.loads(answer) for answer in told]
        wrong = next((r for r, a in enumerate(answers) if a["what"] != what), None)
        failed = next((r for r, a in enumerate(answers) if "failed" in a), None)
        if wrong is not None:
            raise RankFailed(
                (wrong,),
                f"rank {wrong} is at {answers[wrong]['what']!r}, rank {self.rank} at {what!r}: "
                f"every rank must make the same calls of its Checkpointer in the same order",
            )
        if failed is not None:
            raise RankFailed(
                (failed,), f"{what}: rank {failed} failed: {answers[failed]['failed']}"
            )
        return [answer["value"] for answer in answers]

    def _await(self, store: Store, here: str, until_s: float) -> list[int]:
        """Wait until all have told something; returns those that have not, and will not."""
        keys = [f"{here}/{rank}" for rank in range(self.world)]
        pause_s = _SHORT_POLL_S
        while not store.check(keys):
            if store.check([f"{here}/verdict"]):
                return [r for r, key in enumerate(keys) if not store.check([key])]
            if pause_s == _LONG_POLL_S:
                silent = [r for r, key in enumerate(keys) if not store.check([key])]
                gone = [r for r in silent if self._is_gone(r)]
                # What one said before it ended may have come after that look.
                gone = [r for r in gone if not store.check([keys[r]])]
                if gone or monotonic() > until_s:
                    return gone or silent
            sleep(pause_s)
            pause_s = min(2 * pause_s, _LONG_POLL_S)
        return []

    def _is_gone(self, rank: int) -> bool:
        process = self._processes[rank]
        return process is not None and not process.is_alive

    def _silent(self, what: str, by: int, ranks: list[int]) -> RankFailed:
        if self.rank in ranks:
            return RankFailed(
                (by,),
                f"{what}: rank {by} did not wait for rank {self.rank} for longer than its "
                f"timeout_s: give a larger one where ranks lag that much",
            )
        gone = [rank for rank in ranks if self._is_gone(rank)]
        names = _named(gone or ranks)
        if gone:
            return RankFailed(gone, f"{what}: {names} ended: its process is gone")
        return RankFailed(
            ranks,
            f"{what}: {names} did not answer within timeout_s={self._timeout_s:g} seconds: it "
            f"hangs, lags, or did not make this call, which every rank must make",
        )

    def _await_readers(self, store: Store, here: str) -> None:
        """Whatever comes after a meeting may end a process: rank 0, which holds what was told,
        goes on when all have read it, or after a while.
        """
        read = store.add(f"{here}/read", 1)
        if self.rank:
            return
        until_s, pause_s = monotonic() + _LAST_WORDS_S, _SHORT_POLL_S
        while read < self.world and monotonic() < until_s:
            sleep(pause_s)
            pause_s = min(2 * pause_s, _LONG_POLL_S)
            if (
                pause_s == _LONG_POLL_S
                and read + sum(map(self._is_gone, range(self.world))) >= self.world
            ):
                return
            read = store.add(f"{here}/read", 0)
        if read == self.world:
            for key in ("verdict", "read", *range(self.world)):
                store.delete_key(f"{here}/{key}")

    # --- announcements: one asks, rank 0 announces, each looks -----------------

    def ask(self, what: What, step: int, why: str) -> None:
        """See ``Ranks``."""
        if self.rank == 0:
            self._announce(Announcement(what, step + AHEAD_STEPS, 0, why))
            return
        self._asked += 1
        key, text = f"ask/{self.rank}/{self._asked}", json.dumps([what, why])

        def tell(store: Store) -> None:
            store.set(key, text)
            store.add("asks", 1)

        self._line.call(tell, "asking rank 0", self._timeout_s)

    def look(self, step: int) -> Sequence[Announcement]:
        """See ``Ranks``."""
        # Where all raise now rank 0 may have ended already. Nothing else is as urgent.
        if not any(a.what == "raise" and a.step <= step for a in self._waiting):
            self._hear(step)
        due = [a for a in self._waiting if a.step <= step]
        self._latest_step = step  # a restore may have gone back
        self._waiting = [a for a in self._waiting if a not in due]
        return due

    def _hear(self, step: int) -> None:
        """Take what was asked for in the look before, and ask again for the next one."""
        if self._news is not None:
            self._take(step, self._line.end(self._news, _LOOKING, self._timeout_s))
        asked = self._new_asks if self.rank == 0 else self._new_announcements
        if step != self._latest_step + 1:  # steps were left out, and what is due among them
            self._take(step, self._line.call(asked, _LOOKING, self._timeout_s))
        self._news = self._line.begin(asked, _LOOKING)

    def _take(self, step: int, news: list[Any]) -> None:
        for found in news:
            if self.rank == 0:
                rank, what, why = found
                self._announce(Announcement(what, step + AHEAD_STEPS, rank, why))
            elif found.step > self._latest_step or found.what in ("raise", "drop"):
                self._waiting.append(found)
            else:
                self.ask(
                    "raise",
                    step,
                    f"rank {self.rank} had passed step {self._latest_step} when it heard of what "
                    f"all ranks do at step {found.step}: they may be {AHEAD_STEPS} calls of "
                    f"step() apart",
                )

    def _announce(self, found: Announcement) -> None:
        if found.what != "drop" and any(found.what == a.what for a in self._waiting):
            return  # one is enough: it is done soon
        self._waiting.append(found)
        self._announced += 1
        key = f"announced/{self._announced}"

        def tell(store: Store) -> None:
            store.set(key, json.dumps(found))
            store.add("announced", 1)

        self._line.call(tell, "announcing", self._timeout_s)

    def _new_asks(self, store: Store) -> list[tuple[int, What, str]]:
        found: list[tuple[int, What, str]] = []
        if store.add("asks", 0) == sum(self._heard):
            return found
        for rank in range(1, self.world):
            while store.check([f"ask/{rank}/{self._heard[rank] + 1}"]):
                self._heard[rank] += 1
                what, why = json.loads(store.get(f"ask/{rank}/{self._heard[rank]}"))
                found.append((rank, what, why))
        return found

    def _new_announcements(self, store: Store) -> list[Announcement]:
        first, self._announced = self._announced + 1, store.add("announced", 0)
        return [
            Announcement(*json.loads(store.get(f"announced/{n}")))
            for n in range(first, self._announced + 1)
        ]

    def close(self) -> None:
        """See ``Ranks``."""
        with suppress(RankFailed):
            self._line.call(
                lambda store: self._await_readers(store, "close"), "close", _LAST_WORDS_S
            )
        self._line.close()


def _nothing() -> Any:  # noqa: ANN401
    return None


def _named(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


@contextmanager
def alike(ranks: Ranks, what: str) -> Iterator[None]:
    """A block that each rank runs: all go on after it, or none does; see ``Ranks.each``."""
    failed: list[Exception] = []

    def end() -> None:
        if failed:
            raise failed.pop()

    try:
        yield
    except Exception as failure:  # noqa: BLE001  raised again at the end
        failed.append(failure)
    ranks.each(what, end)
