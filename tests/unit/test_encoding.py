"""Which codec each kind of leaf gets, and that what was chosen can be read back.

Checkpoints of plain arrays go through encoding, flushing and committing, and are read back by the
decoder. Rates of codecs and of the store are given, never measured.
"""

from __future__ import annotations

import itertools
import json
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from asymcheck import messages
from asymcheck.capture import Capture
from asymcheck.chunking import Group, Reference
from asymcheck.codec import table
from asymcheck.codec.lossless import Lossless
from asymcheck.decoding import Decoding
from asymcheck.encoding import Chooser, Encoder
from asymcheck.errors import CaptureError, DroppedCheckpoint, NoCheckpoint, OptionError, StoreError
from asymcheck.events import Sink, discard
from asymcheck.memory import host
from asymcheck.messages import MESSAGE_BYTES, Durable
from asymcheck.persist import write_checkpoint
from asymcheck.planning.batching import FixedBytes, Ready
from asymcheck.planning.cost import Option
from asymcheck.planning.layout import PAGE_BYTES, align_up, lay_out
from asymcheck.planning.retention import CheckpointId, Retention
from asymcheck.planning.selection import RAW, Selection
from asymcheck.storage.flush import Flushed
from asymcheck.storage.index import Leaf
from asymcheck.storage.memory import MemoryStore
from asymcheck.storage.repository import create_repository
from asymcheck.storage.store import Store
from asymcheck.testing.faulty import Fault, FaultyStore

SLOW, FAST = 1e6, 1e12  # bytes a second of a store
SIZE = 32 * 1024
ALL = Retention()
Values = dict[str, tuple[str, np.ndarray[Any, Any]]]
"""Kind and array of each leaf by key."""


class Given(Chooser):
    """With a store and codecs of given rates; ratios are measured unless they are given."""

    def __init__(
        self,
        selection: Selection,
        store_bytes_per_s: float,
        options: Mapping[str, tuple[float, float]],
        batching: Any,
    ) -> None:
        super().__init__(selection, batching)
        self.store_bytes_per_s, self.options = store_bytes_per_s, options

    def finish(self, capture: Capture, encoder: Encoder, flushed: Flushed, image: Any) -> None:
        stored = sum(p.nbytes for p in flushed.packs)
        rated = replace(flushed, write_s=stored / self.store_bytes_per_s)
        super().finish(capture, encoder, rated, image)

    def _try(self, codec: Any, *more: Any) -> Option | None:
        found = super()._try(codec, *more)
        if codec.label in self.options:
            ratio, rate = self.options[codec.label]
            return Option(codec.label, ratio, rate, codec.lossless)
        return found and replace(found, encode_bytes_per_s=1e9)


class Bench:
    """A repository, a chooser, and the encoders that it made."""

    def __init__(
        self,
        selection: Selection,
        store_bytes_per_s: float = SLOW,
        options: Mapping[str, tuple[float, float]] = {},
        batching: Any = "ready",
        store: Store | None = None,
    ) -> None:
        self.repository = create_repository(store or MemoryStore())
        self.attempt = self.repository.claim(None).number
        self.chooser = Given(selection, store_bytes_per_s, options, batching)
        self.encoders: dict[int, Encoder] = {}
        begin = self.chooser.begin

        def noted(capture: Capture, sink: Sink = discard) -> Encoder:
            self.encoders[capture.at.step] = begin(capture, sink)
            return self.encoders[capture.at.step]

        self.chooser.begin = noted  # type: ignore[method-assign]

    def save(
        self,
        step: int,
        values: Values,
        check: Callable[[], None] = lambda: None,
        retention: Retention = ALL,
    ) -> Durable:
        capture, image = captured(CheckpointId(self.attempt, step), values)
        return write_checkpoint(
            self.repository,
            capture,
            image,
            lambda extent, upto: None,
            check,
            retention,
            discard,
            self.chooser,
        )

    def at(self, step: int) -> CheckpointId:
        return max(at for at in self.repository.survey().committed if at.step == step)

    def read(self, step: int) -> dict[str, bytes]:
        with self.repository.open(self.at(step)) as checkpoint:
            decoding, (index,) = Decoding(checkpoint), checkpoint.indexes
            return {leaf.key: decoding.read_leaf(index, leaf) for leaf in index.leaves}

    def labels(self, step: int) -> dict[str, str]:
        """Codec by group, those that are raw left out."""
        labels = self.encoders[step].labels
        return {str(g): label for g, label in labels.items() if label != "raw"}

    def base(self, step: int) -> int | None:
        base = self.repository.survey().committed[self.at(step)].base
        return base and base.at.step

    def holds(self, step: int, values: Values) -> bool:
        return self.read(step) == {key: array.tobytes() for key, (_, array) in values.items()}


