"""Optimizers that need whole parameters get them under every policy, and the config makes the right optimizers."""

from __future__ import annotations

import copy
import importlib
import json
import pkgutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import folders
import pytest
import torch
from insides import sharded_of
from models import Stack, muon_with_adamw, tokens, workload
from oracles import average_gradients, same_on_all_ranks, train_reference
from torch import nn
from twin import same, whole

import zeroshard.optim
from zeroshard import ConfigError, Lion, Policy, UsageError
from zeroshard.core.layout import lay_out_whole
from zeroshard.engine.config.schema import OptimizerBlock
from zeroshard.engine.from_config import create_optimizer
from zeroshard.optim.several import Several
from zeroshard.optim.states import KNOWN, REFUSED, states_per_parameter
from zeroshard.testing import train

OPTIMIZERS = {
    cls.__name__: cls
    for cls in (*vars(torch.optim).values(), Lion)
    if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "Adam": [{"amsgrad": True}],
    "AdamW": [{"amsgrad": True}],
    "RMSprop": [{"momentum": 0.9}, {"centered": True}, {"momentum": 0.9, "centered": True}],
}


def most_states(cls: Any, options: dict[str, Any]) -> tuple[int, int]:
    """Step once on a vector and on a matrix; return the most bytes of states per byte of a parameter, and the prediction."""
    measured, predicted = 0, 0
    for shape in ((64,), (8, 8)):
        if cls is torch.optim.Muon and len(shape) == 1:
            continue  # it takes matrices only
        parameter = nn.Parameter(torch.ones(shape))
        optimizer = cls([parameter], **options)
        parameter.grad = torch.ones(shape)
        optimizer.step()
        states = [value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor)]
        nbytes = sum(value.nbytes for value in states if value.shape == parameter.shape)
        assert nbytes % parameter.nbytes == 0
        measured = max(measured, nbytes // parameter.nbytes)
        predicted = states_per_parameter(optimizer)
    return measured, predicted


@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - REFUSED.keys()))
def test_the_table_of_states_is_what_an_optimizer_keeps(name: str) -> None:
    cls = OPTIMIZERS[name]
    measured, predicted = most_states(cls, {"momentum": 0.9} if name == "SGD" else {})
    assert measured == predicted == KNOWN[name].states
    for options in OPTIONS.get(name, []):
        measured, predicted = most_states(cls, options)
        assert measured == predicted > KNOWN[name].states
    derived = type("Derived", (cls,), {})
    assert states_per_parameter(derived([nn.Parameter(torch.ones(2, 2))])) == KNOWN[name].states


def test_the_table_of_states_has_every_optimizer() -> None:
    """An optimizer of a newer torch is found here first."""
    found = set()
    for module in pkgutil.iter_modules(zeroshard.optim.__path__):
        for value in vars(importlib.import_module(f"zeroshard.optim.{module.name}")).values():
            if isinstance(value, type) and issubclass(value, torch.optim.Optimizer):
                found.add(value.__name__)
    assert "Lion" in found
    assert (OPTIMIZERS.keys() | found) - {"Optimizer", "Several"} - REFUSED.keys() == KNOWN.keys()
    assert states_per_parameter(type("Unknown", (torch.optim.Optimizer,), {})([nn.Parameter(torch.ones(2))], {})) == 2


def with_elements(model: nn.Module) -> list[nn.Parameter]:
    """torch's Adafactor divides by zero on a parameter without elements, sharded or not."""
    return [parameter for parameter in model.parameters() if parameter.numel()]


BESIDE_A_LOOP = {
    "Lion": lambda p: Lion(p, lr=1e-3, weight_decay=0.1),
    "Muon and AdamW": muon_with_adamw,
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
}


