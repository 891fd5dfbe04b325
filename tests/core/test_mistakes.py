"""The mistakes of a first day with zeroshard: each is answered by name, with its remedy, once."""

from __future__ import annotations

import copy
import os
import resource
import signal
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from models import Stack, sgd, tokens
from quiet import no_warnings
from ranks import on_ranks
from torch import Tensor, nn
from twin import FEW_STAGES, build, engine_steps, refusal, step, steps, update

import zeroshard
from zeroshard import CollectiveError, ConfigError, UsageError
from zeroshard.engine.config.load import load_config
from zeroshard.testing import RankError, run_ranks

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 3,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 2},
}


# ---------------------------------------------------------------------- wrappers and conversions


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_ddp_around_a_sharded_model_is_named(rank: int, stage: int) -> None:
    model, sharded = build(stage, make_optimizer=sgd)
    message = refusal(lambda: step(nn.parallel.DistributedDataParallel(model), sharded, rank, 0))
    assert "DDP" in message or "DistributedDataParallel" in message
    assert "leave" in message.lower() and "unsharded(" not in message, "the remedy is not to gather"


@pytest.mark.parametrize("how", ["bfloat16", "to", "half"])
def test_a_conversion_of_a_model_at_stage_3_says_when_to_convert_it(how: str) -> None:
    model, _ = build(3)
    with pytest.raises(UsageError, match=r"`\w+` was called for it\. Convert the whole model .* before shard\(\)"):
        model.to(torch.bfloat16) if how == "to" else getattr(model, how)()


# ---------------------------------------------------------------------- what would train wrongly


def backward(model: Any, rank: int, number: int = 0) -> None:
    model(*tokens(rank, number)).backward()


def converted(model: Any, sharded: Any, rank: int) -> None:
    model.bfloat16()
    sharded.optimizer.step()


def set_after_a_backward(model: Any, sharded: Any, rank: int) -> None:
    model(*tokens(rank, 0)).backward()
    model.head.weight.grad = torch.zeros(31, 12)
    sharded.optimizer.step()


def one_of_the_users_among_dropped(model: Any, sharded: Any, rank: int) -> None:
    backward(model, rank)
    model.head.weight.grad = None
    model.head.weight.grad = torch.ones(model.head.weight.shape)
    for parameter in model.blocks.parameters():
        parameter.grad = None
    sharded.optimizer.step()


def drop_before_a_backward(model: Any, sharded: Any, rank: int) -> None:
    backward(model, rank)
    model.head.weight.grad = None
    backward(model, rank, 1)


def replaced_parameter(model: Any, sharded: Any, rank: int) -> None:
    model.blocks[1].up.weight = nn.Parameter(torch.zeros(33, 12))
    step(model, sharded, rank, 1)


def copied(model: Any, sharded: Any, rank: int) -> None:
    """Below stage 3 a block has nothing to gather, and its copy computes with the same parameters."""
    x = torch.ones(1, 12)
    if sharded.policy.parameters.sharded:
        with pytest.raises(UsageError, match=r"is a copy\.copy\(\) of a module"):
            copy.copy(model.blocks[0])(x)
    else:
        assert torch.equal(copy.copy(model.blocks[0])(x), model.blocks[0](x))
    copy.copy(model)(*tokens(rank, 0))


def data_of_another_shape(model: Any, sharded: Any, rank: int) -> None:
    model.head.weight.data = model.head.weight.data[:1]
    sharded.optimizer.state_dict()
    zeroshard.unsharded(model).__enter__()


def changed_groups(model: Any, sharded: Any, rank: int) -> None:
    sharded.optimizer.param_groups[0]["params"] = sharded.optimizer.param_groups[0]["params"][:2]
    backward(model, rank)
    sharded.optimizer.step()


def step_in_a_hook(model: Any, sharded: Any, rank: int) -> None:
    """As in torch's tutorial on optimizers that step in hooks: the gradients of the other parameters would be lost."""
    model.embedding.weight.register_post_accumulate_grad_hook(lambda _: sharded.optimizer.step())
    backward(model, rank)


def group_before_the_step(model: Any, sharded: Any, rank: int) -> None:
    backward(model, rank)
    sharded.optimizer.add_param_group({"params": []})


def step_after_remove(model: Any, sharded: Any, rank: int) -> None:
    sharded.remove()
    backward(model, rank)
    sharded.optimizer.step()


def changed_on_one_rank(model: Any, sharded: Any, rank: int) -> None:
    backward(model, rank)
    if rank == 1:
        model.head.weight.grad.mul_(0.5)
    sharded.optimizer.step()


