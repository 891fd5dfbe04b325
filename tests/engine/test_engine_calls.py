"""Engines give the bits of the plain road, whichever of DeepSpeed's methods a loop calls, at every stage."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from insides import sharded_of
from models import Stack, tokens
from quiet import no_warnings
from ranks import on_ranks
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from twin import LARGE_BUCKETS, STAGES, build_engine, close, engine_steps, expect_equal, microbatch, same, whole

import zeroshard
from zeroshard import CheckpointError, Engine, Policy, Precision, UsageError
from zeroshard.engine.readers import Readers
from zeroshard.testing import Workload, train

STEPS = 3


def config(stage: int, accumulation: int = 2, **blocks: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4}},
        **blocks,
    }


def make(stage: int, accumulation: int = 2, **blocks: Any) -> Engine:
    return build_engine(stage, **config(stage, accumulation, **blocks))


# ---------------------------------------------------------------------- loops

Loop = Callable[[Engine, list[Any]], None]
"""Takes a step on some microbatches."""


def each(backward: Callable[[Engine, Tensor], object]) -> Loop:
    """Return the documented loop, with this call in place of engine.backward(loss)."""

    def loop(engine: Engine, microbatches: list[Any]) -> None:
        for one in microbatches:
            backward(engine, engine(*one))
            engine.step()

    return loop


as_documented = each(lambda engine, loss: engine.backward(loss))


def as_accelerate(engine: Engine, microbatches: list[Any]) -> None:
    for number, one in enumerate(microbatches):
        loss = engine(*one)
        last = number + 1 == len(microbatches)
        engine.set_gradient_accumulation_boundary(is_boundary=last)
        engine.backward(loss / len(microbatches), scale_wrt_gas=False)
        if last:
            engine.step()


def without_sync(engine: Engine, microbatches: list[Any]) -> None:
    *first, last = microbatches
    with engine.no_sync():
        for one in first:
            engine.backward(engine(*one) / len(microbatches))
    engine.backward(engine(*last) / len(microbatches))
    engine.step()


def in_one_microbatch(engine: Engine, microbatches: list[Any]) -> None:
    for one in microbatches:
        engine.backward(engine(*one) / len(microbatches))
    engine.step()
    assert engine.global_samples == engine.train_batch_size() * 2 * engine.global_steps, (
        "each backward was a microbatch's"
    )


def by_the_optimizer(engine: Engine, microbatches: list[Any]) -> None:
    with engine.no_sync():
        engine.backward(engine(*microbatches[0]) / 2)
    engine.backward(engine(*microbatches[1]) / 2)
    before = engine.get_lr()
    engine.optimizer.step()
    assert engine.get_lr() == before, "the scheduler is the caller's"
    engine.lr_scheduler.step()
    engine.optimizer.zero_grad()


LOOPS: dict[str, tuple[Loop, int, dict[str, Any]]] = {
    "loss.backward()": (each(lambda _, loss: loss.backward()), 2, {}),
    "engine.scale(loss).backward()": (each(lambda engine, loss: engine.scale(loss).backward()), 2, {}),
    "the boundary set by hand": (as_accelerate, 2, {}),
    "a window longer than the config's": (as_accelerate, 1, {}),
    "no_sync": (without_sync, 1, {}),
    "optimizer.step()": (by_the_optimizer, 1, {}),
    "managed_gradient_accumulation: false": (in_one_microbatch, 1, {"managed_gradient_accumulation": False}),
}
"""Loops that take the same steps as the documented one, with their gradient_accumulation_steps and other keys."""


def run(engine: Engine, rank: int, loop: Loop = as_documented) -> dict[str, Tensor]:
    """Take STEPS steps of two microbatches each."""
    for step in range(STEPS):
        loop(engine, [tokens(rank, 2 * step), tokens(rank, 2 * step + 1)])
    assert engine.global_steps == STEPS
    return whole(engine.module)


@pytest.mark.ranks(2)
@pytest.mark.quick(2)
@pytest.mark.parametrize("stage", range(4))
def test_loops_that_say_the_same_give_the_same_bits(rank: int, stage: int) -> None:
    wanted = run(make(stage), rank)
    for name, (loop, accumulation, more) in LOOPS.items():
        assert same(wanted, run(make(stage, accumulation, **more), rank, loop)), name


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", range(4))
def test_gradients_of_several_backwards_and_of_ranks_are_summed(rank: int, stage: int) -> None:
    plain, several = make(0, 1), make(stage, 1)
    for step in range(STEPS):
        microbatch(plain, plain(*tokens(rank, 2 * step)) + plain(*tokens(rank, 2 * step + 1)))
        first, second = several(*tokens(rank, 2 * step)), several(*tokens(rank, 2 * step + 1))
        several.backward(first)
        microbatch(several, second)
    close(whole(plain.module), whole(several.module))
    sums, means = (make(stage, 1, gradient_allreduce_op=name, gradient_clipping=0.0) for name in ("sum", "mean"))
    for engine in (sums, means):
        engine_steps(engine, rank, [0])
    assert sums.get_global_grad_norm() == 2 * means.get_global_grad_norm()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", range(4))
def test_fp16_asks_for_the_loss_scale(rank: int, stage: int, tmp_path: Path) -> None:
    half = {"fp16": {"enabled": True, "initial_scale_power": 8}}
    scaled, _, _ = LOOPS["engine.scale(loss).backward()"]
    assert same(run(make(stage, **half), rank), run(make(stage, **half), rank, scaled))
    engine = make(stage, 1, **half)
    assert engine.optimizer.loss_scale == engine.optimizer.cur_scale == engine.loss_scaler.scale == 256
    engine(*tokens(rank, 0)).backward()
    with pytest.raises(UsageError, match=r"engine.scale\(loss\)"):
        engine.step()
    engine.zero_grad()
    engine.backward(engine(*tokens(rank, 0)) * float("inf"))
    assert not engine.step().applied
    assert engine.optimizer.overflow and engine.skipped_steps == 1 and not engine.was_step_applied()
    engine.backward(engine(*tokens(rank, 0)))
    assert engine.step().applied and not engine.optimizer.overflow
    engine.save_checkpoint(tmp_path)
    other = make(stage, 1, fp16={"enabled": True, "initial_scale_power": 4})
    other.load_checkpoint(tmp_path)
    assert other.optimizer.loss_scale == other.loss_scaler.scale == engine.loss_scaler.scale


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", range(4))
def test_a_step_without_a_backward_updates_nothing(rank: int, stage: int) -> None:
    engine = make(stage, 1)
    before = whole(engine.module)
    engine.step()
    assert same(before, whole(engine.module))


@pytest.mark.ranks(2)
def test_a_model_whose_output_is_its_last_layers_accumulates(rank: int) -> None:
    """Its last layer's backward begins together with its own: it is reduced before its gradients come, and once more after."""
    work = Workload(
        lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)),
        lambda rank, number: (torch.randn(2, 8, generator=torch.Generator().manual_seed(10 * number + rank)),),
        compute_loss=lambda model, batch: model(*batch).square().mean(),
        microbatches=2,
    )
    expect_equal(rank, work, STAGES)


