"""The prose is true: its code runs, its links lead somewhere, and it leaves nothing out."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer

import asymcheck.cli
import asymcheck_lab.cli
from asymcheck import errors
from asymcheck.events import Stage
from asymcheck.recovery import CheckpointWarning, TornRestore, UnfinishedRestore

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
        *(ROOT / "docs").rglob("*.md"),
    ]
)
SCRIPTS = Path(sys.executable).parent

_FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<text>.*?)^```$", re.S | re.M)
_SHOWN_ONLY = {"make", "sudo", "git"}
"""Commands that change the machine; ``make`` and ``asymlab`` are checked by name."""


def _spoken(page: Path) -> str:
    return str(page.relative_to(ROOT))


@dataclass(frozen=True)
class Block:
    """A fenced block: the words after its fence, its text, and the line where that starts."""

    info: tuple[str, ...]
    text: str
    line: int

    @property
    def language(self) -> str:
        return self.info[0] if self.info else ""


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(tuple(m["info"].split()), m["text"], text[: m.start("text")].count("\n") + 1)
        for m in _FENCE.finditer(text)
    ]


def prose_of(page: Path) -> str:
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def commands_in(block: Block) -> list[list[str]]:
    lines = (line for line in block.text.splitlines() if line.startswith("$ "))
    return [shlex.split(line[2:], comments=True) for line in lines]


def commands_of(app: typer.Typer) -> set[str]:
    return set(typer.main.get_command(app).commands)


def options_of(command: str) -> set[str]:
    found = typer.main.get_command(asymcheck.cli.app).commands[command]
    return {option for parameter in found.params for option in parameter.opts} | {"--help"}


def make_targets() -> set[str]:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z][a-z-]*):", text, re.M))


WITH_CODE = [
    page for page in PAGES if any(b.language in ("python", "console") for b in blocks_of(page))
]


# --- code -------------------------------------------------------------------


@pytest.mark.parametrize("page", WITH_CODE, ids=_spoken)
def test_every_block_of_a_page_runs_in_order(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType(f"page_{page.stem.lower()}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for block in blocks_of(page):
        if block.language == "python":
            assert block.info == ("python",), f"{_spoken(page)}:{block.line}: no block is exempt"
            # Empty lines before, so that a traceback points into the page.
            code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
            exec(code, module.__dict__)
        elif block.language == "console":
            for command in commands_in(block):
                _run(command, f"{_spoken(page)}:{block.line}")


def _run(command: list[str], where: str) -> None:
    program, *arguments = command
    if program == "asymcheck":
        done = subprocess.run(
            [str(SCRIPTS / program), *arguments],
            check=False,
            capture_output=True,
            text=True,
            timeout=120,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, f"{where}: {command}\n{done.stdout}{done.stderr}"
    elif program == "make":
        targets = {a for a in arguments if "=" not in a}
        assert targets <= make_targets(), where
    elif program == "asymlab":
        assert arguments[0] in commands_of(asymcheck_lab.cli.app), where
    else:
        assert program in _SHOWN_ONLY, f"{where}: {program} is neither run nor known"


def test_the_store_of_the_docs_keeps_every_promise_of_a_store(tmp_path: Path) -> None:
    blocks = blocks_of(ROOT / "docs" / "extending.md")
    python = [b.text for b in blocks if b.language == "python"]
    (suite,) = (text for text in python if "StoreSuite" in text)
    (toml,) = (b.text for b in blocks if b.language == "toml")
    ((_, module),) = re.findall(r'^(sqlite) = "([\w.]+):open_sqlite"$', toml, re.M)
    _install(
        tmp_path,
        module,
        "\n".join(text for text in python if "class SqliteStore" in text or "def open_" in text),
        toml.replace('project.entry-points."asymcheck.stores"', "asymcheck.stores").replace(
            '"', ""
        ),
    )
    (tmp_path / "test_suite.py").write_text(f"from {module} import SqliteStore\n{suite}")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_suite.py"],
        check=False,
        capture_output=True,
        text=True,
        timeout=280,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) > 20


def _install(site: Path, module: str, text: str, entry_points: str) -> None:
    """Put a package with one module where Python finds it and its entry points."""
    package = site / module.partition(".")[0]
    package.mkdir()
    (package / "__init__.py").touch()
    (site / f"{module.replace('.', '/')}.py").write_text(text)
    info = site / f"{package.name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package.name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)


# --- links ------------------------------------------------------------------


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    found: dict[str, int] = {}
    anchors = set()
    for title in re.findall(r"^#{1,6} +(.+?) *$", prose_of(page), re.M):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title)
        anchor = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        again = found.get(anchor, 0)
        found[anchor] = again + 1
        anchors.add(f"{anchor}-{again}" if again else anchor)
    return anchors


def links_of(page: Path) -> Iterator[str]:
    prose = re.sub(r"`[^`\n]*`", "", prose_of(page))
    yield from re.findall(r"\]\(([^)\s]+)\)", prose)


@pytest.mark.parametrize("page", PAGES, ids=_spoken)
def test_every_link_leads_to_a_file_and_a_heading_that_are_there(page: Path) -> None:
    broken = []
    for link in links_of(page):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        there = target.is_file() if path and not path.endswith("/") else target.exists()
        if not there or (anchor and anchor not in anchors_of(target)):
            broken.append(link)
    assert broken == []


def test_every_page_can_be_reached_from_the_readme() -> None:
    seen, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page in seen or page.suffix != ".md" or not page.is_file():
            continue
        seen.add(page)
        todo += [
            (page.parent / link.partition("#")[0]).resolve()
            for link in links_of(page)
            if not re.match(r"[a-z]+:|#", link)
        ]
    assert {_spoken(p) for p in PAGES} - {_spoken(p) for p in seen} == set()


def test_no_file_names_a_path_of_one_machine() -> None:
    private = re.compile(r"(?<![\w./~{}-])/(?:home|root|work|Users|mnt|workspace|private)/")
    files = [p for p in ROOT.iterdir() if p.is_file() and p.suffix in (".md", ".toml", ".txt")]
    files += [ROOT / "Makefile", *(p for p in (ROOT / ".ci").rglob("*") if p.is_file())]
    for folder, ends in (("docs", ".md"), ("changes", ".md"), ("src", ".py"), ("tests", ".py")):
        files += (ROOT / folder).rglob(f"*{ends}")
    assert len(files) > 50
    found = [
        f"{_spoken(path)}:{n}"
        for path in files
        if path != Path(__file__)
        for n, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if private.search(line)
    ]
    assert found == []


# --- nothing left out -------------------------------------------------------


def test_every_error_a_user_can_meet_stands_in_troubleshooting() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    classes = [TornRestore, UnfinishedRestore, CheckpointWarning]
    classes += [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, errors.CheckpointError)
    ]
    assert len(classes) > 10
    assert [c.__name__ for c in classes if not re.search(rf"\b{c.__name__}\b", text)] == []


def test_the_messages_in_troubleshooting_are_messages_of_the_library() -> None:
    """Each quoted message occurs in the source; ``…``, capitals and what stands between quotes
    or brackets are values.
    """
    source = "\n".join(
        p.read_text(encoding="utf-8") for p in sorted((ROOT / "src" / "asymcheck").rglob("*.py"))
    )
    joined = re.sub(r'"\s*\n\s*f?"', "", source)  # adjacent literals are one message
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    unknown = []
    for row in re.findall(r"^\| (`.*?) \|", text, re.M):
        for message in re.findall(r"`([^`]+)`", row):
            pieces = re.split(r"'[^']*'|\[[^]]*\]|…|=|\b[A-Z]+\b|: ", message)
            for piece in (p.strip(" :,;") for p in pieces):
                if len(piece) > 5 and piece not in joined:
                    unknown.append((message, piece))
    assert unknown == []


def test_every_stage_of_the_event_stream_is_documented() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = text[text.index("| stage | what it spans |") :].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.M)) == {s.value for s in Stage}


def test_every_room_stands_in_both_tables_of_the_architecture() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    tables = text[text.index("| room | may touch") :]
    library = ROOT / "src" / "asymcheck"
    rooms = [p.name for p in library.iterdir() if p.is_dir() and (p / "__init__.py").exists()]
    rooms += [p.name for p in library.glob("*.py") if p.name != "__init__.py"]
    assert len(rooms) > 8
    assert [r for r in rooms if r not in tables] == []


def test_every_command_and_target_that_the_pages_name_is_there() -> None:
    known = {
        "asymcheck": commands_of(asymcheck.cli.app),
        "asymlab": commands_of(asymcheck_lab.cli.app),
        "make": make_targets(),
    }
    wrong = []
    for page in PAGES:
        for span in re.findall(r"`((?:asymcheck|asymlab|make) [a-z][^`]*)`", prose_of(page)):
            program, command, *rest = span.split()
            if command not in known[program]:
                wrong.append(f"{_spoken(page)}: {span}")
            elif program == "asymcheck":
                options = {word for word in rest if word.startswith("--")}
                if options - options_of(command):
                    wrong.append(f"{_spoken(page)}: {span}")
    assert wrong == []


def test_the_readme_shows_every_command_of_the_command_line() -> None:
    shown = [
        command[1]
        for block in blocks_of(ROOT / "README.md")
        for command in commands_in(block)
        if command[0] == "asymcheck"
    ]
    assert set(shown) == commands_of(asymcheck.cli.app)


def test_every_decision_stands_in_the_list_and_has_its_three_parts() -> None:
    folder = ROOT / "docs" / "decisions"
    listed = re.findall(r"\]\((\d{4}-[\w-]+\.md)\)", (folder / "README.md").read_text("utf-8"))
    notes = sorted(p.name for p in folder.glob("[0-9]*.md"))
    assert listed == notes
    assert [int(name[:4]) for name in notes] == list(range(1, len(notes) + 1))
    for name in notes:
        text = (folder / name).read_text("utf-8")
        assert text.startswith(f"# {int(name[:4])}. ")
        assert all(f"**{part}.**" in text for part in ("Context", "Decision", "Consequences"))


def test_the_changelog_fragments_are_ones_that_towncrier_takes() -> None:
    kinds = {"feature", "bugfix", "doc", "removal", "misc"}
    for path in (ROOT / "changes").glob("*.md"):
        found = re.fullmatch(r"\+[a-z0-9-]+\.([a-z]+)\.md", path.name)
        assert found, path.name
        assert found[1] in kinds
        assert path.read_text("utf-8").strip()
