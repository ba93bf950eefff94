"""The comparison's own tests: nothing here is timed, everything else about it is checked."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from asymcheck_lab import compare
from asymcheck_lab.bench_check import compare_restored, fingerprint_of, forget_cached, tensors_of
from asymcheck_lab.bench_child import RunServer
from asymcheck_lab.bench_report import BEGIN, END
from asymcheck_lab.bench_stats import Estimate
from asymcheck_lab.bench_work import make_workload
from asymcheck_lab.cli import app
from asymcheck_lab.compare import (
    Cell,
    CompareOptions,
    chosen_names,
    rate_of,
    run_compare,
    why_absent,
)
from asymcheck_lab.compare_records import Run, read_compare, run_of
from asymcheck_lab.compare_report import lines_of, notes_of, render, show
from asymcheck_lab.compare_stats import CellRows, Row, cells_of
from asymcheck_lab.errors import DataError, RunError, UsageError
from asymcheck_lab.page import write_page
from asymcheck_lab.rivals import RIVALS, RNG, Rival

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "results" / "compare.jsonl"
PAGE = ROOT / "docs" / "comparison.md"


def options_for(folder: Path, **changes: Any) -> CompareOptions:
    fields: dict[str, Any] = {
        "models": ("gpt2",),
        "systems": ("torch-save",),
        "every": (2,),
        "steps": 3,
        "warmup": 1,
        "folder": folder / "runs",
        "results": folder / "results" / "compare.jsonl",
    }
    return CompareOptions(**(fields | changes))


# --- runs -------------------------------------------------------------------


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> tuple[CompareOptions, list[Any]]:
    """One small comparison, as the command makes it."""
    options = options_for(
        tmp_path_factory.mktemp("compare"),
        models=("vit",),
        systems=("asymcheck", "torch-save"),
        stores=("disk", "50MB/s"),
        verify=True,
    )
    return options, run_compare(options, lambda _: None)


def test_each_run_leaves_a_record_of_the_whole_schema(
    session: tuple[CompareOptions, list[Any]],
) -> None:
    options, records = session
    lines = options.results.read_text().splitlines()
    assert [json.loads(line) for line in lines] == json.loads(json.dumps(records))
    assert read_compare(options.results) == [run_of(record) for record in records]
    assert list(options.folder.iterdir()) == []
    assert len(records) == 2 * 3
    absent = [r for r in records if "absent" in r]
    assert {(r["system"], r["store"]) for r in absent} == {("torch-save", "50MB/s")}
    assert all("held to 50MB/s" in r["absent"] for r in absent)
    for record in records:
        assert record["schema"] == 2
        assert "error" not in record, record["error"]
        assert str(options.folder) not in json.dumps(record)
        assert record["kind"] == RIVALS[record["system"]].kind
        assert record["omits"] == RIVALS[record["system"]].omits


def test_what_came_back_is_recorded_beside_what_it_cost(
    session: tuple[CompareOptions, list[Any]],
) -> None:
    _, records = session
    for record in [r for r in records if "absent" not in r]:
        assert record["verified"] is True
        assert len(record["step_s"]) == 3
        assert record["peak_bytes"] > 50e6
        assert [c["step"] for c in record["checkpoints"]] == [2, 4]
        if record["system"] == "none":
            assert record["saved_bytes"] == record["disk_bytes"] == 0
            assert (record["restore_s"], record["bit_exact"], record["max_error"]) == (None,) * 3
            continue
        assert record["saved_bytes"] == record["state_bytes"] > 400_000
        assert record["bit_exact"] is True
        assert record["max_error"] == 0.0
        assert record["restore_s"] > 0
        assert record["disk_bytes"] > record["state_bytes"] / 2
        assert record["details"]["restore"]["page_cache"]
        for checkpoint in record["checkpoints"]:
            assert checkpoint["durable_s"] > 0
            assert 0 <= checkpoint["lag_steps"] <= 3
    # It is the model that was asked for.
    shapes = [p.numel() for p in make_workload("vit", "tiny", 0).model.parameters()]
    expected = 12 * sum(shapes) + 4 * len(shapes)  # two moments and a counter
    assert {r["state_bytes"] for r in records if "absent" not in r} == {expected}


@pytest.fixture
def gone(monkeypatch: pytest.MonkeyPatch) -> Rival:
    """``dcp`` as a rival that is not installed."""
    found = replace(RIVALS["dcp"], library="no-such-distribution")
    monkeypatch.setattr(compare, "RIVALS", MappingProxyType({**RIVALS, "dcp": found}))
    return found


def test_what_fails_or_is_not_installed_is_recorded_and_the_next_one_is_run(
    tmp_path: Path, gone: Rival
) -> None:
    options = options_for(tmp_path, systems=("torch-save", "dcp"), timeout_s=0.0)
    options.results.parent.mkdir()
    options.results.touch()  # an empty file may be appended to
    records = run_compare(options, lambda _: None)
    failed = [r for r in records if "error" in r]
    assert sorted(r["system"] for r in failed) == ["none", "torch-save"]
    assert all("still running after 0 s" in r["error"] for r in failed)
    assert [r["system"] for r in records if "absent" in r] == ["dcp"]
    assert list(options.folder.iterdir()) == []
    (found,) = cells_of(read_compare(options.results))
    absent = f"{gone.title}: not here: no-such-distribution is not installed"
    assert lines_of(found)[1] == []
    assert any(note.startswith(absent) for note in notes_of(found))
    assert sum("round 1 failed: still running" in note for note in notes_of(found)) == 2
    page, *_ = write_page([options.results], tmp_path / "page")
    assert "not here: no-such-distribution is not installed" in page.read_text()


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    with (
        pytest.raises(RunError, match=r"No module named asymcheck_lab\.nothing"),
        RunServer([], tmp_path, module="asymcheck_lab.nothing"),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_messages_that_are_published_name_no_folder() -> None:
    text = 'File "/opt/some/lib/python3/torch/x.py", line 3: no /data/run-1/root'
    assert compare._without_folders(text) == 'File "…/x.py", line 3: no …/root'


# --- the order of runs ------------------------------------------------------


def test_in_each_round_each_system_runs_once_in_each_cell_in_changing_order(
    tmp_path: Path,
) -> None:
    systems = ("asymcheck", "asymcheck-thread")
    options = options_for(
        tmp_path, models=("gpt2", "bert"), systems=systems, every=(2, 4), rounds=3
    )
    turns = list(compare._turns(options))
    assert len(turns) == 3 * 4 * 3
    assert [t[0] for t in turns] == sorted(t[0] for t in turns)  # round after round
    orders: dict[Cell, list[tuple[str, ...]]] = {}
    for number in (1, 2, 3):
        for cell in options.cells:
            found = [(p, s) for n, c, p, s in turns if (n, c) == (number, cell)]
            assert [position for position, _ in found] == [1, 2, 3]
            orders.setdefault(cell, []).append(tuple(system for _, system in found))
            assert sorted(orders[cell][-1]) == sorted(("none", *systems))
    assert all(len(set(found)) == 3 for found in orders.values())
    assert len({found[0] for found in orders.values()}) == 3  # four cells, three orders


def test_what_cannot_run_has_one_turn_in_a_session(tmp_path: Path, gone: Rival) -> None:
    options = options_for(tmp_path, systems=("dcp", "torch-save"), rounds=3)
    turns = [(number, system) for number, _, _, system in compare._turns(options)]
    assert [t for t in turns if t[1] == "dcp"] == [(1, "dcp")]
    assert len([t for t in turns if t[1] == "torch-save"]) == 3
    reason = why_absent(gone, "disk")
    assert reason is not None
    assert "no-such-distribution is not installed" in reason


def test_a_rate_is_imposed_on_the_librarys_own_store_only() -> None:
    for rival in RIVALS.values():
        reason = why_absent(rival, "50MB/s")
        assert rival.kind in ("none", "ours", "strategy", "rival")
        if rival.kind == "rival":
            assert reason is not None
            assert "cannot be held to 50MB/s" in reason
        else:
            assert reason == rival.missing()


# --- options ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"systems": ("torch-sav",)}, "found 'torch-sav'; did you mean 'torch-save'?"),
        ({"models": ("gtp2",)}, "found 'gtp2'; did you mean 'gpt2'?"),
        ({"sizes": ("tinny",)}, "found 'tinny'; did you mean 'tiny'?"),
        ({"models": ("vit",), "sizes": ("124m",)}, "found '124m'"),
        ({"stores": ("50",)}, "store: expected 'disk' or a rate such as '50MB/s', found '50'"),
        ({"stores": ("0MB/s",)}, "found '0MB/s'"),
        ({"rounds": 0}, "rounds: expected at least 1, found 0"),
        ({"every": (4, 2), "warmup": 3}, "every: expected more steps than warmup=3"),
        ({"every": ()}, "every: expected"),
    ],
)
def test_a_wrong_option_is_refused_by_its_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as refused:
        options_for(tmp_path, **changes)
    assert message in str(refused.value)


def test_a_model_without_a_size_is_left_out_there(tmp_path: Path) -> None:
    options = options_for(tmp_path, models=("gpt2", "bloom"), sizes=("tiny", "124m"))
    assert [(c.model, c.size) for c in options.cells] == [
        ("gpt2", "tiny"),
        ("gpt2", "124m"),
        ("bloom", "tiny"),
    ]


def test_a_session_says_how_to_do_it_again() -> None:
    assert CompareOptions().command == (
        "asymlab bench --models all --sizes tiny --systems all --every 5 --store disk --rounds 1 "
        "--steps 20 --warmup 2"
    )
    assert chosen_names("all", RIVALS) == tuple(RIVALS)
    assert chosen_names("a, b", RIVALS) == ("a", "b")
    assert chosen_names("all", ()) == ("all",)
    assert (rate_of("disk"), rate_of("1.5GB/s"), rate_of("20kB/s")) == (0.0, 1.5e9, 2e4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "tiny"], "sizes: expected --models with it, found none"),
        (["--store", "disk"], "store: expected --models with it, found none"),
        (["--models", "all", "--size", "tiny"], "size: expected --sizes with --models"),
        (["--models", "all", "--every", "5,x"], "every: expected whole numbers"),
        (["--every", "5,10"], "every: expected one number without --models, found '5,10'"),
        (["--models", "all", "--verify", "--docs", "x.md"], "docs: expected none with --quick"),
        (["--models", "all", "--synthetic"], "synthetic: expected none with --models"),
        (["--synthetic", "--systems", "asymchek"], "found 'asymchek'; did you mean 'asymcheck'?"),
    ],
)
def test_options_that_do_not_go_together_are_refused(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["bench", *arguments])
    assert done.exit_code == 2
    assert message in done.output


# --- records ----------------------------------------------------------------


def run(**fields: Any) -> dict[str, Any]:
    """A record with every field of the schema."""
    base: dict[str, Any] = {
        "schema": 2,
        "session": "2026-02-02T00:00:00+00:00",
        "machine": {
            "cpu": "a processor",
            "cpus": 2,
            "cores_used": 2,
            "memory_bytes": 2**34,
            "file_system": "ext4",
            "kernel": "6.1",
        },
        "versions": {"torch": "2.6"},
        "commit": "c" * 40,
        "commit_is_clean": True,
        "command": "asymlab bench --models all",
        "model": "bert",
        "size": "tiny",
        "every": 5,
        "store": "disk",
        "steps": 20,
        "warmup": 2,
        "system": "none",
        "title": "no checkpoints",
        "kind": "none",
        "library": "torch 2.6",
        "omits": "everything",
        "syncs": "",
        "ranked": True,
        "why_unranked": "",
        "round": 1,
        "position": 1,
        "state_bytes": 1000,
        "saved_bytes": 0,
        "step_s": [1.0, 2.0, 9.0],
        "loop_s": 12.0,
        "whole_s": 10.0,
        "first_checkpoint": {"step": 4, "blocked_s": 3.0, "durable_s": 4.0, "lag_steps": 0},
        "checkpoints": [],
        "disk_bytes": 0,
        "restore_s": None,
        "bit_exact": None,
        "max_error": None,
        "training_cpu_s": 9.0,
        "background_cpu_s": 0.0,
        "steal_s": 0.2,
        "peak_bytes": 10**9,
        "details": {},
    }
    return {**base, **fields}


MEASURED = tuple(run())[tuple(run()).index("state_bytes") :]
"""Fields that a run has which came to its end."""


def saving(system: str, number: int, whole_s: float, stalls_s: list[float], **more: Any) -> Any:
    """A run of a system whose checkpoints were durable ten times their stall later."""
    return run(
        **{
            "system": system,
            "title": system.upper(),
            "kind": "rival",
            "omits": "",
            "round": number,
            "whole_s": whole_s,
            "saved_bytes": 1000,
            "disk_bytes": 1100,
            "restore_s": 0.5,
            "bit_exact": True,
            "max_error": 0.0,
            "peak_bytes": 10**9 + 5 * 10**6,
            "checkpoints": [
                {"step": 5 * n, "blocked_s": s, "durable_s": 10 * s, "lag_steps": n}
                for n, s in enumerate(stalls_s, start=1)
            ],
        }
        | more
    )


def without(record: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in names}


@pytest.mark.parametrize(
    ("line", "where"),
    [
        ("", "line 2"),
        ("[]", "line 2"),
        ('{"schema": 1}', "line 2: expected a benchmark record of schema 2; a newer"),
        (json.dumps(without(run(), "store")), "line 2: store: expected a text, found none"),
        (json.dumps(run(every="5")), "line 2: every: expected a whole number, found '5'"),
        (json.dumps(without(run(), "peak_bytes")), "line 2: peak_bytes: expected a number"),
        (json.dumps(run(bit_exact="yes")), "line 2: bit_exact: expected true or false"),
    ],
)
def test_a_results_file_of_something_else_is_refused_and_not_appended_to(
    line: str, where: str, tmp_path: Path
) -> None:
    options = options_for(tmp_path)
    options.results.parent.mkdir()
    text = json.dumps(run()) + "\n" + line + "\n"
    options.results.write_text(text)
    with pytest.raises(DataError) as refused:
        run_compare(options, lambda _: None)
    assert where in str(refused.value)
    assert options.results.read_text() == text


def test_a_failed_or_absent_run_needs_no_measurement(tmp_path: Path) -> None:
    path = tmp_path / "compare.jsonl"
    bare = without(run(), *MEASURED)
    lines = [{**bare, "error": "lost"}, {**bare, "absent": "not installed"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    lost, absent = read_compare(path)
    assert (lost.measured, lost.error, lost.round) == (None, "lost", 1)
    assert (absent.measured, absent.absent, absent.round) == (None, "not installed", 0)


# --- figures ----------------------------------------------------------------


SESSION = [
    run(round=1, whole_s=10.0),
    run(round=2, whole_s=20.0),
    saving("a", 1, 11.0, [0.1, 0.3]),
    saving("a", 2, 24.0, [0.2, 0.9]),
    saving("b", 1, 12.0, [0.2], saved_bytes=250, omits="moments"),
    without(saving("b", 2, 0.0, []), *MEASURED) | {"error": "trace\nlost it"},
    without(saving("c", 1, 0.0, []), *MEASURED) | {"absent": "c is not installed"},
]


def runs_of(records: Sequence[dict[str, Any]]) -> list[Run]:
    return [run_of(record) for record in records]


def cells(records: Sequence[dict[str, Any]]) -> list[CellRows]:
    return cells_of(runs_of(records))


def row_of(found: CellRows, system: str) -> Row:
    return next(r for r in (*found.rows, *found.missing) if r.run.system == system)


def interval(row: Row, key: str) -> tuple[float, float]:
    estimate = row.values[key].estimate
    return estimate.low, estimate.high


def shown(found: CellRows, system: str, head: str, *, brief: bool = False) -> str:
    heads, lines = lines_of(found, brief=brief)
    (line,) = [line for line in lines if line[0].lower().startswith(system)]
    return line[heads.index(head)]


def test_figures_are_paired_with_the_run_without_checkpoints_of_the_round() -> None:
    (found,) = cells(SESSION)
    a = row_of(found, "a")
    assert interval(a, "slowdown") == pytest.approx((10.0, 20.0))
    assert interval(a, "stall_p50") == pytest.approx((200.0, 550.0))
    assert interval(a, "stall_p99") == pytest.approx((900.0, 900.0))
    assert interval(a, "durable_p50") == pytest.approx((2.0, 5.5))
    assert a.values["lag"].estimate == Estimate(1.5, 1.5, 1.5, 0.5, 2)
    assert a.values["peak"].estimate == Estimate(5.0, 5.0, 5.0, 0.5, 2)
    assert a.values["restore"].estimate.median == 0.5
    assert a.bit_exact is True
    assert a.omits == ""
    assert row_of(found, "b").omits == "75 % of model and optimizer; moments"
    assert row_of(found, "none").omits == "everything"
    assert [row.run.system for row in found.missing] == ["c"]
    assert found.step_s is not None
    assert found.step_s.median == 2.0
    assert found.rounds == 2


def test_the_p99_of_many_stalls_leaves_the_longest_out() -> None:
    stalls_s = [n / 1000 for n in range(1, 201)]
    (found,) = cells([run(), saving("a", 1, 11.0, stalls_s)])
    assert row_of(found, "a").values["stall_p99"].estimate.median == pytest.approx(198.0)


def test_without_its_partner_a_run_has_no_paired_figure() -> None:
    lost = without(run(round=2), *MEASURED) | {"error": "killed"}
    (found,) = cells([run(round=1), lost, *SESSION[2:4]])
    values = row_of(found, "a").values
    assert (values["slowdown"].note, values["slowdown"].partial) == ("1 of 2 runs", True)
    assert not values["stall_p50"].partial
    assert shown(found, "a", "slowdown, %") == "+10.0, 1 of 2 runs"
    assert "no checkpoints: round 2 failed: killed" in notes_of(found)


def test_checkpoints_that_were_given_up_are_counted_and_not_averaged() -> None:
    gone = {"step": 10, "blocked_s": 0.0, "durable_s": None, "lag_steps": None}
    one = saving("a", 1, 11.0, [0.2], kind="strategy")
    one["checkpoints"].append(gone)
    (found,) = cells([run(), one])
    durable = row_of(found, "a").values["durable_p50"]
    assert (durable.estimate.median, durable.partial) == (2.0, True)
    assert shown(found, "a", "durable p50, s") == "2.00, 1 of 2 became durable"


def test_what_a_system_skipped_is_told_apart_from_what_was_lost() -> None:
    gone = {"step": 10, "blocked_s": 0.0, "durable_s": None, "lag_steps": None}
    one = saving("a", 1, 11.0, [0.2], kind="strategy")
    one["checkpoints"] += [gone, {**gone, "step": 15, "skipped": True}]
    (found,) = cells([run(), one])
    assert shown(found, "a", "durable p50, s") == (
        "2.00, 1 of 3 became durable, 1 skipped: others were under way"
    )


def test_cells_are_kept_apart() -> None:
    other = [run(store="50MB/s"), saving("a", 1, 30.0, [0.1], store="50MB/s")]
    first, second = cells([*SESSION, *other])
    assert (first.store, second.store) == ("disk", "50MB/s")
    assert row_of(second, "a").values["slowdown"].estimate.median == pytest.approx(200.0)


# --- tables -----------------------------------------------------------------


def test_every_row_of_every_table_says_what_is_not_saved() -> None:
    text = render(runs_of(SESSION))
    row = next(line for line in text.splitlines() if line.startswith("| B "))
    assert row.endswith("| 75 % of model and optimizer; moments |")
    assert "| 0.00025 |" in row  # saves 250 bytes
    console = Console(width=100, record=True)
    show(console, runs_of(SESSION))
    told = console.export_text()
    assert "(2) does not save: 75 % of model and optimizer; moments" in told
    assert "C: not here: c is not installed" in told
    assert "B: round 2 failed: lost it" in told
    assert "- C: not here: c is not installed" in text


def test_what_is_not_ranked_stands_last_with_the_reason() -> None:
    unranked = saving(
        "m", 1, 9.0, [0.01], kind="strategy", ranked=False, why_unranked="no network yet"
    )
    lossy = saving("l", 1, 9.0, [0.01], bit_exact=False, max_error=0.25)
    (found,) = cells([unranked, run(), lossy, saving("z", 1, 9.0, [0.01])])
    heads, lines = lines_of(found)
    assert [line[0] for line in lines] == [
        "no checkpoints",
        "Z",
        "M (not ranked)",
        "L (not ranked)",
    ]
    assert lines[3][heads.index("exact")] == "no: ≤ 0.25"
    assert notes_of(found) == [
        "M: not ranked: no network yet",
        "L: not ranked: restores other values than were saved",
    ]


def test_intervals_are_shown_where_there_are_rounds_and_not_in_a_terminal() -> None:
    (found,) = cells(SESSION)
    assert shown(found, "a", "slowdown, %") == "+15.0 (+10.0 to +20.0)"
    assert shown(found, "a", "slowdown, %", brief=True) == "+15.0"
    assert shown(found, "b", "stall p50, ms") == "200"
    assert "one round, so that nothing is said" in render(runs_of(SESSION[:1]))


def test_the_newest_session_of_each_cell_can_be_shown_again_and_written_into_a_page(
    tmp_path: Path,
) -> None:
    path, page = tmp_path / "compare.jsonl", tmp_path / "page.md"
    old = [{**r, "session": "2026-01-01T00:00:00+00:00"} for r in SESSION]
    good = [r for r in SESSION if "error" not in r]
    other = [{**r, "session": "2026-01-02T00:00:00+00:00", "size": "124m"} for r in good]
    path.write_text("".join(json.dumps(r) + "\n" for r in (*good, *old, *other)))
    page.write_text(f"{BEGIN}\n{END}\n")
    arguments = ["--models", "all", "--report", "--results", str(path), "--docs", str(page)]
    done = CliRunner().invoke(app, ["bench", *arguments])
    assert done.exit_code == 0, done.output
    assert "bert tiny, every 5 steps, store: disk" in done.output
    both = f"{render(runs_of(good))}\n{render(runs_of(other))}"
    assert page.read_text() == f"{BEGIN}\n\n{both}\n{END}\n"


def test_the_tables_in_the_docs_are_those_of_the_published_records() -> None:
    shown = PAGE.read_text().partition(BEGIN)[2].partition(END)[0].strip()
    if PUBLISHED.exists():
        assert shown == render(read_compare(PUBLISHED)).strip()
    else:
        assert shown == "Nothing is published yet."


def test_the_page_describes_every_field_of_a_record(
    session: tuple[CompareOptions, list[Any]],
) -> None:
    page = PAGE.read_text()
    checkpoints = [c for r in session[1] for c in r.get("checkpoints", ())]
    for record in (*session[1], *checkpoints):
        for name in record.keys() - {"schema", "verified"}:
            assert f"`{name}`" in page, name


def test_a_report_on_no_records_is_refused() -> None:
    with pytest.raises(DataError, match="expected records of a session, found none"):
        render([])


# --- what came back ---------------------------------------------------------


class Small:
    """A workload of two layers."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model: torch.nn.Module = torch.nn.Sequential(
            torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)
        )
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def forward_and_backward(self) -> None:
        self.model(torch.randn(3, 4)).sum().backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def restored(load: Any, omits: str = RNG) -> dict[str, Any]:
    """What is found after ``load(fresh, model_state, optim_state)``."""
    live = Small(0)
    for _ in range(2):
        live.forward_and_backward()
        live.update()
    saved = fingerprint_of(live)
    fresh = Small(1)
    blank = fingerprint_of(fresh)
    load(fresh, live.model.state_dict(), live.optimizer.state_dict())
    return compare_restored(live, saved, fresh, blank, omits)


