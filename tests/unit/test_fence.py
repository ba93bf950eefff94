"""The hook before updates: it concerns whoever may change what is being copied, and no one else."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from asymcheck.device.fence import UpdateHook
from asymcheck.testing.children import Child, Say

SIZE = 64


class Watching:
    """Watches some tensors until the first fence, and notes it."""

    def __init__(self, *tensors: torch.Tensor, own: tuple[torch.optim.Optimizer, ...] = ()) -> None:
        self._alive = tensors  # else another tensor may get the same memory
        self.storages = frozenset(t.untyped_storage().data_ptr() for t in tensors)
        self.events: list[str] = []
        self.hook = UpdateHook(lambda: self.storages, self.fence, own)

    def fence(self) -> None:
        if self.storages:  # once is enough, as it is in the library
            self.events.append("fence")
        self.storages = frozenset()


@pytest.fixture
def watch() -> Iterator[Callable[..., Watching]]:
    made: list[Watching] = []

    def make(*tensors: torch.Tensor, own: tuple[torch.optim.Optimizer, ...] = ()) -> Watching:
        made.append(Watching(*tensors, own=own))
        return made[-1]

    yield make
    for one in made:
        one.hook.close()


def _param() -> nn.Parameter:
    param = nn.Parameter(torch.randn(SIZE))
    param.grad = torch.ones(SIZE)
    return param


# --- whom it concerns -------------------------------------------------------


def test_an_optimizer_of_a_watched_parameter_waits_once(watch: Callable[..., Watching]) -> None:
    param = _param()
    watching = watch(param)
    optimizer = torch.optim.SGD([_param(), param], lr=0.1)
    optimizer.step()
    optimizer.step()
    assert watching.events == ["fence"]


def test_an_optimizer_of_other_memory_does_not_wait(watch: Callable[..., Watching]) -> None:
    watching = watch(_param())
    torch.optim.SGD([_param()], lr=0.1).step()
    assert watching.events == []


def test_a_view_of_watched_memory_counts(watch: Callable[..., Watching]) -> None:
    base = torch.randn(2, SIZE)
    watching = watch(base[0])
    view = nn.Parameter(base[1])
    view.grad = torch.ones(SIZE)
    torch.optim.SGD([view], lr=0.1).step()
    assert watching.events == ["fence"]


def test_watched_optimizer_state_counts_though_the_parameter_is_not_watched(
    watch: Callable[..., Watching],
) -> None:
    param = _param()
    optimizer = torch.optim.AdamW([param])
    optimizer.step()
    watching = watch(optimizer.state[param]["exp_avg_sq"])
    optimizer.step()
    assert watching.events == ["fence"]


def test_state_deep_in_lists_counts(watch: Callable[..., Watching]) -> None:
    param = _param()
    optimizer = torch.optim.LBFGS([param], history_size=4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (param - 3).pow(4).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    (state,) = optimizer.state.values()
    watching = watch(state["old_dirs"][0])
    optimizer.step(closure)
    assert watching.events == ["fence"]


def test_an_own_optimizer_counts_though_its_parameters_moved_elsewhere(
    watch: Callable[..., Watching],
) -> None:
    """After ``param.data = …`` nothing of it lies in watched memory, yet its version counter
    goes on counting: without a fence a good copy would look torn.
    """
    param = _param()
    optimizer = torch.optim.SGD([param], lr=0.1)
    watching = watch(param, own=(optimizer,))
    param.data = torch.zeros(SIZE)
    optimizer.step()
    assert watching.events == ["fence"]


class Odd(torch.optim.Optimizer):
    """Keeps state of every shape, as optimizers of other makers do."""

    def __init__(self, params: Any, state: Any) -> None:
        super().__init__(params, {})
        self.odd = state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param] = self.odd


@pytest.mark.parametrize(
    "state",
    [
        torch.ones(3),
        7,
        None,
        [1, "a"],
        {"x": None, "deep": [{"y": (1, 2)}]},
        {"sparse": torch.eye(3).to_sparse()},
    ],
)
def test_odd_state_disturbs_no_update(watch: Callable[..., Watching], state: object) -> None:
    optimizer = Odd([_param()], state)
    optimizer.step()
    watching = watch(_param())
    optimizer.step()
    assert watching.events == []


def test_a_loop_in_the_state_ends(watch: Callable[..., Watching]) -> None:
    loop: dict[str, object] = {}
    loop["self"] = loop
    optimizer = Odd([_param()], loop)
    optimizer.step()
    watch(_param())
    optimizer.step()


def test_a_hook_that_was_closed_is_not_called_and_leaves_nothing_behind(
    watch: Callable[..., Watching],
) -> None:
    param = _param()
    watching = watch(param)
    watching.hook.close()
    watching.hook.close()
    torch.optim.SGD([param], lr=0.1).step()
    assert watching.events == []
    from torch.optim.optimizer import _global_optimizer_pre_hooks

    gc.collect()
    assert not [h for h in _global_optimizer_pre_hooks.values() if "asymcheck" in repr(h)]


def test_a_forked_child_updates_its_own_copy_without_waiting(
    watch: Callable[..., Watching],
) -> None:
    """The child has the memory and the hook, and no thread that would ever end the copy."""
    torch.set_num_threads(1)
    param = _param()
    watching = watch(param)

    def work(say: Say) -> None:
        torch.optim.SGD([param], lr=0.1).step()
        say(watching.events)

    assert Child(work).wait().check() == [[]]


# --- closures ---------------------------------------------------------------


def _with_closure(watching: Watching, param: nn.Parameter, *, keyword: bool) -> list[str]:
    optimizer = torch.optim.SGD([param], lr=0.1)

    def closure() -> torch.Tensor:
        watching.events.append("begin")
        optimizer.zero_grad()
        loss = param.sum()
        loss.backward()
        watching.events.append("end")
        return loss

    before = param.detach().clone()
    loss = optimizer.step(closure=closure) if keyword else optimizer.step(closure)
    assert float(loss.detach()) == pytest.approx(float(before.sum()))
    assert not torch.equal(before, param)
    return watching.events


@pytest.mark.parametrize("keyword", [False, True])
def test_torchs_own_optimizers_wait_after_the_first_return_of_their_closure(
    watch: Callable[..., Watching], keyword: bool
) -> None:
    param = _param()
    assert _with_closure(watch(param), param, keyword=keyword) == ["begin", "end", "fence"]


def test_an_optimizer_that_calls_its_closure_again_waits_once(
    watch: Callable[..., Watching],
) -> None:
    param = _param()
    watching = watch(param)
    optimizer = torch.optim.LBFGS([param], max_iter=3)

    def closure() -> torch.Tensor:
        watching.events.append("closure")
        optimizer.zero_grad()
        loss = (param - 3).pow(2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert watching.events[:2] == ["closure", "fence"]
    assert watching.events.count("fence") == 1
    assert watching.events.count("closure") > 1


@pytest.mark.parametrize("base", [torch.optim.Optimizer, torch.optim.SGD])
def test_an_optimizer_of_another_maker_waits_before_its_closure(
    watch: Callable[..., Watching], base: type[torch.optim.Optimizer]
) -> None:
    """Who knows what it does before it calls the closure."""
    param = _param()
    watching = watch(param)

    class Foreign(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__([param], {"lr": 0.1} if base is torch.optim.Optimizer else 0.1)

        def step(self, closure: Any) -> Any:
            return closure()

    Foreign().step(lambda: watching.events.append("closure"))
    assert watching.events == ["fence", "closure"]


def test_a_package_that_is_only_called_like_torchs_counts_as_another_maker(
    watch: Callable[..., Watching],
) -> None:
    param = _param()
    watching = watch(param)

    class Foreign(torch.optim.Optimizer):
        __module__ = "torch.optimizers_of_somebody"

        def step(self, closure: Any) -> Any:
            return closure()

    Foreign([param], {}).step(lambda: watching.events.append("closure"))
    assert watching.events == ["fence", "closure"]


OWN = sorted(
    (
        kind
        for kind in vars(torch.optim).values()
        if isinstance(kind, type)
        and issubclass(kind, torch.optim.Optimizer)
        and kind is not torch.optim.Optimizer
    ),
    key=lambda kind: kind.__name__,
)


@pytest.mark.parametrize("kind", OWN, ids=lambda kind: kind.__name__)
def test_no_optimizer_of_torch_changes_anything_before_its_closure_returned(
    kind: type[torch.optim.Optimizer],
) -> None:
    """What the rule of the first return stands on, looked at in the torch that is installed."""
    sparse = kind is torch.optim.SparseAdam
    param = nn.Parameter(torch.randn(SIZE, SIZE))
    options = {torch.optim.SGD: {"lr": 0.01}, torch.optim.LBFGS: {"lr": 0.01, "max_iter": 2}}
    optimizer = kind([param], **options.get(kind, {}))  # type: ignore[arg-type]
    seen: list[list[torch.Tensor]] = []

    def tensors() -> list[torch.Tensor]:
        found = [param.detach().clone()]
        for value in optimizer.state.get(param, {}).values():
            values = value if isinstance(value, list) else [value]
            found += [v.detach().clone() for v in values if isinstance(v, torch.Tensor)]
        return found

    def closure() -> torch.Tensor:
        seen.append(tensors())
        loss = (param - 3).pow(2).sum()
        param.grad = (2 * (param - 3)).detach()
        if sparse:
            param.grad = param.grad.to_sparse()
        return loss

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            before = tensors()
            seen.clear()
            optimizer.step(closure)
            assert len(seen[0]) == len(before)
            assert all(torch.equal(a, b) for a, b in zip(before, seen[0], strict=True))
    assert not torch.equal(before[0], param)


def test_a_closure_that_raises_leaves_the_copy_to_go_on(watch: Callable[..., Watching]) -> None:
    param = _param()
    watching = watch(param)
    optimizer = torch.optim.SGD([param], lr=0.1)

    def closure() -> float:
        raise RuntimeError("out of data")

    with pytest.raises(RuntimeError, match="out of data"):
        optimizer.step(closure)
    assert watching.events == []
    optimizer.step()
    assert watching.events == ["fence"]


# --- compiled updates -------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_update_waits_each_time_it_must_and_not_as_it_was_traced(
    watch: Callable[..., Watching], backend: str
) -> None:
    param = _param()
    optimizer = torch.optim.SGD([param], lr=0.1)
    watching = watch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = torch.compile(optimizer.step, backend=backend)
        step()  # traced while nothing is watched
        for _ in range(2):
            watching.storages = frozenset([param.untyped_storage().data_ptr()])
            step()
    assert watching.events == ["fence", "fence"]
