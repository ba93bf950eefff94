"""No bytes make a reader crash or hang: the result is always a value or one typed error.

Real objects are cut, flipped, swapped, edited by hand, and edited and sealed again. What can be
loaded after that is bit for bit what was saved, or the seal was made anew by who changed it.
"""

from __future__ import annotations

import collections
import copy
import functools
import json
import random
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asymcheck import Checkpointer
from asymcheck.decoding import Decoding, verify
from asymcheck.errors import (
    CheckpointError,
    CorruptCheckpoint,
    IncompatibleCheckpoint,
    NoCheckpoint,
    OptionError,
    StoreError,
)
from asymcheck.planning.layout import Extent, lay_out
from asymcheck.planning.pieces import Piece, boxes, flaw, uncovered
from asymcheck.planning.retention import CheckpointId
from asymcheck.storage.flush import Encoded, flush
from asymcheck.storage.index import TREE_KEY, Index, Leaf, Loss, dump_index, parse_index
from asymcheck.storage.manifest import (
    Base,
    check_format_line,
    parse_attempt,
    parse_manifest,
)
from asymcheck.storage.memory import MemoryStore
from asymcheck.storage.repository import open_repository
from asymcheck.storage.sealed import Fields, digest, seal, unseal
from asymcheck.storage.store import read_all

pytestmark = pytest.mark.timeout(240)

EXAMPLES = 150
AT = CheckpointId(1, 2)
MANIFEST = "step-00000002/a000001-MANIFEST.json"
INDEX = "step-00000002/a000001-r0000.json"
PACK = "step-00000002/a000001-r0000-0001.pack"
RECORD = "attempts/000001"


def new_state(seed: int) -> dict[str, Any]:
    """A bit of everything that a tree can hold."""
    generator = torch.Generator().manual_seed(seed)
    model = torch.nn.Linear(4, 3)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.rand(p.shape, generator=generator))
    optim = torch.optim.AdamW(model.parameters(), lr=0.1 + seed)
    for p in model.parameters():
        p.grad = torch.rand(p.shape, generator=generator)
    optim.step()
    return {
        "model": model,
        "optim": optim,
        "big": torch.full((20_000,), float(seed)),
        "values": {
            "step": seed,
            "text": "é",
            "tuple": (1, 2.5, None),
            "set": {1, 2},
            "deque": collections.deque([1], maxlen=3),
            "bytes": b"\0\1",
            "array": np.arange(5) + seed,
            "scalar": np.float32(seed),
            3: torch.tensor(seed),
        },
    }


def fingerprint(state: Mapping[str, Any]) -> list[bytes]:
    tensors = [state["big"], *state["model"].state_dict().values()]
    moments = [v for s in state["optim"].state.values() for v in s.values()]
    values = repr({k: v for k, v in state["values"].items() if not hasattr(v, "dtype")})
    return [
        *(t.detach().numpy().tobytes() for t in (*tensors, *moments)),
        str(state["optim"].param_groups[0]["lr"]).encode(),
        values.encode(),
        state["values"]["array"].tobytes(),
        bytes(state["values"][3].numpy()),
    ]


@functools.cache
def saved() -> tuple[dict[str, bytes], dict[int, list[bytes]]]:
    """The objects of a root with two checkpoints, and what each of them holds."""
    store, prints, state = MemoryStore(), {}, new_state(1)
    with Checkpointer(store, state=state) as ckpt:
        ckpt.restore()
        for step in (1, 2):
            state["big"].fill_(step)
            state["optim"].step()
            state["values"].update(step=step, array=np.arange(5) + step)
            prints[step] = fingerprint(state)
            ckpt.save(step)
            ckpt.wait(60)
    objects = {e.name: read_all(store, e.name) for e in store.list()}
    assert {MANIFEST, INDEX, PACK, RECORD, "FORMAT", "RUN.json"} <= objects.keys()
    return objects, prints


def store_of(objects: Mapping[str, bytes]) -> MemoryStore:
    store = MemoryStore()
    for name, data in objects.items():
        store.write(name, [data])
    return store


