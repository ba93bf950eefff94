"""The promises of a store as tests, for every package that brings a store.

It subclasses the suite:

    class TestMyStore(StoreSuite):
        def new_store(self, folder):
            return MyStore(folder)

Needs pytest. See ``asymcheck.storage.store`` for the promises.
"""

# ruff: noqa: D102  the names of the tests say what they hold the store to

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import pytest

from asymcheck.errors import ObjectNotFound, StoreError
from asymcheck.storage.store import Entry, Store, open_store, read_all
from asymcheck.testing.children import TIMEOUT_S, Child

_RACERS = 8
_PART_BYTES = 1 << 16
_BAD_NAMES = (
    "",
    "/",
    "/etc/passwd",
    "..",
    "../outside",
    "a/../../outside",
    "a/./b",
    "a//b",
    "a/",
    ".hidden",
    "a/.hidden",
    "a\\b",
    "a b",
    "a\0b",
    "a\nb",
    "é",
    "C:a",
    "-option",
    "a" * 202,
)


class _Broken(Exception):
    pass


class StoreSuite:
    """What every store must do. Each test gets a fresh, empty and prepared one.

    Attributes:
        shared_between_processes: Whether another process that opens ``url`` meets the same
            objects.
    """

    shared_between_processes: ClassVar[bool] = True

    @abstractmethod
    def new_store(self, folder: Path) -> Store:
        """A new, empty store.

        Args:
            folder: An empty directory that belongs to the test.
        """
        raise NotImplementedError

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        """The store under test."""
        found = self.new_store(tmp_path)
        found.prepare()
        return found

    # --- whole or not at all ------------------------------------------------

    def test_an_object_reads_back_as_it_was_written(self, store: Store) -> None:
        assert store.write("folder/a.bin", [b"one", bytearray(b"two"), memoryview(b"three")]) == 11
        assert read_all(store, "folder/a.bin") == b"onetwothree"
        assert list(store.list()) == [Entry("folder/a.bin", 11)]

    def test_an_empty_object_is_an_object(self, store: Store) -> None:
        assert store.write("none", []) == 0
        assert store.write("empty", [b"", b""]) == 0
        assert store.create("created", b"") is True
        assert {n: read_all(store, n) for n in ("none", "empty", "created")} == dict.fromkeys(
            ("none", "empty", "created"), b""
        )
        assert sorted(store.list()) == [Entry(n, 0) for n in ("created", "empty", "none")]

    def test_many_parts_of_a_generator_may_share_one_buffer(self, store: Store) -> None:
        # A part is borrowed: it is read before the next one is asked for.
        buffer, parts = bytearray(_PART_BYTES), 300

        def produce() -> Iterator[memoryview]:
            for i in range(parts):
                buffer[:] = bytes([i % 251]) * _PART_BYTES
                yield memoryview(buffer)

        assert store.write("big", produce()) == parts * _PART_BYTES
        with store.open("big") as opened:
            assert opened.nbytes == parts * _PART_BYTES
            into = bytearray(_PART_BYTES)
            for i in range(parts):
                opened.readinto(i * _PART_BYTES, memoryview(into))
                assert into == bytes([i % 251]) * _PART_BYTES

    def test_parts_of_wider_elements_count_in_bytes(self, store: Store) -> None:
        wide = memoryview(bytes(range(64))).cast("i")
        assert store.write("wide", [wide, wide.cast("B").cast("i", (4, 4))]) == 128
        assert read_all(store, "wide") == bytes(range(64)) * 2

    def test_an_object_is_not_visible_before_its_last_part(self, store: Store) -> None:
        seen: list[list[Entry]] = []

        def produce() -> Iterator[bytes]:
            yield b"first"
            seen.append(list(store.list()))
            with pytest.raises(ObjectNotFound), store.open("late"):
                pass
            yield b"second"

        store.write("late", produce())
        assert seen == [[]]
        assert read_all(store, "late") == b"firstsecond"

    @pytest.mark.parametrize("there", [True, False])
    def test_a_write_that_fails_leaves_what_was_there(self, store: Store, there: bool) -> None:
        if there:
            store.write("kept/a", [b"old"])
        store.write("kept/other", [b"other"])

        def produce() -> Iterator[bytes]:
            yield b"new" * 1000
            raise _Broken

        with pytest.raises(_Broken):
            store.write("kept/a", produce())
        expected = {"kept/other": b"other", **({"kept/a": b"old"} if there else {})}
        assert {e.name: read_all(store, e.name) for e in store.list()} == expected
        store.write("kept/a", [b"newer"])
        assert read_all(store, "kept/a") == b"newer"

    def test_a_write_replaces_and_an_open_object_stays_what_it_was(self, store: Store) -> None:
        store.write("a", [b"old and long"])
        with store.open("a") as opened:
            assert store.write("a", [b"new"]) == 3
            if store.capabilities.reads_survive_delete:
                into = bytearray(opened.nbytes)
                opened.readinto(0, memoryview(into))
                assert into == b"old and long"
        assert read_all(store, "a") == b"new"
        assert list(store.list()) == [Entry("a", 3)]

    # --- create -------------------------------------------------------------

    def test_create_never_replaces(self, store: Store) -> None:
        assert store.create("folder/a", b"first") is True
        assert store.create("folder/a", b"second") is False
        store.write("b", [b"written"])
        assert store.create("b", b"created") is False
        assert read_all(store, "folder/a") == b"first"
        assert read_all(store, "b") == b"written"

    def test_one_of_many_threads_creates(self, store: Store) -> None:
        gate = threading.Barrier(_RACERS)

        def race(racer: int, name: str) -> bool:
            gate.wait(TIMEOUT_S)
            return store.create(name, bytes([racer]) * 100)

        for attempt in range(10):
            name = f"attempts/{attempt:06d}"
            with ThreadPoolExecutor(_RACERS) as pool:
                jobs = [pool.submit(race, racer, name) for racer in range(_RACERS)]
                won = [job.result(TIMEOUT_S) for job in jobs]
            assert won.count(True) == 1
            assert read_all(store, name) == bytes([won.index(True)]) * 100

    def test_one_of_many_processes_creates(self, store: Store) -> None:
        if not self.shared_between_processes:
            assert store.capabilities.durability == "none"
            return
        names = [f"attempts/{i:06d}" for i in range(10)]

        def race(racer: int) -> Callable[[Callable[[object], None]], None]:
            def run(say: Callable[[object], None]) -> None:
                mine = open_store(store.url)
                say([mine.create(name, bytes([racer]) * 100) for name in names])

            return run

        children = [Child(race(racer)) for racer in range(4)]
        won = [child.wait().check()[0] for child in children]
        for name, results in zip(names, zip(*won, strict=True), strict=True):
            assert results.count(True) == 1
            assert read_all(store, name) == bytes([results.index(True)]) * 100

    # --- reading ------------------------------------------------------------

    def test_ranges_are_read_in_any_order(self, store: Store) -> None:
        data = bytes(range(256)) * 40
        store.write("a", [data])
        with store.open("a") as opened:
            assert opened.nbytes == len(data)
            for start, stop in ((9000, 9100), (0, 1), (10239, 10240), (17, 10000), (5, 5)):
                into = bytearray(stop - start)
                opened.readinto(start, memoryview(into))
                assert into == data[start:stop]

    def test_a_range_beyond_the_end_is_an_error(self, store: Store) -> None:
        store.write("a", [b"short"])
        with store.open("a") as opened:
            for offset, nbytes in ((0, 6), (4, 2), (5, 1), (1000, 1), (1 << 52, 8)):
                with pytest.raises(StoreError):
                    opened.readinto(offset, memoryview(bytearray(nbytes)))
            into = bytearray(5)
            opened.readinto(0, memoryview(into))
            assert into == b"short"

    def test_what_is_not_there_cannot_be_opened(self, store: Store) -> None:
        store.write("folder/a", [b"a"])
        for name in ("b", "folder/b", "folder", "other/a", "folder/a/b"):
            with pytest.raises(ObjectNotFound), store.open(name):
                pass

    def test_several_threads_read_one_open_object(self, store: Store) -> None:
        data = bytes(range(256)) * 256
        store.write("a", [data])
        with store.open("a") as opened:

            def read(start: int) -> bool:
                into = bytearray(4096)
                opened.readinto(start, memoryview(into))
                return bool(into == data[start : start + 4096])

            with ThreadPoolExecutor(4) as pool:
                assert all(pool.map(read, range(0, 61440, 512), timeout=TIMEOUT_S))

    # --- listing ------------------------------------------------------------

    def test_a_prefix_is_a_folder_and_no_part_of_a_name(self, store: Store) -> None:
        for name in ("step-1/a", "step-1/deep/b", "step-10/c", "step-1.d", "e"):
            store.write(name, [b"x"])
        assert {e.name for e in store.list("step-1")} == {"step-1/a", "step-1/deep/b"}
        assert {e.name for e in store.list("step-1/deep")} == {"step-1/deep/b"}
        for empty in ("step", "step-2", "e", "step-1/a", "none/at/all"):
            assert list(store.list(empty)) == []
        assert len(list(store.list())) == 5

    def test_any_plain_name_can_be_used_and_is_listed(self, store: Store) -> None:
        names = [
            "tmp/a",
            "temp",
            "trash/x",
            "lost+found".replace("+", "_"),
            "A.b-c_d",
            "0",
            "a" * 201,
        ]
        names += ["tmp.d/tmp", "/".join("abcdefgh")]
        for name in names:
            store.write(name, [name.encode()])
        store.sweep()
        assert {e.name: read_all(store, e.name) for e in store.list()} == {
            name: name.encode() for name in names
        }

    # --- names --------------------------------------------------------------

    @pytest.mark.parametrize("name", _BAD_NAMES)
    def test_a_name_that_could_escape_is_refused_everywhere(self, store: Store, name: str) -> None:
        with pytest.raises(StoreError):
            store.write(name, [b"x"])
        with pytest.raises(StoreError):
            store.create(name, b"x")
        with pytest.raises(StoreError), store.open(name):
            pass
        with pytest.raises(StoreError):
            store.delete(name)
        if name:
            with pytest.raises(StoreError):
                list(store.list(name))
        assert list(store.list()) == []

    # --- removing -----------------------------------------------------------

    def test_deleting_is_final_and_can_be_repeated(self, store: Store) -> None:
        for name in ("folder/a", "folder/b", "c"):
            store.write(name, [b"x"])
        for name in ("folder/a", "folder/a", "never", "no/such", "folder", "c/below"):
            store.delete(name)
        assert {e.name for e in store.list()} == {"folder/b", "c"}
        store.delete("folder/b")
        store.write("folder/b", [b"again"])
        assert read_all(store, "folder/b") == b"again"

    def test_an_open_object_outlives_its_deletion_where_that_is_claimed(self, store: Store) -> None:
        store.write("folder/a", [b"still here"])
        with store.open("folder/a") as opened:
            store.delete("folder/a")
            assert list(store.list()) == []
            into = bytearray(10)
            if store.capabilities.reads_survive_delete:
                opened.readinto(0, memoryview(into))
                assert into == b"still here"
        with pytest.raises(ObjectNotFound), store.open("folder/a"):
            pass

    def test_a_sweep_removes_nothing_that_was_written(self, store: Store) -> None:
        store.write("folder/a", [b"a"])
        store.create("b", b"b")
        with pytest.raises(_Broken):
            store.write("c", _break_after(b"c"))
        store.sweep()
        assert store.sweep() == 0
        assert {e.name for e in store.list()} == {"folder/a", "b"}
        store.write("c", [b"c"])
        assert read_all(store, "c") == b"c"

    # --- several at once ----------------------------------------------------

    def test_threads_write_different_names_at_once(self, store: Store) -> None:
        def work(worker: int) -> None:
            for i in range(20):
                store.write(f"w{worker}/{i}", [bytes([worker, i])] * 50)
                if i % 2:
                    store.delete(f"w{worker}/{i - 1}")

        with ThreadPoolExecutor(_RACERS) as pool:
            for job in [pool.submit(work, worker) for worker in range(_RACERS)]:
                job.result(TIMEOUT_S)
        expected = {
            f"w{w}/{i}": bytes([w, i]) * 50 for w in range(_RACERS) for i in range(1, 20, 2)
        }
        assert {e.name: read_all(store, e.name) for e in store.list()} == expected

    def test_of_two_writes_to_one_name_one_stands_whole(self, store: Store) -> None:
        def work(worker: int) -> None:
            for _ in range(10):
                store.write("same/name", [bytes([worker])] * 1000)
                assert len(set(read_all(store, "same/name"))) == 1

        with ThreadPoolExecutor(4) as pool:
            for job in [pool.submit(work, worker) for worker in range(4)]:
                job.result(TIMEOUT_S)
        assert len(read_all(store, "same/name")) == 1000

    # --- the store itself ---------------------------------------------------

    def test_its_url_opens_the_same_medium(self, store: Store) -> None:
        store.write("folder/a", [b"a"])
        again = open_store(store.url)
        assert again.url == store.url
        assert again.capabilities == store.capabilities
        assert read_all(again, "folder/a") == b"a"
        again.write("b", [b"b"])
        assert read_all(store, "b") == b"b"

    def test_preparing_again_changes_nothing(self, store: Store) -> None:
        store.write("a", [b"a"])
        store.prepare()
        assert read_all(store, "a") == b"a"

    def test_it_says_how_much_room_is_left_or_that_it_cannot(self, store: Store) -> None:
        free = store.free_bytes()
        assert free is None or free > 0


def _break_after(*parts: bytes) -> Iterator[bytes]:
    yield from parts
    raise _Broken
