"""What a training run leaves in writing: a log with a line a step, and a result at its end.

Losses stand there twice: as a number to read, and as the hexadecimal form of the float, which
names every bit.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from asymcheck.events import Span, Stage
from asymcheck_lab.errors import DataError, LabError


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One update.

    Attributes:
        step: Updates done, this one included.
        loss: Of the batch, before the update.
        seconds: The whole step, with the call of the Checkpointer.
        resumed_from: Step at which this process had started, 0 for a fresh start.
        scores: What an evaluation after it found, by name; empty where there was none.
    """

    step: int
    loss: float
    seconds: float
    resumed_from: int
    scores: Mapping[str, float] = field(default_factory=dict)

    @property
    def loss_hex(self) -> str:
        """Every bit of the loss."""
        return self.loss.hex()

    def to_line(self) -> str:
        """One line of JSON, with its line end."""
        fields: dict[str, Any] = {
            "step": self.step,
            "loss": self.loss,
            "loss_hex": self.loss_hex,
            "seconds": round(self.seconds, 6),
            "resumed_from": self.resumed_from,
        }
        if self.scores:
            fields["scores"] = dict(self.scores)
        return json.dumps(fields) + "\n"


_FIELDS = {"step": int, "loss_hex": str, "seconds": float, "resumed_from": int}


def read_log(path: Path) -> list[StepRecord]:
    """Every step of a log, in the order in which it was written.

    A step that was trained again after a restart is there twice. A last line without an end
    is what a killed process leaves: it is left out.

    Raises:
        DataError: It cannot be read, or is not such a log.
    """
    try:
        data = path.read_bytes()
    except OSError as failure:
        raise DataError(
            str(path), expected="a training log", found=failure.strerror or str(failure)
        ) from failure
    whole = data[: data.rfind(b"\n") + 1]
    return [_parse(path, n, line) for n, line in enumerate(whole.splitlines(), start=1)]


def _parse(path: Path, number: int, line: bytes) -> StepRecord:
    try:
        fields = json.loads(line)
        if not all(type(fields[name]) is kind for name, kind in _FIELDS.items()):
            raise TypeError
        loss = float.fromhex(fields["loss_hex"])
        scores = {str(name): float(value) for name, value in fields.get("scores", {}).items()}
        return StepRecord(fields["step"], loss, fields["seconds"], fields["resumed_from"], scores)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        raise DataError(
            f"{path}, line {number}",
            expected=f"a JSON object with {', '.join(_FIELDS)}",
            found=repr(line[:80].decode("utf-8", "replace")),
        ) from None


class LogWriter:
    """Appends steps to a log; each is handed to the system at once, so a kill loses none.

    Args:
        path: The file; made where it is missing, with its folders. A torn last line goes.

    Raises:
        DataError: Something else is there.
        LabError: It cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        if path.exists():
            read_log(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            data = path.read_bytes()
            whole = data.rfind(b"\n") + 1
            if whole != len(data):
                os.ftruncate(self._fd, whole)
        except OSError as failure:
            raise LabError(f"log {path}: {failure.strerror}") from failure

    def write(self, record: StepRecord) -> None:
        """Append one step.

        Raises:
            LabError: The medium failed.
        """
        line = record.to_line().encode("ascii")
        try:
            taken = os.write(self._fd, line)
        except OSError as failure:
            raise LabError(f"log {self._path}: {failure.strerror}") from failure
        if taken != len(line):
            raise LabError(f"log {self._path}: {taken} of {len(line)} bytes were written")

    def __enter__(self) -> LogWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._fd)


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """What one checkpoint took.

    Attributes:
        step: Its step.
        stall_s: How long the training loop waited for it, in all.
        stored_bytes: Bytes of its packs.
        flush_s: Seconds of writing them, beside the training.
    """

    step: int
    stall_s: float
    stored_bytes: int
    flush_s: float


class Ledger:
    """A sink that keeps every span, from whichever thread."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def __call__(self, span: Span) -> None:
        """Take one span."""
        self.spans.append(span)

    def checkpoints(self) -> list[SavedCheckpoint]:
        """Every checkpoint that was written without an error, by step."""
        good = [s for s in list(self.spans) if not s.error]
        flushed = [s for s in good if s.stage == Stage.FLUSH]
        committed = {s.step for s in good if s.stage == Stage.COMMIT}
        stalls = [s for s in good if s.stage == Stage.STALL]
        return [
            SavedCheckpoint(
                step=step,
                stall_s=sum(s.duration_s for s in stalls if s.step == step),
                stored_bytes=sum(s.moved_bytes for s in flushed if s.step == step),
                flush_s=sum(s.duration_s for s in flushed if s.step == step),
            )
            for step in sorted(committed)
        ]

    def restore_s(self) -> float:
        """Seconds of reading checkpoints, those that were passed over included."""
        return sum(s.duration_s for s in self.spans if s.stage == Stage.RESTORE)


@dataclass(frozen=True, slots=True)
class Result:
    """What a run ended with.

    Attributes:
        steps: Updates done in all.
        resumed_from: Step at which this process started, 0 for a fresh start.
        restore_s: Seconds of the restore, 0 where there was none.
        restored_bytes: Bytes that it read.
        skipped: Newer checkpoints that were passed over, as ``(step, why)``.
        loop_s: Seconds of the training loop.
        drain_s: Seconds until the last checkpoint was durable, after the loop.
        checkpoints: What was saved.
        fingerprint: Name to sha256 of every piece of the final state; of several ranks, with
            ``rank0/`` and so on in front.
        scores: What the evaluation at the end found, by name.
    """

    steps: int
    resumed_from: int
    restore_s: float
    restored_bytes: int
    skipped: tuple[tuple[int, str], ...]
    loop_s: float
    drain_s: float
    checkpoints: tuple[SavedCheckpoint, ...]
    fingerprint: Mapping[str, str]
    scores: Mapping[str, float] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Put it into a file, as a whole or not at all.

        Raises:
            LabError: It cannot be written.
        """
        temp = path.with_name(path.name + ".new")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temp.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
            temp.replace(path)
        except OSError as failure:
            raise LabError(f"result {path}: {failure.strerror}") from failure


def read_result(path: Path) -> Result:
    """What ``Result.write`` wrote.

    Raises:
        DataError: It is missing or something else.
    """
    try:
        fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        fields["skipped"] = tuple((step, why) for step, why in fields["skipped"])
        fields["checkpoints"] = tuple(SavedCheckpoint(**c) for c in fields["checkpoints"])
        return Result(**fields)
    except (OSError, ValueError, TypeError, KeyError) as failure:
        raise DataError(
            str(path), expected="the result of a run that came to its end", found=str(failure)
        ) from failure


def measured_when(first: Mapping[str, Any]) -> str:
    """How a report on records begins: when they were measured, and of which commit.

    Args:
        first: A record of the session.
    """
    commit = (first["commit"] or "unknown")[:12]
    return f"Measured {first['session'][:10]}, commit `{commit}`"


def median(values: Iterable[float]) -> float:
    """The middle one, the mean of the middle two of an even number; 0 where there is none."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