def restored(store: MemoryStore, **options: Any) -> tuple[int, dict[str, Any]]:
    state = new_state(7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = Checkpointer(store, state=state, read_only=True).restore(**options)
    return step, state


def read_everything(store: MemoryStore) -> None:
    """Whatever a reader can do below the state; raises nothing but a ``CheckpointError``."""
    repository = open_repository(store)
    listing = repository.survey()
    repository.parents()
    repository.lineage(listing)
    found = [d.at for d in listing.damaged]
    for at in (*listing.committed, *found, AT):
        for damage in verify(repository, at):
            assert damage.why
        try:
            with repository.open(at) as checkpoint:
                for index in checkpoint.indexes:
                    for leaf in index.leaves:
                        assert len(Decoding(checkpoint).read_leaf(index, leaf)) == leaf.nbytes
        except CheckpointError:
            continue


def tolerated(action: Callable[[], object]) -> CheckpointError | None:
    """Run something that may fail in the typed way only."""
    try:
        action()
    except (
        CorruptCheckpoint,
        IncompatibleCheckpoint,
        NoCheckpoint,
        OptionError,
        StoreError,
    ) as failure:
        return failure
    return None


# --- bytes ------------------------------------------------------------------


class Damaged(dict[str, bytes]):
    """Objects of which some are damaged; shows only what was done."""

    what = ""

    def __repr__(self) -> str:
        return self.what


@st.composite
def damaged_objects(draw: st.DrawFn) -> Damaged:
    objects = Damaged(saved()[0])
    name = draw(st.sampled_from(sorted(objects)))
    data = objects[name]
    at = draw(st.integers(0, len(data)))
    length = draw(st.integers(1, 64))
    kind = draw(
        st.sampled_from(["cut", "flip", "insert", "remove", "zero", "swap", "append", "delete"])
    )
    if kind == "cut":
        objects[name] = data[:at]
    elif kind == "flip":
        at = min(at, len(data) - 1)
        bit = 1 << draw(st.integers(0, 7))
        objects[name] = data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :]
    elif kind == "insert":
        objects[name] = data[:at] + draw(st.binary(min_size=1, max_size=64)) + data[at:]
    elif kind == "remove":
        objects[name] = data[:at] + data[at + length :]
    elif kind == "zero":
        objects[name] = data[:at] + bytes(len(data[at : at + length])) + data[at + length :]
    elif kind == "append":
        objects[name] = data + draw(st.binary(min_size=1, max_size=5000))
    elif kind == "delete":
        del objects[name]
    else:
        other = draw(st.sampled_from(sorted(objects)))
        objects[name], objects[other] = objects[other], objects[name]
    objects.what = f"{kind} {name} at {at} of {len(data)}"
    return objects


@settings(max_examples=2 * EXAMPLES)
@given(damaged_objects())
def test_what_loads_after_damage_is_bit_for_bit_what_was_saved(objects: Damaged) -> None:
    tolerated(lambda: read_everything(store_of(objects)))

    def load() -> None:
        step, state = restored(store_of(objects))
        assert fingerprint(state) == saved()[1][step]

    failure = tolerated(load)
    if failure is not None and not re.search(r"FORMAT|RUN\.json", objects.what):
        # Damage of one checkpoint never hides the other one: only both may be hit by a swap.
        assert objects.what.startswith("swap"), failure


@settings(max_examples=EXAMPLES)
@given(damaged_objects())
def test_a_writer_that_starts_over_damage_saves_a_whole_checkpoint(objects: Damaged) -> None:
    store = store_of(objects)
    state = new_state(9)

    def work() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Checkpointer(store, state=state, keep_last=1) as ckpt:
                ckpt.restore(resume="never")
                ckpt.save(50)
        step, found = restored(store)
        assert step == 50
        assert fingerprint(found) == fingerprint(state)

    failure = tolerated(work)
    if failure is not None:
        assert re.search(r"FORMAT|RUN\.json|swap", objects.what), failure


@settings(max_examples=2 * EXAMPLES)
@given(st.binary(max_size=300))
@example(b"")
@example(b"\xff\xfe{\0}\0")
@example(b'{"hash":"' + b"0" * 32 + b'"}\n')
@example(b'"run":1}')
def test_bytes_of_no_format_are_refused_by_every_parser(data: bytes) -> None:
    for given_bytes in (data, sealed_body(data), sealed_body(b"{" + data)):
        tolerated(lambda given_bytes=given_bytes: unseal(given_bytes, "here"))
        for parse in (parse_manifest, parse_index, parse_attempt, check_format_line):
            with pytest.raises((CorruptCheckpoint, IncompatibleCheckpoint)):
                parse(given_bytes, "here")


@pytest.mark.parametrize(("name", "parse"), [(MANIFEST, parse_manifest), (INDEX, parse_index)])
@pytest.mark.parametrize("row", [7, {"name": 7, "bytes": 1}, {"name": "x", "bytes": "1"}])
def test_a_pack_that_is_none_is_told_with_the_object_that_names_it(
    name: str, parse: Callable[[bytes, str], object], row: object
) -> None:
    value = unseal(saved()[0][name], name)
    with pytest.raises(CorruptCheckpoint) as caught:
        parse(seal({**value, "packs": [row]}), name)
    assert caught.value.where == name


def sealed_body(body: bytes) -> bytes:
    """A valid seal over any bytes."""
    return body + f',"hash":"{digest(body)}"}}\n'.encode("ascii")


# --- edited and sealed again ------------------------------------------------

