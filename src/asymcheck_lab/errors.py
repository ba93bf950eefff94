"""What can go wrong in the lab itself; errors of the library pass through unchanged."""

from __future__ import annotations


class LabError(Exception):
    """Base of every error that the lab raises on purpose."""


class UsageError(LabError, ValueError):
    """An option is wrong; the message names it, what was expected and what was found."""


class DataError(LabError):
    """A data file cannot be used.

    Attributes:
        where: The file, with the line where one is known.
        expected: What should be there.
        found: What is there.
    """

    def __init__(self, where: str, *, expected: str, found: str) -> None:
        super().__init__(f"{where}: expected {expected}, found {found}")
        self.where = where
        self.expected = expected
        self.found = found


class RunError(LabError):
    """A training run did not do what it should."""
