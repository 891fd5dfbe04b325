"""Owns comparisons of policies: one workload, trained in the same way under each policy.

You can compare policies for a model of your own:

    workload = Workload(make_model=MyModel, make_batch=lambda rank, step: (inputs(rank, step),))
    runs = run_ranks(lambda rank: [train(rank, workload, Policy.stage(s)).as_dict() for s in range(4)], 2)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.model.shard import DEFAULT_BUCKET_NUMEL, shard
from zeroshard.model.sharded import Sharded
from zeroshard.model.unsharded import unsharded
from zeroshard.policy import Policy, Precision


def adamw(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """Return the default optimizer of workloads, fused AdamW."""
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def output(model: nn.Module, batch: tuple[Any, ...]) -> Tensor:
    """Return the module's output for a batch, the default loss of workloads."""
    loss: Tensor = model(*batch)
    return loss


@dataclass(frozen=True)
class Workload:
    """The description of a training run.

    Attributes:
        make_model: builds the module. Every rank calls it under the same seed.
        make_batch: returns the module's positional arguments for a rank and a microbatch, counted over all steps.
        make_optimizer: creates an optimizer for parameters or param groups.
        compute_loss: returns the scalar loss of the model for a batch of `make_batch`; default: the module's output.
        param_groups: returns the parameters or groups for the optimizer; default: the model's parameters.
        steps: the number of optimizer steps.
        microbatches: the number of forwards in each step.
        max_norm: the maximum norm of the gradients, or None for no clipping.
        loss_scale: for fp16, the factor of the loss in the backward, by which gradients are divided afterwards.
    """

    make_model: Callable[[], nn.Module]
    make_batch: Callable[[int, int], tuple[Any, ...]]
    make_optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer] = adamw
    compute_loss: Callable[[nn.Module, tuple[Any, ...]], Tensor] = output
    param_groups: Callable[[nn.Module], Iterable[Any]] = lambda model: model.parameters()
    steps: int = 5
    microbatches: int = 1
    max_norm: float | None = None
    loss_scale: float = 1.0

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return the model and its optimizer, which are the same on every rank."""
        torch.manual_seed(0)
        model = self.make_model()
        return model, self.make_optimizer(self.param_groups(model))


@dataclass(frozen=True)
class Run:
    """The results of a training run on one rank.

    Attributes:
        losses: the loss of each microbatch, [steps * microbatches], fp32.
        parameters: the whole parameters by fqn.
        buffers: the buffers by fqn.
        norms: the gradient norm of each step, if gradients are clipped or scaled.
        memory: the bytes by category after the last step, before `zero_grad` (see `Sharded.memory_report`).
        formula: the bytes of each model state by the ZeRO paper's formula.
        sent: the bytes that this rank sent, by collective.
        times: the seconds of each step.
        states: this rank's parts of master weights and optimizer states, by fqn and range of elements.
    """

    losses: Tensor
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor] = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)
    formula: dict[str, float] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)
    times: list[float] = field(default_factory=list)
    states: dict[str, Tensor] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return plain containers and tensors, which `run_ranks` can return."""
        return asdict(self)

    def equals(self, other: Run) -> bool:
        """Return whether losses, norms, parameters, buffers and states are equal without tolerance. NaN equals nothing.

        Norms are compared if both runs have them, and states if both runs keep them on this rank.
        """
        return (
            torch.equal(self.losses, other.losses)
            and (self.norms == other.norms or not self.norms or not other.norms)
            and same(self.parameters, other.parameters)
            and same(self.buffers, other.buffers)
            and all(
                torch.equal(self.states[name], other.states[name]) for name in self.states.keys() & other.states.keys()
            )
        )


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Return whether both have the same names, and values that are equal without tolerance."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the buffers by fqn."""
    return {fqn: buffer.clone() for fqn, buffer in model.named_buffers()}


def whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the whole parameters by fqn. If they are sharded, every rank must call it."""
    with unsharded(model):
        return {fqn: parameter.detach().clone() for fqn, parameter in model.named_parameters()}


def states_held(sharded: Sharded) -> dict[str, Tensor]:
    """Return copies of this rank's parts of master weights and optimizer states."""
    found = {}
    for held in sharded.states.held():
        if held.view is None:
            continue
        part = f"{held.span.name}[{held.span.start}:{held.span.stop}]"
        with held.shard.opened():
            for state in held.states:
                value = held.tensor(state)
                assert value is not None
                found[f"{part} {state}"] = value.detach().clone()
            for state, number in held.beside.items():
                if isinstance(number, Tensor):
                    found[f"{part} {state}"] = number.clone()
    return found


def train(
    rank: int,
    workload: Workload,
    policy: Policy,
    *,
    precision: Precision | None = None,
    bucket_numel: int = DEFAULT_BUCKET_NUMEL,
    overlap: bool = True,
    elementwise: bool | None = None,
    inspect: Callable[[Sharded], None] | None = None,
) -> Run:
    """Train a workload in a plain loop and return its results. Every rank must call it.

    Args:
        rank: this rank, for `workload.make_batch`.
        workload: the description of the run.
        policy, precision, bucket_numel, overlap, elementwise: see `shard`.
        inspect: a function that is called after each step with the result of `shard`.
    """
    model, optimizer = workload.build()
    sharded = shard(
        model, optimizer, policy, precision=precision, bucket_numel=bucket_numel, overlap=overlap, elementwise=elementwise
    )  # fmt: skip
    sharded.comm_report()
    losses = []
    norms = []
    times = []
    memory = dict[str, int]()
    for step in range(workload.steps):
        start = time.perf_counter()
        for microbatch in range(workload.microbatches):
            is_last = microbatch == workload.microbatches - 1
            loss = workload.compute_loss(model, workload.make_batch(rank, step * workload.microbatches + microbatch))
            with sharded.accumulate(not is_last):
                (loss * (workload.loss_scale / workload.microbatches)).backward()
            losses.append(loss.detach())
        if workload.max_norm is not None or workload.loss_scale != 1.0:
            norms.append(float(sharded.clip_grad_norm_(workload.max_norm, workload.loss_scale)))
        sharded.optimizer.step()
        memory = sharded.memory_report()  # with the gradients
        sharded.optimizer.zero_grad()
        times.append(time.perf_counter() - start)
        if inspect is not None:
            inspect(sharded)
    sent = sharded.comm_report()
    formula = sharded.memory_formula()
    whole = whole_parameters(model)
    buffers = buffers_of(model)
    states = states_held(sharded)
    run = Run(torch.stack(losses).float(), whole, buffers, norms, memory, formula, sent, times, states)
    sharded.remove()
    return run
