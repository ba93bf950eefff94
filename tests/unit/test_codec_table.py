"""Names, labels, widths, and the few things that a suite for any codec cannot know."""

from __future__ import annotations

import importlib
import subprocess
import sys

import numpy as np
import pytest

from asymcheck.codec.codec import MIXED, Malformed, width_of
from asymcheck.codec.floats import bytes_of
from asymcheck.codec.lossless import PIECE_BYTES
from asymcheck.codec.quantize import BLOCK, Quantized
from asymcheck.codec.table import CODECS, by_label, find, labels


def test_a_label_names_one_codec_and_settings_share_a_name() -> None:
    assert len(set(labels())) == len(CODECS)
    assert labels()[0] == "raw"
    for codec in CODECS:
        assert by_label(codec.label) is codec
        found = find(codec.name)
        assert found is not None
        assert (found.name, found.needs_base) == (codec.name, codec.needs_base)
    assert {find("blosc2"), find("delta")} < set(CODECS)
    assert find("zstd1+shuffle") is None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("lz4+bitshuffle", "zstd1+shuffle"),
        ("delta+lz4+bitshuffle", "delta+zstd1+shuffle"),
    ],
)
def test_either_setting_decodes_what_the_other_wrote(one: str, other: str) -> None:
    raw = memoryview(np.arange(300_000, dtype="<i4").tobytes())
    base = memoryview(bytes(len(raw)))
    encoding = by_label(one).encode(raw, "int32", base)
    assert encoding is not None
    into = bytearray(len(raw))
    by_label(other).decode(memoryview(encoding.data), memoryview(into), base)
    assert into == raw


@pytest.mark.parametrize(
    ("dtype", "nbytes", "width"),
    [
        ("float32", 400, 4),
        ("float32", 402, 1),
        ("bfloat16", 402, 2),
        ("float64", 400, 8),
        ("complex64", 400, 4),
        ("complex128", 400, 8),
        ("complex32", 400, 2),
        ("int8", 400, 1),
        ("float8_e4m3fn", 400, 1),
        ("float4_e2m1fn_x2", 400, 1),
        ("bool", 400, 1),
        (MIXED, 400, 4),
        ("something", 400, 1),
        ("int4096", 4096, 1),
    ],
)
def test_a_dtype_says_how_wide_its_numbers_are(dtype: str, nbytes: int, width: int) -> None:
    assert width_of(dtype, nbytes) == width


