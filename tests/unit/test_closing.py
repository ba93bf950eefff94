"""Closing loses nothing, whatever the threads of the library have come to."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import asymcheck


@pytest.mark.parametrize("persist", ["thread", "process"])
def test_a_save_is_durable_although_close_comes_before_its_copy_was_begun(
    tmp_path: Path, persist: Literal["thread", "process"]
) -> None:
    ckpt = asymcheck.Checkpointer(tmp_path / "r", state={"w": torch.ones(3)}, persist=persist)
    ckpt.restore()
    snapshotter: Any = ckpt._capturing()
    persister = snapshotter._persister
    begin, close, closing = persister.begin, persister.close, threading.Event()

    def late(*arguments: Any) -> Any:
        closing.wait(1)  # the copying thread is slow: it lets the close come first, if it can
        return begin(*arguments)

    def closed(timeout_s: float) -> bool:
        in_time = close(timeout_s)
        closing.set()
        return bool(in_time)

    persister.begin, persister.close = late, closed
    handle = ckpt.save(1)
    ckpt.close()
    assert handle.durable.done()
    assert handle.durable.result().step == 1
    assert ckpt.steps() == [1]
