"""What a mechanism costs in the long run, in closed form: stall, latency, shortest interval.

One rank saves every so many steps, for ever. Its steps are a window of forward and backward, in
which the state does not change, and an update. Copy, encoding and store work at fixed rates and
one piece after the other. Nothing varies and nothing disturbs anything else, so these are what a
measurement on a quiet machine can be held against. ``asymcheck_lab.timeline`` plays the same
through event by event. Formulas and their derivation: docs/cadence.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from asymcheck.errors import OptionError

_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What there is to do, in seconds where nothing else is done.

    Attributes:
        step_s: A step without checkpoints, t.
        window_s: Its forward and backward pass, T_fb.
        copy_s: Copying the state to the host, D = S / B_d2h.
        write_s: Writing what is stored of it, W = S_out / B_st, by all writers together.
        encode_s: Encoding it, C.
        device_s: Copying it within the device, G = S / B_hbm.
        commit_s: Syncing it and saying that it is there, K: once, when all is written and sealed.
        release_s: From when it is durable until its writer and its slot are free, F: retention,
            and what is measured for the next one.
    """

    step_s: float
    window_s: float
    copy_s: float
    write_s: float
    encode_s: float = 0.0
    device_s: float = 0.0
    commit_s: float = 0.0
    release_s: float = 0.0

    def __post_init__(self) -> None:
        names = ("copy_s", "write_s", "encode_s", "device_s", "commit_s", "release_s")
        for name in names:
            if not 0.0 <= getattr(self, name) < math.inf:
                raise OptionError(f"{name}: expected seconds from 0, found {getattr(self, name)!r}")
        if not 0.0 <= self.window_s <= self.step_s or not 0.0 < self.step_s < math.inf:
            raise OptionError(
                f"step_s: expected a step above 0 s and a window within it, found {self.step_s!r} "
                f"and {self.window_s!r}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Mechanism:
    """How it is done.

    Attributes:
        capture: ``blocking`` copies to the host before training goes on; ``lazy`` behind the next
            window, and the update waits for it; ``device`` copies within the device before
            training goes on, and to the host at any time.
        persist: ``before`` has training wait until the checkpoint is durable.
        sealed: When it is known that the copy is whole; nothing is durable before: as soon as it
            is ``copied``, or at the ``fence`` of the next update. The latter only of a lazy
            capture that training does not wait for.
        max_in_flight: N, checkpoints that have begun and are not durable.
        pieces: m, equal ones. A piece that was copied is encoded and written while the next is
            copied; 1 is one stage after the other.
        ring_pieces: Pieces that are copied and not written, at most; ``None`` for any number. Only
            of a lazy capture, and enough for one in each stage.
    """

    capture: Literal["blocking", "lazy", "device"] = "lazy"
    persist: Literal["behind", "before"] = "behind"
    sealed: Literal["copied", "fence"] = "copied"
    max_in_flight: int = 1
    pieces: int = 1
    ring_pieces: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_in_flight", "pieces"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise OptionError(
                    f"{name}: expected an integer from 1 on, found {getattr(self, name)!r}"
                )
        if self.ring_pieces is not None and (self.ring_pieces < 3 or self.capture != "lazy"):
            raise OptionError(
                f"ring_pieces: expected at least 3, one for each stage, and a lazy capture, found "
                f"{self.ring_pieces} and {self.capture}"
            )
        if self.sealed == "fence" and (self.capture, self.persist) != ("lazy", "behind"):
            raise OptionError(
                f"sealed: expected 'copied' where no fence follows, found 'fence' with "
                f"{self.capture} and {self.persist}"
            )


class Steady(NamedTuple):
    """One checkpoint of many, on average; seconds.

    Attributes:
        boundary_s: Training waits for what is copied at the boundary, or until it is durable.
        fence_s: The update waits for the copy.
        wait_s: Training waits for earlier checkpoints: at the boundary for one of them to be
            durable, with a ring also at the fence for room in it.
        durable_s: From the boundary until it is durable, waits included.
        period_s: From one checkpoint to the next.
    """

    boundary_s: float
    fence_s: float
    wait_s: float
    durable_s: float
    period_s: float

    @property
    def stall_s(self) -> float:
        """All that training waits for one checkpoint, s."""
        return self.boundary_s + self.fence_s + self.wait_s


