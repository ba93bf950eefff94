"""How a checkpoint and the live state differ: gathered first, reported once."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field

from asymcheck.errors import IncompatibleCheckpoint

_SHOWN = 20


@dataclass
class Matching:
    """Differences found so far.

    Attributes:
        missing_keys: In the live state, not in the checkpoint.
        unexpected_keys: In the checkpoint, not in the live state.
        mismatched: ``(key, expected, found)`` where shape or dtype differ.
        cast: Keys whose dtype differs and that were asked to be cast.
    """

    missing_keys: list[str] = field(default_factory=list)
    unexpected_keys: list[str] = field(default_factory=list)
    mismatched: list[tuple[str, str, str]] = field(default_factory=list)
    cast: list[str] = field(default_factory=list)

    def raise_if_any(self, where: str) -> None:
        """Raise one error that lists everything.

        Raises:
            IncompatibleCheckpoint: There is a difference.
        """
        if not (self.missing_keys or self.unexpected_keys or self.mismatched):
            return
        lines = [f"{where} does not match the live state; nothing was loaded."]
        lines += _listed(
            "in the live state, not in the checkpoint", self.missing_keys, self.unexpected_keys
        )
        lines += _listed(
            "in the checkpoint, not in the live state", self.unexpected_keys, self.missing_keys
        )
        lines += _listed(
            "different",
            [f"{key}: live {live}, checkpoint {stored}" for key, live, stored in self.mismatched],
            (),
        )
        lines.append(
            "Build the same model and optimizer as at the save, or pass strict=False to load "
            "what matches (dtype_policy='cast' allows another dtype)."
        )
        raise IncompatibleCheckpoint(
            "\n".join(lines),
            missing_keys=self.missing_keys,
            unexpected_keys=self.unexpected_keys,
            mismatched=self.mismatched,
        )


def _listed(title: str, rows: Sequence[str], others: Sequence[str]) -> list[str]:
    if not rows:
        return []
    lines = [f"  {title} ({len(rows)}):"]
    for row in rows[:_SHOWN]:
        close = difflib.get_close_matches(row, others[:1000], n=1, cutoff=0.75)
        lines.append(f"    {row}" + (f"   (near: {close[0]})" if close else ""))
    if len(rows) > _SHOWN:
        lines.append(f"    … and {len(rows) - _SHOWN} more")
    return lines
