"""Calls to an S3 server: bounded in time, made again where that helps, failures in our words.

The client of s3fs lives on an event loop of its own, on one thread for each client. Whoever
calls blocks. Credentials come from the usual places, such as ``AWS_PROFILE``, a credentials file
or the role of the machine; they never pass through here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from io import BytesIO
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple, Unpack

from asymcheck.errors import ObjectNotFound, StoreError

if TYPE_CHECKING:
    from s3fs import S3FileSystem

_log = logging.getLogger(__name__)

T = TypeVar("T")
P = TypeVarTuple("P")
Answer = dict[str, Any]
"""What botocore makes of an answer of the server."""
Receiver = Callable[[AsyncIterator[bytes]], Awaitable[None]]
"""Takes the bytes of an object as they come, from the first one on; called for each try."""

_TRIES = 3  # of which each may take its share of the time before it counts as hanging
_BLOCK_BYTES = 1 << 18
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 5.0
_RETRYABLE_CODES = frozenset(
    {
        "BandwidthLimitExceeded",
        "ConditionalRequestConflict",
        "InternalError",
        "OperationAborted",
        "RequestLimitExceeded",
        "RequestTimeout",
        "ServiceUnavailable",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "TooManyRequests",
    }
)
_NOT_FOUND = frozenset({"404", "NoSuchKey", "NotFound"})
_HINTS = {
    "NoSuchBucket": "create the bucket first, or look at the endpoint and region",
    "AccessDenied": "check the credentials and what they permit",
    "403": "check the credentials and what they permit",
    "401": "check the credentials",
    "InvalidAccessKeyId": "check the credentials: the server does not know this key",
    "SignatureDoesNotMatch": "check the credentials: the secret does not belong to the key",
    "ExpiredToken": "the credentials have expired: renew them",
    "InvalidToken": "check the session token",
    "PermanentRedirect": "the bucket is in another region: say which with ?region=",
    "AuthorizationHeaderMalformed": "the bucket may be in another region: say which with ?region=",
    "QuotaExceeded": "the quota is used up: free some space or lower keep_last",
    "XMinioStorageFull": "the server is full: free some space or lower keep_last",
}


@dataclass(frozen=True, slots=True)
class Server:
    """Where a bucket is and how long to wait for it.

    Attributes:
        bucket: Its name.
        endpoint: URL of the server, empty for that of the usual configuration.
        region: Its region, empty for that of the usual configuration.
        profile: Which credentials of the usual configuration, empty for the default ones.
        connections: How many requests are made at the same time.
        timeout_s: After how long a call that is made again and again is given up.
    """

    bucket: str
    endpoint: str = ""
    region: str = ""
    profile: str = ""
    connections: int = 4
    timeout_s: float = 60.0

    def __str__(self) -> str:
        return f"s3 bucket {self.bucket!r}" + (f" at {self.endpoint}" if self.endpoint else "")


class Refused(Exception):
    """The server answered with an error code; calls that expect one look at it.

    Attributes:
        code: Of S3, such as ``PreconditionFailed``, or the HTTP status.
        status: The HTTP status.
        tries: How many tries were made of the call that it answers.
    """

    def __init__(self, code: str, status: int, tries: int = 1) -> None:
        super().__init__(f"{code} ({status})")
        self.code = code
        self.status = status
        self.tries = tries

    @property
    def is_not_found(self) -> bool:
        """Whether there is no such object."""
        return self.code in _NOT_FOUND


class _Loop(asyncio.SelectorEventLoop):
    """While the interpreter ends no work can be given to other threads: it is done here then."""

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[P]], T], *args: *P
    ) -> asyncio.Future[T]:
        """See ``asyncio``."""
        try:
            return super().run_in_executor(executor, func, *args)
        except RuntimeError:
            done: asyncio.Future[T] = self.create_future()
            try:
                done.set_result(func(*args))
            except Exception as failure:  # noqa: BLE001  it belongs to whoever waits
                done.set_exception(failure)
            return done


class S3Client:
    """One server, from any thread; a fork gets a connection of its own.

    Args:
        server: Which.

    Attributes:
        server: Which.
        retries: How many requests were made again so far.
    """

    def __init__(self, server: Server) -> None:
        self.server = server
        self.retries = 0
        self._lock = threading.Lock()
        self._running: tuple[int, _Loop, _Connection] | None = None

    def call(
        self,
        action: str,
        name: str,
        operation: str,
        arguments: Mapping[str, object],
        receive: Receiver | None = None,
    ) -> Answer:
        """Make a request and wait for the answer; blocks, about ``timeout_s`` at most.

        Args:
            action: What it is for, for messages.
            name: The object, for messages.
            operation: Of S3, as boto spells it.
            arguments: Of the operation, but for the bucket. A ``Body`` is read for each try.
            receive: Takes the ``Body`` of the answer.

        Raises:
            Refused: The server answered with an error code, and no try more will change it.
            StoreError: It could not be reached in time, or not with these credentials.
        """
        return self.result(self.start(action, name, operation, arguments, receive))

    def start(
        self,
        action: str,
        name: str,
        operation: str,
        arguments: Mapping[str, object],
        receive: Receiver | None = None,
    ) -> Future[Answer]:
        """Begin what ``call`` does; the future fails as that does."""
        loop, connection = self._connected()
        work = self._tried(
            f"{action} {self.where(name)}",
            lambda: connection.request(operation, arguments, receive),
        )
        return asyncio.run_coroutine_threadsafe(work, loop)

    def answered(
        self, action: str, name: str, operation: str, arguments: Mapping[str, object]
    ) -> Answer:
        """``call``, where no error code is expected.

        Raises:
            StoreError: There was one, or the call failed.
        """
        try:
            return self.call(action, name, operation, arguments)
        except Refused as refused:
            raise self.failed(action, name, refused) from None

    def result(self, started: Future[Answer]) -> Answer:
        """Wait for it; blocks. Whoever is interrupted here stops it too."""
        try:
            return started.result()
        except BaseException:
            started.cancel()
            raise

    def where(self, name: str) -> str:
        """An object as it stands in messages."""
        return f"{name} in {self.server}" if name else str(self.server)

    def failed(self, action: str, name: str, answer: Refused) -> StoreError:
        """The error that an answer means for whoever did not expect it."""
        if answer.is_not_found:
            return ObjectNotFound(f"{action} {self.where(name)}: not found")
        hint = _HINTS.get(answer.code) or _HINTS.get(str(answer.status), "")
        said = f"{action} {self.where(name)}: the server said {answer.code}, HTTP {answer.status}"
        return StoreError(said + (f"; {hint}" if hint else ""), retryable=_is_transient(answer))

    def _connected(self) -> tuple[_Loop, _Connection]:
        with self._lock:
            if self._running is None or self._running[0] != os.getpid():
                loop, connection = _Loop(), _Connection(self.server)
                run = threading.Thread(target=_run, args=(loop,), name="asymcheck-s3", daemon=True)
                run.start()
                self._running = os.getpid(), loop, connection
                ended = weakref.finalize(self, _end, os.getpid(), loop, connection)
                ended.atexit = False  # saves may still be drained then
            return self._running[1:]

    async def _tried(self, what: str, request: Callable[[], Awaitable[T]]) -> T:
        end_s = monotonic() + self.server.timeout_s
        tries, wait_s = 0, _FIRST_WAIT_S
        while True:
            tries += 1
            limit_s = min(self.server.timeout_s / _TRIES, max(end_s - monotonic(), 0.001))
            try:
                async with asyncio.timeout(limit_s):
                    return await request()
            except Exception as failure:  # noqa: BLE001  translated; a bug of ours is not retried
                told = translated(failure, what, tries)
                transient = _is_transient(told) if isinstance(told, Refused) else told.retryable
                pause_s = wait_s * random.uniform(0.5, 1.0)
                if not transient or monotonic() + pause_s >= end_s:
                    raise told from None  # what it is made of may hold more than may be shown
                _log.debug("once more in %.2f s: %s", pause_s, told)
            self.retries += 1
            await asyncio.sleep(pause_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)


class _Connection:
    """The client of s3fs, made at the first request; used on its loop only."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._system: Any = None
        self._opening: asyncio.Lock | None = None

    async def request(
        self, operation: str, arguments: Mapping[str, object], receive: Receiver | None
    ) -> Answer:
        """One try."""
        s3 = await self._opened()
        body = arguments.get("Body")
        if isinstance(body, BytesIO):
            body.seek(0)
        answer: Answer = await getattr(s3, operation)(Bucket=self._server.bucket, **arguments)
        if receive is not None:
            async with answer["Body"] as stream:
                await receive(stream.iter_chunks(_BLOCK_BYTES))
        return answer

    async def _opened(self) -> object:
        self._opening = self._opening or asyncio.Lock()
        async with self._opening:
            if self._system is None:
                system = self._made()
                await system.set_session()
                self._system = system
        return self._system._s3

    def _made(self) -> S3FileSystem:
        from s3fs import S3FileSystem

        server = self._server
        attempt_s = server.timeout_s / _TRIES
        named = {"region_name": server.region} if server.region else {}
        return S3FileSystem(
            asynchronous=True,
            skip_instance_cache=True,
            endpoint_url=server.endpoint or None,
            client_kwargs=named,
            config_kwargs={
                "retries": {"total_max_attempts": 1},  # the tries are ours
                "connect_timeout": attempt_s,
                "read_timeout": attempt_s,
                "max_pool_connections": max(10, 2 * server.connections),
                # Bytes are checked by our own hashes; other servers may not know these sums.
                "request_checksum_calculation": "when_required",
                "response_checksum_validation": "when_required",
            },
            **({"profile": server.profile} if server.profile else {}),
        )

    async def close(self) -> None:
        """Close its connections."""
        if self._system is not None:
            await self._system._s3.close()


