"""The agent of a host: holds objects in its memory and serves them to whoever holds the secret.

Its memory is bounded: by the room for objects, and by a bound on connections and on what each of
them may send before it has proved the secret, and after.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from aiohttp import web

from asymcheck.errors import OptionError, StoreError
from asymcheck.storage.peers.healing import Healed, Healer, Membership
from asymcheck.storage.peers.link import PATH, SILENCE_S, Link
from asymcheck.storage.peers.secret import Address, secret_for
from asymcheck.storage.peers.shelf import (
    Entry,
    Held,
    Incoming,
    NoRoom,
    Shelf,
    Stamp,
    Torn,
    is_spread,
)
from asymcheck.storage.peers.words import (
    DATA,
    FRAME_BYTES,
    MAX_MESSAGE_BYTES,
    WORDS,
    Line,
    LineLost,
    NotTrusted,
    dump_entries,
    greet_as_agent,
    parse_entry,
    parse_words,
)

_log = logging.getLogger(__name__)

_MOST_LINES = 512
_MOST_STRANGERS = 64
_GREETING_S = 5.0
_MOST_OPEN = 1 << 16
_LISTED_AT_ONCE = 128  # names have at most 1 KiB each
_MOST_TOLD = 1024
_PEER_TIMEOUT_S = 10.0
_PEER_BYTES_PER_S = 1e6  # slower is no failure as long as it is the only copy

HEAL_BYTES_PER_S = 100e6
"""How fast an agent gets what it lacks from others, if nothing else is said."""


class Agent:
    """Serves a shelf. Runs in one event loop.

    Args:
        address: Where to listen; port 0 takes a free one.
        room_bytes: How much objects may take.
        secret: What clients must hold; empty for none, on loopback alone.

    Attributes:
        address: Where it listens.
        shelf: What it holds.

    Raises:
        OptionError: Others than this host could connect, and there is no secret.
    """

    def __init__(self, address: Address, room_bytes: int, secret: bytes = b"") -> None:
        if not secret and not address.is_loopback:
            raise OptionError(
                f"listen {address}: without a secret an agent listens on loopback alone: give "
                f"--secret-file, the same secret on every host"
            )
        if room_bytes < 1:
            raise OptionError(f"room: expected more than 0 bytes, found {room_bytes}")
        self.address = address
        self.shelf = Shelf(room_bytes)
        self._secret = secret
        self._runner: web.AppRunner | None = None
        self._door: _Door | None = None
        self._server: asyncio.Server | None = None
        self._told: OrderedDict[str, None] = OrderedDict()
        self._born = secrets.token_hex(8)
        self._membership: Membership | None = None
        self._healer: Healer | None = None
        self._healing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to listen.

        Raises:
            OptionError: It cannot listen there: another agent does, say.
        """
        app = web.Application()
        app.router.add_get(PATH, self._welcome)
        self._runner = web.AppRunner(
            app, access_log=None, handle_signals=False, shutdown_timeout=0.1
        )
        await self._runner.setup()
        assert self._runner.server is not None
        self._door = _Door(self._runner.server)
        try:
            self._server = await asyncio.get_running_loop().create_server(
                self._door, self.address.host, self.address.port
            )
        except OSError as failure:
            await self.stop()
            raise OptionError(
                f"listen {self.address}: {failure.strerror or failure}: does another agent run "
                f"there? One agent serves all runs of a host"
            ) from failure
        port = self._server.sockets[0].getsockname()[1]
        self.address = Address(self.address.host, port)

    def join(
        self,
        membership: Membership,
        *,
        most_bytes_per_s: float = HEAL_BYTES_PER_S,
        look_s: float = 5.0,
        told: Callable[[Healed], None] = lambda healed: None,
    ) -> Healer:
        """Know the other agents from now on, and get from them what this one should hold.

        Args:
            membership: Who they are, and which one this is.
            most_bytes_per_s: How fast objects come from them, all in all.
            look_s: Between two looks at what they have, in seconds.
            told: Called in the loop when nothing is missing any more.

        Returns:
            What does it, until ``stop``.

        Raises:
            OptionError: One of them is not on this host, and there is no secret.
        """
        if not self._secret:
            secret_for(None, list(membership.hosts))
        links = {
            i: Link(host, self._secret, _PEER_TIMEOUT_S, _PEER_BYTES_PER_S)
            for i, host in enumerate(membership.hosts)
            if i != membership.here
        }
        self._membership = membership
        self._healer = Healer(
            self.shelf,
            membership,
            links,
            most_bytes_per_s=most_bytes_per_s,
            look_s=look_s,
            told=told,
        )
        self._healing = asyncio.get_running_loop().create_task(self._healer.run())
        self._healing.add_done_callback(_say_why_it_ended)
        return self._healer

    def about(self) -> dict[str, Any]:
        """What it tells of itself."""
        return {
            "free_bytes": self.shelf.free_bytes(),
            "room_bytes": self.shelf.room_bytes,
            "used_bytes": self.shelf.used_bytes,
            "changes": self.shelf.changes,
            "born": self._born,
            "member": None if self._membership is None else self._membership.told(),
            "is_whole": self._healer is None or self._healer.is_whole,
        }

    async def stop(self) -> None:
        """End every connection and let go of everything."""
        if self._healing is not None and self._healer is not None:
            self._healing.cancel()
            await asyncio.gather(self._healing, return_exceptions=True)
            await self._healer.close()
        if self._server is not None:
            self._server.close()
        if self._door is not None:
            self._door.close()
        if self._runner is not None:
            await self._runner.cleanup()

    async def _welcome(self, request: web.Request) -> web.StreamResponse:
        channel = web.WebSocketResponse(
            compress=False, max_msg_size=MAX_MESSAGE_BYTES, timeout=0.5, decode_text=False
        )
        await channel.prepare(request)
        who = str(request.remote)
        try:
            async with asyncio.timeout(_GREETING_S):
                line = await greet_as_agent(channel, self._secret)
            assert self._door is not None
            self._door.admit(request)
        except (LineLost, TimeoutError, OSError) as failure:
            if isinstance(failure, NotTrusted):
                self._tell_once(who)
        else:
            await _Conversation(self.shelf, line, self.about).hold(who)
        await channel.close()
        return channel

    def _tell_once(self, who: str) -> None:
        if who not in self._told:
            self._told[who] = None
            _log.warning("refused %s: it does not hold the secret", who)
        while len(self._told) > _MOST_TOLD:
            self._told.popitem(last=False)


