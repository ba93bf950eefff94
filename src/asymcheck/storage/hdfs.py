"""HDFS as a store: written under another name, closed, renamed.

``hdfs://HOST:PORT/PATH`` goes through ``hdfs_native``; it is tested on the servers of Hadoop
2.7.3. ``webhdfs://HOST:PORT/PATH`` goes through fsspec and is **untested** on a real server.
"""

from __future__ import annotations

import math
import os
import re
import socket
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import TypeVar
from urllib.parse import quote, urlencode

from asymcheck.errors import ObjectNotFound, OptionError, StoreError, nearest
from asymcheck.storage.bounded import Callers, Overdue
from asymcheck.storage.hdfs_files import (
    Files,
    Found,
    NativeFiles,
    Reading,
    Settings,
    WebFiles,
    Writing,
)
from asymcheck.storage.store import Buffer, Capabilities, Entry, Readable, check_name

TEMP_FOLDER = ".tmp"
"""No object name starts with a dot, so no object can lie there."""
_TEMP_NAME = re.compile(r"[0-9a-f]{32}")
_PIECE_BYTES = 4 << 20  # what is written or read in one call
_TRIES = 3
_CLEANUP_S = 5.0
_REACH_S = 2.0
_ASSUMED_REPLICATION = 3  # of servers whose default is not known
_IN_THE_WAY = "a file is where a folder should be: move it"
_RANGES = {"replication": (1, 512), "block_mib": (1, 1 << 16), "timeout_s": (1, 3600)}
_DATA_NODE = re.compile("DataTransferError|IO error|Connection refused")
_MEANINGS = (
    ("AccessControl|Permission", "no permission: check owner and mode of the folder", False),
    ("SASL|GSSAPI|InvalidToken|Authorization", "the name node does not take who you are", False),
    ("SafeMode", "the name node is starting, or an operator has locked it", True),
    ("Quota", "the quota is used up: free some space or lower keep_last", True),
    ("only be replicated to|only be written to", "no data node is alive, or none has room", True),
    ("NotDirectory|must both be dir|not a directory", _IN_THE_WAY, False),
    ("No NameNode hosts", "no such name service: give HOST:PORT, or its configuration", False),
    ("refused", "is the server up, and is this the RPC port of the name node?", True),
    ("lookup|resol|not known", "no such host: check its name, and this host's DNS", True),
)
"""What a server may say, what that means, and whether the same call may succeed later."""

T = TypeVar("T")

_callers = Callers("asymcheck-hdfs")
_clients: dict[tuple[int, str, str, Settings], Files] = {}
"""By process, since a fork cannot use its parent's. Kept for ever: the end of one waits for threads
of its own, which a fork does not have and an overdue call holds.
"""


class _SweptError(Exception):
    """A file in progress was removed by the sweep of another job."""


class _NotEmptyError(Exception):
    """A folder that holds something is not removed."""


