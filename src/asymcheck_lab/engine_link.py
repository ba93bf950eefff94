"""A link that copies and collectives share, or do not: which partitioner copies at which times?

Layers sleep as long as a layer of ``simulate.Load`` computes, and send its traffic meanwhile: a
thread holds the link for each piece of a collective as long as its bytes take, and so does the
copying thread of the library for each of its pieces. Whoever comes first is served first. On an
independent link each of the two has one of its own. Everything else is the real engine: hooks
measure the windows, κ is learned, plans hold the copy. The same loads, as a fluid, are what
``simulate`` computes; the two are shown side by side.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any

import torch

from asymcheck.device import pacing as pacing_module
from asymcheck.device.pacing import Pace, Pacing
from asymcheck.planning.adaptive import Adaptive
from asymcheck.planning.layout import MiB
from asymcheck.planning.plan import IdleProportional, Partitioner, Uniform, Whole
from asymcheck.planning.strategies import Strategy
from asymcheck_lab.record import median
from asymcheck_lab.simulate import Load, PolicyName, Slot, simulate

if TYPE_CHECKING:
    from asymcheck_lab.engine_spec import EngineSpec

PARTITIONERS: dict[str, tuple[Partitioner, PolicyName]] = {
    "free-running": (Whole(), "free"),
    "equal slots": (Uniform(), "equal"),
    "idle-proportional": (IdleProportional(), "proportional"),
    "adaptive": (Adaptive(), "adaptive"),
}
"""By name: the value, and what ``simulate`` calls it."""

LINK_BYTES_PER_S = 600e6
LAYERS = 6
COMM_RATIO = 0.6
PIECE_BYTES = MiB
_PLAIN_FIRST = 4
_SETTLED, _LEARNED = 3, 8
"""Pairs of a step with a copy and one without, before the counted ones: plans need windows and
bandwidth, the adaptive one needs κ too."""


def load_of(state_bytes: int, step_s: float, *, shared: bool) -> Load:
    """The load, as ``simulate`` knows it."""
    return Load(
        state_bytes, LINK_BYTES_PER_S, COMM_RATIO, shared, layers=LAYERS, step_s=step_s
    )  # fmt: skip


class Link:
    """Held by one user at a time, in the order in which they came, as long as its bytes take."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0
        self._lock = threading.Lock()

    def reserve(self, nbytes: int) -> tuple[float, float]:
        """When the link is ours for so many bytes: from and until, on ``perf_counter``'s clock."""
        with self._lock:
            begin_s = max(self._free_s, perf_counter())
            self._free_s = begin_s + nbytes / self._bytes_per_s
            return begin_s, self._free_s

    def move(self, nbytes: int) -> None:
        """Hold the link for so many bytes; blocks until they have passed."""
        sleep_until(self.reserve(nbytes)[1])


def sleep_until(at_s: float) -> None:
    """Block until then, on ``perf_counter``'s clock."""
    while (left_s := at_s - perf_counter()) > 0.0:
        sleep(left_s)


class Network:
    """A thread that carries out collectives, one after the other, as a stream of NCCL's would.

    Args:
        link: What they go over.
        around: A context that each of them runs in.
    """

    def __init__(self, link: Link, around: Callable[[], Any]) -> None:
        self._link = link
        self._around = around
        self._jobs: queue.SimpleQueue[tuple[int, threading.Event] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="asymlab-network", daemon=True)
        self._thread.start()

    def send(self, nbytes: int) -> threading.Event:
        """Start a collective; the event is set once it is over."""
        done = threading.Event()
        if nbytes:
            self._jobs.put((nbytes, done))
        else:
            done.set()
        return done

    def close(self) -> None:
        """End the thread."""
        self._jobs.put(None)
        self._thread.join(10.0)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            nbytes, done = job
            with self._around():
                while nbytes > 0:
                    self._link.move(min(nbytes, PIECE_BYTES))
                    nbytes -= PIECE_BYTES
            done.set()


