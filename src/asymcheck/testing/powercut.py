"""A local store whose power can be cut between any two system calls.

The real directory is what a running machine sees: the page cache. Beside it stands a model
of what would still be there after a power cut: the bytes of a file as of its latest fsync,
the names in a directory as of its latest fsync. Nothing is really synced, so that tests are
fast. Model: LevelDB's fault injection test.
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from asymcheck.errors import StoreError
from asymcheck.storage.local import Files, LocalStore
from asymcheck.storage.store import Entry, Readable

Mode = Literal["lost", "names", "mixed"]
"""What an unlucky file system makes of the calls that were not synced.

* ``lost``: every byte and name that was not synced is gone; a removed name comes back.
* ``names``: names survive, bytes do not: a file that was renamed without fsync is empty.
* ``mixed``: each name and each file has its own luck, drawn from a seed.
"""


class PowerCut(BaseException):
    """The power is gone. Not an ``Exception``: no handler goes on as if nothing were."""


class _File:
    def __init__(self, data: bytes = b"") -> None:
        self.live = bytearray(data)
        self.synced = data


class _Folder:
    def __init__(self) -> None:
        self.live: dict[str, _File | _Folder] = {}
        self.synced: dict[str, _File | _Folder] = {}


class PowerCutFiles(Files):
    """The system calls of a machine whose power fails before the ``cut_at``-th of them.

    A write is cut in its middle. The failing call raises ``PowerCut``, once; each later one
    is an error that changes nothing, so that threads end in peace.

    Args:
        root: The directory; what is there already is durable.
        cut_at: Counted from 1; ``None`` for never.

    Attributes:
        operations: ``(call, path)`` of every call so far.
        is_off: Whether the power is gone.
    """

    def __init__(self, root: Path, cut_at: int | None = None) -> None:
        self.operations: list[tuple[str, str]] = []
        self.is_off = False
        self.cut_at = cut_at
        self._root = root
        self._lock = threading.RLock()
        self._open: dict[int, _File] = {}
        top = root
        while not top.exists():
            top = top.parent
        self._top = top
        self._tree = _read(top) if top == root else _Folder()

    def open_new(self, path: Path) -> int:
        """See ``Files``."""
        with self._lock:
            self._call("open_new", path)
            fd = super().open_new(path)
            file = _File()
            self._folder(path.parent).live[path.name] = file
            self._open[fd] = file
            return fd

    def write(self, fd: int, data: memoryview) -> int:
        """See ``Files``."""
        with self._lock:
            try:
                self._call("write", fd)
            except PowerCut:
                with suppress(OSError):  # past the page cache only whole pages can be written
                    os.write(fd, data[: len(data) // 2])
                raise
            taken = super().write(fd, data)
            self._open[fd].live += data[:taken]
            return taken

    def fsync(self, fd: int) -> None:
        """See ``Files``."""
        with self._lock:
            self._call("fsync", fd)
            file = self._open[fd]
            file.synced = bytes(file.live)

    def close(self, fd: int) -> None:
        """See ``Files``; works without power too, for the descriptor is this process's own."""
        with self._lock:
            self._open.pop(fd)
            super().close(fd)
            if not self.is_off:
                self._call("close", fd)

    def rename(self, old: Path, new: Path) -> None:
        """See ``Files``."""
        with self._lock:
            self._call("rename", new)
            super().rename(old, new)
            self._folder(new.parent).live[new.name] = self._folder(old.parent).live.pop(old.name)

    def link(self, old: Path, new: Path) -> None:
        """See ``Files``."""
        with self._lock:
            self._call("link", new)
            super().link(old, new)
            self._folder(new.parent).live[new.name] = self._folder(old.parent).live[old.name]

    def unlink(self, path: Path) -> None:
        """See ``Files``."""
        with self._lock:
            self._call("unlink", path)
            super().unlink(path)
            del self._folder(path.parent).live[path.name]

    def mkdir(self, path: Path) -> None:
        """See ``Files``."""
        with self._lock:
            self._call("mkdir", path)
            super().mkdir(path)
            self._folder(path.parent).live[path.name] = _Folder()

    def rmdir(self, path: Path) -> None:
        """See ``Files``."""
        with self._lock:
            self._call("rmdir", path)
            super().rmdir(path)
            del self._folder(path.parent).live[path.name]

    def fsync_dir(self, path: Path) -> None:
        """See ``Files``."""
        with self._lock:
            self._call("fsync_dir", path)
            if path.is_relative_to(self._top):  # above it, everything is durable
                folder = self._folder(path)
                folder.synced = dict(folder.live)

    def restart_process(self, cut_at: int | None = None) -> None:
        """A new process on the same machine: the page cache is as the old one left it.

        Args:
            cut_at: When the power fails, counted on from the calls so far.
        """
        self.is_off = False
        self.cut_at = None if cut_at is None else len(self.operations) + cut_at

    def after_power_cut(self, target: Path, mode: Mode, seed: int = 0) -> None:
        """Write what is there after the power came back.

        Args:
            target: A directory that does not exist; stays missing where the root was lost.
            mode: How unlucky.
            seed: For ``mixed``.
        """
        luck = random.Random(seed)
        node: _File | _Folder | None = self._tree
        for part in self._root.relative_to(self._top).parts:
            assert isinstance(node, _Folder)
            node = _survivors(node, mode, luck).get(part)
            if node is None:
                return
        assert isinstance(node, _Folder)
        _write(node, target, mode, luck)

    def _call(self, name: str, path: Path | int) -> None:
        if self.is_off:
            raise OSError(errno.EIO, "the power is off")
        self.operations.append((name, str(path)))
        if len(self.operations) == self.cut_at:
            self.is_off = True
            raise PowerCut(f"before call {self.cut_at}: {name} {path}")

    def _folder(self, path: Path) -> _Folder:
        node: _File | _Folder = self._tree
        for part in path.relative_to(self._top).parts:
            assert isinstance(node, _Folder)
            node = node.live[part]
        assert isinstance(node, _Folder)
        return node


