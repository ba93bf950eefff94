"""The systems, each as one value. Nothing here has behaviour of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from asymcheck.errors import OptionError, nearest
from asymcheck.planning.adaptive import Adaptive
from asymcheck.planning.cadence import Cadence, EverySeconds, OverheadBudget, SlowdownFactor
from asymcheck.planning.layout import MiB
from asymcheck.planning.plan import IdleProportional, Partitioner
from asymcheck.planning.policy import Admission
from asymcheck.planning.selection import RAW, Batching, Fidelity, Selection
from asymcheck.planning.tiers import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """One policy per axis; the stages ask, the policies answer.

    Attributes:
        capture: ``lazy`` copies parameters and optimizer state behind the next forward and
            backward pass; ``device-copy`` clones them where they are before training goes on,
            and copies the clones while it does: the update waits for nothing, but there must
            be memory for a second state, else that capture is lazy; ``profiled`` measures
            these two at the first captures and goes on with the cheaper one, see
            ``variants.Trials``; ``blocking`` copies everything before training goes on.
        persist: ``behind`` lets training go on once the state is copied; ``before`` keeps
            the loop waiting until the checkpoint is durable.
        admission: How many checkpoints may be under way.
        partitioner: Which part of a lazy copy may happen in which window of the next step;
            ``None`` lets it run freely.
        selection: How chunks may be encoded.
        batching: How encoded chunks are merged into writes.
        placement: Which checkpoints go to the store, and which stay in memory alone.
        cadence: How often to save where the user does not say; ``None`` for only on request.
        writers: Into how many packs of about the same size a checkpoint is cut; they are written
            at the same time.

    Raises:
        OptionError: Two policies exclude each other. What is chosen by measurements, or stands
            on a key-frame, is made one after the other, and from whole images. A ``placement``
            that keeps some in memory needs whole images too, and room for two: the newest whole
            one stays while the next is captured.
    """

    capture: Literal["lazy", "device-copy", "profiled", "blocking"] = "lazy"
    persist: Literal["behind", "before"] = "behind"
    admission: Admission = Admission()
    partitioner: Partitioner | None = None
    selection: Selection = RAW
    batching: Batching = "ready"
    placement: Placement = Placement()
    cadence: Cadence | None = None
    writers: int = 1

    def __post_init__(self) -> None:
        if type(self.writers) is not int or self.writers < 1:
            raise OptionError(f"writers: expected an integer from 1 on, found {self.writers!r}")
        raw, admission = self.selection.rule == "raw", self.admission
        if admission.at_once > 1 and not raw:
            raise OptionError(
                f"at_once: expected 1 with selection rule {self.selection.rule!r}, found "
                f"{admission.at_once}: use Selection(rule='raw')"
            )
        if admission.ring_bytes is not None and not raw:
            raise OptionError(
                f"ring_bytes: expected None with selection rule {self.selection.rule!r}, found "
                f"{admission.ring_bytes}: use Selection(rule='raw')"
            )
        if admission.ring_bytes is not None and self.capture == "blocking":
            raise OptionError(
                f"ring_bytes: expected None with capture='blocking', which copies a whole image "
                f"before anything of it is written, found {admission.ring_bytes}"
            )
        in_memory = self.placement.durable is not None
        if in_memory and admission.ring_bytes is not None:
            raise OptionError(
                f"ring_bytes: expected None with a placement that keeps whole checkpoints in "
                f"memory, found {admission.ring_bytes}"
            )
        if in_memory and admission.max_in_flight < 2:
            raise OptionError(
                f"placement: expected admission.max_in_flight from 2 on, since the newest whole "
                f"checkpoint stays in memory while the next is captured, found "
                f"{admission.max_in_flight}"
            )

    def with_fidelity(self, fidelity: Fidelity) -> Strategy:
        """The same with another class of fidelity.

        Raises:
            OptionError: There is no such class, or the strategy cannot have it.
        """
        selection = replace(self.selection, fidelity=fidelity)
        selection.check_fidelity(fidelity)
        return replace(self, selection=selection)


_TRY_ALL = Selection(rule="smallest", delta=True)

strategies = MappingProxyType(
    {
        "naive": Strategy(capture="blocking", persist="before"),
        "checkfreq": Strategy(capture="profiled", cadence=OverheadBudget()),
        "gemini": Strategy(
            admission=Admission(max_in_flight=2),
            placement=Placement(durable=EverySeconds(3 * 3600)),
        ),
        # N = 2 as its authors ran it for their larger models.
        "pccheck": Strategy(
            admission=Admission(max_in_flight=2, at_once=2),
            batching="each",
            writers=2,
            cadence=SlowdownFactor(),
        ),
        # The ring takes only what is in it: a small state never fills 2 GiB.
        "datastates": Strategy(
            admission=Admission(max_in_flight=4, ring_bytes=2048 * MiB), batching="each"
        ),
        "asymcheck": Strategy(partitioner=Adaptive(), selection=Selection(cpu_share=0.01)),
        "asymcheck-paper": Strategy(
            partitioner=IdleProportional(),
            selection=Selection(rule="paper"),
            batching="square-root",
        ),
        # Its authors compress what was saved before, in a process of its own.
        "excp": Strategy(capture="blocking", selection=Selection(rule="excp")),
        "asymcheck-naive": Strategy(partitioner=IdleProportional(), batching="each"),
        "asymcheck-s": Strategy(
            partitioner=IdleProportional(), selection=_TRY_ALL, batching="each"
        ),
        "asymcheck-so": Strategy(
            partitioner=IdleProportional(), selection=_TRY_ALL, batching="ready"
        ),
    }
)
"""Every strategy by name."""


def resolve(strategy: object) -> Strategy:
    """The strategy of that name, or the value itself.

    Raises:
        OptionError: No such strategy; names the nearest.
    """
    if isinstance(strategy, Strategy):
        return strategy
    found = strategies.get(strategy) if isinstance(strategy, str) else None
    if found is None:
        hint = nearest(strategy, strategies) if isinstance(strategy, str) else ""
        raise OptionError(
            f"strategy: expected one of {sorted(strategies)} or a Strategy, "
            f"found {strategy!r}{hint}"
        )
    return found
