"""Owns the references for training runs: torch's DistributedDataParallel, a plain loop in one process, and other ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zeroshard.testing import Run, Workload, whole_parameters
from zeroshard.testing.parity import buffers_of


def train_ddp(rank: int, workload: Workload) -> Run:
    """Train a workload under torch's DistributedDataParallel."""
    model, optimizer = workload.build()
    ddp = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    losses = []
    for step in range(workload.steps):
        for microbatch in range(workload.microbatches):
            ddp.require_backward_grad_sync = microbatch == workload.microbatches - 1
            loss = workload.compute_loss(ddp, workload.make_batch(rank, step * workload.microbatches + microbatch))
            (loss / workload.microbatches).backward()
            losses.append(loss.detach())
        if workload.max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), workload.max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return Run(torch.stack(losses).float(), whole_parameters(model))


def train_reference(workload: Workload, world_size: int, rank: int = 0) -> Run:
    """Train in one process over every rank's batches, with plain PyTorch.

    The gradient of a step is the sum over ranks, in rank order, of each rank's sum over microbatches, divided by the number of
    ranks. Under a policy with unsharded gradients, an optimizer that is not fused gives the same bits.
    """
    model, optimizer = workload.build()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    losses = []
    for step in range(workload.steps):

        def backward(other: int) -> None:
            for microbatch in range(workload.microbatches):
                batch = workload.make_batch(other, step * workload.microbatches + microbatch)  # noqa: B023
                loss = workload.compute_loss(model, batch)
                (loss / workload.microbatches).backward()
                if other == rank:
                    losses.append(loss.detach())

        average_gradients(parameters, world_size, backward)
        if workload.max_norm is not None:
            nn.utils.clip_grad_norm_(parameters, workload.max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return Run(torch.stack(losses).float(), whole_parameters(model), buffers_of(model))


def average_gradients(parameters: Sequence[nn.Parameter], world_size: int, backward: Callable[[int], object]) -> None:
    """Set each `grad` to the mean over ranks of what `backward(rank)` adds to it, summed in the order of ranks."""
    totals: list[Tensor | None] = [None] * len(parameters)
    for rank in range(world_size):
        backward(rank)
        for index, parameter in enumerate(parameters):
            if parameter.grad is not None:
                total = totals[index]
                totals[index] = parameter.grad if total is None else total + parameter.grad
                parameter.grad = None
    for parameter, total in zip(parameters, totals, strict=True):
        parameter.grad = None if total is None else total / world_size


def same_on_all_ranks(values: Mapping[str, Tensor]) -> bool:
    """Return whether every rank holds rank 0's values, to the last bit."""
    for value in values.values():
        first = value.clone()
        dist.broadcast(first, src=0)
        if not torch.equal(first, value):
            return False
    return True