def load_all(fresh: Small, model: Any, optim: Any) -> None:
    fresh.model.load_state_dict(model)
    fresh.optimizer.load_state_dict(optim)


TENSORS = 4 * 3  # two weights and two biases, each with two moments
PARAMETER_BYTES = (16 + 4 + 8 + 2) * 4
STATE_BYTES = 3 * PARAMETER_BYTES + 4 * 4  # and a step counter each


def test_all_that_came_back_counts_and_is_exact() -> None:
    found = restored(load_all)
    assert found == {
        "saved_bytes": STATE_BYTES,
        "bit_exact": True,
        "max_error": 0.0,
        "differing": [],
    }
    live = Small(0)
    live.forward_and_backward()
    live.update()
    assert len(tensors_of(live)) == TENSORS + 4


def test_random_numbers_have_to_come_back_where_they_are_not_omitted() -> None:
    found = restored(load_all, omits="")
    assert found["bit_exact"] is False
    assert found["differing"] == ["rng/torch"]
    assert found["max_error"] == 0.0


def test_a_part_that_is_missing_is_no_part_of_the_checkpoint() -> None:
    def load_weights(fresh: Small, model: Any, optim: Any) -> None:
        fresh.model.load_state_dict(model)

    told = restored(load_weights, omits=f"the optimizer; {RNG}")
    assert told["saved_bytes"] == PARAMETER_BYTES
    assert told["bit_exact"] is True
    # Who does not say that it leaves the optimizer out has lost it.
    assert restored(load_weights)["bit_exact"] is False


def test_an_error_is_measured_against_the_largest_number_of_its_tensor() -> None:
    def load_roughly(fresh: Small, model: Any, optim: Any) -> None:
        load_all(fresh, model, optim)
        weight = next(iter(fresh.model.parameters()))
        with torch.no_grad():
            weight[0, 0] += 0.5 * weight.abs().max()

    found = restored(load_roughly)
    assert found["bit_exact"] is False
    assert found["differing"] == ["model/0.weight"]
    assert found["saved_bytes"] == STATE_BYTES
    assert found["max_error"] == pytest.approx(0.5, rel=1e-5)


def test_forgetting_the_page_cache_leaves_the_files_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "below" / "file"
    path.parent.mkdir()
    path.write_bytes(os.urandom(10_000))
    before = path.read_bytes()
    forget_cached(tmp_path)
    assert path.read_bytes() == before
