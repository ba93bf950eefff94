"""A directory as a store: temp, write, count, fsync, rename, fsync of the directory."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Literal, TypeVar
from urllib.parse import quote

from asymcheck.errors import ObjectNotFound, OptionError, StoreError
from asymcheck.planning.layout import PAGE_BYTES
from asymcheck.storage.local_reading import OpenFile, store_error
from asymcheck.storage.store import Buffer, Capabilities, Entry, Readable, check_name

TEMP_FOLDER = ".tmp"
"""No object name starts with a dot, so no object can lie there."""
TEMP_NAME = re.compile(r"[0-9a-f]{32}")
_RETRY_S = (0.0, 0.01, 0.05, 0.2, 0.5)
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}

T = TypeVar("T")


class _SweptError(OSError):
    """A file in progress was removed by the sweep of another job."""


class _TakenError(Exception):
    """The name that was to be created exists."""


class Files:
    """The system calls that writing needs, so that tests can cut the power between them."""

    def open_new(self, path: Path) -> int:
        """A descriptor of a new file, open for writing."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def write(self, fd: int, data: memoryview) -> int:
        """Bytes taken, perhaps fewer than given."""
        return os.write(fd, data)

    def set_direct(self, fd: int, direct: bool) -> None:
        """Let writes to ``fd`` go past the page cache, or through it again."""
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        wanted = flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT
        fcntl.fcntl(fd, fcntl.F_SETFL, wanted)

    def fsync(self, fd: int) -> None:
        """Make the content of ``fd`` durable."""
        os.fsync(fd)

    def close(self, fd: int) -> None:
        """Close ``fd``."""
        os.close(fd)

    def rename(self, old: Path, new: Path) -> None:
        """Give a file its final name, replacing what had it."""
        os.rename(old, new)

    def link(self, old: Path, new: Path) -> None:
        """Give a file a second name, if nothing has it yet."""
        os.link(old, new)

    def unlink(self, path: Path) -> None:
        """Remove a name."""
        path.unlink()

    def mkdir(self, path: Path) -> None:
        """Make one directory."""
        path.mkdir()

    def rmdir(self, path: Path) -> None:
        """Remove an empty directory."""
        path.rmdir()

    def fsync_dir(self, path: Path) -> None:
        """Make the names in a directory durable; where a medium has no such call (some
        network file systems), its names are as durable as it makes them.
        """
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as failure:
            if failure.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(fd)


