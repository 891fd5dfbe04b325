"""Owns losses of a language model's head that do not materialize the full logits, and their mean over all ranks' tokens.

Logits of 32k tokens over a vocabulary of 128k take 16 GiB in fp32. These losses compute logits for one tile of tokens at
a time, in the forward and again in the backward. The forward does not keep logits; it returns one number per token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from zeroshard.core.transport.sequence_ranks import SequenceRanks
from zeroshard.errors import UsageError
from zeroshard.sequence.batches import IGNORED
from zeroshard.sequence.tiles import TileByTile

Transform = Callable[[Tensor], Tensor] | None


def head_log_probabilities(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, tiles: int = 1,
    ignore_index: int = IGNORED, transform: Transform = None,
) -> Tensor:  # fmt: skip
    """Compute the log-probability of each token's label without materializing the full logits.

    If parameters are sharded, call it where the head's weight has values: inside the model's forward, or through
    `Sequences.log_probabilities`.

    Args:
        hidden: the head's input, [..., D].
        weight: the head's weight, [V, D].
        labels: the next token of each token, [...], int64.
        bias: the head's bias, [V], if it has one.
        tiles: the number of tiles of tokens. Logits exist for one tile at a time. Gradients of weight and bias are
            summed in fp32 over tiles.
        ignore_index: the label of tokens to ignore. Their log-probability is 0.
        transform: the function that the model applies to its logits (softcapping, a scale), for a tile [tokens, V].

    Returns:
        [...], fp32.

    Raises:
        UsageError: shapes do not match, or `tiles` is less than 1.
    """
    if labels.shape != hidden.shape[:-1] or weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise UsageError(
            f"hidden {list(hidden.shape)}, weight {list(weight.shape)} and labels {list(labels.shape)} do not match: "
            "pass [..., D], [V, D] and [...]."
        )
    if tiles < 1:
        raise UsageError(f"tiles={tiles}, but the tokens need 1 tile or more. Pass a positive number, such as tiles=8.")

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
    """Compute the mean cross-entropy over the tokens of all ranks, without materializing the full logits.

    Every rank of the group must call it.

    Args:
        hidden, weight, labels, bias, tiles, ignore_index, transform: see `head_log_probabilities`, which raises the
            same errors.
        group: the ranks over which gradients are averaged, as passed to `shard`; default: all ranks.
        tokens: the number of labels that are not ignored, over all ranks and microbatches of the step; default: those
            of this call on all ranks.

    Returns:
        The mean in nats, [], fp32, the same on every rank; 0 if all labels are ignored. `token_mean` describes its
        gradient.
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
    """Compute the mean of values over the tokens of all ranks, for gradients that are averaged over the same ranks.

    The gradient with respect to this rank's sum of values is W / tokens for W ranks, since averaging gradients divides
    them by W. So each rank's weight is proportional to its number of tokens. Every rank of the group must call it.

    Args:
        values: one value for each token of this rank, [...].
        counted: the tokens to include in the mean, [...], bool.
        group: the ranks over which gradients are averaged; default: all ranks.
        tokens: see `head_loss`.

    Returns:
        The mean, [], the same on every rank; 0 if `counted` is False for all tokens. Its dtype is that of the values,
        and at least fp32.
    """
    total = torch.where(counted, values, 0).sum(dtype=torch.promote_types(values.dtype, torch.float32))
    mean: Tensor = _TokenMean.apply(total, counted.sum(), SequenceRanks(group), tokens)  # type: ignore[no-untyped-call]
    return mean


class _TokenMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: Tensor, count: Tensor, ranks: SequenceRanks, tokens: Tensor | int | None) -> Tensor:
        # One message has both numbers. fp64 counts tokens exactly.
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
    """An autograd function that sums a tensor over ranks.

    Every rank's loss depends on every rank's tensor, so the backward sums the gradients of all ranks.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: SequenceRanks) -> Tensor:
        ctx.ranks = ranks
        return ranks.sum(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return Sum.apply(gradients[0], ctx.ranks), None  # type: ignore[no-untyped-call]