def steady_state(work: Work, how: Mechanism, interval_steps: int) -> Steady:
    """What each checkpoint costs in the long run, with one every ``interval_steps``.

    Raises:
        OptionError: A ring whose writer is not free at once: that has no form here.
    """
    if how.ring_pieces is not None and work.commit_s + work.release_s:
        raise OptionError(
            f"commit_s, release_s: expected 0 with a ring, found {work.commit_s!r} and "
            f"{work.release_s!r}"
        )
    own_s = how_long(work, how)
    boundary_s, fence_s = _stalls_s(work, how)
    work_s = interval_steps * work.step_s
    alone_s = work_s + boundary_s + fence_s
    period_s = max(alone_s, _least_period_s(work, how))
    wait_s = period_s - alone_s
    latency_s = own_s
    if wait_s > _ROUNDING * period_s:
        # A slot is waited for at the boundary, where the state already is what is saved.
        latency_s = own_s + wait_s
        if how.persist == "behind":
            latency_s = how.max_in_flight * period_s - work.release_s + wait_s
        longest_s = _bottleneck_s(work)
        if how.ring_pieces is not None and period_s <= longest_s * (1.0 + _ROUNDING):
            # That stage never rests, so its pieces are evenly spaced; a full ring is waited for at
            # the fence, before all slots are taken.
            at_fence_s = period_s - work_s + work.window_s
            full_s = at_fence_s + (how.ring_pieces * longest_s - work.copy_s) / how.pieces
            latency_s = min(latency_s, full_s)
    return Steady(boundary_s, fence_s, wait_s, latency_s, period_s)


def average_state(works: Sequence[Work], how: Mechanism, interval_steps: int) -> Steady:
    """What one of several checkpoints costs on average that differ and come by turns.

    With one in flight a checkpoint waits for nothing but the one before, so each adds what it
    costs among its own kind: exact however they differ.

    Args:
        works: Of each in turn; of the same training, so steps and windows are the same.
        how: The mechanism.
        interval_steps: Steps from one checkpoint to the next.

    Raises:
        OptionError: They differ and several are in flight, or there is none.
    """
    if not works or (how.max_in_flight > 1 and len(set(works)) > 1):
        raise OptionError(
            f"works: expected at least one, and all the same with {how.max_in_flight} in flight, "
            f"found {len(set(works))} different ones"
        )
    found = [steady_state(work, how, interval_steps) for work in works]
    return Steady(*(math.fsum(field) / len(found) for field in zip(*found, strict=True)))


def least_interval_steps(work: Work, how: Mechanism) -> int:
    """The fewest steps between checkpoints that never wait for earlier ones."""
    boundary_s, fence_s = _stalls_s(work, how)
    free_s = _least_period_s(work, how) - boundary_s - fence_s
    return max(1, math.ceil(free_s / work.step_s * (1.0 - _ROUNDING)))


def how_long(work: Work, how: Mechanism) -> float:
    """Seconds from the boundary until a checkpoint is durable that waits for no other, L."""
    m = how.pieces
    stages = [work.copy_s, work.encode_s, work.write_s]
    before_s = 0.0
    if how.capture == "blocking":
        before_s = stages.pop(0)
    elif how.capture == "device":
        before_s = work.device_s
    written_s = before_s + math.fsum(stages) / m + (m - 1) / m * max(stages)
    sealed_s = work.window_s + _stalls_s(work, how)[1] if how.sealed == "fence" else 0.0
    return max(written_s, sealed_s) + work.commit_s


def _stalls_s(work: Work, how: Mechanism) -> tuple[float, float]:
    """At the boundary and at the fence, of a checkpoint that waits for no other."""
    if how.persist == "before":
        return how_long(work, how), 0.0
    if how.capture == "blocking":
        return work.copy_s, 0.0
    if how.capture == "device":
        return work.device_s, 0.0
    copied_s = work.copy_s
    if how.ring_pieces is not None and how.pieces > how.ring_pieces:
        # The last piece is copied when the one that is a ring before it was written.
        written = (how.pieces - how.ring_pieces - 1) * _bottleneck_s(work)
        each = work.copy_s + work.encode_s + work.write_s
        copied_s = max(copied_s, (written + each + work.copy_s) / how.pieces)
    return 0.0, max(0.0, copied_s - work.window_s)


def _least_period_s(work: Work, how: Mechanism) -> float:
    """What stages and slots allow, whatever training does."""
    slot_s = how_long(work, how) + work.release_s
    return max(_bottleneck_s(work), slot_s / how.max_in_flight)


def _bottleneck_s(work: Work) -> float:
    return max(work.copy_s, work.encode_s, work.write_s + work.commit_s + work.release_s)
