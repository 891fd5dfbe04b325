"""Owns what model states take in the two kinds of memory, by the formulas. Called by whoever plans a run."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zeroshard.observe.memory import formula
from zeroshard.policy import Place, Policy, Precision


@dataclass(frozen=True)
class Need:
    """Bytes: of the accelerator of each rank, and of the CPU memory of each machine."""

    accelerator: float
    host: float


def estimate(
    policy: Policy,
    numel: float,
    *,
    ranks: int,
    ranks_per_machine: int,
    largest: float = 0,
    whole_at_start: bool = True,
) -> Need:
    """What training in bf16 with Adam takes; activations and communication buffers come on top.

    Args:
        numel: trainable parameters.
        largest: of the largest layer: where parameters are sharded it is whole, with its gradient, while it runs.
        whole_at_start: every rank builds the whole model in fp32, in CPU memory, before it is sharded.
    """
    parts = formula(
        policy,
        Precision(torch.bfloat16).resolve(torch.bfloat16),
        numel,
        ranks,
        ranks_per_host=ranks_per_machine if policy.within == "host" else None,
    )
    places = {
        "parameters": policy.parameters.place,
        "gradients": policy.gradients.place,
        "optimizer": policy.optimizer.place,
    }
    here = sum(nbytes for name, nbytes in parts.items() if places[name] is Place.ACCELERATOR)
    host = sum(nbytes for name, nbytes in parts.items() if places[name] is Place.CPU) * ranks_per_machine
    if policy.parameters.sharded:
        here += 4 * largest
    start = 4 * numel if whole_at_start else 4 * largest
    return Need(here, max(host, start * ranks_per_machine))
