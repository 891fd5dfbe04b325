"""Modules that torch parametrizes in a constructor are the same ones under `sharded_init` and `zero.Init`, at stages 2 and 3."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import twin
from ranks import on_ranks
from torch import Tensor, nn
from torch.nn import utils
from torch.nn.utils import parametrizations, parametrize, prune
from twin import update

import zeroshard
from zeroshard import Policy

Change = Callable[[nn.Module], nn.Module]


class Halves(nn.Module):
    """A parametrization whose `right_inverse` changes values, so that torch sets the original to others."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2

    def right_inverse(self, y: Tensor) -> Tensor:
        return y / 2


class Bounds(nn.Module):
    """A parametrization without an inverse."""

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh()


class Pads(nn.Module):
    """A parametrization of another shape: torch's `set_` gives the parameter another one, too."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.pad(x, (0, 1))

    def right_inverse(self, y: Tensor) -> Tensor:
        return y[..., :-1].contiguous()


def registered(*made: Callable[[], nn.Module], name: str = "weight") -> Change:
    def change(module: nn.Module) -> nn.Module:
        for one in made:
            parametrize.register_parametrization(module, name, one())
        return module

    return change


def removed(change: Change, leave: bool = True) -> Change:
    return lambda module: parametrize.remove_parametrizations(change(module), "weight", leave_parametrized=leave)


CHANGES: dict[str, Change] = {
    "weight_norm": parametrizations.weight_norm,
    "weight_norm of another dim": partial(parametrizations.weight_norm, dim=1),
    "torch's old weight_norm": utils.weight_norm,
    "torch's old weight_norm, removed": lambda module: utils.remove_weight_norm(utils.weight_norm(module)),
    "spectral_norm": parametrizations.spectral_norm,
    "torch's old spectral_norm": utils.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "orthogonal, Cayley": partial(parametrizations.orthogonal, orthogonal_map="cayley"),
    "an inverse": registered(Halves),
    "two of them": registered(Halves, Halves),
    "no inverse": registered(Bounds),
    "another shape": registered(Pads),
    "of a bias": registered(Halves, name="bias"),
    "weight_norm, removed": removed(parametrizations.weight_norm),
    "an inverse, removed": removed(registered(Halves)),
    "an inverse, taken back": removed(registered(Halves), leave=False),
    "pruned": lambda module: prune.l1_unstructured(module, "weight", 0.5),
    "a copy": lambda module: (setattr(module, "weight", nn.Parameter(module.weight)), module)[1],  # type: ignore[arg-type]
    "a copy of data": lambda module: (setattr(module, "weight", nn.Parameter(module.weight.data)), module)[1],  # type: ignore[arg-type, union-attr]
    "a frozen copy": lambda module: (setattr(module, "bias", nn.Parameter(module.bias, False)), module)[1],  # type: ignore[arg-type]
}  # fmt: skip


class Early(nn.Module):
    """Changes a module before it is added."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.first = change(nn.Linear(4, 4))
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


class Late(Early):
    """Changes modules that are parts of the model, and of another module, already."""

    def __init__(self, change: Change) -> None:
        super().__init__(lambda module: module)
        self.more = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        change(self.first)
        change(self.more[1])

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.more(x))


class Gathers(Early):
    """Changes a module inside GatheredParameters, as transformers' wav2vec2 does."""

    def __init__(self, change: Change) -> None:
        super().__init__(lambda module: module)
        with zeroshard.unsharded([self.first.weight, self.first.bias], modifier_rank=0):
            self.first = change(self.first)


class Attributes:
    """Properties such as those of zero.Init's parameters."""

    @property
    def ds_note(self) -> int:
        return 3


CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "whole": nullcontext,
    "sharded_init": zeroshard.sharded_init,
    "zero.Init": partial(zeroshard.sharded_init, attributes=Attributes, detached_stay_cut=True),
}


def train(build: Callable[[], nn.Module], stage: int | None) -> list[Tensor]:
    model, optimizer = twin.plain_torch(partial(torch.optim.SGD, lr=0.1), build)
    if stage is not None:
        zeroshard.shard(model, optimizer, Policy.stage(stage), attributes=Attributes)
    losses = []
    for step in range(3):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(step))
        losses.append(update(model(x).square().mean(), optimizer))
    names = sorted(name for name, _ in model.named_parameters())
    return [*losses, torch.tensor([ord(letter) for letter in "".join(names)])]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model", [Early, Late, Gathers])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_in_a_constructor(change: str, model: type[Early]) -> None:
    def body(rank: int) -> list[str]:
        expected = train(lambda: model(CHANGES[change]), None)
        wrong = []
        for name, context in CONTEXTS.items():
            for stage in (2, 3):

                def build(context: Callable[[], AbstractContextManager[Any]] = context) -> nn.Module:
                    with context():
                        return model(CHANGES[change])

                found = train(build, stage)
                if not all(torch.allclose(one, other) for one, other in zip(expected, found, strict=True)):
                    wrong.append(f"{name}, stage {stage}: {found[:3]}, not {expected[:3]}")
        return wrong

    assert on_ranks(body, 2) == [[], []]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_parameter_of_another(rank: int, stage: int) -> None:
    """`nn.Parameter(parameter)` is ordinary, whatever the parameter is at that moment."""
    for attributes in (None, Attributes):
        model, sharded = twin.build(
            stage, make_model=lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), attributes=attributes
        )
        model(torch.ones(2, 4)).sum().backward()
        for _ in range(2):
            with zeroshard.unsharded(model):
                weight = model[0].weight
                made = nn.Parameter(weight, requires_grad=False)
                assert type(made) is nn.Parameter and not made.requires_grad
                assert torch.equal(made, weight) and made.data_ptr() == weight.data_ptr()
                assert type(weight) is not nn.Parameter or attributes is None
            sharded.optimizer.step()
