"""Records of the benchmark as values that every report can rely on: read, checked, named.

A results file holds a JSON object a line. Each is checked field by field before any figure is made
of it: a wrong file is seen as a message with its line, not as a wrong figure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from asymcheck.rendering import count_text
from asymcheck_lab.errors import DataError
from asymcheck_lab.rivals import NONE, OURS, RIVALS

SCHEMA = 2
FIRST_SCHEMA = 1
"""What the benchmark of GPT-2 alone wrote: no model, store or kind, and nothing restored."""
SCHEMAS = (FIRST_SCHEMA, SCHEMA)
KINDS = ("none", "ours", "strategy", "rival")
PATTERNS = ("bench*.jsonl", "compare*.jsonl")
"""Names of results files in a folder."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a record was measured, as far as it says.

    Attributes:
        cpu: Its name.
        cpus: Cores of the machine.
        cores_used: Cores that the runs stayed on.
        memory_gib: Main memory, rounded: a virtual machine's differs by a little at each start.
        kernel: Release of Linux.
    """

    cpu: str
    cpus: int
    cores_used: int
    memory_gib: int
    kernel: str

    def __str__(self) -> str:
        return (
            f"{self.cpu}, {self.cpus} cores, of which {self.cores_used} were used; "
            f"{self.memory_gib} GiB; Linux {self.kernel}"
        )


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One counted checkpoint.

    Attributes:
        blocked_s: Training was blocked for it.
        durable_s: From its boundary until it was durable; ``None`` where it never was.
        lag_steps: Steps that training was ahead of it by then; ``None`` where unknown.
        skipped: Whether the system made none, as earlier ones were still under way.
    """

    blocked_s: float
    durable_s: float | None
    lag_steps: float | None
    skipped: bool = False


@dataclass(frozen=True, slots=True)
class Measured:
    """What a run measured that came to its end.

    Attributes:
        step_s: Each counted step.
        whole_s: All of them, until everything was durable.
        checkpoints: The counted ones.
        state_bytes: Of model and optimizer.
        saved_bytes: Of these, what a checkpoint holds, before any encoding.
        disk_bytes: Of one checkpoint in the store.
        restore_s: Loading one; ``None`` where nothing was loaded.
        bit_exact: Whether what was loaded equals what was live; ``None`` where not compared.
        max_error: Greatest difference of an element, as a part of the greatest in its tensor;
            ``None`` where not compared.
        peak_bytes: Greatest memory of all processes of the run.
        steal_s: CPU seconds that the machine's host took away.
    """

    step_s: tuple[float, ...]
    whole_s: float
    checkpoints: tuple[Checkpoint, ...]
    state_bytes: float
    saved_bytes: float
    disk_bytes: float
    restore_s: float | None
    bit_exact: bool | None
    max_error: float | None
    peak_bytes: float
    steal_s: float


@dataclass(frozen=True, slots=True)
class Run:
    """One record.

    Attributes:
        machine: Where.
        file_system: Type of the one that held the checkpoints.
        session: When the command was started, ISO 8601.
        versions: Name of a package to its version.
        commit: Of the library, ``None`` where unknown.
        commit_is_clean: Whether nothing was changed since.
        command: Does it again.
        model: What was trained.
        size: Which size of it.
        store: What the checkpoints were written to.
        parallel: How the model was spread over ranks; ``none`` for one process.
        ranks: How many there were.
        every: Steps between two checkpoints.
        steps: Counted steps.
        warmup: Steps before them.
        system: Name of what saved.
        title: The name for people.
        kind: One of ``KINDS``.
        library: Package and version that did it.
        omits: What a resumed run needs and this system does not save; empty where it saves all.
        syncs: How its files become durable.
        ranked: Whether it may be compared as an equal.
        why_unranked: Why not.
        round: Runs of the same session and round are paired.
        measured: The figures, ``None`` where there are none.
        error: Why the run failed, empty where it did not.
        absent: Why it could not be run here, empty where it could.
    """

    machine: Machine
    file_system: str
    session: str
    versions: Mapping[str, str]
    commit: str | None
    commit_is_clean: bool
    command: str
    model: str
    size: str
    store: str
    parallel: str
    ranks: int
    every: int
    steps: int
    warmup: int
    system: str
    title: str
    kind: str
    library: str
    omits: str
    syncs: str
    ranked: bool
    why_unranked: str
    round: int
    measured: Measured | None
    error: str
    absent: str


