"""Names of the objects of a repository, and what a name says."""

from __future__ import annotations

import re
from dataclasses import dataclass

from asymcheck.planning.retention import CheckpointId

FORMAT_NAME = "FORMAT"
RUN_NAME = "RUN.json"
ATTEMPTS_FOLDER = "attempts"
MAX_RANK = 9999

_STEP_FOLDER = re.compile(r"step-([0-9]{8,16})\Z")
_FILE = re.compile(
    r"a([0-9]{6,9})-(?:(?P<manifest>MANIFEST\.json)"
    r"|r(?P<rank>[0-9]{4})(?:-(?P<pack>[0-9]{4,6})\.pack|(?P<index>\.json)))\Z"
)


def step_folder(step: int) -> str:
    """Folder of all attempts at ``step``."""
    return f"step-{step:08d}"


def manifest_name(at: CheckpointId) -> str:
    """Object name of a manifest."""
    return f"{step_folder(at.step)}/a{at.attempt:06d}-MANIFEST.json"


def index_name(at: CheckpointId, rank: int) -> str:
    """Object name of a rank's index."""
    return f"{step_folder(at.step)}/a{at.attempt:06d}-r{rank:04d}.json"


def pack_name(at: CheckpointId, rank: int, serial: int) -> str:
    """Object name of a rank's ``serial``-th pack."""
    return f"{step_folder(at.step)}/a{at.attempt:06d}-r{rank:04d}-{serial:04d}.pack"


def attempt_name(attempt: int) -> str:
    """Object name of an attempt's record."""
    return f"{ATTEMPTS_FOLDER}/{attempt:06d}"


@dataclass(frozen=True, slots=True)
class Named:
    """What an object name of the format says."""

    at: CheckpointId
    kind: str


def parse_name(name: str) -> Named | None:
    """The checkpoint and kind (``manifest``, ``index``, ``pack``) that ``name`` belongs to.

    ``None`` for an object that is not of a checkpoint of this format: not ours.
    """
    folder, _, file = name.partition("/")
    in_folder, parsed = _STEP_FOLDER.match(folder), _FILE.match(file)
    if in_folder is None or parsed is None:
        return None
    at = CheckpointId(int(parsed[1]), int(in_folder[1]))
    kind = next(k for k in ("manifest", "pack", "index") if parsed[k])
    return Named(at, kind)
