"""The store for S3: against moto, quickly, and against the real server of SeaweedFS."""

from __future__ import annotations

import logging
import shutil
import signal
import traceback
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from urllib.parse import parse_qsl, quote, urlencode

import pytest
import torch
from s3_servers import (
    BUCKET,
    KEY,
    SECRET,
    Process,
    credentials_in,
    made_bucket,
    moto,
    url_at,
    weed,
)

from asymcheck import Checkpointer
from asymcheck.errors import OptionError, StoreError
from asymcheck.storage import s3_client
from asymcheck.storage.s3 import S3Store
from asymcheck.storage.store import Store, open_store, read_all
from asymcheck.testing.suites import StoreSuite

pytestmark = [pytest.mark.extra, pytest.mark.xdist_group("s3")]


@pytest.fixture(scope="session", autouse=True)
def credentials(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with credentials_in(tmp_path_factory.mktemp("aws")):
        yield


@pytest.fixture(scope="session")
def moto_server(tmp_path_factory: pytest.TempPathFactory, credentials: None) -> Iterator[Process]:
    server = moto(tmp_path_factory.mktemp("moto"))
    try:
        server.start()
        made_bucket(server)
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="session")
def weed_server(tmp_path_factory: pytest.TempPathFactory, credentials: None) -> Iterator[Process]:
    folder = tmp_path_factory.mktemp("weed")
    server = weed(folder)
    try:
        server.start()
        made_bucket(server)
        yield server
    finally:
        server.kill()
        shutil.rmtree(folder / "data")


class OnMoto(StoreSuite):
    @pytest.fixture(autouse=True)
    def _server(self, moto_server: Process) -> None:
        self.server = moto_server

    def new_store(self, folder: Path) -> Store:
        return open_store(url_at(self.server))


class TestMoto(OnMoto):
    pass


class TestMotoWithoutConditionalPuts:
    """What differs: ``create``."""

    store = StoreSuite.store
    test_create_never_replaces = StoreSuite.test_create_never_replaces
    test_one_of_many_threads_creates = StoreSuite.test_one_of_many_threads_creates
    test_one_of_many_processes_creates = StoreSuite.test_one_of_many_processes_creates
    test_a_sweep_removes_nothing_that_was_written = (
        StoreSuite.test_a_sweep_removes_nothing_that_was_written
    )
    shared_between_processes = True

    @pytest.fixture(autouse=True)
    def _server(self, moto_server: Process) -> None:
        self.server = moto_server

    def new_store(self, folder: Path) -> Store:
        return open_store(url_at(self.server, conditional="never"))


class TestWeed(StoreSuite):
    @pytest.fixture(autouse=True)
    def _server(self, weed_server: Process) -> None:
        self.server = weed_server

    def new_store(self, folder: Path) -> Store:
        return open_store(url_at(self.server))


# --- what fails --------------------------------------------------------------


