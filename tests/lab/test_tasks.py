"""The data of each task: what is read, what is embedded, and what is refused by file and line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import asymcheck_lab.tokens
from asymcheck_lab.errors import DataError, UsageError
from asymcheck_lab.families import make_config
from asymcheck_lab.images import digits, read_folder
from asymcheck_lab.presets import load_preset
from asymcheck_lab.squad import Spans, embedded_questions, read_squad
from asymcheck_lab.tasks import open_data
from asymcheck_lab.texts import IGNORED, Windows, read_corpus
from asymcheck_lab.tokens import SPECIAL, Bytes, Words, trained

RNG = np.random.default_rng(0)

WIKI = """
 = First article =

 It cost 3 @,@ 000 and was well @-@ known .

 = = A section = =

 More of it .
 = Second =
 Text .
"""


def written(tmp_path: Path, text: str, name: str = "data") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Words:
    corpus = read_corpus()
    texts = [article.text for article in corpus.articles]
    return trained(texts, 600, corpus.sha256, tmp_path_factory.mktemp("cache"))


def test_wikitext_becomes_articles_with_its_signs_put_back(tmp_path: Path):
    found = read_corpus(written(tmp_path, WIKI)).articles
    assert [(a.title, a.text) for a in found] == [
        ("First article", "It cost 3,000 and was well-known .\nA section\nMore of it ."),
        ("Second", "Text ."),
    ]


def test_any_other_text_is_one_article(tmp_path: Path):
    (article,) = read_corpus(written(tmp_path, " = b\n\nc\n")).articles
    assert (article.title, article.text) == ("", " = b\n\nc")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (" = A =\n x\n = = B =\n", "line 3: expected a heading with as many equals signs after"),
        (" = A =\n x\n = = =\n", "line 3: expected a heading with as many equals signs after"),
        (" = A =\n\n = B =\n", "line 3: expected text below a heading, found headings only"),
        ("\n \n", "line 2: expected text, found only blank lines"),
        ("", "expected UTF-8 text, found an empty file"),
    ],
)
def test_a_broken_text_is_told_by_file_and_line(tmp_path: Path, text: str, said: str):
    with pytest.raises(DataError, match=said) as failure:
        read_corpus(written(tmp_path, text, "wiki.train.tokens"))
    assert "wiki.train.tokens" in str(failure.value)


def test_any_text_can_be_written_in_the_tokens_and_read_back(words: Words):
    for text in ("def f():\n    return 1\n", "naïve ☃ 漢字", "  "):
        ids, offsets = words.spans(text)
        assert words.engine.decode(ids) == text
        assert offsets[-1][1] == len(text)
    assert [words.engine.token_to_id(s) for s in SPECIAL] == [0, 1, 2, 3, 4]
    assert words.size == 600


def test_tokens_are_trained_once_and_a_damaged_cache_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    texts = ["to be or not to be", "that is the question"]
    first = trained(texts, 300, "sha", tmp_path)
    (path,) = tmp_path.iterdir()
    content = path.read_text()
    assert trained(["other texts"], 300, "sha", tmp_path).engine.to_str() == first.engine.to_str()
    path.write_text(content[: len(content) // 2])
    assert trained(texts, 300, "sha", tmp_path).engine.to_str() == first.engine.to_str()
    assert path.read_text() == content
    trained(texts, 301, "sha", tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_windows_labels_are_its_own_tokens_where_the_next_one_is_asked_for(words: Words):
    windows = Windows(read_corpus(), words, context=16, masked=False)
    sample = windows.sample(3, RNG)
    assert sample["input_ids"].shape == (16,)
    assert (sample["input_ids"] == sample["labels"]).all()
    assert (
        words.separator
        in Windows(read_corpus(), words, context=10**5, masked=False).sample(0, RNG)["input_ids"]
    ), "between two articles"


def test_of_hidden_tokens_most_are_masked_and_only_they_count(words: Words):
    windows = Windows(read_corpus(), words, context=102, masked=True)
    hidden = masked = kept = 0
    for n in range(200):
        sample = windows.sample(n, np.random.default_rng([1, n]))
        plain = windows._rows[n].astype(np.int64)
        ids, labels = sample["input_ids"][1:-1], sample["labels"][1:-1]
        chosen = labels != IGNORED
        assert sample["input_ids"][0] == words.begin
        assert sample["input_ids"][-1] == words.separator
        assert (labels[chosen] == plain[chosen]).all()
        assert (ids[~chosen] == plain[~chosen]).all()
        hidden += chosen.sum()
        masked += (ids[chosen] == words.mask).sum()
        kept += (ids[chosen] == plain[chosen]).sum()
    assert hidden == 200 * 15
    assert masked / hidden == pytest.approx(0.8, abs=0.05)
    assert kept / hidden == pytest.approx(0.1, abs=0.03)
    again = windows.sample(5, np.random.default_rng(9))["input_ids"]
    assert (again == windows.sample(5, np.random.default_rng(9))["input_ids"]).all()
    assert (again != windows.sample(5, np.random.default_rng(8))["input_ids"]).any()


def test_the_embedded_questions_have_true_answers_and_do_not_tell_them():
    questions = embedded_questions(read_corpus())
    assert len(questions) > 300
    for q in questions:
        assert q.context[q.start : q.start + len(q.answer)] == q.answer
        assert "____" in q.question
        assert q.answer not in q.question
    assert len({q.context for q in questions}) > 250


def test_the_window_that_holds_the_answer_points_at_it_and_the_others_at_the_begin(words: Words):
    questions = embedded_questions(read_corpus())[:60]
    spans = Spans("q", questions, words, context=64, stride=16)
    assert len(spans) > len(questions), "some texts need more than one window"
    pointed = set()
    for n in range(len(spans)):
        sample = spans.sample(n, RNG)
        start, end = int(sample["start_positions"]), int(sample["end_positions"])
        assert 0 <= start <= end < 64
        length = int(sample["attention_mask"].sum())
        assert (sample["input_ids"][length:] == words.pad).all()
        if (start, end) != (0, 0):
            assert sample["token_type_ids"][start : end + 1].all()
            pointed.add(words.engine.decode(sample["input_ids"][start : end + 1].tolist()))
    assert all(any(q.answer in text for text in pointed) for q in questions)


def squad(**changes) -> dict:
    answer = {"answer_start": 4, "text": "cat"}
    qa = {"id": "1", "question": "Who sat?", "answers": [answer], **changes}
    return {"version": "1.1", "data": [{"title": "T", "paragraphs": [
        {"context": "The cat sat on the mat.", "qas": [qa]}]}]}  # fmt: skip


def test_squad_is_read_with_the_first_answer_of_each_question(tmp_path: Path):
    (question,) = read_squad(written(tmp_path, json.dumps(squad())))
    assert (question.question, question.start, question.answer) == ("Who sat?", 4, "cat")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", r"squad.json, line 1, column 2: expected JSON"),
        ('{\n "data": [],\n}', r"line 2|line 3"),
        ("[]", r"line 1, : expected an object, found list"),
        ('{"data": 3}', r"line 1, data: expected a list, found 3"),
        ('{"data": []}', r"line 1: expected at least one question, found none"),
        (squad(question=7), r"data\[0\]\.paragraphs\[0\]\.qas\[0\]\.question: expected a str"),
        (squad(answers=[]), r"line 12, .*answers: expected an answer, as SQuAD v1.1 has"),
        (
            squad(answers=[{"answer_start": 5, "text": "cat"}]),
            r"line 12, .*answers\[0\]: expected 'cat' at character 5, found 'at '",
        ),
        (squad(answers=[{"answer_start": -1, "text": "c"}]), "expected 'c' at character -1"),
        (squad(answers=[{"text": "cat"}]), "answer_start: expected a int, found nothing"),
    ],
)
def test_a_broken_squad_file_is_told_by_line_and_place(tmp_path: Path, content, said: str):
    text = content if isinstance(content, str) else json.dumps(content, indent=1)
    with pytest.raises(DataError, match=said):
        read_squad(written(tmp_path, text, "squad.json"))


def test_squad_trains_with_what_is_asked_of_one_text_kept_together(tmp_path: Path):
    file = squad()
    paragraph = file["data"][0]["paragraphs"][0]
    file["data"][0]["paragraphs"] = [
        {"context": f"{paragraph['context']} {n}", "qas": paragraph["qas"] * 2} for n in range(40)
    ]
    preset = load_preset("bert", "tiny")
    data = open_data(preset, "span-qa", written(tmp_path, json.dumps(file)), cache=tmp_path / "c")
    assert (len(data.train), len(data.held)) == (76, 4)


def picture(path: Path, grey: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (10, 12), grey).save(path)


def test_a_folder_of_classes_is_read_by_their_names(tmp_path: Path):
    for grey, name in ((0, "black"), (255, "white")):
        for n in range(20):
            picture(tmp_path / name / f"{n:02}.png", grey)
    train, held = read_folder(tmp_path, size=8, channels=3, classes=5)
    assert (len(train), len(held)) == (38, 2)
    samples = [train.sample(n, RNG) for n in range(38)]
    assert {(int(s["labels"]), float(s["pixel_values"].mean())) for s in samples} == {
        (0, -1.0),
        (1, 1.0),
    }
    assert samples[0]["pixel_values"].shape == (3, 8, 8)


def test_train_and_val_are_taken_as_they_are(tmp_path: Path):
    for part, count in (("train", 3), ("val", 2)):
        for n in range(count):
            picture(tmp_path / part / "a" / f"{n}.png", n)
    train, held = read_folder(tmp_path, size=8, channels=1, classes=1)
    assert (len(train), len(held)) == (3, 2)
    picture(tmp_path / "val" / "b" / "0.png", 0)
    with pytest.raises(DataError, match=r"expected the same classes in train and val"):
        read_folder(tmp_path, size=8, channels=1, classes=9)


def test_a_folder_that_has_no_classes_or_images_is_refused(tmp_path: Path):
    def refused(said: str, classes: int = 5) -> None:
        with pytest.raises(DataError, match=said):
            read_folder(tmp_path / "images", size=8, channels=1, classes=classes)

    refused("expected a folder with a folder for each class, found nothing")
    picture(tmp_path / "images" / "one.png", 3)
    refused("images: expected a folder for each class, .* found 1 files and no folder")
    (tmp_path / "images" / "cat").mkdir()
    refused("cat: expected images of this class")
    picture(tmp_path / "images" / "cat" / "1.png", 3)
    picture(tmp_path / "images" / "dog" / "1.png", 3)
    refused("expected at most 1 classes, which the model has, found 2 folders", classes=1)


def test_a_file_that_is_no_image_is_named_when_it_is_read(tmp_path: Path):
    (tmp_path / "cat").mkdir()
    written(tmp_path / "cat", "not an image", "1.png")
    train, _ = read_folder(tmp_path, size=8, channels=1, classes=5)
    with pytest.raises(DataError, match=r"1.png: expected an image"):
        train.sample(0, RNG)


def test_the_embedded_digits_are_shifted_to_train_and_never_to_evaluate():
    train, held = digits(size=16, channels=1, classes=10)
    assert len(train) + len(held) == 1797
    one = [train.sample(0, np.random.default_rng(n))["pixel_values"] for n in range(5)]
    assert any((a != one[0]).any() for a in one)
    still = [held.sample(0, np.random.default_rng(n))["pixel_values"] for n in range(5)]
    assert all((a == still[0]).all() for a in still)
    assert still[0].min() >= -1
    assert still[0].max() <= 1


def test_a_preset_that_does_not_fit_its_task_is_refused(tmp_path: Path):
    bert, vit = load_preset("bert", "tiny"), load_preset("vit", "tiny")
    bytes_only = replace(bert, data=replace(bert.data, vocabulary=0))
    for task in ("span-qa", "masked-lm"):
        with pytest.raises(UsageError, match=f"expected vocabulary in .* which {task} needs"):
            open_data(bytes_only, task, cache=tmp_path)
    with pytest.raises(UsageError, match="expected image_size"):
        open_data(replace(vit, data=replace(vit.data, image_size=0)), "image-classification")
    with pytest.raises(UsageError, match="expected context of at least 4"):
        open_data(replace(bert, data=replace(bert.data, context=0)), "span-qa")
    small = replace(bert, config={**bert.config, "vocab_size": 500})
    with pytest.raises(DataError, match="expected at most 500 tokens, which the model has"):
        open_data(small, "span-qa", cache=tmp_path)
    assert Bytes().join(["a", "b"]).tobytes() == b"a\n\nb"


def test_the_tokenizer_of_a_pretrained_folder_is_taken(tmp_path: Path, words: Words):
    preset = load_preset("roberta", "tiny")
    with pytest.raises(DataError, match=r"tokenizer.json: expected a tokenizer"):
        open_data(preset, "masked-lm", pretrained=tmp_path)
    words.engine.save(str(tmp_path / "tokenizer.json"))
    make_config(preset).save_pretrained(tmp_path)
    assert open_data(preset, "masked-lm", pretrained=tmp_path).vocabulary == 600


def test_the_cache_is_the_users_and_can_be_moved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert asymcheck_lab.tokens.cache_folder() == tmp_path / "asymlab"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert asymcheck_lab.tokens.cache_folder() == tmp_path / ".cache" / "asymlab"
