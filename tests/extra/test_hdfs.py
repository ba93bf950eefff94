"""HDFS as a store, on a real name node and real data nodes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, NoReturn
from urllib.parse import urlsplit

import pytest
import torch
from hdfs_cluster import HdfsCluster, NotHereError, free_ports
from torch import nn

from asymcheck import Checkpointer, CheckpointError, StoreError
from asymcheck.decoding import verify
from asymcheck.errors import SupersededWriter
from asymcheck.storage.hdfs import TEMP_FOLDER, HdfsStore
from asymcheck.storage.repository import create_repository, open_repository
from asymcheck.storage.store import Buffer, Store, open_store, read_all
from asymcheck.testing.children import TIMEOUT_S, Child
from asymcheck.testing.faulty import Fault, FaultyStore
from asymcheck.testing.suites import StoreSuite

pytestmark = [pytest.mark.extra, pytest.mark.xdist_group("hdfs")]

WAYS = pytest.mark.parametrize("persist", ["process", "thread"])
MIB = 1 << 20


@pytest.fixture(scope="module")
def servers(
    tmp_path_factory: pytest.TempPathFactory, not_run_here: Callable[[str], NoReturn]
) -> Iterator[HdfsCluster]:
    try:
        made = HdfsCluster(tmp_path_factory.mktemp("hdfs"))
    except NotHereError as reason:
        not_run_here(str(reason))
    with made:
        yield made


@pytest.fixture
def cluster(servers: HdfsCluster) -> Iterator[HdfsCluster]:
    """The servers, all of them alive again after the test."""
    yield servers
    servers.mend()


class TestHdfs(StoreSuite):
    of: ClassVar[HdfsCluster]

    @pytest.fixture(autouse=True)
    def _on(self, servers: HdfsCluster) -> None:
        type(self).of = servers

    def new_store(self, folder: Path) -> Store:
        return open_store(f"{self.of.root()}/some%20where/%C3%A9%20100%25%3F%23")


# --- a training -------------------------------------------------------------


class Job:
    """A small training whose state depends on the step alone."""

    def __init__(self, root: str | Store, side: int = 64, **options: Any) -> None:
        torch.manual_seed(5)
        self.side = side
        self.model = nn.Sequential(nn.Linear(side, side), nn.Dropout(0.1), nn.Linear(side, side))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        state = {"m": self.model, "o": self.optimizer}
        self.checkpointer = Checkpointer(root, state=state, keep_last=2, **options)
        self.at = self.checkpointer.restore()

    def train(self, to: int) -> None:
        while self.at < to:
            self.at += 1
            loss = self.model(torch.ones(2, self.side)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def save(self) -> None:
        self.checkpointer.save(self.at)
        assert self.checkpointer.wait(TIMEOUT_S)

    def try_to_save(self) -> CheckpointError | None:
        """The error that it ended with."""
        try:
            self.save()
        except CheckpointError as failure:
            return failure
        return None

    def train_and_save(self) -> bool:
        """One more step; whether it was saved."""
        self.train(self.at + 1)
        failure = self.try_to_save()
        assert failure is None or (isinstance(failure, StoreError) and failure.retryable)
        return failure is None

    def values(self) -> list[torch.Tensor]:
        found = [p.detach().clone() for p in self.model.parameters()]
        for state in self.optimizer.state.values():
            found += [state["exp_avg"].clone(), state["exp_avg_sq"].clone()]
        return found


def assert_same(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    assert len(left) == len(right) > 0
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def assert_whole(root: str | Store) -> list[int]:
    """What is listed is complete and verified; returns the steps."""
    store = open_store(root) if isinstance(root, str) else root
    repository = open_repository(store)
    listing = repository.survey()
    assert not listing.damaged
    assert not listing.foreign
    for at in listing.committed:
        assert list(verify(repository, at)) == []
    return [at.step for at in repository.lineage()]


@WAYS
def test_a_training_goes_on_bit_for_bit_where_its_checkpoint_was(
    cluster: HdfsCluster, persist: str
) -> None:
    root = cluster.root() + "?replication=1&block_mib=1&timeout_s=20"
    first = Job(root, side=300, persist=persist)  # its packs have more than one block
    first.train(3)
    first.save()
    first.train(6)
    first.checkpointer.close()

    second = Job(root, side=300, persist=persist)
    assert second.at == 3
    second.train(6)
    assert_same(second.values(), first.values())
    second.save()
    second.checkpointer.close()
    assert assert_whole(root) == [3, 6]


# --- servers that die -------------------------------------------------------


class Midway:
    """A store that makes a call in the middle of the first pack that it is given.

    Args:
        inner: The real store.
        call: What to do; made once.
    """

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.call: Callable[[], None] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def write(self, name: str, parts: Iterable[Buffer]) -> int:
        return self.inner.write(name, self._interrupted(name, parts))

    def _interrupted(self, name: str, parts: Iterable[Buffer]) -> Iterator[Buffer]:
        for part in parts:
            yield part
            if name.endswith(".pack") and self.call:
                call, self.call = self.call, None
                call()


def test_a_data_node_killed_in_the_middle_of_a_save_costs_at_most_that_save(
    cluster: HdfsCluster,
) -> None:
    root = cluster.root()
    store = Midway(open_store(f"{root}?timeout_s=20"))
    job = Job(store, side=1500)  # 50 MiB
    job.train(1)
    job.save()
    killed = []

    def kill() -> None:
        cluster.kill_data_node(0)
        killed.append(0)

    store.call = kill
    job.train(2)
    failure = job.try_to_save()
    assert killed == [0]
    # Read from the node that is left. Whether the client finds it for the next block is chance.
    assert assert_whole(root) == ([1] if failure else [1, 2])
    if failure:
        assert isinstance(failure, StoreError)
        assert failure.retryable
        assert f"hdfs://127.0.0.1:{cluster.port}/" in str(failure)

    cluster.wait_until_missed(live=1)
    until(job.train_and_save, "the name node gives out living nodes only")
    assert assert_whole(root)[-1] == job.at
    job.checkpointer.close()
    cluster.mend()
    again = Job(root, side=1500)
    assert again.at == job.at
    assert_same(again.values(), job.values())
    again.checkpointer.close()


def test_the_name_node_killed_in_the_middle_of_a_save_costs_that_save(
    cluster: HdfsCluster,
) -> None:
    root = f"{cluster.root()}?timeout_s=4"
    job = Job(root, side=1500, persist="process")
    job.train(1)
    job.save()
    temps = f"{path_of(root)}/{TEMP_FOLDER}"
    job.train(2)
    job.checkpointer.save(2)
    until(lambda: any(cluster.client.list_status(temps)), "a pack is written")
    cluster.kill_name_node()
    with pytest.raises(StoreError, match=f"127.0.0.1:{cluster.port}") as caught:
        job.checkpointer.wait(TIMEOUT_S)
    assert caught.value.retryable
    job.train(3)  # goes on

    cluster.start_name_node()
    cluster.wait_until_writable()
    assert assert_whole(root) == [1]
    job.save()
    assert assert_whole(root) == [1, 3]
    job.checkpointer.close()
    again = Job(root, side=1500)
    assert again.at == 3
    assert_same(again.values(), job.values())
    again.checkpointer.close()
    assert not any(e.name.startswith(TEMP_FOLDER) for e in open_store(root).list())


def path_of(root: str) -> str:
    return urlsplit(root).path


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + TIMEOUT_S
    while True:
        try:
            if condition():
                return
        except FileNotFoundError:
            pass
        assert time.monotonic() < end, f"timed out: {what}"
        time.sleep(0.002)


# --- operations that fail ---------------------------------------------------


def life(store: Store) -> int:
    """A start and two saves, of which the first is removed again; the latest that was durable."""
    durable = 0
    tensor = torch.zeros(100)
    with (
        warnings.catch_warnings(),
        suppress(CheckpointError),
        Checkpointer(store, state={"w": tensor}, keep_last=1) as ckpt,
    ):
        warnings.simplefilter("ignore")
        ckpt.restore()
        for step in (1, 2):
            tensor.fill_(step)
            with suppress(CheckpointError):
                ckpt.save(step)
                ckpt.wait(TIMEOUT_S)
                durable = step
    return durable


@pytest.mark.parametrize("when", ["before", "after"])
def test_whichever_operation_fails_the_newest_checkpoint_loads_and_the_next_save_works(
    cluster: HdfsCluster, when: str
) -> None:
    counted = FaultyStore(open_store(cluster.root()))
    assert life(counted) == 2
    changing = sum(op in ("write", "create", "delete") for op, _ in counted.operations)
    assert changing > 10
    ends = set()
    for n in range(1, changing + 1):
        raw = open_store(cluster.root())
        durable = life(FaultyStore(raw, Fault(at=n, op="[wcd]*e", when=when)))
        tensor = torch.zeros(100)
        with Checkpointer(raw, state={"w": tensor}) as ckpt:
            found = ckpt.restore()
            assert found >= durable
            assert torch.equal(tensor, torch.full((100,), float(found)))
            ckpt.save(found + 1)
            ckpt.wait(TIMEOUT_S)
        assert assert_whole(raw)[-1] == found + 1
        ends.add(durable)
    assert ends == {0, 1, 2}


def test_what_a_killed_writer_left_is_never_listed_and_is_swept(cluster: HdfsCluster) -> None:
    root = cluster.root()
    store = open_store(root)
    store.prepare()
    store.write("folder/a", [b"whole"])

    def write(say: Callable[[object], None]) -> None:
        cut = FaultyStore(open_store(root), Fault(op="write", when="mid", do="kill"))
        cut.write("folder/b", [bytes(MIB), bytes(MIB)])

    assert Child(write).wait().was_killed
    assert [e.name for e in store.list()] == ["folder/a"]
    assert store.sweep() == 1
    assert store.sweep() == 0
    assert read_all(store, "folder/a") == b"whole"


def test_a_write_whose_temporary_file_is_swept_says_so(cluster: HdfsCluster) -> None:
    store = open_store(cluster.root())

    def swept() -> Iterator[bytes]:
        yield bytes(MIB)
        assert store.sweep() == 1
        yield bytes(MIB)

    with pytest.raises(StoreError, match="temporary file is gone") as caught:
        store.write("a", swept())
    assert caught.value.retryable
    assert list(store.list()) == []


def test_of_several_claimers_each_gets_its_own_attempt(cluster: HdfsCluster) -> None:
    root = f"{cluster.root()}?timeout_s=10"

    def create(say: Callable[[object], None]) -> None:
        say(create_repository(open_store(root)).run)

    # Not here: forks of a process that has just read find its connections, and wait until they
    # see that they cannot use them.
    (run,) = Child(create).wait().check()

    def claim(say: Callable[[object], None]) -> None:
        try:
            attempt = open_repository(open_store(root)).claim(None)
        except SupersededWriter:
            say(0)
        else:
            say(attempt.number)

    children = [Child(claim) for _ in range(4)]
    got = [child.wait().check()[0] for child in children]
    claimed = [number for number in got if number]
    assert len(set(claimed)) == len(claimed) >= 1
    again = open_repository(open_store(root))
    assert again.run == run
    assert again.newest_attempt() >= max(claimed)


def test_a_fork_of_a_process_that_uses_the_store_can_use_it_too(cluster: HdfsCluster) -> None:
    store = open_store(f"{cluster.root()}?timeout_s=10")
    store.write("a", [bytes(MIB)])
    assert len(read_all(store, "a")) == MIB

    def use(say: Callable[[object], None]) -> None:
        store.write("b", [b"of the child"])
        say([len(read_all(store, "a")), sorted(e.name for e in store.list())])

    assert Child(use).wait().check() == [[MIB, ["a", "b"]]]


# --- bad input --------------------------------------------------------------


def test_a_name_node_that_is_not_there_is_one_error_in_bounded_time() -> None:
    (port,) = free_ports(1)
    root = f"hdfs://127.0.0.1:{port}/runs/a?timeout_s=2"
    with pytest.raises(
        StoreError, match=rf"hdfs://127.0.0.1:{port}/runs/a.*refused.*port"
    ) as caught:
        Job(root)
    assert caught.value.retryable


def test_a_host_without_a_name_is_one_error_in_bounded_time() -> None:
    store = open_store("hdfs://no-such-host.invalid:9000/runs/a?timeout_s=2")
    with pytest.raises(StoreError, match=r"list hdfs://no-such-host\.invalid:9000/runs/a.*name"):
        list(store.list())


def test_a_name_node_that_does_not_answer_is_one_error_in_bounded_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        store = open_store(f"hdfs://127.0.0.1:{port}/runs/a?timeout_s=1")
        with pytest.raises(StoreError, match="no answer within 1 s; its port takes conn") as caught:
            store.prepare()
    assert caught.value.retryable


def test_a_call_that_is_overdue_does_not_keep_the_process_alive(cluster: HdfsCluster) -> None:
    code = (
        "from asymcheck.storage.store import open_store\n"
        "from asymcheck.errors import StoreError\n"
        f"store = open_store({cluster.root()!r} + '?timeout_s=1')\n"
        "try: store.write('a', [b'x'])\n"
        "except StoreError: raise SystemExit(7)\n"
    )
    cluster.pause_name_node()
    try:
        done = subprocess.run([sys.executable, "-c", code], check=False, timeout=TIMEOUT_S)
    finally:
        cluster.resume_name_node()
    assert done.returncode == 7


def test_a_file_in_the_place_of_the_root_is_named(cluster: HdfsCluster) -> None:
    above = cluster.root()
    open_store(above).write("file", [b"x"])
    store = open_store(f"{above}/file/below")
    for call in (store.prepare, lambda: store.write("a", [b"x"]), lambda: store.create("a", b"x")):
        with pytest.raises(StoreError, match="a file is where a folder should be") as caught:
            call()
        assert not caught.value.retryable


def test_a_user_without_permission_is_told(cluster: HdfsCluster) -> None:
    root = cluster.root()
    open_store(root).write("a", [b"x"])
    code = (
        "import sys\n"
        "from asymcheck.storage.store import open_store\n"
        "from asymcheck.errors import StoreError\n"
        f"store = open_store({root!r})\n"
        "for call in (lambda: store.write('b', [b'x']), lambda: store.delete('a')):\n"
        "    try: call()\n"
        "    except StoreError as failure: print(failure.retryable, failure)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, "HADOOP_USER_NAME": "somebody"},
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stderr
    for line in lines:
        assert line.startswith("False ")
        assert "no permission: check owner and mode of the folder" in line
        assert root in line


def test_a_quota_is_what_is_free_and_what_is_full(cluster: HdfsCluster) -> None:
    root = f"{cluster.root()}?replication=1&block_mib=1"
    store = open_store(root)
    store.write("a", [b"first"])
    assert store.free_bytes() is None
    cluster.run_admin("-setSpaceQuota", str(4 * MIB), path_of(root))
    assert store.free_bytes() == 4 * MIB - 5
    with pytest.raises(StoreError, match="the quota is used up") as caught:
        store.write("big", [bytes(8 * MIB)])
    assert caught.value.retryable
    assert [e.name for e in store.list()] == ["a"]
    store.write("b", [b"fits"])


def test_threads_are_used_again(cluster: HdfsCluster) -> None:
    def ours() -> int:
        return sum(t.name == "asymcheck-hdfs" for t in threading.enumerate())

    store = open_store(cluster.root())
    store.prepare()
    before = ours()
    for n in range(5):
        store.write(f"a{n}", [b"x"])
        assert isinstance(store, HdfsStore)
    assert ours() == before
