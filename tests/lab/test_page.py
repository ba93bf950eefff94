"""The page of results: what it is made from, what it compares, and what it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from asymcheck_lab.bench_stats import estimate, summarize
from asymcheck_lab.cli import app
from asymcheck_lab.compare_records import read_runs
from asymcheck_lab.compare_stats import COLUMNS, CellRows, Row, cells_of, told_apart
from asymcheck_lab.errors import DataError, LabError
from asymcheck_lab.page import write_page
from asymcheck_lab.page_plots import looks_of, marker_of

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "results" / "bench.jsonl"
Record = Callable[..., dict[str, Any]]


def results(folder: Path, records: Iterable[Mapping[str, Any]], name: str = "bench.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def rounds(make: Record, count: int = 5, **systems: Mapping[str, Any]) -> list[dict[str, Any]]:
    """So many rounds of the training without checkpoints and of these systems."""
    return [
        make(name.replace("_", "-"), round=number, **fields)
        for number in range(1, count + 1)
        for name, fields in {"none": {}, **systems}.items()
    ]


def cell_of(folder: Path, records: Iterable[Mapping[str, Any]]) -> CellRows:
    (cell,) = cells_of(read_runs([results(folder, records)]))
    return cell


def row_of(cell: CellRows, system: str) -> Row:
    return next(row for row in (*cell.rows, *cell.missing) if row.run.system == system)


class _Reader(HTMLParser):
    """What a page holds: its texts, its elements, and what each attribute says."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.elements: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] not in ("script", "style"):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def read(page: Path) -> _Reader:
    reader = _Reader()
    reader.feed(page.read_text(encoding="utf-8"))
    reader.close()
    return reader


# --- the command ------------------------------------------------------------


def test_the_command_makes_the_page_and_pictures_from_the_published_results(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(PUBLISHED), "--out", str(tmp_path / "page")])
    assert done.exit_code == 0, done.output
    names = {path.name for path in (tmp_path / "page").iterdir()}
    assert names == {"index.html", "summary.png", "blocked.png"}
    assert all((tmp_path / "page" / name).stat().st_size > 5000 for name in names)
    assert (tmp_path / "page" / "summary.png").read_bytes().startswith(b"\x89PNG")
    text = read(tmp_path / "page" / "index.html").text
    assert "7 systems; 1 model (gpt2 124m); 1 store (disk); a checkpoint every 5 steps" in text
    assert "AMD EPYC, 2 cores" in text
    assert "4222dd58e082" in text
    assert "asymlab bench --size 124m --rounds 5" in text
    for column in COLUMNS:
        assert column.definition in text


def test_the_page_asks_nothing_of_the_network(tmp_path: Path) -> None:
    page, *_ = write_page([PUBLISHED], tmp_path)
    reader = read(page)
    for name, value in reader.attributes:
        if name in ("src", "href", "xlink:href", "action", "data", "srcset"):
            assert value.startswith(("#", "data:")), (name, value)
    assert not {"img", "link", "iframe", "object", "embed", "base"} & set(reader.elements)
    assert "url(" not in re.sub(r"url\(#", "", page.read_text(encoding="utf-8"))
    assert any("default-src 'none'" in value for _, value in reader.attributes)


def test_no_two_elements_of_the_page_share_a_name(tmp_path: Path, bench_record: Record) -> None:
    records = [{**r, "every": every} for r in rounds(bench_record, rival={}) for every in (5, 10)]
    page, *_ = write_page([results(tmp_path, records)], tmp_path)
    names = [value for name, value in read(page).attributes if name == "id"]
    assert len(names) > 50
    assert len(names) == len(set(names))


def test_every_plot_says_in_words_what_it_is(tmp_path: Path, bench_record: Record) -> None:
    page, *_ = write_page([results(tmp_path, rounds(bench_record, asymcheck={}))], tmp_path)
    text = page.read_text(encoding="utf-8")
    plots = re.findall(r'<svg [^>]*role="img" aria-labelledby="(\S+) (\S+)"', text)
    assert len(plots) == 3
    for title, about in plots:
        assert re.search(rf'<title id="{title}">[^<]+gpt2 tiny', text)
        assert re.search(rf'<desc id="{about}">[^<]+', text)


def test_the_page_is_the_same_when_it_is_made_again(tmp_path: Path, bench_record: Record) -> None:
    path = results(tmp_path, rounds(bench_record, asymcheck={}, rival={}))
    first = [p.read_bytes() for p in write_page([path], tmp_path / "one")]
    assert [p.read_bytes() for p in write_page([path], tmp_path / "two")] == first


# --- figures ----------------------------------------------------------------


