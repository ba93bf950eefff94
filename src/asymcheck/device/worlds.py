"""What becomes of a rank's own state when another number of ranks restores it.

Tensors in pieces fit any world. Generators and stateful items are each rank's own, and of them
there are as many as ranks had saved:

* ``error``: refuse.
* ``resplit``: rank r takes those of saved rank r modulo the saved world. Ranks that had none seed
  their generators anew, from the saved state of that rank and their own number. An item with a
  method ``resplit(states, rank, world)`` is given the states of all saved ranks instead.
* ``restart``: keep the generators and the data position as they are now: everything with a state
  dict but learning-rate schedulers and gradient scalers, which are the same on every rank.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from asymcheck.device import rng
from asymcheck.device.items import Finish, Restoring, StatefulItem
from asymcheck.device.places import Places
from asymcheck.device.sharding import Copies, copies_of_all
from asymcheck.device.tree import Decoder, Json
from asymcheck.errors import CheckpointError, IncompatibleCheckpoint
from asymcheck.storage.index import Index

WorldChange = Literal["error", "resplit", "restart"]

_SAME_EVERYWHERE = (torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)


class World(NamedTuple):
    """The ranks that save and restore together.

    Attributes:
        rank: This one.
        size: How many there are.
    """

    rank: int
    size: int

    @property
    def copies(self) -> Copies | None:
        """Of what is equal on all of them."""
        return copies_of_all(self.rank, self.size) if self.size > 1 else None


class Saved:
    """The world that saved a checkpoint, as the live one sees it.

    Args:
        own: The index whose own state this rank takes.
        indexes: Of all saved ranks.
        text_of: Reads the tree of a rank.
        live: This rank and the world now.
        policy: What to do when the worlds differ.

    Raises:
        IncompatibleCheckpoint: They differ and the policy is ``error``.
    """

    def __init__(
        self,
        own: Index,
        indexes: Sequence[Index],
        text_of: Callable[[Index], bytes] | None,
        live: World,
        policy: WorldChange,
    ) -> None:
        self.indexes = indexes
        self.text_of = text_of
        self.live = live
        self.policy = policy
        self.size = own.world
        self.has_changed = own.world != live.size
        self._did: list[str] = []
        if self.has_changed and policy == "error":
            raise IncompatibleCheckpoint(
                f"step {own.at.step} (attempt {own.at.attempt}) was saved by {own.world} ranks, "
                f"{live.size} restore it, and on_world_change is 'error': start as many ranks, or "
                f"pass on_world_change='resplit' or 'restart'"
            )

    @property
    def restarts(self) -> bool:
        """Whether the rank's own state stays as it is."""
        return self.has_changed and self.policy == "restart"

    def note(self, what: str) -> None:
        """Remember what was done, for ``spoken``."""
        self._did.append(what)

    def set_generators(self, states: dict[str, Any]) -> list[str]:
        """Set the generators as the policy says; returns what could not be set."""
        if self.restarts:
            return []
        if self.has_changed and self.live.rank >= self.size:
            _seed(states, self.live.rank)
            return []
        return rng.set_states(states)

    def spoken(self) -> str:
        """What happened, in words, alike on all ranks; empty where the worlds are equal."""
        if not self.has_changed:
            return ""
        how = {
            "error": "",
            "resplit": f"rank r continues the generators and the state that was each rank's own "
            f"of saved rank r modulo {self.size}",
            "restart": "the generators and the data position stay as they are now",
        }[self.policy]
        if self.policy == "resplit" and self.live.size > self.size:
            how += f", and ranks from {self.size} on have newly seeded generators"
        said = "".join(f"; {what}" for what in self._did)
        return (
            f"saved by {self.size} ranks and restored by {self.live.size} "
            f"(on_world_change={self.policy!r}): {how}{said}"
        )


def _seed(states: dict[str, Any], rank: int) -> None:
    """Seed every generator from a saved rank's state and the number of this rank."""
    hashed = hashlib.sha256(np.asarray(states["torch"]).tobytes())
    hashed.update(rank.to_bytes(4, "little"))
    seed = hashed.digest()
    torch.manual_seed(int.from_bytes(seed[:8], "little") >> 1)  # every device's as well
    np.random.seed(np.frombuffer(seed[8:24], np.uint32))  # the global one
    random.seed(seed[24:])


def stateful_plan(
    name: str, item: StatefulItem, saved: dict[str, Json], to: Restoring, world: Saved
) -> Finish:
    """Plan an item with a state dict that is each rank's own; see ``Item.plan``."""
    if world.restarts and not isinstance(item.value, _SAME_EVERYWHERE):
        world.note(f"{name!r} was not restored")
        return lambda decoder: None
    resplit = getattr(item.value, "resplit", None)
    if not (world.has_changed and callable(resplit) and world.text_of is not None):
        return item.plan(name, saved, to)
    states: list[tuple[Places, Json]] = []
    for index in world.indexes:
        places = Places(index, world.indexes)
        tree = json.loads(world.text_of(index))["items"][name]["value"]
        Restoring(places, to.matching, to.params, to.cast).bind(tree, None)
        to.places.read_also(places)
        states.append((places, tree))
    world.note(f"{name!r} got the states of all {world.size}")

    def finish(decoder: Decoder) -> None:
        found = [Decoder(places.array).decode(tree) for places, tree in states]
        try:
            resplit(found, world.live.rank, world.live.size)
        except CheckpointError:
            raise
        except Exception as failure:
            raise IncompatibleCheckpoint(f"{name!r}: its resplit() raised {failure!r}") from failure

    return finish
