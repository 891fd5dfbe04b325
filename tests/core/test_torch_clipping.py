"""torch's own clipping, and a few operations on `parameter.grad`, between the last backward and the step."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import OPTIMIZERS, sgd, tokens
from test_own_optimizer import UNITS, Parts
from torch import Tensor, nn
from twin import FEW_STAGES, build, close, plain_torch, same, same_on_all_ranks, whole

import zeroshard
from zeroshard import Place, Policy, Precision, UsageError

Clip = Callable[[nn.Module], Any]
"""What a loop does with gradients; it returns what it logs."""


def sometimes(model: nn.Module, is_used: bool) -> None:
    """Run a backward in which a rank uses the second of a model's parts or not."""
    model(torch.ones(2, 5), *range(1 + is_used)).backward()


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def average(model: nn.Module) -> None:
    """Make gradients of plain PyTorch their means over ranks."""
    for gradient in gradients(model):
        dist.all_reduce(gradient)
        gradient.div_(dist.get_world_size())


def by_norm(model: nn.Module, norm_type: float = 2.0) -> Tensor:
    parameters = [p for p in model.parameters() if p.numel()]  # of nothing torch finds no largest
    return nn.utils.clip_grad_norm_(parameters, 0.1, norm_type)


def by_value(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 0.01)


def a_part(model: nn.Module) -> list[Tensor]:
    return [nn.utils.clip_grad_norm_(part.parameters(), 0.05) for part in (model.blocks[1], model.blocks[0])]


def each_by_its_own_norm(model: nn.Module) -> list[float]:
    """As adaptive clipping does. A norm comes after a change of a parameter of which some rank has no part."""
    norms = []
    for parameter in model.parameters():
        if parameter.grad is not None:
            norms.append(float(parameter.grad.norm()))
            parameter.grad.mul_(min(1.0, 0.05 / (norms[-1] + 1e-9)))
    return norms


def by_data(model: nn.Module) -> float:
    """As recipes for logging and clipping from before `torch.no_grad` have it."""
    norm = math.sqrt(sum(gradient.detach().data.norm(2).item() ** 2 for gradient in gradients(model)))
    for gradient in gradients(model):
        gradient.data.clamp_(-0.01, 0.01)
    return norm


def each_by_itself(model: nn.Module) -> list[Tensor]:
    norms = [gradient.norm(p=2) for gradient in gradients(model)]
    for gradient, norm in zip(gradients(model), norms, strict=True):
        gradient.div_(norm + 1.0).mul_(2.0)
    return [gradient.norm() for gradient in gradients(model)]


def many_at_once(model: nn.Module) -> Tensor:
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=True)
    nn.utils.clip_grad_value_(model.parameters(), 0.005, foreach=True)
    return norm


