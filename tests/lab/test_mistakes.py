"""Presets, data and weights of one's own that do not go together: told before a step is made."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from asymcheck_lab import sizes
from asymcheck_lab.errors import DataError, LabError, RunError, UsageError
from asymcheck_lab.families import build
from asymcheck_lab.images import digits, read_folder
from asymcheck_lab.loading import Loader
from asymcheck_lab.presets import load_preset
from asymcheck_lab.recipe import Recipe
from asymcheck_lab.squad import Question, Spans, read_squad
from asymcheck_lab.tasks import open_data
from asymcheck_lab.texts import read_corpus
from asymcheck_lab.tokens import Words, trained
from asymcheck_lab.train import TrainOptions, train

RECIPE = "[recipe]\nbatch = 2\nlearning_rate = 1e-3\nwarmup_steps = 1\n"
GPT2 = """
[model]
vocab_size = 256
n_positions = 32
n_layer = 1
n_embd = 32
n_head = 2

[data]
context = 32
"""
BERT = """
[model]
vocab_size = 1024
num_hidden_layers = 1
hidden_size = 64
num_attention_heads = 2
intermediate_size = 64
max_position_embeddings = 64

[data]
vocabulary = 1024
context = 64
stride = 16
"""
RESNET = """
[model]
num_channels = 1
num_labels = 10
embedding_size = 16
hidden_sizes = [16, 32]
depths = [1, 1]
layer_type = "basic"

