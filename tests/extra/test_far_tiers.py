"""HDFS and S3 as tiers of one training, on real servers: outages, bit rot, a new host."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from hdfs_cluster import HdfsCluster, NotHereError
from s3_servers import BUCKET, Process, credentials_in, made_bucket, url_at, weed
from torch import nn
from typer.testing import CliRunner

from asymcheck import Checkpointer, Tier, promotion
from asymcheck.cli import app
from asymcheck.decoding import verify
from asymcheck.errors import CheckpointWarning
from asymcheck.events import Span, Stage
from asymcheck.planning.retention import CheckpointId
from asymcheck.storage.names import manifest_name, pack_name
from asymcheck.storage.repository import open_repository
from asymcheck.storage.store import Buffer, open_store, read_all
from asymcheck.testing.children import TIMEOUT_S

pytestmark = [pytest.mark.extra, pytest.mark.xdist_group("far")]

SIDE = 900  # 20 MB of state: several parts of an upload


@pytest.fixture(scope="module", autouse=True)
def credentials(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with credentials_in(tmp_path_factory.mktemp("aws")):
        yield


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, not_run_here: Callable[[str], NoReturn]
) -> Iterator[HdfsCluster]:
    try:
        made = HdfsCluster(tmp_path_factory.mktemp("hdfs"))
    except NotHereError as reason:
        not_run_here(str(reason))
    with made:
        yield made


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, credentials: None) -> Iterator[Process]:
    folder = tmp_path_factory.mktemp("weed")
    made = weed(folder)
    try:
        made.start()
        made_bucket(made, BUCKET)
        yield made
    finally:
        made.kill()
        shutil.rmtree(folder / "data")


@pytest.fixture
def places(cluster: HdfsCluster, server: Process) -> dict[str, str]:
    """A new place on each, nearest first."""
    return {
        "hdfs": f"{cluster.root()}?timeout_s=3",
        "s3": url_at(server, part_mib=5, timeout_s=3),
    }


class Job:
    """A small training that keeps what it saved last."""

    def __init__(self, root: Path, tiers: Iterable[Tier], seed: int = 1, **options: Any) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(SIDE, SIDE), nn.Linear(SIDE, SIDE))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.spans: list[Span] = []
        self.heard: list[str] = []
        state = {"m": self.model, "o": self.optimizer}
        with self._hearing():
            self.checkpointer = Checkpointer(
                root, state=state, tiers=tuple(tiers), sink=self.spans.append, **options
            )
            self.at = self.checkpointer.restore()

    @contextmanager
    def _hearing(self) -> Iterator[None]:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always", CheckpointWarning)
            yield
        self.heard += [str(w.message) for w in heard]

    def train_and_save(self) -> None:
        """One step, which is durable at home when this returns."""
        self.at += 1
        self.model(torch.ones(2, SIDE) * self.at).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        with self._hearing():
            self.checkpointer.save(self.at).durable.result(TIMEOUT_S)
            assert self.checkpointer.wait(TIMEOUT_S)

    def arrive(self, tier: str) -> bool:
        """Whether the newest is in a tier once it was tried."""
        with self._hearing():
            return self.checkpointer.wait(TIMEOUT_S, tier=tier)

    def values(self) -> list[torch.Tensor]:
        found = [p.detach().clone() for p in self.model.parameters()]
        for state in self.optimizer.state.values():
            found += [state["exp_avg"].clone(), state["exp_avg_sq"].clone()]
        return found

    def states(self) -> dict[str, Any]:
        return {state.name: state for state in self.checkpointer.tier_states()}

    def told_of(self, tier: str) -> dict[int, str]:
        """Of each step the last that was said of its way to a tier: empty, or why not."""
        promoted = [s for s in self.spans if s.stage is Stage.PROMOTE and s.tier == tier]
        return {span.step: span.error for span in promoted}


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) > 0 and all(map(torch.equal, left, right))


def whole_steps(url: str) -> list[int]:
    """What a place lists; every byte of it is read."""
    repository = open_repository(open_store(url))
    listing = repository.survey()
    assert not listing.damaged
    for at in listing.committed:
        assert list(verify(repository, at)) == []
    return [at.step for at in repository.lineage()]


class Midway:
    """A store that makes a call in the middle of the first pack that it is given."""

    def __init__(self, url: str) -> None:
        self.inner = open_store(url)
        self.call: Callable[[], None] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def write(self, name: str, parts: Iterable[Buffer]) -> int:
        return self.inner.write(name, self._interrupted(name, parts))

    def _interrupted(self, name: str, parts: Iterable[Buffer]) -> Iterator[Buffer]:
        given = 0
        for part in parts:
            yield part
            given += len(part)
            # A part of an upload is on its way, and more than a piece for the data nodes.
            if name.endswith(".pack") and given > 6 << 20 and self.call:
                call, self.call = self.call, None
                call()


def test_training_goes_on_while_servers_die_amid_promotions_and_their_tiers_catch_up(
    tmp_path: Path,
    places: dict[str, str],
    cluster: HdfsCluster,
    server: Process,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(promotion, "PAUSES_S", ())
    died: list[str] = []
    stores = {name: Midway(url) for name, url in places.items()}
    tiers = [Tier(store, keep_last=3, name=name) for name, store in stores.items()]
    job = Job(tmp_path / "home", tiers, persist="thread", keep_last=2)
    job.train_and_save()
    assert job.arrive("hdfs")
    assert job.arrive("s3")
    assert {name: whole_steps(url) for name, url in places.items()} == {"hdfs": [1], "s3": [1]}

    def kill_name_node() -> None:
        cluster.kill_name_node()
        died.append("hdfs")

    def kill_s3() -> None:
        server.kill()
        died.append("s3")

    stores["hdfs"].call = kill_name_node
    job.train_and_save()
    assert not job.arrive("hdfs")
    assert job.arrive("s3")  # one that is gone holds up no other
    stores["s3"].call = kill_s3
    job.train_and_save()
    assert not job.arrive("s3")
    assert died == ["hdfs", "s3"]
    job.train_and_save()  # goes on, with both of them gone
    assert not job.arrive("hdfs")
    job.train_and_save()
    assert not job.arrive("s3")
    gone = job.states()
    assert (gone["hdfs"].newest_step, gone["s3"].newest_step) == (1, 2)
    for name, state in gone.items():
        assert state.failed >= 2, name
        assert state.last_failure, name
        assert [f"tier {name} does not get its checkpoints" in w for w in job.heard].count(
            True
        ) == 1
    assert f"127.0.0.1:{cluster.port}" in gone["hdfs"].last_failure
    assert server.endpoint in gone["s3"].last_failure
    # Retention at home leaves what they need, and no more.
    assert whole_steps(str(tmp_path / "home"))[-2:] == [4, 5]

    cluster.start_name_node()
    cluster.wait_until_writable()
    server.start()
    job.train_and_save()
    for name in places:
        assert job.arrive(name)
    for name, state in job.states().items():
        assert (state.newest_step, state.lag_steps, state.lag_bytes) == (6, 0, 0), name
        assert not state.last_failure
        steps = whole_steps(places[name])
        assert steps[-1] == 6
        # Of each step it was said that it is there, or why it is not.
        told = job.told_of(name)
        assert sorted(told) == [1, 2, 3, 4, 5, 6], name
        assert all(told[step] == "" for step in steps), name
        assert all(told[step] for step in told.keys() - steps), name
        assert state.promoted + state.skipped >= 6
    job.checkpointer.close()
    # Nothing is left of the copies that were cut short.
    for url in places.values():
        assert open_store(url).sweep() == 0
        assert open_repository(open_store(url)).survey().leftovers == []

    shutil.rmtree(tmp_path / "home")
    again = Job(tmp_path / "new", [Tier(url, name=n) for n, url in places.items()], seed=2)
    assert again.at == 6
    assert same(again.values(), job.values())
    again.checkpointer.close()


# --- damage ---------------------------------------------------------------------


@pytest.fixture
def trained(tmp_path: Path, places: dict[str, str]) -> Job:
    """Two steps in both, copied by the process that persists; the home is gone."""
    job = Job(tmp_path / "home", tiers_of(places), keep_last=2)
    for _ in range(2):
        job.train_and_save()
        assert all([job.arrive(name) for name in places])
    job.checkpointer.close()
    shutil.rmtree(tmp_path / "home")
    return job


def tiers_of(places: dict[str, str]) -> list[Tier]:
    return [Tier(url, name=name) for name, url in places.items()]


def flip(url: str, name: str, at: int) -> bytes:
    """Rot one bit; what the object was before."""
    store = open_store(url)
    before = read_all(store, name)
    data = bytearray(before)
    data[at] ^= 4
    store.write(name, [data])
    return before


PACK = pack_name(CheckpointId(1, 2), 0, 1)


@pytest.mark.parametrize(("rotten", "good"), [("hdfs", "s3"), ("s3", "hdfs")])
def test_bit_rot_in_one_far_tier_is_healed_from_the_other_and_reported(
    tmp_path: Path, trained: Job, places: dict[str, str], rotten: str, good: str
) -> None:
    before = flip(places[rotten], PACK, 5 << 20)
    order = {rotten: places[rotten], good: places[good]}  # met where the nearest is the rotten one
    job = Job(tmp_path / "new", tiers_of(order), seed=2)
    assert job.at == 2
    assert same(job.values(), trained.values())
    report = job.checkpointer.report
    assert {(bad.tier, bad.name, bad.kind) for bad in report.damaged} == {(rotten, PACK, "damaged")}
    assert [(h.tier, h.name, h.nbytes, h.why_not) for h in report.healed] == [
        (rotten, PACK, len(before), "")
    ]
    served = {s.tier: s for s in report.served}
    assert served[rotten].nbytes > served[good].nbytes > 0  # one chunk came from the other
    assert served[rotten].duration_s > 0
    assert any(f"tier {rotten}" in w and "written anew" in w for w in job.heard)
    assert read_all(open_store(places[rotten]), PACK) == before
    job.checkpointer.close()
    assert whole_steps(places[rotten]) == [1, 2]


def test_recover_tells_what_a_start_does_where_both_far_tiers_are_damaged(
    tmp_path: Path, trained: Job, places: dict[str, str]
) -> None:
    flip(places["hdfs"], manifest_name(CheckpointId(1, 2)), 10)
    flip(places["s3"], PACK, 1 << 20)
    arguments = ["recover", str(tmp_path / "new"), "--dry-run"]
    for url in places.values():
        arguments += ["--tier", url]
    text = CliRunner().invoke(app, arguments, env={"COLUMNS": "300"})
    assert text.exit_code == 0, text.output
    assert "the next start goes on from step 2 (attempt 1), out of tiers" in text.output
    told = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert told["chosen"] == {"step": 2, "attempt": 1}
    found = {(bad["tier"].partition(":")[0], bad["name"]) for bad in told["damaged"]}
    assert ("hdfs", manifest_name(CheckpointId(1, 2))) in found
    given = {row["tier"].partition(":")[0]: row["nbytes"] for row in told["served"]}
    assert given["hdfs"] > 0
    assert not (tmp_path / "new").exists() or not any((tmp_path / "new").iterdir())

    flip(places["hdfs"], PACK, 2 << 20)  # put together from two
    flip(places["s3"], PACK, 1 << 20)  # as it was
    flip(places["s3"], PACK, 9 << 20)
    job = Job(tmp_path / "new", tiers_of(places), seed=2)
    assert job.at == 2
    assert same(job.values(), trained.values())
    assert all(not healed.why_not for healed in job.checkpointer.report.healed)
    job.checkpointer.close()
    assert whole_steps(places["hdfs"]) == [1, 2]


def test_what_is_whole_nowhere_is_passed_over_and_recover_says_so(
    tmp_path: Path, trained: Job, places: dict[str, str]
) -> None:
    for url in places.values():
        flip(url, PACK, 1 << 20)
    arguments = ["recover", str(tmp_path / "new"), "--dry-run"]
    for url in places.values():
        arguments += ["--tier", url]
    text = CliRunner().invoke(app, arguments, env={"COLUMNS": "300"}).output
    assert "step 2 (attempt 1): passed over" in text
    assert "the next start goes on from step 1 (attempt 1), out of tiers" in text
    job = Job(tmp_path / "new", tiers_of(places), seed=2)
    assert job.at == 1
    assert [step for step, _ in job.checkpointer.report.skipped] == [2]
    job.checkpointer.close()