class LocalStore:
    """Objects as files below ``root``.

    Args:
        root: The directory; made absolute at once, ``~`` is expanded.
        files: The system calls; tests bring their own.
        scope: ``node`` where each host has a directory of its own under that path.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        files: Files | None = None,
        scope: Literal["shared", "node"] = "shared",
    ) -> None:
        self.capabilities = Capabilities(durability="fsync", reads_survive_delete=True, scope=scope)
        self.root = Path(os.path.abspath(os.path.expanduser(root)))
        self._files = files or Files()
        self._direct = hasattr(os, "O_DIRECT")
        self._durable: set[Path] = set()  # folders whose names this store has seen synced

    @property
    def url(self) -> str:
        """See ``Store``."""
        query = "" if self.capabilities.scope == "shared" else f"?scope={self.capabilities.scope}"
        return "file://" + quote(str(self.root), errors="surrogateescape") + query

    def prepare(self) -> None:
        """See ``Store``."""

        def make() -> None:
            self._make_folder(self.root)
            if not self.root.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, "not a directory")

        _guard("prepare", self.root, make)

    def write(self, name: str, parts: Iterable[Buffer]) -> int:
        """See ``Store``."""
        path = self._path(name)
        return _guard("write", path, lambda: self._publish(path, parts, self._rename))

    def create(self, name: str, data: Buffer) -> bool:
        """See ``Store``."""
        path = self._path(name)

        def publish() -> int:
            # Another job that claims the root sweeps: then this file is written once more.
            for _ in _RETRY_S:
                with suppress(_SweptError):
                    return self._publish(path, [data], self._link)
            return self._publish(path, [data], self._link)

        try:
            _guard("create", path, publish)
        except _TakenError:
            return False
        return True

    @contextmanager
    def open(self, name: str) -> Iterator[Readable]:
        """See ``Store``."""
        path = self._path(name)
        with ExitStack() as stack:
            try:
                # Without O_NONBLOCK a named pipe in the place of an object would block for ever.
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
                stack.callback(os.close, fd)
                opened = OpenFile(path, fd)
                stack.callback(opened.close)
            except NotADirectoryError as failure:
                if not self.root.is_dir():
                    raise store_error("open", path, failure) from failure
                raise ObjectNotFound(f"open {path}: not found") from None
            except OSError as failure:
                raise store_error("open", path, failure) from failure
            yield opened

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """See ``Store``."""
        top = self._path(prefix) if prefix else self.root
        try:
            yield from self._walk(top, f"{prefix}/" if prefix else "")
        except OSError as failure:
            raise store_error("list", top, failure) from failure

    def delete(self, name: str) -> None:
        """See ``Store``."""
        path = self._path(name)

        def remove() -> None:
            # Under a file, or a folder itself, there is no object.
            with suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
                self._files.unlink(path)
                self._files.fsync_dir(path.parent)
            if path.parent != self.root:
                # Another writer may be putting something there: then it stays.
                with suppress(OSError):
                    self._files.rmdir(path.parent)
                    self._durable.discard(path.parent)

        _guard("delete", path, remove)

    def sweep(self) -> int:
        """See ``Store``."""
        temp = self.root / TEMP_FOLDER

        def remove() -> int:
            found = os.scandir(temp) if temp.is_dir() else ()
            left = [Path(e.path) for e in found if TEMP_NAME.fullmatch(e.name)]
            for path in left:
                with suppress(FileNotFoundError):
                    self._files.unlink(path)
            with suppress(OSError):
                self._files.rmdir(temp)
            return len(left)

        return _guard("sweep", temp, remove)

    def free_bytes(self) -> int | None:
        """See ``Store``."""
        return _guard("statvfs", self.root, lambda: shutil.disk_usage(self.root).free)

    def _path(self, name: str) -> Path:
        return self.root / check_name(name)

    def _walk(self, top: Path, prefix: str) -> Iterator[Entry]:
        try:
            found = list(os.scandir(top))
        except (FileNotFoundError, NotADirectoryError):
            if top == self.root and top.exists():
                raise
            return  # a folder that was removed meanwhile holds nothing
        for entry in found:
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from self._walk(Path(entry.path), f"{prefix}{entry.name}/")
            elif entry.is_file():
                with suppress(FileNotFoundError):
                    yield Entry(prefix + entry.name, entry.stat().st_size)

    def _publish(
        self, path: Path, parts: Iterable[Buffer], give_name: Callable[[Path, Path], None]
    ) -> int:
        temp_folder = self.root / TEMP_FOLDER
        temp = temp_folder / uuid.uuid4().hex  # a fork must not draw the names of its parent
        fd = _in_folder(temp_folder, self._make_temp_folder, lambda: self._files.open_new(temp))
        try:
            try:
                nbytes = self._write_parts(fd, parts)
                found = os.fstat(fd).st_size
                if found != nbytes:
                    raise OSError(errno.EIO, f"expected {nbytes} bytes in the file, found {found}")
                self._files.fsync(fd)
            finally:
                self._files.close(fd)
            self._ensure_folder(path.parent)

            def give() -> None:
                try:
                    give_name(temp, path)
                except FileNotFoundError as failure:
                    if temp.exists():
                        raise  # it is the folder that is missing
                    raise _SweptError(errno.ENOENT, "its temporary file was swept") from failure

            _in_folder(path.parent, self._make_folder, give)
        except BaseException:
            with suppress(OSError):
                self._files.unlink(temp)
            raise
        self._files.fsync_dir(path.parent)
        return nbytes

    def _write_parts(self, fd: int, parts: Iterable[Buffer]) -> int:
        """Write each part in turn; what lies on whole pages goes past the page cache."""
        at, direct = 0, False
        for part in parts:
            view = memoryview(part).cast("B")
            done = 0
            while done < len(view):
                piece = view[done:]
                whole = self._direct and at % PAGE_BYTES == 0 and _on_page(piece)
                if whole:
                    piece = piece[: len(piece) // PAGE_BYTES * PAGE_BYTES]
                if whole != direct:
                    direct = self._switch(fd, whole)
                try:
                    taken = self._files.write(fd, piece)
                except OSError as failure:
                    if not direct or failure.errno != errno.EINVAL:
                        raise
                    self._direct = False  # this file system asks for more: go through the cache
                    continue
                if taken < 1:
                    raise OSError(errno.EIO, "the medium takes no more bytes and says not why")
                done += taken
                at += taken
        return at

    def _switch(self, fd: int, direct: bool) -> bool:
        try:
            self._files.set_direct(fd, direct)
        except OSError as failure:
            if not direct or failure.errno != errno.EINVAL:
                raise
            self._direct = False
            return False
        return direct

    def _rename(self, temp: Path, path: Path) -> None:
        self._files.rename(temp, path)

    def _link(self, temp: Path, path: Path) -> None:
        # link, unlike rename, never replaces: exactly one caller succeeds.
        try:
            try:
                self._files.link(temp, path)
            except OSError as failure:
                if failure.errno not in _NO_LINKS:
                    raise
                # No hard links here: an empty file takes the name first, the content follows.
                self._files.close(self._files.open_new(path))
                self._files.rename(temp, path)
                return
        except FileExistsError:
            raise _TakenError from None
        self._files.unlink(temp)

    def _make_temp_folder(self, folder: Path) -> None:
        with suppress(FileExistsError):
            self._files.mkdir(folder)  # need not be durable

    def _make_folder(self, folder: Path) -> None:
        self._durable.discard(folder)
        self._ensure_folder(folder)

    def _ensure_folder(self, folder: Path) -> None:
        """Make ``folder`` where it is missing, and its name durable.

        Also where it is there already: whoever made it may have been cut off before its name
        was. Above the root, directories that are there may be of others and closed to us.
        """
        if folder in self._durable:
            return
        if folder == self.root:
            missing = list(_missing(folder))
            there = missing[-1].parent if missing else folder
            with suppress(OSError):
                self._files.fsync_dir(there.parent)
        else:
            self._ensure_folder(folder.parent)
            missing = [] if folder.exists() else [folder]
        for new in reversed(missing):
            with suppress(FileExistsError):
                self._files.mkdir(new)
            _wait_for(new)
            self._files.fsync_dir(new.parent)
        if not missing and folder != self.root:
            self._files.fsync_dir(folder.parent)
        self._durable.add(folder)


def _missing(folder: Path) -> Iterator[Path]:
    """``folder`` and those above it that are not there, the innermost first."""
    while not folder.exists():
        yield folder
        folder = folder.parent


def _on_page(view: memoryview) -> bool:
    """Whether the bytes start on a page of memory, as writes past the page cache need."""
    if view.readonly or len(view) < PAGE_BYTES:
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) % PAGE_BYTES == 0


def _wait_for(folder: Path) -> None:
    """Parallel filesystems may show late what another node has made."""
    for wait_s in _RETRY_S:
        if folder.exists():
            return
        time.sleep(wait_s)


def _in_folder(folder: Path, make: Callable[[Path], None], action: Callable[[], T]) -> T:
    """Run ``action``; where its folder is missing, or seems to be, make it and try again, a
    bounded number of times.
    """
    for wait_s in _RETRY_S:
        try:
            return action()
        except FileNotFoundError:
            time.sleep(wait_s)
            make(folder)
    return action()


def _guard(action: str, path: Path, work: Callable[[], T]) -> T:
    try:
        return work()
    except FileExistsError:
        raise StoreError(f"{action} {path}: something is in the way", retryable=False) from None
    except OSError as failure:
        raise store_error(action, path, failure) from failure


def open_local(target: str, options: dict[str, str]) -> LocalStore:
    """Factory of the ``file`` scheme.

    Raises:
        OptionError: It is no path, or there are options that it does not have.
    """
    scope = options.get("scope", "shared")
    if unknown := sorted(options.keys() - {"scope"}):
        raise OptionError(f"file://{target}: expected no options but 'scope', found {unknown}")
    if scope not in ("shared", "node"):
        raise OptionError(f"file://{target}: scope: expected 'shared' or 'node', found {scope!r}")
    if not target or "\0" in target:
        raise OptionError(f"root: expected a directory, found {target!r}")
    return LocalStore(target, scope="node" if scope == "node" else "shared")
