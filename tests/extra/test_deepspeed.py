"""DeepSpeed engines of every ZeRO stage: saved, restored, and restored as something else."""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from asymcheck import Checkpointer
from asymcheck.errors import CorruptCheckpoint, StateError
from asymcheck.testing.children import Say
from asymcheck.testing.ranks import check_all, run_ranks

pytestmark = pytest.mark.extra

WIDE = 180  # a weight of this width is over 64 KiB, so that it is copied behind the training
GROUPS = ((0.1, 0.01), (0.0, 0.02))  # weight decay and learning rate
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}


@pytest.fixture(scope="module", autouse=True)
def deepspeed() -> Iterator[Any]:
    """DeepSpeed on the CPU; imported once, before any fork."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setenv("DS_ACCELERATOR", "cpu")
        import deepspeed as found

        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        # It would compile this one, for a minute, to speed up collectives on one host.
        patch.setitem(found.ops.__compatible_ops__, "deepspeed_shm_comm", False)
        yield found


class Net(nn.Module):
    """Odd sizes, a tied weight, a frozen one, a buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(5, WIDE)
        self.middle = nn.Linear(WIDE, WIDE)
        self.last = nn.Linear(WIDE, 5)
        self.tied = nn.Linear(WIDE, 5, bias=False)
        self.tied.weight = self.last.weight
        self.scale = nn.Parameter(torch.rand(1) + 1)
        self.fixed = nn.Parameter(torch.rand(3, 5), requires_grad=False)
        self.register_buffer("mean", torch.rand(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.middle(torch.tanh(self.first(x - self.mean.to(x.dtype)))))
        return self.last(hidden) * self.scale + self.tied(hidden) + self.fixed[0]


def _adamw(model: nn.Module) -> torch.optim.AdamW:
    trained = [p for p in model.parameters() if p.requires_grad]
    several = [[p for p in trained if p.dim() > 1], [p for p in trained if p.dim() <= 1]]
    return torch.optim.AdamW(
        {"params": params, "weight_decay": decay, "lr": lr}
        for params, (decay, lr) in zip(several, GROUPS, strict=True)
    )


class Trained:
    """A model with its optimizer, in one of the ways of spreading it."""

    def __init__(self, how: str, seed: int, **config: Any) -> None:
        self.bare: nn.Module = Net(seed)
        self.stage = int(how[4:]) if how.startswith("zero") else None
        model = self.bare
        if how == "fsdp2":
            fully_shard(self.bare.middle)
            fully_shard(self.bare)
        elif how == "ddp":
            model = nn.parallel.DistributedDataParallel(self.bare)
        self.optimizer = _adamw(self.bare)
        self.state: dict[str, Any] = {"model": model, "optimizer": self.optimizer}
        self.dtype = torch.bfloat16 if "bf16" in config else torch.float32
        if self.stage is not None:
            self.engine = _engine(self.bare, self.optimizer, self.stage, config)
            self.state["model"] = self.engine

    def step(self, number: int) -> float:
        """Train one step on samples that depend on number and rank."""
        rank = dist.get_rank()
        made = torch.Generator().manual_seed(1000 * number + rank)
        x = torch.randn(4, 5, generator=made).to(self.dtype)
        loss = (self.engine(x) - x.square()).square().mean()
        self.engine.backward(loss)
        self.engine.step()
        return float(loss.detach())

    def whole(self) -> dict[str, str]:
        """A hash of every parameter and moment as one process would have it; collective."""
        found = {}
        if self.stage in (1, 2):
            # It links what there is after the first group's first step, and never again.
            self.engine.optimizer._hp_optimizer_states_linked = False
            self.engine.optimizer._lazy_init_hp_params_optimizer_state()
        for name, param in self.bare.named_parameters():
            for key, value in self._wholes(param).items():
                found[f"{name}/{key}"] = _hash(value)
        for g, group in enumerate(self.optimizer.param_groups):
            found[f"lr of group {g}"] = group["lr"]
        return found

    def _wholes(self, param: Any) -> dict[str, torch.Tensor]:
        if not self.stage:
            state = self.optimizer.state.get(param, {}) if param.requires_grad else {}
            both = {"fp32": param.detach(), **state}
            return {k: getattr(t, "full_tensor", lambda t=t: t)() for k, t in both.items()}
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        if not param.requires_grad:
            return {"fp32": _gathered(param).float()}
        found = {"fp32": safe_get_full_fp32_param(param)}
        for key in ("exp_avg", "exp_avg_sq"):
            found[key] = safe_get_full_optimizer_state(param, key)
        steps = {float(s["step"]) for s in self.optimizer.state.values()}
        assert len(steps) == 1
        return {**found, "step": torch.tensor(steps.pop())}


def _gathered(param: Any) -> torch.Tensor:
    import deepspeed

    with deepspeed.zero.GatheredParameters([param]):
        return param.detach().clone()


def _hash(tensor: torch.Tensor) -> str:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def _engine(
    model: nn.Module, optimizer: torch.optim.Optimizer, stage: int, config: dict[str, Any]
) -> Any:
    import deepspeed

    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(LOCAL_RANK=rank, RANK=rank, WORLD_SIZE=ranks)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 100}
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "gradient_clipping": 1.0,
            **config,
            "zero_optimization": {**zero, **config.get("zero_optimization", {})},
        },
    )
    return engine


