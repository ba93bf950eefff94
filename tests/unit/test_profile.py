"""The profiler sees the windows of a step, and training does not see the profiler."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import warnings
import weakref
from dataclasses import dataclass
from io import BytesIO

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint
from transformers import ResNetConfig, ResNetForImageClassification

from asymcheck.device import profile
from asymcheck.device.blocks import find_blocks
from asymcheck.device.profile import Profiler

WIDTH = 8
_COMPILER_WARNS = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.second(torch.relu(self.first(x)))


class Tower(nn.Module):
    """Blocks between an embedding and a head; ``recompute`` is None or use_reentrant."""

    def __init__(self, recompute=None, blocks=3, block=Block):
        super().__init__()
        self.embedding = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 2)
        self.recompute = recompute

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            if self.recompute is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.recompute)
        return self.head(x)


class InPlace(nn.Module):
    """A residual block that overwrites the output of the one before, and its own."""

    def __init__(self, channels=4):
        super().__init__()
        self.convolution = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        x = self.relu(x)
        return self.norm(self.convolution(x)).add_(x)


class SmallResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.layers = nn.Sequential(*(nn.Sequential(InPlace(), InPlace()) for _ in range(3)))
        self.head = nn.Linear(4, 2)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.head(self.relu(self.layers(self.stem(x))).mean((2, 3)))


@dataclass
class Output:
    hidden: torch.Tensor
    more: dict
    name: str = "output"


class DataclassBlock(Block):
    def forward(self, x):
        x = x.hidden if isinstance(x, Output) else x
        return Output(super().forward(x), {"list": [x.sum(), 3, None]})


class DataclassTower(Tower):
    def __init__(self):
        super().__init__(block=DataclassBlock)

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.hidden)


class TiedTower(Tower):
    def forward(self, x):
        x = self.embedding(x)
        for block in [*self.blocks, *self.blocks]:
            x = block(x)
        return self.head(x)


class FrozenTower(Tower):
    def __init__(self):
        super().__init__()
        self.blocks[0].requires_grad_(requires_grad=False)
        self.embedding.requires_grad_(requires_grad=False)


def hf_resnet():
    return ResNetForImageClassification(
        ResNetConfig(embedding_size=4, hidden_sizes=[4, 8, 8], depths=[2, 1, 1], layer_type="basic")
    )


def loss_of(output):
    output = output if isinstance(output, torch.Tensor) else output.logits
    return output.square().mean()


def images(model):
    return isinstance(model, SmallResNet | ResNetForImageClassification)


def train(make, *, profiled=True, steps=4, micro_batches=1, call=lambda model: model, watch=None):
    """Losses of a training, its windows, and what was called back in the last step."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    called = []
    profiler = Profiler([model], called.append) if profiled else None
    forward = call(model)
    losses = []
    for _ in range(steps):
        if profiler is not None:
            called.clear()
            profiler.begin_step()
        for _ in range(micro_batches):
            x = torch.randn(2, 3, 16, 16) if images(model) else torch.randn(2, 4)
            loss = loss_of(forward(x))
            loss.backward()
            losses.append(loss.detach())
        if watch is not None:
            watch(profiler)
        if profiler is not None:
            profiler.end_step()
        optimizer.step()
        optimizer.zero_grad()
    if profiler is None:
        return torch.stack(losses), "", called
    in_last_step = list(called)
    profiler.begin_step()
    return torch.stack(losses), phases(profiler), in_last_step


