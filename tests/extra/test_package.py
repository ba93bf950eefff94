"""The package that users install: built as they get it, complete, and usable on its own."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

pytestmark = pytest.mark.extra

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 280


def _python(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        cwd=cwd,
        env={**os.environ, **environment},
    )


@pytest.fixture(scope="module")
def wheel(
    tmp_path_factory: pytest.TempPathFactory, not_run_here: Callable[[str], NoReturn]
) -> Path:
    """A wheel, made in an environment of its own by the build backend from the index."""
    folder = tmp_path_factory.mktemp("wheel")
    done = _python("-m", "pip", "wheel", "--no-deps", "-w", str(folder), str(ROOT), cwd=folder)
    if "No matching distribution found for hatchling" in done.stderr:
        not_run_here("no package index to get the build backend from")
    assert done.returncode == 0, done.stderr
    (found,) = folder.glob("asymcheck-*.whl")
    return found


def test_the_wheel_holds_every_module_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    code = {n for n in names if ".dist-info/" not in n}
    source = ROOT / "src"
    expected = {
        str(p.relative_to(source))
        for p in source.rglob("*")
        if p.is_file()
        and "__pycache__" not in p.parts
        and p.suffix in (".py", ".typed", ".toml", ".j2", ".css", ".js")
    }
    assert code == expected
    assert any(n.endswith("/LICENSE") for n in names)


def test_the_installed_wheel_works_without_the_source_tree(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    done = _python(
        *("-m", "pip", "install", "-q", "--no-deps", "--target", str(site), str(wheel)),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    code = (
        "import asymcheck, torch\n"
        f"assert asymcheck.__file__.startswith({str(site)!r}), asymcheck.__file__\n"
        "weight = torch.ones(3)\n"
        "with asymcheck.Checkpointer('run', state={'weight': weight}) as ckpt:\n"
        "    ckpt.restore()\n"
        "    ckpt.save(1)\n"
        "    weight.zero_()\n"
        "    ckpt.wait()\n"
        "    assert ckpt.restore() == 1\n"
        "assert weight.tolist() == [1, 1, 1]\n"
    )
    done = _python("-P", "-c", code, cwd=tmp_path, PYTHONPATH=str(site))
    assert done.returncode == 0, done.stderr
    for script, arguments in (("asymcheck", ("verify", "run")), ("asymlab", ("--help",))):
        done = _python(str(site / "bin" / script), *arguments, cwd=tmp_path, PYTHONPATH=str(site))
        assert done.returncode == 0, done.stderr
