"""What one GPU can tell in eight minutes: ``asymlab gpu --out DIR``.

Every section is a process of its own that appends a JSON line for each thing it measured, at
once: a section that runs out of time, or fails, leaves what it has, and the next one starts on
an empty device. Checkpoints go below the same folder and are removed again.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any

from asymcheck_lab.bench import append_record, describe_session, read_records
from asymcheck_lab.bench_child import watch_child
from asymcheck_lab.errors import LabError, RunError
from asymcheck_lab.record import measured_when

NOT_HERE = "not run here: no CUDA device"
BUDGET_S = 460.0
_SPARE_S = 5.0
"""Of a section's time that is left for ending in order, before it is killed."""
RECORDS = "gpu.jsonl"
PAGE = "gpu.md"


@dataclass(frozen=True, slots=True)
class Section:
    """One process.

    Attributes:
        name: Of the function in ``gpu_sections``, or of a model there.
        least_s: It is not started with less time left.
        most_s: It may not take longer.
    """

    name: str
    least_s: float
    most_s: float


SECTIONS = (
    Section("check", 20.0, 60.0),
    Section("link", 20.0, 45.0),
    Section("124m", 30.0, 90.0),
    Section("774m", 40.0, 130.0),
    Section("1.5b", 50.0, 200.0),
    Section("3.3b", 60.0, 120.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionSpec:
    """What a section's process is told.

    Attributes:
        name: Which one.
        device: ``cuda``, or ``cpu`` in tests.
        left_s: It ends by itself after so long.
        folder: For checkpoints; removed afterwards.
        records: Gets the lines.
        session: What every line begins with.
    """

    name: str
    device: str
    left_s: float
    folder: str
    records: str
    session: Mapping[str, Any]


def has_cuda() -> bool:
    """Whether there is a device to run on."""
    import torch

    return torch.cuda.is_available()


def run_gpu(
    out: Path,
    say: Callable[[str], None],
    *,
    budget_s: float = BUDGET_S,
    sections: Sequence[Section] = SECTIONS,
    device: str = "cuda",
) -> list[dict[str, Any]]:
    """Run the sections one after the other until the time is over; blocks.

    Args:
        out: Gets ``gpu.jsonl`` and ``gpu.md``, and holds checkpoints meanwhile.
        say: Told how it goes, a line at a time.
        budget_s: Seconds in all.
        sections: What to run.
        device: ``cuda``; ``cpu`` in tests.

    Returns:
        The records of this session.

    Raises:
        LabError: The folder cannot be used.
    """
    until_s = monotonic() + budget_s
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise LabError(f"{out}: {failure.strerror}") from failure
    records = out / RECORDS
    session = describe_session(f"asymlab gpu --out {out.name}", out, (0,))
    session["machine"]["cores_used"] = len(os.sched_getaffinity(0))
    session["machine"]["device"] = _device_name(device)
    for section in sections:
        left_s = min(section.most_s, until_s - monotonic())
        if left_s < section.least_s:
            append_record(records, {**session, "section": section.name, "skipped": "no time left"})
            say(f"{section.name}: no time left")
            continue
        begin_s = monotonic()
        folder = Path(tempfile.mkdtemp(prefix="section-", dir=out)).resolve()
        spec = SectionSpec(
            name=section.name,
            device=device,
            left_s=left_s - _SPARE_S,
            folder=str(folder),
            records=str(records.resolve()),
            session=session,
        )
        try:
            watch_child(
                "asymcheck_lab.gpu_script", [json.dumps(asdict(spec))], folder / "log.txt", left_s
            )
            ended = "done"
        except RunError as failure:
            ended = f"failed: {str(failure).splitlines()[-1]}"
            append_record(records, {**session, "section": section.name, "error": str(failure)})
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        say(f"{section.name}: {ended} after {monotonic() - begin_s:.0f} s")
    found = [
        record
        for record in read_records(records, lambda r: bool(r["section"]))
        if record["session"] == session["session"]
    ]
    (out / PAGE).write_text(render(found), encoding="utf-8")
    return found


def _device_name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else device


# --- what it says -----------------------------------------------------------


def render(records: Sequence[Mapping[str, Any]]) -> str:
    """One session as Markdown."""
    first = records[0]
    machine = first["machine"]
    lines = [
        f"{measured_when(first['session'], first['commit'])}, on "
        f"{machine['device']}, {machine['cpu']}, {machine['cores_used']} cores, "
        f"{machine['file_system']}, torch {first['versions']['torch']}.",
        "",
        "| section | what | found |",
        "| --- | --- | --- |",
    ]
    for record in records:
        if "system" in record:
            continue
        if "error" in record or "skipped" in record:
            what, found = "", record.get("skipped") or record["error"].splitlines()[-1][:200]
        else:
            what, found = record["what"], record["found"]
        lines.append(f"| {record['section']} | {what} | {found} |")
    systems = [r for r in records if "system" in r]
    if systems:
        lines += [
            "",
            "| model | system | step, ms | blocked, ms | lost per checkpoint, ms | durable, s | "
            "copy, GB/s |",
            "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
        ]
        lines += [_system_row(r) for r in systems]
    return "\n".join(lines) + "\n"


def _system_row(record: Mapping[str, Any]) -> str:
    if "error" in record or "skipped" in record:
        why = record.get("skipped") or record["error"].splitlines()[-1][:200]
        return f"| {record['section']} | {record['system']} | {why} | | | | |"
    cells = [f"{1000 * record['step_s']:.1f}"]
    for name, factor, form in (
        ("blocked_s", 1000, ".1f"),
        ("lost_s", 1000, "+.1f"),
        ("durable_s", 1, ".2f"),
        ("copy_bytes_per_s", 1e-9, ".1f"),
    ):
        value = record.get(name)
        cells.append("–" if value is None else format(factor * value, form))
    return f"| {record['section']} | {record['system']} | " + " | ".join(cells) + " |"


# --- one section ------------------------------------------------------------


def main() -> None:
    """Entry of a section's process: the specification as JSON."""
    # As cuBLAS wants it to be deterministic; read when the device is first used.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    from asymcheck_lab.gpu_sections import run_section

    spec = SectionSpec(**json.loads(sys.argv[1]))
    until_s = monotonic() + spec.left_s

    def tell(fields: Mapping[str, Any]) -> None:
        append_record(Path(spec.records), {**spec.session, "section": spec.name, **fields})

    run_section(replace(spec, session={}), until_s, tell)


def failure_text(failure: BaseException) -> str:
    """An error for a record: where it was raised, and last what it says."""
    return "".join(traceback.format_exception(failure))[-2000:].strip()


if __name__ == "__main__":
    main()
