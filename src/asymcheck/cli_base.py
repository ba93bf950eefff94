"""What every command of the command line shares: how it is called, how it ends, what it prints.

Text for people goes to standard output, one JSON object with ``--json``; errors are one message
on standard error. The exit status is 0 when all is well, 1 when something is damaged or
missing, 2 when the command cannot be run as given.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ParamSpec

import typer

from asymcheck.errors import CheckpointError, OptionError
from asymcheck.planning.retention import CheckpointId
from asymcheck.planning.tiers import Tier, spoken_url
from asymcheck.rendering import plain, prepare_streams, show_line
from asymcheck.storage.copies import Place
from asymcheck.storage.repository import Repository, open_repository
from asymcheck.storage.store import Store, open_store

P = ParamSpec("P")

DAMAGED_OR_MISSING = 1
USAGE = 2

Root = Annotated[
    str, typer.Argument(metavar="ROOT", help="A directory, or a URL such as file:///runs/a.")
]
MaybeRoot = Annotated[
    str | None,
    typer.Argument(metavar="[ROOT]", help="A directory, or a URL such as file:///runs/a."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def reported(command: Callable[P, None]) -> Callable[P, None]:
    """Turn a library error into one message and an exit status."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        prepare_streams()
        try:
            command(*args, **kwargs)
        except CheckpointError as failure:
            message = "\n".join(map(plain, str(failure).splitlines()))
            typer.echo(f"asymcheck: {message}", err=True)
            usage = isinstance(failure, OptionError)
            raise typer.Exit(USAGE if usage else DAMAGED_OR_MISSING) from None

    return wrapped


def open_root(root: str) -> Repository:
    """The repository that a user names."""
    return open_repository(open_store(root))


def places_of(store: Store, tiers: Sequence[str]) -> list[Place]:
    """The root and further places that a user names, nearest first; only the root must answer."""
    further = [Tier(url) for url in tiers]
    return [
        Place(spoken_url(store.url), store),
        *(Place(t.label, open_store(str(t.url)), must_answer=False) for t in further),
    ]


def ask(question: str, done: str) -> None:
    """Go on only when the user agrees.

    Args:
        question: What the user is asked.
        done: What has not been done otherwise: ``removed``.

    Raises:
        OptionError: There is nobody to ask.
    """
    if sys.stdin is None or not sys.stdin.isatty():
        raise OptionError(
            f"standard input is no terminal, so nobody can agree, and nothing was {done}: pass "
            f"--yes to go on, or --dry-run to look"
        )
    if not typer.confirm(question, err=True):
        typer.echo(f"nothing was {done}", err=True)
        raise typer.Exit


def id_json(at: CheckpointId) -> dict[str, int]:
    """A checkpoint's identity."""
    return {"step": at.step, "attempt": at.attempt}


def print_report(repository: Repository, **values: Any) -> None:  # noqa: ANN401
    """The one object of ``--json``, with the root and the run in front."""
    print_json(root=repository.store.url, run=repository.run, **values)


def print_json(**values: Any) -> None:  # noqa: ANN401
    """The one object of ``--json``."""
    show_line(json.dumps(values, indent=2, allow_nan=False))
