"""DTensors of tensor parallelism with sharding: the same bits at every stage of one mesh, within 1e-5 of one process.

What is so for experts, too, is in test_divided_models.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import divided
import pytest
import torch
import torch.distributed as dist
from divided import Division, Run, adamw, expect_all_same, expect_near, in_bf16, states_of, values_of
from experts import loss_of
from insides import across_model, padded_numel
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from twin import same, update

import zeroshard
from zeroshard import UsageError
from zeroshard.checkpoint.consolidated import state_dict_of
from zeroshard.checkpoint.loading import open_checkpoint
from zeroshard.checkpoint.manifest import read_manifest
from zeroshard.core.placement import Runs
from zeroshard.sequence import Sequences

WIDTH, VOCABULARY, LENGTH, STEPS = 16, 29, 8, 3
"""The vocabulary is odd: two ranks have 15 and 14 rows of it."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Gpt(nn.Module):
    """`recomputes`: whether each block runs again in the backward."""

    recomputes = False

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return self.head(self.norm(x))


def blocks_only(model: nn.Module, mesh: DeviceMesh) -> None:
    """Embedding, head and norms are ordinary parameters, and whole on every rank."""
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def vocabulary_too(model: nn.Module, mesh: DeviceMesh) -> None:
    blocks_only(model, mesh)
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)


def along_the_sequence(model: nn.Module, mesh: DeviceMesh) -> None:
    """Norms are whole DTensors, and each rank's gradients of them are a part of a sum over positions."""
    for block in model.blocks:
        plan = {
            "norm": SequenceParallel(), "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }  # fmt: skip
        parallelize_module(block, mesh, plan)
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)


def tokens(step: int, rank: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=torch.Generator().manual_seed(100 * step + rank))


def loss(model: nn.Module, number: int, rank: int) -> Tensor:
    return loss_of(model, tokens(number, rank))


def loss_of_labels(model: Any, number: int, rank: int) -> Tensor:
    """The loss of a model of transformers."""
    batch = tokens(number, rank)
    return model(input_ids=batch, labels=batch).loss


WHOLE_VOCABULARY = Division(Gpt, blocks_only, "tp", lambda mesh: mesh["dp"], loss)
TENSOR_PARALLEL = replace(WHOLE_VOCABULARY, cut=vocabulary_too)
ALONG_THE_SEQUENCE = replace(WHOLE_VOCABULARY, cut=along_the_sequence)
DIVISIONS = {
    "blocks only": WHOLE_VOCABULARY, "vocabulary, too": TENSOR_PARALLEL, "along the sequence": ALONG_THE_SEQUENCE,
}  # fmt: skip


def meshed(tp: int, dp: int) -> DeviceMesh:
    return init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))


@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize("shape", [(2, 2), (2, 1), (1, 4)], ids=lambda shape: "tp {} x dp {}".format(*shape))
def test_stages_have_the_same_bits_and_are_one_process(shape: tuple[int, int], division: str) -> None:
    tp, dp = shape
    first = expect_all_same(on_ranks(DIVISIONS[division].train, tp * dp, tp, range(4)))
    expect_near(first, DIVISIONS[division].in_one_process(dp, STEPS))


# ---------------------------------------------------------------------- transformers


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=16))


def divide_layers(model: Any, mesh: DeviceMesh) -> None:
    """Divide attention and MLP of each layer of a Llama."""
    plan = {
        "self_attn.q_proj": ColwiseParallel(), "self_attn.k_proj": ColwiseParallel(), "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(), "mlp.up_proj": ColwiseParallel(), "mlp.gate_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
    }  # fmt: skip
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)


