"""Activation checkpointing changes memory and time, but no bit, under every stage, dtype and place of saved inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from memory import allocated_peak
from models import OPTIMIZERS, tokens
from quiet import no_warnings
from rich.console import Console
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from twin import LARGE_BUCKETS, build_engine, engine_steps, update

import zeroshard
from zeroshard import ConfigError, Policy, Precision, UsageError, checkpointing
from zeroshard.engine.recompute.checkpointing import Checkpointer, Checkpointing
from zeroshard.testing import Run, Workload, train
from zeroshard.testing.gpt import GPT, GPTConfig

WIDTH, DEPTH = 16, 4


class Block(nn.Module):
    """Takes a tuple and a keyword, drops at random, and returns a dict: what models do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, pair: tuple[Tensor, Tensor], *, scale: Tensor) -> dict[str, Tensor]:
        x, positions = pair
        y = F.dropout(self.down(F.gelu(self.up(self.norm(x + positions)))), 0.2, self.training)
        return {"x": x + scale * y}


class Model(nn.Module):
    def __init__(self, run: Callable[..., Any] = lambda block, *args, **kwargs: block(*args, **kwargs)) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 31)
        self.register_buffer("positions", torch.randn(5, WIDTH))
        self.run = run

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1])
        scale = torch.tensor(0.5)
        for block in self.blocks:
            x = self.run(block, (x, self.positions.to(x.dtype)), scale=scale)["x"]
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), tokens[:, 1:].flatten())


def trained(rank: int, stage: int, dtype: torch.dtype | None, options: Checkpointing | None, own: bool = False) -> Run:
    """Train with two microbatches a step."""
    checkpointer = None if options is None else Checkpointer(options)

    def make_model() -> nn.Module:
        model = Model(checkpointer.checkpoint) if own and checkpointer is not None else Model()
        if checkpointer is not None and not own:
            checkpointer.checkpoint_units(model)
        torch.manual_seed(7 + rank)  # dropout differs from rank to rank
        return model

    work = Workload(make_model, tokens, OPTIMIZERS["fused AdamW"], steps=4, microbatches=2, max_norm=1.0)
    return train(rank, work, Policy.stage(stage), precision=Precision(dtype), bucket_numel=LARGE_BUCKETS)


OPTIONS = {
    "plain": Checkpointing(),
    "cpu": Checkpointing(cpu_checkpointing=True),
    "profile": Checkpointing(profile=True, synchronize_checkpoint_boundary=True),
}


@pytest.mark.ranks(2)
@pytest.mark.quick(2)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("own", [False, True], ids=["units", "own calls"])
def test_the_bits_are_those_without_checkpointing(rank: int, own: bool, stage: int, dtype: torch.dtype | None) -> None:
    expected = trained(rank, stage, dtype, None)
    for name, options in OPTIONS.items():
        assert trained(rank, stage, dtype, options, own).equals(expected), name


def test_the_profile_counts_calls_seconds_and_bytes_of_the_outermost_modules() -> None:
    checkpointer, model = Checkpointer(Checkpointing(profile=True)), Model()
    checkpointer.checkpoint_units(model, ["blocks.*"])  # the blocks, and modules inside them
    for step in range(3):
        model(*tokens(0, step)).backward()
    assert list(checkpointer.costs) == [f"blocks.{number}" for number in range(DEPTH)]
    for cost in checkpointer.costs.values():
        assert (cost.calls, cost.nbytes) == (3, 3 * 3 * 5 * WIDTH * 4)
        assert cost.forward > 0 and cost.recompute > 0
    assert checkpointer.table().row_count == DEPTH
    Console(width=100, quiet=True).print(checkpointer.table())
    checkpointer.checkpoint_units(model)
    checkpointer.remove()
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    checkpointing.reset()


