"""Traces: a line for each durable checkpoint, that never gets in the way of training."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import asymcheck
from asymcheck import tracing
from asymcheck.device.pacing import Part
from asymcheck.encoding import GroupReport
from asymcheck.errors import (
    CheckpointWarning,
    CorruptCheckpoint,
    NoCheckpoint,
    ObjectNotFound,
    OptionError,
)
from asymcheck.events import Span, Stage, discard
from asymcheck.explanation import lanes, shares, stall_s
from asymcheck.handles import SaveReport
from asymcheck.planning.adaptive import Decision
from asymcheck.planning.contention import Contention, Phase
from asymcheck.planning.plan import Gate, IdleProportional, PartitionPlan, Uniform
from asymcheck.planning.strategies import Strategy, strategies
from asymcheck.planning.windows import Window
from asymcheck.tracing import Trace, Tracer, choose_step, name_of, read_trace

STEPS, EVERY = 12, 4


class Training:
    """Blocks, and leaves large enough to be copied lazily."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(3)))
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def run(self, root: Path, steps: int = STEPS, **options: Any) -> list[SaveReport]:
        state = {"model": self.model, "optim": self.optimizer}
        handles = []
        with asymcheck.Checkpointer(root, state=state, every_steps=EVERY, **options) as ckpt:
            for step in range(ckpt.restore() + 1, steps + 1):
                self.model(torch.randn(8, 128)).square().mean().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                handles.append(ckpt.step(step))
        return [handle.durable.result() for handle in handles if handle is not None]


def report(step: int = 10, **changes: Any) -> SaveReport:
    made = SaveReport(
        step=step,
        attempt=1,
        raw_bytes=1000,
        eager_bytes=100,
        stored_bytes=800,
        step_stall_s=0.01,
        fence_stall_s=0.02,
        copy_s=0.1,
        persist_s=0.4,
        durable_s=0.5,
        cpu_s=0.2,
        lag_steps=1,
        groups=(GroupReport("parameter float32", "zstd1+shuffle", 900, 700, 0.05),),
    )
    return replace(made, **changes)


class Paced:
    """A copy as ``Pace`` tells of it."""

    def __init__(self, boundary_s: float = 0.0) -> None:
        windows = (Window("forward", 0.1, 0.02), Window("backward", 0.2))
        plan = PartitionPlan((400, 900), windows, 900)
        self.decision = Decision(plan, Gate("windows", 0.1), 4 << 20, 0.003, "it pays")
        contention = Contention()
        for copied_s in (0.01, 0.02, 0.04):
            contention = contention.add(
                "backward", with_s=0.2 + 0.5 * copied_s, without_s=0.2, copied_s=copied_s
            )
        self.contention = contention
        self.copy_bytes_per_s = 1e4
        self.opened: list[tuple[float, Phase]] = [
            (boundary_s + 0.01, "forward"),
            (boundary_s + 0.11, "backward"),
        ]
        self.parts = [
            Part(0, boundary_s + 0.02, boundary_s + 0.06, 400),
            Part(1, boundary_s + 0.12, boundary_s + 0.17, 500),
        ]


def spans(step: int, boundary_s: float) -> list[Span]:
    return [
        Span(stage, step, boundary_s + start_s, duration_s, nbytes)
        for stage, start_s, duration_s, nbytes in (
            (Stage.CAPTURE, 0.001, 0.008, 100),
            (Stage.FLUSH, 0.012, 0.42, 1000),
            (Stage.ENCODE, 0.06, 0.05, 400),
            (Stage.WRITE, 0.12, 0.1, 300),
            (Stage.COPY, 0.02, 0.15, 900),
            (Stage.FENCE, 0.31, 0.02, 0),
            (Stage.WRITE, 0.34, 0.09, 400),
            (Stage.COMMIT, 0.435, 0.06, 0),
            (Stage.RETAIN, 0.5, 0.05, 0),
            (Stage.STALL, 0.0, 0.01, 0),
        )
    ]


def tell(tracer: Tracer, step: int, boundary_s: float = 50.0, **changes: Any) -> None:
    """A checkpoint, from its boundary until it is durable."""
    tracer.cadence = f"every {step} steps"
    tracer.begin(step, boundary_s, lazy_bytes=900, eager_bytes=100)
    tracer.plan(step, Paced(boundary_s))
    for span in spans(step, boundary_s):
        tracer(span)
    tracer.durable(report(step, **changes))


def written(path: Path, *steps: int, strategy: Strategy | None = None) -> Path:
    tracer = Tracer(path, discard, strategy or strategies["asymcheck"])
    for step in steps:
        tell(tracer, step, 50.0 + step)
    assert tracer.complaints() == []
    return path


