"""Real text without a download, and a loader that knows where it is.

The vocabulary is bytes: 256 tokens, token ``n`` is byte ``n`` of the UTF-8 text. Nothing has
to be trained or fetched for it, any text fits, and no token is ever unknown.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from asymcheck_lab.errors import DataError, LabError

VOCABULARY = 256
"""Number of tokens: one for each byte."""

PYTHON_TOPICS = "pydoc_data.topics"
"""Name of the default text: the language reference that ships with Python, about 0.5 MB."""


@dataclass(frozen=True)
class Text:
    """A text as tokens.

    Attributes:
        name: Where it is from; for messages.
        tokens: One byte each.
        sha256: Of the bytes; a resumed run must read the same text.
    """

    name: str
    tokens: npt.NDArray[np.uint8]
    sha256: str


def load_text(path: Path | None = None) -> Text:
    """Read a UTF-8 file, or the text that ships with Python.

    Args:
        path: The file; ``None`` for the help topics of Python itself.

    Raises:
        DataError: The file is missing, not readable, empty or not UTF-8.
    """
    if path is None:
        return _text(PYTHON_TOPICS, _python_topics())
    try:
        data = path.read_bytes()
    except OSError as failure:
        raise DataError(
            str(path), expected="a readable text file", found=failure.strerror or str(failure)
        ) from failure
    if not data:
        raise DataError(str(path), expected="UTF-8 text", found="an empty file")
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as bad:
        line = data.count(b"\n", 0, bad.start) + 1
        raise DataError(
            f"{path}, line {line}, byte {bad.start}",
            expected="UTF-8 text",
            found=f"byte 0x{data[bad.start]:02x} ({bad.reason})",
        ) from None
    return _text(str(path), data)


def _text(name: str, data: bytes) -> Text:
    return Text(name, np.frombuffer(data, np.uint8), hashlib.sha256(data).hexdigest())


def _python_topics() -> bytes:
    from pydoc_data.topics import topics

    return "\n".join(f"{name}\n\n{topics[name]}" for name in sorted(topics)).encode("utf-8")


class BatchLoader:
    """Batches of windows of a text, in a new shuffled order each epoch, without end.

    The text is cut into windows of ``context`` bytes that do not overlap; the last, shorter
    one is left out. The order of an epoch is a pure function of seed and epoch, and takes
    nothing from any global random number generator. What is too little for a whole batch at
    the end of an epoch is left out of that epoch.

    The position is a number, so resuming costs one permutation wherever it is.

    Args:
        text: What to read.
        context: Tokens of a window.
        batch: Windows of a batch.
        seed: Chooses the orders, from 0 on.

    Attributes:
        epoch: Epoch of the batch that comes next, unless this one has no further batch.
        position: Windows of this epoch that were given out.
        windows: Windows of an epoch.

    Raises:
        DataError: The text is too short for one batch.
    """

    def __init__(self, text: Text, *, context: int, batch: int, seed: int) -> None:
        self.windows = len(text.tokens) // context
        if self.windows < batch:
            raise DataError(
                text.name,
                expected=f"at least {batch * context} bytes, for one batch of {batch} windows of "
                f"{context}",
                found=f"{len(text.tokens)} bytes",
            )
        self._text = text
        self._context = context
        self._batch = batch
        self._seed = seed
        self._order: npt.NDArray[np.int64] | None = None
        self.epoch = 0
        self.position = 0

    def __iter__(self) -> Iterator[npt.NDArray[np.int64]]:
        return self

    def __next__(self) -> npt.NDArray[np.int64]:
        """The next batch, ``[batch, context]`` tokens; the caller owns it."""
        if self.position + self._batch > self.windows:
            self.epoch += 1
            self.position = 0
            self._order = None
        if self._order is None:
            self._order = self._shuffled(self.epoch)
        chosen = self._order[self.position : self.position + self._batch]
        self.position += self._batch
        used = self._text.tokens[: self.windows * self._context]
        return used.reshape(self.windows, self._context)[chosen].astype(np.int64)

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is: what the next batch depends on."""
        return {
            "seed": self._seed,
            "epoch": self.epoch,
            "position": self.position,
            "context": self._context,
            "text": self._text.sha256,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go where ``state`` says; the seed is taken from there too.

        Raises:
            LabError: It was saved with another text or window; nothing was changed.
        """
        here = self.state_dict()
        for key, what in (("text", "the text with sha256"), ("context", "a context of")):
            if state[key] != here[key]:
                raise LabError(
                    f"{self._text.name}: this run was started with {what} {state[key]}, found "
                    f"{here[key]}: resume with the same data, or start a new run"
                )
        self._seed = int(state["seed"])
        self.epoch = int(state["epoch"])
        self.position = int(state["position"])
        self._order = None

    def _shuffled(self, epoch: int) -> npt.NDArray[np.int64]:
        order = np.random.default_rng([self._seed, epoch]).permutation(self.windows)
        return order.astype(np.int64, copy=False)
