"""What an HDFS store needs of a file system, by two clients. Calls block without a bound.

Errors are those that the clients raise: ``FileNotFoundError``, ``FileExistsError`` and others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import hdfs_native

_MIB = 1 << 20
_WEB_PORT = 9870
_NO_QUOTA = 1 << 62  # what is above stands for none: the greatest number of 63 or of 64 bits


@dataclass(frozen=True, slots=True)
class Settings:
    """What a URL may set.

    Attributes:
        replication: Copies of each block; 0 for what the servers do by themselves.
        block_mib: Size of a block; 0 likewise.
        timeout_s: How long one call to the servers may take.
    """

    replication: int = 0
    block_mib: int = 0
    timeout_s: float = 30.0


class Found(NamedTuple):
    """A file or folder in a listing."""

    name: str
    nbytes: int
    is_folder: bool


class Writing(Protocol):
    """A file that is being written."""

    def write(self, data: bytes) -> object:
        """Append all of ``data``."""
        ...

    def close(self) -> None:
        """Let it be whole."""
        ...


class Reading(Protocol):
    """An open file."""

    nbytes: int

    def read(self, offset: int, nbytes: int) -> bytes:
        """That range; the caller sees to it that it lies in the file."""
        ...


class Files(Protocol):
    """The calls. Paths are absolute."""

    def create(self, path: str) -> Writing:
        """Begin a new file, with the folders above it."""
        ...

    def rename(self, old: str, new: str, replace: bool) -> None:
        """Give a file another name, in one step; its folder has to be there.

        Raises:
            FileExistsError: ``new`` is there and not to be replaced.
            FileNotFoundError: ``old`` or the folder of ``new`` is not there.
        """
        ...

    def delete(self, path: str) -> bool:
        """Remove a file or an empty folder; whether it was there."""
        ...

    def mkdirs(self, path: str) -> None:
        """Make a folder and those above it."""
        ...

    def exists(self, path: str) -> bool:
        """Whether it is there."""
        ...

    def list(self, path: str) -> list[Found]:
        """What is in a folder; a file has itself in it, under an empty name or its own."""
        ...

    def read(self, path: str) -> Reading:
        """Open a file."""
        ...

    def quota_left_bytes(self, path: str) -> int | None:
        """What the quota of a folder leaves, of all copies; ``None`` where it has none."""
        ...


class NativeFiles:
    """Through ``hdfs_native``.

    Args:
        authority: Host and port of the name node, or a name service of the configuration that
            ``hdfs_native`` finds.
        settings: Of the URL.
    """

    def __init__(self, authority: str, settings: Settings) -> None:
        import hdfs_native

        # A refused connection is tried again for up to a second each: all tries end by themselves
        # before the call is overdue, so that none changes anything behind the caller's back.
        bounds = {
            "dfs.client.failover.max.attempts": max(1, int(settings.timeout_s) - 1),
            "dfs.client.failover.sleep.max.millis": 1000,
            "dfs.client.socket-timeout": int(settings.timeout_s * 1000 / 2),
        }
        self._client = hdfs_native.Client(
            f"hdfs://{authority}", {name: str(value) for name, value in bounds.items()}
        )
        self._options = hdfs_native.WriteOptions(
            block_size=settings.block_mib * _MIB or None, replication=settings.replication or None
        )

    def create(self, path: str) -> Writing:
        """See ``Files``."""
        # Not the writer around it: that one is closed by the garbage collector, on any thread,
        # which waits there for a name node that may be gone.
        return self._client.inner.create(path, self._options)

    def rename(self, old: str, new: str, replace: bool) -> None:
        """See ``Files``."""
        self._client.rename(old, new, overwrite=replace)

    def delete(self, path: str) -> bool:
        """See ``Files``."""
        return self._client.delete(path)

    def mkdirs(self, path: str) -> None:
        """See ``Files``."""
        self._client.mkdirs(path, create_parent=True)

    def exists(self, path: str) -> bool:
        """See ``Files``."""
        try:
            self._client.get_file_info(path)
        except FileNotFoundError:
            return False
        return True

    def list(self, path: str) -> list[Found]:
        """See ``Files``."""
        return [
            Found(status.path[len(path.rstrip("/")) + 1 :], status.length, status.isdir)
            for status in self._client.list_status(path)
        ]

    def read(self, path: str) -> Reading:
        """See ``Files``."""
        return _NativeReading(self._client.read(path))

    def quota_left_bytes(self, path: str) -> int | None:
        """See ``Files``."""
        found = self._client.get_content_summary(path)
        if found.space_quota >= _NO_QUOTA:
            return None
        return max(0, found.space_quota - found.space_consumed)


class _NativeReading:
    def __init__(self, reader: hdfs_native.FileReader) -> None:
        self._reader = reader
        self.nbytes = len(reader)

    def read(self, offset: int, nbytes: int) -> bytes:
        """See ``Reading``."""
        return self._reader.read_range(offset, nbytes)


class WebFiles:
    """Through the REST interface of HDFS, by fsspec. It has no way to replace a file in one step.

    Args:
        authority: Host and port of the name node's web server.
        settings: Of the URL.
    """

    def __init__(self, authority: str, settings: Settings) -> None:
        import fsspec

        host, _, port = authority.partition(":")
        self._fs: Any = fsspec.filesystem(
            "webhdfs", host=host, port=int(port or _WEB_PORT), skip_instance_cache=True
        )
        self._replication = settings.replication or None

    def create(self, path: str) -> Writing:
        """See ``Files``."""
        opened: Writing = self._fs.open(path, "wb", replication=self._replication)
        return opened

    def rename(self, old: str, new: str, replace: bool) -> None:
        """See ``Files``; where ``new`` is replaced, it is missing for a moment."""
        if replace:
            self.delete(new)
        self._fs.mv(old, new)  # says nothing where it did not do it
        if not self.exists(old):
            return
        if self.exists(new):
            raise FileExistsError(new)
        raise FileNotFoundError(new)

    def delete(self, path: str) -> bool:
        """See ``Files``; says what was there a moment before."""
        there = self.exists(path)
        self._fs.rm(path, recursive=False)
        return there

    def mkdirs(self, path: str) -> None:
        """See ``Files``."""
        self._fs.mkdir(path)

    def exists(self, path: str) -> bool:
        """See ``Files``."""
        return bool(self._fs.exists(path))

    def list(self, path: str) -> list[Found]:
        """See ``Files``."""
        return [
            Found(entry["pathSuffix"], entry["length"], entry["type"] == "directory")
            for entry in self._fs.ls(path, detail=True)
        ]

    def read(self, path: str) -> Reading:
        """See ``Files``."""
        found = self._fs.info(path)
        if found["type"] == "directory":
            raise FileNotFoundError(path)
        return _WebReading(self._fs, path, found["length"])

    def quota_left_bytes(self, path: str) -> int | None:
        """See ``Files``."""
        found = self._fs.content_summary(path)
        if not 0 < found["spaceQuota"] < _NO_QUOTA:
            return None
        return max(0, int(found["spaceQuota"]) - int(found["spaceConsumed"]))


class _WebReading:
    def __init__(self, fs: Any, path: str, nbytes: int) -> None:  # noqa: ANN401
        self._fs = fs
        self._path = path
        self.nbytes = nbytes

    def read(self, offset: int, nbytes: int) -> bytes:
        """See ``Reading``."""
        found: bytes = self._fs.cat_file(self._path, offset, offset + nbytes)
        return found