def phases(profiler):
    return "".join(window.phase[0] for window in profiler.windows())


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (Tower, "f" + "fff" + "b" + "bbb"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), "f" + "ff" + "bb"),
        (lambda: Tower(recompute=False), "f" + "fff" + "b" + "bbb"),
        (lambda: Tower(recompute=True), "f" + "b"),
        (lambda: nn.Linear(4, 2), "f" + "f" + "b"),
        (SmallResNet, "f" + "fff" + "b" + "bbb"),
        (hf_resnet, "f" + "fff" + "b" + "bbb"),
        (DataclassTower, "f" + "fff" + "b" + "bbb"),
        (TiedTower, "f" + "ffffff" + "b" + "bbbbbb"),
        (FrozenTower, "f" + "fff" + "b" + "bb"),
    ],
    ids=[
        *("tower", "sequential", "recomputed", "recomputed-reentrant", "leaf", "in-place"),
        *("transformers-resnet", "dataclass", "tied", "frozen"),
    ],
)
def test_losses_are_bit_equal_and_the_windows_are_those_of_the_blocks(make, expected):
    plain, *_ = train(make, profiled=False)
    losses, seen, called = train(make)
    assert torch.equal(losses, plain)
    assert seen == expected
    assert called == list(range(len(expected)))


def test_all_micro_batches_between_boundary_and_fence_count():
    plain, *_ = train(Tower, profiled=False, micro_batches=3)
    losses, seen, _ = train(Tower, micro_batches=3)
    assert torch.equal(losses, plain)
    assert seen == "f" + 3 * ("fff" + "b" + "bbb")


def test_evaluation_and_calls_without_gradients_open_no_window():
    def evaluate(profiler):
        model = profiler._modules[0]
        before = profiler.position
        model.eval()
        model(torch.ones(1, 4)).sum().backward()  # in evaluation mode, with gradients
        with torch.no_grad():
            model.train()(torch.ones(1, 4))
        with torch.inference_mode():
            model(torch.ones(1, 4))
        assert profiler.position == before
        model.zero_grad()

    _, seen, _ = train(Tower, watch=evaluate)
    assert seen == "f" + "fff" + "b" + "bbb"


def test_without_a_hook_that_fires_the_whole_step_is_one_window():
    _, seen, _ = train(lambda: nn.Linear(4, 2), call=lambda model: model.forward)
    assert seen == "f"
    assert Profiler([]).windows() == ()


def count_graphs(how, *, profiled):
    """Graphs and breaks of a compiled training with the profiler made before or after."""
    torch._dynamo.reset()
    counters.clear()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    def inline(model):
        return torch.compile(model, backend=backend)

    def whole_step(model):
        return torch.compile(lambda x: model(x) * 2, backend=backend, fullgraph=True)

    def in_place(model):
        model.compile(backend=backend)
        return model

    def each_block(model):
        for block in model.blocks:
            block.compile(backend=backend, fullgraph=True)
        return model

    def compiled_already(compile_it):
        return lambda: compile_it(Tower())

    same = lambda model: model  # noqa: E731
    make, call = {
        "later": (Tower, inline),
        "as part of a function": (Tower, whole_step),
        "in place, later": (Tower, in_place),
        "each block, later": (Tower, each_block),
        "before": (compiled_already(inline), same),
        "in place, before": (compiled_already(in_place), same),
        "each block, before": (compiled_already(each_block), same),
    }[how]
    losses, seen, _ = train(make, profiled=profiled, call=call)
    found = len(graphs), dict(counters["graph_break"]), dict(counters["frames"])
    return losses, found, seen


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("later", "f" + "b"),
        ("as part of a function", "f"),
        ("in place, later", "f" + "b"),
        ("each block, later", "f" + "fff" + "b" + "bbb"),
        ("before", "f" + "f" + "b"),
        ("in place, before", "f" + "f" + "b"),
        ("each block, before", "f" + "fff" + "b" + "bbb"),
    ],
)
@_COMPILER_WARNS
def test_compiled_models_have_the_same_graphs_and_losses(how, expected):
    plain, graphs, _ = count_graphs(how, profiled=False)
    losses, found, seen = count_graphs(how, profiled=True)
    assert graphs[0] >= 1
    assert found == graphs
    assert torch.equal(losses, plain)
    assert seen == expected


def test_a_forward_that_fails_spoils_only_its_own_step():
    model = Tower()
    profiler = Profiler([model])
    for step in range(6):
        profiler.begin_step()
        if step == 3:
            with pytest.raises(RuntimeError):
                model(torch.ones(2, 5))
            with pytest.raises(RuntimeError):
                model.blocks[0](torch.ones(2, 5))
        loss_of(model(torch.ones(2, 4))).backward()
        profiler.end_step()
    profiler.begin_step()
    assert phases(profiler) == "f" + "fff" + "b" + "bbb"
    assert profiler.generation == 1