def by_statement(model: nn.Module) -> list[Tensor]:
    """An assignment of what was changed in place, and the function in the place of the method."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad *= 0.5
            parameter.grad /= 4
    return [torch.norm(gradient) for gradient in gradients(model)]


CLIPS: dict[str, Clip] = {
    "norm": by_norm, "largest": partial(by_norm, norm_type=math.inf), "norm of order 3": partial(by_norm, norm_type=3.0),
    "value": by_value, "a part": a_part, "by data": by_data,
    "each by itself": each_by_itself, "each by its own norm": each_by_its_own_norm,
    "many at once": many_at_once, "by statement": by_statement,
}  # fmt: skip


@pytest.mark.ranks(2)
@FEW_STAGES
@pytest.mark.parametrize("clip", ["torch's", "ours"])
@pytest.mark.parametrize("place", [Place.ACCELERATOR, Place.CPU, Place.DISK])
def test_what_is_clipped_in_each_microbatch(rank: int, stage: int, clip: str, place: Place, tmp_path: Path) -> None:
    """The factor of one clipping does not multiply gradients that come later."""

    def norms(model: nn.Module, optimizer: Any, clip: Callable[[], Any], is_plain: bool = False) -> list[float]:
        found = []
        for number in range(6):
            model(*tokens(rank, number)).backward()
            if is_plain:
                average(model)
            found.append(float(clip()))
            if number % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
        return found

    policy = Policy.stage(stage)
    if place is not Place.ACCELERATOR and stage > 0:
        policy = policy.offloaded(optimizer=place, path=str(tmp_path))
    model, sharded = build(policy, make_optimizer=sgd, bucket_numel=100)
    plain, own = plain_torch(sgd)
    expected = norms(plain, own, partial(by_norm, plain), is_plain=True)
    ours = partial(sharded.clip_grad_norm_, 0.1) if clip == "ours" else partial(by_norm, model)
    assert norms(model, sharded.optimizer, ours) == pytest.approx(expected, rel=1e-5)


Result = tuple[dict[str, Tensor], list[Any]]


def train(
    rank: int, clip: Clip, policy: Policy | None, *, make: Callable[..., Any] = OPTIMIZERS["AdamW"],
    dtype: torch.dtype | None = None, microbatches: int = 1
) -> Result:  # fmt: skip
    """Two steps, under a policy, or, without one, of plain PyTorch with gradients averaged by hand."""
    model, optimizer = plain_torch(make)
    if policy is not None:
        sharded = zeroshard.shard(model, optimizer, policy, precision=Precision(dtype), bucket_numel=100)
    logged = []
    for number in range(2 * microbatches):
        is_last = number % microbatches == microbatches - 1
        with nullcontext() if policy is None else sharded.accumulate(not is_last):
            model(*tokens(rank, number)).backward()
        if is_last:
            if policy is None:
                average(model)
            logged.append(clip(model))
            optimizer.step()
            optimizer.zero_grad()
    return whole(model), logged


def same_norms(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return all(map(same_norms, one, other))
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


@pytest.mark.ranks("ranks")
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.quick(4)
def test_torchs_own_clipping_clips(rank: int, clip: str, ranks: int) -> None:
    """As plain PyTorch within rounding; the same bits under every policy and on every rank."""
    # By SGD: Adam makes a whole step of what rounding leaves of a gradient that is nearly 0.
    expected, norms = train(rank, CLIPS[clip], None, make=sgd)
    found, found_norms = train(rank, CLIPS[clip], Policy.stage(0), make=sgd)
    torch.testing.assert_close(found_norms, norms, rtol=1e-4, atol=1e-6)
    close(found, expected, rtol=1e-5)
    first, first_norms = train(rank, CLIPS[clip], Policy.stage(0))
    assert same_on_all_ranks(first)
    on_cpu = [Policy.stage(stage).offloaded(optimizer=Place.CPU) for stage in (1, 3)]
    for policy in (*map(Policy.stage, (1, 2, 3)), *on_cpu):
        found, found_norms = train(rank, CLIPS[clip], policy)
        assert same_norms(found_norms, first_norms) and same(found, first), policy


@pytest.mark.ranks(2)
@FEW_STAGES
def test_a_norm_after_a_gradient_was_set_or_clipped_is_that_of_the_new_one(rank: int, stage: int) -> None:
    """Also on a rank that holds no part of it."""
    model, sharded = build(stage, bucket_numel=100)
    model(*tokens(rank, 0)).backward()
    for fqn, parameter in model.named_parameters():
        if parameter.grad is not None and parameter.numel():
            assert float(parameter.grad.norm()) > 0
            sharded.states.set(fqn, "gradients", torch.ones(parameter.shape))
            assert float(parameter.grad.norm()) == pytest.approx(math.sqrt(parameter.numel())), fqn
    sharded.clip_grad_norm_(0.3)
    assert float(by_norm(model)) == pytest.approx(0.3, rel=1e-4)  # and then clips to 0.1
    assert float(sharded.clip_grad_norm_(None)) == pytest.approx(0.1, rel=1e-4)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_values_are_set_after_a_factor_of_zero(rank: int, stage: int, tmp_path: Path) -> None:
    """Gradients on disk keep their factors, and a value that is set is divided by them."""
    policy = Policy.stage(stage).offloaded(optimizer=Place.DISK, path=str(tmp_path))
    model, sharded = build(policy, make_model=lambda: nn.Linear(4, 4), make_optimizer=sgd)
    model(torch.ones(2, 4)).sum().backward()
    model.weight.grad.mul_(0.0)
    model.bias.grad.mul_(0.0)
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    mean = sharded.states.get("weight", "gradients")
    assert mean is not None and not mean.any()
    sharded.states.set("bias", "gradients", torch.ones(4))
    mean = sharded.states.get("bias", "gradients")
    assert mean is not None and torch.equal(mean, torch.ones(4))


@pytest.mark.ranks(2)
@pytest.mark.quick(2)
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("clip", CLIPS)
def test_in_16_bits_every_policy_gives_the_same_bits(rank: int, clip: str, microbatches: int) -> None:
    """With several microbatches sharded gradients are summed in another order than unsharded ones."""
    for stages in [(0, 1, 2, 3)] if microbatches == 1 else [(0, 1), (2, 3)]:
        (first, first_norms), *others = [
            train(rank, CLIPS[clip], Policy.stage(stage), dtype=torch.bfloat16, microbatches=microbatches)
            for stage in stages
        ]
        for found, norms in others:
            assert same_norms(norms, first_norms) and same(found, first)


@pytest.mark.ranks(2)
@FEW_STAGES
def test_a_parameter_that_some_ranks_do_not_use_is_named(rank: int, stage: int) -> None:
    """On the others its `grad` is None, so torch's clipping cannot be one operation of all ranks."""
    model, sharded = build(stage, make_model=Parts, make_optimizer=sgd, units=UNITS[stage])
    sometimes(model, is_used=rank == 0)
    with pytest.raises(UsageError, match=r"units\.1.* on ranks \[0\] only.*sharded\.clip_grad_norm_"):
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    sharded.clip_grad_norm_(0.1)
    sharded.optimizer.step()


