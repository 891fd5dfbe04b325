"""Owns models whose backward bypasses their modules' outputs, and their losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zeroshard
from zeroshard.testing import Workload

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    """Blocks from `make_block` between two linear layers."""

    def __init__(self, make_block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.first = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(make_block() for _ in range(3))
        self.last = nn.Linear(WIDTH, 1)

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = self.run(block, x)
        return self.last(x).square().mean()


# ------------------------------------------------------------------ losses that escape


class Router(Block):
    """A block that keeps an auxiliary loss, as a mixture of experts does."""

    def forward(self, x: Tensor) -> Tensor:
        self.aux = F.linear(x, self.up.weight).softmax(-1).square().mean()
        return super().forward(x)


class LateRouter(Block):
    """A block whose output does not depend on its parameters."""

    def forward(self, x: Tensor) -> Tensor:
        self.aux = super().forward(x).square().mean()
        return x


class WithAux(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.1 * sum(block.aux for block in self.blocks)


@dataclass
class Output:
    hidden: Tensor
    extra: Tensor | None = None


class DataclassBlock(Block):
    def forward(self, x: Tensor) -> Output:
        return Output(super().forward(x))


class DataclassNet(Net):
    """A model that returns tensors only inside dataclasses, as do its blocks."""

    def __init__(self) -> None:
        super().__init__(DataclassBlock)

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x).hidden

    def forward(self, x: Tensor) -> Any:
        return Output(super().forward(x))


class Features(Net):
    """A model whose loss uses tensors that a hook caught inside its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.caught: list[Tensor] = []
        for block in self.blocks:
            block.up.register_forward_hook(lambda _, __, output: self.caught.append(output))

    def forward(self, x: Tensor) -> Tensor:
        self.caught.clear()
        loss = super().forward(x)
        return 0 * loss + sum(feature.square().mean() for feature in self.caught)


class InPlace(Block):
    """A block that returns a view, to which its caller writes."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).view(-1, WIDTH)


class InPlaceNet(Net):
    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        y = block(x)
        y[:, ::2].mul_(0.5)
        return y


class Mapped(Block):
    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda row: row + self.down(torch.tanh(self.up(row))))(x)


class Recursive(Block):
    """A block that calls itself, as models of trees do, and then reads its own weight."""

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        hidden = F.gelu(self.up(x))
        if depth:
            x = self(0.5 * x, depth - 1)
        return x + F.linear(hidden, self.down.weight)


# ------------------------------------------------------------------ hooks of others


class Normed(Block):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.weight_norm(self.up)


class OwnNorm(nn.Module):
    """A block with weight_norm or spectral_norm on the unit's own module. Their hooks compute before its forward."""

    def __init__(self, norm: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4), nn.Parameter(torch.zeros(WIDTH))
        norm(self)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(F.linear(x, self.weight, self.bias))


class Rescaled(nn.Module):
    """A block with embeddings to which a forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(23, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.table.weight.renorm_(2, 0, 1.0)
        return x + self.table((x.detach() * 1000).long().remainder(23)[:, 0])


# ------------------------------------------------------------------ backwards inside of backwards


class Inner(torch.autograd.Function):
    """A function that runs a block again in the backward, and differentiates there, as reversible blocks do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: nn.Module) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.block(x)
        torch.autograd.backward(y, gradient)
        return x.grad, None


class Reversible(Net):
    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        return Inner.apply(x, block)


class FrozenEnds(Net):
    """A model that is frozen outside its blocks, as with LoRA, with reentrant checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)
        self.last.requires_grad_(False)
        self.first.register_forward_hook(lambda _, __, output: output.requires_grad_())  # enable_input_require_grads

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=True)


class FrozenReversible(FrozenEnds):
    run = Reversible.run


class Forces(Block):
    """A block that differentiates an energy in its forward, as models of molecules do, and reads a weight through `.data`."""

    def forward(self, x: Tensor) -> Tensor:
        (force,) = torch.autograd.grad(super().forward(x).square().sum(), x, create_graph=True)
        return x - 0.1 * force + F.linear(x, self.up.weight.data)[:, :WIDTH]


# ------------------------------------------------------------------ losses


def plain_loss(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    return out.hidden if isinstance(out, Output) else out


def with_gradient_penalty(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    loss = model(x)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    model(2 * x)  # another forward comes between
    return loss + gradient.square().sum()


def with_weight_penalty(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x)
    with zeroshard.unsharded(model):
        penalty = sum(block.up.weight.square().sum() for block in model.blocks)
    return loss + 0.01 * penalty


UNUSUAL: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], Tensor]]] = {
    "auxiliary loss": (lambda: WithAux(Router), plain_loss),
    "auxiliary loss alone": (lambda: WithAux(LateRouter), plain_loss),
    "dataclasses": (DataclassNet, plain_loss),
    "features": (Features, plain_loss),
    "in place": (lambda: InPlaceNet(InPlace), plain_loss),
    "vmap": (lambda: Net(Mapped), plain_loss),
    "recursive": (lambda: Net(Recursive), plain_loss),
    "weight_norm inside": (lambda: Net(Normed), plain_loss),
    "weight_norm": (lambda: Net(lambda: OwnNorm(nn.utils.weight_norm)), plain_loss),
    "spectral_norm": (lambda: Net(lambda: OwnNorm(nn.utils.spectral_norm)), plain_loss),
    "rescaled": (lambda: Net(Rescaled), plain_loss),
    "reversible": (Reversible, plain_loss),
    "frozen ends": (FrozenEnds, plain_loss),
    "frozen ends, reversible": (FrozenReversible, plain_loss),
    "gradient penalty": (lambda: Net(Forces), with_gradient_penalty),
    "weight penalty": (Net, with_weight_penalty),
}


def batch(rank: int, number: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * number + rank))


def unusual(name: str, precision: str = "fp32", microbatches: int = 1) -> Workload:
    """Return the workload of an unusual model."""
    make_model, compute_loss = UNUSUAL[name]
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    return Workload(
        make_model,
        lambda rank, number: (batch(rank, number).to(dtype),),
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        lambda model, given: compute_loss(model, *given),
        lambda model: [parameter for parameter in model.parameters() if parameter.requires_grad],
        steps=3,
        microbatches=microbatches,
    )
