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
    from asymcheck.storage.peers.healing import Healed, Membership
    from asymcheck.storage.peers.secret import Address

app = typer.Typer()

_MIB, _GIB = 1 << 20, 1 << 30


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
    peers: Annotated[
        str,
        typer.Option(
            help="All agents, HOST:PORT,HOST:PORT, in the order of the URLs of the trainings: get "
            "from them what this one lacks.",
        ),
    ] = "",
    here: Annotated[
        int | None,
        typer.Option("--self", help="Which of --peers this is, from 0; found out if not said."),
    ] = None,
    replicas: Annotated[
        int, typer.Option(help="On how many hosts a pack lies, as the URLs say; with --peers.")
    ] = 2,
    heal_mib_per_s: Annotated[
        float, typer.Option("--heal-mib-per-s", help="How fast it gets what it lacks, at most.")
    ] = 100.0,
) -> None:
    """Hold checkpoints of other hosts in this host's memory, until it is ended.

    One agent on each host serves all runs. A training uses them as a place of checkpoints:
    peers://HOST:PORT,HOST:PORT/RUN. Without a secret it listens on loopback alone. What it holds
    is gone when it ends; with --peers the one in its place gets it back from the others.
    """
    if find_spec("aiohttp") is None:
        raise OptionError("agent: needs the package aiohttp: pip install 'asymcheck[peers]'")
    from asymcheck.storage.peers.agent import Agent
    from asymcheck.storage.peers.secret import parse_address, read_secret

    address = parse_address(listen)
    secret = b"" if secret_file is None else read_secret(secret_file)
    membership = _membership(peers, address, here, replicas) if peers else None
    if membership is None and here is not None:
        raise OptionError("self: means one of --peers, which are not given")
    if not heal_mib_per_s > 0:
        raise OptionError(f"heal-mib-per-s: expected more than 0, found {heal_mib_per_s}")
    agent = Agent(address, int(room_gib * _GIB), secret)
    with suppress(KeyboardInterrupt):
        asyncio.run(_serve(agent, membership, heal_mib_per_s * _MIB))


def _membership(peers: str, listen: Address, here: int | None, replicas: int) -> Membership:
    from asymcheck.storage.peers.healing import Membership
    from asymcheck.storage.peers.secret import found_here, parse_address

    hosts = [parse_address(part) for part in peers.split(",") if part]
    if here is None:
        here = hosts.index(listen) if listen in hosts else found_here(hosts)
    if here is None:
        raise OptionError(
            f"peers: expected this agent, {listen}, among them, found {peers}: name it, or say "
            f"--self"
        )
    return Membership(tuple(hosts), here, replicas)


async def _serve(agent: Agent, membership: Membership | None, heal_bytes_per_s: float) -> None:
    await agent.start()
    over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
    try:
        show_line(f"listening on {agent.address}, room {size_text(agent.shelf.room_bytes)}")
        if membership is not None:
            agent.join(membership, most_bytes_per_s=heal_bytes_per_s, told=_show)
        await over.wait()
    finally:
        await agent.stop()


def _show(healed: Healed) -> None:
    show_line(f"healed: {healed.objects} objects, {size_text(healed.nbytes)}, from other agents")
