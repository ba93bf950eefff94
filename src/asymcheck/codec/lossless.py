"""Lossless compression by blosc2: shuffle bytes or bits of the numbers, then zstd or LZ4.

A *section* is what every codec stores its arrays as: four bytes that say how long it is, little
endian, then either the bytes themselves or, where that is smaller, a blosc2 chunk (c-blosc2,
README_CHUNK_FORMAT: a header of 32 bytes, then blocks). blosc2 itself decodes much more than is
ever written here: dictionaries, lazy blocks, codecs that are looked up on the host at run time.
So the header is compared with what our settings can give before blosc2 sees a byte of it.
"""

from __future__ import annotations

import functools
import importlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import numpy as np

from asymcheck.codec.codec import Encoding, Malformed, width_of

Setting = Literal["zstd1+shuffle", "lz4+bitshuffle"]

PIECE_BYTES = 1 << 20
"""What is compressed at a time."""

Buffer = bytes | memoryview

_HEADER = struct.Struct("<BBBBiii16s")  # version, of the codec, flags, width, sizes, filters
_LENGTH = struct.Struct("<I")
_VERSIONS = (5, 1)
_SPLIT_MASK, _EXTENDED, _ZEROS = 0xEF, 0x05, 0x10
_MOST_BYTES = (1 << 31) - 33


def _filters(code: int, codec: int) -> bytes:
    """Bytes 16 to 30 of a header: one filter in the last of six places, the codec, nothing."""
    return bytes((0, 0, 0, 0, 0, code, codec)) + bytes(8)


_KNOWN = {(_EXTENDED | 4 << 5, _filters(1, 5)), (_EXTENDED | 1 << 5, _filters(2, 1))}
"""Flags without the split bit, and bytes 16 to 30, of zstd with shuffle, LZ4 with bitshuffle."""


@functools.cache
def _library() -> ModuleType:
    """blosc2, which takes 0.3 s to import and is not needed by who stores raw."""
    blosc2 = importlib.import_module("blosc2")
    # For the whole process: without it encoders in several threads would take turns.
    blosc2.set_releasegil(True)
    return blosc2


def load_library() -> None:
    """Import what encoding needs now, so that the first chunk does not wait for it."""
    _library()


@functools.cache
def _parameters(setting: Setting, width: int) -> dict[str, Any]:
    """All of them, since the defaults of blosc2 can be changed by anyone in the process."""
    blosc2 = _library()
    zstd = setting == "zstd1+shuffle"
    return {
        "codec": blosc2.Codec.ZSTD if zstd else blosc2.Codec.LZ4,
        "codec_meta": 0,
        "clevel": 1,
        "use_dict": False,
        "typesize": width,
        "nthreads": 1,
        # 0 is what blosc2 thinks fit, and the fastest for LZ4. Longer streams of each byte of a
        # number are faster for zstd, and smaller for numbers of two bytes.
        "blocksize": 0 if not zstd else PIECE_BYTES >> 2 if width > 2 else PIECE_BYTES,
        "splitmode": blosc2.SplitMode.AUTO_SPLIT,
        "filters": [blosc2.Filter.NOFILTER] * 5
        + [blosc2.Filter.SHUFFLE if zstd else blosc2.Filter.BITSHUFFLE],
        "filters_meta": [0] * 6,
        "tuner": blosc2.Tuner.STUNE,
    }


def write_section(raw: memoryview | bytes, width: int, setting: Setting) -> tuple[bytes, Buffer]:
    """The two parts of a section. Takes memory for two more copies of ``raw``; one thread.

    Args:
        raw: Contiguous bytes, less than 2 GiB.
        width: Bytes of a number: 1, 2, 4 or 8, and no remainder.
        setting: Compressor and filter.
    """
    body: Buffer = raw
    if len(raw) > _HEADER.size:
        data: bytes = _library().compress2(raw, **_parameters(setting, width))
        # A future blosc2 may write what this version would not read: then nothing is compressed.
        if len(data) < len(raw) and _fault(memoryview(data), len(raw), width) is None:
            body = data
    return _LENGTH.pack(len(body)), body


