"""What every test of the lab may rely on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tokenizers that tests train lie in a folder of the session, not in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def bench_record() -> Callable[..., dict[str, Any]]:
    """Makes a record of the benchmark, schema 2: ``bench_record("dcp", round=2, blocked_s=0.1)``.

    ``blocked_s``, ``durable_s`` and ``slower_s`` are those of each of its three checkpoints; any
    other name is a field.
    """
    return _bench_record


def _bench_record(
    system: str = "asymcheck",
    *,
    blocked_s: float = 0.01,
    durable_s: float | None = 0.5,
    slower_s: float = 0.02,
    **fields: Any,
) -> dict[str, Any]:
    kind = "none" if system == "none" else "ours" if system == "asymcheck" else "rival"
    number = fields.get("round", 1)
    checkpoint = {"blocked_s": blocked_s, "durable_s": durable_s, "lag_steps": 1}
    if kind == "none":
        checkpoint, slower_s = {"blocked_s": 0.0, "durable_s": None, "lag_steps": None}, 0.0
    record: dict[str, Any] = {
        "schema": 2,
        "session": "2026-12-02T01:52:24+00:00",
        "machine": {
            "cpu": "a processor",
            "cpus": 2,
            "cores_used": 2,
            "memory_bytes": 24 << 30,
            "file_system": "ext4",
            "kernel": "6.1",
        },
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "commit": "4222dd58e0827af5bc114cc35430266b592b4490",
        "commit_is_clean": True,
        "command": "asymlab bench --models all",
        "model": "gpt2",
        "size": "tiny",
        "store": "disk",
        "every": 5,
        "steps": 15,
        "warmup": 2,
        "system": system,
        "title": f"the system {system}",
        "kind": kind,
        "library": "torch 2.13.0",
        "omits": "everything" if kind == "none" else "",
        "syncs": "the file and the folder",
        "ranked": True,
        "why_unranked": "",
        "round": 1,
        "position": 1,
        "state_bytes": 1_000_000,
        "saved_bytes": 0 if kind == "none" else 1_000_000,
        "step_s": [0.1] * 15,
        "loop_s": 1.5,
        # A little apart in each round, as measured ones are.
        "whole_s": 1.5 + 0.001 * number + 3 * slower_s,
        "checkpoints": [{"step": step, **checkpoint} for step in (5, 10, 15)],
        "first_checkpoint": {"step": 4, **checkpoint},
        "disk_bytes": 0 if kind == "none" else 1_001_000,
        "restore_s": None if kind == "none" else 0.02,
        "bit_exact": None if kind == "none" else True,
        "max_error": None if kind == "none" else 0.0,
        "peak_bytes": 500_000_000,
        "background_cpu_s": 0.1,
        "training_cpu_s": 1.4,
        "steal_s": 0.01,
        "details": {},
    }
    return {**record, **fields}
