"""The engine's benchmarks: arithmetic on made-up runs, and small real ones that time nothing."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from asymcheck.testing.children import run_in_child
from asymcheck_lab import engine_bench, engine_link
from asymcheck_lab.bench import newest_session
from asymcheck_lab.bench_report import BEGIN, END
from asymcheck_lab.cli import app
from asymcheck_lab.engine_bench import (
    PARTITIONERS,
    STRATEGIES,
    TASKS,
    EngineOptions,
    cases,
    read_engine,
    run_engine,
)
from asymcheck_lab.engine_link import Link, Network
from asymcheck_lab.engine_report import (
    durable_of,
    ladder_verdicts,
    link_verdicts,
    overhead_of,
    render,
    rung_of,
    stall_of,
)
from asymcheck_lab.engine_run import measure
from asymcheck_lab.engine_spec import EngineSpec
from asymcheck_lab.errors import DataError, UsageError
from asymcheck_lab.simulate import simulate

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "benchmarks-engine.md"
PUBLISHED = ROOT / "results" / "engine.jsonl"
MB = 10**6

SESSION = {
    "schema": 1,
    "session": "2026-01-02T00:00:00+00:00",
    "machine": {
        "cpu": "a cpu",
        "cpus": 2,
        "cores_used": 2,
        "file_system": "ext4",
        "kernel": "6",
        "memory_bytes": 1,
    },
    "versions": {"torch": "2"},
    "commit": "abc",
    "commit_is_clean": True,
    "command": "asymlab engine",
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the runs are forks of this process
    yield
    torch.set_num_threads(before)


def record(task: str, case: str, store: str = "200", **fields: Any) -> dict[str, Any]:
    return {**SESSION, "task": task, "case": case, "store": store, **fields}


# --- bounds -----------------------------------------------------------------


def stall(case: str, window_s: float, blocked_s: float, eager_bytes: int = 0) -> dict[str, Any]:
    row = {
        "step_s": blocked_s / 4,
        "fence_s": blocked_s * 3 / 4,
        "window_s": window_s,
        "eager_bytes": eager_bytes,
        "raw_bytes": eager_bytes + 100 * MB,
    }
    saves = [row, row, {**row, "fence_s": 9.0}]  # one disturbed checkpoint decides nothing
    return record("stall", case, bandwidth_bytes_per_s=1e9, saves=saves)


def test_a_hidden_copy_may_block_for_the_eager_bytes_and_a_tenth_of_itself():
    found = stall_of(stall("long", 0.2, 0.021, eager_bytes=10 * MB))
    assert found.bound_s == pytest.approx(0.010 + 0.0 + 0.010 + 0.002)
    assert found.measured_s == pytest.approx(0.021)
    assert found.met
    assert stall_of(stall("long", 0.2, 0.023, eager_bytes=10 * MB)).met is False


def test_a_copy_that_does_not_fit_may_block_for_what_is_left_of_it():
    found = stall_of(stall("short", 0.04, 0.0715))
    assert found.bound_s == pytest.approx(0.06 + 0.010 + 0.002)
    assert found.met
    assert stall_of(stall("short", 0.04, 0.0725)).met is False


@pytest.mark.parametrize(("case", "window_s"), [("long", 0.149), ("short", 0.051)])
def test_a_run_outside_of_its_regime_judges_nothing(case, window_s):
    assert stall_of(stall(case, window_s, 0.0)).met is None


def durable(store: str, **changes: float) -> dict[str, Any]:
    row = {
        "step_s": 0.02,
        "copy_s": 0.08,
        "stored_bytes": 20 * MB,
        "write_s": 0.2,
        "cpu_s": 0.1,
        "durable_s": 0.5,
        **changes,
    }
    return record("durable", "asymcheck", store, saves=[row] * 3)


@pytest.mark.parametrize(
    ("changes", "longest_s"), [({}, 0.4), ({"copy_s": 0.58}, 0.6), ({"cpu_s": 0.7}, 0.7)]
)
def test_the_time_to_durable_is_held_to_the_longest_of_what_cannot_be_shortened(changes, longest_s):
    run = durable("50", **changes)
    found = durable_of(run)
    assert found.bound_s == pytest.approx(1.15 * longest_s)
    assert found.met is (longest_s > 0.5)
    assert durable_of({**run, "store": "1000"}).met is None


def test_the_rate_of_a_disk_is_that_of_the_runs_own_writes():
    assert durable_of(durable("disk")).terms["store_s"] == pytest.approx(0.2)


def test_cpu_seconds_are_shared_by_the_cores_that_do_not_train():
    run = durable("50", cpu_s=3.0)
    run["machine"] = {**run["machine"], "cores_used": 4}
    assert durable_of(run).terms["cpu_s"] == pytest.approx(1.0)


# --- the ladder -------------------------------------------------------------


def ablation(case: str, loop_s: float = 10.0, **changes: float) -> dict[str, Any]:
    row = {
        "stall_s": 0.01,
        "durable_s": 1.0,
        "stored_bytes": 10 * MB,
        "cpu_s": 0.1,
        "fidelity": "exact",
        "labels": {"parameter float32": "raw"},
        **changes,
    }
    return record("ablation", case, "50", loop_s=loop_s, saves=[row] * 3)


def test_each_step_of_the_ablation_is_held_to_the_figure_that_it_is_for():
    runs = {
        "asymcheck-naive": ablation("asymcheck-naive"),
        "asymcheck-s": ablation("asymcheck-s", stored_bytes=8 * MB, durable_s=2.0),
        "asymcheck-so": ablation("asymcheck-so", stored_bytes=8 * MB, durable_s=2.1),
        "asymcheck": ablation("asymcheck", stall_s=0.0101, cpu_s=0.2),
    }
    rungs = {name: rung_of(run, None) for name, run in runs.items()}
    met = {v.asked.split(": ", 1)[1]: v.met for v in ladder_verdicts(rungs, "50")}
    assert [(asked.partition(":")[0], ok) for asked, ok in met.items()] == [
        ("asymcheck-naive → asymcheck-s", True),
        ("asymcheck-s → asymcheck-so", False),  # 5 % later: more than noise
        ("asymcheck-so → asymcheck", True),  # 1 % more stall: noise
        ("asymcheck-so → asymcheck", False),  # twice the CPU
        ("asymcheck-naive → asymcheck", True),
    ]


def test_a_slowdown_is_against_the_run_without_checkpoints_on_the_same_store():
    run = ablation("asymcheck", loop_s=10.5)
    assert rung_of(run, {"loop_s": 10.0}).slowdown == pytest.approx(0.05)
    assert rung_of(run, None).slowdown is None


# --- the link ---------------------------------------------------------------


def link(case: str, shared: bool, overheads: list[float]) -> dict[str, Any]:
    return record(
        "link",
        case,
        "disk",
        shared=shared,
        step_s=0.5,
        with_s=[2.0 * (1 + x) for x in overheads],
        without_s=[2.0] * len(overheads),
        simulated=0.05,
        free_running=case == "free-running",
        kappa={"collective": [0.1, 0.2, 0.3]},
        bandwidth_bytes_per_s=6e8,
        comm_ratio=0.6,
        copy_by_idle=0.85,
    )


def test_what_a_copy_adds_is_the_median_of_pairs():
    assert overhead_of(link("adaptive", True, [0.1, 0.3, 9.0])).median == pytest.approx(0.3)


def test_on_a_shared_link_both_plans_must_beat_both_others_and_on_another_not_lose():
    runs = [
        link("free-running", True, [0.10] * 3),
        link("equal slots", True, [0.02] * 3),
        link("idle-proportional", True, [0.03] * 3),
        link("adaptive", True, [0.01] * 3),
        link("free-running", False, [0.0] * 3),
        link("adaptive", False, [0.05] * 3),
    ]
    assert [v.met for v in link_verdicts(runs)] == [False, True, True, True, False]
    runs[-1] = link("adaptive", False, [0.019] * 3)
    assert link_verdicts(runs)[-1].met


def test_a_link_serves_in_order_and_saves_no_time_up(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(engine_link, "perf_counter", lambda: now[0])
    link = Link(10.0)
    assert link.reserve(20) == (100.0, 102.0)
    assert link.reserve(10) == (102.0, 103.0)
    now[0] = 200.0
    assert link.reserve(10) == (200.0, 201.0)


def test_a_network_carries_out_collectives_inside_of_the_context_that_it_was_given():
    inside = []

    class Around:
        def __enter__(self):
            inside.append("in")

        def __exit__(self, *_):
            inside.append("out")

    network = Network(Link(1e12), Around)
    assert network.send(3 * engine_link.PIECE_BYTES).wait(20.0)
    assert network.send(0).is_set()
    network.close()
    assert inside == ["in", "out"]


def test_the_load_of_the_link_is_in_the_band_in_which_the_instants_matter():
    (spec,) = {
        (s.state_bytes, s.step_s) for s in cases(EngineOptions()) if s.task == "link" and s.shared
    }
    load = engine_link.load_of(*spec, shared=True)
    idle_s = sum(max(0.0, s.compute_s - s.comm_s) for s in load.slots())
    assert 0.3 < load.lazy_bytes / load.bandwidth_bytes_per_s / idle_s < 1.0
    cost = {p: simulate(load, p).overhead for p in ("free", "equal", "proportional", "adaptive")}
    assert max(cost["proportional"], cost["adaptive"]) < min(cost["free"], cost["equal"])


# --- small real runs --------------------------------------------------------


def spec_for(task: str, case: str, folder: Path, **changes: Any) -> EngineSpec:
    folder.mkdir(parents=True, exist_ok=True)
    spec = EngineSpec(
        task=task,  # type: ignore[arg-type]
        case=case,
        store="1000",
        checkpoints=2,
        state_bytes=8 * MB,
        every=2,
        size="tiny",
        step_s=0.06,
        shared=True,
        cores=tuple(sorted(os.sched_getaffinity(0))),
        folder=str(folder),
    )
    return replace(spec, **changes)


def run_small(spec: EngineSpec) -> dict[str, Any]:
    (found,) = run_in_child(lambda say: say(measure(spec)), timeout_s=120).check()
    return {**SESSION, "task": spec.task, "case": spec.case, "store": spec.store, **found}


@pytest.mark.parametrize(
    ("task", "case"), [("stall", "long"), ("durable", "asymcheck"), ("ablation", "asymcheck-so")]
)
def test_a_small_run_gives_every_figure_of_its_bound(task, case, tmp_path):
    found = run_small(spec_for(task, case, tmp_path / "root"))
    assert len(found["saves"]) == 2
    for row in found["saves"]:
        assert row["durable_s"] > 0.0
        assert row["stored_bytes"] > 0
        assert row["raw_bytes"] >= row["eager_bytes"]
        assert row["window_s"] > 0.0
        # The language model of the tests has leaves only that are copied at the boundary.
        assert (row["copy_s"] > 0.0) == (task != "ablation")
    assert {"stall": stall_of, "durable": durable_of, "ablation": lambda r: rung_of(r, None)}[task](
        found
    )


def test_a_small_ablation_without_checkpoints_only_trains(tmp_path):
    found = run_small(spec_for("ablation", "none", tmp_path / "root"))
    assert found["saves"] == []
    assert found["loop_s"] > 0.0
    assert not any((tmp_path / "root").iterdir())


def test_a_small_run_of_the_link_sees_its_traffic(tmp_path):
    found = run_small(spec_for("link", "idle-proportional", tmp_path / "root"))
    assert len(found["with_s"]) == len(found["without_s"]) == 2
    assert found["free_running"] is False  # so windows, traffic and bandwidth were measured
    assert found["bandwidth_bytes_per_s"] > 0.0
    assert "collective" in found["kappa"]


# --- sessions and pages -----------------------------------------------------


def test_a_session_records_every_case_and_goes_on_after_one_that_fails(tmp_path, monkeypatch):
    good = replace(spec_for("ablation", "none", tmp_path), cores=(), folder="", every=1)
    bad = replace(good, case="no-such-strategy")
    monkeypatch.setattr(engine_bench, "cases", lambda options: iter([bad, good]))
    options = EngineOptions(folder=tmp_path / "runs", results=tmp_path / "engine.jsonl")
    said: list[str] = []
    records = run_engine(options, said.append)
    assert read_engine(options.results) == records
    assert "no-such-strategy" in records[0]["error"]
    assert records[1]["loop_s"] > 0.0
    assert len(said) == 2
    assert list((tmp_path / "runs").iterdir()) == []
    assert "no-such-strategy" in render(records)


def test_the_cases_are_those_that_the_page_describes():
    full = list(cases(EngineOptions()))
    assert {s.task for s in full} == set(TASKS)
    assert all(s.checkpoints >= 30 for s in full if s.task == "stall")
    assert {s.case for s in full if s.task == "ablation"} == set(STRATEGIES)
    assert {(s.shared, s.case) for s in full if s.task == "link"} == {
        (shared, case) for shared in (True, False) for case in PARTITIONERS
    }
    assert {s.store for s in full} == {"50", "200", "1000", "disk"}
    quick = list(cases(EngineOptions(quick=True)))
    assert {s.task for s in quick} == set(TASKS)
    assert len(quick) < len(full) / 2


def test_a_store_with_a_rate_is_named_by_its_url():
    spec = EngineSpec(
        task="durable", case="x", store="50", checkpoints=1, folder="/a", latency_s=0.005
    )
    assert spec.root == "throttled+file:///a?bytes_per_s=50000000.0&latency_s=0.005"
    assert replace(spec, store="disk").root == "/a"


def test_an_unknown_task_and_a_quick_page_are_refused(tmp_path):
    with pytest.raises(UsageError, match="tasks: expected some of stall, durable"):
        EngineOptions(tasks=("stalls",))
    page = tmp_path / "page.md"
    done = CliRunner().invoke(app, ["engine", "--quick", "--docs", str(page)])
    assert done.exit_code == 2
    assert "docs: expected none with --quick" in done.output


def test_every_table_has_its_rows_and_its_verdicts():
    text = render(
        [
            stall("long", 0.2, 0.01),
            stall("short", 0.09, 0.01),
            durable("50"),
            durable("disk"),
            ablation("none"),
            ablation("asymcheck-naive"),
            ablation("asymcheck-s", stored_bytes=12 * MB),
            link("free-running", True, [0.1] * 3),
            link("adaptive", True, [0.0] * 3),
        ]
    )
    assert (
        "| long window | 200 MB/s | 3 | 1.00 | 100.0 | 200.0 | 2.00 | 10.0 | 12.0 | yes |" in text
    )
    assert "| other regime |" in text
    assert "| **no** |" in text
    assert "stores less | **no** | 10.0 MB → 12.0 MB |" in text
    assert (
        "| shared, adaptive | +0.0 (+0.0 to +0.0) | +5.0 | yes | 0.20 (0.10 to 0.30) | 600 |"
        in text
    )
    assert "| shared link: adaptive adds less than free-running | yes |" in text
    with pytest.raises(DataError, match="expected records"):
        render([])


def test_the_newest_session_can_be_shown_again(tmp_path):
    path = tmp_path / "engine.jsonl"
    runs = [durable("50"), {**durable("200"), "session": "2025-01-01T00:00:00+00:00"}]
    path.write_text("".join(json.dumps(r) + "\n" for r in runs))
    done = CliRunner().invoke(app, ["engine", "--report", "--results", str(path)])
    assert done.exit_code == 0, done.output
    assert done.output.strip() == render(runs[:1]).strip()
    path.write_text('{"schema": 1, "task": "other"}\n')
    assert CliRunner().invoke(app, ["engine", "--report", "--results", str(path)]).exit_code == 1


def test_the_tables_in_the_docs_are_those_of_the_published_records():
    shown = PAGE.read_text().partition(BEGIN)[2].partition(END)[0].strip()
    if PUBLISHED.exists():
        assert shown == render(newest_session(read_engine(PUBLISHED))).strip()
    else:
        assert shown == "Nothing is published yet."


def test_the_fluid_model_prints_its_table():
    done = CliRunner().invoke(app, ["simulate"])
    assert done.exit_code == 0, done.output
    assert "| 10 | 25 | 0.6 | yes |" in done.output
