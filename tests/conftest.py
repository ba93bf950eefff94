"""What every test may use: saying out loud what this machine cannot run.

A skip is easy to overlook, so there is one way to skip: ``not_run_here(reason)``. Each reason
is printed at the end of the run as ``not run here: …``; any other skip fails the run.
"""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Callable
from typing import NoReturn

import pytest

_MARK = "not run here: "
_reasons: dict[str, set[str]] = {}
_silent: set[str] = set()

if importlib.util.find_spec("hypothesis"):
    from hypothesis import HealthCheck, settings

    # A loaded machine is slow, not wrong: nothing here may depend on time.
    settings.register_profile(
        "asymcheck",
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        print_blob=True,
    )
    settings.load_profile("asymcheck")


def _hear_ctrl_c() -> None:
    """Whoever is started by ``nohup`` or behind a shell is deaf to Ctrl-C, and so is all that it
    starts: tests send it.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


_hear_ctrl_c()


def _skip_aloud(reason: str) -> NoReturn:
    pytest.skip(_MARK + reason)


@pytest.fixture(scope="session")
def not_run_here() -> Callable[[str], NoReturn]:
    """Call it with the reason why this machine cannot run the test: it ends there, and the
    reason stands at the end of the run.
    """
    return _skip_aloud


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test marked ``gpu`` runs where there is a CUDA device."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            _skip_aloud("no CUDA device")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Sort skips into announced and silent ones; runs in the controller under xdist too."""
    if report.skipped and not hasattr(report, "wasxfail"):
        _note(report.nodeid, report.longrepr)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A module that skips itself as a whole."""
    if report.skipped:
        _note(report.nodeid, report.longrepr)


def _note(where: str, longrepr: object) -> None:
    text = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
    reason = text.removeprefix("Skipped: ")
    if reason.startswith(_MARK):
        _reasons.setdefault(reason.removeprefix(_MARK), set()).add(where)
    else:
        _silent.add(f"{where}: {reason}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A silent skip is a failure of the run."""
    if _silent and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line for each thing that was not run, at the end."""
    for reason, where in sorted(_reasons.items()):
        count = f"{len(where)} test" + ("s" if len(where) > 1 else "")
        terminalreporter.write_line(f"{_MARK}{reason} ({count}: {_spoken(where)})", yellow=True)
    for line in sorted(_silent):
        terminalreporter.write_line(f"skipped without not_run_here(): {line}", red=True)


def _spoken(where: set[str]) -> str:
    shown = sorted(where)[:3]
    return ", ".join(shown) + (", …" if len(where) > len(shown) else "")