@pytest.mark.ranks("ranks")
@pytest.mark.parametrize("model", ["tied", "frozen", "tiny"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("optimizer", BESIDE_A_LOOP)
def test_optimizers_give_the_bits_of_a_plain_loop(rank: int, optimizer: str, ranks: int, model: str) -> None:
    """Of whole parameters, too, which would give other numbers altogether if they were cut."""
    work = workload(model, make_optimizer=BESIDE_A_LOOP[optimizer], param_groups=with_elements, steps=5)
    oracle = train_reference(work, ranks, rank)
    for stage in range(4):
        run = train(rank, work, Policy.stage(stage))
        assert same_on_all_ranks(run.parameters)
        assert run.equals(oracle), f"other bits at stage {stage}"


@pytest.mark.parametrize("numels", [[], [5], [0, 0], [7, 100, 33, 0, 64, 1], list(range(40))])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_ranks_get_about_equally_much_of_whole_parameters(numels: list[int], world_size: int) -> None:
    layout = lay_out_whole(numels, world_size)
    pieces = [piece for bucket in layout.buckets for rank in range(world_size) for piece in bucket.shard_pieces(rank)]
    held = [(piece.index, piece.parameter_start, piece.numel) for piece in pieces]
    assert sorted(held) == [(index, 0, numel) for index, numel in enumerate(numels) if numel]
    if sum(numels):
        largest = max(*numels, sum(numels) / world_size)
        assert layout.numel / world_size <= 2 * largest + 16 * len(numels)  # the greedy bound, and alignment


def test_lion_follows_its_paper() -> None:
    torch.manual_seed(0)
    value = torch.randn(50)
    parameter, momentum = nn.Parameter(value.clone()), torch.zeros(50)
    optimizer = Lion([parameter], lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    for _ in range(5):
        gradient = torch.randn(50)
        parameter.grad = gradient.clone()
        optimizer.step()
        value = value - 0.01 * (torch.sign(0.9 * momentum + 0.1 * gradient) + 0.1 * value)
        momentum = 0.95 * momentum + 0.05 * gradient
        torch.testing.assert_close(parameter.detach(), value)
    assert optimizer.step(lambda: 3) == 3
    with pytest.raises(UsageError, match="betas"):
        Lion([parameter], betas=(0.9, 1.0))


@pytest.mark.parametrize(
    ("block", "cls", "expected"),
    [
        ({"type": "Adam", "params": {"lr": 0.1}}, torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.0, "fused": True}),
        ({"type": "adam", "params": {"adam_w_mode": False, "torch_adam": True}}, torch.optim.Adam, {"fused": True}),
        (
            {"type": "AdamW", "params": {"betas": [0.8, 0.9], "bias_correction": True}},
            torch.optim.AdamW,
            {"betas": (0.8, 0.9)},
        ),
        ({"type": "SGD", "params": {"lr": 1, "momentum": 0.9}}, torch.optim.SGD, {"momentum": 0.9, "fused": True}),
        ({"type": "Adagrad"}, torch.optim.Adagrad, {"lr": 0.01}),
        ({"type": "Lion", "params": {"betas": [0.95, 0.98]}}, Lion, {"betas": (0.95, 0.98)}),
        ({"type": "RMSprop", "params": {"alpha": 0.5}}, torch.optim.RMSprop, {"alpha": 0.5}),
        ({"type": "Adafactor"}, torch.optim.Adafactor, {}),
        ({"type": "Muon", "params": {"lr": 0.1, "torch_adam": True}}, Several, {"lr": 0.1}),
    ],
)
def test_the_config_makes_optimizers(block: dict[str, Any], cls: type, expected: dict[str, Any]) -> None:
    optimizer = create_optimizer(OptimizerBlock(**block), Stack().parameters())
    assert type(optimizer) is cls
    assert {key: optimizer.param_groups[0][key] for key in expected} == expected


RECORDED = json.loads((folders.RECORDED / "optimizers.json").read_text())
"""By support/recorded/record.py, of DeepSpeed 0.19.8: the param groups of an engine's optimizer, in accelerator and CPU memory."""


@pytest.mark.parametrize(
    "made", RECORDED["made"], ids=lambda made: f"{made['type']} {made['params']} {made['offloaded']}"
)
def test_what_a_config_leaves_out_is_what_deepspeed_takes(made: dict[str, Any]) -> None:
    block = OptimizerBlock(type=made["type"], params=made["params"])
    parameters = [nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))]
    if made["class"] in (None, "FusedLamb"):
        with pytest.raises(ConfigError, match=f"{made['type']} is not supported"):
            create_optimizer(block, parameters)
        return
    optimizer = create_optimizer(block, parameters)
    assert len(optimizer.param_groups) == len(made["groups"])
    for ours, theirs in zip(optimizer.param_groups, made["groups"], strict=True):
        assert {"lr"} < theirs.keys() & ours.keys()
        for key, value in theirs.items():
            if isinstance(value, list):
                value = tuple(value)  # noqa: PLW2901
            assert ours.get(key, value) == value, key
        assert theirs.keys() - ours.keys() <= {"bias_correction", "amsgrad"}
        assert theirs.get("bias_correction", True) and not theirs.get("amsgrad")  # what torch's do without a switch
    if made["type"] in ("Adam", "AdamW"):
        assert isinstance(optimizer, torch.optim.AdamW) is made["decays_apart"]


def test_muon_of_a_config_scales_updates_as_deepspeed_does() -> None:
    """By sqrt(rows / columns) of tall matrices."""
    made = create_optimizer(OptimizerBlock(type="Muon", params={"lr": 1.0}), [nn.Parameter(torch.zeros(8, 2))])
    (parameter,) = made.param_groups[0]["params"]
    parameter.grad = torch.eye(8)[:, :2]
    made.step()
    # Newton-Schulz leaves singular values near one.
    assert 0.6 * 2 < float(torch.linalg.matrix_norm(parameter.detach(), 2)) < 1.3 * 2


