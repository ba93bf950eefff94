"""Measuring the windows of a training step, from its boundary to the fence.

A window opens where a block of the model starts its forward pass, and where the first gradient
of a block's output is there, that is where its backward pass starts. The first window lies
before all of them: it opens at the boundary. Forward passes are seen by hooks on modules,
backward passes by hooks on the tensors that they return: full backward hooks of modules would
break models that work in place. No hook returns a value, and the compiler sees none that does
anything: inside a compiled region there are no windows.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import islice
from statistics import median
from time import perf_counter
from types import FunctionType
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from asymcheck.device.blocks import find_blocks
from asymcheck.device.pooling import KEPT, Pair, Pooling, overlaps
from asymcheck.planning.windows import Window

Instant: TypeAlias = "float | torch.cuda.Event"
"""Seconds of ``perf_counter``, or an event on a stream: an opaque point on a step's clock."""

_TENSORS = 16  # of one output that are looked at
_DEPTH = 4  # of containers in an output
_HARDLY = 0.1  # of a stretch of copying that other traffic may take for it to be alone
_PENDING = 4  # steps whose events are waited for; others are left out meanwhile


class _HostClock:
    """Monotonic seconds of the host."""

    def mark(self) -> Instant | None:
        return perf_counter()

    def seconds(self, instants: Sequence[Any]) -> list[float] | None:
        """Of each instant since the first; ``None`` as long as they are not known."""
        return [i - instants[0] for i in instants]

    def reuse(self, instants: Iterable[Any]) -> None:
        """Take back instants that nobody needs any more."""


class _StreamClock:
    """Events on the current streams of one device; the host never waits for them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[torch.cuda.Event] = []

    def mark(self) -> Instant | None:
        if torch.cuda.is_current_stream_capturing():
            return None  # an event in a CUDA graph measures nothing
        try:
            event = self._free.pop()
        except IndexError:
            event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, instants: Sequence[Any]) -> list[float] | None:
        if not all(event.query() for event in instants):
            return None
        first = instants[0]
        return [first.elapsed_time(event) * 1e-3 for event in instants]

    def reuse(self, instants: Iterable[Any]) -> None:
        self._free.extend(instants)


@dataclass(eq=False, slots=True)
class _Step:
    """What happens between a boundary and the next.

    Attributes:
        clock: Whose instants these are.
        enter: ``_enter``, out of the compiler's sight.
        watch: ``_watch``, likewise.
        on_window: Called with the ordinal of each window.
        begun_s: The boundary, by ``perf_counter``.
        marks: Code and start of each window. Hooks on several threads append to it, so its
            length tells which one is open.
        copies: Start, stop and bytes of each stretch of copying.
        collectives: Start and stop of each stretch of other traffic.
        end: The fence.
        is_open: Between boundary and fence.
        task: The backward pass that opened a window last.
    """

    clock: _HostClock | _StreamClock
    enter: Callable[[_Step, int], None]
    watch: Callable[[_Step, int, bool, object], None]
    on_window: Callable[[int], None] | None
    begun_s: float
    marks: list[tuple[int, Instant]] = field(default_factory=list)
    copies: list[tuple[Instant, Instant, int]] = field(default_factory=list)
    collectives: list[tuple[Instant, Instant]] = field(default_factory=list)
    end: Instant | None = None
    is_open: bool = True
    task: int = -1

    def close(self) -> None:
        """Open no window any more. A graph that is kept holds this, but not the callback."""
        self.is_open, self.on_window = False, None


_BOUNDARY = 0  # a code; those of blocks are even for forward, odd for backward


def _enter(step: _Step, code: int) -> None:
    instant = step.clock.mark()
    if instant is not None:
        on_window = step.on_window
        step.marks.append((code, instant))
        if on_window is not None:
            on_window(len(step.marks) - 1)


def _watch(step: _Step, code: int, first_only: bool, output: object) -> None:
    hook = _GradHook(step, code, first_only)
    for tensor in islice(_tensors(output), _TENSORS):
        # A leaf would keep the hook for ever.
        if tensor.requires_grad and tensor.grad_fn is not None:
            tensor.register_hook(hook)


def _tensors(value: object, depth: int = 0) -> Iterator[torch.Tensor]:
    """The tensors in what a module returned."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < _DEPTH:
        items: Iterable[object] = ()
        if isinstance(value, dict):
            items = value.values()
        elif isinstance(value, list | tuple):
            items = value
        elif is_dataclass(value):
            items = (getattr(value, f.name, None) for f in fields(value))
        for item in items:
            yield from _tensors(item, depth + 1)


class _GradHook:
    """On the tensors that one call of a block returned; the first gradient opens a window."""

    __slots__ = ("_code", "_first_only", "_step", "_task")
    __torch_unserializable__ = True  # saving such a tensor needs no warning that hooks get lost

    def __init__(self, step: _Step, code: int, first_only: bool) -> None:
        self._step, self._code, self._first_only = step, code, first_only
        self._task = -1

    def __call__(self, grad: torch.Tensor) -> None:
        if torch.compiler.is_compiling():
            return
        step = self._step
        task = torch._C._current_graph_task_id()
        if not step.is_open or task == self._task or (self._first_only and task == step.task):
            return
        self._task = step.task = task
        step.enter(step, self._code)


