"""What came back of a checkpoint: how much, how exactly."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from asymcheck_lab.bench_work import Workload
from asymcheck_lab.fingerprint import fingerprint, held, optimizer_entries
from asymcheck_lab.rivals import RNG

_SHOWN = 5
PAGE_CACHE = "files dropped from the page cache before"


def fingerprint_of(work: Workload) -> dict[str, str]:
    """Each piece of model, optimizer and random number generators."""
    return fingerprint(work.model, work.optimizer, {})


def differing(saved: Mapping[str, str], found: Mapping[str, str], omits: str) -> list[str]:
    """Pieces that are not the same in both fingerprints.

    Args:
        saved: What was live.
        found: What came back.
        omits: What the system does not save; states of random number generators may differ
            where it says so.
    """
    return [
        name
        for name in sorted(saved.keys() | found.keys())
        if saved.get(name) != found.get(name) and not (RNG in omits and name.startswith("rng/"))
    ]


def tensors_of(work: Workload) -> dict[str, torch.Tensor]:
    """Parameters and optimizer state as the fingerprint names them, each tensor once.

    Of what is spread over ranks it is what this one holds. Masters that ZeRO-3 has beside its
    parameters are left out: in fp32 they are the same numbers.
    """
    found = {f"model/{name}": held(p).detach() for name, p in work.model.named_parameters()}
    for name, value in optimizer_entries(work.model, work.optimizer):
        if isinstance(value, torch.Tensor) and not name.endswith("/values"):
            found[name] = held(value).detach()
    return found


def compare_restored(
    live: Workload,
    saved: Mapping[str, str],
    fresh: Workload,
    blank: Mapping[str, str],
    omits: str,
) -> dict[str, Any]:
    """Compare what was loaded with what was live when it was saved.

    A tensor counts as part of the checkpoint when loading changed or made it, or when it is as
    it was saved. What is not part of it, and options of the optimizer, may differ only where the
    system says that it omits more than random numbers.

    Args:
        live: Not changed since the save.
        saved: Its fingerprint, from before ``fresh`` was made.
        fresh: What was loaded into; of another seed.
        blank: Its fingerprint before that.
        omits: What the system says that it does not save.

    Returns:
        ``saved_bytes``, ``bit_exact``, ``max_error`` and ``differing`` (names, the first few).
        The error is the largest difference of two numbers of a tensor, as a part of the largest
        number in it.
    """
    found = fingerprint_of(fresh)
    tensors, came = tensors_of(live), tensors_of(fresh)
    there = {
        name
        for name in tensors.keys() & came.keys()
        if found[name] != blank.get(name) or found[name] == saved[name]
    }
    wrong = differing(saved, found, omits)
    if omits not in ("", RNG):  # only a part is saved: that part has to come back
        wrong = [name for name in wrong if name in there]
    return {
        "saved_bytes": sum(tensors[name].nbytes for name in there),
        "bit_exact": not wrong,
        "max_error": max((_error(tensors[n], came[n]) for n in there if n in wrong), default=0.0),
        "differing": wrong[:_SHOWN],
    }


def _error(saved: torch.Tensor, found: torch.Tensor) -> float:
    wanted, got = saved.double(), found.double()
    if not wanted.numel():
        return 0.0
    scale = float(wanted.abs().max()) or 1.0
    return float((wanted - got).abs().max()) / scale


def forget_cached(folder: Path) -> None:
    """Let the page cache forget every file below ``folder`` that is on the medium."""
    for top, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                fd = os.open(Path(top) / name, os.O_RDONLY)
                try:
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(fd)
