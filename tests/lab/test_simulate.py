"""The fluid model tells where the instants of copying matter from where they do not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from asymcheck.planning.windows import idle_s, total_s
from asymcheck_lab.errors import UsageError
from asymcheck_lab.simulate import GB, POLICIES, Load, Row, measure, simulate, table

# Overhead of one checkpointing step in %, by (GB, GB/s, g/c, shared): free, gate, proportional,
# equal. From an independent implementation of the model; it may differ by what happens at the
# ends of the passes, which is a layer or two of 64.
EXPECTED = {
    (5, 25, 0.3, True): (0.0, 0.0, 0.0, 0.0),
    (5, 25, 0.6, True): (6.3, 0.0, 0.0, 0.0),
    (10, 25, 0.6, True): (13.1, 0.0, 0.0, 6.3),
    (10, 25, 0.9, True): (33.9, 27.2, 27.2, 27.7),
    (10, 25, 0.6, False): (0.0, 0.0, 0.0, 0.0),
    (10, 25, 0.9, False): (0.0, 27.2, 27.2, 0.0),
    (10, 12, 0.6, False): (0.0, 39.4, 39.4, 0.0),
}
TOLERANCE = 2.0
"""Percentage points."""


@pytest.fixture(scope="module")
def rows() -> dict[tuple[float, float, float, bool], Row]:
    return {
        (
            row.load.lazy_bytes / GB,
            row.load.bandwidth_bytes_per_s / GB,
            row.load.comm_ratio,
            row.load.shared,
        ): row
        for row in table()
    }


@pytest.mark.parametrize(("key", "expected"), EXPECTED.items(), ids=str)
def test_the_model_gives_the_table_of_the_physics(
    rows: dict[tuple[float, float, float, bool], Row],
    key: tuple[float, float, float, bool],
    expected: tuple[float, ...],
) -> None:
    found = rows[key].overheads
    for policy, percent in zip(POLICIES, expected, strict=False):
        assert 100 * found[policy] == pytest.approx(percent, abs=TOLERANCE), policy
        if percent == 0.0:
            assert found[policy] < 0.001, policy


def test_the_table_of_the_docs_is_the_table_of_the_model(
    rows: dict[tuple[float, float, float, bool], Row],
) -> None:
    text = (Path(__file__).parents[2] / "docs" / "cost-model.md").read_text(encoding="utf-8")
    line = r"^\| (\d+) GB, (\d+) GB/s \| ([\d.]+) \| (yes|no) \| (.*) \|$"
    shown = {
        (float(size), float(rate), float(ratio), shared == "yes"): cells.split(" | ")
        for size, rate, ratio, shared, cells in re.findall(line, text, re.M)
    }
    assert shown == {
        key: [f"{abs(100 * row.overheads[policy]):.1f}" for policy in POLICIES]
        for key, row in rows.items()
    }


def test_where_the_copy_takes_longer_than_the_step_no_policy_matters(
    rows: dict[tuple[float, float, float, bool], Row],
) -> None:
    found = rows[10, 3, 0.6, True].overheads
    assert min(found.values()) > 2.4
    assert max(found.values()) - min(found.values()) < 0.01


def of_idle(part: float, *, shared: bool, ratio: float = 0.6) -> Load:
    """A load whose copy takes that part of the step's idle time."""
    rate = 25 * GB
    idle = idle_s(slot.window for slot in Load(0, rate, ratio, shared).slots())
    return Load(int(part * idle * rate), rate, ratio, shared)


@pytest.mark.parametrize("part", [0.3, 0.5, 0.7, 0.9, 1.0])
def test_on_a_shared_link_dividing_by_idle_time_beats_a_free_copy_and_equal_slots(
    part: float,
) -> None:
    load = of_idle(part, shared=True)
    found = {policy: simulate(load, policy).overhead for policy in POLICIES}
    for policy in ("proportional", "adaptive"):
        assert found[policy] < 0.001
        assert found[policy] < found["free"] - 0.03
        assert found[policy] <= found["equal"]
        if part >= 0.9:
            assert found[policy] < found["equal"] - 0.03


@pytest.mark.parametrize("part", [0.3, 0.7, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("ratio", [0.3, 0.6, 0.9])
def test_on_an_independent_link_adaptive_does_not_lose_to_a_free_copy(
    part: float, ratio: float
) -> None:
    load = of_idle(part, shared=False, ratio=ratio)
    assert simulate(load, "adaptive").overhead <= simulate(load, "free").overhead + 1e-9


def test_on_an_independent_link_the_published_rule_loses() -> None:
    load = of_idle(2.0, shared=False)
    assert simulate(load, "free").overhead == 0.0
    assert simulate(load, "proportional").overhead > 0.3


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("part", [0.9, 1.0])
def test_layers_that_differ_from_the_plan_change_little(seed: int, part: float) -> None:
    load = of_idle(part, shared=True)
    found = {p: simulate(load, p, jitter=0.2, seed=seed).overhead for p in POLICIES}
    assert found["proportional"] < 0.02
    assert found["adaptive"] < 0.02
    assert found["equal"] > 0.025
    assert found["free"] > 0.09


def test_what_copying_costs_is_measured_before_it_is_believed() -> None:
    shared = measure(of_idle(0.5, shared=True))
    busy = shared.interval("collective")
    assert busy is not None
    # A layer's 0.6 c of traffic take 1.2 c instead of c, all of it with a copy under way.
    assert busy.mid == pytest.approx(1 / 6, abs=0.01)
    assert busy.low > 0.1
    assert shared.kappa("forward") == shared.kappa("backward") == 0.0
    apart = measure(of_idle(0.5, shared=False))
    assert {apart.kappa(phase) for phase in ("forward", "backward", "collective")} == {0.0}


def test_the_step_is_the_one_that_the_load_describes() -> None:
    slots = Load(0, 25 * GB, 0.6, shared=True).slots()
    assert len(slots) == 128
    assert total_s(slot.window for slot in slots) == pytest.approx(1.04)
    assert sum(s.compute_s for s in slots[64:]) == pytest.approx(
        2 * sum(s.compute_s for s in slots[:64])
    )
    # 63 gathers in forward; 63 gathers and 63 reduce-scatters in backward.
    assert sum(s.comm_s for s in slots) == pytest.approx(3 * 63 * 0.6 * 1.04 / 192)


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_to_copy_costs_nothing(policy: str) -> None:
    found = simulate(Load(0, 25 * GB, 0.6, shared=True), policy)  # type: ignore[arg-type]
    assert (found.stall_s, found.slowdown_s) == (0.0, 0.0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"layers": 1},
        {"lazy_bytes": -1},
        {"comm_ratio": -0.1},
        {"comm_ratio": float("nan")},
        {"step_s": 0.0},
        {"bandwidth_bytes_per_s": 0.0},
    ],
)
def test_loads_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    fields = {"lazy_bytes": 1, "bandwidth_bytes_per_s": 1.0, "comm_ratio": 0.5, "shared": True}
    with pytest.raises(UsageError, match="load: expected"):
        Load(**{**fields, **wrong})  # type: ignore[arg-type]
