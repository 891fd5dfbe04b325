"""torch.distributed.checkpoint saves and loads zeroshard's shards at any world size, and FSDP2 loads such a checkpoint."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from models import Untied
from ranks import on_ranks
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from twin import build, every_state, same, step, steps, update, whole

import zeroshard
from zeroshard import Policy
from zeroshard.checkpoint.dcp import boxes
from zeroshard.policy import Place


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_boxes_are_the_range(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=4)))
    whole = torch.arange(torch.Size(shape).numel())
    start = data.draw(st.integers(0, whole.numel() - 1))
    stop = data.draw(st.integers(start, whole.numel()))
    rebuilt = torch.full(shape, -1)
    for box in boxes(shape, start, whole[start:stop]):
        where = tuple(slice(low, low + size) for low, size in zip(box.offsets, box.sizes, strict=True))
        assert (rebuilt[where] == -1).all()
        rebuilt[where] = box.tensor
    expected = torch.full_like(whole, -1)
    expected[start:stop] = whole[start:stop]
    assert torch.equal(rebuilt.view(-1), expected)


@pytest.mark.parametrize("target", [(1, 0), (2, 3), (4, 2), (3, 1)])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_saved_by_dcp_and_loaded_at_another_world_size(stage: int, target: tuple[int, int], tmp_path: Path) -> None:
    def save(rank: int) -> dict[str, torch.Tensor]:
        model, sharded = build(stage)
        steps(model, sharded, rank, range(2))
        dcp.save({"train": zeroshard.DistributedState(sharded)}, checkpoint_id=tmp_path)
        return every_state(sharded)

    expected = on_ranks(save, 2)[0]

    def load(rank: int) -> None:
        model, sharded = build(target[1])
        dcp.load({"train": zeroshard.DistributedState(sharded)}, checkpoint_id=tmp_path)
        assert same(every_state(sharded), expected)
        assert torch.equal(whole(model)["embedding.weight"], expected["embedding.weight parameters"])
        step(model, sharded, rank, 2)

    on_ranks(load, target[0])


@pytest.mark.ranks(1)
@pytest.mark.parametrize("value", ["x", None, torch.zeros(3)], ids=repr)
def test_a_value_of_another_type_is_refused_and_nothing_is_taken(rank: int, value: Any) -> None:
    model, sharded = build(2)
    step(model, sharded, rank, 0)
    before = every_state(sharded)
    state = zeroshard.DistributedState(sharded)
    read = state.state_dict()
    read["optim"]["embedding.weight"]["step"] = value
    with pytest.raises(
        zeroshard.CheckpointError,
        match=r"weight\.step is a .* in the checkpoint, and a tensor",
    ):
        state.load_state_dict(read)
    assert same(every_state(sharded), before)


@pytest.mark.ranks(1)
def test_after_an_error_while_states_are_made_the_next_call_makes_them(rank: int) -> None:
    model, sharded = build(2, make_optimizer=partial(torch.optim.Adam, lr=0.1))
    state = zeroshard.DistributedState(sharded)

    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys.modules["torch.optim.adam"], "adam", fail)  # which updates states that were made before
        with pytest.raises(MemoryError):
            state.state_dict()
    assert state.state_dict()["optim"]["embedding.weight"]["step"] == 0
    other, plain = build(2, make_optimizer=partial(torch.optim.Adam, lr=0.1))
    for one, trained in ((model, sharded), (other, plain)):
        step(one, trained, rank, 0)
    assert same(every_state(sharded), every_state(plain))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 2])
def test_an_optimizer_itself_is_saved_only_if_every_rank_has_all_states(rank: int, stage: int, tmp_path: Path) -> None:
    """DCP would keep one rank's shards, and the load would find states missing."""
    model, sharded = build(stage)
    step(model, sharded, rank, 0)
    kept = {"optimizer": sharded.optimizer}
    if stage == 2:
        for call in (dcp.save, dcp.load):
            with pytest.raises(zeroshard.UsageError, match=r"one rank's in place of all.*DistributedState"):
                call(kept, checkpoint_id=tmp_path)
        return
    dcp.save(kept, checkpoint_id=tmp_path)
    expected = every_state(sharded)
    step(model, sharded, rank, 1)
    dcp.load(kept, checkpoint_id=tmp_path)
    after = every_state(sharded)
    assert same(*({key: one[key] for key in one if "parameters" not in key} for one in (expected, after)))


