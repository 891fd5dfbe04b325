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
from twin import build, every_state, same, step, steps, update

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
        with zeroshard.unsharded(model):
            assert torch.equal(model.head.weight, expected["embedding.weight parameters"])
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


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Muon])
def test_asking_for_states_before_the_first_step_changes_nothing(optimizer: Any) -> None:
    weights = []
    for asks in (True, False):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4, bias=False)
        sharded = zeroshard.shard(model, optimizer(model.parameters(), lr=0.1), 0)
        if asks:
            zeroshard.DistributedState(sharded).state_dict()
        model(torch.arange(8.0).view(2, 4)).sum().backward()
        sharded.optimizer.step()
        weights.append(model.weight)
    assert torch.equal(*weights)


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
def test_torchs_functions_for_whole_states_are_refused(rank: int) -> None:
    model, sharded = build(3)
    step(model, sharded, rank, 0)
    with pytest.raises(zeroshard.UsageError, match=r"takes a rank's shards.*DistributedState"):
        get_optimizer_state_dict(model, sharded.optimizer)
    step(model, sharded, rank, 1)


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


@pytest.mark.ranks(2)
def test_states_on_disk_are_refused_before_a_file_is_written(rank: int, tmp_path: Path) -> None:
    model, sharded = build(Policy.stage(3).offloaded(optimizer=Place.DISK, path=str(tmp_path)))
    step(model, sharded, rank, 0)
    for call in (dcp.save, dcp.load):
        with pytest.raises(zeroshard.UsageError, match=r"stores some elsewhere.*Use sharded\.save"):
            call({"train": zeroshard.DistributedState(sharded)}, checkpoint_id=tmp_path / "dcp")
    assert not (tmp_path / "dcp").exists()
    step(model, sharded, rank, 1)


def test_fsdp2_reads_what_we_wrote_and_we_read_what_it_wrote(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def body(rank: int) -> None:
        torch.manual_seed(0)
        model = Untied()
        for block in model.blocks:
            block.scale = torch.nn.Parameter(torch.ones(1))  # FSDP2 takes no scalars
            del block.empty
            block.empty = torch.zeros(0)
        expected = {fqn: p.detach().clone() for fqn, p in model.named_parameters()}
        sharded = zeroshard.shard(model, None, Policy.stage(3))
        dcp.save({"train": zeroshard.DistributedState(sharded)}, checkpoint_id=tmp_path / "ours")

        torch.manual_seed(1)
        other = Untied()
        for block in other.blocks:
            block.scale = torch.nn.Parameter(torch.zeros(1))
            del block.empty
            block.empty = torch.zeros(0)
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
        with zeroshard.unsharded(model):
            for fqn, parameter in model.named_parameters():
                assert torch.equal(parameter.detach(), 2 * expected[fqn]), fqn
        dist.barrier()

    on_ranks(body, 2)


@pytest.mark.parametrize("name", ["SGD", "Adam", "RMSprop", "Adadelta"])
def test_states_that_a_save_makes_change_no_step(name: str) -> None:
    """Weight decay that is added to the gradient must not reach them."""
    options = {"lr": 0.1, "weight_decay": 0.1} | ({"momentum": 0.9} if name in ("SGD", "RMSprop") else {})

    def trained(saves: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        sharded = zeroshard.shard(model, getattr(torch.optim, name)(model.parameters(), **options), 2)
        if saves:
            zeroshard.DistributedState(sharded).state_dict()
        for number in range(3):
            update(model(torch.full((2, 4), 1.0 + number)).square().sum(), sharded.optimizer)
        return model.weight.detach()

    assert torch.equal(trained(True), trained(False))


def test_states_that_only_a_step_makes_right_are_not_made() -> None:
    model = torch.nn.Linear(4, 4)
    sharded = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5), 2)
    with pytest.raises(zeroshard.UsageError, match="SGD with dampening cannot be made without a step"):
        zeroshard.DistributedState(sharded).state_dict()
