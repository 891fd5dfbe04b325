"""DTensors of tensor parallelism with sharding: the same bits at every stage of one mesh, within 1e-5 of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import divided
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from divided import Run, adamw, expect_near, expect_same, states_of, values_of
from experts import loss_of
from insides import across_model, padded_numel
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from twin import same, update

import zeroshard
from zeroshard import Offload, Place, Policy, Sharded, UsageError
from zeroshard.checkpoint.consolidated import state_dict_of
from zeroshard.checkpoint.hugging_face import export
from zeroshard.checkpoint.loading import open_checkpoint
from zeroshard.checkpoint.manifest import read_manifest
from zeroshard.core.placement import Runs
from zeroshard.sequence import Sequences

WIDTH, HEADS, VOCABULARY, LENGTH, STEPS = 16, 4, 29, 8, 3
"""The vocabulary is odd: two ranks have 15 and 14 rows of it."""


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(
            WIDTH, WIDTH, bias=False
        )  # its gradient would be zero, of which AdamW makes steps of noise
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = [
            one(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for one in (self.query, self.key, self.value)
        ]
        return self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.second, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def blocks_only(model: nn.Module, mesh: DeviceMesh) -> None:
    """Embedding, head and norms are ordinary parameters, and whole on every rank."""
    plan = {
        "attention.query": ColwiseParallel(), "attention.key": ColwiseParallel(), "attention.value": ColwiseParallel(),
        "attention.out": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel(),
    }  # fmt: skip
    for block in model.blocks:
        parallelize_module(block, mesh, plan)


def vocabulary_too(model: nn.Module, mesh: DeviceMesh) -> None:
    blocks_only(model, mesh)
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)


def along_the_sequence(model: nn.Module, mesh: DeviceMesh) -> None:
    """Norms are whole DTensors, and each rank's gradients of them are a part of a sum over positions."""
    gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    for block in model.blocks:
        plan = {
            "first": SequenceParallel(), "attention": gathered, "attention.query": ColwiseParallel(),
            "attention.key": ColwiseParallel(), "attention.value": ColwiseParallel(),
            "attention.out": RowwiseParallel(output_layouts=Shard(1)), "second": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel(output_layouts=Shard(1)),
        }  # fmt: skip
        parallelize_module(block, mesh, plan)
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)


Cut = Callable[[nn.Module, DeviceMesh], None]


def ordinary(model: nn.Module) -> None:
    """Leave a model as it is."""


def frozen(model: Gpt) -> None:
    model.blocks[0].requires_grad_(False)
    model.blocks[1].first.requires_grad_(False)


def tied(model: Gpt) -> None:
    model.head.weight = model.embedding.weight


def in_bf16(model: Gpt) -> None:
    model.to(torch.bfloat16)


def made(change: Callable[[Any], None] = ordinary) -> Gpt:
    torch.manual_seed(0)
    model = Gpt()
    change(model)
    return model


def tokens(step: int, rank: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=torch.Generator().manual_seed(100 * step + rank))


def loss(model: nn.Module, number: int, rank: int) -> Tensor:
    return loss_of(model, tokens(number, rank))


def loss_of_labels(model: Any, number: int, rank: int) -> Tensor:
    """The loss of a model of transformers."""
    batch = tokens(number, rank)
    return model(input_ids=batch, labels=batch).loss


def in_one_process(ranks: int, microbatches: int = 1, change: Callable[[Any], None] = ordinary) -> Run:
    return divided.in_one_process(made(change), loss, ranks, STEPS, microbatches)


def meshed(tp: int, dp: int) -> DeviceMesh:
    return init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))


def sharded_on(
    mesh: DeviceMesh, stage: int | Policy, cut: Cut, change: Callable[[Any], None] = ordinary, **options: Any
) -> Sharded:
    model = made(change)
    cut(model, mesh["tp"])
    if change is tied:
        tied(model)  # parallelize_module makes two of it
    return zeroshard.shard(model, adamw(model), stage, group=mesh["dp"], **options)


def take_steps(sharded: Sharded, mesh: DeviceMesh, steps: Sequence[int], microbatches: int = 1) -> Run:
    return divided.take_steps(sharded, loss, mesh.get_local_rank("dp"), steps, microbatches)


def trained(
    rank: int, tp: int, dp: int, cut: Cut, policies: Sequence[int | Policy], microbatches: int = 1,
    change: Callable[[Any], None] = ordinary, **options: Any,
) -> list[dict[str, Any]]:  # fmt: skip
    """Train under each policy. What comes back holds no tensors of ranks."""
    mesh = meshed(tp, dp)
    runs = []
    for policy in policies:
        sharded = sharded_on(mesh, policy, cut, change, **options)
        run = take_steps(sharded, mesh, range(STEPS), microbatches) | {"states": states_of(sharded)}
        with zeroshard.unsharded(sharded.model):
            run["values"] = values_of(sharded.model)
        sharded.remove()
        assert same(values_of(sharded.model), run["values"])
        runs.append(run)
    return runs