def translated(failure: Exception, what: str, tries: int = 1) -> Refused | StoreError:
    """A failure of s3fs, of what it stands on or of the network, without a word of secrets.

    Raises:
        Exception: ``failure``, where it is none of these.
    """
    import aiohttp
    import botocore.exceptions as known

    response = getattr(failure, "response", None)
    if isinstance(failure, known.ClientError) and isinstance(response, dict):
        status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        code = str(response.get("Error", {}).get("Code") or status)
        return Refused(code, status, tries)
    kind = type(failure).__name__
    if isinstance(failure, known.SSLError):
        hint = "the server's certificate is not trusted, or it does not speak TLS"
        return StoreError(f"{what}: {kind}: {hint}", retryable=False)
    network = (
        known.HTTPClientError,
        known.ConnectionError,
        known.IncompleteReadError,
        aiohttp.ClientError,
        OSError,  # TimeoutError too
    )
    if isinstance(failure, network):
        spoken = "no answer in time" if isinstance(failure, TimeoutError) else kind
        return StoreError(
            f"{what}: {spoken}, after {tries} tries; is the server up, and the endpoint right?",
            retryable=True,
        )
    if isinstance(failure, known.NoCredentialsError | known.PartialCredentialsError):
        hint = "no credentials were found: see AWS_PROFILE, AWS_ACCESS_KEY_ID, ~/.aws/credentials"
        return StoreError(f"{what}: {kind}: {hint}", retryable=False)
    if isinstance(failure, known.BotoCoreError):
        plain = (known.ParamValidationError, known.ProfileNotFound, known.NoRegionError)
        said = f": {failure}" if isinstance(failure, plain) else ""
        return StoreError(f"{what}: {kind}{said}; check bucket and options", retryable=False)
    raise failure


def _is_transient(answer: Refused | StoreError) -> bool:
    if isinstance(answer, StoreError):
        return answer.retryable
    server_failed = answer.status >= 500 and answer.status != 501
    return server_failed or answer.status == 429 or answer.code in _RETRYABLE_CODES


def _run(loop: _Loop) -> None:
    asyncio.set_event_loop(loop)
    loop.set_exception_handler(_told)
    loop.run_forever()
    loop.close()


def _told(loop: asyncio.AbstractEventLoop, said: dict[str, Any]) -> None:
    """What nobody waits for. A connection that the end of the interpreter closes is no news."""
    message = str(said.get("message"))
    _log.log(logging.DEBUG if message.startswith("Unclosed") else logging.WARNING, "%s", message)


def _end(pid: int, loop: _Loop, connection: _Connection) -> None:
    """Without a wait: garbage may be collected on any thread, the loop's own too."""

    async def close() -> None:
        await connection.close()
        loop.stop()

    def begin() -> None:
        loop.ending = loop.create_task(close())  # type: ignore[attr-defined]  # kept alive

    if pid == os.getpid() and not loop.is_closed():
        loop.call_soon_threadsafe(begin)
