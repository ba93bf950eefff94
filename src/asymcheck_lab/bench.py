"""The benchmark: every system in turn, each run a fresh process, in interleaved rounds.

This process only starts the runs, watches their memory and writes down what they measured; it
loads no torch.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from asymcheck.errors import nearest
from asymcheck_lab.bench_child import measure_in_child, proc_table, run_root, touched_memory
from asymcheck_lab.bench_run import RunSpec
from asymcheck_lab.bench_work import size_of
from asymcheck_lab.errors import DataError, LabError, RunError, UsageError
from asymcheck_lab.rivals import BASELINE, DEFAULT_SYSTEMS, NONE, OURS, RIVALS

SCHEMA = 1
QUICK_SYSTEMS = (NONE, OURS, BASELINE, "dcp-thread")
_WARM_BYTES = 8 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What to compare, and where its traces go.

    Attributes:
        size: ``124m`` or ``tiny``.
        systems: Names out of ``rivals.RIVALS``; ``none`` is added where it is missing.
        rounds: How often each system runs.
        steps: Counted steps of a run.
        every: Steps between two checkpoints.
        warmup: Steps before the counted ones.
        folder: Checkpoints go below it while a run lasts; on the medium to be measured.
        results: Gets a JSON line for each run, appended.
        verify: Load every checkpoint back and compare; such times are not worth reading.
        timeout_s: How long a run may take.
    """

    size: str = "124m"
    systems: tuple[str, ...] = DEFAULT_SYSTEMS
    rounds: int = 5
    steps: int = 15
    every: int = 5
    warmup: int = 2
    folder: Path = Path("runs/bench")
    results: Path = Path("results/bench.jsonl")
    verify: bool = False
    timeout_s: float = 900.0

    def __post_init__(self) -> None:
        size_of(self.size)
        for name in ("rounds", "steps", "every", "warmup"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}: expected at least 1, found {getattr(self, name)}")
        if self.warmup >= self.every:
            raise UsageError(
                f"warmup: expected fewer steps than every={self.every}, found {self.warmup}"
            )
        refuse_unknown("systems", self.systems, RIVALS)

    @property
    def all_systems(self) -> tuple[str, ...]:
        """Those to run, without repetition, the comparison first."""
        return comparison_first(self.systems)

    @property
    def command(self) -> str:
        """The command that does this again; the folders are left out."""
        return (
            f"asymlab bench --size {self.size} --rounds {self.rounds} --steps {self.steps} "
            f"--every {self.every} --warmup {self.warmup} --systems {','.join(self.all_systems)}"
        )


def refuse_unknown(option: str, chosen: Iterable[str], known: Collection[str]) -> None:
    """Refuse names that there are not.

    Raises:
        UsageError: One is not known; names the nearest.
    """
    for name in chosen:
        if name not in known:
            raise UsageError(
                f"{option}: expected some of {', '.join(known)}, found "
                f"{name!r}{nearest(name, known)}"
            )


def comparison_first(systems: Iterable[str]) -> tuple[str, ...]:
    """The systems without repetition, behind the run without checkpoints."""
    return tuple(dict.fromkeys((NONE, *systems)))