def read_section(stored: memoryview, into: memoryview, width: int, codec: str) -> memoryview:
    """Undo ``write_section``; blosc2 writes into ``into`` without a copy.

    Args:
        stored: It begins with the section.
        into: As long as the raw bytes were.
        width: As it was.
        codec: For messages.

    Returns:
        What comes after the section.

    Raises:
        Malformed: There is no section of as many raw bytes.
    """
    length = _LENGTH.unpack_from(stored)[0] if len(stored) >= _LENGTH.size else 0
    body, rest = stored[_LENGTH.size :][:length], stored[_LENGTH.size + length :]
    fault = None
    if len(body) != length or length > len(into):
        fault = f"expected a section of at most {len(into)} bytes, found {len(body)} of {length}"
    elif length == len(into):
        into[:] = body
    else:
        fault = _fault(body, len(into), width)
        if fault is None:
            try:
                _library().decompress2(body, into, nthreads=1)
            except (RuntimeError, ValueError):
                fault = "expected blosc2 blocks, found something else"
    if fault is not None:
        raise Malformed(f"{codec}: {fault}")
    return rest


def read_last(stored: memoryview, codec: str) -> None:
    """Check that nothing follows the last section.

    Raises:
        Malformed: Something does.
    """
    if len(stored):
        raise Malformed(f"{codec}: expected no byte after the last section, found {len(stored)}")


def write_pieces(
    pieces: Iterable[memoryview], nbytes: int, width: int, setting: Setting
) -> memoryview | None:
    """The width as a byte, then a section for each piece; ``None`` when that is not smaller.

    A chunk is cut into pieces so that the work stays in the cache of a core. Each is read
    before the next one is asked for.

    Args:
        pieces: Of ``PIECE_BYTES`` each, the last one of what is left.
        nbytes: Of all pieces.
        width: See ``write_section``.
        setting: See ``write_section``.
    """
    out = np.empty(nbytes, "u1").data  # on huge pages where there are some: fewer page faults
    out[0], at = width, 1
    for piece in pieces:
        for part in write_section(piece, width, setting):
            if at + len(part) >= nbytes:
                return None
            out[at : at + len(part)] = part
            at += len(part)
    return out[:at]


def read_pieces(stored: memoryview, into: memoryview, codec: str) -> int:
    """Undo ``write_pieces`` into ``into``, as long as the pieces were together.

    Returns:
        The width.

    Raises:
        Malformed: No pieces of so many bytes were written as these.
    """
    width = stored[0] if len(stored) else 0
    if width not in (1, 2, 4, 8) or len(into) % width:
        raise Malformed(f"{codec}: expected a width of 1, 2, 4 or 8 that fits, found {width}")
    rest = stored[1:]
    for start in range(0, len(into), PIECE_BYTES):
        rest = read_section(rest, into[start : start + PIECE_BYTES], width, codec)
    read_last(rest, codec)
    return width


def _fault(stored: memoryview, nbytes: int, width: int) -> str | None:
    if not _HEADER.size <= len(stored) <= _MOST_BYTES:
        return f"expected a header of {_HEADER.size} bytes, found {len(stored)} bytes in all"
    version, inner, flags, found, raw, block, whole, tail = _HEADER.unpack_from(stored)
    if (raw, whole) != (nbytes, len(stored)):
        return f"expected {len(stored)} bytes for {nbytes}, the header says {whole} for {raw}"
    known = (version, inner) == _VERSIONS and (flags & _SPLIT_MASK, tail[:15]) in _KNOWN
    zeros = tail[15] == _ZEROS and whole == _HEADER.size
    if not known or not (zeros or tail[15] == 0):
        return f"expected the header of a known setting, found {bytes(stored[:32]).hex()}"
    if found != width or not 0 < block <= raw:
        return f"expected a width of {width} and blocks, found {found} and {block} of {raw}"
    return None


@dataclass(frozen=True, slots=True)
class Lossless:
    """A chunk as blosc2 compresses it; both settings decode under one name."""

    label: Setting
    name: str = "blosc2"
    lossless: bool = True
    needs_base: bool = False
    chains: bool = False

    def encode(self, raw: memoryview, dtype: str, base: memoryview | None) -> Encoding | None:
        """See ``Codec``. Applies to every dtype."""
        pieces = (raw[at : at + PIECE_BYTES] for at in range(0, len(raw), PIECE_BYTES))
        data = write_pieces(pieces, len(raw), width_of(dtype, len(raw)), self.label)
        return None if data is None else Encoding(data)

    def decode(self, stored: memoryview, into: memoryview, base: memoryview | None) -> None:
        """See ``Codec``."""
        read_pieces(stored, into, self.name)
