"""Every error a caller may meet, arranged by what the caller can do about it.

* CheckpointError
  - OptionError               a wrong argument: fix the call (also a ``ValueError``)
  - StateError                something in ``state`` cannot be saved: names its key
  - PlanError                 a partition plan is not a cover: a bug, please report
  - CaptureError              this checkpoint is lost, training may go on
    + DroppedCheckpoint       its bytes changed while they were copied, so it was given up
    + RankMissing             another rank has not stored its part of it in time
  - StoreError                the medium failed; ``retryable`` says whether to try again
    + ObjectNotFound          the named object is not there
  - SupersededWriter          a newer attempt owns this root: stop this job
  - RankFailed                another rank failed or is silent, so all ranks stop together
  - RecoveryError
    + NoCheckpoint            nothing to resume from: start fresh
    + CorruptCheckpoint       this one is damaged: an older one may load
    + IncompatibleCheckpoint  intact, but not for this model, format or topology
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class CheckpointError(Exception):
    """Base of every error this library raises on purpose."""

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions are rebuilt by calling the class with ``args``; ours take more than that,
        # and one that cannot be rebuilt hangs the process pool that it travels through.
        return _rebuilt, (type(self), self.args), self.__dict__


def _rebuilt(kind: type[CheckpointError], args: tuple[object, ...]) -> CheckpointError:
    return kind.__new__(kind, *args)


class OptionError(CheckpointError, ValueError):
    """An argument is wrong; the message names it, what was expected and what was found."""


class StateError(CheckpointError):
    """A value in ``state`` cannot be saved.

    Attributes:
        key: Path of the value, parts joined by ``/``.
    """

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"state {key!r}: {message}")
        self.key = key


class PlanError(CheckpointError):
    """A partition plan does not cover the state exactly once."""


class CaptureError(CheckpointError):
    """Copying live tensors out of the training process failed; this checkpoint is lost."""


class DroppedCheckpoint(CaptureError):
    """The state changed while it was copied, so this checkpoint was given up.

    Attributes:
        step: Its step.
        key: A leaf that changed, empty where the reason is another one.
    """

    def __init__(self, step: int, key: str, why: str) -> None:
        super().__init__(f"step {step} was dropped: {why}")
        self.step = step
        self.key = key


class RankMissing(CaptureError):
    """A checkpoint was not committed: other ranks did not store their part of it in time.

    What this rank stored stays until the next start of the job.

    Attributes:
        step: Its step.
        ranks: Which ranks' parts are missing, ascending.
    """

    def __init__(self, step: int, ranks: Sequence[int], why: str) -> None:
        super().__init__(f"step {step} was not committed: {why}")
        self.step = step
        self.ranks = tuple(ranks)


class StoreError(CheckpointError):
    """The storage medium failed.

    Attributes:
        retryable: Whether the same call may succeed if made again.
    """

    def __init__(self, message: str, *, retryable: bool) -> None:
        super().__init__(message)
        self.retryable = retryable


class ObjectNotFound(StoreError):
    """The named object is not in the store."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retryable=False)


class SupersededWriter(CheckpointError):
    """A newer attempt has claimed this root, so this job must not write to it any more."""


class RankFailed(CheckpointError):
    """Another rank failed, does not answer, or is at another call: no rank goes on alone.

    Attributes:
        ranks: Which, ascending.
    """

    def __init__(self, ranks: Sequence[int], message: str) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class RecoveryError(CheckpointError):
    """No state could be restored."""


class NoCheckpoint(RecoveryError):
    """The repository holds no committed checkpoint that matches the request."""


class CorruptCheckpoint(RecoveryError):
    """Stored bytes are not what was committed.

    Attributes:
        where: Object in the store, with the offset where one is known.
    """

    def __init__(self, where: str, message: str) -> None:
        super().__init__(f"{where}: {message}")
        self.where = where


class IncompatibleCheckpoint(RecoveryError):
    """A checkpoint is intact but cannot be loaded here.

    Attributes:
        missing_keys: In the live state, not in the checkpoint.
        unexpected_keys: In the checkpoint, not in the live state.
        mismatched: ``(key, expected, found)`` where shape or dtype differ.
    """

    def __init__(
        self,
        message: str,
        *,
        missing_keys: Sequence[str] = (),
        unexpected_keys: Sequence[str] = (),
        mismatched: Sequence[tuple[str, str, str]] = (),
    ) -> None:
        super().__init__(message)
        self.missing_keys = tuple(missing_keys)
        self.unexpected_keys = tuple(unexpected_keys)
        self.mismatched = tuple(mismatched)


class CheckpointWarning(UserWarning):
    """Something about a checkpoint that the user should know and that was survived."""


def as_checkpoint_error(failure: BaseException) -> CheckpointError:
    """A failure as the training thread may raise it: a ``SystemExit`` of a store's driver, say,
    must not end the training as if it were over.
    """
    if isinstance(failure, CheckpointError):
        return failure
    told = CheckpointError(f"the checkpoint was lost: its writer ended with {failure!r}")
    told.__cause__ = failure
    return told


def nearest(name: str, known: Iterable[str]) -> str:
    """A clause such as ``; did you mean 'naive'?``, empty where nothing is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
