"""Experts over their own ranks: the same bits at every stage of one mesh, within 1e-5 of one process, for every number of ranks."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import divided
import pytest
import torch
import torch.distributed.checkpoint as dcp
from divided import LARGEST_NORM, Run, adamw, expect_near, expect_same, states_of, values_of
from documents import ROOT
from experts import Block, Mixture, divide, loss_of, mixture, tokens
from ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import zeroshard
from zeroshard import Offload, Place, Policy, Sharded, UsageError
from zeroshard.checkpoint.consolidated import state_dict_of
from zeroshard.checkpoint.manifest import read_manifest

RANKS, STEPS = 4, 10


def ordinary(model: Mixture) -> None:
    """Leave a model as it is."""


def all_to_one(model: Mixture) -> None:
    for block in model.blocks:
        block.chooses = 2


def recomputed(model: Mixture) -> None:
    model.recomputes = True


Change = Callable[[Mixture], None]


def meshed(ep: int) -> DeviceMesh:
    return init_device_mesh("cpu", (RANKS // ep, ep), mesh_dim_names=("dp", "ep"))


def sharded_over(
    ep: int, policy: int | Policy, change: Change = ordinary, dtype: torch.dtype = torch.float32, **options: Any
) -> Sharded:
    model = mixture(dtype=dtype)
    change(model)
    mesh = meshed(ep)
    divide(model, mesh["ep"])
    return zeroshard.shard(model, adamw(model), policy, group=mesh, **options)


def loss(model: nn.Module, number: int, rank: int) -> torch.Tensor:
    return loss_of(model, tokens(number, rank))


def take_steps(sharded: Sharded, rank: int, steps: Sequence[int], microbatches: int = 1) -> Run:
    return divided.take_steps(sharded, loss, rank, steps, microbatches)


def trained(
    rank: int, ep: int, policies: Sequence[int | Policy], change: Change = ordinary, microbatches: int = 1,
    dtype: torch.dtype = torch.float32, steps: int = STEPS, **options: Any,
) -> list[Run]:  # fmt: skip
    runs = []
    for policy in policies:
        sharded = sharded_over(ep, policy, change, dtype, **options)
        run = take_steps(sharded, rank, range(steps), microbatches)
        run["states"] = states_of(sharded)
        with torch.no_grad():
            run["evaluated"] = float(loss_of(sharded.model, tokens(99, rank)))
        with zeroshard.unsharded(sharded.model):
            run["values"] = values_of(sharded.model)
        sharded.remove()
        runs.append(run)
    return runs


def in_one_process(change: Change = ordinary, microbatches: int = 1) -> Run:
    model = mixture()
    change(model)
    return divided.in_one_process(model, loss, RANKS, STEPS, microbatches)


@pytest.mark.parametrize("change", [ordinary, all_to_one])
@pytest.mark.parametrize("ep", [1, 2, 4])
def test_stages_have_the_same_bits_and_are_one_process(ep: int, change: Change) -> None:
    everyone = on_ranks(trained, RANKS, ep, range(4), change)
    first = everyone[0][0]
    for runs in everyone:
        for run in runs:
            expect_same(run, first)
        assert len({run["evaluated"] for run in runs}) == 1
    expect_near(first, in_one_process(change))


@pytest.mark.full
def test_transports_and_overlap_leave_the_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    like = on_ranks(trained, RANKS, 2, (1, 3), ordinary, 1, torch.float32, 3)[0]
    monkeypatch.setenv("ZEROSHARD_SHARED_MEMORY", "0")
    for runs in on_ranks(trained, RANKS, 2, (1, 2, 3), ordinary, 1, torch.float32, 3):
        like += runs
    like += on_ranks(partial(trained, overlap=False), RANKS, 2, (2, 3), ordinary, 1, torch.float32, 3)[1]
    for run in like:
        expect_same(run, like[0])


def test_dimensions_may_stand_in_any_order(tmp_path: Path) -> None:
    """The mesh ("ep", "dp"): ranks 0 and 2 divide the experts."""

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "dp"))
        found = []
        for stage in (1, 3):
            model = mixture()
            divide(model, mesh["ep"])
            sharded = zeroshard.shard(model, adamw(model), stage, group=mesh)
            run = take_steps(sharded, rank, range(2))
            with torch.no_grad(), zeroshard.unsharded(model, modifier_rank=1):
                experts: Any = model.blocks[0].experts.up
                experts.to_local().fill_(10 + rank)
            states = states_of(sharded)
            assert states["blocks.0.experts.up parameters"][:, 0, 0].tolist() == [11, 11, 13, 13]
            sharded.save(tmp_path, f"{stage}")
            found.append(run | {"values": {}, "states": states})
            sharded.remove()
            sharded = sharded_over(4, 2)
            sharded.load(tmp_path, f"{stage}")
            expect_equal_states(states_of(sharded), states)
            sharded.remove()
        expect_same(*found)

    on_ranks(body, RANKS)


@pytest.mark.full
@pytest.mark.parametrize("ep", [2, 4])
def test_accumulation_recomputation_and_offload_to_the_cpu(ep: int) -> None:
    how = [Policy.stage(stage) for stage in (2, 3)] + [Policy.stage(3).offloaded(optimizer=Place.CPU)]
    everyone = on_ranks(trained, RANKS, ep, how, ordinary, 2)
    everyone += on_ranks(partial(trained, overlap=False, bucket_numel=1500), RANKS, ep, [3], recomputed, 2)
    for runs in everyone[:RANKS]:
        for run in runs:
            expect_same(run, everyone[0][0])
    first = on_ranks(trained, RANKS, ep, (0, 1), recomputed, 2)
    for runs in first:
        expect_same(runs[1], runs[0])
    reference = in_one_process(microbatches=2)
    for run, *_ in (everyone[0], everyone[-1], first[0]):
        expect_near(run, reference)


@pytest.mark.parametrize("ep", [2, 4])
def test_parameters_in_bf16_have_master_weights(ep: int) -> None:
    everyone = on_ranks(trained, RANKS, ep, (0, 1, 2, 3), ordinary, 1, torch.bfloat16, 4)
    for runs in everyone:
        for run in runs:
            expect_same(run, everyone[0][0])
            assert run["states"]["blocks.0.experts.up parameters"].dtype == torch.float32


def without_router_gradients(model: Mixture) -> None:
    """A frozen router and frozen dense parts of a block, as in training of experts alone."""
    for block in model.blocks:
        block.router.requires_grad_(False)
    model.blocks[0].norm.requires_grad_(False)
    model.blocks[1].experts.down.requires_grad_(False)


def test_frozen_parts() -> None:
    everyone = on_ranks(trained, RANKS, 2, (1, 3), without_router_gradients)
    reference = in_one_process(without_router_gradients)
    for runs in everyone:
        for run in runs:
            expect_same(run, everyone[0][0])
    expect_near(everyone[0][0], reference)


def test_torch_clipping_and_gradients_by_name() -> None:
    """torch's own clipping sees the norms of whole parameters, and `states` has whole gradients."""

    def body(rank: int) -> list[Any]:
        model = mixture()
        losses = [loss_of(model, tokens(0, one)) for one in range(RANKS)]
        (sum(losses) / RANKS).backward()
        expected = {name: one.grad for name, one in model.named_parameters()}
        total = nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM)
        found = []
        for stage in (1, 2, 3):
            sharded = sharded_over(2, stage)
            loss_of(sharded.model, tokens(0, rank)).backward()
            norm = nn.utils.clip_grad_norm_(sharded.model.parameters(), LARGEST_NORM)
            assert float(norm) == pytest.approx(float(total), rel=1e-5)
            for name, value in expected.items():
                torch.testing.assert_close(sharded.states.get(name, "gradients"), value, rtol=0, atol=1e-6)
            sharded.optimizer.step()
            found.append((float(norm), sharded.states.get("blocks.0.experts.up")))
            sharded.optimizer.zero_grad()
            sharded.remove()
        return found

    first, *others = on_ranks(body, RANKS)[0]
    for norm, value in others:
        assert norm == first[0] and torch.equal(value, first[1])


