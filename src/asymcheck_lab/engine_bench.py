"""The benchmarks of the engine: what it promises of stall, durability, and where copies go.

Each case is a run in a fresh process (``engine_run``) that stays on the same two cores. This
process starts them one after the other and appends what they measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from asymcheck_lab.bench import append_record, describe_session, prepare, read_records
from asymcheck_lab.bench_child import measure_in_child, run_root
from asymcheck_lab.engine_spec import EngineSpec, Task
from asymcheck_lab.errors import RunError, UsageError

TASKS: tuple[Task, ...] = ("stall", "durable", "ablation", "link")
REGIMES = ("long", "short")
STRATEGIES = (
    "none",
    "asymcheck-naive",
    "asymcheck-s",
    "asymcheck-so",
    "asymcheck",
    "asymcheck-paper",
)
PARTITIONERS = ("free-running", "equal slots", "idle-proportional", "adaptive")
_MB = 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What to measure, and where it goes.

    Attributes:
        tasks: Some of ``TASKS``.
        quick: A first look: fewer cases and checkpoints, no figure worth keeping.
        folder: Checkpoints go below it; on the medium to be measured.
        results: Gets a JSON line for each run, appended.
        timeout_s: How long a run may take.
    """

    tasks: tuple[str, ...] = TASKS
    quick: bool = False
    folder: Path = Path("runs/engine")
    results: Path = Path("results/engine.jsonl")
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        for task in self.tasks:
            if task not in TASKS:
                raise UsageError(f"tasks: expected some of {', '.join(TASKS)}, found {task!r}")

    @property
    def command(self) -> str:
        """The command that does this again; the folders are left out."""
        chosen = "" if self.tasks == TASKS else f" --tasks {','.join(self.tasks)}"
        return f"asymlab engine{chosen}{' --quick' if self.quick else ''}"


def cases(options: EngineOptions) -> Iterator[EngineSpec]:
    """Every run, in order; without cores and folder."""
    quick = options.quick
    if "stall" in options.tasks:
        for regime in REGIMES:
            for store in ("1000",) if quick else ("1000", "disk"):
                yield EngineSpec(
                    task="stall",
                    case=regime,
                    store=store,
                    checkpoints=4 if quick else 30,
                    state_bytes=(96 if quick else 192) * _MB,
                )
    if "durable" in options.tasks:
        for store in ("200",) if quick else ("50", "200", "1000", "disk"):
            yield EngineSpec(
                task="durable",
                case="asymcheck",
                store=store,
                checkpoints=3 if quick else 7,
                state_bytes=(128 if quick else 256) * _MB,
            )
    if "ablation" in options.tasks:
        for store in ("50",) if quick else ("50", "200", "disk"):
            for strategy in STRATEGIES:
                yield EngineSpec(
                    task="ablation",
                    case=strategy,
                    store=store,
                    checkpoints=2 if quick else 5,
                    every=8,
                    size="tiny" if quick else "demo",
                    latency_s=0.005,
                )
    if "link" in options.tasks:
        for shared in (True,) if quick else (True, False):
            for partitioner in PARTITIONERS:
                yield EngineSpec(
                    task="link",
                    case=partitioner,
                    store="disk",
                    checkpoints=2 if quick else 6,
                    state_bytes=128 * _MB,
                    shared=shared,
                    step_s=0.5,
                )


def run_engine(options: EngineOptions, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Run every case; blocks for minutes.

    A run that fails is recorded with its error, and the benchmark goes on.

    Args:
        options: What to measure.
        say: Told how it goes, a line at a time.

    Returns:
        The records of this session, as they were appended to ``options.results``.

    Raises:
        UsageError: The results cannot be appended to.
        LabError: The medium failed.
    """
    cores = prepare(options.folder, options.results, read_engine)
    session = describe_session(options.command, options.folder, cores)
    records = []
    for spec in cases(options):
        measured = _run(replace(spec, cores=cores), options)
        shown = {k: v for k, v in asdict(spec).items() if k not in ("cores", "folder")}
        records.append({**session, **shown, **measured})
        append_record(options.results, records[-1])
        state = measured.get("error", "done").splitlines()[-1]
        link = f", {'shared' if spec.shared else 'independent'} link" if spec.step_s else ""
        say(f"{spec.task}, {spec.case}, {spec.store}{link}: {state}")
    return records


def _run(spec: EngineSpec, options: EngineOptions) -> dict[str, Any]:
    with run_root(options.folder) as root:
        placed = asdict(replace(spec, folder=str(root)))
        try:
            measured, _ = measure_in_child(
                "asymcheck_lab.engine_run", placed, root.parent, options.timeout_s
            )
        except RunError as failure:
            return {"error": str(failure)}
        return measured


def read_engine(path: Path) -> list[dict[str, Any]]:
    """Every record of a results file.

    Raises:
        DataError: It cannot be read, or holds something else.
    """

    def known(record: Mapping[str, Any]) -> bool:
        return record["task"] in TASKS and bool(record["case"]) and bool(record["store"])

    return read_records(path, known)
