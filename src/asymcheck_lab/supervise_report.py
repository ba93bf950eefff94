"""What a supervised training came to: each start, how it ended, from where it went on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from asymcheck.planning.retention import CheckpointId
from asymcheck.rendering import plain, table_text, time_text
from asymcheck_lab.errors import LabError


@dataclass(slots=True)
class Start:
    """One start of the command.

    Attributes:
        number: Counted from 1.
        began_s: When, in wall-clock seconds since 1970.
        seconds: How long it ran.
        ended: How it ended, in words.
        code: Exit code of the command, negative for a signal; ``None`` where it did not start.
        attempts: Attempts that it claimed in the root.
        resumed_from: The checkpoint that it went on from; ``None`` for a fresh start, and where
            no attempt was claimed.
        tier: Where that one lay before the start.
        from_nothing: Whether it began at step 0 although there were checkpoints.
        latest_step: Greatest step that was seen of it; 0 for none.
        steps_lost: Steps that the start before had done and this one does again; ``None`` where
            that is not known.
        commits: Checkpoints that became durable in it, and are still there.
        problem: Why the root could not be read after it.
    """

    number: int
    began_s: float
    seconds: float = 0.0
    ended: str = ""
    code: int | None = None
    attempts: tuple[int, ...] = ()
    resumed_from: CheckpointId | None = None
    tier: str = ""
    from_nothing: bool = False
    latest_step: int = 0
    steps_lost: int | None = None
    commits: int = 0
    problem: str = ""

    @property
    def succeeded(self) -> bool:
        """Whether the training came to its end."""
        return self.code == 0


@dataclass(frozen=True, slots=True)
class Suspect:
    """A checkpoint that was marked, and why."""

    at: CheckpointId
    why: str


@dataclass(slots=True)
class Report:
    """All of it.

    Attributes:
        command: What was run.
        root: Its checkpoints.
        starts: Each start.
        suspects: Checkpoints that were marked.
        outcome: ``done``, ``stopped``, ``gave up``, ``not resumable`` or ``failed``; empty while
            it runs.
        code: Exit code of the supervisor.
        advice: What to do now.
    """

    command: Sequence[str]
    root: str | None
    starts: list[Start] = field(default_factory=list)
    suspects: list[Suspect] = field(default_factory=list)
    outcome: str = ""
    code: int = 0
    advice: str = ""

    def note_suspect(self, at: CheckpointId, why: str) -> None:
        """A checkpoint was marked."""
        self.suspects.append(Suspect(at, why))

    def as_json(self) -> dict[str, Any]:
        """The report as a JSON object."""
        return {
            "outcome": self.outcome or "running",
            "code": self.code,
            "advice": self.advice,
            "command": list(self.command),
            "root": self.root,
            "starts": [_start_json(start) for start in self.starts],
            "suspects": [{**_id_json(s.at), "why": s.why} for s in self.suspects],
        }


def _start_json(start: Start) -> dict[str, Any]:
    at = start.resumed_from
    return {**asdict(start), "resumed_from": None if at is None else _id_json(at)}


def _id_json(at: CheckpointId) -> dict[str, int]:
    return {"step": at.step, "attempt": at.attempt}


def write_report(path: Path | None, report: Report) -> None:
    """Put it into a file, as a whole or not at all.

    Raises:
        LabError: It cannot be written.
    """
    if path is None:
        return
    temp = path.with_name(path.name + ".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temp.write_text(json.dumps(report.as_json(), indent=1) + "\n", encoding="utf-8")
        temp.replace(path)
    except OSError as failure:
        raise LabError(f"report {path}: {failure.strerror}") from failure


def render(report: Report) -> str:
    """The report for people."""
    columns = (">start", "when", ">seconds", "went on from", ">lost", ">step", ">new", "ended")
    rows = [
        [
            str(start.number),
            time_text(start.began_s),
            f"{start.seconds:.1f}",
            _origin(start),
            "-" if start.steps_lost is None else str(start.steps_lost),
            str(start.latest_step or "-"),
            str(start.commits),
            plain(start.ended),
        ]
        for start in report.starts
    ]
    lines = [table_text(columns, rows)] if rows else []
    for found in report.suspects:
        lines.append(
            f"marked suspect: step {found.at.step} (attempt {found.at.attempt}), {found.why}"
        )
    lines.append(f"{report.outcome or 'running'}{': ' + report.advice if report.advice else ''}")
    return "\n".join(lines)


def _origin(start: Start) -> str:
    if not start.attempts:
        return "-"
    if start.resumed_from is None:
        return "step 0, past its checkpoints" if start.from_nothing else "step 0"
    return f"step {start.resumed_from.step}, {start.tier}"
