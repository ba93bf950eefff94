"""Every codec that is shipped keeps the promises of the codec protocol."""

from __future__ import annotations

from typing import ClassVar

import pytest

from asymcheck.codec.codec import MIXED, Codec
from asymcheck.codec.floats import FLOATS
from asymcheck.codec.table import by_label, labels
from asymcheck.testing.codec_suite import CodecSuite

ANY = ("float32", "bfloat16", "float16", "float64", "uint8", "int64", "complex64", MIXED)


class TestRaw(CodecSuite):
    applies_to: ClassVar = ANY

    def new_codec(self) -> Codec:
        return by_label("raw")


class TestLz4(CodecSuite):
    applies_to: ClassVar = ANY

    def new_codec(self) -> Codec:
        return by_label("lz4+bitshuffle")


class TestZstd(CodecSuite):
    applies_to: ClassVar = ANY

    def new_codec(self) -> Codec:
        return by_label("zstd1+shuffle")


class TestDeltaLz4(CodecSuite):
    applies_to: ClassVar = ANY

    def new_codec(self) -> Codec:
        return by_label("delta+lz4+bitshuffle")


class TestDeltaZstd(CodecSuite):
    applies_to: ClassVar = ANY

    def new_codec(self) -> Codec:
        return by_label("delta+zstd1+shuffle")


class TestSigned8(CodecSuite):
    def new_codec(self) -> Codec:
        return by_label("q8-signed")


class TestLog8(CodecSuite):
    def new_codec(self) -> Codec:
        return by_label("q8-log")


class TestSigned4(CodecSuite):
    def new_codec(self) -> Codec:
        return by_label("q4-signed")


class TestLog4(CodecSuite):
    def new_codec(self) -> Codec:
        return by_label("q4-log")


class TestTopK(CodecSuite):
    def new_codec(self) -> Codec:
        return by_label("topk")


class TestExcpResidual(CodecSuite):
    def new_codec(self) -> Codec:
        return by_label("excp-residual")


class TestExcpMoment(CodecSuite):
    def new_codec(self) -> Codec:
        return by_label("excp-moment")


def test_every_label_has_its_suite() -> None:
    suites = [suite for suite in CodecSuite.__subclasses__() if suite.__module__ == __name__]
    assert sorted(suite().new_codec().label for suite in suites) == sorted(labels())


@pytest.mark.parametrize("label", [label for label in labels() if not by_label(label).lossless])
def test_lossy_codecs_leave_other_dtypes_alone(label: str) -> None:
    raw = memoryview(bytes(range(250)) * 100)
    for dtype in ("int32", "uint8", "bool", "complex64", "float8_e4m3fn", MIXED):
        assert dtype not in FLOATS
        assert by_label(label).encode(raw, dtype, memoryview(bytes(len(raw)))) is None