def test_two_models_share_the_windows_and_end_at_the_first_update():
    def run(*, profiled):
        torch.manual_seed(0)
        generator, critic = Tower(), nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (generator, critic)]
        profiler = Profiler([generator, critic]) if profiled else None
        losses = []
        for _ in range(4):
            if profiler is not None:
                profiler.begin_step()
            made = generator(torch.randn(2, 4))
            loss = critic(made.detach()).mean() - critic(torch.randn(2, 2)).mean()
            loss.backward()
            if profiler is not None:
                profiler.end_step()
            optimizers[1].step()
            second = -critic(made).mean()
            second.backward()
            optimizers[0].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            losses += [loss.detach(), second.detach()]
        if profiler is not None:
            profiler.begin_step()
        return torch.stack(losses), profiler

    losses, profiler = run(profiled=True)
    plain, _ = run(profiled=False)
    assert torch.equal(losses, plain)
    assert phases(profiler) == "f" + "fff" + "ff" + "ff" + "bbbb"


def test_a_gradient_counts_only_in_the_step_of_its_forward():
    model = Tower()
    profiler = Profiler([model])
    profiler.begin_step()
    loss = loss_of(model(torch.ones(2, 4)))
    profiler.end_step()
    assert profiler.position == -1
    profiler.begin_step()
    loss.backward(retain_graph=True)
    assert profiler.position == 0
    again = loss_of(model(torch.ones(2, 4)))
    again.backward(retain_graph=True)
    again.backward()
    assert profiler.position == 3 + 2 * 4
    profiler.begin_step()  # no update in between: nothing to pool
    assert len(profiler.windows()) == 4


def test_backward_on_another_thread_opens_windows_too():
    model, called = Tower(), []
    profiler = Profiler([model], lambda i: called.append((i, threading.get_ident())))
    profiler.begin_step()
    loss = loss_of(model(torch.ones(2, 4)))
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join(30)
    assert [i for i, _ in called] == list(range(8))
    assert {t for i, t in called if i > 3} == {thread.ident}
    assert profiler.position == 7


def test_a_copied_or_pickled_model_trains_alone():
    torch.manual_seed(0)
    model = Tower()
    untouched = copy.deepcopy(model)
    profiler = Profiler([model])
    pickled = pickle.dumps(model)
    assert b"asymcheck" not in pickled
    whole = BytesIO()
    torch.save(model, whole)
    whole.seek(0)
    profiler.begin_step()
    for other in (
        copy.deepcopy(model),
        pickle.loads(pickled),
        torch.load(whole, weights_only=False),
    ):
        loss_of(other(torch.ones(2, 4))).backward()
        assert profiler.position == 0
        assert torch.equal(other(torch.ones(2, 4)), untouched(torch.ones(2, 4)))
    assert model.state_dict().keys() == untouched.state_dict().keys()
    loss_of(model(torch.ones(2, 4))).backward()
    assert profiler.position == 7


def test_a_copy_compiles_to_the_same_graphs():
    def graphs_of(model):
        torch._dynamo.reset()
        graphs = []
        compiled = torch.compile(
            model, backend=lambda g, _: graphs.append(g) or g.forward, fullgraph=True
        )
        loss_of(compiled(torch.ones(2, 4))).backward()
        return len(graphs)

    model = Tower()
    plain = copy.deepcopy(model)
    profiler = Profiler([model])
    assert graphs_of(copy.deepcopy(model)) == graphs_of(plain) == 1
    profiler.close()


def hooks(model):
    return [h for m in model.modules() for h in (*m._forward_hooks, *m._forward_pre_hooks)]


def test_close_takes_every_hook_away():
    model, called = Tower(), []
    profiler = Profiler([model], called.append)
    assert len(hooks(model)) == 7
    profiler.begin_step()
    loss = loss_of(model(torch.ones(2, 4)))
    profiler.close()
    profiler.close()
    assert hooks(model) == []
    called.clear()
    loss.backward()
    profiler.begin_step()
    loss_of(model(torch.ones(2, 4))).backward()
    assert called == []
    assert profiler.position == -1


