"""Owns a small mixture of experts in plain torch, whose experts may be divided over a mesh dimension."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH, EXPERTS, VOCABULARY, LENGTH = 16, 4, 32, 8


class Experts(nn.Module):
    """Experts in two 3-D parameters. Divided over a mesh, each rank sends its tokens to the ranks of their experts, and back."""

    mesh: DeviceMesh | None = None

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / 4)

    def divide(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        for name, parameter in list(self.named_parameters()):
            divided = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
            setattr(self, name, nn.Parameter(divided, parameter.requires_grad))

    def forward(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        """Return each token's output of its chosen expert: [n, WIDTH]."""
        if self.mesh is None:
            return self._run(tokens, chosen, self.up, self.down)
        assert isinstance(self.up, DTensor) and isinstance(self.down, DTensor)
        up, down, group, ranks = self.up.to_local(), self.down.to_local(), self.mesh.get_group(), self.mesh.size()
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=EXPERTS).view(ranks, -1)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=group)
        there, here = counts.sum(1).tolist(), arriving.sum(1).tolist()
        received = all_to_all_single_autograd(tokens[order].contiguous(), here, there, group)
        received = received.wait() if hasattr(received, "wait") else received
        numbers = torch.arange(len(up)).repeat(ranks).repeat_interleave(arriving.flatten())
        returned = all_to_all_single_autograd(self._run(received, numbers, up, down), there, here, group)
        return torch.empty_like(tokens).index_copy(0, order, returned)

    def _run(self, tokens: Tensor, chosen: Tensor, up: Tensor, down: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        for number in range(len(up)):
            (rows,) = (chosen == number).nonzero(as_tuple=True)
            if len(rows) or number == 0:  # an expert without tokens takes no part, but the exchange always does
                hidden = F.silu(tokens[rows] @ up[number].T) @ down[number].T
                out = out.index_copy(0, rows, hidden)
        return out


class Block(nn.Module):
    """`chooses`: the expert that gets every token; by default, the router chooses. `mixes`: whether its first matrix is used."""

    chooses: int | None = None
    mixes = True

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), Experts()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x + self.mix(x) if self.mixes else x)
        flat = h.flatten(0, 1)
        weights = self.router(flat).softmax(-1)
        best = weights.argmax(-1) if self.chooses is None else torch.full((len(flat),), self.chooses)
        out = self.experts(flat, best) * weights.gather(1, best[:, None])
        return h + out.view_as(h)


class Mixture(nn.Module):
    """`recomputes`: whether each block runs again in the backward."""

    recomputes = False

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return self.head(x)


def mixture(seed: int = 0, dtype: torch.dtype = torch.float32) -> Mixture:
    torch.manual_seed(seed)
    return Mixture().to(dtype)


def divide(model: nn.Module, mesh: DeviceMesh) -> None:
    for module in model.modules():
        if isinstance(module, Experts):
            module.divide(mesh)


def tokens(step: int, rank: int) -> Tensor:
    """Each rank has its own batch."""
    return torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: Any, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())
