"""ExCP: what is kept, how it is labelled, and that a chain is what its links add up to."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asymcheck import Checkpointer, options, strategies
from asymcheck.capture import Capture
from asymcheck.codec import excp, table
from asymcheck.codec.codec import Malformed
from asymcheck.codec.floats import bytes_of, narrow, widen
from asymcheck.decoding import Decoding
from asymcheck.encoding import Chooser
from asymcheck.errors import CaptureError, CorruptCheckpoint, OptionError
from asymcheck.persist import write_checkpoint
from asymcheck.planning.layout import CHUNK_BYTES, PAGE_BYTES, align_up, lay_out
from asymcheck.planning.retention import CheckpointId, Retention
from asymcheck.planning.selection import MAX_BASES, Selection
from asymcheck.storage.index import Index, Leaf
from asymcheck.storage.memory import MemoryStore
from asymcheck.storage.repository import Repository, create_repository

RESIDUAL, MOMENT = excp.Clustered("residual"), excp.Clustered("moment")
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
SIDE = 32 * 1024  # 128 KiB: chunks of their own


# --- what is kept -------------------------------------------------------------


def test_the_thresholds_are_those_of_the_recipe() -> None:
    # mean(v) = 1e-8: 5e-5 / 1e-4 = 0.5; a smaller one is capped at 2.5 medians.
    assert excp.weight_threshold(0.02, 1e-8) == pytest.approx(0.01)
    assert excp.weight_threshold(0.02, 1e-12) == pytest.approx(0.05)
    assert excp.weight_threshold(0.02, 0.0) == pytest.approx(0.05)
    assert excp.moment_threshold(0.03) == pytest.approx(0.06)


def test_only_what_exceeds_a_threshold_is_kept() -> None:
    values = np.array([-3, -2, -1, 0, 1, 2, 3], "f4")
    assert excp.is_above(values, 2.0).tolist() == [True, *[False] * 5, True]


@settings(max_examples=200)
@given(st.lists(FINITE, min_size=1, max_size=60), st.sampled_from(["f4", "f8"]))
def test_the_median_is_the_lower_middle_magnitude_bit_for_bit(values: Any, kind: str) -> None:
    array = np.array(values, kind)
    expected = np.sort(np.abs(array))[(len(array) - 1) // 2]
    parts = np.array_split(array, 3)
    assert excp.median_of(lambda: [p for p in parts if len(p)], array.itemsize) == expected


# --- labels --------------------------------------------------------------------


@given(st.lists(st.integers(0, excp.CENTRES), min_size=1, max_size=99))
def test_labels_come_back_and_take_half_a_byte(labels: list[int]) -> None:
    packed = excp.pack(np.array(labels, "u1"))
    assert len(packed) == math.ceil(len(labels) / 2)
    assert excp.unpack(packed, len(labels)).tolist() == labels


def test_before_the_entropy_stage_a_parameter_takes_12_bits_of_96() -> None:
    labels = np.ones(4096, "u1")
    assert 3 * excp.pack(labels).nbytes * 8 == 3 * 4 * 4096 * 8 / 8


@given(
    st.lists(FINITE, min_size=1, max_size=50),
    st.lists(FINITE, min_size=1, max_size=15, unique=True),
)
def test_each_value_gets_the_nearest_centre(values: list[float], centres: list[float]) -> None:
    found = np.unique(np.array(centres, "f4"))
    labels = excp.nearest_labels(np.array(values, "f4"), found)
    wide = found.astype("f8")
    for value, label in zip(np.array(values, "f4").astype("f8"), labels, strict=True):
        assert abs(wide[label - 1] - value) == pytest.approx(np.abs(wide - value).min(), rel=1e-12)


@given(st.lists(FINITE, min_size=1, max_size=400))
def test_up_to_15_different_values_are_their_own_centres(values: list[float]) -> None:
    array = np.array([x for x in values if x] or [1.0], "f4")
    centres = excp.fit_centres(array)
    assert 1 <= len(centres) <= excp.CENTRES
    if len(np.unique(array)) <= excp.CENTRES:
        assert centres.tolist() == np.unique(array).tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_what_is_not_kept_stays_at_the_base_or_becomes_zero(dtype: str) -> None:
    draw = np.random.default_rng(0)
    work = "f8" if dtype == "float64" else "f4"
    base = bytes_of(narrow(draw.normal(0, 1, 5000).astype(work), dtype))
    raw = bytes_of(narrow(draw.normal(0, 1, 5000).astype(work), dtype))
    kept = draw.random(5000) < 0.1
    moved = RESIDUAL.store(raw, dtype, base, kept)
    alone = MOMENT.store(raw, dtype, None, kept)
    assert moved is not None
    assert alone is not None
    old, new = widen(base, dtype), widen(memoryview(moved.rebuilt), dtype)
    assert (new[~kept] == old[~kept]).all()
    assert (new[kept] != old[kept]).mean() > 0.95  # the rest is nearer than rounding tells
    assert ((widen(memoryview(alone.rebuilt), dtype) != 0) == kept).all()


def test_small_second_moments_survive_where_centres_of_16_bits_would_lose_them() -> None:
    values = np.exp(np.random.default_rng(0).normal(-22, 1, 4096)).astype("f4")
    centres = excp.fit_centres(values)
    assert (centres > 0).all()
    assert (centres.astype("f2") == 0).any()


def test_labels_without_a_centre_and_centres_that_are_no_numbers_are_refused() -> None:
    values = np.repeat(np.arange(1, 5, dtype="f4"), 100)
    stored = bytearray(MOMENT.encode(bytes_of(values), "float32", None).data)  # type: ignore[union-attr]
    into = memoryview(bytearray(values.nbytes))
    for at, value in ((1, 3), (1, 16), (9, 0xFF)):
        bad = stored.copy()
        bad[at] = value
        with pytest.raises(Malformed):
            MOMENT.decode(memoryview(bad), into, None)


def test_without_scikit_learn_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"no {name}")

    excp._library.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(importlib, "import_module", missing)
        with pytest.raises(OptionError, match=r"pip install 'asymcheck\[excp\]'"):
            excp.fit_centres(np.arange(1, 100, dtype="f4"))


# --- checkpoints ----------------------------------------------------------------


class Chain:
    """A repository, and arrays that are saved into it one step after the other."""

    def __init__(self, **options: Any) -> None:
        self.store = MemoryStore()
        self.repository: Repository = create_repository(self.store)
        self.attempt = self.repository.claim(None).number
        self.chooser = Chooser(Selection(rule="excp", workers=1, **options))

    def save(self, step: int, values: dict[str, tuple[str, np.ndarray[Any, Any]]]) -> Index:
        layout = lay_out([array.nbytes for _, array in values.values()])
        image = bytearray(align_up(layout.image_bytes, PAGE_BYTES))
        rows = []
        for (key, (kind, array)), place in zip(values.items(), layout.leaves, strict=True):
            image[place.start : place.stop] = array.tobytes()
            leaf = Leaf(key, array.dtype.name, array.shape, place.start, place.nbytes)
            rows.append((leaf, kind))
        rows.sort(key=lambda row: row[0].at)
        capture = Capture(
            at=CheckpointId(self.attempt, step), leaves=tuple(leaf for leaf, _ in rows),
            aliases={}, chunks=layout.chunks, metrics={}, versions={}, created_s=0.0,
            boundary_s=float(step), kinds=tuple(kind for _, kind in rows),
        )  # fmt: skip
        write_checkpoint(
            self.repository, capture, memoryview(image), lambda extent, upto: None, lambda: None,
            Retention(), lambda span: None, self.chooser,
        )  # fmt: skip
        with self.repository.open(capture.at) as opened:
            return opened.indexes[0]

    def read(self, step: int) -> dict[str, bytes]:
        with self.repository.open(CheckpointId(self.attempt, step)) as opened:
            decoding, (index,) = Decoding(opened), opened.indexes
            return {leaf.key: decoding.read_leaf(index, leaf) for leaf in index.leaves}


def adam(step: int, size: int = SIDE) -> dict[str, tuple[str, np.ndarray[Any, Any]]]:
    draw = np.random.default_rng(step)
    weight = np.random.default_rng(99).normal(0, 0.02, size).astype("f4")
    weight += draw.normal(0, 1e-4 * step, size).astype("f4")
    moment = draw.standard_t(3, size).astype("f4") * np.float32(1e-4)
    return {
        "m/w": ("parameter", weight),
        "o/state/m/w/exp_avg": ("state/exp_avg", moment),
        "o/state/m/w/exp_avg_sq": ("state/exp_avg_sq", moment * moment),
        "m/frozen": ("parameter", draw.normal(0, 1, SIDE).astype("f4")),
        "o/state/m/w/step": ("state/step", np.array([step], "f4")),
    }


def codecs(index: Index) -> dict[str, set[str]]:
    return {
        leaf.key: {c.codec for c in index.chunks if leaf.at <= c.at < leaf.stop}
        for leaf in index.leaves
    }


def recipe(new: Any, held: Any, m: Any, v: Any) -> tuple[Any, Any]:
    """The masks as the scripts of the authors have them, for a whole tensor."""
    residual = np.abs(new - held)
    median = np.sort(residual)[(len(residual) - 1) // 2]
    kept = residual > min(2.5, 5e-5 / np.sqrt(v.mean(dtype="f8"))) * median
    return kept, kept & (np.abs(m) > 2 * np.abs(m).mean(dtype="f8"))


@pytest.mark.parametrize("size", [SIDE, CHUNK_BYTES // 4 + SIDE + 3])
def test_a_chain_equals_its_reconstruction_step_by_step_bit_for_bit(size: int) -> None:
    chain = Chain()
    chain.save(1, adam(1, size))
    held = adam(1, size)["m/w"][1]
    for step in (2, 3, 4):
        values = adam(step, size)
        index = chain.save(step, values)
        assert codecs(index)["m/w"] == {"excp-residual"}
        (w, m, v) = (array for _, array in list(values.values())[:3])
        kept, moments_kept = recipe(w, held, m, v)
        back = {k: np.frombuffer(b, "f4") for k, b in chain.read(step).items()}
        found = back["m/w"]
        assert ((found != held) == kept).mean() > 0.9999  # a residual may vanish by rounding
        assert ((back["o/state/m/w/exp_avg"] != 0) == moments_kept).all()
        assert ((back["o/state/m/w/exp_avg_sq"] != 0) == moments_kept).all()
        worst = {loss.kind: loss.max_error for loss in index.losses}
        assert worst["parameter float32"] == pytest.approx(np.abs(found - w).max())
        assert (back["m/frozen"] == values["m/frozen"][1]).all()
        assert back["o/state/m/w/step"] == step
        kept_by_writer = b"".join(
            bytes(piece) for _, piece in chain.chooser._reference.pieces.values()
        )
        assert found.tobytes() == kept_by_writer
        held = found


def test_what_is_not_finite_and_what_has_no_moments_is_exact() -> None:
    chain = Chain()
    chain.save(1, adam(1))
    for step, key in ((2, "m/w"), (3, "o/state/m/w/exp_avg"), (4, "o/state/m/w/exp_avg_sq")):
        values = adam(step)
        values[key][1][7] = np.nan
        index = chain.save(step, values)
        assert index.losses == ()
        back = chain.read(step)
        assert all(back[k] == array.tobytes() for k, (_, array) in values.items())
    assert codecs(chain.save(5, adam(5)))["m/w"] == {"excp-residual"}


def test_a_parameter_of_another_form_begins_anew() -> None:
    chain = Chain()
    chain.save(1, adam(1))
    assert codecs(chain.save(2, adam(2, 2 * SIDE)))["m/w"] == {"blosc2"}
    assert codecs(chain.save(3, adam(3, 2 * SIDE)))["m/w"] == {"excp-residual"}


def test_another_difference_to_a_lossy_chunk_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = Chain()
    for step in (1, 2):
        chain.save(step, adam(step))
    index = chain.save(3, adam(3))

    def find(name: str) -> Any:
        return table.by_label("topk") if name == "excp-residual" else table.find(name)

    with (
        chain.repository.open(CheckpointId(chain.attempt, 3)) as opened,
        pytest.raises(CorruptCheckpoint, match="which is lossy"),
    ):
        Decoding(opened, find).read_leaf(index, next(x for x in index.leaves if x.key == "m/w"))


def test_a_chain_has_an_end() -> None:
    with pytest.raises(OptionError, match="key_every: expected at most 101"):
        Selection(rule="excp", key_every=MAX_BASES + 2)
    chain = Chain(key_every=MAX_BASES + 1)
    small = {k: v for k, v in adam(1, 16 * 1024).items() if k != "m/frozen"}
    for step in range(1, MAX_BASES + 2):
        chain.save(step, small)
    chain.chooser._since_key = 0
    with pytest.raises(OptionError, match="make a key-frame"):
        chain.save(MAX_BASES + 2, small)
    assert chain.read(MAX_BASES + 1)["m/w"] == small["m/w"][1].tobytes()
    assert not chain.repository.survey().damaged


def test_commit_refuses_a_chain_of_any_other_class() -> None:
    chain = Chain()
    for step in (1, 2):
        chain.save(step, adam(step))
    index = replace(chain.save(3, adam(3)), at=CheckpointId(chain.attempt, 4), packs=(), chunks=())
    index = replace(index, leaves=())
    for fidelity in ("exact", "moments", "aggressive"):
        with pytest.raises(OptionError, match="a delta itself, which no base may be"):
            chain.repository.commit(index, CheckpointId(chain.attempt, 3), fidelity)
    chain.repository.commit(index, CheckpointId(chain.attempt, 3), "excp")


def test_commit_refuses_a_lossy_base_that_stands_alone() -> None:
    chain = Chain()
    index = replace(chain.save(1, adam(1)), packs=(), chunks=(), leaves=())
    two, three = (replace(index, at=CheckpointId(chain.attempt, step)) for step in (2, 3))
    chain.repository.commit(two, None, "moments")
    for fidelity in ("exact", "moments", "excp"):
        with pytest.raises(OptionError, match=r"is lossy \(moments\), which no base may be"):
            chain.repository.commit(three, two.at, fidelity)


# --- asking for it ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["naive", "asymcheck-naive"])
@pytest.mark.parametrize("fidelity", ["moments", "aggressive"])
def test_a_strategy_that_encodes_nothing_cannot_lose_anything(name: str, fidelity: Any) -> None:
    with pytest.raises(OptionError, match="expected 'exact' with a strategy that encodes nothing"):
        strategies[name].with_fidelity(fidelity)
    assert strategies[name].with_fidelity("exact") == strategies[name]


@pytest.mark.parametrize("fidelity", ["exact", "moments", "aggressive"])
def test_excp_has_a_class_of_its_own(fidelity: Any) -> None:
    with pytest.raises(OptionError, match="'excp', whose checkpoints are of the class 'excp'"):
        strategies["excp"].with_fidelity(fidelity)


def test_a_checkpointer_without_scikit_learn_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(options, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match=r"needs scikit-learn.*asymcheck\[excp\]"):
        Checkpointer("memory://excp", state={"x": {}}, strategy="excp")


def test_a_failing_import_fails_the_save_with_the_name_of_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chain = Chain()
    chain.save(1, adam(1))

    def fails() -> None:
        raise OptionError("pip install 'asymcheck[excp]'")

    monkeypatch.setattr(excp, "_library", fails)
    with pytest.raises(CaptureError, match=r"asymcheck\[excp\]"):
        chain.save(2, adam(2))
