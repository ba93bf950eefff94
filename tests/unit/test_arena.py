"""Slots of shared memory: bounded, reused, never lost, and never torn out of living hands."""

from __future__ import annotations

import errno
import os
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from asymcheck.errors import CaptureError
from asymcheck.handover import left_over
from asymcheck.memory import arena as arena_module
from asymcheck.memory.arena import (
    SHARED_MEMORY,
    Arena,
    NoRoom,
    Slot,
    SlotState,
    slot_name,
    slots_of,
)
from asymcheck.memory.process import ProcessId
from asymcheck.planning.layout import PAGE_BYTES, MiB
from asymcheck.testing.children import Child, Say

SMALL = 100_000


class Told(list[str]):
    def __call__(self, message: str) -> None:
        self.append(message)


@pytest.fixture
def run() -> Iterator[str]:
    name = uuid.uuid4().hex
    yield name
    left = list(slots_of(SHARED_MEMORY, name))
    for path in left:
        path.unlink()
    assert not left, "the test left slots behind"


def _arena(run: str, slots: int = 1, told: Told | None = None, *where: Path) -> Arena:
    return Arena(run, 0, slots, Told() if told is None else told, where or (SHARED_MEMORY, Path()))


def _full(*refused: Path) -> object:
    """A ``Slot.create`` for which those directories have no room."""
    create = Slot.create.__func__  # type: ignore[attr-defined]

    def creating(cls: type[Slot], directory: Path, *rest: object) -> Slot:
        if directory in refused:
            raise OSError(errno.ENOSPC, "no space left")
        return create(cls, directory, *rest)

    return classmethod(creating)


# --- a slot -----------------------------------------------------------------


def test_a_slot_is_a_private_file_whose_room_is_really_there(run: str) -> None:
    slot = Slot.create(SHARED_MEMORY, slot_name(run, 0, 1), SMALL, 100)
    assert slot.path is not None
    found = slot.path.stat()
    assert found.st_mode & 0o777 == 0o600
    assert found.st_blocks * 512 >= SMALL
    slot.close(unlink=True)
    assert not slot.path.exists()


def test_what_is_put_into_a_slot_is_seen_by_another_mapping(run: str) -> None:
    slot = Slot.create(SHARED_MEMORY, slot_name(run, 0, 1), SMALL, 100)
    assert slot.path is not None
    slot.begin(5000, 3, b"meta")
    slot.image[:5000] = b"i" * 5000
    slot.canaries[:] = b"can"
    other = Slot.open(slot.path)
    assert other.owner == ProcessId.of(os.getpid())
    assert other.state is SlotState.FILLING
    assert bytes(other.image) == b"i" * 5000 + bytes(2 * PAGE_BYTES - 5000)
    assert bytes(other.canaries) == b"can"
    assert other.meta == b"meta"
    other.close(unlink=False)
    slot.close(unlink=True)


def test_beginning_again_leaves_nothing_of_the_old_content_behind_the_new_one(run: str) -> None:
    slot = Slot.create(SHARED_MEMORY, slot_name(run, 0, 1), SMALL, 100)
    slot.begin(9000, 0, b"old")
    slot.image[:] = b"x" * len(slot.image)
    slot.copied_bytes = 9000
    slot.begin(5000, 0, b"new")
    assert slot.copied_bytes == 0
    assert bytes(slot.image[5000:]) == bytes(len(slot.image) - 5000)
    slot.close(unlink=True)


def test_a_file_of_anybody_else_or_with_another_mode_is_not_opened(run: str) -> None:
    path = SHARED_MEMORY / slot_name(run, 0, 1)
    path.write_bytes(bytes(2 * PAGE_BYTES))
    path.chmod(0o644)
    with pytest.raises(PermissionError):
        Slot.open(path)
    path.chmod(0o600)
    path.write_bytes(b"no slot" * 1000)
    with pytest.raises(ValueError, match="not an asymcheck slot"):
        Slot.open(path)
    path.unlink()
    path.symlink_to("/etc/passwd")
    with pytest.raises(OSError, match="symbolic"):
        Slot.open(path)
    path.unlink()


def test_a_slot_with_views_out_can_be_closed_and_the_views_stay_good(run: str) -> None:
    slot = Slot.create(SHARED_MEMORY, slot_name(run, 0, 1), SMALL, 100)
    slot.begin(100, 0, b"")
    view = slot.image
    slot.close(unlink=True)
    view[0] = 7
    assert view[0] == 7


