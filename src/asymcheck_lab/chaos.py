"""``asymlab chaos``: every failure under every strategy at every moment, tried for real."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, product
from pathlib import Path
from typing import Any

from asymcheck.errors import nearest
from asymcheck.planning.strategies import strategies
from asymcheck.testing.children import Child, Say
from asymcheck_lab.bench import append_record, describe_session
from asymcheck_lab.chaos_case import Trial, run_case
from asymcheck_lab.chaos_network import Network
from asymcheck_lab.chaos_places import OVER_A_LINK, unavailable
from asymcheck_lab.chaos_stage import FAULTS, MOMENTS, Case, Disk, Verdict
from asymcheck_lab.chaos_supervised import SupervisedTrial, ends_a_training
from asymcheck_lab.errors import RunError, UsageError
from asymcheck_lab.rundir import scratch_folder

DEFAULT = "asymcheck"
SCHEMA = 1
_CASE_LIMIT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosOptions:
    """What to try.

    Attributes:
        faults: Names out of ``FAULTS``; empty for all.
        strategies: Names of strategies; empty for all.
        moments: Names out of ``MOMENTS``; empty for all.
        quick: Each failure at each moment under the default strategy, and once more under another,
            all of them in turn.
        supervised: Those that end a training, each under ``asymlab run``.
        jobs: Cases at a time.
        folder: Where the roots are; ``None`` for a temporary one.
        results: Gets a JSON line for each case.
    """

    faults: tuple[str, ...] = ()
    strategies: tuple[str, ...] = ()
    moments: tuple[str, ...] = ()
    quick: bool = False
    supervised: bool = False
    jobs: int = 3
    folder: Path | None = None
    results: Path = Path("results/chaos.jsonl")

    def __post_init__(self) -> None:
        for name, known in (
            ("faults", FAULTS),
            ("strategies", tuple(strategies)),
            ("moments", MOMENTS),
        ):
            for given in getattr(self, name):
                if given not in known:
                    raise UsageError(
                        f"{name}: expected some of {list(known)}, found "
                        f"{given!r}{nearest(given, known)}"
                    )
        if self.jobs < 1:
            raise UsageError(f"jobs: expected at least 1, found {self.jobs}")

    @property
    def command(self) -> str:
        """Does it again."""
        words = ["asymlab", "chaos"]
        for option, chosen in (
            ("--faults", self.faults),
            ("--strategies", self.strategies),
            ("--moments", self.moments),
        ):
            words += [option, f"'{','.join(chosen)}'"] if chosen else []
        words += ["--quick"] if self.quick else []
        words += ["--supervised"] if self.supervised else []
        return " ".join(words)


def cases_of(options: ChaosOptions) -> list[Case]:
    """The cases, those that cannot be run here among them."""
    faults = options.faults or FAULTS
    moments = options.moments or MOMENTS
    names = options.strategies or tuple(strategies)
    if not options.quick:
        found = [Case(*one) for one in product(faults, names, moments)]
    else:
        found = list(_quick(faults, names, moments))
    return [case for case in found if not options.supervised or ends_a_training(case)]


def _quick(faults: Sequence[str], names: Sequence[str], moments: Sequence[str]) -> Iterable[Case]:
    """Each failure at each moment under the first strategy, and under one of the others."""
    first = DEFAULT if DEFAULT in names else names[0]
    others = cycle([name for name in names if name != first] or [first])
    found = []
    for fault, moment in product(faults, moments):
        found += [Case(fault, first, moment), Case(fault, next(others), moment)]
    return dict.fromkeys(found)


def run_chaos(
    options: ChaosOptions, tell: Callable[[str], None] = lambda line: None
) -> list[dict[str, Any]]:
    """Run the matrix; blocks for minutes. Every record is in the results when it returns.

    Args:
        options: What.
        tell: Gets a line for each case.

    Raises:
        LabError: The folder or the results cannot be used.
    """
    from asymcheck_lab.chaos_job import load_once

    with scratch_folder(options.folder, "asymlab-chaos-") as top:
        session = describe_session(options.command, top, tuple(os.sched_getaffinity(0)), SCHEMA)
        cases = cases_of(options)
        records = []
        missing = unavailable()
        load_once()
        for case, outcome in _outcomes(cases, options, top, missing):
            record = {**session, **asdict(case), **outcome}
            append_record(options.results, record)
            records.append(record)
            tell(f"{len(records)}/{len(cases)} {spoken(record)}")
    return records


def spoken(record: Mapping[str, Any]) -> str:
    """A record in a line."""
    case = f"{record['fault']}, {record['strategy']}, {record['moment']}"
    if "not_run" in record:
        return f"{case}: not run here: {record['not_run']}"
    if record["problems"]:
        return f"{case}: BROKEN: {'; '.join(record['problems'])}"
    note = f" ({record['note']})" if record["note"] else ""
    return (
        f"{case}: {record['training']}, step {record['resumed_from']} from {record['tier']}, "
        f"{record['steps_lost']} lost, {record['seconds']:.2f} s, {record['exact']}{note}"
    )


def _outcomes(
    cases: Sequence[Case], options: ChaosOptions, top: Path, missing: Mapping[str, str]
) -> Iterator[tuple[Case, Mapping[str, Any]]]:
    """Each case with what became of it, in the order in which they end."""
    runnable = [case for case in cases if case.fault not in missing]
    for case in cases:
        if case.fault in missing:
            yield case, {"not_run": missing[case.fault]}
    trial = SupervisedTrial if options.supervised else Trial
    shares = [share for n in range(options.jobs) if (share := runnable[n :: options.jobs])]
    workers = [
        Child(lambda say, share=share, n=n: _work(say, share, top / f"job-{n}", trial))  # type: ignore[misc]
        for n, share in enumerate(shares)
    ]
    heard: queue.Queue[tuple[Case, Mapping[str, Any]]] = queue.Queue()
    # Threads only now: what was forked has none of them.
    listeners = [
        threading.Thread(target=_listen, args=(worker, share, heard.put), daemon=True)
        for worker, share in zip(workers, shares, strict=True)
    ]
    for listener in listeners:
        listener.start()
    try:
        for _ in runnable:
            yield heard.get(timeout=_CASE_LIMIT_S + 60)
        for listener in listeners:
            listener.join(60)  # each job takes its disk away
    except queue.Empty:
        raise RunError(f"no case came to its end within {_CASE_LIMIT_S:g} s") from None
    finally:
        for worker in workers:
            worker.kill()
        for listener in listeners:
            listener.join(5)
        for disk in top.glob("job-*/disk"):
            Disk.take_away(disk)


def _work(say: Say, share: Sequence[Case], folder: Path, trial: type[Trial]) -> None:
    """One job: its cases one after the other, in a process of its own."""
    disk = Disk(folder / "disk")
    network = Network() if any(case.fault in OVER_A_LINK for case in share) else None
    try:
        for number, case in enumerate(share):
            say(run_case(case, folder / str(number), disk, network, trial).as_json())
    finally:
        disk.close()
        if network is not None:
            network.close()
    say("over")


def _listen(
    worker: Child,
    share: Sequence[Case],
    put: Callable[[tuple[Case, Mapping[str, Any]]], None],
) -> None:
    """Pass on what a job says; where it ends before its time, its other cases are broken."""
    for number, case in enumerate(share):
        try:
            said = worker.hear(_CASE_LIMIT_S)
        except AssertionError as failure:
            said = {"error": str(failure)}
        if not isinstance(said, dict) or "error" in said:
            for left in share[number:]:
                put((left, _lost(f"its process ended: {said}")))
            return
        put((case, said))
    try:
        worker.hear(60)  # its disk is away then
    except AssertionError:
        return


def _lost(why: str) -> dict[str, Any]:
    return Verdict(problems=[why]).as_json()


def broken(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those in which a promise was broken."""
    return [record for record in records if record.get("problems")]
