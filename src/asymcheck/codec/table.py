"""Every codec: one row each, found by the name in an index or by the label of a choice."""

from __future__ import annotations

from asymcheck.codec.codec import Codec, Raw
from asymcheck.codec.excp import Clustered
from asymcheck.codec.lossless import Lossless
from asymcheck.codec.quantize import Quantized
from asymcheck.codec.residual import Delta
from asymcheck.codec.topk import TopK

CODECS: tuple[Codec, ...] = (
    Raw(),
    Lossless("lz4+bitshuffle"),
    Lossless("zstd1+shuffle"),
    Delta("lz4+bitshuffle"),
    Delta("zstd1+shuffle"),
    Quantized("signed", 8),
    Quantized("log", 8),
    Quantized("signed", 4),
    Quantized("log", 4),
    TopK(),
    Clustered("residual"),
    Clustered("moment"),
)

_BY_LABEL = {codec.label: codec for codec in CODECS}
_BY_NAME = {codec.name: codec for codec in CODECS}


def find(name: str) -> Codec | None:
    """The codec that decodes chunks of this name; ``None`` for a name from a later version."""
    return _BY_NAME.get(name)


def by_label(label: str) -> Codec:
    """The codec of this label.

    Raises:
        KeyError: There is none.
    """
    return _BY_LABEL[label]


def labels() -> tuple[str, ...]:
    """Every label, ``raw`` first."""
    return tuple(_BY_LABEL)
