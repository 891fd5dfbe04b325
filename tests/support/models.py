"""Owns the models of the tests, which are small, and awkward in different ways."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from zeroshard.optim.several import Several
from zeroshard.testing import Workload

WIDTH, VOCABULARY = 12, 31


class Residual(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.0))  # a scalar
        self.empty = nn.Parameter(torch.zeros(0, 3))  # no elements at all

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(F.gelu(self.up(self.norm(x)))) + self.empty.sum()


class Stack(nn.Module):
    """Uneven blocks with a tied embedding and head. The variants below override `run`."""

    def __init__(self, tied: bool = True, widths: Iterable[int] = (7, 33, 16)) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(map(Residual, widths))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.run(self.embedding(tokens[:, :-1]))
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), tokens[:, 1:].flatten())


class Untied(Stack):
    def __init__(self) -> None:
        super().__init__(tied=False)


class Frozen(Stack):
    """A stack whose second block is frozen, and a part of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)
        self.blocks[0].up.requires_grad_(False)


class FrozenBase(Untied):
    """A stack in which only a small part of each block is trained, as with LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for block in self.blocks:
            block.norm.requires_grad_(True)


class CalledTwice(Stack):
    def run(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](self.blocks[1](self.blocks[2](x))))


class Checkpointed(Stack):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


class CheckpointedTwice(Checkpointed):
    """A stack that calls one block twice. Reentrant checkpointing computes that block's gradients in two parts."""

    def run(self, x: Tensor) -> Tensor:
        for block in [*self.blocks, self.blocks[0]]:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


class FrozenCheckpointed(FrozenBase):
    use_reentrant = False
    run = Checkpointed.run  # type: ignore[assignment]


class Gated(Residual):
    """A block with an optional side path."""

    def __init__(self) -> None:
        super().__init__(9)
        self.side = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, open_: bool = False) -> Tensor:
        x = super().forward(x)
        return x + self.side(x) if open_ else x


class Skipping(Stack):
    """A stack with side paths. A rank's tokens decide which ones it takes, so some, all or no ranks do. `never` is unused."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Gated() for _ in range(3))
        self.never = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1])
        for block, token in zip(self.blocks, tokens[0], strict=False):
            x = block(x, open_=int(token) % 2 == 0)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), tokens[:, 1:].flatten())


class Normed(nn.Module):
    """A model with BatchNorm, whose buffers change in a forward, and with nested Sequential modules."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(5, 19, bias=False),
            nn.BatchNorm1d(19),
            nn.ReLU(),
            nn.Sequential(nn.Linear(19, 3), nn.Tanh()),
            nn.Linear(3, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).square().mean()


class Tiny(nn.Module):
    """A model with fewer elements than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x[:, :1]).square().mean()


def tokens(rank: int, microbatch: int, batch: int = 3) -> tuple[Tensor]:
    generator = torch.Generator().manual_seed(1000 * microbatch + rank)
    return (torch.randint(0, VOCABULARY, (batch, 6), generator=generator),)


def floats(rank: int, microbatch: int) -> tuple[Tensor]:
    return (torch.randn(4, 5, generator=torch.Generator().manual_seed(1000 * microbatch + rank)),)


def bfloats(rank: int, microbatch: int) -> tuple[Tensor]:
    return (floats(rank, microbatch)[0].bfloat16(),)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied": Stack,
    "untied": Untied,
    "frozen": Frozen,
    "frozen base": FrozenBase,
    "called twice": CalledTwice,
    "checkpointed": partial(Checkpointed, False),
    "checkpointed reentrant": partial(Checkpointed, True),
    "checkpointed twice": partial(CheckpointedTwice, False),
    "checkpointed twice reentrant": partial(CheckpointedTwice, True),
    "frozen checkpointed": FrozenCheckpointed,
    "skipping": Skipping,
    "batch norm": Normed,
    "tiny": Tiny,
}


def workload(name: str = "tied", **options: object) -> Workload:
    make_batch = floats if name in ("batch norm", "tiny") else tokens
    return Workload(make_model=MODELS[name], make_batch=make_batch, **options)  # type: ignore[arg-type]


def two_groups(model: nn.Module) -> list[dict[str, object]]:
    """Return param groups that cross buckets: matrices, and vectors without decay at a higher rate."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 3e-2, "weight_decay": 0.0}]


OPTIMIZERS = {
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
}


def sgd(parameters: Iterable[Tensor], lr: float = 0.1, momentum: float = 0.9) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=momentum)


def muon_with_adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return Muon for matrices and AdamW for the rest, as one."""
    listed = list(parameters)
    matrices = [p for p in listed if p.ndim == 2]
    muon = torch.optim.Muon(matrices, lr=1e-2, adjust_lr_fn="match_rms_adamw")
    return Several([muon, torch.optim.AdamW([p for p in listed if p.ndim != 2], lr=1e-2)])
