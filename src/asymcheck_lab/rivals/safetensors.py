"""safetensors: every tensor into one file, and a JSON file beside it for what is no tensor."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from asymcheck_lab.rivals.base import Job, System, fsync_tree, state_of

if TYPE_CHECKING:
    import torch


@dataclass
class SafeTensors(System):
    """``save_file`` into a temporary folder, ``fsync``, rename, ``fsync`` of the folder above."""

    def after_update(self, step: int, *, due: bool) -> None:
        """See ``System``."""
        if not due:
            return
        from safetensors.torch import save_file

        tensors, rest = split(state_of(self.job))
        path = self._path(step)
        temp = path.with_suffix(".tmp")
        temp.mkdir()
        save_file(tensors, temp / "state.safetensors")
        (temp / "rest.json").write_text(json.dumps(rest), encoding="utf-8")
        fsync_tree(temp)
        temp.rename(path)
        fsync_tree(path)
        self.durable_s[step] = perf_counter()

    def load(self, step: int, into: Job) -> None:
        """See ``System``."""
        from safetensors.torch import load_file

        tensors = load_file(self._path(step) / "state.safetensors")
        rest = json.loads((self._path(step) / "rest.json").read_text(encoding="utf-8"))
        load_split(tensors, rest, into)

    def _path(self, step: int) -> Path:
        return self.job.folder / f"step-{step:08d}"


def split(state: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors of model and optimizer under flat names, and what JSON can say of the rest."""
    import torch

    tensors = {f"model/{name}": tensor for name, tensor in state["model"].items()}
    rest: dict[str, Any] = {"groups": state["optim"]["param_groups"], "state": {}}
    for number, entries in state["optim"]["state"].items():
        for key, value in entries.items():
            if isinstance(value, torch.Tensor):
                tensors[f"optim/{number}/{key}"] = value
            else:
                rest["state"][f"{number}/{key}"] = value
    return tensors, rest


def load_split(tensors: dict[str, torch.Tensor], rest: dict[str, Any], into: Job) -> None:
    """What ``split`` took apart, into another model and optimizer of the same kind."""
    weights: dict[str, Any] = {}
    state: dict[int, dict[str, Any]] = {}
    for name, value in {**tensors, **{f"optim/{k}": v for k, v in rest["state"].items()}}.items():
        where, _, name_there = name.partition("/")
        if where == "model":
            weights[name_there] = value
        else:
            number, _, key = name_there.partition("/")
            state.setdefault(int(number), {})[key] = value
    into.model.load_state_dict(weights, strict=False)
    groups = rest["groups"]
    for group, live in zip(groups, into.optimizer.param_groups, strict=True):
        # JSON knows lists only.
        group.update({k: tuple(v) for k, v in group.items() if isinstance(live.get(k), tuple)})
    into.optimizer.load_state_dict({"state": state, "param_groups": groups})
