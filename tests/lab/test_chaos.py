"""``asymlab chaos``, ``asymlab soak``: they judge right, say what was not tried, leave nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import asymcheck
from asymcheck import strategies
from asymcheck.memory.arena import SHARED_MEMORY, slots_of
from asymcheck_lab import chaos_places
from asymcheck_lab.chaos import ChaosOptions, broken, cases_of
from asymcheck_lab.chaos_report import groups_of, read_chaos, render, strategies_of
from asymcheck_lab.chaos_stage import FAULTS, MOMENTS
from asymcheck_lab.cli import app
from asymcheck_lab.errors import UsageError

SOURCE = str(Path(asymcheck.__file__).parents[1])
HEAD = {
    "schema": 1,
    "session": "2026-01-01T00:00:00+00:00",
    "machine": {"cpu": "a processor", "cpus": 2, "file_system": "ext4"},
    "commit": "0" * 40,
}


def asymlab(*arguments: object, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    """In a process of its own: it forks."""
    return subprocess.run(
        [sys.executable, "-m", "asymcheck_lab", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": SOURCE, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def record(fault: str, strategy: str, moment: str, **more: Any) -> dict[str, Any]:
    return {
        **HEAD,
        "command": "asymlab chaos",
        "fault": fault,
        "strategy": strategy,
        "moment": moment,
        "training": "killed",
        "tier": "root",
        "resumed_from": 4,
        "steps_lost": 1,
        "seconds": 0.25,
        "exact": "bit for bit",
        "skipped": 0,
        "problems": [],
        "note": "",
        "case_s": 1.0,
        **more,
    }


def test_two_cases_are_tried_judged_recorded_and_written_into_the_page(tmp_path: Path) -> None:
    page, results = tmp_path / "page.md", tmp_path / "chaos.jsonl"
    page.write_text("# Page\n\n<!-- tried failures: begin -->\n<!-- tried failures: end -->\n")
    done = asymlab(
        *("chaos", "--faults", "process killed,bit rot,host killed (peers)", "--moments", "commit"),
        *(
            "--strategies",
            "asymcheck",
            "--results",
            results,
            "--docs",
            page,
            "--dir",
            tmp_path / "d",
        ),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    records = {r["fault"]: r for r in read_chaos(results)}
    killed, rotten = (records[f] for f in ("process killed", "bit rot"))
    # The step was whole in shared memory, and only its manifest was missing.
    assert (killed["tier"], killed["resumed_from"]) == ("shared memory", 4)
    assert killed["exact"] == "bit for bit"
    # Host lost, the newest committed step damaged: the one before.
    assert (rotten["tier"], rotten["resumed_from"], rotten["skipped"]) == ("root", 2, 1)
    # Host lost, and what its own agent held: from the memory of the other host.
    lost = records["host killed (peers)"]
    assert (lost["training"], lost["tier"], lost["exact"]) == ("killed", "peer", "bit for bit")
    assert lost["resumed_from"] >= 2
    text = page.read_text()
    assert "3 cases: no promise was broken" in text
    assert list((tmp_path / "d").iterdir()) == []


@pytest.mark.extra
@pytest.mark.timeout(420)
def test_the_quick_matrix_keeps_every_promise(tmp_path: Path) -> None:
    results = tmp_path / "chaos.jsonl"
    moments = ("--moments", "capture,commit,restore")  # all five: make chaos
    done = asymlab("chaos", "--quick", *moments, "--results", results, timeout_s=400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    records = read_chaos(results)
    assert broken(records) == []
    assert {r["fault"] for r in records} == set(FAULTS)
    assert {r["strategy"] for r in records} == set(strategies)


@pytest.mark.extra
@pytest.mark.timeout(300)
def test_a_supervisor_brings_what_a_failure_ended_to_its_end_by_itself(tmp_path: Path) -> None:
    results = tmp_path / "chaos.jsonl"
    done = asymlab(
        *("chaos", "--supervised", "--strategies", "asymcheck", "--moments", "commit,restore"),
        *("--faults", "process killed,host killed (tier),store outage,network partition"),
        *("--results", results, "--dir", tmp_path / "d"),
        timeout_s=280,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = {(r["fault"], r["moment"]): r for r in read_chaos(results)}
    assert {at: (r["training"], r["tier"], r["starts"]) for at, r in found.items()} == {
        ("process killed", "commit"): ("killed", "shared memory", 2),
        ("process killed", "restore"): ("killed", "root", 3),
        ("host killed (tier)", "commit"): ("killed", "tier", 2),
        ("host killed (tier)", "restore"): ("killed", "tier", 3),
        ("store outage", "restore"): ("ended with StoreError", "root", 3),
        ("network partition", "commit"): ("ended with SupersededWriter", "root", 2),
    }
    assert all(r["exact"] == "bit for bit" for r in found.values())
    assert "`asymlab run` made 2 to 3 starts" in done.stdout
    assert list((tmp_path / "d").iterdir()) == []


def test_a_short_soak_keeps_every_promise_and_leaves_nothing(tmp_path: Path) -> None:
    before = list(slots_of(SHARED_MEMORY))
    results = tmp_path / "soak.jsonl"
    done = asymlab(
        *("soak", "--checkpoints", 50, "--kills", 1, "--results", results, "--dir", tmp_path / "d")
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(results.read_text())
    assert found["problems"] == []
    assert found["checkpoints"] >= 50
    assert found["durable"] > 20
    killed = sum(n for kind, n in found["failures"].items() if "killed" in kind)
    assert killed == 1
    assert found["failures"]["power cut"] >= 1
    assert f"{found['checkpoints']}, of which {found['durable']} became durable" in done.stdout
    assert list((tmp_path / "d").iterdir()) == []
    assert set(slots_of(SHARED_MEMORY)) <= set(before) | others_slots(before)


def others_slots(before: list[Path]) -> set[Path]:
    """Those of other tests beside this one: their trainers live, or they clear up themselves."""
    from asymcheck.handover import left_over

    return {path for path in slots_of(SHARED_MEMORY) if path not in before} - {
        old.path for old in left_over() if "asymlab-soak" in old.root
    }


# --- the matrix ---------------------------------------------------------------


def test_the_full_matrix_has_every_combination_and_the_quick_one_covers_each_axis() -> None:
    full = cases_of(ChaosOptions())
    assert len(full) == len(set(full)) == len(FAULTS) * len(strategies) * len(MOMENTS)
    quick = cases_of(ChaosOptions(quick=True))
    assert set(quick) <= set(full)
    pairs = {(case.fault, case.moment) for case in quick}
    assert len(pairs) == len(FAULTS) * len(MOMENTS)
    assert {case.strategy for case in quick} == set(strategies)
    for pair in pairs:
        assert "asymcheck" in {c.strategy for c in quick if (c.fault, c.moment) == pair}


def test_a_supervisor_gets_the_cases_that_end_a_training() -> None:
    cases = cases_of(ChaosOptions(supervised=True))
    assert set(cases) < set(cases_of(ChaosOptions()))
    by_fault = {fault: {c.moment for c in cases if c.fault == fault} for fault in FAULTS}
    assert by_fault["persister killed"] == by_fault["peer killed"] == set()
    assert by_fault["disk full"] == by_fault["store outage"] == {"restore"}
    assert by_fault["network partition"] == set(MOMENTS) - {"restore"}
    assert by_fault["host killed (peers)"] == set(MOMENTS)


def test_what_cannot_be_tried_here_is_named_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = chaos_places.unavailable()
    assert set(found) == set(chaos_places.OVER_A_LINK)
    assert all("the command ip is missing" in why for why in found.values())
    monkeypatch.setattr(chaos_places, "find_spec", lambda name: None)
    found = chaos_places.unavailable()
    assert set(found) == {*chaos_places.OVER_A_LINK, *chaos_places.AMONG_PEERS}
    assert all("pip install 'asymcheck[peers]'" in why for why in found.values())
    assert set(found) < set(FAULTS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"faults": ("disk ful",)}, "found 'disk ful'; did you mean 'disk full'?"),
        ({"strategies": ("asymchek",)}, "found 'asymchek'; did you mean 'asymcheck'?"),
        ({"moments": ("comit",)}, "found 'comit'; did you mean 'commit'?"),
        ({"jobs": 0}, "jobs: expected at least 1, found 0"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        ChaosOptions(**options)


# --- tables --------------------------------------------------------------------


def test_the_table_says_what_each_failure_cost() -> None:
    records = [
        record("process killed", "asymcheck", "commit", tier="shared memory", steps_lost=0),
        record("process killed", "excp", "commit", exact="within its bounds", steps_lost=2),
        record("bit rot", "naive", "forward", seconds=1.5),
        {**record("peer killed", "naive", "forward"), "not_run": "no peers"},
    ]
    killed, rot, peer = groups_of(records)
    assert killed.cells == (
        "2",
        "killed",
        "1 shared memory, 1 root",
        "0 to 2",
        "0.25, at most 0.25",
        "1 bit for bit, 1 within its bounds",
    )
    assert (rot.name, rot.moment) == ("bit rot", "in forward")
    assert peer.not_run == "no peers"
    assert [group.name for group in strategies_of(records)] == ["asymcheck", "excp", "naive"]
    text = render(records)
    assert "3 cases: no promise was broken. 2 came back bit for bit" in text
    assert "| peer killed | in forward | 0 | not run here: no peers |" in text


def test_a_broken_promise_is_named_and_ends_with_code_1(tmp_path: Path) -> None:
    results = tmp_path / "chaos.jsonl"
    bad = record("disk full", "naive", "restore", problems=["expected step 4, restored 3"])
    results.write_text(json.dumps(bad) + "\n")
    found = CliRunner().invoke(app, ["chaos", "--report", "--results", str(results)])
    assert found.exit_code == 1
    assert "1 case: 1 broke a promise" in found.output
    assert "* disk full, naive, restore: BROKEN: expected step 4, restored 3" in found.output


def test_a_soak_with_a_problem_ends_with_code_1(tmp_path: Path) -> None:
    results = tmp_path / "soak.jsonl"
    found = {
        **HEAD,
        "command": "asymlab soak",
        "checkpoints": 3,
        "durable": 2,
        "failures": {},
        "restores": 3,
        "problems": ["left-over slot: x"],
        "rss_bytes": 1 << 20,
        "growth_bytes": 0,
        "seconds": 1.0,
    }
    results.write_text(json.dumps(found) + "\n")
    result = CliRunner().invoke(app, ["soak", "--report", "--results", str(results)])
    assert result.exit_code == 1
    assert "* left-over slot: x" in result.output
