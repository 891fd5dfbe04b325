"""What is so for both ways to divide a model over ranks, tensor parallelism and experts over their own ranks."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import test_experts
import test_tensor_parallel
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from divided import Division, Run, expect_all_same, expect_near, expect_same, in_bf16, ordinary, states_of
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from twin import same

import zeroshard
from zeroshard import Offload, Place, Policy, Sharded
from zeroshard.checkpoint.consolidated import state_dict_of
from zeroshard.checkpoint.hugging_face import export
from zeroshard.checkpoint.loading import open_checkpoint

RANKS = 4
DIVISIONS: dict[str, Division] = {
    "tensor parallel": test_tensor_parallel.TENSOR_PARALLEL,
    "experts": test_experts.EXPERTS,
}
BOTH = pytest.mark.parametrize("way", DIVISIONS)


def data_ranks(way: str) -> int:
    """The ranks that have batches of their own if two ranks divide each model: all, where experts are divided."""
    return RANKS if way == "experts" else RANKS // 2


def tied(model: Any) -> None:
    model.head.weight = model.embedding.weight


def cut_and_tie(model: nn.Module, mesh: Any) -> None:
    """`parallelize_module` makes two parameters of one."""
    test_tensor_parallel.vocabulary_too(model, mesh)
    tied(model)


def frozen_parts(model: Any) -> None:
    model.blocks[0].requires_grad_(False)
    model.blocks[1].norm.requires_grad_(False)


def experts_alone(model: Any) -> None:
    """Routers and some dense parts are frozen, and a part of the experts."""
    for block in model.blocks:
        block.router.requires_grad_(False)
    model.blocks[0].norm.requires_grad_(False)
    model.blocks[1].experts.down.requires_grad_(False)


def recomputed(model: Any) -> None:
    model.recomputes = True


@pytest.mark.parametrize(
    ("way", "change"),
    [
        ("tensor parallel", ordinary), ("tensor parallel", frozen_parts), ("tensor parallel", tied),
        ("experts", ordinary), ("experts", recomputed), ("experts", experts_alone),
    ],
)  # fmt: skip
def test_accumulation_and_awkward_models(way: str, change: Any) -> None:
    division = replace(DIVISIONS[way], cut=cut_and_tie) if change is tied else DIVISIONS[way]
    everyone = on_ranks(partial(division.train, microbatches=2), RANKS, 2, range(4), change)
    reference = division.in_one_process(data_ranks(way), 3, change, 2)
    for runs in everyone:
        for stage, run in enumerate(runs):
            # Sums over microbatches are made first at the first two stages, and sums over ranks at the others.
            expect_same(run, everyone[0][0 if stage < 2 else 2])
            expect_near(run, reference)


@pytest.mark.full
@BOTH
def test_transports_places_overlap_and_recomputation_leave_the_bits(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, third = DIVISIONS[way].train, Policy.stage(3)
    policies = [
        0, 3, replace(third, reshard_after_forward=False), third.offloaded(optimizer=Place.CPU),
        Policy.stage(2).offloaded(optimizer=Place.CPU),
    ]  # fmt: skip
    if way == "tensor parallel":
        how = Offload(str(tmp_path), buffer_numel=1 << 16, block_nbytes=4096)
        policies.append(third.offloaded(optimizer=Place.DISK, parameters=Place.DISK, offload=how))
    everyone = on_ranks(train, RANKS, 2, policies)
    everyone += on_ranks(partial(train, overlap=False), RANKS, 2, [1, 3])
    everyone += on_ranks(train, RANKS, 2, [3], recomputed)
    monkeypatch.setenv("ZEROSHARD_SHARED_MEMORY", "0")
    everyone += on_ranks(train, RANKS, 2, [1, 2, 3])
    expect_all_same(everyone)


@pytest.mark.full
@pytest.mark.parametrize("parts", [2, 4])
@BOTH
def test_parameters_in_bf16_have_master_weights(way: str, parts: int) -> None:
    first = expect_all_same(on_ranks(DIVISIONS[way].train, RANKS, parts, range(4), in_bf16))
    assert {value.dtype for value in first["states"].values()} == {torch.float32}


@pytest.mark.parametrize(
    ("way", "sizes", "names"),
    [
        ("tensor parallel", (2, 2), ("tp", "dp")),
        ("tensor parallel", (2, 1, 2), ("pp", "tp", "dp")),
        ("experts", (2, 2), ("ep", "dp")),
    ],
)
def test_dimensions_may_stand_in_any_order(
    way: str, sizes: tuple[int, ...], names: tuple[str, ...], tmp_path: Path
) -> None:
    """Also beside a third one, which zeroshard does not look at."""
    division = DIVISIONS[way]

    def body(rank: int) -> list[float]:
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        sharded = division.shard(mesh, 3)
        run = division.take_steps(sharded, [0, 1])
        states = states_of(sharded)
        sharded.save(tmp_path / str(mesh.get_local_rank("pp") if "pp" in names else 0), "tag")
        sharded.remove()
        dist.barrier()
        sharded = division.shard(RANKS, 2)
        sharded.load(tmp_path / "0")
        assert same(states_of(sharded), states)
        sharded.remove()
        return run["norms"]

    everyone = on_ranks(body, RANKS)
    assert all(norms == everyone[0] for norms in everyone)
    assert everyone[0] == pytest.approx(division.in_one_process(data_ranks(way), 2)["norms"], rel=1e-5)


@BOTH
def test_torchs_clipping_and_gradients_by_name(way: str) -> None:
    """torch's own clipping sees the norms of whole parameters, and `states` has whole gradients."""
    division = DIVISIONS[way]
    model = division.made()
    for rank in range(data_ranks(way)):
        (division.loss(model, 0, rank) / data_ranks(way)).backward()
    expected = {name: one.grad.clone() for name, one in model.named_parameters()}
    largest = max(float(grad.abs().max()) for grad in expected.values())
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.1))

    def gradients_near(sharded: Sharded, factor: float) -> dict[str, Tensor]:
        found = {name: sharded.states.get(name, "gradients") for name in expected}
        for name, grad in expected.items():
            torch.testing.assert_close(found[name], grad * factor, rtol=0, atol=1e-6)
        return found

    def body(rank: int) -> None:
        kept = []
        for stage in range(4):
            sharded = division.shard(2, stage)
            division.loss(sharded.model, 0, sharded.rank).backward()
            gradients_near(sharded, 1.0)
            biggest = nn.utils.get_total_norm([one.grad for one in sharded.model.parameters()], float("inf"))
            assert float(biggest) == pytest.approx(largest, rel=1e-5)
            assert float(nn.utils.clip_grad_norm_(sharded.model.parameters(), 0.1)) == pytest.approx(norm, rel=1e-5)
            found = gradients_near(sharded, 0.1 / (norm + 1e-6))
            assert float(sharded.clip_grad_norm_(None)) == pytest.approx(0.1, rel=1e-4)
            sharded.optimizer.step()
            kept.append(found | states_of(sharded))
            sharded.optimizer.zero_grad()
            sharded.remove()
        assert all(same(other, kept[0]) for other in kept)

    on_ranks(body, RANKS)


