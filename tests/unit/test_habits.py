"""The habits of the code base, held by tests rather than by good will."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"
LIBRARY = SRC / "asymcheck"
MODULES = sorted(SRC.rglob("*.py"))
WITH_TORCH = {
    "agreement.py",
    "device",
    "integrations",
    "keeping.py",
    "options.py",
    "rank_store.py",
    "ranks.py",
    "filling.py",
    "recovery.py",
    "session.py",
    "snapshotter.py",
    "testing",
    "slot_start.py",
    "writing.py",
}
TORCHLESS = sorted({path.name for path in LIBRARY.iterdir()} - WITH_TORCH - {"py.typed"})
ARRAYLESS = ["planning", "storage"]


def _spoken(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _module_name(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _modules_in(rooms: list[str]) -> list[str]:
    found = []
    for room in rooms:
        at = LIBRARY / room
        found += sorted(at.rglob("*.py")) if at.is_dir() else [at] if at.exists() else []
    return [_module_name(path) for path in found]


def _python(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
    )


def _nodes() -> Iterator[tuple[str, ast.AST]]:
    for path in sorted(LIBRARY.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.stmt | ast.expr):
                yield f"{_spoken(path)}:{node.lineno}", node


def test_no_module_is_longer_than_five_hundred_lines() -> None:
    lengths = {_spoken(p): len(p.read_text(encoding="utf-8").splitlines()) for p in MODULES}
    assert lengths, "no modules found"
    assert {name: n for name, n in lengths.items() if n > 500} == {}


def test_nothing_but_the_command_line_prints() -> None:
    found = [
        where
        for where, node in _nodes()
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
        and not where.startswith("src/asymcheck/rendering.py:")
    ]
    assert found == []


def test_the_library_is_not_configured_by_environment_variables() -> None:
    names = {"environ", "environb", "getenv", "getenvb", "putenv"}
    found = [
        where
        for where, node in _nodes()
        if (isinstance(node, ast.Attribute) and node.attr in names)
        or (isinstance(node, ast.ImportFrom) and names & {a.name for a in node.names})
    ]
    assert found == []


def test_nothing_in_the_library_can_run_code_from_a_checkpoint() -> None:
    modules = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle"}
    calls = {"eval", "exec", "compile", "__import__"}
    found = []
    for where, node in _nodes():
        match node:
            case ast.Import(names=names) if {a.name.partition(".")[0] for a in names} & modules:
                found.append(where)
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in modules:
                found.append(where)
            case ast.Call(func=ast.Name(id=name)) if name in calls:
                found.append(where)
            case ast.Attribute(value=ast.Name(id="torch"), attr="load" | "save"):
                found.append(where)
            case _:
                pass
    assert found == []


@pytest.mark.parametrize(("rooms", "absent"), [(TORCHLESS, "torch"), (ARRAYLESS, "numpy")])
def test_rooms_without_tensors_load_no_tensor_library(rooms: list[str], absent: str) -> None:
    modules = _modules_in(rooms)
    assert len(modules) > 5
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        f"    assert {absent!r} not in sys.modules, name\n"
    )
    done = _python("-c", code)
    assert done.returncode == 0, done.stderr


def test_every_module_says_what_it_is_for() -> None:
    silent = [_spoken(p) for p in MODULES if not ast.get_docstring(ast.parse(p.read_text()))]
    assert silent == []


def test_a_silent_skip_fails_the_run_and_an_announced_one_is_listed(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs a CUDA device\n")
    (tmp_path / "test_aloud.py").write_text(
        "def test_a(not_run_here):\n    not_run_here('no moon tonight')\n"
    )
    (tmp_path / "test_silent.py").write_text(
        "import pytest\n\n\n@pytest.mark.skip(reason='lazy')\ndef test_b():\n    pass\n"
    )
    pytest_quietly = ("-m", "pytest", "-p", "no:cacheprovider", "-q")
    aloud = _python(*pytest_quietly, "test_aloud.py", cwd=tmp_path)
    silent = _python(*pytest_quietly, "test_silent.py", cwd=tmp_path)
    assert aloud.returncode == 0, aloud.stdout
    assert "not run here: no moon tonight (1 test: test_aloud.py::test_a)" in aloud.stdout
    assert silent.returncode == 1, silent.stdout
    assert "skipped without not_run_here(): test_silent.py::test_b: lazy" in silent.stdout
