"""Optimizers that no sharding computes correctly are refused, whatever the arguments are."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Stack, tokens
from torch import Tensor, nn
from twin import build, close, microbatch, step, update, whole

import zeroshard
from zeroshard import UsageError, ZeroRedundancyOptimizer


class Mine(torch.optim.LBFGS):
    pass


class Prodigy(torch.optim.Optimizer):
    """Stands for the library's, by its name."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr})


class Distributed(torch.optim.SGD):
    """Divides its work over ranks itself, as the Muon of modded-nanogpt does."""

    def _sum(self, value: Tensor) -> None:
        dist.all_reduce(value)


class ScheduleFree(torch.optim.SGD):
    """Moves the parameters between steps, as schedule-free optimizers do."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


class CountingBeside(torch.optim.SGD):
    """Keeps a state of no parameter."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr)
        self.state["count"] = 0


class Lookahead(torch.optim.Optimizer):
    """Wraps another optimizer, without the hooks of torch's class."""

    def __init__(self, parameters: Any, lr: float) -> None:
        self.base = torch.optim.SGD(parameters, lr)
        self.param_groups, self.state, self.defaults = self.base.param_groups, self.base.state, self.base.defaults


class Lamb(torch.optim.SGD):
    """Clips by the norm of all gradients inside `step`, as timm's and Apex's Lamb do."""

    def __init__(self, parameters: Any, lr: float, max_grad_norm: float | None = 1.0) -> None:
        super().__init__(parameters, lr=lr)
        self.defaults["max_grad_norm"] = max_grad_norm


REFUSED = {
    "one that communicates": (Distributed, "Distributed calls all_reduce.*for a single process"),
    "LBFGS": (torch.optim.LBFGS, "LBFGS uses all parameters at once"),
    "a subclass": (Mine, "Mine uses all parameters at once"),
    "SparseAdam": (torch.optim.SparseAdam, "SparseAdam needs sparse gradients"),
    "Prodigy": (Prodigy, "Prodigy estimates one step size from all parameters"),
}
NOT_SHARDED = {
    "clips by itself": (Lamb, r"Lamb\(max_grad_norm=1\.0\).*call clip_grad_norm_"),
    "states moved between steps": (ScheduleFree, r"ScheduleFree\.train\(\) and eval\(\) move the parameters"),
    "a state of no parameter": (CountingBeside, r"keeps states of no parameter in optimizer\.state \('count'\)"),
    "a wrapper": (Lookahead, "Lookahead has no hooks.*Pass shard.. the optimizer that it wraps"),
}


@pytest.mark.ranks(2)
@pytest.mark.quick(3)
@pytest.mark.parametrize("name", [*NOT_SHARDED, *REFUSED])
def test_optimizers_are_refused_by_name(rank: int, name: str) -> None:
    """The last ones by `ZeroRedundancyOptimizer`, too."""
    cls, message = {**REFUSED, **NOT_SHARDED}[name]
    for elementwise in (None, False, True):
        model = nn.Linear(4, 4)
        with pytest.raises(UsageError, match=message):
            zeroshard.shard(model, cls(model.parameters(), lr=0.1), elementwise=elementwise)
        if name in REFUSED:
            with pytest.raises(UsageError, match=message):
                ZeroRedundancyOptimizer(model.parameters(), cls, lr=0.1, elementwise=elementwise)  # type: ignore[arg-type]


def test_an_optimizer_that_could_clip_and_does_not_is_taken() -> None:
    build(2, make_optimizer=lambda parameters: Lamb(parameters, 0.1, None), elementwise=True)


class CountingLater(torch.optim.SGD):
    """Keeps a state of no parameter from its first step on, and overrides `zero_grad`."""

    def step(self, closure: Any = None) -> Any:
        self.state["count"] = 1
        return super().step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)


def test_what_a_class_does_beside_its_step_is_named() -> None:
    with pytest.warns(UserWarning, match=r"CountingLater\.zero_grad\(\) is not called"):
        model, sharded = build(1, make_optimizer=partial(CountingLater, lr=0.1), elementwise=True)
    with pytest.raises(UsageError, match=r"states of no parameter in optimizer\.state \('count'\)"):
        step(model, sharded, 0, 0)


class Ahead(torch.optim.SGD):
    """Moves the parameters, evaluates the closure there, and updates."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.add_(0.1)
        loss = closure()
        super().step()
        return loss


def test_a_closure_that_belongs_to_moved_parameters_is_refused() -> None:
    model, sharded = build(1, make_optimizer=partial(Ahead, lr=0.1), elementwise=True)
    with pytest.raises(UsageError, match=r"Ahead\.step moves the parameters and then evaluates its closure"):
        sharded.optimizer.step(lambda: model(*tokens(0, 0)).backward())


class ByNorm(torch.optim.SGD):
    """An optimizer of the user's own, which looks at whole parameters."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.grad = parameter.grad / parameter.grad.norm().clamp(min=1e-6)
        return super().step(closure)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", range(4))
def test_an_engine_gives_an_unknown_optimizer_whole_parameters(rank: int, stage: int) -> None:
    """Where the config allows it, as DeepSpeed asks; else the error names the key."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    plain = copy.deepcopy(model)
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
    with pytest.raises(UsageError, match='"zero_allow_untested_optimizer": true'):
        zeroshard.initialize(model=model, optimizer=ByNorm(model.parameters(), lr=0.1), config=config)
    config |= {"zero_allow_untested_optimizer": True, "gradient_clipping": 0.0}
    engine, *_ = zeroshard.initialize(model=model, optimizer=ByNorm(model.parameters(), lr=0.1), config=config)
    optimizer = ByNorm(plain.parameters(), lr=0.1)
    for _ in range(3):
        batch = torch.randn(4, 5)
        microbatch(engine, engine(batch).square().mean())
        update(plain(batch).square().mean(), optimizer)
    close(whole(engine.module), whole(plain))


def test_an_argument_that_contradicts_what_is_known_is_refused() -> None:
    """Updates of shards would differ from those of whole parameters, without an error."""
    model = Stack()
    for optimizer in (torch.optim.Adafactor(model.parameters()), torch.optim.Muon([model.head.weight])):
        with pytest.raises(UsageError, match=r"elementwise=True, but .* uses whole parameters"):
            zeroshard.shard(model, optimizer, 2, elementwise=True)


def test_a_refused_shard_leaves_several_optimizers_as_they_were() -> None:
    model = Stack()
    parameters = list(model.parameters())
    optimizers = [torch.optim.AdamW(parameters[:3]), torch.optim.AdamW(parameters[3:])]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    for optimizer in optimizers:
        optimizer.step()
    states, groups = [one.state for one in optimizers], [one.param_groups for one in optimizers]
    with pytest.raises(UsageError, match=r"the optimizer \(AdamW, AdamW\) has stepped already"):
        zeroshard.shard(model, optimizers, 2)
    assert all(one.state is state for one, state in zip(optimizers, states, strict=True))
    assert all(one.param_groups is group for one, group in zip(optimizers, groups, strict=True))
    assert len(optimizers[1].state_dict()["state"]) == len(parameters) - 3


def test_a_removed_name_says_what_to_do() -> None:
    with pytest.raises(UsageError, match=r"two optimizers instead.*torch\.optim\.Muon"):
        _ = zeroshard.MuonWithAdamW
