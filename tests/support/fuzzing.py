"""Owns a tiny model for two sides, sharded and plain PyTorch, and the actions of users: one method for each action.

Every action takes one small number, from which it chooses parameters, values and variants, the same on both sides. Its
results are compared bit by bit.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle
from twin import Boom

from zeroshard import Offload, Place, Policy, Precision, Residency

WIDTH, BATCHES = 4, 5


class Block(nn.Module):
    """A block that keeps a running mean of its inputs in fp32, and adds a tenth of the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen.lerp_(x.float().mean(0), 0.25)
        return x + torch.tanh(self.linear(x)) * self.scale + 0.1 * self.seen.to(x.dtype)


class Shift(nn.Module):
    """A module whose parameter is frozen, and in no optimizer, until a param group is added."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.full((WIDTH,), 0.25), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.offset


class Net(nn.Module):
    """Three blocks between two linear layers that share a weight; one parameter starts frozen; a block may be skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight
        self.blocks[1].scale.requires_grad_(False)
        self.shift = Shift()

    def forward(self, x: Tensor, skipped: int = -1, how: str = "once") -> Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            if number != skipped:
                x = HOW[how](block, x)
        return self.last(self.shift(x)).square().mean()


HOW: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "once": lambda block, x: block(x),
    "twice": lambda block, x: block(block(x)),
    "recomputed": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "recomputed in a backward of its own": lambda block, x: checkpoint(block, x, use_reentrant=True),
}
"""The ways to run a block."""


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, foreach=False),
}
STATES = {"sgd": ["momentum_buffer"], "adamw": ["exp_avg", "exp_avg_sq", "step"]}


