"""Names of the objects of a repository, and what a name says."""

from __future__ import annotations

import re
from dataclasses import dataclass

from asymcheck.planning.retention import CheckpointId

FORMAT_NAME = "FORMAT"
RUN_NAME = "RUN.json"
ATTEMPTS_FOLDER = "attempts"
SUSPECTS_FOLDER = "suspect"
MAX_RANK = 9999
MAX_ATTEMPT = 999_999_999
MAX_STEP = 1 << 53

# Padded to the least width and not further: one identity has one name.
_STEP_FOLDER = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,15})\Z")
_ATTEMPT = re.compile(rf"{ATTEMPTS_FOLDER}/([0-9]{{6}}|[1-9][0-9]{{6,8}})\Z")
_SUSPECT = re.compile(
    rf"{SUSPECTS_FOLDER}/a([0-9]{{6}}|[1-9][0-9]{{6,8}})-s([0-9]{{8}}|[1-9][0-9]{{8,15}})\.json\Z"
)
_FILE = re.compile(
    r"a([0-9]{6}|[1-9][0-9]{6,8})-(?:(?P<manifest>MANIFEST\.json)"
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


def parse_attempt_name(name: str) -> int | None:
    """The attempt whose record ``name`` is, ``None`` where it is none."""
    found = _ATTEMPT.match(name)
    return int(found[1]) if found else None


def suspect_name(at: CheckpointId) -> str:
    """Object name of the mark that says that a checkpoint is suspect."""
    return f"{SUSPECTS_FOLDER}/a{at.attempt:06d}-s{at.step:08d}.json"


def parse_suspect_name(name: str) -> CheckpointId | None:
    """The checkpoint that ``name`` marks, ``None`` where it is no mark."""
    found = _SUSPECT.match(name)
    return CheckpointId(int(found[1]), int(found[2])) if found else None


@dataclass(frozen=True, slots=True)
class Named:
    """What an object name of the format says; a manifest is of no rank."""

    at: CheckpointId
    kind: str
    rank: int | None = None


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
    return Named(at, kind, None if parsed["rank"] is None else int(parsed["rank"]))