def run_bench(options: BenchOptions, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Run every system in every round; blocks.

    A run that fails is recorded with its error, and the benchmark goes on.

    Args:
        options: What to compare.
        say: Told how it goes, a line at a time.

    Returns:
        The records of this session, as they were appended to ``options.results``.

    Raises:
        UsageError: The results cannot be appended to.
        LabError: The medium failed.
    """
    cores = prepare(options.folder, options.results, read_records)
    session = {
        **describe_session(options.command, options.folder, cores),
        "size": options.size,
        "rounds": options.rounds,
        "steps": options.steps,
        "every": options.every,
        "warmup": options.warmup,
    }
    if options.size != "tiny":
        warm_memory()
    records = []
    for round_number in range(1, options.rounds + 1):
        for position, system in enumerate(order_of(options.all_systems, round_number), start=1):
            measured = _run(options, system, cores)
            record = {
                **session,
                "system": system,
                "library": _library_of(system),
                "round": round_number,
                "position": position,
                **measured,
            }
            records.append(record)
            append_record(options.results, record)
            say(f"round {round_number} of {options.rounds}, {system}: {_in_short(record)}")
    return records


def prepare(folder: Path, results: Path, read: Callable[[Path], object]) -> tuple[int, ...]:
    """Make sure that runs can be made and recorded; returns the cores that they stay on.

    Args:
        folder: Runs go below it.
        results: Gets the records.
        read: Reads what is there already; raises where it is something else.

    Raises:
        UsageError: The results cannot be appended to.
        LabError: The medium failed.
    """
    if results.exists() and results.stat().st_size:
        read(results)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        results.parent.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise LabError(f"{failure.filename}: {failure.strerror}") from failure
    return tuple(sorted(os.sched_getaffinity(0))[:2])


def describe_session(
    command: str, folder: Path, cores: Sequence[int], schema: int = SCHEMA
) -> dict[str, Any]:
    """What every record of one call of a command begins with.

    Args:
        command: Does it again.
        folder: On the medium that is measured.
        cores: The runs stay on them.
        schema: Of the records.
    """
    return {
        "schema": schema,
        "session": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(folder, cores),
        "versions": _versions(),
        **_commit(),
        "command": command,
    }


def append_record(path: Path, record: Mapping[str, Any]) -> None:
    """Append one JSON line.

    Raises:
        LabError: The medium failed.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as out:
            out.write(json.dumps(record) + "\n")
    except OSError as failure:
        raise LabError(f"{path}: {failure.strerror}") from failure


def order_of(systems: Sequence[str], round_number: int) -> list[str]:
    """The order of a round: first, last, second, last but one and so on, rotated by the round.

    So over the rounds a system runs after another one each time, and at another place.
    """
    count = len(systems)
    zigzag = [n // 2 if n % 2 == 0 else count - 1 - n // 2 for n in range(count)]
    return [systems[(n + round_number - 1) % count] for n in zigzag]


def _is_run(record: Mapping[str, Any]) -> bool:
    return record["system"] in RIVALS


def read_records(
    path: Path,
    known: Callable[[Mapping[str, Any]], bool] = _is_run,
) -> list[dict[str, Any]]:
    """Every record of a results file.

    Args:
        path: The file.
        known: Whether a record is of the kind that is expected; may raise ``KeyError``.

    Raises:
        DataError: It cannot be read, or holds something else.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as failure:
        raise DataError(
            str(path), expected="benchmark records", found=failure.strerror or str(failure)
        ) from failure
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            if record["schema"] != SCHEMA or not known(record):
                raise ValueError
        except (ValueError, TypeError, KeyError):
            raise DataError(
                f"{path}, line {number}",
                expected=f"a benchmark record of schema {SCHEMA}",
                found=repr(line[:80]),
            ) from None
        records.append(record)
    return records


def newest_session(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records of the session that was started last."""
    newest = max((r["session"] for r in records), default="")
    return [r for r in records if r["session"] == newest]


# --- one run ----------------------------------------------------------------


def _run(options: BenchOptions, system: str, cores: tuple[int, ...]) -> dict[str, Any]:
    """One run; what went wrong with it is a field of its record."""
    with run_root(options.folder) as root:
        spec = RunSpec(
            system=system,
            size=options.size,
            steps=options.steps,
            every=options.every,
            warmup=options.warmup,
            cores=cores,
            folder=str(root),
            verify=options.verify,
        )
        try:
            measured, peak_bytes = measure_in_child(
                "asymcheck_lab.bench_run", asdict(spec), root.parent, options.timeout_s
            )
        except RunError as failure:
            return {"error": str(failure)}
        return {**measured, "peak_bytes": peak_bytes}


def warm_memory() -> None:
    """Touch the memory that the runs are going to use: the first ones would pay for that."""
    touched_memory(_WARM_BYTES, 2).close()


def _in_short(record: dict[str, Any]) -> str:
    if "error" in record:
        return f"failed: {record['error'].splitlines()[-1]}"
    text = f"{record['whole_s']:.2f} s"
    if record["system"] != NONE:
        blocked_ms = [1000 * c["blocked_s"] for c in record["checkpoints"]]
        durable_s = [c["durable_s"] for c in record["checkpoints"]]
        text += (
            f", blocked {sum(blocked_ms) / len(blocked_ms):.1f} ms and durable in "
            f"{sum(durable_s) / len(durable_s):.2f} s per checkpoint"
        )
    return text


# --- where and with what ----------------------------------------------------


def describe_machine(folder: Path, cores: Sequence[int]) -> dict[str, Any]:
    """What the numbers depend on; nothing that names the machine."""
    model = ""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {
        "cpu": model or platform.machine(),
        "cpus": os.cpu_count(),
        "cores_used": len(cores),
        "memory_bytes": proc_table(Path("/proc/meminfo")).get("MemTotal", 0),
        "file_system": _file_system(folder),
        "kernel": platform.release().partition("-")[0],
    }


def _file_system(folder: Path) -> str:
    """Type of the file system that holds ``folder``."""
    here = folder.resolve()
    best, kind = -1, "unknown"
    with suppress(OSError):
        for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines():
            _, point, found, *_ = line.split()
            if here.is_relative_to(point) and len(point) >= best:
                best, kind = len(point), found
    return kind


def _versions() -> dict[str, str]:
    names = ("asymcheck", "torch", "transformers", "numpy")
    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in names},
    }


def _library_of(system: str) -> str:
    library = RIVALS[system].library
    return f"{library} {importlib.metadata.version(library)}"


def _commit() -> dict[str, Any]:
    """The commit of this checkout; ``None`` where there is none."""
    here = Path(__file__).resolve().parent

    def git(*arguments: str) -> str | None:
        with suppress(OSError):
            done = subprocess.run(
                ["git", "-C", str(here), *arguments], capture_output=True, text=True, check=False
            )
            if done.returncode == 0:
                return done.stdout.strip()
        return None

    changed = git("status", "--porcelain", "--untracked-files=no", "--", str(here.parent))
    return {"commit": git("rev-parse", "HEAD"), "commit_is_clean": changed == ""}