def captured(at: CheckpointId, values: Values) -> tuple[Capture, memoryview]:
    """As a slot has it: ten seconds pass from step to step."""
    layout = lay_out([array.nbytes for _, array in values.values()])
    image = bytearray(align_up(layout.image_bytes, PAGE_BYTES))
    rows = []
    for (key, (kind, array)), extent in zip(values.items(), layout.leaves, strict=True):
        image[extent.start : extent.stop] = array.tobytes()
        leaf = Leaf(key, array.dtype.name, array.shape, extent.start, extent.nbytes)
        rows.append((leaf, kind))
    rows.sort(key=lambda row: (row[0].at, row[0].stop))
    capture = Capture(
        at=at,
        leaves=tuple(leaf for leaf, _ in rows),
        aliases={},
        chunks=layout.chunks,
        metrics={},
        versions={},
        created_s=0.0,
        boundary_s=10.0 * at.step,
        kinds=tuple(kind for _, kind in rows),
    )
    return capture, memoryview(image)


def state(step: int, size: int = SIZE) -> Values:
    """A parameter and its moments as they are after so many steps, and small leaves."""
    random = np.random.default_rng(1)
    weight = random.normal(0, 0.02, size).astype("f4")
    moment = random.normal(0, 1e-3, size).astype("f4")
    for _ in range(step):
        weight += random.normal(0, 1e-5, size).astype("f4")
        moment = (0.9 * moment + random.normal(0, 1e-4, size)).astype("f4")
    return {
        "small": ("parameter", np.full(7, step, "f4")),
        "step": ("state/step", np.full(1, step, "f4")),
        "w": ("parameter", weight),
        "m": ("state/exp_avg", moment),
        "v": ("state/exp_avg_sq", moment * moment),
    }


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


EXACT = Selection(cpu_share=1.0)
DELTA = Selection(cpu_share=1.0, delta=True, key_every=4)
ANY_DELTA = {"delta+lz4+bitshuffle": (0.1, 1e9)}
"""Differences are chosen wherever they may be."""


# --- from checkpoint to checkpoint -------------------------------------------


def test_the_first_checkpoint_is_raw_and_the_next_is_chosen_by_what_was_measured() -> None:
    bench = Bench(EXACT)
    first = bench.save(1, state(1))
    assert bench.labels(1) == {}
    assert first.stored_bytes > first.raw_bytes  # an index comes with it
    second = bench.save(2, state(2))
    assert bench.labels(2).keys() >= {
        "parameter float32",
        "state/exp_avg float32",
        "state/exp_avg_sq float32",
    }
    assert second.stored_bytes < second.raw_bytes
    assert sum(g.raw_bytes for g in second.groups) == second.raw_bytes
    assert {g.group: g.label for g in second.groups if g.label != "raw"} == bench.labels(2)
    assert bench.holds(1, state(1))
    assert bench.holds(2, state(2))


