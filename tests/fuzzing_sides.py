"""Owns the two sides of the fuzz: a sharded model, and its twin in plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from fuzzing import OPTIMIZERS, STATES, Setting, Side
from torch import Tensor

import zeroshard
from zeroshard import Offload, Place
from zeroshard.gradients.norm import clip_coefficient


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
        self.by_hand: dict[str, Tensor] = {}
        self.told: float | None = None
        """The norm that the other side found."""
        self.kept: Any = None

    @contextmanager
    def whole(self, modifier_rank: int | None = None) -> Any:
        yield

    def accumulating(self) -> Any:
        return nullcontext()

    def set_grad(self, number: int) -> None:
        super().set_grad(number)
        fqn, parameter = self.pick(number)
        self.by_hand[fqn] = parameter.grad.clone() if parameter.grad is not None else torch.zeros(())

    def collect(self, *, in_backward: bool = False) -> None:
        """16 bits: gradients are summed in fp32, as backwards give them; what was set by hand waits for one, or the step."""
        self.take_writes()
        for fqn, p in self.named if self.setting.bf16 else ():
            master = self.masters[fqn]
            if p.grad is not None and not (
                in_backward and fqn in self.by_hand and torch.equal(p.grad, self.by_hand[fqn])
            ):
                self.by_hand.pop(fqn, None)
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
            self.collect(in_backward=True)

    def train(self, number: int) -> Any:
        try:
            return super().train(number)
        finally:
            self.collect(in_backward=True)

    def broken_backward(self, number: int) -> Any:
        try:
            return super().broken_backward(number)
        finally:
            self.collect(in_backward=True)

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
