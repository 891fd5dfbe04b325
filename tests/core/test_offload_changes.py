"""Changes to a model between steps take effect, wherever states are at rest. Errors leave nothing half done."""

from __future__ import annotations

import copy
import gc
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from insides import units
from models import Stack, sgd, tokens
from test_offload import keep_places_apart, take_steps
from test_offload_states import policies, trained
from torch import Tensor, nn
from twin import CPU, DISK, LARGE_BUCKETS, SMALL_BUCKETS, build, every_state, same, steps, update, whole

import zeroshard
from zeroshard import Offload, Place, Policy, Precision, Residency, Sharded, StorageError, UsageError, ZeroshardError
from zeroshard.core.sharded_step import ShardedStep
from zeroshard.core.storage.disk import Requests
from zeroshard.core.travelling import Frame


def change_as_modifier(sharded: Sharded) -> None:
    with zeroshard.unsharded(sharded.model, modifier_rank=0), torch.no_grad():
        for parameter in sharded.model.parameters():
            parameter.mul_(2)
    sharded.states.get("embedding.weight")
    with zeroshard.unsharded(sharded.model.get_submodule("blocks.1"), modifier_rank=0), torch.no_grad():
        sharded.model.get_parameter("blocks.1.up.bias").add_(1)


def clamp(sharded: Sharded) -> None:
    with torch.no_grad():
        for parameter in sharded.model.parameters():
            if parameter.requires_grad:
                parameter.clamp_(-0.05, 0.05)


def average_frozen(sharded: Sharded) -> None:
    """As a teacher is moved after its student: through `.data`, in place and anew."""
    for number, parameter in enumerate(p for p in sharded.model.parameters() if not p.requires_grad):
        if number % 2:
            parameter.data.mul_(1.5)
        else:
            parameter.data = parameter.data * 1.5


def set_state(sharded: Sharded) -> None:
    states = sharded.states
    states.set("embedding.weight", "parameters", torch.ones(31, 12))
    sharded.optimizer.zero_grad()
    states.set("embedding.weight", "exp_avg", torch.ones(31, 12))


CHANGES: dict[str, tuple[Callable[[Sharded], None], str, int]] = {
    "modifier": (change_as_modifier, "fp32", 3), "modifier, bf16": (change_as_modifier, "bf16", 3), "clamped": (clamp, "fp32", 2),
    "teacher": (average_frozen, "fp32", 2), "states": (set_state, "fp32", 3), "states, bf16": (set_state, "bf16", 3),
}  # fmt: skip


QUICK = ("clamped", "states, bf16")


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "change", [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in CHANGES]
)
def test_what_users_change_counts(rank: int, change: str, tmp_path: Path) -> None:
    """Between `zero_grad` and the next step, when much is read ahead already. In place where parameters are unsharded."""
    apply, precision, highest_stage = CHANGES[change]
    results = []
    chosen = {name: policy for name, policy in policies(tmp_path).items() if name != "memory"}
    unsharded = [Policy.stage(2), *(p for p in chosen.values() if not p.parameters.sharded)]
    for number, policy in enumerate(
        unsharded + ([p for p in chosen.values() if p.parameters.sharded] if highest_stage == 3 else [])
    ):
        if number == 1:
            keep_places_apart()
        sharded = trained(policy, precision, "frozen")
        for batch in (2, 3, 4):
            apply(sharded)
            take_steps(sharded, batch)
        apply(sharded)
        with zeroshard.unsharded(sharded.model):
            shown = {f"shown {fqn}": p.detach().clone() for fqn, p in sharded.model.named_parameters()}
        results.append(every_state(sharded) | shown)
        sharded.remove()
    for result in results[1:]:
        assert same(result, results[0])


