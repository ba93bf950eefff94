"""Worlds of several ranks for tests: forked, with gloo, one of them killed where it is asked for.

No wait is without a bound: of the world itself, of each collective in it, of its ends.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import signal
import tempfile
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from time import monotonic

import torch
import torch.distributed as dist

from asymcheck.testing.children import Child, Outcome, Say

WORLD_TIMEOUT_S = 90.0
_LAST_WORDS_S = 5.0

Work = Callable[[int, Say], object]
"""What each rank runs: gets its rank, and ``say``, which sends a JSON value to the test."""


def run_ranks(
    world: int,
    work: Work,
    *,
    kill: Mapping[int, object] | None = None,
    timeout_s: float = WORLD_TIMEOUT_S,
    collective_timeout_s: float = 30.0,
) -> list[Outcome]:
    """Run ``work`` on each rank of a world of its own, and wait for all of them.

    Each rank is a fork of this process with ``torch.distributed`` initialised for gloo, and with
    one thread for computing. They find each other through a file, so that it outlives every rank.

    Args:
        world: How many ranks.
        work: What each runs. Its return value is dropped; what it raises ends its rank.
        kill: Rank to what it says last: it is killed (SIGKILL) once it said that.
        timeout_s: After so long all are killed, with a traceback of each on its stderr.
        collective_timeout_s: After so long a collective of theirs raises.

    Returns:
        How each rank ended, in order; ``check`` of one says what it said, or what it raised.

    Raises:
        AssertionError: A rank was still running after ``timeout_s``, or one that was to be
            killed never said so.
    """
    until_s = monotonic() + timeout_s
    limit = timedelta(seconds=collective_timeout_s)
    folder = tempfile.TemporaryDirectory()

    def run(rank: int, say: Say) -> None:
        # What is garbage of the parent may have had threads, which the fork has not.
        gc.freeze()
        # Not faulthandler's own timer: it would wait for that of the parent, which no fork has.
        faulthandler.register(signal.SIGALRM, file=2)
        signal.alarm(max(1, int(until_s - monotonic() - _LAST_WORDS_S)))
        torch.set_num_threads(1)
        # A file and no server of this process: that is a thread, and a fork beside it can hang.
        store = dist.FileStore(f"{folder.name}/store", world)  # type: ignore[attr-defined]
        store.set_timeout(limit)
        dist.init_process_group("gloo", timeout=limit, store=store, rank=rank, world_size=world)
        work(rank, say)

    importlib.import_module("torch._dynamo")  # once here, and not in each rank that wraps in DDP

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a fork does not inherit a pool of them
    children = [Child(partial(run, rank)) for rank in range(world)]
    torch.set_num_threads(threads)
    try:
        heard: dict[int, list[object]] = {rank: [] for rank in kill or {}}
        for rank, last in (kill or {}).items():
            while not heard[rank] or heard[rank][-1] != last:
                heard[rank].append(children[rank].hear(max(0.0, until_s - monotonic())))
            children[rank].kill()
    except BaseException:
        for child in children:
            child.kill()
        raise
    finally:
        outcomes, late = [], []
        for rank, child in enumerate(children):
            try:
                outcomes.append(child.wait(max(0.0, until_s - monotonic())))
            except AssertionError as failure:
                late.append(f"rank {rank}: {failure}")
        folder.cleanup()
    if late:
        raise AssertionError("; ".join(late))
    return [
        Outcome(o.status, [*heard.get(rank, []), *o.said], o.error)
        for rank, o in enumerate(outcomes)
    ]


def check_all(outcomes: list[Outcome]) -> list[list[object]]:
    """What each rank said, when all of them ended well.

    Raises:
        AssertionError: One did not; names each that did not.
    """
    bad = [
        f"rank {rank} ended with status {o.status}\n{o.error}"
        for rank, o in enumerate(outcomes)
        if o.status
    ]
    if bad:
        raise AssertionError("\n".join(bad))
    return [o.said for o in outcomes]