[data]
image_size = 16
channels = 1
"""
TEXTS = {"gpt2": GPT2, "bert": BERT, "roberta": BERT, "resnet": RESNET}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def own(folder: Path, text: str) -> str:
    path = folder / "own.toml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("batch = 0", "batch of at least 1, found 0"),
        ("batch = 1\naccumulate = 0", "accumulate of at least 1, found 0"),
        ("batch = 1\nclip_norm = 0", "clip_norm of at least 1e-09, found 0"),
        ("batch = 1\nnoise = 1.5", "noise of at least 0 and at most 1, found 1.5"),
        ("batch = 1\nweight_decay = nan", "weight_decay of at least 0, found nan"),
        ("batch = 1\n[data]\nchannels = 2", "channels: 1 for grey or 3 for colour, found 2"),
        ("batch = 1\n[data]\nchannels = 0", "channels of at least 1 and at most 3, found 0"),
    ],
)
def test_a_number_that_no_training_can_have_is_refused(tmp_path: Path, more: str, said: str):
    text = f"[recipe]\nlearning_rate = 1\nwarmup_steps = 1\n{more}\n"
    with pytest.raises(DataError, match=said):
        load_preset("bert", own(tmp_path, text))


def test_gradients_of_any_norm_may_be_let_be(tmp_path: Path):
    preset = load_preset("bert", own(tmp_path, RECIPE + "clip_norm = inf\n"))
    assert preset.recipe.clip_norm == float("inf")


@pytest.mark.parametrize(
    ("model", "change", "said"),
    [
        ("gpt2", ("n_head = 2", "n_head = 3"), "found ValueError"),
        ("gpt2", ("context = 32", "context = 33"), "context of at most 32 tokens"),
        ("bert", ("[data]", 'hidden_act = "gelo"\n[data]'), "found KeyError: 'gelo'"),
        ("bert", ("context = 64", "context = 65"), "context of at most 64 tokens"),
        ("roberta", ("context = 64", "context = 63"), "context of at most 62 tokens"),
        ("resnet", ("depths = [1, 1]", "depths = [1]"), "found RuntimeError"),
        ("resnet", ("channels = 1\n", "channels = 3\n"), "found ValueError"),
    ],
)
def test_options_that_do_not_go_together_are_told_before_anything_is_allocated(
    tmp_path: Path, model: str, change: tuple[str, str], said: str
):
    text = TEXTS[model].replace(*change)
    if model == "resnet" and "channels = 3" in text:
        text = text.replace("num_channels = 3", "num_channels = 1")
    assert text != TEXTS[model]
    options = TrainOptions(
        model=model, size=own(tmp_path, text + RECIPE), steps=1, log=tmp_path / "log"
    )
    with pytest.raises(UsageError, match=said) as failure:
        train(options)
    assert "own.toml" in str(failure.value)
    assert not (tmp_path / "log").exists()


def test_a_window_may_have_just_the_positions_that_there_are(tmp_path: Path):
    for model, most in (("gpt2", 32), ("bert", 64), ("roberta", 62)):
        text = TEXTS[model].replace("context = 64", f"context = {most}")
        preset = load_preset(model, own(tmp_path, text + RECIPE))
        assert sizes.measure(preset, "span-qa" if model == "bert" else "masked-lm"
                             if model == "roberta" else "causal-lm").parameters > 0  # fmt: skip


@pytest.mark.parametrize(
    ("model", "task"),
    [("bert", "span-qa"), ("bert", "masked-lm"), ("resnet", "image-classification")],
)
def test_noise_is_for_a_model_that_predicts_the_next_token(
    tmp_path: Path, cache: Path, model: str, task: str
):
    preset = load_preset(model, own(tmp_path, TEXTS[model] + RECIPE + "noise = 0.1\n"))
    with pytest.raises(UsageError, match=f"expected no noise in .* for {task}, found 0.1"):
        open_data(preset, task, cache=cache)


@pytest.mark.parametrize(("context", "stride"), [(4, 0), (64, 29), (64, 60)])
def test_windows_that_would_leave_out_the_end_of_a_text_are_refused(
    tmp_path: Path, cache: Path, context: int, stride: int
):
    text = BERT.replace("context = 64", f"context = {context}")
    text = text.replace("stride = 16", f"stride = {stride}")
    with pytest.raises(UsageError, match=f"expected a stride in .* found {stride}"):
        open_data(load_preset("bert", own(tmp_path, text + RECIPE)), "span-qa", cache=cache)


def test_every_token_of_a_text_is_in_a_window_with_the_widest_stride(cache: Path):
    corpus = read_corpus()
    words = trained([a.text for a in corpus.articles], 600, corpus.sha256, cache)
    text = corpus.articles[0].text
    question = Question(text, text[:300], len(text) - 5, text[-5:])
    spans = Spans("q", [question], words, context=64, stride=28)
    rng = np.random.default_rng(0)
    last = spans.sample(len(spans) - 1, rng)
    assert (int(last["start_positions"]), int(last["end_positions"])) != (0, 0)
    seen = [t for n in range(len(spans)) for t in spans._rows[n][1]]
    assert set(words.spans(text)[0]) == set(seen)


def test_more_classes_of_digits_than_the_model_has_are_refused():
    with pytest.raises(DataError, match="at most 3 classes, which the model has, found 10"):
        digits(size=16, channels=1, classes=3)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[" * 100_000, "line 1: expected JSON"),
        ('{"data": ' + "1" * 5000 + "}", "line 1: expected JSON"),
        ('{\n"data": "\xff"}', "line 2, byte 11: expected UTF-8 text, found byte 0xff"),
        (
            '{"data":[{"paragraphs":[{"context":"a \\ud800 cat","qas":[]}]}]}',
            r"data\[0\]\.paragraphs\[0\]\.context: expected text in Unicode",
        ),
    ],
)
def test_squad_files_that_no_reader_can_take_are_told(tmp_path: Path, content: str, said: str):
    path = tmp_path / "squad.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(DataError, match=said):
        read_squad(path)


def asked(text: str, answer: str) -> list[Question]:
    return [Question(text, "What?", text.index(answer), answer)]


def test_an_answer_of_which_a_tokenizer_leaves_nothing_is_named():
    import tokenizers

    engine = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(
            {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "[PAD]": 3, "[MASK]": 4}, unk_token="[UNK]"
        )
    )
    engine.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    with pytest.raises(DataError, match=r"q: expected answers .* leaves something, found ' '"):
        Spans("q", asked("a cat", " "), Words(engine, "here"), context=32, stride=8)


def test_a_tokenizer_that_cuts_off_and_fills_up_does_so_no_more(cache: Path):
    corpus = read_corpus()
    words = trained([a.text for a in corpus.articles], 600, corpus.sha256, cache)
    expected = words.join(["a cat sat on the mat", "so"]).tolist()
    words.engine.enable_truncation(3)
    words.engine.enable_padding()
    assert Words(words.engine, "here").join(["a cat sat on the mat", "so"]).tolist() == expected


def pictures(folder: Path, kind: str = "png") -> Path:
    for grey, name in ((10, "a"), (200, "b")):
        (folder / name).mkdir(parents=True)
        for n in range(3):
            Image.new("L", (9, 9), grey + n).save(folder / name / f"{n}.{kind}")
    return folder


def fingerprint_of(folder: Path, size: int = 8, channels: int = 1) -> str:
    return read_folder(folder, size=size, channels=channels, classes=5)[0].sha256


def test_an_image_that_changed_in_place_is_other_data_and_a_copy_is_not(tmp_path: Path):
    first, copy = pictures(tmp_path / "first", "bmp"), pictures(tmp_path / "copy", "bmp")
    before = fingerprint_of(first)
    assert fingerprint_of(copy) == before
    assert fingerprint_of(first, size=16) != before
    assert fingerprint_of(first, channels=3) != before
    path = first / "b" / "1.bmp"
    length = path.stat().st_size
    Image.new("L", (9, 9), 7).save(path)
    assert path.stat().st_size == length
    assert fingerprint_of(first) != before
    assert digits(size=8, channels=1, classes=10)[0].sha256 != (
        digits(size=16, channels=1, classes=10)[0].sha256
    )


def test_of_many_images_a_bounded_number_is_read_for_the_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder, opened, open_ = pictures(tmp_path / "images"), [], Path.open
    monkeypatch.setattr("asymcheck_lab.images._HASHED_FILES", 3)
    monkeypatch.setattr(
        Path, "open", lambda self, *args: opened.append(self.name) or open_(self, *args)
    )
    fingerprint_of(folder)
    assert opened == ["0.png", "2.png", "1.png"]


def test_images_that_cannot_be_read_are_named(tmp_path: Path):
    folder = pictures(tmp_path / "images")
    (folder / "a" / "lost.png").symlink_to(tmp_path / "nothing")
    with pytest.raises(DataError, match=r"lost.png: expected an image .* No such file"):
        fingerprint_of(folder)


def test_images_of_more_than_8_bits_are_refused_and_not_made_white(tmp_path: Path):
    folder = pictures(tmp_path / "images")
    deep = np.full((9, 9), 20_000, np.uint16)
    Image.fromarray(deep).save(folder / "a" / "0.png")
    train_part, _ = read_folder(folder, size=8, channels=1, classes=5)
    with pytest.raises(DataError, match=r"a/0.png: expected an image of 8 bits a channel"):
        train_part.sample(0, np.random.default_rng(0))


def test_a_folder_to_train_on_without_one_to_evaluate_is_not_a_class(tmp_path: Path):
    pictures(tmp_path / "train")
    pictures(tmp_path / "validation")
    with pytest.raises(DataError, match="expected val beside train"):
        fingerprint_of(tmp_path)
    vehicles = pictures(tmp_path / "vehicles")
    (vehicles / "a").rename(vehicles / "train")  # with images in it, this one is a class
    assert len(read_folder(vehicles, size=8, channels=1, classes=5)[0]) == 6


def saved(folder: Path, model: str, task: str, dtype: torch.dtype = torch.float32) -> Path:
    build(load_preset(model, "tiny"), task).to(dtype).save_pretrained(folder)
    return folder


def test_weights_saved_in_half_precision_are_trained_in_fp32(tmp_path: Path):
    folder = saved(tmp_path, "vit", "image-classification", torch.bfloat16)
    model = build(load_preset("vit", "tiny"), "image-classification", folder)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_weights_of_another_model_or_damaged_ones_are_refused(tmp_path: Path):
    folder = saved(tmp_path / "gpt2", "gpt2", "causal-lm")
    with pytest.raises(DataError, match="expected model_type 'bert', found 'gpt2'"):
        build(load_preset("bert", "tiny"), "span-qa", folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(DataError, match="expected weights of a GPT2LMHeadModel"):
        build(load_preset("gpt2", "tiny"), "causal-lm", folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(DataError, match=r"expected a folder with config.json"):
        build(load_preset("gpt2", "tiny"), "causal-lm", folder)


def test_a_folder_of_weights_is_measured_by_its_own_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = saved(tmp_path / "vit", "vit", "image-classification")
    tiny = sizes.measure(load_preset("vit", "tiny"), "image-classification").parameters
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = 40
    (folder / "config.json").write_text(json.dumps(config))
    preset = load_preset("vit", "tiny")
    measured = sizes.measure(preset, "image-classification", folder)
    assert measured.parameters > 10 * tiny
    monkeypatch.setattr(
        sizes, "host_bytes", lambda: sizes.needed_bytes(measured, checkpoints=False) - 1
    )
    log = tmp_path / "log"
    with pytest.raises(UsageError, match=r"vit tiny: image-classification with .* needs"):
        train(TrainOptions(model="vit", size="tiny", pretrained=folder, log=log))


def test_an_update_of_gradients_that_are_no_numbers_is_not_made_and_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    forward = Recipe.forward

    def spoilt(recipe: Recipe) -> float:
        value = forward(recipe)
        if recipe.scheduler.last_epoch == 2:
            next(recipe.model.parameters()).grad.view(-1)[0] = float("nan")
        return value

    monkeypatch.setattr(Recipe, "forward", spoilt)
    root = tmp_path / "checkpoints"
    options = TrainOptions(
        size="tiny", steps=5, every=1, threads=1, root=str(root), log=tmp_path / "log"
    )
    with pytest.raises(RunError, match="step 3: the norm of the gradients is nan"):
        train(options)
    assert sorted(p.name for p in root.glob("step-*")) == ["step-00000001", "step-00000002"]


class Failing:
    """Two samples; reading the second fails as long as it is told to."""

    name, sha256, bad = "failing", "sha", True

    def __len__(self) -> int:
        return 2

    def sample(self, index: int, rng: object) -> dict:
        if self.bad and index == 1:
            raise DataError("file", expected="a number", found="bad")
        return {"n": np.array(index)}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_that_failed_stays_the_next_one(workers: int):
    samples = Failing()
    loader = Loader(samples, batch=2, seed=0, workers=workers)
    for _ in range(2):
        with pytest.raises(LabError):
            next(loader)
        assert loader.state_dict()["position"] == 0
    loader.close()


@pytest.mark.parametrize("model", ["gpt2", "bert", "roberta", "bloom", "vit"])
def test_recomputation_keeps_less_than_half_for_the_backward_pass(model: str):
    from torch.autograd.graph import saved_tensors_hooks

    from asymcheck_lab.presets import TASKS
    from asymcheck_lab.recipe import recompute

    preset, task = load_preset(model, "tiny"), TASKS[model][0]
    batch = {
        key: torch.zeros(value.shape, dtype=value.dtype)
        for key, value in sizes._batch(preset, task).items()
    }
    kept: dict[bool, int] = {}
    for again in (False, True):
        built, saved_bytes = build(preset, task), []
        if again:
            recompute(built, preset.name)
        with saved_tensors_hooks(lambda t, to=saved_bytes: to.append(t.nbytes) or t, lambda t: t):
            built(**batch)
        kept[again] = sum(saved_bytes)
    assert kept[True] < kept[False] / 2
