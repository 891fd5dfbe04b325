"""torch.compile: compiled blocks give the same bits as without zeroshard, and are not compiled again."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from models import MODELS, tokens
from oracles import same_on_all_ranks, train_reference
from quiet import WITH_INDUCTOR
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeroshard
from zeroshard import Offload, Place, Policy, Precision, Sharded
from zeroshard.testing import Workload, run_ranks, train
from zeroshard.testing.gpt import GPT, GPTConfig

LAYERS = 9
"""More blocks than torch.compile makes graphs of one function (8): they must share."""
CONFIG = GPTConfig(layers=LAYERS, width=32, heads=4, context=16)
BF16 = Precision(param_dtype=torch.bfloat16)


@pytest.fixture(autouse=True)
def kept_code(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What inductor compiles is shared by ranks, and kept from run to run."""
    cache = request.config.cache
    assert cache is not None
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache.mkdir("inductor")))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no pool of processes beside the ranks


class Checkpointing(GPT):
    """torch's checkpointing around each block."""

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        cos, sin = self.rotations(x)
        for block in self.blocks:
            x = checkpoint(block, x, cos, sin, use_reentrant=False)
        logits: Tensor = self.head(self.norm(x))
        assert targets is not None
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def compiled(model: nn.Module, how: str, **options: Any) -> nn.Module:
    """The model, compiled in one of the ways that users have."""
    if how == "wrapped blocks":
        for name, block in list(model.get_submodule("blocks").named_children()):
            setattr(model.get_submodule("blocks"), name, torch.compile(block, **options))
    elif how == "blocks in place":
        for block in model.get_submodule("blocks").children():
            block.compile(**options)
    elif how == "wrapped model":
        return torch.compile(model, **options)  # type: ignore[return-value]
    else:
        assert how == "model in place"
        model.compile(**options)
    return model


GPT_OF_BLOCKS = partial(GPT, CONFIG)


def texts(rank: int, microbatch: int, length: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * microbatch + rank)
    batch = torch.randint(0, 256, (2, length + 1), generator=generator)
    return batch[:, :-1], batch[:, 1:]


def lengths(rank: int, microbatch: int) -> tuple[Tensor, Tensor]:
    return texts(rank, microbatch, length=(16, 12)[microbatch % 2])


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


@dataclass(frozen=True)
class Case:
    """What is compiled how, and trained how."""

    how: str = "wrapped blocks"
    make: Callable[[], nn.Module] = GPT_OF_BLOCKS
    batch: Callable[[int, int], tuple[Any, ...]] = texts
    ranks: int = 2
    microbatches: int = 1
    precision: Precision | None = None
    frozen: bool = False
    checkpointed: bool = False
    on_disk: bool = False
    backend: str = "inductor"
    whole: bool = True
    """A block is one graph: `fullgraph=True` is asked for."""
    settled: int = 2
    """Steps after which nothing is compiled any more."""

    def build(self) -> nn.Module:
        model = self.make()
        if self.frozen:
            model.get_submodule("blocks")[1].requires_grad_(False)
            model.get_submodule("blocks")[4].attention.requires_grad_(False)
        model = compiled(model, self.how, fullgraph=self.whole, backend=self.backend)
        if self.checkpointed:
            zeroshard.checkpointing.Checkpointer().checkpoint_units(model)
        return model

    @property
    def workload(self) -> Workload:
        return Workload(self.build, self.batch, adamw, steps=5, microbatches=self.microbatches)

    def policy(self, stage: int) -> Policy:
        policy = Policy.stage(stage)
        if not self.on_disk:
            return policy
        offload = Offload(tempfile.gettempdir(), buffer_numel=1 << 16)
        where = {"optimizer": Place.DISK} if stage < 3 else {"optimizer": Place.DISK, "parameters": Place.DISK}
        return policy.offloaded(**where, offload=offload)  # type: ignore[arg-type]


