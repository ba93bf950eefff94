"""Packs wait for idle windows of the network, never for longer than they may, and nothing else."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

import pytest

from asymcheck.errors import OptionError
from asymcheck.planning.idle import Counters
from asymcheck.storage.peers.link import Link, PeerFailed
from asymcheck.storage.peers.pacing import InterfaceMeter, Paces, Unmeasured, interface_to
from asymcheck.storage.store import open_store
from asymcheck.testing.agents import Agents

FRAME = 1 << 18


class Busy:
    """The training sends without a pause until ``ends`` looks are over."""

    def __init__(self, ends: int | None = None) -> None:
        self.looks = 0
        self.added = 0
        self._ends = ends
        self._sent = 0

    def add(self, connection: socket.socket) -> None:
        self.added += 1

    def read(self, now_s: float) -> Counters:
        self.looks += 1
        if self._ends is None or self.looks <= self._ends:
            self._sent += 1 << 24
        return Counters(now_s, self._sent, 0, 0)


class Full(Busy):
    """Nobody else sends, and what we gave does not go."""

    def read(self, now_s: float) -> Counters:
        self.looks += 1
        return Counters(now_s, 0, 0, 1 << 24)


class Blind(Busy):
    def read(self, now_s: float) -> Counters:
        raise Unmeasured("no counters")


def over(name: str, meter: Busy) -> Paces:
    return Paces(meter_of=lambda _: meter, interface_of=lambda _: name)


async def held_s(
    agents: Agents, name: str, paces: Paces, hold_s: float, timeout_s: float = 5.0
) -> float:
    link = Link(agents.addresses[0], b"", timeout_s, 1e6, paces, hold_s)
    try:
        upload = await link.upload(f"run/{name}", 0)
        await upload.feed(memoryview(bytes(3 * FRAME)))
        upload.abort()
        return upload.held_s
    finally:
        await link.close()


def test_a_pack_waits_until_the_training_is_silent() -> None:
    meter = Busy(ends=10)
    with Agents(1) as agents:
        assert 0.0 < asyncio.run(held_s(agents, "a.pack", over("eth0", meter), hold_s=60.0)) < 60.0
    assert meter.looks > 10


def test_waiting_for_what_was_given_before_is_not_being_held_back_but_has_its_bound() -> None:
    meter = Full()
    with Agents(1) as agents, pytest.raises(PeerFailed, match="too slow"):
        asyncio.run(held_s(agents, "a.pack", over("eth0", meter), hold_s=60.0, timeout_s=0.2))
    assert meter.looks > 1


def test_a_pack_goes_at_last_however_busy_the_network_is() -> None:
    meter = Busy()
    with Agents(1) as agents:
        assert asyncio.run(held_s(agents, "a.pack", over("eth0", meter), hold_s=0.05)) >= 0.05
    assert meter.looks > 1


@pytest.mark.parametrize(
    ("name", "interface"), [("a.json", "eth0"), ("a.pack", "lo")], ids=["small", "this host"]
)
def test_small_objects_and_what_stays_on_this_host_wait_for_nothing(
    name: str, interface: str
) -> None:
    meter = Busy()
    with Agents(1) as agents:
        assert asyncio.run(held_s(agents, name, over(interface, meter), hold_s=60.0)) == 0.0
    assert meter.looks == 0


def _blind(_: str) -> str:
    raise Unmeasured("no way is told")


@pytest.mark.parametrize(
    "paces",
    [lambda: over("eth0", Blind()), lambda: Paces(interface_of=_blind)],
    ids=["no counters", "no route"],
)
def test_where_nothing_can_be_measured_packs_go_at_once_and_it_is_said_once(
    paces: Callable[[], Paces], caplog: pytest.LogCaptureFixture
) -> None:
    with Agents(1) as agents, caplog.at_level(logging.DEBUG, "asymcheck"):
        same = paces()
        for _ in range(2):
            assert asyncio.run(held_s(agents, "a.pack", same, hold_s=60.0)) == 0.0
    said = [record.message for record in caplog.records if "at once" in record.message]
    assert len(said) == 1


@pytest.mark.parametrize("address", ["127.0.0.1", "::ffff:127.0.0.2"])
def test_the_kernel_tells_the_way_to_this_host(address: str) -> None:
    assert interface_to(address) == "lo"


def test_own_bytes_are_told_from_all_bytes_of_an_interface() -> None:
    meter = InterfaceMeter("lo")
    with socket.create_server(("127.0.0.1", 0)) as server:
        mine = socket.create_connection(server.getsockname())
        other = socket.create_connection(server.getsockname())
        ends = [server.accept()[0] for _ in range(2)]
        meter.add(mine)
        before = meter.read(0.0)
        for sender, end in ((mine, ends[0]), (other, ends[1])):
            sender.sendall(bytes(50_000))
            assert len(end.recv(50_000, socket.MSG_WAITALL)) == 50_000
        after = meter.read(1.0)
        assert after.own_bytes - before.own_bytes == 50_000
        assert after.sent_bytes - before.sent_bytes >= 100_000
        for one in (mine, other, *ends):
            one.close()
        assert meter.read(2.0).own_bytes == after.own_bytes
    with pytest.raises(Unmeasured, match="does not know the interface"):
        InterfaceMeter("none such").read(0.0)


def test_what_waits_in_a_connection_is_told() -> None:
    meter = InterfaceMeter("lo")
    with socket.create_server(("127.0.0.1", 0)) as server:
        mine = socket.create_connection(server.getsockname())
        end = server.accept()[0]
        meter.add(mine)
        mine.setblocking(False)
        given = 0
        while True:
            try:
                given += mine.send(bytes(1 << 16))
            except BlockingIOError:
                break
        assert 0 < meter.read(0.0).queued_bytes <= given
        mine.close()
        end.close()


def test_the_options_are_in_the_url_and_wrong_ones_are_refused() -> None:
    url = "peers://127.0.0.1:1/run?replicas=1"
    assert "pace=none&hold_s=2.5" in open_store(f"{url}&pace=none&hold_s=2.5").url
    with pytest.raises(OptionError, match=r"pace: expected .*did you mean 'idle'"):
        open_store(f"{url}&pace=idel")
    with pytest.raises(OptionError, match="hold_s: expected 0 or more"):
        open_store(f"{url}&hold_s=-1")