@pytest.mark.full
def test_a_llama_that_transformers_divided(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    def body(rank: int) -> list[Run]:
        mesh = meshed(2, 1)
        runs = []
        for stage in (3, 0, 1):
            model = LlamaForCausalLM.from_pretrained(tmp_path / "llama", tp_plan="auto", device_mesh=mesh["tp"])
            sharded = zeroshard.shard(model, adamw(model), stage, group=mesh["dp"])
            run = divided.take_steps(sharded, loss_of_labels, 0, range(STEPS)) | {"states": states_of(sharded)}
            runs.append(run | {"values": {name: sharded.states.get(name) for name, _ in model.named_parameters()}})
            if stage == 3:
                sharded.export(tmp_path / "exported")
            sharded.remove()
        return runs

    model = llama()
    model.save_pretrained(tmp_path / "llama")
    first = expect_all_same(on_ranks(body, 2))
    expect_near(first, divided.in_one_process(model, loss_of_labels, 1, STEPS))
    exported = LlamaForCausalLM.from_pretrained(tmp_path / "exported")
    assert same(dict(exported.named_parameters()), first["values"])


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


@pytest.mark.ranks(2)
def test_a_gradient_that_is_not_finite_is_seen_on_every_rank(rank: int) -> None:
    sharded = WHOLE_VOCABULARY.shard(2, 2)
    loss(sharded.model, 0, 0).backward()
    sharded.states.get("blocks.0.up.weight", "gradients")
    for part in sharded.states.local("blocks.0.up.weight", "gradients"):
        if rank == 1:
            part.tensor[0] = float("inf")
    assert sharded.sharded_step.not_finite() == ("blocks.0.up.weight",)
    sharded.clip_grad_norm_(1.0)
    assert sharded.sharded_step.overflow
    sharded.remove()


class Sided(Gpt):
    def __init__(self) -> None:
        super().__init__()
        self.side, self.unused = nn.Linear(VOCABULARY, VOCABULARY), nn.Linear(2, 2)

    def forward(self, tokens: Tensor, with_side: bool = False) -> Tensor:
        logits = super().forward(tokens)
        return logits + self.side(logits) if with_side else logits


@pytest.mark.ranks(4)
@pytest.mark.full
def test_a_parameter_that_one_row_of_the_mesh_uses_is_updated_on_all(rank: int) -> None:
    sharded = replace(WHOLE_VOCABULARY, make=Sided).shard(2, 3)
    sharded.model(tokens(0, sharded.rank), with_side=sharded.rank == 1).sum().backward()
    used = sharded.sharded_step.used()
    assert [used["side.weight"], used["norm.weight"], used["unused.weight"]] == [True, True, False]
    sharded.remove()


@pytest.mark.ranks(4)
@pytest.mark.full
def test_one_more_small_message_a_step_and_the_bytes_of_the_local_model(rank: int) -> None:
    sharded = TENSOR_PARALLEL.shard(2, 3)
    across = across_model(sharded)
    TENSOR_PARALLEL.take_steps(sharded, [0])
    sharded.comm_report()
    across.sent.clear()
    TENSOR_PARALLEL.take_steps(sharded, [1])
    numel, flags, inside = padded_numel(sharded), len(list(sharded.model.parameters())), sharded.comm_report()
    assert inside["all_gather"] <= 2 * 4 * numel // 2  # forward and backward, half of each on the other rank
    assert inside["reduce_scatter"] == 4 * numel // 2
    assert set(across.sent) == {"exchange"} and across.sent["exchange"] <= 2 * (flags + 64)
    sharded.remove()


# ---------------------------------------------------------------------- values


@pytest.mark.ranks(2)
def test_values_at_rest_are_read_inside_of_unsharded(rank: int) -> None:
    mesh = meshed(2, 1)
    model = TENSOR_PARALLEL.made()
    vocabulary_too(model, mesh["tp"])
    before = values_of(model)
    sharded = zeroshard.shard(model, adamw(model), 3, group=mesh["dp"])
    weight = model.blocks[0].up.weight
    for read in (weight.to_local, weight.full_tensor, weight.sum, partial(torch.mul, weight, 2.0)):
        assert "blocks.0.up.weight is sharded at rest" in refusal(read)
    assert "whose values are not here" in repr(weight)
    assert isinstance(weight, DTensor) and isinstance(weight, nn.Parameter)
    state = model.state_dict()
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
    assert same({name: sharded.states.get(name) for name in before}, before)
    sharded.remove()


@pytest.mark.ranks(2)
def test_updated_values_are_waited_for_by_their_first_reader(rank: int) -> None:
    sharded = TENSOR_PARALLEL.shard(1, 2)
    weight = sharded.model.head.weight
    readers: list[Callable[[], object]] = [
        weight.to_local, weight.full_tensor, partial(weight.redistribute, placements=[Replicate()]),
        weight.__repr__, weight.sum,
    ]  # fmt: skip
    for step, read in enumerate(readers):
        TENSOR_PARALLEL.take_steps(sharded, [step])
        read()
        assert torch.equal(weight.full_tensor(), sharded.states.get("head.weight"))
    sharded.remove()


@pytest.mark.ranks(4)
@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 2])
def test_writes_to_whole_parameters_reach_master_weights(rank: int, stage: int) -> None:
    sharded = TENSOR_PARALLEL.shard(2, stage, in_bf16)
    model = sharded.model
    with torch.no_grad():
        model.blocks[0].up.weight.fill_(0.5)
        model.head.weight.to_local().fill_(0.25)
        model.norm.weight.fill_(2.0)
    TENSOR_PARALLEL.take_steps(sharded, [0])
    for name, value in (("blocks.0.up.weight", 0.5), ("head.weight", 0.25), ("norm.weight", 2.0)):
        assert (sharded.states.get(name) - value).abs().max() < 0.02  # one step of 0.001, and weight decay
    sharded.remove()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.full), 3])