def test_as_users_of_deepspeed_call_it() -> None:
    assert not checkpointing.is_configured()
    config = {
        "activation_checkpointing": {
            "cpu_checkpointing": True,
            "profile": True,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    }
    made = checkpointing.configure(None, deepspeed_config=config, synchronize=True)
    assert checkpointing.is_configured()
    assert made.options == Checkpointing(cpu_checkpointing=True, synchronize_checkpoint_boundary=True, profile=True)
    x = torch.randn(3, requires_grad=True)
    checkpointing.checkpoint(torch.sin, x).sum().backward()
    assert torch.equal(x.grad, x.detach().cos())
    checkpointing.reset()
    assert not checkpointing.is_configured()
    with pytest.raises(ConfigError, match="unknown key"):
        checkpointing.configure(deepspeed_config={"activation_checkpointing": {"partition": True}})


def test_options_without_effect_are_named() -> None:
    block = {"partition_activations": True, "contiguous_memory_optimization": True, "number_checkpoints": "4"}
    with pytest.warns(UserWarning, match="partition_activations, contiguous_memory_optimization, number_checkpoints"):
        checkpointing.configure(deepspeed_config={"activation_checkpointing": block})
    with pytest.warns(UserWarning, match="ignores partition_activations, contiguous_checkpointing, num_checkpoints: "):
        checkpointing.configure(None, None, True, True, 4)
    with no_warnings():
        checkpointing.configure(None, None, False, False, checkpoint_in_cpu=True)


@pytest.mark.ranks(2)
def test_a_config_checkpoints_units_without_touching_the_model(rank: int) -> None:
    def engine(**block: Any) -> zeroshard.Engine:
        return build_engine(3, make_model=Model, activation_checkpointing=block)

    keys = {*Model().state_dict()} - {"positions"}
    expected = engine_steps(engine(), rank, range(3))
    for chosen, numbers in (("auto", (0, 1, 2, 3)), (["blocks.1", "blocks.[23]"], (1, 2, 3))):
        found = engine(checkpoint_units=chosen, profile=True)
        assert {*dict(found.module.named_parameters())} == keys
        losses = engine_steps(found, rank, range(3))
        assert all(map(torch.equal, losses, expected))
        copy.deepcopy(found.module.blocks[0].up)
        assert list(found.checkpointing.costs) == [f"blocks.{number}" for number in numbers]
        found.destroy()
        assert not any("forward" in module.__dict__ for module in found.module.modules())
    with pytest.raises(UsageError, match="no module of the model is called 'auto'"):
        engine(checkpoint_units=["auto"])


@pytest.mark.parametrize("options", OPTIONS)
def test_an_input_that_is_changed_in_place_is_never_silently_wrong(options: str) -> None:
    linear = nn.Linear(4, 4)
    x = torch.randn(2, 4)

    def function(h: Tensor) -> Tensor:
        return linear(h.mul_(2)).sin()

    expected = torch.autograd.grad(linear(2 * (x + 0)).sin().sum(), linear.weight)[0]
    hidden = x.clone().requires_grad_() + 0
    out = Checkpointer(OPTIONS[options]).checkpoint(function, hidden)
    try:
        got = torch.autograd.grad(out.sum(), linear.weight)[0]
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        torch.testing.assert_close(got, expected)


def test_a_second_backward_and_eval() -> None:
    for options in OPTIONS.values():
        checkpointer = Checkpointer(options)
        model = Model(checkpointer.checkpoint)
        loss = model(*tokens(0, 0))
        one = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        other = torch.autograd.grad(loss, list(model.parameters()))
        assert all(map(torch.equal, one, other))
        with torch.no_grad(), no_warnings():
            model.eval()(*tokens(0, 0))


def _activations(config: GPTConfig, batch: int) -> int:
    """Bytes that autograd keeps of one block, without its weights and input."""
    block = GPT(config).blocks[0]
    x = torch.randn(batch, config.context, config.width, requires_grad=True)
    known = {tensor.untyped_storage().data_ptr() for tensor in [x, *block.parameters()]}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    half = config.width // config.heads // 2
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = block(x, torch.ones(config.context, half), torch.ones(config.context, half))
    del output
    return sum(nbytes for address, nbytes in kept.items() if address not in known)


DEEP = GPTConfig(layers=12, width=384, heads=8, context=256)
SAMPLES = 4


@pytest.mark.full
@pytest.mark.ranks(2)
def test_the_peak_is_what_the_derivation_says(rank: int) -> None:
    """12 blocks, stage 3, 2 ranks, fp32. With u bytes of parameters a block, torch's allocator hands out at most:

    shards            parameters, gradients and Adam's two states: 4 x 12 u / 2, and the root's
    two units         the block that runs and the next one: 2 u, and the root whole
    activations       of the one block that is computed again
    saved inputs      12 of [batch, context, width]

    Gradients travel in shared memory, and are made while activations are freed.
    """
    u, root = 4 * 12 * DEEP.width**2, 4 * 2 * DEEP.vocabulary * DEEP.width
    shards = 4 * (DEEP.layers * u + root) // 2
    saved = 4 * DEEP.layers * SAMPLES * DEEP.context * DEEP.width
    derived = shards + 2 * u + root + _activations(DEEP, SAMPLES) + saved

    def work() -> None:
        with zeroshard.sharded_init():
            model = GPT(DEEP)
        Checkpointer().checkpoint_units(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        zeroshard.shard(model, optimizer, 3)
        for _ in range(2):  # the second step finds Adam's states
            data = torch.randint(0, 256, (SAMPLES, DEEP.context + 1))
            update(model(data[:, :-1], data[:, 1:]), optimizer)

    assert 0.95 * derived < allocated_peak(work) < 1.05 * derived


def test_a_function_gets_the_callers_own_lists() -> None:
    linear = nn.Linear(4, 4)

    def block(x: Tensor, *, found: list[Tensor]) -> Tensor:
        found.append(x)
        return linear(x).tanh()

    found: list[Tensor] = []
    y = Checkpointer(Checkpointing()).checkpoint(block, torch.ones(2, 4), found=found)
    assert len(found) == 1
    y.sum().backward()