def test_every_so_many_checkpoints_one_is_lossless_and_stands_alone() -> None:
    bench = Bench(replace(EXACT, fidelity="moments", key_every=3))
    for step in range(1, 9):
        bench.save(step, state(step))
    found = {at.step: m.fidelity for at, m in bench.repository.survey().committed.items()}
    lossy = "moments"
    assert list(found.values()) == ["exact", lossy, lossy] * 2 + ["exact", lossy]
    assert bench.labels(2)["state/exp_avg float32"] == "q8-signed"
    assert bench.labels(2)["state/exp_avg_sq float32"] == "q8-log"
    assert bench.holds(4, state(4))
    wanted = state(5)
    assert bench.read(5)["w"] == wanted["w"][1].tobytes()
    assert bench.read(5)["m"] != wanted["m"][1].tobytes()


def test_differences_are_made_to_the_latest_key_frame_alone() -> None:
    bench = Bench(DELTA, options=ANY_DELTA)
    for step in range(1, 11):
        bench.save(step, state(step))
        assert bench.holds(step, state(step))
    # What the difference saves is measured at the second checkpoint.
    bases = [bench.base(step) for step in range(1, 11)]
    assert bases == [None, None, 1, 1, None, 5, 5, 5, None, 9]


def test_with_only_the_newest_kept_the_key_frame_stays_for_the_next_difference() -> None:
    bench = Bench(DELTA, options=ANY_DELTA)
    for step in range(1, 11):
        bench.save(step, state(step), retention=Retention(keep_last=1))
        left = sorted(at.step for at in bench.repository.survey().committed)
        assert left == sorted({(step - 1) // 4 * 4 + 1, step})
        assert bench.holds(step, state(step))
    assert bench.base(10) == 9


def test_a_key_frame_that_was_dropped_or_failed_is_no_base() -> None:
    bench = Bench(DELTA, options=ANY_DELTA)
    for step in range(1, 5):
        bench.save(step, state(step))

    def spoilt() -> None:
        raise DroppedCheckpoint(5, "w", "it moved")

    with pytest.raises(DroppedCheckpoint):
        bench.save(5, state(5), check=spoilt)
    bench.save(6, state(6))
    assert bench.base(6) is None
    bench.save(7, state(7))
    assert bench.base(7) == 6
    assert bench.holds(7, state(7))


def test_a_difference_that_was_dropped_leaves_the_base_as_it_is() -> None:
    bench = Bench(replace(DELTA, key_every=9), options=ANY_DELTA)
    for step in range(1, 4):
        bench.save(step, state(step))

    def spoilt() -> None:
        raise DroppedCheckpoint(4, "w", "it moved")

    with pytest.raises(DroppedCheckpoint):
        bench.save(4, state(4), check=spoilt)
    bench.save(5, state(5))
    assert bench.base(5) == 1
    assert bench.holds(5, state(5))


def test_after_a_failure_of_the_store_the_next_checkpoint_is_a_key_frame() -> None:
    store = MemoryStore()
    faulty = FaultyStore(store, Fault(do="none"))
    bench = Bench(replace(DELTA, key_every=9), options=ANY_DELTA, store=faulty)
    for step in range(1, 4):
        bench.save(step, state(step))

    def broken() -> None:
        raise StoreError("it is gone", retryable=True)

    with pytest.raises(StoreError):
        bench.save(4, state(4), check=broken)
    bench.save(5, state(5))
    assert bench.base(5) is None
    bench.save(6, state(6))
    assert bench.base(6) == 5
    assert bench.holds(6, state(6))


def test_a_base_that_is_gone_is_named_and_the_next_checkpoint_is_a_key_frame() -> None:
    bench = Bench(replace(DELTA, key_every=9), options=ANY_DELTA)
    for step in range(1, 4):
        bench.save(step, state(step))
    bench.repository.discard(CheckpointId(bench.attempt, 1))
    with pytest.raises(NoCheckpoint, match=r"step 1 \(attempt 1\).*expected the base of a delta"):
        bench.save(4, state(4))
    bench.save(5, state(5))
    assert bench.base(5) is None
    assert bench.holds(5, state(5))


def test_another_attempt_begins_with_a_key_frame_of_its_own() -> None:
    bench = Bench(replace(DELTA, key_every=9), options=ANY_DELTA)
    for step in range(1, 4):
        bench.save(step, state(step))
    bench.attempt = bench.repository.claim(CheckpointId(1, 1)).number
    bench.save(2, state(2))
    assert bench.base(2) is None
    bench.save(3, state(3))
    assert bench.base(3) == 2
    assert bench.holds(3, state(3))


# --- structure that changes ---------------------------------------------------


def _added(values: Values) -> Values:
    return {**values, "z": ("parameter", values["w"][1] + 1)}


def _another_dtype(values: Values) -> Values:
    return {**values, "w": ("parameter", values["w"][1].view("i4"))}


def _resized(values: Values) -> Values:
    return {**values, "w": ("parameter", np.tile(values["w"][1], 2))}


def _reshaped(values: Values) -> Values:
    return {**values, "w": ("parameter", values["w"][1].reshape(-1, 4))}


def _moved(values: Values) -> Values:
    return dict(sorted(values.items()))


@pytest.mark.parametrize("fidelity", ["exact", "aggressive"])
@pytest.mark.parametrize("change", [_added, _another_dtype, _resized, _reshaped, _moved])
def test_a_leaf_that_is_not_what_it_was_has_no_base_and_is_restored_all_the_same(
    change: Callable[[Values], Values], fidelity: Any
) -> None:
    bench = Bench(replace(DELTA, key_every=9, fidelity=fidelity), options=ANY_DELTA)
    for step in range(1, 4):
        bench.save(step, state(step))
    for step in range(4, 7):
        wanted = change(state(step))
        bench.save(step, wanted)
        found = bench.read(step)
        assert found.keys() == wanted.keys()
        if fidelity == "exact":
            assert bench.holds(step, wanted)
        if change in (_another_dtype, _resized, _reshaped):
            assert found["w"] == wanted["w"][1].tobytes()


def test_a_leaf_that_a_key_frame_lacks_has_no_base_in_the_one_before_it() -> None:
    bench = Bench(replace(DELTA, key_every=3), options=ANY_DELTA)
    for step in (1, 2, 3):
        bench.save(step, state(step))
    without = {k: v for k, v in state(4).items() if k != "m"}
    bench.save(4, without)  # a key-frame
    bench.save(5, state(5))
    assert bench.base(5) == 4
    assert bench.holds(5, state(5))


def test_no_more_than_one_key_frame_is_kept_in_memory() -> None:
    bench = Bench(replace(DELTA, key_every=1), options=ANY_DELTA)
    bench.save(1, state(1))
    pieces = dict(bench.chooser._reference.pieces)
    bench.save(2, state(2))
    again = bench.chooser._reference.pieces
    assert all(again[name][1] is piece for name, (_, piece) in pieces.items())
    bench.save(3, {"w": state(3)["w"]})
    kept = [piece for _, piece in bench.chooser._reference.pieces.values()]
    assert [len(piece) for piece in kept] == [SIZE * 4]


@pytest.mark.parametrize("selection", [RAW, EXACT, replace(EXACT, fidelity="moments")])
def test_without_differences_no_key_frame_is_kept_in_memory(selection: Selection) -> None:
    bench = Bench(selection)
    for step in (1, 2):
        bench.save(step, state(step))
    assert bench.chooser._reference.pieces == {}
    assert bench.chooser.base is None


def test_the_report_of_very_many_groups_is_short_enough_for_a_message() -> None:
    bench = Bench(RAW)
    values: Values = {
        f"w{i}": (f"state/{chr(0x10400) * 300}{i}", np.zeros(16500 + i, "f4")) for i in range(60)
    }
    durable = bench.save(1, values)
    assert len(json.dumps({"done": asdict(durable)})) < MESSAGE_BYTES
    sizes = [report.raw_bytes for report in durable.groups]
    assert sizes == [4 * (16500 + i) for i in range(59, 9, -1)]


# --- what may not be lossy ----------------------------------------------------


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("fidelity", ["moments", "aggressive"])
def test_what_is_not_finite_is_restored_bit_for_bit(fidelity: Any, wrong: float) -> None:
    bench = Bench(replace(EXACT, fidelity=fidelity, key_every=9))
    for step in range(1, 4):
        bench.save(step, state(step))
    for step in (4, 5):
        values = state(step)
        for key in ("w", "m", "v"):
            values[key][1][step * 100] = wrong
        bench.save(step, values)
        assert bench.read(step) == {k: a.tobytes() for k, (_, a) in values.items()}
        assert bench.encoders[step].losses == ()
    assert bench.labels(4)["state/exp_avg float32"].startswith("q")


def test_once_a_leaf_is_finite_again_it_is_lossy_again() -> None:
    bench = Bench(replace(EXACT, fidelity="moments", key_every=99))
    for step in range(1, 4):
        bench.save(step, state(step))
    spoilt = state(4)
    spoilt["m"][1][5] = math.nan
    assert bench.save(4, spoilt).fidelity == "moments"  # of exp_avg_sq
    assert bench.read(4)["m"] == spoilt["m"][1].tobytes()
    bench.save(5, state(5))
    assert bench.read(5)["m"] != state(5)["m"][1].tobytes()


def test_small_leaves_that_share_a_chunk_are_never_lossy() -> None:
    bench = Bench(replace(EXACT, fidelity="aggressive", key_every=9))
    random = np.random.default_rng(2)
    for step in range(1, 6):
        # Compressible, so that something would be chosen for them.
        small = {
            f"m{i}": ("state/exp_avg", random.normal(0, 1, 1000).round(1).astype("f4"))
            for i in range(20)
        }
        values: Values = {**state(step), **small}
        bench.save(step, values)
        found = bench.read(step)
        assert all(found[key] == array.tobytes() for key, (_, array) in small.items())
    assert bench.labels(5)["other"] in ("lz4+bitshuffle", "zstd1+shuffle")


def test_what_was_lost_is_recorded_for_each_group_and_no_more_is_lost() -> None:
    bench = Bench(replace(EXACT, fidelity="aggressive", key_every=9))
    for step in range(1, 6):
        bench.save(step, state(step))
    with bench.repository.open(bench.at(5)) as checkpoint:
        losses = checkpoint.indexes[0].losses
    assert {(x.kind, x.codec) for x in losses} >= {
        ("state/exp_avg float32", "q4-signed"),
        ("parameter float32", "topk"),
    }
    assert all(x.nbytes == 4 * SIZE for x in losses)
    found, wanted = bench.read(5), state(5)
    keys = {"parameter float32": "w", "state/exp_avg float32": "m", "state/exp_avg_sq float32": "v"}
    for loss in losses:
        key = keys[loss.kind]
        off = np.abs(np.frombuffer(found[key], "f4") - wanted[key][1].astype("f8"))
        assert off.max() == pytest.approx(loss.max_error, rel=1e-6)
        assert off.mean() == pytest.approx(loss.mean_error, rel=1e-6)


# --- what is chosen -----------------------------------------------------------

RATES = {
    "lz4+bitshuffle": (0.85, 1.8e9),
    "zstd1+shuffle": (0.70, 0.4e9),
}


@pytest.mark.parametrize(
    ("store_bytes_per_s", "taken"),
    [(50e6, "zstd1+shuffle"), (1.5e9, "lz4+bitshuffle"), (10e9, "raw")],
)
def test_each_store_gets_what_is_durable_first_of_all_combinations(
    store_bytes_per_s: float, taken: str
) -> None:
    bench = Bench(replace(EXACT, workers=1), store_bytes_per_s, RATES)
    bench.save(1, state(1))
    capture, _ = captured(CheckpointId(1, 2), state(2))
    encoder = bench.chooser.begin(capture)
    sizes: dict[Group, int] = {}
    for extent, place in encoder.places.items():
        sizes[place.group] = sizes.get(place.group, 0) + extent.nbytes

    def durable_s(labels: Mapping[Group, str]) -> float:
        stored = cpu_s = 0.0
        for group, nbytes in sizes.items():
            ratio, rate = RATES.get(labels[group], (1.0, math.inf))
            stored += math.ceil(nbytes * ratio)
            cpu_s += nbytes / rate
        return max(cpu_s + stored / 1e10, stored / store_bytes_per_s)

    every = [
        dict(zip(sizes, labels, strict=True))
        for labels in itertools.product(["raw", *RATES], repeat=len(sizes))
    ]
    assert durable_s(encoder.labels) == pytest.approx(min(map(durable_s, every)))
    large = {label for group, label in encoder.labels.items() if group.kind}
    assert taken in large


def test_a_store_that_gets_slower_is_noticed() -> None:
    bench = Bench(replace(EXACT, workers=1), FAST, RATES)
    for step in (1, 2):
        bench.save(step, state(step))
    assert bench.labels(2) == {}
    bench.chooser.store_bytes_per_s = 50e6
    for step in (3, 4):
        bench.save(step, state(step))
    assert set(bench.labels(4).values()) == {"zstd1+shuffle"}


@pytest.mark.parametrize("rule", ["measured", "smallest", "paper"])
def test_without_cpu_time_everything_is_raw(rule: Any) -> None:
    bench = Bench(replace(EXACT, rule=rule, cpu_share=0.0))
    for step in range(1, 4):
        bench.save(step, state(step))
        assert bench.labels(step) == {}
        assert bench.holds(step, state(step))


def test_encoding_stays_within_its_share_of_the_time_between_two_checkpoints() -> None:
    raw_s = 3 * 4 * SIZE / 0.4e9
    share = 0.75 * raw_s / 10.0  # ten seconds pass; two thirds of the leaves fit
    bench = Bench(replace(EXACT, cpu_share=share), 50e6, {"zstd1+shuffle": (0.5, 0.4e9)})
    slow_lz4 = {"lz4+bitshuffle": (0.9, 1e6)}
    bench.chooser.options = {**bench.chooser.options, **slow_lz4}
    for step in (1, 2):
        bench.save(step, state(step))
    assert len([g for g in bench.labels(2) if g != "other"]) == 2


def test_the_rule_of_the_smallest_looks_at_bytes_alone() -> None:
    for rate, best in ((1e9, "zstd1+shuffle"), (1e3, "lz4+bitshuffle")):
        options = {**RATES, "zstd1+shuffle": (0.7, rate)}
        bench = Bench(replace(EXACT, rule="smallest"), FAST, options)
        for step in (1, 2):
            bench.save(step, state(step))
        # At a thousand bytes a second nothing fits the budget.
        assert best in bench.labels(2).values()
        assert bench.holds(2, state(2))


@pytest.mark.parametrize(("rate", "compresses"), [(1e9, True), (1e5, False)])
def test_the_published_rule_compresses_where_that_model_says_so(
    rate: float, compresses: bool
) -> None:
    # One part in a hundred is kept; the store takes 1e6 bytes a second.
    bench = Bench(Selection(rule="paper", key_every=9), SLOW, {"topk": (0.02, rate)})
    for step in range(1, 5):
        bench.save(step, state(step))
    assert bench.labels(2) == {}  # the first difference is measured at the second
    kinds = {"parameter float32", "state/exp_avg float32", "state/exp_avg_sq float32"}
    assert bench.labels(3) == (dict.fromkeys(kinds, "topk") if compresses else {})
    assert bench.base(3) == (1 if compresses else None)
    fidelity = bench.repository.survey().committed[bench.at(3)].fidelity
    assert fidelity == ("aggressive" if compresses else "exact")
    found, wanted = bench.read(4), state(4)
    for key in ("w", "m", "v"):
        got, new, old = np.frombuffer(found[key], "f4"), wanted[key][1], state(1)[key][1]
        assert ((got == new) | (got == old)).all()


def test_writes_are_merged_as_the_strategy_says() -> None:
    each, ready = Bench(EXACT, batching="each"), Bench(EXACT)
    square = Bench(EXACT, batching="square-root")
    for bench in (each, ready, square):
        for step in (1, 2, 3):
            bench.save(step, state(step))
            assert bench.holds(step, state(step))
    assert each.chooser.policy(each.encoders[3]) == FixedBytes(1)
    assert isinstance(ready.chooser.policy(ready.encoders[3]), Ready)
    policy = square.chooser.policy(square.encoders[3])
    assert isinstance(policy, FixedBytes)
    assert policy.nbytes >= 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rule": "best"}, "rule: expected one of .* found 'best'"),
        ({"fidelity": "momnts"}, "fidelity: .* found 'momnts'; did you mean 'moments'"),
        ({"fidelity": None}, "fidelity: expected one of .* found None"),
        ({"key_every": 0}, "key_every: expected at least 1, found 0"),
        ({"cpu_share": math.nan}, "cpu_share: expected a number from 0 up, found nan"),
        ({"workers": -1}, "workers: expected 0 or more, found -1"),
    ],
)
def test_a_selection_that_is_none_is_refused_with_its_name(wrong: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Selection(**wrong)


def test_where_the_system_does_not_say_which_cores_there_are_all_of_them_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(host.os, "sched_getaffinity")
    monkeypatch.setattr(host.os, "cpu_count", lambda: 12)
    assert Chooser(EXACT).workers == 3


# --- failures -----------------------------------------------------------------


@pytest.mark.parametrize("failure", [MemoryError(), ValueError("bad"), OSError(5, "no library")])
def test_a_codec_that_fails_fails_one_checkpoint_with_one_error_and_the_next_is_raw(
    monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    bench = Bench(replace(EXACT, workers=2))
    for step in (1, 2):
        bench.save(step, state(step))
    assert bench.labels(2)

    def fails(*_: object) -> None:
        raise failure

    with monkeypatch.context() as patched:
        patched.setattr(Lossless, "encode", fails)
        with pytest.raises(CaptureError) as caught:
            bench.save(3, state(3))
        assert str(caught.value).startswith(f"step 3 (attempt {bench.attempt}): encoding ")
        assert repr(failure) in str(caught.value)
        bench.save(4, state(4))  # nor does it fail while it is only tried
        assert bench.labels(4) == {}
    steps = [at.step for at in bench.repository.survey().committed]
    assert steps == [1, 2, 4]
    assert bench.holds(4, state(4))


def test_a_codec_that_fails_while_it_is_tried_fails_no_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(EXACT)
    broken = table.by_label("zstd1+shuffle")
    encode = Lossless.encode

    def fails(self: Lossless, *more: Any) -> Any:
        if self == broken:
            raise MemoryError
        return encode(self, *more)

    monkeypatch.setattr(Lossless, "encode", fails)
    for step in (1, 2):
        bench.save(step, state(step))
        assert bench.holds(step, state(step))
    assert set(bench.labels(2).values()) == {"lz4+bitshuffle"}


def test_what_cannot_be_kept_for_want_of_memory_fails_that_checkpoint_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(DELTA, options=ANY_DELTA)

    def full(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(Reference, "keep", full)
        with pytest.raises(CaptureError, match=r"step 1 .*MemoryError"):
            bench.save(1, state(1))
    for step in (2, 3, 4):
        bench.save(step, state(step))
    assert bench.base(4) == 2
    assert bench.holds(4, state(4))


def test_the_error_of_a_codec_is_the_same_on_the_other_side_of_the_process() -> None:
    failure = CaptureError("step 3: encoding failed")
    again = messages.rebuild_error(messages.describe_error(failure))
    assert type(again) is CaptureError
    assert str(again) == str(failure)
