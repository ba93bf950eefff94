"""The comparison: models × systems × intervals × stores, each run a process of its own.

A *cell* is a model of a size, an interval and a store. In each round every system runs once in
every cell, the one without checkpoints too. This process starts the runs, watches their memory
and writes down what they measured; it loads no torch.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from asymcheck_lab.bench import (
    append_record,
    comparison_first,
    describe_session,
    order_of,
    prepare,
    refuse_unknown,
    warm_memory,
)
from asymcheck_lab.bench_child import RunServer, run_root
from asymcheck_lab.bench_run import RunSpec
from asymcheck_lab.bench_work import sizes_to_compare
from asymcheck_lab.compare_records import SCHEMA, read_compare
from asymcheck_lab.errors import RunError, UsageError
from asymcheck_lab.parallel import find_parallel
from asymcheck_lab.presets import TASKS
from asymcheck_lab.rivals import RIVALS, Rival

DISK = "disk"
ALL = "all"
_UNITS = {"kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9}
SPREAD = ("ddp", "fsdp2", "zero3")
"""The ways to spread a model that are compared: where all, or nothing, is a rank's own."""
_SMALL = frozenset({"tiny"})


@dataclass(frozen=True, slots=True)
class Cell:
    """What systems are compared in.

    Attributes:
        model: What is trained.
        size: Which size of it.
        every: Steps between two checkpoints.
        store: ``disk``, or the rate that the library's own store is held to.
        parallel: How the model is spread over ranks; ``none`` for one process.
        ranks: How many there are.
    """

    model: str
    size: str
    every: int
    store: str
    parallel: str = "none"
    ranks: int = 1

    def __str__(self) -> str:
        spread = "" if self.ranks == 1 else f"{self.parallel} on {self.ranks} ranks, "
        return f"{self.model} {self.size}, {spread}every {self.every}, {self.store}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """What to compare, and where its traces go.

    Attributes:
        models: Names of models.
        sizes: Names of sizes; a model that does not have one is left out there.
        systems: Names out of ``rivals.RIVALS``; ``none`` is added where it is missing.
        every: Intervals, in steps.
        stores: ``disk``, or rates such as ``50MB/s``.
        parallels: How models are spread over ranks, of ``SPREAD``; ``none`` for one process.
        ranks: How many ranks then.
        rounds: How often each system runs in each cell.
        steps: Counted steps of a run.
        warmup: Steps before the counted ones.
        folder: Checkpoints go below it while a run lasts; on the medium to be measured.
        results: Gets a JSON line for each run, appended.
        verify: Load every checkpoint back and compare; such times are not worth reading.
        timeout_s: How long a run may take.

    Raises:
        UsageError: One is wrong; names it, and the nearest name that there is.
    """

    models: tuple[str, ...] = tuple(TASKS)
    sizes: tuple[str, ...] = ("tiny",)
    systems: tuple[str, ...] = tuple(RIVALS)
    every: tuple[int, ...] = (5,)
    stores: tuple[str, ...] = (DISK,)
    parallels: tuple[str, ...] = ("none",)
    ranks: int = 2
    rounds: int = 1
    steps: int = 20
    warmup: int = 2
    folder: Path = Path("runs/compare")
    results: Path = Path("results/compare.jsonl")
    verify: bool = False
    timeout_s: float = 900.0

    def __post_init__(self) -> None:
        for name in ("rounds", "steps", "warmup"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}: expected at least 1, found {getattr(self, name)}")
        if not self.every or min(self.every) <= self.warmup:
            raise UsageError(
                f"every: expected more steps than warmup={self.warmup}, found {list(self.every)}"
            )
        known = [size for model in self.models for size in sizes_to_compare(model)]
        refuse_unknown("sizes", self.sizes, tuple(dict.fromkeys(known)))
        refuse_unknown("systems", self.systems, RIVALS)
        for store in self.stores:
            rate_of(store)
        refuse_unknown("parallel", self.parallels, ("none", *SPREAD))
        for parallel in self.parallels:
            find_parallel(parallel)
        if self.ranks < 2:
            raise UsageError(f"ranks: expected at least 2, found {self.ranks}")

    @property
    def all_systems(self) -> tuple[str, ...]:
        """Those to run, without repetition, the comparison first."""
        return comparison_first(self.systems)

    @property
    def cells(self) -> list[Cell]:
        """Every cell of these that there is."""
        return [
            Cell(model, size, every, store, parallel, 1 if parallel == "none" else self.ranks)
            for model in self.models
            for size in self.sizes
            if size in sizes_to_compare(model)
            for every in self.every
            for store in self.stores
            for parallel in self.parallels
        ]

    @property
    def command(self) -> str:
        """The command that does this again; the folders are left out."""
        return (
            f"asymlab bench --models {_listed(self.models, TASKS)} "
            f"--sizes {','.join(self.sizes)} --systems {_listed(self.systems, RIVALS)} "
            f"--every {','.join(map(str, self.every))} --store {','.join(self.stores)} "
            f"{self._spread}"
            f"--rounds {self.rounds} --steps {self.steps} --warmup {self.warmup}"
        )

    @property
    def _spread(self) -> str:
        if self.parallels == ("none",):
            return ""
        return f"--parallel {','.join(self.parallels)} --ranks {self.ranks} "


def _listed(chosen: Sequence[str], known: Iterable[str]) -> str:
    return ALL if tuple(chosen) == tuple(known) else ",".join(chosen)


def chosen_names(text: str, known: Iterable[str]) -> tuple[str, ...]:
    """Names with commas between them; ``all`` for every known one."""
    there = tuple(known)
    return there if text == ALL and there else tuple(name.strip() for name in text.split(","))


def chosen_numbers(option: str, text: str) -> tuple[int, ...]:
    """Whole numbers with commas between them.

    Raises:
        UsageError: One is none.
    """
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise UsageError(
            f"{option}: expected whole numbers with commas between them, found {text!r}"
        ) from None


def rate_of(store: str) -> float:
    """Bytes a second that a store is held to; 0 for the disk as it is.

    Raises:
        UsageError: It is neither ``disk`` nor a rate.
    """
    if store == DISK:
        return 0.0
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kMG]B/s)", store)
    if match is None or not float(match[1]):
        raise UsageError(f"store: expected {DISK!r} or a rate such as '50MB/s', found {store!r}")
    return float(match[1]) * _UNITS[match[2]]


def why_absent(rival: Rival, store: str, parallel: str = "none") -> str | None:
    """Why a system cannot run in a cell, in one line; ``None`` where it can."""
    if parallel not in rival.parallels:
        return f"not measured with {parallel}: {rival.why_not_else}"
    if rival.kind == "rival" and store != DISK:
        return f"writes plain files, which cannot be held to {store}: not measured on that store"
    return rival.missing()


def run_compare(options: CompareOptions, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Run every system in every cell in every round; blocks.

    A run that fails is recorded with its error, a system that cannot run with the reason, and
    the comparison goes on.

    Args:
        options: What to compare.
        say: Told how it goes, a line at a time.

    Returns:
        The records of this session, as they were appended to ``options.results``.

    Raises:
        RunError: No run can be started.
        UsageError: The results cannot be appended to.
        LabError: The medium failed.
    """
    cores = prepare(options.folder, options.results, read_compare)
    session = {
        **describe_session(options.command, options.folder, cores, schema=SCHEMA),
        "steps": options.steps,
        "warmup": options.warmup,
    }
    if not _SMALL.issuperset(options.sizes):
        warm_memory()
    workloads = list(dict.fromkeys((c.model, c.size, c.parallel) for c in options.cells))
    records = []
    with (
        tempfile.TemporaryDirectory(prefix="server-", dir=options.folder) as scratch,
        RunServer(workloads, Path(scratch)) as server,
    ):
        for number, cell, position, system in _turns(options):
            record = {
                **session,
                **asdict(cell),
                **_described(system),
                "round": number,
                "position": position,
                **_run(options, server, cell, system, cores),
            }
            records.append(record)
            append_record(options.results, record)
            say(f"round {number} of {options.rounds}, {cell}, {system}: {in_short(record)}")
    return records