def _say_why_it_ended(healing: asyncio.Task[None]) -> None:
    if not healing.cancelled() and healing.exception() is not None:
        _log.error("nothing comes from other agents any more", exc_info=healing.exception())


class _Door:
    """Makes the end of each connection; beyond the bounds one that hangs up."""

    def __init__(self, server: web.Server) -> None:
        self._server = server
        self._strangers: dict[Any, tuple[float, asyncio.TimerHandle]] = {}

    def __call__(self) -> asyncio.BaseProtocol:
        loop = asyncio.get_running_loop()
        for stranger, (since_s, _) in list(self._strangers.items()):
            # One that is just being connected has no transport yet.
            if stranger.transport is None and loop.time() - since_s > 1:
                self._forget(stranger)
        if len(self._strangers) >= _MOST_STRANGERS or len(self._server.connections) >= _MOST_LINES:
            return _HangUp()
        stranger = self._server()
        timer = loop.call_later(2 * _GREETING_S, self._expel, stranger)
        self._strangers[stranger] = (loop.time(), timer)
        return stranger

    def close(self) -> None:
        """Cut every connection."""
        for handler in self._server.connections:
            if handler.transport is not None:
                handler.transport.abort()

    def admit(self, request: web.Request) -> None:
        """It is no stranger any more."""
        self._forget(request.protocol)

    def _expel(self, stranger: Any) -> None:  # noqa: ANN401
        if self._forget(stranger) and stranger.transport is not None:
            stranger.transport.abort()

    def _forget(self, stranger: Any) -> bool:  # noqa: ANN401
        _, timer = self._strangers.pop(stranger, (0.0, None))
        if timer is not None:
            timer.cancel()
        return timer is not None