def test_a_slot_that_a_living_process_is_making_is_nobodys_left_over(
    run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another start of the job looks while the room is being reserved."""
    seen: list[object] = []
    reserve = os.posix_fallocate

    def looking(fd: int, offset: int, size: int) -> None:
        reserve(fd, offset, size)
        seen.append(left_over(run))

    monkeypatch.setattr(os, "posix_fallocate", looking)
    slot = Slot.create(SHARED_MEMORY, slot_name(run, 0, 1), SMALL, 100)
    assert seen == [[]]
    slot.close(unlink=True)


@pytest.mark.parametrize("size", [0, 10, PAGE_BYTES, 2 * PAGE_BYTES])
def test_what_a_dead_process_was_making_is_left_over_however_far_it_came(
    run: str, size: int
) -> None:
    def die(say: Say) -> None:
        path = SHARED_MEMORY / slot_name(run, 0, 1)
        path.touch(0o600)
        os.truncate(path, size)

    Child(die).wait().check()
    assert [x.is_sealed for x in left_over(run)] == [False]
    for x in left_over(run):
        x.path.unlink()


# --- an arena ---------------------------------------------------------------


def test_a_slot_is_made_once_and_used_again(run: str) -> None:
    arena = _arena(run, 2)
    first = arena.reserve(SMALL, 100)
    assert first is not None
    arena.free(first)
    assert arena.reserve(SMALL, 100) is first
    second = arena.reserve(SMALL, 100)
    assert second is not None
    assert second is not first
    assert len(list(slots_of(SHARED_MEMORY, run))) == 2
    assert arena.reserve(SMALL, 100, timeout_s=0.0) is None
    arena.free(first)
    arena.free(second)
    arena.close()


def test_every_slot_shows_the_step_that_training_is_at(run: str) -> None:
    arena = _arena(run, 2)
    slots = [arena.reserve(SMALL, SMALL) for _ in range(2)]
    arena.beat(7)
    for path in slots_of(SHARED_MEMORY, run):
        seen = Slot.open(path)
        assert seen.beat == 7
        seen.close(unlink=False)
    for slot in slots:
        assert slot is not None
        arena.free(slot)
    arena.close()
    arena.beat(8)  # nobody is left to be told


def test_a_slot_is_used_again_though_the_state_grew_a_little(run: str) -> None:
    """The description holds times and metrics: it is never twice of one length."""
    arena = _arena(run)
    slot = arena.reserve(SMALL, 5000)
    assert slot is not None
    arena.free(slot)
    assert arena.reserve(SMALL + 20_000, 5000 + 20_000) is slot
    arena.free(slot)
    arena.close()


def test_a_state_that_outgrew_its_slot_gets_another_and_the_old_one_goes(run: str) -> None:
    arena = _arena(run)
    slot = arena.reserve(SMALL, 100)
    assert slot is not None
    arena.free(slot)
    larger = arena.reserve(SMALL + 8 * MiB, 100)
    assert larger is not None
    assert larger.token != slot.token
    assert list(slots_of(SHARED_MEMORY, run)) == [larger.path]
    assert arena.tokens() == [larger.token]
    arena.free(larger)
    arena.close()


def test_who_waits_for_a_slot_gets_the_one_that_another_thread_frees(run: str) -> None:
    arena = _arena(run)
    slot = arena.reserve(SMALL, 100)
    assert slot is not None
    got: list[Slot | None] = []
    waiting = threading.Thread(target=lambda: got.append(arena.reserve(SMALL, 100, 60.0)))
    waiting.start()
    arena.free(slot)
    waiting.join(60)
    assert got == [slot]
    arena.free(slot)
    arena.close()


def test_closing_keeps_what_is_under_way_and_removes_it_once_it_is_free(run: str) -> None:
    arena = _arena(run, 2)
    busy, idle = arena.reserve(SMALL, 100), arena.reserve(SMALL, 100)
    assert busy is not None
    assert idle is not None
    arena.free(idle)
    arena.close()
    assert list(slots_of(SHARED_MEMORY, run)) == [busy.path]
    arena.free(busy)
    assert list(slots_of(SHARED_MEMORY, run)) == []


def test_two_arenas_of_one_run_in_one_process_do_not_meet(run: str) -> None:
    """A notebook runs its cell again and makes a second Checkpointer on the same root."""
    one, two = _arena(run), _arena(run)
    first, second = one.reserve(SMALL, 100), two.reserve(SMALL, 100)
    assert first is not None
    assert second is not None
    assert first.path != second.path
    for arena, slot in ((one, first), (two, second)):
        arena.free(slot)
        arena.close()


def test_a_left_over_with_the_number_of_this_process_is_in_nobodys_way(run: str) -> None:
    """In a container each start of a job has the same process number."""
    for serial in range(1, 60):
        (SHARED_MEMORY / slot_name(run, 0, serial)).touch(0o600)
    arena = _arena(run)
    slot = arena.reserve(SMALL, 100)
    assert slot is not None
    arena.free(slot)
    arena.close()
    for path in slots_of(SHARED_MEMORY, run):
        path.unlink()


# --- too little room --------------------------------------------------------


def test_without_room_in_shared_memory_the_slots_have_no_name_and_one_warning_says_so(
    run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Slot, "create", _full(SHARED_MEMORY))
    told = Told()
    arena = _arena(run, 2, told)
    slots = [arena.reserve(SMALL, 100), arena.reserve(SMALL, 100)]
    assert [s.path for s in slots if s] == [None, None]
    assert len(told) == 1
    assert "memory without a name is used" in told[0]
    for slot in slots:
        assert slot is not None
        arena.free(slot)
    arena.close()


def test_where_only_some_slots_fit_there_are_fewer_and_one_warning_says_so(
    run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told()
    arena = _arena(run, 4, told)
    slot = arena.reserve(SMALL, 100)
    assert slot is not None
    monkeypatch.setattr(Slot, "create", _full(SHARED_MEMORY, Path()))
    assert arena.reserve(SMALL, 100, timeout_s=0.0) is None
    assert arena.reserve(SMALL, 100, timeout_s=0.0) is None
    assert len(told) == 1
    assert "1 checkpoints may be under way instead of 4" in told[0]
    arena.free(slot)
    assert arena.reserve(SMALL, 100) is slot
    arena.free(slot)
    arena.close()


def test_where_not_one_slot_fits_one_warning_says_what_happens_instead(
    run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Slot, "create", _full(SHARED_MEMORY, Path()))
    told = Told()
    arena = _arena(run, 3, told)
    for _ in range(3):
        with pytest.raises(NoRoom):
            arena.reserve(SMALL, 100)
    assert len(told) == 1
    assert "each save blocks training until it is durable" in told[0]


def test_more_than_the_host_has_left_is_not_even_asked_for(
    run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena_module, "available_bytes", lambda: SMALL)
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("memory was asked for"))
    with pytest.raises(NoRoom):
        _arena(run).reserve(SMALL + 1, 100)


def test_a_tiny_shared_memory_is_left_as_it_was(run: str, not_run_here: object) -> None:
    """The real thing: a file system in memory of 64 KiB, in a mount namespace of a child."""
    if not hasattr(os, "unshare") and sys.version_info >= (3, 12):
        not_run_here("os.unshare is missing")  # type: ignore[operator]

    def inside(say: Say) -> None:
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(0x00020000) or libc.mount(b"none", b"/", None, 0x44000, None):
            say("refused")
            return
        where = Path("/mnt")
        if libc.mount(b"tmpfs", bytes(where), b"tmpfs", 0, b"size=64k"):
            say("refused")
            return
        told = Told()
        arena = Arena(run, 0, 1, told, (where, Path()))
        slot = arena.reserve(SMALL, 100)
        assert slot is not None
        say([slot.path is None, list(map(str, where.iterdir())), len(told)])

    said = Child(inside).wait().check()
    if said == ["refused"]:
        not_run_here("this process may not mount a file system")  # type: ignore[operator]
    assert said == [[True, [], 1]]


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError(errno.EMFILE, "too many")])
def test_a_slot_that_could_not_be_made_now_can_be_made_later(
    run: str, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    """Ctrl-C while the memory is being made must not let the next save wait for ever."""

    def failing(*_: object) -> Slot:
        raise failure

    arena = _arena(run)
    with monkeypatch.context() as patch:
        patch.setattr(Slot, "create", failing)
        with pytest.raises((KeyboardInterrupt, CaptureError)):
            arena.reserve(SMALL, 100)
    slot = arena.reserve(SMALL, 100, timeout_s=0.0)
    assert slot is not None
    arena.free(slot)
    arena.close()


def test_a_system_that_gives_no_slot_for_another_reason_is_named(
    run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> Slot:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Slot, "create", failing)
    with pytest.raises(CaptureError, match=r"/dev/shm: Too many open files; .*ulimit -n"):
        _arena(run).reserve(SMALL, 100)


def test_a_warning_that_is_an_error_loses_no_slot(
    run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``python -W error`` turns the warning into an exception in the middle of it."""
    monkeypatch.setattr(Slot, "create", _full(SHARED_MEMORY))

    def refuse(message: str) -> None:
        raise UserWarning(message)

    arena = Arena(run, 0, 1, refuse)
    with pytest.raises(UserWarning, match="without a name"):
        arena.reserve(SMALL, 100)
    slot = arena.reserve(SMALL, 100, timeout_s=0.0)
    assert slot is not None
    arena.free(slot)
    arena.close()
