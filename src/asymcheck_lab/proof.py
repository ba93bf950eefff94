"""Whether two runs are the same run, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from asymcheck_lab.record import StepRecord


def different_losses(
    expected: Iterable[StepRecord], found: Iterable[StepRecord], steps: range
) -> list[str]:
    """Every step of ``steps`` whose loss differs in any bit or is missing; one clause each.

    Where a log holds a step twice, each of them counts.
    """
    here, there = _by_step(expected), _by_step(found)
    differences = []
    for step in steps:
        want, got = here.get(step, []), there.get(step, [])
        if not want or not got:
            where = "expected" if not want else "compared"
            differences.append(f"loss of step {step}: missing in the {where} run")
        elif set(got) != set(want) or len(set(want)) != 1:
            differences.append(f"loss of step {step}: expected {_say(want)}, found {_say(got)}")
    return differences


def different_entries(expected: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """Every entry of two fingerprints that differs or is missing; one clause each."""
    differences = []
    for name in sorted(expected.keys() | found.keys()):
        want, got = expected.get(name), found.get(name)
        if want != got:
            differences.append(f"{name}: expected sha256 {_short(want)}, found {_short(got)}")
    return differences


def _by_step(records: Iterable[StepRecord]) -> dict[int, list[str]]:
    losses: dict[int, list[str]] = {}
    for record in records:
        losses.setdefault(record.step, []).append(record.loss_hex)
    return losses


def _say(losses: list[str]) -> str:
    return " and ".join(f"{text} ({float.fromhex(text):.6f})" for text in dict.fromkeys(losses))


def _short(sha256: str | None) -> str:
    return "nothing" if sha256 is None else f"{sha256[:16]}…"
