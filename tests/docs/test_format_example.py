"""docs/format.md against the code: its example byte for byte, its tables name for name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import asymcheck
from asymcheck.codec import table
from asymcheck.decoding import verify
from asymcheck.device import items, optimizer
from asymcheck.device.tree import _BUILDERS
from asymcheck.planning.layout import CHUNK_BYTES, SMALL_BYTES, MiB
from asymcheck.planning.pieces import MAX_DIMENSIONS, MAX_ELEMENTS
from asymcheck.planning.retention import CheckpointId
from asymcheck.recovery import CheckpointWarning
from asymcheck.storage.flush import PACK_BYTES
from asymcheck.storage.index import CODEC, Index, dump_index
from asymcheck.storage.manifest import FEATURES, FORMAT_LINE, Base, make_manifest
from asymcheck.storage.memory import MemoryStore
from asymcheck.storage.names import MAX_RANK
from asymcheck.storage.repository import open_repository
from asymcheck.storage.sealed import MAX_SEALED_BYTES
from asymcheck.storage.store import read_all

FORMAT_DOC = Path(__file__).parents[2] / "docs" / "format.md"
TEXT = FORMAT_DOC.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def store() -> MemoryStore:
    (code,) = re.findall(r"^```python\n(.*?)^```", TEXT, re.S | re.M)
    names: dict[str, Any] = {}
    exec(compile(code, str(FORMAT_DOC), "exec"), names)
    return names["store"]


def _shown() -> dict[str, list[str]]:
    blocks = re.findall(r"^```text (\S+)\n(.*?)^```", TEXT, re.S | re.M)
    return {name: body.splitlines() for name, body in blocks}


def _hex_dump(data: bytes) -> list[str]:
    lines = []
    for at in range(0, len(data), 16):
        row = data[at : at + 16]
        digits = " ".join(row[i : i + 4].hex() for i in range(0, len(row), 4))
        text = "".join(chr(b) if 32 <= b < 127 else "." for b in row)
        lines.append(f"{at:08x}  {digits:<35}  {text}")
    return lines


def test_the_example_shows_every_object_byte_for_byte(store: MemoryStore) -> None:
    shown = _shown()
    assert set(shown) == {e.name for e in store.list()}
    for name, lines in shown.items():
        data = read_all(store, name)
        if name.endswith(".pack"):
            assert lines == _hex_dump(data)
        else:
            assert "".join(lines) + "\n" == data.decode("ascii")
        assert f"`{name}`, {len(data)} bytes:" in TEXT


def test_the_example_is_a_checkpoint_that_verifies_and_restores(store: MemoryStore) -> None:
    repository = open_repository(store)
    assert list(repository.survey().committed) == [CheckpointId(1, 7)]
    assert list(verify(repository, CheckpointId(1, 7))) == []
    weight = torch.zeros(2, 3)
    reader = asymcheck.Checkpointer(store, state={"w": weight}, read_only=True)
    with pytest.warns(CheckpointWarning, match="no python state was saved"):
        assert reader.restore() == 7
    assert weight.tolist() == [[1, 2, 3], [4, 5, 6]]


@contextmanager
def _flipped(store: MemoryStore, name: str, at: int) -> Iterator[None]:
    whole = read_all(store, name)
    store.write(name, [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]])
    try:
        yield
    finally:
        store.write(name, [whole])


def test_a_flipped_bit_anywhere_in_the_example_is_noticed(store: MemoryStore) -> None:
    at = CheckpointId(1, 7)
    repository = open_repository(store)
    for entry in list(store.list("step-00000007")):
        for offset in range(entry.nbytes):
            with _flipped(store, entry.name, offset):
                (damage,) = verify(repository, at)
            assert entry.name in f"{damage.where} {damage.why}"
    assert list(verify(repository, at)) == []


def _table(heading: str, first_row: str) -> list[str]:
    """What stands between backquotes in the first column of a table."""
    section = TEXT[TEXT.index(f"\n{heading}\n") :]
    table = section[section.index(first_row) :].partition("\n\n")[0]
    cells = [row.split("|")[1] for row in table.splitlines()[2:]]
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


@pytest.mark.parametrize(
    ("heading", "name"),
    [
        ("## Index", "step-00000007/a000001-r0000.json"),
        ("## Manifest", "step-00000007/a000001-MANIFEST.json"),
        ("## FORMAT, RUN.json, attempts", "attempts/000001"),
    ],
)
def test_each_member_of_a_sealed_object_stands_in_its_table_in_order(
    store: MemoryStore, heading: str, name: str
) -> None:
    assert [*_table(heading, "| member |"), "hash"] == list(json.loads(read_all(store, name)))


def test_each_kind_of_item_stands_in_the_table_and_no_other() -> None:
    kinds = {
        value.kind
        for value in (*vars(items).values(), *vars(optimizer).values())
        if isinstance(value, type) and isinstance(getattr(value, "kind", None), str)
    }
    assert len(kinds) > 3
    assert set(_table("## State tree", "| `kind` of an item |")) == kinds


def test_each_codec_stands_in_the_table_with_what_it_needs_and_no_other() -> None:
    section = TEXT[TEXT.index("\n## Codecs\n") :]
    rows = section[section.index("| `codec` |") :].partition("\n\n")[0].splitlines()[2:]
    stated = {}
    for row in rows:
        names, lossless, base, _ = row.strip("|").split("|")
        for name in re.findall(r"`([^`]+)`", names):
            stated[name] = (lossless.strip() == "yes", base.strip().startswith("yes"))
    assert stated == {c.name: (c.lossless, c.needs_base) for c in table.CODECS}
    assert all(CODEC.match(name) for name in stated)


def test_each_optional_member_of_a_manifest_stands_in_its_table_in_order() -> None:
    at = CheckpointId(1, 7)
    index = Index("r", at, 0, 1, 0.0, {}, {}, (), {}, (), ())
    base = Base(CheckpointId(1, 6), "0" * 32)
    whole = make_manifest([(index, b"")], base=base, fidelity="moments")
    plain = make_manifest([(index, b"")])
    more = [name for name in json.loads(whole) if name not in json.loads(plain)]
    assert _table("## Manifest", "| optional member |") == more
    assert {"base", "lossy", "excp", "ranks"} == FEATURES
    for name in FEATURES:
        assert f"| 1, `needs` `{name}` |" in TEXT


def test_each_optional_member_of_an_index_stands_in_its_table_in_order() -> None:
    at = CheckpointId(1, 7)
    plain = Index("r", at, 0, 1, 0.0, {}, {}, (), {}, (), ())
    whole = replace(plain, base=Base(CheckpointId(1, 6), "0" * 32), fidelity="moments")
    silent, telling = (json.loads(dump_index(index)) for index in (plain, whole))
    more = [name for name in telling if name not in silent]
    assert _table("## Index", "| optional member |") == more


def test_each_tag_of_the_state_tree_stands_in_the_table_and_no_other() -> None:
    documented = set(_table("## State tree", "| tag | body | value |"))
    assert documented == set(_BUILDERS) | {"$leaf"}


def test_the_limits_that_it_states_are_those_of_the_code() -> None:
    assert FORMAT_LINE == "asymcheck 1\n"
    assert (64 << 10, 16 * MiB, 1 << 30) == (SMALL_BYTES, CHUNK_BYTES, PACK_BYTES)
    assert (MAX_RANK, MAX_SEALED_BYTES) == (9999, 1 << 30)
    for stated in ("| rank | 0 to 9999 |", "| sealed object | 1 GiB |", "| pack | 1 GiB of the"):
        assert stated in TEXT
    assert "| chunk | 16 MiB in the image, 32 MiB stored |" in TEXT
    assert (MAX_DIMENSIONS, MAX_ELEMENTS) == (64, 1 << 53)
    assert "| whole | 64 dimensions, 2^53 elements |" in TEXT
