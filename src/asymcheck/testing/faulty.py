"""A store that fails, or kills or stops the process, at a chosen operation on a chosen object."""

from __future__ import annotations

import errno
import fnmatch
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TypeVar
from urllib.parse import urlencode

from asymcheck.errors import OptionError, StoreError, nearest
from asymcheck.storage.store import Buffer, Capabilities, Entry, Readable, Store, open_store

T = TypeVar("T")

_ACTIONS = ("EIO", "ENOSPC", "short", "kill", "stop", "none")


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong, and when.

    Attributes:
        at: The n-th matching operation, counted from 1.
        times: How many matching operations from there on; 0 for all.
        op: Glob over ``prepare write create open read list delete sweep free_bytes``.
        name: Glob over the object's name.
        when: ``before`` the medium is touched, in the ``mid`` of a write, or ``after`` it is
            done, so that the caller sees an error although it worked.
        do: ``EIO`` and ``ENOSPC`` raise, ``short`` drops the second half of a write and
            returns what was taken, ``kill`` is SIGKILL to this process, ``stop`` is SIGSTOP, after
            which it goes on with SIGCONT, ``none`` does nothing.
    """

    at: int = 1
    times: int = 1
    op: str = "*"
    name: str = "*"
    when: str = "before"
    do: str = "EIO"

    def __post_init__(self) -> None:
        if self.when not in ("before", "mid", "after"):
            raise OptionError(f"when: expected before, mid or after, found {self.when!r}")
        if self.do not in _ACTIONS:
            raise OptionError(f"do: expected one of {_ACTIONS}, found {self.do!r}")


class FaultyStore:
    """Passes every call on to ``inner``, but for the fault.

    Args:
        inner: The real store.
        fault: What goes wrong.

    Attributes:
        operations: ``(operation, name)`` of every call so far, so that a test can fail each.
    """

    def __init__(self, inner: Store, fault: Fault | None = None) -> None:
        self.inner = inner
        self.operations: list[tuple[str, str]] = []
        self._fault = fault or Fault(do="none")
        self._matched = 0
        self._lock = threading.Lock()

    @property
    def fault(self) -> Fault:
        """What goes wrong. A new one counts operations from where it is set."""
        return self._fault

    @fault.setter
    def fault(self, fault: Fault) -> None:
        with self._lock:
            self._fault = fault
            self._matched = 0

    @property
    def url(self) -> str:
        """See ``Store``."""
        options = {f.name: getattr(self.fault, f.name) for f in fields(self.fault)}
        return f"faulty+{self.inner.url}?{urlencode(options)}"

    @property
    def capabilities(self) -> Capabilities:
        """See ``Store``."""
        return self.inner.capabilities

    def prepare(self) -> None:
        """See ``Store``."""
        self._call("prepare", "", self.inner.prepare)

    def write(self, name: str, parts: Iterable[Buffer]) -> int:
        """See ``Store``."""
        strikes = self._strikes("write", name)
        if strikes and self.fault.do == "short":
            return self.inner.write(name, _half(parts))
        if strikes and self.fault.when == "mid":
            return self.inner.write(name, self._broken(name, parts))
        return self._run(strikes, name, lambda: self.inner.write(name, parts))

    def create(self, name: str, data: Buffer) -> bool:
        """See ``Store``."""
        return self._call("create", name, lambda: self.inner.create(name, data))

    @contextmanager
    def open(self, name: str) -> Iterator[Readable]:
        """See ``Store``."""
        with self._call("open", name, lambda: self.inner.open(name)) as opened:
            yield _FaultyReadable(self, name, opened)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """See ``Store``."""
        return iter(self._call("list", prefix, lambda: list(self.inner.list(prefix))))

    def delete(self, name: str) -> None:
        """See ``Store``."""
        self._call("delete", name, lambda: self.inner.delete(name))

    def sweep(self) -> int:
        """See ``Store``."""
        return self._call("sweep", "", self.inner.sweep)

    def free_bytes(self) -> int | None:
        """See ``Store``."""
        return self._call("free_bytes", "", self.inner.free_bytes)

    def _call(self, op: str, name: str, work: Callable[[], T]) -> T:
        return self._run(self._strikes(op, name), name, work)

    def _strikes(self, op: str, name: str) -> bool:
        with self._lock:
            fault = self._fault
            self.operations.append((op, name))
            if fault.do == "none" or not (
                fnmatch.fnmatchcase(op, fault.op) and fnmatch.fnmatchcase(name, fault.name)
            ):
                return False
            self._matched += 1
            past = self._matched - fault.at
            return past >= 0 and (fault.times == 0 or past < fault.times)

    def _run(self, strikes: bool, name: str, work: Callable[[], T]) -> T:
        if not strikes or self.fault.do == "short":
            return work()
        if self.fault.when != "after":
            self._strike(name)
            return work()
        result = work()
        self._strike(name)
        return result

    def _strike(self, name: str) -> None:
        if self.fault.do == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault.do == "stop":
            # To this thread, which so does nothing more; the process stops with it.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
            return
        code = getattr(errno, self.fault.do)
        raise StoreError(
            f"{self.inner.url} {name}: {os.strerror(code)} (injected)",
            retryable=code == errno.ENOSPC,
        )

    def _broken(self, name: str, parts: Iterable[Buffer]) -> Iterator[Buffer]:
        whole = [bytes(memoryview(p).cast("B")) for p in parts]
        yield from _half(whole)
        self._strike(name)
        skip = sum(map(len, whole)) // 2
        for part in whole:  # only a process that was stopped gets here
            yield part[skip:]
            skip = max(0, skip - len(part))


class _FaultyReadable:
    def __init__(self, store: FaultyStore, name: str, opened: Readable) -> None:
        self._store = store
        self._name = name
        self._opened = opened
        self.nbytes = opened.nbytes

    def readinto(self, offset: int, into: memoryview) -> None:
        """See ``Readable``."""
        self._store._call("read", self._name, lambda: self._opened.readinto(offset, into))


def _half(parts: Iterable[Buffer]) -> Iterator[Buffer]:
    """The first half of the bytes, to the parts' own limits but for the last one."""
    whole = [bytes(memoryview(p).cast("B")) for p in parts]
    left = sum(map(len, whole)) // 2
    for part in whole:
        yield part[:left]
        left -= len(part)
        if left <= 0:
            return


def open_faulty(target: str, options: dict[str, str]) -> FaultyStore:
    """Factory of ``faulty+INNER://…?at=3&op=write&name=*.pack&when=mid&do=kill``.

    Raises:
        OptionError: An option is wrong.
    """
    kinds = {f.name: f.type for f in fields(Fault)}
    values: dict[str, str | int] = {}
    for name, text in options.items():
        if name not in kinds:
            raise OptionError(f"faulty store: unknown option {name!r}{nearest(name, kinds)}")
        try:
            values[name] = int(text) if kinds[name] == "int" else text
        except ValueError:
            raise OptionError(f"{name}: expected an integer, found {text!r}") from None
    return FaultyStore(open_store(target), Fault(**values))  # type: ignore[arg-type]
