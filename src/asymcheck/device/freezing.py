"""Clones of leaves on their own devices: what is cloned may change, and is copied later."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Literal

import torch

from asymcheck.device.cuda import StreamTimer
from asymcheck.device.leaves import Source
from asymcheck.device.placement import Placed
from asymcheck.memory.host import available_bytes
from asymcheck.planning.variants import Trials, Variant


def defer_device_leaves(placed: Placed) -> Placed:
    """Clone eager leaves where they are on a device, so that the host need not wait for it.

    The clones are ordered before the next update by the device itself, and copied to the host
    behind the training like lazy leaves.
    """
    return _with_clones(placed, (i for i in placed.at.elsewhere if not _on_host(placed.sources[i])))


def freeze(placed: Placed) -> Placed:
    """Clone every lazy leaf where it is: the state may change as soon as this returns.

    On a device the clones are queued on the current stream, before the update; the host does
    not wait. On the host this blocks.

    Raises:
        torch.OutOfMemoryError: A device has no room, although ``lacking`` found nothing.
    """
    return _with_clones(placed, placed.at.lazy)


def lacking(placed: Placed) -> str:
    """Which memory ``freeze`` needs and does not find, in words; empty where there is enough."""
    needed: Counter[torch.device] = Counter()
    for i in placed.at.lazy:
        array = placed.sources[i].array
        if isinstance(array, torch.Tensor):
            needed[array.device] += placed.sources[i].spec.nbytes
    for device, nbytes in needed.items():
        free = _free_bytes(device)
        if nbytes > free:
            return f"{nbytes} bytes on {device}, where {free} are free"
    return ""


class Freezer:
    """Decides at each boundary whether the state is cloned first. For the training thread.

    Args:
        asked: As in ``Strategy.capture``.
        warn: Told, once, that there was no memory for a clone.
    """

    def __init__(
        self,
        asked: Literal["lazy", "device-copy", "profiled", "blocking"],
        warn: Callable[[str], None],
    ) -> None:
        self._asked = asked
        self._warn = warn
        self._has_warned = False
        self._trials = Trials()
        self._measured: tuple[Variant, StreamTimer] | None = None

    def freeze(self, placed: Placed) -> Placed | None:
        """Clone what is lazy, where that is asked for or pays, and fits; see ``freeze``.

        Returns:
            ``None`` where the live state is to be copied lazily.
        """
        if self._asked not in ("device-copy", "profiled"):
            return None
        self._note()
        if self._asked == "profiled" and self._trials.choose(fits=True) == "lazy":
            return None
        why = lacking(placed)
        if not why:
            timer = StreamTimer(_cuda_devices(placed))
            try:
                timer.start()
                frozen = freeze(placed)
                timer.stop()
            except torch.OutOfMemoryError as failure:
                why = f"memory in one piece: {failure}"
            else:
                self._measured = ("device-copy", timer)
                return frozen
        if not self._has_warned:
            self._has_warned = True
            self._warn(
                f"a clone of the state needs {why}: capture is lazy whenever that is so; make "
                f"the model or the batch smaller, or take a strategy with capture='lazy'"
            )
        return None

    def is_trial(self, variant: Variant) -> bool:
        """Whether the capture that now goes that way is made to see what it costs."""
        return self._asked == "profiled" and not self._trials.knows(variant)

    def time_fence(self, devices: Iterable[torch.device]) -> StreamTimer | None:
        """What is to measure the fence of a lazy capture, as long as that is to be known."""
        if self._asked != "profiled" or self._trials.is_over:
            return None
        timer = StreamTimer(devices)
        self._measured = ("lazy", timer)
        return timer

    def _note(self) -> None:
        """The capture before is over: what did it cost?"""
        measured, self._measured = self._measured, None
        if measured is None or self._asked != "profiled":
            return
        variant, timer = measured
        stall_s = timer.seconds()
        if stall_s is not None:  # else the device has not come so far: this one does not count
            self._trials = self._trials.note(variant, stall_s)


def _cuda_devices(placed: Placed) -> list[torch.device]:
    arrays = (placed.sources[i].array for i in placed.at.lazy)
    found = {a.device for a in arrays if isinstance(a, torch.Tensor)}
    return [device for device in found if device.type == "cuda"]


def _free_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return available_bytes()
    free, _ = torch.cuda.mem_get_info(device)
    # What torch holds back for later allocations can be had too, as far as it is in one piece.
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _on_host(source: Source) -> bool:
    return not isinstance(source.array, torch.Tensor) or source.array.device.type == "cpu"


def _with_clones(placed: Placed, which: Iterable[int]) -> Placed:
    sources = list(placed.sources)
    for i in which:
        sources[i] = _cloned(sources[i])
    return replace(placed, sources=tuple(sources))


def _cloned(source: Source) -> Source:
    array = source.array
    assert isinstance(array, torch.Tensor)
    plain = array.detach()
    plain = plain.permute(source.spec.order) if source.spec.order else plain
    clone = plain.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    # The clone lies in storage order already; shape and order only matter to the index.
    return source._replace(array=clone, deferred=bool(source.spec.nbytes))