@pytest.mark.parametrize("cut", [blocks_only, vocabulary_too, along_the_sequence])
@pytest.mark.parametrize("shape", [(2, 2), (2, 1), (1, 4)], ids=lambda shape: "tp {} x dp {}".format(*shape))
def test_stages_have_the_same_bits_and_are_one_process(shape: tuple[int, int], cut: Cut) -> None:
    tp, dp = shape
    everyone = on_ranks(trained, tp * dp, tp, dp, cut, range(4))
    first = everyone[0][0]
    for runs in everyone:
        for run in runs:
            expect_same(run, first)
    expect_near(first, in_one_process(dp))


@pytest.mark.parametrize("change", [ordinary, frozen, tied])
def test_accumulation_and_awkward_models(change: Callable[[Any], None]) -> None:
    stages = (0, 1, 2, 3) if change is ordinary else (1, 3)
    everyone = on_ranks(trained, 2, 2, 1, vocabulary_too, stages, 2, change)
    reference = in_one_process(1, 2, change)
    for runs in everyone:
        for run, stage in zip(runs, stages, strict=True):
            # Sums over microbatches are made first at the first two stages, and sums over ranks at the others.
            like = [one < 2 for one in stages].index(stage < 2)
            expect_same(run, everyone[0][like])
            expect_near(run, reference)


@pytest.mark.full
def test_parameters_in_bf16_have_master_weights() -> None:
    everyone = on_ranks(trained, 2, 2, 1, along_the_sequence, (0, 2, 3), 1, in_bf16)
    for runs in everyone:
        for run in runs:
            expect_same(run, everyone[0][0])
            assert run["states"]["head.weight parameters"].dtype == torch.float32


@pytest.mark.full
def test_dimensions_may_stand_in_any_order(tmp_path: Path) -> None:
    """Also beside a third one, which zeroshard does not look at."""

    def body(rank: int) -> list[list[float]]:
        norms = []
        for number, (sizes, names) in enumerate([((2, 2), ("tp", "dp")), ((2, 1, 2), ("pp", "tp", "dp"))]):
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
            folder = tmp_path / f"{number} {mesh.get_local_rank(names[0]) if number else 0}"
            sharded = sharded_on(mesh, 3, vocabulary_too)
            norms.append(take_steps(sharded, mesh, [0, 1])["norms"])
            states = states_of(sharded)
            sharded.save(folder, "tag")
            take_steps(sharded, mesh, [2])
            sharded.load(folder)
            for name, value in states_of(sharded).items():
                assert torch.equal(value, states[name]), name
            sharded.remove()
        return norms

    everyone = on_ranks(body, 4)
    assert all(norms == everyone[0] for norms in everyone)
    for norms, ranks in zip(everyone[0], (2, 2), strict=True):
        assert norms == pytest.approx(in_one_process(ranks)["norms"][:2], rel=1e-5)


