"""What checkpoints in the memory of another host cost a training that needs the same network.

Two hosts in network namespaces, joined by a link of a given rate, each with an agent and a rank of
one training. Segments of steps come in turns: without checkpoints, with packs that are sent at
once, and with packs that are sent into idle windows.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from asymcheck.testing.hosts import Hosts, why_not
from asymcheck_lab.bench import newest_session, order_of
from asymcheck_lab.bench_child import line_of, package_environment, tail_of
from asymcheck_lab.bench_stats import estimate
from asymcheck_lab.errors import RunError, UsageError
from asymcheck_lab.pace_child import NOTHING, PaceSpec

BEGIN, END = "<!-- pace: begin -->", "<!-- pace: end -->"
PACES = (NOTHING, "none", "idle")
_TITLES = {NOTHING: "without checkpoints", "none": "`pace=none`", "idle": "`pace=idle`"}
_PORT, _MEETING = 7070, 7100
_QUEUE_MS = 20
_STARTS_S = 60.0
_AGENT = "from asymcheck.cli import app; app()"


@dataclass(frozen=True, slots=True)
class PaceSegment:
    """What a segment of steps took.

    Attributes:
        pace: One of ``PACES``.
        round: Which one, from 1 on.
        mbit_per_s: What the link carries in each direction.
        step_s: Each counted step.
        durable_s: Each counted checkpoint, from its boundary until both copies were whole.
        stored_bytes: Of each, what one rank wrote.
    """

    pace: str
    round: int
    mbit_per_s: int
    step_s: list[float]
    durable_s: list[float]
    stored_bytes: list[int]


def measure_pace(
    *, rounds: int, mbit_per_s: int, say: Callable[[str], None] = lambda line: None
) -> list[PaceSegment]:
    """Train two ranks on two hosts, segment after segment; blocks.

    Args:
        rounds: How often each pace has its turn.
        mbit_per_s: What the link carries in each direction.
        say: Told when it goes on.

    Raises:
        UsageError: A number is wrong.
        RunError: This machine cannot have such hosts, or the training failed.
    """
    for name, value in (("rounds", rounds), ("mbit-per-s", mbit_per_s)):
        if value < 1:
            raise UsageError(f"{name}: expected at least 1, found {value}")
    reason = why_not()
    if reason:
        raise RunError(f"{reason}: not here")
    order = [pace for number in range(1, rounds + 1) for pace in order_of(PACES, number)]
    with tempfile.TemporaryDirectory(prefix="pace-") as scratch, Hosts(2) as hosts:
        for host in (0, 1):
            hosts.slow(host, mbit_per_s, queue_ms=_QUEUE_MS)
        found = _train(hosts, Path(scratch), order, say)
    return [
        PaceSegment(
            said["pace"],
            1 + number // len(PACES),
            mbit_per_s,
            said["step_s"],
            said["durable_s"],
            said["stored_bytes"],
        )
        for number, said in enumerate(found)
    ]


def _train(
    hosts: Hosts, scratch: Path, order: Sequence[str], say: Callable[[str], None]
) -> list[dict[str, Any]]:
    log, secret = scratch / "log", scratch / "secret"
    secret.write_text("only these two hosts know it")
    secret.chmod(0o600)
    agents = [f"{hosts.address(host)}:{_PORT}" for host in (0, 1)]
    for host in (0, 1):
        command = [*_python(), "-c", _AGENT, "agent", "--listen", agents[host]]
        command += ["--room-gib", "1", "--secret-file", str(secret)]
        agent = hosts.run(host, command, log)
        _hear(agent, log, _STARTS_S)
    ranks = []
    for host in (0, 1):
        spec = PaceSpec(
            rank=host,
            master=f"tcp://{hosts.address(0)}:{_MEETING}",
            root=f"peers://{','.join(agents)}/run?replicas=2&secret_file={secret}",
            segments=tuple(order),
        )
        command = [*_python(), "-m", "asymcheck_lab.pace_child", json.dumps(asdict(spec))]
        ranks.append(hosts.run(host, command, log))
    found = []
    for number, pace in enumerate(order, start=1):
        found.append(json.loads(_hear(ranks[0], log, _STARTS_S + 10 * spec.steps)))
        say(f"segment {number} of {len(order)}: {_TITLES[pace]}")
    for rank in ranks:
        if rank.wait(_STARTS_S):
            raise RunError(f"a rank ended with {rank.returncode}: {tail_of(log)}")
    return found


def _python() -> list[str]:
    said = [f"{name}={value}" for name, value in package_environment().items()]
    return ["env", *said, "GLOO_SOCKET_IFNAME=eth0", sys.executable]


def _hear(process: subprocess.Popen[str], log: Path, timeout_s: float) -> str:
    try:
        line = line_of(process, timeout_s)
    except TimeoutError:
        raise RunError(f"nothing was said within {timeout_s:g} s: {tail_of(log)}") from None
    if not line:
        raise RunError(f"a process on a host ended: {tail_of(log)}")
    return line


def render(records: Sequence[dict[str, Any]]) -> str:
    """The newest session as a table; empty without records."""
    if not records:
        return ""
    shown = newest_session(records)
    first = shown[0]
    by_pace = {pace: [r for r in shown if r["pace"] == pace] for pace in PACES}
    plain = {r["round"]: fmean(r["step_s"]) for r in by_pace[NOTHING]}
    stored = fmean([b for r in shown for b in r["stored_bytes"]])
    lines = [
        f"Measured {first['session'][:10]}, commit `{first['commit'][:12]}`, "
        f"{first['machine']['cpu']}, by "
        f"`{first['command']}`: a link of {first['mbit_per_s']} Mbit/s each way, "
        f"{stored / 1e6:.1f} MB of each of two ranks per checkpoint, medians over "
        f"{max(r['round'] for r in shown)} rounds, each against the segment without checkpoints "
        "in the same round.",
        "",
        "| packs | a step, ms | slower by, % | longest step, ms | durable after, s |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for pace, mine in by_pace.items():
        step = estimate([1e3 * fmean(r["step_s"]) for r in mine])
        longest = estimate([1e3 * max(r["step_s"]) for r in mine])
        slower = estimate([100 * (fmean(r["step_s"]) / plain[r["round"]] - 1) for r in mine])
        durable = estimate([fmean(r["durable_s"]) for r in mine]) if pace != NOTHING else None
        lines.append(
            f"| {_TITLES[pace]} | {step.median:.0f} ({step.low:.0f} to {step.high:.0f}) | "
            + (
                "– | "
                if durable is None
                else f"{slower.median:+.1f} ({slower.low:+.1f} to {slower.high:+.1f}) | "
            )
            + f"{longest.median:.0f} | "
            + ("– |" if durable is None else f"{durable.median:.2f} |")
        )
    return "\n".join(lines) + "\n"
