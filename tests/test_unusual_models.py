"""Models whose backward does not go through what their modules return: the same bits at every stage, and those of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zeroshard
from zeroshard import Policy
from zeroshard.testing import run_ranks

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    """Blocks between two linear layers; `make_block` says which."""

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
    """As a mixture of experts keeps its auxiliary loss."""

    def forward(self, x: Tensor) -> Tensor:
        self.aux = F.linear(x, self.up.weight).softmax(-1).square().mean()
        return super().forward(x)


class LateRouter(Block):
    """Nothing of what the block returns depends on its parameters."""

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
    """Neither blocks nor the whole return tensors that one can see."""

    def __init__(self) -> None:
        super().__init__(DataclassBlock)

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x).hidden

    def forward(self, x: Tensor) -> Any:
        return Output(super().forward(x))


class Features(Net):
    """The loss is made of what a hook caught inside of blocks."""

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
    """A view of what it returns is written to by who gets it."""

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


# ------------------------------------------------------------------ hooks of others


class Normed(Block):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.weight_norm(self.up)


class OwnNorm(nn.Module):
    """weight_norm and spectral_norm on the unit's own module: their hooks compute before its forward."""

    def __init__(self, norm: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4), nn.Parameter(torch.zeros(WIDTH))
        norm(self)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(F.linear(x, self.weight, self.bias))


class MaxNorm(nn.Module):
    """Embeddings that a forward writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(23, WIDTH, max_norm=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table((x.detach() * 1000).long().remainder(23)[:, 0])


# ------------------------------------------------------------------ backwards inside of backwards


class Inner(torch.autograd.Function):
    """Runs its block again in the backward, and differentiates there, as reversible blocks do."""

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
    """As LoRA with reentrant checkpointing: what is outside of the blocks takes no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)
        self.last.requires_grad_(False)
        self.first.register_forward_hook(lambda _, __, output: output.requires_grad_())  # enable_input_require_grads

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=True)


class FrozenReversible(FrozenEnds):
    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        return Inner.apply(x, block)


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


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], Tensor]]] = {
    "auxiliary loss": (lambda: WithAux(Router), plain_loss),
    "auxiliary loss alone": (lambda: WithAux(LateRouter), plain_loss),
    "dataclasses": (DataclassNet, plain_loss),
    "features": (Features, plain_loss),
    "in place": (lambda: InPlaceNet(InPlace), plain_loss),
    "vmap": (lambda: Net(Mapped), plain_loss),
    "weight_norm inside": (lambda: Net(Normed), plain_loss),
    "weight_norm": (lambda: Net(lambda: OwnNorm(nn.utils.weight_norm)), plain_loss),
    "spectral_norm": (lambda: Net(lambda: OwnNorm(nn.utils.spectral_norm)), plain_loss),
    "max_norm": (lambda: Net(MaxNorm), plain_loss),
    "reversible": (Reversible, plain_loss),
    "frozen ends": (FrozenEnds, plain_loss),
    "frozen ends, reversible": (FrozenReversible, plain_loss),
    "gradient penalty": (Net, with_gradient_penalty),
    "weight penalty": (Net, with_weight_penalty),
}

POLICIES = {
    "1": Policy.stage(1),
    "2": Policy.stage(2),
    "3": Policy.stage(3),
    "3, kept": Policy.stage(3, reshard_after_forward=False),
}


def batch(rank: int, number: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * number + rank))


