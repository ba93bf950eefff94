"""The store that is as slow as it is told to be, on a clock of the test's own."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path

import pytest

from asymcheck.errors import OptionError
from asymcheck.planning.layout import Extent
from asymcheck.planning.retention import CheckpointId
from asymcheck.storage import flush as flushing
from asymcheck.storage.flush import Batch, Encoded, flush
from asymcheck.storage.memory import MemoryStore
from asymcheck.storage.store import Buffer, read_all
from asymcheck.testing import throttled
from asymcheck.testing.throttled import Speed, ThrottledStore, open_throttled


class Clock:
    """Time that passes only where somebody sleeps, and then a little less than asked for."""

    def __init__(self) -> None:
        self.now_s = 50.0
        self.sleeps = 0

    def read(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        assert duration_s > 0.0
        self.sleeps += 1
        self.now_s += duration_s * 0.75 if duration_s > 1e-3 else duration_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(throttled, "monotonic", found.read)
    monkeypatch.setattr(throttled, "sleep", found.sleep)
    return found


def test_a_write_takes_its_bytes_and_a_latency_for_each_part(clock: Clock) -> None:
    store = ThrottledStore(MemoryStore(), Speed(bytes_per_s=1000.0, latency_s=0.25))
    assert store.write("a", [bytes(500), memoryview(bytes(1000)).cast("i")]) == 1500
    assert clock.now_s == pytest.approx(50.0 + 0.25 + 0.5 + 0.25 + 1.0)
    assert store.create("b", bytes(1000))
    assert clock.now_s == pytest.approx(53.25)


def test_what_the_inner_store_takes_is_within_the_time_of_a_part(clock: Clock) -> None:
    class Slow(MemoryStore):
        def write(self, name: str, parts: Iterable[Buffer]) -> int:
            kept = []
            for part in parts:
                kept.append(bytes(part))
                clock.now_s += 0.5
            return super().write(name, kept)

    store = ThrottledStore(Slow(), Speed(bytes_per_s=1000.0))
    store.write("a", [bytes(1000), bytes(100)])  # one part takes longer to pass, one to write
    assert clock.now_s == pytest.approx(50.0 + 1.0 + 0.5)
    assert read_all(store, "a") == bytes(1100)


def test_time_without_writes_is_not_saved_up(clock: Clock) -> None:
    store = ThrottledStore(MemoryStore(), Speed(bytes_per_s=1000.0))
    store.write("a", [bytes(1000)])
    clock.now_s += 1000.0
    store.write("b", [bytes(1000)])
    assert clock.now_s == pytest.approx(1052.0)


def test_reads_have_a_speed_of_their_own(clock: Clock) -> None:
    store = ThrottledStore(MemoryStore(), Speed(read_bytes_per_s=10.0))
    store.write("a", [bytes(100)])
    assert (clock.now_s, clock.sleeps) == (50.0, 0)
    assert read_all(store, "a") == bytes(100)
    assert clock.now_s == pytest.approx(60.0)


def test_several_writers_share_one_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ask at the same instant: the second one's bytes pass behind those of the first."""
    asked, both = [], threading.Barrier(2)
    local = threading.local()

    def sleep(duration_s: float) -> None:
        asked.append(duration_s)
        local.now_s = 50.0 + duration_s

    monkeypatch.setattr(throttled, "monotonic", lambda: getattr(local, "now_s", 50.0))
    monkeypatch.setattr(throttled, "sleep", sleep)
    store = ThrottledStore(MemoryStore(), Speed(bytes_per_s=100.0, latency_s=3.0))

    def work(name: str) -> None:
        both.wait(30)
        store.write(name, [bytes(1000)])

    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(asked) == [pytest.approx(13.0), pytest.approx(23.0)]


def test_whoever_makes_the_parts_sees_how_long_each_takes(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flushing, "perf_counter", clock.read)
    store = ThrottledStore(MemoryStore(), Speed(bytes_per_s=1e6, latency_s=0.5))
    seen: list[Batch] = []
    flush(
        store,
        CheckpointId(1, 1),
        0,
        [Extent(0, 8192), Extent(8192, 10000)],
        lambda extent: Encoded(bytes(extent.nbytes), "raw"),
        observe=seen.append,
    )
    assert [b.duration_s for b in seen] == [pytest.approx(0.508192), pytest.approx(0.501808)]


def test_its_url_says_everything(tmp_path: Path) -> None:
    options = {"bytes_per_s": "50e6", "latency_s": "0.005", "read_bytes_per_s": "1e9"}
    options["connections"] = "4"
    store = open_throttled(f"file://{tmp_path}", options)
    assert store.speed == Speed(50e6, 0.005, 1e9, 4)
    assert store.capabilities.connections == 4
    assert store.url == (
        f"throttled+file://{tmp_path}?bytes_per_s=50000000.0&latency_s=0.005"
        f"&read_bytes_per_s=1000000000.0&connections=4"
    )
    store.prepare()
    store.write("a", [b"x"])
    assert (tmp_path / "a").read_bytes() == b"x"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"byte_per_s": "1"}, "unknown option 'byte_per_s'.*bytes_per_s"),
        ({"bytes_per_s": "fast"}, "expected a number, found 'fast'"),
        ({"bytes_per_s": "0"}, "expected more than 0"),
        ({"read_bytes_per_s": "nan"}, "expected more than 0"),
        ({"latency_s": "-1"}, "expected 0 or more"),
        ({"latency_s": "inf"}, "expected 0 or more"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused(
    options: dict[str, str], expected: str, tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match=expected):
        open_throttled(f"file://{tmp_path}", options)