@pytest.mark.ranks(2)
@FEW_STAGES
def test_other_operations_are_refused_by_name(rank: int, stage: int) -> None:
    model, sharded = build(stage, make_optimizer=sgd)
    assert not gradients(model)
    model(*tokens(rank, 0)).backward()
    gradient = model.head.weight.grad
    assert gradient.shape == model.head.weight.shape
    for operation, message in (
        (lambda: gradient + 1, r"embedding\.weight.*states\.get"),
        (lambda: gradient.norm(dim=0), r"embedding\.weight.*states\.get"),
        (lambda: gradient.mul_(torch.ones(3)), r"embedding\.weight.*states\.get"),
        (lambda: torch._foreach_mul_([gradient, gradient], [0.5, 0.5]), "_foreach_mul_ does not"),
        (lambda: model.zero_grad(set_to_none=False), r"zero_ does not.*optimizer\.zero_grad\(\)"),
    ):
        with pytest.raises(UsageError, match=message):
            operation()
    sharded.optimizer.step()
    sharded.optimizer.zero_grad()
    with pytest.raises(UsageError, match=r"embedding\.weight"):
        gradient.mul_(0.5)  # that step is over
    assert not gradients(model)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("all_use_it", [True, False])
def test_gradients_that_are_multiplied_between_backwards(rank: int, all_use_it: bool) -> None:
    """Before the first step, when ranks have not agreed on an order: a backward sends no message of its own for it."""
    model, sharded = build(3, make_model=Parts, make_optimizer=sgd, units=UNITS[3])
    sometimes(model, is_used=True)
    for gradient in gradients(model):
        gradient.mul_(0.5)
    sometimes(model, is_used=all_use_it or rank == 0)
    sharded.optimizer.step()
    assert same_on_all_ranks(whole(model))


@pytest.mark.ranks(2)
def test_a_local_sum_takes_no_other_tensor_for_its_own(rank: int) -> None:
    """`p.grad *= x` assigns the sum itself; another shape of the same memory is another gradient, or torch's error."""
    model, sharded = build(1, make_model=lambda: nn.Linear(4, 4, bias=False), make_optimizer=sgd)
    with sharded.accumulate():
        model(torch.ones(2, 4)).sum().backward()
        model.weight.grad *= 0.5
        with pytest.raises(RuntimeError):
            model.weight.grad = model.weight.grad[:1]
        with pytest.raises(RuntimeError):
            model.weight.grad = torch.empty(0)
    model(torch.ones(2, 4)).sum().backward()
    sharded.clip_grad_norm_(None)
    mean = sharded.states.get("weight", "gradients")
    assert mean is not None
    assert torch.equal(mean, torch.full((4, 4), 3.0))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", range(3))
def test_a_model_that_is_pickled_before_clipping_is_clipped(rank: int, stage: int) -> None:
    norms = []
    for is_pickled in (False, True):
        model, sharded = build(stage, make_optimizer=sgd)
        model(*tokens(rank, 0)).backward()
        if is_pickled:
            torch.save(model, io.BytesIO())
        norms.append(by_norm(model))
        sharded.remove()
    assert norms[0] > 0 and torch.equal(*norms)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("scale", [1.0, 1e25, 1e-30])
def test_norms_of_fp64_are_of_fp64(rank: int, scale: float) -> None:
    def trained(stage: int | None) -> dict[str, Tensor]:
        model, optimizer = plain_torch(sgd, partial(nn.Linear, 4, 4, dtype=torch.float64))
        if stage is not None:
            zeroshard.shard(model, optimizer, stage)
        (model(torch.ones(2, 4, dtype=torch.float64)).square().sum() * scale).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        assert norm.dtype == torch.float64
        optimizer.step()
        return {"norm": norm, **whole(model)}

    expected = trained(None)
    for stage in (0, 2, 3):
        close(trained(stage), expected, rtol=1e-14, atol=0.0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("clip", [by_value, by_norm])
def test_a_gradient_that_was_set_after_a_backward_is_named(rank: int, clip: Clip) -> None:
    """torch lists gradients before it changes them: it would clamp the user's tensor after this one was taken."""
    model, _ = build(2, make_model=Parts)
    sometimes(model, is_used=False)
    model.units[1].weight.grad = torch.ones(5, 5)
    with pytest.raises(UsageError, match=r"units\.1\.weight\.grad was set after a backward"):
        clip(model)
