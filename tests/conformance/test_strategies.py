"""Every strategy that is shipped keeps the promises of the strategy suite."""

from __future__ import annotations

import pytest

from asymcheck import Strategy, strategies
from asymcheck.testing.strategy_suite import StrategySuite

# Rows whose every policy stands in another row too: their mixture is held to the suite by
# `pytest -m slow`.
_MIXTURES = {"asymcheck-naive", "asymcheck-so"}
NAMES = [
    pytest.param(name, marks=pytest.mark.slow) if name in _MIXTURES else name for name in strategies
]


class TestShipped(StrategySuite):
    @pytest.fixture(autouse=True, params=NAMES)
    def _name(self, request: pytest.FixtureRequest) -> None:
        self._strategy = strategies[request.param]

    def new_strategy(self) -> Strategy:
        return self._strategy


@pytest.mark.parametrize("axis", ["capture", "persist", "partitioner", "selection", "batching"])
def test_a_mixture_has_no_policy_of_its_own(axis: str) -> None:
    others = [getattr(s, axis) for name, s in strategies.items() if name not in _MIXTURES]
    assert all(getattr(strategies[name], axis) in others for name in _MIXTURES)