def test_a_profiler_that_is_let_go_leaves_nothing_behind_but_hooks_that_do_nothing():
    model = Tower()
    gc.disable()
    try:
        profiler = Profiler([model])
        profiler.begin_step()
        kept = loss_of(model(torch.ones(2, 4)))
        gone = weakref.ref(profiler)
        del profiler
        assert gone() is None  # without a collection: there are no cycles
    finally:
        gc.enable()
    kept.backward()
    loss_of(model(torch.ones(2, 4))).backward()


def test_a_kept_graph_does_not_keep_the_callback_alive():
    class Owner:
        def notice(self, _): ...

    owner, model = Owner(), Tower()
    gone = weakref.ref(owner)
    profiler = Profiler([model], owner.notice)
    profiler.begin_step()
    kept = loss_of(model(torch.ones(2, 4)))
    profiler.close()
    del owner, profiler
    gc.collect()
    assert gone() is None
    kept.backward()


def test_an_output_can_be_saved_without_a_warning_and_a_leaf_is_not_hooked():
    class Leaf(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self):
            return self.weight

    model = Leaf()
    profiler = Profiler([model])
    profiler.begin_step()
    assert not model()._backward_hooks
    tower = Tower()
    profiler = Profiler([tower])
    profiler.begin_step()
    torch.save(tower(torch.ones(2, 4)), BytesIO())
    assert profiler.position == 3


def test_functional_transforms_work_with_the_hooks():
    model = Tower()
    parameters = dict(model.named_parameters())

    def loss(values, x):
        return torch.func.functional_call(model, values, (x,)).square().mean()

    per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))
    plain = per_sample(parameters, torch.ones(3, 4))
    profiler = Profiler([model])
    profiler.begin_step()
    found = per_sample(parameters, torch.ones(3, 4))
    assert all(torch.equal(found[name], plain[name]) for name in plain)


@_COMPILER_WARNS
def test_compiled_autograd_makes_the_same_graphs():
    def run(*, profiled):
        torch._dynamo.reset()
        torch.manual_seed(0)
        graphs = []
        compiler = torch.compile(backend=lambda g, _: graphs.append(g) or g.forward)
        with torch._dynamo.compiled_autograd._enable(compiler):
            losses, *_ = train(lambda: Tower(blocks=1), profiled=profiled, steps=2)
        return losses, len(graphs)

    plain, graphs = run(profiled=False)
    losses, found = run(profiled=True)
    assert torch.equal(losses, plain)
    assert found == graphs >= 1


