"""Experts over their own ranks: the same bits at every stage of one mesh, within 1e-5 of one process, for every number of ranks.

What is so for tensor parallelism, too, is in test_divided_models.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from divided import Division, adamw, expect_all_same, expect_near, ordinary, states_of
from documents import ROOT
from experts import Block, Mixture, divide, loss_of, tokens
from ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from twin import build

import zeroshard
from zeroshard import Offload, Place, Policy, UsageError

RANKS = 4


def loss(model: nn.Module, number: int, rank: int) -> torch.Tensor:
    return loss_of(model, tokens(number, rank))


EXPERTS = Division(Mixture, divide, "ep", lambda mesh: mesh, loss)


def all_to_one(model: Mixture) -> None:
    for block in model.blocks:
        block.chooses = 2


@pytest.mark.parametrize("change", [ordinary, all_to_one])
@pytest.mark.parametrize("ep", [1, 2, 4])
def test_stages_have_the_same_bits_and_are_one_process(ep: int, change: Callable[[Mixture], None]) -> None:
    first = expect_all_same(on_ranks(partial(EXPERTS.train, steps=10), RANKS, ep, range(4), change))
    expect_near(first, EXPERTS.in_one_process(RANKS, 10, change))


@pytest.mark.ranks(4)
def test_a_rank_without_tokens_and_infinite_gradients(rank: int) -> None:
    """One rank's loss does not depend on the model, and one rank's expert overflows: every rank sees it."""
    for stage in (1, 2, 3):
        sharded = EXPERTS.shard(2, stage, all_to_one)
        (loss(sharded.model, 0, rank) * (0 if rank == 1 else 1)).backward()
        assert math.isfinite(sharded.clip_grad_norm_(1.0))
        sharded.optimizer.step()
        sharded.optimizer.zero_grad()
        assert all(torch.isfinite(one).all() for one in states_of(sharded).values())
        (loss(sharded.model, 1, rank) * (math.inf if rank == 3 else 1)).backward()
        assert not math.isfinite(sharded.clip_grad_norm_(1.0))
        sharded.optimizer.zero_grad()
        sharded.remove()


def test_ranks_that_leave_out_parameters_do_not_wait_for_each_other() -> None:
    """A rank must not wait for another's reduction in its backward, while that one waits for it in the exchange of tokens."""

    def body(rank: int) -> list[list[float]]:
        def deep(model: Mixture) -> None:
            model.blocks.extend(Block() for _ in range(4))
            for block in model.blocks:
                block.mixes = rank % 2 == 0

        found = []
        for stage in (0, 1, 2, 3):
            sharded = EXPERTS.shard(2, stage, deep, overlap=False)
            found.append(EXPERTS.take_steps(sharded, range(2))["norms"])
            sharded.remove()
        return found

    for norms in on_ranks(body, RANKS, timeout=60):
        assert all(one == norms[0] for one in norms)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("names", "values"), [(("dp", "ep"), (12, 13)), (("ep", "dp"), (10, 12))])