def test_a_rank_without_tokens_and_infinite_gradients() -> None:
    """One rank's loss does not depend on the model, and one rank's expert overflows: every rank sees it."""

    def body(rank: int) -> list[bool]:
        found = []
        for stage in (1, 2, 3):
            sharded = sharded_over(2, stage, all_to_one)
            loss = loss_of(sharded.model, tokens(0, rank))
            (loss * (0 if rank == 1 else 1)).backward()
            assert math.isfinite(sharded.clip_grad_norm_(1.0))
            sharded.optimizer.step()
            sharded.optimizer.zero_grad()
            assert all(torch.isfinite(one).all() for one in states_of(sharded).values())
            (loss_of(sharded.model, tokens(1, rank)) * (math.inf if rank == 3 else 1)).backward()
            found.append(math.isfinite(sharded.clip_grad_norm_(1.0)))
            sharded.optimizer.zero_grad()
            sharded.remove()
        return found

    assert on_ranks(body, RANKS) == [[False] * 3] * RANKS


def test_ranks_that_leave_out_parameters_do_not_wait_for_each_other() -> None:
    """A rank must not wait for another's reduction in its backward, while that one waits for it in the exchange of tokens."""

    def body(rank: int) -> list[list[float]]:
        found = []
        for stage in (0, 1, 2, 3):
            model = mixture()
            model.blocks.extend(Block() for _ in range(4))
            for block in model.blocks:
                block.mixes = rank % 2 == 0
            mesh = meshed(2)
            divide(model, mesh["ep"])
            sharded = zeroshard.shard(model, adamw(model), stage, group=mesh, overlap=False)
            found.append(take_steps(sharded, rank, range(2))["norms"])
            sharded.remove()
        return found

    for norms in on_ranks(body, RANKS, timeout=60):
        assert all(one == norms[0] for one in norms)


