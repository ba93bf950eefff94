"""Codecs keep their word for any bytes, any length, any floats, and over many steps."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asymcheck.codec.codec import Codec, Malformed
from asymcheck.codec.floats import FLOATS, bytes_of, narrow, widen
from asymcheck.codec.quantize import BLOCK, Quantized
from asymcheck.codec.table import CODECS
from asymcheck.codec.topk import TopK

LOSSLESS = [codec for codec in CODECS if codec.lossless]
QUANTIZED = [codec for codec in CODECS if isinstance(codec, Quantized)]
DTYPES = st.sampled_from([*FLOATS, "int64", "int16", "uint8", "bool", "complex64", "complex32", ""])
# Patterns repeat, else nothing would be compressed; the end is cut anywhere.
BYTES = st.builds(
    lambda pattern, times, tail: pattern * times + tail,
    st.binary(min_size=1, max_size=64),
    st.integers(1, 200),
    st.binary(max_size=9),
)


def by_label(codec: Codec) -> str:
    return codec.label


def decoded(codec: Codec, data: bytes | memoryview, nbytes: int, base: bytes | None) -> bytes:
    into = bytearray(nbytes)
    old = None if base is None else memoryview(base)
    codec.decode(memoryview(data), memoryview(into), old)
    return bytes(into)


@st.composite
def floats(draw: st.DrawFn, *, signed: bool = True) -> tuple[str, memoryview]:
    """A dtype and enough finite elements of it, subnormal and greatest ones included."""
    dtype = draw(st.sampled_from(list(FLOATS)))
    kind = FLOATS[dtype]
    special = [0.0, kind.least, kind.greatest, 1.0, 3 * kind.least]
    one = st.sampled_from(special) | st.floats(
        0, min(kind.greatest, 1e30), allow_subnormal=True, width=64
    )
    values = np.array(draw(st.lists(one, min_size=1, max_size=12)))
    if signed:
        values *= draw(st.lists(st.sampled_from((-1.0, 1.0)), min_size=12, max_size=12))[
            : len(values)
        ]
    count = draw(st.integers(1, 3 * BLOCK))
    order = np.random.default_rng(draw(st.integers(0, 99))).integers(0, len(values), count)
    with np.errstate(under="ignore"):
        return dtype, bytes_of(narrow(values[order].astype(kind.work), dtype))


@pytest.mark.parametrize("codec", LOSSLESS, ids=by_label)
@given(raw=BYTES, dtype=DTYPES, seed=st.integers(0, 3))
@example(raw=b"\x00\x00\x80\x7f\x01\x00\xc0\xff" * 99, dtype="float32", seed=1)
def test_lossless_is_bit_exact_for_any_bytes(
    codec: Codec, raw: bytes, dtype: str, seed: int
) -> None:
    base = bytearray(raw)
    base[seed :: seed + 5] = bytes(len(base[seed :: seed + 5]))
    encoding = codec.encode(memoryview(raw), dtype, memoryview(base))
    if encoding is not None:
        assert len(encoding.data) <= len(raw)
        assert decoded(codec, encoding.data, len(raw), bytes(base)) == raw


@pytest.mark.parametrize("codec", [c for c in LOSSLESS if c.needs_base], ids=by_label)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "int8"])
@given(seed=st.integers(0, 1000))
@settings(max_examples=5)
def test_every_step_is_exact_against_the_first_key_frame(
    codec: Codec, dtype: str, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    key_frame = draw.integers(0, 256, 4096, "u1")
    state, encoded = key_frame.copy(), 0
    for _ in range(30):
        state[draw.integers(0, 4096, 40)] += draw.integers(0, 256, 40, "u1")
        encoding = codec.encode(bytes_of(state), dtype, bytes_of(key_frame))
        if encoding is not None:
            encoded += 1
            assert decoded(codec, encoding.data, 4096, key_frame.tobytes()) == state.tobytes()
    assert encoded > 5


@pytest.mark.parametrize("codec", QUANTIZED, ids=by_label)
@given(data=st.data())
def test_quantized_floats_stay_within_the_stated_bound(
    codec: Quantized, data: st.DataObject
) -> None:
    dtype, raw = data.draw(floats(signed=codec.law == "signed"))
    encoding = codec.encode(raw, dtype, None)
    if encoding is None:
        assert len(raw) < 200  # so few bytes that the headers outweigh what is saved
        return
    old = widen(raw, dtype).astype("f8")
    new = widen(memoryview(decoded(codec, encoding.data, len(raw), None)), dtype).astype("f8")
    errors = np.abs(new - old)
    assert (errors <= codec.bound(raw, dtype)).all()
    assert encoding.max_error == pytest.approx(errors.max(), rel=1e-6)
    assert encoding.mean_error == pytest.approx(math.fsum(errors / len(errors)), rel=1e-4)
    assert (new[old == 0] == 0).all()
    if codec.law == "log":
        assert (new[old > 0] > 0).all()


@pytest.mark.parametrize("codec", QUANTIZED, ids=by_label)
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_state_resumed_from_codes_again_and_again_stays_within_each_bound(
    codec: Quantized, dtype: str
) -> None:
    draw = np.random.default_rng(7)
    values = np.square(draw.standard_normal(1000)) * 1e-3
    for _ in range(50):
        raw = bytes_of(narrow(values.astype(FLOATS[dtype].work), dtype))
        encoding = codec.encode(raw, dtype, None)
        assert encoding is not None
        back = widen(memoryview(decoded(codec, encoding.data, len(raw), None)), dtype)
        errors = np.abs(back.astype("f8") - widen(raw, dtype).astype("f8"))
        assert (errors <= codec.bound(raw, dtype)).all()
        values = 0.9 * back.astype("f8") + 1e-4 * np.square(draw.standard_normal(1000))


@given(data=st.data(), ratio=st.sampled_from([0.01, 0.1, 1.0]))
def test_the_k_greatest_distances_are_kept_bit_for_bit(data: st.DataObject, ratio: float) -> None:
    dtype, raw = data.draw(floats())
    width = FLOATS[dtype].width
    new = np.frombuffer(raw, f"<u{width}")
    base = np.roll(new, data.draw(st.integers(0, 20)))
    codec = TopK(ratio)
    encoding = codec.encode(raw, dtype, bytes_of(base))
    if encoding is None:
        return
    back = np.frombuffer(decoded(codec, encoding.data, len(raw), base.tobytes()), new.dtype)
    with np.errstate(over="ignore"):
        distance = np.abs(widen(raw, dtype) - widen(bytes_of(base), dtype))
    # The slow way: by distance, then by place; those that did not move are never among them.
    order = sorted(range(len(new)), key=lambda i: (-distance[i], i))
    kept = [i for i in order[: math.ceil(ratio * len(new))] if distance[i] > 0]
    expected = base.copy()
    expected[kept] = new[kept]
    assert (back == expected).all()
    rest = np.delete(distance, kept)
    assert encoding.max_error == pytest.approx(rest.max(initial=0))


def test_what_top_k_leaves_out_at_one_step_does_not_add_up() -> None:
    draw = np.random.default_rng(3)
    base = draw.standard_normal(5000).astype("f4")
    state = base.copy()
    codec = TopK()
    for _ in range(100):
        state += (draw.standard_normal(5000) * 1e-3).astype("f4")
        encoding = codec.encode(bytes_of(state), "float32", bytes_of(base))
        assert encoding is not None
        back = decoded(codec, encoding.data, 20_000, base.tobytes())
        errors = np.abs(np.frombuffer(back, "<f4") - state)
        # Exactly the distance of the first that was left out, whatever the steps before did.
        assert errors.max() == np.sort(np.abs(state - base))[-51]
        assert (errors == 0).sum() >= 50


@pytest.mark.parametrize("codec", CODECS, ids=by_label)
@given(data=st.data())
@settings(max_examples=150)
def test_any_stored_bytes_give_a_chunk_or_one_error(codec: Codec, data: st.DataObject) -> None:
    raw = np.abs(np.random.default_rng(1).standard_normal(600)).astype("f4")
    base = (raw * np.float32(1.001)).tobytes()
    encoding = codec.encode(bytes_of(raw), "float32", memoryview(base))
    stored = bytearray(data.draw(st.binary(max_size=200)) if encoding is None else encoding.data)
    places = st.integers(0, len(stored)) | st.integers(0, min(64, len(stored)))
    for at, change in data.draw(st.lists(st.tuples(places, st.binary(max_size=8)), max_size=6)):
        keep = data.draw(st.integers(0, 8))
        stored[at : at + keep] = change
    nbytes = data.draw(st.sampled_from([raw.nbytes, 1, 1200, 2402]))
    refused = False
    try:
        decoded(codec, bytes(stored), nbytes, base[:nbytes].ljust(nbytes, b"x"))
    except Malformed:
        refused = True
    assert refused or encoding is None or nbytes == raw.nbytes or codec.name == "raw"