def test_a_modifier_rank_changes_its_own_experts(rank: int, names: tuple[str, str], values: tuple[int, int]) -> None:
    """Of experts, the values of the ranks that divide the model with the modifier rank count."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    for stage in (1, 3):
        sharded = EXPERTS.shard(mesh, stage)
        model: Any = sharded.model
        with torch.no_grad(), zeroshard.unsharded(model, modifier_rank=2):
            model.head.weight.fill_(rank)
            model.blocks[0].experts.up.to_local().fill_(10 + rank)
        assert torch.equal(sharded.states.get("head.weight"), torch.full((32, 16), 2.0))
        up = sharded.states.get("blocks.0.experts.up")
        assert up[:2].eq(values[0]).all() and up[2:].eq(values[1]).all()
        numbers = torch.arange(up.numel()).view_as(up).float()
        sharded.states.set("blocks.0.experts.up", "parameters", numbers)
        with zeroshard.unsharded(model):
            assert torch.equal(model.blocks[0].experts.up.full_tensor(), numbers)
        sharded.remove()


# ---------------------------------------------------------------------- memory and bytes


@pytest.mark.ranks(4)
def test_memory_and_bytes_are_those_of_the_formulas(rank: int) -> None:
    """Experts' shards are of W / ep ranks: the same memory for every ep, and messages between the ranks with the same experts.

    A step at stage 3 gathers an expert's weights twice and reduces them once, over W / ep ranks: none at all where ep is W.
    """
    memory, sent = [], {}
    for ep in (1, 2, 4):
        sharded = EXPERTS.shard(ep, 3, units=zeroshard.Units(leaf_classes=("Block",)))
        EXPERTS.take_steps(sharded, [0])
        formula, report = sharded.memory_formula(), sharded.memory_report()
        for kind in ("parameters", "optimizer"):
            assert report[kind] == pytest.approx(formula[kind], rel=0.15), kind
        memory.append(formula)
        sharded.comm_report()
        EXPERTS.take_steps(sharded, [1])
        sent[ep] = sharded.comm_report()
        sharded.remove()
    assert all(other == pytest.approx(memory[0]) for other in memory)
    numel = sum(one.numel() for name, one in Mixture().named_parameters() if ".experts." in name)
    # Each rank sends its shard of numel / W elements to the other W / ep - 1 ranks with the same experts.
    expected = {ep: 4 * numel / RANKS * (RANKS / ep - 1) for ep in (1, 2, 4)}
    # Of the two blocks, the last is kept between its forward and its backward.
    for kind, times in (("all_gather", 1.5), ("reduce_scatter", 1)):
        for ep in (2, 4):
            assert sent[1][kind] - sent[ep][kind] == times * (expected[1] - expected[ep]), kind


def test_the_break_even_of_the_docs() -> None:
    """What experts' ranks save and cost is equal at 9 E f / (4 k) tokens, for every number of them; the table has these numbers."""
    page = (ROOT / "docs" / "mixtures_of_experts.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [\w .-]+ \| (\d+) \| ([\d,]+) \| (\d+) \| ([\d,]+) \| ([\d,]+) \|$", page, re.MULTILINE)
    assert len(rows) == 4
    for row in rows:
        experts, size, chosen, tokens, tokens_of_fp32 = (int(number.replace(",", "")) for number in row)
        assert tokens == 9 * experts * size / (4 * chosen) and tokens_of_fp32 == tokens * 4 / 3
        for ranks, of_experts in ((8, 2), (64, 8), (64, 64)):
            width = 128
            saved = 3 * 3 * experts * width * size * (1 - 1 / ranks - (1 / of_experts - 1 / ranks))
            cost = 4 * tokens * chosen * width * (1 - 1 / of_experts)
            assert saved == pytest.approx(cost)


# ---------------------------------------------------------------------- refusals


def replicated(model: Any, mesh: DeviceMesh) -> None:
    divide(model, mesh)
    model.head.weight = nn.Parameter(distribute_tensor(model.head.weight.detach(), mesh, [Replicate()]))


def uneven(model: Any, mesh: DeviceMesh) -> None:
    divide(model, mesh)
    model.blocks[0].experts.up = nn.Parameter(distribute_tensor(torch.ones(3, 4, 4), mesh, [Shard(0)]))


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "undivided": ("has no DTensors: divide the experts with", {"cut": lambda model, mesh: None}),
    "replicated": ("leave it an ordinary parameter", {"cut": replicated}),
    "uneven": ("has 3 experts, which 2 ranks cannot divide evenly", {"cut": uneven}),
    "disk": (
        "Use CPU memory instead",
        {"policy": Policy.stage(3).offloaded(optimizer=Place.DISK, offload=Offload("/tmp"))},
    ),
    "within": ("leave it out", {"policy": replace(Policy.stage(3), within=2)}),
    "whole parameters": ("needs whole parameters", {"elementwise": False}),
    "group of one dimension": ("pass the mesh of both dimensions", {"group": lambda mesh: mesh["dp"]}),
    "no group": ("pass the mesh of both dimensions", {"group": lambda mesh: None}),
    "unnamed": (
        'pass a mesh of two, named "dp" and "ep"',
        {"group": lambda mesh: init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))},
    ),
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("case", REFUSED)
def test_refusals(rank: int, case: str) -> None:
    told, how = REFUSED[case]
    options = {"policy": Policy.stage(2), "cut": divide, "group": lambda mesh: mesh} | how
    mesh, model = EXPERTS.meshed(2), EXPERTS.made()
    options.pop("cut")(model, mesh["ep"])
    group = options.pop("group")(mesh)
    with pytest.raises(UsageError, match=re.escape(told)):
        build(make_model=lambda: model, make_optimizer=lambda _: adamw(model), group=group, **options)