def test_a_modifier_rank_changes_its_own_experts() -> None:
    """Of experts, the values of the ranks that divide the model with the modifier rank count."""

    def body(rank: int) -> None:
        for stage in (1, 3):
            sharded = sharded_over(2, stage)
            model: Any = sharded.model
            with torch.no_grad(), zeroshard.unsharded(model, modifier_rank=2):
                model.head.weight.fill_(rank)
                model.blocks[0].experts.up.to_local().fill_(10 + rank)
            assert torch.equal(sharded.states.get("head.weight"), torch.full((32, 16), 2.0))
            up = sharded.states.get("blocks.0.experts.up")
            assert up[:2].eq(12).all() and up[2:].eq(13).all()
            sharded.states.set("blocks.0.experts.up", "parameters", torch.arange(up.numel()).view_as(up).float())
            with zeroshard.unsharded(model):
                assert torch.equal(model.blocks[0].experts.up.full_tensor().flatten(), torch.arange(up.numel()).float())
            sharded.remove()

    on_ranks(body, RANKS)


# ---------------------------------------------------------------------- checkpoints


def resumed(rank: int, ep: int, stage: int, folder: Path, steps: Sequence[int]) -> dict[str, Any]:
    """Load, compare with the states that were saved, and go on."""
    sharded = sharded_over(ep, stage)
    sharded.load(folder)
    run: dict[str, Any] = {"loaded": states_of(sharded)}
    run |= take_steps(sharded, rank, steps)
    run["states"] = states_of(sharded)
    sharded.remove()
    return run


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_checkpoints_move_between_numbers_of_expert_ranks_and_stages(ep: int, tmp_path: Path) -> None:
    def body(rank: int) -> None:
        saves = sharded_over(ep, 3)
        take_steps(saves, rank, range(3))
        saved = states_of(saves)
        saves.save(tmp_path, "tag")
        goes_on = take_steps(saves, rank, range(3, 6))
        after = states_of(saves)
        saves.remove()
        for other, stage in ((1, 3), (2, 1), (4, 2)):
            run = resumed(rank, other, stage, tmp_path, range(3, 6))
            for name, value in saved.items():
                assert torch.equal(run["loaded"][name], value), name
            assert run["norms"] == pytest.approx(goes_on["norms"], abs=1e-5)
            if other == ep:
                assert run["norms"] == goes_on["norms"]
                assert all(torch.equal(run["states"][name], value) for name, value in after.items())
        manifest = read_manifest(tmp_path / "tag")
        # No rank lists its ranges: a reader computes them from the layouts.
        assert all(not state.ranges for record in manifest.parameters.values() for state in record.states.values())
        assert manifest.parts == ep

    on_ranks(body, RANKS)


