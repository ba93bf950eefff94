"""What a model is trained on for a task: the data, split, as samples."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from asymcheck_lab.errors import DataError, UsageError
from asymcheck_lab.families import make_config
from asymcheck_lab.images import digits, read_folder
from asymcheck_lab.loading import Samples, held_out
from asymcheck_lab.presets import Preset
from asymcheck_lab.squad import Question, Spans, embedded_questions, read_squad, room_in
from asymcheck_lab.texts import Article, Corpus, Windows, read_corpus
from asymcheck_lab.tokens import Bytes, Words, cache_folder, from_folder, trained

_HELD_EVERY = 20


@dataclass(frozen=True, slots=True)
class Data:
    """What there is to train on.

    Attributes:
        train: To train on.
        held: For evaluation; no sample of it is trained on.
        vocabulary: Tokens that samples may have; 0 for images.
    """

    train: Samples
    held: Samples
    vocabulary: int


def open_data(
    preset: Preset,
    task: str,
    path: Path | None = None,
    *,
    pretrained: Path | None = None,
    cache: Path | None = None,
) -> Data:
    """The data of a task, as samples that fit the preset.

    Args:
        preset: Says how large samples are.
        task: One of the model's tasks.
        path: Text, a SQuAD file or a folder of images; ``None`` for what is embedded.
        pretrained: A local folder whose tokenizer is taken.
        cache: Where trained tokenizers lie; ``None`` for ``cache_folder()``.

    Raises:
        DataError: The data cannot be used; names file and line.
        UsageError: The preset does not fit the task.
    """
    data = preset.data
    if preset.recipe.noise and task != "causal-lm":
        raise UsageError(
            f"{preset.name}: expected no noise in [recipe] for {task}, found {preset.recipe.noise}"
        )
    if task == "image-classification":
        if data.image_size == 0:
            raise UsageError(f"{preset.name}: expected image_size in [data], found none")
        options: dict[str, int] = {
            "size": data.image_size,
            "channels": data.channels,
            "classes": int(make_config(preset, pretrained).num_labels),
        }
        return Data(*(digits(**options) if path is None else read_folder(path, **options)), 0)
    if data.context < 4:
        raise UsageError(
            f"{preset.name}: expected context of at least 4 tokens in [data], found {data.context}"
        )
    if task == "span-qa":
        return _questions(preset, path, pretrained, cache or cache_folder())
    corpus = read_corpus(path)
    tokens = _tokens(preset, task, corpus, pretrained, cache or cache_folder())
    windows = Windows(corpus, tokens, context=data.context, masked=task == "masked-lm")
    return Data(*held_out(windows), tokens.size)


def _questions(preset: Preset, path: Path | None, pretrained: Path | None, cache: Path) -> Data:
    if path is None:
        corpus = read_corpus()
        questions = embedded_questions(corpus)
        name, known = f"questions on {corpus.name}", corpus
    else:
        questions = read_squad(path)
        name, known = str(path), _corpus_of(path, questions)
    tokens = _tokens(preset, "span-qa", known, pretrained, cache)
    if isinstance(tokens, Bytes):
        raise UsageError(f"{preset.name}: expected vocabulary in [data], which span-qa needs")
    context, stride = preset.data.context, preset.data.stride
    room = room_in(context)
    if stride >= room:
        raise UsageError(
            f"{preset.name}: expected a stride in [data] of less than the {room} tokens that a "
            f"context of {context} leaves for the text, found {stride}"
        )
    numbers = {text: n for n, text in enumerate(dict.fromkeys(q.context for q in questions))}
    parts: tuple[list[Question], list[Question]] = ([], [])
    for question in questions:  # all that is asked of one text stays together
        parts[numbers[question.context] % _HELD_EVERY == _HELD_EVERY - 1].append(question)
    train, held = (Spans(name, part, tokens, context=context, stride=stride) for part in parts)
    return Data(train, held, tokens.size)


def _corpus_of(path: Path, questions: Sequence[Question]) -> Corpus:
    texts = list(dict.fromkeys(q.context for q in questions))
    # Of the texts, not of the file: the same file read as plain text is another corpus.
    sha256 = hashlib.sha256(repr(texts).encode()).hexdigest()
    return Corpus(str(path), [Article("", text) for text in texts], sha256)


def _tokens(
    preset: Preset, task: str, corpus: Corpus, pretrained: Path | None, cache: Path
) -> Bytes | Words:
    if pretrained is not None:
        tokens: Bytes | Words = from_folder(pretrained)
    elif preset.data.vocabulary:
        texts = [article.text for article in corpus.articles]
        tokens = trained(texts, preset.data.vocabulary, corpus.sha256, cache)
    elif task == "causal-lm":
        tokens = Bytes()
    else:
        raise UsageError(f"{preset.name}: expected vocabulary in [data], which {task} needs")
    room = int(make_config(preset, pretrained).vocab_size)
    if tokens.size > room:
        raise DataError(
            corpus.name,
            expected=f"at most {room} tokens, which the model has",
            found=str(tokens.size),
        )
    return tokens