def _ranks(world: int, work: Callable[[int, Say], None]) -> list[list[Any]]:
    def quiet(rank: int, say: Say) -> None:
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        work(rank, say)

    return check_all(run_ranks(world, quiet))


BF16 = {"bf16": {"enabled": True}}
RESUMED = {
    "stage 0": ("zero0", {}),
    "stage 1": ("zero1", {}),
    "stage 1, bf16": ("zero1", BF16),
    "stage 1, bf16 with fp32 gradients": (
        "zero1",
        {**BF16, "data_types": {"grad_accum_dtype": "fp32"}},
    ),
    "stage 2, bf16, round robin": (
        "zero2",
        {**BF16, "zero_optimization": {"round_robin_gradients": True}},
    ),
    "stage 2, offload": ("zero2", {"zero_optimization": OFFLOAD}),
    "stage 3": ("zero3", {}),
    "stage 3, bf16, several buffers": (
        "zero3",
        {**BF16, "zero_optimization": {"sub_group_size": 10_000}},
    ),
    "stage 3, bf16, offload": (
        "zero3",
        {**BF16, "zero_optimization": {**OFFLOAD, "offload_param": {"device": "cpu"}}},
    ),
}


@pytest.mark.parametrize("case", RESUMED)
def test_a_training_that_is_resumed_equals_one_that_was_not(case: str, tmp_path: Path) -> None:
    how, config = RESUMED[case]

    def train(rank: int, say: Say, *, first: int, seed: int) -> None:
        trained = Trained(how, seed, **config)
        with Checkpointer(tmp_path, state=trained.state) as checkpointer:
            assert checkpointer.restore() == first
            for step in range(first + 1, 6):
                say([step, trained.step(step)])
                if step == 3 and not first:
                    checkpointer.save(step)
        engine = trained.engine
        say([engine.global_steps, engine.micro_steps, engine.global_samples])
        say(engine.lr_scheduler.state_dict()["last_epoch"])
        say([_hash(p) for p in trained.bare.parameters()] if trained.stage != 3 else None)
        say(trained.whole() if "round robin" not in case else None)

    without = _ranks(2, lambda rank, say: train(rank, say, first=0, seed=1))
    resumed = _ranks(2, lambda rank, say: train(rank, say, first=3, seed=2))
    assert resumed == [said[3:] for said in without]


CHAINS = {
    "up and down": [
        ("zero3", 2),
        ("zero1", 3),
        ("fsdp2", 2),
        ("zero2", 2),
        ("ddp", 2),
        ("zero3", 1),
        ("alone", 1),
        ("zero3", 3),
        ("zero0", 2),
        ("zero1", 2),
        ("alone", 1),
    ]
}


@pytest.mark.parametrize("chain", CHAINS)
def test_a_checkpoint_of_one_stage_is_restored_into_any_other_way(
    chain: str, tmp_path: Path
) -> None:
    seen: list[dict[str, str]] = []

    def work(rank: int, say: Say, *, how: str, at: int) -> None:
        trained = Trained(how, seed=at)
        with Checkpointer(tmp_path, state=trained.state) as checkpointer:
            assert checkpointer.restore() == at
            if at == 0:
                for step in range(3):
                    trained.step(step)
            checkpointer.save(at + 1)
        say(trained.whole())

    for at, (how, world) in enumerate(CHAINS[chain]):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            seen += (said[0] for said in _ranks(world, lambda r, s: work(r, s, how=how, at=at)))  # noqa: B023
    assert len(seen[0]) > 20
    for other in seen[1:]:
        assert other == seen[0]


def _refusal(work: Callable[[Trained], object], how: str, **config: Any) -> str:
    def one(rank: int, say: Say) -> None:
        trained = Trained(how, 0, **config)
        with pytest.raises(StateError) as refused:
            work(trained)
        say(str(refused.value))

    return str(_ranks(1, one)[0][0])


REFUSED: dict[str, Callable[[Any], object]] = {
    "mixture-of-experts": lambda engine: setattr(engine, "has_moe_layers", True),
    "tensor parallelism over 2 ranks": lambda engine: setattr(engine, "mp_world_size", 2),
    "sequence parallelism": lambda engine: setattr(engine, "sequence_parallel_size", 2),
    "offload of optimizer to NVMe": lambda engine: _zero(engine, "offload_optimizer", "nvme"),
    "offload of parameters to NVMe": lambda engine: _zero(engine, "offload_param", "nvme"),
    "zero_hpz_partition_size": lambda engine: _zero(engine, "zero_hpz_partition_size", 2),
    "quantized weights": lambda engine: _zero(engine, "zero_quantized_weights", True),
    "PipelineEngine": lambda engine: _become(engine, "PipelineEngine"),
    "HybridEngine": lambda engine: _become(engine, "HybridEngine"),
    "MiCS_Optimizer": lambda engine: _become(engine.optimizer, "MiCS_Optimizer"),
    "ZenFlow": lambda engine: setattr(engine, "zenflow", True),
    "Muon": lambda engine: _become(engine.basic_optimizer, "MuonWithAuxAdam"),
}