class Ticks:
    """A clock that tests move on by hand."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(profile, "perf_counter", lambda: self.now)


class Timed(nn.Module):
    """Takes so many seconds forward, and twice as many backward."""

    def __init__(self, clock, seconds):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.clock, self.seconds = clock, seconds

    def forward(self, x):
        self.clock.now += self.seconds
        inner = x * self.weight
        inner.register_hook(lambda _: self.pass_backward())
        return inner * 1

    def pass_backward(self):
        self.clock.now += 2 * self.seconds


def timed_step(profiler, model, clock, *, slower=1.0, copy_s=0.0):
    for block in model:
        block.seconds = block.usual * slower
    profiler.begin_step()
    start = profiler.instant()
    clock.now += 1.0
    x = (torch.ones(2, requires_grad=True) * 1).requires_grad_()
    model(x).sum().backward()
    profiler.end_step()
    clock.now += 0.5
    if copy_s:
        profiler.add_copy(start, start + copy_s, 1000)


def timed_model(clock):
    model = nn.Sequential(Timed(clock, 2.0), Timed(clock, 3.0))
    for block in model:
        block.usual = block.seconds
    return model


def durations(profiler):
    return [window.duration_s for window in profiler.windows()]


def test_durations_are_those_between_the_hooks(monkeypatch):
    clock = Ticks(monkeypatch)
    model = timed_model(clock)
    profiler = Profiler([model])
    for _ in range(3):
        timed_step(profiler, model, clock)
        assert profiler.position == -1
    profiler.add_collective(clock.now - 2.5, clock.now)
    profiler.begin_step()
    # What comes after the last gradient of a block, up to the fence, belongs to it.
    assert durations(profiler) == [1.0, 2.0, 3.0, 6.0, 4.0]
    assert profiler.step_s == 16.5
    profiler.close()


def test_copies_are_laid_over_the_windows_and_paired_with_windows_without(monkeypatch):
    clock = Ticks(monkeypatch)
    model = timed_model(clock)
    profiler = Profiler([model])
    for _ in range(3):
        timed_step(profiler, model, clock)
    timed_step(profiler, model, clock, slower=1.125, copy_s=4.0)
    timed_step(profiler, model, clock, slower=1.125, copy_s=4.0)
    profiler.begin_step()
    assert [(p.phase, p.with_s, p.without_s, p.copied_s) for p in profiler.take_pairs()] == [
        ("forward", 1.0, 1.0, 1.0),
        ("forward", 2.25, 2.0, 2.25),
        ("forward", 3.375, 3.0, 0.75),
    ]
    assert profiler.take_pairs() == []
    assert profiler.copy_bytes_per_s == 2000 / 8.0
    assert durations(profiler)[:3] == [1.0, 2.0, 3.0]  # those without a copy


def test_other_traffic_shortens_the_idle_time_of_its_windows(monkeypatch):
    clock = Ticks(monkeypatch)
    model = timed_model(clock)
    profiler = Profiler([model])
    timed_step(profiler, model, clock)
    profiler.add_collective(clock.now - 4.5 - 1.5, clock.now)  # beyond the fence too
    profiler.begin_step()
    assert [w.collective_s for w in profiler.windows()] == [0.0, 0.0, 0.0, 1.5, 4.0]


def test_the_bandwidth_is_that_of_copies_without_other_traffic_once_there_were_any(monkeypatch):
    clock = Ticks(monkeypatch)
    model = timed_model(clock)
    profiler = Profiler([model])
    timed_step(profiler, model, clock, copy_s=8.0)
    profiler.add_collective(clock.now - 16.5, clock.now)
    timed_step(profiler, model, clock, copy_s=2.0)
    assert profiler.copy_bytes_per_s == 1000 / 8.0
    profiler.begin_step()
    assert profiler.copy_bytes_per_s == 1000 / 2.0


def test_the_blocks_are_the_children_of_the_lists_that_hold_most_parameters():
    tower = Tower()
    assert find_blocks(tower) == list(tower.blocks)
    assert find_blocks(nn.Sequential(tower)) == list(tower.blocks)

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = Tower(), Tower()
            self.scales = nn.ModuleList([nn.BatchNorm1d(1)])

    both = Both()
    assert find_blocks(both) == [*both.encoder.blocks, *both.decoder.blocks]
    small = SmallResNet()
    assert find_blocks(small) == list(small.layers)
    nested = nn.Sequential(nn.ReLU(), nn.ModuleList([nn.ModuleList([nn.Linear(2, 2), Block()])]))
    assert find_blocks(nested) == list(nested[1][0])
    block = Block()
    assert find_blocks(block) == [block.first, block.second]
    assert find_blocks(nn.Identity())[0].__class__ is nn.Identity
    lazy = nn.Sequential(nn.LazyLinear(3), nn.LazyLinear(2))
    assert find_blocks(lazy) == list(lazy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer torch calls it deprecated
        scripted = torch.jit.script(nn.Linear(4, 4))
    assert find_blocks(scripted) == [scripted]


def test_models_that_contain_each_other_are_hooked_once():
    tower = Tower()
    whole = nn.Sequential(tower)
    profiler = Profiler([tower, whole, tower.blocks[0], nn.ReLU()])
    profiler.begin_step()
    loss_of(whole(torch.ones(2, 4))).backward()
    assert profiler.position == 7
    profiler.close()
    assert hooks(tower) == []