MISUSES: dict[str, tuple[Callable[[Any, Any, int], object], str]] = {
    "a conversion": (converted, r"weight|scale|unsharded"),
    "a gradient set after a backward": (set_after_a_backward, r"embedding\.weight\.grad was set after a backward"),
    "a gradient set among dropped ones": (one_of_the_users_among_dropped, "was set after a backward"),
    "a gradient set to None before a backward": (drop_before_a_backward, "set None after the last one"),
    "a gradient changed on one rank": (
        changed_on_one_rank, r"embedding\.weight was changed through its `grad` on ranks \[1\] only"
    ),
    "a replaced parameter": (replaced_parameter, r"blocks\.1\.up\.weight is no longer the tensor"),
    "a shallow copy": (copied, r"is a copy\.copy\(\) of a module of a sharded model"),
    "data of another shape": (
        data_of_another_shape, r"embedding\.weight (was given data of \(1, 12\)|is sharded at rest)"
    ),
    "param groups that were changed": (changed_groups, "param groups are not those"),
    "a step inside a backward": (
        step_in_a_hook, r"optimizer\.step\(\) was called inside a backward.*Step after the backward"
    ),
    "a group of parameters of no model": (
        lambda model, sharded, rank: sharded.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]}),
        "1 of the new param group's parameters are not in the model",
    ),
    "a group before the step": (group_before_the_step, "End the step first"),
    "a step after remove": (step_after_remove, "remove"),
}  # fmt: skip
GOES_ON = {
    "a gradient set after a backward", "a gradient set among dropped ones", "a gradient set to None before a backward",
    "a gradient changed on one rank", "a shallow copy", "a group before the step",
}  # fmt: skip


@pytest.mark.ranks(2)
@FEW_STAGES
@pytest.mark.parametrize("misuse", MISUSES)
@pytest.mark.quick(len(MISUSES))
def test_what_would_train_wrongly_is_refused_by_name(rank: int, stage: int, misuse: str) -> None:
    do, message = MISUSES[misuse]
    model, sharded = build(stage, make_optimizer=sgd)
    step(model, sharded, rank, 0)
    with pytest.raises(UsageError, match=message):
        do(model, sharded, rank)
    sharded.optimizer.zero_grad()
    if misuse in GOES_ON:
        step(model, sharded, rank, 1)


# ---------------------------------------------------------------------- ranks that do different things


@pytest.mark.ranks(2, fresh=True, collective_timeout=5)
@pytest.mark.parametrize(("by", "told"), [("engine", 'save_checkpoint "global_step1"'), ("sharded", 'save "a"')])
def test_a_save_on_one_rank_is_named(rank: int, by: str, told: str) -> None:
    """No message speaks of an asynchronous save, since there is none."""
    if by == "engine":
        engine, *_ = zeroshard.initialize(model=Stack(), config=CONFIG)
        train, save = partial(engine_steps, engine, rank), partial(engine.save_checkpoint, "unused")
    else:
        model, sharded = build(2, make_optimizer=sgd)
        train, save = partial(steps, model, sharded, rank), partial(sharded.save, "unused", "a")
    with pytest.raises(CollectiveError) as caught:
        for number in range(3):
            train([number])
            if rank == 0:
                save()
    assert f"call {told} on every rank or on none" in str(caught.value)
    assert "asynchronous" not in str(caught.value)


def test_a_failed_gather_is_told_once() -> None:
    """torch runs the hook after a forward that raised, too, and would print what it raises."""

    def body(rank: int) -> None:
        model, sharded = build(3, make_optimizer=sgd)
        step(model, sharded, rank, 0)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            with pytest.raises(CollectiveError, match=r"rank 1 closed .*\n.*out-of-memory killer.* dmesg"):
                step(model, sharded, rank, 1)
        assert not [one for one in told if "always_call" in str(one.message)], "told by torch, too"
        os._exit(7)

    with pytest.raises(RankError) as caught:
        run_ranks(body, 2, collective_timeout=5)
    assert "rank 0 failed:\nended with exit status 7" in str(caught.value)


