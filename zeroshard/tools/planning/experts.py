"""Owns experts over their own ranks in a dry run: their division, and the tokens that ranks send each other.

The engine and transformers divide the experts as in a real run, over torch's fake process group. Only the exchange of tokens
differs: tensors without values tell no rank what to send. So each rank receives as many rows as it sends, which is exact if
routers choose experts evenly, and a mean over ranks otherwise.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zeroshard.core.named_parameter import EP
from zeroshard.engine.config.load import Config
from zeroshard.errors import UsageError
from zeroshard.model.expert_parallel import divide_experts, mesh_of_experts, register_exchange
from zeroshard.model.meshes import refuse_unfit_policy
from zeroshard.tools.planning.simulated import SimulatedRanks, SimulatedTwoLevel
from zeroshard.torch_private import fake_store, outside_of_modes

TOKENS = "all_to_all"
"""The name of the exchanges of tokens among the bytes of a step."""


@contextmanager
def fake_ranks(ranks: int) -> Iterator[None]:
    """Make torch's default process group one of `ranks` ranks that do not exist, inside the block.

    Raises:
        UsageError: this process is a rank of a job already.
    """
    if dist.is_initialized():
        raise UsageError(
            "a plan of experts over their own ranks makes a process group of its own, and this process has one: plan before "
            "torch.distributed.init_process_group, or in another process."
        )
    shows_errors = sys.excepthook  # which torch replaces, to name the rank
    with outside_of_modes():
        dist.init_process_group("fake", rank=0, world_size=ranks, store=fake_store())
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = shows_errors


def divide(model: nn.Module, config: Config, size: int, dense: SimulatedRanks | SimulatedTwoLevel) -> DeviceMesh:
    """Divide a model's experts as rank 0 of `fake_ranks`. Return `group` for `shard`.

    Args:
        size: the number of ranks that divide the experts.
        dense: the simulated collectives of all ranks, which count the exchanges of tokens, too.
    """
    refuse_unfit_policy(config.policy)
    assert isinstance(dense, SimulatedRanks)
    with outside_of_modes():
        mesh = mesh_of_experts(size, "cpu")
    divide_experts(model, mesh, config.precision, dense, register_exchange("zeroshard.plan", _exchange_of(size, dense)))
    with outside_of_modes():
        return mesh["dp", EP]


def _exchange_of(size: int, ranks: SimulatedRanks) -> Callable[..., Tensor]:
    def count(rows: Tensor) -> Tensor:
        ranks.count(TOKENS, rows.nbytes * (size - 1) // size)
        return torch.empty_like(rows)

    class Arrivals(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, rows: Tensor) -> Tensor:
            return count(rows)

        @staticmethod
        def backward(_ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return count(gradient)

    def run(experts: Callable[..., Tensor], hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Run the experts' own forward on rows of other ranks.

        Args:
            hidden: [T, h], this rank's tokens.
            chosen: [T, k], the experts of each token.
            weights: [T, k], their weights.
        """
        order = torch.argsort(chosen.reshape(-1))
        arrived: Tensor = Arrivals.apply(hidden[order // chosen.shape[-1]])  # type: ignore[no-untyped-call]
        ids = order.new_empty(len(order), 1)
        done = experts(arrived, ids, torch.ones_like(ids, dtype=arrived.dtype))
        back: Tensor = Arrivals.apply(done)  # type: ignore[no-untyped-call]
        placed = torch.empty_like(back)
        placed[order] = back
        return (placed.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)

    return run