def _zero(engine: Any, name: str, value: Any) -> None:
    from deepspeed.runtime.zero import offload_config as known

    kinds = {
        "offload_optimizer": known.DeepSpeedZeroOffloadOptimizerConfig,
        "offload_param": known.DeepSpeedZeroOffloadParamConfig,
    }
    made = kinds[name](device=value, nvme_path="/nowhere") if name in kinds else value
    setattr(engine._config.zero_config, name, made)


def _become(thing: Any, name: str) -> None:
    thing.__class__ = type(name, (type(thing),), {"__module__": type(thing).__module__})


@pytest.mark.parametrize("what", REFUSED)
def test_what_an_engine_does_that_is_not_supported_is_refused_by_name(
    what: str, tmp_path: Path
) -> None:
    def work(trained: Trained) -> None:
        REFUSED[what](trained.engine)
        Checkpointer(tmp_path, state=trained.state)

    said = _refusal(work, "zero3")
    assert what in said
    assert "model" in said


def test_a_save_between_two_updates_is_refused(tmp_path: Path) -> None:
    def work(trained: Trained) -> None:
        with Checkpointer(tmp_path, state=trained.state) as checkpointer:
            checkpointer.restore()
            trained.step(0)
            trained.step(1)
            checkpointer.save(1)
            trained.step(2)
            checkpointer.save(2)

    assert "micro-step 3" in _refusal(work, "zero1", gradient_accumulation_steps=2)


@pytest.mark.parametrize("how", ["zero1", "zero2", "zero3"])
def test_a_parameter_that_is_not_its_master_is_refused_by_name(how: str, tmp_path: Path) -> None:
    def work(trained: Trained) -> None:
        with Checkpointer(tmp_path, state=trained.state) as checkpointer:
            checkpointer.restore()
            checkpointer.save(1)
            weight = trained.bare.middle.weight
            mine = weight.ds_tensor if how == "zero3" else weight
            with torch.no_grad():
                mine += 1
            checkpointer.save(2)

    said = _refusal(work, how, **BF16)
    assert "middle.weight" in said
    assert "refresh_fp32_params" in said


def test_counters_that_differ_within_a_buffer_are_refused_by_zero(tmp_path: Path) -> None:
    def work(rank: int, say: Say, *, how: str) -> None:
        trained = Trained(how, 0)
        with Checkpointer(tmp_path, state=trained.state) as checkpointer:
            if how == "zero2":
                with pytest.raises(CorruptCheckpoint, match=r"differ in 'step' \(\[1.0, 2.0\]\)"):
                    checkpointer.restore()
                return
            checkpointer.restore()
            for step in range(2):
                loss = trained.bare(torch.rand(4, 5)).sum()
                loss.backward()
                if step:
                    trained.bare.first.weight.grad = None  # as one that was not used has none
                trained.optimizer.step()
                trained.optimizer.zero_grad()
            checkpointer.save(1)

    _ranks(1, lambda r, s: work(r, s, how="alone"))
    _ranks(1, lambda r, s: work(r, s, how="zero2"))


def test_a_loss_scaler_goes_on_where_it_was(tmp_path: Path) -> None:
    def work(rank: int, say: Say, *, first: int) -> None:
        trained = Trained("zero2", 0)
        scaler = trained.engine.optimizer.loss_scaler
        if not first:
            scaler.cur_scale = 512.0
        with Checkpointer(tmp_path, state=trained.state) as checkpointer:
            assert checkpointer.restore() == first
            checkpointer.save(first + 1)
        say(scaler.cur_scale)

    assert _ranks(1, lambda r, s: work(r, s, first=0)) == [[512.0]]
    assert _ranks(1, lambda r, s: work(r, s, first=1)) == [[512.0]]


def test_an_engine_alone_takes_its_optimizer_along(tmp_path: Path) -> None:
    def work(rank: int, say: Say, *, first: int) -> None:
        trained = Trained("zero3", first)
        with Checkpointer(tmp_path, state={"model": trained.engine}) as checkpointer:
            assert checkpointer.restore() == first
            if not first:
                trained.step(0)
            checkpointer.save(first + 1)
        say(trained.whole())

    before = _ranks(2, lambda r, s: work(r, s, first=0))
    assert _ranks(2, lambda r, s: work(r, s, first=1)) == before


def test_deepspeed_is_not_imported_where_no_engine_is_given(tmp_path: Path) -> None:
    code = (
        "import sys, torch, asymcheck\n"
        "with asymcheck.Checkpointer(sys.argv[1], state={'w': torch.ones(3)}) as ckpt:\n"
        "    ckpt.restore()\n"
        "    ckpt.save(1)\n"
        "assert not [name for name in sys.modules if name.partition('.')[0] == 'deepspeed']\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
