"""What the command line prints: text for people, safe on any terminal and in any pipe.

Keys, names and messages come out of files that anyone may have written, so nothing that a
terminal would obey is passed on. A pipe gets neither colours nor cut or wrapped cells.
"""

from __future__ import annotations

import io
import json
import os
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

_STYLES = {"newest": "green", "damaged": "red", "newer": "red", "abandoned": "yellow"}
_DRAWN_ROWS = 1000
_MAX_DEPTH = 50
_BRIEF_DEPTH = 4
_BRIEF_ITEMS = 4
_BRIEF_CHARACTERS = 60


def prepare_streams() -> None:
    """Let no character be an error, whatever the encoding of the terminal."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def show_line(text: str = "") -> None:
    """Print to standard output, at once.

    When its reader has gone (``| head``), the rest is dropped: the exit status of the command
    stays the true one.
    """
    try:
        print(text, flush=True)
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def plain(text: str) -> str:
    """``text`` with everything that is not printable written as an escape."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def size_text(nbytes: int) -> str:
    """A size for people, such as ``1.5 MiB``."""
    size, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{nbytes} B" if unit == "B" else f"{size:.1f} {unit}"


def count_text(count: int, noun: str) -> str:
    """How many of something."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def time_text(seconds: float) -> str:
    """A moment in local time; ``?`` where it is none."""
    try:
        return f"{datetime.fromtimestamp(seconds, UTC).astimezone():%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):
        return "?"


def metrics_text(metrics: Mapping[str, float]) -> str:
    """Metrics on one line."""
    return " ".join(f"{plain(name)}={value:.6g}" for name, value in metrics.items())


def table_text(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table: drawn for a terminal, plain columns of full cells for anything else, and where
    drawing would take seconds.

    Args:
        columns: Names; one that starts with ``>`` is aligned to the right.
        rows: Printable cells.
    """
    names = [c.lstrip(">") for c in columns]
    if sys.stdout is not None and sys.stdout.isatty() and len(rows) <= _DRAWN_ROWS:
        return _drawn(columns, names, rows)
    lines = [names, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(names))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column.startswith(">") else cell.ljust(width)
            for cell, width, column in zip(line, widths, columns, strict=True)
        ).rstrip()
        for line in lines
    )


def _drawn(columns: Sequence[str], names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for column, name in zip(columns, names, strict=True):
        right = column.startswith(">")
        table.add_column(
            Text(name), justify="right" if right else "left", no_wrap=right, overflow="fold"
        )
    for row in rows:
        table.add_row(
            *(
                Text(cell, style=_STYLES.get(cell, "") if name == "state" else "")
                for cell, name in zip(row, names, strict=True)
            )
        )
    console = Console()
    with console.capture() as captured:
        console.print(table)
    return captured.get().rstrip("\n")


def tree_lines(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:  # noqa: ANN401
    """``(path, abbreviated value)`` of a tagged JSON tree, without tensors and empty parts."""
    members: list[tuple[str, Any]] = []
    if isinstance(value, dict) and not any(k.startswith("$") for k in value):
        members = [(f"{path}/{k}" if path else k, v) for k, v in value.items()]
    elif isinstance(value, list) and any(isinstance(v, dict) for v in value):
        members = [(f"{path}[{i}]", v) for i, v in enumerate(value)]
    if members and depth < _MAX_DEPTH:
        for inner, member in members:
            yield from tree_lines(member, inner, depth + 1)
    elif value not in ({}, []) and not (isinstance(value, dict) and "$leaf" in value):
        yield plain(path), plain(_brief(value))


def _brief(value: Any, depth: int = 0) -> str:  # noqa: ANN401
    if depth == _BRIEF_DEPTH:
        return "…"
    if isinstance(value, dict) and len(value) == 1 and next(iter(value)).startswith("$"):
        ((tag, body),) = value.items()
        return _number(body) if tag == "$float" else f"{_cut(tag[1:])} {_brief(body, depth + 1)}"
    if isinstance(value, dict):
        pairs = list(value.items())[:_BRIEF_ITEMS]
        return f"{{{_some([f'{_cut(k)}: {_brief(v, depth + 1)}' for k, v in pairs], len(value))}}}"
    if isinstance(value, list):
        return f"[{_some([_brief(v, depth + 1) for v in value[:_BRIEF_ITEMS]], len(value))}]"
    return _cut(json.dumps(value, ensure_ascii=False))


def _some(shown: list[str], count: int) -> str:
    return ", ".join(shown if len(shown) == count else [*shown, f"… {count} in all"])


def _cut(text: str) -> str:
    return text if len(text) <= _BRIEF_CHARACTERS else f"{text[:_BRIEF_CHARACTERS]}…"


def _number(body: object) -> str:
    """An infinity or NaN, stored as the hexadecimal digits of its eight bytes."""
    try:
        return str(struct.unpack(">d", bytes.fromhex(str(body)))[0])
    except (ValueError, struct.error):
        return _cut(str(body))