class _ModuleHook:
    """Before and after the forward of a module. In a copy of the module it does nothing."""

    __slots__ = ("_code", "_first_only", "_profiler")

    def __init__(
        self, profiler: weakref.ref[Profiler], code: int, *, first_only: bool = False
    ) -> None:
        self._profiler, self._code, self._first_only = profiler, code, first_only

    def __call__(self, module: nn.Module, args: object, *output: object) -> None:
        if torch.compiler.is_compiling():
            return
        profiler = self._profiler()
        step = None if profiler is None else profiler._step
        if (
            step is None
            or not step.is_open
            or not module.training
            or not torch.is_grad_enabled()
            or torch._C._current_graph_task_id() != -1  # recomputed inside a backward pass
        ):
            return
        if output:
            step.watch(step, self._code, self._first_only, output[0])
        else:
            step.enter(step, self._code)

    def __reduce__(self) -> tuple[Any, ...]:
        # Takes any arguments, returns None, and needs nothing of this library to be loaded.
        return getattr, (nullcontext(), "__exit__")


class Profiler:
    """Measures the windows of training steps, step after step, by hooks on modules.

    ``begin_step``, ``end_step``, ``windows``, ``take_pairs`` and ``close`` belong to the training
    thread. ``position``, ``phase``, ``instant`` and the two ``add_…`` may be used on any thread;
    none of them blocks. Windows are opened on the thread that runs forward, and on autograd's for
    backward.

    Only calls with gradients enabled, in training mode and outside a backward pass open forward
    windows, so neither evaluation nor recomputation does. A gradient counts in the step in which
    its forward pass ran. All micro-batches between boundary and fence count. Of a copied or
    pickled model the hooks do nothing. Tensor hooks stay on the tensors of a step as long as
    these live, and do nothing once the step is over.

    Steps are pooled as ``Pooling`` says, each when the next begins. On CUDA the times are those
    of the device, not of the host that runs ahead of it, and are read when they are there; the
    host never waits.

    Args:
        modules: The models that are trained. One inside another adds nothing.
        on_window: Called with the ordinal of each window of a step, on the thread that opens it,
            while training waits; must be quick and must not raise.
    """

    def __init__(
        self, modules: Iterable[nn.Module], on_window: Callable[[int], None] | None = None
    ) -> None:
        self._enter = torch.compiler.disable(_enter)
        self._watch = torch.compiler.disable(_watch)
        self._on_window = None if on_window is None else torch.compiler.disable(on_window)
        self._modules = tuple(modules)
        self._closed = False
        self._step: _Step | None = None
        self._unread: deque[_Step] = deque()
        self._clocks: dict[torch.device | None, _HostClock | _StreamClock] = {}
        self._pooling = Pooling()
        self._lengths: deque[float] = deque(maxlen=KEPT)
        self._copied: deque[tuple[int, float]] = deque(maxlen=KEPT)
        self._copied_alone: deque[tuple[int, float]] = deque(maxlen=KEPT)
        self._handles = _attach(weakref.ref(self), self._modules)

    def begin_step(self) -> None:
        """Start a step at the boundary; its first window is open. Pools the steps before."""
        if self._closed:
            return
        before, clock = self._step, self._clock()
        if before is not None:
            before.close()
        step = _Step(clock, self._enter, self._watch, self._on_window, perf_counter())
        self._read()
        if before is not None and before.end is not None and before.marks:
            self._lengths.append(step.begun_s - before.begun_s)
            if len(self._unread) < _PENDING:
                self._unread.append(before)
                self._read()
        self._step = step
        self._enter(step, _BOUNDARY)

    def end_step(self) -> None:
        """End the windows of a step: at the fence, before it waits. Again it does nothing."""
        step = self._step
        if step is not None and step.is_open:
            step.close()
            step.end = step.clock.mark()

    @property
    def position(self) -> int:
        """Ordinal of the window that is open now, -1 where none is: from the fence on.

        On CUDA the window that the host is in, which runs ahead of the device.
        """
        step = self._step
        return len(step.marks) - 1 if step is not None and step.is_open else -1

    @property
    def phase(self) -> Literal["forward", "backward"]:
        """Of the window that opened last; the one that opens at the boundary is forward."""
        step = self._step
        backward = step is not None and step.marks and step.marks[-1][0] % 2
        return "backward" if backward else "forward"

    def instant(self) -> Instant | None:
        """Now, on the clock of the step and the current stream; ``None`` before any step."""
        step = self._step
        return None if step is None else step.clock.mark()

    def add_copy(self, start: Instant, stop: Instant, nbytes: int) -> None:
        """Note a stretch of copying, before the next step begins.

        Args:
            start: ``instant()`` before the first byte, for a device under the copy's stream.
            stop: ``instant()`` after the last.
            nbytes: That were copied in between.
        """
        if self._step is not None:
            self._step.copies.append((start, stop, nbytes))

    def add_collective(self, start: Instant, stop: Instant) -> None:
        """Note a stretch of other traffic on the way that copies use; see ``add_copy``."""
        if self._step is not None:
            self._step.collectives.append((start, stop))

    def windows(self) -> tuple[Window, ...]:
        """The windows of a step, from the boundary to the fence; empty while nothing is known.

        Durations are those without a copy, where there were any. Without a hook that fires it
        is the one window that opens at the boundary.
        """
        return self._pooling.windows()

    @property
    def generation(self) -> int:
        """Counts how often what was measured has been forgotten."""
        return self._pooling.generation

    @property
    def step_s(self) -> float:
        """Seconds from one boundary to the next; 0 while nothing is known."""
        return median(self._lengths) if self._lengths else 0.0

    @property
    def copy_bytes_per_s(self) -> float:
        """Bandwidth of the latest copies, of those without other traffic if there were any; 0
        while nothing is known.
        """
        latest = self._copied_alone or self._copied
        seconds = sum(s for _, s in latest)
        return sum(n for n, _ in latest) / seconds if seconds else 0.0

    def take_pairs(self) -> list[Pair]:
        """The pairs since the last call, each for ``planning.contention``."""
        return self._pooling.take_pairs()

    def close(self) -> None:
        """Take every hook away. Again it does nothing."""
        self._closed = True
        self.end_step()
        for handle in self._handles:
            handle.remove()
        self._handles, self._modules = [], ()
        self._step, self._on_window = None, None
        self._unread.clear()

    def _clock(self) -> _HostClock | _StreamClock:
        first = (next(m.parameters(), None) for m in self._modules)
        device = next((p.device for p in first if p is not None and p.is_cuda), None)
        if device not in self._clocks:
            self._clocks[device] = _HostClock() if device is None else _StreamClock(device)
        return self._clocks[device]

    def _read(self) -> None:
        """Pool the steps whose times are known by now."""
        while self._unread:
            step = self._unread[0]
            assert step.end is not None
            starts = [instant for _, instant in step.marks]
            copies, others = list(step.copies), list(step.collectives)
            stretches = [s[:2] for s in (*copies, *others)]
            instants = [*starts, step.end, *(i for stretch in stretches for i in stretch)]
            seconds = step.clock.seconds(instants)
            if seconds is None:
                return
            self._unread.popleft()
            step.clock.reuse([*starts, step.end])
            edges, rest = seconds[: len(starts) + 1], seconds[len(starts) + 1 :]
            spans = list(zip(rest[::2], rest[1::2], strict=True))
            row, count = tuple(code for code, _ in step.marks), len(copies)
            self._pooling.add(row, edges, spans[:count], spans[count:])
            if copies:
                moved = [
                    (nbytes, stop - start, sum(overlaps((start, stop), spans[count:])))
                    for (*_, nbytes), (start, stop) in zip(copies, spans, strict=False)
                ]
                self._copied.append((sum(n for n, _, _ in moved), sum(s for _, s, _ in moved)))
                alone = [(n, s) for n, s, other_s in moved if other_s <= _HARDLY * s]
                if alone:
                    self._copied_alone.append((sum(n for n, _ in alone), sum(s for _, s in alone)))