@pytest.mark.ranks(4)
@BOTH
def test_state_dicts_copies_parked_states_and_freezing(rank: int, way: str) -> None:
    division = DIVISIONS[way]
    runs = []
    for stage in (1, 3):
        sharded = division.shard(2, stage)
        division.take_steps(sharded, range(2))
        model: Any = sharded.model
        states = states_of(sharded)
        values = {name: states[f"{name} parameters"] for name, _ in model.named_parameters()}
        last = sharded.consolidated_state_dict(to=sharded.world_size - 1)
        assert last is None or same(last, values)
        holders: list[Any] = [None] * RANKS
        dist.all_gather_object(holders, last is not None)
        assert sum(holders) == 1
        kept = {name: value.detach().clone() for name, value in model.state_dict().items()}
        for name, parameter in copy.deepcopy(model).named_parameters():
            value = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            assert torch.equal(value, values[name])
        saved = copy.deepcopy(sharded.optimizer.state_dict())
        division.take_steps(sharded, [2])
        model.load_state_dict(kept)
        sharded.optimizer.load_state_dict(saved)
        assert same(states_of(sharded), states)
        sharded.offload_states()
        sharded.reload_states()
        assert same(states_of(sharded), states)
        frozen = "experts" if way == "experts" else "up"
        norms = []
        for step, is_trained in ((3, False), (4, True)):
            getattr(model.blocks[0], frozen).requires_grad_(is_trained)
            model.blocks[1].requires_grad_(is_trained)
            sharded.update_trainable()
            norms += division.take_steps(sharded, [step])["norms"]
            for name, value in values.items():
                is_kept = name.startswith((f"blocks.0.{frozen}", "blocks.1.")) and not is_trained
                assert torch.equal(sharded.states.get(name), value) == is_kept, name
        runs.append({"norms": norms, "states": states_of(sharded)})
        sharded.remove()
    expect_same(*runs)


