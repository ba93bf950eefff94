"""The room of numbers: layout, retention, cadence, strategies."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from asymcheck.errors import OptionError
from asymcheck.planning.layout import (
    CHUNK_BYTES,
    PAGE_BYTES,
    SMALL_ALIGN_BYTES,
    SMALL_BYTES,
    Extent,
    KiB,
    MiB,
    align_up,
    lay_out,
)
from asymcheck.planning.policy import Admission
from asymcheck.planning.retention import CheckpointId, Retention, abandoned_by, lineage_of
from asymcheck.planning.strategies import Strategy, resolve, strategies

# --- layout -----------------------------------------------------------------

SIZES = st.lists(
    st.one_of(
        st.integers(0, 300),
        st.integers(SMALL_BYTES - 9, SMALL_BYTES + 9),
        st.integers(0, 3 * CHUNK_BYTES),
        st.sampled_from([0, 1, SMALL_BYTES, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES]),
    ),
    max_size=40,
)


@given(SIZES)
def test_leaves_are_disjoint_and_have_their_sizes(sizes: list[int]) -> None:
    layout = lay_out(sizes)
    assert [leaf.nbytes for leaf in layout.leaves] == sizes
    taken = sorted((leaf for leaf in layout.leaves if leaf.nbytes), key=lambda leaf: leaf.start)
    assert all(a.stop <= b.start for a, b in pairwise(taken))


@given(SIZES)
def test_small_leaves_lie_together_and_large_ones_start_on_a_page(sizes: list[int]) -> None:
    layout = lay_out(sizes)
    small = [leaf for leaf in layout.leaves if leaf.nbytes < SMALL_BYTES]
    large = [leaf for leaf in layout.leaves if leaf.nbytes >= SMALL_BYTES]
    assert all(leaf.start % SMALL_ALIGN_BYTES == 0 for leaf in small)
    assert all(leaf.start % PAGE_BYTES == 0 for leaf in large)
    assert all(a.stop <= b.start for a in small for b in large)
    # The order in which the sizes came is the order in the image, within each kind.
    assert small == sorted(small, key=lambda leaf: leaf.start)
    assert large == sorted(large, key=lambda leaf: leaf.start)


@given(SIZES)
def test_chunks_are_ascending_bounded_and_start_on_a_page(sizes: list[int]) -> None:
    layout = lay_out(sizes)
    assert all(0 < chunk.nbytes <= CHUNK_BYTES for chunk in layout.chunks)
    assert all(chunk.start % PAGE_BYTES == 0 for chunk in layout.chunks)
    assert all(a.stop <= b.start for a, b in pairwise(layout.chunks))


@given(SIZES)
def test_chunks_cover_every_leaf_and_a_large_leaf_shares_none(sizes: list[int]) -> None:
    layout = lay_out(sizes)
    for leaf in layout.leaves:
        hit = [c for c in layout.chunks if c.start < leaf.stop and leaf.start < c.stop]
        covered = sum(min(c.stop, leaf.stop) - max(c.start, leaf.start) for c in hit)
        assert covered == leaf.nbytes
        if leaf.nbytes >= SMALL_BYTES:
            assert (hit[0].start, hit[-1].stop) == (leaf.start, leaf.stop)
            assert all(a.stop == b.start for a, b in pairwise(hit))


@given(SIZES)
def test_the_image_ends_with_its_last_leaf_and_wastes_less_than_a_page_per_run(
    sizes: list[int],
) -> None:
    layout = lay_out(sizes)
    assert layout.image_bytes == max((leaf.stop for leaf in layout.leaves), default=0)
    large = sum(size >= SMALL_BYTES for size in sizes)
    runs = large + len(layout.chunks)
    waste = layout.image_bytes - sum(sizes)
    assert waste <= runs * PAGE_BYTES + len(sizes) * SMALL_ALIGN_BYTES


def test_a_state_of_no_bytes_has_no_chunks() -> None:
    assert lay_out([]).chunks == ()
    assert lay_out([0, 0]).chunks == ()
    assert lay_out([0, 0]).leaves == (Extent(0, 0), Extent(0, 0))


def test_twenty_thousand_tiny_leaves_share_one_chunk() -> None:
    layout = lay_out([64] * 20_000)
    assert layout.chunks == (Extent(0, 64 * 20_000),)


def test_small_leaves_never_straddle_two_chunks() -> None:
    layout = lay_out([63 * KiB] * 600)
    assert len(layout.chunks) == 3
    for leaf in layout.leaves:
        assert sum(c.start <= leaf.start and leaf.stop <= c.stop for c in layout.chunks) == 1


def test_a_large_leaf_is_cut_at_sixteen_mebibytes() -> None:
    layout = lay_out([8, 40 * MiB])
    assert layout.leaves == (Extent(0, 8), Extent(4 * KiB, 4 * KiB + 40 * MiB))
    assert [c.nbytes for c in layout.chunks] == [8, 16 * MiB, 16 * MiB, 8 * MiB]


@given(st.integers(0, 1 << 60), st.sampled_from([1, 8, 4096]))
def test_aligning_goes_up_by_less_than_one_unit(nbytes: int, unit: int) -> None:
    aligned = align_up(nbytes, unit)
    assert aligned % unit == 0
    assert nbytes <= aligned < nbytes + unit


# --- lineage ----------------------------------------------------------------


class History:
    """A naive model: every attempt carries the whole list of checkpoints behind its state."""

    def __init__(self) -> None:
        self.parents: dict[int, CheckpointId | None] = {}
        self.paths: dict[int, list[CheckpointId]] = {}
        self.roots: dict[int, int] = {}
        self.committed: list[CheckpointId] = []
        self.attempt = 0
        self.fresh()

    def fresh(self) -> None:
        self._start(None, [], self.attempt + 1)

    def resume(self, at: CheckpointId) -> None:
        behind = self.paths[at.attempt]
        self._start(at, behind[: behind.index(at) + 1], self.roots[at.attempt])

    def before_everything(self) -> None:
        """A branch of the running tree that starts before each of its checkpoints."""
        self._start(CheckpointId(self.attempt, 0), [], self.roots[self.attempt])

    def save(self, gap: int) -> None:
        behind = self.paths[self.attempt]
        at = CheckpointId(self.attempt, (behind[-1].step if behind else 0) + gap)
        behind.append(at)
        self.committed.append(at)

    def _start(self, parent: CheckpointId | None, behind: list[CheckpointId], root: int) -> None:
        self.attempt += 1
        self.parents[self.attempt] = parent
        self.paths[self.attempt] = list(behind)
        self.roots[self.attempt] = root


@st.composite
def histories(draw: st.DrawFn) -> History:
    history = History()
    for move in draw(st.lists(st.sampled_from("ssssrrbf"), max_size=30)):
        if move == "s":
            history.save(draw(st.integers(1, 3)))
        elif move == "r" and history.committed:
            history.resume(draw(st.sampled_from(history.committed)))
        elif move == "b":
            history.before_everything()
        elif move == "f":
            history.fresh()
    return history


@given(histories())
def test_a_lineage_is_the_path_that_led_to_the_state(history: History) -> None:
    for attempt, path in history.paths.items():
        assert lineage_of(attempt, history.parents, history.committed) == path


@given(histories())
def test_abandoned_is_what_the_newest_attempt_left_behind_in_its_own_tree(
    history: History,
) -> None:
    newest = history.attempt
    expected = sorted(
        c
        for c in history.committed
        if history.roots[c.attempt] == history.roots[newest] and c not in history.paths[newest]
    )
    assert abandoned_by(newest, history.parents, history.committed) == expected


def test_another_start_from_nothing_is_never_abandoned() -> None:
    old, new = CheckpointId(1, 10), CheckpointId(2, 5)
    parents = {1: None, 2: None}
    assert abandoned_by(2, parents, [old, new]) == []
    assert lineage_of(2, parents, [old, new]) == [new]


def test_a_branch_before_every_checkpoint_inherits_none_of_an_older_ancestor() -> None:
    # Attempt 2 went on from step 50; attempt 3 began before step 10.
    parents = {1: None, 2: CheckpointId(1, 50), 3: CheckpointId(2, 0)}
    committed = [CheckpointId(1, 10), CheckpointId(1, 50), CheckpointId(2, 60), CheckpointId(3, 3)]
    assert lineage_of(3, parents, committed) == [CheckpointId(3, 3)]
    assert abandoned_by(3, parents, committed) == committed[:3]


def test_a_damaged_attempt_record_hides_ancestors_and_abandons_nothing() -> None:
    parents = {1: None, 3: CheckpointId(2, 20)}  # the record of attempt 2 is gone
    committed = [CheckpointId(1, 10), CheckpointId(2, 20), CheckpointId(3, 30)]
    assert lineage_of(3, parents, committed) == committed[1:]
    assert CheckpointId(1, 10) not in abandoned_by(3, parents, committed)


def test_parents_that_point_forward_or_at_themselves_end_the_walk() -> None:
    committed = [CheckpointId(1, 1), CheckpointId(2, 2)]
    for parents in ({1: CheckpointId(2, 2), 2: None}, {1: CheckpointId(1, 1)}):
        assert lineage_of(1, parents, committed) == committed[:1]


# --- retention --------------------------------------------------------------

IDS = st.builds(CheckpointId, st.integers(1, 3), st.integers(1, 40))


@st.composite
def _retentions(draw: st.DrawFn) -> Retention:
    keep_last = draw(st.none() | st.integers(1, 5))
    if keep_last is None:
        return Retention()
    best = draw(st.none() | st.integers(1, 4))
    return Retention(
        keep_last,
        keep_every_steps=draw(st.none() | st.integers(1, 10)),
        keep_best=best,
        monitor=None if best is None else "loss",
        mode=draw(st.sampled_from(["min", "max"])),
    )


SCORES = st.dictionaries(IDS, st.floats(), max_size=30)


@given(st.frozensets(IDS, min_size=1, max_size=20), SCORES, _retentions())
@example(frozenset({CheckpointId(1, 1)}), {}, Retention(keep_last=1, keep_best=1, monitor="loss"))
def test_retention_keeps_each_checkpoint_that_any_rule_asks_for_and_no_other(
    lineage: frozenset[CheckpointId],
    scores: dict[CheckpointId, float],
    retention: Retention,
) -> None:
    kept = retention.kept(lineage, {c: {"loss": v} for c, v in scores.items()})
    assert max(lineage) in kept
    assert kept <= lineage
    if retention.keep_last is None:
        assert kept == lineage
        return

    def score(c: CheckpointId) -> float | None:
        value = scores.get(c, math.nan)
        return None if math.isnan(value) else value if retention.mode == "min" else -value

    for c in lineage:
        newer = sum(other > c for other in lineage)
        wanted = newer < retention.keep_last
        if retention.keep_every_steps:
            wanted |= c.step % retention.keep_every_steps == 0
        own = score(c)
        if retention.keep_best and own is not None:
            better = 0
            for other in lineage - {c}:
                theirs = score(other)
                if theirs is not None and (theirs < own or (theirs == own and other > c)):
                    better += 1
            wanted |= better < retention.keep_best
        assert (c in kept) == wanted


def test_a_nan_is_never_a_best_one() -> None:
    a, b, c = CheckpointId(1, 1), CheckpointId(1, 2), CheckpointId(1, 3)
    retention = Retention(keep_last=1, keep_best=1, monitor="loss")
    kept = retention.kept([a, b, c], {a: {"loss": 2.0}, b: {"loss": math.nan}, c: {"loss": 9.0}})
    assert kept == {a, c}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"keep_last": 0}, "keep_last: expected an integer from 1 on, found 0"),
        ({"keep_last": True}, "keep_last: expected an integer from 1 on, found True"),
        ({"keep_last": 1.5}, r"keep_last: expected an integer from 1 on, found 1\.5"),
        ({"keep_last": 1, "keep_every_steps": -1}, "keep_every: expected an integer"),
        ({"keep_last": 1, "keep_best": "2", "monitor": "loss"}, "keep_best: expected an integer"),
        ({"keep_every_steps": 5}, "keep_last: expected a number with keep_every, found None"),
        ({"keep_best": 1, "monitor": "x"}, "keep_last: expected a number with keep_best"),
        ({"keep_last": 1, "keep_best": 1}, "keep_best and monitor: expected both or neither"),
        ({"keep_last": 1, "monitor": "x"}, "keep_best and monitor: expected both or neither"),
        ({"keep_last": 1, "keep_best": 1, "monitor": 7}, "monitor: expected the name .* found 7"),
        ({"mode": "most"}, "mode: expected 'min' or 'max', found 'most'"),
    ],
)
def test_rules_that_contradict_each_other_are_no_retention(
    options: dict[str, Any], said: str
) -> None:
    with pytest.raises(OptionError, match=said):
        Retention(**options)


# --- admission --------------------------------------------------------------


def test_an_admission_without_room_is_refused_by_name() -> None:
    with pytest.raises(OptionError, match="max_in_flight"):
        Admission(max_in_flight=0)


# --- strategies -------------------------------------------------------------


def test_every_strategy_resolves_by_its_name_and_as_a_value() -> None:
    for name, value in strategies.items():
        assert resolve(name) is value
        assert resolve(value) is value


def test_an_unknown_strategy_names_the_nearest() -> None:
    with pytest.raises(OptionError, match="did you mean 'asymcheck'"):
        resolve("asymchek")
    with pytest.raises(OptionError, match="did you mean 'naive'"):
        resolve("naiv")


@pytest.mark.parametrize("wrong", [None, 3, "", "zzz", Strategy, ["naive"]])
def test_what_is_no_strategy_is_refused_with_the_choices(wrong: object) -> None:
    with pytest.raises(OptionError, match="strategy: expected one of") as caught:
        resolve(wrong)
    assert all(repr(name) in str(caught.value) for name in strategies)
    assert "did you mean" not in str(caught.value)


def test_a_strategy_is_a_value_that_nobody_can_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        strategies["naive"].persist = "behind"
    with pytest.raises(TypeError):
        strategies["mine"] = Strategy()