@pytest.mark.ranks(2)
@pytest.mark.quick(2)
@pytest.mark.parametrize("stage", range(4))
def test_engines_one_after_another_on_one_model(rank: int, stage: int) -> None:
    wanted = run(make(stage), rank)
    first = make(stage)
    first.backward(first(*tokens(rank, 5)))
    first.destroy()
    assert type(next(first.module.parameters())) is nn.Parameter
    torch.manual_seed(0)
    first.module.load_state_dict(Stack().state_dict())
    again = zeroshard.initialize(model=first.module, config=config(stage))[0]
    assert same(wanted, run(again, rank))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("stage", range(4))
def test_engine_and_plain_road_give_the_same_bits(rank: int, stage: int, accumulation: int, bf16: bool) -> None:
    settings = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": bf16},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage},
    }
    torch.manual_seed(0)
    model = Stack()
    engine, *_ = zeroshard.initialize(model=model, config=settings)
    assert engine.module is model
    losses = engine_steps(engine, rank, range(4 * accumulation))
    assert engine.global_steps == 4
    assert engine.global_samples == 4 * 3 * accumulation * 2
    mine = whole(model)
    norm = engine.get_global_grad_norm()

    dtype = torch.bfloat16 if bf16 else None
    precision = Precision(dtype, accumulate_dtype=dtype if accumulation == 1 else None)
    adamw = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, fused=True)
    work = Workload(Stack, tokens, adamw, steps=4, microbatches=accumulation, max_norm=0.5)
    plain = train(rank, work, Policy.stage(stage), precision=precision, bucket_numel=LARGE_BUCKETS)
    assert torch.equal(plain.losses, torch.stack(losses).float())
    assert plain.norms[-1] == norm
    assert same(plain.parameters, mine)