class _HangUp(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


class _Conversation:
    """What one client asks, one thing after the other."""

    def __init__(self, shelf: Shelf, line: Line, about: Callable[[], dict[str, Any]]) -> None:
        self._shelf = shelf
        self._about = about
        self._line = line
        self._open: dict[int, Held] = {}
        self._opened = 0
        self._incoming: Incoming | None = None

    async def hold(self, who: str) -> None:
        """Answer until the client is gone or silent."""
        try:
            while True:
                said = await self._hear_words()
                async with asyncio.timeout(SILENCE_S) as bound:
                    await self._answer(said, bound)
        except (LineLost, OSError, TimeoutError) as failure:
            _log.debug("the connection of %s ended: %s", who, failure)
        finally:
            for held in self._open.values():
                self._shelf.unpin(held)
            if self._incoming is not None:
                self._incoming.drop()

    async def _hear_words(self) -> dict[str, Any]:
        kind, content = await self._line.hear(SILENCE_S)
        if kind != WORDS:
            raise LineLost(f"a message of kind {kind!r}, expected a request")
        return parse_words(content)

    async def _tell(self, **values: Any) -> None:  # noqa: ANN401
        await self._line.tell(clock=self._shelf.clock, **values)

    async def _answer(self, said: dict[str, Any], bound: asyncio.Timeout) -> None:
        match said:
            case {"op": "put", "name": str(name), "home": int(home)}:
                bound.reschedule(None)  # as long as the client is not silent
                await self._take(name, home)
            case {"op": "stat", "name": str(name)}:
                await self._tell(entry=self._shelf.known(name))
            case {"op": "open", "name": str(name)}:
                await self._pin(name)
            case {"op": "get", "handle": int(handle), "offset": int(offset), "nbytes": int(size)}:
                bound.reschedule(None)
                await self._send(handle, offset, size)
            case {"op": "close", "handle": int(handle)}:
                held = self._open.pop(handle, None)
                if held is not None:
                    self._shelf.unpin(held)
                await self._tell()
            case {"op": "list", "prefix": str(prefix)}:
                await self._list(prefix)
            case {"op": "delete", "entry": found}:
                self._shelf.remove(parse_entry(found)._replace(is_there=False))
                await self._tell()
            case {"op": "withdraw", "entry": found}:
                self._shelf.withdraw(parse_entry(found))
                await self._tell()
            case {"op": "sweep", "prefix": str(prefix)}:
                await self._tell(broken=self._shelf.sweep(prefix))
            case {"op": "info"}:
                await self._tell(**self._about())
            case _:
                raise LineLost("a request that is not known")

    # --- taking -------------------------------------------------------------

    async def _take(self, name: str, home: int) -> None:
        try:
            incoming = self._incoming = self._shelf.begin(name, home)
        except StoreError as failure:
            await self._tell(refused=str(failure))
            return
        await self._tell()
        refused = ""
        while True:
            kind, content = await self._line.hear(SILENCE_S)
            if kind == WORDS:
                break
            if kind != DATA:
                raise LineLost(f"a message of kind {kind!r}, expected data")
            if not refused:
                try:
                    incoming.append(content)
                except NoRoom as failure:
                    refused = self._no_room(name, incoming, len(content), failure)
                    await self._tell(refused=refused)
        self._incoming = None
        if not refused:
            await self._show(incoming, parse_words(content))

    def _no_room(self, name: str, incoming: Incoming, more: int, failure: NoRoom) -> str:
        kind = "packs" if is_spread(name) else "objects"
        return (
            f"no room for {name}: it needs more than {failure.free_bytes} bytes, the room is "
            f"{self._shelf.room_bytes} bytes, {self._shelf.used_bytes} of them hold other {kind}; "
            f"give the agent more (--room-gib), or keep fewer checkpoints"
        )

    async def _show(self, incoming: Incoming, said: dict[str, Any]) -> None:
        match said:
            case {
                "nbytes": int(nbytes),
                "digest": str(digest),
                "stamp": [int(count), str(writer)],
                "only_new": bool(only_new),
            }:
                stamp: Stamp = (count, writer)
            case _:
                incoming.drop()
                raise LineLost("an end that is none")
        try:
            held = incoming.seal(nbytes, digest, stamp)
        except Torn as failure:
            await self._tell(refused=f"{incoming.name} arrived torn: {failure}")
            return
        await self._tell(stands=self._shelf.put(held, only_new=only_new))

    # --- giving -------------------------------------------------------------

    async def _pin(self, name: str) -> None:
        if len(self._open) >= _MOST_OPEN:
            await self._tell(refused=f"more than {_MOST_OPEN} open objects")
            return
        held = self._shelf.pin(name)
        if held is None:
            await self._tell(entry=None)
            return
        self._opened += 1
        self._open[self._opened] = held
        await self._tell(entry=held.entry, handle=self._opened)

    async def _send(self, handle: int, offset: int, nbytes: int) -> None:
        held = self._open.get(handle)
        if held is None or offset < 0 or nbytes < 0 or offset + nbytes > held.entry.nbytes:
            await self._tell(refused=f"no bytes {offset} to {offset + nbytes} of handle {handle}")
            return
        for piece in held.pieces(offset, nbytes, FRAME_BYTES):
            async with asyncio.timeout(SILENCE_S):
                await self._line.say(DATA, piece)
        await self._tell()

    async def _list(self, prefix: str) -> None:
        for some in _by(self._shelf.entries(prefix), _LISTED_AT_ONCE):
            await self._line.say(DATA, dump_entries(some))
        await self._tell()


def _by(entries: list[Entry], size: int) -> Iterator[list[Entry]]:
    for start in range(0, len(entries), size):
        yield entries[start : start + size]