# ---------------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("way", "parts"),
    [("tensor parallel", 2), ("experts", 1), ("experts", 2), ("experts", 4)],
)
def test_checkpoints_move_between_meshes_stages_and_world_sizes(way: str, parts: int, tmp_path: Path) -> None:
    """And models that are not divided; a run goes on as it would have, to the bit where the mesh is the first."""
    division = DIVISIONS[way]
    undivided = replace(division, cut=lambda model, mesh: None, group=lambda mesh: mesh["dp"])

    def body(rank: int, division: Division, parts: int, stage: int, tag: str) -> tuple[dict[str, Tensor], Run]:
        sharded = division.shard(parts, stage)
        if tag == "first":
            division.take_steps(sharded, range(2))
        else:
            sharded.load(tmp_path, "first" if tag != "back" else "undivided")
        found = states_of(sharded)
        sharded.save(tmp_path, tag, asynchronous=tag == "first")
        sharded.export(tmp_path / f"{tag} live")
        run = division.take_steps(sharded, [2]) | {"states": states_of(sharded)}
        sharded.remove()
        return found, run

    first, goes_on = on_ranks(body, RANKS, division, parts, 3, "first")[0]
    for ranks, tag, how, other, stage in (
        (RANKS, "one", division, 1, 0), (RANKS, "two", division, 2, 1), (RANKS, "four", division, 4, 2),
        (2, "smaller", division, 2, 3), (2, "undivided", undivided, 1, 3), (RANKS, "back", division, parts, 1),
    ):  # fmt: skip
        for found, run in on_ranks(body, ranks, how, other, stage, tag):
            assert same(found, first), tag
            if (ranks, other) == (RANKS, parts):
                expect_same(run, goes_on)
            elif ranks == RANKS and way == "experts":
                assert run["norms"] == pytest.approx(goes_on["norms"], abs=1e-5)
    exports = {path.read_bytes() for path in tmp_path.glob("* live/model.safetensors")}
    assert len(exports) == 1 and len(list(tmp_path.glob("* live"))) == 7
    reader = open_checkpoint(tmp_path, "first")
    export(reader, tmp_path / "offline")
    assert {(tmp_path / "offline" / "model.safetensors").read_bytes()} == exports
    # No rank lists its ranges: a reader computes them from the layouts.
    assert not any(state.ranges for one in reader.manifest.parameters.values() for state in one.states.values())
    if way == "tensor parallel":
        assert len(reader.manifest.layouts) == parts, "of the odd vocabulary, two parts have two sizes"
    else:
        assert reader.manifest.parts == parts
    whole = state_dict_of(tmp_path, "first")
    assert same(whole, {name: first[f"{name} parameters"] for name in whole})


@pytest.mark.ranks(4)
@pytest.mark.parametrize("stage", [1, 3])
@BOTH
def test_torchs_distributed_checkpoints_hold_whole_tensors(rank: int, way: str, stage: int, tmp_path: Path) -> None:
    """They load at other meshes, and a model's state dict loads into one that nothing divides."""
    division = DIVISIONS[way]
    sharded = division.shard(2, stage)
    division.take_steps(sharded, [0])
    states = states_of(sharded)
    dcp.save({"train": zeroshard.DistributedState(sharded)}, checkpoint_id=tmp_path / "train")
    dcp.save({"model": sharded.model.state_dict()}, checkpoint_id=tmp_path / "model")
    division.take_steps(sharded, [1])
    state = sharded.model.state_dict()
    dcp.load({"model": state}, checkpoint_id=tmp_path / "model")
    sharded.model.load_state_dict(state)
    plain = division.made().state_dict()
    dcp.load({"model": plain}, checkpoint_id=tmp_path / "model")
    for name, value in plain.items():
        assert torch.equal(value, states[f"{name} parameters"]), name
        assert torch.equal(value, sharded.states.get(name)), name
    sharded.remove()
    for parts in (1, 4):
        sharded = division.shard(parts, 2)
        dcp.load({"train": zeroshard.DistributedState(sharded)}, checkpoint_id=tmp_path / "train")
        assert same(states_of(sharded), states)
        sharded.remove()
