"""One start of a case's training as ``asymlab run`` makes it: a program of its own.

``python -m asymcheck_lab.chaos_start FOLDER`` does what the plan in the folder says for this start,
and says what it does in a file there.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asymcheck_lab.chaos_places import Where

SAID = "said"
_PLAN, _COUNT, _CLOCK = "plan.json", "starts", "clock"


def write_plan(
    folder: Path, strategy: str, moment: str, starts: Sequence[Where], *, jumps: bool
) -> None:
    """Say what starts are to do: the first trains, all others go on.

    Args:
        folder: Of the case.
        strategy: Its strategy.
        moment: Where the first start pauses.
        starts: Where each of them finds its checkpoints; the last one stands for all more.
        jumps: Whether the clock may jump.
    """
    plan = {
        "strategy": strategy,
        "moment": moment,
        "starts": [[where.home, list(where.tiers)] for where in starts],
        "jumps": jumps,
    }
    (folder / _PLAN).write_text(json.dumps(plan))


def main(folder: Path) -> None:
    """Do what the plan says; ends with status 1 where that fails."""
    with (folder / _COUNT).open("ab") as count:
        count.write(b"x")
        number = count.tell()
    # Each line by itself: what was said survives SIGKILL.
    said = os.open(folder / SAID, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def say(value: Any) -> None:  # noqa: ANN401
        os.write(said, json.dumps([number, value]).encode() + b"\n")

    say({"trainer": os.getpid()})
    try:
        _start(folder, number, json.loads((folder / _PLAN).read_text()), say)
    except Exception:  # noqa: BLE001  the case judges it
        say({"error": traceback.format_exc()})
        sys.exit(1)


def _start(folder: Path, number: int, plan: Mapping[str, Any], say: Any) -> None:  # noqa: ANN401
    from asymcheck_lab.chaos_job import WAIT_S, jump_the_clock, load_once, resume, train

    if plan["jumps"]:
        jump_the_clock(folder / _CLOCK)
    load_once()
    home, tiers = plan["starts"][min(number, len(plan["starts"])) - 1]
    where = Where(home, tuple(tiers))
    if number == 1:
        train(say, where, plan["strategy"], plan["moment"], folder)
    else:
        resume(say, where, plan["strategy"], WAIT_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
