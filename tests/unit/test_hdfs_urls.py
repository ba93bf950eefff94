"""URLs of HDFS, and calls that may never return; without a server."""

from __future__ import annotations

import threading

import pytest

from asymcheck.errors import OptionError
from asymcheck.storage.bounded import Callers, Overdue
from asymcheck.storage.hdfs import _meaning, _told
from asymcheck.storage.store import open_store

WAIT_S = 60.0


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("hdfs://", "expected hdfs://HOST:PORT/PATH"),
        ("hdfs:///runs/a", "expected hdfs://HOST:PORT/PATH"),
        ("hdfs://me@host:9000/runs/a", "the user is the one that the client finds"),
        ("hdfs://host:9000", "expected the path of a folder"),
        ("hdfs://host:9000/", "expected the path of a folder"),
        ("hdfs://host:9000/runs/../a", "expected the path of a folder"),
        ("hdfs://host:9000/runs//a", "expected the path of a folder"),
        ("hdfs://host:9000/runs/a:b", "expected the path of a folder"),
        ("hdfs://host:9000/a?replicas=2", "unknown option 'replicas'"),
        ("hdfs://host:9000/a?replication=0", r"replication: expected a number in \[1, 512\]"),
        ("hdfs://host:9000/a?block_mib=1.5", "block_mib: expected a number"),
        ("hdfs://host:9000/a?timeout_s=nan", "timeout_s: expected a number"),
        ("hdfs://host:9000/a?timeout_s=soon", "timeout_s: expected a number"),
        ("webhdfs://host:9870/a?block_mib=1", "WebHDFS by fsspec cannot set it"),
    ],
)
def test_a_wrong_url_is_refused_before_anything_is_tried(url: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        open_store(url)


@pytest.mark.parametrize("scheme", ["hdfs", "webhdfs"])
def test_the_url_of_a_store_opens_the_same_one(scheme: str) -> None:
    given = f"{scheme}://host:9000/some%20where/%C3%A9%3F%23?replication=2&timeout_s=2.5"
    store = open_store(given)
    assert store.url == given
    assert open_store(store.url).url == given
    assert open_store(f"{scheme}://host:9000/a/").url == f"{scheme}://host:9000/a"
    assert store.capabilities.durability == "replicated"
    assert store.capabilities.scope == "shared"
    assert not store.capabilities.reads_survive_delete


def test_a_server_is_quoted_without_the_stack_of_its_calls() -> None:
    failure = RuntimeError(
        'RPCError("org.apache.hadoop.hdfs.server.namenode.SafeModeException", '
        '"Cannot create file/a. Name node is in safe mode.\\nIt was turned on.\\n\\tat org.apache")'
    )
    told = _told(failure)
    assert told == "SafeModeException: Cannot create file/a. Name node is in safe mode"
    assert _meaning(told) == ("; the name node is starting, or an operator has locked it", True)
    assert _told(OSError("refused\n\tat java")) == "refused"
    assert _told(RuntimeError()) == "RuntimeError"


def test_an_overdue_call_is_left_behind_and_the_next_one_is_made() -> None:
    callers, gate, ended = Callers("test-callers"), threading.Event(), threading.Event()

    def hang() -> None:
        gate.wait(WAIT_S)
        ended.set()

    assert callers.call(lambda: 1, WAIT_S) == 1
    with pytest.raises(Overdue):
        callers.call(hang, 0.01)
    assert callers.call(lambda: 2, WAIT_S) == 2
    gate.set()
    assert ended.wait(WAIT_S)
    with pytest.raises(TimeoutError, match="of the call itself"):
        callers.call(lambda: _raise(TimeoutError("of the call itself")), WAIT_S)


def _raise(failure: Exception) -> None:
    raise failure


def test_a_thread_is_used_again() -> None:
    callers = Callers("test-again")
    found = {callers.call(threading.get_ident, WAIT_S) for _ in range(5)}
    assert len(found) == 1
    assert threading.get_ident() not in found
