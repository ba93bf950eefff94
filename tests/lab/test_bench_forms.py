"""Strategies beside their closed forms: the table, not the times."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from asymcheck.errors import OptionError
from asymcheck.planning.layout import CHUNK_BYTES
from asymcheck.planning.policy import Admission
from asymcheck.planning.strategies import strategies
from asymcheck_lab import compare_forms
from asymcheck_lab.cli import app
from asymcheck_lab.compare_forms import (
    FormOptions,
    FormSpec,
    all_hold,
    beside,
    cases,
    mechanisms_of,
    newest_of_each,
    predicted,
    read_forms,
    render,
    rows_of,
    run_forms,
)
from asymcheck_lab.errors import DataError, UsageError


def record(**fields: Any) -> dict[str, Any]:
    """A blocking save of 0.05 s copy and 0.5 s write, durable before training goes on.

    ``save`` changes what the library reports of it.
    """
    save = {"stored_bytes": 32_000_000, "copy_s": 0.05, "encode_s": 0.0, "release_s": 0.0}
    save |= fields.pop("save", {})
    base: dict[str, Any] = {
        "schema": 1,
        "session": "2026-02-02T00:00:00+00:00",
        "strategy": "naive",
        "every": 2,
        "bytes_per_s": 64e6,
        "step_s": 0.2,
        "window_s": 0.15,
        "copy_s": 0.05,
        "commit_s": 0.0,
        "raw_bytes": 32_000_000,
        "state_bytes": 32_000_000,
        "chunks": 10,
        "saves": [save],
        "commit": "abc",
        "command": "asymlab bench --synthetic",
        "machine": {"cpu": "Some CPU", "cores_used": 2},
        "stall_s": 0.55,
        "durable_s": 0.55,
        "period_s": 0.95,
        "in_flight": 0.0,
    }
    return {**base, **fields}


def test_every_strategy_of_the_table_has_a_closed_form_and_two_cases() -> None:
    found = list(cases(FormOptions()))
    assert [spec.strategy for spec in found] == [name for name in strategies for _ in range(2)]
    for spec in found:
        assert mechanisms_of(strategies[spec.strategy], record())
        root = replace(spec, folder="/somewhere").root
        assert root == "throttled+file:///somewhere?bytes_per_s=32000000.0"
    assert {spec.every for spec in found} == {1, 12}
    waiting = {spec.strategy: spec.checkpoints for spec in found if spec.every == 1}
    assert (waiting["naive"], waiting["asymcheck-paper"]) == (6, 10)


def test_the_forms_get_the_times_of_the_measurement() -> None:
    form = predicted(record())
    assert form.stall_s == pytest.approx(0.05 + 0.5)
    assert form.durable_s == pytest.approx(0.55)
    assert form.period_s == pytest.approx(0.95)
    # Behind a window of 0.15 s the copy stalls nothing; the one before is waited for.
    lazy = predicted(record(strategy="asymcheck"))
    assert lazy.boundary_s == lazy.fence_s == 0.0
    assert lazy.wait_s == pytest.approx((0.05 + 0.5) / 10 + 0.9 * 0.5 - 2 * 0.2)
    # A chunk of ten is encoded while the one before is written; the slower of the two decides.
    slow = predicted(record(save={"stored_bytes": 6_400_000, "encode_s": 0.3}))
    assert slow.stall_s == pytest.approx(0.05 + (0.1 + 0.3) / 10 + 0.9 * 0.3)
    assert predicted(record(commit_s=0.02)).durable_s == pytest.approx(0.57)


def test_what_stays_in_memory_is_whole_at_the_fence_and_takes_one_of_two_slots() -> None:
    one = record(strategy="gemini", every=1, commit_s=0.02, save={"stored_bytes": 0})
    (how,) = mechanisms_of(strategies["gemini"], one)
    assert (how.sealed, how.max_in_flight) == ("fence", 1)
    form = predicted(one)
    assert form.durable_s == 0.15
    assert form.stall_s == 0.0


def test_each_checkpoint_brings_what_it_wrote_and_how_long_it_was_held() -> None:
    one = record(strategy="asymcheck-s", every=1)
    (small,) = record(save={"stored_bytes": 6_400_000, "encode_s": 0.1, "release_s": 0.25})["saves"]
    one["saves"] = [*one["saves"], small]
    form = predicted(one)
    # 0.055 + 0.45 s and 0.025 + 0.09 s, sealed at 0.15 s; the latter is held for 0.25 s.
    assert form.wait_s == pytest.approx(((0.505 - 0.2) + (0.15 + 0.25 - 0.2)) / 2)
    assert form.durable_s == pytest.approx((0.505 + 0.15) / 2 + form.wait_s)
    # Of several in flight the mean one stands for all.
    one["strategy"] = "pccheck"
    assert predicted(one).period_s == pytest.approx((0.5 + 0.1) / 2 + 0.125)


def test_a_ring_that_is_smaller_than_the_state_holds_the_copy_back() -> None:
    ring = replace(
        strategies["datastates"],
        admission=Admission(max_in_flight=4, ring_bytes=4 * CHUNK_BYTES),
    )
    size = 10 * CHUNK_BYTES
    (how,) = mechanisms_of(ring, record(raw_bytes=size))
    assert (how.pieces, how.ring_pieces, how.max_in_flight) == (10, 4, 4)
    assert mechanisms_of(ring, record(raw_bytes=4 * CHUNK_BYTES))[0].ring_pieces is None
    # What the library calls copying contains the wait for room: the plain copy is taken.
    seldom = {"every": 100, "raw_bytes": size, "bytes_per_s": size / 2.0}
    save = {"copy_s": 1.5, "stored_bytes": size, "release_s": 0.01}
    form = predicted(record(strategy=ring, save=save, **seldom))
    # The last of ten pieces is copied when the sixth was written, at 0.2 s a piece:
    # (10 - 4 - 1) * 0.2 + 2 * 0.005 + 0.2 after the boundary, less the window.
    assert form.fence_s == pytest.approx(5 * 0.2 + 2 * 0.005 + 0.2 - 0.15)
    assert form.durable_s == pytest.approx(0.005 + 2.0)
    with pytest.raises(OptionError, match="ring_pieces: expected at least 3"):
        mechanisms_of(
            replace(ring, admission=Admission(ring_bytes=2 * CHUNK_BYTES)), record(raw_bytes=size)
        )


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({}, []),
        ({"stall_s": 0.63}, []),  # 15 % of 0.55 is 0.08
        ({"stall_s": 0.64}, ["stall"]),
        ({"durable_s": 0.46}, ["durable"]),
        ({"period_s": 1.1}, ["period"]),
        ({"in_flight": 0.2}, ["in flight"]),
    ],
)
def test_a_figure_holds_within_fifteen_percent(changes: dict[str, Any], wrong: list[str]) -> None:
    one = record(**changes)
    assert [found.figure for found in beside(one) if not found.holds] == wrong
    assert all_hold([one]) == (not wrong)
    (row,) = rows_of([one])
    assert row[-1] == (f"no: {', '.join(wrong)}" if wrong else "yes")


def test_next_to_nothing_is_compared_by_difference_and_not_by_ratio() -> None:
    seldom = record(
        strategy="asymcheck", every=10, stall_s=0.01, period_s=2.0, durable_s=0.505, in_flight=0.25
    )
    stall = beside(seldom)[0]
    assert (stall.form, stall.ratio, stall.holds) == (0.0, None, True)
    (row,) = rows_of([seldom])
    assert row[2] == "0.010 / 0.000"
    assert row[3] == "0.505 / 0.505 (1.00)"


def test_a_strategy_that_does_not_exist_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="found 'asymchek'; did you mean 'asymcheck'"):
        FormOptions(names=("asymchek",))


def test_a_measurement_that_fails_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        compare_forms, "cases", lambda _: [FormSpec(strategy="naive", every=2, checkpoints=1)]
    )
    options = FormOptions(
        names=("naive",), folder=tmp_path / "r", results=tmp_path / "f.jsonl", timeout_s=0.0
    )
    (found,) = run_forms(options, lambda _: None)
    assert "still running after 0 s" in found["error"]
    assert not all_hold([found])
    assert read_forms(options.results) == json.loads(json.dumps([found]))
    assert rows_of([found])[0][2] == "failed"


def test_a_measurement_has_every_time_that_the_form_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = FormSpec(
        strategy="asymcheck",
        every=2,
        checkpoints=2,
        window_s=0.01,
        state_bytes=240_000,
        bytes_per_s=100e6,
    )
    monkeypatch.setattr(compare_forms, "cases", lambda _: [small])
    options = FormOptions(folder=tmp_path / "runs", results=tmp_path / "forms.jsonl")
    (found,) = run_forms(options, lambda _: None)
    assert "error" not in found, found["error"]
    assert list(options.folder.iterdir()) == []
    assert found["raw_bytes"] > 240_000 * 0.9
    assert found["durable_s"] > 0
    assert found["period_s"] >= 2 * 0.01
    assert len(beside(found)) == 4
    assert str(tmp_path) not in json.dumps(found)


def test_a_session_can_be_shown_again_and_tells_by_its_exit_whether_all_hold(
    tmp_path: Path,
) -> None:
    path = tmp_path / "forms.jsonl"
    often = {"every": 1, "period_s": 0.75}
    path.write_text(json.dumps(record(**often)) + "\n")
    arguments = ["bench", "--synthetic", "--report", "--results", str(path)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    path.write_text(json.dumps(record(**often | {"stall_s": 2.0})) + "\n")
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1
    path.write_text(
        json.dumps(record(**often | {"stall_s": 2.0})) + "\n" + json.dumps(record(**often)) + "\n"
    )
    page = tmp_path / "page.md"
    page.write_text("Before\n<!-- closed forms: begin -->\n<!-- closed forms: end -->\nAfter\n")
    done = CliRunner().invoke(app, [*arguments, "--docs", str(page)])
    assert done.exit_code == 0, done.output
    assert "1 of 1 hold" in page.read_text()
    assert "| naive | 1 | 0.550 / 0.550 (1.00) |" in page.read_text()
    console = Console(width=140, record=True)
    compare_forms.show(console, [record(stall_s=2.0)])
    assert "no: stall" in console.export_text()


def test_a_stall_where_none_is_expected_has_no_ratio_and_does_not_hold() -> None:
    (row,) = rows_of([record(strategy="asymcheck", every=10, stall_s=0.5)])
    assert row[2] == "0.500 / 0.000"
    assert row[-1].startswith("no: stall")


def test_the_newest_record_of_each_case_counts() -> None:
    options = FormOptions()
    old = record(every=1) | {"session": "2026-01-01"}
    before_there_were_saves = {k: v for k, v in old.items() if k != "saves"}
    another = record(every=16)
    found = newest_of_each(options, [old, record(every=1), before_there_were_saves, another])
    assert found == [record(every=1)]
    with pytest.raises(DataError, match="closed forms: expected records of a measurement"):
        render([])


def test_the_published_table_is_that_of_the_published_records() -> None:
    root = Path(__file__).parents[2]
    shown = (root / "docs/comparison.md").read_text().partition("<!-- closed forms: begin -->")[2]
    records = read_forms(root / "results/forms.jsonl")
    found = render(newest_of_each(FormOptions(), records))
    assert shown.partition("<!-- closed forms: end -->")[0].strip() == found.strip()


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "forms.jsonl"
    path.write_text('{"schema": 1, "strategy": "naive"}\n')
    with pytest.raises(DataError, match="line 1"):
        read_forms(path)