def test_muon_parts_the_param_groups_of_a_trainer() -> None:
    model = Stack(tied=False)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = create_optimizer(OptimizerBlock(type="Muon", params={"lr": 0.1}), groups, model)
    kinds = {
        id(p): (group["use_muon"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]
    }
    assert len(kinds) == len(decayed) + len(rest)
    for fqn, p in model.named_parameters():
        assert kinds[id(p)] == (p.ndim == 2 and fqn.startswith("blocks"), 0.1 if p.ndim > 1 else 0.0), fqn


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ({"type": "Lamb"}, "whole layers"),
        ({"type": "OneBitAdam"}, "compresses"),
        ({"type": "Nothing"}, "torch.optim has no 'Nothing'"),
        ({"type": "Adam", "params": {"max_grad_norm": 1.0}}, "gradient_clipping"),
        ({"type": "Adam", "params": {"learning_rate": 1.0}}, "optimizer.params.learning_rate"),
        ({"type": "Adam", "params": {"bias_correction": False}}, "bias_correction"),
        ({"type": "Adam", "params": {"lr": -1}}, "learning rate"),
        ({"type": "Adam", "params": {"lr": "fast"}}, "optimizer.params"),
        ({"type": "Adam", "params": {"betas": 3}}, "optimizer.params"),
        ({"type": "Adam", "params": {"betas": [0.9]}}, "optimizer.params"),
        ({"type": "LBFGS"}, "LBFGS uses all parameters at once"),
        ({"type": "SparseAdam"}, "SparseAdam needs sparse gradients"),
        ({"type": "Muon", "params": {"ns_method": "gram"}}, "ns_method is not supported.*Leave it out"),
        ({"type": "Muon", "params": {"adam_w_mode": False}}, "adam_w_mode = false is not supported with Muon"),
    ],
)
def test_optimizers_that_cannot_be_made(block: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        create_optimizer(OptimizerBlock(**block), Stack().parameters())


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("stage", "place"), [(0, "none"), (1, "cpu"), (2, "none"), (3, "none"), (3, "cpu")])
def test_muon_of_a_config_steps_as_two_optimizers_of_torch(rank: int, stage: int, place: str, tmp_path: Path) -> None:
    """Bit for bit, with a schedule, a save, and the optimizer's own `step`."""
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": "Muon", "params": {"muon_lr": 2e-2, "adam_lr": 1e-3, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": [2e-2, 1e-3], "warmup_num_steps": 3}},
        "zero_optimization": {"stage": stage, "offload_optimizer": {"device": place}},
    }
    torch.manual_seed(0)
    model = Stack(tied=False)
    plain = copy.deepcopy(model)
    engine, *_ = zeroshard.initialize(model=model, config=config)
    matrices = [p for name, p in plain.named_parameters() if p.ndim == 2 and name.startswith("blocks")]
    others = [p for name, p in plain.named_parameters() if p.ndim != 2 or not name.startswith("blocks")]
    muon = torch.optim.Muon(matrices, lr=2e-2, weight_decay=0.1, adjust_lr_fn="original")
    adamw = torch.optim.AdamW(others, lr=1e-3, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.1, fused=True)
    rates = []

    def train(numbers: Iterable[int], take: Callable[[], object]) -> None:
        for number in numbers:
            groups = [*muon.param_groups, *adamw.param_groups]
            for theirs, ours in zip(groups, engine.optimizer.param_groups, strict=True):
                theirs["lr"] = ours["lr"]
            rates.append([group["lr"] for group in groups])
            engine.backward(engine(*tokens(rank, number)))
            take()
            average_gradients(
                [*plain.parameters()], 2, lambda one, number=number: plain(*tokens(one, number)).backward()
            )
            muon.step()
            adamw.step()
            plain.zero_grad()
            assert same(whole(engine.module), dict(plain.named_parameters())), number

    train(range(3), engine.step)
    assert rates[1] != rates[2] and rates[0] == [0.0, 0.0]
    engine.save_checkpoint(tmp_path)
    halfway = copy.deepcopy([one.state_dict() for one in (plain, muon, adamw)])
    states = sharded_of(engine).states
    momentum = states.get("blocks.0.up.weight", "momentum_buffer")
    assert torch.equal(momentum, muon.state[plain.blocks[0].up.weight]["momentum_buffer"])
    assert torch.equal(states.get("head.weight", "exp_avg"), adamw.state[plain.head.weight]["exp_avg"])
    train([3], engine.optimizer.step)
    assert engine.global_steps == 4
    engine.destroy()
    engine, *_ = zeroshard.initialize(model=Stack(tied=False), config=config)
    engine.load_checkpoint(tmp_path)
    for one, state in zip((plain, muon, adamw), halfway, strict=True):
        one.load_state_dict(state)
    train([4, 5], engine.step)
    engine.destroy()
