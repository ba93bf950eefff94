"""Strategies beside their closed forms: a step of given time, a store of given rate.

Each strategy of the library is measured twice (``compare_forms_run``): so often that it waits for
its earlier checkpoints, and so seldom that it does not. What ``planning.closed_forms`` makes of
the same times stands beside it. Nothing is fitted: rates are those of the store, and of a copy
and a commit that were measured alone; what encoding took and left, and how long the library is
busy with a checkpoint that is durable already, is what it reports of each one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from asymcheck.errors import nearest
from asymcheck.planning.adaptive import Adaptive
from asymcheck.planning.closed_forms import Mechanism, Steady, Work, average_state
from asymcheck.planning.layout import CHUNK_BYTES
from asymcheck.planning.strategies import Strategy, resolve, strategies
from asymcheck_lab.bench import append_record, describe_session, prepare, read_records
from asymcheck_lab.bench_child import measure_in_child, run_root
from asymcheck_lab.errors import DataError, RunError, UsageError
from asymcheck_lab.record import measured_when

TOLERANCE = 0.15
FLOOR = 0.1
"""Of a step: a difference below it is no difference; without waiting a stall is nearly nothing."""
_MB = 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class FormSpec:
    """One measurement.

    Attributes:
        strategy: Name of a strategy of the library.
        every: Steps between two checkpoints.
        checkpoints: Counted ones.
        window_s: Forward and backward.
        state_bytes: Parameters and two moments.
        bytes_per_s: Of the store.
        cores: The process and all that it starts stay on them.
        folder: Checkpoints go below it; empty.
    """

    strategy: str
    every: int
    checkpoints: int
    window_s: float = 0.1
    state_bytes: int = 32 * _MB
    bytes_per_s: float = 32e6
    cores: tuple[int, ...] = ()
    folder: str = ""

    @property
    def root(self) -> str:
        """Of the checkpoints, as a URL."""
        return f"throttled+{Path(self.folder).as_uri()}?bytes_per_s={self.bytes_per_s}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FormOptions:
    """What to measure, and where it goes.

    Attributes:
        names: Strategies of the library.
        folder: Checkpoints go below it.
        results: Gets a JSON line for each measurement, appended.
        timeout_s: How long one may take.

    Raises:
        UsageError: There is no such strategy; names the nearest.
    """

    names: tuple[str, ...] = tuple(strategies)
    folder: Path = Path("runs/forms")
    results: Path = Path("results/forms.jsonl")
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        for name in self.names:
            if name not in strategies:
                raise UsageError(
                    f"systems: with --synthetic expected some of {', '.join(strategies)}, found "
                    f"{name!r}{nearest(name, strategies)}"
                )

    @property
    def command(self) -> str:
        """The command that does this again; the folders are left out."""
        chosen = "" if self.names == tuple(strategies) else f" --systems {','.join(self.names)}"
        return f"asymlab bench --synthetic{chosen}"


def cases(options: FormOptions) -> Iterator[FormSpec]:
    """Every measurement; without cores and folder.

    Where checkpoints that wait for each other differ, all from one key-frame to the next count.
    """
    for name in options.names:
        selection = strategies[name].selection
        waiting = selection.key_every if selection.needs_base else 6
        yield FormSpec(strategy=name, every=1, checkpoints=waiting)
        yield FormSpec(strategy=name, every=12, checkpoints=3)


def run_forms(options: FormOptions, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Measure every case; blocks for minutes.

    Args:
        options: What to measure.
        say: Told how it goes, a line at a time.

    Returns:
        The records of this session, as they were appended to ``options.results``; one that
        failed has an ``error``.

    Raises:
        LabError: The results cannot be appended to, or the medium failed.
    """
    cores = prepare(options.folder, options.results, read_forms)
    session = describe_session(options.command, options.folder, cores)
    records = []
    for spec in cases(options):
        with run_root(options.folder) as root:
            placed = replace(spec, cores=cores, folder=str(root))
            measured: dict[str, Any]
            try:
                measured, _ = measure_in_child(
                    "asymcheck_lab.compare_forms_run",
                    asdict(placed),
                    root.parent,
                    options.timeout_s,
                )
            except RunError as failure:
                measured = {"error": str(failure).splitlines()[-1]}
        shown = {k: v for k, v in asdict(spec).items() if k not in ("cores", "folder")}
        records.append({**session, **shown, **measured})
        append_record(options.results, records[-1])
        say(f"{spec.strategy}, every {spec.every}: {measured.get('error', 'done')}")
    return records


