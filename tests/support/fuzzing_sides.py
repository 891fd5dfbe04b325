"""Owns the two sides of the fuzz: a sharded model, and its twin in plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from fuzzing import STATES, WIDTH, Block, Setting, Side
from torch import Tensor, nn

import zeroshard
from zeroshard import Offload, Place, UsageError
from zeroshard.core.norm import clip_coefficient


class Sharded(Side):
    """The side under test."""

    def __init__(self, setting: Setting, folder: Path) -> None:
        super().__init__(setting, folder)
        self.members = self.optimizers([parameter for _, parameter in self.listed])
        self.sharded = zeroshard.shard(
            self.model, self.members, setting.policy(folder),
            precision=setting.precision(), overlap=setting.overlap,
            units=zeroshard.Units(min_numel=1000) if setting.one_unit else None,
        )  # fmt: skip
        self.optimizer = self.sharded.optimizer

    def whole(self, modifier_rank: int | None = None) -> Any:
        return zeroshard.unsharded(self.model, modifier_rank=modifier_rank)

    def accumulating(self) -> Any:
        return self.sharded.accumulate()

    def step(self, number: int) -> None:
        self.optimizer.step()

    def zero_grad(self, number: int) -> None:
        self.optimizer.zero_grad()

    def step_one(self, number: int) -> None:
        self.members[number % len(self.members)].step()

    def zero_one(self, number: int) -> None:
        self.members[number % len(self.members)].zero_grad()

    def add_group(self, number: int) -> None:
        offset = self.model.shift.offset
        if self.has_group or len(self.members) == 2:
            return
        offset.requires_grad_(True)
        try:
            self.members[0].add_param_group({"params": [offset], "lr": 0.01 * (number + 1)})
        except BaseException:
            offset.requires_grad_(False)
            raise
        self.has_group = True
        self.alias = None

    def surgery(self, number: int) -> None:
        """Change a module temporarily. A step, a save and an export must refuse the change, and alter nothing."""
        change, use = number % 4, number // 4
        blocks = self.model.blocks
        kept, scale = list(blocks), blocks[1].scale
        if change == 0:
            blocks[1] = Block()
        elif change == 1:
            blocks[1].adapter = nn.Linear(WIDTH, 2)
        elif change == 2:
            del blocks[1].scale
        else:
            blocks[0], blocks[1] = kept[1], kept[0]
        uses = [
            self.optimizer.step,
            lambda: self.sharded.save(self.folder, "changed"),
            lambda: self.sharded.export(self.folder),
        ]
        try:
            uses[use]()
        except UsageError:
            return
        finally:
            blocks[0], blocks[1] = kept[0], kept[1]
            if change == 1:
                del blocks[1].adapter
            elif change == 2:
                blocks[1].scale = scale
        raise AssertionError("a model whose modules changed was not refused")

    def clip(self, number: int) -> float:
        return self.sharded.clip_grad_norm_(0.1 * (number + 1))

    def clip_by_torch(self, number: int) -> float:
        return float(torch.nn.utils.clip_grad_norm_(self.graded(), 0.1 * (number + 1)))

    def update_trainable(self, number: int) -> None:
        self.sharded.update_trainable()
        self.alias = None

    def write_inside_unasked(self, number: int) -> None:
        with self.whole():
            self.write(number)

    def save(self, number: int) -> None:
        self.sharded.save(self.folder, f"tag{number % 2}")
        self.saved_with[f"tag{number % 2}"] = self.has_group

    def load(self, number: int) -> None:
        if self.saved_with.get(f"tag{number % 2}", self.has_group) == self.has_group:
            self.sharded.load(self.folder, f"tag{number % 2}")

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


class Pair:
    """Two optimizers that the twin uses as one."""

    def __init__(self, members: list[torch.optim.Optimizer]) -> None:
        self.members = members
        self.state = members[0].state
        for member in members:
            member.state = self.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for member in self.members for group in member.param_groups]

    def step(self) -> None:
        for member in self.members:
            member.step()

    def zero_grad(self) -> None:
        for member in self.members:
            member.zero_grad()

    def state_dict(self) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"]]
        options = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        return [copy.deepcopy(dict(self.state.get(p, {}))) for p in parameters], options

    def load_state_dict(self, kept: Any) -> None:
        states, options = copy.deepcopy(kept)
        self.state.clear()
        for p, state in zip([p for group in self.param_groups for p in group["params"]], states, strict=True):
            if state:
                self.state[p] = state
        for group, values in zip(self.param_groups, options, strict=True):
            group.update(values)


def _collecting(action: str) -> Callable[[Plain, int], Any]:
    """Return an action that runs a backward, with the collection of its gradients at the end."""

    def run(self: Plain, number: int) -> Any:
        try:
            return getattr(Side, action)(self, number)
        finally:
            self.collect(in_backward=True)

    return run


class Plain(Side):
    """The plain twin. In 16 bits, it keeps separate fp32 master weights and gradients, as users write by hand."""

    def __init__(self, setting: Setting, folder: Path) -> None:
        super().__init__(setting, folder)
        self.masters: dict[str, Tensor] = dict(self.named)
        if setting.bf16:
            self.masters = {fqn: p.detach().clone() for fqn, p in self.named}
            for fqn, p in self.named:
                p.data = p.data.bfloat16()
                if not p.requires_grad:
                    self.masters[fqn] = p.detach().float()
        members = self.optimizers([self.masters[fqn] for fqn, _ in self.listed])
        self.optimizer = Pair(members) if setting.two_optimizers else members[0]
        self.members = members
        self.trained = {fqn for fqn, p in self.named if p.requires_grad}
        self.saved: dict[str, Any] = {}
        self.by_hand: dict[str, Tensor] = {}
        self.told: float | None = None
        """The norm that the sharded side computed."""

    @contextmanager
    def whole(self, modifier_rank: int | None = None) -> Any:
        yield

    def accumulating(self) -> Any:
        return nullcontext()

    @property
    def keeps_broken_writes(self) -> bool:
        return self.setting.stage < 3

    def set_grad(self, number: int) -> None:
        super().set_grad(number)
        fqn, parameter = self.pick(number)
        self.by_hand[fqn] = parameter.grad.clone() if parameter.grad is not None else torch.zeros(())

    def collect(self, *, in_backward: bool = False) -> None:
        """In 16 bits, add gradients to fp32 sums. A gradient set by hand waits for its next backward, or for the step."""
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
        """In 16 bits, copy values that were written to parameters to their masters. Other elements keep the master's digits."""
        for fqn, p in self.named if self.setting.bf16 else ():
            master = self.masters[fqn]
            same = p.detach() == master.to(p.dtype)
            master.copy_(torch.where(same, master, p.detach().float()))

    backward = _collecting("backward")
    broken_backward = _collecting("broken_backward")
    train = _collecting("train")
    train_otherwise = _collecting("train_otherwise")
    train_with_penalty = _collecting("train_with_penalty")
    train_on_two = _collecting("train_on_two")

    @torch.no_grad()
    def show(self, names: Iterable[str]) -> None:
        """In 16 bits, copy master weights to the named parameters."""
        for fqn, p in self.named if self.setting.bf16 else ():
            if fqn in names:
                p.copy_(self.masters[fqn])

    def step(self, number: int) -> None:
        self.collect()
        self.optimizer.step()
        self.show([fqn for fqn, master in self.masters.items() if master.grad is not None])

    def step_one(self, number: int) -> None:
        self.collect()
        member = self.members[number % len(self.members)]
        member.step()
        own = {id(p) for group in member.param_groups for p in group["params"]}
        self.show([fqn for fqn, master in self.masters.items() if master.grad is not None and id(master) in own])

    def zero_one(self, number: int) -> None:
        member = self.members[number % len(self.members)]
        member.zero_grad()
        own = {id(p) for group in member.param_groups for p in group["params"]}
        for fqn, p in self.named:
            if id(self.masters[fqn]) in own:
                p.grad = None

    def add_group(self, number: int) -> None:
        if self.has_group or len(self.members) == 2:
            return
        self.model.shift.offset.requires_grad_(True)
        master = self.masters["shift.offset"]
        if self.setting.bf16:
            with torch.no_grad():
                master.copy_(self.model.shift.offset)
        self.optimizer.add_param_group({"params": [master], "lr": 0.01 * (number + 1)})
        self.trained.add("shift.offset")
        self.update_trainable(number)
        self.has_group = True

    def surgery(self, number: int) -> None:
        pass

    def drop_grads(self, number: int) -> None:
        super().drop_grads(number)
        for master in self.masters.values():
            if master.grad is not None:
                master.grad = None if self.drops(number) else torch.zeros_like(master)

    def drop_one(self, number: int) -> None:
        super().drop_one(number)
        fqn, _ = self.pick(number)
        self.masters[fqn].grad = None
        self.by_hand.pop(fqn, None)

    def zero_grad(self, number: int) -> None:
        self.optimizer.zero_grad()
        self.model.zero_grad()

    def graded(self) -> list[Tensor]:
        self.collect()
        return list(self.masters.values())

    def clip(self, number: int) -> float:
        return self.clipped(number, clip_coefficient)

    def clip_by_torch(self, number: int) -> float:
        return self.clipped(number, lambda norm, most: float((most / (torch.tensor(norm) + 1e-6)).clamp(max=1.0)))

    def clipped(self, number: int, coefficient_of: Callable[[float, float], float]) -> float:
        gradients = [parameter.grad for parameter in self.graded() if parameter.grad is not None]
        norm = sum((g.double().square().sum().item() for g in gradients), 0.0) ** 0.5
        if self.told is not None and abs(self.told - norm) < 1e-6 * norm:
            norm = self.told  # another order of summation
        coefficient = coefficient_of(norm, 0.1 * (number + 1))
        for g in gradients if coefficient != 1.0 else ():
            g.mul_(coefficient)
        return norm

    def update_trainable(self, number: int) -> None:
        self.alias = None
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

    def save(self, number: int) -> None:
        self.take_writes()
        masters = {fqn: master.detach().clone() for fqn, master in self.masters.items()}
        states = {fqn: copy.deepcopy(self.optimizer.state.get(master, {})) for fqn, master in self.masters.items()}
        buffers = {fqn: buffer.clone() for fqn, buffer in self.model.named_buffers()}
        self.saved[f"tag{number % 2}"] = masters, states, [g["lr"] for g in self.optimizer.param_groups], buffers
        self.saved_with[f"tag{number % 2}"] = self.has_group

    def load(self, number: int) -> None:
        if self.saved_with.get(f"tag{number % 2}", self.has_group) != self.has_group:
            return
        masters, states, lrs, buffers = self.saved[f"tag{number % 2}"]
        for fqn, buffer in self.model.named_buffers():
            buffer.copy_(buffers[fqn])
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
