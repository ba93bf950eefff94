"""Where checkpoints stay: in memory alone, in the home store, and in copies further away."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from asymcheck.errors import OptionError
from asymcheck.planning.cadence import EverySeconds, EverySteps
from asymcheck.planning.retention import CheckpointId


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


@runtime_checkable
class HasUrl(Protocol):
    """Something that says where it is; a store."""

    @property
    def url(self) -> str:
        """Where it is."""
        ...


@runtime_checkable
class _HasPath(Protocol):
    def __fspath__(self) -> str: ...


_USER = re.compile(r"(?<=://)[^/?#]*@")


def spoken_url(url: str) -> str:
    """A URL without query and user, as it may stand in a message or a report."""
    return _USER.sub("", url.partition("?")[0])


@dataclass(frozen=True, slots=True)
class Tier:
    """A further place for copies of the checkpoints of a run.

    The root of a ``Checkpointer`` is the home tier: there attempts are claimed and checkpoints
    committed. Every other tier holds byte-equal copies of the same run under the same names, so
    whatever reads a root reads a tier.

    Attributes:
        url: A directory or a URL; a store is taken as it is.
        every: Which checkpoints of the home tier go here; ``None`` for each one. Of those that
            wait the newest is taken. The newest of all comes here too at ``close()`` and
            ``wait(tier=…)``. Seconds are those between captures, as the checkpoints say.
        keep_last: How many stay here; ``None`` keeps all. The newest always stays, and what it
            stands on.
        name: How it is spoken of; without one, its URL without query and user.
        verify: What is looked at before a copy counts. ``read`` reads back every byte and
            compares the hashes of all chunks; ``size`` looks at lengths alone, which is half the
            traffic, and trusts the medium.

    Raises:
        OptionError: A value is of the wrong kind or out of range.
    """

    url: str | HasUrl
    every: EverySteps | EverySeconds | None = None
    keep_last: int | None = None
    name: str = ""
    verify: Literal["read", "size"] = "read"

    def __post_init__(self) -> None:
        found: object = self.url
        if isinstance(found, _HasPath):
            found = found.__fspath__()
            object.__setattr__(self, "url", found)
        if isinstance(found, str) and not found:
            raise OptionError("tiers: expected a directory or a URL, found ''")
        if not isinstance(getattr(found, "url", found), str):
            raise OptionError(
                f"tiers: expected a directory, a URL or a Store, found {type(found).__name__} "
                f"{found!r:.80}"
            )
        every: object = self.every
        if every is not None and not isinstance(every, EverySteps | EverySeconds):
            raise OptionError(
                f"every: expected None, EverySteps or EverySeconds, such as EverySteps(100), "
                f"found {every!r:.80}"
            )
        keep: object = self.keep_last
        if keep is not None and (type(keep) is not int or keep < 1):
            raise OptionError(f"keep_last: expected None or an integer from 1 on, found {keep!r}")
        if not isinstance(self.name, str):
            raise OptionError(f"name: expected a text, found {self.name!r:.80}")
        if self.verify not in ("read", "size"):
            raise OptionError(f"verify: expected 'read' or 'size', found {self.verify!r}")

    @property
    def label(self) -> str:
        """How it is spoken of: its name, or where it is."""
        found = self.url if isinstance(self.url, str) else self.url.url
        return self.name or spoken_url(found)


class Saved(NamedTuple):
    """A committed checkpoint.

    Attributes:
        at: Its identity.
        created_s: When it was captured, on the wall clock of its writer.
    """

    at: CheckpointId
    created_s: float


def due_in(
    every: EverySteps | EverySeconds | None,
    lineage: Sequence[Saved],
    there: Container[CheckpointId],
    *,
    newest_too: bool = False,
) -> list[CheckpointId]:
    """What a tier lacks, oldest first: those it should hold that are newer than all it holds.

    A function of what the stores hold, so whoever looks finds the same, also after a crash. Clocks
    of writers decide how often, never what is newer: one that was set back makes the next due.

    Args:
        every: Which go there.
        lineage: What led to the newest checkpoint, at home or in the tier, oldest first.
        there: What the tier holds.
        newest_too: Whether the newest of all goes there whatever ``every`` says.
    """
    found: list[CheckpointId] = []
    last_s: float | None = None
    for saved in lineage:
        if saved.at in there:
            found.clear()
            last_s = saved.created_s
        elif _is_due(every, saved, last_s):
            found.append(saved.at)
            last_s = saved.created_s
    newest = lineage[-1].at if lineage else None
    if newest_too and newest is not None and newest not in there and newest not in found:
        found.append(newest)
    return found


def _is_due(every: EverySteps | EverySeconds | None, saved: Saved, last_s: float | None) -> bool:
    if isinstance(every, EverySteps):
        return saved.at.step % every.steps == 0
    if every is None or last_s is None:
        return True
    return not 0 <= saved.created_s - last_s < every.seconds