def test_figures_are_those_of_the_benchmark_where_both_have_them(tmp_path: Path) -> None:
    (cell,) = cells_of(read_runs([PUBLISHED]))
    known = summarize([json.loads(line) for line in PUBLISHED.read_text().splitlines()]).figures
    for row in cell.rows:
        if row.run.kind == "none":
            assert not row.values
            continue
        figures = known[row.run.system]
        slowdown = row.values["slowdown"].estimate
        assert slowdown.median == pytest.approx(100 * figures["slowdown"].median)
        assert slowdown.low == pytest.approx(100 * figures["slowdown"].low)
        assert row.values["peak"].estimate.high == pytest.approx(figures["peak_bytes"].high / 1e6)
        stored = row.values["stored"].estimate
        assert stored.median == pytest.approx(figures["disk_bytes"].median / 1e6)


def test_slowdown_is_paired_with_the_run_without_checkpoints_of_the_same_round(
    tmp_path: Path, bench_record: Record
) -> None:
    records = []
    for number, whole_s in enumerate((1.0, 2.0, 4.0), start=1):
        records.append(bench_record("none", round=number, whole_s=whole_s))
        records.append(bench_record("asymcheck", round=number, whole_s=1.1 * whole_s))
    slowdown = row_of(cell_of(tmp_path, records), "asymcheck").values["slowdown"].estimate
    assert (slowdown.low, slowdown.high) == (pytest.approx(10), pytest.approx(10))


def test_p99_is_of_all_checkpoints_and_says_of_how_many(
    tmp_path: Path, bench_record: Record
) -> None:
    records = rounds(bench_record, asymcheck={"blocked_s": 0.01})
    records[-1]["checkpoints"][1]["blocked_s"] = 0.7
    value = row_of(cell_of(tmp_path, records), "asymcheck").values["stall_p99"]
    assert value.estimate.median == pytest.approx(700)
    assert value.note == "of 15"


def test_checkpoints_that_never_became_durable_are_counted_and_not_compared(
    tmp_path: Path, bench_record: Record
) -> None:
    records = rounds(bench_record, fast={"durable_s": 0.1}, slow={"durable_s": 0.9})
    for record in records:
        if record["system"] == "fast":
            record["checkpoints"][0]["durable_s"] = None
    cell = cell_of(tmp_path, records)
    assert row_of(cell, "fast").values["durable_p50"].note == "10 of 15 became durable"
    assert all("durable_p50" not in row.marks for row in cell.rows)


def test_only_the_newest_session_of_a_cell_is_shown_and_the_page_says_what_is_not(
    tmp_path: Path, bench_record: Record
) -> None:
    old = rounds(bench_record, asymcheck={"session": "2026-11-01T00:00:00+00:00"})
    new = rounds(bench_record, asymcheck={}, rival={})
    for record in old:
        record["session"] = "2026-11-01T00:00:00+00:00"
    page, *_ = write_page([results(tmp_path, old + new)], tmp_path)
    assert cell_of(tmp_path, old + new).left_out == 10
    assert "10 records of other sessions left out" in read(page).text


def test_a_newer_session_of_too_few_rounds_does_not_hide_one_that_tells_systems_apart(
    tmp_path: Path, bench_record: Record
) -> None:
    old = rounds(bench_record, asymcheck={}, rival={})
    for record in old:
        record["session"] = "2026-11-01T00:00:00+00:00"
    new = [record for record in rounds(bench_record, asymcheck={}) if record["round"] == 1]
    cell = cell_of(tmp_path, old + new)
    assert (cell.rounds, cell.left_out) == (5, len(new))
    assert row_of(cell, "rival").runs


# --- comparing --------------------------------------------------------------


def test_the_best_is_marked_only_among_systems_that_save_the_same_state(
    tmp_path: Path, bench_record: Record
) -> None:
    cell = cell_of(
        tmp_path,
        rounds(
            bench_record,
            asymcheck={"blocked_s": 0.02},
            slower={"blocked_s": 0.05},
            less={"blocked_s": 0.001, "omits": "random numbers"},
            part={"blocked_s": 0.001, "saved_bytes": 400_000},
        ),
    )
    assert row_of(cell, "asymcheck").marks["stall_p50"].best
    assert row_of(cell, "asymcheck").marks["stall_p50"].among == 2
    assert "stall_p50" not in row_of(cell, "slower").marks
    assert not row_of(cell, "less").marks
    assert row_of(cell, "part").omits == "60 % of model and optimizer"
    assert not row_of(cell, "part").marks
    groups = [row_of(cell, name).group for name in ("asymcheck", "slower", "less", "part")]
    assert groups[0] == groups[1]
    assert len(set(groups)) == 3


