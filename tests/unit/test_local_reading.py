"""Reading past the page cache gives what reading through it gives, on whatever file system."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from asymcheck import Checkpointer
from asymcheck.errors import StoreError
from asymcheck.storage.local import LocalStore
from asymcheck.storage.local_reading import OpenFile
from asymcheck.storage.store import Readable, ReadsOnce

MiB = 1 << 20
NBYTES = 11 * MiB + 4099


@pytest.fixture(scope="module")
def content() -> bytes:
    return torch.randint(256, (NBYTES,), dtype=torch.uint8).numpy().tobytes()


@pytest.fixture
def opened(tmp_path: Path, content: bytes) -> Iterator[Readable]:
    store = LocalStore(tmp_path)
    store.write("object", [content])
    with store.open("object") as found:
        yield found


def once(opened: Readable, offset: int, nbytes: int) -> bytes:
    assert isinstance(opened, ReadsOnce)
    into = bytearray(nbytes)
    opened.read_once(offset, memoryview(into))
    return bytes(into)


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [
        (0, NBYTES),
        (4096, 4 * MiB),
        (4097, 4 * MiB),
        (1, 5 * MiB - 1),
        (6 * MiB + 5, NBYTES - 6 * MiB - 5),
        (NBYTES - 10, 10),
        (NBYTES - 2 * MiB, 2 * MiB),
        (77, 0),
    ],
)
def test_any_range_is_read_once_as_it_is_read_again(
    opened: Readable, content: bytes, offset: int, nbytes: int
) -> None:
    assert once(opened, offset, nbytes) == content[offset : offset + nbytes]
    again = bytearray(nbytes)
    opened.readinto(offset, memoryview(again))
    assert again == content[offset : offset + nbytes]


def test_a_range_past_the_end_is_refused(opened: Readable) -> None:
    with pytest.raises(StoreError, match=f"ended at byte {NBYTES}, expected"):
        once(opened, NBYTES - 2 * MiB, 2 * MiB + 1)


def test_a_file_that_was_removed_meanwhile_is_read_to_its_end(
    tmp_path: Path, content: bytes
) -> None:
    store = LocalStore(tmp_path)
    store.write("object", [content])
    with store.open("object") as opened:
        (tmp_path / "object").unlink()
        assert once(opened, 0, NBYTES) == content


def test_a_file_system_without_direct_reads_is_read_through_the_cache(
    opened: Readable, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    assert once(opened, 3, 9 * MiB) == content[3 : 3 + 9 * MiB]


def test_a_direct_read_that_fails_or_comes_short_is_finished_through_the_cache(
    opened: Readable, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen = os.preadv, []

    def fickle(fd: int, buffers: list[memoryview], offset: int) -> int:
        seen.append(fd)
        if len(seen) == 2:
            return real(fd, [buffers[0][:4096]], offset)
        if len(seen) == 4:
            raise OSError(22, "Invalid argument")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", fickle)
    assert once(opened, 0, NBYTES) == content
    assert len(seen) >= 4


def test_what_only_one_process_restores_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = {"w": torch.arange(MiB, dtype=torch.float32)}
    with Checkpointer(tmp_path, state={"live": live}, persist="thread") as checkpointer:
        checkpointer.save(1)
    read: list[int] = []
    real = OpenFile.read_once

    def watched(self: OpenFile, offset: int, into: memoryview) -> None:
        read.append(len(into))
        real(self, offset, into)

    monkeypatch.setattr(OpenFile, "read_once", watched)
    live["w"].zero_()
    with Checkpointer(tmp_path, state={"live": live}, read_only=True) as checkpointer:
        checkpointer.restore()
    assert torch.equal(live["w"], torch.arange(MiB, dtype=torch.float32))
    assert sum(read) >= 4 * MiB