class HdfsStore:
    """Objects as files below a folder of HDFS.

    An object is written as ``.tmp/…``, closed, and renamed, which the name node does in one step.
    Closed means that the data nodes have it, as many as the server asks for, and not that they
    have fsynced it. No call waits longer than ``timeout_s`` for the servers; one that is overdue
    may still be done by them later, so that an object can appear after its write failed.

    Of ``webhdfs`` also: it cannot replace a file in one step. A write that replaces removes what
    was there first, so a crash in between leaves neither; the format replaces nothing.

    Args:
        scheme: ``hdfs`` or ``webhdfs``.
        authority: Host and port of the name node.
        path: The root, absolute.
        settings: Of the URL.
    """

    capabilities = Capabilities(durability="replicated", reads_survive_delete=False, connections=4)

    def __init__(self, scheme: str, authority: str, path: str, settings: Settings) -> None:
        self._scheme = scheme
        self._authority = authority
        self._root = path.rstrip("/")
        self._settings = settings

    @property
    def url(self) -> str:
        """See ``Store``."""
        own = {
            name: f"{getattr(self._settings, name):g}"
            for name in Settings.__dataclass_fields__
            if getattr(self._settings, name) != getattr(Settings(), name)
        }
        query = f"?{urlencode(own)}" if own else ""
        path = quote(self._root, errors="surrogateescape")
        return f"{self._scheme}://{self._authority}{path}{query}"

    def prepare(self) -> None:
        """See ``Store``."""
        self._make_folder("prepare", self._root)

    def write(self, name: str, parts: Iterable[Buffer]) -> int:
        """See ``Store``."""
        path = self._path(name)
        try:
            return self._publish("write", path, parts, replace=True)
        except _SweptError:
            raise self._error(
                "write", path, "its temporary file is gone: has a newer job started on this root?"
            ) from None

    def create(self, name: str, data: Buffer) -> bool:
        """See ``Store``."""
        path = self._path(name)
        for _ in range(_TRIES):
            # Another job that claims the root sweeps: then this file is written once more.
            with suppress(_SweptError):
                try:
                    self._publish("create", path, [data], replace=False)
                except FileExistsError:
                    return False
                return True
        raise self._error("create", path, "its temporary file was removed again and again")

    @contextmanager
    def open(self, name: str) -> Iterator[Readable]:
        """See ``Store``."""
        path = self._path(name)
        try:
            opened = self._call("open", path, lambda files: files.read(path), FileNotFoundError)
        except FileNotFoundError:
            raise ObjectNotFound(f"open {self._spoken(path)}: not found") from None
        yield _OpenFile(self, path, opened)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """See ``Store``."""
        top = self._path(prefix) if prefix else self._root
        yield from self._walk(top, f"{prefix}/" if prefix else "")

    def delete(self, name: str) -> None:
        """See ``Store``."""
        path = self._path(name)
        folder = path.rpartition("/")[0]
        # Below a file nothing was there to be removed: so the folder is one.
        if self._delete("delete", path) and folder != self._root:
            self._delete("delete", folder)

    def sweep(self) -> int:
        """See ``Store``."""
        folder = f"{self._root}/{TEMP_FOLDER}"
        left = [found.name for found in self._found(folder) if _TEMP_NAME.fullmatch(found.name)]
        for name in left:
            self._delete("sweep", f"{folder}/{name}")
        self._delete("sweep", folder)
        return len(left)

    def free_bytes(self) -> int | None:
        """What the quota of the root leaves. Without one ``None``: the client does not say what
        the servers have.
        """
        left = self._call("quota", self._root, lambda files: files.quota_left_bytes(self._root))
        if left is None:
            return None
        return left // (self._settings.replication or _ASSUMED_REPLICATION)

    # --- writing ------------------------------------------------------------

    def _publish(self, action: str, path: str, parts: Iterable[Buffer], replace: bool) -> int:
        pieces = _pieces(parts)
        first = next(pieces, b"")
        temp, writing = self._begin(action, first)
        nbytes = len(first)
        try:
            for piece in pieces:
                self._call(action, temp, _appending(writing, piece))
                nbytes += len(piece)
            self._call(action, temp, lambda _: writing.close())
            self._give_name(action, temp, path, replace)
        except BaseException:
            self._remove(temp)
            raise
        return nbytes

    def _begin(self, action: str, first: bytes) -> tuple[str, Writing]:
        """A temporary file that holds ``first``.

        The name node gives out data nodes that are dead until it misses them, and the client
        fails where a block begins on one. A file begun again is given others, perhaps.
        """
        left = _TRIES
        while True:
            left -= 1
            temp = f"{self._root}/{TEMP_FOLDER}/{uuid.uuid4().hex}"
            try:
                writing = self._call(action, temp, _creating(temp))
                if first:
                    self._call(action, temp, _appending(writing, first))
                return temp, writing
            except BaseException as failure:
                self._remove(temp)
                if not left or not _DATA_NODE.search(str(failure.__cause__)):
                    raise

    def _give_name(self, action: str, temp: str, path: str, replace: bool) -> None:
        def rename(files: Files) -> None:
            files.rename(temp, path, replace)

        folder = path.rpartition("/")[0]
        for _ in range(_TRIES):
            try:
                self._call(action, path, rename, FileNotFoundError, FileExistsError)
                return
            except FileNotFoundError:
                if not self._call(action, temp, lambda files: files.exists(temp)):
                    raise _SweptError from None
            self._make_folder(action, folder)
        raise self._error(action, path, "its folder is removed again and again")

    def _make_folder(self, action: str, folder: str) -> None:
        try:
            self._call(action, folder, lambda files: files.mkdirs(folder), FileExistsError)
        except FileExistsError:
            raise self._error(action, folder, _IN_THE_WAY, retryable=False) from None

    def _delete(self, action: str, path: str, at_most_s: float = math.inf) -> bool:
        """Remove a file, or a folder where it is empty; whether there was one."""
        try:
            return self._call(action, path, lambda files: files.delete(path), at_most_s=at_most_s)
        except _NotEmptyError:
            return False

    def _remove(self, temp: str) -> None:
        """Try to remove a file that nobody needs; what is left a sweep finds."""
        with suppress(StoreError):
            self._delete("clean up", temp, _CLEANUP_S)

    # --- reading ------------------------------------------------------------

    def _walk(self, folder: str, prefix: str) -> Iterator[Entry]:
        for found in self._found(folder):
            if not found.name or found.name.startswith("."):
                continue
            if found.is_folder:
                yield from self._walk(f"{folder}/{found.name}", f"{prefix}{found.name}/")
            else:
                yield Entry(prefix + found.name, found.nbytes)

    def _found(self, folder: str) -> Sequence[Found]:
        """What is in it: nothing, where it is a file or was removed meanwhile."""
        try:
            found = self._call("list", folder, lambda files: files.list(folder), FileNotFoundError)
        except FileNotFoundError:
            return []
        return [] if any(not f.name for f in found) else found

    # --- calls --------------------------------------------------------------

    def _path(self, name: str) -> str:
        return f"{self._root}/{check_name(name)}"

    def _call(
        self,
        action: str,
        path: str,
        work: Callable[[Files], T],
        *passing: type[OSError],
        at_most_s: float = math.inf,
    ) -> T:
        """Make a call within its time.

        Raises:
            _NotEmptyError, _SweptError: As the name node says.
            StoreError: Anything else but ``passing``.
        """
        limit_s = min(self._settings.timeout_s, at_most_s)
        try:
            return _callers.call(lambda: work(self._files()), limit_s)
        except Overdue as failure:
            why = f"no answer within {limit_s:g} s; {self._reach()}"
            raise self._error(action, path, why) from failure
        except Exception as failure:
            if isinstance(failure, passing):
                raise
            told = _told(failure)
            if "PathIsNotEmpty" in told or "non empty" in told:
                raise _NotEmptyError from None
            if "LeaseExpired" in told:
                raise _SweptError from None
            hint, retryable = _meaning(told)
            raise self._error(action, path, told + hint, retryable) from failure

    def _files(self) -> Files:
        key = (os.getpid(), self._scheme, self._authority, self._settings)
        if key not in _clients:
            kind = NativeFiles if self._scheme == "hdfs" else WebFiles
            _clients.setdefault(key, kind(self._authority, self._settings))
        return _clients[key]

    def _reach(self) -> str:
        """How far one gets towards the name node."""
        host, _, port = self._authority.rpartition(":")
        if not port.isdigit():
            return "is one of its name nodes active?"
        try:
            socket.create_connection((host.strip("[]"), int(port)), _REACH_S).close()
        except OSError as failure:
            return f"its port cannot be reached: {failure}"
        return "its port takes connections: is the name node overloaded or stopped?"

    def _error(self, action: str, path: str, why: str, retryable: bool = True) -> StoreError:
        return StoreError(f"{action} {self._spoken(path)}: {why}", retryable=retryable)

    def _spoken(self, path: str) -> str:
        return f"{self._scheme}://{self._authority}{path}"


