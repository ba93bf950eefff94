"""How training goes on after a resume from a checkpoint of each class of fidelity.

For each seed one small GPT-2 is trained up to a step, once for each class, with checkpoints on
the way; the training itself is the same bit for bit, whatever is saved. Then it is resumed from
the newest checkpoint of each class, which for the lossy ones lies between two key-frames, and
trained on with the same batches and the same noise. Another resume from the exact checkpoint,
with other noise, shows how far apart two runs are for which nothing was lost.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from asymcheck import Checkpointer
from asymcheck.handles import SaveReport
from asymcheck.planning.selection import FIDELITIES, Fidelity, Selection
from asymcheck.planning.strategies import Strategy
from asymcheck_lab.data import BatchLoader, Text, load_text
from asymcheck_lab.errors import RunError, UsageError
from asymcheck_lab.models import FAMILIES, Size
from asymcheck_lab.record import measured_when, median
from asymcheck_lab.train import seed_everything, vary

SIZE = Size(
    context=64,
    batch=4,
    learning_rate=1e-3,
    warmup_steps=20,
    config={"n_layer": 2, "n_embd": 128, "n_head": 4},
)
"""Small, with leaves that are large enough to be chunks of their own: only those are encoded."""

OTHER_NOISE = "exact, other noise"
EXCP = "excp"
CLASSES = (*FIDELITIES, EXCP)
CURVES = (*CLASSES, OTHER_NOISE)
_KEY_EVERY = 10
_WEIGHT_DECAY = 0.1
_NOISE_SEED = 1_000_003


@dataclass(frozen=True, slots=True, kw_only=True)
class FidelityOptions:
    """What is trained, and for how long.

    Attributes:
        seeds: So many trainings.
        resume_at: The step of the checkpoint that is resumed from.
        steps: Updates after it.
        every: Steps between two checkpoints.
        size: The model.
    """

    seeds: int = 3
    resume_at: int = 200
    steps: int = 200
    every: int = 10
    size: Size = SIZE

    def __post_init__(self) -> None:
        for name in ("seeds", "steps", "every"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}: expected at least 1, found {getattr(self, name)}")
        checkpoints, odd = divmod(self.resume_at, self.every)
        # The first checkpoints measure, so that later ones can choose.
        if odd or checkpoints < 4 or checkpoints % _KEY_EVERY == 1:
            raise UsageError(
                f"resume_at: expected a multiple of every={self.every} from {4 * self.every} up "
                f"that is no key-frame, which each {_KEY_EVERY}th checkpoint from the first on "
                f"is, found {self.resume_at}"
            )

    @property
    def command(self) -> str:
        """The command that does this again."""
        return (
            f"asymlab fidelity --seeds {self.seeds} --resume-at {self.resume_at} "
            f"--steps {self.steps} --every {self.every}"
        )


def strategy_of(fidelity: str) -> Strategy:
    """The smallest encoding that the class allows, whatever it costs."""
    if fidelity == EXCP:
        return Strategy(selection=Selection(rule="excp", key_every=_KEY_EVERY, workers=1))
    selection = Selection(
        rule="smallest",
        fidelity=cast(Fidelity, fidelity),
        key_every=_KEY_EVERY,
        cpu_share=1e9,
        workers=1,
    )
    return Strategy(selection=selection)


def measure(options: FidelityOptions, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Every seed and class; blocks for minutes.

    Args:
        options: What to train.
        say: Told how it goes, a line at a time.

    Yields:
        For each seed and curve ``seed``, ``curve``, ``resume_at``, ``losses`` of the updates
        after the resume, and of the checkpoint ``stored_bytes``, ``raw_bytes``, ``fidelity`` and
        ``labels`` (kind of leaf to codec).

    Raises:
        RunError: A resume from the exact checkpoint differs from the training that was not
            interrupted, or a checkpoint that should be lossy is not.
    """
    with _one_thread():
        for seed in range(options.seeds):
            expected: list[float] = []
            for fidelity in CLASSES:
                with tempfile.TemporaryDirectory(prefix="asymlab-") as folder:
                    report, losses = _train_on(options, seed, fidelity, Path(folder))
                    expected = expected or losses
                    for curve in CURVES:
                        if not curve.startswith(fidelity):
                            continue
                        found = _resume(options, seed, fidelity, Path(folder), curve)
                        if curve == "exact" and found != expected:
                            raise RunError(
                                f"seed {seed}: the losses after a resume from an exact checkpoint "
                                "are not those of the training that was not interrupted"
                            )
                        say(f"seed {seed}, {curve}: last loss {found[-1]:.4f}")
                        yield {
                            "seed": seed,
                            "curve": curve,
                            "resume_at": options.resume_at,
                            "losses": [round(loss, 5) for loss in found],
                            "fidelity": report.fidelity,
                            "raw_bytes": report.raw_bytes,
                            "stored_bytes": report.stored_bytes,
                            "labels": {group.group: group.label for group in report.groups},
                        }


