"""Every strategy that is shipped keeps the promises of the strategy suite."""

from __future__ import annotations

import pytest

from asymcheck import Strategy, strategies
from asymcheck.testing.strategy_suite import StrategySuite


class TestShipped(StrategySuite):
    @pytest.fixture(autouse=True, params=strategies)
    def _name(self, request: pytest.FixtureRequest) -> None:
        self._strategy = strategies[request.param]

    def new_strategy(self) -> Strategy:
        return self._strategy
