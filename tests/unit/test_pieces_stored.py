"""Checkpoints of several ranks at rest: what their indexes say of pieces, and what must agree."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from asymcheck.decoding import Decoding, verify
from asymcheck.errors import CorruptCheckpoint, IncompatibleCheckpoint
from asymcheck.planning.pieces import Piece, overlaps, uncovered
from asymcheck.planning.retention import CheckpointId
from asymcheck.storage import manifest as manifests
from asymcheck.storage.index import Base, Index, dump_index, parse_index
from asymcheck.storage.local import LocalStore
from asymcheck.storage.manifest import make_manifest, parse_manifest
from asymcheck.storage.memory import MemoryStore
from asymcheck.storage.names import index_name, manifest_name
from asymcheck.storage.reader import OpenCheckpoint
from asymcheck.storage.repository import Repository, create_repository, open_repository
from asymcheck.storage.sealed import seal, unseal
from asymcheck.storage.store import read_all

GOLDEN = Path(__file__).parents[1] / "golden"
ONE, TWO = CheckpointId(1, 1), CheckpointId(1, 2)


def _made() -> ModuleType:
    spec = importlib.util.spec_from_file_location("golden_ranks", GOLDEN / "make_ranks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


made = _made()


@pytest.fixture
def repository() -> Repository:
    found = create_repository(MemoryStore())
    found.claim(None)
    return found


def whole_of(opened: OpenCheckpoint, key: str) -> np.ndarray:
    """A whole, put together from the pieces of all ranks."""
    decoding, found, shaped = Decoding(opened), None, []
    for index in opened.indexes:
        name = index.aliases.get(key, key)
        for leaf in (leaf for leaf in index.leaves if leaf.key == name):
            assert leaf.piece is not None
            whole = leaf.piece.whole
            if found is None:
                found = np.full(whole, np.nan, leaf.dtype)
            raw = np.frombuffer(decoding.read_leaf(index, leaf), leaf.dtype)
            shaped.append((leaf.piece, leaf.shape))
            everything = Piece(whole, (0,) * len(whole)), whole
            for shape, at, strides, to, to_strides in overlaps(*shaped[-1], *everything):
                flat = found.reshape(-1)
                size = flat.itemsize
                target = np.lib.stride_tricks.as_strided(
                    flat[to:], shape, [s * size for s in to_strides]
                )
                target[...] = np.lib.stride_tricks.as_strided(
                    raw[at:], shape, [s * size for s in strides]
                )
    assert found is not None
    assert uncovered(found.shape, shaped) is None
    return found


# --- golden -----------------------------------------------------------------


def test_the_golden_checkpoints_of_two_ranks_are_the_wholes_that_they_were() -> None:
    listed = json.loads((GOLDEN / "ranks.json").read_text())
    repository = open_repository(LocalStore(GOLDEN / "ranks"))
    committed = repository.survey().committed
    assert [m.base and m.base.at.step for m in committed.values()] == [None, 1]
    assert all(m.of_ranks for m in committed.values())
    for at in committed:
        assert list(verify(repository, at)) == []
        with repository.open(at) as opened:
            assert [i.base is None for i in opened.indexes] == [True, at.step == 1]
            for key, expected in listed[str(at.step)].items():
                whole = whole_of(opened, key)
                assert hashlib.sha256(whole.tobytes()).hexdigest() == expected, key
            assert np.array_equal(whole_of(opened, "tied"), whole_of(opened, "rows"))
            own = [
                np.frombuffer(Decoding(opened).read_leaf(i, leaf), "int64").tolist()
                for i in opened.indexes
                for leaf in i.leaves
                if leaf.key == "own"
            ]
        assert own == [[10 * at.step + rank] * 4 for rank in range(2)]


def test_the_golden_checkpoints_of_two_ranks_are_still_made_alike(repository: Repository) -> None:
    old = open_repository(LocalStore(GOLDEN / "ranks"))
    for at in (ONE, TWO):
        with old.open(at) as opened:
            for index in opened.indexes:
                for leaf in index.leaves:
                    if leaf.key:
                        part = made.parts(index.rank, at.step)[leaf.key]
                        assert (leaf.shape, leaf.piece) == (part.array.shape, part.piece)
                        raw = Decoding(opened).read_leaf(index, leaf)
                        assert bytes(raw) == part.array.tobytes()


@pytest.mark.parametrize("root", ["v1", "codecs", "ranks"])
def test_what_golden_checkpoints_say_is_said_in_the_same_bytes_today(root: str) -> None:
    repository = open_repository(LocalStore(GOLDEN / root))
    for at, manifest in repository.survey().committed.items():
        name = manifest_name(at)
        with repository.open(at) as opened:
            indexes = [
                (index, read_all(repository.store, index_name(at, index.rank)))
                for index in opened.indexes
            ]
        for index, data in indexes:
            assert dump_index(index) == data
        again = make_manifest(indexes, base=manifest.base, fidelity=manifest.fidelity)
        assert again == read_all(repository.store, name)
        assert manifest.of_ranks == (root == "ranks")


# --- what ranks must agree on -----------------------------------------------


def indexes_of(repository: Repository) -> list[Index]:
    return [made.write_index(repository, ONE, rank, made.parts(rank, 1))[0] for rank in range(2)]


def committed(repository: Repository, indexes: list[Index], **changes: Any) -> None:
    """Commit whatever they say, and open it."""
    stored = [made.store_index(repository, index) for index in indexes]
    name = manifest_name(ONE)
    value = unseal(make_manifest(stored), name)
    repository.store.write(name, [seal({**value, **changes})])
    with repository.open(ONE):
        pass


def test_indexes_of_ranks_that_agree_are_opened(repository: Repository) -> None:
    committed(repository, indexes_of(repository))


def own(index: Index) -> Index:
    return made.altered(index, "rows", piece=None)


DISAGREEMENTS: dict[str, tuple[Callable[[Index], Index], str]] = {
    "on the shape of a whole": (
        lambda i: made.altered(i, "rows", piece=Piece((7, 4), (3, 0))),
        r"'rows' is a piece of 'float32' \[7, 4\], but a piece of 'float32' \[5, 4\] on rank 0",
    ),
    "on a whole of many dimensions": (
        lambda i: made.altered(i, "flat", piece=Piece((*[1] * 20, 3, 5), 8)),
        "'flat' is a piece",
    ),
    "on the dtype of a key": (
        lambda i: made.altered(i, "rows", dtype="int32"),
        r"'rows' is a piece of 'int32' \[5, 4\], but a piece of 'float32' \[5, 4\] on rank 0",
    ),
    "on whether it is shared": (own, "'rows' is the rank's own, but a piece of"),
    "on what an alias is": (
        lambda i: replace(i, aliases={"tied": "own"}),
        "'tied' is the rank's own, but a piece of",
    ),
}


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_ranks_that_disagree_are_refused_with_the_key_and_both(
    repository: Repository, what: str
) -> None:
    change, said = DISAGREEMENTS[what]
    first, second = indexes_of(repository)
    with pytest.raises(CorruptCheckpoint, match=said) as caught:
        committed(repository, [first, change(second)])
    assert caught.value.where == index_name(ONE, 1)


def test_own_leaves_of_one_key_may_differ_in_all(repository: Repository) -> None:
    first, second = indexes_of(repository)
    committed(repository, [first, made.altered(second, "own", dtype="float64", shape=(2, 2))])


@pytest.mark.parametrize(
    ("base", "fidelity", "said"),
    [(Base(CheckpointId(1, 0), "1" * 32), "exact", "base"), (None, "excp", "fidelity")],
)
def test_ranks_of_two_bases_or_losses_are_not_committed(
    repository: Repository, base: Base | None, fidelity: str, said: str
) -> None:
    first, second = indexes_of(repository)
    first = replace(first, base=Base(CheckpointId(1, 0), "0" * 32), fidelity="moments")
    second = replace(second, base=base, fidelity=fidelity)
    with pytest.raises(CorruptCheckpoint, match=f"ranks differ in {said}"):
        make_manifest([(i, dump_index(i)) for i in (first, second)])


def test_a_manifest_tells_what_one_of_the_indexes_tells(repository: Repository) -> None:
    first, second = indexes_of(repository)
    base = Base(CheckpointId(1, 0), "0" * 32)
    second = replace(second, base=base, fidelity="excp")
    stored = [(i, dump_index(i)) for i in (first, second)]
    data = make_manifest(stored)
    found = parse_manifest(data, manifest_name(ONE))
    assert (found.base, found.fidelity, found.of_ranks) == (base, "excp", True)
    assert unseal(data, "here")["needs"] == ["base", "lossy", "excp", "ranks"]
    assert make_manifest(stored, base=base, fidelity="excp") == data


def test_a_manifest_that_hides_what_an_index_tells_is_damage(repository: Repository) -> None:
    first, second = indexes_of(repository)
    lossy = replace(second, fidelity="moments")
    stored = [made.store_index(repository, i) for i in (first, lossy)]
    value = unseal(make_manifest(stored), "here")
    del value["fidelity"]
    repository.store.write(manifest_name(ONE), [seal({**value, "needs": ["ranks"]})])
    with pytest.raises(CorruptCheckpoint, match="silent on a base or a loss"), repository.open(ONE):
        pass


# --- who can read it --------------------------------------------------------


def alone(repository: Repository) -> Index:
    first, _ = indexes_of(repository)
    return replace(first, world=1)


def test_one_rank_with_a_piece_needs_ranks_and_one_without_does_not(
    repository: Repository,
) -> None:
    index = alone(repository)
    committed(repository, [index])
    assert repository.survey().committed[ONE].of_ranks
    plain = replace(index, leaves=tuple(x._replace(piece=None) for x in index.leaves))
    committed(repository, [plain])
    assert not repository.survey().committed[ONE].of_ranks


@pytest.mark.parametrize("needed", [True, False])
def test_a_need_of_ranks_that_the_indexes_do_not_bear_out_is_damage(
    repository: Repository, needed: bool
) -> None:
    index = alone(repository)
    if needed:
        index = replace(index, leaves=tuple(x._replace(piece=None) for x in index.leaves))
    with pytest.raises(CorruptCheckpoint, match="do not agree with 'ranks'"):
        committed(repository, [index], needs=["ranks"] if needed else [])


def test_a_release_that_does_not_know_of_ranks_refuses_as_incompatible(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed(repository, indexes_of(repository))
    monkeypatch.setattr(manifests, "FEATURES", manifests.FEATURES - {"ranks"})
    with pytest.raises(IncompatibleCheckpoint, match=r"needs \['ranks'\]"):
        repository.open(ONE).__enter__()


def test_an_index_of_ranks_is_read_as_it_was_written(repository: Repository) -> None:
    for index in indexes_of(repository):
        data = dump_index(index)
        assert parse_index(data, index_name(ONE, index.rank)) == index
        assert any(leaf.piece is not None for leaf in index.leaves)