class Recomputed(Gpt):
    """Each block runs again in the backward."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


def recomputed(model: Gpt) -> None:
    model.__class__ = Recomputed


@pytest.mark.full
def test_places_overlap_and_recomputation_leave_the_bits(tmp_path: Path) -> None:
    how = Offload(str(tmp_path), buffer_numel=1 << 16, block_nbytes=4096)
    third = Policy.stage(3)
    policies = [
        0, third.offloaded(optimizer=Place.DISK, parameters=Place.DISK, offload=how), replace(third, reshard_after_forward=False),
        Policy.stage(2).offloaded(optimizer=Place.CPU),
    ]  # fmt: skip
    like = on_ranks(trained, 2, 2, 1, along_the_sequence, policies)[0]
    for runs in on_ranks(partial(trained, overlap=False), 2, 2, 1, along_the_sequence, [1, 3]):
        like += runs
    like += on_ranks(trained, 2, 2, 1, along_the_sequence, [3], 1, recomputed)[1]
    for run in like:
        expect_same(run, like[0])


@pytest.mark.full
def test_places_and_overlap_leave_the_bits_where_ranks_shard_too() -> None:
    everyone = on_ranks(trained, 4, 2, 2, vocabulary_too, [0, Policy.stage(3).offloaded(optimizer=Place.CPU)])
    everyone += on_ranks(partial(trained, overlap=False), 4, 2, 2, vocabulary_too, [3])
    for runs in everyone:
        for run in runs:
            expect_same(run, everyone[0][0])


# ---------------------------------------------------------------------- transformers


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 32,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, max_position_embeddings=16))


def divide_layers(model: Any, mesh: DeviceMesh) -> None:
    """Divide attention and MLP of each layer of a Llama."""
    plan = {
        "self_attn.q_proj": ColwiseParallel(), "self_attn.k_proj": ColwiseParallel(), "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(), "mlp.up_proj": ColwiseParallel(), "mlp.gate_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
    }  # fmt: skip
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)


def of_own_plan(path: Path, mesh: DeviceMesh) -> nn.Module:
    model = llama()
    divide_layers(model, mesh)
    plan = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    return parallelize_module(model, mesh, plan)


def of_transformers_plan(path: Path, mesh: DeviceMesh) -> nn.Module:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(path, tp_plan="auto", device_mesh=mesh)


@pytest.mark.full
@pytest.mark.parametrize("build", [of_own_plan, of_transformers_plan])
def test_a_llama(build: Callable[[Path, DeviceMesh], nn.Module], tmp_path: Path) -> None:
    def body(rank: int) -> list[Run]:
        mesh = meshed(2, 1)
        runs = []
        for stage in (3, 0, 1):
            model = build(tmp_path / "llama", mesh["tp"])
            sharded = zeroshard.shard(model, adamw(model), stage, group=mesh["dp"])
            run = divided.take_steps(sharded, loss_of_labels, 0, range(STEPS)) | {"states": states_of(sharded)}
            runs.append(run | {"values": {name: sharded.states.get(name) for name, _ in model.named_parameters()}})
            if stage == 3:
                sharded.export(tmp_path / "exported")
            sharded.remove()
        return runs

    model = llama()
    model.save_pretrained(tmp_path / "llama")
    everyone = on_ranks(body, 2)
    for runs in everyone:
        for one in runs:
            expect_same(one, everyone[0][0])
    expect_near(everyone[0][0], divided.in_one_process(model, loss_of_labels, 1, STEPS))
    exported = type(model).from_pretrained(tmp_path / "exported")
    for name, parameter in exported.named_parameters():
        assert torch.equal(parameter, everyone[0][0]["values"][name]), name


def test_sequences_that_are_cut_beside_matrices_that_are() -> None:
    """Attached first, since a model of DTensors is refused there."""
    batch = tokens(0, 0)
    model = llama()
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    expected = float(loss.detach()), float(nn.utils.clip_grad_norm_(model.parameters(), 0.5))

    def body(rank: int) -> tuple[float, float]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sp", "tp"))
        model = llama()
        sequences = Sequences(mesh["sp"], group=mesh["sp"]).attach(model)
        divide_layers(model, mesh["tp"])
        sharded = zeroshard.shard(model, adamw(model), 3, group=mesh["sp"])
        loss = sequences.loss(model, sequences.cut({"input_ids": batch, "labels": batch}), tiles=2)
        loss.backward()
        found = float(loss.detach()), float(sharded.clip_grad_norm_(0.5))
        sharded.optimizer.step()
        sharded.remove()
        return found

    for found in on_ranks(body, 4):
        assert found == pytest.approx(expected, rel=1e-5)


# ---------------------------------------------------------------------- gradients


def gradients_of(sharded: Sharded) -> dict[str, Tensor]:
    return {name: sharded.states.get(name, "gradients") for name, _ in sharded.model.named_parameters()}


@pytest.mark.full
def test_torchs_clipping_and_gradients() -> None:
    model = made()
    for rank in range(2):
        (loss_of(model, tokens(0, rank)) / 2).backward()
    expected = {name: one.grad.clone() for name, one in model.named_parameters()}
    largest = max(float(grad.abs().max()) for grad in expected.values())
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.1))

    def body(rank: int) -> None:
        mesh = meshed(2, 2)
        kept = []
        for stage in range(4):
            sharded = sharded_on(mesh, stage, along_the_sequence)
            loss_of(sharded.model, tokens(0, mesh.get_local_rank("dp"))).backward()
            found = gradients_of(sharded)
            for name, grad in expected.items():
                torch.testing.assert_close(found[name], grad, rtol=0, atol=1e-6)
            biggest = nn.utils.get_total_norm([one.grad for one in sharded.model.parameters()], float("inf"))
            assert float(biggest) == pytest.approx(largest, rel=1e-5)
            assert float(nn.utils.clip_grad_norm_(sharded.model.parameters(), 0.1)) == pytest.approx(norm, rel=1e-5)
            found = gradients_of(sharded)
            for name, grad in expected.items():
                torch.testing.assert_close(found[name], grad * (0.1 / (norm + 1e-6)), rtol=0, atol=1e-6)
            assert float(sharded.clip_grad_norm_(None)) == pytest.approx(0.1, rel=1e-4)
            kept.append(found)
            sharded.remove()
        for other in kept[1:]:
            for name, value in other.items():
                assert torch.equal(value, kept[0][name]), name

    on_ranks(body, 4)


@pytest.mark.ranks(2)
def test_a_gradient_that_is_not_finite_is_seen_on_every_rank(rank: int) -> None:
    mesh = meshed(2, 1)
    sharded = sharded_on(mesh, 2, blocks_only)
    loss_of(sharded.model, tokens(0, 0)).backward()
    sharded.states.get("blocks.0.up.weight", "gradients")
    for part in sharded.states.local("blocks.0.up.weight", "gradients"):
        if rank == 1:
            part.tensor[0] = float("inf")
    assert sharded.sharded_step.not_finite() == ("blocks.0.up.weight",)
    sharded.clip_grad_norm_(1.0)
    assert sharded.sharded_step.overflow
    sharded.remove()


@pytest.mark.full
def test_a_parameter_that_one_row_of_the_mesh_uses_is_updated_on_all() -> None:
    class Sided(Gpt):
        def forward(self, tokens: Tensor, with_side: bool = False) -> Tensor:
            logits = super().forward(tokens)
            return logits + self.side(logits) if with_side else logits

    def body(rank: int) -> list[bool]:
        mesh = meshed(2, 2)
        torch.manual_seed(0)
        model = Sided()
        model.side = nn.Linear(VOCABULARY, VOCABULARY)
        model.unused = nn.Linear(2, 2)
        blocks_only(model, mesh["tp"])
        sharded = zeroshard.shard(model, adamw(model), 3, group=mesh["dp"])
        row = mesh.get_local_rank("dp")
        model(tokens(0, row), with_side=row == 1).sum().backward()
        used = sharded.sharded_step.used()
        sharded.remove()
        return [used["side.weight"], used["norm.weight"], used["unused.weight"]]

    assert on_ranks(body, 4) == [[True, True, False]] * 4


@pytest.mark.full
def test_one_more_small_message_a_step_and_the_bytes_of_the_local_model() -> None:
    def body(rank: int) -> tuple[dict[str, int], dict[str, int], int, int]:
        mesh = meshed(2, 2)
        sharded = sharded_on(mesh, 3, vocabulary_too)
        others = across_model(sharded)
        take_steps(sharded, mesh, [0])
        sharded.comm_report()
        others.sent.clear()
        take_steps(sharded, mesh, [1])
        numel = padded_numel(sharded)
        flags = len(list(sharded.model.parameters()))
        report = sharded.comm_report(), dict(others.sent), numel, flags
        sharded.remove()
        return report

    for inside, across, numel, flags in on_ranks(body, 4):
        assert inside["all_gather"] <= 2 * 4 * numel // 2  # forward and backward, half of each on the other rank
        assert inside["reduce_scatter"] == 4 * numel // 2
        assert set(across) == {"exchange"} and across["exchange"] <= 2 * (flags + 64)


# ---------------------------------------------------------------------- values


@pytest.mark.ranks(2)
def test_values_at_rest_are_read_inside_of_unsharded(rank: int) -> None:
    mesh = meshed(2, 1)
    model = made()
    vocabulary_too(model, mesh["tp"])
    before = {name: one.full_tensor() if isinstance(one, DTensor) else one.detach().clone()
              for name, one in model.named_parameters()}  # fmt: skip
    sharded = zeroshard.shard(model, adamw(model), 3, group=mesh["dp"])
    weight = model.blocks[0].up.weight
    for read in (weight.to_local, weight.full_tensor, weight.sum, partial(torch.mul, weight, 2.0)):
        with pytest.raises(UsageError, match=r"blocks.0.up.weight is sharded at rest"):
            read()
    assert "whose values are not here" in repr(weight)
    assert isinstance(weight, DTensor) and isinstance(weight, nn.Parameter)
    state = model.state_dict()
    for name, value in state.items():
        now = value.full_tensor() if isinstance(value, DTensor) else value
        assert torch.equal(now, before[name])
    kept = sharded.consolidated_state_dict()
    assert (kept is not None) == (rank == 0)
    if kept is not None:
        assert same(before, kept)
    with zeroshard.unsharded(model, modifier_rank=0), torch.no_grad():
        weight.mul_(2.0)
        model.norm.weight.fill_(3.0 + rank)  # of what is whole on each, the first rank's counts
        model.blocks[0].down.weight.to_local().zero_()

    def write_on_one() -> None:
        with zeroshard.unsharded(model), torch.no_grad():
            if rank == 1:
                model.norm.weight.add_(1.0)

    if rank == 1:
        assert "without a modifier rank: norm.weight" in refusal(write_on_one)
    else:
        write_on_one()
    assert torch.equal(sharded.states.get("blocks.0.up.weight"), 2 * before["blocks.0.up.weight"])
    assert torch.equal(sharded.states.get("norm.weight"), torch.full((WIDTH,), 3.0))
    assert not sharded.states.get("blocks.0.down.weight").any()
    sharded.states.set("head.weight", "parameters", before["head.weight"] + 1)
    assert torch.equal(sharded.states.get("head.weight"), before["head.weight"] + 1)
    for name in ("norm.weight", "head.weight"):
        found = refusal(partial(sharded.states.set, name, "parameters", before[name] + rank))
        assert f"different values of parameters of {name} on the 2 ranks" in found
    sharded.model.load_state_dict(state)
    for name, value in before.items():
        assert torch.equal(sharded.states.get(name), value)
    sharded.remove()


@pytest.mark.ranks(2)
def test_updated_values_are_waited_for_by_their_first_reader(rank: int) -> None:
    mesh = meshed(1, 2)
    sharded = sharded_on(mesh, 2, vocabulary_too)
    weight = sharded.model.head.weight
    readers: list[Callable[[], object]] = [
        weight.to_local, weight.full_tensor, partial(weight.redistribute, placements=[Replicate()]),
        weight.__repr__, weight.sum,
    ]  # fmt: skip
    for step, read in enumerate(readers):
        take_steps(sharded, mesh, [step])
        read()
        assert torch.equal(weight.full_tensor(), sharded.states.get("head.weight"))
    sharded.remove()


@pytest.mark.ranks(4)
@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 2])
def test_writes_to_whole_parameters_reach_master_weights(rank: int, stage: int) -> None:
    mesh = meshed(2, 2)
    sharded = sharded_on(mesh, stage, vocabulary_too, in_bf16)
    model = sharded.model
    with torch.no_grad():
        model.blocks[0].up.weight.fill_(0.5)
        model.head.weight.to_local().fill_(0.25)
        model.norm.weight.fill_(2.0)
    take_steps(sharded, mesh, [0])
    for name, value in (("blocks.0.up.weight", 0.5), ("head.weight", 0.25), ("norm.weight", 2.0)):
        assert (sharded.states.get(name) - value).abs().max() < 0.02  # one step of 0.001, and weight decay
    sharded.remove()


@pytest.mark.ranks(2)
@pytest.mark.full
def test_freeing_and_freezing(rank: int) -> None:
    mesh = meshed(2, 1)
    runs = []
    for stage in (0, 3):
        model = made()
        vocabulary_too(model, mesh["tp"])
        sharded = zeroshard.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), stage, group=mesh["dp"])
        norms = take_steps(sharded, mesh, [0])["norms"]
        model.blocks[0].requires_grad_(False)
        sharded.update_trainable()
        norms += take_steps(sharded, mesh, [1])["norms"]
        model.blocks[0].requires_grad_(True)
        sharded.update_trainable()
        norms += take_steps(sharded, mesh, [2])["norms"]
        runs.append({"norms": norms, "states": states_of(sharded)})
        sharded.remove()
    expect_same(*runs)


# ---------------------------------------------------------------------- files


def uncut(model: nn.Module, mesh: DeviceMesh) -> None:
    """Leave ordinary parameters."""


@pytest.mark.full
def test_checkpoints_load_at_any_mesh(tmp_path: Path) -> None:
    """And without one; a run then goes on as it would have, to the bit where the mesh is the first."""

    def body(rank: int, tp: int, dp: int, stage: int, cut: Cut, tag: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        mesh = meshed(tp, dp)
        sharded = sharded_on(mesh, stage, cut)
        if tag == "first":
            take_steps(sharded, mesh, [0, 1])
        else:
            sharded.load(tmp_path)
        found = states_of(sharded)
        sharded.save(tmp_path, tag)
        sharded.export(tmp_path / f"{tag} live")
        after = take_steps(sharded, mesh, [2]) | {"states": states_of(sharded)}
        sharded.remove()
        return found, after

    first, after = on_ranks(body, 4, 2, 2, 3, vocabulary_too, "first")[0]
    meshes = [(1, 2, 3, vocabulary_too), (4, 1, 2, blocks_only), (1, 1, 0, uncut), (2, 2, 1, vocabulary_too)]
    for number, (tp, dp, stage, cut) in enumerate(meshes):
        for found, then in on_ranks(body, tp * dp, tp, dp, stage, cut, f"tag{number}"):
            for name, value in first.items():
                assert torch.equal(found[name], value), (tp, dp, name)
            if (tp, dp) == (2, 2):
                expect_same(then, after)
    exports = {path.read_bytes() for path in tmp_path.glob("* live/model.safetensors")}
    assert len(exports) == 1 and len(list(tmp_path.glob("* live"))) == 5
    for tag, layouts in (("first", 2), ("tag1", 1)):
        reader = open_checkpoint(tmp_path, tag)
        assert len(reader.manifest.layouts) == layouts, "of the odd vocabulary, parts have two sizes"
        for record in reader.manifest.parameters.values():
            assert not any(state.ranges for state in record.states.values())
        export(reader, tmp_path / "offline")
        assert {(tmp_path / "offline" / "model.safetensors").read_bytes()} == exports


@pytest.mark.full
def test_a_checkpoint_names_its_mesh_and_is_one_process_to_other_readers(tmp_path: Path) -> None:
    def body(rank: int) -> dict[str, Tensor]:
        mesh = meshed(2, 1)
        sharded = sharded_on(mesh, 3, blocks_only)
        take_steps(sharded, mesh, [0])
        sharded.save(tmp_path, "tag")
        with pytest.raises(UsageError, match="node_local copies files between hosts of data-parallel ranks"):
            sharded.save(tmp_path, "other", node_local=True)
        before = torch.get_rng_state()
        torch.manual_seed(5 + rank)
        sharded.load(tmp_path)
        assert torch.equal(torch.get_rng_state(), before)
        found = {name: sharded.states.get(name) for name, _ in sharded.model.named_parameters()}
        sharded.remove()
        return found

    found = on_ranks(body, 2)[0]
    manifest = read_manifest(tmp_path / "tag")
    assert manifest.mesh == {"data_parallel": 1, "tensor_parallel": 2}
    assert (manifest.world_size, len(manifest.files), len(manifest.layouts)) == (2, 2, 1)
    assert [(shards.part, shards.files) for shards in manifest.shards] == [(0, [0]), (1, [1])]
    reader = open_checkpoint(tmp_path, "tag")
    down = reader.find("blocks.0.down.weight", "parameters")(Runs(0, 48 * 16, 48 * 16))
    assert [(one.start, one.numel, one.stride, one.file) for one in down] == [(0, 24, 48, 0), (24, 24, 48, 1)]
    state = state_dict_of(tmp_path)
    assert state.keys() == found.keys()
    for name, value in found.items():
        assert torch.equal(state[name], value), name


@pytest.mark.full
def test_torchs_distributed_checkpoints_hold_whole_tensors(tmp_path: Path) -> None:
    def save(rank: int) -> dict[str, Tensor]:
        mesh = meshed(2, 2)
        sharded = sharded_on(mesh, 3, along_the_sequence)
        take_steps(sharded, mesh, [0])
        dcp.save({"train": zeroshard.DistributedState(sharded)}, checkpoint_id=tmp_path)
        found = states_of(sharded)
        sharded.remove()
        return found

    def load(rank: int) -> dict[str, Tensor]:
        mesh = meshed(1, 2)
        sharded = sharded_on(mesh, 1, vocabulary_too)
        dcp.load({"train": zeroshard.DistributedState(sharded)}, checkpoint_id=tmp_path)
        found = states_of(sharded)
        sharded.remove()
        return found

    first = on_ranks(save, 4)[0]
    for found in on_ranks(load, 2):
        assert found.keys() == first.keys()
        for name, value in first.items():
            assert torch.equal(found[name], value), name


@pytest.mark.ranks(4)
@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 3])
def test_torchs_distributed_checkpoints_take_state_dicts(rank: int, stage: int, tmp_path: Path) -> None:
    mesh = meshed(2, 2)
    sharded = sharded_on(mesh, stage, vocabulary_too)
    take_steps(sharded, mesh, [0])
    expected = {name: sharded.states.get(name) for name, _ in sharded.model.named_parameters()}
    dcp.save({"model": sharded.model.state_dict()}, checkpoint_id=tmp_path)
    take_steps(sharded, mesh, [1])
    state = sharded.model.state_dict()
    dcp.load({"model": state}, checkpoint_id=tmp_path)
    sharded.model.load_state_dict(state)
    ordinary = made().state_dict()
    dcp.load({"model": ordinary}, checkpoint_id=tmp_path)
    for name, value in expected.items():
        assert torch.equal(sharded.states.get(name), value), name
        assert torch.equal(ordinary[name], value), name
    sharded.remove()


# ---------------------------------------------------------------------- refusals


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(UsageError) as caught:
        call()
    assert len(str(caught.value).splitlines()) <= 3
    return str(caught.value)


@pytest.mark.ranks(2)
def test_labels_that_differ_inside_one_model_are_refused_at_the_step(rank: int) -> None:
    mesh = meshed(2, 1)
    for clip in (True, False):
        sharded = sharded_on(mesh, 2, blocks_only)
        batch = tokens(0, 0)
        batch[:, -1] = rank  # a label only
        loss_of(sharded.model, batch).backward()
        step = partial(sharded.clip_grad_norm_, 1.0) if clip else sharded.optimizer.step
        assert "is whole on tensor-parallel ranks, but its gradient differs on ranks 0 and 1" in refusal(step)
        sharded.remove()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("cut", [vocabulary_too, along_the_sequence])
def test_batches_that_a_divided_embedding_mixes_are_refused_too(rank: int, cut: Cut) -> None:
    """Each rank's lookup of its own tokens is a part of one sum: all gradients of whole parameters are equal, and wrong."""
    mesh = meshed(2, 1)
    sharded = sharded_on(mesh, 2, cut)
    for step in range(2):
        loss_of(sharded.model, tokens(0, rank * step)).backward()
        with torch.no_grad():
            sharded.model(tokens(1, rank)[:, 1:])  # an evaluation is not compared
        if not step:
            sharded.optimizer.step()
            sharded.optimizer.zero_grad()
    assert "the model got different inputs on ranks 0 and 1, which divide it" in refusal(sharded.optimizer.step)
    sharded.remove()
    assert not sharded.model._forward_pre_hooks


