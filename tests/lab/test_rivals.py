"""Every compared system gives back what it was given, and leaves out what its row says."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch

from asymcheck.planning.strategies import strategies
from asymcheck.testing.children import run_in_child
from asymcheck_lab.fingerprint import fingerprint
from asymcheck_lab.rivals import OURS, RIVALS, RNG, Job, Rival, System, base, page
from asymcheck_lab.rivals.gemini import Gemini

PAGE = Path(__file__).parents[2] / "docs" / "rivals.md"
SAVING = [name for name, rival in RIVALS.items() if rival.kind != "none"]
HERE = [name for name in SAVING if RIVALS[name].library in ("torch", "asymcheck")]
FURTHER = [name for name in SAVING if name not in HERE]
DUE = (2, 4, 6)


class Net(torch.nn.Module):
    """Tied weights, a buffer, and a layer that is large enough to be copied lazily.

    The buffer stays as it is: some systems copy behind the forward pass, and say so.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(64, 128)
        self.norm = torch.nn.LayerNorm(128)
        self.register_buffer("scale", torch.rand(128))
        self.wide = torch.nn.Linear(128, 256)
        self.back = torch.nn.Linear(256, 128)
        self.head = torch.nn.Linear(128, 64, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.back(self.wide(self.norm(self.table(tokens)) * self.scale).relu()))


def made(seed: int, folder: Path) -> Job:
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 / 3, betas=(0.9, 0.95))
    return Job(model, optimizer, folder, every=2)


def differences(name: str, folder: Path) -> dict[str, list[str]]:
    """Train, save, train on; what of each checkpoint loads back differently, by its step."""
    folder.mkdir()
    job = made(0, folder)
    system = RIVALS[name].make(job)
    system.start()
    saved = {}
    for step in range(1, 8):
        random.random()
        np.random.rand()
        job.model(torch.randint(0, 64, (16,))).square().mean().backward()
        system.before_update()
        job.optimizer.step()
        job.optimizer.zero_grad()
        if step in DUE:
            saved[step] = fingerprint(job.model, job.optimizer, {})
        system.after_update(step, due=step in DUE)
    system.before_update()
    system.drain()
    assert sorted(system.durable_s) == list(DUE)
    found = {}
    for step, was in RIVALS[name].kept(saved.items()):
        fresh = made(1, folder)
        system.load(step, fresh)
        now = fingerprint(fresh.model, fresh.optimizer, {})
        found[str(step)] = [key for key in was.keys() | now.keys() if was.get(key) != now.get(key)]
    system.close()
    return found


def check(name: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)  # a fork does not inherit a pool of threads

    def work(say: Callable[[Any], None]) -> None:
        if name in FURTHER:
            warnings.simplefilter("ignore")  # theirs
        say(differences(name, tmp_path / "root"))

    rival = RIVALS[name]
    (found,) = run_in_child(work, timeout_s=200).check()
    rng = {"rng/python", "rng/numpy", "rng/torch"}
    for number, wrong in enumerate(dict(found).values()):
        assert rng & set(wrong) == (rng if RNG in rival.omits else set())
        # The first is a key-frame. What a lossy system loses later depends on measured rates.
        if rival.is_exact or number == 0:
            assert not set(wrong) - rng


@pytest.mark.parametrize("name", HERE)
def test_a_system_gives_back_all_but_what_its_row_omits(name: str, tmp_path: Path) -> None:
    check(name, tmp_path)


@pytest.mark.extra
@pytest.mark.parametrize("name", FURTHER)
def test_a_system_of_others_gives_back_all_but_what_its_row_omits(
    name: str, tmp_path: Path, not_run_here: Callable[[str], NoReturn]
) -> None:
    absent = RIVALS[name].missing()
    if absent:
        not_run_here(absent)
    check(name, tmp_path)


def test_gemini_s_newest_checkpoint_survives_the_loss_of_an_agent(tmp_path: Path) -> None:
    torch.set_num_threads(1)

    def work(say: Callable[[Any], None]) -> None:
        job = made(0, tmp_path)
        system = Gemini(job)
        system.start()
        job.model(torch.randint(0, 64, (16,))).square().mean().backward()
        job.optimizer.step()
        system.after_update(1, due=True)
        system.drain()
        system.agents[0].kill()
        fresh = made(1, tmp_path)
        system.load(1, fresh)
        same = zip(job.model.parameters(), fresh.model.parameters(), strict=True)
        say(all(torch.equal(mine, theirs) for mine, theirs in same))
        agents = system.agents
        system.close()
        say([agent.returncode for agent in agents])

    assert run_in_child(work, timeout_s=200).check() == [True, [-9, -9]]


def test_every_strategy_is_a_system() -> None:
    assert set(strategies) <= set(RIVALS)
    assert RIVALS[OURS].kind == "ours"
    for name in set(strategies) - {OURS}:
        assert RIVALS[name].kind == "strategy"
        assert RIVALS[name].is_async == (strategies[name].persist == "behind")


def test_every_row_says_what_it_is() -> None:
    titles = [rival.title for rival in RIVALS.values()]
    assert len(set(titles)) == len(titles)
    for name, rival in RIVALS.items():
        assert (rival.kind == "none") == (name == "none")
        assert rival.syncs or rival.kind == "none"
        assert rival.ranked != bool(rival.why_unranked)
        assert rival.omits or rival.is_exact


def absent_rival(**fields: Any) -> Rival:
    return Rival(title="", make=System, library="asymcheck-no-such", omits="", syncs="", **fields)


def test_what_is_not_installed_says_so_in_one_line_and_how_to_get_it() -> None:
    rival = absent_rival()
    assert rival.version == ""
    assert rival.missing() == (
        "asymcheck-no-such is not installed: pip install 'asymcheck[rivals]'"
    )
    assert RIVALS["torch-save"].missing() is None
    assert RIVALS["torch-save"].version == torch.__version__


def test_what_is_installed_apart_is_looked_for_there_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "apart", lambda: tmp_path)
    rival = absent_rival(apart=True)
    assert rival.missing() == (
        "asymcheck-no-such is not installed: "
        f"pip install --no-deps --target {tmp_path} asymcheck-no-such"
    )
    info = tmp_path / "asymcheck_no_such-3.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: asymcheck-no-such\nVersion: 3.1\n")
    assert (rival.version, rival.missing()) == ("3.1", None)
    assert absent_rival().missing() is not None


def test_a_checkpoint_that_was_lost_behind_the_training_surfaces(tmp_path: Path) -> None:
    def lost() -> None:
        raise OSError("no space")

    system = base.Behind(made(0, tmp_path))
    system.watch(2, lost)
    with pytest.raises(OSError, match="no space"):
        system.drain()
    assert system.durable_s == {}
    system.close()


def test_the_page_shows_the_table_as_it_is() -> None:
    assert page.render() in PAGE.read_text(encoding="utf-8")
