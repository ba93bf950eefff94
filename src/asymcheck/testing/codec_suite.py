"""The promises of a codec as tests, for every package that brings a codec.

It subclasses the suite:

    class TestMyCodec(CodecSuite):
        def new_codec(self):
            return MyCodec()

Needs pytest. See ``asymcheck.codec.codec`` for the promises.
"""

# ruff: noqa: D102  the names of the tests say what they hold the codec to

from __future__ import annotations

import random
import re
import resource
from abc import abstractmethod
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from asymcheck.codec.codec import MIXED, Codec, Encoding, Malformed
from asymcheck.codec.floats import FLOATS, bytes_of, narrow, widen
from asymcheck.testing.children import TIMEOUT_S, Child, Say

_COUNTS = (1, 2, 255, 257, 5000, 100_000)
_GUARD = bytes((0xA5,)) * 64
_ROOM_BYTES = 1 << 30
_WIDTHS = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
_WIDTHS |= {"uint8": 1, "bool": 1, "int16": 2, "int64": 8, "complex64": 8, MIXED: 4, "later9": 1}


class CodecSuite:
    """What every codec must do.

    Attributes:
        applies_to: Dtypes of which it must not refuse a sample of many elements.
    """

    applies_to: ClassVar[tuple[str, ...]] = tuple(FLOATS)

    @abstractmethod
    def new_codec(self) -> Codec:
        """The codec under test."""
        raise NotImplementedError

    def sample(self, dtype: str, count: int, seed: int) -> memoryview:
        """Values as a training has them; another seed gives some other values.

        They are not negative, so that they are second moments as well. To be overridden by
        a codec for something else.
        """
        draw = np.random.default_rng(0)
        size = count * _WIDTHS[dtype]
        if dtype not in FLOATS:
            data = bytearray(draw.integers(0, 4, size, "u1").tobytes())
            data[::97] = bytes((seed,)) * len(data[::97])
            return memoryview(bytes(data))
        values = np.abs(draw.standard_normal(count)) * 1e-2
        values[:: 3 + seed] *= 1.01
        return bytes_of(narrow(values.astype(FLOATS[dtype].work), dtype))

    # --- there and back -----------------------------------------------------

    @pytest.mark.parametrize("dtype", _WIDTHS)
    def test_what_was_encoded_comes_back_as_well_as_was_said(self, dtype: str) -> None:
        codec = self.new_codec()
        refused = []
        for count in _COUNTS:
            raw, base = self.sample(dtype, count, 1), self.sample(dtype, count, 0)
            encoding = codec.encode(raw, dtype, base)
            if encoding is None:
                refused.append(count)
                continue
            assert len(encoding.data) <= len(raw)
            back = self._decode(codec, encoding, len(raw), base)
            if codec.lossless:
                assert back == raw
                assert (encoding.max_error, encoding.mean_error) == (0, 0)
            else:
                new, old = (widen(memoryview(b), dtype).astype("f8") for b in (back, raw))
                errors = np.abs(new - old)
                assert encoding.max_error == pytest.approx(errors.max(), rel=1e-3)
                assert encoding.mean_error == pytest.approx(errors.mean(), rel=1e-3)
        if dtype in self.applies_to:
            assert set(refused) <= set(_COUNTS[:4])

    @pytest.mark.parametrize("dtype", _WIDTHS)
    def test_any_bytes_of_any_length_come_back_or_are_left_alone(self, dtype: str) -> None:
        codec, draw = self.new_codec(), random.Random(dtype)
        for nbytes in (*range(1, 40), 4099, 70_001):
            for raw in (draw.randbytes(nbytes), b"\xff" * nbytes, bytes(nbytes)):
                base = draw.randbytes(nbytes)
                encoding = codec.encode(memoryview(raw), dtype, memoryview(base))
                if encoding is not None:
                    assert len(encoding.data) <= nbytes
                    back = self._decode(codec, encoding, nbytes, memoryview(base))
                    assert back == raw or not codec.lossless

    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_what_is_not_finite_comes_back_or_is_left_alone(self, dtype: str, value: float) -> None:
        codec, base = self.new_codec(), self.sample(dtype, 5000, 0)
        for at in (0, 4999):
            values = widen(base, dtype).copy()
            values[at] = value
            bits = (values.view("<u4") >> 16).astype("<u2") if dtype == "bfloat16" else values
            raw = bytes_of(bits if dtype == "bfloat16" else narrow(values, dtype))
            encoding = codec.encode(raw, dtype, base)
            if not codec.lossless:
                assert encoding is None
            elif encoding is not None:
                assert self._decode(codec, encoding, len(raw), base) == raw

    # --- what it may touch --------------------------------------------------

    def test_what_is_borrowed_is_left_as_it_was(self) -> None:
        codec = self.new_codec()
        raw, base = self._sample(1), self._sample(0)
        kept = bytes(raw), bytes(base)
        encoding = self._encode(codec, raw, base)
        stored = bytes(encoding.data)
        self._decode(codec, encoding, len(raw), base)
        assert (bytes(raw), bytes(base), bytes(encoding.data)) == (*kept, stored)

    def test_read_only_memory_is_enough(self) -> None:
        codec = self.new_codec()
        raw, base = self._sample(1).toreadonly(), self._sample(0).toreadonly()
        stored = memoryview(bytes(self._encode(codec, raw, base).data))
        assert self._decode(codec, Encoding(stored), len(raw), base)

    def test_the_same_chunk_gives_the_same_bytes(self) -> None:
        first, second = (
            self._encode(self.new_codec(), self._sample(1), self._sample(0)) for _ in range(2)
        )
        assert bytes(first.data) == bytes(second.data)

    def test_threads_share_a_codec(self) -> None:
        codec = self.new_codec()
        chunks = [(self._sample(i), self._sample(0)) for i in range(1, 7)]
        alone = [bytes(self._encode(codec, raw, base).data) for raw, base in chunks]

        def work(i: int) -> bool:
            raw, base = chunks[i % len(chunks)]
            encoding = self._encode(codec, raw, base)
            back = self._decode(codec, encoding, len(raw), base)
            same = bytes(encoding.data) == alone[i % len(chunks)]
            return same and (back == raw or not codec.lossless)

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(work, range(24), timeout=TIMEOUT_S))

    # --- the base -----------------------------------------------------------

    def test_without_its_base_nothing_is_encoded_nor_decoded(self) -> None:
        codec = self.new_codec()
        raw, base = self._sample(1), self._sample(0)
        encoding = self._encode(codec, raw, base)
        back = self._decode(codec, encoding, len(raw), base)
        for other in (None, base[1:], memoryview(bytes(base) + b"x")):
            if codec.needs_base:
                assert codec.encode(raw, self.applies_to[0], other) is None
                with pytest.raises(Malformed):
                    self._decode(codec, encoding, len(raw), other)
            else:
                same = codec.encode(raw, self.applies_to[0], other)
                assert same is not None
                assert bytes(same.data) == bytes(encoding.data)
                assert self._decode(codec, encoding, len(raw), other) == back

    # --- bytes that it did not write ----------------------------------------

    def test_no_bytes_make_it_crash_or_write_elsewhere(self) -> None:
        # In a child, which shows a crash, and has only so much memory to take.
        codec, base = self.new_codec(), self.sample(self.applies_to[0], 6000, 0)
        raw = self.sample(self.applies_to[0], 6000, 1)
        zeros = memoryview(bytes(len(raw)))
        good = [
            bytes(e.data)
            for e in (codec.encode(r, self.applies_to[0], base) for r in (raw, zeros, base))
            if e is not None
        ]
        assert good

        def work(say: Say) -> None:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + _ROOM_BYTES, used + _ROOM_BYTES))
            refused = 0
            for stored in _hostile(good):
                try:
                    self._decode(codec, Encoding(stored), len(raw), base)
                except Malformed:
                    refused += 1
            say(refused)

        assert Child(work).wait().check()[0] > 0

    def test_bytes_for_another_length_are_refused(self) -> None:
        codec = self.new_codec()
        raw, base = self._sample(1), self._sample(0)
        encoding = self._encode(codec, raw, base)
        for nbytes in (1, len(raw) // 2, len(raw) - 1, len(raw) + 1, 2 * len(raw)):
            with pytest.raises(Malformed):
                self._decode(codec, encoding, nbytes, memoryview(bytes(nbytes)))
        for stored in (bytes(encoding.data) + b"x", bytes(encoding.data)[:-1], b""):
            with pytest.raises(Malformed):
                self._decode(codec, Encoding(stored), len(raw), base)

    # --- how it is called ---------------------------------------------------

    def test_its_name_and_label_are_plain(self) -> None:
        codec = self.new_codec()
        for word in (codec.name, codec.label):
            assert re.fullmatch(r"[a-z0-9]+([+-][a-z0-9]+)*", word)

    # --- helpers ------------------------------------------------------------

    def _sample(self, seed: int) -> memoryview:
        return self.sample(self.applies_to[0], _COUNTS[-1], seed)

    def _encode(self, codec: Codec, raw: memoryview, base: memoryview) -> Encoding:
        encoding = codec.encode(raw, self.applies_to[0], base)
        assert encoding is not None
        return encoding

    def _decode(
        self, codec: Codec, encoding: Encoding, nbytes: int, base: memoryview | None
    ) -> bytes:
        memory = bytearray(_GUARD + bytes((0x5A,)) * nbytes + _GUARD)
        into = memoryview(memory)[len(_GUARD) : -len(_GUARD)]
        try:
            codec.decode(memoryview(encoding.data), into, base)
        finally:
            assert memory.startswith(_GUARD)
            assert memory.endswith(_GUARD)
        return bytes(into)


def _hostile(good: list[bytes]) -> list[bytes]:
    """Cut, changed byte by byte near the front and here and there, and of no origin."""
    draw = random.Random(0)
    found = [draw.randbytes(n) for n in (*range(64), 4096)]
    for stored in good:
        size = len(stored)
        places = [*range(min(size, 160)), *(draw.randrange(size) for _ in range(100))]
        found += [stored[:at] for at in places]
        for at in places:
            for value in (0, 255, stored[at] ^ 1, stored[at] ^ 128, draw.randrange(256)):
                found.append(stored[:at] + bytes((value,)) + stored[at + 1 :])
            for word in (0, (1 << 31) - 1, 1 << 31, (1 << 32) - 1):
                found.append((stored[:at] + word.to_bytes(4, "little") + stored[at + 4 :])[:size])
    return found