@pytest.mark.ranks(2)
def test_training_data_is_split_over_ranks(rank: int) -> None:
    settings = {"train_micro_batch_size_per_gpu": 5, "optimizer": {"type": "Adam"}}
    data = TensorDataset(torch.arange(20))
    _, _, loader, _ = zeroshard.initialize(model=Stack(), config=settings, training_data=data)
    assert loader is not None
    mine = torch.cat([batch for (batch,) in loader])
    everyone = [torch.empty_like(mine) for _ in range(2)]
    torch.distributed.all_gather(everyone, mine)
    assert torch.cat(everyone).sort().values.tolist() == list(range(20))


# ---------------------------------------------------------------------- mistakes


def two_kinds_of_backward(engine: Engine) -> None:
    engine.set_train_batch_size(2)
    engine_steps(engine, 0, [0])
    engine(*tokens(0, 1)).backward()
    engine.step()


def two_ends(engine: Engine) -> None:
    engine.backward(engine(*tokens(0, 0)))
    engine.optimizer.step()
    for _ in range(2):
        with pytest.raises(UsageError, match="Call one of them"):
            engine.step()
    engine.step()


def a_step_after_an_aborted_backward(engine: Engine) -> None:
    hook = engine.module.embedding.weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.backward(engine(*tokens(0, 0)))
    hook.remove()
    engine(*tokens(0, 0))
    engine.step()


MISTAKES: dict[str, tuple[Callable[[Engine], object], str]] = {
    "two kinds of backward": (two_kinds_of_backward, "Use one of them throughout a step"),
    "two ends of a step": (two_ends, "Call one of them"),
    "an aborted backward": (a_step_after_an_aborted_backward, "was aborted"),
    "a second engine": (lambda one: zeroshard.initialize(model=one.module, config=config(2)), "sharded already"),
    "an optimizer's name": (
        lambda _: zeroshard.initialize(model=Stack(), optimizer="adam", config=config(2)),
        r"initialize\(optimizer=\.\.\.\) is a str\. Pass a torch optimizer",
    ),
    "a list to keep": (lambda one: one.save_checkpoint("x", client_state=[1]), "client_state is a list: pass a dict"),
    "an empty microbatch": (lambda one: one.set_train_micro_batch_size(0), "1 or more"),
    "a sampler": (lambda one: one.deepspeed_io([0, 1], data_sampler=[]), "data_sampler"),
    "a name for safetensors": (
        lambda one: one.save_16bit_model("x", "model.safetensors"),
        r"model\.safetensors is a name for safetensors. .*engine\.export",
    ),
    "copy": (copy.copy, "cannot be copied"),
    "deepcopy": (copy.deepcopy, "cannot be copied"),
    "pickle": (pickle.dumps, "cannot be copied"),
    "torch.save": (lambda one: torch.save(one, io.BytesIO()), "cannot be copied"),
}
"""What users do, and what they are told."""


def test_after_a_mistake_the_engine_trains_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    engine = make(2, 1)
    for name, (mistake, told) in MISTAKES.items():
        counted = engine.micro_steps + (name == "two ends of a step")
        with pytest.raises(UsageError, match=told):
            mistake(engine)
        engine.zero_grad()
        engine.set_train_batch_size(1)
        assert engine.global_steps == engine.micro_steps == counted, name
        engine_steps(engine, 0, [0])
        assert engine.was_step_applied(), name
    assert not any(tmp_path.iterdir())


