"""Owns the backwards behind `engine.underflow_report`: one at each loss scale, of which nothing stays. Called by engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from zeroshard.observe.underflow import GradientCount, UnderflowReport, summarise
from zeroshard.sharded import Sharded


def count_underflow(
    sharded: Sharded, compute_loss: Callable[[], Tensor], scale: float, scales: Sequence[float]
) -> UnderflowReport:
    """Compute and differentiate the loss at the present scale and at each other. Every rank must call it."""
    counts = [GradientCount(one) for one in sorted({*scales, scale})]
    buffers = [(buffer, buffer.clone()) for buffer in sharded.model.buffers()]
    try:
        for count in counts:
            # The same dropout at each scale, and none of it missing from the training after.
            with torch.random.fork_rng(), sharded.probe(count.add), torch.enable_grad():
                loss = compute_loss()
                (loss.float() * count.scale).backward()  # type: ignore[no-untyped-call]
    finally:
        for buffer, value in buffers:
            buffer.copy_(value)
    return summarise(counts, scale, sharded.sum_over_ranks)
