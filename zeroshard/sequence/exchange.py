"""Owns the exchange of heads for positions in Ulysses attention (arXiv:2309.14509).

Outside attention, each of P ranks holds a slice of the positions and all heads, [B, H, S/P, D]. Inside, it holds all
positions and a slice of the heads, [B, H/P, S, D]. One message exchanges query, key and value, and a second one the
context.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zeroshard.core.transport.sequence_ranks import SequenceRanks
from zeroshard.errors import UsageError

_HEADS, _POSITIONS = 1, 2
"""Dimensions of query, key, value and context."""


class _Exchange(torch.autograd.Function):
    """An autograd function that cuts one dimension over the ranks and makes another whole."""

    @staticmethod
    def forward(ctx: Any, ranks: SequenceRanks, cut: int, whole: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.ranks, ctx.cut, ctx.whole = ranks, cut, whole
        # Row r of the message has the parts for rank r of all tensors, one after another.
        parts = [tensor.unflatten(cut, (ranks.size, -1)).movedim(cut, 0) for tensor in tensors]
        numels = [part[0].numel() for part in parts]
        send = tensors[0].new_empty(ranks.size, sum(numels))
        for part, room in zip(parts, send.split(numels, dim=1), strict=True):
            room.view(part.shape).copy_(part)
        received = ranks.all_to_all(send).split(numels, dim=1)
        pieces = [piece.view(part.shape) for part, piece in zip(parts, received, strict=True)]
        return tuple(piece.movedim(0, whole).flatten(whole, whole + 1) for piece in pieces)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, None, *_run(ctx.ranks, ctx.whole, ctx.cut, *gradients)


def _run(ranks: SequenceRanks, cut: int, whole: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    apply: Any = _Exchange.apply
    result: tuple[Tensor, ...] = apply(ranks, cut, whole, *tensors)
    return result


def heads_for_positions(ranks: SequenceRanks, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Exchange query, key and value of all heads, [B, heads, S/P, D], for all positions, [B, heads/P, S, D].

    If keys and values have fewer heads than there are ranks, several ranks get the same head.

    Raises:
        UsageError: the heads cannot be divided over the ranks, or positions or dtypes differ.
    """
    size = ranks.size
    heads = query.shape[_HEADS]
    refuse_heads(heads, key.shape[_HEADS], size)
    if not query.dtype == key.dtype == value.dtype and torch.is_autocast_enabled(query.device.type):
        # Rotary positions in fp32 leave queries and keys wider than values. The attention itself would cast them.
        narrow = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(narrow), key.to(narrow), value.to(narrow)
    if not query.dtype == key.dtype == value.dtype:
        raise UsageError(
            f"query, key and value have the dtypes {query.dtype}, {key.dtype} and {value.dtype}, but one message sends all "
            "three: cast them to one dtype."
        )
    if not query.shape[_POSITIONS] == key.shape[_POSITIONS] == value.shape[_POSITIONS]:
        raise UsageError(
            f"queries have {query.shape[_POSITIONS]} positions and keys {key.shape[_POSITIONS]}, as in cross attention or "
            "with a cache: only self-attention can be cut over ranks. Leave the cache out, or call the attention "
            "itself."
        )
    if key.shape[_HEADS] < size:
        key = key.repeat_interleave(size // key.shape[_HEADS], dim=_HEADS)
        value = value.repeat_interleave(size // value.shape[_HEADS], dim=_HEADS)
    return list(_run(ranks, _HEADS, _POSITIONS, query, key, value))


def positions_for_heads(ranks: SequenceRanks, context: Tensor) -> Tensor:
    """Exchange the context of this rank's heads, [B, heads/P, S, D], for its positions, [B, heads, S/P, D]."""
    return _run(ranks, _POSITIONS, _HEADS, context)[0]


def refuse_heads(heads: int, key_heads: int, size: int) -> None:
    """Raise `UsageError` if heads cannot be divided over ranks."""
    if heads % size or (key_heads % size and size % key_heads):
        of_keys = ""
        remedy = "Choose a number of ranks that divides the number of heads."
        if key_heads != heads:
            of_keys = f" ({key_heads} for keys and values)"
            remedy = "Choose a number of ranks that divides both numbers, or divides the first and is a multiple of the second."
        raise UsageError(
            f"{heads} attention heads{of_keys} cannot be cut over {size} ranks of a sequence: each rank needs an equal "
            f"number of heads. {remedy}"
        )
