"""Ranks that restore together decide alike."""

from __future__ import annotations

from typing import Any

import pytest

from asymcheck.errors import CorruptCheckpoint, NoCheckpoint, StoreError
from asymcheck.planning.retention import CheckpointId
from asymcheck.settling import DAMAGED, GONE, WELL, WRONG, Found, Look, Settling

AT = CheckpointId(1, 7)


def _told(*others: Any) -> Settling:
    """Rank 0 of a world in which the others say this."""
    return Settling(0, 1 + len(others), lambda what, mine: [mine, *others])


@pytest.mark.parametrize(
    ("kinds", "worst"),
    [
        ((WELL, WELL), WELL),
        ((WELL, DAMAGED), DAMAGED),
        ((DAMAGED, GONE), GONE),
        ((GONE, WRONG), WRONG),
    ],
)
def test_a_try_ends_on_all_ranks_as_on_the_one_where_it_ended_worst(
    kinds: tuple[str, str], worst: str
) -> None:
    own = CorruptCheckpoint("here", "mine")
    mine = Found(kinds[0], "mine", touched=False, own=own)
    found = _told([kinds[1], "theirs", True]).settle("restore", mine, AT)
    assert (found.kind, found.touched) == (worst, True)
    assert found.own is (own if kinds[0] == worst else None)
    if worst != WELL:
        assert found.why == "rank 1: theirs"


def test_all_ranks_try_what_rank_0_sees() -> None:
    def look() -> Look:
        return [CheckpointId(2, 9), AT], [(11, "its manifest is damaged", False)]

    told: list[Any] = []

    def exchange(what: str, mine: Any) -> list[Any]:
        told.append(mine)
        return [told[0], mine]

    expected = look()
    assert Settling(0, 2, exchange).first(look) == expected
    assert Settling(1, 2, exchange).first(_unasked) == expected
    assert told[1] == {}


def _unasked() -> Look:
    raise AssertionError("only rank 0 looks")


@pytest.mark.parametrize("failure", [NoCheckpoint("none"), StoreError("no", retryable=True)])
def test_where_rank_0_sees_nothing_no_rank_goes_on(failure: Exception) -> None:
    def look() -> Look:
        raise failure

    told: list[Any] = []

    def exchange(what: str, mine: Any) -> list[Any]:
        told.append(mine)
        return [told[0], mine]

    with pytest.raises(type(failure)) as own:
        Settling(0, 2, exchange).first(look)
    assert own.value is failure
    with pytest.raises(type(failure), match="rank 0: no"):
        Settling(1, 2, exchange).first(_unasked)
