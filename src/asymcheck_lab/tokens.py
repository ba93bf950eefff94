"""Text to tokens: bytes, or a byte-pair encoding that is trained on the data and cached."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from asymcheck_lab.errors import DataError, LabError

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""Tokens that no text contains, the first entries of every vocabulary."""

_SAME_ROLE = {
    "[PAD]": ("<pad>",),
    "[CLS]": ("<s>",),
    "[SEP]": ("</s>", "<|endoftext|>"),
    "[MASK]": ("<mask>",),
}


class Tokens(Protocol):
    """A tokenizer.

    Attributes:
        size: Entries of its vocabulary.
        pad: Token that fills up; no use where there is none.
        begin: Token at the begin of a window.
        separator: Token between texts and at the end of a window.
        mask: Token in the place of a hidden one.
    """

    size: int
    pad: int
    begin: int
    separator: int
    mask: int

    def join(self, texts: Sequence[str]) -> npt.NDArray[Any]:
        """The tokens of all texts, with what is between two of them."""
        ...


class Bytes:
    """Token ``n`` is byte ``n`` of the UTF-8 text; 256 of them, nothing to train."""

    size = 256
    pad = begin = separator = mask = 0

    def join(self, texts: Sequence[str]) -> npt.NDArray[np.uint8]:
        """See ``Tokens``; an empty line is between two texts."""
        return np.frombuffer("\n\n".join(texts).encode("utf-8"), np.uint8)


class Words:
    """A tokenizer of the ``tokenizers`` package.

    Args:
        engine: A ``tokenizers.Tokenizer``.
        where: Where it is from; for messages.

    Raises:
        DataError: It lacks a special token.
    """

    def __init__(self, engine: Any, where: str) -> None:  # noqa: ANN401  no types there
        engine.no_truncation()  # a published one may cut off or fill up whatever it encodes
        engine.no_padding()
        self.engine = engine
        self.size: int = engine.get_vocab_size()
        self.begin = self._special("[CLS]", where)
        self.separator = self._special("[SEP]", where)
        self.pad = self._special("[PAD]", where)
        self.mask = self._special("[MASK]", where)

    def join(self, texts: Sequence[str]) -> npt.NDArray[np.uint32]:
        """See ``Tokens``; the separator is between two texts."""
        parts: list[npt.NDArray[np.uint32]] = []
        for encoded in self.engine.encode_batch(list(texts), add_special_tokens=False):
            parts.append(np.array([*encoded.ids, self.separator], np.uint32))
        return np.concatenate(parts)

    def spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The tokens of a text, and where in it each of them begins and ends."""
        encoded = self.engine.encode(text, add_special_tokens=False)
        return encoded.ids, encoded.offsets

    def _special(self, name: str, where: str) -> int:
        for known in (name, *_SAME_ROLE[name], "<|endoftext|>"):
            found = self.engine.token_to_id(known)
            if found is not None:
                return int(found)
        raise DataError(where, expected=f"a token {name}", found=f"{self.size} tokens without it")


def cache_folder() -> Path:
    """Where trained tokenizers lie: ``asymlab`` in the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "asymlab"


def trained(texts: Sequence[str], vocabulary: int, sha256: str, cache: Path) -> Words:
    """A byte-pair encoding of the bytes of these texts (Sennrich et al. 2016, section 3.2).

    Every text can be written in it, as its first entries after the special ones are the 256
    bytes. It is looked for in the cache, and put there; a damaged one is made anew.

    Args:
        texts: What to train on, where there is none in the cache.
        vocabulary: Entries at most, special ones included.
        sha256: Of the texts: what names it in the cache.
        cache: The folder.

    Raises:
        LabError: The cache cannot be written.
    """
    import tokenizers

    key = hashlib.sha256(f"{tokenizers.__version__} {vocabulary} {sha256}".encode()).hexdigest()
    path = cache / f"tokens-{key[:32]}.json"
    try:
        return Words(tokenizers.Tokenizer.from_file(str(path)), str(path))
    except Exception as missing:  # noqa: BLE001  the package raises nothing more precise
        del missing
    engine = tokenizers.Tokenizer(tokenizers.models.BPE())
    engine.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    engine.train_from_iterator(texts, trainer)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=cache, delete=False, encoding="utf-8") as file:
            file.write(engine.to_str())
        Path(file.name).replace(path)
    except OSError as failure:
        raise LabError(f"{cache}: {failure.strerror}") from failure
    return Words(engine, str(path))


def from_folder(folder: Path) -> Words:
    """The tokenizer of a local pretrained folder.

    Raises:
        DataError: There is none.
    """
    import tokenizers

    path = folder / "tokenizer.json"
    try:
        return Words(tokenizers.Tokenizer.from_file(str(path)), str(path))
    except DataError:
        raise
    except Exception as failure:  # the package raises nothing more precise
        raise DataError(str(path), expected="a tokenizer", found=str(failure)) from failure