# --- of a real training -----------------------------------------------------


@pytest.mark.parametrize("strategy", ["asymcheck", "asymcheck-so", "naive"])
@pytest.mark.parametrize("persist", ["process", "thread"])
def test_the_numbers_of_a_real_training_add_up(tmp_path: Path, strategy: str, persist: str) -> None:
    path = tmp_path / "beside" / "trace.jsonl"
    reports = Training().run(tmp_path / "run", strategy=strategy, persist=persist, trace=path)
    found = read_trace(path)
    assert [trace.step for trace in found] == [4, 8, 12]
    for trace, told in zip(found, reports, strict=True):
        assert replace(trace.report, step_stall_s=told.step_stall_s) == told
        assert sum(share.seconds for share in shares(trace)) == pytest.approx(told.durable_s)
        assert all(share.seconds >= 0.0 for share in shares(trace))
        assert sum(group.raw_bytes for group in told.groups) <= told.raw_bytes
        (commit,) = trace.of(Stage.COMMIT)
        assert commit.stop_s <= told.durable_s + 1e-6
        assert sum(span.nbytes for span in trace.of(Stage.WRITE)) <= told.stored_bytes
        assert {"stall", "write", "commit"} <= {lane.name for lane in lanes(trace)}
        if strategy == "naive":
            assert trace.decision is None
            assert stall_s(trace) == told.durable_s
            continue
        assert trace.decision is not None
        assert sum(trace.decision.plan.sizes) == trace.lazy_bytes > 0
        assert sum(part.nbytes for part in trace.parts) == trace.lazy_bytes
        (copy,) = trace.of(Stage.COPY)
        assert copy.start_s <= trace.parts[0].start_s
        assert trace.parts[-1].stop_s <= copy.stop_s + 1e-6
    if strategy != "naive":
        usual = choose_step(path, None)  # the last one is sealed by close, behind no step
        assert usual.step == 8
        opened = [w.phase for w in usual.opened]
        # Those until it was durable, which may be before the step is over.
        assert len(opened) > 1
        assert opened == (["forward"] * 4 + ["backward"] * 3)[: len(opened)]


def test_every_span_reaches_the_users_sink_too_and_its_failure_stops_nothing(
    tmp_path: Path,
) -> None:
    seen: list[Span] = []

    def sink(span: Span) -> None:
        seen.append(span)
        raise RuntimeError("of the user")

    Training().run(tmp_path / "run", trace=tmp_path / "t.jsonl", sink=sink)
    found = read_trace(tmp_path / "t.jsonl")
    assert len(found) == 3
    for trace in found:
        mine = [s.stage for s in seen if s.step == trace.step]
        assert sorted(mine) == sorted(s.stage for s in trace.spans)