def read_runs(paths: Iterable[Path]) -> list[Run]:
    """Every record of some results files, in their order.

    Args:
        paths: Files, and folders in which every file that matches one of ``PATTERNS`` is one.

    Raises:
        DataError: One cannot be read, has no record or holds something else; names file, line
            and field.
    """
    return [run for path in paths for file in _files_of(path) for run in _read_file(file)]


def read_compare(path: Path) -> list[Run]:
    """Every record of a file that the comparison appends to; raises as ``read_runs`` does."""
    return _read_file(path, (SCHEMA,))


def _files_of(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(file for pattern in PATTERNS for file in path.glob(pattern))
    if not found:
        others = sum(1 for _ in path.iterdir())
        raise DataError(
            f"folder {path}",
            expected=f"results of asymlab bench, {' or '.join(PATTERNS)}",
            found=f"{count_text(others, 'other file')}" if others else "an empty folder",
        )
    return found


def _read_file(path: Path, schemas: Sequence[int] = SCHEMAS) -> list[Run]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as failure:
        why = getattr(failure, "strerror", None) or str(failure)
        raise DataError(str(path), expected="results of asymlab bench", found=why) from failure
    # Not splitlines(): a string in JSON may hold a line end of Unicode as it is.
    lines = text.removesuffix("\n").split("\n") if text else []
    if not lines:
        raise DataError(
            str(path), expected="a record of asymlab bench a line", found="an empty file"
        )
    return [_parse(f"{path}, line {n}", line, schemas) for n, line in enumerate(lines, start=1)]


def _parse(where: str, line: str, schemas: Sequence[int]) -> Run:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as failure:
        raise DataError(
            where, expected="a JSON object", found=f"{line[:80]!r} ({failure})"
        ) from None
    if not isinstance(record, dict):
        raise DataError(where, expected="a JSON object", found=repr(line[:80]))
    schema = record.get("schema")
    if type(schema) is not int or schema not in schemas:
        raise DataError(
            where,
            expected=f"a benchmark record of schema {' or '.join(map(str, schemas))}; a newer one "
            "needs a newer version of this package",
            found=f"schema {schema!r}",
        )
    return run_of(_of_first_schema(where, record) if schema == FIRST_SCHEMA else record, where)


def _of_first_schema(where: str, record: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in what all runs had in common then."""
    system = record.get("system")
    if not isinstance(system, str) or system not in RIVALS:
        raise DataError(
            where,
            expected=f"a benchmark record of schema {FIRST_SCHEMA}, of a system out of "
            f"{', '.join(RIVALS)}",
            found=f"system {system!r}",
        )
    rival = RIVALS[system]
    return {
        "model": "gpt2",
        "store": "disk",
        "title": rival.title,
        "kind": "none" if system == NONE else "ours" if system.startswith(OURS) else "rival",
        "omits": rival.omits,
        "syncs": rival.syncs,
        "ranked": system != NONE,
        "saved_bytes": record.get("state_bytes"),
        **record,
    }


# --- field by field ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Fields:
    """A JSON object, read with checks."""

    where: str
    record: Mapping[str, Any]

    def text(self, name: str, default: str | None = None) -> str:
        """A string that can be shown; ``default`` where it is missing or null."""
        value = self.record.get(name)
        if value is None and default is not None:
            return default
        return _printable(self._is(name, value, str))

    def flag(self, name: str) -> bool:
        """True or false."""
        value: bool = self._is(name, self.record.get(name), bool)
        return value

    def flag_or_none(self, name: str) -> bool | None:
        """True, false, or null."""
        return None if self.record.get(name) is None else self.flag(name)

    def count(self, name: str, least: int = 0) -> int:
        """A whole number."""
        value: int = self._is(name, self.record.get(name), int)
        if value < least:
            self._refuse(name, f"at least {least}", value)
        return value

    def number(self, name: str, least: float = 0.0) -> float:
        """A number that can be reckoned and drawn with."""
        value: Any = self.record.get(name)
        if type(value) not in (int, float) or not least <= value <= _MOST:
            self._refuse(name, f"a number from {least:g} to {_MOST:g}", value)
        return float(value)

    def number_or_none(self, name: str) -> float | None:
        """A number, or null."""
        return None if self.record.get(name) is None else self.number(name)

    def inner(self, name: str) -> _Fields:
        """An object."""
        return _Fields(f"{self.where}, {name}", self._is(name, self.record.get(name), dict))

    def listed(self, name: str, read: Callable[[_Fields], Any]) -> tuple[Any, ...]:
        """A list of objects, or of what ``read`` takes as the field ``value``."""
        values = self._is(name, self.record.get(name), list)
        return tuple(
            read(_Fields(f"{self.where}, {name}[{n}]", v if isinstance(v, dict) else {"value": v}))
            for n, v in enumerate(values)
        )

    def _is(self, name: str, value: object, kind: type[Any]) -> Any:  # noqa: ANN401
        if type(value) is not kind:
            self._refuse(name, _KIND_NAMES[kind], value)
        return value

    def _refuse(self, name: str, expected: str, value: object) -> None:
        found = "none" if name not in self.record else repr(value)[:80]
        raise DataError(f"{self.where}: {name}", expected=expected, found=found)


_MOST = 1e18
_UNPRINTABLE = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
"""No character of XML, or half of one."""


def _printable(text: str) -> str:
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)


_KIND_NAMES: Mapping[type[Any], str] = MappingProxyType(
    {
        str: "a text",
        bool: "true or false",
        int: "a whole number",
        dict: "an object",
        list: "a list",
    }
)


def run_of(record: Mapping[str, Any], where: str = "a record") -> Run:
    """A record of schema 2 as a value.

    Args:
        record: As it was written or is to be.
        where: It came from.

    Raises:
        DataError: A field is missing or something else; names it.
    """
    fields = _Fields(where, record)
    kind = fields.text("kind")
    if kind not in KINDS:
        raise DataError(
            f"{fields.where}: kind", expected=f"one of {', '.join(KINDS)}", found=repr(kind)[:80]
        )
    machine = fields.inner("machine")
    versions = fields.inner("versions")
    error, absent = fields.text("error", ""), fields.text("absent", "")
    return Run(
        machine=_machine_of(machine),
        file_system=machine.text("file_system"),
        session=fields.text("session"),
        versions={_printable(name): versions.text(name) for name in versions.record},
        commit=fields.text("commit", "") or None,
        commit_is_clean=fields.flag("commit_is_clean"),
        command=fields.text("command"),
        model=fields.text("model"),
        size=fields.text("size"),
        store=fields.text("store"),
        parallel=fields.text("parallel", "none"),
        ranks=fields.count("ranks", least=1) if "ranks" in record else 1,
        every=fields.count("every", least=1),
        steps=fields.count("steps"),
        warmup=fields.count("warmup"),
        system=fields.text("system"),
        title=fields.text("title"),
        kind=kind,
        library=fields.text("library", ""),
        omits=fields.text("omits", ""),
        syncs=fields.text("syncs", ""),
        ranked=fields.flag("ranked"),
        why_unranked=fields.text("why_unranked", ""),
        # What could not be run belongs to no round.
        round=0 if absent else fields.count("round"),
        measured=None if error or absent else _measured_of(fields, kind),
        error=error,
        absent=absent,
    )


def _machine_of(machine: _Fields) -> Machine:
    return Machine(
        cpu=machine.text("cpu"),
        cpus=machine.count("cpus", least=1),
        cores_used=machine.count("cores_used", least=1),
        memory_gib=round(machine.number("memory_bytes") / 2**30),
        kernel=machine.text("kernel"),
    )


def _measured_of(fields: _Fields, kind: str) -> Measured:
    return Measured(
        step_s=fields.listed("step_s", lambda step: step.number("value")),
        whole_s=fields.number("whole_s", least=1e-9),
        checkpoints=() if kind == "none" else fields.listed("checkpoints", _checkpoint_of),
        state_bytes=fields.number("state_bytes"),
        saved_bytes=fields.number("saved_bytes"),
        disk_bytes=fields.number("disk_bytes"),
        restore_s=fields.number_or_none("restore_s"),
        bit_exact=fields.flag_or_none("bit_exact"),
        max_error=fields.number_or_none("max_error"),
        peak_bytes=fields.number("peak_bytes"),
        steal_s=fields.number("steal_s", least=-_MOST),
    )


def _checkpoint_of(fields: _Fields) -> Checkpoint:
    return Checkpoint(
        blocked_s=fields.number("blocked_s"),
        durable_s=fields.number_or_none("durable_s"),
        lag_steps=fields.number_or_none("lag_steps"),
        skipped=bool(fields.flag_or_none("skipped")),
    )
