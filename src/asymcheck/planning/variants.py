"""Which of two ways to capture costs training less: found out once, at the first captures.

The rule of CheckFreq (Mohan, Phanishayee, Chidambaram: "CheckFreq: Frequent, Fine-Grained DNN
Checkpointing", FAST 2021): profile both variants, then take the cheaper one that fits into memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

Variant = Literal["device-copy", "lazy"]
"""``device-copy`` clones the state where it is before training goes on, ``lazy`` copies it
behind the next forward and backward pass."""

TRIES = 3
"""Captures of each variant that are measured."""


@dataclass(frozen=True, slots=True)
class Trials:
    """What each variant was measured to cost, in seconds that training waited for a capture.

    Nothing is ever tried again, however the training changes: CheckFreq profiles once, too.

    Attributes:
        device_copy_s: T_g: of making the clone, each time.
        lazy_s: max(0, T_c − T_fb): of the fence before the update, each time.
    """

    device_copy_s: tuple[float, ...] = ()
    lazy_s: tuple[float, ...] = ()

    @property
    def is_over(self) -> bool:
        """Whether both are known."""
        return self.knows("device-copy") and self.knows("lazy")

    def knows(self, variant: Variant) -> bool:
        """Whether it was measured as often as it is to be."""
        return len(self.lazy_s if variant == "lazy" else self.device_copy_s) >= TRIES

    def note(self, variant: Variant, stall_s: float) -> Trials:
        """The same, with one more measurement; what is known already stays as it is.

        Args:
            variant: What was measured.
            stall_s: Seconds that training waited for it.
        """
        if variant == "lazy":
            return replace(self, lazy_s=(*self.lazy_s, stall_s)[:TRIES])
        return replace(self, device_copy_s=(*self.device_copy_s, stall_s)[:TRIES])

    def choose(self, *, fits: bool) -> Variant:
        """The variant of the next capture.

        Both are tried in turn until both are known; from then on it is the one whose median is
        less, the lazy one where they are equal: it needs no memory.

        Args:
            fits: Whether there is memory for a clone of the state now.
        """
        if not fits:
            return "lazy"
        if not self.is_over:
            return "lazy" if len(self.lazy_s) < len(self.device_copy_s) else "device-copy"
        return "device-copy" if median(self.device_copy_s) < median(self.lazy_s) else "lazy"