@contextmanager
def nothing_compiled_after(steps: int, case: Case) -> Iterator[Callable[[Sharded], None]]:
    """What it gives is called after each step: it evaluates the model, and, after so many steps, forbids to compile."""
    done = 0

    def after_step(sharded: Sharded) -> None:
        nonlocal done
        sharded.model.eval()
        with torch.no_grad():
            sharded.model(*case.batch(0, done))
        sharded.model.train()
        done += 1
        if done == steps:
            torch.compiler.set_stance("fail_on_recompile")

    try:
        yield after_step
    finally:
        torch.compiler.set_stance("default")


def check(rank: int, case: Case) -> None:
    """Stages 0 to 3 give the bits of the compiled blocks under plain torch, as far as any policy does."""
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # this process is the test's own
    of_blocks = case.how in ("wrapped blocks", "blocks in place")
    first: dict[Any, Any] = {}
    for stage in range(4):
        policy = case.policy(stage) if stage or not case.on_disk else Policy.stage(0)
        with nothing_compiled_after(case.settled, case) as after_step:
            run = train(rank, case.workload, policy, precision=case.precision, inspect=after_step)
        assert torch.isfinite(run.losses).all()
        assert same_on_all_ranks(run.parameters), f"stage {stage}"
        # With several microbatches there are two kinds of sums. Where the whole model is compiled, torch compiles its own modules
        # too where they have hooks: under stage 3 some of the root do.
        kind = (case.microbatches > 1 and policy.gradients.sharded, not of_blocks and stage == 3)
        assert run.equals(first.setdefault(kind, run)), f"other bits under stage {stage}"
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    one = first[False, False]
    for other in first.values():
        torch.testing.assert_close(other.losses, one.losses, rtol=1e-2, atol=1e-2)
    if case.precision is None:
        torch._dynamo.reset()
        plain = train_reference(case.workload, case.ranks, rank)
        if of_blocks:
            assert one.equals(plain), "other bits than the same compiled blocks under plain torch"
        else:  # without us a graph reaches across blocks, and its sums are made in another order
            torch.testing.assert_close(one.losses, plain.losses, rtol=1e-4, atol=1e-5)


WRAPPED = Case()
QUICK = replace(WRAPPED, backend="aot_eager")
"""The graphs are inductor's, and torch runs their operations: a minute of C++ compilers is left to the rest."""
CASES = {
    "wrapped blocks, as graphs": QUICK,
    "wrapped blocks": WRAPPED,
    "in place, accumulating, one rank": Case("blocks in place", microbatches=2, ranks=1),
    "our checkpointing, accumulating": Case(checkpointed=True, microbatches=2),
    "frozen parts, on disk": Case("blocks in place", frozen=True, on_disk=True),
    "bf16": replace(WRAPPED, precision=BF16, microbatches=2),
    "our checkpointing, in place, bf16": Case("blocks in place", checkpointed=True, precision=BF16, whole=False),
    "torch's checkpointing, accumulating": Case(make=partial(Checkpointing, CONFIG), microbatches=2),
    "torch's checkpointing, in place, one rank": Case("blocks in place", make=partial(Checkpointing, CONFIG), ranks=1),
    "frozen parts, accumulating": replace(WRAPPED, frozen=True, microbatches=2, ranks=1),
    "frozen parts, checkpointed": replace(WRAPPED, frozen=True, checkpointed=True),
    "on disk, checkpointed": replace(WRAPPED, on_disk=True, checkpointed=True),
    "two lengths": replace(WRAPPED, batch=lengths, settled=4),
    "wrapped model": Case("wrapped model", whole=False, microbatches=2),
    "model in place": Case("model in place", whole=False, ranks=1),
    "wrapped model, our checkpointing": Case("wrapped model", checkpointed=True, whole=False, ranks=1),
    "tied": Case(make=MODELS["tied"], batch=tokens, ranks=1),
    "called twice": Case(make=MODELS["called twice"], batch=tokens, microbatches=2),
}


@WITH_INDUCTOR
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case is QUICK else pytest.mark.full, id=name) for name, case in CASES.items()],
)
def test_compiled_models_give_the_bits_that_they_give_without_us(case: Case) -> None:
    run_ranks(check, case.ranks, case, timeout=300)