@pytest.mark.parametrize("place", [CPU, DISK])
def test_after_an_optimizer_raised_in_a_later_sub_group_a_checkpoint_goes_on(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = SimpleNamespace(calls=0, fails_in=0)
    step_inner = ShardedStep.step_inner

    def counted(self: ShardedStep, optimizer: torch.optim.Optimizer, *evaluated: Any) -> None:
        noted.calls += 1
        if noted.calls == noted.fails_in:
            raise ValueError("in the middle of a step")
        step_inner(self, optimizer, *evaluated)

    monkeypatch.setattr(ShardedStep, "step_inner", counted)
    how = Offload(str(tmp_path), buffer_numel=6000, sub_group_numel=400, block_nbytes=4096)
    for stage in (1, 2, 3):
        policy = Policy.stage(stage).offloaded(optimizer=place, parameters=place if stage == 3 else None, offload=how)
        _, sharded = build(policy)
        noted.calls = noted.fails_in = 0
        take_steps(sharded, 0)
        noted.fails_in = noted.calls  # in the last sub-group
        assert noted.calls > 1 or place is CPU
        sharded.save(tmp_path / str(stage), "last")
        noted.calls = noted.calls * 10
        take_steps(sharded, 1)
        expected = every_state(sharded)
        sharded.load(tmp_path / str(stage))
        noted.calls = 0
        with pytest.raises(ValueError, match="in the middle of a step"):
            take_steps(sharded, 1)
        noted.calls = 10 * noted.fails_in
        sharded.optimizer.zero_grad()
        sharded.load(tmp_path / str(stage))
        take_steps(sharded, 1)
        assert same(every_state(sharded), expected), stage


@pytest.mark.full
@pytest.mark.parametrize("call", ["preadv", pytest.param("pwritev", marks=pytest.mark.full)])
def test_after_an_error_the_last_checkpoint_goes_on(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request fails, anywhere in a step: what is loaded after, in the same process, trains to the same bits."""
    real, left = getattr(os, call), [10**9]
    lock = threading.Lock()

    def failing(*arguments: Any) -> int:
        with lock:
            left[0] -= 1
            fails = left[0] == 0
        if fails:
            raise OSError(5, os.strerror(5))
        return int(real(*arguments))

    policy = policies(tmp_path)["stage 3, on disk"]
    sharded = trained(policy)
    sharded.save(tmp_path / "checkpoints", "last")
    take_steps(sharded, 2, 3)
    expected = every_state(sharded)
    monkeypatch.setattr(os, call, failing)
    raised = 0
    for number in range(1, 120, 6):
        left[0] = number
        try:
            take_steps(sharded, 2, 3)
            sharded.sharded_step.sub_groups.settle()
        except StorageError:
            raised += 1
        left[0] = 10**9
        sharded.optimizer.zero_grad()
        sharded.load(tmp_path / "checkpoints")
        take_steps(sharded, 2, 3)
        assert same(every_state(sharded), expected), number
        sharded.load(tmp_path / "checkpoints")
    assert raised >= 5


def test_a_write_that_failed_is_reported_once() -> None:
    """To whoever reads the slot or needs the frame first: a zero_grad or a load after the error is not stopped by it again."""
    future: Future[None] = Future()
    future.set_exception(StorageError("cannot be written"))
    for is_known in (False, True):
        frame, writing = Frame(torch.empty(0, dtype=torch.uint8)), Requests([future])
        frame.hold(writing)
        if is_known:
            with pytest.raises(StorageError):
                writing.wait(torch.device("cpu"))
        with nullcontext() if is_known else pytest.raises(StorageError):
            frame.empty()
        assert frame.is_idle


def test_writes_that_go_nowhere_are_refused(tmp_path: Path) -> None:
    sharded = trained(policies(tmp_path)["stage 3, on disk"])
    state = next(iter(sharded.optimizer.state.values()))
    state["exp_avg"].zero_()
    sharded.model(*tokens(0, 2)).backward()
    with pytest.raises(UsageError, match=r"sharded\.states\.set"):
        sharded.optimizer.step()


class Special(nn.Parameter):
    """A class of the user's own."""


@pytest.mark.parametrize("stage", range(4))
def test_trainable_parameters_of_a_users_own_class_are_refused(stage: int) -> None:
    model = Stack()
    model.blocks[0].up.weight = Special(model.blocks[0].up.weight.detach())
    with pytest.raises(UsageError, match=r"blocks\.0\.up\.weight is of the class Special, and .* trains only ordinary"):
        zeroshard.shard(model, torch.optim.AdamW(model.parameters()), stage)


def test_frozen_parameters_of_a_users_own_class_keep_it_and_stay(tmp_path: Path) -> None:
    keep = zeroshard.core.storage.storages.is_cpu_memory
    try:
        keep_places_apart()
        model = Stack()
        model.blocks[0].up.weight = special = Special(model.blocks[0].up.weight.detach(), requires_grad=False)
        values = special.detach().clone()
        trained = [parameter for parameter in model.parameters() if parameter is not special]
        policy = policies(tmp_path)["stage 2, whole in CPU memory"]
        sharded = zeroshard.shard(model, torch.optim.AdamW(trained), policy, bucket_numel=SMALL_BUCKETS)
        take_steps(sharded, 0)
        assert type(special) is Special
        assert torch.equal(special, values)
        assert torch.equal(sharded.states.get("blocks.0.up.weight"), values)
        assert type(copy.deepcopy(special)) is Special
        with pytest.raises(UsageError, match="parameter of a class of your own"):
            sharded.offload_states(["parameters"])
        special.requires_grad_(True)
        with pytest.raises(UsageError, match=r"trains only ordinary parameters\. Keep it frozen"):
            sharded.optimizer.add_param_group({"params": [special]})
        sharded.remove()
        assert type(special) is Special
    finally:
        zeroshard.core.storage.storages.is_cpu_memory = keep


@pytest.mark.ranks(1)
def test_questions_about_shapes_bring_nothing_back(rank: int, tmp_path: Path) -> None:
    keep_places_apart()
    sharded = trained(policies(tmp_path)["stage 2, whole in CPU memory"], model="tied", steps=0)
    parameters = list(sharded.model.parameters())

    def away() -> bool:
        here = any(zeroshard.parameter_states(parameter).is_here for parameter in parameters)
        return not here and not sharded.memory_report()["parameters"]

    assert away(), "after shard"
    sum(p.numel() for p in sharded.model.parameters() if p.requires_grad and p.shape and p.dtype == torch.float32)
    next(sharded.model.parameters()).device  # noqa: B018
    assert away()
    with zeroshard.unsharded(sharded.model):
        assert not next(sharded.model.parameters()).isnan().any()
    assert away(), "after a look inside"
    assert not next(sharded.model.parameters()).isnan().any() and not away()
    take_steps(sharded, 0)
    assert away(), "after a step"


@pytest.mark.full
def test_freezing_and_freeing_use_the_same_space_and_place(tmp_path: Path) -> None:
    how = Offload(str(tmp_path), ratio=0.5, buffer_numel=4096, block_nbytes=4096)
    sharded = trained(Policy.stage(2).offloaded(optimizer=DISK, offload=how), model="tied")
    report = sharded.memory_report()
    assert report["disk"] and report["optimizer"], "each place has a part"
    sizes = []
    for step in range(6):
        sharded.model.get_submodule("blocks.0").requires_grad_(step % 2 == 1)
        sharded.update_trainable()
        take_steps(sharded, step)
        gc.collect()
        sizes.append(sharded.memory_report()["disk"])
    assert sizes[1] == sizes[3] == sizes[5]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_parked_states_are_guarded(precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sharded = trained(Policy.stage(2), precision)
    expected = every_state(sharded)
    with zeroshard.unsharded(sharded.model), pytest.raises(UsageError, match="Call it outside"):
        sharded.offload_states(place=DISK, offload=Offload(str(tmp_path)))
    with pytest.raises(ZeroshardError, match="names no folder"):
        sharded.offload_states(place=DISK)
    assert same(every_state(sharded), expected)
    sharded.offload_states(place=DISK, offload=Offload(str(tmp_path)))
    sharded.optimizer.zero_grad()
    for use in (sharded.optimizer.state_dict, lambda: sharded.optimizer.load_state_dict({})):
        with pytest.raises(UsageError, match="parked"):
            use()
    with pytest.raises(UsageError, match="parked"):
        sharded.model.state_dict()
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *a: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    with pytest.raises(StorageError):
        sharded.reload_states()
    monkeypatch.setattr(os, "preadv", real)
    sharded.reload_states()
    assert same(every_state(sharded), expected)
    sharded.offload_states(["optimizer"], place=DISK, offload=Offload(str(tmp_path)))
    with pytest.raises(UsageError, match="parked"), zeroshard.unsharded(sharded.model, modifier_rank=0):
        pass
    sharded.remove()
    shown = {fqn: p.detach().clone() for fqn, p in sharded.model.named_parameters()}
    assert all(not value.isnan().any() for value in shown.values())


def test_more_states_than_were_thought(tmp_path: Path) -> None:
    """amsgrad keeps three."""
    results: list[dict[str, Tensor]] = []
    for name in ("memory", "stage 3, on disk"):
        amsgrad = partial(torch.optim.AdamW, lr=1e-2, amsgrad=True)
        _, sharded = build(policies(tmp_path)[name], make_optimizer=amsgrad)
        take_steps(sharded, *range(3))
        results.append(every_state(sharded))
    assert same(*results) and any("max_exp_avg_sq" in name for name in results[0])


def write_and_park(sharded: Sharded, weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.fill_(2.0)
    sharded.offload_states(["parameters"])
    sharded.reload_states()


def assign_and_park(sharded: Sharded, weight: nn.Parameter) -> None:
    weight.data = torch.full_like(weight.data, 2.0)
    sharded.offload_states(["parameters"])
    sharded.reload_states()


def write_through_data_and_park(sharded: Sharded, weight: nn.Parameter) -> None:
    weight.data.fill_(2.0)
    sharded.offload_states(["parameters"])
    sharded.reload_states()


def write_in_a_borrower(sharded: Sharded, weight: nn.Parameter) -> None:
    class Borrower(nn.Module):
        def forward(self) -> None:
            with torch.no_grad():
                weight.fill_(2.0)

    borrower = Borrower()
    handle = zeroshard.borrow(borrower, weight)
    borrower()
    handle.remove()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("write", [write_and_park, assign_and_park, write_through_data_and_park, write_in_a_borrower])
def test_a_write_counts_although_whole_parameters_leave_at_once(
    rank: int, write: Callable[[Sharded, nn.Parameter], None], dtype: torch.dtype
) -> None:
    keep_places_apart()
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sharded = zeroshard.shard(model, optimizer, Policy.stage(2).offloaded(parameters=CPU))
    for number in range(2):
        if number:
            write(sharded, model[0].weight)
        update(model(torch.ones(2, 8, dtype=dtype)).sum(), optimizer)
    assert bool((model[0].weight == 2).all())


@pytest.mark.ranks(1)
@pytest.mark.parametrize("way", ["consolidated_state_dict", "deepcopy"])
def test_a_copy_of_the_model_returns_units_to_their_place_one_at_a_time(rank: int, way: str) -> None:
    keep_places_apart()
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sharded = zeroshard.shard(model, optimizer, Policy.stage(2).offloaded(parameters=CPU))
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    most = [0]

    def look(*_: Any) -> None:
        most[0] = max(most[0], sharded.memory_report()["parameters"])

    for module in model:
        module.register_state_dict_post_hook(look)
    if way == "deepcopy":
        copy.deepcopy(model)
    else:
        sharded.consolidated_state_dict()
        assert most[0] <= 16 * 17 * 4
    assert not sharded.memory_report()["parameters"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2])
def test_a_write_through_data_is_parked_with_parameters_that_rest_in_cpu_memory(
    rank: int, stage: int, dtype: torch.dtype | None
) -> None:
    """It leaves no trace in fp32, where the parameters are their own master weights."""
    keep_places_apart()
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    policy = replace(Policy.stage(stage), parameters=Residency(sharded=False, place=CPU))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    precision = None if dtype is None else Precision(dtype)
    sharded = zeroshard.shard(model, optimizer, policy, precision=precision)
    model[0].weight.data.fill_(3.0)
    sharded.offload_states(("parameters", "optimizer"))
    sharded.reload_states()
    assert bool((model[0].weight == 3).all())
    assert bool((sharded.states.get("0.weight") == 3).all())


# ---------------------------------------------------------------------- whole parameters that rest in CPU memory


def deep_model() -> Stack:
    """Six equal blocks, and a root unit that is small beside them."""
    return Stack(widths=[64] * 6)


def deep(stage: int) -> tuple[Stack, Sharded]:
    return build(Policy.stage(stage).offloaded(parameters=CPU), make_model=deep_model, bucket_numel=LARGE_BUCKETS)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 2])
def test_two_blocks_are_on_the_accelerator_while_the_model_runs(rank: int, stage: int) -> None:
    keep_places_apart()
    model, sharded = deep(stage)
    most = [0]

    def look(*_: Any) -> None:
        most[0] = max(most[0], sharded.memory_report()["parameters"])

    for block in model.blocks:
        block.down.register_forward_hook(look)
        block.down.register_full_backward_hook(look)
    steps(model, sharded, rank, range(3))
    root, block = (unit.layout.numel for unit in (units(sharded)[0], units(sharded)[1]))  # with padding
    assert 4 * block < most[0] <= 4 * (root + 2 * block)
    assert sharded.memory_report()["parameters"] == 0


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 2])
def test_one_rank_alone_runs_and_reads_the_model(rank: int, stage: int) -> None:
    keep_places_apart()
    results = []
    for is_alone in (False, True):
        model, sharded = deep(stage)
        steps(model, sharded, rank, range(2))
        (x,) = tokens(0, 9)
        if rank == 0 and is_alone:
            with torch.no_grad():
                expected = copy.deepcopy(model)(x)
                assert torch.equal(model(x), expected)
            for _ in range(2):  # with a graph that nobody differentiates
                assert torch.equal(model(x).detach(), expected)
            assert torch.equal(model.state_dict()["embedding.weight"], model.embedding.weight)
            assert torch.autograd.grad(model(x), model.blocks[3].up.weight)[0].any()
        steps(model, sharded, rank, range(2))
        results.append(whole(model))
    assert same(results[1], results[0])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("way", ["in place", "data in place", "new data"])