class _Job:
    """One model with its optimizer and data."""

    def __init__(self, options: FidelityOptions, seed: int, text: Text) -> None:
        seed_everything(seed)
        size = options.size
        self.family = FAMILIES["gpt2"]
        self.model = self.family.build(size)
        self.loader = BatchLoader(text, context=size.context, batch=size.batch, seed=seed)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=size.learning_rate, weight_decay=_WEIGHT_DECAY
        )
        self.scheduler = torch.optim.lr_scheduler.LinearLR(
            self.optimizer, start_factor=1 / size.warmup_steps, total_iters=size.warmup_steps
        )

    @property
    def state(self) -> dict[str, object]:
        """For a Checkpointer."""
        return {
            "model": self.model,
            "optim": self.optimizer,
            "sched": self.scheduler,
            "data": self.loader,
        }

    def step(self) -> float:
        """One update; returns the loss before it."""
        loss = self.family.loss(self.model, *vary(next(self.loader)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return loss.item()


def _train_on(
    options: FidelityOptions, seed: int, fidelity: str, folder: Path
) -> tuple[SaveReport, list[float]]:
    """Train with checkpoints up to the resume; with the exact class train on without them.

    Returns:
        What became of the last checkpoint, and the losses after it.
    """
    job = _Job(options, seed, load_text())
    report: SaveReport | None = None
    with Checkpointer(
        folder, state=job.state, strategy=strategy_of(fidelity), persist="thread"
    ) as checkpointer:
        checkpointer.restore()
        for step in range(1, options.resume_at + 1):
            job.step()
            if step % options.every == 0:
                report = checkpointer.save(step).durable.result()
    assert report is not None
    if (report.fidelity != "exact") != (fidelity != "exact"):
        raise RunError(
            f"step {report.step} with fidelity {fidelity!r}: expected a checkpoint of that class, "
            f"found {report.fidelity!r}, encoded with {[g.label for g in report.groups]}"
        )
    return report, [job.step() for _ in range(options.steps if fidelity == "exact" else 0)]


def _resume(
    options: FidelityOptions, seed: int, fidelity: str, folder: Path, curve: str
) -> list[float]:
    job = _Job(options, seed + _NOISE_SEED, load_text())
    with Checkpointer(
        folder, state=job.state, strategy=strategy_of(fidelity), read_only=True
    ) as checkpointer:
        found = checkpointer.restore()
    if found != options.resume_at:
        raise RunError(f"expected a resume at step {options.resume_at}, found {found}")
    if curve == OTHER_NOISE:
        seed_everything(seed + _NOISE_SEED)
    return [job.step() for _ in range(options.steps)]


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# --- what it says -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gap:
    """How far a curve is from the exact one, in loss; medians over seeds.

    Attributes:
        curve: Which.
        stored: Stored bytes of the checkpoint by raw ones.
        labels: Codecs of the large leaves.
        first: Mean difference over the first ten updates; above 0 is worse than exact.
        worst: The largest mean difference of ten updates in a row.
        last: Mean difference over the last 50 updates.
    """

    curve: str
    stored: float
    labels: str
    first: float
    worst: float
    last: float


def gaps(records: Sequence[dict[str, Any]]) -> list[Gap]:
    """Every curve against the exact one of the same seed."""
    exact = {r["seed"]: r["losses"] for r in records if r["curve"] == "exact"}
    found = []
    for curve in CURVES:
        rows = [r for r in records if r["curve"] == curve]
        if not rows:
            continue
        off = [[a - b for a, b in zip(r["losses"], exact[r["seed"]], strict=True)] for r in rows]
        means = [moving_mean(each, 10) for each in off]
        found.append(
            Gap(
                curve=curve,
                stored=median(r["stored_bytes"] / r["raw_bytes"] for r in rows),
                labels=", ".join(_spoken(rows[0]["labels"])),
                first=median(each[0] for each in means),
                worst=median(max(each) for each in means),
                last=median(sum(each[-50:]) / len(each[-50:]) for each in off),
            )
        )
    return found


def _spoken(labels: dict[str, str]) -> Iterator[str]:
    for group, label in labels.items():
        kind = group.removeprefix("state/").removesuffix(" float32")
        if kind in ("parameter", "exp_avg", "exp_avg_sq"):
            yield f"{kind} `{label}`"


def moving_mean(values: Sequence[float], width: int) -> list[float]:
    """Means of ``width`` values in a row; of all where there are fewer."""
    width = min(width, len(values))
    sums = [sum(values[i : i + width]) for i in range(len(values) - width + 1)]
    return [s / width for s in sums]


def render(records: Sequence[dict[str, Any]], image: str) -> str:
    """The newest measurements as Markdown.

    Args:
        records: Of one session.
        image: Path of the plot, as the page sees it.
    """
    first = records[0]
    steps = len(first["losses"])
    seeds = len({r["seed"] for r in records})
    lines = [
        f"{measured_when(first['session'], first['commit'])}, with "
        f"`{first['command']}`: {seeds} trainings of a GPT-2 with two layers of 128, resumed at "
        f"step {first['resume_at']} from a checkpoint of each class and trained on for {steps} "
        f"updates with the same batches and the same noise. The lossy checkpoints are the last "
        f"ones before the next key-frame, where an error is largest. Resumed from an exact "
        f"checkpoint every loss is bit-equal to that of the training that was not interrupted: "
        f"the command fails otherwise. The last row is the exact checkpoint with other dropout "
        f"and input noise: so far apart are two runs for which nothing was lost.",
        "",
        "| resumed from | stored / raw | codecs | loss more, first 10 | worst 10 | last 50 |",
        "| --- | ---: | --- | ---: | ---: | ---: |",
    ]
    for gap in gaps(records):
        lines.append(
            f"| {gap.curve} | {gap.stored:.2f} | {gap.labels} | "
            f"{' | '.join(_signed(x) for x in (gap.first, gap.worst, gap.last))} |"
        )
    lines += ["", "Medians over the trainings.", "", f"![Loss after a resume]({image})"]
    return "\n".join(lines) + "\n"


def _signed(more: float) -> str:
    return f"{more:+.4f}" if abs(more) >= 5e-5 else "0"


def plot(records: Sequence[dict[str, Any]], into: Path) -> None:
    """Loss and difference to the exact curve, means over seeds of ten updates in a row."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True)
    exact = {r["seed"]: r["losses"] for r in records if r["curve"] == "exact"}
    start = records[0]["resume_at"]
    for curve in CURVES:
        rows = [r for r in records if r["curve"] == curve]
        if not rows:
            continue
        style = {"linestyle": ":", "color": "0.5"} if curve == OTHER_NOISE else {}
        losses = _mean([moving_mean(r["losses"], 10) for r in rows])
        off = [
            moving_mean([a - b for a, b in zip(r["losses"], exact[r["seed"]], strict=True)], 10)
            for r in rows
        ]
        steps = range(start + 10, start + 10 + len(losses))
        top.plot(steps, losses, label=curve, **style)
        bottom.plot(steps, _mean(off), label=curve, **style)
    top.set_ylabel("loss")
    top.legend()
    bottom.set_ylabel("loss more than exact")
    bottom.set_xlabel("update; mean of ten, and over seeds")
    into.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(into, dpi=100, metadata={"Software": None})


def _mean(rows: Sequence[Sequence[float]]) -> list[float]:
    return [sum(column) / len(column) for column in zip(*rows, strict=True)]


def shorter(options: FidelityOptions) -> FidelityOptions:
    """For a first look."""
    return replace(options, seeds=1, resume_at=4 * options.every, steps=20)