def test_what_is_lossy_or_failed_or_not_ranked_is_compared_with_nothing_and_says_why(
    tmp_path: Path, bench_record: Record
) -> None:
    records = rounds(
        bench_record,
        asymcheck={},
        other={},
        lossy={"bit_exact": False, "max_error": 0.25, "blocked_s": 1e-4},
        told={"ranked": False, "why_unranked": "no network yet", "blocked_s": 1e-4},
        failing={"blocked_s": 1e-4},
    )
    broken = next(r for r in records if r["system"] == "failing" and r["round"] == 2)
    broken["error"] = "it\nbroke <here>"
    cell = cell_of(tmp_path, records)
    reasons = {
        "lossy": "restores other values than were saved",
        "told": "no network yet",
        "failing": "failed in 1 of 5 runs",
        "none": "what the others are compared with",
    }
    for system, reason in reasons.items():
        row = row_of(cell, system)
        assert (row.why_unranked, row.group, row.marks) == (reason, "", {})
    page, *_ = write_page([results(tmp_path, records)], tmp_path)
    text = read(page).text
    assert "no: ≤ 0.25" in text
    assert "not ranked: no network yet" in text
    assert "the system failing , round 2: failed: broke <here>" in text


def test_what_overlaps_is_marked_as_not_told_apart(tmp_path: Path, bench_record: Record) -> None:
    records = rounds(bench_record, asymcheck={}, other={}, third={"blocked_s": 3.0})
    for record in records:
        if record["system"] in ("asymcheck", "other"):
            shift = 0.001 * record["round"] * (1 if record["system"] == "other" else 1.5)
            for checkpoint in record["checkpoints"]:
                checkpoint["blocked_s"] = 0.01 + shift
    cell = cell_of(tmp_path, records)
    for system in ("asymcheck", "other"):
        mark = row_of(cell, system).marks["stall_p50"]
        assert (mark.best, mark.among) == (False, 3)
    assert "stall_p50" not in row_of(cell, "third").marks


@pytest.mark.parametrize(("count", "expected"), [(1, False), (3, False), (4, True), (6, True)])
def test_few_rounds_tell_nothing_apart(
    tmp_path: Path, bench_record: Record, count: int, expected: bool
) -> None:
    records = rounds(bench_record, count, asymcheck={"blocked_s": 0.001}, slow={"blocked_s": 0.9})
    cell = cell_of(tmp_path, records)
    assert row_of(cell, "asymcheck").marks["stall_p50"].best is expected
    page, *_ = write_page([results(tmp_path, records)], tmp_path)
    assert ("cannot tell systems apart" in read(page).text) is not expected


def test_a_difference_of_less_than_one_percent_is_none() -> None:
    base = estimate([100.0] * 5)
    assert not told_apart(base, estimate([100.9] * 5))
    assert told_apart(base, estimate([102.0] * 5))


@given(
    st.lists(st.floats(0.1, 1e3), min_size=1, max_size=9),
    st.lists(st.floats(0.1, 1e3), min_size=1, max_size=9),
)
def test_telling_apart_has_no_direction_and_never_parts_what_overlaps(
    one: list[float], other: list[float]
) -> None:
    a, b = estimate(one), estimate(other)
    assert told_apart(a, b) == told_apart(b, a)
    assert not (told_apart(a, b) and a.overlaps(b))
    assert not told_apart(a, a)


def test_a_system_that_is_not_here_is_listed_with_its_line(
    tmp_path: Path, bench_record: Record
) -> None:
    absent = {
        name: value
        for name, value in bench_record("orbax", absent="JAX is not installed").items()
        if name not in ("step_s", "whole_s", "checkpoints", "bit_exact")
    }
    records = [*rounds(bench_record, asymcheck={}), absent]
    cell = cell_of(tmp_path, records)
    assert [row.run.system for row in cell.missing] == ["orbax"]
    page, *_ = write_page([results(tmp_path, records)], tmp_path)
    assert "the system orbax : not here: JAX is not installed" in read(page).text


def test_a_cell_without_a_run_to_compare_with_says_so(tmp_path: Path, bench_record: Record) -> None:
    page, *_ = write_page([results(tmp_path, [bench_record("asymcheck")])], tmp_path)
    assert "there is no slowdown to show" in read(page).text


def test_results_in_which_nothing_came_to_its_end_still_make_a_page(
    tmp_path: Path, bench_record: Record
) -> None:
    records = [bench_record(name, error="no space left") for name in ("none", "asymcheck")]
    page, *_ = write_page([results(tmp_path, records)], tmp_path)
    assert read(page).text.count("failed: no space left") == 2