def train(rank: int, case: str, policy: Policy | None, microbatches: int, dtype: torch.dtype | None) -> list[Tensor]:
    """Losses, then the parameters and buffers, whole."""
    make_model, compute_loss = CASES[case]
    torch.manual_seed(0)
    model = make_model()
    optimizer: Any = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    sharded = None
    if policy is not None:
        sharded = zeroshard.shard(model, optimizer, policy, precision=zeroshard.Precision(dtype))
        optimizer = sharded.optimizer
    seen = []
    for step in range(3):
        for microbatch in range(microbatches):
            x = batch(rank, step * microbatches + microbatch).to(dtype or torch.float32)
            loss = compute_loss(model, x)
            if sharded is None:
                loss.backward()
            else:
                with sharded.accumulate(microbatch < microbatches - 1):
                    loss.backward()
            seen.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    with zeroshard.unsharded(model):
        seen += [p.detach().clone() for p in model.parameters()] + [b.clone() for b in model.buffers()]
    if sharded is not None:
        sharded.remove()
    return seen


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", CASES)
def test_bits_do_not_depend_on_the_stage(case: str, policy: str, microbatches: int, ranks: int, dtype: str) -> None:
    # With several microbatches the order of sums is that of sharded gradients, or of unsharded ones.
    like = Policy.stage(2 if microbatches > 1 and policy != "1" else 0)

    def body(rank: int) -> None:
        param_dtype = torch.bfloat16 if dtype == "bf16" else None
        expected = train(rank, case, like, microbatches, param_dtype)
        found = train(rank, case, POLICIES[policy], microbatches, param_dtype)
        assert all(torch.isfinite(value).all() for value in found)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))

    run_ranks(body, ranks)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("stage", [0, 3])
def test_one_rank_trains_as_plain_pytorch_does(case: str, stage: int) -> None:
    plain, found = train(0, case, None, 1, None), train(0, case, Policy.stage(stage), 1, None)
    start = CASES[case][0]
    torch.manual_seed(0)
    before = list(start().parameters())
    moved = [not torch.equal(a, b) for a, b in zip(before, plain[3:], strict=False)]
    assert any(moved)
    for value, expected in zip(found, plain, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------ what cannot be sharded, and what leaves no trace


@pytest.mark.parametrize("stage", range(4))
def test_a_sparse_gradient_is_refused_by_name(stage: int) -> None:
    def body(rank: int) -> None:
        model = nn.Sequential(nn.Embedding(7, 8, sparse=True), nn.Linear(8, 1))
        zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), Policy.stage(stage))
        with pytest.raises(zeroshard.UsageError, match=r"0\.weight got a sparse gradient.*sparse=False"):
            model(torch.tensor([rank, 2])).sum().backward()

    run_ranks(body, 1)


def test_buffers_of_every_kind_are_rank_0s() -> None:
    def body(rank: int) -> None:
        model = Net()
        model.register_buffer("expanded", torch.full((1,), float(rank)).expand(5))
        model.register_buffer("numbers", torch.arange(3) + rank)
        model.register_buffer("flags", torch.tensor([rank == 0]))
        model.register_buffer("scalar", torch.tensor(rank + 1.5))
        model.register_buffer("eighths", torch.full((4,), rank + 1.0).to(torch.float8_e4m3fn))
        zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), Policy.stage(2))
        assert model.expanded.tolist() == [0.0] * 5 and model.numbers.tolist() == [0, 1, 2]
        assert model.flags.item() and model.scalar.item() == 1.5 and model.eighths.float().tolist() == [1.0] * 4
        model.expanded[0] = 1.0
        assert model.expanded.sum() == 1.0

    run_ranks(body, 2)


@pytest.mark.parametrize("stage", [0, 3])
def test_an_optimised_input_of_a_frozen_model_gathers_no_hooks(stage: int) -> None:
    def body(rank: int) -> None:
        model = Net().requires_grad_(False)
        zeroshard.shard(model, None, Policy.stage(stage))
        x = batch(rank, 0).requires_grad_()
        counts = []
        for _ in range(4):
            model(x).backward()
            counts.append(len(x._backward_hooks or ()))
        assert counts[-1] == counts[0] == 0

    run_ranks(body, 2)


# ------------------------------------------------------------------ views that outlive a module's run


