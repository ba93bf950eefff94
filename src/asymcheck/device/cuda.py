"""Copies off a CUDA device: on a stream of their own, behind an event of the boundary.

The host does not wait for the device: the training thread records an event when the state is
live, a side stream waits for it and copies into pinned memory, and the fence makes the current
stream wait for the copies rather than the host. Not run on a machine without a device; the
tests marked ``gpu`` hold it to the path of the CPU bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter

import numpy as np
import torch

from asymcheck.device.tensors import Bytes
from asymcheck.memory.arena import Slot

STAGING_BYTES = 8 << 20


class Pinning:
    """Registers the memory of slots with the driver, each once.

    Where the driver refuses (a limit on locked memory), copies go through a small pinned
    buffer and a copy on the host.
    """

    def __init__(self) -> None:
        self._registered: dict[int, bool] = {}

    def is_pinned(self, slot: Slot) -> bool:
        """Whether the slot's image can be copied into directly; registers it at first."""
        known = self._registered.get(slot.token)
        if known is None:
            whole = slot.content
            address = np.frombuffer(whole, np.uint8).ctypes.data
            status = torch.cuda.cudart().cudaHostRegister(address, whole.nbytes, 0)
            known = int(status) == 0
            self._registered[slot.token] = known
        return known

    def release(self, slot: Slot) -> None:
        """Take a registration back, before the slot is unmapped."""
        if self._registered.pop(slot.token, False):
            address = np.frombuffer(slot.content, np.uint8).ctypes.data
            torch.cuda.cudart().cudaHostUnregister(address)


class Boundary:
    """The moment on each device when the state was live. Made on the training thread.

    Args:
        tensors: What will be copied; only their devices matter.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._events: dict[torch.device, torch.cuda.Event] = {}
        for device in {t.device for t in tensors if t.device.type == "cuda"}:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            self._events[device] = event

    def __bool__(self) -> bool:
        return bool(self._events)

    @property
    def devices(self) -> list[torch.device]:
        """Whose moment it is."""
        return list(self._events)

    def open_streams(self) -> dict[torch.device, torch.cuda.Stream]:
        """A side stream per device that starts after the boundary. On the copying thread, whose
        current stream it becomes: so the profiler's instants lie before and after the copies.
        """
        streams = {}
        for device, event in self._events.items():
            stream = torch.cuda.Stream(device)
            stream.wait_event(event)
            torch.cuda.set_stream(stream)
            streams[device] = stream
        return streams


class StreamTimer:
    """Seconds between two points of the training, as its devices see them, else the host.

    The host never waits for a device here. ``start`` and ``stop`` are for the training thread.

    Args:
        devices: Whose current streams are measured; the slowest counts.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = list(devices)
        self._points: list[tuple[float, list[torch.cuda.Event]]] = []

    def start(self) -> None:
        """Mark the first point."""
        self._mark()

    def stop(self) -> None:
        """Mark the second point."""
        self._mark()

    def seconds(self) -> float | None:
        """What it took, 0 where it never started; ``None`` as long as that is not known."""
        if not self._points:
            return 0.0
        (first_s, starts), (last_s, stops) = self._points[0], self._points[-1]
        if not self._devices:
            return last_s - first_s
        if not all(event.query() for event in stops):
            return None
        spans: list[float] = [a.elapsed_time(b) for a, b in zip(starts, stops, strict=True)]
        return max(spans) * 1e-3

    def _mark(self) -> None:
        events = []
        for device in self._devices:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(device))
            events.append(event)
        self._points.append((perf_counter(), events))


class DeviceCopy:
    """Issues copies of one capture; ``issue`` and ``wait`` are for the copying thread.

    Args:
        boundary: What the copies come after.
        pinned: Whether the target memory is pinned.
    """

    def __init__(self, boundary: Boundary, *, pinned: bool) -> None:
        self._streams = boundary.open_streams()
        self._pinned = pinned
        self._staging: torch.Tensor | None = None
        self._marks: list[tuple[torch.cuda.Event, int]] = []
        self.done: dict[torch.device, torch.cuda.Event] = {}

    def issue(self, source: torch.Tensor, into: Bytes, upto: int) -> None:
        """Copy bytes from a device; with pinned memory this returns at once.

        Args:
            source: Flat bytes on a device, kept alive by the caller until ``wait`` is over.
            into: Host memory of the same length.
            upto: What ``wait`` reports once this piece is there.
        """
        stream = self._streams[source.device]
        event = torch.cuda.Event()
        with torch.cuda.stream(stream):
            if self._pinned:
                torch.from_numpy(into).copy_(source, non_blocking=True)
                event.record(stream)
            else:
                staging = self._staged(source.numel())
                staging.copy_(source, non_blocking=True)
                event.record(stream)
                event.synchronize()
                np.copyto(into, staging.numpy())
        self._marks.append((event, upto))

    def finish_issuing(self) -> None:
        """Record the event of the last piece on each device: the fence waits for these."""
        for device, stream in self._streams.items():
            event = torch.cuda.Event()
            event.record(stream)
            self.done[device] = event

    def wait(self, slot: Slot) -> None:
        """Block until every piece is there, and say so in the slot piece by piece."""
        for event, upto in self._marks:
            event.synchronize()
            slot.copied_bytes = max(slot.copied_bytes, upto)

    def hold_updates(self) -> None:
        """Make each current stream wait for the copies. On the thread that updates."""
        for device, event in self.done.items():
            torch.cuda.current_stream(device).wait_event(event)

    def _staged(self, nbytes: int) -> torch.Tensor:
        if self._staging is None or self._staging.numel() < nbytes:
            self._staging = torch.empty(max(nbytes, STAGING_BYTES), dtype=torch.uint8).pin_memory()
        return self._staging[:nbytes]
