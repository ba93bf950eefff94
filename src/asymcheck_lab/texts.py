"""Text as articles, and articles as windows of tokens.

WikiText's format is read as it is published: a line `` = Title = `` begins an article, more
equals signs are sections, and ``@-@``, ``@,@``, ``@.@`` stand for the sign between two words.
Any other UTF-8 file is one article.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from asymcheck_lab.data import load_text
from asymcheck_lab.errors import DataError
from asymcheck_lab.loading import Sample
from asymcheck_lab.tokens import Tokens

_HEADING = re.compile(r"=.* =\Z")
_JOINED = re.compile(r" @([-,.])@ ")

_MASKED_SHARE = 0.15
_AS_MASK, _AS_RANDOM = 0.8, 0.1
IGNORED = -100
"""The label of a token that the loss does not count."""


@dataclass(frozen=True, slots=True)
class Article:
    """A text with a title.

    Attributes:
        title: Empty where it has none.
        text: Its paragraphs, with line ends between them.
    """

    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Corpus:
    """Articles out of one place.

    Attributes:
        name: Where they are from; for messages.
        articles: At least one.
        sha256: Of the bytes.
    """

    name: str
    articles: Sequence[Article]
    sha256: str


def read_corpus(path: Path | None = None) -> Corpus:
    """Read a UTF-8 file, WikiText or plain, or the language reference that ships with Python.

    Raises:
        DataError: It is missing, empty or not UTF-8, or a heading is broken.
    """
    text = load_text(path)
    if path is None:
        from pydoc_data.topics import topics

        articles = [Article(title, topics[title].strip()) for title in sorted(topics)]
        return Corpus(text.name, [a for a in articles if a.text], text.sha256)
    lines = bytes(text.tokens).decode("utf-8").splitlines()
    first = next((n for n, line in enumerate(lines) if line.strip()), None)
    if first is None:
        raise DataError(f"{path}, line {len(lines)}", expected="text", found="only blank lines")
    if not _HEADING.match(lines[first].strip()) or not lines[first].startswith(" = "):
        return Corpus(text.name, [Article("", "\n".join(lines))], text.sha256)
    return Corpus(text.name, _articles(path, lines), text.sha256)


def _articles(path: Path, lines: list[str]) -> list[Article]:
    found: list[tuple[str, list[str]]] = []
    for number, raw in enumerate(lines, start=1):
        line = raw.strip()
        if _HEADING.match(line):
            words = line.split()
            before = len(list(takewhile("=".__eq__, words)))
            after = len(list(takewhile("=".__eq__, reversed(words))))
            if before != after or 2 * before >= len(words):
                raise DataError(
                    f"{path}, line {number}",
                    expected="a heading with as many equals signs after it as before, as in "
                    "' = Title = '",
                    found=repr(raw[:80]),
                )
            line = " ".join(words[before:-after])
            if before == 1:
                found.append((line, []))
                continue
        if line:
            found[-1][1].append(_JOINED.sub(r"\1", line))
    articles = [Article(title, "\n".join(body)) for title, body in found if body]
    if not articles:
        raise DataError(
            f"{path}, line {len(lines)}", expected="text below a heading", found="headings only"
        )
    return articles


class Windows:
    """A corpus as windows of tokens that do not overlap; a shorter last one is left out.

    Args:
        corpus: What to read; its articles are joined with the separator.
        tokens: The tokenizer.
        context: Tokens of a window.
        masked: Whether to hide tokens, for a model that guesses them; else every token is to
            be predicted from those before it.

    Raises:
        DataError: The text is too short for one window.
    """

    def __init__(self, corpus: Corpus, tokens: Tokens, *, context: int, masked: bool) -> None:
        ids = tokens.join([article.text for article in corpus.articles])
        self._inner = context - 2 if masked else context
        count = len(ids) // self._inner
        if count == 0:
            raise DataError(
                corpus.name,
                expected=f"at least {self._inner} tokens, for one window",
                found=f"{len(ids)}",
            )
        self.name = corpus.name
        self._rows = ids[: count * self._inner].reshape(count, self._inner)
        self._tokens = tokens
        self._masked = masked
        self.sha256 = hashlib.sha256(np.ascontiguousarray(self._rows).tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self._rows)

    def sample(self, index: int, rng: np.random.Generator) -> Sample:
        """See ``Samples``; masks are drawn anew in each epoch."""
        row = self._rows[index].astype(np.int64)
        if not self._masked:
            return {"input_ids": row, "labels": row}
        return hide(row, self._tokens, rng)


def hide(row: npt.NDArray[np.int64], tokens: Tokens, rng: np.random.Generator) -> Sample:
    """A window between begin and separator, with tokens hidden that are to be guessed.

    15 % of them: of these four in five become the mask, one in ten another token, and one in
    ten stays as it is (Devlin et al. 2019, BERT, section 3.1); drawn each time a window is
    read (Liu et al. 2019, RoBERTa, section 4.1). At least one is hidden.
    """
    hidden = rng.permutation(len(row))[: max(1, round(_MASKED_SHARE * len(row)))]
    labels = np.full(len(row) + 2, IGNORED, np.int64)
    labels[hidden + 1] = row[hidden]
    kind = rng.random(len(hidden))
    masks, others = hidden[kind < _AS_MASK], hidden[kind >= 1 - _AS_RANDOM]
    changed = row.copy()
    changed[masks] = tokens.mask
    changed[others] = rng.integers(0, tokens.size, len(others))
    return {
        "input_ids": np.concatenate([[tokens.begin], changed, [tokens.separator]]),
        "labels": labels,
    }
