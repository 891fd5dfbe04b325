"""Owns the exchange of heads for positions in Ulysses attention (arXiv:2309.14509).

Outside of attention a rank holds a slice of the positions and all heads, [B, H, S/P, D] on P ranks. Inside, it holds all positions
and a slice of the heads, [B, H/P, S, D]. Query, key and value are exchanged together, in one message; the context
returns in another.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zeroshard.collectives.sequence_ranks import SequenceRanks
from zeroshard.errors import UsageError

_HEADS, _POSITIONS = 1, 2
"""Dimensions."""


class _Exchange(torch.autograd.Function):
    """An autograd function that divides one dimension over the ranks and makes another whole. Its gradient is the
    reverse exchange.
    """

    @staticmethod
    def forward(ctx: Any, ranks: SequenceRanks, cut: int, whole: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.ranks, ctx.cut, ctx.whole = ranks, cut, whole
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
    """Return query, key and value of all positions, [B, heads/P, S, D], for those of all heads, [B, heads, S/P, D].

    Keys and values may have fewer heads than there are ranks: then several ranks hold the same one.

    Raises:
        UsageError: heads, positions or dtypes do not fit.
    """
    size = ranks.size
    heads = query.shape[_HEADS]
    refuse_heads(heads, key.shape[_HEADS], size)
    if not query.dtype == key.dtype == value.dtype:
        raise UsageError(
            f"query, key and value have the dtypes {query.dtype}, {key.dtype} and {value.dtype}: they are sent in one "
            "message. Cast them to one."
        )
    if not query.shape[_POSITIONS] == key.shape[_POSITIONS] == value.shape[_POSITIONS]:
        raise UsageError(
            f"queries of {query.shape[_POSITIONS]} and keys of {key.shape[_POSITIONS]} positions are cross attention, "
            "or come with a cache: only self-attention can be cut over ranks. Leave the cache out, or call the "
            "attention itself."
        )
    if key.shape[_HEADS] < size:
        key = key.repeat_interleave(size // key.shape[_HEADS], dim=_HEADS)
        value = value.repeat_interleave(size // value.shape[_HEADS], dim=_HEADS)
    return list(_run(ranks, _HEADS, _POSITIONS, query, key, value))


def positions_for_heads(ranks: SequenceRanks, context: Tensor) -> Tensor:
    """Return [B, heads, S/P, D], this rank's positions, for [B, heads/P, S, D], its heads."""
    return _run(ranks, _POSITIONS, _HEADS, context)[0]


def refuse_heads(heads: int, key_heads: int, size: int) -> None:
    """Raise if heads cannot be divided over ranks."""
    if heads % size or (key_heads % size and size % key_heads):
        of_keys = ""
        if key_heads != heads:
            of_keys = f" ({key_heads} of keys and values)"
        raise UsageError(
            f"{heads} attention heads{of_keys} cannot be cut over {size} ranks of a sequence: each rank takes an equal "
            "number of heads. Choose a number of ranks that divides them."
        )
