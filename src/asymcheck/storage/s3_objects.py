"""Objects of S3 as they are written, in parts that are sent side by side, and read, in ranges."""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator
from concurrent.futures import Future
from io import BytesIO
from itertools import chain
from threading import BoundedSemaphore, Lock

from asymcheck.errors import ObjectNotFound, StoreError
from asymcheck.storage.s3_client import Answer, Receiver, Refused, S3Client
from asymcheck.storage.store import Buffer

_log = logging.getLogger(__name__)

MARK = "asymcheck-write"
"""Which call wrote an object stands in its metadata under this name: a call whose answer was lost
so finds out whether it was the one.
"""
_FIRST_BYTES = 1 << 16  # read when an object is opened: most need no other request then
_RANGE_BYTES = 4 << 20


class Writer:
    """Writes whole objects; several threads may.

    Small ones take one request. Larger ones are sent in parts, and visible when the last request
    puts them together. So much memory is used: a part for each connection, and one for each
    object that is being written.

    Args:
        client: The server.
        part_bytes: Size of a part.
    """

    def __init__(self, client: S3Client, part_bytes: int) -> None:
        self._client = client
        self._part_bytes = part_bytes
        self._room = BoundedSemaphore(client.server.connections)

    def write(self, key: str, parts: Iterable[Buffer]) -> int:
        """Store the concatenation of ``parts``; returns its bytes; blocks.

        Raises:
            StoreError: The server failed; nothing of it is visible.
        """
        pieces = self._pieces(parts)
        first = next(pieces)
        second = next(pieces, None)
        if second is None:
            self.put(key, first)
            return _size(first)
        upload = _Upload(self._client, key, self._room)
        nbytes = 0
        try:
            for piece in chain((first, second), pieces):
                nbytes += _size(piece)
                upload.send(piece)
            upload.complete()
        except BaseException:
            upload.abort()
            raise
        return nbytes

    def put(self, key: str, body: BytesIO) -> None:
        """Store an object in one request."""
        self._client.answered("write", key, "put_object", {"Key": key, "Body": body})

    def create(self, key: str, data: Buffer) -> bool:
        """Store an object where there is none, if the server does that; whether this call did.

        Raises:
            Refused: The server does not know how.
            StoreError: It failed.
        """
        mark = uuid.uuid4().hex
        asked = {"Key": key, "Body": BytesIO(data), "IfNoneMatch": "*", "Metadata": {MARK: mark}}
        try:
            self._client.call("create", key, "put_object", asked)
        except Refused as answer:
            if answer.code not in ("PreconditionFailed", "412"):
                if answer.status == 501:
                    raise
                raise self._client.failed("create", key, answer) from None
            # An earlier try of this call may have been the one, whose answer was lost.
            return answer.tries > 1 and mark_of(self._client, key) == mark
        return True

    def _pieces(self, parts: Iterable[Buffer]) -> Iterator[BytesIO]:
        """The bytes in pieces of ``part_bytes``, the last one smaller; one at least."""
        piece = BytesIO()
        begun = False
        for part in parts:
            view = memoryview(part).cast("B")
            while len(view):
                room = self._part_bytes - piece.tell()
                piece.write(view[:room])
                view = view[room:]
                if piece.tell() == self._part_bytes:
                    yield piece
                    piece, begun = BytesIO(), True
        if piece.tell() or not begun:
            yield piece


class _Upload:
    """One object in parts."""

    def __init__(self, client: S3Client, key: str, room: BoundedSemaphore) -> None:
        self._client = client
        self._key = key
        self._room = room
        self._mark = uuid.uuid4().hex
        self._parts: list[Future[Answer]] = []
        asked = {"Key": key, "Metadata": {MARK: self._mark}}
        made = client.answered("write", key, "create_multipart_upload", asked)
        self._names = {"Key": key, "UploadId": made["UploadId"]}

    def send(self, body: BytesIO) -> None:
        """Send a part behind those before it; blocks while as many are on their way."""
        asked = {**self._names, "PartNumber": len(self._parts) + 1, "Body": body}
        self._room.acquire()
        try:
            for earlier in self._parts:
                if earlier.done():
                    self._tag(earlier)
            started = self._client.start("write", self._key, "upload_part", asked)
        except BaseException:
            self._room.release()
            raise
        started.add_done_callback(lambda _: self._room.release())
        self._parts.append(started)

    def complete(self) -> None:
        """Make the object visible."""
        rows = [
            {"PartNumber": number, "ETag": self._tag(part)}
            for number, part in enumerate(self._parts, 1)
        ]
        asked = {**self._names, "MultipartUpload": {"Parts": rows}}
        try:
            self._client.call("write", self._key, "complete_multipart_upload", asked)
        except Refused as answer:
            # An earlier try may have done it, and its answer was lost.
            gone = answer.code in ("NoSuchUpload", "404")
            if not (gone and answer.tries > 1 and mark_of(self._client, self._key) == self._mark):
                raise self._failed(answer) from None

    def abort(self) -> None:
        """Let the server forget the parts; what it cannot be told now is swept later."""
        for part in self._parts:
            part.cancel()
        try:
            self._client.call(
                "abort the upload of", self._key, "abort_multipart_upload", self._names
            )
        except (Refused, StoreError) as failure:
            _log.warning("parts of %s stay until the next start: %s", self._key, failure)

    def _tag(self, part: Future[Answer]) -> str:
        try:
            return str(self._client.result(part)["ETag"])
        except Refused as answer:
            raise self._failed(answer) from None

    def _failed(self, answer: Refused) -> StoreError:
        if answer.code in ("NoSuchUpload", "404"):
            return StoreError(
                f"write {self._client.where(self._key)}: its parts were removed meanwhile; did a "
                f"newer job start on this root?",
                retryable=False,
            )
        return self._client.failed("write", self._key, answer)