class _OpenFile:
    def __init__(self, store: HdfsStore, path: str, opened: Reading) -> None:
        self._store = store
        self._path = path
        self._opened = opened
        self.nbytes = opened.nbytes

    def readinto(self, offset: int, into: memoryview) -> None:
        """See ``Readable``."""
        into = into.cast("B")
        if offset + len(into) > self.nbytes:
            raise self._store._error(
                "read",
                self._path,
                f"ended at byte {self.nbytes}, expected {len(into)} bytes from {offset}",
                retryable=False,
            )
        for at in range(0, len(into), _PIECE_BYTES):
            nbytes = min(_PIECE_BYTES, len(into) - at)
            into[at : at + nbytes] = self._read(offset + at, nbytes)

    def _read(self, offset: int, nbytes: int) -> bytes:
        try:
            data = self._store._call(
                "read",
                self._path,
                lambda _: self._opened.read(offset, nbytes),
                FileNotFoundError,
            )
        except FileNotFoundError:
            where = self._store._spoken(self._path)
            raise ObjectNotFound(f"read {where}: it was removed meanwhile") from None
        if len(data) != nbytes:
            raise self._store._error(
                "read", self._path, f"expected {nbytes} bytes from {offset}, got {len(data)}"
            )
        return data


def _pieces(parts: Iterable[Buffer]) -> Iterator[bytes]:
    """Copies of what is given: a call that is overdue may still read them."""
    for part in parts:
        view = memoryview(part).cast("B")
        for at in range(0, len(view), _PIECE_BYTES):
            yield bytes(view[at : at + _PIECE_BYTES])


