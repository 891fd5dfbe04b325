"""Changes to a model between steps take effect, wherever states are at rest. Errors leave nothing half done."""

from __future__ import annotations

import copy
import errno
import gc
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from insides import units
from models import VOCABULARY, WIDTH, Stack, sgd, tokens
from test_offload import keep_places_apart, take_steps
from test_offload_states import policies, trained
from torch import Tensor, nn
from twin import CPU, DISK, LARGE_BUCKETS, build, every_state, everything, same, steps, update, whole

import zeroshard
from zeroshard import Offload, Place, Policy, Sharded, StorageError, UsageError, ZeroshardError
from zeroshard.core.model_states import PARAMETERS, Range
from zeroshard.core.sharded_step import ShardedStep
from zeroshard.core.storage.disk import Requests
from zeroshard.core.travelling import Frame


def change_as_modifier(sharded: Sharded, folder: Path) -> None:
    with zeroshard.unsharded(sharded.model, modifier_rank=0), torch.no_grad():
        for parameter in sharded.model.parameters():
            parameter.mul_(2)
    sharded.states.get("embedding.weight")
    with zeroshard.unsharded(sharded.model.get_submodule("blocks.1"), modifier_rank=0), torch.no_grad():
        sharded.model.get_parameter("blocks.1.up.bias").add_(1)


def clamp(sharded: Sharded, folder: Path) -> None:
    with torch.no_grad():
        for parameter in sharded.model.parameters():
            if parameter.requires_grad:
                parameter.clamp_(-0.05, 0.05)


def average_frozen(sharded: Sharded, folder: Path) -> None:
    """As a teacher is moved after its student: through `.data`, in place and anew."""
    for number, parameter in enumerate(p for p in sharded.model.parameters() if not p.requires_grad):
        if number % 2:
            parameter.data.mul_(1.5)
        else:
            parameter.data = parameter.data * 1.5


def set_states(sharded: Sharded, folder: Path) -> None:
    states = sharded.states
    states.set("embedding.weight", PARAMETERS, torch.ones(VOCABULARY, WIDTH))
    sharded.optimizer.zero_grad()
    states.set("embedding.weight", "exp_avg", torch.full((VOCABULARY, WIDTH), 0.25))
    for name in (PARAMETERS, "exp_avg_sq"):
        held = states.local("embedding.weight", name)
        states.set_local("embedding.weight", name, [Range(h.start, h.tensor * 0 + 0.5) for h in held])
    states.set("blocks.1.up.weight", PARAMETERS, states.get("blocks.1.up.weight") + 1)  # which is frozen


def set_a_gradient(sharded: Sharded, folder: Path) -> dict[str, Tensor]:
    """In a step that is clipped twice."""
    sharded.model(*tokens(dist.get_rank(), 5)).backward()
    gradient = sharded.states.get("embedding.weight", "gradients")
    sharded.states.set("embedding.weight", "gradients", gradient * 0 + 0.125)
    sharded.clip_grad_norm_(0.1)
    sharded.clip_grad_norm_(0.05)
    norm = sharded.clip_grad_norm_(None)
    sharded.optimizer.step()
    sharded.optimizer.zero_grad()
    return {"gradient": gradient, "norm": torch.as_tensor(norm).cpu()}


def return_to_a_state_dict(sharded: Sharded, folder: Path) -> None:
    """What was loaded stays the caller's, who may load it again."""
    saved = copy.deepcopy(sharded.optimizer.state_dict())
    kept = copy.deepcopy(saved["state"])
    assert all(not value.isnan().any() for state in kept.values() for value in state.values())
    before = every_state(sharded)
    masters = {fqn: sharded.states.get(fqn) for fqn, _ in sharded.model.named_parameters()}
    for _ in range(2):
        take_steps(sharded, 7)
        assert not same(every_state(sharded), before)
        sharded.optimizer.load_state_dict(saved)
        for fqn, value in masters.items():
            sharded.states.set(fqn, PARAMETERS, value)
        assert same(every_state(sharded), before)
        assert all(same(saved["state"][number], state) for number, state in kept.items())


def freeze_or_free(look: Callable[[Sharded, Path], object], sharded: Sharded, folder: Path) -> None:
    """Change whether a block is trained, after a look at the states that it had before."""
    look(sharded, folder)
    block = sharded.model.get_submodule("blocks.2")
    block.requires_grad_(not next(block.parameters()).requires_grad)
    sharded.update_trainable()


USES: dict[str, Callable[[Sharded, Path], dict[str, Tensor] | None]] = {
    "state dict": return_to_a_state_dict,
    "modifier": change_as_modifier,
    "teacher": average_frozen,
    "clamped": clamp,
    "frozen after save": partial(freeze_or_free, lambda sharded, folder: sharded.save(folder, "x")),
    "frozen after state_dict": partial(freeze_or_free, lambda sharded, _: sharded.optimizer.state_dict()),
    "frozen after get": partial(freeze_or_free, lambda sharded, _: sharded.states.get("head.weight", "exp_avg")),
    "gradient": set_a_gradient,
    "states": set_states,
}
OF_WHOLE_PARAMETERS = ("teacher", "clamped")


