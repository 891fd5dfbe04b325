"""Master weights are what rests at stage 3: 14 bytes a parameter, and the bits of a run that stores 16-bit copies, too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from models import MODELS, OPTIMIZERS, tokens, workload
from ranks import on_ranks
from torch import Tensor
from twin import (
    ACCELERATOR,
    CPU,
    DISK,
    LOSS_SCALES,
    Setting,
    as_set,
    build,
    everything,
    expect_equal,
    gpt_batch,
    kept,
    same,
    step,
)

import zeroshard
from zeroshard import Offload, Policy, Precision, Residency, UsageError
from zeroshard.checkpoint.loading import open_checkpoint
from zeroshard.engine.config.load import load_config
from zeroshard.testing import Workload, train
from zeroshard.testing.gpt import GPT, GPTConfig

TWO = Policy.stage(3).offloaded(optimizer=CPU)
"""Without an accelerator, its states are in the same memory. The places differ, so it stores 16-bit copies."""
ONE = Policy.stage(3)
BF16 = Precision(torch.bfloat16)


def both(body: Callable[[int, Policy], Any], ranks: int = 2) -> None:
    """Run a body under both policies: what it returns, tensors by name, is the same on every rank."""

    def run(rank: int) -> None:
        expected, found = body(rank, TWO), body(rank, ONE)
        assert expected.keys() == found.keys()
        for name, value in found.items():
            assert torch.equal(value, expected[name]), name

    on_ranks(run, ranks)


# ---------------------------------------------------------------------- numbers


@pytest.mark.ranks(2)
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("name", ["skipping", "frozen base", "called twice", "tied"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_the_bits_are_the_same(rank: int, name: str, precision: str, microbatches: int) -> None:
    work = workload(name, steps=3, microbatches=microbatches, max_norm=0.5, loss_scale=LOSS_SCALES[precision])
    settings = {
        "both": Setting(TWO), "masters": Setting(ONE), "over gloo": Setting(ONE, "gloo"), "kept": Setting(kept(ONE)),
        "without overlap": Setting(ONE, overlap=False), "nothing ahead": Setting(replace(ONE, prefetch_numel=0)),
        "apart": Setting(ONE, apart=True), "parked": Setting(ONE, apart=True, parks=CPU),
    }  # fmt: skip
    expect_equal(rank, work, settings, precision)


@pytest.mark.ranks(4)
@pytest.mark.full
def test_the_bits_over_hosts(rank: int) -> None:
    """Sums that cross hosts; where each host has the whole, both rest."""
    per_host = Policy.stage(3, within=2)
    everywhere = replace(per_host, parameters=Residency(sharded=True))
    settings = {"per host": Setting(per_host), "over all": Setting(everywhere)}
    expect_equal(rank, workload(steps=2), settings, "bf16")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("parameters", [ACCELERATOR, CPU, DISK])
@pytest.mark.parametrize("optimizer", [CPU, DISK])
def test_the_bits_where_states_rest_elsewhere(rank: int, parameters: Any, optimizer: Any, tmp_path: Path) -> None:
    how = Offload(str(tmp_path), buffer_numel=4096, block_nbytes=4096)
    elsewhere = ONE.offloaded(parameters=parameters, optimizer=optimizer, offload=how)
    settings = {"here": Setting(ONE), "elsewhere": Setting(elsewhere, apart=True)}
    halved = replace(how, ratio=0.5)  # half of the units keep their optimizer states on the accelerator
    settings["a half"] = Setting(ONE.offloaded(optimizer=optimizer, offload=halved), apart=True)
    expect_equal(rank, workload(steps=2), settings, "bf16")


# ---------------------------------------------------------------------- bytes


@pytest.mark.ranks("ranks", fresh=True)
@pytest.mark.parametrize("ranks", [1, 2])
def test_fourteen_bytes_a_parameter(rank: int, ranks: int) -> None:
    config = GPTConfig(layers=4, width=96, heads=4, context=16)
    numel = sum(parameter.numel() for parameter in GPT(config).parameters())
    precision = replace(BF16, accumulate_dtype=torch.bfloat16)
    for policy, nbytes in ((TWO, 16), (ONE, 14)):
        run = train(rank, Workload(lambda: GPT(config), gpt_batch, steps=2), policy, precision=precision)
        assert sum(run.formula.values()) == pytest.approx(nbytes * numel / ranks)
        for kind, expected in run.formula.items():
            assert run.memory[kind] == pytest.approx(expected, rel=0.02), kind


@pytest.mark.full
def test_checkpoints_keep_their_bytes(tmp_path: Path) -> None:
    """The same files, which load under either policy, at another world size, and by torch's own checkpoints."""

    def save(rank: int) -> dict[str, Tensor]:
        for policy, name in ((TWO, "both"), (ONE, "masters")):
            model, sharded = build(policy, precision=BF16)
            step(model, sharded, rank, 0)
            sharded.save(tmp_path / name, "a", values={})
            dcp.save({"train": zeroshard.DistributedState(sharded)}, checkpoint_id=tmp_path / f"dcp {name}")
        return everything(sharded)

    expected = on_ranks(save, 2)[0]

    def files(name: str) -> dict[str, bytes]:
        folder = open_checkpoint(tmp_path / name).folder
        return {path.suffix + str(path.stat().st_size): path.read_bytes() for path in folder.rglob("*.safetensors")}

    assert files("masters") == files("both") != {}

    def load(rank: int) -> None:
        for policy, name in ((TWO, "masters"), (ONE, "both"), (ONE, "masters")):
            _, sharded = build(policy, precision=BF16)
            sharded.load(tmp_path / name)
            assert same(everything(sharded), expected)
            _, sharded = build(policy, precision=BF16)
            dcp.load({"train": zeroshard.DistributedState(sharded)}, checkpoint_id=tmp_path / f"dcp {name}")
            assert same(everything(sharded), expected)

    for ranks in (2, 3):
        on_ranks(load, ranks)


