"""Random sequences of user actions on `ZeroRedundancyOptimizer` give the results of torch's own optimizers, to the last bit."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import Tensor, nn

from zeroshard import ZeroRedundancyOptimizer

SHAPES = [(3, 4), (7,), (1,), (5, 5), (6,), (2, 3, 2), ()]
CLASSES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.05}),
    "Adam": (torch.optim.Adam, {"lr": 0.03, "amsgrad": True}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "centered": True}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.01}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.05}),
}


class Side:
    """Parameters with an optimizer, ours or torch's, and the actions of users: one method for each. All ranks do the same."""

    def __init__(self, choice: random.Random, *, is_ours: bool) -> None:
        self.is_ours = is_ours
        self.dtype = torch.bfloat16 if choice.random() < 0.3 else torch.float32
        self.parameters = [nn.Parameter(self.values(shape, number)) for number, shape in enumerate(SHAPES)]
        self.parameters[2].requires_grad_(False)
        self.flat = choice.random() < 0.5
        self.cls, self.options = CLASSES[choice.choice(list(CLASSES))]
        self.count = 4
        """The number of parameters that the optimizer has; others are added later."""
        first: Any = self.parameters[:4]
        if choice.random() < 0.5:
            first = [{"params": self.parameters[:2]}, {"params": self.parameters[2:4], "lr": 0.02}]
        self.optimizer = self.made(first)
        self.kept: Any = None

    def made(self, parameters: Any) -> torch.optim.Optimizer:
        if self.is_ours:
            options = {"parameters_as_bucket_view": self.flat, "foreach": False, **self.options}
            return ZeroRedundancyOptimizer(parameters, optimizer_class=self.cls, **options)
        return self.cls(parameters, foreach=False, **self.options)  # type: ignore[call-arg]

    def values(self, shape: tuple[int, ...], number: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(number)).to(self.dtype)

    def picked(self, number: int) -> nn.Parameter:
        return self.parameters[number % len(self.parameters)]

    def set_gradients(self, number: int) -> None:
        for index, parameter in enumerate(self.parameters):
            if parameter.requires_grad and (number + index) % 3:
                parameter.grad = self.values(SHAPES[index], 100 * number + index)

    def add_gradients(self, number: int) -> None:
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                parameter.grad.add_(self.values(SHAPES[index], 100 * number + index))

    def clip(self, number: int) -> None:
        if any(parameter.grad is not None for parameter in self.parameters):  # torch refuses to clip nothing
            torch.nn.utils.clip_grad_value_(self.parameters, 0.05 * (number + 1))

    def step(self, number: int) -> None:
        self.optimizer.step()

    def step_with_closure(self, number: int) -> float:
        def closure() -> float:
            self.set_gradients(number)
            return 1.5

        loss = self.optimizer.step(closure)
        assert loss is not None
        return loss

    def zero_grad(self, number: int) -> None:
        self.optimizer.zero_grad(set_to_none=bool(number % 2))

    def change_lr(self, number: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.5 + number / 10

    def add_group(self, number: int) -> None:
        if self.count < len(self.parameters):
            self.optimizer.add_param_group({"params": [self.parameters[self.count]], "lr": 0.01 * (number + 1)})
            self.count += 1

    def write(self, number: int) -> None:
        with torch.no_grad():
            self.picked(number).copy_(self.values(self.picked(number).shape, number))

    def write_new_data(self, number: int) -> None:
        self.picked(number).data = self.values(self.picked(number).shape, number)

    def toggle(self, number: int) -> None:
        parameter = self.picked(number)
        parameter.requires_grad_(not parameter.requires_grad)
        if not parameter.requires_grad:
            parameter.grad = None

    def state_dict(self) -> Any:
        """Return the whole state dict, on every rank."""
        if not self.is_ours:
            return copy.deepcopy(self.optimizer.state_dict())
        assert isinstance(self.optimizer, ZeroRedundancyOptimizer)
        self.optimizer.consolidate_state_dict(to=0)
        sent = [self.optimizer.state_dict() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(sent, 0)
        return sent[0]

    def keep(self, number: int) -> None:
        self.kept = self.state_dict(), self.count

    def load(self, number: int) -> None:
        if self.kept is not None and self.kept[1] == self.count:
            self.optimizer.load_state_dict(copy.deepcopy(self.kept[0]))

    def make_again(self, number: int) -> None:
        """Replace the optimizer with another one that has its states."""
        kept = self.state_dict()
        groups = []
        start = 0
        for group in self.optimizer.param_groups:
            stop = start + len(group["params"])
            groups.append({"params": self.parameters[start:stop]})
            start = stop
        self.optimizer = self.made(groups)
        self.optimizer.load_state_dict(kept)

    def read(self, number: int) -> Any:
        return [parameter.detach().clone() for parameter in self.parameters]

    def read_states(self, number: int) -> Any:
        found = self.state_dict()
        return found["state"], [(group["lr"], group["params"]) for group in found["param_groups"]]


ACTIONS = [
    "set_gradients", "set_gradients", "set_gradients", "add_gradients", "step", "step", "step", "step_with_closure", "zero_grad",
    "clip", "change_lr", "add_group", "write", "write_new_data", "toggle", "keep", "load", "make_again", "read", "read_states",
]  # fmt: skip


def run(rank: int, seeds: range) -> None:
    for seed in seeds:
        choice = random.Random(seed)
        actions = [(choice.choice(ACTIONS), choice.randrange(12)) for _ in range(25)]
        ours, theirs = (Side(random.Random(seed), is_ours=is_ours) for is_ours in (True, False))
        for action, number in [*actions, ("read", 0), ("read_states", 0)]:
            torch.testing.assert_close(
                getattr(ours, action)(number), getattr(theirs, action)(number), rtol=0, atol=0, equal_nan=True,
                msg=lambda text: f"{action} {number} in seed {seed}: {text}",  # noqa: B023
            )  # fmt: skip
        assert ours.state_dict()["param_groups"] == theirs.state_dict()["param_groups"], f"seed {seed}"


@pytest.mark.parametrize("ranks", [1, 2])
def test_whatever_users_do_is_as_torch_does_it(ranks: int) -> None:
    on_ranks(run, ranks, range(20))


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 3])
def test_whatever_users_do_at_length(ranks: int, times: int) -> None:
    on_ranks(run, ranks, range(100, 100 + 100 * times))