def test_each_of_fifty_systems_looks_different(tmp_path: Path, bench_record: Record) -> None:
    records = [bench_record("none"), bench_record("asymcheck")]
    records += [bench_record(f"rival-{n}", kind=("rival", "strategy")[n % 2]) for n in range(48)]
    looks = looks_of(cells_of(read_runs([results(tmp_path, records)])))
    assert len(looks) == 50
    assert len({(look.colour, look.shape) for look in looks.values()}) == 50
    assert len({look.number for look in looks.values()}) == 50
    assert all(marker_of(look).startswith("M") for look in looks.values())


# --- what is refused --------------------------------------------------------


def test_an_empty_folder_an_empty_file_and_a_missing_one_are_refused_by_name(
    tmp_path: Path,
) -> None:
    folder, empty = tmp_path / "results", tmp_path / "bench.jsonl"
    folder.mkdir()
    empty.touch()
    for path, found in (
        (folder, "found an empty folder"),
        (empty, "found an empty file"),
        (tmp_path / "none.jsonl", "No such file"),
    ):
        done = CliRunner().invoke(app, ["report", str(path), "--out", str(tmp_path / "out")])
        assert done.exit_code == 1
        assert str(path) in done.stderr
        assert found in done.stderr
        assert not (tmp_path / "out").exists()
    (folder / "codecs.jsonl").touch()
    with pytest.raises(DataError, match=r"bench\*\.jsonl or compare.*found 1 other file$"):
        read_runs([folder])


def test_a_folder_gives_every_results_file_in_it(tmp_path: Path, bench_record: Record) -> None:
    for name in ("bench.jsonl", "bench-old.jsonl", "compare.jsonl", "codecs.jsonl"):
        results(tmp_path, [bench_record(title=name)], name)
    titles = {run.title for run in read_runs([tmp_path])}
    assert titles == {"bench.jsonl", "bench-old.jsonl", "compare.jsonl"}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: expected a JSON object"),
        ("[]", "line 2: expected a JSON object"),
        ("", "line 2: expected a JSON object"),
        ('"text"', "line 2: expected a JSON object"),
        ("{}", "line 2: expected a benchmark record of schema 1 or 2"),
        ('{"schema": 3}', "found schema 3"),
        ('{"schema": true}', "found schema True"),
        ('{"schema": 1, "system": "hearsay"}', "found system 'hearsay'"),
        ('{"schema": 2}', "line 2: kind: expected a text, found none"),
        ("[" * 5000, "line 2: expected a JSON object"),
    ],
)
def test_a_wrong_line_is_refused_with_its_file_and_number(
    tmp_path: Path, bench_record: Record, line: str, said: str
) -> None:
    path = results(tmp_path, [bench_record()])
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(DataError) as failure:
        read_runs([path])
    assert str(path) in str(failure.value)
    assert said in str(failure.value)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("whole_s", float("nan"), "whole_s: expected a number from 1e-09 to 1e+18, found nan"),
        ("whole_s", 0, "whole_s: expected a number from"),
        ("peak_bytes", 10**400, "peak_bytes: expected a number from"),
        ("disk_bytes", True, "disk_bytes: expected a number from"),
        ("step_s", [0.1, "x"], "step_s[1]: value: expected a number"),
        ("checkpoints", [{"step": 5}], "checkpoints[0]: blocked_s: expected a number"),
        ("checkpoints", {}, "checkpoints: expected a list"),
        ("every", 0, "every: expected at least 1, found 0"),
        ("round", 1.5, "round: expected a whole number, found 1.5"),
        ("kind", "friend", "kind: expected one of none, ours, strategy, rival, found 'friend'"),
        ("bit_exact", "yes", "bit_exact: expected true or false, found 'yes'"),
        ("machine", {"cpu": "x"}, "machine: cpus: expected a whole number, found none"),
        ("versions", {"torch": 2}, "versions: torch: expected a text, found 2"),
    ],
)
def test_a_wrong_field_is_refused_by_name(
    tmp_path: Path, bench_record: Record, field: str, value: object, said: str
) -> None:
    with pytest.raises(DataError) as failure:
        read_runs([results(tmp_path, [bench_record(**{field: value})])])
    assert said in str(failure.value)
    assert "line 1" in str(failure.value)