# ---------------------------------------------------------------------- who writes


def test_writes_reach_what_rests() -> None:
    def body(rank: int, policy: Policy) -> dict[str, Tensor]:
        model, sharded = build(policy, precision=BF16)
        step(model, sharded, rank, 0)
        found = {}
        with zeroshard.unsharded(model.head, modifier_rank=1), torch.no_grad():
            model.head.weight[3:5].mul_(1.5)  # the other elements keep the digits of their masters
        found |= {f"1 {name}": value for name, value in everything(sharded).items()}
        tiny = torch.full_like(sharded.states.get("blocks.1.up.bias"), 1e-42)  # 0 in 16 bits
        sharded.states.set("blocks.1.up.bias", "parameters", tiny)
        with zeroshard.unsharded(model.blocks[1], modifier_rank=0), torch.no_grad():
            model.blocks[1].up.weight.data = model.blocks[1].up.weight.data * 2
            model.blocks[1].up.bias.fill_(-0.0)
            with zeroshard.unsharded(model.blocks[1]):  # which finds no change of its own
                pass
        step(model, sharded, rank, 1)
        found |= {f"2 {name}": value for name, value in everything(sharded).items()}
        value = torch.linspace(-1, 1, model.blocks[0].up.weight.numel()).view(model.blocks[0].up.weight.shape)
        sharded.states.set("blocks.0.up.weight", "parameters", value)
        mine = sharded.states.local("blocks.2.up.weight")
        for part in mine:
            part.tensor.add_(1e-3)
        sharded.states.set_local("blocks.2.up.weight", "parameters", mine)
        found |= {f"3 {name}": value for name, value in everything(sharded).items()}
        model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
        step(model, sharded, rank, 2)
        return found | {f"4 {name}": value for name, value in everything(sharded).items()}

    both(body)


def test_writes_without_a_modifier_are_refused() -> None:
    def body(rank: int, policy: Policy) -> dict[str, Tensor]:
        model, sharded = build(policy, precision=BF16)
        step(model, sharded, rank, 0)
        before = everything(sharded)
        with (
            pytest.raises(
                UsageError, match=r"changed inside unsharded\(\) without a modifier rank: embedding\.weight\. "
            ),
            zeroshard.unsharded(model),
            torch.no_grad(),
        ):
            model.head.weight.mul_(2)
        assert same(everything(sharded), before)
        return before

    both(body)


# ---------------------------------------------------------------------- states that change


def test_what_is_frozen_and_freed() -> None:
    def body(rank: int, policy: Policy) -> dict[str, Tensor]:
        model, sharded = build(policy, precision=BF16, make_model=MODELS["untied"])
        found = {}
        for number, is_trained in enumerate((False, True, False)):
            step(model, sharded, rank, number)
            model.blocks[1].requires_grad_(is_trained)
            model.blocks[0].up.requires_grad_(not is_trained)
            sharded.update_trainable()
            found |= {f"{number} {name}": value for name, value in everything(sharded).items()}
            frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
            assert {sharded.states.get(name).dtype for name in frozen} == {torch.bfloat16}
        step(model, sharded, rank, 3)
        found |= everything(sharded)
        sharded.remove()
        return found | {f"{name} after": parameter.detach() for name, parameter in model.named_parameters()}

    both(body)


@pytest.mark.parametrize("states", [["optimizer"], ["parameters"], ["gradients"], ["parameters", "optimizer"]], ids=str)
def test_what_is_parked(states: list[str], tmp_path: Path) -> None:
    """Master weights that rest alone go with the parameters: a forward needs them."""

    def body(rank: int, policy: Policy) -> dict[str, Tensor]:
        with as_set(Setting(policy, apart=True)):
            model, sharded = build(policy, precision=BF16, make_optimizer=OPTIMIZERS["AdamW"])
            found = {}
            for number, place in enumerate((CPU, DISK)):
                step(model, sharded, rank, number)
                freed = sharded.offload_states(states, place, Offload(str(tmp_path)))
                assert freed > 0 or states == ["gradients"] or policy is TWO  # its optimizer is not on the accelerator
                if "parameters" in states:
                    with pytest.raises(UsageError, match="parked"):
                        model(*tokens(rank, number))
                else:
                    found[f"loss {number}"] = model(*tokens(rank, number)).detach()
                sharded.reload_states()
            step(model, sharded, rank, 2)
            return found | everything(sharded)

    both(body)


def test_a_plan_counts_it() -> None:
    def small() -> GPT:
        return GPT(GPTConfig(layers=2, width=256, heads=2, context=16))

    numel = sum(parameter.numel() for parameter in small().parameters())
    config = {
        "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW"},
    }  # fmt: skip
    batch = (torch.zeros(2, 16, dtype=torch.long),) * 2
    made = zeroshard.plan(small, config, world_size=2, batch=batch, presets=False).rows[0]
    nbytes = sum(made.figures.states[kind] for kind in ("parameters", "gradients", "optimizer"))
    assert nbytes == pytest.approx(14 * numel / 2, rel=0.02)


def test_the_option_that_was_removed_says_so() -> None:
    with pytest.raises(UsageError, match=r"always rest as their master weights .* Leave it out"):
        replace(Policy.stage(3), rests_as_masters=True)
    zero = {"stage": 3, "stage3_rests_as_masters": False}
    assert load_config({"train_batch_size": 1, "zero_optimization": zero}, 1).policy.keeps_masters_only