def test_a_second_start_appends(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    Training().run(tmp_path / "run", steps=8, trace=path)
    Training().run(tmp_path / "run", steps=12, trace=str(path))
    assert [(t.step, t.report.attempt) for t in read_trace(path)] == [(4, 1), (8, 1), (12, 2)]


def test_a_relative_path_is_resolved_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ckpt = asymcheck.Checkpointer("run", state={"x": {"a": 1}}, trace="t.jsonl")
    monkeypatch.chdir("/")
    with ckpt:
        ckpt.save(1)
    assert choose_step(tmp_path / "t.jsonl", 1).decision is None


def test_who_only_reads_traces_nothing(tmp_path: Path) -> None:
    Training().run(tmp_path / "run")
    with asymcheck.Checkpointer(
        tmp_path / "run", state={"x": {}}, read_only=True, trace=tmp_path / "t.jsonl"
    ) as reader:
        assert reader.steps() == [4, 8, 12]
    assert not (tmp_path / "t.jsonl").exists()


# --- what goes wrong --------------------------------------------------------


@pytest.mark.parametrize("place", ["/dev/full", "a folder", "below a file", "another file"])
def test_a_trace_that_cannot_be_written_is_one_warning_and_training_goes_on(
    tmp_path: Path, place: str
) -> None:
    other = tmp_path / "notes.txt"
    other.write_text("mine")
    path = {
        "/dev/full": Path("/dev/full"),
        "a folder": tmp_path,
        "below a file": other / "t.jsonl",
        "another file": other,
    }[place]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        reports = Training().run(tmp_path / "run", trace=path)
    assert [r.step for r in reports] == [4, 8, 12]
    (warning,) = said
    assert warning.category is CheckpointWarning
    assert str(warning.message).startswith(f"trace {path}: ")
    assert "training goes on" in str(warning.message)
    assert other.read_text() == "mine"


@pytest.mark.parametrize("value", [7, "", "a\0b", ["x"]])
def test_what_names_no_file_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(OptionError, match="trace: expected the path of a file"):
        asymcheck.Checkpointer(tmp_path, state={"x": {}}, trace=value)


def test_a_line_that_does_not_fit_is_taken_back_and_the_rest_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "t.jsonl", 10)
    before = path.read_bytes()
    tracer = Tracer(path, discard, strategies["asymcheck"])
    write = os.write
    monkeypatch.setattr(tracing.os, "write", lambda fd, data: write(fd, data[: len(data) // 2]))
    tell(tracer, 20)
    monkeypatch.undo()
    tell(tracer, 30)
    assert path.read_bytes() == before
    (complaint,) = tracer.complaints()
    assert "No space left" in complaint
    assert tracer.complaints() == []


def test_a_line_without_an_end_is_left_out_and_goes_at_the_next_start(tmp_path: Path) -> None:
    path = written(tmp_path / "t.jsonl", 10, 20)
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:100])
    assert [t.step for t in read_trace(path)] == [10, 20]
    written(path, 30)
    assert [t.step for t in read_trace(path)] == [10, 20, 30]


def test_what_is_kept_of_steps_that_never_become_durable_is_bounded(tmp_path: Path) -> None:
    tracer = Tracer(tmp_path / "t.jsonl", discard, strategies["asymcheck"])
    for step in range(1, 1000):
        tracer.begin(step, 1.0, lazy_bytes=1, eager_bytes=1)
        tracer(Span(Stage.CAPTURE, step, 1.0, 0.1))
    assert len(tracer._savings) <= 64
    tell(tracer, 1000)
    assert [t.step for t in read_trace(tmp_path / "t.jsonl")] == [1000]


def test_spans_of_an_earlier_save_of_the_step_and_of_restores_are_left_out(
    tmp_path: Path,
) -> None:
    tracer = Tracer(tmp_path / "t.jsonl", discard, strategies["asymcheck"])
    for span in spans(10, 3.0):
        tracer(span)  # of a slot that a dead trainer left, say
    tracer(Span(Stage.RESTORE, 10, 60.0, 0.5))
    tell(tracer, 10, 50.0)
    (trace,) = read_trace(tmp_path / "t.jsonl")
    assert len(trace.spans) == len(spans(10, 50.0))
    assert min(s.start_s for s in trace.spans) == 0.0


def test_the_line_waits_until_the_training_thread_knows_how_long_it_stalled(
    tmp_path: Path,
) -> None:
    path = tmp_path / "t.jsonl"
    tracer = Tracer(path, discard, strategies["naive"])
    tracer.begin(10, 50.0, lazy_bytes=0, eager_bytes=100)
    tracer.durable(report())
    assert path.read_bytes() == b""
    tracer(Span(Stage.STALL, 10, 50.0, 0.25))
    (trace,) = read_trace(path)
    assert trace.of(Stage.STALL)[0].duration_s == 0.25


# --- reading ----------------------------------------------------------------


def test_what_is_read_is_what_was_told(tmp_path: Path) -> None:
    path = written(tmp_path / "t.jsonl", 10, strategy=strategies["asymcheck-paper"])
    (trace,) = read_trace(path)
    paced = Paced()
    assert trace.decision == paced.decision
    assert trace.contention == paced.contention
    assert trace.report == report()
    assert (trace.partitioner, trace.capture, trace.persist) == (
        "idle-proportional",
        "lazy",
        "behind",
    )
    assert [list(p) for p in trace.parts] == [[0, 0.02, 0.06, 400], [1, 0.12, 0.17, 500]]
    assert [s.stage for s in trace.spans[:2]] == ["stall", "capture"]
    assert json.loads(path.read_bytes())["report"]["groups"] == [report().groups[0]._asdict()]


def test_a_missing_and_an_empty_trace_say_so(tmp_path: Path) -> None:
    with pytest.raises(ObjectNotFound, match=r"t\.jsonl: No such file .*asymlab train"):
        read_trace(tmp_path / "t.jsonl")
    (tmp_path / "t.jsonl").touch()
    with pytest.raises(NoCheckpoint, match=r"t\.jsonl: no checkpoint is in it"):
        read_trace(tmp_path / "t.jsonl")


Change = Callable[[dict[str, Any]], object]
BROKEN: dict[str, Change] = {
    "another version": lambda t: t.update(asymcheck_trace=2),
    "no report": lambda t: t.pop("report"),
    "a report without its step": lambda t: t["report"].pop("step"),
    "a text for a number": lambda t: t["report"].update(durable_s="long"),
    "a truth for a number": lambda t: t["report"].update(step=True),
    "a fraction for a whole number": lambda t: t["report"].update(stored_bytes=0.5),
    "a number beyond all": lambda t: t["report"].update(raw_bytes=10**400),
    "a group that is none": lambda t: t["report"]["groups"].append([1]),
    "a span that is none": lambda t: t["spans"].append(["write", 0.0]),
    "bounds that do not cover": lambda t: t["plan"].update(bounds=[400, 800]),
    "a phase that is none": lambda t: t["plan"]["windows"][0].update(phase="sideways"),
    "a window that is none": lambda t: t["opened"].append([0.0, "sideways"]),
    "a gate that is none": lambda t: t["plan"]["gate"].update(hold="ajar"),
    "a κ that is none": lambda t: t["plan"]["kappa"].update(forward=None),
    "a capture that is none": lambda t: t.update(capture="quick"),
    "a partitioner that is none": lambda t: t.update(partitioner=["whole"]),
    "spans that are a text": lambda t: t.update(spans="none"),
}


@pytest.mark.parametrize("change", BROKEN.values(), ids=BROKEN)
def test_a_broken_line_is_named_with_its_number(tmp_path: Path, change: Change) -> None:
    path = written(tmp_path / "t.jsonl", 10, 20, 30)
    lines = path.read_text().splitlines(keepends=True)
    told = json.loads(lines[1])
    change(told)
    path.write_text("".join([lines[0], json.dumps(told) + "\n", lines[2]]))
    with pytest.raises(CorruptCheckpoint, match=r"t\.jsonl, line 2: expected a line of a trace"):
        read_trace(path)


@pytest.mark.parametrize(
    "line", [b"", b"{", b"[]", b"null", b"7", b'"x"', b"\xff\xfe", b"[" * 100_000, b"{}"]
)
def test_what_is_no_object_is_named_too(tmp_path: Path, line: bytes) -> None:
    path = written(tmp_path / "t.jsonl", 10)
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(CorruptCheckpoint, match=r"t\.jsonl, line 2: expected a line of a trace"):
        read_trace(path)


def test_infinities_are_no_numbers(tmp_path: Path) -> None:
    path = written(tmp_path / "t.jsonl", 10)
    for wrong in (b"1e999", b"NaN", b"-Infinity"):
        path.with_name("w").write_bytes(
            path.read_bytes().replace(b'"cpu_s":0.2', b'"cpu_s":' + wrong)
        )
        with pytest.raises(CorruptCheckpoint, match="expected float"):
            read_trace(path.with_name("w"))


def test_a_step_is_found_and_an_unknown_one_names_the_nearest(tmp_path: Path) -> None:
    path = written(tmp_path / "t.jsonl", 10, 20, 40)
    assert choose_step(path, 20).step == 20
    assert choose_step(path, None).step == 40
    with pytest.raises(NoCheckpoint, match=r"expected step 33, found 3 from 10 to 40.* is 40"):
        choose_step(path, 33)


def test_of_a_step_that_was_saved_again_the_latest_is_shown(tmp_path: Path) -> None:
    path = written(tmp_path / "t.jsonl", 10, 20)
    tell(Tracer(path, discard, strategies["asymcheck"]), 10, attempt=2)
    assert choose_step(path, 10).report.attempt == 2


class Mine:
    """A partitioner of somebody else."""

    divide = Uniform.divide


def test_partitioners_have_the_names_that_a_trace_gives_them() -> None:
    given = [strategy.partitioner for strategy in strategies.values()]
    assert {name_of(one) for one in given} == {"none", "adaptive", "idle-proportional"}
    assert name_of(IdleProportional()) == "idle-proportional"
    assert name_of(Mine()) == "Mine"  # type: ignore[arg-type]


def test_the_example_of_this_file_is_a_trace_of_the_whole_surface(tmp_path: Path) -> None:
    # So that no field is left unread: each has another value than its default.
    trace = choose_step(written(tmp_path / "t.jsonl", 10), 10)
    plain = Trace(
        lazy_bytes=0, eager_bytes=0, capture="lazy", persist="behind", partitioner="", spans=(),
        report=trace.report,
    )  # fmt: skip
    same = {"capture", "persist", "report"}
    assert {k for k, v in asdict(trace).items() if asdict(plain)[k] == v} == same


# --- fidelity ---------------------------------------------------------------


def test_a_fidelity_is_given_beside_the_name_of_a_strategy(tmp_path: Path) -> None:
    with asymcheck.Checkpointer(tmp_path, state={"x": {}}, fidelity="moments") as ckpt:
        assert ckpt._strategy == strategies["asymcheck"].with_fidelity("moments")
    with pytest.raises(OptionError, match=r"fidelity: expected one of .*did you mean 'moments'"):
        asymcheck.Checkpointer(tmp_path, state={"x": {}}, fidelity="momets")  # type: ignore[arg-type]
