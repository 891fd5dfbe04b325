"""Owns losses over a vocabulary whose logits are never whole, and their mean over the tokens of all ranks.

Logits of 32k tokens over 128k words are 16 GiB in fp32. Here they exist for one tile of tokens at a time, in the forward and again
in the backward. One number for each token is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from zeroshard.collectives.sequence_ranks import SequenceRanks
from zeroshard.errors import UsageError
from zeroshard.sequence.batches import IGNORED
from zeroshard.sequence.tiles import TileByTile

Transform = Callable[[Tensor], Tensor] | None


def head_log_probabilities(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, tiles: int = 1,
    ignore_index: int = IGNORED, transform: Transform = None,
) -> Tensor:  # fmt: skip
    """Compute the log-probability of each token's label, of a language model's head, without its whole logits.

    Under a policy that shards parameters, call it where the head's weight has values: inside the model's forward, or
    through `Sequences.log_probabilities`.

    Args:
        hidden: [..., D], the head's input.
        weight: [V, D], the head's.
        labels: [...], integers: for each token the next token.
        bias: [V], the head's, if it has one.
        tiles: the number of parts of the tokens. Logits of one part exist at a time. Gradients of weight and bias are
            summed in fp32 over tiles.
        ignore_index: the label of tokens that do not count: their log-probability is 0.
        transform: the model's own function of its logits (softcapping, a scale), for a tile [tokens, V].

    Returns:
        [...], fp32.

    Raises:
        UsageError: shapes do not fit.
    """
    if labels.shape != hidden.shape[:-1] or weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise UsageError(
            f"hidden {list(hidden.shape)}, weight {list(weight.shape)} and labels {list(labels.shape)} do not fit: "
            "give [..., D], [V, D] and [...]."
        )
    if tiles < 1:
        raise UsageError(f"tiles={tiles}: the tokens are cut into 1 tile or more. Pass 1 or more, such as tiles=8.")

    def run(part: Tensor, where: slice, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
        logits = F.linear(part[0], weight, bias)
        if transform is not None:
            logits = transform(logits)
        return -F.cross_entropy(logits.float(), labels[where], ignore_index=ignore_index, reduction="none")[None]

    most = max(-(-labels.numel() // tiles), 1)
    tokens = hidden.reshape(1, -1, hidden.shape[-1])
    apply: Any = TileByTile.apply
    result: Tensor = apply("head_loss()", run, most, tokens, False, weight, bias, labels.reshape(-1))
    return result.view(labels.shape)


def head_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, tiles: int = 1,
    group: dist.ProcessGroup | DeviceMesh | None = None, tokens: Tensor | int | None = None, ignore_index: int = IGNORED,
    transform: Transform = None,
) -> Tensor:  # fmt: skip
    """Compute the mean cross-entropy over the tokens of all ranks, without whole logits. Every rank of the group must
    call it.

    Args:
        hidden, weight, labels, bias, tiles, ignore_index, transform: as for `head_log_probabilities`.
        group: the ranks over which gradients are averaged: the group that was passed to `shard`; default: all ranks.
        tokens: the number of labels that count, over all ranks and all microbatches of the step; default: those of this call.

    Returns:
        The mean, in nats, fp32: the same value on every rank. See `token_mean` for its gradient.
    """
    found = head_log_probabilities(
        hidden, weight, labels, bias=bias, tiles=tiles, ignore_index=ignore_index, transform=transform
    )
    return token_mean(-found, labels != ignore_index, group=group, tokens=tokens)


def token_mean(
    values: Tensor,
    counted: Tensor,
    *,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    tokens: Tensor | int | None = None,
) -> Tensor:
    """Compute the mean of values over the tokens of all ranks, for a backward whose gradients are averaged over the same ranks.

    Its gradient for this rank's sum of values is W / tokens, for W ranks, since the average of gradients over ranks
    divides by W. So each rank has a weight in proportion to its number of tokens.

    Args:
        values: [...], one for each token of this rank.
        counted: [...], bool: the tokens that count; others add nothing to the sum.
        group: the ranks over which gradients are averaged; default: all ranks.
        tokens: as for `head_loss`.

    Returns:
        A tensor [], the same on every rank. Zero if no token counts.
    """
    total = torch.where(counted, values, 0).sum()
    mean: Tensor = _Mean.apply(total, counted.sum(), SequenceRanks(group), tokens)  # type: ignore[no-untyped-call]
    return mean


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: Tensor, count: Tensor, ranks: SequenceRanks, tokens: Tensor | int | None) -> Tensor:
        both = ranks.sum(torch.stack([total.double(), count.double()]))
        number = both[1] if tokens is None else torch.as_tensor(tokens, dtype=torch.float64, device=both.device)
        number = number.clamp(min=1)
        ctx.save_for_backward((ranks.size / number).to(total.dtype))
        return (both[0] / number).to(total.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (scale,) = ctx.saved_tensors
        return gradients[0] * scale, None, None, None


class Sum(torch.autograd.Function):
    """An autograd function that sums a tensor over ranks. Its gradient is the sum of theirs: each loss depends on all
    tensors.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: SequenceRanks) -> Tensor:
        ctx.ranks = ranks
        return ranks.sum(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return Sum.apply(gradients[0], ctx.ranks), None  # type: ignore[no-untyped-call]
