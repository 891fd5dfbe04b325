"""Owns the tensor parallelism of a dry run: each divided module has its local matrix, and its messages are counted.

A real run uses DTensors (`zeroshard.construction.tensor_parallel`). In a dry run, a module keeps one rank's part as an
ordinary parameter and makes the same activations as torch's styles. Sums over ranks and gathers return new tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zeroshard.construction.tensor_parallel import COLWISE, EMBEDDING, GATHERED, NORM, SPLIT, plan_of

Send = Callable[[str, int], None]
"""A function that gets the name of a collective, and the bytes that a rank sends in it."""


def divide_on_paper(model: nn.Module, ranks: int, send: Send) -> None:
    """Divide a model in place by its plan: keep the first rank's parameters and call `send` in forwards and backwards.

    Raise UsageError if the model has no plan, or one that this number of ranks cannot use.
    """
    parts: dict[nn.Parameter, nn.Parameter] = {}  # tied parameters share a part

    def keep(module: nn.Module, name: str, dim: int) -> None:
        whole = getattr(module, name)
        if whole not in parts:
            size = -(-whole.shape[dim] // ranks)
            part = whole.detach().narrow(dim, 0, size).clone()
            parts[whole] = nn.Parameter(part, requires_grad=whole.requires_grad)
        setattr(module, name, parts[whole])

    def all_reduce(values: Tensor) -> Tensor:
        """Return a new tensor for the sum over all ranks and count the bytes that a rank sends in a ring."""
        send("tensor_parallel_all_reduce", 2 * values.nbytes * (ranks - 1) // ranks)
        return values.clone()

    def all_gather(size: int, part: Tensor) -> Tensor:
        """Return a tensor for the parts of all ranks, `size` elements in the last dimension, and count the bytes.

        As in torch, the parts are gathered into a first tensor and then copied to their places in the result.
        """
        send("tensor_parallel_all_gather", part.nbytes * (ranks - 1))
        return part.new_empty((size, *part.shape[:-1])).movedim(0, -1).contiguous()

    for name, style in plan_of(model, ranks).items():
        if style == NORM:
            continue
        module: Any = model.get_submodule(name)
        if style == EMBEDDING:
            keep(module, "weight", 0)
            module.forward = partial(_embed, module, all_reduce)
        elif style == COLWISE or style in GATHERED:
            gather = partial(all_gather, module.out_features) if style in GATHERED else None
            keep(module, "weight", 0)
            if module.bias is not None:
                keep(module, "bias", 0)
            module.forward = partial(_columns, module, all_reduce, gather)
        else:
            keep(module, "weight", 1)
            module.forward = partial(_rows, module, all_reduce, all_gather if style in SPLIT else None)


Change = Callable[[Tensor], Tensor]
"""A function that turns the activation or gradient before a message into the one after it."""


def _embed(module: nn.Embedding, all_reduce: Change, tokens: Tensor) -> Tensor:
    return _message(F.embedding(tokens, module.weight), all_reduce, _same)


def _columns(module: nn.Linear, all_reduce: Change, gather: Change | None, inputs: Tensor) -> Tensor:
    inputs = _message(inputs, _same, all_reduce)
    local = F.linear(inputs, module.weight, module.bias)
    if gather is None:
        return local
    return _message(local, gather, partial(_cut, local.shape[-1]))


def _rows(
    module: nn.Linear, all_reduce: Change, all_gather: Callable[[int, Tensor], Tensor] | None, inputs: Tensor
) -> Tensor:
    if all_gather is not None:  # every rank has all inputs and uses a part of them
        gather = partial(all_gather, inputs.shape[-1])
        inputs = _message(inputs, partial(_cut, module.weight.shape[1]), gather)
    total = _message(F.linear(inputs, module.weight), all_reduce, _same)
    return total if module.bias is None else total + module.bias


def _cut(size: int, whole: Tensor) -> Tensor:
    return whole.narrow(-1, 0, size).contiguous()


def _same(values: Tensor) -> Tensor:
    return values


def _message(values: Tensor, there: Change, back: Change) -> Tensor:
    """Apply `there` to the activation in the forward, and `back` to its gradient in the backward."""
    changed: Tensor = _Message.apply(values, there, back)  # type: ignore[no-untyped-call]
    return changed


class _Message(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, there: Change, back: Change) -> Tensor:
        ctx.back = back
        return there(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.back(gradients[0]), None, None