def test_the_states_of_an_unsharded_optimizer_of_dtensors_load(rank: int, stage: int) -> None:
    mesh = meshed(2, 1)
    plain, model = TENSOR_PARALLEL.made(), TENSOR_PARALLEL.made()
    vocabulary_too(plain, mesh["tp"])
    vocabulary_too(model, mesh["tp"])
    before = adamw(plain)
    update(loss(plain, 0, 0), before)
    model.load_state_dict(plain.state_dict())
    optimizer = adamw(model)
    sharded = zeroshard.shard(model, optimizer, stage, group=mesh["dp"])
    optimizer.load_state_dict(before.state_dict())
    for one, its in ((plain, before), (model, optimizer)):
        update(loss(one, 1, 0), its)
    for name, value in values_of(plain).items():
        torch.testing.assert_close(sharded.states.get(name), value, rtol=0, atol=1e-7)


@pytest.mark.full
def test_a_checkpoint_names_its_mesh_and_is_one_process_to_other_readers(tmp_path: Path) -> None:
    def body(rank: int) -> dict[str, Tensor]:
        sharded = WHOLE_VOCABULARY.shard(2, 3)
        WHOLE_VOCABULARY.take_steps(sharded, [0])
        sharded.save(tmp_path, "tag")
        assert "node_local copies files between hosts of data-parallel ranks" in refusal(
            partial(sharded.save, tmp_path, "other", node_local=True)
        )
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
    assert same(state_dict_of(tmp_path), found)


# ---------------------------------------------------------------------- refusals


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(UsageError) as caught:
        call()
    assert len(str(caught.value).splitlines()) <= 3
    return str(caught.value)


def refused(model: nn.Module, group: Any) -> str:
    return refusal(lambda: zeroshard.shard(model, adamw(model), 1, group=group))


@pytest.mark.ranks(2)
def test_labels_that_differ_inside_one_model_are_refused_at_the_step(rank: int) -> None:
    for clip in (True, False):
        sharded = WHOLE_VOCABULARY.shard(2, 2)
        batch = tokens(0, 0)
        batch[:, -1] = rank  # a label only
        loss_of(sharded.model, batch).backward()
        step = partial(sharded.clip_grad_norm_, 1.0) if clip else sharded.optimizer.step
        assert "is whole on tensor-parallel ranks, but its gradient differs on ranks 0 and 1" in refusal(step)
        sharded.remove()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("division", [TENSOR_PARALLEL, ALONG_THE_SEQUENCE])