class Faults:
    """Lets requests of all S3 stores fail, the n-th and so many from there on.

    Each failure may let time pass for them, so that no test needs a timeout that a slow machine
    exceeds without a failure.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.count, self.each_takes_s, self.passed_s = 0, 0.0, 0.0
        patch.setattr(s3_client, "monotonic", lambda: monotonic() + self.passed_s)
        self.at, self.times, self.after = 0, 0, False
        self.operations: list[str] = []
        inner = s3_client._Connection.request

        async def request(connection, operation, arguments, receive):
            self.count += 1
            self.operations.append(operation)
            strikes = self.at and self.at <= self.count < self.at + self.times
            if strikes:
                self.passed_s += self.each_takes_s
            if strikes and not self.after:
                raise ConnectionResetError("injected")
            try:
                return await inner(connection, operation, arguments, receive)
            finally:
                if strikes:
                    raise ConnectionResetError("its answer was lost")

        patch.setattr(s3_client._Connection, "request", request)

    def set(self, at: int, times: int = 1, *, after: bool = False) -> None:
        self.count, self.operations = 0, []
        self.at, self.times, self.after = at, times, after


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(monkeypatch)


SMALL, LARGE = b"small", bytes(range(256)) * 20481  # in two parts of 5 MiB


def use(store: Store) -> None:
    """Every kind of call, each with the result that it must have."""
    assert store.write("a/small", [SMALL]) == len(SMALL)
    assert store.create("a/new", b"first") is True
    assert store.create("a/new", b"second") is False
    assert store.write("a/large", [LARGE]) == len(LARGE)
    assert read_all(store, "a/new") == b"first"
    assert read_all(store, "a/large") == LARGE
    assert {e.name for e in store.list()} == {"a/small", "a/new", "a/large"}
    store.delete("a/small")


def requests_of_use(store: Store, faults: Faults) -> int:
    use(store)  # finds out what the server can do
    store.delete("a/new")
    faults.set(0)
    use(store)
    store.delete("a/new")
    return faults.count - 1


@pytest.mark.parametrize(
    ("conditional", "after"), [("auto", False), ("auto", True), ("never", True)]
)
def test_a_connection_lost_at_any_request_changes_no_result(
    moto_server: Process, faults: Faults, conditional: str, after: bool
) -> None:
    store = open_store(url_at(moto_server, part_mib=5, conditional=conditional))
    assert isinstance(store, S3Store)
    total = requests_of_use(store, faults)
    for at in range(1, total + 1):
        before = store.retries
        faults.set(at, after=after)
        use(store)
        assert store.retries == before + 1
        store.delete("a/new")
    assert store.sweep() <= total  # uploads that were begun by requests whose answer was lost
    assert store.sweep() == 0


def test_a_server_that_fails_for_good_is_one_error_and_nothing_is_half_there(
    moto_server: Process, faults: Faults
) -> None:
    store = open_store(url_at(moto_server, part_mib=5))
    assert isinstance(store, S3Store)
    total = requests_of_use(store, faults)
    faults.each_takes_s = 10.0  # of the 30 after which it gives up
    for at in range(1, total + 1):
        for entry in list(store.list()):
            store.delete(entry.name)
        faults.set(at, 10_000)
        with pytest.raises(StoreError, match=f"{BUCKET}.*{moto_server.endpoint}") as told:
            use(store)
        assert told.value.retryable
        faults.set(0)
        whole = {"a/small": SMALL, "a/new": b"first", "a/large": LARGE}
        for entry in store.list():
            assert read_all(store, entry.name) == whole[entry.name]
        store.sweep()
        assert store.sweep() == 0


def test_one_of_many_creates_although_answers_are_lost(
    moto_server: Process, faults: Faults
) -> None:
    store = open_store(url_at(moto_server))
    assert store.create("probed", b"") is True
    faults.set(1, 1, after=True)
    assert store.create("mine", b"1") is True  # its first try was the one
    faults.set(1, 1, after=True)
    assert store.create("mine", b"2") is False
    assert read_all(store, "mine") == b"1"


def test_a_dead_claimant_does_not_block_for_ever(moto_server: Process) -> None:
    store = open_store(url_at(moto_server, conditional="never", timeout_s=3))
    assert isinstance(store, S3Store)
    store._put(".claims/attempts/000001/number-000000001-dead", b"")
    store._put(".claims/attempts/000001/choosing-dead", b"")
    assert store.create("attempts/000001", b"mine") is True
    assert store.create("attempts/000001", b"other") is False
    assert list(store._keys(".claims/")) == []


def test_a_server_that_ignores_the_condition_is_found_out(
    moto_server: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = s3_client._Connection.request

    async def without(connection, operation, arguments, receive):
        arguments = {k: v for k, v in arguments.items() if k != "IfNoneMatch"}
        return await inner(connection, operation, arguments, receive)

    monkeypatch.setattr(s3_client._Connection, "request", without)
    store = open_store(url_at(moto_server))
    assert store.capabilities.conditional_create
    assert store.create("a", b"1") is True
    assert not store.capabilities.conditional_create
    assert store.create("a", b"2") is False
    assert read_all(store, "a") == b"1"


def test_a_large_object_takes_as_much_memory_as_its_parts_under_way(
    moto_server: Process,
) -> None:
    part = 5 << 20
    store = open_store(url_at(moto_server, part_mib=5, connections=2))
    store.write("warm", [bytes(part + 1)])
    piece = bytes(1 << 20)
    tracemalloc.start()
    try:
        assert store.write("large", (piece for _ in range(60))) == 60 << 20
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 6 * part


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
def test_a_server_that_ends_amid_an_object_and_comes_back(
    weed_server: Process, number: signal.Signals
) -> None:
    again = open_store(url_at(weed_server, part_mib=5, timeout_s=60))
    again.write("before", [b"kept"])
    store = open_store(url_of(again, timeout_s=5))
    assert isinstance(store, S3Store)
    piece = bytes(5 << 20)

    def broken() -> Iterator[bytes]:
        yield piece
        yield piece
        weed_server.signal(number)
        yield piece
        yield piece

    try:
        with pytest.raises(StoreError, match=BUCKET) as told:
            store.write("amid", broken())
        assert told.value.retryable
        assert store.retries > 0
    finally:
        if number == signal.SIGSTOP:
            weed_server.signal(signal.SIGCONT)
        else:
            weed_server.kill()
            weed_server.start()
    again.sweep()
    assert again.sweep() == 0
    assert {e.name for e in again.list()} == {"before"}
    assert read_all(again, "before") == b"kept"
    assert again.write("amid", [piece, piece, piece]) == 3 * len(piece)
    assert read_all(again, "amid") == bytes(3 * len(piece))


def url_of(store: Store, **options: object) -> str:
    where, _, query = store.url.partition("?")
    return f"{where}?{urlencode({**dict(parse_qsl(query)), **options})}"


# --- what is wrong from the start ----------------------------------------------


def assert_no_secret(text: str) -> None:
    for secret in (KEY, SECRET, SECRET[::-1], quote(SECRET, safe="")):
        assert secret not in text


@pytest.mark.parametrize(
    ("options", "bucket", "says", "retryable"),
    [
        ({}, "no-such-bucket", "NoSuchBucket", False),
        ({"profile": "wrong"}, BUCKET, "SignatureDoesNotMatch", False),
        ({"profile": "none"}, BUCKET, "ProfileNotFound", False),
        ({"endpoint": "http://127.0.0.1:9", "timeout_s": 1}, BUCKET, "127.0.0.1:9", True),
    ],
)
def test_what_is_wrong_is_said_once_and_without_secrets(
    weed_server: Process,
    moto_server: Process,
    caplog: pytest.LogCaptureFixture,
    options: dict[str, object],
    bucket: str,
    says: str,
    retryable: bool,
) -> None:
    caplog.set_level(logging.DEBUG, "asymcheck")
    # SeaweedFS fails with HTTP 500 where there is no bucket.
    server = weed_server if bucket == BUCKET else moto_server
    query = urlencode({"endpoint": server.endpoint, "timeout_s": 20, **options})
    store = open_store(f"s3://{bucket}/runs?{query}")
    calls: list[Callable[[], object]] = [
        store.prepare,
        lambda: store.write("a", [b"a"]),
        lambda: store.create("a", b"a"),
        lambda: read_all(store, "a"),
        lambda: list(store.list()),
        store.sweep,
    ]
    for call in calls:
        with pytest.raises(StoreError) as told:
            call()
        assert bucket in str(told.value)
        assert told.value.retryable is retryable
        assert_no_secret("".join(traceback.format_exception(told.value)))
        if call == store.prepare:
            assert says in str(told.value)
    assert_no_secret(caplog.text)


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIAX:s3cr3t@bucket/runs",
        "s3://bucket/runs?endpoint=http://AKIAX:s3cr3t@host:9000",
        "s3://bucket/runs?secret=s3cr3t",
        "s3://bucket/runs?aws_secret_access_key=s3cr3t",
        "s3://bucket/runs?endpoint=host:9000",
        "s3://bucket/a//b",
        "s3://bucket/../b",
        "s3:///runs",
        "s3://bucket?connections=0",
        "s3://bucket?part_mib=4",
        "s3://bucket?timeout_s=nan",
        "s3://bucket?conditional=always",
    ],
)
def test_a_wrong_url_is_refused_without_showing_what_is_secret(url: str) -> None:
    with pytest.raises(OptionError) as told:
        open_store(url)
    assert "s3cr3t" not in str(told.value)


def test_a_url_opens_the_same_place_whatever_its_options() -> None:
    url = (
        "s3://bucket/a%20b/%C3%A9?endpoint=http%3A%2F%2Fhost%3A9000&region=eu-1&profile=p"
        "&connections=8&timeout_s=12.5&part_mib=64&conditional=never"
    )
    store = open_store(url)
    assert store.url == url
    assert open_store(store.url).capabilities == store.capabilities
    assert open_store("s3://bucket").url == "s3://bucket"


# --- whole checkpoints -----------------------------------------------------------


def trained(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 512))
    optimizer = torch.optim.Adam(model.parameters())
    return model, optimizer


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(4, 512)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_what_never_changes_is_read_once_however_many_checkpoints_and_starts_there_are(
    moto_server: Process, faults: Faults
) -> None:
    url = url_at(moto_server)
    for start in range(4):
        with Checkpointer(url, state={"w": torch.zeros(8)}, keep_last=5, persist="thread") as ckpt:
            step = ckpt.restore()
            assert step == 6 * start
            for n in range(1, 7):
                if n == 6:
                    ckpt.wait()
                    faults.set(0)
                ckpt.save(step + n)
    made = Counter(faults.operations)  # of the last save, and of the end of its training
    assert made["put_object"] == 3
    assert made["get_object"] <= 3
    assert sum(made.values()) <= 20


@pytest.mark.parametrize("persist", ["process", "thread"])
def test_a_training_is_saved_and_restored_bit_for_bit(
    weed_server: Process, persist: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "asymcheck")
    url = url_at(weed_server, part_mib=5)
    model, optimizer = trained(0)
    with Checkpointer(
        url, state={"model": model, "optim": optimizer}, every_steps=1, keep_last=2, persist=persist
    ) as ckpt:
        assert ckpt.restore() == 0
        for step in range(1, 5):
            train(model, optimizer)
            ckpt.save(step)
            ckpt.wait()
        assert ckpt.steps() == [3, 4]
    again, other = trained(1)
    with Checkpointer(
        url, state={"model": again, "optim": other}, every_steps=1, persist=persist
    ) as ckpt:
        assert ckpt.restore() == 4
    for ours, theirs in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        for key, value in optimizer.state[ours].items():
            assert torch.equal(value, other.state[theirs][key])
    store = open_store(url)
    for entry in store.list():
        stored = read_all(store, entry.name)
        assert KEY.encode() not in stored
        assert SECRET.encode() not in stored
    assert_no_secret(caplog.text)
    assert_no_secret(store.url)


def test_a_place_that_holds_something_else_is_refused(moto_server: Process) -> None:
    store = open_store(url_at(moto_server))
    store.write("photos/cat.jpg", [b"miau"])
    with pytest.raises(OptionError, match="photos"):
        Checkpointer(store.url, state={"model": torch.nn.Linear(2, 2)}).restore()
