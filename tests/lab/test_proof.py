"""The proof can fail: one bit, one missing piece, one wrong step is named."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from asymcheck_lab import demo
from asymcheck_lab.cli import app
from asymcheck_lab.demo import DemoOptions, Evidence, Trace, cost_of, judge, slowdown, write_report
from asymcheck_lab.errors import UsageError
from asymcheck_lab.proof import different_entries, different_losses
from asymcheck_lab.record import Result, SavedCheckpoint, StepRecord


def losses(first: int, last: int, start: int = 0) -> list[StepRecord]:
    return [StepRecord(s, 1 / s, 0.1, start) for s in range(first, last + 1)]


def with_loss(records: list[StepRecord], step: int, loss: float) -> list[StepRecord]:
    return [replace(r, loss=loss) if r.step == step else r for r in records]


def test_equal_losses_have_no_difference():
    assert different_losses(losses(1, 9), losses(4, 9), range(4, 10)) == []


@pytest.mark.parametrize("changed", [math.nextafter(1 / 5, 1), -1 / 5, math.nan])
def test_one_bit_of_one_loss_is_named_with_both_values(changed: float):
    found = different_losses(losses(1, 9), with_loss(losses(1, 9), 5, changed), range(1, 10))
    assert len(found) == 1
    assert "loss of step 5" in found[0]
    assert (1 / 5).hex() in found[0]
    assert changed.hex() in found[0]


def test_a_missing_step_is_a_difference_on_either_side():
    short = losses(1, 8)
    assert different_losses(losses(1, 9), short, range(1, 10)) == [
        "loss of step 9: missing in the compared run"
    ]
    assert different_losses(short, losses(1, 9), range(1, 10)) == [
        "loss of step 9: missing in the expected run"
    ]


def test_a_step_that_is_logged_twice_must_agree_with_itself():
    twice = losses(1, 5) + with_loss(losses(4, 9), 5, 0.25)
    assert len(different_losses(losses(1, 9), twice, range(1, 10))) == 1
    assert len(different_losses(twice, twice, range(1, 10))) == 1
    assert different_losses(losses(1, 9), losses(1, 5) + losses(4, 9), range(1, 10)) == []


def test_a_changed_a_missing_and_an_added_piece_are_each_named():
    found = different_entries(
        {"same": "a" * 64, "changed": "b" * 64, "gone": "c" * 64},
        {"same": "a" * 64, "changed": "d" * 64, "new": "e" * 64},
    )
    assert [line.partition(":")[0] for line in found] == ["changed", "gone", "new"]
    assert "bbbb" in found[0]
    assert "dddd" in found[0]
    assert "found nothing" in found[1]


PRINT = {"model/w": "1" * 64, "rng/torch": "2" * 64}


def trace(records: list[StepRecord], resumed_from: int = 0) -> Trace:
    saved = tuple(SavedCheckpoint(s, 0.01, 1000, 0.1) for s in range(2, 11, 2))
    return Trace(records, Result(10, resumed_from, 0.5, 900, (), 1.0, 0.1, saved, PRINT))


def evidence() -> Evidence:
    return Evidence(
        options=DemoOptions(steps=10, every=2, kill_at=6),
        without=trace(losses(1, 10)),
        whole=trace(losses(1, 10)),
        killed=losses(1, 7),
        exit_code=-9,
        persisters=[11, 12],
        half_written=500,
        slots=1,
        listed=[2, 4],
        resumed=trace(losses(7, 10, start=6), resumed_from=6),
        left_over=0,
        left_slots=0,
    )


def other_print(traced: Trace) -> Trace:
    changed = {**PRINT, "rng/torch": "3" * 64}
    return replace(traced, result=replace(traced.result, fingerprint=changed))


def other_loss(traced: Trace, step: int) -> Trace:
    records = with_loss(list(traced.records), step, math.nextafter(1 / step, 0))
    return replace(traced, records=records)


def test_good_evidence_passes_every_check():
    checks = judge(evidence())
    assert len(checks) == 6
    assert [c.problems for c in checks] == [()] * 6
    assert "500 bytes half-written" in checks[0].claim


@pytest.mark.parametrize(
    ("spoil", "failing", "named"),
    [
        (lambda e: replace(e, exit_code=0), [0], "found exit code 0"),
        (lambda e: replace(e, exit_code=-15), [0], "found exit code -15"),
        (lambda e: replace(e, half_written=0), [0], "found 0"),
        (lambda e: replace(e, persisters=[11]), [0], "found [11]"),
        (lambda e: replace(e, listed=[2, 4, 6]), [1], "found [2, 4, 6]"),
        (lambda e: replace(e, listed=[]), [1], "found []"),
        (lambda e: replace(e, resumed=trace(losses(5, 10, 4), 4)), [2], "found step 4"),
        (lambda e: replace(e, slots=0), [2], "found none"),
        (lambda e: replace(e, left_over=7), [2], "found 7 bytes"),
        (lambda e: replace(e, left_slots=1), [2], "and 1 slots"),
        (lambda e: replace(e, resumed=other_loss(e.resumed, 9)), [3], "loss of step 9"),
        (lambda e: replace(e, resumed=trace(losses(7, 9), 6)), [3], "loss of step 10: missing"),
        (lambda e: replace(e, killed=with_loss(losses(1, 7), 6, 0.5)), [3], "loss of step 6"),
        (lambda e: replace(e, resumed=other_print(e.resumed)), [4], "rng/torch"),
        (lambda e: replace(e, without=other_loss(e.without, 1)), [5], "loss of step 1"),
        (lambda e: replace(e, without=other_print(e.without)), [5], "rng/torch"),
    ],
)
def test_each_thing_that_is_wrong_fails_its_check(
    spoil: Callable[[Evidence], Evidence], failing: list[int], named: str
):
    checks = judge(spoil(evidence()))
    assert [n for n, check in enumerate(checks) if check.problems] == failing
    assert any(named in problem for n in failing for problem in checks[n].problems)


@pytest.mark.parametrize(
    ("found", "code", "shown"),
    [
        (evidence(), 0, "equal in every bit"),
        (replace(evidence(), resumed=other_loss(evidence().resumed, 9)), 1, "loss of step 9"),
    ],
    ids=["equal", "different"],
)
def test_the_verdict_is_the_exit_code_of_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: Evidence, code: int, shown: str
):
    monkeypatch.setattr(demo, "gather", lambda options, progress: found)
    result = CliRunner().invoke(app, ["demo", "--dir", str(tmp_path)])
    assert result.exit_code == code
    assert shown in result.stdout
    assert ("NOT the same training" in result.stdout) == bool(code)


def test_the_report_says_whether_all_was_equal(tmp_path: Path):
    bad = replace(evidence(), exit_code=1)
    for found, equal in ((evidence(), True), (bad, False)):
        write_report(tmp_path, found, judge(found))
        report = json.loads((tmp_path / "report.json").read_text())
        assert report["equal"] is equal
        assert report["resumed_from"] == 6
    assert report["cost"]["stored_bytes"] == 1000


def test_the_cost_is_summed_up_per_checkpoint():
    cost = cost_of(evidence())
    assert (cost.checkpoints, cost.stored_bytes, cost.restore_s) == (5, 1000, 0.5)
    assert cost.stall_s == pytest.approx(0.01)
    assert cost.stall_share == pytest.approx(0.01 / 0.2)
    assert (cost.slowdown, cost.slowdown_error) == pytest.approx((0, 0))


def test_the_slowdown_counts_what_comes_back_in_each_cycle_and_not_what_comes_once():
    plain = losses(1, 50)
    saving = [
        replace(r, seconds=0.15 if r.step % 10 == 0 else 4.0 if r.step == 23 else 0.1)
        for r in plain
    ]
    # One step in ten takes half as long again: 5 %.
    assert slowdown(plain, saving, 10) == pytest.approx((0.05, 0))


def test_the_slowdown_does_not_count_other_load_that_lasts_for_a_training_or_for_cycles():
    plain = [replace(r, seconds=0.3) for r in losses(1, 50)]
    saving = [
        replace(r, seconds=(0.15 if r.step % 10 == 0 else 0.1) * (r.step // 10 + 1)) for r in plain
    ]
    assert slowdown(plain, saving, 10) == pytest.approx((0.05, 0))


def test_the_slowdown_of_unsteady_steps_comes_with_a_large_error():
    plain = losses(1, 59)
    unsteady = [replace(r, seconds=0.1 * (1 + r.step * 7 % 11)) for r in plain]
    assert slowdown(plain, plain, 10) == pytest.approx((0, 0))
    assert slowdown(plain, unsteady, 10)[1] > 0.1


@pytest.mark.parametrize("kill_at", [5, 2, 12, 7])
def test_a_kill_with_no_checkpoint_before_it_or_beside_the_cycle_is_refused(kill_at: int):
    with pytest.raises(UsageError, match="kill-at: expected a multiple of every=2 from 4 to"):
        DemoOptions(steps=10, every=2, kill_at=kill_at)