def test_batches_that_a_divided_embedding_mixes_are_refused_too(rank: int, division: Division) -> None:
    """Each rank's lookup of its own tokens is a part of one sum: all gradients of whole parameters are equal, and wrong."""
    sharded = division.shard(2, 2)
    for step in range(2):
        loss(sharded.model, 0, rank * step).backward()
        with torch.no_grad():
            sharded.model(tokens(1, rank)[:, 1:])  # an evaluation is not compared
        if not step:
            sharded.optimizer.step()
            sharded.optimizer.zero_grad()
    assert "the model got different inputs on ranks 0 and 1, which divide it" in refusal(sharded.optimizer.step)
    sharded.remove()
    assert not sharded.model._forward_pre_hooks


@pytest.mark.ranks(2)
def test_a_copy_of_the_model_compares_no_inputs(rank: int) -> None:
    """The hook that does is the model's alone: a copy has none, and holds no connections."""
    sharded = WHOLE_VOCABULARY.shard(2, 2)
    copied = copy.deepcopy(sharded.model)
    with torch.no_grad():
        assert torch.equal(copied(tokens(0, 0)[:, 1:]), sharded.model(tokens(0, 0)[:, 1:]))
    loss(copied, 0, rank).backward()
    loss(sharded.model, 0, 0).backward()
    sharded.optimizer.step()
    sharded.remove()


@pytest.mark.ranks(2)
def test_models_that_differ_are_refused(rank: int) -> None:
    mesh = meshed(2, 1)
    model = WHOLE_VOCABULARY.made()
    with torch.no_grad():
        model.norm.bias.add_(rank)
    blocks_only(model, mesh["tp"])
    assert "norm.bias is whole on each of the 2 ranks" in refused(model, mesh["dp"])
    model = TENSOR_PARALLEL.made()
    if rank == 0:
        vocabulary_too(model, mesh["tp"])
    else:
        blocks_only(model, mesh["tp"])
        for fill in (model.embedding, model.head):  # what the first rank's collectives wait for
            distribute_tensor(fill.weight, mesh["tp"], [Shard(0)])
    assert "the ranks built different models" in refused(model, mesh["dp"])


@pytest.mark.ranks(2)
def test_meshes_and_optimizers_that_are_not_taken(rank: int) -> None:
    mesh = meshed(2, 1)
    model = WHOLE_VOCABULARY.made()
    blocks_only(model, mesh["tp"])
    take = partial(zeroshard.shard, model, adamw(model), 3)
    bf16 = zeroshard.Precision(torch.bfloat16)
    for options, told in (
        ({}, 'Pass the data-parallel dimension of the mesh: shard(..., group=mesh["dp"])'),
        ({"group": mesh["tp"]}, "over ranks [0, 1]"),
        ({"group": mesh}, "a mesh of 2 dimensions, ('dp', 'tp')"),
        ({"group": mesh["dp"], "precision": bf16}, "convert the model with model.to(torch.bfloat16)"),
    ):
        assert told in refusal(partial(take, **options))
    muon = torch.optim.Muon([one for one in model.parameters() if one.ndim == 2])
    for whole_matrices in (muon, torch.optim.Adafactor(model.parameters())):
        take_whole = partial(zeroshard.shard, model, whole_matrices, 1, group=mesh["dp"])
        assert "needs whole parameters" in refusal(take_whole)


def from_local(value: Tensor, mesh: DeviceMesh, placement: Any) -> DTensor:
    return DTensor.from_local(value, mesh["tp"], [placement], run_check=False)