HUGE = [2**31, 2**53, 2**53 + 1, 2**63, 2**64, 10**30, -1, -(2**63)]
TEXTS = ["", ".", "..", "../../etc/passwd", "/etc/passwd", "a/b", "\0", "\ud800", "é" * 50, "nan"]
TEXTS += ["inf", "raw", "zstd", "json", "float32", "numpy:O", "numpy:<f4", "numpy:V8", "quint8"]
TEXTS += ["step-00000001/a000001-r0000-0001.pack", "asymcheck 1", "asymcheck 2", "0" * 32, "meta"]
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(HUGE),
    st.integers(-2, 5000),
    st.sampled_from([0.5, 1e308, -0.0, 1e-320]),
    st.sampled_from(TEXTS),
)
WILD = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=3),
    st.dictionaries(st.sampled_from(TEXTS), SCALARS, max_size=2),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every member, at any depth."""
    found = [path] if path else []
    if isinstance(value, dict):
        for key, item in value.items():
            found += places(item, (*path, key))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            found += places(item, (*path, i))
    return found


class Edited:
    """A JSON value with some members changed; shows only what was changed."""

    def __init__(self, value: Any) -> None:
        self.value = copy.deepcopy(value)
        self.changes: list[tuple[str, list[Any], Any]] = []

    def __repr__(self) -> str:
        return f"{self.changes}"[:1000]

    def change(self, kind: str, path: list[Any], wild: Any, name: str) -> None:
        self.changes.append((kind, path, wild))
        *above, last = path
        holder = functools.reduce(lambda v, key: v[key], above, self.value)
        if kind == "replace":
            holder[last] = wild
        elif kind == "remove":
            del holder[last]
        elif isinstance(holder, list):
            holder.insert(last, copy.deepcopy(holder[last]) if kind == "double" else wild)
        else:
            holder[name] = wild


@st.composite
def edited(draw: st.DrawFn, value: Any, wild: st.SearchStrategy[Any] = WILD) -> Edited:
    """``value`` with one to three members replaced, removed, doubled or added.

    A member is found by walking down, so that one long list does not draw all changes.
    """
    found = Edited(value)
    for _ in range(draw(st.integers(1, 3))):
        path: list[Any] = []
        here = found.value
        while isinstance(here, dict | list) and here:
            keys = list(here) if isinstance(here, dict) else range(len(here))
            path.append(draw(st.sampled_from(keys)))
            here = here[path[-1]]
            if draw(st.integers(0, 4)) == 0:
                break
        if path:
            kind = draw(st.sampled_from(["replace", "replace", "remove", "double", "add"]))
            found.change(kind, path, draw(wild), draw(st.sampled_from(TEXTS)))
    return found


def manifest_over(index: bytes, **changes: Any) -> bytes:
    """A valid manifest that names this index."""
    value = unseal(saved()[0][MANIFEST], MANIFEST)
    value["indexes"][0].update(bytes=len(index), hash=digest(index))
    return seal({**value, **changes})


@settings(max_examples=2 * EXAMPLES)
@given(st.data())
@pytest.mark.parametrize("name", [MANIFEST, INDEX, RECORD, "RUN.json"])
def test_an_object_that_was_edited_and_sealed_again_crashes_nobody(
    name: str, data: st.DataObject
) -> None:
    objects = dict(saved()[0])
    change = data.draw(edited(unseal(objects[name], name)))
    try:
        objects[name] = seal(change.value)
    except (ValueError, TypeError):
        return  # no JSON can say that
    if name == INDEX:
        objects[MANIFEST] = manifest_over(objects[INDEX])
    tolerated(lambda: read_everything(store_of(objects)))
    tolerated(lambda: restored(store_of(objects)))


@pytest.mark.parametrize("name", [MANIFEST, INDEX, RECORD, "RUN.json"])
def test_every_member_is_checked_for_its_type(name: str) -> None:
    """Each member in turn is each wild value: refused, or a value of the right type."""
    original = unseal(saved()[0][name], name)
    parse = {MANIFEST: parse_manifest, INDEX: parse_index, RECORD: parse_attempt}.get(
        name, lambda data, where: Fields(unseal(data, where), where, ("run",)).text("run")
    )
    wild = [None, True, -1, 0.5, "", [], {}, [[]], [{}], 2**60, "x" * 100, {"a": {}}, [None] * 5]
    refused = 0
    for path in places(original):
        for value in wild:
            changed = copy.deepcopy(original)
            *above, last = path
            functools.reduce(lambda v, key: v[key], above, changed)[last] = value
            try:
                parse(seal(changed), name)
            except (CorruptCheckpoint, IncompatibleCheckpoint):
                refused += 1
    assert refused > 8 * len(original)


@pytest.mark.parametrize("depth", [90, 200, 900, 950, 980, 990, 1000, 1010, 5000, 200_000])
@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"a":'])
def test_deep_nesting_is_damage(depth: int, opening: str) -> None:
    closing = {"[": "]", '{"a":': "}", '[{"a":': "}]"}[opening]
    deep = opening * depth + "1" + closing * depth
    for name in (MANIFEST, INDEX, RECORD, "RUN.json"):
        original = unseal(saved()[0][name], name)
        for member in original:
            text = json.dumps({**original, member: "HERE"})[:-1].replace('"HERE"', deep)
            objects = {**saved()[0], name: sealed_body(text.encode())}
            if name == INDEX:
                objects[MANIFEST] = manifest_over(objects[INDEX])
            tolerated(lambda objects=objects: read_everything(store_of(objects)))


# --- what the format forbids, one by one ------------------------------------


def _chunk(at: int, nbytes: int, offset: int = 0, **more: Any) -> list[Any]:
    row = {"pack": 0, "stored": nbytes, "codec": "raw", "hash": "0" * 32, **more}
    return [at, nbytes, row["pack"], offset, row["stored"], row["codec"], row["hash"]]


def _leaf(key: str, at: int, nbytes: int, **more: Any) -> dict[str, Any]:
    return {"key": key, "dtype": "uint8", "shape": [nbytes], "at": at, "bytes": nbytes, **more}


def _index(**changes: Any) -> dict[str, Any]:
    """A small valid index."""
    return {
        "format": "asymcheck-index 1",
        "run": "r",
        "step": 2,
        "attempt": 1,
        "rank": 0,
        "world": 1,
        "created_s": 0.0,
        "metrics": {},
        "versions": {},
        "leaves": [_leaf("a", 0, 10), _leaf("b", 16, 5)],
        "aliases": {"c": "b"},
        "chunks": [_chunk(0, 21)],
        "packs": [{"name": PACK, "bytes": 21}],
        **changes,
    }


def _piece(**changes: Any) -> dict[str, Any]:
    """The small index, with a piece of ten elements in it."""
    return _index(leaves=[_leaf("a", 0, 10, **changes)], aliases={})


def test_the_small_index_of_these_tests_is_valid() -> None:
    index = parse_index(seal(_index()), INDEX)
    assert [leaf.key for leaf in index.leaves] == ["a", "b"]
    assert index.leaf_bytes == 15


TWO_PACKS = [{"name": PACK, "bytes": 4096}, {"name": PACK.replace("-0001", "-0002"), "bytes": 10}]

FORBIDDEN = {
    "a leaf overlaps another": _index(leaves=[_leaf("a", 0, 10), _leaf("b", 9, 5)]),
    "leaves are out of order": _index(leaves=[_leaf("b", 16, 5), _leaf("a", 0, 10)]),
    "a leaf ends beyond the chunks": _index(leaves=[_leaf("a", 0, 22)]),
    "a leaf lies beyond the chunks": _index(leaves=[_leaf("a", 4096, 1)]),
    "a leaf lies in a gap between chunks": _index(
        leaves=[_leaf("a", 0, 30)],
        chunks=[_chunk(0, 10), _chunk(20, 10, 4096)],
        packs=[{"name": PACK, "bytes": 4106}],
    ),
    "two leaves have one key": _index(leaves=[_leaf("a", 0, 10), _leaf("a", 16, 5)]),
    "a leaf at a negative place": _index(leaves=[_leaf("a", -1, 10)]),
    "a leaf of a huge size": _index(leaves=[_leaf("a", 0, 2**53 + 1)]),
    "an order that is no permutation": _index(
        leaves=[_leaf("a", 0, 10, shape=[2, 5], order=[0, 0])]
    ),
    "an order of another length": _index(leaves=[_leaf("a", 0, 10, order=[0, 1])]),
    "a tree that is no json": _index(leaves=[_leaf("", 0, 10)]),
    "a json that is no tree": _index(leaves=[_leaf("a", 0, 10, dtype="json")]),
    "an alias of nothing": _index(aliases={"c": "z"}),
    "an alias that is a leaf": _index(aliases={"a": "b"}),
    "an alias of an alias": _index(aliases={"c": "b", "d": "c"}),
    "a chunk overlaps another": _index(
        chunks=[_chunk(0, 21), _chunk(20, 1, 4096)], packs=[{"name": PACK, "bytes": 4097}]
    ),
    "chunks overlap in their pack": _index(chunks=[_chunk(0, 10), _chunk(10, 11, 0)]),
    "a gap in a pack": _index(
        chunks=[_chunk(0, 21, 4096)], packs=[{"name": PACK, "bytes": 4096 + 21}]
    ),
    "a chunk that is not aligned": _index(
        chunks=[_chunk(0, 21, 8)], packs=[{"name": PACK, "bytes": 29}]
    ),
    "a chunk ends beyond its pack": _index(packs=[{"name": PACK, "bytes": 20}]),
    "a pack is longer than its chunks": _index(packs=[{"name": PACK, "bytes": 22}]),
    "a chunk in no pack": _index(chunks=[_chunk(0, 21, pack=1)]),
    "a pack without chunks": _index(packs=[{"name": PACK, "bytes": 21}, TWO_PACKS[1]]),
    "a chunk of no bytes": _index(chunks=[_chunk(0, 21), _chunk(21, 0, 4096)]),
    "a chunk over 16 MiB": _index(
        chunks=[_chunk(0, (16 << 20) + 1)], packs=[{"name": PACK, "bytes": (16 << 20) + 1}]
    ),
    "a raw chunk of another length": _index(chunks=[_chunk(0, 21, stored=20)]),
    "a codec of no name": _index(chunks=[_chunk(0, 21, codec="")]),
    "a codec of a long name": _index(chunks=[_chunk(0, 21, codec="z" * 41)]),
    "a codec in capitals": _index(chunks=[_chunk(0, 21, codec="ZSTD")]),
    "a codec and a line feed": _index(chunks=[_chunk(0, 21, codec="zstd\n")]),
    "a codec that is a path": _index(chunks=[_chunk(0, 21, codec="../z")]),
    "losses that are no list": _index(losses={}),
    "a loss of too few values": _index(losses=[["exp_avg", "q8", 0.5, 0.1]]),
    "a loss of a kind that is no text": _index(losses=[[1, "q8", 0.5, 0.1, 21]]),
    "a loss of a garbled codec": _index(losses=[["exp_avg", "Q8", 0.5, 0.1, 21]]),
    "a loss of a negative error": _index(losses=[["exp_avg", "q8", -0.5, 0.1, 21]]),
    "a loss of no error": _index(losses=[["exp_avg", "q8", 0.5, "nan", 21]]),
    "a loss of half a byte": _index(losses=[["exp_avg", "q8", 0.5, 0.1, 0.5]]),
    "a hash that is none": _index(chunks=[_chunk(0, 21, hash="0" * 31)]),
    "a hash in capitals": _index(chunks=[_chunk(0, 21, hash="A" * 32)]),
    "a hash and a line feed": _index(chunks=[_chunk(0, 21, hash="0" * 32 + "\n")]),
    "a pack that reaches outside": _index(packs=[{"name": "../../etc/passwd", "bytes": 21}]),
    "a pack of another step": _index(
        packs=[{"name": PACK.replace("step-00000002", "step-00000001"), "bytes": 21}]
    ),
    "a pack of another rank": _index(packs=[{"name": PACK.replace("r0000", "r0001"), "bytes": 21}]),
    "packs out of order": _index(
        chunks=[_chunk(0, 4096), _chunk(4096, 10, pack=1)],
        packs=TWO_PACKS[::-1],
        leaves=[_leaf("a", 0, 4106)],
    ),
    "a rank outside the world": _index(rank=1),
    "a world of nobody": _index(world=0),
    "a world too large": _index(world=10_001),
    "an unknown member": _index(more=1),
    "a member too few": {k: v for k, v in _index().items() if k != "run"},
    "an index of another kind": _index(format="asymcheck 1"),
    "an index of a garbled version": _index(format="asymcheck-index one"),
    "metrics that are no numbers": _index(metrics={"loss": "low"}),
    "a metric that is too large": _index(metrics={"loss": 10**400}),
    "versions that are no text": _index(versions={"torch": [1]}),
    "a run that is no text": _index(run=None),
    "a truth in the place of a number": _index(rank=False),
    "a shape that is no list": _index(leaves=[_leaf("a", 0, 10, shape=10)]),
    "a shape of truths": _index(leaves=[_leaf("a", 0, 10, shape=[True])]),
    "a piece without a start": _piece(whole=[10]),
    "a piece without a whole": _piece(start=0),
    "a piece of a whole that is no list": _piece(whole=10, start=0),
    "a piece of a whole of nothing": _piece(whole=None, start=0),
    "a piece of a whole of truths": _piece(whole=[True], start=0, shape=[1]),
    "a piece of a whole of a negative size": _piece(whole=[-10], start=0),
    "a piece of a whole that is too large": _piece(whole=[2**53, 2], start=0),
    "a piece of a whole of a size that is too large": _piece(whole=[2**53 + 1], start=0),
    "a piece of a whole of too many dimensions": _piece(whole=[1] * 64 + [10], start=0),
    "a piece of a whole of a great many dimensions": _piece(whole=[2**53] * 50_000, start=0),
    "a piece that starts nowhere": _piece(whole=[10], start=None),
    "a piece that starts at a truth": _piece(whole=[11], start=True),
    "a piece that starts at half an element": _piece(whole=[11], start=0.5),
    "a piece that starts at a text": _piece(whole=[11], start="0"),
    "a piece that starts before its whole": _piece(whole=[11], start=-1),
    "a piece that ends after its whole": _piece(whole=[10], start=1),
    "a flat piece of two dimensions": _piece(whole=[10], start=0, shape=[2, 5]),
    "a flat piece of no dimension": _piece(whole=[10], start=0, shape=[]),
    "a box that starts before its whole": _piece(whole=[11], start=[-1]),
    "a box that ends after its whole": _piece(whole=[3, 5], start=[2, 0], shape=[2, 5]),
    "a box of no elements outside its whole": _piece(whole=[3], start=[4], shape=[0]),
    "a box of another dimension than its whole": _piece(whole=[10, 1], start=[0, 0]),
    "a box at an offset of another dimension": _piece(whole=[10], start=[0, 0]),
    "a box at an offset of truths": _piece(whole=[11], start=[True]),
    "a box at an offset of lists": _piece(whole=[11], start=[[0]]),
    "a piece with an order": _piece(whole=[2, 5], start=[0, 0], shape=[2, 5], order=[1, 0]),
    "a tree that is a piece": _index(
        leaves=[_leaf("", 0, 10, dtype="json", whole=[10], start=0)], aliases={}
    ),
    "a base of two values": _index(base=[1, 1]),
    "a base of nothing": _index(base=None),
    "a base that is itself": _index(base=[1, 2, "0" * 32]),
    "a base that is newer": _index(base=[2, 1, "0" * 32]),
    "a base without a hash": _index(base=[1, 1, ""]),
    "a fidelity that goes without saying": _index(fidelity="exact"),
    "a fidelity that nobody knows": _index(fidelity="roughly"),
    "a fidelity that is no text": _index(fidelity=None),
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_an_index_with_a_valid_seal_is_refused_when(what: str) -> None:
    with pytest.raises(CorruptCheckpoint, match=re.escape(INDEX)):
        parse_index(seal(FORBIDDEN[what]), INDEX)


def _manifest(**changes: Any) -> dict[str, Any]:
    return {**unseal(saved()[0][MANIFEST], MANIFEST), **changes}


def _entry(**changes: Any) -> dict[str, Any]:
    return {"name": INDEX, "bytes": 1, "hash": "0" * 32, **changes}


FORBIDDEN_MANIFESTS: dict[str, Callable[[], dict[str, Any]]] = {
    "another step": lambda: _manifest(step=3),
    "another attempt": lambda: _manifest(attempt=2),
    "no index": lambda: _manifest(indexes=[]),
    "an index that reaches outside": lambda: _manifest(indexes=[_entry(name="../x")]),
    "an index of another step": lambda: _manifest(indexes=[_entry(name=INDEX.replace("2/", "1/"))]),
    "an index of another rank": lambda: _manifest(
        indexes=[_entry(name=INDEX.replace("r0000", "r0001"))]
    ),
    "an index over 1 GiB": lambda: _manifest(indexes=[_entry(bytes=(1 << 30) + 1)]),
    "an index without a hash": lambda: _manifest(indexes=[_entry(hash="")]),
    "a pack that reaches outside": lambda: _manifest(packs=[{"name": "../../x", "bytes": 1}]),
    "a pack of another checkpoint": lambda: _manifest(
        packs=[{"name": PACK.replace("a000001", "a000002"), "bytes": 1}]
    ),
    "a pack that is an index": lambda: _manifest(packs=[{"name": INDEX, "bytes": 1}]),
    "a pack of a negative size": lambda: _manifest(packs=[{"name": PACK, "bytes": -1}]),
    "needs that are no text": lambda: _manifest(needs=[[]]),
    "an unknown member": lambda: _manifest(more=1),
    "a base that it does not need": lambda: _manifest(base=[1, 1, "0" * 32]),
    "a need of a base that it has not": lambda: _manifest(needs=["base"]),
    "a base of two values": lambda: _manifest(base=[1, 1], needs=["base"]),
    "a base that is itself": lambda: _manifest(base=[1, 2, "0" * 32], needs=["base"]),
    "a base that is newer": lambda: _manifest(base=[2, 1, "0" * 32], needs=["base"]),
    "a base of a negative step": lambda: _manifest(base=[1, -1, "0" * 32], needs=["base"]),
    "a base without a hash": lambda: _manifest(base=[1, 1, ""], needs=["base"]),
    "a base of nothing": lambda: _manifest(base=None, needs=["base"]),
    "a fidelity that goes without saying": lambda: _manifest(fidelity="exact"),
    "a fidelity that nobody knows": lambda: _manifest(fidelity="roughly", needs=["lossy"]),
    "a fidelity that it does not need": lambda: _manifest(fidelity="moments"),
    "a need of a fidelity that it has not": lambda: _manifest(needs=["lossy"]),
    "needs in another order": lambda: _manifest(
        base=[1, 1, "0" * 32], fidelity="moments", needs=["lossy", "base"]
    ),
    "a need of ranks in another order": lambda: _manifest(
        fidelity="moments", needs=["ranks", "lossy"]
    ),
    "two ranks and no need of them": lambda: _manifest(
        indexes=[_entry(), _entry(name=INDEX.replace("r0000", "r0001"))]
    ),
    "a need that stands twice": lambda: _manifest(base=[1, 1, "0" * 32], needs=["base", "base"]),
}


@pytest.mark.parametrize("what", FORBIDDEN_MANIFESTS)
def test_a_manifest_with_a_valid_seal_is_refused_with(what: str) -> None:
    with pytest.raises(CorruptCheckpoint):
        parse_manifest(seal(FORBIDDEN_MANIFESTS[what]()), MANIFEST)


def test_a_manifest_with_a_base_and_a_loss_is_valid() -> None:
    for base, needs in (([1, 1, "0" * 32], ["base", "lossy"]), (None, ["lossy"])):
        changes = {"fidelity": "moments", "needs": needs} | ({"base": base} if base else {})
        found = parse_manifest(seal(_manifest(**changes)), MANIFEST)
        assert (found.base is None, found.fidelity) == (base is None, "moments")


@pytest.mark.parametrize(
    "changes",
    [{"format": "asymcheck 2"}, {"format": "asymcheck 999999999"}, {"needs": ["deltas"]}],
)
def test_a_newer_manifest_is_intact_and_cannot_be_read_here(changes: dict[str, Any]) -> None:
    with pytest.raises(IncompatibleCheckpoint, match="install"):
        parse_manifest(seal(_manifest(**changes, unknown_here=1)), MANIFEST)


@pytest.mark.parametrize("codec", ["zstd", "0", "blosc2+shuffle.9-x_y", "z" * 40])
def test_a_codec_may_have_any_name_of_the_grammar_and_any_length_stored(codec: str) -> None:
    packs = [{"name": PACK, "bytes": 9}]
    index = parse_index(
        seal(_index(chunks=[_chunk(0, 21, codec=codec, stored=9)], packs=packs)), INDEX
    )
    assert [(c.codec, c.stored_bytes) for c in index.chunks] == [(codec, 9)]


def test_losses_are_read_as_they_were_written() -> None:
    index = parse_index(seal(_index(losses=[["exp_avg", "q8", 0.5, 0, 21]])), INDEX)
    assert index.losses == (Loss("exp_avg", "q8", 0.5, 0.0, 21),)
    assert parse_index(dump_index(index), INDEX) == index


@pytest.mark.parametrize(
    ("piece", "shape"),
    [
        (Piece((10,), 0), (10,)),
        (Piece((2**53,), 2**53 - 10), (10,)),
        (Piece((3, 5, 7), 95), (10,)),
        (Piece((3, 5), (1, 0)), (2, 5)),
        (Piece((1,) * 64, (0,) * 64), (1,) * 64),
        (Piece((), ()), ()),
        (Piece((3, 0), (3, 0)), (0, 0)),
        (Piece((3,), 3), (0,)),
    ],
)
def test_a_piece_is_read_as_it_was_written(piece: Piece, shape: tuple[int, ...]) -> None:
    start = piece.start if isinstance(piece.start, int) else list(piece.start)
    data = seal(_piece(whole=list(piece.whole), start=start, shape=list(shape)))
    index = parse_index(data, INDEX)
    assert [(leaf.piece, leaf.shape) for leaf in index.leaves] == [(piece, shape)]
    assert isinstance(index.leaves[0].piece, Piece)
    assert dump_index(index) == data
    assert index.of_ranks


def test_what_an_index_tells_of_its_base_is_read_as_it_was_written() -> None:
    data = seal(_index(base=[1, 1, "0" * 32], fidelity="moments"))
    index = parse_index(data, INDEX)
    assert (index.base, index.fidelity) == (Base(CheckpointId(1, 1), "0" * 32), "moments")
    assert dump_index(index) == data
    assert index.of_ranks
    assert not parse_index(seal(_index()), INDEX).of_ranks


@settings(max_examples=2 * EXAMPLES)
@given(st.data())
def test_a_piece_that_was_edited_is_inside_its_whole_or_refused(data: st.DataObject) -> None:
    box = _piece(whole=[3, 5], start=[1, 0], shape=[2, 5])
    flat = _piece(whole=[3, 5], start=2)
    found = data.draw(edited(data.draw(st.sampled_from([box, flat]))["leaves"][0]))
    try:
        sealed = seal(_index(leaves=[found.value], aliases={}))
    except (ValueError, TypeError):
        return  # no JSON can say that
    try:
        (leaf,) = parse_index(sealed, INDEX).leaves
    except CorruptCheckpoint:
        return
    if leaf.piece is not None:
        assert flaw(leaf.piece, leaf.shape) is None
        assert leaf.order == ()
        boxes(leaf.piece, leaf.shape)
        uncovered(leaf.piece.whole, [(leaf.piece, leaf.shape)])


def test_an_index_of_another_rank_or_run_under_a_right_name_is_damage() -> None:
    objects = saved()[0]
    value = unseal(objects[INDEX], INDEX)
    for change in ({"run": "other"}, {"world": 2}):
        index = seal({**value, **change})
        store = store_of({**objects, INDEX: index, MANIFEST: manifest_over(index)})
        with pytest.raises(CorruptCheckpoint), open_repository(store).open(AT):
            pass


def test_a_gap_that_is_not_zero_is_damage() -> None:
    objects = saved()[0]
    index = parse_index(objects[INDEX], INDEX)
    first = index.chunks[0]
    pack = bytearray(objects[PACK])
    assert first.stored_bytes % 4096, "there is a gap to damage"
    pack[first.stored_bytes] = 1
    store = store_of({**objects, PACK: bytes(pack)})
    (damage,) = verify(open_repository(store), AT)
    assert "the gap after byte" in damage.why


# --- the state tree ---------------------------------------------------------


def with_tree(tree: Any, leaves: Callable[[list[Leaf]], list[Leaf]] = list) -> MemoryStore:
    """A root whose checkpoint is whole and has another tree: nothing below the state can tell."""
    store = store_of(saved()[0])
    repository = open_repository(store)
    with repository.open(AT) as checkpoint:
        (index,) = checkpoint.indexes
        raw = {leaf.key: Decoding(checkpoint).read_leaf(index, leaf) for leaf in index.leaves}
    text = tree if isinstance(tree, bytes) else json.dumps(tree).encode()
    raw[TREE_KEY] = text
    old = leaves([leaf for leaf in index.leaves if leaf.key != TREE_KEY])
    new = [*old, Leaf(TREE_KEY, "json", (len(text),), 0, len(text))]
    layout = lay_out([len(raw[leaf.key]) for leaf in new])
    image = bytearray(layout.image_bytes)
    placed = []
    for leaf, extent in zip(new, layout.leaves, strict=True):
        image[extent.start : extent.stop] = raw[leaf.key]
        placed.append(
            Leaf(leaf.key, leaf.dtype, leaf.shape, extent.start, extent.nbytes, leaf.order)
        )

    def encode(chunk: Extent) -> Encoded:
        return Encoded(bytes(image[chunk.start : chunk.stop]), "raw")

    at = CheckpointId(2, 5)
    repository.claim(None)
    flushed = flush(store, at, 0, layout.chunks, encode)
    repository.commit(
        Index(
            run=repository.run,
            at=at,
            rank=0,
            world=1,
            created_s=0.0,
            metrics={},
            versions={},
            leaves=tuple(sorted(placed, key=lambda leaf: (leaf.at, leaf.stop))),
            aliases=index.aliases,
            chunks=flushed.chunks,
            packs=flushed.packs,
        )
    )
    return store


@functools.cache
def tree_text() -> bytes:
    repository = open_repository(store_of(saved()[0]))
    with repository.open(AT) as checkpoint:
        (index,) = checkpoint.indexes
        leaf = next(leaf for leaf in index.leaves if leaf.key == TREE_KEY)
        return Decoding(checkpoint).read_leaf(index, leaf)


def leaf_keys() -> list[str]:
    return sorted(leaf.key for leaf in parse_index(saved()[0][INDEX], INDEX).leaves)


def test_a_checkpoint_with_its_own_tree_loads_as_it_was() -> None:
    step, state = restored(with_tree(json.loads(tree_text())))
    assert step == 5
    assert fingerprint(state) == saved()[1][2]


TAGS = [
    "$int", "$float", "$complex", "$bytes", "$bytearray", "$numpy_scalar", "$dtype", "$device",
    "$range", "$slice", "$datetime", "$date", "$time", "$timedelta", "$path", "$enum", "$tuple",
    "$size", "$set", "$frozenset", "$deque", "$dict", "$ordereddict", "$counter", "$defaultdict",
    "$namedtuple", "$dataclass", "$torch_generator", "$random", "$numpy_random_state",
    "$numpy_generator", "$leaf", "$unknown", "$", "device",
]  # fmt: skip
TREE_TEXTS = [*TEXTS, *leaf_keys(), "cpu", "cuda:99", "0x10", "00", "PCG64", "MT19937", "os:system"]
TREE_SCALARS = st.one_of(SCALARS, st.sampled_from(TREE_TEXTS))
TREE_WILD = st.recursive(
    TREE_SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(sorted({*TAGS, "a", "0"})), inner, max_size=2),
    ),
    max_leaves=6,
)


@pytest.mark.parametrize(
    ("path", "value"),
    [(["items"], [None]), (["items", "big", "key"], None), (["items", "big"], []), (["rng"], 1)],
)
def test_a_tree_with_something_else_in_a_place_is_damage(path: list[str], value: object) -> None:
    tree = json.loads(tree_text())
    *above, last = path
    functools.reduce(lambda v, key: v[key], above, tree)[last] = value
    with pytest.raises(CorruptCheckpoint):
        restored(with_tree(tree), step=5)


@settings(max_examples=3 * EXAMPLES)
@given(st.data())
def test_a_tree_that_was_edited_and_sealed_again_is_loaded_or_refused(
    data: st.DataObject,
) -> None:
    store = with_tree(data.draw(edited(json.loads(tree_text()), TREE_WILD)).value)
    rng = torch.get_rng_state(), np.random.get_state(), random.getstate()
    for options in ({}, {"strict": False, "dtype_policy": "cast"}):
        tolerated(lambda options=options: restored(store, step=5, **options))
    torch.set_rng_state(rng[0])
    np.random.set_state(rng[1])
    random.setstate(rng[2])


@settings(max_examples=EXAMPLES)
@given(st.data())
def test_leaves_of_other_types_and_shapes_are_loaded_or_refused(data: st.DataObject) -> None:
    dtypes = st.sampled_from(
        ["float32", "int64", "bool", "complex64", "uint8", "float8_e4m3fn", "bits8", "quint8",
         "qint32", "numpy:<f4", "numpy:|O", "numpy:<M8[ns]", "numpy:|V4", "numpy:<U1", "numpy:",
         "numpy:(2,)<f4", "numpy:i4,f4", "Tensor", "strided", "float", "", "nn"]
    )  # fmt: skip
    shapes = st.lists(st.sampled_from([0, 1, 2, 3, 4, 12, 2**31, 2**52]), max_size=4)

    def change(leaves: list[Leaf]) -> list[Leaf]:
        at = data.draw(st.integers(0, len(leaves) - 1))
        old = leaves[at]
        dtype = data.draw(dtypes | st.just(old.dtype))
        shape = tuple(data.draw(shapes | st.just(list(old.shape))))
        order = tuple(data.draw(st.permutations(range(len(shape))) | st.just([])))
        leaves[at] = Leaf(old.key, dtype, shape, 0, old.nbytes, order)
        return leaves

    store = with_tree(json.loads(tree_text()), change)
    for options in ({}, {"strict": False, "dtype_policy": "cast"}):
        tolerated(lambda options=options: restored(store, step=5, **options))


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"{}", b"null", b"\xff", b'{"items":1}'])
def test_what_is_no_tree_is_damage_and_the_step_before_is_loaded(text: bytes) -> None:
    store = with_tree(text)
    with pytest.raises(CorruptCheckpoint):
        restored(store, step=5)


@pytest.mark.parametrize("depth", [101, 900, 990, 1000, 5000, 100_000])
def test_a_tree_that_is_nested_too_deeply_is_damage(depth: int) -> None:
    text = tree_text().decode()
    for opening, closing in (("[", "]"), ('{"$tuple":[', "]}"), ('{"a":', "}")):
        deep = opening * depth + "1" + closing * depth
        changed, count = re.subn(r'"text","[^"]*"', lambda _, deep=deep: f'"text",{deep}', text)
        assert count == 1
        failure = tolerated(
            lambda changed=changed: restored(with_tree(changed.encode()), step=5, strict=False)
        )
        if depth >= 5000:
            assert isinstance(failure, CorruptCheckpoint)
