"""Checkpoints in the memory of other hosts: who still has them, and who may talk to whom."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import aiohttp
import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asymcheck import Checkpointer, Tier
from asymcheck.errors import CheckpointError, ObjectNotFound, OptionError, StoreError
from asymcheck.planning.cadence import EverySteps
from asymcheck.storage.peers.agent import Agent
from asymcheck.storage.peers.healing import Membership
from asymcheck.storage.peers.link import Link
from asymcheck.storage.peers.secret import Address, read_secret
from asymcheck.storage.peers.shelf import Entry, Incoming, Shelf
from asymcheck.storage.peers.swarm import Swarm
from asymcheck.storage.peers.words import AWAKE, DATA, Line, greet_as_client
from asymcheck.storage.store import Store, open_store, read_all
from asymcheck.testing.agents import Agents
from asymcheck.testing.children import TIMEOUT_S

SECRET = b"a secret of more than sixteen bytes"


@pytest.fixture
def agents() -> Iterator[Agents]:
    with Agents(2) as found:
        yield found


def state(value: float = 0.0) -> dict[str, torch.Tensor]:
    return {"w": torch.full((20_000,), value), "b": torch.full((8,), value)}


def saved(root: str | Store, *tiers: Tier, steps: int = 2) -> None:
    live = state()
    with Checkpointer(root, state=live, tiers=tiers, persist="thread", keep_last=2) as ckpt:
        ckpt.restore()
        for step in range(1, steps + 1):
            for tensor in live.values():
                tensor.fill_(step)
            ckpt.save(step)
            ckpt.wait()


def resumed(root: str | Store, *tiers: Tier) -> tuple[int, bool, Checkpointer]:
    live = state()
    with Checkpointer(root, state=live, tiers=tiers, persist="thread", read_only=True) as ckpt:
        step = ckpt.restore()
    return step, all(torch.equal(live[k], v) for k, v in state(float(step)).items()), ckpt


def secret_file(folder: Path, secret: bytes = SECRET) -> str:
    path = folder / "secret"
    path.write_bytes(secret)
    path.chmod(0o600)
    return str(path)


# --- a host is lost -----------------------------------------------------------


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_host_costs_nothing_where_each_state_is_on_two(agents: Agents, lost: int) -> None:
    saved(agents.url(query="timeout_s=5"))
    agents.stop(lost)
    assert resumed(agents.url(query="timeout_s=5"))[:2] == (2, True)


def test_a_lost_group_falls_back_to_the_durable_tier(agents: Agents, tmp_path: Path) -> None:
    # Gemini: every checkpoint in the memory of peers, the durable place at a low rate.
    durable = Tier(str(tmp_path / "disk"), every=EverySteps(2), name="disk")
    saved(agents.url(), durable, steps=3)
    for which in (0, 1):
        agents.replace(which)  # two new hosts: their memory is empty
    step, is_exact, ckpt = resumed(agents.url(), durable)
    assert (step, is_exact) == (3, True)  # the newest went to the tier when training ended
    assert {s.tier: s.nbytes > 0 for s in ckpt.report.served}["disk"]


def test_packs_lie_where_the_placement_says_and_the_rest_everywhere() -> None:
    with Agents(4) as four:
        store = open_store(four.url(query="replicas=2&self=2"))
        store.prepare()
        store.write("step-1/a.pack", [b"x" * 100])
        store.write("step-1/a.json", [b"{}"])
        held = [four.names(which) for which in range(4)]
    assert [names >= {"step-1/a.json"} for names in held] == [True] * 4
    assert [names >= {"step-1/a.pack"} for names in held] == [False, False, True, True]


def test_a_tier_of_peers_holds_each_pack_on_the_host_of_its_rank_though_rank_0_copies() -> None:
    with Agents(4) as four:
        store = open_store(four.url(query="replicas=2&self=0&ranks_per_host=2"))
        again = open_store(store.url)
        again.prepare()
        for rank in range(8):
            again.write(f"step-00000001/a000001-r{rank:04d}-0000.pack", [b"x"])
        held = [{name[-14:-10] for name in four.names(which)} for which in range(4)]
    assert held == [{"0000", "0001", "0002", "0003"}] * 2 + [{"0004", "0005", "0006", "0007"}] * 2
    with pytest.raises(OptionError, match="ranks_per_host"):
        open_store("peers://127.0.0.1:1/run?replicas=1&ranks_per_host=-1")


def test_an_object_that_was_removed_while_a_host_was_away_stays_removed(agents: Agents) -> None:
    store = open_store(agents.url(query="timeout_s=2"))
    store.prepare()
    store.write("a", [b"old"])
    store.delete("a")
    agents.replace(1)
    assert list(open_store(agents.url()).list()) == []
    with pytest.raises(ObjectNotFound):
        read_all(store, "a")


def test_an_object_that_is_written_again_and_again_can_be_read(
    agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = open_store(agents.url("run")), open_store(agents.url("run"))
    writer.write("name", [b"old"])
    find = Swarm.find

    async def replaced(swarm: Swarm, name: str) -> tuple[Entry, list[Link]] | None:
        found = await find(swarm, name)
        await asyncio.to_thread(writer.write, "name", [b"new"])
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Swarm, "find", replaced)
        assert read_all(reader, "name") == b"new"


def test_too_little_room_is_said_at_once_and_what_is_there_stays() -> None:
    with Agents(2, room_bytes=1 << 20) as small:
        store = open_store(small.url())
        store.prepare()
        store.write("kept.pack", [b"k" * (1 << 19)])
        with pytest.raises(StoreError, match=r"no room for .*more \(--room-gib\)"):
            store.write("more.pack", [b"m" * (1 << 18)] * 4)
        assert read_all(store, "kept.pack") == b"k" * (1 << 19)
        store.delete("kept.pack")
        store.write("more.pack", [b"m" * (1 << 18)] * 3)


def test_a_writer_that_ends_in_the_middle_leaves_nothing(agents: Agents) -> None:
    store = open_store(agents.url())
    store.prepare()

    def torn() -> Iterator[bytes]:
        yield b"x" * (1 << 20)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.write("torn.pack", torn())
    assert list(store.list()) == []


# --- a host is replaced -----------------------------------------------------------


@pytest.mark.parametrize("replaced", [0, 1])
def test_a_replaced_host_gets_back_what_its_peer_holds_before_that_one_is_lost(
    replaced: int,
) -> None:
    with Agents(2, replicas=2) as two:
        saved(two.url(query="timeout_s=5"), steps=3)
        held = two.names(replaced)
        two.replace(replaced)
        two.wait_until_whole(replaced)
        assert two.names(replaced) == held
        two.stop(1 - replaced)
        assert resumed(two.url(query="timeout_s=5"))[:2] == (3, True)


def test_what_was_removed_while_a_host_was_lost_does_not_come_back_with_it() -> None:
    with Agents(3, replicas=2) as three:
        store = open_store(three.url(query="timeout_s=5"))
        store.prepare()
        for name in ("a.pack", "a.json", "b.pack", "b.json"):
            store.write(name, [b"x" * 5000])
        three.stop(1)
        store.delete("a.pack")
        store.delete("a.json")
        three.replace(1)
        for which in range(3):
            three.wait_until_whole(which)
        assert [three.names(which) for which in range(3)] == [
            {"b.pack", "b.json"},
            {"b.pack", "b.json"},
            {"b.json"},
        ]


def test_an_agent_gets_no_more_than_it_has_room_for_and_the_newest_checkpoint_first() -> None:
    shelves = [Shelf(1 << 20), Shelf(1 << 20)]
    for count, step in enumerate((1, 2, 3)):
        for what, size in (("r0000-0000.pack", 400_000), ("r0000.json", 20), ("MANIFEST.json", 9)):
            name = f"run/step-0000000{step}/a000001-{what}"
            incoming = Incoming(Shelf(1 << 20), name, 0)  # room of another one: 3 do not fit
            incoming.append(memoryview(bytes(size)))
            digest = xxhash.xxh3_128_hexdigest(bytes(size))
            shelves[0].put(incoming.seal(size, digest, (10 * count + len(what), "w")))

    async def healed() -> None:
        agents = [Agent(Address("127.0.0.1", 0), 1 << 20) for _ in shelves]
        for agent, shelf in zip(agents, shelves, strict=True):
            agent.shelf = shelf
            await agent.start()
        hosts = tuple(agent.address for agent in agents)
        healer = agents[1].join(Membership(hosts, 1, 2), look_s=0.01)
        async with asyncio.timeout(TIMEOUT_S):
            while healer.missing != 1:
                await asyncio.sleep(0.01)
        for agent in agents:
            await agent.stop()

    asyncio.run(healed())
    packs = sorted(e.name for e in shelves[1].entries("") if e.name.endswith(".pack"))
    assert [name.split("/")[1] for name in packs] == ["step-00000002", "step-00000003"]
    assert shelves[1].used_bytes <= shelves[1].room_bytes


def test_agents_and_clients_that_mean_other_hosts_are_told_so() -> None:
    with Agents(3, replicas=2) as three:
        with pytest.raises(OptionError, match=r"expected \[hosts, replicas, self\] = \[3, 3, 0\]"):
            open_store(three.url(query="replicas=3")).prepare()
        turned = ",".join(map(str, reversed(three.addresses)))
        with pytest.raises(OptionError, match="the same hosts in the same order"):
            open_store(f"peers://{turned}/run?replicas=2").prepare()
        open_store(three.url(query="replicas=2")).prepare()


def test_a_claim_that_is_taken_back_does_not_come_again_from_a_host_that_copied_it() -> None:
    shelf = Shelf(1 << 20)
    incoming = shelf.begin("run/attempts/000001", 0)
    incoming.append(memoryview(b"mine"))
    digest = xxhash.xxh3_128_hexdigest(b"mine")
    held = incoming.seal(4, digest, (1, "w"))
    shelf.withdraw(held.entry)  # told before the copy arrived
    assert not shelf.wants(held.entry)
    assert not shelf.put(held, only_new=True)
    assert (shelf.entries(""), shelf.used_bytes) == ([], 0)


def test_a_claim_that_is_taken_back_leaves_the_removal_that_it_replaced() -> None:
    shelf = Shelf(1 << 20)
    name, digest = "run/attempts/000001", xxhash.xxh3_128_hexdigest(b"mine")
    removal = Entry(name, 0, "", 0, (2, "w"), False)
    shelf.remove(removal)
    incoming = shelf.begin(name, 0)
    incoming.append(memoryview(b"mine"))
    held = incoming.seal(4, digest, (3, "w"))
    assert shelf.put(held, only_new=True)
    shelf.withdraw(held.entry)  # another agent holds the version that was removed still
    assert shelf.entries("") == [removal]
    assert not shelf.wants(Entry(name, 4, digest, 0, (1, "w"), True))


def test_removals_are_remembered_in_bounded_memory_and_old_ones_come_from_nobody_again() -> None:
    shelf = Shelf(1 << 20)
    for count in range(1, 20_000):
        shelf.remove(Entry(f"n{count}", 0, "", 0, (count, "w"), False))
    known = shelf.entries("")
    assert 8192 <= len(known) < 10_000
    assert max(entry.stamp for entry in known) == (19_999, "w")
    changes = shelf.changes
    shelf.remove(Entry("n1", 0, "", 0, (1, "w"), False))  # as another agent tells of it
    assert (shelf.changes, len(shelf.entries(""))) == (changes, len(known))


# --- who may talk to whom -------------------------------------------------------


def test_the_same_secret_is_let_in_and_another_one_learns_nothing(tmp_path: Path) -> None:
    with Agents(2, secret=SECRET) as guarded:
        path = secret_file(tmp_path)
        store = open_store(guarded.url(query=f"secret_file={path}"))
        store.prepare()
        store.write("there", [b"content"])
        assert read_all(store, "there") == b"content"
        assert SECRET.decode() not in store.url
        secret_file(tmp_path, b"another secret of many bytes")
        stranger = open_store(guarded.url(query=f"secret_file={path}&timeout_s=5"))
        told = []
        for name in ("there", "not-there"):
            with pytest.raises(CheckpointError) as caught:
                read_all(stranger, name)
            told.append(str(caught.value).replace(name, "NAME"))
        assert told[0] == told[1]
        assert "secret" in told[0]
        assert SECRET.decode() not in told[0]


def test_beyond_loopback_nobody_goes_without_a_secret(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="secret"):
        Agent(Address("0.0.0.0", 0), 1 << 20)
    with pytest.raises(OptionError, match=r"loopback.*give secret_file"):
        open_store("peers://10.255.255.1:7070/run?replicas=1")


@pytest.mark.parametrize(
    ("content", "mode", "why"),
    [
        (SECRET, 0o644, "chmod 600"),
        (b"short", 0o600, "expected 16 to"),
        (None, 0, "cannot be read"),
    ],
)
def test_a_secret_that_others_know_or_guess_is_refused(
    tmp_path: Path, content: bytes | None, mode: int, why: str
) -> None:
    path = tmp_path / "secret"
    if content is not None:
        path.write_bytes(content)
        path.chmod(mode)
    with pytest.raises(OptionError, match=why):
        read_secret(str(path))


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("peers://127.0.0.1:1/run?replicas=2", "replicas"),
        ("peers://127.0.0.1:1,127.0.0.1:1/run", "more than once"),
        ("peers:///run", "at least one"),
        ("peers://127.0.0.1:1,127.0.0.1:2", "the name of a run"),
        ("peers://127.0.0.1:1,127.0.0.1:2/run?replica=2", "did you mean 'replicas'"),
        ("peers://127.0.0.1/run", "HOST:PORT"),
    ],
)
def test_a_url_that_cannot_be_meant_is_refused(url: str, why: str) -> None:
    with pytest.raises(OptionError, match=why):
        open_store(url)


def test_two_agents_do_not_share_a_port() -> None:
    async def second(address: Address) -> None:
        agent = Agent(address, 1 << 20)
        try:
            await agent.start()
        finally:
            await agent.stop()

    with Agents(1) as one, pytest.raises(OptionError, match="does another agent run there"):
        asyncio.run(second(one.addresses[0]))


def test_the_command_serves_until_it_is_ended() -> None:
    cli = "from asymcheck.cli import app; app()"
    command = [sys.executable, "-c", cli, "agent", "--listen", "127.0.0.1:0"]
    with subprocess.Popen([*command, "--room-gib", "0.1"], stdout=subprocess.PIPE) as agent:
        try:
            assert agent.stdout is not None
            address = agent.stdout.readline().decode().split()[2].rstrip(",")
            saved(f"peers://{address}/run?replicas=1")
            assert resumed(f"peers://{address}/run?replicas=1")[:2] == (2, True)
        finally:
            agent.terminate()
        assert agent.wait(60) == 0


def test_a_client_that_says_that_it_lives_is_not_hung_up_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bounds: list[float | None] = []
    plain = asyncio.timeout

    def noted(delay: float | None) -> asyncio.Timeout:
        bounds.append(delay)
        return plain(delay)

    class Said:
        """Three messages of one who lives, then one that says something."""

        def __init__(self) -> None:
            self.sent: list[bytes] = []

        async def send_bytes(self, data: bytes) -> None:
            self.sent.append(data)

        async def receive(self) -> aiohttp.WSMessage:
            return aiohttp.WSMessage(aiohttp.WSMsgType.BINARY, self.sent.pop(0), "")

    async def heard() -> bytes:
        line = Line(Said(), b"key", b"key")
        for kind in (AWAKE, AWAKE, AWAKE, DATA):
            await line.say(kind)
        monkeypatch.setattr(asyncio, "timeout", noted)
        return (await line.hear(60.0))[0]

    assert asyncio.run(heard()) == DATA
    assert bounds == [60.0] * 4  # silence is measured from the latest message


# --- hostile messages -----------------------------------------------------------


async def _whisper(address: Address, secret: bytes, said: list[bytes], *, proved: bool) -> None:
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(f"http://{address}/peers", max_msg_size=1 << 20) as channel,
    ):
        line: Line | None = await greet_as_client(channel, secret) if proved else None
        for message in said:
            try:
                if line is not None:
                    await line.say(message[:1] or b"J", message[1:])
                else:
                    await channel.send_bytes(message)
            except Exception:
                return


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(said=st.lists(st.binary(max_size=300), max_size=6), proved=st.booleans())
def test_whatever_is_said_harms_nobody(agents: Agents, said: list[bytes], proved: bool) -> None:
    store = open_store(agents.url())
    store.write("kept", [b"kept"])
    asyncio.run(_whisper(agents.addresses[0], b"", said, proved=proved))
    assert read_all(store, "kept") == b"kept"
    assert [entry.name for entry in store.list()] == ["kept"]


def test_messages_that_are_too_long_take_no_memory(agents: Agents) -> None:
    store = open_store(agents.url())
    store.write("kept", [b"kept"])
    flood = [os.urandom(1 << 19)] * 20
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(5):
            asyncio.run(_whisper(agents.addresses[0], b"", flood, proved=False))
        assert tracemalloc.get_traced_memory()[0] - before < 4 << 20
    finally:
        tracemalloc.stop()
    assert read_all(store, "kept") == b"kept"


def test_threads_that_read_one_object_go_on_when_its_host_is_lost(agents: Agents) -> None:
    store = open_store(agents.url(query="timeout_s=5"))
    data = bytes(range(256)) * 4096
    store.write("some.pack", [data])
    readers = 4
    gate = threading.Barrier(readers + 1)

    def read() -> bool:
        into = bytearray(len(data))
        opened.readinto(0, memoryview(into))  # where the own host still is
        for _ in range(2):  # every thread is between two reads while the host goes
            gate.wait(TIMEOUT_S)
        opened.readinto(0, memoryview(into))
        return into == data

    with store.open("some.pack") as opened, ThreadPoolExecutor(readers) as pool:
        jobs = [pool.submit(read) for _ in range(readers)]
        gate.wait(TIMEOUT_S)
        agents.stop(0)
        gate.wait(TIMEOUT_S)
        assert all(job.result(TIMEOUT_S) for job in jobs)
