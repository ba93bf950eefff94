"""What a codec is: raw bytes of a chunk to stored bytes, and back, whoever wrote them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

MIXED = ""
"""The dtype of a chunk of leaves of several dtypes."""

_WIDTHS = (1, 2, 4, 8)


class Malformed(ValueError):
    """Stored bytes that no encoder of this codec makes; what, where, expected and found."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """The stored form of a chunk.

    Attributes:
        data: The stored bytes. Those of ``raw`` are the raw ones themselves, borrowed.
        max_error: The greatest ``|x - x̂|``, where ``x̂`` is what a decoder rebuilds.
        mean_error: The mean of ``|x - x̂|`` over all elements.
    """

    data: bytes | memoryview
    max_error: float = 0.0
    mean_error: float = 0.0


class Codec(Protocol):
    """Encodes chunks of at most 16 MiB raw; any number of threads may use one codec at once.

    Codecs are values: immutable, without files and without state between two calls. Buffers
    are contiguous bytes, borrowed during the call.

    Attributes:
        name: What the chunk row of an index says. It decides how bytes are decoded.
        label: What a selection or an explanation says. Several labels may share a name.
        lossless: Whether decoding gives the raw bytes back bit for bit.
        needs_base: Whether both directions need the same chunk of the base.
        chains: Whether that chunk may be lossy, and stand on a base itself.
    """

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def label(self) -> str: ...  # noqa: D102
    @property
    def lossless(self) -> bool: ...  # noqa: D102
    @property
    def needs_base(self) -> bool: ...  # noqa: D102
    @property
    def chains(self) -> bool: ...  # noqa: D102

    def encode(self, raw: memoryview, dtype: str, base: memoryview | None) -> Encoding | None:
        """The stored form of ``raw``. Keeps one core busy, most of the time without the GIL.

        Args:
            raw: At least one byte.
            dtype: Torch's name of the element type (``"float32"``), ``MIXED`` for several.
            base: The same chunk of the base, as a decoder will have it. Ignored where
                ``needs_base`` is false.

        Returns:
            ``None`` where this codec does not apply: another dtype, not finite, not smaller,
            no base or one of another length. Such a chunk is stored raw.
        """
        ...

    def decode(self, stored: memoryview, into: memoryview, base: memoryview | None) -> None:
        """Rebuild a chunk into ``into``, as long as the raw one was.

        Never reads or writes beyond the buffers, and takes memory in proportion to ``into``,
        whatever ``stored`` says. Which bytes are in ``into`` after a failure is not defined.

        Raises:
            Malformed: ``stored`` was not made by this codec for a chunk of this length, or
                ``base`` is missing or of another length.
        """
        ...


@dataclass(frozen=True, slots=True)
class Raw:
    """The bytes as they are."""

    name: str = "raw"
    label: str = "raw"
    lossless: bool = True
    needs_base: bool = False
    chains: bool = False

    def encode(self, raw: memoryview, dtype: str, base: memoryview | None) -> Encoding:
        """See ``Codec``. The data is ``raw`` itself."""
        return Encoding(raw)

    def decode(self, stored: memoryview, into: memoryview, base: memoryview | None) -> None:
        """See ``Codec``."""
        if len(stored) != len(into):
            raise Malformed(f"raw: expected {len(into)} bytes, found {len(stored)}")
        into[:] = stored


def width_of(dtype: str, nbytes: int) -> int:
    """Bytes of one number of ``dtype``: 1, 2, 4 or 8.

    A complex element is two numbers. Mixed leaves count as 4 bytes wide, as most are. What
    has no whole number of elements, or a name that says no width, is 1 byte wide.
    """
    bits = 32 if dtype == MIXED else int((re.findall(r"^[a-z]+(\d+)", dtype) or ["8"])[0])
    width = bits // (16 if dtype.startswith("complex") else 8)
    return width if width in _WIDTHS and nbytes % width == 0 else 1


def base_of(base: memoryview | None, into: memoryview, codec: str) -> memoryview:
    """The base of a chunk to decode.

    Raises:
        Malformed: There is none, or it has another length.
    """
    if base is None or len(base) != len(into):
        found = "none" if base is None else f"{len(base)} bytes"
        raise Malformed(
            f"{codec}: expected a base of {len(into)} bytes, found {found}: give the chunk of the "
            "checkpoint that the manifest names"
        )
    return base