# ---------------------------------------------------------------------- configs


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage: a ZeRO stage is 0, 1, 2 or 3, not 4. Choose"),
        ({"zero_optimization": 2}, 'zero_optimization: 2 is not a block of keys. Write "zero_optimization": {"stage": 2}.'),
        ({"bf16": True}, 'bf16: True is not a block of keys. Write "bf16": {"enabled": true}.'),
        ({"bfloat16": True}, 'bfloat16: True is not a block of keys. Write "bfloat16": {"enabled": true}.'),
        ({"optimizer": "AdamW"}, 'Write "optimizer": {"type": "AdamW"}.'),
        ({"scheduler": "WarmupLR"}, 'Write "scheduler": {"type": "WarmupLR"}.'),
        ({"zero_optimization": {"offload_optimizer": "cpu"}}, 'Write "offload_optimizer": {"device": "cpu"}.'),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}}, "optimizer states are to be stored"),
        ({"train_micro_batch_size_per_gpu": 0}, "the value must be greater than 0 (it is 0)"),
        ({"train_batch_size": 8}, "start them with torchrun"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_answered_in_plain_words(more: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({**CONFIG, **more}, 1)
    message = str(caught.value)
    assert expected in message
    assert "Input" not in message and "instance of" not in message, "pydantic's words"
    assert message.count("zero_optimization.stage") <= 1


def test_an_object_and_its_block_in_the_config_is_a_warning() -> None:
    model = Stack()
    with pytest.warns(
        UserWarning, match=r"the optimizer that was passed is used, .*`optimizer` \(SGD\) has no effect\. Leave"
    ):
        engine, *_ = zeroshard.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=CONFIG)
    assert isinstance(engine.optimizer.optimizer, torch.optim.AdamW)
    with no_warnings():
        zeroshard.initialize(model=Stack(), config=CONFIG)


# ---------------------------------------------------------------------- the same data


def told_of_batches(take: Callable[[], object]) -> list[str]:
    """Call a function, and return what warnings said about first batches."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        take()
    return [str(one.message) for one in told if "first batch" in str(one.message)]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("batches", "ranks"), [("same", 1), ("different", 2), ("same", 2)])
def test_a_first_batch_that_is_the_same_on_all_ranks_is_one_warning(stage: int, batches: str, ranks: int) -> None:
    def body(rank: int) -> list[str]:
        model, sharded = build(stage, make_optimizer=sgd)
        with torch.no_grad():
            model(*tokens(0, 0))  # an evaluation of the same data is no mistake
        return told_of_batches(lambda: steps(model, sharded, rank if batches == "different" else 0, range(3)))

    first, *others = on_ranks(body, ranks)
    assert others == [[]] * (ranks - 1)
    assert len(first) == (batches == "same" and ranks == 2)
    if first:
        assert first[0].startswith("the first batch is the same on all 2 ranks") and "DistributedSampler" in first[0]


BATCHES: dict[str, Any] = {
    "bool": torch.tensor([True, False]), "view": torch.arange(12).view(3, 4).t(), "empty": torch.empty(0),
    "half": torch.ones(3, dtype=torch.bfloat16), "complex": torch.ones(3, dtype=torch.complex64),
    "nested": {"a": [torch.ones(2), "text"], "b": None},
}  # fmt: skip


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", BATCHES)
def test_any_batch_can_be_compared(rank: int, kind: str) -> None:
    class Model(nn.Linear):
        def forward(self, batch: Any) -> Tensor:
            return super().forward(torch.ones(2, 3)).sum()

    model, sharded = build(2, make_model=lambda: Model(3, 1), make_optimizer=sgd)
    told = told_of_batches(lambda: update(model(BATCHES[kind]), sharded.optimizer))
    assert len(told) == (rank == 0 and kind != "empty")


# ---------------------------------------------------------------------- torch's errors


def notes_of(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", ()))


@pytest.mark.parametrize("where", ["forward", "step", "engine"])
@pytest.mark.parametrize("kind", [MemoryError, torch.OutOfMemoryError, RuntimeError])
def test_out_of_memory_has_a_hint(where: str, kind: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    """In a forward, a step, and an engine's backward."""
    error = kind("DefaultCPUAllocator: can't allocate memory: you tried to allocate 80 bytes")

    def fail(*_: Any, **__: Any) -> None:
        raise error

    if where == "engine":
        engine, *_ = zeroshard.initialize(model=Stack(), config=CONFIG)
        loss = engine(*tokens(0, 0))
        loss.register_hook(fail)
        with pytest.raises(kind):
            engine.backward(loss)
    else:
        model, sharded = build(3, make_optimizer=sgd)
        if where == "forward":
            monkeypatch.setattr(model.blocks[1].up, "forward", fail)
            with pytest.raises(kind):
                model(*tokens(0, 0))
        else:
            model(*tokens(0, 0)).backward()
            monkeypatch.setattr(sys.modules["torch.optim.sgd"], "sgd", fail)
            with pytest.raises(kind):
                sharded.optimizer.step()
    assert notes_of(error).count("ran out of memory") == 1, "told once, whatever modules it passed"
    assert "zeroshard plan" in notes_of(error) and "memory_report" in notes_of(error)


@pytest.mark.ranks(1, fresh=True)
def test_memory_that_the_system_refuses_has_a_hint(rank: int) -> None:
    class Greedy(Stack):
        def run(self, x: Tensor) -> Tensor:
            return super().run(x) + torch.empty(2**34).sum()

    model, _ = build(2, make_model=Greedy)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2**34, limits[1]))
    try:
        with pytest.raises(RuntimeError) as caught:
            model(*tokens(rank, 0))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert "this rank ran out of memory" in notes_of(caught.value)


@pytest.mark.parametrize(("width", "hint"), [(3, "Cast the inputs"), (4, "")])
def test_inputs_of_another_dtype_have_a_hint_and_those_of_another_shape_have_none(width: int, hint: str) -> None:
    model, _ = build(2, make_model=lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)), precision=torch.bfloat16)
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(2, width, dtype=None if hint else torch.bfloat16))
    assert hint in notes_of(caught.value) and bool(notes_of(caught.value)) == bool(hint)
