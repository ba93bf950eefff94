"""One agent as its clients see it: requests, uploads, open objects, each within a bound.

All of it runs in one event loop. An agent that fails once is *aside*: it is not asked any more
until a probe in the background finds it well, so it costs its bound once and not each time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import aiohttp

from asymcheck.errors import StoreError
from asymcheck.planning.idle import LOOK_S
from asymcheck.storage.peers.pacing import HOLD_S, Pace, Paces
from asymcheck.storage.peers.secret import Address
from asymcheck.storage.peers.shelf import Entry, Stamp, is_spread
from asymcheck.storage.peers.words import (
    AWAKE,
    DATA,
    FRAME_BYTES,
    MAX_MESSAGE_BYTES,
    WORDS,
    Line,
    LineLost,
    greet_as_client,
    parse_entries,
    parse_entry,
    parse_words,
)

_log = logging.getLogger(__name__)

PATH = "/peers"
SILENCE_S = 60.0
"""After so long without a word the other end counts as gone."""
_STALE_S = SILENCE_S / 2
_MOST_IDLE = 4
_MOST_LISTED_BYTES = 1 << 28
_CLOSE_S = 0.5

T = TypeVar("T")


class PeerFailed(Exception):
    """An agent did not do its part; ``str`` says why."""


class PeerRefused(StoreError):
    """An agent is well and says no."""


class Patience:
    """How long an agent may keep one operation waiting, all in all.

    Args:
        timeout_s: Whatever happens.
        slowest_bytes_per_s: More time comes with each byte that moves.
    """

    def __init__(self, timeout_s: float, slowest_bytes_per_s: float) -> None:
        self.left_s = timeout_s
        self._slowest_bytes_per_s = slowest_bytes_per_s

    async def wait(self, work: Awaitable[T], nbytes: int = 0) -> T:
        """Await within what is left.

        Raises:
            TimeoutError: It took longer.
        """
        self.left_s += nbytes / self._slowest_bytes_per_s
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        try:
            async with asyncio.timeout(max(0.0, self.left_s)):
                return await work
        finally:
            self.left_s -= loop.time() - begun_s


class Link:
    """The way to one agent.

    Args:
        address: Where it listens.
        secret: What it must hold; empty for none.
        timeout_s: How long it may keep an operation waiting, and how long it is left alone
            before a probe.
        slowest_bytes_per_s: Bytes that move slower than this count as a failure.
        paces: Hold packs back while others use the network; ``None`` to send at once.
        hold_s: For how long a pack may be held back in all.

    Attributes:
        aside: Why it is not asked any more, ``None`` while it is well.
        clock: The greatest stamp that it told of.
    """

    def __init__(
        self,
        address: Address,
        secret: bytes,
        timeout_s: float,
        slowest_bytes_per_s: float,
        paces: Paces | None = None,
        hold_s: float = HOLD_S,
    ) -> None:
        self.address = address
        self.aside: str | None = None
        self.clock = 0
        self._secret = secret
        self._timeout_s = timeout_s
        self._slowest_bytes_per_s = slowest_bytes_per_s
        self._session: aiohttp.ClientSession | None = None
        self._idle: list[tuple[float, Line]] = []
        self._reading: Line | None = None
        self._reading_lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._lines: dict[Line, Pace | None] = {}
        self._paces = paces
        self._hold_s = hold_s

    def patience(self) -> Patience:
        """A new bound for one operation."""
        return Patience(self._timeout_s, self._slowest_bytes_per_s)

    # --- operations ---------------------------------------------------------

    async def ask(self, op: str, **values: Any) -> dict[str, Any]:  # noqa: ANN401
        """One request and its answer.

        Raises:
            PeerFailed: It did not answer; it is aside now.
            PeerRefused: It said no.
        """

        async def talk(line: Line) -> dict[str, Any]:
            await line.tell(op=op, **values)
            return self._checked(await line.hear_words())

        async with self.guarded():
            return await self.patience().wait(self._on_some_line(talk))

    async def entries(self, prefix: str) -> list[Entry]:
        """What it knows of the names below a folder. Raises as ``ask``."""
        patience = self.patience()

        async def talk(line: Line) -> list[Entry]:
            found: list[Entry] = []
            nbytes = 0
            await line.tell(op="list", prefix=prefix)
            while True:
                kind, content = await line.hear()
                if kind == WORDS:
                    self._checked(parse_words(content))
                    return found
                nbytes += len(content)
                if nbytes > _MOST_LISTED_BYTES:
                    raise LineLost(f"a listing of more than {_MOST_LISTED_BYTES} bytes")
                found += parse_entries(content)

        async with self.guarded():
            return await patience.wait(self._on_some_line(talk))

    async def upload(self, name: str, home: int) -> Upload:
        """Begin to store an object. Raises as ``ask``."""
        patience = self.patience()

        async def talk(line: Line) -> Upload:
            await line.tell(op="put", name=name, home=home)
            self._checked(await line.hear_words())
            pace = self._lines.get(line) if is_spread(name) else None
            return Upload(self, line, patience, pace, self._hold_s)

        async with self.guarded():
            return await patience.wait(self._on_some_line(talk, keep=True))

    async def open(self, name: str) -> Opened | None:
        """Open an object: it stays readable whatever happens to its name.

        Returns:
            ``None`` where there is none. Raises as ``ask``.
        """
        async with self.guarded():
            return await self.patience().wait(self._open(name))

    async def _open(self, name: str) -> Opened | None:
        async with self._reading_lock:
            for is_last in (False, True):
                line, fresh = self._reading, False
                if line is None:
                    line, fresh = await self._connect(), True
                    self._reading = line
                    self._spawn(self._keep_awake(line))
                try:
                    await line.tell(op="open", name=name)
                    said = self._checked(await line.hear_words())
                except BaseException as failure:
                    self._lose_reading(line)
                    if isinstance(failure, LineLost) and not (fresh or is_last):
                        continue
                    raise
                entry = said.get("entry")
                if entry is None:
                    return None
                return Opened(self, line, parse_entry(entry), int(said["handle"]))
        raise AssertionError("the loop returns or raises")

    def _lose_reading(self, line: Line) -> None:
        if self._reading is line:
            self._reading = None
        self._close_soon(line)

    # --- lines --------------------------------------------------------------

    async def _on_some_line(self, talk: Callable[[Line], Awaitable[T]], *, keep: bool = False) -> T:
        """Talk on a line that lies ready, or on a new one where it turns out to be dead."""
        loop = asyncio.get_running_loop()
        while self._idle:
            since_s, line = self._idle.pop()
            if loop.time() - since_s > _STALE_S:
                self._close_soon(line)
                continue
            with suppress(LineLost):
                return await self._talk(line, talk, keep)
        return await self._talk(await self._connect(), talk, keep)

    async def _talk(self, line: Line, talk: Callable[[Line], Awaitable[T]], keep: bool) -> T:
        try:
            found = await talk(line)
        except PeerRefused:
            self.give_back(line)
            raise
        except BaseException:
            self._close_soon(line)
            raise
        if not keep:
            self.give_back(line)
        return found

    def give_back(self, line: Line) -> None:
        """Keep a line for the next request."""
        if len(self._idle) < _MOST_IDLE:
            self._idle.append((asyncio.get_running_loop().time(), line))
        else:
            self._close_soon(line)

    async def _connect(self) -> Line:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._timeout_s),
                trust_env=False,
            )
        channel = await self._session.ws_connect(
            f"http://{self.address}{PATH}",
            compress=0,
            max_msg_size=MAX_MESSAGE_BYTES,
            timeout=aiohttp.ClientWSTimeout(ws_close=_CLOSE_S),
        )
        try:
            line = await greet_as_client(channel, self._secret)
        except BaseException:
            await channel.close()
            raise
        self._lines[line] = None
        if self._paces is not None:
            self._lines[line] = self._paces.join(channel.get_extra_info("socket"))
        return line

    def _close_soon(self, line: Line) -> None:
        self._spawn(self._close(line))

    async def _close(self, line: Line) -> None:
        with suppress(LineLost, OSError, TimeoutError, RuntimeError):
            async with asyncio.timeout(2 * _CLOSE_S):
                await line.channel.close()  # type: ignore[attr-defined]
        self._lines.pop(line, None)

    async def _keep_awake(self, line: Line) -> None:
        """The agent lets go of what a silent client holds; this one only has nothing to say."""
        with suppress(LineLost):
            while self._reading is line:
                await asyncio.sleep(SILENCE_S / 4)
                await line.say(AWAKE)

    def _spawn(self, work: Any) -> None:  # noqa: ANN401
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End every connection."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*map(self._close, list(self._lines)))
        if self._session is not None:
            await self._session.close()

    # --- failures -----------------------------------------------------------

    @asynccontextmanager
    async def guarded(self) -> AsyncIterator[None]:
        """Set the agent aside where it fails."""
        try:
            yield
        except (LineLost, aiohttp.ClientError, OSError, TimeoutError) as failure:
            raise self.fail(failure) from failure

    def fail(self, failure: BaseException) -> PeerFailed:
        """Set the agent aside; what to raise."""
        why = str(failure) or f"no answer within {self._timeout_s:g} s"
        if isinstance(failure, TimeoutError):
            why = f"too slow, or no answer within {self._timeout_s:g} s"
        if self.aside is None:
            _log.warning("peer %s is set aside: %s", self.address, why)
            self._spawn(self._probe())
        self.aside = why
        return PeerFailed(f"{self.address}: {why}")

    async def _probe(self) -> None:
        while self.aside is not None:
            await asyncio.sleep(self._timeout_s)
            with suppress(LineLost, aiohttp.ClientError, OSError, TimeoutError):
                async with asyncio.timeout(self._timeout_s):
                    line = await self._connect()
                self.give_back(line)
                self.aside = None
                _log.warning("peer %s is back", self.address)

    def _checked(self, said: dict[str, Any]) -> dict[str, Any]:
        try:
            self.clock = max(self.clock, int(said["clock"]))
        except (KeyError, TypeError, ValueError) as failure:
            raise LineLost("an answer without a clock") from failure
        if "refused" in said:
            raise PeerRefused(f"{self.address}: {said['refused']}", retryable=False)
        return said


class Upload:
    """An object on its way to one agent.

    Attributes:
        held_s: For how long it was held back so far.
    """

    def __init__(
        self, link: Link, line: Line, patience: Patience, pace: Pace | None, hold_s: float
    ) -> None:
        self.link = link
        self._line: Line | None = line
        self._patience = patience
        self._pace = pace
        self._hold_s = hold_s
        self.held_s = 0.0
        # Heard while data is still being sent: that is how it says that there is no room.
        self._answer = asyncio.get_running_loop().create_task(line.hear_words())
        link._spawn(self._keep_awake(line))

    async def feed(self, data: memoryview) -> None:
        """Send the next bytes, in frames.

        Raises:
            PeerFailed: It is too slow, or gone.
            PeerRefused: It has no room.
        """
        line = self._line
        assert line is not None, "it has not ended"
        try:
            for start in range(0, len(data), FRAME_BYTES):
                frame = data[start : start + FRAME_BYTES]
                if self._pace is not None:
                    await self._turn(self._pace, len(frame))
                await self._patience.wait(line.say(DATA, frame), len(frame))
                if self._answer.done():
                    await self._heard()
        except (LineLost, OSError, TimeoutError) as failure:
            self._end()
            raise self.link.fail(failure) from failure

    async def _turn(self, pace: Pace, nbytes: int) -> None:
        """Wait until so many bytes may go, or were held back for long enough."""
        loop = asyncio.get_running_loop()
        while self.held_s < self._hold_s and (verdict := pace.ask(nbytes)) != "go":
            if verdict == "queued":  # that is for the agent to answer for
                await self._patience.wait(asyncio.sleep(LOOK_S))
                continue
            begin_s = loop.time()
            await asyncio.sleep(LOOK_S)
            self.held_s += loop.time() - begin_s

    async def finish(
        self, nbytes: int, digest: str, stamp: Stamp, *, only_new: bool = False
    ) -> bool:
        """Say that it is whole; whether it stands. Raises as ``feed``."""
        line = self._line
        assert line is not None, "it has not ended"
        try:
            await line.tell(nbytes=nbytes, digest=digest, stamp=stamp, only_new=only_new)
            said = await self._patience.wait(self._heard(), nbytes)
        except (LineLost, OSError, TimeoutError) as failure:
            self._end()
            raise self.link.fail(failure) from failure
        self._line = None
        self.link.give_back(line)
        return bool(said.get("stands"))

    async def _heard(self) -> dict[str, Any]:
        try:
            return self.link._checked(await self._answer)
        except PeerRefused:
            self._end()
            raise

    def abort(self) -> None:
        """Leave it: nobody will ever see it."""
        if self._line is not None:
            self._end()

    def _end(self) -> None:
        line, self._line = self._line, None
        self._answer.cancel()
        if line is not None:
            self.link._close_soon(line)

    async def _keep_awake(self, line: Line) -> None:
        with suppress(LineLost):
            while self._line is line:
                await asyncio.sleep(SILENCE_S / 4)
                if self._line is line:
                    await line.say(AWAKE)


class Opened:
    """An object that an agent keeps for us."""

    def __init__(self, link: Link, line: Line, entry: Entry, handle: int) -> None:
        self.link = link
        self.entry = entry
        self._line = line
        self._handle = handle

    async def read(self, offset: int, nbytes: int) -> AsyncIterator[memoryview]:
        """A range that is within the object, in pieces.

        Raises:
            PeerFailed: It is too slow, or gone.
            PeerRefused: It lost the object.
        """
        patience = self.link.patience()
        async with self.link.guarded(), self.link._reading_lock:
            if self.link._reading is not self._line:
                raise LineLost("the connection on which it was opened is gone")
            try:
                await self._line.tell(op="get", handle=self._handle, offset=offset, nbytes=nbytes)
                while nbytes:
                    kind, content = await patience.wait(self._line.hear(), FRAME_BYTES)
                    if kind == WORDS:
                        self.link._checked(parse_words(content))
                    if kind != DATA or len(content) > nbytes:
                        raise LineLost("it sent something else than what was asked for")
                    nbytes -= len(content)
                    yield content
                self.link._checked(await patience.wait(self._line.hear_words()))
            except BaseException:
                self.link._lose_reading(self._line)
                raise

    async def close(self) -> None:
        """The agent need not keep it any more."""
        with suppress(PeerFailed, PeerRefused):
            async with self.link.guarded(), self.link._reading_lock:
                if self.link._reading is self._line:
                    patience = self.link.patience()
                    try:
                        await patience.wait(self._line.tell(op="close", handle=self._handle))
                        self.link._checked(await patience.wait(self._line.hear_words()))
                    except BaseException:
                        self.link._lose_reading(self._line)
                        raise
