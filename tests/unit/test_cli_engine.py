"""``explain`` and ``plan`` on a trace with known numbers, and on those that are none."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from asymcheck import explanation
from asymcheck.cli import app
from asymcheck.cli_engine import ticks
from asymcheck.encoding import GroupReport
from asymcheck.errors import OptionError
from asymcheck.events import Span, Stage, discard
from asymcheck.explanation import alternatives, shares, what_bounded, why_so_planned
from asymcheck.handles import SaveReport
from asymcheck.pictures import draw
from asymcheck.planning.adaptive import Adaptive, Decision
from asymcheck.planning.contention import Contention, Phase
from asymcheck.planning.plan import (
    FREE,
    Gate,
    IdleProportional,
    PartitionPlan,
    Uniform,
    Whole,
    predict,
)
from asymcheck.planning.strategies import Strategy
from asymcheck.planning.windows import Window
from asymcheck.tracing import Trace, TracedSpan, Tracer, choose_step, read_trace

MiB = 1 << 20
WINDOWS = (Window("forward", 0.1), Window("backward", 0.2, 0.05), Window("backward", 0.1))
BANDWIDTH = 100.0 * MiB
LAZY = 20 * MiB
HELD = PartitionPlan((8 * MiB, 16 * MiB, LAZY), WINDOWS, LAZY)
REPORT = SaveReport(
    step=30,
    attempt=2,
    raw_bytes=21 * MiB,
    eager_bytes=MiB,
    stored_bytes=12 * MiB,
    step_stall_s=0.02,
    fence_stall_s=0.01,
    copy_s=0.35,
    persist_s=0.7,
    durable_s=0.8,
    cpu_s=0.3,
    lag_steps=1,
    encode_s=0.25,
    write_s=0.3,
    batches=2,
    groups=(
        GroupReport("parameter float32", "zstd1+shuffle", 10 * MiB, 5 * MiB, 0.0625),
        GroupReport("state/exp_avg float32", "raw", 10 * MiB, 10 * MiB, 0.0),
    ),
    base=20,
)
SPANS = (
    (Stage.STALL, 0.0, 0.02, 0),
    (Stage.CAPTURE, 0.001, 0.01, MiB),
    (Stage.FLUSH, 0.03, 0.67, 21 * MiB),
    (Stage.COPY, 0.03, 0.37, LAZY),
    (Stage.WRITE, 0.1, 0.1, 4 * MiB),
    (Stage.FENCE, 0.42, 0.01, 0),
    (Stage.ENCODE, 0.44, 0.05, 5 * MiB),
    (Stage.WRITE, 0.5, 0.2, 8 * MiB),
    (Stage.COMMIT, 0.72, 0.08, 0),
    (Stage.RETAIN, 0.8, 0.2, 0),
)


class PartSeen:
    def __init__(self, window: int, start_s: float, stop_s: float, nbytes: int) -> None:
        self.window, self.start_s, self.stop_s, self.nbytes = window, start_s, stop_s, nbytes


class PaceSeen:
    """What a copy was planned as, and how it went."""

    def __init__(self, decision: Decision) -> None:
        self.decision = decision
        self.contention = Contention()
        for copied_s in (0.01, 0.02, 0.04):
            self.contention = self.contention.add(
                "forward", with_s=0.1 + 0.5 * copied_s, without_s=0.1, copied_s=copied_s
            )
        self.copy_bytes_per_s = BANDWIDTH
        self.opened: list[tuple[float, Phase]] = [
            (0.02, "forward"),
            (0.12, "backward"),
            (0.32, "backward"),
        ]
        self.parts = [
            PartSeen(0, 0.03, 0.11, 8 * MiB),
            PartSeen(1, 0.12, 0.2, 8 * MiB),
            PartSeen(-1, 0.42, 0.43, 4 * MiB),
        ]


def write(
    path: Path,
    *steps: int,
    strategy: Strategy | None = None,
    decision: Decision | None = None,
    planned: bool = True,
) -> Path:
    used = strategy or Strategy(partitioner=Adaptive())
    tracer = Tracer(path, discard, used)
    made = decision or Decision(HELD, Gate("windows", 0.1), 4 * MiB, 0.004, "it saves time")
    tracer.cadence = "every 10 steps, as asked for"
    for step in steps or (30,):
        tracer.begin(step, 0.0, lazy_bytes=LAZY, eager_bytes=MiB)
        if planned:
            tracer.plan(step, PaceSeen(made))
        for stage, start_s, duration_s, nbytes in SPANS:
            tracer(Span(stage, step, start_s, duration_s, nbytes))
        tracer.durable(
            SaveReport(**{n: getattr(REPORT, n) for n in REPORT.__slots__} | {"step": step})
        )
    assert tracer.complaints() == []
    return path


def run(*args: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in args])


def shown(*args: object) -> list[str]:
    done = run(*args)
    assert done.exit_code == 0, done.output
    return done.stdout.splitlines()


def refused(code: int, *args: object) -> str:
    done = run(*args)
    assert done.exit_code == code, done.output
    assert done.stdout == ""
    return done.stderr


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "trace.jsonl")


# --- the picture ------------------------------------------------------------


def test_the_lanes_stand_on_one_axis_of_milliseconds(path: Path) -> None:
    lines = shown("explain", path)
    assert lines[0] == (
        "step 30 of attempt 2: 21.0 MiB, stored 12.0 MiB (exact, differences to step 20)"
    )
    assert lines[1] == "training waited 30.0 ms; durable 800.0 ms after the boundary, 1 step later"
    # A second is 72 characters; each bar from where it starts to where it ends.
    axis = lines[3]
    assert axis.startswith("ms      |0 ")
    assert [axis.index(f"|{at}") - 8 for at in (200, 400, 600, 800)] == [14, 29, 43, 58]
    assert lines[4:10] == [
        "windows " + " " * 1 + "F" * 8 + "b" * 14 + "B" * 7,
        "copy    " + " " * 2 + "#" * 6 + " " + "=" * 5 + " " * 16 + "#",
        "stall   " + "!" + " " * 29 + "!",
        "encode  " + " " * 32 + "EEE",
        "write   " + " " * 7 + "W" * 7 + " " * 22 + "w" * 14,
        "commit  " + " " * 52 + "C" * 6 + "r" * 14,
    ]
    assert lines[10].index("^ durable") - 8 == 58
    assert "b backward" in lines[11].replace("B/b", "b")


def test_the_partitions_add_up_to_the_whole_copy(path: Path) -> None:
    lines = shown("explain", path)
    start = next(i for i, line in enumerate(lines) if line.startswith("partitions of 20.0 MiB"))
    table = [line.split() for line in lines[start + 2 : start + 7]]
    assert table == [
        ["0", "forward", "100.0", "0.0", "8.0", "MiB", "80.0", "8.0", "MiB", "80.0"],
        ["1", "backward", "200.0", "50.0", "8.0", "MiB", "80.0", "8.0", "MiB", "80.0"],
        ["2", "backward", "100.0", "0.0", "4.0", "MiB", "40.0", "0", "B", "0.0"],
        ["-", "fence", "0.0", "0.0", "0", "B", "0.0", "4.0", "MiB", "10.0"],
        ["all", "400.0", "50.0", "20.0", "MiB", "200.0", "20.0", "MiB", "170.0"],
    ]


def test_choices_and_batches_have_their_numbers(path: Path) -> None:
    text = "\n".join(shown("explain", path))
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "parameter float32 zstd1+shuffle 10.0 MiB 5.0 MiB 0.500 62.5" in rows
    assert "state/exp_avg float32 raw 10.0 MiB 10.0 MiB 1.000 0.0" in rows
    assert "batches: 2, 12.0 MiB; the store took 300.0 ms for them" in text
    assert "0 100.0 100.0 4.0 MiB 42" in rows
    assert "1 500.0 200.0 8.0 MiB 42" in rows


def test_how_often_is_saved_and_why_is_told_where_it_is_known(path: Path) -> None:
    assert "How often is saved: every 10 steps, as asked for." in shown("explain", path)
    assert json.loads(run("explain", path, "--json").stdout)["cadence"].startswith("every 10")
    told = json.loads(path.read_text())
    del told["cadence"]  # as it was before traces had it
    path.write_text(json.dumps(told, separators=(",", ":")) + "\n")
    assert not [line for line in shown("explain", path) if "often" in line]


def test_of_many_batches_the_longest_are_shown(tmp_path: Path) -> None:
    tracer = Tracer(tmp_path / "t.jsonl", discard, Strategy())
    tracer.begin(30, 0.0, lazy_bytes=0, eager_bytes=0)
    for i in range(40):
        tracer(Span(Stage.WRITE, 30, 0.01 * i, 0.001 * (i % 20), MiB))
    tracer(Span(Stage.STALL, 30, 0.0, 0.01))
    tracer.durable(REPORT)
    lines = shown("explain", tmp_path / "t.jsonl")
    start = next(i for i, line in enumerate(lines) if line.startswith("batch "))
    assert [line.split()[0] for line in lines[start + 1 : start + 13]] == [
        str(i) for i in (14, 15, 16, 17, 18, 19, 34, 35, 36, 37, 38, 39)
    ]
    assert lines[start + 13] == "and 28 that took less; --json has all of them"


def test_the_sentences_say_what_bounded_it_and_why_it_was_planned_so(path: Path) -> None:
    lines = shown("explain", path)
    assert lines[-2] == (
        "Durable 800.0 ms after the boundary. What took longest: 370.0 ms until the state was "
        "copied, pauses included; besides 20.0 ms at the boundary, while training waited; "
        "10.0 ms until the persister began: busy before, or not yet awake; 30.0 ms until the next "
        "update, which seals what was copied; 50.0 ms of encoding what was left; 220.0 ms of "
        "writing what was left, sync included; 100.0 ms of the commit."
    )
    assert lines[-1] == (
        "The copy is held to its windows (adaptive): it saves time. Modelled gain of holding it "
        "back: 4.00 ms a checkpoint; κ with its 95 % interval: forward 0.50 [0.50, 0.50]."
    )


def test_the_json_has_the_same_numbers(path: Path) -> None:
    told = json.loads("\n".join(shown("explain", path, "--step", 30, "--json")))
    assert (told["step"], told["attempt"], told["stored_bytes"]) == (30, 2, 12 * MiB)
    assert told["stall_s"] == pytest.approx(0.03)
    assert sum(s["seconds"] for s in told["shares"]) == pytest.approx(0.8)
    assert sum(p["planned_bytes"] for p in told["partitions"]) == LAZY
    assert sum(p["copied_bytes"] for p in told["partitions"]) == LAZY
    assert list(told["lanes"]) == ["windows", "copy", "stall", "encode", "write", "commit"]
    assert told["groups"][0]["label"] == "zstd1+shuffle"


def test_without_a_plan_the_windows_are_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", planned=False, strategy=Strategy(capture="blocking"))
    lines = shown("explain", path)
    assert lines[-1] == "There was nothing to plan: the copy blocks training."
    assert not any(line.startswith(("windows", "partitions")) for line in lines)


def test_names_in_a_trace_cannot_talk_to_the_terminal(path: Path) -> None:
    path.write_text(
        path.read_text().replace("it saves time", "\\u001b[2J").replace('"raw"', '"\\u0007"')
    )
    text = "\n".join(shown("explain", path)) + "\n".join(shown("plan", path))
    assert "\\x1b[2J" in text
    assert text.isprintable() or all(c == "\n" or c.isprintable() for c in text)


@pytest.mark.parametrize("whole_s", [1e-6, 0.0123, 0.8, 1.0, 59.9, 86400.0])
def test_an_axis_has_a_few_round_numbers(whole_s: float) -> None:
    found = ticks(whole_s)
    assert found[0] == 0.0
    assert 3 <= len(found) <= 8
    assert found[-1] <= whole_s * 1.0001
    assert f"{found[1]:e}"[0] in "125"


# --- the PNG ----------------------------------------------------------------


def test_a_png_is_drawn_with_the_same_lanes(path: Path, tmp_path: Path) -> None:
    into = tmp_path / "new" / "step.PNG"
    assert shown("explain", path, "--png", into)[-1] == f"drawn into {into}"
    data = into.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert int.from_bytes(data[16:20], "big") > 1000  # pixels across
    assert "matplotlib.pyplot" not in sys.modules  # it would look for a display


def test_without_matplotlib_the_message_says_what_to_install(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    said = refused(2, "explain", path, "--png", tmp_path / "a.png")
    assert 'pip install "asymcheck[plot]"' in said
    monkeypatch.undo()
    with pytest.raises(OptionError, match=r"ends in \.png, found 'a\.pdf'"):
        draw(choose_step(path, None), Path("a.pdf"))


def test_a_png_that_cannot_be_written_is_named(path: Path) -> None:
    said = refused(1, "explain", path, "--png", path / "a.png")
    assert f"png {path}/a.png: " in said


# --- what bounded it --------------------------------------------------------


def traced(spans: Sequence[tuple[str, float, float]], durable_s: float, **more: Any) -> Trace:
    return Trace(
        lazy_bytes=1,
        eager_bytes=1,
        capture=more.get("capture", "lazy"),
        persist=more.get("persist", "behind"),
        partitioner="none",
        spans=tuple(
            TracedSpan(s, a, b - a, 0, "") for s, a, b in sorted(spans, key=lambda x: x[1])
        ),
        report=SaveReport(
            **{n: getattr(REPORT, n) for n in REPORT.__slots__} | {"durable_s": durable_s}
        ),
    )


STALL, FENCE = ("stall", 0.0, 0.01), ("fence", 0.3, 0.31)
CASES = {
    "the queue": ([STALL, ("copy", 0.01, 0.1), FENCE, ("flush", 1.0, 1.2)], "persister began"),
    "the copy": ([STALL, ("copy", 0.01, 0.31), FENCE, ("flush", 0.02, 0.33)], "was copied"),
    "the update": ([STALL, ("copy", 0.01, 0.05), FENCE, ("flush", 0.02, 0.32)], "next update"),
    "the codec": (
        [STALL, ("copy", 0.01, 0.1), FENCE, ("flush", 0.02, 1.2)]
        + [("encode", 0.1 * i, 0.1 * i + 0.15) for i in range(10)],
        "of encoding",
    ),
    "the store": (
        [STALL, ("copy", 0.01, 0.1), FENCE, ("flush", 0.02, 1.2), ("write", 0.1, 1.1)],
        "of writing",
    ),
    "the commit": ([STALL, ("copy", 0.01, 0.1), FENCE, ("flush", 0.02, 0.35)], "of the commit"),
    "the boundary": ([("stall", 0.0, 1.0), ("capture", 0.0, 1.0), ("flush", 1.0, 1.2)], "boundary"),
}


@pytest.mark.parametrize(("spans", "blamed"), CASES.values(), ids=CASES)
def test_what_took_longest_is_named(spans: list[tuple[str, float, float]], blamed: str) -> None:
    trace = traced(spans, 1.25 if blamed != "next update" and blamed != "was copied" else 0.35)
    longest = max(shares(trace), key=lambda share: share.seconds)
    assert blamed in longest.why
    assert longest.why in what_bounded(trace).partition("; besides")[0]


def test_of_what_stays_in_memory_the_copy_is_named_and_no_persister() -> None:
    trace = traced([STALL, ("copy", 0.01, 0.1), ("fence", 0.2, 0.21)], 0.21)
    trace = replace(trace, report=replace(trace.report, tier="memory", stored_bytes=0))
    assert "persister" not in what_bounded(trace)
    assert sum(share.seconds for share in shares(trace)) == pytest.approx(0.21)
    assert shares(trace)[2].seconds == pytest.approx(0.1 - shares(trace)[0].seconds)


@given(
    st.lists(
        st.tuples(
            st.sampled_from([str(stage) for stage in Stage]),
            st.floats(-1.0, 10.0),
            st.floats(-1.0, 10.0),
        )
    ),
    st.floats(0.0, 10.0),
)
@example([("flush", -1.0, -1.0)], 0.0)
@example([("stall", -1.0, -1.0)], 1.0)
def test_the_shares_sum_to_the_whole_time_whatever_overlaps(
    spans: list[tuple[str, float, float]], durable_s: float
) -> None:
    found = shares(traced([(s, min(a, b), max(a, b)) for s, a, b in spans], durable_s))
    assert sum(share.seconds for share in found) == pytest.approx(durable_s)
    assert all(share.seconds >= -1e-9 for share in found)


def test_who_persists_before_training_goes_on_stalls_it_until_then() -> None:
    trace = traced([STALL, ("flush", 0.02, 0.3)], 0.35, persist="before", capture="blocking")
    assert explanation.stall_s(trace) == 0.35


# --- plan -------------------------------------------------------------------


def test_every_partitioner_is_held_against_the_windows_that_were_measured(path: Path) -> None:
    (trace,) = read_trace(path)
    found = {one.name: one for one in alternatives(trace)}
    assert list(found) == ["whole", "uniform", "idle-proportional", "adaptive"]
    assert [name for name, one in found.items() if one.used] == ["adaptive"]
    assert found["adaptive"].decision.plan == HELD  # as recorded, not made again
    for name, partitioner in (
        ("whole", Whole()),
        ("uniform", Uniform()),
        ("idle-proportional", IdleProportional()),
    ):
        made = partitioner.divide(LAZY, WINDOWS, BANDWIDTH)
        gate = FREE if name == "whole" else Gate("windows")
        assert found[name].decision.plan == made
        assert found[name].prediction == predict(made, WINDOWS, BANDWIDTH, gate, trace.contention)
    # 0.2 s of copying at κ = 0.5 in forward: the first window, 0.1 s, grows to 0.2.
    assert found["whole"].prediction.slowdown_s == pytest.approx(0.1)


def test_the_table_shows_sizes_stall_and_slowdown_and_marks_the_used_one(path: Path) -> None:
    lines = shown("plan", path)
    assert lines[0] == (
        "step 30 of attempt 2: 20.0 MiB at 0.10 GB/s need 200.0 ms; 3 windows last 400.0 ms"
    )
    assert [" ".join(line.split()) for line in lines[2:4]] == [
        "window ms busy whole uniform proportional *adaptive",
        "0 forward 100.0 0.0 20.0 MiB 6.7 MiB 5.7 MiB 8.0 MiB",
    ]
    rows = {line.split()[0]: line.split() for line in lines[6:9]}
    assert [float(x) for x in rows["stall"][2:]] == [0.0, 0.0, 0.0, 0.0]
    assert [float(x) for x in rows["slower"][2:]] == [100.0, 33.33, 28.57, 40.0]
    assert lines[-1] == "*adaptive: the copy is held to the windows; it saves time"


def test_its_json_has_what_the_table_has(path: Path) -> None:
    told = json.loads("\n".join(shown("plan", path, "--json")))
    for one in told["partitioners"].values():
        assert sum(one["sizes"]) == LAZY
        assert sum(one["window_bytes"]) == LAZY
    assert told["partitioners"]["adaptive"]["used"]
    assert told["windows"][1] == {"phase": "backward", "duration_s": 0.2, "collective_s": 0.05}


class Mine:
    """A partitioner of somebody else."""

    divide = Uniform.divide


def test_a_foreign_partitioner_stands_beside_the_librarys(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", strategy=Strategy(partitioner=Mine()))  # type: ignore[arg-type]
    assert "*Mine" in shown("plan", path)[2]


@pytest.mark.parametrize(
    "given",
    [
        {"planned": False},
        {"decision": Decision(PartitionPlan((LAZY,), (), LAZY), FREE, MiB, 0.0, "not yet")},
    ],
    ids=["no partitioner", "nothing measured"],
)
def test_where_nothing_was_measured_there_is_nothing_to_compare(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    path = write(tmp_path / "t.jsonl", **given)
    (line,) = shown("plan", path)
    assert line.startswith("step 30 of attempt 2: nothing was ")
    assert "choose a later step" in line
    told = json.loads("\n".join(shown("plan", path, "--json")))
    assert (told["step"], told["windows"], told["partitioners"]) == (30, [], {})
    assert why_so_planned(choose_step(path, None))


# --- bad input --------------------------------------------------------------


@pytest.mark.parametrize("command", ["explain", "plan"])
def test_what_is_no_trace_is_refused_in_one_line(tmp_path: Path, command: str) -> None:
    path = tmp_path / "trace.jsonl"
    assert f"{path}: No such file or directory" in refused(1, command, path)
    assert f"{tmp_path}: Is a directory" in refused(1, command, tmp_path)
    path.touch()
    assert f"{path}: no checkpoint is in it" in refused(1, command, path)
    write(path, 30, 40)
    said = refused(1, command, path, "--step", 38)
    assert said == (
        f"asymcheck: {path}: expected step 38, found 2 from 30 to 40; the nearest is 40\n"
    )
    path.write_text(path.read_text() + "\x1b[2J\n")
    said = refused(1, command, path, "--step", 30)
    assert f"{path}, line 3: expected a line of a trace" in said
    assert "\x1b" not in said