def _attach(
    profiler: weakref.ref[Profiler], modules: Sequence[nn.Module]
) -> list[torch.utils.hooks.RemovableHandle]:
    """Hook each block, and the end of the forward of each model that is none itself.

    The latter is where the backward pass of what follows the last block begins, and all there
    is to see of a model that is compiled later.
    """
    from torch._dynamo.decorators import skip  # slow to import

    for kind in (_ModuleHook, _GradHook):
        # The compiler looks into the hook where a compiled caller runs it, and finds that it
        # returns at once. Where the hook runs by itself the compiler must leave it alone; to say
        # so to the method itself would break the graph of the caller.
        skip(FunctionType(kind.__call__.__code__, {}))
    inside = {id(child) for m in modules for child in m.modules() if child is not m}
    trained = {
        id(m): m for m in modules if id(m) not in inside and next(m.parameters(), None) is not None
    }
    blocks = {id(b): b for m in trained.values() for b in find_blocks(m)}
    handles = []
    for i, (key, module) in enumerate({**blocks, **trained}.items(), 1):
        if isinstance(module, torch.jit.ScriptModule):
            continue  # refuses hooks
        if key in blocks:
            handles.append(module.register_forward_pre_hook(_ModuleHook(profiler, 2 * i)))
        after = _ModuleHook(profiler, 2 * i + 1, first_only=key not in blocks)
        handles.append(module.register_forward_hook(after))
    return handles