def test_a_destroyed_engine_evaluates_and_does_not_train() -> None:
    engine = make(3, 1)
    engine.destroy()
    with pytest.raises(UsageError, match="make a new Trainer"):
        engine(*tokens(0, 0))
    with torch.no_grad():
        assert torch.isfinite(engine(*tokens(0, 0)))


def test_a_refused_initialize_leaves_the_models_forwards() -> None:
    model = Stack()
    units_checkpointed = {"activation_checkpointing": {"checkpoint_units": "auto"}}
    wrong = {"optimizer": {"type": "AdamW", "params": {"learning": 1e-2}}}
    forwards = [block.forward for block in model.blocks]
    with pytest.raises(zeroshard.ZeroshardError):
        zeroshard.initialize(model=model, config=config(1, 1, **units_checkpointed) | wrong)
    assert [block.forward for block in model.blocks] == forwards


@pytest.mark.ranks(2)
def test_a_loop_that_misses_steps_is_warned_once(rank: int) -> None:
    """The first as a Trainer's own training_step does that calls loss.backward(): accelerate steps in accelerator.backward."""

    def never_steps(engine: Engine) -> None:
        for index in range(6):
            engine(*tokens(rank, index)).backward()
            engine.zero_grad()

    with pytest.warns(
        UserWarning, match=r"engine\.step\(\) has not been called so far: nothing has been train"
    ) as told:
        never_steps(make(2, 1))
    assert len(told) == 1
    engine = make(2, 2)
    engine.backward(engine(*tokens(rank, 0)))
    engine.backward(engine(*tokens(rank, 1)))
    with pytest.warns(UserWarning, match="after 2 backwards, with gradient_accumulation_steps 2"):
        engine.step()
    with no_warnings():
        engine = make(2, 2)
        engine.zero_grad()  # there is nothing to drop
        engine_steps(engine, rank, range(4))
        never_steps(engine)


def test_sums_of_gradients_are_in_fp32_unless_a_config_says_otherwise() -> None:
    """Of a config's own number of microbatches, tests/engine/test_config.py tests it."""
    bf16 = {"bf16": {"enabled": True}}
    unmanaged, engine = make(1, 1, **bf16, managed_gradient_accumulation=False), make(1, 1, **bf16)
    assert sharded_of(unmanaged).dtypes.accumulate is torch.float32
    engine.set_train_batch_size(1)
    with pytest.warns(UserWarning, match=r"set_train_batch_size\(4\).*summed in torch\.bfloat16.*grad_accum_dtype"):
        engine.set_train_batch_size(4)
    with pytest.warns(UserWarning, match=r"no_sync\(\)"), engine.no_sync():
        pass
    with no_warnings():
        make(1, 1, **bf16, data_types={"grad_accum_dtype": "bf16"}).set_train_batch_size(4)
        make(1, 1).set_train_batch_size(4)


# ---------------------------------------------------------------------- state dicts and checkpoints