@pytest.mark.ranks(2)
@pytest.mark.quick(3)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("use", USES)
def test_what_users_do_between_steps_has_one_effect_in_every_place(
    rank: int, use: str, precision: str, tmp_path: Path
) -> None:
    """Between `zero_grad` and the next step, when much is read ahead already."""
    chosen = {"stage 2": Policy.stage(2), **policies(tmp_path)}
    results = []
    for name, policy in chosen.items():
        if use in OF_WHOLE_PARAMETERS and policy.parameters.sharded:
            continue
        sharded = trained(policy, precision)
        found = {}
        for batch in (2, 3, 4):
            found = USES[use](sharded, tmp_path / name) or {}
            take_steps(sharded, batch)
        USES[use](sharded, tmp_path / name)
        results.append(everything(sharded) | found)
        sharded.remove()
        keep_places_apart()
    for result in results[1:]:
        assert same(result, results[0])


@pytest.mark.parametrize("place", [CPU, DISK])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_after_an_optimizer_raised_in_a_later_sub_group_a_checkpoint_goes_on(
    stage: int, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, fails_in = 0, 0
    step_inner = ShardedStep.step_inner

    def counted(self: ShardedStep, optimizer: torch.optim.Optimizer, *evaluated: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == fails_in:
            raise ValueError("in the middle of a step")
        step_inner(self, optimizer, *evaluated)

    monkeypatch.setattr(ShardedStep, "step_inner", counted)
    how = Offload(str(tmp_path), buffer_numel=6000, sub_group_numel=400, block_nbytes=4096)
    parameters = place if stage == 3 else None
    _, sharded = build(Policy.stage(stage).offloaded(optimizer=place, parameters=parameters, offload=how))
    take_steps(sharded, 0)
    sub_groups = calls
    assert sub_groups > 1 or place is CPU
    sharded.save(tmp_path, "last")
    take_steps(sharded, 1)
    expected = every_state(sharded)
    sharded.load(tmp_path)
    calls, fails_in = 0, sub_groups
    with pytest.raises(ValueError, match="in the middle of a step"):
        take_steps(sharded, 1)
    sharded.optimizer.zero_grad()
    sharded.load(tmp_path)
    take_steps(sharded, 1)
    assert same(every_state(sharded), expected)


@pytest.mark.full
@pytest.mark.parametrize("call", ["preadv", "pwritev"])
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


@pytest.mark.ranks(1)
def test_only_frozen_parameters_may_have_a_users_own_class_and_they_keep_it(rank: int, tmp_path: Path) -> None:
    keep_places_apart()
    model = Stack()
    model.blocks[0].up.weight = special = Special(model.blocks[0].up.weight.detach())
    for stage in range(4):
        with pytest.raises(UsageError, match=r"blocks\.0\.up\.weight is of the class Special, .* trains only ordinary"):
            build(stage, make_model=lambda: model)
    special.requires_grad_(False)
    values = special.detach().clone()
    policy = policies(tmp_path)["stage 2, whole in CPU memory"]
    _, sharded = build(policy, make_model=lambda: model)
    take_steps(sharded, 0)
    assert type(special) is type(copy.deepcopy(special)) is Special
    assert torch.equal(special, values)
    assert torch.equal(sharded.states.get("blocks.0.up.weight"), values)
    with pytest.raises(UsageError, match="parameter of a class of your own"):
        sharded.offload_states(["parameters"])
    special.requires_grad_(True)
    with pytest.raises(UsageError, match=r"trains only ordinary parameters\. Keep it frozen"):
        sharded.optimizer.add_param_group({"params": [special]})
    sharded.remove()
    assert type(special) is Special


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
def test_a_call_that_fails_to_park_or_reload_changes_nothing(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharded = trained(Policy.stage(2), precision)
    expected = every_state(sharded)
    on_disk: dict[str, Any] = {"place": DISK, "offload": Offload(str(tmp_path))}
    with zeroshard.unsharded(sharded.model), pytest.raises(UsageError, match="Call it outside"):
        sharded.offload_states(**on_disk)
    with pytest.raises(ZeroshardError, match="names no folder"):
        sharded.offload_states(place=DISK)
    assert same(every_state(sharded), expected)
    sharded.offload_states(**on_disk)
    with monkeypatch.context() as patched, pytest.raises(StorageError):
        patched.setattr(os, "preadv", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
        sharded.reload_states()
    sharded.reload_states()
    assert same(every_state(sharded), expected)
    sharded.offload_states(["optimizer"], **on_disk)
    with pytest.raises(UsageError, match="parked"), zeroshard.unsharded(sharded.model, modifier_rank=0):
        pass
    sharded.remove()
    assert all(not parameter.isnan().any() for parameter in sharded.model.parameters())


def test_more_states_than_were_thought(tmp_path: Path) -> None:
    """amsgrad keeps three."""
    results: list[dict[str, Tensor]] = []
    for name in ("memory", "stage 3, on disk"):
        amsgrad = partial(torch.optim.AdamW, lr=1e-2, amsgrad=True)
        _, sharded = build(policies(tmp_path)[name], make_optimizer=amsgrad)
        take_steps(sharded, *range(3))
        results.append(every_state(sharded))
    assert same(*results) and any("max_exp_avg_sq" in name for name in results[0])


def halve(weight: nn.Parameter, way: str) -> None:
    if way == "in place":
        with torch.no_grad():
            weight.mul_(0.5)
    elif way == "data in place":
        weight.data.mul_(0.5)
    else:
        weight.data = weight.data * 0.5


WAYS = pytest.mark.parametrize("way", ["in place", "data in place", "new data"])


@pytest.mark.ranks(2)
@pytest.mark.quick(2)
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "precision"), [(torch.float32, None), (torch.bfloat16, None), (torch.float32, torch.bfloat16)]
)
@WAYS
@pytest.mark.parametrize("leaves", ["borrower", "master weights before", "parameters", "parameters, optimizer"])
def test_a_write_counts_although_whole_parameters_leave_at_once(
    rank: int, leaves: str, way: str, dtype: torch.dtype, precision: torch.dtype | None, stage: int
) -> None:
    """It leaves no trace in fp32, where the parameters are their own master weights."""
    keep_places_apart()
    model, sharded = build(
        Policy.stage(stage).offloaded(parameters=CPU),
        precision=precision,
        make_model=lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(dtype),
        make_optimizer=partial(sgd, lr=0.0),
    )
    weight = model[0].weight
    for _ in range(2):
        expected = weight.detach() * 0.5
        if leaves == "borrower":
            borrower = nn.Identity()
            borrower.register_forward_hook(lambda *_: halve(weight, way))
            handle = zeroshard.borrow(borrower, weight)
            borrower(None)
            handle.remove()
        elif leaves == "master weights before":
            sharded.optimizer.zero_grad()  # which lets go of what was read outside of a forward
            sharded.offload_states(["optimizer"])
            handle = model[0].register_forward_hook(lambda *_: halve(weight, way))
            with torch.no_grad():
                model(torch.ones(2, 8, dtype=precision or dtype))
            handle.remove()
            sharded.reload_states()
        else:
            halve(weight, way)
            sharded.offload_states(leaves.split(", "))
            sharded.reload_states()
        # First, since a read brings the values, which are then saved again.
        assert torch.equal(sharded.states.get("0.weight"), expected.float())
        assert torch.equal(weight, expected)
        update(model(torch.ones(2, 8, dtype=precision or dtype)).sum(), sharded.optimizer)
    assert torch.equal(weight, expected)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("way", ["consolidated_state_dict", "deepcopy"])
def test_a_copy_of_the_model_returns_units_to_their_place_one_at_a_time(rank: int, way: str) -> None:
    keep_places_apart()
    policy = Policy.stage(2).offloaded(parameters=CPU)
    model, sharded = build(policy, make_model=lambda: nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)]))
    update(model(torch.ones(2, 16)).sum(), sharded.optimizer)
    most = most_parameters(sharded, *(module.register_state_dict_post_hook for module in model))
    if way == "deepcopy":
        copy.deepcopy(model)
    else:
        sharded.consolidated_state_dict()
        assert max(most) <= 16 * 17 * 4
    assert not sharded.memory_report()["parameters"]