@pytest.mark.parametrize("label", ["lz4+bitshuffle", "zstd1+shuffle", "delta+zstd1+shuffle"])
def test_a_chunk_of_several_pieces_comes_back_with_what_cannot_be_compressed(label: str) -> None:
    draw = np.random.default_rng(0)
    noise, calm = draw.bytes(PIECE_BYTES), np.arange(PIECE_BYTES // 4, dtype="<u4").tobytes()
    raw = memoryview(calm + noise + calm + noise[:12344])
    base = memoryview(bytes(len(raw)))
    encoding = by_label(label).encode(raw, "int32", base)
    assert encoding is not None
    assert len(encoding.data) < len(raw) - PIECE_BYTES
    into = bytearray(len(raw))
    by_label(label).decode(memoryview(encoding.data), memoryview(into), base)
    assert into == raw


def test_the_interpreter_is_free_while_blosc2_works() -> None:
    raw = memoryview(bytes(1000))
    assert by_label("zstd1+shuffle").encode(raw, "float32", None) is not None
    blosc2 = importlib.import_module("blosc2")
    assert blosc2.set_releasegil(True) is True  # it says what was set before


def test_who_stores_raw_loads_no_compressor() -> None:
    code = (
        "import sys\n"
        "from asymcheck.codec.table import find\n"
        "find('raw').encode(memoryview(b'x'), '', None)\n"
        "assert 'blosc2' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_what_a_later_blosc2_writes_otherwise_is_stored_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blosc2 = importlib.import_module("blosc2")
    honest = blosc2.compress2

    def compress(*arguments: object, **parameters: object) -> bytes:
        made = bytearray(honest(*arguments, **parameters))
        made[0] = 7
        return bytes(made)

    codec, raw = by_label("zstd1+shuffle"), memoryview(bytes(5000))
    monkeypatch.setattr(blosc2, "compress2", compress)
    assert codec.encode(raw, "float32", None) is None
    monkeypatch.undo()
    assert codec.encode(raw, "float32", None) is not None


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (5, 6),  # another version of the format
        (7, 0xE5),  # a codec that is looked up by its number
        (7, 0x87),  # a plain copy
        (8, 3),  # a width that is none
        (21, 160),  # a filter that somebody registered
        (26, 35),  # another filter
        (27, 7),  # another codec
        (35, 1),  # blocks of their own lengths
        (36, 1),  # a dictionary
        (36, 8),  # blocks that lie in a file
        (36, 0x20),  # nothing but NaN
        (36, 0x40),  # nothing at all
    ],
)
def test_blosc2_never_sees_a_header_that_it_would_not_have_written(at: int, value: int) -> None:
    raw = memoryview(np.arange(1000, dtype="<i4").tobytes())
    codec = by_label("zstd1+shuffle")
    encoding = codec.encode(raw, "int32", None)
    assert encoding is not None
    stored = bytearray(encoding.data)
    assert stored[at] != value
    stored[at] = value
    with pytest.raises(Malformed, match=r"header of a known setting|expected a width"):
        codec.decode(memoryview(stored), memoryview(bytearray(len(raw))), None)


@pytest.mark.parametrize("label", ["q8-signed", "q4-signed", "q8-log", "q4-log"])
def test_a_lone_great_value_only_disturbs_its_own_block(label: str) -> None:
    values = np.full(4 * BLOCK, 1e-3, "<f4")
    values[BLOCK] = 1e3
    encoding = by_label(label).encode(bytes_of(values), "float32", None)
    assert encoding is not None
    into = bytearray(values.nbytes)
    by_label(label).decode(memoryview(encoding.data), memoryview(into), None)
    back = np.frombuffer(into, "<f4")
    calm = np.r_[0:BLOCK, 2 * BLOCK : 4 * BLOCK]
    assert back[calm] == pytest.approx(1e-3, rel=1e-3)
    codec = by_label(label)
    assert isinstance(codec, Quantized)
    assert abs(back[BLOCK] - 1e3) <= codec.bound(bytes_of(values), "float32")[BLOCK]


@pytest.mark.parametrize("label", ["q8-log", "q4-log"])
def test_the_logarithmic_law_is_for_nothing_below_zero(label: str) -> None:
    values = np.full(1000, 1e-3, "<f4")
    assert by_label(label).encode(bytes_of(values), "float32", None) is not None
    values[999] = -1e-30
    assert by_label(label).encode(bytes_of(values), "float32", None) is None


def test_four_bits_are_two_codes_a_byte() -> None:
    values = np.random.default_rng(0).uniform(-1, 1, 256 * 1024).astype("<f4")
    encoding = by_label("q4-signed").encode(bytes_of(values), "float32", None)
    assert encoding is not None
    assert len(encoding.data) <= values.nbytes / 8 + values.nbytes / BLOCK + 64


def test_top_k_stores_about_one_element_in_a_hundred() -> None:
    base = np.random.default_rng(0).standard_normal(100_000).astype("<f4")
    new = base + np.random.default_rng(1).standard_normal(100_000).astype("<f4")
    encoding = by_label("topk").encode(bytes_of(new), "float32", bytes_of(base))
    assert encoding is not None
    assert len(encoding.data) < 1000 * (4 + 2) + 64
    into = bytearray(new.nbytes)
    by_label("topk").decode(memoryview(encoding.data), memoryview(into), bytes_of(base))
    back = np.frombuffer(into, "<f4")
    assert (back == new).sum() == 1000
    assert (back == base).sum() == 99_000