def _creating(path: str) -> Callable[[Files], Writing]:
    return lambda files: files.create(path)


def _appending(writing: Writing, piece: bytes) -> Callable[[Files], object]:
    return lambda _: writing.write(piece)


def _told(failure: Exception) -> str:
    """What a server said, without the stack of its calls."""
    text = str(failure).partition("\n")[0].partition("\\n")[0]
    found = re.match(r'\w+\("([\w.$]+)", "(.*)', text)
    if found:
        said = found[2].rstrip('"). ')
        text = f"{found[1].rpartition('.')[2]}: {said}"
    return text[:300].rstrip('". ') or type(failure).__name__


def _meaning(told: str) -> tuple[str, bool]:
    """What to do about it, and whether the same call may succeed later."""
    for pattern, hint, retryable in _MEANINGS:
        if re.search(pattern, told):
            return f"; {hint}", retryable
    return "", True


def open_hdfs(target: str, options: dict[str, str]) -> HdfsStore:
    """Factory of ``hdfs://HOST:PORT/PATH?replication=3&block_mib=128&timeout_s=30``.

    Raises:
        OptionError: It names no folder, an option is wrong, or ``hdfs_native`` is missing.
    """
    return _open("hdfs", target, options, "hdfs_native")


def open_webhdfs(target: str, options: dict[str, str]) -> HdfsStore:
    """Factory of ``webhdfs://HOST:PORT/PATH?replication=3&timeout_s=30``; untested.

    Raises:
        OptionError: It names no folder, an option is wrong, or ``fsspec`` is missing.
    """
    if "block_mib" in options:
        raise OptionError(f"webhdfs://{target}: block_mib: WebHDFS by fsspec cannot set it")
    return _open("webhdfs", target, options, "fsspec")


def _open(scheme: str, target: str, options: dict[str, str], package: str) -> HdfsStore:
    where = f"{scheme}://{target}"
    authority, slash, path = target.partition("/")
    parts = path.rstrip("/").split("/")
    if not authority or "@" in authority:
        raise OptionError(
            f"{where}: expected {scheme}://HOST:PORT/PATH, found the host {authority!r}; the user "
            f"is the one that the client finds"
        )
    if not slash or any(p in ("", ".", "..") or re.search(r"[:\0]", p) for p in parts):
        raise OptionError(
            f"{where}: expected the path of a folder, without empty parts, '.', '..' and ':'"
        )
    if find_spec(package) is None:
        raise OptionError(f"{where}: needs the package {package}: pip install 'asymcheck[hdfs]'")
    return HdfsStore(scheme, authority, f"/{path}", _settings(where, options))


def _settings(where: str, options: dict[str, str]) -> Settings:
    known = Settings.__dataclass_fields__
    found: dict[str, float] = {}
    for name, text in options.items():
        if name not in known:
            raise OptionError(f"{where}: unknown option {name!r}{nearest(name, known)}")
        least, most = _RANGES[name]
        try:
            found[name] = float(text) if name == "timeout_s" else int(text)
        except ValueError:
            found[name] = math.nan
        if not least <= found[name] <= most:
            raise OptionError(
                f"{where}: {name}: expected a number in [{least}, {most}], found {text!r}"
            )
    return Settings(**found)  # type: ignore[arg-type]  # float where it is one
