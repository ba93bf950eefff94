"""The comparison on several ranks: nothing here is timed, everything else about it is checked."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
from typer.testing import CliRunner

from asymcheck.testing.children import Child
from asymcheck_lab import bench_ranks
from asymcheck_lab.bench_ranks import measure_ranks, merged
from asymcheck_lab.bench_report import BEGIN, END
from asymcheck_lab.bench_run import RunSpec
from asymcheck_lab.cli import app
from asymcheck_lab.compare import Cell, CompareOptions, run_compare, why_absent
from asymcheck_lab.compare_records import read_compare, run_of
from asymcheck_lab.compare_report import head_of, notes_of, render, targets_of
from asymcheck_lab.compare_stats import cells_of
from asymcheck_lab.errors import UsageError
from asymcheck_lab.rivals import RANK_SYSTEMS, RIVALS

ROOT = Path(__file__).parents[2]


def options_for(folder: Path, **changes: Any) -> CompareOptions:
    fields: dict[str, Any] = {
        "models": ("gpt2",),
        "systems": ("asymcheck", "dcp-thread", "deepspeed"),
        "parallels": ("fsdp2",),
        "every": (2,),
        "steps": 3,
        "warmup": 1,
        "folder": folder / "runs",
        "results": folder / "results" / "compare-ranks.jsonl",
        "verify": True,
    }
    return CompareOptions(**(fields | changes))


def check_records(records: Sequence[dict[str, Any]]) -> None:
    """Every system that ran gave all back, and was seen to be durable."""
    parameters = {r["state_bytes"] for r in records if "absent" not in r and "error" not in r}
    for record in records:
        assert "error" not in record, record["error"]
        if "absent" in record:
            continue
        assert record["ranks"] == 2
        assert record["verified"] is True
        assert len(record["step_s"]) == 3
        assert [c["step"] for c in record["checkpoints"]] == [2, 4]
        if record["system"] == "none":
            continue
        assert record["bit_exact"] is True, record["system"]
        assert record["saved_bytes"] == record["state_bytes"]
        assert record["disk_bytes"] > record["state_bytes"] / 2
        assert record["restore_s"] > 0
        assert all(c["durable_s"] > 0 for c in record["checkpoints"])
    assert len(parameters) == 1
    assert min(parameters) > 300_000  # two moments of each of the parameters, on whatever rank


def test_two_ranks_save_and_load_back_what_they_had(tmp_path: Path) -> None:
    options = options_for(tmp_path)
    records = run_compare(options, lambda _: None)
    check_records(records)
    assert {r["system"] for r in records if "absent" in r} == {"deepspeed"}
    assert list(options.folder.iterdir()) == []
    assert read_compare(options.results) == [run_of(record) for record in records]
    (found,) = cells_of(read_compare(options.results))
    assert "gpt2 tiny, fsdp2 on 2 ranks, every 2 steps" in head_of(found)
    assert (
        "DeepSpeed save_checkpoint: not here: not measured with fsdp2: it saves DeepSpeed's own "
        "engines alone"
    ) in notes_of(found)


@pytest.mark.extra
@pytest.mark.parametrize(
    ("parallel", "systems"),
    [
        ("ddp", RANK_SYSTEMS),
        ("fsdp2", ("none", "asymcheck", "dcp", "dcp-process-stager")),
        ("zero3", ("none", "asymcheck", "dcp-thread", "deepspeed")),
    ],
)
def test_every_system_of_several_ranks_gives_back_what_it_was_given(
    parallel: str,
    systems: tuple[str, ...],
    tmp_path: Path,
    not_run_here: Callable[[str], NoReturn],
) -> None:
    absent = RIVALS["deepspeed"].missing()
    if parallel == "zero3" and absent:
        not_run_here(absent)
    options = options_for(tmp_path, systems=systems, parallels=(parallel,))
    records = run_compare(options, lambda _: None)
    check_records(records)
    ran = {r["system"] for r in records if "absent" not in r}
    assert ran == set(systems) - (set() if parallel == "zero3" else {"deepspeed"})


# --- forks ------------------------------------------------------------------


def spec_in(folder: Path) -> RunSpec:
    return RunSpec(
        system="none",
        size="tiny",
        steps=1,
        every=1,
        warmup=1,
        cores=(0,),
        folder=str(folder),
        parallel="ddp",
        ranks=2,
    )


def test_each_rank_is_a_process_and_one_record_comes_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(spec: RunSpec, timed: Callable[[], None]) -> dict[str, Any]:
        timed()
        return measured(whole_s=1.0 + spec.rank)

    monkeypatch.setattr(bench_ranks, "measure", measure)
    out = tmp_path / "measured.json"

    def work(say: Callable[[Any], None]) -> None:
        found = measure_ranks(spec_in(tmp_path), out, (tmp_path / "timed").touch)
        if found is not None:
            say(found["whole_s"])

    assert Child(work).wait(60).check() == [2.0]
    assert (tmp_path / "timed").exists()


def test_when_a_rank_fails_the_others_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(spec: RunSpec, _: object) -> dict[str, Any]:
        if spec.rank == 0:
            signal.pause()  # for ever, but for whoever ends it
        raise SystemExit(3)

    monkeypatch.setattr(bench_ranks, "measure", measure)

    def work(_: Callable[[Any], None]) -> None:
        measure_ranks(spec_in(tmp_path), tmp_path / "measured.json", lambda: None)

    outcome = Child(work).wait(60)
    assert not outcome.was_killed
    assert outcome.status


def test_a_rank_that_aborts_once_it_has_measured_all_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_ranks, "measure", lambda spec, _: measured(whole_s=1.0 + spec.rank))

    def work(say: Callable[[Any], None]) -> None:
        found = measure_ranks(spec_in(tmp_path), tmp_path / "measured.json", lambda: None)
        if found is None:
            os.abort()
        say(found["whole_s"])

    assert Child(work).wait(60).check() == [2.0]


# --- one record of several ---------------------------------------------------


def measured(**changes: Any) -> dict[str, Any]:
    base = {
        "state_bytes": 100,
        "disk_bytes": 70,
        "step_s": [1.0, 2.0],
        "loop_s": 3.0,
        "whole_s": 4.0,
        "first_checkpoint": checkpoint(),
        "checkpoints": [checkpoint()],
        "training_cpu_s": 1.0,
        "background_cpu_s": 0.5,
        "machine_cpu_s": 9.0,
        "steal_s": 0.1,
        "details": {"of": "this rank"},
    }
    return {**base, **changes}


def checkpoint(**changes: Any) -> dict[str, Any]:
    base = {"step": 2, "blocked_s": 0.1, "durable_s": 1.0, "lag_steps": 1, "skipped": False}
    return {**base, **changes}


def test_times_are_those_of_the_slowest_rank() -> None:
    one = measured(step_s=[1.0, 5.0], whole_s=4.0, checkpoints=[checkpoint(blocked_s=0.3)])
    other = measured(step_s=[2.0, 2.0], whole_s=6.0, checkpoints=[checkpoint(durable_s=2.0)])
    found = merged([one, other], is_shared=True)
    assert found["step_s"] == [2.0, 5.0]
    assert (found["loop_s"], found["whole_s"]) == (3.0, 6.0)
    assert found["checkpoints"] == [checkpoint(blocked_s=0.3, durable_s=2.0)]
    assert (found["training_cpu_s"], found["background_cpu_s"]) == (2.0, 1.0)
    assert (found["machine_cpu_s"], found["steal_s"]) == (9.0, 0.1)
    assert found["disk_bytes"] == 70  # the folder is that of all


def test_shards_are_added_up_and_replicas_are_not() -> None:
    checked = {"saved_bytes": 90, "restore_s": 1.0, "bit_exact": True, "max_error": 0.0}
    ranks = [measured(**checked), measured(**{**checked, "state_bytes": 102, "restore_s": 2.0})]
    shards, replicas = merged(ranks, is_shared=True), merged(ranks, is_shared=False)
    assert (shards["state_bytes"], shards["saved_bytes"]) == (202, 180)
    assert (replicas["state_bytes"], replicas["saved_bytes"]) == (102, 90)
    assert replicas["restore_s"] == 2.0


@pytest.mark.parametrize(("other", "exact"), [(True, True), (False, False), (None, None)])
def test_what_one_rank_lost_is_lost(other: bool | None, exact: bool | None) -> None:
    checked = {"saved_bytes": 90, "restore_s": 1.0, "bit_exact": True, "max_error": 0.0}
    gone = checkpoint(durable_s=None, lag_steps=None, skipped=True)
    ranks = [measured(**checked), measured(**{**checked, "bit_exact": other}, checkpoints=[gone])]
    found = merged(ranks, is_shared=True)
    assert found["bit_exact"] is exact
    assert found["checkpoints"] == [gone]


# --- cells and options --------------------------------------------------------


def test_a_cell_of_ranks_is_another_cell(bench_record: Callable[..., dict[str, Any]]) -> None:
    alone = bench_record("none")
    assert "ranks" not in alone  # as older records are
    spread = {"parallel": "ddp", "ranks": 2}
    runs = [run_of(alone), run_of({**alone, **spread}), run_of({**alone, **spread, "ranks": 4})]
    assert [cell.trained for cell in cells_of(runs)] == [
        "gpt2 tiny",
        "gpt2 tiny, ddp on 2 ranks",
        "gpt2 tiny, ddp on 4 ranks",
    ]


def test_a_session_of_ranks_says_how_to_do_it_again(tmp_path: Path) -> None:
    options = options_for(tmp_path, parallels=("none", "ddp"), ranks=3)
    assert "--parallel none,ddp --ranks 3 --rounds 1" in options.command
    assert options.cells == [
        Cell("gpt2", "tiny", 2, "disk", "none", 1),
        Cell("gpt2", "tiny", 2, "disk", "ddp", 3),
    ]
    assert [str(cell) for cell in options.cells] == [
        "gpt2 tiny, every 2, disk",
        "gpt2 tiny, ddp on 3 ranks, every 2, disk",
    ]


def test_every_system_runs_on_ranks_or_says_why_not() -> None:
    for name, rival in RIVALS.items():
        why = why_absent(rival, "disk", "fsdp2")
        if name in RANK_SYSTEMS and name != "deepspeed":
            assert why == rival.missing()
        elif rival.kind == "rival":
            assert why is not None
            assert why.startswith("not measured with fsdp2: ")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallels": ("fsdp",)}, "parallel: expected some of none, ddp, fsdp2, zero3, found"),
        ({"ranks": 1}, "ranks: expected at least 2, found 1"),
    ],
)
def test_a_wrong_option_of_ranks_is_refused_by_its_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        options_for(tmp_path, **changes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parallel", "ddp"], "parallel: expected --models with it, found none"),
        (["--models", "gpt2", "--ranks", "2"], "ranks: expected --parallel with it, found none"),
    ],
)
def test_options_of_ranks_that_lack_another_are_refused(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["bench", *arguments])
    assert done.exit_code == 2
    assert message in done.output


def test_what_is_aimed_at_stands_below_a_table_of_ranks(
    bench_record: Callable[..., dict[str, Any]],
) -> None:
    spread = {"parallel": "ddp", "ranks": 2}
    records = [
        *(bench_record("none", round=n, **spread) for n in (1, 2, 3)),
        *(bench_record(round=n, restore_s=0.9, **spread) for n in (1, 2, 3)),
        *(
            bench_record("dcp-thread", round=n, blocked_s=0.2, slower_s=0.5, **spread)
            for n in (1, 2, 3)
        ),
    ]
    (found,) = cells_of([run_of(record) for record in records])
    assert targets_of(found) == [
        "Reached: a slowdown that is the lowest, or cannot be told from it: +4.0 % against +99.9 %",
        "Reached: a stall of at most a tenth of that of DCP's default async_save: 0.05 of it",
        "**Missed**: loading no slower than DCP: 0.900 s against 0.020 s",
    ]
    alone = [run_of({**record, "parallel": "none", "ranks": 1}) for record in records]
    assert targets_of(cells_of(alone)[0]) == []


def test_the_tables_in_the_docs_are_those_of_the_published_records() -> None:
    page = (ROOT / "docs" / "distributed-benchmarks.md").read_text()
    shown = page.partition(BEGIN)[2].partition(END)[0].strip()
    published = ROOT / "results" / "compare-ranks.jsonl"
    if published.exists():
        assert shown == render(read_compare(published)).strip()
    else:
        assert shown == "Nothing is published yet."
