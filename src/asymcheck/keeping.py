"""What becomes of a captured checkpoint: it goes to the store, or stays in memory, or both.

With a ``Placement`` that keeps some in memory the newest whole checkpoint stays in its slot until
the next one is whole. So there always is one, also while another is being captured, and whoever
starts the job after the death of this process finds it there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_futures
from dataclasses import dataclass, field, replace
from time import monotonic, perf_counter
from typing import Literal

from asymcheck.capture import CanaryWatch, Capture
from asymcheck.device.snapshot import LazyCopy
from asymcheck.errors import DroppedCheckpoint
from asymcheck.handles import Handle, How, SaveReport, report_of
from asymcheck.hashing import leave_hashes
from asymcheck.memory.arena import Arena, GivenUp, Slot
from asymcheck.messages import Durable
from asymcheck.persister import Persister
from asymcheck.planning.layout import Extent
from asymcheck.planning.tiers import Placement
from asymcheck.tracing import Tracer

User = Literal["copy", "persister", "memory"]


@dataclass
class Active:
    """One capture, from its boundary until nobody uses its slot.

    Attributes:
        copy: Of its leaves.
        described: What it is.
        handle: What the caller holds.
        how: How it is captured.
        eager_bytes: Copied at the boundary.
        canaries: As they were at the boundary, where capture blocks.
        to_store: Whether it goes to the store.
        users: Of the slot.
        is_compared: Whether the versions were compared.
        step_stall_s: See ``SaveReport``.
        fence_stall_s: See ``SaveReport``.
        is_trial: See ``SaveReport``.
        dropped: Why it was.
    """

    copy: LazyCopy
    described: Capture
    handle: Handle
    how: How
    eager_bytes: int
    canaries: bytes
    to_store: bool = True
    users: set[User] = field(default_factory=lambda: {"copy", "persister"})
    is_compared: bool = False
    step_stall_s: float = 0.0
    fence_stall_s: float = 0.0
    is_trial: bool = False
    dropped: DroppedCheckpoint | None = None

    @property
    def slot(self) -> Slot:
        """Where it is."""
        return self.copy.slot


class Keeper:
    """Gives captures to the persister and keeps the newest whole one in memory, as placed.

    Args:
        placement: Which go to the store.
        arena: Gets the slots back.
        persister: Takes what goes to the store.
        tracer: Is told of what became durable.
        waits: Whether training waits until a checkpoint is durable.
        keeps_nameless: Whether memory without a name is as good as the store, which ends with
            this process too.
        warn: Told, once, that nothing can be kept in memory.

    Attributes:
        latest_step: That training is at, for the lag.
    """

    def __init__(
        self,
        placement: Placement,
        arena: Arena,
        persister: Persister,
        tracer: Tracer | None,
        *,
        waits: bool,
        keeps_nameless: bool,
        warn: Callable[[str], None],
    ) -> None:
        self._cadence = placement.durable
        self._arena = arena
        self._persister = persister
        self._tracer = tracer
        self._waits = waits
        self._keeps_nameless = keeps_nameless
        self._warn = warn
        self._has_warned = False
        self._lock = threading.Lock()
        self._stored_step, self._stored_s = 0, monotonic()
        self._is_owed = False
        self._newest: Active | None = None
        self._held: Active | None = None
        self._late: list[Handle] = []
        self.latest_step = 0

    @property
    def slots_in_use(self) -> int:
        """Slots that are needed before the first save is over."""
        return 1 if self._cadence is None else 2

    # --- on the training thread ---------------------------------------------

    def place(self, active: Active) -> None:
        """Decide at the boundary where it goes."""
        if self._cadence is None:
            return
        active.to_store = self._is_due(active)
        active.users = {"copy", "memory", "persister"} if active.to_store else {"copy", "memory"}

    def start(self, active: Active) -> None:
        """It is about to be copied: from now on somebody will settle it.

        What goes to the store is followed by the persister as soon as its slot is being filled.
        That was decided at the boundary: what is small is whole already, and may be on its way to
        the store before the copying thread has seen it.
        """
        self._newest = active
        if "persister" in active.users:
            active.copy.before = lambda: self._submit(active, active.handle)

    def make_way(self) -> None:
        """Keep nothing in memory any more: what is there alone goes to the persister now."""
        with self._lock:
            active, self._held = self._held, None
            if active is None:
                return
            submits, active.to_store = not active.to_store, True
            if submits:
                active.users.add("persister")
        if submits:
            self._note_stored(active.handle.step)
            handle = Handle(active.handle.step, active.handle.captured, Future())
            self._late.append(handle)
            self._submit(active, handle)
        self.release(active, "memory")

    def drain(self) -> list[Handle]:
        """Have the newest checkpoint go to the store; blocks until its copy is complete.

        Nothing may be left to seal.

        Returns:
            What ``late`` does.
        """
        newest = self._newest
        if newest is not None and not newest.to_store:
            wait_futures([newest.handle.durable])
        self.make_way()
        return self.late()

    def late(self) -> list[Handle]:
        """Handles of checkpoints that went to the store after all since the latest call."""
        found, self._late = self._late, []
        return found

    def _is_due(self, active: Active) -> bool:
        if active.slot.path is None and not self._keeps_nameless:
            if not self._has_warned:
                self._has_warned = True
                self._warn(
                    "placement: the memory for checkpoints has no name here and ends with this "
                    "process, so each of them goes to the store; see 'asymcheck doctor'"
                )
            return True
        step, since_s = active.handle.step, monotonic() - self._stored_s
        assert self._cadence is not None
        due = self._cadence.due(
            step=step, last_step=self._stored_step, since_last_s=since_s, under_way=0
        )
        due |= self._is_owed
        if due:
            self._note_stored(step)
        return due

    def _note_stored(self, step: int) -> None:
        self._is_owed = False
        self._stored_step, self._stored_s = step, monotonic()

    # --- on the copying thread, but for what is whole at its boundary -------

    def check(self, active: Active) -> None:
        """Before it takes the place of the newest whole one: is it? Nobody else will look.

        Raises:
            DroppedCheckpoint: It changed while it was copied.
        """
        if "memory" in active.users:
            image = active.slot.image
            canaries = CanaryWatch(active.described, active.slot.canaries)
            canaries.compare(Extent(0, len(image)), image)
            canaries.refuse()

    def settle(self, active: Active) -> None:
        """It is sealed, or dropped; again does nothing."""
        if "memory" not in active.users:
            return
        durable = active.handle.durable
        if active.dropped is not None:
            self.release(active, "memory")
            if not active.to_store and not durable.done():
                durable.set_exception(active.dropped)
            return
        if not active.to_store:  # else the persister hashes it
            leave_hashes(active.slot, active.described)
        with self._lock:
            older, self._held = self._held, active
        if older is not None and older is not active:
            self.release(older, "memory")
        if not active.to_store and not durable.done():
            self._tell(active, active.handle, self._report(active))

    def release(self, active: Active, user: User) -> None:
        """The slot is free when nobody uses it any more."""
        with self._lock:
            unused = active.users == {user}
            active.users.discard(user)
        if unused:
            self._arena.free(active.slot)

    def _submit(self, active: Active, handle: Handle) -> None:
        try:
            durable = self._persister.begin(
                active.slot, active.copy.step, lambda: self.release(active, "persister")
            )
        except BaseException as failure:  # noqa: BLE001  whoever waits for it sees it
            durable = Future()
            durable.set_exception(failure)
        durable.add_done_callback(lambda done: self._persisted(active, handle, done))

    def _persisted(self, active: Active, handle: Handle, done: Future[Durable]) -> None:
        failure = done.exception()
        self.release(active, "persister")
        if failure is None:
            self._tell(active, handle, self._completed(active, done.result()))
            return
        gave_up = isinstance(active.copy.failure, GivenUp)
        if isinstance(failure, DroppedCheckpoint) and not gave_up:
            failure = active.dropped or failure
        handle.durable.set_exception(failure)
        self._is_owed = True
        active.to_store = False  # so it is tried again, where it is still held

    def _tell(self, active: Active, handle: Handle, report: SaveReport) -> None:
        if self._tracer is not None and handle is active.handle:
            self._tracer.durable(report)
        handle.durable.set_result(report)

    def _completed(self, active: Active, found: Durable) -> SaveReport:
        # Who waits for all of it waits for the copy too, and no update does.
        step_stall_s = found.durable_s if self._waits else active.step_stall_s
        report = report_of(found, active.eager_bytes, step_stall_s, active.how)
        return replace(
            report,
            fence_stall_s=0.0 if self._waits else active.fence_stall_s,
            copy_s=active.copy.duration_s,
            cpu_s=report.cpu_s + active.copy.cpu_s,
            lag_steps=max(0, self.latest_step - report.step),
            is_trial=active.is_trial,
            tiers=self._persister.board.states(),
        )

    def _report(self, active: Active) -> SaveReport:
        """Of what is whole in memory, and stays there."""
        at, since_s = active.described.at, perf_counter() - active.described.boundary_s
        found = Durable(
            step=at.step,
            attempt=at.attempt,
            raw_bytes=active.described.raw_bytes,
            stored_bytes=0,
            persist_s=0.0,
            durable_s=since_s,
            cpu_s=0.0,
        )
        report = replace(self._completed(active, found), tier="memory")
        # Where capture blocks, training still waits for what is done here.
        return report if report.step_stall_s else replace(report, step_stall_s=since_s)