def _turns(options: CompareOptions) -> Iterator[tuple[int, Cell, int, str]]:
    """Round, cell, place and system of every run. What cannot run has its turn once."""
    for number in range(1, options.rounds + 1):
        for shift, cell in enumerate(options.cells):
            order = order_of(options.all_systems, number + shift)
            for position, system in enumerate(order, start=1):
                if number == 1 or _why_absent(system, cell) is None:
                    yield number, cell, position, system


def _why_absent(system: str, cell: Cell) -> str | None:
    return why_absent(RIVALS[system], cell.store, cell.parallel)


def _described(system: str) -> dict[str, Any]:
    rival = RIVALS[system]
    return {
        "system": system,
        "title": rival.title,
        "kind": rival.kind,
        "library": f"{rival.library} {rival.version}".strip(),
        "omits": rival.omits,
        "syncs": rival.syncs,
        "ranked": rival.ranked,
        "why_unranked": rival.why_unranked,
    }


def _run(
    options: CompareOptions,
    server: RunServer,
    cell: Cell,
    system: str,
    cores: tuple[int, ...],
) -> dict[str, Any]:
    """One run; what went wrong with it is a field of its record."""
    absent = _why_absent(system, cell)
    if absent is not None:
        return {"absent": absent}
    with run_root(options.folder) as root:
        spec = RunSpec(
            system=system,
            model=cell.model,
            size=cell.size,
            steps=options.steps,
            every=cell.every,
            warmup=options.warmup,
            cores=cores,
            folder=str(root),
            bytes_per_s=rate_of(cell.store),
            check=True,
            verify=options.verify,
            parallel=cell.parallel,
            ranks=cell.ranks,
        )
        try:
            measured, peak_bytes = server.measure(asdict(spec), root.parent, options.timeout_s)
        except RunError as failure:
            return {"error": _without_folders(str(failure))}
        return {**measured, "peak_bytes": peak_bytes}


def _without_folders(text: str) -> str:
    """A message with the names of files only: records are published."""
    return re.sub(r"(?<![\w.:/])(?:/[^\s/'\"():,]+)+/", "…/", text)


def in_short(record: Mapping[str, Any]) -> str:
    """A run in a few words."""
    if record.get("absent"):
        return f"not here: {record['absent']}"
    if record.get("error"):
        return f"failed: {record['error'].splitlines()[-1]}"
    text = f"{record['whole_s']:.2f} s"
    if record["kind"] != "none" and record["checkpoints"]:
        blocked_s = sum(c["blocked_s"] for c in record["checkpoints"]) / len(record["checkpoints"])
        exact = "exact" if record["bit_exact"] else "not exact"
        text += f", blocked {1000 * blocked_s:.1f} ms per checkpoint, {exact}"
        skipped = sum(c["skipped"] for c in record["checkpoints"])
        text += f", {skipped} skipped: others were under way" if skipped else ""
    return text
