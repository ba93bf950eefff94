"""What two ends say to each other: proof of the secret, then messages that each carry a MAC.

Both ends throw a nonce and prove with HMAC-SHA256 that they hold the secret. From secret and
nonces follow two keys, one a direction. Every later message ends with the MAC of its number in its
direction and its content: nothing can be forged, replayed, reordered or left out unnoticed, in
this connection or in another, and no clock is needed. Nothing is encrypted.

A message is its kind (one byte), its content and 32 bytes of MAC.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
from hashlib import sha256
from typing import Any, Protocol

from aiohttp import WSMessage, WSMsgType

from asymcheck.storage.peers.shelf import Entry
from asymcheck.storage.store import Buffer

FRAME_BYTES = 1 << 18
_MAC_BYTES = 32
_NONCE_BYTES = 32
MAX_MESSAGE_BYTES = 1 + FRAME_BYTES + _MAC_BYTES + 1
"""For aiohttp, which refuses messages of this size and above."""
_JSON_BYTES = 1 << 14
_VERSION = b"asymcheck peers 1"

WORDS = b"J"
"""A JSON object: a request, an answer, the end of a stream."""
DATA = b"D"
"""A piece of a stream."""
AWAKE = b"K"
"""Nothing: the other end still lives."""


class LineLost(Exception):
    """The other end is gone, silent, or does not keep to the protocol."""


class NotTrusted(LineLost):
    """The other end does not hold the same secret."""


class Channel(Protocol):
    """A WebSocket, of either end."""

    async def send_bytes(self, data: bytes) -> None:
        """Send one message; waits while too much is under way."""
        ...

    async def receive(self) -> WSMessage:
        """The next message."""
        ...


async def _raw(channel: Channel, at_most: int) -> bytes:
    message = await channel.receive()
    if message.type is not WSMsgType.BINARY:
        why = f": {message.data}"[:200] if isinstance(message.data, Exception) else ""
        raise LineLost(f"the connection was closed{why}")
    if len(message.data) > at_most:
        raise LineLost(f"a message of {len(message.data)} bytes, expected at most {at_most}")
    return bytes(message.data)


async def _send(channel: Channel, data: bytes) -> None:
    try:
        await channel.send_bytes(data)
    except (OSError, RuntimeError) as failure:  # aiohttp's closed connections are OSErrors
        raise LineLost(f"the connection was closed: {failure}") from failure


class Line:
    """One connection after the proof. One task hears at a time, and one says a stream."""

    def __init__(self, channel: Channel, saying: bytes, hearing: bytes) -> None:
        self.channel = channel
        self._saying = hmac.new(saying, digestmod=sha256)
        self._hearing = hmac.new(hearing, digestmod=sha256)
        self._said = self._heard = 0

    async def say(self, kind: bytes, content: Buffer = b"") -> None:
        """Send a message; waits for room.

        Raises:
            LineLost: The other end is gone.
        """
        mac = self._saying.copy()
        mac.update(self._said.to_bytes(8, "big") + kind)
        mac.update(content)
        self._said += 1
        # Nothing is awaited between the number and the socket's buffer: they stay in order.
        await _send(self.channel, b"".join((kind, content, mac.digest())))

    async def tell(self, **values: Any) -> None:  # noqa: ANN401
        """Send an object. Raises as ``say``."""
        await self.say(WORDS, json.dumps(values).encode())

    async def hear(self, silence_s: float | None = None) -> tuple[bytes, memoryview]:
        """The next message's kind and content; waits.

        Args:
            silence_s: How long the other end may say nothing at all.

        Raises:
            LineLost: There is none, or it is not what the other end said next.
            TimeoutError: It was silent for longer.
        """
        while True:
            async with asyncio.timeout(silence_s):
                data = memoryview(await _raw(self.channel, MAX_MESSAGE_BYTES))
            kind, content, found = bytes(data[:1]), data[1:-_MAC_BYTES], data[-_MAC_BYTES:]
            if len(data) <= _MAC_BYTES:
                raise LineLost("a message without a MAC")
            mac = self._hearing.copy()
            mac.update(self._heard.to_bytes(8, "big") + kind)
            mac.update(content)
            self._heard += 1
            if not hmac.compare_digest(mac.digest(), found):
                raise LineLost("a message with a wrong MAC")
            if kind != AWAKE:
                return kind, content

    async def hear_words(self) -> dict[str, Any]:
        """The next message, which must be an object. Raises as ``hear``."""
        kind, content = await self.hear()
        if kind != WORDS:
            raise LineLost(f"a message of kind {kind!r}, expected an object")
        return parse_words(content)


def parse_words(content: memoryview) -> dict[str, Any]:
    """A JSON object.

    Raises:
        LineLost: It is none, or too long.
    """
    if len(content) > _JSON_BYTES:
        raise LineLost(f"an object of {len(content)} bytes, expected at most {_JSON_BYTES}")
    found = _json_of(content, "a message")
    if not isinstance(found, dict):
        raise LineLost("a message that is no object")
    return found


def dump_entries(entries: list[Entry]) -> bytes:
    """As they travel."""
    return json.dumps(entries).encode()


def parse_entries(content: memoryview) -> list[Entry]:
    """What ``dump_entries`` made.

    Raises:
        LineLost: It is not that.
    """
    found = _json_of(content, "a listing")
    if not isinstance(found, list):
        raise LineLost("a listing that is no list")
    return [parse_entry(entry) for entry in found]


def _json_of(content: memoryview, what: str) -> object:
    try:
        return json.loads(bytes(content))
    except (ValueError, RecursionError) as failure:
        raise LineLost(f"{what} that is no JSON") from failure


def parse_entry(found: object) -> Entry:
    """One entry.

    Raises:
        LineLost: It is none.
    """
    match found:
        case [
            str(name),
            int(nbytes),
            str(digest),
            int(home),
            [int(count), str(writer)],
            bool(is_there),
        ] if nbytes >= 0 and count >= 0:
            return Entry(name, nbytes, digest, home, (count, writer), is_there)
    raise LineLost("an entry that is none")


# --- the proof --------------------------------------------------------------


def _proof(secret: bytes, label: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, b" ".join((_VERSION, label, nonces)), "sha256")


async def greet_as_client(channel: Channel, secret: bytes) -> Line:
    """Prove the secret to an agent, and let it prove the same.

    Raises:
        NotTrusted: One of the two has another secret, or speaks another version.
        LineLost: The agent is gone.
    """
    challenge = await _raw(channel, _NONCE_BYTES)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    nonces = challenge + nonce
    await _send(channel, nonce + _proof(secret, b"client", nonces))
    try:
        answer = await _raw(channel, _MAC_BYTES)
    except LineLost as failure:
        raise NotTrusted("it refused: the secrets differ, or one of us has none") from failure
    if not hmac.compare_digest(answer, _proof(secret, b"agent", nonces)):
        raise NotTrusted("it does not hold the secret")
    return Line(channel, *_keys(secret, nonces))


async def greet_as_agent(channel: Channel, secret: bytes) -> Line:
    """Let a client prove the secret, and prove it as well.

    Raises:
        NotTrusted: It does not hold the secret.
        LineLost: It is gone.
    """
    challenge = secrets.token_bytes(_NONCE_BYTES)
    await _send(channel, challenge)
    said = await _raw(channel, _NONCE_BYTES + _MAC_BYTES)
    nonces = challenge + said[:_NONCE_BYTES]
    if not hmac.compare_digest(said[_NONCE_BYTES:], _proof(secret, b"client", nonces)):
        raise NotTrusted("it does not hold the secret")
    await _send(channel, _proof(secret, b"agent", nonces))
    clients, agents = _keys(secret, nonces)
    return Line(channel, agents, clients)


def _keys(secret: bytes, nonces: bytes) -> tuple[bytes, bytes]:
    return _proof(secret, b"from client", nonces), _proof(secret, b"from agent", nonces)
