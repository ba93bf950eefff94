"""Makes the golden checkpoint of format 1. Run once; what it made is committed and never changes.

python tests/golden/make_v1.py NEW_DIRECTORY
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import random
import socket
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

from asymcheck import Checkpointer

HERE = Path(__file__).parent
NAME = "asymcheck_golden_v1"
"""The classes of the state are found again under this module name."""


def load_state_module() -> ModuleType:
    """``state_v1.py`` as the module that the checkpoint's classes belong to."""
    if NAME not in sys.modules:
        spec = importlib.util.spec_from_file_location(NAME, HERE / "state_v1.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[NAME] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[NAME])
    return sys.modules[NAME]


def main(root: Path) -> None:
    """Make the checkpoint, and beside it a list of what it holds."""
    golden = load_state_module()
    socket.gethostname = lambda: "golden"  # a record names its host
    state = golden.state(blank=False)
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    ckpt = Checkpointer(root / "v1", state=state)
    ckpt.restore()
    ckpt.save(100, metrics={"loss": 0.5, "nan": float("nan")})
    draws = golden.draws()
    ckpt.close()
    # Python's own spelling of some values may change: those are compared, not pinned.
    hashes = {
        k: hashlib.sha256(golden.bits(v).encode()).hexdigest()
        for k, v in state.items()
        if k != "values"
    }
    listed = {"draws": draws, "sha256 of bits": hashes}
    (root / "v1.json").write_text(json.dumps(listed, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
