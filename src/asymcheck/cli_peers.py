"""The command that gives the memory of this host to the checkpoints of others."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer

from asymcheck.cli_base import reported
from asymcheck.errors import OptionError
from asymcheck.rendering import show_line, size_text

if TYPE_CHECKING:  # aiohttp need not be installed
    from asymcheck.storage.peers.agent import Agent

app = typer.Typer()

_GIB = 1 << 30


@app.command("agent")
@reported
def serve(
    listen: Annotated[
        str, typer.Option(help="Address of this host that the others reach, HOST:PORT.")
    ],
    room_gib: Annotated[
        float, typer.Option("--room-gib", help="Memory that checkpoints may take, in GiB.")
    ],
    secret_file: Annotated[
        str | None,
        typer.Option("--secret-file", help="The same secret on all hosts; mode 0600."),
    ] = None,
) -> None:
    """Hold checkpoints of other hosts in this host's memory, until it is ended.

    One agent on each host serves all runs. A training uses them as a place of checkpoints:
    peers://HOST:PORT,HOST:PORT/RUN. Without a secret it listens on loopback alone. What it holds
    is gone when it ends.
    """
    if find_spec("aiohttp") is None:
        raise OptionError("agent: needs the package aiohttp: pip install 'asymcheck[peers]'")
    from asymcheck.storage.peers.agent import Agent
    from asymcheck.storage.peers.secret import parse_address, read_secret

    secret = b"" if secret_file is None else read_secret(secret_file)
    agent = Agent(parse_address(listen), int(room_gib * _GIB), secret)
    with suppress(KeyboardInterrupt):
        asyncio.run(_serve(agent))


async def _serve(agent: Agent) -> None:
    await agent.start()
    over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
    try:
        show_line(f"listening on {agent.address}, room {size_text(agent.shelf.room_bytes)}")
        await over.wait()
    finally:
        await agent.stop()