def test_a_write_in_a_forward_stays_when_the_block_leaves(
    rank: int, way: str, trained: bool, dtype: torch.dtype
) -> None:
    def write(module: nn.Module, *_: Any) -> None:
        weight = module.weight
        assert isinstance(weight, nn.Parameter)
        if way == "in place":
            with torch.no_grad():
                weight.mul_(0.5)
        elif way == "data in place":
            weight.data.mul_(0.5)
        else:
            weight.data = weight.data * 0.5

    def partly_trained() -> Stack:
        model = deep_model().to(dtype)
        model.blocks[2].requires_grad_(trained)
        return model

    keep_places_apart()
    results = []
    for place in (None, CPU):
        policy = Policy.stage(2).offloaded(parameters=place)
        model, sharded = build(policy, make_model=partly_trained, make_optimizer=sgd)
        hook = model.blocks[2].up.register_forward_pre_hook(write)
        steps(model, sharded, rank, [0])
        hook.remove()
        steps(model, sharded, rank, range(2))
        results.append(whole(model))
    assert same(results[1], results[0])


@pytest.mark.ranks(2)
def test_a_graph_outside_of_the_model_keeps_what_it_reads(rank: int) -> None:
    """A penalty reads parameters outside of all forwards: autograd saves them past the hooks."""
    keep_places_apart()
    results = []
    for place in (None, CPU):
        model, sharded = build(Policy.stage(2).offloaded(parameters=place), make_model=deep_model)
        for number in range(3):
            with torch.no_grad():
                assert all(p.norm().isfinite() for p in model.parameters())
            penalty = sum((p * p).sum() for p in model.parameters())
            update(model(*tokens(rank, number)) + 1e-2 * penalty, sharded.optimizer)
        results.append({name: value.clone() for name, value in model.state_dict().items()})
        assert place is None or sharded.memory_report()["parameters"] == 0
    assert same(results[1], results[0])


@pytest.mark.ranks(1)
def test_a_transform_of_torch_func_names_the_place(rank: int) -> None:
    keep_places_apart()
    model, _ = deep(2)
    with pytest.raises(zeroshard.UsageError, match=r"at rest in CPU memory, .*without offloaded parameters"):
        torch.func.vmap(model)(torch.stack([*tokens(0, 0), *tokens(0, 1)]))


@pytest.mark.ranks(2)
def test_a_graph_of_a_part_outlives_another_step_after_a_state_was_set(rank: int) -> None:
    """A unit must not stay whole, without hooks on what autograd saves, after its values were set."""
    keep_places_apart()
    model, sharded = deep(1)
    sharded.states.set("embedding.weight", "parameters", torch.ones(31, 12))
    assert sharded.memory_report()["parameters"] == 0
    loss = model.head(torch.ones(1, 12)).sum()
    model(*tokens(rank, 0)).backward()
    loss.backward()
    sharded.optimizer.step()
