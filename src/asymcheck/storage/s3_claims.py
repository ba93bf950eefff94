"""``create`` for servers that have no conditional put: who comes first is settled by tokens.

The bakery algorithm (Lamport, "A New Solution of Dijkstra's Concurrent Programming Problem",
CACM 17(8), 1974) over objects: a claimant says that it is choosing, lists, and takes a number
above all that it saw; the lowest number wins, a random part breaks ties. What it needs of the
server is that a listing shows every object whose put was answered before, which S3 promises.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic, sleep

from asymcheck.errors import StoreError

CLAIMS_FOLDER = ".claims"
"""No object name starts with a dot, so no object can lie there."""
_CHOOSING, _CHOSEN = "choosing-", "number-"
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Medium:
    """What claims need of a store; keys are relative to its root.

    Attributes:
        put: Stores bytes under a key, whatever is there.
        keys: Every key that starts so.
        delete: Removes a key; no error where it is not there.
        is_there: Whether an object has that key.
    """

    put: Callable[[str, bytes], None]
    keys: Callable[[str], Iterable[str]]
    delete: Callable[[str], None]
    is_there: Callable[[str], bool]


class Claims:
    """Lets one of several callers create an object; blocks.

    Exactly one does, wherever the callers run, as long as none of them stands still for more
    than half of ``lease_s`` between two of its own requests and then goes on. One that dies
    leaves a token behind: the others wait ``lease_s`` on their own clock, remove it and go on. A
    caller that finds that it stood still gives up with an error. What is not excluded: its last
    put was under way all that time, and is carried out after another had taken its place. So
    use a server with conditional puts where two jobs may start on one root.

    Args:
        medium: Where.
        lease_s: After how long a token that nothing happens to counts as that of a dead caller.
    """

    def __init__(self, medium: Medium, lease_s: float) -> None:
        self._medium = medium
        self._lease_s = lease_s

    def create(self, name: str, data: bytes) -> bool:
        """Store ``data`` under ``name`` unless there is something; whether this call did.

        Raises:
            StoreError: The server failed, or this caller stood still for too long.
        """
        if self._medium.is_there(name):
            return False
        mine = uuid.uuid4().hex
        folder = f"{CLAIMS_FOLDER}/{name}/"
        choosing, chosen = f"{folder}{_CHOOSING}{mine}", ""
        try:
            begun_s = monotonic()
            self._medium.put(choosing, b"")
            number = 1 + max((_number_of(k, folder) for k in self._medium.keys(folder)), default=0)
            chosen = f"{folder}{_CHOSEN}{number:09d}-{mine}"
            self._medium.put(chosen, b"")
            self._medium.delete(choosing)
            self._check_pace(begun_s, name)
            turn_s = self._await_turn(folder, chosen, name)
            if self._medium.is_there(name):
                return False
            self._check_pace(turn_s, name)
            self._medium.put(name, data)
            return True
        finally:
            with suppress(StoreError):  # else the next claimant removes them, or the next start
                for token in filter(None, (choosing, chosen)):
                    self._medium.delete(token)

    def _await_turn(self, folder: str, chosen: str, name: str) -> float:
        """Wait until no other token is before ``chosen``; since when that may be so."""
        watched, since_s = "", monotonic()
        before_s = since_s
        while True:
            asked_s = monotonic()
            keys = sorted(k for k in self._medium.keys(folder))
            if chosen not in keys:
                raise self._too_slow(name)
            # Who is choosing may yet take a number as low as ours.
            first = keys[0] if keys[0] <= chosen else chosen
            if first == chosen:
                return before_s
            before_s = asked_s
            if first != watched:
                watched, since_s = first, asked_s
            elif asked_s - since_s > self._lease_s:
                self._medium.delete(first)
                continue
            sleep(_POLL_S)

    def _check_pace(self, since_s: float, name: str) -> None:
        if monotonic() - since_s > self._lease_s / 2:
            raise self._too_slow(name)

    def _too_slow(self, name: str) -> StoreError:
        return StoreError(
            f"create {name}: this process or the server stood still for seconds, so that another "
            f"may have taken its place",
            retryable=True,
        )


def _number_of(key: str, folder: str) -> int:
    token = key.removeprefix(folder)
    digits = token.removeprefix(_CHOSEN).partition("-")[0]
    return int(digits) if token.startswith(_CHOSEN) and digits.isdecimal() else 0
