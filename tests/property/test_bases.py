"""Whatever is saved, kept and removed: every delta that is there has its base."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from asymcheck.planning.retention import CheckpointId, Retention
from asymcheck.storage.index import Index, Leaf
from asymcheck.storage.memory import MemoryStore
from asymcheck.storage.repository import Repository, create_repository, open_repository
from asymcheck.upkeep import Wanted, plan_prune, prune

RETENTIONS = st.sampled_from(
    [
        Retention(),
        Retention(keep_last=1),
        Retention(keep_last=3),
        Retention(keep_last=1, keep_every_steps=3),
        Retention(keep_last=2, keep_best=1, monitor="loss"),
    ]
)


@dataclass(frozen=True)
class Save:
    """A save: as a delta where it can be one, and what is kept after it."""

    delta: bool
    loss: float
    retention: Retention


@dataclass(frozen=True)
class Rewind:
    """A new attempt that goes on from one of the checkpoints."""

    to: int


@dataclass(frozen=True)
class Prune:
    """The owner prunes."""

    retention: Retention
    abandoned: bool


STEPS = st.lists(
    st.one_of(
        st.builds(Save, st.booleans(), st.integers(0, 5).map(float), RETENTIONS),
        st.builds(Save, st.just(True), st.integers(0, 5).map(float), RETENTIONS),
        st.builds(Rewind, st.integers(0, 30)),
        st.builds(Prune, RETENTIONS, st.booleans()),
    ),
    max_size=25,
)


def commit(
    repository: Repository, at: CheckpointId, base: CheckpointId | None, loss: float
) -> None:
    leaf = Leaf("w", "float32", (0,), 0, 0)
    index = Index(
        run=repository.run, at=at, rank=0, world=1, created_s=0.0, metrics={"loss": loss},
        versions={}, leaves=(leaf,), aliases={}, chunks=(), packs=(),
    )  # fmt: skip
    repository.commit(index, base=base)


def newest_key_frame(repository: Repository) -> CheckpointId | None:
    """What a writer makes its next delta against."""
    listing = repository.survey()
    lineage = repository.lineage(listing)
    if not lineage:
        return None
    named = listing.committed[lineage[-1]].base
    return lineage[-1] if named is None else named.at


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_every_delta_that_is_kept_has_its_base_and_no_base_outlives_its_use(
    steps: list[Save | Rewind | Prune],
) -> None:
    store = MemoryStore()
    repository = create_repository(store)
    attempt, step = repository.claim(None).number, 0
    for act in steps:
        if isinstance(act, Save):
            step += 1
            at = CheckpointId(attempt, step)
            base = newest_key_frame(repository) if act.delta else None
            commit(repository, at, base, act.loss)
            there = repository.survey().committed
            metrics = {c: m.metrics for c, m in there.items()}
            kept = act.retention.kept(repository.lineage(), metrics)
            repository.retain(at, act.retention)
            bases = {there[c].base.at for c in kept if there[c].base is not None}
            assert set(repository.survey().committed) == kept | bases
        elif isinstance(act, Rewind):
            lineage = repository.lineage()
            if lineage:
                parent = lineage[act.to % len(lineage)]
                attempt, step = repository.claim(parent).number, parent.step
        elif repository.survey().committed:
            wanted = Wanted(act.retention, abandoned=act.abandoned)
            prune(repository, plan_prune(repository, wanted), verify=True)
        reading = open_repository(store)
        listing = reading.survey()
        assert not listing.damaged
        for at, manifest in listing.committed.items():
            if manifest.base is not None:
                assert listing.committed[manifest.base.at].base is None
            with reading.open(at) as opened:
                assert (opened.base is None) == (manifest.base is None)
    repository.finish()
    manifests = repository.survey().committed.values()
    named = {o.name for manifest in manifests for o in manifest.objects}
    found = {e.name for e in store.list() if e.name.startswith("step-")}
    assert {name for name in found if not name.endswith("MANIFEST.json")} == named