@dataclass(frozen=True)
class Setting:
    """The sharding of the sharded side, and the options of both sides."""

    stage: int
    bf16: bool = False
    optimizer: str = "sgd"
    reshard_after_forward: bool = True
    prefetch_numel: int | None = None
    overlap: bool = True
    one_unit: bool = False
    two_optimizers: bool = False
    """One for matrices and one for the rest."""
    places: tuple[Place, Place, Place] = (Place.ACCELERATOR, Place.ACCELERATOR, Place.ACCELERATOR)
    """The places of parameters, gradients and optimizer states."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.bf16 else torch.float32

    def precision(self) -> Precision | None:
        """Return the dtypes. Below stage 2, fp32 sums over microbatches prevent another rounding before sums over ranks."""
        return Precision(torch.bfloat16, None if self.stage >= 2 else torch.float32) if self.bf16 else None

    def policy(self, folder: Path) -> Policy:
        """Return the policy. States on disk are in files in `folder`."""
        how = Offload(str(folder), buffer_numel=4096, block_nbytes=4096)
        parameters, gradients, optimizer = self.places
        return Policy(
            Residency(sharded=self.stage > 2, place=parameters),
            Residency(sharded=self.stage > 1, place=gradients),
            Residency(sharded=self.stage > 0, place=optimizer),
            self.reshard_after_forward, self.prefetch_numel, offload_parameters=how, offload_optimizer=how,
        )  # fmt: skip


class Side:
    """The actions of both sides that are plain PyTorch."""

    def __init__(self, setting: Setting, folder: Path) -> None:
        torch.manual_seed(0)
        self.setting, self.model, self.folder = setting, Net(), folder
        self.losses: list[Tensor] = []
        """The losses of graphs that have not run a backward yet, or may run one again."""
        self.alias: Tensor | None = None
        self.has_group = False
        """Whether a param group was added."""
        self.saved_with: dict[str, bool] = {}
        """Whether the param group existed at each save, by tag, and when the optimizer's state was kept ("kept")."""
        self.optimizer: Any
        """The optimizer, or all of them as one."""
        self.kept: Any = None

    @property
    def named(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.model.named_parameters())

    @property
    def listed(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that the optimizer has from the start, by name."""
        return [(fqn, parameter) for fqn, parameter in self.named if not fqn.startswith("shift")]

    @property
    def keeps_broken_writes(self) -> bool:
        """Whether this side writes before an exception leaves a block: the twin does not if the write will be lost."""
        return True

    def pick(self, number: int) -> tuple[str, nn.Parameter]:
        return self.listed[number % len(self.listed)]

    def optimizers(self, parameters: list[Tensor]) -> list[torch.optim.Optimizer]:
        """Make the setting's optimizers over `parameters`. If there are two, the second has half the learning rate."""
        make = OPTIMIZERS[self.setting.optimizer]
        if not self.setting.two_optimizers:
            return [make(parameters)]
        made = [make([p for p in parameters if (p.ndim == 2) is of_matrices]) for of_matrices in (True, False)]
        made[1].param_groups[0]["lr"] *= 0.5
        return made

    def batch(self, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(number)
        return torch.randn(3, WIDTH, generator=generator).to(self.setting.dtype)

    def value(self, parameter: Tensor, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 + number)
        return (torch.randn(parameter.shape, generator=generator) / 2).to(self.setting.dtype)

    def whole(self, modifier_rank: int | None = None) -> Any:
        raise NotImplementedError

    def accumulating(self) -> Any:
        raise NotImplementedError

    def nothing(self, number: int) -> None:
        """Do nothing. Failing sequences are shortened by replacing actions with this one."""

    # ------------------------------------------------------------------ forwards and backwards

    def forward(self, number: int) -> Any:
        loss = self.model(self.batch(number), skipped=number % 4 - 1)
        self.losses.append(loss)
        return loss.detach()

    def forward_part(self, number: int) -> Any:
        """Run the forward of one block or the head, without the root."""
        part = [*self.model.blocks, self.model.last][number % 4]
        loss = part(self.batch(number)).square().mean()
        self.losses.append(loss)
        return loss.detach()

    def evaluate(self, number: int) -> Any:
        with torch.no_grad():
            return self.model(self.batch(number))

    def broken_forward(self, number: int) -> Any:
        handle = self.model.blocks[number % 3].register_forward_hook(_raise)
        try:
            return self.model(self.batch(number)).detach()
        finally:
            handle.remove()

    def backward(self, number: int) -> Any:
        """Run the backward of the newest or the oldest graph. One graph in three is kept for another backward."""
        if not self.losses:
            self.forward(number)
        loss = self.losses.pop(0 if number % 2 else -1)
        if number % 3 == 2:
            self.losses.append(loss)
        loss.backward(retain_graph=number % 3 == 2)

    def train(self, number: int) -> Any:
        """Run a forward and its backward, as a loop does."""
        seen = self.forward(number)
        self.losses.pop().backward()
        return seen

    def train_otherwise(self, number: int) -> Any:
        """Run blocks twice, or recompute them in the backward."""
        loss = self.model(self.batch(number), how=[*HOW][number % 3 + 1])
        loss.backward()
        return loss.detach()

    def train_with_penalty(self, number: int) -> Any:
        """Add the gradient of the inputs to the loss: the backward runs through another one."""
        x = self.batch(number).requires_grad_()
        loss = self.model(x)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + gradient.square().mean()).backward()
        return loss.detach()

    def train_on_two(self, number: int) -> Any:
        """Add the losses of two forwards, of which a third one's graph is dropped."""
        self.model(self.batch(number))
        loss = self.model(self.batch(number + 1)) + self.model(self.batch(number + 2), skipped=number % 4 - 1)
        loss.backward()
        return loss.detach()

    def accumulate(self, number: int) -> Any:
        with self.accumulating():
            return self.train(number)

    def hooked(self, number: int) -> Any:
        """Train with a hook on a gradient."""
        return self._train_with(number, lambda parameter: parameter.register_hook(lambda gradient: gradient * 0.5))

    def hooked_late(self, number: int) -> Any:
        """Train with a hook after the accumulation of a gradient."""
        return self._train_with(number, lambda parameter: parameter.register_post_accumulate_grad_hook(_halve))

    def _train_with(self, number: int, register: Callable[[nn.Parameter], RemovableHandle]) -> Any:
        _, parameter = self.pick(number)
        if not parameter.requires_grad:
            return self.train(number)
        handle = register(parameter)
        try:
            return self.train(number)
        finally:
            handle.remove()

    def in_thread(self, number: int) -> Any:
        """Run another action in a second thread, while this thread waits."""
        names = ["train", "evaluate", "step", "read", "clip", "deepcopy"]
        seen: list[Any] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                seen.append(getattr(self, names[number % len(names)])(number))
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return seen[0]

    def keep_alias(self, number: int) -> None:
        """Keep a view of an unsharded parameter that stays on the accelerator."""
        if self.setting.stage < 3 and self.setting.places[0] is Place.ACCELERATOR:
            self.alias = self.pick(number)[1].detach()

    def read_alias(self, number: int) -> Any:
        """Return the view's values, which are current after each step if ranks of one host do not shard parameters."""
        return None if self.alias is None else self.alias.clone()

    def broken_backward(self, number: int) -> Any:
        loss = self.model(self.batch(number))
        _, parameter = self.pick(number)
        if not parameter.requires_grad:
            return
        handle = parameter.register_hook(_raise)
        try:
            loss.backward()
        finally:
            handle.remove()

    def broken_loss(self, number: int) -> Any:
        """Run a backward that fails before it computes any gradient."""
        loss = self.model(self.batch(number))
        if loss.requires_grad:
            loss.register_hook(_raise)
            loss.backward()

    def look(self, number: int) -> Any:
        """Return gradients that are not part of a step."""
        x = self.batch(number).requires_grad_()
        _, parameter = self.pick(number)
        wanted = [x, parameter] if parameter.requires_grad else [x]
        return [g.detach().clone() for g in torch.autograd.grad(self.model(x), wanted)]

    def inside(self, number: int) -> Any:
        """Run another action while all parameters are unsharded."""
        names = ["train", "evaluate", "forward", "backward", "step", "clip", "zero_grad", "deepcopy", "offload", "save"]
        names += ["write_inside", "swap"]
        with self.whole():
            return getattr(self, names[number % len(names)])(number)

    # ------------------------------------------------------------------ the optimizer

    def change_lr(self, number: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.5 + number / 10

    def keep_optimizer(self, number: int) -> None:
        self.kept = copy.deepcopy(self.optimizer.state_dict())
        self.saved_with["kept"] = self.has_group

    def restore_optimizer(self, number: int) -> None:
        if self.kept is not None and self.saved_with["kept"] == self.has_group:
            self.optimizer.load_state_dict(self.kept)

    # ------------------------------------------------------------------ writes

    def write(self, number: int) -> None:
        _, parameter = self.pick(number)
        with torch.no_grad():
            parameter.copy_(self.value(parameter, number))

    def write_new_data(self, number: int) -> None:
        _, parameter = self.pick(number)
        parameter.data = self.value(parameter, number)
        self.alias = None  # it shows the old values
        self.losses.clear()  # plain PyTorch cannot tell with which of the two values their graphs were made

    def write_to_data(self, number: int) -> None:
        """Write through `.data`, except at stage 3, where a write to an unsharded parameter leaves no trace: see `write_inside`."""
        if self.setting.stage == 3:
            return
        _, parameter = self.pick(number)
        parameter.data.copy_(self.value(parameter, number))

    def write_state_dict(self, number: int) -> None:
        _, parameter = self.pick(number)
        state = {fqn: value.clone() for fqn, value in self.model.state_dict().items()}
        fqn = self.pick(number)[0]
        state[fqn] = self.value(parameter, number)
        if fqn == "first.weight":
            state["last.weight"] = state[fqn]
        self.model.load_state_dict(state)

    def write_inside(self, number: int) -> None:
        _, parameter = self.pick(number)
        self.losses.clear()  # what a graph or an alias keeps is not overwritten with other `data`: that is refused
        self.alias = None
        with self.whole(modifier_rank=0), torch.no_grad():
            if number % 3 == 0:
                parameter.data = self.value(parameter, number)
            else:
                (parameter.data if number % 3 == 1 else parameter).copy_(self.value(parameter, number))

    def swap(self, number: int) -> Any:
        """Evaluate with other values of a parameter, and give it its own again."""
        _, parameter = self.pick(number)
        self.losses.clear()
        self.alias = None
        with self.whole(modifier_rank=0), torch.no_grad():
            own, other = parameter.data, self.value(parameter, number)
            if number % 3 == 0:
                parameter.data = other
            else:
                own = own.clone()
                (parameter.data if number % 3 == 1 else parameter).copy_(other)
            try:
                return self.model(self.batch(number))
            finally:  # the forward may be refused
                if number % 3 == 0:
                    parameter.data = own
                else:
                    (parameter.data if number % 3 == 1 else parameter).copy_(own)

    def broken_write_inside(self, number: int) -> None:
        """Raise after a write. If parameters are sharded, it is lost."""
        _, parameter = self.pick(number)
        self.losses.clear()
        with self.whole(modifier_rank=0), torch.no_grad():
            with self.whole():
                pass
            if self.keeps_broken_writes:
                parameter.copy_(self.value(parameter, number))
            raise Boom

    def set_grad(self, number: int) -> None:
        _, parameter = self.pick(number)
        parameter.grad = self.value(parameter, number)

    def drop_grads(self, number: int) -> None:
        """Clear the model's gradients, as loops without an optimizer do."""
        self.model.zero_grad(set_to_none=self.drops(number))

    def graded(self) -> list[Tensor]:
        """Return the parameters whose `grad` has the gradients."""
        return [parameter for _, parameter in self.named]

    def halve_grads(self, number: int) -> None:
        for parameter in self.graded():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)

    def clamp_grads(self, number: int) -> None:
        torch.nn.utils.clip_grad_value_(self.graded(), 0.01 * (number + 1))

    def drops(self, number: int) -> bool:
        """Return whether `drop_grads` removes gradients, or sets them to zero."""
        return bool(number % 4)

    def drop_one(self, number: int) -> None:
        """Leave one parameter out of the step."""
        self.pick(number)[1].grad = None

    def toggle(self, number: int) -> None:
        _, parameter = self.pick(number)
        parameter.requires_grad_(not parameter.requires_grad)

    # ------------------------------------------------------------------ readers

    def read(self, number: int) -> Any:
        with self.whole():
            parameters = {fqn: p.detach().clone() for fqn, p in self.model.named_parameters()}
        return parameters, {fqn: buffer.clone() for fqn, buffer in self.model.named_buffers()}

    def read_state_dict(self, number: int) -> Any:
        return {fqn: value.clone() for fqn, value in self.model.state_dict().items()}

    def read_one(self, number: int) -> Any:
        return self.pick(number)[1].detach().clone()

    def deepcopy(self, number: int) -> Any:
        copied = copy.deepcopy(self.model)
        values = {fqn: p.detach() for fqn, p in copied.named_parameters()}
        loss = copied(self.batch(number))
        if loss.requires_grad:
            loss.backward()
        flags = torch.tensor([p.requires_grad for p in copied.parameters()])
        gradients = {fqn: p.grad for fqn, p in copied.named_parameters() if p.grad is not None}
        return values, loss.detach(), flags, gradients


def _halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def _raise(*_: Any) -> None:
    raise Boom


ACTIONS = [
    "train", "train", "accumulate", "step", "step", "zero_grad", "zero_grad", "clip", "forward", "backward", "forward_part",
    "evaluate", "broken_forward", "broken_backward", "broken_loss", "look", "inside", "write", "write_new_data",
    "write_to_data", "write_state_dict", "write_inside", "swap", "broken_write_inside", "write_inside_unasked", "set_grad",
    "drop_grads", "drop_one", "toggle",
    "update_trainable", "update_trainable", "change_lr", "save", "load", "keep_optimizer", "restore_optimizer", "offload",
    "reload", "reload", "read", "read_state_dict", "read_one", "deepcopy", "read_states", "read_gradients", "set_state",
    "set_mean_gradient", "hooked", "hooked_late", "in_thread", "keep_alias", "read_alias", "add_group", "surgery",
    "step_one", "step_one", "zero_one", "zero_one", "train_otherwise", "train_with_penalty", "train_on_two", "halve_grads",
    "clamp_grads", "clip_by_torch",
]  # fmt: skip