@pytest.mark.parametrize("ep", [2, 4])
def test_checkpoints_move_to_other_world_sizes(ep: int, tmp_path: Path) -> None:
    def save(rank: int) -> dict[str, Any]:
        saves = sharded_over(ep, 2)
        take_steps(saves, rank, range(2))
        saves.save(tmp_path, "tag", asynchronous=True)
        found = states_of(saves)
        saves.remove()
        return found

    def load(rank: int, undivided: bool) -> dict[str, Any]:
        model = mixture(seed=1)
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "ep"))
        if not undivided:
            divide(model, mesh["ep"])
        sharded = zeroshard.shard(model, adamw(model), 3, group=None if undivided else mesh)
        sharded.load(tmp_path)
        found = states_of(sharded)
        if undivided:
            sharded.save(tmp_path / "plain", "tag")
        sharded.remove()
        return found

    def back(rank: int) -> dict[str, Any]:
        sharded = sharded_over(ep, 1)
        sharded.load(tmp_path / "plain")
        found = states_of(sharded)
        sharded.remove()
        return found

    saved = on_ranks(save, RANKS)[0]
    for found in (on_ranks(load, 2, False)[0], on_ranks(load, 2, True)[1], on_ranks(back, RANKS)[2]):
        for name, value in saved.items():
            assert torch.equal(found[name], value), name
    whole = state_dict_of(tmp_path)
    for name in ("head.weight", "blocks.1.experts.down"):
        assert torch.equal(whole[name], saved[f"{name} parameters"])


# ---------------------------------------------------------------------- other calls


def test_state_dicts_copies_and_parked_states() -> None:
    def body(rank: int) -> None:
        for stage in (1, 3):
            sharded = sharded_over(2, stage)
            take_steps(sharded, rank, range(2))
            model: Any = sharded.model
            states = states_of(sharded)
            whole = sharded.consolidated_state_dict(to=3)
            assert (whole is None) == (rank != 3)
            if whole is not None:
                assert all(torch.equal(value, states[f"{name} parameters"]) for name, value in whole.items())
            kept = {name: value.detach().clone() for name, value in model.state_dict().items()}
            copied = copy.deepcopy(model)
            for name, parameter in copied.named_parameters():
                value = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
                assert torch.equal(value, states[f"{name} parameters"])
            saved = copy.deepcopy(sharded.optimizer.state_dict())
            take_steps(sharded, rank, [2])
            model.load_state_dict(kept)
            sharded.optimizer.load_state_dict(saved)
            expect_equal_states(states_of(sharded), states)
            sharded.offload_states()
            sharded.reload_states()
            expect_equal_states(states_of(sharded), states)
            model.blocks[0].experts.requires_grad_(False)
            model.blocks[1].norm.requires_grad_(False)
            sharded.update_trainable()
            take_steps(sharded, rank, [3])
            now = {name: sharded.states.get(name) for name, _ in model.named_parameters()}
            for name, value in now.items():
                is_kept = name.startswith(("blocks.0.experts", "blocks.1.norm"))
                assert torch.equal(value, states[f"{name} parameters"]) == is_kept, name
            sharded.remove()

    on_ranks(body, RANKS)


