"""Owns losses over a vocabulary whose logits are never whole, and their mean over the tokens of all ranks.

Logits of 32k tokens over 128k words are 16 GiB in fp32. Here they exist for one tile of tokens at a time, in the forward and again
in the backward. One number for each token is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from zeroshard.collectives.sequence_ranks import SequenceRanks
from zeroshard.errors import UsageError
from zeroshard.sequence.batches import IGNORED

Transform = Callable[[Tensor], Tensor] | None

Choice = Callable[[Sequence[slice]], Iterable[slice]]
"""Returns those of the parts that run, in order. All of one length but the last are alike."""

_CHOICE: ContextVar[Choice] = ContextVar("parts", default=iter)


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
    flat = hidden.reshape(-1, hidden.shape[-1])
    run: Any = _LogProbabilities.apply
    result: Tensor = run(flat, weight, bias, labels.reshape(-1), tiles, ignore_index, transform).view(labels.shape)
    return result


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


class _LogProbabilities(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, tiles: int, ignored: int,
        transform: Transform,
    ) -> Tensor:  # fmt: skip
        ctx.tiles, ctx.ignored, ctx.transform = tiles, ignored, transform
        ctx.autocast = as_now(hidden.device.type)
        ctx.save_for_backward(hidden, weight, bias, labels)
        found = hidden.new_empty(len(labels), dtype=torch.float32)
        for tile in _tiles(len(labels), tiles):
            found[tile] = _of_tile(hidden[tile], weight, bias, labels[tile], ignored, transform)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        refuse_second_backward("head_loss()")
        hidden, weight, bias, labels = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        by_hidden = torch.empty_like(hidden) if needs[0] else None
        own = [_leaf(tensor, need) for tensor, need in zip((weight, bias), needs[1:], strict=True)]
        sums = Sums()
        leaf_weight, leaf_bias = own
        for tile in _tiles(len(labels), ctx.tiles):
            part = hidden[tile].detach().requires_grad_(needs[0])
            wanted = [tensor for tensor in (part, *own) if tensor is not None and tensor.requires_grad]
            with torch.enable_grad(), ctx.autocast():
                found = _of_tile(part, leaf_weight, leaf_bias, labels[tile], ctx.ignored, ctx.transform)
            made = list(torch.autograd.grad(found, wanted, gradients[0][tile]))
            if by_hidden is not None:
                by_hidden[tile] = made.pop(0)
            sums.add(made)
        of_parameters = iter(sums.totals())
        by_own = [next(of_parameters) if one is not None and one.requires_grad else None for one in own]
        return by_hidden, *by_own, None, None, None, None


def refuse_second_backward(what: str) -> None:
    """Raise if a backward records a graph (`create_graph=True`): the recomputation there has no graph.

    Args:
        what: the name of the function that the user called.
    """
    if torch.is_grad_enabled():
        raise UsageError(
            f"{what} computes tiles again in the backward, which has no second derivative: leave create_graph=True "
            "out, or run this part of the model without tiles."
        )


def _leaf(tensor: Tensor | None, trained: bool) -> Tensor | None:
    """Return a tensor at which a tile's backward ends, so that no hook on the parameter gets a part of its gradient."""
    return None if tensor is None else tensor.detach().requires_grad_(trained)


def _of_tile(
    hidden: Tensor, weight: Any, bias: Tensor | None, labels: Tensor, ignored: int, transform: Transform
) -> Tensor:
    logits = F.linear(hidden, weight, bias)
    if transform is not None:
        logits = transform(logits)
    return -F.cross_entropy(logits.float(), labels, ignore_index=ignored, reduction="none")


def _tiles(count: int, tiles: int) -> Iterable[slice]:
    return parts(count, max(-(-count // tiles), 1))


class Sums:
    """The sums of gradients over tiles: 16-bit gradients are summed in fp32, and rounded once, at the end."""

    def __init__(self) -> None:
        self._gradients: list[Tensor | None] | None = None
        """The first tile's gradients, as autograd returned them. Two may be one tensor, so nothing is added to them in
        place.
        """
        self._sums: dict[int, Tensor] = {}

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add one tile's gradients; None is zero."""
        if self._gradients is None:
            self._gradients = list(gradients)
            return
        for index, gradient in enumerate(gradients):
            first = self._gradients[index]
            if gradient is None:
                continue
            if index in self._sums:
                self._sums[index].add_(gradient)
            elif first is None:
                self._gradients[index] = gradient
            else:
                self._sums[index] = first.to(torch.promote_types(first.dtype, torch.float32)) + gradient

    def totals(self) -> list[Tensor | None]:
        """Return the sums, in the gradients' own dtypes."""
        found = []
        for index, first in enumerate(self._gradients or ()):
            total = self._sums.get(index, first)
            found.append(total if total is None or first is None else total.to(first.dtype))
        return found


def as_now(device: str) -> Callable[[], AbstractContextManager[Any]]:
    """Return a function that makes the autocast that is in force now, for the recomputation in the backward."""
    enabled = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device)
    return lambda: torch.autocast(device, dtype=dtype, enabled=enabled)


# ---------------------------------------------------------------------- parts


def parts(count: int, most: int) -> Iterable[slice]:
    """Return the parts of `count` tokens, with at most `most` tokens in each: one after another, as they are asked for."""
    return _CHOICE.get()([slice(start, min(start + most, count)) for start in range(0, count, most)])


@contextmanager
def chosen(choice: Choice) -> Iterator[None]:
    """Run only some of the parts: for a dry run, whose tensors have no values."""
    token = _CHOICE.set(choice)
    try:
        yield
    finally:
        _CHOICE.reset(token)