PLACED: dict[str, tuple[Callable[[Tensor, DeviceMesh], DTensor], str]] = {
    "over two dimensions": (
        lambda weight, mesh: distribute_tensor(weight, mesh, [Replicate(), Shard(0)]),
        "over 2 dimensions of a mesh",
    ),
    "unevenly": (
        lambda weight, mesh: distribute_tensor(weight[:1], mesh["tp"], [Shard(0)]),
        "equal chunks (the last may be smaller, but not empty)",
    ),
    "as parts of a sum": (lambda weight, mesh: from_local(weight, mesh, Partial()), "is a DTensor placed as P"),
    "strided": (
        lambda weight, mesh: from_local(weight[:2], mesh, _StridedShard(0, split_factor=2)),
        "is a DTensor placed as _S(0, 2)",
    ),
}


@pytest.mark.ranks(2)
def test_placements_that_are_not_taken(rank: int) -> None:
    mesh = meshed(2, 1)
    for place, told in PLACED.values():
        linear = nn.Linear(4, 4)
        linear.weight = nn.Parameter(place(linear.weight.detach(), mesh))
        assert told in refused(linear, mesh["dp"])
    linear = nn.Linear(4, 4)
    linear.register_buffer("scale", distribute_tensor(torch.ones(4), mesh["tp"], [Shard(0)]))
    assert "buffer scale is a DTensor" in refused(linear, mesh["dp"])


@pytest.mark.ranks(2)
@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 3])
def test_compiled_code_is_refused(rank: int, stage: int) -> None:
    sharded = WHOLE_VOCABULARY.shard(2, stage)
    compiled = torch.compile(sharded.model, backend="eager")
    assert "is a DTensor, and Gpt runs inside torch.compile" in refusal(lambda: loss(compiled, 0, 0))
    sharded.model.blocks[1].compile(backend="eager")
    assert "is a DTensor, and Block runs inside torch.compile" in refusal(lambda: loss(sharded.model, 0, 0))
    sharded.remove()


@pytest.mark.ranks(4)
def test_ranks_of_a_group_that_hold_different_parts_are_refused(rank: int) -> None:
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    crossed = [dist.new_group([0, 3]), dist.new_group([1, 2])]
    model = WHOLE_VOCABULARY.made()
    blocks_only(model, DeviceMesh.from_group(rows[rank // 2], "cpu", mesh_dim_names=("tp",)))
    own = crossed[0 if rank in (0, 3) else 1]
    assert "must have the same part" in refused(model, own).replace("\n", " ")


@pytest.mark.ranks(2)
def test_other_doors_refuse_dtensors_by_name(rank: int) -> None:
    mesh = meshed(2, 1)
    linear = nn.Linear(4, 4)
    parallelize_module(linear, mesh["tp"], ColwiseParallel())
    sharded = zeroshard.shard(copy.deepcopy(linear), None, 0, group=mesh["dp"])

    def factory() -> nn.Module:
        model = nn.Linear(4, 4)
        model.weight = nn.Parameter(from_local(model.weight.detach(), mesh, Shard(0)))
        return model

    def plan() -> object:
        config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
        return zeroshard.plan(factory, config, world_size=2, batch=lambda n: torch.zeros(n, 4))

    doors: list[tuple[str, str, Callable[[], object]]] = [
        ("weight", "named_weights()", sharded.named_weights),
        ("weight", "named_weights()", partial(sharded.named_weights, shards=True)),
        ("weight", "named_weights()", sharded.weights_version),
        ("weight", "load_pretrained()", lambda: zeroshard.load_pretrained(copy.deepcopy(linear), "model.safetensors")),
        ("weight", "load_pretrained()", lambda: zeroshard.load_pretrained(copy.deepcopy(linear).to("meta"), "m")),
        ("weight", "Sequences.attach()", lambda: Sequences(mesh["dp"]).attach(linear)),
        ("number 0", "ZeroRedundancyOptimizer", lambda: zeroshard.ZeroRedundancyOptimizer(linear.parameters(), torch.optim.SGD)),
        ("weight", "plan()", plan),
    ]  # fmt: skip
    for parameter, door, call in doors:
        told = refusal(call)
        assert f"parameter {parameter} is a DTensor, whose values are divided over ranks, and {door} takes" in told
        assert door != "named_weights()" or ". Get whole tensors from sharded.states.get" in told
    sharded.remove()