# ---------------------------------------------------------------------- whole parameters that rest in CPU memory


def deep_model() -> Stack:
    """Six equal blocks, and a root unit that is small beside them."""
    return Stack(widths=[64] * 6)


def deep(stage: int) -> tuple[Stack, Sharded]:
    return build(Policy.stage(stage).offloaded(parameters=CPU), make_model=deep_model, bucket_numel=LARGE_BUCKETS)


def most_parameters(sharded: Sharded, *registers: Callable[..., Any]) -> list[int]:
    """Return a list to which hooks add the bytes of parameters on the accelerator."""
    seen: list[int] = []
    for register in registers:
        register(lambda *_: seen.append(sharded.memory_report()["parameters"]))
    return seen


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 2])
def test_two_blocks_are_on_the_accelerator_while_the_model_runs(rank: int, stage: int) -> None:
    keep_places_apart()
    model, sharded = deep(stage)
    forwards = [block.down.register_forward_hook for block in model.blocks]
    seen = most_parameters(sharded, *forwards, *(block.down.register_full_backward_hook for block in model.blocks))
    steps(model, sharded, rank, range(3))
    root, block = (unit.layout.numel for unit in (units(sharded)[0], units(sharded)[1]))  # with padding
    assert 4 * block < max(seen) <= 4 * (root + 2 * block)
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
@WAYS
def test_a_write_in_a_forward_stays_when_the_block_leaves(
    rank: int, way: str, trained: bool, dtype: torch.dtype
) -> None:
    def partly_trained() -> Stack:
        model = deep_model().to(dtype)
        model.blocks[2].requires_grad_(trained)
        return model

    keep_places_apart()
    results = []
    for place in (None, CPU):
        policy = Policy.stage(2).offloaded(parameters=place)
        model, sharded = build(policy, make_model=partly_trained, make_optimizer=sgd)
        hook = model.blocks[2].up.register_forward_pre_hook(lambda module, _: halve(module.weight, way))
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
