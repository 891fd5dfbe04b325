"""Python autograd functions that save a sharded parameter find it unsharded in the backward, with its attributes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import floats
from torch import Tensor, nn
from twin import build, same, steps, whole

SEEN: list[Any] = []


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, row: Tensor) -> Tensor:
        ctx.save_for_backward(inputs, weight, row)
        return inputs @ weight.t() + row

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:  # type: ignore[override]
        inputs, weight, row = ctx.saved_tensors
        SEEN.append((weight.mark, weight.requires_grad, weight.shape, hasattr(row, "mark")))
        assert type(weight * 1) is Tensor
        with pytest.raises(AttributeError):
            _ = weight.another
        return gradient @ weight, gradient.t() @ inputs, gradient.sum(0) if ctx.needs_input_grad[2] else None


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(5, 6), nn.Linear(6, 7)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = Product.apply(self.first(inputs), self.head.weight, self.head.bias[:])  # type: ignore[no-untyped-call]
        return result.square().mean()


@pytest.mark.ranks(2, fresh=True)
@pytest.mark.parametrize("frozen", [False, True])
def test_a_saved_parameter_has_its_attributes(rank: int, frozen: bool) -> None:
    def marked() -> Model:
        model = Model()
        model.head.weight.mark = "mine"  # type: ignore[attr-defined]
        model.head.weight.requires_grad_(not frozen)
        return model

    found = []
    for stage in (0, 3):
        SEEN.clear()
        model, sharded = build(stage, make_model=marked)
        steps(model, sharded, rank, range(3), floats)
        assert [("mine", not frozen, torch.Size([7, 6]), False)] * 3 == SEEN
        found.append(whole(model))
    assert same(*found)


class Late(torch.autograd.Function):
    """Reads a parameter only in the backward."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return inputs + 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        (weight,) = ctx.saved_tensors
        return gradient + weight.sum(), torch.ones_like(weight)


class Borrower(nn.Linear):
    """Saves a parameter of another block, whose values are elsewhere while this block runs."""

    lenders: tuple[nn.Linear, ...] = ()

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = Late.apply(super().forward(inputs), self.lenders[0].weight)  # type: ignore[no-untyped-call]
        return result.square().mean()


def borrowing() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), Borrower(5, 5))
    model[2].lenders = (model[0],)
    return model


@pytest.mark.ranks(2, fresh=True)
def test_a_parameter_that_is_saved_while_it_is_elsewhere_is_read_in_the_backward(rank: int) -> None:
    found = []
    for stage in (0, 3):
        model, sharded = build(stage, make_model=borrowing)
        steps(model, sharded, rank, range(3), floats)
        found.append(whole(model))
    assert same(*found)
