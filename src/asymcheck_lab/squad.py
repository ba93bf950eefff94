"""Questions whose answer is a span of a text: SQuAD v1.1 files, and a set out of Python's own.

A question and its text become windows ``[CLS] question [SEP] text [SEP]``. A text that is too
long becomes several, which overlap; in one that does not hold the answer, both ends point to
the first token (Devlin et al. 2019, BERT, section 4.2 and appendix).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from asymcheck_lab.data import load_text
from asymcheck_lab.errors import DataError
from asymcheck_lab.loading import Sample
from asymcheck_lab.texts import Corpus
from asymcheck_lab.tokens import Words

_QUOTED = re.compile(r'"([A-Za-z_][A-Za-z_0-9.]{2,30})"')
_SENTENCE = re.compile(r"[^.?!]*(?:[.?!](?!\s|\Z)[^.?!]*)*[.?!](?=\s|\Z)")
_HALF_OF_A_PAIR = re.compile(r"[\ud800-\udfff]")
_GAP = "____"
_PARAGRAPH = range(120, 700)
_QUESTION_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Question:
    """A question and one true answer.

    Attributes:
        context: The text that holds the answer.
        question: What is asked.
        start: Character of the context at which the answer begins.
        answer: The answer, word for word as it stands there.
    """

    context: str
    question: str
    start: int
    answer: str


def embedded_questions(corpus: Corpus) -> list[Question]:
    """Which name fills the gap? One question for each paragraph that quotes a name once.

    The question is the sentence with the name left out; the answer is the name where it
    stands in the paragraph, so that every span is true.
    """
    found = []
    for article in corpus.articles:
        for raw in re.split(r"\n\s*\n", article.text):
            context = " ".join(raw.split())
            if len(context) not in _PARAGRAPH:
                continue
            for name in _QUOTED.finditer(context):
                sentence = next(
                    (s for s in _SENTENCE.finditer(context) if s.start() <= name.start() < s.end()),
                    None,
                )
                if sentence is None or context.count(name[1]) != 1:
                    continue
                said = sentence[0]
                at = name.start(1) - sentence.start()
                asked = (said[:at] + _GAP + said[at + len(name[1]) :]).strip()
                found.append(Question(context, asked, name.start(1), name[1]))
                break
    return found


def read_squad(path: Path) -> list[Question]:
    """Every question of a SQuAD v1.1 file, with the first of its answers.

    Raises:
        DataError: It cannot be read, is no such file, or an answer does not stand where it
            says; names file, line and place.
    """
    text = bytes(load_text(path).tokens).decode("utf-8")
    try:
        root = json.loads(text)
    except json.JSONDecodeError as bad:
        raise DataError(
            f"{path}, line {bad.lineno}, column {bad.colno}", expected="JSON", found=bad.msg
        ) from None
    except (ValueError, RecursionError) as bad:  # a number of thousands of digits, or a deep nest
        raise DataError(
            f"{path}, line 1", expected="JSON of a SQuAD file", found=str(bad)
        ) from None
    found = list(_Reader(path, text).questions(root))
    if not found:
        raise DataError(f"{path}, line 1", expected="at least one question", found="none")
    return found


@dataclass
class _Reader:
    """Walks through a parsed file and knows the line of the last thing that it has seen."""

    path: Path
    text: str
    at: int = 0

    def questions(self, root: object) -> Iterator[Question]:
        for n, article in enumerate(self._list(root, "data", "")):
            paragraphs = self._list(article, "paragraphs", f"data[{n}].")
            for m, paragraph in enumerate(paragraphs):
                where = f"data[{n}].paragraphs[{m}]."
                context = self._get(paragraph, "context", str, where)
                for k, asked in enumerate(self._list(paragraph, "qas", where)):
                    yield self._question(context, asked, f"{where}qas[{k}].")

    def _question(self, context: str, asked: object, where: str) -> Question:
        question = self._get(asked, "question", str, where)
        self.at = max(self.text.find(json.dumps(question, ensure_ascii=False), self.at), self.at)
        answers = self._list(asked, "answers", where)
        if not answers:
            self._wrong(f"{where}answers", "an answer, as SQuAD v1.1 has", "none")
        start = self._get(answers[0], "answer_start", int, f"{where}answers[0].")
        answer = self._get(answers[0], "text", str, f"{where}answers[0].")
        there = context[max(start, 0) : max(start, 0) + len(answer)]
        if not answer or start < 0 or there != answer:
            self._wrong(f"{where}answers[0]", f"{answer!r} at character {start}", repr(there))
        return Question(context, question, start, answer)

    def _list(self, parent: object, key: str, where: str) -> list[Any]:
        found: list[Any] = self._get(parent, key, list, where)
        return found

    def _get(self, parent: object, key: str, kind: type, where: str) -> Any:  # noqa: ANN401
        if not isinstance(parent, dict):
            self._wrong(where.rstrip("."), "an object", type(parent).__name__)
        value = parent.get(key)  # type: ignore[attr-defined]
        if type(value) is not kind:
            found = "nothing" if value is None else f"{value!r:.60}"
            self._wrong(f"{where}{key}", f"a {kind.__name__}", found)
        if kind is str and not value.isascii() and _HALF_OF_A_PAIR.search(value):
            self._wrong(f"{where}{key}", "text in Unicode", f"{value!r:.60}")
        return value

    def _wrong(self, where: str, expected: str, found: str) -> None:
        line = self.text.count("\n", 0, self.at) + 1
        raise DataError(f"{self.path}, line {line}, {where}", expected=expected, found=found)


class Spans:
    """Questions as windows of tokens with the ends of the answer.

    Windows of a text must go on by a token at least: ``stride`` is less than ``room_in(context)``.

    Args:
        name: Where they are from; for messages.
        questions: At least one.
        tokens: The tokenizer.
        context: Tokens of a window.
        stride: Tokens that two windows of one text share.

    Raises:
        DataError: The tokenizer leaves nothing of an answer.
    """

    def __init__(
        self, name: str, questions: Sequence[Question], tokens: Words, *, context: int, stride: int
    ) -> None:
        self.name = name
        self._tokens = tokens
        self._context = context
        self._rows: list[tuple[list[int], list[int], int, int]] = []
        for question in questions:
            try:
                self._rows += _windows(question, tokens, context, stride)
            except IndexError:
                raise DataError(
                    name,
                    expected="answers of which the tokenizer leaves something",
                    found=repr(question.answer),
                ) from None
        self.sha256 = hashlib.sha256(repr(self._rows).encode()).hexdigest()

    def __len__(self) -> int:
        return len(self._rows)

    def sample(self, index: int, rng: np.random.Generator) -> Sample:
        """See ``Samples``; nothing in it is random."""
        del rng
        asked, text, start, end = self._rows[index]
        tokens = self._tokens
        ids = [tokens.begin, *asked, tokens.separator, *text, tokens.separator]
        filled = np.full(self._context, tokens.pad, np.int64)
        filled[: len(ids)] = ids
        places = np.arange(self._context)
        inside = places < len(ids)
        return {
            "input_ids": filled,
            "attention_mask": inside.astype(np.int64),
            "token_type_ids": (inside & (places >= len(asked) + 2)).astype(np.int64),
            "start_positions": np.array(start, np.int64),
            "end_positions": np.array(end, np.int64),
        }


def room_in(context: int) -> int:
    """Tokens of a text that fit into a window of ``context`` with the longest question."""
    return context - min(_QUESTION_TOKENS, context // 2) - 3


def _windows(
    question: Question, tokens: Words, context: int, stride: int
) -> Iterator[tuple[list[int], list[int], int, int]]:
    asked = tokens.spans(question.question)[0][: min(_QUESTION_TOKENS, context // 2)]
    ids, offsets = tokens.spans(question.context)
    stop = question.start + len(question.answer)
    within = [n for n, (a, b) in enumerate(offsets) if a < stop and b > question.start]
    room = context - len(asked) - 3
    step = max(1, room - stride)
    for begin in range(0, max(1, len(ids) - stride), step):
        part = ids[begin : begin + room]
        first, last = within[0] - begin, within[-1] - begin
        inside = first >= 0 and last < len(part)
        shift = len(asked) + 2
        yield asked, part, (first + shift) * inside, (last + shift) * inside