class PowerCutStore(LocalStore):
    """A ``LocalStore`` over ``PowerCutFiles``; ``url`` opens a plain one.

    Args:
        root: The directory.
        cut_at: See ``PowerCutFiles``.

    Attributes:
        files: The system calls: count them, cut the power, see what is left.
    """

    def __init__(self, root: str | os.PathLike[str], cut_at: int | None = None) -> None:
        self.files = PowerCutFiles(Path(os.path.abspath(root)), cut_at)
        super().__init__(root, self.files)

    @contextmanager
    def open(self, name: str) -> Iterator[Readable]:
        """See ``Store``."""
        self._check_power()
        with super().open(name) as opened:
            yield opened

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """See ``Store``."""
        self._check_power()
        return super().list(prefix)

    def _check_power(self) -> None:
        if self.files.is_off:
            raise StoreError(f"{self.url}: the power is off", retryable=False)


def _read(path: Path) -> _Folder:
    folder = _Folder()
    for entry in os.scandir(path):
        here = Path(entry.path)
        if entry.is_dir(follow_symlinks=False):
            folder.live[entry.name] = _read(here)
        else:
            folder.live[entry.name] = _File(here.read_bytes())
    folder.synced = dict(folder.live)
    return folder


def _survivors(folder: _Folder, mode: Mode, luck: random.Random) -> dict[str, _File | _Folder]:
    if mode == "lost":
        return folder.synced
    if mode == "names":
        return folder.live
    found = {}
    for name in sorted(folder.synced.keys() | folder.live.keys()):
        node = luck.choice([folder.synced.get(name), folder.live.get(name)])
        if node is not None:
            found[name] = node
    return found


def _content(file: _File, mode: Mode, luck: random.Random) -> bytes:
    if mode == "mixed":
        return bytes(file.live[: luck.randint(len(file.synced), len(file.live))])
    return file.synced


def _write(folder: _Folder, target: Path, mode: Mode, luck: random.Random) -> None:
    target.mkdir()
    for name, node in _survivors(folder, mode, luck).items():
        if isinstance(node, _Folder):
            _write(node, target / name, mode, luck)
        else:
            (target / name).write_bytes(_content(node, mode, luck))
