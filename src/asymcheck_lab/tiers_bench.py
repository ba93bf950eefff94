"""How long a restore takes out of each tier, beside a plain copy of as many bytes in memory."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn

from asymcheck import Checkpointer, Strategy
from asymcheck.errors import CheckpointError
from asymcheck.handover import persisters_of
from asymcheck.planning.cadence import EverySteps
from asymcheck.planning.policy import Admission
from asymcheck.planning.tiers import Placement, Tier, spoken_url
from asymcheck.storage.repository import open_repository
from asymcheck.storage.store import open_store
from asymcheck.testing.children import Say, run_in_child
from asymcheck_lab.bench import newest_session
from asymcheck_lab.bench_child import run_root
from asymcheck_lab.bench_stats import estimate
from asymcheck_lab.errors import LabError, RunError, UsageError

BEGIN, END = "<!-- restore times: begin -->", "<!-- restore times: end -->"
MEMORY, UNHASHED, ROOT = "shared memory", "shared memory, not hashed", "root"
_MIB = 1 << 20
_TENSORS = 16
_WAIT_S = 120.0


@dataclass(frozen=True, slots=True)
class TierSeconds:
    """One restore.

    Attributes:
        tier: ``shared memory``, the same and ``not hashed``, ``root``, or where it is.
        round: Which one, from 1 on.
        restored_bytes: What was loaded.
        restore_s: From making the ``Checkpointer`` until the state was back.
        memcpy_s: A copy of as many bytes from memory to memory in the same round.
    """

    tier: str
    round: int
    restored_bytes: int
    restore_s: float
    memcpy_s: float


def measure_tiers(
    *, mib: int, rounds: int, tiers: Sequence[str], folder: Path
) -> list[TierSeconds]:
    """Restore the same state out of shared memory, the root and each tier, in turns; blocks.

    A restore out of shared memory begins with a trainer that is killed once its state is whole and
    hashed there: it is read there, and made durable after the restore. Where its persister was
    killed too, before it had hashed anything, the slot is made durable first, then loaded.

    Args:
        mib: Size of the state, in MiB.
        rounds: How often.
        tiers: URLs of further places, each with ``NAME=`` in front or spoken of by its scheme;
            what is written there stays.
        folder: The root goes below it, and is removed at the end.

    Raises:
        UsageError: A number is wrong.
        RunError: Something else came back than was saved.
        LabError: The medium failed.
    """
    for name, value in (("mib", mib), ("rounds", rounds)):
        if value < 1:
            raise UsageError(f"{name}: expected at least 1, found {value}")
    torch.set_num_threads(1)  # before anything: a fork does not have the threads of its parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [
            found for number in range(1, rounds + 1) for found in _round(number, mib, tiers, folder)
        ]
    except OSError as failure:
        raise LabError(f"{failure.filename}: {failure.strerror}") from failure
    except CheckpointError as failure:
        raise RunError(str(failure)) from failure


def _round(number: int, mib: int, tiers: Sequence[str], folder: Path) -> list[TierSeconds]:
    saved = _module(mib, 1)
    found = []
    with run_root(folder) as scratch:
        root = str(scratch / "root")
        places = [_place(text, f"round-{number}-{os.getpid()}") for text in tiers]
        with Checkpointer(root, state={"m": saved}, tiers=places, ranks="alone") as ckpt:
            ckpt.restore()
            ckpt.save(1)
            for tier in places:
                if not ckpt.wait(_WAIT_S, tier=tier.label):
                    raise RunError(f"tier {tier.label} did not get its checkpoint")
        memcpy_s = _memcpy_s(saved)
        for name, url in ((ROOT, root), *((t.name, str(t.url)) for t in places)):
            spent = _restore(url, saved, mib, read_only=True)
            found.append(TierSeconds(name, number, _nbytes(saved), spent, memcpy_s))
        for name, die in ((MEMORY, _save_and_die), (UNHASHED, _die_unhashed)):
            other = str(scratch / die.__name__)
            ended = run_in_child(partial(die, other, mib))
            if name == UNHASHED:
                _signal_persisters(other, signal.SIGKILL)
            if not ended.was_killed:
                raise RunError("the trainer that was to be killed ended by itself")
            spent = _restore(other, saved, mib, read_only=False)
            found.append(TierSeconds(name, number, _nbytes(saved), spent, memcpy_s))
    return found


def _save_and_die(root: str, mib: int, say: Say) -> None:
    strategy = Strategy(
        admission=Admission(max_in_flight=2), placement=Placement(durable=EverySteps(1000))
    )
    ckpt = Checkpointer(root, state={"m": _module(mib, 1)}, strategy=strategy, ranks="alone")
    ckpt.restore()
    say(ckpt.save(1).durable.result(_WAIT_S).tier)
    os.kill(os.getpid(), signal.SIGKILL)


def _die_unhashed(root: str, mib: int, say: Say) -> None:
    with_room = Strategy(admission=Admission(max_in_flight=2))
    ckpt = Checkpointer(root, state={"m": _module(mib, 1)}, strategy=with_room, ranks="alone")
    ckpt.restore()
    _signal_persisters(root, signal.SIGSTOP)
    ckpt.save(1).captured.result(_WAIT_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _signal_persisters(root: str, number: signal.Signals) -> None:
    for persister, _ in persisters_of(open_repository(open_store(root)).run):
        os.kill(persister.pid, number)


def _restore(url: str, saved: nn.Module, mib: int, *, read_only: bool) -> float:
    live = _module(mib, 2)
    begin_s = perf_counter()
    ckpt = Checkpointer(url, state={"m": live}, read_only=read_only, ranks="alone")
    step = ckpt.restore(resume="must")
    spent = perf_counter() - begin_s
    ckpt.close()
    pairs = zip(saved.parameters(), live.parameters(), strict=True)
    if step != 1 or not all(torch.equal(mine, theirs) for mine, theirs in pairs):
        raise RunError(f"{spoken_url(url)}: what was loaded is not what was saved")
    return spent


def _module(mib: int, seed: int) -> nn.Module:
    made = torch.Generator().manual_seed(seed)
    each = mib * _MIB // 4 // _TENSORS
    values = (torch.randn(max(1, each), generator=made) for _ in range(_TENSORS))
    return nn.ParameterList([nn.Parameter(value) for value in values])


def _nbytes(module: nn.Module) -> int:
    return sum(param.nbytes for param in module.parameters())


def _memcpy_s(module: nn.Module) -> float:
    target = [torch.empty_like(param) for param in module.parameters()]
    spent: list[float] = []
    for _ in range(2):  # the first one finds memory that was never touched
        begin_s = perf_counter()
        for mine, param in zip(target, module.parameters(), strict=True):
            mine.copy_(param.detach())
        spent.append(perf_counter() - begin_s)
    return spent[-1]


def _place(text: str, folder: str) -> Tier:
    name, _, url = text.partition("=")
    if "://" in name or not url:
        name, url = text.partition("://")[0], text
    where, mark, query = url.partition("?")
    return Tier(f"{where.rstrip('/')}/{folder}{mark}{query}", name=name)


def render(records: Sequence[dict[str, Any]]) -> str:
    """The newest session as a table; empty without records."""
    if not records:
        return ""
    shown = newest_session(records)
    first = shown[0]
    size = first["restored_bytes"] / 1e6
    copied = estimate([r["memcpy_s"] for r in shown])
    lines = [
        f"Measured {first['session'][:10]}, commit `{first['commit'][:12]}`, "
        f"{first['machine']['cpu']}, by "
        f"`{first['command']}`: {size:.0f} MB, medians of {max(r['round'] for r in shown)} rounds. "
        f"A copy in memory takes {copied.median:.3f} s, {size / 1e3 / copied.median:.1f} GB/s.",
        "",
        "| out of | restore, s | GB/s | of a copy in memory |",
        "| --- | ---: | ---: | ---: |",
    ]
    for tier in dict.fromkeys(r["tier"] for r in shown):
        mine = [r for r in shown if r["tier"] == tier]
        took = estimate([r["restore_s"] for r in mine])
        share = estimate([r["memcpy_s"] / r["restore_s"] for r in mine]).median
        lines.append(
            f"| {tier} | {took.median:.2f} ({took.low:.2f} to {took.high:.2f}) | "
            f"{size / 1e3 / took.median:.2f} | {share:.2f} |"
        )
    return "\n".join(lines) + "\n"