def test_results_of_two_machines_are_refused_and_apart_where_that_is_asked_for(
    tmp_path: Path, bench_record: Record
) -> None:
    mine = rounds(bench_record, asymcheck={})
    theirs = [{**r, "machine": {**r["machine"], "cpu": "another processor"}} for r in mine]
    path = results(tmp_path, mine + theirs)
    refused = CliRunner().invoke(app, ["report", str(path), "--out", str(tmp_path / "page")])
    assert refused.exit_code == 1
    assert "expected results of one machine; --all-machines shows several" in refused.stderr
    assert "another processor, 2 cores" in refused.stderr
    assert "(10 records)" in refused.stderr
    page, *pictures = write_page([path], tmp_path / "page", all_machines=True)
    text = read(page).text
    assert "These results are of 2 machines." in text
    assert text.count("Machine 2: another processor") == 3
    assert [p.name for p in pictures] == [
        "summary-1.png",
        "blocked-1.png",
        "summary-2.png",
        "blocked-2.png",
    ]


def test_a_machine_is_the_same_after_a_start_that_leaves_it_a_little_more_memory(
    tmp_path: Path, bench_record: Record
) -> None:
    machine = bench_record()["machine"]
    more = {**machine, "memory_bytes": machine["memory_bytes"] + 123456}
    runs = read_runs([results(tmp_path, [bench_record(), bench_record(machine=more)])])
    assert runs[0].machine == runs[1].machine


def test_a_page_that_cannot_be_written_is_told_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LabError, match="file"):
        write_page([PUBLISHED], tmp_path / "file" / "page")


# --- hostile records --------------------------------------------------------

HOSTILE = (
    "<script>window.hacked = 1</script>",
    '"><img src=x onerror="window.hacked = 1">',
    "</title></svg></style></script><script>window.hacked = 1</script>",
    "{{ 7 * 7 }} {% raw %}",
    "$\\frac{$ & \ud800 \x00 \x1b[31m \u202e 漢字 🙂",
    "javascript:window.hacked=1//'`",
)


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_of_a_record_becomes_part_of_the_page_s_structure(
    tmp_path: Path, bench_record: Record, text: str
) -> None:
    names = (
        *("session", "model", "size", "store", "title", "library", "omits", "syncs"),
        *("why_unranked", "command", "commit"),
    )
    plain = rounds(bench_record, 1, asymcheck={"ranked": False}, rival={})
    plain.append(bench_record("third", error="one\ntwo"))
    hostile = []
    for record in plain:
        changed = {**record, **{name: text for name in names}, "system": record["system"] + text}
        changed["machine"] = {**record["machine"], "cpu": text, "file_system": text, "kernel": text}
        changed["versions"] = {text: text}
        if "error" in record:
            changed["error"] = f"{text}\n{text}"
        hostile.append(changed)
    good, *_ = write_page([results(tmp_path, plain)], tmp_path / "good")
    bad, *_ = write_page([results(tmp_path, hostile)], tmp_path / "bad")
    expected, found = read(good), read(bad)
    assert sorted(set(found.elements)) == sorted(set(expected.elements))
    assert found.elements.count("script") == 1
    assert {name for name, _ in found.attributes} == {name for name, _ in expected.attributes}
    assert "49" not in found.text or "49" in expected.text
    shown = text.replace("\ud800", "\ufffd").replace("\x00", "\ufffd").replace("\x1b", "\ufffd")
    assert " ".join(shown.split()) in found.text


# --- tried failures ----------------------------------------------------------


def test_failures_that_were_tried_stand_on_the_page(tmp_path: Path, bench_record: Record) -> None:
    folder = tmp_path / "results"
    folder.mkdir()
    results(folder, rounds(bench_record, asymcheck={}))
    write_page([folder], tmp_path / "without")
    assert "Tried failures" not in (tmp_path / "without" / "index.html").read_text()
    tried = {
        "schema": 1,
        "session": "2026-01-01T00:00:00+00:00",
        "machine": {},
        "commit": "0" * 40,
        "command": "asymlab chaos",
        "fault": "bit rot",
        "strategy": "naive",
        "moment": "commit",
        "training": "<killed>",
        "tier": "root",
        "steps_lost": 2,
        "seconds": 0.5,
        "exact": "bit for bit",
        "problems": [],
        "note": "",
    }
    results(folder, [tried], "chaos.jsonl")
    results(folder, [{**tried, "tier": "tier", "starts": 2}], "chaos-supervised.jsonl")
    write_page([folder], tmp_path / "with")
    reader = _Reader()
    reader.feed((tmp_path / "with" / "index.html").read_text())
    assert "1 case: no promise was broken" in reader.text
    assert "bit rot in commit 1 <killed> root 2 0.50, at most 0.50 bit for bit" in reader.text
    assert "asymlab run made 2 starts" in reader.text
    assert "bit rot in commit 1 <killed> tier 2 0.50, at most 0.50 bit for bit" in reader.text
