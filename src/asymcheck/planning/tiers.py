"""Where checkpoints stay: which of them go to the store, and which in memory alone."""

from __future__ import annotations

from dataclasses import dataclass

from asymcheck.planning.cadence import EverySeconds, EverySteps


@dataclass(frozen=True, slots=True)
class Placement:
    """Which checkpoints go to the store.

    The others stay in shared memory, the newest whole one always, until the next one is whole.
    One of them goes to the store too when it is the newest at ``close()`` or ``wait()``, and
    when the trainer died: the next ``restore()`` finds it. It survives the death of every
    process of the job, and nothing else: a power loss, a restart of the host or the end of a
    container whose ``/dev/shm`` it lies in takes it away, and training falls back to the newest
    checkpoint in the store.

    After Gemini (Wang et al., SOSP 2023): every step in memory, the store at a low rate.

    Attributes:
        durable: Which go to the store; ``None`` for all of them. It is asked at each capture
            with the step and the time of the latest that went there. One that fails is made
            good by the next.
    """

    durable: EverySteps | EverySeconds | None = None
