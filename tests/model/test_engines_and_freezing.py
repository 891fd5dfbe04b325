"""Several engines in one process, engines for evaluation only, and parameters that are frozen or unfrozen between steps."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from insides import units
from models import Stack, Untied, tokens
from oracles import average_gradients
from torch import Tensor, nn
from torch.nn import functional as F
from twin import build, engine_steps, microbatch, plain_torch, same, step, steps, whole

import zeroshard
from zeroshard import Policy, UsageError


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


PHASES = {
    0: lambda model: model,
    2: lambda model: model.blocks[1].requires_grad_(False),
    4: lambda model: (model.blocks[0].up.requires_grad_(False), model.head.weight.requires_grad_(False)),
    6: lambda model: model.requires_grad_(True),
}
"""What is frozen and freed, before which step."""


def plain(world_size: int) -> dict[str, Tensor]:
    model, optimizer = plain_torch(make_optimizer, Untied)
    for number in range(8):
        if number in PHASES:
            PHASES[number](model)
            for p in model.parameters():
                if not p.requires_grad:
                    optimizer.state.pop(p, None)
        average_gradients(list(model.parameters()), world_size, lambda rank: model(*tokens(rank, number)).backward())  # noqa: B023
        optimizer.step()
        optimizer.zero_grad()
    return whole(model)


@pytest.mark.ranks("world_size")
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_is_frozen_and_freed_trains_as_in_plain_torch(rank: int, stage: int, world_size: int) -> None:
    expected = plain(world_size)
    model, sharded = build(stage, make_model=Untied, make_optimizer=make_optimizer)
    memory = []
    for number in range(8):
        if number in PHASES:
            PHASES[number](model)
            sharded.update_trainable()
            memory.append(sharded.memory_report())
        step(model, sharded, rank, number)
    assert same(whole(model), expected)
    # (before the first step there are no states yet)
    gradients = memory[0]["gradients"], memory[1]["gradients"]
    assert gradients[1] < gradients[0] if stage < 2 else gradients == (0, 0)  # sharded ones take none between steps
    assert memory[2]["optimizer"] < memory[1]["optimizer"]


@pytest.mark.ranks(2)
def test_masters_keep_their_digits_and_references_die(rank: int) -> None:
    model, sharded = build(2, make_optimizer=make_optimizer, precision="bf16")
    step(model, sharded, rank, 0)
    before = {fqn: sharded.states.get(fqn) for fqn, _ in model.named_parameters()}
    old, policy = weakref.ref(units(sharded)[1]), units(sharded)[1].policy
    model.blocks[0].up.requires_grad_(False)
    sharded.update_trainable()
    gc.collect()
    assert old() is None
    new = {unit.label: unit.policy.parameters for unit in units(sharded) if unit.label.startswith("blocks.0")}
    assert new == {"blocks.0": policy.parameters, "blocks.0 (frozen)": policy.parameters}
    for fqn, value in before.items():
        # Of what is frozen, the parameter in its own dtype is all there is.
        expected = value.to(torch.bfloat16) if fqn.startswith("blocks.0.up") else value
        assert torch.equal(sharded.states.get(fqn), expected), fqn


@pytest.mark.ranks(2)
def test_freed_parameters_that_the_optimizer_does_not_know_get_a_group(rank: int) -> None:
    def make() -> Untied:
        model = Untied()
        model.embedding.requires_grad_(False)
        model.blocks.requires_grad_(False)
        return model

    model, sharded = build(3, make_model=make, make_optimizer=make_optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(sharded.optimizer, 1, 0.5)
    model(*tokens(rank, 0)).backward()
    with pytest.raises(UsageError, match="End the step first"):
        sharded.update_trainable()
    sharded.optimizer.step()
    sharded.optimizer.zero_grad()
    scheduler.step()
    model.blocks[1].requires_grad_(True)
    before = whole(model)["blocks.1.up.weight"]
    sharded.update_trainable({"params": list(model.blocks[1].parameters()), "lr": 0.3})
    assert [group["lr"] for group in sharded.optimizer.param_groups] == [0.005, 0.3]
    step(model, sharded, rank, 1)
    assert not torch.equal(before, whole(model)["blocks.1.up.weight"])
    with pytest.raises(UsageError, match="were in another group when zeroshard took"):
        sharded.update_trainable({"params": list(model.head.parameters())})


def test_what_would_train_nothing_or_wrongly_is_refused() -> None:
    model = Stack(tied=False)
    model.embedding.requires_grad_(False)
    model.blocks[2].requires_grad_(False)
    trained = list(model.blocks[:2].parameters())
    sharded = zeroshard.shard(model, make_optimizer(trained), Policy.stage(0))
    model(*tokens(0, 0)).backward()
    sharded.optimizer.zero_grad()  # a backward that no step used
    assert model.head.weight.grad is not None, "trainable, and outside of the optimizer: gathered, and nobody's"
    model.embedding.requires_grad_(True)
    with pytest.raises(UsageError, match=r"embedding\.weight was unfrozen, but is in no param group"):
        sharded.update_trainable()
    sharded.update_trainable({"params": (p for m in (model.embedding, model.head) for p in m.parameters())})
    assert model.head.weight.grad is None
    before = model.embedding.weight.detach().clone()
    model(*tokens(0, 1)).backward()
    gradient = sharded.states.get("head.weight", "gradients")
    (expected,) = torch.autograd.grad(model(*tokens(0, 1)), model.head.weight)
    torch.testing.assert_close(gradient, expected)
    sharded.optimizer.step()
    sharded.optimizer.zero_grad()
    assert not torch.equal(before, model.embedding.weight)
    layer = nn.Linear(3, 3)
    two = zeroshard.shard(layer, [torch.optim.Muon([layer.weight]), torch.optim.AdamW([layer.bias])], Policy.stage(0))
    with pytest.raises(UsageError, match="takes its groups when it is made"):
        two.update_trainable({"params": []})
    other = Stack(tied=False)
    engine, *_ = zeroshard.initialize(
        model=other, config=config(0, **ADAMW, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 3}})
    )
    with pytest.raises(UsageError, match="WarmupLR was made for the optimizer's existing param groups"):
        engine.update_trainable({"params": []})


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_adagrad_has_its_state_from_the_start(stage: int) -> None:
    adagrad = partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.3)
    model, sharded = build(stage, make_optimizer=adagrad)
    steps(model, sharded, 0, range(3))
    torch.manual_seed(0)
    plain = Stack()
    steps(plain, adagrad(plain.parameters()), 0, range(3))
    assert same(whole(model), whole(plain))


def test_a_loaded_state_dict_is_the_one_in_force() -> None:
    _, sharded = build(0, make_optimizer=make_optimizer)
    sharded.optimizer.load_state_dict(sharded.optimizer.state_dict())
    sharded.optimizer.param_groups[0]["lr"] = 0.5
    assert sharded.optimizer.param_groups[0]["lr"] == 0.5


def config(stage: int, **more: Any) -> dict[str, Any]:
    return {"train_micro_batch_size_per_gpu": 3, "zero_optimization": {"stage": stage}, **more}


ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_an_engine_for_evaluation_ends_when_its_model_gets_another(rank: int, stage: int) -> None:
    """DPO evaluates the model once as its own reference, in an engine without an optimizer, before it trains it."""
    losses = []
    for evaluates in (True, False):
        torch.manual_seed(1)
        model = Stack()
        reference: Any = zeroshard.initialize(model=model, config=config(stage))[0] if evaluates else model
        with torch.no_grad():
            before = reference(*tokens(rank, 0))
        engine, *_ = zeroshard.initialize(model=model, config=config(stage, **ADAMW))
        losses.append([before, *engine_steps(engine, rank, range(3))])
        if evaluates:
            with pytest.raises(UsageError, match="the engine was destroyed"):
                reference(*tokens(rank, 0))
            reference.destroy()  # it ended already
    assert losses[0] == losses[1]


def test_a_scheduler_without_an_optimizer_has_no_effect() -> None:
    """Its "auto" values are those of a training run, which the engine is not asked for."""
    params = {"total_num_steps": "auto", "warmup_num_steps": "auto"}
    given = config(3, scheduler={"type": "WarmupDecayLR", "params": params})
    engine, _, _, schedule = zeroshard.initialize(model=Stack(), config=given)
    assert schedule is None and engine.scheduler_name() is None
    assert torch.isfinite(engine(*tokens(0, 0)))
    with pytest.raises(zeroshard.ConfigError, match="total_num_steps"):
        zeroshard.initialize(model=Stack(), config={**given, **ADAMW})


class Logits(Stack):
    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.run(self.embedding(tokens)))


def distilled(student: Any, teacher: Any, rank: int) -> list[Tensor]:
    losses = []
    for number in range(3):
        (batch,) = tokens(rank, number)
        with torch.no_grad():
            target = teacher.eval()(batch).softmax(-1)
        loss = F.kl_div(student(batch).log_softmax(-1), target, reduction="batchmean")
        losses.append(microbatch(student, loss))
    with torch.inference_mode():
        return [*losses, teacher(*tokens(rank, 9)).sum()]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_teacher_for_evaluation_and_a_student(rank: int, stage: int) -> None:
    """Distillation: two engines, one of them without gradients or optimizer; the result is that of plain modules."""

    def logits(seed: int) -> Logits:
        torch.manual_seed(seed)
        return Logits()

    def student(stage: int) -> Any:
        return zeroshard.initialize(model=logits(2), config=config(stage, **ADAMW))[0]

    teacher, *_ = zeroshard.initialize(model=logits(1), config=config(stage))
    memory = teacher.memory_report()
    assert memory["gradients"] == memory["optimizer"] == 0
    nbytes = sum(4 * p.numel() for p in teacher.module.parameters())
    assert memory["parameters"] < (1.2 if stage < 3 else 0.7) * nbytes
    assert distilled(student(stage), teacher, rank) == distilled(student(0), logits(1), rank)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_actor_and_critic_share_a_loss(rank: int, stage: int) -> None:
    """Two engines whose backwards are one: gradients of a sum reach both."""

    def layers() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))

    results = []
    for engines_at in (0, stage):
        take = partial(build, engines_at, make_model=layers, make_optimizer=make_optimizer)
        models, made = zip(*(take(seed=seed) for seed in (0, 1)), strict=True)
        for number in range(3):
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * number + rank))
            value, advantage = models[0](x), models[1](x)
            (value.square().mean() + (advantage - value.detach()).square().mean()).backward()
            for sharded in made:
                sharded.optimizer.step()
                sharded.optimizer.zero_grad()
        results.append([whole(model) for model in models])
    assert all(map(same, *results))


@pytest.mark.ranks(2)
def test_a_module_whose_parameters_were_frozen_gathers_them_alone(rank: int) -> None:
    """Hooks of units that `update_trainable` replaces are gone; those of the new ones are there."""
    model, sharded = build(3, make_model=Untied, make_optimizer=make_optimizer)
    up = model.blocks[0].up
    before = [len(module._forward_pre_hooks) for module in model.modules()]
    for requires_grad in (False, True):
        up.requires_grad_(requires_grad)
        sharded.update_trainable()
        with torch.no_grad():
            found = up(torch.ones(1, up.in_features))
            with zeroshard.unsharded(up):
                assert torch.equal(found, nn.functional.linear(torch.ones(1, up.in_features), up.weight, up.bias))
    assert [len(module._forward_pre_hooks) for module in model.modules()] == before