def read_forms(path: Path) -> list[dict[str, Any]]:
    """Every record of a results file.

    Raises:
        DataError: It cannot be read, or holds something else.
    """

    def known(record: Mapping[str, Any]) -> bool:
        return bool(record["strategy"]) and record["every"] > 0

    return read_records(path, known)


def newest_of_each(options: FormOptions, records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The latest record of each case that is measured today, in their order.

    One that knows of no single checkpoint is from before the forms did, and left out.
    """
    found = {
        (record["strategy"], record["every"]): record
        for record in records
        if "saves" in record or "error" in record
    }
    wanted = [(spec.strategy, spec.every) for spec in cases(options)]
    return [found[case] for case in wanted if case in found]


# --- the closed forms -------------------------------------------------------


Capture = Literal["blocking", "lazy", "device"]

_CAPTURES: Mapping[str, Sequence[Capture]] = {
    "blocking": ("blocking",),
    "lazy": ("lazy",),
    "device-copy": ("device",),
    "profiled": ("lazy", "device"),
}
"""What the closed forms call a strategy's capture; of several it takes the cheaper."""


def mechanisms_of(strategy: Strategy, record: Mapping[str, Any]) -> list[Mechanism]:
    """What the closed forms call a strategy; several where it chooses by measuring.

    A chunk is encoded as soon as it is copied, and written as soon as it is encoded. A slot that
    holds the newest whole checkpoint in memory is none that another could be captured into.
    Adaptive plans look for the end of a copy at each window, the others at the fence or late
    enough: their copies take all windows, or there are none.

    Args:
        strategy: How it is done.
        record: Of a measurement.

    Raises:
        OptionError: The forms know no ring that is so small, or holds back a copy of that kind.
    """
    raw_bytes = record["raw_bytes"]
    ring_pieces = _ring_of(strategy, raw_bytes)
    at_fence = strategy.persist == "behind" and not isinstance(strategy.partitioner, Adaptive)
    held = 0 if strategy.placement.durable is None else 1
    return [
        Mechanism(
            capture=capture,
            persist=strategy.persist,
            sealed="fence" if at_fence and capture == "lazy" else "copied",
            max_in_flight=strategy.admission.max_in_flight - held,
            pieces=record["chunks"] if ring_pieces is None else math.ceil(raw_bytes / CHUNK_BYTES),
            ring_pieces=ring_pieces,
        )
        for capture in _CAPTURES[strategy.capture]
    ]


def _ring_of(strategy: Strategy, raw_bytes: float) -> int | None:
    """Chunks that fit into a ring which is smaller than the image, else ``None``."""
    ring_bytes = strategy.admission.ring_bytes
    return None if ring_bytes is None or ring_bytes >= raw_bytes else ring_bytes // CHUNK_BYTES


def work_of(strategy: Strategy, record: Mapping[str, Any], save: Mapping[str, float]) -> Work:
    """Times of one checkpoint where nothing else is done, as the closed forms want them.

    A blocking copy takes what a plain copy takes; a lazy one what its plan makes of it, but through
    a ring, where the library's figure holds the waits for room that are to be found.

    Args:
        strategy: How it was done.
        record: Of the measurement.
        save: What the library reports of the checkpoint.
    """
    plain_s: float = record["copy_s"]
    ring = _ring_of(strategy, record["raw_bytes"]) is not None
    stored = save["stored_bytes"] > 0
    return Work(
        step_s=record["step_s"],
        window_s=min(record["window_s"], record["step_s"]),
        copy_s=plain_s if ring or strategy.capture == "blocking" else save["copy_s"],
        write_s=save["stored_bytes"] / record["bytes_per_s"],
        encode_s=save["encode_s"],
        device_s=plain_s,  # without a device both are copies in memory
        commit_s=record["commit_s"] if stored and not ring else 0.0,
        release_s=0.0 if ring else save["release_s"],
    )


def predicted(record: Mapping[str, Any]) -> Steady:
    """What the closed form makes of a measurement's times.

    Of several in flight the forms want all alike: there the mean checkpoint stands for each.
    """
    strategy = resolve(record["strategy"])
    found = []
    for how in mechanisms_of(strategy, record):
        saves = record["saves"]
        if how.max_in_flight > 1:
            saves = [{key: fmean(save[key] for save in saves) for key in saves[0]}]
        works = [work_of(strategy, record, save) for save in saves]
        found.append(average_state(works, how, record["every"]))
    return min(found, key=lambda steady: steady.stall_s)


@dataclass(frozen=True, slots=True)
class Beside:
    """A measured figure and its closed form.

    Attributes:
        figure: ``stall``, ``durable``, ``period`` or ``in flight``.
        measured: Seconds, or checkpoints.
        form: The same of the closed form.
        floor: A difference below it is none.
    """

    figure: Literal["stall", "durable", "period", "in flight"]
    measured: float
    form: float
    floor: float

    @property
    def ratio(self) -> float | None:
        """Measured over closed form; ``None`` where that is nearly nothing."""
        return None if self.form <= self.floor else self.measured / self.form

    @property
    def holds(self) -> bool:
        """Whether they differ by no more than ``TOLERANCE``, or by less than the floor."""
        apart = abs(self.measured - self.form)
        return apart <= self.floor or apart <= TOLERANCE * self.form


def beside(record: Mapping[str, Any]) -> list[Beside]:
    """Each figure of a measurement beside its closed form."""
    form = predicted(record)
    floor_s = FLOOR * record["step_s"]
    under_way_s = max(0.0, form.durable_s - form.wait_s - form.boundary_s)
    return [
        Beside("stall", record["stall_s"], form.stall_s, floor_s),
        Beside("durable", record["durable_s"], form.durable_s, floor_s),
        Beside("period", record["period_s"], form.period_s, floor_s),
        Beside("in flight", record["in_flight"], under_way_s / form.period_s, FLOOR),
    ]


HEADS = ("strategy", "every", "stall, s", "durable, s", "period, s", "in flight", "within 15 %")


def rows_of(records: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The table: measured / closed form (ratio), for each measurement."""
    rows = []
    for record in records:
        name = [record["strategy"], str(record["every"])]
        if record.get("error"):
            rows.append([*name, "failed", "", "", "", record["error"]])
            continue
        found = beside(record)
        wrong = [one.figure for one in found if not one.holds]
        rows.append([*name, *map(_text, found), f"no: {', '.join(wrong)}" if wrong else "yes"])
    return rows


def _text(one: Beside) -> str:
    ratio = "" if one.ratio is None else f" ({one.ratio:.2f})"
    return f"{one.measured:.3f} / {one.form:.3f}{ratio}"


def show(console: Console, records: Sequence[Mapping[str, Any]]) -> None:
    """Print the table of a session."""
    table = Table(title="measured / closed form (ratio)", title_justify="left")
    for head in HEADS:
        table.add_column(head, overflow="fold")
    for row in rows_of(records):
        table.add_row(*row)
    console.print(table)


def render(records: Sequence[Mapping[str, Any]]) -> str:
    """The same as Markdown, with where and how it was measured.

    Raises:
        DataError: There is none.
    """
    if not records:
        raise DataError("closed forms", expected="records of a measurement", found="none")
    sessions = {record["session"]: record for record in records}
    lines = [
        f"{measured_when(one['session'], one['commit'])}, with `{one['command']}`, on "
        f"{one['machine']['cpu']}, {one['machine']['cores_used']} cores: a step with a window of "
        f"{1000 * one['window_s']:.0f} ms, {one['state_bytes'] / _MB:.0f} MB of state, a store of "
        f"{one['bytes_per_s'] / _MB:.0f} MB/s."
        for one in sessions.values()
    ]
    good = sum(all_hold([record]) for record in records)
    lines += [
        "",
        f"Measured / closed form (ratio); {good} of {len(records)} hold.",
        "",
        "| " + " | ".join(HEADS) + " |",
        "| --- |" + " ---: |" * (len(HEADS) - 2) + " --- |",
        *("| " + " | ".join(row) + " |" for row in rows_of(records)),
    ]
    return "\n".join(lines) + "\n"


def all_hold(records: Sequence[Mapping[str, Any]]) -> bool:
    """Whether every measurement came to its end and agrees with its closed form."""
    return all(not r.get("error") and all(one.holds for one in beside(r)) for r in records)