def for_fsdp2(scale: float = 1.0) -> torch.nn.Module:
    """A model without scalars, which FSDP2 does not take, and without empty parameters."""
    model = Untied()
    for block in model.blocks:
        block.scale = torch.nn.Parameter(torch.full((1,), scale))
        del block.empty
        block.empty = torch.zeros(0)
    return model


@pytest.mark.ranks(2)
def test_fsdp2_reads_what_we_wrote_and_we_read_what_it_wrote(rank: int, tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, sharded = build(3, make_model=for_fsdp2, make_optimizer=None)
    expected, other = whole(model), for_fsdp2(2.0)
    dcp.save({"train": zeroshard.DistributedState(sharded)}, checkpoint_id=tmp_path / "ours")
    fully_shard(other, mesh=init_device_mesh("cpu", (2,)))
    theirs = {"train": {"model": other.state_dict()}}
    dcp.load(theirs, checkpoint_id=tmp_path / "ours")
    for fqn, value in expected.items():
        assert torch.equal(theirs["train"]["model"][fqn].full_tensor(), value), fqn
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
    dcp.save({"train": {"model": other.state_dict()}}, checkpoint_id=tmp_path / "theirs")
    dcp.load({"train": zeroshard.DistributedState(sharded)}, checkpoint_id=tmp_path / "theirs")
    assert same(whole(model), {fqn: 2 * value for fqn, value in expected.items()})
    dist.barrier()


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {}, "Muon": {}, "Adadelta": {"weight_decay": 0.1}, "SGD": {"weight_decay": 0.1, "momentum": 0.9},
    "RMSprop": {"weight_decay": 0.1, "momentum": 0.9}, "Adam": {"weight_decay": 0.1},
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_that_are_made_before_the_first_step_change_no_step(name: str) -> None:
    """Weight decay that is added to the gradient must not reach them."""

    def trained(saves: bool) -> dict[str, torch.Tensor]:
        model, sharded = build(
            2,
            make_model=lambda: torch.nn.Linear(4, 4, bias=False),
            make_optimizer=partial(getattr(torch.optim, name), lr=0.1, **OPTIMIZERS[name]),
        )
        if saves:
            zeroshard.DistributedState(sharded).state_dict()
        for number in range(3):
            update(model(torch.arange(8.0).view(2, 4) + number).square().sum(), sharded.optimizer)
        return every_state(sharded)

    assert same(trained(True), trained(False))


@pytest.mark.ranks(2)
def test_what_cannot_be_saved_this_way_is_refused_before_a_file_is_written(rank: int, tmp_path: Path) -> None:
    model, sharded = build(3)
    step(model, sharded, rank, 0)
    with pytest.raises(zeroshard.UsageError, match=r"takes a rank's shards.*DistributedState"):
        get_optimizer_state_dict(model, sharded.optimizer)
    step(model, sharded, rank, 1)
    dampened = build(2, make_optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5))[1]
    with pytest.raises(zeroshard.UsageError, match="SGD with dampening cannot be made without a step"):
        zeroshard.DistributedState(dampened).state_dict()
    model, on_disk = build(Policy.stage(3).offloaded(optimizer=Place.DISK, path=str(tmp_path)))
    step(model, on_disk, rank, 0)
    for call in (dcp.save, dcp.load):
        with pytest.raises(zeroshard.UsageError, match=r"stores some elsewhere.*Use sharded\.save"):
            call({"train": zeroshard.DistributedState(on_disk)}, checkpoint_id=tmp_path / "dcp")
    assert not (tmp_path / "dcp").exists()
    step(model, on_disk, rank, 1)
