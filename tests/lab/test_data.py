"""The text and the loader: what is refused, and where a resumed run reads on."""

from __future__ import annotations

import json
import os
import random
import stat
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from asymcheck_lab.data import BatchLoader, Text, load_text
from asymcheck_lab.errors import DataError, LabError

CONTEXT = 4


def numbered(windows: int, extra: int = 0) -> Text:
    """A text whose window ``n`` consists of the byte ``n`` only."""
    data = b"".join(bytes([n]) * CONTEXT for n in range(windows)) + b"x" * extra
    return Text("numbers", np.frombuffer(data, np.uint8), f"sha of {windows} {extra}")


def loader_of(windows: int = 11, batch: int = 3, seed: int = 5) -> BatchLoader:
    return BatchLoader(numbered(windows, extra=2), context=CONTEXT, batch=batch, seed=seed)


def take(loader: BatchLoader, count: int) -> list[list[int]]:
    batches = list(islice(loader, count))
    assert all((b == b[:, :1]).all() and b.shape[1] == CONTEXT for b in batches)
    return [b[:, 0].tolist() for b in batches]


def resumed(state: dict) -> BatchLoader:
    fresh = loader_of(seed=99)  # the seed comes out of the state
    fresh.load_state_dict(json.loads(json.dumps(state)))
    return fresh


def test_the_default_text_is_the_one_that_ships_with_python():
    text = load_text()
    assert len(text.tokens) > 300_000
    assert '"assert" statement' in bytes(text.tokens).decode()
    assert text.sha256 == load_text().sha256


def test_a_file_is_read_byte_by_byte(tmp_path: Path):
    path = tmp_path / "café.txt"
    path.write_text("naïve\n", encoding="utf-8")
    assert bytes(load_text(path).tokens) == "naïve\n".encode()


@pytest.mark.parametrize(
    ("content", "where", "found"),
    [
        (None, "", "No such file"),
        (b"", "", "an empty file"),
        (b"one\ntwo\nth\xffree", "line 3, byte 10", "byte 0xff"),
        (b"cut off: \xc3", "line 1, byte 9", "byte 0xc3"),
    ],
    ids=["missing", "empty", "not UTF-8", "cut in a character"],
)
def test_an_unusable_file_is_told_with_place_expectation_and_finding(
    tmp_path: Path, content: bytes | None, where: str, found: str
):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError) as failure:
        load_text(path)
    assert failure.value.where.startswith(str(path))
    assert failure.value.where.endswith(where)
    assert "text" in failure.value.expected
    assert found in failure.value.found
    assert all(part in str(failure.value) for part in (str(path), "expected", found))


def test_a_folder_in_the_place_of_the_text_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match="expected a readable text file, found Is a directory"):
        load_text(tmp_path)


def test_a_file_without_read_permission_is_refused(tmp_path: Path, not_run_here):
    path = tmp_path / "secret.txt"
    path.write_text("secret")
    path.chmod(stat.S_IWUSR)
    if os.access(path, os.R_OK):
        not_run_here("an unreadable file: this user may read every file")
    with pytest.raises(DataError, match="found Permission denied"):
        load_text(path)


def test_a_text_too_short_for_one_batch_is_refused_with_both_numbers():
    with pytest.raises(DataError, match=r"numbers: expected at least 12 bytes.*found 8 bytes"):
        BatchLoader(numbered(2), context=CONTEXT, batch=3, seed=0)


def test_a_text_of_exactly_one_batch_is_enough():
    loader = BatchLoader(numbered(3), context=CONTEXT, batch=3, seed=0)
    assert [sorted(b) for b in take(loader, 4)] == [[0, 1, 2]] * 4


def test_an_epoch_gives_each_window_at_most_once_and_the_next_another_order():
    epochs = [take(loader, 3) for loader in [loader_of()] for _ in range(4)]
    for epoch in epochs:
        windows = [window for batch in epoch for window in batch]
        assert len(set(windows)) == 9
        assert set(windows) <= set(range(11))
    assert len({json.dumps(e) for e in epochs}) == 4


def test_the_seed_decides_the_order_and_no_global_generator_does():
    random.seed(1)
    np.random.seed(1)
    before = (random.getstate(), np.random.get_state()[1].tolist())
    first = take(loader_of(seed=5), 7)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    random.seed(2)
    np.random.seed(2)
    assert take(loader_of(seed=5), 7) == first
    assert take(loader_of(seed=6), 7) != first


@pytest.mark.parametrize("at", range(8))
def test_a_resumed_loader_goes_on_as_the_uninterrupted_one(at: int):
    # Three batches an epoch: 0 is fresh, 3 and 6 are the ends of epochs, the others within.
    whole = take(loader_of(), 12)
    loader = loader_of()
    assert take(loader, at) == whole[:at]
    assert take(resumed(loader.state_dict()), 12 - at) == whole[at:]


def test_a_loader_resumed_twice_in_one_epoch_goes_on_as_the_uninterrupted_one():
    whole = take(loader_of(), 9)
    first = loader_of()
    take(first, 4)
    second = resumed(first.state_dict())
    assert take(second, 1) == whole[4:5]
    third = resumed(second.state_dict())
    assert third.epoch == second.epoch == 1
    assert take(third, 4) == whole[5:]


def test_a_used_loader_can_go_back():
    loader = loader_of()
    whole = take(loader, 2)
    state = loader.state_dict()
    later = take(loader, 5)
    loader.load_state_dict(state)
    assert take(loader, 5) == later
    assert whole != later


def test_resuming_far_in_costs_one_permutation(monkeypatch: pytest.MonkeyPatch):
    loader = loader_of(windows=200, batch=1)
    orders = []
    shuffled = BatchLoader._shuffled

    def counted(self: BatchLoader, epoch: int):
        orders.append(epoch)
        return shuffled(self, epoch)

    monkeypatch.setattr(BatchLoader, "_shuffled", counted)
    loader.load_state_dict({**loader.state_dict(), "epoch": 12345, "position": 190})
    assert len(take(loader, 5)) == 5
    assert orders == [12345]


@pytest.mark.parametrize("other", [numbered(12, extra=2), numbered(11)], ids=["longer", "shorter"])
def test_another_text_than_the_run_was_started_with_is_refused(other: Text):
    state = loader_of().state_dict()
    loader = BatchLoader(other, context=CONTEXT, batch=3, seed=1)
    untouched = loader.state_dict()
    with pytest.raises(LabError, match=r"started with the text .* sha of 11 2, found sha of"):
        loader.load_state_dict(state)
    assert loader.state_dict() == untouched