class Prompt(nn.Module):
    """Returns a part of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.table[: x.shape[0]]


class Prompted(Net):
    def __init__(self) -> None:
        super().__init__(Prompt)

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        return x + block(x)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_views_that_modules_return_stay_readable(stage: int) -> None:
    def body(rank: int) -> None:
        def run(policy: Policy) -> list[Tensor]:
            torch.manual_seed(0)
            model = Prompted()
            sharded = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)
            seen = []
            for number in range(3):
                with torch.no_grad():
                    seen.append(model.blocks[0](batch(rank, number)).clone())
                model(batch(rank, number)).backward()
                sharded.optimizer.step()
                sharded.optimizer.zero_grad()
            with zeroshard.unsharded(model):
                kept = {name: parameter.detach() for name, parameter in model.named_parameters()}
                seen += [value.clone() for value in kept.values()]
            seen += [value.clone() for value in kept.values()]  # an alias, read after
            return seen

        for one, other in zip(run(Policy.stage(0)), run(Policy.stage(stage)), strict=True):
            assert torch.equal(one, other)

    run_ranks(body, 2)


def penalised(model: nn.Module, x: Tensor, between: str) -> None:
    """A root's parameter in the loss, outside of any forward; then something that gives units back."""
    loss = model(x) + 0.1 * model.last.weight.square().sum()
    if between == "evaluation":
        with torch.no_grad():
            model(2 * x)
    elif between == "state_dict":
        model.state_dict()
    elif between == "another backward":
        loss.backward(retain_graph=True)
    loss.backward()


@pytest.mark.parametrize("between", ["nothing", "evaluation", "state_dict", "another backward"])
def test_a_roots_parameter_in_the_loss(between: str) -> None:
    """It is whole there; where something gives it back before it is read again, torch says so, and nothing is NaN."""

    def body(rank: int) -> None:
        def run(stage: int) -> list[Tensor]:
            torch.manual_seed(0)
            model = Net()
            sharded = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), Policy.stage(stage))
            if stage == 3 and between != "nothing":
                with pytest.raises(RuntimeError, match="inplace operation"):
                    penalised(model, batch(rank, 0), between)
                sharded.optimizer.zero_grad()
            for number in range(2):
                penalised(model, batch(rank, number), "nothing")
                sharded.optimizer.step()
                sharded.optimizer.zero_grad()
            with zeroshard.unsharded(model):
                return [parameter.detach().clone() for parameter in model.parameters()]

        for one, other in zip(run(2), run(3), strict=True):
            assert torch.isfinite(other).all() and torch.equal(one, other)

    run_ranks(body, 2)


def test_a_transform_around_a_sharded_model_is_refused_by_name() -> None:
    def body(rank: int) -> None:
        model = Net()
        zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), Policy.stage(3))
        with pytest.raises(zeroshard.UsageError, match=r"torch\.func.*torch\.autograd\.grad"):
            torch.func.grad(model)(batch(rank, 0))

    run_ranks(body, 1)


def test_a_graph_from_before_remove_leaves_the_model_alone() -> None:
    def body(rank: int) -> None:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sharded = zeroshard.shard(model, optimizer, Policy.stage(3))
        loss = model(batch(rank, 0))
        sharded.remove()
        loss.backward()
        assert all(
            torch.isfinite(parameter).all() and type(parameter) is nn.Parameter for parameter in model.parameters()
        )
        with pytest.raises(zeroshard.UsageError, match=r"after remove"):
            optimizer.step()

    run_ranks(body, 2)


class RankBranch(Block):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, more: bool = False) -> Tensor:
        x = super().forward(x)
        return x + self.extra(x) if more else x


class Branching(Net):
    def __init__(self) -> None:
        super().__init__(RankBranch)
        self.more = False

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x, self.more)


def test_a_forward_whose_graph_is_dropped_holds_nobody_up() -> None:
    """Rank 0 alone uses a part of each block, after a forward that no backward follows."""

    def body(rank: int) -> None:
        model = Branching()
        model.more = rank == 0
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sharded = zeroshard.shard(model, optimizer, Policy.stage(3), bucket_numel=600)
        for number in range(3):
            model(batch(rank, number + 10))
            model(batch(rank, number)).backward()
            sharded.optimizer.step()
            sharded.optimizer.zero_grad()

    run_ranks(body, 2, collective_timeout=20)