@pytest.mark.ranks(2)
def test_models_that_differ_are_refused(rank: int) -> None:
    mesh = meshed(2, 1)
    model = made()
    with torch.no_grad():
        model.norm.bias.add_(rank)
    blocks_only(model, mesh["tp"])
    assert "norm.bias is whole on each of the 2 ranks" in refusal(
        lambda: zeroshard.shard(model, adamw(model), 1, group=mesh["dp"])
    )
    model = made()
    if rank == 0:
        vocabulary_too(model, mesh["tp"])
    else:
        blocks_only(model, mesh["tp"])
        for fill in (model.embedding, model.head):  # what the first rank's collectives wait for
            distribute_tensor(fill.weight, mesh["tp"], [Shard(0)])
    assert "the ranks built different models" in refusal(
        lambda: zeroshard.shard(model, adamw(model), 1, group=mesh["dp"])
    )


@pytest.mark.ranks(2)
def test_meshes_and_placements_that_are_not_taken(rank: int) -> None:
    mesh = meshed(2, 1)
    model = made()
    blocks_only(model, mesh["tp"])
    take = partial(zeroshard.shard, model, adamw(model), 3)
    assert 'Pass the data-parallel dimension of the mesh: shard(..., group=mesh["dp"])' in refusal(take)
    assert "over ranks [0, 1]" in refusal(partial(take, group=mesh["tp"]))
    assert "a mesh of 2 dimensions, ('dp', 'tp')" in refusal(partial(take, group=mesh))
    muon = torch.optim.Muon([one for one in model.parameters() if one.ndim == 2])
    for whole_matrices in (muon, torch.optim.Adafactor(model.parameters())):
        take_whole = partial(zeroshard.shard, model, whole_matrices, 1, group=mesh["dp"])
        assert "needs whole parameters" in refusal(take_whole)
    bf16 = zeroshard.Precision(torch.bfloat16)
    assert "convert the model with model.to(torch.bfloat16)" in refusal(partial(take, group=mesh["dp"], precision=bf16))

    linear = nn.Linear(4, 4)
    linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), mesh, [Replicate(), Shard(0)]))
    assert "over 2 dimensions of a mesh" in refusal(lambda: zeroshard.shard(linear, adamw(linear), 1, group=mesh["dp"]))
    linear = nn.Linear(4, 1)
    linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), mesh["tp"], [Shard(0)]))
    found = refusal(lambda: zeroshard.shard(linear, adamw(linear), 1, group=mesh["dp"]))
    assert "equal chunks (the last may be smaller, but not empty)" in found
    linear = nn.Linear(4, 4)
    part = DTensor.from_local(linear.weight.detach(), mesh["tp"], [Partial()], run_check=False)
    linear.weight = nn.Parameter(part)
    assert "is a DTensor placed as P" in refusal(lambda: zeroshard.shard(linear, adamw(linear), 1, group=mesh["dp"]))
    linear = nn.Linear(4, 4)
    strided = _StridedShard(0, split_factor=2)
    part = DTensor.from_local(linear.weight.detach()[:2], mesh["tp"], [strided], run_check=False)
    linear.weight = nn.Parameter(part)
    assert "is a DTensor placed as _S(0, 2)" in refusal(
        lambda: zeroshard.shard(linear, adamw(linear), 1, group=mesh["dp"])
    )
    linear = nn.Linear(4, 4)
    linear.register_buffer("scale", distribute_tensor(torch.ones(4), mesh["tp"], [Shard(0)]))
    assert "buffer scale is a DTensor" in refusal(lambda: zeroshard.shard(linear, adamw(linear), 1, group=mesh["dp"]))