class _Lent:
    """Memory of a caller: nothing is written there once it was given back."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._is_ours = True

    def receiver(self, into: memoryview) -> Receiver:
        """Fills ``into``, exactly."""

        async def receive(blocks: AsyncIterator[bytes]) -> None:
            done = 0
            async for block in blocks:
                with self._lock:
                    if self._is_ours and done + len(block) <= len(into):
                        into[done : done + len(block)] = block
                done += len(block)
            if done != len(into):
                raise ConnectionError(f"expected {len(into)} bytes, found {done}")

        return receive

    def give_back(self) -> None:
        with self._lock:
            self._is_ours = False


class OpenObject:
    """An object as it was when it was opened.

    Args:
        client: The server.
        key: Its key.

    Raises:
        ObjectNotFound: There is none.
        StoreError: The server failed.
    """

    def __init__(self, client: S3Client, key: str) -> None:
        self._client = client
        self._key = key
        self._tag = ""
        self.nbytes, self._first = 0, bytearray()

        async def receive(blocks: AsyncIterator[bytes]) -> None:
            self._first.clear()
            async for block in blocks:
                self._first += block

        asked = {"Key": key, "Range": f"bytes=0-{_FIRST_BYTES - 1}"}
        try:
            found = client.call("open", key, "get_object", asked, receive)
        except Refused as answer:
            if answer.status != 416:
                raise client.failed("open", key, answer) from None
            return  # it is empty: there is no byte to be asked for
        whole = re.fullmatch(r"bytes 0-\d+/(\d+)", found.get("ContentRange", ""))
        self.nbytes = int(whole[1]) if whole else len(self._first)
        self._tag = str(found["ETag"])

    def readinto(self, offset: int, into: memoryview) -> None:
        """See ``Readable``. Large ranges are read in several requests at the same time."""
        into = into.cast("B")
        end = offset + len(into)
        if end > self.nbytes:
            raise StoreError(
                f"read {self._client.where(self._key)}: ended at byte {self.nbytes}, expected "
                f"{len(into)} bytes from {offset}",
                retryable=False,
            )
        if end <= len(self._first):
            into[:] = self._first[offset:end]
            return
        most = self._client.server.connections
        each = max(_RANGE_BYTES, -(-len(into) // most))
        memory = _Lent()
        started = []
        for at in range(0, len(into), each):
            part = into[at : at + each]
            first, last = offset + at, offset + at + len(part) - 1
            asked = {"Key": self._key, "Range": f"bytes={first}-{last}", "IfMatch": self._tag}
            receive = memory.receiver(part)
            started.append(self._client.start("read", self._key, "get_object", asked, receive))
        try:
            for answer in started:
                self._client.result(answer)
        except Refused as refused:
            if refused.status == 412:
                where = self._client.where(self._key)
                raise ObjectNotFound(f"read {where}: it was replaced meanwhile") from None
            raise self._client.failed("read", self._key, refused) from None
        finally:
            memory.give_back()
            for answer in started:
                answer.cancel()


def mark_of(client: S3Client, key: str) -> str | None:
    """Which call wrote an object; ``None`` where there is none, ``""`` where it was no call of
    ours; blocks.
    """
    try:
        found = client.call("look at", key, "head_object", {"Key": key})
    except Refused as answer:
        if answer.is_not_found:
            return None
        raise client.failed("look at", key, answer) from None
    return str(found.get("Metadata", {}).get(MARK, ""))


def _size(body: BytesIO) -> int:
    return body.getbuffer().nbytes