class Odd(nn.Module):
    """A state that is no tensor, tied weights, buffers, and attributes by the names of methods of the engine."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 5
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("kept", torch.ones(3))
        self.register_buffer("left_out", torch.ones(3), persistent=False)
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("numbers", torch.zeros(0, dtype=torch.int64))

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 7}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"version": 7}

    def forward(self, indices: Tensor) -> Tensor:
        return self.head(self.embedding(indices)).square().mean()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise AssertionError("the engine was asked for a copy, and passed it on to the model")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", (1, 3))
def test_state_dicts_of_an_odd_model(rank: int, stage: int, tmp_path: Path) -> None:
    engine = build_engine(stage, make_model=Odd)
    microbatch(engine, engine(torch.arange(4)))
    assert engine.was_step_applied()
    names = {"_extra_state", "embedding.weight", "head.weight", "kept", "empty", "numbers"}
    for state in (engine.module_state_dict(), engine.consolidated_state_dict()):
        if state is not None:
            assert set(state) == names and state["_extra_state"] == {"version": 7}
            assert state["embedding.weight"].data_ptr() == state["head.weight"].data_ptr()
            assert state["kept"].shape == (3,) and state["numbers"].dtype is torch.int64
    engine.load_module_state_dict(engine.module_state_dict())
    engine.save_16bit_model(tmp_path, "model.bin")
    read = torch.load(tmp_path / "model.bin")
    assert read["kept"].dtype == torch.float32 and read["_extra_state"] == {"version": 7}
    with pytest.raises(UsageError, match="cannot be copied"):
        copy.deepcopy(engine)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_weights_come_together_on_rank_0_and_in_a_file(rank: int, stage: int, bf16: bool, tmp_path: Path) -> None:
    """The file has the dtype that the model trains in; `torch.load` reads it."""
    engine = make(stage, bf16={"enabled": bf16})
    wanted = engine.module_state_dict()
    gathered = engine.consolidated_state_dict()
    by_trainers = engine._zero3_consolidated_16bit_state_dict()
    assert (gathered is None) == (rank != 0)
    assert by_trainers.keys() == (gathered or {}).keys()
    if gathered is not None:
        assert same(gathered, wanted)
        assert gathered["head.weight"].data_ptr() == gathered["embedding.weight"].data_ptr(), "ties stay ties"
    else:
        with pytest.raises(UsageError, match="rank 0 has all of it"):
            torch.save(by_trainers, tmp_path / "empty.pt")
    assert engine.save_16bit_model(tmp_path)
    assert engine.save_16bit_model(tmp_path, "weights.bin")
    for name in ("pytorch_model.bin", "weights.bin"):  # the first is DeepSpeed's
        read = torch.load(tmp_path / name)
        assert same(read, wanted)
        assert {value.dtype for value in read.values()} == {torch.bfloat16 if bf16 else torch.float32}


def test_an_adapters_file_has_the_frozen_parameters_that_peft_saves_in_it() -> None:
    """Trainers leave frozen parameters out at stage 3, and PEFT saves the embeddings that an adapter targets."""
    peft = pytest.importorskip("peft")
    from families import llama

    def body(rank: int) -> set[str]:
        torch.manual_seed(0)
        model = peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"]))
        engine, *_ = zeroshard.initialize(model=model, config=config(3))
        state = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
        return {name for name in state if "lora" not in name}

    assert on_ranks(body, 2) == [{"base_model.model.model.embed_tokens.base_layer.weight"}, set()]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_checkpoint_within_a_step_begins_the_step_anew(rank: int, stage: int, tmp_path: Path) -> None:
    engine, other = make(stage), make(stage)
    as_documented(engine, [tokens(rank, 0), tokens(rank, 1)])
    engine.backward(engine(*tokens(rank, 2)))
    engine.save_checkpoint(tmp_path)
    engine.step()
    engine_steps(engine, rank, [3])
    other.load_checkpoint(tmp_path)
    as_documented(other, [tokens(rank, 2), tokens(rank, 3)])
    assert same(whole(engine.module), whole(other.module))


@pytest.mark.ranks(2)
def test_folders_and_tags(rank: int, tmp_path: Path) -> None:
    engine = make(2)
    with pytest.warns(UserWarning, match="no checkpoint was loaded"):
        assert engine.load_checkpoint(tmp_path / "nothing") == (None, None)
    with pytest.warns(UserWarning, match="the ranks name different tags") if rank == 0 else contextlib.nullcontext():
        engine.save_checkpoint(tmp_path, tag=f"mine{rank}")
    assert engine.load_checkpoint(tmp_path, "mine0")[0] is not None
    with pytest.raises(CheckpointError, match="plain folder name"):
        engine.save_checkpoint(tmp_path, tag="")
    with pytest.raises(CheckpointError):
        engine.load_checkpoint(tmp_path, tag="")
    strict = make(2, checkpoint={"tag_validation": "FAIL"})
    with pytest.raises(CheckpointError, match='rank 0 "mine0", rank 1 "mine1"'):
        strict.save_checkpoint(tmp_path, tag=f"mine{rank}")
    make(2, checkpoint={"tag_validation": "ignore"}).save_checkpoint(tmp_path, tag=f"yours{rank}")
    assert (tmp_path / "yours0").is_dir() and not (tmp_path / "yours1").exists()


# ---------------------------------------------------------------------- schedules


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", range(4))
def test_a_schedule_that_fills_a_tensor_takes_effect(rank: int, stage: int) -> None:
    def run_with(lr: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = Stack()
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, foreach=False)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
        engine, *_ = zeroshard.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=settings)
        engine_steps(engine, rank, range(STEPS))
        assert float(engine.get_lr()[0]) == pytest.approx(1e-2 * 0.5**STEPS)
        return whole(model)

    close(run_with(torch.tensor(1e-2)), run_with(1e-2))


@pytest.mark.ranks(2)
def test_a_schedule_that_needs_a_metric(rank: int, tmp_path: Path) -> None:
    model = Stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    blocks = {key: value for key, value in config(2, 1).items() if key not in ("optimizer", "scheduler")}
    engine, *_ = zeroshard.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=blocks)
    engine.backward(engine(*tokens(0, rank)))
    with pytest.raises(UsageError, match="lr_kwargs"):
        engine.step()
    for _ in range(3):
        engine.step(lr_kwargs={"metrics": 1.0})
        engine.backward(engine(*tokens(0, rank)))
    assert engine.get_lr() == [0.01 * 0.5**2]
    engine.step(lr_kwargs={"metrics": 1.0})
    engine.save_checkpoint(tmp_path)
    engine.load_checkpoint(tmp_path)
    assert schedule.best == 1.0


def test_a_schedule_that_raises_leaves_a_counted_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(1)
    monkeypatch.setattr(engine.lr_scheduler, "step", lambda: 1 / 0)
    for number in range(4):
        engine.backward(engine(*tokens(0, number)))
        with pytest.raises(ZeroDivisionError) if number % 2 else contextlib.nullcontext():
            engine.step()
    assert (engine.global_steps, engine.global_samples) == (2, 4)


def test_an_optimizer_without_a_learning_rate_trains() -> None:
    class Own(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"]:
                    if parameter.grad is not None:
                        parameter.sub_(0.1 * parameter.grad)

    settings = config(1, 1, zero_allow_untested_optimizer=True)
    del settings["optimizer"], settings["scheduler"]
    model = Stack()
    engine, *_ = zeroshard.initialize(model=model, optimizer=Own(model.parameters(), {}), config=settings)
    engine_steps(engine, 0, [0])
    assert engine.was_step_applied()
    assert str(engine.get_lr()) == "[nan]"


@pytest.mark.parametrize("floors", [(1e-6, 0.0), (0.0, 1e-6)])
@pytest.mark.parametrize("kind", ["StepLR", "WarmupLR"])
def test_a_schedule_continues_when_min_lr_is_added_or_removed(
    kind: str, floors: tuple[float, float], tmp_path: Path
) -> None:
    params = {"StepLR": {"step_size": 1, "gamma": 0.5}, "WarmupLR": {"warmup_num_steps": 9, "warmup_max_lr": 0.1}}
    scheduler = {"type": kind, "params": params[kind]}
    engine, again = (make(1, 1, scheduler=scheduler, min_lr=floor) for floor in floors)
    engine_steps(engine, 0, range(3))
    engine.save_checkpoint(tmp_path)
    again.load_checkpoint(tmp_path)
    for number in range(4):
        assert again.get_lr() == engine.get_lr()
        engine_steps(again, 0, [number])
        engine_steps(engine, 0, [number])


# ---------------------------------------------------------------------- DeepSpeed's names

READ = {
    "amp_enabled": False,
    "bfloat16_enabled": False,
    "comm_report": {},
    "dp_world_size": 1,
    "dynamic_loss_scale": True,
    "fp16_auto_cast": True,
    "fp16_enabled": True,
    "get_data_types": (torch.float16, torch.float32),
    "get_global_grad_norm": None,
    "get_lr": [0.0],
    "get_mom": [(0.9, 0.99)],
    "global_rank": 0,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "gradient_predivide_factor": 4.0,
    "initial_dynamic_scale": 256.0,
    "loss_scale": 0.0,
    "managed_gradient_accumulation": True,
    "mp_world_size": 1,
    "optimizer_name": "AdamW",
    "optimizer_params": {"lr": 1e-2, "betas": [0.9, 0.99]},
    "scheduler_name": "WarmupLR",
    "scheduler_params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4},
    "steps_per_print": 7,
    "torch_autocast_enabled": False,
    "train_batch_size": 2,
    "train_micro_batch_size_per_gpu": 1,
    "wall_clock_breakdown": True,
    "was_step_applied": False,
    "world_size": 1,
    "zero_allgather_bucket_size": 3000,
    "zero_cpu_offload": True,
    "zero_offload_param": None,
    "zero_optimization": True,
    "zero_optimization_partition_gradients": True,
    "zero_optimization_partition_weights": False,
    "zero_optimization_stage": 2,
    "zero_overlap_comm": False,
    "zero_reduce_bucket_size": 2000,
    "zero_sub_group_size": 1000,
}
"""DeepSpeed's names, and the answer of an engine with the config below."""