@pytest.mark.ranks(2)
@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 3])
def test_compiled_code_is_refused(rank: int, stage: int) -> None:
    mesh = meshed(2, 1)
    sharded = sharded_on(mesh, stage, blocks_only)
    compiled = torch.compile(sharded.model, backend="eager")
    assert "is a DTensor, and Gpt runs inside torch.compile" in refusal(lambda: loss_of(compiled, tokens(0, 0)))
    sharded.model.blocks[1].compile(backend="eager")
    assert "is a DTensor, and Block runs inside torch.compile" in refusal(lambda: loss_of(sharded.model, tokens(0, 0)))
    sharded.remove()


@pytest.mark.ranks(4)
def test_ranks_of_a_group_that_hold_different_parts_are_refused(rank: int) -> None:
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    crossed = [dist.new_group([0, 3]), dist.new_group([1, 2])]
    model = made()
    blocks_only(model, DeviceMesh.from_group(rows[rank // 2], "cpu", mesh_dim_names=("tp",)))
    own = crossed[0 if rank in (0, 3) else 1]
    found = refusal(lambda: zeroshard.shard(model, adamw(model), 2, group=own))
    assert "must have the same part" in found.replace("\n", " ")


@pytest.mark.ranks(2)
def test_other_doors_refuse_dtensors_by_name(rank: int) -> None:
    mesh = meshed(2, 1)
    linear = nn.Linear(4, 4)
    parallelize_module(linear, mesh["tp"], ColwiseParallel())
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
    found = "parameter weight is a DTensor, whose values are divided over ranks, and {} takes ordinary parameters"
    sharded = zeroshard.shard(copy.deepcopy(linear), None, 0, group=mesh["dp"])
    for take in (sharded.named_weights, partial(sharded.named_weights, shards=True), sharded.weights_version):
        assert found.format("named_weights()") + ". Get whole tensors from sharded.states.get" in refusal(take)
    sharded.remove()
    for device in ("cpu", "meta"):
        given = copy.deepcopy(linear).to(device)
        assert found.format("load_pretrained()") in refusal(
            partial(zeroshard.load_pretrained, given, "model.safetensors")
        )
    assert found.format("Sequences.attach()") in refusal(lambda: Sequences(mesh["dp"]).attach(linear))
    assert found.format("ZeroRedundancyOptimizer").replace("weight", "number 0") in refusal(
        lambda: zeroshard.ZeroRedundancyOptimizer(linear.parameters(), torch.optim.SGD, lr=0.1)
    )

    def factory() -> nn.Module:
        model = nn.Linear(4, 4)
        part = DTensor.from_local(model.weight.detach(), mesh["tp"], [Shard(0)], run_check=False)
        model.weight = nn.Parameter(part)
        return model

    assert found.format("plan()") in refusal(
        lambda: zeroshard.plan(factory, config, world_size=2, batch=lambda n: torch.zeros(n, 4))
    )


@pytest.mark.ranks(2)
def test_a_copy_of_the_model_compares_no_inputs(rank: int) -> None:
    """The hook that does is the model's alone: a copy has none, and holds no connections."""
    sharded = sharded_on(meshed(2, 1), 2, blocks_only)
    copied = copy.deepcopy(sharded.model)
    with torch.no_grad():
        assert torch.equal(copied(tokens(0, 0)[:, 1:]), sharded.model(tokens(0, 0)[:, 1:]))
    loss_of(copied, tokens(0, rank)).backward()
    loss_of(sharded.model, tokens(0, 0)).backward()
    sharded.optimizer.step()
    sharded.remove()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.full), 3])
def test_the_states_of_an_unsharded_optimizer_of_dtensors_load(rank: int, stage: int) -> None:
    mesh = meshed(2, 1)
    plain = made()
    vocabulary_too(plain, mesh["tp"])
    before = adamw(plain)
    update(loss_of(plain, tokens(0, 0)), before)
    model = made()
    vocabulary_too(model, mesh["tp"])
    model.load_state_dict(plain.state_dict())
    optimizer = adamw(model)
    sharded = zeroshard.shard(model, optimizer, stage, group=mesh["dp"])
    optimizer.load_state_dict(before.state_dict())
    for one, its in ((plain, before), (model, optimizer)):
        update(loss_of(one, tokens(1, 0)), its)
    for name, parameter in plain.named_parameters():
        expected = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        torch.testing.assert_close(sharded.states.get(name), expected.detach(), rtol=0, atol=1e-7)