def expect_equal_states(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_torchs_distributed_checkpoints_move(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        sharded = sharded_over(2, 3)
        take_steps(sharded, rank, range(2))
        states = states_of(sharded)
        dcp.save({"train": zeroshard.DistributedState(sharded)}, checkpoint_id=tmp_path)
        sharded.remove()
        for ep in (1, 4):
            sharded = sharded_over(ep, 2)
            dcp.load({"train": zeroshard.DistributedState(sharded)}, checkpoint_id=tmp_path)
            expect_equal_states(states_of(sharded), states)
            sharded.remove()

    on_ranks(body, RANKS)


def test_memory_is_that_of_the_formula() -> None:
    """Experts' shards are of W / ep ranks, so a rank holds the same bytes of them for every ep."""

    def body(rank: int) -> list[Any]:
        found = []
        for ep in (1, 2, 4):
            sharded = sharded_over(ep, 3)
            take_steps(sharded, rank, [0])
            formula, report = sharded.memory_formula(), sharded.memory_report()
            for kind in ("parameters", "optimizer"):
                assert report[kind] == pytest.approx(formula[kind], rel=0.15), kind
            found.append(formula)
            sharded.remove()
        return found

    for one, *others in on_ranks(body, RANKS):
        assert all(other == pytest.approx(one) for other in others)


# ---------------------------------------------------------------------- bytes


def test_bytes_of_experts_are_those_of_the_ranks_with_the_same_experts() -> None:
    """A step at stage 3 gathers an expert's weights twice and reduces them once, over W / ep ranks: none at all where ep is W."""

    def body(rank: int) -> list[dict[str, int]]:
        reports = []
        for ep in (1, 2, 4):
            sharded = sharded_over(ep, 3, units=zeroshard.Units(leaf_classes=("Block",)))
            take_steps(sharded, rank, [0])
            sharded.comm_report()
            take_steps(sharded, rank, [1])
            reports.append(sharded.comm_report())
            sharded.remove()
        return reports

    numel = sum(one.numel() for name, one in mixture().named_parameters() if ".experts." in name)
    sent = {ep: 4 * numel / RANKS * (RANKS / ep - 1) for ep in (1, 2, 4)}
    """Each rank sends its shard of numel / W elements to the other W / ep - 1 ranks with the same experts."""
    for one, two, four in on_ranks(body, RANKS):
        # Of the two blocks, the last is kept between its forward and its backward.
        for kind, times in (("all_gather", 1.5), ("reduce_scatter", 1)):
            assert one[kind] - two[kind] == times * (sent[1] - sent[2]), kind
            assert one[kind] - four[kind] == times * (sent[1] - sent[4]), kind


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


def refused(rank: int, case: str) -> None:
    mesh = meshed(2)
    model = mixture()
    policy, options, group = Policy.stage(2), {}, mesh
    if case == "undivided":
        wanted = "has no DTensors: divide the experts with"
    else:
        divide(model, mesh["ep"])
    if case == "disk":
        policy, wanted = (
            Policy.stage(3).offloaded(optimizer=Place.DISK, offload=Offload("/tmp")),
            "Use CPU memory instead",
        )
    if case == "whole parameters":
        options, wanted = {"elementwise": False}, "needs whole parameters"
    if case == "group of one dimension":
        group, wanted = mesh["dp"], "pass the mesh of both dimensions"
    if case == "no group":
        group, wanted = None, "pass the mesh of both dimensions"
    if case == "within":
        policy, wanted = replace(Policy.stage(3), within=2), "leave it out"
    if case == "unnamed":
        group = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        wanted = 'pass a mesh of two, named "dp" and "ep"'
    if case == "replicated":
        whole = distribute_tensor(model.head.weight.detach(), mesh["ep"], [Replicate()])
        model.head.weight, wanted = nn.Parameter(whole), "leave it an ordinary parameter"
    if case == "uneven":
        model.blocks[0].experts.up = nn.Parameter(distribute_tensor(torch.ones(3, 4, 4), mesh["ep"], [Shard(0)]))
        wanted = "has 3 experts, which 2 ranks cannot divide evenly"
    with pytest.raises(UsageError, match=re.escape(wanted)):
        zeroshard.shard(model, adamw(model), policy, group=group, **options)


CASES = (
    "undivided",
    "disk",
    "within",
    "unnamed",
    "replicated",
    "whole parameters",
    "uneven",
    "group of one dimension",
    "no group",
)


@pytest.mark.parametrize("case", CASES)
def test_refusals(case: str) -> None:
    on_ranks(refused, RANKS, case)