class LinkedPace:
    """A pace whose pieces hold a link, once they may go: each is copied while it holds it."""

    def __init__(self, pace: Pace, link: Link) -> None:
        self._pace, self._link = pace, link
        self._held_until_s = 0.0
        self.piece_bytes = min(PIECE_BYTES, pace.piece_bytes)
        self.let_go = pace.let_go

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  whatever a pace has
        return getattr(self._pace, name)

    def wait(self, nbytes: int) -> None:
        """See ``Pace``."""
        sleep_until(self._held_until_s)
        self._pace.wait(nbytes)
        begin_s, self._held_until_s = self._link.reserve(nbytes)
        sleep_until(begin_s)

    def done(self) -> None:
        """See ``Pace``."""
        sleep_until(self._held_until_s)
        self._pace.done()


def lay_over(pacing: Pacing, link: Link) -> None:
    """Have every copy of this engine hold the link for its bytes."""
    plan: Callable[[int], Pace] = pacing.plan

    def linked(lazy_bytes: int) -> Any:  # noqa: ANN401  it answers the same calls
        return LinkedPace(plan(lazy_bytes), link)

    setattr(pacing, "plan", linked)  # noqa: B010  a method of one object


def measure_link(spec: EngineSpec) -> dict[str, Any]:
    """Steps with and without a copy in turn, each pair compared.

    Returns:
        Seconds from a boundary to the end of the next fence: ``with_s`` of each counted
        checkpoint, and ``without_s`` of the step right before it.
    """
    from asymcheck_lab.engine_run import Clocked, Synthetic, _kappa

    load = load_of(spec.state_bytes, spec.step_s, shared=spec.shared)
    slots = load.slots()
    copies = Link(LINK_BYTES_PER_S)
    traffic = copies if spec.shared else Link(LINK_BYTES_PER_S)
    partitioner, policy = PARTITIONERS[spec.case]
    network: Network

    def work_of(layer: int) -> Callable[[int], None]:
        forward, backward = slots[layer], slots[2 * LAYERS - 1 - layer]

        def work(units: int) -> None:
            slot: Slot = forward if units == 1 else backward
            sent = network.send(round(slot.comm_s * LINK_BYTES_PER_S))
            sleep(slot.compute_s)
            sent.wait()

        return work

    torch.manual_seed(0)
    model = Synthetic(spec.state_bytes, [work_of(i) for i in range(LAYERS)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    clocked = Clocked(model, optimizer, Strategy(partitioner=partitioner), spec.root)
    lay_over(clocked.pacing, copies)
    # A training saves at every tenth step or less often, and measures a step before each save.
    setattr(pacing_module, "_SELDOM", 1)  # noqa: B010
    network = Network(traffic, clocked.pacing.collective)
    for _ in range(_PLAIN_FIRST):
        clocked.cycle(model.forward_and_backward, save=False)
    with_s: list[float] = []
    without_s: list[float] = []
    settled = _LEARNED if spec.case == "adaptive" else _SETTLED
    for number in range(settled + spec.checkpoints):
        plain = clocked.cycle(model.forward_and_backward, save=False)
        copied = clocked.cycle(model.forward_and_backward, save=True)
        clocked.settle()
        if number >= settled:
            without_s.append(plain.window_s + plain.fence_s)
            with_s.append(copied.window_s + copied.fence_s)
    clocked.settle()
    network.close()
    pacing = clocked.pacing
    decision = pacing.decision
    assert decision is not None
    return {
        "with_s": with_s,
        "without_s": without_s,
        "overhead": median(a / b - 1.0 for a, b in zip(with_s, without_s, strict=True)),
        "simulated": simulate(replace(load, lazy_bytes=spec.state_bytes), policy).overhead,
        "bandwidth_bytes_per_s": pacing.copy_bytes_per_s,
        "free_running": decision.plan.free_running,
        "decision": decision.why,
        "kappa": _kappa(pacing),
        "comm_ratio": COMM_RATIO,
        "copy_by_idle": spec.state_bytes
        / LINK_BYTES_PER_S
        / sum(max(0.0, s.compute_s - s.comm_s) for s in slots),
    }
