"""Owns a tiny model with two sides, sharded and plain PyTorch, and what a user may do to either: one method for each action.

Every action takes one small number, from which it chooses parameters, values and variants, the same on both sides. What it
returns
is compared bit by bit.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zeroshard
from zeroshard import Offload, Place, Policy, Precision
from zeroshard.gradients.norm import clip_coefficient

WIDTH, BATCHES = 4, 5


class Boom(Exception):
    """What the user's own code raises in the middle of things."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) * self.scale


class Net(nn.Module):
    """Three blocks between two linear layers that share a weight; one parameter starts frozen; a block may be skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight
        self.blocks[1].scale.requires_grad_(False)

    def forward(self, x: Tensor, skipped: int = -1) -> Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            if number != skipped:
                x = block(x)
        return self.last(x).square().mean()


def make_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False)


def make_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05, foreach=False)


OPTIMIZERS = {"sgd": make_sgd, "adamw": make_adamw}
STATES = {"sgd": ["momentum_buffer"], "adamw": ["exp_avg", "exp_avg_sq", "step"]}


@dataclass(frozen=True)
class Setting:
    """How the sharded side is sharded, and what both are."""

    stage: int
    bf16: bool = False
    optimizer: str = "sgd"
    reshard_after_forward: bool = True
    prefetch_numel: int | None = None
    overlap: bool = True
    one_unit: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.bf16 else torch.float32

    def precision(self) -> Precision | None:
        """In 16 bits, sums over microbatches that come before those over ranks would be rounded once more: not so in fp32."""
        return Precision(torch.bfloat16, None if self.stage >= 2 else torch.float32) if self.bf16 else None

    def policy(self) -> Policy:
        preset = Policy.stage(self.stage, reshard_after_forward=self.reshard_after_forward)
        return Policy(
            preset.parameters, preset.gradients, preset.optimizer, self.reshard_after_forward, self.prefetch_numel
        )


class Side:
    """What both sides do alike: all that is plain PyTorch."""

    def __init__(self, setting: Setting, folder: Path) -> None:
        torch.manual_seed(0)
        self.setting, self.model, self.folder = setting, Net(), folder
        self.losses: list[Tensor] = []
        """Of graphs whose backward is still to come."""

    @property
    def named(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.model.named_parameters())

    def pick(self, number: int) -> tuple[str, nn.Parameter]:
        return self.named[number % len(self.named)]

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

    # ------------------------------------------------------------------ forwards and backwards

    def forward(self, number: int) -> Any:
        loss = self.model(self.batch(number), skipped=number % 4 - 1)
        self.losses.append(loss)
        return loss.detach()

    def forward_part(self, number: int) -> Any:
        """Without the root: one block, or the head."""
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
        """The newest graph's, or the oldest one's; one in three is run again later."""
        if not self.losses:
            self.forward(number)
        loss = self.losses.pop(0 if number % 2 else -1)
        if number % 3 == 2:
            self.losses.append(loss)
        loss.backward(retain_graph=number % 3 == 2)

    def train(self, number: int) -> Any:
        """What a loop does: forward and backward."""
        seen = self.forward(number)
        self.losses.pop().backward()
        return seen

    def accumulate(self, number: int) -> Any:
        with self.accumulating():
            return self.train(number)

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

    def look(self, number: int) -> Any:
        """Gradients that are no part of a step."""
        x = self.batch(number).requires_grad_()
        _, parameter = self.pick(number)
        wanted = [x, parameter] if parameter.requires_grad else [x]
        return [g.detach().clone() for g in torch.autograd.grad(self.model(x), wanted)]

    def inside(self, number: int) -> Any:
        """Something else, where all parameters are whole."""
        names = ["train", "evaluate", "forward", "backward", "step", "clip", "zero_grad", "deepcopy", "offload", "save"]
        with self.whole():
            return getattr(self, names[number % len(names)])(number)

    # ------------------------------------------------------------------ writes

    def write(self, number: int) -> None:
        _, parameter = self.pick(number)
        with torch.no_grad():
            parameter.copy_(self.value(parameter, number))

    def write_new_data(self, number: int) -> None:
        _, parameter = self.pick(number)
        parameter.data = self.value(parameter, number)
        self.losses.clear()  # plain PyTorch cannot tell which of the two values they were made with

    def write_to_data(self, number: int) -> None:
        """Under sharded parameters it leaves no trace where the parameter happens to be whole: see `write_inside`."""
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
        with self.whole(modifier_rank=0), torch.no_grad():
            if number % 3 == 0:
                parameter.data = self.value(parameter, number)
            else:
                (parameter.data if number % 3 == 1 else parameter).copy_(self.value(parameter, number))
        self.losses.clear()

    def set_grad(self, number: int) -> None:
        _, parameter = self.pick(number)
        parameter.grad = self.value(parameter, number)

    def drop_grads(self, number: int) -> None:
        """As loops do that know no optimizer."""
        self.model.zero_grad(set_to_none=bool(number % 4))

    def toggle(self, number: int) -> None:
        _, parameter = self.pick(number)
        parameter.requires_grad_(not parameter.requires_grad)

    # ------------------------------------------------------------------ readers

    def read(self, number: int) -> Any:
        with self.whole():
            return {fqn: p.detach().clone() for fqn, p in self.model.named_parameters()}

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
        return values, loss.detach(), flags, {fqn: p.grad for fqn, p in copied.named_parameters() if p.grad is not None}


def _raise(*_: Any) -> None:
    raise Boom


class Sharded(Side):
    """The side under test."""

    def __init__(self, setting: Setting, folder: Path) -> None:
        super().__init__(setting, folder)
        self.sharded = zeroshard.shard(
            self.model, OPTIMIZERS[setting.optimizer](self.model.parameters()), setting.policy(),
            precision=setting.precision(), overlap=setting.overlap,
            units=zeroshard.Units(min_numel=1000) if setting.one_unit else None,
        )  # fmt: skip
        self.kept: Any = None

    def whole(self, modifier_rank: int | None = None) -> Any:
        return zeroshard.unsharded(self.model, modifier_rank=modifier_rank)

    def accumulating(self) -> Any:
        return self.sharded.accumulate()

    def step(self, number: int) -> None:
        self.sharded.optimizer.step()

    def zero_grad(self, number: int) -> None:
        self.sharded.optimizer.zero_grad()

    def clip(self, number: int) -> float:
        return self.sharded.clip_grad_norm_(0.1 * (number + 1))

    def update_trainable(self, number: int) -> None:
        self.sharded.update_trainable()

    def change_lr(self, number: int) -> None:
        for group in self.sharded.optimizer.param_groups:
            group["lr"] *= 0.5 + number / 10

    def write_inside_unasked(self, number: int) -> None:
        with self.whole():
            self.write(number)

    def save(self, number: int) -> None:
        self.sharded.save(self.folder, f"tag{number % 2}")

    def load(self, number: int) -> None:
        self.sharded.load(self.folder, f"tag{number % 2}")

    def keep_optimizer(self, number: int) -> None:
        self.kept = copy.deepcopy(self.sharded.optimizer.state_dict())

    def restore_optimizer(self, number: int) -> None:
        if self.kept is not None:
            self.sharded.optimizer.load_state_dict(self.kept)

    def offload(self, number: int) -> None:
        states = [("parameters",), ("gradients",), ("optimizer",), ("parameters", "gradients", "optimizer")][number % 4]
        self.sharded.offload_states(states, Place.DISK, Offload(path=str(self.folder), block_nbytes=4096))

    def reload(self, number: int) -> None:
        self.sharded.reload_states()

    def read_states(self, number: int) -> Any:
        states, names = self.sharded.states, STATES[self.setting.optimizer]
        return {
            fqn: [states.get(fqn).float(), *[states.get(fqn, name) for name in names]]
            for fqn, _ in self.model.named_parameters()
        }

    def read_gradients(self, number: int) -> Any:
        states = self.sharded.states
        return {fqn: states.get(fqn, "gradients") for fqn, p in self.model.named_parameters()}

    def set_state(self, number: int) -> None:
        fqn, parameter = self.pick(number)
        name = STATES[self.setting.optimizer][0] if number % 2 else "parameters"
        self.sharded.states.set(fqn, name, self.value(parameter, number).float())

    def set_mean_gradient(self, number: int) -> None:
        fqn, parameter = self.pick(number)
        self.sharded.states.set(fqn, "gradients", self.value(parameter, number).float())


class Plain(Side):
    """The twin. In 16 bits it keeps fp32 master weights and gradients beside, as one writes that by hand."""

    def __init__(self, setting: Setting, folder: Path) -> None:
        super().__init__(setting, folder)
        self.masters: dict[str, Tensor] = dict(self.named)
        if setting.bf16:
            self.masters = {fqn: p.detach().clone() for fqn, p in self.named}
            for fqn, p in self.named:
                p.data = p.data.bfloat16()
                if not p.requires_grad:
                    self.masters[fqn] = p.detach().float()
        self.optimizer = OPTIMIZERS[setting.optimizer](list(self.masters.values()))
        self.trained = {fqn for fqn, p in self.named if p.requires_grad}
        self.saved: dict[str, Any] = {}
        self.told: float | None = None
        """The norm that the other side found."""
        self.kept: Any = None

    @contextmanager
    def whole(self, modifier_rank: int | None = None) -> Any:
        yield

    def accumulating(self) -> Any:
        return nullcontext()

    def collect(self) -> None:
        """16 bits: gradients are summed in fp32."""
        self.take_writes()
        for fqn, p in self.named if self.setting.bf16 else ():
            master = self.masters[fqn]
            if p.grad is not None:
                gradient, p.grad = p.grad.float(), None
                master.grad = gradient if master.grad is None else master.grad + gradient

    def take_writes(self) -> None:
        """16 bits: what was written to parameters is taken up; elsewhere the master's digits stay."""
        for fqn, p in self.named if self.setting.bf16 else ():
            master = self.masters[fqn]
            same = p.detach() == master.to(p.dtype)
            master.copy_(torch.where(same, master, p.detach().float()))

    def backward(self, number: int) -> Any:
        try:
            return super().backward(number)
        finally:
            self.collect()

    def train(self, number: int) -> Any:
        try:
            return super().train(number)
        finally:
            self.collect()

    def broken_backward(self, number: int) -> Any:
        try:
            return super().broken_backward(number)
        finally:
            self.collect()

    @torch.no_grad()
    def show(self, names: Iterable[str]) -> None:
        """16 bits: parameters follow their masters."""
        for fqn, p in self.named if self.setting.bf16 else ():
            if fqn in names:
                p.copy_(self.masters[fqn])

    def step(self, number: int) -> None:
        self.collect()
        self.optimizer.step()
        self.show([fqn for fqn, master in self.masters.items() if master.grad is not None])

    def drop_grads(self, number: int) -> None:
        super().drop_grads(number)
        for master in self.masters.values():
            if master.grad is not None:
                master.grad = None if number % 4 else torch.zeros_like(master)

    def zero_grad(self, number: int) -> None:
        self.optimizer.zero_grad()
        self.model.zero_grad()

    def clip(self, number: int) -> float:
        self.collect()
        gradients = [m.grad for m in self.masters.values() if m.grad is not None]
        norm = sum((g.double().square().sum().item() for g in gradients), 0.0) ** 0.5
        if self.told is not None and abs(self.told - norm) < 1e-6 * norm:
            norm = self.told  # another order of summation
        coefficient = clip_coefficient(norm, 0.1 * (number + 1))
        for g in gradients if coefficient != 1.0 else ():
            g.mul_(coefficient)
        return norm

    def update_trainable(self, number: int) -> None:
        self.take_writes()
        for fqn, p in self.named:
            now = p.requires_grad
            if now == (fqn in self.trained):
                continue
            master = self.masters[fqn]
            p.grad = master.grad = None
            self.optimizer.state.pop(master, None)
            if self.setting.bf16:
                master.copy_(p.detach())
        self.trained = {fqn for fqn, p in self.named if p.requires_grad}

    def change_lr(self, number: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.5 + number / 10

    def save(self, number: int) -> None:
        self.take_writes()
        masters = {fqn: master.detach().clone() for fqn, master in self.masters.items()}
        states = {fqn: copy.deepcopy(self.optimizer.state.get(master, {})) for fqn, master in self.masters.items()}
        self.saved[f"tag{number % 2}"] = masters, states, [g["lr"] for g in self.optimizer.param_groups]

    def load(self, number: int) -> None:
        masters, states, lrs = self.saved[f"tag{number % 2}"]
        for group, lr in zip(self.optimizer.param_groups, lrs, strict=True):
            group["lr"] = lr
        for fqn, p in self.named:
            master = self.masters[fqn]
            with torch.no_grad():
                master.copy_(masters[fqn])
                if fqn not in self.trained:
                    master.copy_(master.to(p.dtype))
            self.optimizer.state.pop(master, None)
            if states[fqn] and fqn in self.trained:
                self.optimizer.state[master] = copy.deepcopy(states[fqn])
        self.show(self.masters)

    def keep_optimizer(self, number: int) -> None:
        self.kept = copy.deepcopy(self.optimizer.state_dict())

    def restore_optimizer(self, number: int) -> None:
        if self.kept is not None:
            self.optimizer.load_state_dict(self.kept)

    def offload(self, number: int) -> None:
        pass

    def reload(self, number: int) -> None:
        pass

    def write_inside_unasked(self, number: int) -> None:
        self.write(number)

    def read_states(self, number: int) -> Any:
        self.take_writes()
        names = STATES[self.setting.optimizer]
        return {
            fqn: [
                self.masters[fqn].detach().clone(),
                *[copy.deepcopy(self.optimizer.state.get(self.masters[fqn], {}).get(name)) for name in names],
            ]
            for fqn, _ in self.named
        }

    def read_gradients(self, number: int) -> Any:
        self.collect()
        return {fqn: copy.deepcopy(self.masters[fqn].grad) for fqn, _ in self.named}

    def set_state(self, number: int) -> None:
        fqn, parameter = self.pick(number)
        new = self.value(parameter, number).float()
        self.take_writes()
        if number % 2:
            self.optimizer.state[self.masters[fqn]][STATES[self.setting.optimizer][0]].copy_(new)
        else:
            with torch.no_grad():
                self.masters[fqn].copy_(new)
            self.show([fqn])

    def set_mean_gradient(self, number: int) -> None:
        fqn, parameter = self.pick(number)
        self.collect()
        self.masters[fqn].grad = self.value(parameter, number).float()


ACTIONS = [
    "train", "train", "accumulate", "step", "step", "zero_grad", "zero_grad", "clip", "forward", "backward", "forward_part",
    "evaluate", "broken_forward", "broken_backward", "look", "inside", "write", "write_new_data", "write_to_data",
    "write_state_dict", "write_inside", "write_inside_unasked", "set_grad", "drop_grads", "toggle", "update_trainable",
    "update_trainable", "change_lr", "save", "load", "keep_optimizer", "restore_optimizer", "offload", "reload", "reload",
    "read", "read_state_dict", "read_one", "deepcopy", "read_states", "read_gradients", "set_state", "set_mean_gradient",
]  # fmt: skip