def test_what_deepspeeds_names_answer() -> None:
    zero = {
        "stage": 2, "overlap_comm": False, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 2000,
        "allgather_bucket_size": 3000, "sub_group_size": 1000,
    }  # fmt: skip
    engine = make(
        2, zero_optimization=zero, optimizer={"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.99]}},
        fp16={"enabled": True, "auto_cast": True, "initial_scale_power": 8}, gradient_clipping=0.5, steps_per_print=7,
        gradient_predivide_factor=4.0, wall_clock_breakdown=True,
    )  # fmt: skip
    found = {}
    for name in READ:
        value = getattr(engine, name)
        found[name] = value() if callable(value) else value
        assert name in dir(engine) and inspect.getdoc(getattr(Engine, name)), name
    assert found == READ
    block = engine.zero_offload_optimizer()
    assert block is not None and block.device == "cpu"
    assert set(engine.memory_report()) == set(engine.memory_formula()) | {"buffers"}
    others = {"memory_report", "memory_formula", "zero_offload_optimizer"}
    assert {name for name in vars(Readers) if not name.startswith("_")} == READ.keys() | others


@pytest.mark.ranks(2)
def test_smaller_names_of_deepspeeds(rank: int) -> None:
    engine, other = make(2, 1), make(2, 1)
    assert isinstance(engine.optimizer.optimizer, torch.optim.AdamW)
    assert engine.optimizer.loss_scaler is engine.loss_scaler
    assert not engine.optimizer.dynamic_loss_scale and not engine.optimizer.needs_scaler()
    assert engine.client_optimizer is None and not engine.is_compiled
    engine.set_train_micro_batch_size(3)
    assert (engine.train_micro_batch_size_per_gpu(), engine.train_batch_size()) == (3, 6)
    assert len(engine.deepspeed_io(list(range(8)), batch_size=1)) == 4  # type: ignore[arg-type]
    for one in (engine, other):
        with one.coalesce_grad_reduction() if one is engine else contextlib.nullcontext():
            one.backward(one(*tokens(0, rank)))
            one.backward(one(*tokens(1, rank)))
        if one is engine:
            one.allreduce_gradients()
        one.step()
    assert same(whole(engine.module), whole(other.module))


def test_it_is_a_module() -> None:
    engine = make(3)
    assert isinstance(engine, nn.Module)
    assert engine.blocks is engine.module.blocks, "what it lacks is the model's"
    names = [name for name, _ in engine.module.named_parameters()]
    assert [name for name, _ in engine.named_parameters()] == [f"module.{name}" for name in names]
    state = engine.state_dict()
    for value in state.values():
        value.mul_(2.0)
    engine.load_state_dict(state)
    assert all(torch.equal(state[f"module.{name}"], value) for name, value in engine.module_state_dict().items())
    assert engine.eval() is engine and not engine.module.training and engine.train().module.training
    assert engine.config["zero_optimization"]["stage"] == 3 and engine.config.get("nothing") is None
    engine.backward(engine(*tokens(0, 0)))
    assert not engine.step().applied and not engine.was_step_applied()
    engine.backward(engine(*tokens(0, 1)))
    assert engine.step().applied and engine.was_step_applied()
    engine.set_train_batch_size(3)
    assert engine.gradient_accumulation_steps() == 3
